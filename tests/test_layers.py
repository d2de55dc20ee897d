"""Imports run one way: envs <- marl <- experiments, and inside marl from the top of a list downward."""

import ast
import runpy
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A room of marl imports only rooms that stand before it. docs/ draws them.
ROOMS = [
    "types", "common", "model", "decoding", "rewards", "losses", "agents", "planning", "rollout", "learning",
    "storage", "metrics", "pretraining", "intents", "algorithms", "report", "api",
]  # fmt: skip
# A room of experiments imports only rooms that stand before it; commands stand beside the rooms.
EXPERIMENT_ROOMS = ["launch", "setup", "webapp", "bench", "studies"]
LONGEST = 600  # lines of a file


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def imported(path: Path) -> set[str]:
    """Dotted names of everything that a file imports, anywhere in its code: modules, and names taken from them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports from the package's name on"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def roots(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


def rooms_of(path: Path, package: str) -> set[str]:
    """The rooms of a package that a file imports."""
    return {name.split(".")[1] for name in imported(path) if name.startswith(f"{package}.")}


def room_of(path: Path, package: str) -> str:
    return path.relative_to(ROOT / package).parts[0].removesuffix(".py")


def test_there_is_something_to_check() -> None:
    assert len(sources("envs")) >= 2 and len(sources("marl")) >= 5 and len(sources("experiments")) >= 2
    assert "envs" in roots(ROOT / "marl/types.py") and "torch" in roots(ROOT / "marl/types.py")
    assert "wandb" in roots(ROOT / "marl/storage/tracking.py") and "hydra" in roots(
        ROOT / "experiments/launch/command.py"
    )


def test_games_know_nothing_of_learning() -> None:
    others = {"torch", "transformers", "hydra", "omegaconf", "wandb", "marl", "experiments", "conf"}
    assert [name_of(path) for path in sources("envs") if roots(path) & others] == []


def test_marl_knows_neither_commands_nor_hydra() -> None:
    others = {"experiments", "conf", "hydra", "omegaconf"}
    assert [name_of(path) for path in sources("marl") if roots(path) & others] == []


def test_only_tracking_knows_wandb() -> None:
    paths = [*sources("marl"), *sources("experiments")]
    assert [name_of(path) for path in paths if "wandb" in roots(path)] == ["marl/storage/tracking.py"]


def test_only_adapters_know_peft() -> None:
    paths = [*sources("envs"), *sources("marl"), *sources("experiments")]
    assert [name_of(path) for path in paths if "peft" in roots(path)] == ["marl/model/lora.py"]


@pytest.mark.parametrize(("package", "rooms"), [("marl", ROOMS), ("experiments", EXPERIMENT_ROOMS)])
def test_imports_run_downward(package: str, rooms: list[str]) -> None:
    """Each room imports only those that stand before it. Commands, which stand beside rooms, may import any."""
    for path in sources(package):
        here = room_of(path, package)
        if package == "marl" and here != "__init__":
            assert here in rooms, f"marl/{here} is no room of ROOMS; put it after all that it imports"
        for other in rooms_of(path, package) - {here} if here in rooms else ():
            assert other in rooms and rooms.index(other) < rooms.index(here), f"{name_of(path)} imports {other}"


def test_terms_do_not_know_one_another() -> None:
    """Files of marl/losses and marl/rewards stand alone: one can be deleted without touching the others."""
    for folder in ("losses", "rewards"):
        terms = {path.stem for path in sources(f"marl/{folder}")} - {"__init__"}
        for path in sources(f"marl/{folder}"):
            named = {name.split(".")[2] for name in imported(path) if name.startswith(f"marl.{folder}.")}
            assert not named & terms, f"marl/{folder}/{path.name} imports {named & terms}"


def test_every_room_is_drawn() -> None:
    rooms = {path.parent.name for package in ("marl", "experiments") for path in ROOT.glob(f"{package}/*/__init__.py")}
    assert len(rooms) > 15 and rooms <= set(runpy.run_path(str(ROOT / "docs/draw_rooms.py"))["ORDER"])


def test_launchers_are_known_by_public_names() -> None:
    """Private modules of Hydra and its launchers change from one version to the next."""
    paths = [path for package in ("envs", "marl", "experiments") for path in sources(package)]
    names = [name for path in paths for name in imported(path) if name.startswith(("hydra", "joblib", "submitit"))]
    assert len(names) > 5 and [name for name in names if "._" in name] == []


def test_no_file_is_too_long() -> None:
    every = [path for package in ("envs", "marl", "experiments", "tests") for path in sources(package)]
    assert [name_of(p) for p in every if len(p.read_text(encoding="utf-8").splitlines()) > LONGEST] == []


def test_data_of_packages_is_there() -> None:
    """Each pattern of files that a wheel carries beside code names some."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    patterns = [f"{package}/{name}" for package, names in tool["setuptools"]["package-data"].items() for name in names]
    assert len(patterns) > 3
    assert [pattern for pattern in patterns if not any(ROOT.glob(pattern))] == []
