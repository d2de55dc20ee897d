"""Reads runs for a report: settings, curves, evaluations, transcripts; and names their arms and bases."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from marl.common.errors import UserError
from marl.common.files import fits, read_json
from marl.common.secrets import hidden
from marl.metrics.compute import PASSES, at_equal_compute, learned_tokens, token_passes
from marl.metrics.evaluation import conditions_from_json
from marl.metrics.stats import Interval, Metrics, seed_mean
from marl.metrics.tables import ArmRun
from marl.metrics.wording import ARM_ORDER, Panel, arm_name
from marl.report.transcripts import read_episodes
from marl.report.views import Transcript
from marl.storage.folder import read_run_card, read_settings
from marl.storage.tracking import METRICS_FILE, read_metrics

NUMBER = (int, float, type(None))
TRAINED = "trained"  # the condition of `evaluation.json` that a run's arm names
MEASURED = {"base": "untrained", TRAINED: TRAINED}  # condition -> measured player of its transcripts


@dataclass
class Run:
    """The contents of a run's folder."""

    folder: Path
    arm: str
    seed: int
    config: dict[str, Any]
    card: dict[str, Any]
    curves: list[dict[str, Any]]
    evaluation: dict[str, Any]
    transcripts: dict[str, list[Transcript]] = field(default_factory=dict)
    forms: dict[str, Any] = field(default_factory=dict)  # instead of transcripts, a `Speaker` for each condition

    @property
    def game(self) -> str:
        return str((self.config.get("env") or {}).get("game", ""))

    @property
    def games(self) -> int:
        """Training games of an iteration; 0 if the configuration does not say."""
        return int((self.config.get("algo") or {}).get("games") or 0)

    @property
    def conditions(self) -> dict[str, Metrics]:
        return conditions_from_json(self.evaluation) if self.evaluation else {}


def read(folder: Path) -> Run:
    """Reads a run's folder. UserError if a file in it is not as expected."""
    config, card = hidden(read_settings(folder)), read_run_card(folder) or {}
    evaluated = folder / "evaluation.json"
    evaluation = read_evaluation(evaluated) if os.path.lexists(evaluated) else {}
    seed = card.get("seed", config.get("seed", 0))
    if not isinstance(seed, int):
        raise UserError(f"{folder}: expected a whole number for its seed, got {seed!r}. Name another run.")
    curves = read_metrics(folder / METRICS_FILE)
    passes = token_passes(config, curves, learned_tokens(folder))
    for row in curves:
        if row["phase"] == "eval" and row["iteration"] in passes:
            row[PASSES] = passes[row["iteration"]]
    arm = str(card.get("arm") or config.get("arm") or folder.name)
    return Run(
        folder=folder,
        arm=arm_name(arm, (config.get("env") or {}).get("game", "")),
        seed=seed,
        config=config,
        card=card,
        curves=curves,
        evaluation=evaluation,
        transcripts={path.stem: read_episodes(path) for path in sorted((folder / "episodes").glob("*.jsonl"))},
    )


FIGURES = {...: {"mean": NUMBER, "low": NUMBER, "high": NUMBER, "n": (int, type(None))}}
EVALUATION = {
    "conditions": {...: FIGURES},
    "about?": dict,
    "belief_by_message?": {...: [FIGURES]},
    "by_game?": {...: {...: [NUMBER]}},
}


def read_evaluation(path: str | Path) -> dict[str, Any]:
    """Reads an `evaluation.json`. UserError if it does not hold figures by condition."""
    evaluation = read_json(path)
    if not fits(evaluation, EVALUATION):
        raise UserError(f"{path}: expected figures with mean, low, high and n by condition. Remove it.")
    return evaluation


def arm_runs(runs: Sequence[Run]) -> list[ArmRun]:
    """Converts all evaluations to arms: `trained` under the run's arm, others under `base_names`."""
    arms: dict[tuple[str, int], ArmRun] = {}
    same_games = len({measured_in(run) for run in runs}) == 1
    bases = base_names(runs)
    for run in runs:
        for condition, found in run.conditions.items():
            if condition == TRAINED:
                name = arm_label(run, runs)
                if (name, run.seed) in arms:
                    raise UserError(
                        f"{run.folder} repeats arm {name!r}, seed {run.seed}: give each run its own seed or arm"
                    )
            else:
                name = bases[run.folder, condition]
            if not name:
                continue
            games = run.evaluation.get("by_game", {}).get(condition, {}) if same_games else {}
            arms[(name, run.seed)] = ArmRun(name, run.seed, found, games)
    order = {name: i for i, name in enumerate(ARM_ORDER)}
    return sorted(arms.values(), key=lambda arm: (not arm.arm.startswith("base"), order.get(arm.arm, len(order))))


def base_names(runs: Sequence[Run]) -> dict[tuple[Path, str], str]:
    """Names of the runs' bases in tables, by folder and condition; empty if an earlier run has the same base in the
    same games: repeated, it would look like many seeds. Else the same base, or another base of the same seed, is named
    after its arm. Where there are bases of several models, all carry their model's name.
    """
    names: dict[tuple[Path, str], str] = {}
    known: dict[tuple[str, str], set[str]] = {}  # a model's games
    taken: set[tuple[str, int]] = set()
    several = len({base_model_of(run) for run in runs}) > 1
    for run in runs:
        figures = run.evaluation.get("conditions", {})
        heard = run.evaluation.get("belief_by_message", {})
        for condition in dict.fromkeys([*figures, *heard, *(each for each in MEASURED if each in run.transcripts)]):
            if condition == TRAINED:
                continue
            name = condition + (f", {base_model_of(run)}" if several else "") + _suffix(run, runs)
            games = measured_in(run)
            own = json.dumps(figures.get(condition), sort_keys=True)
            model = str(run.card.get("base_digest") or run.card.get("base") or own)
            before = known.setdefault((name, model), set())
            if games in before:
                name = ""
            elif before or (name, run.seed) in taken:
                name = f"{name} of {arm_label(run, runs)}"
            before.add(games)
            taken.add((name, run.seed))
            names[run.folder, condition] = name
    return names


def measured_in(run: Run) -> str:
    """Identifies the evaluation games and their players. Runs that differ in their seed alone have the same."""
    evaluation = settings_of_run(run.config.get("eval"))
    seats = {role: dict(settings_of_run(own)) for role, own in settings_of_run(run.config.get("cast")).items()}
    for own in seats.values():
        if own.pop("pool", 0):  # past selves play in training only
            own.pop("pick", None)
            own["partners"] = 0
    for role, changes in settings_of_run(evaluation.get("cast")).items():
        seats[role] = {**seats.get(role, {}), **settings_of_run(changes)}
    for own in seats.values():
        if not own.get("partners"):
            own.pop("partner", None)
    about = [run.evaluation.get("about"), run.config.get("env"), evaluation.get("env"), evaluation.get("temperature")]
    return re.sub(r"-s\d+-[0-9a-f]{8}", "", json.dumps([*about, seats], sort_keys=True, default=str))


def settings_of_run(group: Any) -> Mapping[str, Any]:
    """A group of a run's settings; empty if it is none."""
    return group if isinstance(group, Mapping) else {}


def arm_label(run: Run, runs: Sequence[Run]) -> str:
    """The arm's name on the page: `trained` if there is only one arm."""
    several = len({(other.arm, _suffix(other, runs)) for other in runs}) > 1
    return (run.arm if several else TRAINED) + _suffix(run, runs)


def _suffix(run: Run, runs: Sequence[Run]) -> str:
    """The run's game settings in which the runs differ, in parentheses."""
    variant = variant_of(run, runs)
    if not variant:
        return ""
    settings = {key: value for key, value in variant.items() if key != "game"}
    parts = [f"λ={value:g}" if key == "objective" else f"{key}={value}" for key, value in settings.items()]
    return f" ({', '.join([run.game, *parts])})"


# Settings of a game that may follow from the arm (ablation=mute) or from the model, and then make no variant.
OF_ARMS, OF_MODELS = ("press",), ("style", "format")
SMALL = "small"  # the model that is trained here from scratch


def base_model_of(run: Run) -> str:
    """The name of the model that a run's base is: `small`, or a pretrained model's."""
    model = run.config.get("model") or {}
    return Path(str(model["name"])).name if model.get("kind") == "hf" else SMALL


def model_of(run: Run) -> str:
    """The name of what learned: its base's, with a note where all weights of a pretrained model did."""
    name = base_model_of(run)
    return name if name == SMALL or run.config["model"].get("lora") else f"{name}, all weights"


def by_model(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by what learned, the small model first."""
    names = sorted({model_of(run) for run in runs}, key=lambda name: (name != SMALL, name))
    return {name: [run for run in runs if model_of(run) == name] for name in names}


def variant_of(run: Run, runs: Sequence[Run]) -> dict[str, Any]:
    """The run's game settings in which any of these runs differ; of different games, the objective alone."""
    games: list[dict[str, Any]] = [each.config.get("env") or {} for each in runs]
    keys = list(dict.fromkeys(key for game in games for key in game))
    differing = [k for k in keys if any(game.get(k) != games[0].get(k) for game in games)]
    for names, owners in ((OF_ARMS, [each.arm for each in runs]), (OF_MODELS, [model_of(each) for each in runs])):
        for key in names:
            values = {(owner, json.dumps(game.get(key))) for owner, game in zip(owners, games, strict=True)}
            if key in differing and len(values) == len(set(owners)):  # each arm, or each model, has one
                differing.remove(key)
    own = run.config.get("env") or {}
    return {key: own[key] for key in (("game", "objective") if "game" in differing else differing) if key in own}


def equal_compute(runs: Sequence[Run], share: float = 1.0) -> list[ArmRun]:
    """Applies `at_equal_compute` to these runs; empty for a single arm."""
    keys = [(arm_label(run, runs), run.seed) for run in runs]
    if len({arm for arm, _ in keys}) < 2:
        return []
    played = [int((run.config.get("eval") or {}).get("games") or 0) for run in runs]
    return at_equal_compute(
        {key: run.curves for key, run in zip(keys, runs, strict=True)},
        {key: (run.games, games) for key, run, games in zip(keys, runs, played, strict=True)},
        share,
    )


def by_games(runs: Sequence[Run]) -> bool:
    """Tells whether curves can be drawn over training games, rather than over iterations."""
    return all(run.games for run in runs)


def curve_of(run: Run, panel: Panel, phase: str, scale: bool) -> dict[int, float]:
    """Training games (or iterations without `scale`) -> value."""
    return {
        int(row["iteration"]) * (run.games if scale else 1): panel.sign * float(row[panel.metric])
        for row in run.curves
        if row.get("phase") == phase and panel.metric in row
    }


def mean_curve(curves: Sequence[dict[int, float]]) -> tuple[list[int], list[Interval]]:
    """Mean over seeds with its interval, at the points that all seeds reached."""
    shared = sorted(set.intersection(*(set(curve) for curve in curves)))
    return shared, [seed_mean([curve[x] for curve in curves]) for x in shared]


def smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving mean over a twentieth of the curve; windows shrink at the ends."""
    half = len(values) // 40
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])
