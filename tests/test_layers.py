"""Imports run one way: envs <- marl <- experiments, and inside marl from the top of a list downward."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A room of marl imports only rooms that stand before it. docs/ draws them.
ROOMS = [
    "types", "common", "model", "decoding", "rewards", "losses", "agents", "planning", "rollout", "learning",
    "storage", "metrics", "pretraining", "algorithms", "report", "api",
]  # fmt: skip
# A room of experiments imports only rooms that stand before it; commands stand beside the rooms.
EXPERIMENT_ROOMS = ["launch", "setup", "webapp", "bench", "studies"]
LONGEST = 600  # lines of a file

KNOWS_WANDB = {"marl/storage/tracking.py"}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(path: Path) -> set[str]:
    """Dotted names of all that a file imports, at any depth of its code: modules, and names taken out of them."""
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


@pytest.mark.parametrize("path", sources("envs"), ids=name_of)
def test_games_know_nothing_of_learning(path: Path) -> None:
    assert not roots(path) & {"torch", "transformers", "hydra", "omegaconf", "wandb", "marl", "experiments", "conf"}


@pytest.mark.parametrize("path", sources("marl"), ids=name_of)
def test_marl_knows_neither_commands_nor_hydra(path: Path) -> None:
    name = name_of(path)
    assert not roots(path) & {"experiments", "conf"}
    assert not roots(path) & {"hydra", "omegaconf"}
    assert name in KNOWS_WANDB or "wandb" not in roots(path)


@pytest.mark.parametrize("path", sources("experiments"), ids=name_of)
def test_only_tracking_knows_wandb(path: Path) -> None:
    assert "wandb" not in roots(path)


@pytest.mark.parametrize("path", [p for p in sources("marl") if p != ROOT / "marl/__init__.py"], ids=name_of)
def test_imports_of_marl_run_downward(path: Path) -> None:
    here = room_of(path, "marl")
    assert here in ROOMS, f"marl/{here} is no room of ROOMS; put it after all that it imports"
    for other in rooms_of(path, "marl") - {here}:
        assert ROOMS.index(other) < ROOMS.index(here), (
            f"{name_of(path)} imports marl.{other}, which stands after {here}"
        )


@pytest.mark.parametrize("path", sources("experiments"), ids=name_of)
def test_imports_of_experiments_run_downward(path: Path) -> None:
    here = room_of(path, "experiments")
    if here not in EXPERIMENT_ROOMS:
        return  # a command
    for other in rooms_of(path, "experiments") - {here}:
        assert other in EXPERIMENT_ROOMS, f"{name_of(path)} imports the command experiments.{other}"
        assert EXPERIMENT_ROOMS.index(other) < EXPERIMENT_ROOMS.index(here), f"{name_of(path)} imports {other}"


def test_terms_do_not_know_one_another() -> None:
    """Files of marl/losses and marl/rewards stand alone: one can be deleted without touching the others."""
    for folder in ("losses", "rewards"):
        terms = {path.stem for path in sources(f"marl/{folder}")} - {"__init__"}
        for path in sources(f"marl/{folder}"):
            named = {name.split(".")[2] for name in imported(path) if name.startswith(f"marl.{folder}.")}
            assert not named & terms, f"marl/{folder}/{path.name} imports {named & terms}"


@pytest.mark.parametrize(
    "path", [p for package in ("envs", "marl", "experiments") for p in sources(package)], ids=name_of
)
def test_no_file_is_too_long(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST


def test_data_of_packages_is_there() -> None:
    """Each pattern of files that a wheel carries beside code names some."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    patterns = [f"{package}/{name}" for package, names in tool["setuptools"]["package-data"].items() for name in names]
    assert len(patterns) > 3
    assert [pattern for pattern in patterns if not any(ROOT.glob(pattern))] == []
