"""Trains one run from overrides, checked as on the command line. `marl.train` calls it."""

from collections.abc import Sequence
from pathlib import Path

from hydra import initialize_config_module
from hydra.errors import HydraException
from omegaconf import open_dict
from omegaconf.errors import OmegaConfBaseException

from experiments.launch.overrides import Checker, one_line
from experiments.setup.checks import check_job
from experiments.train import main
from marl.common.errors import UserError


def train(overrides: Sequence[str]) -> Path:
    """Makes one run and returns its folder. UserError for a mistake in the overrides, or if they describe a sweep."""
    try:
        with initialize_config_module("conf", version_base="1.3", job_name="train"):
            plan = Checker("train", check_job).plan(overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(one_line(error)) from error
    if plan.jobs:
        raise UserError(
            f"These overrides describe a sweep of {len(plan.jobs)} runs. Train one run at a time (hydra.mode=RUN where "
            "a preset sweeps), or use python -m experiments.train."
        )
    with open_dict(plan.config):
        plan.config.pop("hydra")
    folder: Path = main(plan.config)
    return folder
