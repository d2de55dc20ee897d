"""The lambda plane: how players of `pure` Diplomacy do, and how much they play as the scripted do, by both lambdas.

Each point is a player's networks with one lambda that everybody is believed to use and one that is played with
(`marl/planning/lookahead.py`): its score as one among six anchors and among six of the scripted, and the log-likelihood
of what the scripted order in games of their own, which nobody learned from. Points of a seed meet the same seats,
temperaments and positions. Part of `python -m experiments.lookahead`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.launch.terminal import Bar
from experiments.setup.config import make
from experiments.setup.lookahead import ANCHOR, SCRIPTED, Plane, Study, scripted_of
from marl.common.errors import UserError
from marl.common.files import read_json, reading_kept
from marl.metrics.stats import Metrics, bootstrap_mean
from marl.metrics.tables import ArmRun, ablation_table, read_table, write_table
from marl.planning.lookahead import Search, search
from marl.planning.pikl import FLOOR
from marl.report.plane import METRICS, PLANE, plane_figure, plane_text
from marl.rollout.positions import NetPlayer, play

RANDOM = 1 << 21  # keeps these random numbers apart from those of training and of rated games


@dataclass(frozen=True)
class Point:
    player: str
    population: float  # the lambda that everybody is believed to use
    agent: float  # the lambda that is played with
    seed: int

    @property
    def name(self) -> str:
        return f"{self.player} {self.population:g} {self.agent:g}"


def check(study: Study, grid: Plane) -> None:
    """Refuses players that have no anchor to stay near."""
    for name in grid.players if grid.games else ():
        if name != ANCHOR and (
            name not in study.planners or not study.planners[name].anchored or study.how(name).solver != "pikl"
        ):
            near = [each for each, arm in study.planners.items() if arm.anchored]
            raise UserError(
                f"plane.players: {name} plans near no anchor, so that lambdas mean nothing to it. "
                f"Take some of {', '.join([ANCHOR, *near])}"
            )


def cells(study: Study, grid: Plane) -> dict[Path, Point]:
    """All points, by the file that each is kept in; none if there are no games."""
    lambdas = [float(each) for each in grid.lambdas] if grid.games else []
    points = [
        Point(name, population, agent, seed)
        for seed in study.seeds for name in grid.players for population in lambdas for agent in lambdas
    ]  # fmt: skip
    size = f"{grid.games}x{grid.positions}"
    return {study.folder / f"plane {p.name} {size}-s{p.seed}.json".replace(" ", "-"): p for p in points}


def measure(study: Study, grid: Plane, point: Point, bar: Bar, number: str) -> dict[str, Any]:
    """Plays a point's games, and plans in the scripted players' positions: scores, and a log-likelihood an order."""
    bar.stage(f"plane {number}", 1)
    player, game, n = planner(study, point), study.game, study.game.players
    scores = {}
    for i, name in enumerate((ANCHOR, SCRIPTED)):
        rng = np.random.default_rng([point.seed, RANDOM, i])
        seats = one_among_six(grid.games, n, rng)
        found = play(game, [study.player(name, point.seed), player], seats, rng).scores
        scores[name] = found[seats == 1].round(6).tolist()

    rng = np.random.default_rng([point.seed, RANDOM, 2])
    played = play(game, [scripted_of(game)], np.zeros((grid.positions, n), np.int64), rng)
    rows = rng.choice(len(played.states), grid.positions, replace=False)
    states, orders = played.states[rows], played.orders[rows]
    assert player.how is not None
    plans = search(game, states, player.net, player.anchor, player.how, rng, given=orders)
    owner = game.owner(states)
    plays = (owner[:, None] == np.arange(n)[:, None]).any(-1)  # (S, n): who has a unit
    logs = np.log(np.maximum(plans.stage.policies[:, :, -1, 0], FLOOR), where=plays, out=np.zeros(plays.shape))
    bar.advance(1)
    return {"scores": scores, "likelihood": (logs.sum(1) / (owner >= 0).sum(1)).round(6).tolist()}


def planner(study: Study, point: Point) -> NetPlayer:
    """The player of a point: a study's own, or one with the anchor's networks."""
    anchor = study.trained(ANCHOR, point.seed)
    if point.player == ANCHOR:
        how, net = make(Search, study.search, "search"), anchor
    else:
        how, net = study.how(point.player), study.net_player(point.player, point.seed).net
    return NetPlayer(study.game, net, replace(how, lambdas=(point.population,), agent=point.agent), anchor)


def one_among_six(games: int, players: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Seats (games, players): 1 for one at random, 0 for the others."""
    return (np.arange(players) == rng.integers(players, size=(games, 1))).astype(np.int64)


def tabulate(points: Mapping[Path, Point], out: Path) -> str:
    """Writes `plane.csv`, whose arms are `player population agent`, and `plane.svg`. Returns the means as text."""
    runs = [ArmRun(p.name, p.seed, figures(path, p.seed)) for path, p in points.items()]
    write_table(out / PLANE, ablation_table(runs))
    rows = read_table(out / PLANE)  # what the figure is drawn from again
    plane_figure(rows, out / "plane.svg")
    return plane_text(rows)


def figures(path: Path, seed: int) -> Metrics:
    """The kept figures of a point on one seed, with intervals over games and positions."""
    kept, rng = read_json(path), np.random.default_rng(seed)
    with reading_kept(path, "a point's figures"):
        values = (*(kept["scores"][name] for name in (ANCHOR, SCRIPTED)), kept["likelihood"])
        return {name: bootstrap_mean(each, rng=rng) for name, each in zip(METRICS, values, strict=True)}
