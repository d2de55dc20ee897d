"""Rules of Among Us in situations made by hand: the start, moving, killing."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from envs import among_us_v0 as among_us
from envs.among_us.state import NAMES
from envs.core import TurnKind
from tests.envs.among_us.table import (
    FAR,
    Table,
    scattered,
)

# --- The start --------------------------------------------------------------------------------------------------------


def test_the_first_observation_tells_players_of_themselves_alone() -> None:
    table = Table({"tasks": (((1, 1), (0, 0)), *FAR[1:])})
    assert table.text("red") == (
        " grid 2 2 imposters 1 players red blue green yellow orange you red crewmate tasks bridge garden"
        " at bridge blue green yellow orange task"
    )
    assert table.text("orange") == (
        " grid 2 2 imposters 1 players red blue green yellow orange you orange imposter"
        " at bridge red blue green yellow cooldown 6"
    )
    assert table.options("red") == {"go_south", "go_east", "wait", "do_task"}
    assert table.options("blue") == table.options("orange") == {"go_south", "go_east", "wait"}
    assert {a: info["role"] for a, info in table.infos.items()} == table.env.facts["roles"]
    assert table.info("orange")["role"] == "imposter"


def test_names_roles_tasks_and_layouts_are_drawn_afresh() -> None:
    env = among_us.parallel_env(layouts=[[1, 3], [2, 2], [2, 3]], tasks_range=[3, 5])
    layouts, counts, names, imposters = Counter[Any](), Counter[int](), Counter[str](), Counter[str]()
    for seed in range(300):
        env.reset(seed=seed)
        facts = env.facts
        layouts[facts["width"], facts["height"]] += 1
        names[facts["names"]["player_0"]] += 1
        imposters[facts["imposters"][0]] += 1
        own = {len(t) for agent, t in facts["tasks"].items() if facts["roles"][agent] == "crewmate"}
        assert len(own) == 1
        counts[own.pop()] += 1
        assert all(
            0 <= x < facts["width"] and 0 <= y < facts["height"] for rooms in facts["tasks"].values() for x, y in rooms
        )
    assert set(layouts) == {(1, 3), (2, 2), (2, 3)} and set(counts) == {3, 4, 5} and set(names) == set(NAMES)
    for counter, kinds in ((layouts, 3), (counts, 3), (names, 7), (imposters, 5)):
        spread = 5 * math.sqrt(300 / kinds * (1 - 1 / kinds))
        assert all(abs(n - 300 / kinds) < spread for n in counter.values()), counter


def test_reset_options_fix_what_they_name_and_leave_the_rest_as_drawn() -> None:
    env = among_us.parallel_env()
    env.reset(seed=5)
    drawn = env.facts
    env.reset(seed=5, options={"unknown": 1})
    assert env.facts == drawn
    fixed = ("Pink", "purple", "Orange", "Yellow", "Green")
    env.reset(seed=5, options={"imposters": (2,), "names": fixed})
    assert list(env.facts["names"].values()) == ["Pink", "Purple", "Orange", "Yellow", "Green"]
    assert env.facts["imposters"] == ("player_2",)
    both = [a for a in env.possible_agents if a not in ("player_2", drawn["imposters"][0])]
    assert {a: env.facts["tasks"][a] for a in both} == {a: drawn["tasks"][a] for a in both}
    env.reset(seed=5, options={"layout": (1, 4)})
    assert (env.facts["width"], env.facts["height"]) == (1, 4)


@pytest.mark.parametrize(
    "options",
    [
        {"imposters": (1, 1)}, {"imposters": (2.0,)}, {"imposters": (5,)}, {"imposters": 2}, {"names": ("Red",)},
        {"names": ("Red", "Red", "Blue", "Green", "Pink")}, {"names": ("Red", "Black", "Blue", "Green", "Pink")},
        {"layout": (1, 1)}, {"layout": (9, 1)}, {"tasks": ((),) * 5}, {"tasks": (((0, 0),),)},
        {"tasks": (((2, 0),),) * 5}, {"tasks": ((0, 0),) * 5},
    ],
)  # fmt: skip
def test_impossible_reset_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        among_us.parallel_env().reset(seed=0, options=options)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("players", 8), ("players", True), ("imposters", 3), ("tasks", 11), ("tasks", 2.5), ("width", 0),
        ("height", "2"), ("walk_steps", 0), ("cooldown", -1), ("messages_each", -1), ("message_words", 0),
        ("layouts", [[1, 1]]), ("layouts", [[2, 9]]), ("layouts", 3), ("layouts", [[2, 2.0]]), ("tasks_range", [4]),
        ("tasks_range", [5, 3]), ("tasks_range", [0, 3]), ("candidates", "everyone"), ("imposters_report", 1),
        ("recall", "yes"), ("shaping", "much"), ("loser_reward", float("nan")), ("style", "verse"),
        ("render_mode", "human"),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused_by_name(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{setting} must be "):
        among_us.parallel_env(**{setting: value})


def test_settings_that_make_no_game_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^width and height must not both be 1"):
        among_us.parallel_env(width=1, height=1)
    with pytest.raises(ValueError, match=r"^imposters must be fewer than crewmates: at most 1 of 4 players, got 2"):
        among_us.parallel_env(players=4, imposters=2)
    assert among_us.parallel_env(width=1, height=2, players=7, imposters=3).rules.imposters == 3
    with pytest.raises(TypeError, match="playres"):
        among_us.parallel_env(playres=5)


# --- Moving -----------------------------------------------------------------------------------------------------------


def test_walking_takes_three_steps_and_is_seen_from_both_rooms() -> None:
    table = Table(reprompt=2)
    table(red="go_south", blue="go_south")
    assert (table.turn("red"), table.text("red")) == (TurnKind.WAIT, "")
    assert (
        table.text("green") == " at bridge yellow orange out red lab out blue lab"
    )  # the sight changed: asked at once
    table()
    assert table.text("red") == ""
    table()
    assert table.text("red") == " at lab blue"
    assert table.text("green") == " at bridge yellow orange"
    table(green="go_south")
    assert table.text("red") == " at lab blue in green bridge"
    assert table.options("red") == {"go_north", "go_east", "wait"}


def test_a_task_takes_three_steps_in_which_nothing_is_seen() -> None:
    table = Table({"tasks": (((0, 0), (0, 0)), *FAR[1:])})
    assert table.text("red").endswith(" task task")
    table(red="do_task", blue="go_south")
    assert (table.turn("red"), table.text("red")) == (TurnKind.WAIT, "")
    assert " at bridge red green" in table.text("yellow")  # it looks like being there
    table(green="go_south")
    assert table.text("red") == ""
    table(yellow="go_east")
    assert table.text("red") == " done at bridge orange out green lab out yellow galley task"
    table(red="do_task").wait(2)
    assert table.text("red") == " done at bridge orange"
    assert "do_task" not in table.options("red")


# --- Killing ----------------------------------------------------------------------------------------------------------


def test_a_kill_is_noticed_by_who_is_there_and_not_busy_with_a_task() -> None:
    here = (((0, 0),), ((0, 0),), *FAR[2:])
    table = Table({"tasks": here}, cooldown=3)
    table(yellow="go_south").wait(2)
    table(red="do_task", yellow="go_north", green="go_east", orange="kill_blue")
    assert " killer orange victim blue" not in table.text("red")  # busy
    assert table.text("yellow") == " killer orange victim blue"  # on its way in: in the doorway
    assert table.text("green") == ""  # on its way out: gone
    assert table.text("blue") == " killer orange victim you"
    assert table.text("orange") == " at bridge red in yellow lab out green galley body blue cooldown 3"
    assert not any("kill" in option for option in table.options("orange"))
    table.wait(2)
    assert table.text("red") == " done at bridge yellow orange body blue"
    assert table.options("red") == {"go_south", "go_east", "wait", "report_blue"}
    assert table.info("red")["error"] == ""


def test_actions_of_the_dead_and_of_walkers_are_ignored() -> None:
    table = scattered()
    table(orange="kill_red")
    assert table.text("red") == " killer orange victim you"
    before = table.env.state()[0].copy()
    for reply in ("go_south", "wait", "kill_orange", "report_red"):
        table(red=reply)
        assert (table.turn("red"), table.text("red"), table.options("red")) == (TurnKind.WAIT, "", set())
        assert table.info("red")["error"] == table.info("red")["entry"] == ""
    assert (table.env.state()[0] == before).all()
    assert "player_0" in table.env.agents
    table = Table()
    table(red="go_south")
    table(red="go_east")()  # on its way
    assert table.info("red")["error"] == table.info("red")["entry"] == "" and table.text("red") == " at lab"


def test_a_victim_that_walks_off_in_the_same_step_dies_in_its_killers_room() -> None:
    table = scattered()
    table(orange="kill_red", red="go_south")
    assert table.text("red") == " killer orange victim you"
    assert table.text("orange") == " at bridge body red cooldown 6"
    assert tuple(table.env.state()[0, 3:5]) == (0, 0)
    assert "in red bridge" in table.text("yellow")  # as if nobody had been killed elsewhere
    assert "red" not in table.wait(3).text("yellow")


def test_a_walker_can_be_killed_from_the_room_it_leaves_and_from_the_one_it_enters() -> None:
    table = Table(cooldown=1)
    table(red="go_south")
    assert "kill_red" in table.options("orange")  # leaving
    table = Table(cooldown=1)
    table(orange="go_south").wait(2)
    table(red="go_south").wait(1)
    assert "kill_red" in table.options("orange")  # entering
    table(orange="kill_red")
    assert table.text("red") == " killer orange victim you"
    assert table.text("orange").startswith(" at lab body red")


def test_a_victims_report_in_the_same_step_still_counts() -> None:
    table = scattered()
    table(orange="kill_red", yellow="go_north").wait(2)
    table.wait(4)  # the cooldown runs down; yellow waits by the body
    table(orange="kill_yellow", yellow="report_red", blue="go_west")
    assert table.text("yellow") == " killer orange victim you"
    assert table.text("green").startswith(" meeting yellow found red at bridge living blue green orange")
    assert table.env.facts["names"]["player_3"] == "Yellow"
    table.talk()
    assert table.turn("yellow") == TurnKind.WAIT
    assert table.options("green") == {"blue", "green", "orange", "skip"}
