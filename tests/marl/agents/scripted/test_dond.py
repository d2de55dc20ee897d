"""Scripted negotiators: the grammar reads back what it says, games end and end differently by temperament."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from statistics import mean
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from envs.core import TurnKind
from envs.dond.environment import DealOrNoDeal
from envs.dond.replies import parse_reply
from envs.dond.rules import Context, Triple, allocations, best_joint, contexts, rest
from envs.dond_v0 import parallel_env
from marl.agents.scripted import dond, dond_language
from marl.agents.scripted.dond import MIXTURE, TEMPERAMENTS, Negotiator, Temperament, make_player
from marl.agents.scripted.dond_language import say_split, say_value, understand

COUNTS = sorted({context.counts for context in contexts()})
SPLIT_FORMS = [getattr(dond_language, name) for name in ("ASK", "ASK_REST", "OFFER", "OFFER_REST", "BOTH", "TERSE")]


def env() -> DealOrNoDeal:
    return parallel_env(objective=1.0, style="compact")


@dataclass(frozen=True)
class Played:
    """A finished game: every reply in order as (agent, reply), and the environment's outcome."""

    replies: tuple[tuple[str, str], ...]
    outcome: dict[str, Any]


def play(
    env: DealOrNoDeal, seats: tuple[Negotiator, Negotiator], seed: int, options: dict[str, Any] | None = None
) -> Played:
    """Plays one game between two negotiators, `player_0` first in `seats`."""
    observations, infos = env.reset(seed=seed, options=options)
    players = dict(zip(env.possible_agents, seats, strict=True))
    replies = []
    while env.agents:
        actions = {}
        for agent in env.agents:
            observation = observations[agent]
            if observation["turn"] == TurnKind.SPEAK:
                actions[agent] = players[agent].reply(observation["text"])
                replies.append((agent, actions[agent]))
            else:
                players[agent].observe(observation["text"])
                actions[agent] = ""
        observations, _, _, _, infos = env.step(actions)
    return Played(tuple(replies), next(iter(infos.values()))["outcome"])


def mixture(rng: Random) -> Temperament:
    return rng.choice(MIXTURE)


@cache
def games(count: int, pick: Callable[[Random], Temperament], start: int = 0) -> list[Played]:
    rng, table = Random(start), env()
    played = []
    for seed in range(start, start + count):
        seats = (Negotiator(pick(rng), 2 * seed), Negotiator(pick(rng), 2 * seed + 1))
        played.append(play(table, seats, seed))
    return played


def joint(game: Played) -> int:
    return sum(game.outcome["points"].values())


def best(game: Played) -> int:
    return best_joint(Context(game.outcome["counts"], game.outcome["values"]))


def messages(played: Sequence[Played]) -> list[str]:
    return [
        reply.removeprefix("[message] ").removesuffix(" [END]")
        for game in played
        for _, reply in game.replies
        if reply.startswith("[message]")
    ]


# --- The grammar


@pytest.mark.parametrize("templates", SPLIT_FORMS)
@pytest.mark.parametrize("counts", [(1, 1, 3), (2, 2, 2), (4, 1, 2), (1, 4, 1)])
def test_every_form_reads_back_as_the_split_it_was_made_from(
    templates: tuple[str, ...], counts: tuple[int, int, int]
) -> None:
    rng = Random(0)
    for template in templates:
        for mine in allocations(counts):
            said = say_split(mine, counts, rng, templates=(template,))
            # The table must not matter: all of these forms name the whole split.
            assert understand(said, counts, table=(0, 0, 0)).share == mine, said
            assert understand(said, counts).share == mine, said


@given(
    st.sampled_from(COUNTS),
    st.integers(0, 1_000_000),
    st.booleans(),
    st.sampled_from(("", *dond_language.REJECT, *dond_language.SMALL_TALK)),
)
@example((1, 2, 4), 44099, False, "i can't do that ,")
def test_a_split_survives_whatever_stands_around_it(
    counts: tuple[int, int, int], seed: int, terse: bool, lead: str
) -> None:
    rng = Random(seed)
    mine = rng.choice(allocations(counts))
    item, value = rng.randrange(3), rng.randrange(11)
    ask, statement = say_split(mine, counts, rng, terse=terse), say_value(item, value, rng)
    said = f"{lead} {statement} , {ask}" if ask.endswith("?") else f"{lead} {ask} , {statement}"
    heard = understand(said, counts)
    assert heard.share == mine, said
    assert heard.values[item] == value and sum(v is not None for v in heard.values) == 1, said


def test_words_that_name_no_split() -> None:
    counts = (1, 2, 3)
    for said in dond_language.ACCEPT:
        heard = understand(said, counts)
        assert heard.accepts and not heard.rejects and heard.share is None, said
    for said in (lead.rstrip(" ,") for lead in dond_language.REJECT):
        heard = understand(said, counts)
        assert heard.rejects and not heard.accepts and heard.share is None, said
    for said in (*dond_language.QUESTION, *dond_language.ASK_VALUES):
        heard = understand(said, counts)
        assert heard.asks and not heard.accepts and heard.share is None, said
    for template in dond_language.ALL_VALUES:
        for ask in dond_language.ASK_VALUES:
            heard = understand(f"{template.format(1, 0, 3)} . {ask}", counts)
            assert heard.values == (1, 0, 3) and heard.asks and heard.share is None
    for template in dond_language.ACCEPT_AGAIN:
        heard = understand(say_split((1, 0, 2), counts, Random(0), templates=(template,)), counts)
        assert heard.accepts and heard.share == (1, 0, 2), template


@pytest.mark.parametrize(
    ("said", "counts", "share"),
    [
        ("i want the hats and 1 book", (2, 3, 1), (1, 3, 0)),
        ("you can have the balls", (2, 3, 1), (2, 3, 0)),
        ("i would like 4 hats and you can have the rest .", (1, 4, 1), (0, 4, 0)),
        ("i'll take the book and basketballs", (1, 3, 2), (1, 0, 2)),
        ("how about i get the book , you get the ball and we split the hats", (1, 4, 1), (1, 0, 0)),
        ("ok , take the books and the ball", (3, 1, 1), (0, 1, 0)),
        ("i can't give you the hats , you can have the books", (2, 2, 1), (0, 2, 1)),
        ("give me both hats", (2, 2, 1), (0, 2, 0)),
        ("two books for you and everything else for me", (3, 1, 1), (1, 1, 1)),
        ("1 of each please", (1, 3, 1), (1, 1, 1)),
        ("you can have all of the hats", (1, 3, 1), (1, 0, 1)),
        ("i need 99999999999999999999999999 hats", (1, 3, 1), (0, 3, 0)),
        ("lovely weather", (1, 3, 1), None),
        ("what are the hats worth to you ?", (1, 3, 1), None),
    ],
)
def test_human_phrases(said: str, counts: tuple[int, int, int], share: tuple[int, int, int] | None) -> None:
    assert understand(said, counts).share == share


# --- Games


def test_seeds_determine_a_game() -> None:
    assert games.__wrapped__(20, mixture) == games(20, mixture)
    start = {"counts": (1, 1, 3), "values": ((0, 1, 3), (1, 3, 2)), "first": 0}
    fair = TEMPERAMENTS["fair"]
    openings = {play(env(), (Negotiator(fair, s), Negotiator(fair, 0)), 0, start).replies[0][1] for s in range(20)}
    assert len(openings) > 8


def test_the_default_mixture_leaves_room_to_improve() -> None:
    """Figures of 2,000 games: agreement .752, joint score 10.4, 13.8 when agreed (best 15.0), 6.35 turns. The 200 games
    here may miss them by 4 standard errors."""
    played = games(200, mixture)
    deals = [game for game in played if game.outcome["deal"]]
    assert 0.63 < len(deals) / len(played) < 0.87
    assert 8.6 < mean(map(joint, played)) < 12.2
    assert 13.0 < mean(map(joint, deals)) < 14.6
    assert 5.7 < mean(len(game.replies) for game in played) < 7.0
    refused = [game for game in played if game.outcome["errors"]]
    assert refused and all(game.outcome["errors"] < 5 and game.outcome["how"] != "abort" for game in refused)


def test_two_careful_players_reach_the_joint_best() -> None:
    played = games(100, lambda _: TEMPERAMENTS["careful"])
    assert all(game.outcome["deal"] and not game.outcome["errors"] for game in played)
    # Over 3,000 other games: .99998 of the best joint score, and the best itself in all but one of them.
    assert mean(map(joint, played)) >= 0.998 * mean(map(best, played))
    assert mean(joint(game) == best(game) for game in played) >= 0.97


def test_a_proposal_follows_from_what_was_said() -> None:
    """Players that make no mistakes claim the last split that was spoken of, in every game that ends in a deal."""
    flawless = [Temperament(**{**vars(t), "mistakes": 0.0, "slips": 0.0}) for t in MIXTURE]
    played = games(100, lambda rng: rng.choice(flawless))
    deals = 0
    for game in played:
        counts = game.outcome["counts"]
        table: Triple | None = None  # player_0's share
        for agent, reply in game.replies:
            if not reply.startswith("[message]"):
                continue
            mine = agent == "player_0"
            known = table if mine or table is None else rest(table, counts)
            heard = understand(messages([Played(((agent, reply),), {})])[0], counts, known)
            if heard.share is not None:
                table = heard.share if mine else rest(heard.share, counts)
        if game.outcome["deal"]:
            deals += 1
            assert game.outcome["claims"][0] == table
    assert deals > 0.85 * len(played)


def test_temperaments_differ() -> None:
    played = {name: games(60, lambda _, t=t: t) for name, t in TEMPERAMENTS.items()}  # type: ignore[misc]
    turns = {name: mean(len(game.replies) for game in some) for name, some in played.items()}
    words = {name: mean(len(said.split()) for said in messages(some)) for name, some in played.items()}
    agreed = {name: mean(joint(g) for g in some if g.outcome["deal"]) for name, some in played.items()}
    assert turns["stubborn"] > turns["fair"] + 2 > turns["generous"] + 2.5
    assert words["terse"] < words["fair"] - 0.4
    assert agreed["cooperative"] > agreed["casual"] + 1
    assert agreed["careful"] > agreed["casual"] + 1


# --- Any partner


BABBLE = st.one_of(
    st.text(max_size=80),
    st.lists(
        st.sampled_from(
            [
                "i", "you", "me", "my", "take", "give", "for", "to", "the", "no", "deal", "ok", "not", "1", "2", "99",
                "all", "both", "of", "each", "book", "books", "hats", "ball", "rest", "everything", "worth", "at",
                "points", "nothing", "what", "?", ",", ".", "don't", "need",
            ]
        ),
        max_size=15,
    ).map(" ".join),
)  # fmt: skip


@given(BABBLE, st.sampled_from(COUNTS))
@example("²hats ٣ balls", (1, 1, 3))
def test_understand_takes_any_text(text: str, counts: tuple[int, int, int]) -> None:
    heard = understand(text, counts)
    if heard.share is not None:
        assert all(0 <= n <= held for n, held in zip(heard.share, counts, strict=True))


@given(st.sampled_from(sorted(TEMPERAMENTS)), st.lists(BABBLE, min_size=1, max_size=6), st.integers(0, 1000))
def test_a_game_against_babble_ends(name: str, texts: list[str], seed: int) -> None:
    """The partner says the same few things over and over, and never proposes by itself."""
    table, player = parallel_env(objective=1.0, style="compact", max_entries=50), Negotiator(TEMPERAMENTS[name], seed)
    observations, infos = table.reset(seed=seed)
    turn = 0
    while table.agents:
        mine, theirs = observations["player_0"], observations["player_1"]
        actions = {}
        if mine["turn"] == TurnKind.SPEAK:
            actions["player_0"] = player.reply(mine["text"])
        else:
            player.observe(mine["text"])
        if theirs["turn"] == TurnKind.SPEAK:
            refused = bool(infos["player_1"]["error"])
            pending = "[propose]" in theirs["text"]
            said = "[propose] (0 books, 0 hats, 0 balls)" if pending else f"[message] {texts[turn % len(texts)]}"
            actions["player_1"] = "[message] hm" if refused and not pending else said
            turn += 1
        observations, _, _, _, infos = table.step(actions)
    assert infos["player_0"]["outcome"]["how"] in ("deal", "mismatch")  # the negotiator ended it: no limit was met
    assert infos["player_0"]["outcome"]["messages"] <= 2 * dond.LONGEST + 2


def test_a_pending_proposal_is_answered_by_the_share_that_was_offered() -> None:
    player = Negotiator(TEMPERAMENTS["careful"], 0)
    player.observe("books 1 0 hats 1 1 balls 3 3 objective 1\n")
    assert player.reply("them: i want the book and 1 ball\n").startswith("[message]")
    assert player.reply("them: [propose]\n") == "[propose] (0 books, 1 hats, 2 balls) [END]"


def test_a_partner_that_takes_back_every_offer_is_not_talked_to_for_ever() -> None:
    for name in TEMPERAMENTS:
        player = Negotiator(TEMPERAMENTS[name], 3)
        player.observe("books 1 0 hats 1 1 balls 3 3 objective 1\n")
        replies = [player.reply("them: you can have everything\n")]
        while not replies[-1].startswith("[propose] (") and len(replies) < 40:
            replies.append(player.reply("them: no deal\n"))
        assert len(replies) <= dond.LONGEST + 2, name  # one more for a slip


def test_an_acceptance_that_is_not_taken_back_is_an_agreement() -> None:
    for said, agreed in (("them: \n", True), ("them: thanks\n", True), ("them: no\n", False)):
        player = Negotiator(TEMPERAMENTS["careful"], 0)
        player.observe("books 1 0 hats 1 1 balls 3 3 objective 1\n")
        assert player.reply("them: i value books at 7 , hats at 3 and balls at 0\n").startswith("[message] ")
        accepted = player.reply("them: i want the book and the hat\n")
        assert understand(accepted, (1, 1, 3)).accepts
        assert player.reply(said).startswith("[propose] (0 books, 0 hats, 3 balls)") == agreed


def test_slips_are_refused_and_then_put_right() -> None:
    clumsy = Temperament(**{**vars(TEMPERAMENTS["fair"]), "slips": 1.0})
    for seed in range(40):
        player = Negotiator(clumsy, seed)
        slip = player.reply("books 1 0 hats 1 1 balls 3 3 objective 1\n")
        assert type(parse_reply(slip, (1, 1, 3), proposal_pending=False, messages_sent=0)).__name__ == "Refused"
        meant = player.reply("error: no tag\n")
        assert type(parse_reply(meant, (1, 1, 3), proposal_pending=False, messages_sent=0)).__name__ == "Message"


def test_natural_style_is_understood_too() -> None:
    table = parallel_env(objective=0.0, style="natural")
    compact = parallel_env(objective=0.0, style="compact")
    for seed in range(20):
        pair = (TEMPERAMENTS["fair"], TEMPERAMENTS["stubborn"])
        first, second = (
            play(kind, (Negotiator(pair[0], seed), Negotiator(pair[1], seed)), seed) for kind in (table, compact)
        )
        assert first == second


def test_players_by_name() -> None:
    assert make_player("careful", 7).temperament is TEMPERAMENTS["careful"]
    drawn = [make_player(dond.DEFAULT, seed).temperament for seed in range(200)]
    assert drawn == [make_player(dond.DEFAULT, seed).temperament for seed in range(200)]
    assert set(drawn) == set(MIXTURE)
    with pytest.raises(ValueError, match=r"'grumpy'\. Choose from mixture, random, fair"):
        make_player("grumpy", 0)
