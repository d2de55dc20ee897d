"""What negotiators said and did in Deal or No Deal: splits named, values claimed, and what was proposed after all that.

Messages are read by the grammar of the scripted players (`understand` in scripted/dond.py), which knows some of what
people and trained models say and guesses where something is left out: items that a message doesn't mention go to the
other side. So every share here comes with how much it rests on (`coverage`), and with a stricter variant, `explicit`,
in which the message itself says of all three items, or of "the rest", who gets them. What it says of values is read
here (`told_values`), since the grammar takes words about the partner's values, and questions, for claims about one's
own. Left out: intervals (drift.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.dond.environment import AGENTS
from envs.dond.replies import Proposal, parse_reply
from envs.dond.rules import Triple, allocations, points, rest, value_vectors
from envs.human_dond import HumanView
from marl.agents.scripted.dond_language import ITEM_OF, NEGATIONS, NUMBER_OF, REST_WORDS, understand
from marl.types import Episode

READING = 2  # counts up when messages come to be read otherwise: figures that were kept are then measured again


@dataclass(frozen=True)
class Line:
    """One accepted reply: a message, or a claim (then `message` is empty). `seat`: 0 or 1."""

    seat: int
    message: str
    claim: Triple | None = None


@dataclass(frozen=True)
class Talk:
    """One game: the pool, both players' values in seat order, what was said and claimed, whose lines are measured."""

    counts: Triple
    values: tuple[Triple, Triple]
    lines: tuple[Line, ...]
    measured: tuple[int, ...] = (0, 1)


def talk_of(game: Episode | Mapping[str, Any], players: Iterable[str] | None = None) -> Talk:
    """An episode or a transcript as a talk. `players`: who is measured, by name; None for both seats."""
    if isinstance(game, Episode):
        facts, held = game.facts, game.players
        turns = [(t.agent, t.text, t.message, t.error) for t in game.turns]
    else:
        facts, held = game["facts"], game["players"]
        turns = [(t["agent"], t["text"], t["message"], t["error"]) for t in game["turns"]]
    counts, (first, second) = tuple(facts["counts"]), facts["values"]
    lines = []
    for agent, text, message, error in turns:
        claim = None
        if not error and not message:
            parsed = parse_reply(text, counts, proposal_pending=False, messages_sent=1)
            assert isinstance(parsed, Proposal), text  # the game accepted it
            claim = parsed.claim
        if not error:
            lines.append(Line(AGENTS.index(agent), message, claim))
    wanted = None if players is None else set(players)
    measured = tuple(i for i, agent in enumerate(AGENTS) if wanted is None or held[agent] in wanted)
    return Talk(counts, (tuple(first), tuple(second)), tuple(lines), measured)


def human_talk(view: HumanView) -> Talk:
    """A human dialogue, of which YOU, seat 0, are measured: the partner's lines are measured in its own row.

    Both claims stand at the end, where they are known: people chose after the talk, each by themselves.
    """
    lines = [Line(0 if who == "YOU" else 1, text) for who, text in view.turns if text is not None]
    lines += [Line(i, "", claim) for i, claim in enumerate((view.claim, view.partner_claim)) if claim is not None]
    return Talk(view.counts, (view.values, view.partner_values), tuple(lines), (0,))


@dataclass(frozen=True)
class Claimed:
    """A proposal and the talk before it. Shares are the proposer's.

    `stated`: by its own last message that named a split, `table`: by the last of either player's; None where there is
    none that the grammar reads. `*_explicit`: whether that message said of all items who gets them.
    """

    seat: int
    claim: Triple
    counts: Triple
    values: Triple
    stated: Triple | None
    stated_explicit: bool
    table: Triple | None
    table_explicit: bool

    @property
    def telling(self) -> bool:
        """Whether a claim can be told from its inversion: there is a split, and its two sides differ."""
        return self.table is not None and self.table != rest(self.table, self.counts)

    @property
    def inverted(self) -> bool:
        """The partner's share of the split that was spoken of last, proposed as one's own (Liao et al. 2024)."""
        return self.telling and self.table is not None and self.claim == rest(self.table, self.counts)

    @property
    def chance(self) -> float:
        """How probable an inversion is for a claim drawn uniformly."""
        return 1 / len(allocations(self.counts))

    @property
    def worse(self) -> bool:
        """Whether the proposer claims the side that is worth less to itself: a sign that needs no reading of talk."""
        return points(self.claim, self.values) < points(rest(self.claim, self.counts), self.values)


@dataclass(frozen=True)
class Valued:
    """A statement about one's own value of an item, whether it is true, and how probable that is of a value vector
    drawn uniformly from those that the pool allows."""

    seat: int
    item: int
    value: int
    true: bool
    chance: float


@dataclass(frozen=True)
class Reading:
    """What the grammar found in the measured lines of one game. `understood`: of `messages`, those in which it found
    anything at all (a split, a value, a yes or no, a question)."""

    messages: tuple[str, ...]
    understood: int
    values: tuple[Valued, ...]
    claims: tuple[Claimed, ...]

    @classmethod
    def of(cls, views: Sequence[Reading]) -> Reading:
        """Of one game, of which each of these measured one player."""
        return cls(
            sum((view.messages for view in views), ()), sum(view.understood for view in views),
            sum((view.values for view in views), ()), sum((view.claims for view in views), ()),
        )  # fmt: skip


def read_talk(talk: Talk) -> Reading:
    """Reads a game from its first line to its last."""
    counts = talk.counts
    stated: list[tuple[Triple, bool] | None] = [None, None]  # each player's own last split, from its side
    table: tuple[Triple, bool] | None = None  # the last split of either, from seat 0's side
    messages: list[str] = []
    values: list[Valued] = []
    claims: list[Claimed] = []
    understood = 0
    for line in talk.lines:
        seat, measured = line.seat, line.seat in talk.measured
        from_here = None if table is None else _side(table[0], seat, counts)
        if line.claim is not None:
            if measured:
                own = stated[seat]
                claims.append(
                    Claimed(
                        seat, line.claim, counts, talk.values[seat],
                        own and own[0], bool(own and own[1]), from_here, bool(table and table[1]),
                    )
                )  # fmt: skip
            continue
        heard = understand(line.message, counts, from_here)
        if heard.share is not None:
            stated[seat] = (heard.share, explicit(line.message))
            table = (_side(heard.share, seat, counts), explicit(line.message))
        if not measured:
            continue
        messages.append(line.message)
        told = told_values(line.message)
        understood += bool(heard.share is not None or told or heard.accepts or heard.rejects or heard.asks)
        possible = value_vectors(counts)
        for item, value in told.items():
            chance = sum(vector[item] == value for vector in possible) / len(possible)
            values.append(Valued(seat, item, value, talk.values[seat][item] == value, chance))
    return Reading(tuple(messages), understood, tuple(values), tuple(claims))


def _side(share: Triple, seat: int, counts: Triple) -> Triple:
    """Seat 0's share as the seat's own, and the other way round."""
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


def told_values(message: str) -> dict[int, int]:
    """What a message says that each item is worth to its speaker: one of it, in points, by item.

    A clause that speaks of "you" or of an "if", or that asks, says nothing of it, nor does one about several items
    together.
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
    """Whether a message speaks of all three items, or of some and the rest, and refuses none of them."""
    words = set(re.findall(r"[a-z][a-z']*", message.lower().replace("’", "'")))
    items = {ITEM_OF[word] for word in words if word in ITEM_OF}
    return not words & NEGATIONS and (len(items) == 3 or bool(words & REST_WORDS))


def inverted_figures(games: Sequence[Episode], players: Iterable[str]) -> dict[str, float]:
    """For monitoring, as `talk_drift` has them (drift.py), without intervals: the share of inverted proposals among
    those that could show one, the same where the split was named in full, and what uniform claims would give.

    A figure that nothing was observed for is absent.
    """
    wanted = set(players)
    telling = [c for game in games for c in read_talk(talk_of(game, wanted)).claims if c.telling]
    named = {
        "talk/inverted": [float(c.inverted) for c in telling],
        "talk/inverted_explicit": [float(c.inverted) for c in telling if c.table_explicit],
        "talk/inverted_chance": [c.chance for c in telling],
    }
    return {name: sum(found) / len(found) for name, found in named.items() if found}
