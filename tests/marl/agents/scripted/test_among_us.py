"""Scripted players of grid Among Us: what they say is understood, what careful ones say is true, what random ones say
is neutral, and what being careful is worth."""

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from envs.among_us.events import Killed, Look
from envs.among_us.reading import read
from envs.among_us.state import NAMES, Room
from envs.among_us.texts import COMPACT_TOKENS
from envs.among_us_v0 import parallel_env
from envs.core import END, Question, Style, TurnKind
from marl.agents.base import Request
from marl.agents.scripted import among_us, among_us_language
from marl.agents.scripted.among_us import Memory, credulous, make_player
from marl.agents.scripted.among_us_language import FORMS, Statement, Topic, accused, understand
from marl.agents.text import TextAgent
from marl.common.errors import UserError
from marl.learning.batch import collate, rows_of
from marl.model.tokens import CUE, Tokens, train_tokenizer
from marl.rollout.games import env_maker, scripted
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import GAMES, draw_games


@dataclass
class Talk:
    """A message and what its speaker had seen: rooms of itself and others since the last discussion, killings."""

    speaker: str
    role: str
    text: str
    visited: set[Room]
    seen: set[tuple[str, Room]]
    killings: set[tuple[str, str]]
    living: int


@dataclass
class Played:
    outcome: dict[str, Any]
    imposters: set[str]
    talk: list[Talk] = field(default_factory=list)
    kills: list[tuple[Look, list[str]]] = field(default_factory=list)  # what the killer saw, and who lived
    texts: list[str] = field(default_factory=list)


def play(seed: int, crew: str, imposter: str, **rules: Any) -> Played:
    """A game of scripted players, with tasks of three steps. No reply may be refused or cut."""
    env = parallel_env(**{"task_steps": 3, **rules})
    observations, infos = env.reset(seed=seed)
    names = env.facts["names"]
    players: dict[str, Memory] = {}
    for number, (agent, info) in enumerate(infos.items()):
        players[agent] = make_player(imposter if info["role"] == "imposter" else crew, seed * 16 + number, info["role"])
    visited: dict[str, set[Room]] = {agent: set() for agent in players}
    seen: dict[str, set[tuple[str, Room]]] = {agent: set() for agent in players}
    killings: dict[str, set[tuple[str, str]]] = {agent: set() for agent in players}
    looks: dict[str, Look] = {}
    game = Played({}, {names[agent] for agent in env.facts["imposters"]})
    resumed = False
    while env.agents:
        replies = {}
        living = int(env.state()[:, 2].sum())
        for agent, view in observations.items():
            game.texts.append(view["text"])
            for event in read(view["text"], env.style):
                if isinstance(event, Look):
                    if resumed:
                        visited[agent], seen[agent] = set(), set()
                    looks[agent] = event
                    visited[agent].add(event.room)
                    around = [*event.present, *(name for name, _ in event.entering)]
                    seen[agent] |= {(name, event.room) for name in around} | set(event.leaving)
                elif isinstance(event, Killed) and event.victim:
                    killings[agent].add((event.killer, event.victim))
            if view["turn"] == TurnKind.WAIT:
                players[agent].observe(view["text"])
                continue
            reply = replies[agent] = players[agent].reply(view["text"], view["options"])
            if view["turn"] == TurnKind.SPEAK:
                role = infos[agent]["role"]
                game.talk.append(Talk(names[agent], role, reply, visited[agent], seen[agent], killings[agent], living))
            elif reply.startswith("kill"):
                assert env._game is not None
                game.kills.append((looks[agent], list(env._game.living())))
        observations, _, _, _, infos = env.step(replies)
        resumed = any(info["entry"] == "vote" for info in infos.values())
        assert not any(info["error"] for info in infos.values())
        assert not any(" cut" in view["text"] or "was cut" in view["text"] for view in observations.values())
    game.outcome = infos["player_0"]["outcome"]
    return game


played = cache(play)  # games that several tests look at


@cache
def random_games() -> tuple[Tokens, list[str], list[str]]:
    """A tokenizer of the words of random games, what was said in them, and what was told."""
    games = [played(seed, "random", "random") for seed in range(15)]
    said = [talk.text for game in games for talk in game.talk]
    texts = [text for game in games for text in game.texts if text]
    return Tokens(train_tokenizer([*said, *texts], COMPACT_TOKENS, 1024)), said, texts


def examples() -> list[Statement]:
    """A statement for each form, so that each topic is met with every set of fields that it has."""
    made = []
    for topic, forms in FORMS.items():
        for form in forms:
            who, other = "Pink" if "{who}" in form else "", "Blue" if "{other}" in form else ""
            made.append(Statement(topic, who, other, (1, 2) if "{room}" in form else None))
    return made


@pytest.mark.parametrize("style", list(Style))
def test_what_is_said_is_understood(style: Style) -> None:
    for statement in examples():
        for seed in range(10):
            message = among_us_language.say([statement], style, Random(seed))
            assert message.endswith(f" {END}") and len(message.split()) <= 20
            assert understand(message.removesuffix(END)) == (statement,), message
    person = "Hm, I saw Red kill Blue in room (9,9)... vote for Red, not for blueish"
    assert understand(person) == (Statement(Topic.KILL, "Red", "Blue"), Statement(Topic.ACCUSE, "Red"))
    two = [Statement(Topic.WHERE, room=(0, 0)), Statement(Topic.ACCUSE, "Red")]
    assert understand(among_us_language.say(two, style, Random(0))) == tuple(two)


def test_a_credulous_listener_half_believes_the_last_accusations() -> None:
    candidates = ("red", "blue", "green")
    assert credulous([], candidates) == [pytest.approx(1 / 3)] * 3
    named = credulous(["i think it is blue"], candidates)
    assert sum(named) == pytest.approx(1) and named[1] == pytest.approx(math.exp(1.5) / (math.exp(1.5) + 2))
    both = credulous(["i think it is blue", "vote for red", "pink is the imposter"], candidates)
    assert both[0] > both[1] > both[2]
    assert both[0] / both[1] == pytest.approx(math.exp(1.5 * 0.9 - 1.5 * 0.81))
    assert credulous(["Blue is the imposter."], ("Red", "Blue")) == credulous(["blue is the imposter"], ("red", "blue"))


MEETING = (
    " grid 2 2 imposters 1 players red blue green pink orange you red crewmate tasks lab at bridge blue"
    " meeting red found orange at lab living red blue green pink"
)


OTHERS = Question("who is the imposter", ("blue", "green", "pink"), "pink")


def test_random_players_answer_as_the_credulous_believe() -> None:
    """Answers follow what the player heard, and do not depend on the truth."""
    heard = ["i think it is blue", "vote for green", "i trust pink", "blue looks guilty"]
    believed = credulous(heard, OTHERS.candidates)
    counts: Counter[str] = Counter()
    for seed in range(400):
        player = make_player("random", seed, "crewmate")
        player.observe(MEETING)
        for name, message in zip(("pink", "blue") * 2, heard, strict=True):
            player.observe(f" {name} says {message} {END}")
        assert isinstance(player, among_us.RandomPlayer)
        truth = OTHERS.candidates[seed % 3]
        answers = player.answers(Question(OTHERS.text, OTHERS.candidates, truth))
        assert len(answers) == among_us.ANSWERS
        counts[answers[-1]] += 1  # one of each, for independent draws
    assert believed[0] > 0.5 > believed[1] > believed[2]
    for name, share in zip(OTHERS.candidates, believed, strict=True):
        assert abs(counts[name] / 400 - share) < 4 * math.sqrt(share * (1 - share) / 400), (name, counts)


@pytest.mark.parametrize("name", ["random", "gullible", "random_wary", "gullible_wary"])
def test_who_found_the_body_is_not_suspected_by_players_that_are_not_wary(name: str) -> None:
    """Imposters don't report, so only wary players suspect the finder, whatever is said. All do if nobody else is left
    to suspect."""
    player = make_player(name, 0, "crewmate")
    assert isinstance(player, among_us.RandomPlayer)
    player.observe(MEETING.replace("meeting red", "meeting blue"))
    player.observe(f" green says vote for pink {END} pink says vote for blue {END}")
    found = Counter(answer for _ in range(200) for answer in player.answers(OTHERS))
    assert (found["blue"] > 0) == name.endswith("_wary") and found["pink"] > 0
    assert set(player.answers(Question(OTHERS.text, ("blue",), "blue"))) == {"blue"}
    player.observe(" meeting red found green at lab living red blue pink")  # a new discussion, without opinions
    again = Counter(a for _ in range(200) for a in player.answers(Question(OTHERS.text, ("blue", "pink"), "blue")))
    assert abs(again["pink"] / again.total() - 0.5) < 4 * math.sqrt(0.25 / again.total())


@pytest.mark.parametrize("name", ["random", "gullible", "random_wary", "gullible_wary"])
def test_players_believe_their_eyes_before_their_ears(name: str) -> None:
    """A witness answers with the killer, whatever is said. If the killer is no candidate, it answers from what it
    heard."""
    player = make_player(name, 0, "crewmate")
    assert isinstance(player, among_us.RandomPlayer)
    before, meeting = MEETING.split(" meeting")
    player.observe(before)
    player.observe(f" killer green victim orange meeting{meeting}")
    player.observe(f" green says vote for blue {END} blue says it was pink {END} green says vote for blue {END}")
    assert set(player.answers(Question(OTHERS.text, OTHERS.candidates, "blue"))) == {"green"}
    heard = Counter(
        answer for _ in range(100) for answer in player.answers(Question(OTHERS.text, ("blue", "pink"), "pink"))
    )
    assert heard["blue"] > heard["pink"]


def test_recorded_answers_are_what_a_base_learns_to_believe() -> None:
    """The corpus asks the player; its answer takes the truth's place, in the beliefs and in the batch."""
    make_env = env_maker({"game": "among_us", "style": "compact", "max_steps": 80, "tasks": 6})
    tokens, _, _ = random_games()
    episodes = rollout(draw_games(0, GAMES, count=40), everyone(scripted("among_us", tokens=tokens)), make_env, 20)
    recorded = [(e, b) for e in episodes for b in e.beliefs if b.role == "crewmate"]
    truths = [{e.facts["names"][a].lower() for a in e.facts["imposters"]} for e, _ in recorded]
    right = [b.question.answer in truth for (_, b), truth in zip(recorded, truths, strict=True)]
    # Beliefs of one discussion hang together, so games are counted, not answers.
    surplus: Counter[int] = Counter()
    talk = re.compile(rf"(?:says|speak.*?{re.escape(CUE)}).*?{re.escape(END)}")
    read = [talk.sub("", tokens.decode(e.streams[b.listener].tokens[: b.position])) for e, b in recorded]
    saw = [" killer" in text for text in read]
    finders = [re.findall(r" meeting (\w+)", text)[-1] for text in read]
    suspects = [set(b.question.candidates) - {name} for (_, b), name in zip(recorded, finders, strict=True)]
    chance = [1 / len(names) if names else 1.0 for names in suspects]
    assert all(hit for hit, eye in zip(right, saw, strict=True) if eye)
    questions = sum(saw) + saw.count(False) / among_us.ANSWERS  # who saw the killer answers once
    assert 0.1 < sum(saw) / questions < 0.5
    for (e, _), hit, share, eye in zip(recorded, right, chance, saw, strict=True):
        surplus[e.seed] += 0 if eye else hit - share  # type: ignore[assignment]
    spread = math.sqrt(sum(x * x for x in surplus.values()))
    assert len(recorded) > 150 and abs(sum(surplus.values())) < 3.5 * spread and 0 < sum(right) < len(right)
    seats = rows_of(episodes, {"scripted"})
    batch = collate(seats, {}, silent_roles=())
    expected = [b.question.answer_index for e, a in seats for b in e.beliefs if b.listener == a]
    assert batch.answer.tolist() == expected and len(set(expected)) > 1


KILL_SEEN = (
    " grid 2 2 imposters 1 players red blue green pink orange you red crewmate tasks lab at bridge blue green",
    " killer green victim orange at bridge blue green body orange",
    " meeting blue found orange at bridge living red blue green pink",
)


def ladder(name: str, seed: int, *texts: str) -> Memory:
    player = make_player(name, seed, "crewmate")
    for text in texts:
        player.observe(text)
    return player


def test_each_step_of_the_ladder_votes_on_more() -> None:
    """Any vote is for another: a witness's for the killer it saw, a detective's on evidence, a confidant's on talk."""
    options = ["red", "blue", "green", "pink", "skip"]
    votes = {
        name: Counter(ladder(name, seed, *KILL_SEEN).reply(" vote", options) for seed in range(30))
        for name in among_us.LADDER
    }
    assert set(votes["reporter"]) == {"blue", "green", "pink"} and max(votes["reporter"].values()) < 20
    assert all(set(votes[name]) == {"green"} for name in ("witness", "detective", "confidant"))
    near = (
        KILL_SEEN[0],
        " at bridge pink out blue galley out green lab body orange",
        " meeting red found orange at bridge living red blue green pink",
    )
    heard = (*near, f" green says i saw blue kill orange {END}")
    votes = {
        name: Counter(ladder(name, seed, *heard).reply(" vote", options) for seed in range(30))
        for name in among_us.LADDER
    }
    assert len(votes["witness"]) == 3  # it saw no kill
    assert set(votes["detective"]) == {"pink"} and set(votes["confidant"]) == {"blue"}


PRIVILEGED = tuple(float(name in ("Pink", "Blue")) for name in NAMES)


@pytest.mark.parametrize("name", list(among_us.ORACLES))
def test_an_oracle_knows_whatever_it_sees_and_hears(name: str) -> None:
    player = make_player(name, 0, "crewmate")
    assert isinstance(player, among_us.Oracle)
    player.know(PRIVILEGED)
    for text in (*KILL_SEEN, f" green says i saw green kill orange {END}"):
        player.observe(text)
    assert player.reply("", ["go_south", "wait", "report_orange", "go_east"]) == "report_orange"
    assert {tuple(accused(player.reply(" speak"))) for _ in range(20)} == {("Blue",)}  # of two, the palette's first
    assert player.reply(" vote", ("skip", "green", "red", "pink", "blue")) == "blue"
    player.observe(" votes blue 4 ejected blue meeting red found green at lab living red pink")
    assert player.reply(" vote", ("skip", "red", "pink")) == "pink"  # the one that lives
    assert isinstance(make_player(name, 0, "imposter"), among_us.RandomPlayer)


@pytest.mark.parametrize("name", ["careful", "careful_oracle"])
def test_careful_crewmates_and_oracles_do_their_tasks_and_report(name: str) -> None:
    player = make_player(name, 0, "crewmate")
    intro = " grid 2 2 imposters 1 players red blue green pink you red crewmate tasks lab lab at bridge blue"
    assert player.reply(intro, ("go_east", "wait", "go_south")) == "go_south"
    assert player.reply(" at lab task task", ("go_east", "go_north", "wait", "do_task")) == "do_task"
    assert player.reply(" done at lab task", ("do_task", "go_east", "go_north", "wait")) == "do_task"
    assert player.reply(" done at lab body blue", ("wait", "go_east", "report_blue", "go_north")) == "report_blue"


def test_what_random_players_say_depends_neither_on_role_nor_on_what_they_saw() -> None:
    texts = []
    for role in ("crewmate", "imposter"):
        for room in ("bridge", "lab"):
            player = make_player("random", 5, role)
            tasks = " tasks lab" if role == "crewmate" else ""
            player.observe(f" grid 2 2 imposters 1 players red blue green pink you red {role}{tasks} at {room} blue")
            player.observe(
                " killer pink victim green"
                if room == "lab"
                else " meeting blue found green at lab living red blue pink"
            )
            player.observe(" meeting blue found green at lab living red blue pink")
            texts.append([player.reply(" speak") for _ in range(20)])
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert len(set(texts[0])) > 10


def test_careful_crewmates_say_what_they_saw_and_imposters_kill_unseen_or_to_win() -> None:
    topics, kills = Counter[Topic](), 0
    for seed in range(40):
        game = played(seed, "careful", "careful", tasks=6)
        for sight, living in game.kills:
            witnesses = {*sight.present, *(name for name, _ in sight.entering)}
            assert len(witnesses) <= 1 or len(living) == 3
            kills += 1
        for talk in game.talk:
            if talk.role != "crewmate":
                continue
            for s in understand(talk.text):
                topics[s.topic] += 1
                assert s.who != talk.speaker
                if s.topic is Topic.KILL:
                    assert (s.who, s.other) in talk.killings
                if s.topic in (Topic.WHERE, Topic.TASK, Topic.WITH):
                    assert s.room in talk.visited
                if s.topic in (Topic.SAW, Topic.WITH):
                    assert (s.who, s.room) in talk.seen
    assert kills > 30 and {Topic.KILL, Topic.LAST, Topic.SAW, Topic.WITH, Topic.ACCUSE} <= set(topics)
    natural = play(3, "careful", "careful", tasks=6, style="natural")  # and both styles make the same game
    assert natural.outcome == played(3, "careful", "careful", tasks=6).outcome


@pytest.mark.parametrize(
    ("crew", "imposter", "low", "high"),
    [("random", "random", 0.01, 0.31), ("careful", "random", 0.84, 1), ("random", "careful", 0, 0.15),
     ("careful", "careful", 0.79, 1)],
)  # fmt: skip
def test_what_care_is_worth(crew: str, imposter: str, low: float, high: float) -> None:
    """Crew wins of 50 games, 6 tasks each. Of 3,000: .160, .947, .048, .915; the limits are 3 sigma away."""
    won = sum(played(seed, crew, imposter, tasks=6).outcome["winner"] == "crewmates" for seed in range(50)) / 50
    assert low <= won <= high


def test_compact_texts_are_one_token_a_word_and_recorded_choices_one_token() -> None:
    tokens, said, texts = random_games()
    for text in (*texts[:500], *said):
        assert len(tokens.encode(text)) == len(text.split()), text
    agent = TextAgent("random", lambda seed, role: make_player("random", seed, role), tokens)
    text = " grid 2 2 imposters 1 players red blue green pink you red crewmate tasks lab at bridge blue green pink"
    request = Request((0, "player_0"), 3, "crewmate", 0, TurnKind.CHOOSE, text, ("go_south", "wait", "do_task"))
    (reply,) = agent.act([request])
    assert len(reply.ids) == 1 and len(reply.legal) == 3 and reply.text in request.options
    lost = SimpleNamespace(reply=lambda text, options: "go_up")
    with pytest.raises(UserError, match=r"^The player 'lost' of role crewmate chose 'go_up'\. Its options are go_sou"):
        TextAgent("lost", lambda seed, role: lost, tokens).act([request])


def test_unknown_players_are_refused() -> None:
    known = "random, gullible, random_wary, gullible_wary, informed, .*, careful"
    with pytest.raises(ValueError, match=rf"no scripted player 'clever'.*{known}"):
        make_player("clever", 0, "crewmate")
