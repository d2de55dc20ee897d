"""A person plays a game in the terminal against any agent: `python -m experiments.play env=among_us opponent=careful`.

The person holds one seat, drawn by the game's seed, and the opponent all others; a run is played in its own game. The
person gets the same observations and corrections as a model, and the game is recorded, also an unfinished one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from envs.core import END
from experiments.cli import command
from experiments.evaluate import as_in_runs, find_player, memory_of, pick_device, planner_config
from experiments.players import check_plans
from experiments.terminal import say
from marl.agents import Agent, TextAgent
from marl.config import build
from marl.errors import UserError
from marl.files import write_text
from marl.games import env_maker
from marl.rollout import Game, draw_games, rollout
from marl.transcripts import episode_to_json, render_text, write_episodes
from marl.types import Episode

HINTS = {  # what the rules in compact style leave unsaid, by game
    "dond": (
        "Write [message] and your words, or [propose] and what you claim, as in: [propose] (1 books, 0 hats, 2 balls)"
    ),
    "among_us": (
        "Choose by the number of an option, or by its words. Where there are none, it is your turn to speak: write "
        "what the others shall hear. A name after 'at' is a player in your room, 'task' one of yours to be done there."
    ),
}
COMPACT = "The game tells things in few words, as small models read them; env.style=natural spells them out."


class Person:
    """Reads from the terminal. A reply without its end marker gets one; an option may be given by its number."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def observe(self, text: str) -> None:
        if text:
            say(text.rstrip())
            self.log.append(text)

    def reply(self, text: str, options: Sequence[str] = ()) -> str:
        self.observe(text)
        for number, option in enumerate(options, start=1):
            say(f"  {number}) {option}")
        said = input("you> ").strip()
        if options and said.isdecimal() and 1 <= int(said) <= len(options):
            said = options[int(said) - 1]
        elif not options and END not in said:
            said = f"{said} {END}"
        self.log.append(f"you> {said}")
        return said


@command("play")
def main(cfg: DictConfig) -> None:
    """Plays `games` games and records them."""
    cfg = as_in_runs(cfg, [cfg.opponent])
    parts = build(cfg, [cfg.opponent])
    check_plans(cfg.opponent, parts.env["game"])
    planner_config(cfg)
    make_env = env_maker(parts.env)
    person = Person()
    human = TextAgent("human", lambda seed, role: person)
    device = pick_device(cfg.device)
    caches = memory_of(cfg, parts, [(cfg.opponent, cfg.opponent)], device)
    if caches:
        say(caches)
    opponent = find_player(cfg.opponent, cfg, parts, device, cfg.opponent)
    out = Path(cfg.out)
    earlier = [*out.glob("episodes-*.jsonl"), *out.glob("unfinished-*.txt")]
    number = 1 + max((int(found[1]) for path in earlier if (found := re.search(r"-(\d+)$", path.stem))), default=0)
    record, unfinished = out / f"episodes-{number:03d}.jsonl", out / f"unfinished-{number:03d}.txt"

    def cast(game: Game, env: Any) -> Mapping[str, Agent]:
        seats: dict[str, Agent] = dict.fromkeys(env.possible_agents, opponent)
        return {**seats, env.possible_agents[game.seed % len(seats)]: human}

    episodes: list[Episode] = []
    say(HINTS.get(parts.env["game"], "Choose by the number of an option; where there are none, write."))
    if parts.env["style"] == "compact" and isinstance(opponent, TextAgent):  # scripts read both styles, models one
        say(COMPACT)
    try:
        for game in draw_games(cfg.seed, count=cfg.games):
            say(f"\n── a new game ({len(episodes) + 1} of {cfg.games}) " + "─" * 40)
            person.log.clear()
            episodes += rollout([game], cast, make_env, 1)
            say(render_text(episode_to_json(episodes[-1])))
            write_episodes(record, episodes)
    except (EOFError, KeyboardInterrupt, UserError) as error:
        out.mkdir(parents=True, exist_ok=True)
        write_text(unfinished, "\n".join(person.log) + "\n")
        say(f"\nstopped; the unfinished game is in {unfinished}")
        if isinstance(error, UserError):
            raise
        return
    say(f"recorded: {record}")
    if parts.chat:
        say(parts.chat.summary())


if __name__ == "__main__":
    main()
