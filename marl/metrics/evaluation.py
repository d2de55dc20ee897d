"""Metrics of finished games with 95 % intervals: score, agreement, talk, errors, beliefs, effects of messages.

`metrics` is a pure function of `Episode`s; means over training seeds are in tables.py. A metric without an observation
(a score of agreed games if there is none) is absent.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from marl.metrics.beliefs import CHANGES, belief_changes, belief_metrics
from marl.metrics.games import among_us_metrics, dond_metrics, ways_of_ending
from marl.metrics.stats import ByGame, Interval, Metrics, bootstrap_mean, bootstrap_ratio, mean_metrics, rate
from marl.metrics.talk import cut_metrics, played_by, talk_metrics
from marl.metrics.training import tries, winners
from marl.types import INSIDERS, Episode


def metrics(
    episodes: Sequence[Episode],
    game: str,
    objective: float = 0.0,
    players: Collection[str] | None = None,
    rng: np.random.Generator | None = None,
) -> Metrics:
    """All metrics of these games, by name.

    `game`: `dond`, `among_us` or another one. Another game gets `game/score` (a player's total payment), and
    `game/how/HOW` and `game/win_rate/WINNER` (shares of games) in its own words. `objective` is Deal or No Deal's.
    `players` (names in `Episode.players`) limits talk, errors, beliefs, speech and rewards to those players; the
    game's own figures count everybody. The default `rng` gives the same intervals for the same episodes.
    """
    if not episodes:
        raise ValueError("no episodes to evaluate: play at least one game")
    rng = rng or np.random.default_rng(0)
    if game == "dond":
        own = dond_metrics(episodes, objective, rng)
    elif game == "among_us":
        own = among_us_metrics(episodes, players, rng)
    else:
        games = [g for g, episode in enumerate(episodes) for _ in episode.players]
        paid = [sum(p.amount for p in e.payments if p.agent == agent) for e in episodes for agent in e.players]
        own = {"game/score": bootstrap_mean(paid, games, rng=rng), **_wins(episodes), **ways_of_ending(episodes)}
    return {
        **own,
        **talk_metrics(episodes, rng, players),
        **error_metrics(episodes, rng, players),
        **belief_metrics(episodes, rng, players),
        **speech_metrics(episodes, rng, players),
        **plan_metrics(episodes, rng, players),
        **cut_metrics(episodes, rng, players),
        **reward_metrics(episodes, rng, players),  # last: the other intervals' draws stay as they were
    }


def _wins(episodes: Sequence[Episode]) -> Metrics:
    """`game/win_rate/WINNER`: the share of games that each winner won."""
    return {
        f"game/win_rate/{name}": rate([e.outcome.get("winner") == name for e in episodes]) for name in winners(episodes)
    }


def error_metrics(
    episodes: Sequence[Episode], rng: np.random.Generator, players: Collection[str] | None = None
) -> Metrics:
    """`errors/per_turn`: refused replies per turn (`training.tries`). `errors/aborted`: share of games that ended
    after too many refused replies in a row, whoever made them. `errors/outgrown`: share of games in which a model's
    stream had no room for a turn.
    """
    each = [tries(episode, players) for episode in episodes]
    refused, turns = [wrong for wrong, _ in each], [had for _, had in each]
    found = {"errors/aborted": rate([episode.outcome.get("how") == "abort" for episode in episodes])}
    # always present: a mean over seeds needs it in each
    found["errors/outgrown"] = rate([episode.outgrown for episode in episodes])
    if sum(turns):
        found["errors/per_turn"] = bootstrap_ratio(refused, turns, rng=rng)
    return found


def plan_metrics(
    episodes: Sequence[Episode], rng: np.random.Generator, players: Collection[str] | None = None
) -> Metrics:
    """`plan/floored`: share of legal actions whose anchor probability was raised to the floor, mean over plans."""
    plans: ByGame = [
        (game, turn.planned.floored)
        for game, e in enumerate(episodes)
        for turn in e.turns
        if turn.planned and played_by(players, turn, e)
    ]
    return mean_metrics({"plan/floored": plans}, rng)


def reward_metrics(
    episodes: Sequence[Episode], rng: np.random.Generator, players: Collection[str] | None = None
) -> Metrics:
    """`reward/NAME`: what each term pays a turn, unweighted, as training logs it."""
    turns = [(game, turn) for game, e in enumerate(episodes) for turn in e.turns if played_by(players, turn, e)]
    values: dict[str, ByGame] = {}
    for name in sorted({name for _, turn in turns for name in turn.rewards}):
        own = [(game, turn) for game, turn in turns if name in turn.rewards]
        values[f"reward/{name}"] = [(game, turn.rewards[name]) for game, turn in own]
    return mean_metrics(values, rng)


def speech_metrics(
    episodes: Sequence[Episode], rng: np.random.Generator, players: Collection[str] | None = None
) -> Metrics:
    """Change of the other listeners' belief across a message.

    `speech/belief_change`: change of the probability of the truth, summed over listeners and questions, mean over
    messages after which somebody was asked. `speech/log_belief_change`: the same of the log-probability. These are the
    speaking reward's figures, so an imposter's count negative.
    """
    values: dict[str, ByGame] = {}
    for name, of in CHANGES.items():
        for game, episode in enumerate(episodes):
            for turn, change in zip(episode.turns, belief_changes(episode, of), strict=True):
                if turn.message and not math.isnan(change) and played_by(players, turn, episode):
                    sign = -1 if turn.role in INSIDERS else 1
                    values.setdefault(name, []).append((game, sign * float(change)))
    return mean_metrics(values, rng)


# --- The evaluation file ----------------------------------------------------------------------------------------------
def evaluation_to_json(
    conditions: Mapping[str, Metrics],
    by_message: Mapping[str, Sequence[Metrics]] | None = None,
    of_games: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
    **about: Any,
) -> dict[str, Any]:
    """The contents of `evaluation.json`: `{"about": {...}, "conditions": {condition: {metric: {mean, low, high, n}}},
    "belief_by_message": {condition: [{metric: {mean, low, high, n}}, ...]}, "by_game": {condition: {metric: [...]}}}`.

    Conditions (`base`, `trained`) keep their order. `about` describes the games: game, objective, number, seed.
    """
    return {
        "about": about,
        "conditions": {name: _to_json(found) for name, found in conditions.items()},
        "belief_by_message": {
            name: [_to_json(entry) for entry in entries] for name, entries in (by_message or {}).items()
        },
        "by_game": {
            name: {metric: list(of) for metric, of in found.items()} for name, found in (of_games or {}).items()
        },
    }


def conditions_from_json(evaluation: Mapping[str, Any]) -> dict[str, Metrics]:
    """The metrics of each condition of an `evaluation.json`."""
    return {
        name: {metric: Interval.from_json(value) for metric, value in found.items()}
        for name, found in evaluation["conditions"].items()
    }


def _to_json(found: Mapping[str, Interval]) -> dict[str, dict[str, float | int | None]]:
    return {name: interval.to_json() for name, interval in found.items()}
