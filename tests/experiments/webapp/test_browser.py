"""The web page in a real Chromium: whole games by mouse, by keyboard and on a phone, hostile words, and axe."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.webapp.browsing import changed, chromium, finish_game, served, server, state, version

pytest.importorskip("starlette")
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
HOSTILE = "<img src=x onerror='window.hurt=1'><script>window.hurt=1</script> {{7*7}} hats"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def address(browser: Any, runs: Path) -> Iterator[str]:
    with served(runs, "games_each=20", "games_at_once=40") as found:
        yield found


@pytest.fixture
def opened(browser: Any, address: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page of a new person. Fails if any script of the page fails, or anything is fetched from another host."""
    size = getattr(request, "param", DESK)
    context = browser.new_context(viewport=size, base_url=address)
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda sent: sent.url.startswith((address, "data:")) or faults.append(sent.url))
    yield page
    context.close()
    assert faults == []


def begin(page: Any, game: str, opponent: str, seat: str = "any") -> None:
    page.goto("/play")
    form = page.locator(f"form:has(input[value={game}])")
    form.locator("select[name=opponent]").select_option(opponent)
    form.locator("select[name=seat]").select_option(seat)
    form.locator("button.main").click()
    page.wait_for_url("**/play/*")


@pytest.mark.slow
@pytest.mark.parametrize("opened", [DESK, PHONE], indirect=True, ids=["desk", "phone"])
@pytest.mark.parametrize(
    ("game", "opponent", "seat"),
    [("dond", "scripted", "player_0"), ("among_us", "careful", "crewmate"), ("among_us", "careful", "imposter")],
)
def test_a_whole_game_by_mouse(opened: Any, game: str, opponent: str, seat: str) -> None:
    begin(opened, game, opponent, seat)
    finish_game(opened)
    assert "The game is over" in opened.locator(".log").inner_text()
    assert fits(opened)
    opened.get_by_role("link", name="Watch this game").click()
    opened.wait_for_selector(".recorded .outcome")
    assert fits(opened)
    if game == "dond":  # of Among Us chance may leave out every discussion
        assert opened.locator(".recorded .turn").count()


def fits(page: Any) -> bool:
    """Nothing is cut off at the side."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


@pytest.mark.parametrize("opened", [DESK, PHONE], indirect=True, ids=["desk", "phone"])
def test_a_first_reply(opened: Any) -> None:
    """The short form of the above, for every run of the tests; hostile words are shown as they are, and do nothing."""
    begin(opened, "dond", "scripted", "player_0")
    opened.wait_for_selector("#now form.reply")
    before = version(opened)
    if opened.locator("#text").count():
        opened.locator("#text").fill(HOSTILE)
        opened.get_by_role("button", name="Send").click()
        changed(opened, before)
        opened.wait_for_selector("text=<img src=x")
        assert opened.evaluate("window.hurt") is None and opened.locator(".log img, .log script").count() == 0
    assert fits(opened)


@pytest.mark.slow
@pytest.mark.parametrize("opened", [DESK, PHONE], indirect=True, ids=["desk", "phone"])
@pytest.mark.parametrize(("game", "seat"), [("dond", "any"), ("among_us", "crewmate"), ("among_us", "imposter")])
def test_a_whole_game_by_keyboard(opened: Any, game: str, seat: str) -> None:
    """Tab, Enter, Space, arrows and letters alone, from the first page to the end: what has to be reached can be
    reached, and is in sight."""
    opened.goto("/play")
    form = "document.activeElement.form?.elements.game?.value"
    tab_to(opened, lambda: opened.evaluate(f"document.activeElement.name === 'seat' && {form} === '{game}'"))
    opened.keyboard.type(seat[0])  # a list goes to what begins so
    assert opened.evaluate("document.activeElement.value") == seat
    tab_to(opened, lambda: opened.evaluate("document.activeElement.textContent").startswith(f"Play {NAMES[game]}"))
    opened.keyboard.press("Enter")
    opened.wait_for_url("**/play/*")
    sent = 0
    while (now := state(opened)) not in ("over", "stopped"):
        if now == "waiting":
            opened.wait_for_timeout(30)
            continue
        before = version(opened)
        assert sent < 200
        if opened.locator("#now button[name=choice]").count():
            wanted = sent % opened.locator("#now button[name=choice]").count()
            nth = "[...document.querySelectorAll('#now button[name=choice]')].indexOf(document.activeElement)"
            tab_to(opened, lambda nth=nth, wanted=wanted: opened.evaluate(nth) == wanted)
            opened.keyboard.press("Enter")
        elif opened.locator("#text").count() and (game == "among_us" or sent < 2):
            tab_to(opened, lambda: opened.evaluate("document.activeElement.id") == "text")
            opened.keyboard.type("I need the hats")
            opened.keyboard.press("Enter")
        else:
            if opened.locator("#claims").count():
                tab_to(opened, lambda: opened.evaluate("document.activeElement.id") == "claims")
                opened.keyboard.press("Enter")
                if sent % 2:  # once away and back
                    opened.keyboard.press("Escape")
                    opened.keyboard.press("Enter")
            tab_to(opened, lambda: opened.evaluate("document.activeElement.name") == "hats")
            opened.keyboard.press("ArrowUp")
            tab_to(opened, lambda: opened.evaluate("document.activeElement.textContent") == "Propose")
            opened.keyboard.press("Space")
        sent += 1
        changed(opened, before)
    assert "The game is over" in opened.locator(".log").inner_text()
    tab_to(opened, lambda: opened.evaluate("document.activeElement.textContent").startswith("Watch this game"))
    opened.keyboard.press("Enter")
    opened.wait_for_selector(".recorded .outcome")
    assert fits(opened)


NAMES = {"dond": "Deal", "among_us": "Among"}
IN_SIGHT = """() => { const at = document.activeElement.getBoundingClientRect();
    return at.top < innerHeight && at.bottom > 0 && at.left >= 0 && at.right <= innerWidth + 1; }"""


def tab_to(page: Any, there: Any, most: int = 60) -> None:
    """Presses Tab until the focus is there; it has to be seen."""
    for _ in range(most):
        if there():
            assert page.evaluate("document.activeElement.matches(':focus-visible')")
            assert page.evaluate(IN_SIGHT)
            return
        page.keyboard.press("Tab")
    raise AssertionError(page.evaluate("document.activeElement.outerHTML"))


@pytest.mark.slow
def test_two_people_at_once_see_their_own_games(browser: Any, address: str) -> None:
    pages = [browser.new_context(viewport=DESK, base_url=address).new_page() for _ in range(2)]
    for page in pages:
        begin(page, "dond", "scripted", "player_0")
    for page in pages:
        finish_game(page)
    assert pages[0].url != pages[1].url
    assert pages[0].goto(pages[1].url).status == 404
    for page in pages:
        page.context.close()


@pytest.mark.slow
def test_the_server_is_killed_and_the_page_goes_on(browser: Any, tmp_path: Path) -> None:
    """The page that is open when the server dies goes on by itself once it is back."""
    with server(tmp_path) as (address, process):
        context = browser.new_context(viewport=DESK, base_url=address)
        page = context.new_page()
        begin(page, "dond", "scripted", "player_0")
        page.wait_for_selector("#now form.reply")
        before = page.locator(".log").inner_text()
        process.kill()
        process.wait()
    with server(tmp_path, port=int(address.rpartition(":")[2])):
        page.reload()
        page.wait_for_selector("#now form.reply")
        assert page.locator(".log").inner_text() == before
        finish_game(page)
        assert state(page) == "over"
    context.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_axe_finds_nothing_serious(browser: Any, address: str, runs: Path, size: Any, scheme: Any) -> None:
    """No serious or critical finding on any page, in either scheme."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs pip install -e '.[browser]'")
    context = browser.new_context(viewport=size, color_scheme=scheme, base_url=address)
    page = context.new_page()

    serious = []

    def check(where: str) -> None:
        found = axe.Axe().run(page).response["violations"]
        for v in found:
            if v["impact"] in ("serious", "critical"):
                serious.append((where, v["id"], v["nodes"][0]["html"][:200], v["nodes"][0]["failureSummary"][-200:]))

    page.goto("/play")
    check("play")
    for game, opponent, seat in (("dond", "scripted", "player_0"), ("among_us", "careful", "crewmate")):
        begin(page, game, opponent, seat)
        page.wait_for_selector("#now form.reply")
        check(game)
        finish_game(page)
        check(f"{game}, over")
        page.get_by_role("link", name="Watch this game").click()
        check(f"{game}, watched")
    for path in ("/watch", "/runs", "/watch/no/no/1"):
        page.goto(path)
        check(path)
    context.close()
    assert serious == []


def test_the_first_page_is_small(browser: Any, address: str) -> None:
    """All that the first page loads, under 100 kB."""
    context = browser.new_context(base_url=address)
    page = context.new_page()
    answers: list[Any] = []
    page.on("response", lambda answer: answers.append(answer))  # its own function: playwright marks it
    page.goto("/play", wait_until="load")
    sizes = {answer.url: len(answer.body()) for answer in answers if answer.url.startswith(address)}
    assert len(sizes) == 3 and 10_000 < sum(sizes.values()) < 100_000, sizes
    context.close()


STUDY = """
name: small
version: 1
title: A small study
information: What this is about.
consent: [I am old enough., I agree.]
contact: nobody@example.org
games: 2
pay: {taking_part: 1.0, game: 0.1, point: 0.2}
screening: {question: "How many?", answers: [One, Two], right: Two}
parts:
  one:
    instructions: Win points.
    conditions: {fair: {opponent: fair}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_a_study_from_consent_to_the_end(browser: Any, tmp_path: Path, size: Any) -> None:
    """A scripted browser takes part; what it is told it earned is what the export pays."""
    (tmp_path / "small.yaml").write_text(STUDY)
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs pip install -e '.[browser]'")
    with server(tmp_path, "study=small.yaml", "simulated=true") as (address, _):
        context = browser.new_context(viewport=size, base_url=address)
        page = context.new_page()

        def check() -> None:
            found = axe.Axe().run(page).response["violations"]
            assert not [(v["id"], v["nodes"][0]["html"]) for v in found if v["impact"] in ("serious", "critical")]
            assert fits(page)

        page.goto("/")
        check()
        for box in page.locator("input[type=checkbox]").all():
            box.check()
        page.get_by_role("button", name="I agree").click()
        check()
        page.get_by_label("Two").check()
        page.get_by_role("button", name="Go on").click()
        check()
        page.get_by_role("button", name="First game").click()
        for number in (1, 2):
            page.wait_for_url("**/play/*")
            finish_game(page)
            page.wait_for_selector(".ending")
            check()
            assert "fair" not in page.content()
            if number == 1:
                page.get_by_role("button", name="Next game").click()
        page.get_by_role("link", name="To the end of the study").click()
        text = page.locator("main").inner_text()
        check()
        assert "Thank you" in text and "2 of 2" in text
        earned = float(re.findall(r"\$(\d+\.\d\d)", text)[0])
        context.close()
    transcripts = [json.loads(p.read_text()) for p in (tmp_path / "study-small-simulated/episodes").glob("*.jsonl")]
    assert len(transcripts) == 2 and "human" not in json.dumps([t["players"] for t in transcripts])
    points = 0.0
    for transcript in transcripts:
        seat = next(agent for agent, name in transcript["players"].items() if name == "simulated")
        both = transcript["outcome"]["points"]
        points += both[seat] + sum(value for agent, value in both.items() if agent != seat)
    assert earned == pytest.approx(1.0 + 2 * 0.1 + 0.2 * points)
