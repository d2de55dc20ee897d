"""How much is said, in how many words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
from scipy.stats import norm

from marl.metrics.shares import Valued, mean_metrics, spoken
from marl.metrics.stats import Interval, Metrics, bootstrap_mean, bootstrap_ratio
from marl.metrics.training import VOCABULARY_GAMES
from marl.types import Episode


def effective_number(games: Sequence[Counter[str]], level: float = 0.95) -> Interval:
    """exp(H), H = -sum p log p over all games' counts together: k forms used equally often count as k (Hill 1973).

    Interval from the delete-one-game jackknife of H (Efron and Tibshirani 1993, chapter 11), never below 1. Few
    messages show few forms, so compare equal numbers of games. `n`: games with a message.
    """
    games = [counts for counts in games if counts]
    total = Counter[str]()
    for counts in games:
        total.update(counts)

    def entropy(size: int, weight: float) -> float:
        """-sum p log p, where `size` is the sum of counts c, and `weight` that of c log c."""
        return math.log(size) - weight / size

    def log_weight(count: int) -> float:
        return count * math.log(count) if count else 0.0

    size, weight = total.total(), sum(map(log_weight, total.values()))
    mean = entropy(size, weight)
    if len(games) == 1:
        return Interval(math.exp(mean), math.nan, math.nan, 1)
    without = [
        entropy(
            size - counts.total(),
            weight + sum(log_weight(total[form] - n) - log_weight(total[form]) for form, n in counts.items()),
        )
        for counts in games
    ]
    half = float(norm.ppf((1 + level) / 2)) * math.sqrt((len(games) - 1) * np.var(without))
    return Interval(math.exp(mean), math.exp(max(0.0, mean - half)), math.exp(mean + half), len(games))


# --- Talk and errors --------------------------------------------------------------------------------------------------
def talk_metrics(
    episodes: Sequence[Episode], rng: np.random.Generator, players: Collection[str] | None = None
) -> Metrics:
    """How much was said, and with how many words.

    `talk/turns`: spoken replies that the game accepted (messages and proposals), per game; `talk/messages`: those that
    others heard. `talk/tokens_per_turn`: sampled tokens of an accepted spoken reply, end marker included.
    `talk/words_per_message` and `talk/vocabulary` count white-space words as they stand. The vocabulary is that of the
    first 500 games; with fewer games it is smaller for that reason alone, and `n` says how many there were.
    """
    turns = [[turn for turn in spoken(e, players) if not turn.error] for e in episodes]
    messages = [[turn.message for turn in of_game if turn.message] for of_game in turns]
    sampled = [[len(turn.reply_ids) for turn in of_game if turn.reply_ids] for of_game in turns]
    found = {
        "talk/turns": bootstrap_mean([len(of_game) for of_game in turns], rng=rng),
        "talk/messages": bootstrap_mean([len(of_game) for of_game in messages], rng=rng),
    }
    if any(sampled):
        found["talk/tokens_per_turn"] = bootstrap_ratio([sum(n) for n in sampled], [len(n) for n in sampled], rng=rng)
    if any(messages):
        words = [sum(len(text.split()) for text in of_game) for of_game in messages]
        found["talk/words_per_message"] = bootstrap_ratio(words, [len(of_game) for of_game in messages], rng=rng)
        found["talk/vocabulary"] = vocabulary(messages[:VOCABULARY_GAMES])
    return found


def cut_metrics(
    episodes: Sequence[Episode], rng: np.random.Generator, players: Collection[str] | None = None
) -> Metrics:
    """`talk/cut`: of the spoken replies that the game accepted, the share that is unfinished (see `Turn.cut`)."""
    replies: Valued = [(g, t.cut) for g, e in enumerate(episodes) for t in spoken(e, players) if not t.error]
    return mean_metrics({"talk/cut": replies}, rng)


def vocabulary(games: Sequence[Sequence[str]], level: float = 0.95) -> Interval:
    """Number of different white-space words in the messages of these games, with a jackknife interval over games.

    Leaving game g out loses the words that only g used, u_g of them; the jackknife variance is
    (n-1)/n sum (u_g - mean)² (Efron and Tibshirani 1993, chapter 11). It says how far the count hangs on single games,
    not what more games would add. It ends at 0, below which there is no count.
    """
    sets = [{word for text in of_game for word in text.split()} for of_game in games]
    used_by = Counter(word for words in sets for word in words)  # word -> number of games with it
    unique = np.array([sum(used_by[word] == 1 for word in words) for words in sets], float)
    if len(games) == 1:
        return Interval(len(used_by), math.nan, math.nan, 1)
    half = float(norm.ppf((1 + level) / 2)) * math.sqrt((len(games) - 1) * unique.var())
    return Interval(len(used_by), len(used_by) - half, len(used_by) + half, len(games)).within(0.0, math.inf)
