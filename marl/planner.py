"""Planning near what the language model would do itself (piKL, see pikl.py) at the decision that the talk leads up to.

The language model talks, believes and decides when to propose; the planner chooses what it claims (Deal or No Deal) or
whom it votes for (Among Us). In both:

1. The anchor tau is the model's own probability of each legal action, scored on its stream and normalised.
2. What the others will do is predicted: as the anchor says, or as planners near it would play (DiL-piKL).
3. Q(a) is what action a is worth against that prediction, under the model's belief in what is hidden.
4. The plan is the anchored response, softmax of (Q + lambda log tau) / lambda, with the smallest of the lambdas
   (Bakhtin et al. 2022 play their smallest type). Large lambdas leave the anchor as it is, 0 plays the best action.

Models of the others. In Deal or No Deal the partner is expected to claim what the anchor leaves: claim c is expected of
it as probably as its complement is of the planner. Each value vector that it may have makes a stage game, in which both
know both players' values. In Among Us everybody else is expected to vote as the anchor does, never for itself, and to
want what the planner wants; that an imposter wants something else is left out.

Left out: planning what to say and when to propose, votes of imposters, who know what others must believe, other games,
and learning from plans: a planner's replies are no samples of its policy, and batch.py refuses them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from envs import among_us_v0, dond_v0
from envs.core import END
from marl import pikl
from marl.agents import Key, ModelAgent, ModelSeat, PlayConfig, Reply, Request, room
from marl.errors import UserError
from marl.pikl import Floats
from marl.policy import Policy
from marl.tokens import Tokens
from marl.types import Belief, Kind, Planned, Stream

GAMES = ("dond", "among_us")  # where there is something to plan
MOST_ACTIONS = 36  # allocations of the largest pool in Deal or No Deal
PLAN = 1  # a named place of a seat's seed: the draw from the plan owes nothing to the tokens' draws
CHOICES = {"others": ("plan", "anchor"), "belief": ("listening", "prior"), "choose": ("sample", "best")}


@dataclass(frozen=True)
class PlannerConfig:
    """How to plan. Lambdas have the payoff's unit a nat: points in Deal or No Deal, caught imposters in Among Us.

    `others`: whether they are expected to play their anchor, or to plan too (`iterations` of DiL-piKL from the anchor;
    `iterate` and the types `lambdas` with probabilities `beta` are those of `pikl.Settings`). `belief`: the model's own
    answers to the belief questions, or the exact prior without any talk. `choose`: a sample of the plan, or its mode.
    """

    lambdas: tuple[float, ...] = (0.1,)
    beta: tuple[float, ...] | None = None  # null is uniform
    iterations: int = 100
    iterate: str = "average"
    others: str = "plan"
    belief: str = "listening"
    choose: str = "sample"
    mistake: float = 0.0  # what ejecting a crewmate costs, in caught imposters; above 0, skipping may be best

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise UserError(f"planner.{name}={getattr(self, name)}: must be one of {', '.join(allowed)}")
        if not 0 <= self.mistake < math.inf:
            raise UserError(f"planner.mistake={self.mistake}: must be a number, at least 0")
        try:
            self.settings.type_probs(1)
        except UserError as error:
            raise UserError(f"planner.{error}") from error

    @property
    def settings(self) -> pikl.Settings:
        """For the stage games. From the anchor and without kappa, so that the anchor decides between equilibria."""
        return pikl.Settings(
            iterations=self.iterations, lambdas=self.lambdas, beta=self.beta, iterate=self.iterate, kappa="zero",
            first="anchor",
        )  # fmt: skip


def respond(values: Floats, anchor: Floats, config: PlannerConfig) -> Floats:
    """The plan, (A,): what is played, from values (A,) in the payoff's unit and the anchor (A,)."""
    return pikl.respond(values, np.log(np.maximum(anchor, config.settings.anchor_floor)), [min(config.lambdas)])[0]


# --- Deal or No Deal --------------------------------------------------------------------------------------------------


def partner_belief(answers: Floats, counts: dond_v0.Triple, own: dond_v0.Triple) -> Floats:
    """Probability of each of `dond_v0.partner_values(counts, own)`, (K,), from the answers (3, 11) to the three
    questions: their product over the items, among the vectors that the rules allow."""
    values = np.array(dond_v0.partner_values(counts, own))  # (K, 3)
    product = np.maximum(answers, 1e-12)[np.arange(3), values].prod(-1)
    return product / product.sum()


def claim_values(
    counts: dond_v0.Triple,
    own: dond_v0.Triple,
    objective: float,
    belief: Floats,
    anchor: Floats,
    config: PlannerConfig,
) -> Floats:
    """Expected score R_i + objective * R_j, in points, of each claim of `dond_v0.allocations(counts)`, (A,).

    `belief` (K,) over `dond_v0.partner_values(counts, own)`; `anchor` (A,). The partner's b-th action is to claim what
    the b-th claim leaves, so that only equal actions are a deal, and the planner's anchor is the partner's too.
    """
    claims = np.array(dond_v0.allocations(counts))  # (A, 3)
    mine = claims @ np.array(own)  # (A,)
    theirs = np.array(dond_v0.partner_values(counts, own)) @ (np.array(counts) - claims).T  # (K, A)
    gains = mine + objective * theirs  # (K, A): the planner's, if there is a deal
    if config.others == "anchor":
        return anchor * (belief @ gains)
    deal = np.eye(len(claims))
    payoffs = [each[:, :, None] * deal for each in (gains, theirs + objective * mine)]  # (K, A, A)
    agreeing = pikl.solve(payoffs, [anchor, anchor], config.settings).population[1]  # (K, A)
    return belief @ (agreeing * gains)


# --- Among Us ---------------------------------------------------------------------------------------------------------


@cache
def ejected(players: int) -> np.ndarray:
    """Who is ejected, (players + 1,) * players, from everybody's vote; the number of players stands for nobody.

    A strict plurality ejects, and skip is voted for like a name (`among_us_v0.count_votes`).
    """
    votes = np.indices((players + 1,) * players)  # (players, ...)
    counts = np.stack([(votes == choice).sum(0) for choice in range(players + 1)])
    leads = counts == counts.max(0)
    found = np.where(leads.sum(0) == 1, leads.argmax(0), players)
    found.flags.writeable = False  # shared by all callers
    return found


def vote_values(me: int, belief: Floats, anchor: Floats, config: PlannerConfig) -> Floats:
    """What each vote is worth, (n + 1,): for one of n living players, or (last) for nobody.

    Probability that an imposter is ejected, less `mistake` times that a crewmate is. `me` is the planner's number,
    `belief` (n,) the probability of being the imposter, `anchor` (n + 1,).
    """
    players = len(belief)
    worth = np.append(belief - config.mistake * (1 - belief), 0.0)
    payoff = worth[ejected(players)]  # (n + 1,) * n
    legal = np.ones((players, players + 1), dtype=np.bool_)
    legal[np.arange(players), np.arange(players)] = np.arange(players) == me  # nobody else is expected to give up
    policies = np.maximum(anchor, config.settings.anchor_floor) * legal  # (n, n + 1)
    policies /= policies.sum(-1, keepdims=True)
    if config.others == "plan":
        policies = np.stack(pikl.solve([payoff] * players, list(policies), config.settings, list(legal)).population)
    return pikl.expected_values([payoff] * players, list(policies))[me]


# --- The player -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decision:
    """What is to be planned: A actions, as words and as the ids of the reply, and their values given the anchor."""

    actions: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    values: Callable[[Floats], Floats]


def proposal(
    seen: str, reply: str, answers: Sequence[Floats], tokens: Tokens, config: PlannerConfig
) -> Decision | None:
    """The claims to choose from, where a proposal is due or the model's own `reply` is one; None where it talks on.

    `seen`: all that the seat has read; `answers`: to all belief questions so far, three at a time, (11,) each.
    """
    heard = [kind for kind, _ in dond_v0.parse_heard(seen) if kind != "error"]
    # Whoever moves again has heard from the partner; before any message no proposal is allowed.
    if not heard or not ("proposal" in heard or reply.lstrip().startswith(dond_v0.PROPOSE)):
        return None
    counts, own, objective = dond_v0.parse_prompt(seen)
    claims = dond_v0.allocations(counts)
    if config.belief == "prior":
        possible = len(dond_v0.partner_values(counts, own))
        belief = np.full(possible, 1 / possible)
    else:
        belief = partner_belief(np.stack(answers[-3:]), counts, own)
    return Decision(
        tuple(dond_v0.proposal_text(claim).removeprefix(dond_v0.PROPOSE).strip() for claim in claims),
        tuple(tuple(tokens.encode(f"{dond_v0.proposal_text(claim)} {END}")) for claim in claims),
        lambda anchor: claim_values(counts, own, objective, belief, anchor, config),
    )


def vote(
    intro: str, options: Sequence[str], legal: Sequence[int], believed: dict[str, float], config: PlannerConfig
) -> Decision | None:
    """The vote to plan; None where the options are no vote.

    `intro`: the first thing that the seat read; `legal`: the options' ids; `believed`: the answer to the last belief
    question, by candidate.
    """
    skip = among_us_v0.SKIP.act.value
    if skip not in options:
        return None
    order = [*sorted(set(range(len(options))) - {options.index(skip)}), options.index(skip)]  # skip comes last
    living = [options[i] for i in order[:-1]]
    style = among_us_v0.Style.NATURAL if living[0] in among_us_v0.NAMES else among_us_v0.Style.COMPACT
    name = next(e.name for e in among_us_v0.read(intro, style) if isinstance(e, among_us_v0.Intro))
    me = [word.lower() for word in living].index(name.lower())
    weights = [1.0 if config.belief == "prior" else max(believed.get(word, 0.0), 1e-12) for word in living]
    weights[me] = 0.0
    belief = np.array(weights) / sum(weights)
    return Decision(
        tuple(options[i] for i in order),
        tuple((legal[i],) for i in order),
        lambda anchor: vote_values(me, belief, anchor, config),
    )


def token_logprobs(texts: Sequence[Sequence[int]], plan: Floats, chosen: int) -> tuple[float, ...]:
    """Log-probability of each token of the chosen text given those before it, when a text is drawn from `plan` (A,).

    They sum to that of the text.
    """
    left, found = np.ones(len(texts), dtype=np.bool_), []
    for i, token in enumerate(texts[chosen]):
        before = plan[left].sum()
        left &= np.array([len(text) > i and text[i] == token for text in texts])
        found.append(float(np.log(plan[left].sum() / before)))
    return tuple(found)


class PlanningAgent(ModelAgent):
    """A language model whose claims or votes are planned; everything else is as `ModelAgent` plays it.

    Where it plans, what the model itself sampled is dropped, and a draw from the plan takes its place in the stream.
    `logprobs` are then those of that draw, given that there is a claim or a vote; the best action's are 0.
    """

    def __init__(
        self, name: str, policy: Policy, config: PlannerConfig, game: str, *, slots: int, **limits: Any
    ) -> None:
        """`limits` as of `ModelAgent`; `game` is one of GAMES."""
        assert game in GAMES, (game, GAMES)
        super().__init__(name, policy, slots=slots + MOST_ACTIONS, **limits)  # room to score all actions of one seat
        self.config, self.game = config, game
        self._seen: dict[Key, list[str]] = {}

    def _observe(self, r: Request) -> ModelSeat:
        self._seen.setdefault(r.key, []).append(r.text)
        return super()._observe(r)

    def finish(self, keys: Sequence[Key]) -> dict[Key, tuple[Stream, list[Belief]]]:
        for key in keys:
            self._seen.pop(key, None)
        return super().finish(keys)

    def _decision(self, key: Key, seat: ModelSeat) -> Decision | None:
        if self.game == "dond":
            reply = self.tokens.reply_text(seat.ids)
            return proposal("".join(self._seen[key]), reply, seat.answers, self.tokens, self.config)
        if seat.kind != Kind.CHOICE or seat.role != among_us_v0.Role.CREWMATE:
            return None
        last = seat.view.asked[len(seat.answers) - 1].question if seat.answers else None
        believed = dict(zip(last.candidates, seat.answers[-1].tolist(), strict=True)) if last else {}
        return vote(self._seen[key][0], seat.options, seat.legal, believed, self.config)

    def _reply(self, key: Key, seat: ModelSeat) -> Reply:
        decision = self._decision(key, seat)
        if decision is None:
            return super()._reply(key, seat)
        stream = seat.view.stream.tokens  # up to the cue
        scores = self.engine.score(seat.slot, stream, decision.ids, self.temperature)
        anchor = np.exp(scores - scores.max())
        anchor /= anchor.sum()
        values = decision.values(anchor)
        plan = respond(values, anchor, self.config)
        if self.config.choose == "best":
            chosen = int(plan.argmax())
            logprobs = (0.0,) * len(decision.ids[chosen])
        else:
            rng = np.random.default_rng([seat.seed, len(stream), PLAN])
            chosen = int(pikl.sample([plan], 1, rng)[0, 0])
            logprobs = token_logprobs(decision.ids, plan, chosen)
        planned = Planned(
            decision.actions, tuple(anchor.tolist()), tuple(values.tolist()), tuple(plan.tolist()), chosen
        )
        self.engine.rewind(seat.slot, stream)
        seat.read = len(stream)
        seat.ids, seat.logprobs = list(decision.ids[chosen]), list(logprobs)
        return replace(super()._reply(key, seat), planned=planned)


def planning_agent(
    name: str, policy: Policy, limits: PlayConfig, seats: int, temperature: float, config: PlannerConfig, game: str
) -> PlanningAgent:
    """As `agents.model_agent`, a policy that plans; it is called `NAME+plan`."""
    return PlanningAgent(f"{name}+plan", policy, config, game, **room(limits, seats, temperature))
