"""The base of scripted games: what it is cached by, its second stage, and the pace of its learning."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from marl import pretrain
from marl.batch import Seat, collate
from marl.errors import UserError
from marl.pretrain import BaseConfig, ModelConfig, base_policy, fit
from marl.rollout import draw_games
from marl.types import TokenBatch

ENV = {"game": "among_us", "style": "compact", "tasks": 6, "max_steps": 60}
MODEL = ModelConfig(vocab_size=700, hidden_size=16, layers=1, heads=2, intermediate_size=16, context=1024)


def small(**changes: Any) -> BaseConfig:
    return BaseConfig(**{"games": 4, "rows": 4, "world_model": 1.0, "listening": 2.0, **changes})


def truthful(seats: list[Seat]) -> bool:
    """Whether all of crewmates' recorded answers are true."""
    return all(
        belief.question.answer in {episode.facts["names"][agent].lower() for agent in episode.facts["imposters"]}
        for episode, _ in seats
        for belief in episode.beliefs
        if belief.role == "crewmate"
    )


def test_a_second_stage_trains_listening_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees games in which somebody was asked, learns no reply, and holds to the first stage's model."""
    steps: list[tuple[dict[str, float], list[Seat]]] = []
    real = pretrain.update

    def spy(policy: Any, reference: Any, batch: TokenBatch, losses: Any, *rest: Any) -> dict[str, float]:
        steps.append(({name: loss.weight for name, loss in losses.items()}, seats[-1]))
        return real(policy, reference, batch, losses, *rest)

    seats: list[list[Seat]] = []

    def note(batch: list[Seat], rewards: dict[str, float]) -> TokenBatch:
        seats.append(batch)
        return collate(batch, rewards)

    monkeypatch.setattr(pretrain, "collate", note)
    monkeypatch.setattr(pretrain, "update", spy)
    monkeypatch.setattr(pretrain, "CHUNK", 20)
    monkeypatch.setattr(pretrain, "draw_games", lambda *path, count: draw_games(*path, count=min(count, 20)))
    said: list[str] = []
    plain, first = base_policy(MODEL, small(), ENV, cache=tmp_path, report=said.append)
    count = len(steps)
    both, second = base_policy(
        MODEL, small(lessons=[["informed", 1], ["random", 2]], anchor=0.1), ENV, cache=tmp_path, report=said.append
    )
    assert count == 5 and first != second and sum(text.startswith("training the base") for text in said) == 2
    assert [weights for weights, _ in steps[count:]] == [
        *[{"imitation": 1.0, "world_model": 1.0, "listening": 2.0}] * count,
        *[{"listening": 1.0, "kl": 0.1}] * 3,
    ]
    assert [weights for weights, _ in steps[:count]] == [weights for weights, _ in steps[count : 2 * count]]
    assert all(episode.beliefs for _, batch in steps[2 * count :] for episode, _ in batch), "without a question"
    assert not all(episode.beliefs for _, batch in steps[:count] for episode, _ in batch)
    roles = {episode.roles[agent] for _, batch in steps[2 * count :] for episode, agent in batch}
    truths = [truthful(batch) for _, batch in steps[2 * count :]]
    assert truths[0] and not all(truths), "first the truth, then credulous answers too"
    assert roles == {"crewmate", "imposter"}, "what imposters do would drift"
    assert any(not torch.equal(a, b) for a, b in zip(plain.parameters(), both.parameters(), strict=True))
    count = len(steps)
    paid = {**ENV, "shaping": 0.2, "loser_reward": -1.0}  # nobody reads of it
    again, folder = base_policy(
        MODEL, small(lessons=[["informed", 1], ["random", 2]], anchor=0.1), paid, cache=tmp_path, report=said.append
    )
    assert len(steps) == count and folder == second
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), both.parameters(), strict=True))


def test_settings_that_are_not_used_do_not_rename_a_base() -> None:
    assert small().made_of() == small(anchor=0.5, listening_rate=1.0, claim=3.0, permute_items=True).made_of()
    assert small(lessons=[["random", 1]]).made_of() != small(lessons=[["random", 1]], anchor=0.5).made_of()
    assert small(data="human").made_of() != small(data="human", claim=3.0).made_of()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lessons": [["random", -1]]}, "base.lessons: .* must be players and steps"),
        ({"lessons": ["random"]}, "base.lessons: random must be players and steps"),
        ({"lessons": [["random", 0.5]]}, "base.lessons: .* must be players and steps"),
        ({"anchor": -0.1}, "base.anchor=-0.1: must be at least 0"),
    ],
)
def test_bad_stages_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        small(**changes)


def test_the_pace_warms_up_and_falls_to_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[tuple[float, ...]] = []

    def note(policy: Any, reference: Any, batch: Any, losses: Any, optimizer: Any, *rest: Any) -> dict[str, float]:
        rates.append(tuple(group["lr"] for group in optimizer.param_groups))
        return {}

    monkeypatch.setattr(pretrain, "update", note)
    monkeypatch.setattr(pretrain, "collate", lambda seats, weights: None)

    def nothing() -> Iterator[list[Seat]]:
        while True:
            yield []

    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": weights[:1], "lr": 1.0}, {"params": weights[1:], "lr": 0.5}])
    done: list[int] = []
    fit(None, nothing(), 100, BaseConfig(warmup=0.1), {}, optimizer, done.append)  # type: ignore[arg-type]
    first, second = ([pair[i] for pair in rates] for i in (0, 1))
    assert first[0] == pytest.approx(0.1) and max(first) == max(first[9:12]) and done == [*range(1, 101)]
    assert all(a > b for a, b in pairwise(first[10:])) and first[-1] == pytest.approx(0.1, abs=1e-3)
    assert second == pytest.approx([rate / 2 for rate in first])
