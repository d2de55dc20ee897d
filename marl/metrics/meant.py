"""Measures whom a witness's message means, by an exact listener in Among Us, in nats.

Who knows the killer K has read K's name. A copy of its stream in which K and another living player c have changed names
is the stream of a witness who knows that c did it. With the speaker's own model and a uniform prior over the n others,

    P(c | message) ~ P(message | stream with K and c exchanged),    meant = log n + log P(K | message)

in means over messages: what a message gives away of whom its author knows to be the killer. Left out: what crewmates
know together, and listeners' own evidence. Exchanged names may stand out of order in lists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from envs.among_us.state import NAMES
from marl.agents.base import Agent
from marl.agents.model import ModelAgent
from marl.learning.renaming import renaming
from marl.metrics.among_us import Meeting, story_of
from marl.metrics.listener import Floats, log_likelihoods
from marl.metrics.stats import Metrics, bootstrap_mean
from marl.types import Episode, Turn


def meant_metrics(
    episodes: Sequence[Episode],
    agents: Mapping[str, Agent],
    words: Sequence[str],
    rng: np.random.Generator,
    players: Collection[str],
) -> Metrics:
    """`talk/meant` (nats), `talk/meant_prior` (log n) and `talk/meant_right`, of these players' messages.

    `agents`: who played, by the names in `Episode.players`. `words`: the game's names in its style. Empty if no witness
    spoke, or if a name is no single token of a speaker's model.
    """
    found: list[tuple[int, Floats]] = []  # game, and P(c | message) with the killer first
    for name in players:
        agent = agents.get(name)
        if not isinstance(agent, ModelAgent) or (exchange := renaming(agent.tokens, words)) is None:
            continue
        said = [
            (game, episode, *known)
            for game, episode in enumerate(episodes)
            for known in _knowing(episode)
            if episode.players[known[0].agent] == name and known[0].reply_ids
        ]
        rows = []
        for _, episode, turn, killer, others in said:
            ids = np.array(episode.streams[turn.agent].tokens[: turn.start + len(turn.reply_ids)])
            for other in (killer, *others):
                table = np.arange(exchange.size)
                pair = exchange.families[:, [NAMES.index(killer), NAMES.index(other)]].numpy()
                table[pair] = pair[:, ::-1]
                row = [*table[ids[: turn.start]].tolist(), *turn.reply_ids]
                rows.append((row, [(turn.start, len(row))]))
        scores = iter(log_likelihoods(agent.policy, agent.temperature, rows))
        for game, _, _, _, others in said:
            logs = np.array([float(next(scores)[0]) for _ in range(1 + len(others))])
            weights = np.exp(logs - logs.max())
            found.append((game, weights / weights.sum()))
    if not found:
        return {}
    games = [game for game, _ in found]
    values = {
        "talk/meant": [np.log(len(p)) + np.log(p[0]) for _, p in found],
        "talk/meant_prior": [np.log(len(p)) for _, p in found],
        "talk/meant_right": [float(p[0] > p[1:].max()) for _, p in found],
    }
    return {name: bootstrap_mean(each, games, rng=rng) for name, each in values.items()}


def _knowing(episode: Episode) -> Iterator[tuple[Turn, str, tuple[str, ...]]]:
    """The messages of witnesses, the one killer whom each has seen, and the other living players."""
    names: dict[str, str] = episode.facts["names"]
    for chapter in story_of(episode):
        if not isinstance(chapter, Meeting):
            continue
        for turn in chapter.messages:
            speaker = names[turn.agent]
            killers = chapter.seen.get(speaker, set()) & set(chapter.living)
            if turn.message and len(killers) == 1:
                (killer,) = killers
                yield turn, killer, tuple(name for name in chapter.living if name not in (speaker, killer))
