"""The gradients of both baselines of the speaking reward: from a run's games, and as autograd gives them."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.studies import gradients
from experiments.studies.gradients import algo_of, gradient, rewards_of, subjects_of
from marl.agents.model import model_agent
from marl.common.errors import UserError
from marl.learning.advantages import standardise
from marl.learning.batch import collate, rows_of
from marl.learning.forward import forward
from marl.rewards import add_rewards
from marl.rollout.games import env_maker
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from tests.composing import composed_once

settings = composed_once("gradients")


def test_every_policy_has_each_ratio_with_its_interval(finished: Path, tmp_path: Path) -> None:
    cfg = settings(
        f"runs={finished.parent}", f"select={finished.name}", "batches=3", "games=4", "samples=2",
        f"cells={tmp_path}", "device=cpu", "progress=false",
    )  # fmt: skip
    gradients.main(cfg)
    first = (tmp_path / "gradients.csv").read_text()
    with (tmp_path / "gradients.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["policy"] for row in rows} == {"base", "trained"}
    assert {row["metric"] for row in rows} == {
        *(f"{part}/{kind}" for part in ("speaking", "all") for kind in ("before", "resampled", "gain")),
        "seconds/play", "seconds/resampling", "seconds/update",
    }  # fmt: skip
    for row in rows:
        if not row["metric"].startswith("seconds/"):
            assert float(row["low"]) <= float(row["mean"]) <= float(row["high"])
    gradients.main(cfg)  # measures nothing again
    assert (tmp_path / "gradients.csv").read_text() == first


def test_the_gradient_is_that_of_the_messages_advantages(finished: Path) -> None:
    """The speaking reward alone gives -sum of log-probabilities of heard messages' tokens times the standardised
    reward, over all tokens of replies."""
    subject = subjects_of(finished)[1]
    algo, rewards = algo_of(subject.settings), rewards_of(subject.settings, "before", 1)
    policy = subject.stage.load(torch.device("cpu"))
    agent = model_agent("learner", policy, replace(algo, games=6, concurrency=6), 2, 1.0)
    episodes = rollout(draw_games(0, 5, count=6), everyone(agent), env_maker(subject.settings["env"]), 6)
    rows = rows_of(add_rewards(episodes, rewards), {"learner"})
    before = [p.detach().clone() for p in policy.parameters()]
    found = gradient(policy, rows, rewards, algo, "speaking")
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))

    batch = collate(rows, {"speaking": rewards["speaking"]})
    earned = batch.message_rewards[..., 0]
    heard = batch.decision & (earned != 0)
    assert int(heard.sum()) > 3
    amount = abs(rewards["speaking"].weight) * standardise(earned, heard)
    turn = batch.decision.long().cumsum(1)
    per_turn = torch.zeros(batch.shape[0], int(turn.max()) + 1).scatter_add_(1, turn, torch.where(heard, amount, 0.0))
    advantages = torch.where(batch.message, per_turn.gather(1, turn), 0.0)
    policy.zero_grad()
    logprobs = forward(policy, batch, algo.temperature, {"reply": True}).logprobs
    (-(advantages * logprobs)[batch.reply].sum() / batch.reply.sum()).backward()
    expected = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in policy.parameters()])
    assert float(expected.norm()) > 0
    assert np.abs(found - expected.numpy()).max() < 1e-5 * float(expected.norm())


def test_few_batches_are_refused(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="batches=2: the jackknife leaves one out"):
        gradients.main(settings(f"runs={finished.parent}", "batches=2", f"cells={tmp_path}"))
