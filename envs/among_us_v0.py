"""Grid Among Us: crewmates do tasks, imposters kill; a body that is found is talked over, and then there is a vote.

Read downward: settings, state, how a game starts, what a player sees and may do, the three phases (moving, talking,
voting), the words in which players read of it, pictures, and at the end the PettingZoo environment. The game is that of
Sarkar, Xia, Liu & Sadigh 2025 ("Training Language Models for Social Deduction with Multi-Agent Reinforcement
Learning"). Left out: players, models, belief answers.

Where the published rules leave a choice, this is what holds here:

- One call of `step` is one step of the clock: of moving, one message, or the vote. `max_steps` counts them all.
- A walker belongs to the room that it walks to, from the start: seen there as entering, in the old room as leaving.
  It can be killed from both, and notices kills in the new one. Where it is killed on its way, the room at the other end
  goes on seeing it on its way until it should have arrived.
- Within a step: everybody acts, walks and tasks end, kills take effect, then the game may be won, then a report opens
  the discussion. So a victim's last action counts, also if it is a report, and its body lies in its killer's room.
- Who wins is asked in this order: no imposter lives (crewmates), imposters are at least as many as living crewmates
  (imposters), living crewmates have no tasks left (crewmates). Nobody wins where `max_steps` steps are over then, and
  nothing new begins.
- Imposters know each other and can't kill each other. Several reports in one step: one is drawn, the others are void.
- Speakers take turns in one drawn order. A discussion ends all walks and tasks; other bodies stay where they are.
- The belief question goes to living crewmates, with all living others as candidates; or (`candidates="all_names"`, as
  published) to every living player, with all seven names. Its answer is an imposter, of several the first drawn that
  lives; the others alive are as true (`Question.also`): to know one of them is to know the answer. Candidates are in
  fixed order.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, StrEnum
from random import Random
from typing import Any, NamedTuple, SupportsIndex

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from envs.core import (
    END,
    Question,
    Style,
    TurnKind,
    action_space,
    aec,
    clean,
    observation_space,
    read_seed,
    read_styles,
)

NAMES = ("Red", "Blue", "Green", "Yellow", "Orange", "Purple", "Pink")  # the palette; lists of names keep this order
DIRECTIONS = {"north": (0, -1), "south": (0, 1), "west": (-1, 0), "east": (1, 0)}
MIN_PLAYERS, MAX_PLAYERS = 4, len(NAMES)
MAX_SIDE = 5  # rooms
MAX_TASKS = 10
PAYMENT = ("shaping", "loser_reward")  # settings that no player reads of

Room = tuple[int, int]  # x from the west, y from the north

# --- Settings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rules:
    """The settings of the game. Raises ValueError, naming the setting, where they make no game."""

    width: int  # rooms, 1 to 5
    height: int
    layouts: tuple[Room, ...]  # where given, each episode draws its (width, height) from these
    players: int  # 4 to 7
    imposters: int  # fewer than the crewmates
    tasks: int  # of each crewmate, each in a random room
    tasks_range: tuple[int, int] | None  # where given, each episode draws `tasks` from lowest to highest
    walk_steps: int  # steps to a neighbouring room
    task_steps: int  # steps to do a task
    cooldown: int  # steps before an imposter may kill: at the start, after a kill, after a discussion
    reprompt: int  # a waiting player is asked again after so many steps, or when what it sees changes
    messages_each: int  # in a discussion; 0: straight to the vote
    message_words: int  # longer messages are cut
    message_chars: int
    imposters_report: bool
    recall: bool  # a discussion begins with a reminder of what each has seen since the last one
    candidates: str  # of the belief question: living_others or all_names
    max_steps: int  # then nobody wins: a truncation, since no player is told of this limit
    shaping: float  # extra reward for a task done, a kill, a report, a crewmate's vote for an imposter
    loser_reward: float  # of the losers, and of everybody when time runs out; winners get 1

    def __post_init__(self) -> None:
        least = {"players": MIN_PLAYERS, "messages_each": 0, "cooldown": 0}
        most = {"width": MAX_SIDE, "height": MAX_SIDE, "players": MAX_PLAYERS, "tasks": MAX_TASKS, "messages_each": 10}
        for f in fields(self):
            if f.type == "int":
                _check_int(f.name, getattr(self, f.name), least.get(f.name, 1), most.get(f.name, 1_000))
        if 2 * self.imposters >= self.players:
            raise ValueError(
                f"imposters must be fewer than crewmates, at most {(self.players - 1) // 2} among {self.players} "
                f"players, got {self.imposters}."
            )
        if self.width * self.height == 1:
            raise ValueError("width and height must not both be 1: there would be nowhere to walk to.")
        object.__setattr__(self, "layouts", _layouts(self.layouts or ()))  # tuples, where YAML gave lists
        if self.tasks_range is not None:
            low, high = _pairs("tasks_range", (self.tasks_range,))[0]
            if not 1 <= low <= high <= MAX_TASKS:
                raise ValueError(
                    f"tasks_range must be the lowest and highest number of tasks, within 1 to {MAX_TASKS}, "
                    f"got ({low}, {high})."
                )
            object.__setattr__(self, "tasks_range", (low, high))
        for name in ("imposters_report", "recall"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}.")
        if self.candidates not in ("living_others", "all_names"):
            raise ValueError(f"candidates must be living_others or all_names, got {self.candidates!r}.")
        for name in ("shaping", "loser_reward"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 100:
                raise ValueError(f"{name} must be a number from -100 to 100, got {value!r}.")


def _check_int(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} must be a whole number from {least} to {most}, got {value!r}.")


def _layouts(value: Any) -> tuple[Room, ...]:
    layouts = _pairs("layouts", value)
    for width, height in layouts:
        if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE and width * height > 1):
            raise ValueError(
                f"layouts must be pairs of sides of 1 to {MAX_SIDE} rooms, not both 1, got ({width}, {height})."
            )
    return layouts


def _pairs(name: str, value: Any) -> tuple[tuple[int, int], ...]:
    try:
        pairs = tuple((a, b) for a, b in value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be made of pairs of whole numbers, got {value!r}.") from error
    if not all(isinstance(n, int) and not isinstance(n, bool) for pair in pairs for n in pair):
        raise ValueError(f"{name} must be made of pairs of whole numbers, got {value!r}.")
    return pairs


# --- State ------------------------------------------------------------------------------------------------------------


class Role(StrEnum):
    CREWMATE = "crewmate"
    IMPOSTER = "imposter"


class Phase(Enum):
    MOVE = 0
    TALK = 1
    VOTE = 2
    OVER = 3


class Ending(StrEnum):
    """How a game ended: crewmates win by the first two, imposters by the third, nobody by the last."""

    EJECTION = "ejection"  # no imposter lives
    TASKS = "tasks"  # living crewmates have none left
    PARITY = "parity"  # imposters are at least as many as living crewmates
    TIME = "time"


class Activity(Enum):
    READY = 0  # to act in the coming step
    WALK = 1
    TASK = 2
    WAIT = 3


class Act(StrEnum):
    GO = "go"
    WAIT = "wait"
    TASK = "do task"
    REPORT = "report"
    KILL = "kill"
    VOTE = "vote"
    SKIP = "skip"


class Action(NamedTuple):
    """A choice. `target` is a direction of GO, a name of REPORT, KILL and VOTE, else empty."""

    act: Act
    target: str = ""


WAIT, TASK, SKIP = Action(Act.WAIT), Action(Act.TASK), Action(Act.SKIP)
GO = {direction: Action(Act.GO, direction) for direction in DIRECTIONS}
REPORT, KILL, VOTE = ({name: Action(act, name) for name in NAMES} for act in (Act.REPORT, Act.KILL, Act.VOTE))


@dataclass
class Player:
    name: str
    role: Role
    room: Room
    tasks: list[Room]  # still to be done
    cooldown: int  # steps until an imposter may kill
    rng: Random  # its own, so that no player's draws can tell anything of another's options
    alive: bool = True
    activity: Activity = Activity.READY
    timer: int = 0  # steps until the activity ends
    origin: Room | None = None  # where a walker comes from
    bound: Room | None = None  # where the walk of one who was killed on its way would have ended
    seen: Look | None = None  # what it saw when it was last asked, without the cooldown
    sightings: dict[str, Room] = field(default_factory=dict)  # where it last saw whom since the last discussion
    killings: dict[str, str] = field(default_factory=dict)  # victims by killer, as far as it noticed


class Body(NamedTuple):
    name: str
    room: Room


@dataclass
class Game:
    """One episode. `told` and `earned` hold what the last step brought, by seat; transitions add to them."""

    rules: Rules
    width: int
    height: int
    tasks_each: int
    players: list[Player]  # by seat
    imposters: tuple[int, ...]  # seats, in the order drawn
    rng: Random  # who speaks when, and which of several reports counts
    by_name: list[Player] = field(init=False)  # in the order of the palette
    seat: dict[str, int] = field(init=False)
    phase: Phase = Phase.MOVE
    step: int = 0
    bodies: list[Body] = field(default_factory=list)
    speakers: list[int] = field(default_factory=list)  # seats that will speak in this discussion, the next one first
    due: dict[int, list[Action]] = field(default_factory=dict)  # who must act now, and its options (none: to speak)
    asks: bool = False  # whether the belief question is due now
    winner: Role | None = None
    ending: Ending | None = None
    told: list[list[Event]] = field(default_factory=list)
    earned: list[int] = field(default_factory=list)  # deeds that shaping pays for
    counts: dict[str, int] = field(default_factory=dict)  # what happened how often, for the outcome

    def __post_init__(self) -> None:
        self.by_name = sorted(self.players, key=lambda p: NAMES.index(p.name))
        self.seat = {p.name: seat for seat, p in enumerate(self.players)}
        self.clear()
        self.counts = dict.fromkeys(
            ("decisions", "messages", "discussions", "kills", "tasks", "ejections", "votes", "votes_for_imposter"), 0
        )

    def clear(self) -> None:
        self.told = [[] for _ in self.players]
        self.earned = [0] * len(self.players)

    def tell_living(self, event: Event, but: int = -1) -> None:
        for seat, player in enumerate(self.players):
            if player.alive and seat != but:
                self.told[seat].append(event)

    def living(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.by_name if p.alive)

    @property
    def start_room(self) -> Room:
        return (self.width - 1) // 2, 0


# What players get to know. Names and rooms are those of the game; the words come later.


class Intro(NamedTuple):
    name: str
    role: Role
    width: int
    height: int
    names: tuple[str, ...]
    imposters: int
    fellows: tuple[str, ...]  # the other imposters; of a crewmate, nobody
    tasks: tuple[Room, ...]


class Look(NamedTuple):
    room: Room
    present: tuple[str, ...]
    entering: tuple[tuple[str, Room], ...]  # and where from
    leaving: tuple[tuple[str, Room], ...]  # and where to
    bodies: tuple[str, ...]
    tasks: int  # own tasks to be done here
    cooldown: int = -1  # -1 for crewmates


class Done(NamedTuple):
    """A task is done."""


class Killed(NamedTuple):
    killer: str
    victim: str  # empty: you


class Meeting(NamedTuple):
    finder: str
    victim: str
    room: Room
    living: tuple[str, ...]


class Recall(NamedTuple):
    """What the player has seen: killings by living players, and where the others alive were last seen."""

    killings: tuple[tuple[str, str], ...]  # killer, victim
    sightings: tuple[tuple[str, Room], ...]


class SpeakNow(NamedTuple):
    pass


class Said(NamedTuple):
    speaker: str
    message: str


class Cut(NamedTuple):
    """Your message was too long."""


class VoteNow(NamedTuple):
    pass


class Tally(NamedTuple):
    counts: tuple[tuple[str, int], ...]  # name or "skip", votes; without those that got none
    ejected: str  # empty: nobody


class Refused(NamedTuple):
    """Your reply was none of the options and counts as this one."""

    instead: Act


class Over(NamedTuple):
    winner: Role | None
    ending: Ending


Event = Intro | Look | Done | Killed | Meeting | Recall | SpeakNow | Said | Cut | VoteNow | Tally | Refused | Over

# --- The start --------------------------------------------------------------------------------------------------------


def new_game(rules: Rules, seed: int, options: dict[str, Any] | None = None) -> Game:
    """Draws names, roles and tasks; `options` may fix some (see `AmongUs`). ValueError for values that fit no game.

    Every hidden fact is drawn from a generator of its own, so that fixing one leaves all others as they were.
    """
    start = _read_start(options or {}, rules)
    rng = Random(f"{seed} layout")
    width, height = rng.choice(rules.layouts or ((rules.width, rules.height),))
    low, high = rules.tasks_range or (rules.tasks, rules.tasks)
    tasks_each = rng.randint(low, high)
    width, height = start.get("layout", (width, height))
    names = start.get("names") or Random(f"{seed} names").sample(NAMES, rules.players)
    imposters = start.get("imposters") or Random(f"{seed} roles").sample(range(rules.players), rules.imposters)
    players = []
    for seat, name in enumerate(names):
        own = Random(f"{seed} seat {seat}")
        tasks = [(own.randrange(width), own.randrange(height)) for _ in range(tasks_each)]  # imposters draw too
        role = Role.IMPOSTER if seat in imposters else Role.CREWMATE
        if "tasks" in start:
            tasks = list(start["tasks"][seat])
        players.append(
            Player(
                name=name,
                role=role,
                room=((width - 1) // 2, 0),
                tasks=tasks if role is Role.CREWMATE else [],
                cooldown=rules.cooldown if role is Role.IMPOSTER else 0,
                rng=own,
            )
        )
    game = Game(rules, width, height, tasks_each, players, tuple(imposters), Random(f"{seed} talk"))
    if any(not 0 <= x < width or not 0 <= y < height for p in players for x, y in p.tasks):
        raise ValueError(f"The reset option 'tasks' names rooms outside the grid of {width} x {height}.")
    everyone = tuple(p.name for p in game.by_name)
    for seat, p in enumerate(players):
        fellows = tuple(q.name for q in game.by_name if q.role is p.role and q is not p)
        game.told[seat].append(
            Intro(
                name=p.name,
                role=p.role,
                width=width,
                height=height,
                names=everyone,
                imposters=len(imposters),
                fellows=fellows if p.role is Role.IMPOSTER else (),
                tasks=tuple(sorted(p.tasks, key=lambda room: (room[1], room[0]))),
            )
        )
    _ask_movers(game)
    return game


def _read_start(options: dict[str, Any], rules: Rules) -> dict[str, Any]:
    """The reset options that it knows, checked; others are ignored."""
    start: dict[str, Any] = {}
    for key in ("imposters", "names", "layout", "tasks"):
        if key in options and not isinstance(options[key], list | tuple):
            raise ValueError(f"The reset option {key!r} must be a list or tuple, got {options[key]!r}.")
    seats = range(rules.players)
    if "imposters" in options:
        imposters = tuple(options["imposters"])
        known = all(isinstance(seat, SupportsIndex) and seat in seats for seat in imposters)
        if not known or not len(imposters) == len(set(imposters)) == rules.imposters:
            raise ValueError(
                f"The reset option 'imposters' must be {rules.imposters} of seats 0 to {seats[-1]}, got {imposters}."
            )
        start["imposters"] = tuple(map(operator.index, imposters))
    if "names" in options:
        names = start["names"] = tuple(str(name).capitalize() for name in options["names"])
        if len(names) != rules.players or len(set(names)) != len(names) or not set(names) <= set(NAMES):
            raise ValueError(
                f"The reset option 'names' must be {rules.players} different names of {', '.join(NAMES)}, got {names}."
            )
    if "layout" in options:
        start["layout"] = _layouts((options["layout"],))[0]
    if "tasks" in options:
        tasks = start["tasks"] = [_pairs("tasks", own) for own in options["tasks"]]
        if len(tasks) != rules.players or not all(tasks):
            raise ValueError("The reset option 'tasks' must give at least one room (x, y) for each seat.")
    return start


# --- What a player sees and may do ------------------------------------------------------------------------------------


def look(game: Game, player: Player) -> Look:
    """What the player sees of its room, without its cooldown."""
    room = player.room
    present, entering, leaving = [], [], []
    for other in game.by_name:
        goal = other.room
        if other is player:
            continue
        if not other.alive:
            if other.bound is None or goal == room:
                continue
            goal = other.bound  # at this end of its way nothing tells yet what happened at the other
        if goal == room:
            if other.origin is None:
                present.append(other.name)
            else:
                entering.append((other.name, other.origin))
        elif other.origin == room:
            leaving.append((other.name, goal))
    bodies = tuple(body.name for body in game.bodies if body.room == room) if game.bodies else ()
    tasks = player.tasks.count(room)
    return Look(room, tuple(present), tuple(entering), tuple(leaving), bodies, tasks)


def legal_moves(game: Game, player: Player, sight: Look) -> list[Action]:
    """All that a player may do, in a fixed order. It may kill whom it sees, those entering or leaving too."""
    x, y = player.room
    moves = [
        GO[direction]
        for direction, (dx, dy) in DIRECTIONS.items()
        if 0 <= x + dx < game.width and 0 <= y + dy < game.height
    ]
    moves.append(WAIT)
    if sight.tasks:
        moves.append(TASK)
    if player.role is Role.CREWMATE or game.rules.imposters_report:
        moves.extend(REPORT[name] for name in sight.bodies)
    if player.role is Role.IMPOSTER and player.cooldown == 0:
        near = (*sight.present, *(name for name, _ in (*sight.entering, *sight.leaving)))
        moves.extend(KILL[name] for name in near if game.players[game.seat[name]].role is Role.CREWMATE)
    return moves


def _ask_movers(game: Game) -> None:
    """Asks everybody who is ready, and those who wait and see something new or have waited long enough."""
    game.due = {}
    for seat, player in enumerate(game.players):
        if not player.alive or player.activity is Activity.WALK or player.activity is Activity.TASK:
            continue
        sight = look(game, player)
        if player.activity is Activity.WAIT and player.timer > 0 and sight == player.seen:
            continue
        player.activity, player.seen = Activity.READY, sight
        player.sightings |= dict.fromkeys((*sight.present, *(name for name, _ in sight.entering)), sight.room)
        player.sightings |= dict(sight.leaving)
        options = legal_moves(game, player, sight)
        player.rng.shuffle(options)
        game.due[seat] = options
        game.told[seat].append(sight._replace(cooldown=player.cooldown) if player.role is Role.IMPOSTER else sight)


# --- Moving -----------------------------------------------------------------------------------------------------------


def play_moves(game: Game, actions: dict[int, Action]) -> None:
    """One step of moving. `actions` holds a legal action for each seat in `game.due`."""
    rules = game.rules
    kills: list[tuple[int, Action]] = []
    reports: list[tuple[int, Action]] = []
    for seat, action in actions.items():
        player = game.players[seat]
        match action.act:
            case Act.GO:
                dx, dy = DIRECTIONS[action.target]
                player.origin, player.room = player.room, (player.room[0] + dx, player.room[1] + dy)
                player.activity, player.timer = Activity.WALK, rules.walk_steps
            case Act.TASK:
                player.activity, player.timer = Activity.TASK, rules.task_steps
            case Act.WAIT:
                player.activity, player.timer = Activity.WAIT, rules.reprompt
            case Act.KILL:
                kills.append((seat, action))
            case Act.REPORT:
                reports.append((seat, action))

    doing_a_task = {seat for seat, p in enumerate(game.players) if p.activity is Activity.TASK}
    for seat, player in enumerate(game.players):
        _pass_time(game, seat, player)
    for seat, action in kills:
        _kill(game, seat, game.seat[action.target], doing_a_task)

    if _ended(game):
        return
    if reports:
        seat, action = reports[int(game.rng.random() * len(reports))]
        _open_discussion(game, seat, action.target)
    else:
        _ask_movers(game)


def _pass_time(game: Game, seat: int, player: Player) -> None:
    """Walks, tasks and waits go on for one step; those that end leave the player ready."""
    if player.cooldown:
        player.cooldown -= 1
    if not player.timer:
        return
    player.timer -= 1
    if player.timer or player.activity is Activity.WAIT:
        return
    if player.activity is Activity.TASK:
        player.tasks.remove(player.room)
        game.told[seat].append(Done())
        _earn(game, seat, "tasks")
    player.activity, player.origin, player.bound = Activity.READY, None, None


def _kill(game: Game, killer_seat: int, victim_seat: int, doing_a_task: set[int]) -> None:
    """The kill of a step that is over. Everybody in the room notices, except who did a task during the step."""
    killer, victim = game.players[killer_seat], game.players[victim_seat]
    killer.cooldown = game.rules.cooldown
    if not victim.alive:
        return  # another imposter was faster
    victim.alive = False
    if victim.activity is Activity.WALK:
        victim.bound = victim.room
    else:
        victim.activity, victim.timer = Activity.READY, 0
    victim.room = killer.room
    game.bodies.append(Body(victim.name, killer.room))
    game.bodies.sort(key=lambda body: NAMES.index(body.name))
    game.told[victim_seat].append(Killed(killer.name, ""))
    for seat, player in enumerate(game.players):
        if player.alive and player is not killer and player.room == killer.room and seat not in doing_a_task:
            game.told[seat].append(Killed(killer.name, victim.name))
            player.killings[killer.name] = victim.name
    _earn(game, killer_seat, "kills")


def _earn(game: Game, seat: int, deed: str) -> None:
    game.earned[seat] += 1
    game.counts[deed] += 1


def _ended(game: Game) -> bool:
    """Ends the game if somebody has won, or else time has run out: before anything new begins."""
    if not _won(game) and game.step >= game.rules.max_steps:
        game.ending = Ending.TIME
        _close(game)
    return game.phase is Phase.OVER


def _won(game: Game) -> bool:
    """Ends the game if somebody has won."""
    living = [p for p in game.players if p.alive]
    imposters = sum(p.role is Role.IMPOSTER for p in living)
    if not imposters:
        game.winner, game.ending = Role.CREWMATE, Ending.EJECTION
    elif imposters >= len(living) - imposters:
        game.winner, game.ending = Role.IMPOSTER, Ending.PARITY
    elif not any(p.tasks for p in living):
        game.winner, game.ending = Role.CREWMATE, Ending.TASKS
    else:
        return False
    _close(game)
    return True


def _close(game: Game) -> None:
    assert game.ending is not None
    game.phase, game.due, game.asks = Phase.OVER, {}, False
    for events in game.told:
        events.append(Over(game.winner, game.ending))


# --- Talking and voting -----------------------------------------------------------------------------------------------


def _open_discussion(game: Game, finder: int, victim: str) -> None:
    player = game.players[finder]
    body = next(body for body in game.bodies if body.name == victim)
    game.bodies.remove(body)
    _earn(game, finder, "discussions")
    game.tell_living(Meeting(player.name, victim, body.room, game.living()))
    order = [seat for seat, p in enumerate(game.players) if p.alive]
    for seat in order if game.rules.recall else ():
        if (recall := _recall(game, game.players[seat])) != Recall((), ()):
            game.told[seat].append(recall)
    game.rng.shuffle(order)
    game.speakers = order * game.rules.messages_each
    game.asks = True
    _next_speaker(game)


def _recall(game: Game, player: Player) -> Recall:
    living = [name for name in game.living() if name != player.name]
    return Recall(
        tuple((name, player.killings[name]) for name in living if name in player.killings),
        tuple((name, player.sightings[name]) for name in living if name in player.sightings),
    )


def _next_speaker(game: Game) -> None:
    """Asks the next one to speak, or everybody to vote."""
    if game.speakers:
        game.phase, game.due = Phase.TALK, {game.speakers[0]: []}
        game.told[game.speakers[0]].append(SpeakNow())
        return
    game.phase, game.due = Phase.VOTE, {}
    for seat, player in enumerate(game.players):
        if player.alive:
            options = [*(VOTE[name] for name in game.living()), SKIP]
            player.rng.shuffle(options)
            game.due[seat] = options
    game.tell_living(VoteNow())


def say(game: Game, message: str, cut: bool) -> None:
    """The next speaker says this to all others."""
    seat = game.speakers.pop(0)
    game.counts["messages"] += 1
    if cut:
        game.told[seat].append(Cut())
    game.tell_living(Said(game.players[seat].name, message), but=seat)
    game.asks = True
    if not _ended(game):
        _next_speaker(game)


def count_votes(game: Game, votes: dict[int, Action]) -> None:
    """`votes` of all living seats, VOTE or SKIP. Then the game goes on in the start room, or is over."""
    counts: dict[str, int] = {}
    for seat, vote in votes.items():
        choice = vote.target or vote.act.value
        counts[choice] = counts.get(choice, 0) + 1
        if game.players[seat].role is Role.CREWMATE:
            game.counts["votes"] += 1
            if vote.act is Act.VOTE and game.players[game.seat[vote.target]].role is Role.IMPOSTER:
                _earn(game, seat, "votes_for_imposter")
    most = max(counts.values())
    leaders = [choice for choice, n in counts.items() if n == most]
    ejected = leaders[0] if len(leaders) == 1 and leaders[0] != Act.SKIP else ""
    game.tell_living(Tally(tuple((c, counts[c]) for c in (*NAMES, Act.SKIP.value) if c in counts), ejected))
    if ejected:
        game.players[game.seat[ejected]].alive = False
        game.counts["ejections"] += 1
    if _ended(game):
        return
    for player in game.players:
        player.activity, player.origin, player.bound, player.timer = Activity.READY, None, None, 0
        if player.alive:
            player.room, player.seen = game.start_room, None
            player.sightings = {}
            player.cooldown = game.rules.cooldown if player.role is Role.IMPOSTER else 0
    game.phase = Phase.MOVE
    _ask_movers(game)


class Heard(NamedTuple):
    """A message; `start:end` are the characters of the reply that it was made of."""

    text: str
    start: int
    end: int
    cut: bool


def hear(reply: str, max_words: int, max_chars: int, compact: bool = False) -> Heard:
    """What others hear of a reply: its words up to `[END]`, on one line, within both limits. No words is no message.

    Angle brackets and double quotes become ( ) and ', so that no message can pass for the game's own words. In compact
    style, which writes without these, a message is in lower case, its "says" becomes "say" and its underscores -, so
    that it can pass neither for somebody else's message nor for an option.
    """
    words = list(re.finditer(r"\S+", reply.partition(END)[0]))
    heard: list[str] = []
    end = length = 0
    for word in words[:max_words]:
        room = max_chars - length - bool(heard)
        if room < 1:
            break
        heard.append(word[0][:room])
        end = word.start() + len(heard[-1])
        length += len(heard[-1]) + (len(heard) > 1)
        if len(heard[-1]) < len(word[0]):
            break
    text = clean(" ".join(heard), max_chars).translate(_NO_FORGERY)
    if compact:
        text = _in_compact(text)
    start = words[0].start() if heard else 0
    return Heard(text, start, end, bool(words) and end < words[-1].end())


def _in_compact(message: str) -> str:
    """A message as compact style tells it; one that is told so already stays as it is."""
    return re.sub(r"\bsays\b", "say", message.lower().replace("_", "-"))


_NO_FORGERY = str.maketrans({"<": "(", ">": ")", '"': "'"})

# --- Words ------------------------------------------------------------------------------------------------------------


QUESTION = {Style.NATURAL: "Which player is the imposter?", Style.COMPACT: "<imposter?>"}
ROOMS = (  # compact names of the rooms: ROOMS[y][x]
    ("bridge", "galley", "lounge", "office", "armory"),
    ("lab", "garden", "clinic", "gym", "archive"),
    ("reactor", "engine", "shaft", "boiler", "dock"),
    ("hangar", "vault", "workshop", "shower", "laundry"),
    ("chapel", "studio", "kennel", "silo", "cellar"),
)
_ROOM_OF = {name: (x, y) for y, row in enumerate(ROOMS) for x, name in enumerate(row)}
_LOWER = {name: name.lower() for name in NAMES}

ALL_ACTIONS = (*GO.values(), WAIT, TASK, *REPORT.values(), *KILL.values(), *VOTE.values(), SKIP)
_FORM = {Act.REPORT: "report body of {}", Act.KILL: "kill {}", Act.VOTE: "{}", Act.GO: "go {}"}
_COMPACT_FORM = {Act.REPORT: "report_{}", Act.KILL: "kill_{}", Act.VOTE: "{}", Act.GO: "go_{}", Act.TASK: "do_task"}
OPTION = {  # how an action reads among the options
    Style.NATURAL: {a: _FORM.get(a.act, a.act.value).format(a.target) for a in ALL_ACTIONS},
    Style.COMPACT: {a: _COMPACT_FORM.get(a.act, a.act.value).format(a.target.lower()) for a in ALL_ACTIONS},
}

# Strings of compact style that a tokenizer made for this game should keep whole; numbers are its own business.
COMPACT_TOKENS = (
    *_LOWER.values(),
    *_ROOM_OF,
    *(text for action, text in OPTION[Style.COMPACT].items() if action.act is not Act.VOTE),
    *("grid", "imposters", "players", "you", "crewmate", "imposter", "with", "tasks"),
    *("at", "in", "out", "body", "task", "cooldown", "ready", "done", "killer", "victim"),
    *("meeting", "found", "living", "recall", "speak", "says", "cut", "vote", "votes", "ejected", "nobody"),
    *("refused", "crewmates", "win", "time", "ejection", "parity"),
    QUESTION[Style.COMPACT],
    END,
)


# Words that mean nothing but who is who: a game with others of them, in the same order, might have been played as well.
EXCHANGEABLE = {Style.NATURAL: NAMES, Style.COMPACT: tuple(_LOWER.values())}


def write(event: Event, style: Style) -> str:
    """The event in words, as they stand in an observation."""
    return _write_natural(event) if style is Style.NATURAL else _write_compact(event)


def _write_compact(event: Event) -> str:
    match event:
        case Look(room, present, entering, leaving, bodies, tasks, cooldown):
            text = " at " + ROOMS[room[1]][room[0]]
            for name in present:
                text += " " + _LOWER[name]
            for name, (x, y) in entering:
                text += f" in {_LOWER[name]} {ROOMS[y][x]}"
            for name, (x, y) in leaving:
                text += f" out {_LOWER[name]} {ROOMS[y][x]}"
            for name in bodies:
                text += " body " + _LOWER[name]
            text += " task" * tasks
            return text + ("" if cooldown < 0 else f" cooldown {cooldown}" if cooldown else " ready")
        case Intro(name, role, width, height, names, imposters, fellows, tasks):
            text = f" grid {width} {height} imposters {imposters} players{_spaced(names)} you {_LOWER[name]} {role}"
            text += f" with{_spaced(fellows)}" if fellows else ""
            return text + (" tasks " + " ".join(ROOMS[y][x] for x, y in tasks) if tasks else "")
        case Done():
            return " done"
        case Killed(killer, victim):
            # Names come after what they are: small models find a killer thrice as soon so as in "red killed blue".
            return f" killer {_LOWER[killer]} victim {_LOWER.get(victim, 'you')}"
        case Meeting(finder, victim, (x, y), living):
            return f" meeting {_LOWER[finder]} found {_LOWER[victim]} at {ROOMS[y][x]} living{_spaced(living)}"
        case Recall(killings, sightings):
            seen = "".join(f" killer {_LOWER[killer]} victim {_LOWER[victim]}" for killer, victim in killings)
            return " recall" + seen + "".join(f" {_LOWER[name]} {ROOMS[y][x]}" for name, (x, y) in sightings)
        case SpeakNow():
            return " speak"
        case Said(speaker, message):
            return f" {_LOWER[speaker]} says {_in_compact(message)}{' ' if message else ''}{END}"
        case Cut():
            return " cut"
        case VoteNow():
            return " vote"
        case Tally(counts, ejected):
            votes = "".join(f" {choice.lower()} {n}" for choice, n in counts)
            return f" votes{votes} ejected {_LOWER.get(ejected, 'nobody')}"
        case Refused(instead):
            return f" refused {instead}"
        case Over(winner, ending):
            return f" {winner}s win {ending}" if winner else " nobody win time"


def _spaced(names: Sequence[str]) -> str:
    return "".join(" " + _LOWER[name] for name in names)


def _write_natural(event: Event) -> str:
    match event:
        case Look(room, present, entering, leaving, bodies, tasks, cooldown):
            text = f"You are in room {_at(room)}."
            if present:
                text += f" Here with you: {', '.join(present)}."
            for name, origin in entering:
                text += f" {name} is entering from room {_at(origin)}."
            for name, target in leaving:
                text += f" {name} is leaving to room {_at(target)}."
            if not (present or entering or leaving):
                text += " Nobody else is here."
            for name in bodies:
                text += f" The body of {name} lies here!"
            if tasks:
                text += f" Tasks of yours to do here: {tasks}."
            if cooldown >= 0:
                text += f" Steps until you may kill: {cooldown}." if cooldown else " You may kill now."
            return text + "\n"
        case Intro(name, role, width, height, names, imposters, fellows, tasks):
            text = f"You play Among Us on a grid of rooms, {width} wide and {height} high.\n"
            text += f"Players: {', '.join(names)}. Imposters among them: {imposters}.\n"
            text += f"You are {name}, {'an imposter' if role is Role.IMPOSTER else 'a crewmate'}.\n"
            text += f"Your fellow imposters: {', '.join(fellows)}.\n" if fellows else ""
            return text + (f"Your tasks are in: {', '.join(f'room {_at(room)}' for room in tasks)}.\n" if tasks else "")
        case Done():
            return "You have done the task.\n"
        case Killed(killer, victim):
            return f"You notice {killer} killing {victim}!\n" if victim else f"{killer} has killed you. You are dead.\n"
        case Meeting(finder, victim, room, living):
            return (
                f"{finder} has found the body of {victim} in room {_at(room)}. A discussion begins. "
                f"Alive: {', '.join(living)}.\n"
            )
        case Recall(killings, sightings):
            seen = [f"{killer} killed {victim}" for killer, victim in killings]
            seen += [f"{name} was last in room {_at(room)}" for name, room in sightings]
            return f"What you have seen: {', '.join(seen)}.\n"
        case SpeakNow():
            return "It is your turn to speak.\n"
        case Said(speaker, message):
            return f'{speaker} says: "{message}"\n'
        case Cut():
            return "Your message was too long and was cut: the others heard only its beginning.\n"
        case VoteNow():
            return "Now everybody votes: which player do you want to eject?\n"
        case Tally(counts, ejected):
            votes = ", ".join(f"{choice} {n}" for choice, n in counts)
            return f"Votes: {votes}. {ejected or 'Nobody'} is ejected.\n"
        case Refused(instead):
            return f"Your reply was not one of your options. It counts as: {instead}.\n"
        case Over(winner, ending):
            won = f"The {winner}s win" if winner else "Nobody wins"
            return f"The game is over. {won}: {_REASON[ending]}.\n"


_REASON = {
    Ending.EJECTION: "no imposter is left",
    Ending.TASKS: "all tasks are done",
    Ending.PARITY: "imposters are as many as crewmates",
    Ending.TIME: "time has run out",
}


def _at(room: Room) -> str:
    return f"({room[0]},{room[1]})"


def explain(rules: Rules, start_room: Room) -> str:
    """The rules in sentences, which natural style puts after the intro."""
    steps = f"Walking to a neighbouring room takes {rules.walk_steps} steps, a task {rules.task_steps} steps"
    reporting = "Everybody" if rules.imposters_report else "Crewmates"
    if rules.messages_each:
        talk = (
            f"everybody alive speaks, {rules.messages_each} messages each of at most {rules.message_words} words, "
            f"finished with {END}; then all vote"
        )
    else:
        talk = "everybody alive votes"
    return (
        "Room (x,y) lies x rooms east and y rooms south of the north-west corner. "
        f"All start in room {_at(start_room)}.\n"
        f"Time runs in steps. {steps}; whoever does a task does not see the room.\n"
        "Crewmates win when no imposter is alive, or when all tasks of the living crewmates are done. "
        "Imposters win when they are as many as the living crewmates.\n"
        "Imposters can kill a crewmate in their room; after the start, a kill or a discussion they must wait "
        f"{rules.cooldown} steps. Who is there and not busy with a task notices.\n"
        f"{reporting} can report a body that they see. Then {talk}: for a player to be ejected, or skip. "
        "The player with most votes is ejected; when the vote is tied or most skip, nobody is. "
        "Then all start again together.\n"
        "When you are asked to act, answer with one of the options given, word for word.\n"
    )


# --- Reading, for scripted players and analysts -----------------------------------------------------------------------

_N = f"(?:{'|'.join(NAMES)})"
_n = f"(?:{'|'.join(_LOWER.values())})"
_R, _r = r"\(\d,\d\)", f"(?:{'|'.join(_ROOM_OF)})"
_PATTERNS: dict[Style, tuple[tuple[type, re.Pattern[str]], ...]] = {
    Style.COMPACT: tuple(
        (kind, re.compile(pattern))
        for kind, pattern in (
            (Said, rf" ({_n}) says (?:(.*?) )?{re.escape(END)}"),
            (Killed, rf" killer ({_n}) victim ({_n}|you)"),
            (
                Look,
                rf" at ({_r})((?: {_n})*)((?: in {_n} {_r})*)((?: out {_n} {_r})*)((?: body {_n})*)((?: task)*)"
                r"( ready| cooldown \d+)?",
            ),
            (Done, " done"),
            (SpeakNow, " speak"),
            (VoteNow, r" vote\b"),
            (Cut, " cut"),
            (Refused, " refused (wait|skip)"),
            (Tally, rf" votes((?: (?:{_n}|skip) \d+)+) ejected ({_n}|nobody)"),
            (Meeting, rf" meeting ({_n}) found ({_n}) at ({_r}) living((?: {_n})+)"),
            (Recall, rf" recall((?: killer {_n} victim {_n})*)((?: {_n} {_r})*)"),
            (
                Intro,
                rf" grid (\d) (\d) imposters (\d) players((?: {_n})+) you ({_n}) (crewmate|imposter)"
                rf"(?: with((?: {_n})+))?(?: tasks((?: {_r})+))?",
            ),
            (Over, " (crewmates|imposters|nobody) win ([a-z]+)"),
        )
    ),
    Style.NATURAL: tuple(
        (kind, re.compile(pattern))
        for kind, pattern in (
            (Said, rf'({_N}) says: "(.*)"\n'),
            (Killed, rf"You notice ({_N}) killing ({_N})!\n|({_N}) has killed you\..*\n"),
            (
                Look,
                rf"You are in room ({_R})\.( Here with you: [\w, ]+\.)?((?: {_N} is entering from room {_R}\.)*)"
                rf"((?: {_N} is leaving to room {_R}\.)*)(?: Nobody else is here\.)?((?: The body of {_N} lies here!)*)"
                r"( Tasks of yours to do here: \d+\.)?( Steps until you may kill: \d+\.| You may kill now\.)?\n",
            ),
            (Done, "You have done the task.\n"),
            (SpeakNow, "It is your turn to speak.\n"),
            (VoteNow, "Now everybody votes.*\n"),
            (Cut, "Your message was too long.*\n"),
            (Refused, r"Your reply was not one of your options\. It counts as: (wait|skip)\.\n"),
            (Tally, rf"Votes: ([\w, ]+)\. ({_N}|Nobody) is ejected\.\n"),
            (Meeting, rf"({_N}) has found the body of ({_N}) in room ({_R})\..*Alive: ([\w, ]+)\.\n"),
            (
                Recall,
                rf"What you have seen: ((?:{_N} killed {_N}(?:, )?)*)((?:{_N} was last in room {_R}(?:, )?)*)\.\n",
            ),
            (
                Intro,
                rf"You play Among Us on a grid of rooms, (\d) wide and (\d) high\.\nPlayers: ([\w, ]+)\. "
                rf"Imposters among them: (\d)\.\nYou are ({_N}), an? (crewmate|imposter)\.\n"
                r"(?:Your fellow imposters: ([\w, ]+)\.\n)?(?:Your tasks are in: (.*)\.\n)?",
            ),
            (Over, r"The game is over\. (?:The (crewmates|imposters) win|Nobody wins): (.*)\.\n"),
            (type(None), ".*\n"),  # the rules explained
        )
    ),
}


def read(text: str, style: Style) -> list[Event]:
    """The events that an observation's text tells of: the inverse of `write`. ValueError where it is no such text.

    Compact style tells messages in lower case, so that is how they are read.
    """
    events: list[Event] = []
    position = 0
    while position < len(text):
        for kind, pattern in _PATTERNS[style]:
            if found := pattern.match(text, position):
                if kind is not type(None):
                    events.append(_event(kind, found, style))
                position = found.end()
                break
        else:
            raise ValueError(f"This is no {style} text of the game: {text[position : position + 80]!r}")
    return events


def _event(kind: type, found: re.Match[str], style: Style) -> Event:
    g = found.groups()
    if kind is Said:
        return Said(_names(g[0])[0], g[1] or "")
    if kind is Killed:
        killer, victim = (g[0] or g[2], g[1] or "") if style is Style.NATURAL else (g[0], g[1])
        return Killed(_names(killer)[0], "".join(_names(victim)))
    if kind is Look:
        here = _rooms(g[0], style)[0]
        entering, leaving = (
            tuple(zip(_names(walkers or ""), _rooms(walkers or "", style), strict=True)) for walkers in (g[2], g[3])
        )
        tasks = int("".join(filter(str.isdigit, g[5] or "0"))) if style is Style.NATURAL else g[5].count("task")
        cooldown = int("0" + "".join(filter(str.isdigit, g[6]))) if g[6] else -1
        return Look(here, _names(g[1] or ""), entering, leaving, _names(g[4] or ""), tasks, cooldown)
    if kind is Refused:
        return Refused(Act(g[0]))
    if kind is Tally:
        counts = tuple((word.capitalize() if word != Act.SKIP else word, int(n)) for word, n in _COUNT.findall(g[0]))
        return Tally(counts, "".join(_names(g[1])))
    if kind is Meeting:
        return Meeting(_names(g[0])[0], _names(g[1])[0], _rooms(g[2], style)[0], _names(g[3]))
    if kind is Recall:
        killings = _names(g[0])
        sightings = zip(_names(g[1]), _rooms(g[1], style), strict=True)
        return Recall(tuple(zip(killings[::2], killings[1::2], strict=True)), tuple(sightings))
    if kind is Intro:
        names, imposters = (g[2], g[3]) if style is Style.NATURAL else (g[3], g[2])
        return Intro(
            name=_names(g[4])[0],
            role=Role(g[5]),
            width=int(g[0]),
            height=int(g[1]),
            names=_names(names),
            imposters=int(imposters),
            fellows=_names(g[6] or ""),
            tasks=_rooms(g[7] or "", style),
        )
    if kind is Over:
        winner = None if g[0] in (None, "nobody") else Role(g[0][:-1])
        return Over(winner, Ending(g[1]) if style is Style.COMPACT else _ENDING[g[1]])
    return kind()  # type: ignore[no-any-return]  # those without fields


_COUNT = re.compile(r"([A-Za-z]+) (\d+)")
_ANY_NAME = re.compile(rf"\b{_N}\b", re.IGNORECASE)
_ANY_ROOM = {Style.NATURAL: re.compile(r"\((\d),(\d)\)"), Style.COMPACT: re.compile(rf"\b{_r}\b")}
_ENDING = {reason: ending for ending, reason in _REASON.items()}


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.capitalize() for name in _ANY_NAME.findall(text))


def _rooms(text: str, style: Style) -> tuple[Room, ...]:
    if style is Style.COMPACT:
        return tuple(_ROOM_OF[name] for name in _ANY_ROOM[style].findall(text))
    return tuple((int(x), int(y)) for x, y in _ANY_ROOM[style].findall(text))


# --- Pictures ---------------------------------------------------------------------------------------------------------

_COLOURS = {
    "Red": (214, 39, 40),
    "Blue": (31, 119, 220),
    "Green": (44, 140, 44),
    "Yellow": (240, 210, 40),
    "Orange": (255, 127, 14),
    "Purple": (128, 70, 170),
    "Pink": (245, 150, 200),
}
_CELL, _SLOT = 96, 24  # pixels: a room's side, a player's place in it


def describe(game: Game) -> str:
    """The whole state as text, hidden parts included: * imposter, + body, > walking in, ! at a task."""
    cells = {}
    for y in range(game.height):
        for x in range(game.width):
            inside = [
                p.name + "*" * (p.role is Role.IMPOSTER) + {Activity.WALK: ">", Activity.TASK: "!"}.get(p.activity, "")
                for p in game.by_name
                if p.alive and p.room == (x, y)
            ]
            inside += [f"+{body.name}" for body in game.bodies if body.room == (x, y)]
            cells[x, y] = f"{_at((x, y))} {' '.join(inside)}"
    side = max(map(len, cells.values()))
    lines = [f"step {game.step}, {game.phase.name.lower()}"]
    lines += ["| " + " | ".join(cells[x, y].ljust(side) for x in range(game.width)) + " |" for y in range(game.height)]
    lines += [f"{p.name}: {len(p.tasks)} tasks left" for p in game.by_name if p.role is Role.CREWMATE and p.alive]
    if dead := [p.name for p in game.by_name if not p.alive]:
        lines.append(f"dead or ejected: {', '.join(dead)}")
    if game.phase is Phase.TALK:
        lines.append("speaking: " + game.players[game.speakers[0]].name)
    if game.ending:
        lines.append(f"over: {game.winner or 'nobody'} wins ({game.ending})")
    return "\n".join(lines) + "\n"


def picture(game: Game) -> np.ndarray:
    """The grid from above, shape (96 height, 96 width, 3), uint8: squares are players (those of imposters have a black
    frame, those of walkers stand by their door), crosses are bodies."""
    image = np.full((game.height * _CELL, game.width * _CELL, 3), 60, np.uint8)
    for y in range(game.height):
        for x in range(game.width):
            top, left = y * _CELL, x * _CELL
            image[top + 2 : top + _CELL - 2, left + 2 : left + _CELL - 2] = (235, 235, 225)
    for slot, player in enumerate(game.by_name):
        if not player.alive:
            continue
        top, left = _slot(player.room, slot)
        if player.origin is not None:  # half way between its door and its place
            back_top, back_left = _slot(player.origin, slot)
            top, left = (top + back_top) // 2, (left + back_left) // 2
        square = image[top : top + _SLOT - 4, left : left + _SLOT - 4]
        square[:] = (0, 0, 0) if player.role is Role.IMPOSTER else _COLOURS[player.name]
        square[3:-3, 3:-3] = _COLOURS[player.name]
    for body in game.bodies:
        top, left = _slot(body.room, next(i for i, p in enumerate(game.by_name) if p.name == body.name))
        for i in range(_SLOT - 4):
            image[top + i, left + i] = image[top + i, left + _SLOT - 5 - i] = _COLOURS[body.name]
    return image


def _slot(room: Room, slot: int) -> tuple[int, int]:
    """The upper left corner of a player's own place within a room: two rows of four."""
    return room[1] * _CELL + 22 + (slot // 4) * (_SLOT + 6), room[0] * _CELL + 2 + (slot % 4) * (_SLOT - 1)


# --- The environment --------------------------------------------------------------------------------------------------

_MAX_TEXT = 4_000  # characters of an observation besides a message; the natural intro is the longest
_MAX_OPTIONS = MAX_PLAYERS + 10


class AmongUs(ParallelEnv[str, dict[str, Any], str]):
    """The game as a PettingZoo parallel environment.

    Settings: all fields of `Rules`, `style` ("natural" or "compact"; the reset option `styles` gives agents others) and
    `render_mode` (None, "ansi" or "rgb_array"). Raises ValueError, naming the setting, for values that make no game.

    Moves and votes are turns CHOOSE, messages SPEAK. The dead stay in `agents` with WAIT. A reply that is none of the
    options counts as `wait` or `skip`, and the player is told. `reset(options=...)` knows `imposters` (seats), `names`
    (in seat order), `tasks` (rooms of each seat), `layout` (width, height) and `styles` (by agent).

    `infos[agent]` holds `role`, `questions`, and of the agent's own last action `entry` ("move", "vote", "message" or
    ""), `error`, `message` (what the others heard) and `span` (the characters of the action that this was); at the end
    also `outcome`, the same dict for all: `winner` ("crewmates", "imposters" or None), `how` (an `Ending`), `steps`,
    `points` of each seat without shaping, `imposters` (agents), `alive`, and counts of `decisions`, `messages`,
    `discussions`, `kills`, `tasks`, `ejections`, `votes` (by crewmates) and `votes_for_imposter` (by crewmates).
    """

    metadata = {"name": "among_us_v0", "render_modes": ["ansi", "rgb_array"], "is_parallelizable": True}  # noqa: RUF012

    def __init__(
        self,
        style: str = "compact",
        width: int = 2,
        height: int = 2,
        layouts: tuple[Room, ...] = (),
        players: int = 5,
        imposters: int = 1,
        tasks: int = 4,
        tasks_range: tuple[int, int] | None = None,
        walk_steps: int = 3,
        task_steps: int = 8,
        cooldown: int = 6,
        reprompt: int = 2,
        messages_each: int = 2,
        message_words: int = 20,
        message_chars: int = 200,
        imposters_report: bool = False,
        recall: bool = False,
        candidates: str = "living_others",
        max_steps: int = 300,
        shaping: float = 0.0,
        loser_reward: float = 0.0,
        render_mode: str | None = None,
    ) -> None:
        if style not in tuple(Style):
            raise ValueError(f"style must be {' or '.join(Style)}, got {style!r}.")
        if render_mode not in (None, "ansi", "rgb_array"):
            raise ValueError(f"render_mode must be None, ansi or rgb_array, got {render_mode!r}.")
        self.rules = Rules(
            width, height, layouts, players, imposters, tasks, tasks_range, walk_steps, task_steps, cooldown, reprompt,
            messages_each, message_words, message_chars, imposters_report, recall, candidates, max_steps, shaping,
            loser_reward,
        )  # fmt: skip
        self.style = Style(style)
        self.render_mode = render_mode
        self.possible_agents = [f"player_{seat}" for seat in range(self.rules.players)]
        self.agents: list[str] = []
        seen = observation_space(_MAX_TEXT + self.rules.message_chars, _MAX_OPTIONS)
        said = action_space(self.rules.message_chars + len(END))
        self.observation_spaces = {agent: seen for agent in self.possible_agents}
        self.action_spaces = {agent: said for agent in self.possible_agents}
        self.state_space = spaces.Box(-1, 1_000, (self.rules.players, 9), np.float32)
        self._seeds: Random | None = None
        self._game: Game | None = None

    def observation_space(self, agent: str) -> spaces.Dict:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Text:
        return self.action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
        """Starts a game, drawn on from where the generator stands if no seed is given. ValueError for bad options."""
        styles = read_styles(options or {}, self.possible_agents, self.style)
        if seed is not None or self._seeds is None:
            self._seeds = Random(None if seed is None else read_seed(seed))
        game = self._game = new_game(self.rules, self._seeds.getrandbits(63), options)
        self.agents = list(self.possible_agents)
        self._styles = tuple(styles.values())  # by seat
        self._facts = {
            "width": game.width,
            "height": game.height,
            "names": self._by_agent([p.name for p in game.players]),
            "roles": self._by_agent([p.role.value for p in game.players]),
            "tasks": self._by_agent([tuple(p.tasks) for p in game.players]),
            "imposters": tuple(self.possible_agents[seat] for seat in game.imposters),
        }
        return self._observations(first=True), self._infos()

    def step(
        self, actions: dict[str, Any]
    ) -> tuple[
        dict[str, dict[str, Any]],
        dict[str, float],
        dict[str, bool],
        dict[str, bool],
        dict[str, dict[str, Any]],
    ]:
        """Plays the replies of those who must act; others' are ignored, a missing one counts as an empty reply.

        After the end there is nothing to play, and all five dicts come back empty.
        """
        game = self._started()
        if not self.agents:
            return {}, {}, {}, {}, {}
        game.clear()
        game.asks = False
        game.step += 1
        game.counts["decisions"] += len(game.due)
        own: dict[int, dict[str, Any]] = {}  # what infos say of each action
        if game.phase is Phase.TALK:
            seat = game.speakers[0]
            reply = _text(actions.get(self.possible_agents[seat]))
            heard = hear(reply, self.rules.message_words, self.rules.message_chars, self._styles[seat] is Style.COMPACT)
            own[seat] = {"entry": "message", "message": heard.text, "span": (heard.start, heard.end)}
            say(game, heard.text, heard.cut)
        else:
            voting = game.phase is Phase.VOTE
            chosen = {}
            for seat, legal in game.due.items():
                reply = _text(actions.get(self.possible_agents[seat]))
                chosen[seat], error = self._choose(seat, reply, legal, SKIP if voting else WAIT)
                own[seat] = {"entry": "vote" if voting else "move", "error": error}
                if error:
                    game.told[seat].append(Refused(chosen[seat].act))
            (count_votes if voting else play_moves)(game, chosen)
        over = game.phase is Phase.OVER
        rewards = [self.rules.shaping * n for n in game.earned]
        if over:
            points = [1.0 if p.role is game.winner else float(self.rules.loser_reward) for p in game.players]
            rewards = [reward + n for reward, n in zip(rewards, points, strict=True)]
        observations, infos = self._observations(), self._infos()
        for seat, entry in own.items():
            infos[self.possible_agents[seat]].update(entry)
        if over:
            outcome = {
                "winner": f"{game.winner}s" if game.winner else None,
                "how": game.ending.value if game.ending else "",
                "steps": game.step,
                "points": self._by_agent(points),
                "imposters": self._facts["imposters"],
                "alive": self._by_agent([p.alive for p in game.players]),
                **game.counts,
            }
            for info in infos.values():
                info["outcome"] = outcome
            self.agents = []
        truncated = game.ending is Ending.TIME
        return (
            observations,
            self._by_agent(rewards),
            dict.fromkeys(self.possible_agents, over and not truncated),
            dict.fromkeys(self.possible_agents, truncated),
            infos,
        )

    @property
    def facts(self) -> dict[str, Any]:
        """What is hidden from the players at the start, for analysts: layout, and by agent names, roles and tasks."""
        self._started()
        return self._facts

    @property
    def living(self) -> list[str]:
        """The agents who are alive now, for analysts: the dead stay in `agents`."""
        return [a for a, p in zip(self.possible_agents, self._started().players, strict=True) if p.alive]

    def privileged(self, agent: str) -> tuple[float, ...]:
        """What a privileged critic may know: for each of the seven names in order, 1 if it is an imposter's, else 0."""
        game = self._started()
        imposters = {game.players[seat].name for seat in game.imposters}
        return tuple(float(name in imposters) for name in NAMES)

    def state(self) -> np.ndarray:
        """The hidden state by seat, shape (players, 9): index of the name, imposter, alive, x, y, tasks left, cooldown,
        activity (0 ready, 1 walking, 2 at a task, 3 waiting), steps until that ends."""
        return np.array(
            [
                [NAMES.index(p.name), p.role is Role.IMPOSTER, p.alive, *p.room, len(p.tasks), p.cooldown,
                 p.activity.value * p.alive, p.timer * p.alive]
                for p in self._started().players
            ],
            np.float32,
        )  # fmt: skip

    def render(self) -> str | np.ndarray | None:
        """The whole state, hidden parts included, as text or picture; None (with a warning) without a render mode."""
        if self.render_mode is None:
            gymnasium.logger.warn("render() does nothing unless the environment is made with a render_mode.")
            return None
        return describe(self._started()) if self.render_mode == "ansi" else picture(self._started())

    def close(self) -> None:
        """Nothing to release."""

    def _started(self) -> Game:
        if self._game is None:
            raise RuntimeError("No game has been started: call reset() first.")
        return self._game

    def _by_agent(self, values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.possible_agents, values, strict=True))

    def _choose(self, seat: int, reply: str, legal: list[Action], otherwise: Action) -> tuple[Action, str]:
        """The option that a reply names, word for word; else what it counts as, and why."""
        words = OPTION[self._styles[seat]]
        reply = reply.strip()
        for action in legal:
            if words[action] == reply:
                return action, ""
        options = ", ".join(words[action] for action in legal)
        return otherwise, f"{clean(reply, 40)!r} is none of the options ({options}). It counts as {words[otherwise]}."

    def _observations(self, first: bool = False) -> dict[str, dict[str, Any]]:
        game = self._started()
        turn = int(TurnKind.SPEAK if game.phase is Phase.TALK else TurnKind.CHOOSE)  # a plain int: a member of Discrete
        observations = {}
        for seat, (agent, style) in enumerate(zip(self.possible_agents, self._styles, strict=True)):
            told = [write(event, style) for event in game.told[seat]]
            if first and style is Style.NATURAL:
                told.insert(1, explain(self.rules, game.start_room))
            due = seat in game.due
            observations[agent] = {
                "text": "".join(told),
                "turn": turn if due else int(TurnKind.WAIT),
                "options": tuple(OPTION[style][action] for action in game.due[seat]) if due else (),
            }
        return observations

    def _infos(self) -> dict[str, dict[str, Any]]:
        game = self._started()
        questions = self._questions() if game.asks else {}
        return {
            agent: {
                "role": player.role.value,
                "questions": questions.get(player.name, ()),
                "error": "",
                "message": "",
                "span": (0, 0),
                "entry": "",
            }
            for agent, player in zip(self.possible_agents, game.players, strict=True)
        }

    def _questions(self) -> dict[str, tuple[Question]]:
        """The belief question that is due now, by the name of who is asked."""
        game = self._started()
        living = game.living()
        guilty = [game.players[seat].name for seat in game.imposters if game.players[seat].alive]
        asked = {}
        for name in living:
            candidates: tuple[str, ...] = NAMES
            if self.rules.candidates == "living_others":
                if game.players[game.seat[name]].role is Role.IMPOSTER:
                    continue
                candidates = tuple(other for other in living if other != name)
            style = self._styles[game.seat[name]]
            written = dict(zip(NAMES, EXCHANGEABLE[style], strict=True))
            answer, *also = (written[other] for other in guilty)
            asked[name] = (Question(QUESTION[style], tuple(written[c] for c in candidates), answer, tuple(also)),)
        return asked


def _text(action: Any) -> str:
    """What is no text, nothing at all too, is an empty reply, which the rules refuse where one was asked for."""
    return action if isinstance(action, str) else ""


parallel_env = AmongUs  # the game as a native parallel environment
env = aec(parallel_env)  # the game in PettingZoo's AEC form
