"""Baselines of the benchmark: `generate` of transformers for every turn, and TRL's trainer around it.

Both sample from the distribution that this engine samples from, so that games are alike. They leave out what this
engine does besides: values, and log-probabilities of what was sampled (TRL computes those in its update).
"""

import copy
import importlib.util
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PrinterCallback, TrainerCallback

from envs.core import END, TurnKind
from marl.agents.base import Key, Reply, Request, beliefs_of
from marl.model.policy import Policy
from marl.model.tokens import StreamWriter
from marl.types import Belief, Episode, Kind, Stream

INSTALL_TRL = "pip install -e '.[bench]' -c constraints.txt"


class Allowed(LogitsProcessor):
    """Leaves each row's own ids possible."""

    def __init__(self, ids: Sequence[Sequence[int]]) -> None:
        self.ids = ids

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        mask = torch.full_like(scores, -torch.inf)
        for row, ids in enumerate(self.ids):
            mask[row, list(ids)] = 0.0
        return scores + mask


@dataclass
class GenerateAgentState:
    """A seat's view, its answers to belief questions, and whether its stream has outgrown the context."""

    view: StreamWriter
    role: str
    answers: list[np.ndarray] = field(default_factory=list)
    legal: tuple[int, ...] = ()
    lost: bool = False


class GenerateAgent:
    """One `generate` call a turn for up to `rows` seats, and one forward pass for their belief questions. Both read the
    whole history again, padded on the left. A seat whose stream outgrows `context` falls silent, as in `ModelAgent`."""

    name = "generate"

    def __init__(self, policy: Policy, rows: int, context: int, max_new_tokens: int) -> None:
        self.policy, self.tokens = policy, policy.tokens
        self.rows, self.context, self.max_new_tokens = rows, context, max_new_tokens
        self.ends = [i for text in (END, f" {END}") for i in self.tokens.encode(text)]
        speakable = policy.speech_mask.isfinite()  # (V,)
        self.speakable = speakable.nonzero()[:, 0].tolist()
        self._states: dict[Key, GenerateAgentState] = {}

    @torch.no_grad()
    def act(self, requests: Sequence[Request]) -> list[Reply]:
        """Answers all questions at once, then replies wherever a reply is owed."""
        for r in requests:
            self._observe(r)
        asked = [state for r in requests if r.questions and not (state := self._states[r.key]).lost]
        for states in self._batches(asked):
            self._answer(states)
        replies = []
        for kind in (TurnKind.CHOOSE, TurnKind.SPEAK):  # a choice is one token: it waits for no message
            owed = {id(self._states[r.key]): r for r in requests if r.turn == kind}
            lost = [r for r in owed.values() if self._states[r.key].lost]
            replies += [Reply(r.key, "", start=len(self._states[r.key].view.stream)) for r in lost]
            for states in self._batches([self._states[r.key] for r in owed.values() if r not in lost]):
                replies += self._reply([owed[id(state)] for state in states])
        return replies

    def finish(self, keys: Sequence[Key]) -> dict[Key, tuple[Stream, list[Belief]]]:
        """The streams and beliefs of finished games."""
        states = {key: self._states.pop(key) for key in keys}
        return {
            key: (state.view.stream, beliefs_of(key[1], state.role, state.view.asked, state.answers))
            for key, state in states.items()
        }

    def _observe(self, r: Request) -> None:
        state = self._states.setdefault(r.key, GenerateAgentState(StreamWriter(self.tokens), r.role))
        if state.lost:
            return
        length, asked = len(state.view.stream), len(state.view.asked)
        state.view.observe(r.text, r.questions, r.step)
        if r.turn != TurnKind.WAIT:
            state.legal = state.view.cue(r.options)
        if self._free(state) < int(r.turn != TurnKind.WAIT):
            state.view.cut(length, asked)
            state.lost = True

    def _free(self, state: GenerateAgentState) -> int:
        """Most tokens of a reply for which there is room."""
        return self.context - len(state.view.stream) - state.view.tail

    def _batches(self, states: Sequence[GenerateAgentState]) -> list[list[GenerateAgentState]]:
        """Splits seats into groups of similar length, at most `rows` each."""
        order = sorted(states, key=lambda state: len(state.view.stream))
        return [order[i : i + self.rows] for i in range(0, len(order), self.rows)]

    def _reply(self, requests: Sequence[Request]) -> list[Reply]:
        """Replies to turns of one kind."""
        states = [self._states[r.key] for r in requests]
        ids, mask = self._inputs([state.view.stream.tokens for state in states])
        chooses = requests[0].turn == TurnKind.CHOOSE
        limits = [1 if chooses else min(self.max_new_tokens, self._free(state)) for state in states]
        allowed = [state.legal if chooses else self.speakable for state in states]
        generate: Any = self.policy.lm.generate
        written = generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=max(limits),
            eos_token_id=self.ends,
            pad_token_id=self.tokens.pad_id,
            logits_processor=LogitsProcessorList([Allowed(allowed)]),
        )[:, ids.shape[1] :].tolist()
        return [self._said(*each) for each in zip(requests, states, written, limits, strict=True)]

    def _said(self, r: Request, state: GenerateAgentState, row: list[int], limit: int) -> Reply:
        """Makes the reply of a generated row, cut behind its end."""
        size = next((i + 1 for i in range(limit) if self.tokens.ends(row[: i + 1])), limit)
        reply = tuple(row[:size])
        chooses = r.turn == TurnKind.CHOOSE
        text = r.options[state.legal.index(reply[0])] if chooses else self.tokens.reply_text(reply)
        start = state.view.reply(reply, Kind.CHOICE if chooses else Kind.SPEECH)
        return Reply(r.key, text, reply, start, (0.0,) * len(reply), legal=state.legal)

    def _answer(self, states: Sequence[GenerateAgentState]) -> None:
        """Answers each open question of the seats by a softmax over its candidates.

        A question beside the stream takes a row of its own.
        """
        rows: list[list[int]] = []
        due = []  # state, candidates, row, and the place in it counted from its end
        for state in states:
            tokens, whole = state.view.stream.tokens, len(rows)
            rows.append(tokens)
            for asked in state.view.asked[len(state.answers) :]:
                place = asked.position - len(tokens) if not asked.branch else -1
                due.append((state, asked.candidate_ids, len(rows) if asked.branch else whole, place))
                if asked.branch:
                    rows.append([*tokens[: asked.position + 1], *asked.branch])
        ids, mask = self._inputs(rows)
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        hidden = self.policy.lm.base_model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state  # (R, T, D)
        last = hidden[[row for _, _, row, _ in due], [place for _, _, _, place in due]]
        for (state, candidates, _, _), logits in zip(due, self.policy.logits(last), strict=True):
            state.answers.append(logits[list(candidates)].double().softmax(-1).cpu().numpy())

    def _inputs(self, streams: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """Ids and mask (R, T) of whole histories, padded on the left."""
        width = max(map(len, streams))
        ids = np.array([[self.tokens.pad_id] * (width - len(stream)) + stream for stream in streams])
        mask = np.array([[0] * (width - len(stream)) + [1] * len(stream) for stream in streams])
        device = self.policy.device
        return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)


def has_trl() -> bool:
    return importlib.util.find_spec("trl") is not None


class StepClock(TrainerCallback):
    """Adds up the seconds of the trainer's steps."""

    def __init__(self, device: torch.device) -> None:
        self.seconds, self.wait = 0.0, torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.wait()
        self.seconds += time.perf_counter() - self.began


def trl_iteration(
    policy: Policy, rollout: Any, seats: Mapping[str, int], context: int, update_tokens: int
) -> tuple[float, int]:
    """One iteration of TRL's GRPOTrainer. Returns the seconds of its step and the tokens that it learned from.

    The step plays the games by a `rollout_func`, TRL's own way for many turns: `rollout(policy)` returns episodes
    (TRL keeps no cache between turns). Of these the first are learned from. `seats`: `learned`, how many of the games,
    and `players` in each, which are one group of GRPO. A seat's stream is one completion, with `env_mask` on the tokens
    that were sampled. One AdamW step, without a reference model and gradient checkpointing, in float32; a forward pass
    has as many rows as `update_tokens` tokens hold, of the numbers that divide all rows. TRL learns from no belief
    question and has no value head: less work than ours.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that rollout_func is experimental; a fast tokenizer's own hints
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

    games, players = seats["learned"], seats["players"]
    fitting = max(update_tokens // context, 1)
    together = max(n for n in range(1, fitting + 1) if (games * players) % n == 0)  # rows of a pass
    lm = copy.deepcopy(policy.lm)  # the trainer puts a forward pass of its own into it
    actor = Policy(lm, policy.tokens).to(policy.device)
    streams: list[Stream] = []

    def play(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        lm.eval()
        episodes: list[Episode] = rollout(actor)
        lm.train()
        streams.extend(stream for episode in episodes[:games] for stream in episode.streams.values())
        return {
            "prompt_ids": [s.tokens[:1] for s in streams],
            "completion_ids": [s.tokens[1:] for s in streams],
            "env_mask": [[int(kind in (Kind.CHOICE, Kind.SPEECH)) for kind in s.kinds[1:]] for s in streams],
            "logprobs": None,
            "paid": [float(number % 2) for number in range(len(streams))],
        }

    clock = StepClock(policy.device)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = GRPOTrainer(
            model=lm,
            args=GRPOConfig(
                output_dir=folder,
                max_steps=1,
                per_device_train_batch_size=together,
                gradient_accumulation_steps=games * players // together,
                num_generations=players,
                learning_rate=0.0,
                beta=0.0,
                bf16=False,
                gradient_checkpointing=False,
                use_cpu=policy.device.type == "cpu",
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            reward_funcs=lambda completions, paid, **_: paid,
            train_dataset=Dataset.from_dict({"prompt": [str(number) for number in range(games)]}),
            processing_class=copy.deepcopy(policy.tokens.tokenizer),
            rollout_func=play,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(clock)
        trainer.train()
    return clock.seconds, sum(map(len, streams))
