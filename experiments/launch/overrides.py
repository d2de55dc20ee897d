"""Checks a command line before anything runs: every job of a sweep."""

import copy
import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from marl.common.errors import UserError, check_settings, nearest
from marl.common.secrets import redacted

Check = Callable[[DictConfig, Callable[..., DictConfig]], None]
MAY_BE_NULL = ("compare", "model.lora")  # settings of a command that take null, though their default is not null
# What ~KEY may leave out: terms, players, and files that only set what others define.
REMOVABLE = (
    "loss.", "reward.", "cast.", "variants.", "conditions.", "arms.", "bots.", "tuned", "pretrained", "experiment",
    "ablation", "sweep"
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """The request of a command line."""

    config: DictConfig  # of the run, or of a sweep's first job; with Hydra's own part
    jobs: list[list[str]]  # the overrides of a sweep's jobs; empty for one run
    swept: list[str]  # settings with several values


class Checker:
    """Composes configurations of a command, and says what is wrong with them. Needs `initialize_config_module`."""

    def __init__(self, config_name: str, check: Check | None = None) -> None:
        self.config_name, self.also_check = config_name, check
        self.loader = GlobalHydra.instance().config_loader()
        self.parser = OverridesParser.create(config_loader=self.loader)
        self.compose = functools.cache(self._compose)  # a composition takes a third of a second
        self.options = functools.cache(self.loader.get_group_options)

    def _compose(self, *lines: str) -> DictConfig:
        return compose(self.config_name, list(lines), return_hydra_config=True)

    def plan(self, overrides: Sequence[str], multirun: bool = False, show: bool = False) -> Plan:
        """Checks all jobs. UserError for the first mistake. `show`: plans one run, whose values may be missing."""
        given = [self.parse(text) for text in overrides]
        for each in given:
            if each.is_delete() and not each.key_or_group.startswith(REMOVABLE):
                raise UserError(f"{shown(each)} cannot be left out: give it a value, as in {each.key_or_group}=VALUE.")
        first = self.configure([choices(each)[0] for each in given])
        listed = [shown(each) for each in given if each.is_sweep_override()]
        sweep = (multirun or first.hydra.mode == RunMode.MULTIRUN) and not show
        if listed and not sweep:
            raise UserError(f"{listed[0]} lists several values; add -m to run them all.")
        if sweep and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UserError(
                "This is a sweep, and the processes of torchrun make one run. Give each run a torchrun command of its "
                "own (with hydra.mode=RUN where a preset sweeps)."
            )
        presets = (first.hydra.sweeper.get("params") or {}) if sweep else {}
        own = [str(each.input_line) for each in given if each.is_hydra_override()]
        if "submitit_folder" not in first.hydra.launcher:
            own.insert(0, "hydra.sweep.dir=.")  # else an empty folder is made
        of_jobs = [*(self.parse(f"{key}={value}") for key, value in presets.items()), *given]
        lists = {each.get_key_element(): choices(each) for each in of_jobs if not each.is_hydra_override()}
        jobs = [list(job) for job in itertools.product(*lists.values())]
        config, *_ = [self.checked([*own, *job], complete=not show) for job in jobs]
        with open_dict(config):
            config.hydra.overrides.hydra, config.hydra.overrides.task = own, jobs[0]
        return Plan(config, jobs if sweep else [], [key for key, texts in lists.items() if len(texts) > 1])

    def checked(self, job: Sequence[str], complete: bool) -> DictConfig:
        """Configures a job. UserError where settings do not fit together; where one is missing, if it is `complete`."""
        config = self.configure(job)
        if self.also_check:
            files = {text.partition("=")[0]: text for text in job if self.chooses_file(self.parse(text))}
            self.also_check(config, lambda **others: self.compose(*(files | others).values()))
        if complete:
            settings = without_hydra(config)
            for name in sorted(OmegaConf.missing_keys(settings)):
                raise UserError(f"{name} has to be set: add {name}=VALUE.")
            check_settings(OmegaConf.to_container(settings, resolve=True))
        return config

    def configure(self, job: Sequence[str]) -> DictConfig:
        """The configuration files that a job chooses, with its values. UserError where one does not exist or fit."""
        parsed = [self.parse(text) for text in job]
        config = copy.deepcopy(self.choose([each for each in parsed if self.chooses_file(each)]))
        of_files = names = named(config)
        for override in parsed:
            key, added = override.key_or_group, override.is_add()
            if self.chooses_file(override):
                continue
            if key not in names and not added:
                value = None if override.is_delete() else override.value()
                if isinstance(value, dict) and "_target_" in value:
                    raise UserError(f"{key} is not a setting. Add a term with a plus sign: +{shown(override)}")
                raise UserError(self.unknown(key, config, "VALUE" if value is None else value))
            if override.is_delete():
                parent, _, name = key.rpartition(".")
                with open_dict(config):
                    del OmegaConf.select(config, parent)[name]
                continue
            value = override.value()
            if added and of_files.get(key) is not None and not isinstance(value, dict | list):
                raise UserError(f"{shown(override)}: {key} is there already. Leave out the plus sign.")
            default = OmegaConf.select(config, key, throw_on_missing=False, throw_on_resolution_failure=False)
            wanted = "" if value is None and key in MAY_BE_NULL else wrong_kind(default, value)
            if value is None and "." not in key and names.get(key) is not None and key not in MAY_BE_NULL:
                wanted = wanted or "never null"
            if wanted:
                way = f" Leave it out with ~{key}." if value is None and key.startswith(REMOVABLE) else ""
                raise UserError(f"{shown(override)} does not fit: {key} is {wanted}.{way}")
            try:
                OmegaConf.update(config, key, value, force_add=added)
            except ConfigKeyError as error:
                raise UserError(self.unknown(str(error.full_key), config)) from error
            if added:
                names = named(config)  # what follows may set what this added
        return config

    def choose(self, files: Sequence[Override]) -> DictConfig:
        """The configuration files that are chosen. UserError where one is not there."""
        for override in files:
            value = override.value()
            if override.is_delete():
                fits = value is None or isinstance(value, str)
            else:
                fits = all(isinstance(name, str) for name in (value if isinstance(value, list) else [value]))
            if not fits:
                options = ", ".join(self.options(override.key_or_group))
                raise UserError(f"{shown(override)} does not fit: choose one of {options}.")
            if override.is_add():
                self.check_group(override)
        try:
            return self.compose(*(str(override.input_line) for override in files))
        except MissingConfigException as error:
            group, _, name = str(error.missing_cfg_file).rpartition("/")
            near = nearest(name, error.options or []) or f"there are {', '.join(error.options or [])}"
            raise UserError(f"{group}={name} is not an option of {group}; {near}.") from error
        except ConfigCompositionException as error:
            for override in files:
                self.check_group(override)
            chosen = " and ".join(shown(override) for override in files)
            raise UserError(f"{chosen} don't go together: {one_line(error)}. Leave one of them out.") from error

    def check_group(self, override: Override) -> None:
        """Refuses a choice of files that only other commands read."""
        key = override.key_or_group
        known = self.loader.compute_defaults_list(self.config_name, [], RunMode.MULTIRUN).overrides.known_choices
        if not (override.is_delete() or key in known or override.package or key.startswith("hydra")):
            raise UserError(f"{shown(override)}: {key} is for other commands, and {self.config_name} reads none.")

    def parse(self, text: str) -> Override:
        try:
            return self.parser.parse_override(text)
        except HydraException:
            quoting = "quote a value that has spaces, commas or brackets, as in 'name=\"a, b\"'"
            raise UserError(f"{redacted([text])} is not a setting: write KEY=VALUE, and {quoting}.") from None

    def chooses_file(self, override: Override) -> bool:
        """Tells whether this chooses a configuration file, or where such files are searched."""
        key = override.key_or_group
        group = override.package is not None or bool(self.options(key))
        return key == "hydra.searchpath" or (group and (override.is_delete() or not isinstance(override.value(), dict)))

    def unknown(self, key: str, config: DictConfig, value: Any = "VALUE") -> str:
        """Says of a name that is no setting which choice has it, or which names are near."""
        known, parts = config.hydra.runtime.choices, key.split(".")
        parent, _, name = key.rpartition(".")
        for group in {parts[0], "/".join(parts[:2])} & set(known):
            lines = [f"{group}={name}" for name in self.options(group)]
            if having := [line for line in lines if key in named(self.compose(line))]:
                if named(config).get(parent, "") is None:
                    return f"{parent} is null here. Set it as a whole: '{parent}={{{name}: {value}}}'."
                return f"{key} is not a setting here; {' or '.join(having)} has it."
        term = named(config).get(f"{parent}._target_")
        own = parent.startswith(REMOVABLE) and term and not str(term).startswith("marl.")
        if own and not nearest(name, OmegaConf.select(config, parent)):
            added = f"+{key}={value}"
            return f"{parent} was given without {name}. If {term} has it, add a plus sign: {redacted([added])}"
        hydras = key.startswith("hydra")
        near = nearest(key, [name for name in (*known, *named(config)) if name.startswith("hydra") == hydras])
        return f"{key} is not a setting; {near or '--cfg job lists them all'}."


def shown(override: Override) -> str:
    """The override without what might be a secret."""
    return redacted([str(override.input_line)])


def choices(override: Override) -> list[str]:
    """The override, once for each value of a sweep: `seed=0,1` gives `seed=0` and `seed=1`."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    if not override.is_discrete_sweep():
        raise UserError(f"{shown(override)} names no values: sweep over a list, as in KEY=1,2,3.")
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def wrong_kind(default: Any, value: Any) -> str:
    """The kind of a setting, in words, if `value` is something else; empty where it fits. `default` tells the kind."""
    if isinstance(default, DictConfig) and not isinstance(value, dict):
        return "" if "${" in str(value) else f"a group of settings ({', '.join(map(str, default)) or 'now empty'})"
    if value is None or "${" in str(value):
        return ""  # whether a setting may be null is for its dataclass to say
    if isinstance(default, ListConfig):
        return "" if isinstance(value, list) else "a list, as in [1,2]"
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    number = isinstance(value, int | float) and not isinstance(value, bool) and value == value
    return "a number" if isinstance(default, int | float) and not number else ""


def without_hydra(config: DictConfig) -> DictConfig:
    """A copy of the command's own settings."""
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])


def named(config: DictConfig | Mapping[Any, Any], parent: str = "") -> dict[str, Any]:
    """All settings and groups of settings by their dotted names, unresolved."""
    found: dict[str, Any] = {}
    settings: Any = OmegaConf.to_container(config) if isinstance(config, DictConfig) else config
    for key, value in settings.items():
        found |= {f"{parent}{key}": value, **(named(value, f"{parent}{key}.") if isinstance(value, dict) else {})}
    return found


def one_line(error: BaseException) -> str:
    """An exception as one sentence; OmegaConf's come with the setting's full name."""
    if not isinstance(error, OmegaConfBaseException):
        return " ".join(str(error).split())
    text = str(error).splitlines()[0].rstrip(".") + "."
    return f"{error.full_key}: {text}" if error.full_key and str(error.full_key) not in text else text
