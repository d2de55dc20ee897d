"""Scripted negotiators for Deal or No Deal. They speak and understand the grammar of dond_language.py.

A `Negotiator` weighs its partner's possible values by what it hears, asks for a split that it would accept and that
leaves its partner much, and ends with the claim that the talk arrived at. It makes mistakes, so that models that start
from these games have room to improve. It knows no objective: how much it cares for its partner is its `Temperament`'s.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from envs.core import END
from envs.dond.replies import KINDS, MESSAGE, PROPOSE, Message, Proposal, parse_reply, proposal_text
from envs.dond.rules import MAX_POINTS, Triple, allocations, partner_values, rest
from envs.dond.texts import parse_events, parse_prompt, says_freely
from marl.agents.scripted import dond_language as language


@dataclass(frozen=True)
class Temperament:
    """The manner of a negotiator. A split's worth to it is its own points + `care` * its partner's expected points."""

    name: str
    care: float
    slack: float  # points below the best split's worth that it asks for and accepts at first
    concession: float  # added to the slack with each message of its own
    limit: float  # of the slack
    spread: float  # scale in points of the Gumbel noise by which an acceptable split is picked
    openness: float  # probability that a message states a value
    honesty: float = 0.9  # probability that a stated value is the true one
    patience: int = 4  # own messages before it gives up
    terse: float = 0.1  # probability of the shortest wordings
    mistakes: float = 0.14  # probability of a wrong final claim; a third of it, of proposing too early in a turn
    slips: float = 0.01  # probability of a reply that the game refuses
    thorough: bool = False  # its first message states all values
    plain: float = 0.8  # probability of naming a split in full, item by item, which is easy to follow


TEMPERAMENTS: Mapping[str, Temperament] = {
    t.name: t
    for t in (
        Temperament("fair", care=0.3, slack=2.5, concession=0.8, limit=6, spread=4, openness=0.25),
        Temperament("stubborn", care=0, slack=1, concession=0.6, limit=5, spread=3, openness=0.1, patience=5),
        Temperament("generous", care=0.5, slack=4, concession=1.2, limit=7, spread=4, openness=0.25),
        Temperament("cooperative", care=1, slack=0.5, concession=0.6, limit=5, spread=1.5, openness=0.6),
        Temperament("casual", care=0, slack=5, concession=1, limit=9, spread=8, openness=0.15, honesty=0.6),
        Temperament("terse", care=0.1, slack=2.5, concession=0.8, limit=6, spread=5, openness=0.05, terse=0.8),
        Temperament(
            "careful", care=1, slack=0.01, concession=0.8, limit=6, spread=0, openness=1, honesty=1, patience=6,
            terse=0, mistakes=0, slips=0, thorough=True,
        ),
    )
}  # fmt: skip
MIXTURE = tuple(t for t in TEMPERAMENTS.values() if t.name != "careful")  # drawn from uniformly
TRUST = 0.95  # weight of a stated value
CLAIM_SHARPNESS = 0.2  # a split that the partner asked for weighs its values by exp(CLAIM_SHARPNESS * its points)
FEW_WORDS = 9  # longer drafts are drawn again, up to twice
LONGEST = 9  # own messages after which any negotiator proposes


class Negotiator:
    """One seat of one game. Takes every observation's text in order, by `observe` (WAIT) or `reply` (SPEAK).

    Copes with any text of a partner. Given what it reads, `seed` determines its words and choices.
    """

    def __init__(self, temperament: Temperament, seed: int) -> None:
        self.temperament = temperament
        self.rng = Random(seed)
        self.counts: Triple = (0, 0, 0)
        self.own: Triple = (0, 0, 0)
        self.belief: dict[Triple, float] = {}  # the partner's possible values and their weights
        self.table: Triple | None = None  # own share of the last split that was spoken of
        self.table_is_mine = False
        self.agreed = False
        self.accepted = False  # the last message said yes to the table
        self.pending = False  # the partner has proposed
        self.asked = False
        self.spoken = 0  # own messages
        self.stated: set[int] = set()  # items whose value was stated
        self.held: str | None = None  # the reply meant when a slip came out instead
        self.error = False
        self.meant: str | None = None  # the reply that is given in parts (format=structured)
        self.counted = 0  # items of it that were claimed

    def observe(self, text: str) -> None:
        """Reads an observation. Raises ValueError if a game's first text isn't the prompt."""
        if not any(self.counts):
            self.counts, self.own, _ = parse_prompt(text)
            self.belief = dict.fromkeys(partner_values(self.counts, self.own), 1.0)
        self.error = False
        for kind, body in parse_events(text):
            if kind == "proposal":
                self.pending = True
            elif kind == "error":
                self.error = True
            elif kind == "message":
                self._hear(body)

    def reply(self, text: str, options: Sequence[str] = ()) -> str:
        """Replies to an observation: with tags, or (format=structured) with the part that is asked for."""
        in_parts = bool(options) or says_freely(text)
        if not in_parts:
            return self.whole_reply(text)
        if self.meant is None:
            self.meant = self.whole_reply(text)
            self.meant, self.held = self.held or self.meant, None  # no part of a reply is a slip
        parsed = parse_reply(self.meant, self.counts, proposal_pending=False, messages_sent=1)
        assert isinstance(parsed, Message | Proposal), parsed
        if options == KINDS:
            return KINDS[isinstance(parsed, Proposal)]
        if isinstance(parsed, Message):
            self.meant = None
            return f"{parsed.text} {END}"
        count = parsed.claim[self.counted]
        self.counted = (self.counted + 1) % len(parsed.claim)
        if not self.counted:
            self.meant = None
        return str(count)

    def whole_reply(self, text: str) -> str:
        """Replies to an observation, with tags."""
        self.observe(text)
        if self.error:  # say what was meant, or else the plainest thing that the rules allow
            meant, self.held = self.held, None
            return meant or (self._propose(careful=True) if self.pending else self._speak(self._ask()))
        meant = self._decide()
        if self.rng.random() < self.temperament.slips:
            self.held = meant
            return self._slip(meant)
        return meant

    def _hear(self, message: str) -> None:
        their_table = None if self.table is None else rest(self.table, self.counts)
        heard = language.understand(message, self.counts, their_table)
        self.asked = heard.asks
        for item, value in enumerate(heard.values):
            if value is not None:
                for values in self.belief:
                    self.belief[values] *= TRUST if values[item] == value else 1 - TRUST
        if heard.share is not None:
            for values in self.belief:
                self.belief[values] *= math.exp(CLAIM_SHARPNESS * _points(heard.share, values))
            offered = rest(heard.share, self.counts)
            same = offered == self.table
            self.agreed = same and not heard.rejects and (self.table_is_mine or self.accepted)
            self.table_is_mine = self.table_is_mine and same
            self.table = offered
        elif heard.rejects:
            self.agreed = False
        elif self.accepted or (heard.accepts and self.table_is_mine):
            self.agreed = True
        total = sum(self.belief.values())
        self.belief = {values: weight / total for values, weight in self.belief.items()}

    def _worth(self) -> tuple[dict[Triple, float], dict[Triple, float]]:
        """The worth of every share that this player could get, and the partner's expected points beside it."""
        weight = sum(self.belief.values())
        expected = [sum(w * v[item] for v, w in self.belief.items()) / weight for item in range(3)]
        partner = {share: _points(rest(share, self.counts), expected) for share in allocations(self.counts)}
        care = self.temperament.care
        return {share: _points(share, self.own) + care * given for share, given in partner.items()}, partner

    def _decide(self) -> str:
        t, rng = self.temperament, self.rng
        if self.pending:
            return self._propose()
        if self.agreed:
            if self.accepted or rng.random() < 0.8:
                return self._propose()
            return self._speak(rng.choice(language.ACCEPT), accepts=True)
        if self.spoken >= LONGEST or (self.spoken and rng.random() < t.mistakes / 3):
            return self._propose()
        worth, _ = self._worth()
        best = max(worth.values())
        last_try = self.spoken >= t.patience
        slack = t.limit if last_try else min(t.slack + t.concession * self.spoken, t.limit)
        offer = None if self.table_is_mine else self.table
        telling = t.thorough and len(self.stated) < 3
        if offer is not None and not telling and worth[offer] >= best - slack - 1e-9:
            if rng.random() < t.plain:
                words = language.say_split(offer, self.counts, rng, templates=language.ACCEPT_PLAIN)
            elif rng.random() < 0.25:
                words = language.say_split(offer, self.counts, rng, templates=language.ACCEPT_AGAIN)
            else:
                words = rng.choice(language.ACCEPT)
            return self._speak(words, accepts=True)
        if last_try and rng.random() < 0.5:
            return self._propose()
        return self._speak(self._message())

    def _message(self) -> str:
        """Words of an ask, a counter-offer, a question or a statement."""
        t, rng = self.temperament, self.rng
        if t.thorough and len(self.stated) < 3:
            self.stated = {0, 1, 2}
            return f"{rng.choice(language.ALL_VALUES).format(*self.own)} . {rng.choice(language.ASK_VALUES)}"
        opening = self.spoken == 0 and self.table is None
        tells = rng.random() < (max(t.openness, 0.8) if self.asked else t.openness) and len(self.stated) < 3
        if opening and rng.random() < 0.08:
            return rng.choice(language.QUESTION)
        if opening and tells and rng.random() < 0.4:
            return self._statement()
        counter = self.table is not None and not self.table_is_mine
        ask = self._ask()
        if tells:
            return f"{ask} , {self._statement()}" if not ask.endswith("?") else f"{self._statement()} , {ask}"
        if counter and rng.random() < 0.6 * (1 - t.terse):
            return f"{rng.choice(language.REJECT)} {ask}"
        if rng.random() < 0.1:
            return f"{rng.choice(language.SMALL_TALK)} {ask}"
        return ask

    def _ask(self) -> str:
        """Puts a split on the table; returns the words for it."""
        t, rng, counts = self.temperament, self.rng, self.counts
        worth, partner = self._worth()
        slack = min(t.slack + t.concession * self.spoken, t.limit)
        enough = max(worth.values()) - slack - 1e-9
        acceptable = [share for share, value in worth.items() if value >= enough]
        noise = {share: -t.spread * math.log(-math.log(rng.random() or 0.5)) for share in acceptable}
        mine = max(acceptable, key=lambda share: partner[share] + noise[share])
        self.table, self.table_is_mine, self.agreed = mine, True, False
        if rng.random() < t.plain:
            return language.say_split(mine, counts, rng, templates=language.PLAIN)
        terse = rng.random() < t.terse
        drafts = [language.say_split(mine, counts, rng, terse=terse) for _ in range(3)]
        return next((draft for draft in drafts if len(draft.split()) <= FEW_WORDS), min(drafts, key=len))

    def _statement(self) -> str:
        """States the value of an item that has not been told, the most telling first: the best or a worthless one."""
        unstated = [item for item in range(3) if item not in self.stated]
        worthless = [item for item in unstated if self.own[item] == 0]
        pick_worthless = worthless and self.rng.random() < 0.6
        item = worthless[0] if pick_worthless else max(unstated, key=lambda item: self.own[item])
        value = self.own[item]
        if self.rng.random() >= self.temperament.honesty:
            value = self.rng.randrange(MAX_POINTS + 1)
        self.stated.add(item)
        return language.say_value(item, value, self.rng)

    def _speak(self, words: str, accepts: bool = False) -> str:
        self.spoken += 1
        self.accepted = accepts
        return f"{MESSAGE} {words} {END}"

    def _propose(self, careful: bool = False) -> str:
        """Claims the share that the talk arrived at, or, by mistake, another."""
        counts, rng = self.counts, self.rng
        if self.table is None:
            self._ask()  # no split was spoken of: claim what would have been asked for
        assert self.table is not None
        claim = list(self.table)
        if not careful and rng.random() < self.temperament.mistakes:
            item = rng.randrange(3)
            claim[item] = rng.choice([n for n in range(counts[item] + 1) if n != claim[item]])
        return f"{proposal_text((claim[0], claim[1], claim[2]))} {END}"

    def _slip(self, meant: str) -> str:
        """A reply that the game refuses."""
        body = meant.removeprefix(MESSAGE).removeprefix(PROPOSE).strip()
        refused = (body, f"{PROPOSE} (1 hats) {END}", f"{MESSAGE} ok {MESSAGE} {body}", f"{PROPOSE} {END}")
        return self.rng.choice(refused)


def _points(share: Triple, values: Sequence[float]) -> float:
    return share[0] * values[0] + share[1] * values[1] + share[2] * values[2]


# --- By name ----------------------------------------------------------------------------------------------------------
DEFAULT = "mixture"  # a temperament drawn for each seat
RANDOM = "random"


class RandomPlayer(Negotiator):
    """Asks a question, then claims a share drawn uniformly: the score of blind chance."""

    def __init__(self, seed: int) -> None:
        super().__init__(TEMPERAMENTS["fair"], seed)

    def whole_reply(self, text: str) -> str:
        """A message first, unless the partner has proposed; then a claim."""
        self.observe(text)
        if not self.spoken and not self.pending:
            return self._speak(self.rng.choice(language.QUESTION))
        return f"{proposal_text(self.rng.choice(allocations(self.counts)))} {END}"


def make_player(name: str, seed: int, role: str = "negotiator") -> Negotiator:
    """A seat's player by name: `mixture`, `random`, or one of `TEMPERAMENTS`. Raises ValueError for other names."""
    if name == RANDOM:
        return RandomPlayer(seed)
    if name == DEFAULT:
        return Negotiator(Random(seed ^ 0x5EED).choice(MIXTURE), seed)
    if name not in TEMPERAMENTS:
        known = ", ".join([DEFAULT, RANDOM, *TEMPERAMENTS])
        raise ValueError(f"There is no scripted negotiator {name!r}. Choose from {known}.")
    return Negotiator(TEMPERAMENTS[name], seed)
