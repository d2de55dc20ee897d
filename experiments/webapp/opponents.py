"""Opponents of the web page: scripted players, finished runs, their bases and checkpoints, and an endpoint.

A model is loaded when first played. `RUN@N` is a run after N iterations, `RUN+plan` plans its claims or votes, and
`FOLDER+cicero` talks with a plan.
"""

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from envs.core import Style
from experiments.setup.config import cast_of
from experiments.setup.entrants import text_player
from experiments.setup.lookahead import check_planner, is_planner
from experiments.setup.players import (
    action_model,
    bare,
    bytes_of_players,
    caches_of,
    called_in_games,
    check_game,
    in_runs,
    model_player,
    player_config,
    policy_folder,
    run_policy,
    style_of,
)
from experiments.setup.refusals import say_refusals
from experiments.setup.select import selected
from experiments.setup.stages import Stage, stages_of
from experiments.webapp.study import Condition
from marl.agents.base import Agent
from marl.agents.chat import CHAT, ChatAgent, ChatConfig
from marl.agents.model import PlayConfig
from marl.agents.text import TextAgent
from marl.common.errors import UserError, prefixed
from marl.decoding.memory import check_memory
from marl.decoding.probes import size_of
from marl.intents.agent import CICERO, PARTS, CiceroConfig
from marl.model.loading import longest_stream
from marl.planning.planner import GAMES as PLANNED
from marl.planning.planner import SUFFIX, PlannerConfig
from marl.rollout.cast import learners_of
from marl.rollout.games import env_maker, player_count
from marl.storage.checkpoint import read_card
from marl.storage.folder import CARD, CONFIG, run_settings

AT = "@"  # between a run's name and the iteration
SEATS = {  # that a person may ask for
    "dond": ("any", "player_0", "player_1"),
    "among_us": ("any", "crewmate", "imposter"),
    "diplomacy": ("any",),  # powers are dealt
}
SCRIPTS = {
    "dond": ("scripted", "random"),
    "among_us": ("careful", "random"),
    "diplomacy": ("scripted", "careful", "random"),
}


class Kind(IntEnum):
    """Kinds of opponents, in the order in which the page offers them."""

    SCRIPT = 0
    ENDPOINT = 1
    RUN = 2
    BASE = 3
    PLANNER = 4

    @property
    def label(self) -> str:
        return (
            "Scripted players",
            "Behind an endpoint",
            "Finished runs",
            "Bases, before reinforcement learning",
            "Players who plan, without talk",
        )[self]


@dataclass(frozen=True)
class Opponent:
    """Somebody to play against, as the page offers it."""

    name: str  # a run's folder below the folder of runs, or a scripted player's name
    game: str
    label: str
    env: Mapping[str, Any]  # the game's settings in which it plays
    model: bool = False  # a language model here, which can plan

    @property
    def kind(self) -> Kind:
        if not self.model:
            return Kind.PLANNER if "/" in self.name else Kind.ENDPOINT if self.name == CHAT else Kind.SCRIPT
        return Kind.BASE if self.name.startswith("bases/") else Kind.RUN


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
        planner: PlannerConfig | None = None,
        cicero: CiceroConfig | None = None,
        chat: ChatConfig | None = None,
    ) -> None:
        """`planner`, `cicero`: how those play whose names end in +plan, +cicero. `chat`: the endpoint of the opponent
        `chat`, if any."""
        self.planner, self.cicero, self.chat = planner or PlannerConfig(), cicero or CiceroConfig(), chat
        self.runs, self.envs, self.device, self.temperature = runs, envs, device, temperature
        self.games, self.models = games, models
        self._loaded: dict[tuple[str, str], Loaded] = {}
        self._lock = threading.Lock()

    def offered(self) -> list[Opponent]:
        """Scripted players, then finished runs and bases by name. Folders that cannot be read are left out."""
        found = [Opponent(name, game, name, env) for game, env in self.envs.items() for name in SCRIPTS.get(game, ())]
        if self.chat is not None:
            found += [
                Opponent(CHAT, game, f"{self.chat.model} by its endpoint", env) for game, env in self.envs.items()
            ]
        for card in sorted(self.runs.glob(f"*/{CARD}")):
            found += self._of_folder(card.parent, card, card.parent.name)
        for card in sorted(self.runs.glob(f"*/{PARTS}")):
            found += [
                replace(each, name=each.name + CICERO)
                for each in self._of_folder(card.parent, card, f"{card.parent.name}, with intents")
            ]
        for card in sorted(self.runs.glob("bases/*/policy.json")):
            found += self._of_folder(card.parent, card, f"base {card.parent.name}")
        return found + self._planners()

    def _planners(self) -> list[Opponent]:
        """Trained players of studies of lookahead, who play on one map."""
        env = self.envs.get("diplomacy")
        found = []
        for state in sorted(self.runs.glob("lookahead/*/*-s*/state.json")) if env else []:
            name = state.parent.relative_to(self.runs).as_posix()
            with suppress(UserError):  # still in training, or of another map
                check_planner(str(state.parent), env or {})
                found.append(Opponent(name, "diplomacy", name.removeprefix("lookahead/"), env or {}))
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
        return [Opponent(folder.relative_to(self.runs).as_posix(), game, label, env, True)]

    def find(self, name: str, game: str, plans: bool = False) -> Opponent:
        """The offered opponent of this name, who perhaps plans. UserError if there is none."""
        for opponent in self.offered():
            if (opponent.name, opponent.game) == (name, game):
                if plans and not self.is_model((name, game)):
                    raise UserError("Only models can plan. Choose a run, or leave planning out.")
                plans = plans and not name.endswith(CICERO)  # which plans as it is
                return replace(opponent, name=name + SUFFIX) if plans else opponent
        raise UserError("There is no such opponent in this game. Choose one of the list.")

    def of_condition(self, condition: Condition, game: str, where: str) -> Opponent:
        """A study's opponent. UserError, naming the condition, if it is not there or plays another game."""
        plans = condition.opponent.endswith(SUFFIX)
        name = bare(condition.opponent)
        if game not in self.envs:
            raise UserError(f"{where}: there is no page for the game {game}; known: {', '.join(self.envs)}")
        with prefixed(f"{where}."):
            if condition.opponent.endswith(CICERO):
                talkers = {each.name: each for each in self.offered() if each.game == game}
                if condition.opponent not in talkers or condition.iteration is not None or condition.where:
                    raise UserError(
                        f"opponent={condition.opponent}: must be a folder of intents in {self.runs}, of the game "
                        f"{game}, which has neither iterations nor settings"
                    )
                return talkers[condition.opponent]
            if name == CHAT or not any(self.runs.glob(f"{name}/{CARD}")):
                if name == CHAT and self.chat is None:
                    raise UserError("opponent=chat: give its endpoint in chat.url and chat.model")
                if any(self.runs.glob(f"{name}/{CONFIG}")):
                    raise UserError(f"opponent={name}: this run is not finished. Let its command finish, then serve.")
                if name != CHAT:
                    check_script(name, game, self.runs)
                if plans or condition.iteration is not None or condition.where:
                    raise UserError(f"opponent={name}: is no run. Leave out {SUFFIX}, iteration and where.")
                return Opponent(name, game, name, self.envs[game])
            where_ = OmegaConf.create(dict(condition.where)) if condition.where else None
            runs = selected(self.runs, name, where_)
            if len(runs) != 1:
                names = ", ".join(run.name for run in runs)
                raise UserError(f"opponent={name}: must be one run, but {len(runs)} match ({names}); give where")
            card = runs[0] / CARD
            found = self._of_folder(runs[0], card, runs[0].name)
            if not found or found[0].game != game:
                raise UserError(
                    f"opponent={runs[0].name}: plays another game than {game}, or is damaged. Name another."
                )
            called = found[0].name
            if condition.iteration is not None:
                self.stage(called, condition.iteration)
                called += f"{AT}{condition.iteration}"
            return replace(found[0], name=called + SUFFIX * plans)

    def check(self, name: str, env: Mapping[str, Any], seat: str, where: str) -> None:
        """Raises UserError, naming the condition, if its game cannot be made, has no such seat or nothing to plan."""
        with prefixed(f"{where}."):
            made = env_maker(env)()
            if seat not in (*SEATS.get(env["game"], ("any",)), *made.possible_agents):
                raise UserError(f"seat={seat}: must be any, {', '.join(made.possible_agents)} or a role of the game")
            if name.endswith(SUFFIX) and env["game"] not in PLANNED:
                raise UserError(f"opponent={name}: there is nothing to plan in {env['game']}. Leave out {SUFFIX}.")

    def stage(self, name: str, iteration: int) -> Stage:
        """A run after so many iterations. UserError if it kept none there."""
        run = self.runs / name
        stages = stages_of(run, learners_of(cast_of(run_settings(run)["cast"]))[0])
        for stage in stages:
            if stage.iteration == iteration:
                return stage
        there = ", ".join(str(stage.iteration) for stage in stages)
        raise UserError(f"{name}: no checkpoint after {iteration} iterations was kept; there are those after {there}")

    def is_model(self, key: tuple[str, str]) -> bool:
        """Tells whether this name and game are those of a language model here."""
        name = bare(key[0]).partition(AT)[0]
        named = (CHAT, *SCRIPTS.get(key[1], ()))
        return name not in named and (self.runs / name).is_dir() and not is_planner(str(self.runs / name))

    def load(self, name: str, env: Mapping[str, Any], busy: set[tuple[str, str]]) -> Loaded:
        """Returns the opponent ready to play. `busy`: those with open games, which stay loaded.

        UserError where its model does not fit, or too many others are being played.
        """
        key = (name, str(env["game"]))
        with self._lock:
            if key not in self._loaded:
                model = self.is_model(key)
                there = [k for k in self._loaded if self.is_model(k)]
                idle = [k for k in there if k not in busy]
                if model and len(there) >= self.models:
                    if not idle:
                        raise UserError("Other models are being played. Choose one of those, or come back later.")
                    say_refusals(self._loaded.pop(idle[0]).agent)
                self._loaded[key] = self._model(name, env) if model else self._script(name, env)
            return self._loaded[key]

    def forget(self, name: str, game: str) -> None:
        """Drops an opponent that failed, so that its next game loads it anew."""
        with self._lock:
            for key in [key for key in self._loaded if key == (name, game) or key[0] == name == CHAT]:
                del self._loaded[key]

    def leave(self) -> None:
        """Says of those that are loaded whose filters refused most of their messages. The server stops."""
        say_refusals(*(loaded.agent for loaded in self._loaded.values()))

    def _script(self, name: str, env: Mapping[str, Any]) -> Loaded:
        if name == CHAT:
            if self.chat is None:
                raise UserError("There is no endpoint any more. Choose another opponent.")
            there = [loaded for (other, _), loaded in self._loaded.items() if other == CHAT]  # one budget for all games
            return there[0] if there else Loaded(ChatAgent(self.chat, waits=False), self.games)
        agent = text_player(in_runs(name, str(self.runs)), env, "opponent")
        assert isinstance(agent, TextAgent)
        agent.style = Style.NATURAL  # a script reads any style, and speaks as the person does
        return Loaded(agent, self.games)

    def _model(self, name: str, env: Mapping[str, Any]) -> Loaded:
        called, _, at = bare(name).partition(AT)
        run, plans = str(self.runs / called), next((each for each in (SUFFIX, CICERO) if name.endswith(each)), "")
        folder = policy_folder(run)
        if not folder.is_dir():
            raise UserError(f"{called} is no longer among the finished runs. Choose another opponent.")
        settings = _settings(Path(run), 0)
        config, seats_per_game = player_config(run), player_count(env)
        context = min(settings["algo"]["context"], longest_stream(config))
        most, action = settings["algo"]["max_new_tokens"], action_model(run + plans)
        fit = check_memory(
            caches_of(run + plans, config, context, seats_per_game, self.cicero),
            size_of(config, context).weights + (bytes_of_players([str(action)], context) if action else 0),
            concurrency=self.games,
            setting="games_at_once",
            context=context,
            device=self.device,
        )
        limits = PlayConfig(games=fit.concurrency, concurrency=fit.concurrency, max_new_tokens=most, context=context)
        check_game(run, env["game"])
        policy = self.stage(called, int(at)).load(self.device) if at else run_policy(run, env["game"], self.device)
        style = style_of(folder, env)
        in_games = called_in_games(run) + (f"{AT}{at}" if at else "") + plans
        how = (self.planner, self.cicero)
        agent = model_player(
            run + plans, in_games, policy, limits, seats_per_game, self.temperature, *how, env["game"], style
        )
        return Loaded(agent, fit.concurrency)


def check_script(name: str, game: str, runs: Path) -> None:
    """Raises UserError if no scripted player has this name, which no finished run has."""
    try:
        text_player(name, game)
    except UserError as error:
        raise UserError(
            f"opponent={name}: there is no finished run of this name in {runs}, and no such scripted player. Train it, "
            "or name another."
        ) from error


@lru_cache(maxsize=4096)
def _settings(folder: Path, changed: int) -> dict[str, Any]:
    """`env` and `algo` (context, max_new_tokens) of a run's evaluation, or of a base. `changed` renews the cache."""
    if (folder / PARTS).is_file() or (folder / "policy.json").is_file():  # with intents, or a base
        card = read_card(policy_folder(str(folder)))
        made: Any = card.get("made_of")
        env = made.get("env") if isinstance(made, dict) else None
        if not isinstance(env, dict):
            raise UserError(f"{folder}: its policy.json does not say in which game it was made. Name another.")
        return {"env": {"game": card.get("game"), **env}, "algo": {"context": 1024, "max_new_tokens": 40}}
    settings = run_settings(folder)
    env = {**settings["env"], **(settings["eval"]["env"] or {})}
    env_maker(env)
    return {"env": env, "algo": {name: settings["algo"][name] for name in ("context", "max_new_tokens")}}
