"""A run's folder may come from anybody: whatever is in it, reading it ends in a sentence or does no harm.

Nothing in it is imported or run, refers to the environment, leads out of the folder, or takes more than a moment.
"""

import hashlib
import io
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import DictConfig, OmegaConf

from experiments import evaluate, play, report
from experiments.launch.terminal import say
from experiments.setup import publish
from experiments.setup.spec import run_spec
from experiments.setup.stages import stages_of
from experiments.studies import cells, conditions, crossplay
from marl.common.errors import LONGEST_ERROR, UserError, check_writable
from marl.common.files import MOST_JSON, MOST_LINES, MOST_YAML, read_json, read_yaml, write_text
from marl.report.page import build_report, read_run
from marl.storage.checkpoint import (
    copy_folder,
    folder_digest,
    newest_checkpoint,
    save_policy,
    save_training,
    verify_folder,
)
from marl.storage.folder import check_unedited, claim, nearest_run, read_settings
from marl.storage.tracking import JsonlTracker
from tests.composing import configure
from tests.hostile_inputs import Accepted, no_work
from tests.hostile_values import VALUES, altered, spots
from tests.marl.hint import hint_policy
from tests.marl.report.test_page import make_run
from tests.marl.storage.test_checkpoint import seal

SECONDS = 5.0  # CPU time of one reader: most take a tenth of a second, reading without limits takes hours
CHECKPOINT = "checkpoints/iteration-000001"
OF_PAGES = ("run.json", "evaluation.json", "metrics.jsonl", "timing.jsonl", "episodes/trained.jsonl")


@pytest.fixture(scope="module")
def configs() -> dict[str, DictConfig]:
    """Each command's settings, to which the run is still to be given."""
    named = {"evaluate": "players=[random]", "play": "opponent=random", "crossplay": "players=[random,scripted]"}
    return {name: configure(name, players) for name, players in named.items()}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `runs` with one finished run, which has every file that a run has, and its base."""
    at = tmp_path_factory.mktemp("good")
    cfg = configure(
        "train",
        f"runs={at / 'runs'}",
        "progress=false",
        "experiment=dond_quickstart",
        "model.context=32",
        "model.max_new_tokens=8",
    )
    spec = run_spec(cfg)
    run = make_run(spec.folder, arm=spec.arm, run=spec.folder.name, seeds=[0], command="train", inputs={})
    (run / "config.yaml").write_text(spec.config_yaml)
    timing = {"phase": "train", "speed/update_tokens_per_second": 40.0, "time/update": 2.5}
    (run / "timing.jsonl").write_text("".join(json.dumps({"iteration": i, **timing}) + "\n" for i in (1, 2, 3)))
    base, policy = run.parent / "bases" / "a-base", hint_policy(0)
    save_policy(base, hint_policy(1), {"game": "dond"})
    copy_folder(base, run / "reference")
    save_policy(run / "policy", policy, {"game": "dond", "base": str(base)})
    state = {"run": run.name, "base": folder_digest(base), "wall_time": 1.0, "commits": ["abc"]}
    save_training(run / "checkpoints", 1, {"learner": (policy, torch.optim.AdamW(policy.parameters()))}, state, keep=5)
    return run.parent


@pytest.fixture
def run(good: Path, tmp_path: Path) -> Path:
    """A copy of that run, which may be damaged."""
    shutil.copytree(good, tmp_path / "runs")
    return next(card.parent for card in (tmp_path / "runs").glob("*/run.json"))


def read_all(run: Path, configs: dict[str, DictConfig], page: bool = True) -> dict[str, str]:
    """Returns each reader's error about the folder by the reader's name, "" if it accepts the folder. Readers are
    commands, up to where they would play, and the page. Fails if a reader raises anything but a short UserError,
    changes a file, or is slow."""
    out = run.parent.parent / "out"
    readers: dict[str, Callable[[], Any]] = {
        "stages": lambda: [stage.digest for stage in stages_of(run, "learner")],
        "entrants": lambda: conditions.entrants(run.parent, run.name, []),
        "checkpoint": lambda: newest_checkpoint(run / "checkpoints", lambda errors: None),
        "page": lambda: build_report([run], out / "report.html", "A title") if page else read_run(run),
        "evaluate": lambda: command(evaluate.main, "evaluate", players=[str(run), "careful"]),
        "play": lambda: command(play.main, "play", opponent=str(run), out=str(out)),
        "crossplay": lambda: command(crossplay.main, "crossplay", players=[str(run), "careful"], cells=str(out)),
    }

    def command(main: Callable[[DictConfig], Any], name: str, **settings: Any) -> None:
        cfg = configs[name].copy()
        for key, value in {"runs": str(run.parent), **settings}.items():
            OmegaConf.update(cfg, key, value)
        with until_play(), redirect_stdout(io.StringIO()):
            main(cfg)

    before, errors = everything(run.parent.parent), {}
    for name, read in readers.items():
        began = time.process_time()
        try:
            read()
            errors[name] = ""
        except Accepted:
            errors[name] = ""
        except UserError as error:
            errors[name] = said = str(error)
            assert said.encode() and "\n" not in said and len(said) <= LONGEST_ERROR + 3, (name, said)
        assert time.process_time() - began < SECONDS, name
    assert everything(run.parent.parent) == before, "something was changed"
    return errors


@contextmanager
def until_play() -> Iterator[None]:
    """Commands raise Accepted where they would play; crossplay, too, has read all of its players then."""

    def begin(*_: Any) -> None:
        raise Accepted

    kept = crossplay.compute
    with no_work():
        cells.check_writable, crossplay.compute = check_writable, begin  # type: ignore[assignment]
        try:
            yield
        finally:
            crossplay.compute = kept


def everything(folder: Path) -> dict[str, Any]:
    """Returns kind, size and time of change of everything but the folder `out`."""
    found = {path: path.lstat() for path in sorted(folder.rglob("*")) if folder / "out" not in (path, *path.parents)}
    return {str(path): (each.st_mode, each.st_size, each.st_mtime_ns) for path, each in found.items()}


def test_a_whole_folder_is_read(run: Path, configs: dict[str, DictConfig]) -> None:
    assert set(read_all(run, configs).values()) == {""}
    assert "checksums.json" not in read_json(run / "policy" / "checksums.json")


# --- Files that are none ----------------------------------------------------------------------------------------------
def giant(path: Path) -> None:
    """One byte more than any file of this kind may have, which takes no room on the disk."""
    most = {".yaml": MOST_YAML, ".json": MOST_JSON, ".jsonl": MOST_LINES}[path.suffix]
    with path.open("r+b") as file:
        file.truncate(most + 1)


def linked(path: Path, to: str | Path) -> None:
    path.unlink()
    path.symlink_to(to)


def secret(path: Path) -> None:
    """Replaces the file by a link to a whole copy of it elsewhere."""
    elsewhere = path.parents[2] / "elsewhere"
    shutil.copy(path, elsewhere)
    linked(path, elsewhere)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "torn": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2].rstrip(b"\n")),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\0" * 9 + b"\n"),
    "nested": lambda path: path.write_text("[" * 100_000 + "\n"),
    "nested groups": lambda path: path.write_text('{"a": ' * 60 + "1" + "}" * 60 + "\n"),
    "huge number": lambda path: path.write_text(f'{{"a": {"9" * 100_000}}}' + "\n"),
    "large number": lambda path: path.write_text(f'{{"a": {"9" * 4000}}}' + "\n"),
    "not a number": lambda path: path.write_text('{"a": NaN, "b": .nan}' + "\n"),
    "half a letter": lambda path: path.write_text('{"a": "\\ud800"}' + "\n"),
    "giant": giant,
    "long line": lambda path: path.write_text('{"a": "' + "x" * 100_000 + '"' + "\n"),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "device": lambda path: linked(path, "/dev/zero"),
    "link out": secret,
    "link to itself": lambda path: linked(path, path),
    "folder": lambda path: (path.unlink(), path.mkdir()),
}
HARMLESS = ("torn", "empty")  # of JSON lines: the last line may be torn, and no lines are fine


@pytest.mark.parametrize(
    ("number", "how"), [(0, "nested"), (0, "link out"), (0, "giant"), (1, "torn"), (1, "folder"), (2, "pipe")]
)
def test_damaged_files_of_a_run_harm_no_reader(
    run: Path, configs: dict[str, DictConfig], number: int, how: str
) -> None:
    """All readers meet some damages of three files, which they read in one way. The next test tries every damage."""
    name = ("config.yaml", "policy/checksums.json", f"{CHECKPOINT}/state.json")[number % 3]
    DAMAGES[how](run / name)
    errors = read_all(run, configs, page=False)
    if name == "config.yaml" and how != "torn":  # what is left of it may be whole YAML
        assert errors["page"] and errors["stages"] and errors["entrants"]
        assert str(run) in errors["page"]
    if name == "policy/checksums.json":
        assert errors["evaluate"] and errors["play"] and errors["crossplay"]


@pytest.mark.parametrize("name", ["config.yaml", *OF_PAGES])
def test_damaged_files_of_a_run_are_refused_by_the_page(run: Path, name: str) -> None:
    """The page is the reader that reads most files of a run. Damage that is harmless to JSON lines may be accepted."""
    whole = (run / name).read_bytes()
    for how, damage in DAMAGES.items():
        damage(run / name)
        began = time.process_time()
        if how in HARMLESS and name.endswith("l"):
            read_run_or_refuse(run)
        else:
            with pytest.raises(UserError, match=str(run)):
                read_run(run)
        assert time.process_time() - began < SECONDS, how
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()
        (run / name).write_bytes(whole)
    read_run(run)


def read_run_or_refuse(run: Path) -> None:
    try:
        read_run(run)
    except UserError as error:
        assert len(str(error)) <= LONGEST_ERROR + 3


# --- Code, references, names ------------------------------------------------------------------------------------------
def changed(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    settings = yaml.safe_load((run / "config.yaml").read_text())
    change(settings)
    (run / "config.yaml").write_text(yaml.safe_dump(settings))


PLACES: dict[str, Callable[[dict[str, Any], str], Any]] = {
    "loss": lambda settings, at: settings["loss"].update(x={"_target_": f"{at}.X", "weight": 1.0}),
    "game": lambda settings, at: settings["env"].update(game=at),
    "env": lambda settings, at: settings["env"].update(_target_=f"{at}.X"),
    "algo": lambda settings, at: settings["algo"].update(_target_=f"{at}.X"),
    "player": lambda settings, at: settings["cast"]["negotiator"].update(player=at, partner=at, partners=1),
    "optimizer": lambda settings, at: settings["algo"]["update"].update(optimizer=f"{at}.X"),
}


@pytest.mark.parametrize("place", list(PLACES))
def test_nothing_of_a_folder_is_imported(
    run: Path, configs: dict[str, DictConfig], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent.parent)
    monkeypatch.syspath_prepend(str(run.parent.parent))
    plain = run.rename(run.with_name("evil"))  # a name that Python can import
    marker = run.parent.parent / "out" / "marker"
    marker.parent.mkdir()
    evil = f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n"
    for name in ("payload.py", "payload_v0.py", "__init__.py"):
        (plain / name).write_text(evil)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    changed(plain, lambda settings: PLACES[place](settings, "runs.evil.payload"))
    errors = read_all(plain, configs, page=False)
    assert not marker.exists()
    if place == "loss":  # whoever plays needs none
        assert errors["evaluate"] == errors["play"] == errors["crossplay"] == ""


@pytest.mark.parametrize(
    ("text", "place"),
    [
        *((text, "env.contexts") for text in ("${oc.decode:${oc.env:SECRET}}", "x${env.game}", "???")),
        *(("${oc.env:SECRET}", place) for place in ("env.contexts", "loss.kl._target_", "base.lessons")),
    ],
)
def test_settings_of_a_folder_refer_to_nothing(
    run: Path, configs: dict[str, DictConfig], text: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "swordfish")

    def refer(settings: dict[str, Any]) -> None:
        *groups, last = place.split(".")
        for group in groups:
            settings = settings[group]
        settings[last] = [text] if place == "base.lessons" else text

    changed(run, refer)
    with pytest.raises(UserError, match=r"config\.yaml: \S+ is no value but a reference") as refused:
        read_settings(run)
    assert place in str(refused.value) and "swordfish" not in str(refused.value)
    if (text, place) == ("${oc.env:SECRET}", "env.contexts"):
        errors = read_all(run, configs, page=False)
        assert all(errors[name] == str(refused.value) for name in ("page", "evaluate", "play", "crossplay", "stages"))


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "an alias"),
        ("a: &a [*a]", "an alias"),
        ("a: &a {b: 1}\nc: {<<: *a}", "an alias"),
        ("a: 2024-01-01", "a date is no plain data"),
        ("a: !!python/object/apply:os.system [exit]", "could not determine a constructor"),
        ("a: !!python/name:os.system", "could not determine a constructor"),
        ("a: !!set {b}", "a set is no plain data"),
        ("a: !!binary aGk=", "a bytes is no plain data"),
        ("a: !!int ''", "expected YAML"),
        ("a: !!bool maybe", "expected YAML"),
        ("a: !!timestamp no", "expected YAML"),
        ("? [a]\n: b", "expected YAML"),
        ("a: .inf", "a number is not between"),
        ("a: 0x" + "f" * 60_000, "a number is not between"),
        ("a: " + "[" * 60 + "]" * 60, "nested more than"),
        ("a: " + "1:" * 30_000 + "1", "expected YAML"),
        ("- a\n" * 40_000, "bytes"),
    ],
    ids=lambda text: text[:20],
)
def test_yaml_that_is_more_than_it_seems(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    began = time.process_time()
    with pytest.raises(UserError, match=said):
        read_yaml(tmp_path / "config.yaml")
    assert time.process_time() - began < SECONDS


def test_a_neighbour_that_is_a_bomb_stops_no_run(tmp_path: Path) -> None:
    """A run that begins looks at others of its name."""
    (own := tmp_path / "a-b-s0-00000000").mkdir()
    (own / "config.yaml").write_text("a: 1\n")
    (other := tmp_path / "a-b-s0-11111111").mkdir()
    (other / "config.yaml").write_text(BOMB)
    began = time.process_time()
    assert nearest_run(own).endswith("a-b-s0-11111111 (={}, here absent; a=absent, here 1)")  # nothing of it is read
    with pytest.raises(UserError, match="was edited"):
        check_unedited(other, "a: 1\n")
    assert time.process_time() - began < SECONDS


NAMES = ("../../hooks/evil.sh", "../evil.sh", "{outside}", "sub/evil.sh", "./model.safetensors", "..", ".", "",
         "..\\evil.sh", "C:evil.sh", "a\0b", "x" * 300, "é" * 200, "checksums.json")  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:20])
def test_checksums_name_files_of_their_folder_alone(
    run: Path, configs: dict[str, DictConfig], tmp_path: Path, name: str
) -> None:
    policy, hooks = run / "policy", tmp_path / "hooks"
    hooks.mkdir()
    for place in (hooks, tmp_path, run, policy / "sub"):
        place.mkdir(exist_ok=True)
        (place / "evil.sh").write_text("echo evil")
    outside = tmp_path / "runs" / "hooks"  # where the first name leads to from the policy
    outside.mkdir()
    (outside / "evil.sh").write_text("echo evil")
    name = name.format(outside=outside / "evil.sh")
    sums = read_json(policy / "checksums.json")
    digest = hashlib.sha256(b"echo evil").hexdigest()
    if name == "./model.safetensors":
        digest = sums["model.safetensors"]
    (policy / "checksums.json").write_text(json.dumps({**sums, name: digest}))
    assert "which is no file of the folder" in verify_folder(policy)
    before = everything(tmp_path)
    with pytest.raises(UserError, match="which is no file of the folder"):
        copy_folder(policy, tmp_path / "out" / "deep" / "copy")
    with pytest.raises(UserError, match="which is no file of the folder"):
        folder_digest(policy)
    assert not [path for path in (tmp_path / "out").rglob("*")] and everything(tmp_path) == before


@pytest.mark.parametrize("value", [None, 3, [], {"a": 1}])
def test_checksums_are_texts(run: Path, value: Any) -> None:
    sums = read_json(run / "policy" / "checksums.json")
    (run / "policy" / "checksums.json").write_text(json.dumps({**sums, "config.json": value}))
    assert "config.json" in verify_folder(run / "policy")


def test_files_of_a_policy_are_no_links(run: Path, tmp_path: Path) -> None:
    """A link with the right digest would let others change what was checked, and a copy would hold somebody's file."""
    weights = run / "policy" / "model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    assert "model.safetensors is a link. Put the file itself there" in verify_folder(run / "policy")
    with pytest.raises(UserError, match="is a link"):
        copy_folder(run / "policy", tmp_path / "copy")
    weights.unlink()
    os.mkfifo(weights)
    assert "damaged file model.safetensors" in verify_folder(run / "policy")


def test_links_do_not_lead_what_is_written_elsewhere(run: Path, tmp_path: Path) -> None:
    """A folder may hold links under the names of files that are about to be written."""
    mine = tmp_path / "mine"
    for name in (".report.html.new", "report.html", ".metrics.jsonl.new", ".lock", ".a.lock"):
        mine.write_text("somebody's")
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(mine)
    write_text(run / "report.html", "a page")
    assert (run / "report.html").read_text() == "a page" and not (run / "report.html").is_symlink()
    with pytest.raises(UserError, match="cannot be written"), claim(run, (run / "config.yaml").read_text()):
        pass
    JsonlTracker(run, resume_from_iteration=2).close()
    with pytest.raises(UserError, match=r"\.a\.lock cannot be written"), cells.claimed(run / "a.json"):
        pass
    (run / ".lock").unlink()
    os.mkfifo(run / ".report.html.new")  # which nobody reads: writing into it would wait for ever
    write_text(run / "report.html", "another")
    assert mine.read_text() == "somebody's" and (run / "report.html").read_text() == "another"


@pytest.mark.parametrize("name", ["../../evil", "/evil", "a/b"])
def test_a_run_whose_name_is_a_path_is_refused(run: Path, name: str) -> None:
    """Reports of sweeps are named after their runs, so that such a name would lead out of the folder."""
    changed(run, lambda settings: settings.update(name=name))
    with pytest.raises(UserError, match=r"name is part of a folder's name\. Write it without slashes"):
        report.report_sweep([run])


def test_a_published_table_stays_in_its_folder(run: Path, tmp_path: Path) -> None:
    """Runs in several variants of a game are told apart by their settings in files' names."""
    other = run.with_name("other")
    shutil.copytree(run, other)
    changed(other, lambda settings: settings["env"].update({"/../../evil": "../../x", "split": "a/../b"}))
    with redirect_stdout(io.StringIO()):
        runs = [read_run(run), read_run(other)]
        assert all("/" not in suffix and suffix.isprintable() for suffix in publish.variants(runs))


# --- Data of other types ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["run.json", "evaluation.json", "metrics.jsonl", "timing.jsonl", "config.yaml"])
def test_values_of_other_kinds_are_refused_or_shown(run: Path, name: str) -> None:
    text = (run / name).read_text()
    data = (
        yaml.safe_load(text)
        if name.endswith("yaml")
        else [json.loads(line) for line in text.splitlines()]
        if name.endswith("l")
        else json.loads(text)
    )
    places = list(spots(data))
    (run / "episodes" / "trained.jsonl").unlink()
    (run / "episodes" / "base.jsonl").unlink()
    for number, at in enumerate(places[:: max(len(places) // 12, 1)]):
        for value in (..., VALUES[(7 * number + 3) % len(VALUES)]):
            new = altered(data, at, value)
            if name.endswith("jsonl") and not isinstance(new, list):
                continue
            lines = [json.dumps(line) + "\n" for line in new] if name.endswith("jsonl") else [json.dumps(new)]
            (run / name).write_text("".join(lines))
            read_run_or_refuse(run)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s["env"].update(contexts="/dev/zero"),
        lambda s: s["env"].update(contexts="{pipe}"),
        lambda s: s["env"].update(contexts="a\0b"),
        lambda s: s["env"].update(game=""),
        lambda s: s["eval"].update(env={"split": {"a": 1}}, seed=10**25),
        lambda s: s["eval"].update(cast={"negotiator": []}),
        lambda s: s.update(cast={"captain": {"player": "base"}}),
        lambda s: s["algo"].update(context=10**15),
        lambda s: s["algo"].update(kind="pikl"),
        lambda s: s["model"].update(kind="hf", name="http://localhost/x"),
        lambda s: s["init"].update(learner=["a"]),
        lambda s: s.update(init=[1]),
    ],
    ids=range(12),
)
def test_settings_of_other_kinds_are_refused_or_harmless(
    run: Path, configs: dict[str, DictConfig], change: Callable[[Any], Any]
) -> None:
    os.mkfifo(run.parent.parent / "pipe")
    changed(run, change)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("{pipe}", str(run.parent.parent / "pipe")))
    read_all(run, configs, page=False)


@pytest.mark.parametrize("card", [{"base": "a\0b"}, {"base": "/dev/zero"}, {"game": 3}, {}])
def test_cards_of_policies_of_other_kinds(run: Path, configs: dict[str, DictConfig], card: dict[str, Any]) -> None:
    own = read_json(run / "policy" / "policy.json")
    (run / "policy" / "policy.json").write_text(json.dumps({**own, **card} if card else {}))
    seal(run / "policy")
    read_all(run, configs, page=False)


def test_folders_whose_names_are_no_text(run: Path, configs: dict[str, DictConfig]) -> None:
    named = Path(os.fsdecode(os.fsencode(run) + b"\xff"))
    run.rename(named)
    errors = read_all(named, configs)
    assert all("not UTF-8" in errors[name] for name in ("stages", "page", "evaluate", "play", "crossplay"))
    heard = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with redirect_stdout(heard):
        say(f"a folder: {named}")
    heard.seek(0)
    assert r"\udcff" in heard.read()
