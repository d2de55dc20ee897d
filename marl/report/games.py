"""The recorded games of a report: which are shown, and the commonest forms of messages."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from marl.metrics.among_us import template
from marl.metrics.wording import ARM_ORDER
from marl.report.diplomacy import shown_view
from marl.report.runs import MEASURED, TRAINED, Run, arm_label, base_names
from marl.report.views import Transcript, View, is_among_us, learned, mentions, outcome_text, printable, turn_text

MESSAGE_COLUMNS = ("game", "outcome", "step", "speaker", "role", "player", "says", "belief before", "belief after",
                   "belief moved", "reward")  # fmt: skip


def message_rows(transcript: Transcript) -> list[tuple[Any, ...]]:
    """A row of MESSAGE_COLUMNS for each spoken turn. Beliefs are the listeners' mean in the truth; None if none was
    asked before and after. `belief moved` is their sum, as credit counts it."""
    names = transcript["facts"]["names"] if is_among_us(transcript) else {}
    rows = []
    for turn in transcript["turns"]:
        if turn["kind"] != "SPEAK":
            continue
        found, agent = learned(transcript, turn), turn["agent"]
        before, after = (sum(getattr(s, end) for s in found) for end in ("before", "after"))
        beliefs = (
            [round(x, 4) for x in (before / len(found), after / len(found), after - before)] if found else [None] * 3
        )
        who = (names.get(agent, agent), turn["role"], transcript["players"][agent])
        reward = round(sum(turn["rewards"].values()), 4)
        game = (str(transcript["seed"]), outcome_text(transcript), turn["step"])  # W&B rounds large numbers
        rows.append((*game, *who, printable(turn_text(turn)), *beliefs, reward))
    return rows


@dataclass(frozen=True)
class Form:
    """A form of messages (`among_us.template`): how many have it, name a player, name an imposter (dead or alive)."""

    text: str
    uses: int
    naming: int
    naming_imposter: int


def forms(transcripts: Iterable[Transcript], player: str) -> list[Form]:
    """The forms of a player's messages, the commonest first. `player`: a name of `transcript["players"]`."""
    found: dict[str, list[tuple[bool, bool]]] = {}
    for transcript in transcripts:
        names = transcript["facts"]["names"] if is_among_us(transcript) else {}
        imposters = {names[agent] for agent in transcript["facts"]["imposters"]} if names else set()
        for turn in transcript["turns"]:
            if turn["message"] and transcript["players"][turn["agent"]] == player:
                named = {name for _, name in mentions(turn["message"]) if name in names.values()}
                found.setdefault(template(turn["message"]), []).append((bool(named), bool(named & imposters)))
    counted = [Form(text, len(uses), *map(sum, zip(*uses, strict=True))) for text, uses in found.items()]
    return sorted(counted, key=lambda form: -form.uses)


@dataclass(frozen=True)
class Speaker:
    """The forms of the measured players' messages in one condition's recorded games, the commonest first."""

    arm: str
    seed: int
    games: int
    messages: int
    forms: list[Form]


def speakers(runs: Sequence[Run]) -> list[Speaker]:
    """The speakers of each run that recorded games, and once those of each base, bases first."""
    found: list[Speaker] = []
    bases = base_names(runs)
    for run in runs:
        for condition, player in MEASURED.items():
            name = arm_label(run, runs) if condition == TRAINED else bases.get((run.folder, condition))
            if name and (games := run.transcripts.get(condition)):
                own = forms(games, player)
                found.append(Speaker(name, run.seed, len(games), sum(form.uses for form in own), own))
            elif name and condition in run.forms:
                found.append(replace(run.forms[condition], arm=name))
    return sorted(found, key=lambda speaker: not speaker.arm.startswith("base"))


def shown_games(runs: Sequence[Run], most: int = 24) -> list[list[View]]:
    """The first games of the arms' first runs, at most so many plays; each game as played by the bases and the arms.

    Games of Among Us without a word are left out. At the end: each arm's last planned game of training.
    """
    firsts: dict[str, Run] = {}
    for run in runs:
        firsts.setdefault(arm_label(run, runs), run)
    bases = base_names(runs)
    plays: dict[str, dict[str, Transcript]] = {}  # by player, then by what the game is
    planned = []
    for arm, run in firsts.items():
        if base := bases.get((run.folder, "base")):
            plays.setdefault(base, {game_of(t): t for t in run.transcripts.get("base", [])})
        evaluated = [games for name, games in run.transcripts.items() if name.startswith("iteration-")]
        played = run.transcripts.get(TRAINED) or (evaluated[-1] if evaluated else [])
        plays[arm] = {game_of(t): t for t in played}
        in_training = [games for name, games in run.transcripts.items() if name.startswith("planned-")]
        planned += [[shown_view(games[0], f"{arm}, in training, planned")] for games in in_training[-1:]]
    order = sorted(plays, key=lambda name: (name in firsts, ARM_ORDER.index(name) if name in ARM_ORDER else len(plays)))
    shown: list[list[View]] = []
    for game in dict.fromkeys(game for arm in firsts for game in plays[arm]):
        found = {name: own[game] for name in order if game in (own := plays[name])}
        silent = not any(turn["message"] for transcript in found.values() for turn in transcript["turns"])
        if not (silent and all(map(is_among_us, found.values()))):
            shown.append([shown_view(transcript, name) for name, transcript in found.items()])
        if len(shown) == max(2, most // len(plays)):
            break
    return shown + planned


def game_of(transcript: Transcript) -> str:
    """Identifies a game: its seed and what was drawn. It may be the same with and without talk."""
    drawn = {name: value for name, value in transcript["facts"].items() if name != "rounds"}
    return json.dumps([transcript["seed"], drawn], sort_keys=True)
