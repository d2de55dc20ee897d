"""What every game shares: the kinds of turn, belief questions, the text spaces and how text is made to fit them."""

from __future__ import annotations

import errno
import os
import stat
import string
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from gymnasium import spaces

END = "[END]"  # a spoken reply ends here; whatever follows is ignored
MOST_BYTES = 1 << 26  # of a file that settings name


class TurnKind(IntEnum):
    """What an observation asks of its agent."""

    WAIT = 0  # any action is ignored
    CHOOSE = 1  # reply with one of `options`, word for word
    SPEAK = 2  # reply with free text


@dataclass(frozen=True)
class Question:
    """A belief question: its text, the possible answers, and the true one (a member of `candidates`).

    Questions go to trainers through `infos`. The answer is hidden from the agent and never enters an observation.
    `also` are further candidates that are as true: belief in any of the true ones is belief in the truth.
    """

    text: str
    candidates: tuple[str, ...]
    answer: str
    also: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for answer in (self.answer, *self.also):
            if answer not in self.candidates:
                raise ValueError(f"answer {answer!r} is not one of the candidates {self.candidates}")
        if len({self.answer, *self.also}) <= len(self.also):
            raise ValueError(f"answers {(self.answer, *self.also)} must be different ones")

    @property
    def answer_index(self) -> int:
        return self.candidates.index(self.answer)

    @property
    def also_indices(self) -> tuple[int, ...]:
        return tuple(map(self.candidates.index, self.also))


# Printable ASCII, line breaks, Latin-1 letters and signs, typographic quotes and dashes, and the replacement character.
REPLACEMENT = "\ufffd"
CHARSET = frozenset(string.printable[:95] + "\n" + "".join(map(chr, range(0xA1, 0x100))) + "–—‘’“”…€" + REPLACEMENT)


def clean(text: str, max_length: int) -> str:
    """Makes any string a member of a text space: other characters become U+FFFD, the rest is cut at `max_length`."""
    return "".join(c if c in CHARSET else REPLACEMENT for c in text[:max_length])


def observation_space(max_text: int, max_options: int, max_option: int = 64) -> spaces.Dict:
    """`Dict(text, turn, options)`; lengths in characters. `options` is empty unless `turn` is CHOOSE."""
    return spaces.Dict(
        text=spaces.Text(max_text, min_length=0, charset=CHARSET),
        turn=spaces.Discrete(len(TurnKind)),
        options=spaces.Sequence(spaces.Text(max_option, min_length=0, charset=CHARSET)),
    )


def action_space(max_reply: int) -> spaces.Text:
    """Replies that `sample` draws. `step` accepts any other string too."""
    return spaces.Text(max_reply, min_length=0, charset=CHARSET)


def check_file(path: str | Path) -> None:
    """OSError for what is no plain file of a sane size: a pipe or a device might never end."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "no plain file", str(path))
    if found.st_size > MOST_BYTES:
        raise OSError(errno.EFBIG, f"more than {MOST_BYTES:,} bytes", str(path))
