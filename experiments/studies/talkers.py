"""Parts that studies of talkers share: models, players, cards, kept figures, tables and their drawing."""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.launch.terminal import say
from experiments.setup.select import add_cards
from marl.agents.model import PlayConfig
from marl.common.files import digest, read_json, reading_kept, write_json
from marl.intents.agent import PARTS
from marl.intents.talker import UNFINISHED
from marl.metrics.stats import Interval, rate, seed_mean
from marl.metrics.tables import TableRow, figures_by_arm, format_table, mean_over_seeds, read_table, write_table
from marl.report.figures import HALF, PAPER, save_figure, style_axes
from marl.storage.checkpoint import copy_folder, folder_digest
from marl.storage.folder import git_commit

Figures = dict[tuple[str, str], Interval]  # by arm and metric
REFUSED = "filter/refused/"  # shares of drawn messages
HEADS = "ensemble"  # the arm of figures of the nonsense ensemble
BY_ROLE = "by role"  # arms whose names begin so stand in a table of their own


@dataclass(frozen=True)
class SeedModels:
    """The folders of one seed's models, and the settings of the games that they are measured in."""

    seed: int
    env: Mapping[str, Any]
    folders: Mapping[str, Path]

    @property
    def models(self) -> dict[str, str]:
        """Digests of the models, by name."""
        return {name: folder_digest(folder) for name, folder in self.folders.items()}


def save_player(player: Path, folders: Mapping[str, Path], seed: int, arm: str = "intent", **more: str) -> None:
    """Writes models as a folder to be played as `PLAYER+cicero`. `arm`: what its dialogue model is told. `more`: what
    else stands in its card."""
    player.mkdir(parents=True, exist_ok=True)
    for part, source in folders.items():
        if not (player / part).exists() or folder_digest(player / part) != folder_digest(source):
            copy_folder(source, player / part)
    write_json(player / PARTS, {"arm": arm, "seed": seed, **more})


def card(
    run: str, seed: int, models: Mapping[str, str], figures: Figures, *, arm: str, command: str, games: int
) -> dict[str, Any]:
    """Returns a seed's line of `cards.jsonl`: the commit and models that made it, and its figures."""
    ends = {
        f"{name}: {metric}": [round(end, 4) if math.isfinite(end) else None for end in (i.mean, i.low, i.high)]
        for (name, metric), i in figures.items()
    }
    return {
        "run": run, "arm": arm, "seeds": [seed], "git_commit": git_commit(), "config_hash": digest(models),
        "command": command, "games": games, "figures": ends,
    }  # fmt: skip


def limits_of(limits: PlayConfig) -> dict[str, Any]:
    """Returns the limits that decide games, for what kept ones are named after."""
    bf16 = {"play_bf16": True} if limits.play_bf16 else {}
    return {"max_new_tokens": limits.max_new_tokens, "context": limits.context, **bf16}


def publish(made: Path, path: Path) -> None:
    """Copies a file that is kept beside a cell; none is beside those of earlier versions."""
    if made.exists():
        shutil.copyfile(made, path)


@dataclass
class SeedTables:
    """A study's cards, table and figure, written anew after each seed: it may be the last one today."""

    out: Path
    draw: Callable[[Sequence[TableRow], Path], None]
    found: dict[tuple[str, str], list[Interval]] = field(default_factory=dict)  # by arm and metric, of each seed

    def add(self, line: dict[str, Any], figures: Figures) -> None:
        """Adds a seed: its line of `cards.jsonl` and its figures."""
        add_cards([line], self.out)
        for key, each in figures.items():
            self.found.setdefault(key, []).append(each)
        rows = self.rows()
        by_role = [row for row in rows if row.arm.startswith(BY_ROLE)]
        write_table(self.out / "table.csv", [row for row in rows if row not in by_role])
        if by_role:
            write_table(self.out / "roles.csv", by_role)
        self.draw(read_table(self.out / "table.csv"), self.out / "figure.svg")  # as `report data=` draws it

    def rows(self) -> list[TableRow]:
        return [table_row(*key, each) for key, each in self.found.items()]

    def say(self) -> None:
        """Shows a table of each arm, and where all are written."""
        for arm, figures in figures_by_arm(self.rows()).items():
            say(f"\n{arm}\n" + format_table({arm: figures}))
        say(f"\ntables and figure: {self.out}")


def cached_figures(path: Path, find: Callable[[], Figures]) -> Figures:
    """Figures from a file, or found and kept there."""
    if not path.exists():
        write_json(path, {"figures": [[*key, each.to_json()] for key, each in find().items()]})
    found = read_json(path)
    with reading_kept(path, "figures"):
        return {(arm, metric): Interval.from_json(each) for arm, metric, each in found["figures"]}


def refused(counts: Mapping[str, int], filters: Sequence[str] = ()) -> dict[str, Interval]:
    """The share of drawn messages that each filter refused, and that did not end: also where it is 0, so that means
    over seeds count it. `filters`: those that were on."""
    names = dict.fromkeys((UNFINISHED, *filters), 0)
    names |= {key.removeprefix("refused/"): count for key, count in counts.items() if key.startswith("refused/")}
    return {name: rate([True] * count + [False] * (counts["drawn"] - count)) for name, count in names.items()}


def table_row(arm: str, metric: str, seeds: Sequence[Interval]) -> TableRow:
    """One line, with the interval of `mean_over_seeds`; of a difference, whose arm is `A - B`, without bounds."""
    if " - " not in arm:
        each = mean_over_seeds(metric, seeds)
    else:
        each = seeds[0] if len(seeds) == 1 else seed_mean([seed.mean for seed in seeds])
    return TableRow(arm, metric, each.mean, each.low, each.high, len(seeds), sum(one.n for one in seeds))


def row_name(row: TableRow) -> str:
    """Names a row in a figure."""
    if row.arm == HEADS:
        return row.metric.removeprefix("filter/recall/")
    if row.metric.startswith("intent/correspondence/"):  # of other players
        return f"{row.arm}, {row.metric.rpartition('/')[2]}"
    return f"{row.arm}: items" if row.metric == "intent/items" else row.arm


def draw_panels(panels: Mapping[str, Sequence[TableRow]], path: Path) -> None:
    """Draws means with intervals, a panel for each title, two beside each other."""
    lines = math.ceil(len(panels) / 2)
    figure = Figure(figsize=(HALF, 0.45 * HALF * lines), layout="constrained")
    for axes, (title, own), colour in zip(figure.subplots(lines, 2).flat, panels.items(), PAPER[1:], strict=False):
        names = [row_name(row) for row in own]
        for place, row in enumerate(own):
            axes.plot([row.low, row.high], [place, place], color=colour, linewidth=2)
            axes.plot(row.mean, place, "o", color=colour)
        axes.set_yticks(range(len(own)), names)
        axes.invert_yaxis()
        axes.set_title(title, loc="left", fontsize=10)
        style_axes(axes)
    save_figure(figure, path)
