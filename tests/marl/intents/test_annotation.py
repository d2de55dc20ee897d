"""Truthful dialogues, splits that leave no doubt, dialogues cut at a message, and what each model reads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from envs import dond_v0
from envs.core import Style
from envs.dond.rules import Triple, allocations
from envs.dond.texts import prompt
from envs.human_dond import HumanEnding, HumanView, replay
from marl.intents.annotate import annotate, certain_split, cut_after, named_items, swapped
from marl.intents.claims import ClaimReader
from marl.intents.streams import ARMS, Intent, grounded, intent_text, opening_of, up_to_claim
from marl.intents.training import cuts, in_action_model
from marl.intents.truthful import promised, unfaithful
from marl.learning.batch import collate
from marl.metrics.negotiation import human_talk
from marl.planning.planner import Reader
from marl.pretraining.corpus import human_row
from marl.types import Kind
from tests.marl.models import tiny_policy

COUNTS: Triple = (1, 1, 3)
ENV = dond_v0.parallel_env(style=Style.COMPACT, objective=0.0)


def view(*turns: str, claim: Triple = (0, 0, 3), first: str = "YOU") -> HumanView:
    """A dialogue of these messages by turns; who would speak next ends the talk. THEM claims the rest."""
    speakers = ["YOU", "THEM"] if first == "YOU" else ["THEM", "YOU"]
    script = tuple((speakers[i % 2], text) for i, text in enumerate((*turns, None)))
    rest = (COUNTS[0] - claim[0], COUNTS[1] - claim[1], COUNTS[2] - claim[2])
    return HumanView(0, COUNTS, (0, 1, 3), (1, 3, 2), script, claim, rest, HumanEnding.DEAL)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("turns", "word"),
    [
        (("i want the balls , you get the rest", "deal"), (0, 0, 3)),  # stated
        (("i want the balls , you get the rest", "no , i need one ball"), (0, 0, 3)),  # the other's is no promise
        (("hi", "i get the book and the hat , you get the balls", "deal"), (0, 0, 3)),  # accepted
        (("i want everything", "i get the book , you get the rest", "ok"), (0, 1, 3)),  # the last of both
        (("hi", "i get the book , you get the rest", "no way"), None),  # refused
        (("hi", "hello"), None),
        (("deal", "hi"), None),  # nothing to accept
    ],
)
def test_a_promise_is_the_last_split_stated_or_accepted(turns: tuple[str, ...], word: Triple | None) -> None:
    assert promised(human_talk(view(*turns)), 0) == word


def test_truthful_views_claim_what_was_promised() -> None:
    kept = view("i want the balls , you get the rest", "deal")
    assert unfaithful(kept) == ""
    assert unfaithful(replace(kept, claim=(1, 0, 3))) == "other claim"
    assert unfaithful(view("hi", "hello")) == "no split"


@pytest.mark.parametrize(
    ("message", "share"),
    [
        ("i'll take the book , you can have the rest", (1, 0, 0)),
        ("you get the book and hat , i get the balls", (0, 0, 3)),
        ("i need the book , 1 hat and 2 balls", (1, 1, 2)),
        ("i'll take the rest", None),  # of what?
        ("i want the balls", None),  # may want more
        ("can i have the book , and you the rest ?", None),  # asked
        ("if i get the book you get the rest", None),  # a condition
        ("i don't want the book , you can have the rest", None),  # a refusal
        ("let's split the balls , i get the book and hat", None),
        ("i can give you the book and 1 ball for the hat", None),  # a trade
        ("take the book and 2 balls in exchange for your hat", None),
        ("take the book and 2 balls for your hat", None),
        ("the hat for me , the rest for you", (0, 1, 0)),
        ("deal", None),
    ],
)
def test_only_whole_splits_without_doubt_are_read(message: str, share: Triple | None) -> None:
    assert certain_split(message, COUNTS) == share


def test_an_injected_end_replaces_all_that_came_later() -> None:
    policy = tiny_policy()
    talk = view("i want the balls", "no , a secret", "then two of them", "fine")
    cut, other = cut_after(talk, 0), cut_after(swapped(talk), 0)
    assert cut.turns == (("YOU", "i want the balls"), ("THEM", "deal"), ("YOU", None))
    assert other.turns == (("THEM", "i want the balls"), ("YOU", "deal"), ("THEM", "deal"), ("YOU", None))
    own, theirs = (policy.tokens.decode(up_to_claim(replay(side, ENV), policy.tokens)) for side in (cut, other))
    assert "secret" not in own + theirs and "two of them" not in own + theirs
    for stream in (own, theirs):  # the partner says deal, and nobody has proposed
        assert (
            stream.endswith("<|you|>") and "[propose]" not in stream and stream.rindex("them: deal") > len(stream) / 2
        )
    assert "books 1 0 hats 1 1 balls 3 3" in own and "books 1 1 hats 1 3 balls 3 2" in theirs  # each its own values
    assert cut_after(talk, 1).turns[1:] == (("THEM", "no , a secret"), ("YOU", "deal"), ("THEM", "deal"), ("YOU", None))
    assert cut_after(talk, -1).turns == (("YOU", "deal"), ("THEM", "deal"), ("YOU", None))


def test_the_action_model_learns_from_cuts_that_the_claim_does_not_contradict() -> None:
    talk = view("hi", "i get everything", "i want the balls , you get the rest", "deal")  # claims the balls
    assert cuts(talk) == [-1, 0, 2, 3]  # after the second, YOU would have accepted nothing
    steps = replay(talk, ENV)
    for seed in range(6):
        ways = in_action_model(seed)
        cut = ways["cut"](talk)
        shown = ways["add"](cut, (0, 1, 2), replay(cut, ENV))
        seat = human_row(shown, tiny_policy().tokens, 0)
        learned = collate([seat], {}).imitate.sum()
        if cut is talk:
            assert shown == steps
        else:  # the words are read, and the claim alone is learned
            assert not seat[0].beliefs and [step[0] for step in shown if step[0] != "observe"][-1] == "reply"
            assert learned == len(seat[0].turns[0].reply_ids) and "(0 books, 0 hats, 3 balls)" in seat[0].turns[0].text


def test_annotation_does_not_depend_on_what_comes_later() -> None:
    reader = ClaimReader(tiny_policy(), 512)
    one = view("i want the balls", "no", "then two of them", "fine", claim=(0, 0, 2))
    other = view("i want the balls", "sure , take all", "great , deal", claim=(0, 0, 3))
    first, second = (annotate([each], reader, ENV)[0] for each in (one, other))
    assert len(first) == 3 and first[0] == second[0]
    assert first[-1] == Intent((0, 0, 2), (1, 1, 1)) and second[-1] == Intent((0, 0, 3), (1, 1, 0))  # the real claims


def test_claims_are_read_alike_one_by_one_and_many_at_a_time() -> None:
    policy = tiny_policy()
    reader = ClaimReader(policy, 512)
    streams = [up_to_claim(replay(cut_after(view(m, "ok"), 0), ENV), policy.tokens) for m in ("hi", "i want the book")]
    together = reader.probabilities(streams, [COUNTS, COUNTS])
    for stream, found in zip(streams, together, strict=True):
        assert found.shape == (len(allocations(COUNTS)),) and found.sum() == pytest.approx(1)
        assert reader.probabilities([stream], [COUNTS])[0] == pytest.approx(found, abs=1e-6)
    # Each token's probability is among what claims have there: the first number's share is the model's own.
    whole = Reader(policy, 512, 1.0).probabilities(streams[0], reader.texts(COUNTS))
    assert whole.argmax() in np.argsort(-together[0])[:8]
    assert len(reader.engine._free) == reader.engine.slots  # all slots are given back


def test_items_that_a_message_names() -> None:
    assert named_items("i need the balls", COUNTS) == {2: 3}
    assert named_items("you can have the book , i need 2 balls", COUNTS) == {0: 0, 2: 2}
    assert named_items("hi", COUNTS) == {} and named_items("if i get the book you get the rest", COUNTS) == {}
    assert named_items("i can give you the hat for 2 balls", COUNTS) == {}


# --- What the arms read ---
INTENTS = [Intent((0, 0, 3), (1, 1, 0)), Intent((0, 1, 2), (1, 0, 1))]


@pytest.mark.parametrize("arm", ARMS)
def test_arms_read_what_they_are_named_for(arm: str) -> None:
    tokens = tiny_policy().tokens
    talk = view("i want the balls", "ok")
    episode, _ = human_row(grounded(replay(talk, ENV), arm, INTENTS), tokens, 0)
    text = tokens.decode(episode.streams["you"].tokens)
    assert ("books 1 0 hats 1 1 balls 3 3" in text) == (arm in ("state", "both"))
    assert ("books 1 0 hats 1 0 balls 3 0" in text) == (arm in ("none", "intent"))
    assert text.count("me 0 books 0 hats 3 balls you 1 books 1 hats 0 balls") == (arm in ("intent", "both"))
    assert text.count("me 0 books 1 hats 2 balls you 1 books 0 hats 1 balls") == (
        arm in ("intent", "both")
    )  # before the proposal, too
    partner, _ = human_row(grounded(replay(swapped(talk), ENV), "state", INTENTS), tokens, 0)
    assert "me 0" not in tokens.decode(partner.streams["you"].tokens)


def test_intents_are_never_learned() -> None:
    """The mask by hand: only replies are speech, and the words of an intent are no target of any loss."""
    policy = tiny_policy()
    tokens = policy.tokens
    seat = human_row(grounded(replay(view("hi", "ok"), ENV), "both", INTENTS), tokens, 0)
    batch = collate([seat], {})
    stream = seat[0].streams["you"]
    intent_ids = tokens.encode(intent_text(INTENTS[0]))
    at = next(i for i in range(len(stream)) if stream.tokens[i : i + len(intent_ids)] == intent_ids)
    reply = tokens.encode("[message] hi [END]")
    assert (
        stream.tokens[at + len(intent_ids) + 1 : at + len(intent_ids) + 1 + len(reply)] == reply
    )  # the cue stands between
    mask = batch.reply[0, at : at + len(intent_ids) + 1 + len(reply)].tolist()
    assert mask == [False] * (len(intent_ids) + 1) + [True] * len(reply)
    assert [Kind(k) for k in batch.kind[0, at : at + len(intent_ids)].tolist()] == [Kind.QUESTION] * len(intent_ids)
    assert not batch.decision[0, at : at + len(intent_ids)].any() and len(batch.row) == len(seat[0].beliefs)


def test_an_intent_is_renamed_with_its_items() -> None:
    assert Intent((0, 1, 2), (3, 4, 5)).renamed((2, 0, 1)) == Intent((2, 0, 1), (5, 3, 4))


def test_hidden_values_leave_the_pool() -> None:
    text = prompt(COUNTS, (0, 1, 3), 0.5, Style.COMPACT)
    assert opening_of(text, "intent") == "books 1 0 hats 1 0 balls 3 0 objective 0.5\n"
    assert opening_of(text, "both") == text
