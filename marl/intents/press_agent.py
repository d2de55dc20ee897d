"""A player of `pure` Diplomacy whose planner decides, and whose words carry the plan (FAIR 2022, Cicero).

Before each of its messages and orders it plans anew from all talk so far (planning/press.py), under anchors that an
action model reads in the talk of each pair. A dialogue model is told the intent, which is the planned order and the
reader's order that is worth most, and draws a message. It is drawn again if the player has said it before, or if it
makes the planned order less likely; if all draws are refused, nothing is sent. The player orders what it planned.
Retreats, builds and whom to write to are the dialogue model's own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from envs.core import END, Style, TurnKind
from envs.diplomacy.pure import HOMES, POWERS, N, order_text
from envs.diplomacy.texts import NOBODY
from marl.agents.base import Key, Reply, Request
from marl.agents.model import ModelAgentState
from marl.intents import filters
from marl.intents.agent import PLAN, CiceroConfig, Parts
from marl.intents.draws import Draw, shown
from marl.intents.orders import AT_ONCE, OrderReader, trees_of
from marl.intents.press import Intent, Notes, Phase, Utterance, as_heard, choices_of, talk_view
from marl.intents.talker import Talker, check_compact
from marl.model.policy import Policy
from marl.planning.press import OrderPlan, PressConfig, plan_order
from marl.types import Belief, Kind, Stream


class Planner:
    """Plans with an action model from a seat's notes."""

    def __init__(self, action: Policy, context: int, config: PressConfig) -> None:
        self.reader, self.config = OrderReader(action, context), config

    def plan(self, notes: Notes, place: int, seed: Sequence[int]) -> OrderPlan | None:
        """Plans the order of the own unit in `place`; None where it is the only unit."""
        state, me = notes.phases[-1].state, notes.power
        owner = {v: POWERS[state[0, v]] for v in range(N) if state[0, v] >= 0 and v != place}
        if not owner:
            return None
        spoken = {power for phase in notes.phases for said in phase.talk for power in (said.speaker, said.reader)}
        mine = [None, NOBODY, *sorted(spoken - {me})]  # views of the own orders, by partner: all, none, and each
        theirs = sorted({*owner.values()} - {me})
        streams = [self.stream(notes, me, notes.phases, partner) for partner in mine]
        streams += [self.stream(notes, power, notes.phases, me) for power in theirs]
        own = [v for v in owner if owner[v] == me]
        asked = [[place, *own]] + [[place]] * (len(mine) - 1) + [[v for v in owner if owner[v] == p] for p in theirs]
        whole, *found = self.reader.probabilities(streams, [state] * len(streams), asked)
        in_pair = {me: whole, **dict(zip(mine[1:], found, strict=False))}
        others = dict(zip(theirs, found[len(mine) - 1 :], strict=True))
        pairs = np.zeros((N, 2, whole.shape[1]))
        for v, power in owner.items():
            pairs[v] = in_pair.get(power, in_pair[NOBODY])[place], others.get(power, whole)[v]
        return plan_order(state, place, whole[place], pairs, self.config, np.random.default_rng([*seed, PLAN]))

    def stream(self, notes: Notes, power: str, phases: Sequence[Phase], partner: str | None) -> list[int]:
        """The view of a power's talk with one partner (None: with all)."""
        return talk_view(notes, power, phases, partner, self.reader.tokens).stream.tokens

    def agree(self, notes: Notes, partner: str, messages: Sequence[str], intended: tuple[int, int]) -> list[float]:
        """Probability of the intended order after each of these messages to a partner."""
        place, code = intended
        *before, now = notes.phases
        after = [
            replace(now, talk=[*now.talk, Utterance(notes.power, partner, m)] if m else now.talk) for m in messages
        ]
        streams = [self.stream(notes, notes.power, [*before, each], partner) for each in after]
        found = self.reader.probabilities(streams, [now.state] * len(streams), [[place]] * len(streams))
        return [float(each[place, code]) for each in found]


class Aim(NamedTuple):
    """An intent, and the probability of its own order if nothing is said."""

    intent: Intent
    before: float


class PressAgent(Talker[Aim]):
    """See the module."""

    tag, ranks = "", False

    def __init__(
        self, name: str, parts: Parts, config: CiceroConfig, game: str, *, context: int, temperature: float = 1.0,
        slots: int, style: str | None = None, **limits: Any,
    ) -> None:  # fmt: skip
        """`slots`, `limits`: see `ModelAgent`. UserError for another style than compact, which it reads alone."""
        check_compact(name, style)
        super().__init__(
            name, parts.dialogue, context=context, temperature=temperature or 0.01, slots=slots + 1,
            style=Style.COMPACT.value, **limits,
        )  # fmt: skip
        self.cicero = config
        self.planner = Planner(parts.action, context, config.press)
        self.counts: Counter[str] = Counter()
        self._notes: dict[Key, Notes] = {}
        self._asked: dict[Key, Request] = {}
        self._plans: dict[Key, OrderPlan] = {}  # for the message or order that is due
        self._begun: dict[Key, tuple[str, ...]] = {}  # options that are left of a plan's order

    @staticmethod
    def more_slots(config: CiceroConfig) -> tuple[int, int]:
        return 1, AT_ONCE  # messages are drawn one by one

    def _observe(self, r: Request) -> ModelAgentState:
        self._notes.setdefault(r.key, Notes()).read(r.text)
        self._asked[r.key] = r
        return super()._observe(r)

    def _tell(self, key: Key, state: ModelAgentState) -> None:
        """Plans a message, and tells the dialogue model its intent."""
        if self._asked[key].turn != TurnKind.SPEAK:
            return
        notes = self._notes[key]
        phase = notes.phases[-1]
        own, other = phase.unit_of(notes.power), phase.unit_of(notes.to)
        plan = None if own is None else self.planner.plan(notes, own, self._seed(key))
        if plan is not None and own is not None and other is not None:
            self._plans[key] = plan
            state.view.tell(self._intent(plan, other).text())

    def _intent(self, plan: OrderPlan, reader: int) -> Intent:
        return Intent((plan.place, plan.own), (reader, plan.of_reader(reader, self.cicero.press.plausible)))

    def _seed(self, key: Key) -> tuple[int, int]:
        """Seeds a plan's draws: the same all through a phase, so that talk alone changes a plan."""
        return self._asked[key].seed, len(self._notes[key].phases)

    def _reply(self, key: Key, state: ModelAgentState) -> Reply:
        notes, thoughts = self._notes[key], ""
        if state.kind == Kind.SPEECH:
            plan = self._plans.pop(key, None)
            if plan is not None:
                thoughts = self._speak(key, state, plan)
            reply = super()._reply(key, state)
            notes.say(reply.text)
            return replace(reply, thoughts=thoughts)
        if NOBODY in state.options:
            if self.cicero.press.mute:
                self._choose(state, NOBODY)
            reply = super()._reply(key, state)
            notes.to = reply.text
            return reply
        if notes.tracker.seen.kind == "moves":
            thoughts = self._order(key, state)
        return replace(super()._reply(key, state), thoughts=thoughts)

    def repeat(self, request: Request, ids: Sequence[int]) -> int:
        start, key = super().repeat(request, ids), request.key
        notes, state = self._notes[key], self._states[key]
        if state.lost:
            return start
        if request.turn == TurnKind.SPEAK:
            self._plans.pop(key, None)
            notes.say(self.tokens.reply_text(ids))
        elif NOBODY in request.options:
            notes.to = request.options[state.legal.index(ids[0])]
        elif notes.tracker.seen.kind == "moves":
            self._order(key, state)  # what is left of the order is chosen next
        return start

    def _order(self, key: Key, state: ModelAgentState) -> str:
        """Chooses what is planned for the unit that is asked about. Returns what was planned, where that begins."""
        thoughts = ""
        if place := re.findall(r"\b[A-Z]{3}\b", self._asked[key].text.rstrip("\n").rpartition("\n")[2]):
            notes, unit = self._notes[key], HOMES.index(place[-1])
            plan = self.planner.plan(notes, unit, self._seed(key))
            if plan is None:
                return ""
            self._begun[key] = choices_of(trees_of(notes.phases[-1].state)[unit], plan.own)
            worth, anchor = plan.values[plan.chosen], plan.anchor[plan.chosen]
            thoughts = f"plan: {order_text(unit, plan.own)} (worth {worth:.2f}, anchor {anchor:.2f})"
        if self._begun.get(key):
            option, *left = self._begun.pop(key)
            self._begun[key] = tuple(left)
            self._choose(state, option)
        return thoughts

    def _choose(self, state: ModelAgentState, option: str) -> None:
        if option in state.options:
            state.ids, state.logprobs = [state.legal[state.options.index(option)]], [0.0]

    def _speak(self, key: Key, state: ModelAgentState, plan: OrderPlan) -> str:
        """Draws messages until one passes, and puts it in place of the model's own. Returns what is shown of it."""
        notes = self._notes[key]
        other = notes.phases[-1].unit_of(notes.to)
        assert other is not None
        intent = self._intent(plan, other)
        (before,) = self.planner.agree(notes, notes.to, [""], intent.own)
        drawn = self._converse(key, state, Aim(intent, before))
        said = drawn[-1]
        if said.refused:
            self.counts["spent"] += 1
            said = Draw(ids := self.tokens.encode(END), [0.0] * len(ids), "")
        self._play(state, said.ids, said.logprobs)
        own, reader = (order_text(*each) for each in intent)
        return shown(f"I order {own}, {notes.to} {reader}", drawn)

    def _words(self, ids: Sequence[int]) -> str:
        return as_heard(self.tokens.reply_text(ids)) if self.tokens.ends(ids) else ""

    def _filter(self, key: Key, mind: Aim, fresh: Sequence[Draw], earlier: Sequence[Draw]) -> None:
        notes, config = self._notes[key], self.cicero
        before = [said.text for phase in notes.phases for said in phase.talk if said.speaker == notes.power]
        left = self._said_once(fresh, before)
        if left and config.correspondence is not None:
            texts = [draw.text for draw in left]
            for draw, after in zip(left, self.planner.agree(notes, notes.to, texts, mind.intent.own), strict=True):
                betrayed = filters.betrays(mind.before, after, config.correspondence)
                draw.refused = filters.CORRESPONDENCE if betrayed else ""

    def finish(self, keys: Sequence[Key]) -> dict[Key, tuple[Stream, list[Belief]]]:
        for key in keys:
            for kept in (self._notes, self._asked, self._plans, self._begun):
                kept.pop(key, None)
        return super().finish(keys)
