"""Measures a dialogue model and the nonsense filter on human dialogues that nobody learned from, and in games how far
players follow their intents."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from envs.dond.replies import MESSAGE
from envs.dond.rules import Triple, allocations, rest
from envs.human_dond import HumanView, NotReplayable, replay
from marl.intents.agent import intent_in
from marl.intents.annotate import certain_split, named_items
from marl.intents.corruptions import KINDS, Bigrams, Place
from marl.intents.draws import messages_behind, words_of
from marl.intents.nonsense import features
from marl.intents.streams import Intent, grounded, message_reply
from marl.intents.training import in_arm
from marl.learning.batch import Row
from marl.metrics import negotiation
from marl.metrics.drift import likelihood
from marl.metrics.stats import Interval, Metrics, bootstrap_ratio, rate
from marl.model.policy import Policy
from marl.model.tokens import Tokens
from marl.pretraining import corpus
from marl.types import Episode

AT_ONCE = 32  # streams that are read side by side


def perplexity(nats: Interval) -> Interval:
    """Perplexity a word, from a mean log-likelihood in nats a word."""
    mean, low, high = (math.exp(-x) for x in (nats.mean, nats.high, nats.low))
    return replace(nats, mean=mean, low=low, high=high)


def human_perplexity(
    policy: Policy, arm: str, intents: Mapping[int, Sequence[Intent]], data: str, split: Any,
    make_env: Callable[[], Any], rng: np.random.Generator,
) -> Interval:  # fmt: skip
    """Perplexity a word of human messages of a split under what this arm grounds them in, by dialogue."""
    found = corpus.recorded(data, split, [make_env], **in_arm(arm, intents))
    games: dict[str, list[Row]] = {}
    for dialogue, row in zip(found.dialogues, found.rows(policy.tokens), strict=True):
        games.setdefault(dialogue, []).append(row)
    nats = likelihood(policy, [*games.values()], rng)
    assert nats is not None, "no human message"
    return perplexity(nats)


# --- Control ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Controlled:
    """A message that was generated for an intent."""

    heard: str  # what the partner said before; empty if nothing
    human: str  # what a person said there
    counts: Triple
    intent: Intent
    message: str

    @property
    def stated(self) -> Triple | None:
        """The speaker's share that its words name; None if they name no whole split."""
        return certain_split(self.message, self.counts) if self.message else None

    @property
    def by_person(self) -> Controlled:
        """The same with what the person said instead: the yardstick."""
        return replace(self, message=self.human)


def control(found: Sequence[Controlled], rng: np.random.Generator) -> dict[str, Interval]:
    """Measures how many messages state a whole split (`stated`) and the intent's (`control`), and how many of the items
    that messages name go as intended (`items`). Intervals are over messages."""
    stating = [each for each in found if each.stated is not None]
    figures = {"intent/stated": rate([each.stated is not None for each in found])}
    if stating:
        figures["intent/control"] = rate([each.stated == each.intent.own for each in stating])
    named = [(named_items(each.message, each.counts), each.intent.own) for each in found]
    named = [(items, own) for items, own in named if items]
    if named:
        kept = [sum(own[item] == number for item, number in items.items()) for items, own in named]
        sizes = [len(items) for items, _ in named]
        figures["intent/items"] = bootstrap_ratio(np.array(kept, float), np.array(sizes, float), rng=rng)
    return figures


def followed(episodes: Iterable[Episode], rng: np.random.Generator) -> Metrics:
    """Measures how far players that are told intents follow them in games: `control` of their messages, and how many of
    their proposals claim what was planned (`intent/claimed`). Empty without such players."""
    messages, claimed = [], []
    for episode in episodes:
        counts = negotiation.context(episode).counts
        for turn in episode.turns:
            intent = intent_in(turn.thoughts)
            if turn.error or intent is None:
                continue
            if turn.message:
                messages.append(Controlled("", "", counts, intent, turn.message))
            elif claim := negotiation.claim_in(turn.text, counts):
                claimed.append(claim == intent.own)
    found = control(messages, rng) if messages else {}
    return {**found, "intent/claimed": rate(claimed)} if claimed else found


def controlled(
    policy: Policy, arm: str, views: Sequence[HumanView], intents: Mapping[int, Sequence[Intent]], env: Any, *,
    swap: bool, most: int, context: int, rng: np.random.Generator, temperature: float, top_p: float = 0.9,
    limit: int = 32, further: int = 0,
) -> list[Controlled]:  # fmt: skip
    """Generates one message at each of `most` places where people spoke, under the annotated intent, or (`swap`) under
    another complementary pair of claims, drawn at random, or the one so much `further`."""
    places = [
        (view, reply)
        for view in views
        if view.index in intents
        for reply in range(len(intents[view.index]) - 1)  # the last is the proposal
    ]
    drawn = [places[i] for i in rng.permutation(len(places))[:most]]
    streams, wanted = [], []
    for view, reply in drawn:
        own = [*intents[view.index]]
        if swap:
            others = [c for c in allocations(view.counts) if any(c) and c not in (view.counts, own[reply].own)]
            claim = others[(rng.integers(len(others)) + further) % len(others)]
            own[reply] = Intent(claim, rest(claim, view.counts))
        streams.append(_up_to_reply(grounded(replay(view, env), arm, own), policy.tokens, reply))
        wanted.append(own[reply])
    texts = messages_behind(
        policy, streams, limit, context=context, at_once=AT_ONCE, temperature=temperature, top_p=top_p, rng=rng
    )
    found = []
    for (view, reply), intent, (ids, _) in zip(drawn, wanted, texts, strict=True):
        place = [place for place, (who, text) in enumerate(view.turns) if who == "YOU" and text is not None][reply]
        heard, human = view.turns[place - 1][1] if place else "", view.turns[place][1]
        found.append(Controlled(heard or "", human or "", view.counts, intent, words_of(ids, policy.tokens)))
    return found


def _up_to_reply(steps: corpus.Steps, tokens: Tokens, reply: int) -> list[int]:
    """The stream up to the cue of the player's `reply`-th reply."""
    episode, you = corpus.human_row(steps, tokens, 0)
    return episode.streams[you].tokens[: episode.turns[reply].start]


# --- Nonsense ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HumanMessage:
    """A human message in its dialogue: the speaker's stream up to the cue, and what corruptions may use."""

    stream: list[int]
    message: str
    counts: Triple
    before: tuple[str, ...]


def human_messages(
    views: Sequence[HumanView], tokens: Tokens, env: Any, most: int, rng: np.random.Generator
) -> list[HumanMessage]:
    """Draws `most` human messages of YOU."""
    found: list[HumanMessage] = []
    for i in rng.permutation(len(views)).tolist():
        if len(found) >= most:
            break
        try:
            steps = replay(views[i], env)
        except NotReplayable:
            continue
        replies = [step[1] for step in steps if step[0] == "reply" and step[1].startswith(MESSAGE)]
        own = [text for who, text in views[i].turns if who == "YOU" and text is not None]
        for number in range(len(replies)):
            stream = _up_to_reply([*steps], tokens, number)
            found.append(HumanMessage(stream, own[number], views[i].counts, tuple(own[:number])))
    return found[:most]


def spoiled(
    messages: Sequence[HumanMessage], kind: str, strangers: Sequence[str], model: Bigrams, rng: np.random.Generator
) -> list[tuple[HumanMessage, str]]:
    """Returns the messages that this kind of corruption changes, with what it makes of them."""
    found = []
    for each in messages:
        worse = KINDS[kind](each.message, Place(each.counts, each.before, strangers, model), rng)
        if worse is not None:
            found.append((each, worse))
    return found


def read_messages(policy: Policy, messages: Sequence[tuple[HumanMessage, str]]) -> Any:
    """Features (N, F) of these messages, each in its dialogue."""
    ids = [policy.tokens.encode(message_reply(text)) for _, text in messages]
    return features(policy, [([*each.stream, *own], len(own)) for (each, _), own in zip(messages, ids, strict=True)])
