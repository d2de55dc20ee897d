"""One thread that plays all open games: opponents of all games reply in one batch, and a slow person holds up nobody.

Pages hand it what a person does (`open`, `say`, `stop`) and read what a person may see (`sight`). Every reply is kept
before it counts, so that a restart plays the games again up to where they were.
"""

import queue
import sqlite3
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from envs.core import Style, TurnKind
from experiments.launch.terminal import say, say_error
from experiments.webapp.opponents import Loaded, Opponents
from experiments.webapp.store import Record, Store
from marl.agents.base import Agent, Key, Reply, Request
from marl.agents.chat import ChatAgent
from marl.agents.model import ModelAgent
from marl.common.errors import UserError
from marl.report.transcripts import episode_to_json, write_transcripts
from marl.rollout.games import env_maker
from marl.rollout.rollout import Match, close
from marl.rollout.seeds import Game
from marl.types import Belief, Episode, Stream

POLL = 0.02  # seconds between two looks at an endpoint's replies
FAILED = "The opponent failed, and the game cannot go on. This is not your fault."
GONE = 15.0  # seconds after which somebody in the queue counts as gone who has not asked again
SEAT = 7  # a part of a game's seed: which of several seats a person takes


@dataclass(frozen=True)
class Limits:
    """games: at once. each: of one person. idle: seconds after which a game is closed whose person says nothing."""

    games: int = 16
    each: int = 3
    idle: float = 3600.0


@dataclass(frozen=True)
class Sight:
    """All that a person may see of a game; the pages know nothing else."""

    id: str
    person: str
    game: str
    opponent: str
    state: str  # yours, waiting, over or stopped
    entries: tuple[tuple[str, str], ...]  # (`seen` or `said` or `note`, text)
    number: int = 0  # the person's replies so far
    speaks: bool = False  # the reply due is free text
    options: tuple[str, ...] = ()

    @property
    def version(self) -> int:
        """Grows with every change."""
        return 2 * len(self.entries) + (self.state != "waiting")


class Full(UserError):
    """No place yet. `place`: in the queue, from 1."""

    def __init__(self, games: int, place: int) -> None:
        super().__init__(f"All {games} places are taken. You are number {place} in the queue.")
        self.place = place


class Queue:
    """The people who wait for a place in a game. First come, first served, as long as they keep asking."""

    def __init__(self) -> None:
        self._asked: dict[str, float] = {}  # when each last asked, in the order in which they came

    def admit(self, person: str, games: int, open_games: int) -> None:
        """Lets a person take one of the free places. Full where all are taken, or others wait for them."""
        now = time.monotonic()
        self._asked = {who: at for who, at in self._asked.items() if now - at < GONE}
        waiting, free = list(self._asked), games - open_games
        place = waiting.index(person) if person in waiting else len(waiting)
        if place < free:
            self._asked.pop(person, None)
            return
        self._asked[person] = now
        raise Full(games, place - max(free, 0) + 1)


class Human:
    """Holds a person's seat in a match. The engine fills in the replies."""

    style = Style.NATURAL

    def __init__(self, name: str) -> None:
        self.name = name

    def act(self, requests: Sequence[Request]) -> list[Reply]:
        return []

    def finish(self, keys: Sequence[Key]) -> dict[Key, tuple[Stream, list[Belief]]]:
        return {}


@dataclass
class Play:
    """An open game."""

    record: Record
    match: Match
    seat: str
    opponent: Agent
    entries: list[tuple[str, str]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # that the person's replies took
    number: int = 0
    request: Request | None = None  # that the person owes a reply to
    asked: float = field(default_factory=time.monotonic)
    owed: set[str] = field(default_factory=set)  # seats whose opponents were asked
    stopping: str = ""  # why the game ends early
    how: str = "stopped"  # what it is then called
    sight: Sight | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.record.opponent, str(self.record.env["game"])

    def read(self, request: Request) -> None:
        """Shows the person its observation."""
        if request.text:
            self.entries.append(("seen", request.text))
        if request.turn != TurnKind.WAIT:
            self.request, self.asked = request, time.monotonic()

    def said(self, text: str) -> None:
        self.entries.append(("said", text))
        self.number, self.request = self.number + 1, None

    def look(self) -> None:
        """Publishes what the person may see now."""
        due = self.request
        self.sight = Sight(
            self.record.id,
            self.record.person,
            str(self.record.env["game"]),
            self.record.opponent,
            "yours" if due else "waiting",
            tuple(self.entries),
            self.number,
            due is not None and due.turn == TurnKind.SPEAK,
            due.options if due else (),
        )


class Engine:
    """Plays until `shut` is called. Finished games are written as transcripts under `out`/episodes."""

    def __init__(self, store: Store, opponents: Opponents, out: Path, limits: Limits, played_by: str = "human") -> None:
        """`played_by`: what transcripts call the person's seat; `simulated` where programs play in a person's place."""
        self.played_by = played_by
        self._thread = threading.Thread(target=self._run, name="games", daemon=True)
        self.store, self.opponents, self.out, self.limits = store, opponents, out, limits
        self._plays: dict[int, Play] = {}  # by the game's number in this process
        self._by_id: dict[str, Play] = {}
        self._fresh: list[Play] = []  # with observations that nobody has read
        self._ready: list[Play] = []  # all have replied
        self._first: list[tuple[Play, Request]] = []  # asked before a restart, and not answered
        self._commands: queue.Queue[tuple[Future[Any], Callable[[], Any]] | None] = queue.Queue()
        self._places = Queue()
        self._next = 0
        self._stopped = False
        self.thinking = 0.0  # seconds that opponents took for their replies, in all
        self.resumed = threading.Event()

    # --- What pages call ------------------------------------------------------------------------------------------
    def open(self, record: Record) -> Future[None]:
        """Begins a game. Full where all places are taken, UserError where it cannot be played."""
        return self._submit(lambda: self._open(record))

    def say(self, game: str, number: int, text: str) -> Future[bool]:
        """Replies for the person. False if it is not asked, or replied already (`number`: of its earlier replies)."""
        return self._submit(lambda: self._say(game, number, text))

    def stop(self, game: str, reason: str) -> Future[None]:
        return self._submit(lambda: self._stop(game, reason))

    def sight(self, game: str) -> Sight | None:
        """Returns what the person at this game may see; None if there is no such game."""
        play = self._by_id.get(game)
        if play is not None and play.sight is not None:
            return play.sight
        record = self.store.find(game)
        if record is None:
            return None
        state = "waiting" if record.state == "open" else record.state
        return Sight(record.id, record.person, str(record.env["game"]), record.opponent, state, record.entries)

    def start(self) -> None:
        """Takes up the open games of the store (`resumed` tells when), then plays."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def shut(self) -> None:
        """Stops after the pass under way. Open games stay open in the store."""
        self._stopped = True
        self._commands.put(None)
        if self.alive:
            self._thread.join(timeout=60)

    def _submit(self, do: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._commands.put((future, do))
        return future

    # --- The thread -----------------------------------------------------------------------------------------------
    def _run(self) -> None:
        self._resume()
        self.resumed.set()
        while not self._stopped:
            self._take()
            try:
                self._advance()
            except Exception:  # whatever it is, other pages and new games go on
                say_error(traceback.format_exc())
                for play in list(self._plays.values()):
                    self._fail(play, "The server made a mistake, and the game cannot go on.")

    def _take(self) -> None:
        """Takes all commands; waits for one if nothing else is to be done, or an endpoint has to reply."""
        owing = [play.opponent for play in self._plays.values() if play.owed]
        elsewhere = all(isinstance(opponent, ChatAgent) for opponent in owing)
        wait = elsewhere and not (self._fresh or self._ready or self._first)
        while True:
            try:
                command = self._commands.get(block=wait, timeout=(POLL if owing else 1.0) if wait else None)
            except queue.Empty:
                break
            wait = False
            if command is None:
                continue
            future, do = command
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(do())
            except Exception as error:  # whoever asked gets it
                future.set_exception(error)
        late = time.monotonic() - self.limits.idle
        for play in list(self._plays.values()):
            if play.request and play.asked < late:
                self._stop(play.record.id, "Nobody replied for a long time, so the game was closed.")

    def _open(self, record: Record) -> None:
        plays = [play for play in self._plays.values() if not play.stopping]
        if sum(play.record.person == record.person for play in plays) >= self.limits.each:
            raise UserError(f"You have {self.limits.each} open games. Finish or stop one of them first.")
        self._places.admit(record.person, self.limits.games, len(plays))
        play = self._begin(record)
        try:
            self.store.add(record)
        except sqlite3.Error:
            self._plays.pop(play.match.index)
            self._by_id.pop(record.id)
            raise
        self._fresh.append(play)

    def _begin(self, record: Record) -> Play:
        key = record.opponent, str(record.env["game"])
        loaded: Loaded = self.opponents.load(record.opponent, record.env, self.busy())
        if sum(play.key == key for play in self._plays.values()) >= loaded.games:
            raise UserError("This opponent plays as many games as it can. Choose another, or try again later.")
        held: list[str] = []

        def cast(game: Game, env: Any) -> Mapping[str, Agent]:
            roles = env.facts.get("roles", {})
            wanted = [s for s in env.possible_agents if record.seat in ("any", s, roles.get(s))]
            if not wanted:
                raise UserError("There is no such seat in this game.")
            held.append(wanted[int(np.random.default_rng([record.seed, SEAT]).integers(len(wanted)))])
            return {**dict.fromkeys(env.possible_agents, loaded.agent), held[0]: Human(self.played_by)}

        make_env = env_maker(record.env)
        match = Match(self._next, Game(record.seed), make_env(), cast)
        play = Play(record, match, held[0], loaded.agent)
        play.look()
        self._plays[self._next] = self._by_id[record.id] = play
        self._next += 1
        return play

    def busy(self) -> set[tuple[str, str]]:
        """Opponents with open games."""
        return {play.key for play in list(self._plays.values())}

    def _say(self, game: str, number: int, text: str) -> bool:
        play = self._by_id.get(game)
        if play is None or play.request is None or play.number != number or play.stopping:
            return False
        took = round(time.monotonic() - play.asked, 1)
        reply = Reply(play.request.key, text)
        self.store.reply(game, play.match.clock, play.seat, reply, took)
        play.seconds.append(took)
        play.said(text)
        self._take_reply(play, reply)
        play.look()
        return True

    def _stop(self, game: str, reason: str) -> None:
        play = self._by_id.get(game)
        if play is None or play.stopping:
            return
        play.stopping, play.request = reason, None
        if play.owed or any(other is play for other, _ in self._first):
            play.look()  # closed once its opponents have replied
        else:
            self._close(play)

    def _take_reply(self, play: Play, reply: Reply) -> None:
        play.match.replies[reply.key[1]] = reply
        if len(play.match.replies) == len(play.match.due):
            self._ready.append(play)

    def _advance(self) -> None:
        """One pass: observations go out, replies come in, games whose players have all replied are stepped."""
        fresh, self._fresh = self._fresh, []
        first, self._first = self._first, []
        asked: dict[int, list[Request]] = {}
        agents = {id(play.opponent): play.opponent for play in self._plays.values()}
        for play, request in first:
            asked.setdefault(id(play.opponent), []).append(request)
            play.owed.add(request.key[1])
        for play in fresh:
            if play.stopping:  # maybe closed already
                continue
            for seat in play.match.agents:
                due = play.match.request(seat)
                if due is None:
                    continue
                if seat != play.seat:
                    asked.setdefault(id(play.opponent), []).append(due)
                    if due.turn != TurnKind.WAIT:
                        play.owed.add(seat)
                elif not play.match.over:  # the end was shown when it came
                    play.read(due)
            play.look()
            if not play.match.due and not play.match.over:
                self._ready.append(play)
        owing = {id(play.opponent) for play in self._plays.values() if play.owed}
        for number in {*asked, *owing}:
            self._ask(agents[number], asked.get(number, []))
        for play in fresh:
            if play.match.over and play.record.id in self._by_id and not play.stopping:
                self._finish(play)
        ready, self._ready = self._ready, []
        for play in ready:
            if not play.stopping and play.record.id in self._by_id:
                self._step(play)
        for play in [play for play in self._plays.values() if play.stopping and not play.owed]:
            self._close(play)

    def _ask(self, agent: Agent, requests: Sequence[Request]) -> None:
        began = time.monotonic()
        before = len(agent.lost) if isinstance(agent, ChatAgent) else 0
        try:
            replies = agent.act(requests)
        except Exception:  # of a model: its games end, all others go on
            say_error(traceback.format_exc())
            for play in [play for play in self._plays.values() if play.opponent is agent]:
                self._fail(play, FAILED)
            return
        self.thinking += time.monotonic() - began
        for reply in replies:
            play = self._plays[reply.key[0]]
            play.owed.discard(reply.key[1])
            if not play.stopping:
                self.store.reply(play.record.id, play.match.clock, reply.key[1], reply)
                self._take_reply(play, reply)
        for (number, _), reason in agent.lost[before:] if isinstance(agent, ChatAgent) else ():
            say_error(f"chat: {reason}, so a game ends")
            if lost := self._plays.get(number):
                lost.how = "failed"
                self._stop(lost.record.id, FAILED)

    def _step(self, play: Play) -> None:
        play.match.step()
        if play.match.over and (last := play.match.request(play.seat)):
            play.read(last)
        play.look()
        if play.match.over and not play.match.asks:
            self._finish(play)
        else:
            self._fresh.append(play)

    def _finish(self, play: Play) -> None:
        """Writes the transcript and ends the game."""
        episode = play.match.episode(close([play.match]))
        about = {
            "opponent": play.record.opponent,
            "env": dict(play.record.env),
            "person_reads": Style.NATURAL.value,
            "began": datetime.fromtimestamp(play.record.opened, UTC).isoformat(timespec="seconds"),
            "reply_seconds": play.seconds,
        }
        try:
            write_transcripts(
                self.out / "episodes" / f"{play.record.id}.jsonl", [{**episode_to_json(episode), "about": about}]
            )
        except UserError as error:
            say_error(str(error))
            play.entries.append(("note", "The game could not be recorded."))
        self._leave(play, "over", result_of(play, episode))

    def _close(self, play: Play) -> None:
        """Ends a game early."""
        with suppress(KeyError):  # its opponent has not read anything yet
            close([play.match])
        play.entries.append(("note", play.stopping))
        self._leave(play, "stopped", {"how": play.how})

    def _fail(self, play: Play, reason: str) -> None:
        """Ends a game whose opponent's state is unknown."""
        self.opponents.forget(*play.key)
        play.entries.append(("note", reason))
        self._leave(play, "stopped", {"how": "failed"})

    def _leave(self, play: Play, state: str, result: Mapping[str, Any]) -> None:
        try:
            self.store.end(play.record.id, state, play.entries, result)
        except sqlite3.Error as error:  # e.g. a full disk: the next start takes the game up again
            say_error(f"games.sqlite cannot be written ({error}): make room there, and start the server again")
        self._plays.pop(play.match.index, None)
        self._by_id.pop(play.record.id, None)

    # --- After a restart ------------------------------------------------------------------------------------------
    def _resume(self) -> None:
        """Plays open games again, with the replies that were kept."""
        records = self.store.open_games()
        for record in records:
            try:
                play = self._begin(record)
            except UserError as error:
                say_error(f"a game cannot go on: {error}")
                note = ("note", "The server started again without this opponent.")
                self.store.end(record.id, "stopped", [note], {"how": "failed"})
                continue
            try:
                self._again(play)
            except Exception:  # whatever it is, it ends this game alone
                say_error(traceback.format_exc())
                self._fail(play, "The server could not take this game up again.")
        if records:
            say(f"{len(self._plays)} of {len(records)} open games go on.")

    def _again(self, play: Play) -> None:
        kept, play.seconds = self.store.replies(play.record.id, play.match.index)
        while True:
            match = play.match
            here = kept.get(match.clock, {})
            if match.over or (match.due and not here) or match.clock > max(kept, default=-1):
                self._fresh.append(play)  # nobody has read what comes now
                break
            for seat in match.agents:
                request = match.request(seat)
                if request is None:
                    continue
                if seat == play.seat:
                    play.read(request)
                    if seat in here:
                        play.said(here[seat].text)
                        match.replies[seat] = here[seat]
                elif request.turn == TurnKind.WAIT:
                    play.opponent.act([request])
                elif seat in here:
                    match.replies[seat] = repeat(play.opponent, request, here[seat])
                else:
                    self._first.append((play, request))
            if len(match.replies) < len(match.due):
                break
            match.step()
            if match.over and (last := match.request(play.seat)):
                play.read(last)
        play.look()


def result_of(play: Play, episode: Episode) -> dict[str, Any]:
    """Figures of a finished game that a study pays for and reports. Never shown to the person as it is."""
    outcome, turns = episode.outcome, episode.turns
    seat = play.seat
    found: dict[str, Any] = {
        "how": str(outcome["how"]),
        "role": episode.roles[seat],
        "turns": len(turns),
        "messages": sum(bool(turn.message) for turn in turns),
        "seconds": play.seconds,
        "errors": sum(bool(turn.error) for turn in turns if turn.agent == seat),
    }
    if "deal" in outcome:
        points = {agent: float(value) for agent, value in outcome["points"].items()}
        others = sum(value for agent, value in points.items() if agent != seat)
        objective = float(play.record.env.get("objective", 0.0))
        found |= {
            "deal": bool(outcome["deal"]),
            "points": points[seat],
            "partner_points": others,
            "score": points[seat] + objective * others,
            "pareto": bool(outcome.get("pareto")),
        }
        if found["how"] == "abort":
            found["aborted_by"] = "person" if turns and turns[-1].agent == seat else "opponent"
    elif "centres" in outcome:
        found |= {"winner": outcome["winner"], "score": float(outcome["points"][seat])}
    else:
        found |= {"winner": outcome.get("winner"), "score": float(outcome.get("winner") == f"{found['role']}s")}
    return found


def repeat(agent: Agent, request: Request, kept: Reply) -> Reply:
    """Has a player read a request to which it has replied before, and returns that reply."""
    if isinstance(agent, ModelAgent):
        return replace(kept, start=agent.repeat(request, kept.ids))
    if isinstance(agent, ChatAgent):
        agent.repeat(request, kept.text)
        return kept
    agent.act([request])  # a script's state follows from its seed and what it reads
    return kept
