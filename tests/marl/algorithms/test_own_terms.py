"""A term is one file: a reward for messages and a loss of a package elsewhere on the path, by `_target_` alone."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import train
from marl.algorithms import training
from marl.learning.advantages import Credit, add_advantages, standardise
from marl.storage.tracking import METRICS_FILE, read_metrics
from marl.types import TokenBatch
from tests.composing import DOND, configure, run_folder

TERMS = '''
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Long:
    """Pays a message for its length."""

    weight: float = 0.5
    credits: ClassVar[str] = "message"

    def __call__(self, episode):
        return [float(len(turn.message)) for turn in episode.turns]


@dataclass(frozen=True)
class Choosy:
    """-log p of every token of a message."""

    weight: float = 1.0
    reads: str = "reply"

    def __call__(self, batch, outputs):
        return -outputs.logprobs, batch.message
'''


def test_terms_of_another_package_are_trained_with(
    bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The package's loss is the only loss with a weight, so whatever the policy learns comes from it."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "terms_of_mine.py").write_text(TERMS)
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    seen: list[tuple[TokenBatch, float]] = []
    real = training.update

    def spy(policy: Any, reference: Any, batch: TokenBatch, *rest: Any) -> dict[str, float]:
        before = copy.deepcopy(policy.lm.state_dict())
        found = real(policy, reference, batch, *rest)
        moved = sum(float((value - before[name]).abs().sum()) for name, value in policy.lm.state_dict().items())
        seen.append((batch, moved))
        return found

    monkeypatch.setattr(training, "update", spy)
    shipped = ("policy", "value", "entropy", "kl", "listening", "world_model", "imitation")
    cfg = configure(
        "train", *DOND, "algo.iterations=1", "algo.games=6", "algo.concurrency=6", "algo.max_new_tokens=12",
        "eval.games=0", "eval.final_games=2", f"runs={tmp_path}", f"cache={bases}",
        "reward.speaking.weight=0", *(f"loss.{name}.weight=0" for name in shipped),
        "+reward.long={_target_: terms_of_mine.Long}", "+loss.choosy={_target_: terms_of_mine.Choosy}",
    )  # fmt: skip
    train.main(cfg)

    ((batch, moved),) = seen
    assert moved > 0, "the loss's gradient arrives"
    game = add_advantages(batch, {}, Credit(**cfg.algo.credit)).advantages
    paid = batch.message_rewards[..., 0]
    first = batch.decision & (paid != 0)  # of each message
    assert batch.message_rewards.shape[2] == 1 and int(first.sum()) > 1
    extra = batch.advantages - game
    assert not extra[~batch.message].any(), "tags, proposals and refused replies keep the game's advantage"
    amounts = 0.5 * standardise(paid, first)
    for row, start in first.nonzero().tolist():
        tokens = [t for t in range(start, batch.shape[1]) if batch.message[row, t]]
        tokens = tokens[: next((i for i, t in enumerate(tokens) if t != tokens[0] + i), len(tokens))]  # this message's
        torch.testing.assert_close(extra[row, tokens], amounts[row, start].expand(len(tokens)))
    (line,) = read_metrics(run_folder(cfg) / METRICS_FILE)[:1]
    assert line["loss/choosy"] > 0 and line["reward/long"] > 0
    assert "long" in capsys.readouterr().out, "the progress line names the term"
