"""Programs play a study through its pages, in all games; what they find is what games without pages have."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from envs.core import Style
from experiments import train, web_export, web_simulate
from marl.agents.base import Agent
from marl.agents.scripted import diplomacy
from marl.agents.scripted.dond import make_player
from marl.agents.text import TextAgent
from marl.report.transcripts import read_episodes
from marl.rollout.games import env_maker, scripted
from marl.rollout.rollout import rollout
from marl.rollout.seeds import Game, draw_games
from tests.composing import DOND, configure
from tests.experiments.webapp.test_study import rows, written


def direct(opponent: str, count: int) -> list[float]:
    """The partner's points of a fair negotiator's games with this opponent, played without any page."""
    person = TextAgent("person", lambda seed, role: make_player("fair", seed), style=Style.NATURAL)
    other = scripted("dond", opponent)
    other.style = Style.NATURAL
    seat: dict[int, str] = {}

    def cast(game: Game, env: Any) -> Mapping[str, Agent]:
        seat[game.seed] = env.possible_agents[game.seed % 2]
        return {**dict.fromkeys(env.possible_agents, other), seat[game.seed]: person}

    settings = {**web_settings(), "objective": 0.0, "style": "natural"}
    episodes = rollout(list(draw_games(0, count=count)), cast, env_maker(settings), 16)
    return [sum(v for a, v in e.outcome["points"].items() if a != seat[e.seed]) for e in episodes]


def web_settings() -> dict[str, Any]:
    return dict(configure("web").games.dond.env)


@pytest.mark.slow
def test_simulations_recover_a_known_difference(tmp_path: Path) -> None:
    """200 games by programs through the pages, three times: the export's interval leaves out 0, and holds the
    difference between two opponents that 2000 games without pages have. 95 % intervals miss it in one of three by
    chance, hardly in two."""
    known = float(np.mean(direct("generous", 1000)) - np.mean(direct("stubborn", 1000)))
    assert known < -1
    intervals = [simulated_difference(tmp_path / str(number)) for number in range(3)]
    assert all(high < 0 for _, high in intervals), intervals
    assert sum(low < known < high for low, high in intervals) >= 2, (intervals, known)


def simulated_difference(folder: Path) -> tuple[float, float]:
    """The interval of what partners get of soft rather than hard opponents, of a simulation that is written out."""
    folder.mkdir()
    written(folder, games=20)
    settings = (f"runs={folder}", f"study={folder}/small.yaml")
    web_simulate.main(configure("web_simulate", *settings, "plays=200", "people=10", "device=cpu"))
    export = web_export.main(configure("web_export", *settings, "simulated=true"))
    assert all(path.name.startswith("simulated_") for path in export.iterdir())
    assert b"human" not in b"".join(path.read_bytes() for path in export.iterdir())
    games = rows(export / "simulated_games.csv")
    assert Counter(g["condition"] for g in games) == {"hard": 100, "soft": 100}
    assert {g["state"] for g in games} == {"over"} and {g["played_by"] for g in games} == {"simulated"}
    found = {(r["arm"], r["metric"]): r for r in rows(export / "simulated_table.csv")}
    row = found["alone/soft - hard", "partner_points"]
    assert (row["people"], row["games"]) == ("10", "200")
    return float(row["low"]), float(row["high"])


def test_programs_play_among_us_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A won game counts as one point. The page tells the program its role, and it plays that role."""
    quick = {"max_steps": 60, "cooldown": 1, "messages_each": 1}
    conditions = {seat: {"opponent": "careful", "seat": seat} for seat in ("crewmate", "imposter")}
    written(tmp_path, parts={"one": {"game": "among_us", "env": quick, "conditions": conditions}})
    settings = (f"runs={tmp_path}", f"study={tmp_path}/small.yaml")
    web_simulate.main(configure("web_simulate", *settings, "plays=2", "people=1", "player=careful", "device=cpu"))
    assert f"web_export study={tmp_path}/small.yaml simulated=true runs={tmp_path}\n" in capsys.readouterr().out
    export = web_export.main(configure("web_export", *settings, "simulated=true"))
    games = rows(export / "simulated_games.csv")
    assert {g["condition"] for g in games} == {"crewmate", "imposter"} and {g["state"] for g in games} == {"over"}
    for game in games:
        assert float(game["score"]) == (game["won"] == "True")
        assert float(game["pay"]) == pytest.approx(0.1 + 0.2 * (game["won"] == "True"))


def test_programs_play_diplomacy_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs read the messages that are written to them. A share of the centres when the years are over is a score,
    but no won game."""
    pytest.importorskip("diplomacy", reason="needs pip install -e '.[diplomacy]'")
    quick = {"years": 1, "press": "private", "win_centres": 7}
    conditions = {"careful": {"opponent": "careful"}}
    written(tmp_path, parts={"one": {"game": "diplomacy", "env": quick, "conditions": conditions}})
    settings = (f"runs={tmp_path}", f"study={tmp_path}/small.yaml")
    observed: list[str] = []

    def make_player(name: str, seed: int, role: str) -> Any:
        player = diplomacy.make_player(name, seed, role)

        def reply(text: str, options: tuple[str, ...]) -> str:
            observed.append(text)
            return player.reply(text, options)

        return SimpleNamespace(reply=reply)

    monkeypatch.setattr(web_simulate, "scripts_module", lambda game: SimpleNamespace(make_player=make_player))
    web_simulate.main(configure("web_simulate", *settings, "plays=2", "people=1", "player=careful", "device=cpu"))
    export = web_export.main(configure("web_export", *settings, "simulated=true"))
    games, read = rows(export / "simulated_games.csv"), "".join(observed)
    heard = []
    for game in read_episodes(export / "simulated_games.jsonl"):
        powers = game["facts"]["powers"]
        own = next(powers[agent] for agent, name in game["players"].items() if name == "simulated")
        addressee = ""
        for turn in game["turns"]:
            if turn["message"] and addressee == own:
                heard.append(f"{powers[turn['agent']]} to you: {turn['message']}\n")
            addressee = turn["text"]
    assert heard and all(line in read for line in heard), (heard, read)
    assert all(0 < float(game["score"]) < 1 and game["how"] == "years" for game in games)
    assert {game["won"] for game in games} == {"False"}


@pytest.mark.slow
def test_the_shipped_study_plays_with_checkpoints_along_filtered_cloning(tmp_path: Path) -> None:
    """Small runs of filtered cloning with the names and checkpoints that conf/study_page/dond_humans.yaml expects."""
    for objective in ("1.0", "0.0"):
        train.main(
            configure(
                "train", *DOND, "algo=filtered_bc", "name=dond_filtered_bc", "arm=filtered_bc", "algo.games=4",
                "algo.iterations=12", "checkpoint.every=3", "checkpoint.keep=4", "eval.every=12", "reward=default",
                f"env.objective={objective}", f"runs={tmp_path}", "algo.max_new_tokens=8", "algo.concurrency=4",
            )
        )  # fmt: skip
    settings = (f"runs={tmp_path}", "study=dond_humans")
    small = ("plays=20", "people=2", "device=cpu", "games.dond.env.max_entries=6")
    web_simulate.main(configure("web_simulate", *settings, *small))
    export = web_export.main(configure("web_export", *settings, "simulated=true"))
    games = rows(export / "simulated_games.csv")
    assert Counter(g["part"] for g in games) == {"cooperative": 10, "semi_competitive": 10}
    assert set(Counter((g["part"], g["condition"]) for g in games).values()) == {2}
    played = {(g["condition"], g["opponent"].partition("@")[2]) for g in games}
    assert played == {(f"iteration_{n}", str(n)) for n in (0, 3, 6, 9, 12)}
    names = {tuple(sorted(t["players"].values())) for t in read_episodes(export / "simulated_games.jsonl")}
    assert len(names) == 10 and not any("human" in each for each in names)
