"""Corruptions change a message or say that they can't; filters refuse what they should; thresholds keep their word."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from marl.common.errors import UserError
from marl.intents import filters
from marl.intents.corruptions import KINDS, Bigrams, Place
from marl.intents.draws import nucleus
from marl.intents.nonsense import Ensemble, features, train
from tests.marl.models import tiny_policy

RNG = np.random.default_rng
BEFORE, STRANGERS = ("hello there", "i want the hat"), ("what do you need ?", "deal")
WEAK = Bigrams.of(["you can have the hats", "the balls for me"])
PLACE = Place((1, 2, 3), BEFORE, STRANGERS, WEAK)


@pytest.mark.parametrize(
    ("kind", "message", "found"),
    [
        ("counts", "i want 2 balls", {"i want 1 balls", "i want 3 balls"}),
        ("counts", "give me one hat", {"give me two hat"}),
        ("counts", "i want the balls", None),  # no number
        ("counts", "1 book", None),  # the pool has one
        ("counts", "2 points", None),  # no item
        ("items", "i want the hat", {"i want the book", "i want the ball"}),
        ("items", "deal", None),
        ("sides", "i take my hats and you the rest", {"you take your hats and i the rest"}),
        ("sides", "deal ?", None),
        ("negation", "i can not do that", {"i can do that"}),
        ("negation", "i want it", {"i don't want it"}),
        ("negation", "i can do", {"i can not do"}),
        ("negation", "the balls", None),
        ("total", "1 book", {f"{n} book" for n in range(2, 8)}),
        ("total", "three balls", {"four balls", "five balls", "six balls", "seven balls"}),
        ("total", "hi", None),
        ("stranger", "deal", {"what do you need ?"}),
        ("repetition", "hello there", {"i want the hat"}),
        ("weak", "you can see it", {"you can have the hats", "you can have the balls for me"}),
    ],
)
def test_corruptions(kind: str, message: str, found: set[str] | None) -> None:
    drawn = {KINDS[kind](message, PLACE, RNG(seed)) for seed in range(40)}
    assert drawn == ({None} if found is None else found)


def test_no_corruption_leaves_a_message_as_it_is() -> None:
    said = ["i want 2 balls and you can have the rest", "ok", "deal", "hi", "i don't need my 1 book ?"]
    empty = Place((1, 2, 3), (), (), Bigrams())
    for message in said:
        for kind, corrupt in KINDS.items():
            for place in (PLACE, empty):
                assert corrupt(message, place, RNG(1)) != message, (kind, message)
    assert KINDS["repetition"]("hi", empty, RNG(0)) is None and KINDS["stranger"]("hi", empty, RNG(0)) is None


def test_repetition() -> None:
    assert filters.repeats("I want  the hat", BEFORE)
    assert not filters.repeats("i want the hats", BEFORE)
    assert filters.repeats("ok", ("the hat ?", "yes")) and not filters.repeats("ok", ("yes", "i want the hat"))
    assert not filters.repeats("ok", ())


def test_correspondence_has_the_published_slack() -> None:
    assert not filters.betrays(0.5, 0.5, -0.005) and not filters.betrays(0.5, 0.496, -0.005)
    assert filters.betrays(0.5, 0.49, -0.005) and not filters.betrays(0.1, 0.9, -0.005)


def test_the_poorest_are_left_out() -> None:
    assert filters.poorest([3.0, 1.0, 2.0, 4.0], 0.5) == [False, True, True, False]
    assert filters.poorest([1.0, 1.0], 0.5) == [False, False]  # equal values stay together
    assert filters.poorest([1.0, 2.0, 3.0], 0.1) == [True, True, False]  # one is always left
    assert filters.poorest([], 0.5) == []


def ensemble(seed: int = 0) -> tuple[Ensemble, torch.Tensor]:
    """An ensemble of two kinds that move one feature each, with features of held-out messages."""
    draw = torch.Generator().manual_seed(seed)
    human, unseen = (torch.randn(n, 5, generator=draw) for n in (300, 400))
    spoiled = {}
    for place, kind in enumerate(("items", "sides")):
        spoiled[kind] = torch.randn(200, 5, generator=draw)
        spoiled[kind][:, place] += 5
    return train(human, spoiled, unseen), unseen


def test_heads_know_their_kind_and_thresholds_the_wanted_rate(tmp_path: Path) -> None:
    found, unseen = ensemble()
    for rate in (0.05, 0.2):
        limits = found.thresholds(rate)
        refused = found.rejected(unseen, limits).mean()
        assert 0.5 * rate <= refused <= rate
    worse = torch.randn(300, 5, generator=torch.Generator().manual_seed(3))
    worse[:, 0] += 5
    assert found.rejected(worse, found.thresholds(0.05)).mean() > 0.9
    only = found.without("items")
    assert only.kinds == ("sides",) and only.rejected(worse, only.thresholds(0.05)).mean() < 0.3
    found.save(tmp_path)
    again = Ensemble.load(tmp_path)
    assert again.kinds == found.kinds and np.array_equal(again.scores(worse), found.scores(worse))
    assert np.array_equal(again.thresholds(0.05), found.thresholds(0.05))


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1])
def test_a_rate_that_is_no_share(rate: float) -> None:
    with pytest.raises(UserError, match=r"cicero\.nonsense=.*: must be a share between 0 and 1"):
        ensemble()[0].thresholds(rate)


def test_a_kind_that_spoils_nothing_is_named() -> None:
    with pytest.raises(UserError, match="items: no message could be spoiled in this way"):
        train(torch.zeros(3, 5), {"items": torch.zeros(0, 5)}, torch.zeros(2, 5))


def test_features_do_not_depend_on_who_is_read_beside() -> None:
    policy = tiny_policy()
    rows = [([1, 2, 3, 4, 5], 2), ([1, 2, 3, 4, 5, 6, 7, 8, 9], 3), ([4, 3, 2], 1)]
    together = features(policy, rows)
    assert together.shape == (3, 2 * policy.lm.config.hidden_size + 3)
    for row, own in zip(rows, together, strict=True):
        assert torch.allclose(features(policy, [row])[0], own, atol=1e-5)


def test_a_nucleus_is_the_fewest_likeliest_tokens() -> None:
    probs = np.array([0.1, 0.5, 0.05, 0.35])
    assert {nucleus(probs, 0.8, height) for height in np.linspace(0, 0.999, 50)} == {1, 3}
    assert {nucleus(probs, 0.5, height) for height in np.linspace(0, 0.999, 50)} == {1}
    drawn = np.bincount([nucleus(probs, 1.0, (i + 0.5) / 1000) for i in range(1000)], minlength=4) / 1000
    assert drawn == pytest.approx(probs, abs=2e-3)
