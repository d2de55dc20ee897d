"""Chat templates and tokenizers of many kinds, made here."""

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from envs.dond import texts as dond_texts
from marl.model.tokens import BOS, CUE, PAD, StreamWriter, Tokens
from marl.types import Kind
from tests.marl.models import CHATML, NATURAL_TEXTS, NO_SYSTEM, hf_tokenizer

NUMBERS = tuple(str(n) for n in range(11))
TEMPLATES = {"chatml": CHATML, "no_system": NO_SYSTEM}
# Marks open turns, and nothing closes them.
OPENED = (
    "{% for message in messages %}<|{{ message['role'] | replace('system', 'im_start') }}|>\n{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# A finished conversation ends with the tokenizer's end, which is gone once it goes on, as in Phi-3's.
FINISHED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
)
# The last turn of a conversation is closed otherwise than those before it, as in gpt-oss's.
LAST = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% if loop.last and message['role'] == 'assistant' %}<|return|>{% else %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A reply to the last message is shown, and cued, with the empty thoughts that earlier ones lack, as in Qwen3's.
THINKING = (
    "{% set at = namespace(last=0) %}{% for message in messages if message['role'] == 'user' %}"
    "{% set at.last = messages.index(message) %}{% endfor %}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' and loop.index0 > at.last %}"
    "<think>\n\n</think>\n\n{% endif %}{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
# Nothing cues a reply but the end of the other's turn, as in the first Mistral's.
UNCUED = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
# Roles are plain text, and turns end with the end of sequence, as in Zephyr's.
ROLES = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# As families of published templates do, in their least form; and whose first words the opening is.
TURN = "{{ '<|im_start|>' + message['role'] + '\n' + TEXT + '<|im_end|>\n' }}"
CUED = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
EACH = "{% for message in messages %}"
MUST_ALTERNATE = EACH + (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Must alternate') }}{% endif %}"
)
LED = (  # the system's words are shown with a user's
    "{{ bos_token }}{% set lead = '' %}{% if messages[0]['role'] == 'system' %}"
    "{% set lead = messages[0]['content'] + '\n\n' %}{% set messages = messages[1:] %}{% endif %}"
)
SYSTEM = "{% if messages[0]['role'] == 'system' %}YES{% set messages = messages[1:] %}{% else %}NO{% endif %}"
SAID_FIRST = "<|im_start|>system\n{{ messages[0]['content'] | trim }}<|im_end|>\n"
DEFAULT = "<|im_start|>system\nYou help.<|im_end|>\n"
BLOCKS = (
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for block in message['content'] %}{{ block['text'] }}{% endfor %}{% endif %}"
)


def template_of(text: str, before: str = "{{ bos_token }}" + EACH) -> str:
    return before + TURN.replace("TEXT", text) + CUED


FAMILIES = {
    "trims": (template_of("message['content'] | trim"), "system"),
    "trims line breaks": (template_of("message['content'].strip('\n')"), "system"),
    "trims the user's": (
        template_of("(message['content'] | trim if message['role'] == 'user' else message['content'])"), "system"
    ),
    "trims replies": (
        template_of("(message['content'] | trim if message['role'] == 'assistant' else message['content'])"), "system"
    ),
    "default system prompt": (template_of(
        "message['content']", SYSTEM.replace("YES", SAID_FIRST).replace("NO", DEFAULT) + EACH
    ), "system"),
    "default system prompt alone": (template_of("message['content'] | trim", DEFAULT + MUST_ALTERNATE), "user"),
    "the user speaks before the assistant": (template_of(
        "message['content'] | trim", SYSTEM.replace("YES", SAID_FIRST).replace("NO", "") + MUST_ALTERNATE
    ), "user"),
    "the system joins the first user": (template_of(
        "(lead if loop.first else '') + message['content'] | trim", LED + MUST_ALTERNATE
    ), "user"),
    "the system joins the last user": (template_of(
        "(lead if loop.last else '') + message['content']", LED + MUST_ALTERNATE
    ), "user"),
    "texts or blocks": (
        LED + EACH + "<|im_start|>{{ message['role'] }}\n{% if loop.last %}{{ lead }}{% endif %}"
        + BLOCKS + "<|im_end|>\n" + CUED, "user"
    ),
    "closed by the end of a conversation": (FINISHED, "system"),
    "a line break that the last turn lacks": (ROLES.replace(
        "{{ eos_token }}\n",
        "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
        "{% if message['role'] != 'assistant' or not loop.last %}{{ '\n' }}{% endif %}",
    ), "system"),
    "no system": (NO_SYSTEM, "user"),
    "uncued": (UNCUED, "user"),
    "uncued, trims": (UNCUED.replace("['content'] }} [/", "['content'] | trim }} [/"), "user"),
}  # fmt: skip
# Turns begin with one control token and end with another.
ENDED = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}\n<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Today's date stands in the opening, as in Llama 3.2's (which takes it as a variable too) and in others'.
DATED = {
    "llama": "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    '{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}'
    "{%- endif %}\n<|im_start|>Today Date: {{ date_string }}<|im_end|>\n" + CHATML,
    "called": "\n<|im_start|>Today: {{ strftime_now(format='%Y-%m-%d')[:20] }}<|im_end|>\n" + CHATML,
    "in a macro": "{% macro today() %}{{ strftime_now('%B %d, %Y') }}{% endmacro %}"
    "  <|im_start|>Today: {{ today() }}<|im_end|>\n" + CHATML,
}
ANY_TEXT = st.text(max_size=60) | st.lists(
    st.sampled_from([*dond_texts.COMPACT_TOKENS, *NUMBERS, " ", "\n", PAD, BOS, CUE, "é", "數", "🙂", "<|im_end|>"])
).map("".join)


SCHEMES = ("first", "always", "normalizer")


def hf_tokens(chat_template: str | None = None, single_digits: bool = False) -> Tokens:
    return Tokens(hf_tokenizer(chat_template, single_digits))


def other_end(chat_template: str) -> Tokens:
    """A chat model whose turns end with another token than its `eos_token`."""
    tokenizer = hf_tokenizer(chat_template, single_digits=True)
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in ("<|user|>", "<|assistant|>")])
    tokenizer.eos_token = "<|endoftext|>"
    return Tokens(tokenizer)


def spaced(scheme: str, chat_template: str | None = None) -> Tokens:
    """A tokenizer such as Llama's, which puts a space before a text that it encodes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if scheme == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=[*specials, *(f"<0x{i:02X}>" for i in range(256))], show_progress=False
    )
    words = " ".join(" ".join(NATURAL_TEXTS).split())
    tokenizer.train_from_iterator([word for word in words.split(" ") for _ in range(3)] + list("ABCDEFGHIJK"), trainer)
    unk, bos, eos = specials
    result = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unk, bos_token=bos, eos_token=eos)
    result.chat_template = chat_template
    return Tokens(result)


PLAIN, CHAT = hf_tokens(), hf_tokens(CHATML, single_digits=True)


def converse(tokens: Tokens, opening: str, talk: list[tuple[str, str]]) -> StreamWriter:
    """A view of a game: an opening, then replies (a) and what is heard between them (u)."""
    view = StreamWriter(tokens)
    view.observe(opening, (), 0)
    for step, (who, text) in enumerate(talk):
        if who == "u":
            view.observe(text, (), step)
        else:
            view.cue()
            view.reply(tokens.encode(text), Kind.SPEECH)
    return view
