"""Deal or No Deal: two players talk about how to share books, hats and balls, then each makes a private proposal.

The rules come first and are pure: contexts, allocations, who wins what, what a listener can know before any talk, and
how a reply is read. The PettingZoo environment stands at the end. The game is that of Lewis et al. 2017 ("Deal or No
Deal? End-to-End Learning for Negotiation Dialogues"); reply syntax and family of objectives are those of Liao, Tomlin &
Klein 2024 ("Efficacy of Language Model Self-Play in Non-Zero-Sum Games"). No data file is needed: all contexts that
the rules allow are enumerated here. Left out: players, models, the human dialogues.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from itertools import product
from operator import index
from pathlib import Path
from typing import Any
from zlib import crc32

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from pettingzoo import ParallelEnv

from envs.core import (
    END,
    Question,
    Style,
    TurnKind,
    action_space,
    aec,
    check_file,
    clean,
    observation_space,
    read_seed,
    read_styles,
)

ITEMS = ("books", "hats", "balls")
MIN_COUNT, MAX_COUNT = 1, 4  # of one item
MIN_POOL, MAX_POOL = 5, 7  # items in all
FILES = ("contexts",)  # settings that name files
MAX_POINTS = 10  # the whole pool is worth exactly this to each player

Triple = tuple[int, int, int]  # one number per item, in the order of ITEMS


# --- Contexts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Context:
    """What is shared out: how many of each item there are, and what one of each is worth to each player, in seat order.

    Making one that breaks a rule of the game raises a ValueError that says which.
    """

    counts: Triple
    values: tuple[Triple, Triple]

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises ValueError, naming the rule, unless all rules of Lewis et al. 2017 hold."""
        counts, values = self.counts, self.values
        if not _is_triple(counts):
            raise ValueError(f"counts must be three whole numbers (books, hats, balls), got {counts!r}.")
        if not (isinstance(values, tuple) and len(values) == 2 and all(_is_triple(v) for v in values)):
            raise ValueError(f"values must be three whole numbers for each of the two players, got {values!r}.")
        if not all(MIN_COUNT <= n <= MAX_COUNT for n in counts):
            raise ValueError(f"Each count must be {MIN_COUNT} to {MAX_COUNT}, got counts {counts}.")
        if not MIN_POOL <= sum(counts) <= MAX_POOL:
            raise ValueError(f"The pool must hold {MIN_POOL} to {MAX_POOL} items, got counts {counts}.")
        for player, own in enumerate(values):
            if min(own) < 0 or points(counts, own) != MAX_POINTS:
                raise ValueError(
                    f"Values must be 0 or more and make the whole pool worth {MAX_POINTS} points to each player, "
                    f"got values {own} for player_{player} with counts {counts}."
                )
        if not all(a or b for a, b in zip(*values, strict=True)):
            raise ValueError(f"Every item must be worth something to at least one player, got values {values}.")
        if not any(a and b for a, b in zip(*values, strict=True)):
            raise ValueError(
                f"Some item must be worth something to both players, or both could reach {MAX_POINTS} points, "
                f"got values {values}."
            )


def _is_triple(x: object) -> bool:
    return isinstance(x, tuple) and len(x) == 3 and all(isinstance(n, int) for n in x)


@cache
def value_vectors(counts: Triple) -> tuple[Triple, ...]:
    """All value vectors that make the pool worth exactly 10 points: 9 to 26 of them, depending on the counts."""
    values = range(MAX_POINTS + 1)
    return tuple(v for v in product(values, values, values) if points(counts, v) == MAX_POINTS)


@cache
def partner_values(counts: Triple, own_values: Triple) -> tuple[Triple, ...]:
    """The partner's possible values given the counts and one's own values: those that make a valid context.

    Raises ValueError when the pool isn't worth 10 points under `own_values`.
    """
    if points(counts, own_values) != MAX_POINTS:
        raise ValueError(f"With counts {counts}, values {own_values} don't make the pool worth {MAX_POINTS} points.")
    return tuple(
        other
        for other in value_vectors(counts)
        if all(a or b for a, b in zip(own_values, other, strict=True))
        and any(a and b for a, b in zip(own_values, other, strict=True))
    )


@cache
def contexts() -> tuple[Context, ...]:
    """All 5,295 valid contexts, as ordered pairs of players (2,706 when the players' order is ignored)."""
    sizes = range(MIN_COUNT, MAX_COUNT + 1)
    pools = [counts for counts in product(sizes, sizes, sizes) if MIN_POOL <= sum(counts) <= MAX_POOL]
    return tuple(
        Context(counts, (own, other))
        for counts in pools
        for own in value_vectors(counts)
        for other in partner_values(counts, own)
    )


class ContextSplit(StrEnum):
    """Which contexts a game is drawn from, so that agents can be tested where they never trained."""

    ALL = "all"
    TRAIN = "train"
    TEST = "test"
    OUTSIDE = "outside"  # valid, and not in the file of contexts in either order of the players


def in_test(context: Context) -> bool:
    """Whether a context is held out: about a fifth are, the same ones in every file, in either order of the players."""
    return crc32(repr((context.counts, tuple(sorted(context.values)))).encode()) % 5 == 0


def read_contexts(path: str | Path) -> tuple[Context, ...]:
    """Reads the published `selfplay.txt`: two lines a game, one for each player, `count value` for each item.

    Raises ValueError with file name, line number and what was expected there; FileNotFoundError where there is no file.
    """
    check_file(path)
    lines = Path(path).read_text(encoding="utf-8", errors="replace").rstrip().split("\n")
    rows: list[tuple[Triple, Triple]] = []
    for number, line in enumerate(lines, start=1):
        fields = line.split()
        if len(fields) != 6 or not all(re.fullmatch("[0-9]{1,3}", field) for field in fields):
            raise ValueError(
                f"{path}, line {number}: expected six whole numbers, a count and a value for books, hats and balls, "
                f"got {line!r}."
            )
        c0, v0, c1, v1, c2, v2 = map(int, fields)
        rows.append(((c0, c1, c2), (v0, v1, v2)))
    if len(rows) % 2:
        raise ValueError(f"{path}, line {len(rows)}: expected one more line, the second player of the last game.")
    games = []
    for number in range(0, len(rows), 2):
        (counts, values), (partner_counts, other) = rows[number], rows[number + 1]
        if counts != partner_counts:
            raise ValueError(
                f"{path}, line {number + 2}: expected the counts of the line before, {counts}, got {partner_counts}."
            )
        try:
            games.append(Context(counts, (values, other)))
        except ValueError as error:
            raise ValueError(f"{path}, line {number + 2}: expected a valid context. {error}") from error
    return tuple(games)


# --- Outcomes ---------------------------------------------------------------------------------------------------------


@cache
def allocations(counts: Triple) -> tuple[Triple, ...]:
    """All claims that one player can make, 0 to n of each item: 16 to 36. The partner's share is what is left."""
    books, hats, balls = counts
    return tuple(product(range(books + 1), range(hats + 1), range(balls + 1)))


def points(claim: Triple, values: Triple) -> int:
    """What the claimed items are worth under these values."""
    return claim[0] * values[0] + claim[1] * values[1] + claim[2] * values[2]


def rest(claim: Triple, counts: Triple) -> Triple:
    """What a claim leaves to the partner."""
    return counts[0] - claim[0], counts[1] - claim[1], counts[2] - claim[2]


def deal_points(context: Context, claim: Triple) -> tuple[int, int]:
    """Both players' points when player_0 takes `claim` and player_1 the rest."""
    return points(claim, context.values[0]), points(rest(claim, context.counts), context.values[1])


def complementary(claims: tuple[Triple | None, Triple | None], counts: Triple) -> bool:
    """Whether both players made a claim and the claims add up to the counts, item by item: a deal."""
    return claims[0] is not None and claims[1] == rest(claims[0], counts)


def claim_points(context: Context, claims: tuple[Triple | None, Triple | None]) -> tuple[int, int]:
    """Both players' points: what they claimed if that makes a deal, else 0 each."""
    if claims[0] is None or not complementary(claims, context.counts):
        return 0, 0
    return deal_points(context, claims[0])


def scores(both: tuple[float, float], objective: float) -> tuple[float, float]:
    """`R_i + objective * R_j` for both players: 0 semi-competitive, 1 cooperative, -1 strictly competitive (Liao)."""
    return both[0] + objective * both[1], both[1] + objective * both[0]


def _undominated(context: Context, reached: tuple[float, float], objective: float) -> bool:
    """Whether no allocation is at least as good for both players and better for one, by their scores."""
    slack = 1e-9  # scores that are equal on paper may differ in the last bit when the objective isn't an integer
    u0, u1 = scores(reached, objective)
    for claim in allocations(context.counts):
        w0, w1 = scores(deal_points(context, claim), objective)
        if w0 >= u0 - slack and w1 >= u1 - slack and (w0 > u0 + slack or w1 > u1 + slack):
            return False
    return True


def pareto_optimal(context: Context, claims: tuple[Triple | None, Triple | None], objective: float) -> bool:
    """Whether no allocation weakly dominates what these claims lead to, under the objective.

    Without a deal that is the outcome (0, 0), measured like any other: dominated wherever both can gain, and
    Pareto-optimal when the objective is -1, as every outcome then is.
    """
    return _undominated(context, claim_points(context, claims), objective)


def pareto_allocations(context: Context, objective: float) -> tuple[Triple, ...]:
    """Player_0's claims of all deals that are Pareto-optimal under the objective; player_1 takes the rest."""
    return tuple(
        claim for claim in allocations(context.counts) if _undominated(context, deal_points(context, claim), objective)
    )


def best_joint(context: Context) -> int:
    """The most points that the two can reach together: every item goes to whoever values it more."""
    return sum(n * max(a, b) for n, a, b in zip(context.counts, *context.values, strict=True))


def best_score(context: Context, objective: float) -> float:
    """The best mean over the two players of `R_i + objective * R_j` that any deal reaches: the self-play ceiling."""
    return (1 + objective) * best_joint(context) / 2


@cache
def prior(counts: Triple, own_values: Triple) -> np.ndarray:
    """What a player knows of the partner's values before any talk: `probs[item, value]`, shape (3, 11), read-only.

    Exact when contexts are drawn uniformly from `contexts()`: the marginals of the uniform distribution over
    `partner_values(counts, own_values)`. A listener that heard nothing can't do better, and none should do worse.
    """
    candidates = partner_values(counts, own_values)
    probs = np.zeros((3, MAX_POINTS + 1))
    for values in candidates:
        probs[(0, 1, 2), values] += 1 / len(candidates)
    probs.flags.writeable = False  # shared by all callers
    return probs


# --- Replies ----------------------------------------------------------------------------------------------------------

MESSAGE, PROPOSE = "[message]", "[propose]"


class Reason(StrEnum):
    """Why a reply is refused, in the order of the checks. The value is the correction that compact style shows."""

    NOT_TEXT = "not text"
    NO_TAG = "no tag"
    SECOND_TAG = "second tag"
    MESSAGE_AFTER_PROPOSAL = "proposal pending"
    PROPOSAL_FIRST = "no message yet"
    EMPTY_MESSAGE = "empty"
    ITEMS = "items"
    COUNTS = "three counts"
    FORM = "form"
    TOO_MANY = "too many"


_FORM = f"{PROPOSE} (1 books, 2 hats, 0 balls) {END}"
_CORRECTIONS = {
    Reason.NOT_TEXT: f"A reply is text. Start it with {MESSAGE} or {PROPOSE} and finish it with {END}.",
    Reason.NO_TAG: f"Start your reply with {MESSAGE} or {PROPOSE}.",
    Reason.SECOND_TAG: f"Send one message or one proposal at a time: write {MESSAGE} or {PROPOSE} once, at the start.",
    Reason.MESSAGE_AFTER_PROPOSAL: f"Your partner has made a proposal, so you can only propose: start with {PROPOSE}.",
    Reason.PROPOSAL_FIRST: f"Talk before you propose: the first turn of the game must be a {MESSAGE}.",
    Reason.EMPTY_MESSAGE: f"Your message says nothing. Write some text after {MESSAGE}.",
    Reason.ITEMS: f"Name all three items in the order books, hats, balls, like this: {_FORM}",
    Reason.COUNTS: f"Give exactly three counts as digits, one for each item, like this: {_FORM}",
    Reason.FORM: f"Write whole numbers and nothing else around them, like this: {_FORM}",
    Reason.TOO_MANY: "You claim more than the pool holds, which is {0} books, {1} hats and {2} balls.",
}


@dataclass(frozen=True)
class Message:
    """A message; `reply[span[0]:span[1]] == text` in the reply that it was read from."""

    text: str
    span: tuple[int, int]


@dataclass(frozen=True)
class Proposal:
    """What the proposer claims."""

    claim: Triple


@dataclass(frozen=True)
class Refused:
    """A reply that breaks a rule, and the sentence that says how to do better."""

    reason: Reason
    correction: str


_ITEM_WORDS = tuple(re.compile(rf"(?<![a-z]){word}s?(?![a-z])", re.IGNORECASE) for word in ("book", "hat", "ball"))
_COUNT = re.compile("[0-9]+")  # not \d: other scripts' digits aren't counts
_CLAIM = re.compile(
    r"\s*(\()?\s*([0-9]{1,9})\s*books?\s*,?\s*([0-9]{1,9})\s*hats?\s*,?\s*([0-9]{1,9})\s*balls?\s*(?(1)\))\s*\.?\s*",
    re.IGNORECASE,
)


def parse_reply(
    reply: object, counts: Triple, proposal_pending: bool, messages_sent: int
) -> Message | Proposal | Refused:
    """Reads a reply, once and for all: what isn't refused here is what gets said and scored.

    The reply ends at the first `[END]`; of a proposal only the first line counts. The checks are those of Liao's
    environment, in its order (see `Reason`). Beyond them a message must say something, and a proposal must be nothing
    but three counts, each before its item (parentheses and commas may be missing, an item may be in the singular):
    negative numbers, fractions, number words and sentences around the numbers are refused, as they could be misread.
    """
    if not isinstance(reply, str):
        return _refused(Reason.NOT_TEXT, counts)
    live = reply.partition(END)[0]
    start = len(live) - len(live.lstrip())
    if live.startswith(PROPOSE, start):
        return _parse_proposal(live[start + len(PROPOSE) :], counts, messages_sent)
    if not live.startswith(MESSAGE, start):
        return _refused(Reason.NO_TAG, counts)

    body = live[start + len(MESSAGE) :]
    if MESSAGE in body or PROPOSE in body:
        return _refused(Reason.SECOND_TAG, counts)
    if proposal_pending:
        return _refused(Reason.MESSAGE_AFTER_PROPOSAL, counts)
    text = body.strip()
    if not text:
        return _refused(Reason.EMPTY_MESSAGE, counts)
    begin = start + len(MESSAGE) + len(body) - len(body.lstrip())
    return Message(text, (begin, begin + len(text)))


def _parse_proposal(body: str, counts: Triple, messages_sent: int) -> Proposal | Refused:
    line = (body.splitlines() or [""])[0]
    if MESSAGE in line or PROPOSE in line:
        return _refused(Reason.SECOND_TAG, counts)
    if messages_sent == 0:
        return _refused(Reason.PROPOSAL_FIRST, counts)
    found = [word.search(line) for word in _ITEM_WORDS]
    places = [match.start() for match in found if match]
    if len(places) < 3 or places != sorted(places):
        return _refused(Reason.ITEMS, counts)
    if len(_COUNT.findall(line)) != 3:
        return _refused(Reason.COUNTS, counts)
    match = _CLAIM.fullmatch(line)
    if not match:
        return _refused(Reason.FORM, counts)
    claim = (int(match[2]), int(match[3]), int(match[4]))
    if any(n > held for n, held in zip(claim, counts, strict=True)):
        return _refused(Reason.TOO_MANY, counts)
    return Proposal(claim)


def _refused(reason: Reason, counts: Triple) -> Refused:
    return Refused(reason, _CORRECTIONS[reason].format(*counts))


def proposal_text(claim: Triple) -> str:
    """The reply that claims this, without the end marker."""
    return f"{PROPOSE} ({claim[0]} books, {claim[1]} hats, {claim[2]} balls)"


# --- What players read ------------------------------------------------------------------------------------------------


_OPENING = "You are negotiating with a partner over a shared pool of books, hats and balls."
_NATURAL_PROMPT = """{opening}
Pool: {n[0]} books, {n[1]} hats, {n[2]} balls.
Your values: {v[0]} per book, {v[1]} per hat, {v[2]} per ball.
Your score: (your points) + ({objective:g}) x (your partner's points).
The whole pool is worth exactly 10 points to each of you, but you may value the items differently.
Neither of you sees the other's values.

{goal}

Rules:
- You take turns. A turn is one message or one private proposal. Begin it with its tag and finish it with {end}.
- To talk, reply: {message} your text {end}
- To propose, reply: {form}
  The numbers are what you claim for yourself, as digits, always in the order books, hats, balls.
  Your partner should claim what you leave.
- The first turn of the game must be a message.
- A proposal closes the talk. The other player is told that it was made, but not what it says,
  and must answer with a proposal.
- If the two claims add up to exactly the pool, it is a deal: each of you gets the points of the items claimed.
  Otherwise both of you get 0 points.
- After {max_entries} messages and proposals the game ends without a deal, with 0 points for both.
- A reply that breaks these rules comes back to you with a correction, and you try again.
  After {max_errors} such replies in a row the game ends without a deal, with 0 points for both.
"""
_SEMI = (
    "Your goal: win as many points for yourself as you can. Your partner's points are of no use to you. "
    "Ask for what you want and push back on offers that are bad for you, but remember that no deal gives you nothing."
)
_COOP = (
    "Your goal: make the sum of both players' points as large as you can. You are a team: find out what each of you "
    "values, and let every item go to whoever gets more out of it."
)
_COMPETITIVE = (
    "Your goal: make your lead as large as you can, that is, your points minus your partner's points. "
    "A deal that gives your partner more than you is worse for you than no deal."
)
_MIXED = (
    "Your goal: make your score, as given above, as large as you can. Each point of your partner counts {objective:g} "
    "times as much for you as a point of your own."
)
_GOALS = {0.0: _SEMI, 1.0: _COOP, -1.0: _COMPETITIVE}


@dataclass(frozen=True)
class Wording:
    """The lines of a style, one for each thing that can be read after the prompt."""

    message: str  # what the partner said
    proposed: str  # the partner made a proposal
    error: str  # the correction of a refused reply
    cut: str  # characters that were left of one's own message
    deal: str  # own points, the partner's points
    no_deal: str


_WORDING = {
    Style.NATURAL: Wording(
        message="Partner: {}",
        proposed=f"Notice: Your partner has made a proposal. Answer with one of your own, starting with {PROPOSE}.",
        error="Error: {}",
        cut="Note: Your message was cut to its first {} characters.",
        deal="The game is over: a deal. You get {} points, your partner gets {}.",
        no_deal="The game is over: no deal. Both of you get 0 points.",
    ),
    Style.COMPACT: Wording(
        message="them: {}",
        proposed=f"them: {PROPOSE}",  # no message can read like this: tags within messages are refused
        error="error: {}",
        cut="note: cut {}",
        deal="deal {} {}",
        no_deal="no deal",
    ),
}

_NATURAL_QUESTIONS = tuple(f"How many points is one {item} worth to your partner?" for item in ("book", "hat", "ball"))
_COMPACT_QUESTIONS = tuple(f"<{item}?>" for item in ITEMS)
_CANDIDATES = tuple(str(value) for value in range(MAX_POINTS + 1))
_QUESTIONS = {  # [style][item][the partner's value]
    style: tuple(tuple(Question(text, _CANDIDATES, answer) for answer in _CANDIDATES) for text in texts)
    for style, texts in ((Style.NATURAL, _NATURAL_QUESTIONS), (Style.COMPACT, _COMPACT_QUESTIONS))
}

# Strings of compact style that a tokenizer made for this game should keep whole; numbers are its own business.
COMPACT_TOKENS = (
    MESSAGE,
    PROPOSE,
    END,
    *_COMPACT_QUESTIONS,
    *ITEMS,
    "objective",
    "them:",
    "error:",
    "note:",
    "cut",
    "no deal",
    "deal",
    *(reason.value for reason in Reason),
)


def prompt(
    counts: Triple, own_values: Triple, objective: float, style: Style, max_entries: int = 20, max_errors: int = 5
) -> str:
    """What a player reads at the start: rules (natural style only), pool, own values, objective."""
    if style is Style.COMPACT:
        shown = " ".join(f"{item} {n} {v}" for item, n, v in zip(ITEMS, counts, own_values, strict=True))
        return f"{shown} objective {objective:g}\n"
    goal = _GOALS.get(objective, _MIXED).format(objective=objective)
    return _NATURAL_PROMPT.format(
        opening=_OPENING, n=counts, v=own_values, objective=objective, goal=goal, message=MESSAGE, end=END, form=_FORM,
        max_entries=max_entries, max_errors=max_errors,
    )  # fmt: skip


_COMPACT_PROMPT_READ = re.compile(r"books (\d+) (\d+) hats (\d+) (\d+) balls (\d+) (\d+) objective (\S+)\n")
_NATURAL_PROMPT_READ = re.compile(
    re.escape(_OPENING) + r"\nPool: (\d+) books, (\d+) hats, (\d+) balls\.\n"
    r"Your values: (\d+) per book, (\d+) per hat, (\d+) per ball\.\n"
    r"Your score: \(your points\) \+ \((\S+)\) x \(your partner's points\)\.\n"
)


def parse_prompt(text: str) -> tuple[Triple, Triple, float]:
    """Counts, own values and objective (to six digits) from a first observation of either style, whatever follows."""
    if match := _COMPACT_PROMPT_READ.match(text):
        c0, v0, c1, v1, c2, v2 = (int(n) for n in match.groups()[:6])
    elif match := _NATURAL_PROMPT_READ.match(text):
        c0, c1, c2, v0, v1, v2 = (int(n) for n in match.groups()[:6])
    else:
        raise ValueError(f"Expected the first observation of a game, got {text[:80]!r}.")
    return (c0, c1, c2), (v0, v1, v2), float(match[7])


def prompt_with(text: str, values: Triple) -> str:
    """A first observation of either style as it reads with other values of one's own; the rest is as it was."""
    counts, own, objective = parse_prompt(text)
    for style in Style:
        lines = [prompt(counts, v, objective, style).split("\n") for v in (own, values)]
        for old, new in zip(*lines, strict=True):
            if old != new:
                text = text.replace(f"{old}\n", f"{new}\n", 1)
    return text


_ONE_LINE = {ord(c): " " for c in map(chr, range(0x3001)) if c.isspace()}  # all white space there is, one for one


def passed_on(text: str, max_chars: int) -> str:
    """A message as the partner gets it: on one line, in the characters of the text spaces, cut at `max_chars`."""
    return clean(text.translate(_ONE_LINE), max_chars)


def heard_text(text: str | None, style: Style) -> str:
    """What a player reads of its partner's message, or (None) of its partner's proposal."""
    words = _WORDING[style]
    return f"{words.proposed if text is None else words.message.format(text)}\n"


def parse_heard(text: str) -> list[tuple[str, str]]:
    """What an observation of either style reports, in order: ("message", text), ("proposal", ""), ("error", text), or
    ("cut", how many characters are left of one's own message).

    Prompts and the result of the game are passed over. A message is always a single line, so that what a partner
    says can't pass for anything else.
    """
    heard = []
    for line in text.split("\n"):
        for words in _WORDING.values():
            if line == words.proposed:
                heard.append(("proposal", ""))
            elif line.startswith(words.message.format("")):
                heard.append(("message", line.removeprefix(words.message.format(""))))
            elif line.startswith(words.error.format("")):
                heard.append(("error", line.removeprefix(words.error.format(""))))
            elif line.startswith(words.cut.partition("{}")[0]):
                before, _, after = words.cut.partition("{}")
                heard.append(("cut", line.removeprefix(before).removesuffix(after)))
    return heard


# --- The environment --------------------------------------------------------------------------------------------------

AGENTS = ("player_0", "player_1")
_MAX_TEXT = 3_000  # characters of an observation besides a message; the natural prompt is the longest
_MAX_TAGS = 20  # characters that tag and end marker add to a message


class Ending(StrEnum):
    """How a game ended. Only a deal gives points."""

    DEAL = "deal"
    MISMATCH = "mismatch"  # the two claims don't add up to the pool
    ABORT = "abort"  # too many refused replies in a row
    LIMIT = "limit"  # too many messages and proposals


@dataclass(frozen=True)
class Entry:
    """A line of the transcript: who, what (message, propose, error), and the text heard, claim or correction."""

    agent: str
    kind: str
    text: str


class DealOrNoDeal(ParallelEnv[str, dict[str, Any], str]):
    """The game as a PettingZoo parallel environment. One player at a time has turn SPEAK, the other has WAIT.

    Settings:
        objective: weight of the partner's points in a player's score, -1 to 1.
        contexts: a file of contexts to draw from, as `read_contexts` reads it; None draws from all valid ones.
        split: "all", "train" or "test" contexts (see `in_test`); "outside": the valid ones that the file has in
            neither order of the players, to choose settings on before its own games are played.
        style: wording of observations, "natural" or "compact"; the reset option `styles` gives agents others.
        max_entries: messages and proposals after which the game ends without a deal.
        max_errors: refused replies in a row after which it ends without a deal.
        max_message_chars: longer messages are cut there, and the speaker is told.
        render_mode: None or "ansi".

    Raises ValueError, naming the setting, for values outside these ranges.

    Every end is one of the rules, the limits too, so that games terminate and are never truncated.

    `reset(options=...)` knows `counts` and `values` (given together, seat order), `first` (seat number) and `styles`
    (by agent).
    `infos[agent]` holds `role`, `questions`, `error`, and of the agent's own last action `entry` ("message", "propose",
    "error" or ""), `message` (what the partner heard of it) and `span` (the characters of the action that this was);
    at the end also `outcome`, the same dict for both.
    """

    metadata = {"name": "dond_v0", "render_modes": ["ansi"], "is_parallelizable": True}  # noqa: RUF012

    def __init__(
        self,
        objective: float = 1.0,
        contexts: str | Path | None = None,
        split: str = "train",
        style: str = "compact",
        max_entries: int = 20,
        max_errors: int = 5,
        max_message_chars: int = 400,
        render_mode: str | None = None,
    ) -> None:
        if isinstance(objective, bool) or not isinstance(objective, int | float) or not -1 <= objective <= 1:
            raise ValueError(f"objective must be a number from -1 to 1, got {objective!r}.")
        if split not in tuple(ContextSplit):
            raise ValueError(f"split must be one of {', '.join(ContextSplit)}, got {split!r}.")
        if style not in tuple(Style):
            raise ValueError(f"style must be one of {', '.join(Style)}, got {style!r}.")
        for name, limit in (
            ("max_entries", max_entries),
            ("max_errors", max_errors),
            ("max_message_chars", max_message_chars),
        ):
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {limit!r}.")
        if render_mode not in (None, "ansi"):
            raise ValueError(f"render_mode must be None or 'ansi', got {render_mode!r}.")
        self.objective = float(objective)
        self.style = Style(style)
        self.max_entries, self.max_errors, self.max_message_chars = max_entries, max_errors, max_message_chars
        self.render_mode = render_mode
        self.possible_agents = list(AGENTS)
        self.agents: list[str] = []
        self.state_space = spaces.Box(-1.0, float(MAX_POINTS), (18,), np.float32)
        if split == ContextSplit.OUTSIDE and contexts is None:
            raise ValueError("split must be all, train or test where contexts is None, got 'outside': of which file?")
        self._pool = pool(contexts, split)
        if not self._pool:
            raise ValueError(f"split leaves no context of {contexts}, got {split!r}.")
        self._np_random: np.random.Generator | None = None
        self._context: Context | None = None

    # Made when asked for: a thousand games at once need no thousand spaces.

    @cached_property
    def observation_spaces(self) -> dict[str, spaces.Dict]:
        return {a: observation_space(_MAX_TEXT + self.max_message_chars, max_options=0) for a in AGENTS}

    @cached_property
    def action_spaces(self) -> dict[str, spaces.Text]:
        return {a: action_space(self.max_message_chars + _MAX_TAGS) for a in AGENTS}

    def observation_space(self, agent: str) -> spaces.Dict:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Text:
        return self.action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
        """Starts a game, drawn on from where the generator stands if no seed is given. ValueError for bad options."""
        styles = read_styles(options or {}, AGENTS, self.style)
        if seed is not None or self._np_random is None:
            self._np_random, _ = seeding.np_random(None if seed is None else read_seed(seed))
        drawn = self._pool[int(self._np_random.integers(len(self._pool)))]
        first = int(self._np_random.integers(2))
        self._context, self._first = _start(options or {}, drawn, first)

        self.agents = list(AGENTS)
        self._styles = tuple(styles.values())  # by seat
        self._mover = self._first
        self._claims: list[Triple | None] = [None, None]
        self._messages = self._proposals = self._errors = self._errors_in_a_row = 0
        self._outcome: dict[str, Any] | None = None
        self.transcript: list[Entry] = []
        texts = [
            prompt(self._context.counts, own, self.objective, style, self.max_entries, self.max_errors)
            for own, style in zip(self._context.values, self._styles, strict=True)
        ]
        return self._observations(texts), {agent: self._info(seat, asked=True) for seat, agent in enumerate(AGENTS)}

    def step(
        self, actions: dict[str, Any]
    ) -> tuple[
        dict[str, dict[str, Any]],
        dict[str, float],
        dict[str, bool],
        dict[str, bool],
        dict[str, dict[str, Any]],
    ]:
        """Plays the mover's reply; any other action is ignored, a missing one counts as an empty reply.

        After the end there is nothing to play, and all five dicts come back empty.
        """
        context = self._started()
        if not self.agents:
            return {}, {}, {}, {}, {}
        mover, partner = self._mover, 1 - self._mover
        pending = self._claims[partner] is not None
        parsed = parse_reply(actions.get(AGENTS[mover], ""), context.counts, pending, self._messages)

        words = [_WORDING[style] for style in self._styles]  # by seat
        new: tuple[list[str], list[str]] = [], []  # the lines that each seat gets to read
        error = message = ""
        span = (0, 0)
        ending: Ending | None = None
        if isinstance(parsed, Refused):
            kind = "error"
            error = parsed.reason.value if self._styles[mover] is Style.COMPACT else parsed.correction
            new[mover].append(words[mover].error.format(error))
            self._log(mover, kind, error)
            self._errors += 1
            self._errors_in_a_row += 1
            if self._errors_in_a_row >= self.max_errors:
                ending = Ending.ABORT
        else:
            if isinstance(parsed, Message):
                kind = "message"
                message = passed_on(parsed.text, self.max_message_chars)
                span = (parsed.span[0], parsed.span[0] + len(message))
                new[partner].append(words[partner].message.format(message))
                if len(message) < len(parsed.text):
                    new[mover].append(words[mover].cut.format(len(message)))
                self._messages += 1
                self._log(mover, kind, message)
            else:
                kind = "propose"
                self._claims[mover] = parsed.claim
                self._proposals += 1
                self._log(mover, kind, proposal_text(parsed.claim))
                if not pending:
                    new[partner].append(words[partner].proposed)
                else:
                    agreed = complementary((self._claims[0], self._claims[1]), context.counts)
                    ending = Ending.DEAL if agreed else Ending.MISMATCH
            self._errors_in_a_row = 0
            self._mover = partner
            if ending is None and self._messages + self._proposals >= self.max_entries:
                ending = Ending.LIMIT

        reward = (0.0, 0.0)
        if ending:
            both = self._end(ending)
            reward = scores(both, self.objective)
            for seat in (0, 1):
                own = words[seat]
                new[seat].append(own.deal.format(both[seat], both[1 - seat]) if ending is Ending.DEAL else own.no_deal)
            self.agents = []
        infos = {agent: self._info(seat, asked=bool(message)) for seat, agent in enumerate(AGENTS)}
        infos[AGENTS[mover]].update(error=error, message=message, span=span, entry=kind)
        return (
            self._observations(["".join(f"{line}\n" for line in lines) for lines in new]),
            dict(zip(AGENTS, reward, strict=True)),
            dict.fromkeys(AGENTS, ending is not None),
            dict.fromkeys(AGENTS, False),
            infos,
        )

    @property
    def facts(self) -> dict[str, Any]:
        """What is hidden from the players, for analysts: counts, values in seat order, first mover, objective."""
        context = self._started()
        return {
            "counts": context.counts,
            "values": context.values,
            "first": self._first,
            "objective": self.objective,
        }

    def privileged(self, agent: str) -> tuple[float, ...]:
        """What only a privileged critic sees at this seat: the partner's values of the items, one-hot, 3 x 11."""
        values = self._started().values[1 - AGENTS.index(agent)]
        return tuple(float(v == value) for value in values for v in range(MAX_POINTS + 1))

    def state(self) -> np.ndarray:
        """The hidden state, shape (18,): counts, both players' values, both claims (-1 where none), first mover, mover,
        objective. Mover is -1 after the end."""
        context = self._started()
        claims = [(-1, -1, -1) if claim is None else claim for claim in self._claims]
        mover = self._mover if self.agents else -1
        return np.array(
            [*context.counts, *context.values[0], *context.values[1], *claims[0], *claims[1],
             self._first, mover, self.objective],
            np.float32,
        )  # fmt: skip

    def render(self) -> str | None:
        """The whole game so far as text, hidden parts included; None (with a warning) without a render mode."""
        if self.render_mode is None:
            gymnasium.logger.warn("render() does nothing unless the environment is made with render_mode='ansi'.")
            return None
        context = self._started()
        lines = [
            "pool       " + ", ".join(f"{n} {item}" for n, item in zip(context.counts, ITEMS, strict=True)),
            *(f"{agent}   values {context.values[seat]}" for seat, agent in enumerate(AGENTS)),
            f"objective  {self.objective:g}",
        ]
        for entry in self.transcript:
            refused = "refused: " if entry.kind == "error" else ""
            lines.append(f"{entry.agent}:  {refused}{entry.text}")
        if self._outcome:
            gained = ", ".join(f"{agent} {n} points" for agent, n in self._outcome["points"].items())
            lines.append(f"outcome    {self._outcome['how']}: {gained}")
        elif any(self._claims):
            lines.append(f"waiting    for the answer of {AGENTS[self._mover]} to the proposal")
        else:
            lines.append(f"waiting    for {AGENTS[self._mover]}")
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        """Nothing to release."""

    def _started(self) -> Context:
        if self._context is None:
            raise RuntimeError("No game has been started: call reset() first.")
        return self._context

    def _log(self, seat: int, kind: str, text: str) -> None:
        self.transcript.append(Entry(AGENTS[seat], kind, text))

    def _observations(self, texts: list[str]) -> dict[str, dict[str, Any]]:
        speaker = AGENTS[self._mover] if self.agents else None
        return {
            agent: {
                "text": text,
                "turn": int(TurnKind.SPEAK if agent == speaker else TurnKind.WAIT),  # a plain int: a member of Discrete
                "options": (),
            }
            for agent, text in zip(AGENTS, texts, strict=True)
        }

    def _info(self, seat: int, asked: bool) -> dict[str, Any]:
        info: dict[str, Any] = {
            "role": "negotiator",
            "questions": (),
            "error": "",
            "message": "",
            "span": (0, 0),
            "entry": "",
        }
        if asked:
            hidden = self._started().values[1 - seat]
            info["questions"] = tuple(_QUESTIONS[self._styles[seat]][item][value] for item, value in enumerate(hidden))
        if self._outcome is not None:
            info["outcome"] = self._outcome
        return info

    def _end(self, ending: Ending) -> tuple[int, int]:
        """Settles the outcome and returns both players' points."""
        context = self._started()
        claims = (self._claims[0], self._claims[1])
        both = claim_points(context, claims)
        self._outcome = {
            "deal": ending is Ending.DEAL,
            "points": dict(zip(AGENTS, both, strict=True)),
            "how": ending.value,
            "claims": claims,
            "counts": context.counts,
            "values": context.values,
            "pareto": _undominated(context, both, self.objective),
            "messages": self._messages,
            "errors": self._errors,
            "first": self._first,
        }
        return both


def pool(path: str | Path | None, split: str) -> tuple[Context, ...]:
    """The contexts that games with these settings are drawn from, in the file's order; errors as `read_contexts`'s."""
    return _split(path, 0 if path is None else Path(path).stat().st_mtime_ns, ContextSplit(split))


@cache  # a batch of games opens the same file many times
def _split(path: str | Path | None, changed: int, split: ContextSplit) -> tuple[Context, ...]:
    every = contexts() if path is None else read_contexts(path)
    if split is ContextSplit.ALL:
        return every
    if split is ContextSplit.OUTSIDE:
        inside = {(context.counts, frozenset(context.values)) for context in every}
        return tuple(context for context in contexts() if (context.counts, frozenset(context.values)) not in inside)
    return tuple(context for context in every if in_test(context) == (split is ContextSplit.TEST))


def _start(options: dict[str, Any], drawn: Context, first: int) -> tuple[Context, int]:
    """The context and first mover to play: what the options give, else what was drawn."""
    if ("counts" in options) != ("values" in options):
        raise ValueError("Give the reset options 'counts' and 'values' together: values only fit their counts.")
    if "counts" in options:
        try:
            counts = _triple(options["counts"])
            own, other = options["values"]
            values = (_triple(own), _triple(other))
        except (TypeError, ValueError) as error:
            raise ValueError(
                "The reset options 'counts' and 'values' must be three whole numbers, and three for each of the two "
                f"players, got {options['counts']!r} and {options['values']!r}."
            ) from error
        drawn = Context(counts, values)
    if "first" in options:
        first = options["first"]
        if first not in (0, 1):
            raise ValueError(f"The reset option 'first' must be the seat that moves first, 0 or 1, got {first!r}.")
    return drawn, int(first)


def _triple(numbers: Any) -> Triple:
    a, b, c = (index(n) for n in numbers)
    return a, b, c


parallel_env = DealOrNoDeal  # the game as a native parallel environment
env = aec(parallel_env)  # the game in PettingZoo's AEC form
