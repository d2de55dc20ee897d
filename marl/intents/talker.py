"""Draws messages for a planned intent, until enough of them pass the filters; what the players of all games share."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from envs.core import Style
from envs.dond.replies import MESSAGE
from marl.agents.base import Key
from marl.agents.model import ModelAgent, ModelAgentState
from marl.common.errors import UserError
from marl.intents import filters
from marl.intents.draws import Draw, draws_for, words_of

if TYPE_CHECKING:
    from marl.intents.agent import CiceroConfig

UNFINISHED = "unfinished"  # of a message that did not end, or that the action model has no room to read
Mind = TypeVar("Mind")  # what an agent has planned for a reply


class Talker(ModelAgent, Generic[Mind]):
    """A language model that draws several messages for one reply. `counts`: draws, and by whom they were refused."""

    cicero: CiceroConfig
    counts: Counter[str]
    tag = MESSAGE  # that its messages begin with
    ranks = True  # whether the last filter compares several candidates
    tried = silent = 0  # replies that messages were drawn for, and those of them for which none passed

    @staticmethod
    @abstractmethod
    def more_slots(config: CiceroConfig) -> tuple[int, int]:
        """Returns the cache slots of its own model beside those of its seats, and those of its action model."""

    @abstractmethod
    def _filter(self, key: Key, mind: Mind, fresh: Sequence[Draw], earlier: Sequence[Draw]) -> None:
        """Applies all filters but the last to messages that were just drawn."""

    def _by_value(self, key: Key, mind: Mind, left: Sequence[Draw]) -> None:
        """Refuses the candidates of least value, where a game `ranks` them."""

    def _said_once(self, fresh: Sequence[Draw], before: Sequence[str]) -> list[Draw]:
        """Refuses unfinished messages, and repetitions of what was said `before`. Returns the others."""
        for draw in fresh:
            if not draw.text:
                draw.refused = UNFINISHED
            elif self.cicero.repetition and filters.repeats(draw.text, before):
                draw.refused = filters.REPETITION
        return [draw for draw in fresh if not draw.refused]

    def _words(self, ids: Sequence[int]) -> str:
        """Returns what the others would read of a reply; empty if it is unfinished or no message."""
        return words_of(ids, self.tokens)

    def _converse(self, key: Key, state: ModelAgentState, mind: Mind) -> list[Draw]:
        """Draws messages until enough pass the filters. Returns all, in the order in which they were drawn."""
        config = self.cicero
        drawn: list[Draw] = []
        by_value = self.ranks and config.value < 1
        wanted = config.candidates if by_value else 1
        while len(drawn) < config.draws and (passed := sum(not d.refused for d in drawn)) < wanted:
            more = self._draw(state, min(wanted - passed, config.draws - len(drawn)), len(drawn))
            self._filter(key, mind, more, drawn)
            drawn += more
        if by_value:
            self._by_value(key, mind, [d for d in drawn if not d.refused])
        self.counts["drawn"] += len(drawn)
        self.counts.update(f"refused/{draw.refused}" for draw in drawn if draw.refused)
        self.tried += 1
        self.silent += all(draw.refused for draw in drawn)
        return drawn

    def refusals(self) -> str:
        """Says which filter refused how much, if most replies found no message that passed; empty if not."""
        if 2 * self.silent <= self.tried:
            return ""
        drawn, found = self.counts["drawn"], self.counts.most_common()
        shares = [f"{k.removeprefix('refused/')} {n / drawn:.0%}" for k, n in found if k.startswith("refused/")]
        return (
            f"{self.name}: no message passed the filters for {self.silent} of {self.tried} replies. Of {drawn} draws "
            f"were refused: {', '.join(shares)}"
        )

    def _draw(self, state: ModelAgentState, count: int, done: int) -> list[Draw]:
        """Draws messages after the seat's stream; `done`: how many there are already."""
        limit = min(state.limit, self._free(state))
        found = draws_for(
            self.engine, state, count, done, limit, temperature=self.temperature, top_p=self.cicero.top_p, tag=self.tag
        )
        return [Draw(ids, own, self._words(ids)) for ids, own in found]

    def _play(self, state: ModelAgentState, ids: list[int], logprobs: list[float]) -> None:
        """Replies with these ids instead of the model's own sample."""
        stream = state.view.stream.tokens
        self.engine.rewind(state.slot, stream)
        state.read, state.ids, state.logprobs = len(stream), ids, logprobs


def check_compact(name: str, style: str | None) -> None:
    """Refuses another style of text than compact, for players that read it alone."""
    if style not in (None, Style.COMPACT.value):
        raise UserError(f"{name}: talks with a plan in compact style alone, and env.style={style}. Leave it out")
