"""The meaning of a reply: a message, a proposal, or why it is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from envs.core import END
from envs.dond.rules import Triple

MESSAGE, PROPOSE = "[message]", "[propose]"
EXAMPLE = f"{PROPOSE} (1 books, 2 hats, 0 balls) {END}"


class Reason(StrEnum):
    """Reasons to refuse a reply, in the order of the checks: what compact style shows, and the whole correction."""

    correction: str

    def __new__(cls, shown: str, correction: str) -> Reason:
        reason = str.__new__(cls, shown)
        reason._value_, reason.correction = shown, correction
        return reason

    NOT_TEXT = "not text", f"A reply is text. Start it with {MESSAGE} or {PROPOSE} and finish it with {END}."
    NO_TAG = "no tag", f"Start your reply with {MESSAGE} or {PROPOSE}."
    SECOND_TAG = (
        "second tag",
        f"Send one message or one proposal at a time: write {MESSAGE} or {PROPOSE} once, at the start.",
    )
    MESSAGE_AFTER_PROPOSAL = (
        "proposal pending",
        f"Your partner has made a proposal, so you can only propose: start with {PROPOSE}.",
    )
    PROPOSAL_FIRST = "no message yet", f"Talk before you propose: the first turn of the game must be a {MESSAGE}."
    EMPTY_MESSAGE = "empty", f"Your message says nothing. Write some text after {MESSAGE}."
    ITEMS = "items", f"Name all three items in the order books, hats, balls, like this: {EXAMPLE}"
    COUNTS = "three counts", f"Give exactly three counts as digits, one for each item, like this: {EXAMPLE}"
    FORM = "form", f"Write whole numbers and nothing else around them, like this: {EXAMPLE}"
    TOO_MANY = "too many", "You claim more than the pool holds, which is {0} books, {1} hats and {2} balls."


@dataclass(frozen=True)
class Message:
    """A message; `reply[span[0]:span[1]] == text` in the reply that it was read from."""

    text: str
    span: tuple[int, int]


@dataclass(frozen=True)
class Proposal:
    """The items that the proposer claims."""

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
    """Reads a reply. Whatever isn't refused here is said and scored as it is.

    The reply ends at the first `[END]`; of a proposal only the first line counts. The checks are those of Liao's
    environment, in its order (see `Reason`). In addition a message must have words, and a proposal must be nothing but
    three counts, each before its item: anything else could be misread. Parentheses and commas may be missing.
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


KINDS = ("message", "proposal")  # of a turn in format=structured


def parse_words(reply: object) -> Message | Refused:
    """Reads the words of a message in format=structured: all that stands before `[END]`. None at all is silence.

    It may begin with `[message]`, as in the free form. Other tags are refused: no message must pass for a proposal.
    """
    if not isinstance(reply, str):
        return Refused(Reason.NOT_TEXT, "A message is plain words.")
    live = reply.partition(END)[0]
    words = live.lstrip().removeprefix(MESSAGE).lstrip()
    if MESSAGE in words or PROPOSE in words:
        return Refused(Reason.SECOND_TAG, f"Write plain words, without {MESSAGE} or {PROPOSE}.")
    text, begin = words.rstrip(), len(live) - len(words) if words else 0
    return Message(text, (begin, begin + len(text)))


def parse_choice(reply: object, options: Sequence[str]) -> str | Refused:
    """Reads a choice in format=structured: one of the options, word for word."""
    if isinstance(reply, str) and reply in options:
        return reply
    return Refused(Reason.FORM, f"Reply with one of these words: {', '.join(options)}.")


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
    return Refused(reason, reason.correction.format(*counts))


def proposal_text(claim: Triple) -> str:
    """The reply that claims this, without the end marker."""
    return f"{PROPOSE} ({claim[0]} books, {claim[1]} hats, {claim[2]} balls)"
