"""The texts that players of Diplomacy read, in each style."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from envs.core import END, Style
from envs.diplomacy.board import Board, Kind
from envs.diplomacy.orders import COMPACT_WAIVE, MORE, in_compact

NOBODY = "nobody"
POWERS = ("AUSTRIA", "ENGLAND", "FRANCE", "GERMANY", "ITALY", "RUSSIA", "TURKEY")
PLACES = (  # of the standard map; `pure` has seven of them
    "ADR", "AEG", "ALB", "ANK", "APU", "ARM", "BAL", "BAR", "BEL", "BER", "BLA", "BOH", "BOT", "BRE", "BUD", "BUL",
    "BUR", "CLY", "CON", "DEN", "EAS", "EDI", "ENG", "FIN", "GAL", "GAS", "GRE", "HEL", "HOL", "ION", "IRI", "KIE",
    "LON", "LVN", "LVP", "LYO", "MAO", "MAR", "MOS", "MUN", "NAF", "NAO", "NAP", "NTH", "NWG", "NWY", "PAR", "PIC",
    "PIE", "POR", "PRU", "ROM", "RUH", "RUM", "SER", "SEV", "SIL", "SKA", "SMY", "SPA", "STP", "SWE", "SYR", "TRI",
    "TUN", "TUS", "TYR", "TYS", "UKR", "VEN", "VIE", "WAL", "WAR", "WES", "YOR",
)  # fmt: skip
COASTS = ("BUL/EC", "BUL/SC", "SPA/NC", "SPA/SC", "STP/NC", "STP/SC")
SEASONS = {"S": "spring", "F": "fall", "W": "winter"}

# Strings of compact style that a tokenizer made for this game should keep whole; numbers are its own business.
COMPACT_TOKENS = (
    *(POWERS + PLACES + COASTS),
    *(f"{sign}{place}" for sign in "-+~" for place in PLACES + COASTS),
    *(f"={place}" for place in PLACES),
    *("H", "D", "B", MORE, COMPACT_WAIVE, NOBODY),
    *("you", "years", "solo", *SEASONS.values(), "retreats", "fails", "dislodged", "build", "disband", "error", "cut"),
    *("to", "say", "will", "over", "centres"),
    END,
)

_RULES = """\
You play Diplomacy as {power}, one of {count} powers: {powers}.
All powers give their orders at the same time. Each spring and fall units move; in winter they are built or disbanded.
A unit alone in a province stays unless it is attacked with more support than it has. Equal attacks bounce.
Orders: "A PAR H" (the army in PAR holds), "A PAR - BER" (it moves), "A PAR S A LON" (it supports the army in LON where
that stays), "A PAR S A LON - BER" (it supports that army's move), "F NTH C A LON - NWY" (the fleet convoys it).
A unit that is attacked gives no support, unless by the one that its support is against. Nobody dislodges their own.
Whoever has a unit in a centre at the end of fall owns it from then on; you may have as many units as centres, and
build new ones in your own home centres while these are free and yours.{places}
A power with {win} centres, and more than any other, wins alone: its score is 1, the others' 0.
Else the game ends after year {years}, and a power's score is the square of its centres over the sum of all powers'.
{press}Reply to a question with one of the options that are listed with it, word for word.
"""
_PURE = "\nOn this map every province is next to every other, and each is the home and centre of one power."
_PRESS = (
    "Before each spring's and fall's moves, {rounds}, each power may send a message to one other, which nobody else "
    "reads. Nothing that is said binds anybody.\nFinish a message with {end}.\n"
)
_BRIEF_RULES = """\
Diplomacy. You are {power}, of {powers}. Orders are simultaneous: "A PAR H" holds, "A PAR - BER" moves, "A PAR S A LON"
and "A PAR S A LON - BER" support, "F NTH C A LON - NWY" convoys. More support wins; equal attacks bounce; an attacked
unit gives no support. A unit in a centre after fall takes it. {win} centres win alone (score 1); else after year
{years} a score is one's squared centres over the sum of squares.{places} {press}Reply with an option, word for word.
"""
_BRIEF_PRESS = "Before moves, {rounds}, each may write to one other in private; finish with {end}. "


def rounds_in_words(rounds: int) -> str:
    return "once" if rounds == 1 else f"{rounds} times"


def rules(board: Board, power: str, press: int, style: Style) -> str:
    """The first text that a player reads. `press`: rounds of messages before moves."""
    if style is Style.COMPACT:
        return f"you {power} years {board.years} solo {board.win_centres}\n"
    brief = style is Style.BRIEF
    said = (_BRIEF_PRESS if brief else _PRESS).format(rounds=rounds_in_words(press), end=END) if press else ""
    return (_BRIEF_RULES if brief else _RULES).format(
        power=power, count=len(board.powers), powers=", ".join(board.powers), win=board.win_centres, years=board.years,
        places=_PURE if board.map_name == "pure" else "", press=said,
    )  # fmt: skip


def phase_text(board: Board, style: Style) -> str:
    """The phase, and before moves the position."""
    season, year = SEASONS[board.phase[0]], board.year + 1
    kind = "" if board.kind is not Kind.RETREATS else " retreats"
    if style is Style.COMPACT:
        lines = [f"{season}{kind} {year}"]
    else:
        what = {Kind.MOVES: "moves", Kind.RETREATS: "retreats", Kind.ADJUSTMENTS: "builds and disbandments"}
        lines = [f"{season.capitalize()} of year {year} of {board.years}: {what[board.kind]}."]
    if board.kind is Kind.MOVES:
        units, owned = board.units(), board.owned()
        shown = [(power, units[power], owned[power]) for power in board.powers if units[power] or owned[power]]
        if style is Style.COMPACT:
            lines.append(" ".join(_power_in_compact(*each) for each in shown))
        else:
            lines += [f"{p}: {', '.join(u) or 'no unit'}; centres {', '.join(c) or 'none'}" for p, u, c in shown]
    return "".join(f"{line}\n" for line in lines)


def _power_in_compact(power: str, units: Sequence[str], centres: Sequence[str]) -> str:
    places = [f"~{unit[2:]}" if unit[0] == "F" else unit[2:] for unit in units]
    words = [power, *places]
    if {unit[2:5] for unit in units} != set(centres):
        words += [":", *centres]
    return " ".join(words)


def orders_text(board: Board, orders: Mapping[str, Sequence[str]], style: Style) -> str:
    """Says what everybody ordered in the phase just played, and how it ended."""
    if style is Style.COMPACT:
        words = [word for own in orders.values() for order in own for word in (in_compact(order), _fate(board, order))]
        return " ".join(filter(None, words)) + "\n" if words else ""
    lines = []
    for power, own in orders.items():
        if own:
            fates = [", ".join(board.results.get(" ".join(order.split()[:2]), ())) for order in own]
            shown = [f"{order} ({fate})" if fate else order for order, fate in zip(own, fates, strict=True)]
            lines.append(f"{power} ordered {', '.join(shown)}.\n")
    return "".join(lines)


def _fate(board: Board, order: str) -> str:
    found = board.results.get(" ".join(order.split()[:2]), ())
    return "dislodged" if "dislodged" in found else "fails" if set(found) - {"disband"} else ""


# Lines by style: what is asked, what was heard, what went wrong.
WORDING = {
    Style.NATURAL: {
        "order": "What does {} do?", "rest": "What do you support or convoy?", "BUILD": "What do you build?",
        "DISBAND": "Which unit do you disband?", "to": "To whom do you send a message?",
        "say": "What do you say to {}? Nobody else reads it.", "heard": "{} to you: {}", "silence": "{} to you: ...",
        "error": "Error: {}", "cut": "Note: Your message was cut to its first {} characters.",
        "over": "The game is over: {} Your centres: {}. Your score: {:.2f}.",
        "question": "What will {} order?",
    },
    Style.BRIEF: {
        "order": "{}?", "rest": "Of what?", "BUILD": "Build?", "DISBAND": "Disband?", "to": "Write to whom?",
        "say": "Your message to {}?", "heard": "{} to you: {}", "silence": "{} to you: ...", "error": "Error: {}",
        "cut": "Your message was cut to {} characters.", "over": "Over: {} Centres: {}. Score: {:.2f}.",
        "question": "What will {} order?",
    },
    Style.COMPACT: {
        "order": "{}?", "rest": "", "BUILD": "build?", "DISBAND": "disband?", "to": "to?",
        "say": "say {}:", "heard": "{}: {}", "silence": "{}: ...", "error": "error", "cut": "cut {}",
        "over": "over {}centres {}", "question": "{} will?",
    },
}  # fmt: skip


def wording(style: Style, name: str, *values: object) -> str:
    """A line of `WORDING`, with its line break; nothing where the style says nothing."""
    line = WORDING[style][name].format(*values)
    return f"{line}\n" if line else ""


def unit_text(unit: str, style: Style) -> str:
    return unit if style is not Style.COMPACT else f"~{unit[2:]}" if unit[0] == "F" else unit[2:]


def ending_text(board: Board, power: str, score: float, style: Style) -> str:
    centres = board.centres()[power]
    if style is Style.COMPACT:
        return wording(style, "over", f"solo {board.winner} " if board.winner else "", centres)
    how = f"{board.winner} wins alone." if board.winner else f"year {board.years} is over."
    return wording(style, "over", how, centres, score)
