"""A training run on this machine: its specification with everything that depends on devices and other runs' files."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from experiments.setup.bands import Expected
from experiments.setup.devices import check_bf16, pick_device
from experiments.setup.players import (
    bare,
    called_in_games,
    check_game,
    check_intents,
    check_players,
    check_questions,
    intents_of,
    is_run,
    played_as,
    policy_folder,
    run_of,
)
from experiments.setup.spec import RunSpec
from marl.agents.chat import CHAT, ChatAgent
from marl.common.errors import UserError
from marl.common.files import digest, reading
from marl.intents.agent import ACTION
from marl.model.loading import load_config, load_tokens
from marl.model.lora import AdapterConfig, adapter_bytes, read_adapter
from marl.pretraining.base import base_folder, base_settings
from marl.pretraining.corpus import data_files
from marl.rollout.cast import LEARNERS, PAST, players_of
from marl.rollout.games import env_maker, file_digests
from marl.rollout.seeds import WARM_START, Seeds
from marl.storage.checkpoint import adapter_base, folder_digest, is_adapter, model_digest
from marl.storage.folder import CARD, hardware, read_run_card, run_settings


@dataclass(frozen=True)
class Work:
    """A run that is ready to begin. `expected`: what healthy runs of this experiment look like, if that is recorded.
    `lock`: of its folder; the first process holds it."""

    spec: RunSpec
    device: torch.device
    make_env: Callable[[], Any]
    make_test_env: Callable[[], Any]
    chat: ChatAgent | None  # the player behind an endpoint, where one plays
    expected: Expected | None = None
    lock: TextIO | None = None
    game_bytes: int = 0  # of caches, for each game that is played at a time

    @classmethod
    def of(cls, spec: RunSpec) -> Work:
        """Checks everything that can be checked before a model is made. UserError where the run could not be made."""
        # A refused key or a spent budget stops a run, which would else learn from partners that say nothing.
        chat = ChatAgent(spec.chat, stops=True) if spec.chat else None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            if chat:
                raise UserError(
                    f"cast: {CHAT} plays in runs of one process, whose calls can be counted. Start without torchrun."
                )
            for role, config in spec.cast.items():
                if config.pool:
                    raise UserError(
                        f"cast.{role}.pool={config.pool}: past selves play in one process only. Start without "
                        "torchrun, or set it to 0."
                    )
        make_env, make_test_env = env_maker(spec.env), env_maker(spec.test_env)
        check_players(spec.cast, spec.env, make_env())
        check_players(spec.test_cast, spec.test_env, make_test_env())
        work = cls(spec, pick_device(spec.device), make_env, make_test_env, chat)
        check_listeners(spec)
        check_intents(spec.algo, spec.env)
        for name, run in spec.init.items():
            if not is_run(start_of(spec, name)):
                raise UserError(f"init.{name}={run}: must be the folder of a finished run, or null to start from base")
            check_game(start_of(spec, name), spec.env["game"])
            check_questions(start_of(spec, name), spec.env)
        for setting, used in (
            ("algo.update.bf16", spec.algo.update.bf16),
            ("algo.play_bf16", spec.algo.play_bf16),
            ("base.bf16", spec.base.bf16),
            ("model.lora.bf16", spec.model.dtype == torch.bfloat16),
        ):
            if used:
                check_bf16(work.device, setting)
        if spec.model.kind == "hf":
            load_config(spec.model.name)  # first: it says of a folder what is wrong with its weights' kind
            load_tokens(spec.model.name)
        check_adapters(spec)
        return work

    def at_once(self, concurrency: int, game_bytes: int = 0) -> Work:
        """Returns the same work, so many games at a time, whose caches take so many bytes each."""
        spec = replace(self.spec, algo=replace(self.spec.algo, concurrency=concurrency))
        return replace(self, spec=spec, game_bytes=game_bytes)


def check_adapters(spec: RunSpec) -> None:
    """Refuses an adapter that the model cannot have, and runs to start from that are not of the same kind."""
    lora = spec.model.lora
    if spec.model.kind == "hf" and is_adapter(spec.model.name):
        raise UserError(
            f"model.name={spec.model.name}: this is an adapter, not a whole model. Merge it with its base first "
            "(marl.merge), or start from its run by init.learner."
        )
    if lora:
        adapter_bytes(spec.model.lm_config(), lora)
    own = digest_of_base(spec) if lora and spec.init else ""
    for name, run in spec.init.items():
        folder = policy_folder(start_of(spec, name))
        if is_adapter(folder) != (lora is not None):
            it, this = ("an adapter", "all weights") if is_adapter(folder) else ("all weights", "an adapter")
            raise UserError(
                f"init.{name}={run}: it trained {it}, and this run trains {this}. Start from a run of the same kind; "
                "marl.merge makes a model of an adapter"
            )
        if lora:
            _, adapted, bf16 = adapter_base(folder)
            if own and adapted != own:
                raise for_another_base(name, run)
            theirs = read_adapter(folder, bf16)
            if (theirs.form, theirs.bf16) != (lora.form, lora.bf16):
                raise UserError(
                    f"init.{name}={run}: its adapter has {in_words(theirs)}, and this run's has {in_words(lora)}. Give "
                    "both the same model.lora."
                )


def in_words(lora: AdapterConfig) -> str:
    rank, alpha, targets = lora.form
    listed = targets if isinstance(targets, str) else f"[{','.join(targets)}]"
    return f"rank {rank}, alpha {alpha}, targets {listed} and bf16 {str(lora.bf16).lower()}"


def for_another_base(learner: str, run: str) -> UserError:
    return UserError(
        f"init.{learner}={run}: it is an adapter for another base than this run's. Let both start from the same base, "
        "or merge it (marl.merge)"
    )


def digest_of_base(spec: RunSpec) -> str:
    """The digest of the run's base, if it is on this machine already; else empty."""
    folder = Path(spec.model.name)
    if spec.base.data != "none":
        human = spec.human_data if spec.base.data == "human" else None
        folder = base_folder(spec.cache, base_settings(spec.model, spec.base, spec.env, human))
    return model_digest(str(folder)) if folder.is_dir() else ""


def start_of(spec: RunSpec, learner: str) -> str:
    """Returns the folder of the run that a learner starts from; empty: from the base. `runs` is looked into first."""
    run = spec.init.get(learner, "")
    beside = spec.runs / run
    return str(beside) if run and "/" not in run and beside.is_dir() else run


def computed_with(spec: RunSpec, device: torch.device) -> dict[str, Any]:
    """Lists what the last digits of a rollout depend on, beside the code."""
    on = hardware()
    return {
        "torch": torch.__version__,
        "transformers": version("transformers"),
        **({"peft": version("peft")} if spec.model.lora else {}),
        "device": device.type,
        "deterministic": spec.deterministic,
        "algo.concurrency": spec.algo.concurrency,
        **{name: on[name] for name in ("instructions", "threads", "gpu")},
    }


def inputs_of(spec: RunSpec) -> dict[str, str]:
    """Returns what a run reads beside its base, by name, as digests: files of games, policies of other runs, data."""
    found = dict(file_digests(spec.env, spec.test_env).get("files", {}))
    for cast in (spec.cast, spec.test_cast):
        found |= played_as(cast, spec.algo).get("policies", {})
    if intents_folder := intents_of(spec.algo):
        found[f"algo.intents={intents_folder}"] = folder_digest(intents_folder / ACTION)
    if spec.human_data:
        found["data.dond"] = digest(data_files(Path(spec.human_data)))
    for name, run in spec.init.items():
        found[f"init.{name}={run}"] = folder_digest(policy_folder(start_of(spec, name)))
    return found


def check_listeners(spec: RunSpec) -> None:
    """Refuses a speaking reward for the beliefs of a player who never listens: it might be 0 throughout."""
    for term, reward in spec.rewards.items():
        deaf = getattr(reward, "adversaries", ())
        seated = players_of({role: config for role, config in spec.cast.items() if role not in deaf})
        listeners = [name for name in seated if answers_questions(name)]
        for name in getattr(reward, "players", ()):
            if name not in (*listeners, *(called_in_games(each) for each in listeners if "/" in each)):
                raise UserError(
                    f"reward.{term}.players: {name} is none of those who listen, {', '.join(listeners)}. Name one of "
                    "them, or seat it (cast.ROLE.partner and partners)."
                )


def answers_questions(player: str) -> bool:
    """Returns whether a player answers belief questions: language models do, scripts and endpoints don't."""
    return player in LEARNERS or player.startswith(PAST) or bare(player) == "base" or is_run(bare(player))


def seeds_of(spec: RunSpec) -> Seeds:
    """Returns the seeds of training's games, draws and order of rows.

    A run that starts where another one ended has seeds that no run before it in this chain has.
    """
    own, links = spec.seeds, warm_starts(spec)

    def chained(seed: int) -> int:
        if not links:
            return seed
        chain = [] if links == 1 else [links]
        return int(np.random.SeedSequence([seed, WARM_START, *chain]).generate_state(1)[0])

    common = chained(spec.seed)
    return Seeds(
        games=common if own.games is None else chained(own.games),
        sampling=None if own.sampling is None else chained(own.sampling),
        shuffling=common if own.shuffling is None else chained(own.shuffling),
    )


def warm_starts(spec: RunSpec) -> int:
    """Counts the runs, each starting from the other, between this one and the base."""
    links = 0
    for name in spec.init:
        folder = run_of(start_of(spec, name))
        before = 0
        if (folder / CARD).exists():
            with reading(folder):
                started = any((run_settings(folder).get("init") or {}).values())
                before = int((read_run_card(folder) or {}).get("warm_starts", started))
        links = max(links, 1 + before)
    return links
