"""An adapter over an untouched model of `transformers`: the run keeps no base, and the base plays all the same."""

from pathlib import Path

import pytest
import torch

import marl
from experiments import evaluate, train
from experiments.setup.players import is_run
from experiments.studies import crossplay
from marl.common.errors import UserError
from marl.report.runs import read_evaluation
from tests.composing import configure, run_folder
from tests.marl.models import CHATML, hf_tokenizer, random_lm, save
from tests.runs import without_pages

pytest.importorskip("peft")

FAST = ("device=cpu", "progress=false", "threads=1")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untouched")
    tokenizer = hf_tokenizer(CHATML, single_digits=True)
    save(folder / "model", random_lm("llama", len(tokenizer), context=4096), tokenizer)
    cfg = configure(
        "train", "model=smollm2", f"model.name={folder / 'model'}", "model.context=4096", "model.max_new_tokens=6",
        "env.format=structured", "env.max_entries=4", "algo.iterations=1", "algo.games=2", "eval.games=0",
        "eval.final_games=2", f"runs={folder / 'runs'}", *FAST,
    )  # fmt: skip
    with without_pages():
        train.main(cfg)
    return run_folder(cfg)


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
