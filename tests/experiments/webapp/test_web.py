"""The web page against scripted players and a tiny model: whole games, hostile visitors, restarts."""

import html
import json
import re
import socket
import sqlite3
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

import uvicorn
from starlette.testclient import TestClient

from experiments import web
from experiments.webapp import session
from experiments.webapp.engine import Engine, Limits
from experiments.webapp.opponents import Loaded, Opponents
from experiments.webapp.store import Store, new_record
from marl.agents.base import Agent
from marl.agents.model import ModelAgent
from marl.agents.text import TextAgent
from marl.common.errors import UserError
from marl.common.files import write_json
from marl.intents.agent import ACTION, DIALOGUE, PARTS
from marl.intents.streams import FORM
from marl.intents.talker import Talker
from marl.report.transcripts import read_episodes
from marl.storage.checkpoint import save_policy
from tests.composing import configure
from tests.experiments.webapp.browsing import site_of
from tests.marl.models import tiny_policy
from tests.marl.planners import negotiator

HOSTILE = "<script>alert(1)</script> \"'&{{ 7*7 }} hats"
QUICK = (
    "games.among_us.env.max_steps=60", "games.among_us.env.cooldown=1", "games.among_us.env.messages_each=1",
    "device=cpu",
)  # fmt: skip


@contextmanager
def serving(runs: Path, *settings: str) -> Iterator[Callable[[], TestClient]]:
    """A server on these runs; makes browsers, each of a person of its own."""
    cfg = configure("web", f"runs={runs}", f"out={runs}/web", *QUICK, *settings)
    with site_of(cfg) as app:
        yield lambda: TestClient(app, base_url="http://localhost:8700")


class Page:
    """A game in a browser without scripts: reads the page, fills in the form, follows the answer."""

    def __init__(self, browser: TestClient, game: str, opponent: str, seat: str = "any") -> None:
        self.browser, self.game, self.sent = browser, game, []
        found = browser.post("/play", data={"game": game, "opponent": opponent, "seat": seat, "objective": "own"})
        assert found.status_code == 200, found.text
        self.address = str(found.url.path)
        self.read(found.text)

    def read(self, text: str) -> None:
        self.text = text
        self.sent.append(text)

    def load(self) -> None:
        self.read(self.browser.get(self.address).text)

    @property
    def state(self) -> str:
        return re.findall(r'data-state="(\w+)"', self.text)[0]

    @property
    def number(self) -> str:
        return re.findall(r'name="number" value="(\d+)"', self.text)[0]

    @property
    def choices(self) -> list[str]:
        return [html.unescape(choice) for choice in re.findall(r'name="choice" value="([^"]+)"', self.text)]

    def settle(self) -> None:
        """Waits for the others."""
        until = time.monotonic() + 30
        while self.state == "waiting":
            assert time.monotonic() < until, self.text
            self.load()

    def send(self, **fields: str) -> None:
        self.read(self.browser.post(self.address, data={"number": self.number, **fields}).text)
        self.settle()

    def move(self) -> None:
        """Any reply that the game may accept."""
        if self.choices:
            self.send(choice=self.choices[int(self.number) % len(self.choices)])
        elif 'value="propose"' in self.text and int(self.number) >= 2:
            self.send(kind="propose", books="0", hats="1", balls="0")
        else:
            self.send(kind="message", text=HOSTILE)

    def finish(self) -> None:
        self.settle()
        while self.state == "yours":
            self.move()


def recorded(runs: Path) -> list[dict]:
    return [game for path in sorted((runs / "web/episodes").glob("*.jsonl")) for game in read_episodes(path)]


@pytest.mark.parametrize(
    ("game", "opponent", "seat"),
    [
        ("dond", "scripted", "player_0"),
        ("dond", "random", "player_1"),
        ("among_us", "careful", "crewmate"),
        ("among_us", "careful", "imposter"),
    ],
)
def test_a_whole_game_is_played_recorded_and_watched(game: str, opponent: str, seat: str, tmp_path: Path) -> None:
    with serving(tmp_path) as browser:
        person = browser()
        page = Page(person, game, opponent, seat)
        page.finish()
        assert page.state == "over" and "The game is over" in page.text
        (transcript,) = recorded(tmp_path)
        for text in page.sent:
            assert "<script>alert" not in text and "facts" not in text and str(transcript["seed"]) not in text
        held = {agent: transcript["roles"][agent] for agent, name in transcript["players"].items() if name == "human"}
        assert len(held) == 1 and (seat in held or seat in held.values())
        assert len(transcript["about"]["reply_seconds"]) == sum(t["agent"] in held for t in transcript["turns"])
        listed = person.get("/watch").text
        address = re.findall(r'href="(/watch/web/[^"]+)"', listed)[0]
        shown = person.get(address)
        assert shown.status_code == 200 and "<script>alert" not in shown.text
        if any(turn["message"] for turn in transcript["turns"]):
            assert re.search(r'id="m[\d-]+"', shown.text) and 'href="#m' in shown.text
        assert page.address in person.get("/play").text
        assert page.address not in browser().get("/play").text


@pytest.mark.parametrize(("game", "opponent"), [("dond", "scripted"), ("among_us", "careful")])
def test_a_restart_goes_on_where_the_game_was(game: str, opponent: str, tmp_path: Path) -> None:
    with serving(tmp_path) as browser:
        person = browser()
        page = Page(person, game, opponent, "player_0" if game == "dond" else "crewmate")
        page.settle()
        page.move()
        before = page.text
        cookies = person.cookies
    with serving(tmp_path) as browser:
        page.browser = browser()
        page.browser.cookies = cookies
        page.load()
        assert page.text == before  # word for word, and never an empty table first
        last = re.findall(r'data-version="(\d+)"', before)[0]
        again = page.browser.get(f"{page.address}/live?since=0", headers={"last-event-id": str(int(last) - 1)})
        (event,) = re.findall(r"^id: (\d+)$", again.text, re.M)  # a page left open is told where the game is
        assert event == last
        page.finish()
        assert page.state == "over"
    (transcript,) = recorded(tmp_path)
    assert sum(name == "human" for name in transcript["players"].values()) == 1


def test_of_two_servers_the_second_refuses(tmp_path: Path) -> None:
    with serving(tmp_path), pytest.raises(UserError, match="another server uses these games"), serving(tmp_path):
        pass
    (tmp_path / "web/games.sqlite").write_text("no database, and longer than the header of one" * 20)
    with pytest.raises(UserError, match="is no database"), serving(tmp_path):
        pass


def test_only_the_own_game_is_shown(tmp_path: Path) -> None:
    with serving(tmp_path) as browser:
        page = Page(browser(), "dond", "scripted", "player_0")
        other = browser()
        other.get("/play")
        for address in (page.address, f"{page.address}/live"):
            assert other.get(address).status_code == 404
        assert other.post(page.address, data={"number": "0", "text": "hi"}).status_code == 404
        assert other.post(f"{page.address}/stop").status_code == 404
        forged = TestClient(other.app, base_url="http://localhost:8700", cookies={"session": "0" * 24 + "." + "0" * 64})
        assert forged.get(page.address).status_code == 404
        cookie = page.browser.cookies["session"]
        other_cookie = {"session": ("b" if cookie[0] == "a" else "a") + cookie[1:]}
        swapped = TestClient(other.app, base_url="http://localhost:8700", cookies=other_cookie)
        assert swapped.get(page.address).status_code == 404
        first = other.get("/play", headers={"cookie": ""})
        cookie = first.headers["set-cookie"].lower()
        assert "httponly" in cookie and "samesite=lax" in cookie
        assert "script-src 'self'" in first.headers["content-security-policy"]


def test_replayed_and_reordered_replies_count_once(tmp_path: Path) -> None:
    with serving(tmp_path) as browser:
        page = Page(browser(), "dond", "scripted", "player_0")
        page.settle()
        number = page.number
        page.send(kind="message", text="one")
        for old in (number, "99", "-1", "x", ""):
            page.browser.post(page.address, data={"number": old, "kind": "message", "text": "two"})
        page.load()
        page.settle()
        assert page.text.count(">one<") == 1 and ">two<" not in page.text


def test_changes_come_as_events_until_it_is_the_person_s_turn(tmp_path: Path) -> None:
    with serving(tmp_path) as browser:
        page = Page(browser(), "among_us", "careful", "crewmate")
        stream = page.browser.get(f"{page.address}/live")
        assert stream.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: ")]
        states = [re.findall(r'data-state="(\w+)"', event)[0] for event in events]
        assert states[-1] == "yours" and set(states[:-1]) <= {"waiting"}
        versions = [int(re.findall(r'data-version="(\d+)"', event)[0]) for event in events]
        assert versions == sorted(set(versions))


def test_corrections_are_those_of_models(tmp_path: Path) -> None:
    with serving(tmp_path) as browser:
        page = Page(browser(), "dond", "scripted", "player_0")
        page.settle()
        if page.number == "0" and "Partner" not in re.sub(r"<pre>.*?</pre>", "", page.text, flags=re.S):
            page.send(kind="propose", books="0", hats="0", balls="0")
            assert "Talk before you propose" in page.text
        else:
            page.send(kind="message", text="[propose] all")
            assert "Send one message or one proposal at a time" in page.text


def test_too_much_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, "games_each=2", "games_at_once=3") as browser:
        person = browser()
        page = Page(person, "dond", "scripted", "player_0")
        page.settle()
        long = person.post(page.address, data={"number": page.number, "text": "x" * 10_000_000})
        assert long.status_code == 413
        longer = person.post(page.address, data={"number": page.number, "text": "x" * 1001})
        assert longer.status_code == 400 and "at most 1000 characters" in longer.text
        odd = person.post(
            page.address, content=b"\xff=\xff", headers={"content-type": "application/x-www-form-urlencoded"}
        )
        assert odd.status_code == 400
        assert person.post(page.address, json={"number": page.number}).status_code == 415
        ask = {"game": "dond", "opponent": "scripted", "seat": "any", "objective": "own"}
        assert person.post("/play", data=ask).status_code == 200
        third = person.post("/play", data=ask)
        assert third.status_code == 400 and "2 open games" in third.text
        other = browser()
        assert other.post("/play", data=ask).status_code == 200
        full = other.post("/play", data=ask)
        assert full.status_code == 503 and "You are number 1 in the queue" in full.text
        assert 'name="opponent" value="scripted"' in full.text  # what is sent again
        assert "You are number 2 in the queue" in browser().post("/play", data=ask).text
        person.post(f"{page.address}/stop")
        assert other.post("/play", data=ask).status_code == 200
        for wrong in ({"opponent": "../../etc"}, {"seat": "imposter"}, {"game": "chess"}, {"objective": "1e9"}):
            assert other.post("/play", data={**ask, **wrong}).status_code == 400
        for path in (
            "/watch/../x/1",
            "/watch/web/..%2f..%2fx/1",
            "/watch/.hidden/x.jsonl/1",
            f"/watch/{'x' * 300}/x.jsonl/1",
            "/runs/x",
            "/runs/x/report",
        ):
            assert other.get(path).status_code in (400, 404)


def test_requests_a_minute_are_limited(tmp_path: Path) -> None:
    with serving(tmp_path, "requests=10") as browser:
        person = browser()
        codes = [person.get("/play").status_code for _ in range(15)]
        assert codes[:9] == [200] * 9 and codes[-1] == 429


def test_new_people_of_an_address_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropping the cookie does not reset the limit. People with a cookie go on, and other addresses have limits of
    their own."""
    now = [0.0]
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with serving(tmp_path, "new_people=10") as browser:
        known = browser()
        assert known.get("/play").status_code == 200
        codes = [browser().get("/play").status_code for _ in range(15)]
        assert codes == [200] * 9 + [429] * 6
        refused = browser().get("/play")
        assert "Too many new visitors" in refused.text and "set-cookie" not in refused.headers
        assert browser().post("/play", data={"game": "dond"}).status_code == 429
        now[0] = 6.0  # a tenth of a minute later there is one more
        assert [browser().get("/play").status_code for _ in range(2)] == [200, 429]
        assert known.get("/play").status_code == 200
        other = TestClient(known.app, base_url="http://localhost:8700", client=("192.0.2.7", 1))
        assert other.get("/play").status_code == 200
        assert b"192.0.2.7" not in b"".join(path.read_bytes() for path in (tmp_path / "web").iterdir())
    with serving(tmp_path, "token=open-sesame", "new_people=3") as browser:
        codes = [browser().post("/enter", data={"token": "open-sesame"}).status_code for _ in range(5)]
        assert codes == [200] * 3 + [429] * 2


class Shown(webbrowser.BaseBrowser):
    """A browser of this machine that notes what it is to show."""

    def __init__(self, name: str, asked: list[str]) -> None:
        super().__init__(name)
        self.asked = asked

    def open(self, url: str, new: int = 0, autoraise: bool = True) -> bool:
        self.asked.append(url)
        return True


def test_the_page_is_shown_in_a_browser_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The browser opens only if the user asks for it, once the port listens, and never if it would take over the
    terminal."""
    asked: list[str] = []
    taken: list[bool] = []

    def run(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        until = time.monotonic() + 10
        while name == "firefox" and opens and not asked and time.monotonic() < until:
            time.sleep(0.01)
        with socket.create_connection(sockets[0].getsockname(), timeout=5):
            taken.append(True)

    monkeypatch.setattr(uvicorn.Server, "run", run)
    for name, opens in (("firefox", False), ("firefox", True), ("/usr/bin/w3m", True), ("", True)):
        asked.clear()

        def found(name: str = name) -> webbrowser.BaseBrowser:
            if not name:
                raise webbrowser.Error("could not locate runnable browser")
            return Shown(name, asked)

        monkeypatch.setattr(webbrowser, "get", found)
        settings = (f"runs={tmp_path}", "port=0", "device=cpu", f"open={str(opens).lower()}")
        web.main(configure("web", *settings))
        shown = [url for url in asked if re.fullmatch(r"http://127\.0\.0\.1:\d+", url)]
        assert len(shown) == len(asked) == (name == "firefox" and opens)
    assert len(taken) == 4
    assert "experiments.web open=true" in (Path(web.__file__).parents[1] / "Makefile").read_text()


def test_other_names_and_other_sites_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as browser:
        person = browser()
        assert person.get("/play", headers={"host": "evil.example"}).status_code == 421
        ask = {"game": "dond", "opponent": "scripted", "seat": "any", "objective": "own"}
        for origin in ("http://evil.example", "null"):
            assert person.post("/play", data=ask, headers={"origin": origin}).status_code == 403
        assert person.post("/play", data=ask, headers={"origin": "http://localhost:8700"}).status_code == 200


def test_others_need_a_token(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Give a token"):
        web.check(configure("web", "host=0.0.0.0"))
    with pytest.raises(UserError, match="at least 8 characters"):
        web.check(configure("web", "host=0.0.0.0", "token=short"))
    with serving(tmp_path, "host=0.0.0.0", "token=open-sesame") as browser:
        person = browser()
        for path in ("/play", "/watch", "/runs", "/play/x", "/play/x/live"):
            assert person.get(path, follow_redirects=False).headers["location"] == "/enter"
        assert person.post("/play", data={"game": "dond"}, follow_redirects=False).headers["location"] == "/enter"
        assert person.post("/enter", data={"token": "open-sesamf"}).status_code == 403
        assert "Play" in person.post("/enter", data={"token": "open-sesame"}).text
        assert person.get("/play").status_code == 200


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("port=70000", "port=70000"), ("port=true", "port"), ("games_at_once=0", "games_at_once"),
        ("games.dond.env.max_entries=0", "max_entries"), ("temperature=-1", "temperature"),
    ],
)  # fmt: skip
def test_bad_settings_are_told_in_a_sentence(setting: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        web.check(configure("web", setting))


def test_a_port_in_use_is_told_in_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="cannot be used"):
            web.listen("127.0.0.1", taken.getsockname()[1])


# --- The engine -------------------------------------------------------------------------------------------------------
class Meddled(Opponents):
    """Opponents of which one is this agent."""

    def __init__(self, runs: Path, agent: Agent, env: dict) -> None:
        super().__init__(runs, {"dond": env}, device=None)  # type: ignore[arg-type]
        self._loaded[("scripted", "dond")] = Loaded(agent, 8)


class Broken(TextAgent):
    def act(self, requests):  # type: ignore[no-untyped-def]
        if any(request.turn for request in requests):
            raise RuntimeError("out of memory")
        return []


ENV = {"game": "dond", "style": "natural"}


@contextmanager
def running(folder: Path, opponents: Opponents, limits: Limits) -> Iterator[tuple[Engine, Store]]:
    """An engine at work, and the store of its games."""
    store = Store(folder / "games.sqlite")
    engine = Engine(store, opponents, folder, limits)
    engine.start()
    try:
        yield engine, store
    finally:
        engine.shut()
        store.close()


def test_an_opponent_that_fails_ends_its_games_alone(tmp_path: Path) -> None:
    opponents = Meddled(tmp_path, Broken("scripted", lambda seed, role: None), ENV)  # type: ignore[arg-type, return-value]
    with running(tmp_path, opponents, Limits()) as (engine, _):
        record = new_record("me", "scripted", ENV, "player_0")
        engine.open(record).result(10)
        settle(engine, [record])
        if engine.sight(record.id).state == "yours":
            engine.say(record.id, 0, "[message] hi [END]").result(10)
            settle(engine, [record])
        sight = engine.sight(record.id)
        assert sight.state == "stopped" and "not your fault" in sight.entries[-1][1]
        engine.open(new_record("me", "scripted", ENV, "any")).result(10)  # loaded anew, from the real scripts
        assert engine.alive


def test_a_full_disk_ends_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    opponents = Opponents(tmp_path, {"dond": ENV}, device=None)  # type: ignore[arg-type]
    with running(tmp_path, opponents, Limits()) as (engine, store):
        record = new_record("me", "scripted", ENV, "any")
        engine.open(record).result(10)
        settle(engine, [record])
        with monkeypatch.context() as patched:
            for name in ("add", "reply", "end"):
                patched.setattr(store, name, full)
            with pytest.raises(sqlite3.OperationalError):
                engine.open(new_record("me", "scripted", ENV, "any")).result(10)
            with pytest.raises(sqlite3.OperationalError):
                engine.say(record.id, 0, "[message] hi [END]").result(10)
            assert engine.sight(record.id).state == "yours"  # nothing counted that is not kept
            engine.stop(record.id, "enough").result(10)
        assert engine.alive and not engine.busy()
        assert [game.id for game in store.open_games()] == [record.id]  # to go on with at the next start
        engine.open(new_record("me", "scripted", ENV, "any")).result(10)


def test_opponents_whose_filters_refuse_everything_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is printed when another model takes the opponent's place, and when the server stops."""
    monkeypatch.setattr(Talker, "refusals", lambda talker: f"{talker.name}: no message passed")
    for number in (0, 1):
        for part in (ACTION, DIALOGUE):
            made_of = {"env": {"style": "compact", "max_entries": 4}}
            save_policy(tmp_path / f"both-s{number}" / part, negotiator(), {"game": "dond", "made_of": made_of})
        write_json(tmp_path / f"both-s{number}" / PARTS, {"arm": "both", "told": FORM})
    with serving(tmp_path, "models=1", "cicero.nonsense=0") as browser:
        person = browser()
        for number in (0, 1):
            Page(person, "dond", f"both-s{number}+cicero").finish()
            assert re.findall(r"(\S+): no message", capsys.readouterr().out) == ["both-s0+cicero"] * number
    assert re.findall(r"(\S+): no message", capsys.readouterr().out) == ["both-s1+cicero"]


def test_a_silent_person_s_game_is_closed(tmp_path: Path) -> None:
    opponents = Opponents(tmp_path, {"dond": ENV}, device=None)  # type: ignore[arg-type]
    with running(tmp_path, opponents, Limits(idle=0.1)) as (engine, _):
        record = new_record("me", "scripted", ENV, "any")
        engine.open(record).result(10)
        until = time.monotonic() + 10
        while engine.sight(record.id).state != "stopped":
            assert time.monotonic() < until
            time.sleep(0.05)


def test_models_reply_to_all_games_in_one_batch_and_after_a_restart(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """A tiny untrained model: games side by side share calls of `act`, and a game resumed has the same replies."""
    env = {**ENV, "max_entries": 6}
    asked: list[int] = []
    agent = tiny_agent()
    act = agent.act
    monkeypatch.setattr(agent, "act", lambda requests: (asked.append(len(requests)), act(requests))[1])
    store = Store(tmp_path / "games.sqlite")
    records = [new_record("me", "scripted", env, "player_0") for _ in range(6)]
    engine = Engine(store, Meddled(tmp_path, agent, env), tmp_path, Limits(each=8))
    opened = [engine.open(record) for record in records]  # before it starts: all are taken in one go
    engine.start()
    [future.result(60) for future in opened]
    settle(engine, records)
    assert max(asked) == 6
    for record in records:
        if engine.sight(record.id).state == "yours":
            engine.say(record.id, engine.sight(record.id).number, "[message] hats ? [END]").result(60)
    settle(engine, records)
    before = [engine.sight(record.id) for record in records]
    engine.shut()
    store.close()

    with running(tmp_path, Meddled(tmp_path, tiny_agent(), env), Limits(each=8)) as (engine, _):
        assert engine.resumed.wait(60)
        settle(engine, records)
        assert [engine.sight(record.id) for record in records] == before
        for record in records:
            while (sight := engine.sight(record.id)).state == "yours":
                engine.say(record.id, sight.number, "[message] hats ? [END]").result(60)
                settle(engine, [record])
        games = [read_episodes(tmp_path / f"episodes/{record.id}.jsonl")[0] for record in records]
        assert all(game["beliefs"] for game in games)  # what the model believed is watched later
    assert threading.active_count() < 50


def tiny_agent() -> ModelAgent:
    return ModelAgent("tiny", tiny_policy(), slots=16, context=512, max_new_tokens=6, style="compact")


def settle(engine: Engine, records: list) -> None:
    until = time.monotonic() + 60
    while any(engine.sight(record.id).state == "waiting" for record in records):
        assert time.monotonic() < until
        time.sleep(0.01)
