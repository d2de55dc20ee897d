"""The base class of all games, and how to write a new one.

A game is a subclass of `TextGame` that gives its agents and limits to `__init__`, and has `begin` and `play`. Trainers
also need `facts` (a property: what is hidden from the players; with `roles` by agent where there are several) and
`privileged(agent)` (numbers that only a privileged critic sees). To be found by name, the class stands as
`parallel_env` in `envs/NAME_v0.py`, beside `COMPACT_TOKENS`, strings that a tokenizer keeps whole;
marl/rollout/games.py lists what else such a module may have. The smallest game is `Hint` in tests/marl/hint.py.
"""

from __future__ import annotations

import errno
import operator
import os
import stat
import string
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, ClassVar, ParamSpec

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils import parallel_to_aec

P = ParamSpec("P")

END = "[END]"  # a spoken reply ends here; whatever follows is ignored
MAX_BYTES = 1 << 26  # largest file that a setting may name


class TurnKind(IntEnum):
    """The demand of an observation on its agent."""

    WAIT = 0  # any action is ignored
    CHOOSE = 1  # reply with one of `options`, word for word
    SPEAK = 2  # reply with free text


class Style(StrEnum):
    """Wording of observations. All styles say the same of an episode; compact style leaves the rules out."""

    NATURAL = "natural"  # sentences, for people and for models that read English
    BRIEF = "brief"  # fewer words, for models that read English
    COMPACT = "compact"  # few tokens, for small models that are trained here


@dataclass(frozen=True)
class Question:
    """A belief question: its text, the possible answers, and the true one (a member of `candidates`).

    Trainers get it through `infos`; the answer never enters an observation.

    also: further true candidates.
    cued: the question reads like a choice among the candidates: its text, then the cue to reply. If an observation ends
    with this text, the choice that is due is the question.
    letters: the game has said that A, B, ... stand for the candidates.
    later: a name, if the game itself does not know the answer yet (`answer` is empty). `View.answers` gives the answer
    under this name once it is known (`answered`).
    """

    text: str
    candidates: tuple[str, ...]
    answer: str
    also: tuple[str, ...] = ()
    cued: bool = False
    letters: bool = False
    later: str = ""

    def __post_init__(self) -> None:
        if self.later and not self.answer:
            return
        answers = (self.answer, *self.also)
        if not set(answers) <= set(self.candidates) or len(set(answers)) < len(answers):
            raise ValueError(f"answers {answers} must be different ones of the candidates {self.candidates}")

    @property
    def answer_index(self) -> int:
        return self.candidates.index(self.answer)

    def answered(self, answers: Mapping[str, str]) -> Question | None:
        """The question with its answer; None if these `answers` (by `later`) have none. Of other questions, itself."""
        if self.answer or not self.later:
            return self
        answer = answers.get(self.later, "")
        return replace(self, answer=answer) if answer in self.candidates else None

    @property
    def also_indices(self) -> tuple[int, ...]:
        return tuple(map(self.candidates.index, self.also))


# --- A game -----------------------------------------------------------------------------------------------------------
@dataclass
class View:
    """One agent's side of a step: its observation, the questions to it, and what its last action came to."""

    role: str
    text: str = ""  # what is new
    turn: TurnKind = TurnKind.WAIT
    options: tuple[str, ...] = ()  # to choose from; empty unless `turn` is CHOOSE
    questions: tuple[Question, ...] = ()  # asked after this text
    truths: tuple[str, ...] = ()  # of `options`, those that are true, where the choice says what an agent believes
    error: str = ""  # why its last action was refused
    message: str = ""  # what the others heard of its last action
    span: tuple[int, int] = (0, 0)  # the characters of the action that `message` was made of
    entry: str = ""  # what its last action counted as, in a word of the game; "" where no reply was due
    answers: Mapping[str, str] = field(default_factory=dict)  # now known, to earlier questions by their `later`

    def observation(self) -> dict[str, Any]:
        return {"text": self.text, "turn": int(self.turn), "options": self.options}  # int: a member of Discrete

    def info(self) -> dict[str, Any]:
        names = ["role", "questions", "error", "message", "span", "entry"]
        names += [name for name in ("truths", "answers") if getattr(self, name)]
        return {name: getattr(self, name) for name in names}


@dataclass
class Step:
    """The result of `play`: views and rewards by agent, and at the end the outcome."""

    views: Mapping[str, View]
    rewards: Mapping[str, float]
    outcome: dict[str, Any] | None = None  # at the end: `how` it ended, its `winner` or None, and what else is told
    truncated: bool = False  # ended by a limit that players do not know of


Observations = dict[str, dict[str, Any]]
Infos = dict[str, dict[str, Any]]


class TextGame(ParallelEnv[str, dict[str, Any], str]):
    """A game in text as a PettingZoo parallel environment (see the top of this module).

    An observation is `Dict(text, turn, options)`, an action any string. `infos[agent]` has the other fields of `View`
    and, at the end, the `outcome`. The reset option `styles` gives agents a style of their own.
    """

    generator: ClassVar[Callable[..., Any]] = staticmethod(np.random.default_rng)  # makes `rng` from a seed

    def __init__(
        self,
        agents: Sequence[str],
        style: str = "compact",
        render_mode: str | None = None,
        *,
        max_text: int,  # characters of an observation
        max_reply: int,  # characters of the replies that `action_space` samples
    ) -> None:
        if style not in tuple(Style):
            raise ValueError(f"style must be one of {', '.join(Style)}, got {style!r}.")
        modes = self.metadata.get("render_modes", [])
        if render_mode not in (None, *modes):
            raise ValueError(f"render_mode must be None{''.join(f' or {m!r}' for m in modes)}, got {render_mode!r}.")
        self.style, self.render_mode = Style(style), render_mode
        self.possible_agents = list(agents)
        self.agents: list[str] = []
        self.styles = dict.fromkeys(agents, self.style)  # what each agent reads
        self._max_text, self._max_reply = max_text, max_reply
        self._rng: Any = None
        self._started = False

    @abstractmethod
    def begin(self, rng: Any, options: Mapping[str, Any]) -> Mapping[str, View]:
        """Draws an episode and returns what each agent sees.

        `options` fix parts of it, unknown ones are ignored. Raises ValueError for bad ones.
        """

    @abstractmethod
    def play(self, actions: Mapping[str, Any]) -> Step:
        """Plays one step. An action may be missing, and of any type."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observations, Infos]:
        """Starts an episode. Without a seed the generator goes on from where it stands."""
        options = options or {}
        self.styles = read_styles(options, self.possible_agents, self.style)
        if seed is not None or self._rng is None:
            self._rng = self.generator(None if seed is None else read_seed(seed))
        views = self.begin(self._rng, options)
        self.agents, self._started = list(self.possible_agents), True
        return _both(views)

    def step(
        self, actions: dict[str, Any]
    ) -> tuple[Observations, dict[str, float], dict[str, bool], dict[str, bool], Infos]:
        """Plays one step. After the end all five dicts are empty."""
        self.check_started()
        if not self.agents:
            return {}, {}, {}, {}, {}
        done = self.play(actions)
        observations, infos = _both(done.views)
        over = done.outcome is not None
        if over:
            self.agents = []
            for info in infos.values():
                info["outcome"] = done.outcome
        terminated = dict.fromkeys(self.possible_agents, over and not done.truncated)
        truncated = dict.fromkeys(self.possible_agents, over and done.truncated)
        return observations, dict(done.rewards), terminated, truncated, infos

    def check_started(self) -> None:
        if not self._started:
            raise RuntimeError("No game has been started: call reset() first.")

    # Spaces are made when asked for: a thousand games at once need no thousand spaces.
    @cached_property
    def observation_spaces(self) -> dict[str, spaces.Dict]:
        space = spaces.Dict(text=_text(self._max_text), turn=spaces.Discrete(3), options=spaces.Sequence(_text(64)))
        return dict.fromkeys(self.possible_agents, space)

    @cached_property
    def action_spaces(self) -> dict[str, spaces.Text]:
        return dict.fromkeys(self.possible_agents, _text(self._max_reply))

    def observation_space(self, agent: str) -> spaces.Dict:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Text:
        return self.action_spaces[agent]

    def render(self) -> Any:
        """The game so far, hidden parts included; None (with a warning) without a render mode."""
        if self.render_mode is None:
            modes = " or ".join(map(repr, self.metadata.get("render_modes", [])))
            gymnasium.logger.warn(f"render() draws nothing: make the environment with render_mode={modes}.")
            return None
        self.check_started()
        return self.draw()

    def draw(self) -> Any:
        """Draws the picture in `render_mode`. A game that names render modes has to write it."""
        raise NotImplementedError(f"{type(self).__name__} names render modes and draws none: write its draw()")

    def close(self) -> None:
        """Nothing to release."""


def _both(views: Mapping[str, View]) -> tuple[Observations, Infos]:
    return {a: view.observation() for a, view in views.items()}, {a: view.info() for a, view in views.items()}


def aec(make: Callable[P, ParallelEnv[str, dict[str, Any], str]]) -> Callable[P, AECEnv[str, dict[str, Any], str]]:
    """The maker of a game's AEC form, with the settings of its parallel form. `step` accepts any string there too."""

    @wraps(make, assigned=("__doc__",), updated=())
    def env(*args: P.args, **settings: P.kwargs) -> AECEnv[str, dict[str, Any], str]:
        return parallel_to_aec(make(*args, **settings))

    return env


# --- Reading settings and options -------------------------------------------------------------------------------------
def read_styles(options: Mapping[str, Any], agents: Sequence[str], style: Style) -> dict[str, Style]:
    """The style that each agent reads: the reset option `styles` by agent, else the game's own.

    Raises ValueError for unknown agents or styles.
    """
    own = options.get("styles", {})
    if not isinstance(own, Mapping) or not set(own) <= set(agents) or any(s not in tuple(Style) for s in own.values()):
        raise ValueError(f"The reset option 'styles' must give agents natural, brief or compact, got {own!r}.")
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


def check_whole(name: str, value: object, least: int, most: int) -> None:
    """Raises ValueError, naming the setting, unless the value is an int within the bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} must be a whole number from {least:,} to {most:,}, got {value!r}.")


def check_number(name: str, value: object, least: float, most: float) -> None:
    """Raises ValueError, naming the setting, unless the value is a number within the bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{name} must be a number from {least:g} to {most:g}, got {value!r}.")


def check_file(path: str | Path) -> None:
    """Raises OSError unless the path is a plain file of a sane size: a pipe or a device might never end."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "no plain file", str(path))
    if found.st_size > MAX_BYTES:
        raise OSError(errno.EFBIG, f"more than {MAX_BYTES:,} bytes", str(path))


# --- Text ------------------------------------------------------------------------------------------------------
# Printable ASCII, line breaks, Latin-1 letters and signs, typographic quotes and dashes, and the replacement character.
REPLACEMENT = "\ufffd"
CHARSET = frozenset(string.printable[:95] + "\n" + "".join(map(chr, range(0xA1, 0x100))) + "–—‘’“”…€" + REPLACEMENT)


def clean(text: str, max_length: int) -> str:
    """Makes any string a member of a text space: other characters become U+FFFD, the rest is cut at `max_length`."""
    return "".join(c if c in CHARSET else REPLACEMENT for c in text[:max_length])


def _text(max_length: int) -> spaces.Text:
    return spaces.Text(max_length, min_length=0, charset=CHARSET)
