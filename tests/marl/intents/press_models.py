"""A small model of Diplomacy's words, scripted games of it, and an action model that is planted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch

from envs.diplomacy.pure import HOMES, N, Pure
from envs.diplomacy_v0 import COMPACT_TOKENS
from marl.intents.press_training import Played, draw_scripted
from marl.model.policy import Policy, tiny_lm
from marl.model.tokens import Tokens, train_tokenizer
from marl.pretraining.corpus import scripted_texts
from marl.rollout.games import env_maker

ENV = {
    "game": "diplomacy", "map_name": "pure", "years": 2, "press": "private", "questions": 1, "style": "compact",
    "message_chars": 60,
}  # fmt: skip


@cache
def speaker() -> Policy:
    """Knows the tokens of the game, and nothing else. Skips a test where the game's package is absent."""
    pytest.importorskip("diplomacy", reason="needs the extra `diplomacy`: pip install 'diplomacy==1.1.2'")
    texts = scripted_texts("diplomacy", [env_maker(ENV)], 0, 4)
    tokens = Tokens(train_tokenizer(texts, COMPACT_TOKENS, 900))
    shape = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 1, "intermediate_size": 64}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Policy(tiny_lm(tokens.size, **shape, context=768), tokens)


@cache
def played(players: str = "careful") -> Played:
    return draw_scripted(ENV, players, 3, 1, 3, speaker().tokens)


class Obedient:
    """Stands for an action model: everybody orders what the last support that is named asks of it, else to hold."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens

    def probabilities(
        self, streams: Sequence[Sequence[int]], states: Sequence[np.ndarray], places: Sequence[Sequence[int]]
    ) -> list[np.ndarray]:
        found = []
        for stream, state, asked in zip(streams, states, places, strict=True):
            legal = Pure().legal(state)[0]
            probs = np.where(legal, 0.001, 0.0)
            named = re.findall(r"([A-Z]{3}) to ([A-Z]{3})", self.tokens.decode(stream))
            for place in asked:
                code = place * N + place
                if named:
                    code = HOMES.index(named[-1][0]) * N + HOMES.index(named[-1][1])
                probs[place, code if legal[place, code] else place * N + place] = 1.0
            found.append(probs / np.maximum(probs.sum(-1, keepdims=True), 1e-9))
        return found
