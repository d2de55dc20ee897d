"""Streams of one agent against what chat templates render."""

from collections.abc import Iterator, Sequence
from datetime import datetime

import pytest
from tokenizers import AddedToken
from transformers.utils import chat_template_utils

from envs.core import Question
from marl.common.errors import UserError
from marl.model.tokens import BOS, CUE, StreamWriter, Tokens
from marl.types import Kind
from tests.marl.models import CHATML, NO_SYSTEM, hf_tokenizer, small_tokens
from tests.marl.templates import (
    CHAT,
    DATED,
    ENDED,
    FAMILIES,
    LAST,
    NUMBERS,
    OPENED,
    PLAIN,
    ROLES,
    SCHEMES,
    TEMPLATES,
    THINKING,
    UNCUED,
    converse,
    hf_tokens,
    spaced,
    template_of,
)

SAID = "[message] hi [END]"
READ = [  # white space at texts' ends, and none
    ("Pool: 1 book.\n", "Partner: no\n", "Partner: ok\n"),
    ("Pool", "no", "ok"),
    ("\n\nPool", " \n", "\nA\n \nB  \n\n"),
    (" x ", "\t\ty", "\u3000z\u00a0\n"),
]


def ours_and_theirs(tokens: Tokens, opening: str, texts: Sequence[str]) -> Iterator[tuple[list[int], list[int]]]:
    """A stream, and the ids of what the template renders, wherever a reply is due; the opening is this role's."""
    view, chat = StreamWriter(tokens), []
    for step, text in enumerate(texts):
        view.observe(text, (), step)
        chat.append({"role": "user" if step else opening, "content": text})
        view.cue()
        theirs = tokens.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        yield list(view.stream.tokens), list(theirs)
        view.reply(tokens.encode(SAID), Kind.SPEECH)
        chat.append({"role": "assistant", "content": SAID})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stream_has_the_ids_of_what_the_chat_template_renders(family: str) -> None:
    template, opening = FAMILIES[family]
    tokenizer = hf_tokenizer(template)
    tokenizer.add_tokens(["\n\n", "\n\n\n"])  # which a mark's line break may be part of
    tokens = Tokens(tokenizer)
    for texts in READ:
        for ours, theirs in ours_and_theirs(tokens, opening, texts):
            assert ours == theirs, (tokens.decode(ours), tokens.decode(theirs))


@pytest.mark.parametrize("cue", ["{% if add_generation_prompt %}<|bot|><|say|>{% endif %}", "<|bot|>",
                                 "{% if add_generation_prompt %}<|bot|>{% endif %}"])  # fmt: skip
def test_a_mark_that_replies_begin_with_is_cued(cue: str) -> None:
    """Streams end with that mark even if the template's cue stops before it or is always written, as in Command A and
    R7B."""
    tokenizer = hf_tokenizer(CHATML)
    marks = ["<|bot|>", "<|say|>", "<|said|>", "<|end|>", "<|system|>", "<|user|>"]
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}<|bot|><|say|>{{ m['content'] }}<|said|>{% else %}"
        "<|{{ m['role'] }}|>{{ m['content'] }}{% endif %}<|end|>{% endfor %}" + cue
    )
    tokens = Tokens(tokenizer)
    say, said = tokenizer.convert_tokens_to_ids(["<|say|>", "<|said|>"])
    assert said in tokens.eos_ids
    for texts in READ:
        for ours, theirs in ours_and_theirs(tokens, "system", texts):
            assert ours[-1] == say and ours[: len(theirs)] == theirs and len(ours) - len(theirs) in (0, 1)


def test_white_space_that_control_tokens_take_away_is_not_read() -> None:
    """Phi-3's control tokens strip the white space behind them. Here one also strips what is before it."""
    for template in (ENDED, ENDED.replace("\n<|end", "<|end")):
        tokenizer = hf_tokenizer(CHATML)
        marks = [AddedToken(f"<|{role}|>", special=True, rstrip=True) for role in ("system", "user", "assistant")]
        tokenizer.add_tokens([*marks, AddedToken("<|end|>", special=True, lstrip=True)])
        tokenizer.chat_template = template
        tokens = Tokens(tokenizer)
        for texts in READ:
            for ours, theirs in ours_and_theirs(tokens, "system", texts):
                assert ours == theirs, (tokens.decode(ours), tokens.decode(theirs))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", ["uncued", "roles", "ended"])
def test_spaced_streams_have_the_ids_of_what_chat_templates_render(scheme: str, family: str) -> None:
    tokenizer = spaced(scheme).tokenizer
    marks = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"] if family == "ended" else []
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    ended = ENDED.replace("|>\n{{ message['c", "|>{{ '\n' if message['role'] == 'assistant' }}{{ message['c")
    tokenizer.chat_template = {"uncued": UNCUED, "roles": ROLES, "ended": ended}[family]
    tokens = Tokens(tokenizer)
    for texts in READ:
        for ours, theirs in ours_and_theirs(tokens, "user" if family == "uncued" else "system", texts):
            assert ours == theirs, (tokens.decode(ours), tokens.decode(theirs))


@pytest.mark.parametrize(
    "written",
    ["message['content'] | lower", "message['content'] | upper", "message['content'].replace('\n', ' ')",
     "message['content'].split() | join(' ')", "message['content'] + 1", "1 / 0", "message['text']", "message.a.b",
     "'' %}"],
)  # fmt: skip
def test_a_template_that_cannot_be_followed_is_refused(written: str) -> None:
    """Templates are refused if they change a text, fail, leave texts out, or are no templates."""
    with pytest.raises(UserError, match=r"does not keep the turns apart.*model\.name"):
        hf_tokens(template_of(written))


def test_a_template_that_writes_later_turns_otherwise_is_refused() -> None:
    counted = CHATML.replace("<|im_end|>", "{% if loop.index > 4 %}<|endoftext|>{% endif %}<|im_end|>")
    unclosed = NO_SYSTEM.replace("<|im_end|>\n", "{{ '<|im_end|>\n' if not loop.last else '<|endoftext|>\n' }}")
    for template in (counted, unclosed):
        with pytest.raises(UserError, match=r"does not keep the turns apart.*model\.name"):
            hf_tokens(template)


@pytest.mark.parametrize("end", ["<|im_end|>", "<|return|>"])
def test_turns_are_closed_as_in_the_middle_of_a_conversation(end: str) -> None:
    tokenizer = hf_tokenizer(LAST)
    tokenizer.add_tokens([AddedToken("<|return|>", special=True)])
    tokenizer.eos_token = end
    tokens, chatml = Tokens(tokenizer), hf_tokens(CHATML)
    assert tokens.format == chatml.format
    closing, last = tokenizer.convert_tokens_to_ids(["<|im_end|>", end])
    assert tokens.eos_ids == {closing, last}


def test_thoughts_that_only_the_last_reply_is_shown_with_are_no_hindrance() -> None:
    tokens, chatml = hf_tokens(THINKING), hf_tokens(CHATML)
    assert (tokens.format.first, tokens.format.heard) == (chatml.format.first, chatml.format.heard)
    assert tokens.format.after_reply == chatml.format.after_reply
    assert tokens.decode(tokens.format.cue) == "<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize("template", DATED)
def test_a_template_that_asks_for_the_date_is_told_the_same_one_every_day(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    today = hf_tokens(DATED[template])

    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> "Later":
            return cls(2031, 12, 30)

    monkeypatch.setattr(chat_template_utils, "datetime", Later)
    later = hf_tokens(DATED[template])
    assert later.format == today.format
    rendered = later.tokenizer.apply_chat_template([{"role": "system", "content": "one"}], tokenize=False)
    dates = {"llama": "30 Dec 2031", "called": "2031-12-30", "in a macro": "December 30, 2031"}
    assert dates[template] in rendered  # and all else is as the template has it
    view = converse(later, "one", [])
    assert later.decode(view.stream.tokens) == rendered.replace(dates[template], "26 Jul 2024")


def test_a_small_models_stream_is_written_as_it_is_meant() -> None:
    tokens = small_tokens()
    question = Question("<books?>", NUMBERS, "3")
    view = StreamWriter(tokens)
    view.observe("deal 1\n", (question,), 0)
    view.cue()
    start = view.reply(tokens.encode("[message] 5 [END]"), Kind.SPEECH)
    view.observe("", (question,), 1)
    view.observe("no deal\n", (), 2)
    assert [tokens.decode([i]) for i in view.stream.tokens] == [
        BOS, "deal", " 1", "\n", "<books?>", CUE, "[message]", " 5", " [END]", "<books?>", "no deal", "\n",
    ]  # fmt: skip
    o, q, s = Kind.OBSERVATION, Kind.QUESTION, Kind.SPEECH
    assert view.stream.kinds == [o, o, o, o, q, o, s, s, s, q, o, o]
    assert start == 6 and [(a.position, a.step) for a in view.asked] == [(4, 0), (9, 1)]
    assert all(a.question is question and len(a.candidate_ids) == 11 for a in view.asked)


@pytest.mark.parametrize("template", [None, CHATML, NO_SYSTEM, OPENED, UNCUED])
def test_a_question_before_anything_was_heard_is_read_whole(template: str | None) -> None:
    for tokens in (hf_tokens(template), small_tokens()):
        view = StreamWriter(tokens)
        view.observe("", (Question("books and hats?", NUMBERS[:10], "3"),), 0)
        assert "books and hats?" in tokens.decode(view.stream.tokens)


def test_a_small_model_reads_listings_as_they_are() -> None:
    tokens = small_tokens()
    view = StreamWriter(tokens)
    view.observe("deal", (Question("<books?>", ("1 2", "3 4"), "1 2"), Question("<hats?>", NUMBERS, "3")), 0)
    legal = view.cue(("1 2", "3 4"))
    view.reply(legal[:1], Kind.CHOICE)
    listing = ["\n", "A", ")", " 1", " 2", "\n", "B", ")", " 3", " 4"]
    assert [tokens.decode([i]) for i in view.stream.tokens] == [
        BOS, "deal", "<books?>", *listing, "<hats?>", *listing, CUE, tokens.decode(legal[:1]),
    ]  # fmt: skip
    o, q = Kind.OBSERVATION, Kind.QUESTION
    assert view.stream.kinds == [o, o, *[q] * 12, *[o] * 11, Kind.CHOICE]
    assert [a.position for a in view.asked] == [12, 13]
    assert [tokens.decode([i]).strip() for i in legal] == ["A", "B"] and view.asked[0].candidate_ids == legal


def test_questions_to_a_model_without_turns_stand_on_lines_of_their_own() -> None:
    question, other = Question("How many?", NUMBERS, "3"), Question("Which one?", ("the hat", "a book"), "a book")
    view = StreamWriter(PLAIN)
    view.observe("one\n", (question, other), 0)
    view.observe("Partner: no", (question,), 1)  # without a line break
    view.cue()
    view.reply(PLAIN.encode("yes [END]"), Kind.SPEECH)
    view.observe("", (question,), 2)
    view.observe("Partner: three\n", (), 3)
    assert PLAIN.decode(view.stream.tokens) == (
        "<|endoftext|>one\nHow many?\nWhich one?\nA) the hat\nB) a book\nPartner: no\nHow many?\n"
        "\nyou:yes [END]\nHow many?\nPartner: three\n"
    )
    read = ["How many?", "Which one?\nA) the hat\nB) a book", "How many?", "How many?"]
    for asked, text in zip(view.asked, read, strict=True):
        assert PLAIN.decode(view.stream.tokens[: asked.position + 1]).endswith(f"\n{text}")
        assert view.stream.kinds[asked.position : asked.position + 2] == [Kind.QUESTION, Kind.OBSERVATION]
    assert [PLAIN.decode([i]) for i in view.asked[0].candidate_ids] == [f" {n}" for n in NUMBERS]


def test_a_chat_model_is_asked_in_a_turn_of_its_own() -> None:
    view = StreamWriter(CHAT)
    view.observe("one", (Question("how many?", NUMBERS, "3"),), 0)
    listing = "".join(f"\n{letter}) {n}" for letter, n in zip("ABCDEFGHIJK", NUMBERS, strict=True))
    assert CHAT.decode(view.stream.tokens) == (
        "<|im_start|>system\none<|im_end|>\n"
        f"<|im_start|>user\nhow many?{listing}<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
    )
    at = view.asked[0].position
    assert CHAT.decode(view.stream.tokens[: at + 1]).endswith("<|im_start|>assistant\n")
    assert {view.stream.kinds[at], view.stream.kinds[at + 1]} == {Kind.QUESTION, Kind.OBSERVATION}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_model_reads_its_options_in_a_turn_of_its_own(template: str) -> None:
    tokens = hf_tokens(TEMPLATES[template])
    view = converse(tokens, "one", [("a", "two"), ("u", "three")])
    before = tokens.decode(view.stream.tokens)
    legal = view.cue(["go south", "go north"])
    who = "assistant" if template == "chatml" else "model"
    assert tokens.decode(view.stream.tokens) == (
        f"{before}<|im_start|>user\nA) go south\nB) go north<|im_end|>\n<|im_start|>{who}\n"
    )
    assert set(view.stream.kinds[-len(tokens.format.cue) - 10 :]) == {Kind.OBSERVATION}
    view.reply(legal[:1], Kind.CHOICE)
    assert tokens.decode(view.stream.tokens).endswith(f"{who}\nA<|im_end|>\n")
    before = tokens.decode(view.stream.tokens)
    for options in (["1", "2"], ["go south", "do task"]):  # which stand for themselves
        legal = view.cue(options)
        assert tokens.decode(view.stream.tokens) == f"{before}<|im_start|>{who}\n"
        view.reply(legal[1:], Kind.CHOICE)
        before += f"<|im_start|>{who}\n{options[1]}<|im_end|>\n"
        assert tokens.decode(view.stream.tokens) == before


def test_a_reply_never_follows_the_models_own_turn_where_nothing_cues_it() -> None:
    tokens = hf_tokens(UNCUED)
    bos, eos = tokens.tokenizer.bos_token, tokens.tokenizer.eos_token
    question = Question("how many?", NUMBERS[:10], "3")
    view = StreamWriter(tokens)
    view.observe("one", (question, question), 0)
    view.cue()
    view.reply([*tokens.encode("two"), tokens.tokenizer.eos_token_id], Kind.SPEECH)
    view.cue()  # twice in a row
    view.reply(tokens.encode("three"), Kind.SPEECH)
    view.observe("four", (), 1)
    view.cue()
    assert tokens.decode(view.stream.tokens) == (
        f"{bos}[INST] one [/INST]" + 2 * f"[INST] how many? [/INST]{eos}" + f"[INST] Your turn. [/INST]two{eos}"
        f"[INST] Your turn. [/INST]three{eos}[INST] four [/INST]"
    )
    at = view.asked[0].position
    assert tokens.decode(view.stream.tokens[: at + 1]).endswith("how many? [/INST]")
    view.reply(tokens.tokenizer.encode(eos, add_special_tokens=False), Kind.SPEECH)  # not a word
    view.cue(["go south", "go north"])  # whose listing is the turn between
    assert tokens.decode(view.stream.tokens).endswith(
        f"[INST] four [/INST]{eos}[INST] A) go south\nB) go north [/INST]"
    )
