"""Makes dataclasses of plain settings, with every value checked against its annotation."""

import dataclasses
import importlib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from marl.common.errors import LARGEST, UserError, check_range, check_sizes, check_temperature
from marl.common.secrets import redacted
from marl.losses import READS, Loss, needs, with_parts
from marl.rollout.cast import RoleConfig

T = TypeVar("T")
# Parts of a batch that a learner does not make; losses that need them are dropped.
LACKS = {"filtered_bc": ("advantages", "returns", "samples"), "pikl": ("advantages",)}
WORDS = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class SeedsConfig:
    """Seeds of parts of training that are not to follow from `seed`."""

    games: int | None = None
    sampling: int | None = None
    shuffling: int | None = None

    def __post_init__(self) -> None:
        check_range(self, "seeds", "[0, inf), or null", *vars(self))


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation games: `games` of them after `every` iterations (0: only at the end), and `final_games` at the end.

    `env`: game settings that differ from training. `cast`: who plays, where that differs.
    """

    every: int = 5
    games: int = 128
    final_games: int = 1000
    temperature: float = 1.0
    seed: int = 7
    env: Mapping[str, Any] = field(default_factory=dict)
    cast: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_range(self, "eval", "[0, inf)", "every", "games", "seed")
        check_range(self, "eval", "[1, inf)", "final_games")
        check_temperature(self.temperature, "eval.temperature")

    def evaluation_cast(self, cast: Mapping[str, RoleConfig]) -> dict[str, RoleConfig]:
        """Returns who plays in evaluation, given who plays in training."""
        settings = {role: dataclasses.asdict(config.without_pool()) for role, config in cast.items()}
        for role, changes in self.cast.items():
            settings[role] = {**settings.get(role, {}), **changes}
        found = cast_of(settings, "eval.cast")
        for role, config in found.items():
            if config.pool:
                raise UserError(f"eval.cast.{role}.pool={config.pool}: past selves play in training only. Leave it out")
        return found


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Returns a configuration as ordinary dicts and lists, resolved."""
    container = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(container, dict)
    return {str(k): v for k, v in container.items()}


def cast_of(settings: Mapping[str, Any], where: str = "cast") -> dict[str, RoleConfig]:
    """Returns who plays each role, from the settings `cast.ROLE.*`."""
    return {role: make(RoleConfig, config, f"{where}.{role}") for role, config in settings.items()}


def terms(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Builds the named terms of `reward` or `loss`, each from its `_target_`. A term that is null is left out."""
    return {name: _term(fields, where, name) for name, fields in settings.items() if fields is not None}


def losses_of(settings: Mapping[str, Any]) -> dict[str, Loss]:
    """Builds the losses that this learner can take."""
    losses = with_parts(terms(settings["loss"], "loss"))
    lacks = LACKS.get(settings["algo"]["kind"], ())
    if settings["algo"].get("advantage", "gae") != "gae":  # no critic
        lacks = ("returns",)
    return {name: loss for name, loss in losses.items() if not any(needs(loss, what) for what in lacks)}


def _term(fields: Any, where: str, name: str) -> Any:
    if not isinstance(fields, Mapping) or not isinstance(fields.get("_target_"), str):
        given = _given(f"{where}.{name}", fields)
        raise UserError(f"{given} has no _target_: give the whole term, as conf/{where}/default.yaml does")
    module, _, called = fields["_target_"].rpartition(".")
    setting = f"{where}.{name}._target_={fields['_target_']}"
    try:
        kind = getattr(importlib.import_module(module), called)
    except (ImportError, AttributeError, TypeError, ValueError, SyntaxError) as error:
        absent = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        if absent or not isinstance(error, ImportError | SyntaxError):
            raise UserError(f"{setting}: there is no such class. Is its folder on PYTHONPATH?") from error
        raise UserError(f"{setting}: {module} cannot be imported: {error}. Correct its file.") from error
    has: set[str] = set()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        has = {f.name for f in dataclasses.fields(kind)} | set(dir(kind))
    # A loss says what it reads of the model's outputs; a reward reads the whole episode.
    if "weight" not in has or ("reads" in has) != (where == "loss"):
        needs = "the fields weight and reads" if where == "loss" else "a field weight, and no reads"
        raise UserError(f"{setting} is no {where}. Name a dataclass with {needs}.")
    term = make(kind, {k: v for k, v in fields.items() if k != "_target_"}, f"{where}.{name}")
    if where == "loss":
        if term.weight < 0:
            raise UserError(
                f"loss.{name}.weight={term.weight:g}: would learn the opposite; must be 0 (measured only) or above"
            )
        if not isinstance(term.reads, str) or term.reads not in READS:
            raise UserError(f"loss.{name}.reads={term.reads!r}: must be one of {', '.join(READS)}")
    return term


def make(kind: type[T], settings: Any, where: str) -> T:
    """Builds a dataclass from plain settings, nested ones too. UserError for a value that its annotation excludes."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    hints, known = typing.get_type_hints(kind), {f.name for f in fields}
    if not isinstance(settings, Mapping):
        raise UserError(f"{_given(where, settings)}: must be settings of {kind.__name__}: {', '.join(sorted(known))}")
    for name in settings:
        if name not in known:
            raise UserError(f"{where}.{name} is no setting of {kind.__name__}; known: {', '.join(sorted(known))}")
    for f in fields:
        if f.default is f.default_factory is dataclasses.MISSING and f.name not in settings:
            raise UserError(f"{where}.{f.name} is missing. Give it a value: {kind.__name__} has no default for it.")
    return kind(**{name: _value(hints[name], value, f"{where}.{name}") for name, value in settings.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    """Returns a setting's value as its annotation has it."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in typing.get_args(hint):
            return None
        (hint,) = (h for h in typing.get_args(hint) if h is not type(None))
        origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return make(hint, value, where)
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise UserError(f"{_given(where, value)}: must be a group of settings, as in {{KEY: VALUE}}")
        of_each = typing.get_args(hint)[1]
        return {key: _value(of_each, each, f"{where}.{key}") for key, each in value.items()}
    if origin in (tuple, Sequence):
        if not isinstance(value, list | tuple):
            raise UserError(f"{_given(where, value)}: must be a list")
        if origin is Sequence:
            return value
        of_each = typing.get_args(hint)[0]
        return tuple(_value(of_each, each, f"{where}[{i}]") for i, each in enumerate(value))
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(value) <= LARGEST:
            raise UserError(f"{where}={value}: must be a number from {-LARGEST:g} to {LARGEST:g}")
        return float(value)
    if hint in WORDS and (not isinstance(value, hint) or (hint is int and isinstance(value, bool))):
        raise UserError(f"{_given(where, value)}: must be {WORDS[hint]}")
    if hint is int:
        check_sizes(value, where)
    return value


def _given(name: str, value: Any) -> str:
    """Returns NAME=VALUE, without what might be a secret."""
    return redacted([f"{name}={value}"])
