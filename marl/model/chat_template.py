"""Reads the marks between turns off a chat template by rendering it around known texts.

Left out: tokens. tokens.py writes a stream turn by turn from the marks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product, takewhile

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

# Prepended to a template that asks for the date: a run that is resumed tomorrow must read the same text.
SAME_DAY = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}\n"
OUTER = "\n \n"  # white space around texts, to see what a template strips
# Errors of rendering: a template is somebody's code, made for other conversations.
UNREADABLE = (TemplateError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError)

Chat = Sequence[tuple[str, str]]  # roles and texts
Ends = tuple[str | None, str | None]  # characters stripped off a text's left and right end; None: all white space


@dataclass(frozen=True)
class Marks:
    """Text that a template writes before and after texts, and characters that it strips. Replies stay as they are."""

    first: tuple[str, str]  # around the opening
    heard: tuple[str, str]  # around what is heard later
    after_reply: str
    cue: str  # before a reply that is due
    strip_first: Ends = ("", "")
    strip_heard: Ends = ("", "")

    def render(self, chat: Chat, rendered: str) -> bool:
        """Checks whether a rendered conversation is these marks with the texts between them.

        The opening of earlier replies is ignored: some templates leave out the thoughts that they cue.
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
    """Strips the characters that a template takes off a text's ends."""
    return text.lstrip(ends[0]).rstrip(ends[1])


def read_marks(tokenizer: PreTrainedTokenizerBase, opening: str) -> Marks:
    """Reads the marks of a tokenizer's chat template in conversations that begin with the role `opening`.

    Raises one of UNREADABLE if the template does not render such conversations as marks between texts.
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
        closing = end  # of a finished conversation
    if whole == render(talk, cue=True):  # none is asked for, or always: what follows a reply but does not go on so
        last, turned = (tokenizer.tokenize(text.split(a)[1]) for text in (part, whole))
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(last, turned, strict=False)))
        closing = tokenizer.convert_tokens_to_string(last[shared:]) or closing
    before_first, after_first = render(talk[:1]).split(s)
    after_reply = render(talk[:-1]).split(a)[1]
    between, after_heard = render(talk).split(a)[1].split(v)
    cue = render(talk, cue=True).split(v)[1].removeprefix(after_heard)
    longer = [*talk, ("assistant", b), ("user", w)]
    opening_of_reply = render(longer).split(v)[1].split(b)[0].removeprefix(after_heard)
    ways = [(after_reply, between.removeprefix(after_reply))]
    if opening == "system":  # the last turn may be closed differently
        before_heard = render(talk).split(s)[1].split(u)[0].removeprefix(after_first)
        ways.append((between.removesuffix(before_heard), before_heard))

    # Longer conversations verify the marks: also where the first reply follows the opening, and with white space.
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
            # A mark that stands before replies and is not cued would be the model's to write: `<|START_RESPONSE|>`.
            return replace(marks, cue=opening_of_reply) if opening_of_reply.startswith(cue) else marks
    raise ValueError("what the template renders is not its marks with the texts between them")
