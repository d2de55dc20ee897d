"""A study played by programs in place of people, to try it out: `python -m experiments.web_simulate study=NAME`.

Programs open the study's pages, agree, and play by a scripted player that knows nothing but the pages. Their games lie
in RUNS/study-NAME-simulated, are called simulated in every file, and are never mixed with games of people. The same
command on a fresh folder plays the same games where opponents are scripted.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
from omegaconf import DictConfig

from experiments import web
from experiments.launch.command import command
from experiments.launch.terminal import say
from experiments.webapp.engine import Engine
from experiments.webapp.robot import Robot
from experiments.webapp.study import Study, read_study
from marl.agents.base import Player
from marl.common.errors import UserError, check_counts, check_writable, prefixed
from marl.rollout.games import scripts_module


@command("web_simulate")
def main(cfg: DictConfig) -> dict[str, float]:
    """Plays `plays` games. Returns the seconds that a reply took: median, p95 and, for one person, of it the page."""
    # Check.
    check_counts(cfg, ("plays", "people"))
    check_counts(cfg, ["seed"], 0)
    if cfg.simulated is not True:
        raise UserError("simulated=false: programs are no people. Leave it out.")
    web.check(cfg)
    check_writable(web.folder_of(cfg), "out")
    study = read_study(cfg.study)
    each = -(-cfg.plays // cfg.people)
    if each > study.games:
        raise UserError(
            f"plays={cfg.plays}: a person plays at most {study.games}. Give people={-(-cfg.plays // study.games)}."
        )
    counts = [each if n < cfg.people - 1 else cfg.plays - each * (cfg.people - 1) for n in range(cfg.people)]
    if min(counts) < 1:
        raise UserError(f"people={cfg.people}: would have no game each. Give fewer people, or more games.")

    # Play.
    with serving(cfg) as (address, engine):
        began = time.monotonic()
        robots = [join(address, study, cfg, number) for number in range(cfg.people)]  # in order: parts are assigned
        with ThreadPoolExecutor(cfg.people) as pool:
            for done in [pool.submit(play_all, robot, count) for robot, count in zip(robots, counts, strict=True)]:
                done.result()
        took = time.monotonic() - began

    # Say how long replies took.
    seconds = [second for robot in robots for second in robot.seconds]
    half, late = np.quantile(seconds, [0.5, 0.95])
    say(
        f"Programs played {cfg.plays} games of {study.name} as {cfg.people} people in {took:.1f} s, "
        f"{engine.thinking:.1f} s of which their opponents took."
    )
    say(f"A reply took {half:.2f} s in the middle, {late:.2f} s at the 95th percentile.")
    found = {
        "people": cfg.people,
        "games": cfg.plays,
        "replies": len(seconds),
        "median": float(half),
        "p95": float(late),
    }
    if cfg.people == 1:
        found["page"] = max(0.0, robots[0].waited - engine.thinking) / len(seconds)
        say(f"Of each reply, {found['page']:.3f} s went to the page.")
    where = "" if cfg.runs == "runs" else f" runs={cfg.runs}"
    where += "" if cfg.out is None else f" study_out={cfg.out}"
    say(f"Tables: python -m experiments.web_export study={cfg.study} simulated=true{where}")
    return found


def join(address: str, study: Study, cfg: DictConfig, number: int) -> Robot:
    """Somebody who consents. All play by the same script, with seeds of their own."""
    modules = {part.game: scripts_module(part.game) for part in study.parts.values()}
    if len(modules) != 1:
        raise UserError(f"study {study.name}: its parts are of several games; programs play studies of one game.")
    (module,) = modules.values()

    def player(seed: int, role: str) -> Player:
        made: Player = module.make_player(cfg.player, seed, role)
        return made

    with prefixed(f"player={cfg.player}: ", ValueError):
        player(0, "")
    token = "" if cfg.token is None else str(cfg.token)
    robot = Robot(address, player, int(cfg.seed) * 1000 + number, token)
    robot.join(len(study.consent), study.screening.right if study.screening else None)
    return robot


def play_all(robot: Robot, count: int) -> None:
    try:
        for number in range(count):
            if not robot.play(number):
                break
        robot.finish()
    finally:
        robot.client.close()


@contextmanager
def serving(cfg: DictConfig) -> Iterator[tuple[str, Engine]]:
    """Serves the study in a thread of this process. Returns its address, and the engine that plays its games."""
    uvicorn = web.web_server()
    listening = web.listen("127.0.0.1", cfg.port)
    app, shut, engine = web.site(cfg)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", engine
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        shut()
        listening.close()


if __name__ == "__main__":
    main()
