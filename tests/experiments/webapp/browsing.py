"""A server in a process of its own and a real Chromium, for tests of the web page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from omegaconf import DictConfig

from experiments import web
from tests.composing import configure

ROOT = Path(__file__).resolve().parents[3]
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
QUICK = (
    "games.among_us.env.max_steps=60", "games.among_us.env.cooldown=1", "games.among_us.env.messages_each=1",
    "games.dond.env.max_entries=6", "device=cpu", "requests=100000",
)  # fmt: skip
TOKENS = ("HF_HUB_OFFLINE=1", "OMP_NUM_THREADS=1")


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless Chromium. Skips where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[browser]'")
    if not CHROMIUM:
        pytest.skip("needs a Chromium, as of Debian's package chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


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
    """The same pages from a thread of this process, which starts at once: their address."""
    import uvicorn

    with site_of(configure("web", f"runs={runs}", *QUICK, *settings)) as app, web.listen("127.0.0.1", 0) as listening:
        running = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
        thread = Thread(target=running.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            running.should_exit = True
            thread.join()


@contextmanager
def server(runs: Path, *settings: str, port: int = 0) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`python -m experiments.web` on these runs: its address and its process, which is ended at the end."""
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


def finish_game(page: Any, seconds: float = 90) -> None:
    """Plays the game on this page by the mouse to its end: any move that the game may accept."""
    until, sent = time.monotonic() + seconds, 0
    while (now := state(page)) not in ("over", "stopped"):
        assert time.monotonic() < until, page.content()
        if now == "waiting":
            page.wait_for_timeout(30)
            continue
        before = version(page)
        choices = page.locator("#now form.reply button[name=choice]")
        if choices.count():
            choices.nth(sent % choices.count()).click()
        elif page.locator("#now input[name=books]").count() and (sent >= 2 or not page.locator("#text").count()):
            if page.locator("#claims").count():
                page.locator("#claims").click()
            page.locator("button[aria-label='more hats']").click()
            page.get_by_role("button", name="Propose").click()
        else:
            page.locator("#text").fill(f"I need the hats, {sent}")
            page.get_by_role("button", name="Send").click()
        sent += 1
        changed(page, before)


def state(page: Any) -> str:
    return str(page.locator("[data-state]").first.get_attribute("data-state"))


def version(page: Any) -> str:
    return str(page.locator("[data-state]").first.get_attribute("data-version"))


def changed(page: Any, before: str) -> None:
    """Waits until the table is another one."""
    page.wait_for_function(
        "before => document.querySelector('[data-state]').dataset.version !== before", arg=before, timeout=30000
    )
