"""Reads chat completions: words, thoughts, tokens, or why there is no answer. Never raises. chat.py sends requests."""

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

LONGEST_ANSWER = 10_000  # characters; the rest is dropped
LONGEST_THOUGHTS = 100_000  # the same of thoughts
MAX_TOKENS = 10**9  # of one answer; no endpoint counts more


class Lost(StrEnum):
    """Reasons why a request got no answer, after all tries."""

    TIMEOUT = "no answer in time"
    UNREACHABLE = "cannot be reached"
    KEY = "key refused"
    BUSY = "too many requests"
    STATUS = "error status"
    MOVED = "redirected elsewhere"
    NONSENSE = "not a chat completion"
    DECLINED = "declined to answer"
    BUDGET = "budget spent"
    ABSENT = "not among the kept answers"


@dataclass(frozen=True)
class Answer:
    """A model's answer."""

    text: str
    tokens: int | None = None  # prompt and answer together; None where the endpoint doesn't count
    thoughts: str = ""  # written for itself, before the answer or beside it
    cut: bool = False  # at the limit of tokens


def read_answer(body: str) -> Answer | Lost:
    """The first choice of a chat completion; NONSENSE for any other body, DECLINED for a filter's refusal.

    Thoughts stand in a field of their own, or within the content (`without_thoughts`). A model that thinks until its
    tokens are spent gives an empty answer.
    """
    try:
        found = json.loads(body)
        choice = found["choices"][0]
        message, usage = choice["message"], found.get("usage")
        content, refusal, why = message.get("content"), message.get("refusal"), choice.get("finish_reason")
        beside = _text(message.get("reasoning_content")) or _text(message.get("reasoning"))
        if isinstance(content, list):  # of parts, each with its type
            beside = "\n".join([beside, *(_text(part.get("thinking")) for part in content)]).strip()
            content = "".join(part["text"] for part in content if part.get("type") == "text") if content else None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return Lost.NONSENSE
    if refusal or why == "content_filter":
        return Lost.DECLINED
    cut = why == "length"
    if content is None and (cut or beside):
        content = ""
    if not isinstance(content, str):
        return Lost.NONSENSE
    text, within = without_thoughts(content)
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    counted = isinstance(tokens, int) and not isinstance(tokens, bool) and 0 <= tokens <= MAX_TOKENS
    thoughts = "\n".join(each for each in (beside, within) if each)
    return answer_of(text, tokens if counted else None, thoughts, cut)


TAG = re.compile(r"(^[ \t]*)?(?:<(/)?(?:think|thinking|thought)>|\[(/)?THINK\])[ \t]*", re.MULTILINE)


def without_thoughts(text: str) -> tuple[str, str]:
    """Parts a text into words and thoughts, `<think>...</think>`. The first or the last tag may be missing.

    A block begins a line, or follows another block. An end tag without a beginning, which some templates leave, stands
    at the edge of a line. Within a line the tags are words like others.
    """
    said, thoughts, start, thinking = [], [], 0, False
    for tag in TAG.finditer(text):
        begins_line = tag[1] is not None or tag.start() == start
        if tag[2] or tag[3]:
            if thinking or begins_line or text[tag.end() : tag.end() + 1] in ("", "\r", "\n"):
                thoughts.append(text[start : tag.start()])
                start, thinking = tag.end(), False
        elif begins_line and not thinking:
            said.append(text[start : tag.start()])
            start, thinking = tag.end(), True
    if not start:
        return text, ""
    (thoughts if thinking else said).append(text[start:])
    return "".join(said).strip(), "\n".join(filter(None, map(str.strip, thoughts)))


def _text(found: Any) -> str:
    """Text, or the texts of all parts of a list; empty for anything else."""
    parts = found if isinstance(found, list) else [found]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "\n".join(text for text in texts if isinstance(text, str))


def answer_of(text: str, tokens: int | None, thoughts: str, cut: bool) -> Answer:
    """Cuts an answer's texts to their limits and replaces half surrogate pairs, so that they can be sent again."""
    said, thought = (
        whole[:most].encode("utf-8", "replace").decode()
        for whole, most in ((text, LONGEST_ANSWER), (thoughts, LONGEST_THOUGHTS))
    )
    return Answer(said, tokens, thought, cut)
