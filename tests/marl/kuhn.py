"""Kuhn poker (Kuhn 1950): three cards, two players, an ante of 1; and how exploitable a policy is, by enumeration."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

DEALS = tuple(itertools.permutations(range(3), 2))
ENDS = {"pp": 1, "bb": 2, "bp": 1, "pbp": 1, "pbb": 2}  # what the loser pays; a pass after a bet loses
HISTORIES = ("", "p", "b", "pb")
Policy = Callable[[int, str], float]  # card and what was done -> probability of betting


def payoff(cards: Sequence[int], done: str) -> float:
    """Winnings of the first player, in antes."""
    if done.endswith("bp"):
        return 1.0 if len(done) == 2 else -1.0
    return ENDS[done] * (1.0 if cards[0] > cards[1] else -1.0)


def value(cards: Sequence[int], done: str, bets: Policy) -> float:
    """Expected winnings of the first player when both play this policy."""
    if done in ENDS:
        return payoff(cards, done)
    bet = bets(cards[len(done) % 2], done)
    return bet * value(cards, done + "b", bets) + (1 - bet) * value(cards, done + "p", bets)


def best_response(seat: int, bets: Policy) -> float:
    """Expected winnings of the best reply in this seat against the policy in the other, by enumeration."""
    own = [(card, h) for card in range(3) for h in HISTORIES if len(h) % 2 == seat]
    found = -np.inf
    for choice in itertools.product((0.0, 1.0), repeat=len(own)):
        reply = dict(zip(own, choice, strict=True))

        def both(card: int, done: str, reply: dict[tuple[int, str], float] = reply) -> float:
            return reply[card, done] if len(done) % 2 == seat else bets(card, done)

        mean = float(np.mean([value(cards, "", both) for cards in DEALS]))
        found = max(found, mean if seat == 0 else -mean)
    return found


def exploitability(bets: Policy) -> float:
    """Half of what best replies in both seats win together, in antes; 0 in an equilibrium."""
    return (best_response(0, bets) + best_response(1, bets)) / 2
