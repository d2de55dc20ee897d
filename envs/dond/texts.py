"""The texts that players read, in each style."""

import re

from envs.core import END, Question, Style, clean
from envs.dond.replies import EXAMPLE, MESSAGE, PROPOSE, Reason
from envs.dond.rules import ITEMS, MAX_POINTS, Triple

_OPENING = "You are negotiating with a partner over a shared pool of books, hats and balls."
_NATURAL_PROMPT = """{opening}
Pool: {n[0]} books, {n[1]} hats, {n[2]} balls.
Your values: {v[0]} per book, {v[1]} per hat, {v[2]} per ball.
Your score: (your points) + ({objective:g}) x (your partner's points).
The whole pool is worth exactly 10 points to each of you, but you may value the items differently.
Neither of you sees the other's values.

{goal}

Rules:
{replies}  Your partner should claim what you leave.
- The first turn of the game must be a message.
- A proposal closes the talk. The other player is told that it was made, but not what it says,
  and must answer with a proposal.
- If the two claims add up to exactly the pool, it is a deal: each of you gets the points of the items claimed.
  Otherwise both of you get 0 points.
- After {max_entries} messages and proposals the game ends without a deal, with 0 points for both.
- A reply that breaks these rules comes back to you with a correction, and you try again.
  After {max_errors} such replies in a row the game ends without a deal, with 0 points for both.
"""
_TAGGED = """\
- You take turns. A turn is one message or one private proposal. Begin it with its tag and finish it with {end}.
- To talk, reply: {message} your text {end}
- To propose, reply: {form}
  The numbers are what you claim for yourself, as digits, always in the order books, hats, balls.
"""
_IN_PARTS = """\
- You take turns. A turn is one message or one private proposal.
- A message is plain words, which your partner reads.
- For a proposal you are asked how many books, hats and balls you claim for yourself.
"""
_BRIEF_PROMPT = """\
You and a partner share {n[0]} books, {n[1]} hats, {n[2]} balls.
To you a book is worth {v[0]} points, a hat {v[1]}, a ball {v[2]}; the whole pool is worth 10 to each of you.
Your score: your points + ({objective:g}) x your partner's. {goal}
Neither sees the other's values. Take turns; the first sends a message. A proposal ends the talk: each of you then
claims a part of the pool, unseen. If both claims add up to the pool, it is a deal and pays; else both of you get 0
points, as after {max_entries} messages and proposals, or {max_errors} refused replies in a row.
{replies}Asked of an item, say by letter what one is worth to your partner: A is 0, B is 1, and so on to K, which is 10.
"""
_BRIEF_TAGGED = "To talk, reply {message} your text {end}. To claim, reply {form}, in this order.\n"
_BRIEF_GOALS = {
    0.0: "Goal: the most points for yourself.",
    1.0: "Goal: the most points together.",
    -1.0: "Goal: the largest lead over your partner.",
}
_SEMI = (
    "Your goal: win as many points for yourself as you can. Your partner's points are of no use to you. "
    "Ask for what you want and push back on offers that are bad for you, but remember that no deal gives you nothing."
)
_COOP = (
    "Your goal: make the sum of both players' points as large as you can. You are a team: find out what each of you "
    "values, and let every item go to whoever gets more out of it."
)
_COMPETITIVE = (
    "Your goal: make your lead as large as you can, that is, your points minus your partner's points. "
    "A deal that gives your partner more than you is worse for you than no deal."
)
_MIXED = (
    "Your goal: make your score, as given above, as large as you can. Each point of your partner counts {objective:g} "
    "times as much for you as a point of your own."
)
_GOALS = {0.0: _SEMI, 1.0: _COOP, -1.0: _COMPETITIVE}


# Lines by style that can be read after the prompt: what the partner said, that it proposed, the correction of a
# refused reply, how much of one's own message was left, and the end, with own points and the partner's.
WORDING = {
    Style.NATURAL: {
        "message": "Partner: {}",
        "proposed": f"Notice: Your partner has made a proposal. Answer with one of your own, starting with {PROPOSE}.",
        "error": "Error: {}",
        "cut": "Note: Your message was cut to its first {} characters.",
        "deal": "The game is over: a deal. You get {} points, your partner gets {}.",
        "no_deal": "The game is over: no deal. Both of you get 0 points.",
        # format=structured: what is asked of the player whose turn it is, how silence is heard, and a proposal
        "kind": "Do you send a message or make a proposal?",
        "say": "What do you say to your partner?",
        "count": "How many {} do you claim?",
        "silence": "Partner: ...",
        "closed": "Notice: Your partner has made a proposal. Answer with one of your own.",
    },
    Style.BRIEF: {
        "message": "Partner: {}",
        "proposed": f"Your partner has proposed. Answer with {PROPOSE}.",
        "error": "Error: {}",
        "cut": "Your message was cut to {} characters.",
        "deal": "Deal: {} points for you, {} for your partner.",
        "no_deal": "No deal: 0 points.",
        "kind": "Message or proposal?",
        "say": "Your message?",
        "count": "How many {} for you?",
        "silence": "Partner: ...",
        "closed": "Your partner has proposed.",
    },
    Style.COMPACT: {
        "message": "them: {}",
        "proposed": f"them: {PROPOSE}",  # no message can read like this: tags within messages are refused
        "error": "error: {}",
        "cut": "note: cut {}",
        "deal": "deal {} {}",
        "no_deal": "no deal",
        "kind": "turn?",
        "say": "say:",
        "count": "{}?",
        "silence": "them: ...",
        "closed": f"them: {PROPOSE}",
    },
}
_NATURAL_QUESTIONS = tuple(f"How many points is one {item} worth to your partner?" for item in ("book", "hat", "ball"))
_BRIEF_QUESTIONS = ("Book?", "Hat?", "Ball?")
_COMPACT_QUESTIONS = tuple(f"<{item}?>" for item in ITEMS)
_CANDIDATES = tuple(str(value) for value in range(MAX_POINTS + 1))
QUESTIONS = {  # [style][item][the partner's value]
    style: tuple(
        tuple(Question(text, _CANDIDATES, answer, letters=style is Style.BRIEF) for answer in _CANDIDATES)
        for text in texts
    )
    for style, texts in (
        (Style.NATURAL, _NATURAL_QUESTIONS),
        (Style.BRIEF, _BRIEF_QUESTIONS),
        (Style.COMPACT, _COMPACT_QUESTIONS),
    )
}


def claim_questions(style: Style, counts: Triple) -> tuple[Question, ...]:
    """Asks how many of each item the partner will claim. The answers, by item, are known at the end."""
    return tuple(
        Question(text.format(item), tuple(str(n) for n in range(count + 1)), "", later=item)
        for item, count, text in zip(ITEMS, counts, _CLAIM_QUESTIONS[style], strict=True)
    )


_CLAIM_QUESTIONS = {
    Style.NATURAL: ("How many {} will your partner claim?",) * 3,
    Style.BRIEF: ("{} for your partner?",) * 3,
    Style.COMPACT: _COMPACT_QUESTIONS,  # these tokens ask whatever a game asks
}

# Strings of compact style that a tokenizer made for this game should keep whole; numbers are its own business.
COMPACT_TOKENS = (
    *(MESSAGE, PROPOSE, END, *_COMPACT_QUESTIONS, *ITEMS),
    *("objective", "them:", "error:", "note:", "cut", "no deal", "deal"),
    *(reason.value for reason in Reason),
)


def prompt(
    counts: Triple, own_values: Triple, objective: float, style: Style, max_entries: int = 20, max_errors: int = 5,
    structured: bool = False,
) -> str:  # fmt: skip
    """The first text that a player reads: rules (natural style only), pool, own values, objective.

    structured: the rules of format=structured.
    """
    if style is Style.COMPACT:
        shown = " ".join(f"{item} {n} {v}" for item, n, v in zip(ITEMS, counts, own_values, strict=True))
        return f"{shown} objective {objective:g}\n"
    goal = _GOALS.get(objective, _MIXED).format(objective=objective)
    form, tagged, in_parts = _NATURAL_PROMPT, _TAGGED, _IN_PARTS
    if style is Style.BRIEF:
        form, tagged, in_parts = _BRIEF_PROMPT, _BRIEF_TAGGED, ""
        goal = _BRIEF_GOALS.get(objective, "Goal: the best score.")
    replies = in_parts if structured else tagged.format(message=MESSAGE, end=END, form=EXAMPLE)
    return form.format(
        opening=_OPENING, n=counts, v=own_values, objective=objective, goal=goal, replies=replies,
        max_entries=max_entries, max_errors=max_errors,
    )  # fmt: skip


_COMPACT_PROMPT_READ = re.compile(r"books (\d+) (\d+) hats (\d+) (\d+) balls (\d+) (\d+) objective (\S+)\n")
_NATURAL_PROMPT_READ = re.compile(
    re.escape(_OPENING) + r"\nPool: (\d+) books, (\d+) hats, (\d+) balls\.\n"
    r"Your values: (\d+) per book, (\d+) per hat, (\d+) per ball\.\n"
    r"Your score: \(your points\) \+ \((\S+)\) x \(your partner's points\)\.\n"
)

_BRIEF_PROMPT_READ = re.compile(
    r"You and a partner share (\d+) books, (\d+) hats, (\d+) balls\.\n"
    r"To you a book is worth (\d+) points, a hat (\d+), a ball (\d+); .*\n"
    r"Your score: your points \+ \((\S+)\) x your partner's\. "
)


def parse_prompt(text: str) -> tuple[Triple, Triple, float]:
    """Counts, own values and objective (to six digits), read from a first observation of either style.

    Raises ValueError for any other text.
    """
    if match := _COMPACT_PROMPT_READ.match(text):
        c0, v0, c1, v1, c2, v2 = (int(n) for n in match.groups()[:6])
    elif match := _NATURAL_PROMPT_READ.match(text) or _BRIEF_PROMPT_READ.match(text):
        c0, c1, c2, v0, v1, v2 = (int(n) for n in match.groups()[:6])
    else:
        raise ValueError(f"Expected the first observation of a game, got {text[:80]!r}.")
    return (c0, c1, c2), (v0, v1, v2), float(match[7])


def style_of(text: str) -> Style:
    """The style of a first observation."""
    if _COMPACT_PROMPT_READ.match(text):
        return Style.COMPACT
    return Style.BRIEF if _BRIEF_PROMPT_READ.match(text) else Style.NATURAL


def prompt_with(text: str, values: Triple) -> str:
    """The same first observation, of either style, with other values of one's own."""
    counts, own, objective = parse_prompt(text)
    for style in Style:
        lines = [prompt(counts, v, objective, style).split("\n") for v in (own, values)]
        for old, new in zip(*lines, strict=True):
            if old != new:
                text = text.replace(f"{old}\n", f"{new}\n", 1)
    return text


_ONE_LINE = {ord(c): " " for c in map(chr, range(0x3001)) if c.isspace()}  # all white space there is, one for one


def passed_on(text: str, max_chars: int) -> str:
    """The message as the partner reads it: on one line, in the characters of the text spaces, cut at `max_chars`."""
    return clean(text.translate(_ONE_LINE), max_chars)


def says_freely(text: str) -> bool:
    """Tells whether an observation of format=structured asks for words, which are then free."""
    return text.removesuffix("\n").rpartition("\n")[2] in {words["say"] for words in WORDING.values()}


def heard_text(text: str | None, style: Style) -> str:
    """The line that tells a player of its partner's message, or (None) of its partner's proposal."""
    words = WORDING[style]
    return f"{words['proposed'] if text is None else words['message'].format(text)}\n"


def parse_events(text: str) -> list[tuple[str, str]]:
    """The events in an observation of either style, in order: ("message", text), ("proposal", ""), ("error", text), or
    ("cut", number of characters left of one's own message).

    Skips prompts and the result of the game. A message is a single line, so it can't pass for anything else.
    """
    heard = []
    for line in text.split("\n"):
        if line in _PROPOSED:
            heard.append(("proposal", ""))
            continue
        for kind, before, after in _HEARD:
            if line.startswith(before):
                heard.append((kind, line.removeprefix(before).removesuffix(after)))
                break
    return heard


_PROPOSED = {words[kind] for words in WORDING.values() for kind in ("proposed", "closed")}
_HEARD = [
    (kind, *words[kind].split("{}")) for words in WORDING.values() for kind in ("message", "error", "cut")
]  # what stands before and after the words; some styles share it
