"""Every command of the front page, docs/, the pages of results and their notes is run to its end in a small form, or
NOT_RUN says why it is not."""

from __future__ import annotations

import io
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from socket import socket

import pytest
import uvicorn
import yaml
from starlette.testclient import TestClient

import marl
from marl.common.files import csv_rows
from tests.composing import AMONG_US, DOND, SMALL
from tests.experiments.launch.test_pages import code
from tests.experiments.studies.test_frontier import TEST
from tests.experiments.test_among_us_intents import STUDY as TABLE
from tests.experiments.test_cicero import STUDY as INTENTS
from tests.experiments.test_lookahead import SMALL as LOOKAHEAD
from tests.experiments.test_press_intents import STUDY as PRESS_INTENTS
from tests.experiments.webapp.test_study import STUDY
from tests.human_dialogues import ROWS, games_of, write
from tests.marl.models import hf_tokenizer, random_lm, save
from tests.runs import without_pages

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "experiments" / "results").glob("*/*.md"))  # pages and their notes
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *RESULTS]
SHELL = ("bash", "sh", "")

NOT_RUN = {  # what a command begins with: why it is not run here
    "python -m experiments.NAME": "stands for all commands",
    "python -m experiments.gpu": "needs a GPU",
    "python -m experiments.benchmark bench=gpu": "needs a GPU",
    "make gpu": "needs a GPU",
    "python -m experiments.train env=dond model=smollm2": "fetches a pretrained model from the hub",
    "python -m experiments.train sweep=dond_smollm2": "needs a pretrained model",
    "python -m experiments.evaluate 'players=[chat,": "needs an endpoint; tests/experiments/test_chat.py has one",
    "python -m experiments.train -m sweep=dond_ablation hydra/launcher=submitit_slurm": "needs Slurm",
    "srun ": "needs Slurm",
    "first=$(scontrol": "needs Slurm",
    "torchrun": "needs GPUs; tests/experiments/launch/test_processes.py runs ranks on a CPU",
    "wandb sync": "sends runs to W&B",
    "pip install": "fetches packages",
    ". .venv/bin/activate": "enters an environment",
    "export ": "sets a key",
    "make test": "runs these tests",
    "make docs": "runs these tests",
    "make bench": "half an hour; `bench=quick` is run",
    "python -m experiments.report select='trial-*' earlier=": "tests/experiments/test_report.py publishes "
    "seeds one after another",
    "python -m experiments.studies.intents data.dond=DIR 'seeds=[0,1,2]'": "hours; the how-to's command is run",
    "python -m experiments.studies.intents data.dond=DIR env.objective=0": "minutes; the how-to's command is run",
    "python -m experiments.train ablation=full model.kind=hf": "minutes; tests/experiments/test_cicero.py runs a part",
    "python -m experiments.studies.drift 'select=[plan_both-*]'": "minutes; "
    "tests/experiments/test_cicero.py runs a part",
    "python -m experiments.studies.frontier data.dond=DIR objectives=[0]": "minutes; "
    "tests/experiments/studies/test_frontier.py runs a part",
    "make hostile": "minutes; tests/experiments/test_hostile.py runs a part",
}
MADE = {  # placeholders for a user's own files, and what the folder below has instead
    "HOST": "localhost", "/models/NAME": "model", "runs/NAME": "runs/mine", "runs/A,": "runs/mine,",
    "runs/B,": "runs/other,", "name=PATH": "name=model", "=DIR": "=dialogues",
    "dond_human-full-s0-*": "othe*",
    "seed=100 cast.": "seed=12 cast.", "ablation=full seed=100": "ablation=full seed=12",
    "arm=imposter seed=100": "arm=imposter seed=12", "seed: [33, 34]": "seed: [0, 1]",
}  # fmt: skip
FIRST = {  # placeholder -> the command of the pages that makes what it stands for
    "STUDY": "python -m experiments.lookahead",
    "RUNS": "python -m experiments.train sweep=dond_human data.dond=DIR",
    "intents-both": "python -m experiments.studies.intents data.dond=DIR",
    "press-s0": "python -m experiments.studies.press_intents",
    "among-us-intents": "python -m experiments.studies.among_us_intents",
    "web_export": "python -m experiments.web_simulate study=my_study.yaml",
    "CODE": "python -m experiments.web_export study=my_study.yaml",
    "study=load": "make negotiation",
    "best_response": "make quickstart",
    "among_us_turns": "python -m experiments.train experiment=among_us_best_response hydra.mode=RUN "
    "name=among_us_quick arm=imposter seed=100",
}
MADE_RUNS: set[tuple[Path, str]] = set()  # folder, and a command of FIRST that was run there
QUIET = ("progress=false", "threads=1")
GAMES = ("device=cpu", "games=2", "concurrency=2")
SMALLER: dict[str, tuple[str, ...]] = {
    "evaluate": (*QUIET, *GAMES),
    "talk": (*QUIET, *GAMES, "draws=1"),
    "play": ("device=cpu",),
    "studies.crossplay": (*QUIET, *GAMES),
    "studies.conditions": (*QUIET, *GAMES),
    "studies.drift": (*QUIET, *GAMES),
    "studies.gradients": (*QUIET, "device=cpu", "batches=3", "games=2", "samples=1"),
    "studies.expected": ("out=bands",),  # not into the package
    "lookahead": LOOKAHEAD,
    "benchmark": ("threads=1",),
    "web": ("device=cpu", "port=0"),
    "web_export": ("simulated=true",),  # games of people are not there
    "web_simulate": ("device=cpu", "people=2", "plays=2"),
    "studies.among_us_intents": TABLE,
    "studies.intents": (*INTENTS, "data.dond=null"),  # the dialogues here are too few
    "studies.press_intents": (*QUIET, *GAMES, *PRESS_INTENTS),
}  # fmt: skip


def typed(page: Path) -> list[str]:
    """All lines of a page that one would type: those of shell blocks, and commands within the text."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.M | re.S)
    lines = [line for kind, body in blocks if kind in SHELL for line in body.splitlines()]
    lines += [span for span in code(text) if re.match(r"(python3?\S* |marl-|make |torchrun |wandb )", span)]
    cleaned = (re.sub(r"(^|\s+)#.*", "", " ".join(line.split())).split(" && ")[-1] for line in lines)
    return [line for line in dict.fromkeys(cleaned) if line and not line.startswith("python title=")]


LINES = {line: page for page in reversed(PAGES) for line in typed(page)}  # and the first page that has it
RUN = sorted(line for line in LINES if not line.startswith(tuple(NOT_RUN)))


def page_of(line: str) -> str:
    """Names the page of a command; a page of results is named after its table."""
    page = LINES[line]
    own = {"README": page.parent.name, "notes": f"{page.parent.name}/notes"}
    return own[page.stem] if page in RESULTS else page.stem


def test_each_command_is_run_or_named_with_a_reason() -> None:
    known = ("python -m experiments.", "python -c ", "python experiments/results/", "marl-", "make ", "cp ")
    assert [line for line in RUN if not line.startswith(known)] == []
    assert [each for each in NOT_RUN if not any(line.startswith(each) for line in LINES)] == [], "no page has it"
    assert len(RUN) > 60


@pytest.fixture(scope="module")
def folder(finished: Path, bases: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to type commands in, with what the pages expect there, small, and the published data."""
    here = tmp_path_factory.mktemp("typed")
    small = (f"runs={here}/made", f"cache={bases}", "algo.iterations=1")
    other = marl.train(*(word for word in DOND if "iterations" not in word), *small, "seed=1")
    for name, made in {"mine": finished, "trial-full-s0-0": finished, "other": other}.items():
        shutil.copytree(made, here / "runs" / name)
    (here / "dialogues").mkdir()
    write(here / "dialogues", (*ROWS, *games_of(20)), test=TEST)
    (here / "dialogues/selfplay.txt").write_text("1 0 4 2 1 2\n1 4 4 1 1 2\n")
    save(here / "model", random_lm("llama", 512, 4096), hf_tokenizer())
    shutil.copytree(ROOT / "experiments/results", here / "experiments/results")
    (here / "conf").symlink_to(ROOT / "conf")
    (here / "my_study.yaml").write_text(yaml.safe_dump(STUDY))
    for page in ("term", "game", "sweeps"):
        text = (ROOT / f"docs/howto/{page}.md").read_text()
        for title, body in re.findall(r'^```\w+ title="(.+?)"\n(.*?)^```', text, re.M | re.S):
            path = here / title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(body)
    return here


def smaller(module: str, given: list[str], bases: Path) -> list[str]:
    """Makes a command small by replacing some of its settings."""
    if any(word.startswith(("data=", "data.table=", "a=")) for word in given):  # takes seconds already
        return given
    more = [*SMALLER.get(module, ())]
    if module == "train":
        more = training(" ".join(given))
        given = [word for word in given if not word.startswith(("hydra/launcher=joblib", "hydra.launcher.n_jobs="))]
    if module == "benchmark" and not any(word.startswith("bench=") for word in given):
        more.append("bench=quick")
    of_intents = ("studies.intents", "studies.among_us_intents")
    if module in ("train", "evaluate", "talk", "studies.crossplay", "play", *of_intents):
        more.append(f"cache={bases}")
    if "comparison=among_us_speech" in given and not any(word.startswith("arms=") for word in given):
        more.append("arms=[full,game_only]")
    keys = {word.partition("=")[0] for word in more}
    return [word for word in given if word.partition("=")[0] not in keys] + more


def training(given: str) -> list[str]:
    """Returns what makes a training run small. A sweep has two seeds, and two arms where the command names none."""
    small = [*AMONG_US] if "among_us" in given else [*DOND]
    if "diplomacy" in given or "colour" in given:
        small = [*SMALL, "base.games=24", "base.tokenizer_games=20", *["env.years=1"] * ("diplomacy" in given)]
    if "model=hf" in given:
        small = [word for word in small if not word.startswith(("model.", "base."))]
    if ("sweep=" in given or "-m " in given) and "hydra.mode=RUN" not in given:
        small.append("seed=0,1")
    if re.search(r"sweep=(among_us_(?!imposter|iterated|estimators)|dond_ablation|dond_filtered_bc_ppo)", given):
        small += ["ablation=full,game_only"] * ("ablation=" not in given)
    if "_estimators" in given:
        small += ["ablation=full,rloo", "algo.games=8"]  # games of one group
    if "sweep=dond_filtered_bc_300" in given:
        small.append("base.human_games=10")
    if "algo.group" in given:
        small.append("algo.group=2")
    small = [word for word in small if not word.startswith(("env=", "experiment="))]
    if "sweep=among_us_iterated" in given:  # the comparison needs the iterations that it plays
        iterations = 10 if "algo.iterations=" in given else 60
        return [*small, f"algo.iterations={iterations}", "checkpoint.every=10", "eval.every=60"]
    return [*small, "algo.iterations=1"]


def read_by(line: str) -> list[str]:
    """Names the sweeps and experiments whose runs a command reads, by its own `select` or by its comparison's."""
    if "sweep=among_us_iterated" in line:
        return ["among_us_ablation", "among_us_imposter"]
    select = re.search(r"select=(\S+)", line)
    comparison = re.search(r"comparison=(\w+)", line)
    if "data=" in line or not (select or comparison):
        return []
    patterns = (
        select[1] if select else yaml.safe_load((ROOT / f"conf/comparison/{comparison[1]}.yaml").read_text())["select"]
    )
    return re.findall(r"(?<![\w*-])[a-z]\w+", patterns)


def run(line: str, folder: Path, bases: Path) -> None:
    """Runs what a page says, small, in this process. Anything but exit status 0 fails."""
    for name in read_by(line):
        for before in (other for other in RUN if re.search(rf"(sweep|experiment)={name}(?!\w)", other)):
            if (folder, before) not in MADE_RUNS:
                MADE_RUNS.add((folder, before))
                run(before, folder, bases)
    for word, before in FIRST.items():
        if word in line and not there(word, folder):
            run(before, folder, bases)
        if word in line and word.isupper():
            line = line.replace(word, there(word, folder))
        if word in line and word == "best_response":
            line = line.replace("runs/NAME", f"runs/{there(word, folder)}")
    for name, real in MADE.items():
        line = line.replace(name, real)
    line = re.sub(r"-s\d\d-\*", "-s*-*", line)
    if line.startswith("make "):
        recipe = subprocess.run(["make", "-n", *line.split()[1:]], cwd=ROOT, capture_output=True, text=True, check=True)
        (line,) = re.findall(r"python (-m experiments\..*)", recipe.stdout)
        line = f"python {line}"
    if line.startswith("marl-"):
        scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
        line = f"python -m {scripts[line.split()[0]].partition(':')[0]} --help"
    words = shlex.split(line)
    if words[0] == "cp":
        subprocess.run([*words[:2], "copied.yaml"], cwd=folder, check=True)
    elif words[1] == "-c":
        exec(words[2], {})
    elif words[1] != "-m":
        runpy.run_path(str(folder / words[1]), run_name="__main__")
    else:
        module = words[2].removeprefix("experiments.")
        given = words[3:] if "--help" in words else smaller(module, words[3:], bases)
        published = module == "train" and any(word.startswith("sweep=") for word in given)
        with pytest.MonkeyPatch.context() as patch, without_pages() if published else nullcontext():
            patch.setattr(sys, "argv", [module, *given])
            if module == "web":
                patch.setattr(uvicorn.Server, "run", answered)
            import_module(f"experiments.{module}").main()


def there(word: str, folder: Path) -> str:
    """Finds what a name of FIRST stands for in this folder, or "" if it was not made yet. RUNS stands for two runs."""
    simulated = "study-small-simulated"
    if word == "CODE":
        table = folder / "runs" / simulated / "export/simulated_people.csv"
        return csv_rows(table)[0]["person"] if table.exists() else ""
    made = {
        "STUDY": "lookahead/*", "RUNS": "dond_human-*", "intents-both": "intents-both-*", "web_export": simulated,
        "study=load": "dond_quickstart-*", "best_response": "among_us_quickstart-full-s12-*",
        "among_us_turns": "among_us_quick-imposter-s12-*",
        "among-us-intents": "among-us-intents-*", "press-s0": "press-s0",
    }  # fmt: skip
    found = sorted((folder / "runs").glob(made[word]))
    if word == "STUDY":  # pages play its players on `pure`
        found = [path for path in found if "france" not in (path / "settings.json").read_text()]
    return ",".join(path.name for path in found[: 2 if word == "RUNS" else 1])


@pytest.mark.slow
@pytest.mark.parametrize("line", RUN, ids=lambda line: f"{page_of(line)} {line}")
def test_a_command_runs(line: str, folder: Path, bases: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if re.search("(env|sweep)=diplomacy|board=france_austria", line):
        pytest.importorskip("diplomacy", reason="needs the extra `diplomacy`: pip install 'diplomacy==1.1.2'")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # who plays stops at once
    run(line, folder, bases)


def answered(server: uvicorn.Server, sockets: list[socket]) -> None:
    """Asks for one page and returns, in place of a server that somebody has to stop."""
    with TestClient(server.config.app, base_url="http://127.0.0.1") as browser:
        assert browser.get("/").status_code in (200, 401)
