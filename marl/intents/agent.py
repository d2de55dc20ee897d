"""An agent whose planner decides, whose words carry the plan, and whose filters catch words that don't (FAIR 2022).

Before each of its replies it plans both claims from the talk so far (planning/intents.py), under an anchor that an
action model reads with an injected, agreeing end. A dialogue model is told that intent and draws messages, which pass
filters in the published order; what is refused is drawn again, and when all draws are spent the agent proposes. Its
proposal claims what it planned. The partner reads its words alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from envs.core import END, Question
from envs.dond import replies as dond_replies
from envs.dond import rules as dond_rules
from envs.dond import texts as dond_texts
from marl.agents.base import Key, Reply, Request
from marl.agents.model import ModelAgentState, PlayConfig, model_agent_settings
from marl.common.errors import UserError, check_range
from marl.common.files import read_json
from marl.intents import filters
from marl.intents.among_us import TableConfig
from marl.intents.claims import AT_ONCE, MOST, ClaimReader
from marl.intents.draws import Draw, shown
from marl.intents.nonsense import Ensemble, features
from marl.intents.streams import ARMS, FORM, INTENT_ARMS, Intent, agreeing_end, intent_text, message_reply, opening_of
from marl.intents.talker import Talker
from marl.model.policy import Policy
from marl.model.tokens import StreamWriter, Tokens
from marl.planning.intents import IntentConfig, IntentPlan, plan_intent
from marl.planning.planner import SLOTS, PlannerConfig, PlanningAgent, Talk, partner_belief
from marl.planning.press import PressConfig
from marl.storage.checkpoint import load_policy
from marl.types import Kind, Planned, Stream

CICERO = "+cicero"  # of the names of these players
PLAN = 3  # place of a seat's seed
OPENER = "hi"  # said for silence, which the game does not allow, where a proposal is not allowed either
PARTS = "intents.json"  # in a player's folder: the arm of its dialogue model, and the form of what that is told
ACTION, DIALOGUE, NONSENSE = "action", "policy", "nonsense"  # folders in it


@dataclass(frozen=True)
class CiceroConfig:
    """Settings of the agent. Raises UserError, naming the setting, for bad values."""

    repetition: bool = True
    nonsense: float = 0.05  # share of human messages that the ensemble may reject; 0: no such filter
    correspondence: float | None = -0.005  # least change of P(own intent) that a message may cause; None: no filter
    value: float = 0.5  # share of the candidates that are kept for their value; 1: no such filter
    candidates: int = 8  # that the value filter compares
    draws: int = 10  # messages drawn at most, before the agent proposes instead
    top_p: float = 0.9  # of the draws: the likeliest tokens of this probability
    plan: IntentConfig = field(default_factory=IntentConfig)
    press: PressConfig = field(default_factory=PressConfig)  # in Diplomacy, in place of `plan`
    among_us: TableConfig = field(default_factory=TableConfig)  # plans and filters of that game

    def __post_init__(self) -> None:
        check_range(self, "cicero", "[0, 1), a share such as 0.05, or 0 for none", "nonsense")
        check_range(self, "cicero", "[-1, 1], or null for none", "correspondence")
        check_range(self, "cicero", "(0, 1]", "value", "top_p")
        if not 1 <= self.candidates <= self.draws:
            raise UserError(f"cicero.candidates={self.candidates}: must be at least 1, and at most draws={self.draws}")


@dataclass
class Mind:
    """Plan of an agent for the reply that a seat owes."""

    plan: IntentPlan
    intent: Intent
    belief: np.ndarray  # (K,) over the partner's values


@dataclass(frozen=True)
class Parts:
    """The models of an agent. `nonsense`: None where it has no such ensemble."""

    arm: str
    action: Policy
    dialogue: Policy
    nonsense: Ensemble | None

    @classmethod
    def load(
        cls, folder: Path, device: torch.device | str, dialogue: Policy | None = None, game: str = "dond"
    ) -> Parts:
        """Reads what `experiments.studies.intents` wrote. UserError where something is missing. `dialogue`: the
        dialogue model, if it is there already."""
        if not (folder / PARTS).is_file():
            raise UserError(
                f"{folder}: no intents were trained here (no {PARTS}). Make them with experiments.studies.intents"
            )
        made = read_json(folder / PARTS)
        arm = made.get("arm")
        if arm not in ARMS:
            raise UserError(f"{folder / PARTS}: arm={arm} must be one of {', '.join(ARMS)}. Make the folder again")
        if game == "dond" and arm in INTENT_ARMS and made.get("told") != FORM:
            raise UserError(
                f"{folder}: its model was told intents in another form than players are now. Make it again with "
                "experiments.studies.intents"
            )
        there = (folder / NONSENSE / "nonsense.json").is_file()
        nonsense = Ensemble.load(folder / NONSENSE) if there else None
        dialogue = dialogue or load_policy(folder / DIALOGUE, device)
        return cls(arm, load_policy(folder / ACTION, device), dialogue, nonsense)


def talk_view(opening: str, talk: Talk, questions: Sequence[Question], tokens: Tokens) -> StreamWriter:
    """A player's stream of a game so far, from its own first text and the talk, without any cue to reply.

    Refused replies are left out. It ends where somebody has proposed.
    """
    style, view = dond_texts.style_of(opening), StreamWriter(tokens)
    view.observe(opening, questions, 0)
    for step, (mine, words) in enumerate(talk, start=1):
        if mine and words is None:
            break
        if mine:
            view.cue()
            view.reply(tokens.encode(message_reply(words or "")), Kind.SPEECH)
            view.observe("", questions, step)
        else:
            view.observe(dond_texts.heard_text(words, style), questions if words is not None else (), step)
    return view


def ended(talk: Talk) -> list[tuple[bool, str | None]]:
    """The words of a talk, with an agreeing end (`agreeing_end`) after which the player proposes."""
    words = [(mine, text) for mine, text in talk if text is not None]
    return [*words, *agreeing_end(bool(words) and words[-1][0])]


class CiceroAgent(Talker[Mind], PlanningAgent):
    """See the module. `counts`: draws, and by whom they were refused."""

    def __init__(
        self, name: str, parts: Parts, config: CiceroConfig, game: str, *, context: int, temperature: float = 1.0,
        slots: int, **limits: Any,
    ) -> None:  # fmt: skip
        """`slots`, `limits`: see `ModelAgent`. Raises UserError for a game without intents, for a nonsense filter
        without its ensemble, and for one that refuses nearly all that people say."""
        if game != "dond":
            raise UserError(f"{name}: env.game={game} has no intents; leave out {CICERO}")
        super().__init__(
            name, parts.dialogue, PlannerConfig(), game, context=context, temperature=temperature or 0.01,
            slots=slots + config.draws, **limits,
        )  # fmt: skip
        self.parts, self.cicero, self.tells = parts, config, parts.arm in INTENT_ARMS
        self.claims = ClaimReader(parts.action, context)
        self.counts: Counter[str] = Counter()
        self._minds: dict[Key, Mind] = {}
        self.thresholds: np.ndarray | None = None
        if config.nonsense:
            if parts.nonsense is None:
                raise UserError(f"cicero.nonsense={config.nonsense}: {name} has no ensemble; set it to 0")
            self.thresholds = parts.nonsense.thresholds(config.nonsense)
            rate = float((parts.nonsense.unseen > self.thresholds).any(1).mean())
            if rate > 0.5:
                raise UserError(
                    f"cicero.nonsense={config.nonsense}: it refuses {rate:.0%} of what people say, so that hardly any "
                    "message passes. Lower it"
                )

    @staticmethod
    def more_slots(config: CiceroConfig) -> tuple[int, int]:
        return SLOTS + config.draws, AT_ONCE * MOST

    # -- what is planned ---------------------------------------------------------------------------------------------

    def _observe(self, r: Request) -> ModelAgentState:
        if r.key not in self._openings:
            self._openings[r.key] = r.text  # the true one, which plans are made from
            r = replace(r, text=self.opening(r.text))
        return super()._observe(r)

    def opening(self, text: str) -> str:
        return opening_of(text, self.parts.arm)

    def _tell(self, key: Key, state: ModelAgentState) -> None:
        """Plans, and tells the dialogue model its intent; no more where the action model has no room to read claims."""
        questions = [asked.question for asked in state.view.asked[:3]]
        opening, talk = self._openings[key], self._talk[key]
        counts, own, objective = dond_texts.parse_prompt(opening)
        longest = self.max_new_tokens + max(map(len, self.claims.texts(counts)))  # a message, and a claim after it
        if len(self._stream(opening, talk)) + longest > self.claims.engine.context:
            return
        if not questions and self.cicero.plan.belief == "listening":
            raise UserError("cicero.plan.belief=listening: this game asks no belief questions. Set it to prior")
        belief = self._belief(opening, talk, questions)
        anchor = self._anchors(opening, [talk])[0]
        rng = np.random.default_rng([state.seed, len(state.view.stream), PLAN])
        plan = plan_intent(counts, own, objective, belief, anchor, self.cicero.plan, rng)
        claims = dond_rules.allocations(counts)
        intent = Intent(claims[plan.own], claims[plan.partner])
        self._minds[key] = Mind(plan, intent, belief)
        if self.tells:
            state.view.tell(intent_text(intent))

    def _anchors(self, opening: str, talks: Sequence[Talk]) -> list[np.ndarray]:
        """The player's claims (A,) if each of these talks stopped now."""
        streams = [self._stream(opening, talk) for talk in talks]
        counts = dond_texts.parse_prompt(opening)[0]
        return list(self.claims.probabilities(streams, [counts] * len(streams)))

    def _stream(self, opening: str, talk: Talk) -> list[int]:
        """The action model's stream of this talk, ended, up to the claim."""
        view = talk_view(opening, ended(talk), (), self.claims.tokens)
        view.cue()
        return view.stream.tokens

    @torch.no_grad()
    def _belief(self, opening: str, talk: Talk, questions: Sequence[Question]) -> np.ndarray:
        """The action model's belief (K,) over the partner's values; without the talk for `belief=prior`."""
        counts, own, _ = dond_texts.parse_prompt(opening)
        if self.cicero.plan.belief == "prior":
            return partner_belief(np.ones((3, 11)), counts, own)
        view = talk_view(opening, talk, questions, self.claims.tokens)
        policy, last = self.parts.action, view.asked[-3:]
        tokens = torch.tensor([view.stream.tokens], device=policy.device)
        logits = policy.logits(policy.hidden(tokens)[0, [asked.position for asked in last]]).double()
        ids = torch.tensor([asked.candidate_ids for asked in last], device=logits.device)
        return partner_belief(logits.gather(1, ids).softmax(-1).cpu().numpy(), counts, own)

    # -- what is said ------------------------------------------------------------------------------------------------

    def _reply(self, key: Key, state: ModelAgentState) -> Reply:
        if key not in self._minds:  # no room for a plan: it plays as its dialogue model does
            return self._noted(key, state, "", None)
        mind, talk = self._minds.pop(key), self._talk[key]
        text = self.tokens.reply_text(state.ids)
        if talk and (text.lstrip().startswith(dond_replies.PROPOSE) or (False, None) in talk):
            return self._propose(key, state, mind, [])
        drawn = self._converse(key, state, mind)
        played = next((draw for draw in drawn if not draw.refused), None)
        if played is None and talk:
            self.counts["spent"] += 1
            return self._propose(key, state, mind, drawn)
        if played is None:
            ids = self.tokens.encode(message_reply(OPENER))
            played = Draw(ids, [0.0] * len(ids), OPENER)
        self._play(state, played.ids, played.logprobs)
        return self._noted(key, state, thoughts_of(mind.intent, drawn), None)

    def _propose(self, key: Key, state: ModelAgentState, mind: Mind, drawn: Sequence[Draw]) -> Reply:
        """Claims what was planned; what its model samples where that does not fit into the stream."""
        counts = dond_texts.parse_prompt(self._openings[key])[0]
        texts = [dond_replies.proposal_text(claim) for claim in dond_rules.allocations(counts)]
        ids = tuple(tuple(self.tokens.encode(f"{text} {END}")) for text in texts)
        chosen = mind.plan.own
        if len(ids[chosen]) > self._free(state):
            return self._noted(key, state, thoughts_of(mind.intent, drawn), None)
        certain = tuple(float(i == chosen) for i in range(len(ids)))
        planned = Planned(
            tuple(text.removeprefix(dond_replies.PROPOSE).strip() for text in texts), ids,
            tuple(mind.plan.anchor.tolist()), tuple(mind.plan.values.tolist()), certain, chosen,
        )  # fmt: skip
        self._play(state, list(ids[chosen]), [0.0] * len(ids[chosen]))
        return self._noted(key, state, thoughts_of(mind.intent, drawn), planned)

    def _noted(self, key: Key, state: ModelAgentState, thoughts: str, planned: Planned | None) -> Reply:
        reply = super(PlanningAgent, self)._reply(key, state)
        self._note(key, reply.text)
        return replace(reply, planned=planned, thoughts=thoughts)

    def _filter(self, key: Key, mind: Mind, fresh: Sequence[Draw], earlier: Sequence[Draw]) -> None:
        """Applies all filters but the last to messages that were just drawn."""
        config, opening, talk = self.cicero, self._openings[key], self._talk[key]
        questions = [asked.question for asked in self._states[key].view.asked[:3]]
        before = [words for mine, words in talk if mine and words]
        left = self._said_once(fresh, before)
        if self.thresholds is not None and left and self.parts.nonsense is not None:
            rows = [self._row(opening, talk, questions, draw.text) for draw in left]
            flags = self.parts.nonsense.rejected(features(self.parts.action, rows), self.thresholds)
            for draw, flag in zip(left, flags, strict=True):
                draw.refused = filters.NONSENSE if flag else ""
            left = [draw for draw in left if not draw.refused]
        if config.correspondence is not None and left:
            anchors = self._anchors(opening, [[*talk, (True, draw.text)] for draw in left])
            own = mind.plan.own
            for draw, after in zip(left, anchors, strict=True):
                betrayed = filters.betrays(float(mind.plan.anchor[own]), float(after[own]), config.correspondence)
                draw.refused = filters.CORRESPONDENCE if betrayed else ""

    def _row(self, opening: str, talk: Talk, questions: Sequence[Question], text: str) -> tuple[list[int], int]:
        """The action model's stream up to the end of a message, and the message's length; see `nonsense.features`."""
        view = talk_view(opening, talk, questions, self.claims.tokens)
        view.cue()
        ids = self.claims.tokens.encode(message_reply(text))
        start = view.reply(ids, Kind.SPEECH)
        return view.stream.tokens[: start + len(ids)], len(ids)

    def _by_value(self, key: Key, mind: Mind, left: Sequence[Draw]) -> None:
        """Refuses the candidates after which the own intent is expected to score least: the partner's policy is planned
        again under the anchor that the talk with the candidate gives."""
        if not left:
            return
        opening, talk = self._openings[key], self._talk[key]
        counts, own, objective = dond_texts.parse_prompt(opening)
        anchors = self._anchors(opening, [[*talk, (True, draw.text)] for draw in left])
        plain = replace(self.cicero.plan, opponents="exact")
        for draw, anchor in zip(left, anchors, strict=True):
            rng = np.random.default_rng(0)  # not used: exact
            plan = plan_intent(counts, own, objective, mind.belief, anchor, plain, rng)
            draw.value = float(plan.values[mind.plan.own])
        poor = filters.poorest([draw.value for draw in left if draw.value is not None], self.cicero.value)
        for draw, flag in zip(left, poor, strict=True):
            draw.refused = filters.VALUE if flag else ""

    def finish(self, keys: Sequence[Key]) -> dict[Key, tuple[Stream, list[Any]]]:
        for key in keys:
            self._minds.pop(key, None)
        return super().finish(keys)


class IntentConditionedAgent(CiceroAgent):
    """A learner that reads a planned intent before each of its replies: words and claims are its own samples."""

    @staticmethod
    def more_slots(config: CiceroConfig) -> tuple[int, int]:
        return SLOTS + 1, AT_ONCE * MOST  # `intent_conditioned_agent` has one draw

    def _reply(self, key: Key, state: ModelAgentState) -> Reply:
        mind = self._minds.pop(key, None)
        return self._noted(key, state, thoughts_of(mind.intent, ()) if mind else "", None)


def intent_conditioned_agent(
    name: str, policy: Policy, limits: PlayConfig, seats_per_game: int, temperature: float, folder: Path,
    config: CiceroConfig, style: str | None = None,
) -> IntentConditionedAgent:  # fmt: skip
    """A policy whose intents are planned by the frozen action model of a player's `folder` (`Parts`)."""
    parts = Parts.load(folder, policy.device, policy)
    if parts.arm not in INTENT_ARMS:
        raise UserError(
            f"algo.intents={folder}: its model is told no intent (arm {parts.arm}). Name one of {INTENT_ARMS}"
        )
    unfiltered = replace(config, nonsense=0.0, candidates=1, draws=1)
    return IntentConditionedAgent(
        name, parts, unfiltered, "dond", style=style, **model_agent_settings(limits, seats_per_game, temperature)
    )


def thoughts_of(intent: Intent, drawn: Sequence[Draw]) -> str:
    """Returns what a transcript shows of a reply (`draws.shown`)."""
    own, partner = (" ".join(map(str, each)) for each in intent)
    return shown(f"{own} for me, {partner} for my partner", drawn)


def intent_in(thoughts: str) -> Intent | None:
    """Reads the intent that `thoughts_of` shows; None in any other thoughts."""
    found = re.match(r"intent: (\d+) (\d+) (\d+) for me, (\d+) (\d+) (\d+) for my partner$", thoughts, re.MULTILINE)
    if found is None:
        return None
    a, b, c, d, e, f = map(int, found.groups())
    return Intent((a, b, c), (d, e, f))
