"""The nouns of a study: conditions, limits, entrants, cells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.setup.config import make
from experiments.setup.players import planner_of
from experiments.setup.stages import Stage
from marl.agents.model import PlayConfig
from marl.common.errors import UserError, check_temperature
from marl.common.files import digest
from marl.planning.planner import PlannerConfig
from marl.rollout.cast import Seats
from marl.storage.checkpoint import started_from

FORMAT = 3  # of cells; raised when the same settings would be played, or measured, otherwise
BASE = "base"  # the arm of those who were not trained
TRAINED = "trained"  # what the policy under test is called in episodes, a base in its place too
SILENT = "silence"  # the voice of those who say nothing
Point = tuple[str, str]  # arm, condition


@dataclass(frozen=True)
class Condition:
    """Changes to a run's own evaluation. `voices`: by role, whose messages its `player` sends; a role's
    partners speak for themselves. `planner`: how learners plan claims or votes near what their own policy would do.
    `iteration`: the learners as they were after so many, from a checkpoint that the run kept (0: as they began)."""

    env: Mapping[str, Any] = field(default_factory=dict)
    cast: Mapping[str, Any] = field(default_factory=dict)
    voices: Mapping[str, Any] = field(default_factory=dict)
    temperature: float | None = None
    planner: PlannerConfig | None = None
    iteration: int | None = None

    def __post_init__(self) -> None:
        if self.planner and self.planner.choose == "own":
            raise UserError("planner.choose=own: only training notes plans without playing them; sample or best")
        if self.planner and self.voices:
            raise UserError(f"planner, voices={dict(self.voices)}: who plans speaks for itself; leave one of them out")
        for role, changes in self.cast.items():
            if not isinstance(changes, Mapping):
                raise UserError(f"cast.{role}={changes}: must be a group of settings, as in {{player: {changes}}}")
        if self.temperature is not None:
            check_temperature(self.temperature, "temperature")
        if self.iteration is not None and self.iteration < 0:
            raise UserError(f"iteration={self.iteration}: must be at least 0")


@dataclass(frozen=True)
class Limits(PlayConfig):
    """Limits of play beside players that plan."""

    planner: PlannerConfig = field(default_factory=PlannerConfig)


@dataclass(frozen=True)
class Entrant:
    """Policies under test: those that a run ended with, or its base. `run` holds all else."""

    arm: str
    seed: int
    run: Path
    config: Mapping[str, Any]
    base: Path
    learners: Mapping[str, Stage]  # by name in the cast

    @property
    def planner(self) -> PlannerConfig:
        """The plans of others beside its learners: made as in its run."""
        own = self.config["algo"].get("planner")
        return planner_of(Limits(planner=make(PlannerConfig, own, "algo.planner") if own else PlannerConfig()))

    @property
    def name(self) -> str:
        # a base's own name, also where it is played from the copy that a run keeps
        return Path(str(started_from(self.run / "policy"))).name if self.arm == BASE else self.run.name


@dataclass(frozen=True)
class Cell:
    """One entrant under one condition. `settings` is all that determines its games, and names its file."""

    entrant: Entrant
    condition: str
    env: Mapping[str, Any]
    seating: Mapping[str, Seats]
    voices: Mapping[str, str]
    temperature: float
    planner: PlannerConfig | None
    settings: Mapping[str, Any]

    @property
    def file(self) -> str:
        return f"{self.entrant.name}-{digest(self.settings)}.json"
