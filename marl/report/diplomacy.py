"""Recorded games of Diplomacy, phase by phase: positions, private messages, orders, and the board as a picture.

A transcript holds what was said and chosen; here the game is played again from it. That needs the package `diplomacy`
(an extra). Without it, or where a transcript doesn't lead to its own end, there are no phases, and pages show the
turns alone.
"""

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from envs.core import Style
from envs.diplomacy.board import MAX_YEARS, Board, Position
from envs.diplomacy.texts import NOBODY
from envs.diplomacy_v0 import parallel_env
from marl.common.files import FAULTS
from marl.report.views import Transcript, View, game_view

MOST_ROUNDS = 3  # of messages in a phase that are tried where an older transcript doesn't say how many there were
SEASONS = {"S": "Spring", "F": "Fall", "W": "Winter"}
KINDS = {"M": "moves", "R": "retreats", "A": "adjustments"}
COLOURS = {
    "AUSTRIA": "red", "ENGLAND": "mediumpurple", "FRANCE": "deepskyblue", "GERMANY": "dimgray", "ITALY": "olive",
    "RUSSIA": "white", "TURKEY": "gold",
}  # fmt: skip  # as the board draws them


@dataclass
class Phase:
    """A phase as it was played. By power; `position` is None where nobody had a choice."""

    name: str  # e.g. S1901M
    position: Position | None = None
    units: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    centres: Mapping[str, int] = field(default_factory=dict)
    turns: list[int] = field(default_factory=list)  # indices of the transcript's turns
    addressees: dict[int, str] = field(default_factory=dict)  # of the turns that were messages
    silent: list[str] = field(default_factory=list)  # who wrote to nobody
    orders: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # each with what became of it

    @property
    def title(self) -> str:
        season, year, kind = self.name[0], self.name[1:-1], self.name[-1]
        return f"{SEASONS.get(season, season)} {year}, {KINDS.get(kind, kind)}"


def phases_of(transcript: Transcript) -> list[Phase]:
    """The phases, the last one being the position at the end; none if the game cannot be played again."""
    if not {"map_name", "powers"} <= transcript.get("facts", {}).keys():
        return []
    compact = dict.fromkeys(transcript["players"], Style.COMPACT)
    known = transcript["facts"].get("rounds")
    for rounds in (max(1, known),) if isinstance(known, int) else range(1, MOST_ROUNDS + 1):
        try:
            phases, refused = _replay(transcript, compact, rounds)
            if refused:  # players who read natural words choose in them
                phases, refused = _replay(transcript, compact | dict.fromkeys(refused, Style.NATURAL), rounds)
        except (ImportError, *FAULTS):  # without the package, or damaged
            return []
        if phases and not refused:
            return phases
    return []


def _replay(transcript: Transcript, styles: Mapping[str, Style], rounds: int) -> tuple[list[Phase], list[str]]:
    """Plays the turns again. Also returns agents whose replies were refused here and not there; no phases if the end
    is another one."""
    facts, outcome, turns = transcript["facts"], transcript["outcome"], transcript["turns"]
    talks = facts.get("rounds") or any(turn["kind"] == "SPEAK" or turn["text"].strip() == NOBODY for turn in turns)
    years = max(1, int(outcome["year"]))
    env = parallel_env(
        map_name=facts["map_name"], years=years, press="private" if talks else "none", rounds=rounds, questions=0
    )
    powers = facts["powers"]
    options = {"powers": [powers[agent] for agent in env.possible_agents], "styles": dict(styles)}
    env.reset(seed=transcript["seed"], options=options)
    board = env.board
    phases: list[Phase] = []
    refused: set[str] = set()
    by_step: dict[int, list[int]] = {}
    for number, turn in enumerate(turns):
        by_step.setdefault(turn["step"], []).append(number)
    addressee: dict[str, str] = {}
    for step in range(transcript["steps"]):
        if not phases or phases[-1].name != board.phase:
            phases.append(Phase(board.phase, board.state(), board.units(), board.centres()))
        here, lines_before = phases[-1], len(env.transcript)
        acts = {turns[number]["agent"]: turns[number]["text"] for number in by_step.get(step, ())}
        _, _, _, _, infos = env.step(acts)
        for number in by_step.get(step, ()):
            turn = turns[number]
            agent = turn["agent"]
            if agent not in infos or bool(infos[agent]["error"]) != bool(turn["error"]):
                refused.add(agent)
                continue
            entry, reply = infos[agent]["entry"], turn["text"].strip()
            if entry == "address":
                addressee[agent] = reply
                if reply not in powers.values() or turn["error"]:
                    here.silent.append(powers[agent])
            elif entry == "message":
                here.addressees[number] = addressee[agent]
            here.turns.append(number)
        played = [line for line in env.transcript[lines_before:] if " to " not in line.partition(":")[0]]
        for line in played:
            head, _, orders = line.partition(": ")
            name, _, power = head.partition(" ")
            if name != phases[-1].name:  # nobody had a choice in it
                phases.append(Phase(name))
            last = name == played[-1].split()[0]  # what became of orders is known of the phase played last
            given = orders.split(", ")
            phases[-1].orders[power] = [(order, _fate(board, order) if last else "") for order in given]
        if not env.agents:
            break
    phases.append(Phase(board.phase, board.state(), board.units(), board.centres()))
    centres = {agent: board.centres()[power] for agent, power in powers.items()}
    return (phases if centres == outcome["centres"] else []), sorted(refused)


def _fate(board: Board, order: str) -> str:
    return ", ".join(board.results.get(" ".join(order.split()[:2]), ()))


def shown_view(transcript: Transcript, condition: str = "") -> View:
    """Returns `views.game_view`, and for a game of Diplomacy its phases, with a picture of the board at the end."""
    view = game_view(transcript, condition)
    if not (phases := phases_of(transcript)):
        return view
    shown = phase_views(transcript, view["turns"], phases)
    svg = base64.b64encode(picture(phases[-1]).encode()).decode()
    shown[-1]["picture"] = f"data:image/svg+xml;base64,{svg}"  # an address that holds it, for a page of one file
    return {**view, "phases": shown, "colours": COLOURS}


def phase_views(transcript: Transcript, turns: list[View], phases: list[Phase]) -> list[View]:
    """The phases for the template. `turns`: those of `views.game_view`."""
    if not phases:
        return []
    powers, players = transcript["facts"]["powers"], transcript["players"]
    holder = {power: players[agent] for agent, power in powers.items()}
    found = []
    for number, phase in enumerate(phases):
        views = [{**turns[n], "number": n + 1, "power": powers[turns[n]["agent"]]} for n in phase.turns]
        for view in views:
            view["to"] = phase.addressees.get(view["number"] - 1, "")
            view["moved"] = [{**each, "listener": powers[each["listener"]]} for each in view["moved"]]
        found.append(
            {
                "number": number,
                "title": phase.title if number < len(phases) - 1 else "The end",
                "board": phase.position is not None,
                "picture": "",
                "rows": [
                    {"power": power, "player": holder[power], "units": phase.units[power], "centres": n}
                    for power, n in phase.centres.items()
                ],
                "messages": [
                    view | {"text": view["text"] if view["kind"] == "message" else ""} for view in views if view["to"]
                ],
                "silent": phase.silent,
                "orders": phase.orders,
                "choices": [v for v in views if not v["to"] and (v["error"] or v["plan"] or v["considered"])],
            }
        )
    return found


def picture(phase: Phase) -> str:
    """The board at the beginning of a phase that has a position, as SVG."""
    assert phase.position is not None, phase.name
    board = Board(phase.position.map_name, MAX_YEARS)
    board.restore(phase.position)
    return re.sub(r">\s+<", "><", re.sub(r"<!--.*?-->", "", board.svg(), flags=re.S))
