"""DORA, DNVI, DNVI-NPU and RL-DiL-piKL: self-play in which everybody plans one step ahead, and learns from the plans.

In every iteration all players of many games plan (`planning/lookahead.py`) and move once. The value network is
regressed to the scores that plans expected, the proposal network to the orders that they drew. The four differ only in
settings: regret matching (DORA) or hedge (DNVI) from nothing or from the anchor (NPU), and DiL-piKL near the anchor.
Sources: Bakhtin et al. 2021, 2022. Left out: double oracle for orders that are never proposed (some candidates are
drawn uniformly), rewards before the end of a game, and discounting, since scores sum to 1.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from marl.common.errors import UserError, check_counts, check_range
from marl.common.files import read_json, reading, write_json
from marl.model.orders import OrderNet
from marl.planning.lookahead import Game, Orders, Search, States, search
from marl.planning.pikl import Floats
from marl.storage.checkpoint import verify_folder, write_folder


@dataclass(frozen=True)
class LookaheadConfig:
    """Settings of the trainer. An iteration is one move in each of `games` games, and `updates` steps of Adam."""

    search: Search = field(default_factory=Search)
    iterations: int = 200
    games: int = 128
    explore: float = 0.1  # probability that a player moves at random among its candidates
    replay: int = 5000  # newest positions, to learn from
    batch: int = 256
    updates: int = 8
    learning_rate: float = 1e-3
    value_weight: float = 1.0
    proposal_weight: float = 0.1

    def __post_init__(self) -> None:
        check_counts(self, ("iterations", "games", "replay", "batch", "updates"))
        check_range(self, "", "[0, 1]", "explore")
        check_range(self, "", "(0, 1)", "learning_rate")
        check_range(self, "", "[0, inf)", "value_weight", "proposal_weight")


class Data(NamedTuple):
    """Positions (P, W), orders of all units there (P, L), and each player's score (P, n)."""

    states: States
    orders: Orders
    scores: Floats


class Learner:
    """Networks, their optimizer, the running games and the replay buffer: all that a checkpoint keeps."""

    def __init__(self, game: Game, net: OrderNet, config: LookaheadConfig) -> None:
        self.net, self.iteration, self.states = net, 0, game.start(config.games)
        self.optimizer = torch.optim.Adam(net.parameters(), lr=config.learning_rate)
        first = self.states[:0]
        self.replay = Data(first, first[:, :0].reshape(0, game.slots), np.zeros((0, game.players)))


def train_lookahead(
    game: Game, learner: Learner, anchor: OrderNet | None, config: LookaheadConfig, seed: int,
    after: Callable[[Learner, dict[str, float]], None],
) -> None:  # fmt: skip
    """Trains in place, from the learner's iteration on; `after` gets each iteration's metrics. An iteration's random
    numbers follow from `seed` and its number, so a run can resume from any checkpoint."""
    while learner.iteration < config.iterations:
        rng = np.random.default_rng([seed, learner.iteration])
        plans = search(game, learner.states, learner.net, anchor, config.search, rng)
        fresh = Data(learner.states, plans.drawn(rng), plans.stage.utilities)
        learner.replay = Data(*(np.concatenate(p)[-config.replay :] for p in zip(learner.replay, fresh, strict=True)))
        learner.states = game.step(learner.states, plans.drawn(rng, explore=config.explore))
        over = game.over(learner.states)
        learner.states[over] = game.start(int(over.sum()))
        metrics = regress(game, learner, learner.replay, config, config.updates, rng)
        learner.iteration += 1
        after(learner, metrics | {"games/ended": float(over.sum())})


def regress(
    game: Game, learner: Learner, data: Data, config: LookaheadConfig, updates: int, rng: np.random.Generator
) -> dict[str, float]:
    """Regresses values to scores (squared error) and the proposal to orders (cross-entropy), as seen from random
    seats. Returns the mean losses."""
    losses = np.zeros(2)
    for _ in range(updates):
        rows = rng.integers(len(data.states), size=config.batch)
        by = rng.integers(game.players, size=config.batch)
        states, orders, scores = game.turned(data.states[rows], data.orders[rows], data.scores[rows], by)
        features, target = torch.from_numpy(game.features(states)), torch.from_numpy(scores.astype(np.float32))
        ids, legal = torch.from_numpy(orders.astype(np.int64)), torch.from_numpy(game.legal(states))
        value = (learner.net.scores(features) - target).square().sum(-1).mean()
        chosen = learner.net.logprobs(features, legal).gather(-1, ids.clamp(min=0)[..., None])[..., 0]
        imitation = -chosen[ids >= 0].mean()
        learner.optimizer.zero_grad()
        (config.value_weight * value + config.proposal_weight * imitation).backward()
        learner.optimizer.step()
        losses += [value.item(), imitation.item()]
    return {"loss/value": losses[0] / updates, "loss/proposal": losses[1] / updates}


def save(learner: Learner, folder: Path, **notes: Any) -> None:
    """Saves the learner to a folder, in one step; `notes` (plain data) go into its state.json."""
    tensors = {f"net.{name}": value for name, value in learner.net.state_dict().items()}
    for number, own in learner.optimizer.state_dict()["state"].items():
        tensors |= {f"adam.{number}.{name}": value for name, value in own.items()}
    arrays = {"states": learner.states, **{f"replay.{k}": v for k, v in learner.replay._asdict().items()}}
    tensors |= {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}

    def write(place: Path) -> None:
        save_file({name: value.detach().clone() for name, value in tensors.items()}, place / "learner.safetensors")
        write_json(place / "state.json", {"iteration": learner.iteration, **notes})

    write_folder(folder, write)


def load(learner: Learner, folder: Path) -> None:
    """Loads the learner from a folder. Raises UserError if it is damaged, or its networks have another size."""
    if damage := verify_folder(folder):
        raise UserError(f"{damage}. Remove that folder to begin again.")
    with reading(folder):
        tensors = load_file(folder / "learner.safetensors")
        nets = {name.removeprefix("net."): value for name, value in tensors.items() if name.startswith("net.")}
        if {k: v.shape for k, v in nets.items()} != {k: v.shape for k, v in learner.net.state_dict().items()}:
            raise ValueError("its networks have another size")
        learner.net.load_state_dict(nets)
        own = learner.optimizer.state_dict()
        own["state"] = {}
        for name, value in tensors.items():
            if name.startswith("adam."):
                _, number, part = name.split(".", 2)
                own["state"].setdefault(int(number), {})[part] = value
        learner.optimizer.load_state_dict(own)
        learner.states = tensors["states"].numpy()
        learner.replay = Data(*(tensors[f"replay.{name}"].numpy() for name in Data._fields))
        learner.iteration = int(read_json(folder / "state.json")["iteration"])
