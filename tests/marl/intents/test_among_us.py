"""Intents in Among Us: what words accuse of, what an imposter must not say, and a player whose words carry its vote."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from envs.among_us.state import Role
from envs.among_us.texts import COMPACT_TOKENS
from envs.core import END
from marl.agents.model import ModelAgent
from marl.agents.scripted.among_us import make_player
from marl.agents.text import TextAgent
from marl.common.errors import UserError
from marl.intents import among_us_votes
from marl.intents.agent import CiceroConfig, Parts
from marl.intents.among_us import (
    Intent,
    TableConfig,
    Witness,
    accused_outright,
    crew_values,
    exposes,
    imposter_values,
    intent_text,
    mentioned,
    planned_vote,
    support,
)
from marl.intents.among_us_agent import TableAgent, VoteReader
from marl.intents.among_us_training import say_under, with_intents
from marl.intents.draws import Draw
from marl.learning.batch import collate, rows_of
from marl.metrics.claims import claims_of
from marl.model.policy import Policy, tiny_lm
from marl.model.tokens import StreamWriter, Tokens
from marl.report.transcripts import episode_to_json
from marl.report.views import render_text
from marl.rollout.games import env_maker, scripted
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from marl.types import Episode, Kind
from tests.marl.intents.resumed import assert_goes_on
from tests.marl.models import small_tokens, teach

ENV = {"game": "among_us", "style": "compact", "players": 5, "height": 1, "max_steps": 60}
QUIET = CiceroConfig(
    repetition=False, correspondence=None, value=1.0, candidates=1, draws=3,
    among_us=TableConfig(giveaway=None, facts=False),
)  # fmt: skip


@cache
def talker() -> Policy:
    """A small policy that knows a little of the grammar."""
    tokens = small_tokens(COMPACT_TOKENS)
    lm = tiny_lm(tokens.size, hidden_size=32, layers=1, intermediate_size=64, context=1024, generator_seed=1)
    policy = Policy(lm, tokens)
    batch = collate(rows_of(games(scripted("among_us", "careful", tokens), 2), {"careful"}), {})
    return teach(policy, batch.tokens, batch.reply, 60)


def games(agent: Any, count: int, cast: Any = None, **settings: Any) -> list[Episode]:
    return rollout(draw_games(5, 5, count=count), cast or everyone(agent), env_maker({**ENV, **settings}), 4)


@cache
def recorded() -> tuple[Episode, ...]:
    return tuple(games(scripted("among_us", "careful", talker().tokens), 6))


class Planted:
    """Stands for a reader whose voters follow the name that was mentioned last, nine times in ten."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens, self.engine = tokens, type("Engine", (), {"context": 1024})()

    def votes(
        self, streams: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], votes: Sequence[str], end: Any = None
    ) -> np.ndarray:
        found = np.full((len(streams), len(texts), len(votes)), 0.1 / (len(votes) - 1))
        for s, stream in enumerate(streams):
            for t, text in enumerate(texts):
                words = self.tokens.decode([*stream, *text]).replace("says", "").split()
                last = next(word for word in reversed(words) if word in votes)
                found[s, t, votes.index(last)] = 0.9
        return found

    def belief(self, view: Any) -> dict[str, float]:
        return {}


def agent(config: CiceroConfig = QUIET, arm: str = "intent") -> TableAgent:
    parts = Parts(arm, talker(), talker(), None)
    return TableAgent("planner", parts, config, slots=30, context=1024, max_new_tokens=12, temperature=0.7)


def test_another_style_is_refused() -> None:
    parts = Parts("intent", talker(), talker(), None)
    with pytest.raises(UserError, match=r"planner: .*env\.style=natural"):
        TableAgent("planner", parts, QUIET, slots=30, context=1024, style="natural")


def witness(role: str = "imposter") -> Witness:
    """Green, who has been in the lab with red, and in the garden; the body lies in the bridge."""
    seen = Witness(0)
    tasks = "" if role == "imposter" else " tasks lab"
    seen.observe(f" grid 2 2 imposters 1 players red blue green yellow you green {role}{tasks}")
    seen.observe(" at lab red")
    seen.observe(" at garden")
    seen.observe(" meeting red found blue at bridge living red green yellow")
    seen.observe(" yellow says i was in garden [END] speak")
    return seen


# --- Words ---
@pytest.mark.parametrize(
    ("message", "name"),
    [
        ("i think it is red", "red"),
        ("blue killed red i saw it", "blue"),
        ("vote for pink", "pink"),
        ("i was with red in lab", ""),
        ("it is not red", ""),
        ("red was near the body", ""),  # a hint
        ("vote for red my vote goes to blue", ""),
        ("let us skip the vote", ""),
    ],
)
def test_accusations_that_leave_no_doubt(message: str, name: str) -> None:
    assert accused_outright(message) == name


@pytest.mark.parametrize(
    ("message", "name"),
    [("i was with red in lab", "red"), ("red was near the body", ""), ("vote for red", ""), ("it was not me", "")],
)
def test_names_that_are_mentioned_without_blame(message: str, name: str) -> None:
    assert mentioned(message) == name


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ("i think it is red", ""),
        ("green is the imposter", "itself"),
        ("green was near the body", "itself"),
        ("i was in bridge", "itself"),
        ("i saw red kill blue", "false"),
        ("i was with red in lab", ""),
        ("i was with yellow in lab", "false"),
        ("i did a task in garden", ""),
        ("i was in galley", "false"),
        ("i saw yellow in garden", "false"),
        ("it was not me", ""),
        ("green was in bridge", "itself"),  # by its own name
        ("i saw green in galley", "false"),
        ("green was in lab", ""),
    ],
)
def test_what_an_imposter_must_not_say(message: str, why: str) -> None:
    assert exposes(message, witness()) == why


def test_an_imposter_must_not_place_a_fellow_where_the_body_lay() -> None:
    seen = witness()
    seen.fellows = ("Yellow",)
    assert exposes("yellow was in bridge", seen) == "itself"
    assert exposes("yellow was in galley", seen) == ""  # who would not contradict it


def test_a_witness_keeps_all_words_and_shows_the_table_nothing_of_its_own() -> None:
    seen = witness()
    assert seen.role == Role.IMPOSTER and not seen.voting
    seen.spoke("i trust red")
    seen.observe(" red says it is not yellow [END] vote")
    assert seen.voting
    assert seen.words == [("Yellow", "i was in garden"), ("Green", "i trust red"), ("Red", "it is not yellow")]
    assert seen.table("Red") == (
        " grid 2 2 imposters 1 players red blue green yellow you red crewmate meeting red found blue at bridge living"
        " red green yellow yellow says i was in garden [END] green says i trust red [END]"
        " red says it is not yellow [END]"
    )
    seen.observe(" votes red 2 skip 1 ejected red")
    assert not seen.voting and not seen.met


# --- Plans ---
VOTES = ("blue", "green", "red", "skip")


def test_a_crewmate_votes_for_whom_it_believes_guilty() -> None:
    values = crew_values(VOTES, {"blue": 0.3, "red": 0.7}, "green", 0.0)
    assert values == pytest.approx([0.3, -1.0, 0.7, 0.0])
    even = np.full(4, 0.25)
    assert planned_vote(values, even, TableConfig()) == 2
    assert planned_vote(crew_values(VOTES, {"blue": 0.3, "red": 0.4}, "green", 1.0), even, TableConfig()) == 3
    anchored = np.array([0.999, 0.0, 0.001, 0.0])
    assert planned_vote(values, anchored, TableConfig(strength=1.0)) == 0


def test_no_plan_votes_for_oneself_however_near_to_the_anchor() -> None:
    anchored = np.array([0.0, 1.0, 0.0, 0.0])
    crew = crew_values(VOTES, {"blue": 0.3, "red": 0.7}, "green", 0.0)
    imposter = imposter_values(VOTES, ("blue", "red"), np.full((2, 4), 0.25), {"green"})
    for values, chosen in ((crew, 2), (imposter, 0)):
        assert planned_vote(values, anchored, TableConfig(strength=1.0)) == chosen


def test_an_imposter_votes_for_whom_the_table_is_ready_to_eject() -> None:
    expected = np.array([[0.0, 0.5, 0.4, 0.1], [0.2, 0.5, 0.0, 0.3]])  # of blue and of red
    values = imposter_values(VOTES, ("blue", "red"), expected, {"green"})
    assert values == pytest.approx([0.2, -1.0, 0.4, 0.0])  # nobody is counted on to vote for itself
    assert support("skip", VOTES, ("blue", "red"), expected) == pytest.approx(0.2)


# --- Annotation ---
def test_annotations_read_nothing_later() -> None:
    """Other words after a message, in its speaker's view and at the table, leave its annotation as it is."""
    policy, tokens = talker(), talker().tokens
    episode = next(e for e in recorded() if any(t.message for t in e.turns))
    first = next(t for t in episode.turns if t.message)
    end = first.start + len(first.reply_ids)
    old = episode.streams[first.agent]
    later = tokens.encode(" trust") * (len(old) - end)
    streams = {**episode.streams, first.agent: replace(old, tokens=[*old.tokens[:end], *later[: len(old) - end]])}
    turns = [replace(t, message="i trust red") if t.message and t.step > first.step else t for t in episode.turns]
    other = replace(episode, streams=streams, turns=tuple(turns))
    read, again = (
        [a for a in among_us_votes.annotate(policy, [e]) if a.turn.step == first.step] for e in (episode, other)
    )
    assert other != episode and read[0].intent == again[0].intent and len(read) == len(again) == 1


def test_the_votes_beside_a_view_are_those_of_a_stream_that_ends_there() -> None:
    policy, tokens = talker(), talker().tokens
    episode = next(e for e in recorded() if any(t.message for t in e.turns))
    said = among_us_votes.voted_messages(episode, tokens, among_us_votes.meetings_of(episode))
    found = [(e.turn.agent, e.after) for e in said]
    for agent_name, belief in found[:3]:
        row = (replace(episode, beliefs=(belief,)), agent_name)
        (beside,) = among_us_votes.read_votes(policy, [row])
        stream = episode.streams[agent_name].tokens[: belief.position + 1]
        ended = VoteReader(policy, 1024, 1).votes([stream], [[]], belief.question.candidates)[0, 0]
        assert beside == pytest.approx(ended, abs=1e-5) and beside.sum() == pytest.approx(1)


def test_tables_are_learned_from_as_players_read_them() -> None:
    """The row of a discussion is what a seat that was there reads of it, to the token."""
    tokens = talker().tokens

    class Watched:
        def __init__(self, seed: int, role: str) -> None:
            self.player, self.seen = make_player("careful", seed, role), Witness(seed)
            self.heard: list[dict[str, str]] = []  # of each discussion, when it comes to a vote

        def observe(self, text: str) -> None:
            self.player.observe(text)
            self.read(text)

        def read(self, text: str) -> None:
            self.seen.observe(text)
            if self.seen.voting:
                self.heard.append({name: self.seen.table(name) for name in self.seen.living})

        def reply(self, text: str, options: Sequence[str] = ()) -> str:
            self.read(text)
            found: str = self.player.reply(text, options)
            if not options:
                self.seen.spoke(found.partition("[END]")[0].strip())
            return found

    def make(seed: int, role: str) -> Watched:
        watched.append(Watched(seed, role))
        return watched[-1]

    watched: list[Watched] = []
    (episode,) = games(TextAgent("scripted", make, tokens), 1)
    (meeting, *_) = among_us_votes.meetings_of(episode)
    for name in among_us_votes.crew_of(episode, meeting):
        row, seat = among_us_votes.table_row(episode, meeting, name, tokens)
        heard = [each.heard[0][name] for each in watched if each.heard]
        assert heard and {tokens.decode(row.streams[seat].tokens).removeprefix("<|bos|>")} == set(heard)


def test_tables_name_the_finder_whose_report_counted() -> None:
    """Several may report in one step: one opens the discussion, and each crewmate reads who it is."""
    tokens, several = talker().tokens, 0
    for episode in games(scripted("among_us", "careful", tokens), 12, height=2, players=7, tasks=8, max_steps=200):
        for meeting in among_us_votes.meetings_of(episode):
            several += len({deed.who for deed in meeting.reports}) > 1
            for name in among_us_votes.crew_of(episode, meeting):
                row, seat = among_us_votes.table_row(episode, meeting, name, tokens)
                opening = re.search(r" meeting .*? living", tokens.decode(row.streams[seat].tokens))
                assert opening and opening[0] in tokens.decode(episode.streams[seat].tokens)
                assert tuple(opening[0].title().split()[1:4:2]) in {(d.who, d.victim) for d in meeting.reports}
    assert several


def test_messages_that_the_log_refutes_teach_no_votes() -> None:
    tokens = talker().tokens
    for episode in recorded():
        false = {(c.turn.agent, c.turn.step) for c in claims_of(episode) if c.of_fact and c.false}
        said = among_us_votes.voted_messages(episode, tokens, among_us_votes.meetings_of(episode))
        assert {(e.turn.agent, e.turn.step) for e in said if not e.truthful} <= false
        taught = among_us_votes.with_votes(episode, tokens).beliefs[len(episode.beliefs) :]
        assert len(taught) == sum(1 + each.truthful for each in said)


def test_intents_stand_before_the_cue_and_move_the_rest() -> None:
    tokens = talker().tokens
    episode = next(e for e in recorded() if any(t.message for t in e.turns))
    turn = next(t for t in episode.turns if t.message)
    line = intent_text(Intent("red", "skip"))
    assert line == " you vote red players vote skip"
    again, name = with_intents((episode, turn.agent), {turn.step: Intent("red", "skip")}, tokens)
    new, old = again.streams[name], episode.streams[name]
    moved = next(t for t in again.turns if (t.agent, t.step) == (turn.agent, turn.step))
    assert tuple(new.tokens[moved.start :][: len(turn.reply_ids)]) == turn.reply_ids
    inserted = tokens.encode(line)
    place = turn.start - len(tokens.format.cue)
    assert new.tokens == [*old.tokens[:place], *inserted, *old.tokens[place:]]
    assert new.kinds[place : place + len(inserted)] == [Kind.QUESTION] * len(inserted)
    for a, b in zip(again.beliefs, episode.beliefs, strict=True):
        if a.listener == name:
            assert new.tokens[a.position] == old.tokens[b.position]


def test_messages_are_drawn_under_an_intent() -> None:
    episode = next(e for e in recorded() if any(t.message for t in e.turns))
    turn = next(t for t in episode.turns if t.message)
    places = [((episode, turn.agent), turn.step, Intent("red", "red"))] * 3

    def said(temperature: float) -> list[str]:
        how: dict[str, Any] = {"context": 1024, "top_p": 0.9, "limit": 12, "rng": np.random.default_rng(0)}
        return say_under(talker(), places, {}, temperature=temperature, **how, at_once=2)

    assert len(said(0.7)) == 3 and all("[END]" not in each for each in said(0.7))
    assert said(0.0) == said(0.005)  # the likeliest words


# --- The player ---
def mind(player: TableAgent, key: Any) -> Any:
    return player._plan(player._plain[key], player._seen[key])


def filtered(player: TableAgent, *messages: str) -> list[Draw]:
    """The filters' word on messages of green, an imposter; the table mentioned yellow last."""
    key = (0, "player_0")
    player.reader = Planted(talker().tokens)  # type: ignore[assignment]
    player._seen[key], player._plain[key] = witness(), StreamWriter(talker().tokens)
    player._plain[key].observe(" grid 2 2 you green imposter living red green yellow", (), 0)
    plan = mind(player, key)
    assert plan.intent == Intent("yellow", "yellow")
    drawn = [Draw([], [], message) for message in messages]
    player._filter(key, plan, drawn, [])
    return drawn


def test_a_message_that_gives_the_imposter_away_is_refused() -> None:
    table = TableConfig(giveaway=0.02, facts=False)
    bad, good = filtered(agent(replace(QUIET, among_us=table)), "where were you green", "i think it is yellow")
    assert (bad.refused, good.refused) == ("giveaway", "")
    bad, _ = filtered(agent(replace(QUIET, among_us=replace(table, giveaway=None))), "where were you green", "hm")
    assert not bad.refused


def test_a_message_that_exposes_the_imposter_is_refused() -> None:
    table = TableConfig(giveaway=None)
    bad, good = filtered(agent(replace(QUIET, among_us=table)), "i was in bridge", "i trust yellow")
    assert (bad.refused, good.refused) == ("facts", "")


def test_silence_is_no_short_message() -> None:
    player = agent(replace(QUIET, repetition=True))
    (short,) = filtered(player, "not me")
    assert not short.refused
    for said, refused in (("", ""), ("hm", "repetition"), ("not me", "repetition")):
        player._seen[0, "player_0"].spoke(said)
        again = Draw([], [], "not me")
        player._filter((0, "player_0"), mind(player, (0, "player_0")), [again], [])
        assert again.refused == refused, said


def test_own_words_are_read_as_they_are_heard() -> None:
    """The game cuts a message after 20 words, and writes it in its own letters."""
    player, tokens = agent(), talker().tokens
    ids = tokens.encode(f" do_task says <{' red' * 30} {END}")
    heard = f"do-task say ({' red' * 17}"
    assert player._words(ids) == heard
    key = (0, "player_0")
    player._seen[key], player._plain[key] = witness(), StreamWriter(tokens)
    player._note(key, ids, Kind.SPEECH)
    assert player._seen[key].words[-1] == ("Green", heard)


def test_words_that_the_action_model_has_no_room_for_are_refused() -> None:
    """The action model reads words as they are heard, in other and perhaps many more tokens than were drawn."""
    how: dict[str, Any] = {"slots": 9, "context": 150, "max_new_tokens": 12}
    parts = Parts("intent", talker(), talker(), None)
    player, key = TableAgent("planner", parts, replace(QUIET, correspondence=-1.0), **how), (0, "player_0")
    seen, view = player._seen[key], player._plain[key] = witness(), StreamWriter(talker().tokens)
    view.observe(" grid 2 2 you green imposter living red green yellow", (), 0)
    assert player._fits(view, seen)
    long, short = Draw([], [], "quizzical " * 20), Draw([], [], "it is red")
    player._filter(key, mind(player, key), [long, short], [])
    assert (long.refused, short.refused) == ("unfinished", "")
    seen.spoke(long.text)
    assert not player._fits(view, seen)


def test_words_must_carry_the_vote() -> None:
    bad, good = filtered(agent(replace(QUIET, correspondence=-0.005)), "i think it is red", "vote for yellow")
    assert (bad.refused, good.refused) == ("correspondence", "")


def test_candidates_that_move_fewer_hearers_are_refused() -> None:
    player = agent(replace(QUIET, value=0.5))
    drawn = filtered(player, "vote for yellow", "vote for red")
    player._by_value((0, "player_0"), mind(player, (0, "player_0")), drawn)
    assert [d.refused for d in drawn] == ["", "value"]
    assert drawn[0].value == pytest.approx(0.9)


def crew_cast(player: TableAgent) -> Any:
    plain = ModelAgent("base", talker(), slots=30, context=1024, max_new_tokens=12, temperature=0.7)

    def assign(game: Any, env: Any) -> dict[str, Any]:
        return {seat: plain if role == "imposter" else player for seat, role in env.facts["roles"].items()}

    return assign


@cache
def played(arm: str) -> tuple[Episode, ...]:
    player = agent(replace(QUIET, correspondence=1.0) if arm == "strict" else QUIET, "intent" if arm != "none" else arm)
    return tuple(games(player, 4, crew_cast(player)))


def own_turns(arm: str, kind: str) -> list[Any]:
    return [t for e in played(arm) for t in e.turns if e.players[t.agent] == "planner" and t.kind.name == kind]


def test_intents_stand_in_the_own_stream_alone_and_votes_are_planned() -> None:
    said = own_turns("intent", "SPEAK")
    assert said and all(t.thoughts.startswith("intent: vote ") for t in said)
    votes = [t for t in own_turns("intent", "CHOOSE") if t.planned]
    assert votes and all(t.planned.actions[t.planned.chosen] == t.text.strip() for t in votes)
    decode = talker().tokens.decode
    for episode in played("intent"):
        for seat, stream in episode.streams.items():
            lines = decode(stream.tokens).count(" players vote ")
            own = [t for t in episode.turns if t.agent == seat and t.thoughts]
            assert lines == len(own) and (not own or episode.players[seat] == "planner")


def test_a_game_is_taken_up_where_it_stopped() -> None:
    config = replace(QUIET, repetition=True, correspondence=-0.005)
    assert_goes_on(lambda: agent(config), lambda one: games(one, 2, crew_cast(one)), 30)


def test_without_intents_votes_alone_are_planned() -> None:
    assert not any(t.thoughts for t in own_turns("none", "SPEAK"))
    assert any(t.planned for t in own_turns("none", "CHOOSE"))


def test_when_all_draws_are_spent_it_says_nothing_and_transcripts_show_why() -> None:
    said = own_turns("strict", "SPEAK")
    assert said and not any(t.message for t in said)
    shown = render_text(episode_to_json(next(e for e in played("strict") if any(t.thoughts for t in e.turns))))
    assert "intent: vote " in shown and "refused, correspondence: " in shown


def test_where_the_vote_is_the_question_its_plan_believes_all_that_was_said() -> None:
    player = agent()
    votes = [t for e in games(player, 3, crew_cast(player), belief="vote") for t in e.turns if t.planned]
    assert votes
    for planned in (t.planned for t in votes):
        for vote, value, anchor in zip(planned.actions, planned.values, planned.anchor, strict=True):
            assert value == (anchor if value > 0 else 0.0 if vote == "skip" else -1.0)


def test_replies_stand_in_the_stream_as_they_were_played() -> None:
    for episode in played("intent"):
        for turn in (t for t in episode.turns if t.reply_ids):
            stream = episode.streams[turn.agent].tokens
            assert tuple(stream[turn.start : turn.start + len(turn.reply_ids)]) == turn.reply_ids


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"giveaway": 1.5}, r"cicero\.among_us\.giveaway=1\.5: must be from 0 to 1, or null"),
        ({"strength": -1.0}, r"cicero\.among_us\.strength=-1\.0: must be at least 0"),
        ({"mistake": float("inf")}, r"cicero\.among_us\.mistake=inf"),
        ({"floor": 0.0}, r"cicero\.among_us\.floor=0\.0: must be between 0 and 1"),
    ],
)
def test_bad_settings(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError, match=error):
        TableConfig(**settings)
