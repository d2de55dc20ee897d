"""Language models as agents: one cache slot a seat, one forward pass for all seats that are ready."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from envs.core import TurnKind
from marl.agents.base import Agent, Key, Reply, Request, beliefs_of
from marl.common.errors import UserError, check_range, check_temperature
from marl.decoding.cache import READ_BUDGET
from marl.decoding.engine import Engine
from marl.decoding.packing import groups_within
from marl.decoding.passes import Branch
from marl.decoding.sampling import uniforms
from marl.model.policy import Policy, bf16_copy, check_bf16, padded, take_weights
from marl.model.sharding import is_split
from marl.model.tokens import Asked, StreamWriter
from marl.types import Belief, Kind, Stream

T = TypeVar("T")


@dataclass
class ModelAgentState:
    """State of a seat: its view, its cache slot and the reply under way."""

    view: StreamWriter
    slot: int
    seed: int
    role: str
    privileged: tuple[float, ...]
    read: int = 0  # tokens of the stream in the cache
    answers: list[np.ndarray] = field(default_factory=list)  # to the first questions of view.asked
    kind: Kind | None = None  # of the reply that is owed; None: no reply is
    options: tuple[str, ...] = ()
    legal: tuple[int, ...] = ()
    limit: int = 0  # most tokens of the reply
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    value: float = 0.0
    lost: bool = False  # an observation did not fit: nothing more is read, and replies are empty


class ModelAgent:
    """A language model in any number of seats.

    A message ends at `END`, at the model's end of sequence, or after `max_new_tokens`. Observations are read when a
    reply is due or the game ends; the same pass answers their belief questions. A seat whose stream outgrows `context`
    falls silent: it reads nothing more, and the game refuses its empty replies.
    """

    def __init__(
        self,
        name: str,
        policy: Policy,
        *,
        slots: int,
        context: int,
        max_new_tokens: int = 40,
        temperature: float = 1.0,
        read_budget: int = READ_BUDGET,
        patience: float = 0.5,
        decode_steps: int = 1,
        bf16: bool = False,
        style: str | None = None,
    ) -> None:
        """Makes the engine.

        read_budget: padded tokens that one pass reads at most. decode_steps: tokens that a writing seat samples before
        it is looked at again; always 1 where `Engine.can_write` is not. patience: readers wait while others write,
        until their shares of all seats that owe a reply add up to it from pass to pass; half of them wait for none, a
        tenth for four. bf16: a bfloat16 copy plays, which takes over the policy's weights whenever nobody is seated.
        """
        self.name, self.tokens, self.style = name, policy.tokens, style
        self.original = policy if bf16 else None
        self.policy = bf16_copy(policy) if bf16 else policy
        if bf16 and not is_split(policy):
            check_bf16(self.policy)
        self.engine = Engine(self.policy, slots, context, None if is_split(policy) else policy.lm)
        if self.engine.uncached:
            warnings.warn(
                f"{name}: {self.engine.uncached}, so every pass reads whole streams again, which is slow. Choose a "
                "model.name whose layers are attention, or recurrent with a cache of transformers (as Mamba).",
                stacklevel=2,
            )
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        self.read_budget, self.patience = read_budget, patience
        self.decode_steps = decode_steps if self.engine.can_write else 1
        self._states: dict[Key, ModelAgentState] = {}
        self._waited = 0.0  # the sum that `patience` bounds

    def act(self, requests: Sequence[Request]) -> list[Reply]:
        replies: list[Reply] = []
        if not self._states:
            self._waited = 0.0  # so that games don't depend on those before
            if self.original is not None:
                take_weights(self.policy, self.original)
        for r in requests:
            state = self._observe(r)
            if r.turn != TurnKind.WAIT and state.lost:
                replies.append(Reply(r.key, "", start=len(state.view.stream), value=state.value))
            elif r.turn != TurnKind.WAIT:
                state.kind = Kind.CHOICE if r.turn == TurnKind.CHOOSE else Kind.SPEECH
                state.options, state.limit = r.options, min(self.max_new_tokens, self._free(state))
        owed = {key: state for key, state in self._states.items() if state.kind is not None}
        while owed and not replies:
            self._take_turns(owed)
            for key in list(owed):
                if self._complete(owed[key]):
                    replies.append(self._reply(key, owed.pop(key)))
        return replies

    def _take_turns(self, owed: Mapping[Key, ModelAgentState]) -> None:
        """Lets either readers read or writers write: in a padded pass one token beside 60 costs as much as 60, and
        writing several tokens in one go excludes reading."""
        reading = [key for key, state in owed.items() if not state.ids]
        writing = [key for key, state in owed.items() if state.ids]
        self._waited += len(reading) / len(owed)
        if reading and (not writing or self._waited >= self.patience):
            self._waited = 0.0
            for group in self._groups(reading):
                self._advance(group)
        elif self.decode_steps > 1:
            self._write(writing)
        else:
            self._advance(writing)

    def repeat(self, request: Request, ids: Sequence[int]) -> int:
        """Reads the request and takes these ids as the seat's own reply. Returns their position in its stream."""
        state = self._observe(request)
        if state.lost:
            return len(state.view.stream)
        return state.view.reply(ids, Kind.CHOICE if request.turn == TurnKind.CHOOSE else Kind.SPEECH)

    def finish(self, keys: Sequence[Key]) -> dict[Key, tuple[Stream, list[Belief]]]:
        """Answers open questions, and frees the slots."""
        states = {key: self._states.pop(key) for key in keys}
        unanswered = [key for key, state in states.items() if len(state.answers) < len(state.view.asked)]
        self._states.update(states)
        for group in self._groups(unanswered):
            self._advance(group)
        for key in keys:
            self.engine.free(self._states.pop(key).slot)
        return {
            key: (state.view.stream, beliefs_of(key[1], state.role, state.view.asked, state.answers))
            for key, state in states.items()
        }

    def _observe(self, r: Request) -> ModelAgentState:
        if r.key not in self._states:
            self._states[r.key] = ModelAgentState(
                StreamWriter(self.tokens), self.engine.allocate(), r.seed, r.role, r.privileged
            )
        state = self._states[r.key]
        if state.lost:
            return state
        length, asked = len(state.view.stream), len(state.view.asked)
        state.view.observe(r.text, r.questions, r.step)
        if r.turn != TurnKind.WAIT:
            self._tell(r.key, state)
            state.legal = state.view.cue(r.options)
        needed = int(r.turn != TurnKind.WAIT)  # at least a token of a reply
        end = self.engine.context + needed - self._free(state)
        if not self.engine.can_branch_back:  # branches are read in the slot
            end = max([end, *(each.position + 1 + len(each.branch) for each in state.view.asked[asked:])])
        if end > self.engine.context:
            if not length:
                raise self.engine.outgrown(end, begun=False)
            state.view.cut(length, asked)
            state.lost = True
        return state

    def opening(self, text: str) -> str:
        """Returns a seat's first observation as this agent reads it."""
        return text

    def _tell(self, key: Key, state: ModelAgentState) -> None:
        """Appends what the seat alone reads before its reply: nothing, for most agents."""

    def _free(self, state: ModelAgentState) -> int:
        """Most tokens of a reply for which it and the tokens after it fit into the slot."""
        return self.engine.context - len(state.view.stream) - state.view.tail

    def _unread(self, state: ModelAgentState) -> list[int]:
        return state.view.stream.tokens[state.read :] + state.ids[-1:]

    def _groups(self, keys: Sequence[Key]) -> list[list[Key]]:
        """Groups seats with about as much to read, of at most `read_budget` padded tokens."""
        return self._alike({key: len(self._unread(self._states[key])) for key in keys})

    def _alike(self, sizes: Mapping[T, int]) -> list[list[T]]:
        """Groups what has about as many tokens, of at most `read_budget` padded ones."""
        order = sorted(sizes, key=lambda each: sizes[each], reverse=True)
        groups = groups_within([sizes[each] for each in order], self.read_budget)
        return [[order[i] for i in group] for group in groups]

    @torch.no_grad()
    def _advance(self, keys: Sequence[Key]) -> None:
        """Runs one forward pass over the unread tokens of these seats; answers questions; samples a token if owed."""
        states = sorted((self._states[key] for key in keys), key=lambda s: s.slot)
        chunks = [self._unread(state) for state in states]
        beside = {} if self.engine.can_branch_back else self._answer_beside(states)  # before states move on
        hidden = self.engine.read([state.slot for state in states], chunks)  # (N, D)
        beside = beside or self._answer_beside(states)
        ends = np.cumsum([len(chunk) for chunk in chunks])
        self._answer(states, hidden, ends, beside)
        for state, chunk in zip(states, chunks, strict=True):
            state.read += len(chunk)
        rows = [i for i, state in enumerate(states) if state.kind is not None]
        if not rows:
            return
        speaking = [states[i] for i in rows]
        last = hidden[torch.from_numpy(ends[rows] - 1).to(hidden.device)]  # (R, D)
        starting = [i for i, state in enumerate(speaking) if not state.ids]
        if starting:
            facts = torch.tensor([speaking[i].privileged for i in starting], device=last.device)
            for i, value in zip(starting, self.policy.value(last[starting], facts).tolist(), strict=True):
                speaking[i].value = value
        legal = [state.legal for state in speaking]
        ids, logprobs = self.engine.sample(last, legal, self.temperature, self._uniform(speaking, 1)[:, 0])
        for state, token, logprob in zip(speaking, ids.tolist(), logprobs.tolist(), strict=True):
            state.ids.append(token)
            state.logprobs.append(logprob)

    def _uniform(self, states: Sequence[ModelAgentState], steps: int) -> np.ndarray:
        """Uniform numbers for each seat's next tokens, (R, steps), from its seed and their positions in its stream."""
        positions = np.array([len(state.view.stream) + len(state.ids) for state in states], dtype=np.uint64)
        seeds = np.array([state.seed for state in states], dtype=np.uint64)
        return uniforms(seeds[:, None], positions[:, None] + np.arange(steps, dtype=np.uint64))

    def _write(self, keys: Sequence[Key]) -> None:
        """Samples several more tokens of messages under way, of which only the last token is unread."""
        states = sorted((self._states[key] for key in keys), key=lambda s: s.slot)
        left = [state.limit - len(state.ids) for state in states]
        steps = min(self.decode_steps, max(left))
        ids, logprobs = self.engine.write(
            [state.slot for state in states], [state.ids[-1] for state in states], left, self._uniform(states, steps),
            self.temperature,
        )  # fmt: skip
        for state, more, theirs in zip(states, ids, logprobs, strict=True):
            state.read += len(more)  # as many were read as were sampled: the last is not
            state.ids += more
            state.logprobs += theirs

    def _answer(
        self, states: Sequence[ModelAgentState], hidden: torch.Tensor, ends: np.ndarray, beside: dict[int, np.ndarray]
    ) -> None:
        """Notes the answers to all open questions: those `beside` the streams, and those in what was just read. `ends`
        (R,): the end of each seat's tokens among the hidden states (N, D)."""
        due = [(state, asked) for state in states for asked in state.view.asked[len(state.answers) :]]
        first = {state.slot: place - state.read for state, place in zip(states, [0, *ends[:-1].tolist()], strict=True)}
        inside = [(asked, first[state.slot] + asked.position) for state, asked in due if not asked.branch]
        found = dict(beside)  # answers by id of what was asked
        if inside:
            found |= self._believe([asked for asked, _ in inside], hidden[[at for _, at in inside]])
        for state, asked in due:
            state.answers.append(found[id(asked)])

    def _answer_beside(self, states: Sequence[ModelAgentState]) -> dict[int, np.ndarray]:
        """Answers the open questions beside these seats' streams: answers by id of what was asked."""
        beside: dict[int, list[Asked]] = {}  # by slot
        branches: dict[int, list[Branch]] = {}
        for state in states:
            for asked in state.view.asked[len(state.answers) :]:
                if asked.branch:
                    start = min(asked.position + 1, int(self.engine.lengths[state.slot]))
                    ids = [*state.view.stream.tokens[start : asked.position + 1], *asked.branch]
                    beside.setdefault(state.slot, []).append(asked)
                    branches.setdefault(state.slot, []).append((start, ids))
        found: dict[int, np.ndarray] = {}
        widths = {slot: sum(len(ids) for _, ids in own) for slot, own in branches.items()}
        for slots in map(sorted, self._alike(widths)):
            hidden = self.engine.read_beside(slots, [branches[slot] for slot in slots])
            found |= self._believe([asked for slot in slots for asked in beside[slot]], hidden)
        return found

    def _believe(self, asked: Sequence[Asked], hidden: torch.Tensor) -> dict[int, np.ndarray]:
        """Answers questions from the hidden states (Q, D) that they end in: a softmax over the candidates of each."""
        logits = self.policy.logits(hidden)  # (Q, V)
        candidates = padded([each.candidate_ids for each in asked]).to(logits.device)
        scores = logits.gather(1, candidates.clamp_min(0)).masked_fill(candidates < 0, -torch.inf)  # (Q, K)
        probs = scores.double().softmax(-1).cpu().numpy()
        return {id(each): row[: len(each.candidate_ids)] for each, row in zip(asked, probs, strict=True)}

    def _complete(self, state: ModelAgentState) -> bool:
        if not state.ids:
            return False
        return state.kind == Kind.CHOICE or len(state.ids) >= state.limit or self.tokens.ends(state.ids)

    def _reply(self, key: Key, state: ModelAgentState) -> Reply:
        assert state.kind is not None
        if state.kind == Kind.CHOICE:
            text = state.options[state.legal.index(state.ids[0])]
        else:
            text = self.tokens.reply_text(state.ids)
        start = state.view.reply(state.ids, state.kind)
        # What is not in the cache yet, the last token at least, is read with the next observation.
        assert start <= state.read < start + len(state.ids), (state.read, start, len(state.ids))
        reply = Reply(key, text, tuple(state.ids), start, tuple(state.logprobs), state.value, state.legal)
        state.kind, state.options, state.legal, state.ids, state.logprobs = None, (), (), [], []
        return reply


@dataclass(frozen=True)
class PlayConfig:
    """Settings of play while models learn (`decode_steps` and `play_bf16`: see `ModelAgent`). Lengths are in tokens."""

    iterations: int = 20
    games: int = 192
    concurrency: int = 192
    temperature: float = 1.0
    max_new_tokens: int = 32
    context: int = 1024
    decode_steps: int = 1
    play_bf16: bool = False

    def __post_init__(self) -> None:
        counts = ("iterations", "games", "concurrency", "max_new_tokens", "context", "decode_steps")
        check_range(self, "algo", "[1, inf)", *counts)
        check_temperature(self.temperature, "algo.temperature")
        if self.temperature == 0:
            raise UserError(f"algo.temperature={self.temperature}: must be above 0 to learn from what was sampled")

    @property
    def at_once(self) -> int:
        """Games that are played at a time, for which caches have room."""
        return min(self.concurrency, self.games)


def tokens_read_by(agents: Iterable[Agent]) -> int:
    """Counts the tokens that these agents' models have read so far."""
    return sum(agent.engine.tokens_read for agent in agents if isinstance(agent, ModelAgent))


def model_agent_settings(limits: PlayConfig, seats_per_game: int, temperature: float) -> dict[str, Any]:
    """Arguments of a `ModelAgent` with room for `limits.at_once` games of `seats_per_game` seats."""
    return {
        "slots": seats_per_game * limits.at_once,
        "context": limits.context,
        "max_new_tokens": limits.max_new_tokens,
        "temperature": temperature,
        "decode_steps": limits.decode_steps,
        "bf16": limits.play_bf16,
    }


def model_agent(
    name: str, policy: Policy, limits: PlayConfig, seats_per_game: int, temperature: float, style: str | None = None
) -> ModelAgent:
    """A policy as an agent with room for `limits.at_once` games of `seats_per_game` seats. `style`: see `Agent`."""
    return ModelAgent(name, policy, **model_agent_settings(limits, seats_per_game, temperature), style=style)
