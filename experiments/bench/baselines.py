"""Baselines of the benchmark: `generate` of transformers for every turn, and TRL's trainer around it.

All of them play the recorded games of workload.py: a logits processor forces each token, in place of the mask of legal
choices that they would need, and the rest of the work is theirs. They leave out what this engine does besides: values,
and log-probabilities of what was sampled (TRL computes those in its update).

Whole games would take a model that reads everything again an hour, so that some of its calls may be passed over: see
`GenerateAgent`.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, PrinterCallback, TrainerCallback

from envs.core import END, TurnKind
from experiments.bench.measure import Stopwatch, replaced
from experiments.bench.workload import Script
from marl.agents.base import Key, Reply, Request, beliefs_of
from marl.model.policy import Policy
from marl.model.tokens import View
from marl.rollout.rollout import everyone, rollout
from marl.types import Belief, Episode, Kind, Stream

INSTALL_TRL = "pip install -e '.[bench]' -c constraints.txt"
ALL_CALLS = range(sys.maxsize)


class Forced(LogitsProcessor):
    """Leaves one token possible at each step of `generate`: the next of each row's recorded reply."""

    def __init__(self, replies: Sequence[tuple[int, ...]]) -> None:
        self.replies, self.step = replies, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        # Rows whose reply is over are padded by `generate`, whatever they are given.
        ids = torch.tensor([[reply[min(self.step, len(reply) - 1)]] for reply in self.replies], device=scores.device)
        self.step += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, ids, 0.0)


class GenerateAgent:
    """One `generate` call a turn for up to `rows` seats, and one forward pass for belief questions.

    Without `keep_cache` both read the whole history again, padded on the left. With it each seat keeps its keys and
    values between turns, and only new tokens are read. `generate` takes a cache of one length for all rows of a batch,
    so the seats' caches are copied into one for each call, padded on the left, and so is what each has to read; the
    attention mask has zeros in both places, and positions follow from it. Afterwards each seat's part is copied out
    again. That is what limits it: every call copies the whole of its rows' caches twice, because seats that reply
    together are other seats each time, with caches of other lengths.

    `calls`: which calls of `act` that need the model, by number, are computed. In the others seats make their recorded
    replies without it, and their belief answers are uniform: nothing depends on them. Without `keep_cache` a call's
    work is the same whatever was computed before, and `scale` says what all calls together take; with it, a call that
    follows a gap has more to read. Memory is that of the computed calls.
    """

    def __init__(
        self,
        policy: Policy,
        script: Script,
        watch: Stopwatch,
        rows: int,
        keep_cache: bool,
        calls: range = ALL_CALLS,
    ) -> None:
        self.name = "generate, cache kept" if keep_cache else "generate"
        self.policy, self.tokens, self.script, self.watch = policy, policy.tokens, script, watch
        self.rows, self.keep_cache, self.calls = rows, keep_cache, calls
        self.work: Counter[str] = Counter()  # `calls`, and by phase what they ask of the model: see `scale`
        self.computed: Counter[str] = Counter()  # the same of those that were computed
        self.ends = [i for text in (END, f" {END}") for i in self.tokens.encode(text)]
        self._views: dict[Key, View] = {}
        self._roles: dict[Key, str] = {}
        self._answers: dict[Key, list[np.ndarray]] = {}
        self._replied: dict[Key, int] = {}  # how many of its recorded replies a seat has made
        self._caches: dict[Key, list[tuple[Tensor, Tensor]]] = {}  # by layer, keys and values (H, t, D)
        self._forced = Forced([])

    @torch.no_grad()
    def act(self, requests: Sequence[Request]) -> list[Reply]:
        """Answers all that is asked at once, then replies wherever a reply is owed."""
        for r in requests:
            view = self._views.setdefault(r.key, View(self.tokens))
            self._roles[r.key] = r.role
            view.observe(r.text, r.questions, r.step)
        asked = [r for r in requests if r.questions]
        owing = [r for r in requests if r.turn != TurnKind.WAIT]
        if not asked and not owing:
            return []
        computes = self.work["calls"] in self.calls
        work = Counter(calls=1, questions=self._held(asked), beliefs=sum(len(r.questions) for r in asked))
        if computes:
            for keys in self._batches([r.key for r in asked]):
                self._answer(keys)
        else:
            for r in asked:
                known = [np.full(len(q.candidates), 1 / len(q.candidates)) for q in r.questions]
                self._answers.setdefault(r.key, []).extend(known)
        for r in owing:
            self._views[r.key].cue(r.options)
        work["prefill"] = self._held(owing)
        replies = []
        if computes:
            with self._clocked():
                for kind in (TurnKind.CHOOSE, TurnKind.SPEAK):  # a choice is one token: it waits for no message
                    owed = {r.key: r for r in owing if r.turn == kind}
                    for keys in self._batches(list(owed)):
                        replies += self._reply([owed[key] for key in keys])
        else:
            replies = [self._said(r, self._due(r.key)) for r in owing]
        work["sampling"] = sum(len(reply.ids) for reply in replies)
        work["decode"] = work["sampling"] - len(replies)
        self.work += work
        if computes:
            self.computed += work
        return replies

    def _held(self, requests: Sequence[Request]) -> int:
        """Tokens of these seats' histories."""
        return sum(len(self._views[r.key].stream) for r in requests)

    def scale(self, seconds: dict[str, float]) -> None:
        """From what the computed calls took to all calls, in place. Each phase by its own work in all calls over that
        in the computed ones, as histories grow and calls differ: tokens of the histories to be read (prefill for
        replies, `questions` for belief answers), tokens
        to be written after a reply's first (decode), tokens to be sampled, questions to be answered (beliefs). What
        else a turn takes, every call did."""
        for phase in self.computed.keys() - {"calls"}:
            seconds[phase] *= self.work[phase] / self.computed[phase]

    @contextmanager
    def _clocked(self) -> Iterator[None]:
        """Clocks the model's passes in `generate` apart: the first of a call reads, the others decode."""
        model_forward: Any = self.policy.lm.forward
        reading, writing = self.watch.wrap("prefill", model_forward), self.watch.wrap("decode", model_forward)

        @functools.wraps(model_forward)  # `generate` looks at its signature
        def forward(*args: Any, **kwargs: Any) -> Any:
            return (writing if self._forced.step else reading)(*args, **kwargs)

        with replaced(self.policy.lm, {"forward": forward}):
            yield

    def _batches(self, keys: Sequence[Key]) -> list[list[Key]]:
        """At most `rows` at a time, of similar length."""
        order = sorted(keys, key=lambda key: len(self._views[key].stream))
        return [order[i : i + self.rows] for i in range(0, len(order), self.rows)]

    def _reply(self, requests: Sequence[Request]) -> list[Reply]:
        keys = [r.key for r in requests]
        due = [self._due(key) for key in keys]
        self._forced = Forced(due)
        ids, mask, cache = self._inputs(keys)
        generate: Any = self.policy.lm.generate
        with self.watch.phase("sampling"):  # the model's passes within are clocked apart
            made = generate(
                input_ids=ids,
                attention_mask=mask,
                past_key_values=cache,
                do_sample=True,
                top_k=0,
                max_new_tokens=max(map(len, due)),
                eos_token_id=self.ends,
                pad_token_id=self.tokens.pad_id,
                logits_processor=LogitsProcessorList([self._forced]),
                return_dict_in_generate=True,
            )
        written = made.sequences[:, ids.shape[1] :]
        if self.keep_cache:  # what came back holds all but the last token that was sampled
            lengths = torch.tensor([len(reply) for reply in due], device=mask.device)
            own = torch.arange(written.shape[1] - 1, device=mask.device)[None] < lengths[:, None]
            self._keep(keys, made.past_key_values, torch.cat([mask.bool(), own], 1))
        replies = []
        for r, row, recorded in zip(requests, written.tolist(), due, strict=True):
            reply = tuple(row[: len(recorded)])
            assert reply == recorded, (reply, recorded)
            replies.append(self._said(r, reply))
        return replies

    def _due(self, key: Key) -> tuple[int, ...]:
        """The recorded reply that a seat makes next."""
        return self.script.replies[key][self._replied.get(key, 0)]

    def _said(self, r: Request, reply: tuple[int, ...]) -> Reply:
        """A reply's ids as the reply."""
        self._replied[r.key] = self._replied.get(r.key, 0) + 1
        choice = r.turn == TurnKind.CHOOSE
        legal = tuple(self.tokens.label(r.options)[0]) if choice else ()
        text = r.options[legal.index(reply[0])] if choice else self.tokens.reply_text(reply)
        start = self._views[r.key].reply(reply, Kind.CHOICE if choice else Kind.SPEECH)
        return Reply(r.key, text, reply, start, (0.0,) * len(reply), legal=legal)

    def _answer(self, keys: Sequence[Key]) -> None:
        ids, mask, cache = self._inputs(keys)
        new = ids.shape[1] - (cache.get_seq_length() if cache is not None else 0)
        # With a cache what is read for an answer need not be read for the next reply.
        with self.watch.phase("prefill" if self.keep_cache else "questions"):
            positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -new:]
            made = self.policy.lm.base_model(
                input_ids=ids[:, -new:],
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=self.keep_cache,
            )
        with self.watch.phase("beliefs"):
            rows, places, candidates, answers = [], [], [], []
            for row, key in enumerate(keys):
                view, known = self._views[key], self._answers.setdefault(key, [])
                for asked in view.asked[len(known) :]:
                    rows.append(row)
                    places.append(new - (len(view.stream) - asked.position))
                    candidates.append(asked.candidate_ids)
                    answers.append(known)
            logits = self.policy.logits(made.last_hidden_state[rows, places])  # (N, V)
            width = max(map(len, candidates))
            padded = torch.tensor([[*own, *[-1] * (width - len(own))] for own in candidates], device=logits.device)
            scores = logits.gather(1, padded.clamp_min(0)).masked_fill(padded < 0, -torch.inf)  # (N, K)
            for known, own, probs in zip(answers, candidates, scores.double().softmax(-1).cpu().numpy(), strict=True):
                known.append(probs[: len(own)])
        if self.keep_cache:
            self._keep(keys, made.past_key_values, mask.bool())

    def _inputs(self, keys: Sequence[Key]) -> tuple[Tensor, Tensor, DynamicCache | None]:
        """Ids and mask (R, c + n), and the cache of the first c of them, None without one.

        Row by row: what is cached, then what is new, both padded on the left.
        """
        streams = [self._views[key].stream.tokens for key in keys]
        held = [self._caches[key][0][0].shape[1] if key in self._caches else 0 for key in keys]
        c, n = max(held), max(len(s) - h for s, h in zip(streams, held, strict=True))
        ids = np.full((len(keys), c + n), self.tokens.pad_id)
        mask = np.zeros((len(keys), c + n), dtype=np.int64)
        for row, (stream, h) in enumerate(zip(streams, held, strict=True)):
            ids[row, c + n - (len(stream) - h) :] = stream[h:]
            mask[row, c + n - (len(stream) - h) :] = 1
            mask[row, c - h : c] = 1  # the ids of cached places are read by nobody
        device = self.policy.device
        cache = self._joined(keys, held) if self.keep_cache else None
        return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device), cache

    def _joined(self, keys: Sequence[Key], held: Sequence[int]) -> DynamicCache:
        """These seats' caches as one, padded on the left; empty where none of them has read anything."""
        cache, width = DynamicCache(), max(held)
        with self.watch.phase("cache"):
            layers = len(next((self._caches[key] for key in keys if key in self._caches), []))
            for layer in range(layers):
                parts = []
                for kind in (0, 1):  # keys, values
                    some = next(self._caches[key][layer][kind] for key in keys if key in self._caches)
                    whole = some.new_zeros(len(keys), some.shape[0], width, some.shape[2])
                    for row, (key, h) in enumerate(zip(keys, held, strict=True)):
                        if h:
                            whole[row, :, width - h :] = self._caches[key][layer][kind]
                    parts.append(whole)
                cache.update(parts[0], parts[1], layer)
        return cache

    def _keep(self, keys: Sequence[Key], cache: DynamicCache, real: Tensor) -> None:
        """Copies each seat's part out of a cache; `real` (R, c) says which of its places are no padding."""
        with self.watch.phase("cache"):
            for row, key in enumerate(keys):
                own = real[row].nonzero()[:, 0]
                layers: Any = cache.layers
                self._caches[key] = [
                    (layer.keys[row].index_select(1, own), layer.values[row].index_select(1, own)) for layer in layers
                ]

    def finish(self, keys: Sequence[Key]) -> dict[Key, tuple[Stream, list[Belief]]]:
        """The streams and beliefs of finished games."""
        kept = {}
        for key in keys:
            view, answers = self._views.pop(key), self._answers.pop(key, [])
            self._caches.pop(key, None)
            kept[key] = (view.stream, beliefs_of(key[1], self._roles.pop(key), view.asked, answers))
        return kept


def trl_version() -> str | None:
    """Returns the version of the installed TRL, None without one."""
    return version("trl") if importlib.util.find_spec("trl") else None


def trl_iteration(
    policy: Policy,
    script: Script,
    watch: Stopwatch,
    rows: int,
    update_tokens: int,
    update_rows: int,
    calls: range = ALL_CALLS,
) -> tuple[list[Episode], GenerateAgent]:
    """One iteration of TRL's GRPOTrainer: a rollout of many turns, and one optimiser step over its rows.

    The rollout is a `rollout_func`, TRL's own way for many turns: it plays the games as `GenerateAgent` does without a
    cache (TRL keeps none between turns either; `calls` are computed) and hands back one completion a seat, all tokens
    but the first, with `env_mask` on those that were sampled. It hands back the first games alone, as many as make
    `update_rows` rows, at least one. Everything else in its step counts as update, and is scaled to all games by their
    tokens: padding, its forward passes, GRPO's loss, one AdamW step at learning rate 0; what `train()` does around the
    step is `collation`. A game's seats are one group, and a forward pass reads as many rows as `update_tokens` padded
    tokens hold, at least one: of the numbers that divide all rows. No reference
    model, no gradient checkpointing, float32. It learns from no belief question and has no value head: less work than
    ours. Returns the episodes, and the player that `GenerateAgent` was.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that rollout_func is experimental; a fast tokenizer's own hints
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):
        """Its step counts as update; the rollout within is clocked apart."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.step = ExitStack()
            self.step.enter_context(watch.phase("update"))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.step.close()

    players = len(script.streams[0])
    learned = min(max(update_rows // players, 1), len(script.games))  # games
    streams = [stream for own in script.streams[:learned] for stream in own.values()]
    fitting = max(update_tokens // script.longest, 1)
    together = max(n for n in range(1, fitting + 1) if len(streams) % n == 0)  # rows of a pass
    lm = copy.deepcopy(policy.lm)  # the trainer puts a forward pass of its own into it
    actor = Policy(lm, policy.tokens).to(policy.device)
    agent = GenerateAgent(actor, script, watch, rows, keep_cache=False, calls=calls)
    episodes: list[Episode] = []

    def play(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        assert len(prompts) == len(streams), (len(prompts), len(streams))
        lm.eval()
        with watch.phase("bookkeeping"):
            episodes[:] = rollout(script.games, everyone(agent), watch.env(script.make_env), len(script.games))
        lm.train()
        return {
            "prompt_ids": [s.tokens[:1] for s in streams],
            "completion_ids": [s.tokens[1:] for s in streams],
            "env_mask": [[int(kind in (Kind.CHOICE, Kind.SPEECH)) for kind in s.kinds[1:]] for s in streams],
            "logprobs": None,
            "paid": [float(number % 2) for number in range(len(streams))],
        }

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), watch.on_tokens(policy.tokens):
        warnings.simplefilter("ignore")
        trainer = GRPOTrainer(
            model=lm,
            args=GRPOConfig(
                output_dir=folder,
                max_steps=1,
                per_device_train_batch_size=together,
                gradient_accumulation_steps=len(streams) // together,
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
            train_dataset=Dataset.from_dict({"prompt": [str(number) for number in range(learned)]}),
            processing_class=copy.deepcopy(policy.tokens.tokenizer),
            rollout_func=play,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Clock())
        with watch.phase("collation"):  # neither playing nor the step
            trainer.train()
    agent.scale(watch.seconds)
    watch.seconds["update"] *= script.tokens / sum(map(len, streams))
    return episodes, agent
