"""A study with people as a YAML file: what they read, who plays against whom, and what is paid.

`conf/study_page/dond_humans.yaml` explains each entry.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import conf
from experiments.setup.config import make
from marl.common.errors import UserError, check_choices, check_counts, check_range, nearest, prefixed
from marl.common.files import digest, read_yaml

FOLDER = Path(str(conf.__file__)).parent / "study_page"
HOW = ("balanced", "random")
BLANK = re.compile(r"\[\[.*?\]\]", re.S)  # what whoever runs the study has to fill in
NAME = re.compile(r"[A-Za-z0-9_]{1,60}")


@dataclass(frozen=True)
class Pay:
    """Amounts of money; each `point` is one of the score, R_i + lambda R_j, or a won game of Among Us."""

    currency: str = "$"
    taking_part: float = 0.0
    game: float = 0.0  # played to its end
    point: float = 0.0
    aborted: float = 0.0  # instead of the two above, where the opponent or the server failed

    def __post_init__(self) -> None:
        check_range(self, "pay", "[0, inf)", "taking_part", "game", "point", "aborted")

    def of(self, result: Mapping[str, Any]) -> float:
        """Returns the pay of a game that ended so; {} is a game that goes on."""
        if not result or result["how"] == "stopped":
            return 0.0
        if result["how"] == "failed" or result.get("aborted_by") == "opponent":
            return self.aborted
        return self.game + self.point * max(0.0, result["score"])

    def money(self, amount: float) -> str:
        return f"{self.currency}{amount:.2f}"


@dataclass(frozen=True)
class Screening:
    """A question that only those who answer it rightly pass."""

    question: str
    answers: tuple[str, ...]
    right: str
    refused: str = "Thank you for your interest. This study is not for you."

    def __post_init__(self) -> None:
        if self.right not in self.answers:
            raise UserError(f"screening.right={self.right}: must be one of screening.answers")


@dataclass(frozen=True)
class Condition:
    """An opponent. Without a weight, all conditions of the part weigh the same."""

    # A finished run's folder or a pattern of it, scripted, a temperament, random, chat; RUN+plan; FOLDER+cicero.
    opponent: str
    where: Mapping[str, Any] = field(default_factory=dict)  # settings that the one run of the pattern has
    iteration: int | None = None  # a checkpoint that the run kept; 0: what it began from; null: its end
    env: Mapping[str, Any] = field(default_factory=dict)
    seat: str = "any"
    weight: float | None = None


@dataclass(frozen=True)
class Part:
    """Games of one person: conditions that differ between its games."""

    conditions: Mapping[str, Condition]
    game: str = "dond"
    instructions: str = ""
    env: Mapping[str, Any] = field(default_factory=dict)
    pay: Mapping[str, float] = field(default_factory=dict)  # where it differs from the study's
    weight: float | None = None


@dataclass(frozen=True)
class Study:
    """All that a study's file says."""

    name: str
    version: int
    title: str
    information: str
    consent: tuple[str, ...]
    contact: str
    parts: Mapping[str, Part]
    games: int
    pay: Pay
    screening: Screening | None = None
    assignment: str = "balanced"
    seed: int = 0
    thanks: str = "Thank you for taking part."

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise UserError(f"name={self.name}: must be of letters, digits and underscores")
        check_counts(self, ("version", "games"))
        check_counts(self, ["seed"], 0)
        check_choices(self, "", assignment=HOW)
        for name in ("title", "information", "contact"):
            if not getattr(self, name).strip():
                raise UserError(f"{name} is empty: people have to be told. Write it in the study's file.")
        if not self.consent:
            raise UserError("consent is empty: give at least one statement that people agree to")
        shares(self.parts, "parts")
        for name, part in self.parts.items():
            shares(part.conditions, f"parts.{name}.conditions")
            self.pay_in(name)

    def pay_in(self, part: str) -> Pay:
        """Returns what is paid in a part."""
        pay = make(Pay, {**asdict(self.pay), **self.parts[part].pay}, f"parts.{part}.pay")
        return replace(pay, currency=self.pay.currency)

    @property
    def digest(self) -> str:
        """Digest of all that the file says: people agree to the text that they were shown, and to no other."""
        return digest(asdict(self))

    @property
    def blanks(self) -> list[str]:
        """The places that are still to be filled in."""
        return BLANK.findall("\n".join((self.title, self.information, self.contact, *self.consent, self.thanks)))


def shares(weighed: Mapping[str, Any], where: str) -> dict[str, float]:
    """Returns the share of each by name. UserError unless no weight is given, or all, which add up to 1."""
    if not weighed:
        raise UserError(f"{where} is empty: give at least one")
    given = {name: each.weight for name, each in weighed.items()}
    if all(weight is None for weight in given.values()):
        return dict.fromkeys(given, 1 / len(given))
    if missing := [name for name, weight in given.items() if weight is None]:
        raise UserError(f"{where}.{missing[0]}.weight is missing: give all weights or none")
    found = {name: float(weight) for name, weight in given.items() if weight is not None}
    if any(not weight > 0 for weight in found.values()) or not math.isclose(sum(found.values()), 1, abs_tol=1e-6):
        each = " + ".join(f"{weight:g}" for weight in found.values())
        raise UserError(
            f"{where}: the weights {each} add up to {sum(found.values()):g}; must be above 0 and add up to 1"
        )
    return found


def pick(
    weights: Mapping[str, float], own: Mapping[str, int], every: Mapping[str, int], how: str, rng: np.random.Generator
) -> str:
    """Draws a name. `balanced`: one that this person, then that all, had least often for its weight."""
    names = list(weights)
    if how == "random":
        return names[int(rng.choice(len(names), p=[weights[name] / sum(weights.values()) for name in names]))]
    had = {n: (own.get(n, 0) / weights[n], every.get(n, 0) / weights[n]) for n in names}
    least = [name for name in names if had[name] == min(had.values())]
    return least[int(rng.integers(len(least)))]


def read_study(given: str) -> Study:
    """Reads a study: a name in conf/study_page, or a YAML file."""
    path = FOLDER / f"{given}.yaml" if NAME.fullmatch(given) and not Path(given).is_file() else Path(given)
    if not path.is_file():
        known = [shipped.stem for shipped in FOLDER.glob("*.yaml")]
        near = nearest(given, known)
        raise UserError(f"study={given}: there is no such file{f'; {near}' if near else ''}. Name a YAML file.")
    data = read_yaml(path)
    with prefixed(f"{path}: "):
        return make(Study, data, "study")


def study_folder(runs: str | Path, name: str, simulated: bool) -> Path:
    """The folder of a study's games; those of programs have another."""
    return Path(runs) / f"study-{name}{'-simulated' if simulated else ''}"


def to_json(study: Study) -> str:
    """The study as text, equal for equal studies."""
    return json.dumps(asdict(study), sort_keys=True, ensure_ascii=False)


def from_json(text: str) -> Study:
    """The inverse of `to_json`."""
    return make(Study, json.loads(text), "study")
