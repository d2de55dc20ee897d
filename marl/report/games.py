"""The recorded games of a report: which are shown, and the commonest forms of messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from marl.metrics.among_us import template
from marl.report.runs import MEASURED, TRAINED, Run, arm_label, base_names
from marl.report.views import Transcript, View, game_view, is_among_us, mentions


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
    forms: list[Form]

    @property
    def messages(self) -> int:
        return sum(form.uses for form in self.forms)


def speakers(runs: Sequence[Run]) -> list[Speaker]:
    """The speakers of each run that recorded games, and once those of each base, bases first."""
    found: list[Speaker] = []
    bases = base_names(runs)
    for run in runs:
        for condition, player in MEASURED.items():
            name = arm_label(run, runs) if condition == TRAINED else bases.get((run.folder, condition))
            if name and (games := run.transcripts.get(condition)):
                found.append(Speaker(name, run.seed, len(games), forms(games, player)))
    return sorted(found, key=lambda speaker: not speaker.arm.startswith("base"))


def shown_games(runs: Sequence[Run], count: int = 4) -> list[View]:
    """The first games of each arm's first run, beside the base's if it played the same game."""
    firsts: dict[str, Run] = {}
    for run in runs:
        firsts.setdefault(arm_label(run, runs), run)
    each = max(1, count // len(firsts))
    shown = []
    for arm, run in firsts.items():
        evaluated = [games for name, games in run.transcripts.items() if name.startswith("iteration-")]
        trained = run.transcripts.get(TRAINED) or (evaluated[-1] if evaluated else [])
        if any(map(is_among_us, trained)):  # many games end without a word
            trained = [t for t in trained if any(turn["message"] for turn in t["turns"])] or trained
        base = {transcript["seed"]: transcript for transcript in run.transcripts.get("base", [])}
        for transcript in trained[:each]:
            shown.append(game_view(transcript, arm))
            if transcript["seed"] in base:
                shown.append(game_view(base[transcript["seed"]], "base"))
        planned = [games for name, games in run.transcripts.items() if name.startswith("planned-")]
        shown.extend(game_view(games[0], f"{arm}, in training, planned") for games in planned[-1:])
    return shown
