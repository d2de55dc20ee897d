"""The player behind an endpoint, from the commands: evaluated, replayed, played against, and beside a learner."""

import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments import evaluate, play, train
from experiments.learning import AfterIteration
from experiments.studies import crossplay
from marl.agents.completion import Lost
from marl.common.errors import UserError
from marl.common.files import unpacked
from tests.composing import cases, config_hash, configure
from tests.endpoint import KEY, Server, sensible

SMALL = [
    "progress=false", "threads=1", "base.games=12", "model.hidden_size=32", "model.layers=1",
    "model.intermediate_size=64", "model.max_new_tokens=8",
]  # fmt: skip


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Server(sensible)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def nowhere(folder: Path) -> bool:
    return not any(KEY.encode() in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_it_is_evaluated_and_replayed(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = [
        "players=[chat,careful]", "games=6", "concurrency=6", f"runs={tmp_path / 'runs'}", "chat.model=m", "threads=1",
        "progress=false",
    ]  # fmt: skip
    evaluate.main(configure("evaluate", *common, f"chat.url={server.url}", f"out={tmp_path / 'a'}"))
    shown = capsys.readouterr().out
    assert f"chat: {len(server.asked)} calls" in shown and "lost to the endpoint: none" in shown
    found = json.loads((tmp_path / "a" / "evaluation.json").read_text())["about"]
    assert found["chat"]["calls"] == len(server.asked) > 6 and found["chat"]["lost_seats"] == []
    server.shutdown()
    evaluate.main(configure("evaluate", *common, "chat.replay=true", f"out={tmp_path / 'b'}"))
    first, second = ((tmp_path / name / "episodes.jsonl").read_text() for name in "ab")
    assert first == second and first.count("hello {}") > 0
    assert nowhere(tmp_path) and (tmp_path / "runs" / "chat.jsonl").is_file()


def test_lost_games_are_named_and_the_command_ends(server: Server, tmp_path: Path) -> None:
    server.answering = lambda server, body, handler: handler.send("{}", 401)
    out = tmp_path / "out"
    evaluate.main(
        configure(
            "evaluate", "players=[chat,random]", "games=3", "concurrency=3", f"runs={tmp_path}", "chat.model=m",
            f"chat.url={server.url}", f"out={out}", "threads=1", "progress=false",
        )
    )  # fmt: skip
    found = json.loads((out / "evaluation.json").read_text())
    assert found["about"]["chat"]["lost"] == {"key refused": 3} and [
        s["game"] for s in found["about"]["chat"]["lost_seats"]
    ] == [0, 1, 2]
    assert found["conditions"]["chat v random"]["errors/aborted"]["mean"] == 1.0 and nowhere(tmp_path)


def test_cross_play_goes_on_past_failures_and_keeps_no_pair_that_met_a_spent_budget(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def go(calls: int) -> None:
        crossplay.main(
            configure(
                "crossplay", "players=[chat,careful]", "games=4", "concurrency=4", f"runs={tmp_path}", "chat.model=m",
                f"chat.url={server.url}", f"chat.calls={calls}", "threads=1", "progress=false",
            )
        )  # fmt: skip

    def answering(server: Server, body: dict[str, Any], handler: Any) -> None:
        if len(server.asked) == 5:
            handler.send("{}", 403)
        else:
            sensible(server, body, handler)

    server.answering = answering
    out = tmp_path / "crossplay"
    with pytest.raises(UserError, match=r"chat: budget spent, so that 2 pairs are not kept.*chat\.calls"):
        go(1)
    assert [path.name.partition("-")[0] for path in out.glob("*.json")] == ["careful"]
    assert capsys.readouterr().out.count("not kept: budget spent") == 2 and not (out / "crossplay.csv.gz").exists()
    go(1000)
    rows = [line.split(",") for line in unpacked(out / "crossplay.csv.gz").splitlines()]
    assert rows[0][-2:] == ["games", "lost_seats"]
    assert sum({frozenset(row[1:3]): int(row[-1]) for row in rows[1:]}.values()) == 1
    card = json.loads((out / "cards.jsonl").read_text())
    assert list(card["lost_seats"].values()) == [1] and "1 declined to answer" in capsys.readouterr().out


def test_requests_are_not_logged(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The real command line is used, because it prints what is logged."""
    given = ("players=[chat,random]", "games=1", "chat.model=m", "threads=1", "progress=false")
    monkeypatch.setattr(sys, "argv", ["evaluate", *given, f"runs={tmp_path}", f"chat.url={server.url}"])
    evaluate.main()
    said = capfd.readouterr()
    assert server.asked and said.out and "HTTP" not in said.out + said.err


def test_a_person_plays_against_it(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = iter(["[message] hi", *["[propose] (1 books, 0 hats, 0 balls)"] * 3])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    play.main(configure("play", "opponent=chat", "chat.model=m", f"chat.url={server.url}", f"runs={tmp_path}"))
    (game,) = [json.loads(line) for line in (tmp_path / "play" / "episodes-001.jsonl").read_text().splitlines()]
    assert sorted(game["players"].values()) == ["chat", "human"] and "chat: 2 calls" in capsys.readouterr().out


def test_a_person_is_told_once_which_players_are_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat: Any = SimpleNamespace(lost=[])
    person = play.Person(chat)
    monkeypatch.setattr("builtins.input", lambda prompt: "1")
    assert person.reply("You see nobody.", ["wait", "up"]) == "wait" and "chat" not in capsys.readouterr().out
    chat.lost.append(((0, "player_1"), Lost.UNREACHABLE))
    for times in (1, 0):
        person.reply("You see nobody.", ["wait", "up"])
        assert (
            capsys.readouterr().out.count("(chat: cannot be reached; this player says and does nothing more") == times
        )


@cases("""
chat.url=http://localhost/v1 | chat.model
chat.model=m | chat.url
chat.model=m chat.url=http://localhost/v1 chat.key=NO_SUCH_KEY | NO_SUCH_KEY
chat.model=m chat.url=http://localhost/v1 chat.timeout=soon | chat.timeout
""")
def test_mistakes_are_named_before_anything_runs(overrides: list[str], said: str, server: Server) -> None:
    with pytest.raises(UserError, match=said):
        evaluate.main(configure("evaluate", "players=[chat]", *overrides))
    assert server.asked == []


@pytest.mark.parametrize("secret", [f"chat.key={KEY}", f"chat.url=http://me:{KEY}@localhost/v1"])
def test_what_may_be_a_secret_is_refused_where_nobody_chats_too(secret: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"chat\.(key|url) must be") as refused:
        train.main(configure("train", *SMALL, f"runs={tmp_path}", secret))
    assert KEY not in str(refused.value) and not list(tmp_path.iterdir())


def test_a_training_run_keeps_no_secret_and_goes_on_by_the_same_settings(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files of the run, W&B's included, hold no secret, though another key makes another run."""

    def settings(calls: int, key: str = "one-27182818") -> list[str]:
        return [
            *SMALL, "name=tiny", "cast.negotiator.partner=chat", "cast.negotiator.partners=1", "algo.iterations=1",
            "algo.games=4", "algo.concurrency=4", "algo.update.minibatches=1", "eval.games=0", "eval.final_games=2",
            f"runs={tmp_path}", "chat.model=m", f"chat.url={server.url}", f"chat.calls={calls}", "tracker=wandb",
            f"+chat.extra={{api_key: {key}, headers: {{Authorization: Bearer-27182818}}, user: {KEY}, effort: low}}",
        ]  # fmt: skip

    def go(calls: int) -> None:
        monkeypatch.setattr(sys, "argv", ["train", *settings(calls)])
        train.main(configure("train", *settings(calls)))

    with pytest.raises(UserError, match=r"chat: budget spent.*chat\.calls"):
        go(1)
    (run,) = tmp_path.glob("tiny-*")
    assert not (run / "run.json").exists() and not list(tmp_path.glob("bases/*/evaluations/*/evaluation.json"))
    go(1000)
    assert json.loads((run / "run.json").read_text())["chat"]["lost"] == {}
    go(1000)
    assert f"{run} is done" in capsys.readouterr().out
    assert {asked["api_key"] for asked in server.asked} == {"one-27182818"} and server.asked[0]["user"] == KEY
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if b"27182818" in path.read_bytes()] and nowhere(tmp_path)
    for name in ("config.yaml", "report.html", "wandb"):
        kept = [path.read_bytes() for path in files if name in path.relative_to(run.parent).parts]
        assert any(b"secret:" in content for content in kept), name
    assert "+chat.extra=..." in (run / "run.json").read_text() and "effort: low" in (run / "config.yaml").read_text()
    hashes = [config_hash(configure("train", *settings(1, key))) for key in ("one-27182818", "another")]
    assert hashes[0][:8] == run.name.rpartition("-")[2] != hashes[1][:8]


def test_training_says_after_each_iteration_which_seats_were_lost(capsys: pytest.CaptureFixture[str]) -> None:
    """A learner could otherwise play beside a silent partner to the end without anybody noticing."""
    chat = SimpleNamespace(lost=[((0, "player_0"), Lost.BUSY), ((1, "player_0"), Lost.BUSY)])
    parts: dict[str, Any] = dict.fromkeys((field.name for field in fields(AfterIteration)), None)
    after = AfterIteration(**{**parts, "work": SimpleNamespace(chat=chat), "reported": 0})
    for reason in (None, Lost.STATUS):
        chat.lost += [((2, "player_0"), reason)] if reason else []
        after.tell_lost()
        after.tell_lost()
    line = "chat: seats lost to the endpoint"
    assert capsys.readouterr().out.splitlines() == [f"{line}: 2 too many requests", f"{line}: 1 error status"]
    AfterIteration(**{**parts, "work": SimpleNamespace(chat=None)}).tell_lost()


def test_a_training_run_of_several_processes_has_no_endpoint(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = configure(
        "train", *SMALL, "cast.negotiator.partner=chat", f"runs={tmp_path}", "cast.negotiator.partners=1",
        "chat.model=m", f"chat.url={server.url}",
    )  # fmt: skip
    with pytest.raises(UserError, match="cast: chat plays in runs of one process"):
        train.main(config)
