"""Metrics of Diplomacy: scores, centres and solos, by player where several met."""

from collections.abc import Collection, Sequence

import numpy as np

from marl.metrics.stats import Metrics, bootstrap_mean, rate
from marl.types import Episode


def diplomacy_metrics(
    episodes: Sequence[Episode], rng: np.random.Generator, players: Collection[str] | None = None
) -> Metrics:
    """`game/score` and `game/centres` of a seat of `players` (None: anybody's), `game/solo` and `game/years` of a game;
    and, where several players met, `game/score/NAME`, `game/centres/NAME` and `game/solo/NAME` (how often one of their
    seats won alone), of a seat.

    Intervals are over games. If all seats are one player's its score is 1 over their number, whatever happens.
    """
    every = [(game, agent) for game, episode in enumerate(episodes) for agent in episode.players]
    names = sorted({name for episode in episodes for name in episode.players.values()})
    found: Metrics = {
        "game/solo": rate([e.outcome["how"] == "solo" for e in episodes]),
        "game/years": bootstrap_mean([e.outcome["year"] for e in episodes], rng=rng),
        "game/messages": bootstrap_mean([e.outcome["messages"] for e in episodes], rng=rng),
    }
    for name in [None, *(names if len(names) > 1 else [])]:
        counted = players if name is None else {name}
        own = [(g, agent) for g, agent in every if counted is None or episodes[g].players[agent] in counted]
        if not own:
            continue
        games, end = [game for game, _ in own], "" if name is None else f"/{name}"
        for metric, key in (("score", "points"), ("centres", "centres")):
            values = [float(episodes[game].outcome[key][agent]) for game, agent in own]
            found[f"game/{metric}{end}"] = bootstrap_mean(values, games, rng=rng)
        if name is not None:
            won = [episodes[g].outcome["winner"] == episodes[g].outcome["powers"][agent] for g, agent in own]
            found[f"game/solo{end}"] = bootstrap_mean(won, games, rng=rng)
    return found
