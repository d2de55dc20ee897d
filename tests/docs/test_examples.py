"""Python code of the pages runs; a term that a page shows pays an episode, or gives values for a batch."""

import importlib
import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from marl.learning.batch import collate, rows_of
from marl.losses import mask_of
from marl.rewards import add_rewards
from marl.rollout.games import env_maker, scripts_module
from tests.marl.batches import three_turns

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r'^```python(?: title="(?P<title>[^"]+)")?\n(?P<code>.*?)^```', re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str | None, str]]:
    """Python code blocks of a page, each with the file name that it is shown under."""
    return [(found["title"], found["code"]) for found in BLOCK.finditer(page.read_text(encoding="utf-8"))]


def module(title: str, code: str, folder: Path) -> ModuleType:
    """Imports a block under the last part of its file's name."""
    name = Path(title).stem
    (folder / f"{name}.py").write_text(code)
    sys.modules.pop(name, None)
    return importlib.import_module(name)


@pytest.fixture
def runs(finished: Path, tmp_path: Path) -> Path:
    """A folder with one finished run, runs/mine, that pages load."""
    shutil.copytree(finished, tmp_path / "here" / "runs" / "mine")
    return tmp_path / "here"


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_python_of_a_page_runs(page: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.stem == "diplomacy":
        pytest.importorskip("diplomacy", reason="needs the extra `diplomacy`: pip install 'diplomacy==1.1.2'")
    monkeypatch.chdir(runs)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}  # as one reads them: a block knows what those above it made
    for title, code in blocks(page):
        if title:
            module(title, code, tmp_path)
        else:
            exec(code, names)


def test_terms_of_the_page_are_terms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    made = {t: module(t, c, tmp_path) for t, c in blocks(ROOT / "docs/howto/term.md") if t}
    brevity, doubt = made["my_terms.py"].Brevity(), made["my_losses.py"].Doubt()
    (paid,) = add_rewards([three_turns()], {"brevity": brevity})
    assert [t.rewards.get("brevity") for t in paid.turns if t.message] == [-0.03]  # "x y"
    batch = collate(rows_of([paid], {"learner"}), {"brevity": brevity})
    assert mask_of(batch, "doubt", doubt).shape == (len(batch.row),)


def test_the_game_of_the_page_can_be_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    made = {t: module(t, c, tmp_path) for t, c in blocks(ROOT / "docs/howto/game.md") if t}
    game, scripts = made["colour_v0.py"], made["colour_scripted.py"]
    assert scripts_module("colour") is scripts  # found by the game's name
    env = env_maker({"game": "colour", "style": "compact"})()
    assert type(env) is game.Colour
    observations, infos = env.reset(seed=0)
    players = {agent: scripts.make_player(scripts.DEFAULT, 0, infos[agent]["role"]) for agent in env.agents}
    while env.agents:
        replies = {a: players[a].reply(seen["text"], seen["options"]) for a, seen in observations.items()}
        observations, rewards, _, _, infos = env.step(replies)
    assert infos["player_0"]["outcome"]["how"] in ("right colour", "wrong colour")
    assert set(rewards.values()) <= {0.0, 1.0}


NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All cells run in order without a browser; figures are drawn and not shown."""
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    names: dict[str, Any] = {"__name__": "notebook"}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
