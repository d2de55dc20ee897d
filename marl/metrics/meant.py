"""Measures whom a witness's message means, by an exact listener in Among Us, in nats.

Who knows the killer K has read K's name. A copy of its stream in which K and another living player c have changed names
is the stream of a witness who knows that c did it. With the speaker's own model and a uniform prior over the n others,

    P(c | message) ~ P(message | stream with K and c exchanged),    said = log n + log P(K | message)

in means over messages: what a message gives away of whom its author knows to be the killer. What a listener hears of
that is the change of its log belief in K, in the mean over crewmates; it has evidence of its own as well. Left out:
what crewmates know together. Exchanged names may stand out of order in lists.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from envs.among_us.state import NAMES
from marl.agents.base import Agent
from marl.agents.model import ModelAgent
from marl.learning.renaming import renaming
from marl.metrics.among_us import Meeting, story_of
from marl.metrics.beliefs import belief_moves
from marl.metrics.listener import Floats, log_likelihoods
from marl.metrics.stats import Metrics, bootstrap_mean, bootstrap_ratio
from marl.types import Episode, Turn


def meant_metrics(
    episodes: Sequence[Episode],
    agents: Mapping[str, Agent],
    words: Sequence[str],
    rng: np.random.Generator,
    players: Collection[str],
) -> Metrics:
    """`talk/said`, `talk/heard` (nats), their ratio `talk/share_heard`, `talk/prior` (log n) and `talk/meant_right`.

    Of these players' messages. `agents`: who played, by the names in `Episode.players`. `words`: the game's names in
    its style. Empty if no witness spoke, or if a name is no single token of a speaker's model.
    """
    found: list[tuple[int, Floats, float]] = []  # game, P(c | message) with the killer first, and nats that were heard
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
        for game, episode, turn, killer, others in said:
            logs = np.array([float(next(scores)[0]) for _ in range(1 + len(others))])
            weights = np.exp(logs - logs.max())
            moves = [np.log(after / before) for before, after, _ in belief_moves(episode, turn, killer)]
            found.append((game, weights / weights.sum(), float(np.mean(moves)) if moves else np.nan))
    if not found:
        return {}
    games = np.array([game for game, _, _ in found])
    said_, heard = (np.array(each) for each in zip(*[(np.log(len(p) * p[0]), h) for _, p, h in found], strict=True))
    there = ~np.isnan(heard)  # somebody was asked before and after
    values = {
        "talk/said": said_,
        "talk/prior": np.array([np.log(len(p)) for _, p, _ in found]),
        "talk/meant_right": np.array([float(p[0] > p[1:].max()) for _, p, _ in found]),
    }
    metrics = {name: bootstrap_mean(each, games, rng=rng) for name, each in values.items()}
    if there.any():
        metrics["talk/heard"] = bootstrap_mean(heard[there], games[there], rng=rng)
        if said_[there].sum() > 0:
            metrics["talk/share_heard"] = bootstrap_ratio(heard[there], said_[there], games[there], rng=rng)
    return metrics


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
