"""Renames players in rows: a game in which Red and Blue are Green and Pink throughout is as valid.

True answers stay true under other names, so listening may learn from renamed rows: they are new in every pass, while
the rows themselves are soon memorised. Renamed players keep their order in the palette, since lists of names follow it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from marl.model.tokens import Tokens
from marl.types import TokenBatch


@dataclass(frozen=True)
class Renaming:
    """Swaps words. `families` (F, W): ids of tokens that differ only in which of the W words they hold."""

    families: Tensor
    size: int  # of the vocabulary
    generator: torch.Generator = field(default_factory=torch.Generator)

    def __call__(self, batch: TokenBatch) -> TokenBatch:
        """Swaps the words of every row, and of its candidates, for words drawn at random, in the same order."""
        rows, words = batch.shape[0], self.families.shape[1]
        place = torch.full((self.size,), -1)
        place[self.families] = torch.arange(words)
        table = torch.arange(self.size).repeat(rows, 1)  # (B, V)
        for b, tokens in enumerate(place[batch.tokens.cpu()]):
            held = torch.isin(torch.arange(words), tokens)
            drawn = torch.zeros(words, dtype=torch.bool)
            drawn[torch.randperm(words, generator=self.generator)[: int(held.sum())]] = True
            for before, after in ((held, drawn), (~held, ~drawn)):  # words that the row lacks may be candidates
                table[b, self.families[:, before]] = self.families[:, after]  # both in the palette's order
        table = table.to(batch.tokens.device)
        known = batch.candidates >= 0
        return replace(
            batch,
            tokens=table.gather(1, batch.tokens),
            candidates=torch.where(known, table[batch.row].gather(1, batch.candidates.clamp_min(0)), -1),
        )


def renaming(tokens: Tokens, words: Sequence[str]) -> Renaming | None:
    """Makes the function that swaps these words, in upper and lower case; None if one is no single token here.

    Each word must be one, as given and in small letters, after a space and without: else some mention would keep the
    old name.
    """
    small = [word.lower() for word in words]
    if not words or any(len(tokens.encode(before + word)) != 1 for word in (*words, *small) for before in ("", " ")):
        return None
    cases = (list(words), small, [word.upper() for word in words])
    place = {word: i for case in cases for i, word in enumerate(case)}
    of_case = {word: number for number, case in reversed(list(enumerate(cases))) for word in case}
    either = "|".join(re.escape(word) for word in place)
    whole = re.compile(rf"(?<![^\W_])(?:{either})(?![^\W_])")
    found: dict[tuple[int, str], dict[int, int]] = {}  # by case and what else the token holds: the id of each word
    for i in range(tokens.size):
        text = tokens.decode([i])
        if held := whole.findall(text):
            found.setdefault((of_case[held[0]], whole.sub("{}", text)), {})[place[held[0]]] = i
    families = [[ids[i] for i in range(len(words))] for ids in found.values() if len(ids) == len(words)]
    return Renaming(torch.tensor(families), tokens.size)
