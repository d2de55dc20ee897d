"""Measures what was said, what was heard and what was done: `python -m experiments.talk players=[runs/NAME]`.

Each run plays games as it was trained to, and so does its base. Of both: how much messages gave away, how much of it
listeners took, and what it was worth to their claims (Deal or No Deal); what each message did beside silence and what
its author would have said otherwise; whether claims are true and believed; whether sentences are passwords (Among Us).
Writes `out`/talk.html with a figure and a game of each player, `talk.svg`, `table.csv` and `games.jsonl`, transcripts
with the effect of each message. Left out: players behind an endpoint, which give no likelihoods.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from experiments.evaluate import make_players
from experiments.launch.command import command
from experiments.launch.terminal import Bar, say
from experiments.setup.devices import pick_device, set_threads
from experiments.setup.entrants import as_in_runs
from experiments.setup.players import in_runs, is_run, run_of
from experiments.setup.spec import PlaySpec, play_spec
from marl.agents.base import Agent
from marl.agents.dubbed import Alias
from marl.common.errors import UserError, check_counts, check_temperature, check_writable
from marl.common.files import write_text
from marl.metrics.messages import message_metrics
from marl.metrics.stats import Metrics
from marl.metrics.tables import TableRow, format_table, write_table
from marl.report.figures import save_figure
from marl.report.talk import talk_figure, talk_page, talk_sentences, with_effects
from marl.report.transcripts import write_transcripts
from marl.report.views import Transcript, render_text
from marl.rollout.games import env_maker
from marl.rollout.rollout import rollout
from marl.rollout.seeds import EVALUATION, draw_games
from marl.storage.folder import REFERENCE
from marl.types import Episode


@command("talk")
def main(cfg: DictConfig) -> None:
    """Plays, measures, and shows the measures of each player in one table."""
    # Configure.
    named = [cfg.players] if isinstance(cfg.players, str) else cfg.players
    names = [in_runs(str(name), cfg.runs) for name in named]
    check(cfg, names)
    cfg = as_in_runs(cfg, names)
    spec = play_spec(cfg, names, partners=True)
    out = Path(cfg.out)

    # Check.
    if spec.env["game"] == "diplomacy":
        raise UserError(
            f"players={names}: Diplomacy is not measured here. See press/said, press/kept, press/heard and "
            "press/granted in the run's own report, or in experiments.evaluate"
        )
    env_maker(spec.env)
    check_writable(out, "out")
    device = pick_device(cfg.device)
    set_threads(cfg.threads)

    # Play.
    found: dict[str, Metrics] = {}
    transcripts: dict[str, list[Transcript]] = {}
    for name in names:
        kept = run_of(name) / REFERENCE
        base = str(kept) if kept.is_dir() else "base"  # a run on an untouched model keeps none
        for player, called in ((base, "base"), (name, "trained")):
            label = called if len(names) == 1 else f"{called} {Path(name).name}"
            episodes, agents, measured = play(spec, player, base, cfg, device, label)
            say(f"{label}: {len(episodes)} games")
            found[label], heard, effects = message_metrics(episodes, spec.env, agents, measured, cfg.draws)
            transcripts[label] = with_effects(heard, effects)

    # Report.
    game = spec.env["game"]
    write_table(out / "table.csv", [TableRow.of(arm, m, i) for arm, own in found.items() for m, i in own.items()])
    save_figure(talk_figure(found, game), out / "talk.svg")
    write_transcripts(out / "games.jsonl", [{**t, "arm": arm} for arm, own in transcripts.items() for t in own])
    games = {arm: render_text(max(own, key=strongest)) for arm, own in transcripts.items()}
    write_text(out / "talk.html", talk_page(found, game, games))
    for sentence in talk_sentences(found):
        say(sentence)
    say(format_table(found, list(dict.fromkeys(name for own in found.values() for name in own))))
    say(f"\nfigure and table: {out / 'talk.html'}")


def play(
    spec: PlaySpec, player: str, base: str, cfg: DictConfig, device: torch.device, label: str
) -> tuple[list[Episode], dict[str, Agent], set[str]]:
    """Plays one player's games. Returns the episodes, who played by name, and the names of whom to measure."""
    cast = {
        role: replace(own, partner=base if own.partner == "base" else own.partner) for role, own in spec.cast.items()
    }
    names = [player, base] if len(cast) > 1 else [player]
    first, _, seated, spec = make_players(replace(spec, cast=cast), names, [None, None], cfg.games, device)
    agents: dict[str, Agent] = {}

    def noting(game: Any, env: Any) -> Mapping[str, Agent]:
        held = seated(game, env)
        agents.update({agent.name: agent.agent if isinstance(agent, Alias) else agent for agent in held.values()})
        return held

    games = [replace(one, sampling=cfg.sampling) for one in draw_games(cfg.seed, EVALUATION, count=cfg.games)]
    bar = Bar(enabled=cfg.progress)
    bar.stage(f"{label}: games", len(games))
    episodes = rollout(games, noting, env_maker(spec.env), spec.algo.concurrency, bar.advance)
    bar.close()
    measured = {"measured"} if "measured" in agents else {first.name}
    return episodes, agents, measured


def strongest(transcript: Transcript) -> float:
    """Returns how far a game's most moving message moved beliefs, beside silence."""
    return max((turn.get("effect", {}).get("influence/silence", 0.0) for turn in transcript["turns"]), default=0.0)


def check(cfg: DictConfig, names: Sequence[str]) -> None:
    """Refuses bad settings of this command."""
    if not names or not all(is_run(name) for name in names):
        raise UserError(f"players={list(names)}: name finished runs, whose models' likelihoods are needed")
    check_counts(cfg, ("games", "draws", "concurrency"))
    check_counts(cfg, ["seed"], 0)
    check_temperature(cfg.temperature, "temperature")
    if cfg.temperature == 0:
        raise UserError("temperature=0 leaves no likelihood of a message. Choose a temperature above 0.")


if __name__ == "__main__":
    main()
