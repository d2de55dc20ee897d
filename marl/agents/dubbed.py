"""Agents that act with one player's mind and speak with another's words."""

from collections.abc import Sequence

from envs.core import END, TurnKind
from marl.agents.base import Agent, Key, Reply, Request
from marl.agents.model import ModelAgent
from marl.common.errors import UserError
from marl.model.tokens import Tokens
from marl.types import Belief, Stream

SILENCE = f" {END}"  # a message of no words


class Dubbed:
    """Moves and believes as one model and speaks as another, to measure what speech alone is worth.

    Choices, their values and beliefs are the mover's. Messages are sampled by the speaker, or are one fixed text, such
    as `SILENCE`. Both models read everything and take each other's replies for their own, so a policy dubbed by itself
    plays exactly as it does alone.
    """

    def __init__(self, mover: ModelAgent, speaker: ModelAgent | str, name: str) -> None:
        """Mover and speaker must be two agents (perhaps of one policy) with room for all seats, and play no others.

        Raises UserError if they differ in tokenizer or style.
        """
        if isinstance(speaker, ModelAgent):
            assert speaker is not mover, "a speaker needs cache slots of its own: make another agent of the same policy"
            if speaker.tokens.tokenizer.get_vocab() != mover.tokens.tokenizer.get_vocab():
                raise UserError(
                    f"{speaker.name} cannot speak for {mover.name}: their tokenizers differ ({speaker.tokens.size} and "
                    f"{mover.tokens.size} tokens). Choose two policies of one base"
                )
            if speaker.style and mover.style and speaker.style != mover.style:
                raise UserError(
                    f"{speaker.name} cannot speak for {mover.name}: one reads {speaker.style} words and the other "
                    f"{mover.style} ones. Choose two policies that were trained with one env.style"
                )
        self.name, self.tokens, self.style = name, mover.tokens, mover.style
        self.mover, self.speaker = mover, speaker
        self._owed: dict[Key, Request] = {}

    def act(self, requests: Sequence[Request]) -> list[Reply]:
        moves = [r for r in requests if r.turn != TurnKind.SPEAK]  # and what is only read
        speeches = [r for r in requests if r.turn != TurnKind.CHOOSE]  # the same
        if isinstance(self.speaker, str):
            said = [self._recite(r, self.speaker) for r in speeches if r.turn == TurnKind.SPEAK]
            return said + self.mover.act(moves)
        self._owed.update({r.key: r for r in requests if r.turn != TurnKind.WAIT})
        chosen, said = self.mover.act(moves), self.speaker.act(speeches)
        for reply in chosen:
            self.speaker.repeat(self._owed.pop(reply.key), reply.ids)
        for reply in said:
            start = self.mover.repeat(self._owed.pop(reply.key), reply.ids)
            assert start == reply.start, (start, reply.start)  # the two streams are the same
        return chosen + said

    def _recite(self, r: Request, text: str) -> Reply:
        ids = tuple(self.tokens.encode(text))
        return Reply(r.key, text, ids, self.mover.repeat(r, ids), (0.0,) * len(ids))

    def finish(self, keys: Sequence[Key]) -> dict[Key, tuple[Stream, list[Belief]]]:
        """The mover's streams and beliefs."""
        if isinstance(self.speaker, ModelAgent):
            self.speaker.finish(keys)
        return self.mover.finish(keys)


class Alias:
    """An agent under another name, to tell its seats from a namesake's."""

    def __init__(self, agent: Agent, name: str) -> None:
        self.agent, self.name = agent, name
        self.act, self.finish = agent.act, agent.finish
        self.tokens: Tokens | None = getattr(agent, "tokens", None)
        self.style: str | None = getattr(agent, "style", None)
