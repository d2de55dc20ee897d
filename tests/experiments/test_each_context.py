"""`each_context=true`: each context of a file of Deal or No Deal once, and what `out` then holds."""

import json
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from envs.dond.rules import contexts
from experiments import evaluate
from experiments.evaluate import each_context
from experiments.setup import entrants
from experiments.setup.config import plain
from experiments.setup.spec import play_spec
from marl.common.errors import UserError
from marl.metrics.tables import read_table
from marl.storage.checkpoint import save_policy
from tests.composing import configure
from tests.marl.planners import negotiator

FIRST = ((1, 4, 1), ((0, 2, 2), (4, 1, 2)))
SECOND = ((4, 1, 1), ((2, 0, 2), (1, 4, 2)))  # a test context; the first is not
PUBLISHED_FORM = "1 0 4 2 1 2\n1 4 4 1 1 2\n4 2 1 0 1 2\n4 1 1 4 1 2\n"


def settings(*overrides: str) -> DictConfig:
    return configure("evaluate", "players=[scripted]", "each_context=true", "progress=false", *overrides)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "contexts.txt"
    path.write_text(PUBLISHED_FORM)
    return path


@pytest.mark.parametrize(("split", "expected"), [("all", [FIRST, SECOND]), ("train", [FIRST]), ("test", [SECOND])])
def test_each_context_of_the_file_is_played_once_in_its_order(
    split: str, expected: list[tuple], file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    evaluate.main(settings(f"env.contexts={file}", f"env.split={split}", "env.objective=0", f"out={out}"))
    played = [json.loads(line)["facts"] for line in (out / "episodes.jsonl").read_text().splitlines()]
    assert [(tuple(f["counts"]), tuple(map(tuple, f["values"]))) for f in played] == expected
    evaluation = json.loads((out / "evaluation.json").read_text())
    assert evaluation["about"]["games"] == len(expected)
    found = evaluation["conditions"]["scripted"]
    table = {row.metric: row for row in read_table(out / "table.csv")}
    assert table["game/score"].mean == pytest.approx(found["game/score"]["mean"], abs=1e-4)
    assert (table["game/agreement"].arm, table["game/agreement"].games) == ("scripted", len(expected))


@pytest.mark.parametrize("given", [[], ["env.split=test"], ["env.split=train"]])
def test_a_base_plays_contexts_that_it_did_not_learn_from(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`base` is the model that training makes from training's contexts, whichever contexts are played."""
    made: list[dict] = []
    monkeypatch.setattr(entrants, "base_policy", lambda model, base, env, **rest: made.append(env))
    monkeypatch.setattr(entrants.HydraConfig, "initialized", lambda: True)
    overrides = OmegaConf.create({"overrides": {"task": given}})
    monkeypatch.setattr(entrants.HydraConfig, "get", lambda: overrides)
    cfg = entrants.as_in_runs(settings("players=[base]", *given), ["base"])
    assert cfg.env.split == (given[0].partition("=")[2] if given else "test")
    entrants.configured_base(play_spec(cfg, ["base"]), torch.device("cpu"))
    (env,) = made
    assert env == plain(configure("train").env)
    save_policy(tmp_path / "bases" / "dond-x", negotiator(), {"game": "dond"})
    assert entrants.as_in_runs(settings(*given), [str(tmp_path / "bases" / "dond-x")]).env.split == cfg.env.split
    assert entrants.as_in_runs(settings(*given), ["scripted"]).env.split == settings(*given).env.split


def test_without_a_file_they_are_all_that_the_rules_allow() -> None:
    games = each_context({"game": "dond", "contexts": None, "split": "all"}, 7)
    assert [(g.options["counts"], g.options["values"]) for g in games] == [(c.counts, c.values) for c in contexts()]
    assert len({game.seed for game in games}) == len(games) == 5295


def test_a_game_without_a_list_of_contexts_is_refused() -> None:
    with pytest.raises(UserError, match="each_context"):
        evaluate.main(settings("env=among_us"))
