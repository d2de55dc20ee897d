"""Replies of Deal or No Deal: each is read as it is meant, or refused for the first rule that it breaks."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.dond import replies
from envs.dond.replies import Message, Proposal, Reason, Refused


# --- Replies ----------------------------------------------------------------------------------------------------------
def read(reply: object, pending: bool = False, sent: int = 1, counts: Any = (1, 2, 3)) -> Message | Proposal | Refused:
    return replies.parse_reply(reply, counts, pending, sent)


@pytest.mark.parametrize(
    ("reply", "claim"),
    [
        ("[propose] (1 books, 2 hats, 0 balls) [END]", (1, 2, 0)),
        ("  \n[propose](1 books, 2 hats, 3 balls)", (1, 2, 3)),
        ("[propose]   (  0   books ,0 hats,\t3 balls  )  ", (0, 0, 3)),
        ("[propose] (1 book, 1 hat, 1 ball).", (1, 1, 1)),
        ("[propose] (1 Books, 2 HATS, 0 balls)", (1, 2, 0)),
        ("[propose] 1 books 2 hats 0 balls", (1, 2, 0)),
        ("[propose] (01 books, 002 hats, 0 balls)", (1, 2, 0)),
        ("[propose] (1books,2hats,0balls)", (1, 2, 0)),
        ("[propose] (1 books, 2 hats, 0 balls)\nand 5 thanks [message] for all [propose]", (1, 2, 0)),
        ("[propose] (1 books, 2 hats, 0 balls) [END] [message] hello [propose] (0 books, 0 hats, 0 balls)", (1, 2, 0)),
    ],
)
def test_proposals_that_are_understood(reply: str, claim: tuple[int, int, int]) -> None:
    assert read(reply) == Proposal(claim)


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ("[message] hello [END]", "hello"),
        ("\t [message]hello", "hello"),
        ("[message]  two\nlines  [END] [propose] (1 books", "two\nlines"),
        ("[message] I propose [message ] (1 books) [end]", "I propose [message ] (1 books) [end]"),
        ("[message] [Propose] é 😀", "[Propose] é 😀"),
    ],
)
def test_messages_and_where_they_stand(reply: str, text: str) -> None:
    parsed = read(reply)
    assert isinstance(parsed, Message)
    assert parsed.text == text == reply[slice(*parsed.span)]


# Each reply breaks the named rule and, where one can, every later one too: so the order of the checks shows.
@pytest.mark.parametrize(
    ("reply", "pending", "sent", "reason"),
    [
        (None, False, 0, Reason.NOT_TEXT),
        ("", False, 1, Reason.NO_TAG),
        ("hello [message] [propose] (9 hats)", True, 0, Reason.NO_TAG),
        ("[Message] hello", False, 1, Reason.NO_TAG),
        ("[END] [message] hello", False, 1, Reason.NO_TAG),
        ("[message] hello [message] again", True, 0, Reason.SECOND_TAG),
        ("[message] [propose] (1 books, 2 hats, 0 balls)", True, 1, Reason.SECOND_TAG),
        ("[propose] (9 hats) [message] hello", False, 0, Reason.SECOND_TAG),
        ("[propose] [propose] (1 books, 2 hats, 0 balls)", False, 1, Reason.SECOND_TAG),
        ("[message] hello", True, 1, Reason.MESSAGE_AFTER_PROPOSAL),
        ("[message] [END]", True, 1, Reason.MESSAGE_AFTER_PROPOSAL),
        ("[message] [END]", False, 0, Reason.EMPTY_MESSAGE),
        ("[propose] (9 hats, 9 books)", False, 0, Reason.PROPOSAL_FIRST),
        ("[propose] (1 books, 2 hats, 0 balls)", False, 0, Reason.PROPOSAL_FIRST),
        ("[propose]", False, 1, Reason.ITEMS),
        ("[propose] (1 books, 2 hats) [END]", False, 1, Reason.ITEMS),
        ("[propose] (9 hats, 9 books, 9 balls)", False, 1, Reason.ITEMS),
        ("[propose] (1, 2, 0)", False, 1, Reason.ITEMS),
        ("[propose] (9 books, 9 hats, balls)", False, 1, Reason.COUNTS),
        ("[propose] (9 books, 9 hats, 9 balls, 9)", False, 1, Reason.COUNTS),
        ("[propose] (one books, two hats, no balls)", False, 1, Reason.COUNTS),
        ("[propose] (1/2 books, 2 hats, 0 balls)", False, 1, Reason.COUNTS),
        ("[propose] (١ books, 2 hats, 0 balls)", False, 1, Reason.COUNTS),  # another script's digit one
        ("[propose] (-1 books, 2 hats, 0 balls)", False, 1, Reason.FORM),
        ("[propose] (−1 books, 2 hats, 0 balls)", False, 1, Reason.FORM),
        ("[propose] all but (1 books, 2 hats, 0 balls)", False, 1, Reason.FORM),
        ("[propose] (1 books, 2 hats, 0 balls) for you", False, 1, Reason.FORM),
        ("[propose] (1 books, 2 hats, 0 balls", False, 1, Reason.FORM),
        ("[propose] (books 1, hats 2, balls 0)", False, 1, Reason.FORM),
        ("[propose] (2 books, 2 hats, 0 balls)", False, 1, Reason.TOO_MANY),
        ("[propose] (1 books, 2 hats, 999999999 balls)", True, 1, Reason.TOO_MANY),
        (f"[propose] (1 books, 2 hats, {'9' * 5000} balls)", False, 1, Reason.FORM),  # int() would refuse that long
    ],
)
def test_replies_that_are_refused(reply: object, pending: bool, sent: int, reason: Reason) -> None:
    parsed = read(reply, pending, sent)
    assert isinstance(parsed, Refused)
    assert parsed.reason is reason
    assert parsed.correction.endswith((".", "[END]")) and "{" not in parsed.correction


@given(claim=st.tuples(*[st.integers(0, 9)] * 3), counts=st.tuples(*[st.integers(1, 4)] * 3))
def test_a_written_claim_is_read_back_or_refused_as_too_many(claim: Any, counts: Any) -> None:
    parsed = read(replies.proposal_text(claim) + " [END]", counts=counts)
    fits = all(n <= m for n, m in zip(claim, counts, strict=True))
    assert parsed == Proposal(claim) if fits else isinstance(parsed, Refused) and parsed.reason is Reason.TOO_MANY


@given(
    st.text("[]()messagpropseEND 0123bookhatl,.-½\n", max_size=60) | st.text(),
    st.sampled_from(["", "[message]", "[propose]", "[propose] (1 books, "]),
    st.booleans(),
    st.integers(0, 2),
)
def test_any_text_is_read_or_refused(tail: str, head: str, pending: bool, sent: int) -> None:
    reply = head + tail
    match read(reply, pending, sent):
        case Message(text, span):
            assert text and text == text.strip() == reply[slice(*span)] and not pending
            assert not any(tag in text for tag in ("[message]", "[propose]", "[END]"))
        case Proposal(claim):
            assert sent and all(0 <= n <= m for n, m in zip(claim, (1, 2, 3), strict=True))
        case Refused(reason, correction):
            assert isinstance(reason, Reason) and correction
