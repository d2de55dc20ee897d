"""What caches and passes take beside what is there, in numbers known by hand, and the limits that a system sets."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DogeConfig,
    GPTJConfig,
    GPTNeoConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    StableLmConfig,
)

from marl.common.errors import UserError
from marl.decoding import memory
from marl.decoding.cache import SlotLayer, slot_cache
from marl.decoding.memory import (
    GIB,
    MIB,
    Alive,
    Fit,
    Slots,
    cgroup_memory,
    check_memory,
    free_memory,
    kept_kernels,
    learning_bytes,
    peak_bytes,
    playing_bytes,
    sparing,
    system_memory,
)
from marl.decoding.passes import one_pass
from marl.decoding.probes import read_budget, size_of
from marl.kernels import cpu as kernels
from marl.learning.batch import collate, seats_of
from marl.learning.config import UpdateConfig
from marl.learning.update import update
from marl.losses.entropy import EntropyLoss
from marl.losses.policy import PolicyLoss
from marl.model.policy import Policy, tiny_config, tiny_lm
from tests.marl.batches import said, talk
from tests.marl.models import RECURRENT, random_lm, small_tokens

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def torchs_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on processors on which those in float32 leave no kernels."""
    monkeypatch.setattr(memory, "has_faster_products", lambda: False)


def fit(caches: list[Slots], models: int, concurrency: int = 192, **settings: Any) -> Fit:
    return check_memory(
        caches, models, concurrency=concurrency, setting="algo.concurrency", context=1024, device=CPU, **settings
    )


def test_what_fits_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 384 * MIB + 10)
    assert fit([Slots(2, MIB)], 10) == Fit(192, "cache: 384 slots of 1.0 MiB, 0.4 GiB")
    two = fit([Slots(1, MIB), Slots(1, MIB // 2)], 0)
    assert two.line == "cache: 192 slots of 1.0 MiB and 192 slots of 0.5 MiB, 0.3 GiB"
    assert fit([Slots(1, MIB), Slots(1, MIB)], 0).line == "cache: 384 slots of 1.0 MiB, 0.4 GiB"
    assert fit([Slots(1, 4000)], 0, 4).line == "cache: 4 slots of 3.9 KiB, 15.6 KiB"
    lowered = "cache: 382 slots of 1.0 MiB, 0.4 GiB; algo.concurrency lowered from 192 to 191: 0.4 GiB are free (cpu)"
    assert fit([Slots(2, MIB)], 11) == Fit(191, lowered)


@pytest.mark.parametrize(
    ("caches", "models", "games"),
    [
        ([Slots(2, 100 * MIB)], 0, 5),
        ([Slots(2, 100 * MIB)], 24 * MIB, 5),
        ([Slots(2, 100 * MIB)], 25 * MIB, 4),
        ([Slots(2, 100 * MIB), Slots(1, 12 * MIB)], 0, 4),
        ([Slots(2, 100 * MIB, more=3)], 0, 3),
        ([Slots(2, 100 * MIB)], 824 * MIB, 1),
    ],
)
def test_what_does_not_fit_is_lowered_to_what_does(
    caches: list[Slots], models: int, games: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 1024 * MIB)
    found = fit(caches, models, concurrency=50)
    assert found.concurrency == games
    assert found.line.endswith(f"; algo.concurrency lowered from 50 to {games}: 1.0 GiB are free (cpu)")
    assert fit(caches, models, concurrency=games).line == found.line.partition(";")[0]


def test_slots_beyond_all_memory_are_refused_without_making_up_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stream of a thousand million tokens it took half a minute."""

    def asked(*_: object, **__: object) -> int:
        raise AssertionError

    monkeypatch.setattr(memory, "playing_bytes", asked)
    huge = [Slots(2, 10**15, config=tiny_config(300))]
    with pytest.raises(UserError, match=r"even algo\.concurrency=1 needs"):
        fit(huge, 0, concurrency=50)
    with pytest.raises(AssertionError):  # slots that fit: a pass over them is what tells
        fit([Slots(2, GIB // 1000, config=tiny_config(300))], 0, concurrency=50)


@pytest.mark.parametrize(
    ("models", "learning", "needed"), [(900 * MIB, 0, "1.1 GiB"), (2 * GIB, 0, "2.2 GiB"), (0, GIB, "1.2 GiB")]
)
def test_one_game_that_does_not_fit_is_refused(
    models: int, learning: int, needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 1024 * MIB)
    with pytest.raises(UserError, match=rf"Not enough memory: even algo.concurrency=1 needs {needed} \(") as error:
        fit([Slots(2, 100 * MIB)], models, concurrency=50, learning=learning)
    assert "and 1.0 GiB are free (cpu). Use a smaller model.context than 1024, " in str(error.value)
    assert ("algo.update.token_budget" in str(error.value)) == bool(learning)


def test_no_more_games_have_slots_than_are_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each player alone: few games of training stand beside many of evaluation."""
    monkeypatch.setattr(memory, "free_memory", lambda device: 100 * MIB)
    assert fit([Slots(2, MIB, games=8)], 0) == Fit(192, "cache: 16 slots of 1.0 MiB, 16.0 MiB")
    assert fit([Slots(2, MIB, games=8), Slots(1, MIB, games=20)], 0).line.startswith("cache: 36 slots")
    assert fit([Slots(2, MIB, games=8), Slots(1, MIB)], 0).concurrency == 84
    speaking = Slots(4, 10, config=tiny_config(300))
    assert replace(speaking, games=3).desk(48, CPU) == speaking.desk(3, CPU)


def test_caches_that_follow_one_another_need_not_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 100 * MIB)
    first = [Slots(1, MIB, games=8), Slots(1, MIB, games=8)]
    assert fit(first, 0, 90, later=[Slots(1, MIB)]) == Fit(90, "cache: 90 slots of 1.0 MiB, 90.0 MiB")
    # once the later ones are lowered, the first are the larger ones, and fit as well
    assert fit(first, 90 * MIB, 90, later=[Slots(1, MIB)]).concurrency == 5


def test_the_number_that_fits_fits_and_the_next_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 10**9 + 7)
    caches = [Slots(3, 1_234_567, more=5), Slots(1, 54_321)]
    found = fit(caches, 50_000_000, concurrency=252)
    assert found.concurrency == 251 and "758 slots" in found.line and "251 slots" in found.line
    assert fit(caches, 50_000_000, concurrency=251).concurrency == 251


@pytest.mark.parametrize(("learning", "games"), [(0, 4), (300 * MIB, 4), (500 * MIB, 3), (925 * MIB, 0)])
@pytest.mark.usefixtures("torchs_attention")
def test_what_passes_take_leaves_less_for_slots(learning: int, games: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,024 MiB, slots of 50 MiB, two for each game, copies of two, four or eight that speak, and a pass that takes
    20 MiB for each slot."""
    monkeypatch.setattr(memory, "free_memory", lambda device: 1024 * MIB)
    monkeypatch.setattr(memory, "playing_bytes", lambda config, device, *, slots, **_: 20 * MIB * slots)
    caches = [Slots(2, 50 * MIB, config=tiny_config(300)), Slots(0, 0, more=3)]
    if games:
        assert fit(caches, 0, concurrency=9, learning=learning).concurrency == games
    else:
        with pytest.raises(UserError, match=r"a pass 0\.9 GiB\), and 1\.0 GiB are free"):
            fit(caches, 0, concurrency=9, learning=learning)


@pytest.mark.usefixtures("torchs_attention")
def test_every_player_has_copies_of_those_that_speak() -> None:
    """They stay while an update computes, one desk a player; a GPU has them where several tokens are one step."""
    config, gpu = tiny_config(300), torch.device("cuda")
    slots = Slots(4, 10, config=config)
    assert [slots.desk(games, CPU) for games in (1, 2, 3, 5, 48)] == [0, 20, 40, 80, 640]
    assert Slots(1, 10, config=config).desk(48, CPU) == 480  # no more than there are slots
    assert Slots(0, 10, more=6, config=config).desk(48, CPU) == 60
    assert Slots(4, 10).desk(48, CPU) == 0
    assert (slots.desk(48, gpu), replace(slots, decode_steps=8).desk(48, gpu)) == (0, 640)


def test_nobody_has_copies_where_slots_are_read_where_they_stand(either_attention: str) -> None:
    slots = Slots(4, 10, config=tiny_config(300))
    expected = 0 if either_attention == "compiled" else 640
    assert slots.desk(48, CPU) == expected
    assert replace(slots, dtype=torch.bfloat16).desk(48, CPU) == expected
    assert replace(slots, dtype=torch.float64).desk(48, CPU) == replace(slots, decode_steps=8).desk(48, CPU) == 640
    assert replace(slots, config=MistralConfig(sliding_window=8)).desk(48, CPU) == 640


@pytest.mark.usefixtures("torchs_attention")
def test_copies_of_several_players_and_an_update_must_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "playing_bytes", lambda *_, **__: 0)
    caches = [Slots(2, 10 * MIB, config=tiny_config(300))] * 3
    needed = 3 * (16 + 8) * 10 * MIB + 100 * MIB
    monkeypatch.setattr(memory, "free_memory", lambda device: needed)
    found = fit(caches, 0, concurrency=8, learning=100 * MIB)
    assert found == Fit(8, "cache: 48 slots of 10.0 MiB, 0.7 GiB with copies of those that speak")
    monkeypatch.setattr(memory, "free_memory", lambda device: needed - 1)
    assert fit(caches, 0, concurrency=8, learning=100 * MIB).concurrency == 7


def test_a_copy_in_half_precision_counts_and_its_slots_are_half_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(300, hidden_size=64, intermediate_size=128, layers=3, context=256)
    whole, half = Slots.of(config, 256, 1), Slots.of(config, 256, 1, bf16=True)
    assert (half.size, half.copy, whole.copy) == (whole.size / 2, size_of(config, 256).weights / 2, 0)
    monkeypatch.setattr(memory, "free_memory", lambda device: half.size + half.copy)
    assert fit([half], 0, concurrency=1, later=[half]).line.startswith("cache: 1 slots of")
    with pytest.raises(UserError, match=r"even algo\.concurrency=1 needs"):
        fit([half], 1, concurrency=1)


# --- What passes take ---


def test_what_is_alive_is_counted_once_and_no_longer_than_it_lives() -> None:
    with Alive() as alive:
        a = torch.ones(1000)
        b = a.view(10, 100)  # of the same bytes
        assert alive.now == alive.most == 4000
        c = b + 1
        del a, b
        assert alive.now == 4000 and alive.most == 8000
        c.mul_(2)  # in place
        del c
    assert alive.now == 0 and alive.most == 8000


def test_what_was_there_before_is_not_counted() -> None:
    weight, gradient = torch.ones(1000, requires_grad=True), torch.zeros(1000)
    with Alive() as alive:
        view = weight.detach().view(10, 100)
        gradient.add_(view.flatten())
    assert (alive.now, alive.most) == (0, 0)


@pytest.mark.parametrize(("able", "more"), [(False, 4 * 30 * 50), (True, 0)])
def test_products_of_bfloat16_are_made_in_float32_without_instructions(
    able: bool, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "has_bf16_instructions", lambda: able)
    half, whole = torch.ones(30, 50, dtype=torch.bfloat16), torch.ones(30, 50)
    with Alive() as alive:
        kept = half @ torch.ones(50, 50, dtype=torch.bfloat16)
    assert alive.most == 2 * 50 * 50 + 2 * kept.numel() + more
    with Alive() as alive:
        _ = whole @ torch.ones(50, 50)
    assert alive.most == 4 * 50 * 50 + 4 * kept.numel()


@pytest.mark.parametrize(("amx", "kept"), [(True, memory.KEPT_AMX), (False, memory.KEPT)])
def test_kernels_of_larger_instructions_are_larger(amx: bool, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config, asked = tiny_config(300), {"rows": 1, "length": 8, "replies": 1}
    monkeypatch.setattr(memory, "cpu_abilities", lambda: {"amx_bf16": amx, "avx512_bf16": True})
    most = learning_bytes(config, CPU, **asked, bf16=True) - kept
    monkeypatch.setattr(memory, "kept_kernels", lambda device, dtype: 0)
    assert most == learning_bytes(config, CPU, **asked, bf16=True)


def test_kernels_for_float32_count_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(300)
    asked: dict[str, Any] = {"slots": 4, "speaking": 2, "context": 16}
    before = playing_bytes(config, CPU, **asked), learning_bytes(config, CPU, rows=1, length=8, replies=1)
    monkeypatch.setattr(memory, "has_faster_products", lambda: True)
    after = playing_bytes(config, CPU, **asked), learning_bytes(config, CPU, rows=1, length=8, replies=1)
    assert [b - a for a, b in zip(before, after, strict=True)] == [memory.KEPT_FLOAT] * 2
    assert kept_kernels(CPU, torch.float32) == memory.KEPT_FLOAT
    assert kept_kernels(CPU, torch.float64) == kept_kernels(torch.device("cuda"), torch.bfloat16) == 0


def test_what_is_freed_in_a_rollout_goes_back_at_once() -> None:
    """Every other of 40 blocks of 8 MiB, in a process of its own that has freed a larger one: its C library keeps what
    lies between those that live. Afterwards it does so again."""
    work = (
        "import torch\nfrom experiments.bench.measure import _status\n"
        "from marl.decoding.memory import give_back, sparing\n"
        "def held():\n"
        "    give_back()\n    before = _status('VmRSS')\n"
        "    blocks = [torch.ones(1 << 21) for _ in range(40)]\n    del blocks[::2]\n"
        "    return round((_status('VmRSS') - before) / 2**23)\n"
        "torch.ones(31 << 18)\n"
    )
    measured = "with sparing(): spared = held()\nprint(spared, held())"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}

    def told(last: str) -> list[int]:
        command = [sys.executable, "-c", work + last]
        printed = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
        return [int(number) for number in printed.split()]

    if told("print(held())") == [20]:
        pytest.skip("this system's C library gives back what is freed by itself")
    assert told(measured) == [20, 40]


def test_what_the_environment_says_of_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(memory, "set_malloc", lambda threshold: bool(asked.append(threshold)) or True)
    for name in ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")  # of something else
    with sparing():
        assert asked == [4 * MIB]
    assert asked == [4 * MIB, 32 * MIB]
    for name, value in (
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1"), ("MALLOC_MMAP_THRESHOLD_", "65536")
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
        with sparing():
            pass
        assert asked == [4 * MIB, 32 * MIB]
        monkeypatch.delenv(name)


def test_a_pass_is_measured_without_making_it() -> None:
    huge = tiny_config(1000, hidden_size=4096, intermediate_size=8192, layers=64, context=1 << 20)

    def work(lm: object) -> None:
        x = torch.zeros(1 << 40)  # 4 TiB
        assert (x + 1).shape == x.shape

    assert peak_bytes(huge, torch.float32, CPU, work) == 8 << 40


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_update_takes_what_is_predicted(checkpointing: bool) -> None:
    """The real one, of 16 rows in one pass."""
    tokens, shape = small_tokens(), {"hidden_size": 64, "intermediate_size": 128, "layers": 3, "context": 256}
    config, policy = tiny_config(tokens.size, **shape), Policy(tiny_lm(tokens.size, **shape), tokens)
    game = talk([said(step) for step in range(40)], [said(step) for step in range(40)])
    batch = collate(seats_of([game] * 8, {"learner"}), {})
    rows, length = batch.shape
    asked = {"rows": rows, "length": length, "replies": int(batch.reply.sum()) // rows}
    predicted = learning_bytes(config, CPU, **asked, gradient_checkpointing=checkpointing) / memory.WASTE
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    settings = UpdateConfig(token_budget=1 << 20, minibatches=1, gradient_checkpointing=checkpointing)
    with Alive() as alive:
        update(
            policy, None, batch, {"policy": PolicyLoss(), "entropy": EntropyLoss()},
            torch.optim.SGD(policy.parameters(), lr=0.0), settings, torch.Generator(),
        )  # fmt: skip
    assert predicted == pytest.approx(alive.most, rel=0.25), (predicted, alive.most)


def test_less_is_kept_where_it_is_computed_again_or_in_half_precision() -> None:
    config = tiny_config(300, hidden_size=64, intermediate_size=128, layers=6, context=256)
    whole, again, half = (
        learning_bytes(config, CPU, rows=4, length=128, replies=10, **way)
        for way in ({}, {"gradient_checkpointing": True}, {"bf16": True})
    )
    assert again < 0.5 * whole and half - kept_kernels(CPU, torch.bfloat16) < 0.8 * whole


@pytest.mark.parametrize("architecture", [*RECURRENT, "llama"])
def test_second_copies_are_of_keys_and_values_only(architecture: str, either_attention: str) -> None:
    lm = random_lm(architecture, 300)
    slots = Slots.of(lm.config, 64, 2)
    cache = slot_cache(lm, slots.count(8), 64)
    ragged = either_attention == "compiled" and architecture == "llama"
    for place in range(2):  # states are made in the first pass
        one_pass(lm, cache, np.arange(0, 16, 2), np.full(8, place), [[0]] * 8, ragged)
    held = [layer for layer in cache.layers if isinstance(layer, SlotLayer)]
    assert slots.desk(8, CPU) == sum(each.nbytes for layer in held for each in layer.desk)
    assert slots.size * slots.count(8) == cache.nbytes


def test_a_rollout_takes_at_most_what_is_predicted(either_attention: str) -> None:
    config = tiny_config(300, hidden_size=64, intermediate_size=128, layers=3, context=256)
    found = playing_bytes(config, CPU, slots=64, speaking=16, context=256)
    lm = AutoModelForCausalLM.from_config(config).eval()
    rows, size = np.array([0, *range(2, 64)]), read_budget(config, CPU, torch.float32) // 64
    with Alive() as alive, torch.no_grad():
        cache = slot_cache(lm, 64, 256)
        ragged = either_attention == "compiled"
        one_pass(lm, cache, np.arange(0, 64, 4), np.full(16, 255), [[0]] * 16, ragged)
        second = sum(each.nbytes for layer in cache.layers for each in layer.desk)  # what speaks stands side by side
        assert second == pytest.approx(0 if ragged else cache.nbytes / 4, rel=0.01)
        hidden = one_pass(lm, cache, rows, np.full(63, 256 - size), [[0] * size] * 63, ragged)
        assert hidden.shape == (63 * size, 64)
    there = alive.most - cache.nbytes - second  # without what attention keeps inside its kernel
    assert there <= found <= 2 * there


def test_the_same_is_predicted_whenever_garbage_is_collected() -> None:
    config = tiny_config(300, hidden_size=64, intermediate_size=128, layers=1, context=512)
    gc.disable()
    try:
        found = [playing_bytes(config, CPU, slots=64, speaking=16, context=512) for _ in range(3)]
    finally:
        gc.enable()
    assert len(set(found)) == 1


def test_weights_are_no_part_of_a_pass() -> None:
    wide = tiny_config(300, hidden_size=2048, intermediate_size=4096, layers=1, context=64)
    weights = size_of(wide, 64).weights
    assert playing_bytes(wide, CPU, slots=3, speaking=1, context=8) < 0.05 * weights
    assert learning_bytes(wide, CPU, rows=1, length=8, replies=4) < 0.7 * weights  # the largest matrix's gradient


@pytest.mark.parametrize(
    "config",
    [
        MixtralConfig(vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2),
        MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=1),
        GPTNeoConfig(
            vocab_size=300, hidden_size=32, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]]
        ),
    ],
    ids=["experts", "recurrent", "held by no slot"],
)
def test_what_cannot_be_foretold_counts_nothing(config: PreTrainedConfig) -> None:
    before = config.to_dict()
    assert playing_bytes(config, CPU, slots=4, speaking=2, context=16) == 0
    assert learning_bytes(config, CPU, rows=2, length=16, replies=4) == 0
    assert config.to_dict() == before


@pytest.mark.parametrize(
    "config",
    [
        GPTJConfig(vocab_size=300, n_embd=64, n_layer=2, n_head=2, rotary_dim=16, n_positions=256),
        StableLmConfig(
            vocab_size=300,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        ),
        DogeConfig(vocab_size=300, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2),
    ],
    ids=["code of its own", "takes no cache of slots", "a mask of its own"],
)
def test_models_that_attend_in_their_own_way_are_read_as_the_engine_reads_them(
    config: PreTrainedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With compiled attention as without it: padded, with copies of those that speak. Compiled norms keep less."""
    found, faster = [], bool(kernels.best())
    for _ in range(2):
        slots = Slots(4, 10, config=config).desk(48, CPU)
        found.append((slots, playing_bytes(config, CPU, slots=64, speaking=16, context=256),
                      learning_bytes(config, CPU, rows=2, length=64, replies=8)))  # fmt: skip
        monkeypatch.setattr(kernels, "best", lambda: "")
    assert found[0][:2] == found[1][:2] and found[0][0] == 640
    assert found[0][2] < found[1][2] if faster and config.model_type == "doge" else found[0][2] == found[1][2]


# --- What is there ---


def group(folder: Path, version: int, limit: str, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cached}\n")


def test_limits_of_control_groups_are_read_up_to_the_top(tmp_path: Path) -> None:
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    assert cgroup_memory(own, root) == []
    own.write_text("0::/user/job\n")
    assert cgroup_memory(own, root) == []
    group(root / "user/job", 2, "max", 700, 0)
    assert cgroup_memory(own, root) == []
    group(root / "user", 2, "1000", 700, 200)
    assert cgroup_memory(own, root) == [500]
    group(root / "user/job", 2, "600", 700, 0)
    assert cgroup_memory(own, root) == [-100, 500]


def test_version_1_has_a_tree_of_its_own_and_a_container_sees_its_limit_at_the_top(tmp_path: Path) -> None:
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    own.write_text("5:cpu,cpuacct:/job\n4:memory:/docker/0123\n0::/\n")
    group(root / "memory", 1, "1000", 300, 100)
    group(tmp_path, 1, "10", 0, 0)  # outside
    assert cgroup_memory(own, root) == [800]


def test_the_tightest_limit_counts_and_processes_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "system_memory", lambda: 900)
    for limits, free in (([], 900), ([1000], 900), ([500, 800], 500), ([-5], 0)):
        monkeypatch.setattr(memory, "cgroup_memory", lambda limits=limits: limits)
        assert free_memory(CPU) == free
    monkeypatch.setattr(memory, "cgroup_memory", list)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_memory(CPU) == 225


def test_this_machine_has_some() -> None:
    assert free_memory(CPU) > MIB and system_memory() > MIB
