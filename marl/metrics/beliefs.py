"""Beliefs: accuracy, log-loss and Brier score, over all answers and by message; change across a message."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from envs.core import Question, TurnKind
from envs.dond import environment as dond_environment
from envs.dond import rules as dond_rules
from marl.metrics.negotiation import context
from marl.metrics.stats import Floats, Interval, Metrics, bootstrap_mean
from marl.rewards.speaking import SpeakingReward
from marl.types import INSIDERS, Belief, Episode, Turn, pooled

PROB_FLOOR = 1e-12  # of a true answer: it costs 27.6 nats at most


class Graded(NamedTuple):
    """Grades of a distribution over candidates. Several true candidates count as one.

    `accuracy`: 1 if the truth is the most probable candidate; of k that tie, 1/k. `log_loss`: -log p(truth) in nats.
    `brier`: sum over candidates of (p - [candidate is true])², from 0 to 2 (Brier 1950).
    """

    accuracy: float
    log_loss: float
    brier: float


GRADES = Graded._fields


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


COLUMNS = [
    ("game", int), ("number", int), ("last", bool), *((name, float) for name in GRADES),
    ("start_log_loss", float), ("before_log_loss", float),
    *((f"{of}_{name}", float) for of in ("prior", "chance") for name in GRADES),
]  # fmt: skip


def belief_table(episodes: Sequence[Episode], players: Collection[str] | None = None) -> np.recarray:
    """Grades every answer of these players (None: all), except imposters', who know: a record each.

    A discussion lies between choices (moves, votes); Deal or No Deal is one discussion. `number` counts the messages
    of the discussion so far. `last` marks a listener's last answer to the question in the discussion.
    `start_log_loss` is that of its first answer, if before any message; `before_log_loss` that of its answer before
    this one. `prior_*` grades the exact prior, `chance_*` equal odds. Missing values are nan.
    """
    rows: list[tuple[float, ...]] = []
    for game, episode in enumerate(episodes):
        choices = sorted(turn.step for turn in episode.turns if turn.kind == TurnKind.CHOOSE)
        if "counts" in episode.facts:  # Deal or No Deal, where choices are parts of a reply (format=structured)
            choices = []
        message_steps = sorted(turn.step for turn in episode.turns if turn.message)
        answers: dict[tuple[str, int, str], list[Belief]] = {}  # (listener, discussion, question) -> in order of time
        for belief in sorted(episode.beliefs, key=lambda b: b.step):
            if belief.role not in INSIDERS and (players is None or episode.players[belief.listener] in players):
                discussion = bisect_left(choices, belief.step)  # the number of choices before it
                answers.setdefault((belief.listener, discussion, belief.question.text), []).append(belief)
        for (listener, discussion, _), series in answers.items():
            said_before = bisect_right(message_steps, choices[discussion - 1]) if discussion else 0
            prior = exact_prior(episode, listener, series[0].question)
            floor = (math.nan,) * 3 if prior is None else grade(prior, series[0].question.answer_index)
            start = before = math.nan
            for i, belief in enumerate(series):
                number = bisect_right(message_steps, belief.step - 1) - said_before
                right = (belief.question.answer_index, belief.question.also_indices)
                graded = grade(belief.probs, *right)
                chance = grade(np.full(len(belief.probs), 1 / len(belief.probs)), *right)
                if i == 0 and number == 0:
                    start = graded.log_loss
                last = i == len(series) - 1
                rows.append((game, number, last, *graded, start, before, *floor, *chance))
                before = graded.log_loss
    return np.array(rows, dtype=COLUMNS).view(np.recarray)


def _mean(table: np.recarray, values: Floats, where: np.ndarray, rng: np.random.Generator) -> Interval | None:
    """Mean of values (N,) over the rows of a mask, without nan, interval over games; None if no row has a value."""
    where = where & ~np.isnan(values)
    return bootstrap_mean(values[where], table.game[where], rng=rng) if where.any() else None


def exact_prior(episode: Episode, listener: str, question: Question) -> np.ndarray | None:
    """The distribution (K,) of the answer given the rules and the listener's own values.

    None for other games and for questions about claims, of which the rules say nothing.
    """
    if "counts" not in episode.facts or question.later:
        return None
    seat = dond_environment.AGENTS.index(listener)
    game = context(episode)
    item = next(i for i, name in enumerate(dond_rules.ITEMS) if name.removesuffix("s") in question.text.lower())
    partner = game.values[1 - seat][item]
    assert int(question.answer) == partner, (question, game)  # the question is about this item
    return dond_rules.prior(game.counts, game.values[seat])[item]  # (11,), candidate k is k points


def belief_metrics(
    episodes: Sequence[Episode], rng: np.random.Generator, players: Collection[str] | None = None
) -> Metrics:
    """Grades of the listeners' answers, with intervals over games; wording.csv explains each."""
    table = belief_table(episodes, players)
    everywhere, first = np.ones(len(table), bool), table.number == 0
    found: dict[str, Interval | None] = {}
    for name in GRADES:
        found[f"belief/{name}"] = _mean(table, table[name], everywhere, rng)
        found[f"belief/chance_{name}"] = _mean(table, table[f"chance_{name}"], everywhere, rng)
        found[f"belief/first_{name}"] = _mean(table, table[name], first, rng)
        found[f"belief/last_{name}"] = _mean(table, table[name], table.last, rng)
        found[f"belief/prior_{name}"] = _mean(table, table[f"prior_{name}"], table.last, rng)
    for floor in ("prior", "start"):
        gain = table[f"{floor}_log_loss"] - table.log_loss
        found[f"belief/gain_over_{floor}"] = _mean(table, gain, table.last, rng)
    return {name: interval for name, interval in found.items() if interval is not None}


def belief_by_message(episodes: Sequence[Episode], players: Collection[str] | None = None) -> list[Metrics]:
    """Grades after k messages of a discussion, as entry k, with those of the exact prior and of chance.

    Later entries come from longer discussions only: compare an entry with its own prior or chance, or by `gain`, the
    log-loss of the same listener's answer before this one minus this one's.
    """
    rng, table = np.random.default_rng(0), belief_table(episodes, players)
    entries = []
    for number in range(int(table.number.max()) + 1 if len(table) else 0):
        here = table.number == number
        columns = [column for name in GRADES for column in (name, f"prior_{name}", f"chance_{name}")]
        found = {column: _mean(table, table[column], here, rng) for column in columns}
        found["gain"] = _mean(table, table.before_log_loss - table.log_loss, here, rng)
        entries.append({name: interval for name, interval in found.items() if interval is not None})
    return entries


CHANGES = {"speech/belief_change": "probability", "speech/log_belief_change": "log_probability"}


def belief_changes(episode: Episode, of: str = "probability") -> Floats:
    """Change of belief in the truth across each turn's message, (U,), summed over its listeners and questions.

    Above 0 is toward the truth, whoever spoke. nan if nothing was said or nobody was asked afterwards.
    """
    changes = SpeakingReward(of=of).changes(episode)
    return np.array([sum(each) if each else np.nan for each in changes], dtype=float)


def belief_moves(episode: Episode, turn: Turn, says: str, about: str = "") -> list[tuple[float, float, bool]]:
    """(probability before, after, truth) of the answer `says`, for each listener asked before and after a message.

    Imposters, who know, are left out. `about`: a word of the question that the message answers.
    """
    found = []
    for after in episode.beliefs:
        question = after.question
        if after.role in INSIDERS or after.listener == turn.agent or after.step != turn.step + 1:
            continue
        if about not in question.text.lower():
            continue
        earlier = [
            b
            for b in episode.beliefs
            if b.listener == after.listener and b.step < after.step and about in b.question.text.lower()
        ]
        believed = [
            dict(zip(map(str.lower, b.question.candidates), b.probs, strict=True)) for b in (*earlier[-1:], after)
        ]
        if len(believed) == 2 and all(says.lower() in candidates for candidates in believed):
            true = says.lower() in map(str.lower, (question.answer, *question.also))
            found.append((believed[0][says.lower()], believed[1][says.lower()], true))
    return found
