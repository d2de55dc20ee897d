"""Kept parts of studies and runs with intents: made again for another objective, and named if they are missing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import evaluate, train
from experiments.setup import entrants, players
from experiments.setup.spec import play_spec
from experiments.studies import conditions, drift, intents, intents_models
from experiments.studies.cells import begin
from marl.common.errors import UserError
from marl.common.files import write_json
from marl.intents.agent import ACTION, DIALOGUE, PARTS
from marl.intents.streams import FORM
from marl.storage.checkpoint import save_policy
from tests.composing import configure
from tests.marl.planners import negotiator


def player_in(runs: Path) -> Path:
    """A folder as the study writes it."""
    folder = runs / "intents-both-s0"
    for name in (ACTION, DIALOGUE):
        save_policy(folder / name, negotiator(), {"game": "dond", "made_of": {"env": {"style": "compact"}}})
    write_json(folder / PARTS, {"arm": "both", "told": FORM})
    return folder


def kept_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *settings: str) -> tuple[set[str], set[str]]:
    """Names the models of a seed that do not depend on the objective, and everything else that the study keeps of
    it."""
    acting, later = set[str](), set[str]()

    def action(*args: Any, **how: Any) -> Any:
        acting.add(args[4].name)
        if not args[4].exists():
            save_policy(args[4], negotiator(), {"game": "dond"})
        return negotiator()

    def talking(*args: Any, **how: Any) -> Any:
        later.add(args[7].name)
        if not args[7].exists():
            save_policy(args[7], negotiator(), {"game": "dond"})
        return negotiator()

    monkeypatch.setattr(intents_models, "action_model", action)
    monkeypatch.setattr(intents_models, "dialogue_model", talking)
    monkeypatch.setattr(intents_models, "annotated", lambda *args: later.add(args[5].name) or ([], {}))
    monkeypatch.setattr(intents, "annotation", lambda made, place: {})
    monkeypatch.setattr(intents, "situations", lambda made, temperature: [])
    monkeypatch.setattr(intents, "write_json", lambda path, found: later.add(path.name) or write_json(path, found))
    monkeypatch.setattr(intents, "publish", lambda path, out: later.add(path.name))
    monkeypatch.setattr(intents, "cached_figures", lambda path, find: later.add(path.name) or {})
    monkeypatch.setattr(intents.Ensemble, "load", lambda folder: None)
    monkeypatch.setattr(intents, "play", lambda *args: {})
    cells = tmp_path / f"cells-{len([*tmp_path.iterdir()])}"  # where nothing is yet, so that all is made
    cfg = configure(
        "intents", f"runs={tmp_path}", f"cells={cells}", "progress=false", "threads=1", "device=cpu", *settings
    )
    spec, place = play_spec(cfg), begin(cfg)
    made = intents_models.make_models(0, "", cfg, spec, place)
    intents.of_seed(made, cfg, spec, place)
    return acting, later


def test_dialogues_are_annotated_and_measured_anew_with_another_objective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The action model learns all objectives and is kept. People's dialogues are read in that of `env.objective`."""
    first, other = (kept_by(tmp_path, monkeypatch, f"env.objective={n}") for n in (1.0, 0.0))
    assert first[0] == other[0] and len(first[1]) > 9 and not first[1] & other[1]
    assert first[1] == kept_by(tmp_path, monkeypatch, "env.objective=1.0")[1]


def test_a_run_names_its_folder_of_intents_if_it_is_missing(tmp_path: Path) -> None:
    """Every command that reads the run names the folder (`algo.intents`) that was moved. The run plays again once its
    configuration has the new path."""
    folder = player_in(tmp_path / "elsewhere")
    small = ("algo.iterations=1", "algo.games=2", "env.max_entries=4", "eval.games=0", "eval.final_games=2")
    quiet = ("threads=1", "progress=false", "device=cpu", f"runs={tmp_path}")
    model = ("model.kind=hf", f"model.name={folder / DIALOGUE}", "base.data=none", f"algo.intents={folder}")
    run = train.main(configure("train", *small, *model, *quiet))
    shutil.move(folder, tmp_path / "moved")
    said = rf"{run.name} learned under the intents of {folder} \(algo\.intents\), which is not there"
    with pytest.raises(UserError, match=said):
        evaluate.main(configure("evaluate", f"players=[{run}]", f"out={tmp_path / 'out'}", "games=2", *quiet[:3]))
    with pytest.raises(UserError, match=said):
        players.player_digest(str(run))
    with pytest.raises(UserError, match=said):
        conditions.entrants(tmp_path, run.name, ())
    with pytest.raises(UserError, match=said):
        drift.subjects_of(run, configure("drift", f"human={tmp_path / 'moved' / DIALOGUE}"))
    config = run / "config.yaml"
    config.write_text(config.read_text().replace(f"intents: {folder}", f"intents: {tmp_path / 'moved'}"))
    evaluate.main(configure("evaluate", f"players=[{run}]", f"out={tmp_path / 'out'}", "games=2", *quiet[:3]))


def test_a_player_of_another_game_is_named(tmp_path: Path) -> None:
    folder = player_in(tmp_path)
    said = r"was trained on dond, and env\.game=among_us: choose env=dond"
    with pytest.raises(UserError, match=said):
        entrants.find_base(play_spec(configure("evaluate", "env=among_us")), torch.device("cpu"), f"{folder}+cicero")
    for names in (f"base,{folder}+cicero", f"{folder}+cicero,base"):
        with pytest.raises(UserError, match=said):
            evaluate.main(configure("evaluate", "env=among_us", f"players=[{names}]", "games=2", "device=cpu"))
