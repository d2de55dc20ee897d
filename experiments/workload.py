"""The games that every engine of the benchmark plays: recorded once from scripts, then played again token for token.

Random weights would say other things in every engine and every precision. So scripted players play first, their streams
are kept, and each engine computes and samples as it always does, after which the sampled token is replaced by the
recorded one. All engines thus play the same games, read the same tokens and sample replies of the same lengths. What is
left out: clocks (measure.py), the engines that are compared (baselines.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from envs.core import END
from experiments.measure import Counts, Stopwatch
from marl.agents import Key, ModelAgent, ModelSeat, Player, Reply, Request, TextAgent, uniforms
from marl.engine import Engine, Writer
from marl.errors import UserError
from marl.games import env_maker, scripts_module
from marl.policy import Policy
from marl.rollout import Game, draw_games, everyone, rollout
from marl.tokens import Tokens
from marl.types import Episode, Stream

FILLER = " i"  # one token of the small vocabularies; what it says does not matter


@dataclass(frozen=True)
class Script:
    """Recorded games. `replies` by seat, in order; `drawn` maps a seat's uniform number at a position to its token."""

    games: list[Game]
    make_env: Callable[[], Any]
    streams: list[dict[str, Stream]]  # of each game, by seat
    replies: dict[Key, list[tuple[int, ...]]]
    drawn: dict[float, int]
    steps: int  # of the longest game
    answers: int  # belief questions
    cut: int  # the setting that the games were cut at

    @property
    def seats(self) -> int:
        return sum(len(streams) for streams in self.streams)

    @property
    def tokens(self) -> int:
        return sum(len(s) for streams in self.streams for s in streams.values())

    @property
    def longest(self) -> int:
        """Tokens of the longest stream."""
        return max(len(s) for streams in self.streams for s in streams.values())

    @property
    def sampled(self) -> int:
        return len(self.drawn)

    def facts(self) -> dict[str, int]:
        """What was played, in numbers."""
        turns = sum(len(replies) for replies in self.replies.values())
        return {
            "games": len(self.games), "slots": self.seats, "steps": self.steps, "turns": turns, "tokens": self.tokens,
            "sampled": self.sampled, "answers": self.answers, "longest_stream": self.longest,
        }  # fmt: skip

    def check(self, episodes: Sequence[Episode]) -> None:
        """AssertionError where these episodes are not the recorded ones, token for token."""
        for number, (episode, streams) in enumerate(zip(episodes, self.streams, strict=True)):
            for agent, stream in streams.items():
                played = episode.streams[agent].tokens
                assert played == stream.tokens, (number, agent, len(played), len(stream))


class Wordy:
    """A scripted player whose spoken messages are stretched to a given number of tokens."""

    def __init__(self, player: Player, tokens: Tokens, reply_tokens: int) -> None:
        self.player, self.tokens, self.reply_tokens = player, tokens, reply_tokens

    def observe(self, text: str) -> None:
        self.player.observe(text)

    def reply(self, text: str, options: Sequence[str] = ()) -> str:
        said = self.player.reply(text, options)
        if options or "[propose]" in said:  # a choice, or a form that the game reads: neither can be stretched
            return said
        body = said.removesuffix(f" {END}")
        missing = self.reply_tokens - len(self.tokens.encode(said))
        return body + FILLER * missing + f" {END}"


class Recorder(TextAgent):
    """Scripted players, with what the replay needs: each seat's seed, and how long streams were at each step."""

    def __init__(self, make: Callable[[int, str], Player], tokens: Tokens) -> None:
        super().__init__("recorded", make, tokens)
        self.seeds: dict[Key, int] = {}
        self.longest: dict[int, int] = {}  # by step, tokens of the longest stream so far

    def act(self, requests: Sequence[Request]) -> list[Reply]:
        replies = super().act(requests)
        for r in requests:
            self.seeds[r.key] = r.seed
            self.longest[r.step] = max(self.longest.get(r.step, 0), len(self._views[r.key].stream))
        return replies


def record(
    env: Mapping[str, Any], cut: str, context: int, games: int, tokens: Tokens, reply_tokens: int, seed: int
) -> Script:
    """Games of scripted players, cut so that the longest stream just fits `context`.

    `cut` names the setting of the game that ends it early (`max_steps`, `max_entries`); its value in `env` is the most.
    Raises UserError where not even its smallest value fits.
    """
    limit, some = int(env[cut]), min(games, 64)
    episodes, recorder = _play(env, draw_games(seed, count=some), tokens, reply_tokens)
    if _longest(episodes) > context:
        limit = min(limit, _fitting(recorder, context))
    while limit >= 1:
        made = {**env, cut: limit}
        episodes, recorder = _play(made, draw_games(seed, count=games), tokens, reply_tokens)
        if _longest(episodes) <= context:
            return _script(made, draw_games(seed, count=games), episodes, recorder, limit)
        limit = min(limit - max(1, limit // 20), _fitting(recorder, context))
    raise UserError(f"context={context}: not even the shortest game fits; raise it")


def _longest(episodes: Sequence[Episode]) -> int:
    """Tokens of the longest stream."""
    return max(len(stream) for episode in episodes for stream in episode.streams.values())


def _fitting(recorder: Recorder, context: int) -> int:
    """About how many steps fit: a game that is cut there may still end with more."""
    return max((step for step, longest in recorder.longest.items() if longest <= context), default=0) + 1


def _play(
    env: Mapping[str, Any], games: Sequence[Game], tokens: Tokens, reply_tokens: int
) -> tuple[list[Episode], Recorder]:
    scripts = scripts_module(env["game"])
    recorder = Recorder(
        lambda seed, role: Wordy(scripts.make_player(scripts.DEFAULT, seed, role), tokens, reply_tokens), tokens
    )
    return rollout(games, everyone(recorder), env_maker(env), len(games)), recorder


def _script(
    env: Mapping[str, Any], games: list[Game], episodes: Sequence[Episode], recorder: Recorder, cut: int
) -> Script:
    replies: dict[Key, list[tuple[int, ...]]] = {}
    drawn: dict[float, int] = {}
    for number, episode in enumerate(episodes):
        for turn in episode.turns:
            key = (number, turn.agent)
            replies.setdefault(key, []).append(turn.reply_ids)
            places = np.arange(turn.start, turn.start + len(turn.reply_ids), dtype=np.uint64)
            seeds = np.full(len(places), recorder.seeds[key], dtype=np.uint64)
            drawn.update(zip(uniforms(seeds, places).tolist(), turn.reply_ids, strict=True))
    assert len(drawn) == sum(len(ids) for own in replies.values() for ids in own), "two places drew the same number"
    return Script(
        games=games,
        make_env=env_maker(env),
        streams=[episode.streams for episode in episodes],
        replies=replies,
        drawn=drawn,
        steps=max(episode.steps for episode in episodes),
        answers=sum(len(episode.beliefs) for episode in episodes),
        cut=cut,
    )


class ReplayEngine(Engine):
    """This project's engine, clocked; each sampled token is replaced by the recorded one.

    The number that decides a sample is the seat's own at that position, so it tells whose token this is.
    """

    def __init__(self, policy: Policy, slots: int, context: int, script: Script, watch: Stopwatch) -> None:
        super().__init__(policy, slots, context)
        self.script, self.watch = script, watch
        self.counts = {"prefill": Counts(), "decode": Counts()}
        spoken = (policy.speech_mask == 0).cpu().numpy()  # (V,)
        self._place, self._spoken = spoken.cumsum() - 1, int(spoken.sum())  # (V,): a token's among those

    def read(self, slots: Sequence[int], chunks: Sequence[Sequence[int]]) -> torch.Tensor:
        # A reply's tokens come one at a time; whatever is read before a reply has a cue behind it, so at least two.
        phase = "decode" if max(map(len, chunks)) == 1 else "prefill"
        start = self.lengths[list(slots)]
        with self.watch.phase(phase):
            hidden = super().read(slots, chunks)
        self.counts[phase].add(start, np.array([len(chunk) for chunk in chunks]))
        return hidden

    def sample(
        self, hidden: torch.Tensor, legal: Sequence[tuple[int, ...]], temperature: float, uniform: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        with self.watch.phase("sampling"):
            _, logprobs = super().sample(hidden, legal, temperature, uniform)
            return np.array([self.script.drawn[u] for u in uniform.tolist()]), logprobs

    def write(
        self, slots: Sequence[int], ids: Sequence[int], left: Sequence[int], uniform: np.ndarray, temperature: float
    ) -> tuple[list[list[int]], list[list[float]]]:
        """As it is, at an infinite temperature: all that can be said is then as likely, so that a number in the middle
        of the recorded token's share draws it, within a captured step, too. Sampling is part of decoding here.
        """
        recorded = [[self.script.drawn.get(u, -1) for u in row] for row in uniform.tolist()]  # -1: the reply is over
        forcing = (self._place[recorded] + 0.5) / self._spoken
        start = self.lengths[list(slots)]
        with self.watch.phase("decode"):
            written = super().write(slots, ids, left, forcing, math.inf)
        sizes = np.array([len(own) for own in written[0]])
        for step in range(uniform.shape[1]):
            going = sizes > step
            self.counts["decode"].add(start[going] + step, np.ones(int(going.sum()), dtype=np.int64))
        self.counts["decode"].outputs += int(sizes.sum())
        return written

    def _kept(self, size: int, end: int, temperature: float) -> Writer:
        with self.watch.phase("capture"):
            return super()._kept(size, end, temperature)


class ReplayAgent(ModelAgent):
    """This project's player, clocked, on recorded games."""

    engine: ReplayEngine

    def __init__(self, policy: Policy, script: Script, context: int, watch: Stopwatch, decode_steps: int = 1) -> None:
        longest = max(len(ids) for own in script.replies.values() for ids in own)
        super().__init__(
            "ours", policy, slots=script.seats, context=context, max_new_tokens=longest, decode_steps=decode_steps
        )
        self.engine = ReplayEngine(policy, script.seats, context, script, watch)
        self.watch = watch

    def _answer(self, seats: Sequence[ModelSeat], hidden: torch.Tensor) -> None:
        with self.watch.phase("beliefs"):
            super()._answer(seats, hidden)
