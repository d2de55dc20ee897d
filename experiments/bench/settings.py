"""Settings of the benchmark: models, points, engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from experiments.bench.workload import Script
from marl.common.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FIGURES = "benchmark.json"
Measure = Callable[[Script], dict[str, Any]]  # one repeat
ENGINES = ("ours", "generate", "generate, cache kept", "TRL")  # on the baselines' games
TRIED = 4  # on so many times fewer calls than a repeat's the rows of a call are tried
NO_ROOM = "needs at least"  # begins what is said of a point without room
INNER = 3  # a layer's inside is so many times as wide as the hidden states


@dataclass(frozen=True)
class Centre:
    """Centre of the axes; `width` is that of the model's hidden states."""

    slots: int
    context: int
    players: int
    width: int


@dataclass(frozen=True)
class Axes:
    """Values of what is changed, one thing at a time."""

    games: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    players: tuple[int, ...] = ()
    width: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelShape:
    """A model of this width: how many layers, heads that attend, and heads that keep keys and values."""

    width: int
    layers: int
    heads: int
    kv_heads: int

    def __post_init__(self) -> None:
        if min(self.width, self.layers, self.heads, self.kv_heads) < 1:
            raise UserError(f"{self}: each must be at least 1")
        if self.width % (2 * self.heads):  # positions turn pairs of numbers
            raise UserError(f"{self}: a head's share of the width must be an even number")
        if self.heads % self.kv_heads:
            raise UserError(f"{self}: kv_heads must divide heads")

    def __str__(self) -> str:
        return f"width={self.width}, layers={self.layers}, heads={self.heads}, kv_heads={self.kv_heads}"


@dataclass(frozen=True)
class Settings:
    """Settings of `conf/benchmark.yaml` and `conf/bench/`, without the game's."""

    centre: Centre
    axes: Axes
    layers: int
    heads: int
    kv_heads: int
    vocab_size: int
    reply_tokens: int
    decode_steps: int
    apart: bool
    repeats: int
    update_rows: int
    update_tokens: int
    baseline_games: int
    baseline_rows: tuple[int, ...]
    baseline_every: int
    step_rows: int
    random_games: int
    solver_iterations: int
    shapes: tuple[ModelShape, ...] = ()
    precisions: tuple[str, ...] = ("float32",)
    baseline_widths: tuple[int, ...] = ()
    minutes: float | None = None
    seed: int = 0
    deterministic: bool = False

    def __post_init__(self) -> None:
        numbers = {f"axes.{name}": n for name, values in asdict(self.axes).items() for n in values}
        numbers |= {f"centre.{name}": n for name, n in asdict(self.centre).items()}
        for name in (
            "layers",
            "reply_tokens",
            "decode_steps",
            "repeats",
            "update_rows",
            "update_tokens",
            "baseline_games",
            "baseline_every",
            "step_rows",
            "random_games",
            "solver_iterations",
        ):
            numbers[name] = getattr(self, name)
        lists = {"baseline_rows": self.baseline_rows, "baseline_widths": self.baseline_widths}
        each = [(name, n) for name, values in lists.items() for n in values]
        for name, n in [*numbers.items(), *each]:
            if n is not None and n < 1:
                raise UserError(f"{name}={n}: must be at least 1")
        if not self.baseline_rows:
            raise UserError("baseline_rows=[]: must name at least one number of rows")
        if not set(self.precisions) <= set(DTYPES):
            raise UserError(f"precisions={list(self.precisions)}: must be of {', '.join(DTYPES)}")
        for width in (self.centre.width, *self.axes.width, *self.baseline_widths):
            self.shape(width)

    def shape(self, width: int) -> ModelShape:
        """Returns the shape of the model of this width. UserError if there is no such model."""
        own = [shape for shape in self.shapes if shape.width == width]
        return own[0] if own else ModelShape(width, self.layers, self.heads, self.kv_heads)


@dataclass(frozen=True)
class Point:
    """Point that is measured: games at once, players of each, tokens of a slot, the model's width and number format."""

    games: int
    players: int
    context: int
    width: int
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.games} games of {self.players}, context {self.context}, width {self.width}, {self.dtype}"


def points_of(settings: Settings, players: int | None) -> list[Point]:
    """The centre in both precisions, then what lies around it. `players`: how many play where the game allows no other
    number."""
    c = settings.centre
    seated = players or c.players
    centre = Point(max(c.slots // seated, 1), seated, c.context, c.width)
    points = [centre, replace(centre, dtype="bfloat16")]
    points += [replace(centre, width=n, dtype=dtype) for dtype in settings.precisions for n in settings.axes.width]
    points += [replace(centre, games=n) for n in settings.axes.games]
    points += [replace(centre, context=n) for n in settings.axes.context]
    if players is None:
        points += [replace(centre, players=n, games=max(c.slots // n, 1)) for n in settings.axes.players]
    return list(dict.fromkeys(points))


def baseline_points(settings: Settings, players: int | None) -> list[Point]:
    """Returns the points of all engines: games of the centre's kind, by each model."""
    centre, *_ = points_of(settings, players)
    widths = settings.baseline_widths or (centre.width,)
    return [replace(centre, games=settings.baseline_games, width=n) for n in dict.fromkeys(widths)]
