"""Opponents of the web page: scripted players, finished runs and their bases. A model is loaded when first played."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from envs.core import Style
from experiments.setup.entrants import text_player
from experiments.setup.players import called_in_games, player_config, policy_folder, run_policy, style_of
from marl.agents.base import Agent
from marl.agents.model import PlayConfig, model_agent
from marl.agents.text import TextAgent
from marl.common.errors import UserError
from marl.decoding.memory import Slots, check_memory
from marl.decoding.probes import size_of
from marl.rollout.games import env_maker, seats
from marl.storage.checkpoint import read_card
from marl.storage.folder import CARD, run_settings

SCRIPTS = {"dond": ("scripted", "random"), "among_us": ("careful", "random")}


@dataclass(frozen=True)
class Opponent:
    """Somebody to play against, as the page offers it."""

    name: str  # a run's folder below the folder of runs, or a scripted player's name
    game: str
    label: str
    env: Mapping[str, Any]  # the game's settings in which it plays


@dataclass(frozen=True)
class Loaded:
    agent: Agent
    games: int  # at once


class Opponents:
    """All opponents. `envs`: each game's settings for scripted players, by name."""

    def __init__(
        self,
        runs: Path,
        envs: Mapping[str, Mapping[str, Any]],
        *,
        device: torch.device,
        temperature: float = 1.0,
        games: int = 16,
        models: int = 3,
    ) -> None:
        self.runs, self.envs, self.device, self.temperature = runs, envs, device, temperature
        self.games, self.models = games, models
        self._loaded: dict[tuple[str, str], Loaded] = {}
        self._lock = threading.Lock()

    def offered(self) -> list[Opponent]:
        """Scripted players, then finished runs and bases by name. Folders that cannot be read are left out."""
        found = [Opponent(name, game, name, env) for game, env in self.envs.items() for name in SCRIPTS.get(game, ())]
        for card in sorted(self.runs.glob(f"*/{CARD}")):
            found += self._of_folder(card.parent, card, card.parent.name)
        for card in sorted(self.runs.glob("bases/*/policy.json")):
            found += self._of_folder(card.parent, card, f"base {card.parent.name}")
        return found

    def _of_folder(self, folder: Path, card: Path, label: str) -> list[Opponent]:
        try:
            settings = _settings(folder, card.stat().st_mtime_ns)
        except (UserError, OSError):
            return []
        game = settings["env"].get("game")
        if game not in self.envs or not policy_folder(str(folder)).is_dir():
            return []
        env = {**self.envs[game], **{k: v for k, v in settings["env"].items() if k in self.envs[game]}}
        return [Opponent(folder.relative_to(self.runs).as_posix(), game, label, env)]

    def find(self, name: str, game: str) -> Opponent:
        """The offered opponent of this name. UserError if there is none."""
        for opponent in self.offered():
            if (opponent.name, opponent.game) == (name, game):
                return opponent
        raise UserError("There is no such opponent in this game. Choose one of the list.")

    def load(self, name: str, env: Mapping[str, Any], busy: set[tuple[str, str]]) -> Loaded:
        """Returns the opponent ready to play. `busy`: those with open games, which stay loaded.

        UserError where its model does not fit, or too many others are being played.
        """
        key = (name, str(env["game"]))
        with self._lock:
            if key not in self._loaded:
                model = not is_script(key)
                there = [k for k in self._loaded if not is_script(k)]
                idle = [k for k in there if k not in busy]
                if model and len(there) >= self.models:
                    if not idle:
                        raise UserError("Other models are being played. Choose one of those, or come back later.")
                    del self._loaded[idle[0]]
                self._loaded[key] = self._model(name, env) if model else self._script(name, env)
            return self._loaded[key]

    def forget(self, name: str, game: str) -> None:
        """Drops an opponent that failed, so that its next game loads it anew."""
        with self._lock:
            self._loaded.pop((name, game), None)

    def _script(self, name: str, env: Mapping[str, Any]) -> Loaded:
        agent = text_player(name, env["game"], "opponent")
        assert isinstance(agent, TextAgent)
        agent.style = Style.NATURAL  # a script reads any style, and speaks as the person does
        return Loaded(agent, self.games)

    def _model(self, name: str, env: Mapping[str, Any]) -> Loaded:
        run = str(self.runs / name)
        folder = policy_folder(run)
        if not folder.is_dir():
            raise UserError(f"{name} is no longer among the finished runs. Choose another opponent.")
        settings = _settings(Path(run), 0)
        context, most = settings["algo"]["context"], settings["algo"]["max_new_tokens"]
        config, places = player_config(run), seats(env)
        fit = check_memory(
            [Slots.of(config, context, places)],
            size_of(config, context).weights,
            concurrency=self.games,
            setting="games_at_once",
            context=context,
            device=self.device,
        )
        limits = PlayConfig(games=fit.concurrency, concurrency=fit.concurrency, max_new_tokens=most, context=context)
        policy = run_policy(run, env["game"], self.device)
        style = style_of(folder, env)
        agent = model_agent(called_in_games(run), policy, limits, places, self.temperature, style)
        return Loaded(agent, fit.concurrency)


def is_script(key: tuple[str, str]) -> bool:
    """Tells whether this name and game are those of a scripted player."""
    return key[0] in SCRIPTS.get(key[1], ())


@lru_cache(maxsize=4096)
def _settings(folder: Path, changed: int) -> dict[str, Any]:
    """`env` and `algo` (context, max_new_tokens) of a run's evaluation, or of a base. `changed` renews the cache."""
    if (folder / "policy.json").is_file():  # a base
        card = read_card(folder)
        made: Any = card.get("made_of")
        env = made.get("env") if isinstance(made, dict) else None
        if not isinstance(env, dict):
            raise UserError(f"{folder}: its policy.json does not say in which game it was made")
        return {"env": {"game": card.get("game"), **env}, "algo": {"context": 1024, "max_new_tokens": 40}}
    settings = run_settings(folder)
    env = {**settings["env"], **(settings["eval"]["env"] or {})}
    env_maker(env)
    return {"env": env, "algo": {name: settings["algo"][name] for name in ("context", "max_new_tokens")}}
