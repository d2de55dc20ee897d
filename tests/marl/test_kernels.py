"""Compiled attention and products against plain sums in double precision, for every build that this processor runs."""

from __future__ import annotations

import copy
import ctypes
import itertools
import shlex
import subprocess
import sysconfig
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, GemmaConfig, GemmaForCausalLM, GPTNeoConfig

from marl.common.errors import UserError
from marl.kernels import cpu as kernels
from marl.kernels.cpu import (
    BUILDS,
    Linear,
    Norm,
    attend,
    attend_rows,
    best,
    learns,
    load,
    norm,
    product,
    quicken,
    takes,
)
from marl.kernels.varlen import _COMPILED, compiled, varlen
from marl.model.policy import tiny_lm
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
    assert kernels.in_use().startswith(f"attention and norms {made[0].split('_cpu_')[1]}")


@needs_build
def test_a_build_of_other_source_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "marl" / "kernels").mkdir(parents=True)
    source = tmp_path / "marl" / "kernels" / "cpu.c"
    source.write_text("changed")  # now, after the build
    monkeypatch.setattr(kernels, "SOURCE", source)
    assert load.__wrapped__(BUILT[0]) is not None  # installed: times are the installer's
    (tmp_path / "pyproject.toml").touch()  # a checkout
    with pytest.warns(UserWarning, match=r"cpu\.c has changed since it was built: .* install"):
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
    found, _ = attend_rows(*ours, torch.tensor(begins), 0.2)
    expected = by_torch(*theirs, begins, 0.2)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad((found * slopes).sum(), ours)
    right = torch.autograd.grad((expected * slopes).sum(), theirs)
    for gradient, other in zip(gradients, right, strict=True):
        torch.testing.assert_close(gradient, other, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("width", WIDTHS[:6])
@pytest.mark.parametrize(("shared", "each"), [(1, 4), (2, 3)])
@pytest.mark.parametrize("lengths", [(1,), (5, 130, 3), (64, 65), (200,)])
@needs_build
def test_half_precision_is_added_up_in_whole_and_kept_in_half(
    width: int, shared: int, each: int, lengths: tuple[int, ...], build: str, threads: None
) -> None:
    """No worse than by rounding each weight, its gradient, what is read and what is made once."""
    draw = torch.Generator().manual_seed(len(lengths) + width)
    begins = [0, *np.cumsum(lengths).tolist()]
    ours = [
        torch.randn(begins[-1], n, width, generator=draw).bfloat16().requires_grad_()
        for n in (shared * each, shared, shared)
    ]
    theirs = [x.detach().double().requires_grad_() for x in ours]
    slopes = torch.randn(begins[-1], shared * each, width, generator=draw).bfloat16()
    found, _ = attend_rows(*ours, torch.tensor(begins), 0.2)
    expected = by_torch(*theirs, begins, 0.2)
    gradients = torch.autograd.grad((found * slopes).sum(), ours)
    right = torch.autograd.grad((expected * slopes).sum(), theirs)
    for own, other in zip((found, *gradients), (expected, *right), strict=True):
        assert own.dtype == torch.bfloat16
        error, usual = own.double() - other, other.pow(2).mean().sqrt().clamp(min=1)  # a single token has no slope
        assert error.pow(2).mean().sqrt() <= 2**-8 * usual and error.abs().max() <= 2**-4 * usual


@needs_build
def test_products_of_pairs_round_without_leaning(build: str, threads: None) -> None:
    """Weights are in bfloat16, which shows, and rounded, not cut off, by which all would come out smaller."""
    draw = torch.Generator().manual_seed(0)
    leaning = []
    for lengths in ((70, 30, 100), (200,)):
        begins = [0, *np.cumsum(lengths).tolist()]
        ours = [torch.randn(200, n, 64, generator=draw).bfloat16().requires_grad_() for n in (4, 1, 1)]
        whole = [x.detach().float().requires_grad_() for x in ours]
        slopes = torch.randn(200, 4, 64, generator=draw).bfloat16()
        found, _ = attend_rows(*ours, torch.tensor(begins), 0.2)
        slots = attend(*(x.detach() for x in ours[:1]), *(x.detach()[None] for x in ours[1:]),
                       torch.zeros(200, dtype=torch.int64), torch.arange(200), 0.2)  # fmt: skip
        plain, _ = attend_rows(*whole, torch.tensor(begins), 0.2)
        made = (found, *torch.autograd.grad((found * slopes).sum(), ours))
        right = (plain, *torch.autograd.grad((plain * slopes).sum(), whole))
        if len(lengths) == 1:
            made, right = (*made, slots), (*right, plain)
        for own, other in zip(made, right, strict=True):
            assert not torch.equal(own, other.bfloat16())
            own, other = own.detach().double(), other.detach().double()
            leaning.append(float((own * other).sum() / other.pow(2).sum() - 1))
    assert max(map(abs, leaning)) < 0.1 * 2**-8, leaning


@pytest.mark.parametrize("width", [32, 64])
@needs_build
def test_a_pair_is_filled_up_by_nothing_that_stands_behind(width: int, build: str) -> None:
    """An odd number of keys: the one behind them is not read, whatever it is."""
    for count in (1, 3, 5, 17, 63, 65):
        keys, values = (torch.full((2, 90, 1, width), torch.nan, dtype=torch.bfloat16) for _ in range(2))
        keys[:, :count] = values[:, :count] = torch.randn(2, count, 1, width).bfloat16()
        q = torch.randn(2, 4, width).bfloat16()
        found = attend(q, keys, values, torch.arange(2), torch.full((2,), count - 1), 0.3)
        for i, head in itertools.product(range(2), range(4)):
            expected = softmax_by_hand(q[i, head], keys[i, :count, 0], values[i, :count, 0], 0.3)
            torch.testing.assert_close(found[i, head].double(), expected, atol=1e-2, rtol=1e-2)


@needs_build
def test_every_piece_of_a_row_has_gradients_of_its_own(
    build: str, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that add to the same ones would lose some, now and then."""
    seen: list[Tensor] = []
    call = kernels._call

    def watched(function: str, *arguments: object) -> None:
        call(function, *arguments)
        if function == "attend_back":
            seen.extend(each for each in arguments if isinstance(each, Tensor) and each.dim() == 4)

    monkeypatch.setattr(kernels, "_call", watched)
    given = [torch.randn(200, n, 16).requires_grad_() for n in (2, 1, 1)]
    attend_rows(*given, torch.tensor([0, 200]), 0.2)[0].sum().backward()
    assert len(seen) == 2
    for each in seen:
        assert len(each) == 3 and all(piece.any() for piece in each)


@pytest.mark.parametrize("width", [16, 32])  # without pairs, and with them
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@needs_build
def test_rows_whose_scores_grow_do_not_overflow(width: int, dtype: torch.dtype, build: str) -> None:
    """Block by block, the highest score so far changes; also where nothing is left of all that came before."""
    keys = torch.zeros(200, 1, width, dtype=dtype)
    keys[[3, 70, 150], :, 0] = torch.tensor([[1.0], [40.0], [500.0]], dtype=dtype)
    values = torch.arange(200.0)[:, None, None].expand(200, 1, width).to(dtype).contiguous()
    q = torch.zeros(200, 4, width, dtype=dtype)
    q[..., 0] = 1
    given = [x.requires_grad_() for x in (q, keys, values)]
    found, logarithms = attend_rows(*given, torch.tensor([0, 200]), 1.0)
    for place, value, logarithm in ((0, 0.0, 0.0), (150, 150.0, 500.0), (199, 150.0, 500.0), (69, None, None)):
        scores = keys[: place + 1, 0, 0].double()
        torch.testing.assert_close(logarithms[place].double(), scores.logsumexp(0).expand(4), atol=1e-5, rtol=1e-6)
        wanted = scores.softmax(0) @ values[: place + 1, 0, 0].double()
        torch.testing.assert_close(found[place].double(), wanted.expand(4, width), atol=1e-4, rtol=2**-8)
        if value is not None:
            assert (found[place] == value).all() and (logarithms[place] == logarithm).all()
    gradients = torch.autograd.grad(found.float().sum(), given)
    assert all(x.isfinite().all() for x in gradients)
    exact = [x.detach().double().requires_grad_() for x in given]
    right = torch.autograd.grad(by_torch(*exact, [0, 200], 1.0).sum(), exact)
    for own, other in zip(gradients, right, strict=True):
        assert (own.double() - other).norm() <= (2**-7 if dtype == torch.bfloat16 else 1e-5) * other.norm() + 1e-6


@pytest.mark.parametrize("what", [0, 1, 2])  # of queries, keys, values
@pytest.mark.parametrize("each", [1, 2, 4])  # heads that share keys
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@needs_build
def test_what_is_no_number_shows_in_its_own_row_alone(what: int, each: int, dtype: torch.dtype, build: str) -> None:
    """There from its token on; as a value up to three tokens earlier, too."""
    given = [torch.randn(90, n, 32, dtype=dtype) for n in (each, 1, 1)]
    given[what][11] = torch.nan
    ours = [x.requires_grad_() for x in given]
    found, _ = attend_rows(*ours, torch.tensor([0, 20, 90]), 0.2)
    assert found[: 8 if what == 2 else 11].isfinite().all() and found[20:].isfinite().all()
    assert found[11].isnan().all() and (what == 0 or found[12:20].isnan().all())
    gradients = torch.autograd.grad(found.float().sum(), ours)
    assert gradients[0][11].isnan().all() and all(x[20:].isfinite().all() for x in gradients)


@needs_build
def test_scores_of_minus_infinity_are_left_behind(build: str) -> None:
    """A block whose scores overflow downwards, and then one that counts."""
    keys = torch.zeros(100, 1, 16)
    keys[:64] = -3e38
    values = torch.arange(100.0)[:, None, None].expand(100, 1, 16).contiguous()
    found, _ = attend_rows(torch.full((100, 1, 16), 2.0), keys, values, torch.tensor([0, 100]), 1.0)
    torch.testing.assert_close(found[64:, 0, 0], (64 + torch.arange(64.0, 100.0)) / 2)


@needs_build
def test_what_is_made_is_known_without_computing() -> None:
    with FakeTensorMode():
        q, k = torch.zeros(6, 4, 32, requires_grad=True), torch.zeros(6, 1, 32, requires_grad=True)
        found, _ = attend_rows(q, k, k, torch.tensor([0, 6]), 0.1)
        found.sum().backward()
        assert found.shape == q.shape and q.grad is not None and k.grad is not None
        slots = torch.zeros(3, 9, 1, 32)
        where = torch.zeros(6, dtype=torch.int64)
        assert attend(q.detach(), slots, torch.zeros(3, 9, 1, 48), where, where, 0.1).shape == (6, 4, 48)
        x, weight = torch.zeros(6, 2, 32, requires_grad=True), torch.zeros(32, requires_grad=True)
        normed, inverse = norm(x, weight, 1e-6, True)
        normed.sum().backward()
        assert (normed.shape, normed.dtype, inverse.shape) == (x.shape, torch.bfloat16, (6, 2))
        assert x.grad is not None and weight.grad is not None and x.grad.dtype == weight.grad.dtype == torch.float32


def test_without_a_build_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "best", lambda: "")
    assert not takes(torch.device("cpu"), torch.float32) and not compiled(tiny_lm(50, hidden_size=64))
    monkeypatch.setattr(kernels, "has_faster_products", lambda: False)
    assert kernels.in_use() == "torch"


# --- Norms ---


def norm_by_hand(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In double precision."""
    x, weight = x.double(), weight.double()
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("shape", [(16,), (3, 48), (2, 5, 256), (90, 1, 256), (0, 32)])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("half", [False, True])
@needs_build
def test_norms_and_their_gradients_are_those_of_the_formula(
    shape: tuple[int, ...], x_dtype: torch.dtype, weight_dtype: torch.dtype, half: bool, build: str, threads: None
) -> None:
    """Also where several threads share the rows."""
    draw = torch.Generator().manual_seed(len(shape))
    x = (3 * torch.randn(shape, generator=draw)).to(x_dtype).requires_grad_()
    weight = torch.randn(shape[-1], generator=draw).to(weight_dtype).requires_grad_()
    slopes = torch.randn(shape, generator=draw)
    found, inverse = norm(x, weight, 0.01, half)
    whole = not half and torch.float32 in (x_dtype, weight_dtype)
    assert found.dtype == (torch.float32 if whole else torch.bfloat16) and not inverse.requires_grad
    expected = norm_by_hand(x, weight, 0.01)
    near = {"atol": 1e-5, "rtol": 1e-5} if whole else {"atol": 1e-6, "rtol": 2**-8}  # half a place of bfloat16
    torch.testing.assert_close(found.double(), expected, **near)
    slopes = slopes.to(found.dtype)
    gradients = torch.autograd.grad(found, (x, weight), slopes)
    right = torch.autograd.grad(expected, (x, weight), slopes.double())
    for own, gradient, other in zip((x, weight), gradients, right, strict=True):
        assert gradient.dtype == own.dtype
        near = {"atol": 1e-4, "rtol": 1e-5} if own.dtype == torch.float32 else {"atol": 1e-4, "rtol": 2**-7}
        torch.testing.assert_close(gradient.double(), other.double(), **near)


@needs_build
def test_frozen_weights_and_slopes_without_numbers_of_their_own(build: str) -> None:
    x, weight = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)), torch.linspace(0, 1, 32)
    own = x.clone().requires_grad_()
    norm(own, weight, 0.0, False)[0].sum().backward()  # its slopes are one number, 160 times
    other = x.double().requires_grad_()
    norm_by_hand(other, weight, 0.0).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(own.grad.double(), other.grad, atol=1e-5, rtol=1e-5)
    with pytest.raises(AssertionError):
        norm(x, torch.ones(16), 0.0, False)
    assert torch.equal(norm(x, weight, 0, False)[0], norm(x, weight, 0.0, False)[0])  # as configurations have it


@needs_build
def test_a_rows_norm_is_the_same_whoever_is_beside_it(build: str, threads: None) -> None:
    x = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))  # more than one thread works alone
    weight = torch.linspace(-1, 2, 64)
    together, alone = norm(x, weight, 1e-6, False)[0], norm(x[7:8], weight, 1e-6, False)[0]
    assert x.numel() > kernels.FEW > alone.numel() and torch.equal(together[7:8], alone)
    across = torch.randn(64, 5).t()  # no row is one behind another
    assert torch.equal(norm(across, weight, 1e-6, False)[0], norm(across.contiguous(), weight, 1e-6, False)[0])


@needs_build
def test_halves_are_the_nearest_and_what_is_no_number_stays_none(build: str) -> None:
    """Of all numbers of bfloat16, and of floats between each two."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    ones = torch.ones(1, len(bits))  # a row that is divided by 1, times numbers of every kind
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):  # how far each is from the next
        numbers = (bits | low).view(torch.float32)
        numbers = numbers.masked_fill(numbers.abs() < 1e-37, 0.0)  # as torch has them, who may flush what is smaller
        found = norm(ones, numbers, 0.0, True)[0][0]
        assert torch.equal(found.isnan(), numbers.isnan()) and numbers.isnan().sum() >= 200
        assert torch.equal(found[~found.isnan()], numbers.bfloat16()[~found.isnan()])
    rows = torch.ones(3, 32)
    rows[1, 4] = torch.nan
    found = norm(rows, torch.ones(32), 1e-6, True)[0]
    assert found[1].isnan().all() and found[0].eq(1).all() and found[2].eq(1).all()


@pytest.mark.parametrize("name", [*ARCHITECTURES, "mistral", *RECURRENT, "gemma"])
@pytest.mark.parametrize("bf16", [False, True])
@needs_build
def test_models_whose_norms_are_llamas_compute_the_same_by_them(name: str, bf16: bool) -> None:
    if name == "gemma":  # its norms multiply by 1 + weight, as Qwen 3.5's do
        lm: nn.Module = GemmaForCausalLM(
            GemmaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                        num_attention_heads=2, num_key_value_heads=1, head_dim=16)
        )  # fmt: skip
    else:
        lm = random_lm(name, 64, 256)
    torch.manual_seed(0)
    for parameter in lm.parameters():  # a norm's weights are ones at first, and would hide one that is left out
        parameter.data += 0.1 * torch.randn_like(parameter)
    lm, quick = lm.eval(), copy.deepcopy(lm).eval()
    quicken(quick)
    quick = copy.deepcopy(quick)  # as policies are
    norms = sum(isinstance(module, Norm) for module in quick.modules())
    assert (norms > 0) == (name not in ("gpt2", "gemma", "qwen3_5")), norms
    if name in ("llama", "qwen3"):  # values are made of what the last one makes
        made = [module.of_a_layer for module in quick.modules() if isinstance(module, Norm)]
        assert made.count(False) == 1 and not quick.base_model.norm.of_a_layer
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            assert quick.base_model(input_ids=torch.arange(9)[None]).last_hidden_state.dtype == torch.float32
    assert quick.state_dict().keys() == lm.state_dict().keys()
    assert [type(m).__name__ for m in quick.modules()] == [type(m).__name__ for m in lm.modules()]
    ids = torch.randint(0, 64, (3, 20), generator=torch.Generator().manual_seed(0))
    results: list[list[Tensor]] = []
    for model in (lm, quick):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(input_ids=ids).logits.float()
        logits.log_softmax(-1)[..., 3].sum().backward()
        results.append([logits, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1])
    for one, other in zip(*results, strict=True):
        near = (0.04 if bf16 else 1e-4) * max(float(one.detach().abs().max()), 1e-3)
        torch.testing.assert_close(other, one, atol=near, rtol=0)


def test_layers_within_one_decorator_are_not_alike() -> None:
    def within(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *given: forward(*given)

    class One(nn.Module):
        forward = within(lambda self, x: x)

    class Other(nn.Module):
        forward = within(lambda self, x: 2 * x)

    assert not kernels._computes_as(Other, One)


@needs_build
def test_norms_are_the_models_own_where_nothing_is_compiled_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.arange(12)[None]
    lm = tiny_lm(60, hidden_size=64, layers=1, intermediate_size=96).eval()
    expected = lm(input_ids=ids).logits
    narrow = tiny_lm(60, hidden_size=24, layers=1, heads=2, intermediate_size=24)
    quicken(lm)
    quicken(narrow)
    by_it = "marl::norm"
    with torch.profiler.profile() as profile:
        narrow(input_ids=ids)  # 24 is no multiple of 16
        lm.double()(input_ids=ids)
        with torch.autocast("cpu", torch.float16):
            lm.float()(input_ids=ids)
    assert by_it not in {event.name for event in profile.events() or ()}
    with torch.profiler.profile() as profile:
        torch.testing.assert_close(lm(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)
    assert by_it in {event.name for event in profile.events() or ()}
    made = lm(input_ids=ids).logits
    with torch.no_grad():
        assert torch.equal(lm(input_ids=ids).logits, made)  # by a shorter way
    monkeypatch.setattr(kernels, "best", lambda: "")
    assert torch.equal(lm(input_ids=ids).logits, expected)  # a build that went away
    fresh = tiny_lm(60, hidden_size=64, layers=1)
    quicken(fresh)
    assert not any(isinstance(module, Norm) for module in fresh.modules())


# --- In models ---


def calls_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """To which each call of `attend_rows` in a model adds one."""
    calls: list[int] = []
    monkeypatch.setattr("marl.kernels.varlen.attend_rows", lambda *given: calls.append(1) or attend_rows(*given))
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


def test_a_model_that_attends_in_code_of_its_own_is_not_read_by_it() -> None:
    config = GPTNeoConfig(vocab_size=64, hidden_size=64, num_layers=2, num_heads=4, attention_types=[[["global"], 2]])
    lm = AutoModelForCausalLM.from_config(config).eval()
    assert not compiled(lm)
    with pytest.raises(UserError, match="attends in code of its own"), varlen(lm):
        pass


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


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")
@pytest.mark.parametrize("sizes", [(24, 40), (40, 24)])
def test_views_with_gaps_are_multiplied_by_kernels_too(
    sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """For every fourth token of a batch oneDNN has its reference alone: 2.8 seconds where 3 ms are enough."""
    monkeypatch.setattr(kernels, "has_faster_products", lambda: True)
    monkeypatch.setattr(kernels, "LARGE", 1)
    inside, outside = sizes
    layer = nn.Linear(inside, outside, bias=False)
    quicken(layer)
    states = torch.randn(2, 64, inside, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        found = layer(states[:, ::4])
        found.sum(1).pow(2).sum().backward()  # what comes back has no numbers of its own, either
        spaced = product(torch.ones(32, inside), layer.weight.detach().repeat(1, 2)[:, :inside])
    told = capfd.readouterr().out
    assert "inner_product" in told and "ref:any" not in told
    torch.testing.assert_close(spaced, layer.weight.sum(1).expand(32, outside), atol=1e-4, rtol=1e-4)
    slopes = 2 * found.sum(1, keepdim=True).expand_as(found).double()
    expected = torch.einsum("btv,btd->vd", slopes, states[:, ::4].double())
    torch.testing.assert_close(layer.weight.grad.double(), expected, atol=1e-3, rtol=1e-4)


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
