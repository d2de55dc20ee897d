"""Scripted players of grid Among Us. They speak and understand the grammar of among_us_language.py.

`RandomPlayer` does anything legal and says anything, true or not; a base corpus is made of it, so that speech carries
no information about the imposter. Careful crewmates and imposters play well. The ladder in between uses a little more
evidence at each step, and oracles are told the answer.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from envs.among_us import events
from envs.among_us.reading import read
from envs.among_us.state import DIRECTIONS, NAMES, SKIP, TASK, VOTE, WAIT, Act, Action, Room
from envs.among_us.texts import OPTION
from envs.core import Question, Style
from marl.agents.scripted.among_us_language import ACCUSING, FORMS, Statement, Topic, accused, say, understand

VERSION = {"players": 7}  # raise it when players of a base corpus act or answer differently
ANSWERS = 8  # of random players to each recorded belief question


def credulous(messages: Sequence[str], candidates: Sequence[str], pull: float = 1.5, decay: float = 0.9) -> list[float]:
    """Probabilities of the candidates for a listener who knows nothing and half believes accusations (oldest first).

    Each accusation adds `pull` to a name's logit, which fades by `decay` with every message after it.
    """
    logits = dict.fromkeys((candidate.lower() for candidate in candidates), 0.0)
    for age, message in enumerate(reversed(messages)):
        for name in accused(message):
            if name.lower() in logits:
                logits[name.lower()] += pull * decay**age
    weights = [math.exp(logit) for logit in logits.values()]
    return [weight / sum(weights) for weight in weights]


# --- Memory -----------------------------------------------------------------------------------------------------------
ACTION = {style: {text: action for action, text in OPTION[style].items()} for style in Style}


class Sighting(NamedTuple):
    room: Room
    company: tuple[str, ...]  # who was there too, besides oneself


class Memory:
    """Reads what one seat is told, in any style, and remembers it. The base class of all players."""

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
        self.look: events.Look | None = None
        self.looks = 0
        self.kills: dict[str, str] = {}  # seen with own eyes: killer -> victim
        self.meeting: events.Meeting | None = None
        self.said: list[events.Said] = []  # by others in this discussion
        self.spoken = 0  # own messages in it
        self.forget()

    def forget(self) -> None:
        """Drops the sightings, when a new round begins."""
        self.sightings: dict[str, Sighting] = {}  # the last one of each player
        self.visited: dict[Room, int] = {}  # own rooms, and when last there

    def observe(self, text: str) -> None:
        if not self.me and text:
            long = Style.BRIEF if text.startswith("Among Us, ") else Style.NATURAL
            self.style = Style.COMPACT if text.startswith(" ") else long
        for event in read(text, self.style):
            match event:
                case events.Intro():
                    self.me, self.fellows, self.imposters = event.name, event.fellows, event.imposters
                    self.width, self.height = event.width, event.height
                    self.tasks, self.living = list(event.tasks), list(event.names)
                case events.Look():
                    self._look(event)
                case events.Done():
                    self.tasks.remove(self.room)
                case events.Killed(killer, victim) if victim:
                    self.kills[killer] = victim
                case events.Meeting():
                    self.meeting, self.said, self.spoken = event, [], 0
                    self.living = list(event.living)
                    self.opened()
                case events.Said():
                    self.said.append(event)
                    self.heard(event.speaker, understand(event.message))
                case events.Tally():
                    self.living = [name for name in self.living if name != event.ejected]
                    self.voted(event)
                    self.forget()

    def _look(self, event: events.Look) -> None:
        self.look, self.room = event, event.room
        self.looks += 1
        self.visited[event.room] = self.looks
        around = (*event.present, *(name for name, _ in event.entering))
        for name in around:
            self.sightings[name] = Sighting(event.room, tuple(n for n in around if n != name))
        for name, to in event.leaving:
            self.sightings[name] = Sighting(to, ())

    def opened(self) -> None:
        """Takes note of a discussion. Called when it begins."""

    def heard(self, speaker: str, statements: Sequence[Statement]) -> None:
        """Takes note of what somebody else said. Called after each message."""

    def voted(self, tally: events.Tally) -> None:
        """Takes note of a vote. Called when a discussion is over."""

    def reply(self, text: str, options: Sequence[str] = ()) -> str:
        """Replies with one of the options, word for word; without options, with a message."""
        self.observe(text)
        if not options:
            message = say([self.speak()], self.style, self.rng)
            self.spoken += 1
            return message
        by_action = {ACTION[self.style][option]: option for option in options}
        action = self.vote(list(by_action)) if SKIP in by_action else self.move(list(by_action))
        return by_action[action]

    def speak(self) -> Statement:
        return random_statement(self)

    def vote(self, options: list[Action]) -> Action:
        return self.rng.choice(options)

    def move(self, options: list[Action]) -> Action:
        return self.rng.choice(options)

    def others(self) -> list[str]:
        return [name for name in self.living if name != self.me]

    def nearby(self) -> tuple[str, ...]:
        """Whoever is in the room or entering it."""
        assert self.look is not None
        return (*self.look.present, *(name for name, _ in self.look.entering))

    def ways(self, options: Sequence[Action]) -> list[tuple[Action, Room]]:
        """The steps to other rooms among the options, and where each leads."""
        x, y = self.room
        steps = [(action, DIRECTIONS[action.target]) for action in options if action.act is Act.GO]
        return [(action, (x + dx, y + dy)) for action, (dx, dy) in steps]

    def toward(self, target: Room, options: Sequence[Action]) -> Action:
        """Steps nearer to the room; waits when there."""
        far = _distance(self.room, target)
        steps = [action for action, room in self.ways(options) if _distance(room, target) < far]
        return self.rng.choice(steps) if steps else WAIT

    def wander(self, options: Sequence[Action]) -> Action:
        """Steps to a neighbouring room, rather one not visited for long."""
        ways = [(self.visited.get(room, 0), self.rng.random(), action) for action, room in self.ways(options)]
        return min(ways)[2] if ways else WAIT


def _distance(a: Room, b: Room) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


# --- Random players ---------------------------------------------------------------------------------------------------
ECHO = 0.7  # probability that random players repeat the name, or the room, that was mentioned last


def random_statement(player: Memory) -> Statement:
    """Draws any form of the grammar, mostly about the living other, and the room, that were mentioned last.

    From repeated names a small model learns to copy names before it learns whom to believe. The first name is drawn
    uniformly, so no statement says anything about who is the imposter.
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
    other = player.meeting.victim if "{other}" in form else ""
    return Statement(topic, who if "{who}" in form else "", other, room if "{room}" in form else None)


class RandomPlayer(Memory):
    """Does anything legal and says anything, true or not, whatever it knows and whatever its role is.

    `wary`: it may suspect the player that found the body, for games in which imposters report too.
    """

    pull = 1.5  # of an accusation, on its answers to belief questions

    def __init__(self, seed: int, wary: bool = False) -> None:
        super().__init__(seed)
        self.wary = wary

    def answers(self, question: Question) -> list[str]:
        """Answers a belief question: with the killer it saw, else with several draws from what a `credulous` listener
        believes of the discussion.

        Such answers teach a model to believe its eyes, and else accusations, true or not, but no further inference.
        """
        candidates = question.candidates
        if question.cued:  # asked as a vote: neither oneself nor a skip is the imposter
            candidates = tuple(name for name in candidates if name.capitalize() in self.others())
        if seen := [name for name in candidates if name.capitalize() in self.kills]:
            return seen
        finder = self.meeting.finder.lower() if self.meeting and not self.wary else ""
        suspects = [name for name in candidates if name.lower() != finder] or list(candidates)
        belief = credulous([said.message for said in self.said], suspects, self.pull)
        return self.rng.choices(suspects, belief, k=ANSWERS)


class GulliblePlayer(RandomPlayer):
    """A random player that believes its eyes, else mostly the last accusation: a sharp lesson in both."""

    pull = 8.0


class InformedPlayer(RandomPlayer):
    """A random player that answers belief questions with the truth, to teach what can be inferred."""

    def answers(self, question: Question) -> list[str]:
        return [question.answer]


# --- Careful players --------------------------------------------------------------------------------------------------
WEIGHT = {Topic.KILL: 3, Topic.LAST: 0.6, Topic.NEAR: 0.6, Topic.ACCUSE: 0.3, Topic.CLEAR: -0.2}  # of what others say


class CarefulCrewmate(Memory):
    """Does tasks by the shortest way, reports, tells what it saw, and votes on the evidence."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.suspicion: defaultdict[str, float] = defaultdict(float)  # adds up over discussions
        self.spared: set[str] = set()  # who was alone with me and let me live
        self.accusers: dict[str, set[str]] = {}  # in this discussion, by who was accused

    def move(self, options: list[Action]) -> Action:
        if reports := [action for action in options if action.act is Act.REPORT]:
            return reports[0]
        near = self.nearby()
        assert self.look is not None
        if any(name in self.kills for name in near):  # run from a known killer
            return self.wander(options)
        if len(near) == 1 and not self.look.leaving:
            self.spared.add(near[0])
        if TASK in options:
            return TASK
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
            else:
                self.suspicion[name] += 0.2 if seen is None else 0.8 if seen.room == body else -0.3
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
            if s.topic in WEIGHT:
                self.suspicion[s.who] += WEIGHT[s.topic]
            elif s.topic in (Topic.SAW, Topic.WITH):
                self.suspicion[s.who] += 0.4 if s.room == body else -0.3
            claims = s.topic in (Topic.WITH, Topic.WHERE, Topic.TASK)
            seen = self.sightings.get(speaker)
            if claims and seen is not None and seen.room == body and s.room != body:
                self.suspicion[speaker] += 0.4

    def voted(self, tally: events.Tally) -> None:
        """Suspects the accusers of an ejected player a little more if play goes on, for then it was innocent."""
        if tally.ejected and self.imposters == 1:
            for name in self.accusers.get(tally.ejected, ()):
                self.suspicion[name] += 0.3
        for name in self.suspicion:
            self.suspicion[name] *= 0.8

    def suspect(self) -> tuple[str, float]:
        """The most suspect player, and how suspect."""
        ranked = sorted(self.others(), key=lambda name: (-self.suspicion[name], self.rng.random()))
        return ranked[0], self.suspicion[ranked[0]]

    def speak(self) -> Statement:
        """Says the most telling thing: a kill it saw, a suspicion, what it saw, where it was."""
        assert self.meeting is not None
        body, victim = self.meeting.room, self.meeting.victim
        for killer, dead in self.kills.items():
            if killer in self.living:
                return Statement(Topic.KILL, killer, dead)
        who, weight = self.suspect()
        if self.spoken and weight > 0.5:
            return Statement(Topic.ACCUSE, who)
        last = self.sightings.get(victim)
        facts = []
        if last and len(last.company) == 1 and last.company[0] in self.living:
            facts.append(Statement(Topic.LAST, last.company[0], victim))
        seen = {name: self.sightings[name].room for name in self.others() if name in self.sightings}
        facts += [Statement(Topic.SAW, name, room=body) for name, room in seen.items() if room == body]
        elsewhere = {name: room for name, room in seen.items() if room != body and room in self.visited}
        facts += [Statement(Topic.WITH, name, room=room) for name, room in elsewhere.items()]
        if self.spoken < len(facts):
            return facts[self.spoken]
        if self.visited and not self.spoken:
            return Statement(Topic.WHERE, room=max(self.visited, key=lambda room: self.visited[room]))
        return Statement(Topic.UNSURE)

    def vote(self, options: list[Action]) -> Action:
        who, weight = self.suspect()
        return VOTE[who] if weight > 0.5 else SKIP


# --- The ladder from random to careful play, which shows what reports, sight, evidence and talk are each worth --------
class Reporter(CarefulCrewmate):
    """Moves and speaks at random, but reports every body it sees, and always votes for somebody else."""

    speak = Memory.speak

    def move(self, options: list[Action]) -> Action:
        return next((action for action in options if action.act is Act.REPORT), self.rng.choice(options))

    def vote(self, options: list[Action]) -> Action:
        return VOTE[self.rng.choice(self.others())]


class Witness(Reporter):
    """Votes for a killer that it saw, otherwise as a reporter."""

    def vote(self, options: list[Action]) -> Action:
        seen = [name for name in self.others() if name in self.kills]
        return VOTE[seen[0]] if seen else super().vote(options)


class Detective(Reporter):
    """Votes on its own evidence, and is deaf to what is said."""

    heard = Memory.heard

    def vote(self, options: list[Action]) -> Action:
        return VOTE[self.suspect()[0]]


class Confidant(Detective):
    """A detective that tells what it saw, and hears what others tell."""

    heard = CarefulCrewmate.heard
    speak = CarefulCrewmate.speak


LADDER = {"reporter": Reporter, "witness": Witness, "detective": Detective, "confidant": Confidant}


# --- Oracles: an upper reference --------------------------------------------------------------------------------------
class Oracle(Reporter):
    """Moves at random and reports every body; is told who the imposters are, says so, and votes for one that lives."""

    guilty: tuple[str, ...] = ()

    def know(self, privileged: Sequence[float]) -> None:
        """Learns what a privileged critic may know: for each of the seven names, whether it is an imposter's."""
        self.guilty = tuple(name for name, guilty in zip(NAMES, privileged, strict=True) if guilty)

    def culprit(self) -> str:
        assert self.guilty, "an oracle must be told who the imposters are before it speaks or votes"
        return next(name for name in self.guilty if name in self.living)

    def speak(self) -> Statement:
        return Statement(Topic.ACCUSE, self.culprit())

    def vote(self, options: list[Action]) -> Action:
        return VOTE[self.culprit()]


class CarefulOracle(Oracle):
    """An oracle that moves as careful crewmates do: it does its tasks, too."""

    move = CarefulCrewmate.move


ORACLES = {"oracle": Oracle, "careful_oracle": CarefulOracle}


class CarefulImposter(Memory):
    """Kills when nobody can notice, or when that wins, and goes away. Has an alibi and helps to accuse others."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.against: Counter[str] = Counter()  # accusations in this discussion, by name

    def move(self, options: list[Action]) -> Action:
        witnesses = set(self.nearby()) - set(self.fellows)
        assert self.look is not None
        crew = self.crew()
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

    def crew(self) -> list[str]:
        return [name for name in self.others() if name not in self.fellows]

    def target(self) -> str:
        """The crewmate with most accusations; without any, the one who found the body, or just anybody."""
        assert self.meeting is not None
        finder = self.meeting.finder
        return max(self.crew(), key=lambda name: (self.against[name], name == finder, self.rng.random()))

    def speak(self) -> Statement:
        """Denies, or joins the accusers; at first gives an alibi."""
        assert self.meeting is not None
        if self.against[self.me] > 1 and self.spoken:
            return Statement(Topic.DENY)
        if self.spoken:
            return Statement(Topic.ACCUSE, self.target())
        met = [
            Statement(Topic.WITH, name, room=seen.room)
            for name, seen in self.sightings.items()
            if name in self.living and seen.room != self.meeting.room and seen.room in self.visited
        ]
        rooms = [(x, y) for x in range(self.width) for y in range(self.height) if (x, y) != self.meeting.room]
        return self.rng.choice(met) if met else Statement(Topic.TASK, room=self.rng.choice(rooms))

    def vote(self, options: list[Action]) -> Action:
        target = self.target()
        return VOTE[target] if self.against[target] or len(self.living) <= 4 else SKIP


# --- By name ----------------------------------------------------------------------------------------------------------
DEFAULT = "random"  # what a base corpus is made of
WARY = "_wary"  # suffix: suspects the finder of a body, too
LISTENERS = {DEFAULT: RandomPlayer, "gullible": GulliblePlayer}


def make_player(name: str, seed: int, role: str) -> Memory:
    """A player for one seat of one game. Beside a crew of the ladder or of oracles, imposters play at random.

    Raises ValueError for an unknown name.
    """
    if (listener := name.removesuffix(WARY)) in LISTENERS:
        return LISTENERS[listener](seed, wary=name.endswith(WARY))
    if name == "informed":
        return InformedPlayer(seed)
    if name == "careful":
        return CarefulImposter(seed) if role == "imposter" else CarefulCrewmate(seed)
    crews = LADDER | ORACLES
    if name in crews:
        return RandomPlayer(seed) if role == "imposter" else crews[name](seed)
    known = ", ".join((*LISTENERS, *(name + WARY for name in LISTENERS), "informed", *crews, "careful"))
    raise ValueError(f"There is no scripted player {name!r} of Among Us. Choose one of {known}.")
