"""Human dialogues of Deal or No Deal: reads the published files and plays them again through the real environment.

The data are those of Lewis et al. 2017 (`data.txt`, `val.txt`, `test.txt` of the public repository
facebookresearch/end-to-end-negotiator, folder `src/data/negotiate`), which are not part of this project. A row is one
player's view of a dialogue, so most dialogues stand there twice.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from envs.core import END, Question
from envs.dond.environment import AGENTS, DealOrNoDeal
from envs.dond.replies import MESSAGE, proposal_text
from envs.dond.rules import ITEMS, Triple, points, rest

Speaker = Literal["YOU", "THEM"]
Split = Literal["all", "train", "val", "test"]
Step = tuple[Literal["observe"], str, tuple[Question, ...]] | tuple[Literal["reply"], str]

SELECTION = "<selection>"  # stands where a player ended the talk; no words


class HumanEnding(StrEnum):
    """Endings of a human dialogue."""

    DEAL = "deal"
    DISAGREE = "disagree"  # both chose, and the choices don't add up to the pool
    NO_AGREEMENT = "no agreement"  # a player chose to walk away
    DISCONNECT = "disconnect"


@dataclass(frozen=True)
class HumanView:
    """One player's view of a human dialogue: the player is YOU, its partner THEM.

    `index`: row of `data.txt`, from 0. `turns`: speaker and words; the last turn, and only that, has None: there the
    player ended the talk. `claim`: the items that YOU chose, or None. `partner_claim`: the items that THEM chose, where
    known: the rest after a deal, else looked up in the partner's own row.
    """

    index: int
    counts: Triple
    values: Triple
    partner_values: Triple
    turns: tuple[tuple[Speaker, str | None], ...]
    claim: Triple | None
    partner_claim: Triple | None
    ending: HumanEnding

    @property
    def agree(self) -> bool:
        """Tells whether there was a deal. Two players who both walked away have none, although the file says agree."""
        return self.ending is HumanEnding.DEAL

    @property
    def reward(self) -> int:
        """YOUR points: what the claim is worth after a deal, else 0."""
        return points(self.claim, self.values) if self.agree and self.claim is not None else 0

    @property
    def dialogue(self) -> str:
        """Identifies the dialogue: the same string in both players' views of it."""
        theirs = tuple(("THEM" if who == "YOU" else "YOU", text) for who, text in self.turns)
        return min(
            repr((self.counts, self.values, self.partner_values, self.turns)),
            repr((self.counts, self.partner_values, self.values, theirs)),
        )

    @property
    def usable(self) -> bool:
        """Tells whether the dialogue ends in a claim, as every game does that `replay` can play."""
        return self.claim is not None

    @property
    def messages(self) -> tuple[str, ...]:
        return tuple(text for _, text in self.turns if text is not None)


@dataclass(frozen=True)
class HumanSplit:
    """All consistent rows of a split in the order of `data.txt`.

    `skipped` counts those that are not `usable`, by their ending, and inconsistent rows as `broken pair`.
    """

    views: tuple[HumanView, ...]
    skipped: Counter[str]

    @property
    def usable(self) -> tuple[HumanView, ...]:
        return tuple(view for view in self.views if view.usable)


# --- Reading ----------------------------------------------------------------------------------------------------------

_CONTEXT = r"((?:\d{1,3} ){5}\d{1,3})"
_ROW = re.compile(rf"{_CONTEXT} (.+) <eos> (YOU|THEM): {SELECTION} (.+) <eos> reward=(.+) (agree|disagree) {_CONTEXT}")
_HELD_OUT = re.compile(
    rf"<input> {_CONTEXT} </input> <dialogue> (.+) <eos> (YOU|THEM): {SELECTION} </dialogue> "
    rf"<output> .+ </output> <partner_input> {_CONTEXT} </partner_input>"
)
_CHOICE = re.compile(r"item0=(\d{1,3}) item1=(\d{1,3}) item2=(\d{1,3})")

Dialogue = tuple[str, str, str, str]  # own context, talk, who ended it, partner's context: what tells rows apart


def read_split(directory: str | Path, split: Split) -> HumanSplit:
    """Reads `data.txt`, `val.txt` and `test.txt` in `directory` and returns one split of their rows.

    `data.txt` holds every row ("all"), `val.txt` and `test.txt` list which of them were held out, and "train" is the
    rest. Inconsistent rows are counted and left out: the two contexts have different counts, the choice is of more than
    the pool holds, or the reward is not its worth. Raises ValueError, with file name and line number, for a line that
    is no row, and for a file without a consistent one. Raises FileNotFoundError.
    """
    directory = Path(directory)
    rows = _read_rows(directory / "data.txt")
    known = {key for _, key in rows}
    held_out = {name: _read_held_out(directory / f"{name}.txt", known) for name in ("val", "test")}
    held_out |= {"train": known - held_out["val"] - held_out["test"], "all": known}
    wanted = [view for view, key in rows if key in held_out[split]]
    views = tuple(view for view in wanted if view is not None)
    skipped = Counter(view.ending.value for view in views if not view.usable)
    if broken := len(wanted) - len(views):
        skipped["broken pair"] = broken
    return HumanSplit(views, skipped)


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path} is missing. Set data.dond to a folder with data.txt, val.txt and test.txt, as published in "
            "facebookresearch/end-to-end-negotiator, src/data/negotiate."
        ) from error
    return text.rstrip("\n").split("\n")


def _read_rows(path: Path) -> list[tuple[HumanView | None, Dialogue]]:
    """Every row in order; None for inconsistent ones."""
    rows = []
    for number, line in enumerate(_lines(path), start=1):
        try:
            rows.append(_parse_row(" ".join(line.split()), number - 1))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: expected {error}, got {line!r}.") from error
    # Each dialogue's claim by who made it, to look up what the partner of a failed deal chose.
    claims = {key: view.claim for view, key in rows if view is not None}
    if not claims:
        raise ValueError(f"{path}: expected human dialogues, but none of its {len(rows)} rows is consistent.")

    def whole(view: HumanView, key: Dialogue) -> HumanView:
        left = rest(view.claim, view.counts) if view.agree and view.claim else claims.get(_swapped(key))
        return replace(view, partner_claim=left)

    return [(view and whole(view, key), key) for view, key in rows]


def _read_held_out(path: Path, known: set[Dialogue]) -> set[Dialogue]:
    held_out = set()
    for number, line in enumerate(_lines(path), start=1):
        match = _HELD_OUT.fullmatch(" ".join(line.split()))
        if not match:
            form = "<input> … </input> <dialogue> … <selection> </dialogue> <output> … </output> <partner_input> …"
            raise ValueError(f"{path}, line {number}: expected {form}, got {line!r}.")
        key = (match[1], match[2], match[3], match[4])
        if key not in known:
            raise ValueError(f"{path}, line {number}: expected a dialogue that data.txt holds too, got {line!r}.")
        held_out.add(key)
    return held_out


def _parse_row(line: str, index: int) -> tuple[HumanView | None, Dialogue]:
    """A row of `data.txt` without its partner's claim, or None if it is inconsistent. ValueError: what was expected."""
    match = _ROW.fullmatch(line)
    if not match:
        raise ValueError("'CONTEXT YOU: … <eos> THEM: <selection> CHOICE <eos> reward=… agree|disagree CONTEXT'")
    own, talk, ended_by, choice, reward, verdict, other = match.groups()
    counts, values = _context(own)
    partner_counts, partner_values = _context(other)
    claim, ending = _parse_choice(choice, verdict)
    turns = (*_parse_talk(talk, ended_by), (_speaker(ended_by), None))
    view = HumanView(index, counts, values, partner_values, turns, claim, None, ending)
    whole = partner_counts == counts and reward == (choice if claim is None else str(points(claim, values)))
    whole = whole and (claim is None or all(n <= held for n, held in zip(claim, counts, strict=True)))
    return view if whole else None, (own, talk, ended_by, other)


def _parse_choice(choice: str, verdict: str) -> tuple[Triple | None, HumanEnding]:
    if choice in ("no agreement", "disconnect"):
        return None, HumanEnding(choice)
    match = _CHOICE.fullmatch(choice)
    if not match:
        raise ValueError("a choice 'item0=N item1=N item2=N', 'no agreement' or 'disconnect'")
    claim = (int(match[1]), int(match[2]), int(match[3]))
    return claim, HumanEnding.DEAL if verdict == "agree" else HumanEnding.DISAGREE


def _parse_talk(talk: str, ended_by: str) -> list[tuple[Speaker, str]]:
    turns = []
    for turn in talk.split(" <eos> "):
        who, _, text = turn.partition(": ")
        if not text:
            raise ValueError("turns 'YOU: words' or 'THEM: words'")
        turns.append((_speaker(who), text))
    order = [who for who, _ in turns] + [_speaker(ended_by)]
    if any(a == b for a, b in pairwise(order)):
        raise ValueError("speakers who take turns")
    return turns


def _speaker(word: str) -> Speaker:
    if word not in ("YOU", "THEM"):
        raise ValueError("YOU or THEM at the start of each turn")
    return "YOU" if word == "YOU" else "THEM"


def _context(text: str) -> tuple[Triple, Triple]:
    n0, v0, n1, v1, n2, v2 = map(int, text.split())
    return (n0, n1, n2), (v0, v1, v2)


def _swapped(key: Dialogue) -> Dialogue:
    """The same dialogue as in the partner's row."""
    own, talk, ended_by, other = key
    swap = {"YOU": "THEM", "THEM": "YOU"}
    talk = re.sub("(^|<eos> )(YOU|THEM): ", lambda found: f"{found[1]}{swap[found[2]]}: ", talk)
    return other, talk, swap[ended_by], own


# --- Renaming the items -----------------------------------------------------------------------------------------------

_ITEM = re.compile(r"(?<![a-z])(book|hat|ball)(?=s?(?![a-z]))")
_OTHER_NAME = re.compile(r"[a-z](?:book|ball)|(?:book|ball)(?!s?(?![a-z]))")  # basketball, bookks


def permuted(view: HumanView, order: Triple) -> HumanView:
    """The same dialogue with its items renamed: `ITEMS[order[i]]` becomes `ITEMS[i]`.

    Counts, values and claims move along, so points stay the same. A dialogue that names an item in another way
    (basketballs) is returned unchanged.
    """
    assert sorted(order) == [0, 1, 2], order
    if any(_OTHER_NAME.search(message) for message in view.messages):
        return view
    new = {ITEMS[old][:-1]: item[:-1] for item, old in zip(ITEMS, order, strict=True)}

    def moved(triple: Triple) -> Triple:
        return triple[order[0]], triple[order[1]], triple[order[2]]

    names = ("counts", "values", "partner_values", "claim", "partner_claim")
    triples: dict[str, Any] = {name: triple and moved(triple) for name in names for triple in [getattr(view, name)]}
    turns = tuple((who, text and _ITEM.sub(lambda found: new[found[0]], text)) for who, text in view.turns)
    return replace(view, turns=turns, **triples)


# --- Playing again ----------------------------------------------------------------------------------------------------
class NotReplayable(ValueError):
    """A human dialogue that breaks the environment's rules. `reason` is short, for counting."""

    def __init__(self, view: HumanView, reason: str) -> None:
        super().__init__(f"The dialogue in row {view.index} can't be played again: {reason}.")
        self.reason = reason


def replay(view: HumanView, env: DealOrNoDeal) -> list[Step]:
    """Plays the dialogue through `env` and returns what YOUR seat reads and replies, in order, as in live play.

    Items are ("observe", text, questions) for every observation with text or belief questions, and ("reply", text) for
    YOUR own turns, with tags and end marker. The result of the game is left out: no reply follows it. YOU are player_0
    in rows with an even index, else player_1. The player that ended the talk proposes first. An unknown claim of the
    partner is played as one that makes no deal. Raises NotReplayable where YOU made no claim, or where the environment
    refuses or cuts a turn.
    """
    if view.claim is None:
        raise NotReplayable(view, view.ending.value)
    partner_claim = view.partner_claim
    if partner_claim is None:  # only after a failed deal
        exact = rest(view.claim, view.counts)
        partner_claim = view.counts if exact != view.counts else (0, 0, 0)
    seat = view.index % 2
    values = (view.values, view.partner_values)
    first = seat if view.turns[0][0] == "YOU" else 1 - seat
    options = {"counts": view.counts, "values": values if seat == 0 else values[::-1], "first": first}
    # The second proposal ends the game, and belongs to the player who did not end the talk.
    closing: tuple[Speaker, None] = ("THEM" if view.turns[-1][0] == "YOU" else "YOU", None)
    you = AGENTS[seat]
    try:
        observations, infos = env.reset(options=options)
    except ValueError as error:
        raise NotReplayable(view, f"not a valid context: {error}") from error
    steps: list[Step] = []
    for who, text in (*view.turns, closing):
        if observations[you]["text"] or infos[you]["questions"]:
            steps.append(("observe", observations[you]["text"], infos[you]["questions"]))
        speaker = you if who == "YOU" else AGENTS[1 - seat]
        if not env.agents:
            raise NotReplayable(view, "longer than the environment allows")
        claim = view.claim if who == "YOU" else partner_claim
        body = proposal_text(claim) if text is None else f"{MESSAGE} {text}"
        action = f"{body} {END}"
        if who == "YOU":
            steps.append(("reply", action))
        observations, _, _, _, infos = env.step({speaker: action})
        if infos[speaker]["error"]:
            raise NotReplayable(view, f"refused: {infos[speaker]['error']}")
        if text is not None and infos[speaker]["message"] != text:
            raise NotReplayable(view, "a message that the environment changes")
    assert not env.agents, view
    return steps


def replay_all(views: Iterable[HumanView], env: DealOrNoDeal) -> tuple[list[list[Step]], Counter[str]]:
    """Replays each view. Returns also how many could not be played, by reason."""
    replayed = []
    skipped: Counter[str] = Counter()
    for view in views:
        try:
            replayed.append(replay(view, env))
        except NotReplayable as error:
            skipped[error.reason] += 1
    return replayed, skipped
