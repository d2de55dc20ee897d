"""Incremental decoding against one full forward pass, and sampling against known probabilities."""

import functools
import gc
import re
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

from marl.agents.model import ModelAgent
from marl.common.errors import UserError
from marl.decoding.cache import SlotLayer, StateLayer
from marl.decoding.engine import Engine
from marl.decoding.packing import groups_within
from marl.decoding.probes import reads_chunks, size_of
from marl.decoding.sampling import uniforms
from marl.model.loading import check_context
from marl.model.policy import Policy, bf16_copy, pretrained
from tests.marl.models import (
    ARCHITECTURES,
    RECURRENT,
    hf_policy,
    hf_tokenizer,
    precise,
    random_lm,
    save,
    small_tokens,
    tiny_policy,
)

CONTEXT = 48
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
         "initializer_range": 0.2}  # fmt: skip
ATTENTION = {**SHAPE, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
             "max_position_embeddings": 64}  # fmt: skip
MIXED = ["full_attention", "sliding_attention"]


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Policy]:
    loaded = {name: hf_policy(tmp_path_factory.mktemp(name), name) for name in (*ARCHITECTURES, "mistral", *RECURRENT)}
    return {**loaded, "tiny": tiny_policy()}


NAMES = (*ARCHITECTURES, *RECURRENT, "tiny")
SOME = ("gpt2", "qwen3", "mamba", "falcon_h1", "qwen3_5")  # of every kind of layer


def streams(policy: Policy, lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, policy.tokens.size, n).tolist() for n in lengths]


@torch.no_grad()
def whole(policy: Policy, tokens: list[int]) -> torch.Tensor:
    """Logits (T, V) of one full forward pass of the model itself."""
    return policy.lm(input_ids=torch.tensor([tokens])).logits[0].float()


@torch.no_grad()
def read_in_pieces(engine: Engine, rows: list[list[int]], slots: list[int], seed: int) -> list[torch.Tensor]:
    """Reads the rows in ragged pieces, some of them at a time in any order of slots; logits (T, V) of each."""
    rng = np.random.default_rng(seed)
    done, found = [0] * len(rows), [[] for _ in rows]
    while any(d < len(row) for d, row in zip(done, rows, strict=True)):
        open_rows = [i for i, row in enumerate(rows) if done[i] < len(row)]
        chosen = rng.permutation(open_rows)[: rng.integers(1, len(open_rows) + 1)].tolist()
        pieces = [rows[i][done[i] : done[i] + int(rng.integers(1, 9))] for i in chosen]
        hidden = engine.read([slots[i] for i in chosen], pieces).split([len(piece) for piece in pieces])
        for i, piece, states in zip(chosen, pieces, hidden, strict=True):
            found[i].append(engine.policy.logits(states))
            done[i] += len(piece)
    return [torch.cat(parts) for parts in found]


# --- Reading ---


@pytest.mark.parametrize("name", NAMES)
def test_pieces_read_like_one_whole(name: str, policies: dict[str, Policy]) -> None:
    policy, seed = policies[name], 0
    engine = Engine(policy, 6, CONTEXT)
    rows = streams(policy, [CONTEXT, 1, 17, 30, 5], seed)
    slots = [engine.allocate() for _ in rows]
    for row, logits in zip(rows, read_in_pieces(engine, rows, slots, seed), strict=True):
        expected = whole(policy, row)
        assert expected.std() > 0.3  # differences would show
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert engine.lengths[slots].tolist() == [len(row) for row in rows]
    assert engine.tokens_read == sum(map(len, rows))


def test_positions_that_depend_on_who_shares_a_pass_are_refused() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 2.0,
            "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}  # fmt: skip
    config = LlamaConfig(**ATTENTION, vocab_size=small_tokens().size, rope_parameters=rope)
    policy = Policy(LlamaForCausalLM(config).eval(), small_tokens())
    engine = Engine(policy, 2, 32)
    engine.read([0, 1], [[5] * 30, [6] * 20])
    with pytest.raises(UserError, match=r"model\.context=32: with a question beside it a stream has 33 tokens"):
        engine.read_beside([0, 1], [[(30, [7] * 3)], [(20, [7] * 3)]])
    with pytest.raises(
        UserError, match=r"model\.context=33: with longrope, .* beyond 32 tokens, .* Set it to 32 at most"
    ):
        Engine(policy, 2, 33)
    with pytest.raises(UserError, match="is more than the model can read"):
        check_context(MambaConfig(), 1 << 31)  # no longrope, and no other limit either


@pytest.mark.parametrize("name", ["tiny", "falcon_h1"])
@torch.no_grad()
def test_slots_may_be_read_in_any_order(name: str, policies: dict[str, Policy]) -> None:
    """Reading mixes single tokens of any slots with longer pieces, rewinding, texts that are scored, and new games."""
    policy, rng = policies[name], np.random.default_rng(0)
    engine = Engine(policy, 16, CONTEXT)
    held: dict[int, list[int]] = {}

    def tokens(number: int) -> list[int]:
        return rng.integers(0, policy.tokens.size, number).tolist()

    for slot in [engine.allocate() for _ in range(16)]:
        held[slot] = tokens(5)
        engine.read([slot], [held[slot]])
    for slot in list(held)[1::2]:  # so that free slots are not neighbours
        engine.free(slot)
        del held[slot]
    for step in range(25):
        if step % 9 == 0:
            gone = int(rng.choice(list(held)))
            del held[gone]
            engine.free(gone)
            slot = engine.allocate()
            held[slot] = tokens(5)
            engine.read([slot], [held[slot]])
        some = rng.permutation(list(held))[: int(rng.integers(1, len(held) + 1))].tolist()
        if step % 7 == 3:
            held[some[0]] = held[some[0]][: int(rng.integers(0, len(held[some[0]]) + 1))]
            engine.rewind(some[0], held[some[0]])
        if step % 11 == 5:
            for slot in [other for other in some[:2] if held[other]]:
                texts = [tokens(1), tokens(1)]
                known = whole(policy, held[slot])[-1]
                said = policy.speech_logits(known, 1.0).log_softmax(-1)[[text[0] for text in texts]]
                found = torch.from_numpy(engine.score(slot, held[slot], texts, 1.0)).float()
                torch.testing.assert_close(found, said, atol=2e-4, rtol=0)
        size = int(rng.integers(2, 4)) if step % 5 == 4 else 1
        pieces = [tokens(size) for _ in some]
        if max(len(held[slot]) for slot in some) + size > CONTEXT:
            break
        found = engine.read(some, pieces)
        for slot, piece, hidden in zip(some, pieces, found.split(size), strict=True):
            held[slot] += piece
            expected = whole(policy, held[slot])[-size:]
            torch.testing.assert_close(policy.logits(hidden), expected, atol=2e-4, rtol=0)
    assert step > 20


@pytest.mark.parametrize(
    ("lengths", "budget", "overhead", "groups"),
    [
        ([], 10, 1, []),
        ([30, 20, 4], 10, 1000, [range(1), range(1, 2), range(2, 3)]),  # longer than the budget: alone
        ([10, 9, 9, 8], 20, 1000, [range(2), range(2, 4)]),
        ([40, 3, 3], 1000, 50, [range(2), range(2, 3)]),  # padding of 37, and then of 74
        ([7] * 10, 70, 0, [range(10)]),
    ],
)
def test_rows_of_similar_length_share_a_pass(
    lengths: list[int], budget: int, overhead: int, groups: list[range]
) -> None:
    assert groups_within(lengths, budget, overhead) == groups


@pytest.mark.parametrize("name", ["tiny", *RECURRENT])
def test_an_engines_first_games_are_read_like_any_later_ones(name: str, policies: dict[str, Policy]) -> None:
    """A resumed run has a new engine, so results must be the same to the last bit."""
    policy, found = policies[name], []
    engine = Engine(policy, 8, CONTEXT)
    rows = streams(policy, [CONTEXT, 33, 47, 40, 35, 46, 37, 39])
    for _ in range(2):
        slots = [engine.allocate() for _ in rows]
        found.append(engine.read(slots, rows))
        for slot in slots:
            engine.free(slot)
    assert torch.equal(found[0], found[1])


def test_a_stream_that_outgrows_its_slot_is_refused_before_anything_is_written(policies: dict[str, Policy]) -> None:
    policy = policies["tiny"]
    engine = Engine(policy, 2, 10)
    slots = [engine.allocate(), engine.allocate()]
    engine.read(slots, [[5] * 10, [6] * 3])  # exactly full is fine
    with pytest.raises(UserError, match=r"11 tokens does not fit model\.context=10. Raise model\.context.*512"):
        engine.read(slots, [[5], [6]])
    assert engine.lengths[slots].tolist() == [10, 3]
    row = [6] * 3 + [7, 8]
    logits = policy.logits(engine.read(slots[1:], [[7, 8]]))
    torch.testing.assert_close(logits, whole(policy, row)[3:], atol=1e-4, rtol=0)


# --- Models that it can't read ---


def test_slots_longer_than_the_models_context_are_refused(policies: dict[str, Policy]) -> None:
    with pytest.raises(UserError, match=r"model\.context=1025 is more than the model can read \(1024 tokens\)"):
        Engine(policies["gpt2"], 1, 1025)


@functools.cache
def other_models() -> dict[str, tuple[PreTrainedModel, str]]:
    """Models that no slot can hold, and why."""
    size = {"vocab_size": small_tokens().size}
    limited = {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2, "time_step_limit": (1e-3, float("inf"))}
    experts = {"num_local_experts": 2, "layer_types": ["linear_attention", "full_attention"]}
    gemma = {**SHAPE, "num_hidden_layers": 3, "intermediate_size": 64, "num_attention_heads": 4,
             "logits_soft_cap": 1e4}  # fmt: skip  # bends nothing
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {
            # masks by place in the batch, in all layers
            "gpt_neo": (random_lm("gpt_neo", small_tokens().size), "layers: global, local"),
            # takes no cache, and would read each piece as if it were the first
            "gpt1": (
                OpenAIGPTLMHeadModel(OpenAIGPTConfig(**size, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2)),
                "nothing of what it has read",
            ),
            # its places are in its masks
            "bloom": (BloomForCausalLM(BloomConfig(**size, hidden_size=32, n_layer=2, n_head=4)), "what a slot cannot"),
            # a whole pass limits its time steps, a pass over one token does not
            "mamba2": (Mamba2ForCausalLM(Mamba2Config(**SHAPE, **size, **limited)), "time_step_limit"),
            # takes no cache but its own
            "minimax": (MiniMaxForCausalLM(MiniMaxConfig(**ATTENTION, **size, **experts)), "what a slot cannot"),
            # transformers 5.17's configuration of it does not list its layers
            "recurrent_gemma": (
                RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**gemma, **size)),
                "(its states in itself|of its own make)",
            ),
        }


@pytest.mark.parametrize("name", ["gpt_neo", "gpt1", "bloom", "mamba2", "minimax", "recurrent_gemma"])
def test_a_model_that_no_slot_holds_reads_whole_streams_again(name: str) -> None:
    """Results are those of a cache: for pieces, reused slots, scores of texts, and streams that are rewound."""
    lm, why = other_models()[name]
    policy = Policy(lm.eval(), small_tokens())
    engine = Engine(policy, 6, CONTEXT)
    assert re.search(f"^{type(lm).__name__} keeps .*{why}", engine.uncached), engine.uncached
    size = size_of(lm.config, CONTEXT)
    assert size.slot == 0
    assert size.weights == sum(p.nbytes for p in lm.parameters())
    for seed in range(2):  # the second time in slots that were used
        rows = streams(policy, [CONTEXT, 1, 17, 30], seed)
        slots = [engine.allocate() for _ in rows]
        for row, logits in zip(rows, read_in_pieces(engine, rows, slots, seed), strict=True):
            torch.testing.assert_close(logits, whole(policy, row), atol=1e-4, rtol=0)
        texts = [[4, 5, 6], [7]]
        scores = engine.score(slots[3], rows[3][:20], texts, 1.0)
        for text, score in zip(texts, scores, strict=True):
            shaped = policy.speech_logits(whole(policy, rows[3][:20] + text)[19:-1], 1.0).log_softmax(-1)
            assert score == pytest.approx(float(shaped.gather(1, torch.tensor(text)[:, None]).sum()), abs=1e-3)
        engine.rewind(slots[2], rows[2][:9])
        again = policy.logits(engine.read([slots[2]], [[3, 4]]))
        torch.testing.assert_close(again, whole(policy, [*rows[2][:9], 3, 4])[9:], atol=1e-4, rtol=0)
        for slot in slots:
            engine.free(slot)
    assert not engine.can_write


def test_an_agent_warns_of_a_model_without_a_cache() -> None:
    lm, _ = other_models()["gpt_neo"]
    with pytest.warns(UserWarning, match=r"^base: GPTNeoForCausalLM keeps .* reads whole streams again, which is slow"):
        agent = ModelAgent("base", Policy(lm.eval(), small_tokens()), slots=2, context=CONTEXT, decode_steps=4)
    assert agent.decode_steps == 1


SLIDING = {
    "mistral": lambda size, window: MistralForCausalLM(MistralConfig(**ATTENTION, **size, sliding_window=window)),
    "qwen2": lambda size, window: Qwen2ForCausalLM(
        Qwen2Config(**ATTENTION, **size, use_sliding_window=True, sliding_window=window, layer_types=MIXED)
    ),
    "gemma3": lambda size, window: Gemma3ForCausalLM(
        Gemma3TextConfig(**ATTENTION, **size, head_dim=8, sliding_window=window, layer_types=MIXED)
    ),
}


@pytest.mark.parametrize(
    ("name", "window"), [*(("mistral", window) for window in (1, 16, CONTEXT)), ("qwen2", 1), ("gemma3", 16)]
)
def test_windows_slide_over_slots(name: str, window: int) -> None:
    """A slot keeps the whole stream; sliding layers see its last tokens, as the model itself does."""
    tokens = small_tokens()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = Policy(SLIDING[name]({"vocab_size": tokens.size}, window).eval(), tokens)
    engine = Engine(policy, 3, CONTEXT)
    rows = streams(policy, [CONTEXT, 20, 33])
    found = read_in_pieces(engine, rows, [0, 1, 2], 0)
    for row, logits in zip(rows, found, strict=True):
        torch.testing.assert_close(logits, whole(policy, row), atol=1e-4, rtol=0)
    changed = [[(t + 1) % tokens.size for t in rows[0][:-window]] + rows[0][-window:]]
    forgotten = read_in_pieces(Engine(policy, 1, CONTEXT), changed, [0], 0)[0][-1]
    same = float((forgotten - found[0][-1]).abs().max()) < 1e-4
    assert same == (window in {1, CONTEXT} and (name == "mistral" or window == CONTEXT))  # deeper layers see further


@pytest.mark.parametrize(("name", "read"), [("llama", 0), ("mistral", 30)])
def test_a_window_that_only_the_configuration_knows_is_none(name: str, read: int, tmp_path: Path) -> None:
    """Llama attends to everything, whatever its files say. The probe of slots is too short to notice this window."""
    tokenizer = hf_tokenizer()
    lm = random_lm(name, len(tokenizer))
    lm.config.sliding_window = 30
    policy = pretrained(save(tmp_path, lm, tokenizer), seed=0)
    assert policy.lm.config.sliding_window == read
    rows = streams(policy, [CONTEXT, 20])
    engine = Engine(policy, 2, CONTEXT)
    assert not engine.uncached and engine.can_branch_back
    for row, logits in zip(rows, read_in_pieces(engine, rows, [0, 1], 0), strict=True):
        torch.testing.assert_close(logits, whole(policy, row), atol=1e-4, rtol=0)
    asked = policy.logits(engine.read_beside([0], [[(CONTEXT, [5, 6])]]))[0]
    torch.testing.assert_close(asked, whole(policy, [*rows[0], 5, 6])[-1], atol=1e-4, rtol=0)


def test_windows_slide_beside_recurrent_layers() -> None:
    lfm3 = pytest.importorskip("transformers.models.lfm3", reason="came after transformers 5.17")
    config = lfm3.Lfm3Config(
        **ATTENTION, vocab_size=small_tokens().size, head_dim=8, sliding_window=16,
        layer_types=["conv", "sliding_attention"],
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = Policy(lfm3.Lfm3ForCausalLM(config).eval(), small_tokens())
    rows = streams(policy, [CONTEXT, 20])
    engine = Engine(policy, 2, CONTEXT)
    assert not engine.uncached
    for row, logits in zip(rows, read_in_pieces(engine, rows, [0, 1], 0), strict=True):
        torch.testing.assert_close(logits, whole(policy, row), atol=1e-4, rtol=0)


def test_a_model_that_reads_pieces_unlike_the_whole_has_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """One model's recurrent layer forgets its state between passes; the other's keys and values are never written."""
    tokens = small_tokens()
    monkeypatch.setattr(StateLayer, "save", lambda layer: layer.all_conv_states.update({0: torch.zeros(1, 80, 4)}))
    recurrent = Engine(Policy(random_lm("mamba2", tokens.size), tokens), 2, CONTEXT)
    assert recurrent.uncached == "Mamba2ForCausalLM does not read in pieces what it reads as a whole"
    lm = random_lm("llama", tokens.size + 1)  # a configuration that no other test has looked at
    monkeypatch.setattr(SlotLayer, "update", lambda layer, keys, values, *_, **__: (keys, values))
    assert "LlamaForCausalLM keeps what a slot cannot hold" in Engine(Policy(lm, tokens), 2, CONTEXT).uncached


def test_models_whose_chunks_start_anew_are_read_token_by_token() -> None:
    """Mamba's scan of several tokens begins at zero, Mamba-2's does not: known from the source of transformers 5.23."""
    known = [False, True, False, True, True, True, True]
    assert [reads_chunks(random_lm(name, 64)) for name in RECURRENT] == known
    policies = [bf16_copy(Policy(random_lm(name, small_tokens().size), small_tokens())) for name in RECURRENT]
    assert [reads_chunks(each.lm) for each in policies] == known  # whose states are rounded
    engines = [Engine(each, 2, CONTEXT) for each in policies]
    assert [engine.uncached for engine in engines] == [""] * len(known)
    for engine in engines:  # also where states stay in float32
        assert engine.policy.logits(engine.read([0], [[3, 4]])).isfinite().all()


# --- Sizes ---


KEYS_AND_VALUES = 2 * (CONTEXT + 1) * 4  # a position more, for padding; float32
SLOT_BYTES = {  # by hand: layers, heads, widths as in tests/marl/models.py
    "gpt2": 2 * KEYS_AND_VALUES * 4 * 8,
    "llama": 2 * KEYS_AND_VALUES * 4 * 8,
    "qwen3": 2 * KEYS_AND_VALUES * 2 * 16,
    "tiny": 2 * KEYS_AND_VALUES * 1 * 8,
    "rwkv": 5 * 32 * 2 * 4,  # five states of width 32 in two layers
    "mamba": 2 * 64 * (4 + 4) * 4,  # inner width 64: a window of 4 and a state of 4
    "mamba2": 2 * ((64 + 2 * 2 * 4) * 4 + 8 * 8 * 4) * 4,  # the window also holds B and C of two groups
    "jamba": KEYS_AND_VALUES * 2 * 8 + 64 * (4 + 4) * 4,  # a layer of each
    "falcon_h1": 2 * (KEYS_AND_VALUES * 2 * 8 + ((64 + 2 * 1 * 4) * 4 + 8 * 8 * 4) * 4),
    "lfm2": KEYS_AND_VALUES * 2 * 8 + 32 * 3 * 4,
    "qwen3_5": KEYS_AND_VALUES * 2 * 8 + ((2 * 2 * 8 + 4 * 8) * 4 + 4 * 8 * 8) * 4,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_slots_size_follows_from_the_configuration(name: str, policies: dict[str, Policy]) -> None:
    policy = policies[name]
    size = size_of(policy.lm.config, CONTEXT)
    assert size.slot == SLOT_BYTES[name]
    assert size.weights == 4 * sum(p.numel() for p in policy.lm.parameters())
    engine = Engine(policy, 5, CONTEXT)
    engine.read([0], [[1, 2]])
    assert engine.cache.nbytes == 5 * size.slot


# --- Sampling ---


@torch.no_grad()
def write(policy: Policy, prompts: list[list[int]], seeds: list[int], n: int) -> tuple[np.ndarray, np.ndarray]:
    """Continues the prompts by n tokens in one batch, each row with its own seed: ids and log-probabilities (R, n)."""
    engine = Engine(policy, len(prompts), CONTEXT)
    slots = [engine.allocate() for _ in prompts]
    order = np.argsort(slots)
    slots, prompts = [slots[i] for i in order], [prompts[i] for i in order]
    rows = np.array(seeds, dtype=np.uint64)[order]
    chunks, ids, logprobs = prompts, [], []
    for step in range(n):
        hidden = engine.read(slots, chunks)
        last = hidden[np.cumsum([len(c) for c in chunks]) - 1]
        uniform = uniforms(rows, np.full(len(rows), step))
        sampled, scores = engine.sample(last, [()] * len(chunks), 1.0, uniform)
        chunks = [[int(i)] for i in sampled]
        ids.append(sampled)
        logprobs.append(scores)
    back = np.argsort(order)
    return np.stack(ids, 1)[back], np.stack(logprobs, 1)[back]


@pytest.mark.parametrize("fixed_shapes", [False, True], ids=["as many rows as there are", "shapes of a captured graph"])
@pytest.mark.parametrize("name", ["mistral", "tiny"])
def test_several_steps_at_once_sample_what_single_ones_do(
    name: str, fixed_shapes: bool, policies: dict[str, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("marl.decoding.engine.STRETCH", 8)
    policy, steps, slots = precise(policies[name]), 6, [4, 0, 1]
    monkeypatch.setattr(policy.tokens, "may_end", frozenset(range(0, policy.tokens.size, 4)))  # often, and no real end
    read = dict(zip(slots, streams(policy, [3, 9, 5]), strict=True))
    chances = dict(zip(slots, uniforms(np.array([[7], [8], [9]]), np.arange(3 * steps)[None]), strict=True))
    left, paused = {4: 3 * steps, 0: 2 * steps, 1: 1}, 0
    for temperature in (1.0, 0.7, 0.0):
        single, several = Engine(policy, 5, CONTEXT), Engine(policy, 5, CONTEXT)
        several.fixed_shapes = fixed_shapes
        expected: dict[int, list[tuple[int, float]]] = {slot: [] for slot in slots}
        said: dict[int, list[tuple[int, float]]] = {slot: [] for slot in slots}
        for engine in (single, several):
            engine.read(slots, [read[slot] for slot in slots])
        for slot in slots:  # one row and one token at a time; an end is no end here
            for step in range(left[slot]):
                token = expected[slot][-1][0] if step else slot
                found = single.sample(single.read([slot], [[token]]), [()], temperature, chances[slot][[step]])
                expected[slot].append((int(found[0][0]), float(found[1][0])))
        while going := [slot for slot in slots if len(said[slot]) < left[slot]]:
            last = [said[slot][-1][0] if said[slot] else slot for slot in going]
            due = [left[slot] - len(said[slot]) for slot in going]
            next_ones = [np.resize(chances[slot][len(said[slot]) :], steps) for slot in going]  # filled up with any
            for slot, ids, logprobs in zip(
                going, *several.write(going, last, due, np.array(next_ones), temperature), strict=True
            ):
                said[slot].extend(zip(ids, logprobs, strict=True))
                assert not set(ids[:-1]) & policy.tokens.may_end
                paused += len(ids) < steps and len(said[slot]) < left[slot]
                assert len(ids) == steps or ids[-1] in policy.tokens.may_end or len(said[slot]) == left[slot]
        for slot in slots:
            assert [token for token, _ in said[slot]] == [token for token, _ in expected[slot]]
            np.testing.assert_allclose(said[slot], expected[slot], atol=1e-6)
            assert several.lengths[slot] == len(read[slot]) + left[slot]
        assert several.lengths[[2, 3]].tolist() == [0, 0]  # the others' slots
        assert {end for _, end, _ in several._writers} == ({16, 24} if fixed_shapes else set())
    assert paused > 3  # rows that went on after a pause, beside others that did not have one


def test_several_steps_stop_where_a_slot_is_full(policies: dict[str, Policy], monkeypatch: pytest.MonkeyPatch) -> None:
    policy = precise(policies["tiny"])
    monkeypatch.setattr(policy.tokens, "may_end", frozenset())
    engine = Engine(policy, 2, 12)
    engine.read([0, 1], streams(policy, [10, 4]))
    chances = np.full((2, 8), 0.5)
    ids, _ = engine.write([0, 1], [3, 4], [20, 3], chances, 1.0)
    assert [len(own) for own in ids] == [2, 3] and engine.lengths.tolist() == [12, 7]
    with pytest.raises(UserError, match=r"a stream of 13 tokens does not fit model\.context=12"):
        engine.write([0, 1], [ids[0][-1], ids[1][-1]], [18, 0], chances, 1.0)


def test_captured_steps_are_made_anew_where_the_model_has_moved(policies: dict[str, Policy]) -> None:
    """Sharding moves parameters to other memory, and a captured graph would go on reading the old place."""
    policy = precise(policies["tiny"])
    engine = Engine(policy, 2, CONTEXT)
    engine.fixed_shapes = True
    engine.read([0, 1], streams(policy, [3, 4]))

    def writer() -> object:
        engine.write([0, 1], [3, 4], [2, 2], np.full((2, 2), 0.5), 1.0)
        (kept,) = engine._writers.values()
        return kept

    first = writer()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.01  # in place, as an update does
    assert writer() is first
    last = list(policy.parameters())[-1]
    last.data = last.data.clone()
    assert writer() is not first


@pytest.mark.parametrize("name", SOME)
def test_one_row_of_eight_is_eight_rows_of_one(name: str, policies: dict[str, Policy]) -> None:
    policy = policies[name]
    prompts, seeds = streams(policy, [3, 20, 1, 7, 7, 12, 5, 2]), list(range(8))
    ids, logprobs = write(policy, prompts, seeds, 6)
    for i, prompt in enumerate(prompts):
        own_ids, own_logprobs = write(policy, [prompt], seeds[i : i + 1], 6)
        assert own_ids[0].tolist() == ids[i].tolist()
        # a state carries its rounding on: 2e-5 were seen
        atol = 1e-4 if name in RECURRENT else 1e-5
        np.testing.assert_allclose(own_logprobs[0], logprobs[i], atol=atol, rtol=0)


@pytest.mark.parametrize("name", SOME)
def test_texts_are_scored_as_one_full_pass_says_and_the_slot_stays_as_it_is(
    name: str, policies: dict[str, Policy]
) -> None:
    policy = policies[name]
    engine = Engine(policy, 6, CONTEXT)
    prefix, texts = streams(policy, [9])[0], streams(policy, [3, 1, 5], seed=1)
    said = [[i for i in text if i not in policy.tokens.unspeakable] or [5] for text in texts]
    engine.allocate()
    slot = engine.allocate()
    engine.read([slot], [[*prefix, 3, 4]])  # what stands behind the prefix is not looked at
    found = engine.score(slot, prefix, said, 0.7)
    for text, score in zip(said, found, strict=True):
        logits = whole(policy, [*prefix, *text])[len(prefix) - 1 : -1]
        logprobs = policy.speech_logits(logits, 0.7).double().log_softmax(-1)
        assert score == pytest.approx(float(logprobs.gather(1, torch.tensor(text)[:, None]).sum()), abs=1e-3)
    assert engine.lengths[slot] == len(prefix) + 2 and len(engine._free) == 4
    engine.rewind(slot, prefix)
    assert engine.lengths[slot] == len(prefix)
    hidden = engine.read([slot], [[7]])
    torch.testing.assert_close(policy.logits(hidden)[0], whole(policy, [*prefix, 7])[-1], atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["tiny", "falcon_h1"])
def test_the_cache_goes_with_its_engine(policies: dict[str, Policy], name: str) -> None:
    """Memory is freed at once, not at the next garbage collection: the next engine may need it."""
    engine = Engine(policies[name], 2, CONTEXT)
    engine.read([engine.allocate()], [[3, 4, 5]])
    cache = weakref.ref(engine.cache)
    gc.disable()
    try:
        del engine
        assert cache() is None
    finally:
        gc.enable()
