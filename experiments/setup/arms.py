"""The names of arms, and what is trained under them."""

from collections.abc import Callable

from omegaconf import DictConfig

from experiments.launch.overrides import named
from marl.common.errors import UserError


def check_arm(config: DictConfig, files: Callable[..., DictConfig]) -> None:
    """Refuses values that undo what a preset of `ablation` sets: another arm would be trained under its name.

    `config`: of a job. `files`: composes the files that the job chooses, and others in their place, without its values.
    """
    wanted = files()
    preset, learner = (config.hydra.runtime.choices.get(group) for group in ("ablation", "algo"))
    if preset in (None, "none") or config.arm != wanted.arm:  # the command line names the arm
        return
    if learner != "ppo":
        raise UserError(
            f"ablation={preset} names an arm of algo=ppo, and algo={learner} has terms of its own. Leave it out, or "
            "name the arm, as in arm=NAME."
        )
    plain = files(ablation="ablation=none")
    if plain.arm == wanted.arm:  # the preset does not name it
        return
    before, given = named(plain), named(config)
    for name, value in named(wanted).items():
        if name in given and not isinstance(value, dict) and before.get(name) != value != given[name]:
            raise UserError(
                f"ablation={preset} sets {name}={value}, and {name}={given[name]} trains something else under its "
                "name. Leave one of them out, or name the arm, as in arm=NAME."
            )
