"""Messages that might have been sent instead: drawn from their author in the same place, heard by the same listeners.

Finished games are replayed from their replies. Before each message of a learner the game is copied. The author draws
other replies, the copy shows the listeners each of them, and every listener is asked again. All streams are read once
more for the draws and once for the hearing; at each message their cache slots are forked, so only the new tokens are
read again. With `votes` the recorded turns then continue, word for word, to the next vote, and what each agent would
vote is read off its model. Left out: what the answers are worth (`rewards/speaking.py`).
"""

import copy
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from envs.core import Question, TurnKind
from marl.agents.base import Agent, beliefs_of
from marl.agents.model import ModelAgent
from marl.decoding.engine import Engine
from marl.decoding.sampling import uniforms
from marl.model.tokens import Asked, StreamWriter
from marl.rollout.seeds import RESAMPLED
from marl.types import Belief, Episode, Kind, Stream, Turn, answered

ROWS, MOST_ROWS = 8, 64  # streams read side by side; at most, if `wide`
VOTE = "vote"  # text of the question that stands for a choice among options, some of which are true


@dataclass(eq=False)
class Message:
    """A message and the game before it. `lengths`: how many tokens of its stream each agent had read by then (the
    author: up to the message)."""

    at: tuple[int, int]  # indices of the episode and of the turn
    episode: Episode
    turn: Turn
    env: Any
    lengths: dict[str, int]
    replies: list[list[int]] = field(default_factory=list)  # drawn instead
    heard: list[list[Belief]] = field(default_factory=list)  # answers after each reply

    @property
    def author(self) -> str:
        """Name of the player who wrote it."""
        return self.episode.players[self.turn.agent]


@dataclass(eq=False)
class ForkPoint:
    """A point in an agent's stream, after `length` tokens. For each other message: the tokens that follow, and the
    questions."""

    message: Message
    agent: str
    length: int
    chunks: list[list[int]] = field(default_factory=list)
    asked: list[list[Asked]] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """The stream up to this point."""
        return self.message.episode.streams[self.agent].tokens[: self.length]


def resample(
    episodes: Sequence[Episode],
    make_env: Callable[[], Any],
    agents: Mapping[str, Agent],
    speakers: Collection[str],
    count: int,
    also: Callable[[int, int], Sequence[str]] = lambda game, turn: (),
    wide: bool = False,
    votes: bool = False,
) -> list[Episode]:
    """Fills `Turn.instead` and `otherwise` of every message of these players with `count` other messages.

    `agents`: everybody who played, by the names in `Episode.players`. Only language models draw and are asked.
    `also(game, turn)`, by indices: further replies, as text, after those drawn. `wide`: uses as much memory as the
    agents' own caches; a draw may change if two tokens are equally likely. `votes`: after each reply of `also`, and
    last after the message itself, listeners also answer the question VOTE, if the game goes on to a vote with the same
    turns.
    """
    models = {name: agent for name, agent in agents.items() if isinstance(agent, ModelAgent)}
    env = make_env()
    messages = [m for n, episode in enumerate(episodes) for m in _messages(n, episode, env, models, speakers)]
    for name, model in models.items():
        own = [message for message in messages if message.author == name]
        _draw(model, own, count, wide)
        for message in own:
            message.replies += [model.tokens.encode(text) for text in also(*message.at)]
            message.replies += [list(message.turn.reply_ids)] if votes else []
    points: dict[str, list[ForkPoint]] = {name: [] for name in models}
    for message in messages:
        message.heard = [[] for _ in message.replies]
        for point in _play_others(message, models, range(count, len(message.replies)) if votes else ()):
            points[message.episode.players[point.agent]].append(point)
    most = max((len(message.replies) for message in messages), default=0)
    for name, own_points in points.items():
        _answer(models[name], own_points, most, wide)
    filled = {
        m.at: {
            "instead": tuple(map(tuple, m.heard)),
            "otherwise": tuple(map(models[m.author].tokens.reply_text, m.replies[:count])),
        }
        for m in messages
    }
    empty = {"instead": (), "otherwise": ()}
    return [
        replace(e, turns=tuple(replace(t, **filled.get((n, u), empty)) for u, t in enumerate(e.turns)))
        for n, e in enumerate(episodes)
    ]


def _messages(
    number: int, episode: Episode, env: Any, models: Mapping[str, ModelAgent], speakers: Collection[str]
) -> Iterator[Message]:
    """Replays a game and stops before each message of the speakers."""
    held = {a: models[name] for a, name in episode.players.items() if name in models and a in episode.streams}
    own = {a: model.style for a, model in held.items() if model.style}
    styles = {"styles": own} if any(style != getattr(env, "style", style) for style in own.values()) else {}
    observations, infos = env.reset(seed=episode.seed, options=styles)
    writers = {a: StreamWriter(model.tokens) for a, model in held.items()}
    for step in range(episode.steps):
        for agent, writer in list(writers.items()):
            seen = observations[agent]
            text = seen["text"] if writer.stream.tokens else held[agent].opening(seen["text"])
            writer.observe(text, infos[agent]["questions"], step)
            if seen["turn"] != TurnKind.WAIT:
                writer.cue(seen["options"])
            if len(writer.stream) > len(episode.streams[agent]):  # it outgrew its slot, and read nothing more
                del writers[agent]
        now = {turn.agent: (u, turn) for u, turn in enumerate(episode.turns) if turn.step == step}
        for agent, (_, turn) in now.items():
            if agent in writers and turn.reply_ids:  # it may hold more before the cue, e.g. an intent
                writers[agent].stream = _beginning(episode.streams[agent], turn.start)
        for agent, (u, turn) in now.items():
            if turn.message and agent in writers and turn.reply_ids and episode.players[agent] in speakers:
                lengths = {a: len(writer.stream) for a, writer in writers.items()}
                yield Message((number, u), episode, turn, copy.deepcopy(env), lengths)
        for agent, (_, turn) in now.items():
            if agent in writers and turn.reply_ids:
                writers[agent].reply(turn.reply_ids, Kind.CHOICE if turn.kind == TurnKind.CHOOSE else Kind.SPEECH)
        replies = {agent: turn.text for agent, (_, turn) in now.items()}
        observations, _, _, _, infos = env.step({a: replies.get(a, "") for a in env.agents})


def _beginning(stream: Stream, length: int) -> Stream:
    return Stream(stream.tokens[:length], stream.kinds[:length])


def _fork_engine(agent: ModelAgent, count: int, wide: bool) -> tuple[Engine, int]:
    """Makes an engine for streams side by side, each with `count` forks. Returns it and the number of streams."""
    rows = min(MOST_ROWS, max(ROWS, agent.engine.slots // (count + 1))) if wide else ROWS
    return Engine(agent.policy, rows * (count + 1), agent.engine.context), rows


def _read_streams(
    points: Sequence[ForkPoint], engine: Engine, rows: int
) -> Iterator[tuple[list[int], list[ForkPoint], Tensor]]:
    """Reads streams, several side by side, from point to point. Yields the slots, their points, and the last tokens'
    hidden states (R, D), only of streams that had something to read."""
    by_seat: dict[tuple[int, str], list[ForkPoint]] = {}
    for point in points:
        by_seat.setdefault((point.message.at[0], point.agent), []).append(point)
    waiting = list(by_seat.values())
    for first in range(0, len(waiting), rows):
        group = [(engine.allocate(), own) for own in waiting[first : first + rows]]
        for number in range(max(len(own) for _, own in group)):
            here = [(slot, own[number]) for slot, own in group if number < len(own)]
            chunks = [(slot, point.tokens[engine.lengths[slot] :]) for slot, point in here]
            new = [(slot, chunk) for slot, chunk in chunks if chunk]
            last = torch.zeros(0, device=engine.policy.device)
            if new:
                hidden = engine.read([slot for slot, _ in new], [chunk for _, chunk in new])
                last = hidden[torch.tensor(np.cumsum([len(chunk) for _, chunk in new]) - 1, device=hidden.device)]
            yield [slot for slot, _ in here], [point for _, point in here], last
        for slot, _ in group:
            engine.free(slot)


@torch.no_grad()
def _draw(agent: ModelAgent, messages: Sequence[Message], count: int, wide: bool) -> None:
    """Draws `count` other replies for each of these messages, as the agent draws its own."""
    if not (count and messages):
        return
    engine, rows = _fork_engine(agent, count, wide)
    own_points = [ForkPoint(message, message.turn.agent, message.turn.start) for message in messages]
    for slots, points, hidden in _read_streams(own_points, engine, rows):
        forks = [slot for own in slots for slot in engine.fork(own, count)]
        at = [point for point in points for _ in range(count)]
        seeds = np.concatenate([_seeds(point, count) for point in points])
        replies: list[list[int]] = [[] for _ in at]
        active, last = list(range(len(at))), hidden.repeat_interleave(count, 0)
        while active:
            counters = np.array([at[i].length + len(replies[i]) for i in active], dtype=np.uint64)
            ids, _ = engine.sample(last, [()] * len(active), agent.temperature, uniforms(seeds[active], counters))
            for i, token in zip(active, ids.tolist(), strict=True):
                replies[i].append(token)
            room = engine.context - len(agent.tokens.format.after_reply)
            active = [
                i
                for i in active
                if len(replies[i]) < agent.max_new_tokens
                and at[i].length + len(replies[i]) < room
                and not agent.tokens.ends(replies[i])
            ]
            if active:
                last = engine.read([forks[i] for i in active], [replies[i][-1:] for i in active])
        for point, reply in zip(at, replies, strict=True):
            point.message.replies.append(reply)
        for slot in forks:
            engine.free(slot)
    agent.engine.tokens_read += engine.tokens_read


def _seeds(point: ForkPoint, count: int) -> np.ndarray:
    """Returns seeds of the draws at a point, (count,): functions of the game and of what the author has read."""
    prefix = zlib.crc32(np.array(point.tokens, dtype=np.int64).tobytes())
    return np.random.SeedSequence([point.message.episode.seed, RESAMPLED, prefix]).generate_state(count, np.uint64)


def _play_others(message: Message, models: Mapping[str, ModelAgent], voting: Collection[int]) -> list[ForkPoint]:
    """Plays each other message in a copy of the game; returns what each agent that is asked then reads.

    `voting`: indices of the messages after which the game goes on to the vote.
    """
    episode, turn = message.episode, message.turn
    points = {agent: ForkPoint(message, agent, length) for agent, length in message.lengths.items()}
    for number, ids in enumerate(message.replies):
        env = copy.deepcopy(message.env)
        text = models[message.author].tokens.reply_text(ids)
        observations, _, _, _, infos = env.step(dict.fromkeys(env.agents, "") | {turn.agent: text})
        writers = {
            agent: StreamWriter(models[episode.players[agent]].tokens, _beginning(episode.streams[agent], point.length))
            for agent, point in points.items()
        }
        writers[turn.agent].reply(ids, Kind.SPEECH)
        legal = _observe(writers, observations, infos, turn.step + 1)
        asked = {agent: list(writer.asked) for agent, writer in writers.items()}
        if number in voting:
            for agent, vote in _vote(episode, env, writers, observations, infos, legal, turn.step + 1).items():
                asked[agent].append(vote)
        for agent, point in points.items():
            engine = models[episode.players[agent]].engine
            end = max((each.position + 1 for each in asked[agent]), default=point.length)
            beside = 0 if engine.can_branch_back else max((len(each.branch) for each in asked[agent]), default=0)
            fits = end + beside <= engine.context
            point.chunks.append(writers[agent].stream.tokens[point.length : end] if fits else [])
            point.asked.append(asked[agent] if fits else [])
    return [point for point in points.values() if any(point.asked)]


def _observe(
    writers: Mapping[str, StreamWriter], observations: Any, infos: Any, step: int
) -> dict[str, tuple[int, ...]]:
    """Writes what the game shows to each agent, up to the place of its reply. Returns the ids of their options."""
    legal: dict[str, tuple[int, ...]] = {}
    for agent, writer in writers.items():
        seen = observations[agent]
        writer.observe(seen["text"], infos[agent]["questions"], step)
        legal[agent] = writer.cue(seen["options"]) if seen["turn"] != TurnKind.WAIT else ()
    return legal


def _vote(
    episode: Episode, env: Any, writers: Mapping[str, StreamWriter], observations: Any, infos: Any,
    legal: Mapping[str, tuple[int, ...]], step: int,
) -> dict[str, Asked]:  # fmt: skip
    """Goes on with the recorded turns to the next vote; returns its questions by agent. Empty if turns differ."""
    turns = {(turn.step, turn.agent): turn for turn in episode.turns}
    while env.agents:
        due = [agent for agent in env.agents if observations[agent]["turn"] != TurnKind.WAIT]
        if {*due} != {agent for at, agent in turns if at == step}:
            return {}
        found = {}
        for agent in due:
            options, true = tuple(observations[agent]["options"]), tuple(infos[agent].get("truths", ()))
            if agent in writers and true:
                question = Question(VOTE, options, true[0], true[1:])
                found[agent] = Asked(len(writers[agent].stream) - 1, step, question, legal[agent])
        if found:
            return found
        for agent in due:
            if agent in writers and (turn := turns[step, agent]).reply_ids:
                writers[agent].reply(turn.reply_ids, Kind.CHOICE if turn.kind == TurnKind.CHOOSE else Kind.SPEECH)
        replies = {agent: turns[step, agent].text for agent in due}
        observations, _, _, _, infos = env.step({agent: replies.get(agent, "") for agent in env.agents})
        step += 1
        legal = _observe(writers, observations, infos, step)
    return {}


@torch.no_grad()
def _answer(agent: ModelAgent, own_points: Sequence[ForkPoint], count: int, wide: bool) -> None:
    """Reads what the listeners hear of each other message, and notes their answers."""
    if not own_points:
        return
    engine, rows = _fork_engine(agent, count, wide)
    for slots, points, _ in _read_streams(own_points, engine, rows):
        which = [[j for j, asked in enumerate(point.asked) if asked] for point in points]
        forks = [fork for slot, own in zip(slots, which, strict=True) for fork in engine.fork(slot, len(own))]
        heard = [(point, j) for point, own in zip(points, which, strict=True) for j in own]
        new = [(fork, chunk) for fork, (point, j) in zip(forks, heard, strict=True) if (chunk := point.chunks[j])]
        states = {}
        beside = {} if engine.can_branch_back else _beside(engine, forks, heard)  # before states move on
        if new:
            hidden = engine.read([fork for fork, _ in new], [chunk for _, chunk in new])
            states = dict(zip((fork for fork, _ in new), hidden.split([len(chunk) for _, chunk in new]), strict=True))
        beside = beside or _beside(engine, forks, heard)
        for fork, (point, j) in zip(forks, heard, strict=True):
            episode, asked = point.message.episode, point.asked[j]
            aside = iter(beside[fork])
            found = [next(aside) if a.branch else states[fork][a.position - point.length] for a in asked]
            logits = agent.policy.logits(torch.stack(found))
            # Votes at the sampling temperature; at temperature 0 engines note probabilities at 1.
            scales = [(agent.temperature or 1.0) if a.question.text == VOTE else 1.0 for a in asked]
            probs = [
                (row[list(a.candidate_ids)].double() / scale).softmax(-1).cpu().numpy()
                for row, a, scale in zip(logits, asked, scales, strict=True)
            ]
            beliefs = beliefs_of(point.agent, episode.roles[point.agent], asked, probs)
            point.message.heard[j] += answered(beliefs, episode.answers)
        for fork in forks:
            engine.free(fork)
    agent.engine.tokens_read += engine.tokens_read


def _beside(
    engine: Engine, forks: Sequence[int], heard: Sequence[tuple[ForkPoint, int]]
) -> dict[int, Iterable[Tensor]]:
    """Reads questions beside each fork's stream, before or after it read the message. Returns states (D,) by fork."""
    found: dict[int, Iterable[Tensor]] = {}
    for fork, (point, j) in zip(forks, heard, strict=True):
        branches = []
        for asked in point.asked[j]:
            start = min(asked.position + 1, int(engine.lengths[fork]))
            unread = point.chunks[j][start - point.length : asked.position + 1 - point.length]
            branches += [(start, [*unread, *asked.branch])] if asked.branch else []
        found[fork] = engine.read_beside([fork], [branches]) if branches else ()
    return found
