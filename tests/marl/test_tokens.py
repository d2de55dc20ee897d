"""Text <-> ids, one token per choice, and streams against what chat templates render."""

import os
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from envs import dond_v0
from envs.core import END, Question
from envs.dond import texts as dond_texts
from marl.common.errors import UserError
from marl.model.tokens import BOS, CUE, PAD, Tokens, View, train_tokenizer
from marl.types import Kind
from tests.marl.models import CHATML, COMPACT_TEXTS, NATURAL_TEXTS, NO_SYSTEM, hf_tokenizer, small_tokens

NUMBERS = tuple(str(n) for n in range(11))
MODELS = Path(os.environ.get("PRETRAINED", "not set"))
TEMPLATES = {"chatml": CHATML, "no_system": NO_SYSTEM}
# Marks open turns, and nothing closes them.
OPENED = (
    "{% for message in messages %}<|{{ message['role'] | replace('system', 'im_start') }}|>\n{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# A finished conversation ends with the tokenizer's end, which is gone once it goes on, as in Phi-3's.
FINISHED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
)
# The last turn of a conversation is closed otherwise than those before it, as in gpt-oss's.
LAST = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% if loop.last and message['role'] == 'assistant' %}<|return|>{% else %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A reply to the last message is shown, and cued, with the empty thoughts that earlier ones lack, as in Qwen3's.
THINKING = (
    "{% set at = namespace(last=0) %}{% for message in messages if message['role'] == 'user' %}"
    "{% set at.last = messages.index(message) %}{% endfor %}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' and loop.index0 > at.last %}"
    "<think>\n\n</think>\n\n{% endif %}{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
# Nothing cues a reply but the end of the other's turn, as in the first Mistral's.
UNCUED = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
# Roles are plain text, and turns end with the end of sequence, as in Zephyr's.
ROLES = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# As families of published templates do, in their least form; and whose first words the opening is.
TURN = "{{ '<|im_start|>' + message['role'] + '\n' + TEXT + '<|im_end|>\n' }}"
CUED = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
EACH = "{% for message in messages %}"
MUST_ALTERNATE = EACH + (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Must alternate') }}{% endif %}"
)
LED = (  # the system's words are shown with a user's
    "{{ bos_token }}{% set lead = '' %}{% if messages[0]['role'] == 'system' %}"
    "{% set lead = messages[0]['content'] + '\n\n' %}{% set messages = messages[1:] %}{% endif %}"
)
SYSTEM = "{% if messages[0]['role'] == 'system' %}YES{% set messages = messages[1:] %}{% else %}NO{% endif %}"
SAID_FIRST = "<|im_start|>system\n{{ messages[0]['content'] | trim }}<|im_end|>\n"
DEFAULT = "<|im_start|>system\nYou help.<|im_end|>\n"
BLOCKS = (
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for block in message['content'] %}{{ block['text'] }}{% endfor %}{% endif %}"
)


def template_of(text: str, before: str = "{{ bos_token }}" + EACH) -> str:
    return before + TURN.replace("TEXT", text) + CUED


FAMILIES = {
    "trims": (template_of("message['content'] | trim"), "system"),
    "trims left ends": (template_of("message['content'].lstrip()"), "system"),
    "trims right ends": (template_of("message['content'].rstrip()"), "system"),
    "trims line breaks": (template_of("message['content'].strip('\n')"), "system"),
    "trims left line breaks": (template_of("message['content'].lstrip('\n')"), "system"),
    "trims the user's": (
        template_of("(message['content'] | trim if message['role'] == 'user' else message['content'])"), "system"
    ),
    "trims the system's": (
        template_of("(message['content'] | trim if message['role'] == 'system' else message['content'])"), "system"
    ),
    "trims replies": (
        template_of("(message['content'] | trim if message['role'] == 'assistant' else message['content'])"), "system"
    ),
    "default system prompt": (template_of(
        "message['content']", SYSTEM.replace("YES", SAID_FIRST).replace("NO", DEFAULT) + EACH
    ), "system"),
    "default system prompt alone": (template_of("message['content'] | trim", DEFAULT + MUST_ALTERNATE), "user"),
    "the user speaks before the assistant": (template_of(
        "message['content'] | trim", SYSTEM.replace("YES", SAID_FIRST).replace("NO", "") + MUST_ALTERNATE
    ), "user"),
    "the system joins the first user": (template_of(
        "(lead if loop.first else '') + message['content'] | trim", LED + MUST_ALTERNATE
    ), "user"),
    "the system joins the first user, who may be silent": (template_of(
        "(lead if loop.first else '') + message['content']", LED + EACH
    ), "user"),
    "the system joins the last user": (template_of(
        "(lead if loop.last else '') + message['content']", LED + MUST_ALTERNATE
    ), "user"),
    "texts or blocks": (
        LED + EACH + "<|im_start|>{{ message['role'] }}\n{% if loop.last %}{{ lead }}{% endif %}"
        + BLOCKS + "<|im_end|>\n" + CUED, "user"
    ),
    "no system": (NO_SYSTEM, "user"),
    "uncued": (UNCUED, "user"),
    "uncued, trims": (UNCUED.replace("['content'] }} [/", "['content'] | trim }} [/"), "user"),
}  # fmt: skip
# Turns begin with one control token and end with another.
ENDED = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}\n<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Today's date stands in the opening, as in Llama 3.2's (which takes it as a variable too) and in others'.
DATED = {
    "llama": "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    '{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}'
    "{%- endif %}\n<|im_start|>Today Date: {{ date_string }}<|im_end|>\n" + CHATML,
    "called": "\n<|im_start|>Today: {{ strftime_now(format='%Y-%m-%d')[:20] }}<|im_end|>\n" + CHATML,
    "in a macro": "{% macro today() %}{{ strftime_now('%B %d, %Y') }}{% endmacro %}"
    "  <|im_start|>Today: {{ today() }}<|im_end|>\n" + CHATML,
}
ANY_TEXT = st.text(max_size=60) | st.lists(
    st.sampled_from([*dond_texts.COMPACT_TOKENS, *NUMBERS, " ", "\n", PAD, BOS, CUE, "é", "數", "🙂", "<|im_end|>"])
).map("".join)


def hf_tokens(chat_template: str | None = None, single_digits: bool = False) -> Tokens:
    return Tokens(hf_tokenizer(chat_template, single_digits))


def other_end(chat_template: str) -> Tokens:
    """A chat model whose turns end with another token than its `eos_token`."""
    tokenizer = hf_tokenizer(chat_template, single_digits=True)
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in ("<|user|>", "<|assistant|>")])
    tokenizer.eos_token = "<|endoftext|>"
    return Tokens(tokenizer)


def spaced(scheme: str, chat_template: str | None = None) -> Tokens:
    """A tokenizer such as Llama's, which puts a space before a text that it encodes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if scheme == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=[*specials, *(f"<0x{i:02X}>" for i in range(256))], show_progress=False
    )
    words = " ".join(" ".join(NATURAL_TEXTS).split())
    tokenizer.train_from_iterator([word for word in words.split(" ") for _ in range(3)] + list("ABCDEFGHIJK"), trainer)
    unk, bos, eos = specials
    result = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unk, bos_token=bos, eos_token=eos)
    result.chat_template = chat_template
    return Tokens(result)


PLAIN, CHAT = hf_tokens(), hf_tokens(CHATML, single_digits=True)


# --- Small tokenizers ---


def test_what_the_game_says_often_is_one_token() -> None:
    tokens = small_tokens()
    for text in (*NUMBERS, *dond_texts.COMPACT_TOKENS):
        assert len(tokens.encode(text)) == 1, text
    for text in (*NUMBERS, *(t for t in dond_texts.COMPACT_TOKENS if t.isalpha()), END):
        assert len(tokens.encode(" " + text)) == 1, text


def test_numbers_and_words_stay_whole_in_the_sentences_of_the_game() -> None:
    tokens = small_tokens()
    assert len(tokens.encode("books 1 0 hats 1 10 balls 3 3 objective")) == 10
    assert [tokens.decode([i]) for i in tokens.encode("them: 10 hats [END]")] == ["them:", " 10", " hats", " [END]"]


def test_candidates_and_questions_are_one_token_each() -> None:
    tokens = small_tokens()
    _, infos = dond_v0.parallel_env(style="compact").reset(seed=0)
    for question in infos["player_0"]["questions"]:
        ids, listing = tokens.label(question.candidates)
        assert len(set(ids)) == 11 and listing == ""
        assert len(tokens.encode(question.text)) == 1
        assert [tokens.decode([i]) for i in ids] == [f" {n}" for n in range(11)]


def test_every_kept_string_is_one_token_whatever_it_is_made_of() -> None:
    keep = ("alpha", "P1", "two words", "?!", "12", "Zoë")
    tokens = Tokens(train_tokenizer(COMPACT_TEXTS, keep, 512))
    assert {text: len(tokens.encode(text)) for text in keep} == dict.fromkeys(keep, 1)


def test_a_small_vocabulary_has_the_size_asked_for_where_texts_suffice() -> None:
    texts = [f"word{chr(97 + i)}{chr(97 + j)} " * 2 for i in range(26) for j in range(26)]
    assert len(train_tokenizer(texts, ("[a]",), 600)) == 600


@given(ANY_TEXT)
@settings(max_examples=300)
def test_any_text_survives_the_way_to_ids_and_back(text: str) -> None:
    for tokens in (small_tokens(), PLAIN, CHAT):
        assert tokens.decode(tokens.encode(text)) == text


@given(ANY_TEXT)
@settings(max_examples=300)
def test_no_text_forges_a_control_token(text: str) -> None:
    for tokens, marks in (
        (small_tokens(), (PAD, BOS, CUE)),
        (PLAIN, ("<|endoftext|>",)),
        (CHAT, ("<|im_end|>", "<|im_start|>")),
    ):
        control = set(tokens.tokenizer.convert_tokens_to_ids(list(marks)))
        assert not control & set(tokens.encode(text + marks[0] + text + marks[-1]))


@given(ANY_TEXT)
def test_text_is_encoded_as_the_tokenizer_itself_does(text: str) -> None:
    for tokens, alike in ((PLAIN, hf_tokens()), (CHAT, hf_tokens(CHATML, single_digits=True))):
        ids = tokens.encode(text)  # before the other, which shares nothing with it
        assert ids == list(alike.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)


def test_a_tokenizer_that_truncates_or_pads_does_neither_to_text() -> None:
    tokenizer = hf_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    assert Tokens(tokenizer).encode("one two three four five six") == PLAIN.encode("one two three four five six")
    assert Tokens(tokenizer).encode("one") == PLAIN.encode("one")


def test_marks_of_a_template_are_control_tokens_even_after_text_was_encoded() -> None:
    tokens = hf_tokens(CHATML)
    start = tokens.tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokens.encode("some <|im_start|> text")
    assert tokens.format.cue[0] == start and Tokens(tokens.tokenizer).format == tokens.format


# --- Tokenizers that put a space before a text ---

SCHEMES = ("first", "always", "normalizer")


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
def test_a_spaced_stream_has_the_ids_of_what_the_chat_template_renders(scheme: str) -> None:
    tokens = spaced(scheme, ROLES)
    view = converse(tokens, "Hello you", [("a", "[message] hi [END]"), ("u", "\nPartner: ok"), ("a", "é 5")])
    chat = [("system", "Hello you"), ("assistant", "[message] hi [END]"), ("user", "\nPartner: ok"),
            ("assistant", "é 5")]  # fmt: skip
    messages = [{"role": role, "content": text} for role, text in chat]
    rendered = tokens.tokenizer.apply_chat_template(messages, tokenize=False)
    assert view.stream.tokens == tokens.tokenizer(rendered, add_special_tokens=False).input_ids


@pytest.mark.parametrize("scheme", SCHEMES)
def test_labels_of_a_spaced_tokenizer_have_a_space_only_where_one_is_said(scheme: str) -> None:
    numbers = NUMBERS[:10]
    for template, space in ((None, "▁"), (ROLES, "")):
        tokens = spaced(scheme, template)
        ids, listing = tokens.label(numbers)
        assert tokens.tokenizer.convert_ids_to_tokens(ids) == [space + n for n in numbers] and listing == ""


@given(st.sampled_from(SCHEMES), ANY_TEXT, ANY_TEXT)
@settings(max_examples=100)
def test_pieces_of_a_spaced_text_decode_to_the_whole(scheme: str, one: str, two: str) -> None:
    tokens = SPACED[scheme]
    plain = [text.replace("▁", " ") for text in (f"Hello {one}", two)]
    assert tokens.decode(tokens.encode(plain[0], begins=True) + tokens.encode(plain[1])) == "".join(plain)


SPACED = {scheme: spaced(scheme) for scheme in SCHEMES}


# --- One token per choice ---


def test_options_stand_for_themselves_where_they_are_single_tokens() -> None:
    for tokens in (small_tokens(), PLAIN):
        ids, listing = tokens.label(NUMBERS)
        assert listing == "" and [tokens.decode([i]).strip() for i in ids] == list(NUMBERS)


def test_options_that_are_several_tokens_are_listed_with_letters() -> None:
    for tokens in (small_tokens(), PLAIN, CHAT):
        ids, listing = tokens.label(["go to the kitchen", "wait"])
        assert listing == "\nA) go to the kitchen\nB) wait"
        assert [tokens.decode([i]).strip() for i in ids] == ["A", "B"]


def test_single_digit_tokenizers_need_letters_for_ten() -> None:
    ids, listing = CHAT.label(NUMBERS)
    assert len(set(ids)) == 11 and listing.startswith("\nA) 0\nB) 1\n") and listing.endswith("\nK) 10")
    assert [CHAT.decode([i]).strip() for i in ids] == list("ABCDEFGHIJK")
    assert CHAT.label(NUMBERS[:10])[1] == ""  # 0..9 are single tokens, without a space before them


def test_a_chat_model_answers_without_a_space_before_it() -> None:
    """Its reply begins a line of its own, while plain text goes on after a colon or a question mark."""
    tokenizers = hf_tokenizer(CHATML), hf_tokenizer()
    for tokenizer in tokenizers:
        tokenizer.add_tokens([" A", " B"])
    chat, plain = map(Tokens, tokenizers)
    for options in (NUMBERS, ["go south", "do task"], ["1", "2", "10"]):  # "10" is one token after a space alone
        letters = "ABCDEFGHIJK"[: len(options)]
        assert [chat.decode([i]) for i in chat.label(options)[0]] == list(letters)
        assert chat.label(options)[1] == "".join(f"\n{letter}) {o}" for letter, o in zip(letters, options, strict=True))
    assert [chat.decode([i]) for i in chat.label(NUMBERS[:10])[0]] == list(NUMBERS[:10])
    assert [plain.decode([i]) for i in plain.label(NUMBERS)[0]] == [f" {n}" for n in NUMBERS]
    assert [plain.decode([i]) for i in plain.label(["go south", "do task"])[0]] == [" A", " B"]


def test_equal_options_never_share_a_token() -> None:
    ids, listing = small_tokens().label(["5", "5"])
    assert len(set(ids)) == 2 and listing == "\nA) 5\nB) 5"


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


def test_control_tokens_are_not_for_saying_but_the_models_own_end_is() -> None:
    small = small_tokens()
    assert {small.decode([i]) for i in small.unspeakable} == {PAD, BOS, CUE}
    assert PLAIN.unspeakable == []  # its one control token is its end
    assert {CHAT.decode([i]) for i in CHAT.unspeakable} == {"<|endoftext|>", "<|im_start|>"}


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


def test_a_turns_end_may_stand_on_a_line_of_its_own() -> None:
    tokens = other_end(CHATML.replace("<|im_end|>", "\n<|im_end|>"))
    end = tokens.tokenizer.convert_tokens_to_ids("<|im_end|>")
    said = [*tokens.encode("hello\n"), end]
    assert tokens.ends(said) and tokens.reply_text(said) == "hello\n"
    view = converse(tokens, "one", [])
    view.cue()
    view.reply(said, Kind.SPEECH)
    assert tokens.decode(view.stream.tokens).endswith("assistant\nhello\n<|im_end|>\n")


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


def test_a_span_of_characters_is_a_range_of_tokens() -> None:
    tokens = small_tokens()
    ids = tokens.encode("[message] 10 hats [END]")  # [message] | " 10" | " hats" | " [END]"
    assert len(ids) == 4
    assert tokens.within(ids, (10, 17)) == (1, 3)
    assert tokens.within(ids, (10, 12)) == (1, 2)
    assert tokens.within(ids, (13, 15)) == (2, 3)
    assert tokens.within(ids, (0, 23)) == (0, 4)
    assert tokens.within(ids, (0, 0)) == tokens.within(ids, (5, 5)) == (0, 0)


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


# --- Streams ---


def converse(tokens: Tokens, opening: str, talk: list[tuple[str, str]]) -> View:
    """A view of a game: an opening, then replies (a) and what is heard between them (u)."""
    view = View(tokens)
    view.observe(opening, (), 0)
    for step, (who, text) in enumerate(talk):
        if who == "u":
            view.observe(text, (), step)
        else:
            view.cue()
            view.reply(tokens.encode(text), Kind.SPEECH)
    return view


CONTENT = st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1, max_size=20).map(
    lambda s: s.strip() or "x"
)


@pytest.mark.parametrize("template", TEMPLATES)
@given(opening=CONTENT, exchanges=st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=4))
@settings(max_examples=50)
def test_a_stream_is_what_the_chat_template_renders(
    template: str, opening: str, exchanges: list[tuple[str, str]]
) -> None:
    tokens = CHAT if template == "chatml" else NO_SYSTEM_TOKENS
    first = "system" if template == "chatml" else "user"
    talk = [pair for said, heard in exchanges for pair in (("a", said), ("u", heard))]
    chat = [(first, opening), *(("assistant" if who == "a" else "user", text) for who, text in talk)]
    view = converse(tokens, opening, talk)

    def rendered(until: int, cue: bool) -> str:
        messages = [{"role": role, "content": text} for role, text in chat[:until]]
        return tokens.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=cue)

    assert tokens.decode(view.stream.tokens) == rendered(len(chat), cue=False)
    for until in range(1, len(chat) + 1, 2):  # also where each reply was due
        part = converse(tokens, opening, talk[: until - 1])
        part.cue()
        assert tokens.decode(part.stream.tokens) == rendered(until, cue=True)
        assert view.stream.tokens[: len(part.stream)] == part.stream.tokens or until == len(chat)


NO_SYSTEM_TOKENS = hf_tokens(NO_SYSTEM)

SAID = "[message] hi [END]"
READ = [  # white space at texts' ends, and none
    ("Pool: 1 book.\n", "Partner: no\n", "Partner: ok\n"),
    ("Pool", "no", "ok"),
    ("\n\nPool", " \n", "\nA\n \nB  \n\n"),
    (" x ", "\t\ty", "\u3000z\u00a0\n"),
]


def ours_and_theirs(tokens: Tokens, opening: str, texts: Sequence[str]) -> Iterator[tuple[list[int], list[int]]]:
    """A stream, and the ids of what the template renders, wherever a reply is due; the opening is this role's."""
    view, chat = View(tokens), []
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


def test_white_space_that_control_tokens_take_away_is_not_read() -> None:
    """As Phi-3's do with what is behind them; here also with what is before."""
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
    """What changes texts within, fails, leaves them out, or is none."""
    with pytest.raises(UserError, match=r"does not keep the turns apart.*model\.name"):
        hf_tokens(template_of(written))


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma3-270m"])
def test_published_tokenizers_write_what_their_templates_render(name: str) -> None:
    """Their own template, and for want of one such as those of its family."""
    folder = MODELS / name
    if not (folder / "tokenizer.json").exists():
        pytest.skip(f"needs a pretrained model's tokenizer: no folder {folder}; set PRETRAINED to the folder around it")
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    if tokenizer.chat_template is None:
        template, _ = FAMILIES["the system joins the first user"]
        tokenizer.chat_template = template.replace("|im_start|", "start_of_turn").replace("|im_end|", "end_of_turn")
    tokens = Tokens(tokenizer)
    for texts in READ:
        for ours, theirs in ours_and_theirs(tokens, "system" if "smollm2" in name else "user", texts):
            assert ours == theirs, (tokens.decode(ours), tokens.decode(theirs))


@pytest.mark.parametrize("template", TEMPLATES)
def test_turn_marks_are_the_templates_control_tokens(template: str) -> None:
    tokens = hf_tokens(TEMPLATES[template])
    start, end = tokens.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    view = converse(tokens, "one", [("a", "two"), ("u", "three")])
    assert view.stream.tokens.count(start) == view.stream.tokens.count(end) == 3
    assert view.stream.tokens.count(tokens.tokenizer.bos_token_id) == (template == "no_system")


def test_the_end_of_a_finished_conversation_is_no_mark_between_turns() -> None:
    tokens = other_end(FINISHED)
    view = converse(tokens, "one", [("a", "two"), ("u", "three")])
    view.cue()
    assert tokens.decode(view.stream.tokens) == (
        "<|im_start|>system\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"
        "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("end", ["<|im_end|>", "<|return|>"])
def test_turns_are_closed_as_in_the_middle_of_a_conversation(end: str) -> None:
    tokenizer = hf_tokenizer(LAST)
    tokenizer.add_tokens([AddedToken("<|return|>", special=True)])
    tokenizer.eos_token = end
    tokens, chatml = Tokens(tokenizer), hf_tokens(CHATML)
    assert tokens.format == chatml.format
    closing, last = tokenizer.convert_tokens_to_ids(["<|im_end|>", end])
    assert tokens.eos_ids == {closing, last}


def test_a_line_break_that_the_last_turn_lacks_is_written_once() -> None:
    """As in Falcon 3's: a reply's end and the line break behind it are one mark."""
    template = ROLES.replace(
        "{{ eos_token }}\n",
        "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
        "{% if message['role'] != 'assistant' or not loop.last %}{{ '\n' }}{% endif %}",
    )
    tokens = hf_tokens(template)
    view = View(tokens)
    view.observe("one", (Question("how many?", NUMBERS[:10], "3"),), 0)
    view.cue()
    view.reply(tokens.encode("two"), Kind.SPEECH)
    view.observe("three", (), 1)
    view.observe("four", (), 1)
    end = tokens.tokenizer.eos_token
    assert tokens.decode(view.stream.tokens) == (
        f"<|system|>\none\n<|user|>\nhow many?\n<|assistant|>\n{end}\n<|assistant|>\ntwo{end}\n"
        "<|user|>\nthree\n<|user|>\nfour\n"
    )


def test_thoughts_that_only_the_last_reply_is_shown_with_are_no_hindrance() -> None:
    tokens, chatml = hf_tokens(THINKING), hf_tokens(CHATML)
    assert (tokens.format.first, tokens.format.heard) == (chatml.format.first, chatml.format.heard)
    assert tokens.format.after_reply == chatml.format.after_reply
    assert tokens.decode(tokens.format.cue) == "<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize("count", [2, 4])
def test_a_template_that_writes_later_turns_otherwise_is_refused(count: int) -> None:
    """Its marks cannot be put together to what it renders."""
    counted = CHATML.replace("<|im_end|>", f"{{% if loop.index > {count} %}}<|endoftext|>{{% endif %}}<|im_end|>")
    unclosed = NO_SYSTEM.replace("<|im_end|>\n", "{{ '<|im_end|>\n' if not loop.last else '<|endoftext|>\n' }}")
    for template in (counted, unclosed):
        with pytest.raises(UserError, match=r"does not keep the turns apart.*model\.name"):
            hf_tokens(template)


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


def test_a_model_that_ends_its_own_turn_is_not_ended_twice() -> None:
    for text in ("hello", ""):
        ours, its_own = (converse(CHAT, "one", []) for _ in range(2))
        for view, ids in ((ours, CHAT.encode(text)), (its_own, [*CHAT.encode(text), *CHAT.eos_ids])):
            view.cue()
            if ids:
                view.reply(ids, Kind.SPEECH)
        if text:
            assert ours.stream.tokens == its_own.stream.tokens
            assert ours.stream.kinds != its_own.stream.kinds  # who wrote the end is on record
        assert CHAT.decode(its_own.stream.tokens).endswith(f"assistant\n{text}<|im_end|>\n")


def test_a_small_models_stream_is_written_as_it_is_meant() -> None:
    tokens = small_tokens()
    question = Question("<books?>", NUMBERS, "3")
    view = View(tokens)
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
        view = View(tokens)
        view.observe("", (Question("books and hats?", NUMBERS[:10], "3"),), 0)
        assert "books and hats?" in tokens.decode(view.stream.tokens)


def test_a_small_model_reads_listings_as_they_are() -> None:
    tokens = small_tokens()
    view = View(tokens)
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
    view = View(PLAIN)
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
    view = View(CHAT)
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
    legal = view.cue(["go south", "do task"])
    who = "assistant" if template == "chatml" else "model"
    assert tokens.decode(view.stream.tokens) == (
        f"{before}<|im_start|>user\nA) go south\nB) do task<|im_end|>\n<|im_start|>{who}\n"
    )
    assert set(view.stream.kinds[-len(tokens.format.cue) - 10 :]) == {Kind.OBSERVATION}
    view.reply(legal[:1], Kind.CHOICE)
    assert tokens.decode(view.stream.tokens).endswith(f"{who}\nA<|im_end|>\n")
    before = tokens.decode(view.stream.tokens)
    view.cue(["1", "2"])  # which stand for themselves
    assert tokens.decode(view.stream.tokens) == f"{before}<|im_start|>{who}\n"


def test_options_are_listed_before_the_cue_where_letters_stand_for_them() -> None:
    tokens = small_tokens()
    view = View(tokens)
    view.observe("cut", (), 0)
    legal = view.cue(["5", "7"])
    assert tokens.decode(view.stream.tokens) == f"{BOS}cut{CUE}"
    assert [tokens.decode([i]) for i in legal] == [" 5", " 7"]
    view.reply(legal[:1], Kind.CHOICE)
    legal = view.cue(["run away", "wait"])
    assert tokens.decode(view.stream.tokens).endswith(f"\nA) run away\nB) wait{CUE}")
    assert [tokens.decode([i]).strip() for i in legal] == ["A", "B"]
    assert view.cue() == ()


def test_a_reply_never_follows_the_models_own_turn_where_nothing_cues_it() -> None:
    tokens = hf_tokens(UNCUED)
    bos, eos = tokens.tokenizer.bos_token, tokens.tokenizer.eos_token
    question = Question("how many?", NUMBERS[:10], "3")
    view = View(tokens)
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
    view.cue(["go south", "do task"])  # whose listing is the turn between
    assert tokens.decode(view.stream.tokens).endswith(f"[INST] four [/INST]{eos}[INST] A) go south\nB) do task [/INST]")


def test_a_stream_without_cues_is_what_the_chat_template_renders() -> None:
    tokens = hf_tokens(UNCUED)
    view = converse(tokens, "one", [("a", "two"), ("u", "three"), ("a", ""), ("u", "five"), ("a", "six")])
    chat = [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", ""), ("user", "five"),
            ("assistant", "six")]  # fmt: skip
    messages = [{"role": role, "content": text} for role, text in chat]
    assert tokens.decode(view.stream.tokens) == tokens.tokenizer.apply_chat_template(messages, tokenize=False)
