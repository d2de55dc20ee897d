"""Lowers `concurrency` to the games whose caches fit into memory beside the models."""

import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from experiments.launch.terminal import say
from experiments.setup.devices import check_bf16
from experiments.setup.entrants import trained_base
from experiments.setup.players import (
    action_model,
    bare,
    bytes_of_players,
    caches_of,
    is_run,
    player_config,
    player_dtype,
    player_slots,
    policy_folder,
)
from experiments.setup.spec import PlaySpec
from experiments.setup.work import Work, start_of
from marl.decoding.memory import Fit, Slots, check_memory, learning_bytes
from marl.decoding.probes import size_of
from marl.losses import any_reads
from marl.model.loading import check_context, load_config, load_tokenizer
from marl.model.lora import adapter_bytes
from marl.planning.planner import SLOTS
from marl.pretraining.config import ModelConfig
from marl.rollout.cast import players_of
from marl.rollout.games import player_count
from marl.storage.checkpoint import adapter_base, is_adapter, model_digest


def fit_to_memory(spec: PlaySpec, games: int, players: Sequence[tuple[str, str]], device: torch.device) -> PlaySpec:
    """Returns the specification with `algo.concurrency` lowered to what fits into memory, and says what caches take.

    `players`: each with the player beside it, as `find_player` takes them. UserError where not even one game fits.
    """
    spec = replace(spec, algo=replace(spec.algo, games=games, concurrency=spec.concurrency))
    algo, caches, models = spec.algo, [], 0
    runs: list[str] = []
    held: set[str] = set()  # digests of bases that are counted
    for name, beside in players:
        dtype = torch.float32
        if bare(name) == "base":
            folder = trained_base(spec, beside)
            config = spec.model.lm_config() if folder is None else load_config(str(folder))
            models += size_of(config, algo.context).weights
            held |= {model_digest(str(folder))} if folder else set()
        elif is_run(name):
            config, dtype = player_config(name), player_dtype(name)
            runs.append(name)
        else:
            continue
        runs += [str(action)] if (action := action_model(name)) else []
        caches += caches_of(
            name, config, algo.context, player_count(spec.env), spec.cicero, bf16=algo.play_bf16, dtype=dtype
        )
    if not caches:
        return spec
    models += bytes_of_players(runs, algo.context, held)
    if algo.play_bf16:
        check_bf16(device, "algo.play_bf16")
    fit = check_memory(
        caches, models, concurrency=algo.at_once, setting="concurrency", context=algo.context, device=device
    )
    say(fit.line)
    return replace(spec, algo=replace(algo, concurrency=fit.concurrency))


def may_ask_beside(model: ModelConfig) -> bool:
    """Tells whether rows of the update may have questions behind them: `auto` asks chat models so."""
    if model.questions == "auto" and model.kind == "hf":
        return bool(getattr(load_tokenizer(model.name), "chat_template", None))
    return model.questions == "beside"


def memory_of_run(work: Work) -> Fit:
    """Finds how many games at a time fit, and what their caches take. UserError where not even one fits."""
    spec, device = work.spec, work.device
    algo, context, base = spec.algo, spec.algo.context, spec.model.lm_config()
    learners = {n: player_config(run) if (run := start_of(spec, n)) else base for n in spec.learners}
    configs = {"base": base, **learners}
    for config in configs.values():
        check_context(config, context, "model.context" if context == spec.model.context else "algo.context")
    env, test_env = work.make_env(), work.make_test_env()
    lora, dtype = spec.model.lora, spec.model.dtype
    names = (*players_of(spec.cast), *players_of(spec.test_cast))
    folders = [policy_folder(name) for name in names if name not in configs and is_run(name)]
    held = [adapter_base(folder)[1] for folder in folders if is_adapter(folder)][:1]  # this run's base, as a rule
    playing, runs = player_slots(spec.cast, env, algo, configs, dtype, held)
    (watched, more_runs), (tested, _) = (
        player_slots(spec.test_cast, test_env, replace(algo, games=games), configs, dtype, held)
        for games in (max(spec.eval.games, 1), spec.eval.final_games)
    )
    # weights, gradients and two moments of what each learner trains; the base beside them
    models, learning = size_of(base, context, dtype).weights, 0
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    for config in learners.values():
        weights = adapter_bytes(config, lora) if lora else size_of(config, context).weights
        # Split, a learner is whole while games are played, beside its part of everything.
        models += weights + 4 * weights // processes if spec.shard and processes > 1 else 4 * weights
        one_pass = learning_bytes(
            config, rows=max(algo.update.token_budget // context, 1), length=context, replies=context // 2,
            bf16=algo.update.bf16 or dtype == torch.bfloat16, gradient_checkpointing=algo.update.gradient_checkpointing,
            beside=may_ask_beside(spec.model), split=spec.shard and processes > 1,
        )  # fmt: skip
        learning = max(learning, one_pass)
    caches = [*playing, *(watched if spec.eval.games else ())]  # played in the midst of training, whose caches stay
    if any_reads(spec.losses, "planned"):  # plans are weighed with slots of their own
        caches = [*caches, *(Slots.of(config, context, 0, SLOTS) for config in learners.values())]
    return check_memory(
        caches, models + runs + more_runs, concurrency=algo.concurrency, setting="algo.concurrency",
        context=context, device=device, learning=learning, later=tested,
    )  # fmt: skip
