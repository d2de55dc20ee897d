"""From a game's name to its parts, by convention: `envs/NAME_v0.py` and `marl/agents/scripted/NAME.py`.

The environment's module has `parallel_env` and `COMPACT_TOKENS` (strings that a small tokenizer keeps whole); the
environment has `facts` and `privileged(agent)`. Where the module has them: `PAYMENT` names settings that no player
reads of, so that they make no other base; `FILES` those that name files; `EXCHANGEABLE` has, by style, words that can
stand for one another. The scripts' module has `make_player(name, seed, role)` and `DEFAULT`, the name of the players
that a base corpus is made of; where these changed, a `VERSION` that a base is known by. The command line knows a game
by `conf/env/NAME.yaml`, and where a learner needs other settings in it, by `conf/tuned/NAME_LEARNER.yaml`.

The environment is a PettingZoo parallel one (subclass `envs.core.TextGame`). Each observation has `text` (what is new),
`turn` (a TurnKind) and `options` (empty unless one is to be chosen). `infos[agent]` always has `role`, `questions` (a
tuple of `Question`: what the agent is asked after this text) and, of what it just did, `error` (why it was refused, or
""), `message` (what others hear: without one nothing is paid to speech), `span` (where that stands in the reply) and
`entry` (what it counted as, in a word of the game's own, as "message" or "vote"; "" where no reply was due). At the end
`infos[agent]` has `outcome`, the same for all: `how` the game ended, in a few words of its own and one of a few ways,
and the `winner`, the name of a side or a seat, or None (a game that ends in a `deal` or without one needs no winner).
These words stand as they are in transcripts, as `game/how/HOW` and `game/win_rate/WINNER` in tables. `check_said`
refuses a game that leaves any of this out. `facts` has `roles` where there are several. A game of several styles has
the setting and attribute `style` and the reset option `styles`, by agent, so that players of different styles meet in
one game (`envs.core.read_styles`). A scripted player has `observe(text)` and `reply(text, options)`. The smallest whole
game is `Hint` in tests/marl/hint.py. Figures of a game's own, beside these and what its players were paid, go into
marl/metrics/evaluation.py.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from envs.core import check_file
from marl.agents.base import Player
from marl.agents.text import TextAgent
from marl.common.errors import UserError
from marl.model.tokens import Tokens


def game_module(game: str) -> ModuleType:
    """The environment's module."""
    if not isinstance(game, str) or not game.isidentifier():
        raise UserError(f"env.game={game}: must be the name of a game, as in env.game=dond")
    try:
        return importlib.import_module(f"envs.{game}_v0")
    except ModuleNotFoundError as error:
        raise UserError(f"env.game={game}: there is no game of this name (envs/{game}_v0.py)") from error


def scripts_module(game: str) -> ModuleType:
    """The module of the game's scripted players."""
    game_module(game)  # refuses a game that is not there
    return importlib.import_module(f"marl.agents.scripted.{game}")


def env_maker(env: Mapping[str, Any]) -> Callable[[], Any]:
    """Makes environments from the settings `env.*`. Builds one at once, so that bad settings are refused here."""
    settings = {k: v for k, v in env.items() if k != "game"}
    module = game_module(env["game"])

    def make() -> Any:
        return module.parallel_env(**settings)

    try:
        make()
    except OSError as error:
        raise _unreadable(settings, error) from error
    except (ValueError, TypeError, ArithmeticError, AttributeError, LookupError) as error:
        raise UserError(f"env.{error}" if f"{error} ".split(" ")[0] in settings else f"env: {error}") from error
    return make


SAID = ("role", "questions", "error", "message", "span", "entry")  # what `infos` has of each agent, always


def check_said(env: Any, infos: Mapping[str, Any]) -> None:
    """UserError, naming the game, where its `infos` lack what a game has to say (above)."""
    game = type(env).__name__
    for agent, info in infos.items():
        if lacking := [name for name in SAID if name not in info]:
            raise UserError(
                f"{game}: infos[{agent!r}] has no {', '.join(lacking)}; a game says these of each agent at every step, "
                "as marl/rollout/games.py describes"
            )
    if env.agents:
        return
    outcome = next(iter(infos.values())).get("outcome")
    if not isinstance(outcome, Mapping) or not (isinstance(outcome.get("how"), str) and outcome["how"]):
        raise UserError(
            f"{game}: outcome={outcome!r} at the end of a game; must have `how`, a few words on how the game ended"
        )
    if not ("winner" in outcome or "deal" in outcome) or not isinstance(outcome.get("winner"), str | None):
        raise UserError(
            f"{game}: outcome={outcome!r} at the end of a game; must have `winner`, the name of who won, or None"
        )


def file_digests(*envs: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """`files`: twelve hexadecimal digits that stand for what is in each file that these settings name. Empty where they
    name none; of an edited file a cache would not know otherwise. UserError where one cannot be read."""
    named = ((e, str(e[name])) for e in envs for name in getattr(game_module(e["game"]), "FILES", ()) if e.get(name))
    found: dict[str, str] = {}
    for path, env in sorted({path: env for env, path in named}.items(), key=lambda item: item[0]):
        try:
            check_file(path)
            found[path] = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
        except OSError as error:
            raise _unreadable(env, error) from error
    return {"files": found} if found else {}


def _unreadable(env: Mapping[str, Any], error: OSError) -> UserError:
    name = next((name for name, value in env.items() if str(value) == str(error.filename)), "?")
    return UserError(f"env.{name}={error.filename}: the file cannot be read ({error.strerror})")


def exchangeable(env: Mapping[str, Any]) -> tuple[str, ...]:
    """The words of the game in its style that can stand for one another; most games have none."""
    return tuple(getattr(game_module(env["game"]), "EXCHANGEABLE", {}).get(env.get("style"), ()))


def seats(env: Mapping[str, Any]) -> int:
    """How many players the game has under these settings."""
    return len(env_maker(env)().possible_agents)


def scripted(game: str, name: str = "", tokens: Tokens | None = None) -> TextAgent:
    """Scripted players of a game as an agent; with `tokens` it records streams."""
    module = scripts_module(game)
    try:
        module.make_player(name or module.DEFAULT, 0, "")
    except ValueError as error:
        raise UserError(str(error)) from error

    def make(seed: int, role: str) -> Player:
        return module.make_player(name or module.DEFAULT, seed, role)

    return TextAgent(name or "scripted", make, tokens)
