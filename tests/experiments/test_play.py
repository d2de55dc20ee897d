"""A person at the terminal, in every game: what is shown, what may be typed, what is kept."""

import io
import json
import os
import pty
import select
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from experiments import play
from experiments.play import Person
from experiments.setup.players import in_runs
from experiments.webapp.timeline import timeline_of
from marl.agents.text import TextAgent
from marl.common.errors import UserError
from marl.report.transcripts import read_episodes
from tests.composing import configure


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


@pytest.mark.parametrize(("opponent", "style"), [("random", "compact"), ("careful", "compact"), ("careful", "natural")])
def test_a_game_of_among_us_is_played_and_recorded(
    opponent: str,
    style: str,
    typing: Callable[[Iterator[str]], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The person reads natural words, and scripts speak them."""
    typing(iter(["1"] * 2000))
    settings = ["env=among_us", f"opponent={opponent}", f"env.style={style}", "env.cooldown=1", "env.messages_each=1"]
    play.main(configure("play", *settings, "games=6", "env.max_steps=60", f"out={tmp_path}"))
    shown = capsys.readouterr().out
    assert "Choose by the number of an option" in shown and "[propose]" not in shown and "env.style" not in shown
    assert "You play Among Us on a grid of rooms" in shown and " at bridge" not in shown
    games = [json.loads(line) for line in (tmp_path / "episodes-001.jsonl").read_text().splitlines()]
    assert len(games) == 6 and not (tmp_path / "unfinished-001.txt").exists()
    for game in games:
        assert sorted(game["players"].values()) == sorted(["human", *[opponent] * 4])
        own = [turn for turn in game["turns"] if game["players"][turn["agent"]] == "human"]
        assert own and not any(turn["error"] for turn in own)
        assert game["about"]["person_reads"] == "natural"
    if opponent == "careful":  # others say nothing
        said = [
            t["message"] for g in games for t in g["turns"] if t["message"] and g["players"][t["agent"]] == "careful"
        ]
        assert said and all(message[0].isupper() for message in said)
        assert f'says: "{said[0]}"' in shown


def test_a_deal_is_negotiated(
    typing: Callable[[Iterator[str]], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typing(iter(["hello", *["[message] i want the hats"] * 60]))
    play.main(configure("play", "opponent=scripted", "env.max_entries=6", f"out={tmp_path}"))
    shown = capsys.readouterr().out
    assert "[propose] (1 books, 0 hats, 2 balls)" in shown and "Choose by the number" not in shown
    (game,) = [json.loads(line) for line in (tmp_path / "episodes-001.jsonl").read_text().splitlines()]
    assert sorted(game["players"].values()) == ["human", "scripted"]
    first = next(turn for turn in game["turns"] if game["players"][turn["agent"]] == "human")
    assert first["error"]  # it had no tag, and was asked for again


def test_counts_are_typed_as_they_are(
    typing: Callable[[Iterator[str]], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Typing 1 in format=structured claims one item, not the first option, which is 0. No hint mentions proposals."""
    typing(iter(["1"]))
    person = Person()
    assert person.reply("How many hats do you claim?", ("0", "1", "2")) == "1"
    shown = capsys.readouterr().out
    assert ") 0" not in shown and all(f"  {count}\n" in shown for count in "012")
    typing(iter(["hello", "proposal", "1", "0", "3"]))
    play.main(configure("play", "opponent=scripted", "env.format=structured", "env.max_entries=4", f"out={tmp_path}"))
    shown, (game,) = capsys.readouterr().out, read_episodes(tmp_path / "episodes-001.jsonl")
    assert "[propose]" not in shown
    own = "player_1: proposal\nplayer_1: claims 1 book\nplayer_1: claims 0 hats\nplayer_1: claims 3 balls"
    assert own.replace(":", " ") in shown
    assert own in "\n".join(moment["text"] for moment in timeline_of(game)["moments"])


def test_an_unfinished_game_is_kept(typing: Callable[[Iterator[str]], None], tmp_path: Path) -> None:
    typing(iter(["1", "1"]))
    play.main(configure("play", "env=among_us", "opponent=random", f"out={tmp_path}"))
    text = (tmp_path / "unfinished-001.txt").read_text()
    assert text.count("you> ") == 2 and not (tmp_path / "episodes-001.jsonl").exists()
    head = json.loads(text.partition("\n")[0])
    assert head["unfinished"] is True and len(head["reply_seconds"]) == 2
    assert (head["opponent"], head["seed"], head["env"]["game"]) == ("random", 1, "among_us")


def test_two_games_at_once_are_both_kept(typing: Callable[[Iterator[str]], None], tmp_path: Path) -> None:
    """The second terminal's game begins and ends during the first one's, under the number that was free for both."""

    def replies(ending: int) -> Iterator[str]:
        yield "1"
        (tmp_path / "unfinished-001.txt").write_text("the other's")
        (tmp_path / "episodes-001.jsonl").write_text("the other's")
        yield from ["1"] * ending

    for ending, kept in ((1, "unfinished-002.txt"), (500, "episodes-002.jsonl")):
        typing(replies(ending))
        play.main(configure("play", "env=among_us", "opponent=random", "env.max_steps=20", f"out={tmp_path}"))
        assert (tmp_path / kept).read_text()
        for path in tmp_path.glob("*-001.*"):
            assert path.read_text() == "the other's"
            path.unlink()
        (tmp_path / kept).unlink()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_whoever_is_told_to_stop_keeps_the_game(
    number: int, typing: Callable[[Iterator[str]], None], tmp_path: Path
) -> None:
    def replies() -> Iterator[str]:
        yield "1"
        os.kill(os.getpid(), number)
        yield "2"

    before = signal.getsignal(number)
    typing(replies())
    play.main(configure("play", "env=among_us", "opponent=random", f"out={tmp_path}"))
    assert (tmp_path / "unfinished-001.txt").read_text().count("you> ") == 1 and signal.getsignal(number) == before


def test_a_window_that_closes_keeps_the_game(tmp_path: Path) -> None:
    """The end of its input comes first and the signal while the game is being kept."""
    cfg = configure("play", "opponent=careful", f"out={tmp_path}")
    process, terminal = pty.fork()
    if process == 0:  # the child never returns to the caller's code
        sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w", buffering=1)
        try:
            play.main(cfg)
        finally:
            os._exit(0)
    shown, typed = b"", False
    while not typed or shown.count(b"you> ") < 2:
        assert select.select([terminal], [], [], 120)[0], f"nothing came after {shown!r}"
        shown += os.read(terminal, 1000)
        if not typed and b"you> " in shown:
            typed = bool(os.write(terminal, b"[message] hello\n"))
    os.close(terminal)
    os.waitpid(process, 0)
    assert "you> [message] hello" in (tmp_path / "unfinished-001.txt").read_text()


def test_an_opponent_that_breaks_costs_no_game(
    typing: Callable[[Iterator[str]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def observe(self, text: str) -> None:
            pass

        def reply(self, text: str, options: object = ()) -> str:
            if "hello" in text:
                raise ZeroDivisionError
            return "[message] what do you want ? [END]"

    monkeypatch.setattr(play, "find_player", lambda *_: TextAgent("broken", lambda seed, role: Broken()))
    typing(iter(["[message] hello"] * 9))
    with pytest.raises(ZeroDivisionError):
        play.main(configure("play", f"out={tmp_path}"))
    assert "you> [message] hello" in (tmp_path / "unfinished-001.txt").read_text()


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_byte_that_is_no_text_costs_no_game(errors: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = io.TextIOWrapper(io.BytesIO(b"[message] caf\xe9\n[message] hi\n"), encoding="utf-8", errors=errors)
    monkeypatch.setattr("sys.stdin", typed)
    play.main(configure("play", "opponent=careful", f"out={tmp_path}"))
    assert "you> [message] caf\ufffd" in (tmp_path / "unfinished-001.txt").read_text(encoding="utf-8")


def test_a_place_that_cannot_be_written_is_refused_before_the_game(
    typing: Callable[[Iterator[str]], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("a file")
    typing(iter([]))
    with pytest.raises(UserError, match=r"out=.*cannot be written"):
        play.main(configure("play", "opponent=random", f"out={tmp_path / 'out'}"))
    assert "a new game" not in capsys.readouterr().out


def test_each_start_deals_other_games_and_a_seed_deals_them_again(
    typing: Callable[[Iterator[str]], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for settings in ([], [], ["seed=1"]):
        typing(iter(["[propose] (0 books, 0 hats, 0 balls)", "[message] hi"] * 20))
        play.main(configure("play", "opponent=careful", "games=2", f"out={tmp_path}", *settings))
    dealt = []
    for number in (1, 2, 3):
        games = [json.loads(line) for line in (tmp_path / f"episodes-00{number}.jsonl").read_text().splitlines()]
        dealt.append([game["facts"] for game in games])
        for game in games:
            own = [turn for turn in game["turns"] if game["players"][turn["agent"]] == "human"]
            about = game["about"]
            assert len(about["reply_seconds"]) == len(own) and about["game_seed"] == game["seed"]
            assert (about["opponent"], about["seed"]) == ("careful", 2 if number == 2 else 1)
            assert "temperature" not in about and "planner" not in about  # a script has none
    assert dealt[0] == dealt[2] != dealt[1] and "seed=2 deals the same again" in capsys.readouterr().out


def test_a_run_is_found_by_its_name(tmp_path: Path) -> None:
    for folder in ("runs/mine-s0/policy", "here/policy"):
        (tmp_path / folder).mkdir(parents=True)
    runs = str(tmp_path / "runs")
    assert in_runs("mine-s0", runs) == f"{runs}/mine-s0" and in_runs("mine-s0+plan", runs) == f"{runs}/mine-s0+plan"
    for name in ("random", "base", str(tmp_path / "here")):
        assert in_runs(name, runs) == name
