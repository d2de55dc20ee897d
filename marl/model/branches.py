"""Branches: belief questions that are read beside a stream and leave no trace in it.

A branch goes on from a token of its stream: it sees what had been read there, and itself. Nothing sees it. In a row of
a batch the branches stand behind the stream, one after another, with positions that go on from where they branch off.
So a question costs its own few tokens, and its answer is that of a fresh read of the stream up to there and of the
question. Models without such masks, as those with recurrent layers, read each branch as a row of its own.
Left out: the cache (marl/decoding).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from marl.model.tokens import Tokens

FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers, as configurations name them
QUESTIONS = ("stream", "beside", "auto")
# Errors of a model that needs other inputs, masks or another kind of cache.
MISFITS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def sees(branch: Tensor, position_ids: Tensor) -> Tensor:
    """Tells which tokens of its row each token sees, (B, T, T) bool: at [b, i, j] whether token i sees token j.

    `branch` (B, T): number of a token's branch, 0 in the stream. `position_ids` (B, T): how many tokens the model has
    read before it.
    """
    index = torch.arange(branch.shape[1], device=branch.device)
    begins = torch.zeros_like(branch, dtype=torch.bool)
    begins[:, 1:] = branch[:, 1:] != branch[:, :-1]
    first = torch.where(begins, index, 0).cummax(1).values  # (B, T): where the token's branch begins
    shared = position_ids.gather(1, first)  # (B, T): how many tokens of the stream its branch sees
    own = (branch[:, :, None] == branch[:, None, :]) & (index[:, None] >= index)
    stream = (branch[:, :, None] > 0) & (branch[:, None, :] == 0) & (index < shared[:, :, None])
    return own | stream


def attention_mask(lm: PreTrainedModel, seen: Tensor, queries: Tensor, keys: Tensor) -> Any:
    """Additive mask of a model's attention, (R, 1, n, m), one for each kind of layer where it lists kinds.

    `seen` (R, n, m) bool: which of m tokens each of n tokens sees. `queries` (R, n), `keys` (R, m): how many tokens are
    read before them; a sliding layer sees its window of them.
    """
    config = lm.config.get_text_config()
    mask = torch.zeros(seen.shape, dtype=lm.dtype, device=seen.device).masked_fill_(~seen, -torch.inf)[:, None]
    window = getattr(config, "sliding_window", None)
    if not window:
        return mask
    sliding = mask.masked_fill((queries[:, :, None] - keys[:, None] >= window)[:, None], -torch.inf)
    return {FULL: mask, SLIDING: sliding} if getattr(config, "layer_types", None) else sliding


def read_branches(lm: PreTrainedModel, tokens: Tensor, branch: Tensor, position_ids: Tensor) -> Tensor:
    """Last hidden states (B, T, D) of rows with branches; shapes as in `sees`."""
    read = read_masked if takes_masks(lm) else read_fresh
    return read(lm, tokens, branch, position_ids)


def read_masked(lm: PreTrainedModel, tokens: Tensor, branch: Tensor, position_ids: Tensor) -> Tensor:
    """Returns what `read_branches` does, from one pass over the rows as they are."""
    mask = attention_mask(lm, sees(branch, position_ids), position_ids, position_ids)
    return lm.base_model(
        input_ids=tokens, attention_mask=mask, position_ids=position_ids, use_cache=False
    ).last_hidden_state  # (B, T, D)


def read_fresh(lm: PreTrainedModel, tokens: Tensor, branch: Tensor, position_ids: Tensor) -> Tensor:
    """Returns what `read_branches` does, from rows of their own: each branch behind the beginning of its stream."""
    rows, sizes = [*tokens], []  # causal: what stands behind a stream changes nothing in it
    for row, numbers, places in zip(tokens, branch, position_ids, strict=True):
        for number in range(1, int(numbers.max()) + 1):
            own = numbers == number
            if own.any():  # else the row was cut before it
                rows.append(torch.cat([row[: places[own][0]], row[own]]))
                sizes.append(int(own.sum()))
    whole = lm.base_model(input_ids=pad_sequence(rows, batch_first=True), use_cache=False).last_hidden_state
    hidden, fresh = whole[: len(tokens), : tokens.shape[1]], zip(whole[len(tokens) :], rows[len(tokens) :], strict=True)
    found = [states[len(ids) - size : len(ids)] for (states, ids), size in zip(fresh, sizes, strict=True)]
    return hidden.masked_scatter((branch > 0)[..., None], torch.cat(found))


def tokens_read(lm: PreTrainedModel, branch: Tensor, lengths: Tensor) -> Tensor:
    """Counts at most how many tokens are read for each row of so many (B,) int64. `branch` as in `sees`."""
    if not bool(branch.any()) or takes_masks(lm):
        return lengths
    return lengths * (1 + branch.amax(1))


def read_questions(tokens: Tokens, lm: PreTrainedModel, questions: str) -> None:
    """Sets whether a model reads its questions in the `stream` or `beside` it; `auto`: beside for chat models."""
    tokens.beside = questions == "beside" or (questions == "auto" and tokens.format.ask_in_turn)
    if tokens.beside:
        takes_masks(lm)  # tried here, where the model is whole


def takes_masks(lm: PreTrainedModel) -> bool:
    """Tells whether attention with a mask reads a branch as a stream that goes on so. Tried once a configuration."""
    key = (type(lm), lm.config.to_json_string(use_diff=False), lm.dtype)
    if key not in _TAKES_MASKS:
        with torch.no_grad(), torch.autocast(lm.device.type, enabled=False):
            _TAKES_MASKS[key] = _try_masks(lm)
    return _TAKES_MASKS[key]


_TAKES_MASKS: dict[tuple[type, str, torch.dtype], bool] = {}


def _try_masks(lm: PreTrainedModel) -> bool:
    """Reads a row with two branches, and compares with streams that go on so."""
    config = lm.config.get_text_config()
    listed = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or ()
    if {*listed} - {FULL, SLIDING}:
        return False
    stream, questions = list(range(3, 14)), ((4, [5, 2, 9]), (11, [7, 1]))  # and what each goes on from
    row, branch, position_ids = [*stream], [0] * len(stream), list(range(len(stream)))
    for number, (shared, ids) in enumerate(questions, start=1):
        row, branch = row + ids, branch + [number] * len(ids)
        position_ids = position_ids + list(range(shared, shared + len(ids)))
    fresh = [stream, *([*stream[:shared], *ids] for shared, ids in questions)]

    def ordinary(ids: list[int]) -> Tensor:
        """Tokens from all over the vocabulary, (1, n): bfloat16 is far off among the first ones, which are control."""
        return (torch.tensor([ids], device=lm.device) * 1009 + 500) % config.vocab_size

    try:
        numbers, positions = (torch.tensor([each], device=lm.device) for each in (branch, position_ids))
        found = read_masked(lm, ordinary(row), numbers, positions)[0]
        alone = [lm.base_model(input_ids=ordinary(each), use_cache=False) for each in fresh]
    except MISFITS:
        return False
    whole = torch.cat([alone[0].last_hidden_state[0]] + [
        each.last_hidden_state[0, shared:] for each, (shared, _) in zip(alone[1:], questions, strict=True)
    ])  # fmt: skip
    near = 1e-3 if lm.dtype in (torch.float32, torch.float64) else 0.1  # of the largest
    return bool((found - whole).abs().max() <= near * whole.abs().max())
