"""Memory: how many games are played at a time, and what is refused if not even one fits."""

from pathlib import Path

import pytest

from experiments import evaluate, play, train
from experiments.setup.spec import run_spec
from marl.common.errors import UserError
from marl.common.files import read_json
from marl.decoding import memory
from marl.decoding.probes import size_of
from marl.model.loading import load_config
from marl.storage.checkpoint import save_policy
from tests.composing import DOND, configure, run_folder
from tests.marl.models import CHATML, hf_tokenizer, random_lm, save, tiny_policy

SLOT = 1 * 2 * 1 * 8 * (1024 + 1) * 4  # bytes: layers, keys and values, heads, width, tokens and one of padding


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run, as far as a player needs it."""
    policy = tiny_policy(context=1024)
    save_policy(tmp_path / "bases" / "base", policy, {"game": "dond"})
    save_policy(tmp_path / "run" / "policy", policy, {"game": "dond", "base": str(tmp_path / "bases" / "base")})
    return tmp_path / "run"


def without_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the memory of passes to 0, so that caches and models alone count."""
    monkeypatch.setattr(memory, "playing_bytes", lambda *_, **__: 0)
    monkeypatch.setattr("experiments.setup.memory.learning_bytes", lambda *_, **__: 0)


def test_what_does_not_fit_into_memory_is_refused_before_the_base_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = configure("train", *DOND, f"runs={tmp_path / 'runs'}", f"cache={tmp_path / 'bases'}")
    there = 5 * size_of(run_spec(cfg).model.lm_config(), 1024).weights
    monkeypatch.setattr(memory, "free_memory", lambda device: there)
    with pytest.raises(
        UserError, match=r"even algo\.concurrency=1 needs .* a pass .* smaller model\.context than 1024, a smaller algo"
    ):
        train.main(cfg)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_pages")
def test_a_run_plays_as_many_games_at_a_time_as_fit_and_notes_how_many(
    bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = ["algo.iterations=1", "eval.every=0", "eval.games=4", f"runs={tmp_path}", f"cache={bases}"]
    cfg = configure("train", *DOND, *one)
    # a base, a learner with its gradients and moments, caches of two seats in training and in evaluation
    there = 5 * size_of(run_spec(cfg).model.lm_config(), 1024).weights + 2 * 3 * 2 * SLOT
    without_passes(monkeypatch)
    monkeypatch.setattr(memory, "free_memory", lambda device: there)
    lowered = train.main(cfg)
    assert lowered == run_folder(cfg)
    assert "cache: 12 slots of 64.1 KiB" in (said := capsys.readouterr().out)
    assert "algo.concurrency lowered from 4 to 3: " in said
    assert [made["algo.concurrency"] for made in read_json(lowered / "run.json")["made_with"]] == [3]
    monkeypatch.setattr(memory, "free_memory", lambda device: 1 << 40)
    three = train.main(configure("train", *DOND, *one, "algo.concurrency=3"))
    assert three != lowered and (three / "metrics.jsonl").read_text() == (lowered / "metrics.jsonl").read_text()
    evaluations = [read_json(each / "evaluation.json")["by_game"] for each in (three, lowered)]
    assert evaluations[0] == evaluations[1]


@pytest.mark.slow
@pytest.mark.usefixtures("no_pages")
def test_games_that_are_not_there_change_no_bit(bases: Path, tmp_path: Path) -> None:
    """The cache has room for the games that are played, and not for all that could be played at a time."""
    few = ["algo.iterations=1", "eval.every=0", "eval.games=4", "eval.final_games=3", f"runs={tmp_path}"]
    runs = [train.main(configure("train", *DOND, *few, f"cache={bases}", f"algo.concurrency={n}")) for n in (6, 99)]
    assert runs[0] != runs[1]  # the name says what was asked for
    assert len({(run / "metrics.jsonl").read_text() for run in runs}) == 1


def test_a_context_that_no_model_holds_is_refused_before_the_base_is_trained(tmp_path: Path) -> None:
    save(tmp_path / "model", random_lm("qwen3", 300, context=512), hf_tokenizer(CHATML, single_digits=True))
    cfg = configure("train", 
        "model=hf", f"model.name={tmp_path / 'model'}", "base=scripted", "model.context=1024", "progress=false",
        f"runs={tmp_path / 'runs'}", f"cache={tmp_path / 'bases'}",
    )  # fmt: skip
    with pytest.raises(
        UserError, match=r"model\.context=1024 is more than the model can read \(512 tokens\): lower it"
    ):
        train.main(cfg)
    assert not (tmp_path / "bases").exists()


def test_players_that_do_not_fit_are_refused_before_they_are_loaded(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 2 * SLOT)
    for main, given, command in (
        (evaluate.main, f"players=[{run},base]", "evaluate"), (play.main, f"opponent={run}", "play")
    ):  # fmt: skip
        with pytest.raises(UserError, match=r"^Not enough memory: even concurrency=1 needs"):
            main(configure(command, given, f"out={tmp_path}"))


def test_few_games_need_room_for_few(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory is needed for the games that are played, not for the default concurrency of 256. Four games take 16 slots;
    of five games, four are played at a time."""
    room = [f"players=[{run},base]", f"out={tmp_path}", "progress=false", "threads=1", "env.max_entries=2"]
    weights = 2 * size_of(load_config(str(run / "policy")), 1024).weights
    monkeypatch.setattr(memory, "free_memory", lambda device: weights + 2 * 2 * 4 * 2 * SLOT)
    without_passes(monkeypatch)
    evaluate.main(configure("evaluate", *room, "games=4"))
    assert "16 slots" in (said := capsys.readouterr().out) and "lowered" not in said
    evaluate.main(configure("evaluate", *room, "games=5", "concurrency=9"))
    found = read_json(tmp_path / "evaluation.json")["about"]
    assert (found["games"], found["concurrency"]) == (5, 4)
    assert "16 slots" in (said := capsys.readouterr().out) and "; concurrency lowered from 5 to 4: " in said
