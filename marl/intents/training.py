"""Trains the models that intents need on human dialogues, each once, and keeps them.

The action model learns from the truthful views alone (`truthful.unfaithful`). Dialogue models start from its weights
and learn from the same dialogues under what each message is grounded in (`streams.ARMS`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from envs.dond.rules import Triple
from envs.human_dond import HumanView, Step
from marl.common.errors import UserError
from marl.common.files import canonical, digest
from marl.intents.streams import Intent, grounded
from marl.intents.truthful import unfaithful
from marl.model.optim import MuonAndAdamW
from marl.model.policy import Policy, dropout, tiny_lm
from marl.model.tokens import Tokens, train_tokenizer
from marl.pretraining import corpus
from marl.pretraining.config import BaseConfig, ModelConfig
from marl.pretraining.fit import fit
from marl.rollout.games import game_module
from marl.storage.checkpoint import load_policy, make_once, read_card, save_policy

FORMAT = 1  # raise it when the same settings make other models

Progress = Callable[[str, int, int], None]  # what is trained, steps taken, all steps


def kept_policy(
    folder: Path, made_of: Mapping[str, Any], make: Callable[[], tuple[Policy, Mapping[str, float]]],
    device: torch.device | str = "cpu", report: Callable[[str], None] = print,
) -> Policy:  # fmt: skip
    """The policy of these settings, from `folder`, or made and kept there."""
    about = {"format": FORMAT, **made_of}

    def save() -> None:
        policy, figures = make()
        save_policy(folder, policy, {"made_of": about, "figures": dict(figures), "game": "dond"})

    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        make_once(folder, save, report)
    if canonical(read_card(folder).get("made_of")) != canonical(about):
        raise UserError(f"{folder} holds a model made of other settings (see its policy.json). Remove it")
    return load_policy(folder, device)


def action_model(
    model: ModelConfig, base: BaseConfig, env: Mapping[str, Any], data: str, folder: Path, *,
    device: torch.device | str = "cpu", progress: Progress = lambda what, done, total: None,
    report: Callable[[str], None] = print,
) -> Policy:  # fmt: skip
    """The model whose claims are read as intents: trained as `base=human`, on truthful views only."""

    def make() -> tuple[Policy, Mapping[str, float]]:
        games = corpus.variants(env, base.vary)
        found = corpus.recorded(data, "train", games, base, refuse=unfaithful)
        left_out = ", ".join(f"{count} {why}" for why, count in found.left_out.items())
        report(f"truthful views: {len(found.steps)} of {len(set(found.dialogues))} dialogues; left out: {left_out}")
        whole = replace(base, keep="all", human_games=0, deals_only=False)
        texts = corpus.recorded(data, "train", games, whole).texts
        tokens = Tokens(train_tokenizer(texts, game_module("dond").COMPACT_TOKENS, model.vocab_size))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(base.seed)
            policy = Policy(tiny_lm(tokens.size, **model.shape(), generator_seed=base.seed), tokens).to(device)
        learn(policy, base, env, data, len(found.steps), lambda d, n: progress("action model", d, n), refuse=unfaithful)
        return policy, {"views": len(found.steps)}

    about = {"env": dict(env), "model": model.made_of(), "base": asdict(base), "data": corpus.data_files(data)}
    return kept_policy(folder, {"kind": "action", **about}, make, device, report)


def dialogue_model(
    arm: str, start: Policy, start_digest: str, intents: Mapping[int, Sequence[Intent]], base: BaseConfig,
    env: Mapping[str, Any], data: str, folder: Path, *, device: torch.device | str = "cpu",
    progress: Progress = lambda what, done, total: None, report: Callable[[str], None] = print,
) -> Policy:  # fmt: skip
    """A model of messages under what `arm` grounds them in, trained on from a copy of `start`.

    `intents`: those of the training split (`annotate`). All arms learn from the views that have some.
    """

    def make() -> tuple[Policy, Mapping[str, float]]:
        policy = copy.deepcopy(start)
        ways = in_arm(arm, intents)
        views = len(corpus.recorded(data, "train", corpus.variants(env, base.vary), base, **ways).steps)
        learn(policy, base, env, data, views, lambda d, n: progress(f"dialogue model, {arm}", d, n), **ways)
        return policy, {"views": views}

    about = {"env": dict(env), "arm": arm, "start": start_digest, "base": asdict(base), "data": corpus.data_files(data)}
    return kept_policy(folder, {"kind": "dialogue", **about}, make, device, report)


def in_arm(arm: str, intents: Mapping[int, Sequence[Intent]]) -> dict[str, Any]:
    """How `corpus.recorded` is to show human dialogues to a model of this arm."""

    def add(view: HumanView, order: Triple, steps: list[Step]) -> corpus.Steps:
        return grounded(steps, arm, [intent.renamed(order) for intent in intents[view.index]])

    return {"refuse": lambda view: "" if view.index in intents else "no intent", "add": add}


def learn(
    policy: Policy, base: BaseConfig, env: Mapping[str, Any], data: str, views: int,
    progress: Callable[[int, int], None], **ways: Any,
) -> None:  # fmt: skip
    """Trains on human dialogues for `base.epochs` passes of so many `views`. `ways`: see `corpus.recorded`."""
    steps = base.epochs * math.ceil(views / base.rows)
    draw = corpus.human_epochs(data, corpus.variants(env, base.vary), policy.tokens, base, **ways)
    generator = torch.Generator().manual_seed(base.seed)
    with dropout(policy, base.dropout, generator):
        optimizer = MuonAndAdamW(policy, base.learning_rate, base.weight_decay)
        fit(policy, draw, steps, base, base.losses(), optimizer, lambda done: progress(done, steps))


def folder_of(cache: Path, kind: str, *about: Mapping[str, Any]) -> Path:
    """The folder of a model of these settings."""
    return cache / f"intents-{kind}-{digest({str(i): each for i, each in enumerate(about)})}"
