"""Samples and random numbers against known probabilities."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marl.decoding.engine import Engine
from marl.decoding.sampling import doubling_sums, uniforms
from marl.model.policy import Policy
from tests.marl.models import hf_policy, tiny_policy

CONTEXT = 48


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Policy]:
    return {"gpt2": hf_policy(tmp_path_factory.mktemp("gpt2"), "gpt2"), "tiny": tiny_policy()}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_come_as_often_as_their_probability_says(temperature: float, policies: dict[str, Policy]) -> None:
    """Tokens drawn by 4,000 evenly spaced uniforms come up as often as their probabilities say, to within one draw."""
    policy, grid = policies["tiny"], 4000
    engine = Engine(policy, 1, CONTEXT)
    hidden = engine.read([0], [[5, 6, 7]])[-1]
    legal = (30, 12, 77)
    uniform = (np.arange(grid) + 0.5) / grid
    logits = policy.logits(hidden).detach()
    allowed = torch.ones(len(logits), dtype=torch.bool)
    allowed[policy.tokens.unspeakable] = False
    for options, mask in ((), allowed), (legal, torch.isin(torch.arange(len(logits)), torch.tensor(legal))):
        expected = (logits.double() / temperature).masked_fill(~mask, -torch.inf).softmax(0).numpy()
        ids, logprobs = engine.sample(hidden.expand(grid, -1), [options] * grid, temperature, uniform)
        counts = np.bincount(ids, minlength=len(expected))
        assert np.abs(counts - grid * expected).max() <= 1.01
        assert (counts[~mask.numpy()] == 0).all() and (counts > 0).sum() >= 3
        np.testing.assert_allclose(logprobs, np.log(expected[ids]), atol=1e-5)
        assert (np.diff(ids) >= 0).all()  # the inverse of the cumulative distribution


def test_each_row_has_its_own_legal_set_and_extreme_uniforms_stay_in_it(policies: dict[str, Policy]) -> None:
    policy = policies["gpt2"]
    engine = Engine(policy, 1, CONTEXT)
    hidden = engine.read([0], [[9, 3]])[-1]
    legal = [(4,), (), (50, 8, 9), (511, 0), ()]
    for u in (0.0, np.nextafter(1.0, 0.0)):
        ids, logprobs = engine.sample(hidden.expand(5, -1), legal, 1.0, np.full(5, u))
        assert ids[0] == 4 and logprobs[0] == 0.0
        assert ids[2] == (8 if u == 0 else 50) and ids[3] == (0 if u == 0 else 511)
        assert ids[1] == ids[4] < policy.tokens.size
        assert np.isfinite(logprobs).all() and not {ids[1], ids[4]} & set(policy.tokens.unspeakable)


# --- Uniform numbers ---


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40))
@settings(max_examples=200)
def test_a_uniform_number_is_a_function_of_its_own_seed_and_counter(seed: int, counter: int) -> None:
    one = uniforms(np.array([seed], dtype=np.uint64), np.array([counter], dtype=np.uint64))
    among = uniforms(np.array([3, seed, seed], dtype=np.uint64), np.array([1, counter, counter + 1], dtype=np.uint64))
    assert one.shape == (1,) and one.dtype == np.float64 and 0 <= one[0] < 1
    assert among[1] == one[0] != among[2]


def test_uniform_numbers_are_spread_evenly_and_do_not_repeat() -> None:
    seeds, counters = (a.ravel() for a in np.meshgrid(np.arange(300), np.arange(300)))
    numbers = uniforms(seeds, counters)
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    expected = len(numbers) / 20
    assert ((counts - expected) ** 2 / expected).sum() < 43.8  # 99.9 % with 19 degrees of freedom
    assert len(np.unique(numbers)) == len(numbers)
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(numbers[seeds < 299], numbers[seeds > 0])[0, 1]) < 0.02


def test_uniform_numbers_are_splitmix64s() -> None:
    """The first outputs of the reference implementation for seed 1234567, shifted to 53 bits."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    numbers = uniforms(np.full(5, 1234567), np.arange(5))
    assert numbers.tolist() == [(n >> 11) / 2**53 for n in known]


@pytest.mark.parametrize("width", [1, 2, 3, 8, 1000])
def test_sums_by_doubling_are_the_running_sums(width: int) -> None:
    values = torch.rand(3, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    torch.testing.assert_close(doubling_sums(values), values.cumsum(-1), rtol=1e-12, atol=0)
