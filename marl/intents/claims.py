"""A language model's probabilities of claims, read as it would write them if it could write nothing else.

Claims of one pool branch where their tokens differ. Each token's probability is taken among those that some claim has
there, so a claim's is the product of its choices: that of decoding held to legal claims. Only places where claims
branch are read, a tenth of what scoring each claim whole takes (`planner.Reader`), which normalises at the end instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from envs.core import END
from envs.dond.replies import proposal_text
from envs.dond.rules import Triple, allocations
from marl.decoding.engine import Engine
from marl.model.policy import Policy

Floats = NDArray[np.float64]
MOST = 20  # slots of one stream: claims of the largest pool branch into 16 before the last item, and some to spare
AT_ONCE = 8  # streams


class ClaimReader:
    """Reads claims in many streams at once."""

    def __init__(self, policy: Policy, context: int, temperature: float = 1.0, at_once: int = AT_ONCE) -> None:
        self.tokens, self.temperature, self.at_once = policy.tokens, temperature or 1.0, at_once
        self.engine = Engine(policy, at_once * MOST, context)
        self._texts: dict[Triple, list[list[int]]] = {}

    def texts(self, counts: Triple) -> list[list[int]]:
        """The claims of `allocations(counts)` as whole replies."""
        if counts not in self._texts:
            replies = [f"{proposal_text(claim)} {END}" for claim in allocations(counts)]
            self._texts[counts] = [self.tokens.encode(reply) for reply in replies]
        return self._texts[counts]

    def probabilities(self, streams: Sequence[Sequence[int]], counts: Sequence[Triple]) -> list[Floats]:
        """Returns (A,), of sum 1, for each stream and its pool. A stream ends with the cue of a proposal."""
        order = sorted(range(len(streams)), key=lambda i: len(streams[i]))
        found: list[Floats] = [np.zeros(0)] * len(streams)
        for start in range(0, len(order), self.at_once):
            group = order[start : start + self.at_once]
            read = self._read([streams[i] for i in group], [counts[i] for i in group])
            for i, each in zip(group, read, strict=True):
                found[i] = each
        return found

    @torch.no_grad()
    def _read(self, streams: Sequence[Sequence[int]], counts: Sequence[Triple]) -> list[Floats]:
        texts = [self.texts(each) for each in counts]
        logs = [np.zeros(len(each)) for each in texts]
        taken = []
        # A branch: which stream, a slot, the claims that are left in it, and how many of their tokens are read.
        fresh: list[tuple[int, int, list[int], list[int], int]] = []
        for i, (stream, own) in enumerate(zip(streams, texts, strict=True)):
            slot = self.engine.allocate()
            taken.append(slot)
            size = _common(own)
            fresh.append((i, slot, list(range(len(own))), [*stream, *own[0][:size]], size))
        while fresh:
            hidden = self.engine.read([slot for _, slot, *_ in fresh], [chunk for *_, chunk, _ in fresh])
            ends = np.cumsum([len(chunk) for *_, chunk, _ in fresh]) - 1
            logits = self.engine.policy.logits(hidden[torch.from_numpy(ends).to(hidden.device)]) / self.temperature
            following: list[tuple[int, int, list[int], list[int], int]] = []
            for (i, slot, left, _, size), row in zip(fresh, logits.double().cpu().numpy(), strict=True):
                choices: dict[int, list[int]] = {}
                for claim in left:
                    choices.setdefault(texts[i][claim][size], []).append(claim)
                scores = row[list(choices)]
                scores = scores - scores.max()
                scores = scores - np.log(np.exp(scores).sum())
                branches = []
                for score, group in zip(scores, choices.values(), strict=True):
                    logs[i][group] += score
                    if len(group) > 1:
                        branches.append(group)
                forks = [slot, *self.engine.fork(slot, len(branches) - 1)] if branches else []
                taken += forks[1:]
                for fork, group in zip(forks, branches, strict=True):
                    upto = size + _common([texts[i][claim][size:] for claim in group])
                    following.append((i, fork, group, texts[i][group[0]][size:upto], upto))
            fresh = following
        for slot in taken:
            self.engine.free(slot)
        return [np.exp(each) for each in logs]


def _common(texts: Sequence[Sequence[int]]) -> int:
    """Counts the tokens that all of these begin with."""
    size = 0
    while len({text[size] for text in texts}) == 1:
        size += 1
    return size
