"""Trains what talk with a plan needs in Among Us, on scripted games: an action model, and a dialogue model.

The action model imitates whole views and learns the votes beside them (`among_us_votes.py`). The dialogue model goes on
from its weights, on the same games with the annotated intent before each own message. Half of the views have none, so
that one model talks with a plan or without.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from marl.intents.among_us import Intent, accused_outright, intent_text
from marl.intents.among_us_votes import Annotated, meetings_of, table_rows, voted_messages, with_votes
from marl.intents.draws import messages_behind, plain_words
from marl.intents.streams import insert_lines
from marl.learning.batch import Row
from marl.losses.listening import ListeningLoss
from marl.model.optim import OPTIMIZERS, MuonAndAdamW
from marl.model.policy import Policy
from marl.model.tokens import Tokens
from marl.pretraining import corpus
from marl.pretraining.base import from_scratch
from marl.pretraining.config import BaseConfig, Lesson, ModelConfig
from marl.pretraining.fit import fit
from marl.rollout.games import env_maker, scripted
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from marl.types import Belief, Episode

GAMES, ORDER, MIXED = 121, 122, 123  # parts of the seed
ALONE = 8  # passes of a lesson in votes over views alone
HALF = 0.5  # share of the views that a dialogue model reads without intents

Intents = Mapping[tuple[int, str], Mapping[int, Intent]]
Progress = Callable[[int, int], None]  # steps taken, all steps


def untrained(model: ModelConfig, base: BaseConfig, env: Mapping[str, Any]) -> Policy:
    """A model that has learned nothing yet, but a tokenizer of scripted games."""
    texts = corpus.scripted_texts("among_us", [env_maker(env)], base.seed, base.games_of_tokenizer, base.players)
    return from_scratch("among_us", texts, model, base.seed)


def scripted_games(env: Mapping[str, Any], tokens: Tokens, base: BaseConfig, part: int, count: int) -> list[Episode]:
    """Plays scripted games of `base.players` and records every seat's stream. `part`: which games, by a number."""
    agent = scripted("among_us", base.players, tokens)
    return rollout(draw_games(base.seed, GAMES, part, count=count), everyone(agent), env_maker(env), 64)


def action_rows(episodes: Sequence[Episode], tokens: Tokens) -> list[Row]:
    """Returns what an action model learns from: all views with votes beside them, and what the tables heard."""
    rows: list[Row] = []
    for episode in episodes:
        asked = with_votes(episode, tokens)
        rows += [(asked, agent) for agent in asked.streams]
        rows += table_rows(episode, tokens)
    return rows


def with_intents(row: Row, intents: Mapping[int, Intent], tokens: Tokens) -> Row:
    """The row with the intent of each message, by the message's step, before its cue, where its speaker alone reads it
    (`StreamWriter.tell`)."""
    own = [turn for turn in row[0].turns if turn.agent == row[1] and turn.reply_ids and turn.step in intents]
    return insert_lines(row, [(turn, intent_text(intents[turn.step])) for turn in own], tokens)


def intents_of(annotated: Sequence[Annotated]) -> Intents:
    """The intents by game and seat, and by the message's step."""
    found: dict[tuple[int, str], dict[int, Intent]] = {}
    for each in annotated:
        found.setdefault((each.seed, each.turn.agent), {})[each.turn.step] = each.intent
    return found


def dialogue_rows(episodes: Sequence[Episode], intents: Intents, tokens: Tokens, rng: np.random.Generator) -> list[Row]:
    """All views of annotated games, each with its intents or, as often, without."""
    rows = []
    for episode in episodes:
        for agent in episode.streams:
            own = intents.get((episode.seed, agent), {})
            rows.append(with_intents((episode, agent), own, tokens) if rng.random() >= HALF else (episode, agent))
    return rows


def learn(policy: Policy, draw: Callable[[int], Sequence[Row]], base: BaseConfig, progress: Progress) -> None:
    """Trains for `base.epochs` passes; `draw` returns the rows of each."""
    first = draw(0)
    steps = base.epochs * math.ceil(len(first) / base.rows)
    optimizer = MuonAndAdamW(policy, base.learning_rate, base.weight_decay)
    batches = passes(lambda epoch: draw(epoch) if epoch else first, base)
    fit(policy, batches, steps, base, base.losses(), optimizer, lambda done: progress(done, steps))


def passes(draw: Callable[[int], Sequence[Row]], base: BaseConfig) -> Iterator[list[Row]]:
    """Batches of pass after pass, each in an order of its own."""
    for epoch in itertools.count():
        yield from corpus.batches(draw(epoch), base.rows, np.random.default_rng([base.seed, ORDER, epoch]))


def lesson_rows(episodes: Sequence[Episode], tokens: Tokens) -> tuple[list[Row], list[Row]]:
    """Returns the views of a lesson in votes: those of players that kept their word, asked for their vote behind each
    message that accuses outright whom they then voted for; and what the tables heard, asked behind every message."""
    views: list[Row] = []
    for episode in episodes:
        kept: dict[str, list[Belief]] = {}
        for said in voted_messages(episode, tokens, meetings_of(episode)):
            if said.truthful and accused_outright(said.turn.message) == said.after.question.answer:
                kept.setdefault(said.turn.agent, []).append(said.after)
        views += [(replace(episode, beliefs=tuple(own)), agent) for agent, own in kept.items()]
    return views, [row for episode in episodes for row in table_rows(episode, tokens)]


def lesson_passes(views: Sequence[Row], tables: Sequence[Row], base: BaseConfig, alone: int) -> Iterator[list[Row]]:
    """Batches of pass after pass: of the views, and after `alone` passes of half as many tables too."""
    for epoch in itertools.count():
        rng = np.random.default_rng([base.seed, ORDER, epoch])
        more = [tables[i] for i in rng.permutation(len(tables))[: len(views) // 2]] if epoch >= alone else []
        yield from corpus.batches([*views, *more], base.rows, rng)


def action_model(
    model: ModelConfig, base: BaseConfig, env: Mapping[str, Any], games: Callable[[Tokens], Sequence[Episode]],
    lesson: Lesson, progress: Progress,
) -> Policy:  # fmt: skip
    """A model that plays as the scripts do, and then, in a lesson of votes alone, learns to read them behind a
    message: beside imitation they are hardly learned. `games`: those to learn from."""
    policy = untrained(model, base, env)
    episodes = games(policy.tokens)
    rows = action_rows(episodes, policy.tokens)
    learn(policy, lambda epoch: rows, base, progress)
    draw = lesson_passes(*lesson_rows(episodes, policy.tokens), base, ALONE)
    optimizer = OPTIMIZERS[lesson.optimizer](policy, lesson.learning_rate, 0.0)
    steps = lesson.steps
    fit(policy, draw, steps, base, {"listening": ListeningLoss(1.0)}, optimizer, lambda done: progress(done, steps))
    return policy


def dialogue_model(
    action: Policy, base: BaseConfig, games: Sequence[Episode], annotated: Sequence[Annotated], progress: Progress
) -> Policy:
    """A model that plays as the scripts do, and that says what an intent wants where it is told one."""
    policy = copy.deepcopy(action)

    def draw(epoch: int) -> list[Row]:
        rng = np.random.default_rng([base.seed, MIXED, epoch])
        return dialogue_rows(games, intents_of(annotated), policy.tokens, rng)

    learn(policy, draw, base, progress)
    return policy


# --- Control ----------------------------------------------------------------------------------------------------------
@torch.no_grad()
def say_under(
    policy: Policy, places: Sequence[tuple[Row, int, Intent]], intents: Intents, *, context: int, temperature: float,
    top_p: float, limit: int, rng: np.random.Generator, at_once: int = 32,
) -> list[str]:  # fmt: skip
    """Draws a message at each of these places, the step of a recorded message, under an intent instead of its own.
    Earlier messages of the view keep theirs. Empty: an unfinished one."""
    tokens, streams = policy.tokens, []
    for (episode, agent), step, intent in places:
        own = intents.get((episode.seed, agent), {})
        view, _ = with_intents((episode, agent), {**own, step: intent}, tokens)
        turn = next(t for t in view.turns if (t.agent, t.step) == (agent, step))
        streams.append(view.streams[agent].tokens[: turn.start])
    drawn = messages_behind(
        policy, streams, limit, context=context, at_once=at_once, temperature=temperature, top_p=top_p, rng=rng, tag=""
    )
    return [plain_words(ids, tokens) for ids, _ in drawn]
