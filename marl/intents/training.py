"""Trains the models that intents need on human dialogues, each once, and keeps them.

The action model learns from the truthful views alone (`truthful.unfaithful`): some of them whole, the others cut after
a message, with the end that annotation injects, as long as the claim does not contradict what was said by then.
Dialogue models start from its weights. One learns from the same dialogues under a grounding that is drawn for each, and
the model of each arm (`streams.ARMS`) goes on from it, with lessons (`borrowed`) where it is told intents and so set.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from envs.dond.replies import PROPOSE
from envs.dond.rules import Triple
from envs.human_dond import HumanView, Split, Step, read_split
from marl.common.errors import UserError
from marl.common.files import canonical, read_json, write_json
from marl.intents.annotate import annotate, cut_after
from marl.intents.borrowed import Lessons, in_lessons, learnable, library
from marl.intents.claims import ClaimReader
from marl.intents.streams import ARMS, FORM, INTENT_ARMS, Intent, grounded, unasked
from marl.intents.truthful import OTHER, unfaithful
from marl.model.optim import MuonAndAdamW
from marl.model.policy import Policy, dropout
from marl.pretraining import corpus
from marl.pretraining.base import from_scratch
from marl.pretraining.config import BaseConfig, ModelConfig
from marl.pretraining.fit import fit
from marl.rollout.games import env_maker
from marl.storage.checkpoint import load_policy, make_once, read_card, save_policy

CUTS = 107  # of the seed
WHOLE = 0.35  # share of the dialogues that an action model reads whole
MIXED = "mixed"  # instead of an arm: each dialogue in one that is drawn for it
CONTEXT = 512  # tokens of a human dialogue's stream at most
NO_LESSONS = Lessons()
FORMAT = 3  # raise it when the same settings make other models

Progress = Callable[[str, int, int], None]  # what is trained, steps taken, all steps


def kept_policy(
    folder: Path, made_of: Mapping[str, Any], make: Callable[[], tuple[Policy, Mapping[str, float]]],
    device: torch.device | str = "cpu", report: Callable[[str], None] = print, game: str = "dond",
) -> Policy:  # fmt: skip
    """The policy of these settings, from `folder`, or made and kept there."""
    about = {"format": FORMAT, **made_of}

    def save() -> None:
        policy, figures = make()
        save_policy(folder, policy, {"made_of": about, "figures": dict(figures), "game": game})

    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        make_once(folder, save, report)
    if canonical(read_card(folder).get("made_of")) != canonical(about):
        raise UserError(f"{folder} holds a model made of other settings (see its policy.json). Remove it")
    return load_policy(folder, device)


def action_model(
    model: ModelConfig, base: BaseConfig, env: Mapping[str, Any], data: str, folder: Path, *,
    device: torch.device | str = "cpu", progress: Progress = lambda what, done, total: None,
    report: Callable[[str], None] = print, start: Policy | None = None, start_digest: str = "",
) -> Policy:  # fmt: skip
    """The model whose claims are read as intents: trained as `base=human`, on truthful views only, and as the module
    says. From scratch, or on from a copy of `start`."""

    def make() -> tuple[Policy, Mapping[str, float]]:
        games = corpus.variants(env, base.vary)
        found = corpus.recorded(data, "train", games, base, refuse=unfaithful)
        left_out = ", ".join(f"{count} {why}" for why, count in found.left_out.items())
        report(f"truthful views: {len(found.steps)} of {len(set(found.dialogues))} dialogues; left out: {left_out}")
        policy = copy.deepcopy(start) if start else untrained(model, base, games, data).to(device)
        learn(
            policy, base, env, data, len(found.steps), lambda d, n: progress("action model", d, n),
            **in_action_model(base.seed),
        )  # fmt: skip
        return policy, {"views": len(found.steps)}

    about = {
        "env": unvaried(env, base),
        "model": model.made_of(),
        "base": asdict(base),
        "data": corpus.data_files(data),
        **({"start": start_digest} if start else {}),
    }
    return kept_policy(folder, {"kind": "action", **about}, make, device, report)


def untrained(model: ModelConfig, base: BaseConfig, games: Sequence[Callable[[], Any]], data: str) -> Policy:
    """A model that has learned nothing yet, but a tokenizer of all dialogues."""
    whole = replace(base, keep="all", human_games=0, deals_only=False)
    texts = corpus.recorded(data, "train", games, whole).texts
    return from_scratch("dond", texts, model, base.seed)


def annotated(
    action: Policy, base: BaseConfig, env: Mapping[str, Any], data: str, split: Split, path: Path
) -> tuple[list[HumanView], dict[int, list[Intent]]]:
    """The views of a split that can be annotated, and their intents, which are kept in `path`.

    Of the training split those that `base` learns from.
    """
    seen: list[HumanView] = []

    def add(view: HumanView, order: Triple, steps: list[Step]) -> corpus.Steps:
        seen.append(view)
        return [*steps]

    make_env = env_maker(env)
    corpus.recorded(data, split, [make_env], base, add=add)
    if not path.exists():
        found = annotate(seen, ClaimReader(action, CONTEXT, at_once=16), make_env())
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {str(index): own for index, own in found.items()})
    kept = read_json(path)
    intents = {int(i): [Intent(tuple(own), tuple(other)) for own, other in each] for i, each in kept.items()}
    return [view for view in seen if view.index in intents], intents


def dialogue_model(
    arm: str, start: Policy, start_digest: str, intents: Mapping[int, Sequence[Intent]], base: BaseConfig,
    env: Mapping[str, Any], data: str, folder: Path, *, device: torch.device | str = "cpu",
    progress: Progress = lambda what, done, total: None, report: Callable[[str], None] = print,
    lessons: Lessons = NO_LESSONS,
) -> Policy:  # fmt: skip
    """A model of messages under what `arm` grounds them in, trained on from a copy of `start`.

    `intents`: those of the training split (`annotate`). All arms learn from the views that have some. `lessons`: what
    arms that are told intents learn first, and beside people's own messages.
    """
    taught = arm in INTENT_ARMS and lessons.epochs > 0

    def make() -> tuple[Policy, Mapping[str, float]]:
        policy = copy.deepcopy(start)
        ways, how = in_arm(arm, intents, base.seed), replace(base, human_games=0)  # those that have intents were chosen
        views = len(corpus.recorded(data, "train", corpus.variants(env, base.vary), how, **ways).steps)
        if taught:
            lent = library([view for view in read_split(data, "train").usable if learnable(view)])
            first = replace(how, epochs=lessons.epochs, learning_rate=lessons.learning_rate, dropout=0.0)
            lesson_ways = in_lessons(arm, intents, lent, base.seed, share=1.0, first=True)
            learn(policy, first, env, data, views, lambda d, n: progress(f"lessons, {arm}", d, n), **lesson_ways)
            ways = in_lessons(arm, intents, lent, base.seed, share=lessons.share, first=False)
        learn(policy, how, env, data, views, lambda d, n: progress(f"dialogue model, {arm}", d, n), **ways)
        return policy, {"views": views}

    about = {
        "env": {**unvaried(env, base), **read_in(env, base)},
        "arm": arm,
        "start": start_digest,
        "base": asdict(base),
        "data": corpus.data_files(data),
        **({"told": FORM} if arm not in ("none", "state") else {}),
        **({"lessons": {**asdict(lessons), "even": True}} if taught else {}),  # earlier ones were not even over claims
    }
    return kept_policy(folder, {"kind": "dialogue", **about}, make, device, report)


def cuts(view: HumanView) -> list[int]:
    """After which messages a dialogue (-1: before any) may be cut for the action model: where YOUR claim does not
    contradict what was said by then, the injected end included."""
    number = sum(text is not None for _, text in view.turns)
    return [after for after in range(-1, number) if unfaithful(cut_after(view, after)) != OTHER]


def in_action_model(seed: int) -> dict[str, Any]:
    """Tells `corpus.recorded` how to show human dialogues to an action model: some of them whole, the others cut, which
    teach claims alone and ask nothing."""
    rng = np.random.default_rng([seed, CUTS])
    shown: set[int] = set()  # the views that were cut in this pass
    places: dict[int, list[int]] = {}

    def cut(view: HumanView) -> HumanView:
        shown.discard(view.index)
        where = places[view.index] = places[view.index] if view.index in places else cuts(view)
        if not where or rng.random() < WHOLE:
            return view
        shown.add(view.index)
        return cut_after(view, where[rng.integers(len(where))])

    def add(view: HumanView, order: Triple, steps: list[Step]) -> corpus.Steps:
        if view.index not in shown:
            return [*steps]
        read: corpus.Steps = []
        for step in unasked(steps):
            given = step[0] == "reply" and not step[1].startswith(PROPOSE)
            read.append(("given", step[1]) if given else step)
        return read

    return {"refuse": unfaithful, "cut": cut, "add": add}


def in_arm(arm: str, intents: Mapping[int, Sequence[Intent]], seed: int = 0) -> dict[str, Any]:
    """Tells `corpus.recorded` how to show human dialogues to a model of this arm. MIXED draws an arm for each."""
    rng = np.random.default_rng([seed, CUTS])

    def add(view: HumanView, order: Triple, steps: list[Step]) -> corpus.Steps:
        own = ARMS[rng.integers(len(ARMS))] if arm == MIXED else arm
        return grounded(steps, own, [intent.renamed(order) for intent in intents[view.index]])

    return {"refuse": lambda view: "" if view.index in intents else "no intent", "add": add}


def read_in(env: Mapping[str, Any], base: BaseConfig) -> dict[str, Any]:
    """The settings of `base.vary` in which dialogues are annotated and measured, where these are not the first values.

    They are part of the names of kept files, since one action model serves all values.
    """
    return {name: env[name] for name, values in base.vary.items() if env.get(name, values[0]) != values[0]}


def unvaried(env: Mapping[str, Any], base: BaseConfig) -> dict[str, Any]:
    """The settings of the game that `base.vary` leaves to `env`."""
    return {name: value for name, value in env.items() if name not in base.vary}


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
