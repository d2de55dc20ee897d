"""A seat of `env=diplomacy env.map_name=pure`, in texts, for a player who plans in positions as arrays.

It reads the position from what it is told, in any style, plans its orders once a phase and chooses them option by
option. It retreats and builds by the rules that such positions assume (`envs/diplomacy/pure.py`), and says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from envs.core import END
from envs.diplomacy.orders import branches
from envs.diplomacy.pure import HOMES, PLACES, POWERS, SEASON, WIN, YEAR, N, Pure, Small, order_text
from envs.diplomacy.reading import Reader
from envs.diplomacy.texts import NOBODY
from marl.common.errors import UserError

Plan = Callable[[Pure, Small, np.random.Generator], Small]  # positions (S, WIDTH) -> orders of all units (S, N)


class PositionTracker:
    """Notes what one seat knows of a position. Takes every observation's text in order (`observe`)."""

    def __init__(self) -> None:
        self.seen = Reader()
        self.judged = 0  # the phase whose attacks are in `hit`
        self.hit = np.full(N, -1)  # who last moved against each power

    def observe(self, text: str) -> None:
        """Reads an observation. UserError for another map or another victory than those it knows."""
        seen = self.seen
        seen.read(text)
        if strange := sorted({*seen.units, *seen.centres} - {*HOMES}):
            raise UserError(f"A player who plans knows the map pure alone, and met {strange[0]}. Seat another player")
        if seen.win_centres not in (0, WIN):  # 0: told in other words
            raise UserError(f"A player who plans wins by {WIN} centres, not by {seen.win_centres}. Seat another player")
        if seen.orders_phase > self.judged:
            self.judged = seen.orders_phase
            for order in sorted(seen.orders, key=lambda order: HOMES.index(order.place)):
                for victim in (seen.stood.get(order.target), seen.owned.get(order.target)):
                    if order.verb == "-" and victim not in (None, order.power):
                        self.hit[POWERS.index(str(victim))] = POWERS.index(order.power)

    def position(self) -> Small:
        """Writes what it knows as a row of `Pure`, (1, WIDTH)."""
        seen, row = self.seen, np.full(YEAR + 1, -1)
        for start, known in ((0, seen.units), (N, seen.centres)):
            for place, power in known.items():
                row[start + HOMES.index(place)] = POWERS.index(power)
        row[2 * N : 3 * N], row[SEASON], row[YEAR] = self.hit, seen.season == "fall", seen.year - 1
        return row.astype(np.int8)[None]


class PurePlayer(PositionTracker):
    """One seat of one game. Takes every observation's text in order, by `observe` (WAIT) or `reply`."""

    def __init__(self, plan: Plan, seed: int) -> None:
        super().__init__()
        self.plan, self.rng = plan, np.random.default_rng(seed)
        self.planned: tuple[int, Small] = (0, np.zeros(N, np.int8))  # the phase, and the orders of all units
        self.left: tuple[str, ...] = ()  # orders of the unit whose choice is begun
        self.order = ""  # of that unit

    def reply(self, text: str, options: Sequence[str] = ()) -> str:
        self.observe(text)
        if not options:
            return END
        if NOBODY in options:
            return NOBODY
        if self.seen.kind == "adjustments":
            return options[0]  # builds
        asked = re.findall(r"\b[A-Z]{3}\b", text.rstrip("\n").rpartition("\n")[2])
        if self.seen.kind == "retreats":
            return self._retreat(options)
        return self._order(HOMES.index(asked[0]) if asked else None)

    def _order(self, place: int | None) -> str:
        """The option of its plan for the unit in a province, or None: for that whose choice is begun."""
        if place is not None:
            game, states = Pure(self.seen.years), self.position()
            if self.planned[0] != self.seen.phases:
                self.planned = self.seen.phases, self.plan(game, states, self.rng)[0]
            codes = np.flatnonzero(game.legal(states)[0, place])
            self.left = tuple(order_text(place, int(c)) for c in codes)
            self.order = order_text(place, int(self.planned[1][place]))
        own = branches(self.left, self.seen.style)
        reply = next(option for option, orders in own.items() if self.order in orders)
        self.left = own[reply]
        return reply

    def _retreat(self, options: Sequence[str]) -> str:
        """Retreats home, else to the next province that it owns, else to the next one, counted from its home."""
        power = self.seen.power
        away = (PLACES - POWERS.index(power)) % N
        others = [self.seen.centres.get(place) != power for place in HOMES]
        rank = np.where(away == 0, -1, away + N * np.array(others))
        ways = [HOMES[place] for place in np.argsort(rank)]
        return next((option for way in ways for option in options if option.endswith(way)), options[0])
