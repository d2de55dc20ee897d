"""Spoils human messages, one kind of nonsense at a time: what the ensemble of `nonsense.py` learns to tell apart.

Each returns the spoiled message, or None where a message has nothing that its kind could spoil: never the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from envs.dond.rules import MAX_COUNT, Triple
from marl.agents.scripted.dond_language import ITEM_OF, NOUNS, NUMBER_OF, NUMBERS

_SIDES = {"i": "you", "you": "i", "me": "you", "my": "your", "your": "my", "mine": "yours", "yours": "mine",
          "i'll": "you'll", "you'll": "i'll"}  # fmt: skip
_VERBS = ("want", "need", "take", "have", "keep", "get", "give", "value", "like", "can", "could", "would", "will")
_NOT = ("not", "don't", "can't", "cannot", "won't", "dont", "cant")


@dataclass(frozen=True)
class Place:
    """A message's place in a dialogue. `before`: what its speaker has said; `strangers`: messages of other dialogues;
    `model`: continues words, for `weak`."""

    counts: Triple
    before: Sequence[str]
    strangers: Sequence[str]
    model: Bigrams


@dataclass
class Bigrams:
    """A weak model of language: each word's followers in human messages."""

    following: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, messages: Sequence[str]) -> Bigrams:
        """Counts words that follow one another."""
        found = cls()
        for message in messages:
            words = [*message.split(), ""]
            for word, after in pairwise(words):
                found.following.setdefault(word, []).append(after)
        return found

    def go_on(self, word: str, most: int, rng: np.random.Generator) -> list[str]:
        """Draws up to `most` words after this one."""
        words: list[str] = []
        while len(words) < most and (after := self.following.get(word)):
            word = after[int(rng.integers(len(after)))]
            if not word:
                break
            words.append(word)
        return words


Corrupt = Callable[[str, Place, np.random.Generator], str | None]


def _replaced(message: str, rng: np.random.Generator, options: Callable[[str, str], Sequence[str]]) -> str | None:
    """Replaces one word by one of its `options(word, next word)`; None if no word has any."""
    words = message.split()
    places = [(i, found) for i, word in enumerate(words) if (found := options(word, " ".join(words[i + 1 : i + 2])))]
    if not places:
        return None
    place, found = places[rng.integers(len(places))]
    words[place] = found[int(rng.integers(len(found)))]
    return " ".join(words)


def _is_number(word: str) -> bool:
    return word.isdigit() or word in NUMBERS


def counts(message: str, place: Place, rng: np.random.Generator) -> str | None:
    """Another number of items, which the pool has."""

    def options(word: str, after: str) -> Sequence[str]:
        if not _is_number(word) or after not in ITEM_OF:
            return ()
        held, number = place.counts[ITEM_OF[after]], int(word[:4]) if word.isdigit() else NUMBER_OF[word]
        others = [n for n in range(1, held + 1) if n != number]
        return [str(n) if word.isdigit() else NUMBERS[n] for n in others]

    return _replaced(message, rng, options)


def items(message: str, place: Place, rng: np.random.Generator) -> str | None:
    """Another kind of item."""

    def options(word: str, after: str) -> Sequence[str]:
        if word not in ITEM_OF or word.startswith("basket"):
            return ()
        many = word.endswith("s")
        return [nouns[many] for item, nouns in enumerate(NOUNS) if item != ITEM_OF[word]]

    return _replaced(message, rng, options)


def sides(message: str, place: Place, rng: np.random.Generator) -> str | None:
    """I and you change places."""
    words = [_SIDES.get(word, word) for word in message.split()]
    spoiled = " ".join(words)
    return spoiled if spoiled != " ".join(message.split()) else None


def negation(message: str, place: Place, rng: np.random.Generator) -> str | None:
    """A negation too many, or one too few."""
    words = message.split()
    if spots := [i for i, word in enumerate(words) if word in _NOT]:
        del words[spots[rng.integers(len(spots))]]
        return " ".join(words) or None
    if not (spots := [i for i, word in enumerate(words) if word in _VERBS]):
        return None
    spot = spots[rng.integers(len(spots))]
    words.insert(spot + (words[spot] in _VERBS[-4:]), "not" if words[spot] in _VERBS[-4:] else "don't")
    return " ".join(words)


def total(message: str, place: Place, rng: np.random.Generator) -> str | None:
    """More items than there are."""

    def options(word: str, after: str) -> Sequence[str]:
        if not _is_number(word) or after not in ITEM_OF:
            return ()
        beyond = range(place.counts[ITEM_OF[after]] + 1, MAX_COUNT + 4)
        number = word if word.isdigit() else str(NUMBER_OF[word])
        return [text for n in beyond if str(n) != number for text in [str(n) if word.isdigit() else NUMBERS[n]]]

    return _replaced(message, rng, options)


def stranger(message: str, place: Place, rng: np.random.Generator) -> str | None:
    """A message of another dialogue."""
    others = [other for other in place.strangers if other != message]
    return others[int(rng.integers(len(others)))] if others else None


def repetition(message: str, place: Place, rng: np.random.Generator) -> str | None:
    """Repeats what its speaker has said before."""
    others = [other for other in place.before if other != message]
    return others[int(rng.integers(len(others)))] if others else None


def weak(message: str, place: Place, rng: np.random.Generator) -> str | None:
    """The first words, continued by a weak model."""
    words = message.split()
    kept = words[: max(len(words) // 2, 1)]
    spoiled = " ".join([*kept, *place.model.go_on(kept[-1], 12, rng)])
    return spoiled if spoiled != " ".join(words) else None


KINDS: Mapping[str, Corrupt] = {
    each.__name__: each for each in (counts, items, sides, negation, total, stranger, repetition, weak)
}
