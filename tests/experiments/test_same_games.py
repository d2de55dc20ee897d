"""The engine samples what `generate` of transformers samples: one small model's games, by both, as two samples."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.stats import chi2_contingency, ks_2samp
from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor

from envs.core import TurnKind
from experiments.baselines import GenerateAgent
from experiments.measure import Stopwatch
from experiments.workload import Script
from marl.agents import Agent, ModelAgent, Reply, Request
from marl.batch import collate, seats_of
from marl.games import env_maker, game_module, scripted
from marl.policy import Policy, tiny_lm
from marl.pretrain import scripted_texts
from marl.rollout import draw_games, everyone, rollout
from marl.tokens import Tokens, train_tokenizer
from marl.types import Episode, Kind
from tests.marl.models import teach

GAMES, CONTEXT, LIMIT = 200, 1024, 16
ENV: dict[str, Any] = {"game": "dond", "style": "compact", "max_entries": 8}


class SamplingAgent(GenerateAgent):
    """`generate` for every turn over the whole history, which draws its own tokens from torch's generator."""

    def __init__(self, policy: Policy, script: Script) -> None:
        super().__init__(policy, script, Stopwatch(torch.device("cpu")), rows=100, keep_cache=False)

    def _reply(self, requests: Sequence[Request]) -> list[Reply]:
        ids, mask, _ = self._inputs([r.key for r in requests])
        banned = self.policy.speech_mask.isinf().nonzero()[:, 0].tolist()
        generate: Any = self.policy.lm.generate
        written = generate(
            input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=LIMIT,
            eos_token_id=self.ends, pad_token_id=self.tokens.pad_id,
            logits_processor=LogitsProcessorList([SuppressTokensLogitsProcessor(banned)]),
        )[:, ids.shape[1] :].tolist()  # fmt: skip
        replies = []
        for r, row in zip(requests, written, strict=True):
            size = next((i + 1 for i in range(len(row)) if self.tokens.ends(row[: i + 1])), len(row))
            reply = tuple(row[:size])
            start = self._views[r.key].reply(reply, Kind.SPEECH)
            replies.append(Reply(r.key, self.tokens.reply_text(reply), reply, start, (0.0,) * len(reply)))
        return replies


def taught() -> Policy:
    """A small model that has seen a few games: its messages end at times of their own, its games in many ways."""
    make_env = env_maker(ENV)
    texts = scripted_texts("dond", [make_env], 0, games=20)
    tokens = Tokens(train_tokenizer(texts, game_module("dond").COMPACT_TOKENS, 1024))
    torch.manual_seed(0)
    policy = Policy(tiny_lm(tokens.size, hidden_size=32, layers=2, context=CONTEXT), tokens)
    shown = rollout(draw_games(9, 9, count=8), everyone(scripted("dond", tokens=tokens)), make_env, 8)
    batch = collate(seats_of(shown, {"scripted"}), {})
    return teach(policy, batch.tokens, batch.reply, 40)


def play(agent: Agent) -> list[Episode]:
    return rollout(draw_games(3, 1, count=GAMES), everyone(agent), env_maker(ENV), 100)


def facts(episode: Episode) -> dict[str, Any]:
    """A game in numbers, each independent of other games."""
    said = [len(t.reply_ids) for t in episode.turns if t.kind == TurnKind.SPEAK]
    return {
        "words": float(np.mean(said)) if said else 0.0,
        "messages": float(len(said)),
        "tokens": float(sum(len(s) for s in episode.streams.values())),
        "steps": float(episode.steps),
        "outcome": str(episode.outcome["how"]),
    }


def p_values(some: list[Episode], others: list[Episode]) -> dict[str, float]:
    """Of the hypothesis that two samples of games come from one distribution: lengths, and how games end."""
    one, two = [facts(e) for e in some], [facts(e) for e in others]
    found = {
        name: float(ks_2samp([f[name] for f in one], [f[name] for f in two]).pvalue)
        for name in ("words", "messages", "tokens", "steps")
    }
    ends = sorted({f["outcome"] for f in one + two})
    table = np.array([[sum(f["outcome"] == end for f in each) for end in ends] for each in (one, two)])
    rare = table.sum(0) < 10
    table = np.column_stack([table[:, ~rare], table[:, rare].sum(1)]) if rare.any() else table
    return found | {"outcome": float(chi2_contingency(table).pvalue)}


def test_lengths_and_outcomes_are_those_of_generate() -> None:
    """Neither sampler knows the other's random numbers. A third, at another temperature, shows what is found out."""
    policy = taught()
    ours = partial(ModelAgent, "ours", policy, slots=400, context=CONTEXT, max_new_tokens=LIMIT)
    engine = play(ours())
    torch.manual_seed(1)
    plain = play(SamplingAgent(policy, Script([], env_maker(ENV), [], {}, {}, 0, 0, {})))
    same = p_values(engine, plain)
    other = p_values(engine, play(ours(temperature=0.6)))
    assert min(same.values()) > 0.01, same
    assert min(other.values()) < 1e-4, other
