"""The tables of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from marl.metrics.stats import Interval, Metrics
from marl.metrics.tables import ArmRun, ablation_table, iqm_table
from marl.metrics.wording import WORDING, Wording, wording
from marl.report.figures import strip_svg


def columns_of(arms: Sequence[ArmRun]) -> dict[str, Metrics]:
    """One column for each arm: means over seeds where there are several, else the run's own intervals over games."""
    columns: dict[str, Metrics] = {}
    for row in ablation_table(arms):
        columns.setdefault(row.arm, {})[row.metric] = Interval(row.mean, row.low, row.high, row.games)
    return columns


def over_seeds(
    arms: Sequence[ArmRun], names: Sequence[str], metrics: Sequence[str], colours: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Rows for the template with interquartile means, a cell for each of `names`; none where no arm has seeds."""
    found: dict[str, Metrics] = {name: {} for name in names}
    for row in iqm_table(arms, metrics):
        found[row.arm][row.metric] = row.interval
    return table_rows(found, [name for name in metrics if any(name in own for own in found.values())], colours)


def seed_counts(arms: Sequence[ArmRun]) -> dict[str, Interval]:
    return {row.arm: Interval(row.seeds, math.nan, math.nan, row.seeds) for row in ablation_table(arms)}


def other_metrics(columns: Mapping[str, Metrics], shown: Sequence[str]) -> list[str]:
    found = {name for metrics in columns.values() for name in metrics} - set(shown)
    return [name for name in WORDING if name in found] + sorted(found - WORDING.keys())


def table_rows(
    columns: Mapping[str, Metrics], metrics: Sequence[str], colours: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Rows for the template: metric, wording, a cell for each column, and a small plot of the intervals."""
    rows = []
    for metric in metrics:
        words = wording(metric)
        found = {name: metrics[metric] for name, metrics in columns.items() if metric in metrics}
        rows.append(
            {
                "metric": metric,
                "wording": words,
                "cells": [table_cell(found.get(name), words) for name in columns],
                "strip": strip_svg(found, colours),
            }
        )
    return rows


def table_cell(interval: Interval | None, wording: Wording) -> dict[str, str] | None:
    if interval is None:
        return None
    bare = not math.isfinite(interval.low)
    low, high = (0.0, 0.0) if bare else (interval.low, interval.high)
    return {
        "mean": wording.show(interval.mean),
        "range": "" if bare else f"{wording.show(low)} – {wording.show(high)}",
    }
