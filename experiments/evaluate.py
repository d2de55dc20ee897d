"""Plays any two players against each other on fixed seeds and prints what came of it, with 95 % intervals.

`python -m experiments.evaluate players=[runs/NAME,scripted] games=1000`. A player is a run's folder, `base` (of the run
beside it, or of the configuration), `scripted`, a scripted temperament, `random`, or `chat`, a model behind any
OpenAI-compatible endpoint (settings `chat.*`, agents/chat.py). One name plays itself. In a game with several roles the
first player holds the first of them, and its partner `cast.crewmate.partners` of the seats where the player is a
language model or the partner is none (`cast.crewmate.partner=random`); the second player holds the others.
`voices=[base]`: the first player's messages are the base's; `voices=[silence]`: it says nothing. A player called
`NAME+plan` plans its proposals or votes near what it would do itself (marl/planning/planner.py), as `planner.*` says;
`planner=pikl` alone means the first player. Models read the style that they were trained in, and `chat` natural words;
`env.style` is what everybody else reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from envs.dond.environment import pool
from experiments.launch.command import command
from experiments.launch.show import by_message_table, chat_figures, rows_of, show
from experiments.launch.terminal import Bar, say
from experiments.setup.devices import pick_device, set_threads
from experiments.setup.entrants import (
    as_in_runs,
    check_names,
    find_player,
    is_model,
    role_against_role,
    with_planners,
    with_voice,
)
from experiments.setup.memory import fit_to_memory
from experiments.setup.players import in_runs, is_run
from experiments.setup.refusals import say_refusals
from experiments.setup.spec import PlaySpec, play_spec
from marl.agents.base import Agent
from marl.agents.dubbed import Alias
from marl.agents.model import ModelAgent
from marl.common.errors import UserError, check_count, check_counts, check_temperature, check_writable
from marl.common.files import write_json
from marl.metrics.beliefs import belief_by_message
from marl.metrics.evaluation import evaluation_to_json, metrics
from marl.metrics.stats import Metrics
from marl.metrics.tables import TableRow, write_table
from marl.report.transcripts import episode_to_json, write_episodes
from marl.rollout.cast import alternating, seats_per_player
from marl.rollout.games import env_maker
from marl.rollout.rollout import Cast, rollout
from marl.rollout.seeds import EVALUATION, Game, draw_games


def each_context(env: Mapping[str, Any], seed: int) -> list[Game]:
    """Returns a game of Deal or No Deal for each context that `env` draws from, in the file's order."""
    if env["game"] != "dond":
        raise UserError("each_context=true: only Deal or No Deal has a list of contexts. Give the number of games.")
    chosen = pool(env["contexts"], env["split"])
    drawn = draw_games(seed, EVALUATION, count=len(chosen))
    return [
        replace(game, options={"counts": c.counts, "values": c.values}) for game, c in zip(drawn, chosen, strict=True)
    ]


def of_player(name: str, overall: Metrics, own: Metrics) -> Metrics:
    """Returns one player's column where two met: its own points and score, and what it said, did wrong and believed."""
    suffix = f"/{name}"
    games = {metric.removesuffix(suffix): found for metric, found in overall.items() if metric.endswith(suffix)}
    return {**games, **{metric: found for metric, found in own.items() if not metric.startswith("game/")}}


@command("evaluate", implies={"data.dond": "base=human"})
def main(cfg: DictConfig) -> None:
    """Plays and prints; with `out=FOLDER` also writes `evaluation.json`, `table.csv` and the transcripts."""
    # Configure.
    named = [cfg.players] if isinstance(cfg.players, str) else cfg.players
    names = [in_runs(str(name), cfg.runs) for name in named]
    check(cfg, names)
    cfg = as_in_runs(cfg, names)
    spec = play_spec(cfg, [*names, *map(str, cfg.voices)], partners=True)
    game, voices = spec.env["game"], [*cfg.voices, None, None]

    # Check.
    make_env = env_maker(spec.env)
    seats_per_player(spec.cast, make_env())  # refuses a cast that is another game's
    if cfg.out:
        check_writable(Path(cfg.out), "out")
    device = pick_device(cfg.device)
    set_threads(cfg.threads)
    names = with_planners(names, spec.env, first_plans=bool(cfg.planner))
    check_names(names, voices, game)
    drawn = each_context(spec.env, cfg.seed) if cfg.each_context else draw_games(cfg.seed, EVALUATION, count=cfg.games)
    drawn = [replace(one, sampling=cfg.sampling) for one in drawn]

    # Play.
    first, second, seated, spec = make_players(spec, names, voices, len(drawn), device)
    bar = Bar(enabled=cfg.progress)
    bar.stage(" v ".join(names), len(drawn))
    episodes = rollout(drawn, seated, make_env, spec.algo.concurrency, bar.advance)
    bar.close()

    # Report.
    objective = float(spec.env.get("objective", 0.0))
    label = " v ".join(dict.fromkeys(names))
    measured = {first.name} if has_sides(spec, names) else None
    conditions = {label: metrics(episodes, game, objective, measured)}
    for agent in (first.name, second.name) if first.name != second.name and not measured else ():
        conditions[agent] = of_player(agent, conditions[label], metrics(episodes, game, objective, {agent}))
    entries = belief_by_message(episodes, players=measured)
    if cfg.out:
        about = {
            "game": game,
            "objective": objective,
            "games": len(drawn),
            "concurrency": spec.algo.at_once,
            "seed": cfg.seed,
            "sampling": cfg.sampling,
            "players": names,
            **({"chat": chat_figures(spec.chat, drawn)} if spec.chat else {}),
        }
        write_episodes(Path(cfg.out) / "episodes.jsonl", episodes)
        write_json(Path(cfg.out) / "evaluation.json", evaluation_to_json(conditions, {label: entries}, **about))
        order = rows_of(conditions)
        rows = [TableRow.of(arm, m, found[m]) for arm, found in conditions.items() for m in order if m in found]
        write_table(Path(cfg.out) / "table.csv", rows)
    show(conditions, {label: episode_to_json(episodes[0])})
    if entries:
        prior = any("prior_log_loss" in entry for entry in entries)
        say("\nbelief after so many messages" + ", beside the exact prior without any talk" * prior)
        say(by_message_table(entries))
    say_refusals(first, second)
    if spec.chat:
        say(f"\n{spec.chat.summary()}")


def check(cfg: DictConfig, names: Sequence[str]) -> None:
    """Refuses bad settings of this command."""
    if not 1 <= len(names) <= 2:
        raise UserError(f"players={names}: name one player (it plays itself) or two")
    if len(cfg.voices) > len(names):
        raise UserError(f"voices={list(cfg.voices)}: at most one for each of players={names}. Leave out the rest.")
    check_counts(cfg, ("games", "concurrency"))
    check_counts(cfg, ["seed"], 0)
    check_temperature(cfg.temperature, "temperature")
    if cfg.sampling is not None:
        check_count(cfg.sampling, "sampling", 0)


def has_sides(spec: PlaySpec, names: Sequence[str]) -> bool:
    """Returns whether the two players hold different roles."""
    return len(spec.cast) > 1 and len(names) == 2


def make_players(
    spec: PlaySpec, names: Sequence[str], voices: Sequence[str | None], games: int, device: torch.device
) -> tuple[Agent, Agent, Cast, PlaySpec]:
    """Makes the two players, and who sits where; returns them with the specification that fits into memory."""
    itself = len(set(names)) == 1 and len(set(voices[: len(names)])) == 1  # one agent in all seats
    run = next((name for name in names if is_run(name)), names[0])  # whose base is meant by `base`
    sides = has_sides(spec, names)
    own = next(iter(spec.cast.values()))
    partner_name = own.partner if sides and own.partners else None
    players = [(names[0], names[-1]), *([] if itself else [(names[-1], names[0])])]
    players += [(voice, run) for voice in voices[: len(players)] if voice is not None]
    players += [(partner_name, run)] if partner_name else []
    spec = fit_to_memory(spec, games, players, device)
    first = find_player(names[0], spec, device, names[-1])
    second = first if itself else find_player(names[-1], spec, device, names[0])
    one = with_voice(first, voices[0], spec, device, run)
    other = one if itself else with_voice(second, voices[1], spec, device, run)
    if not sides:
        return first, second, alternating(one, other), spec
    partner = None
    if partner_name and (isinstance(first, ModelAgent) or not is_model(partner_name)):
        partner = find_player(partner_name, spec, device, run)
    if first.name in (second.name, getattr(partner, "name", None)):
        one = first = Alias(one, "measured")
    return first, second, role_against_role(one, other, spec.cast, partner), spec


if __name__ == "__main__":
    main()
