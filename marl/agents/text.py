"""Agents that read and write plain text, as scripted players do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from envs.core import TurnKind
from marl.agents.base import Key, Player, Reply, Request, uniform_beliefs
from marl.common.errors import UserError
from marl.model.tokens import StreamWriter, Tokens
from marl.types import Belief, Kind, Stream


@dataclass
class TextAgentState:
    """State of a seat: its player, and what is recorded of it."""

    player: Player
    role: str
    view: StreamWriter | None  # the stream, where it is recorded
    answers: list[list[str]] = field(default_factory=list)  # the player's own, to each question of the view


class TextAgent:
    """Seats played without a model. `make(seed, role)` builds the player of a seat.

    With `tokens` each seat's stream is recorded as a language model would have met it, for a base corpus. There a
    player's `answers(question)`, if it has that method, stand for the truth in its recorded beliefs, one belief each,
    so that a base learns to answer as it does. A player with `know(privileged)` is told at its start what a privileged
    critic may know: an oracle, to compare with.
    """

    def __init__(
        self, name: str, make: Callable[[int, str], Player], tokens: Tokens | None = None, style: str | None = None
    ) -> None:
        self.name, self.make, self.tokens, self.style = name, make, tokens, style
        self._states: dict[Key, TextAgentState] = {}

    def act(self, requests: Sequence[Request]) -> list[Reply]:
        replies = []
        for r in requests:
            if r.key not in self._states:
                made = self.make(r.seed, r.role)
                self._states[r.key] = TextAgentState(
                    made, r.role, None if self.tokens is None else StreamWriter(self.tokens)
                )
                if hasattr(made, "know"):
                    made.know(r.privileged)
            state = self._states[r.key]
            if state.view is not None:
                state.view.observe(r.text, r.questions, r.step)
            if r.turn == TurnKind.WAIT:
                state.player.observe(r.text)
            else:
                text = state.player.reply(r.text, r.options)
                replies.append(Reply(r.key, text) if state.view is None else self._record(state.view, r, text))
            if state.view is not None and hasattr(state.player, "answers"):
                state.answers += [state.player.answers(q) for q in r.questions]
        return replies

    def _record(self, view: StreamWriter, r: Request, text: str) -> Reply:
        assert self.tokens is not None
        legal = view.cue(r.options)
        ids: tuple[int, ...]
        if r.turn == TurnKind.CHOOSE:
            if text not in r.options:
                raise UserError(
                    f"The player {self.name!r} of role {r.role} chose {text!r}. Its options are {', '.join(r.options)}."
                )
            ids, kind = (legal[r.options.index(text)],), Kind.CHOICE
        else:
            ids, kind = tuple(self.tokens.encode(text)), Kind.SPEECH
        return Reply(r.key, text, ids, view.reply(ids, kind), (0.0,) * len(ids), 0.0, legal)

    def finish(self, keys: Sequence[Key]) -> dict[Key, tuple[Stream, list[Belief]]]:
        """Streams and beliefs of recorded seats. The beliefs are uniform: these players have no opinion."""
        recorded = {}
        for key in keys:
            state = self._states.pop(key, None)
            if state is None or state.view is None:
                continue
            asked = state.view.asked
            if hasattr(state.player, "answers"):
                asked = [
                    replace(a, question=replace(a.question, answer=answer, also=()))
                    for a, answers in zip(asked, state.answers, strict=True)
                    for answer in answers
                ]
            recorded[key] = (state.view.stream, uniform_beliefs(key[1], state.role, asked))
        return recorded
