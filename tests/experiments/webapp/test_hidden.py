"""Secrets are not sent: two games that differ in one secret alone send the same bytes."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from starlette.testclient import TestClient

from experiments.webapp import engine, opponents, pages
from experiments.webapp.store import new_record
from marl.agents.text import TextAgent
from marl.rollout.seeds import Game
from tests.experiments.webapp.test_web import Page, serving

NAMES = ("Red", "Blue", "Green", "Pink", "Orange", "Purple")  # by seat; a person has the first
KILLER, VICTIM = NAMES[4:]
SEED = next(s for s in range(99) if np.random.default_rng([s, engine.SEAT]).integers(4) == 0)  # the first crewmate's
SESSION = re.compile(r"[0-9a-f]{24}\.[0-9a-f]{64}")
Sent = dict[tuple[str, ...], set[str]]


class Same:
    """A player that acts the same whatever it knows."""

    def __init__(self) -> None:
        self.name, self.replies = "", 0

    def observe(self, text: str) -> None:
        if found := re.search(r"You are (\w+), an? ", text):
            self.name = found[1]

    def reply(self, text: str, options: Sequence[str] = ()) -> str:
        self.observe(text)
        self.replies += 1
        if not options:
            claims = self.replies > 1 and not self.name
            return "[propose] (0 books, 0 hats, 1 balls) [END]" if claims else "[message] two hats ? [END]"
        wanted = (f"kill {VICTIM}" if self.name == KILLER else "", "wait", "skip")
        return next(each for each in wanted if each in options)


def noting(sent: Sent, who: str) -> Callable[[Any], None]:
    """Keeps everything of each answer: status, headers with cookies, and the body, whether page, JSON or events."""

    def note(response: Any) -> None:
        response.read()
        request = response.request
        shown = re.findall(r'data-state=\\?"(\w+)\\?" data-version=\\?"(\d+)', response.text)
        headers = "\n".join(f"{name}: {value}" for name, value in response.headers.items())
        asked = (who, request.method, request.url.raw_path.decode(), request.content.decode())
        key = (*asked, *(shown[-1] if shown else ("", "")))
        sent.setdefault(key, set()).add(SESSION.sub("SESSION", f"{response.status_code}\n{headers}\n\n{response.text}"))

    return note


def everything(runs: Path, game: str, start: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Sent, Sent]:
    """Plays one game, while a second player asks for all of it. Returns what both were sent until its end, and then."""
    during: Sent = {}
    after: Sent = {}
    agent = TextAgent("scripted", lambda seed, role: Same())
    monkeypatch.setattr(opponents, "text_player", lambda *_: agent)
    monkeypatch.setattr(engine, "Game", lambda seed: Game(seed, start))
    monkeypatch.setattr(pages, "new_record", lambda *given: replace(new_record(*given), id="game", seed=SEED))
    settings = ("games.among_us.env.players=6", "games.among_us.env.imposters=2", "games.among_us.env.max_steps=24")
    with serving(runs, *settings, "games.among_us.env.cooldown=1", "requests=100000") as browser:
        person, other = browser(), browser()
        for who, client in (("person", person), ("other", other)):
            client.event_hooks = {"response": [noting(during, who)]}
        seat, against = ("player_0", "scripted") if game == "dond" else ("crewmate", "careful")
        page = Page(person, game, against, seat)
        page.settle()
        while page.state == "yours":
            look_around(person, other, page)
            reports = [choice for choice in page.choices if choice.startswith("report")]
            if page.choices:
                page.send(choice=next(each for each in (*reports, "wait", "skip") if each in page.choices))
            elif 'value="propose"' in page.text and int(page.number):
                page.send(kind="propose", books="0", hats="1", balls="0")
            else:
                page.send(kind="message", text="who was it ?")
        assert page.state == "over"
        for who, client in (("person", person), ("other", other)):
            client.event_hooks = {"response": [noting(after, who)]}
        look_around(person, other, page)
    return during, after


def look_around(person: TestClient, other: TestClient, page: Page) -> None:
    """Asks for all pages that may say something of this game, for its player and for another."""
    form = {"number": page.number if page.state == "yours" else "0", "kind": "message", "text": ""}
    for client in (person, other):
        for path in (
            "/play",
            "/watch",
            "/runs",
            page.address,
            f"{page.address}/live?since=0",
            "/watch/web/game.jsonl/1",
        ):
            client.get(path)
        client.post(page.address, data=form | {"number": "99"}, headers={"x-script": "1"})
    other.post(page.address, data=form)
    other.post(f"{page.address}/stop")


@pytest.mark.parametrize(
    ("game", "start", "secrets"),
    [
        ("dond", {"counts": (3, 1, 3), "first": 0}, [{"values": ((1, 4, 1), v)} for v in ((3, 1, 0), (0, 1, 3))]),
        ("among_us", {"names": NAMES}, [{"imposters": (4, seat)} for seat in (2, 3)]),
    ],
)
def test_all_that_is_sent_is_the_same_whatever_others_hold(
    game: str, start: dict[str, Any], secrets: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partner's values, or which of two others is an imposter, change no byte of any answer before the end."""
    (one, one_end), (two, two_end) = (
        everything(tmp_path / str(number), game, start | secret, monkeypatch) for number, secret in enumerate(secrets)
    )
    ends = {key for sent in (one, two) for key in sent if "over" in key}
    seen = (one.keys() | two.keys()) - ends
    assert len(seen) > 20 and {key[0] for key in seen} == {"person", "other"}
    for key in seen:
        if "waiting" in key and not (key in one and key in two):
            continue  # one was asked at another moment
        assert one.get(key) == two.get(key), key
    sent = "\n".join(text for key in seen for text in one[key] | two[key] if key in one and key in two)
    for kind in ("text/html", "text/event-stream", "set-cookie", "\ndata: "):
        assert kind in sent
    if game == "among_us":
        assert f"body of {VICTIM}" in sent and "who was it ?" in sent  # a kill, a discussion and a vote are among it
    else:
        assert "two hats ?" in sent
    others = [text for key in seen if key[0] == "other" and "/play/game" in key[2] for text in one[key]]
    assert others and all(text.startswith("404") for text in others)
    assert one_end != two_end  # the recording of the finished game tells it: what is compared above would, too
