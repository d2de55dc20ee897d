"""Games x agents -> Episodes: many games at once, each stepped as soon as its players have replied.

Left out: what turns are paid (`rewards/`), which tokens are learned from (`learning/batch.py`).
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from envs.core import END, TurnKind
from marl.agents.base import Agent, Reply, Request
from marl.model.tokens import Tokens
from marl.rollout.games import check_infos
from marl.rollout.seeds import Game, sampling_seed
from marl.types import Belief, Episode, Payment, Stream, Turn, answered

Cast = Callable[["Game", Any], Mapping[str, Agent]]  # (game, environment after reset) -> who plays each seat
Views = dict[tuple[int, str], tuple[Stream, list[Belief]]]  # what agents recorded, by match and seat


def everyone(agent: Agent) -> Cast:
    """Seats one agent everywhere."""
    return lambda game, env: dict.fromkeys(env.possible_agents, agent)


def rollout(
    games: Sequence[Game],
    cast: Cast,
    make_env: Callable[[], Any],
    concurrency: int,
    progress: Callable[[int], None] = lambda finished: None,
) -> list[Episode]:
    """Plays all games, at most `concurrency` at a time, and returns their episodes in the order of `games`.

    `progress` is called in every round of replies with the number of games that it finished, mostly 0.
    """
    waiting = deque(enumerate(games))
    episodes: dict[int, Episode] = {}
    matches: dict[int, Match] = {}
    idle: list[Any] = []  # environments
    fresh: list[Match] = []  # with observations that nobody has read
    while waiting or matches:
        while waiting and len(matches) < concurrency:
            index, game = waiting.popleft()
            matches[index] = Match(index, game, idle.pop() if idle else make_env(), cast)
            fresh.append(matches[index])

        # If nobody is to reply, a match only passes time; else it is stepped once all have replied.
        stepping = [match for match in fresh if not match.due and not match.over]
        finished = [match for match in fresh if match.over]  # their last questions are asked now
        requests: dict[int, tuple[Agent, list[Request]]] = {
            id(agent): (agent, []) for match in matches.values() for agent in match.agents.values()
        }
        for match in fresh:
            for seat, agent in match.agents.items():
                if request := match.request(seat):
                    requests[id(agent)][1].append(request)
        fresh = []
        for agent, asked in requests.values():
            for reply in agent.act(asked):
                match = matches[reply.key[0]]
                match.replies[reply.key[1]] = reply
                if len(match.replies) == len(match.due):
                    stepping.append(match)

        for match in stepping:
            match.step()
            (finished if match.over and not match.asks else fresh).append(match)
        if finished:
            views = close(finished)
            for match in finished:
                episodes[match.index] = match.episode(views)
                idle.append(matches.pop(match.index).env)
        progress(len(finished))
    return [episodes[i] for i in range(len(games))]


class Match:
    """A game in progress: `request` what each seat reads, fill `replies`, `step`, until `over`; then its `episode`."""

    def __init__(self, index: int, game: Game, env: Any, cast: Cast) -> None:
        options = dict(game.options or {})
        observations, infos = env.reset(seed=game.seed, options=options)
        check_infos(env, infos)
        self.index, self.game, self.env = index, game, env
        self.agents = cast(game, env)
        own = {name: style for name, agent in self.agents.items() if (style := getattr(agent, "style", None))}
        if any(style != getattr(env, "style", style) for style in own.values()):  # the same game in players' styles
            observations, infos = env.reset(seed=game.seed, options={**options, "styles": own})
        self.observations, self.infos = observations, infos
        self.clock = 0
        self.replies: dict[str, Reply] = {}
        self.turns: list[Turn] = []
        self.payments: list[Payment] = []
        self.answers: dict[str, dict[str, str]] = {}  # by agent, to questions that could not be answered when asked
        self.facts = dict(env.facts)
        self.privileged = {agent: tuple(env.privileged(agent)) for agent in env.agents}
        self.roles = {agent: infos[agent]["role"] for agent in env.agents}

    @property
    def due(self) -> list[str]:
        """Seats that owe a reply."""
        return [a for a in self.env.agents if self.observations[a]["turn"] != TurnKind.WAIT]

    @property
    def over(self) -> bool:
        return not self.env.agents

    @property
    def asks(self) -> bool:
        """Tells whether a belief question is due; it may be after a message that ended the game."""
        return any(info["questions"] for info in self.infos.values())

    def request(self, seat: str) -> Request | None:
        """Returns what a seat is to read and answer; None if there is nothing."""
        seen, info = self.observations[seat], self.infos[seat]
        if seen["turn"] == TurnKind.WAIT and not seen["text"] and not info["questions"]:
            return None
        return Request(
            key=(self.index, seat),
            seed=sampling_seed(self.game, self.env.possible_agents.index(seat)),
            role=self.roles[seat],
            step=self.clock,
            turn=TurnKind(seen["turn"]),
            text=seen["text"],
            options=tuple(seen["options"]),
            questions=tuple(info["questions"]),
            privileged=self.privileged[seat],
        )

    def step(self) -> None:
        """Plays the replies."""
        kinds = {seat: TurnKind(self.observations[seat]["turn"]) for seat in self.due}
        options = {seat: tuple(self.observations[seat]["options"]) for seat in self.due}
        truths = {s: tuple(map(own.index, self.infos[s].get("truths", ()))) for s, own in options.items()}
        actions = {seat: self.replies[seat].text if seat in self.replies else "" for seat in self.env.agents}
        self.observations, rewards, _, _, self.infos = self.env.step(actions)
        check_infos(self.env, self.infos)
        for seat, info in self.infos.items():
            if "answers" in info:
                self.answers.setdefault(seat, {}).update(info["answers"])
        self.turns += [self.turn(seat, self.replies[seat], kind, truths[seat]) for seat, kind in kinds.items()]
        self.payments += [Payment(seat, self.clock, float(amount)) for seat, amount in rewards.items() if amount]
        self.replies = {}
        self.clock += 1

    def turn(self, seat: str, reply: Reply, kind: TurnKind, truths: tuple[int, ...]) -> Turn:
        """Records a reply that was just played. `truths`: indices of the options that were true."""
        info = self.infos[seat]
        tokens: Tokens | None = getattr(self.agents[seat], "tokens", None) if reply.ids else None
        # The model met the limit of its tokens, or the game passed on only the beginning of what was said.
        unended = tokens is not None and not tokens.ends(reply.ids)
        unheard = reply.text[info["span"][1] :].partition(END)[0].strip() if info["message"] else ""
        return Turn(
            agent=seat,
            role=self.roles[seat],
            step=self.clock,
            kind=kind,
            text=reply.text,
            reply_ids=reply.ids,
            start=reply.start,
            logprobs=reply.logprobs,
            value=reply.value,
            legal=reply.legal,
            truths=truths,
            body=tokens.within(reply.ids, info["span"]) if tokens is not None else (0, 0),
            message=info["message"],
            error=info["error"],
            cut=reply.cut or (kind == TurnKind.SPEAK and (unended or bool(unheard))),
            thoughts=reply.thoughts,
            planned=reply.planned,
        )

    def episode(self, views: Views) -> Episode:
        """Returns the finished game."""
        own = {seat: views[self.index, seat] for seat in self.agents if (self.index, seat) in views}
        beliefs = answered([belief for _, asked in own.values() for belief in asked], self.answers)
        return Episode(
            seed=self.game.seed,
            players={seat: agent.name for seat, agent in self.agents.items()},
            roles=self.roles,
            streams={seat: stream for seat, (stream, _) in own.items()},
            turns=tuple(self.turns),
            beliefs=tuple(sorted(beliefs, key=lambda b: (b.step, b.listener, b.position))),
            payments=tuple(self.payments),
            outcome=dict(next(info["outcome"] for info in self.infos.values())),
            steps=self.clock,
            facts=self.facts,
            privileged=self.privileged,
            answers=self.answers,
        )


def close(matches: Iterable[Match]) -> Views:
    """Tells the agents, all at once, that these games are over, and collects what they recorded."""
    seats: dict[int, tuple[Agent, list[tuple[int, str]]]] = {}
    for match in matches:
        for seat, agent in match.agents.items():
            seats.setdefault(id(agent), (agent, []))[1].append((match.index, seat))
    views: Views = {}
    for agent, keys in seats.values():
        views |= agent.finish(keys)
    return views
