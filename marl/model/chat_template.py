"""Reads the marks between turns off a chat template, by rendering it around texts that are known.

What this module leaves out: tokens. A stream is written turn by turn from the marks (tokens.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

# Put before a template that asks for the date: a run that goes on tomorrow must read what it has read today. The line
# break is the block's own, which the template's environment takes away.
SAME_DAY = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}\n"
OUTER = "\n \n"  # white space put around texts, to see what a template takes away
# What rendering may raise: a template is somebody's code, made for other conversations.
UNREADABLE = (TemplateError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError)

Chat = Sequence[tuple[str, str]]  # roles and texts
Ends = tuple[str | None, str | None]  # characters that are taken off a text's left and right end; None: all white space


@dataclass(frozen=True)
class Marks:
    """What a template writes before and after texts, and takes off their ends. Replies stay as they are."""

    first: tuple[str, str]  # around the opening
    heard: tuple[str, str]  # around what is heard later
    after_reply: str
    cue: str  # before a reply that is due
    strip_first: Ends = ("", "")
    strip_heard: Ends = ("", "")

    def render(self, chat: Chat, rendered: str) -> bool:
        """Whether a conversation, as the template renders it, is these marks with the texts between them.

        What opens earlier replies is not looked at: some templates show these without the thoughts that they cue.
        """
        rest = rendered
        for i, (role, text) in enumerate(chat):
            if role == "assistant":
                _, said, rest = rest.partition(text + self.after_reply)
                if not said:
                    return False
            else:
                (before, after), ends = (self.heard, self.strip_heard) if i else (self.first, self.strip_first)
                heard = before + strip(text, ends) + after
                if not rest.startswith(heard):
                    return False
                rest = rest.removeprefix(heard)
        return rest == self.cue


def strip(text: str, ends: Ends) -> str:
    """The text without the white space that a template takes off its ends."""
    return text.lstrip(ends[0]).rstrip(ends[1])


def read_marks(tokenizer: PreTrainedTokenizerBase, opening: str) -> Marks:
    """The marks of a tokenizer's chat template, in conversations whose first words are the role `opening`'s.

    Raises one of UNREADABLE where the template does not render such conversations, or not as marks between texts.
    """
    template, closing = tokenizer.get_chat_template(), ""
    if "strftime_now" in template:
        template = SAME_DAY + template

    def render(chat: Chat, cue: bool = False) -> str:
        messages = [{"role": role, "content": text} for role, text in chat]
        text = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=cue, enable_thinking=False
        )
        return str(text) if cue else str(text).removesuffix(closing)

    s, u, a, v, b, w = (f"{letter}x{letter}\n \n{letter}" for letter in "SUAVBW")
    talk = [(opening, s), ("user", u), ("assistant", a), ("user", v)]
    if opening == "user":
        del talk[1]
    whole, part, end = render(talk), render(talk[:-1]), tokenizer.eos_token or ""
    if not whole.startswith(part) and whole.startswith(part.removesuffix(end)):
        closing = end  # of a finished conversation, gone once it goes on
    before_first, after_first = render(talk[:1]).split(s)
    after_reply = render(talk[:-1]).split(a)[1]
    between, after_heard = render(talk).split(a)[1].split(v)
    cue = render(talk, cue=True).split(v)[1].removeprefix(after_heard)
    ways = [(after_reply, between.removeprefix(after_reply))]
    if opening == "system":  # the last turn may be closed otherwise than those before it
        before_heard = render(talk).split(s)[1].split(u)[0].removeprefix(after_first)
        ways.append((between.removesuffix(before_heard), before_heard))

    # Longer conversations tell whether their turns are the marks, put together: also where the first reply follows on
    # the opening, and where texts have white space around them.
    longer = [*talk, ("assistant", b), ("user", w)]
    bare = [longer, [longer[0], *longer[-4:]]]
    padded = [[(role, text if role == "assistant" else OUTER + text + OUTER) for role, text in chat] for chat in bare]
    rendered = [(chat, render(chat, cue=True)) for chat in (*bare, *padded)]
    trims: tuple[str | None, ...] = ("", None, "\n")
    ends: list[Ends] = [(first, last) for first in trims for last in trims]
    for (after_reply, before_heard), strip_first, strip_heard in product(ways, ends, ends):
        marks = Marks(
            (before_first, after_first), (before_heard, after_heard), after_reply, cue, strip_first, strip_heard
        )
        if all(marks.render(*each) for each in rendered):
            return marks
    raise ValueError("what the template renders is not its marks with the texts between them")
