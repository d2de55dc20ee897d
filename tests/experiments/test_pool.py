"""A run against its past selves: it ends the same if it was stopped, and is evaluated against current players."""

from pathlib import Path

import pytest

from experiments import train
from experiments.setup.entrants import base_beside
from experiments.setup.players import called_in_games, policy_folder, run_of, style_of
from marl.common.errors import UserError
from marl.common.files import read_json
from marl.report.transcripts import read_episodes
from marl.storage.checkpoint import newest_checkpoint, read_state
from tests.composing import DOND, configure, run_folder
from tests.runs import stop
from tests.torture import contents

pytestmark = pytest.mark.usefixtures("no_pages")
POOL = ["cast.negotiator.partners=1", "cast.negotiator.pool=1", "cast.negotiator.pick=wins"]


def test_past_selves_of_several_processes_are_refused_before_a_base_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"cast\.negotiator\.pool=1: past selves play in one process only"):
        train.main(configure("train", *DOND, *POOL, f"cache={tmp_path / 'bases'}", f"runs={tmp_path / 'runs'}"))
    assert not list(tmp_path.iterdir())


def test_a_run_against_past_selves_goes_on_as_if_never_stopped(bases: Path, tmp_path: Path) -> None:
    whole, stopped = (
        configure("train", *DOND, *POOL, "algo.iterations=3", "eval.every=2", f"cache={bases}", f"runs={tmp_path / n}")
        for n in ("whole", "stopped")
    )
    train.main(whole)
    stop(stopped, 2)
    train.main(stopped)
    run = run_folder(whole)
    assert contents(run_folder(stopped)) == contents(run)
    assert sorted(path.name for path in (run / "pool").iterdir()) == [f"learner-00000{n}" for n in range(3)]
    newest = newest_checkpoint(run / "checkpoints")
    assert newest is not None
    memory = read_state(newest)["memory"]["past_learner"]
    assert sum(n for name, n in memory.items() if name.endswith("/games")) == 3 * whole.algo.games
    for transcript in read_episodes(run / "episodes" / "trained.jsonl"):
        assert set(transcript["players"].values()) == {"trained"}
    assert read_json(run / "run.json")["figures"]["trained"]
    past = str(run / "pool/learner-000002")  # as a player of another evaluation it reads what its run read
    assert run_of(past) == run and called_in_games(past) == f"{run.name}/pool/learner-000002"
    assert style_of(policy_folder(past), whole.env) == "compact"
    assert base_beside(past, "dond") == base_beside(str(run), "dond") is not None
