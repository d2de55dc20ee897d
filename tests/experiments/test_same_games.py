"""The engine samples what `generate` of transformers samples: one small model's games, by both, as two samples."""

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency, ks_2samp

from envs.core import TurnKind
from experiments.bench.baselines import GenerateAgent
from marl.agents.base import Agent
from marl.agents.model import ModelAgent
from marl.learning.batch import collate, rows_of
from marl.model.policy import Policy, tiny_lm
from marl.model.tokens import Tokens, train_tokenizer
from marl.pretraining.corpus import scripted_texts
from marl.rollout.games import env_maker, game_module, scripted
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from marl.types import Episode
from tests.marl.models import teach

pytestmark = pytest.mark.slow
CONTEXT, LIMIT, AT_ONCE = 1024, 16, 100
ENVS: dict[str, dict[str, Any]] = {
    "dond": {"game": "dond", "style": "compact", "max_entries": 8},
    "among_us": {
        "game": "among_us", "style": "compact", "players": 4, "tasks": 2, "walk_steps": 2, "task_steps": 2,
        "cooldown": 3, "messages_each": 1, "max_steps": 24,
    },
}  # fmt: skip
GAMES = {"dond": 200, "among_us": 100}
TEACHERS = {"dond": "scripted", "among_us": "confidant"}


def taught(game: str) -> Policy:
    """A small model that has seen a few games: its messages end at times of their own, its games in many ways."""
    make_env = env_maker(ENVS[game])
    texts = scripted_texts(game, [make_env], 0, games=20)
    tokens = Tokens(train_tokenizer(texts, game_module(game).COMPACT_TOKENS, 1024))
    torch.manual_seed(0)
    policy = Policy(tiny_lm(tokens.size, hidden_size=32, layers=2, context=CONTEXT), tokens)
    teachers = scripted(game, "" if TEACHERS[game] == "scripted" else TEACHERS[game], tokens)
    shown = rollout(draw_games(9, 9, count=8 if game == "dond" else 6), everyone(teachers), make_env, 8)
    batch = collate(rows_of(shown, {TEACHERS[game]}), {})
    return teach(policy, batch.tokens, batch.reply, 40)


def play(game: str, agent: Agent) -> list[Episode]:
    return rollout(draw_games(3, 1, count=GAMES[game]), everyone(agent), env_maker(ENVS[game]), AT_ONCE)


def facts(episode: Episode) -> dict[str, Any]:
    """A game in numbers, each independent of other games."""
    said = [len(t.reply_ids) for t in episode.turns if t.kind == TurnKind.SPEAK]
    acts = Counter(t.text.strip().split("_")[0] for t in episode.turns if t.kind == TurnKind.CHOOSE)
    return {
        "words": float(np.mean(said)) if said else 0.0,
        "messages": float(len(said)),
        "choices": float(acts.total()),
        **{act: acts[act] / max(acts.total(), 1) for act in ("go", "wait", "do")},  # of Among Us, shares
        "tokens": float(sum(len(s) for s in episode.streams.values())),
        "steps": float(episode.steps),
        "outcome": str(episode.outcome["how"]),
    }


def p_values(some: list[Episode], others: list[Episode]) -> dict[str, float]:
    """P-values of the hypothesis that two samples of games come from one distribution: lengths, and how games end."""
    one, two = [facts(e) for e in some], [facts(e) for e in others]
    found = {
        name: float(ks_2samp([f[name] for f in one], [f[name] for f in two]).pvalue)
        for name in one[0].keys() - {"outcome"}
    }
    ends = sorted({f["outcome"] for f in one + two})
    table = np.array([[sum(f["outcome"] == end for f in each) for end in ends] for each in (one, two)])
    rare = table.sum(0) < 10
    table = np.column_stack([table[:, ~rare], table[:, rare].sum(1)]) if rare.any() else table
    return found | {"outcome": float(chi2_contingency(table).pvalue)}


@pytest.mark.slow
@pytest.mark.parametrize("game", ["dond", "among_us"])
def test_lengths_and_outcomes_are_those_of_generate(game: str) -> None:
    """The two samplers draw different random numbers, so samples of games are compared. Games at another temperature
    show that a difference would be found."""
    policy = taught(game)
    slots = AT_ONCE * len(env_maker(ENVS[game])().possible_agents)
    ours = partial(ModelAgent, "ours", policy, slots=slots, context=CONTEXT, max_new_tokens=LIMIT)
    engine = play(game, ours())
    torch.manual_seed(1)
    plain = play(game, GenerateAgent(policy, 100, CONTEXT, LIMIT))
    same = p_values(engine, plain)
    other = p_values(engine, play(game, ours(temperature=0.5)))
    assert min(same.values()) > 1e-3, same
    assert min(other.values()) < 1e-4, other
