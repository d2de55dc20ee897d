"""Reads from a player's texts, in any style, what it can know of the game: for scripted players and analysts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from envs.core import Style
from envs.diplomacy.texts import POWERS

CENTRES = (
    "ANK", "BEL", "BER", "BRE", "BUD", "BUL", "CON", "DEN", "EDI", "GRE", "HOL", "KIE", "LON", "LVP", "MAR", "MOS",
    "MUN", "NAP", "NWY", "PAR", "POR", "ROM", "RUM", "SER", "SEV", "SMY", "SPA", "STP", "SWE", "TRI", "TUN", "VEN",
    "VIE", "WAR",
)  # fmt: skip


@dataclass(frozen=True)
class Order:
    """An order of the last phase. Places are provinces of three letters."""

    power: str
    place: str
    verb: str  # H, -, +, ~, B or D
    target: str = ""  # where it moves, or which unit it supports or convoys
    dest: str = ""  # where that moves; "" to support it where it stays
    failed: bool = False


@dataclass
class Reader:
    """Reads a seat's texts in order (`read`) and keeps what is known."""

    power: str = ""
    years: int = 0
    win_centres: int = 0
    style: Style = Style.COMPACT
    year: int = 0
    season: str = ""  # spring, fall or winter
    kind: str = ""  # moves, retreats or adjustments
    phases: int = 0  # that were read of
    units: dict[str, str] = field(default_factory=dict)  # the power of the unit in each province
    centres: dict[str, str] = field(default_factory=dict)  # the owner of each centre
    orders: list[Order] = field(default_factory=list)  # of the last moves phase
    orders_phase: int = 0  # the number of the phase that they were given in
    stood: dict[str, str] = field(default_factory=dict)  # `units` in that phase
    owned: dict[str, str] = field(default_factory=dict)  # `centres` in that phase
    heard: list[tuple[str, str]] = field(default_factory=list)  # speaker and message, in the present phase

    def read(self, text: str) -> None:
        """Reads an observation. Raises ValueError if the first one isn't the beginning of a game."""
        for line in text.split("\n"):
            if not self.power:
                self._begin(line)
            elif self.style is Style.COMPACT:
                self._compact(line)
            else:
                self._sentence(line)

    def own(self) -> list[str]:
        return [place for place, power in self.units.items() if power == self.power]

    def units_of(self, power: str) -> list[str]:
        return [place for place, owner in self.units.items() if owner == power]

    def count(self, power: str) -> int:
        return sum(owner == power for owner in self.centres.values())

    def _begin(self, line: str) -> None:
        if match := re.match(r"you ([A-Z]+) years (\d+) solo (\d+)", line):
            self.power, self.years, self.win_centres = match[1], int(match[2]), int(match[3])
        elif match := re.match(r"You play Diplomacy as ([A-Z]+),", line):
            self.power, self.style = match[1], Style.NATURAL
        elif match := re.match(r"Diplomacy\. You are ([A-Z]+),", line):
            self.power, self.style = match[1], Style.BRIEF
        else:
            raise ValueError(f"Expected the first observation of a game, got {line[:80]!r}.")

    def _phase(self, year: int, season: str, kind: str) -> None:
        self.year, self.season, self.kind, self.heard = year, season.lower(), kind, []
        self.phases += 1
        if kind == "moves":
            self.units, self.centres = {}, {}

    def _begin_orders(self) -> None:
        self.orders, self.orders_phase, self.stood, self.owned = [], self.phases, self.units, self.centres

    def _compact(self, line: str) -> None:
        if match := re.fullmatch(r"(spring|fall|winter)( retreats)? (\d+)", line):
            kind = "retreats" if match[2] else "adjustments" if match[1] == "winter" else "moves"
            self._phase(int(match[3]), match[1], kind)
        elif (match := re.match(r"([A-Z]+): (.*)", line)) and match[1] in POWERS:
            self.heard.append((match[1], match[2]))
        elif line.split(" ")[0] in POWERS:
            self._position(line.split(" "))
        elif self.kind == "moves" and re.match(r"~?[A-Z]{3}(/[A-Z]C)? [-+=~H]", line):
            self._orders(line.split(" "))

    def _position(self, words: list[str]) -> None:
        power, owned = "", False
        listed: dict[str, list[str]] = {}
        for word in words:
            if word in POWERS:
                power, owned = word, False
            elif word == ":":
                owned, listed[power] = True, []
            elif owned:
                listed[power].append(word)
            else:
                self.units[_place(word)] = power
        for power in set(self.units.values()) | set(listed):
            for place in listed.get(power, self.units_of(power)):
                self.centres[place] = power

    def _orders(self, words: list[str]) -> None:
        self._begin_orders()
        while words:
            place = _place(words.pop(0))
            verb = words.pop(0) if words else "H"
            sign, target = (verb, "") if verb in ("H", "D", "B") else (verb[0], _place(verb[1:]))
            dest = ""
            if sign in "+~" and words:
                said = words.pop(0)
                dest = "" if said == "H" else _place(said[1:])
            failed = bool(words) and words[0] in ("fails", "dislodged")
            if failed:
                words.pop(0)
            sign = "-" if sign == "=" else sign
            self.orders.append(Order(self.units.get(place, ""), place, sign, target, dest, failed))

    def _sentence(self, line: str) -> None:
        if match := re.fullmatch(r"(Spring|Fall|Winter) of year (\d+) of (\d+): (\w+).*", line):
            self.years = int(match[3])
            self._phase(int(match[2]), match[1], {"builds": "adjustments"}.get(match[4], match[4]))
        elif (match := re.match(r"([A-Z]+) to you: (.*)", line)) and match[1] in POWERS:
            self.heard.append((match[1], match[2]))
        elif match := re.fullmatch(r"([A-Z]+): (.*); centres (.*)", line):
            self.units |= {place[2:5]: match[1] for place in match[2].split(", ") if place != "no unit"}
            self.centres |= {place: match[1] for place in match[3].split(", ") if place != "none"}
        elif match := re.fullmatch(r"([A-Z]+) ordered (.*)\.", line):
            if self.kind != "moves":
                return
            if self.orders_phase < self.phases:
                self._begin_orders()
            self.orders += self._ordered(match)

    def _ordered(self, match: re.Match[str]) -> list[Order]:
        found = []
        for text in re.findall(r"[AF] [A-Z]{3}[^(,]*(?: \([^)]*\))?", match[2]):
            order, _, fate = text.partition(" (")
            words = order.split()
            place, verb = words[1][:3], {"S": "+", "C": "~", "R": "-"}.get(words[2], words[2])
            target = words[4][:3] if verb in "+~" else words[3][:3] if verb == "-" else ""
            dest = words[6][:3] if len(words) > 6 else ""
            found.append(Order(match[1], place, verb, target, dest, bool(fate)))
        return found


def _place(word: str) -> str:
    return word.lstrip("~")[:3]
