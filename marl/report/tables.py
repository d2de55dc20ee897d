"""Tables of a report, as rows for the template."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from marl.metrics.stats import Interval, Metrics
from marl.metrics.tables import ArmRun, ablation_table, figures_by_arm, iqm_table
from marl.metrics.wording import WORDING, Wording, wording
from marl.report.figures import strip_svg


def columns_of(arms: Sequence[ArmRun]) -> dict[str, Metrics]:
    """A column for each arm: intervals over its seeds, or over the games of a single run."""
    return figures_by_arm(ablation_table(arms))


def over_seeds(
    arms: Sequence[ArmRun], names: Sequence[str], metrics: Sequence[str], colours: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Rows with interquartile means, a cell for each of `names`; none if no arm has several seeds."""
    found: dict[str, Metrics] = {name: {} for name in names} | figures_by_arm(iqm_table(arms, metrics))
    return table_rows(found, [name for name in metrics if any(name in own for own in found.values())], colours)


def other_metrics(columns: Mapping[str, Metrics], shown: Sequence[str]) -> list[str]:
    """The metrics of the full table that the first one does not show."""
    found = {name for metrics in columns.values() for name in metrics} - set(shown)
    return [name for name in WORDING if name in found] + sorted(found - WORDING.keys())


def table_rows(
    columns: Mapping[str, Metrics], metrics: Sequence[str], colours: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Rows: metric, wording, a cell for each column, and a small plot of the intervals."""
    rows = []
    for metric in metrics:
        words = wording(metric)
        found = {name: metrics[metric] for name, metrics in columns.items() if metric in metrics}
        rows.append(
            {
                "metric": metric,
                "wording": words,
                "cells": [table_cell(found[name], words) if name in found else None for name in columns],
                "strip": strip_svg(found, colours),
            }
        )
    return rows


def table_cell(interval: Interval, wording: Wording) -> dict[str, str]:
    """Mean and range as text; the range is empty for a single unit."""
    known = math.isfinite(interval.low)
    return {
        "mean": wording.show(interval.mean),
        "range": f"{wording.show(interval.low)} – {wording.show(interval.high)}" if known else "",
    }
