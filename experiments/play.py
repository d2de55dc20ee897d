"""A person plays a game in the terminal against any agent: `python -m experiments.play env=among_us opponent=careful`.

The person holds one seat, drawn by the game's seed, and the opponent all others; a run is played in its own game. The
person reads natural words, and so do scripts; a model reads the style that it was trained in. A finished game is
recorded as a transcript in `episodes-NNN.jsonl`, with `about`: against whom, under which settings, and how many seconds
each of the person's replies took. Of a game that ends in any other way (Ctrl-C, Ctrl-D, a closed window, an error) what
was shown and typed is kept in `unfinished-NNN.txt`, below a line of JSON with the same.
"""

import io
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from envs.core import END, Style
from experiments.launch.command import command
from experiments.launch.terminal import say
from experiments.setup.config import plain
from experiments.setup.devices import pick_device
from experiments.setup.entrants import as_in_runs, find_player
from experiments.setup.memory import fit_to_memory
from experiments.setup.players import check_plans, in_runs
from experiments.setup.refusals import say_refusals
from experiments.setup.spec import PlaySpec, behind_endpoint, play_spec
from marl.agents.base import Agent
from marl.agents.chat import ChatAgent
from marl.agents.model import ModelAgent
from marl.agents.text import TextAgent
from marl.common.errors import check_counts, check_writable
from marl.common.files import write_text
from marl.intents.agent import CICERO
from marl.planning.planner import SUFFIX
from marl.report.transcripts import episode_to_json, write_transcripts
from marl.report.views import Transcript, render_text
from marl.rollout.games import env_maker
from marl.rollout.rollout import Cast, rollout
from marl.rollout.seeds import Game, draw_games
from marl.types import Episode

HINTS = {  # how to answer, by game or by its format
    "dond": (
        "Write [message] and your words, or [propose] and what you claim, as in: [propose] (1 books, 0 hats, 2 balls)"
    ),
    "structured": (
        "Choose by the number of an option, or by its words. Where there are none, write your message: plain words, "
        "without tags."
    ),
    "diplomacy": (
        "Choose by the number of an option, or by its words. Where there are none, write your message: only the power "
        "that you chose reads it."
    ),
    "among_us": (
        "Choose by the number of an option, or by its words. Where there are none, it is your turn to speak: write "
        "what the others shall hear."
    ),
}


class Person:
    """Reads from the terminal. A reply without its end marker gets one; an option that is not a count may be given by
    its number. Is told which seats an endpoint (`chat`) has lost."""

    def __init__(self, chat: ChatAgent | None = None) -> None:
        self.chat, self.reported = chat, 0
        self.begin()

    def begin(self) -> None:
        """Forgets what was shown and typed (`log`), and the seconds that each reply took."""
        self.log: list[str] = []
        self.seconds: list[float] = []

    def observe(self, text: str) -> None:
        if text:
            say(text.rstrip())
            self.log.append(text)

    def reply(self, text: str, options: Sequence[str] = ()) -> str:
        self.observe(text)
        for _, reason in self.chat.lost[self.reported :] if self.chat else ():
            self.reported += 1
            say(f"(chat: {reason}; this player says and does nothing more. Ctrl-C ends the game)")
        numbered = not all(option.isdecimal() for option in options)
        for number, option in enumerate(options, start=1):
            say(f"  {number}) {option}" if numbered else f"  {option}")
        asked = time.monotonic()
        said = input("you> ").strip()
        self.seconds.append(round(time.monotonic() - asked, 1))
        if numbered and said.isdecimal() and 1 <= int(said) <= len(options):
            said = options[int(said) - 1]
        elif not options and END not in said:
            said = f"{said} {END}"
        self.log.append(f"you> {said}")
        return said


class Recording:
    """The games of one start in the folder `out`: those that ended, and what was shown and typed of one that did not.

    `number` is that of the files; `settings` stand in each game's `about`.
    """

    def __init__(self, out: Path, number: int, person: Person, settings: Mapping[str, Any]) -> None:
        self.out, self.number, self.person, self.settings = out, number, person, settings
        self.played: list[Transcript] = []
        self.about: dict[str, Any] = {}  # of the game that is played
        self.episodes: Path | None = None
        self.unfinished: Path | None = None

    def begin(self, game: Game) -> None:
        """Begins a game."""
        self.person.begin()
        began = datetime.now(UTC).isoformat(timespec="seconds")
        self.about = {**self.settings, "game_seed": game.seed, "began": began}

    def add(self, episode: Episode) -> None:
        """Records the game, which has ended, and shows it."""
        self.played.append({**episode_to_json(episode), "about": {**self.about, "reply_seconds": self.person.seconds}})
        self.episodes = self.episodes or new_file(self.out, "episodes-{:03d}.jsonl", self.number)
        write_transcripts(self.episodes, self.played)
        self.person.begin()
        say(render_text(self.played[-1]))

    def keep(self) -> None:
        """Keeps what was shown and typed of a game that did not end."""
        if self.person.log:
            head = {"unfinished": True, **self.about, "reply_seconds": self.person.seconds}
            self.unfinished = self.unfinished or new_file(self.out, "unfinished-{:03d}.txt", self.number)
            write_text(self.unfinished, "\n".join([json.dumps(head, ensure_ascii=False), *self.person.log]) + "\n")
            with suppress(OSError):  # the terminal may be gone
                say(f"\nstopped; the unfinished game is in {self.unfinished}")


@command("play", implies={"data.dond": "base=human"})
def main(cfg: DictConfig) -> None:
    """Plays `games` games and records them."""
    # Configure: as the opponent's run is; where no seed is given, it is the number of this start's files.
    cfg.opponent = in_runs(str(cfg.opponent), cfg.runs)
    cfg = as_in_runs(cfg, [cfg.opponent])
    out = Path(cfg.out)
    number = next_number(out)
    if cfg.seed is None:
        cfg.seed = number

    # Check.
    check_counts(cfg, ("games", "concurrency"))
    check_counts(cfg, ["seed"], 0)
    parts = play_spec(cfg, [cfg.opponent])
    check_plans(cfg.opponent, parts.env)
    make_env = env_maker(parts.env)
    check_writable(out, "out")

    # Play.
    person = Person(parts.chat)
    human = TextAgent("human", lambda seed, role: person, style=Style.NATURAL)
    device = pick_device(cfg.device)
    parts = fit_to_memory(parts, 1, [(cfg.opponent, cfg.opponent)], device)
    opponent = find_player(cfg.opponent, parts, device, cfg.opponent, "opponent")
    if isinstance(opponent, TextAgent):
        opponent.style = human.style  # a script reads any style, and speaks as the person does
    recording = Recording(out, number, person, settings_of(opponent, cfg, parts))
    game_or_format = next((key for key in (parts.env.get("format"), parts.env["game"]) if key in HINTS), "")
    say(HINTS.get(game_or_format, "Choose by the number of an option; where there are none, write."))
    say(f"seed={cfg.seed} deals the same again.")
    play_games(draw_games(cfg.seed, count=cfg.games), against(human, opponent), make_env, recording)

    # Write: games are recorded as they end.
    with suppress(OSError):  # the terminal may be gone
        if recording.episodes:
            say(f"recorded: {recording.episodes}")
        say_refusals(opponent)
        if parts.chat:
            say(parts.chat.summary())


def next_number(out: Path) -> int:
    """Numbers the files of this start: one more than the last in the folder."""
    earlier = [*out.glob("episodes-*.jsonl"), *out.glob("unfinished-*.txt")]
    return 1 + max((int(found[1]) for path in earlier if (found := re.search(r"-(\d+)$", path.stem))), default=0)


def against(human: Agent, opponent: Agent) -> Cast:
    """Seats the person where the game's seed says, and the opponent everywhere else."""

    def cast(game: Game, env: Any) -> Mapping[str, Agent]:
        seats: dict[str, Agent] = dict.fromkeys(env.possible_agents, opponent)
        return {**seats, env.possible_agents[game.seed % len(seats)]: human}

    return cast


def play_games(games: Sequence[Game], cast: Cast, make_env: Callable[[], Any], recording: Recording) -> None:
    """Plays one game after another until the last or until the person stops. Records what was played in any case."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a key that types no UTF-8 is no reason to end a game
    with stoppable():
        try:  # an interrupt may come in the midst of keeping: a window that closes ends the input, and signals
            try:
                for number, game in enumerate(games, start=1):
                    say(f"\n── a new game ({number} of {len(games)}) " + "─" * 40)
                    recording.begin(game)
                    (episode,) = rollout([game], cast, make_env, 1)
                    recording.add(episode)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                recording.keep()
                if not isinstance(error, EOFError):
                    raise
        except KeyboardInterrupt:
            recording.keep()


def new_file(folder: Path, name: str, number: int) -> Path:
    """Makes the file of this number, or of the next that nobody else has made since, as in a second terminal."""
    while True:
        path = folder / name.format(number)
        try:
            path.open("x").close()
        except FileExistsError:
            number += 1
        else:
            return path


def settings_of(opponent: Agent, cfg: DictConfig, parts: PlaySpec) -> dict[str, Any]:
    """Records the opponent, the settings that it plays by, the game and the seed."""
    return {
        "opponent": cfg.opponent,
        **({"temperature": cfg.temperature} if isinstance(opponent, ModelAgent) else {}),
        **({"planner": asdict(parts.planner)} if cfg.opponent.endswith(SUFFIX) else {}),
        **({"cicero": asdict(parts.cicero)} if cfg.opponent.endswith(CICERO) else {}),
        **({"chat": behind_endpoint(plain(cfg.chat))} if parts.chat else {}),
        "env": dict(parts.env),
        "person_reads": Style.NATURAL.value,
        "seed": cfg.seed,
    }


@contextmanager
def stoppable() -> Iterator[None]:
    """Lets a closed window and SIGTERM interrupt as Ctrl-C does. Later signals are ignored while the game is kept."""

    def interrupt(number: int, frame: Any) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    stops = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {each: signal.getsignal(each) for each in stops}
    try:
        for each in stops:
            signal.signal(each, interrupt)
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


if __name__ == "__main__":
    main()
