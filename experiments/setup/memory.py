"""Lowers `concurrency` to the games whose caches fit into memory beside the models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from experiments.launch.terminal import say
from experiments.setup.devices import check_bf16
from experiments.setup.entrants import base_beside
from experiments.setup.players import bare, is_run, player_config, player_slots
from experiments.setup.spec import PlaySpec
from experiments.setup.work import Work, start_of
from marl.decoding.memory import Fit, Slots, check_memory, learning_bytes
from marl.decoding.probes import size_of
from marl.losses import any_reads
from marl.model.policy import check_context, load_config
from marl.planning.planner import SLOTS, SUFFIX
from marl.rollout.games import seats


def with_room(spec: PlaySpec, games: int, players: Sequence[tuple[str, str]], device: torch.device) -> PlaySpec:
    """Returns the specification with `algo.concurrency` lowered to what fits into memory, and says what caches take.

    `players`: each with the player beside it, as `find_player` takes them. UserError where not even one game fits.
    """
    spec = replace(spec, algo=replace(spec.algo, games=games, concurrency=spec.concurrency))
    algo, caches, models = spec.algo, [], 0
    for name, beside in players:
        if bare(name) == "base":
            folder = base_beside(beside)
            config = spec.model.lm_config() if folder is None else load_config(str(folder))
        elif is_run(name):
            config = player_config(name)
        else:
            continue
        more = SLOTS if name.endswith(SUFFIX) else 0
        caches.append(Slots.of(config, algo.context, seats(spec.env), more, algo.play_bf16))
        models += size_of(config, algo.context).weights
    if not caches:
        return spec
    if algo.play_bf16:
        check_bf16(device, "algo.play_bf16")
    fit = check_memory(
        caches, models, concurrency=algo.at_once, setting="concurrency", context=algo.context, device=device
    )
    say(fit.line)
    return replace(spec, algo=replace(algo, concurrency=fit.concurrency))


def memory_of_run(work: Work) -> Fit:
    """Finds how many games at a time fit, and what their caches take. UserError where not even one fits."""
    spec, device = work.spec, work.device
    algo, context, base = spec.algo, spec.algo.context, spec.model.lm_config()
    learners = {n: player_config(run) if (run := start_of(spec, n)) else base for n in spec.learners}
    configs = {"base": base, **learners}
    for config in configs.values():
        check_context(config, context, "model.context" if context == spec.model.context else "algo.context")
    env, test_env = work.make_env(), work.make_test_env()
    playing, runs = player_slots(spec.cast, env, algo, configs)
    (watched, more_runs), (tested, _) = (
        player_slots(spec.test_cast, test_env, replace(algo, games=games), configs)
        for games in (max(spec.eval.games, 1), spec.eval.final_games)
    )
    # weights, gradients and two moments of each learner; the base beside them
    models, learning = size_of(base, context).weights, 0
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    for config in learners.values():
        weights = size_of(config, context).weights
        # Split, a learner is whole while games are played, beside its part of everything.
        models += weights + 4 * weights // processes if spec.shard and processes > 1 else 4 * weights
        one_pass = learning_bytes(
            config, rows=max(algo.update.token_budget // context, 1), length=context, replies=context // 2,
            bf16=algo.update.bf16, gradient_checkpointing=algo.update.gradient_checkpointing,
            beside=spec.model.questions != "stream",
        )  # fmt: skip
        learning = max(learning, one_pass)
    caches = [*playing, *(watched if spec.eval.games else ())]  # played in the midst of training, whose caches stay
    if any_reads(spec.losses, "planned"):  # plans are weighed with slots of their own
        caches = [*caches, *(Slots.of(config, context, 0, SLOTS) for config in learners.values())]
    return check_memory(
        caches, models + runs + more_runs, concurrency=algo.concurrency, setting="algo.concurrency",
        context=context, device=device, learning=learning, later=tested,
    )  # fmt: skip
