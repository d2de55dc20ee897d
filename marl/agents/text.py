"""Agents that read and write plain text, as scripted players do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from envs.core import TurnKind
from marl.agents.base import Key, Player, Reply, Request, beliefs_of
from marl.model.tokens import Tokens, View
from marl.types import Belief, Kind, Stream


class TextAgent:
    """Seats played without a model; `make` builds one player a seat from the seat's seed and its role.

    A recorded player that has `answers(question)` is asked: what it says stands for the truth in its recorded beliefs,
    one for each answer, so that a base learns to answer as it does. A player that has `know(privileged)` is told at
    its start what a privileged critic may know, which no other player ever learns: an oracle, to compare with.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[int, str], Player],
        tokens: Tokens | None = None,
        style: str | None = None,
    ) -> None:
        """With `tokens`, each seat's stream is written as a language model would have met it (for a base corpus)."""
        self.name, self.make, self.tokens, self.style = name, make, tokens, style
        self._players: dict[Key, Player] = {}
        self._views: dict[Key, View] = {}
        self._roles: dict[Key, str] = {}
        self._answers: dict[Key, list[list[str]]] = {}

    def act(self, requests: Sequence[Request]) -> list[Reply]:
        replies = []
        for r in requests:
            if r.key not in self._players:
                made = self._players[r.key] = self.make(r.seed, r.role)
                self._roles[r.key] = r.role
                if self.tokens is not None:
                    self._views[r.key] = View(self.tokens)
                if hasattr(made, "know"):
                    made.know(r.privileged)
            player = self._players[r.key]
            if self.tokens is not None:
                self._views[r.key].observe(r.text, r.questions, r.step)
            if r.turn == TurnKind.WAIT:
                player.observe(r.text)
            else:
                text = player.reply(r.text, r.options)
                replies.append(Reply(r.key, text) if self.tokens is None else self._record(r, text))
            if self.tokens is not None and hasattr(player, "answers"):
                self._answers.setdefault(r.key, []).extend(player.answers(q) for q in r.questions)
        return replies

    def _record(self, r: Request, text: str) -> Reply:
        assert self.tokens is not None
        view = self._views[r.key]
        legal = view.cue(r.options)
        ids: tuple[int, ...]
        if r.turn == TurnKind.CHOOSE:
            ids, kind = (legal[r.options.index(text)],), Kind.CHOICE
        else:
            ids, kind = tuple(self.tokens.encode(text)), Kind.SPEECH
        return Reply(r.key, text, ids, view.reply(ids, kind), (0.0,) * len(ids), 0.0, legal)

    def finish(self, keys: Sequence[Key]) -> dict[Key, tuple[Stream, list[Belief]]]:
        """Recorded seats have no opinion of their own: their beliefs are uniform."""
        views = {}
        for key in keys:
            self._players.pop(key, None)
            role = self._roles.pop(key, "")
            if key in self._views:
                view, answers = self._views.pop(key), self._answers.pop(key, None)
                asked = view.asked
                if answers is not None:
                    asked = [
                        replace(a, question=replace(a.question, answer=answer, also=()))
                        for a, given in zip(asked, answers, strict=True)
                        for answer in given
                    ]
                uniform = [np.full(len(a.candidate_ids), 1 / len(a.candidate_ids)) for a in asked]
                views[key] = (view.stream, beliefs_of(key[1], role, asked, uniform))
        return views
