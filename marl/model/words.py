"""A small untrained model with a vocabulary of whole words, for toy games."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from envs.core import END
from marl.model.policy import Policy, tiny_lm
from marl.model.tokens import BOS, CUE, PAD, Tokens


def word_policy(
    words: Sequence[str], seed: int = 0, *, context: int = 32, layers: int = 2, hidden_size: int = 64,
    privileged_size: int = 0,
) -> Policy:  # fmt: skip
    """Builds an untrained policy that reads and says `words`, one token each. Other words are padding to it.

    All weights follow from the seed. No cue stands before a reply: a choice that follows a belief question is a sample
    of that belief, so whatever moves the belief moves play. Attention starts at zero: at first each token depends on
    the one before it alone, so that what is said says nothing and what is heard changes nothing.

        policy = marl.word_policy(["red", "blue", "which?", "ba", "du"], seed=1)
    """
    vocabulary = dict.fromkeys((PAD, BOS, CUE, END, *words))
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = Tokens(PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS))
    tokens.format = replace(tokens.format, cue=[])
    with torch.random.fork_rng(devices=[]):  # for the value head, which draws from the global generator
        torch.manual_seed(seed)
        shape = {"hidden_size": hidden_size, "layers": layers, "intermediate_size": 2 * hidden_size}
        lm = tiny_lm(tokens.size, context=context, generator_seed=seed, **shape)
        policy = Policy(lm, tokens, privileged_size).eval()
    with torch.no_grad():
        for layer in lm.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    return policy
