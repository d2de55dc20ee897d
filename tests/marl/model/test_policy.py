"""Loading models of several kinds, refusing those that would be misread, and the two heads."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from transformers import (
    CLIPConfig,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
    RemBertConfig,
    RemBertForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
    T5Config,
    XGLMConfig,
    XGLMForCausalLM,
    XLMConfig,
    XLMWithLMHeadModel,
)

from marl.agents.model import ModelAgent
from marl.common.errors import UserError
from marl.model.loading import load_config, load_lm, load_tokenizer
from marl.model.policy import Policy, choice_logits, pretrained, tiny_lm
from marl.model.tokens import Tokens
from tests.marl.models import ARCHITECTURES, CHATML, hf_tokenizer, random_lm, save, small_tokens, tiny_policy

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}  # fmt: skip


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_folder_gives_back_the_model_and_its_tokenizer(architecture: str, tmp_path: Path) -> None:
    tokenizer = hf_tokenizer()
    lm = random_lm(architecture, len(tokenizer))
    name = save(tmp_path / "model", lm, tokenizer)
    policy = Policy(load_lm(name), Tokens(load_tokenizer(name)))
    assert type(policy.lm) is type(lm) and policy.context == 1024 and policy.lm.dtype == torch.float32
    text = "[message] 2 books?"
    assert policy.tokens.encode(text) == Tokens(tokenizer).encode(text)
    ids = torch.tensor([policy.tokens.encode(text)])
    with torch.no_grad():
        torch.testing.assert_close(policy.logits(policy.hidden(ids)), lm(input_ids=ids).logits)


@pytest.mark.parametrize("architecture", ["llama", "mamba", "mamba2"])
def test_a_model_is_read_in_bfloat16(architecture: str, tmp_path: Path) -> None:
    """Mamba's last states stay in float32; its output layer does not."""
    tokenizer = hf_tokenizer()
    name = save(tmp_path, random_lm(architecture, len(tokenizer)), tokenizer)
    policy, ids = pretrained(name, seed=0, dtype=torch.bfloat16), torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(policy.logits(policy.hidden(ids)), policy.lm(input_ids=ids).logits.float())


def test_a_model_that_does_not_play_in_bfloat16_says_so() -> None:
    """Buffers of these models are in float32: GPT-1's mask, XGLM's positions."""
    tokens = small_tokens()
    for lm in (
        OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=tokens.size, n_positions=64, n_embd=32, n_layer=1, n_head=2)),
        XGLMForCausalLM(XGLMConfig(vocab_size=tokens.size, d_model=32, num_layers=1, attention_heads=2, ffn_dim=64)),
    ):
        with pytest.raises(UserError, match=rf"algo\.play_bf16=true: {type(lm).__name__} .* Set it to false"):
            ModelAgent("player", Policy(lm.eval(), tokens), slots=1, context=32, bf16=True)


def test_an_rwkv_of_many_layers_is_the_same_after_each_save(tmp_path: Path) -> None:
    """Beyond six layers its own inference mode halves weights in place, and a saved copy's again."""
    lm, ids = RwkvForCausalLM(RwkvConfig(vocab_size=64, hidden_size=16, num_hidden_layers=8)), torch.arange(9)[None]
    with torch.no_grad():
        expected = lm.train()(input_ids=ids).logits
        for copy in range(3):
            lm = load_lm(save(tmp_path / str(copy), lm, None)).eval()
            torch.testing.assert_close(lm(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    name = save(tmp_path / "bare", random_lm("gpt2", 300), None)
    with pytest.raises(UserError, match=r"model\.name=.*bare: the folder has no tokenizer"):
        load_tokenizer(name)


def test_names_that_hold_no_model_are_refused(tmp_path: Path) -> None:
    for name in (str(tmp_path), str(tmp_path / "nowhere"), "no such name"):
        with pytest.raises(UserError, match=r"model\.name=.*no causal language model can be loaded: \S"):
            load_lm(name)
    with pytest.raises(UserError, match=r"model\.name=.*no tokenizer can be loaded from it: \S"):
        load_tokenizer(str(tmp_path / "nowhere"))
    tokenizer_only = tmp_path / "tokenizer"
    hf_tokenizer().save_pretrained(tokenizer_only)
    with pytest.raises(UserError, match="no causal language model can be loaded"):
        load_lm(str(tokenizer_only))


@pytest.mark.parametrize("name", ["/nonexistent", "./nowhere", "../no/where", "~/model", "a/b/c"])
def test_what_can_only_be_a_folder_is_said_to_be_missing(name: str) -> None:
    with pytest.raises(UserError, match=rf"model\.name={name}: no causal .*: there is no such folder") as error:
        load_config(name)
    assert ("write out what ~" in str(error.value)) == name.startswith("~")
    with pytest.raises(UserError, match=rf"model\.name={name}: no tokenizer .*: there is no such folder"):
        load_tokenizer(name)


def test_a_model_of_another_kind_is_refused_by_its_configuration(tmp_path: Path) -> None:
    T5Config().save_pretrained(tmp_path / "t5")
    CLIPConfig().save_pretrained(tmp_path / "clip")
    for kind in ("t5", "clip"):
        with pytest.raises(UserError, match=rf"model\.name=.*{kind}: transformers has no causal .* of the kind {kind}"):
            load_config(str(tmp_path / kind))


def test_what_is_no_causal_model_is_refused_by_name(tmp_path: Path) -> None:
    """XLM sees later tokens unless told not to, and the output layer of RemBERT reads something else than the
    states."""
    tokenizer = hf_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        both = XLMWithLMHeadModel(
            XLMConfig(vocab_size=len(tokenizer), emb_dim=32, n_layers=2, n_heads=4, n_langs=1, embed_init_std=0.2)
        )
        size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
        embedded = {"input_embedding_size": 16, "output_embedding_size": 24, "is_decoder": True}
        between = RemBertForCausalLM(RemBertConfig(vocab_size=len(tokenizer), **size, **embedded))
    for lm, why in ((both, "sees tokens that come later"), (between, "does not read tokens as causal")):
        name = save(tmp_path / type(lm).__name__, lm, tokenizer)
        with pytest.raises(UserError, match=rf"model\.name=.*{type(lm).__name__} {why}"):
            load_lm(name)


def test_models_that_bend_their_logits_are_refused_by_name(tmp_path: Path) -> None:
    plain, capped = (
        Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=cap)) for cap in (None, 30.0)
    )
    scaled = CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.0625))
    for lm in (capped, scaled):
        with pytest.raises(UserError, match=rf"model\.name=.*{type(lm).__name__} changes its logits"):
            load_lm(save(tmp_path / type(lm).__name__, lm, None))
    load_lm(save(tmp_path / "plain", plain, None))


def test_the_small_model_follows_from_its_seed_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, same, other = tiny_lm(300), tiny_lm(300), tiny_lm(300, generator_seed=1)
    assert torch.equal(torch.rand(3), expected)
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert "norm" in name or not torch.equal(a, c)
    assert one.lm_head.weight is one.model.embed_tokens.weight
    assert 700_000 < tiny_lm(1024).num_parameters() < 1_300_000


def test_only_a_privileged_critic_reads_hidden_facts() -> None:
    private, privileged = tiny_policy(), tiny_policy(privileged_size=4)
    hidden = private.hidden(torch.tensor([[3, 4, 5]]))  # (1, 3, 32)
    some, other = torch.zeros(1, 3, 4), torch.ones(1, 3, 4)
    assert private.value(hidden, some).shape == (1, 3)
    assert torch.equal(private.value(hidden, some), private.value(hidden, other))
    assert not torch.isclose(privileged.value(hidden, some), privileged.value(hidden, other)).any()
    assert torch.equal(private.hidden(torch.tensor([[3, 4, 5]])), privileged.hidden(torch.tensor([[3, 4, 5]])))


def test_the_critic_is_as_wide_as_the_last_states() -> None:
    """OPT may be wider inside."""
    shape = {"hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 32, "num_hidden_layers": 1}
    config = OPTConfig(**shape, vocab_size=small_tokens().size, num_attention_heads=2)
    policy = Policy(OPTForCausalLM(config).eval(), small_tokens(), privileged_size=4)
    hidden = policy.hidden(torch.tensor([[3, 4, 5]]))
    assert hidden.shape == (1, 3, 16) and policy.value(hidden, torch.zeros(1, 3, 4)).shape == (1, 3)


def test_speech_leaves_out_control_tokens_and_rows_that_only_pad() -> None:
    tokens = small_tokens()
    policy = Policy(tiny_lm(tokens.size + 7), tokens)
    logits = torch.randn(3, tokens.size + 7)
    shaped = policy.speech_logits(logits, 0.5)
    never = [*tokens.unspeakable, *range(tokens.size, tokens.size + 7)]
    said = [i for i in range(tokens.size) if i not in never]
    assert bool((shaped[:, never] == -torch.inf).all())
    torch.testing.assert_close(shaped[:, said], 2 * logits[:, said])


def test_the_end_of_a_turn_is_said_though_its_id_lies_behind_a_gap() -> None:
    made = json.loads(hf_tokenizer(CHATML).backend_tokenizer.to_str())
    marks = [token["content"] for token in made["added_tokens"]]
    pieces = [piece for piece in made["model"]["vocab"] if piece not in marks]
    start = len(pieces) + 40
    ids = {**{piece: i for i, piece in enumerate(pieces)}, **{mark: start + i for i, mark in enumerate(marks)}}
    made["model"]["vocab"] = ids
    made["added_tokens"] = [{**token, "id": ids[token["content"]]} for token in made["added_tokens"]]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(made)), bos_token=marks[0], eos_token=marks[-1]
    )
    tokenizer.chat_template = CHATML
    tokens = Tokens(tokenizer)
    assert tokens.size == start + len(marks) == len(tokenizer) + 40
    assert tokens.eos_ids == {ids["<|im_end|>"]} <= tokens.may_end and ids["]"] in tokens.may_end
    mask = Policy(random_lm("llama", tokens.size + 8), tokens).speech_mask
    assert (mask == 0).nonzero().flatten().tolist() == [*range(len(pieces)), ids["<|im_end|>"]]


@pytest.mark.parametrize(("word", "chat"), [("<image>", False), ("hello", False), ("<|im_end|>", True)])
def test_a_loaded_model_has_rows_for_all_that_streams_hold(word: str, chat: bool, tmp_path: Path) -> None:
    """Words, and a chat template's marks; not special tokens that nothing writes."""
    tokenizer = hf_tokenizer()
    rows = len(tokenizer)
    marks = ["<|im_start|>", word] if chat else [word]
    tokenizer.add_tokens([AddedToken(mark, special=mark != "hello") for mark in marks])
    tokenizer.chat_template = CHATML if chat else None
    name, size = save(tmp_path / "model", random_lm("llama", rows), tokenizer), rows + len(marks)
    lm, tokens = load_lm(name), Tokens(load_tokenizer(name))
    if word == "<image>":
        assert Policy(lm, tokens).speech_mask.tolist() == [0.0] * rows
        return
    with pytest.raises(UserError, match=rf"model\.name=.*model: .* {size} tokens, .* {rows} rows; .*\({size}\)"):
        Policy(lm, tokens)
    lm.resize_token_embeddings(size)
    save(tmp_path / "model", lm, tokenizer)
    assert Policy(load_lm(name), tokens).speech_mask.shape == (size,)


def with_ends(folder: Path, **named: object) -> Policy:
    """Saves a model whose files (`config`, `generation_config`) name these ends of sequence; `...` leaves the setting
    out, None the file."""
    tokenizer = hf_tokenizer(None)
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in ("<|end|>", "<|eom|>")])
    name = save(folder, random_lm("llama", len(tokenizer)), tokenizer)
    for file, ids in named.items():
        path = folder / f"{file}.json"
        settings = {key: value for key, value in json.loads(path.read_text()).items() if key != "eos_token_id"}
        path.write_text(json.dumps(settings if ids is ... else {**settings, "eos_token_id": ids}))
        if ids is None:
            path.unlink()
    return Policy(load_lm(name), Tokens(load_tokenizer(name)))


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        (513, None, {0, 513}),  # there is no generation_config.json
        ([512, 513], None, {0, 512, 513}),
        (513, 512, {0, 512}),  # as in `generate` of transformers
        (512, [512, 513], {0, 512, 513}),
        (513, [512, 512, 99_999, -1], {0, 512}),  # ids without a token do not count
        (513, ..., {0}),
        (..., ..., {0}),
        (..., None, {0}),  # the default of the model's kind is for another vocabulary
    ],
)  # fmt: skip
def test_the_generation_config_names_the_ends_and_where_there_is_none_the_models(
    config: object, generation: object, ends: set[int], tmp_path: Path
) -> None:
    policy = with_ends(tmp_path, config=config, generation_config=generation)
    assert policy.tokens.eos_ids == ends
    for i in (512, 513):
        assert policy.tokens.ends([40, i]) == (i in ends) == (float(policy.speech_mask[i]) == 0)


@pytest.mark.parametrize("named", [True, False, "512", [True], ["512"], 1.5])
def test_an_end_of_sequence_that_is_no_number_is_refused(named: object, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.name=.*: .*eos_token_id"):
        with_ends(tmp_path, generation_config=named)


def test_a_choice_is_sampled_out_of_its_legal_set() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]])
    shaped = choice_logits(logits, torch.tensor([[0, 2, -1], [3, -1, -1]]), 0.5)
    inf = torch.inf
    assert shaped.tolist() == [[2.0, -inf, 6.0, -inf], [-inf, -inf, -inf, 8.0]]


def test_values_are_in_float32_whatever_the_layers_compute_in() -> None:
    policy = tiny_policy()
    hidden = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(0))
    plain = policy.value(hidden, torch.zeros(3, 5, 0))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(policy.value(hidden, torch.zeros(3, 5, 0)), plain)
        logits = policy.logits(policy.hidden(torch.ones(1, 4, dtype=torch.long)))
    assert plain.dtype == logits.dtype == torch.float32
