"""A player of Among Us whose planner decides its vote, and whose words carry that vote (after FAIR 2022, Cicero).

Before each message it plans its own vote from the discussion so far (`among_us.planned_vote`): a crewmate for the most
likely imposter, as an action model believes; an imposter for the crewmate whom the table is most ready to eject. A
dialogue model is told that intent and draws messages, which pass filters: repetition, what exposes an imposter, what
gives it away, correspondence, value. What is refused is drawn again; when all draws are spent it says nothing. Its vote
is planned once more when it is due.

The hearers are stood in for by the same action model, reading what the whole table has heard (`Witness.table`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from envs.among_us.state import Role
from envs.core import END, Style, TurnKind
from marl.agents.base import Key, Reply, Request
from marl.agents.model import ModelAgentState
from marl.decoding.engine import Engine
from marl.intents import filters
from marl.intents.agent import CiceroConfig, Parts
from marl.intents.among_us import (
    SKIP,
    Floats,
    Intent,
    Witness,
    as_heard,
    crew_values,
    exposes,
    heard_text,
    imposter_values,
    intent_text,
    planned_vote,
    support,
    votes_of,
)
from marl.intents.among_us_votes import ending
from marl.intents.draws import Draw, shown
from marl.intents.talker import UNFINISHED, Talker, check_compact
from marl.model.policy import Policy
from marl.model.tokens import StreamWriter
from marl.types import Belief, Kind, Planned, Stream

HEARERS = 6  # at most, of seven players
FACTS, GIVEAWAY = "facts", "giveaway"  # filters of imposters


class VoteReader:
    """An action model's votes behind streams, and behind each of several texts that could follow them."""

    def __init__(self, policy: Policy, context: int, texts: int) -> None:
        """`texts`: how many may follow a stream."""
        self.policy, self.tokens = policy, policy.tokens
        self.engine = Engine(policy, self.slots(texts), context)

    @staticmethod
    def slots(texts: int) -> int:
        return HEARERS * (texts + 1)

    @torch.no_grad()
    def votes(
        self, streams: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], votes: Sequence[str],
        end: Sequence[int] | None = None,
    ) -> Floats:  # fmt: skip
        """Returns the votes (S, N, A) behind each stream and each of N texts, which may be empty. `end`: what follows
        them; None: the injected end of the discussion."""
        ids = self.tokens.label(votes).ids
        end, engine = ending(self.tokens) if end is None else end, self.engine
        slots = [engine.allocate() for _ in streams]
        engine.read(slots, streams)
        forks = [engine.fork(slot, len(texts)) for slot in slots]
        behind = [[*text, *end] for text in texts]
        hidden = engine.read([fork for own in forks for fork in own], behind * len(streams))
        last = np.cumsum([len(each) for each in behind * len(streams)]) - 1
        logits = self.policy.logits(hidden[torch.from_numpy(last).to(hidden.device)])[:, ids].double()
        for slot in (*slots, *(fork for own in forks for fork in own)):
            engine.free(slot)
        found: Floats = logits.softmax(-1).cpu().numpy()
        return found.reshape(len(streams), len(texts), len(votes))

    @torch.no_grad()
    def belief(self, view: StreamWriter) -> dict[str, float]:
        """Returns the answer to the last belief question of a view, by candidate; empty without one."""
        if not view.asked:
            return {}
        asked = view.asked[-1]
        assert not asked.branch, "questions of these models stand in the stream"
        tokens = torch.tensor([view.stream.tokens[: asked.position + 1]], device=self.policy.device)
        logits = self.policy.logits(self.policy.hidden(tokens)[0, -1:])[0, list(asked.candidate_ids)].double()
        return dict(zip(asked.question.candidates, logits.softmax(-1).tolist(), strict=True))


@dataclass
class Plan:
    """A plan of a seat's vote, and what its hearers are expected to vote before it speaks."""

    votes: tuple[str, ...]
    own: int
    anchor: Floats  # (A,) the own votes, had the discussion stopped now
    values: Floats  # (A,)
    hearers: tuple[str, ...]  # living others, without an imposter's fellows
    expected: Floats  # (H, A)

    @property
    def intent(self) -> Intent:
        return Intent(self.votes[self.own], self.votes[self.own])


def hearers_of(seen: Witness) -> tuple[str, ...]:
    """Returns the living others, without an imposter's fellows."""
    return tuple(name for name in seen.living if name != seen.me and name not in seen.fellows)


class TableAgent(Talker[Plan]):
    """See the module. Seats without room for a plan play as `ModelAgent`."""

    tag = ""

    def __init__(
        self, name: str, parts: Parts, config: CiceroConfig, *, context: int, temperature: float = 1.0, slots: int,
        style: str | None = None, **limits: Any,
    ) -> None:  # fmt: skip
        """`slots`, `limits`: see `ModelAgent`. An arm without intents plans its votes, and talks without a plan.
        UserError for another style than compact, which it reads alone."""
        check_compact(name, style)
        super().__init__(
            name, parts.dialogue, context=context, temperature=temperature or 0.01, slots=slots + config.draws,
            style=Style.COMPACT.value, **limits,
        )  # fmt: skip
        self.cicero, self.tells = config, parts.arm in ("intent", "both")
        self.reader = VoteReader(parts.action, context, config.draws)
        self.counts: Counter[str] = Counter()
        self._plain: dict[Key, StreamWriter] = {}  # the seat's view without intents, which the action model reads
        self._seen: dict[Key, Witness] = {}
        self._plans: dict[Key, Plan] = {}

    @staticmethod
    def more_slots(config: CiceroConfig) -> tuple[int, int]:
        return config.draws, VoteReader.slots(config.draws)

    def _observe(self, r: Request) -> ModelAgentState:
        view = self._plain.setdefault(r.key, StreamWriter(self.reader.tokens))
        seen = self._seen.setdefault(r.key, Witness(r.seed))
        lost = r.key in self._states and self._states[r.key].lost
        if not lost:
            view.observe(r.text, r.questions, r.step)
            seen.observe(r.text)
        speaks = r.turn == TurnKind.SPEAK or SKIP in r.options
        if speaks and not lost and self._fits(view, seen):
            self._plans[r.key] = self._plan(view, seen)
        state = super()._observe(r)
        if r.turn != TurnKind.WAIT and not state.lost:
            view.cue(r.options)
        return state

    def _fits(self, view: StreamWriter, seen: Witness, message: str = "") -> bool:
        """Tells whether the action model can read a message and the vote behind a view, and behind what the table
        heard. It reads words in other tokens than were drawn."""
        tokens = self.reader.tokens
        own = len(view.stream) + len(tokens.encode(f" {message} {END}"))
        words = tokens.framed(heard_text(seen.me, message, Style.COMPACT), tokens.format.heard)
        table = max(map(len, self._tables(seen, hearers_of(seen)))) + len(words)
        return max(own, table) + len(ending(tokens)) + 1 <= self.reader.engine.context

    def _tell(self, key: Key, state: ModelAgentState) -> None:
        """Tells the dialogue model its intent before a message."""
        if self.tells and key in self._plans and not self._seen[key].voting:
            state.view.tell(intent_text(self._plans[key].intent))

    # -- what is planned ---------------------------------------------------------------------------------------------

    def _plan(self, view: StreamWriter, seen: Witness) -> Plan:
        """Plans the vote of a player that has read this, up to the cue."""
        team = {seen.me.lower(), *(name.lower() for name in seen.fellows)}
        votes = votes_of(seen.living)
        hearers = hearers_of(seen)
        end = self.reader.tokens.format.cue if seen.voting else None  # the words that open the vote are there
        anchor = self.reader.votes([view.stream.tokens], [[]], votes, end)[0, 0]
        expected = self._heard(seen, hearers, [[]], votes)[:, 0]
        table = self.cicero.among_us
        if seen.role == Role.IMPOSTER:
            lower = [name.lower() for name in hearers]
            values = imposter_values(votes, lower, expected, team)
        else:
            # With env.belief=vote the vote that is due is the last question, and not yet in the view.
            believed = dict(zip(votes, anchor.tolist(), strict=True)) if view.due else self.reader.belief(view)
            values = crew_values(votes, believed, seen.me.lower(), table.mistake)
        return Plan(votes, planned_vote(values, anchor, table), anchor, values, hearers, expected)

    def _heard(
        self, seen: Witness, hearers: Sequence[str], texts: Sequence[Sequence[int]], votes: Sequence[str]
    ) -> Floats:
        """Returns the hearers' votes (H, N, A) behind what the table heard and each of these texts."""
        return self.reader.votes(self._tables(seen, hearers), texts, votes)

    def _tables(self, seen: Witness, hearers: Sequence[str]) -> list[list[int]]:
        """Returns what the table heard as each of these hearers reads it."""
        tokens = self.reader.tokens
        return [tokens.framed(seen.table(hearer), tokens.format.first) for hearer in hearers]

    # -- what is said ------------------------------------------------------------------------------------------------

    def _words(self, ids: Sequence[int]) -> str:
        return as_heard(self.tokens.reply_text(ids)) if self.tokens.ends(ids) else ""

    def _filter(self, key: Key, mind: Plan, fresh: Sequence[Draw], earlier: Sequence[Draw]) -> None:
        config, seen = self.cicero, self._seen[key]
        table, imposter = config.among_us, seen.role == Role.IMPOSTER
        before = [message for speaker, message in seen.words if speaker == seen.me and message]
        left = self._said_once(fresh, before)
        for draw in left:
            draw.refused = "" if self._fits(self._plain[key], seen, draw.text) else UNFINISHED
        left = [draw for draw in left if not draw.refused]
        if imposter and table.facts:
            for draw in left:
                draw.refused = FACTS if exposes(draw.text, seen) else ""
            left = [draw for draw in left if not draw.refused]
        if left and imposter and table.giveaway is not None:
            team = [mind.votes.index(n.lower()) for n in (seen.me, *seen.fellows) if n.lower() in mind.votes]
            risk = mind.expected[:, team].sum(-1).mean()
            for draw, after in zip(left, self._after(seen, mind, left).swapaxes(0, 1), strict=True):
                draw.refused = GIVEAWAY if after[:, team].sum(-1).mean() - risk > table.giveaway else ""
            left = [draw for draw in left if not draw.refused]
        if left and config.correspondence is not None:
            texts = [self.reader.tokens.encode(f" {draw.text} {END}") for draw in left]
            own = self.reader.votes([self._plain[key].stream.tokens], texts, mind.votes)[0]
            for draw, after in zip(left, own, strict=True):
                changed = filters.betrays(float(mind.anchor[mind.own]), float(after[mind.own]), config.correspondence)
                draw.refused = filters.CORRESPONDENCE if changed else ""

    def _after(self, seen: Witness, mind: Plan, drawn: Sequence[Draw]) -> Floats:
        """Returns the hearers' votes (H, N, A) after each of these messages."""
        tokens = self.reader.tokens
        texts = [tokens.framed(heard_text(seen.me, draw.text, Style.COMPACT), tokens.format.heard) for draw in drawn]
        return self._heard(seen, mind.hearers, texts, mind.votes)

    def _by_value(self, key: Key, mind: Plan, left: Sequence[Draw]) -> None:
        """Refuses the candidates after which fewest hearers are expected to vote as intended."""
        if not left or not mind.hearers:
            return
        lower = [name.lower() for name in mind.hearers]
        for draw, after in zip(left, self._after(self._seen[key], mind, left).swapaxes(0, 1), strict=True):
            draw.value = support(mind.votes[mind.own], mind.votes, lower, after)
        poor = filters.poorest([draw.value for draw in left if draw.value is not None], self.cicero.value)
        for draw, flag in zip(left, poor, strict=True):
            draw.refused = filters.VALUE if flag else ""

    def _reply(self, key: Key, state: ModelAgentState) -> Reply:
        plan, said = self._plans.pop(key, None), ""
        planned = None
        if plan is not None and state.kind == Kind.CHOICE:
            planned = self._vote(state, plan)
        elif plan is not None and self.tells:
            drawn = self._converse(key, state, plan)
            played = next((draw for draw in drawn if not draw.refused), None)
            if played is None:
                self.counts["spent"] += 1
                ids = self.tokens.encode(f" {END}")
                played = Draw(ids, [0.0] * len(ids), "")
            self._play(state, played.ids, played.logprobs)
            said = shown(f"vote {plan.intent.own}, others vote {plan.intent.others}", drawn)
        ids, kind = [*state.ids], state.kind
        assert kind is not None
        reply = super()._reply(key, state)
        self._note(key, ids, kind)
        return replace(reply, planned=planned, thoughts=said)

    def repeat(self, request: Request, ids: Sequence[int]) -> int:
        start = super().repeat(request, ids)
        self._plans.pop(request.key, None)
        if not self._states[request.key].lost:
            self._note(request.key, ids, Kind.CHOICE if request.turn == TurnKind.CHOOSE else Kind.SPEECH)
        return start

    def _note(self, key: Key, ids: Sequence[int], kind: Kind) -> None:
        """Adds one's own reply to what the action model and the table read."""
        self._plain[key].reply(ids, kind)
        if kind == Kind.SPEECH:
            self._seen[key].spoke(as_heard(self.tokens.reply_text(ids)))

    def _vote(self, state: ModelAgentState, plan: Plan) -> Planned:
        """Votes as planned."""
        chosen = plan.votes[plan.own]
        ids = {option: token for option, token in zip(state.options, state.legal, strict=True)}
        self._play(state, [ids[chosen]], [0.0])
        certain = tuple(float(vote == chosen) for vote in plan.votes)
        return Planned(
            plan.votes, tuple((ids[vote],) for vote in plan.votes), tuple(plan.anchor.tolist()),
            tuple(plan.values.tolist()), certain, plan.own,
        )  # fmt: skip

    def finish(self, keys: Sequence[Key]) -> dict[Key, tuple[Stream, list[Belief]]]:
        for key in keys:
            for kept in (self._plans, self._plain, self._seen):
                kept.pop(key, None)  # type: ignore[attr-defined]
        return super().finish(keys)
