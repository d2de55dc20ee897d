"""Finds the parts of a game by its name: `envs/NAME_v0.py` and `marl/agents/scripted/NAME.py`.

A game of one's own has `NAME_v0.py` and `NAME_scripted.py` in the folder that one works in, or anywhere on Python's
path; docs/howto/game.md builds one. The environment's module may also have
- `PAYMENT`: settings that no player reads about, so they need no other base.
- `FILES`: settings that name files.
- `EXCHANGEABLE`: words that can replace one another, by style.
- `LATER`: newer settings, each with the value at which it changes nothing.
- `TRUTHS = True`: `infos` have `truths`, the true options of a choice that says what its agent believes (of a vote: the
  imposters).

The scripts' module may have a `VERSION`: a new one means that the scripts changed and need a new base. A game of
several styles has the setting and attribute `style`, and the reset option `styles`, by agent (`envs.core.read_styles`).
"""

import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from envs.core import check_file
from marl.agents.base import Player
from marl.agents.text import TextAgent
from marl.common.errors import UserError
from marl.model.tokens import Tokens

INFO_KEYS = ("role", "questions", "error", "message", "span", "entry")  # keys that each agent's info always has


def game_module(game: str) -> ModuleType:
    """Imports the environment's module. Raises UserError if there is none."""
    if not isinstance(game, str) or not game.isidentifier():
        raise UserError(f"env.game={game}: must be the name of a game, as in env.game=dond")
    missing = "There is no game of this name: no file envs/{0}_v0.py, and no {0}_v0.py on Python's path."
    return _module((f"envs.{game}_v0", f"{game}_v0"), game, missing)


def scripts_module(game: str) -> ModuleType:
    """Imports the module of the game's scripted players."""
    game_module(game)  # refuses a game that is not there
    missing = "This game has no scripted players: write {0}_scripted.py (docs/howto/game.md), or give base=none."
    return _module((f"marl.agents.scripted.{game}", f"{game}_scripted"), game, missing)


def _module(names: Sequence[str], game: str, missing: str) -> ModuleType:
    """Imports the first of these modules that there is."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                needs = f"{name} needs {error.name}, which is not installed. Install it."
                raise UserError(f"env.game={game}: {needs}") from error
            absent = error
    raise UserError(f"env.game={game}: {missing.format(game)}") from absent


def env_maker(env: Mapping[str, Any]) -> Callable[[], Any]:
    """Returns a function that makes environments of the settings `env.*`. Raises UserError for bad settings."""
    settings = {k: v for k, v in env.items() if k != "game"}
    module = game_module(env["game"])

    def make() -> Any:
        return module.parallel_env(**settings)

    try:
        make()
    except OSError as error:
        raise _unreadable(settings, error) from error
    except (ValueError, TypeError, ArithmeticError, AttributeError, LookupError, ImportError) as error:
        raise UserError(f"env.{error}" if f"{error} ".split(" ")[0] in settings else f"env: {error}") from error
    return make


def is_installed(env: Mapping[str, Any]) -> bool:
    """Tells whether the package that the game needs is installed. Raises UserError for bad settings."""
    try:
        env_maker(env)
    except UserError as error:
        if isinstance(error.__cause__, ImportError):
            return False
        raise
    return True


def check_infos(env: Any, infos: Mapping[str, Any]) -> None:
    """Raises UserError, naming the game, if its `infos` lack a key of INFO_KEYS or, at the end, a valid `outcome`."""
    game = type(env).__name__
    for agent, info in infos.items():
        if lacking := [name for name in INFO_KEYS if name not in info]:
            raise UserError(
                f"{game}: infos[{agent!r}] has no {', '.join(lacking)}; a game says these of each agent at every step, "
                "as docs/howto/game.md describes"
            )
    if env.agents:
        return
    outcome = next(iter(infos.values())).get("outcome")
    ended = f"{game}: outcome={outcome!r} at the end of a game"
    if not isinstance(outcome, Mapping) or not (isinstance(outcome.get("how"), str) and outcome["how"]):
        raise UserError(f"{ended}; must have `how`, a few words on how the game ended")
    if not ("winner" in outcome or "deal" in outcome) or not isinstance(outcome.get("winner"), str | None):
        raise UserError(f"{ended}; must have `winner`, the name of who won, or None")


def file_digests(*envs: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Returns `files`: a digest (twelve hexadecimal digits) of each file that these settings name; {} without any.

    Raises UserError if a file cannot be read.
    """
    named = {str(e[name]): e for e in envs for name in getattr(game_module(e["game"]), "FILES", ()) if e.get(name)}
    found: dict[str, str] = {}
    for path, env in sorted(named.items(), key=lambda item: item[0]):
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
    """Returns the words of the game's style that can replace one another; most games have none."""
    return tuple(getattr(game_module(env["game"]), "EXCHANGEABLE", {}).get(env.get("style"), ()))


def without_later(env: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings without newer ones that are off, so that older runs and bases keep their names."""
    later = getattr(game_module(env["game"]), "LATER", {})
    return {name: value for name, value in env.items() if name not in later or value != later[name]}


def has_truths(env: Mapping[str, Any]) -> bool:
    """Tells whether some choices of the game say what their agent believes, and `infos` have the true ones."""
    return bool(getattr(game_module(env["game"]), "TRUTHS", False))


def player_count(env: Mapping[str, Any]) -> int:
    """Counts the players that the game has under these settings."""
    return len(env_maker(env)().possible_agents)


def scripted(game: str, name: str = "", tokens: Tokens | None = None) -> TextAgent:
    """Makes an agent of the game's scripted players; with `tokens` it records streams."""
    module = scripts_module(game)
    name_of = name or module.DEFAULT

    def make(seed: int, role: str) -> Player:
        return module.make_player(name_of, seed, role)

    try:
        make(0, "")
    except ValueError as error:
        raise UserError(str(error)) from error
    return TextAgent(name or "scripted", make, tokens)
