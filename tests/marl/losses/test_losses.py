"""Each loss against a naive loop over tokens and a number worked out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from marl.learning.batch import collate
from marl.losses import Loss, Outputs
from marl.losses.entropy import EntropyLoss
from marl.losses.imitation import ImitationLoss
from marl.losses.kl import KL_ESTIMATORS, KLLoss
from marl.losses.listening import ListeningLoss
from marl.losses.plan import PlanLoss
from marl.losses.policy import PolicyLoss
from marl.losses.value import ValueLoss
from marl.losses.world_model import WorldModelLoss
from marl.types import Episode, Kind, Stream, TokenBatch
from tests.marl.batches import paying, three_turns

EVERY: list[Loss] = [
    PolicyLoss(), PolicyLoss(speech=0.2, choice=3.0), ValueLoss(), EntropyLoss(), EntropyLoss(over="choice"),
    EntropyLoss(over="speech"), *(KLLoss(weight=0.0, estimator=e) for e in KL_ESTIMATORS), ListeningLoss(),
    WorldModelLoss(), WorldModelLoss(after_questions=False), ImitationLoss(),
    PlanLoss(), PlanLoss(form="cross_entropy"),
]  # fmt: skip


@pytest.fixture
def batch() -> TokenBatch:
    """The three-turn game with advantages, returns and a reference drawn at random."""
    generator = torch.Generator().manual_seed(0)
    episode = three_turns()
    b = collate([(episode, "a"), (episode, "b")], paying(game=1.0))
    noise = torch.randn(3, *b.shape, generator=generator)
    return replace(
        b,
        advantages=noise[0] * b.reply,
        returns=noise[1] * b.decision,
        reference_logprobs=(b.logprobs + 0.5 * noise[2]) * b.reply,
    )


@pytest.fixture
def outputs(batch: TokenBatch) -> Outputs:
    """Random outputs of a model, with numbers also where no loss may look."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(5, *batch.shape, generator=generator)
    scores = torch.randn(batch.candidates.shape, generator=generator).masked_fill(batch.candidates < 0, -torch.inf)
    return Outputs(
        logprobs=batch.logprobs + 0.4 * noise[0],
        entropy=noise[1].abs(),
        values=noise[2],
        beliefs=scores.log_softmax(-1),
        observed=-noise[3].abs(),
        planned=torch.randn(batch.plan.shape, generator=generator)
        .masked_fill(batch.plan_ids < 0, -torch.inf)
        .log_softmax(-1),
        divergence=noise[4].abs(),
    )


def places(batch: TokenBatch) -> list[tuple[int, int]]:
    return [(b, t) for b in range(batch.shape[0]) for t in range(batch.shape[1])]


def naive(loss: Loss, batch: TokenBatch, o: Outputs) -> list[float]:
    """The losses, one place after the other, in plain numbers."""
    out = []
    if isinstance(loss, ListeningLoss):
        for n in range(len(batch.row)):
            out.append(-float(o.beliefs[n, int(batch.answer[n])]))
        return out
    for b, t in places(batch):
        kind, new, old = Kind(int(batch.kind[b, t])), float(o.logprobs[b, t]), float(batch.logprobs[b, t])
        sampled = kind in (Kind.CHOICE, Kind.SPEECH)
        if isinstance(loss, PolicyLoss) and sampled:
            ratio, advantage = math.exp(new - old), float(batch.advantages[b, t])
            clipped = min(max(ratio, 1 - loss.clip_coef), 1 + loss.clip_coef)
            part = loss.speech if kind is Kind.SPEECH else loss.choice
            out.append(-min(ratio * advantage, clipped * advantage) * part)
        if isinstance(loss, ValueLoss) and bool(batch.decision[b, t]):
            out.append((float(o.values[b, t]) - float(batch.returns[b, t])) ** 2 / 2)
        if isinstance(loss, EntropyLoss) and sampled and loss.over in ("both", kind.name.lower()):
            out.append(-float(o.entropy[b, t]))
        if isinstance(loss, KLLoss) and kind == Kind.SPEECH:
            d = new - float(batch.reference_logprobs[b, t])
            whole = float(o.divergence[b, t])
            out.append({"k2": d * d / 2, "k3": math.exp(-d) - 1 + d, "exact": whole}[loss.estimator])
        if isinstance(loss, WorldModelLoss) and kind == Kind.OBSERVATION and t > 0:
            answer_is_read_there = batch.kind[b, t - 1] == Kind.QUESTION
            if loss.after_questions or not answer_is_read_there:
                out.append(-float(o.observed[b, t]))
        if isinstance(loss, ImitationLoss) and bool(batch.imitate[b, t]):
            out.append(-new)
        if isinstance(loss, PlanLoss) and int(batch.plan_ids[b, t].max()) >= 0:
            pairs = [(float(p), float(q)) for p, q, i in zip(batch.plan[b, t], o.planned[b, t], batch.plan_ids[b, t],
                                                             strict=True) if int(i) >= 0]  # fmt: skip
            if loss.form == "kl":
                out.append(sum(math.exp(q) * (q - math.log(max(p, loss.floor))) for p, q in pairs))
            else:
                out.append(-sum(p * q for p, q in pairs))
    return out


@pytest.mark.parametrize("loss", EVERY, ids=repr)
def test_losses_equal_naive_loops(loss: Loss, batch: TokenBatch, outputs: Outputs) -> None:
    """Masks follow from the batch alone, because tokens are counted before the model is read."""
    before = {name: getattr(batch, name).clone() for name in ("kind", "imitate", "decision", "body")}
    values, mask = loss(batch, outputs)
    assert values.shape == mask.shape and mask.dtype == torch.bool and mask.any()
    np.testing.assert_allclose(values[mask].tolist(), naive(loss, batch, outputs), rtol=2e-5, atol=1e-6)
    assert loss(batch, Outputs.zeros(batch))[1].equal(mask)
    assert all(getattr(batch, name).equal(value) for name, value in before.items())  # nothing is written into


def test_which_tokens_each_loss_counts(batch: TokenBatch, outputs: Outputs) -> None:
    counts = {repr(loss): int(loss(batch, outputs)[1].sum()) for loss in EVERY}
    # a: bos, 1 more read, cue; four said. b: bos, 2 heard, 1 correction, 2 cues; two refused; one chosen.
    # Of what is read three tokens come right after a question.
    assert counts == {
        repr(PolicyLoss()): 7, repr(PolicyLoss(speech=0.2, choice=3.0)): 7, repr(ValueLoss()): 3,
        repr(EntropyLoss()): 7, repr(EntropyLoss(over="choice")): 1,
        repr(EntropyLoss(over="speech")): 6, **{repr(KLLoss(weight=0.0, estimator=e)): 6 for e in KL_ESTIMATORS},
        repr(ListeningLoss()): 4, repr(WorldModelLoss()): 2 + 5,
        repr(WorldModelLoss(after_questions=False)): 2 + 5 - 3, repr(ImitationLoss()): 5,
        repr(PlanLoss()): 1, repr(PlanLoss(form="cross_entropy")): 1,
    }  # fmt: skip


# -- by hand ---------------------------------------------------------------------------------------------------------
def one_token(
    kind: Kind, logprob: float = 0.0, reference: float = 0.0, advantage: float = 0.0, ret: float = 0.0
) -> TokenBatch:
    """A token that was read, with a question, and one of this kind, with a plan."""
    empty = Stream([1, 2], [Kind.OBSERVATION, kind])
    batch = collate([(Episode(0, {}, {}, {"a": empty}, (), (), (), {}, 1), "a")], {})
    at = torch.tensor([[False, True]])
    return replace(
        batch,
        decision=at,
        imitate=at,
        logprobs=logprob * at,
        reference_logprobs=reference * at,
        advantages=advantage * at,
        returns=ret * at,
        plan_ids=torch.tensor([[[-1, -1], [2, 3]]]),
        plan=torch.tensor([[[0.0, 0.0], [0.25, 0.75]]]),
        row=torch.tensor([0]),
        position=torch.tensor([0]),
        candidates=torch.tensor([[5, 6]]),
        answer=torch.tensor([1]),
        vote=torch.tensor([False]),
        also=torch.zeros(1, 0, dtype=torch.int64),
    )


def say(
    logprob: float = 0.0, entropy: float = 0.0, value: float = 0.0, beliefs: Tensor | None = None, observed: float = 0.0
) -> Outputs:
    at = torch.tensor([[0.0, 1.0]])
    return Outputs(
        at * logprob, at * entropy, at * value, torch.zeros(1, 2) if beliefs is None else beliefs, at * observed,
        planned=torch.zeros(1, 2, 0), divergence=at * 0,
    )  # fmt: skip


def only(result: tuple[Tensor, Tensor]) -> float:
    values, mask = result
    assert int(mask.sum()) == 1
    return float(values[mask])


@pytest.mark.parametrize(("also", "truth"), [((), 0.5), ((0,), 0.7), ((0, 2), 1.0), ((2, -1), 0.8)])
def test_belief_in_any_true_answer_is_learned(also: tuple[int, ...], truth: float) -> None:
    """-log of the probability of all true ones; of a single one the very numbers of a plain cross-entropy."""
    probs = torch.tensor([[0.2, 0.5, 0.3]])
    beliefs = probs.log().requires_grad_()
    batch = replace(
        one_token(Kind.CHOICE), candidates=torch.tensor([[5, 6, 7]]), also=torch.tensor([also], dtype=torch.int64)
    )
    values, mask = ListeningLoss()(batch, say(beliefs=beliefs))
    assert mask.tolist() == [True] and values.item() == pytest.approx(-math.log(truth), abs=1e-6)
    (slope,) = torch.autograd.grad(values.sum(), beliefs)
    right = {1, *(i for i in also if i >= 0)}
    expected = [-float(probs[0, i]) / truth if i in right else 0.0 for i in range(3)]
    assert slope[0].tolist() == pytest.approx(expected)
    if not also:
        assert values.item() == -beliefs[0, 1].item() and slope[0].tolist() == [0, -1, 0]


LN2 = math.log(2)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "felt"),
    [
        (2.0, 3.0, -3.6, False),  # a good token already likelier by more than a fifth: clipped
        (0.5, 3.0, -1.5, True),  # a good token that became unlikely: pulled back, without a limit
        (0.5, -3.0, 2.4, False),  # a bad token already unlikely enough: clipped
        (2.0, -3.0, 6.0, True),  # a bad token that became likelier: pushed down, without a limit
        (1.1, 3.0, -3.3, True),
        (1.1, -3.0, 3.3, True),
        (1.0, 0.0, 0.0, True),
    ],
)
def test_policy_loss_clips_on_both_sides(ratio: float, advantage: float, loss: float, felt: bool) -> None:
    batch = one_token(Kind.SPEECH, logprob=-1.0, advantage=advantage)
    new = torch.tensor(-1.0 + math.log(ratio), requires_grad=True)
    outputs = say()
    outputs.logprobs = torch.stack([torch.zeros(()), new])[None]
    values, mask = PolicyLoss(clip_coef=0.2)(batch, outputs)
    assert values[mask].item() == pytest.approx(loss, rel=1e-5)
    values[mask].sum().backward()
    # the gradient of -ratio A in the log-probability is itself
    assert float(new.grad) == pytest.approx(loss if felt else 0.0, rel=1e-5)  # type: ignore[arg-type]


def test_value_entropy_listening_world_model_and_imitation_by_hand() -> None:
    assert only(ValueLoss()(one_token(Kind.CHOICE, ret=3.0), say(value=1.0))) == 2.0  # (1 - 3)^2 / 2
    assert only(EntropyLoss()(one_token(Kind.CHOICE), say(entropy=LN2))) == pytest.approx(-LN2)
    assert only(ImitationLoss()(one_token(Kind.SPEECH), say(logprob=-LN2))) == pytest.approx(LN2)
    assert only(WorldModelLoss()(one_token(Kind.OBSERVATION), say(observed=-LN2))) == pytest.approx(LN2)
    beliefs = torch.tensor([[0.75, 0.25]]).log()  # a quarter on the truth, the second candidate
    assert only(ListeningLoss()(one_token(Kind.QUESTION), say(beliefs=beliefs))) == pytest.approx(2 * LN2)


def test_the_plan_term_where_no_reply_has_a_plan(batch: TokenBatch, outputs: Outputs) -> None:
    none = replace(batch, plan=batch.plan[..., :0], plan_ids=batch.plan_ids[..., :0])
    outputs.planned = outputs.planned[..., :0]
    values, mask = PlanLoss()(none, outputs)
    assert values.shape == mask.shape == batch.shape and not mask.any()


def test_the_plan_term_by_hand() -> None:
    """The plan is (1/4, 3/4), the policy (1/2, 1/2)."""
    batch, outputs = one_token(Kind.CHOICE), say()
    outputs.planned = torch.tensor([[[0.0, 0.0], [-LN2, -LN2]]])
    assert only(PlanLoss(form="cross_entropy")(batch, outputs)) == pytest.approx(LN2)
    assert only(PlanLoss()(batch, outputs)) == pytest.approx(LN2 - math.log(3) / 2)  # ln(2)/2 + ln(2/3)/2
    outputs.planned = torch.tensor([[[0.0, 0.0], [-2 * LN2, -2 * LN2]]])  # the other half says none of the two
    assert only(PlanLoss(form="cross_entropy")(batch, outputs)) == pytest.approx(2 * LN2)
    # (ln 1 + ln 1/3) / 4 + ln(1/2 / 1/8) / 2
    assert only(PlanLoss(floor=0.125)(batch, outputs)) == pytest.approx(-math.log(3) / 4 + LN2)
    outputs.planned = torch.tensor([[[0.0, 0.0], [-LN2, -LN2]]])
    sure = replace(batch, plan=torch.tensor([[[0.0, 0.0], [0.0, 1.0]]]))  # what the plan rules out counts as the floor
    assert only(PlanLoss(floor=0.25)(sure, outputs)) == pytest.approx(0.5 * LN2 - 0.5 * LN2)


@pytest.mark.parametrize(("estimator", "value"), [("k2", LN2**2 / 2), ("k3", LN2 - 0.5)])
def test_kl_by_hand(estimator: str, value: float) -> None:
    """pi = 1/2, reference = 1/4: d = ln 2, and reference / pi = 1/2."""
    batch = one_token(Kind.SPEECH, reference=-2 * LN2)
    assert only(KLLoss(0.0, estimator)(batch, say(logprob=-LN2))) == pytest.approx(value, rel=1e-5)
    choice = one_token(Kind.CHOICE, reference=-2 * LN2)
    assert not KLLoss(0.0, estimator)(choice, say(logprob=-LN2))[1].any()
    for over, counted in (("choice", (choice,)), ("speech", (batch,)), ("both", (choice, batch))):
        for one in (choice, batch):
            values, mask = KLLoss(0.0, estimator, over)(one, say(logprob=-LN2))
            assert values[mask].tolist() == pytest.approx([value] * any(one is c for c in counted), rel=1e-5)


def expected_gradient(estimator: str, logits: Tensor, reference: Tensor) -> Tensor:
    """Gradient of the mean loss over three symbols, weighted by the policy's own probabilities as constants."""
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for symbol in range(3):
        batch = one_token(Kind.SPEECH)
        batch.reference_logprobs = torch.stack([torch.zeros_like(reference[0]), reference.log()[symbol]])[None]
        outputs = say()
        outputs.logprobs = torch.stack([torch.zeros_like(logprobs[0]), logprobs[symbol]])[None]
        values, mask = KLLoss(0.0, estimator)(batch, outputs)
        total = total + logprobs[symbol].detach().exp() * values[mask].sum()
    total.backward()
    assert logits.grad is not None
    return logits.grad


def test_gradients_of_the_estimators_in_expectation() -> None:
    logits = torch.tensor([0.3, -1.1, 0.6], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)

    def gradient_of(divergence: str) -> Tensor:
        x = logits.clone().requires_grad_()
        p = x.softmax(-1)
        kl = (p * (p.log() - reference.log())) if divergence == "reverse" else reference * (reference.log() - p.log())
        kl.sum().backward()
        assert x.grad is not None
        return x.grad

    def check(estimator: str, expected: Tensor) -> None:
        torch.testing.assert_close(expected_gradient(estimator, logits, reference), expected, atol=1e-12, rtol=1e-9)

    check("k2", gradient_of("reverse"))
    check("k3", gradient_of("forward"))
    assert float(gradient_of("reverse").abs().max()) > 0.05  # there was something to agree on
