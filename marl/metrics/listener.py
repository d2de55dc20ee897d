"""Measures what was said, heard and acted on in Deal or No Deal, beside a listener that makes no mistake.

The exact listener knows the speaker's policy. What it believes of the speaker's values v after some messages is

    P(v | messages) ~ P(v) * product over the messages of P(message | what the speaker had read, v),

where the last factor is the speaker's own model reading its own stream with v in place of its values. With H the
entropy of the prior and v* the true values, in means over games (all in nats):

    said  = H - E[-log P(v* | messages)]     what the words gave away
    heard = H - E[-log b(v*)]                what the real listener took of it; b: its answers, `partner_belief`

What was acted on is the worth of the listener's claim, in points of its score, beside the best claim under the exact
belief, under its own, and without any talk. A claim is worth what the speaker's own model says of its chance to agree.

No listener that hears only the messages is better on average than the exact one. Where games are drawn from all valid
contexts the prior is uniform over `partner_values`. Refused replies count as read and not as said. Left out: what a
proposal says (its words are not heard), silence, messages whose author is no language model, and in games of parts
(format=structured) the choice to speak and all claims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from envs.core import END
from envs.dond import replies, rules
from envs.dond.texts import prompt_with
from marl.agents.base import Agent
from marl.agents.model import ModelAgent
from marl.common.errors import UserError
from marl.decoding.engine import Engine
from marl.metrics.stats import Metrics, bootstrap_mean, bootstrap_ratio
from marl.model.policy import Policy
from marl.model.tokens import StreamWriter
from marl.planning.planner import SLOTS, partner_belief
from marl.types import Episode, Turn

Floats = NDArray[np.float64]
PASS_TOKENS = 16_384  # tokens of one pass, padding included
COVERED = 0.999  # share of a belief whose values the worth of claims is summed over


@dataclass(frozen=True)
class Hearing:
    """One listener of one game. K values are possible of the speaker; M messages were heard."""

    game: int  # index of the episode
    speaker: str
    listener: str
    truth: int  # index of the speaker's values
    exact: Floats  # (M + 1, K), before any message and after each
    believed: Floats  # (M + 1, K), the listener's
    streams: list[list[int]]  # (K,) the speaker's up to its proposal, with each of the values; empty if it made none

    @property
    def said(self) -> Floats:
        """Nats given away after so many messages, (M + 1,)."""
        return np.log(self.exact[:, self.truth]) + np.log(self.exact.shape[1])

    @property
    def heard(self) -> Floats:
        """Nats that the listener knew after so many messages, (M + 1,)."""
        return np.log(self.believed[:, self.truth]) + np.log(self.believed.shape[1])


def hearings(episodes: Sequence[Episode], make_env: Callable[[], Any], agents: Mapping[str, Agent]) -> list[Hearing]:
    """Compares both listeners of each game with the exact one.

    `agents`: who played, by the names in `Episode.players`. Raises UserError for another game, for speakers at
    temperature 0, which have no likelihood, and if no speaker is a language model.
    """
    views = [view for game, episode in enumerate(episodes) for view in _speakers(game, episode, make_env(), agents)]
    if not views:
        raise UserError("No message to weigh: name a player that is a language model and speaks.")
    found: list[Hearing] = []
    for agent in {id(view.agent): view.agent for view in views}.values():
        own = [view for view in views if view.agent is agent]
        scores = iter(log_likelihoods(agent.policy, agent.temperature, [row for view in own for row in view.rows()]))
        for view in own:
            of_values = np.array([next(scores) for _ in view.prefixes]).reshape(len(view.prefixes), -1)  # (K, M)
            weights = np.concatenate([np.zeros((len(of_values), 1)), of_values.cumsum(1)], 1).T  # (M + 1, K)
            exact = np.exp(weights - weights.max(1, keepdims=True))
            exact /= exact.sum(1, keepdims=True)
            streams = [prefix + view.rest[: view.proposal] for prefix in view.prefixes] if view.proposal else []
            found.append(Hearing(view.game, view.speaker, view.listener, view.truth, exact, view.believed, streams))
    return found


@dataclass(frozen=True)
class _Speaker:
    """A speaker's stream, and how it begins with each of the values that its listener thinks possible."""

    game: int
    agent: ModelAgent
    speaker: str
    listener: str
    truth: int
    prefixes: list[list[int]]  # (K,) tokens up to the end of the opening
    rest: list[int]  # the tokens behind, which don't depend on the values
    spans: list[tuple[int, int]]  # of each message, in `rest`
    proposal: int  # where its proposal stands in `rest`; 0 if it made none
    believed: Floats

    def rows(self) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
        """The stream with each of the values, and where its messages stand."""
        end = self.spans[-1][1] if self.spans else 0
        for prefix in self.prefixes:
            size = len(prefix)
            yield [*prefix, *self.rest[:end]], [(start + size, stop + size) for start, stop in self.spans]


def _speakers(game: int, episode: Episode, env: Any, agents: Mapping[str, Agent]) -> Iterator[_Speaker]:
    """Finds the language models that spoke in this game."""
    if "counts" not in episode.facts:
        raise UserError("Said and heard are measured in Deal or No Deal, whose hidden values can be counted.")
    counts, values = tuple(episode.facts["counts"]), [tuple(v) for v in episode.facts["values"]]
    seats = list(episode.roles)
    for seat, speaker in enumerate(seats):
        agent = agents.get(episode.players[speaker])
        if not isinstance(agent, ModelAgent) or speaker not in episode.streams:
            continue
        if agent.temperature == 0:
            raise UserError("temperature=0 leaves no likelihood of a message. Play at a temperature above 0.")
        listener = seats[1 - seat]
        possible = rules.partner_values(counts, values[1 - seat])  # type: ignore[arg-type]
        options: dict[str, Any] = {"counts": counts, "values": values, "first": episode.facts["first"]}
        styles = {"styles": {speaker: agent.style}} if agent.style else {}
        observations, infos = env.reset(seed=episode.seed, options=options | styles)
        opening, questions = observations[speaker]["text"], infos[speaker]["questions"]

        def begun(own: rules.Triple, text: str = opening, asked: Any = questions, of: ModelAgent = agent) -> list[int]:
            writer = StreamWriter(of.tokens)
            writer.observe(prompt_with(text, own), asked, 0)
            return writer.stream.tokens

        stream, true = episode.streams[speaker].tokens, begun(values[seat])  # type: ignore[arg-type]
        assert stream[: len(true)] == true, "a stream does not begin with its game's opening"
        said = [t for t in episode.turns if t.agent == speaker and t.message and t.reply_ids]
        spans = [(t.start - len(true), t.start + (t.body[1] if t.cut else len(t.reply_ids)) - len(true)) for t in said]
        answers = [_answers(episode, listener, step) for step in (0, *(t.step + 1 for t in said))]
        if any(answer is None for answer in answers):
            continue  # a listener that is not asked: a scripted player
        believed = np.stack([partner_belief(a, counts, values[1 - seat]) for a in answers if a is not None])  # type: ignore[arg-type]
        prefixes = [begun(own) for own in possible]
        truth = possible.index(values[seat])  # type: ignore[arg-type]
        made = proposal_of(episode, speaker)
        proposed = made.start - len(true) if made and made.reply_ids else 0
        rest = stream[len(true) :]
        yield _Speaker(game, agent, speaker, listener, truth, prefixes, rest, spans, proposed, believed)


def proposal_of(episode: Episode, agent: str) -> Turn | None:
    """The proposal that a player made; None if it made none."""
    said = (t for t in episode.turns if t.agent == agent and not t.error and t.text.startswith(replies.PROPOSE))
    return next(said, None)


def _answers(episode: Episode, listener: str, step: int) -> Floats | None:
    """A listener's answers (3, 11) to the questions of one step; None if it was not asked about values."""
    asked = [belief for belief in episode.beliefs if (belief.listener, belief.step) == (listener, step)]
    answers = [belief.probs for belief in asked if not belief.question.later]
    return np.stack(answers).astype(np.float64) if len(answers) == len(rules.ITEMS) else None


class ClaimScorer:
    """Scores whole claims in many streams at once, normalised at the end (`intents/claims.py` at each token)."""

    STREAMS = 8  # that are read side by side

    def __init__(self, agent: ModelAgent) -> None:
        self.tokens, self.temperature = agent.tokens, agent.temperature
        self.engine = Engine(agent.policy, self.STREAMS * SLOTS, agent.engine.context)

    def probabilities(self, streams: Sequence[Sequence[int]], claims: Sequence[rules.Triple]) -> Floats:
        """Returns (K, A), rows of sum 1: each claim's probability in each stream, given that one of them is made."""
        texts = [self.tokens.encode(f"{replies.proposal_text(claim)} {END}") for claim in claims]
        scores = np.zeros((len(streams), len(claims)))
        for first in range(0, len(streams), self.STREAMS):
            group = range(first, min(first + self.STREAMS, len(streams)))
            slots = [self.engine.allocate() for _ in group]
            self.engine.read(slots, [streams[row][:-1] for row in group])
            everyone = list(range(len(claims)))
            ways = [_Way(row, slot, streams[row][-1], everyone, 0) for row, slot in zip(group, slots, strict=True)]
            while ways:
                ways = self._read_on(ways, texts, scores)
        weights: Floats = np.exp(scores - scores.max(1, keepdims=True))
        return weights / weights.sum(1, keepdims=True)

    def _read_on(self, ways: Sequence[_Way], texts: Sequence[list[int]], scores: Floats) -> list[_Way]:
        """Reads claims up to where they part again, each beginning once, and adds to their scores. Returns the rest."""
        taken: list[tuple[_Way, int, list[int], int]] = []  # each with a slot of its own, the claims, and how far
        for way in ways:
            parts = list(_parts(texts, way))
            slots = [*self.engine.fork(way.slot, len(parts) - 1), way.slot]
            taken += [(way, slot, own, end) for slot, (own, end) in zip(slots, parts, strict=True)]
        new = [texts[own[0]][way.read : end] for way, _, own, end in taken]
        chunks = [[way.last, *ids[:-1]] for (way, *_), ids in zip(taken, new, strict=True)]
        states = self.engine.read([slot for _, slot, _, _ in taken], chunks)
        ids = torch.tensor([token for part in new for token in part], device=states.device)
        each = speech_scores(self.engine.policy, states, ids, self.temperature).split([len(part) for part in new])
        left = []
        for (way, slot, own, end), part, score in zip(taken, new, each, strict=True):
            scores[way.row, own] += float(score.sum())
            if end < len(texts[own[0]]):
                left.append(_Way(way.row, slot, part[-1], own, end))
            else:
                self.engine.free(slot)
        return left


class _Way(NamedTuple):
    """Claims that begin alike, in the stream of one row: `slot` holds both but for their last token."""

    row: int
    slot: int
    last: int
    claims: list[int]
    read: int  # how many tokens of the claims


def _parts(texts: Sequence[list[int]], way: _Way) -> Iterator[tuple[list[int], int]]:
    """Parts claims by their next token. Each part with the number of tokens that all its claims have alike."""
    by_token: dict[int, list[int]] = {}
    for claim in way.claims:
        by_token.setdefault(texts[claim][way.read], []).append(claim)
    for own in by_token.values():
        alike = zip(*(texts[claim] for claim in own), strict=False)
        yield own, sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, alike))


def claim_worth(episode: Episode, hearing: Hearing, speaker: ClaimScorer) -> dict[str, float] | None:
    """The worth of the listener's claims under the exact belief, in points of its score; None without two proposals.

    Keys: `made`, and the best claims under the `prior`, under what it `believed`, and under the `exact` belief.
    `speaker`: reads the speaker's model.
    """
    seat, facts = list(episode.roles).index(hearing.listener), episode.facts
    made = episode.outcome["claims"][seat]
    if made is None or not hearing.streams:
        return None
    counts, own = tuple(facts["counts"]), tuple(facts["values"][seat])
    mine = rules.allocations(counts)  # (A,) claims of the listener; the speaker agrees by claiming the rest
    theirs = [rules.rest(claim, counts) for claim in mine]
    beliefs = {
        "prior": np.full(len(hearing.streams), 1 / len(hearing.streams)),
        "believed": hearing.believed[-1],
        "exact": hearing.exact[-1],
    }
    values = np.array(rules.partner_values(counts, own))  # (K, 3)
    scores = np.array(mine) @ own + facts["objective"] * values @ np.array(theirs).T  # (K, A), if there is a deal
    needed = np.zeros(len(values), dtype=np.bool_)  # values that some belief gives weight to
    for belief in beliefs.values():
        order = np.argsort(-belief)
        needed[order[: int(np.searchsorted(belief[order].cumsum(), COVERED)) + 1]] = True
    agrees = np.zeros(scores.shape)
    agrees[needed] = speaker.probabilities([hearing.streams[k] for k in np.flatnonzero(needed)], theirs)
    gains = agrees * scores
    worth = beliefs["exact"] @ gains  # (A,)
    best = {name: float(worth[int((belief @ gains).argmax())]) for name, belief in beliefs.items()}
    return {"made": float(worth[mine.index(tuple(made))]), **best}


def listener_metrics(
    episodes: Sequence[Episode],
    make_env: Callable[[], Any],
    agents: Mapping[str, Agent],
    rng: np.random.Generator,
    claims: bool = True,
) -> Metrics:
    """Said, heard and acted on, with intervals over games; see the module.

    `talk/said`, `talk/heard` and `talk/share_heard` after the last message, `talk/said/N` and `talk/heard/N` after the
    first N of the games that have as many. With `claims`: `talk/claim/NAME` for the keys of `claim_worth`.
    """
    found = hearings(episodes, make_env, agents)
    last = [(h.game, h.said[-1], h.heard[-1]) for h in found]
    games, said, heard = (np.array(column) for column in zip(*last, strict=True))
    metrics = {
        "talk/said": bootstrap_mean(said, games, rng=rng),
        "talk/heard": bootstrap_mean(heard, games, rng=rng),
        "talk/prior": bootstrap_mean([np.log(h.exact.shape[1]) for h in found], games, rng=rng),
    }
    if said.sum() > 0:
        metrics["talk/share_heard"] = bootstrap_ratio(heard, said, games, rng=rng)
    for number in range(1, max(len(h.said) for h in found)):
        those = [h for h in found if len(h.said) > number]
        for name in ("said", "heard"):
            values = [getattr(h, name)[number] for h in those]
            metrics[f"talk/{name}/{number}"] = bootstrap_mean(values, [h.game for h in those], rng=rng)
    if claims:
        readers: dict[str, ClaimScorer] = {}
        worths: list[tuple[int, dict[str, float]]] = []
        for h in found:
            name = episodes[h.game].players[h.speaker]
            agent = agents[name]
            assert isinstance(agent, ModelAgent)
            if name not in readers:
                readers[name] = ClaimScorer(agent)
            if worth := claim_worth(episodes[h.game], h, readers[name]):
                worths.append((h.game, worth))
        for key in ("prior", "made", "believed", "exact") if worths else ():
            values = [worth[key] for _, worth in worths]
            metrics[f"talk/claim/{key}"] = bootstrap_mean(values, [game for game, _ in worths], rng=rng)
    return metrics


@torch.no_grad()
def log_likelihoods(
    policy: Policy, temperature: float, rows: Sequence[tuple[list[int], list[tuple[int, int]]]]
) -> list[Floats]:
    """Log-probability of each marked part of each row, as speech: one array (parts,) a row."""
    found: list[Floats] = [np.zeros(0)] * len(rows)
    for group, tokens in passes([tokens for tokens, _ in rows], PASS_TOKENS, policy.device):
        at = [(b, t) for b, i in enumerate(group) for span in rows[i][1] for t in range(*span)]
        if not at:
            continue
        row, index = torch.tensor(at, device=policy.device).T
        states = policy.hidden(tokens)[row, index - 1]  # (N, D), the state before each token of a message
        each = iter(speech_scores(policy, states, tokens[row, index], temperature).tolist())
        for i in group:
            found[i] = np.array([sum(next(each) for _ in range(*span)) for span in rows[i][1]])
    return found


@torch.no_grad()
def speech_scores(policy: Policy, states: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probabilities (N,) of tokens (N,) as speech, from the states (N, D) before them."""
    scores = []
    for part, own in zip(states.split(1024), ids.split(1024), strict=True):  # a large vocabulary times N is too much
        shaped = policy.speech_logits(policy.logits(part), temperature).double().log_softmax(-1)
        scores.append(shaped.gather(1, own[:, None])[:, 0])
    return torch.cat(scores).cpu()


def passes(
    rows: Sequence[Sequence[int]], budget: int, device: torch.device
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Groups rows of like length into passes of at most `budget` tokens: their numbers, and their tokens (B, T)."""
    groups: list[list[int]] = []
    for i in sorted(range(len(rows)), key=lambda i: len(rows[i])):
        if not groups or (len(groups[-1]) + 1) * len(rows[i]) > budget:
            groups.append([])
        groups[-1].append(i)
    for group in groups:
        tokens = [torch.tensor(rows[i], dtype=torch.int64) for i in group]
        yield group, pad_sequence(tokens, batch_first=True).to(device)
