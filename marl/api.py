"""The Python interface: load players, play games, look at what was said and believed, train.

    import marl

    players = marl.load("runs/among_us_quickstart-full-s12-a4d12a41")
    episodes = marl.play(players.env, {"crewmate": players["trained"], "imposter": players["base"]}, 20)
    episodes[0].show()
    marl.influence(episodes[0])

Left out: sweeps, tables and reports, which are commands (`python -m experiments.train`).
"""

import importlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from marl.agents.base import Agent
from marl.agents.model import ModelAgent
from marl.common.errors import UserError
from marl.model.lora import merged, unadapted
from marl.model.policy import Policy
from marl.report.html import episode_html
from marl.report.transcripts import episode_to_json
from marl.report.views import render_text
from marl.rewards import Reward
from marl.rewards.speaking import SpeakingReward
from marl.rollout.cast import RoleConfig, alternating, by_role, seats_per_player
from marl.rollout.games import env_maker, scripted
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import EVALUATION, draw_games
from marl.storage.checkpoint import is_adapter, load_policy, read_card, save_policy
from marl.storage.folder import REFERENCE, finished_run
from marl.types import Episode


@dataclass(frozen=True)
class ModelPlayer:
    """A language model that can play: its policy, and how it was trained to read and reply.

    `context` and `max_new_tokens` are in tokens; `style` is the style of the game's text that it reads (None: any).
    """

    name: str
    policy: Policy = field(repr=False)
    context: int
    max_new_tokens: int
    style: str | None = None


Seated: TypeAlias = ModelPlayer | Agent | str


class Players(dict[str, ModelPlayer]):
    """The players of a finished run by name: `trained`, `base`, and `rival` if two learned.

    `env`: the settings of the run's game, as `play` takes them. `run`: its folder.
    """

    def __init__(self, players: Mapping[str, ModelPlayer], env: Mapping[str, Any], run: Path) -> None:
        super().__init__(players)
        self.env, self.run = dict(env), run

    def __missing__(self, name: str) -> ModelPlayer:
        raise UserError(f"{self.run} has no player {name}. It has {', '.join(self)}.")

    def __repr__(self) -> str:
        return f"<players of {self.run}: {', '.join(self)}>"


class PlayedEpisode(Episode):
    """An `Episode` that shows itself: as text in a terminal, with belief bars in a notebook."""

    def show(self) -> None:
        """Prints the game; in a notebook, displays it."""
        shell = sys.modules.get("IPython")
        if shell is not None and shell.get_ipython() is not None:
            shell.display.display(shell.display.HTML(self._repr_html_()))
        else:
            print(self)

    def __str__(self) -> str:
        return render_text(episode_to_json(self))

    def _repr_html_(self) -> str:
        return episode_html(episode_to_json(self))


def load(run: str | Path, device: str = "cpu") -> Players:
    """Loads the players of a finished run.

    Raises UserError if `run` is no run's folder, is unfinished, or was made by another version of this project.

        players = marl.load("runs/dond-custom-s0-1a2b3c4d")
        players["trained"], players["base"], players.env
    """
    folder = Path(run)
    settings, _ = finished_run(folder)
    env, algo = settings["env"], settings["algo"]
    if algo.get("intents"):
        raise UserError(f"{folder} learned under intents, and would play without them. Use experiments.evaluate.")
    try:
        env_maker(env)
    except UserError as error:
        raise UserError(
            f"{folder} was made by another version of this project: {error}. Make the run again."
        ) from error
    names = {"base": REFERENCE, "trained": "policy", "rival": "rival"}

    def player(name: str, policy: Policy) -> ModelPlayer:
        return ModelPlayer(name, policy, algo["context"], algo["max_new_tokens"], env.get("style"))

    found: dict[str, ModelPlayer] = {}
    for name, part in names.items():
        if not (folder / part / "policy.json").is_file():
            if name == "trained":
                raise UserError(f"{folder} has no policy. Name the folder of a finished run.")
            continue
        if (game := read_card(folder / part).get("game")) not in (None, env["game"]):
            raise UserError(f"{folder / part} plays {game}, and its run's game is {env['game']}. Name another run.")
        policy = load_policy(folder / part, device, over=found["base"].policy if "base" in found else None)
        found[name] = player(name, policy)
        if "base" not in found and policy.adapter:  # over an untouched model
            found["base"] = player("base", unadapted(policy))
    return Players({name: found[name] for name in ("trained", "rival", "base") if name in found}, env, folder)


def merge(run: str | Path, to: str | Path) -> Path:
    """Makes a plain model of `transformers` in the folder `to`: a run's base with its adapter added to the weights.

    Raises UserError if the run has no adapter, its base is not there, or `to` holds something.

        marl.merge("runs/dond-custom-s0-1a2b3c4d", "merged")
    """
    folder, to = Path(run) / "policy", Path(to)
    card = read_card(folder)
    if not is_adapter(folder):
        raise UserError(f"{folder} has no adapter: it is a whole model already.")
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise UserError(f"{to} holds something. Name a new folder.")
    save_policy(to, merged(load_policy(folder)), {name: card[name] for name in card if name != "adapts"})
    return to


def play(
    game: str | Mapping[str, Any],
    players: Seated | Mapping[str, Seated] | Sequence[Seated],
    n: int = 1,
    *,
    seed: int = 0,
    temperature: float = 1.0,
    concurrency: int = 16,
) -> list[PlayedEpisode]:
    """Plays `n` games and returns their episodes.

    `game`: `among_us`, `dond`, or settings with `game` in them, as `Players.env`. `players`: one for all seats; by
    role, as {"crewmate": ..., "imposter": ...}; or a pair, who change seats from game to game. A player is a
    `ModelPlayer` of `load`, an agent, or the name of a scripted player (`scripted` is the game's usual one). The same
    seed gives the same games. `concurrency`: games at a time, which share the models' passes.
    Raises UserError for a game, a role or a scripted player that does not exist.

        marl.play("dond", "scripted", 2)
        marl.play(players.env, [players["trained"], players["base"]], 100)
    """
    if n < 1 or concurrency < 1:
        raise UserError(f"n={n}, concurrency={concurrency}: both must be at least 1.")
    env = {"game": game} if isinstance(game, str) else dict(game)
    make_env = env_maker(env)
    at_once = min(n, concurrency)

    def agent(player: Seated, seats_per_game: int) -> Any:
        if isinstance(player, str):
            return scripted(env["game"], "" if player == "scripted" else player)
        if not isinstance(player, ModelPlayer):
            return player
        limits = {"context": player.context, "max_new_tokens": player.max_new_tokens, "temperature": temperature}
        return ModelAgent(player.name, player.policy, slots=seats_per_game * at_once, style=player.style, **limits)  # type: ignore[arg-type]

    size = len(make_env().possible_agents)
    if isinstance(players, Mapping):
        cast = {role: RoleConfig(role) for role in players}
        held = seats_per_player(cast, make_env())
        seated = by_role(cast, {role: agent(player, held[role]) for role, player in players.items()})
    elif isinstance(players, Sequence) and not isinstance(players, str):
        if len(players) != 2:
            raise UserError(f"players: {len(players)} in a list. Give a pair, one player for all, or players by role.")
        seated = alternating(*(agent(player, math.ceil(size / 2)) for player in players))
    else:
        seated = everyone(agent(players, size))
    episodes = rollout(draw_games(seed, EVALUATION, count=n), seated, make_env, concurrency)
    return [PlayedEpisode(**{f.name: getattr(episode, f.name) for f in fields(episode)}) for episode in episodes]


def beliefs(episode: Episode) -> dict[tuple[str, str], np.ndarray]:
    """Returns each listener's belief in the truth over the game, by (listener, question).

    Each array has shape (steps + 1,): entry s is the probability of the true answer after s steps of the environment,
    nan before the listener was first asked. All candidates' probabilities stand in `episode.beliefs`.

        first, last = marl.beliefs(episode)["player_0", "<books?>"][[0, -1]]
    """
    curves: dict[tuple[str, str], np.ndarray] = {}
    for belief in episode.beliefs:  # in order of time
        curve = curves.setdefault(belief.asked, np.full(episode.steps + 1, np.nan))
        curve[belief.step :] = belief.truth
    return curves


def influence(episode: Episode) -> dict[str, np.ndarray]:
    """Returns how far each turn's message moved each listener's belief toward the truth, by listener.

    Each array has shape (turns,): the change of the probability of the true answer, summed over the listener's
    questions; nan if the turn said nothing or the listener was not asked before and after it.

        np.nansum(marl.influence(episode)["player_0"])  # what player_0 learned from all messages, in probability
    """
    found: dict[str, np.ndarray] = {}
    for (listener, text), curve in beliefs(episode).items():
        changes = found.setdefault(listener, np.full(len(episode.turns), np.nan))
        asked = {b.step for b in episode.beliefs if b.asked == (listener, text)}
        for u, turn in enumerate(episode.turns):
            if turn.message and turn.agent != listener and turn.step + 1 in asked and min(asked) <= turn.step:
                change = curve[turn.step + 1] - curve[turn.step]
                changes[u] = change if np.isnan(changes[u]) else changes[u] + change
    return found


def credit(episode: Episode, reward: Reward | None = None) -> np.ndarray:
    """Returns what a reward (default: the speaking reward) pays each turn, unweighted, shape (turns,).

    The speaking reward is 0 at turns after which nobody was asked.

        best = episode.turns[marl.credit(episode).argmax()].message
    """
    return np.asarray((reward or SpeakingReward())(episode), float)


def train(*overrides: str) -> Path:
    """Trains one run as `python -m experiments.train` does, and returns its folder. A finished run is not made again.

    `overrides`: settings as on the command line. Raises UserError for a mistake in them.

        run = marl.train("env=dond", "algo.iterations=4", "seed=1")
        players = marl.load(run)
    """
    commands = importlib.import_module("experiments.api")  # the one way up: commands stand above marl
    return Path(commands.train(overrides))
