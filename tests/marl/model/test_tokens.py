"""Text <-> ids, and one token per choice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from envs import dond_v0
from envs.core import END, Question
from envs.dond import texts as dond_texts
from marl.common.errors import UserError
from marl.model.tokens import BOS, CUE, PAD, Tokens, train_tokenizer
from marl.types import Kind
from tests.marl.models import CHATML, COMPACT_TEXTS, hf_tokenizer, small_tokens
from tests.marl.templates import (
    ANY_TEXT,
    CHAT,
    NUMBERS,
    OPENED,
    PLAIN,
    ROLES,
    SCHEMES,
    TEMPLATES,
    converse,
    hf_tokens,
    other_end,
    spaced,
)

# --- Small tokenizers ---


def test_what_the_game_says_often_is_one_token() -> None:
    tokens = small_tokens()
    for text in (*NUMBERS, *dond_texts.COMPACT_TOKENS):
        assert len(tokens.encode(text)) == 1, text
    for text in (*NUMBERS, *(t for t in dond_texts.COMPACT_TOKENS if t.isalpha()), END):
        assert len(tokens.encode(" " + text)) == 1, text
    _, infos = dond_v0.parallel_env(style="compact").reset(seed=0)
    for question in infos["player_0"]["questions"]:
        ids, listing, _ = tokens.label(question.candidates)
        assert len(set(ids)) == 11 and listing == ""
        assert len(tokens.encode(question.text)) == 1
        assert [tokens.decode([i]) for i in ids] == [f" {n}" for n in range(11)]


def test_every_kept_string_is_one_token_whatever_it_is_made_of() -> None:
    keep = ("alpha", "P1", "two words", "?!", "12", "Zoë")
    tokens = Tokens(train_tokenizer(COMPACT_TEXTS, keep, 512))
    assert {text: len(tokens.encode(text)) for text in keep} == dict.fromkeys(keep, 1)


@given(ANY_TEXT)
@settings(max_examples=100)
def test_any_text_survives_the_way_to_ids_and_back_and_forges_no_control_token(text: str) -> None:
    for tokens, marks in (
        (small_tokens(), (PAD, BOS, CUE)),
        (PLAIN, ("<|endoftext|>",)),
        (CHAT, ("<|im_end|>", "<|im_start|>")),
    ):
        assert tokens.decode(tokens.encode(text)) == text
        control = set(tokens.tokenizer.convert_tokens_to_ids(list(marks)))
        assert not control & set(tokens.encode(text + marks[0] + text + marks[-1]))


ALIKE = ((PLAIN, hf_tokens()), (CHAT, hf_tokens(CHATML, single_digits=True)))


@given(ANY_TEXT)
def test_text_is_encoded_as_the_tokenizer_itself_does(text: str) -> None:
    for tokens, alike in ALIKE:
        ids = tokens.encode(text)  # before the other, which shares nothing with it
        assert ids == list(alike.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)


def test_a_tokenizer_that_truncates_or_pads_does_neither_to_text() -> None:
    tokenizer = hf_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    assert Tokens(tokenizer).encode("one two three four five six") == PLAIN.encode("one two three four five six")
    assert Tokens(tokenizer).encode("one") == PLAIN.encode("one")


# --- Tokenizers that put a space before a text ---


@pytest.mark.parametrize("scheme", SCHEMES)
def test_only_what_begins_the_stream_gets_the_tokenizers_own_space(scheme: str) -> None:
    tokens = spaced(scheme)
    view = converse(tokens, "Hello you", [("a", "[message] hi [END]"), ("u", "Partner: ok"), ("a", "")])
    text = "Hello you\nyou:[message] hi [END]\nPartner: ok\nyou:\n"
    assert tokens.decode(view.stream.tokens[1:]) == text
    whole = tokens.tokenizer(text, add_special_tokens=False).input_ids
    assert view.stream.tokens == [tokens.tokenizer.bos_token_id, *whole]
    assert tokens.encode("Hello", begins=True) == tokens.tokenizer("Hello", add_special_tokens=False).input_ids
    assert tokens.encode("Hello", begins=True) != tokens.encode("Hello") and tokens.encode("") == []
    for other in (PLAIN, CHAT, small_tokens()):
        assert other.encode("Hello", begins=True) == other.encode("Hello")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_labels_of_a_spaced_tokenizer_have_a_space_only_where_one_is_said(scheme: str) -> None:
    numbers = NUMBERS[:10]
    for template, space in ((None, "▁"), (ROLES, "")):
        tokens = spaced(scheme, template)
        ids, listing, _ = tokens.label(numbers)
        assert tokens.tokenizer.convert_ids_to_tokens(ids) == [space + n for n in numbers] and listing == ""


@given(st.sampled_from(SCHEMES), ANY_TEXT, ANY_TEXT)
@settings(max_examples=100)
def test_pieces_of_a_spaced_text_decode_to_the_whole(scheme: str, one: str, two: str) -> None:
    tokens = SPACED[scheme]
    plain = [text.replace("▁", " ") for text in (f"Hello {one}", two)]
    assert tokens.decode(tokens.encode(plain[0], begins=True) + tokens.encode(plain[1])) == "".join(plain)


SPACED = {scheme: spaced(scheme) for scheme in SCHEMES}


# --- One token per choice ---


def test_a_chat_model_answers_without_a_space_before_it() -> None:
    """Replies of a chat model begin a line of their own, while plain text goes on after a colon or a question mark."""
    tokenizers = hf_tokenizer(CHATML), hf_tokenizer()
    for tokenizer in tokenizers:
        tokenizer.add_tokens([" A", " B"])
    chat, plain = map(Tokens, tokenizers)
    for options in (NUMBERS, ["go south", "go north"], ["1", "2", "10"]):  # "10" is one token after a space alone
        letters = "ABCDEFGHIJK"[: len(options)]
        assert [chat.decode([i]) for i in chat.label(options)[0]] == list(letters)
        assert chat.label(options)[1] == "".join(f"\n{letter}) {o}" for letter, o in zip(letters, options, strict=True))
    assert [chat.decode([i]) for i in chat.label(NUMBERS[:10])[0]] == list(NUMBERS[:10])
    assert [plain.decode([i]) for i in plain.label(NUMBERS)[0]] == [f" {n}" for n in NUMBERS]
    assert [plain.decode([i]) for i in plain.label(["go south", "do task"])[0]] == [" A", " B"]


@pytest.mark.parametrize(
    ("tokens", "options", "said", "listing"),
    [
        (small_tokens(), NUMBERS, NUMBERS, ""),
        (PLAIN, NUMBERS, NUMBERS, ""),
        (CHAT, NUMBERS[:10], NUMBERS[:10], ""),
        (PLAIN, NUMBERS[9:], NUMBERS[9:], ""),
        (CHAT, ("1", "10"), ("A", "B"), "\nA) 1\nB) 10"),  # ten is two tokens
        (CHAT, NUMBERS[9:], ("9", "1"), ""),
        (CHAT, ("go to the kitchen", "wait"), ("g", "w"), ""),
        (CHAT, ("go to the kitchen", "go on"), ("A", "B"), "\nA) go to the kitchen\nB) go on"),
        (small_tokens(), ("go to the kitchen", "wait"), ("A", "B"), "\nA) go to the kitchen\nB) wait"),
        (PLAIN, ("go to the kitchen", "wait"), ("A", "B"), "\nA) go to the kitchen\nB) wait"),
        (small_tokens(), ("5", "5"), ("A", "B"), "\nA) 5\nB) 5"),  # equal options never share a token
    ],
)
def test_options_stand_for_themselves_if_single_or_first_tokens_tell_them_apart_else_letters_do(
    tokens: Tokens, options: tuple[str, ...], said: tuple[str, ...], listing: str
) -> None:
    ids, listed, rests = tokens.label(options)
    assert listed == listing and tuple(tokens.decode([i]).strip() for i in ids) == said
    whole = [tokens.decode([i, *rest]).strip() for i, rest in zip(ids, rests, strict=True)]
    assert whole == list(said if listing else options)


def test_more_options_than_letters_are_refused() -> None:
    options = [f"room number {i}" for i in range(27)]
    assert len(small_tokens().label(options[:26])[0]) == 26
    with pytest.raises(UserError, match=r"27 options such as 'room number 0'.*model\.name"):
        small_tokens().label(options)


# --- Replies ---


def test_a_reply_ends_at_the_end_marker_however_it_is_cut_into_tokens() -> None:
    for tokens in (small_tokens(), PLAIN, CHAT):
        for text in ("[message] hi [END]", "[message] hi[END]", "x [END] more]"):
            ids = tokens.encode(text)
            done = [tokens.ends(ids[: i + 1]) for i in range(len(ids))]
            assert done == [
                END in tokens.decode(ids[: i + 1]) and END[-1] in tokens.decode([ids[i]]) for i in range(len(ids))
            ]
            assert any(done) and tokens.reply_text(ids) == text
        ids = tokens.encode("[message] hi [END")
        assert not any(tokens.ends(ids[: i + 1]) for i in range(len(ids)))


def test_a_reply_ends_at_the_models_own_end_which_the_game_never_reads() -> None:
    for tokens in (PLAIN, CHAT):
        ids = [*tokens.encode("hello"), tokens.tokenizer.eos_token_id]
        assert tokens.ends(ids) and tokens.reply_text(ids) == "hello"
        assert tokens.reply_text(ids[-1:]) == "" and tokens.reply_text(()) == ""
    assert not small_tokens().eos_ids


def test_no_special_token_is_for_saying_unless_it_ends_the_reply() -> None:
    tokenizer = hf_tokenizer(CHATML)
    marks = ["<|end_of_text|>", "<|python_tag|>", "<|eom_id|>"]
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.add_tokens([AddedToken("\n\n", special=True), AddedToken(f" {END}", special=True), "<think>"])
    end_of_text, python_tag, eom, *text = tokenizer.convert_tokens_to_ids([*marks, "\n\n", f" {END}", "<think>"])
    tokens = Tokens(tokenizer)
    assert tokens.unspeakable == [*CHAT.unspeakable, end_of_text, python_tag, eom]
    assert not set(text) & set(tokens.unspeakable)  # which are text
    tokens.add_ends([eom, end_of_text, *CHAT.unspeakable])
    for end in (eom, end_of_text):
        said = [*tokens.encode("hello"), end]
        assert tokens.ends(said) and tokens.reply_text(said) == "hello"
    assert tokens.eos_ids == {*CHAT.eos_ids, eom, end_of_text} <= tokens.may_end
    assert tokens.unspeakable == [*CHAT.unspeakable, python_tag]  # marks between turns stay what they are


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_turns_end_ends_a_reply_whatever_the_tokenizer_calls_its_end(template: str) -> None:
    tokens = other_end(TEMPLATES[template])
    start, end, eos = tokens.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    for last in (end, eos):
        said = [*tokens.encode("hello"), last]
        assert tokens.ends(said) and tokens.reply_text(said) == "hello"
    assert tokens.eos_ids == {end, eos} <= tokens.may_end
    roles = tokens.tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>"])
    assert tokens.unspeakable == [start, *roles]  # and so no turn is forged
    ours, its_own = (converse(tokens, "one", []) for _ in range(2))
    for view, ids in ((ours, tokens.encode("hello")), (its_own, [*tokens.encode("hello"), end])):
        view.cue()
        view.reply(ids, Kind.SPEECH)
    assert ours.stream.tokens == its_own.stream.tokens and ours.stream.kinds != its_own.stream.kinds


def test_where_nothing_closes_a_turn_the_mark_that_opens_the_next_one_does() -> None:
    tokens = other_end(OPENED)
    user, assistant, eos = tokens.tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>", "<|endoftext|>"])
    assert tokens.eos_ids == {user, eos} and assistant in tokens.unspeakable
    view = converse(tokens, "one", [])
    view.cue()
    said = [*tokens.encode("two"), user]
    assert tokens.ends(said) and tokens.reply_text(said) == "two"
    view.reply(said, Kind.SPEECH)
    view.observe("three", (Question("how many?", NUMBERS[:10], "3"),), 1)
    view.cue()
    assert tokens.decode(view.stream.tokens) == (
        "<|im_start|>\none<|assistant|>\ntwo<|user|>\nthree<|user|>\nhow many?<|assistant|>\n<|assistant|>\n"
    )


# Half a character reads as U+FFFD, which is therefore left out.
@given(st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), min_size=1, max_size=12), st.data())
def test_a_range_of_tokens_is_the_smallest_that_holds_the_span(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start + 1, len(text)))
    for tokens in (small_tokens(), PLAIN):
        ids = tokens.encode(text)
        owners = []  # of each token: the characters that its bytes belong to
        place = [i for i, c in enumerate(text) for _ in c.encode()]
        lengths = [len(tokens.tokenizer.convert_ids_to_tokens(i)) for i in ids]  # byte-level pieces: a letter a byte
        if sum(lengths) != len(place):
            continue  # a tag with a space is no byte-level piece
        at = 0
        for length in lengths:
            owners.append(set(place[at : at + length]))
            at += length
        inside = [i for i, own in enumerate(owners) if own & set(range(start, end))]
        assert tokens.within(ids, (start, end)) == (inside[0], inside[-1] + 1)
