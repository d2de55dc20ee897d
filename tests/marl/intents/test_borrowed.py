"""Lessons: whose messages are borrowed, with which intents, and what of a lesson is learned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from envs.dond.rules import rest
from envs.human_dond import permuted, read_split, replay
from marl.common.errors import UserError
from marl.intents import training
from marl.intents.borrowed import Lessons, Library, in_lessons, library
from marl.intents.streams import Intent, grounded
from marl.intents.training import dialogue_model, learn
from marl.learning.batch import collate
from marl.metrics.drift import speech_likelihood
from marl.pretraining.config import BaseConfig
from marl.pretraining.corpus import human_epochs, human_row
from marl.rollout.games import env_maker
from tests import human_dialogues
from tests.marl.intents.test_annotation import COUNTS, INTENTS, view
from tests.marl.models import tiny_policy

GAME = env_maker({"game": "dond", "style": "compact", "objective": 0.0})
TALK = view("i want the book", "no", "a later secret", "ok")
WHOLE, SOME = "i get the balls , you get the rest", "i want the hat"


def test_messages_are_kept_under_all_claims_that_fit_them() -> None:
    whole, some = library([view(WHOLE, "deal"), view(SOME, "if i get the book you get the rest")])[COUNTS]
    assert whole[0, 0, 3] == [WHOLE] * 2  # again with book and hat renamed, which it does not name
    hats = [(a, 1, c) for a in (0, 1) for c in range(4)][:-1]  # what the partner says, and conditions, are not borrowed
    assert {claim for claim, said in some.items() if SOME in said} == {*hats}
    assert library([view("hi", "hello", "i get everything")]) == {}  # no intent is everything


def test_messages_are_lent_to_pools_with_other_names() -> None:
    """Three balls are three books elsewhere; book and hat, one of each, trade names."""
    lent = library([view("i get the balls and the hat , you get the rest", "deal")])
    assert {pool: whole for pool, (whole, _) in lent.items()} == {
        (1, 1, 3): {
            (0, 1, 3): ["i get the balls and the hat , you get the rest"],
            (1, 0, 3): ["i get the balls and the book , you get the rest"],
        },
        (1, 3, 1): {
            (0, 3, 1): ["i get the hats and the ball , you get the rest"],
            (1, 3, 0): ["i get the hats and the book , you get the rest"],
        },
        (3, 1, 1): {
            (3, 0, 1): ["i get the books and the ball , you get the rest"],
            (3, 1, 0): ["i get the books and the hat , you get the rest"],
        },
    }


def test_lessons_are_even_over_claims() -> None:
    """A claim that is made in one message of forty is taught as often as the other."""
    rare = "i get the book , you get the rest"
    lent = {COUNTS: ({(0, 0, 3): [WHOLE] * 39, (1, 0, 0): [rare]}, {})}
    ways = in_lessons("both", {0: [*INTENTS, INTENTS[0]]}, lent, 0, share=1.0, first=True)
    cuts = [ways["cut"](TALK) for _ in range(200)]
    rarely = [cut for cut in cuts if cut.turns[-2][1] == rare]
    assert 80 < len(rarely) < 120 and {cut.claim for cut in rarely} == {(1, 0, 0)}


def test_in_a_lesson_the_message_and_its_claim_are_learned_and_nothing_later_is_read() -> None:
    """The mask by hand, for a lesson about the second message of a dialogue."""
    tokens = tiny_policy().tokens
    lent = {COUNTS: ({(0, 0, 3): [WHOLE]}, {})}
    for seed in range(8):
        ways = in_lessons("both", {0: [*INTENTS, INTENTS[0]]}, lent, seed, share=1.0, first=False)
        cut = ways["cut"](TALK)
        steps = ways["add"](cut, (0, 1, 2), replay(cut, GAME()))
        row = human_row(steps, tokens, 0)
        batch, stream = collate([row], {}), row[0].streams["you"].tokens
        said, claimed = (
            tokens.encode(f"{words} [END]") for words in (f"[message] {WHOLE}", "[propose] (0 books, 0 hats, 3 balls)")
        )
        text = tokens.decode(stream)
        assert stream[-len(claimed) :] == claimed and "secret" not in text and "them: ok" not in text
        learned = [token for token, own in zip(stream, batch.imitate[0], strict=True) if own]
        assert learned == [*said, *claimed]
        # the message's own intent, whatever was annotated, before the message and before the claim
        assert text.count("me 0 books 0 hats 3 balls you 1 books 1 hats 0 balls") == 2 + (
            "i want the book" in text
        )  # the first message has its annotated one


def test_lessons_leave_the_other_dialogues_as_they_are() -> None:
    intents, lent = {0: [*INTENTS, INTENTS[0]]}, library([view(WHOLE, "deal")])
    none = in_lessons("both", intents, lent, 0, share=0.0, first=False)
    assert none["cut"](TALK) == TALK
    assert none["add"](TALK, (0, 1, 2), replay(TALK, GAME())) == grounded(replay(TALK, GAME()), "both", intents[0])
    other = in_lessons("both", intents, {}, 0, share=1.0, first=False)  # nobody said anything over this pool
    assert other["cut"](TALK) == TALK
    mixed = in_lessons("both", intents, lent, 0, share=0.5, first=True)
    assert 30 < sum(mixed["cut"](TALK) is TALK for _ in range(100)) < 70


def test_a_lessons_items_are_renamed_with_its_intent() -> None:
    """Books take the place of balls in the pool, in the words and in the intent."""
    order = (2, 1, 0)
    ways = in_lessons("both", {0: [*INTENTS, INTENTS[0]]}, library([view(WHOLE, "deal")]), 0, share=1.0, first=True)
    cut = ways["cut"](TALK)
    steps = ways["add"](cut, order, replay(permuted(cut, order), GAME()))
    assert ("tell", "me 3 books 0 hats 0 balls you 0 books 1 hats 1 balls\n") in steps
    assert ("reply", "[message] i get the books , you get the rest [END]") in steps
    assert steps[-1] == ("reply", "[propose] (3 books, 0 hats, 0 balls) [END]")


def test_a_model_that_ignores_its_intent_learns_to_follow_it(tmp_path: Path) -> None:
    """Two messages stand at the same places: the intent alone tells which."""
    human_dialogues.write(tmp_path, (*human_dialogues.ROWS, *human_dialogues.games_of(8)))
    views = [each for each in read_split(tmp_path, "train").usable if each.agree and each.turns[0][0] == "YOU"]
    words = {(1, 0, 0): "i get the book , you get the rest", (0, 0, 1): "i get the ball , you get the rest"}
    lent = library([replace(views[0], turns=(("YOU", message), ("THEM", None))) for message in words.values()])
    intents = {each.index: [Intent(each.claim, rest(each.claim, each.counts))] * 2 for each in views}  # type: ignore[arg-type]
    policy, env = tiny_policy(), {"game": "dond", "style": "compact", "objective": 0.0, "split": "train"}

    def separation() -> float:
        """Measures how much likelier a message is under its intent than under the other, in nats."""
        found = 0.0
        for own, message in words.items():
            cut = replace(views[0], turns=(("YOU", message), ("THEM", None)))
            for claim in words:
                steps = grounded(replay(cut, GAME()), "both", [Intent(claim, rest(claim, cut.counts))] * 2)
                nats = speech_likelihood(policy, [human_row(steps, policy.tokens, 0)])[0, 0]
                found += nats / 2 if claim == own else -nats / 2
        return found

    before = separation()
    base = BaseConfig(data="human", learning_rate=1e-2, epochs=60, rows=8)
    ways = in_lessons("both", intents, lent, 0, share=1.0, first=True)
    learn(policy, base, env, str(tmp_path), len(views), lambda done, total: None, **ways)
    assert abs(before) < 1.5 and separation() > before + 4


def test_nothing_is_borrowed_from_what_is_tested_and_a_kept_model_names_its_lessons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left out: a test context, a failed talk, and dialogues of the other splits."""
    ends = "i get the hats , you get the rest <eos> THEM: deal <eos> YOU: <selection> item0=0 item1=4 item2=0 <eos>"
    wanted = f"1 0 4 2 1 2 YOU: {ends} reward=8 agree 1 4 4 1 1 2"
    tested = f"1 0 4 1 1 6 YOU: so {ends} reward=4 agree 1 1 4 1 1 5"
    failed = f"1 0 4 2 1 2 YOU: no {ends} reward=8 disagree 1 4 4 1 1 2"
    rows = (wanted, tested, failed, wanted.replace("YOU: i", "YOU: hm i"), *human_dialogues.ROWS)
    human_dialogues.write(tmp_path, rows, val=human_dialogues.VAL + "\n" + held_out(rows[3]))
    found: list[Library] = []
    monkeypatch.setattr(training, "library", lambda views: found.append(library(views)) or found[-1])
    monkeypatch.setattr(training, "learn", lambda *args, **ways: None)
    (first,) = [each for each in read_split(tmp_path, "train").usable if each.index == 0]
    intents = {0: [Intent(first.claim, rest(first.claim, first.counts))] * 2}  # type: ignore[arg-type]
    env = {"game": "dond", "style": "compact", "objective": 0.0, "split": "train"}

    def make(lessons: Lessons) -> None:
        dialogue_model(
            "both", tiny_policy(), "", intents, BaseConfig(data="human"), env, str(tmp_path), tmp_path / "model",
            lessons=lessons,
        )  # fmt: skip

    make(Lessons(epochs=1))
    (lent,) = found
    whole, _ = lent[1, 4, 1]
    assert whole == {(0, 4, 0): ["i get the hats , you get the rest"] * 2}  # book and ball trade names
    make(Lessons(epochs=1))
    assert len(found) == 1  # it was kept
    for other in (Lessons(epochs=2), Lessons(epochs=1, share=0.1), Lessons()):
        with pytest.raises(UserError, match="made of other settings"):
            make(other)


def held_out(row: str) -> str:
    """A row of `data.txt` as `val.txt` lists it."""
    own, talk, partner = row[:11], row[12 : row.index(" item0")], row[-11:]
    return (
        f"<input> {own} </input> <dialogue> {talk} </dialogue> <output> - </output> "
        f"<partner_input> {partner} </partner_input>"
    )


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"epochs": -1}, r"lessons\.epochs=-1: must be a whole number, at least 0"),
        ({"share": 1.0}, r"lessons\.share=1\.0: must be at least 0 and below 1"),
        ({"learning_rate": 0.0}, r"lessons\.learning_rate=0\.0: must be above 0"),
    ],
)
def test_bad_settings(settings: dict[str, float], error: str) -> None:
    with pytest.raises(UserError, match=error):
        Lessons(**settings)  # type: ignore[arg-type]


def test_lessons_are_drawn_anew_in_each_pass_also_without_renaming(tmp_path: Path) -> None:
    """Each pass borrows anew."""
    human_dialogues.write(tmp_path, (*human_dialogues.ROWS, *human_dialogues.games_of(2)))
    views = [each for each in read_split(tmp_path, "train").usable if each.agree and each.turns[0][0] == "YOU"]
    words = ("i get the book , you get the rest", "i get the ball , you get the rest")
    lent = library([replace(views[0], turns=(("YOU", message), ("THEM", None))) for message in words])
    intents = {each.index: [Intent(each.claim, rest(each.claim, each.counts))] * 2 for each in views}  # type: ignore[arg-type]
    base = BaseConfig(data="human", permute_items=False, rows=64)
    ways = in_lessons("both", intents, lent, 0, share=1.0, first=True)
    passes = human_epochs(str(tmp_path), [GAME], tiny_policy().tokens, base, **ways)
    seen = {row.turns[0].text for _ in range(8) for row, _ in sorted(next(passes), key=lambda row: row[0].seed)[:1]}
    assert len(seen) == 2
