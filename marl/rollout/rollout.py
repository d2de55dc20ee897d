"""Games x agents -> Episodes: many games at once, each stepped as soon as its players have replied.

What it leaves out: what rewards are worth (rewards/), masks (batch.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envs.core import END, TurnKind
from marl.agents.base import Agent, Reply, Request
from marl.decoding.memory import sparing
from marl.model.tokens import Tokens
from marl.rollout.games import check_said
from marl.rollout.seeds import Game, sampling_seed
from marl.types import Belief, Episode, Payment, Stream, Turn

Cast = Callable[["Game", Any], Mapping[str, Agent]]  # (game, environment after reset) -> who plays each seat


def everyone(agent: Agent) -> Cast:
    """One agent in all seats."""
    return lambda game, env: dict.fromkeys(env.possible_agents, agent)


@dataclass
class _Table:
    """A game in progress."""

    index: int
    game: Game
    env: Any
    seats: Mapping[str, Agent]
    observations: dict[str, Any]
    infos: dict[str, Any]
    step: int = 0
    replies: dict[str, Reply] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    payments: list[Payment] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    privileged: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def due(self) -> list[str]:
        return [a for a in self.env.agents if self.observations[a]["turn"] != TurnKind.WAIT]

    @property
    def over(self) -> bool:
        return not self.env.agents

    @property
    def asks(self) -> bool:
        """Whether a belief question is due: after a message that ended the game, too."""
        return any(info["questions"] for info in self.infos.values())


@sparing()
def rollout(
    games: Sequence[Game],
    cast: Cast,
    make_env: Callable[[], Any],
    concurrency: int,
    progress: Callable[[int], None] = lambda finished: None,
) -> list[Episode]:
    """Plays all games, at most `concurrency` at a time, and returns their episodes in the order of `games`.

    `progress` is called with the number of games finished since its last call.
    """
    waiting = deque(enumerate(games))
    episodes: dict[int, Episode] = {}
    tables: dict[int, _Table] = {}
    idle: list[Any] = []
    fresh: list[_Table] = []  # tables with observations that nobody has read
    while waiting or tables:
        while waiting and len(tables) < concurrency:
            index, game = waiting.popleft()
            table = _open(index, game, idle.pop() if idle else make_env(), cast)
            tables[index] = table
            fresh.append(table)

        # Tables where nobody is to reply (everyone waits) only pass time; the others ask their agents.
        requests: dict[int, tuple[Agent, list[Request]]] = {
            id(a): (a, []) for t in tables.values() for a in t.seats.values()
        }
        for table in fresh:
            for name, agent in table.seats.items():
                request = _request(table, name)
                if request is not None:
                    requests[id(agent)][1].append(request)
        stepping = [table for table in fresh if not table.due and not table.over]
        finished = [table for table in fresh if table.over]  # now asked what the last message left
        fresh = []
        for agent, asked in requests.values():
            for reply in agent.act(asked):
                table = tables[reply.key[0]]
                table.replies[reply.key[1]] = reply
                if len(table.replies) == len(table.due):
                    stepping.append(table)

        for table in stepping:
            _step(table)
            (finished if table.over and not table.asks else fresh).append(table)
        if finished:
            for table, views in zip(finished, _close(finished), strict=True):
                episodes[table.index] = _episode(table, views)
                idle.append(tables.pop(table.index).env)
            progress(len(finished))
    return [episodes[i] for i in range(len(games))]


def _open(index: int, game: Game, env: Any, cast: Cast) -> _Table:
    options = dict(game.options or {})
    observations, infos = env.reset(seed=game.seed, options=options)
    check_said(env, infos)
    seats = cast(game, env)
    own = {name: style for name, agent in seats.items() if (style := getattr(agent, "style", None))}
    if any(style != getattr(env, "style", style) for style in own.values()):  # the same game, in everybody's own words
        observations, infos = env.reset(seed=game.seed, options={**options, "styles": own})
    table = _Table(index, game, env, seats, observations, infos)
    table.facts = dict(env.facts)
    table.privileged = {agent: tuple(env.privileged(agent)) for agent in env.agents}
    table.roles = {agent: infos[agent]["role"] for agent in env.agents}
    return table


def _request(table: _Table, agent: str) -> Request | None:
    seen, info = table.observations[agent], table.infos[agent]
    if seen["turn"] == TurnKind.WAIT and not seen["text"] and not info["questions"]:
        return None
    return Request(
        key=(table.index, agent),
        seed=sampling_seed(table.game, table.env.possible_agents.index(agent)),
        role=table.roles[agent],
        step=table.step,
        turn=TurnKind(seen["turn"]),
        text=seen["text"],
        options=tuple(seen["options"]),
        questions=tuple(info["questions"]),
        privileged=table.privileged[agent],
    )


def _step(table: _Table) -> None:
    due = table.due
    actions = {agent: table.replies[agent].text if agent in table.replies else "" for agent in table.env.agents}
    kinds = {agent: TurnKind(table.observations[agent]["turn"]) for agent in due}
    table.observations, rewards, _, _, table.infos = table.env.step(actions)
    check_said(table.env, table.infos)
    for agent in due:
        table.turns.append(_turn(table, agent, table.replies[agent], kinds[agent]))
    table.payments.extend(Payment(agent, table.step, float(r)) for agent, r in rewards.items() if r)
    table.replies = {}
    table.step += 1


def _turn(table: _Table, agent: str, reply: Reply, kind: TurnKind) -> Turn:
    info = table.infos[agent]
    player = table.seats[agent]
    tokens = getattr(player, "tokens", None)
    return Turn(
        agent=agent,
        role=table.roles[agent],
        step=table.step,
        kind=kind,
        text=reply.text,
        reply_ids=reply.ids,
        start=reply.start,
        logprobs=reply.logprobs,
        value=reply.value,
        legal=reply.legal,
        body=tokens.within(reply.ids, info["span"]) if reply.ids and tokens is not None else (0, 0),
        message=info["message"],
        error=info["error"],
        cut=reply.cut or (kind == TurnKind.SPEAK and _cut(reply, info, tokens)),
        thoughts=reply.thoughts,
        planned=reply.planned,
    )


def _cut(reply: Reply, info: Mapping[str, Any], tokens: Tokens | None) -> bool:
    """Whether a spoken reply is unfinished. A model that comes to the end of its tokens has not ended it itself; the
    game tells a speaker of whom the others heard only the beginning, and leaves the rest after the message's span."""
    unfinished = bool(reply.ids) and tokens is not None and not tokens.ends(reply.ids)
    unheard = reply.text[info["span"][1] :].partition(END)[0] if info["message"] else ""
    return unfinished or bool(unheard.strip())


def _close(tables: Sequence[_Table]) -> list[tuple[dict[str, Stream], list[Belief]]]:
    """Tells the agents that these games are over, all at once, and collects what they kept of them."""
    keys: dict[int, tuple[Agent, list[tuple[int, str]]]] = {}
    for table in tables:
        for name, agent in table.seats.items():
            keys.setdefault(id(agent), (agent, []))[1].append((table.index, name))
    kept = {}
    for agent, seats in keys.values():
        kept.update(agent.finish(seats))
    views = []
    for table in tables:
        own = {name: kept[(table.index, name)] for name in table.seats if (table.index, name) in kept}
        beliefs = sorted((b for _, bs in own.values() for b in bs), key=lambda b: (b.step, b.listener, b.position))
        views.append(({name: stream for name, (stream, _) in own.items()}, beliefs))
    return views


def _episode(table: _Table, views: tuple[dict[str, Stream], list[Belief]]) -> Episode:
    outcome = next(info["outcome"] for info in table.infos.values())
    return Episode(
        seed=table.game.seed,
        players={name: agent.name for name, agent in table.seats.items()},
        roles=table.roles,
        streams=views[0],
        turns=tuple(table.turns),
        beliefs=tuple(views[1]),
        payments=tuple(table.payments),
        outcome=dict(outcome),
        steps=table.step,
        facts=table.facts,
        privileged=table.privileged,
    )
