"""A language model's probabilities of orders in `pure` Diplomacy, read where a seat's own stream would ask for them.

The question (`PAR?`) stands behind the talk so far: this injects an end of the talk, as the last speaker meets it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from envs.diplomacy.pure import CODES, N, Pure
from marl.decoding.engine import Engine
from marl.intents.press import Tree, asks, order_tree
from marl.model.policy import Policy

Floats = NDArray[np.float64]
GAME = Pure()
AT_ONCE = 16  # streams that a reader reads


def trees_of(state: np.ndarray) -> dict[int, Tree]:
    """The choices of each unit in a position (1, WIDTH), by province."""
    legal = GAME.legal(state)[0]
    return {p: order_tree(p, tuple(np.flatnonzero(legal[p]).tolist())) for p in range(N) if legal[p].any()}


class OrderReader:
    """Reads orders in streams as of `press.talk_view`."""

    def __init__(self, policy: Policy, context: int, at_once: int = AT_ONCE) -> None:
        self.policy, self.tokens, self.at_once = policy, policy.tokens, at_once
        self.engine = Engine(policy, at_once, context)

    @torch.no_grad()
    def probabilities(
        self, streams: Sequence[Sequence[int]], states: Sequence[np.ndarray], places: Sequence[Sequence[int]]
    ) -> list[Floats]:
        """Each unit's order by itself, (N, CODES) for each stream: rows of sum 1 for the `places` that are asked for
        and have a unit, else 0."""
        found: list[Floats] = []
        for start in range(0, len(streams), self.at_once):
            part = slice(start, start + self.at_once)
            found += self._read(streams[part], [trees_of(state) for state in states[part]], places[part])
        return found

    def _read(
        self, streams: Sequence[Sequence[int]], trees: Sequence[dict[int, Tree]], places: Sequence[Sequence[int]]
    ) -> list[Floats]:
        slots = [self.engine.allocate() for _ in streams]
        self.engine.read(slots, streams)
        branches, wanted = [], []  # the latter: stream, province, the options and what each chooses, before it
        for i, (stream, own, asked) in enumerate(zip(streams, trees, places, strict=True)):
            mine: list[tuple[int, tuple[int, ...]]] = []
            for place in asked:
                if place not in own:
                    continue
                ask = self._asked(place)
                mine.append((len(stream), tuple(ask)))
                wanted.append((i, place, "", own[place]))
                for option, rest in own[place].items():
                    if not isinstance(rest, int):
                        mine.append((len(stream), (*ask, self._ids(own[place])[option], *self._cue)))
                        wanted.append((i, place, option, rest))
            branches.append(mine)
        hidden = self.engine.read_beside(slots, branches)
        for slot in slots:
            self.engine.free(slot)
        logits = self.policy.logits(hidden).double().cpu().numpy()
        found = [np.zeros((N, CODES)) for _ in streams]
        share: dict[tuple[int, int, str], float] = {}
        for (i, place, before, tree), row in zip(wanted, logits, strict=True):
            odds = row[list(self._ids(tree).values())]
            odds = np.exp(odds - odds.max())
            for (option, leaves), prob in zip(tree.items(), odds / odds.sum(), strict=True):
                if isinstance(leaves, int):
                    found[i][place, leaves] = prob * share.get((i, place, before), 1.0)
                else:
                    share[i, place, option] = prob
        return found

    @property
    def _cue(self) -> list[int]:
        return self.tokens.format.cue

    def _asked(self, place: int) -> list[int]:
        return [*self.tokens.framed(asks(place), self.tokens.format.heard), *self._cue]

    def _ids(self, tree: Tree) -> dict[str, int]:
        ids, listing, rests = self.tokens.label(tuple(tree))
        assert not listing and not any(rests), f"orders must be single tokens: {tuple(tree)}"
        return dict(zip(tree, ids, strict=True))
