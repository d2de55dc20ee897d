"""A probe finds lies that the state holds, and nothing if it holds none."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from marl.common.errors import UserError
from marl.metrics.lies import auroc, checked_messages, held_out_scores, lie_metrics, message_states
from marl.types import Episode, Kind, Stream
from tests.marl.episodes import meeting_game

LIE, TRUTH, WORD, WIDTH = 7, 8, 9, 6


def planted(rng: np.random.Generator, dims: int, signal: float, n: int = 400) -> tuple[np.ndarray, ...]:
    labels = rng.random(n) < 0.4
    states = rng.normal(size=(n, dims))
    states[:, 0] += signal * labels
    return states, labels, np.arange(n) // 4


@pytest.mark.parametrize("dims", [5, 50, 600])
def test_a_probe_finds_what_was_planted_and_nothing_else(dims: int) -> None:
    for signal in (4.0, 0.0):
        states, labels, games = planted(np.random.default_rng(0), dims, signal)
        found = auroc(held_out_scores(states, labels, games), labels, games, np.random.default_rng(0))
        if signal:
            assert found.low > (0.9 if dims < 100 else 0.6)
        else:
            assert found.low < 0.5 < found.high + 0.05 and abs(found.mean - 0.5) < 0.09


def test_the_area_by_hand() -> None:
    scores, labels = np.array([3.0, 1.0, 2.0, 1.0]), np.array([True, True, False, False])
    # Pairs (false, true): 3 > 2, 3 > 1, 1 < 2, 1 = 1: 2.5 of 4.
    assert auroc(scores, labels, np.arange(4), np.random.default_rng(0)).mean == 2.5 / 4


def test_no_game_is_scored_by_a_probe_that_knows_it() -> None:
    """Labels can be told from the game alone, so a probe would be right only about games that it was trained on."""
    rng = np.random.default_rng(0)
    games = np.repeat(np.arange(50), 4)
    labels = np.repeat(rng.random(50) < 0.5, 4)
    found = auroc(held_out_scores(np.eye(50)[games], labels, games), labels, games, rng)
    assert found.mean < 0.6


class Reader:
    """A policy whose state holds the last token of speech that it has read."""

    device = torch.device("cpu")
    lm = None  # no questions stand beside these streams

    def hidden(self, tokens: Tensor, *places: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(tokens, 12).float()[..., : WIDTH + 4]


def game_with_marks(seed: int) -> Episode:
    """`meeting_game` whose speakers end a false message on LIE and a true one on TRUTH, then an end marker."""
    game = meeting_game(seed)
    game = replace(game, facts={**game.facts, "height": 2})
    false = {id(m.turn): m.false for m in checked_messages([game])}
    streams = {agent: Stream() for agent in game.players}
    turns = []
    for turn in game.turns:
        stream = streams[turn.agent]
        stream.append([1], Kind.OBSERVATION)
        if turn.message:
            mark = {True: LIE, False: TRUTH}.get(false.get(id(turn), False), TRUTH)
            turn = replace(turn, start=len(stream), reply_ids=(WORD, mark, 2), logprobs=(0.0,) * 3, body=(0, 2))
            stream.append([WORD, mark, 2], Kind.SPEECH)
            stream.append([3, 4], Kind.OBSERVATION)
        turns.append(turn)
    return replace(game, turns=tuple(turns), streams=streams, beliefs=())


def test_states_are_those_at_the_end_of_the_message() -> None:
    games = [game_with_marks(seed) for seed in range(20)]
    policy: Any = Reader()
    messages = checked_messages(games)
    assert [m.false for m in messages[:2]] == [False, True]  # Green tells of the kill; Red was not in lab
    states = message_states({"learner": policy, "base": policy}, [(games[m.game], m.turn) for m in messages])
    assert [int(state.argmax()) for state in states[:2]] == [TRUTH, LIE]
    found = lie_metrics({"learner": policy, "base": policy}, games, np.random.default_rng(0))
    assert found["talk/lie_auroc"].mean == 1.0 and found["talk/lie_auroc_form"].mean == 1.0
    assert lie_metrics({"learner": policy}, games, np.random.default_rng(0)) == {}  # the learners' are all true
    assert lie_metrics({}, games, np.random.default_rng(0)) == {}


def test_transcripts_hold_no_streams() -> None:
    games = [replace(game_with_marks(0), streams={})]
    policy: Any = SimpleNamespace()
    with pytest.raises(UserError, match="no streams of tokens"):
        lie_metrics({"learner": policy, "base": policy}, games, np.random.default_rng(0))
