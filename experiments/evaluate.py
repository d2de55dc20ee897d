"""Plays any two players against each other on fixed seeds and prints what came of it, with 95 % intervals.

`python -m experiments.evaluate players=[runs/NAME,scripted] games=1000`. A player is a run's folder, `base` (of the run
beside it, or of the configuration), `scripted`, a scripted temperament, `random`, or `chat`, a model behind any
OpenAI-compatible endpoint (settings `chat.*`, marl/chat.py). One name plays itself. In a game with several roles the
first player holds the first of them, and its partner `cast.crewmate.partners` of the seats where the player is a
language model or the partner is none (`cast.crewmate.partner=random`); the second player holds the others.
`voices=[base]`: the first player's messages are the base's; `voices=[silence]`: it says nothing. A player called
`NAME+plan` plans its proposals or votes near what it would do itself (marl/planner.py), as `planner.*` says;
`planner=pikl` alone means the first player. Models read the style that they were trained in, and `chat` natural words;
`env.style` is what everybody else reads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from envs.dond_v0 import pool
from experiments.cli import PLACE, command
from experiments.players import (
    bare,
    called_in_games,
    check_plans,
    in_runs,
    is_run,
    player_config,
    policy_folder,
    run_of,
    run_policy,
    style_of,
)
from experiments.stages import base_folder
from experiments.terminal import Bar, say
from marl.agents import SILENCE, Agent, Alias, Dubbed, ModelAgent, model_agent
from marl.cast import Seats, by_role, places
from marl.chat import CHAT, ChatAgent
from marl.checkpoint import load_policy, started_from
from marl.config import Parts, build, cast_of, make, plain
from marl.engine import size_of
from marl.errors import UserError, check_count, check_sizes, check_temperature, check_writable
from marl.evaluate import Metrics, belief_by_message, evaluation_to_json, metrics
from marl.files import reading, write_json
from marl.games import env_maker, scripted, seats
from marl.memory import Slots, check_memory, has_bf16_instructions
from marl.planner import SLOTS, SUFFIX, PlannerConfig, planning_agent
from marl.policy import Policy, load_config
from marl.pretrain import base_policy
from marl.rollout import EVALUATION, Cast, Game, draw_games, rollout
from marl.runs import CONFIG, run_settings
from marl.stats import TableRow, format_table, write_table
from marl.transcripts import Transcript, episode_to_json, render_text, write_episodes
from marl.wording import of_ones_own

HEADLINE = (
    "game/score", "game/score_agreed", "game/score_ceiling", "game/points", "game/joint", "game/agreement",
    "game/pareto", "game/pareto_agreed", "game/win_rate/crewmates", "game/how/ejection", "game/how/tasks",
    "game/how/time", "game/how/parity", "game/steps", "game/decisions", "game/meetings", "game/ejected_imposter",
    "game/ejected_crewmate", "vote/imposter", "vote/chance", "vote/witness", "vote/other_imposter", "talk/turns",
    "talk/words_per_message", "talk/vocabulary", "errors/per_turn", "errors/aborted", "belief/accuracy",
    "belief/log_loss", "belief/brier", "belief/prior_log_loss", "belief/gain_over_prior", "belief/gain_over_start",
    "speech/belief_change",
)  # fmt: skip


def each_context(env: Mapping[str, Any], seed: int) -> list[Game]:
    """A game of Deal or No Deal for each context that `env` draws from, in the file's order."""
    if env["game"] != "dond":
        raise UserError("each_context=true: only Deal or No Deal has a list of contexts; give the number of games")
    chosen = pool(env["contexts"], env["split"])
    drawn = draw_games(seed, EVALUATION, count=len(chosen))
    return [
        replace(game, options={"counts": c.counts, "values": c.values}) for game, c in zip(drawn, chosen, strict=True)
    ]


def turn_about(first: Agent, second: Agent) -> Cast:
    """Two players of a game with one role: they change seats from game to game."""

    def seat(game: Game, env: Any) -> Mapping[str, Agent]:
        names = list(env.possible_agents)
        turned = game.seed % 2
        return {name: (first, second)[(i + turned) % 2] for i, name in enumerate(names)}

    return seat


def role_against_role(first: Agent, second: Agent, cast: Mapping[str, Seats], partner: Agent | None) -> Cast:
    """The first player holds the first role of the cast, with its partner where one is given, the second all others."""
    (name, own), *others = cast.items()
    agents = {"first": first, "second": second, "partner": partner or first}
    seating = {name: Seats("first", "partner", own.partners if partner else 0.0)}
    return by_role({**seating, **{role: Seats("second") for role, _ in others}}, agents)


def rows_of(conditions: Mapping[str, Metrics]) -> list[str]:
    """The metrics of the table: the headline's, then what terms and games of one's own bring."""
    known = [name for name in HEADLINE if any(name in found for found in conditions.values())]
    return [*known, *of_ones_own(name for found in conditions.values() for name in found)]


def show(conditions: Mapping[str, Metrics], transcripts: Mapping[str, Transcript], report: Path | None = None) -> None:
    """The last screen: the table, a transcript of each condition, where the report is."""
    names = rows_of(conditions)
    for label, transcript in transcripts.items():
        say(f"\n── {label}, game {transcript['seed']} " + "─" * 40)
        say(render_text(transcript))
    say("")
    say(format_table({label: dict(found) for label, found in conditions.items()}, names))
    if report is not None:
        say(f"\nreport: {report}")


def pick_device(name: str) -> torch.device:
    """The device that this process computes on; a GPU becomes the current one."""
    rank = os.environ.get("LOCAL_RANK")  # set by torchrun
    hydra: Any = HydraConfig.instance().cfg
    job = 0 if hydra is None else OmegaConf.select(hydra, "hydra.job.num", default=0)  # missing outside a sweep
    place = int(os.environ.get(PLACE, job))  # of jobs side by side, whose numbers may fall on a GPU that is taken
    device = device_of(name, torch.cuda.device_count(), place, None if rank is None else int(rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def device_of(name: str, gpus: int, job: int = 0, rank: int | None = None) -> torch.device:
    """The device that a setting names on a machine with so many GPUs: `auto` (a GPU if there is one), `cpu`, `cuda`, or
    the GPU `cuda:N`.

    Jobs of a sweep take the GPUs in turn: `job` is a job's number. `rank`: of a process that torchrun started, among
    those of this machine; each has a GPU to itself. UserError where the setting or the GPU does not exist.
    """
    known = re.fullmatch(r"auto|cpu|cuda|cuda:(\d+)", str(name))
    if not known:
        raise UserError(f"device={name}: must be auto, cpu, cuda or a GPU's number, as in cuda:1")
    if name == "cpu" or (name == "auto" and not gpus):
        return torch.device("cpu")
    if not gpus:
        raise UserError(f"device={name}: no CUDA device is there; use device=cpu or device=auto")
    there = f"this machine has {gpus} GPU{'s' * (gpus > 1)}, cuda:0{f' to cuda:{gpus - 1}' * (gpus > 1)}"
    if known[1] is None:
        if rank is not None and rank >= gpus:
            raise UserError(f"device={name}: process {rank} finds none left, {there}; use --nproc-per-node {gpus}")
        return torch.device("cuda", job % gpus if rank is None else rank)
    if int(known[1]) >= gpus:
        raise UserError(f"device={name}: {there}")
    if rank is not None:
        raise UserError(f"device={name}: each process of torchrun takes a GPU of its own; use device=cuda")
    return torch.device("cuda", int(known[1]))


def check_bf16(device: torch.device, setting: str) -> None:
    """For a setting that asks for bfloat16: UserError where a GPU has none. A CPU without instructions for it computes
    with bfloat16 all the same, and slowly: a line says so."""
    if lacking := without_bf16(device):
        raise UserError(f"{setting}=true: {lacking}; set it to false")
    if device.type == "cpu" and not has_bf16_instructions():
        say(f"{setting}=true: this processor has no instructions for bfloat16, so false would be faster")


def without_bf16(device: torch.device) -> str:
    """Why a GPU should not compute in bfloat16; empty where it may."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return f"{torch.cuda.get_device_name(device)} has no bfloat16, which would only be imitated"
    return ""


_threads_before: int | None = None


def set_threads(threads: int | None) -> None:
    """How many threads torch computes on; None: as many as before a job of this process said a number."""
    global _threads_before
    if threads is None:
        if _threads_before is not None:
            torch.set_num_threads(_threads_before)
            _threads_before = None
    else:
        if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 4096:
            raise UserError(f"threads={threads}: must be a whole number, at least 1, or null")
        _threads_before = _threads_before or torch.get_num_threads()
        torch.set_num_threads(threads)


def set_deterministic(wanted: bool) -> None:
    """Whether torch may take only algorithms that give the same bits each time, on a GPU as well.

    Where an operation has none, torch raises a RuntimeError that names it. On a CPU runs repeat without this.
    """
    # Read when cuBLAS starts, which an earlier job may have it do: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)  # set back too: jobs of a sweep may share a process


def find_player(
    name: str,
    cfg: DictConfig,
    parts: Parts,
    device: torch.device,
    beside: str,
    setting: str = "players",
) -> Agent:
    """A player by name (see the module's docstring); `beside` is the other player's name. `setting`: what names it."""
    if name == CHAT and parts.chat is not None:
        return parts.chat
    limits, game, places = parts.algo, parts.env["game"], seats(parts.env)
    if is_model(name):
        if bare(name) == "base":
            called, (policy, style) = name, find_base(cfg, parts, device, beside)
        else:
            called, policy = called_in_games(name), run_policy(name, game, device)
            style = style_of(policy_folder(name), parts.env)
        if name.endswith(SUFFIX):
            planner = planner_config(cfg)
            return planning_agent(called, policy, limits, places, cfg.temperature, planner, game, style=style)
        return model_agent(called, policy, limits, places, cfg.temperature, style)
    return text_player(name, game, setting)


def is_model(name: str) -> bool:
    """Whether this names a language model. UserError as of `is_run`."""
    return bare(name) == "base" or is_run(name)


def text_player(name: str, game: str, setting: str = "players") -> Agent:
    """A player without a model, by name. UserError, naming the setting, where there is none."""
    try:
        return scripted(game, "" if name == "scripted" else name)
    except UserError as error:
        raise UserError(
            f"{setting}: {name} is neither a run's folder nor base, scripted, random or chat. {error}"
        ) from error


def check_names(names: Sequence[str], voices: Sequence[str | None], game: str) -> None:
    """Refuses players that are not there, and voices that they cannot have, before a base is made for any."""
    for name in names:
        if not is_model(name) and name != CHAT:
            text_player(name, game)
    for number, (name, voice) in enumerate(zip(names, voices, strict=False)):
        if voice is not None and not is_model(name):
            raise UserError(f"voices[{number}]={voice}: {name} is no language model; only those take another's voice")
        if voice not in (None, "silence") and not is_model(voice):
            raise UserError(f"voices[{number}]={voice}: is no language model; name a run's folder, base or silence")


def find_base(cfg: DictConfig, parts: Parts, device: torch.device, beside: str) -> tuple[Policy, str | None]:
    """The base of the run that `beside` names, else of the configuration; and the style that it reads."""
    folder = base_beside(beside)
    if folder is not None:
        return load_policy(folder, device), style_of(folder, parts.env)
    policy, _ = configured_base(cfg, parts, device)
    return policy, parts.env.get("style")


def configured_base(cfg: DictConfig, parts: Parts, device: torch.device) -> tuple[Policy, Path | None]:
    """The base of the configuration, and its folder: that of training's split of contexts, whichever is played."""
    env = {**parts.env, **({"split": "train"} if "split" in parts.env else {})}
    return base_policy(
        parts.model, parts.base, env, cache=Path(cfg.cache), human_data=cfg.data.dond, device=device, report=say
    )


def base_beside(name: str) -> Path | None:
    """Where the base is kept that the run of this name began with; None where it names no run."""
    if not is_run(name):
        return None
    if started_from(policy_folder(name)) is None:
        raise UserError(f"players: {name} started from an untouched model; evaluate that with model=hf players=[base]")
    return base_folder(run_of(name), policy_folder(name))


def with_room(
    cfg: DictConfig, parts: Parts, games: int, players: Sequence[tuple[str, str]], device: torch.device
) -> Parts:
    """The parts, whose `algo` says how many of the `games` are played at a time: `concurrency`, or what fits into
    memory.

    Prints what caches of these players take, each beside another as `find_player` takes them. UserError where not even
    one game fits.
    """
    parts = replace(parts, algo=replace(parts.algo, games=games, concurrency=cfg.concurrency))
    caches: list[Slots] = []
    models = 0
    for name, beside in players:
        if bare(name) == "base":
            folder = base_beside(beside)
            config = parts.model.lm_config() if folder is None else load_config(str(folder))
        elif is_run(name):
            config = player_config(name)
        else:
            continue
        context, more = parts.algo.context, SLOTS if name.endswith(SUFFIX) else 0
        caches.append(Slots.of(config, context, seats(parts.env), more, parts.algo.play_bf16, parts.algo.decode_steps))
        models += size_of(config, context).weights
    if not caches:
        return parts
    if parts.algo.play_bf16:
        check_bf16(device, "algo.play_bf16")
    fit = check_memory(
        caches, models, concurrency=parts.algo.at_once, setting="concurrency", context=parts.algo.context, device=device
    )
    say(fit.line)
    return replace(parts, algo=replace(parts.algo, concurrency=fit.concurrency))


def planner_config(cfg: DictConfig) -> PlannerConfig:
    """How players plan. UserError for plans that would only be noted: an evaluation learns from none."""
    found = make(PlannerConfig, plain(cfg.planner), "planner") if cfg.planner else PlannerConfig()
    if found.choose == "own":
        raise UserError("planner.choose=own: only training notes plans without playing them; must be sample or best")
    return found


def with_planners(cfg: DictConfig, names: Sequence[str], game: str) -> list[str]:
    """The players' names, of whom those plan that end in `+plan`. UserError where somebody could not plan."""
    planner_config(cfg)
    alone = bool(cfg.planner) and not any(name.endswith(SUFFIX) for name in names)
    found = [name + SUFFIX if alone and number == 0 else name for number, name in enumerate(names)]
    for number, (name, voice) in enumerate(zip(found, [*cfg.voices, None, None], strict=False)):
        try:
            check_plans(name, game)
        except UserError as error:
            raise UserError(f"players[{number}]={error}") from error
        if name.endswith(SUFFIX) and game == "dond" and voice is not None:
            raise UserError(
                f"voices[{number}]={voice} would make the proposals of players[{number}]={name} too, so that none is "
                "planned; choose voices=[] or planner=none"
            )
    return found


def voiced(player: Agent, voice: str | None, cfg: DictConfig, parts: Parts, device: torch.device, beside: str) -> Agent:
    """The player with another's voice: its messages are `voice`'s, or none at all (`silence`)."""
    if voice is None:
        return player
    assert isinstance(player, ModelAgent)  # as `check_names` saw
    speaker = SILENCE if voice == "silence" else find_player(voice, cfg, parts, device, beside)
    assert speaker is SILENCE or isinstance(speaker, ModelAgent)
    return Dubbed(player, speaker, player.name)


def as_in_runs(cfg: DictConfig, names: Sequence[str]) -> DictConfig:
    """The configuration with the game, cast and limits that the runs among the players were evaluated in; without a run
    a base plays contexts that it did not learn from.

    What the command line says of `env`, `cast` and `algo` wins. UserError if two runs play games, or have limits, that
    differ in a setting of which it says nothing; and if it asks for another game, model or base than a run's. Styles
    may differ: every model reads its own.
    """
    given: list[str] = list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []
    own = OmegaConf.from_dotlist([o for o in given if o.startswith(("env.", "cast.", "algo."))])
    settings = {}
    for name in names:
        path = run_of(name) / CONFIG
        if path.is_file():
            run_folder = path.parent
            run = OmegaConf.create(run_settings(run_folder))  # plain data: it refers to nothing
            with reading(run_folder):
                env, cast = OmegaConf.merge(run.env, run.eval.env), OmegaConf.merge(run.cast, run.eval.cast)
                found = {"env": env, "cast": cast, "algo": run.algo, "model": run.model, "base": run.base}
                check_sizes(plain(OmegaConf.create(found)), str(run_folder))
            check_decided(given, cfg, run, name)
            settings[name] = OmegaConf.merge(OmegaConf.create(found), own)
    if not settings:
        game = cfg.get("env") or {}
        of_base = any(bare(name) == "base" or is_run(name) for name in names)  # a base may be named by its folder
        if of_base and "split" in game and "split" not in own.get("env", {}):
            settings["base"] = OmegaConf.create({"env": {**game, "split": "test"}})
        else:
            return cfg
    limits = ("algo.max_new_tokens", "algo.context")
    games = [
        {f"env.{key}": value for key, value in plain(each.env).items()}
        | {limit: OmegaConf.select(each, limit) for limit in limits}
        for each in settings.values()
    ]
    keys = dict.fromkeys(key for game in games for key in game)
    keys.pop("env.style", None)  # each reads its own
    differ = sorted(key for key in keys if any(game.get(key) != games[0].get(key) for game in games))
    if differ:
        raise UserError(
            f"players: the runs {' and '.join(settings)} differ in {', '.join(differ)}: choose for all, as in "
            f"{differ[0]}={'null' if (first := games[0].get(differ[0])) is None else first}"
        )
    merged = OmegaConf.create({**cfg, **next(iter(settings.values()))})
    assert isinstance(merged, DictConfig)
    return merged


def check_decided(given: Sequence[str], cfg: DictConfig, run: DictConfig, name: str) -> None:
    """Refuses what the command line says of the game, the model or the base where a run says otherwise: the run plays
    by its own."""
    tells = {"env": "env.game", "model": "model.kind", "base": "base.data"}  # what sets a group's choices apart
    for override in given:
        key = override.partition("=")[0]
        if override == "base=human" and cfg.data.dond:  # nobody need have said it: the data imply it
            continue
        if key in tells or key.startswith(("model.", "base.")):
            wanted, own = (OmegaConf.select(each, tells.get(key, key)) for each in (cfg, run))
            if wanted != own:
                limit = f"algo.{key.rpartition('.')[2]}"
                other = f"; {limit} limits it here" if OmegaConf.select(run, limit, default=None) is not None else ""
                raise UserError(f"{override}: {name} decides that, by {tells.get(key, key)}={own}; leave it out{other}")


def of_player(name: str, overall: Metrics, own: Metrics) -> Metrics:
    """One player's column where two met: its own points and score, and what it said, did wrong and believed."""
    suffix = f"/{name}"
    games = {metric.removesuffix(suffix): found for metric, found in overall.items() if metric.endswith(suffix)}
    return {**games, **{metric: found for metric, found in own.items() if not metric.startswith("game/")}}


def by_message_table(entries: Sequence[Metrics]) -> str:
    """Belief by the number of messages heard, beside the exact prior's, as a text table."""
    names = ("log_loss", "prior_log_loss", "brier", "prior_brier", "accuracy", "prior_accuracy")
    rows = {str(k): {n: entry[n] for n in names if n in entry} for k, entry in enumerate(entries[:7])}
    return format_table(rows, [name for name in names if any(name in row for row in rows.values())])


@command("evaluate", implies={"data.dond": "base=human"})
def main(cfg: DictConfig) -> None:
    """Plays and prints; with `out=FOLDER` also writes `evaluation.json`, `table.csv` and the transcripts."""
    named = [cfg.players] if isinstance(cfg.players, str) else cfg.players
    names = [in_runs(str(name), cfg.runs) for name in named]
    if not 1 <= len(names) <= 2:
        raise UserError(f"players={names}: name one player (it plays itself) or two")
    for name in ("games", "concurrency"):
        check_count(cfg[name], name)
    check_temperature(cfg.temperature, "temperature")
    check_count(cfg.seed, "seed", 0)
    if cfg.sampling is not None:
        check_count(cfg.sampling, "sampling", 0)
    cfg = as_in_runs(cfg, names)
    partners = [str(seats.partner) for seats in cast_of(plain(cfg)["cast"]).values() if seats.partners]
    parts = build(cfg, [*names, *partners, *map(str, cfg.voices)], learns=False)
    make_env = env_maker(parts.env)
    places(parts.cast, make_env())  # refuses a cast that is another game's
    if cfg.out:
        check_writable(Path(cfg.out), "out")
    device = pick_device(cfg.device)
    set_threads(cfg.threads)
    voices = [*cfg.voices, None, None]
    if len(cfg.voices) > len(names):
        raise UserError(f"voices={list(cfg.voices)}: at most one for each of players={names}")
    names = with_planners(cfg, names, parts.env["game"])
    check_names(names, voices, parts.env["game"])
    # one agent in all seats
    itself = len(set(names)) == 1 and len(set(voices[: len(names)])) == 1
    run = next((name for name in names if is_run(name)), names[0])  # whose base is meant by `base`
    role_seats = next(iter(parts.cast.values()))
    many_roles = len(parts.cast) > 1 and len(names) == 2
    players = [(names[0], names[-1]), *([] if itself else [(names[-1], names[0])])]
    players += [(voice, run) for voice in voices[: len(players)] if voice is not None]
    players += [(role_seats.partner, run)] if many_roles and role_seats.partners else []
    drawn = each_context(parts.env, cfg.seed) if cfg.each_context else draw_games(cfg.seed, EVALUATION, count=cfg.games)
    drawn = [replace(game, sampling=cfg.sampling) for game in drawn]
    parts = with_room(cfg, parts, len(drawn), players, device)
    first = find_player(names[0], cfg, parts, device, names[-1])
    second = first if itself else find_player(names[-1], cfg, parts, device, names[0])
    agents = [voiced(first, voices[0], cfg, parts, device, run)]
    agents.append(agents[0] if itself else voiced(second, voices[1], cfg, parts, device, run))
    partner = None
    is_model = is_run(role_seats.partner) or bare(role_seats.partner) == "base"
    if many_roles and role_seats.partners and (isinstance(first, ModelAgent) or not is_model):
        partner = find_player(role_seats.partner, cfg, parts, device, run)
    if many_roles and first.name in (second.name, getattr(partner, "name", None)):
        agents[0] = first = Alias(agents[0], "measured")
    seated = role_against_role(agents[0], agents[1], parts.cast, partner) if many_roles else turn_about(*agents)
    bar = Bar(enabled=cfg.progress)
    bar.stage(" v ".join(names), len(drawn))
    episodes = rollout(drawn, seated, make_env, parts.algo.concurrency, bar.advance)
    bar.close()
    objective = float(parts.env.get("objective", 0.0))
    label = " v ".join(dict.fromkeys(names))
    game = parts.env["game"]
    conditions = {label: metrics(episodes, game, objective, {first.name} if many_roles else None)}
    for agent in (first.name, second.name) if first.name != second.name and not many_roles else ():
        conditions[agent] = of_player(agent, conditions[label], metrics(episodes, game, objective, {agent}))
    entries = belief_by_message(episodes, players={first.name} if many_roles else None)
    if cfg.out:
        out = Path(cfg.out)
        about = {
            "game": game,
            "objective": objective,
            "games": len(drawn),
            "concurrency": parts.algo.at_once,
            "seed": cfg.seed,
            "sampling": cfg.sampling,
            "players": names,
            **({"chat": chat_figures(parts.chat, drawn)} if parts.chat else {}),
        }
        write_episodes(out / "episodes.jsonl", episodes)
        by_message = {label: entries}
        write_json(out / "evaluation.json", evaluation_to_json(conditions, by_message, **about))
        order = rows_of(conditions)
        rows = [(arm, name, found[name]) for arm, found in conditions.items() for name in order if name in found]
        write_table(out / "table.csv", [TableRow(arm, name, i.mean, i.low, i.high, 1, i.n) for arm, name, i in rows])
    show(conditions, {label: episode_to_json(episodes[0])})
    if entries:
        say("\nbelief after so many messages, beside the exact prior without any talk")
        say(by_message_table(entries))
    if parts.chat:
        say(f"\n{parts.chat.summary()}")


def chat_figures(chat: ChatAgent, games: Sequence[Game]) -> dict[str, Any]:
    """What the endpoint was asked for, and which seats it lost."""
    lost = [
        {"game": number, "seed": games[number].seed, "agent": agent, "reason": reason.value}
        for (number, agent), reason in sorted(chat.lost)
    ]
    return {**chat.figures(), "lost_seats": lost}


if __name__ == "__main__":
    main()
