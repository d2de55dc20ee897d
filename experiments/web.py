"""A web page to play, to watch recorded games, to follow runs, or to run a study: `python -m experiments.web`.

It answers on http://127.0.0.1:8700 to this machine alone. `host=0.0.0.0` lets others in and needs a `token`, which
they type once. Games are kept in `out`/games.sqlite: a restart goes on with them. Finished games are recorded under
`out`/episodes, and are among the games to watch. With `study` the pages are those of a study with people, alone.
"""

import socket
import threading
import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from experiments.launch.command import command
from experiments.launch.terminal import say
from experiments.setup.config import make, plain
from experiments.setup.devices import pick_device
from experiments.webapp.study import read_study, study_folder
from marl.agents.chat import ChatAgent, ChatConfig
from marl.common.errors import UserError, check_counts, check_temperature, check_writable
from marl.intents.agent import CiceroConfig
from marl.planning.planner import PlannerConfig
from marl.rollout.games import is_installed

SHORTEST = 8  # characters of a token
IN_TERMINAL = ("www-browser", "links", "elinks", "lynx", "w3m")  # browsers


@command("web")
def main(cfg: DictConfig) -> None:
    """Serves the pages until it is stopped."""
    uvicorn = web_server()
    check(cfg)
    check_writable(folder_of(cfg), "out")
    listening = listen(cfg.host, cfg.port)
    try:
        app, shut, _ = site(cfg)
        try:
            shown = "127.0.0.1" if cfg.host in ("0.0.0.0", "::") else cfg.host
            address = f"http://{shown}:{listening.getsockname()[1]}"
            say(f"{address} (Ctrl-C stops it; open games go on at the next start)")
            if cfg.open:
                show(address)
            server = uvicorn.Server(uvicorn.Config(app, log_level="warning", server_header=False, access_log=False))
            server.run(sockets=[listening])
        finally:
            shut()
    finally:
        listening.close()


def web_server() -> Any:
    """Returns the module uvicorn. UserError where what the page needs is not installed."""
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise UserError("The web page needs uvicorn and starlette. Install them: pip install -e '.[web]'") from error
    return uvicorn


def check(cfg: DictConfig) -> None:
    """Refuses settings that cannot work or are not safe."""
    check_counts(cfg, ("games_at_once", "games_each", "models", "idle_minutes", "requests", "new_people"))
    check_temperature(cfg.temperature, "temperature")
    if isinstance(cfg.port, bool) or not isinstance(cfg.port, int) or not 0 <= cfg.port <= 65535:
        raise UserError(f"port={cfg.port}: must be a whole number from 0 to 65535")
    if not isinstance(cfg.host, str) or not cfg.host:
        raise UserError(f"host={cfg.host}: must be an address of this machine, as in host=127.0.0.1")
    if cfg.token is not None and len(str(cfg.token)) < SHORTEST:
        raise UserError(f"token: must have at least {SHORTEST} characters. Choose a longer one.")
    if cfg.host not in ("127.0.0.1", "localhost", "::1") and cfg.token is None:
        raise UserError(f"host={cfg.host}: others could reach this page. Give a token, as in token=WORDS.")
    for name in ("simulated", "open"):
        if not isinstance(cfg[name], bool):
            raise UserError(f"{name}={cfg[name]}: must be true or false")
    if cfg.simulated and not cfg.study:
        raise UserError("simulated=true is of a study. Give study, or leave it out.")
    if cfg.study and not cfg.simulated and (blanks := read_study(cfg.study).blanks):
        raise UserError(
            f"study={cfg.study}: {blanks[0]} has to be filled in. Copy the file, and say there what people read."
        )
    if endpoint := endpoint_of(cfg):
        ChatAgent(endpoint)  # refuses what cannot work before anybody comes
    for game, group in plain(cfg.games).items():
        if group["env"]["game"] != game:
            raise UserError(f"games.{game}.env.game={group['env']['game']}: must be {game}")
        is_installed(group["env"])


def endpoint_of(cfg: DictConfig) -> ChatConfig | None:
    """The endpoint of the opponent `chat`, if any. Answers are kept in no file but the games': with each stand the
    words of a person, who may take them back."""
    if not cfg.chat.url:
        return None
    found: ChatConfig = make(ChatConfig, plain(cfg)["chat"], "chat")
    return found if found.replay else replace(found, answers="")


def folder_of(cfg: DictConfig) -> Path:
    """The folder of the games: `out`, or where they belong."""
    if cfg.out is not None:
        return Path(cfg.out)
    return study_folder(cfg.runs, read_study(cfg.study).name, cfg.simulated) if cfg.study else Path(cfg.runs) / "web"


def listen(host: str, port: int) -> socket.socket:
    """Takes the port. UserError if it is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(128)  # whoever comes before the server runs waits for it
    except OSError as error:
        listening.close()
        raise UserError(f"{host}:{port} cannot be used ({error.strerror or error}). Choose another port.") from error
    return listening


def show(address: str) -> None:
    """Opens a page in the default browser. Does nothing where there is none, or only one that needs this terminal."""
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return
    if Path(getattr(browser, "name", "")).name not in IN_TERMINAL:
        threading.Thread(target=browser.open, args=(address,), daemon=True).start()


def site(cfg: DictConfig) -> tuple[Any, Any, Any]:
    """Returns the application, what shuts it, and the engine that plays the games."""
    from experiments.webapp.engine import Engine, Limits
    from experiments.webapp.opponents import Opponents
    from experiments.webapp.pages import Site
    from experiments.webapp.roster import Roster, check_study
    from experiments.webapp.session import Rate, Sessions
    from experiments.webapp.store import Store

    runs, out, settings = Path(cfg.runs), folder_of(cfg), plain(cfg)
    opponents = Opponents(
        runs,
        {game: group["env"] for game, group in settings["games"].items() if is_installed(group["env"])},
        device=pick_device(cfg.device),
        temperature=cfg.temperature,
        games=cfg.games_at_once,
        models=cfg.models,
        planner=make(PlannerConfig, settings["planner"], "planner"),
        cicero=make(CiceroConfig, settings["cicero"], "cicero"),
        chat=endpoint_of(cfg),
    )
    store = Store(out / "games.sqlite")
    engine = None
    try:
        if not cfg.study:
            check_study(store, None)
        roster = Roster(store, read_study(cfg.study), cfg.simulated) if cfg.study else None
        limits = Limits(cfg.games_at_once, 1 if roster else cfg.games_each, 60.0 * cfg.idle_minutes)
        engine = Engine(store, opponents, out, limits, "simulated" if cfg.simulated else "human")
        token = None if cfg.token is None else str(cfg.token)
        rates = Rate(cfg.requests), Rate(cfg.new_people)
        pages = Site(engine, store, opponents, Sessions(store.secret, token), runs, *rates, roster)
    except UserError:
        store.close()
        raise
    engine.start()
    while engine.alive and not engine.resumed.wait(0.1):
        pass  # whoever comes before the games are taken up again waits, and sees no empty one

    def shut() -> None:
        engine.shut()
        opponents.leave()
        store.close()

    return pages.app(), shut, engine


if __name__ == "__main__":
    main()
