"""Beliefs: accuracy, log-loss, Brier score, by message; what a message changed."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from envs.core import Question, TurnKind
from envs.dond import environment as dond_environment
from envs.dond import rules as dond_rules
from marl.metrics.shares import context
from marl.metrics.stats import Floats, Interval, Metrics, bootstrap_mean
from marl.rewards.speaking import SpeakingReward
from marl.types import INSIDERS, Belief, Episode, pooled

PROB_FLOOR = 1e-12  # a true answer given less than this costs -log of this: 27.6 nats


# --- Beliefs ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Graded:
    """What a distribution over candidates is worth once the answer is known.

    `accuracy`: 1 if the truth is the most probable candidate; of k that tie, 1/k. `log_loss`: -log p(truth) in nats.
    `brier`: sum over candidates of (p - [candidate is true])², from 0 to 2 (Brier 1950). Of several true candidates any
    is right, and for the last two they count as one.
    """

    accuracy: float
    log_loss: float
    brier: float


GRADES = ("accuracy", "log_loss", "brier")


def grade(probs: np.ndarray, answer: int, also: Sequence[int] = ()) -> Graded:
    """Grades `probs`, shape (K,), by the index of the true candidate, and of others that are as true."""
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
    """One row for each answered belief question, all columns of shape (N,).

    A discussion is what lies between choices (moves, votes); Deal or No Deal is one discussion. `number` counts
    the messages of the discussion so far: 0 before the first. `last` marks a listener's last answer to the question in
    the discussion. `start_log_loss` is its first answer, if at number 0, and `before_log_loss` its answer before this
    one; `prior_*` grades the exact prior. These are nan where there is no such answer or prior. `chance_*` grades the
    uniform distribution over the candidates.
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
        values: Floats = getattr(self, column)
        return self.interval(values, where, rng)

    def interval(self, values: Floats, where: np.ndarray, rng: np.random.Generator) -> Interval | None:
        """The same for any values of shape (N,), nan where there is none."""
        where = where & ~np.isnan(values)
        return bootstrap_mean(values[where], self.game[where], rng=rng) if where.any() else None


def belief_table(
    episodes: Sequence[Episode], roles: Collection[str] | None = None, players: Collection[str] | None = None
) -> BeliefTable:
    """Grades every answer of the listeners with these roles and player names (None: all, of roles all but imposters,
    who know)."""
    rows: list[tuple[float, ...]] = []
    for game, episode in enumerate(episodes):
        choices = sorted(turn.step for turn in episode.turns if turn.kind == TurnKind.CHOOSE)
        message_steps = sorted(turn.step for turn in episode.turns if turn.message)
        answers: dict[tuple[str, int, str], list[Belief]] = {}  # (listener, discussion, question) -> in order of time
        for belief in sorted(episode.beliefs, key=lambda b: b.step):
            if (belief.role not in INSIDERS if roles is None else belief.role in roles) and (
                players is None or episode.players[belief.listener] in players
            ):
                discussion = bisect_left(choices, belief.step)  # so many choices came before
                answers.setdefault((belief.listener, discussion, belief.question.text), []).append(belief)
        for (listener, discussion, _), series in answers.items():
            said_before = bisect_right(message_steps, choices[discussion - 1]) if discussion else 0
            prior = exact_prior(episode, listener, series[0].question)
            floor = (
                grade(prior, series[0].question.answer_index)
                if prior is not None
                else Graded(math.nan, math.nan, math.nan)
            )
            start = before = math.nan
            for i, belief in enumerate(series):
                number = bisect_right(message_steps, belief.step - 1) - said_before
                right = (belief.question.answer_index, belief.question.also_indices)
                graded = grade(belief.probs, *right)
                chance = grade(np.full(len(belief.probs), 1 / len(belief.probs)), *right)
                if i == 0 and number == 0:
                    start = graded.log_loss
                rows.append(
                    (game, number, i == len(series) - 1, graded.accuracy, graded.log_loss, graded.brier, start, before,
                     floor.accuracy, floor.log_loss, floor.brier, chance.accuracy, chance.log_loss, chance.brier)
                )  # fmt: skip
                before = graded.log_loss
    columns = np.array(rows, dtype=np.float64).reshape(len(rows), 14).T
    return BeliefTable(columns[0].astype(int), columns[1].astype(int), columns[2].astype(bool), *columns[3:])


def exact_prior(episode: Episode, listener: str, question: Question) -> np.ndarray | None:
    """What the rules alone tell `listener` about the answer before any talk, shape (K,); None for games without one.

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
    episodes: Sequence[Episode],
    rng: np.random.Generator,
    roles: Collection[str] | None = None,
    players: Collection[str] | None = None,
) -> Metrics:
    """How good the listeners' answers were, intervals over games. Roles and player names select listeners as in
    `belief_table`.

    `belief/accuracy`, `belief/log_loss`, `belief/brier`: all answers, and `belief/chance_*`, equal odds for all
    candidates in their place; `belief/first_*`: before any message; `belief/last_*`: after the last one that the
    listener was asked after; `belief/prior_*`: the exact prior on the same questions, the floor. The headline is
    `belief/gain_over_prior` = prior log-loss minus last log-loss in nats a question, above 0 for a listener that
    learned something from talk; `belief/gain_over_start` is the same against the listener's own answer before any
    message of the same discussion.
    """
    table = belief_table(episodes, roles, players)
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
    roles: Collection[str] | None = None,
    players: Collection[str] | None = None,
) -> list[Metrics]:
    """Entry k: the answers after k messages of the discussion: `accuracy`, `log_loss`, `brier`; `prior_*`, `chance_*`.

    Later entries are made of longer games (or of discussions with many alive) only, so entries are not to be compared
    with each other but with the prior or chance of the same entry, or by `gain`: log-loss of the same listener's answer
    before this one, minus this one's.
    """
    rng = rng or np.random.default_rng(0)
    table = belief_table(episodes, roles, players)
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
    """How far each turn's message moved the belief in the truth, summed over its listeners and questions, shape (U,).

    Above 0 is toward the truth, whoever spoke. nan where nothing was said or nobody was asked afterwards.
    """
    changes = SpeakingReward(of=of).changes(episode)
    return np.array([sum(each) if each else np.nan for each in changes], dtype=float)
