"""Compiled attention and products against plain sums in double precision, for every build that this processor runs."""

from __future__ import annotations

import copy
import ctypes
import itertools
import shlex
import subprocess
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from marl import kernels
from marl.kernels import BUILDS, Linear, attend, attend_rows, best, learns, load, product, quicken, takes
from marl.policy import tiny_lm
from marl.varlen import _COMPILED, compiled, varlen
from tests.marl.models import ARCHITECTURES, RECURRENT, random_lm

BUILT = [name for name in BUILDS if load(name) is not None]
WIDTHS = (16, 32, 48, 64, 80, 128, 8, 24)  # of heads; of the last two only slots are read

needs_build = pytest.mark.skipif(not BUILT, reason="nothing was compiled for this processor (is there a compiler?)")


@pytest.fixture(params=BUILT)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(kernels, "best", lambda: request.param)
    return str(request.param)


@pytest.fixture
def threads() -> Iterator[None]:
    """More than one, whatever the tests run with."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def softmax_by_hand(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """(E,): what one query (D,) sees in keys (n, D) and values (n, E), in double precision."""
    return ((keys.double() @ q.double()) * scale).softmax(0) @ values.double()


def compiler() -> list[str]:
    """That of this Python, as an installation calls it."""
    return [*shlex.split(sysconfig.get_config_var("CC") or "cc"), "-shared", "-fPIC"]


def test_what_compiles_here_is_there(tmp_path: Path) -> None:
    """A build does not go missing unseen: an installation goes on without it."""
    listed = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    assert [each["name"] for each in listed] == list(BUILDS)
    made = []
    for each in listed:
        command = [*compiler(), *each["extra-compile-args"], *each["sources"], "-o", str(tmp_path / each["name"])]
        try:
            compiles = subprocess.run(command, capture_output=True).returncode == 0
            if compiles and ctypes.CDLL(str(tmp_path / each["name"])).runs():
                made.append(each["name"])
        except OSError as error:
            pytest.skip(f"no compiler, or no OpenMP: {error}")
    if not made:
        pytest.skip("nothing can be compiled for this processor")
    assert made == BUILT and best() == made[0]
    assert kernels.in_use().startswith(f"attention {made[0][-2:]}")


@needs_build
def test_a_build_of_other_source_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "kernels.c"
    source.write_text("changed")  # now, after the build
    monkeypatch.setattr(kernels, "SOURCE", source)
    with pytest.warns(UserWarning, match=r"kernels\.c has changed since it was built: .* install"):
        assert load.__wrapped__(BUILT[0]) is None
    monkeypatch.setattr(kernels, "SOURCE", tmp_path / "not_there.c")  # as where only what was built is installed
    assert load.__wrapped__(BUILT[0]) is not None


@given(seed=st.integers(0, 2**32 - 1), width=st.sampled_from(WIDTHS), shared=st.integers(1, 3), each=st.integers(1, 6),
       half=st.booleans())  # fmt: skip
@settings(max_examples=60, deadline=None)
@needs_build
def test_tokens_see_their_own_slot_up_to_themselves(seed: int, width: int, shared: int, each: int, half: bool) -> None:
    """Chunks of any lengths anywhere in slots; what stands behind a token, or in other slots, is not a number."""
    rng = np.random.default_rng(seed)
    draw = torch.Generator().manual_seed(seed)
    chunks = [
        (int(slot), *sorted(rng.integers(0, 70, 2).tolist())) for slot in rng.permutation(5)[: rng.integers(1, 5)]
    ]
    outside = int(rng.choice([width, 16, 40]))
    keys, values = torch.full((5, 71, shared, width), torch.nan), torch.full((5, 71, shared, outside), torch.nan)
    for slot, _, last in chunks:
        keys[slot, : last + 1] = torch.randn(last + 1, shared, width, generator=draw)
        values[slot, : last + 1] = torch.randn(last + 1, shared, outside, generator=draw)
    rows = torch.tensor([slot for slot, first, last in chunks for _ in range(first, last + 1)])
    places = torch.tensor([place for _, first, last in chunks for place in range(first, last + 1)])
    q = torch.randn(len(rows), shared * each, width, generator=draw)
    if half:
        q, keys, values = (each.bfloat16() for each in (q, keys, values))
    for name in BUILT:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "best", lambda name=name: name)
            found = attend(q, keys, values, rows, places, 0.3)
            assert found.dtype == q.dtype
            for i, (row, place) in enumerate(zip(rows.tolist(), places.tolist(), strict=True)):
                seen = slice(0, place + 1)
                alone = attend(q[i : i + 1], keys, values, rows[i : i + 1], places[i : i + 1], 0.3)
                assert torch.equal(alone[0], found[i])  # to the last bit, whoever is beside it
                for h in range(shared * each):
                    expected = softmax_by_hand(q[i, h], keys[row, seen, h // each], values[row, seen, h // each], 0.3)
                    near = {"atol": 1e-2, "rtol": 1e-2} if half else {"atol": 1e-5, "rtol": 1e-5}
                    torch.testing.assert_close(found[i, h].double(), expected, **near)


@needs_build
def test_threads_change_no_bit(build: str, threads: None) -> None:
    draw = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 9, 40, 2, 32, generator=draw)
    q, rows = torch.randn(9, 4, 32, generator=draw), torch.arange(9)
    several = attend(q, keys, values, rows, 3 * rows + 2, 1.0)
    torch.set_num_threads(1)
    assert torch.equal(several, attend(q, keys, values, rows, 3 * rows + 2, 1.0))


@needs_build
def test_large_scores_do_not_overflow_and_what_is_no_number_shows(build: str) -> None:
    keys = torch.zeros(1, 20, 1, 16)
    keys[0, 7] = 1e4
    values = torch.arange(20.0)[None, :, None, None].expand(1, 20, 1, 16).contiguous()
    q, row = torch.ones(1, 1, 16), torch.zeros(1, dtype=torch.int64)
    assert attend(q, keys, values, row, row + 19, 1.0).eq(7).all()
    assert attend(-q, keys, values, row, row + 19, 1.0).allclose(torch.tensor((190 - 7) / 19))
    keys[0, 3] = torch.nan
    assert attend(q, keys, values, row, row + 19, 1.0).isnan().all()
    assert attend(q, keys, values, row, row + 2, 1.0).allclose(torch.tensor(1.0))


def by_torch(q: Tensor, k: Tensor, v: Tensor, begins: list[int], scale: float) -> Tensor:
    """Rows (N, heads, D) one behind the other, by torch, in double precision."""
    parts = [
        nn.functional.scaled_dot_product_attention(
            *(each[a:b].transpose(0, 1).double() for each in (q, k, v)), is_causal=True, scale=scale, enable_gqa=True
        ).transpose(0, 1)
        for a, b in itertools.pairwise(begins)
    ]
    return torch.cat(parts)


@pytest.mark.parametrize("width", WIDTHS[:6])
@pytest.mark.parametrize(("shared", "each"), [(1, 4), (2, 1), (1, 3), (2, 6)])
@pytest.mark.parametrize("lengths", [(1,), (5, 130, 3), (64, 65), (200,)])
@needs_build
def test_rows_and_their_gradients_are_those_of_attention(
    width: int, shared: int, each: int, lengths: tuple[int, ...], build: str, threads: None
) -> None:
    """Also where a row is worked on in several pieces."""
    draw = torch.Generator().manual_seed(len(lengths) + width)
    begins = [0, *np.cumsum(lengths).tolist()]
    given = [torch.randn(begins[-1], n, width, generator=draw) for n in (shared * each, shared, shared)]
    slopes = torch.randn(begins[-1], shared * each, width, generator=draw)
    ours, theirs = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    assert learns(ours[0], ours[2])
    found, _ = attend_rows(*ours, torch.tensor(begins), max(lengths), 0.2)
    expected = by_torch(*theirs, begins, 0.2)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad((found * slopes).sum(), ours)
    right = torch.autograd.grad((expected * slopes).sum(), theirs)
    for gradient, other in zip(gradients, right, strict=True):
        torch.testing.assert_close(gradient, other, atol=3e-5, rtol=1e-4)


@needs_build
def test_half_precision_is_computed_in_whole_and_kept_in_half(build: str) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(30, n, 32, generator=draw).bfloat16().requires_grad_() for n in (4, 1, 1))
    found, _ = attend_rows(q, k, v, torch.tensor([0, 30]), 30, 0.2)
    expected = by_torch(*(x.float() for x in (q, k, v)), [0, 30], 0.2)
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected.float().bfloat16())
    found.float().sum().backward()
    assert {x.grad.dtype for x in (q, k, v) if x.grad is not None} == {torch.bfloat16} and q.grad is not None


@needs_build
def test_what_is_made_is_known_without_computing() -> None:
    with FakeTensorMode():
        q, k = torch.zeros(6, 4, 32, requires_grad=True), torch.zeros(6, 1, 32, requires_grad=True)
        found, _ = attend_rows(q, k, k, torch.tensor([0, 6]), 6, 0.1)
        found.sum().backward()
        assert found.shape == q.shape and q.grad is not None and k.grad is not None
        slots = torch.zeros(3, 9, 1, 32)
        where = torch.zeros(6, dtype=torch.int64)
        assert attend(q.detach(), slots, torch.zeros(3, 9, 1, 48), where, where, 0.1).shape == (6, 4, 48)


def test_without_a_build_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "best", lambda: "")
    assert not takes(torch.device("cpu"), torch.float32) and not compiled(tiny_lm(50, hidden_size=64))
    monkeypatch.setattr(kernels, "has_faster_products", lambda: False)
    assert kernels.in_use() == "torch"


# --- In models ---


def calls_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """To which each call of `attend_rows` in a model adds one."""
    calls: list[int] = []
    monkeypatch.setattr("marl.varlen.attend_rows", lambda *given: calls.append(1) or attend_rows(*given))
    return calls


@pytest.mark.parametrize("name", [*ARCHITECTURES, "mistral", *RECURRENT])
@needs_build
def test_models_are_read_by_it_where_that_is_what_they_compute(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wider = {"gpt2": {"n_embd": 64}, "llama": {"hidden_size": 64, "head_dim": 16}}  # the others' heads are 16 wide
    config = random_lm(name, 64, 256).config
    config.update(wider.get(name, {}))
    lm = AutoModelForCausalLM.from_config(config).eval()
    _COMPILED.clear()
    calls = calls_of(monkeypatch)
    assert compiled(lm) == (name in ARCHITECTURES)
    if name in ARCHITECTURES:
        calls.clear()
        ids = torch.randint(0, 64, (3, 20), generator=torch.Generator().manual_seed(0))
        expected = lm(input_ids=ids).logits
        with varlen(lm):
            torch.testing.assert_close(lm(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)
        assert len(calls) == lm.config.num_hidden_layers


@needs_build
def test_it_is_found_whoever_asks_first() -> None:
    """A frozen reference within autocast, and without gradients, as much as a learner."""
    lm = tiny_lm(60, hidden_size=64, layers=1)
    _COMPILED.clear()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert compiled(lm.requires_grad_(False))
    assert not any(p.requires_grad or p.grad is not None for p in lm.parameters())


@pytest.mark.parametrize("bf16", [False, True])
@needs_build
def test_a_model_learns_the_same_by_it(bf16: bool) -> None:
    lm = tiny_lm(60, hidden_size=64, layers=2, intermediate_size=96)
    ids = torch.randint(0, 60, (3, 50), generator=torch.Generator().manual_seed(0))
    gradients: list[dict[str, Tensor]] = []
    for fast in (False, True):
        lm.zero_grad()
        with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            calls = calls_of(patch)
            if fast:
                with varlen(lm):
                    lm(input_ids=ids).logits.float().log_softmax(-1)[..., 3].sum().backward()
            else:
                lm(input_ids=ids).logits.float().log_softmax(-1)[..., 3].sum().backward()
        assert len(calls) == 2 * fast
        gradients.append({name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None})
    for name, one in gradients[0].items():
        near = (0.05 if bf16 else 1e-4) * float(one.abs().max())
        torch.testing.assert_close(gradients[1][name], one, atol=near, rtol=0)


# --- Products ---


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")
@pytest.mark.parametrize("bias", [False, True])
def test_products_and_their_gradients_are_those_of_torch(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "has_faster_products", lambda: True)
    monkeypatch.setattr(kernels, "LARGE", 1)
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(24, 40, bias=bias), nn.Tanh(), nn.Linear(40, 8, bias=bias))
    quick = copy.deepcopy(whole)
    quicken(quick)
    assert [type(m) for m in quick] == [
        Linear,
        nn.Tanh,
        Linear,
    ] and quick.state_dict().keys() == whole.state_dict().keys()
    quick = copy.deepcopy(quick)  # as policies are
    x = torch.randn(5, 7, 24)
    results = []
    for model in (whole, quick):
        own = x.clone().requires_grad_()
        found = model(own)
        found.pow(2).sum().backward()
        results.append([found, own.grad, *(p.grad for p in model.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(quick(x), whole(x), atol=1e-5, rtol=1e-5)
        assert quick(x[:0]).shape == (0, 7, 8)  # nothing to read
        torch.testing.assert_close(quick(x[0, 0]), whole(x[0, 0]), atol=1e-5, rtol=1e-5)
        with torch.autocast("cpu", torch.bfloat16):
            assert quick(x).dtype == torch.bfloat16
        assert quick.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")
def test_layers_that_learn_alone_and_frozen_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "has_faster_products", lambda: True)
    monkeypatch.setattr(kernels, "LARGE", 1)
    layer = nn.Linear(6, 4)
    quicken(layer)
    layer(torch.ones(3, 6)).sum().backward()  # what comes in has no gradient
    assert layer.weight.grad is not None and layer.weight.grad.allclose(torch.full((4, 6), 3.0))
    assert layer.bias.grad is not None and layer.bias.grad.eq(3).all()
    layer.zero_grad()
    layer.weight.requires_grad_(False)
    layer(torch.ones(3, 6)).sum().backward()
    assert layer.bias.grad.eq(3).all()
    layer.requires_grad_(False)
    x = torch.ones(3, 6, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None and x.grad[0].allclose(layer.weight.sum(0))
    with FakeTensorMode():
        assert product(torch.zeros(5, 6), torch.zeros(4, 6)).shape == (5, 4)


@pytest.mark.parametrize(("count", "found"), [(0, 0), (1, 1), (7, 7), (17, 18), (100, 104), (128, 128), (129, 144)])
def test_numbers_of_rows_come_in_eight_an_octave(count: int, found: int) -> None:
    assert kernels.round_up(count) == found


def test_small_products_stay_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "has_faster_products", lambda: True)
    large, small = torch.ones(1 << 10, 1 << 8), torch.ones((1 << 10) - 1, 1 << 8)
    for x, ours in ((large, 1), (small, 0)):
        with torch.profiler.profile() as profile:
            product(x, torch.ones(1 << 7, 1 << 8))
        assert sum(event.name == "mkldnn::_linear_pointwise" for event in profile.events() or ()) == ours


def test_other_processors_keep_torchs_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "has_faster_products", lambda: False)
    model = nn.Sequential(nn.Linear(6, 4))
    quicken(model)
    assert type(model[0]) is nn.Linear
    x = torch.randn(3, 6)
    assert torch.equal(product(x, model[0].weight), nn.functional.linear(x, model[0].weight))
