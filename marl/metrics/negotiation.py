"""Reads Deal or No Deal dialogues: splits named, values claimed, and proposals that keep or invert them.

The grammar of the scripted players (`understand`) reads splits. It gives items that a message leaves out to the other
side, so `explicit` counts only messages that speak of all items. Intervals are in drift.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

from envs.core import TurnKind
from envs.dond.environment import AGENTS
from envs.dond.replies import PROPOSE, Proposal, parse_reply
from envs.dond.rules import Context, Triple, allocations, points, rest, value_vectors
from envs.human_dond import HumanView
from marl.agents.scripted.dond_language import ITEM_OF, NEGATIONS, NUMBER_OF, REST_WORDS, understand
from marl.types import Episode

READING = 2  # raise it when messages are read differently: kept figures are then measured again


def context(episode: Episode) -> Context:
    """The pool and both players' values of a game (from a file they are lists)."""
    counts, (first, second) = episode.facts["counts"], episode.facts["values"]
    return Context(tuple(counts), (tuple(first), tuple(second)))


@dataclass(frozen=True)
class Line:
    """One accepted reply: a message, or a claim (then `message` is empty). `seat`: 0 or 1."""

    seat: int
    message: str
    claim: Triple | None = None


@dataclass(frozen=True)
class Talk:
    """One game: pool, values in seat order, lines, and the seats whose lines are measured."""

    counts: Triple
    values: tuple[Triple, Triple]
    lines: tuple[Line, ...]
    measured: tuple[int, ...] = (0, 1)


def talk_of(game: Episode | Mapping[str, Any], players: Iterable[str] | None = None) -> Talk:
    """Converts an episode or a transcript. `players`: the names to measure; None for both seats."""
    part: Callable[[Any, str], Any] = getattr if isinstance(game, Episode) else getitem
    facts, held = part(game, "facts"), part(game, "players")
    counts, (first, second) = tuple(facts["counts"]), facts["values"]
    lines = []
    counted: dict[str, list[int]] = {}  # by agent, a proposal that is made in parts (format=structured)
    for turn in part(game, "turns"):
        message, claim = part(turn, "message"), None
        if part(turn, "error"):
            continue
        if part(turn, "kind") in (TurnKind.CHOOSE, TurnKind.CHOOSE.name):
            own = counted.setdefault(part(turn, "agent"), [])
            own += [int(part(turn, "text"))] if part(turn, "text").isdecimal() else []
            if len(own) < len(counts):
                continue
            claim = (own[0], own[1], own[2])
        elif not message and PROPOSE not in part(turn, "text"):  # silence
            continue
        elif not message:
            claim = claim_in(part(turn, "text"), counts)
            assert claim is not None, turn  # the game accepted it
        lines.append(Line(AGENTS.index(part(turn, "agent")), message, claim))
    wanted = None if players is None else set(players)
    measured = tuple(i for i, agent in enumerate(AGENTS) if wanted is None or held[agent] in wanted)
    return Talk(counts, (tuple(first), tuple(second)), tuple(lines), measured)


def claim_in(text: str, counts: Triple) -> Triple | None:
    """The claim of an accepted reply; None if it is a message."""
    parsed = parse_reply(text, counts, proposal_pending=False, messages_sent=1)
    return parsed.claim if isinstance(parsed, Proposal) else None


def human_talk(view: HumanView) -> Talk:
    """Converts a human dialogue. Only YOU, seat 0, is measured; both claims stand at the end."""
    lines = [Line(0 if who == "YOU" else 1, text) for who, text in view.turns if text is not None]
    lines += [Line(i, "", claim) for i, claim in enumerate((view.claim, view.partner_claim)) if claim is not None]
    return Talk(view.counts, (view.values, view.partner_values), tuple(lines), (0,))


@dataclass(frozen=True)
class Claimed:
    """A proposal, the proposer's own last split (`stated`) and the last split of either (`table`), as its share.

    `*_explicit`: the message said of all items who gets them. `agreed`: its share of the split that one of them named
    and the other said yes to, if no other split was named since.
    """

    seat: int
    claim: Triple
    counts: Triple
    values: Triple
    stated: Triple | None
    stated_explicit: bool
    table: Triple | None
    table_explicit: bool
    agreed: Triple | None = None

    @property
    def telling(self) -> bool:
        """Tells whether a split was named and its sides differ, so that a claim differs from its inversion."""
        return self.table is not None and self.table != rest(self.table, self.counts)

    @property
    def inverted(self) -> bool:
        """Tells whether it claims the partner's share of the last split (Liao et al. 2024)."""
        return self.table is not None and self.telling and self.claim == rest(self.table, self.counts)

    @property
    def chance(self) -> float:
        """Probability of an inversion for a claim drawn uniformly."""
        return 1 / len(allocations(self.counts))

    @property
    def worse(self) -> bool:
        """Tells whether it claims the side worth less to the proposer."""
        return points(self.claim, self.values) < points(rest(self.claim, self.counts), self.values)


@dataclass(frozen=True)
class ValueClaim:
    """A statement about one's own value of an item. `chance`: probability that it is true of a random value vector."""

    seat: int
    item: int
    value: int
    true: bool
    chance: float


@dataclass(frozen=True)
class Reading:
    """The measured lines of one game. `understood`: number of messages in which the grammar found anything."""

    messages: tuple[str, ...]
    understood: int
    values: tuple[ValueClaim, ...]
    claims: tuple[Claimed, ...]

    @classmethod
    def of(cls, views: Sequence[Reading]) -> Reading:
        """Joins readings of one game that each measured one player."""
        return cls(
            sum((view.messages for view in views), ()), sum(view.understood for view in views),
            sum((view.values for view in views), ()), sum((view.claims for view in views), ()),
        )  # fmt: skip


def read_talk(talk: Talk) -> Reading:
    """Reads a game from its first line to its last."""
    counts = talk.counts
    stated: list[tuple[Triple, bool] | None] = [None, None]  # each player's own last split, from its side
    table: tuple[Triple, bool] | None = None  # the last split of either, from seat 0's side
    named_by, agreed = -1, False  # who named it; whether the other said yes to it since
    messages: list[str] = []
    values: list[ValueClaim] = []
    claims: list[Claimed] = []
    understood = 0
    possible = value_vectors(counts)
    for line in talk.lines:
        seat, measured = line.seat, line.seat in talk.measured
        from_here = None if table is None else _side(table[0], seat, counts)
        if line.claim is not None:
            if measured:
                last = (from_here, table is not None and table[1], from_here if agreed else None)
                splits = (*(stated[seat] or (None, False)), *last)
                claims.append(Claimed(seat, line.claim, counts, talk.values[seat], *splits))
            continue
        heard = understand(line.message, counts, from_here)
        agreed &= not heard.rejects
        if heard.share is not None:
            if heard.share != from_here:
                named_by, agreed = seat, False
            stated[seat] = (heard.share, explicit(line.message))
            table = (_side(heard.share, seat, counts), explicit(line.message))
        agreed |= table is not None and heard.accepts and named_by == 1 - seat
        if not measured:
            continue
        messages.append(line.message)
        own = stated_values(line.message)
        understood += bool(heard.share is not None or own or heard.accepts or heard.rejects or heard.asks)
        for item, value in own.items():
            chance = sum(vector[item] == value for vector in possible) / len(possible)
            values.append(ValueClaim(seat, item, value, talk.values[seat][item] == value, chance))
    return Reading(tuple(messages), understood, tuple(values), tuple(claims))


def _side(share: Triple, seat: int, counts: Triple) -> Triple:
    """Converts between seat 0's share and this seat's own."""
    return share if seat == 0 else rest(share, counts)


_ITEM = r"(?P<item>books?|hats?|(?:basket)?balls?)"
_NUMBER = r"(?P<value>\d{1,2}|no|zero|nothing|one|two|three|four|five|six|seven|eight|nine|ten)"
_ANY = r"(?:an? |any |each |every |the |my |those |these )?"
_MUCH = r"(?:(?:only|just|about|literally|also|still|absolutely|completely|really) )*"
_POINTS = r"(?:points?|pts|value|worth|use)"
_CLAIMS = tuple(
    re.compile(pattern)  # without a number it is worth nothing
    for pattern in (
        rf"(?:\bi (?:value|have)|,|\band) {_ANY}{_ITEM} at {_NUMBER}\b",
        rf"\b{_ITEM} (?:(?:to|for) me )?(?:(?:is|are) )?{_MUCH}worth {_MUCH}(?:a )?{_NUMBER}\b(?! (?:much|more|less))",
        rf"\b{_ITEM} (?:is|are|has|have|holds?|gives? me) {_MUCH}(?:of )?(?:a )?{_NUMBER} {_POINTS}\b",
        rf"\b{_ITEM} (?:is|are|has|have|holds?) {_MUCH}(?:of )?(?:a )?value of {_NUMBER}\b",
        rf"\b{_ITEM} (?:is|are|means?) {_MUCH}(?:useless|worthless|nothing)\b",
        rf"\b{_ITEM} (?:is not|are not|isn't|aren't|isnt|arent) {_MUCH}(?:worth anything|of any value)\b",
        rf"\b{_ITEM} (?:do not|does not|don't|doesn't|dont|doesnt) {_MUCH}(?:have|hold) any {_POINTS}\b",
        rf"\b{_NUMBER} (?:points?|pts) (?:for|per|from) (?:each|an?|every) (?:of the )?{_ITEM}\b",
        rf"\b(?:no|zero|0) {_POINTS} (?:for|in|from|with) {_ANY}{_ITEM}\b",
        rf"\bno need (?:for|of) {_ANY}{_ITEM}\b",
        rf"\bi (?:do not|don't|dont) need {_ANY}{_ITEM}\b",
    )
)
_BREAK = re.compile(r"[.;:!?,]|\b(?:so|but|because|since)\b")  # between clauses
_NOT_OWN = re.compile(r"\b(?:you|your|yours|you'll|you'd|you're|u|ur|if|whether|unless)\b")
_OWN = re.compile(r"(?: points?| pts)?(?: each| apiece)? (?:to|for|on|over|in) (?:me|mine|my|this|here)\b")
_ASKED_OR_MANY = re.compile(  # right before the item
    r"\b(?:are|is|do|does|did|all|both|two|three|four|\d)(?: of)?(?: the| those| these| any| my)? $"
)
_IN_ALL = re.compile(r"\b(?:total|together|altogether|combined)\b")


def stated_values(message: str) -> dict[int, int]:
    """Points that a message says one of each item is worth to its speaker, by item.

    Clauses with "you" or "if", questions, and clauses about several items together do not count.
    """
    text = " ".join(message.lower().replace("’", "'").split())
    found = {}
    for pattern in _CLAIMS:
        for match in pattern.finditer(text):
            before, after = _BREAK.split(text[: match.start()])[-1], text[match.end() :]
            end = _BREAK.search(after)
            if end:
                after = after[: end.start()]
            other = _NOT_OWN.search(before) or (_NOT_OWN.search(after) and not _OWN.match(after))
            asked = (end and end[0] == "?") or _ASKED_OR_MANY.search(text[: match.start("item")])
            if other or asked or _IN_ALL.search(after):
                continue
            word = match.groupdict().get("value") or "no"
            found[ITEM_OF[match["item"]]] = int(word) if word.isdigit() else NUMBER_OF.get(word, 0)
    return found


def explicit(message: str) -> bool:
    """Tells whether a message speaks of all three items, or of some and the rest, and refuses none."""
    words = set(re.findall(r"[a-z][a-z']*", message.lower().replace("’", "'")))
    items = {ITEM_OF[word] for word in words if word in ITEM_OF}
    return not words & NEGATIONS and (len(items) == 3 or bool(words & REST_WORDS))


def inverted_figures(games: Sequence[Episode], players: Iterable[str]) -> dict[str, float]:
    """Returns `talk/inverted`, `_explicit` and `_chance` of drift.py as plain means, for training."""
    wanted = set(players)
    telling = [c for game in games for c in read_talk(talk_of(game, wanted)).claims if c.telling]
    named = {
        "talk/inverted": [float(c.inverted) for c in telling],
        "talk/inverted_explicit": [float(c.inverted) for c in telling if c.table_explicit],
        "talk/inverted_chance": [c.chance for c in telling],
    }
    return {name: sum(found) / len(found) for name, found in named.items() if found}
