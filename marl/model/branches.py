"""Branches: belief questions that are read beside a stream and leave no trace in it.

A branch goes on from a token of its stream: it sees what had been read there, and itself. Nothing sees it. In a row of
a batch the branches stand behind the stream, one after another, with positions that go on from where they branch off.
So a question costs its own few tokens, and its answer is that of a fresh read of the stream up to there and of the
question.
Left out: the cache (marl/decoding), and recurrent layers, which have a state in the place of what they have seen.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from marl.common.errors import UserError
from marl.model.tokens import Tokens

FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers, as configurations name them
QUESTIONS = ("stream", "beside", "auto")


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
    mask = attention_mask(lm, sees(branch, position_ids), position_ids, position_ids)
    return lm.base_model(
        input_ids=tokens, attention_mask=mask, position_ids=position_ids, use_cache=False
    ).last_hidden_state  # (B, T, D)


def read_questions(tokens: Tokens, lm: PreTrainedModel, questions: str) -> None:
    """Sets whether a model reads its questions in the `stream` or `beside` it.

    `auto`: beside for chat models that can, else in the stream. UserError for `beside` where the model cannot.
    """
    if questions == "stream" or (questions == "auto" and not tokens.format.ask_in_turn):
        tokens.beside = False
        return
    able = reads_branches(lm)
    if questions == "beside" and not able:
        raise UserError(
            f"model.questions=beside: {type(lm).__name__} cannot read questions beside the stream: it takes attention "
            "whose masks and positions can be given, and no recurrent layers. Set it to stream."
        )
    tokens.beside = able


@torch.no_grad()
def reads_branches(lm: PreTrainedModel) -> bool:
    """Tells whether a branch is read as a stream that goes on so. Tries it on a row with two branches."""
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
        found = read_branches(lm, ordinary(row), numbers, positions)[0]
        alone = [lm.base_model(input_ids=ordinary(each), use_cache=False) for each in fresh]
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return False  # it takes no such masks or positions
    whole = torch.cat([alone[0].last_hidden_state[0]] + [
        each.last_hidden_state[0, shared:] for each, (shared, _) in zip(alone[1:], questions, strict=True)
    ])  # fmt: skip
    near = 1e-3 if lm.dtype in (torch.float32, torch.float64) else 0.1  # of the largest
    return bool((found - whole).abs().max() <= near * whole.abs().max())
