"""Advantages without a critic: the return from each turn on, less a baseline that its play has no part in.

One small file each; GAE is in `learning/advantages.py`. A play is a row: one seat of one game. A group is the plays of
one seat from one start (`algo.group`). A baseline belongs to a play, never to the number of a turn: where the policy
decides how many turns there are, plays that reach a late turn are not alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from marl.learning.batch import Row
from marl.learning.estimators.grpo import grpo
from marl.learning.estimators.rae import rae
from marl.learning.estimators.rloo import rloo

GROUPED: dict[str, Callable[[Tensor, bool], tuple[Tensor, float]]] = {"rloo": rloo, "grpo": grpo}
ESTIMATORS = ("gae", *GROUPED, "rae")
SPREAD = 1e-6  # returns of a group that differ by less are rounding


@dataclass
class Baselines:
    """Baselines of a batch's rows, by one of ESTIMATORS without a critic.

    `running`: the running mean of each role's returns so far, which `rae` moves on. `metrics` are noted by a call.
    """

    name: str
    rows: Sequence[Row]
    running: dict[str, float]
    scale: bool = True
    metrics: dict[str, float] = field(default_factory=dict)

    def __call__(self, totals: Tensor, played: Tensor) -> tuple[Tensor, Tensor]:
        """Returns baselines and the factors of advantages, both (B,).

        totals: whole returns (B,). played: rows with a turn, (B,) bool.
        """
        baselines, factors = torch.zeros_like(totals), torch.ones_like(totals)
        rows = played.nonzero()[:, 0].tolist()
        if self.name == "rae":
            games = [(id(self.rows[b][0]), self.rows[b][0].roles[self.rows[b][1]]) for b in rows]
            baselines[rows] = torch.tensor(rae(totals[rows].tolist(), games, self.running), dtype=totals.dtype)
            return baselines, factors
        groups: dict[tuple[int, str], list[int]] = {}
        for b in rows:
            episode, agent = self.rows[b]
            groups.setdefault((episode.seed, agent), []).append(b)
        flat = 0
        for group in groups.values():
            own = totals[group]
            if len(group) == 1 or float(own.max() - own.min()) < SPREAD:  # nothing to compare with
                factors[group] = 0.0
                flat += 1
            else:
                baselines[group], factors[group] = GROUPED[self.name](own, self.scale)
        self.metrics["groups/flat"] = flat / max(len(groups), 1)
        return baselines, factors
