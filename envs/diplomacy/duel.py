"""Many positions of a two-player map at once, as arrays: France or Germany against Austria or Italy, on the whole map.

As `pure.py`, but with armies, fleets, coasts and many units of one player. The map is the package's (`board.py`);
`tests/envs/diplomacy/test_duel.py` holds what happens on it to the package's adjudicator.

A position is a row of small integers: who has a unit in each of P provinces (-1: nobody), its form (0 army, 1 fleet, 2
fleet on the second coast), who owns each centre, the season (0 spring, 1 fall), the years played. An order is a number
below `codes` that means something in its unit's province alone: hold, a move, or support.
Positions are those before moves. In between, by rule: a dislodged unit goes to a centre of its own, else to the first
free province; the units that a player began with are built where they stood; those farthest from home are disbanded.
Left out: convoys, and choices in retreats and adjustments.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from envs.diplomacy.adjudication import Bools, Floats, Small, adjudicate
from envs.diplomacy.board import geography

Ints = NDArray[np.int64]

MAPS = ("standard_france_austria", "standard_germany_italy")
FORMS = 3
FAR = 99  # steps, where there is no way


class Duel:
    """The game, without any state of its own; `years`: when it ends, unless by a solo."""

    players = 2

    def __init__(self, map_name: str = MAPS[0], years: int = 3) -> None:
        if not 1 <= years <= 100:
            raise ValueError(f"years must be from 1 to 100, got {years}.")
        known = geography(map_name)
        self.years, self.powers = years, known.powers
        self.provinces: tuple[str, ...] = tuple(sorted({place[:3] for place in known.locations}))
        number = {name: i for i, name in enumerate(self.provinces)}
        self.slots = P = len(self.provinces)

        # Locations of fleets by province and form; where each form can go.
        coasts = {name: [at for at in known.locations if at[:3] == name and at != name] or [name] for name in number}
        self.names: dict[tuple[int, int], str] = {(number[name], 0): name for name in number}
        for name, own in coasts.items():
            self.names |= {(number[name], 1 + i): at for i, at in enumerate(own)}
        forms = {
            (kind, at): (number[at[:3]], form)
            for (p, form), at in self.names.items()
            for kind in ("F" if form else "A")
        }
        reach: Bools = np.zeros((P, FORMS, P, FORMS), np.bool_)
        for kind, pairs in known.ways.items():
            for start, to in pairs:
                if (kind, start) in forms and (kind, to) in forms:
                    reach[(*forms[kind, start], *forms[kind, to])] = True
        self.reach: Bools = reach
        self.near: Bools = np.any(reach, axis=-1)  # (P, FORMS, P)
        self.steps = np.stack([_distances(reach[:, :1, :, :1]), _distances(reach[:, 1:, :, 1:])])  # army, fleet: (P, P)

        # Orders of each province: hold, moves, supports; the unit in `source` ends in `goal` in `form`.
        either: Bools = np.any(self.near, axis=1)
        orders: list[list[tuple[int, int, int]]] = []
        for p in range(P):
            goals = np.flatnonzero(either[p])
            moves = [(p, int(q), g) for q in goals for g in range(FORMS) if reach[p, :, q, g].any()]
            helps = [
                (int(q), int(r), 0) for r in goals for q in np.flatnonzero(either[:, r] | (np.arange(P) == r)) if q != p
            ]
            orders.append([(p, p, 0), *moves, *helps])
        self.codes = max(map(len, orders))
        table = np.array([own + [(p, p, -1)] * (self.codes - len(own)) for p, own in enumerate(orders)])
        self.source, self.goal, self.form = (
            np.ascontiguousarray(table[..., i]).astype(np.int8) for i in range(3)
        )  # (P, codes)
        here = np.arange(P)[:, None]
        self.own = self.source == here  # hold or move
        moves_to = reach[here, :, self.goal, self.form].swapaxes(1, 2)  # (P, FORMS, codes)
        holds = (self.own & (self.goal == here))[:, None]
        helps_to = self.near[here, :, self.goal].swapaxes(1, 2)
        self.can: Bools = (
            np.where(holds, True, np.where(self.own[:, None], moves_to, helps_to)) & (self.form >= 0)[:, None]
        )
        stays = np.broadcast_to(np.eye(P, dtype=np.bool_)[:, None], self.near.shape)
        self.helped = (self.near | stays)[self.source, :, self.goal]  # (P, codes, FORMS): the other can end there

        # Looked up by the rules between moves.
        self.centres = np.array([number[name] for name in known.centres])
        self.start_row = np.full(2 * P + len(self.centres) + 2, -1, np.int8)
        self.start_row[P : 2 * P], self.start_row[-2:] = 0, 0
        places = {(("F" if form else "A"), at): (p, form) for (p, form), at in self.names.items()}
        self.builds: list[list[tuple[int, int]]] = []  # of each player, units: province and form
        centre = {int(p): 2 * P + i for i, p in enumerate(self.centres)}
        for player, power in enumerate(known.powers):
            first = [places[unit[0], unit[2:]] for unit in known.units[power]]
            self.builds.append(first)
            for p, form in first:
                self.start_row[[p, P + p, centre[p]]] = player, form, player
        any_step = _distances(either[:, None, :, None])
        self.from_home = np.stack([any_step[[p for p, _ in own]].min(0) for own in self.builds])  # (2, P)
        self.win = len(self.centres) // 2 + 1
        self.features_size = 4 * P + 2 * len(self.centres) + 2

    def parts(self, states: Small) -> tuple[Small, Small, Small]:
        """Splits positions: whose unit is in each province, its form, and who owns each centre."""
        P = self.slots
        return states[:, :P], states[:, P : 2 * P], states[:, 2 * P : -2]

    def start(self, count: int) -> Small:
        return np.tile(self.start_row, (count, 1))

    def owner(self, states: Small) -> Small:
        return states[:, : self.slots]

    def legal(self, states: Small) -> Bools:
        """(B, P, codes): the orders that each unit can be given."""
        units, forms, _ = self.parts(states)
        places = np.arange(self.slots)
        here = units >= 0
        able = self.can[places, forms]  # (B, P, codes)
        theirs = forms[:, self.source]
        helped = here[:, self.source] & self.helped[places[:, None], np.arange(self.codes), theirs]
        return here[:, :, None] & able & (self.own | helped)

    def _centres(self, states: Small) -> Ints:
        owned = self.parts(states)[2]
        return np.stack([(owned == player).sum(1) for player in range(2)], axis=1)

    def over(self, states: Small) -> Bools:
        return (states[:, -1] >= self.years) | (self._centres(states).max(1) >= self.win)

    def scores(self, states: Small) -> Floats:
        """(B, 2): 1 for a solo, else squared centres over their sum."""
        centres = self._centres(states).astype(float)
        solo = centres.max(1, keepdims=True) >= self.win
        return np.where(solo, centres >= self.win, centres**2 / (centres**2).sum(1, keepdims=True))

    def features(self, states: Small) -> NDArray[np.float32]:
        """(B, features_size): units by player and form, owners of centres, season and time."""
        units, forms, owned = self.parts(states)
        time = np.stack([states[:, -2], states[:, -1] / self.years], axis=1)
        hot = [units == 0, units == 1, forms == 1, forms == 2, owned == 0, owned == 1, time]
        return np.concatenate(hot, axis=1, dtype=np.float32)

    def turned(self, states: Small, orders: Small, scores: Floats, by: Ints) -> tuple[Small, Small, Floats]:
        """The same: on these maps each player has a place of its own."""
        return states, orders, scores

    def step(self, states: Small, orders: NDArray[np.integer]) -> Small:
        """The positions before the next moves, given an order for each unit (B, P); the others' orders are ignored."""
        P, rows = self.slots, np.arange(len(states))[:, None]
        after = states.copy()
        units, forms, owned = self.parts(after)
        here = units >= 0
        most = int(here.sum(1).max(initial=1))
        at = np.argsort(~here, axis=1, kind="stable")[:, :most]  # (B, U): where units stand
        who = units[rows, at]
        codes = np.where(who >= 0, orders[rows, at], 0).astype(np.int64)
        source, goal, form = self.source[at, codes], self.goal[at, codes], self.form[at, codes]
        place = np.where(who >= 0, at, -1).astype(np.int8)
        kept = forms[rows, at]
        won = adjudicate(*(np.ascontiguousarray(each.T) for each in (who, source, goal, place))).T
        moves = (who >= 0) & (source == place) & (goal != place)

        # Moves, and retreats by rule.
        came = np.full((len(states), P), -1, np.int8)  # whence the unit came that is now here
        games, slots = np.nonzero(won)
        came[games, goal[games, slots]] = place[games, slots]
        gone = won | ((who >= 0) & (came[rows, at] >= 0))
        games, slots = np.nonzero(gone)
        units[games, at[games, slots]], forms[games, at[games, slots]] = -1, 0
        games, slots = np.nonzero(won)
        units[games, goal[games, slots]] = who[games, slots]
        forms[games, goal[games, slots]] = form[games, slots]
        games, slots = np.nonzero(gone & ~won)
        if len(games):
            bounced = np.zeros((len(states), P), np.bool_)
            g, s = np.nonzero(moves & ~won)
            bounced[g, goal[g, s]] = True
            here_now = at[games, slots]
            self._retreat(after, games, here_now, who[games, slots], kept[games, slots], came[games, here_now], bounced)

        # A fall's end: centres change hands, then units are built and disbanded.
        fall = states[:, -2] == 1
        holders = units[:, self.centres]
        owned[:] = np.where(fall[:, None] & (holders >= 0), holders, owned)
        for player in range(2):
            need = np.where(fall, (owned == player).sum(1) - (units == player).sum(1), 0)
            if (need > 0).any():
                self._build(after, player, need)
            if (need < 0).any():
                far = np.where(units == player, self.from_home[player], -1)
                rank = np.argsort(np.argsort(-far, axis=1, kind="stable"), axis=1)  # of equals the first province
                lost = (rank < -need[:, None]) & (units == player)
                units[lost], forms[lost] = -1, 0
        after[:, -2], after[:, -1] = ~fall, states[:, -1] + fall
        return after

    def _retreat(
        self, after: Small, games: Ints, here: Ints, who: Small, form: Small, origin: Small, bounced: Bools
    ) -> None:
        """Sets dislodged units (K,) where the rule of this module sends them; two that meet are lost."""
        units, forms, owned = self.parts(after)
        each = np.arange(len(games))
        free = self.near[here, form] & (units[games] < 0) & ~bounced[games]  # (K, P)
        free[each, origin] = False
        own = np.zeros(free.shape, np.bool_)
        own[:, self.centres] = owned[games] == who[:, None]
        goal = np.where(free, np.where(own, 0, 1), 2).argmin(1)
        has_way = free.any(1)
        met = np.zeros(units.shape, np.int64)
        np.add.at(met, (games[has_way], goal[has_way]), 1)
        for k in np.flatnonzero(has_way & (met[games, goal] == 1)):
            units[games[k], goal[k]], forms[games[k], goal[k]] = who[k], self.retreat_form(here[k], form[k], goal[k])

    def retreat_form(self, here: int, form: int, goal: int) -> int:
        """The form in which a unit arrives: a fleet on the first coast that it reaches."""
        return 0 if form == 0 else int(self.reach[here, form, goal].argmax())

    def _build(self, after: Small, player: int, need: Ints) -> None:
        """Builds up to `need` (B,) units where the player began, in a fixed order."""
        units, forms, owned = self.parts(after)
        need = need.copy()
        for p, form in self.builds[player]:
            centre = int(np.flatnonzero(self.centres == p)[0])
            now = (need > 0) & (owned[:, centre] == player) & (units[:, p] < 0)
            units[now, p], forms[now, p] = player, form
            need -= now

    def order_text(self, state: Small, place: int, code: int) -> str:
        """The order of the unit in a province as the package writes it, e.g. F BRE S A PAR - PIC."""
        _, forms, _ = self.parts(state[None])

        def unit(p: int) -> str:
            return f"{'F' if forms[0, p] else 'A'} {self.names[p, int(forms[0, p])]}"

        own, source, goal = unit(place), int(self.source[place, code]), int(self.goal[place, code])
        if source == place:
            return f"{own} H" if goal == place else f"{own} - {self.names[goal, int(self.form[place, code])]}"
        return f"{own} S {unit(source)}" + (f" - {self.provinces[goal]}" if goal != source else "")


def _distances(reach: Bools) -> Small:
    """Steps from province to province, (P, P), for a unit whose forms' ways are (P, F, P, F)."""
    P, forms = reach.shape[:2]
    found = np.full((P, P), FAR, np.int8)
    seen = np.zeros((P, P, forms), np.bool_)
    seen[np.arange(P), np.arange(P)] = True
    flat = reach.reshape(P * forms, P * forms)
    for steps in range(P):
        now = seen.any(-1) & (found == FAR)
        if not now.any():
            break
        found[now] = steps
        seen |= (seen.reshape(P, -1).astype(np.int64) @ flat > 0).reshape(seen.shape)
    return found
