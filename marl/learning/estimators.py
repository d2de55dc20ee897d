"""Advantages without a critic: the return from each turn on, less a baseline that its play has no part in.

A play is a row: one seat of one game. A group is the plays of one seat from one start (`algo.group`). A baseline
belongs to a play, never to the number of a turn: where the policy decides how many turns there are, plays that reach a
late turn are not alike. GAE is in `advantages.py`.

rloo: the mean of the group's other plays (Kool et al. 2019; Ahmadian et al. 2024).
grpo: the group's mean; advantages are divided by the group's standard deviation (Shao et al. 2024). Dividing weighs
groups by how sure their outcome is, which biases the gradient (Liu et al. 2025). Without `scale` it is (K - 1) / K of
rloo in a group of K.
rae: the running mean of the role's returns, for self-play (SPIRAL, arXiv 2506.24119).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from marl.learning.batch import Row

GROUPED = ("rloo", "grpo")
ESTIMATORS = ("gae", *GROUPED, "rae")
SPREAD = 1e-6  # returns of a group that differ by less are rounding
DECAY = 0.95  # of rae's running means


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

    def __post_init__(self) -> None:
        assert self.name in ESTIMATORS[1:], f"{self.name} is no estimator without a critic"

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
            elif self.name == "rloo":
                baselines[group] = (own.sum() - own) / (len(own) - 1)
            else:
                baselines[group] = own.mean()
                factors[group] = 1 / float(own.std()) if self.scale else 1.0
        self.metrics["groups/flat"] = flat / max(len(groups), 1)
        return baselines, factors


def rae(totals: Sequence[float], games: Sequence[tuple[Hashable, str]], running: dict[str, float]) -> list[float]:
    """Computes the baselines (B,) of plays, each with its (game, role), and moves the `running` means on.

    A game's plays are compared with the games before it alone, so that no play is part of its own baseline. Means begin
    at 0.
    """
    baselines: list[float] = []
    for _, group in groupby(zip(totals, games, strict=True), key=lambda play: play[1][0]):
        plays = list(group)
        baselines += [running.get(role, 0.0) for _, (_, role) in plays]
        for role in {role: None for _, (_, role) in plays}:
            own = [total for total, (_, other) in plays if other == role]
            running[role] = DECAY * running.get(role, 0.0) + (1 - DECAY) * sum(own) / len(own)
    return baselines
