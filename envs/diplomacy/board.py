"""The board of Diplomacy: a thin wrapper of the PyPI package `diplomacy` (an extra, AGPL-3.0), which knows the rules.

Nothing else imports that package, and this module imports it when a board is made. An order is a string as the package
writes it: `A PAR H`, `A PAR - BUR`, `A PAR S A MAR - BUR`, `F NTH C A LON - NWY`, `A PAR R GAS`, `A PAR D`, `A PAR B`,
`WAIVE`. docs: https://diplomacy.readthedocs.io.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from envs.core import check_whole

MAPS = ("pure", "standard_france_austria", "standard_germany_italy", "standard")
PACKAGE = "diplomacy"
VERSION = "1.1.2"  # of the package: another one might adjudicate otherwise
INSTALL = f"Install it with: pip install 'diplomacy=={VERSION}' (AGPL-3.0), or the extra '.[diplomacy]'."
MAX_YEARS = 100  # the package ends every game then
WAIVE = "WAIVE"
HOLD, DISBAND = "H", "D"

Options = dict[str, dict[str, tuple[str, ...]]]

# Legal orders by unit, for the places of units seen last. On `pure` there are 127 of these, and finding orders takes
# three times as long as playing them.
MOST_KNOWN = 128
_MOVES: dict[tuple[str, frozenset[str]], dict[str, tuple[str, ...]]] = {}


class Kind(StrEnum):
    """Kinds of phases."""

    MOVES = "moves"
    RETREATS = "retreats"
    ADJUSTMENTS = "adjustments"


_KINDS = {"M": Kind.MOVES, "R": Kind.RETREATS, "A": Kind.ADJUSTMENTS}


@dataclass(frozen=True)
class Position:
    """All that decides how a game goes on, as values. By power, in the order of `Board.powers`."""

    map_name: str
    phase: str  # as the package writes it in full, e.g. SPRING 1901 MOVEMENT
    units: tuple[tuple[str, ...], ...]
    retreats: tuple[tuple[tuple[str, tuple[str, ...]], ...], ...]  # dislodged units, and where each may go
    centres: tuple[tuple[str, ...], ...]
    influence: tuple[tuple[str, ...], ...]  # provinces as the picture colours them
    winner: str | None
    year: int  # years that have passed
    options: Options | None  # the legal orders, where they are known already


class Board:
    """One game. `powers` are in alphabetical order; those without units and centres stay among them.

    After `process`, `orders` are the orders that counted (by power), `corrections` why others didn't (sentences, by
    power), and `results` what came of them (by unit: `bounce`, `cut`, `dislodged`, ...; an empty tuple is success).

    Settings:
        map_name: one of `MAPS`.
        years: the game ends when so many have passed, or with a solo.
        win_centres: centres that make a solo (more than anybody else's, too); None takes the map's: more than half.

    Raises ValueError, naming the setting, for values that make no game, and ImportError without the right package.
    """

    def __init__(self, map_name: str = "pure", years: int = 8, win_centres: int | None = None) -> None:
        if map_name not in MAPS:
            raise ValueError(f"map_name must be one of {', '.join(MAPS)}, got {map_name!r}.")
        check_whole("years", years, 1, MAX_YEARS)
        self.map_name, self.years, self._win_centres = map_name, years, win_centres
        self._game = load_package().Game(game_id=map_name, map_name=map_name)
        self.powers: tuple[str, ...] = tuple(sorted(self._game.powers))
        self._powers: list[Any] = [self._game.powers[name] for name in self.powers]
        self.centre_names: tuple[str, ...] = tuple(sorted(self._game.map.scs))
        places = {loc.upper()[:3] for loc in self._game.map.locs if self._game.map.area_type(loc) != "SHUT"}
        self.provinces: tuple[str, ...] = tuple(sorted(places))
        self._province = {name: number for number, name in enumerate(self.provinces)}
        self._centre = {name: number for number, name in enumerate(self.centre_names)}
        least = 1 + max(len(power.centers) for power in self._powers)
        if win_centres is not None:
            check_whole("win_centres", win_centres, least, len(self.centre_names))
            self._game.win = win_centres
        self.win_centres: int = self._game.win
        self.first_year: int = self._game.map.first_year
        self._winner: str | None = None
        self._year = 0
        self._options: Options | None = None
        self.orders: dict[str, tuple[str, ...]] = {}
        self.corrections: dict[str, tuple[str, ...]] = {}
        self.results: dict[str, tuple[str, ...]] = {}

    # --- What is --------------------------------------------------------------------------------------------------
    @property
    def phase(self) -> str:
        """The phase in short, e.g. S1901M, F1901R, W1901A; COMPLETED after a solo."""
        return str(self._game.current_short_phase)

    @property
    def kind(self) -> Kind:
        """The kind of the phase; MOVES after the end."""
        return Kind.MOVES if self._game.is_game_done else _KINDS[self._game.phase_type]

    @property
    def year(self) -> int:
        """Years that have passed."""
        return self._year

    @property
    def over(self) -> bool:
        return bool(self._game.is_game_done) or self.year >= self.years

    @property
    def winner(self) -> str | None:
        """The power that won a solo."""
        return self._winner

    def units(self) -> dict[str, tuple[str, ...]]:
        """The units on the board by power, by province; dislodged ones are in `dislodged`."""
        return {name: tuple(sorted(p.units, key=_place)) for name, p in zip(self.powers, self._powers, strict=True)}

    def dislodged(self) -> dict[str, tuple[str, ...]]:
        return {name: tuple(sorted(p.retreats, key=_place)) for name, p in zip(self.powers, self._powers, strict=True)}

    def owned(self) -> dict[str, tuple[str, ...]]:
        """The centres of each power by name."""
        return {name: tuple(sorted(p.centers)) for name, p in zip(self.powers, self._powers, strict=True)}

    def centres(self) -> dict[str, int]:
        """Counts the centres of each power."""
        return {name: len(p.centers) for name, p in zip(self.powers, self._powers, strict=True)}

    def alive(self, power: str) -> bool:
        found = self._game.powers[power]
        return bool(found.units or found.centers or found.retreats)

    def scores(self) -> np.ndarray:
        """The scores of the powers if the game ended now, shape (P,): 1 for a solo, else squares over their sum."""
        if self._winner is not None:
            return np.array([float(name == self._winner) for name in self.powers])
        squares = np.array([len(power.centers) ** 2 for power in self._powers], float)
        return squares / squares.sum()

    # --- Orders ---------------------------------------------------------------------------------------------------
    def options(self) -> Options:
        """Lists the legal orders by power and unit; {} for each power after the end.

        Powers and units are in a fixed order, and a unit's first order is to hold.
        Adjustments have no unit: their keys are `BUILD 1`, ... or `DISBAND 1`, ..., and each has all the orders of the
        power. Its orders must then be different ones (see `left`), but WAIVE can be given again.
        """
        if self._options is None:
            self._options = self._find_options()
        return self._options

    def _find_options(self) -> Options:
        if self.over:
            return {name: {} for name in self.powers}
        if self.kind is Kind.MOVES:  # whose orders depend on where units are, not on whose they are
            units = self.units()
            key = (self.map_name, frozenset(unit for of in units.values() for unit in of))
            if key not in _MOVES:
                possible = self._game.get_all_possible_orders()
                while len(_MOVES) >= MOST_KNOWN:
                    del _MOVES[next(iter(_MOVES))]
                _MOVES[key] = {unit: _of_unit(unit, possible[unit[2:]]) for unit in key[1]}
            known = _MOVES[key]
            return {name: {unit: known[unit] for unit in of} for name, of in units.items()}
        possible = self._game.get_all_possible_orders()
        if self.kind is Kind.ADJUSTMENTS:
            both = zip(self.powers, self._powers, strict=True)
            return {name: self._adjustments(power, possible) for name, power in both}
        return {
            name: {unit: _of_unit(unit, possible[unit[2:]]) for unit in units}
            for name, units in self.dislodged().items()
        }

    def _adjustments(self, power: Any, possible: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
        need = len(power.centers) - len(power.units)
        if need < 0:
            orders = {f"{unit} {DISBAND}" for unit in power.units}
            verb = "DISBAND"
        else:
            taken = {unit[2:5] for other in self._powers for unit in other.units}
            sites = {site for site in power.homes if site in power.centers and site not in taken}
            orders = {o for loc in possible for o in possible[loc] if loc[:3] in sites}
            need, verb = min(need, len(sites)), "BUILD"
        listed = tuple(sorted(orders, key=_order_key))
        return {f"{verb} {number}": listed for number in range(1, abs(need) + 1)}

    def process(self, orders: Mapping[str, Sequence[str]]) -> None:
        """Plays the phase. Orders that can't be, and units without one, are corrected and reported in `corrections`.

        A unit holds (moves) or is disbanded (retreats) if its order is missing, illegal or given twice. Missing builds
        are waived; missing disbandments are chosen by the rules. Another's units and unknown powers change nothing.
        Raises ValueError after the end, and for orders that are not by power.
        """
        if self.over:
            raise ValueError("The game is over: no orders can be given. Make a new board, or restore a position.")
        if not isinstance(orders, Mapping):
            raise ValueError(f"Orders must be lists by power, as in {{'FRANCE': ['A PAR H']}}, got {orders!r:.40}.")
        options, kind = self.options(), self.kind
        self.orders, self.corrections = {}, {}
        for name in self.powers:
            given = orders.get(name, ())
            read = _read_adjustments if kind is Kind.ADJUSTMENTS else _read_orders
            counted, wrong = read(options[name], given)
            self.orders[name] = tuple(counted)
            if wrong:
                self.corrections[name] = tuple(wrong)
            self._game.set_orders(name, list(counted), expand=False)
        if unknown := [name for name in orders if name not in self.powers]:
            self.corrections |= {str(name): (f"There is no power {str(name)[:40]!r}.",) for name in unknown}
        for history in ("state_history", "order_history", "message_history", "result_history"):
            getattr(self._game, history).clear()  # else a board that is restored again and again would grow
        done = self._game.process()
        self.results = {str(unit): tuple(str(r) for r in found if str(r)) for unit, found in done.results.items()}
        self._options = None
        if self._game.is_game_done:  # a solo, or the draw after 100 years
            most = max(self._powers, key=lambda power: len(power.centers))
            solo = len(most.centers) >= self.win_centres and most.name in self._game.outcome
            self._winner, self._year = most.name if solo else None, self._year + 1
        else:
            self._year = int(self._game.phase.split()[1]) - self.first_year

    # --- Positions ------------------------------------------------------------------------------------------------
    def state(self) -> Position:
        """The position, to go on from (`restore`). A value: it can be compared, pickled and kept."""
        return Position(
            self.map_name,
            self._game.phase,
            tuple(tuple(p.units) for p in self._powers),
            tuple(tuple((unit, tuple(to)) for unit, to in p.retreats.items()) for p in self._powers),
            tuple(tuple(p.centers) for p in self._powers),
            tuple(tuple(p.influence) for p in self._powers),
            self._winner,
            self._year,
            self._options,
        )

    def restore(self, position: Position) -> None:
        """Goes to a position of the same map. Raises ValueError for one of another."""
        if position.map_name != self.map_name:
            raise ValueError(f"A position of {position.map_name} cannot be set up on the map {self.map_name}.")
        game = self._game
        game.clear_orders()
        game.phase = position.phase
        game.phase_type = None if position.phase == "COMPLETED" else position.phase.split()[-1][0]
        game.status, game.outcome, game.note, game.result = "active", [], "", {}
        game.dislodged, game.lost, game.popped, game.error = {}, {}, [], []
        by_power = (position.units, position.retreats, position.centres, position.influence)
        for power, units, retreats, centres, influence in zip(self._powers, *by_power, strict=True):
            power.units, power.centers, power.influence = list(units), list(centres), list(influence)
            power.retreats = {unit: list(to) for unit, to in retreats}
            power.adjust, power.civil_disorder = [], 0
        game.build_caches()
        self._winner, self._year, self._options = position.winner, position.year, position.options
        self.orders, self.corrections, self.results = {}, {}, {}

    def __deepcopy__(self, memo: object) -> Board:
        """A board of its own in the same position: a deep copy of the package's takes 300 times as long."""
        board = Board(self.map_name, self.years, self._win_centres)
        board.restore(self.state())
        board.orders, board.corrections, board.results = self.orders, self.corrections, self.results
        return board

    # --- What others see ------------------------------------------------------------------------------------------
    def features(self) -> np.ndarray:
        """The position as numbers, float32, of one size for each map, with P powers, C centres, L provinces:

        owner of each centre (C x (P + 1), one-hot, the last: nobody), unit in each province (L x P), whether it is a
        fleet (L), a dislodged unit (L x P), kind of phase (3, one-hot), whether it is fall or winter (1), the part of
        the years that has passed (1). On `pure`: 56 + 49 + 7 + 49 + 5 = 166.
        """
        P, C, L = len(self.powers), len(self.centre_names), len(self.provinces)
        owner, unit = np.zeros((C, P + 1), np.float32), np.zeros((L, P), np.float32)
        fleet, dislodged = np.zeros(L, np.float32), np.zeros((L, P), np.float32)
        owner[:, P] = 1
        for number, power in enumerate(self._powers):
            for centre in power.centers:
                owner[self._centre[centre], [number, P]] = 1, 0
            for name in power.units:
                place = self._province[name[2:5]]
                unit[place, number], fleet[place] = 1, name[0] == "F"
            for name in power.retreats:
                dislodged[self._province[name[2:5]], number] = 1
        late = not self._game.is_game_done and self._game.phase[0] != "S"
        time = [*(self.kind is kind for kind in Kind), late, self.year / self.years]
        return np.concatenate([owner.ravel(), unit.ravel(), fleet, dislodged.ravel(), np.array(time, np.float32)])

    def svg(self) -> str:
        """The position as a picture (SVG), with the names of provinces."""
        return str(self._game.render(incl_orders=False, incl_abbrev=True))


@dataclass(frozen=True)
class Geography:
    """A map's parts. Locations are provinces, and coasts as SPA/NC."""

    powers: tuple[str, ...]  # in alphabetical order
    locations: tuple[str, ...]
    ways: dict[str, tuple[tuple[str, str], ...]]  # A, F -> from where to where one may move, without convoys
    units: dict[str, tuple[str, ...]]  # at the start
    homes: dict[str, tuple[str, ...]]  # centres at the start
    centres: tuple[str, ...]


def geography(map_name: str) -> Geography:
    """Reads a map of the package."""
    board = Board(map_name)
    known = board._game.map
    found = sorted({loc.upper() for loc in known.locs if known.area_type(loc) != "SHUT"})
    ways = {
        kind: tuple((here, to) for here in found for to in found if known.abuts(kind, here, "-", to)) for kind in "AF"
    }
    return Geography(board.powers, tuple(found), ways, board.units(), board.owned(), board.centre_names)


def load_package() -> Any:
    """The package. Raises ImportError, with a sentence, if it isn't there or is of another version."""
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"Diplomacy needs the package diplomacy, which is not installed. {INSTALL}") from error
    if version != VERSION:
        raise ImportError(f"Diplomacy needs the package diplomacy {VERSION}, got {version}. {INSTALL}")
    return importlib.import_module(PACKAGE)


def left(options: Sequence[str], chosen: Sequence[str]) -> tuple[str, ...]:
    """The adjustments that a power can still choose: one for each province, or WAIVE."""
    places = {order[2:5] for order in chosen if order != WAIVE}
    return tuple(order for order in options if order == WAIVE or order[2:5] not in places)


def unit_of(order: str) -> str:
    """The unit that an order is for, e.g. A PAR."""
    return " ".join(order.split()[:2])


def _place(unit: str) -> str:
    return unit[2:]


_RANKS = {HOLD: 0, "-": 1, "S": 2, "C": 4, "R": 0, DISBAND: 5, "B": 0}


def _order_key(order: str) -> tuple[int, str]:
    """Holds, moves, supports to hold, to move, convoys, moves by convoy; builds before WAIVE, retreats before D."""
    if order == WAIVE:
        return 9, order
    words = order.split()
    rank = 5 if words[-1] == "VIA" else _RANKS[words[2]] + (words[2] == "S" and len(words) > 5)
    return rank, order


def _of_unit(unit: str, orders: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted((order for order in orders if order.startswith(f"{unit} ")), key=_order_key))


def _read_orders(options: Mapping[str, Sequence[str]], given: Sequence[str]) -> tuple[list[str], list[str]]:
    """The orders of a power's units that count, and what is wrong with the others."""
    found: dict[str, list[str]] = {unit: [] for unit in options}
    wrong = []
    for order in _listed(given):
        unit = unit_of(order) if isinstance(order, str) else ""
        if unit in found and order in options[unit]:
            found[unit].append(order)
        else:
            wrong.append(f"{str(order)[:40]!r} is no legal order of this power.")
    counted = []
    for unit, orders in found.items():
        if len(orders) == 1:
            counted += orders
            continue
        default = next(o for o in options[unit] if o.split()[2] in (HOLD, DISBAND))
        wrong.append(f"{unit} has {'several orders' if orders else 'no order'}. It counts as {default}.")
        counted.append(default)
    return counted, wrong


def _read_adjustments(options: Mapping[str, Sequence[str]], given: Sequence[str]) -> tuple[list[str], list[str]]:
    listed = next(iter(options.values()), ())
    counted: list[str] = []
    wrong = []
    for order in _listed(given):
        if len(counted) < len(options) and order in left(listed, counted):
            counted.append(order)
        else:
            wrong.append(f"{str(order)[:40]!r} is no legal order of this power, or one too many.")
    if missing := len(options) - len(counted):
        wrong.append(f"{missing} adjustment{'s are' if missing > 1 else ' is'} missing. The rules decide.")
    return counted, wrong


def _listed(given: object) -> Sequence[Any]:
    if isinstance(given, str):
        return (given,)
    return given if isinstance(given, Sequence) else ()
