"""Several decode steps without waiting for the host; on a GPU each step is a CUDA graph."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from marl.common.errors import UserError
from marl.decoding.cache import SlotCache
from marl.decoding.passes import run_model
from marl.decoding.sampling import draw
from marl.model.policy import Policy


class Writer:
    """Samples speech at fixed shapes: a token for each of R rows a step.

    A step's inputs and outputs are tensors that stay where they are, so that on a GPU it can be captured once and
    replayed as long as the parameters stay where they are. A row without tokens left writes to the padding position.
    """

    def __init__(self, policy: Policy, cache: SlotCache, rows: int, end: int, temperature: float) -> None:
        """Allocates the step's tensors.

        end: how far into their slots rows may get. temperature: 0 takes the likeliest token.
        """
        self.policy, self.cache, self.end, self.temperature = policy, cache, end, temperature
        device = policy.device
        self.pauses = torch.zeros(policy.speech_mask.shape, dtype=torch.bool, device=device)  # (V,) a row stops there
        self.pauses[sorted(policy.tokens.may_end)] = True
        self.slots, self.ids, self.positions, self.left = torch.zeros(4, rows, dtype=torch.int64, device=device)
        self.uniform = torch.zeros(rows, dtype=torch.float64, device=device)
        self.logprobs = torch.zeros(rows, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def step(self) -> None:
        """Reads `ids` at `positions` of `slots` and samples the next ones; sets `left` to 0 after a possible end."""
        alive = self.left > 0
        padding = torch.full_like(self.positions, self.cache.context)
        self.cache.at(self.slots, torch.where(alive, self.positions, padding)[:, None], self.end, None)
        query = torch.where(alive, self.positions, 0)[:, None]
        hidden = run_model(self.policy.lm, self.cache, self.ids[:, None], query)[:, 0]  # (R, D)
        shaped = self.policy.speech_logits(self.policy.logits(hidden), self.temperature or 1.0)
        ids, logprobs = draw(shaped.log_softmax(-1), None if self.temperature == 0 else self.uniform)
        self.ids.copy_(ids)
        self.logprobs.copy_(logprobs)
        self.positions += alive
        self.left.sub_(alive.long()).masked_fill_(self.pauses[ids], 0)

    def capture(self, pool: Any, stream: torch.cuda.Stream) -> None:
        """Captures a step as a CUDA graph. No row has tokens left meanwhile, so that no slot changes."""
        self.left.zero_()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                for _ in range(3):  # warm-up, as the manual of CUDA graphs asks
                    self.step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self.step()
        except RuntimeError as error:
            name, reason = type(self.policy.lm).__name__, str(error).strip().splitlines()[0]
            raise UserError(
                f"algo.decode_steps: {name} cannot be captured as a CUDA graph ({reason}). Set it to 1."
            ) from error
        self.graph = graph

    @torch.no_grad()
    def write(
        self, slots: np.ndarray, ids: np.ndarray, positions: np.ndarray, left: np.ndarray, uniform: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Continues r <= R rows, (r,) each, by K steps; `uniform` (r, K).

        Returns sampled ids and log-probabilities, (r, K), and how many of these count, (r,).
        """
        rows, steps = uniform.shape
        self.left.zero_()
        for buffer, values in ((self.slots, slots), (self.ids, ids), (self.positions, positions), (self.left, left)):
            buffer[:rows] = torch.from_numpy(np.asarray(values, dtype=np.int64)).to(buffer.device)
        chances = torch.zeros(steps, len(self.uniform), dtype=torch.float64)
        chances[:, :rows] = torch.from_numpy(uniform.T)
        chances = chances.to(self.uniform.device)
        made: list[Tensor] = []
        for step in range(steps):
            self.uniform.copy_(chances[step])
            counts = (self.left > 0).double()
            if self.graph is None:
                self.step()
            else:
                self.graph.replay()
            made.append(torch.stack([self.ids.double(), self.logprobs.double(), counts]))
        sampled, logprobs, counts = torch.stack(made, -1)[:, :rows].cpu().numpy()  # the only transfer to the host
        return sampled.astype(np.int64), logprobs.astype(np.float32), counts.sum(1).astype(np.int64)
