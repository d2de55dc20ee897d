"""Leaks in Among Us: one hidden fact is changed, the game replayed, and nobody else's observation may change."""

from __future__ import annotations

import copy
import re
from random import Random
from typing import Any

import pytest

from envs import among_us_v0 as among_us
from envs.among_us import state, texts
from envs.core import Style, TurnKind
from tests.envs.among_us.table import (
    FAR,
    FIVE,
    STYLES,
    Table,
    body_found,
    random_reply,
)

# --- Leaks: change one hidden fact, replay, and nobody else's observation changes -------------------------------------


def views(
    start: dict[str, Any], plan: list[dict[str, str]], watch: tuple[str, ...], seed: int, **rules: Any
) -> list[Any]:
    """Observations (text, turn, options in order) of the watched players when the plan is played."""
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
@pytest.mark.parametrize("seed", range(2))
def test_others_roles_do_not_show(style: str, seed: int) -> None:
    plan = walk_about(seed, 60)
    first, second = (
        views({"imposters": (seat,)}, plan, ("red", "blue", "green"), seed, style=style, recall=True) for seat in (3, 4)
    )
    assert first == second


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("seed", range(2))
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
@pytest.mark.parametrize("seed", range(2))
def test_what_happens_elsewhere_does_not_show(style: str, seed: int) -> None:
    approach = [{"red": "go_south", "orange": "go_south"}, {}, {}, {}, {}, {}, {}]
    others = ("blue", "green", "yellow")
    kill, spare = ([*approach, {"orange": first}, {}, {}, {}] for first in ("kill_red", "wait"))
    assert views({}, kill, others, seed, style=style) == views({}, spare, others, seed, style=style)
    assert views({}, kill, ("red",), seed, style=style) != views({}, spare, ("red",), seed, style=style)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(2))
def test_a_kill_on_the_way_does_not_show_in_the_other_room_before_arrival(style: str, ahead: int, seed: int) -> None:
    """Red walks from bridge to lab and is killed by Orange in one of them, while the others wait in the other room.
    They see no difference before Red would have arrived."""
    there = {"orange": "go_south"} if ahead else {"blue": "go_south", "green": "go_south", "yellow": "go_south"}
    plan = [there, *[{}] * 7, {"red": "go_south"}]
    kill, spare = ([*plan, {"orange": first}, {}, {}, {}, {}] for first in ("kill_red", "wait"))
    watch = ("blue", "green", "yellow")
    killed, spared = (views({}, each, watch, seed, style=style, walk_steps=3) for each in (kill, spare))
    on_its_way = len(plan) + 2  # the start, and every step before Red would have arrived
    assert killed[:on_its_way] == spared[:on_its_way]
    assert (killed == spared) == bool(ahead)  # only players at the other end notice that Red never arrives
    assert views({}, kill, ("red",), seed, style=style) != views({}, spare, ("red",), seed, style=style)


@pytest.mark.parametrize("imposters_report", [False, True])
def test_a_kill_shows_at_once_in_its_own_room_alone_in_random_games(imposters_report: bool) -> None:
    """Random games of all sizes are copied before possible kills. Players in other rooms observe the same next step
    whether the killer kills or waits."""
    compared = 0
    for seed in range(8):
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
                if lived[7] != state.Activity.WALK.value:  # a victim that would have arrived just now is missed there
                    near.add(tuple(lived[3:5]))
                if all(seen["turn"] in (TurnKind.CHOOSE, TurnKind.WAIT) for seen in killed.values()) and not any(
                    "discussion" in seen["text"] or "meeting" in seen["text"] for seen in killed.values()
                ):
                    for agent in forks[0].living:
                        if forks[0].agents and tuple(states[agent][3:5]) not in near:
                            compared += 1
                            assert killed[agent] == spared[agent], (seed, agent)
            observations, *_ = env.step(actions)
    assert compared > 80, compared


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("recall", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_who_killed_does_not_show_in_the_whole_discussion_after_it(seed: int, recall: bool, style: str) -> None:
    away = [{"red": "go_south", "yellow": "go_south", "orange": "go_south"}, {}, {}, {}, {}, {}, {}, {}]
    found = [{"blue": "go_south"}, {}, {}, {"blue": "report_red"}, *[{}] * 8, {"blue": "skip"}, {}, {}, {}]
    first, second = (
        views({"imposters": (seat,)}, plan, ("blue", "green"), seed, recall=recall, style=style)
        for seat, plan in (
            (seat, [*away, {killer: "kill_red"}, *found]) for seat, killer in ((3, "yellow"), (4, "orange"))
        )
    )
    assert first == second
    meeting, votes = {"compact": "meeting", "natural": "A discussion begins", "brief": "found the body"}[style], "votes"
    assert any(meeting in seen["text"] for step in first for seen in step)
    assert any(votes in seen["text"].lower() for step in first for seen in step)


@pytest.mark.parametrize("style", STYLES)
def test_questions_and_roles_of_others_never_enter_an_observation(style: str) -> None:
    env = among_us.parallel_env(style=style, candidates="all_names")
    for seed in range(5):
        rng = Random(seed)
        observations, _ = env.reset(seed=seed)
        observed = dict.fromkeys(env.agents, "")
        while env.agents:
            for agent, seen in observations.items():
                observed[agent] += seen["text"]
            observations, *_ = env.step({a: random_reply(seen, rng) for a, seen in observations.items()})
        for agent, text in observed.items():
            assert texts.QUESTION[Style(style)] not in text
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
