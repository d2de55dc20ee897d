"""Makes or loads the models of one seed of experiments.studies.intents, and annotates messages with intents."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from envs.human_dond import read_split
from experiments.launch.terminal import say
from experiments.setup.spec import PlaySpec
from experiments.studies.cells import Workspace
from experiments.studies.talkers import SeedModels
from marl.common.errors import UserError
from marl.common.files import digest
from marl.intents.agent import ACTION
from marl.intents.borrowed import Lessons
from marl.intents.standin import write_scripted
from marl.intents.streams import INTENT_ARMS, Intent
from marl.intents.training import MIXED, NO_LESSONS, action_model, annotated, dialogue_model, read_in, unvaried
from marl.model.policy import Policy
from marl.storage.checkpoint import folder_digest

ROUND = 1000  # between the seeds of two rounds


@dataclass(frozen=True)
class Made(SeedModels):
    """The models and annotations of one seed."""

    data: str
    action: Policy
    views: list[Any]  # of the measured split
    intents: dict[int, list[Intent]]
    dialogue: Mapping[str, Policy]  # by arm


def read_views(data: str, split: Any) -> list[Any]:
    """The usable views of a split."""
    try:
        return list(read_split(data, split).usable)
    except (OSError, ValueError) as error:
        raise UserError(f"data.dond={data}: {error}") from error


def stand_in(cfg: DictConfig, spec: PlaySpec, place: Workspace) -> str:
    """The folder of scripted dialogues, which stand in where there are no human ones."""
    env = {**spec.env, "contexts": None}
    folder = place.cells / f"scripted-{digest({'env': env, 'games': cfg.scripted_games})[:8]}"
    say("data.dond=null: scripted dialogues stand in for people's, of whom nothing that follows can tell")
    if not (folder / "test.txt").exists():
        write_scripted(folder, env, cfg.scripted_games)
    return str(folder)


def make_models(seed: int, data: str, cfg: DictConfig, spec: PlaySpec, place: Workspace) -> Made:
    """Loads or trains the models of a seed, and annotates."""
    cache = Path(cfg.cache)
    train_env = {**spec.env, "split": "train"}
    base = replace(spec.base, seed=seed)

    def progress(what: str, done: int, total: int) -> None:
        if done == 1:
            place.bar.stage(f"seed {seed}: {what}", total)
        place.bar.advance(1)
        if done == total:
            place.bar.close()

    how: dict[str, Any] = {"device": place.device, "progress": progress, "report": say}
    origin: Policy | None = None
    start = ""
    for number in range(cfg.rounds):  # what the action models of all seeds start from
        shared = replace(spec.base, seed=spec.base.seed + ROUND * number)
        about = {"base": asdict(shared), "env": unvaried(train_env, base), "model": asdict(spec.model)}
        folder = cache / f"intents-base-{digest({**about, **({'start': start} if start else {})})[:8]}"
        say(f"action model of all seeds, round {number + 1} of {cfg.rounds}: {folder}")
        origin = action_model(spec.model, shared, train_env, data, folder, start=origin, start_digest=start, **how)
        start = folder_digest(folder)
    assert origin is not None
    action, folders = origin, {ACTION: folder}
    if cfg.action_epochs:
        acts = replace(base, epochs=cfg.action_epochs, learning_rate=cfg.action_learning_rate)
        folders = {ACTION: cache / f"intents-action-s{seed}-{digest({'start': start, 'base': asdict(acts)})[:8]}"}
        action = action_model(
            spec.model, acts, train_env, data, folders[ACTION], start=origin, start_digest=start, **how
        )
    start, read = folder_digest(folders[ACTION]), read_in(train_env, base)
    later = replace(base, epochs=max(cfg.epochs, 1), learning_rate=cfg.learning_rate, human_games=cfg.human_games)
    own = replace(later, epochs=cfg.own_epochs)
    learned = place.cells / f"intents-train-{digest({'start': start, 'base': asdict(later), **read})[:8]}.json"
    say(f"seed {seed}: annotating the training dialogues")
    _, taught = annotated(action, later, train_env, data, "train", learned)
    say(f"seed {seed}: {sum(map(len, taught.values()))} replies of {len(taught)} views are annotated")
    tested = place.cells / f"intents-{cfg.split}-{digest({'start': start, **read})[:8]}.json"
    views, intents = annotated(action, replace(base, human_games=0), train_env, data, cfg.split, tested)
    say(f"seed {seed}: dialogue models")
    models: dict[str, Policy] = {}
    first = (action, start, later)  # what all arms have in common, and what each then learns by itself
    for arm in (*([MIXED] if cfg.epochs else []), *cfg.arms):
        begun, begun_digest, learns = first
        if arm != MIXED:
            learns = own
            begun, begun_digest = (models[MIXED], folder_digest(folders[MIXED])) if cfg.epochs else first[:2]
        lessons = Lessons(**dict(cfg.lessons)) if arm in INTENT_ARMS else NO_LESSONS
        settings = {"start": begun_digest, "base": asdict(learns), **read}
        if lessons.epochs:
            settings["lessons"] = asdict(lessons)
        folders[arm] = cache / f"intents-{arm}-s{seed}-{digest(settings)[:8]}"
        models[arm] = dialogue_model(
            arm, begun, begun_digest, taught, learns, train_env, data, folders[arm], lessons=lessons, **how
        )
    for each in (models, folders):
        each.pop(MIXED, None)
    return Made(seed, {**spec.env, "split": "test"}, folders, data, action, views, intents, models)
