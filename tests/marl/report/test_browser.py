"""The report in a real browser: contents, addresses, the filter of games, the keyboard, small screens."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from marl.report.page import build_report
from marl.report.transcripts import write_episodes
from marl.rollout.games import env_maker, scripted
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from tests.marl.episodes import meeting_game
from tests.marl.report.test_page import make_among_us_run, make_run

HOSTILE = "red </script><script>window.hit = 1</script><img src=x onerror='window.hit = 2'>"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A report of two arms. In game 7 the crew of RL says what a page must not run, in game 3 nothing."""
    root = tmp_path_factory.mktemp("browser")
    runs = [make_among_us_run(root / arm, arm, 0, wins) for arm, wins in (("full", 9), ("game_only", 5))]
    games = [meeting_game(game, "crewmates" if game < 5 else "imposters") for game in range(12)]
    silent = tuple(replace(t, message="", text="") if t.message else t for t in games[3].turns)
    games[3] = replace(games[3], turns=silent)
    said = [t if not t.message else replace(t, message=HOSTILE) for t in games[7].turns]
    games[7] = replace(games[7], turns=tuple(said))
    write_episodes(runs[1] / "episodes" / "trained.jsonl", games)
    build_report(runs, root / "report.html", "two arms")
    return (root / "report.html").as_uri()


@pytest.fixture(params=[1280, 390])
def page(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": request.param, "height": 800})
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: wrong.append(request.url) if not request.url.startswith("file:") else None)
    yield page
    assert wrong == []
    page.close()


def shown(page: Any) -> list[list[str]]:
    """The arms beside one another in each game that is shown."""
    return [
        [play.get_attribute("data-arm") for play in game.query_selector_all("article:not([hidden])")]
        for game in page.query_selector_all(".games > details:not([hidden])")
    ]


def test_games_are_filtered_and_stand_side_by_side(page: Any, address: str) -> None:
    page.goto(address)
    assert shown(page) == [["base", "RL+L+S"]] * 8  # of 24 plays, three to a game
    left, right = (
        page.locator(".games > details >> nth=0 >> article:not([hidden])").nth(i).bounding_box() for i in (0, 1)
    )
    wide = page.viewport_size["width"] > 1000
    assert (left["y"] == right["y"] and left["x"] < right["x"]) if wide else left["y"] < right["y"]
    page.select_option("[name=arm]", "RL")
    page.select_option("[name=beside]", "")
    assert shown(page) == [["RL"]] * 8
    page.select_option("[name=named]", "no")
    assert shown(page) == [["RL"]] and page.inner_text("output") == "1 of 8 games"
    page.select_option("[name=ending]", index=1)
    page.select_option("[name=named]", "")
    page.select_option("[name=order]", "moved")
    moved = [float(m.get_attribute("data-moved")) for m in page.query_selector_all("article[data-arm=RL]")]
    assert moved == sorted(moved, reverse=True) and moved[-1] == 0.0 < moved[0]
    page.select_option("[name=order]", "")
    assert page.evaluate("window.hit") is None


def test_contents_stay_and_addresses_open_what_they_name(page: Any, address: str) -> None:
    page.goto(f"{address}#game-2")
    assert page.locator("#game-2 article").first.is_visible()
    page.locator("nav [href='#games'][aria-current]").wait_for()
    assert 0 <= page.locator("nav.contents").bounding_box()["y"] < 60
    page.click("nav >> text=Training")
    page.locator("nav [href='#training'][aria-current]").wait_for()
    heading, contents = page.locator("#training h2").bounding_box(), page.locator("nav.contents").bounding_box()
    assert 0 <= heading["y"] < 200
    assert heading["x"] > contents["x"] + contents["width"] or heading["y"] >= contents["y"] + contents["height"]
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]


def test_the_keyboard_suffices(page: Any, address: str) -> None:
    page.goto(address)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.hash") == "#setting"
    page.focus("[name=arm]")
    page.keyboard.type("base")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.name") == "beside"
    assert shown(page) == [["base"]] * 8
    second = page.locator(".games > details >> nth=1")
    second.locator("> summary").focus()
    page.keyboard.press("Enter")
    assert second.get_attribute("open") is not None


def test_all_is_there_without_scripts(browser: Any, address: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address)
    assert page.locator("form").is_hidden() and page.locator("article").count() == 24
    assert page.locator("article").first.is_visible()
    context.close()


def test_a_game_of_diplomacy_ends_with_its_board(page: Any, tmp_path: Path) -> None:
    """The picture is shown, and takes no room from the table beside it."""
    pytest.importorskip("diplomacy", reason="needs pip install -e '.[diplomacy]'")
    env = env_maker({"game": "diplomacy", "map_name": "pure", "press": "private", "years": 1})
    played = rollout(draw_games(0, 1, count=2), everyone(scripted("diplomacy", "mixture")), env, 2)
    run = make_run(tmp_path / "run")
    for player in ("base", "trained"):
        write_episodes(run / "episodes" / f"{player}.jsonl", played)
    build_report([run], tmp_path / "report.html", "press")
    page.goto((tmp_path / "report.html").as_uri())
    board = page.locator(".games details[open] .picture").first
    assert board.evaluate("each => each.naturalWidth > 0 && each.getBoundingClientRect().width > 200")
    table = page.locator(".games details[open] .phase:has(.picture) .scroll").first
    assert table.evaluate("each => each.scrollWidth <= each.clientWidth")
