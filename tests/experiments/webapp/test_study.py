"""A study: what its file may say, who plays whom, what is paid, kept, deleted and exported."""

import csv
import json
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from starlette.testclient import TestClient

from experiments import benchmark, web, web_export
from experiments.webapp.roster import Roster
from experiments.webapp.store import TABLES, Store
from experiments.webapp.study import Pay, pick, read_study
from marl.common.errors import UserError
from tests.composing import configure
from tests.experiments.webapp.browsing import site_of
from tests.experiments.webapp.test_web import Page, serving

STUDY: dict[str, Any] = {
    "name": "small",
    "version": 1,
    "title": "A small study",
    "information": "What this is about.\n\nAnd what is kept.",
    "consent": ["I am old enough.", "I agree."],
    "contact": "nobody@example.org",
    "games": 3,
    "pay": {"currency": "£", "taking_part": 1.0, "game": 0.1, "point": 0.2, "aborted": 0.25},
    "parts": {
        "alone": {
            "env": {"objective": 0.0},
            "instructions": "Win points.",
            "conditions": {"hard": {"opponent": "stubborn"}, "soft": {"opponent": "generous"}},
        }
    },
}


def written(folder: Path, **changes: Any) -> str:
    """A study's file: STUDY with these changes, of nested entries by names with dots."""
    study = json.loads(json.dumps(STUDY))
    for key, value in changes.items():
        at, *names = study, *key.split("__")
        for name in names[:-1]:
            at = at.setdefault(name, {})
        at[names[-1]] = value
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(study))
    return str(path)


@contextmanager
def studying(runs: Path, *settings: str) -> Iterator[Any]:
    """A server of the study in runs/small.yaml; makes browsers."""
    cfg = configure("web", f"runs={runs}", f"study={runs}/small.yaml", "device=cpu", "requests=100000", *settings)
    with site_of(cfg) as app:
        yield lambda: TestClient(app, base_url="http://localhost:8700")


def agree(person: TestClient, page: str) -> Any:
    """Ticks every statement of this page."""
    (text,) = re.findall(r'name="text" value="(\w+)"', page)
    return person.post("/study/consent", data={"text": text, "agree0": "yes", "agree1": "yes"})


def join(person: TestClient) -> str:
    """Agrees to everything, and returns the first page of the study."""
    found = agree(person, person.get("/study").text)
    assert found.status_code == 200
    return str(found.text)


class Turn(Page):
    """A game of a study."""

    def __init__(self, browser: TestClient) -> None:
        self.browser, self.game, self.sent = browser, "dond", []
        found = browser.post("/study/next")
        self.address = str(found.url.path)
        self.read(found.text)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# --- The file ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"colour": "red"}, "study.colour is no setting of Study"),
        ({"parts__alone__conditions__hard__opponnent": "x"}, "opponnent is no setting of Condition"),
        ({"parts__alone__conditions": {"a": {"oponent": "fair"}}}, "oponent is no setting"),  # before what is missing
        ({"parts__alone__conditions__hard__weight": 0.5}, "conditions.soft.weight is missing"),
        (
            {"parts__alone__conditions": {n: {"opponent": "fair", "weight": w} for n, w in (("a", 0.5), ("b", 0.6))}},
            r"weights 0.5 \+ 0.6 add up to 1.1",
        ),
        ({"parts__alone__conditions": {}}, "conditions is empty"),
        ({"parts": {}}, "parts is empty"),
        ({"assignment": "fair"}, "assignment=fair: must be one of balanced, random"),
        ({"name": "../x"}, "name=../x"),
        ({"games": 0}, "games=0"),
        ({"pay__point": -1}, r"pay.point=-1"),
        ({"parts__alone__pay": {"poind": 1.0}}, "poind is no setting of Pay"),
        ({"consent": []}, "consent is empty"),
        ({"information": " "}, "information is empty"),
        ({"screening": {"question": "?", "answers": ["a"], "right": "b"}}, "right=b"),
        ({"version": "one"}, "version"),
    ],
)  # fmt: skip
def test_a_bad_file_is_told_in_a_sentence(changes: Mapping[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=why) as found:
        read_study(written(tmp_path, **changes))
    assert "small.yaml: " in str(found.value)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"parts__alone__conditions__hard__opponent": "nobody"}, r"hard\.opponent=nobody: there is no finished run"),
        ({"parts__alone__conditions__hard__opponent": "begun"}, r"hard\.opponent=begun: this run is not finished"),
        ({"parts__alone__conditions__hard__iteration": 3}, "hard.*is no run. Leave out .*iteration"),
        ({"parts__alone__conditions__hard__opponent": "chat"}, "give its endpoint"),
        ({"parts__alone__conditions__hard__seat": "imposter"}, "hard.*seat=imposter"),
        ({"parts__alone__env": {"objectiv": 1.0}}, "hard.*objectiv"),
        ({"parts__alone__game": "chess"}, "hard.*chess"),
    ],
)
def test_what_cannot_be_played_is_told_before_anybody_comes(
    changes: Mapping[str, Any], why: str, tmp_path: Path
) -> None:
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/config.yaml").write_text("arm: full\n")  # and no card yet
    written(tmp_path, **changes)
    with pytest.raises(UserError, match=why), studying(tmp_path):
        pass
    written(tmp_path)
    with studying(tmp_path):  # the failed start has let go of the database
        pass


def test_blanks_have_to_be_filled_in(tmp_path: Path) -> None:
    for given in ("study=dond_humans", f"study={written(tmp_path, contact='[[WHO]]')}"):
        with pytest.raises(UserError, match=r"\[\[.*has to be filled in"):
            web.check(configure("web", given))
        web.check(configure("web", given, "simulated=true"))
    with pytest.raises(UserError, match="there is no such file; the nearest is dond_humans"):
        web.check(configure("web", "study=dond_human"))


def test_another_text_needs_another_version(tmp_path: Path) -> None:
    written(tmp_path)
    with studying(tmp_path) as browser:
        person = browser()
        join(person)
        cookies = person.cookies
    written(tmp_path, games=4)
    with pytest.raises(UserError, match="Raise its version"), studying(tmp_path):
        pass
    written(tmp_path, games=4, version=2)
    with studying(tmp_path) as browser:
        person = browser()
        person.cookies = cookies
        assert "has changed since you agreed" in person.get("/study").text
        assert person.post("/study/next").status_code == 400
        assert "0 of 4" in join(person)


def test_people_agree_to_the_text_that_they_were_shown(tmp_path: Path) -> None:
    """Consent on a page with an older text does not count: the person is shown the new text, and cannot play yet."""
    written(tmp_path)
    with studying(tmp_path) as browser:
        person = browser()
        page, cookies = person.get("/study").text, person.cookies
    written(tmp_path, information="Something else is kept.")  # nobody has agreed: it may still change
    with studying(tmp_path) as browser:
        person = browser()
        person.cookies = cookies
        shown = agree(person, page)
        assert shown.status_code == 400 and "Something else is kept" in shown.text
        assert "has changed since you opened this page" in shown.text
        assert person.post("/study/next").status_code == 400
        nothing = person.post("/study/consent", data={"agree0": "yes", "agree1": "yes"})
        assert "has changed since you opened this page" in nothing.text
        assert "0 of 3" in agree(person, shown.text).text
    export = web_export.main(configure("web_export", f"study={tmp_path}/small.yaml", f"runs={tmp_path}"))
    kept = json.loads((export / "study.json").read_text())["versions"]
    assert [row["version"] for row in rows(export / "people.csv")] == ["1"] == list(kept)
    assert kept["1"]["information"] == "Something else is kept."


def test_a_study_s_games_are_served_by_that_study_alone(tmp_path: Path) -> None:
    """Another server on its folder is refused in a sentence, and changes nothing; a study takes over no other games."""
    written(tmp_path)
    with studying(tmp_path) as browser:
        person = browser()
        join(person)
        game, cookies = Turn(person), person.cookies
        game.settle()
        before = game.text
    there = f"out={tmp_path}/study-small"
    with pytest.raises(UserError, match=r"games there are of study small\. Serve it"), serving(tmp_path, there):
        pass
    written(tmp_path, name="other")
    with pytest.raises(UserError, match=r"games there are of study small\. Serve it"), studying(tmp_path, there):
        pass
    written(tmp_path)
    with studying(tmp_path) as browser:
        game.browser = browser()
        game.browser.cookies = cookies
        game.load()
        assert game.text == before
    with serving(tmp_path) as browser:
        Page(browser(), "dond", "scripted", "player_0")
    with pytest.raises(UserError, match="of no study"), studying(tmp_path, f"out={tmp_path}/web"):
        pass
    with serving(tmp_path):
        pass


def test_programs_and_people_are_kept_apart(tmp_path: Path) -> None:
    written(tmp_path)
    with studying(tmp_path, f"out={tmp_path}/one") as browser:
        assert "A simulation" not in browser().get("/study").text
    with (
        pytest.raises(UserError, match="of people, or of programs"),
        studying(tmp_path, f"out={tmp_path}/one", "simulated=true"),
    ):
        pass
    with pytest.raises(UserError, match="simulated=false"):
        web_export.main(
            configure("web_export", f"study={tmp_path}/small.yaml", f"study_out={tmp_path}/one", "simulated=true")
        )
    with studying(tmp_path, "simulated=true") as browser:
        assert "A simulation" in browser().get("/study").text


@pytest.mark.parametrize(
    ("version", "why"),
    [
        (99, "have version 99, expected 2. Use the code that wrote them, or name another folder"),
        (None, "is no database of games"),
        (0, "is no database of games"),
    ],
)
def test_other_tables_are_neither_served_nor_exported(version: int | None, why: str, tmp_path: Path) -> None:
    path = tmp_path / "games.sqlite"
    if version is None:
        path.write_text("no database, and longer than the header of one" * 20)
    else:
        with sqlite3.connect(path) as db:
            db.executescript(f"{TABLES if version else ''} PRAGMA user_version = {version};")
        db.close()
    with pytest.raises(UserError, match=why):
        web_export.main(configure("web_export", f"study={written(tmp_path)}", f"study_out={tmp_path}"))
    if version != 0:  # else the file is new
        with pytest.raises(UserError, match=why):
            Store(path)


# --- Assignment and pay -----------------------------------------------------------------------------------------------
def test_balanced_assignment_follows_the_weights() -> None:
    rng = np.random.default_rng(0)
    weights = {"a": 0.5, "b": 0.25, "c": 0.25}
    every: Counter[str] = Counter()
    for _ in range(10):  # people of eight games each
        own: Counter[str] = Counter()
        for _ in range(8):
            name = pick(weights, own, every, "balanced", rng)
            own[name] += 1
            every[name] += 1
        assert own == {"a": 4, "b": 2, "c": 2}
    one_each: Counter[str] = Counter()
    for _ in range(40):  # people of one game each
        one_each[pick(weights, {}, one_each, "balanced", rng)] += 1
    assert one_each == {"a": 20, "b": 10, "c": 10}
    drawn = Counter(pick(weights, {}, {}, "random", rng) for _ in range(4000))
    assert abs(drawn["a"] - 2000) < 150 and abs(drawn["b"] - 1000) < 130


@pytest.mark.parametrize(
    ("result", "paid"),
    [
        ({}, 0.0),  # not over
        ({"how": "deal", "score": 7.0}, 0.1 + 0.2 * 7),
        ({"how": "mismatch", "score": 0.0}, 0.1),
        ({"how": "deal", "score": -3.0}, 0.1),  # nobody pays to play
        ({"how": "abort", "score": 0.0, "aborted_by": "opponent"}, 0.25),
        ({"how": "abort", "score": 0.0, "aborted_by": "person"}, 0.1),
        ({"how": "failed"}, 0.25),
        ({"how": "stopped"}, 0.0),
    ],
)
def test_pay(result: Mapping[str, Any], paid: float) -> None:
    assert Pay("$", 1.0, 0.1, 0.2, 0.25).of(result) == pytest.approx(paid)


# --- Taking part ------------------------------------------------------------------------------------------------------
def test_from_consent_to_the_export(tmp_path: Path) -> None:
    written(tmp_path, screening={"question": "How many?", "answers": ["One", "Two"], "right": "Two"})
    sent = []
    with studying(tmp_path) as browser:
        for path in ("/play", "/watch", "/runs", "/watch/web/x/1"):
            assert browser().get(path).status_code == 404
        wrong = browser()
        assert "There is no such page." in wrong.get("/study/next").text  # it is a form's
        assert wrong.post("/study/next").status_code == 400  # nobody plays who has not agreed
        (text,) = re.findall(r'name="text" value="(\w+)"', wrong.get("/study").text)
        missing = wrong.post("/study/consent", data={"text": text, "agree0": "yes"})
        assert missing.status_code == 400 and "agree to every statement" in missing.text
        assert "One question first" in join(wrong)
        assert wrong.post("/study/next").status_code == 400
        assert "is not for you" in wrong.post("/study/screening", data={"answer": "One"}).text
        assert "is not for you" in wrong.post("/study/screening", data={"answer": "Two"}).text  # no second try
        leaves = browser()
        join(leaves)
        leaves.post("/study/screening", data={"answer": "One"})
        assert "Everything is deleted" in leaves.post("/study/withdraw").text
        assert "is not for you" in leaves.get("/study").text  # nor by withdrawing in between
        assert "is not for you" in agree(leaves, browser().get("/study").text).text
        assert sorted(leaves.cookies) == ["screened_small", "session"] and leaves.cookies["screened_small"] == "yes"
        person = browser()
        join(person)
        assert "0 of 3" in person.post("/study/screening", data={"answer": "Two"}).text
        assert "0 of 3" in person.post("/study/screening", data={"answer": "One"}).text  # too late to fail
        for number in (1, 2, 3):
            game = Turn(person)
            assert Turn(person).address == game.address  # one game at a time
            game.finish()
            assert f"Game {number} is over" in game.text and "Watch" not in game.text
            sent += game.sent
        again = person.post("/study/next")
        assert again.url.path == "/study" and "Thank you" in again.text
        page = again.text
    export = web_export.main(configure("web_export", f"study={tmp_path}/small.yaml", f"runs={tmp_path}"))
    games, people = rows(export / "games.csv"), rows(export / "people.csv")
    assert [g["condition"] for g in games].count("hard") in (1, 2) and {g["played_by"] for g in games} == {"human"}
    by_hand = 1.0 + sum(0.1 + 0.2 * float(g["points"]) for g in games if g["how"] != "abort")
    by_hand += sum(0.1 for g in games if g["how"] == "abort")
    (mine,) = (p for p in people if p["state"] == "playing")
    assert float(mine["pay"]) == pytest.approx(by_hand) and f"£{by_hand:.2f}" in page and mine["person"] in page
    transcripts = [json.loads(line) for line in (export / "games.jsonl").read_text().splitlines()]
    assert len(transcripts) == 3 and all(t["about"]["person"] == mine["person"] for t in transcripts)
    for text in sent:  # neither who the opponent is nor how games are assigned
        assert "stubborn" not in text and "generous" not in text and "hard" not in text
    summary = json.loads((export / "study.json").read_text())
    assert summary["people"] == {"consented": 2, "playing": 1, "refused": 1, "withdrawn": 1}
    assert summary["assignment"] == {"1": "balanced, seed 0"} and summary["bootstrap_seed"] == 0
    folder = tmp_path / "study-small"
    kept = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"testclient" not in kept and b"127.0.0.1" not in kept  # no browser's name, no address


def test_two_requests_for_the_next_game_at_once_make_one_game(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    assign, both = Roster.assign, Barrier(2)

    def assigned(*given: Any) -> Any:
        record = assign(*given)
        both.wait(timeout=60)  # neither has begun its game
        return record

    monkeypatch.setattr(Roster, "assign", assigned)
    with studying(tmp_path) as browser, ThreadPoolExecutor(2) as pool:
        person = browser()
        join(person)
        found = [asked.result() for asked in [pool.submit(person.post, "/study/next") for _ in range(2)]]
        assert [page.status_code for page in found] == [200, 200]
        assert found[0].url == found[1].url and found[0].url.path.startswith("/play/")
        assert "1 of 3" in person.get("/study").text


@pytest.mark.parametrize(("pay", "sentence"), [({}, "Nothing is paid"), ({"point": 0.2}, "$0.20 for each point")])
def test_what_is_not_paid_is_not_told(pay: dict[str, float], sentence: str, tmp_path: Path) -> None:
    written(tmp_path, pay=pay)
    with studying(tmp_path) as browser:
        text = browser().get("/study").text
        assert sentence in text and "for taking part, once" not in text


def test_whoever_withdraws_leaves_nothing(tmp_path: Path) -> None:
    written(tmp_path)
    with studying(tmp_path) as browser:
        stays, leaves = browser(), browser()
        for person in (stays, leaves):
            join(person)
            Turn(person).finish()
        code = leaves.get("/study").text.partition("<code>")[2].partition("</code>")[0]
        game = Turn(leaves)
        game.settle()
        if game.state == "yours":
            leaves.post(game.address, data={"number": game.number, "kind": "message", "text": "zebracrossing"})
        exporting = (f"study={tmp_path}/small.yaml", f"runs={tmp_path}")
        export = web_export.main(configure("web_export", *exporting))  # before
        assert all(code in (export / name).read_text() for name in ("games.jsonl", "games.csv", "people.csv"))
        session = leaves.cookies["session"].partition(".")[0]
        assert "Withdraw and delete" in leaves.get("/study/withdraw").text
        assert "Everything is deleted" in leaves.post("/study/withdraw").text
        assert leaves.get(game.address).status_code == 404
        assert "I agree and take part" in leaves.get("/study").text
        folder = tmp_path / "study-small"
        assert len(list((folder / "episodes").glob("*.jsonl"))) == 1
        web_export.main(configure("web_export", *exporting))  # again: the earlier one is written over
        kept = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
        for gone in (session, code, "zebracrossing", game.address.rpartition("/")[2]):
            assert gone.encode() not in kept, gone
        assert "1 of 3" in stays.get("/study").text
    export = web_export.main(configure("web_export", f"study={tmp_path}/small.yaml", f"runs={tmp_path}"))
    assert json.loads((export / "study.json").read_text())["people"]["withdrawn"] == 1
    assert len(rows(export / "people.csv")) == 1
    # By its code, as whoever runs the study does it
    (left,) = (row["person"] for row in rows(export / "people.csv"))
    by_code = (f"study={tmp_path}/small.yaml", f"runs={tmp_path}")
    with pytest.raises(UserError, match="nobody in this study has this code"):
        web_export.main(configure("web_export", *by_code, "withdraw=p00000000"))
    with studying(tmp_path), pytest.raises(UserError, match="another server uses these games"):
        web_export.main(configure("web_export", *by_code, f"withdraw={left}"))
    web_export.main(configure("web_export", *by_code, f"withdraw={left}"))
    assert json.loads((export / "study.json").read_text())["people"]["withdrawn"] == 2
    assert not rows(export / "people.csv") and not list((folder / "episodes").glob("*.jsonl"))


def test_a_study_s_games_are_watched_once_they_are_exported(tmp_path: Path) -> None:
    """Public pages show nothing of a study until its owner has exported it."""
    written(tmp_path)
    with studying(tmp_path) as browser:
        person = browser()
        join(person)
        game = Turn(person)
        game.finish()
    own = f"/watch/study-small/{game.address.rpartition('/')[2]}.jsonl/1"
    with serving(tmp_path) as browser:
        anybody = browser()
        assert "study-small" not in anybody.get("/watch").text
        assert anybody.get("/watch?run=study-small").status_code == 400
        for address in (own, f"{own}/beside/study-small/{own.rpartition('small/')[2]}"):
            refused = anybody.get(address)
            assert refused.status_code == 400 and "Export them" in refused.text and "fair" not in refused.text
        web_export.main(configure("web_export", f"study={tmp_path}/small.yaml", f"runs={tmp_path}"))
        (link,) = re.findall(r'href="(/watch/[^"]+)"', anybody.get("/watch").text)
        assert "Played by" in anybody.get(link).text and link == "/watch/study-small/export/games.jsonl/1"
        assert anybody.get(own).status_code == 400


def test_an_export_without_a_study_says_so(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(UserError, match="there is no such study yet"):
        web_export.main(configure("web_export", f"study={tmp_path}/small.yaml", f"runs={tmp_path}"))


def test_the_difference_of_two_conditions_is_over_people() -> None:
    """Two people who differ by 10 but each find condition a better by exactly 1: the difference is 1, without doubt."""
    a, b = [(0, 1.0), (0, 1.0), (1, 11.0), (1, 11.0)], [(0, 0.0), (0, 0.0), (1, 10.0), (1, 10.0)]
    found = web_export.difference(a, b, np.random.default_rng(0))
    assert (found.mean, found.low, found.high, found.n) == (1.0, 1.0, 1.0, 2)
    assert np.isnan(web_export.difference([(0, 1.0)], [(0, 2.0)], np.random.default_rng(0)).low)


def test_means_are_over_people() -> None:
    """One person of one game worth 10, one of three games worth 2 each. A draw of two people is twice the first (mean
    10), both (16 / 4), or twice the second (2): the interval is 2 to 10, and not that of four games."""
    games = [row_of("p1", 10.0), *(row_of("p2", 2.0) for _ in range(3)), row_of("p2", 99.0, state="open")]
    table, counts = web_export.tabulated(games, 0)
    found = table["one/a"]["points"]
    assert (found.mean, found.low, found.high, found.n) == (4.0, 2.0, 10.0, 2)
    assert counts["one/a"] == (2, 4)


def test_conditions_are_compared_with_the_first_of_the_file() -> None:
    """The first condition of the file counts even if another name sorts before it, as iteration_12 does before
    iteration_3."""
    games = [row_of(f"p{n}", 10.0 * n, condition=name) for n in range(2) for name in ("iteration_12", "iteration_3")]
    table, counts = web_export.tabulated(games, 0, [("one", "iteration_3"), ("one", "iteration_12")])
    assert [*table] == ["one/iteration_3", "one/iteration_12", "one/iteration_12 - iteration_3"]
    assert counts["one/iteration_12 - iteration_3"] == (2, 4)


def row_of(person: str, points: float, **given: Any) -> web_export.GameRow:
    blank = dict.fromkeys(web_export.GameRow.__annotations__, "")
    named = {"person": person, "part": "one", "condition": "a", "state": "over", "points": points, "pay": 0.0}
    return web_export.GameRow(**{**blank, **named, **given})  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_benchmark_of_the_page(tmp_path: Path) -> None:
    """A row for one person and one for fifty from one address, who all get in by the default limit; nothing is lost."""
    written(tmp_path)
    settings = (f"runs={tmp_path}", f"out={tmp_path}/bench", f"pages.study={tmp_path}/small.yaml", "device=cpu")
    limit, crowds = configure("web").new_people, "crowds=[{people: 1, plays: 3}, {people: 50, plays: 50}]"
    benchmark.main(configure("benchmark", "bench=web", *settings, f"pages.new_people={limit}", crowds))
    found = json.loads((tmp_path / "bench/benchmark.json").read_text())
    alone, many = found["rows"]
    assert (alone["people"], alone["games"], many["people"], many["games"]) == (1, 3, 50, 50)
    assert many["replies"] >= 50 and 0 < many["median"] <= many["p95"] and 0 <= alone["page"] <= alone["p95"] * 2
    assert found["settings"]["pages"]["study"] and found["hardware"] and "page" not in many
