"""Talk in `pure` Diplomacy as one seat knows it, and what its messages are said for.

An intent is a pair of orders: what the author of a message will order in this phase, and what it expects of its reader.
A power with several units means the first of them. Texts are those of compact style.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from envs.core import END, Style
from envs.diplomacy.orders import branches
from envs.diplomacy.pure import HOMES, POWERS, N, order_text
from envs.diplomacy.reading import Order
from envs.diplomacy.texts import NOBODY, wording
from marl.agents.base import Player
from marl.agents.pure import PositionTracker
from marl.agents.scripted.diplomacy import ASK, OFFER, understand
from marl.model.tokens import StreamWriter, Tokens
from marl.types import Kind

PUBLIC = re.compile(r"(spring|fall|winter)( retreats)? \d+|[A-Z]{3} [-+HDB].*")
HEARD = re.compile(rf"({'|'.join(POWERS)}): (.*)")
CUT = re.compile(r"cut (\d+)")


class Utterance(NamedTuple):
    """A message from one power to another."""

    speaker: str
    reader: str
    text: str

    def within(self, power: str, partner: str | None) -> bool:
        """Tells whether it belongs to the talk of a power with one partner (None: with all)."""
        both = {self.speaker, self.reader}
        return power in both and partner in (None, *both - {power})


class Intent(NamedTuple):
    """Orders of a message's author and reader, as (province, order) in the numbers of `envs.diplomacy.pure`."""

    own: tuple[int, int]
    reader: tuple[int, int]

    def text(self) -> str:
        """The line by which a model is told its intent, in words that messages have: a small model copies these."""
        return f"me {_in_words(*self.own)} you {_in_words(*self.reader)}\n"


def _in_words(place: int, code: int) -> str:
    source, goal = divmod(code, N)
    where = f"{HOMES[source]} to {HOMES[goal]}" if goal != source else f"{HOMES[source]} alone"
    return where if source == place else f"support {where}"


@dataclass
class Phase:
    """Moves of a phase and the talk before them, as one seat knows them."""

    before: str  # what all were told since the last such phase, the position included
    state: np.ndarray  # (1, WIDTH) the position
    talk: list[Utterance] = field(default_factory=list)
    orders: dict[int, int] = field(default_factory=dict)  # by province; empty until they are told

    def unit_of(self, power: str) -> int | None:
        """Finds the province of a power's first unit."""
        places = np.flatnonzero(self.state[0, :N] == POWERS.index(power))
        return int(places[0]) if len(places) else None

    def until(self, messages: int) -> Phase:
        """The same phase after so many of its messages."""
        return replace(self, talk=self.talk[:messages], orders={})


class Notes:
    """Notes of what one seat read (`read`) and said (`say`), phase by phase."""

    def __init__(self) -> None:
        self.tracker, self.opening, self.phases = PositionTracker(), "", list[Phase]()
        self.to = NOBODY  # whom it writes to
        self._public, self._orders_phase = "", 0

    @property
    def power(self) -> str:
        return self.tracker.seen.power

    def read(self, text: str) -> None:
        """Takes an observation. UserError as of `PositionTracker.observe`."""
        for line in text.split("\n"):
            self.tracker.observe(line)
            if self.tracker.seen.orders_phase > self._orders_phase:
                self._orders_phase = self.tracker.seen.orders_phase
                self.phases[-1].orders = {HOMES.index(o.place): code_of(o) for o in self.tracker.seen.orders}
            if not self.opening:
                self.opening = f"{line}\n"
            elif line.partition(" ")[0] in POWERS:
                self.phases.append(Phase(f"{self._public}{line}\n", self.tracker.position()))
                self._public = ""
            elif PUBLIC.fullmatch(line):
                self._public += f"{line}\n"
            elif (match := HEARD.fullmatch(line)) and match[2] != "...":
                self.phases[-1].talk.append(Utterance(match[1], self.power, match[2]))
            elif match := CUT.fullmatch(line):
                talk = self.phases[-1].talk
                talk[-1] = talk[-1]._replace(text=talk[-1].text[: int(match[1])])

    def say(self, reply: str) -> None:
        """Adds one's own message to whom it writes to; an empty one is none."""
        if words := as_heard(reply):
            self.phases[-1].talk.append(Utterance(self.power, self.to, words))


def as_heard(reply: str) -> str:
    """A reply as its reader hears it, unless the game cuts it."""
    return "".join(" " if c.isspace() else c for c in reply.partition(END)[0].strip())


class Noted:
    """A player whose notes are kept."""

    def __init__(self, player: Player) -> None:
        self.player, self.notes = player, Notes()

    def observe(self, text: str) -> None:
        self.notes.read(text)
        self.player.observe(text)

    def reply(self, text: str, options: Sequence[str] = ()) -> str:
        self.notes.read(text)
        found = self.player.reply(text, options)
        if not options:
            self.notes.say(found)
        elif NOBODY in options:
            self.notes.to = found
        return found


# --- Orders -----------------------------------------------------------------------------------------------------------
def code_of(order: Order) -> int:
    """The number of an order that was read."""
    place = HOMES.index(order.place)
    if order.verb == "+":
        source = HOMES.index(order.target)
        return source * N + (HOMES.index(order.dest) if order.dest else source)
    return place * N + (HOMES.index(order.target) if order.verb == "-" else place)


Tree = Mapping[str, int | Mapping[str, int]]  # the order that an option chooses, or those that a further choice does


@lru_cache(maxsize=4096)
def order_tree(place: int, codes: tuple[int, ...]) -> Tree:
    """The choices by which the unit in a province is given one of these orders."""
    by_text = {order_text(place, code): code for code in codes}
    found: dict[str, int | Mapping[str, int]] = {}
    for option, left in branches(tuple(by_text), Style.COMPACT).items():
        rest = branches(left, Style.COMPACT) if len(left) > 1 else {}
        found[option] = {o: by_text[own[0]] for o, own in rest.items()} if rest else by_text[left[0]]
    return found


def asks(place: int) -> str:
    """The question for the order of the unit in a province."""
    return wording(Style.COMPACT, "order", HOMES[place])


def choices_of(tree: Tree, code: int) -> tuple[str, ...]:
    """The one or two options that choose an order."""
    for option, leaves in tree.items():
        if leaves == code:
            return (option,)
        if not isinstance(leaves, int) and code in leaves.values():
            return option, next(rest for rest, own in leaves.items() if own == code)
    raise AssertionError(f"{code} is none of {tree}")


def stated(said: Utterance, phase: Phase) -> Intent | None:
    """The intent that a message states in the words of scripted players; None where they leave a doubt.

    A request says its author's move and asks for support of it; an offer, its author's support of the reader's move.
    """
    meant = understand(said.text)
    if meant.act not in (ASK, OFFER) or not {meant.place, meant.dest} <= {*HOMES} or meant.place == meant.dest:
        return None
    mover, helper = (said.speaker, said.reader) if meant.act == ASK else (said.reader, said.speaker)
    place, help_from = HOMES.index(meant.place), phase.unit_of(helper)
    alone = (phase.state[0, :N] == POWERS.index(helper)).sum() == 1  # else it may be another unit that helps
    if phase.unit_of(mover) != place or not alone or help_from is None or meant.dest == HOMES[help_from]:
        return None
    code = place * N + HOMES.index(meant.dest)
    moves, helps = (place, code), (help_from, code)
    return Intent(moves, helps) if meant.act == ASK else Intent(helps, moves)


def truthful(phase: Phase, partner: str | None = None) -> bool:
    """Tells whether everybody ordered what they said in this phase, as far as its words can be read."""
    statements = [(said, stated(said, phase)) for said in phase.talk if partner in (None, said.speaker, said.reader)]
    return all(each is None or phase.orders.get(each.own[0]) == each.own[1] for _, each in statements)


# --- Views ------------------------------------------------------------------------------------------------------------
def talk_view(notes: Notes, power: str, phases: Sequence[Phase], partner: str | None, tokens: Tokens) -> StreamWriter:
    """A power's stream with the talk that it had with one partner alone (None: with all), up to a question.

    `notes`: of that seat, or of its partner, who knows that talk too, and what all are told. What was said is in it as
    heard or as own replies, of which no loss learns; belief questions and own earlier choices of orders are left out.
    """
    view, style = StreamWriter(tokens), Style.COMPACT
    names = (*POWERS, NOBODY)
    view.observe(notes.opening.replace(notes.power, power), (), 0)
    for phase in phases:
        view.observe(phase.before, (), 0)
        for said in phase.talk:
            if not said.within(power, partner):
                continue
            if said.speaker == power:
                view.observe(wording(style, "to"), (), 0)
                ids = view.cue(names)
                view.reply([ids[names.index(said.reader)]], Kind.OBSERVATION)
                view.observe(wording(style, "say", said.reader), (), 0)
                view.cue()
                view.reply(tokens.encode(f"{said.text} {END}"), Kind.OBSERVATION)
            else:
                view.observe(wording(style, "heard", said.speaker, said.text), (), 0)
    return view
