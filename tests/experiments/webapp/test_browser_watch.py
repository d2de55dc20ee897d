"""Recorded games and curves of runs in a real Chromium."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette")

from envs.dond.rules import ITEMS
from marl.common.files import write_text
from marl.report.page import build_report
from marl.report.transcripts import episode_to_json, write_transcripts
from marl.rollout.games import env_maker, scripted
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import Game
from tests.experiments.webapp.browsing import DESK, PHONE, check_axe, fits, served
from tests.marl.report.test_page import make_run

HOSTILE = "<img src=x onerror='window.hurt=1'><script>window.hurt=1</script>"
SAID = {"full": (HOSTILE, "Redmond bored me"), "game_only": ("I saw RED.", "and then nothing")}  # in Among Us
ARMS = tuple(SAID)
BARS = """() => [...document.querySelectorAll('.belief:not([hidden])')].map((row) => {
  const whole = row.querySelector('.whole'), all = whole.getBoundingClientRect().width;
  return {who: row.firstChild.textContent, truth: row.querySelector('b').textContent,
          answers: [...whole.children].map((part) => part.textContent),
          right: [...whole.querySelectorAll('.true')].map((part) => part.textContent),
          widths: [...whole.children].map((part) => part.getBoundingClientRect().width / all)};
})"""


def game_of(name: str, arm: str) -> dict[str, Any]:
    """A scripted game in which beliefs were asked at the start and after each message, and a claim was planned."""
    agent = scripted(name, {"dond": "fair", "among_us": "careful"}[name])
    agent.style = "natural"
    settings = {"max_steps": 60, "cooldown": 1, "messages_each": 1} if name == "among_us" else {}
    make = env_maker({"game": name, "style": "natural", **settings})
    for seed in range(50):
        game = json.loads(json.dumps(episode_to_json(rollout([Game(seed)], everyone(agent), make, 1)[0])))
        messages = [turn for turn in game["turns"] if turn["message"]]
        if len(messages) > 2 and (name == "among_us" or game["outcome"]["deal"]):
            break
    names = game["facts"].get("names", {})
    rng = np.random.default_rng(ARMS.index(arm))
    game["questions"], game["beliefs"] = [], []
    for agent_name, role in game["roles"].items():
        if name == "among_us":
            truth = names[game["facts"]["imposters"][0]]
            others = [n for a, n in names.items() if a != agent_name]
            asked = [("Who is the imposter?", others, truth)] if role == "crewmate" else []
        else:
            values = game["facts"]["values"][1 - list(game["players"]).index(agent_name)]
            worth = zip(ITEMS, values, strict=True)
            asked = [(f"How much is one {i[:-1]} worth?", [str(n) for n in range(11)], str(v)) for i, v in worth]
        for text, candidates, answer in asked:
            game["questions"].append({"text": text, "candidates": candidates, "answer": answer})
            for step in {messages[0]["step"], *(turn["step"] + 1 for turn in messages)}:
                probs = [round(float(p), 4) for p in rng.dirichlet(np.ones(len(candidates)))]
                about = {"listener": agent_name, "step": step, "question": len(game["questions"]) - 1}
                game["beliefs"].append({**about, "probs": probs})
    if name == "among_us":
        for number, turn in enumerate(messages):
            turn["message"] = turn["text"] = SAID[arm][min(number, 1)]
    else:
        game["turns"][-1]["planned"] = {
            "actions": ["take all", "share"], "anchor": [0.25, 0.75], "plan": [0.9, 0.1], "values": [8.0, 3.0],
            "chosen": "take all",
        }  # fmt: skip
    if arm == "full":
        game["players"] = dict.fromkeys(game["players"], f"model {HOSTILE}")
    return game


def begun(run: Path, config: str) -> Path:
    """A run's folder with its settings alone."""
    run.mkdir()
    write_text(run / "config.yaml", config)
    return run


STATES = {1: "stopped", 2: "stopped", 3: "3 of 3"}
LIVE = "arm: full\nseed: 3\nenv: {game: dond}\nalgo: {iterations: 3}\n"


@pytest.fixture(scope="module")
def games(runs: Path) -> dict[tuple[str, str], dict[str, Any]]:
    found = {}
    for arm in ARMS:
        run = begun(runs / f"run-{arm}", f"arm: {arm}\n")
        for name in ("dond", "among_us"):
            found[name, arm] = game_of(name, arm)
            write_transcripts(run / f"episodes/{name}.jsonl", [found[name, arm]])
    return found


@pytest.fixture(scope="module")
def address(browser: Any, runs: Path, games: Any) -> Iterator[str]:
    with served(runs) as found:
        yield found


@pytest.mark.parametrize(("opened", "name"), [(PHONE, "dond"), (DESK, "among_us")], indirect=["opened"])
def test_beliefs_move_with_each_message(opened: Any, games: dict[tuple[str, str], Any], name: str) -> None:
    """Arrow keys move the bars: at each message they are as wide as the recorded probabilities, as are those below."""
    game = games[name, "full"]
    names = game["facts"].get("names", {})
    opened.goto(f"/watch/run-full/{name}.jsonl/1")
    slider, event_text = opened.locator(".timeline input"), opened.locator(".timeline .told")
    what = "an item is worth to the other" if name == "dond" else "now"
    assert opened.locator(".believed h2").text_content() == f"What each believes {what}"
    slider.focus()
    turns = [turn for turn in game["turns"] if turn["message"] or name == "dond"]
    shown: list[dict[str, Any]] = []
    for _ in range(int(slider.get_attribute("max"))):
        opened.keyboard.press("ArrowRight")
        current = opened.locator(".turn.current")
        if not current.count():
            continue
        message = turns[len(shown)]
        shown.append(message)
        assert (message["message"] or "proposes") in event_text.inner_text()
        assert (message["message"] or "proposes") in current.inner_text()
        bars = {bar["who"]: bar for bar in opened.evaluate(BARS)}
        expected = {}
        for belief in sorted(game["beliefs"], key=lambda belief: belief["step"]):
            if belief["step"] <= message["step"] + 1:
                question, who = game["questions"][belief["question"]], belief["listener"]
                item = next((item for item in ITEMS if item[:-1] in question["text"]), "")
                expected[names.get(who) or f"{who}, {item}"] = question, belief["probs"]
        living = set(bars) if name == "among_us" else set(expected)
        assert set(bars) == living and bars and set(bars) <= set(expected)
        for who, bar in bars.items():
            question, probs = expected[who]
            assert bar["answers"] == question["candidates"] and bar["right"] == [question["answer"]]
            assert bar["widths"] == pytest.approx(probs, abs=0.004)
            assert bar["truth"] == f"{probs[question['candidates'].index(question['answer'])]:.2f}"
        under = current.locator(".track em").evaluate_all("all => all.map((bar) => parseFloat(bar.style.width))")
        right = [100 * probs[q["candidates"].index(q["answer"])] for q, probs in expected.values()]
        assert all(any(abs(width - p) < 0.06 for p in right) for width in under)
        assert under or not message["message"]
    assert shown == turns
    assert fits(opened)


def test_values_plans_rooms_and_sights_are_shown(opened: Any, games: dict[tuple[str, str], Any]) -> None:
    """The page shows both players' values and what a planner weighed; in Among Us it shows where everybody is, and who
    saw what."""
    game = games["dond", "full"]
    opened.goto("/watch/run-full/dond.jsonl/1")
    rows = [re.findall(r"\d+", row)[-3:] for row in opened.locator(".recorded .pool tbody tr").all_inner_texts()]
    assert rows == [[str(n) for n in each] for each in (game["facts"]["counts"], *game["facts"]["values"])]
    assert "take all 0.25 -> 0.90, worth 8.00; share 0.75 -> 0.10, worth 3.00" in opened.locator("main").inner_text()
    opened.goto("/watch/run-full/among_us.jsonl/1")
    names, turns = games["among_us", "full"]["facts"]["names"], games["among_us", "full"]["turns"]
    first = opened.locator(".saw tbody tr").all_inner_texts()
    assert len(first) == len(names)  # all begin in one room, and choose
    for row in first:
        who, _, saw, chose = row.split("\t")
        assert set(saw.split(", ")) == set(names.values()) - {who.strip()}
        assert chose in [turn["text"] for turn in turns if turn["step"] == 0 and names[turn["agent"]] == who.strip()]
    assert sorted(opened.locator(".timeline .map span").all_inner_texts()) == sorted(names.values())
    for _ in range(100):  # on to a body
        if opened.locator(".timeline .map s").count():
            break
        opened.get_by_role("button", name="a moment on").click()
    assert "kills" in opened.locator(".timeline .told").inner_text()
    body = opened.locator(".timeline .map s").inner_text().strip()
    assert f"kills {body}" in opened.locator(".timeline .told").inner_text()


def test_a_link_to_a_message_opens_there(opened: Any, games: dict[tuple[str, str], Any]) -> None:
    opened.set_viewport_size({"width": 1280, "height": 500})
    opened.goto("/watch/run-game_only/dond.jsonl/1")
    turn = opened.locator(".recorded .turn").nth(2)
    said = turn.locator(".bubble").inner_text()
    turn.locator(".address").click()
    link = opened.url
    opened.goto("about:blank")
    opened.goto(link)
    assert opened.locator(".turn:target .bubble").inner_text() == said
    assert said in opened.locator(".timeline .told").inner_text()
    at = opened.locator(".turn:target").bounding_box()
    assert -1 < at["y"] < 450 and opened.locator(".turn.current:target").count() == 1
    opened.goto("/watch/run-game_only/dond.jsonl/1")
    assert opened.locator(".recorded .turn").nth(2).bounding_box()["y"] > 450  # else it was in sight anyway


@pytest.mark.parametrize("opened", [DESK, PHONE], indirect=True, ids=["desk", "phone"])
def test_two_arms_side_by_side(opened: Any) -> None:
    opened.goto("/watch/run-full/among_us.jsonl/1")
    opened.locator("summary", has_text="side by side").click()
    opened.get_by_role("link", name="run-game_only").click()
    opened.wait_for_url("**/beside/**")
    one, two = opened.locator("section.recorded").all()
    assert HOSTILE in one.inner_text() and "I saw RED." in two.inner_text()
    left, right = one.bounding_box(), two.bounding_box()
    beside = left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]
    below = left["x"] == right["x"] and left["y"] + left["height"] <= right["y"]
    assert (beside if opened.viewport_size == DESK else below) and fits(opened)


def test_games_are_found_by_outcome_arm_and_what_was_named(opened: Any, games: dict[tuple[str, str], Any]) -> None:
    won = f"won by {games['among_us', 'full']['outcome']['winner'] or 'nobody'}"

    opened.goto("/watch")

    def found(**chosen: str) -> set[str]:
        for name in ("arm", "ending"):
            opened.locator(f".filters select[name={name}]").select_option(chosen.get(name, ""))
        opened.locator(".filters input[name=words]").fill(chosen.get("words", ""))
        opened.get_by_role("button", name="Show").click()
        links = opened.locator("th a").evaluate_all("all => all.map((a) => a.getAttribute('href'))")
        return {link.removeprefix("/watch/run-").removesuffix(".jsonl/1") for link in links}

    every = {f"{arm}/{name}" for arm in ARMS for name in ("dond", "among_us")}
    assert found() == every
    assert found(arm="full") == {"full/dond", "full/among_us"}
    assert found(ending="deal") == {"full/dond", "game_only/dond"}
    assert found(ending=won, arm="game_only") == {"game_only/among_us"}
    assert found(words="Red") == {"game_only/among_us"}  # neither in Redmond nor in bored
    assert found(words="redmond bored") == {"full/among_us"}
    assert found(words="Turquoise") == set() and opened.get_by_role("link", name="Show all games").count()


@pytest.mark.parametrize("opened", [PHONE], indirect=True, ids=["phone"])
def test_curves_grow_in_an_open_page(opened: Any, runs: Path) -> None:
    """The page follows a run that has written nothing yet, without being reloaded. It says when the run has been silent
    for long, and goes on when the run does."""
    run = begun(runs / f"live-{opened.viewport_size['width']}", LIVE)
    opened.clock.install()
    opened.goto(f"/runs/{run.name}")
    opened.evaluate("window.stayed = true")
    opened.wait_for_selector("text=There are no figures yet")
    lines = ""
    for count in (1, 2, 3):
        lines += json.dumps({"iteration": count, "phase": "train", "game/score": 4.0 + count}) + "\n"
        write_text(run / "metrics.jsonl", lines)
        opened.clock.run_for(5100)
        opened.wait_for_selector(f"text=now {4 + count} (train)")
        assert f"{count} of 3" in opened.locator("#curves").inner_text()
        assert len(opened.locator("polyline").first.get_attribute("points").split()) == count
        for name in ("metrics.jsonl", "config.yaml") if count < 3 else ():
            os.utime(run / name, (0, 0))
        opened.clock.run_for(6000)
        shows = "text => document.querySelector('.state').innerText.includes(text)"
        opened.wait_for_function(shows, arg=STATES[count])
    assert opened.evaluate("window.stayed") and fits(opened)
    opened.goto("/runs")
    assert "7" in opened.locator("tr", has_text=run.name).locator(".head").inner_text() and fits(opened)


def test_a_report_filters_its_games_here_too(opened: Any, runs: Path) -> None:
    """The report's own script runs as in the file, and no other script does. The browser blocks nothing of a report of
    this version."""
    run = make_run(runs / "reported")
    build_report([run], run / "report.html", "reported")
    held_back: list[str] = []
    opened.on("console", lambda message: held_back.append(message.text))
    opened.goto(f"/runs/{run.name}/report")
    filtered = "form.filter output:has-text('games')"
    opened.wait_for_selector(filtered)
    assert opened.locator("form.filter").is_visible() and held_back == []
    page = (run / "report.html").read_text().replace("</main>", "<script>window.hurt = 1</script></main>")
    (run / "report.html").write_text(page.replace("http-equiv", "data-was"))  # as somebody else may write it
    opened.goto(f"/runs/{run.name}/report")
    opened.wait_for_selector(filtered)
    assert opened.evaluate("window.hurt") is None


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_axe_finds_nothing_serious(browser: Any, address: str, runs: Path, size: Any, scheme: Any) -> None:
    lines = [json.dumps({"iteration": n, "phase": "train", "game/score": float(n)}) for n in range(3)]
    if not (runs / "done").exists():
        begun(runs / "done", LIVE)
    write_text(runs / "done/metrics.jsonl", "".join(f"{line}\n" for line in lines))
    context = browser.new_context(viewport=size, color_scheme=scheme, base_url=address, reduced_motion="reduce")
    page = context.new_page()
    beside = "/watch/run-full/{0}.jsonl/1/beside/run-game_only/{0}.jsonl/1"
    for path in (
        "/watch", "/watch?words=nothing", "/runs", "/runs/done", beside.format("among_us"), beside.format("dond"),
        "/watch/run-full/dond.jsonl/1#m2", "/watch/run-full/among_us.jsonl/1#m2-1",
    ):  # fmt: skip
        page.goto(path)
        check_axe(page, path)
        if page.locator(".timeline").count():
            assert page.locator(".belief:visible").count(), path
    context.close()
