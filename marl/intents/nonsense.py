"""An ensemble that tells human messages from nonsense: one small head for each kind of corruption, on a frozen model.

A head reads what the language model makes of a message in its dialogue: the mean and the last of its hidden states,
and how likely its words are. A message is nonsense if any head is surer of it than its own threshold. Thresholds are
chosen on human messages that no head has seen, so that a wanted share of them is rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from marl.common.errors import UserError
from marl.common.files import read_json, reading, write_json
from marl.intents.corruptions import KINDS
from marl.metrics.listener import passes, speech_scores
from marl.model.loading import read_tensors
from marl.model.policy import Policy

Floats = NDArray[np.float64]
WIDTH, STEPS, RATE, DECAY = 32, 300, 3e-3, 0.1  # of a head and of its training
PASS_TOKENS = 8192  # of one pass, padding included

Said = tuple[list[int], int]  # a stream that ends with a message, and how many of its tokens are the message's


@torch.no_grad()
def features(policy: Policy, rows: Sequence[Said]) -> Tensor:
    """Returns what the heads read of each message, (N, 2 D + 3) on the CPU."""
    found: list[Tensor] = [torch.zeros(0)] * len(rows)
    for group, tokens in passes([stream for stream, _ in rows], PASS_TOKENS, policy.device):
        hidden = policy.hidden(tokens)
        for b, i in enumerate(group):
            stream, size = rows[i]
            end = len(stream)
            own = hidden[b, end - size : end].float()
            ids = torch.tensor(stream[end - size :], device=policy.device)
            scores = speech_scores(policy, hidden[b, end - size - 1 : end - 1], ids, 1.0)
            likely = torch.stack([scores.mean(), scores.min(), torch.tensor(float(np.log(size)))]).float()
            found[i] = torch.cat([own.mean(0).cpu(), own[-1].cpu(), likely.cpu()])
    return torch.stack(found)


def head(size: int) -> nn.Module:
    """A head that reads so many features."""
    return nn.Sequential(nn.Linear(size, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))


@dataclass
class Ensemble:
    """Heads by the kind of nonsense that each knows, the scale of what they read, and their scores (N, K) of human
    messages that none has seen, on which thresholds are chosen."""

    kinds: tuple[str, ...]
    heads: nn.ModuleList
    mean: Tensor
    scale: Tensor
    unseen: Floats

    @torch.no_grad()
    def scores(self, found: Tensor) -> Floats:
        """Returns how sure each head is that each message is nonsense, (N, K), from `features` (N, F)."""
        scaled = (found - self.mean) / self.scale
        return np.stack([each(scaled)[:, 0].double().numpy() for each in self.heads], axis=1)

    def thresholds(self, rate: float) -> Floats:
        """Thresholds (K,) by which all heads together reject the share `rate` of human messages, at most.

        Each head rejects as large a share as the others. UserError for a rate that is no share.
        """
        if not 0 < rate < 1:
            raise UserError(f"cicero.nonsense={rate}: must be a share between 0 and 1, such as 0.05")
        low, high = 0.0, rate
        best = np.full(len(self.kinds), np.inf)
        for _ in range(30):
            each = (low + high) / 2
            found = np.quantile(self.unseen, 1 - each, axis=0, method="higher")
            if (self.unseen > found).any(1).mean() <= rate:
                low, best = each, found
            else:
                high = each
        return best

    def rejected(self, found: Tensor, thresholds: Floats) -> NDArray[np.bool_]:
        """Tells of each message whether it is nonsense, (N,)."""
        return np.asarray((self.scores(found) > thresholds).any(1))

    def without(self, kind: str) -> Ensemble:
        """The ensemble without the head of one kind, to measure what it catches of a kind that it never saw."""
        kept = [i for i, own in enumerate(self.kinds) if own != kind]
        heads = nn.ModuleList([self.heads[i] for i in kept])
        return Ensemble(tuple(self.kinds[i] for i in kept), heads, self.mean, self.scale, self.unseen[:, kept])

    def save(self, folder: Path) -> None:
        """Writes the ensemble into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {"mean": self.mean, "scale": self.scale, "unseen": torch.from_numpy(self.unseen)}
        tensors |= {f"heads.{name}": tensor for name, tensor in self.heads.state_dict().items()}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "nonsense.safetensors")
        write_json(folder / "nonsense.json", {"kinds": list(self.kinds)})

    @classmethod
    def load(cls, folder: Path) -> Ensemble:
        """Reads what `save` wrote. UserError where it is damaged."""
        tensors = read_tensors(folder / "nonsense.safetensors")
        own = {name.removeprefix("heads."): tensor for name, tensor in tensors.items() if name.startswith("heads.")}
        with reading(folder):
            kinds = tuple(read_json(folder / "nonsense.json")["kinds"])
            mean, scale, unseen = (tensors[name] for name in ("mean", "scale", "unseen"))
            assert mean.shape == scale.shape and unseen.shape == (len(unseen), len(kinds)), kinds
            heads = nn.ModuleList([head(len(mean)) for _ in kinds])
            shapes = {name: tensor.shape for name, tensor in heads.state_dict().items()}
            assert shapes == {name: tensor.shape for name, tensor in own.items()}, kinds
        heads.load_state_dict(own)
        return cls(kinds, heads, mean, scale, unseen.double().numpy())


def train(human: Tensor, spoiled: dict[str, Tensor], unseen: Tensor, seed: int = 0) -> Ensemble:
    """Trains a head for each kind: human messages (N, F) against spoiled ones (M, F), both sides weighing the same.

    `unseen`: features of other human messages. Raises UserError for a kind that spoiled nothing.
    """
    if empty := [kind for kind, found in spoiled.items() if not len(found)]:
        raise UserError(f"{', '.join(empty)}: no message could be spoiled in this way. Leave the kind out")
    assert set(spoiled) <= set(KINDS), (set(spoiled), set(KINDS))
    mean, scale = human.mean(0), human.std(0) + 1e-6
    heads = nn.ModuleList()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for found in spoiled.values():
            own = head(human.shape[1])
            optimizer = torch.optim.AdamW(own.parameters(), RATE, weight_decay=DECAY)
            rows = torch.cat([(human - mean) / scale, (found - mean) / scale])
            labels = torch.cat([torch.zeros(len(human)), torch.ones(len(found))])
            weights = torch.cat([torch.full((len(each),), 0.5 / len(each)) for each in (human, found)]) * len(rows)
            for _ in range(STEPS):
                loss = nn.functional.binary_cross_entropy_with_logits(own(rows)[:, 0], labels, weights)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            heads.append(own)
    ensemble = Ensemble(tuple(spoiled), heads, mean, scale, np.zeros((0, len(heads))))
    ensemble.unseen = ensemble.scores(unseen)
    return ensemble
