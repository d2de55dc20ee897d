"""The parts that all games share: kinds of turn, styles of wording, belief questions, seeds, and the text spaces."""

from __future__ import annotations

import errno
import operator
import os
import stat
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils import parallel_to_aec

P = ParamSpec("P")

END = "[END]"  # a spoken reply ends here; whatever follows is ignored
MOST_BYTES = 1 << 26  # of a file that settings name


class TurnKind(IntEnum):
    """What an observation asks of its agent."""

    WAIT = 0  # any action is ignored
    CHOOSE = 1  # reply with one of `options`, word for word
    SPEAK = 2  # reply with free text


class Style(StrEnum):
    """How observations are worded. Both styles say the same of an episode.

    Natural style also explains the rules at the start. Compact style leaves them out: they never change.
    """

    NATURAL = "natural"  # sentences, for people and for models that read English
    COMPACT = "compact"  # few tokens, for small models that are trained here


def read_styles(options: Mapping[str, Any], agents: Sequence[str], style: Style) -> dict[str, Style]:
    """The style that each agent reads: the reset option `styles` by agent, else the game's own.

    Raises ValueError for agents or styles that do not exist.
    """
    own = options.get("styles", {})
    known = isinstance(own, Mapping) and set(own) <= set(agents) and all(s in tuple(Style) for s in own.values())
    if not known:
        raise ValueError(f"The reset option 'styles' must give agents natural or compact, got {own!r}.")
    return {agent: Style(own.get(agent, style)) for agent in agents}


def read_seed(seed: object) -> int:
    """A seed as an int: any whole number of at least 0, NumPy's too. Raises ValueError for anything else."""
    try:
        number = -1 if isinstance(seed, bool | np.bool_) else operator.index(seed)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"seed must be a whole number of at least 0, got {seed!r}.")
    return number


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


def aec(
    make: Callable[P, ParallelEnv[str, dict[str, Any], str]],
) -> Callable[P, AECEnv[str, dict[str, Any], str]]:
    """The maker of a game's AEC form, with the settings of its parallel form. `step` accepts any string there too."""

    @wraps(make, assigned=("__doc__",), updated=())
    def env(*args: P.args, **settings: P.kwargs) -> AECEnv[str, dict[str, Any], str]:
        return parallel_to_aec(make(*args, **settings))

    return env
