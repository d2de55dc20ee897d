"""A server, in this process or one of its own, and a real Chromium: what tests of the web page do with them."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from omegaconf import DictConfig

from experiments import web
from tests.composing import configure

ROOT = Path(__file__).resolve().parents[3]
QUICK = (
    "games.among_us.env.max_steps=60", "games.among_us.env.cooldown=1", "games.among_us.env.messages_each=1",
    "games.dond.env.max_entries=6", "device=cpu", "requests=100000",
)  # fmt: skip
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
TOKENS = ("HF_HUB_OFFLINE=1", "OMP_NUM_THREADS=1")


@contextmanager
def visiting(browser: Any, address: str, size: Any) -> Iterator[Any]:
    """A page of a new person. Fails if a script of the page fails, what is hostile runs, or anything is fetched from
    another host."""
    context = browser.new_context(viewport=size, base_url=address, reduced_motion="reduce")
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda sent: sent.url.startswith((address, "data:", "about:")) or faults.append(sent.url))
    page.on("dialog", lambda dialog: (faults.append(dialog.message), dialog.dismiss()))
    try:
        yield page
        assert page.evaluate("window.hurt") is None
        assert faults == []
    finally:
        context.close()


@contextmanager
def site_of(cfg: DictConfig) -> Iterator[Any]:
    """The application of `python -m experiments.web` with these settings."""
    web.check(cfg)
    app, shut, _ = web.site(cfg)
    try:
        yield app
    finally:
        shut()


@contextmanager
def served(runs: Path, *settings: str) -> Iterator[str]:
    """Serves the same pages from a thread of this process, which starts at once. Yields their address."""
    import uvicorn

    with site_of(configure("web", f"runs={runs}", *QUICK, *settings)) as app, web.listen("127.0.0.1", 0) as listening:
        running = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
        thread = Thread(target=running.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            running.should_exit = True
            thread.join()


@contextmanager
def server(runs: Path, *settings: str, port: int = 0) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Runs `python -m experiments.web` on these runs. Yields its address and its process, which is ended afterwards."""
    command = [sys.executable, "-u", "-m", "experiments.web", f"runs={runs}", f"port={port}", *QUICK, *settings]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **dict(each.split("=") for each in TOKENS)}
    process = subprocess.Popen(command, cwd=runs, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                yield found[0], process
                return
        raise AssertionError("".join(lines))
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def begin(page: Any, game: str, opponent: str, seat: str = "any", objective: str = "own") -> None:
    """Begins a game by the form."""
    page.goto("/play")
    form = page.locator(f"form:has(input[value={game}])")
    form.locator("select[name=opponent]").select_option(opponent)
    form.locator("select[name=seat]").select_option(seat)
    if game == "dond":
        form.locator("select[name=objective]").select_option(objective)
    form.locator("button.main").click()
    page.wait_for_url("**/play/*")


def finish_game(
    page: Any, seen: Callable[[str], None] = lambda phase: None, every: bool = False, seconds: float = 90
) -> None:
    """Plays the game on this page by the mouse to its end: any move that the game may accept.

    `seen` is called at the first, or at every reply of each phase: map, talk, vote, dialog, claim, over.
    """
    until, sent, phases = time.monotonic() + seconds, 0, set[str]()

    def met(phase: str) -> None:
        if every or phase not in phases:
            phases.add(phase)
            seen(phase)

    while (now := state(page)) not in ("over", "stopped"):
        assert time.monotonic() < until, page.content()
        if now == "waiting":
            page.wait_for_timeout(30)
            continue
        before = version(page)
        choices = page.locator("#now form.reply button[name=choice]")
        if choices.count():
            met("map" if page.locator("#now .map").count() else "vote")
            deeds = choices.filter(has_text=re.compile("^(kill|report|do task)"))
            (deeds.first if deeds.count() else choices.nth(sent % choices.count())).click()
        elif page.locator("#now input[name=books]").count() and (sent >= 2 or not page.locator("#text").count()):
            if page.locator("#claims").count():
                page.locator("#claims").click()
                met("dialog")
            else:
                met("claim")
            page.locator("button[aria-label='more hats']").click()
            page.get_by_role("button", name="Propose").click()
        else:
            met("talk")
            page.locator("#text").fill(f"I need the hats, {sent}")
            page.get_by_role("button", name="Send").click()
        sent += 1
        changed(page, before)
    met("over")


def fits(page: Any) -> bool:
    """Returns whether nothing is cut off at the side."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


def check_axe(page: Any, where: str) -> None:
    """Fails at a serious or critical finding of axe, and if something is cut off."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs pip install -e '.[browser]'")
    found = [v for v in axe.Axe().run(page).response["violations"] if v["impact"] in ("serious", "critical")]
    assert not [(v["id"], v["nodes"][0]["html"][:200], v["nodes"][0]["failureSummary"][-200:]) for v in found], where
    assert fits(page), where


def state(page: Any) -> str:
    return str(page.locator("[data-state]").first.get_attribute("data-state"))


def version(page: Any) -> str:
    return str(page.locator("[data-state]").first.get_attribute("data-version"))


def changed(page: Any, before: str) -> None:
    """Waits until the table has changed."""
    page.wait_for_function(
        "before => document.querySelector('[data-state]').dataset.version !== before", arg=before, timeout=30000
    )
