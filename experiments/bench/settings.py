"""Settings of the benchmark."""

from dataclasses import dataclass, fields

from marl.common.errors import UserError

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Point:
    """Games at once, tokens of a seat's stream at most, and a Llama's shape and number format."""

    games: int
    context: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        shape = f"width={self.width}, heads={self.heads}, kv_heads={self.kv_heads}"
        check_counts(self, "points")
        if self.width % (2 * self.heads):  # positions turn pairs of numbers
            raise UserError(f"points: {shape}: a head's share of the width must be an even number")
        if self.heads % self.kv_heads:
            raise UserError(f"points: {shape}: kv_heads must divide heads")
        if self.dtype not in DTYPES:
            raise UserError(f"points: dtype={self.dtype}: must be {' or '.join(DTYPES)}")

    def __str__(self) -> str:
        return f"{self.games} games, context {self.context}, width {self.width}, {self.dtype}"


@dataclass(frozen=True)
class Settings:
    """Settings of `conf/benchmark.yaml` and `conf/bench/`, without the game's."""

    points: tuple[Point, ...]
    vocab_size: int
    reply_tokens: int
    decode_steps: int
    repeats: int
    update_rows: int
    update_tokens: int
    baseline_games: int
    baseline_rows: int
    random_games: int
    seed: int

    def __post_init__(self) -> None:
        if not self.points:
            raise UserError("points=[]: must name at least one")
        check_counts(self, "benchmark", ("seed", "baseline_games"))
        if self.baseline_games < 0:
            raise UserError(
                f"benchmark: baseline_games={self.baseline_games}: must not be negative; 0 for no baselines"
            )


def check_counts(settings: Point | Settings, where: str, free: tuple[str, ...] = ()) -> None:
    """Raises UserError for a whole number below 1, except the settings named in `free`."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, int) and value < 1 and field.name not in free:
            raise UserError(f"{where}: {field.name}={value}: must be at least 1")
