"""Decode steps captured as a CUDA graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from marl.common.errors import UserError
from marl.decoding.cache import SlotCache
from marl.decoding.passes import at_device
from marl.decoding.sampling import draw
from marl.model.policy import Policy


class Writer:
    """Speech at fixed shapes: steps that sample a token for each of R rows without asking the host in between.

    What a step reads and changes stands in tensors of its own that stay where they are, so that on a GPU it is captured
    once, as a CUDA graph, and replayed for as long as the parameters stay where they are, too. A row without tokens
    left writes where nobody reads.
    """

    def __init__(
        self,
        policy: Policy,
        cache: SlotCache,
        rows: int,
        end: int,
        temperature: float,
        pauses: Tensor,
        span: slice | None = None,
    ) -> None:
        """`end`: how far into their slots rows may get. `temperature`: 0 takes the likeliest token. `pauses` (V,):
        the tokens after which a row has none left. `span`: the slots, where they stand side by side."""
        self.policy, self.cache, self.end, self.temperature = policy, cache, end, temperature
        self.pauses, self.span = pauses, span
        device = policy.device
        self.slots, self.ids, self.places, self.left = torch.zeros(4, rows, dtype=torch.int64, device=device)  # (R,)
        self.uniform = torch.zeros(rows, dtype=torch.float64, device=device)
        self.logprobs = torch.zeros(rows, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def step(self) -> None:
        """Reads `ids` at `places` of `slots`, samples those that follow; `left` is 0 after what may be an end."""
        alive = self.left > 0
        nowhere = torch.full_like(self.places, self.cache.context)
        missing: list[tuple[int, int, int, int]] | None = [] if self.span is None else None
        self.cache.at(self.slots, torch.where(alive, self.places, nowhere)[:, None], self.end, self.span, missing)
        query = torch.where(alive, self.places, 0)[:, None]
        hidden = at_device(self.policy.lm, self.cache, self.ids[:, None], query)[:, 0]  # (R, D)
        shaped = self.policy.speech_logits(self.policy.logits(hidden), self.temperature or 1.0)
        ids, logprobs = draw(shaped.log_softmax(-1), None if self.temperature == 0 else self.uniform)
        self.ids.copy_(ids)
        self.logprobs.copy_(logprobs)
        self.places += alive
        self.left.sub_(alive.long()).masked_fill_(self.pauses[ids], 0)

    def capture(self, pool: Any, stream: torch.cuda.Stream) -> None:
        """Makes a CUDA graph of a step. No row has tokens left meanwhile, so that no slot changes."""
        self.left.zero_()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                for _ in range(3):  # as the manual of CUDA graphs asks for
                    self.step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self.step()
        except RuntimeError as error:
            name, reason = type(self.policy.lm).__name__, str(error).strip().splitlines()[0]
            raise UserError(
                f"algo.decode_steps: {name} cannot be captured as a CUDA graph ({reason}); set it to 1"
            ) from error
        self.graph = graph

    @torch.no_grad()
    def write(
        self, slots: np.ndarray, ids: np.ndarray, places: np.ndarray, left: np.ndarray, uniform: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Goes on with r <= R rows, (r,) each, `uniform` (r, K): K steps. Returns what was sampled, (r, K), its
        log-probabilities, (r, K), and how many of these count, (r,)."""
        rows, steps = uniform.shape
        self.left.zero_()
        given = ((self.slots, slots), (self.ids, ids), (self.places, places), (self.left, left))
        for buffer, values in given:
            buffer[:rows] = torch.from_numpy(np.asarray(values, dtype=np.int64)).to(buffer.device)
        chances = torch.zeros(steps, len(self.uniform), dtype=torch.float64)
        chances[:, :rows] = torch.from_numpy(uniform.T)
        chances = chances.to(self.uniform.device)
        if self.span is None:
            self.cache.fill(self.slots, self.end)
        told: list[Tensor] = []
        for step in range(steps):
            self.uniform.copy_(chances[step])
            counts = (self.left > 0).double()
            if self.graph is None:
                self.step()
            else:
                self.graph.replay()
            told.append(torch.stack([self.ids.double(), self.logprobs.double(), counts]))
        sampled, logprobs, counts = torch.stack(told, -1)[:, :rows].cpu().numpy()  # the one word to the host
        return sampled.astype(np.int64), logprobs.astype(np.float32), counts.sum(1).astype(np.int64)
