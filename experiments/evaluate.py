"""Plays any two players against each other on fixed seeds and prints what came of it, with 95 % intervals.

`python -m experiments.evaluate players=[runs/NAME,scripted] games=1000`. A player is a run's folder, `base` (of the run
beside it, or of the configuration), `scripted`, a scripted temperament, or `random`. One name plays itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.cli import command
from experiments.terminal import Bar, say
from marl.agents import Agent, model_agent
from marl.checkpoint import load_policy, read_card, write_json
from marl.config import Parts, build, plain
from marl.errors import UserError, check_writable
from marl.evaluate import Metrics, belief_by_message, evaluation_to_json, metrics
from marl.games import env_maker, scripted, seats
from marl.monitor import Progress
from marl.pretrain import base_policy
from marl.rollout import EVALUATION, Game, draw_games, rollout
from marl.runs import CONFIG
from marl.stats import format_table
from marl.transcripts import Transcript, episode_to_json, render_text, write_episodes
from marl.types import Episode

HEADLINE = (
    "game/score", "game/score_agreed", "game/score_ceiling", "game/points", "game/joint", "game/agreement",
    "game/pareto", "game/pareto_agreed", "game/win_rate/crewmates", "talk/turns", "talk/words_per_message",
    "talk/vocabulary", "errors/per_turn", "errors/aborted", "belief/accuracy", "belief/log_loss", "belief/brier",
    "belief/prior_log_loss", "belief/gain_over_prior", "belief/gain_over_start", "speech/belief_change",
)  # fmt: skip


def play(
    first: Agent,
    second: Agent,
    make_env: Callable[[], Any],
    seed: int,
    games: int,
    concurrency: int,
    progress: Progress,
) -> list[Episode]:
    """Plays the evaluation games of a seed: always the same ones, the two agents changing seats from game to game."""

    def cast(game: Game, env: Any) -> Mapping[str, Agent]:
        names = list(env.possible_agents)
        turned = game.seed % 2
        return {name: (first, second)[(i + turned) % 2] for i, name in enumerate(names)}

    return rollout(draw_games(seed, EVALUATION, count=games), cast, make_env, concurrency, progress.advance)


def show(conditions: Mapping[str, Metrics], transcripts: Mapping[str, Transcript], report: Path | None = None) -> None:
    """The last screen: the table, a transcript of each condition, where the report is."""
    names = [name for name in HEADLINE if any(name in found for found in conditions.values())]
    for label, transcript in transcripts.items():
        say(f"\n── {label}, game {transcript['seed']} " + "─" * 40)
        say(render_text(transcript))
    say("")
    say(format_table({label: dict(found) for label, found in conditions.items()}, names))
    if report is not None:
        say(f"\nreport: {report}")


def pick_device(name: str) -> torch.device:
    """`auto`, `cpu` or `cuda`, if it is there."""
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"device={name}: must be auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: no CUDA device is there; use device=cpu or device=auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def find_player(name: str, cfg: DictConfig, parts: Parts, device: torch.device, beside: str) -> Agent:
    """A player by name (see the module's docstring); `beside` is the other player's name."""
    limits = replace(parts.algo, concurrency=cfg.concurrency)
    places = seats(parts.env)
    folder = Path(name)
    if (folder / "policy").is_dir():
        game = read_card(folder / "policy")["game"]
        if game != parts.env["game"]:
            raise UserError(f"{name} was trained on {game}, and env.game={parts.env['game']}: choose env={game}")
        policy = load_policy(folder / "policy", device)
        return model_agent(folder.name, policy, limits, places, cfg.temperature)
    if name == "base":
        if (Path(beside) / "policy").is_dir():
            base = read_card(Path(beside) / "policy")["base"]
            if base is None:
                raise UserError(
                    f"players: {beside} started from an untouched model; evaluate that with model=hf players=[base]"
                )
            policy = load_policy(Path(base), device)
        else:
            policy, _ = base_policy(
                parts.model,
                parts.base,
                parts.env,
                cache=Path(cfg.cache),
                human_data=cfg.data.dond,
                device=device,
                report=say,
            )
        return model_agent("base", policy, limits, places, cfg.temperature)
    if "/" in name:
        raise UserError(f"players: {name} is not the folder of a finished run (it has no policy/)")
    try:
        agent = scripted(parts.env["game"], "" if name == "scripted" else name)
        agent.make(0, "")
    except ValueError as error:
        raise UserError(f"players: {name} is neither a run's folder nor base, scripted or random. {error}") from error
    return agent


def as_in_runs(cfg: DictConfig, names: Sequence[str]) -> DictConfig:
    """The configuration with the game and limits that the runs among the players were evaluated in.

    What the command line says of `env` and `algo` wins over the runs. UserError if two runs play different games.
    """
    settings = {}
    for name in names:
        path = Path(name) / CONFIG
        if path.is_file():
            run = OmegaConf.load(path)
            env = OmegaConf.merge(run.env, run.eval.env)
            settings[name] = OmegaConf.create({"env": env, "algo": run.algo, "model": run.model, "base": run.base})
    if not settings:
        return cfg
    games = [plain(each.env) for each in settings.values()]
    if any(game != games[0] for game in games):
        differ = sorted(k for k in games[0] if games[0][k] != games[-1].get(k))
        raise UserError(f"players: the runs {' and '.join(settings)} differ in env.{', env.'.join(differ)}")
    found = next(iter(settings.values()))
    given = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    own = [o for o in given if o.startswith(("env.", "algo."))]
    merged = OmegaConf.merge(OmegaConf.create({**cfg, **found}), OmegaConf.from_dotlist(list(own)))
    assert isinstance(merged, DictConfig)
    return merged


def of_player(name: str, overall: Metrics, own: Metrics) -> Metrics:
    """One player's column where two met: its own points and score, and what it said, did wrong and believed."""
    suffix = f"/{name}"
    games = {metric.removesuffix(suffix): found for metric, found in overall.items() if metric.endswith(suffix)}
    return {**games, **{metric: found for metric, found in own.items() if not metric.startswith("game/")}}


def by_message_table(entries: Sequence[Metrics]) -> str:
    """Belief by the number of messages heard, beside the exact prior's, as a text table."""
    names = ("log_loss", "prior_log_loss", "brier", "prior_brier", "accuracy", "prior_accuracy")
    rows = {str(k): {n: entry[n] for n in names if n in entry} for k, entry in enumerate(entries[:7])}
    return format_table(rows, [name for name in names if any(name in row for row in rows.values())])


@command("evaluate")
def main(cfg: DictConfig) -> None:
    """Plays and prints; with `out=FOLDER` also writes `evaluation.json` and the transcripts."""
    names = [cfg.players] if isinstance(cfg.players, str) else [str(name) for name in cfg.players]
    if not 1 <= len(names) <= 2:
        raise UserError(f"players={names}: name one player (it plays itself) or two")
    for name in ("games", "concurrency"):
        if cfg[name] < 1:
            raise UserError(f"{name}={cfg[name]}: must be at least 1")
    cfg = as_in_runs(cfg, names)
    parts = build(cfg)
    make_env = env_maker(parts.env)
    if cfg.out:
        check_writable(Path(cfg.out), "out")
    device = pick_device(cfg.device)
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    first = find_player(names[0], cfg, parts, device, names[-1])
    second = first if len(names) == 1 or names[0] == names[1] else find_player(names[1], cfg, parts, device, names[0])
    bar = Bar(enabled=cfg.progress)
    bar.stage(" v ".join(names), cfg.games)
    episodes = play(first, second, make_env, cfg.seed, cfg.games, cfg.concurrency, bar)
    bar.close()
    objective = float(parts.env.get("objective", 0.0))
    label = " v ".join(dict.fromkeys(names))
    conditions = {label: metrics(episodes, parts.env["game"], objective)}
    for agent in (first.name, second.name) if first.name != second.name else ():
        conditions[agent] = of_player(
            agent, conditions[label], metrics(episodes, parts.env["game"], objective, {agent})
        )
    entries = belief_by_message(episodes)
    if cfg.out:
        out = Path(cfg.out)
        about = {
            "game": parts.env["game"],
            "objective": objective,
            "games": cfg.games,
            "seed": cfg.seed,
            "players": names,
        }
        write_episodes(out / "episodes.jsonl", episodes)
        by_message = {label: entries}
        write_json(out / "evaluation.json", evaluation_to_json(conditions, by_message, **about))
    show(conditions, {label: episode_to_json(episodes[0])})
    if entries:
        say("\nbelief after so many messages, beside the exact prior without any talk")
        say(by_message_table(entries))


if __name__ == "__main__":
    main()
