"""The cost of training in token passes, and a comparison of runs at equal cost.

A token pass is one token put through the model once.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from marl.metrics.stats import Interval
from marl.metrics.tables import ArmRun
from marl.metrics.training import RESAMPLED
from marl.rollout.cast import RoleConfig, players_of
from marl.storage.tracking import TIMING_FILE, read_metrics

PASSES = "compute/token_passes"  # of an evaluation during training: the cost so far
GAMES = "compute/training_games"
SHARES = (0.25, 0.5, 0.75, 1.0)  # of the cheapest run's cost, at which a published table compares arms

Row = Mapping[str, Any]


def learned_tokens(folder: str | Path) -> dict[int, int]:
    """Tokens of the rows that a run learned from, by iteration: speed of its updates times their duration."""
    folder = Path(folder)
    speed, seconds = "speed/update_tokens_per_second", "time/update"
    rows = read_metrics(folder / TIMING_FILE)
    return {row["iteration"]: round(row[speed] * row[seconds]) for row in rows if speed in row and seconds in row}


def token_passes(config: Mapping[str, Any], rows: Sequence[Row], learned: Mapping[int, int]) -> dict[int, int]:
    """Token passes of training up to each iteration, from a run's settings and the lines of its `metrics.jsonl`.

    A token costs one pass to play, three for each time it is learned from, three more for beliefs of renamed rows, and
    one for a reference; other messages (`baseline=resampled`) cost what was read for them. `learned`: tokens of the
    learned rows, by iteration. Empty if the cost is unknown.
    """
    losses = {name: term for name, term in (config.get("loss") or {}).items() if term is not None}
    algo = config.get("algo") or {}
    update = algo.get("update") or {}
    seated = players_of({role: RoleConfig(**role_config) for role, role_config in (config.get("cast") or {}).items()})
    noted = "planner" in algo or algo.get("intents") or any("plan/floored" in row for row in rows)  # to learn from
    plans = noted or any("+" in name for name in seated)  # NAME+plan, NAME+cicero
    trained = [row for row in rows if row["phase"] == "train"]
    updated = {row["iteration"] for row in trained if any(k.startswith("loss/") for k in row)}
    draws = any((term or {}).get("baseline") == "resampled" for term in (config.get("reward") or {}).values())
    uncounted = draws and not all(RESAMPLED in row for row in trained)  # by runs of earlier versions
    if not learned or updated - learned.keys() or plans or uncounted or update.get("target_kl") is not None:
        return {}
    each, once = 3, 0  # passes of learning: in each epoch, and once per update
    if any(term.get("renamed") and term.get("weight", 1.0) for term in losses.values()):  # a pass of their own
        each += 3
    kinds = [term.get("estimator") == "exact" for term in losses.values() if "estimator" in term]
    each, once = each + (True in kinds), once + (False in kinds)
    spent, found = 0.0, {0: 0}
    for row in trained:
        again = learned.get(row["iteration"], 0) * (each * update.get("epochs", 1) + once)
        spent += row.get("rollout/tokens", 0) + row.get(RESAMPLED, 0) + again
        found[row["iteration"]] = round(spent)
    return found


def at_equal_compute(
    curves: Mapping[tuple[str, int], Sequence[Row]],
    games: Mapping[tuple[str, int], tuple[int, int]],
    share: float = 1.0,
) -> list[ArmRun]:
    """Metrics of each run (arm, seed) at this share of the total cost of the cheapest run of its seed.

    Linear between the evaluations during training. `games`: training games of an iteration, games of an evaluation.
    Leaves out seeds that a single arm has. Empty if a run lacks its cost or an evaluation up to there.
    """
    runs_of = Counter(seed for _, seed in curves)
    watched = {
        (arm, seed): [row for row in rows if row["phase"] == "eval" and PASSES in row]
        for (arm, seed), rows in curves.items()
        if runs_of[seed] > 1
    }
    ends = {key: max((row[PASSES] for row in rows), default=0) for key, rows in watched.items()}
    if not all(ends.values()):
        return []
    found = []
    for (arm, seed), rows in watched.items():
        cost = share * min(end for (_, other), end in ends.items() if other == seed)
        if rows[0][PASSES] > cost:
            return []
        trained, played = games[arm, seed]
        known = [{**row, GAMES: row["iteration"] * trained} for row in rows]
        names = [name for name in known[0] if "/" in name and all(name in row for row in known)]
        at = {name: float(np.interp(cost, [row[PASSES] for row in known], [r[name] for r in known])) for name in names}
        found.append(ArmRun(arm, seed, {name: Interval(x, np.nan, np.nan, played) for name, x in at.items()}))
    return found
