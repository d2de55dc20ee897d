"""An adapter over an untouched model of `transformers`: the run keeps no base, and the base plays all the same."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

import marl
from experiments import evaluate, final_games, train
from experiments.setup.players import is_run
from experiments.studies import crossplay
from marl.common.errors import UserError
from marl.report.runs import read_evaluation
from tests.composing import configure, run_folder
from tests.marl.models import CHATML, hf_tokenizer, random_lm, save
from tests.runs import without_pages

pytest.importorskip("peft")

FAST = ("device=cpu", "progress=false", "threads=1")


def configured(folder: Path, *overrides: str) -> DictConfig:
    """The settings of a run over the model that lies in the folder."""
    return configure(
        "train", "model=smollm2", f"model.name={folder / 'model'}", "model.context=4096", "model.max_new_tokens=6",
        "env.format=structured", "env.max_entries=4", "algo.iterations=1", "algo.games=2", "eval.games=0",
        "eval.final_games=2", f"runs={folder / 'runs'}", *FAST, *overrides,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untouched")
    tokenizer = hf_tokenizer(CHATML, single_digits=True)
    save(folder / "model", random_lm("llama", len(tokenizer), context=4096), tokenizer)
    cfg = configured(folder)
    with without_pages():
        train.main(cfg)
    return run_folder(cfg)


def test_its_base_plays_the_last_games_once_for_all_runs(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pages: None
) -> None:
    folder, played = run.parents[1], list[str]()
    measure = final_games.measure

    def noted(work: Any, to: Path, name: str, *rest: Any) -> None:
        played.append(name)
        measure(work, to, name, *rest)

    def base_of(*overrides: str) -> tuple[Any, str]:
        """Trains a run; returns what it shows of its base's games."""
        played.clear()
        train.main(cfg := configured(folder, *overrides))
        made = run_folder(cfg)
        found = read_evaluation(made / "evaluation.json")["conditions"]["base"]
        return found, (made / "episodes" / "base.jsonl").read_text()

    monkeypatch.setattr(final_games, "measure", noted)
    other_arm = ("seed=1", "base.seed=1", "loss.listening.weight=0", "model.critic=privileged")
    shared = base_of(*other_arm)
    assert played == ["trained"]
    assert shared == base_of(*other_arm, f"runs={tmp_path}") and played == ["base", "trained"]
    assert base_of("model.questions=stream") != shared and played == ["base", "trained"]
    copy = shutil.copytree(folder / "model", tmp_path / "model")
    assert base_of(f"model.name={copy}") == shared and played == ["trained"]
    template = copy / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>", "<|im_end|> "))
    assert base_of(f"model.name={copy}", "seed=2") != shared and played == ["base", "trained"]


def test_its_base_plays_in_an_evaluation(run: Path, tmp_path: Path) -> None:
    for number, players in enumerate((f"players=[{run},base]", f"players=[base,{run}]")):
        out = tmp_path / str(number)
        evaluate.main(configure("evaluate", players, "games=2", f"out={out}", f"runs={run.parent}", *FAST))
        assert set(read_evaluation(out / "evaluation.json")["conditions"]) >= {run.name, "base"}


def test_its_base_plays_from_python(run: Path) -> None:
    players = marl.load(run)
    own, base = players["trained"].policy, players["base"].policy
    assert own.adapter is not None and own.adapter.base.lm is base.lm  # one copy of the weights
    assert own.tokens.beside and base.tokens.beside and not own.adapter.base.tokens.beside  # others may read otherwise
    (episode,) = marl.play(players.env, [players["trained"], players["base"]])
    assert sorted(episode.players.values()) == ["base", "trained"] and episode.beliefs
    with pytest.raises(UserError, match=r"has no player rival\. It has trained, base\."):
        players["rival"]
    assert players.get("rival") is None and "rival" not in players
    ids = torch.randint(own.tokens.size, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert not torch.equal(base.logits(base.hidden(ids)), own.logits(own.hidden(ids)))


def test_cross_play_says_what_to_do(run: Path, tmp_path: Path) -> None:
    cfg = configure("crossplay", f"players=[{run},base]", "games=2", f"runs={run.parent}", f"cells={tmp_path}", *FAST)
    with pytest.raises(UserError, match=r"base: .* untouched model, .*experiments\.evaluate"):
        crossplay.main(cfg)


def test_the_folder_of_a_model_is_no_player(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"is a model, not a run\. Play it as base, with model=hf model\.name="):
        is_run(str(tmp_path))
