"""Beliefs: accuracy, log-loss and Brier score, over all answers and by message; change across a message."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np

from envs.core import Question, TurnKind
from envs.dond import environment as dond_environment
from envs.dond import rules as dond_rules
from marl.metrics.negotiation import context
from marl.metrics.stats import Floats, Interval, Metrics, bootstrap_mean
from marl.rewards.speaking import SpeakingReward
from marl.types import INSIDERS, Belief, Episode, pooled

PROB_FLOOR = 1e-12  # a true answer given less than this costs -log of this: 27.6 nats


# --- Beliefs ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Graded:
    """Grades of a distribution over candidates.

    `accuracy`: 1 if the truth is the most probable candidate; of k that tie, 1/k. `log_loss`: -log p(truth) in nats.
    `brier`: sum over candidates of (p - [candidate is true])², from 0 to 2 (Brier 1950). Several true candidates count
    as one.
    """

    accuracy: float
    log_loss: float
    brier: float


GRADES = ("accuracy", "log_loss", "brier")


def grade(probs: np.ndarray, answer: int, also: Sequence[int] = ()) -> Graded:
    """Grades `probs` (K,) by the index of the true candidate and those `also` true."""
    best = probs >= probs.max() - 1e-9
    right = best[[answer, *also]].sum()
    probs = pooled(probs, answer, also)
    return Graded(
        accuracy=float(right / best.sum()),
        log_loss=-math.log(max(float(probs[answer]), PROB_FLOOR)),
        brier=float(np.square(probs).sum() - 2 * probs[answer] + 1),
    )


@dataclass(frozen=True)
class BeliefTable:
    """One row for each answered belief question, all columns of shape (N,); nan for a missing value.

    A discussion lies between choices (moves, votes); Deal or No Deal is one discussion. `number` counts the messages
    of the discussion so far. `last` marks a listener's last answer to the question in the discussion.
    `start_log_loss` is that of its first answer, if before any message; `before_log_loss` that of its answer before
    this one. `prior_*` grades the exact prior, `chance_*` the uniform distribution over the candidates.
    """

    game: np.ndarray
    number: np.ndarray
    last: np.ndarray
    accuracy: Floats
    log_loss: Floats
    brier: Floats
    start_log_loss: Floats
    before_log_loss: Floats
    prior_accuracy: Floats
    prior_log_loss: Floats
    prior_brier: Floats
    chance_accuracy: Floats
    chance_log_loss: Floats
    chance_brier: Floats

    def __len__(self) -> int:
        return len(self.game)

    def mean(self, column: str, where: np.ndarray, rng: np.random.Generator) -> Interval | None:
        """Mean of a column over the rows of a mask, interval over games; None if no row has a value."""
        return self.interval(getattr(self, column), where, rng)

    def interval(self, values: Floats, where: np.ndarray, rng: np.random.Generator) -> Interval | None:
        """Mean of any values (N,) over the rows of a mask; nan values are left out."""
        where = where & ~np.isnan(values)
        return bootstrap_mean(values[where], self.game[where], rng=rng) if where.any() else None


def belief_table(episodes: Sequence[Episode], players: Collection[str] | None = None) -> BeliefTable:
    """Grades every answer of these players (None: all), except imposters', who know."""
    rows: list[tuple[float, ...]] = []
    for game, episode in enumerate(episodes):
        choices = sorted(turn.step for turn in episode.turns if turn.kind == TurnKind.CHOOSE)
        message_steps = sorted(turn.step for turn in episode.turns if turn.message)
        answers: dict[tuple[str, int, str], list[Belief]] = {}  # (listener, discussion, question) -> in order of time
        for belief in sorted(episode.beliefs, key=lambda b: b.step):
            if belief.role not in INSIDERS and (players is None or episode.players[belief.listener] in players):
                discussion = bisect_left(choices, belief.step)  # the number of choices before it
                answers.setdefault((belief.listener, discussion, belief.question.text), []).append(belief)
        for (listener, discussion, _), series in answers.items():
            said_before = bisect_right(message_steps, choices[discussion - 1]) if discussion else 0
            prior = exact_prior(episode, listener, series[0].question)
            floor = (math.nan,) * 3 if prior is None else astuple(grade(prior, series[0].question.answer_index))
            start = before = math.nan
            for i, belief in enumerate(series):
                number = bisect_right(message_steps, belief.step - 1) - said_before
                right = (belief.question.answer_index, belief.question.also_indices)
                graded = grade(belief.probs, *right)
                chance = grade(np.full(len(belief.probs), 1 / len(belief.probs)), *right)
                if i == 0 and number == 0:
                    start = graded.log_loss
                last = i == len(series) - 1
                rows.append((game, number, last, *astuple(graded), start, before, *floor, *astuple(chance)))
                before = graded.log_loss
    columns = np.array(rows, dtype=np.float64).reshape(len(rows), len(fields(BeliefTable))).T
    return BeliefTable(columns[0].astype(int), columns[1].astype(int), columns[2].astype(bool), *columns[3:])


def exact_prior(episode: Episode, listener: str, question: Question) -> np.ndarray | None:
    """The distribution (K,) of the answer given the rules and the listener's own values; None for other games.

    Exact for contexts drawn uniformly from all valid ones.
    """
    if "counts" not in episode.facts:
        return None
    seat = dond_environment.AGENTS.index(listener)
    game = context(episode)
    item = next(i for i, name in enumerate(dond_rules.ITEMS) if name.removesuffix("s") in question.text)
    partner = game.values[1 - seat][item]
    assert int(question.answer) == partner, (question, game)  # the question is about this item
    return dond_rules.prior(game.counts, game.values[seat])[item]  # (11,), candidate k is k points


def belief_metrics(
    episodes: Sequence[Episode], rng: np.random.Generator, players: Collection[str] | None = None
) -> Metrics:
    """Grades of the listeners' answers, intervals over games.

    `belief/accuracy`, `belief/log_loss`, `belief/brier`: all answers; `belief/chance_*`: equal odds for all candidates;
    `belief/first_*`: before any message; `belief/last_*`: last answer of a discussion; `belief/prior_*`: the exact
    prior on the same questions. `belief/gain_over_prior`: prior log-loss minus last log-loss in nats a question, above
    0 for a listener that learned from talk; `belief/gain_over_start`: the same against the listener's own answer
    before any message of the discussion.
    """
    table = belief_table(episodes, players)
    everywhere = np.ones(len(table), bool)
    found: dict[str, Interval | None] = {}
    for name in GRADES:
        found[f"belief/{name}"] = table.mean(name, everywhere, rng)
        found[f"belief/chance_{name}"] = table.mean(f"chance_{name}", everywhere, rng)
        found[f"belief/first_{name}"] = table.mean(name, table.number == 0, rng)
        found[f"belief/last_{name}"] = table.mean(name, table.last, rng)
        found[f"belief/prior_{name}"] = table.mean(f"prior_{name}", table.last, rng)
    found["belief/gain_over_prior"] = table.interval(table.prior_log_loss - table.log_loss, table.last, rng)
    found["belief/gain_over_start"] = table.interval(table.start_log_loss - table.log_loss, table.last, rng)
    return {name: interval for name, interval in found.items() if interval is not None}


def belief_by_message(
    episodes: Sequence[Episode],
    rng: np.random.Generator | None = None,
    players: Collection[str] | None = None,
) -> list[Metrics]:
    """Grades after k messages of a discussion, as entry k: `accuracy`, `log_loss`, `brier`; `prior_*`, `chance_*`.

    Later entries come from longer discussions only: compare an entry with its own prior or chance, or by `gain`, the
    log-loss of the same listener's answer before this one minus this one's.
    """
    rng = rng or np.random.default_rng(0)
    table = belief_table(episodes, players)
    entries = []
    for number in range(int(table.number.max()) + 1 if len(table) else 0):
        here = table.number == number
        found = {
            column: table.mean(column, here, rng)
            for name in GRADES
            for column in (name, f"prior_{name}", f"chance_{name}")
        }
        found["gain"] = table.interval(table.before_log_loss - table.log_loss, here, rng)
        entries.append({name: interval for name, interval in found.items() if interval is not None})
    return entries


# --- Speech -----------------------------------------------------------------------------------------------------------
CHANGES = {"speech/belief_change": "probability", "speech/log_belief_change": "log_probability"}


def belief_changes(episode: Episode, of: str = "probability") -> Floats:
    """Change of belief in the truth across each turn's message, (U,), summed over its listeners and questions.

    Above 0 is toward the truth, whoever spoke. nan if nothing was said or nobody was asked afterwards.
    """
    changes = SpeakingReward(of=of).changes(episode)
    return np.array([sum(each) if each else np.nan for each in changes], dtype=float)
