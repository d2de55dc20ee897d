"""Settings and state of the game."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum, StrEnum
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from envs.core import check_number, check_whole

if TYPE_CHECKING:
    from envs.among_us.events import Event, Look

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
    """The settings of the game. Raises ValueError, naming the setting, for values that make no game."""

    width: int = 2  # rooms, 1 to 5
    height: int = 2
    layouts: tuple[Room, ...] = ()  # where given, each episode draws its (width, height) from these
    players: int = 5  # 4 to 7
    imposters: int = 1  # fewer than the crewmates
    tasks: int = 4  # of each crewmate, each in a random room
    tasks_range: tuple[int, int] | None = None  # where given, each episode draws `tasks` from lowest to highest
    walk_steps: int = 3  # steps to a neighbouring room
    task_steps: int = 8  # steps to do a task
    cooldown: int = 6  # steps before an imposter may kill: at the start, after a kill, after a discussion
    reprompt: int = 2  # a waiting player is asked again after so many steps, or when what it sees changes
    messages_each: int = 2  # in a discussion; 0: straight to the vote
    message_words: int = 20  # longer messages are cut
    message_chars: int = 200
    imposters_report: bool = False
    recall: bool = False  # a discussion begins with a reminder of what each has seen since the last one
    candidates: str = "living_others"  # of the belief question; or all_names
    belief: str = "question"  # the belief question: question, which has words of its own, or vote, which has the vote's
    max_steps: int = 300  # then nobody wins: a truncation, since no player is told of this limit
    shaping: float = 0.0  # extra reward for a task done, a kill, a report, a crewmate's vote for an imposter
    loser_reward: float = 0.0  # of the losers, and of everybody when time runs out; winners get 1

    def __post_init__(self) -> None:
        least = {"players": MIN_PLAYERS, "messages_each": 0, "cooldown": 0}
        most = {"width": MAX_SIDE, "height": MAX_SIDE, "players": MAX_PLAYERS, "tasks": MAX_TASKS, "messages_each": 10}
        for f in fields(self):
            if f.type == "int":
                check_whole(f.name, getattr(self, f.name), least.get(f.name, 1), most.get(f.name, 1_000))
        if 2 * self.imposters >= self.players:
            raise ValueError(
                f"imposters must be fewer than crewmates: at most {(self.players - 1) // 2} of {self.players} players, "
                f"got {self.imposters}."
            )
        if self.width * self.height == 1:
            raise ValueError("width and height must not both be 1: there would be nowhere to walk to.")
        object.__setattr__(self, "layouts", check_layouts(self.layouts or ()))  # tuples, where YAML gave lists
        if self.tasks_range is not None:
            low, high = check_pairs("tasks_range", (self.tasks_range,))[0]
            if not 1 <= low <= high <= MAX_TASKS:
                raise ValueError(f"tasks_range must be lowest and highest, in 1 to {MAX_TASKS}, got ({low}, {high}).")
            object.__setattr__(self, "tasks_range", (low, high))
        for name in ("imposters_report", "recall"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}.")
        if self.candidates not in ("living_others", "all_names"):
            raise ValueError(f"candidates must be living_others or all_names, got {self.candidates!r}.")
        if self.belief not in ("question", "vote"):
            raise ValueError(f"belief must be question or vote, got {self.belief!r}.")
        if self.belief == "vote" and self.candidates != "living_others":
            raise ValueError(f"candidates must be living_others with belief=vote, got {self.candidates!r}.")
        for name in ("shaping", "loser_reward"):
            check_number(name, getattr(self, name), -100, 100)


def check_layouts(value: Any) -> tuple[Room, ...]:
    """Pairs (width, height) as tuples. Raises ValueError for sides that make no grid."""
    layouts = check_pairs("layouts", value)
    for width, height in layouts:
        if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE and width * height > 1):
            raise ValueError(f"layouts must be sides of 1 to {MAX_SIDE} rooms, not both 1, got ({width}, {height}).")
    return layouts


def check_pairs(name: str, value: Any) -> tuple[tuple[int, int], ...]:
    """Pairs of whole numbers as tuples. Raises ValueError, naming the setting, for anything else."""
    try:
        pairs = tuple((a, b) for a, b in value)
    except (TypeError, ValueError):
        pairs = ((None, None),)
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
    """Endings: crewmates win by the first two, imposters by the third, nobody by the last."""

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
    """A choice. `target`: a direction (GO), a name (REPORT, KILL, VOTE) or empty."""

    act: Act
    target: str = ""


WAIT, TASK, SKIP = Action(Act.WAIT), Action(Act.TASK), Action(Act.SKIP)
GO = {direction: Action(Act.GO, direction) for direction in DIRECTIONS}
REPORT, KILL, VOTE = ({name: Action(act, name) for name in NAMES} for act in (Act.REPORT, Act.KILL, Act.VOTE))


class Dice(Random):
    """Random numbers of a seat or a game. Python copies their state number by number, a hundred times as slowly."""

    def __deepcopy__(self, memo: object) -> Dice:
        copied = Dice()
        copied.setstate(self.getstate())
        return copied


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
    bound: Room | None = None  # where a walker that was killed on its way would have arrived
    seen: Look | None = None  # what it saw when it was last asked, without the cooldown
    sightings: dict[str, Room] = field(default_factory=dict)  # the others' last known rooms since the last discussion
    killings: dict[str, str] = field(default_factory=dict)  # victims by killer, as far as it noticed


class Body(NamedTuple):
    name: str
    room: Room


@dataclass
class Game:
    """One episode. `observed` and `earned` hold what the last step brought, by seat; the rules add to them."""

    rules: Rules
    width: int
    height: int
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
    observed: list[list[Event]] = field(default_factory=list)
    earned: list[int] = field(default_factory=list)  # deeds that shaping pays for
    counts: dict[str, int] = field(default_factory=dict)  # what happened how often, for the outcome

    def __post_init__(self) -> None:
        self.by_name = sorted(self.players, key=lambda p: NAMES.index(p.name))
        self.seat = {p.name: seat for seat, p in enumerate(self.players)}
        self.clear()
        counted = "decisions messages discussions kills tasks ejections votes votes_for_imposter"
        self.counts = dict.fromkeys(counted.split(), 0)

    def clear(self) -> None:
        self.observed = [[] for _ in self.players]
        self.earned = [0] * len(self.players)

    def tell_living(self, event: Event, but: int = -1) -> None:
        for seat, player in enumerate(self.players):
            if player.alive and seat != but:
                self.observed[seat].append(event)

    def living(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.by_name if p.alive)

    @property
    def start_room(self) -> Room:
        return (self.width - 1) // 2, 0
