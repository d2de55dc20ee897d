"""Chat completions: words, thoughts, and answers that are neither."""

import json
import time
from typing import Any

import pytest

from marl.agents.completion import Answer, Lost, read_answer, without_thoughts

SAID = "[message] I'd like the hats. [END]"


@pytest.mark.parametrize(
    ("content", "said", "thought"),
    [
        (SAID, SAID, ""),
        (f"<think>\nThey want books.\n</think>\n\n{SAID}", SAID, "They want books."),
        (f"  <thinking>Books?</thinking> {SAID}", SAID, "Books?"),
        (f"[THINK]Books?[/THINK]{SAID}\n", SAID, "Books?"),
        (f"<think>a</think><think>b</think>\n<think>\nc</think>{SAID}", SAID, "a\nb\nc"),
        (f"They want books.\n</think>\n\n{SAID}", SAID, "They want books."),  # the template began the block
        (f"They want books.</think>\n{SAID}", SAID, "They want books."),
        (f"They want books.\n</think>{SAID}", SAID, "They want books."),
        ("<think>They want", "", "They want"),  # its tokens were spent
        ("<think></think>", "", ""),
        (f"<think>a <think> b</think>\n{SAID}", SAID, "a <think> b"),
        (f"<think>a\n<think>b</think>\nc\n</think>\n{SAID}", SAID, "a\n<think>b\nc"),
        ("[message] hi\n<think>hm</think>\nthere [END]", "[message] hi\n\nthere [END]", "hm"),
        (f"{SAID}\n<think>Was that wise?", SAID, "Was that wise?"),
        # words like others
        ("[message] what is <think>? [END]", "[message] what is <think>? [END]", ""),
        ("[message] a </think> b [END]", "[message] a </think> b [END]", ""),
        ("[message] <think>no</think> [END]", "[message] <think>no</think> [END]", ""),
        ("[message] I <thinker> [END]", "[message] I <thinker> [END]", ""),
    ],
)
def test_thoughts_are_no_words(content: str, said: str, thought: str) -> None:
    assert without_thoughts(content) == (said, thought)
    found = read_answer(json.dumps({"choices": [{"message": {"content": content}}]}))
    assert found == Answer(said, None, thought)


def test_thoughts_are_parted_in_time_that_grows_with_their_length() -> None:
    """An endpoint may send megabytes of tags, of white space, and of both."""
    for piece in ("<think>", "</think>", "x<think>", "x</think>", " ", "\n", " \n", "<think></think>", "</think>\n"):
        text = piece * (2**19 // len(piece))
        began = time.process_time()
        without_thoughts(text)
        assert time.process_time() - began < 2, piece


def test_what_an_answer_is() -> None:
    def body(**choice: Any) -> str:
        return json.dumps({"choices": [choice], "usage": {"total_tokens": 5}})

    assert read_answer(body(message={"content": "hi"})) == Answer("hi", 5)
    assert read_answer(body(message={"content": ""})) == Answer("", 5)  # the game corrects it
    assert read_answer(body(message={"content": "a\ud800b"})) == Answer("a?b", 5)
    assert read_answer(body(message={"content": "x" * 20_000})) == Answer("x" * 10_000, 5)
    assert read_answer(body(message={"content": "hi"}, finish_reason="content_filter")) is Lost.DECLINED
    assert read_answer('{"choices": [{"message": {"content": "hi"}}], "usage": {"total_tokens": -1}}') == Answer("hi")
    assert read_answer('{"choices": [{"message": {"content": "hi"}}], "usage": 3}') == Answer("hi")
    for tokens in (10**10, 10**4000, -(10**400), 1e400, float("nan"), True, "5", [5], None):
        counted = json.dumps({"choices": [{"message": {"content": "hi"}}], "usage": {"total_tokens": tokens}})
        assert read_answer(counted) == Answer("hi"), tokens
    for thought in (7, None, [], {"a": 1}, ["a", 3], True):
        assert isinstance(read_answer(body(message={"content": "hi", "reasoning_content": thought})), Answer), thought
    assert read_answer(body(message={"content": "hi", "reasoning": "a\ud800"})) == Answer("hi", 5, "a?")
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "hi"}]
    assert read_answer(body(message={"content": parts})) == Answer("hi", 5, "hm")
    assert read_answer(body(message={"content": parts[:1]})) == Answer("", 5, "hm")
    for content in ([], [1], ["hi"], [{"type": "text"}], [{"type": "text", "text": 7}], {}, True, 1.5):
        assert read_answer(body(message={"content": content})) is Lost.NONSENSE, content
    assert read_answer(body(message={"content": None}, finish_reason="tool_calls")) is Lost.NONSENSE
    assert read_answer(body(message={"content": "hi"}, finish_reason=["length"])) == Answer("hi", 5)
    for text in ("NaN", "[" * 100_000, '{"a":' * 100_000, "\x00", "1" * 10_000, '{"choices": "x"}'):
        assert read_answer(text) is Lost.NONSENSE, text[:20]
