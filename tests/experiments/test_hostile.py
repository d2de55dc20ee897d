"""Bad input is taken, put right or refused in one line, and damages nothing. `make hostile` does more of it."""

import gzip
import io
import json
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from experiments import evaluate, play, train
from experiments.setup import publish
from experiments.studies import crossplay
from marl.common.errors import LONGEST_ERROR, MOST, UserError, check_count
from marl.report.transcripts import episode_to_json, read_episodes, render_text
from marl.report.views import game_view
from tests.composing import configure
from tests.hostile import Kind, hostile, try_kind
from tests.hostile_files import try_files
from tests.hostile_inputs import LACKING, Accepted, no_work
from tests.hostile_values import VALUES, altered, spots
from tests.marl.episodes import aborted_game, deal_game, meeting_game


def test_no_input_breaks_anything(tmp_path: Path) -> None:
    results = dict(hostile(inputs=128, seed=0, folder=tmp_path))
    assert {name: result.broken for name, result in results.items() if result.broken} == {}
    tried = sum(result.outcomes.total() for result in results.values())
    assert len(results) == 13 and tried >= 128
    refusing = [name for name, result in results.items() if not name.startswith("replies")]
    assert all(any("refused" in outcome for outcome in results[name].outcomes) for name in refusing)
    assert all(results[name].outcomes.keys() & {"corrected", LACKING} for name in results.keys() - set(refusing))


def test_an_input_that_breaks_something_is_shown(tmp_path: Path) -> None:
    def break_at_seven(number: int) -> str:
        assert number < 7, "too much"
        return "taken"

    result = try_kind(Kind(1.0, st.integers(0, 1000), break_at_seven), count=200, seed=0)
    assert "made=7" in result.broken and "too much" in result.broken  # the smallest one


@pytest.mark.parametrize("refuses", [True, False])
def test_files_that_a_reader_changes_are_noticed(tmp_path: Path, refuses: bool) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "a").write_text("whole")

    def read(folder: Path) -> str:
        (folder / "a").write_text("changed")
        if refuses:
            raise UserError("no")
        return "taken"

    with pytest.raises(AssertionError, match="the files were changed"):
        try_files(tmp_path / "good", tmp_path, read, [("a", "cut", 0.5, b"")])


SECONDS = 5.0  # of the processor, for one reader


@pytest.fixture(scope="module")
def configs() -> dict[str, DictConfig]:
    """Each command's settings."""
    named = {"evaluate": "players=[random]", "play": "opponent=random", "crossplay": "players=[random,scripted]"}
    return {
        "train": configure("train", "experiment=dond_quickstart", "runs=runs", "progress=false"),
        **{name: configure(name, players) for name, players in named.items()},
    }


@pytest.mark.parametrize("game", [deal_game, aborted_game, meeting_game], ids=lambda game: game.__name__)
def test_odd_transcripts_are_refused_or_shown(tmp_path: Path, game: Callable[[], Any]) -> None:
    whole, path = episode_to_json(game()), tmp_path / "trained.jsonl"
    refused = 0
    for number, at in enumerate(spots(whole)):
        for value in (..., *VALUES[number % 5 :: 5]):
            path.write_text(json.dumps(altered(whole, at, value)) + "\n")
            try:
                for transcript in read_episodes(path):
                    assert render_text(transcript)
                    game_view(transcript, "trained")
            except UserError as error:
                refused += 1
                assert str(error).startswith(f"{path}, line 1"), error
    assert refused > 50
    path.write_text(json.dumps(whole) + "\n")
    assert read_episodes(path) == [whole]


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t["facts"].update(counts=[10**6] * 3),
        lambda t: t["facts"].update(counts=[1.5, 1, 3]),
        lambda t: t["beliefs"][0].update(question=10**12),
        lambda t: t.update(players={**t["players"], "player_0": "x" * 10**6}),
        lambda t: t.update(turns=t["turns"] * 500, beliefs=t["beliefs"] * 500),
    ],
)
def test_transcripts_that_would_take_for_ever_are_refused(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    transcript = episode_to_json(deal_game())
    change(transcript)
    (tmp_path / "a.jsonl").write_text(json.dumps(transcript) + "\n")
    began = time.process_time()
    with pytest.raises(UserError, match=r"a\.jsonl, line 1 is damaged"):
        read_episodes(tmp_path / "a.jsonl")
    assert time.process_time() - began < SECONDS


def test_steps_that_are_far_apart_take_no_longer(tmp_path: Path) -> None:
    transcript = episode_to_json(meeting_game())
    last = max(turn["step"] for turn in transcript["turns"])
    for turn in transcript["turns"]:
        turn["step"] = 10**12 if turn["step"] == last else turn["step"]
    (tmp_path / "a.jsonl").write_text(json.dumps(transcript) + "\n")
    began = time.process_time()
    assert read_episodes(tmp_path / "a.jsonl") == [transcript]
    assert time.process_time() - began < SECONDS


# --- Tables -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["table.csv", "curves.csv.gz", "published.csv"])
@pytest.mark.parametrize(
    "text",
    ["", "a,b\n1\n", "{head}\n", "{head}\nfull,1\n", "{head}\n" + ",".join(["nan"] * 7), "{head}\n" + "inf," * 7,
     "{head}\nfull,game/win_rate/crewmates,1e308,-1e308,1e308," + "9" * 4000 + ",1\n", "\xff\0", '"' + "x" * 200_000],
    ids=range(9),
)  # fmt: skip
def test_tables_of_others_are_drawn_or_refused(tmp_path: Path, name: str, text: str) -> None:
    tables = {
        "table.csv": "arm,metric,mean,low,high,seeds,games\nfull,game/win_rate/crewmates,0.5,0.4,0.6,2,10\n",
        "curves.csv.gz": "arm,seed,phase,iteration,games,game/win_rate/crewmates\nfull,0,eval,1,8,0.5\n",
        "published.csv": "arm,mean,low,high,source\nfull,0.5,0.4,0.6,a\n",
    }
    head = tables[name].partition("\n")[0]
    for file, own in {**tables, name: text.replace("{head}", head)}.items():
        data = own.encode("latin-1")
        (tmp_path / file).write_bytes(gzip.compress(data) if file.endswith(".gz") and len(data) < 9000 else data)
    try:
        publish.draw(tmp_path, "", tmp_path)
    except UserError as error:
        assert len(str(error)) <= LONGEST_ERROR + 3


# --- Numbers and names on the command line ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("command", "setting", "value"),
    [
        ("train", "eval.final_games", 10**13), ("train", "eval.games", 10**9), ("train", "algo.iterations", 2**70),
        ("train", "base.games", 10**13), ("train", "seed", 10**400), ("train", "algo.update.minibatches", 10**10),
        ("train", "env.max_entries", 10**10), ("train", "base.lessons", [{"steps": 10**12}]),
        ("train", "seeds.games", 2**80), ("train", "checkpoint.keep", 10**10),
        ("evaluate", "games", 10**13), ("evaluate", "concurrency", 10**9), ("play", "games", 10**13),
        ("crossplay", "games", 10**13),
    ],
)  # fmt: skip
def test_whole_numbers_have_an_end(
    configs: dict[str, DictConfig], tmp_path: Path, command: str, setting: str, value: Any
) -> None:
    cfg = (
        configure("train", "experiment=dond_quickstart", f"runs={tmp_path / 'runs'}", "progress=false")
        if command == "train"
        else configs[command].copy()
    )
    cfg.runs = str(tmp_path / "runs")
    OmegaConf.update(cfg, setting, value)
    main = {"train": train.main, "evaluate": evaluate.main, "play": play.main, "crossplay": crossplay.main}[command]
    with pytest.raises(UserError, match=rf"^{setting}.*must be at most [\d,]+$"):
        main(cfg)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("value", [1e13, -1, 0, 1.5, True, None])
def test_games_are_counted_in_whole_numbers(configs: dict[str, DictConfig], value: Any) -> None:
    for name, main in (("evaluate", evaluate.main), ("play", play.main), ("crossplay", crossplay.main)):
        cfg = configs[name].copy()
        cfg.games = value
        with pytest.raises(UserError, match=f"games={value}: must be".replace("+", r"\+")):
            main(cfg)


def test_large_numbers_that_make_sense_are_taken(configs: dict[str, DictConfig]) -> None:
    cfg = configs["evaluate"].copy()
    check_count(MOST, "games")
    cfg.seed, cfg.games, cfg.chat.tokens = 2**63 - 1, 10_000, 10**12
    with no_work(), pytest.raises(Accepted), redirect_stdout(io.StringIO()):
        evaluate.main(cfg)


@pytest.mark.parametrize(
    ("setting", "value"), [("name", "a\udcff"), ("arm", "\ud800"), ("runs", "r\udcff"), ("cast", {"\ud800": {}})]
)
def test_names_that_nobody_can_write_are_refused(
    configs: dict[str, DictConfig], tmp_path: Path, setting: str, value: Any
) -> None:
    """Python reads bytes of the command line that are no UTF-8 as halves of surrogate pairs."""
    cfg = configs["train"].copy()
    cfg.runs = str(tmp_path / "runs")
    OmegaConf.update(cfg, setting, value, merge=False)
    with pytest.raises(UserError, match=f"^{setting}=.*not UTF-8") as refused:
        train.main(cfg)
    assert str(refused.value).encode()


def test_long_errors_are_cut() -> None:
    assert len(str(UserError("x" * 10**6))) == LONGEST_ERROR + 3
    assert str(UserError("a\ud800")) == r"a\ud800"
