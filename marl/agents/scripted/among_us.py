"""Scripted players of grid Among Us, and the small grammar that they speak and understand.

Read downward: what can be said and how it reads (`say`, `understand`), what a player keeps in mind (`Memory`), and the
players: `RandomPlayer` does anything legal and says anything, true or not; `CarefulCrewmate` does its tasks, reports,
tells what it saw and votes on the evidence; `CarefulImposter` kills unseen, invents an alibi and joins the accusers. In
between stands a ladder of players that each use a little more, above it oracles, which are told the answer. A base
corpus is made of random players, so that its speech carries no information about the imposter. Left out: planning, lies
of crewmates, memory across games.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from envs.among_us.reading import read
from envs.among_us.state import (
    DIRECTIONS,
    NAMES,
    SKIP,
    VOTE,
    WAIT,
    Act,
    Action,
    Done,
    Intro,
    Killed,
    Look,
    Meeting,
    Room,
    Said,
    Tally,
)
from envs.among_us.texts import OPTION
from envs.core import Question, Style
from marl.agents.scripted.among_us_language import (
    ACCUSING,
    FORMS,
    Statement,
    Topic,
    accused,
    form_fields,
    say,
    understand,
)

VERSION = {"players": 7}  # raised when players of a base corpus do or answer otherwise than before
ANSWERS = 8  # that random players give to each recorded belief question


def credulous(messages: Sequence[str], candidates: Sequence[str], pull: float = 1.5, decay: float = 0.9) -> list[float]:
    """The belief of somebody who knows nothing and half believes accusations, oldest message first; sums to one.

    Each accusation adds `pull` to a name's logit, which fades by `decay` with every message after it.
    """
    logits = dict.fromkeys((candidate.lower() for candidate in candidates), 0.0)
    for age, message in enumerate(reversed(messages)):
        for name in accused(message):
            if name.lower() in logits:
                logits[name.lower()] += pull * decay**age
    weights = [math.exp(logits[candidate.lower()]) for candidate in candidates]
    return [weight / sum(weights) for weight in weights]


# --------------------------------------------------------------------------------------------------------------------
# What a player keeps in mind
ACTION = {style: {text: action for action, text in OPTION[style].items()} for style in Style}


class Sighting(NamedTuple):
    when: int  # in looks around
    room: Room
    company: tuple[str, ...]  # who was there too, besides oneself


class Memory(ABC):
    """Reads what one seat is told, in either style, and remembers it. Players build on it."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.style = Style.COMPACT
        self.me = ""
        self.fellows: tuple[str, ...] = ()
        self.width = self.height = 0
        self.imposters = 1
        self.room: Room = (0, 0)
        self.tasks: list[Room] = []
        self.living: list[str] = []  # as far as is known, oneself included
        self.look: Look | None = None
        self.looks = 0
        self.kills: dict[str, str] = {}  # seen with own eyes: killer -> victim
        self.meeting: Meeting | None = None
        self.said: list[Said] = []  # by others in this discussion
        self.spoken = 0  # own messages in it
        self.forget()

    def forget(self) -> None:
        """A new round begins: sightings are of the past."""
        self.sightings: dict[str, Sighting] = {}  # the last one of each player
        self.visited: dict[Room, int] = {}  # own rooms, and when last there

    def observe(self, text: str) -> None:
        if not self.me and text:
            self.style = Style.COMPACT if text.startswith(" ") else Style.NATURAL
        for event in read(text, self.style):
            match event:
                case Intro():
                    self.me, self.fellows, self.imposters = event.name, event.fellows, event.imposters
                    self.width, self.height = event.width, event.height
                    self.tasks, self.living = list(event.tasks), list(event.names)
                case Look():
                    self._look(event)
                case Done():
                    self.tasks.remove(self.room)
                case Killed(killer, victim) if victim:
                    self.kills[killer] = victim
                case Meeting():
                    self.meeting, self.said, self.spoken = event, [], 0
                    self.living = list(event.living)
                    self.opened()
                case Said():
                    self.said.append(event)
                    self.heard(event.speaker, understand(event.message))
                case Tally():
                    self.living = [name for name in self.living if name != event.ejected]
                    self.voted(event)
                    self.forget()

    def _look(self, event: Look) -> None:
        self.look, self.room = event, event.room
        self.looks += 1
        self.visited[event.room] = self.looks
        around = (*event.present, *(name for name, _ in event.entering))
        for name in around:
            self.sightings[name] = Sighting(self.looks, event.room, tuple(n for n in around if n != name))
        for name, to in event.leaving:
            self.sightings[name] = Sighting(self.looks, to, ())

    def opened(self) -> None:
        """A discussion begins."""
        return

    def heard(self, speaker: str, statements: Sequence[Statement]) -> None:
        """Somebody else has spoken."""
        return

    def voted(self, tally: Tally) -> None:
        """A discussion is over."""
        return

    def reply(self, text: str, options: Sequence[str] = ()) -> str:
        """One of the options, word for word; without options, a message."""
        self.observe(text)
        if not options:
            message = say(self.speak(), self.style, self.rng)
            self.spoken += 1
            return message
        by_action = {ACTION[self.style][option]: option for option in options}
        action = self.vote(list(by_action)) if SKIP in by_action else self.move(list(by_action))
        return by_action[action]

    @abstractmethod
    def speak(self) -> list[Statement]:
        """What to say now."""

    @abstractmethod
    def vote(self, options: list[Action]) -> Action:
        """One of the options: a name, or to skip."""

    @abstractmethod
    def move(self, options: list[Action]) -> Action:
        """One of the options: where to go, or what to do."""

    def others(self) -> list[str]:
        return [name for name in self.living if name != self.me]

    def toward(self, target: Room, options: Sequence[Action]) -> Action:
        """A step that brings the room nearer; a wait when there."""
        steps = []
        for action in options:
            if action.act is Act.GO:
                dx, dy = DIRECTIONS[action.target]
                if _distance((self.room[0] + dx, self.room[1] + dy), target) < _distance(self.room, target):
                    steps.append(action)
        return self.rng.choice(steps) if steps else WAIT

    def wander(self, options: Sequence[Action]) -> Action:
        """Somewhere else, rather where one has not been for long."""
        ways = [action for action in options if action.act is Act.GO]
        if not ways:
            return WAIT

        def last_there(action: Action) -> tuple[int, float]:
            dx, dy = DIRECTIONS[action.target]
            return self.visited.get((self.room[0] + dx, self.room[1] + dy), 0), self.rng.random()

        return min(ways, key=last_there)


def _distance(a: Room, b: Room) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


# --------------------------------------------------------------------------------------------------------------------
# The players
ECHO = 0.7  # how often random players come back to whom, and to which room, somebody named last


def random_statement(player: Memory) -> list[Statement]:
    """Any form of the grammar, mostly about the living other, and the room, that were mentioned last in the discussion.

    As people do, players come back to a name that was mentioned: from that a small model learns to copy names before it
    learns whom to believe. Whose name comes first depends on nothing, so none says anything about who is the imposter.
    """
    assert player.meeting is not None
    topic, form = player.rng.choice([(topic, form) for topic, forms in FORMS.items() for form in forms])
    who = player.rng.choice(player.others())
    room = (player.rng.randrange(player.width), player.rng.randrange(player.height))
    heard = [s for said in player.said for s in understand(said.message)]
    if player.rng.random() < ECHO:
        who = next((s.who for s in reversed(heard) if s.who in player.others()), who)
    if player.rng.random() < ECHO:
        room = next((s.room for s in reversed(heard) if s.room), room)
    fields = form_fields(form)
    return [
        Statement(
            topic,
            who if "who" in fields else "",
            player.meeting.victim if "other" in fields else "",
            room if "room" in fields else None,
        )
    ]


class RandomPlayer(Memory):
    """Any legal action, and any sentence of the grammar about any living others and rooms, true or not.

    What it says depends neither on what it knows nor on its role.
    """

    pull = 1.5  # of an accusation, on its answers to belief questions

    def __init__(self, seed: int, wary: bool = False) -> None:
        super().__init__(seed)
        self.wary = wary

    def speak(self) -> list[Statement]:
        return random_statement(self)

    def vote(self, options: list[Action]) -> Action:
        return self.rng.choice(options)

    def move(self, options: list[Action]) -> Action:
        return self.rng.choice(options)

    def answers(self, question: Question) -> list[str]:
        """To a belief question, several: the killer it saw, else what somebody credulous believes of what it heard, who
        never suspects the one that found the body, unless `wary`, for games in which imposters report too.

        A model that is taught such answers learns to believe its eyes, and else accusations, true or not. Of what can
        be inferred beyond that it learns nothing. Several answers make the lesson less noisy; a witness gives one.
        """
        if seen := [name for name in question.candidates if name.capitalize() in self.kills]:
            return seen
        finder = self.meeting.finder.lower() if self.meeting and not self.wary else ""
        suspects = [name for name in question.candidates if name.lower() != finder] or list(question.candidates)
        belief = credulous([said.message for said in self.said], suspects, self.pull)
        return self.rng.choices(suspects, belief, k=ANSWERS)


class GulliblePlayer(RandomPlayer):
    """Plays and speaks at random, and believes its eyes, else accusations, mostly the last: a sharp lesson in both."""

    pull = 8.0


class InformedPlayer(RandomPlayer):
    """Plays and speaks at random, and answers belief questions with the truth: to learn what can be inferred."""

    def answers(self, question: Question) -> list[str]:
        return [question.answer]


class CarefulCrewmate(Memory):
    """Does tasks by the shortest way, reports, tells what it saw, and votes for whom the evidence speaks against."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.suspicion: defaultdict[str, float] = defaultdict(float)  # adds up over discussions
        self.spared: set[str] = set()  # who was alone with me and let me live
        self.accusers: dict[str, set[str]] = {}  # in this discussion, by who was accused

    def move(self, options: list[Action]) -> Action:
        for action in options:
            if action.act is Act.REPORT:
                return action
        assert self.look is not None
        near = (*self.look.present, *(name for name, _ in self.look.entering))
        if any(name in self.kills for name in near):  # run from a known killer
            return self.wander(options)
        if len(near) == 1 and not self.look.leaving:
            self.spared.add(near[0])
        for action in options:
            if action.act is Act.TASK:
                return action
        if not self.tasks:
            return self.wander(options)
        return self.toward(min(self.tasks, key=lambda room: _distance(room, self.room)), options)

    def opened(self) -> None:
        assert self.meeting is not None
        self.accusers = {}
        body = self.meeting.room
        for name in self.others():
            seen = self.sightings.get(name)
            if name in self.kills:
                self.suspicion[name] += 10
            elif seen is None:
                self.suspicion[name] += 0.2
            elif seen.room == body:
                self.suspicion[name] += 0.8
            else:
                self.suspicion[name] -= 0.3
        last = self.sightings.get(self.meeting.victim)
        for name in last.company if last else ():
            self.suspicion[name] += 0.6
        for name in self.spared:
            self.suspicion[name] -= 0.4
        self.spared.clear()
        self.suspicion[self.meeting.finder] -= 1

    def heard(self, speaker: str, statements: Sequence[Statement]) -> None:
        assert self.meeting is not None
        body = self.meeting.room
        for s in statements:
            against = s.topic in ACCUSING
            if against and s.who:
                self.accusers.setdefault(s.who, set()).add(speaker)
            if s.who == self.me:
                false_company = s.topic is Topic.WITH and s.room not in self.visited
                false_place = s.topic is Topic.SAW and s.room not in self.visited
                self.suspicion[speaker] += 4 * (s.topic is Topic.KILL) + against + 2 * (false_company or false_place)
                continue
            match s.topic:
                case Topic.KILL:
                    self.suspicion[s.who] += 3
                case Topic.LAST | Topic.NEAR:
                    self.suspicion[s.who] += 0.6
                case Topic.ACCUSE:
                    self.suspicion[s.who] += 0.3
                case Topic.CLEAR:
                    self.suspicion[s.who] -= 0.2
                case Topic.SAW | Topic.WITH:
                    self.suspicion[s.who] += 0.4 if s.room == body else -0.3
            claims = s.topic in (Topic.WITH, Topic.WHERE, Topic.TASK)
            seen = self.sightings.get(speaker)
            if claims and seen is not None and seen.room == body and s.room != body:
                self.suspicion[speaker] += 0.4

    def voted(self, tally: Tally) -> None:
        """Play goes on: whoever was ejected was innocent, if there is but one imposter, and its accusers less so."""
        if tally.ejected and self.imposters == 1:
            for name in self.accusers.get(tally.ejected, ()):
                self.suspicion[name] += 0.3
        for name in self.suspicion:
            self.suspicion[name] *= 0.8

    def suspect(self) -> tuple[str, float]:
        """Whom the evidence speaks against most, and how much."""
        ranked = sorted(self.others(), key=lambda name: (-self.suspicion[name], self.rng.random()))
        return ranked[0], self.suspicion[ranked[0]]

    def speak(self) -> list[Statement]:
        assert self.meeting is not None
        body, victim = self.meeting.room, self.meeting.victim
        for killer, dead in self.kills.items():
            if killer in self.living:
                return [Statement(Topic.KILL, killer, dead)]
        who, weight = self.suspect()
        if self.spoken and weight > 0.5:
            return [Statement(Topic.ACCUSE, who)]
        last = self.sightings.get(victim)
        facts = []
        if last and len(last.company) == 1 and last.company[0] in self.living:
            facts.append(Statement(Topic.LAST, last.company[0], victim))
        here = [name for name in self.others() if name in self.sightings and self.sightings[name].room == body]
        facts += [Statement(Topic.SAW, name, room=body) for name in here]
        elsewhere = [name for name in self.others() if name in self.sightings and name not in here]
        facts += [Statement(Topic.WITH, name, room=self.sightings[name].room) for name in elsewhere
                  if self.sightings[name].room in self.visited]  # fmt: skip
        if self.spoken < len(facts):
            return [facts[self.spoken]]
        rooms = sorted(self.visited, key=lambda room: -self.visited[room])
        return [Statement(Topic.WHERE, room=rooms[0])] if rooms and not self.spoken else [Statement(Topic.UNSURE)]

    def vote(self, options: list[Action]) -> Action:
        who, weight = self.suspect()
        return VOTE[who] if weight > 0.5 else SKIP


# Steps from random to careful play, to tell what reports, sight, evidence and talk are each worth.
class Reporter(CarefulCrewmate):
    """Moves and speaks at random, but reports whatever body it sees, and always votes for somebody else."""

    def move(self, options: list[Action]) -> Action:
        return next((action for action in options if action.act is Act.REPORT), self.rng.choice(options))

    def speak(self) -> list[Statement]:
        return random_statement(self)

    def vote(self, options: list[Action]) -> Action:
        return VOTE[self.rng.choice(self.others())]


class Witness(Reporter):
    """Votes for a killer whom it saw, otherwise as a reporter."""

    def vote(self, options: list[Action]) -> Action:
        seen = [name for name in self.others() if name in self.kills]
        return VOTE[seen[0]] if seen else super().vote(options)


class Detective(Reporter):
    """Votes for whom its own evidence speaks against most, and is deaf to what is said."""

    def heard(self, speaker: str, statements: Sequence[Statement]) -> None:
        return

    def vote(self, options: list[Action]) -> Action:
        return VOTE[self.suspect()[0]]


class Confidant(Detective):
    """A detective that tells what it saw, and hears what others tell."""

    def heard(self, speaker: str, statements: Sequence[Statement]) -> None:
        CarefulCrewmate.heard(self, speaker, statements)

    def speak(self) -> list[Statement]:
        return CarefulCrewmate.speak(self)


LADDER = {"reporter": Reporter, "witness": Witness, "detective": Detective, "confidant": Confidant}


# Above the ladder: what no player can know, for an upper reference.
class Oracle(Reporter):
    """Moves at random and reports every body; is told who the imposters are, says so, and votes for one that lives.

    All oracles vote for the same one. It is what a crew wins by votes alone if it is never wrong.
    """

    guilty: tuple[str, ...] = ()

    def know(self, privileged: Sequence[float]) -> None:
        """What a privileged critic may know of the game: for each of the seven names, whether it is an imposter's."""
        self.guilty = tuple(name for name, guilty in zip(NAMES, privileged, strict=True) if guilty)

    def culprit(self) -> str:
        assert self.guilty, "an oracle must be told who the imposters are before it speaks or votes"
        return next(name for name in self.guilty if name in self.living)

    def speak(self) -> list[Statement]:
        return [Statement(Topic.ACCUSE, self.culprit())]

    def vote(self, options: list[Action]) -> Action:
        return VOTE[self.culprit()]


class CarefulOracle(Oracle):
    """An oracle that moves as careful crewmates do: it does its tasks, too."""

    def move(self, options: list[Action]) -> Action:
        return CarefulCrewmate.move(self, options)


ORACLES = {"oracle": Oracle, "careful_oracle": CarefulOracle}


class CarefulImposter(Memory):
    """Kills when nobody can notice, or when that wins; then goes away. Has an alibi and helps to accuse others."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.against: Counter[str] = Counter()  # accusations in this discussion, by name

    def move(self, options: list[Action]) -> Action:
        assert self.look is not None
        witnesses = {*self.look.present, *(name for name, _ in self.look.entering)} - set(self.fellows)
        crew = [name for name in self.others() if name not in self.fellows]
        wins = len(self.living) - len(crew) >= len(crew) - 1
        kills = [action for action in options if action.act is Act.KILL and (wins or witnesses <= {action.target})]
        if kills:
            kill = self.rng.choice(kills)
            if kill.target in self.living:  # else it is dead, and only seems to be on its way still
                self.living.remove(kill.target)
            return kill
        if self.look.bodies or len(witnesses) != 1 or self.rng.random() < 0.3:
            return self.wander(options)
        return WAIT  # alone with somebody: the cooldown will pass

    def opened(self) -> None:
        self.against = Counter()

    def heard(self, speaker: str, statements: Sequence[Statement]) -> None:
        self.against.update(s.who for s in statements if s.topic in ACCUSING)

    def target(self) -> str:
        """The crewmate with most accusations; without any, the one who found the body, or just anybody."""
        assert self.meeting is not None
        finder = self.meeting.finder
        crew = [name for name in self.others() if name not in self.fellows]
        return max(crew, key=lambda name: (self.against[name], name == finder, self.rng.random()))

    def speak(self) -> list[Statement]:
        assert self.meeting is not None
        if self.against[self.me] > 1 and self.spoken:
            return [Statement(Topic.DENY)]
        if self.spoken:
            return [Statement(Topic.ACCUSE, self.target())]
        met = [
            Statement(Topic.WITH, name, room=seen.room)
            for name, seen in self.sightings.items()
            if name in self.living and seen.room != self.meeting.room and seen.room in self.visited
        ]
        rooms = [(x, y) for x in range(self.width) for y in range(self.height) if (x, y) != self.meeting.room]
        return [self.rng.choice(met) if met else Statement(Topic.TASK, room=self.rng.choice(rooms))]

    def vote(self, options: list[Action]) -> Action:
        target = self.target()
        return VOTE[target] if self.against[target] or len(self.living) <= 4 else SKIP


DEFAULT = "random"  # what a base corpus is made of
CAREFUL = "careful"
INFORMED = "informed"
GULLIBLE = "gullible"
LISTENERS = {DEFAULT: RandomPlayer, GULLIBLE: GulliblePlayer}
WARY = "_wary"  # after a listener's name: one that takes no report for an alibi


def make_player(name: str, seed: int, role: str) -> Memory:
    """A player for one seat of one game. ValueError for a name that no player has."""
    if (listener := name.removesuffix(WARY)) in LISTENERS:
        return LISTENERS[listener](seed, wary=name.endswith(WARY))
    if name == INFORMED:
        return InformedPlayer(seed)
    if name == CAREFUL:
        return CarefulImposter(seed) if role == "imposter" else CarefulCrewmate(seed)
    crews = LADDER | ORACLES
    if name in crews:
        return RandomPlayer(seed) if role == "imposter" else crews[name](seed)
    known = ", ".join((*LISTENERS, *(name + WARY for name in LISTENERS), INFORMED, *crews, CAREFUL))
    raise ValueError(f"There is no scripted player {name!r} of Among Us: choose one of {known}.")
