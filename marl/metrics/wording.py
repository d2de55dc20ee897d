"""Names and order of metrics, arms and endings in tables and reports. Labels of metrics are in wording.csv."""

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path


def number(value: float) -> str:
    """Three decimals below 10, then fewer: `0.879`, `12.13`, `498.0`, `2745`; a dash for nan."""
    if not math.isfinite(value):
        return "–"
    decimals = 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0
    text = f"{value:.{decimals}f}"
    return text.lstrip("-") if float(text) == 0 else text


@dataclass(frozen=True)
class Wording:
    """The format of a metric: a percentage, fixed `decimals`, or (None) as many as `number` gives."""

    label: str
    note: str
    percent: bool = False
    decimals: int | None = None
    shown: tuple[str, ...] = ()

    def show(self, value: float) -> str:
        if self.percent:
            return f"{100 * value:.1f} %"
        return number(value) if self.decimals is None else f"{value:.{self.decimals}f}"


def _read_wording() -> dict[str, Wording]:
    """The lines of wording.csv. `format` is `%`, a number of decimals, or empty; `shown`: see `shown_in`."""
    with Path(__file__).with_name("wording.csv").open(encoding="utf-8", newline="") as file:
        return {
            row["metric"]: Wording(
                row["label"],
                row["note"],
                percent=row["format"] == "%",
                decimals=int(row["format"]) if row["format"].isdigit() else None,
                shown=tuple(row["shown"].split()),
            )
            for row in csv.DictReader(file)
        }


WORDING = _read_wording()  # in the order of the full table

BY_PLAYER = ("game/score", "game/solo", "game/centres")  # of each player of a game for many, by its name

COUNTED = (  # metrics that are never below 0
    "errors/", "talk/", "trained", "passes", "game/meetings", "game/reports", "game/tasks_done", "game/steps",
    "game/decisions", "game/points", "game/joint",
)  # fmt: skip

P_VALUES = ("talk/password_p", "talk/password_heard_p")

SIGNED = (  # those of talk that may be: a listener may know less than nothing, a message may mislead
    "talk/said", "talk/heard", "talk/share_heard", "talk/credit/", "talk/vote_credit/", "talk/claim/",
)  # fmt: skip


def wording(metric: str) -> Wording:
    """The label of a metric. Metrics of a user's own term or game are called by the name that it has there."""
    group, _, name = metric.rpartition("/")
    by_group = {
        "game/how": Wording(f"Ends: {name}", "share of all games", percent=True),
        "game/win_rate": Wording(f"Won by {name}", "share of all games", percent=True),
        "reward": Wording(f"Reward: {name}", "a turn (paid to messages: a message), unweighted"),
        "talk/said": Wording(f"Said after {name}", "messages, nats"),
        "talk/heard": Wording(f"Heard after {name}", "messages, nats"),
        "loss": Wording(f"Loss: {name}", "unweighted, in the last training iteration"),
    }
    for known in BY_PLAYER:
        if metric.startswith(f"{known}/"):
            return replace(WORDING[known], label=f"{WORDING[known].label} of {metric.removeprefix(f'{known}/')}")
    return WORDING.get(metric) or by_group.get(group) or Wording(metric, "")


def shown_in(place: str) -> list[str]:
    """The metrics of a game's published table (`dond`, `among_us`), or of the last `screen` of a run."""
    return [metric for metric, words in WORDING.items() if place in words.shown]


def of_ones_own(metrics: Iterable[str]) -> list[str]:
    """Selects the metrics that wording.csv lacks: those of a user's own terms and games."""
    groups = ("game/how/", "game/win_rate/", "reward/", "loss/")
    return [name for name in dict.fromkeys(metrics) if name.startswith(groups) and name not in WORDING]


def headline(game: str, metrics: Iterable[str]) -> list[str]:
    """Selects the metrics of a game's first table. A user's own terms come last."""
    found = list(dict.fromkeys(metrics))
    known = [name for name in HEADLINE.get(game, HEADLINE_OF_OTHERS) if name in found]
    return [*known, *of_ones_own(found)]


def bounds(metric: str) -> tuple[float, float]:
    """The least and the greatest possible mean of a metric; infinite where there is no limit."""
    if metric.startswith(SIGNED):
        return -math.inf, math.inf
    known = metric
    while known not in WORDING and "/" in known:  # press/kept/scripted: press/kept among others
        known = known.rpartition("/")[0]
    if wording(metric).percent or wording(known).percent or metric in P_VALUES:
        return 0.0, 1.0
    if metric.endswith("brier"):
        return 0.0, 2.0
    return (0.0 if metric.startswith(COUNTED) or metric.endswith("log_loss") else -math.inf), math.inf


# Rows of a game's first table; the others follow in the full one.
HEADLINE = {
    "dond": (
        "game/score", "game/score_ceiling", "game/agreement", "game/pareto", "game/pareto_agreed",
        "belief/gain_over_prior", "belief/last_log_loss", "belief/prior_log_loss", "belief/last_accuracy",
        "speech/belief_change", "talk/turns", "talk/vocabulary", "errors/per_turn",
    ),
    "among_us": (
        "game/win_rate/crewmates", "vote/imposter", "vote/chance", "vote/witness", "vote/other_imposter", "vote/skip",
        "belief/accuracy", "belief/last_accuracy", "belief/chance_accuracy", "belief/last_log_loss",
        "belief/gain_over_start", "speech/pull", "speech/belief_change",
        "speech/belief_change/names_imposter", "speech/belief_change/names_other",
        "talk/names", "talk/names_imposter", "talk/naming_true", "talk/naming_chance", "talk/forms", "game/meetings",
    ),
    "diplomacy": (
        "game/score", "game/centres", "game/solo", "belief/accuracy", "belief/chance_accuracy", "belief/first_log_loss",
        "belief/last_log_loss", "belief/chance_log_loss", "speech/belief_change", "press/said", "press/kept",
        "press/heard", "press/granted", "press/unasked", "game/messages", "talk/vocabulary", "errors/per_turn",
    ),
}  # fmt: skip

HEADLINE_OF_OTHERS = (
    "game/score", "belief/accuracy", "belief/chance_accuracy", "belief/last_log_loss", "speech/belief_change",
    "talk/turns", "errors/per_turn", "errors/aborted",
)  # fmt: skip

# Published names of arms in Among Us, and Diplomacy's, by preset of `ablation` (Sarkar et al. 2025: RL, Listening,
# Speaking). Mute: RL where nobody may speak.
ARMS = {
    "listening_only": "L", "game_only": "RL", "no_listening": "RL+S", "no_speaking": "RL+L", "full": "RL+L+S",
    "mute": "mute",
}  # fmt: skip
MUTE = ARMS["mute"]


PUBLISHED = ("among_us", "diplomacy")  # games whose arms have these names


def arm_name(arm: str, game: str) -> str:
    """The name of an arm in tables of this game."""
    return ARMS.get(arm, arm) if game in PUBLISHED else arm


ARM_ORDER = ("base", *ARMS.values())  # arms of other names follow
# Pairs (arm, reference): what each term adds, alone and to the others.
COMPARISONS = (
    ("RL+L+S", "RL"), ("RL+L+S", "RL+L"), ("RL+L+S", "RL+S"), ("RL+L", "RL"), ("RL+S", "RL"), ("RL+L+S", "L"),
    ("RL", "mute"), ("RL+L+S", "mute"), ("mute", "base of mute"),
    ("RL+L+S", "base"), ("RL+L", "base"), ("RL+S", "base"), ("RL", "base"), ("L", "base"),
    # the speaking reward alone makes the difference, with and without the game's advantage in messages
    ("game_beside", "RL+L"), ("RL+L+S", "listening_unsaid"),
    # what the game's advantage does to messages, without the speaking reward
    ("RL+L", "listening_unsaid"),
    # normalising the speaking reward, and where it goes
    ("game_beside", "raw_credit"), ("raw_credit", "common_raw_credit"),
)  # fmt: skip
REFERENCES = ("game_only", "ppo", "filtered_bc")  # of Deal or No Deal


def pairs_of(trained: Iterable[str], game: str) -> list[tuple[str, str]]:
    """The pairs (arm, reference) to compare. Without any of the game's usual references, the first arm is the one."""
    names = list(dict.fromkeys(trained))
    if game in PUBLISHED:
        usual: tuple[str, ...] = (ARMS["full"], ARMS["game_only"])
        others = [name for name in names if name not in ARM_ORDER]
        more = [(name, reference) for reference in usual for name in others]
        known = [*COMPARISONS, *more]
    else:
        usual = REFERENCES
        known = [(name, reference) for reference in usual for name in names if name != reference]
    if not any(reference in names for reference in usual):
        known += [(name, names[0]) for name in names[1:]]
    return list(dict.fromkeys(known))


# Endings of Among Us and their labels, the crewmates' first.
ENDS = {
    "ejection": "crewmates win by vote",
    "tasks": "crewmates win by tasks",
    "time": "time runs out",
    "parity": "imposters win",
}


@dataclass(frozen=True)
class Panel:
    """A small plot over training. `sign` -1 turns a loss that is minus a quantity back into it."""

    metric: str
    title: str
    unit: str
    sign: float = 1.0
    ceiling: str = ""  # evaluation metric of the best possible value
    chance: str = ""  # evaluation metric of the value by chance


PANELS = (
    Panel("game/win_rate/crewmates", "Crewmates' wins", "share of games"),
    Panel("vote/imposter", "Votes for the imposter", "share of crewmates' votes", chance="vote/chance"),
    Panel("talk/names_imposter", "Messages naming the imposter", "share of crewmates' messages"),
    Panel("game/score", "Score", "points per player", ceiling="game/score_ceiling"),
    Panel("game/agreement", "Agreement", "share of games"),
    Panel("game/pareto", "Pareto-optimal", "share of all games"),
    Panel("loss/listening", "Listening loss", "nats a question"),
    Panel("loss/plan", "Loss toward the plan", "nats a token"),
    Panel("belief/accuracy", "Belief accuracy", "share of answers", chance="belief/chance_accuracy"),
    Panel("reward/speaking", "Speaking reward", "change of belief a message"),
    Panel("loss/entropy", "Entropy", "nats a token", sign=-1.0),
    Panel("loss/kl", "KL to the base", "nats a token"),
    Panel("talk/turns", "Turns", "a game"),
    Panel("errors/per_turn", "Refused replies", "per turn"),
)
