"""Text <-> ids: small tokenizers trained here, any tokenizer of `transformers`, and the writing of an agent's stream.

A reply's ids are kept as sampled; only what an agent reads is encoded, as plain text that cannot forge a control token.
Left out: models, sampling, masks.
"""

import re
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import chain
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from envs.core import END, Question
from marl.common.errors import UserError
from marl.model.chat_template import UNREADABLE, Ends, Marks, read_marks, strip
from marl.types import Kind, Stream

PAD, BOS, CUE = "<|pad|>", "<|bos|>", "<|you|>"
NUMBERS = tuple(str(n) for n in range(11))
YOUR_TURN = "Your turn."  # the user's words before a reply that nothing else would ask for
MOST_TOKENS = 1 << 20  # several times the largest vocabularies
BEFORE = ("\n", "|", "x")  # at least one of them stays a token of its own before a text


def train_tokenizer(texts: Iterable[str], keep: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE in which every string of `keep` and every number 0..10 is one token.

    Words and numbers are single tokens with and without a space before them; tags are as they stand, and `END` also
    with its space. Any other text is encoded, by bytes if needed, and decodes to itself.
    """
    words = [*NUMBERS, *(token for token in keep if token.isalpha() or token.isdecimal())]
    tags = [*(token for token in keep if token not in words), f" {END}"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?[\p{L}']+| ?\d+| ?[^\s\p{L}\d']|\s"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(tags),
        special_tokens=[PAD, BOS, CUE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Repeated so that their merges come first: these must become whole words of the vocabulary.
    whole = [f"{word} {word}\n{word}" for word in words] * 2000
    tokenizer.train_from_iterator([*whole, *texts], trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS)


@dataclass(frozen=True)
class Frame:
    """Marks around a text that is read: ids, and next to the text plain words, which are encoded together with it."""

    before: list[int] = field(default_factory=list)
    lead: str = ""
    trail: str = ""
    after: list[int] = field(default_factory=list)
    begins: bool = False  # whether it begins a stream: some tokenizers put a space before it
    ends: Ends = ("", "")  # characters that are stripped off the text


@dataclass(frozen=True)
class Format:
    """Marks between the texts of a stream."""

    first: Frame  # around the opening observation
    heard: Frame  # around later ones
    cue: list[int]  # before every reply
    after_reply: list[int]  # after a reply that ended at `END`, and after the place where a question is answered
    ask_in_turn: bool  # whether a belief question is asked as a turn of its own (chat models)
    system: bool = False  # whether the opening is a system turn

    def marks(self) -> frozenset[int]:
        """Ids between texts, without the plain words next to a text."""
        first, heard = self.first, self.heard
        return frozenset(chain(first.before, first.after, heard.before, heard.after, self.cue, self.after_reply))


class Labels(NamedTuple):
    """One token for each option: `ids`. `listing`: the text that lists options where letters stand for them. `rests`:
    what follows the token until the option is written out."""

    ids: list[int]
    listing: str
    rests: list[tuple[int, ...]]


class Tokens:
    """Text <-> ids for one tokenizer, with its way of marking turns (its chat template if it has one)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.beside = False  # whether belief questions are branches beside the stream (`branches.read_questions`)
        self._labels: dict[tuple[str, ...], Labels] = {}
        self._encoded = lru_cache(maxsize=4096)(self._encode)  # questions and stock phrases come again and again
        # Calling the tokenizer takes four times as long as its backend.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        vocabulary = tokenizer.get_vocab()
        self.size = 1 + max(vocabulary.values(), default=-1)  # there may be gaps
        if not 0 < self.size <= MOST_TOKENS:
            raise UserError(
                f"The tokenizer {tokenizer.name_or_path} has ids up to {self.size - 1}. From 1 to {MOST_TOKENS} tokens "
                "are read: choose another model.name."
            )
        self.pad_id = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
        self.eos_ids = frozenset(i for i in (tokenizer.eos_token_id,) if i is not None)
        # Some tokenizers put a space before any text: only the beginning of a stream gets it here.
        self._spaced = self._behind("x", self._plain) != self._plain("x")
        cue = vocabulary.get(CUE)
        # Some tokenizers have line breaks as added tokens: these are text.
        added = tokenizer.added_tokens_decoder.items()
        self._added = {i: token for i, token in added if not token.content.isspace()}
        self.format = self._format(cue)
        turn_ends, marks = self._turn_marks()
        self.eos_ids |= turn_ends
        # Tokens that may complete a reply: the model's own ends, and those that may complete `END`.
        self.may_end = self.eos_ids | {i for piece, i in vocabulary.items() if END[-1] in piece}
        control = {tokenizer.pad_token_id, tokenizer.bos_token_id, cue, tokenizer.unk_token_id, *marks}
        self._control = frozenset(i for i in control if i is not None)
        special = {i for i, token in self._added.items() if token.special and END not in token.content}
        gaps = set(range(self.size)).difference(vocabulary.values())
        self.unspeakable = sorted((self._control | special | gaps) - self.eos_ids)  # never sampled in speech

    def add_ends(self, ids: Iterable[int]) -> None:
        """Adds ends of sequence that a model names. They may be said and end a reply, unless they stand between turns,
        begin a stream or pad. Ids without a token are ignored."""
        self.eos_ids |= frozenset(ids).intersection(range(self.size)) - self._control
        self.may_end |= self.eos_ids
        self.unspeakable = [i for i in self.unspeakable if i not in self.eos_ids]

    # -- text and ids ------------------------------------------------------------------------------------------------

    def encode(self, text: str, begins: bool = False) -> list[int]:
        """Encodes plain text that begins or continues a stream. Strings that look like special tokens stay text."""
        return list(self._encoded(text, begins)) if text else []

    def framed(self, text: str, frame: Frame) -> list[int]:
        """Ids of a text that is read, with the marks around it."""
        piece = frame.lead + strip(text, frame.ends) + frame.trail
        return [*frame.before, *self.encode(piece, frame.begins), *frame.after]

    def _encode(self, text: str, begins: bool) -> tuple[int, ...]:
        return tuple(self._behind(text, self._plain) if self._spaced and not begins else self._plain(text))

    def _plain(self, text: str) -> list[int]:
        """Encodes a text by itself, without special tokens."""
        if self._backend is None:
            return list(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)
        self._backend.encode_special_tokens = True
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def _behind(self, text: str, encode: Callable[[str], list[int]], before: str = "") -> list[int]:
        """Ids of a text as they are behind another text: `before`, or any that shares no token with it."""
        for other in (before, *BEFORE):
            first, both = encode(other) if other else [], encode(other + text)
            if first and len(both) > len(first) and both[: len(first)] == first:
                return both[len(first) :]
        return encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        if self._backend is not None:
            return str(self._backend.decode(list(ids), skip_special_tokens=False))
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def ends(self, ids: Sequence[int]) -> bool:
        """Tells whether a reply is complete: it holds `END`, or ends with the model's own end of sequence or turn."""
        last = ids[-1]
        return last in self.eos_ids or (last in self.may_end and END in self.decode(ids))

    def reply_text(self, ids: Sequence[int]) -> str:
        """Text that the game reads: the reply without the model's own end of sequence or turn."""
        return self.decode(ids[:-1] if ids and ids[-1] in self.eos_ids else ids)

    def within(self, ids: Sequence[int], span: tuple[int, int]) -> tuple[int, int]:
        """Range of `ids` whose characters lie within `span` of the decoded text; (0, 0) for an empty span."""
        if span[0] >= span[1]:
            return (0, 0)
        text_of = cache(lambda length: self.decode(ids[:length]))

        def inside(i: int) -> bool:
            """Tells whether token i changes text within the span; a token may hold part of a character."""
            before, after, end = text_of(i), text_of(i + 1), span[1]
            return len(after) > span[0] and (len(before) < end or before[:end] != after[:end])

        # From either end: a reply is nearly all body, and each check decodes all tokens before.
        first = next((i for i in range(len(ids)) if inside(i)), None)
        if first is None:
            return (0, 0)
        return first, next(i for i in reversed(range(len(ids))) if inside(i)) + 1

    # -- one token per choice ----------------------------------------------------------------------------------------

    def label(self, options: Sequence[str]) -> Labels:
        """Finds one token for each option.

        If every option is a single token (with or without a leading space), options stand for themselves, else letters
        stand for all. For chat models it is enough that the options' first tokens differ, and letters are preferred to
        options that are single tokens only after a space.
        """
        key = tuple(options)
        if key not in self._labels:
            self._labels[key] = self._label(key)
        return self._labels[key]

    def _label(self, options: Sequence[str]) -> Labels:
        letters = tuple(string.ascii_uppercase[: len(options)])
        listing = "".join(f"\n{letter}) {option}" for letter, option in zip(letters, options, strict=False))
        itself, by_letter = (options, ""), (letters, listing)
        chat = self.format.ask_in_turn
        if chat:  # they hardly ever put a space first, and small ones cannot tell which letter stands for what
            ways = [(itself, ""), (by_letter, ""), (itself, " "), (by_letter, " ")]
        else:
            ways = [(itself, " "), (itself, ""), (by_letter, " "), (by_letter, "")]
        for (texts, listed), prefix in ways:
            ids = [self.encode(prefix + text) for text in texts]
            usable = len(texts) == len(options) and all(ids) and (chat or all(len(i) == 1 for i in ids))
            if usable and len({i[0] for i in ids}) == len(ids):
                return Labels([i[0] for i in ids], listed, [tuple(i[1:]) for i in ids])
        raise UserError(
            f"{len(options)} options such as {options[0]!r} cannot be one token each, nor can letters for them, in the "
            f"tokenizer {self.tokenizer.name_or_path or type(self.tokenizer).__name__}: choose another model.name"
        )

    # -- formats -----------------------------------------------------------------------------------------------------

    def _format(self, cue: int | None) -> Format:
        if cue is None and getattr(self.tokenizer, "chat_template", None):
            marks, opening = self._chat_marks()
            if not (marks.cue or marks.heard[1]):
                raise UserError(
                    f"The chat template of {self.tokenizer.name_or_path} puts nothing between a text and the reply to "
                    "it, no cue for the assistant. Mend the template, or remove it from its folder."
                )
            return Format(
                first=self._frame(*marks.first, marks.strip_first, None),
                heard=self._frame(*marks.heard, marks.strip_heard, marks.after_reply),
                cue=self._marks(marks.cue, marks.heard[1]),
                after_reply=self._marks(marks.after_reply),
                ask_in_turn=True,
                system=opening == "system",
            )
        first = Frame([i for i in (self.tokenizer.bos_token_id,) if i is not None], begins=True)
        if cue is not None:
            return Format(first, Frame(), cue=[cue], after_reply=[], ask_in_turn=False)
        return Format(first, Frame(), cue=self.encode("\nyou:"), after_reply=self.encode("\n"), ask_in_turn=False)

    def _chat_marks(self) -> tuple[Marks, str]:
        """Marks of the chat template, and the opening's role: a user's where the template has no system turn."""
        for opening in ("system", "user"):
            try:
                return read_marks(self.tokenizer, opening), opening
            except UNREADABLE as error:
                reason = error
        raise UserError(
            f"The chat template of {self.tokenizer.name_or_path} does not keep the turns apart. Choose another "
            "model.name, or remove the template from its folder."
        ) from reason

    def _frame(self, before: str, after: str, ends: Ends, behind: str | None) -> Frame:
        """Frame of texts between these marks, which stand `behind` another mark, or begin a stream."""
        (*through, lead), (trail, *rest) = self._pieces(before), self._pieces(after)
        *earlier, joined = self._pieces((behind or "") + before)
        if earlier:  # some tokenizers put a space behind each control token as well
            begins = joined == lead and self._control_too(earlier[-1] + "x")[1:] == self._plain("x")
        else:
            begins = behind is None
        before_ids, after_ids = self._marks("".join(through), behind or ""), self._control_too("".join(rest))
        left, right = ends
        # Some control tokens take the white space beside them away, as Phi-3's.
        if through and self._control_too(through[-1] + " ") == self._control_too(through[-1]):
            lead, left = lead.lstrip(), left if lead.strip() else None
        if rest and self._control_too(" " + rest[0]) == self._control_too(rest[0]):
            trail, right = trail.rstrip(), right if trail.strip() else None
        return Frame(before_ids, lead, trail, after_ids, begins, (left, right))

    def _pieces(self, mark: str) -> list[str]:
        """Splits a mark: plain text, and in every second place a control token."""
        added = sorted((token.content for token in self._added.values()), key=len, reverse=True)
        pattern = "|".join(map(re.escape, added))
        return re.split(f"({pattern})", mark) if pattern else [mark]

    def _marks(self, text: str, before: str = "") -> list[int]:
        """Encodes the template's own text, with special tokens, as it is behind `before`."""
        if text and self._spaced:
            return self._behind(text, self._control_too, before)
        return self._control_too(text)

    def _control_too(self, text: str) -> list[int]:
        """Encodes a text by itself, with special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False).input_ids) if text else []

    def _turn_marks(self) -> tuple[frozenset[int], frozenset[int]]:
        """Finds the token with which a model ends its turn, if any, and all control tokens between turns.

        Where nothing closes a turn, models end theirs with the mark that opens the next.
        """
        if not self.format.ask_in_turn:
            return frozenset(), frozenset()
        form, control = self.format, {*self._added} - {self.tokenizer.bos_token_id}
        ends = [i for i in (*form.after_reply, *form.heard.before) if i in control | self.eos_ids]
        return frozenset(ends[:1]), frozenset(control & form.marks())


@dataclass(frozen=True)
class Asked:
    """Belief question: its answer is read at `position` of the stream, or at the end of the `branch` that goes on from
    there, among `candidate_ids` (K,)."""

    position: int
    step: int
    question: Question
    candidate_ids: tuple[int, ...]
    branch: tuple[int, ...] = ()


@dataclass
class StreamWriter:
    """Writes one agent's stream: observations, questions, cues and replies."""

    tokens: Tokens
    stream: Stream = field(default_factory=Stream)
    asked: list[Asked] = field(default_factory=list)
    opened: int = 0  # length of the opening
    due: list[tuple[int, Question]] = field(default_factory=list)  # asked by the choice that `cue` is next called for
    rest_of: dict[int, tuple[int, ...]] = field(default_factory=dict)  # what follows each token of a due choice

    def observe(self, text: str, questions: Sequence[Question], step: int) -> None:
        """Appends an observation and the belief questions that are due with it."""
        if text:
            ids = self._heard(text) if self.stream.tokens else self.tokens.framed(text, self.tokens.format.first)
            self.opened = self.opened or len(ids)
            self.stream.append(ids, Kind.OBSERVATION)
        for question in questions:
            if question.cued and text.endswith(question.text):
                self.due.append((step, question))  # the choice that is due is the question
            elif self.tokens.beside:
                self._ask_beside(question, step)
            else:
                self._ask(question, step)

    def _ask(self, question: Question, step: int) -> None:
        """Appends a question; one that is `cued` as `cue` asks for a choice."""
        form, length = self.tokens.format, len(self.stream)
        if question.cued:
            self.due.append((step, question))
            self.stream.append(self._heard(question.text), Kind.QUESTION)
            self.cue(question.candidates)
            self.stream.kinds[length:] = [Kind.QUESTION] * (len(self.stream) - length)
            self.rest_of = {}  # nothing is chosen
        else:
            letters = string.ascii_uppercase[: len(question.candidates)]
            ids, listing, _ = self.tokens.label(tuple(letters) if question.letters else question.candidates)
            text_ids = self._heard(question.text + listing)
            if form.ask_in_turn:
                text_ids += form.cue
            elif form.after_reply and not self.tokens.decode(self.stream.tokens[-1:]).endswith("\n"):
                text_ids = [*form.after_reply, *text_ids]  # a question begins a line
            self.stream.append(text_ids, Kind.QUESTION)
            self.asked.append(Asked(len(self.stream) - 1, step, question, tuple(ids)))
        self.stream.append(form.after_reply, Kind.OBSERVATION)

    def _ask_beside(self, question: Question, step: int) -> None:
        """Asks in a branch: the tokens that `_ask` would append, up to the place of the answer.

        Where the game has said which letters answer, a chat model asks itself: its own turn, begun with the question,
        takes half the tokens of a user's turn and a cue.
        """
        if not self.stream.tokens:
            raise UserError(f"{question.text}: asked before the player has read anything. Ask it after the opening")
        length, form = len(self.stream), self.tokens.format
        if question.letters and form.ask_in_turn and form.cue:
            letters = self.tokens.label(tuple(string.ascii_uppercase[: len(question.candidates)])).ids
            branch = (*form.cue, *self.tokens.encode(question.text))
            self.asked.append(Asked(length - 1, step, question, tuple(letters), branch))
            return
        aside = StreamWriter(self.tokens, Stream([*self.stream.tokens], [*self.stream.kinds]))
        aside._ask(question, step)
        (asked,) = aside.asked
        branch = tuple(aside.stream.tokens[length : asked.position + 1])
        self.asked.append(Asked(length - 1, step, question, asked.candidate_ids, branch))

    def _heard(self, text: str) -> list[int]:
        """Ids of a later observation with its marks, without the first mark where a reply has ended with it."""
        form, last = self.tokens.format, self.stream.tokens[-1:]
        ids = self.tokens.framed(text, form.heard)
        shared = form.heard.before[:1] if not form.after_reply else []
        return ids[1:] if shared and last == shared and self.tokens.eos_ids.issuperset(last) else ids

    def tell(self, text: str) -> None:
        """Appends a text that only this player reads, such as its intent. No loss learns to write it."""
        self.stream.append(self._heard(text), Kind.QUESTION)

    def cut(self, length: int, asked: int) -> None:
        """Removes all but the first `length` tokens and the first `asked` questions."""
        del self.stream.tokens[length:], self.stream.kinds[length:], self.asked[asked:]

    def cue(self, options: Sequence[str] = ()) -> tuple[int, ...]:
        """Appends the cue to reply; for a choice, the options' listing before it. Returns the options' token ids."""
        self.rest_of = {}
        if options:
            ids, listing, rests = self.tokens.label(options)
            self.rest_of = dict(zip(ids, rests, strict=True))
            if self.tokens.format.ask_in_turn:  # the turn before has ended
                listing = listing.removeprefix("\n")
            if listing:
                self.stream.append(self._heard(listing), Kind.OBSERVATION)
        form = self.tokens.format
        unasked = form.system and self.tokens.beside and len(self.stream) == self.opened  # rules, and no user's turn
        if unasked or (form.ask_in_turn and not form.cue and self._spoke_last()):
            self.stream.append(self._heard(YOUR_TURN), Kind.OBSERVATION)
        self.stream.append(self.tokens.format.cue, Kind.OBSERVATION)
        for step, question in self.due:
            assert set(question.candidates) == set(options), (question, options)
            candidate_ids = tuple(ids[options.index(candidate)] for candidate in question.candidates)
            self.asked.append(Asked(len(self.stream) - 1, step, question, candidate_ids))
        self.due = []
        return tuple(ids) if options else ()

    @property
    def tail(self) -> int:
        """Most tokens that follow a reply: if a choice is due, the rest of an option; the marks after it."""
        return max(map(len, self.rest_of.values()), default=0) + len(self.tokens.format.after_reply)

    def _spoke_last(self) -> bool:
        """Tells whether the stream ends with the agent's own turn: a reply, or the place of an answer."""
        turn = self.stream.kinds[-1 - len(self.tokens.format.after_reply) :]
        return any(kind is not Kind.OBSERVATION for kind in turn)

    def reply(self, ids: Sequence[int], kind: Kind) -> int:
        """Appends a reply, the rest of a chosen option and the marks after it. No loss learns the rest. Returns the
        position of the reply's first token."""
        start = len(self.stream)
        self.stream.append(list(ids), kind)
        if ids:
            self.stream.append(list(self.rest_of.get(ids[0], ())), Kind.QUESTION)
        self.rest_of = {}
        after = self.tokens.format.after_reply
        if ids and ids[-1] in self.tokens.eos_ids and ids[-1] in after:
            after = after[after.index(ids[-1]) + 1 :]  # the model ended its turn itself
        self.stream.append(after, Kind.OBSERVATION)
        return start
