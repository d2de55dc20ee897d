"""Plays finished runs under other conditions than their own evaluation's, and tabulates what came of it.

    python -m experiments.studies.conditions comparison=among_us_generalisation

A comparison (conf/comparison/) names runs and conditions. Each
run, and the base of each seed, plays the same games under each of them. Each cell of this table is written as soon as
it is played: a stopped command goes on where it was, several share the work, and the one that ends last writes the
table. Intervals are those of experiments.report: over training seeds, of a single one over its games.

Written: `NAME_per_seed.csv.gz`, each run's own figures; made of it, `NAME.csv.gz` (means over seeds),
`NAME_differences.csv.gz` (each condition minus the `reference`, and arms minus arms under each condition, paired by
seed), `NAME.svg`, and where it has a `headline` condition, `table.csv`, which has that alone; with `publish` the
runs' cards as well. With `talk` messages are measured as experiments.talk does. `comparison=NAME
data=FOLDER/NAME_per_seed.csv.gz` makes all of it again, without the runs.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from experiments.launch.command import command
from experiments.launch.terminal import say
from experiments.setup.config import EvalConfig, cast_of, make, plain
from experiments.setup.players import (
    bare,
    check_players,
    intent_settings_of,
    is_run,
    planner_of,
    played_as,
    player_digest,
    player_slots,
    policy_folder,
    reads_intents,
    run_policy,
    seat_players,
    style_of,
)
from experiments.setup.refusals import say_refusals
from experiments.setup.select import selected, write_cards
from experiments.setup.stages import Stage, base_folder, end_of, stages_of
from experiments.studies.cells import Workspace, begin, check_play, compute, lower_concurrency
from experiments.studies.conditions_tables import published_points, read_played, tabulate, write_played
from marl.agents.chat import CHAT
from marl.agents.dubbed import SILENCE, Alias, Dubbed
from marl.agents.model import ModelAgent, PlayConfig, model_agent
from marl.common.errors import UserError, check_count, check_range, check_temperature, check_writable, prefixed
from marl.common.files import digest, reading
from marl.decoding.memory import Slots
from marl.intents.agent import CICERO, CiceroConfig
from marl.metrics.evaluation import metrics
from marl.metrics.messages import message_metrics
from marl.metrics.stats import Metrics
from marl.metrics.tables import ArmRun, read_figures
from marl.metrics.wording import ARM_ORDER, ARMS, WORDING
from marl.model.policy import Policy
from marl.planning.planner import GAMES as PLANNED
from marl.planning.planner import SLOTS, SUFFIX, PlannerConfig, planning_agent
from marl.rollout.cast import LEARNERS, RoleConfig, by_role, cast_settings, learners_of, players_of, seats_per_player
from marl.rollout.games import env_maker, file_digests
from marl.rollout.rollout import rollout
from marl.rollout.seeds import EVALUATION, draw_games
from marl.storage.checkpoint import folder_digest, started_from
from marl.storage.folder import finished_run, git_commit

FORMAT = 3  # of cells; raised when the same settings would be played, or measured, otherwise
BASE = "base"  # the arm of those who were not trained
TRAINED = "trained"  # what the policy under test is called in episodes, a base in its place too
SILENT = "silence"  # the voice of those who say nothing
NEXT_SEED = "next_seed"  # in a condition's cast: the first learner of the same arm's next seed


@dataclass(frozen=True)
class Condition:
    """Changes to a run's own evaluation.

    voices: by role, whose messages its `player` sends. planner: how learners plan claims or votes. iteration: learners
    as they were after so many iterations, from a checkpoint that the run kept (0: as they began).
    """

    env: Mapping[str, Any] = field(default_factory=dict)
    cast: Mapping[str, Any] = field(default_factory=dict)
    voices: Mapping[str, Any] = field(default_factory=dict)
    temperature: float | None = None
    planner: PlannerConfig | None = None
    iteration: int | None = None

    def __post_init__(self) -> None:
        if self.planner and self.planner.choose == "own":
            raise UserError(
                "planner.choose=own is for training, which notes plans and does not play them. Choose sample or best."
            )
        if self.planner and self.voices:
            raise UserError(
                f"planner, voices={dict(self.voices)}: a player that plans sends its own messages. Leave one out."
            )
        for role, changes in self.cast.items():
            if not isinstance(changes, Mapping):
                raise UserError(f"cast.{role}={changes}: must be a group of settings, as in {{player: {changes}}}")
        if self.temperature is not None:
            check_temperature(self.temperature, "temperature")
        check_range(self, "", "[0, inf), or null for the end", "iteration")


@dataclass(frozen=True)
class Limits(PlayConfig):
    """Limits of play beside players that plan; `intents`, `cicero`: see `PPOConfig`."""

    planner: PlannerConfig = field(default_factory=PlannerConfig)
    intents: str | None = None
    cicero: CiceroConfig = field(default_factory=CiceroConfig)


@dataclass(frozen=True)
class Entrant:
    """Policies under test: those that a run ended with, or its base. `run` holds all else."""

    arm: str
    seed: int
    run: Path
    config: Mapping[str, Any]
    base: Path
    learners: Mapping[str, Stage]  # by name in the cast

    @property
    def limits(self) -> Limits:
        """Limits of play beside this entrant's learners, as in its run: how others plan and talk, and whose intents are
        told."""
        algo = self.config["algo"]
        return Limits(
            planner=make(PlannerConfig, algo.get("planner") or {}, "algo.planner"),
            intents=algo.get("intents") or None,
            cicero=make(CiceroConfig, algo.get("cicero") or {}, "algo.cicero"),
        )

    @property
    def name(self) -> str:
        # a base's own name, also where it is played from the copy that a run keeps
        return Path(str(started_from(self.run / "policy"))).name if self.arm == BASE else self.run.name


@dataclass(frozen=True)
class Cell:
    """One entrant under one condition. `settings` is all that determines its games, and names its file."""

    entrant: Entrant
    condition: str
    cast: Mapping[str, RoleConfig]
    voices: Mapping[str, str]
    planner: PlannerConfig | None
    settings: Mapping[str, Any]

    @property
    def file(self) -> str:
        return f"{self.entrant.name}-{digest(self.settings)}.json"


@command("conditions")
def main(cfg: DictConfig) -> None:
    """Plays what is not played yet, then tabulates."""
    # Check.
    check_play(cfg)
    check_count(cfg.talk, "talk", 0)
    unknown = [name for name in cfg.metrics if name not in WORDING]
    if unknown or not cfg.metrics:
        raise UserError(f"metrics={list(cfg.metrics)}: {unknown[0] if unknown else 'nothing'} is no metric")
    played = read_played(Path(cfg.data)) if cfg.data else {}
    named = {} if cfg.data else read_conditions(cfg)
    for setting in ("reference", "headline"):
        if cfg[setting] is not None and cfg[setting] not in (known := [*played, *named]):
            raise UserError(f"{setting}={cfg[setting]}: must be one of the conditions, {', '.join(known)}, or null")
    published = published_points(Path(cfg.published)) if cfg.published else {}

    # Tabulate again what was played before, without any run.
    if cfg.data:
        out = Path(cfg.publish or Path(cfg.data).parent)
        check_writable(out, "publish")
        return tabulate(cfg, played, out, published)

    # Configure: a cell is one run under one condition.
    found = entrants(Path(cfg.runs), cfg.select, list(cfg.arms), cfg.where)
    table = [cell_of(entrant, name, each, cfg, found) for entrant in found for name, each in named.items()]
    workspace = begin(cfg)
    if cfg.publish:
        write_cards(dict.fromkeys(entrant.run for entrant in found), workspace.out)
    cells = {workspace.cells / cell.file: cell for cell in table}  # conditions that change nothing share one
    announce(found, len(named), cells, cfg.games)

    # Play.
    load = lru_cache(maxsize=4)(
        lambda stage: stage.load(workspace.device, 0)
    )  # critics see no hidden facts: nobody asks

    def play_cell(cell: Cell, number: str) -> dict[str, Any]:
        label = f"{number}  {cell.entrant.arm}, seed {cell.entrant.seed}, {cell.condition}"
        workspace.bar.stage(label, cfg.games)
        of_cell = play(cell, cfg, load, workspace)
        say(f"{label}: {cfg.metrics[0]} {of_cell[cfg.metrics[0]]}" if cfg.metrics[0] in of_cell else label)
        about = {"arm": cell.entrant.arm, "seed": cell.entrant.seed, "commit": git_commit(), **cell.settings}
        return {"about": about, "metrics": {name: interval.to_json() for name, interval in of_cell.items()}}

    # Write.
    if compute(cells, play_cell):
        path = workspace.out / f"{cfg.name}_per_seed.csv.gz"
        write_played(path, results(table, workspace.cells, list(cfg.metrics)))
        tabulate(cfg, read_played(path), workspace.out, published)  # as anybody else will


def announce(found: Sequence[Entrant], conditions: int, cells: Mapping[Path, Cell], games: int) -> None:
    """Says what is to be played, and whether arms are of other seeds."""
    trained = {e.arm: {o.seed for o in found if o.arm == e.arm} for e in found if e.arm != BASE}
    if any(own != max(trained.values(), key=len) for own in trained.values()):
        seeds = "; ".join(f"{arm} {', '.join(map(str, sorted(own)))}" for arm, own in trained.items())
        say(f"the arms' means are not over the same seeds: {seeds}")
    left = sum(not path.exists() for path in cells)
    say(
        f"{len(found)} policies of {len({entrant.seed for entrant in found})} seeds under {conditions} conditions, "
        f"{games} games each: {left} of {len(cells)} cells are still to be played"
    )


# --- What is to be played ---------------------------------------------------------------------------------------------
def read_conditions(cfg: DictConfig) -> dict[str, Condition]:
    """The comparison's conditions by name. UserError where there is none, or one has a field that is not known."""
    settings = plain(cfg)["conditions"]
    if not settings:
        raise UserError(
            f"conditions: the comparison {cfg.name} names none; a file of conf/comparison/ lists what to play"
        )
    found = {}
    for name, changes in settings.items():
        if not isinstance(changes, Mapping):
            raise UserError(f"conditions.{name}={changes}: must be a group of settings, as in {{env: {{players: 6}}}}")
        with prefixed(f"conditions.{name}: "):
            found[name] = make(Condition, changes, "condition")
    return found


def entrants(runs: Path, select: Any, arms: Sequence[str], where: Any = None) -> list[Entrant]:
    """The runs of these arms (all, where none is named), and before them the bases they started from, each once."""
    folders = selected(runs, select, where)
    found_runs = {folder: finished_run(folder) for folder in folders}
    there = sorted({card["arm"] for _, card in found_runs.values()})
    for arm in arms:
        if arm not in there:
            raise UserError(
                f"arms: no finished run of {select} in {runs} is of arm {arm}; there are {', '.join(there)}"
            )
    found: dict[tuple[str, int], Entrant] = {}
    bases: set[str] = set()
    for folder, (config, card) in found_runs.items():
        if arms and card["arm"] not in arms:
            continue
        with reading(folder):
            learners = learners_of(cast_of(config["cast"]))
            intent_settings_of(str(folder))  # refuses a run whose intents are gone
        base, seed = base_folder(folder), card["seeds"][0]
        arm = ARMS.get(card["arm"], card["arm"]) if config["env"]["game"] == "among_us" else card["arm"]
        new = [Entrant(arm, seed, folder, config, base, {name: end_of(folder, name) for name in learners})]
        if folder_digest(base) not in bases:  # one model counts once, also if it is the base of several seeds
            new.append(Entrant(BASE, seed, folder, config, base, dict.fromkeys(learners, Stage(0, base))))
            bases.add(folder_digest(base))
        for entrant in new:
            other = found.setdefault((entrant.arm, seed), entrant)
            if other is not entrant:
                what = "started from different bases" if entrant.arm == BASE else f"are both arm {card['arm']}"
                raise UserError(
                    f"select={select}: {other.run.name} and {folder.name} are of seed {seed} and {what}; "
                    "choose names of which there is one for each arm and seed, or settings in `where`"
                )
    order = {arm: i for i, arm in enumerate(ARM_ORDER)}
    return sorted(found.values(), key=lambda e: (e.seed, order.get(e.arm, len(order))))


def after(entrant: Entrant, iteration: int | None) -> Entrant:
    """The entrant with its learners as they were after so many iterations; a base is what it is."""
    if iteration is None or entrant.arm == BASE:
        return entrant
    learners = {}
    for name in entrant.learners:
        kept = {stage.iteration: stage for stage in stages_of(entrant.run, name)}
        if iteration not in kept:
            raise UserError(
                f"iteration={iteration}: {entrant.run.name} has its {name} after {', '.join(map(str, kept))}; "
                "checkpoint.every and checkpoint.keep say in training which stay"
            )
        learners[name] = kept[iteration]
    return dataclasses.replace(entrant, learners=learners)


def stranger(entrant: Entrant, found: Sequence[Entrant]) -> str:
    """The player that NEXT_SEED names beside this entrant: the next of the same arm by seed, the first after the last.

    The base of all seeds, where there is but one, is its own next. UserError if an arm has only one seed.
    """
    line = sorted((other for other in found if other.arm == entrant.arm), key=lambda other: other.seed)
    place = next((i for i, other in enumerate(line) if other.seed == entrant.seed), 0)
    if len(line) < 2:
        if entrant.arm == BASE:
            return BASE
        raise UserError(
            f"cast: {NEXT_SEED} of {entrant.run.name}: there is no other seed of its arm. Select more runs."
        )
    other = line[(place + 1) % len(line)]
    return str(other.base if entrant.arm == BASE else other.run)


def cell_of(entrant: Entrant, name: str, condition: Condition, cfg: DictConfig, found: Sequence[Entrant] = ()) -> Cell:
    """The entrant's own evaluation with the condition's changes. UserError, naming the condition, if it can't be.

    `found`: all entrants, among whom NEXT_SEED is looked for.
    """
    config = entrant.config
    with reading(entrant.run):
        own = make(EvalConfig, config["eval"], "eval")
    env = {**config["env"], **own.env, **condition.env}
    with prefixed(f"conditions.{name}: "):
        entrant = after(entrant, condition.iteration)
        changes = {
            role: {key: stranger(entrant, found) if value == NEXT_SEED else value for key, value in each.items()}
            for role, each in condition.cast.items()
        }
        changed = dataclasses.replace(own, cast=merged(own.cast, changes))
        cast = changed.evaluation_cast(cast_of(config["cast"]))
        for who in players_of(cast):
            if who in LEARNERS and who not in entrant.learners:
                raise UserError(f"cast: there is no {who} in {entrant.run}; it has {', '.join(entrant.learners)}")
            if who == CHAT:
                raise UserError(f"cast: {CHAT} plays in train, evaluate and play only")
        game = env_maker(env)()
        check_players(cast, env, game)
        if condition.planner and env["game"] not in PLANNED:
            raise UserError(f"planner: env.game={env['game']} has nothing to plan. Leave it out.")
        voices = {role: str(voice) for role, voice in condition.voices.items() if voice is not None}
        check_voices(voices, cast, entrant)
        if entrant.limits.intents and (voices or condition.planner):
            raise UserError(
                f"{entrant.run}: its learners are told intents, which voices and planners are not. Leave the condition "
                "out."
            )
        temperature = own.temperature if condition.temperature is None else condition.temperature
        if cfg.talk:
            check_talk(cfg.talk, env["game"], voices, temperature)
    own_voice = {role: identity_of(held.player, entrant) for role, held in cast.items()}
    voices = {role: voice for role, voice in voices.items() if identity_of(voice, entrant) != own_voice[role]}
    settings = {
        "format": FORMAT,
        "env": env,
        **file_digests(env),
        "cast": {role: cast_settings(held) for role, held in cast.items()},
        "voices": voices,
        "players": {who: identity_of(who, entrant) for who in (*players_of(cast), *voices.values())},
        "temperature": temperature,
        "max_new_tokens": config["algo"]["max_new_tokens"],
        "context": config["algo"]["context"],
        "games": cfg.games,
        "seed": cfg.seed,
    }
    if intent_settings := played_as(cast, entrant.limits).get("cicero"):
        settings["told"] = intent_settings
    if condition.planner:
        settings["planner"] = dataclasses.asdict(condition.planner)
    if cfg.talk:
        settings["talk"] = cfg.talk
    return Cell(entrant, name, cast, voices, condition.planner, settings)


def merged(cast: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes of two casts, role by role; the second wins."""
    return {role: {**cast.get(role, {}), **changes.get(role, {})} for role in {**cast, **changes}}


def check_talk(talk: int, game: str, voices: Mapping[str, str], temperature: float) -> None:
    """Refuses conditions under which talk cannot be measured (see experiments.talk)."""
    if game == "diplomacy":
        raise UserError(f"talk={talk}: talk is not measured in env.game=diplomacy. Set talk=0; metrics has press/said.")
    if voices:
        raise UserError(f"talk={talk}, voices={dict(voices)}: talk in another's voice is not measured. Leave one out.")
    if temperature == 0:
        raise UserError(f"talk={talk}, temperature=0: no likelihood of a message is left. Choose one above 0.")


def check_voices(voices: Mapping[str, str], cast: Mapping[str, RoleConfig], entrant: Entrant) -> None:
    for role, voice in voices.items():
        if role not in cast:
            raise UserError(f"voices.{role}={voice}: there is no such role; the game's are {', '.join(cast)}")
        if voice not in (*entrant.learners, BASE, SILENT) and not is_run(voice):
            known = ", ".join((*entrant.learners, BASE, SILENT))
            raise UserError(f"voices.{role}={voice}: must be {known}, null or the folder of a finished run")
        if voice != SILENT and reads_intents(voice):
            raise UserError(f"voices.{role}={voice}: reads intents, which a voice is not told. Name another voice.")
        if identity_of(cast[role].player, entrant) == cast[role].player:
            raise UserError(f"voices.{role}={voice}: {cast[role].player} is no language model and keeps its voice")
        if cast[role].player.endswith((SUFFIX, CICERO)):
            raise UserError(f"voices.{role}={voice}: {cast[role].player} plans and keeps its voice. Leave one out.")


def identity_of(name: str, entrant: Entrant) -> str:
    """Identifies a player: by the digest of its policy's files, or by name if it has no policy."""
    if name in entrant.learners:
        return entrant.learners[name].digest
    if bare(name) == BASE:
        found = folder_digest(entrant.base)
    elif name != SILENT and is_run(name):
        found = player_digest(name)
    else:
        return name
    plans = f"{SUFFIX} {dataclasses.asdict(planner_of(entrant.limits))}" if name.endswith(SUFFIX) else ""
    return found + plans


# --- Playing ----------------------------------------------------------------------------------------------------------
def play(cell: Cell, cfg: DictConfig, load: Callable[[Stage], Policy], workspace: Workspace) -> Metrics:
    """The cell's games: metrics of the seats that the run learned to play in, for a base of the same ones."""
    env, temperature, device = cell.settings["env"], cell.settings["temperature"], workspace.device
    game, make_env = env["game"], env_maker(env)
    trained_in = cell.entrant.config["env"]  # its base and its learners
    base = load(Stage(0, cell.entrant.base))
    learners = {name: load(stage) for name, stage in cell.entrant.learners.items()}
    seated, cast, table = {BASE: base, **learners}, dict(cell.cast), make_env()
    most_seats = seats_per_player(cast, table)
    limits = dataclasses.replace(
        cell.entrant.limits, games=cfg.games, concurrency=cfg.concurrency, context=cell.settings["context"],
        max_new_tokens=cell.settings["max_new_tokens"],
    )  # fmt: skip
    names = {name for role, voice in cell.voices.items() for name in (cast[role].player, voice)} - {SILENT}
    dubbing = {name: seated.get(name) or run_policy(name, game, device, base) for name in names}
    caches, _ = player_slots(cast, table, limits, {name: policy.lm.config for name, policy in seated.items()})
    caches += [
        Slots.of(dubbing[voice].lm.config, limits.context, most_seats[cast[role].player])
        for role, voice in cell.voices.items()
        if voice != SILENT
    ]
    if cell.planner:  # plans are weighed with slots of their own
        caches += [Slots.of(policy.lm.config, limits.context, 0, SLOTS) for policy in learners.values()]
    limits = lower_concurrency(limits, caches, device)

    stand_ins = {name: (name if i else TRAINED, policy) for i, (name, policy) in enumerate(learners.items())}
    agents = seat_players(cast, table, trained_in, base, limits, temperature, stand_ins, strangers=True)
    for name, (called, policy) in stand_ins.items():
        if cell.planner and name in agents:
            held = (limits, most_seats[name], temperature, cell.planner, game)
            agents[name] = planning_agent(called, policy, *held, style=trained_in.get("style"))

    def model(called: str, name: str, seats: int) -> ModelAgent:
        style = trained_in.get("style") if name in seated else style_of(policy_folder(name), trained_in)
        return model_agent(called, dubbing[name], limits, seats, temperature, style)

    for role, voice in cell.voices.items():  # with agents of their own, since others may play with the same policies
        player, called = cast[role].player, f"{role} in another's voice"
        mover = model(agents[player].name, player, most_seats[player])
        speaker = SILENCE if voice == SILENT else model(voice, voice, most_seats[player])
        agents[called] = Dubbed(mover, speaker, mover.name)
        cast[role] = dataclasses.replace(cast[role], player=called)
    drawn = draw_games(cfg.seed, EVALUATION, count=cfg.games)
    episodes = rollout(drawn, by_role(cast, agents), make_env, limits.concurrency, workspace.bar.advance)
    workspace.bar.close()
    say_refusals(*agents.values())
    found = metrics(episodes, game, float(env.get("objective", 0.0)), {TRAINED})
    if cfg.talk:
        by_name = {agent.name: agent.agent if isinstance(agent, Alias) else agent for agent in agents.values()}
        found |= message_metrics(episodes, env, by_name, {TRAINED}, cfg.talk)[0]
    return found


def results(table: Sequence[Cell], folder: Path, wanted: Sequence[str]) -> dict[str, list[ArmRun]]:
    """Reads what was played under each condition, arms in the order of tables."""
    played: dict[str, list[ArmRun]] = {}
    for cell in table:
        found = read_figures(folder / cell.file)
        kept = {name: found[name] for name in wanted if name in found}
        played.setdefault(cell.condition, []).append(ArmRun(cell.entrant.arm, cell.entrant.seed, kept))
    order = {arm: i for i, arm in enumerate(dict.fromkeys([*ARM_ORDER, *(cell.entrant.arm for cell in table)]))}
    for runs in played.values():
        runs.sort(key=lambda run: (order[run.arm], run.seed))
    return played


if __name__ == "__main__":
    main()
