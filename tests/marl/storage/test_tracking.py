"""Trackers: what the files hold, what resuming keeps, and a real W&B run without network."""

import gzip
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import wandb

from marl.common.errors import UserError
from marl.report.games import MESSAGE_COLUMNS, message_rows
from marl.report.transcripts import episode_to_json
from marl.storage.tracking import JsonlTracker, Tracker, WandbTracker, make_tracker
from tests.marl.episodes import deal_game


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_hold_exactly_what_was_logged(tmp_path: Path) -> None:
    with JsonlTracker(tmp_path / "run") as tracker:
        tracker.log(0, {"game/score": 10.0, "belief/accuracy": np.float32(0.5)}, phase="evaluate")
        assert len(lines(tmp_path / "run/metrics.jsonl")) == 1  # on disk at once
        tracker.log(1, {"loss/value": torch.tensor(0.25), "speed/tokens_per_second": 9.5, "time/update": 2, "a": 3})
        tracker.log(2, {"time/update": 1.5})
    assert (tmp_path / "run/metrics.jsonl").read_text() == (
        '{"iteration": 0, "phase": "evaluate", "belief/accuracy": 0.5, "game/score": 10.0}\n'
        '{"iteration": 1, "phase": "train", "a": 3, "loss/value": 0.25}\n'
    )
    assert (tmp_path / "run/timing.jsonl").read_text() == (
        '{"iteration": 1, "phase": "train", "speed/tokens_per_second": 9.5, "time/update": 2}\n'
        '{"iteration": 2, "phase": "train", "time/update": 1.5}\n'
    )


def test_both_files_are_on_the_disk_once_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    with JsonlTracker(tmp_path) as tracker:
        tracker.log(1, {"x": 1.0, "time/x": 1.0})
        monkeypatch.setattr(
            os, "fsync", lambda number: synced.append(Path(os.readlink(f"/proc/self/fd/{number}")).name)
        )
        tracker.sync()
        monkeypatch.undo()
    assert synced == ["metrics.jsonl", "timing.jsonl"]


@pytest.mark.parametrize("value", [math.nan, torch.tensor(-math.inf), "1.0", None])
def test_what_is_not_a_finite_number_is_named_and_leaves_no_line(tmp_path: Path, value: object) -> None:
    with JsonlTracker(tmp_path) as tracker, pytest.raises(ValueError, match="loss/policy"):
        tracker.log(1, {"loss/value": 1.0, "loss/policy": value})
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_resume_drops_what_the_checkpoint_does_not_know(tmp_path: Path) -> None:
    with JsonlTracker(tmp_path) as tracker:
        for iteration in range(1, 6):
            tracker.log(iteration, {"x": iteration, "time/x": iteration})
    with JsonlTracker(tmp_path, resume_from_iteration=3) as tracker:
        tracker.log(4, {"x": 40})
    assert [line["x"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 40]
    assert [line["time/x"] for line in lines(tmp_path / "timing.jsonl")] == [1, 2, 3]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "timing.jsonl"]
    with JsonlTracker(tmp_path) as tracker:  # without a checkpoint the files start anew
        tracker.log(1, {"x": 2})
    assert [line["x"] for line in lines(tmp_path / "metrics.jsonl")] == [2]


def test_a_line_cut_off_by_a_crash_is_dropped_but_a_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1, "phase": "train", "x": 1}\n{"iteration": 2, "pha')
    JsonlTracker(tmp_path, resume_from_iteration=5).close()
    assert [line["iteration"] for line in lines(path)] == [1]
    path.write_text(path.read_text().rstrip("\n"))  # whole, but for its end
    with JsonlTracker(tmp_path, resume_from_iteration=1) as tracker:
        tracker.log(2, {"x": 2})
    assert [line["iteration"] for line in lines(path)] == [1, 2]
    path.write_text(path.read_text() + "hello\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 3 .*'hello'"):
        JsonlTracker(tmp_path, resume_from_iteration=5)
    assert "hello" in path.read_text()


@pytest.mark.parametrize("line", [b"\xff\n", b"[1]\n", b'{"iteration": "x"}\n'])
def test_a_damaged_file_is_refused_before_the_other_is_cut(tmp_path: Path, line: bytes) -> None:
    whole = b'{"iteration": 1, "phase": "train", "a": 1}\n{"iteration": 2, "phase": "train", "a": 1}\n'
    (tmp_path / "metrics.jsonl").write_bytes(whole)
    (tmp_path / "timing.jsonl").write_bytes(line)
    with pytest.raises(UserError, match=r"timing\.jsonl, line 1 is not a line of metrics"):
        JsonlTracker(tmp_path, resume_from_iteration=1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole and (tmp_path / "timing.jsonl").read_bytes() == line


@pytest.mark.parametrize("kind", ["jsonl", "wandb"])
def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot be written .*see that it can be written"):
        make_tracker(kind, tmp_path / "file" / "run", name="n", run_id="id", config={})


def test_unknown_kinds_are_named() -> None:
    with pytest.raises(UserError, match=r"tracker=tensorboard is unknown. Use jsonl or wandb"):
        make_tracker("tensorboard", Path("nowhere"), name="n", run_id="id", config={})
    with pytest.raises(UserError, match=r"tracker\.mode=on is unknown"):
        make_tracker("wandb", Path("nowhere"), name="n", run_id="id", config={}, mode="on")
    with pytest.raises(UserError, match=r"tracker\.tags=a is no list. Use brackets: tracker\.tags=\[a\]"):
        make_tracker("wandb", Path("nowhere"), name="n", run_id="id", config={}, tags="a")
    assert not Path("nowhere").exists()


def test_wandb_offline_writes_a_run_and_the_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openai", ModuleType("openai"))  # beside which W&B advertises
    tracker = make_tracker("wandb", tmp_path, name="full-0", run_id="abc123", config={"seed": 0, "loss": {"x": 1.0}})
    assert isinstance(tracker, WandbTracker)
    with tracker:
        tracker.log(1, {"game/score": 10.5, "time/update": 2.0})
        tracker.log(1, {"game/score": 11.0}, phase="evaluate")
        tracker.transcripts(1, ["episode", "text"], [[0, "first hello"]])
        tracker.transcripts(2, ["episode", "text"], [[0, "second hello"], [1, "third hello"]])
    assert [line["game/score"] for line in lines(tmp_path / "metrics.jsonl")] == [10.5, 11.0]
    [run] = (tmp_path / "wandb").glob("offline-run-*-abc123")
    record = (run / "run-abc123.wandb").read_bytes()
    for text in (b"game/score", b"evaluate/game/score", b"time/update", b"transcripts", b"full-0"):
        assert text in record, text
    tables = sorted((run / "files/media/table").glob("*.table.json"), key=lambda p: p.stat().st_mtime_ns)
    assert [json.loads(t.read_text())["data"] for t in tables] == [
        [[0, "first hello"]],
        [[0, "second hello"], [1, "third hello"]],
    ]
    assert all(t.name.startswith("transcripts_") for t in tables)  # one key, repeated
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_wandb_keeps_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets of the configuration and the command line are in no file, logs included. W&B would keep every word that
    was typed."""
    key = "sk-test-31415926"
    monkeypatch.setattr(sys, "argv", ["train", f"+chat.extra={{api_key: {key}}}", f"--password={key}", "word=typed"])
    config = {"chat": {"extra": {"api_key": key, "headers": {"Authorization": f"Bearer {key}"}}}, "arm": "no secret"}
    with make_tracker("wandb", tmp_path, name="n", run_id="abc123", config=config) as tracker:
        tracker.log(1, {"game/score": 10.5})
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    [record] = tmp_path.glob("wandb/offline-run-*/run-abc123.wandb")
    assert b"no secret" in files[record] and b"secret:" in files[record]  # the rest of it can be read
    assert not [path for path, content in files.items() if key.encode() in content or b"word=typed" in content]


def test_a_run_is_its_own_whoever_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweep agents, W&B Launch and SageMaker set names of their own for the run, which are ignored. A second start
    resumes the run."""
    monkeypatch.setattr("wandb.integration.sagemaker.is_using_sagemaker", lambda: True)
    foreign = {"WANDB_SWEEP_ID": "s1", "WANDB_LAUNCH": "true", "WANDB_PROJECT": "p", "WANDB_RUN_ID": "other",
               "WANDB_ENTITY": "them", "SM_TRAINING_ENV": "{}", "TRAINING_JOB_NAME": "job"}  # fmt: skip
    for name, value in foreign.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        with (
            pytest.warns(UserWarning, match="WANDB_SWEEP_ID, WANDB_LAUNCH: ignored"),
            make_tracker("wandb", tmp_path, name="n", run_id="own", config={}, project="ours") as tracker,
        ):
            tracker.log(1, {"x": 1})
            assert isinstance(tracker, WandbTracker)
            assert (tracker._run.id, tracker._run.project) == ("own", "ours")
        [run] = (tmp_path / "wandb").glob("offline-run-*")
        assert run.name.endswith("-own")
        run.rename(run.with_name("offline-run-20000101_000000-own"))  # folders are named by the second
    assert {name: os.environ[name] for name in foreign} == foreign


def test_wandb_online_without_an_account_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home/netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with JsonlTracker(tmp_path) as tracker:
        tracker.log(1, {"x": 1})
    with pytest.raises(UserError, match=r"tracker\.mode=offline .* or tracker=jsonl") as caught:
        make_tracker("wandb", tmp_path, name="n", run_id="id", config={}, mode="online")
    assert "\n" not in str(caught.value)
    assert [line["x"] for line in lines(tmp_path / "metrics.jsonl")] == [1]  # what an earlier attempt wrote stays


NOTHING: dict[str, Any] = {"offset": 0, "content": []}


class Service(BaseHTTPRequestHandler):
    """The part of W&B's service that a run talks to.

    Keeps rows at the places they are sent to, and tells a resuming run what it has. A run that does not resume sends
    from the first place on, which replaces everything there.
    """

    rows: ClassVar[dict[int, dict[str, Any]]]
    run: ClassVar[dict[str, Any]]  # what the run says of itself: group, tags, config, summary
    artifacts: ClassVar[list[dict[str, Any]]]
    files: ClassVar[dict[str, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        answer: dict[str, Any] = {}
        if self.path == "/graphql":
            asked = json.loads(body)
            answer = {"data": self.graphql(asked["query"], asked.get("variables") or {})}
        elif self.path.endswith("/file_stream"):
            files = json.loads(body).get("files") or {}
            if "wandb-summary.json" in files:
                self.run["summary"] = json.loads(files["wandb-summary.json"]["content"][-1])
            sent = files.get("wandb-history.jsonl") or NOTHING
            new = {place: json.loads(line) for place, line in enumerate(sent["content"], start=sent["offset"])}
            if new:
                type(self).rows = {place: row for place, row in self.rows.items() if place < sent["offset"]} | new
        elif self.path.startswith("/upload/"):
            self.files[self.path.removeprefix("/upload/")] = body
        reply = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    do_PUT = do_GET = do_POST

    def graphql(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "me"}}
        if "RunResumeStatus" in query and self.rows:
            last = json.dumps(self.rows[max(self.rows)])
            counts = {"historyLineCount": len(self.rows), "eventsLineCount": 0, "logLineCount": 0}
            tails = {"historyTail": json.dumps([last]), "eventsTail": "[]", "summaryMetrics": last}
            texts = {"config": "{}", "wandbConfig": '{"t": 1}', "displayName": "n", "tags": []}
            return {"model": project | {"bucket": {"id": "b", "name": variables["name"]} | counts | tails | texts}}
        if "viewer" in query:
            return {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        if "upsertBucket" in query:
            self.run.update({name: value for name, value in variables.items() if value is not None})
            bucket = {"id": "b", "name": variables["name"], "config": "{}", "project": project, "historyLineCount": 0}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if "createRunFiles" in query:
            host = self.headers["Host"]
            files = [{"name": name, "uploadUrl": f"http://{host}/upload/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        if "createArtifact(" in query:
            self.artifacts.append(variables)
            sequence = {"id": "s", "latestArtifact": None}
            return {"createArtifact": {"artifact": {"id": "a", "state": "COMMITTED", "artifactSequence": sequence}}}
        return {"project": {"artifact": None}} if "artifact(" in query else {}

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Service]]:
    """A server on this machine: there is no network in tests, and no account."""
    for name, empty in {"rows": {}, "run": {}, "artifacts": [], "files": {}}.items():
        monkeypatch.setattr(Service, name, empty, raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    yield Service
    server.shutdown()
    server.server_close()


def rows_of(service: type[Service], name: str) -> list[tuple[int, Any]]:
    """The steps of the rows that have the metric, in the server's order, each with its value."""
    rows = [row for _, row in sorted(service.rows.items())]
    assert all(row["_step"] == row["iteration"] for row in rows)
    return [(row["iteration"], row[name]) for row in rows if name in row]


def sync(folder: Path) -> None:
    """Uploads what `wandb sync offline-run-*` takes."""
    runs = sorted(str(path) for path in (folder / "wandb").glob("offline-run-*"))
    command = [sys.executable, "-m", "wandb", "sync", *runs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=folder)
    assert done.returncode == 0 and "ERROR" not in done.stderr, done.stderr


def test_a_restarted_offline_run_is_whole_in_its_newest_folder(tmp_path: Path, service: type[Service]) -> None:
    with make_tracker("wandb", tmp_path, name="n", run_id="same", config={}) as tracker:
        for i in (1, 2, 3):
            tracker.log(i, {"x": i / 10, "time/update": 1.5})
            tracker.transcripts(i, ["text"], [["hello"]])
    [first] = (tmp_path / "wandb").glob("offline-run-*")
    os.truncate(first / "run-same.wandb", 7)  # as a kill leaves it
    first.rename(first.with_name("offline-run-20000101_000000-same"))  # folders are named by the second
    with make_tracker("wandb", tmp_path, name="n", run_id="same", config={}, resume_from_iteration=2) as tracker:
        tracker.log(3, {"x": 3, "time/update": 2})
    assert len(list((tmp_path / "wandb").glob("*offline-run-*"))) == 1
    sync(tmp_path)
    assert rows_of(service, "x") == [(1, 0.1), (2, 0.2), (3, 3)]
    assert rows_of(service, "time/update") == [(1, 1.5), (2, 1.5), (3, 2)]
    assert [step for step, _ in rows_of(service, "transcripts")] == [1, 2]


def test_a_finished_run_is_opened_as_its_users_expect(tmp_path: Path, service: type[Service]) -> None:
    """Grouped panels, nested settings, a table of messages, the final figures with intervals, and the report."""
    report = tmp_path / "report.html"
    report.write_text("<title>a report</title>")
    config = {"env": {"game": "dond", "objective": 1.0}, "loss": {"listening": {"weight": 0.3}}}
    tags = ["dond", "full", "dond", "", "x" * 99]
    with make_tracker("wandb", tmp_path, name="n", run_id="abc", config=config, group="sweep", tags=tags) as tracker:
        tracker.log(1, {"game/score": 3.0, "loss/policy": 0.1})
        tracker.log(1, {"game/score": 4.0}, phase="eval")
        tracker.transcripts(1, MESSAGE_COLUMNS, message_rows(episode_to_json(deal_game(0))))
        ends = {"trained/game/score": 13.0, "trained/game/score/low": 12.5, "trained/game/score/high": 13.5}
        tracker.final({**ends, "trained/game/pareto/low": math.nan})
        tracker.report(report)
    sync(tmp_path)
    run = service.run
    assert (run["groupName"], run["tags"]) == ("sweep", ["dond", "full", "x" * 64])
    settings = {name: value["value"] for name, value in json.loads(run["config"]).items() if name != "_wandb"}
    assert settings == config
    assert rows_of(service, "eval/game/score") == [(1, 4.0)] and rows_of(service, "loss/policy") == [(1, 0.1)]
    assert {name: run["summary"][name] for name in run["summary"] if name.startswith("trained/")} == ends
    table = next(json.loads(body) for name, body in service.files.items() if name.endswith(".table.json"))
    assert table["columns"] == list(MESSAGE_COLUMNS)
    rows = [dict(zip(MESSAGE_COLUMNS, row, strict=True)) for row in table["data"]]
    assert (rows[0]["speaker"], rows[0]["says"], rows[0]["belief moved"]) == ("player_0", "i want the balls", 1.2)
    assert (rows[0]["belief before"], rows[0]["belief after"], rows[2]["belief before"]) == (0.1, 0.5, None)
    [reported] = [a["input"] for a in service.artifacts if a["input"]["artifactTypeName"] == "report"]
    assert reported["artifactCollectionName"] == "report-abc"


def online(folder: Path, resume: int | None = None) -> Tracker:
    wandb.teardown()  # an earlier test's W&B process knows another server
    return make_tracker(
        "wandb", folder, name="n", run_id="same", config={}, mode="online", resume_from_iteration=resume
    )


def test_online_iterations_lost_and_made_again_are_there_once(tmp_path: Path, service: type[Service]) -> None:
    with pytest.raises(KeyboardInterrupt), online(tmp_path / "a") as tracker:
        for i in (1, 2, 3, 4):
            tracker.log(i, {"x": i / 10})
        raise KeyboardInterrupt  # before the evaluation: the row of 4 is not whole
    assert rows_of(service, "x") == [(1, 0.1), (2, 0.2), (3, 0.3)]
    with JsonlTracker(tmp_path / "a", resume_from_iteration=3) as files:  # what a kill leaves: not all was sent
        for i in (4, 5, 6):
            files.log(i, {"x": i / 10})
    with online(tmp_path / "a", resume=5) as tracker:
        for i in (6, 7):
            tracker.log(i, {"x": i / 10})
            tracker.log(i, {"score": i}, phase="eval")
            tracker.transcripts(i, ["text"], [["hello"]])
    whole = [(i, i / 10) for i in range(1, 8)]
    assert rows_of(service, "x") == whole
    assert rows_of(service, "eval/score") == [(6, 6), (7, 7)]
    assert [table["nrows"] for _, table in rows_of(service, "transcripts")] == [1, 1]
    with online(tmp_path / "a") as tracker:  # begun anew, and all of it is there
        for i in (1, 2):
            tracker.log(i, {"x": 10 * i})
    with pytest.raises(UserError, match=r"run same .* project .* from another folder. Delete it there"):
        online(tmp_path / "b")
    assert not (tmp_path / "b/metrics.jsonl").exists()
    (tmp_path / "b/metrics.jsonl").write_text((tmp_path / "a/metrics.jsonl").read_text())  # as taken from another run
    with pytest.raises(UserError, match="made from another folder"):
        online(tmp_path / "b", resume=1)
    assert rows_of(service, "x") == whole
