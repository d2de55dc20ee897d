"""Published results: one page in one form, and cards whose names mean one result each."""

import json
from pathlib import Path
from typing import Any

from experiments.setup.select import CARDS, add_cards

RESULTS = Path(__file__).parents[2] / "experiments" / "results"


def cards(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_name_of_a_card_means_one_result() -> None:
    """Over all tables: what has the same name was made by the same commit, settings and seeds, and won the same."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(RESULTS.rglob(CARDS)):
        for card in cards(path):
            assert found.setdefault(card["run"], card) == card, (path, card["run"])
            assert card["run"].partition("@")[2] == card.get("git_commit", "").replace(" ", ""), (path, card["run"])
    assert len(found) > 200


def test_a_card_is_named_by_its_commit_and_replaces_that_of_an_earlier_one(tmp_path: Path) -> None:
    add_cards([{"run": "b", "git_commit": "1111"}, {"run": "base"}], tmp_path)
    add_cards([{"run": "b", "git_commit": "2222, 3333"}, {"run": "a", "git_commit": "2222"}], tmp_path)
    assert [card["run"] for card in cards(tmp_path / CARDS)] == ["a@2222", "b@2222,3333", "base"]
