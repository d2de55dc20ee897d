"""The PettingZoo environment of Deal or No Deal."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from envs.core import Question, Step, Style, TextGame, TurnKind, View, check_number, check_whole
from envs.dond import rules
from envs.dond.replies import KINDS, Message, Proposal, Refused, parse_choice, parse_reply, parse_words, proposal_text
from envs.dond.rules import ITEMS, MAX_POINTS, SPLITS, Context, Triple
from envs.dond.texts import QUESTIONS, WORDING, claim_questions, passed_on, prompt

AGENTS = ("player_0", "player_1")
MAX_TEXT = 3_000  # characters of an observation besides a message; the natural prompt is the longest
FORMATS = ("free", "structured")
ASKED = ("values", "claims")
MAX_TAGS = 20  # characters that tag and end marker add to a message


class Ending(StrEnum):
    """Endings of a game. Only a deal gives points."""

    DEAL = "deal"
    MISMATCH = "mismatch"  # the two claims don't add up to the pool
    ABORT = "abort"  # too many refused replies in a row
    LIMIT = "limit"  # too many messages and proposals


Entry = tuple[str, str, str]  # of the transcript: agent; message, propose or error; the text heard, claim or correction


class DealOrNoDeal(TextGame):
    """The game as a PettingZoo parallel environment. One player at a time has turn SPEAK (or CHOOSE where the format is
    structured), the other has WAIT.

    Settings:
        objective: weight of the partner's points in a player's score, -1 to 1.
        contexts: a file of contexts to draw from, as `read_contexts` reads it; None draws from all valid ones.
        split: "all", "train" or "test" contexts (see `in_test`); "outside": the valid ones that the file has in
            neither order of the players, to choose settings on before its own games are played.
        style: wording of observations, "natural", "brief" or "compact"; the reset option `styles` gives agents others.
        max_entries: messages and proposals after which the game ends without a deal.
        max_errors: refused replies in a row after which it ends without a deal.
        max_message_chars: longer messages are cut there, and the speaker is told.
        format: "free", every reply is text with a tag; or "structured", where a player chooses between message and
            proposal, and chooses a proposal's counts one after another (turn CHOOSE); words are free (turn SPEAK), and
            none at all are silence.
        questions: what is asked after each message and before the first: the partner's "values" of the items, or its
            "claims", which are known at the end (`Question.later`), of a partner that makes none never.
        render_mode: None or "ansi".

    Raises ValueError, naming the setting, for values outside these ranges. Players are told of every limit, so games
    terminate and are never truncated. `reset(options=...)` knows `counts` and `values` (given together, seat order),
    `first` (seat number) and `styles` (by agent). The `entry` of an action is message, propose or error.
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
        format: str = "free",
        questions: str = "values",
        render_mode: str | None = None,
    ) -> None:
        check_number("objective", objective, -1, 1)
        if format not in FORMATS:
            raise ValueError(f"format must be {' or '.join(FORMATS)}, got {format!r}.")
        if questions not in ASKED:
            raise ValueError(f"questions must be {' or '.join(ASKED)}, got {questions!r}.")
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}.")
        check_whole("max_entries", max_entries, 1, 10**9)
        check_whole("max_errors", max_errors, 1, 10**9)
        check_whole("max_message_chars", max_message_chars, 1, 10**9)
        super().__init__(
            AGENTS, style, render_mode, max_text=MAX_TEXT + max_message_chars, max_reply=max_message_chars + MAX_TAGS
        )
        self.objective, self.structured = float(objective), format == "structured"
        self.questions = questions
        self.max_entries, self.max_errors, self.max_message_chars = max_entries, max_errors, max_message_chars
        self.state_space = spaces.Box(-1.0, float(MAX_POINTS), (18,), np.float32)
        if split == "outside" and contexts is None:
            raise ValueError("split must be all, train or test where contexts is None, got 'outside': of which file?")
        self._pool = Pool(pool(contexts, split))
        if not self._pool:
            raise ValueError(f"split={split!r} leaves no context of {contexts}. Take all, or another file.")

    def begin(self, rng: np.random.Generator, options: Mapping[str, Any]) -> dict[str, View]:
        drawn = self._pool[int(rng.integers(len(self._pool)))]
        self._context, self._first = _start(options, drawn, int(rng.integers(2)))
        self._mover: int | None = self._first  # None after the end
        self._claims: list[Triple | None] = [None, None]
        self._messages = self._proposals = self._errors = self._errors_in_a_row = 0
        self._outcome: dict[str, Any] | None = None
        self.transcript: list[Entry] = []
        self._talks = True  # format=structured: whether the mover has chosen, or has no choice but, to send a message
        self._claim: list[int] | None = None  # and the counts of the proposal that it makes
        texts = [
            prompt(self._context.counts, own, self.objective, style, self.max_entries, self.max_errors, self.structured)
            for own, style in zip(self._context.values, self.styles.values(), strict=True)
        ]
        return self._views(texts, asked=True)

    def play(self, actions: Mapping[str, Any]) -> Step:
        """Plays the mover's reply. The other's is ignored; a missing one counts as an empty reply."""
        assert self._mover is not None
        mover, partner = self._mover, 1 - self._mover
        pending = self._claims[partner] is not None
        action = actions.get(AGENTS[mover], "")
        if self.structured:
            parsed = self._read_part(action)
        else:
            parsed = parse_reply(action, self._context.counts, pending, self._messages)

        words = [WORDING[style] for style in self.styles.values()]  # by seat
        new: tuple[list[str], list[str]] = [], []  # the lines that each seat gets to read
        error = message = ""
        span = (0, 0)
        ending: Ending | None = None
        if parsed is None:  # a part of a reply
            entry, said = "choice", ""
            self._errors_in_a_row = 0
        elif isinstance(parsed, Refused):
            entry = "error"
            error = parsed.reason.value if self.styles[AGENTS[mover]] is Style.COMPACT else parsed.correction
            new[mover].append(words[mover]["error"].format(error))
            said = error
            self._errors += 1
            self._errors_in_a_row += 1
            if self._errors_in_a_row >= self.max_errors:
                ending = Ending.ABORT
        else:
            self._errors_in_a_row = 0
            if isinstance(parsed, Message):
                entry = "message"
                said = message = passed_on(parsed.text, self.max_message_chars)
                span = (parsed.span[0], parsed.span[0] + len(message))
                new[partner].append(words[partner]["message"].format(message) if message else words[partner]["silence"])
                if len(message) < len(parsed.text):
                    new[mover].append(words[mover]["cut"].format(len(message)))
                self._messages += 1
            else:
                entry = "propose"
                said = proposal_text(parsed.claim)
                self._claims[mover] = parsed.claim
                self._proposals += 1
                if not pending:
                    new[partner].append(words[partner]["closed" if self.structured else "proposed"])
                else:
                    agreed = rules.complementary((self._claims[0], self._claims[1]), self._context.counts)
                    ending = Ending.DEAL if agreed else Ending.MISMATCH
            self._mover = partner
            if ending is None and self._messages + self._proposals >= self.max_entries:
                ending = Ending.LIMIT
            self._talks, self._claim = self._messages == 0, [] if any(self._claims) else None
        if parsed is not None:
            self.transcript.append((AGENTS[mover], entry, said))

        reward = (0.0, 0.0)
        if ending:
            both = self._end(ending)
            reward = rules.scores(both, self.objective)
            for seat in (0, 1):
                line = words[seat]["deal" if ending is Ending.DEAL else "no_deal"]
                new[seat].append(line.format(both[seat], both[1 - seat]))
        views = self._views(["".join(f"{line}\n" for line in lines) for lines in new], asked=bool(message))
        view = views[AGENTS[mover]]
        view.error, view.message, view.span, view.entry = error, message, span, entry
        return Step(views, dict(zip(AGENTS, reward, strict=True)), self._outcome)

    def _read_part(self, action: object) -> Message | Proposal | Refused | None:
        """Reads a reply of format=structured; None where more is to come before it is a message or a proposal."""
        if self._talks:
            return parse_words(action)
        chosen = parse_choice(action, self._part()[1])
        if isinstance(chosen, Refused):
            return chosen
        if self._claim is None:
            self._talks, self._claim = chosen == KINDS[0], [] if chosen == KINDS[1] else None
            return None
        self._claim.append(int(chosen))
        if len(self._claim) < len(ITEMS):
            return None
        books, hats, balls = self._claim
        return Proposal((books, hats, balls))

    def _part(self) -> tuple[str, tuple[str, ...]]:
        """The part of a reply that the mover owes in format=structured: a name in `WORDING`, and the options."""
        if self._talks:
            return "say", ()
        if self._claim is None:
            return "kind", KINDS
        return "count", tuple(str(n) for n in range(self._context.counts[len(self._claim)] + 1))

    @property
    def facts(self) -> dict[str, Any]:
        """Hidden facts, for analysts: counts, values in seat order, first mover, objective."""
        self.check_started()
        facts = vars(self._context)  # counts and values
        return {**facts, "first": self._first, "objective": self.objective}

    def privileged(self, agent: str) -> tuple[float, ...]:
        """Numbers for a privileged critic at this seat: the partner's values of the items, one-hot, 3 x 11."""
        values = self._context.values[1 - AGENTS.index(agent)]
        return tuple(float(v == value) for value in values for v in range(MAX_POINTS + 1))

    def state(self) -> np.ndarray:
        """The hidden state, shape (18,): counts, both players' values, both claims (-1 where none), first mover, mover,
        objective. Mover is -1 after the end."""
        self.check_started()
        context, claims = self._context, [claim or (-1, -1, -1) for claim in self._claims]
        mover = -1 if self._mover is None else self._mover
        return np.array(
            [*context.counts, *context.values[0], *context.values[1], *claims[0], *claims[1],
             self._first, mover, self.objective],
            np.float32,
        )  # fmt: skip

    def draw(self) -> str:
        context = self._context
        lines = [
            "pool       " + ", ".join(f"{n} {item}" for n, item in zip(context.counts, ITEMS, strict=True)),
            *(f"{agent}   values {context.values[seat]}" for seat, agent in enumerate(AGENTS)),
            f"objective  {self.objective:g}",
        ]
        for agent, kind, text in self.transcript:
            lines.append(f"{agent}:  {'refused: ' if kind == 'error' else ''}{text}")
        if self._outcome:
            gained = ", ".join(f"{agent} {n} points" for agent, n in self._outcome["points"].items())
            lines.append(f"outcome    {self._outcome['how']}: {gained}")
        else:
            assert self._mover is not None
            answer = "the answer of {} to the proposal" if any(self._claims) else "{}"
            lines.append("waiting    for " + answer.format(AGENTS[self._mover]))
        return "\n".join(lines) + "\n"

    def _views(self, texts: list[str], asked: bool) -> dict[str, View]:
        """Both players' views; `asked`: the belief questions are due."""
        views = {}
        for seat, (agent, text) in enumerate(zip(AGENTS, texts, strict=True)):
            claim = self._claims[1 - seat] if self._outcome and self.questions == "claims" else None
            turn = TurnKind.SPEAK if seat == self._mover else TurnKind.WAIT
            options: tuple[str, ...] = ()
            if self.structured and seat == self._mover:
                part, options = self._part()
                turn = TurnKind.CHOOSE if options else TurnKind.SPEAK
                item = ITEMS[len(self._claim)] if part == "count" and self._claim is not None else ""
                text += WORDING[self.styles[agent]][part].format(item) + "\n"
            views[agent] = View(
                "negotiator",
                text,
                turn,
                options,
                questions=self._questions(seat) if asked else (),
                answers={} if claim is None else {item: str(n) for item, n in zip(ITEMS, claim, strict=True)},
            )
        return views

    def _questions(self, seat: int) -> tuple[Question, ...]:
        """The questions to a player: one for each item."""
        style = self.styles[AGENTS[seat]]
        if self.questions == "claims":
            return claim_questions(style, self._context.counts)
        values = self._context.values[1 - seat]
        return tuple(QUESTIONS[style][item][value] for item, value in enumerate(values))

    def _end(self, ending: Ending) -> tuple[int, int]:
        """Settles the outcome and returns both players' points."""
        claims = (self._claims[0], self._claims[1])
        both = rules.claim_points(self._context, claims)
        self._mover = None
        self._outcome = {
            "deal": ending is Ending.DEAL,
            "points": dict(zip(AGENTS, both, strict=True)),
            "how": ending.value,
            "claims": claims,
            "counts": self._context.counts,
            "values": self._context.values,
            "pareto": rules.pareto_optimal(self._context, claims, self.objective),
            "messages": self._messages,
            "errors": self._errors,
            "first": self._first,
        }
        return both


class Pool(tuple[Context, ...]):
    """Contexts to draw from. Copies of a game share them: there are thousands."""

    def __deepcopy__(self, memo: object) -> Pool:
        return self


def pool(path: str | Path | None, split: str) -> tuple[Context, ...]:
    """The contexts that games with these settings are drawn from, in the file's order. Raises as `read_contexts`."""
    return _split(path, 0 if path is None else Path(path).stat().st_mtime_ns, split)


@cache  # a batch of games opens the same file many times
def _split(path: str | Path | None, changed: int, split: str) -> tuple[Context, ...]:
    every = rules.contexts() if path is None else rules.read_contexts(path)
    if split == "all":
        return every
    if split == "outside":
        inside = {(context.counts, frozenset(context.values)) for context in every}
        return tuple(each for each in rules.contexts() if (each.counts, frozenset(each.values)) not in inside)
    return tuple(context for context in every if rules.in_test(context) == (split == "test"))


def _start(options: Mapping[str, Any], drawn: Context, first: int) -> tuple[Context, int]:
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
    first = options.get("first", first)
    if first not in (0, 1):
        raise ValueError(f"The reset option 'first' must be the seat that moves first, 0 or 1, got {first!r}.")
    return drawn, int(first)


def _triple(numbers: Any) -> Triple:
    a, b, c = (index(n) for n in numbers)
    return a, b, c
