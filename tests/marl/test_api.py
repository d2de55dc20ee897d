"""The Python interface: what it loads, plays, shows and refuses."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import marl
from marl.api import ModelPlayer, Players
from marl.common.errors import UserError
from marl.types import Belief
from tests.marl.episodes import deal_game


def test_players_of_a_run_play_games_that_can_be_looked_at(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    players = marl.load(finished)
    assert set(players) == {"trained", "base"} and players.env["game"] == "dond" and players.run == finished
    episodes = marl.play(players.env, [players["trained"], players["base"]], 3, seed=2)
    assert [sorted(e.players.values()) for e in episodes] == [["base", "trained"]] * 3
    assert len({e.seed for e in episodes}) == 3
    episodes[0].show()
    assert str(episodes[0]) in capsys.readouterr().out
    page = episodes[0]._repr_html_()
    assert page.count("class=&quot;bubble&quot;") == len(episodes[0].turns) and "<script" not in page
    again = marl.play(players.env, [players["trained"], players["base"]], 3, seed=2, concurrency=1)
    assert [[t.text for t in e.turns] for e in again] == [[t.text for t in e.turns] for e in episodes]
    by_role = marl.play(players.env, {"negotiator": players["base"]}, 1)
    assert set(by_role[0].players.values()) == {"base"}


def test_players_are_shown_in_a_line() -> None:
    """A notebook prints what its cell ends with."""
    player = ModelPlayer("base", marl.word_policy(["yes", "no"]), context=32, max_new_tokens=4, style="compact")
    assert repr(player) == "ModelPlayer(name='base', context=32, max_new_tokens=4, style='compact')"
    players = Players({"trained": player, "base": player}, {"game": "dond"}, Path("runs/mine"))
    assert repr(players) == "<players of runs/mine: trained, base>"


def test_scripted_players_need_no_run() -> None:
    (episode,) = marl.play("among_us", "scripted")
    assert set(episode.players.values()) == {"scripted"}
    assert "imposter  scripted" in str(episode)


def test_beliefs_influence_and_credit_are_those_of_the_record() -> None:
    episode = deal_game()
    asked: dict[tuple[str, str], list[Belief]] = {}
    for belief in episode.beliefs:
        asked.setdefault((belief.listener, belief.question.text), []).append(belief)
    curves = marl.beliefs(episode)
    assert curves.keys() == asked.keys() and curves
    for key, series in asked.items():
        for belief, later in zip(series, [*series[1:], None], strict=True):
            end = later.step if later else episode.steps + 1
            assert (curves[key][belief.step : end] == belief.truth).all()
        assert np.isnan(curves[key][: series[0].step]).all()
    moved = np.nansum(np.stack(list(marl.influence(episode).values())), axis=0)
    np.testing.assert_allclose(moved, marl.credit(episode), atol=1e-6)
    assert moved.any()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda run: (run / "config.yaml").unlink(), "is not a run's folder"),
        (lambda run: (run / "run.json").unlink(), "is not the folder of a finished run"),
        (lambda run: shutil.rmtree(run / "policy"), "has no policy"),
        (lambda run: edit(run / "config.yaml", "max_entries", "most_entries"), "another version of this project"),
    ],
)
def test_other_folders_are_refused(damage, said: str, finished: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    shutil.copytree(finished, tmp_path / "copy")
    damage(tmp_path / "copy")
    with pytest.raises(UserError, match=said):
        marl.load(tmp_path / "copy")


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_mistakes_are_one_sentence(finished: Path) -> None:
    for bad, said in (
        (("env.foo=1",), "not a setting"),
        (("seed=0,1",), "several values"),
        (("experiment=among_us_quickstart",), "a sweep of 2 runs"),
        (("model=",), "model="),
    ):
        with pytest.raises(UserError, match=said):
            marl.train(*bad)
    with pytest.raises(UserError, match="no game of this name"):
        marl.play("chess", "scripted")
    with pytest.raises(UserError, match="Give a pair"):
        marl.play("dond", ["scripted"] * 3)
    with pytest.raises(UserError, match="roles"):
        marl.play("dond", {"crewmate": "scripted"})
    with pytest.raises(AttributeError, match="has no attribute"):
        _ = marl.nothing  # type: ignore[attr-defined]
    assert json.loads((finished / "run.json").read_text())["arm"] == "custom"


def test_every_public_name_is_documented() -> None:
    for name in marl.__all__:
        assert getattr(marl, name).__doc__, name
        assert name in dir(marl)
