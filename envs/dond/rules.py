"""Contexts and outcomes: pools, values, points, Pareto-optimal deals."""

import re
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from zlib import crc32

import numpy as np

from envs.core import check_file

ITEMS = ("books", "hats", "balls")
MIN_COUNT, MAX_COUNT = 1, 4  # of one item
MIN_POOL, MAX_POOL = 5, 7  # items in all
FILES = ("contexts",)  # settings that name files
MAX_POINTS = 10  # the whole pool is worth exactly this to each player
Triple = tuple[int, int, int]  # one number per item, in the order of ITEMS


# --- Contexts ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Context:
    """The counts of the items, and each player's values of one of each, in seat order.

    Raises ValueError, naming the rule, unless all rules of Lewis et al. 2017 hold.
    """

    counts: Triple
    values: tuple[Triple, Triple]

    def __post_init__(self) -> None:
        counts, values = self.counts, self.values
        if not all(MIN_COUNT <= n <= MAX_COUNT for n in counts):
            raise ValueError(f"Each count must be {MIN_COUNT} to {MAX_COUNT}, got counts {counts}.")
        if not MIN_POOL <= sum(counts) <= MAX_POOL:
            raise ValueError(f"The pool must hold {MIN_POOL} to {MAX_POOL} items, got counts {counts}.")
        for player, own in enumerate(values):
            if min(own) < 0 or points(counts, own) != MAX_POINTS:
                raise ValueError(
                    f"Values must be 0 or more and make the whole pool worth {MAX_POINTS} points to each player, "
                    f"got values {own} for player_{player} with counts {counts}."
                )
        each, both = _overlap(*values)
        if not each:
            raise ValueError(f"Every item must be worth something to at least one player, got values {values}.")
        if not both:
            raise ValueError(f"Some item must be worth something to both players, got values {values}.")


def _overlap(own: Triple, other: Triple) -> tuple[bool, bool]:
    """Two booleans: every item is worth something to a player; some item is to both."""
    pairs = tuple(zip(own, other, strict=True))
    return all(a or b for a, b in pairs), any(a and b for a, b in pairs)


@cache
def value_vectors(counts: Triple) -> tuple[Triple, ...]:
    """All value vectors that make the pool worth exactly 10 points: 9 to 26 of them, depending on the counts."""
    values = range(MAX_POINTS + 1)
    return tuple(v for v in product(values, values, values) if points(counts, v) == MAX_POINTS)


@cache
def partner_values(counts: Triple, own_values: Triple) -> tuple[Triple, ...]:
    """The partner's possible values given the counts and one's own values: those that make a valid context.

    Raises ValueError unless the pool is worth 10 points under `own_values`.
    """
    if points(counts, own_values) != MAX_POINTS:
        raise ValueError(f"With counts {counts}, values {own_values} don't make the pool worth {MAX_POINTS} points.")
    return tuple(other for other in value_vectors(counts) if all(_overlap(own_values, other)))


@cache
def contexts() -> tuple[Context, ...]:
    """All 5,295 valid contexts, as ordered pairs of players (2,706 when the players' order is ignored)."""
    sizes = range(MIN_COUNT, MAX_COUNT + 1)
    pools = [counts for counts in product(sizes, sizes, sizes) if MIN_POOL <= sum(counts) <= MAX_POOL]
    return tuple(
        Context(counts, (own, other))
        for counts in pools
        for own in value_vectors(counts)
        for other in partner_values(counts, own)
    )


SPLITS = ("all", "train", "test", "outside")  # of contexts, so that agents can be tested where they never trained


def in_test(context: Context) -> bool:
    """Tells whether a context is of the held-out fifth: the same ones in every file, in either order of the players."""
    return crc32(repr((context.counts, tuple(sorted(context.values)))).encode()) % 5 == 0


def read_contexts(path: str | Path) -> tuple[Context, ...]:
    """Reads the published `selfplay.txt`: two lines a game, one for each player, `count value` for each item.

    Raises ValueError with file name, line number and what was expected there, and FileNotFoundError.
    """
    check_file(path)
    lines = Path(path).read_text(encoding="utf-8", errors="replace").rstrip().split("\n")
    games: list[Context] = []
    players: list[tuple[Triple, Triple]] = []  # counts and values of each line
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}: expected"
        if not re.fullmatch(r"\s*([0-9]{1,3}\s+){5}[0-9]{1,3}\s*", line):
            raise ValueError(f"{where} six whole numbers, a count and a value for books, hats and balls, got {line!r}.")
        c0, v0, c1, v1, c2, v2 = map(int, line.split())
        players.append(((c0, c1, c2), (v0, v1, v2)))
        if number % 2:
            continue
        (before, first), (counts, second) = players[-2:]
        if counts != before:
            raise ValueError(f"{where} the counts of the line before, {before}, got {counts}.")
        try:
            games.append(Context(counts, (first, second)))
        except ValueError as error:
            raise ValueError(f"{where} a valid context. {error}") from error
    if len(players) % 2:
        raise ValueError(f"{path}, line {len(lines)}: expected one more line, the second player of the last game.")
    return tuple(games)


# --- Outcomes ---------------------------------------------------------------------------------------------------------
@cache
def allocations(counts: Triple) -> tuple[Triple, ...]:
    """All claims that one player can make, 0 to n of each item: 16 to 36. The partner's share is what is left."""
    books, hats, balls = counts
    return tuple(product(range(books + 1), range(hats + 1), range(balls + 1)))


def points(claim: Triple, values: Triple) -> int:
    """The worth of the claimed items under these values."""
    return claim[0] * values[0] + claim[1] * values[1] + claim[2] * values[2]


def rest(claim: Triple, counts: Triple) -> Triple:
    """The items that a claim leaves to the partner."""
    return counts[0] - claim[0], counts[1] - claim[1], counts[2] - claim[2]


def deal_points(context: Context, claim: Triple) -> tuple[int, int]:
    """Both players' points when player_0 takes `claim` and player_1 the rest."""
    return points(claim, context.values[0]), points(rest(claim, context.counts), context.values[1])


Claims = tuple[Triple | None, Triple | None]  # both players', None where no claim was made


def complementary(claims: Claims, counts: Triple) -> bool:
    """Tells whether there is a deal: both players made a claim, and the claims add up to the counts, item by item."""
    return claims[0] is not None and claims[1] == rest(claims[0], counts)


def claim_points(context: Context, claims: Claims) -> tuple[int, int]:
    """Both players' points: what they claimed if that makes a deal, else 0 each."""
    if claims[0] is None or not complementary(claims, context.counts):
        return 0, 0
    return deal_points(context, claims[0])


def scores(both: tuple[float, float], objective: float) -> tuple[float, float]:
    """`R_i + objective * R_j` for both players: 0 semi-competitive, 1 cooperative, -1 strictly competitive (Liao)."""
    return both[0] + objective * both[1], both[1] + objective * both[0]


def pareto_optimal(context: Context, claims: Claims, objective: float) -> bool:
    """Tells whether no allocation is at least as good for both players and better for one, by their scores.

    Without a deal the points are (0, 0), measured like any other outcome.
    """
    slack = 1e-9  # equal scores may differ in the last bit when the objective isn't an integer
    u0, u1 = scores(claim_points(context, claims), objective)
    for claim in allocations(context.counts):
        w0, w1 = scores(deal_points(context, claim), objective)
        if w0 >= u0 - slack and w1 >= u1 - slack and (w0 > u0 + slack or w1 > u1 + slack):
            return False
    return True


def best_joint(context: Context) -> int:
    """The most points that the two can reach together: every item goes to whoever values it more."""
    return sum(n * max(a, b) for n, a, b in zip(context.counts, *context.values, strict=True))


def best_score(context: Context, objective: float) -> float:
    """The best mean over the two players of `R_i + objective * R_j` that any deal reaches: the self-play ceiling."""
    return (1 + objective) * best_joint(context) / 2


@cache
def prior(counts: Triple, own_values: Triple) -> np.ndarray:
    """Probabilities of the partner's values before any talk: `probs[item, value]`, shape (3, 11), read-only.

    The marginals of the uniform distribution over `partner_values`, exact when contexts are drawn from `contexts()`.
    """
    candidates = partner_values(counts, own_values)
    probs = np.zeros((3, MAX_POINTS + 1))
    for values in candidates:
        probs[(0, 1, 2), values] += 1 / len(candidates)
    probs.flags.writeable = False  # shared by all callers
    return probs
