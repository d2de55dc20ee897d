"""A person at the terminal, in every game: what is shown, what may be typed, what is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from experiments import play
from experiments.play import Person


def configure(*overrides: str) -> DictConfig:
    with initialize_config_module("conf", version_base="1.3"):
        return compose("play", overrides=list(overrides))


@pytest.fixture
def typing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterator[str]], None]:
    """Types these lines, then closes the terminal."""

    def start(replies: Iterator[str]) -> None:
        def read(prompt: str) -> str:
            line = next(replies, None)
            if line is None:
                raise EOFError
            return line

        monkeypatch.setattr("builtins.input", read)

    return start


def test_options_are_numbered_and_speech_gets_its_end(
    typing: Callable[[Iterator[str]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    typing(iter(["2", " go_south ", "9", "red did it", "done [END]", "7"]))
    person = Person()
    assert person.reply("at lab", ("wait", "go_south")) == "go_south"
    assert "  1) wait\n  2) go_south\n" in capsys.readouterr().out
    assert person.reply("", ("wait", "go_south")) == "go_south"
    assert person.reply("", ("wait", "go_south")) == "9"  # no option: the game says so, and nothing is guessed
    assert person.reply("speak") == "red did it [END]"
    assert person.reply("") == "done [END]"
    assert person.reply("") == "7 [END]"  # a number said is a number
    assert person.log[:2] == ["at lab", "you> go_south"]


@pytest.mark.parametrize("opponent", ["random", "careful"])
def test_a_game_of_among_us_is_played_and_recorded(
    opponent: str, typing: Callable[[Iterator[str]], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typing(iter(["1"] * 500))
    play.main(configure("env=among_us", f"opponent={opponent}", "games=2", "env.max_steps=40", f"out={tmp_path}"))
    shown = capsys.readouterr().out
    assert "Choose by the number of an option" in shown and "[propose]" not in shown and "env.style=natural" in shown
    games = [json.loads(line) for line in (tmp_path / "episodes-001.jsonl").read_text().splitlines()]
    assert len(games) == 2 and not (tmp_path / "unfinished-001.txt").exists()
    for game in games:
        assert sorted(game["players"].values()) == sorted(["human", *[opponent] * 4])
        own = [turn for turn in game["turns"] if game["players"][turn["agent"]] == "human"]
        assert own and not any(turn["error"] for turn in own)


def test_the_natural_style_explains_itself(
    typing: Callable[[Iterator[str]], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typing(iter(["1"] * 500))
    play.main(configure("env=among_us", "opponent=careful", "env.style=natural", "env.max_steps=10", f"out={tmp_path}"))
    shown = capsys.readouterr().out
    assert "You play Among Us on a grid of rooms" in shown and "env.style=natural" not in shown


def test_a_deal_is_negotiated(
    typing: Callable[[Iterator[str]], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typing(iter(["hello", *["[message] i want the hats"] * 60]))
    play.main(configure("opponent=scripted", "env.max_entries=6", f"out={tmp_path}"))
    shown = capsys.readouterr().out
    assert "[propose] (1 books, 0 hats, 2 balls)" in shown and "Choose by the number" not in shown
    (game,) = [json.loads(line) for line in (tmp_path / "episodes-001.jsonl").read_text().splitlines()]
    assert sorted(game["players"].values()) == ["human", "scripted"]
    first = next(turn for turn in game["turns"] if game["players"][turn["agent"]] == "human")
    assert first["error"]  # it had no tag, and was asked for again


def test_an_unfinished_game_is_kept(typing: Callable[[Iterator[str]], None], tmp_path: Path) -> None:
    typing(iter(["1", "1"]))
    play.main(configure("env=among_us", "opponent=random", f"out={tmp_path}"))
    assert (tmp_path / "unfinished-001.txt").read_text().count("you> ") == 2
    assert not (tmp_path / "episodes-001.jsonl").exists()
