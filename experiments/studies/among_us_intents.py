"""Intents, control and filters in Among Us: Cicero's method on scripted games.

    python -m experiments.studies.among_us_intents

For each seed it trains an action model on scripted games, annotates their messages with intents (the speaker's vote,
and the one it wants of its hearers), trains a dialogue model that is told them, and plays the same games with a crew or
an imposter that talks with a plan. Everything is kept in `cells`, so that the same command goes on. The models make a
player, `runs/among-us-intents-sSEED+cicero`.

Writes `table.csv`, `figure.svg`, `roles.csv` (the correspondence test by role), `control.csv.gz` (drawn messages),
`filters-sSEED.csv` (refusals in play) and `cards.jsonl` (a line a seed).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from experiments.launch.command import command
from experiments.launch.terminal import say
from experiments.setup.refusals import say_refusals
from experiments.setup.spec import PlaySpec, play_spec
from experiments.studies.cells import Workspace, begin
from experiments.studies.talkers import (
    BY_ROLE,
    REFUSED,
    Figures,
    SeedModels,
    SeedTables,
    cached_figures,
    card,
    draw_panels,
    limits_of,
    publish,
    refused,
    save_player,
)
from marl.agents.base import Agent
from marl.agents.model import model_agent, model_agent_settings
from marl.common.errors import UserError, check_count, check_counts, check_temperature
from marl.common.files import digest, read_json, reading_kept, write_json
from marl.intents.agent import ACTION, DIALOGUE, CiceroConfig, Parts
from marl.intents.among_us import SKIP, Intent, accused_outright, mentioned
from marl.intents.among_us_agent import FACTS, GIVEAWAY, TableAgent
from marl.intents.among_us_training import action_model, dialogue_model, intents_of, say_under, scripted_games
from marl.intents.among_us_votes import Annotated, annotate
from marl.intents.filters import CORRESPONDENCE, REPETITION, VALUE
from marl.intents.training import kept_policy
from marl.metrics.stats import Interval, bootstrap_mean, paired_difference, rate
from marl.metrics.tables import TableRow, write_csv
from marl.model.policy import Policy
from marl.pretraining.config import Lesson
from marl.report.transcripts import write_episodes
from marl.rollout.games import env_maker, player_count
from marl.rollout.rollout import rollout
from marl.rollout.seeds import EVALUATION, draw_games
from marl.storage.checkpoint import folder_digest
from marl.types import Episode

TRAIN, TEST = 0, 1  # parts of the scripted games
OFF: Mapping[str, Any] = {"repetition": False, "correspondence": None, "value": 1.0}
SILENT: Mapping[str, Any] = {"giveaway": None, "facts": False}  # an imposter's filters, switched off
CREW, IMPOSTER = "crewmate", "imposter"
BASE = "base"
ARMS: Mapping[str, tuple[str, bool, Mapping[str, Any], Mapping[str, Any]]] = {
    # who plans, whether it talks with a plan, filters that are off, and an imposter's that are off
    "crew: votes": (CREW, False, OFF, SILENT),
    "crew: intents": (CREW, True, OFF, SILENT),
    "crew: all filters": (CREW, True, {}, {}),
    "imposter: votes": (IMPOSTER, False, OFF, SILENT),
    "imposter: intents": (IMPOSTER, True, OFF, SILENT),
    "imposter: no give-away filter": (IMPOSTER, True, {}, SILENT),
    "imposter: all filters": (IMPOSTER, True, {}, {}),
}
PAIRS = (  # differences that are reported, on the same games
    *((arm, BASE) for arm in ARMS),
    ("crew: all filters", "crew: votes"),
    ("imposter: all filters", "imposter: votes"),
    ("imposter: all filters", "imposter: no give-away filter"),
)
WON = "game/win_rate/crewmates"


@dataclass(frozen=True)
class Made(SeedModels):
    """The models of a seed, and the scripted games that are measured."""

    action: Policy
    dialogue: Policy
    tested: Callable[[], tuple[list[Episode], list[Annotated]]]


@command("among_us_intents")
def main(cfg: DictConfig) -> None:
    """Makes what is not made yet, measures, and tabulates."""
    check(cfg)
    spec, place = play_spec(cfg), begin(cfg)
    tables = SeedTables(place.out, draw)
    for seed in cfg.seeds:
        made = make_models(seed, cfg, spec, place)
        save_player(Path(cfg.runs) / f"among-us-intents-s{seed}", made.folders, seed)
        path = place.cells / f"words-s{seed}-{digest(measured_by(made, cfg))[:8]}.json"
        figures = cached_figures(path, partial(words, made, cfg, path.with_suffix(".csv.gz")))
        if seed == cfg.seeds[0]:
            publish(path.with_suffix(".csv.gz"), place.out / "control.csv.gz")
        figures |= play(made, cfg, spec, place)
        line = card(
            f"among-us-intents-s{seed}", seed, made.models, figures, arm="intents", command="among_us_intents.py",
            games=cfg.imposter_games,
        )  # fmt: skip
        tables.add(line, figures)
    tables.say()


def check(cfg: DictConfig) -> None:
    """Refuses bad settings of this command."""
    if cfg.env.game != "among_us" or cfg.env.style != "compact":
        raise UserError(f"env={cfg.env.game}, env.style={cfg.env.style}: this study plays Among Us in compact style")
    if cfg.base.dropout:
        raise UserError(f"base.dropout={cfg.base.dropout}: models of this study learn without it. Set it to 0.")
    check_count(cfg.seed, "seed", 0)
    check_temperature(cfg.temperature, "temperature")
    for seed in cfg.seeds:
        check_count(seed, "seeds", 0)
    check_counts(cfg, ("epochs", "tested", "control", "crew_games", "imposter_games", "concurrency"))


# --- Models -----------------------------------------------------------------------------------------------------------
def make_models(seed: int, cfg: DictConfig, spec: PlaySpec, place: Workspace) -> Made:
    """Loads or trains the models of a seed."""
    env, base = spec.env, replace(spec.base, seed=seed)
    lesson = Lesson(base.players, **cfg.votes)
    later = replace(base, epochs=cfg.epochs, learning_rate=cfg.learning_rate)

    played = cache(lambda tokens: scripted_games(env, tokens, base, TRAIN, base.games))
    about: dict[str, Any] = {"env": env, "model": spec.model.made_of(), "base": asdict(base), "votes": dict(cfg.votes)}
    acting = partial(place.bar.count, f"seed {seed}: action model")
    folder = Path(cfg.cache) / f"among-us-action-s{seed}-{digest(about)[:8]}"
    action = kept_policy(
        folder, {"kind": "action", **about},
        lambda: (action_model(spec.model, base, env, played, lesson, acting), {}),
        place.device, say, "among_us",
    )  # fmt: skip
    start = folder_digest(folder)

    def talk() -> tuple[Policy, Mapping[str, float]]:
        games = played(action.tokens)
        say(f"seed {seed}: annotating the games")
        talking = partial(place.bar.count, f"seed {seed}: dialogue model")
        return dialogue_model(action, later, games, annotate(action, games), talking), {}

    made_of = {"env": env, "start": start, "base": asdict(later)}
    talks = Path(cfg.cache) / f"among-us-dialogue-s{seed}-{digest(made_of)[:8]}"
    dialogue = kept_policy(talks, {"kind": "dialogue", **made_of}, talk, place.device, say, "among_us")
    place.bar.close()

    @cache
    def tested() -> tuple[list[Episode], list[Annotated]]:
        games = scripted_games(env, action.tokens, base, TEST, cfg.tested)
        return games, annotate(action, games)

    return Made(seed, env, {ACTION: folder, DIALOGUE: talks}, action, dialogue, tested)


# --- Words ------------------------------------------------------------------------------------------------------------
def measured_by(made: Made, cfg: DictConfig) -> dict[str, Any]:
    """Returns all that decides what is measured of words."""
    drawn = {"temperature": cfg.temperature, "top_p": cfg.cicero.top_p, "max_new_tokens": cfg.algo.max_new_tokens}
    return {"models": made.models, "tested": cfg.tested, "control": cfg.control, "mentioned": True, **drawn}


def words(made: Made, cfg: DictConfig, drawn: Path) -> Figures:
    """The correspondence test, and control. Writes the messages of the latter into `drawn`."""
    games, annotated = made.tested()
    certain = [each for each in annotated if accused_outright(each.turn.message)]
    if not certain:
        raise UserError(f"tested={cfg.tested}: nobody accuses anybody in these games. Test more of them")
    figures: Figures = {}
    readings: Mapping[str, Callable[[Annotated], str]] = {
        "annotation": lambda each: each.intent.own,
        "hearers' annotation": lambda each: each.intent.others,
        "naive annotation": lambda each: each.cast,
    }
    for arm, read in readings.items():
        for role in ("", CREW, IMPOSTER):
            among = [each for each in certain if role in ("", each.role)]
            if among:
                right = share([read(e) == accused_outright(e.turn.message) for e in among], [e.seed for e in among])
                figures[f"{BY_ROLE}: {arm}, {role}s" if role else arm, "intent/correspondence"] = right
        others = [each for each in annotated if mentioned(each.turn.message)]
        if others:
            same = share([read(e) == mentioned(e.turn.message) for e in others], [e.seed for e in others])
            figures[arm, "intent/mentioned"] = same
    flags = [each.truthful for each in annotated]
    figures["scripted players", "intent/truthful"] = share(flags, [each.seed for each in annotated])
    return figures | control(made, games, annotated, certain, cfg, drawn)


def share(flags: Sequence[bool], games: Sequence[int]) -> Interval:
    """A share of messages, with an interval over games."""
    return bootstrap_mean(flags, games, rng=np.random.default_rng(0))


def control(
    made: Made, games: Sequence[Episode], annotated: Sequence[Annotated], certain: Sequence[Annotated], cfg: DictConfig,
    drawn: Path,
) -> Figures:  # fmt: skip
    """Messages drawn at the places of scripted accusations: do those that accuse name whom the intent names?"""
    by_seed, intents = {game.seed: game for game in games}, intents_of(annotated)
    chosen, rng = certain[: cfg.control], np.random.default_rng([made.seed, 3])
    figures: Figures = {}
    lines: list[list[object]] = []
    for arm in ("annotated", "another"):
        places = []
        for each in chosen:
            own = each.intent.own
            if arm == "another":
                me = by_seed[each.seed].facts["names"][each.turn.agent].lower()
                own = str(rng.choice([vote for vote in each.votes if vote not in (own, me, SKIP)]))
            places.append(((by_seed[each.seed], each.turn.agent), each.turn.step, Intent(own, own)))
        said = say_under(
            made.dialogue, places, intents, context=made.dialogue.context, temperature=cfg.temperature,
            top_p=cfg.cicero.top_p, limit=cfg.algo.max_new_tokens, rng=np.random.default_rng([made.seed, 4]),
        )  # fmt: skip
        end = "/annotated" if arm == "annotated" else ""
        named = [accused_outright(message) for message in said]
        figures["intent", f"intent/stated{end}"] = share([bool(n) for n in named], [e.seed for e in chosen])
        right = [(n == p[2].own, p[0][0].seed) for n, p in zip(named, places, strict=True) if n]
        if right:
            figures["intent", f"intent/control{end}"] = share(*map(list, zip(*right, strict=True)))  # type: ignore[arg-type]
        lines += [[arm, p[2].own, e.turn.message, m] for e, p, m in zip(chosen, places, said, strict=True)]
    write_csv(drawn, ("intent_is", "intent", "scripted", "drawn"), lines)
    return figures


# --- Games ------------------------------------------------------------------------------------------------------------
def switched(cicero: CiceroConfig, off: Mapping[str, Any], silent: Mapping[str, Any]) -> CiceroConfig:
    """The settings with these filters switched off."""
    return replace(cicero, **off, among_us=replace(cicero.among_us, **silent))


def filters_of(arm: str) -> list[str]:
    """The filters that are on in an arm."""
    role, _, off, silent = ARMS[arm]
    shared = [] if off else [REPETITION, CORRESPONDENCE, VALUE]
    return shared + ([] if silent or role == CREW else [FACTS, GIVEAWAY])


def play(made: Made, cfg: DictConfig, spec: PlaySpec, place: Workspace) -> Figures:
    """The same games with the model alone, and with a crew or an imposter that plans."""
    found: Figures = {}
    won: dict[str, np.ndarray] = {}
    lines: list[list[object]] = []
    for arm in (BASE, *ARMS):
        count = cfg.crew_games if arm.startswith("crew") else cfg.imposter_games
        path = place.cells / f"games-s{made.seed}-{digest(played_by(made, arm, count, cfg, spec))[:10]}.json"
        if not path.exists():
            place.bar.stage(f"seed {made.seed}: {arm}", count)
            write_json(path, {"arm": arm, **games_of(made, arm, count, cfg, spec, place, path)})
            place.bar.close()
        kept_ = read_json(path)
        with reading_kept(path, "an arm's games"):
            won[arm] = np.array([game["won"] for game in kept_["games"]], float)
            found[arm, WON] = rate([bool(w) for w in won[arm]])
            counts = kept_["counts"]
            lines += [[made.seed, arm, key, counts[key]] for key in sorted(counts)]
            if counts.get("drawn"):
                found |= {(arm, f"{REFUSED}{key}"): each for key, each in refused(counts, filters_of(arm)).items()}
    for arm, other in PAIRS:
        size = min(len(won[arm]), len(won[other]))
        gain = paired_difference(won[arm][:size], won[other][:size], rng=np.random.default_rng(0))
        found[f"{arm} - {other}", WON] = gain
    write_csv(place.out / f"filters-s{made.seed}.csv", ("seed", "arm", "what", "count"), lines)
    return found


def played_by(made: Made, arm: str, count: int, cfg: DictConfig, spec: PlaySpec) -> dict[str, Any]:
    """Returns all that decides an arm's games."""
    on = asdict(switched(spec.cicero, *ARMS[arm][2:])) if arm in ARMS else {}
    about = {"models": made.models, "arm": arm, "cicero": on, "env": made.env, "games": count}
    return about | {name: cfg[name] for name in ("seed", "temperature", "concurrency")} | limits_of(spec.algo)


def games_of(
    made: Made, arm: str, count: int, cfg: DictConfig, spec: PlaySpec, place: Workspace, path: Path
) -> dict[str, Any]:
    """Plays an arm. Returns who won each game, and how; and the counts of draws and refusals."""
    limits = replace(spec.algo, games=count, concurrency=min(cfg.concurrency, count))
    plain: Agent = model_agent(BASE, made.dialogue, limits, player_count(made.env), cfg.temperature)
    agents, planner = {CREW: plain, IMPOSTER: plain}, None
    if arm in ARMS:
        role, tells, off, silent = ARMS[arm]
        parts = Parts("intent" if tells else "none", made.action, made.dialogue, None)
        how = model_agent_settings(limits, player_count(made.env), cfg.temperature)
        planner = agents[role] = TableAgent(arm, parts, switched(spec.cicero, off, silent), **how)
    episodes = rollout(
        draw_games(cfg.seed, EVALUATION, made.seed, count=count),
        lambda game, env: {seat: agents[role] for seat, role in env.facts["roles"].items()},
        env_maker(made.env), limits.concurrency, place.bar.advance,
    )  # fmt: skip
    say_refusals(*agents.values())
    write_episodes(path.with_suffix(".jsonl"), episodes[:40])
    games = [{"won": e.outcome["winner"] == "crewmates", "how": e.outcome["how"]} for e in episodes]
    return {"games": games, "counts": dict(planner.counts) if planner else {}}


# --- Figure -----------------------------------------------------------------------------------------------------------
def draw(rows: Sequence[TableRow], path: Path) -> None:
    """Draws correspondence, control, and win rates by who plans."""
    won = [row for row in rows if row.metric == WON and " - " not in row.arm]
    panels = {
        "annotated as stated": [row for row in rows if row.metric == "intent/correspondence"],
        "words follow the intent": [
            replace(row, arm="annotated" if row.metric.endswith("/annotated") else "another")
            for row in rows
            if row.metric.startswith("intent/control")
        ],
    }
    for who in ("crew", "imposter"):
        own = [row for row in won if row.arm == BASE or row.arm.startswith(who)]
        panels[f"crew wins: {who} plans"] = [replace(row, arm=row.arm.removeprefix(f"{who}: ")) for row in own]
    draw_panels(panels, path)


if __name__ == "__main__":
    main()
