"""Trains the two models that talk with a plan in `pure` Diplomacy, on scripted games, from a base that knows the game.

The action model reads views of one seat (`press.talk_view`), cut after a message, with all talk or that with one
partner alone, and learns what the seat then ordered. Views in which somebody said other than it ordered are left out.
The dialogue model reads whole seats, as the base did, and before each own message the intent
that the action model finds in it.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from envs.core import TurnKind
from envs.diplomacy.pure import POWERS
from marl.agents.base import Player
from marl.agents.text import TextAgent
from marl.intents.orders import OrderReader, trees_of
from marl.intents.press import Intent, Noted, Notes, Phase, asks, choices_of, talk_view, truthful
from marl.intents.streams import insert_lines
from marl.learning.batch import Row
from marl.losses import Loss
from marl.losses.imitation import ImitationLoss
from marl.model.optim import MuonAndAdamW
from marl.model.policy import Policy
from marl.model.tokens import Tokens
from marl.pretraining.config import BaseConfig
from marl.pretraining.corpus import batches
from marl.pretraining.fit import fit
from marl.rollout.games import env_maker, scripts_module
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import Game, draw_games, sampling_seed
from marl.types import Episode, Kind, Turn

GAMES, VIEWS, TESTED = 108, 109, 110  # parts of the seed
WHOLE = 0.4  # share of the views that hold all of a seat's talk
Progress = Callable[[int, int], None]  # steps taken, all steps


@dataclass(frozen=True)
class Played:
    """Scripted games: episodes with streams, and the notes of each seat."""

    episodes: Sequence[Episode]
    notes: Sequence[Mapping[str, Notes]]  # by agent

    @property
    def views(self) -> list[tuple[Episode, str, Notes]]:
        both = zip(self.episodes, self.notes, strict=True)
        return [(episode, agent, own) for episode, notes in both for agent, own in notes.items()]


def play_scripted(env: Mapping[str, Any], players: str, games: Sequence[Game], tokens: Tokens) -> Played:
    """Plays scripted games and keeps what each seat read and said."""
    module, kept = scripts_module("diplomacy"), dict[int, Noted]()

    def make(seed: int, role: str) -> Player:
        kept[seed] = Noted(module.make_player(players, seed, role))
        return kept[seed]

    episodes = rollout(games, everyone(TextAgent("scripted", make, tokens)), env_maker(env), 64)
    notes = [
        {agent: kept[sampling_seed(game, seat)].notes for seat, agent in enumerate(episode.players)}
        for game, episode in zip(games, episodes, strict=True)
    ]
    return Played(episodes, notes)


def draw_scripted(env: Mapping[str, Any], players: str, seed: int, place: int, count: int, tokens: Tokens) -> Played:
    """Plays `count` games that follow from a seed."""
    return play_scripted(env, players, draw_games(seed, place, count=count), tokens)


# --- The action model -------------------------------------------------------------------------------------------------
def order_rows(played: Played, views: int, tokens: Tokens, rng: np.random.Generator) -> tuple[list[Row], int]:
    """Rows that teach a seat's orders: `views` of each seat and phase. Returns them, and how many were left out as
    not truthful."""
    rows: list[Row] = []
    untrue = 0
    for _, _, notes in played.views:
        for number, phase in enumerate(notes.phases):
            mine = phase.unit_of(notes.power)
            if mine is None or not phase.orders:
                continue
            for _ in range(views):
                partner = None if rng.random() < WHOLE else POWERS[rng.integers(len(POWERS))]
                partners = [said.reader if said.speaker == notes.power else said.speaker for said in phase.talk]
                if partner is not None and partners and rng.random() < 0.75:  # with most there is no talk
                    partner = partners[rng.integers(len(partners))]
                messages = int(rng.integers(len(phase.talk) + 1)) if rng.random() < 0.5 else len(phase.talk)
                cut = phase.until(messages)
                if not truthful(replace(cut, orders=phase.orders), partner):
                    untrue += 1
                    continue
                own = [*notes.phases[:number], cut]
                rows.append(order_row(notes, own, partner, phase.orders, tokens, len(rows)))
    return rows, untrue


def order_row(
    notes: Notes, phases: Sequence[Phase], partner: str | None, orders: Mapping[int, int], tokens: Tokens, index: int
) -> Row:
    """One view, and the seat's orders as replies."""
    view, turns = talk_view(notes, notes.power, phases, partner, tokens), list[Turn]()
    trees, state = trees_of(phases[-1].state), phases[-1].state[0]
    for place in [p for p in sorted(orders) if POWERS[state[p]] == notes.power]:
        view.observe(asks(place), (), 0)
        tree: Any = trees[place]
        for option in choices_of(tree, orders[place]):
            legal = view.cue(tuple(tree))
            ids = (legal[tuple(tree).index(option)],)
            start = view.reply(ids, Kind.CHOICE)
            turns.append(Turn("me", "power", len(turns), TurnKind.CHOOSE, option, ids, start, (0.0,), legal=legal))
            tree = tree[option]
    episode = Episode(
        seed=index, players={"me": "scripted"}, roles={"me": "power"}, streams={"me": view.stream}, turns=tuple(turns),
        beliefs=(), payments=(), outcome={}, steps=len(turns),
    )  # fmt: skip
    return episode, "me"


def learn_rows(
    start: Policy, rows: Sequence[Row], base: BaseConfig, losses: Mapping[str, Loss], progress: Progress
) -> Policy:
    """Trains a copy of a policy on these rows, once each."""
    policy = copy.deepcopy(start)
    steps = math.ceil(len(rows) / base.rows)
    optimizer = MuonAndAdamW(policy, base.learning_rate, base.weight_decay)

    def draw() -> Iterator[list[Row]]:
        for epoch in itertools.count():
            yield from batches(rows, base.rows, np.random.default_rng([base.seed, epoch]))

    fit(policy, draw(), steps, base, losses, optimizer, lambda done: progress(done, steps))
    return policy


def action_model(
    start: Policy, played: Played, views: int, base: BaseConfig, progress: Progress = lambda done, total: None
) -> tuple[Policy, dict[str, float]]:
    """Trains the action model. Returns it with counts of what it learned from."""
    rows, untrue = order_rows(played, views, start.tokens, np.random.default_rng([base.seed, VIEWS]))
    policy = learn_rows(start, rows, base, {"imitation": ImitationLoss(1.0)}, progress)
    return policy, {"views": len(rows), "untrue": untrue}


# --- Annotation -------------------------------------------------------------------------------------------------------
@torch.no_grad()
def annotate(views: Sequence[Notes], reader: OrderReader) -> list[list[list[Intent | None]]]:
    """Intents of each seat's own messages, by phase: the orders of author and reader that are likeliest in their views
    of their talk with each other, up to and including the message. None where one of them has no unit."""
    streams, states, places, where = [], [], [], []
    found: list[list[list[Intent | None]]] = []
    for s, notes in enumerate(views):
        found.append([])
        for number, phase in enumerate(notes.phases):
            found[s].append([])
            for count, said in enumerate(phase.talk, start=1):
                if said.speaker != notes.power:
                    continue
                found[s][number].append(None)
                own, other = phase.unit_of(said.speaker), phase.unit_of(said.reader)
                if own is None or other is None:
                    continue
                phases = [*notes.phases[:number], phase.until(count)]
                for power, partner, place in ((said.speaker, said.reader, own), (said.reader, said.speaker, other)):
                    streams.append(talk_view(notes, power, phases, partner, reader.tokens).stream.tokens)
                    states.append(phase.state)
                    places.append([place])
                where.append((s, number, len(found[s][number]) - 1))
    probs = [
        each[place].argmax()
        for each, (place,) in zip(reader.probabilities(streams, states, places), places, strict=True)
    ]
    for (s, number, message), (own,), (other,), mine, theirs in zip(
        where, places[::2], places[1::2], probs[::2], probs[1::2], strict=True
    ):
        found[s][number][message] = Intent((own, int(mine)), (other, int(theirs)))
    return found


# --- The dialogue model -----------------------------------------------------------------------------------------------
def with_intents(episode: Episode, agent: str, intents: Sequence[Intent | None], tokens: Tokens) -> Row:
    """A seat's row in which each of its messages stands behind its intent, where it has one."""
    speaking = [turn for turn in episode.turns if turn.agent == agent and turn.kind == TurnKind.SPEAK and turn.message]
    assert len(speaking) == len(intents), (len(speaking), len(intents))
    both = zip(speaking, intents, strict=True)
    return insert_lines(
        (episode, agent), [(turn, intent.text()) for turn, intent in both if intent is not None], tokens
    )


def dialogue_model(
    start: Policy, played: Played, reader: OrderReader, base: BaseConfig, progress: Progress = lambda done, total: None
) -> tuple[Policy, dict[str, float]]:
    """Trains the dialogue model. Returns it with counts of what it learned from."""
    intents = annotate([notes for _, _, notes in played.views], reader)
    rows = [
        with_intents(episode, agent, [each for phase in own for each in phase], start.tokens)
        for (episode, agent, _), own in zip(played.views, intents, strict=True)
    ]
    policy = learn_rows(start, rows, base, base.losses(), progress)
    return policy, {"seats": len(rows), "messages": sum(len(phase) for own in intents for phase in own)}
