"""Grid Among Us: every rule in a situation made by hand, leaks by changing one hidden fact, the environment's contract.

`python -m tests.envs.test_among_us` writes the golden playthroughs anew, to be read before they are committed.
"""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pettingzoo.test import api_test, parallel_api_test, parallel_seed_test, seed_test

from envs import among_us_v0 as among_us
from envs.among_us import environment as among_us_environment
from envs.among_us import pictures as among_us_pictures
from envs.among_us import reading as among_us_reading
from envs.among_us import rules as among_us_rules
from envs.among_us import state as among_us_state
from envs.among_us import texts as among_us_texts
from envs.among_us.state import (
    NAMES,
    Act,
    Cut,
    Done,
    Ending,
    Event,
    Intro,
    Killed,
    Look,
    Meeting,
    Recall,
    Refused,
    Role,
    Said,
    SpeakNow,
    Tally,
    VoteNow,
)
from envs.core import CHARSET, END, Question, Style, TurnKind

GOLDEN = Path(__file__).parent / "golden_among_us"
STYLES = ("natural", "compact")
FIVE = ("Red", "Blue", "Green", "Yellow", "Orange")
FAR = (((1, 1),) * 2,) * 5  # everybody's tasks: two in the room that is farthest from the start
START: dict[str, Any] = {"names": FIVE, "imposters": (4,), "tasks": FAR}
NATURAL = {
    among_us_texts.OPTION[Style.COMPACT][x]: among_us_texts.OPTION[Style.NATURAL][x] for x in among_us_texts.ALL_ACTIONS
}
COMPACT = {natural: compact for compact, natural in NATURAL.items()}


class Table:
    """A 2x2 game in which seats are addressed by the lower-case names of `FIVE`; Orange is the imposter.

    Calling it plays one step. Whoever must act and isn't named waits, says nothing, or skips. Other than by default,
    who waits is asked again after each step, and tasks take three steps.
    """

    def __init__(self, start: dict[str, Any] | None = None, seed: int = 0, **rules: Any) -> None:
        self.env = among_us.parallel_env(**{"reprompt": 1, "task_steps": 3, **rules})
        self.observations, self.infos = self.env.reset(seed=seed, options={**START, **(start or {})})
        self.rewards = dict.fromkeys(self.env.agents, 0.0)
        self.total = Counter[str]()
        self.ended = self.cut_off = False

    def agent(self, name: str) -> str:
        return next(a for a, own in self.env.facts["names"].items() if own.lower() == name)

    def __call__(self, **replies: str) -> Table:
        given = {self.agent(name): reply for name, reply in replies.items()}
        if self.env.style is Style.NATURAL:
            given = {agent: NATURAL.get(reply, reply) for agent, reply in given.items()}
        for agent, seen in self.observations.items():
            if seen["turn"] == TurnKind.CHOOSE and agent not in given:
                given[agent] = "skip" if "skip" in seen["options"] else "wait"
        self.observations, self.rewards, ended, cut_off, self.infos = self.env.step(given)
        self.total.update({agent: round(reward * 1000) for agent, reward in self.rewards.items()})
        self.ended, self.cut_off = all(ended.values()), all(cut_off.values())
        assert any(ended.values()) == self.ended and any(cut_off.values()) == self.cut_off
        return self

    def wait(self, steps: int) -> Table:
        for _ in range(steps):
            self()
        return self

    def text(self, name: str) -> str:
        return self.observations[self.agent(name)]["text"]

    def turn(self, name: str) -> TurnKind:
        return TurnKind(self.observations[self.agent(name)]["turn"])

    def options(self, name: str) -> set[str]:
        """In the words of compact style."""
        return {COMPACT.get(option, option) for option in self.observations[self.agent(name)]["options"]}

    def info(self, name: str) -> dict[str, Any]:
        return self.infos[self.agent(name)]

    def reward(self, name: str) -> float:
        return self.rewards[self.agent(name)]

    def speaker(self) -> str:
        (agent,) = (a for a, seen in self.observations.items() if seen["turn"] == TurnKind.SPEAK)
        return self.env.facts["names"][agent].lower()

    def talk(self) -> Table:
        """All messages of a discussion, each of no words."""
        while any(seen["turn"] == TurnKind.SPEAK for seen in self.observations.values()):
            self()
        return self


def scattered(**rules: Any) -> Table:
    """Red and Orange in bridge (0,0), Blue and Green in garden (1,1), Yellow in lab (0,1); all can act, Orange kill."""
    table = Table(**rules)
    table(blue="go_east", green="go_south", yellow="go_south").wait(2)
    table(blue="go_south", green="go_east").wait(2)
    assert "kill_red" in table.options("orange")
    return table


def body_found(**rules: Any) -> Table:
    """Orange killed Red in bridge unseen, Yellow came and reported it: the discussion begins."""
    table = scattered(**rules)
    table(orange="kill_red", yellow="go_north").wait(2)
    assert "report_red" in table.options("yellow")
    return table(yellow="report_red")


# --- The start --------------------------------------------------------------------------------------------------------


def test_the_first_observation_tells_each_player_its_own_name_role_and_tasks_and_nothing_of_others() -> None:
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


def test_natural_style_explains_the_rules_with_their_numbers() -> None:
    text = Table(style="natural", walk_steps=4, cooldown=9, message_words=11).text("red")
    assert text.startswith("You play Among Us on a grid of rooms, 2 wide and 2 high.\nPlayers: Red, Blue, Green,")
    for said in ("You are Red, a crewmate.", "takes 4 steps", "wait 9 steps", "at most 11 words", END, "room (0,0)"):
        assert said in text


def test_names_roles_tasks_and_layouts_are_drawn_afresh() -> None:
    env = among_us.parallel_env(layouts=[[1, 3], [2, 2], [2, 3]], tasks_range=[3, 5])
    layouts, counts, names, imposters = Counter[Any](), Counter[int](), Counter[str](), Counter[str]()
    for seed in range(600):
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
        spread = 5 * math.sqrt(600 / kinds * (1 - 1 / kinds))
        assert all(abs(n - 600 / kinds) < spread for n in counter.values()), counter


@pytest.mark.parametrize(("width", "height", "start"), [(2, 2, (0, 0)), (1, 3, (0, 0)), (3, 2, (1, 0)), (5, 5, (2, 0))])
def test_all_start_in_the_middle_of_the_north_side(width: int, height: int, start: tuple[int, int]) -> None:
    env = among_us.parallel_env(width=width, height=height)
    env.reset(seed=1)
    assert (env.state()[:, 3:5] == start).all()


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
        {"imposters": (1, 1)}, {"imposters": (2.0,)}, {"imposters": ([1],)},
        {"imposters": (5,)}, {"imposters": (1, 2)}, {"imposters": 2}, {"imposters": ()}, {"names": ("Red",)},
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
        ("players", 8), ("players", 3), ("players", True), ("imposters", 3), ("imposters", 0), ("tasks", 0),
        ("tasks", 11), ("tasks", 2.5), ("width", 0), ("width", 6), ("height", -1), ("height", "2"), ("walk_steps", 0),
        ("task_steps", 0), ("cooldown", -1), ("reprompt", 0), ("messages_each", -1), ("message_words", 0),
        ("message_chars", 0), ("max_steps", 0),
        ("layouts", [[1, 1]]), ("layouts", [[2, 9]]), ("layouts", 3), ("layouts", [[2, 2.0]]), ("tasks_range", [4]),
        ("tasks_range", [5, 3]), ("tasks_range", [0, 3]), ("candidates", "everyone"), ("imposters_report", 1),
        ("recall", "yes"), ("shaping", "much"), ("loser_reward", float("nan")), ("style", "verse"),
        ("render_mode", "human"),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused_by_name(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{setting} must be "):
        among_us.parallel_env(**{setting: value})


def test_a_grid_of_one_room_and_more_imposters_than_crew_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^width and height must not both be 1"):
        among_us.parallel_env(width=1, height=1)
    with pytest.raises(ValueError, match=r"^imposters must be fewer than crewmates, at most 1 among 4 players, got 2"):
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


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_durations_are_settings(steps: int) -> None:
    table = Table({"tasks": (((0, 0),), *FAR[1:])}, walk_steps=steps, task_steps=steps, reprompt=steps + 1)
    table(red="do_task", blue="go_south").wait(steps - 1)
    assert "done" in table.text("red")
    assert table.text("blue") == " at lab"
    assert [table().turn("blue") for _ in range(steps + 1)] == [TurnKind.WAIT] * steps + [TurnKind.CHOOSE]


def test_who_waits_is_asked_again_after_two_steps_or_when_its_sight_changes() -> None:
    table = Table(reprompt=2)
    table()
    assert all(seen["turn"] == TurnKind.WAIT and seen["text"] == "" for seen in table.observations.values())
    table()
    assert all(seen["turn"] == TurnKind.CHOOSE for seen in table.observations.values())
    table(red="go_east")
    assert [table.turn(name) for name in ("red", "blue", "orange")] == [0, 1, 1]
    table()  # blue, asked because red left, waits on, and red is still on its way
    assert table.turn("blue") == TurnKind.WAIT
    table()  # red has arrived
    assert table.text("blue") == " at bridge green yellow orange"


def test_a_task_takes_three_steps_in_which_nothing_is_seen() -> None:
    table = Table({"tasks": (((0, 0), (0, 0)), *FAR[1:])})
    assert table.text("red").endswith(" task task")
    table(red="do_task", blue="go_south")
    assert (table.turn("red"), table.text("red")) == (TurnKind.WAIT, "")
    table(green="go_south")
    assert table.text("red") == ""
    table(yellow="go_east")
    assert table.text("red") == " done at bridge orange out green lab out yellow galley task"
    table(red="do_task").wait(2)
    assert table.text("red") == " done at bridge orange"
    assert "do_task" not in table.options("red")


def test_doing_a_task_looks_like_being_there() -> None:
    table = Table({"tasks": (((0, 0),), *FAR[1:])})
    table(red="do_task").wait(1)
    assert table.text("blue") == " at bridge red green yellow orange"


# --- Killing ----------------------------------------------------------------------------------------------------------


def test_the_cooldown_runs_down_step_by_step_and_starts_again_after_a_kill() -> None:
    table = Table()
    shown = []
    for _ in range(6):
        table(red="go_south" if table.turn("red") and "go_south" in table.options("red") else "go_north")
        if table.turn("orange"):
            shown.append(table.text("orange").split("yellow")[-1].split(" in")[0].split(" out")[0])
    assert not any("kill" in option for option in table.options("blue"))
    assert table.text("orange").endswith(" ready")
    assert {o for o in table.options("orange") if "kill" in o} == {"kill_red", "kill_blue", "kill_green", "kill_yellow"}
    table(orange="kill_blue")
    assert table.text("orange").endswith(" body blue cooldown 6")
    assert not any("kill" in option for option in table.options("orange"))
    assert shown


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
    table.wait(2)
    assert table.text("red") == " done at bridge yellow orange body blue"
    assert table.options("red") == {"go_south", "go_east", "wait", "report_blue"}
    assert table.info("red")["error"] == ""


def test_a_waiting_player_notices_and_is_asked() -> None:
    table = scattered()
    table(yellow="go_north").wait(2)
    table(orange="kill_red")
    assert table.text("yellow") == " killer orange victim red at bridge orange body red"
    assert "killer" not in table.text("blue") + table.text("green")


def test_the_dead_wait_and_their_actions_are_ignored() -> None:
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


def test_actions_of_waiting_players_are_ignored() -> None:
    table = Table()
    table(red="go_south")
    table(red="go_east")
    assert table.info("red")["error"] == table.info("red")["entry"] == ""
    table()
    assert table.text("red") == " at lab"


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


def test_a_victims_task_that_ends_in_the_same_step_still_counts() -> None:
    table = Table({"tasks": (((0, 0), (1, 1)), *FAR[1:])}, cooldown=1, shaping=0.5)
    table(red="do_task").wait(1)
    table(orange="kill_red")
    assert table.text("red") == " done killer orange victim you"
    assert (table.reward("red"), table.reward("orange")) == (0.5, 0.5)


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


# --- Reports, talk and votes ------------------------------------------------------------------------------------------


def test_a_report_tells_all_living_who_found_whom_where_and_who_lives() -> None:
    table = body_found()
    said = " meeting yellow found red at bridge living blue green yellow orange"
    for name in ("blue", "green", "yellow", "orange"):
        assert table.text(name) == said + (" speak" if name == table.speaker() else "")
    assert table.text("red") == ""


def test_with_recall_a_discussion_begins_with_what_each_has_seen() -> None:
    """All begin in bridge. Blue left it to the east, Green and Yellow to the south; Orange and Red saw them leave."""
    met = body_found()
    table = body_found(recall=True)
    expected = {
        "blue": " recall green garden yellow bridge orange bridge",  # the three left at once
        "green": " recall blue garden yellow lab orange bridge",
        "yellow": " recall killer orange victim red blue bridge green garden orange bridge",  # it came in just then
        "orange": " recall blue galley green lab yellow bridge",
    }
    for name, recall in expected.items():
        said, speak = met.text(name).removesuffix(" speak"), " speak" if name == table.speaker() else ""
        assert table.text(name) == said + recall + speak


def test_recall_names_a_killer_until_it_is_dead_and_forgets_sightings_after_a_discussion() -> None:
    table = Table(recall=True, tasks=1)
    table.wait(6)
    table(orange="kill_red")
    table(blue="report_red")
    assert " recall killer orange victim red green bridge yellow bridge orange bridge" in table.text("blue")
    assert " killer" not in table.text("orange")
    table.talk()
    table(blue="skip", green="skip", yellow="skip", orange="skip")
    table(blue="go_east", green="go_south").wait(5)
    table(orange="kill_yellow").wait(1)
    table(blue="go_west").wait(3)
    table(blue="report_yellow")
    assert "meeting blue found yellow" in table.text("blue")
    recall = table.text("blue").partition(" recall ")[2].removesuffix(" speak")
    assert recall == "killer orange victim red green bridge orange bridge"  # Yellow is dead; Green left with Blue


def test_imposters_report_only_where_the_rules_let_them() -> None:
    for allowed in (False, True):
        table = scattered(imposters_report=allowed)
        table(orange="kill_red")
        assert ("report_red" in table.options("orange")) is allowed


def test_each_living_player_speaks_twice_in_one_order_and_all_others_hear_it() -> None:
    table = body_found()
    order = []
    for turn in range(8):
        speaker = table.speaker()
        order.append(speaker)
        table(**{speaker: f"I am number {turn}"})
        assert table.info(speaker)["message"] == f"i am number {turn}"
        for name in {"blue", "green", "yellow", "orange"} - {speaker}:
            assert table.text(name).startswith(f" {speaker} says i am number {turn} {END}")
        assert "says" not in table.text(speaker) and table.text("red") == ""
    assert order[:4] == order[4:] and sorted(order[:4]) == ["blue", "green", "orange", "yellow"]
    assert all(table.text(name).endswith(" vote") for name in ("blue", "green", "yellow", "orange"))
    assert {body_found(seed=seed).speaker() for seed in range(40)} == {"blue", "green", "yellow", "orange"}


def test_the_belief_question_is_asked_before_the_first_message_and_after_each() -> None:
    table = body_found()
    asked = []
    for _ in range(9):
        asked.append({name: table.info(name)["questions"] for name in ("red", "blue", "green", "yellow", "orange")})
        table()
    for questions in asked:
        assert questions["red"] == questions["orange"] == ()
        (question,) = questions["blue"]
        assert (question.text, question.candidates) == ("<imposter?>", ("green", "yellow", "orange"))
        assert question.answer == "orange"
        assert questions["yellow"][0].candidates == ("blue", "green", "orange")
    assert all(info["questions"] == () for info in table.infos.values())  # play has resumed


def test_with_all_names_every_living_player_is_asked_about_the_whole_palette() -> None:
    table = body_found(candidates="all_names", style="compact")
    for name in ("blue", "green", "yellow", "orange"):
        (question,) = table.info(name)["questions"]
        assert question.candidates == tuple(n.lower() for n in NAMES) and question.answer == "orange"
    assert table.info("red")["questions"] == ()


def test_without_messages_a_report_leads_straight_to_the_vote() -> None:
    table = body_found(messages_each=0)
    assert table.text("blue") == " meeting yellow found red at bridge living blue green yellow orange vote"
    assert len(table.info("blue")["questions"]) == 1
    assert table().info("blue")["questions"] == ()


@pytest.mark.parametrize(
    ("votes", "tally", "ejected"),
    [
        ("orange orange skip green", "green 1 orange 2 skip 1", "orange"),
        ("orange green orange green", "green 2 orange 2", ""),
        ("orange skip skip green", "green 1 orange 1 skip 2", ""),
        ("orange orange skip skip", "orange 2 skip 2", ""),
        ("orange blue green yellow", "blue 1 green 1 yellow 1 orange 1", ""),
        ("blue blue skip green", "blue 2 green 1 skip 1", "blue"),
        ("skip skip skip skip", "skip 4", ""),
        ("yellow skip yellow yellow", "yellow 3 skip 1", "yellow"),
    ],
)
def test_a_strict_plurality_ejects_ties_and_skips_eject_nobody(votes: str, tally: str, ejected: str) -> None:
    table = body_found().talk()
    assert table.options("blue") == {"blue", "green", "yellow", "orange", "skip"}
    table(**dict(zip(("blue", "green", "yellow", "orange"), votes.split(), strict=True)))
    for name in ("blue", "green", "yellow", "orange"):
        assert table.text(name).startswith(f" votes {tally} ejected {ejected or 'nobody'}"), table.text(name)
    assert table.text("red") == (" crewmates win ejection" if ejected == "orange" else "")
    assert table.ended is (ejected == "orange")
    if ejected and not table.ended:
        assert table.turn(ejected) == TurnKind.WAIT and "at bridge" not in table.text(ejected)
        table(**{ejected: "go_south"})
        assert table.text(ejected) == ""


def test_play_resumes_at_the_start_with_cooldowns_reset_and_the_reported_body_gone() -> None:
    table = scattered()
    table(orange="kill_red", yellow="go_north").wait(2)
    table(yellow="report_red", blue="go_west", green="do_task", orange="go_east").talk()
    table()
    assert table.text("blue") == " votes skip 4 ejected nobody at bridge green yellow orange"
    assert table.text("orange") == " votes skip 4 ejected nobody at bridge blue green yellow cooldown 6"
    assert (table.env.state()[1:, 3:5] == 0).all()
    assert table.env.state()[2, 5] == 2  # green's task was broken off
    assert all(seen["turn"] == TurnKind.CHOOSE for agent, seen in table.observations.items() if agent != "player_0")


def test_bodies_that_nobody_reported_stay() -> None:
    table = scattered(cooldown=2)
    table(orange="kill_red", yellow="go_north").wait(2)
    table(orange="kill_yellow").wait(1)  # two bodies in bridge
    assert "body red body yellow" in table.text("orange")
    table(blue="go_west").wait(2)
    table(blue="go_north").wait(2)
    assert {"report_red", "report_yellow"} <= table.options("blue")
    table(blue="report_yellow").talk()()
    assert "at bridge green orange body red" in table.text("blue")
    assert "report_red" in table.options("green")


def test_of_several_reports_in_one_step_one_is_drawn() -> None:
    finders = set()
    for seed in range(30):
        table = scattered(seed=seed)
        table(yellow="go_north").wait(2)
        table(blue="go_west", green="go_west").wait(2)
        table(blue="go_north", green="go_north").wait(2)
        table(orange="kill_red")
        table(blue="report_red", green="report_red")
        finders.add(table.text("yellow").split()[1])
        assert table.text("yellow").count("meeting") == 1
    assert finders == {"blue", "green"}


# --- Winning ----------------------------------------------------------------------------------------------------------


def outcome(table: Table) -> tuple[Any, Any]:
    outcomes = [info["outcome"] for info in table.infos.values()]
    assert all(o == outcomes[0] for o in outcomes) and table.env.agents == []
    return outcomes[0]["winner"], outcomes[0]["how"]


def test_crewmates_win_when_the_imposter_is_ejected() -> None:
    table = body_found(loser_reward=-0.5).talk()
    table(blue="orange", green="orange", yellow="orange")
    assert outcome(table) == ("crewmates", "ejection")
    assert [table.reward(name.lower()) for name in FIVE] == [1, 1, 1, 1, -0.5]  # the dead win too
    assert table.ended and not table.cut_off
    assert table.info("red")["outcome"]["points"]["player_4"] == -0.5
    assert all(seen["turn"] == TurnKind.WAIT for seen in table.observations.values())
    assert table.env.step({}) == ({}, {}, {}, {}, {})


def test_imposters_win_at_parity_before_any_discussion_starts() -> None:
    table = scattered(cooldown=1, players=5)
    table(orange="kill_red", yellow="go_north").wait(2)
    table(orange="kill_yellow", blue="go_west").wait(2)  # now blue, green and orange live
    table(blue="go_north").wait(2)
    assert not table.ended
    table(blue="report_red", orange="kill_blue")
    assert outcome(table) == ("imposters", "parity")
    assert "meeting" not in "".join(seen["text"] for seen in table.observations.values())
    assert all(info["questions"] == () for info in table.infos.values())
    assert [table.reward(name.lower()) for name in FIVE] == [0, 0, 0, 0, 1]


def test_imposters_win_at_parity_by_a_wrong_ejection() -> None:
    table = body_found().talk()
    table(blue="blue", green="blue", orange="blue")
    assert not table.ended  # green, yellow, orange
    table.wait(6)
    table(orange="kill_green")
    assert outcome(table) == ("imposters", "parity")
    table = Table({"names": FIVE[:4], "imposters": (3,), "tasks": FAR[:4]}, cooldown=1, players=4)
    table()
    table(yellow="kill_red")
    table(blue="report_red").talk()
    table(yellow="blue", blue="blue")  # two of three votes
    assert outcome(table) == ("imposters", "parity")
    assert table.text("green").endswith("ejected blue imposters win parity")


def test_crewmates_win_when_the_living_have_no_tasks_left() -> None:
    near = (((0, 0),),) * 4
    table = Table({"tasks": (*near, ((0, 0),))})
    table(red="do_task", blue="do_task", green="do_task", yellow="do_task").wait(2)
    assert outcome(table) == ("crewmates", "tasks")
    assert table.text("red") == " done crewmates win tasks"


def test_the_tasks_of_the_dead_do_not_count() -> None:
    near = (((0, 0),),) * 3
    table = Table({"tasks": (((1, 1),), *near, ((0, 0),))}, cooldown=0)
    table(blue="do_task", green="do_task", yellow="do_task").wait(2)
    assert not table.ended
    table.wait(2)(orange="kill_red")
    assert outcome(table) == ("crewmates", "tasks")


def test_nothing_begins_when_time_is_over() -> None:
    """A report in the last step opens no discussion, the last message calls nobody, the last vote asks for no move."""
    steps = body_found().env._game.step  # type: ignore[union-attr]
    for limit in (steps, steps + 8):
        table = body_found(max_steps=limit)
        while table.env.agents:
            table()
        last = table.text("red")
        assert outcome(table) == (None, "time") and not table.info("red").get("options")
        assert last.endswith("nobody win time") and not {"meeting", "speak", "vote"} & set(last.split())
        assert table.info("red")["outcome"]["discussions"] == int(limit > steps)


def test_parity_comes_before_tasks() -> None:
    start = {"names": FIVE[:4], "imposters": (3,), "tasks": (((0, 0),), ((0, 0),), ((1, 1),), ((0, 0),))}
    table = Table(start, players=4, cooldown=0)
    table(yellow="kill_green")
    table(red="do_task", blue="do_task").wait(1)
    table(yellow="kill_red")  # red and blue end their last tasks in this very step
    assert outcome(table) == ("imposters", "parity")
    assert table.text("blue") == " done imposters win parity"


@pytest.mark.parametrize("phase", ["move", "talk", "vote"])
def test_time_runs_out_in_any_phase(phase: str) -> None:
    steps = body_found().env._game.step  # type: ignore[union-attr]
    limit = {"move": 5, "talk": steps + 3, "vote": steps + 8}[phase]
    table = Table(max_steps=limit) if phase == "move" else body_found(max_steps=limit)
    while table.env.agents:
        table()
    assert outcome(table) == (None, "time")
    assert table.cut_off and not table.ended
    assert table.info("blue")["outcome"]["steps"] == limit
    assert set(table.rewards.values()) == {0.0}
    assert all(info["questions"] == () for info in table.infos.values())
    assert table.text("red").endswith("nobody win time")


def test_shaping_pays_for_tasks_kills_reports_and_right_votes_only() -> None:
    table = scattered(shaping=0.2)
    table(orange="kill_red", yellow="go_north", green="do_task").wait(2)
    assert table.reward("green") == 0.2
    table(yellow="report_red")
    assert table.reward("yellow") == 0.2
    table.talk()(blue="orange", green="yellow", yellow="orange", orange="orange")
    assert [round(table.total[f"player_{seat}"]) for seat in range(5)] == [1000, 1200, 1200, 1400, 200]
    assert table.info("red")["outcome"]["points"] == {f"player_{i}": float(i < 4) for i in range(5)}
    plain = scattered()
    plain(orange="kill_red", green="do_task")
    assert not any(plain.total.values())


def test_the_outcome_counts_what_happened() -> None:
    table = body_found().talk()
    table(blue="orange", green="orange", yellow="orange", orange="blue")
    found = table.info("red")["outcome"]
    expected = {"kills": 1, "discussions": 1, "messages": 8, "votes": 3, "votes_for_imposter": 3, "ejections": 1}
    assert {key: found[key] for key in expected} == expected
    assert found["tasks"] == 0 and found["imposters"] == ("player_4",)
    assert found["alive"] == {f"player_{i}": i in (1, 2, 3) for i in range(5)}


# --- Several imposters ------------------------------------------------------------------------------------------------

SEVEN: dict[str, Any] = {"names": NAMES, "imposters": (5, 2), "tasks": FAR[:1] * 7}


def test_imposters_know_and_spare_each_other() -> None:
    table = Table(SEVEN, players=7, imposters=2, cooldown=0)
    assert "you green imposter with purple at" in table.text("green")
    assert "you purple imposter with green at" in table.text("purple")
    assert " with " not in table.text("red")
    kills = {option for option in table.options("green") if option.startswith("kill")}
    assert kills == {"kill_red", "kill_blue", "kill_yellow", "kill_orange", "kill_pink"}


def test_two_kills_of_one_victim_are_one() -> None:
    table = Table(SEVEN, players=7, imposters=2, cooldown=0, shaping=1.0)
    table(green="kill_red", purple="kill_red", blue="go_south")
    assert table.text("yellow").count("killer") == 1
    assert table.text("red") == " killer green victim you"
    assert (table.reward("green"), table.reward("purple")) == (1.0, 0.0)


def test_any_imposter_that_lives_is_an_answer() -> None:
    """The first drawn comes first; what is told of it is as true of the others."""
    table = Table(SEVEN, players=7, imposters=2, cooldown=0)
    table(green="kill_red")
    table(blue="report_red")
    assert table.info("blue")["questions"][0].answer == "purple"
    assert table.info("blue")["questions"][0].also == ("green",)
    assert table.info("blue")["questions"][0].candidates == ("green", "yellow", "orange", "purple", "pink")
    table.talk()(blue="purple", yellow="purple", orange="purple", pink="purple")
    assert not table.ended
    table(green="kill_orange")
    table(blue="report_orange")
    assert table.info("blue")["questions"][0].answer == "green"
    assert table.info("blue")["questions"][0].also == ()


def test_each_style_names_all_imposters_in_its_own_words() -> None:
    for style, first, other in (("compact", "purple", "green"), ("natural", "Purple", "Green")):
        table = Table(SEVEN, players=7, imposters=2, cooldown=0, style=style, candidates="all_names")
        table(green="kill_red")
        table(blue="report_red")
        for name in ("blue", "green"):
            (question,) = table.info(name)["questions"]
            assert (question.answer, question.also) == (first, (other,))
            assert (question.answer_index, question.also_indices) == (5, (2,))


def test_questions_are_only_of_what_can_be_answered() -> None:
    for answer, also, said in (
        ("x", (), "'x' is not one of"), ("a", ("x",), "'x' is not one of"), ("a", ("a",), "must be different"),
        ("a", ("b", "b"), "must be different"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            Question("who?", ("a", "b"), answer, also)
    assert Question("who?", ("a", "b"), "a", ("b",)).also_indices == (1,)


# --- Replies that the rules refuse ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply", ["", "go", "Go_south", "go_north", "do_task", "kill_blue", "report_blue", "wait wait"]
)
def test_a_refused_move_counts_as_waiting_and_is_corrected(reply: str) -> None:
    table = Table(reprompt=2)
    table(red=reply)
    assert table.text("red") == " refused wait" and table.turn("red") == TurnKind.WAIT
    assert table.info("red")["error"].startswith(repr(reply)) and table.info("red")["entry"] == "move"
    assert table.info("blue")["error"] == ""
    assert table().turn("red") == TurnKind.CHOOSE


@pytest.mark.parametrize("reply", ["red", "pink", "nobody", "", "Orange", "orange skip", "orange."])
def test_a_vote_for_the_dead_or_for_nobody_is_corrected_and_counts_as_a_skip(reply: str) -> None:
    table = body_found().talk()
    table(blue=reply, green="orange", yellow="orange", orange="blue")
    assert table.text("blue").startswith(" refused skip votes blue 1 orange 2 skip 1 ejected orange")
    assert "counts as skip" in table.info("blue")["error"] and table.info("blue")["entry"] == "vote"
    assert table.info("green")["error"] == ""


def test_a_missing_reply_is_an_empty_one_and_space_around_an_option_does_not_matter() -> None:
    env = among_us.parallel_env(style="natural")
    env.reset(seed=0, options=START)
    observations, _, _, _, infos = env.step({"player_0": " go south\n"})
    assert infos["player_0"]["error"] == "" and infos["player_1"]["error"].startswith("''")
    assert observations["player_1"]["text"].startswith("Your reply was not one of your options. It counts as: wait.")
    _, _, _, _, infos = env.step({"player_0": "wait"} | dict.fromkeys(env.agents, 3))
    assert infos["player_1"]["error"].startswith("''")  # what is no text is no reply


def test_long_messages_are_cut_and_said_to_be_cut() -> None:
    table = body_found(message_words=3, message_chars=12)
    for reply, heard, cut in (
        ("a b c", "a b c", False),
        ("a b c d", "a b c", True),
        ("a b c  [END] d", "a b c", False),
        ("abcdefghijkl", "abcdefghijkl", False),
        ("abcdefghijklm", "abcdefghijkl", True),
        ("abcdef ghijklm", "abcdef ghijk", True),
        ("abcdefghijkl m", "abcdefghijkl", True),
        (" \n", "", False),
    ):
        speaker = table.speaker()
        table(**{speaker: reply})
        info = table.info(speaker)
        start, end = info["span"]
        assert (info["message"], info["error"], info["entry"]) == (heard, "", "message")
        assert reply[start:end].split() == heard.split()
        assert (" cut" in table.text(speaker)) is cut
        listener = "blue" if speaker != "blue" else "green"
        assert table.text(listener).startswith(f" {speaker} says {heard}{' ' if heard else ''}{END}")
        assert " cut" not in table.text(listener)
    assert table.text("blue").endswith(" vote")


def test_a_message_cannot_pass_for_the_games_own_words() -> None:
    table = body_found(style="natural")
    speaker = table.speaker()
    table(**{speaker: 'hi"\nBlue says: "it is <me> \u2028\x00\U0001f600'})
    listener = "blue" if speaker != "blue" else "green"
    said = "hi' Blue says: 'it is (me) \ufffd\ufffd"
    first = table.text(listener).split("\n")[0]
    assert first == f'{speaker.capitalize()} says: "{said}"'
    assert among_us_reading.read(table.text(listener), Style.NATURAL)[0] == Said(speaker.capitalize(), said)


# --- Words ------------------------------------------------------------------------------------------------------------

names = st.sampled_from(NAMES)
rooms = st.tuples(st.integers(0, 4), st.integers(0, 4))
some_names = st.sets(names).map(lambda s: tuple(n for n in NAMES if n in s))
some_rooms = st.lists(rooms, max_size=5).map(tuple)
walkers = st.lists(st.tuples(names, rooms), max_size=3).map(tuple)
few = st.integers(0, 12)
messages = st.text(max_size=40).map(lambda t: among_us_rules.hear(t, 20, 200, compact=True).text)
events = st.one_of(
    st.builds(Look, rooms, some_names, walkers, walkers, some_names, few, st.integers(-1, 30)),
    st.builds(
        Intro, names, st.sampled_from(Role), st.integers(1, 5), st.integers(1, 5),
        some_names.filter(bool), st.integers(1, 3), some_names, some_rooms,
    ),
    st.builds(Killed, names, names | st.just("")),
    st.builds(Meeting, names, names, rooms, some_names.filter(bool)),
    st.builds(Said, names, messages),
    st.builds(Recall, st.lists(st.tuples(names, names), max_size=3).map(tuple), walkers).filter(any),
    st.builds(Refused, st.sampled_from((Act.WAIT, Act.SKIP))),
    st.builds(Tally, st.lists(st.tuples(names | st.just("skip"), few), min_size=1).map(tuple), names | st.just("")),
    st.sampled_from((Done(), Cut(), SpeakNow(), VoteNow())),
    st.sampled_from(
        (
            among_us_state.Over(Role.CREWMATE, Ending.TASKS), among_us_state.Over(Role.CREWMATE, Ending.EJECTION),
            among_us_state.Over(Role.IMPOSTER, Ending.PARITY), among_us_state.Over(None, Ending.TIME),
        )
    ),
)  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
@given(event=events)
@settings(max_examples=300, deadline=None)
def test_both_styles_say_all_of_an_event(style: str, event: Event) -> None:
    assert among_us_reading.read(among_us_texts.write(event, Style(style)), Style(style)) == [event]


def random_reply(seen: dict[str, Any], rng: Random) -> str:
    """A legal reply to an observation."""
    if seen["turn"] == TurnKind.CHOOSE:
        return rng.choice(seen["options"])
    return rng.choice(("i saw red", "blue killed green in lab", "", "who did it?")) if seen["turn"] else ""


@pytest.mark.parametrize("seed", range(4))
def test_both_styles_say_the_same_in_whole_games(seed: int) -> None:
    rules: dict[str, Any] = {"players": 4 + seed, "imposters": 1 + seed // 3, "width": 2 + seed % 2, "max_steps": 150,
                             "task_steps": 3}  # fmt: skip
    natural, compact = (among_us.parallel_env(style=style, **rules) for style in STYLES)
    (a, _), (b, _) = natural.reset(seed=seed), compact.reset(seed=seed)
    rng, heard = Random(seed), 0
    while compact.agents:
        for agent in compact.agents:
            told = among_us_reading.read(b[agent]["text"], Style.COMPACT)
            assert told == among_us_reading.read(a[agent]["text"], Style.NATURAL)
            assert a[agent]["options"] == tuple(NATURAL[option] for option in b[agent]["options"])
            assert a[agent]["turn"] == b[agent]["turn"]
            heard += sum(isinstance(event, Said) for event in told)
        replies = {agent: random_reply(seen, rng) for agent, seen in b.items()}
        b = compact.step(replies)[0]
        a = natural.step({agent: NATURAL.get(reply, reply) for agent, reply in replies.items()})[0]
    assert not natural.agents and heard


def test_compact_texts_consist_of_the_listed_tokens_numbers_and_messages() -> None:
    env = among_us.parallel_env(
        style="compact", layouts=[[2, 2], [5, 5]], players=7, imposters=2, imposters_report=True
    )
    known = set(among_us_texts.COMPACT_TOKENS)
    assert len(known) == len(among_us_texts.COMPACT_TOKENS)
    for seed in range(25):
        rng = Random(seed)
        observations, infos = env.reset(seed=seed)
        while env.agents:
            for agent, seen in observations.items():
                words = re.sub(rf" says .*?{re.escape(END)}", " says", seen["text"]).split()
                assert all(word in known or word.isdigit() for word in words), seen["text"]
                assert set(seen["options"]) <= known and seen["text"] == "".join(f" {w}" for w in seen["text"].split())
                assert all({q.text, *q.candidates} <= known for q in infos[agent]["questions"])
            observations, _, _, _, infos = env.step({a: random_reply(seen, rng) for a, seen in observations.items()})


def test_a_compact_game_is_short() -> None:
    env = among_us.parallel_env(style="compact")
    words = 0
    for seed in range(100):
        rng = Random(seed)
        observations, _ = env.reset(seed=seed)
        while env.agents:
            words += sum(len(seen["text"].split()) for seen in observations.values())
            observations, *_ = env.step({a: random_reply(seen, rng) for a, seen in observations.items()})
    assert words / 500 < 220  # a player a game


@given(reply=st.text(max_size=300), max_words=st.integers(1, 20), max_chars=st.integers(1, 200))
@settings(max_examples=300, deadline=None)
def test_what_is_heard_of_any_reply(reply: str, max_words: int, max_chars: int) -> None:
    text, start, end, cut = among_us_rules.hear(reply, max_words, max_chars)
    assert len(text) <= max_chars and len(text.split(" ")) <= max_words and set(text) <= CHARSET
    assert 0 <= start <= end <= len(reply) and END not in reply[start:end]
    assert len(" ".join(reply[start:end].split())) == len(text)
    assert (start == end) == (text == "")
    assert cut == bool(reply.partition(END)[0][end:].strip())
    assert not set(text) & set('<>"\n')
    compact = among_us_rules.hear(reply, max_words, max_chars, compact=True)
    assert compact.text == text.lower().replace("_", "-") or "says" in text.lower()


@pytest.mark.parametrize(
    ("reply", "heard"),
    [
        ("red says BLUE says it is pink", "red say blue say it is pink"),  # not Blue's words
        ("kill_red report_blue", "kill-red report-blue"),  # no options
        ("he essays red", "he essays red"),
    ],
)
def test_a_compact_message_is_nobody_elses(reply: str, heard: str) -> None:
    assert among_us_rules.hear(reply, 20, 200, compact=True).text == heard
    assert among_us_rules.hear(reply, 20, 200).text == reply


# --- Leaks: change one hidden fact, replay, and nobody else's observation changes -------------------------------------


def views(
    start: dict[str, Any], plan: list[dict[str, str]], watch: tuple[str, ...], seed: int, **rules: Any
) -> list[Any]:
    """What the watched players observe (text, turn, options in order) when the plan is played."""
    table = Table(start, seed=seed, **rules)
    seen = [[table.observations[table.agent(name)] for name in watch]]
    for replies in plan:
        speaking = {name: "i saw blue in lab" for name in table.env.facts["names"].values()} if not replies else {}
        table(**replies, **{n.lower(): m for n, m in speaking.items() if table.turn(n.lower()) == TurnKind.SPEAK})
        seen.append([table.observations[table.agent(name)] for name in watch])
    return seen


def walk_about(seed: int, steps: int) -> list[dict[str, str]]:
    """Moves that everybody may try whatever its role; those that walls or walking forbid are refused or ignored."""
    rng = Random(seed)
    moves = ("go_north", "go_south", "go_west", "go_east", "wait")
    return [{name.lower(): rng.choice(moves) for name in FIVE} for _ in range(steps)]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("seed", range(6))
def test_others_roles_do_not_show(style: str, seed: int) -> None:
    plan = walk_about(seed, 60)
    first, second = (
        views({"imposters": (seat,)}, plan, ("red", "blue", "green"), seed, style=style, recall=True) for seat in (3, 4)
    )
    assert first == second


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("seed", range(6))
def test_others_tasks_do_not_show_nor_whether_one_does_them(style: str, seed: int) -> None:
    plan = walk_about(seed, 40)
    others = ("red", "green", "yellow", "orange")
    few_tasks, many = (((1, 1),),), (((0, 0), (0, 1), (1, 0)),)
    assert views({"tasks": FAR[:1] + few_tasks + FAR[2:]}, plan, others, seed, style=style) == views(
        {"tasks": FAR[:1] + many + FAR[2:]}, plan, others, seed, style=style
    )
    works, rests = ([{"blue": first}, {}, {}] for first in ("do_task", "wait"))
    start = {"tasks": FAR[:1] + many + FAR[2:]}
    assert views(start, works, others, seed, style=style) == views(start, rests, others, seed, style=style)
    assert views(start, works, ("blue",), seed, style=style) != views(start, rests, ("blue",), seed, style=style)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("seed", range(6))
def test_what_happens_elsewhere_does_not_show(style: str, seed: int) -> None:
    approach = [{"red": "go_south", "orange": "go_south"}, {}, {}, {}, {}, {}, {}]
    others = ("blue", "green", "yellow")
    kill, spare = ([*approach, {"orange": first}, {}, {}, {}] for first in ("kill_red", "wait"))
    assert views({}, kill, others, seed, style=style) == views({}, spare, others, seed, style=style)
    assert views({}, kill, ("red",), seed, style=style) != views({}, spare, ("red",), seed, style=style)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_a_kill_half_way_does_not_show_at_the_other_end_before_the_walk_would_have_ended(
    style: str, ahead: int, seed: int
) -> None:
    """Red walks from the bridge to the lab, and is killed by Orange in one of them, while others wait in the other."""
    there = {"orange": "go_south"} if ahead else {"blue": "go_south", "green": "go_south", "yellow": "go_south"}
    plan = [there, *[{}] * 7, {"red": "go_south"}]
    kill, spare = ([*plan, {"orange": first}, {}, {}, {}, {}] for first in ("kill_red", "wait"))
    watch = ("blue", "green", "yellow")
    killed, spared = (views({}, each, watch, seed, style=style, walk_steps=3) for each in (kill, spare))
    on_its_way = len(plan) + 2  # what was seen at the start, and up to the step before it would have arrived
    assert killed[:on_its_way] == spared[:on_its_way]
    assert (killed == spared) == bool(ahead)  # behind it nobody misses it, ahead it never comes
    assert views({}, kill, ("red",), seed, style=style) != views({}, spare, ("red",), seed, style=style)


@pytest.mark.parametrize("imposters_report", [False, True])
def test_whatever_the_rules_a_kill_shows_at_once_in_its_own_room_alone(imposters_report: bool) -> None:
    """In random games of all sizes possible kills are left out instead, and the next observations compared."""
    compared = 0
    for seed in range(30):
        rng = Random(seed)
        imposters = rng.randint(1, 2)
        env = among_us.parallel_env(
            players=rng.randint(5, 7), imposters=imposters, cooldown=rng.randint(1, 4), walk_steps=rng.randint(1, 5),
            task_steps=rng.randint(1, 4), width=rng.randint(1, 3), height=2, imposters_report=imposters_report,
            style=rng.choice(STYLES), recall=rng.random() < 0.5,
        )  # fmt: skip
        observations, _ = env.reset(seed=seed)
        for _ in range(80):
            if not env.agents:
                break
            actions = {
                agent: rng.choice(seen["options"]) if seen["options"] else "i saw nothing"
                for agent, seen in observations.items()
            }
            kills = [(a, o) for a, seen in observations.items() for o in seen["options"] if o.startswith("kill")]
            if kills:
                killer, kill = rng.choice(kills)
                forks = [copy.deepcopy(env) for _ in range(2)]
                killed, spared = (
                    fork.step({**actions, killer: choice})[0]
                    for fork, choice in zip(forks, (kill, "wait"), strict=True)
                )
                states = dict(zip(env.possible_agents, forks[0].state(), strict=True))
                names = {name: agent for agent, name in env.facts["names"].items()}
                victim = names[re.split(r"[ _]", kill)[-1].capitalize()]
                lived = forks[1].state()[env.possible_agents.index(victim)]
                near = {tuple(states[killer][3:5])}
                if lived[7] != among_us_state.Activity.WALK.value:  # where it would have arrived just now it is missed
                    near.add(tuple(lived[3:5]))
                if all(seen["turn"] in (TurnKind.CHOOSE, TurnKind.WAIT) for seen in killed.values()) and not any(
                    "discussion" in seen["text"] or "meeting" in seen["text"] for seen in killed.values()
                ):
                    for agent in forks[0].living:
                        if forks[0].agents and tuple(states[agent][3:5]) not in near:
                            compared += 1
                            assert killed[agent] == spared[agent], (seed, agent)
            observations, *_ = env.step(actions)
    assert compared > 250, compared


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("recall", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_who_killed_does_not_show_in_the_whole_discussion_after_it(seed: int, recall: bool, style: str) -> None:
    away = [{"red": "go_south", "yellow": "go_south", "orange": "go_south"}, {}, {}, {}, {}, {}, {}, {}]
    found = [{"blue": "go_south"}, {}, {}, {"blue": "report_red"}, *[{}] * 8, {"blue": "skip"}, {}, {}, {}]
    first, second = (
        views(
            {"imposters": (seat,)},
            [*away, {killer: "kill_red"}, *found],
            ("blue", "green"),
            seed,
            recall=recall,
            style=style,
        )
        for seat, killer in ((3, "yellow"), (4, "orange"))
    )
    assert first == second
    meeting, votes = ("meeting", "votes") if style == "compact" else ("A discussion begins", "votes")
    assert any(meeting in seen["text"] for step in first for seen in step)
    assert any(votes in seen["text"].lower() for step in first for seen in step)


@pytest.mark.parametrize("style", STYLES)
def test_who_voted_for_whom_does_not_show(style: str) -> None:
    told = []
    for green, yellow in (("orange", "skip"), ("skip", "orange")):
        table = body_found(style=style).talk()
        table(green=green, yellow=yellow, orange="green")
        told.append([table.observations[table.agent(name)] for name in ("blue", "green", "yellow", "orange")])
    assert told[0] == told[1]


@pytest.mark.parametrize("style", STYLES)
def test_questions_and_roles_of_others_never_enter_an_observation(style: str) -> None:
    env = among_us.parallel_env(style=style, candidates="all_names")
    for seed in range(30):
        rng = Random(seed)
        observations, _ = env.reset(seed=seed)
        told = dict.fromkeys(env.agents, "")
        while env.agents:
            for agent, seen in observations.items():
                told[agent] += seen["text"]
            observations, *_ = env.step({a: random_reply(seen, rng) for a, seen in observations.items()})
        for agent, text in told.items():
            assert among_us_texts.QUESTION[Style(style)] not in text
            own = re.findall(r"you \w+ (crewmate|imposter)\b|You are \w+, an? (crewmate|imposter)\.", text)
            assert len(own) == 1 and env.facts["roles"][agent] in own[0]


def test_options_come_in_random_order() -> None:
    orders = {among_us.parallel_env(style="natural").reset(seed=seed)[0]["player_0"]["options"] for seed in range(500)}
    assert {tuple(sorted(order)) for order in orders} <= {
        ("go east", "go south", "wait"),
        ("do task", "go east", "go south", "wait"),
    }
    assert len(orders) == 6 + 24
    ballots = {body_found(seed=seed, messages_each=0).observations["player_1"]["options"] for seed in range(40)}
    assert len(ballots) > 20 and len({tuple(sorted(ballot)) for ballot in ballots}) == 1


# --- The environment's contract ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("style", STYLES)
def test_pettingzoo_api(style: str) -> None:
    parallel_api_test(among_us.parallel_env(style=style, max_steps=40), num_cycles=200)
    parallel_seed_test(lambda: among_us.parallel_env(style=style, max_steps=40))


@pytest.mark.filterwarnings("ignore:Observation", "ignore:Action space")  # it expects arrays
def test_pettingzoo_aec_api() -> None:
    api_test(among_us.env(max_steps=30), num_cycles=200)
    seed_test(lambda: among_us.env(max_steps=30), num_cycles=100)


def test_the_aec_form_plays_the_same_game() -> None:
    env, rng = among_us.env(style="compact", task_steps=3), Random(3)
    env.reset(seed=3)
    for _ in env.agent_iter():
        seen, _, ended, cut_off, info = env.last()
        env.step(None if ended or cut_off else random_reply(seen, rng))
    assert info["outcome"] == playthrough("compact", 3, {})[1]


def check_contract(env: among_us_environment.AmongUs, observations: dict[str, Any], infos: dict[str, Any]) -> None:
    assert list(observations) == list(infos) == env.possible_agents
    for agent, seen in observations.items():
        assert env.observation_space(agent).contains(seen), seen
        assert bool(seen["options"]) == (seen["turn"] == TurnKind.CHOOSE)
        assert len(set(seen["options"])) == len(seen["options"])
        assert set(infos[agent]) - {"outcome"} == {"role", "questions", "error", "message", "span", "entry"}
    assert env.state_space.contains(env.state())
    speakers = [a for a, seen in observations.items() if seen["turn"] == TurnKind.SPEAK]
    assert len(speakers) <= 1
    assert env.agents or not any(seen["turn"] for seen in observations.values())


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_settings_and_any_replies_keep_the_contract(data: st.DataObject) -> None:
    players = data.draw(st.integers(4, 7))
    env = among_us.parallel_env(
        style=data.draw(st.sampled_from(STYLES)),
        players=players,
        imposters=data.draw(st.integers(1, (players - 1) // 2)),
        width=data.draw(st.integers(1, 5)),
        height=data.draw(st.integers(2, 5)),
        tasks=data.draw(st.integers(1, 10)),
        cooldown=data.draw(st.integers(0, 3)),
        messages_each=data.draw(st.integers(0, 2)),
        imposters_report=data.draw(st.booleans()),
        recall=data.draw(st.booleans()),
        candidates=data.draw(st.sampled_from(("living_others", "all_names"))),
        max_steps=60,
    )
    rng = data.draw(st.randoms(use_true_random=False))
    observations, infos = env.reset(seed=data.draw(st.integers(0, 1000)))
    odd = data.draw(st.lists(st.text(max_size=250) | st.sampled_from(("red", "Red", "kill Red", END)), max_size=8)) or [
        ""
    ]
    for _ in range(61):
        check_contract(env, observations, infos)
        if not env.agents:
            break
        replies = {
            agent: rng.choice(odd) if rng.random() < 0.3 else rng.choice(seen["options"] or odd)
            for agent, seen in observations.items()
        }
        due = [agent for agent, seen in observations.items() if seen["turn"]]
        legal = {agent: replies[agent].strip() in seen["options"] for agent, seen in observations.items()}
        choosing = {agent: seen["turn"] == TurnKind.CHOOSE for agent, seen in observations.items()}
        observations, _, _, _, infos = env.step(replies)
        for agent, info in infos.items():
            assert bool(info["entry"]) == (agent in due)
            assert bool(info["error"]) == (choosing[agent] and not legal[agent])
    assert not env.agents and all("outcome" in info for info in infos.values())


def playthrough(style: str, seed: int, rules: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A game of random players: everything that anybody observes and does, and the outcome."""
    env, rng = among_us.parallel_env(style=style, task_steps=3, **rules), Random(seed)
    observations, infos = env.reset(seed=seed)
    lines = [f"{style}, seed {seed}, {rules}", f"facts {env.facts}"]
    step = 0
    while True:
        lines.append(f"\n== {step}")
        replies = {agent: random_reply(observations[agent], rng) for agent in env.agents}
        for agent, seen in observations.items():
            info = infos[agent]
            notes = {k: v for k, v in info.items() if v and k in ("entry", "error", "message")}
            if any(info["span"]):
                notes["span"] = info["span"]
            if seen["text"] or seen["turn"] or notes:
                lines.append(f"{agent} {TurnKind(seen['turn']).name} {notes or ''}".rstrip())
            lines.extend(f"    | {line}" for line in seen["text"].split("\n") if line)
            lines.extend(f"    ? {q.text} {' '.join(q.candidates)} -> {q.answer}" for q in info["questions"])
            if seen["turn"]:
                lines.append(f"    > {replies[agent]!r} of {', '.join(seen['options']) or 'anything'}")
        if not env.agents:
            break
        observations, rewards, _, _, infos = env.step(replies)
        lines.extend(f"    + {agent} {reward:g}" for agent, reward in rewards.items() if reward)
        step += 1
    found = infos["player_0"]["outcome"]
    return "\n".join([*lines, f"outcome {found}"]) + "\n", found


GAMES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "natural": ("natural", 11, {"message_words": 4, "cooldown": 3}),
    "compact": ("compact", 12, {"message_words": 4, "cooldown": 3}),
    "compact_two_imposters": (
        "compact",
        5,
        {"players": 7, "imposters": 2, "width": 3, "imposters_report": True, "candidates": "all_names", "shaping": 0.2},
    ),
}


@pytest.mark.parametrize("name", GAMES)
def test_golden_playthroughs(name: str) -> None:
    assert playthrough(*GAMES[name])[0] == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("style", STYLES)
def test_a_seed_and_the_actions_determine_the_whole_episode(style: str) -> None:
    rules: dict[str, Any] = {"layouts": [[1, 3], [2, 2]], "tasks_range": [3, 5]}
    assert playthrough(style, 7, rules) == playthrough(style, 7, rules)
    assert playthrough(style, 7, rules) != playthrough(style, 8, rules)


def test_games_without_a_seed_go_on_from_the_last_one() -> None:
    def three_games(seed: int) -> list[Any]:
        env = among_us.parallel_env()
        env.reset(seed=seed)
        found = [env.facts]
        for _ in range(2):
            env.reset()
            found.append(env.facts)
        return found

    assert three_games(4) == three_games(4)
    assert three_games(4)[0] != three_games(4)[1]


def test_the_privileged_view_marks_the_imposters_names() -> None:
    env = among_us.parallel_env(players=7, imposters=2)
    env.reset(seed=0, options=SEVEN)
    assert env.privileged("player_0") == (0, 0, 1, 0, 0, 1, 0)


@pytest.mark.parametrize("call", ["state", "render", "facts", "step"])
def test_nothing_works_before_the_first_reset(call: str) -> None:
    env = among_us.parallel_env(render_mode="ansi")
    with pytest.raises(RuntimeError, match=r"call reset\(\) first"):
        env.facts if call == "facts" else getattr(env, call)(*[{}] * (call == "step"))


def test_ansi_shows_the_whole_state() -> None:
    table = scattered(render_mode="ansi")
    table(orange="kill_red", yellow="go_north", green="do_task")
    assert table.env.render() == (
        "step 7, move\n"
        "| (0,0) Yellow> Orange* +Red | (1,0)                      |\n"
        "| (0,1)                      | (1,1) Blue Green!          |\n"
        "Blue: 2 tasks left\nGreen: 2 tasks left\nYellow: 2 tasks left\ndead or ejected: Red\n"
    )
    assert "speaking: " in str(body_found(render_mode="ansi").env.render())


def test_the_picture_shows_players_by_colour_in_their_rooms() -> None:
    table = scattered(render_mode="rgb_array")
    table(orange="kill_red")
    image = table.env.render()
    assert isinstance(image, np.ndarray) and image.shape == (192, 192, 3) and image.dtype == np.uint8

    def quarters(colour: str) -> list[tuple[int, int]]:
        rgb = among_us_pictures._COLOURS[colour]
        cells = {(x, y): image[y * 96 : y * 96 + 96, x * 96 : x * 96 + 96] for x in (0, 1) for y in (0, 1)}
        return [room for room, cell in cells.items() if (cell == rgb).all(-1).any()]

    assert {name: quarters(name) for name in FIVE} == {
        "Red": [(0, 0)], "Blue": [(1, 1)], "Green": [(1, 1)], "Yellow": [(0, 1)], "Orange": [(0, 0)],
    }  # fmt: skip
    assert (image == among_us_pictures._COLOURS["Red"]).all(-1).sum() < (
        image == among_us_pictures._COLOURS["Blue"]
    ).all(-1).sum()


# --- Random play ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [3, 5])
def test_random_play_comes_out_as_the_rules_have_it(steps: int) -> None:
    """Against long-run figures of these rules (10,000 games): a change of any rule that matters moves them.

    Published: 24 of 200 games (12 %, 95 % interval 8 to 17 %) won by crewmates, with 73 decisions a game. There a walk
    or task set to 3 steps keeps a player for 5, and a wait for 3: hence the second case.
    """
    env = among_us.parallel_env(
        style="compact", tasks_range=(4, 5), walk_steps=steps, task_steps=steps, reprompt=(steps + 1) // 2
    )
    shares, mean_decisions = RANDOM_PLAY[steps]
    games, rng, won, decisions = 500, Random(0), Counter[str](), []
    for seed in range(games):
        observations, infos = env.reset(seed=seed)
        while env.agents:
            observations, _, _, _, infos = env.step({a: random_reply(seen, rng) for a, seen in observations.items()})
        found = infos["player_0"]["outcome"]
        won[f"{found['winner']} {found['how']}"] += 1
        decisions.append(found["decisions"])
    for ending, share in shares.items():
        slack = 3.5 * math.sqrt(games * share * (1 - share))
        assert abs(won[ending] - games * share) < slack, won
    assert abs(np.mean(decisions) - mean_decisions) < 3.5 * np.std(decisions) / math.sqrt(games)


RANDOM_PLAY = {
    3: ({"imposters parity": 0.816, "crewmates ejection": 0.165, "crewmates tasks": 0.0186}, 83.9),
    5: ({"imposters parity": 0.837, "crewmates ejection": 0.1535, "crewmates tasks": 0.0099}, 73.6),
}  # by the length of walks and tasks


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, game in GAMES.items():
        (GOLDEN / f"{name}.txt").write_text(playthrough(*game)[0], encoding="utf-8")
