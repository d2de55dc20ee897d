"""A table of Among Us in which seats are addressed by name, for tests, and games of random players."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

from envs import among_us_v0 as among_us
from envs.among_us import texts
from envs.among_us.state import NAMES
from envs.core import Style, TurnKind

STYLES = ("natural", "brief", "compact")
FIVE = ("Red", "Blue", "Green", "Yellow", "Orange")
FAR = (((1, 1),) * 2,) * 5  # everybody's tasks: two in the room that is farthest from the start
START: dict[str, Any] = {"names": FIVE, "imposters": (4,), "tasks": FAR}


# --- Several imposters ------------------------------------------------------------------------------------------------

SEVEN: dict[str, Any] = {"names": NAMES, "imposters": (5, 2), "tasks": FAR[:1] * 7}
NATURAL = {texts.OPTION[Style.COMPACT][x]: texts.OPTION[Style.NATURAL][x] for x in texts.ALL_ACTIONS}
BRIEF = {texts.OPTION[Style.COMPACT][x]: texts.OPTION[Style.BRIEF][x] for x in texts.ALL_ACTIONS}
COMPACT = {theirs: compact for words in (NATURAL, BRIEF) for compact, theirs in words.items()}


class Table:
    """A 2x2 game in which seats are addressed by the lower-case names of `FIVE`; Orange is the imposter.

    Calling it plays one step. Players who must act and are not named wait, say nothing, or skip. Unlike by default,
    waiting players are asked again after each step, and tasks take three steps.
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
        words = {Style.NATURAL: NATURAL, Style.BRIEF: BRIEF}.get(self.env.style, {})
        given = {agent: words.get(reply, reply) for agent, reply in given.items()}
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
        """Options of a player, in the words of compact style."""
        return {COMPACT.get(option, option) for option in self.observations[self.agent(name)]["options"]}

    def info(self, name: str) -> dict[str, Any]:
        return self.infos[self.agent(name)]

    def reward(self, name: str) -> float:
        return self.rewards[self.agent(name)]

    def speaker(self) -> str:
        (agent,) = (a for a, seen in self.observations.items() if seen["turn"] == TurnKind.SPEAK)
        return self.env.facts["names"][agent].lower()

    def talk(self) -> Table:
        """Plays a discussion to its end with empty messages."""
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


# --- Winning ----------------------------------------------------------------------------------------------------------


def outcome(table: Table) -> tuple[Any, Any]:
    outcomes = [info["outcome"] for info in table.infos.values()]
    assert all(o == outcomes[0] for o in outcomes) and table.env.agents == []
    return outcomes[0]["winner"], outcomes[0]["how"]


def random_reply(seen: dict[str, Any], rng: Random) -> str:
    """A legal reply to an observation."""
    if seen["turn"] == TurnKind.CHOOSE:
        return rng.choice(seen["options"])
    return rng.choice(("i saw red", "blue killed green in lab", "", "who did it?")) if seen["turn"] else ""
