"""A run's folder: its settings, lock, card and commit."""

import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import time
from functools import reduce
from pathlib import Path

import pytest
import yaml

from marl.common.errors import UserError
from marl.storage import folder as runs
from marl.storage.folder import (
    CARD,
    CONFIG,
    SETTINGS,
    UNKNOWN,
    check_there,
    claim,
    git_commit,
    read_run_card,
    run_settings,
)

WHOLE = """env: {game: dond}
cast: {a: {player: base}}
eval: {env: {}, cast: {}, temperature: 1.0}
algo: {iterations: 2, context: 64, max_new_tokens: 8}
loss: {}
model: {}
base: {}
"""


def test_every_setting_that_studies_read_is_needed(tmp_path: Path) -> None:
    endpoint = "chat: {extra: {logit_bias: {50256: -100}}}\n"  # may have any keys
    (tmp_path / CONFIG).write_text(WHOLE + endpoint)
    assert run_settings(tmp_path) == yaml.safe_load(WHOLE + endpoint)
    for name in SETTINGS:
        if name == "env":  # another error
            continue
        settings = yaml.safe_load(WHOLE)
        *groups, last = name.split(".")
        del reduce(dict.__getitem__, groups, settings)[last]
        (tmp_path / CONFIG).write_text(yaml.safe_dump(settings))
        with pytest.raises(UserError, match=rf"lacks .*\b{re.escape(name)}\b.*: it is"):
            run_settings(tmp_path)


@pytest.mark.parametrize(
    ("edited", "to", "said"),
    [
        ("eval: {env: {},", "eval: {env: 3,", "lacks eval.env"),
        ("eval: {env: {}, cast: {}, temperature: 1.0}", "eval: [1]", "lacks eval.temperature, eval.env, eval.cast"),
        ("loss: {}", "lost: {}", "lacks loss"),
        ("env: {game: dond}", "null: {game: dond}\nenv: {game: dond}", "None is no name"),
        ("temperature: 1.0", "temperature: [{3: 4}]", "3 is no name"),
        ("iterations: 2", "iterations: some", "lacks algo.iterations"),
        ("env: {game: dond}", "env: 5", "expected the settings of a run"),
        ("loss: {}", "reward: &me {game: *me}", r"an alias \(\*NAME\) stands for another part"),
        ("env: {game", "env: {game: [", "expected YAML"),
    ],
)  # fmt: skip
def test_a_damaged_configuration_is_refused(tmp_path: Path, edited: str, to: str, said: str) -> None:
    assert edited in WHOLE
    (tmp_path / CONFIG).write_text(WHOLE.replace(edited, to, 1))
    with pytest.raises(UserError, match=said) as refused:
        run_settings(tmp_path)
    assert str(tmp_path) in str(refused.value)


def test_a_configuration_that_says_the_same_in_another_order_stays(tmp_path: Path) -> None:
    other = "b: [1, 2]\na: 1\n"
    (tmp_path / CONFIG).write_text(other)
    with claim(tmp_path, "a: 1\nb:\n- 1\n- 2\n"):
        pass
    assert (tmp_path / CONFIG).read_text() == other
    with pytest.raises(UserError, match="was edited"), claim(tmp_path, "a: 1\nb: [1]\n"):
        pass
    (tmp_path / CONFIG).unlink()
    with claim(tmp_path, "a: 1\n"):
        assert (tmp_path / CONFIG).read_text() == "a: 1\n"


def test_a_damaged_card_is_told_with_a_way_on(tmp_path: Path) -> None:
    assert read_run_card(tmp_path) is None
    (tmp_path / CARD).write_text("")
    with pytest.raises(UserError, match=r"run\.json: expected one JSON .*Remove it: the run's own command"):
        read_run_card(tmp_path)


def test_a_process_that_is_killed_frees_its_run(tmp_path: Path) -> None:
    holder = os.fork()
    if holder == 0:
        try:  # the child never returns to the test's code
            with claim(tmp_path / "run", "a: 1"):
                (tmp_path / "held").touch()
                time.sleep(60)
        finally:
            os._exit(1)
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "held").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with (
            pytest.raises(UserError, match=r"run is being written by another process\. Wait"),
            claim(tmp_path / "run", "a: 1"),
        ):
            pass
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    with claim(tmp_path / "run", "a: 1"):
        pass


def test_a_folder_that_was_made_anew_is_not_the_locked_one(tmp_path: Path) -> None:
    """Whoever holds the lock of a folder that was removed, or moved away, no longer keeps others out of its place."""
    run = tmp_path / "run"
    with claim(run, "a: 1") as lock:
        check_there(run, lock)
        run.rename(tmp_path / "moved")
        with pytest.raises(UserError, match=r"was moved or removed during its run\. Put it back"):
            check_there(run, lock)
        with claim(run, "a: 1") as other:
            check_there(run, other)
            with pytest.raises(UserError, match=r"made anew during its run\. This process stops"):
                check_there(run, lock)
        shutil.rmtree(run)
        (tmp_path / "moved").rename(run)
        check_there(run, lock)


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(UserError, match=rf"runs={tmp_path}: its file system has no locks \(No locks available\)"),
        claim(tmp_path / "run", "a: 1"),
    ):
        pass


def test_settings_that_are_read_again_are_the_readers_own_and_those_of_an_edited_file_are_new(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(WHOLE)
    run_settings(tmp_path)["env"]["game"] = "among_us"
    assert run_settings(tmp_path)["env"] == {"game": "dond"}
    (tmp_path / CONFIG).write_text(WHOLE.replace("game: dond", "game: hint"))
    assert run_settings(tmp_path)["env"] == {"game": "hint"}


def test_the_commit_is_that_of_the_code_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of what is committed while a process goes on with what it has read."""
    before = git_commit()
    monkeypatch.setattr(runs, "__file__", "/nowhere/marl/storage/folder.py")
    assert git_commit.__wrapped__() == UNKNOWN and git_commit() == before


@pytest.fixture
def without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)


def commit_all(folder: Path) -> None:
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm one"):
        subprocess.run(["git", *command.split()], cwd=folder, check=True)


@pytest.mark.usefixtures("without_git")
def test_a_package_inside_another_repository_has_not_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a virtual environment lies in it: what was installed has its version, a mere copy nothing."""
    site = tmp_path / ".venv" / "site-packages"
    for folder in ("marl/storage", "marl_language_games-7.8.9.dist-info"):
        (site / folder).mkdir(parents=True)
    (site / "marl" / "storage" / "folder.py").write_text("x = 1")
    commit_all(tmp_path)
    monkeypatch.setattr(runs, "__file__", str(site / "marl" / "storage" / "folder.py"))
    assert git_commit.__wrapped__() == UNKNOWN
    (site / "marl_language_games-7.8.9.dist-info" / "METADATA").write_text(
        "Name: marl-language-games\nVersion: 7.8.9\n"
    )
    monkeypatch.syspath_prepend(site)
    assert git_commit.__wrapped__() == "7.8.9"
    beside = tmp_path / "copy" / "marl" / "storage" / "folder.py"  # beside what was installed
    monkeypatch.setattr(runs, "__file__", str(beside))
    assert git_commit.__wrapped__() == UNKNOWN


@pytest.mark.usefixtures("without_git")
def test_the_commit_tells_of_files_that_git_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "__file__", str(tmp_path / "marl" / "storage" / "folder.py"))
    for name, text in ((".gitignore", "runs/\n"), ("runs/config.yaml", "a: 1"), ("marl/a.py", "x = 1")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    commit_all(tmp_path)
    (tmp_path / "notes.txt").write_text("no code")
    (tmp_path / "marl" / ".#ppo.py").symlink_to("nowhere")  # an editor's lock
    (tmp_path / "conf" / "reward").mkdir(parents=True)
    clean = git_commit.__wrapped__()
    assert re.fullmatch("[0-9a-f]{12}", clean)
    found = [clean]
    for name, text in (("marl/term.py", "x = 1"), ("marl/a.py", "x = 2"), ("conf/reward/term.yaml", "x: 1")):
        (tmp_path / name).write_text(text)
        found.append(git_commit.__wrapped__())
    assert len(set(found)) == 4 and all(re.fullmatch(rf"{clean}\+[0-9a-f]{{6}}", each) for each in found[1:])
