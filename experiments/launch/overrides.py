"""The overrides of a command line, checked before anything runs."""

from __future__ import annotations

import copy
import difflib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

from hydra import initialize_config_module
from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import CompactHydraException, HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from marl.common.errors import UserError, check_places
from marl.common.secrets import told

VERSION_BASE = "1.3"


class UsageError(UserError):
    """A mistake on the command line: its text is one sentence that names the setting and the nearest valid one."""


class Where(Enum):
    """Where the jobs of a sweep run."""

    HERE = "one after another in this process"
    SIDE_BY_SIDE = "several at a time in other processes of this machine"
    SUBMITTED = "as jobs of submitit, which keep their own logs"
    ELSEWHERE = "wherever a launcher that is not ours takes them"


LAUNCHERS = {
    "hydra._internal.core_plugins.basic_launcher.BasicLauncher": Where.HERE,
    "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher": Where.SIDE_BY_SIDE,
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher": Where.SUBMITTED,
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher": Where.SUBMITTED,
}

# Of settings whose default is something those of which null is a choice too.
MAY_BE_NULL = ("compare", "minutes")

# What ~KEY may leave out: terms, players, and choices that only bring other settings. The rest always has a value.
REMOVABLE = (
    "loss.", "reward.", "cast.", "variants.", "conditions.", "tuned", "pretrained", "experiment", "ablation", "sweep",
    "hydra",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What the command line asks for: one run or a sweep, over what, and where its jobs run."""

    sweep: bool = False
    swept: tuple[str, ...] = ()  # settings of which there are several values
    where: Where = Where.HERE


# ---- before the run: is every setting a setting? -------------------------------------------------------------------
def split_arguments(argv: list[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags (`-m`, `--cfg job`, ...) and the overrides, which may stand in any order."""
    parser = get_args_parser()

    def refuse(message: str) -> None:
        raise UsageError(
            f"{message[0].upper()}{message[1:]}; settings are written KEY=VALUE, flags are listed by --help."
        )

    parser.error = refuse  # type: ignore[method-assign, assignment]
    overrides = parser.parse_intermixed_args(argv).overrides
    left = list(overrides)
    flags = [a for a in argv if not (a in left and not left.remove(a))]  # type: ignore[func-returns-value]
    return flags, overrides


def implied(overrides: list[str], implies: Mapping[str, str]) -> list[str]:
    """The choices that the overrides bring with them, less those that they make themselves."""
    given = dict(override.partition("=")[::2] for override in overrides)
    return [
        choice
        for setting, choice in implies.items()
        if given.get(setting, "null") not in ("null", "") and choice.partition("=")[0] not in given
    ]


def check_command_line(config_name: str, package: str, flags: list[str], overrides: list[str]) -> Plan:
    """Composes the configuration of every choice on the command line. Raises UsageError for the first that is wrong."""
    args = get_args_parser().parse_args(flags)
    elsewhere = args.config_path or args.shell_completion or args.info or args.experimental_rerun
    if elsewhere or args.hydra_help:  # nothing to run, or Hydra's own business
        return Plan(sweep=args.multirun)
    search = [f"hydra.searchpath=[file://{os.path.abspath(args.config_dir)}]"] if args.config_dir else []
    with initialize_config_module(package, version_base=VERSION_BASE, job_name=config_name):
        check = Checker(args.config_name or config_name, search)
        given = check.parse(overrides)
        first = [choices(o)[0] for o in given]
        cfg = check.compose(first)
        for o in given if not args.config_dir else ():
            if o.is_add() and check.is_group(o) and not o.key_or_group.startswith("hydra"):  # else it is chosen twice
                key = o.key_or_group
                raise UsageError(f"{line_of(o)}: {key} is for other commands, and {config_name} reads none.")
        listed = [o for o in given if o.is_sweep_override()]
        if args.cfg:  # only shown, so it may be incomplete
            if args.multirun or listed:
                several = f"{line_of(listed[0])} lists several values" if listed else "-m asks for a sweep"
                raise UsageError(f"--cfg shows one configuration, and {several}: leave out -m and choose one.")
            return Plan()
        sweep = args.multirun or cfg.hydra.mode == RunMode.MULTIRUN
        if sweep and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError(
                "This is a sweep (-m, or hydra.mode=MULTIRUN of a preset), and the processes of torchrun make one run "
                "together: give each run a torchrun command of its own (with hydra.mode=RUN where a preset sweeps), or "
                "sweep without torchrun, with hydra/launcher=joblib or submitit_slurm."
            )
        if listed and not sweep:
            raise UsageError(f"{line_of(listed[0])} lists several values; add -m to run them all.")
        presets = check.parse([f"{key}={value}" for key, value in (cfg.hydra.sweeper.get("params") or {}).items()])
        lists = {o.get_key_element(): choices(o) for o in [*presets, *given]}  # what is given wins over presets
        for job in jobs(lists) if sweep else [first]:
            check.job(job)
        own = lists if sweep else {o.get_key_element(): choices(o) for o in given}
        check.keep_arms(own, cfg.hydra.runtime.choices)
        if not sweep:
            return Plan()
        swept = tuple(key for key, options in lists.items() if len(options) > 1)
        where = LAUNCHERS.get(cfg.hydra.launcher.get("_target_"), Where.ELSEWHERE)
        if where is Where.SIDE_BY_SIDE and cfg.hydra.launcher.timeout is not None:
            limit = cfg.hydra.launcher.timeout
            raise UsageError(f"hydra.launcher.timeout={limit}: jobs side by side have no time limit; leave it null.")
        if where is Where.SIDE_BY_SIDE and cfg.hydra.launcher.n_jobs == 0:
            raise UsageError("hydra.launcher.n_jobs=0: must be how many jobs run at a time, or -1 for one a core.")
        for name in ("nodes", "tasks_per_node") if where is Where.SUBMITTED else ():
            if cfg.hydra.launcher[name] != 1:
                raise UsageError(
                    f"hydra.launcher.{name}={cfg.hydra.launcher[name]}: a job of a sweep is one process, so it must "
                    "be 1; several processes make one run with torchrun (experiments/CLUSTER.md)."
                )
        if str(cfg.hydra.launcher.get("_target_")).endswith(".SlurmLauncher") and shutil.which("srun") is None:
            raise UsageError(
                "hydra/launcher=submitit_slurm: this machine has no Slurm (srun is not found); start the sweep on a "
                "cluster's node, or take hydra/launcher=joblib."
            )
        return Plan(True, swept, where)


def line_of(override: Override) -> str:
    """The override as it may be shown."""
    return told([str(override.input_line)])


def choices(override: Override) -> list[str]:
    """The override, once for each value of a sweep: `seed=0,1` gives `seed=0` and `seed=1`."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    if not override.is_discrete_sweep():
        raise UsageError(f"{line_of(override)} names no values: sweep over a list, as in KEY=1,2,3.")
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def jobs(lists: Mapping[str, list[str]]) -> Iterable[list[str]]:
    """Overrides of jobs in which every choice occurs once, others at their first. `lists`: a setting's choices."""
    base = {key: options[0] for key, options in lists.items()}
    yield list(base.values())
    for key, options in lists.items():
        for option in options[1:]:
            yield list((base | {key: option}).values())


class Checker:
    """Composes configurations and says in one sentence what is wrong with the overrides."""

    def __init__(self, config_name: str, search: list[str]) -> None:
        self.config_name = config_name
        self.search = search
        self.loader: ConfigLoader = GlobalHydra.instance().config_loader()
        self.composed: dict[tuple[str, ...], DictConfig] = {}
        self.parser = OverridesParser.create(config_loader=self.loader)

    def parse(self, overrides: list[str]) -> list[Override]:
        parsed = []
        for text in overrides:
            try:
                parsed.append(self.parser.parse_override(text))
            except HydraException:
                raise UsageError(
                    f"{told([text])} is not a setting: write KEY=VALUE, and quote a value that has spaces, commas or "
                    f"brackets, as in 'name=\"a, b\"'."
                ) from None
        return parsed

    def compose(self, overrides: list[str]) -> DictConfig:
        for o in self.parse(overrides):
            if not o.is_delete() and o.value() is None and (options := self._options(o.key_or_group)):
                raise UsageError(f"{line_of(o)} does not fit: choose one of {', '.join(sorted(options))}.")
        try:
            return self._load(tuple(overrides))
        except (CompactHydraException, OmegaConfBaseException) as error:
            raise UsageError(self._explain(error, overrides)) from error

    def job(self, overrides: list[str]) -> None:
        """One job: its settings exist, have their kind of value, name files that can be there, and none is missing."""
        cfg = self.compose(overrides)
        parsed = self.parse(overrides)
        # A preset's own values set the kind; only what the command line says is compared with it.
        for override in parsed:
            key = override.key_or_group
            if override.is_delete() and not key.startswith(REMOVABLE):
                raise UsageError(f"{line_of(override)} cannot be left out: give it a value, as in {key}=VALUE.")
        values = [o for o in parsed if not self.is_group(o) and not o.is_delete() and not o.is_add()]
        before = self.compose([str(o.input_line) for o in parsed if o not in values])
        for override in values:
            key = override.key_or_group
            default = OmegaConf.select(before, key, throw_on_missing=False, throw_on_resolution_failure=False)
            wanted = wrong_kind(default, override.value())
            if override.value() is None and "." not in key and key not in MAY_BE_NULL:
                wanted = wanted or ("never null" if default is not None or OmegaConf.is_missing(before, key) else "")
            if wanted:
                raise UsageError(f"{line_of(override)} does not fit: {key} is {wanted}.")
        own = copy.deepcopy(cfg)
        with open_dict(own):
            del own["hydra"]
        HydraConfig.instance().set_config(cfg)  # for `${hydra:...}`
        try:
            missing = sorted(OmegaConf.missing_keys(own))
            settings = cast(dict[str, Any], OmegaConf.to_container(own, resolve=True))
        except OmegaConfBaseException as error:
            raise UsageError(one_line(error)) from error
        finally:
            HydraConfig.instance().cfg = None
        if missing:
            raise UsageError(f"{missing[0]} has to be set: add {missing[0]}=VALUE.")
        try:
            check_places(settings)
        except UserError as error:
            raise UsageError(str(error)) from error

    def keep_arms(self, lists: Mapping[str, list[str]], chosen: Mapping[str, str | None]) -> None:
        """Refuses values that undo what a preset of `ablation` sets, and presets with a learner that does not read what
        they set: another arm would be trained under its name. `lists`: a setting's choices; `chosen`: of groups, where
        the command line names none."""
        presets, learners = (lists.get(group) or [f"{group}={chosen.get(group)}"] for group in ("ablation", "algo"))
        if "arm" in lists or presets in (["ablation=none"], ["ablation=None"]):
            return
        for preset, learner in ((p, a) for p in presets for a in learners):
            if preset != "ablation=none" and learner not in ("algo=ppo", "algo=None"):
                raise UsageError(
                    f"{preset} names an arm of algo=ppo, and {learner} has terms of its own: leave it out, set them "
                    "(loss.NAME.weight), and give it a name, as in arm=NAME."
                )
        options = {key: self.parse(each) for key, each in lists.items() if key != "ablation"}
        every = [o for several in options.values() for o in several if not (o.is_delete() or o.is_add())]
        given = [o for o in every if isinstance(o.value(), dict) or not self.is_group(o)]
        firsts = {o.get_key_element(): str(o.input_line) for o in reversed(every) if o not in given}
        groups = list(firsts.values())
        values = [(o, key, value) for o in given for key, value in leaves(o.key_or_group, o.value())]
        if not values:
            return
        plain = self.compose([*groups, "ablation=none"])
        for preset in presets:
            cfg = self.compose([*groups, preset])
            if "arm" in cfg and cfg.arm == plain.arm:  # it is not what names the arm
                continue
            for override, key, value in values:
                without, own = (OmegaConf.select(c, key, throw_on_resolution_failure=False) for c in (plain, cfg))
                if without != own and value != own:
                    raise UsageError(
                        f"{preset} sets {key}={own}, and {override.key_or_group}={override.value()} would train "
                        f"something else under its name: leave one of them out, or give it a name, as in arm=NAME."
                    )

    def _load(self, overrides: tuple[str, ...]) -> DictConfig:
        if overrides not in self.composed:
            self.composed[overrides] = self.loader.load_configuration(
                self.config_name, [*self.search, *overrides], run_mode=RunMode.RUN, from_shell=False
            )
        return self.composed[overrides]

    def _options(self, group: str) -> list[str]:
        return self.loader.get_group_options(group, results_filter=ObjectType.CONFIG)

    def _choices_with(self, key: str) -> list[str]:
        """The choices of its group that set this."""
        group, _, inner = key.partition(".")
        repository = cast(Any, self.loader).repository
        files = {name: repository.load_config(f"{group}/{name}") for name in self._options(group)}
        return [
            f"{group}={name}"
            for name, file in files.items()
            if file and OmegaConf.select(file.config, inner if file.header.get("package") is None else key) is not None
        ]

    def is_group(self, override: Override) -> bool:
        return override.package is not None or bool(self._options(override.key_or_group))

    def _groups(self, parent: str = "") -> list[str]:
        found = self.loader.get_group_options(parent, results_filter=ObjectType.GROUP)
        names = [f"{parent}/{name}" if parent else name for name in found]
        return [g for name in names if name != "hydra" for g in (name, *self._groups(name))]

    def _needed(self, overrides: list[str]) -> list[str]:
        """Choices of which each by itself, left out, would make these overrides compose; none where one alone does not
        (as where a choice is added once more)."""

        def composes(left: list[str]) -> bool:
            try:
                return bool(self._load(tuple(left)))
            except CompactHydraException:
                return False

        found = [o for o in overrides if composes([other for other in overrides if other is not o])]
        return found if len(found) > 1 else []

    def _names(self, overrides: list[str], key: str) -> list[str]:
        """Every valid name: groups, and the dotted names of settings under the groups that were chosen."""
        groups = [str(o.input_line) for o in self.parse(overrides) if self.is_group(o) and o.key_or_group != key]
        try:
            cfg = copy.deepcopy(self._load(tuple(groups)))
        except CompactHydraException:
            cfg = copy.deepcopy(self._load(()))
        if not key.startswith("hydra"):
            with open_dict(cfg):
                del cfg["hydra"]
        return [*self._groups(), *dotted_names(cfg)]

    def _explain(self, error: Exception, overrides: list[str]) -> str:
        if isinstance(error, MissingConfigException):
            group, _, name = (error.missing_cfg_file or "").rpartition("/")
            if not group:
                return f"There is no command configuration {name!r} (flag --config-name)."
            if group == "hydra/launcher" and name.startswith("submitit"):
                return f"{group}={name} needs the extra `slurm`: pip install -e '.[slurm]' -c constraints.txt."
            options = sorted(error.options or self._options(group))
            return f"{group}={name} is not an option of {group}; {nearest(name, options, all_if_few=True)}."
        text = str(error)
        quoted = re.search(r"'([^']+)'", text)
        unknown = text.startswith(("Could not override", "Could not delete")) or "config group" in text
        if unknown and quoted and "The value of" not in text:
            key, names = quoted.group(1), self._names(overrides, quoted.group(1))
            whole = key.rpartition(".")[0]
            deleted = text.startswith("Could not delete")
            if key in names and deleted:  # Hydra takes null for nothing
                return f"{key} is null, so it is left out already: drop ~{key}."
            if key in names:  # the value is a group of settings, and one of them is new
                given = next(line_of(o) for o in self.parse(overrides) if o.key_or_group == key)
                inner = str(getattr(error.__cause__, "full_key", None) or key)
                if inner == key and self._options(key):
                    return f"{given}: {key} is for other commands, and {self.config_name} reads none."
                others = [name for name in names if name != key]
                return f"{inner} is not a setting; {nearest(inner, others)}; a plus sign adds it: +{given}."
            if whole in names and not any(name.startswith(f"{whole}.") for name in names):
                return f"{key} is not a setting: {whole} is null or a single value; give it whole, as in {whole}=VALUE."
            if key.startswith(("hydra.launcher.", "tracker.")) and whole in names:
                brings = "hydra/launcher=joblib or submitit_slurm" if key.startswith("hydra.") else "tracker=wandb"
                return f"{key} is not a setting; {nearest(key, names)}; others come with {brings}."
            term = key.startswith(("loss.", "reward.")) and key.count(".") == 1 and not deleted
            adds = f"; a plus sign adds a term: +{key}={{_target_: MODULE.CLASS, weight: 1.0}}" if term else ""
            if with_it := self._choices_with(key):
                return f"{key} is not a setting here; {' or '.join(with_it)} has it."
            return f"{key} is not a setting; {nearest(key, names)}{adds}."
        if "Could not append" in text and quoted:
            return f"{quoted.group(1)} is a setting already: write {quoted.group(1)}=VALUE, without a plus sign."
        if text.startswith("Multiple values for"):
            key = text.split()[3].rstrip(".")
            if sources := self._needed(overrides):
                return f"{' and '.join(sources)} don't go together, since each chooses {key}: leave one of them out."
            return f"{key} is chosen twice: give it once, without a plus sign."
        if isinstance(error.__cause__, OmegaConfBaseException):
            return one_line(error.__cause__)
        return one_line(error)


def wrong_kind(default: Any, value: Any) -> str:
    """What a setting is, in words, where `value` is something else; empty where it fits. `default` tells the kind."""
    if isinstance(value, str) and "${" in value:
        return ""
    if isinstance(default, DictConfig):
        return "" if isinstance(value, dict) else f"a group of settings ({', '.join(map(str, default)) or 'now empty'})"
    if value is None:
        return ""  # whether a setting may be empty is its dataclass's business
    if isinstance(default, ListConfig):
        return "" if isinstance(value, list) else "a list, as in [1,2]"
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, int | float):
        return "" if isinstance(value, int | float) and not isinstance(value, bool) and value == value else "a number"
    return ""


def leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The settings that a value gives, by their dotted names."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(f"{key}.{name}", inner)
    else:
        yield key, value


def dotted_names(cfg: DictConfig, parent: str = "") -> list[str]:
    names = []
    for key in cfg:
        name = parent + "." + str(key) if parent else str(key)
        names.append(name)
        node = cfg._get_node(key)
        if isinstance(node, DictConfig) and not (node._is_none() or node._is_missing() or node._is_interpolation()):
            names += dotted_names(node, name)
    return names


def nearest(word: str, names: Iterable[str], all_if_few: bool = False) -> str:
    """A clause with the most similar names. A word without dots is compared with last parts: `lr` finds `algo.lr`."""

    def similarity(name: str) -> float:
        compared = name if "." in word else name.rpartition(".")[2]
        return difflib.SequenceMatcher(None, word, compared).ratio()

    names = sorted(dict.fromkeys(names), key=similarity, reverse=True)
    found = [n for n in names[:3] if similarity(n) >= max(0.6, similarity(names[0]) - 0.1)]
    if found:
        return f"the nearest {'is' if len(found) == 1 else 'are'} {', '.join(found)}"
    if all_if_few:
        return "there are " + ", ".join(sorted(names))
    return "--cfg job lists them all"


def one_line(error: BaseException) -> str:
    """An exception as one sentence; OmegaConf's come with the setting's full name."""
    if not isinstance(error, OmegaConfBaseException):
        return " ".join(str(error).split())
    text = str(error).splitlines()[0].rstrip(".") + "."
    return f"{error.full_key}: {text}" if error.full_key and str(error.full_key) not in text else text
