"""A language model's probabilities of everybody's orders in `pure` Diplomacy, given what one seat knows.

The model is asked for each unit's order in the words in which a seat is asked for its own (`PAR?`). Asked about one
unit at once, it tells that unit's order by itself; asked one after another, with the answers, all units' together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from envs.diplomacy.pure import CODES, N, Pure
from marl.decoding.engine import Engine
from marl.intents.press import Tree, asks, choices_of, order_tree
from marl.model.policy import Policy

Floats = NDArray[np.float64]
MOST = 128  # slots: streams that are read, or joint orders that are weighed, at once
GAME = Pure()


def trees_of(state: np.ndarray) -> dict[int, Tree]:
    """The choices of each unit in a position (1, WIDTH), by province."""
    legal = GAME.legal(state)[0]
    return {p: order_tree(p, tuple(np.flatnonzero(legal[p]).tolist())) for p in range(N) if legal[p].any()}


class OrderReader:
    """Reads orders in streams as of `press.talk_view`."""

    def __init__(self, policy: Policy, context: int, at_once: int = 16) -> None:
        self.policy, self.tokens, self.at_once = policy, policy.tokens, at_once
        self.engine = Engine(policy, MOST + 1, context)

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

    @torch.no_grad()
    def joint(self, stream: Sequence[int], state: np.ndarray, orders: np.ndarray, places: Sequence[int]) -> Floats:
        """Log-probabilities (M,) of joint orders (M, N) of the units in `places`, asked in this order."""
        trees, found = trees_of(state), np.zeros(len(orders))
        slot = self.engine.allocate()
        if len(stream) > 1:
            self.engine.read([slot], [stream[:-1]])
        for start in range(0, len(orders), MOST):
            rows = orders[start : start + MOST]
            texts, marks = zip(*(self._written(stream[-1], row, trees, places) for row in rows), strict=True)
            forks = self.engine.fork(slot, len(rows))
            hidden = self.engine.read(forks, texts)
            for fork in forks:
                self.engine.free(fork)
            starts = np.cumsum([0, *(len(text) for text in texts)])
            flat = [(i, s + at, tree, option) for i, (s, own) in enumerate(zip(starts, marks, strict=False))
                    for at, tree, option in own]  # fmt: skip
            logits = self.policy.logits(hidden[[at for _, at, _, _ in flat]]).double().cpu().numpy()
            for (i, _, tree, option), row in zip(flat, logits, strict=True):
                ids = self._ids(tree)
                found[start + i] += row[ids[option]] - np.logaddexp.reduce(row[list(ids.values())])
        self.engine.free(slot)
        return found

    def _written(
        self, last: int, orders: np.ndarray, trees: dict[int, Tree], places: Sequence[int]
    ) -> tuple[list[int], list[tuple[int, Tree, str]]]:
        """Tokens that ask for and answer these orders, and for each choice: where it is read, among what, and which."""
        ids, marks = [last], []
        for place in places:
            ids += self._asked(place)
            tree: Tree = trees[place]
            for option in choices_of(tree, int(orders[place])):
                marks.append((len(ids) - 1, tree, option))
                ids += [self._ids(tree)[option], *self._cue]
                tree = tree[option] if not isinstance(tree[option], int) else tree  # type: ignore[assignment]
            del ids[len(ids) - len(self._cue) :]
        return ids, marks

    @property
    def _cue(self) -> list[int]:
        return self.tokens.format.cue

    def _asked(self, place: int) -> list[int]:
        return [*self.tokens.framed(asks(place), self.tokens.format.heard), *self._cue]

    def _ids(self, tree: Tree) -> dict[str, int]:
        return dict(zip(tree, self.tokens.label(tuple(tree))[0], strict=True))
