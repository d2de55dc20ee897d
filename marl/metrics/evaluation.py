"""Metrics of finished games with 95 % intervals over games. A metric without an observation is absent."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from envs.core import TurnKind
from marl.metrics.beliefs import CHANGES, belief_changes, belief_metrics
from marl.metrics.diplomacy import diplomacy_metrics
from marl.metrics.games import among_us_metrics, dond_metrics, ways_of_ending
from marl.metrics.press import press_metrics
from marl.metrics.stats import ByGame, Interval, Metrics, bootstrap_mean, bootstrap_ratio, mean_metrics, rate
from marl.metrics.talk import played_by, talk_metrics
from marl.metrics.training import tries, winners
from marl.types import INSIDERS, Episode


def metrics(
    episodes: Sequence[Episode],
    game: str,
    objective: float = 0.0,
    players: Collection[str] | None = None,
) -> Metrics:
    """All metrics of these games, by name (wording.csv). Raises ValueError without a game.

    `game`: `dond`, `among_us`, `diplomacy` or another one, which gets `game/score` (a player's total payment),
    `game/how/HOW` and `game/win_rate/WINNER` in its own words. `objective` is Deal or No Deal's. `players` (names in
    `Episode.players`) limits talk, errors, beliefs, speech, rewards and Diplomacy's scores to those players; the game's
    other figures count everybody.
    """
    if not episodes:
        raise ValueError("no episodes to evaluate: play at least one game")
    rng = np.random.default_rng(0)
    if game == "dond":
        own = dond_metrics(episodes, objective, rng)
    elif game == "among_us":
        own = among_us_metrics(episodes, players, rng)
    elif game == "diplomacy":
        own = {**diplomacy_metrics(episodes, rng, players), **ways_of_ending(episodes)}
        own |= press_metrics(episodes, rng, players)
    else:
        games = [g for g, episode in enumerate(episodes) for _ in episode.players]
        paid = [e.paid(agent) for e in episodes for agent in e.players]
        own = {"game/score": bootstrap_mean(paid, games, rng=rng)}
        own |= {f"game/win_rate/{n}": rate([e.outcome.get("winner") == n for e in episodes]) for n in winners(episodes)}
        own |= ways_of_ending(episodes)
    return {
        **own,
        **talk_metrics(episodes, rng, players),
        **error_metrics(episodes, rng, players),
        **belief_metrics(episodes, rng, players),
        **turn_metrics(episodes, rng, players),
    }


def error_metrics(
    episodes: Sequence[Episode], rng: np.random.Generator, players: Collection[str] | None = None
) -> Metrics:
    """Refused replies per turn (`training.tries`), and shares of games that were aborted or outgrew a stream."""
    each = [tries(episode, players) for episode in episodes]
    refused, turns = [wrong for wrong, _ in each], [had for _, had in each]
    found = {"errors/aborted": rate([episode.outcome.get("how") == "abort" for episode in episodes])}
    found["errors/outgrown"] = rate([episode.outgrown for episode in episodes])
    if sum(turns):
        found["errors/per_turn"] = bootstrap_ratio(refused, turns, rng=rng)
    return found


def turn_metrics(
    episodes: Sequence[Episode], rng: np.random.Generator, players: Collection[str] | None = None
) -> Metrics:
    """Means over turns of these players: `speech/*`, `plan/floored`, `talk/cut` and `reward/*`.

    `speech/*` are the speaking reward's figures, so an imposter's count negative.
    """
    turns = [
        (game, number, turn)
        for game, episode in enumerate(episodes)
        for number, turn in enumerate(episode.turns)
        if played_by(players, turn, episode)
    ]
    values: dict[str, ByGame] = {}
    for name, of in CHANGES.items():
        changes = [belief_changes(episode, of) for episode in episodes]
        values[name] = [
            (game, (-1 if turn.role in INSIDERS else 1) * float(changes[game][number]))
            for game, number, turn in turns
            if turn.message and not math.isnan(changes[game][number])
        ]
    values["plan/floored"] = [(game, turn.planned.floored) for game, _, turn in turns if turn.planned]
    values["talk/cut"] = [(game, turn.cut) for game, _, turn in turns if turn.kind == TurnKind.SPEAK and not turn.error]
    for name in sorted({name for _, _, turn in turns for name in turn.rewards}):
        values[f"reward/{name}"] = [(game, turn.rewards[name]) for game, _, turn in turns if name in turn.rewards]
    return mean_metrics(values, rng)


# --- The evaluation file ----------------------------------------------------------------------------------------------
def evaluation_to_json(
    conditions: Mapping[str, Metrics],
    by_message: Mapping[str, Sequence[Metrics]] | None = None,
    of_games: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
    **about: Any,
) -> dict[str, Any]:
    """The contents of `evaluation.json`: figures by condition (`base`, `trained`); `about` describes the games."""

    def plain(found: Metrics) -> dict[str, Any]:
        return {name: interval.to_json() for name, interval in found.items()}

    return {
        "about": about,
        "conditions": {name: plain(found) for name, found in conditions.items()},
        "belief_by_message": {name: [*map(plain, entries)] for name, entries in (by_message or {}).items()},
        "by_game": {name: {metric: [*of] for metric, of in found.items()} for name, found in (of_games or {}).items()},
    }


def conditions_from_json(evaluation: Mapping[str, Any]) -> dict[str, Metrics]:
    """The metrics of each condition of an `evaluation.json`."""
    return {
        name: {metric: Interval.from_json(value) for metric, value in found.items()}
        for name, found in evaluation["conditions"].items()
    }
