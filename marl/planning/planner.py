"""Planning near what a language model would do itself (piKL, see pikl.py) at the decision that the talk leads up to.

The language model talks, believes and decides when to propose. The planner chooses what it claims (Deal or No Deal) or
whom it votes for (Among Us), in four steps:

1. The anchor tau is a model's probability of each legal action, scored on the player's stream and normalised.
2. The others are predicted to play as their anchors say, or as planners near them would (DiL-piKL).
3. Q(a) is the worth of action a against that prediction, under the model's belief about what is hidden.
4. The plan is the anchored response, softmax of (Q + lambda log tau) / lambda, with the smallest of the lambdas
   (Bakhtin et al. 2022 play their smallest type). A large lambda plays the anchor, 0 the best action.

In Among Us everybody else is expected to vote as the anchor does, never for itself, and to want what the planner wants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from envs.among_us import events as among_us_events
from envs.among_us import reading as among_us_reading
from envs.among_us import state as among_us_state
from envs.core import END, Question, Style, TurnKind
from envs.dond import replies as dond_replies
from envs.dond import rules as dond_rules
from envs.dond import texts as dond_texts
from marl.agents.base import Key, Reply, Request
from marl.agents.model import ModelAgent, ModelAgentState, PlayConfig, model_agent_settings
from marl.common.errors import UserError, check_choices, check_range, prefixed
from marl.decoding.engine import Engine
from marl.model.policy import Policy
from marl.model.tokens import StreamWriter, Tokens
from marl.planning import pikl
from marl.planning.pikl import Floats
from marl.types import Belief, Kind, Planned, Stream

GAMES = ("dond", "among_us")  # where there is something to plan
SLOTS = 37  # cache slots for scoring, beside those of the seats: 36 claims of the largest pool, and their stream
FLOOR = pikl.FLOOR
PLAN = 1  # place of a seat's seed: draws from plans are independent of the tokens' draws
SUFFIX = "+plan"  # of the names of planning players
CHOICES = {
    "others": ("plan", "anchor"),
    "partner": ("mirror", "view"),
    "belief": ("listening", "prior"),
    "choose": ("sample", "best", "own"),
}


@dataclass(frozen=True)
class PlannerConfig:
    """Settings of a planner. Raises UserError, naming the setting, for bad values.

    Lambdas are in the payoff's unit per nat: points in Deal or No Deal, caught imposters in Among Us.
    """

    lambdas: tuple[float, ...] = (0.1,)  # one for each type of player, as in `pikl.Settings`
    beta: tuple[float, ...] | None = None  # probabilities of the types; None is uniform
    iterations: int = 100  # of DiL-piKL, from the anchor
    iterate: str = "average"  # or last
    others: str = "plan"  # the others plan too; or play their anchor
    partner: str = "mirror"  # Deal or No Deal: its anchor is the planner's mirrored; or view: read from its side
    belief: str = "listening"  # the model's own answers to the belief questions; or prior: exact, without any talk
    choose: str = "sample"  # of the plan; best: its mode; own: the model's sample, with the plan noted to learn from
    mistake: float = 0.0  # cost of ejecting a crewmate, in caught imposters; above 0, skipping may be best

    def __post_init__(self) -> None:
        check_choices(self, "planner", **CHOICES)
        check_range(self, "planner", "[0, inf)", "mistake")
        with prefixed("planner."):
            self.settings.type_probs(1)

    @property
    def settings(self) -> pikl.Settings:
        """Settings for the stage games."""
        return pikl.Settings(self.iterations, self.lambdas, self.beta, iterate=self.iterate)


def respond(values: Floats, anchor: Floats, config: PlannerConfig) -> Floats:
    """The plan (A,) from values (A,) and the anchor (A,)."""
    plan: Floats = pikl.respond(values, np.log(np.maximum(anchor, FLOOR)), [min(config.lambdas)])[0]
    if not np.isfinite(plan).all():
        raise UserError("a plan is not finite: nor are the model's probabilities. Train it with a lower rate")
    return plan


def floored(*anchors: Floats | None) -> float:
    """The share of these probabilities that are raised to FLOOR."""
    given = np.concatenate([anchor.ravel() for anchor in anchors if anchor is not None])
    return float((given < FLOOR).mean())


# --- Deal or No Deal --------------------------------------------------------------------------------------------------


def partner_belief(answers: Floats, counts: dond_rules.Triple, own: dond_rules.Triple) -> Floats:
    """Probabilities (K,) of the partner's possible values, `partner_values(counts, own)`: the product over the items of
    the answers (3, 11) to the three questions, normalised."""
    values = np.array(dond_rules.partner_values(counts, own))  # (K, 3)
    product = np.maximum(answers, 1e-12)[np.arange(3), values].prod(-1)
    return product / product.sum()


def claim_values(
    counts: dond_rules.Triple,
    own: dond_rules.Triple,
    objective: float,
    belief: Floats,
    anchor: Floats,
    config: PlannerConfig,
    partners: Floats | None = None,
) -> Floats:
    """Expected score R_i + objective * R_j (A,), in points, of each claim of `allocations(counts)`.

    `belief` (K,) over the partner's possible values; `anchor` (A,). The partner's b-th action is to claim what the b-th
    claim leaves, so only equal actions are a deal. `partners` (K, A): its anchors by its values; None: the planner's.
    """
    gains, theirs = claim_gains(counts, own, objective)
    expected = anchor if partners is None else partners
    if config.others == "anchor":
        return belief @ (expected * gains)
    return belief @ (agreeing(gains, theirs, anchor, expected, config) * gains)


def claim_gains(counts: dond_rules.Triple, own: dond_rules.Triple, objective: float) -> tuple[Floats, Floats]:
    """Returns what the planner and its partner score, (K, A) each, if there is a deal on each of the planner's claims,
    by the partner's possible values."""
    claims = np.array(dond_rules.allocations(counts))  # (A, 3)
    mine = claims @ np.array(own)  # (A,)
    theirs = np.array(dond_rules.partner_values(counts, own)) @ (np.array(counts) - claims).T  # (K, A)
    return mine + objective * theirs, theirs + objective * mine


def agreeing(gains: Floats, theirs: Floats, anchor: Floats, expected: Floats, config: PlannerConfig) -> Floats:
    """The partner's policy (K, A), by its values: DiL-piKL, a game with each. `expected`: its anchors, or one."""
    deal = np.eye(gains.shape[-1])
    payoffs = [each[:, :, None] * deal for each in (gains, theirs)]  # (K, A, A)
    return pikl.solve(payoffs, [anchor, expected], config.settings).population[1]


Talk = Sequence[tuple[bool, str | None]]  # in order: whether the planner spoke, and the words; None is a proposal


def partner_streams(opening: str, talk: Talk, questions: Sequence[Question], tokens: Tokens) -> list[list[int]]:
    """The partner's stream up to the cue of its proposal, for each of its possible values.

    `opening`: the planner's first text; `questions`: asked of both after every message. The partner's replies are
    encoded from text; its refused replies are unknown and left out.
    """
    counts, own, _ = dond_texts.parse_prompt(opening)
    style = dond_texts.style_of(opening)
    if (False, None) not in talk:
        talk = [*talk, (True, None)]  # the planner proposes first, and the partner answers
    streams = []
    for values in dond_rules.partner_values(counts, own):
        writer = StreamWriter(tokens)
        writer.observe(dond_texts.prompt_with(opening, values), questions, 0)
        for mine, words in talk:
            asked = questions if words is not None else ()
            if mine:
                writer.observe(dond_texts.heard_text(words, style), asked, 0)
            elif words is not None:
                writer.cue()
                writer.reply(tokens.encode(f"{dond_replies.MESSAGE} {words} {END}"), Kind.SPEECH)
                writer.observe("", asked, 0)
            else:
                break
        writer.cue()
        streams.append(writer.stream.tokens)
    return streams


# --- Among Us ---------------------------------------------------------------------------------------------------------


@cache
def ejected(players: int) -> np.ndarray:
    """The ejected player by everybody's vote, shape (players + 1,) * players; the number of players stands for nobody.

    A strict plurality ejects; skip is voted for like a name.
    """
    votes = np.indices((players + 1,) * players)  # (players, ...)
    counts = np.stack([(votes == choice).sum(0) for choice in range(players + 1)])
    leads = counts == counts.max(0)
    found = np.where(leads.sum(0) == 1, leads.argmax(0), players)
    found.flags.writeable = False  # shared by all callers
    return found


def vote_values(me: int, belief: Floats, anchor: Floats, config: PlannerConfig) -> Floats:
    """The worth (n + 1,) of a vote for each of n living players, and (last) for nobody.

    It is the probability that an imposter is ejected, less `mistake` times that a crewmate is. `me`: the planner's
    number; `belief` (n,): the probability of being the imposter; `anchor` (n + 1,).
    """
    players = len(belief)
    worth = np.append(belief - config.mistake * (1 - belief), 0.0)
    payoff = worth[ejected(players)]  # (n + 1,) * n
    legal = np.ones((players, players + 1), dtype=np.bool_)
    legal[np.arange(players), np.arange(players)] = np.arange(players) == me  # nobody else is expected to give up
    policies = np.maximum(anchor, FLOOR) * legal  # (n, n + 1)
    policies /= policies.sum(-1, keepdims=True)
    if config.others == "plan":
        policies = np.stack(pikl.solve([payoff] * players, list(policies), config.settings, list(legal)).population)
    return pikl.expected_values([payoff] * players, list(policies))[me]


# --- The player -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decision:
    """A decision to plan, with A actions."""

    actions: tuple[str, ...]  # in words
    ids: tuple[tuple[int, ...], ...]  # the reply of each
    values: Callable[[Floats, Floats | None], Floats]  # (A,), from the anchor (A,) and the others' (K, A) or None
    others: Sequence[Sequence[int]] | None = None  # K streams to read the others' anchors from


def proposal(
    opening: str,
    talk: Talk,
    answers: Sequence[Floats],
    questions: Sequence[Question],
    tokens: Tokens,
    config: PlannerConfig,
) -> Decision:
    """The claims to choose from. `opening`, `questions`: see `partner_streams`; `answers`: the model's own to all
    belief questions so far, three at a time, (11,) each."""
    counts, own, objective = dond_texts.parse_prompt(opening)
    claims = dond_rules.allocations(counts)
    said = np.full((3, 11), 1.0) if config.belief == "prior" else np.stack(answers[-3:])
    belief = partner_belief(said, counts, own)
    left = [claims.index(dond_rules.rest(claim, counts)) for claim in claims]  # what the partner claims to agree

    def values(anchor: Floats, others: Floats | None) -> Floats:
        partners = None if others is None else others[:, left]
        return claim_values(counts, own, objective, belief, anchor, config, partners)

    texts = [dond_replies.proposal_text(claim) for claim in claims]
    return Decision(
        tuple(text.removeprefix(dond_replies.PROPOSE).strip() for text in texts),
        tuple(tuple(tokens.encode(f"{text} {END}")) for text in texts),
        values,
        partner_streams(opening, talk, questions, tokens) if config.partner == "view" else None,
    )


def vote(
    intro: str, options: Sequence[str], legal: Sequence[int], believed: dict[str, float], config: PlannerConfig
) -> Decision | None:
    """The vote to plan; None if the options are no vote.

    `intro`: the seat's first text; `legal`: the options' ids; `believed`: the answer to the last belief question, by
    candidate. With several imposters the question, and so the plan, is about the first of them.
    """
    skip = among_us_state.SKIP.act.value
    if skip not in options:
        return None
    order = [*sorted(set(range(len(options))) - {options.index(skip)}), options.index(skip)]  # skip comes last
    living = [options[i] for i in order[:-1]]
    long = Style.BRIEF if intro.startswith("Among Us, ") else Style.NATURAL
    style = long if living[0] in among_us_state.NAMES else Style.COMPACT
    name = next(e.name for e in among_us_reading.read(intro, style) if isinstance(e, among_us_events.Intro))
    me = [word.lower() for word in living].index(name.lower())
    weights = [1.0 if config.belief == "prior" else max(believed.get(word, 0.0), 1e-12) for word in living]
    weights[me] = 0.0
    belief = np.array(weights) / sum(weights)
    return Decision(
        tuple(options[i] for i in order),
        tuple((legal[i],) for i in order),
        lambda anchor, others: vote_values(me, belief, anchor, config),
    )


def next_tokens(planned: Planned) -> list[dict[int, float]]:
    """The plan's probabilities of the next token at each token of the played action, given the tokens before it; ends
    where the plan's probability is 0."""
    plan, left, found = np.array(planned.plan), np.ones(len(planned.ids), dtype=np.bool_), []
    for i, token in enumerate(planned.ids[planned.chosen]):
        following = np.array([text[i] if len(text) > i else -1 for text in planned.ids])
        before = plan[left].sum()
        if before <= 0:
            break
        choices = [int(choice) for choice in np.unique(following[left])]
        found.append({choice: float(plan[left & (following == choice)].sum() / before) for choice in choices})
        left &= following == token
    return found


class Reader:
    """A language model's probabilities of whole replies, in streams that it has not read before."""

    def __init__(self, policy: Policy, context: int, temperature: float) -> None:
        self.engine, self.temperature = Engine(policy, SLOTS, context), temperature

    def probabilities(self, stream: Sequence[int], replies: Sequence[Sequence[int]]) -> Floats:
        """Returns each reply's probability, given that it is one of them: (A,), of sum 1."""
        slot = self.engine.allocate()
        if len(stream) > 1:
            self.engine.read([slot], [stream[:-1]])
        scores = self.engine.score(slot, stream, replies, self.temperature)
        self.engine.free(slot)
        found: Floats = np.exp(scores - scores.max())
        return found / found.sum()


def weigh(decision: Decision, stream: Sequence[int], anchor: Reader, own: Reader) -> tuple[Floats, Floats | None]:
    """The anchor (A,) in this stream, and the others' (K, A) from the player's `own` model; see `Decision.values`."""
    tau = anchor.probabilities(stream, decision.ids)
    if decision.others is None:
        return tau, None
    return tau, np.stack([own.probabilities(other, decision.ids) for other in decision.others])


class PlanningAgent(ModelAgent):
    """A language model whose claims or votes are planned; everything else is as `ModelAgent` plays it.

    A draw from the plan replaces the model's own sample in the stream. Its `logprobs` are those of that draw; those of
    the best action are 0. With `choose=own` the plan is only noted, and play is bit-identical to `ModelAgent`.
    """

    def __init__(
        self,
        name: str,
        policy: Policy,
        config: PlannerConfig,
        game: str,
        *,
        context: int,
        temperature: float = 1.0,
        anchor: Policy | None = None,
        **limits: Any,
    ) -> None:
        """`game`: one of GAMES. `anchor`: the model that the plan stays near and that stands for the others; None: the
        policy. `limits`: see `ModelAgent`. Raises UserError for samples of plans at temperature 0."""
        assert game in GAMES, (game, GAMES)
        if temperature == 0 and config.choose == "sample":
            raise UserError(
                f"temperature=0: {name} draws claims or votes from plans, which is not greedy. Choose "
                "planner.choose=best, or a small temperature, such as 0.01"
            )
        super().__init__(name, policy, context=context, temperature=temperature, **limits)
        self.config, self.game = config, game
        self.reader = Reader(anchor or policy, context, temperature)
        self._openings: dict[Key, str] = {}
        self._talk: dict[Key, list[tuple[bool, str | None]]] = {}

    def _observe(self, r: Request) -> ModelAgentState:
        self._openings.setdefault(r.key, r.text)
        lost = r.key in self._states and self._states[r.key].lost
        if self.game == "dond" and r.turn == TurnKind.CHOOSE:
            raise UserError(f"env.format=structured: {self.name} plans whole claims. Set it to free.")
        if self.game == "dond" and any(question.later for question in r.questions):
            raise UserError(f"env.questions=claims: {self.name} plans with beliefs about values. Set it to values.")
        if self.game == "dond" and not lost:
            talk = self._talk.setdefault(r.key, [])
            for kind, words in dond_texts.parse_events(r.text):
                if kind == "error":
                    talk.pop()  # the reply that was refused
                elif kind == "cut":
                    talk[-1] = (True, (talk[-1][1] or "")[: int(words)])
                else:
                    talk.append((False, words if kind == "message" else None))
        return super()._observe(r)

    def finish(self, keys: Sequence[Key]) -> dict[Key, tuple[Stream, list[Belief]]]:
        for key in keys:
            self._openings.pop(key, None)
            self._talk.pop(key, None)
        return super().finish(keys)

    def _decision(self, key: Key, state: ModelAgentState) -> Decision | None:
        """The decision to plan; None if there is none."""
        opening = self._openings[key]
        if self.game == "dond":
            talk = self._talk[key]
            proposes = self.tokens.reply_text(state.ids).lstrip().startswith(dond_replies.PROPOSE)
            # Before any message no proposal is allowed; to a proposal there is no other answer.
            if not talk or not (proposes or (False, None) in talk):
                return None
            questions = [asked.question for asked in state.view.asked[:3]]
            return proposal(opening, talk, state.answers, questions, self.tokens, self.config)
        if state.kind != Kind.CHOICE or state.role != among_us_state.Role.CREWMATE:
            return None
        last = state.view.asked[len(state.answers) - 1].question if state.answers else None
        believed = dict(zip(last.candidates, state.answers[-1].tolist(), strict=True)) if last else {}
        return vote(opening, state.options, state.legal, believed, self.config)

    def _reply(self, key: Key, state: ModelAgentState) -> Reply:
        decision = self._decision(key, state)
        if decision is not None and max(map(len, decision.ids)) > self._free(state):
            decision = None  # no room to weigh them
        own = self.config.choose == "own"
        planned = None
        if decision is not None and not (own and tuple(state.ids) not in decision.ids):
            stream = state.view.stream.tokens  # up to the cue
            anchor, others = weigh(decision, stream, self.reader, self.reader)
            values = decision.values(anchor, others)
            plan = respond(values, anchor, self.config)
            if own:
                chosen = decision.ids.index(tuple(state.ids))
            elif self.config.choose == "best":
                chosen = int(plan.argmax())
            else:
                rng = np.random.default_rng([state.seed, len(stream), PLAN])
                chosen = int(pikl.sample([plan], 1, rng)[0, 0])
            planned = Planned(
                decision.actions, decision.ids, tuple(anchor.tolist()), tuple(values.tolist()), tuple(plan.tolist()),
                chosen, played=not own, floored=floored(anchor, others),
            )  # fmt: skip
            if not own:
                self.engine.rewind(state.slot, stream)
                state.read = len(stream)
                state.ids = list(decision.ids[chosen])
                state.logprobs = [0.0] * len(state.ids)
                if self.config.choose == "sample":
                    following = zip(next_tokens(planned), state.ids, strict=True)
                    state.logprobs = [math.log(after[token]) for after, token in following]
        reply = replace(super()._reply(key, state), planned=planned)
        self._note(key, reply.text)
        return reply

    def repeat(self, request: Request, ids: Sequence[int]) -> int:
        start = super().repeat(request, ids)
        if not self._states[request.key].lost:
            self._note(request.key, self.tokens.reply_text(ids))
        return start

    def _note(self, key: Key, text: str) -> None:
        """Adds one's own reply to the talk."""
        if self.game == "dond":
            parsed, said = dond_replies.parse_reply(text, (0, 0, 0), False, 1), None
            if isinstance(parsed, dond_replies.Message):
                said = dond_texts.passed_on(parsed.text, len(parsed.text))
            self._talk[key].append((True, said))


def planning_agent(
    name: str,
    policy: Policy,
    limits: PlayConfig,
    seats_per_game: int,
    temperature: float,
    config: PlannerConfig,
    game: str,
    anchor: Policy | None = None,
    style: str | None = None,
) -> PlanningAgent:
    """A policy that plans, with room as in `model_agent`."""
    return PlanningAgent(
        name,
        policy,
        config,
        game,
        anchor=anchor,
        style=style,
        **model_agent_settings(limits, seats_per_game, temperature),
    )
