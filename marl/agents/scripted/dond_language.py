"""The grammar of scripted negotiators: `understand` reads any text, `say_split` and `say_value` write it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from envs.dond.rules import Triple, rest

NOUNS = (("book", "books"), ("hat", "hats"), ("ball", "balls"))

# --- Reading ----------------------------------------------------------------------------------------------------------
ITEM_OF = {noun: item for item, nouns in enumerate(NOUNS) for noun in nouns} | {"basketball": 2, "basketballs": 2}
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
NUMBER_OF = {word: number for number, word in enumerate(NUMBERS)} | {"a": 1, "an": 1, "nothing": 0}
SPEAKER_WORDS = {"i", "i'll", "i'd", "i'm", "ill", "id", "im", "me", "my", "mine", "gimme"}
ORDERS = {"take", "keep"}  # "take the hats" offers them, unless a pronoun stands before
LISTENER_WORDS = {"you", "you'll", "you'd", "your", "yours", "u", *ORDERS}
REST_WORDS = {"rest", "everything", "others", "remaining", "remainder"}
NEGATIONS = {"can't", "cant", "cannot", "not", "won't", "wont", "don't", "dont", "doesn't", "never"}
COUNT_FILLERS = {"of", "the", "those", "these", "your", "my", "more"}
YES = {"deal", "ok", "okay", "sure", "yes", "yeah", "yep", "agreed", "agree", "fine", "great", "good", "works",
       "perfect", "accept", "done"}  # fmt: skip
NO = NEGATIONS | {"no", "nope", "nah", "sorry", "unfair", "enough"}
_ITEM = r"(?P<item>books?|hats?|(?:basket)?balls?)"
_NUMBER = rf"(?P<number>\d+|{'|'.join(NUMBERS)}|nothing)"
_TO_ME = r"(?: points?)?(?: each)?(?: (?:to|for) me)?"

# "balls at 3", "hats are worth nothing to me"
_WORTH = re.compile(rf"\b{_ITEM} (?:at|(?:(?:is|are) )?worth(?: only| about)?) {_NUMBER}\b(?! to you){_TO_ME}")
_POINTS = re.compile(rf"\b{_NUMBER} points? (?:for|per|from) (?:a |each |the |my )?{_ITEM}\b")
_ZERO = (
    re.compile(rf"\b{_ITEM} (?:has|have|are|is|mean) (?:no (?:value|use|worth)|useless|worthless|nothing)\b{_TO_ME}"),
    re.compile(rf"\bi (?:don't|do not|dont) (?:really )?(?:need|want|care for|care about) (?:any |the |a )?{_ITEM}\b"),
    re.compile(rf"\b(?:no|little) (?:use|need|points|value) (?:for|in|from) (?:any |the |a )?{_ITEM}\b"),
)
_TOKEN = re.compile(r"[a-z][a-z']*|\d+|[,.?!;:]")


@dataclass(frozen=True)
class Meaning:
    """The meaning of a message."""

    share: Triple | None  # what the speaker would get; None where no split was named
    values: tuple[int | None, int | None, int | None]  # the speaker's stated values, None for the others
    accepts: bool
    rejects: bool
    asks: bool  # what the listener wants or values


def understand(message: str, counts: Triple, table: Triple | None = None) -> Meaning:
    """Reads any text and skips unknown words.

    The last pronoun before an item says who gets it; "for me" or "to you" behind it overrules. Items that are not
    mentioned go to the side that is not mentioned; if both are, they stay as in `table` (the speaker's share so far) or
    go to the listener. A plural without a number means all of them.
    """
    text = " ".join(message.lower().replace("’", "'").split())
    values: list[int | None] = [None, None, None]
    text = take_values(text, values)
    tokens = _TOKEN.findall(text)
    words = set(tokens)
    share = _resolve(_mentions(tokens, counts), counts, table)
    question = "?" in words
    rejects = bool(words & NO)
    accepts = bool(words & YES) and not rejects and not question
    asks = question and "you" in words and share is None
    return Meaning(share, (values[0], values[1], values[2]), accepts, rejects, asks)


def take_values(text: str, values: list[int | None]) -> str:
    """Writes the stated values into `values`, and returns the text without those clauses."""

    def note(match: re.Match[str]) -> str:
        found = match.groupdict()
        values[ITEM_OF[found["item"]]] = _number(found.get("number", "zero"))
        return "."

    for pattern in (_WORTH, _POINTS, *_ZERO):
        text = pattern.sub(note, text)
    return text


def _number(word: str) -> int:
    # A long run of digits is nobody's count or value, and int() has a limit on its length.
    return min(int(word[:4]), 99) if word[0].isdigit() else NUMBER_OF[word]


def stated_items(message: str, counts: Triple) -> dict[int, int]:
    """Reads how many of an item the speaker would get, by item, for the items that a message names."""
    text = take_values(" ".join(message.lower().replace("’", "'").split()), [None, None, None])
    mentions = _mentions(_TOKEN.findall(text), counts)
    named = [(item, number, mine) for item, number, mine in mentions if item is not None]
    return {item: number if mine is not False else counts[item] - number for item, number, mine in named}


def _mentions(tokens: list[str], counts: Triple) -> list[list[Any]]:
    """Reads which items are named, how many, and for whom."""
    mentions: list[list[Any]] = []  # [item or None for the rest, count, speaker gets it (None: not said)]
    speaker: bool | None = None  # who the last pronoun points to
    number: int | None = None
    negated = False
    asking = False  # inside "what ..." or "which ..."
    for position, token in enumerate(tokens):
        before = tokens[position - 1] if position else ""
        if token in ",.?!;:":
            if token != "," or negated:  # a refusal says nothing of the items after it
                speaker, asking = None, False
            number, negated = None, False
        elif token in ("what", "which", "who", "whatever"):
            asking = True
        elif token in NEGATIONS:
            negated = True
        elif token in SPEAKER_WORDS or token in LISTENER_WORDS:
            named = token in SPEAKER_WORDS
            if before in ("for", "to") and mentions and any(map(_is_item, tokens[max(position - 3, 0) : position - 1])):
                unassigned = [mention for mention in mentions if mention[2] is None] or mentions[-1:]
                for mention in unassigned:
                    mention[2] = named
                speaker = None
            elif token in ORDERS:
                speaker = False if speaker is None else speaker
            else:
                speaker = named
                negated = negated and token not in ("i", "i'll", "i'd")
            if token not in COUNT_FILLERS:
                number = None
        elif token.isdigit() or token in NUMBER_OF:
            number = _number(token)
        elif token in ("both", "all"):
            number = 99
        elif token == "no":
            number = 0 if position + 1 < len(tokens) and tokens[position + 1] in ITEM_OF else None
        elif token in ITEM_OF:
            item = ITEM_OF[token]
            if number is None:
                number = 99 if token.endswith("s") else 1
            if not (negated or asking):
                mentions.append([item, min(number, counts[item]), speaker])
            number = None
        elif token == "each" and number is not None:
            if not (negated or asking):
                mentions.extend([item, min(number, counts[item]), speaker] for item in range(3))
            number = None
        elif token in REST_WORDS:
            if not (negated or asking):
                mentions.append([None, 0, speaker])
            number = None
        elif token not in COUNT_FILLERS:
            number = None
    return mentions


def _is_item(token: str) -> bool:
    return token in ITEM_OF or token in REST_WORDS or token in ("each", "else")


def _resolve(mentions: list[list[Any]], counts: Triple, table: Triple | None) -> Triple | None:
    """Returns the speaker's share as `understand` describes it, or None."""
    if not mentions:
        return None
    share: list[int | None] = [None, None, None]
    rest: bool | None = None  # the speaker gets the rest
    sides = set()
    for item, number, speaker in mentions:
        mine = speaker is not False  # an item named without a word on who gets it is asked for
        sides.add(mine)
        if item is None:
            rest = mine
        else:
            share[item] = number if mine else counts[item] - number
    if rest is None and len(sides) == 1:
        rest = sides == {False}
    unnamed = (table if rest is None else counts if rest else None) or (0, 0, 0)
    books, hats, balls = (n if n is not None else left for n, left in zip(share, unnamed, strict=True))
    return books, hats, balls


# --- Writing: {mine} and {theirs} are lists of items from the speaker's side ------------------------------------------
ASK = (
    "i want {mine}", "i need {mine}", "i would like {mine}", "i'd like {mine}", "can i have {mine} ?",
    "could i get {mine} ?", "give me {mine}", "i'll take {mine}", "i will take {mine}", "how about i get {mine} ?",
    "let me have {mine}", "i get {mine}", "i really need {mine}",
)  # fmt: skip
ASK_REST = (
    "i want {mine} , you can have the rest", "i'll take {mine} and you get the rest",
    "i need {mine} , you can take everything else", "can i have {mine} and you keep the rest ?",
    "i get {mine} , the rest is for you",
)  # fmt: skip
OFFER = (
    "you can have {theirs}", "you get {theirs}", "you can keep {theirs}", "i can give you {theirs}",
    "i will give you {theirs}", "take {theirs}", "how about you take {theirs} ?",
)  # fmt: skip
OFFER_REST = (
    "you can have {theirs} , i keep the rest", "you take {theirs} and i get the rest",
    "i'll give you {theirs} if i can have the rest", "{theirs} for you and the rest for me",
)  # fmt: skip
BOTH = (
    "i get {mine} and you get {theirs}", "you take {theirs} and i take {mine}", "{mine} for me , {theirs} for you",
    "you can have {theirs} if i get {mine}", "i'll trade you {theirs} , give me {mine}",
)  # fmt: skip
TERSE = ("{mine}", "{mine} for me", "me {mine}", "{mine} please")
ACCEPT = (
    "deal", "ok deal", "ok", "sure , deal", "sounds good", "yes , deal", "okay that works", "that works", "agreed",
    "great , deal", "yes i can do that", "fine with me",
)  # fmt: skip
PLAIN = ("i get {full}", "i take {full}", "i want {full}", "{full} for me", "can i have {full} ?", "give me {full}")
ACCEPT_PLAIN = ("deal , i get {full}", "ok , i take {full}", "ok deal , {full} for me", "yes , i get {full}")
ACCEPT_AGAIN = ("deal , i get {mine}", "ok , you get {theirs}", "ok deal , i take {mine}", "yes , {mine} for me")
REJECT = ("no ,", "sorry ,", "no deal ,", "i can't do that ,", "not enough ,", "no thanks ,", "nope ,", "hmm no ,")
QUESTION = ("what do you want ?", "what do you need ?", "which items do you want ?", "hi , what would you like ?")
ASK_VALUES = ("what about you ?", "what are they worth to you ?", "what do you value ?", "and to you ?")
ZERO = (
    "{item} are worth nothing to me", "i don't need {item}", "{item} have no value for me", "i have no use for {item}",
    "{item} are worth 0 to me", "i get no points for {item}",
)  # fmt: skip
WORTH = (
    "i value {item} at {value}", "{item} are worth {value} to me", "{item} are worth {value} each",
    "i get {value} points for each {one}", "my {item} are worth {value}",
)  # fmt: skip
ALL_VALUES = (
    "i value books at {0} , hats at {1} and balls at {2}", "books are worth {0} , hats worth {1} , balls worth {2}",
)  # fmt: skip
SMALL_TALK = ("hi ,", "hello ,", "well ,", "hmm ,", "ok so")


def say_items(share: Sequence[int], counts: Triple, rng: Random) -> str:
    """A list of items, such as "the hats and 1 book". `share` is at least one item."""
    parts = []
    for item in rng.sample(range(3), 3):
        number, (one, many) = share[item], NOUNS[item]
        if number == 0:
            continue
        if number == counts[item]:
            several = (f"the {many}", f"all the {many}", f"{number} {many}")
            parts.append(rng.choice((f"the {one}", f"1 {one}") if number == 1 else several))
        else:
            parts.append(f"{number} {one if number == 1 else many}")
    assert parts, (share, counts)
    return parts[0] if len(parts) == 1 else " , ".join(parts[:-1]) + " and " + parts[-1]


def say_all_items(share: Sequence[int]) -> str:
    """Every item with its number, in the order of the proposal, such as "1 book 0 hats 2 balls"."""
    named = zip(share, NOUNS, strict=True)
    return " ".join(f"{number} {one if number == 1 else many}" for number, (one, many) in named)


def say_split(mine: Triple, counts: Triple, rng: Random, *, terse: bool = False, templates: Sequence[str] = ()) -> str:
    """A sentence by which the speaker gets `mine` and the listener the rest; `understand` reads it back.

    Without `templates`, a form is drawn that suits the split; `terse` prefers the shortest ones.
    """
    theirs = rest(mine, counts)
    if templates and "{full}" in templates[0]:
        return rng.choice(templates).format(full=say_all_items(mine))
    if not any(mine):
        return "you can have everything"
    if not any(theirs):
        return rng.choice(("i want everything", "i need everything", "i get everything"))
    if not templates:
        if terse:
            templates = TERSE
        else:
            few_kinds = sum(map(bool, mine)) - sum(map(bool, theirs))  # name the shorter list
            forms = (ASK, ASK_REST, OFFER, OFFER_REST, BOTH)
            weights = (5, 2, 1, 1, 2) if few_kinds <= 0 else (2, 1, 3, 2, 2)
            templates = rng.choices(forms, weights)[0]
    template = rng.choice(templates)
    return template.format(mine=say_items(mine, counts, rng), theirs=say_items(theirs, counts, rng))


def say_value(item: int, value: int, rng: Random) -> str:
    """One value statement, such as "hats are worth nothing to me"."""
    one, many = NOUNS[item]
    return rng.choice(ZERO if value == 0 else WORTH).format(item=many, one=one, value=value)
