"""Sentences of a report: setting, findings, comparisons of arms."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from marl.metrics.compute import GAMES, PASSES
from marl.metrics.stats import Interval, Metrics, independent_difference
from marl.metrics.tables import ArmRun, TableRow, arm_differences
from marl.metrics.wording import ENDS, headline, number, of_ones_own, pairs_of, wording
from marl.report.runs import Run, arm_label, by_model, equal_compute, model_of, settings_of_run
from marl.report.tables import columns_of, table_cell
from marl.storage.folder import flat, unlike


def mixed(runs: Sequence[Run]) -> list[str]:
    """A sentence for each difference beside the arms: settings of one arm's seeds, bases of one seed, commits."""
    sentences = []
    of_arm: dict[str, list[Run]] = {}
    for run in runs:
        of_arm.setdefault(arm_label(run, runs), []).append(run)
    for first, *others in of_arm.values():
        for key in dict.fromkeys(key for other in others for key in unlike(first.config, other.config)):
            values = dict.fromkeys(str(flat(run.config).get(key)) for run in (first, *others))
            sentences.append(f"Seeds of {first.arm} differ in {key} as well ({', '.join(values)}).")
    bases: dict[int, dict[str, list[str]]] = {}
    commits: dict[str, None] = {}
    for run in runs:
        if base := run.card.get("base_digest"):
            bases.setdefault(run.seed, {}).setdefault(str(base), []).append(run.arm)
        if commit := run.card.get("git_commit"):
            commits |= dict.fromkeys(str(commit).split(", "))
    for seed, found in sorted(bases.items()):
        if len(found) > 1:
            arms = "; ".join(f"{', '.join(dict.fromkeys(names))} from {base}" for base, names in found.items())
            sentences.append(
                f"Runs of seed {seed} start from different bases ({arms}), so that they differ in these as well."
            )
    if len(commits) > 1:
        sentences.append(f"The runs are of {len(commits)} commits: {', '.join(commits)}.")
    return sentences


TERMS = {"RL": "the game's reward", "L": "listening", "S": "speaking"}  # in names of arms


def what_was_run(runs: Sequence[Run]) -> list[str]:
    """Sentences on the game, the learner and the evaluation, from the configurations."""
    first = runs[0].config
    env, algo, model = (first.get(part) or {} for part in ("env", "algo", "model"))
    sentences = []
    if env.get("game") == "dond":
        objectives = sorted({float((run.config.get("env") or {}).get("objective", 0)) for run in runs}, reverse=True)
        kinds = {1.0: "cooperative", 0.0: "semi-competitive", -1.0: "strictly competitive"}
        which = " and ".join(f"{kinds.get(value, 'mixed')} (λ = {value:g})" for value in objectives)
        sentences.append(
            f"Deal or No Deal, {which}: two players share books, hats and balls, each knows only its own values, "
            "they talk, and each then claims items. Claims that fit pay a player its points plus λ times its "
            "partner's; claims that do not pay nothing."
        )
        if env.get("questions") == "claims":
            sentences.append("Between messages each is asked what the other will claim.")
    elif env.get("game") == "among_us":
        sentences += [*among_us_sentences(first), *who_plays(first)]
    elif env.get("game") == "diplomacy":
        sentences += [*diplomacy_sentences(runs), *who_plays(first)]
    elif env.get("game"):
        sentences.append(f"The game is {env['game']}.")
    arms = list(dict.fromkeys(run.arm for run in runs))
    seeds = sorted({run.seed for run in runs})
    count = "One run" if len(runs) == 1 else f"{len(runs)} runs"
    of = f" of {len(arms)} arms ({', '.join(arms)})" if len(arms) > 1 else ""
    sentences.append(f"{count}{of}, {'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}.")
    parts = {part for arm in arms if arm != "base" for part in arm.split("+")}
    if parts and parts <= TERMS.keys():
        sentences.append(", ".join(f"{name} is {what}" for name, what in TERMS.items() if name in parts) + ".")
    if algo.get("kind"):
        learner = {"ppo": "PPO", "filtered_bc": "filtered behaviour cloning"}.get(algo["kind"], algo["kind"])
        what = f"Learned by {learner}"
        if algo.get("iterations") and algo.get("games"):
            times = f"{algo['iterations']} iteration{'s' * (algo['iterations'] != 1)}"
            what += f": {times} of {algo['games']} games"
        name = model.get("name") or ""
        kind = (
            "a model trained here from scratch" if model.get("kind") == "tiny" else f"the language model {name}".strip()
        )
        sentences.append(f"{what}, with {kind}.")
    sentences += weight_sentences(runs)
    about = runs[0].evaluation.get("about", {})
    if about.get("games"):
        sentences.append(f"Evaluated on {about['games']} games a condition, the same games for each.")
    return sentences


def weights_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The weight of each term of a run: `listening loss` -> `0.3`."""
    return {
        f"{name} {group}": f"{weight:g}" if isinstance(weight := term.get("weight"), int | float) else "its default"
        for group in ("loss", "reward")
        for name, term in settings_of_run(config.get(group)).items()
        if isinstance(term, Mapping)
    }


def weight_sentences(runs: Sequence[Run]) -> list[str]:
    """The weights of a single arm, or those in which several arms differ."""
    by_arm = {run.arm: weights_of(run.config) for run in runs}
    names = list(dict.fromkeys(name for weights in by_arm.values() for name in weights))
    several = len(by_arm) > 1
    if several:
        names = [name for name in names if len({weights.get(name) for weights in by_arm.values()}) > 1]
    entries = []
    for arm, weights in by_arm.items():
        each = ", ".join(f"{name} {weights.get(name, 'absent')}" for name in names)
        entries.append(f"{arm}: {each}" if several else each)
    return [f"Weights{' in which arms differ' if several else ''}: {'; '.join(entries)}."] if names else []


def among_us_sentences(config: Mapping[str, Any]) -> list[str]:
    """The game as evaluated."""
    env = {**config["env"], **((config.get("eval") or {}).get("env") or {})}
    imposters = "one is an imposter" if env["imposters"] == 1 else f"{env['imposters']} are imposters"
    shaping = f" Deeds earn {env['shaping']:g} beside the win." if env.get("shaping") else ""
    layouts = env.get("layouts") or [(env["width"], env["height"])]  # each episode draws one
    rooms = " or ".join(f"{width} by {height}" for width, height in layouts)
    tasks = " to ".join(map(str, env.get("tasks_range") or [env["tasks"]]))
    return [
        f"Grid Among Us, {rooms} rooms, {env['players']} players of whom {imposters}. "
        f"Crewmates win when nobody left is an imposter or all of their {tasks} tasks each are done; imposters "
        f"win when they are as many. A body that is found is talked over, and all vote.{shaping}"
    ]


def diplomacy_sentences(runs: Sequence[Run]) -> list[str]:
    """The game as trained, and who may speak in it."""
    env = runs[0].config["env"]
    talk = {str((run.config.get("env") or {}).get("press")): run.arm for run in reversed(runs)}
    years = "a year" if env["years"] == 1 else f"{env['years']} years"
    sentences = [
        f"Diplomacy on the map {env['map_name']}, for {years}: all order their units at the same time. A power's score "
        "is the square of its centres over the sum of everybody's, or 1 if it wins alone."
    ]
    if "private" in talk:
        others = f", except in {talk['none']}" if "none" in talk else ""
        sentences.append(f"Before they move, each may write to one other, which nobody else reads{others}.")
    return sentences


def who_plays(config: Mapping[str, Any]) -> list[str]:
    """A sentence on who holds which seats, as evaluated."""
    changes = (config.get("eval") or {}).get("cast") or {}
    today = {  # past selves play in training only
        role: {**seats, "partners": 0.0} if seats.get("pool") else seats
        for role, seats in (config.get("cast") or {}).items()
    }
    cast = {role: {**seats, **changes.get(role, {})} for role, seats in today.items()}
    who = []
    for role, seats in cast.items():
        partner = f", {seats['partners']:g} of them {Path(seats['partner']).name}" if seats.get("partners") else ""
        who.append(f"{role}s are {seats['player']}{partner}")
    return [f"Who plays: {'; '.join(who)}."] if who else []


def findings(columns: Mapping[str, Metrics]) -> list[str]:
    """The table's main findings, as far as the intervals allow."""
    said_so: list[str] = []
    for metric in ("game/win_rate/crewmates", "vote/imposter", "game/score", "game/agreement"):
        words = wording(metric)
        found = {name: metrics[metric] for name, metrics in columns.items() if metric in metrics}
        if not found:
            continue
        cells = {name: table_cell(interval, words) for name, interval in found.items()}
        parts = [f"{n} {c['mean']} ({c['range']})" if c["range"] else f"{n} {c['mean']}" for n, c in cells.items()]
        sentence = f"{words.label}: {', '.join(parts)}"
        ceilings = {number(m["game/score_ceiling"].mean) for m in columns.values() if "game/score_ceiling" in m}
        if metric == "game/score" and len(ceilings) == 1:
            sentence += f"; {ceilings.pop()} is the best that these games allow"
        if len(found) == 2 and all(cell["range"] for cell in cells.values()):  # a single game has no interval
            before, after = found.values()
            if after.low > before.high:
                sentence += ". The intervals are apart: it rose"
            elif after.high < before.low:
                sentence += ". The intervals are apart: it fell"
            else:
                sentence += ". The intervals overlap"
        said_so.append(sentence + ".")
    for name, metrics in columns.items():
        gain = metrics.get("belief/gain_over_prior")
        if gain is None or not math.isfinite(gain.low):
            continue
        verdict = "cannot be told from the exact prior"
        if gain.low > 0:
            verdict = "beats what the rules alone tell"
        elif gain.high < 0:
            verdict = "is worse than the exact prior"
        amount = f"gain {number(gain.mean)} nats a question, {number(gain.low)} to {number(gain.high)}"
        said_so.append(f"Listening, {name}: after the last message the belief {verdict} ({amount}).")
    return said_so


COMPARED = {  # game -> metric, label, verb, points per unit
    "among_us": ("game/win_rate/crewmates", "Crewmates' wins", "wins", 100),
    "dond": ("game/score", "Score", "scores", 1),
    "diplomacy": ("game/score", "Score", "scores", 100),
}


def differences(arms: Sequence[ArmRun], runs: Sequence[Run]) -> list[TableRow]:
    """Differences of arms of one game in its main figure, paired by seed, or by game for a single seed."""
    trained = [arm_label(run, runs) for run in runs]
    if len({run.game for run in runs}) > 1 or trained != [run.arm for run in runs] or runs[0].game not in COMPARED:
        return []
    metric = COMPARED[runs[0].game][0]
    pairs = [pair for own in by_model(runs).values() for pair in pairs_of_model(own)]
    rows = arm_differences([a for a in arms if metric in a.metrics], pairs, [metric])
    return [row for row in rows if not row.arm.endswith(" - base")]


def pairs_of_model(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """The pairs of arms to compare of one model, whose name may end the arms' names."""
    ending = f", {model_of(runs[0])}"
    found = pairs_of((run.arm.removesuffix(ending) for run in runs), runs[0].game)
    full = {run.arm.removesuffix(ending): run.arm for run in runs}
    return [(full.get(arm, arm), full.get(reference, reference)) for arm, reference in found]


def comparisons(arms: Sequence[ArmRun], runs: Sequence[Run]) -> list[str]:
    """A sentence with all `differences`, if there are any."""
    rows = differences(arms, runs)
    if not rows:
        return []
    _, what, _, unit = COMPARED[runs[0].game]
    each = [f"{row.arm}: {unit * row.mean:+.1f} ({unit * row.low:+.1f} to {unit * row.high:+.1f})" for row in rows]
    by = "seed" if max(row.seeds for row in rows) > 1 else "game; of one training seed"
    return [f"{what}, differences in points, paired by {by}: {'; '.join(each)}."]


SEEN = {  # game -> metric, what an arm does, points per unit: the figure that fewest games tell apart comes first
    "among_us": (
        ("vote/imposter", "votes for the imposter {} points {} often", 100),
        ("game/win_rate/crewmates", "wins {} points {}", 100),
    ),
    "dond": (("game/score", "scores {} points {}", 1),),
    "diplomacy": (("game/score", "scores {} hundredths {}", 100),),
}


def what_was_seen(arms: Sequence[ArmRun], runs: Sequence[Run]) -> list[str]:
    """Says in plain words how the first pair of arms differs, a sentence for each figure of `SEEN`."""
    said = []
    for row in differences(arms, runs)[:1]:
        arm, _, other = row.arm.partition(" - ")
        over = f"{row.seeds} seeds" if row.seeds > 1 else "games of one training seed"
        for metric, does, unit in SEEN[runs[0].game]:
            found = _difference(arms, arm, other, metric)
            if found is None:
                continue
            low, mean, high = (unit * value for value in (found.low, found.mean, found.high))
            if low == mean == high == 0:
                figure = does.partition(" {}")[0]
                said.append(f"What was seen: no difference between {arm} and {other} in {figure} (over {over}).")
                continue
            what = does.format(f"{abs(mean):.1f}", "more" if mean > 0 else "less")
            chance = "more than chance explains" if low > 0 or high < 0 else "which chance can explain"
            said.append(
                f"What was seen: {arm} {what} than {other}, {chance} "
                f"(95 % interval {low:+.1f} to {high:+.1f}, over {over})."
            )
    return said


def _difference(arms: Sequence[ArmRun], arm: str, other: str, metric: str) -> Interval | None:
    """The difference of two arms, paired by seed or by game, or else from both arms' own intervals."""
    paired = arm_differences([a for a in arms if metric in a.metrics], [(arm, other)], [metric])
    if paired:
        return paired[0].interval
    both = [a.metrics[metric] for name in (arm, other) for a in arms if a.arm == name and metric in a.metrics]
    return independent_difference(*both) if len(both) == 2 else None


def costs(runs: Sequence[Run]) -> list[str]:
    """A sentence for each model on its arms at equal compute; none if the cost is unknown."""
    return [sentence for own in by_model(runs).values() for sentence in _costs(own)]


def _costs(runs: Sequence[Run]) -> list[str]:
    arms = equal_compute(runs)
    shared = set.intersection(*(set(arm.metrics) for arm in arms)) if arms else set()
    metric = next((m for game in dict.fromkeys(run.game for run in runs) for m in headline(game, shared)), None)
    if metric is None:
        return []
    parts = []
    for arm, found in columns_of(arms).items():
        cell = table_cell(found[metric], wording(metric))
        spread = f"{cell['range']}; " if cell["range"] else ""
        parts.append(f"{arm} {cell['mean']} ({spread}{found[GAMES].mean:,.0f} training games)")
    passes = np.mean([arm.metrics[PASSES].mean for arm in arms]) / 1e6
    label = wording(metric).label
    return [f"{label} at equal compute, {passes:.3g} million token passes of training: {', '.join(parts)}."]


def own_ends(columns: Mapping[str, Metrics]) -> dict[str, str]:
    """The endings of a user's own game, in its own words."""
    found = of_ones_own(name for metrics in columns.values() for name in metrics if name.startswith("game/how/"))
    return {how: how for how in (name.removeprefix("game/how/") for name in found)}


def endings(columns: Mapping[str, Metrics], ends: Mapping[str, str] = ENDS) -> list[dict[str, Any]]:
    """Shares of endings, a bar for each column, in the order of `ends`, without those that never happened."""
    bars = []
    for name, metrics in columns.items():
        shares = [(i, metrics[f"game/how/{how}"].mean) for i, how in enumerate(ends) if f"game/how/{how}" in metrics]
        if shares:
            bars.append({"name": name, "shares": [{"end": i, "share": share} for i, share in shares if share > 0]})
    return bars
