"""Influence of a message: against listeners read by hand, who ignore it, or who hear it again."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from marl.agents.model import ModelAgent
from marl.common.errors import UserError
from marl.metrics.influence import Effect, compared, influence_metrics
from marl.model.policy import Policy
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from marl.types import Episode
from tests.marl.hint import ASK, FACTS, Hint, hint_policy
from tests.marl.updates import noisy

GAMES = 10


def measured(policy: Policy, temperature: float = 1.0, role: str = "") -> tuple[list[Episode], list[Effect]]:
    """Plays games and compares each message with others. `role` replaces the listeners' roles."""
    agent = ModelAgent("learner", policy, slots=2 * GAMES, context=32, max_new_tokens=1, temperature=temperature)
    episodes = rollout(draw_games(0, 1, count=GAMES), everyone(agent), Hint, GAMES)
    if role:
        episodes = [replace(e, beliefs=tuple(replace(b, role=role) for b in e.beliefs)) for e in episodes]
    return episodes, compared(episodes, Hint, {"learner": agent}, {"learner"}, draws=3)[1]


def test_each_effect_is_what_the_listener_believes_of_the_other_words() -> None:
    policy = noisy(hint_policy(0), 1)
    episodes, found = measured(policy)
    said = [(game, e.turns[0].message) for game, e in enumerate(episodes) if e.turns[0].message]
    assert len(said) > 5
    for i, (game, message) in enumerate(said):
        episode = episodes[game]
        listener = next(a for a in episode.players if a != episode.turns[0].agent)
        begun = next(b.position for b in episode.beliefs if b.step == 0) + 1
        after = next(b for b in episode.beliefs if b.step == 1)

        def believed(words: str, agent: str = listener, e: Episode = episode, start: int = begun) -> np.ndarray:
            ids = [*e.streams[agent].tokens[:start], *policy.tokens.encode(f"heard {words}".strip())]
            with torch.no_grad():
                state = policy.hidden(torch.tensor([[*ids, *policy.tokens.encode(ASK)]]))[:, -1]
                return policy.logits(state)[0, list(after.candidate_ids)].double().softmax(-1).numpy()  # noqa: B023

        np.testing.assert_allclose(believed(message), after.probs, atol=1e-5)
        elsewhere = [*said[i + 1 :], *said[:i]][0][1]
        truth = FACTS.index(episode.facts["fact"])
        for kind, words in (("silence", ""), ("other_game", elsewhere)):
            (effect,) = [e for e in found if (e.game, e.kind) == (game, kind)]
            other = believed(words)
            assert effect.influence == pytest.approx(np.abs(after.probs - other).sum() / 2, abs=1e-5)
            assert effect.credit == pytest.approx(after.probs[truth] - other[truth], abs=1e-5)
    assert not any(effect.kind == "other_name" for effect in found)  # the game has no names


def test_a_listener_who_ignores_words_is_not_influenced() -> None:
    _, found = measured(hint_policy(0))  # its attention is zero
    assert {effect.kind for effect in found} == {"silence", "other_game", "resampled"}
    assert max(abs(effect.influence) + abs(effect.credit) for effect in found) < 1e-6


def test_imposters_who_know_are_no_listeners() -> None:
    policy = noisy(hint_policy(0), 1)
    assert measured(policy, role="crewmate")[1] and not measured(policy, role="imposter")[1]


def test_an_author_who_would_say_the_same_again_has_no_influence_beside_itself() -> None:
    _, found = measured(noisy(hint_policy(0), 1), temperature=0.0)
    same = [effect for effect in found if effect.kind == "resampled"]
    assert same and max(effect.influence for effect in same) < 1e-5


def test_games_without_streams_are_refused() -> None:
    episodes, _ = measured(hint_policy(0))
    with pytest.raises(UserError, match="recorded without their streams"):
        compared([replace(e, streams={}) for e in episodes], Hint, {}, {"learner"})


def test_means_are_over_games() -> None:
    found = [Effect(game, 0, "b", "silence", value, -value) for game, value in ((0, 0.2), (0, 0.4), (1, 0.9))]
    metrics = influence_metrics(found, np.random.default_rng(0))
    assert metrics["talk/influence/silence"].mean == pytest.approx(0.5)
    assert metrics["talk/credit/silence"].mean == pytest.approx(-0.5)
    assert metrics["talk/influence"] == metrics["talk/influence/silence"] and "talk/vote/silence" not in metrics
    votes = influence_metrics([replace(each, vote=True) for each in found], np.random.default_rng(0))
    assert votes["talk/vote_credit/silence"].mean == pytest.approx(-0.5) and "talk/influence" not in votes
    assert metrics["talk/influence/silence"].n == 2 and "talk/influence/resampled" not in metrics
