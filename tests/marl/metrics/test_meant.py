"""Whom witnesses mean, by a speaker whose words are planted."""

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from envs.among_us.state import NAMES
from marl.agents.model import ModelAgent
from marl.metrics.among_us import Meeting, story_of
from marl.metrics.meant import meant_metrics
from marl.model.tokens import Tokens, train_tokenizer
from marl.pretraining.corpus import scripted_texts
from marl.rollout.games import env_maker, exchangeable, game_module, scripted
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from marl.types import Episode
from tests.marl.models import tiny_policy

ENV = {"game": "among_us", "style": "compact", "height": 1, "cooldown": 1, "max_steps": 80}
WORDS = exchangeable(ENV)


@cache
def tokens() -> Tokens:
    texts = scripted_texts("among_us", [env_maker(ENV)], 0, games=20)
    return Tokens(train_tokenizer(texts, game_module("among_us").COMPACT_TOKENS, 1024))


class Planted:
    """A speaker that says each name with log-odds `pull` for each time that it has read it. No attention needed."""

    def __init__(self, pull: float) -> None:
        self.tokens, self.device, self.pull = tokens(), torch.device("cpu"), pull
        self.names = torch.tensor([self.tokens.encode(f" {word}")[0] for word in WORDS])

    def hidden(self, tokens: Tensor) -> Tensor:
        return (tokens[..., None] == self.names).cumsum(1).double()  # (B, T, names)

    def logits(self, states: Tensor) -> Tensor:
        logits = torch.zeros(len(states), self.tokens.size, dtype=torch.float64)
        logits[:, self.names] = self.pull * states
        return logits

    def speech_logits(self, logits: Tensor, temperature: float) -> Tensor:
        return logits / temperature


def growing(episode: Episode) -> Episode:
    """Returns the game with one answer for each listener and step. The belief in the killer starts at 1e-6 and grows by
    a fifth from answer to answer."""
    (killer,) = (episode.facts["names"][agent].lower() for agent in episode.facts["imposters"])
    asked: Counter[str] = Counter()
    beliefs = {(belief.listener, belief.step): belief for belief in episode.beliefs}  # a script's may be many samples
    for key, belief in beliefs.items():
        truth = 1e-6 * 1.2 ** asked[belief.listener]
        asked[belief.listener] += 1
        probs = np.full(len(belief.probs), (1 - truth) / (len(belief.probs) - 1))
        probs[belief.question.candidates.index(killer)] = truth
        beliefs[key] = replace(belief, probs=probs)
    return replace(episode, beliefs=tuple(beliefs.values()))


def measured(pull: float) -> tuple[dict[str, Any], list[tuple[int, list[float]]]]:
    """The figures of scripted crews' words in the mouth of the planted speaker, and the posteriors by hand."""
    policy = Planted(pull)
    games = rollout(
        draw_games(5, 1, count=16), everyone(scripted("among_us", tokens=policy.tokens)), env_maker(ENV), 16
    )
    games = [growing(episode) for episode in games]
    agent = ModelAgent("scripted", tiny_policy(), slots=1, context=512)
    agent.policy, agent.tokens = policy, policy.tokens  # type: ignore[assignment]
    found = meant_metrics(games, {"scripted": agent}, WORDS, np.random.default_rng(0), {"scripted"})
    by_hand = []
    for episode in games:
        names = episode.facts["names"]
        for chapter in story_of(episode):
            for turn in chapter.messages if isinstance(chapter, Meeting) else ():
                killers = chapter.seen[names[turn.agent]] & set(chapter.living)  # type: ignore[union-attr]
                if not turn.message or len(killers) != 1:
                    continue
                (killer,) = killers
                others = [name for name in chapter.living if name not in (killer, names[turn.agent])]  # type: ignore[union-attr]
                logs = []
                for other in (killer, *others):
                    a, b = (int(policy.names[NAMES.index(name)]) for name in (killer, other))
                    trade = {a: b, b: a}
                    row = [trade.get(i, i) for i in episode.streams[turn.agent].tokens[: turn.start]]
                    total = 0.0
                    for token in turn.reply_ids:
                        weights = np.zeros(policy.tokens.size)
                        for name in policy.names.tolist():
                            weights[name] = pull * row.count(name)
                        total += weights[token] - np.log(np.exp(weights).sum())
                        row.append(token)
                    logs.append(total)
                by_hand.append((len(logs), [logs[0] - np.log(np.exp(np.array(logs) - max(logs)).sum()) - max(logs)]))
    return found, by_hand


def test_the_posterior_is_the_one_by_hand() -> None:
    found, by_hand = measured(-0.3)  # with this sign these messages tell more than nothing: there is a share
    assert len(by_hand) > 5
    np.testing.assert_allclose(found["talk/said"].mean, np.mean([np.log(n) + log[0] for n, log in by_hand]), atol=1e-6)
    np.testing.assert_allclose(found["talk/heard"].mean, np.log(1.2))
    np.testing.assert_allclose(found["talk/share_heard"].mean, np.log(1.2) / found["talk/said"].mean)
    np.testing.assert_allclose(found["talk/prior"].mean, np.mean([np.log(n) for n, _ in by_hand]))


def test_words_that_do_not_depend_on_names_mean_nobody() -> None:
    found, _ = measured(0.0)
    np.testing.assert_allclose(found["talk/said"].mean, 0.0, atol=1e-6)
    assert found["talk/meant_right"].mean == 0


def test_without_the_games_names_nobody_is_meant() -> None:
    agent = ModelAgent("scripted", tiny_policy(), slots=1, context=512)
    assert meant_metrics([], {"scripted": agent}, (), np.random.default_rng(0), {"scripted"}) == {}
