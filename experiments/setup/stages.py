"""The policies that a run went through: where it began, the checkpoints that it kept, and its end."""

from dataclasses import dataclass
from pathlib import Path

import torch

from experiments.setup.config import cast_of
from experiments.setup.players import policy_folder
from marl.common.errors import UserError
from marl.common.files import read_json, reading
from marl.model.loading import read_tensors
from marl.model.policy import Policy
from marl.rollout.cast import learners_of
from marl.storage.checkpoint import (
    UNFIT,
    checkpoints_in,
    folder_digest,
    load_policy,
    load_weights,
    read_card,
    read_state,
    started_from,
    verify_folder,
)
from marl.storage.folder import CARD, REFERENCE, finished_run


@dataclass(frozen=True)
class Stage:
    """A learner after so many iterations of its run; after 0 it is what it began from."""

    iteration: int
    folder: Path  # of a saved policy
    weights: Path | None = None  # file of a checkpoint; replaces the folder's weights

    @property
    def digest(self) -> str:
        """Digest of the policy's files."""
        return folder_digest(self.folder) + (folder_digest(self.weights.parent) if self.weights else "")

    def load(self, device: torch.device, privileged_size: int | None = None) -> Policy:
        """Loads the policy as `load_policy` does. With another `privileged_size` the value head is a new one."""
        policy = load_policy(self.folder, device, privileged_size)
        if self.weights is not None:
            try:
                tensors = read_tensors(self.weights)
                if policy.privileged_size != read_card(self.folder)["privileged_size"]:
                    tensors |= {name: t for name, t in policy.state_dict().items() if name.startswith("value_head.")}
                load_weights(policy, tensors)
            except UNFIT as error:
                reason = " ".join(str(error).split())[:200]
                raise UserError(f"{self.weights} does not fit the policy in {self.folder} ({reason})") from error
        return policy


def stages_of(run: Path, learner: str) -> list[Stage]:
    """Lists the stages of a run's learner, oldest first: its start, the run's whole checkpoints, its end."""
    config, card = finished_run(run)
    end = end_of(run, learner)
    began = (config.get("init") or {}).get(learner)  # a run, by its name beside this one or by its folder
    if began:
        with reading(run):
            beside = run.parent / began
            digest = card.get("inputs", {}).get(f"init.{learner}={began}")
            began = policy_folder(str(beside if beside.is_dir() else began))
        if digest is not None and folder_digest(began) != digest:
            raise UserError(f"{began} is not the policy that {run} began with: it was made again. Put it back.")
    stages = [Stage(0, Path(began) if began else base_folder(run))]
    for checkpoint in checkpoints_in(run / "checkpoints"):
        weights = checkpoint / f"{learner}.safetensors"
        if weights.is_file() and not verify_folder(checkpoint):
            state = read_state(checkpoint)
            if state.get("run") == card.get("run") and state["iteration"] < end.iteration:
                stages.append(Stage(state["iteration"], end.folder, weights))
    return [*stages, end]


def end_of(run: Path, learner: str) -> Stage:
    """Returns the last stage of a run's learner."""
    config, _ = finished_run(run)
    with reading(run):
        first = learner == learners_of(cast_of(config["cast"]))[0]
    return Stage(int(config["algo"]["iterations"]), run / ("policy" if first else learner))


def base_folder(run: Path, policy: Path | None = None) -> Path:
    """Finds the base that a run (or its `policy`, a folder) began with: where it was, beside the run, or in the run.

    UserError if none is there, or only another base of the same name: the run's card has its digest.
    """
    name = started_from(policy or run / "policy")
    if name is None:
        raise UserError(f"{run} started from an untouched model; only runs with a base of their own can be compared")
    with reading(run):
        folders = (Path(name), run.parent / "bases" / Path(name).name, run / REFERENCE)
        digest = read_json(run / CARD).get("base_digest") if (run / CARD).exists() else None
        there = [f for f in folders if (f / "policy.json").is_file() and (digest is None or not verify_folder(f))]
    if not there:
        raise UserError(f"{run}: its base is not there ({name}). Put it into {run.parent / 'bases'}.")
    own = [folder for folder in there if digest is None or folder_digest(folder) == digest]
    if not own:
        raise UserError(
            f"{there[0]} is not the base that {run} began with: it was made again. Put the old one back, or its copy, "
            f"which was {run / REFERENCE}."
        )
    return own[0]
