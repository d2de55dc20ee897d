"""Diplomacy on the web page: whole games by buttons and messages, with a board, against scripts and planners."""

import html
import re
from pathlib import Path

import pytest

pytest.importorskip("starlette")

from envs.diplomacy import board
from envs.diplomacy.texts import POWERS
from experiments import lookahead
from experiments.lookahead import study_of
from experiments.webapp.boards import picture, positions
from marl.algorithms.lookahead import Learner
from marl.common.errors import UserError
from marl.common.files import write_json
from tests.composing import configure
from tests.experiments.webapp.test_web import recorded, serving

QUICK = ("games.diplomacy.env.years=1",)


def played(runs: Path, opponent: str, talk: str) -> list[str]:
    """Plays a game by the first button, or a hostile message. Returns the pages that were seen."""
    pytest.importorskip("diplomacy", reason="needs pip install -e '.[diplomacy]'")
    with serving(runs, *QUICK) as browser:
        person, stranger = browser(), browser()
        form = {"game": "diplomacy", "opponent": opponent, "seat": "any", "objective": "own", "talk": talk}
        assert opponent in person.get("/play").text
        page = person.post("/play", data=form)
        assert page.status_code == 200, page.text
        address, pages = str(page.url.path), [page.text]
        drawn = person.get(f"{address}/board")
        assert drawn.headers["content-type"] == "image/svg+xml" and drawn.text.startswith("<?xml")
        assert stranger.get(f"{address}/board").status_code == 404
        for _ in range(400):
            text = pages[-1]
            (state,) = re.findall(r'data-state="(\w+)"', text)
            if state == "over":
                return pages
            if state == "waiting":
                pages.append(person.get(address).text)
                continue
            number = re.findall(r'name="number" value="(\d+)"', text)[0]
            options = [html.unescape(each) for each in re.findall(r'name="choice" value="([^"]*)"', text)]
            reply = {"choice": options[0]} if options else {"text": "<b>peace</b> ?"}
            pages.append(person.post(address, data={"number": number, **reply}).text)
    raise AssertionError("the game does not end")


@pytest.mark.parametrize("talk", ["yes", ""])
def test_a_whole_game_by_buttons_and_messages(talk: str, tmp_path: Path) -> None:
    pages = played(tmp_path, "careful", talk)
    assert re.search(r"You are <b>(FRANCE|AUSTRIA|ENGLAND|GERMANY|ITALY|RUSSIA|TURKEY)</b>", pages[0])
    assert "Year 1 is over." in pages[-1] and re.search(r"Your score</dt><dd>0\.\d\d<", pages[-1])
    (transcript,) = recorded(tmp_path)
    own = [turn for turn in transcript["turns"] if transcript["players"][turn["agent"]] == "human"]
    said = [turn for turn in own if turn["message"]]
    readers = [turn for turn in own if turn["text"] in POWERS]  # two, or one if the only unit is lost in spring
    assert len(said) == len(readers) and all(turn["message"] == "<b>peace</b> ?" for turn in said)
    assert 1 <= len(readers) <= 2 if talk else not readers
    assert not any(turn["error"] for turn in transcript["turns"])
    assert "<b>peace</b>" not in pages[-1] and ("&lt;b&gt;peace" in pages[-1]) == bool(talk)
    assert ("To whom do you send a message?" in pages[-1]) == bool(talk)


def test_players_who_plan_are_offered_once_they_are_trained(tmp_path: Path) -> None:
    study = study_of(configure("lookahead", "width=8", f"runs={tmp_path}", "search.iterations=2", "years=1"))
    study.folder.mkdir(parents=True)
    write_json(study.folder / "settings.json", study.settings)
    for name in ("SL", "DORA", "piKL"):
        lookahead.save(Learner(study.game, study.net(0), study.train), study.folder / f"{name}-s0")
        if name != "DORA":  # is in training
            write_json(study.folder / f"{name}-s0.json", {})
    name = f"lookahead/{study.folder.name}/piKL-s0"
    pages = played(tmp_path, name, "yes")
    assert "DORA-s0" not in pages[0]
    (transcript,) = recorded(tmp_path)
    assert sorted(transcript["players"].values()) == ["human"] + 6 * ["piKL-s0"]
    assert transcript["about"]["opponent"] == name


def test_the_picture_is_of_what_was_told() -> None:
    pytest.importorskip("diplomacy", reason="needs pip install -e '.[diplomacy]'")
    spring = "Spring of year 1 of 3: moves.\nFRANCE: A PAR, F BRE; centres BRE, PAR\nAUSTRIA: no unit; centres VIE\n"
    assert positions([spring]) == {"FRANCE": (["A PAR", "F BRE"], ["BRE", "PAR"]), "AUSTRIA": ([], ["VIE"])}
    later = "Fall of year 1 of 3: moves.\nFRANCE: A BUR; centres none\n"
    assert positions([spring, later]) == {"FRANCE": (["A BUR"], [])}
    drawn = picture("standard_france_austria", [spring])
    later_drawn = picture("standard_france_austria", [spring, later])
    assert "S1901M" in drawn and "F1901M" in later_drawn and drawn.count("<use ") > later_drawn.count("<use ")
    with pytest.raises(UserError, match="no such picture"):
        picture("pure", ["You play Diplomacy as FRANCE,"])


def test_without_its_package_the_page_has_the_other_games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("Diplomacy needs the package diplomacy, which is not installed.")

    monkeypatch.setattr(board, "load_package", missing)
    with serving(tmp_path) as browser:
        page = browser().get("/play").text
    assert "Play Deal or No Deal" in page and "Diplomacy" not in page
