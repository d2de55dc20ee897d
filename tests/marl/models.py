"""Small language models and tokenizers, built here with random weights, loaded the way a user's own are.

Weights are drawn wide enough that logits differ by several nats: agreement to 1e-4 then means something.
"""

from copy import deepcopy
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as bpe
from torch import nn
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from envs import dond_v0
from envs.dond import texts as dond_texts
from marl.model.loading import load_lm, load_tokenizer
from marl.model.policy import Policy, tiny_lm
from marl.model.tokens import Tokens, train_tokenizer

ARCHITECTURES = ("gpt2", "llama", "qwen3")
RECURRENT = ("mamba", "mamba2", "jamba", "falcon_h1", "lfm2", "qwen3_5", "rwkv")

# Every message between two marks, with the role's name; the opening prompt is the system's.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# No system role, turns must alternate, the assistant goes by another name and white space around a text is dropped.
NO_SYSTEM = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + ('model' if message['role'] == 'assistant' else 'user') + '\n' }}"
    "{{ message['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)

COMPACT_TEXTS = [
    "books 1 0 hats 1 1 balls 3 3 objective 1\n",
    "them: i want 2 books and the hat\nthem: [propose]\ndeal 9 4\n",
    "[message] i will take 3 balls [END]",
    "[propose] (0 books, 1 hats, 3 balls) [END]",
]
NATURAL_TEXTS = [
    dond_texts.prompt((1, 1, 3), (0, 1, 3), 1.0, dond_v0.Style.NATURAL),
    "Partner: I would like 2 hats and 1 book.\nError: Start your reply with [message] or [propose].\n",
    "The game is over: a deal. You get 9 points, your partner gets 4.\n",
    "How many points is one book worth to your partner? 0 1 2 3 4 5 6 7 8 9 10 system user assistant model",
    "[message] Can I have the balls? [END] [propose] (1 books, 2 hats, 0 balls) [END]",
]


@cache
def small_tokens(keep: tuple[str, ...] = dond_texts.COMPACT_TOKENS) -> Tokens:
    """The tokenizer that a small model is trained with, in few tokens."""
    return Tokens(train_tokenizer(COMPACT_TEXTS, keep, 512))


def hf_tokenizer(chat_template: str | None = None, single_digits: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE such as GPT-2's; with `single_digits` no number above 9 is one token, as in Qwen's."""
    tokenizer = Tokenizer(bpe.BPE())
    split = [pre_tokenizers.Digits(individual_digits=True)] if single_digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] if chat_template else ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    numbers = " ".join(f"{n} {n}" for n in range(11))
    tokenizer.train_from_iterator([*NATURAL_TEXTS * 3, *[numbers] * 50], trainer)
    result = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=specials[0], eos_token=specials[-1])
    result.chat_template = chat_template
    return result


def random_lm(architecture: str, vocab_size: int, context: int = 1024) -> PreTrainedModel:
    """Two layers of width 32; every architecture has its own positions, norms and heads."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _build(architecture, vocab_size, context).eval()


def _build(architecture: str, vocab_size: int, context: int) -> PreTrainedModel:
    if architecture in RECURRENT:
        return _build_recurrent(architecture, vocab_size)
    if architecture == "gpt2":  # learned positions, tied weights
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=vocab_size, n_positions=context, n_embd=32, n_layer=2, n_head=4,
                       initializer_range=0.2, bos_token_id=0, eos_token_id=0)
        )  # fmt: skip
    if architecture == "gpt_neo":  # half its layers see a window, which no slot holds
        return GPTNeoForCausalLM(
            GPTNeoConfig(vocab_size=vocab_size, hidden_size=32, num_layers=2, num_heads=4, window_size=64,
                         attention_types=[[["global", "local"], 1]], max_position_embeddings=context,
                         initializer_range=0.2, bos_token_id=0, eos_token_id=0)
        )  # fmt: skip
    if architecture == "mpt":  # attention that takes no positions: it counts the places of what it sees
        return MptForCausalLM(
            MptConfig(vocab_size=vocab_size, d_model=32, n_layers=2, n_heads=4, max_seq_len=context,
                      initializer_range=0.2, bos_token_id=0, eos_token_id=0)
        )  # fmt: skip
    shape = {
        "vocab_size": vocab_size, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": context, "initializer_range": 0.2,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    if architecture == "llama":  # every head has its own keys and values, untied weights
        return LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=4, tie_word_embeddings=False))
    if architecture == "mistral":  # every layer sees a window
        return MistralForCausalLM(MistralConfig(**shape, num_key_value_heads=2, sliding_window=16))
    assert architecture == "qwen3", architecture  # shared keys and values, normed; heads wider than hidden / heads
    return Qwen3ForCausalLM(Qwen3Config(**shape, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True))


def _build_recurrent(architecture: str, vocab_size: int) -> PreTrainedModel:
    common = {
        "vocab_size": vocab_size, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.2,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
    }  # fmt: skip
    attention = {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    heads = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 8}
    if architecture == "mamba":
        return MambaForCausalLM(MambaConfig(**common, state_size=4))
    if architecture == "mamba2":  # chunks shorter than streams, so that states pass between them
        return Mamba2ForCausalLM(
            Mamba2Config(**common, state_size=4, num_heads=8, head_dim=8, n_groups=2, chunk_size=8)
        )
    if architecture == "jamba":  # Mamba's layers beside attention's, and experts
        return JambaForCausalLM(
            JambaConfig(**common, **attention, attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=4)
        )
    if architecture == "falcon_h1":  # both in every layer
        return FalconH1ForCausalLM(FalconH1Config(**common, **attention, **heads, mamba_d_ssm=64))
    if architecture == "lfm2":  # convolutions beside attention
        return Lfm2ForCausalLM(Lfm2Config(**common, **attention, layer_types=["conv", "full_attention"]))
    if architecture == "rwkv":  # the whole model takes a state and gives it back
        lm = RwkvForCausalLM(RwkvConfig(**common, context_length=2048, rescale_every=0))
        lm.head.weight.data *= 4.0  # it has no range to start from, and begins nearly flat
        return lm
    assert architecture == "qwen3_5", architecture  # linear attention by the gated delta rule, beside full attention
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
              "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**common, **attention, **linear, head_dim=8))


def save(folder: Path, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """A model folder as users have them; returns its name."""
    lm.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


def tiny_policy(privileged_size: int = 0, context: int = 512) -> Policy:
    """A small model trained from scratch, before any training."""
    tokens = small_tokens()
    shape = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 1, "intermediate_size": 64}
    lm = tiny_lm(tokens.size, **shape, context=context)
    with torch.no_grad():
        for weight in lm.parameters():
            if weight.dim() > 1:
                weight.mul_(5)
    with torch.random.fork_rng(devices=[]):  # the value head is drawn from the global generator
        torch.manual_seed(0)
        return with_critic(Policy(lm, tokens, privileged_size))


def hf_policy(
    folder: Path, architecture: str, *, chat_template: str | None = None, single_digits: bool = False,
    context: int = 1024, privileged_size: int = 0,
) -> Policy:  # fmt: skip
    """Saves a random model with its tokenizer into `folder` and loads it from there."""
    tokenizer = hf_tokenizer(chat_template, single_digits)
    name = save(folder, random_lm(architecture, len(tokenizer), context), tokenizer)
    return with_critic(Policy(load_lm(name), Tokens(load_tokenizer(name)), privileged_size))


def with_critic(policy: Policy) -> Policy:
    """Values start at zero; these don't, so that they can be compared."""
    out = policy.value_head[2]
    assert isinstance(out, nn.Linear)
    with torch.no_grad():
        out.weight.copy_(torch.linspace(-1, 1, out.weight.numel()).view(1, -1))
        out.bias.fill_(0.25)
    return policy.eval()


def teach(policy: Policy, tokens: torch.Tensor, replies: torch.Tensor, steps: int) -> Policy:
    """A few steps of imitation on rows (B, T) of which `replies` (B, T) are learned: enough for the game's syntax."""
    optimizer = torch.optim.AdamW(policy.lm.parameters(), lr=1e-2)
    learned = replies[:, 1:]
    for _ in range(steps):
        logits = policy.logits(policy.hidden(tokens)[:, :-1][learned])
        loss = nn.functional.cross_entropy(logits, tokens[:, 1:][learned])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy.eval()


def precise(policy: Policy) -> Policy:
    """Returns the same policy in float64, for games that must be equal throughout: its rounding is too small to change
    a sample.

    In float32 one token in some 100,000 lies so near the edge of another that the batch's shape decides between them.
    """
    policy = deepcopy(policy)
    policy.lm.double()
    return policy
