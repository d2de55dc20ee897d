"""The web page in a real Chromium: whole games by mouse, by keyboard and on a phone, hostile words, and axe."""

import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from envs.among_us.state import DIRECTIONS
from envs.dond.replies import proposal_text
from envs.dond.rules import ITEMS
from envs.dond.texts import parse_prompt
from experiments.webapp import pages
from experiments.webapp.opponents import Kind
from experiments.webapp.store import new_record
from tests.endpoint import Server
from tests.experiments.webapp.browsing import (
    DESK,
    PHONE,
    begin,
    changed,
    check_axe,
    finish_game,
    fits,
    served,
    server,
    state,
    version,
    visiting,
)

HOSTILE = "<img src=x onerror='window.hurt=1'><script>window.hurt=1</script> {{7*7}} hats"
SEEDS = {"crewmate": 11, "imposter": 1}  # of games with a body in sight, a discussion and a vote


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Server]:
    """A partner that wants the hats. It answers once `going` is set."""

    def answering(asked: Server, body: dict[str, Any], handler: Any) -> None:
        asked.going.wait(60)  # type: ignore[attr-defined]
        messages = body["messages"]
        hats = parse_prompt(messages[0]["content"] + "\n")[0][1]
        claims = "has made a proposal" in messages[-1]["content"]
        handler.say((proposal_text((0, hats, 0)) if claims else "[message] The hats are mine.") + " [END]")

    found = Server(answering)
    found.going = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield found
    found.shutdown()
    found.server_close()


@pytest.fixture(scope="module")
def address(browser: Any, runs: Path, endpoint: Server) -> Iterator[str]:
    chat = (f"chat.url={endpoint.url}", "chat.model=some", "chat.key=''", f"chat.answers={runs}/chat.jsonl")
    with served(runs, "games_each=30", "games_at_once=60", *chat) as found:
        yield found


@pytest.fixture
def seeded(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Fixes the seed of the games that begin from now on."""

    def seed(number: int) -> None:
        monkeypatch.setattr(pages, "new_record", lambda *given: new_record(*given, number))

    return seed


# --- Deal or No Deal --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("objective", "goal", "other"),
    [
        ("-1", "your lead", -1),
        pytest.param("0", "for yourself", None, marks=pytest.mark.slow),
        pytest.param("1", "sum of both", 1, marks=pytest.mark.slow),
    ],
)
def test_a_game_has_the_objective_chosen_in_the_form(
    opened: Any, endpoint: Server, runs: Path, objective: str, goal: str, other: int | None
) -> None:
    """A whole game is played for each objective, up to its pay-off. The page shows that the partner is thinking, the
    dialog for proposals, and the pool as icons."""
    endpoint.going.clear()  # type: ignore[attr-defined]
    begin(opened, "dond", "chat", "player_0", objective)
    assert goal in opened.locator(".goal").inner_text()
    counts = {}
    for cell, item in zip(opened.locator(".board tbody tr").first.locator("td").all(), ITEMS, strict=True):
        counts[item] = int(cell.inner_text().split()[0])
        assert cell.locator(f".icon.{item}").count() == counts[item]
        assert cell.locator(".icon").first.bounding_box()["width"] > 12
    values = [int(cell.inner_text()) for cell in opened.locator(".board tbody tr").nth(1).locator("td").all()]
    greet(opened)
    opened.wait_for_selector(".typing:has-text('Your partner is thinking')")
    assert not opened.locator("#now form.reply").count()
    endpoint.going.set()  # type: ignore[attr-defined]
    opened.wait_for_selector("text=The hats are mine.")
    assert not opened.locator(".typing").count()
    opened.locator("#claims").click()
    dialog = opened.get_by_role("dialog", name="Your proposal")
    assert dialog.is_visible() and dialog.evaluate("d => d.matches(':modal')")
    dialog.get_by_role("button", name="Go on talking").click()
    assert not dialog.is_visible()
    opened.locator("#claims").click()
    for item in ("books", "balls"):
        for _ in range(counts[item] + 1):  # once more than there are
            dialog.get_by_role("button", name=f"more {item}").click()
    dialog.get_by_role("button", name="fewer hats").click()
    own = counts["books"] * values[0] + counts["balls"] * values[2]
    assert dialog.locator(".worth").inner_text() == f"worth {own} point{'s' if own != 1 else ''} to you"
    dialog.get_by_role("button", name="Propose").click()
    opened.wait_for_selector(".ending h2:has-text('A deal')")
    sums = dict(
        zip(
            *([each.inner_text() for each in opened.locator(f".ending {tag}").all()] for tag in ("dt", "dd")),
            strict=True,
        )
    )
    theirs = float(sums["Your partner's points"])
    assert float(sums["Your points"]) == own
    assert sums.get("Your score") == (None if other is None else f"{own + other * theirs:g}")
    played = json.loads((runs / f"web/episodes/{opened.url.rpartition('/')[2]}.jsonl").read_text())
    assert played["facts"]["objective"] == float(objective)


def greet(page: Any) -> None:
    """Says something, unless the partner begins."""
    if state(page) == "yours":
        page.locator("#text").fill("Hello")
        page.get_by_role("button", name="Send").click()


def test_no_deal_says_what_went_wrong(opened: Any, endpoint: Server) -> None:
    endpoint.going.clear()  # type: ignore[attr-defined]
    begin(opened, "dond", "chat", "player_0")
    greet(opened)
    endpoint.going.set()  # type: ignore[attr-defined]
    opened.wait_for_selector("text=The hats are mine.")
    opened.locator("#claims").click()
    opened.get_by_role("button", name="Propose").click()  # nothing, while the partner claims the hats
    opened.wait_for_selector(".ending h2:has-text('No deal')")
    assert "the two claims do not add up to the pool" in opened.locator(".ending").inner_text()
    opened.goto("/play")
    assert "no deal, score 0" in opened.locator("main").inner_text()


# --- Among Us ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("opened", "seat"), [(PHONE, "crewmate"), (DESK, "imposter")], indirect=["opened"])
def test_the_map_the_discussion_and_the_vote(opened: Any, seeded: Callable[[int], None], seat: str) -> None:
    """The map shows what the player was told, and every legal move is a button."""
    seeded(SEEDS[seat])
    begin(opened, "among_us", "careful", seat)
    met = set()

    def look(phase: str) -> None:
        met.add(phase)
        lines = opened.locator(".log .news").all_inner_texts()
        if phase == "map":
            here = opened.locator("#now td.here")
            room, last = ROOM.findall(lines[-1])[0], lines[-1]
            assert f"room {room}" in here.inner_text()
            people = re.findall(r"Here with you: ([^.]*)\.", last)
            shown = here.locator(".seen:not(.body)").all_inner_texts()
            assert [name for name in shown if " " not in name] == (people[0].split(", ") if people else [])
            assert here.locator(".body").all_inner_texts() == [f"body of {name}" for name in BODY.findall(last)]
            x, y = map(int, room.split(","))
            for name, (dx, dy) in DIRECTIONS.items():
                inside = 0 <= x + dx < 2 and 0 <= y + dy < 2
                assert opened.locator(f"#now .map button[value='go {name}']").count() == inside
            assert opened.locator("#now .buttons button[value=wait]").count() == 1
            if BODY.findall(last):
                met.add("body")
        elif phase == "talk":
            assert any("A discussion begins" in line for line in lines) and not opened.locator("#now .map").count()
        elif phase == "vote":
            alive = re.findall(r"Alive: ([^.]*)\.", " ".join(lines))[-1].split(", ")
            buttons = [b.get_attribute("value") for b in opened.locator("#now .buttons button").all()]
            assert sorted(buttons) == sorted([*alive, "skip"])
        assert fits(opened)
        for button in opened.locator("#now button:visible").all():
            assert button.bounding_box()["height"] >= 43, button.inner_text()

    finish_game(opened, look, every=True)
    assert {"map", "body", "talk", "vote", "over"} <= met, met
    assert opened.locator(".ending h2").inner_text() in ("You won", "You lost", "Nobody wins")


ROOM, BODY = re.compile(r"room \((\d,\d)\)"), re.compile(r"The body of (\w+) lies here")


# --- Whole games ------------------------------------------------------------------------------------------------------
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


def test_a_double_click_and_a_held_key_count_once(opened: Any, seeded: Callable[[int], None]) -> None:
    """The next choice stands at the same place by the second click. Two separate clicks count twice."""
    seeded(SEEDS["crewmate"])
    begin(opened, "among_us", "careful", "crewmate")

    def moves(press: Callable[[int], None], times: int = 2) -> int:
        """Presses so often and returns how many moves the player has made."""
        opened.wait_for_selector("#now button[value=wait]")
        own = opened.locator(".log .turn.right").count()
        for number in range(1, times + 1):
            before = version(opened)
            press(number)
            if number == 1:
                changed(opened, before)
                opened.wait_for_selector("#now button[value=wait]")
        opened.wait_for_timeout(500)
        return int(opened.locator(".log .turn.right").count()) - own

    def click(number: int) -> None:
        opened.locator("#now button[value=wait]").hover()
        opened.mouse.down(click_count=number)
        opened.mouse.up(click_count=number)

    assert moves(click) == 1
    assert moves(click, 3) == 1
    assert moves(lambda number: click(1)) == 2
    opened.locator("#now button[value=wait]").focus()
    assert moves(lambda number: opened.keyboard.down("Enter")) == 1
    opened.keyboard.up("Enter")
    assert opened.evaluate(AT_ONCE) == 1
    opened.wait_for_timeout(PAUSE)
    opened.locator("#now button[value=wait]").focus()
    before = version(opened)
    opened.keyboard.press("Enter")
    changed(opened, before)


def test_who_goes_on_clicking_goes_on(opened: Any, seeded: Callable[[int], None]) -> None:
    """Browsers count clicks on as long as each comes soon after the last, so a later one of a row counts again."""
    seeded(SEEDS["crewmate"])
    begin(opened, "among_us", "careful", "crewmate")
    opened.locator("#now button[value=wait]").hover()
    for number in range(1, 9):
        opened.mouse.down(click_count=number)
        opened.mouse.up(click_count=number)
        opened.wait_for_timeout(300)
    assert opened.locator(".log .turn.right").count() >= 2


def test_a_double_click_begins_one_game(opened: Any) -> None:
    opened.goto("/play")
    opened.get_by_role("button", name="Play Among Us").dblclick()
    opened.wait_for_url("**/play/*")
    opened.goto("/play")
    assert opened.locator("ul.plain li").count() == 1


PAUSE = 400  # milliseconds: keys that come sooner after what is new were meant for what stood there before
# Chooses `wait` by key, and what stands there next at once; which no test could do from outside.
AT_ONCE = """() => new Promise((counted) => {
    const moves = () => document.querySelectorAll('.log .turn.right').length, own = moves();
    const press = () => document.querySelector('#now button[value=wait]:not([disabled])')?.click();
    new MutationObserver(press).observe(document.getElementById('table'), { childList: true });
    press();
    setTimeout(() => counted(moves() - own), 1000);
})"""


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
        opened.wait_for_timeout(PAUSE)
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


def test_whoever_has_to_give_the_token_again_gets_its_page(browser: Any, runs: Path) -> None:
    with (
        served(runs / "with-token", "token=open-sesame") as address,
        visiting(browser, address, DESK) as page,
    ):
        page.goto("/play")
        page.locator("input[name=token]").fill("open-sesame")
        page.keyboard.press("Enter")
        page.wait_for_url("**/play")
        begin(page, "dond", "scripted", "player_0")
        page.wait_for_selector("#text")
        page.context.clear_cookies()  # as after a start with another token
        page.locator("#text").fill("Hello")
        page.get_by_role("button", name="Send").click()
        page.wait_for_url("**/enter")
        assert page.locator("header").count() == 1


def test_two_people_at_once_see_their_own_games(browser: Any, address: str) -> None:
    """Nothing sent to one person's browser holds the other's words or the address of the other's game."""
    found: list[list[Any]] = [[], []]
    people = []
    for answers in found:
        page = browser.new_context(viewport=DESK, base_url=address).new_page()
        page.on("requestfinished", lambda sent, answers=answers: answers.append(sent))
        begin(page, "dond", "scripted", "player_0")
        people.append(page)
    for number, page in enumerate(people):
        page.wait_for_selector("#now form.reply")
        before = version(page)
        page.locator("#text").fill(f"word{number} of mine")
        page.get_by_role("button", name="Send").click()
        changed(page, before)
    addresses = [page.url for page in people]
    for number, page in enumerate(people):
        other = addresses[1 - number]
        replies = [sent.response().text() for sent in found[number] if sent.resource_type == "fetch"]
        sent = [page.content(), *replies]
        assert replies and all(f"word{number}" in text for text in sent)
        foreign = re.compile(f".{{30}}word{1 - number}.{{20}}|.{{30}}{re.escape(other.rpartition('/')[2])}")
        assert [foreign.findall(text) for text in sent] == [[]] * len(sent)
        assert page.goto(other).status == 404
        page.context.close()


@pytest.mark.slow
def test_a_finished_run_is_played_by_its_page(browser: Any, finished: Path, bases: Path, tmp_path: Path) -> None:
    """All kinds of opponents are offered; a run whose name is hostile is played and watched, and nothing runs."""
    name = "<img src=x onerror=window.hurt=1>"
    shutil.copytree(finished, tmp_path / name)
    shutil.copytree(bases, tmp_path / "bases")
    with (
        served(tmp_path, "chat.url=http://127.0.0.1:9/v1", "chat.model=some", "chat.key=''") as address,
        visiting(browser, address, DESK) as page,
    ):
        page.goto("/play")
        groups = page.locator("form:has(input[value=dond]) optgroup")
        labels = groups.evaluate_all("all => all.map((group) => group.label)")
        assert labels == [kind.label for kind in Kind if kind is not Kind.PLANNER]  # who plays Diplomacy alone
        assert groups.nth(Kind.RUN).inner_text().strip() == name
        begin(page, "dond", name, "player_0")
        assert name in page.locator("h1").inner_text()
        finish_game(page)
        assert state(page) == "over"
        page.get_by_role("link", name="Watch this game").click()
        assert name in page.locator(".recorded").inner_text() and page.locator(".belief:visible").count()


@pytest.mark.slow
def test_the_server_is_killed_and_the_open_page_goes_on(browser: Any, endpoint: Server, tmp_path: Path) -> None:
    """Restarts happen while the page waits for the partner, and on the person's turn. A reply that is sent in between
    arrives once, and nothing is reloaded by hand."""
    chat = (f"chat.url={endpoint.url}", "chat.model=some", "chat.key=''", f"chat.answers={tmp_path}/chat.jsonl")
    endpoint.going.clear()  # type: ignore[attr-defined]
    gone = "#away:has-text('The server does not answer')"
    with server(tmp_path, *chat) as (address, process):
        context = browser.new_context(viewport=DESK, base_url=address)
        page = context.new_page()
        begin(page, "dond", "chat", "player_0")
        greet(page)
        page.wait_for_selector(".typing")
        page.evaluate("window.stayed = true")
        process.kill()
    page.wait_for_selector(gone)
    endpoint.going.set()  # type: ignore[attr-defined]
    port = int(address.rpartition(":")[2])
    with server(tmp_path, *chat, port=port) as (_, process):
        page.wait_for_selector("text=The hats are mine.")
        page.wait_for_selector("#now form.reply")
        assert not page.locator("#away").is_visible()
        before, log_before = version(page), page.locator(".log").inner_text()
        process.kill()
    page.locator("#text").fill("I need the hats")
    page.get_by_role("button", name="Send").click()
    page.wait_for_selector(gone)
    with server(tmp_path, *chat, port=port):
        changed(page, before)
        assert not page.locator("#away").is_visible()
        log = page.locator(".log").inner_text()
        assert log.startswith(log_before) and log.count("I need the hats") == 1
        finish_game(page)
        assert state(page) == "over" and page.evaluate("window.stayed")
    context.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_axe_finds_nothing_serious(
    browser: Any, address: str, endpoint: Server, seeded: Callable[[int], None], size: Any, scheme: Any
) -> None:
    """Every phase of each kind of game is checked, in both colour schemes."""
    endpoint.going.set()  # type: ignore[attr-defined]
    context = browser.new_context(viewport=size, color_scheme=scheme, base_url=address, reduced_motion="reduce")
    page = context.new_page()
    page.goto("/play")
    check_axe(page, "play")
    for game, opponent, seat, phases in (
        ("dond", "chat", "player_0", {"talk", "dialog", "over"}),
        ("dond", "scripted", "player_0", {"talk", "claim", "over"}),
        ("among_us", "careful", "crewmate", {"map", "talk", "vote", "over"}),
        ("among_us", "careful", "imposter", {"map", "talk", "vote", "over"}),
    ):
        seeded(SEEDS.get(seat, 1))
        begin(page, game, opponent, seat)
        met = set()

        def look(phase: str, met: set[str] = met, where: str = f"{game}, {seat}") -> None:
            met.add(phase)
            check_axe(page, f"{where}, {phase}")

        finish_game(page, look)
        assert met >= phases, met
    for path in ("/watch/no/no/1", "/play"):
        page.goto(path)
        check_axe(page, path)
    context.close()


def test_the_first_page_is_small(browser: Any, address: str) -> None:
    """All that the first page loads, under 100 kB."""
    context = browser.new_context(base_url=address)
    page = context.new_page()
    answers: list[Any] = []
    page.on("response", lambda answer: answers.append(answer))  # its own function: playwright marks it
    page.goto("/play", wait_until="load")
    sizes = {answer.url: len(answer.body()) for answer in answers if answer.url.startswith(address)}
    assert len(answers) == 3 == len(sizes) and 10_000 < sum(sizes.values()) < 100_000, sizes
    context.close()
