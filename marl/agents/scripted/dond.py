"""Scripted negotiators for Deal or No Deal, and the small grammar that they speak and understand.

Read downward: what a message means (`understand`), how a meaning is put into words (`say_split`, `say_value`), how
much a player gives and tells (`Temperament`), and one seat of one game (`Negotiator`). A negotiator weighs its
partner's possible values by what it hears, asks for a split that leaves its partner much among those that it would
accept itself, and ends with the claim that the talk arrived at. Mistakes are part of it: models that start from these
games must have room to improve. Left out: planning, deception beyond a misstated value, and memory across games. The
objective is not read: how much a negotiator cares for its partner is its temperament's `care`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from envs.core import END, TurnKind
from envs.dond.environment import DealOrNoDeal
from envs.dond.replies import MESSAGE, PROPOSE, proposal_text
from envs.dond.rules import MAX_POINTS, Triple, allocations, partner_values, rest
from envs.dond.texts import parse_heard, parse_prompt
from marl.agents.scripted.dond_language import (
    ACCEPT,
    ACCEPT_AGAIN,
    ACCEPT_PLAIN,
    ALL_VALUES,
    ASK_VALUES,
    NUMBER_OF,
    PLAIN,
    QUESTION,
    REJECT,
    SMALL_TALK,
    YES,
    say_split,
    say_value,
    understand,
)

NUMBER_OF |= {"nine": 9, "ten": 10, "zero": 0, "nothing": 0}


YES |= {"perfect", "accept", "done"}


# --------------------------------------------------------------------------------------------------------------------
# Who plays
@dataclass(frozen=True)
class Temperament:
    """How a negotiator plays. A split's worth to it is its own points + `care` * its partner's expected points.

    `slack`: how far below the best split's worth it asks and accepts at first; `concession` is added to that with each
    message of its own, up to `limit`. `spread`: scale in points of the Gumbel noise by which an acceptable split is
    picked. `openness`: probability that a message states a value; `thorough`: its first message states all of them.
    `honesty`: probability that a stated value is the true one. `patience`: own messages before it gives up. `terse`:
    probability of the shortest wordings. `mistakes`: probability of a wrong final claim and, at a third of it, of
    proposing too early in a given turn. `slips`: probability of a reply that the game refuses. `plain`: probability of
    naming a split in full, item by item, which is easy to follow.
    """

    name: str
    care: float
    slack: float
    concession: float
    limit: float
    spread: float
    openness: float
    honesty: float = 0.9
    patience: int = 4
    terse: float = 0.1
    mistakes: float = 0.14
    slips: float = 0.01
    thorough: bool = False
    plain: float = 0.8


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


def draw_temperament(rng: Random) -> Temperament:
    """One of the default mixture, without `careful`."""
    return rng.choice(MIXTURE)


TRUST = 0.95  # how far a stated value is believed
CLAIM_SHARPNESS = 0.2  # a split that the partner asked for weighs its values by exp(CLAIM_SHARPNESS * its points)
FEW_WORDS = 9  # a shorter wording is looked for above this
LONGEST = 9  # own messages after which any negotiator proposes, whatever the partner says


class Negotiator:
    """One seat of one game. Give every observation's text to `observe` (WAIT) or `reply` (SPEAK), in order.

    `seed` determines its words and choices, given what it reads. Copes with any partner text.
    """

    def __init__(self, temperament: Temperament, seed: int) -> None:
        self.temperament = temperament
        self.rng = Random(seed)
        self.counts: Triple | None = None
        self.own: Triple = (0, 0, 0)
        self.belief: dict[Triple, float] = {}  # the partner's possible values and their weights
        self.table: Triple | None = None  # own share of the last split that was spoken of
        self.table_is_mine = False
        self.agreed = False
        self.accepted = False  # the last message said yes to the table
        self.pending = False  # the partner has proposed
        self.asked = False
        self.spoken = 0  # own messages
        self.told: set[int] = set()  # items whose value was stated
        self.held: str | None = None  # the reply meant when a slip came out instead
        self.error = False

    def observe(self, text: str) -> None:
        """Reads an observation that asks for nothing. Raises ValueError if a game's first text isn't the prompt."""
        if self.counts is None:
            self.counts, self.own, _ = parse_prompt(text)
            self.belief = dict.fromkeys(partner_values(self.counts, self.own), 1.0)
        self.error = False
        for kind, body in parse_heard(text):
            if kind == "proposal":
                self.pending = True
            elif kind == "error":
                self.error = True
            elif kind == "message":
                self._hear(body)

    def reply(self, text: str, options: Sequence[str] = ()) -> str:
        """The reply to an observation that asks for one, tags included. `options` is empty: every turn is free text.

        Raises ValueError if the first text of a game isn't the prompt.
        """
        self.observe(text)
        if self.error:  # say what was meant, or else the plainest thing that the rules allow
            meant, self.held = self.held, None
            return meant or (self._propose(careful=True) if self.pending else self._speak(self._ask()))
        meant = self._decide()
        if self.rng.random() < self.temperament.slips:
            self.held = meant
            return self._slip(meant)
        return meant

    # What was heard

    def _hear(self, message: str) -> None:
        assert self.counts is not None
        their_table = None if self.table is None else rest(self.table, self.counts)
        heard = understand(message, self.counts, their_table)
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
        """Of every share that this player could get: its worth, and the partner's expected points beside it."""
        assert self.counts is not None
        weight = sum(self.belief.values())
        expected = [sum(w * v[item] for v, w in self.belief.items()) / weight for item in range(3)]
        partner = {share: _points(rest(share, self.counts), expected) for share in allocations(self.counts)}
        care = self.temperament.care
        return {share: _points(share, self.own) + care * given for share, given in partner.items()}, partner

    # What to do

    def _decide(self) -> str:
        t, rng = self.temperament, self.rng
        if self.pending:
            return self._propose()
        if self.agreed:
            if self.accepted or rng.random() < 0.8:
                return self._propose()
            return self._speak(rng.choice(ACCEPT), accepts=True)
        if self.spoken >= LONGEST or (self.spoken and rng.random() < t.mistakes / 3):
            return self._propose()
        worth, _ = self._worth()
        best = max(worth.values())
        last_try = self.spoken >= t.patience
        slack = t.limit if last_try else min(t.slack + t.concession * self.spoken, t.limit)
        offer = None if self.table_is_mine else self.table
        telling = t.thorough and len(self.told) < 3
        if offer is not None and not telling and worth[offer] >= best - slack - 1e-9:
            again = ACCEPT_PLAIN if rng.random() < t.plain else ACCEPT_AGAIN if rng.random() < 0.25 else ()
            words = say_split(offer, self._counts(), rng, templates=again) if again else rng.choice(ACCEPT)
            return self._speak(words, accepts=True)
        if last_try and rng.random() < 0.5:
            return self._propose()
        return self._speak(self._message())

    def _counts(self) -> Triple:
        assert self.counts is not None
        return self.counts

    def _message(self) -> str:
        """An ask, a counter-offer, a question or a statement, in this temperament's words."""
        t, rng = self.temperament, self.rng
        if t.thorough and len(self.told) < 3:
            self.told = {0, 1, 2}
            return f"{rng.choice(ALL_VALUES).format(*self.own)} . {rng.choice(ASK_VALUES)}"
        opening = self.spoken == 0 and self.table is None
        tells = rng.random() < (max(t.openness, 0.8) if self.asked else t.openness) and len(self.told) < 3
        if opening and rng.random() < 0.08:
            return rng.choice(QUESTION)
        if opening and tells and rng.random() < 0.4:
            return self._statement()
        counter = self.table is not None and not self.table_is_mine
        ask = self._ask()
        if tells:
            return f"{ask} , {self._statement()}" if not ask.endswith("?") else f"{self._statement()} , {ask}"
        if counter and rng.random() < 0.6 * (1 - t.terse):
            return f"{rng.choice(REJECT)} {ask}"
        if rng.random() < 0.1:
            return f"{rng.choice(SMALL_TALK)} {ask}"
        return ask

    def _ask(self) -> str:
        """Puts a split on the table and says so."""
        t, rng, counts = self.temperament, self.rng, self._counts()
        worth, partner = self._worth()
        slack = min(t.slack + t.concession * self.spoken, t.limit)
        enough = max(worth.values()) - slack - 1e-9
        acceptable = [share for share, value in worth.items() if value >= enough]
        noise = {share: -t.spread * math.log(-math.log(rng.random() or 0.5)) for share in acceptable}
        mine = max(acceptable, key=lambda share: partner[share] + noise[share])
        self.table, self.table_is_mine, self.agreed = mine, True, False
        if rng.random() < t.plain:
            return say_split(mine, counts, rng, templates=PLAIN)
        terse = rng.random() < t.terse
        drafts = [say_split(mine, counts, rng, terse=terse) for _ in range(3)]
        return next((draft for draft in drafts if len(draft.split()) <= FEW_WORDS), min(drafts, key=len))

    def _statement(self) -> str:
        """States the value of an item that has not been told, the most telling first: the best or a worthless one."""
        untold = [item for item in range(3) if item not in self.told]
        worthless = [item for item in untold if self.own[item] == 0]
        pick_worthless = worthless and self.rng.random() < 0.6
        item = worthless[0] if pick_worthless else max(untold, key=lambda item: self.own[item])
        value = self.own[item]
        if self.rng.random() >= self.temperament.honesty:
            value = self.rng.randrange(MAX_POINTS + 1)
        self.told.add(item)
        return say_value(item, value, self.rng)

    def _speak(self, words: str, accepts: bool = False) -> str:
        self.spoken += 1
        self.accepted = accepts
        return f"{MESSAGE} {words} {END}"

    def _propose(self, careful: bool = False) -> str:
        """Claims the share that the talk arrived at, or, by mistake, another."""
        counts, rng = self._counts(), self.rng
        if self.table is None:
            self._ask()  # nothing was said that could be claimed: claim what would have been asked for
        claim = self.table
        assert claim is not None
        if not careful and rng.random() < self.temperament.mistakes:
            item = rng.randrange(3)
            claim = _with(claim, item, rng.choice([n for n in range(counts[item] + 1) if n != claim[item]]))
        return f"{proposal_text(claim)} {END}"

    def _slip(self, meant: str) -> str:
        """A reply that the game refuses."""
        body = meant.removeprefix(MESSAGE).removeprefix(PROPOSE).strip()
        refused = (body, f"{PROPOSE} (1 hats) {END}", f"{MESSAGE} ok {MESSAGE} {body}", f"{PROPOSE} {END}")
        return self.rng.choice(refused)


def _points(share: Triple, values: Sequence[float]) -> float:
    return share[0] * values[0] + share[1] * values[1] + share[2] * values[2]


def _with(share: Triple, item: int, number: int) -> Triple:
    changed = list(share)
    changed[item] = number
    return changed[0], changed[1], changed[2]


# --------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Played:
    """A finished game: every reply in order as (agent, reply), and the environment's outcome."""

    replies: tuple[tuple[str, str], ...]
    outcome: dict[str, Any]


def play(
    env: DealOrNoDeal, seats: tuple[Negotiator, Negotiator], seed: int, options: dict[str, Any] | None = None
) -> Played:
    """Plays one game between two negotiators, `player_0` first in `seats`."""
    observations, infos = env.reset(seed=seed, options=options)
    players = dict(zip(env.possible_agents, seats, strict=True))
    replies = []
    while env.agents:
        actions = {}
        for agent in env.agents:
            observation = observations[agent]
            if observation["turn"] == TurnKind.SPEAK:
                actions[agent] = players[agent].reply(observation["text"])
                replies.append((agent, actions[agent]))
            else:
                players[agent].observe(observation["text"])
                actions[agent] = ""
        observations, _, _, _, infos = env.step(actions)
    return Played(tuple(replies), next(iter(infos.values()))["outcome"])


# --------------------------------------------------------------------------------------------------------------------
# By name
DEFAULT = "mixture"  # a temperament drawn for each seat
RANDOM = "random"


class RandomPlayer:
    """Says a few words that mean nothing, then claims a share drawn uniformly: what blind chance gives."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.counts: Triple = (0, 0, 0)
        self.pending = False
        self.spoken = False

    def observe(self, text: str) -> None:
        """Reads the counts, and whether a proposal is pending."""
        if not any(self.counts):
            books, hats, balls = parse_prompt(text)[0]
            self.counts = (books, hats, balls)
        self.pending = self.pending or any(kind == "proposal" for kind, _ in parse_heard(text))

    def reply(self, text: str, options: Sequence[str] = ()) -> str:
        """A message first, unless the partner has proposed; then a claim."""
        self.observe(text)
        if not self.spoken and not self.pending:
            self.spoken = True
            return f"{MESSAGE} {self.rng.choice(QUESTION)} {END}"
        return f"{proposal_text(self.rng.choice(allocations(self.counts)))} {END}"


def make_player(name: str, seed: int, role: str = "negotiator") -> Negotiator | RandomPlayer:
    """A seat's player by name: `mixture`, `random`, or one of `TEMPERAMENTS`. ValueError for another name."""
    if name == RANDOM:
        return RandomPlayer(seed)
    if name == DEFAULT:
        return Negotiator(draw_temperament(Random(seed ^ 0x5EED)), seed)
    if name not in TEMPERAMENTS:
        known = ", ".join([DEFAULT, RANDOM, *TEMPERAMENTS])
        raise ValueError(f"There is no scripted negotiator {name!r}; choose from {known}.")
    return Negotiator(TEMPERAMENTS[name], seed)
