"""Imports run one way: envs <- marl <- experiments, and inside marl from the top of a list downward."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A module of marl imports only modules that stand in an earlier line. A folder is one entry.
# Modules in one line do not know each other. A new module gets a line below all that it imports.
LAYERS = [
    "types errors grouping wording kernels secrets completion chat_template",
    "files ranks",
    "stats runs",
    "tokens pikl varlen",
    "policy renaming",
    "optim sharding",
    "checkpoint tracking",
    "ragged",
    "engine",
    "agents memory",
    "scripted human_dond chat",
    "games speech planner negotiation",
    "rollout",
    "cast rewards",
    "advantages",
    "batch",
    "losses",
    "update",
    "pretrain monitor",
    "filtered_bc rl_pikl",
    "ppo",
    "evaluate transcripts",
    "compute",
    "report drift",
    "config",
    "longer",
]
LAYER = {name: depth for depth, line in enumerate(LAYERS) for name in line.split()}

KNOWS_HYDRA = {"experiments/setup/config.py"}
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


def marl_modules(path: Path) -> set[str]:
    """The entries of LAYERS that a file imports."""
    return {name.split(".")[1] for name in imported(path) if name.startswith("marl.")}


def entry(path: Path) -> str:
    return path.relative_to(ROOT / "marl").parts[0].removesuffix(".py")


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
    assert name in KNOWS_HYDRA or not roots(path) & {"hydra", "omegaconf"}
    assert name in KNOWS_WANDB or "wandb" not in roots(path)


@pytest.mark.parametrize("path", sources("experiments"), ids=name_of)
def test_only_tracking_knows_wandb(path: Path) -> None:
    assert "wandb" not in roots(path)


@pytest.mark.parametrize("path", [p for p in sources("marl") if p != ROOT / "marl/__init__.py"], ids=name_of)
def test_marl_imports_run_downward(path: Path) -> None:
    here = entry(path)
    assert here in LAYER, f"marl/{here} has no place in LAYERS; add it below what it imports"
    for other in marl_modules(path):
        assert other in LAYER, f"{path.name} imports marl.{other}, which has no place in LAYERS"
        if other != here:
            assert LAYER[other] < LAYER[here], f"{path.name} imports marl.{other}, which stands no earlier than {here}"


def test_terms_do_not_know_one_another() -> None:
    """Files of marl/losses and marl/rewards stand alone: one can be deleted without touching the others."""
    for folder in ("losses", "rewards"):
        terms = {path.stem for path in sources(f"marl/{folder}")} - {"__init__"}
        for path in sources(f"marl/{folder}"):
            named = {name.split(".")[2] for name in imported(path) if name.startswith(f"marl.{folder}.")}
            assert not named & terms, f"marl/{folder}/{path.name} imports {named & terms}"
