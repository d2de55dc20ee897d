"""A server in a process of its own that is killed, and a second one beside it."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest

from tests.experiments.webapp.browsing import server
from tests.experiments.webapp.test_web import Page

pytestmark = pytest.mark.slow
MANY = ("games_at_once=20", "games_each=20")


def seen(page: Page) -> list[str]:
    """Lines of the page's log."""
    log = page.text.partition('role="log"')[2].partition('<div id="now">')[0]
    return re.findall(r'<(?:p class="news[^"]*"|div class="bubble")>(.*?)</(?:p|div)>', log)


def test_twenty_games_outlive_the_server(tmp_path: Path) -> None:
    """The server is killed while replies of 20 games are under way. After its restart no line that a page had shown is
    missing or doubled, open pages are told where their games are, and every game goes on to its end."""
    answered = threading.Semaphore(0)

    def replied(page: Page) -> None:
        with suppress(httpx2.HTTPError, IndexError):  # the server dies meanwhile
            while page.state == "yours":
                page.move()
                answered.release()

    with httpx2.Client(follow_redirects=True, timeout=60) as client, server(tmp_path, *MANY) as (address, process):
        client.base_url = address
        pages = [
            Page(client, *(("dond", "scripted", "player_0") if n % 2 else ("among_us", "careful", "crewmate")))
            for n in range(20)
        ]
        for page in pages:
            page.settle()
            page.move()
        with ThreadPoolExecutor(20) as pool:
            for page in pages:
                pool.submit(replied, page)
            assert all(answered.acquire(timeout=60) for _ in range(10))
            process.kill()
            process.wait()
    shown = [(seen(page), page.state) for page in pages]  # what the server had answered before it died
    assert sum(state in ("yours", "waiting") for _, state in shown) >= 10
    port = int(address.rpartition(":")[2])
    with httpx2.Client(follow_redirects=True, timeout=60, base_url=address, cookies=client.cookies) as client:
        for page in pages:
            page.browser = client
        with server(tmp_path, *MANY, port=port):
            for page, (before, state) in zip(pages, shown, strict=True):
                if state == "waiting":  # the browser asks again by itself, and says what it saw last
                    last = re.findall(r'data-version="(\d+)"', page.text)[0]
                    events = client.get(f"{page.address}/live", headers={"last-event-id": last}).text
                    news = [line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data: ")]
                    assert news and f"id: {last}\n" not in events
                    page.read(json.loads(news[-1]))
                    assert seen(page)[: len(before)] == before
                page.load()
                page.settle()
                assert seen(page)[: len(before)] == before
                page.finish()
                assert page.state == "over", page.text
    games = list((tmp_path / "web/episodes").glob("*.jsonl"))
    assert len(games) == 20
    for path in games:
        transcript = json.loads(path.read_text())
        steps = [(turn["agent"], turn["step"]) for turn in transcript["turns"]]
        assert len(set(steps)) == len(steps)
