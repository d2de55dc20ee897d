"""Amount and variety of talk, in white-space words, with intervals over games."""

import math
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from envs.core import TurnKind
from marl.metrics.stats import Interval, Metrics, bootstrap_mean, bootstrap_ratio, jackknife
from marl.metrics.training import VOCABULARY_GAMES
from marl.types import Episode, Turn

NGRAM_WORDS = 5000  # the share of distinct n-grams falls with the words counted, so their number is fixed


def played_by(players: Collection[str] | None, turn: Turn, episode: Episode) -> bool:
    """Tells whether one of these players (names in `Episode.players`; None: anybody) took the turn."""
    return players is None or episode.players[turn.agent] in players


def speak_turns(episode: Episode, players: Collection[str] | None = None) -> list[Turn]:
    """The SPEAK turns of these players (None: of all), in order."""
    return [t for t in episode.turns if t.kind == TurnKind.SPEAK and played_by(players, t, episode)]


def talk_metrics(
    episodes: Sequence[Episode], rng: np.random.Generator, players: Collection[str] | None = None
) -> Metrics:
    """Counts accepted spoken replies, their sampled tokens and their white-space words; wording.csv explains each."""
    turns = [[turn for turn in speak_turns(e, players) if not turn.error] for e in episodes]
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


def vocabulary(games: Sequence[Sequence[str]]) -> Interval:
    """Number of different words in the messages of these games, with a jackknife interval over games."""
    sets = [{word for text in of_game for word in text.split()} for of_game in games]
    used_by = Counter(word for words in sets for word in words)  # word -> number of games with it
    # Without a game its own words are missing; the constant before them does not change the variance.
    without = [-sum(used_by[word] == 1 for word in words) for words in sets]
    return jackknife(len(used_by), without).within(0.0, math.inf)


def effective_number(games: Sequence[Counter[str]]) -> Interval:
    """exp(H) of the forms in all games: k forms used equally often count as k (Hill 1973).

    The interval is the jackknife's of H over games, never below 1. Compare equal numbers of games. `n`: games with a
    message.
    """
    games = [counts for counts in games if counts]
    total = sum(games, Counter[str]())

    def log_weight(count: int) -> float:
        return count * math.log(count) if count else 0.0

    def entropy(size: int, weight: float) -> float:
        """-sum p log p, from the sum of the counts c and that of c log c."""
        return math.log(size) - weight / size

    size, weight = total.total(), sum(map(log_weight, total.values()))
    changes = [sum(log_weight(total[form] - n) - log_weight(total[form]) for form, n in c.items()) for c in games]
    without = [
        entropy(size - counts.total(), weight + change) if len(games) > 1 else math.nan
        for counts, change in zip(games, changes, strict=True)
    ]
    found = jackknife(entropy(size, weight), without).within(0.0, math.inf)
    return Interval(math.exp(found.mean), math.exp(found.low), math.exp(found.high), found.n)


def distinct_ngrams(games: Sequence[Sequence[str]], size: int, words: int = NGRAM_WORDS) -> Interval | None:
    """Different n-grams over all n-grams of messages (Li et al. 2016), in the first games that hold `words` words.

    The interval is the jackknife's over games. None if fewer words were said. `n`: games counted.
    """
    grams: list[list[tuple[str, ...]]] = []
    said = 0
    for messages in games:
        found = []
        for message in messages:
            each = message.split()[: words - said]
            said += len(each)
            found += [tuple(each[i : i + size]) for i in range(len(each) - size + 1)]
        grams.append(found)
        if said >= words:
            break
    used_by = Counter(gram for found in grams for gram in set(found))
    unique, total = len(used_by), sum(map(len, grams))
    if said < words or not total:
        return None
    without = [
        (unique - sum(used_by[gram] == 1 for gram in set(found))) / max(total - len(found), 1) for found in grams
    ]
    return jackknife(unique / total, without).within(0.0, 1.0)
