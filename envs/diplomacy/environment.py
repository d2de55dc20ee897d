"""The PettingZoo environment of Diplomacy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from gymnasium import spaces

from envs.core import END, Question, Step, TextGame, TurnKind, View, check_whole, clean
from envs.diplomacy.board import DISBAND, HOLD, WAIVE, Board, Kind, left
from envs.diplomacy.orders import Branches, branches
from envs.diplomacy.texts import (
    NOBODY,
    ending_text,
    orders_text,
    phase_text,
    rules,
    unit_text,
    wording,
)

ROLE = "power"
PRESS = ("none", "private")
MAX_TEXT = 12_000  # characters of an observation besides a message: 34 units' orders and where they stand, in sentences


class Stage(StrEnum):
    """Stages of a phase: what is due."""

    ADDRESS = "address"  # a speaker chooses whom it writes to
    SAY = "say"  # and writes
    HEARD = "heard"  # the other reads it, before anything else is asked
    ORDERS = "orders"  # everybody's, at the same time


@dataclass
class Open:
    """An order that is being chosen."""

    unit: str  # or `BUILD 1`, ...
    orders: tuple[str, ...]  # that are left
    begun: bool = False


class Diplomacy(TextGame):
    """The game as a PettingZoo parallel environment.

    A moves phase is: with press, `rounds` times, each power in a drawn order chooses whom it writes to (turn CHOOSE)
    and writes (turn SPEAK); then all order their units, each unit in one to three choices (turn CHOOSE; see
    `orders.py`), at the same time. Retreats and adjustments are ordered alike, without press. Powers are dealt to the
    seats at random. Those without units stay in `agents`, wait, and get what they score in the end.

    Settings:
        map_name, years, win_centres: the board's (`Board`).
        style: wording of observations, "natural", "brief" or "compact"; the reset option `styles` gives agents others.
        press: "none", or "private": messages from one power to another, which nobody else reads.
        rounds: of messages before each moves phase.
        message_chars: longer messages are cut there, and the speaker is told.
        questions: units of a speaker that its addressee is asked about (`What will A PAR order?`), before and after the
            message; the answer is known when the orders are (`Question.later`). 0: none.
        render_mode: None, "ansi" or "svg".

    Raises ValueError, naming the setting, for values outside their ranges, and ImportError without the package.
    `reset(options=...)` knows `powers` (of the seats, in order) and `styles` (by agent). A reply that is none of the
    options counts as a hold, a disbanded retreat, a waived build, or nobody to write to; which unit goes instead of one
    that wasn't named, the rules decide. The `entry` of an action is order, address or message.

    The outcome, the same dict for all, has `winner` (a power or None), `how` (solo, years), `points` (scores) and
    `centres` by agent, `powers` by agent, `year`, and counts of `messages` and `errors`.
    """

    metadata = {"name": "diplomacy_v0", "render_modes": ["ansi", "svg"], "is_parallelizable": True}  # noqa: RUF012

    def __init__(
        self,
        map_name: str = "pure",
        years: int = 5,
        win_centres: int | None = None,
        style: str = "compact",
        press: str = "none",
        rounds: int = 1,
        message_chars: int = 200,
        questions: int = 2,
        render_mode: str | None = None,
    ) -> None:
        if press not in PRESS:
            raise ValueError(f"press must be {' or '.join(PRESS)}, got {press!r}.")
        check_whole("rounds", rounds, 1, 100)
        check_whole("message_chars", message_chars, 1, 10**6)
        check_whole("questions", questions, 0, 100)
        self._board = Board(map_name, years, win_centres)
        self._first = self._board.state()
        agents = [f"player_{seat}" for seat in range(len(self._board.powers))]
        super().__init__(agents, style, render_mode, max_text=MAX_TEXT + message_chars, max_reply=message_chars + 20)
        self.rounds, self.questions = rounds if press == "private" else 0, questions
        self.message_chars = message_chars
        size = len(self._board.features()) + len(agents)
        self.state_space = spaces.Box(-1.0, 100.0, (size,), np.float32)

    @property
    def board(self) -> Board:
        """The board, for trainers and analysts: not to be changed."""
        return self._board

    # --- Playing --------------------------------------------------------------------------------------------------
    def begin(self, rng: np.random.Generator, options: Mapping[str, Any]) -> dict[str, View]:
        board = self._board
        board.restore(self._first)
        dealt = [board.powers[number] for number in rng.permutation(len(board.powers))]
        self._draws = np.random.default_rng(int(rng.integers(2**62)))
        powers = options.get("powers", dealt)
        if not isinstance(powers, Sequence) or sorted(map(str, powers)) != list(board.powers):
            raise ValueError(
                f"The reset option 'powers' must be an order of {', '.join(board.powers)}, got {powers!r}."
            )
        self._power: dict[str, str] = dict(zip(self.possible_agents, powers, strict=True))
        self._agent = {power: agent for agent, power in self._power.items()}
        self._observed: dict[str, list[str]] = {
            agent: [rules(board, power, self.rounds, self.styles[agent])] for agent, power in self._power.items()
        }
        self._asks: dict[str, list[Question]] = {}
        self._asked: dict[str, dict[str, tuple[str, Branches]]] = {}  # by agent: keys of answers, units, candidates
        self._answers: dict[str, dict[str, str]] = {}
        self._speakers: list[str] = []  # powers who have yet to speak
        self._addressee = ""
        self._open: dict[str, Open | None] = {}  # by power
        self._chosen: dict[str, list[str]] = {}
        self._units: dict[str, list[str]] = {}
        self._messages = self._errors = 0
        self._outcome: dict[str, Any] | None = None
        self.transcript: list[str] = []
        self._begin_phase()
        return self._views({})

    def play(self, actions: Mapping[str, Any]) -> Step:
        """Plays the replies of those who must act. Others' are ignored; a missing one counts as an empty reply."""
        came_to: dict[str, dict[str, Any]] = {}  # fields of the view of whoever acted
        self._observed = {agent: [] for agent in self.possible_agents}
        self._asks, self._answers = {}, {}
        if self._stage is Stage.ADDRESS:
            self._address(actions, came_to)
        elif self._stage is Stage.SAY:
            self._say(actions, came_to)
        elif self._stage is Stage.HEARD:
            self._next_speaker()
        else:
            for power, opened in self._open.items():
                if opened is not None:
                    self._order(power, opened, actions, came_to)
            self._finish_orders()
        rewards = dict.fromkeys(self.possible_agents, 0.0)
        if self._board.over:
            rewards = self._end()
        return Step(self._views(came_to), rewards, self._outcome)

    def _begin_phase(self) -> None:
        """Tells everybody of the phase, and begins its talk or its orders."""
        self._tell(lambda style: phase_text(self._board, style))
        units = self._board.units()
        talkers = [power for power in self._board.powers if units[power]]
        if self._board.kind is Kind.MOVES and self.rounds and len(talkers) > 1:
            for _ in range(self.rounds):
                self._speakers += [talkers[number] for number in self._draws.permutation(len(talkers))]
        self._next_speaker()

    def _next_speaker(self) -> None:
        if self._speakers:
            self._stage = Stage.ADDRESS
            return
        self._stage = Stage.ORDERS
        for power, options in self._board.options().items():
            self._chosen[power], self._units[power] = [], list(options)
            self._next_unit(power)
        self._finish_orders()  # where nobody has a choice

    def _tell(self, write: Any) -> None:
        """Tells everybody the same, each in their style."""
        texts = {style: write(style) for style in set(self.styles.values())}
        for agent, style in self.styles.items():
            self._observed[agent].append(texts[style])

    # --- Talk -----------------------------------------------------------------------------------------------------
    def _addressees(self, speaker: str) -> tuple[str, ...]:
        units = self._board.units()
        return (*(power for power in self._board.powers if units[power] and power != speaker), NOBODY)

    def _address(self, actions: Mapping[str, Any], came_to: dict[str, dict[str, Any]]) -> None:
        speaker = self._speakers[0]
        agent, options = self._agent[speaker], self._addressees(speaker)
        reply = _word(actions.get(agent))
        error = "" if reply in options else _refusal(reply, options, "Nobody is written to.")
        self._addressee = NOBODY if error else reply
        came_to[agent] = {"entry": "address", "error": error}
        if error:
            self._refused(agent, error)
        if self._addressee == NOBODY:
            self._speakers.pop(0)
            self._next_speaker()
        else:
            self._stage = Stage.SAY
            self._ask(speaker)

    def _say(self, actions: Mapping[str, Any], came_to: dict[str, dict[str, Any]]) -> None:
        speaker = self._speakers.pop(0)
        agent, listener = self._agent[speaker], self._agent[self._addressee]
        reply = actions.get(agent)
        body = (reply if isinstance(reply, str) else "").partition(END)[0]
        start = len(body) - len(body.lstrip())
        one_line = "".join(" " if c.isspace() else c for c in body.strip())
        message = clean(one_line, self.message_chars)
        if len(message) < len(one_line):
            self._observed[agent].append(wording(self.styles[agent], "cut", len(message)))
        came_to[agent] = {"entry": "message", "message": message, "span": (start, start + len(message))}
        heard = (speaker, message) if message else (speaker,)
        self._observed[listener].append(wording(self.styles[listener], "heard" if message else "silence", *heard))
        self._messages += bool(message)
        self.transcript.append(f"{speaker} to {self._addressee}: {message}")
        self._ask(speaker)
        self._stage = Stage.HEARD

    def _ask(self, speaker: str) -> None:
        """Asks the addressee what the speaker's units will order."""
        listener = self._agent[self._addressee]
        style, options = self.styles[listener], self._board.options()[speaker]
        for unit in list(options)[: self.questions]:
            own = branches(options[unit], style)
            key = f"{self._board.phase} {unit}"
            text = wording(style, "question", unit_text(unit, style)).rstrip("\n")
            self._asked.setdefault(listener, {})[key] = (unit, own)
            self._asks.setdefault(listener, []).append(Question(text, tuple(own), "", later=key))

    # --- Orders ---------------------------------------------------------------------------------------------------
    def _next_unit(self, power: str) -> None:
        """Goes on to the power's next unit that has a choice."""
        self._open[power] = None
        while self._units[power] and self._open[power] is None:
            unit = self._units[power].pop(0)
            orders: Sequence[str] = self._board.options()[power][unit]
            if self._board.kind is Kind.ADJUSTMENTS:
                orders = left(orders, self._chosen[power])
            if len(orders) > 1:
                self._open[power] = Open(unit, tuple(orders))
            else:
                self._chosen[power] += orders

    def _order(self, power: str, opened: Open, actions: Mapping[str, Any], came_to: dict[str, dict[str, Any]]) -> None:
        agent = self._agent[power]
        reply, own = _word(actions.get(agent)), branches(opened.orders, self.styles[agent])
        came_to[agent] = {"entry": "order"}
        if reply in own:
            opened.orders, opened.begun = own[reply], True
            if len(opened.orders) > 1:
                return
            self._chosen[power] += opened.orders
        else:
            default = [o for o in opened.orders if _is_default(o, self._board.kind)]
            if not default and self._board.kind is not Kind.ADJUSTMENTS:  # begun: the unit holds
                default = [o for o in self._board.options()[power][opened.unit] if _is_default(o, self._board.kind)]
            counts = f"It counts as {default[0]}." if default else "The rules decide."
            came_to[agent]["error"] = error = _refusal(reply, tuple(own), counts)
            self._refused(agent, error)
            self._chosen[power] += default[:1]
        self._next_unit(power)

    def _finish_orders(self) -> None:
        """Plays the phase once all orders are chosen, and goes on to the next in which there is a choice."""
        if any(self._open.values()) or self._board.over:
            return
        board = self._board
        phase, moves = board.phase, board.kind is Kind.MOVES
        board.process(self._chosen)
        self.transcript += [f"{phase} {power}: {', '.join(own)}" for power, own in board.orders.items() if own]
        if moves:
            ordered = {" ".join(order.split()[:2]): order for own in board.orders.values() for order in own}
            self._answers = {
                agent: {key: next(label for label, group in own.items() if ordered[unit] in group)
                        for key, (unit, own) in asked.items()}
                for agent, asked in self._asked.items()
            }  # fmt: skip
            self._asked = {}
        self._tell(lambda style: orders_text(board, board.orders, style))
        if not board.over:
            self._begin_phase()

    def _refused(self, agent: str, error: str) -> None:
        self._errors += 1
        self._observed[agent].append(wording(self.styles[agent], "error", error))

    # --- What comes of it -----------------------------------------------------------------------------------------
    def _end(self) -> dict[str, float]:
        """Settles the outcome and returns the scores."""
        board = self._board
        by_power = dict(zip(board.powers, board.scores().tolist(), strict=True))
        scores = {agent: float(by_power[power]) for agent, power in self._power.items()}
        for agent, power in self._power.items():
            self._observed[agent].append(ending_text(board, power, scores[agent], self.styles[agent]))
        centres = board.centres()
        self._outcome = {
            "winner": board.winner,
            "how": "solo" if board.winner else "years",
            "points": scores,
            "centres": {agent: centres[power] for agent, power in self._power.items()},
            "powers": dict(self._power),
            "year": board.year,
            "messages": self._messages,
            "errors": self._errors,
        }
        return scores

    def _views(self, came_to: Mapping[str, dict[str, Any]]) -> dict[str, View]:
        over = self._outcome is not None
        views = {}
        for agent, power in self._power.items():
            style = self.styles[agent]
            view = views[agent] = View(ROLE, **came_to.get(agent, {}))
            asked, turn = "", TurnKind.WAIT
            options: tuple[str, ...] = ()
            if over:
                pass
            elif self._stage is Stage.ORDERS and (opened := self._open[power]) is not None:
                name = "rest" if opened.begun else opened.unit.split()[0]
                name = name if name in ("rest", "BUILD", "DISBAND") else "order"
                asked = wording(style, name, unit_text(opened.unit, style))
                turn, options = TurnKind.CHOOSE, tuple(branches(opened.orders, style))
            elif self._stage is Stage.ADDRESS and self._speakers[0] == power:
                asked = wording(style, "to")
                turn, options = TurnKind.CHOOSE, self._addressees(power)
            elif self._stage is Stage.SAY and self._speakers[0] == power:
                asked, turn = wording(style, "say", self._addressee), TurnKind.SPEAK
            view.text, view.turn, view.options = "".join(self._observed[agent]) + asked, turn, options
            view.questions = tuple(self._asks.get(agent, ()))
            view.answers = self._answers.get(agent, {})
        return views

    # --- For trainers and analysts --------------------------------------------------------------------------------
    @property
    def facts(self) -> dict[str, Any]:
        """The powers of the seats, the map and the rounds of messages; nothing of the board is hidden."""
        self.check_started()
        return {
            "map_name": self._board.map_name,
            "rounds": self.rounds,
            "powers": dict(self._power),
            "roles": dict.fromkeys(self.possible_agents, ROLE),
        }

    def privileged(self, agent: str) -> tuple[float, ...]:
        """Numbers for a privileged critic: the seat's power, one-hot. No more is hidden at the start."""
        return tuple(float(power == self._power[agent]) for power in self._board.powers)

    def state(self) -> np.ndarray:
        """The board's features, and the number of each seat's power."""
        self.check_started()
        powers = [self._board.powers.index(power) for power in self._power.values()]
        return np.concatenate([self._board.features(), np.array(powers, np.float32)])

    def draw(self) -> str:
        if self.render_mode == "svg":
            return self._board.svg()
        board, centres = self._board, self._board.centres()
        lines = [f"{board.phase}, {self._stage}"]
        for agent, power in self._power.items():
            lines.append(f"{agent} {power}: {', '.join(board.units()[power])}; {centres[power]} centres")
        lines += self.transcript
        if self._outcome:
            points = ", ".join(f"{agent} {score:.2f}" for agent, score in self._outcome["points"].items())
            lines.append(f"over ({self._outcome['how']}): {points}")
        return "\n".join(lines) + "\n"


def _word(reply: object) -> str:
    return reply.strip() if isinstance(reply, str) else ""


def _refusal(reply: str, options: Sequence[str], counts: str) -> str:
    return f"{clean(reply, 40)!r} is none of the options ({', '.join(options)}). {counts}"


def _is_default(order: str, kind: Kind) -> bool:
    if kind is Kind.ADJUSTMENTS:
        return order == WAIVE
    return order.split()[2] == (HOLD if kind is Kind.MOVES else DISBAND)
