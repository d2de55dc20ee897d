"""Filtered cloning: which games it keeps, and that errors leave no trace in what it learns from."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import dond_v0
from envs.core import TurnKind
from envs.dond import environment as dond_environment
from marl.agents.text import TextAgent
from marl.algorithms.filtered_bc import (
    FilteredBCConfig,
    is_zero_sum,
    select,
    train_filtered_bc,
    without_errors,
)
from marl.common.errors import UserError
from marl.learning.batch import collate, rows_of
from marl.learning.config import UpdateConfig
from marl.learning.forward import forward
from marl.learning.update import Learner
from marl.losses.imitation import ImitationLoss
from marl.model.policy import Policy
from marl.model.tokens import Tokens
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import Game
from marl.types import Episode, Payment, Turn
from tests.marl.episodes import episode
from tests.marl.hint import Hint, hint_policy, training
from tests.marl.models import CHATML, hf_tokenizer, small_tokens


# -- the selection -----------------------------------------------------------------------------------------------------
def paid(rewards: tuple[float, float], deal: bool = True) -> Episode:
    """A game that paid its two players this, in two instalments."""
    claims = ((1, 1, 0), (0, 0, 3)) if deal else ((0, 0, 3), (0, 0, 3))
    halves = [Payment(a, s, r / 2) for s in (0, 5) for a, r in zip(dond_environment.AGENTS, rewards, strict=True)]
    return replace(episode([], claims=claims), payments=tuple(halves))


def chosen(games: Sequence[Episode], keep: str, zero_sum: bool = False) -> list[tuple[int, str]]:
    seats = [(g, a) for a in dond_environment.AGENTS for g in games]
    flags = select(seats, keep, zero_sum)
    return [(next(i for i, g in enumerate(games) if g is e), a) for (e, a), f in zip(seats, flags, strict=True) if f]


def test_seats_are_selected_by_what_they_were_paid() -> None:
    games = [paid((0, 0), deal=False), paid((5, 5)), paid((8, 2))]  # the published example, mean 3.333
    assert [games[2].paid(a) for a in dond_environment.AGENTS] == [8, 2]
    assert chosen(games, "above_mean") == [(1, "player_0"), (2, "player_0"), (1, "player_1")]
    assert chosen(games, "nonzero") == [(1, "player_0"), (2, "player_0"), (1, "player_1"), (2, "player_1")]
    assert len(chosen(games, "all")) == 6 and select([], "above_mean", False) == []
    assert chosen([paid((4, 4))], "above_mean") == []  # strictly above the mean
    with pytest.raises(UserError, match=r"algo\.keep=best: must be one of above_mean, nonzero, all"):
        FilteredBCConfig(keep="best")


def test_the_competitive_rule_keeps_both_sides_of_even_deals() -> None:
    """Objective -1: scores are leads, their mean is 0. An even deal is worth 0 to both, and so is no deal."""
    games = [paid((0, 0), deal=False), paid((0, 0)), paid((3, -3))]
    assert chosen(games, "above_mean") == [(2, "player_0")]
    assert chosen(games, "above_mean", zero_sum=True) == [(1, "player_0"), (2, "player_0"), (1, "player_1")]
    assert len(chosen(games, "nonzero", zero_sum=True)) == 4
    assert [is_zero_sum(dond_v0.parallel_env(objective=o)) for o in (-1.0, 0.0, 1.0)] == [True, False, False]
    assert not is_zero_sum(Hint())


# -- errors leave no trace ---------------------------------------------------------------------------------------------

START = {"counts": (1, 1, 3), "values": ((0, 1, 3), (1, 3, 2)), "first": 0}
CLEAN = (
    ("player_0", "[message] i want the balls [END]"),
    ("player_1", "[message] ok , i take the rest [END]"),
    ("player_0", "[propose] (0 books, 0 hats, 3 balls) [END]"),
    ("player_1", "[propose] (1 books, 1 hats, 0 balls) [END]"),
)
BAD = ("give me all [END]", "[propose] (9 books, 9 hats, 9 balls) [END]", "[message] a [message] b [END]", "hm")


class Reader:
    """Says what stands in its lines."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def observe(self, text: str) -> None:
        pass

    def reply(self, text: str, options: Sequence[str] = ()) -> str:
        return self.lines.pop(0)


def record(replies: Sequence[tuple[str, str]], tokens: Tokens, style: str) -> Episode:
    """The game in which the players say this, as the real game and the real recorder see it."""
    lines = {agent: [text for a, text in replies if a == agent] for agent in dond_environment.AGENTS}
    agent = TextAgent("learner", lambda seed, role: Reader(lines[dond_environment.AGENTS[seed % 16]]), tokens)
    (played,) = rollout([Game(1, START)], everyone(agent), lambda: dond_v0.parallel_env(style=style), 1)
    assert len(played.turns) == len(replies)
    return played


def with_errors(errors: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """The clean game with these refused replies before each of its turns."""
    return [(a, text) for (a, last), tries in zip(CLEAN, errors, strict=True) for text in (*tries, last)]


FORMATS = {
    "small": ("compact", small_tokens),
    "text": ("natural", hf_tokenizer),
    "chat": ("natural", lambda: hf_tokenizer(CHATML)),
}


def tokens_of(name: str) -> tuple[Tokens, str]:
    style, make = FORMATS[name]
    made = make()  # type: ignore[operator]
    return (made if isinstance(made, Tokens) else Tokens(made)), style


def check_same(cut: Episode, clean: Episode, agent: str) -> None:
    assert cut.streams[agent].tokens == clean.streams[agent].tokens
    assert cut.streams[agent].kinds == clean.streams[agent].kinds
    own, expected = ([t for t in e.turns if t.agent == agent] for e in (cut, clean))
    assert [replace(t, step=0) for t in own] == [replace(t, step=0) for t in expected]  # clocks run on over errors
    for turn in own:
        assert tuple(cut.streams[agent].tokens[turn.start : turn.start + len(turn.reply_ids)]) == turn.reply_ids
    answers, due = ([b for b in e.beliefs if b.listener == agent] for e in (cut, clean))
    assert [(b.position, b.question) for b in answers] == [(b.position, b.question) for b in due]


@pytest.mark.parametrize("name", FORMATS)
def test_a_game_with_errors_becomes_the_game_without(name: str) -> None:
    tokens, style = tokens_of(name)
    clean = record(CLEAN, tokens, style)
    errors = [BAD[:1], (), (BAD[1], BAD[3]), (BAD[2],)]
    dirty = record(with_errors(errors), tokens, style)
    assert [bool(t.error) for t in dirty.turns] == [True, False, False, True, True, False, True, False]
    for agent in dond_environment.AGENTS:
        assert len(dirty.streams[agent]) > len(clean.streams[agent])
        cut, same = without_errors((dirty, agent))
        assert same == agent
        check_same(cut, clean, agent)
        (other,) = set(dond_environment.AGENTS) - {agent}
        assert cut.streams[other] is dirty.streams[other]
        assert [t for t in cut.turns if t.agent == other] == [t for t in dirty.turns if t.agent == other]
        assert without_errors((clean, agent))[0] is clean  # nothing to cut


@settings(max_examples=12)
@given(st.lists(st.lists(st.sampled_from(BAD), max_size=4), min_size=4, max_size=4))
def test_any_errors_anywhere(errors: list[list[str]]) -> None:
    tokens, style = tokens_of("small")
    clean, dirty = record(CLEAN, tokens, style), record(with_errors(errors), tokens, style)
    for agent in dond_environment.AGENTS:
        check_same(without_errors((dirty, agent))[0], clean, agent)


def test_an_aborted_game_ends_at_its_last_cue() -> None:
    """Five errors in a row: nothing of them is left, and nothing to imitate for the one who made them."""
    tokens, style = tokens_of("small")
    aborted = record([CLEAN[0], *[("player_1", "hm")] * 5], tokens, style)
    assert aborted.outcome["how"] == "abort"
    cut, agent = without_errors((aborted, "player_1"))
    clean = record(CLEAN, tokens, style)
    first = next(t.start for t in clean.turns if t.agent == "player_1")
    assert cut.streams[agent].tokens == clean.streams[agent].tokens[:first]
    assert not [t for t in cut.turns if t.agent == agent]
    batch = collate([(cut, agent), without_errors((aborted, "player_0"))], {})
    assert not batch.imitate[0].any() and batch.imitate[1].any()


def test_a_turn_at_the_streams_end_stays_there() -> None:
    """The game took this turn, but the stream had no room for it."""
    tokens, style = tokens_of("small")
    dirty = record(with_errors([BAD, (), (), ()]), tokens, style)
    last = Turn("player_0", "negotiator", 99, TurnKind.SPEAK, "", start=len(dirty.streams["player_0"]))
    cut, agent = without_errors((replace(dirty, turns=(*dirty.turns, last)), "player_0"))
    assert cut.turns[-1].start == len(cut.streams[agent]) < last.start


# -- the loop ----------------------------------------------------------------------------------------------------------

CONFIG = FilteredBCConfig(
    iterations=1, games=16, concurrency=16, max_new_tokens=2, context=32,
    update=UpdateConfig(learning_rate=3e-3, epochs=3, minibatches=2, max_grad_norm=1.0),
)  # fmt: skip


def clone(policy: Policy, make_env: Any, config: FilteredBCConfig) -> tuple[dict[str, float], list[Episode]]:
    seen: list[tuple[dict[str, float], list[Episode]]] = []
    learner = Learner("learner", policy, copy.deepcopy(policy), torch.optim.AdamW(policy.parameters(), lr=3e-3))
    after = lambda iteration, metrics, episodes: seen.append((metrics, list(episodes)))  # noqa: E731
    train_filtered_bc(training([learner], {"imitation": ImitationLoss()}, make_env=make_env, after=after), config)
    (only,) = seen
    return only


@torch.no_grad()
def mean_logprob(policy: Policy, episodes: Sequence[Episode], won: bool) -> float:
    batch = collate([s for s in rows_of(episodes, {"learner"}) if s[0].outcome["right"] == won], {})
    return float(forward(policy, batch, 1.0, {"reply": False}).logprobs[batch.reply].mean())


def test_what_was_won_becomes_likelier() -> None:
    policy = hint_policy(0)
    before = copy.deepcopy(policy)
    metrics, episodes = clone(policy, Hint, CONFIG)
    wins = float(np.mean([e.outcome["right"] for e in episodes]))
    assert 0 < wins < 1 and metrics["filter/kept"] == wins  # both seats of every game that was won
    gained = {won: mean_logprob(policy, episodes, won) - mean_logprob(before, episodes, won) for won in (True, False)}
    assert gained[True] > 0.02 and gained[True] > gained[False] + 0.01, gained


class Unpaid(Hint):
    """Games of hints in which nobody is ever paid."""

    def step(self, actions: dict[str, str]) -> Any:
        observations, rewards, *rest = super().step(actions)
        return observations, dict.fromkeys(rewards, 0.0), *rest


@pytest.mark.parametrize(("keep", "share"), [("above_mean", 0.0), ("all", 1.0)])
def test_a_round_in_which_nothing_is_kept_changes_nothing(keep: str, share: float) -> None:
    policy = hint_policy(0)
    before = copy.deepcopy(policy)
    metrics, _ = clone(policy, Unpaid, replace(CONFIG, keep=keep))
    assert metrics["filter/kept"] == share
    assert metrics["speed/tokens_per_second"] > 0 and (metrics["speed/update_tokens_per_second"] > 0) == bool(share)
    same = all(torch.equal(a, b) for a, b in zip(policy.parameters(), before.parameters(), strict=True))
    assert same == (share == 0.0)
