"""Losses of somebody's own: what they may read, and what of theirs is refused, naming them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.setup.config import terms
from marl.common.errors import UserError
from marl.learning.config import UpdateConfig
from marl.learning.update import update
from marl.losses import READS, Outputs, mask_of
from marl.losses.imitation import ImitationLoss
from marl.losses.listening import ListeningLoss
from marl.losses.plan import PlanLoss
from marl.losses.policy import PolicyLoss
from marl.types import TokenBatch
from tests.marl.updates import TERMS, all_played, identical, played, trained


@dataclass(frozen=True)
class Mine:
    """Loss that returns what `of` makes of the batch and the outputs."""

    of: Callable[[TokenBatch, Outputs], Any]
    reads: str = "reply"
    weight: float = 0.05

    def __call__(self, batch: TokenBatch, outputs: Outputs) -> Any:
        return self.of(batch, outputs)


def test_a_term_reads_what_a_pass_computes() -> None:
    for reads in (*READS, "replies"):
        written = {"mine": {"_target_": "marl.losses.imitation.ImitationLoss", "reads": reads}}
        if reads in READS:
            assert terms(written, "loss") == {"mine": ImitationLoss(reads=reads)}
        else:
            with pytest.raises(UserError, match=rf"^loss\.mine\.reads='replies': must be one of {', '.join(READS)}$"):
                terms(written, "loss")
    assert {loss.reads for loss in (*TERMS.values(), ListeningLoss(renamed=True))} == set(READS)


def test_a_term_may_work_with_any_of_the_outputs() -> None:
    """All have their shapes, and only zeros in them, when its places are counted."""
    shapes: list[dict[str, tuple[int, ...]]] = []

    def divergence(batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
        shapes.append({name: tuple(part.shape) for name, part in vars(outputs).items()})
        return torch.where(batch.reply, outputs.divergence, 0.0), batch.reply

    def planned(batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
        return -(batch.plan * outputs.planned.masked_fill(batch.plan_ids < 0, 0.0)).sum(-1), batch.planned

    ours = {"exact": Mine(divergence, "divergence"), "plan": Mine(planned, "planned")}
    theirs = {"exact": TERMS["exact"], "plan": PlanLoss(weight=0.05, form="cross_entropy")}
    assert identical(trained(ours), trained(theirs))
    _, batch = all_played()
    for name in ours:
        assert torch.equal(mask_of(batch, name, ours[name]), mask_of(batch, name, theirs[name]))
    whole = (24, batch.shape[1])
    assert shapes[-1] == {
        **dict.fromkeys(("logprobs", "entropy", "values", "observed", "divergence"), whole),
        "beliefs": tuple(batch.candidates.shape), "planned": tuple(batch.plan.shape),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("of", "text"),
    [
        (lambda b, o: None, "NoneType"),
        (lambda b, o: (o.logprobs, None), r"Tensor \(12, \d+\) of torch\.float32 and NoneType"),
        (
            lambda b, o: (o.logprobs[:, 1:], b.reply),
            r"Tensor \(12, \d+\) of torch\.float32 and Tensor \(12, \d+\) of torch\.bool",
        ),
        (lambda b, o: (), "nothing"),
    ],
)
def test_a_term_that_returns_no_values_with_their_mask_is_refused(
    of: Callable[[TokenBatch, Outputs], Any], text: str
) -> None:
    said = (
        rf"^loss\.mine: Mine returned {text}\. Return values and a bool mask of the same shape: \(12, \d+\) for tokens"
    )
    with pytest.raises(UserError, match=said):
        trained({"policy": TERMS["policy"], "mine": Mine(of)})


@pytest.mark.parametrize(
    ("part", "reads"),
    [
        ("logprobs", "values"), ("entropy", "values"), ("values", "reply"), ("observed", "reply"),
        ("divergence", "reply"), ("beliefs", "reply"), ("planned", "reply"),
    ],
)  # fmt: skip
def test_a_term_that_works_with_undeclared_outputs_is_refused(part: str, reads: str) -> None:
    """Outputs that a term does not list in `reads` are 0 everywhere, so that it would train nothing."""
    mine = Mine(lambda b, o: (getattr(o, part), torch.ones_like(getattr(o, part), dtype=torch.bool)), reads)
    with pytest.raises(UserError, match=r"^loss\.mine: "):
        trained({"mine": mine})


@pytest.mark.parametrize("mask", [lambda entropy: entropy > 0, lambda entropy: entropy < 1])  # more, and fewer
def test_a_mask_that_depends_on_the_outputs_is_refused(mask: Callable[[Tensor], Tensor]) -> None:
    """Tokens are counted before the model is read, so a mask of other tokens would not give a mean."""
    mine = Mine(lambda batch, outputs: (-outputs.entropy, mask(outputs.entropy)))
    with pytest.raises(UserError, match=r"^loss\.mine: the mask of Mine depends on the outputs\. Make it of the batch"):
        trained({"policy": TERMS["policy"], "mine": mine})


def nan(batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
    return torch.where(batch.decision, (outputs.logprobs - 1).log(), outputs.logprobs), batch.reply


def infinite(batch: TokenBatch, outputs: Outputs) -> tuple[Tensor, Tensor]:
    return -1 / (outputs.entropy - outputs.entropy), batch.decision


@pytest.mark.parametrize(("of", "text"), [(nan, "nan"), (infinite, "-inf")])
def test_a_term_that_is_not_finite_is_named_before_any_step(
    of: Callable[[TokenBatch, Outputs], Any], text: str
) -> None:
    said = rf"^loss\.bad: Mine returned {text}, not finite at \d+ of \d+ places. Mend the term, or lower "
    with pytest.raises(UserError, match=said):
        trained({"policy": TERMS["policy"], "bad": Mine(of)})
    trained({"policy": TERMS["policy"], "bad": Mine(of, weight=0.0)})


def test_a_model_that_is_not_finite_is_no_fault_of_the_term() -> None:
    policy, batch = played()
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    with torch.no_grad():
        next(policy.lm.parameters()).fill_(torch.nan)
    with pytest.raises(
        UserError, match=r"^loss\.policy: the model's outputs are not finite. Lower algo\.update\.learn"
    ):
        update(policy, None, batch, {"policy": PolicyLoss()}, optimizer, UpdateConfig(), torch.Generator())


@pytest.mark.parametrize(
    ("of", "text"),
    [
        (lambda b, o: (o.logprobs, b.replies), "AttributeError: 'TokenBatch' object has no attribute 'replies'"),
        (lambda b, o: (o.logprobs / [][0], b.reply), "IndexError: list index out of range"),
        # the outputs that places are counted on are zeros, so only the model's own meet this
        (lambda b, o: (1 / 0 if o.entropy.any() else o.entropy, b.reply), "ZeroDivisionError: division by zero"),
    ],
)
def test_a_term_that_raises_is_named_with_its_line(of: Callable[[TokenBatch, Outputs], Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        trained({"policy": TERMS["policy"], "bad": Mine(of)})
    line = of.__code__.co_firstlineno
    assert str(error.value).startswith(f"loss.bad: Mine raised {text} ({__file__}, line {line}); ")
