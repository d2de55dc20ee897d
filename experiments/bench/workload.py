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
from experiments.bench.measure import Counts, Stopwatch
from marl.agents.base import Key, Player, Reply, Request
from marl.agents.model import ModelAgent, ModelSeat
from marl.agents.text import TextAgent
from marl.common.errors import UserError
from marl.decoding.engine import Engine
from marl.decoding.graphs import Writer
from marl.decoding.sampling import uniforms
from marl.model.policy import Policy
from marl.model.tokens import Tokens
from marl.rollout.games import env_maker, scripts_module
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import Game, draw_games, sampling_seed
from marl.types import Episode, Stream

FILLER = " i"  # one token of the small vocabularies; what it says does not matter
FULL = 0.75  # of the context: a game whose longest stream is shorter ended by itself, and is left out
DRAWN = 8  # times as many games as are wanted are tried at most, to find full ones


@dataclass(frozen=True)
class Script:
    """Recorded games. `replies` by seat, in order; `drawn` maps a seat's uniform number at a position to its token.
    `cuts`: by a game's seed, the steps after which it is cut; a game that ends by itself before is not there."""

    games: list[Game]
    make_env: Callable[[], Any]
    streams: list[dict[str, Stream]]  # of each game, by seat
    replies: dict[Key, list[tuple[int, ...]]]
    drawn: dict[float, int]
    steps: int  # of the longest game
    answers: int  # belief questions
    cuts: dict[int, int]

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
        """Counts what was played."""
        turns = sum(len(replies) for replies in self.replies.values())
        return {
            "games": len(self.games), "slots": self.seats, "steps": self.steps, "turns": turns, "tokens": self.tokens,
            "sampled": self.sampled, "answers": self.answers, "longest_stream": self.longest,
            "mean_stream": round(self.tokens / self.seats),
        }  # fmt: skip

    def check(self, episodes: Sequence[Episode]) -> None:
        """AssertionError where these episodes are not the recorded ones, token for token."""
        for number, (episode, streams) in enumerate(zip(episodes, self.streams, strict=True)):
            for agent, stream in streams.items():
                played = episode.streams[agent].tokens
                assert played == stream.tokens, (number, agent, len(played), len(stream))


class Cut:
    """A game's environment, which ends each game after its own number of steps: `cuts` by seed, looked up at each step.

    The rules know nothing of it: what players read before is what they would have read in a longer game. Nobody reads
    what the last step brought, and nobody is asked of it.
    """

    def __init__(self, env: Any, cuts: Mapping[int, int]) -> None:
        self.env, self.cuts = env, cuts
        self.seed, self.steps, self.over = 0, 0, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    @property
    def agents(self) -> list[str]:
        return [] if self.over else self.env.agents

    def reset(self, seed: int, options: dict[str, Any] | None = None) -> Any:
        self.seed, self.steps, self.over = seed, 0, False
        return self.env.reset(seed=seed, options=options)

    def step(self, actions: dict[str, Any]) -> Any:
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        self.steps += 1
        if self.steps >= self.cuts.get(self.seed, math.inf):
            self.over = True
            truncated = dict.fromkeys(truncated, True)
            cut = {"how": "cut", "winner": None}
            infos = {agent: {"outcome": cut, **info, "questions": ()} for agent, info in infos.items()}
        return observations, rewards, terminated, truncated, infos


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
    """Scripted players that stop a game in which a stream outgrew the context: `cuts` is told the last step before it,
    by the game's seed. Keeps how long streams were at each step."""

    def __init__(
        self,
        make: Callable[[int, str], Player],
        tokens: Tokens,
        games: Sequence[Game],
        context: int,
        cuts: dict[int, int],
    ) -> None:
        super().__init__("recorded", make, tokens)
        self.games, self.context, self.cuts = games, context, cuts
        self.grown: list[dict[int, int]] = [{} for _ in games]  # by step, tokens of the game's longest stream

    def act(self, requests: Sequence[Request]) -> list[Reply]:
        replies = super().act(requests)
        for r in requests:
            view = self._seats[r.key].view
            assert view is not None, "streams are recorded where there are tokens"
            number, size = r.key[0], len(view.stream)
            self.grown[number][r.step] = max(self.grown[number].get(r.step, 0), size)
            if size > self.context:
                self.cuts.setdefault(self.games[number].seed, r.step)
        return replies

    def longest(self, number: int) -> int:
        """Tokens of a game's longest stream when it is cut; 0 where not even the first step fits."""
        cut = self.cuts.get(self.games[number].seed, math.inf)
        return max((size for step, size in self.grown[number].items() if step < cut), default=0)


def record(env: Mapping[str, Any], context: int, games: int, tokens: Tokens, reply_tokens: int, seed: int) -> Script:
    """Games of scripted players, each cut at a step of its own: the last at which its longest stream fits `context`.

    Of the games drawn, the first whose longest stream has FULL of the context; where too few of DRAWN times as many
    have, the longest of them. So the games of a smaller number are among those of a larger one, or like them. Raises
    UserError where too few fit at all.
    """
    drawn = draw_games(seed, count=DRAWN * games)
    cuts: dict[int, int] = {}
    sizes: list[int] = []  # of those tried: tokens of the longest stream
    while (missing := games - sum(size >= FULL * context for size in sizes)) > 0 and len(sizes) < len(drawn):
        some = drawn[len(sizes) : len(sizes) + missing]
        _, recorder = play_recorded(env, some, tokens, reply_tokens, context, cuts)
        sizes += [recorder.longest(number) for number in range(len(some))]
    order = sorted(range(len(sizes)), key=lambda number: -min(sizes[number], FULL * context))  # stable: full ones first
    chosen = [drawn[number] for number in sorted(order[:games]) if sizes[number]]
    if len(chosen) < games:
        raise UserError(f"not even the shortest game fits a context of {context} tokens; raise it")
    cuts = {game.seed: cuts[game.seed] for game in chosen if game.seed in cuts}
    episodes, _ = play_recorded(env, chosen, tokens, reply_tokens, context, cuts)
    return _script(env, chosen, episodes, cuts)


def play_recorded(
    env: Mapping[str, Any],
    games: Sequence[Game],
    tokens: Tokens,
    reply_tokens: int,
    context: int,
    cuts: dict[int, int],
) -> tuple[list[Episode], Recorder]:
    """Scripted players' games, cut as `cuts` says and where they outgrow the context, which it is told."""
    scripts = scripts_module(env["game"])
    recorder = Recorder(
        lambda seed, role: Wordy(scripts.make_player(scripts.DEFAULT, seed, role), tokens, reply_tokens),
        tokens,
        games,
        context,
        cuts,
    )
    return rollout(games, everyone(recorder), cut_maker(env, cuts), len(games)), recorder


def cut_maker(env: Mapping[str, Any], cuts: Mapping[int, int]) -> Callable[[], Any]:
    """Makes environments of these settings that cut each game."""
    make_env = env_maker(env)
    return lambda: Cut(make_env(), cuts)


def _script(env: Mapping[str, Any], games: list[Game], episodes: Sequence[Episode], cuts: dict[int, int]) -> Script:
    replies: dict[Key, list[tuple[int, ...]]] = {}
    drawn: dict[float, int] = {}
    for number, (game, episode) in enumerate(zip(games, episodes, strict=True)):
        seeds = {agent: sampling_seed(game, seat) for seat, agent in enumerate(episode.streams)}
        for turn in episode.turns:
            replies.setdefault((number, turn.agent), []).append(turn.reply_ids)
            places = np.arange(turn.start, turn.start + len(turn.reply_ids), dtype=np.uint64)
            own = np.full(len(places), seeds[turn.agent], dtype=np.uint64)
            drawn.update(zip(uniforms(own, places).tolist(), turn.reply_ids, strict=True))
    assert len(drawn) == sum(len(ids) for own in replies.values() for ids in own), "two places drew the same number"
    return Script(
        games=games,
        make_env=cut_maker(env, cuts),
        streams=[episode.streams for episode in episodes],
        replies=replies,
        drawn=drawn,
        steps=max(episode.steps for episode in episodes),
        answers=sum(len(episode.beliefs) for episode in episodes),
        cuts=cuts,
    )


class ReplayEngine(Engine):
    """This project's engine, clocked; each sampled token is replaced by the recorded one.

    The number that decides a sample is the seat's own at that position, so it tells whose token this is.
    """

    def __init__(self, policy: Policy, slots: int, context: int, script: Script, watch: Stopwatch) -> None:
        super().__init__(policy, slots, context)
        self.script, self.watch = script, watch
        self.counts = {"prefill": Counts(), "decode": Counts(), "mixed": Counts()}
        spoken = (policy.speech_mask == 0).cpu().numpy()  # (V,)
        self._place, self._spoken = spoken.cumsum() - 1, int(spoken.sum())  # (V,): a token's among those

    def read(self, slots: Sequence[int], chunks: Sequence[Sequence[int]]) -> torch.Tensor:
        # A reply's tokens come one at a time; whatever is read before a reply has a cue behind it, so at least two.
        writing = [len(chunk) == 1 for chunk in chunks]
        phase = "decode" if all(writing) else "mixed" if any(writing) else "prefill"
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
        """Writes at an infinite temperature: all that can be said is then as likely, so that a number in the middle
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

    def _answer(self, seats: Sequence[ModelSeat], hidden: torch.Tensor, ends: np.ndarray) -> None:
        with self.watch.phase("beliefs"):
            super()._answer(seats, hidden, ends)
