"""Batched incremental decoding: each agent's stream lives in one slot of a preallocated cache.

A slot holds keys and values (attention), states (recurrent layers), or both. A call reads only new tokens, for rows of
any length. A model that keeps something else reads whole streams at each call, which is slow (`WholeStreams`).
Left out: text, games, and when to read (marl/agents/model.py).
"""

import heapq
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from marl.common.errors import UserError
from marl.decoding.cache import NotCacheable, SlotCache, slot_cache
from marl.decoding.graphs import Writer
from marl.decoding.passes import Branch, WholeStreams, one_pass, pass_beside
from marl.decoding.probes import check_slots, reads_chunks
from marl.decoding.sampling import draw
from marl.model.branches import takes_masks
from marl.model.loading import check_context
from marl.model.policy import Policy, padded
from marl.model.sharding import is_split

STRETCH = 128  # captured steps reach into slots by multiples of this


class Engine:
    """Reads tokens into slots and samples from the resulting states. `lengths` (S,): tokens that each slot holds."""

    def __init__(self, policy: Policy, slots: int, context: int, float32_twin: PreTrainedModel | None = None) -> None:
        """Makes an empty cache.

        float32_twin: the model that the policy's is a bfloat16 copy of. Whether slots can hold it is tried there,
        where rounding does not hide what is forgotten.
        """
        check_context(policy.lm.config, context)
        lm = float32_twin or policy.lm
        self.policy, self.slots, self.context, self._tried_on = policy, slots, context, lm
        self.cache: SlotCache | WholeStreams
        self.uncached = ""  # why there is no cache, if so
        try:
            self.cache = slot_cache(policy.lm, slots, context)
            self._reads_chunks = not self.cache.states or reads_chunks(lm)
            if self.cache.states:
                with torch.no_grad():  # makes the states of all slots: first games are computed like later ones
                    one_pass(policy.lm, self.cache, np.array([0]), np.array([0]), [[0]])
                self.cache.clear(0)
            elif not is_split(policy):
                check_slots(lm)
        except NotCacheable as reason:
            self.cache, self._reads_chunks, self.uncached = WholeStreams(slots), True, str(reason)
        self.lengths = np.zeros(slots, dtype=np.int64)
        self._free = list(range(slots))  # a heap: the lowest free slot is taken, whatever was freed before
        self.tokens_read = 0
        self.fixed_shapes = policy.device.type == "cuda"  # of `write`'s steps: each is captured. Tests set it, too
        self._writers: dict[tuple[int, int, float], Writer] = {}  # by shape
        self._captured_at: tuple[int, ...] = ()
        self._pool: Any = None  # of the graphs' memory
        self._stream: torch.cuda.Stream | None = None

    @property
    def can_write(self) -> bool:
        """Tells whether `write` is right for this model: recurrent states would move on in rows that have ended."""
        return isinstance(self.cache, SlotCache) and not self.cache.states

    @cached_property
    def can_branch_back(self) -> bool:
        """Tells whether a branch can go on from a token before the last: not from a state, nor without masks."""
        return isinstance(self.cache, WholeStreams) or (not self.cache.states and takes_masks(self._tried_on))

    def allocate(self) -> int:
        """Takes an empty slot."""
        if not self._free:
            raise RuntimeError(f"all {self.slots} slots are taken")
        slot = heapq.heappop(self._free)
        self.rewind(slot, [])
        return slot

    def free(self, slot: int) -> None:
        """Gives a slot back."""
        heapq.heappush(self._free, slot)

    @torch.no_grad()
    def read(self, slots: Sequence[int], chunks: Sequence[Sequence[int]]) -> Tensor:
        """Appends a chunk of new tokens to each slot. Returns hidden states (N, D) of all N tokens, chunk behind chunk.

        Slots must be distinct; chunks must not be empty.
        """
        sizes = np.array([len(c) for c in chunks])
        assert sizes.all(), "an empty chunk"
        rows = np.asarray(slots, dtype=np.int64)
        start = self.lengths[rows]
        self._check_room(start, start + sizes)
        if not self.cache.states:
            return self._pass(rows, chunks)
        # Padding would move a state on, so rows are read in pieces of one length.
        parts: list[list[Tensor]] = [[] for _ in chunks]
        done = np.zeros_like(sizes)
        while (done < sizes).any():
            which, size = self._piece(self.lengths[rows], sizes - done)
            pieces = [chunks[i][done[i] : done[i] + size] for i in which]
            for i, states in zip(which, self._pass(rows[which], pieces).split(size), strict=True):
                parts[i].append(states)
            done[which] += size
        return torch.cat([states for own in parts for states in own])

    @torch.no_grad()
    def read_beside(self, slots: Sequence[int], branches: Sequence[Sequence[Branch]]) -> Tensor:
        """Reads branches of these slots' streams, which stay as they are. Slots must be distinct, branches not empty.

        Unless the engine `can_branch_back`, branches go on from the end of what is read, and each must fit into its
        slot. Returns hidden states (Q, D) of the Q branches' last tokens, slot behind slot. UserError where a branch
        goes beyond what the model reads.
        """
        rows = np.asarray(slots, dtype=np.int64)
        longest = max(start + len(ids) for own in branches for start, ids in own)
        if longest > self.policy.context:
            raise UserError(
                f"model.context={self.context}: with a question beside it a stream has {longest} tokens, and the model "
                f"reads up to {self.policy.context}. Lower model.context by {longest - self.policy.context}, or more."
            )
        assert all(start <= self.lengths[r] for r, own in zip(rows, branches, strict=True) for start, _ in own)
        if not self.can_branch_back:
            return self._read_and_restore(rows, branches)
        self.tokens_read += sum(len(ids) for own in branches for _, ids in own)
        if isinstance(self.cache, WholeStreams):
            return self.cache.read_beside(self.policy.lm, rows, branches)
        return pass_beside(self.policy.lm, self.cache, rows, branches)

    def _read_and_restore(self, rows: np.ndarray, branches: Sequence[Sequence[Branch]]) -> Tensor:
        """Reads branches as streams that go on, the first of each slot, the second, ..., and puts states back after
        each."""
        assert isinstance(self.cache, SlotCache)
        kept, lengths = self.cache.states_of(rows), self.lengths[rows]
        for own, length in zip(branches, lengths.tolist(), strict=True):
            assert all(start == length for start, _ in own), "there is no way back to where a question branches off"
        found: dict[tuple[int, int], Tensor] = {}
        for turn in range(max(map(len, branches))):
            which = [i for i, own in enumerate(branches) if turn < len(own)]
            chunks = [branches[i][turn][1] for i in which]
            hidden = self.read(rows[which].tolist(), chunks).split([len(ids) for ids in chunks])
            found |= {(i, turn): states[-1] for i, states in zip(which, hidden, strict=True)}
            self.cache.restore(rows, kept)
            self.lengths[rows] = lengths
        return torch.stack([found[key] for key in sorted(found)])

    def _check_room(self, start: np.ndarray, ends: np.ndarray) -> None:
        """Raises UserError unless streams up to `ends` (R,) fit into slots, which hold `start` (R,)."""
        if int(ends.max()) > self.context:
            raise self.outgrown(int(ends.max()), begun=bool(start[ends.argmax()]))

    def outgrown(self, tokens: int, begun: bool) -> UserError:
        """Builds the error for a stream that no slot holds: of a game that has begun, or of a player's first prompt."""
        what = "an episode outgrew its slot" if begun else "a prompt is too long"
        most = self.policy.context
        way = f"Raise model.context (the model reads up to {most}), l" if most > self.context else "L"
        return UserError(
            f"{what}: a stream of {tokens} tokens does not fit model.context={self.context}. {way}ower the game's "
            "message and turn limits, or use fewer tokens, as with env.style=compact."
        )

    def _piece(self, start: np.ndarray, left: np.ndarray) -> tuple[np.ndarray, int]:
        """Chooses which rows to read next, and how many tokens of each, where `left` (R,) are unread after `start`."""
        if self._reads_chunks:
            size = 1 << (int(left.max()).bit_length() - 1)  # the largest power of two: few passes, whatever the lengths
            return np.flatnonzero(left >= size), size
        new = (start == 0) & (left > 0)
        if new.any():
            size = int(left[new].max())
            return np.flatnonzero(new & (left == size)), size
        return np.flatnonzero(left > 0), 1

    def _pass(self, rows: np.ndarray, chunks: Sequence[Sequence[int]]) -> Tensor:
        if isinstance(self.cache, WholeStreams):
            hidden = self.cache.read(self.policy.lm, rows, self.lengths[rows], chunks)
        else:
            hidden = one_pass(self.policy.lm, self.cache, rows, self.lengths[rows], chunks)
        sizes = [len(chunk) for chunk in chunks]
        self.lengths[rows] += sizes
        self.tokens_read += sum(sizes)
        return hidden

    @torch.no_grad()
    def score(self, slot: int, prefix: Sequence[int], texts: Sequence[Sequence[int]], temperature: float) -> np.ndarray:
        """Log-probability of each text, (A,), as speech after `prefix`, with which the slot's stream begins.

        Texts must not be empty. The slot stays as it is; A free slots are needed meanwhile. Temperature 0 counts as 1.
        """
        known = len(prefix) - 1  # the prefix's last token is read again: its state predicts the text
        assert known <= self.lengths[slot], (known, self.lengths[slot])
        scratch = [self.allocate() for _ in texts]
        source = slot
        if self.cache.states and known:  # a state has no way back to an earlier token
            source = scratch[0]
            self.read([source], [prefix[:known]])
        if known:
            self.cache.copy(source, [other for other in scratch if other != source], known)
        self.lengths[scratch] = known
        hidden = self.read(scratch, [[prefix[-1], *text[:-1]] for text in texts]).split([len(text) for text in texts])
        for other in scratch:
            self.free(other)
        scores = []
        for row, text in zip(hidden, texts, strict=True):  # one by one: a large vocabulary times A is too much at once
            shaped = self.policy.speech_logits(self.policy.logits(row), temperature or 1.0)  # (n, V)
            ids = torch.tensor(text, device=shaped.device)
            scores.append(float(shaped.double().log_softmax(-1).gather(1, ids[:, None]).sum()))
        return np.array(scores)

    def fork(self, slot: int, count: int) -> list[int]:
        """Takes free slots that hold what this one does."""
        forks = [self.allocate() for _ in range(count)]
        if self.lengths[slot]:
            self.cache.copy(slot, forks, int(self.lengths[slot]))
        self.lengths[forks] = self.lengths[slot]
        return forks

    def rewind(self, slot: int, prefix: Sequence[int]) -> None:
        """Forgets all but `prefix`, with which the slot's stream begins."""
        assert len(prefix) <= self.lengths[slot], (len(prefix), self.lengths[slot])
        if not prefix:
            self.cache.clear(slot)
        elif self.cache.states and len(prefix) < self.lengths[slot]:  # a state has no way back: it is computed again
            self.rewind(slot, [])
            self.read([slot], [prefix])
        self.lengths[slot] = len(prefix)

    @torch.no_grad()
    def sample(
        self, hidden: Tensor, legal: Sequence[tuple[int, ...]], temperature: float, uniform: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Samples one token for each of R rows from hidden states (R, D): a legal id, or speech where a row has none.

        Temperature 0 takes the likeliest token. Otherwise `uniform` (R,) in [0, 1) decides, by the inverse of the
        cumulative distribution, so that a row's sample does not depend on other rows. Returns ids (R,) and their
        log-probabilities (R,) under the sampled distribution.
        """
        greedy, temperature = temperature == 0, temperature or 1.0
        is_choice = torch.tensor([bool(ids) for ids in legal], device=hidden.device)
        shaped = self.policy.reply_logits(hidden, is_choice, padded(legal).to(hidden.device), temperature)
        ids, found = draw(shaped.log_softmax(-1), None if greedy else torch.from_numpy(uniform).to(shaped.device))
        return ids.cpu().numpy(), found.cpu().numpy()

    @torch.no_grad()
    def write(
        self, slots: Sequence[int], ids: Sequence[int], left: Sequence[int], uniform: np.ndarray, temperature: float
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Continues speech in slots (R,) whose last ids (R,) are unread, by up to K tokens each; `uniform` (R, K).

        A row gets at most `left` (R,) tokens, and none after one that may be an end. Returns ids and log-probabilities:
        those of K times `read` and `sample` up to rounding, without waiting for the host. Only if `can_write`.
        """
        assert isinstance(self.cache, SlotCache) and self.can_write
        rows, steps = np.asarray(slots, dtype=np.int64), uniform.shape[1]
        start = self.lengths[rows]
        self._check_room(start, start + 1)
        allowed = np.minimum(np.minimum(left, steps), self.context - start)
        size, end = len(rows), int((start + allowed).max())
        if self.fixed_shapes:
            far = min(-(-end // STRETCH) * STRETCH, self.context)
            writer = self._writer_for(1 << (size - 1).bit_length(), far, temperature)
        else:
            writer = Writer(self.policy, self.cache, size, end, temperature)
        sampled, logprobs, counts = writer.write(rows, np.asarray(ids), start, allowed, uniform)
        self.lengths[rows] += counts
        self.tokens_read += int(counts.sum())
        each = list(zip(sampled.tolist(), logprobs.tolist(), counts.tolist(), strict=True))
        return [own[:count] for own, _, count in each], [own[:count] for _, own, count in each]

    def _writer_for(self, size: int, end: int, temperature: float) -> Writer:
        """The writer of this shape: a new one if there is none yet, or parameters have moved since it was captured."""
        assert isinstance(self.cache, SlotCache)
        there = tuple(tensor.data_ptr() for tensor in (*self.policy.parameters(), *self.policy.buffers()))
        if self._captured_at != there:
            self._writers, self._captured_at, self._pool = {}, there, None
        key = (size, end, temperature)
        if key not in self._writers:
            self._writers[key] = Writer(self.policy, self.cache, *key)
            if self.policy.device.type == "cuda":
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                self._stream = self._stream or torch.cuda.Stream()
                self._writers[key].capture(self._pool, self._stream)
        return self._writers[key]
