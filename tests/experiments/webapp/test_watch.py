"""Watching recorded games; opponents that plan or are behind an endpoint; hostile names, floods, models too large."""

import html
import json
import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from starlette.testclient import TestClient

from envs.among_us import events, reading
from envs.core import Style
from experiments.webapp import watch
from experiments.webapp.engine import Engine, Limits
from experiments.webapp.opponents import Opponents
from experiments.webapp.store import Store, new_record
from experiments.webapp.timeline import timeline_of
from marl.agents.chat import ChatConfig
from marl.agents.model import PlayConfig
from marl.common.errors import UserError
from marl.common.files import write_text
from marl.decoding import memory
from marl.metrics.among_us import room_name, sights
from marl.planning.planner import PlannerConfig, planning_agent
from marl.report.transcripts import episode_to_json, read_episodes, write_episodes, write_transcripts
from marl.report.views import story_of
from marl.rollout.games import env_maker, scripted
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import Game
from marl.storage.checkpoint import save_policy
from tests.endpoint import Server
from tests.experiments.webapp.test_web import Meddled, Page, running, serving, settle, tiny_agent
from tests.marl.models import tiny_policy
from tests.marl.planners import negotiator


# --- Watching ---------------------------------------------------------------------------------------------------------
def test_two_runs_are_watched_side_by_side(tmp_path: Path) -> None:
    """Games that were dealt the same are offered, of the run's base and of other runs, with the arm of each run."""
    env = {"game": "dond", "style": "natural"}
    agent = tiny_agent()
    for run, arm, seeds in (("one", "full", (1, 2)), ("two", "game_only", (2, 1)), ("three", "none", (3,))):
        games = [Game(seed) for seed in seeds]
        episodes = rollout(games, lambda game, made: dict.fromkeys(made.possible_agents, agent), env_maker(env), 2)
        write_episodes(tmp_path / run / "episodes/final.jsonl", sorted(episodes, key=lambda e: seeds.index(e.seed)))
        write_text(tmp_path / run / "config.yaml", f"arm: {arm}\n")
        if run == "one":
            write_episodes(tmp_path / run / "episodes/base.jsonl", [e for e in episodes if e.seed == 1])
    with serving(tmp_path) as browser:
        person = browser()
        page = person.get("/watch/one/final.jsonl/1").text
        links = re.findall(r'href="(/watch/one/final.jsonl/1/beside/[^"]+)"', page)
        beside = "/watch/one/final.jsonl/1/beside"
        assert links == [f"{beside}/one/base.jsonl/1", f"{beside}/two/final.jsonl/2"]
        both = person.get(links[1])
        assert both.status_code == 200 and both.text.count('class="outcome"') == 2
        assert person.get("/watch/one/final.jsonl/1/beside/four/final.jsonl/2").status_code == 400
        listed = person.get("/watch?arm=game_only").text
        assert "/watch/two/" in listed and "/watch/one/" not in listed


def test_every_recorded_game_can_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links from page to page lead to the games of every command. Each page of the list reads a limited number of
    files."""
    make = env_maker({"game": "dond", "style": "natural", "max_entries": 4})
    (episode,) = rollout([Game(1)], everyone(scripted("dond", "fair")), make, 1)
    game = episode_to_json(episode)
    files = [
        "run/episodes/final.jsonl", "play/episodes-001.jsonl", "evaluated/episodes.jsonl", "talk/games.jsonl",
        "study-x/export/simulated_games.jsonl", "bases/b/evaluations/n/episodes/base.jsonl", "cells/games-s0-ab.jsonl",
        *(f"web/episodes/{n}.jsonl" for n in range(260)),
    ]  # fmt: skip
    for number, name in enumerate(files):
        last = {**game["turns"][-1], "message": "zebracrossing"}
        turns = game["turns"] if number else [*game["turns"][:-1], last]
        write_transcripts(tmp_path / name, [{**game, "turns": turns, "seed": seed} for seed in range(1 + number % 3)])
        os.utime(tmp_path / name, (1_000_000 + number, 1_000_000 + number))
    for name in ("run/metrics.jsonl", "run/timing.jsonl", "run/checkpoints/1/episodes.jsonl", ".cache/games.jsonl"):
        write_transcripts(tmp_path / name, [game])  # none of the games of a run
    reads: list[str] = []
    read_bytes = watch.read_bytes
    monkeypatch.setattr(watch, "read_bytes", lambda path: (reads.append(str(path)), read_bytes(path))[1])

    def followed(person: TestClient, page: str) -> list[str]:
        found = []
        while page:
            reads.clear()
            text = person.get(html.unescape(page)).text
            assert len(reads) <= watch.MOST_FILES
            found += re.findall(r'href="(/watch/[^"]+)"', text)
            page = next(iter(re.findall(r'href="(/watch[^"]*)">older', text)), "")
        return found

    with serving(tmp_path) as browser:
        person = browser()
        assert person.get("/watch").status_code == 200 and len(reads) < 60  # until the page is full
        found = followed(person, "/watch")
        assert len(found) == len(set(found)) == sum(1 + number % 3 for number in range(len(files)))
        written = {name.partition("/")[0] for name in files}
        assert {address.split("/")[2] for address in found} == written
        for address in [each for each in found if "/web/" not in each]:
            shown = person.get(address)
            assert shown.status_code == 200 and "Played by" in shown.text, address
        assert len(followed(person, "/watch?run=web")) == len([each for each in found if "/web/" in each])
        watch._read.cache_clear()
        assert followed(person, "/watch?words=zebracrossing") == ["/watch/run/final.jsonl/1"]


def test_diplomacy_is_watched_phase_by_phase(tmp_path: Path) -> None:
    """Each phase has a picture of its board. Pictures are sent without the policy for scripts, and unknown numbers are
    refused."""
    pytest.importorskip("diplomacy", reason="needs pip install -e '.[diplomacy]'")
    make = env_maker({"game": "diplomacy", "map_name": "pure", "press": "private", "years": 1})
    episodes = rollout([Game(1)], everyone(scripted("diplomacy", "careful")), make, 1)
    write_episodes(tmp_path / "one/episodes/final.jsonl", episodes)
    with serving(tmp_path) as browser:
        person = browser()
        page = person.get("/watch/one/final.jsonl/1").text
        assert "Spring 1901, moves" in page and "The end" in page
        assert "what a listener gives the truth" not in page  # scripted players have no beliefs
        boards = re.findall(r'src="(/watch/one/final.jsonl/1/board/\d+)"', page)
        assert len(boards) >= 3
        found = person.get(boards[0])
        assert found.headers["content-type"] == "image/svg+xml" and found.text.startswith("<?xml")
        assert "script-src" not in found.headers["content-security-policy"]
        assert person.get("/watch/one/final.jsonl/1/board/999").status_code == 400


def test_the_curves_of_a_run_grow_while_it_trains(tmp_path: Path) -> None:
    run = tmp_path / "one"
    run.mkdir()
    write_text(run / "config.yaml", "arm: full\nseed: 3\nenv: {game: dond}\nalgo: {iterations: 3}\n")

    def line(iteration: int) -> str:
        return json.dumps({"iteration": iteration, "phase": "train", "game/score": 4.0 + iteration}) + "\n"

    with serving(tmp_path) as browser:
        person = browser()
        assert "There are no figures yet" in person.get("/runs/one").text
        for count in (1, 2, 3):
            write_text(run / "metrics.jsonl", "".join(map(line, range(1, count + 1))) + '{"iteration": 4, "ph')
            shown = person.get("/runs/one/curves").text
            assert 'data-state="training"' in shown and f"{count} of 3" in shown
            points = re.findall(r'points="([^"]*)"', shown)[0].split()
            assert len(points) == count and f"{4 + count} (train)" in shown
            assert ('<circle cx="4.0" cy="106.0" r="2.4" fill="var(--c1)"/>' in shown) == (count == 1)  # a line of one
        listed = person.get("/runs").text
        assert "training" in listed and "full 3" in listed and "<b>7</b>" in listed
        figures = {
            n: {"game/score": {"mean": x}, "game/score_ceiling": {"mean": 9}}
            for n, x in (("base", 1), ("trained", 2.5))
        }
        write_text(run / "run.json", json.dumps({"figures": figures}))
        shown = person.get("/runs").text  # the same figures, of the last evaluation
        assert "<b>2.5</b>" in shown and "<b>7</b>" not in shown and "<b>9</b>" not in shown
        (run / "run.json").unlink()
        assert "no report yet" in person.get("/runs/one/report").text
        os.utime(run / "metrics.jsonl", (0, 0))
        os.utime(run / "config.yaml", (0, 0))
        assert 'data-state="stopped"' in person.get("/runs/one/curves").text


@pytest.mark.parametrize("player", ["careful", "random"])
def test_the_timeline_shows_what_players_were_told(player: str) -> None:
    """Rooms on the map and what each saw are those that the game told them, walkers killed on their way included."""
    env = {"game": "among_us", "style": "natural", "max_steps": 60, "cooldown": 1, "messages_each": 1, "players": 7}
    agent = scripted("among_us", player)
    agent.style = "natural"
    observed: dict[tuple[int, str], events.Look] = {}
    act = agent.act

    def noting(requests):  # type: ignore[no-untyped-def]
        for r in requests:
            for event in reading.read(r.text, Style.NATURAL):
                if isinstance(event, events.Look):
                    observed[r.step, r.key[1]] = event
        return act(requests)

    agent.act = noting  # type: ignore[method-assign]
    checked = bodies = walkers = 0
    for seed in range(8):
        observed.clear()
        (episode,) = rollout([Game(seed)], everyone(agent), env_maker(env), 1)
        transcript = json.loads(json.dumps(episode_to_json(episode)))
        shown, names = timeline_of(transcript), transcript["facts"]["names"]
        steps = {moment["title"]: moment for moment in shown["moments"]}
        for (step, seat), look in observed.items():
            saw = {each["who"]: each for each in steps.get(f"step {step}", {}).get("saw", [])}
            if names[seat] not in saw:  # a look at the end of the game, or before a discussion
                continue
            entering = [f"{name} comes from {room_name(room)}" for name, room in look.entering]
            leaving = [f"{name} goes to {room_name(room)}" for name, room in look.leaving]
            seen = [*look.present, *entering, *leaving, *(f"the body of {name}" for name in look.bodies)]
            own = saw[names[seat]]
            assert (own["where"], sorted(own["saw"])) == (room_name(look.room), sorted(seen)), (seed, step, seat)
            checked, bodies, walkers = checked + 1, bodies + len(look.bodies), walkers + len(entering + leaving)
            before = steps.get(f"step {step - 1}")
            if before and before["saw"]:
                assert before["at"][names[seat]] == look.room[0] + shown["width"] * look.room[1]
    assert checked > 100 and bodies > 3 and walkers > 10


def test_a_game_that_cannot_be_shown_is_told_in_a_sentence(tmp_path: Path) -> None:
    """Games are refused if beliefs are no probabilities. Names that are no text and games without turns are shown."""
    make = env_maker({"game": "among_us", "style": "natural", "max_steps": 20})
    (episode,) = rollout([Game(1)], everyone(scripted("among_us", "careful")), make, 1)
    game = json.loads(json.dumps(episode_to_json(episode)))
    listener = next(agent for agent, role in game["roles"].items() if role == "crewmate")
    asked = {"text": "Who is the imposter?", "candidates": ["Red", "Blue"], "answer": "Red"}

    def believing(*each: list[float]) -> dict[str, object]:
        beliefs = [{"listener": listener, "question": 0, "step": 0, "probs": probs} for probs in each]
        return {**game, "questions": [asked], "beliefs": beliefs}

    moment = timeline_of(believing([0.5, 0.5], [0.25, 0.75]))["moments"][0]
    assert moment["beliefs"] == [(0, [0.25, 0.75])]  # of the same step the last
    names = dict.fromkeys(game["facts"]["names"], "\ud800")
    games = {
        "none": believing([]), "few": believing([1.0]), "many": believing([0.5, 0.25, 0.25]),
        "nan": believing([math.nan, 0.5]), "infinite": believing([math.inf, 0.5]),
        "name": {**game, "roles": dict.fromkeys(game["roles"], "\ud800"), "facts": {**game["facts"], "names": names}},
        "empty": {**game, "turns": []},
    }  # fmt: skip
    for run, each in games.items():
        (tmp_path / run).mkdir()
        write_text(tmp_path / run / "games.jsonl", json.dumps(each) + "\n")
    with serving(tmp_path) as browser:
        person = browser()
        found = {run: person.get(f"/watch/{run}/games.jsonl/1") for run in games}
    for run, page in found.items():
        shown = run in ("name", "empty")
        assert (page.status_code, "is damaged" in page.text) == (200 if shown else 400, not shown), run


def test_a_game_with_and_without_talk_is_the_same_game(tmp_path: Path) -> None:
    (episode,) = rollout([Game(1)], everyone(scripted("dond", "fair")), env_maker({"game": "dond"}), 1)
    game = episode_to_json(episode)
    for run, rounds in (("silent", 0), ("talking", 1)):
        write_transcripts(tmp_path / run / "games.jsonl", [{**game, "facts": {**game["facts"], "rounds": rounds}}])
    assert [other.run for other in watch.same_games(tmp_path, "silent", "games.jsonl", 1)] == ["talking"]


def test_sights_are_shown_as_the_game_told_them(tmp_path: Path) -> None:
    """Sights before each choice (who was there, came and left, and bodies) are those that the player read."""
    env = {"game": "among_us", "max_steps": 80, "cooldown": 1, "messages_each": 1, "walk_steps": 3, "tasks": 1}
    kinds: Counter[str] = Counter()
    for seed in range(8):
        agent, read = scripted("among_us", "careful"), {}
        act = agent.act

        def noting(requests, act=act, read=read):  # type: ignore[no-untyped-def]
            for r in requests:
                looks = [e for e in reading.read(r.text, Style.NATURAL) if isinstance(e, events.Look)]
                if looks:
                    read[r.step, r.key[1]] = looks[-1]
            return act(requests)

        agent.act, agent.style = noting, Style.NATURAL  # type: ignore[method-assign, assignment]
        (episode,) = rollout([Game(seed)], everyone(agent), env_maker({**env, "style": "natural"}), 1)
        transcript = json.loads(json.dumps(episode_to_json(episode)))
        by_name = {name: agent_ for agent_, name in transcript["facts"]["names"].items()}
        observed = {}
        for each in sights(story_of(transcript)):
            observed |= {(step, by_name[who]): sight for step, own in each.items() for who, sight in own.items()}
        assert observed and observed.keys() <= read.keys()
        for at, sight in observed.items():
            look = read[at]
            assert sight == (look.present, look.entering, look.leaving, look.bodies), (seed, at)
            kinds += Counter({name: len(getattr(sight, name)) for name in sight._fields})
    assert min(kinds[name] for name in ("present", "entering", "leaving", "bodies")) > 0, kinds
    write_episodes(tmp_path / "one/episodes/final.jsonl", [episode])
    with serving(tmp_path) as browser:
        page = html.unescape(browser().get("/watch/one/final.jsonl/1").text)
        shown = re.findall(r"<small>saw ([^<]+)</small>", page)
        assert sorted(shown) == sorted(str(sight) for sight in observed.values() if str(sight))


def test_all_that_a_planner_weighed_is_shown(tmp_path: Path) -> None:
    env = {"game": "dond", "style": "natural", "max_entries": 4}
    (episode,) = rollout([Game(1)], everyone(scripted("dond", "fair")), env_maker(env), 1)
    game = json.loads(json.dumps(episode_to_json(episode)))
    actions = [f"(0 books, 0 hats, {n} balls)" for n in range(6)]
    anchor, plan, values = [0.5, 0.1, 0.1, 0.1, 0.1, 0.1], [0.1, 0.2, 0.3, 0.15, 0.125, 0.125], [1.5, 2, 3, 4, 5, -6.25]
    planned = {"actions": actions, "anchor": anchor, "plan": plan, "values": values, "chosen": actions[3]}
    game["turns"][-1]["planned"] = planned
    write_transcripts(tmp_path / "one/episodes/final.jsonl", [game])
    with serving(tmp_path) as browser:
        page = browser().get("/watch/one/final.jsonl/1").text
    assert "all 6 that were weighed" in page
    rows = re.findall(r"<tr><td>\(0 books, 0 hats, (\d) balls\)</td><td>(\S+)</td><td>(\S+)</td><td>(\S+)</td>", page)
    assert [int(n) for n, *_ in rows] == [3, 2, 1, 4, 5, 0]  # the chosen one, then the likeliest
    for n, *shown in rows:
        assert [float(x) for x in shown] == [anchor[int(n)], plan[int(n)], values[int(n)]]


@contextmanager
def endpoint_of(answering) -> Iterator[Server]:  # type: ignore[no-untyped-def]
    server = Server(answering)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


# --- Opponents that plan, and behind an endpoint ----------------------------------------------------------------------
def test_an_endpoint_that_is_slow_holds_up_nobody(tmp_path: Path) -> None:
    """A game with a scripted player goes on while an endpoint thinks; its game goes on after a restart, too."""

    thought = threading.Event()

    def answering(server, body, handler) -> None:  # type: ignore[no-untyped-def]
        thought.wait(60)
        handler.say("[message] Hello ! [END]")

    with endpoint_of(answering) as endpoint:
        chat = (f"chat.url={endpoint.url}", "chat.model=some", "chat.key=''", f"chat.answers={tmp_path}/chat.jsonl")
        with serving(tmp_path, *chat) as browser:
            person = browser()
            assert "some by its endpoint" in person.get("/play").text
            slow = Page(person, "dond", "chat", "player_0")
            quick = Page(person, "dond", "scripted", "player_0")
            quick.finish()
            assert quick.state == "over"
            slow.load()
            if slow.state == "yours":  # the person begins
                person.post(slow.address, data={"number": slow.number, "kind": "message", "text": "hats ?"})
                slow.load()
            assert slow.state == "waiting"
            thought.set()
            slow.settle()
            assert "Hello !" in slow.text
            before, cookies = slow.text, person.cookies
        with serving(tmp_path, *chat) as browser:
            slow.browser = browser()
            slow.browser.cookies = cookies
            slow.load()
            slow.settle()
            assert slow.text == before
    assert not (tmp_path / "chat.jsonl").exists()  # a person's words, which withdrawing would leave there


def test_a_game_ends_if_its_endpoint_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The person does not play on beside silence, and the game counts as failed. All games share one budget."""
    envs = {"dond": {"game": "dond", "style": "natural"}, "among_us": {"game": "among_us", "players": 5}}
    with endpoint_of(lambda server, body, handler: handler.send("{}", 500)) as endpoint:
        how = ChatConfig(url=endpoint.url, model="some", key="", retries=0, calls=3)
        opponents = Opponents(tmp_path, envs, device=torch.device("cpu"), chat=how)
        with running(tmp_path, opponents, Limits()) as (engine, store):
            for env in envs.values():
                record = new_record("me", "chat", env, "any", 0)
                engine.open(record).result(10)
                until = time.monotonic() + 20
                while (sight := engine.sight(record.id)).state != "stopped":
                    assert time.monotonic() < until, sight
                    if sight.state == "yours":
                        words = sight.options[0] if sight.options else "[message] hi [END]"
                        engine.say(record.id, sight.number, words).result(10)
                    time.sleep(0.01)
                assert "not your fault" in sight.entries[-1][1] and store.result(record.id) == {"how": "failed"}
        assert len(endpoint.asked) == 3 and engine.alive is False
    said = capsys.readouterr().err
    assert "chat: error status, so a game ends" in said and "chat: budget spent" in said


def test_a_planner_goes_on_after_a_restart(tmp_path: Path) -> None:
    """Replies and plans are recorded, and are the same with and without a restart."""
    env = {"game": "dond", "style": "natural", "max_entries": 6, "objective": 0.0}

    @contextmanager
    def running(out: Path) -> Iterator[Engine]:
        store = Store(out / "games.sqlite")
        limits = PlayConfig(games=4, concurrency=4, max_new_tokens=24, context=1024)
        how = PlannerConfig(iterations=5)
        agent = planning_agent("tiny+plan", negotiator(), limits, 2, 1.0, how, "dond", style="compact")
        engine = Engine(store, Meddled(tmp_path, agent, env), out, Limits(each=4))
        engine.start()
        try:
            yield engine
        finally:
            engine.shut()
            store.close()

    def reply(engine: Engine, records: list, text: str) -> None:
        settle(engine, records)
        for record in records:
            sight = engine.sight(record.id)
            if sight.state == "yours":
                engine.say(record.id, sight.number, text).result(60)
        settle(engine, records)

    def turns(out: Path, restarts: bool) -> list:
        """All turns of three games: one message, one claim of the person in each."""
        records = [new_record("me", "scripted", env, "player_0", seed) for seed in (1, 2, 3)]
        with running(out) as engine:
            for record in records:
                engine.open(record).result(60)
            reply(engine, records, "[message] hats ? [END]")
            if not restarts:
                reply(engine, records, "[propose] (1 books, 0 hats, 0 balls) [END]")
        if restarts:
            with running(out) as engine:
                assert engine.resumed.wait(60)
                reply(engine, records, "[propose] (1 books, 0 hats, 0 balls) [END]")
        written = [out / f"episodes/{record.id}.jsonl" for record in records]
        return [game["turns"] for path in written if path.is_file() for game in read_episodes(path)]

    once, twice = turns(tmp_path / "once", False), turns(tmp_path / "twice", True)
    assert once == twice and any("planned" in turn for game in once for turn in game)


# --- Hostile names, floods, and models that do not fit ----------------------------------------------------------------
def test_names_of_runs_are_escaped_everywhere(tmp_path: Path) -> None:
    name = "<script>alert(1)<'\">"
    env = {"game": "dond", "style": "natural"}
    agent = tiny_agent()
    episodes = rollout([Game(1)], lambda game, made: dict.fromkeys(made.possible_agents, agent), env_maker(env), 1)
    for run in (name, "other"):
        write_episodes(tmp_path / run / "episodes/final.jsonl", episodes)
        write_text(tmp_path / run / "config.yaml", "arm: <script>alert(2)\n")
    with serving(tmp_path) as browser:
        person = browser()
        for path in (
            "/play",
            "/watch",
            "/runs",
            f"/watch?words={name}",
            "/watch?arm=<script>",
            "/watch/other/final.jsonl/1",
        ):
            found = person.get(path).text
            assert "<script>alert" not in found, path
            for link in re.findall(r'href="(/(?:watch|runs)/[^"]+)"', found):
                assert "<script>alert" not in person.get(html.unescape(link)).text, link


def test_a_hundred_games_are_not_opened(tmp_path: Path) -> None:
    ask = {"game": "dond", "opponent": "scripted", "seat": "any", "objective": "own"}
    with serving(tmp_path, "games_at_once=5", "requests=30") as browser:
        flood, other = browser(), browser()
        codes = [flood.post("/play", data=ask, follow_redirects=False).status_code for _ in range(100)]
        assert codes.count(303) == 3 and 429 in codes and set(codes) <= {303, 400, 429}
        assert other.post("/play", data=ask).status_code == 200  # who is somebody else still gets a place


def test_a_model_that_does_not_fit_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"game": "dond", "style": "compact"}
    card = {"game": "dond", "base": None, "made_of": {"env": {"style": "compact"}}}
    save_policy(tmp_path / "bases/little", tiny_policy(context=1024), card)
    opponents = Opponents(tmp_path, {"dond": env}, device=torch.device("cpu"), games=2)
    assert "bases/little" in [each.name for each in opponents.offered()]
    assert opponents.find("bases/little", "dond", plans=True).name == "bases/little+plan"
    with pytest.raises(UserError, match="Only models can plan"):
        opponents.find("scripted", "dond", plans=True)
    assert opponents.load("bases/little+plan", env, set()).games == 2
    monkeypatch.setattr(memory, "free_memory", lambda *_: 1)
    with pytest.raises(UserError, match="Not enough memory"):
        opponents.load("bases/little", env, set())
