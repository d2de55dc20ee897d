"""Settings of the benchmark."""

from dataclasses import dataclass

from marl.common.errors import UserError, check_choices, check_range

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Point:
    """Games at once, tokens of a seat's stream at most, and a Llama's shape and number format.

    `inner`: width inside a layer's MLP; null for three times `width`. `vocab`: null for the tokenizer's.
    """

    games: int
    context: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    dtype: str = "float32"
    inner: int | None = None
    vocab: int | None = None

    def __post_init__(self) -> None:
        shape = f"width={self.width}, heads={self.heads}, kv_heads={self.kv_heads}"
        check_range(self, "points", "[1, inf)", "games", "context", "width", "layers", "heads", "kv_heads")
        check_range(self, "points", "[1, inf), or null", "inner", "vocab")
        if self.width % (2 * self.heads):  # positions turn pairs of numbers
            raise UserError(f"points: {shape}: a head's share of the width must be an even number")
        if self.heads % self.kv_heads:
            raise UserError(f"points: {shape}: kv_heads must divide heads")
        check_choices(self, "points", dtype=DTYPES)

    def __str__(self) -> str:
        words = f"{self.vocab} words, " if self.vocab else ""
        shape = f"layers {self.layers}, width {self.width}"
        return f"{self.games} games, context {self.context}, {shape}, {words}{self.dtype}"


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
        for point in self.points:
            if point.vocab is not None and point.vocab < self.vocab_size:
                raise UserError(f"points: vocab={point.vocab}: must be at least vocab_size={self.vocab_size}")
        counts = ("vocab_size", "reply_tokens", "decode_steps", "repeats", "update_rows", "update_tokens")
        check_range(self, "", "[1, inf)", *counts, "baseline_rows", "random_games")
        check_range(self, "", "[0, inf); 0 for no baselines", "baseline_games")
