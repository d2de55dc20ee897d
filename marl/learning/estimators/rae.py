"""RAE: each play against the running mean of its role's returns, for self-play (SPIRAL, arXiv 2506.24119)."""

from collections.abc import Hashable, Sequence
from itertools import groupby

DECAY = 0.95


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
