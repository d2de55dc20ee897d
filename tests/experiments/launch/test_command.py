"""The command line on a toy configuration: what runs, what is refused and how, and what is left on disk."""

import functools
import importlib
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from experiments.launch.command import command
from experiments.launch.overrides import MAY_BE_NULL, Checker, Plan, wrong_kind
from experiments.setup.checks import check_job
from marl.common.errors import UserError

ROOT = Path(__file__).resolve().parents[3]


def module_of(command: str) -> str:
    """Returns the module of a command: studies have a folder of their own."""
    folder = "experiments.studies" if (ROOT / "experiments" / "studies" / f"{command}.py").exists() else "experiments"
    return f"{folder}.{command}"


FILES = {
    "__init__.py": "",
    "hydra_settings.yaml": (ROOT / "conf/hydra_settings.yaml").read_text(),
    "train.yaml": """
defaults: [_self_, hydra_settings, model: tiny, optional reward/critic: null, ablation: none, optional sweep: null]
seed: 0
note: null
label: run
arm: custom
sizes: [8, 8]
verbose: false
reward: {speaking: {weight: 0.5, listeners: others}}
loss: {listening: {weight: 1}}
double: ${seed}
""",
    "typed.yaml": "defaults: [toy_schema, _self_, hydra_settings]\nweight: 0.5\n",
    "broken.yaml": "defaults: [_self_, hydra_settings]\nname: ${nothing.here}\n",
    "planner/pikl.yaml": "lambdas: [1]\n",
    "model/tiny.yaml": "layers: 2\n",
    "model/hf.yaml": "name: ???\n",
    "reward/critic/own.yaml": "size: 1\n",
    "ablation/none.yaml": "# @package _global_\n",
    "ablation/full.yaml": "# @package _global_\narm: full\nreward: {speaking: {weight: 1.0}}\n",
    "ablation/no_listening.yaml": "# @package _global_\nloss: {listening: {weight: 0}}\n",
    "sweep/arms.yaml": """# @package _global_
hydra: {mode: MULTIRUN, sweeper: {params: {ablation: "none,full", seed: "0,1"}}}
""",
    "sweep/bad.yaml": """# @package _global_
hydra: {mode: MULTIRUN, sweeper: {params: {ablation: "none,fulll"}}}
""",
}


@dataclass
class Typed:
    weight: float = 0.0


ConfigStore.instance().store(name="toy_schema", node=Typed)


@pytest.fixture(scope="module", autouse=True)
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An importable package `toy_conf`."""
    root = tmp_path_factory.mktemp("toy")
    for name, text in FILES.items():
        path = root / "toy_conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    sys.path.insert(0, str(root))
    yield root
    sys.path.remove(str(root))


@pytest.fixture(scope="module", autouse=True)
def composed_once() -> Iterator[None]:
    """Composes each choice of files once for all tests, since that takes a fifth of a second; nobody changes it."""

    @functools.cache
    def composed(package: str, name: str, *lines: str) -> DictConfig:
        return compose(name, list(lines), return_hydra_config=True)

    def again(name: str, lines: list[str], return_hydra_config: bool) -> DictConfig:
        return composed(str(GlobalHydra.instance().config_loader().get_search_path()), name, *lines)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.launch.overrides.compose", again)
        yield


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str
    jobs: list[DictConfig]
    ended: list[list[Path]]  # what each sweep ended with


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator["Cli"]:
    monkeypatch.chdir(tmp_path)
    yield Cli(monkeypatch, capsys)
    assert list(tmp_path.iterdir()) == [], "Hydra left something behind"


class Cli:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *arguments: str, config: str = "train") -> Result:
        jobs: list[DictConfig] = []
        ended: list[list[Path]] = []

        def task(cfg: DictConfig) -> Path:
            jobs.append(cfg)
            if cfg.get("seed") == 7:
                raise UserError("seed 7 is unlucky:\n   choose another one.")
            if cfg.get("seed") == 8:
                raise RuntimeError("boom")
            if cfg.get("seed") == 11:
                raise KeyboardInterrupt
            if cfg.get("seed") == 12:
                warnings.warn("a sentence", stacklevel=1)
            if cfg.get("seed") == 9:
                OmegaConf.merge(OmegaConf.structured(Typed), {"weight": "abc"})
            return Path(f"run-{cfg.get('seed')}")

        def after(folders: list[Path]) -> None:
            ended.append(folders)
            if Path("run-99") in folders:
                raise UserError("there is no room:\n   make some.")

        self.monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        self.capsys.readouterr()
        status = 0
        try:
            command(config, package="toy_conf", implies={"note": "ablation=full"}, after=after)(task)()
        except SystemExit as leaving:
            status = int(leaving.code or 0)
        captured = self.capsys.readouterr()
        return Result(status, captured.out, captured.err, jobs, ended)


# ---- what runs -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("overrides", "weight"),
    [
        ([], 0.5),
        (["note=data"], 1.0),  # by the toy command, `note` implies ablation=full
        (["note=null"], 0.5),
        (["note=data", "ablation=none"], 0.5),
        (["-m", "note=data", "ablation=none"], 0.5),
    ],
)
def test_a_setting_can_bring_a_choice_with_it(cli: Cli, overrides: list[str], weight: float) -> None:
    [cfg] = cli(*overrides).jobs
    assert cfg.reward.speaking.weight == weight


def test_a_run_gets_the_composed_configuration(cli: Cli) -> None:
    result = cli("seed=3", "+extra=1", "~loss.listening", "label=a-b", "note=2", "sizes=[1]")
    assert (result.status, result.err, result.out) == (0, "", "")
    [cfg] = result.jobs
    assert OmegaConf.to_container(cfg, resolve=True) == {
        "seed": 3,
        "arm": "full",
        "note": 2,
        "label": "a-b",
        "sizes": [1],
        "verbose": False,
        "reward": {"speaking": {"weight": 1.0, "listeners": "others"}},
        "loss": {},
        "double": 3,
        "model": {"layers": 2},
        "extra": 1,
    }


def test_called_with_a_configuration_it_is_just_the_task() -> None:
    main = command("train", package="toy_conf")(lambda cfg: {"seed": cfg.seed})
    assert main(OmegaConf.create({"seed": 4})) == {"seed": 4}


def arms(result: Result) -> list[tuple[int, float, float]]:
    return [(c.seed, c.reward.speaking.weight, c.loss.listening.weight) for c in result.jobs]


def test_warnings_are_sentences(cli: Cli) -> None:
    assert cli("seed=12").err == "a sentence\n"


def test_sweeps_run_the_product_of_all_choices(cli: Cli) -> None:
    result = cli("-m", "ablation=none,full", "seed=range(1,3)", "label=x")
    assert result.status == 0
    assert arms(result) == [(1, 0.5, 1), (2, 0.5, 1), (1, 1.0, 1), (2, 1.0, 1)]


def test_a_sweep_ends_with_what_its_jobs_made(cli: Cli) -> None:
    assert cli("-m", "seed=2,1").ended == [[Path("run-2"), Path("run-1")]]
    assert cli("seed=2").ended == []  # no sweep
    result = cli("-m", "seed=98,7,99")  # the second job fails; the others still end the sweep
    assert result.ended == [[Path("run-98"), Path("run-99")]] and result.status == 1
    assert result.err.splitlines()[1:] == ["there is no room: make some.", "Failed jobs: 1 (seed=7)."]
    assert cli("-m", "seed=7").ended == []
    assert cli("-m", "seed=99").status == 1


def test_flags_may_stand_between_settings(cli: Cli) -> None:
    assert arms(cli("seed=1,2", "-m", "ablation=full")) == [(1, 1.0, 1), (2, 1.0, 1)]


def test_a_deletion_holds_in_every_job_of_a_sweep(cli: Cli) -> None:
    result = cli("-m", "~loss.listening", "seed=0,1")
    assert [(c.seed, dict(c.loss)) for c in result.jobs] == [(0, {}), (1, {})]


def test_a_sweep_preset_needs_no_flag_and_yields_to_the_command_line(cli: Cli) -> None:
    assert arms(cli("sweep=arms")) == [(0, 0.5, 1), (1, 0.5, 1), (0, 1.0, 1), (1, 1.0, 1)]
    assert arms(cli("sweep=arms", "seed=5")) == [(5, 0.5, 1), (5, 1.0, 1)]
    assert arms(cli("sweep=arms", "seed=5,6", "ablation=no_listening")) == [(5, 0.5, 0), (6, 0.5, 0)]


def test_hydras_own_flags_still_work(cli: Cli) -> None:
    result = cli("--cfg", "job", "seed=3")
    assert result.status == 0 and "seed: 3" in result.out and result.jobs == []
    assert "name: ???" in cli("--cfg", "job", "model=hf").out
    assert cli("--cfg", "job", "ablation=ful").err.startswith("ablation=ful is not an option")
    assert cli("--cfg", "job", "seed=1,2").err == "seed=1,2 lists several values; add -m to run them all.\n"
    assert cli("--cfg", "job", "-p", "model").out == "layers: 2\n\n"
    assert cli("--help").status == 0


# ---- what is refused -----------------------------------------------------------------------------------------------

REFUSED = {
    "reward.speeking.weight=1": "reward.speeking.weight is not a setting; the nearest is reward.speaking.weight.",
    "layers=3": "layers is not a setting; the nearest is model.layers.",
    "ablaton=full": "ablaton is not a setting; the nearest is ablation.",
    "reward/critik=own": "reward/critik is not a setting; the nearest is reward/critic.",
    "~loss.listenin": "loss.listenin is not a setting; the nearest is loss.listening",
    "note.size=1": "note.size is not a setting; ",
    "hydra.launcher.foo=3": "hydra.launcher.foo is not a setting; the nearest are hydra.launcher, hydra/launcher.",
    "reward={speeking:{weight:1}}": "reward.speeking is not a setting; the nearest is reward.speaking.",
    "reward.mine={_target_:a.B,weight:1}": "reward.mine is not a setting. Add a term with a plus sign: +reward.mine=",
    "loss.mine={weight:1}": "loss.mine is not a setting; the nearest are ",
    "~seed": "~seed cannot be left out: give it a value, as in seed=VALUE.",
    "~model": "~model cannot be left out: give it a value, as in model=VALUE.",
    "qqqqqq=1": "qqqqqq is not a setting; --cfg job lists them all.",
    "model.name=x": "model.name is not a setting here; model=hf has it.",
    "hydra.launcher.n_jobs=2": "hydra.launcher.n_jobs is not a setting here; hydra/launcher=joblib has it.",
    "planner=pikl": "planner=pikl: planner is for other commands, and train reads none.",
    "+planner=pikl": "+planner=pikl: planner is for other commands, and train reads none.",
    "ablation=ful": "ablation=ful is not an option of ablation; the nearest is full.",
    "ablation=xyz": "ablation=xyz is not an option of ablation; there are full, no_listening, none.",
    "ablation=null": "ablation=null does not fit: choose one of full, no_listening, none.",
    "reward.speaking.weight=abc": "reward.speaking.weight=abc does not fit: reward.speaking.weight is a number.",
    "seed=null": "seed=null does not fit: seed is never null.",
    "loss.listening=0": "loss.listening=0 does not fit: loss.listening is a group of settings (weight).",
    "loss.listening=null": "loss.listening=null does not fit: loss.listening is a group of settings (weight). Leave it "
    "out with ~loss.listening.",
    "+seed=1": "+seed=1: seed is there already. Leave out the plus sign.",
    "+ablation=full": "+ablation=full don't go together: Multiple values for ablation.",
    "model=hf": "model.name has to be set: add model.name=VALUE.",
    "label=${nowhere}": "label: Interpolation key 'nowhere' not found",
    "seed=0,1": "seed=0,1 lists several values; add -m to run them all.",
    "hello": "hello is not a setting: write KEY=VALUE",
    "a b=1": "a b=1 is not a setting: write KEY=VALUE",
    "label=(": "label=( is not a setting: write KEY=VALUE",
    "--sed=1": "Unrecognized arguments: --sed=1; settings are written KEY=VALUE",
    "hydra.jobb.name=x": "hydra.jobb.name is not a setting; the nearest is hydra.job.name.",
}


@pytest.mark.parametrize("argument", REFUSED)
def test_a_mistake_is_one_sentence_and_status_2(cli: Cli, argument: str) -> None:
    result = cli(argument)
    assert result.err.startswith(REFUSED[argument]), result.err
    assert result.err.count("\n") == 1
    assert (result.status, result.out, result.jobs) == (2, "", [])


def plan(command: str, *arguments: str) -> Plan:
    """Returns what one of the project's own commands would run."""
    overrides = [argument for argument in arguments if argument != "-m"]
    with initialize_config_module("conf", version_base="1.3"):
        return Checker(command, check_job if command == "train" else None).plan(overrides, "-m" in arguments)


def test_a_setting_of_an_adapter_where_there_is_none_names_the_way() -> None:
    """The refusal prints a setting that works, and a misspelt name is still called unknown."""
    given = ["model=hf", "model.name=x"]
    said = "model.lora is null here. Set it as a whole: 'model.lora={rank: 8}'."
    with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
        plan("train", *given, "model.lora.rank=8")
    with pytest.raises(UserError, match=r"^model\.lora\.rnk is not a setting; the nearest "):
        plan("train", *given, "model.lora.rnk=8")
    assert plan("train", *given, "model.lora={rank: 8}").config.model.lora == {"rank": 8}
    assert plan("train", "model=smollm2", "model.lora.rank=8").config.model.lora.rank == 8


def test_a_setting_of_ones_own_term_that_it_was_not_given_needs_a_plus_sign() -> None:
    term = "+reward.mine={_target_: mine.Mine, weight: 0.5}"
    said = "reward.mine was given without size. If mine.Mine has it, add a plus sign: +reward.mine.size=2"
    with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
        plan("train", term, "reward.mine.size=2")
    with pytest.raises(UserError, match=r"^reward\.mine\.wieght is not a setting; the nearest is reward\.mine\.weight"):
        plan("train", term, "reward.mine.wieght=2")
    assert plan("train", term, "+reward.mine.size=2").config.reward.mine.size == 2
    assert plan("train", term, "+reward.mine.weight=2").config.reward.mine.weight == 2


def test_a_name_under_a_list_is_refused() -> None:
    with pytest.raises(UserError, match=r"^players\.0 is not a setting; the nearest is players"):
        plan("evaluate", "players.0=base")
    with pytest.raises(UserError, match=r"^base\.lessons\.x is not a setting; the nearest is base\.lessons"):
        plan("train", "base.lessons.x=1")


def test_a_setting_that_ones_own_term_was_given_can_be_swept(cli: Cli) -> None:
    result = cli("-m", "+reward.mine={_target_: mine.Mine, weight: 0.5}", "reward.mine.weight=0,2")
    assert (result.err, [job.reward.mine.weight for job in result.jobs]) == ("", [0, 2])


def test_choices_that_exclude_each_other_are_named() -> None:
    with pytest.raises(UserError, match=r"^loss=plan and algo=pikl don't go together: Multiple values for planner@"):
        plan("train", "loss=plan", "algo=pikl")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-m", "ablation=none,ful", "seed=0,1"], "ablation=ful is not an option of ablation; the nearest is full."),
        (["-m", "reward.speaking.weight=0,abc"], "reward.speaking.weight=abc does not fit"),
        (["-m", "seed=0", "model=tiny,hf"], "model.name has to be set"),
        (["-m", "seed=interval(0,1)"], "seed=interval(0,1) names no values"),
        (["sweep=bad"], "ablation=fulll is not an option of ablation; the nearest is full."),
        (["sweep=arms", "seed=0,x"], "seed=x does not fit: seed is a number."),
    ],
)
def test_every_choice_of_a_sweep_is_checked_before_the_first_job(cli: Cli, arguments: list[str], sentence: str) -> None:
    result = cli(*arguments)
    assert result.err.startswith(sentence), result.err
    assert (result.status, result.err.count("\n"), result.jobs) == (2, 1, [])


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        (["ablation=game_only", "reward={speaking:{weight:2}}"], "ablation=game_only sets reward.speaking.weight=0"),
        (["-m", "ablation=full,no_speaking", "reward.speaking.weight=0.5,2"], "ablation=no_speaking sets"),
        (["ablation=full", "~loss.listening", "loss.kl.weight=0.2"], ""),
        (["sweep=among_us_iterated", "ablation=game_only", "seed=1", "reward.speaking.weight=1"], ""),  # arm=iterated
        (["ablation=game_only", "reward.speaking.weight=2", "arm=mine"], ""),
        (["ablation=game_only", "reward.speaking.weight=0", "loss.kl.weight=0.3"], ""),
        (
            ["-m", "ablation=none,no_speaking", "algo=ppo,pikl"],
            "ablation=no_speaking names an arm of algo=ppo, and algo",
        ),
        (["ablation=no_listening", "algo=pikl", "arm=mine"], ""),
    ],
)
def test_an_arm_is_what_its_name_says(arguments: list[str], refused: str) -> None:
    if not refused:
        assert plan("train", *arguments)
        return
    with pytest.raises(UserError, match=re.escape(refused)):
        plan("train", *arguments)


@pytest.mark.parametrize("arguments", [["-m", "seed=0,1"], ["-m", "seed=0"], ["sweep=arms"]])
def test_a_sweep_under_torchrun_is_refused(cli: Cli, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = cli(*arguments)
    assert result.err.startswith("This is a sweep") and "Give each run a torchrun command of its own" in result.err
    assert (result.status, result.err.count("\n"), result.jobs) == (2, 1, [])


def test_one_run_under_torchrun_is_no_sweep(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(cli("seed=1").jobs) == len(cli("sweep=arms", "hydra.mode=RUN").jobs) == 1


def test_structured_configurations_name_setting_and_value(cli: Cli) -> None:
    assert cli("weight=3", config="typed").jobs[0].weight == 3.0
    result = cli("weight=abc", config="typed")
    assert result.status == 2 and result.err == "weight=abc does not fit: weight is a number.\n"
    result = cli("wieght=1", config="typed")
    assert result.status == 2 and result.err == "wieght is not a setting; the nearest is weight.\n"


def test_a_mistake_in_the_configuration_itself_is_named(cli: Cli) -> None:
    result = cli(config="broken")
    assert result.status == 2 and result.err == "name: Interpolation key 'nothing.here' not found.\n"


# ---- what fails in a job -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "arguments",
    [
        ("-m", "seed=7,8", "+model.api_key='27182818 and 27182818'", "label=x"),  # launched, and both jobs fail
        ("-m", "seed=7", "+model.token=27182818a,27182818b", "label='a b=c'"),
        ("+model.api_key=27182818,b",),
        ("+model.api_key=27182818 {",),
        ("model.layers={password: 27182818}",),
        ("seed={password: 27182818}",),
    ],
)
def test_what_might_be_a_secret_is_not_said(cli: Cli, arguments: list[str]) -> None:
    done = cli(*arguments)
    said = done.out + done.err
    assert done.status and "27182818" not in said


def test_bad_input_found_by_the_task_is_one_sentence_and_status_1(cli: Cli) -> None:
    result = cli("seed=7")
    assert (result.status, result.err) == (1, "seed 7 is unlucky: choose another one.\n")
    result = cli("seed=9")
    assert (result.status, result.err) == (1, "weight: Value 'abc' of type 'str' could not be converted to Float.\n")


def test_our_own_mistakes_come_with_a_traceback(cli: Cli) -> None:
    result = cli("seed=8")
    assert result.status == 1 and "Traceback" in result.err and result.err.rstrip().endswith("RuntimeError: boom")


def test_full_errors_on_demand(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    result = cli("seed=7")
    assert result.status == 1 and result.err.startswith("Traceback") and "unlucky" in result.err
    with pytest.raises(UserError, match="sedd is not a setting"):
        cli("sedd=7")


def test_a_sweep_with_full_errors_has_its_last_word_too(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    result = cli("-m", "seed=6,7,10")
    assert ([cfg.seed for cfg in result.jobs], result.status) == ([6, 7, 10], 1)
    assert "seed=7: Traceback" in result.err and result.err.endswith("Failed jobs: 1 (seed=7).\n")


def test_a_failed_job_of_a_sweep_surfaces_and_the_others_go_on(cli: Cli) -> None:
    result = cli("-m", "seed=6,7,8,10")
    assert ([cfg.seed for cfg in result.jobs], result.status) == ([6, 7, 8, 10], 1)
    assert "seed=7: seed 7 is unlucky: choose another one.\n" in result.err
    assert "seed=8: Traceback" in result.err and "RuntimeError: boom" in result.err
    assert result.err.endswith("Failed jobs: 2 (seed=7; seed=8).\n")


def test_failed_jobs_are_named_by_what_tells_them_apart(cli: Cli) -> None:
    result = cli("-m", "label=x", "ablation=none,full", "seed=7", "note=3")
    assert result.err.startswith("ablation=none: seed 7 is unlucky: choose another one.\nablation=full: the same.\n")
    assert result.err.endswith("Failed jobs: 2 (ablation=none; ablation=full).\n")
    assert cli("-m", "label=x,y", "seed=7,9").err.count("seed 7 is unlucky") == 2  # another error stands between
    assert cli("-m", "label=x", "seed=7").err.endswith("Failed jobs: 1 (label=x seed=7).\n")  # nothing is swept


def test_an_interrupted_command_says_how_to_go_on(cli: Cli) -> None:
    assert cli("seed=11").status == 130
    result = cli("-m", "seed=6,11,12")
    assert [cfg.seed for cfg in result.jobs] == [6, 11] and result.ended == [] and result.status == 130
    assert result.err == "Interrupted. The same command goes on from what is there.\n"


# ---- the parts -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("default", "value", "kind"),
    [
        (1, 0.5, ""),
        (0.5, 1, ""),
        (0.5, None, ""),
        (0.5, "${other}", ""),
        (0.5, "1", "a number"),
        (0.5, [1], "a number"),
        (True, 1, "true or false"),
        (1, True, "a number"),
        (None, "anything", ""),
        ("text", 5, ""),
        (OmegaConf.create({"a": 1}), {"a": 2}, ""),
        (OmegaConf.create({"a": 1, "b": 1}), None, "a group of settings (a, b)"),
        (OmegaConf.create([1]), [2], ""),
    ],
)
def test_kinds_of_value(default: object, value: object, kind: str) -> None:
    assert wrong_kind(default, value) == kind


@pytest.mark.parametrize("closed", ["stdout", pytest.param("stderr", marks=pytest.mark.slow)])
def test_a_closed_pipe_does_not_end_the_run(toy: Path, tmp_path: Path, closed: str) -> None:
    """Runs go on to their end if the reader of stdout or stderr leaves, as in `... | head -1`."""
    (tmp_path / "app.py").write_text(
        "from pathlib import Path\nfrom experiments.launch import command, terminal\n\n\n"
        "@command.command('train', package='toy_conf')\n"
        "def main(cfg):\n"
        "    for _ in range(3):\n        terminal.say('to stdout')\n        terminal.say_error('to stderr')\n"
        "    Path('end').touch()\n\n\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    environment = {"PYTHONPATH": f"{ROOT}:{toy}", "PYTHONDONTWRITEBYTECODE": "1", "PATH": "/usr/bin:/bin"}
    reader, writer = os.pipe()
    os.close(reader)
    kept = "stderr" if closed == "stdout" else "stdout"
    done = subprocess.run(
        [sys.executable, "app.py"], cwd=tmp_path, env=environment, text=True, timeout=120,
        **{closed: writer, kept: subprocess.PIPE},
    )  # fmt: skip
    os.close(writer)
    assert done.returncode == 0 and (tmp_path / "end").exists(), done
    assert getattr(done, kept).splitlines() == [f"to {kept}"] * 3


# ---- the project's own commands --------------------------------------------------------------------------------------
COMMANDS = sorted({path.stem for path in (ROOT / "conf").glob("*.yaml")} - {"hydra_settings"})
MANY = "bytes are too many for a name. Use 200."
LONG = "a file's name has at most 255 bytes. Shorten it."


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_short_and_says_what_settings_are(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(module_of(name))
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    module.main()
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == (module.__doc__ or "").splitlines()[0] and len(lines) < 40 and max(map(len, lines)) <= 120
    text = (ROOT / "conf" / f"{name}.yaml").read_text()
    assert sum(line.strip() in text for line in lines) >= 4 and any("--cfg job" in line for line in lines)


def test_null_is_taken_wherever_a_comment_says_what_it_means() -> None:
    """Comments such as `name: VALUE  # ...; null: ...` name the settings of commands that may be null."""
    conf = ROOT / "conf"
    texts = "\n".join(path.read_text() for path in [*conf.glob("*.yaml"), *conf.glob("bench/*.yaml")])
    said = set(re.findall(r"^(\w+): (?!null\b|\?).*#.*\bnull:", texts, flags=re.M))
    assert said == {name for name in MAY_BE_NULL if "." not in name}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("report runs=null", "runs=null does not fit: runs is never null."),
        ("report runs=[a]", "runs=['a']: must be the name of a folder"),
        ("evaluate out=5", "out=5: must be the name of a folder or file"),
        ("evaluate players=null", "players=null does not fit: players is never null."),
        ("conditions comparison=dond_pikl arms=null metrics=null", "arms=null does not fit: arms is never null."),
        ("crossplay players=[random,scripted] cells=null", "cells=null does not fit: cells is never null."),
        ("crossplay players=null", "players=None: must be a list of two to 8"),
        ("crossplay players=[/*,random]", "players=/*: must be one run's name; in runs no finished run matches"),
        ("drift select=a data.dond=5", "data.dond=5: must be the name of a folder"),
        ("crossplay data.table=[a]", "data.table=['a']: must be the name of a file"),
        ("iterations data=5", "data=5: must be the name of a folder or file"),
        (
            "frontier compare=null",  # which is not refused
            "data.dond has to be set: add data.dond=DIR, the folder of the human dialogues.",
        ),
        ("train env=null", "env=null does not fit: choose one of among_us, diplomacy, dond."),
        ("train -m tracker=jsonl,null", "tracker=null does not fit: choose one of jsonl, wandb."),
        ("train tracker=-1", "tracker=-1 does not fit: choose one of jsonl, wandb."),
        ("train tracker=[1]", "tracker=[1] does not fit: choose one of jsonl, wandb."),
        ("train ~pretrained=1", "~pretrained=1 does not fit: choose one of gemma3, hf, smollm2."),
        # lengths count bytes, and all choices of a sweep are checked before its first job
        (f"train -m name=a,'{'木' * 67}'", f"name={'木' * 60}...: 201 {MANY}"),
        (f"crossplay players=[a,b] name={'c' * 201}", f"name={'c' * 60}...: 201 {MANY}"),
        (f"evaluate players=[{'e' * 300},base]", f"players={'e' * 60}...: {LONG}"),
        (f"train init.learner={'g' * 256}", f"init.learner={'g' * 60}...: {LONG}"),
        (f"train cast.negotiator.partner='{'ä' * 128}'", f"cast.negotiator.partner={'ä' * 60}...: {LONG}"),
    ],
)
def test_bad_settings_of_commands_are_one_line(
    given: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, *words = given.split()
    monkeypatch.setattr(sys, "argv", [module, *words])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        importlib.import_module(module_of(module)).main()
    assert capsys.readouterr().err.strip() == said and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["train", "play"])
def test_human_data_bring_their_base(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "data.dond=DIR", "--cfg", "job", "-p", "base"])
    importlib.import_module(module_of(name)).main()
    assert "data: human\n" in capsys.readouterr().out
