"""Trains one run: base, learning, evaluation of both on the same games, report.

The same command resumes a run that was stopped, and says so of one that is done. A sweep ends with one table and one
report of its finished runs.
"""

from __future__ import annotations

import copy
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from experiments.final_games import final_evaluation, warn_if_hopeless, watch
from experiments.launch.command import command
from experiments.launch.terminal import Bar, quiet, say
from experiments.report import report_sweep
from experiments.setup.arms import check_arm
from experiments.setup.bands import expected_of, set_beside
from experiments.setup.config import (
    EvalConfig,
    build,
    cast_names,
    check_read,
    config_hash,
    identity,
    make,
    plain,
    run_folder,
)
from experiments.setup.devices import check_bf16, pick_device, set_deterministic, set_threads
from experiments.setup.memory import memory_of_run
from experiments.setup.players import check_players, run_policy, seat_players
from experiments.setup.starts import (
    Work,
    check_listeners,
    check_starts,
    computed_with,
    find_starts,
    inputs_of,
    seeds_of,
    start_of,
    warm_starts,
)
from experiments.show import show
from marl.agents.chat import CHAT
from marl.algorithms.filtered_bc import FilteredBCConfig, train_filtered_bc
from marl.algorithms.ppo import train_ppo
from marl.algorithms.rl_pikl import RLPiklConfig, train_rl_pikl
from marl.algorithms.training import Training
from marl.common.distributed import Ranks, torchrun_ranks
from marl.common.errors import UserError
from marl.common.files import read_bytes
from marl.learning.renaming import renaming
from marl.learning.update import Learner, check_model, make_optimizer
from marl.losses import any_reads
from marl.metrics.wording import of_ones_own
from marl.model.policy import Policy, load_tokenizer
from marl.model.sharding import Shards
from marl.pretraining.base import base_folder, base_policy, base_settings
from marl.report.page import build_report
from marl.report.transcripts import write_episodes
from marl.rollout.cast import learners_of, players_of
from marl.rollout.games import env_maker, exchangeable
from marl.storage.checkpoint import (
    WAY_ON,
    CheckpointConfig,
    check_alike,
    copy_folder,
    folder_digest,
    load_training,
    missing_files,
    newest_checkpoint,
    policy_digest,
    prune,
    read_state,
    save_policy,
    save_training,
    verify_folder,
)
from marl.storage.extend import BEGUN_AS, Longer, Unfit, shorter_run, take_up
from marl.storage.folder import (
    CARD,
    REFERENCE,
    check_there,
    check_unedited,
    claim,
    differences,
    git_commit,
    nearest_run,
    read_run_card,
    run_card,
)
from marl.storage.tracking import METRICS_FILE, TIMING_FILE, Tracker, Unlogged, make_tracker, read_metrics
from marl.types import Episode

PLANNED = 8  # of an iteration's games with a planner, which note every action that it weighed


@command("train", implies={"data.dond": "base=human"}, after=report_sweep, check=check_arm)
def main(cfg: DictConfig) -> Path:
    """One run, from its configuration to its report. Returns its folder."""
    # An endpoint that fails costs its game. But one that refuses the key, or whose budget is spent, would be silent in
    # every game to come: the run stops before it learns from such games, and goes on when it is started again.
    check_read(build(cfg))  # wrong settings are told first
    find_starts(cfg)
    if (measured := train_only(cfg)) and int(os.environ.get("RANK", "0")) == 0:
        say(f"arm={cfg.arm} measures {', '.join(measured)} and trains what it names alone; arm=NAME trains all")
    set_deterministic(cfg.deterministic)
    if (folder := finished(cfg)) is not None:
        return folder
    parts = build(cfg, cast_names(plain(cfg)), stops=True)
    if parts.chat and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"cast: {CHAT} plays in runs of one process, whose calls can be counted; start without torchrun"
        )
    make_env = env_maker(parts.env)
    evaluation = make(EvalConfig, plain(cfg.eval), "eval")
    make(CheckpointConfig, plain(cfg.checkpoint), "checkpoint")
    make_test_env = env_maker({**parts.env, **evaluation.env})
    check_players(parts.cast, parts.env["game"], make_env())
    check_players(evaluation.seating(parts.cast), parts.env["game"], make_test_env())
    learners = learners_of(parts.cast)
    if (turns := getattr(parts.algo, "alternate", 0)) and len(learners) < 2:
        raise UserError(f"algo.alternate={turns}: {learners[0]} learns alone; must be 0")
    if learners[0] not in players_of(evaluation.seating(parts.cast)):
        raise UserError(f"eval.cast: {learners[0]} learns but does not play in evaluation: nothing would be measured")
    if isinstance(parts.algo, FilteredBCConfig | RLPiklConfig) and len(learners) > 1:
        kind = cfg.algo.kind
        raise UserError(f"algo={kind} trains one learner, and the cast has {', '.join(learners)}; use algo=ppo")
    check_listeners(parts)
    check_starts(cfg, learners)
    device = pick_device(cfg.device)
    algo = parts.algo
    for setting, used in (
        ("algo.update.bf16", algo.update.bf16), ("algo.play_bf16", algo.play_bf16), ("base.bf16", parts.base.bf16)
    ):  # fmt: skip
        if used:
            check_bf16(device, setting)
    set_threads(cfg.threads)
    folder = run_folder(cfg)
    fit = memory_of_run(cfg, parts, make_env, make_test_env, device)
    if parts.model.kind == "hf":
        load_tokenizer(parts.model.name)  # refused before there is a folder
    with torchrun_ranks(device) as ranks, leaving_the_device(device):
        parts = replace(parts, algo=replace(parts.algo, concurrency=min(ranks.objects(fit.concurrency))))
        work = Work(cfg, parts, folder, make_env, make_test_env, device)
        if ranks.first:
            say(fit.line)
            if device.type == "cuda" and algo.decode_steps == 1:
                say("for speed on a GPU: algo.decode_steps=8, algo.update.bf16=true")
            bands = expected_of(str(cfg.name), str(cfg.arm), parts.env, overrides=set_beside())
            work = replace(work, expected=bands)
            with claim(folder, written(cfg)) as lock:
                if ranks.size == 1 and finished(cfg) is not None:  # by another process, while this one began
                    return folder
                ranks.wait()  # the others begin once the folder is ours
                lead(replace(work, lock=lock), ranks)
        else:
            with quiet():
                ranks.wait()
                bar = Bar(enabled=False)
                learn(work, base_of(work, bar, ranks)[0], None, Unlogged(), dict, bar, ranks)
    return folder


def finished(cfg: DictConfig) -> Path | None:
    """The run's folder, if the run is done, for which no GPU, no key and no opponents are needed. UserError where it
    was made with other contents of what it read, as far as all of that is still there."""
    folder = run_folder(cfg)
    card = read_run_card(folder)
    if card is None:
        return None
    check_unedited(folder, written(cfg))
    began_with, now = card.get("inputs", {}), {}
    with suppress(UserError, OSError):  # what is not there any more says nothing
        now = inputs_of(cfg, build(cfg))
    for name in now.keys() & began_with.keys():
        if now[name] != began_with[name]:
            raise UserError(
                f"{folder} is done, but {name} is not what it was made with: put the old one back, remove the folder "
                "to make the run anew, or give it another `name`"
            )
    report = folder / "report.html"
    if int(os.environ.get("RANK", "0")) == 0:  # of torchrun's processes the first
        if not report.exists():
            build_report([folder], report, title=cfg.name)
        gone = missing_files(folder / "policy")
        lacks = f"; its policy lacks {', '.join(gone)}, which a new run would make" if gone else ""
        say(f"{folder} is done: its report is {report}{lacks}; change the configuration or remove the folder")
    return folder


def written(cfg: DictConfig) -> str:
    """What makes the run what it is, as its folder keeps it."""
    return OmegaConf.to_yaml(OmegaConf.create(identity(cfg)))


@contextmanager
def leaving_the_device(device: torch.device) -> Iterator[None]:
    """Gives back at the end what torch keeps of a GPU's memory: a sweep's idle worker would hold it against others."""
    try:
        yield
    finally:
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def lead(work: Work, ranks: Ranks) -> None:
    """The run, and everything that is written of it."""
    cfg, parts, folder = work.cfg, work.parts, work.folder
    learners = learners_of(parts.cast)
    inputs, links = inputs_of(cfg, parts), warm_starts(cfg)
    newest = newest_checkpoint(folder / "checkpoints", say)
    now = {
        **computed_with(cfg, parts, work.device), "processes": ranks.size,
        "shard": bool(cfg.shard) and ranks.size > 1, "algo.update.token_budget": parts.algo.update.token_budget,
    }  # fmt: skip
    if newest is None:
        newest = begin_further(work, inputs, now)
    before, began = read_state(newest) if newest else {}, time.monotonic()  # no clock that can be set back
    if newest and before.get("run") != folder.name:
        raise UserError(f"{newest} is of the run {before.get('run')}: put it back there, or {WAY_ON}")
    began_with = before.get("inputs", {}) if newest else inputs
    for name in {**inputs, **began_with}:
        newer = name == "data.dond" and name not in began_with  # earlier versions did not note it
        if not newer and inputs.get(name) != began_with.get(name):
            raise UserError(
                f"{name} is not what this run began with: it was made again, or edited; put the old one back, or "
                f"remove {folder} to begin anew"
            )
    commits = list(dict.fromkeys([*before.get("commits", []), git_commit()]))
    noted = before.get("made_with", [])
    earlier = [noted] if isinstance(noted, dict) else noted  # earlier versions noted the last one alone
    made_with = earlier if now in earlier else [*earlier, now]
    begun_as = {BEGUN_AS: before[BEGUN_AS]} if BEGUN_AS in before else {}
    bar = Bar(enabled=cfg.progress)
    say(f"run {folder}" + (f", {ranks.size} processes" if ranks.size > 1 else ""))
    if newest is None and (differs := nearest_run(folder)):
        say(differs)
    if len(commits) > 1:
        say(f"this run was begun by other code ({', '.join(commits[:-1])}) than now goes on ({commits[-1]})")
    changed = (each for there in earlier for each in differences(there, {name: now.get(name) for name in there}))
    if told := "; ".join(dict.fromkeys(changed)):
        say(f"this run was begun with {told}: its last digits will be those of neither")

    def note() -> dict[str, Any]:
        """What a checkpoint notes of the run so far."""
        seconds = before.get("wall_time", 0.0) + time.monotonic() - began
        lines = lines_of(folder / METRICS_FILE) + lost
        return {
            "run": folder.name, "base": of_base, "wall_time": seconds, "commits": commits, "metrics_lines": lines,
            "made_with": made_with, "inputs": inputs, **begun_as,
            **({"chat": parts.chat.figures(before.get("chat"))} if parts.chat else {}),
        }  # fmt: skip

    with open_tracker(cfg, folder, newest) as tracker:
        kept = lines_of(folder / METRICS_FILE)
        lost = before.get("metrics_lines", kept) - kept
        if lost:
            say(
                f"{folder / METRICS_FILE} has {kept} lines up to the checkpoint, which counted {kept + lost}: curves "
                f"and totals will be those of what is there, and {CARD} will say how many are lost; to put the file "
                "back, stop this run first"
            )
        base, base_folder = base_of(work, bar, ranks)
        of_base = folder_digest(base_folder) if base_folder else policy_digest(base)
        if newest and before.get("base") != of_base:
            raise UserError(
                f"{base_folder or cfg.model.name} is not the base that this run began with: it was made again, by "
                f"other code or on other hardware, or is another version; put the old one back"
                + (f" (without the new one {folder / REFERENCE} is put there)" if base_folder else "")
                + f", or remove {folder} to begin anew"
            )
        reference = folder / REFERENCE
        # Without a checkpoint it is of an attempt of which nothing else is left, and whose base may have been another.
        fits = newest is not None or (not verify_folder(reference) and folder_digest(reference) == of_base)
        if base_folder and not (reference.exists() and fits):
            copy_folder(base_folder, reference)
        policies = learn(work, base, newest, tracker, note, bar, ranks)
    kept_base = str(base_folder) if base_folder else None
    for name, policy in policies.items():
        card = {"game": parts.env["game"], "base": kept_base, "run": folder.name, "learner": name}
        save_policy(folder / ("policy" if name == learners[0] else name), policy, card)
    conditions, examples = final_evaluation(work, base_folder, base, policies, bar)
    bar.close()
    run_card(
        folder,
        config_hash(cfg),
        cfg.seed,
        arm=str(cfg.arm),  # `arm=0` is a number to the command line
        **({"warm_starts": links} if links else {}),
        processes=ranks.size,
        shard=bool(cfg.shard) and ranks.size > 1,
        deterministic=cfg.deterministic,
        git_commit=", ".join(commits),
        made_with=made_with,
        inputs=inputs,
        **begun_as,
        wall_time=round(note()["wall_time"], 1),
        tokens=total(folder / METRICS_FILE, "rollout/tokens"),
        games=total(folder / METRICS_FILE, "rollout/games"),
        base=base_folder.name if base_folder else None,
        base_digest=of_base,
        **({"metrics_lines_lost": lost} if lost else {}),
        figures={name: {m: i.to_json() for m, i in found.items()} for name, found in conditions.items()},
        speed=mean_speed(folder),
        **({"chat": note()["chat"]} if parts.chat else {}),
    )
    build_report([folder], folder / "report.html", title=cfg.name)
    show(conditions, examples, folder / "report.html")
    if parts.chat:
        say(parts.chat.summary())
    verdict = work.expected.verdict(read_metrics(folder / METRICS_FILE)) if work.expected else ""
    if verdict:
        say(verdict)


def begin_further(work: Work, inputs: Mapping[str, str], now: Mapping[str, Any]) -> Path | None:
    """Takes up a finished run that is this one but for fewer iterations. Returns the newest checkpoint that it left,
    now in this run's folder; None where there is none to take up."""
    cfg, parts = work.cfg, work.parts
    short = None if getattr(parts.algo, "anneal_lr", False) else shorter_run(work.folder)
    if short is None or parts.base.data == "none":
        return None
    made_of = base_settings(parts.model, parts.base, parts.env, cfg.data.dond)
    longer = Longer(
        work.folder,
        {"commits": [git_commit()], "made_with": [now], "inputs": inputs},
        base_folder(Path(cfg.cache), made_of),
        make(CheckpointConfig, plain(cfg.checkpoint), "checkpoint"),
        tables=cfg.tracker.kind == "wandb",
    )
    told = f"{short} has the same settings and fewer iterations"
    try:
        newest = take_up(short, longer)
    except Unfit as reason:
        say(f"{told}, but {reason}: this run begins anew")
        return None
    say(f"{told}: this run goes on from its {newest.name}")
    return newest


def base_of(work: Work, bar: Bar, ranks: Ranks) -> tuple[Policy, Path | None]:
    """The base model and where it is kept; of several processes one trains it, and of a run's ranks the first."""
    cfg, parts = work.cfg, work.parts
    if not ranks.first:
        ranks.wait()
    found = base_policy(
        parts.model,
        parts.base,
        parts.env,
        cache=Path(cfg.cache),
        human_data=cfg.data.dond,
        privileged_size=privileged_size(work.make_env) if parts.privileged else 0,
        device=work.device,
        kept=work.folder / REFERENCE,
        progress=bar.count,
        report=say,
    )
    if ranks.first:
        ranks.wait()
    return found


def open_tracker(cfg: DictConfig, folder: Path, newest: Path | None) -> Tracker:
    """The run's tracker, before anything expensive: lines after the newest checkpoint will be written again."""
    return make_tracker(
        cfg.tracker.kind,
        folder,
        name=folder.name,
        run_id=config_hash(cfg),
        config=identity(cfg),
        resume_from_iteration=read_state(newest)["iteration"] if newest else None,
        **{k: v for k, v in cfg.tracker.items() if k != "kind"},
    )


def train_only(cfg: DictConfig) -> list[str]:
    """Sets the weight of every term to 0 that the arm does not train (`only`), wherever it is from, and returns the
    names of those that had one: an arm called `game_only` is one."""
    if str(cfg.arm) not in cfg.only:
        return []
    kept, measured = cfg.only[str(cfg.arm)], []
    if not isinstance(kept, ListConfig):
        raise UserError(f"only.{cfg.arm}={kept}: must be a list of terms, as in [reward.game,loss.policy]")
    for group in ("reward", "loss"):
        for name, term in cfg[group].items():
            if isinstance(term, DictConfig) and f"{group}.{name}" not in kept and term.get("weight", 1.0) != 0:
                with open_dict(term):
                    term.weight = 0.0
                measured.append(f"{group}.{name}")
    return measured


def sizes(policy: Policy) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in policy.lm.named_parameters()}


def learn(
    work: Work,
    base: Policy,
    newest: Path | None,
    tracker: Tracker,
    note: Callable[[], dict[str, Any]],
    bar: Bar,
    ranks: Ranks,
) -> dict[str, Policy]:
    """Trains copies of the base (or of where `init` says to start), from the newest checkpoint if there is one: of
    several ranks the first one knows which it is."""
    cfg, parts, folder, make_env = work.cfg, work.parts, work.folder, work.make_env
    config, game = parts.algo, parts.env["game"]
    policies = {
        name: run_policy(run, game, base.device, base) if (run := start_of(cfg, name)) else copy.deepcopy(base)
        for name in learners_of(parts.cast)
    }
    if ranks.first:
        for name, policy in policies.items():
            if sizes(policy) != sizes(base):
                own, others = (sum(p.numel() for p in each.lm.parameters()) for each in (policy, base))
                say(
                    f"init.{name}={cfg.init[name]}: a model of another shape than the base's, of {own:,} parameters "
                    f"for {others:,}; it learns as it is, whatever model.* says"
                )
    check_alike({"base": base, **policies}, ranks)
    for policy in policies.values():
        check_model(policy, config.update)
    shards = {name: Shards(policy, ranks) for name, policy in policies.items()} if cfg.shard and ranks.size > 1 else {}
    learners = []
    for name, policy in policies.items():
        split = shards.get(name)
        optimizer = make_optimizer(split.split if split else policy, config.update)
        learners.append(Learner(name, policy, base, optimizer, split))
    frozen = seat_players(parts.cast, make_env(), parts.env, base, config, config.temperature, chat=parts.chat)
    trained = {each.name: (each.policy, each.optimizer) for each in learners}
    checkpoints = folder / "checkpoints"
    state = load_training(newest, trained, ranks)
    for split in shards.values():
        split.take()
    start = state["iteration"] if state else 0
    best: dict[str, Any] | None = state.get("best") if state else None  # of the checkpoints that were evaluated
    if start:
        say(f"continuing after iteration {start}")

    def after(iteration: int, found: dict[str, float], episodes: Sequence[Episode]) -> None:
        nonlocal best
        last = iteration == config.iterations
        if work.lock is not None:
            check_there(folder, work.lock)
        tracker.log(iteration, found)
        say(f"{iteration:4d}/{config.iterations}  " + headline(found))
        if iteration == 1 and not cfg.eval.games:  # else the base's evaluation has told
            warn_if_hopeless(work, episodes)
        warning = work.expected.warning(iteration, found) if work.expected else ""
        if warning:
            say(warning)
        score = None
        if last or (cfg.eval.every and iteration % cfg.eval.every == 0):
            score = watch(work, tracker, iteration, base, policies, bar, ranks)
            planned = [episode for episode in episodes if any(turn.planned for turn in episode.turns)]
            if planned and ranks.first:  # games of training: evaluation is played without the planner
                write_episodes(folder / "episodes" / f"planned-{iteration:06d}.jsonl", planned[:PLANNED])
        better = score is not None and (best is None or score > best["score"])
        if better:
            best = {"iteration": iteration, "score": score}
        if better or iteration % cfg.checkpoint.every == 0 or last:
            check_alike(policies, ranks)
            tracker.sync()
            noted, kept = {**note(), "best": best}, best["iteration"] if best else None
            save_training(
                checkpoints, iteration, trained, noted, cfg.checkpoint.keep, ranks, kept, cfg.checkpoint.every
            )

    if start == 0:
        watch(work, tracker, 0, base, policies, bar, ranks)
    rename = None
    if any_reads(parts.losses, "renamed"):
        rename = renaming(base.tokens, exchangeable(parts.env))
        if rename is None:
            say("names are no single tokens of this model, so listening learns from rows as they are, not renamed")
        elif len(make_env().possible_agents) >= rename.families.shape[1]:
            rename = None  # their order is kept, so there is one way to name them
            say("all names play in each game, so listening learns from rows as they are: there are no others")
    training = Training(
        learners, game, make_env, parts.cast, frozen, parts.rewards, parts.losses, seeds_of(cfg), after,
        start=start, progress=bar, rename=rename, ranks=ranks,
    )  # fmt: skip
    if isinstance(config, FilteredBCConfig):
        train_filtered_bc(training, config)
    elif isinstance(config, RLPiklConfig):
        train_rl_pikl(training, config)
    else:
        train_ppo(training, config)
    if ranks.first:  # a run that was stopped while it removed the last ones saves no more
        kept = best["iteration"] if best else None
        prune(checkpoints, config.iterations, cfg.checkpoint.keep, kept, cfg.checkpoint.every)
    return policies


HEADLINE = {  # what a person watches, and how it reads
    "game/score": "score {:.2f}",
    "game/agreement": "agreement {:.0%}",
    "game/win_rate/crewmates": "crewmates win {:.0%}",
    "filter/kept": "kept {:.0%}",
    "belief/accuracy": "belief {:.0%}",
    "loss/listening": "listening {:.2f}",
    "loss/plan": "plan {:.3f}",
    "reward/speaking": "speaking {:+.3f}",
    "loss/kl": "kl {:.2f}",
    "talk/turns": "turns {:.1f}",
    "errors/per_turn": "refused {:.3f}",
    "errors/outgrown": "outgrew model.context {:.1%}",
    "speed/rollout_games_per_second": "{:.0f} games/s",
    "speed/tokens_per_second": "{:,.0f} tokens/s",
    "speed/update_tokens_per_second": "update {:,.0f} tokens/s",
}


def headline(found: dict[str, float]) -> str:
    """An iteration in one line, terms of one's own last."""
    known = [form.format(found[name]) for name, form in HEADLINE.items() if name in found]
    return "  ".join([*known, *(f"{name.rpartition('/')[2]} {found[name]:.3f}" for name in of_ones_own(found))])


def privileged_size(make_env: Any) -> int:
    """How many numbers a privileged critic reads beside the hidden state."""
    env = make_env()
    env.reset(seed=0)
    return len(env.privileged(env.possible_agents[0]))


def lines_of(path: Path) -> int:
    """How many whole lines a file has."""
    return read_bytes(path).count(b"\n")


def total(path: Path, metric: str) -> int:
    """The sum of a metric over all training iterations."""
    return int(sum(row.get(metric, 0) for row in read_metrics(path) if row["phase"] == "train"))


def mean_speed(folder: Path) -> dict[str, float]:
    """Means of the speeds in `timing.jsonl`, over iterations."""
    rows = read_metrics(folder / TIMING_FILE)
    names = sorted({name for row in rows for name in row if name.startswith("speed/")})
    # of updates those that there were: filtered cloning may have had nothing to learn from
    return {name: round(float(np.mean([row[name] for row in rows if row.get(name)] or [0.0])), 2) for name in names}


if __name__ == "__main__":
    main()
