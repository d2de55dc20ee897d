"""Scripted powers for Diplomacy: several temperaments that attack, ally, retaliate, promise and break promises.

A `Power` likes others more or less: those who supported it, less those who attacked it or broke their word. It attacks
whom it likes least and who leads, with its own units' support, or the support that it was promised. It talks in the
language of `say` and `understand` below. It makes mistakes, so that models that start from these games have room to
improve. These players are no model of people.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from envs.core import END
from envs.diplomacy.reading import CENTRES, Order, Reader
from envs.diplomacy.texts import NOBODY, POWERS

# --- Language ---------------------------------------------------------------------------------------------------------
ASK, OFFER, YES, NO, PEACE, WARN = "ask", "offer", "yes", "no", "peace", "warn"
_FORMS: Mapping[str, tuple[str, ...]] = {
    ASK: ("please support {0} to {1} .", "i move {0} to {1} , will you support it ?", "support {0} to {1} please ."),
    OFFER: ("i will support {0} to {1} .", "go {0} to {1} , i support you .", "i support {0} to {1} ."),
    YES: ("yes , i will .", "ok , i do it .", "agreed ."),
    NO: ("no , sorry .", "not this time .", "i can not ."),
    PEACE: ("peace ? i do not attack you .", "let us be friends .", "i leave you alone ."),
    WARN: ("do not attack me again .", "you will pay for that .", "i trust you no more ."),
}
_ROUTE = re.compile(r"\b([A-Z]{3})\b to \b([A-Z]{3})\b")


@dataclass(frozen=True)
class Meaning:
    """The meaning of a message: its act ("" if it can't be understood), and of a support, from where to where."""

    act: str = ""
    place: str = ""
    dest: str = ""


def say(act: str, rng: Random, place: str = "", dest: str = "") -> str:
    return rng.choice(_FORMS[act]).format(place, dest)


def understand(message: str) -> Meaning:
    """The meaning of a message, also where its words are not quite those of `say`."""
    text = message.strip()
    if match := _ROUTE.search(text):
        offers = "please" not in text and "will you" not in text and re.search(r"\bi (will )?support\b", text.lower())
        return Meaning(OFFER if offers else ASK, match[1], match[2])
    lower = text.lower()
    for act, words in {
        NO: ("no ,", "not this", "can not"),
        WARN: ("attack me", "pay for", "trust you no"),
        YES: ("yes", "ok ,", "agreed"),
        PEACE: ("peace", "friends", "alone"),
    }.items():
        if any(word in lower for word in words):
            return Meaning(act)
    return Meaning()


# --- Players ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Temperament:
    """The manner of a power. Weights are compared with likings, which start between 0 and 1."""

    name: str
    leader: float  # weight of another's share of the centres in whom to attack
    grudge: float  # how much an attack is disliked
    gratitude: float  # how much a support is liked
    bond: float  # how much it likes the one neighbour that it takes for an ally at the start
    loyalty: float  # probability that a promise is kept
    boldness: float = 0.6  # probability of attacking without any support
    helpful: float = 0.6  # probability of doing what a friend asks for
    talks: float = 0.9  # probability of writing to somebody
    mistakes: float = 0.1  # probability of an order at random


TEMPERAMENTS: Mapping[str, Temperament] = {
    t.name: t
    for t in (
        Temperament("loyal", leader=0.5, grudge=0.5, gratitude=0.5, bond=1.5, loyalty=0.97, helpful=0.9),
        Temperament("hunter", leader=3.0, grudge=0.3, gratitude=0.3, bond=0.5, loyalty=0.8),
        Temperament("avenger", leader=0.3, grudge=2.0, gratitude=0.5, bond=0.7, loyalty=0.85),
        Temperament("opportunist", leader=0.7, grudge=0.3, gratitude=0.2, bond=0.6, loyalty=0.5, boldness=0.8),
        Temperament(
            "quiet", leader=0.5, grudge=0.7, gratitude=0.6, bond=0.3, loyalty=0.95, boldness=0.2, helpful=0.4, talks=0.3
        ),
        Temperament(
            "careful", leader=1.0, grudge=0.7, gratitude=0.7, bond=1.0, loyalty=1.0, boldness=0.6, helpful=0.9,
            talks=1.0, mistakes=0.0,
        ),
    )
}  # fmt: skip
MIXTURE = tuple(t for t in TEMPERAMENTS.values() if t.name != "careful")  # drawn from uniformly
FRIEND = 0.6  # liking from which one is helped


class Power:
    """One seat of one game. Takes every observation's text in order, by `observe` (WAIT) or `reply`.

    Copes with any text of others. Given what it reads, `seed` determines its words and choices.
    """

    def __init__(self, temperament: Temperament, seed: int) -> None:
        self.temperament = temperament
        self.rng = Random(seed)
        self.seen = Reader()
        self.liking: dict[str, float] = {}
        self.phase = 0  # the number of the phase that plans are for
        self.judged = 0  # the number of the phase whose orders were judged
        self.heard = 0  # messages of the phase that were understood
        self.asked: list[tuple[str, str, str]] = []  # heard: who, from where, to where
        self.offers: list[tuple[str, str, str]] = []
        self.promised: tuple[str, str] | None = None  # from where to where
        self.addressee = ""
        self.planned: dict[str, str] = {}  # own moves of the phase: from where to where
        self.helps: tuple[str, str] | None = None  # what the unit that is being ordered supports

    def observe(self, text: str) -> None:
        """Reads an observation. Raises ValueError if a game's first text isn't the prompt."""
        seen = self.seen
        seen.read(text)
        if not self.liking:
            self.liking = {power: self.rng.random() * 0.5 for power in POWERS if power != seen.power}
            self.liking[self.rng.choice(list(self.liking))] += self.temperament.bond
        if seen.orders_phase > self.judged:
            self._judge()
            self.judged = seen.orders_phase
        if seen.phases != self.phase:
            self.phase, self.heard, self.promised = seen.phases, 0, None
            self.asked, self.offers, self.planned, self.helps = [], [], {}, None
        for speaker, message in seen.heard[self.heard :]:
            self._hear(speaker, understand(message))
        self.heard = len(seen.heard)

    def reply(self, text: str, options: Sequence[str] = ()) -> str:
        self.observe(text)
        if not options:
            return f"{self._message()} {END}"
        if NOBODY in options:
            return self._address(options)
        asked = text.rstrip("\n").rpartition("\n")[2]
        if self.seen.kind != "moves":
            return self.rng.choice(
                [o for o in options if o.split()[-1] not in ("D", "waive", "WAIVE")] or list(options)
            )
        if re.search(r"\b[A-Z]{3}\b", asked):
            return self._order(asked, options)
        return self._rest(options)  # a second choice for the same unit

    # -- what it thinks of others --------------------------------------------------------------------------------------
    def _judge(self) -> None:
        """Likes and dislikes others for their last orders."""
        t, mine = self.temperament, {o.place for o in self.seen.orders if o.power == self.seen.power}
        offered = {(who, place, dest) for who, place, dest in self.offers}
        for order in self.seen.orders:
            if order.power not in self.liking:
                continue
            hits = order.dest if order.verb == "+" and order.dest else order.target if order.verb == "-" else ""
            if order.verb == "+" and order.target in mine:
                self.liking[order.power] += t.gratitude
            elif hits in mine:
                self.liking[order.power] -= t.grudge
        for who, place, dest in offered:
            own = [o for o in self.seen.orders if o.power == who]
            if own and not any(o.verb == "+" and (o.target, o.dest) == (place, dest) for o in own):
                self.liking[who] -= 0.5 * t.grudge
        for power in self.liking:
            self.liking[power] = max(-2.0, min(2.5, 0.9 * self.liking[power]))

    def _hear(self, speaker: str, said: Meaning) -> None:
        if speaker not in self.liking:
            return
        if said.act == ASK and self.seen.units.get(said.place) == speaker:
            self.asked.append((speaker, said.place, said.dest))
            self.liking[speaker] += 0.1
        elif said.act == OFFER and self.seen.units.get(said.place) == self.seen.power:
            self.offers.append((speaker, said.place, said.dest))
            self.liking[speaker] += 0.3
        elif said.act == PEACE:
            self.liking[speaker] += 0.15

    def _prey(self) -> str:
        """The place to attack: of whom it likes least, or who leads."""
        seen, t = self.seen, self.temperament
        total = max(1, len(seen.centres))

        def worth(place: str) -> float:
            owner = seen.centres.get(place) or seen.units.get(place, "")
            noise = self.rng.random() * 0.5
            if not owner:
                return 1.0 + noise  # nobody's
            return t.leader * seen.count(owner) / total - self.liking.get(owner, 0.0) + noise

        places = [p for p in {**seen.centres, **seen.units} if p in CENTRES and self._foreign(p)]
        return max(sorted(places), key=worth, default="")

    def _foreign(self, place: str) -> bool:
        return self.seen.centres.get(place) != self.seen.power and self.seen.units.get(place) != self.seen.power

    def _friends(self) -> list[str]:
        living = {*self.seen.units.values()} - {self.seen.power}
        return sorted((p for p in living if p in self.liking), key=lambda p: -self.liking[p])

    # -- talk ----------------------------------------------------------------------------------------------------------
    def _address(self, options: Sequence[str]) -> str:
        self.addressee = NOBODY
        if self.rng.random() < self.temperament.talks:
            friends = [power for power in self._friends() if power in options]
            asking = [who for who, *_ in self.asked if who in options and self.liking[who] >= FRIEND]
            if asking:
                self.addressee = asking[0]
            elif friends:
                self.addressee = friends[0] if self.rng.random() < 0.8 else self.rng.choice(friends)
        return self.addressee

    def _message(self) -> str:
        rng, seen, t = self.rng, self.seen, self.temperament
        to, liking = self.addressee, self.liking.get(self.addressee, 0.0)
        wish = next(((place, dest) for who, place, dest in self.asked if who == to), None)
        if wish is not None and self.promised is None:
            if liking >= FRIEND and rng.random() < t.helpful and self._foreign(wish[1]):
                self.promised = wish
                return say(OFFER, rng, *wish)
            return say(NO, rng)
        if liking < -0.5:
            return say(WARN, rng)
        prey = self._prey()
        theirs = [place for place in seen.units_of(to) if place != prey]
        own = seen.own()
        if not prey or not own or rng.random() < 0.15:
            return say(PEACE, rng)
        if self.promised is None and theirs and seen.units.get(prey) != to and rng.random() < 0.3 * t.helpful:
            self.promised = (rng.choice(theirs), prey)
            return say(OFFER, rng, *self.promised)
        if seen.units.get(prey) == to:
            return say(PEACE, rng)
        place = rng.choice(own)
        self.planned[place] = prey
        return say(ASK, rng, place, prey)

    # -- orders --------------------------------------------------------------------------------------------------------
    def _order(self, asked: str, options: Sequence[str]) -> str:
        """Orders the unit: it helps, goes where it is helped, or follows a plan of its own."""
        rng, t, seen = self.rng, self.temperament, self.seen
        place = next(iter(re.findall(r"[A-Z]{3}", asked)), "")
        by_label = {as_order(option): option for option in options}
        self.helps = None
        if rng.random() < t.mistakes:
            return self._random(options, by_label)
        if self.promised is not None and self.promised[0] != place:
            wish, self.promised = self.promised, None
            support = by_label.get(Order("", "", "+", wish[0]))
            if support and rng.random() < t.loyalty:
                self.helps = wish
                return support
            if stab := by_label.get(Order("", "", "-", wish[0])):  # into the place that is left alone
                return stab
        for who, start, dest in self.offers:
            move = by_label.get(Order("", "", "-", dest))
            if start == place and move and self._foreign(dest) and self.liking[who] > -0.5:
                self.planned[place] = dest
                return move
        for start, dest in self.planned.items():  # own units help one another
            support = by_label.get(Order("", "", "+", start))
            if support and start != place and start in seen.own():
                self.helps = (start, dest)
                return support
        for who, start, dest in self.asked:
            support = by_label.get(Order("", "", "+", start))
            if support and self.liking[who] >= FRIEND and self._foreign(dest) and rng.random() < t.helpful:
                self.helps = (start, dest)
                return support
        if place in self.planned and (move := by_label.get(Order("", "", "-", self.planned[place]))):
            return move
        prey = self._prey()
        move = by_label.get(Order("", "", "-", prey))
        if move and (len(seen.own()) > 1 or rng.random() < t.boldness):
            self.planned[place] = prey
            return move
        goals = [o for label, o in by_label.items() if label.verb == "-" and self._foreign(label.target)]
        if not move and goals and rng.random() < 0.8:  # on a larger map: toward centres, or anywhere
            best = [o for o in goals if as_order(o).target in CENTRES]
            chosen = rng.choice(best or goals)
            self.planned[place] = as_order(chosen).target
            return chosen
        friends = self._friends()
        for friend in friends[:1]:
            supports = [by_label.get(Order("", "", "+", p)) for p in seen.units_of(friend)]
            if self.liking[friend] >= FRIEND and (found := [s for s in supports if s]):
                return rng.choice(found)
        return by_label.get(Order("", "", "H"), rng.choice(list(options)))

    def _rest(self, options: Sequence[str]) -> str:
        """Picks what to support: the move that was planned, else the stay."""
        if self.helps is None:
            return self.rng.choice(list(options))
        by_label = {as_order(option): option for option in options}
        wanted = (("-", self.helps[1]), ("H", ""), ("+", self.helps[0]))
        self.helps = None
        found = (by_label.get(Order("", "", *each)) for each in wanted)
        return next((option for option in found if option), self.rng.choice(list(options)))

    def _random(self, options: Sequence[str], by_label: Mapping[Order, str]) -> str:
        option = self.rng.choice(list(options))
        label = next(label for label, own in by_label.items() if own == option)
        self.helps = (label.target, "") if label.verb in "+~" else None
        return option


def as_order(option: str) -> Order:
    """An option as an order, without whose it is: of compact style, or in the notation of the others. The second choice
    of a support is a move or a hold."""
    words = option.split()
    if len(words) < 3:
        if option[:1] in "-=+~" and len(option) > 1:
            return Order("", "", {"=": "-"}.get(option[0], option[0]), option[1:4])
        return Order("", "", option)
    verb = {"S": "+", "C": "~", "R": "-"}.get(words[2], words[2])
    if verb in "+~" and len(words) > 6:
        return Order("", "", "-", words[6][:3])
    if verb in "+~":
        return Order("", "", verb, words[4][:3] if len(words) > 4 else "")
    return Order("", "", verb, words[3][:3] if len(words) > 3 else "")


# --- By name ----------------------------------------------------------------------------------------------------------
DEFAULT = "mixture"  # a temperament drawn for each seat
RANDOM = "random"


class RandomPower(Power):
    """Chooses uniformly, and says anything: blind chance."""

    def __init__(self, seed: int) -> None:
        super().__init__(TEMPERAMENTS["careful"], seed)

    def reply(self, text: str, options: Sequence[str] = ()) -> str:
        self.observe(text)
        if options:
            return self.rng.choice(list(options))
        own, places = self.seen.own() or ["PAR"], sorted(self.seen.units) or ["PAR"]
        act = self.rng.choice((ASK, OFFER, YES, NO, PEACE, WARN))
        return f"{say(act, self.rng, self.rng.choice(own), self.rng.choice(places))} {END}"


def make_player(name: str, seed: int, role: str = "power") -> Power:
    """A seat's player by name: `mixture`, `random`, or one of `TEMPERAMENTS`. Raises ValueError for other names."""
    if name == RANDOM:
        return RandomPower(seed)
    if name == DEFAULT:
        rng = Random(seed)
        return Power(rng.choice(MIXTURE), rng.getrandbits(63))
    if name not in TEMPERAMENTS:
        names = ", ".join((DEFAULT, RANDOM, *TEMPERAMENTS))
        raise ValueError(f"There is no scripted player {name!r}. Take one of {names}.")
    return Power(TEMPERAMENTS[name], seed)
