"""Checks that caches and models fit into memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from omegaconf import DictConfig

from experiments.launch.terminal import say
from experiments.setup.config import EvalConfig, Parts, make, plain
from experiments.setup.devices import check_bf16
from experiments.setup.entrants import base_beside
from experiments.setup.players import bare, is_run, player_config, player_slots
from experiments.setup.starts import start_of
from marl.decoding.memory import Fit, Slots, check_memory, learning_bytes
from marl.decoding.probes import size_of
from marl.losses import any_reads
from marl.model.policy import check_context, load_config
from marl.planning.planner import SLOTS, SUFFIX
from marl.rollout.cast import learners_of
from marl.rollout.games import seats


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
        caches.append(Slots.of(config, context, seats(parts.env), more, parts.algo.play_bf16))
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


def memory_of_run(
    cfg: DictConfig,
    parts: Parts,
    make_env: Callable[[], Any],
    make_test_env: Callable[[], Any],
    device: torch.device,
) -> Fit:
    """How many games at a time fit, and what their caches take. UserError where not even one fits."""
    context, base = parts.algo.context, parts.model.lm_config()
    learners = {n: player_config(run) if (run := start_of(cfg, n)) else base for n in learners_of(parts.cast)}
    configs = {"base": base, **learners}
    for config in configs.values():
        check_context(config, context, "model.context" if context == cfg.model.context else "algo.context")
    evaluation = make(EvalConfig, plain(cfg.eval), "eval")
    playing, runs = player_slots(parts.cast, make_env(), parts.algo, configs)
    (watched, more_runs), (tested, _) = (
        player_slots(evaluation.seating(parts.cast), make_test_env(), replace(parts.algo, games=games), configs)
        for games in (max(evaluation.games, 1), evaluation.final_games)
    )
    # weights, gradients and two moments of each learner; the base beside them
    models, learning = size_of(base, context).weights, 0
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    for config in learners.values():
        weights = size_of(config, context).weights
        # Split, a learner is whole while games are played, beside its part of everything.
        models += weights + 4 * weights // processes if cfg.shard and processes > 1 else 4 * weights
        update = parts.algo.update
        one_pass = learning_bytes(
            config, rows=max(update.token_budget // context, 1), length=context, replies=context // 2,
            bf16=update.bf16, gradient_checkpointing=update.gradient_checkpointing,
        )  # fmt: skip
        learning = max(learning, one_pass)
    caches = [*playing, *(watched if evaluation.games else ())]  # played in the midst of training, whose caches stay
    if any_reads(parts.losses, "planned"):  # plans are weighed with slots of their own
        caches = [*caches, *(Slots.of(config, context, 0, SLOTS) for config in learners.values())]
    return check_memory(
        caches, models + runs + more_runs, concurrency=parts.algo.concurrency, setting="algo.concurrency",
        context=context, device=device, learning=learning, later=tested,
    )  # fmt: skip
