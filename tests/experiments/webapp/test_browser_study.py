"""A study in a real Chromium, from its information to the withdrawal."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.webapp.browsing import DESK, PHONE, check_axe, finish_game, served

pytest.importorskip("starlette")
pytestmark = pytest.mark.slow
STUDY = """
name: small
version: 1
title: A small study
information: What this is about.
consent: [I am old enough., I agree.]
contact: nobody@example.org
games: 3
pay: {taking_part: 1.0, game: 0.1, point: 0.2}
screening: {question: "How many?", answers: [One, Two], right: Two}
parts:
  one:
    instructions: Win points.
    conditions: {fair: {opponent: fair}}
"""


def press(page: Any, role: Any, name: str) -> None:
    """Clicks, and waits for the page that follows."""
    with page.expect_navigation():
        page.get_by_role(role, name=name).click()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_a_study_from_consent_to_the_withdrawal(browser: Any, tmp_path: Path, size: Any, scheme: Any) -> None:
    """A scripted browser takes part. The pay that it reads, game by game, is what its games earned."""
    (tmp_path / "small.yaml").write_text(STUDY)
    folder = tmp_path / "study-small-simulated/episodes"
    with served(tmp_path, f"study={tmp_path}/small.yaml", "simulated=true") as address:
        context = browser.new_context(viewport=size, base_url=address, color_scheme=scheme)
        page = context.new_page()
        page.goto("/")
        check_axe(page, "information")
        page.get_by_role("button", name="I agree").click()  # no box is ticked: the browser holds it back
        assert page.locator("input:invalid").count()
        for box in page.locator("input[type=checkbox]").all():
            box.check()
        press(page, "button", "I agree")
        check_axe(page, "screening")
        page.get_by_label("Two").check()
        press(page, "button", "Go on")
        check_axe(page, "overview")
        assert "0 of 3" in page.locator("main").inner_text()
        page.get_by_role("button", name="First game").click()
        for number in (1, 2):
            page.wait_for_url("**/play/*")
            paid = f"Pay so far: ${earned(folder):.2f}" if number > 1 else "Pay so far: $0.00"
            assert f"Game {number} of 3. {paid}" in page.locator("#table").inner_text()
            finish_game(page, lambda phase: check_axe(page, phase))
            page.wait_for_selector(".ending")
            sums = page.locator(".ending").inner_text()
            assert sums.count("$") == 2 and f"${earned(folder):.2f}" in sums and "fair" not in page.content()
            if number == 1:
                page.get_by_role("button", name="Next game").click()
        press(page, "link", "Stop here")
        check_axe(page, "overview between games")
        press(page, "button", "Stop here and finish")
        check_axe(page, "the end")
        text = page.locator("main").inner_text()
        assert "Thank you" in text and "2 of 3" in text and f"${earned(folder):.2f}" in text
        press(page, "link", "Withdraw")
        check_axe(page, "withdraw")
        press(page, "button", "Withdraw and delete")
        check_axe(page, "withdrawn")
        assert "Everything is deleted" in page.locator("main").inner_text()
        assert not list(folder.glob("*.jsonl"))
        page.goto("/")
        assert page.get_by_role("button", name="I agree").is_visible()
        context.close()


def earned(folder: Path) -> float:
    """The pay for the games recorded so far."""
    transcripts = [json.loads(path.read_text()) for path in folder.glob("*.jsonl")]
    assert "human" not in json.dumps([t["players"] for t in transcripts])
    points = 0.0
    for transcript in transcripts:
        seat = next(agent for agent, name in transcript["players"].items() if name == "simulated")
        both = transcript["outcome"]["points"]
        points += sum(
            value if agent == seat else transcript["facts"]["objective"] * value for agent, value in both.items()
        )
    return 1.0 + 0.1 * len(transcripts) + 0.2 * points
