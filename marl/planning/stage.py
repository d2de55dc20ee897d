"""Stage games of many players by sampling, a thousand at once: regret matching, hedge and DiL-piKL.

`pikl.solve` wants a payoff for every joint action. Here joint actions are drawn, and a function tells what each
player's actions would have earned against what the others drew: seven players with ten actions each are no trouble.

Shapes: S stage games, n players, A actions (padded; `legal` says which exist), K types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from marl.common.errors import UserError
from marl.planning.pikl import FLOOR, Bools, Floats, Ints, Settings, respond, sample

SOLVERS = ("pikl", "regret")
KAPPAS = ("published", "sqrt", "zero")
Utilities = Callable[[Ints], Floats]  # drawn actions (S, n) -> what each action earns against the others', (S, n, A)


@dataclass(frozen=True)
class Stage:
    """Result of `solve_stage`."""

    policies: Floats  # (S, n, K, A), of each type
    population: Floats  # (S, n, A): what everybody is believed to play, the mean over types
    values: Floats  # (S, n, A): the mean utility of each action; -inf where it is not legal
    utilities: Floats  # (S, n): the mean utility of what is believed to be played


def kappa_at(kappa: str, t: int, variance: Floats) -> Floats | float:
    """Says how far draw t moves a policy, given the running variance of the types' utilities, (*batch, K).

    `published`: 3 S_t / (10 sqrt(t)), with S_t the standard deviation; `sqrt`: 1 / sqrt(t); `zero`: fictitious play.
    """
    if kappa == "published":
        return 0.3 * np.sqrt(variance / t)
    return t**-0.5 if kappa == "sqrt" else 0.0


def solve_stage(
    utilities: Utilities, anchors: Floats, legal: Bools, settings: Settings, rng: np.random.Generator,
    solver: str = "pikl", kappa: str = "published",
) -> Stage:  # fmt: skip
    """Solves S games, of `settings.iterations` draws each.

    `pikl` is DiL-piKL (Bakhtin et al. 2022, algorithm 1): hedge with lambda 0. A type of probability 0 in `beta` plays
    against what the others are believed to do, and nobody believes that it is there: an agent's own lambda.
    `regret` is regret matching (Hart and Mas-Colell 2000), without anchor and types.
    `kappa`: see `kappa_at`.
    `anchors`, `legal`: (S, n, A). A player without any legal action plays no part. Raises UserError for anchors that
    are no probabilities, and utilities that are not finite.
    """
    games, players, _ = legal.shape
    absent = ~legal.any(-1, keepdims=True)
    legal = legal | (absent & (np.arange(legal.shape[-1]) == 0))  # one action of no consequence
    tau = np.where(legal, np.where(absent, 1.0, anchors), 0.0)
    if not (tau >= 0).all() or not np.allclose(tau.sum(-1), 1, atol=1e-5):
        raise UserError("anchor: must be probabilities of sum 1 over legal actions. Normalise it over them")
    log_tau = np.log(np.maximum(tau, FLOOR), out=np.full(tau.shape, -np.inf), where=legal)
    lambdas = np.asarray(settings.lambdas if solver == "pikl" else (0.0,), dtype=np.float64)
    beta = settings.type_probs(players) if solver == "pikl" else np.ones((players, 1))  # (n, K)

    policies = np.repeat(tau[..., None, :], len(lambdas), axis=-2)  # (S, n, K, A)
    average, values, regrets = np.zeros_like(policies), np.zeros_like(tau), np.zeros_like(tau)
    means, variances = np.zeros((2, games, players, len(lambdas)))
    for t in range(1, settings.iterations + 1):
        step = settings.step(t)
        population = np.einsum("nk,snka->sna", beta, policies)
        drawn = sample([population], 1, rng)[..., 0, 0]  # (S, n)
        q = np.where(legal, utilities(drawn), 0.0)
        if not np.isfinite(q).all():
            raise UserError("utilities must be finite. Networks that are not finite make such ones")
        earned = np.einsum("snka,sna->snk", policies, q)
        variances = (1 - step) * (variances + step * (earned - means) ** 2)
        means += step * (earned - means)
        values += step * (q - values)
        average += step * (policies - average)
        if solver == "pikl":
            policies = respond(values, log_tau, lambdas, kappa_at(kappa, t + 1, variances))
        else:
            regrets += step * (np.where(legal, q - earned, 0.0) - regrets)
            gains = np.maximum(regrets, 0.0)
            gains = np.where(gains.sum(-1, keepdims=True) > 0, gains, tau)
            policies = (gains / gains.sum(-1, keepdims=True))[..., None, :]

    wanted = average if settings.iterate == "average" else policies
    return Stage(
        wanted,
        np.einsum("nk,snka->sna", beta, wanted),
        np.where(legal & ~absent, values, -np.inf),
        np.einsum("nk,snk->sn", beta, means),
    )
