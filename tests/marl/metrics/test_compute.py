"""Compute of training: by hand, against the passes that an update makes, and arms compared at equal cost."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from marl.learning.config import UpdateConfig
from marl.learning.update import update
from marl.losses import Loss
from marl.losses.kl import KLLoss
from marl.losses.listening import ListeningLoss
from marl.losses.policy import PolicyLoss
from marl.metrics.compute import GAMES, PASSES, SHARES, at_equal_compute, learned_tokens, token_passes
from marl.metrics.tables import arm_differences
from marl.metrics.training import RESAMPLED
from marl.model.policy import Policy, tiny_lm
from marl.model.tokens import Tokens
from marl.types import Kind, TokenBatch
from tests.marl.learning.test_renaming import batch, seeded, tokens  # noqa: F401  fixtures

Row = dict[str, Any]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [  # of a million tokens in the first round and two in the second: played, and then learned from
        ({"loss": {"imitation": {}}, "algo": {"update": {"epochs": 3}}, "share": 0.5}, [0, 5.5, 16.5]),
        ({"loss": {"kl": {"estimator": "exact"}}, "algo": {"update": {"epochs": 2}}}, [0, 9, 27]),  # 1 + 2 * (3 + 1)
        ({"loss": {"kl": {"estimator": "k2"}}, "algo": {"update": {"epochs": 2}}}, [0, 8, 24]),  # 1 + 2 * 3 + 1
        ({"loss": {"kl": None, "listening": {"renamed": True}}, "algo": {"update": {"epochs": 1}}}, [0, 7, 21]),
        ({"loss": {"listening": {"renamed": True, "weight": 0}}, "algo": {"update": {"epochs": 1}}}, [0, 4, 12]),
        ({"loss": {}, "share": 0}, [0, 1, 3]),  # nothing was kept
    ],
)
def test_compute_is_counted_in_passes(settings: dict[str, Any], expected: list[float]) -> None:
    share = settings.pop("share", 1)
    rows = [{"iteration": i, "phase": "train", "rollout/tokens": 1_000_000 * i} for i in (1, 2)]
    evaluations = [{"iteration": i, "phase": "eval", "rollout/tokens": 5_000} for i in (0, 1, 2)]
    found = token_passes(settings, [*evaluations, *rows], {i: round(1_000_000 * i * share) for i in (1, 2)})
    assert found == {i: 1_000_000 * expected[i] for i in (0, 1, 2)}
    assert token_passes(settings, [*evaluations, *rows], {}) == {}  # tokens were not noted
    update = settings.get("algo", {}).get("update", {})
    stopping = {**settings, "algo": {"update": {**update, "target_kl": 0.1}}}
    assert token_passes(stopping, [*evaluations, *rows], {1: 5, 2: 5}) == {}  # it is unknown when updates ended early
    planned = {**settings, "algo": {"update": update, "planner": {"iterations": 100}}}
    assert token_passes(planned, [*evaluations, *rows], {1: 5, 2: 5}) == {}  # the cost of plans is unknown
    for share, known in ((0.5, False), (0.0, True)):  # also a partner's plans, if it plays
        cast = {"negotiator": {"player": "learner", "partner": "base+plan", "partners": share}}
        assert bool(token_passes({**settings, "cast": cast}, [*evaluations, *rows], {1: 5, 2: 5})) == known
    with_intents = {**settings, "algo": {"update": update, "intents": "runs/intents-both-s0"}}
    spoken = {**settings, "cast": {"negotiator": {"player": "learner", "partner": "base+cicero", "partners": 0.5}}}
    assert token_passes(with_intents, rows, {1: 5, 2: 5}) == token_passes(spoken, rows, {1: 5, 2: 5}) == {}
    updates = [{**row, "loss/policy": 1.0} for row in rows]
    assert token_passes(settings, updates, {1: 5}) == {} != token_passes(settings, updates, {1: 5, 2: 5})


def test_other_messages_cost_what_was_read_for_them() -> None:
    settings = {"reward": {"game": {}, "speaking": {"baseline": "resampled"}, "other": None}}
    rows = [{"iteration": i, "phase": "train", "rollout/tokens": 100} for i in (1, 2)]
    assert token_passes(settings, rows, {1: 100, 2: 100}) == {}  # earlier versions did not note it
    noted = [{**row, RESAMPLED: 250 * row["iteration"]} for row in rows]
    assert token_passes(settings, noted, {1: 100, 2: 100}) == {0: 0, 1: 400 + 250, 2: 800 + 750}


def test_a_round_in_which_nothing_was_kept_has_no_learned_tokens(tmp_path: Path) -> None:
    kept = {"iteration": 2, "phase": "train", "speed/update_tokens_per_second": 40.0, "time/update": 2.5}
    rows = [{"iteration": 1, "phase": "train"}, kept]
    (tmp_path / "timing.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert learned_tokens(tmp_path) == {2: 100}
    assert learned_tokens(tmp_path / "nowhere") == {}


@pytest.mark.parametrize(
    ("losses", "least"),
    [  # passes that stop before a row's end count to its end, so that these cost more than they are said to by a little
        ({"policy": PolicyLoss()}, 1.0),
        ({"policy": PolicyLoss(), "kl": KLLoss(estimator="exact", over="both")}, 1.0),
        ({"policy": PolicyLoss(), "listening": ListeningLoss(renamed=True)}, 0.75),
    ],
)
def test_an_update_makes_as_many_passes_as_are_counted(
    monkeypatch: pytest.MonkeyPatch,
    tokens: Tokens,  # noqa: F811
    batch: TokenBatch,  # noqa: F811
    losses: Mapping[str, Loss],
    least: float,
) -> None:
    made = 0
    hidden = Policy.hidden

    def counted(self: Policy, read: torch.Tensor, *places: torch.Tensor) -> torch.Tensor:
        nonlocal made
        made += int((read != 0).sum()) * (3 if torch.is_grad_enabled() else 1)  # 0 is padding
        return hidden(self, read, *places)

    monkeypatch.setattr(Policy, "hidden", counted)
    lm = tiny_lm(tokens.size, hidden_size=16, layers=1, heads=2, intermediate_size=32, context=512)
    policy = Policy(lm, tokens)
    update(
        policy, copy.deepcopy(policy), batch, losses, torch.optim.SGD(policy.parameters(), lr=1e-3),
        UpdateConfig(minibatches=2, epochs=2), torch.Generator().manual_seed(0), rename=seeded(tokens),
    )  # fmt: skip
    learned = int((batch.kind != Kind.PAD).sum())
    terms = {name: dict(vars(loss)) for name, loss in losses.items()}
    said = token_passes(
        {"loss": terms, "algo": {"update": {"epochs": 2}}}, [{"iteration": 1, "phase": "train"}], {1: learned}
    )[1]
    assert least * said <= made <= said


def test_arms_at_equal_compute_by_hand() -> None:
    """A run that costs twice as much is measured at half its games, for each seed: at the cost where the cheaper run
    ends."""

    def evaluations(cost: int, wins: list[float]) -> list[Row]:
        rows: list[Row] = [
            {"iteration": 2 * i, "phase": "eval", PASSES: 2 * i * cost, "game/wins": win} for i, win in enumerate(wins)
        ]
        return [*rows, {"iteration": 3, "phase": "train", PASSES: 3 * cost, "game/wins": 9.0}]

    curves = {
        ("full", 0): evaluations(20, [0.0, 0.25, 1.0]),  # cost 0, 40, 80
        ("RL", 0): evaluations(10, [0.0, 0.5, 0.75]),  # 0, 20, 40
        ("full", 1): evaluations(30, [0.0, 0.5, 1.0]),  # 0, 60, 120
        ("RL", 1): evaluations(10, [0.0, 0.25, 0.5, 0.625]),  # 0, 20, 40, 60
        ("L", 1): evaluations(40, [0.0, 1.0]),  # 0, 80; no other seed, which costs the other arms none
        ("RL", 2): evaluations(10, [0.0, 1.0]),  # no other arm has such a seed
    }
    found = {(run.arm, run.seed): run.metrics for run in at_equal_compute(curves, dict.fromkeys(curves, (8, 100)))}
    assert {key: own["game/wins"].mean for key, own in found.items()} == {
        ("full", 0): 0.25, ("RL", 0): 0.75, ("full", 1): 0.5, ("RL", 1): 0.625, ("L", 1): 0.75,
    }  # fmt: skip
    assert {key: own[GAMES].mean for key, own in found.items()} == {
        ("full", 0): 16, ("RL", 0): 32, ("full", 1): 16, ("RL", 1): 48, ("L", 1): 12,
    }  # fmt: skip
    assert found["full", 1][PASSES].mean == found["RL", 1][PASSES].mean == 60
    assert found["RL", 0]["game/wins"].n == 100
    between = at_equal_compute(
        {("full", 0): evaluations(20, [0.0, 0.25, 1.0]), ("RL", 0): evaluations(15, [0.0, 0.5, 0.75])},
        {("full", 0): (8, 100), ("RL", 0): (8, 100)},
    )
    assert between[0].metrics["game/wins"].mean == pytest.approx(0.625)  # half way from 40 to 80
    unknown = {("full", 0): curves["full", 0], ("RL", 0): [{"iteration": 2, "phase": "eval", "game/wins": 1.0}]}
    assert at_equal_compute(unknown, dict.fromkeys(unknown, (8, 100))) == []
    apart = {("full", 0): curves["full", 0], ("RL", 1): curves["RL", 1]}
    assert at_equal_compute(apart, dict.fromkeys(apart, (8, 100))) == []


def test_arms_at_shares_of_the_common_compute_by_hand() -> None:
    """The arm that has one seed less is compared on the seeds that it has, the others on both."""

    def evaluations(*wins: tuple[int, float]) -> list[Row]:
        return [{"iteration": i, "phase": "eval", PASSES: cost, "game/wins": win} for i, (cost, win) in enumerate(wins)]

    curves = {
        ("full", 0): evaluations((0, 0.0), (60, 0.6), (160, 0.8)),
        ("RL", 0): evaluations((0, 0.0), (40, 0.2), (80, 0.4)),  # the cheapest of its seed: 80
        ("L", 0): evaluations((0, 0.0), (100, 0.5)),
        ("full", 1): evaluations((0, 0.0), (20, 0.4), (40, 0.4)),  # the cheapest of its seed: 40
        ("RL", 1): evaluations((0, 0.0), (80, 0.8)),
    }
    by_hand = {  # share -> wins at 20, 40, 60 and 80 passes of seed 0, at 10, 20, 30 and 40 of seed 1
        0.25: {"full": [0.2, 0.2], "RL": [0.1, 0.1], "L": [0.1]},
        0.5: {"full": [0.4, 0.4], "RL": [0.2, 0.2], "L": [0.2]},
        0.75: {"full": [0.6, 0.4], "RL": [0.3, 0.3], "L": [0.3]},
        1.0: {"full": [0.64, 0.4], "RL": [0.4, 0.4], "L": [0.4]},
    }
    assert tuple(by_hand) == SHARES
    pairs = [("full", "RL"), ("full", "L"), ("L", "RL")]
    for share, wins in by_hand.items():
        arms = at_equal_compute(curves, dict.fromkeys(curves, (8, 100)), share)
        found = {arm: [run.metrics["game/wins"].mean for run in arms if run.arm == arm] for arm in wins}
        assert found == {arm: pytest.approx(own) for arm, own in wins.items()}, share
        both, *others = arm_differences(arms, pairs, ["game/wins"])
        a, b = (np.array(wins["full"]) - np.array(wins["RL"])).tolist()
        half = 12.7062 * abs(a - b) / 2  # Student's t of one degree of freedom, by the standard error of two
        assert (both.arm, both.seeds, both.games) == ("full - RL", 2, 400)
        assert (both.mean, both.high - both.mean) == pytest.approx(((a + b) / 2, half), abs=1e-5)
        assert others == []  # a difference of one seed has no interval over seeds
    late = {key: rows[1:] for key, rows in curves.items()}  # no evaluation before training, as by eval.every alone
    assert at_equal_compute(late, dict.fromkeys(late, (8, 100)), 0.25) == []
