"""Published results: one page in one form, and cards whose names mean one result each."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from experiments.setup.select import CARDS, add_cards, card_line

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
PAGES = sorted(RESULTS.glob("*/README.md"))
NO_FIGURE = ("expected",)  # nothing but bands of other tables


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_a_page_of_results_has_one_screen(page: Path) -> None:
    """Question, answer, one figure, one table of at most eight rows, the command, at most five doubts, a link."""
    text = page.read_text()
    lines = text.splitlines()
    assert len(lines) <= 42 and len(text.split()) <= 500
    assert re.match(r"# .+\n\n\*[^*]+\?\*", text), "no question"
    figures = re.findall(r"^!\[(.*)\]\((.*)\)$", text, re.M)
    assert len(figures) == (page.parent.name not in NO_FIGURE)
    for alt, figure in figures:
        assert len(alt.split()) > 5 and (page.parent / figure).is_file()
    rows = [line for line in lines if line.startswith("| ") or line.startswith("|---")]
    assert sum(line.startswith("|---") for line in rows) == 1 and len(rows) - 2 <= 8
    assert text.count("```") == 2 and "\npython -m experiments." in text, "one block with the command"
    doubts = text[text.index("\n## ") :]
    assert doubts.count("\n## ") == 1 and 1 <= len(re.findall(r"^- ", doubts, re.M)) <= 5
    assert lines[-1].startswith("[Notes](notes.md): ") and (page.parent / "notes.md").is_file()


def test_results_are_light() -> None:
    """Files and folders take less than 5 MB together, in blocks of 4 kB as on a disk."""
    places = [path for path in (RESULTS, *RESULTS.rglob("*")) if "__pycache__" not in path.parts]
    assert sum(-(-path.stat().st_size // 4096) * 4 for path in places) < 5000


def cards(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_name_of_a_card_means_one_result() -> None:
    """Cards of one name are equal in all tables: same commit, settings, seeds and results."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(RESULTS.rglob(CARDS)):
        for card in cards(path):
            assert found.setdefault(card["run"], card) == card, (path, card["run"])
            assert card["run"].partition("@")[2] == card.get("git_commit", "").replace(" ", ""), (path, card["run"])
    assert len(found) > 200


def test_a_card_says_what_a_model_is_called_and_not_where_it_lies() -> None:
    command = "train.py model=hf model.name=/home/me/models/small-lm data.dond=/home/me/dond seed=0"
    assert card_line({"command": command})["command"] == "train.py model=hf model.name=small-lm seed=0"
    hub = "train.py model.name=HuggingFaceTB/SmolLM2-135M-Instruct"
    assert card_line({"command": hub})["command"] == hub


def test_a_card_is_named_by_its_commit_and_replaces_none_of_another(tmp_path: Path) -> None:
    add_cards([{"run": "b", "git_commit": "1111"}, {"run": "base"}], tmp_path)
    add_cards([{"run": "b", "git_commit": "2222, 3333"}, {"run": "a", "git_commit": "2222"}], tmp_path)
    add_cards([{"run": "a", "git_commit": "2222", "games": 7}], tmp_path)
    found = {card["run"]: card.get("games") for card in cards(tmp_path / CARDS)}
    assert found == {"a@2222": 7, "b@1111": None, "b@2222,3333": None, "base": None}
