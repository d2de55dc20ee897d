"""The PettingZoo environment."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from operator import index
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from pettingzoo import ParallelEnv

from envs.core import Style, TurnKind, action_space, observation_space, read_seed, read_styles
from envs.dond.replies import Message, Refused, parse_reply, proposal_text
from envs.dond.rules import (
    ITEMS,
    MAX_POINTS,
    Context,
    ContextSplit,
    Triple,
    claim_points,
    complementary,
    contexts,
    in_test,
    read_contexts,
    scores,
    undominated,
)
from envs.dond.texts import QUESTIONS, WORDING, passed_on, prompt

# --- The environment --------------------------------------------------------------------------------------------------
AGENTS = ("player_0", "player_1")
_MAX_TEXT = 3_000  # characters of an observation besides a message; the natural prompt is the longest
_MAX_TAGS = 20  # characters that tag and end marker add to a message


class Ending(StrEnum):
    """How a game ended. Only a deal gives points."""

    DEAL = "deal"
    MISMATCH = "mismatch"  # the two claims don't add up to the pool
    ABORT = "abort"  # too many refused replies in a row
    LIMIT = "limit"  # too many messages and proposals


@dataclass(frozen=True)
class Entry:
    """A line of the transcript: who, what (message, propose, error), and the text heard, claim or correction."""

    agent: str
    kind: str
    text: str


class DealOrNoDeal(ParallelEnv[str, dict[str, Any], str]):
    """The game as a PettingZoo parallel environment. One player at a time has turn SPEAK, the other has WAIT.

    Settings:
        objective: weight of the partner's points in a player's score, -1 to 1.
        contexts: a file of contexts to draw from, as `read_contexts` reads it; None draws from all valid ones.
        split: "all", "train" or "test" contexts (see `in_test`); "outside": the valid ones that the file has in
            neither order of the players, to choose settings on before its own games are played.
        style: wording of observations, "natural" or "compact"; the reset option `styles` gives agents others.
        max_entries: messages and proposals after which the game ends without a deal.
        max_errors: refused replies in a row after which it ends without a deal.
        max_message_chars: longer messages are cut there, and the speaker is told.
        render_mode: None or "ansi".

    Raises ValueError, naming the setting, for values outside these ranges.

    Every end is one of the rules, the limits too, so that games terminate and are never truncated.

    `reset(options=...)` knows `counts` and `values` (given together, seat order), `first` (seat number) and `styles`
    (by agent).
    `infos[agent]` holds `role`, `questions`, `error`, and of the agent's own last action `entry` ("message", "propose",
    "error" or ""), `message` (what the partner heard of it) and `span` (the characters of the action that this was);
    at the end also `outcome`, the same dict for both.
    """

    metadata = {"name": "dond_v0", "render_modes": ["ansi"], "is_parallelizable": True}  # noqa: RUF012

    def __init__(
        self,
        objective: float = 1.0,
        contexts: str | Path | None = None,
        split: str = "train",
        style: str = "compact",
        max_entries: int = 20,
        max_errors: int = 5,
        max_message_chars: int = 400,
        render_mode: str | None = None,
    ) -> None:
        if isinstance(objective, bool) or not isinstance(objective, int | float) or not -1 <= objective <= 1:
            raise ValueError(f"objective must be a number from -1 to 1, got {objective!r}.")
        if split not in tuple(ContextSplit):
            raise ValueError(f"split must be one of {', '.join(ContextSplit)}, got {split!r}.")
        if style not in tuple(Style):
            raise ValueError(f"style must be one of {', '.join(Style)}, got {style!r}.")
        for name, limit in (
            ("max_entries", max_entries),
            ("max_errors", max_errors),
            ("max_message_chars", max_message_chars),
        ):
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {limit!r}.")
        if render_mode not in (None, "ansi"):
            raise ValueError(f"render_mode must be None or 'ansi', got {render_mode!r}.")
        self.objective = float(objective)
        self.style = Style(style)
        self.max_entries, self.max_errors, self.max_message_chars = max_entries, max_errors, max_message_chars
        self.render_mode = render_mode
        self.possible_agents = list(AGENTS)
        self.agents: list[str] = []
        self.state_space = spaces.Box(-1.0, float(MAX_POINTS), (18,), np.float32)
        if split == ContextSplit.OUTSIDE and contexts is None:
            raise ValueError("split must be all, train or test where contexts is None, got 'outside': of which file?")
        self._pool = pool(contexts, split)
        if not self._pool:
            raise ValueError(f"split leaves no context of {contexts}, got {split!r}.")
        self._np_random: np.random.Generator | None = None
        self._context: Context | None = None

    # Made when asked for: a thousand games at once need no thousand spaces.

    @cached_property
    def observation_spaces(self) -> dict[str, spaces.Dict]:
        return {a: observation_space(_MAX_TEXT + self.max_message_chars, max_options=0) for a in AGENTS}

    @cached_property
    def action_spaces(self) -> dict[str, spaces.Text]:
        return {a: action_space(self.max_message_chars + _MAX_TAGS) for a in AGENTS}

    def observation_space(self, agent: str) -> spaces.Dict:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Text:
        return self.action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
        """Starts a game, drawn on from where the generator stands if no seed is given. ValueError for bad options."""
        styles = read_styles(options or {}, AGENTS, self.style)
        if seed is not None or self._np_random is None:
            self._np_random, _ = seeding.np_random(None if seed is None else read_seed(seed))
        drawn = self._pool[int(self._np_random.integers(len(self._pool)))]
        first = int(self._np_random.integers(2))
        self._context, self._first = _start(options or {}, drawn, first)

        self.agents = list(AGENTS)
        self._styles = tuple(styles.values())  # by seat
        self._mover = self._first
        self._claims: list[Triple | None] = [None, None]
        self._messages = self._proposals = self._errors = self._errors_in_a_row = 0
        self._outcome: dict[str, Any] | None = None
        self.transcript: list[Entry] = []
        texts = [
            prompt(self._context.counts, own, self.objective, style, self.max_entries, self.max_errors)
            for own, style in zip(self._context.values, self._styles, strict=True)
        ]
        return self._observations(texts), {agent: self._info(seat, asked=True) for seat, agent in enumerate(AGENTS)}

    def step(
        self, actions: dict[str, Any]
    ) -> tuple[
        dict[str, dict[str, Any]],
        dict[str, float],
        dict[str, bool],
        dict[str, bool],
        dict[str, dict[str, Any]],
    ]:
        """Plays the mover's reply; any other action is ignored, a missing one counts as an empty reply.

        After the end there is nothing to play, and all five dicts come back empty.
        """
        context = self._started()
        if not self.agents:
            return {}, {}, {}, {}, {}
        mover, partner = self._mover, 1 - self._mover
        pending = self._claims[partner] is not None
        parsed = parse_reply(actions.get(AGENTS[mover], ""), context.counts, pending, self._messages)

        words = [WORDING[style] for style in self._styles]  # by seat
        new: tuple[list[str], list[str]] = [], []  # the lines that each seat gets to read
        error = message = ""
        span = (0, 0)
        ending: Ending | None = None
        if isinstance(parsed, Refused):
            kind = "error"
            error = parsed.reason.value if self._styles[mover] is Style.COMPACT else parsed.correction
            new[mover].append(words[mover].error.format(error))
            self._log(mover, kind, error)
            self._errors += 1
            self._errors_in_a_row += 1
            if self._errors_in_a_row >= self.max_errors:
                ending = Ending.ABORT
        else:
            if isinstance(parsed, Message):
                kind = "message"
                message = passed_on(parsed.text, self.max_message_chars)
                span = (parsed.span[0], parsed.span[0] + len(message))
                new[partner].append(words[partner].message.format(message))
                if len(message) < len(parsed.text):
                    new[mover].append(words[mover].cut.format(len(message)))
                self._messages += 1
                self._log(mover, kind, message)
            else:
                kind = "propose"
                self._claims[mover] = parsed.claim
                self._proposals += 1
                self._log(mover, kind, proposal_text(parsed.claim))
                if not pending:
                    new[partner].append(words[partner].proposed)
                else:
                    agreed = complementary((self._claims[0], self._claims[1]), context.counts)
                    ending = Ending.DEAL if agreed else Ending.MISMATCH
            self._errors_in_a_row = 0
            self._mover = partner
            if ending is None and self._messages + self._proposals >= self.max_entries:
                ending = Ending.LIMIT

        reward = (0.0, 0.0)
        if ending:
            both = self._end(ending)
            reward = scores(both, self.objective)
            for seat in (0, 1):
                own = words[seat]
                new[seat].append(own.deal.format(both[seat], both[1 - seat]) if ending is Ending.DEAL else own.no_deal)
            self.agents = []
        infos = {agent: self._info(seat, asked=bool(message)) for seat, agent in enumerate(AGENTS)}
        infos[AGENTS[mover]].update(error=error, message=message, span=span, entry=kind)
        return (
            self._observations(["".join(f"{line}\n" for line in lines) for lines in new]),
            dict(zip(AGENTS, reward, strict=True)),
            dict.fromkeys(AGENTS, ending is not None),
            dict.fromkeys(AGENTS, False),
            infos,
        )

    @property
    def facts(self) -> dict[str, Any]:
        """What is hidden from the players, for analysts: counts, values in seat order, first mover, objective."""
        context = self._started()
        return {
            "counts": context.counts,
            "values": context.values,
            "first": self._first,
            "objective": self.objective,
        }

    def privileged(self, agent: str) -> tuple[float, ...]:
        """What only a privileged critic sees at this seat: the partner's values of the items, one-hot, 3 x 11."""
        values = self._started().values[1 - AGENTS.index(agent)]
        return tuple(float(v == value) for value in values for v in range(MAX_POINTS + 1))

    def state(self) -> np.ndarray:
        """The hidden state, shape (18,): counts, both players' values, both claims (-1 where none), first mover, mover,
        objective. Mover is -1 after the end."""
        context = self._started()
        claims = [(-1, -1, -1) if claim is None else claim for claim in self._claims]
        mover = self._mover if self.agents else -1
        return np.array(
            [*context.counts, *context.values[0], *context.values[1], *claims[0], *claims[1],
             self._first, mover, self.objective],
            np.float32,
        )  # fmt: skip

    def render(self) -> str | None:
        """The whole game so far as text, hidden parts included; None (with a warning) without a render mode."""
        if self.render_mode is None:
            gymnasium.logger.warn("render() does nothing unless the environment is made with render_mode='ansi'.")
            return None
        context = self._started()
        lines = [
            "pool       " + ", ".join(f"{n} {item}" for n, item in zip(context.counts, ITEMS, strict=True)),
            *(f"{agent}   values {context.values[seat]}" for seat, agent in enumerate(AGENTS)),
            f"objective  {self.objective:g}",
        ]
        for entry in self.transcript:
            refused = "refused: " if entry.kind == "error" else ""
            lines.append(f"{entry.agent}:  {refused}{entry.text}")
        if self._outcome:
            gained = ", ".join(f"{agent} {n} points" for agent, n in self._outcome["points"].items())
            lines.append(f"outcome    {self._outcome['how']}: {gained}")
        elif any(self._claims):
            lines.append(f"waiting    for the answer of {AGENTS[self._mover]} to the proposal")
        else:
            lines.append(f"waiting    for {AGENTS[self._mover]}")
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        """Nothing to release."""

    def _started(self) -> Context:
        if self._context is None:
            raise RuntimeError("No game has been started: call reset() first.")
        return self._context

    def _log(self, seat: int, kind: str, text: str) -> None:
        self.transcript.append(Entry(AGENTS[seat], kind, text))

    def _observations(self, texts: list[str]) -> dict[str, dict[str, Any]]:
        speaker = AGENTS[self._mover] if self.agents else None
        return {
            agent: {
                "text": text,
                "turn": int(TurnKind.SPEAK if agent == speaker else TurnKind.WAIT),  # a plain int: a member of Discrete
                "options": (),
            }
            for agent, text in zip(AGENTS, texts, strict=True)
        }

    def _info(self, seat: int, asked: bool) -> dict[str, Any]:
        info: dict[str, Any] = {
            "role": "negotiator",
            "questions": (),
            "error": "",
            "message": "",
            "span": (0, 0),
            "entry": "",
        }
        if asked:
            hidden = self._started().values[1 - seat]
            info["questions"] = tuple(QUESTIONS[self._styles[seat]][item][value] for item, value in enumerate(hidden))
        if self._outcome is not None:
            info["outcome"] = self._outcome
        return info

    def _end(self, ending: Ending) -> tuple[int, int]:
        """Settles the outcome and returns both players' points."""
        context = self._started()
        claims = (self._claims[0], self._claims[1])
        both = claim_points(context, claims)
        self._outcome = {
            "deal": ending is Ending.DEAL,
            "points": dict(zip(AGENTS, both, strict=True)),
            "how": ending.value,
            "claims": claims,
            "counts": context.counts,
            "values": context.values,
            "pareto": undominated(context, both, self.objective),
            "messages": self._messages,
            "errors": self._errors,
            "first": self._first,
        }
        return both


def pool(path: str | Path | None, split: str) -> tuple[Context, ...]:
    """The contexts that games with these settings are drawn from, in the file's order; errors as `read_contexts`'s."""
    return _split(path, 0 if path is None else Path(path).stat().st_mtime_ns, ContextSplit(split))


@cache  # a batch of games opens the same file many times
def _split(path: str | Path | None, changed: int, split: ContextSplit) -> tuple[Context, ...]:
    every = contexts() if path is None else read_contexts(path)
    if split is ContextSplit.ALL:
        return every
    if split is ContextSplit.OUTSIDE:
        inside = {(context.counts, frozenset(context.values)) for context in every}
        return tuple(context for context in contexts() if (context.counts, frozenset(context.values)) not in inside)
    return tuple(context for context in every if in_test(context) == (split is ContextSplit.TEST))


def _start(options: dict[str, Any], drawn: Context, first: int) -> tuple[Context, int]:
    """The context and first mover to play: what the options give, else what was drawn."""
    if ("counts" in options) != ("values" in options):
        raise ValueError("Give the reset options 'counts' and 'values' together: values only fit their counts.")
    if "counts" in options:
        try:
            counts = _triple(options["counts"])
            own, other = options["values"]
            values = (_triple(own), _triple(other))
        except (TypeError, ValueError) as error:
            raise ValueError(
                "The reset options 'counts' and 'values' must be three whole numbers, and three for each of the two "
                f"players, got {options['counts']!r} and {options['values']!r}."
            ) from error
        drawn = Context(counts, values)
    if "first" in options:
        first = options["first"]
        if first not in (0, 1):
            raise ValueError(f"The reset option 'first' must be the seat that moves first, 0 or 1, got {first!r}.")
    return drawn, int(first)


def _triple(numbers: Any) -> Triple:
    a, b, c = (index(n) for n in numbers)
    return a, b, c
