"""The evaluation games of a training run: while it learns, and at its end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from experiments.launch.terminal import Bar, say
from experiments.setup.config import EvalConfig, Parts, identity, make, plain
from experiments.setup.players import played_as, seat_players
from experiments.setup.starts import Work, computed_with
from marl.algorithms.filtered_bc import seat_reward
from marl.common.distributed import ONE, Ranks
from marl.common.errors import UserError, check_writable
from marl.common.files import digest, read_text, write_json, write_text
from marl.metrics.beliefs import belief_by_message
from marl.metrics.evaluation import conditions_from_json, evaluation_to_json, metrics
from marl.metrics.games import by_game
from marl.metrics.stats import Interval, Metrics
from marl.metrics.training import episode_metrics
from marl.model.policy import Policy
from marl.report.runs import read_evaluation
from marl.report.transcripts import Transcript, read_episodes, write_episodes
from marl.rewards import Reward, add_rewards, is_game
from marl.rollout.cast import by_role, learners_of
from marl.rollout.games import file_digests
from marl.rollout.rollout import rollout
from marl.rollout.seeds import EVALUATION, draw_games
from marl.storage.checkpoint import make_once
from marl.storage.folder import git_commit
from marl.storage.tracking import METRICS_FILE, Tracker, read_metrics
from marl.types import Episode

FORMAT_OF_GAMES = 4  # raised when the base's kept games would be played, or measured, otherwise: where no commit tells
SHOWN = 40  # episodes kept of an iteration or an evaluation
HOPELESS = 0.5  # share of replies that come to nothing from which on a run is warned of
ALIKE = 0.94  # share of seats that are paid the same; crews of a base that learns well win some .13 of their games


def watch(
    work: Work,
    tracker: Tracker,
    iteration: int,
    base: Policy,
    policies: Mapping[str, Policy],
    bar: Bar,
    ranks: Ranks,
) -> float | None:
    """Evaluation games while training: the same games each time, logged with some of their transcripts. Returns the
    mean score, None where no games are to be played, or the learner sits in none of them."""
    cfg, folder = work.cfg, work.folder
    if not cfg.eval.games:
        return None
    bar.stage(f"evaluation after iteration {iteration}", cfg.eval.games)
    stand_ins = {name: (name, policy) for name, policy in policies.items()}
    episodes = evaluation_games(cfg, work.parts, base, stand_ins, work.make_test_env, cfg.eval.games, bar, ranks)
    found = episode_metrics(episodes, {next(iter(policies))})
    if not ranks.first:
        return found.get("game/score")
    if iteration == 0:
        warn_if_hopeless(work, episodes)
    tracker.log(iteration, found, phase="eval")
    write_episodes(folder / "episodes" / f"iteration-{iteration:06d}.jsonl", episodes[:SHOWN])
    columns = ("game", "outcome", "transcript")
    rows = [
        (e.seed, str(e.outcome.get("how")), "\n".join(f"{t.agent}: {t.text}" for t in e.turns)) for e in episodes[:8]
    ]
    tracker.transcripts(iteration, columns, rows)
    return found.get("game/score")


def warn_if_hopeless(work: Work, episodes: Sequence[Episode]) -> None:
    """Says where next to nothing can be learned from the learner's first games, and the way out: its replies find no
    room or are refused, or the game pays nearly every seat the same."""
    learner, cfg, base = learners_of(work.parts.cast)[0], work.cfg, work.parts.base
    turns = [t for e in episodes for t in e.turns if e.players[t.agent] == learner]
    paid = Counter(seat_reward(e, agent) for e in episodes for agent, name in e.players.items() if name == learner)
    if not turns:
        return
    outgrown = sum(t.outgrown for t in turns) / len(turns)
    refused = sum(bool(t.error) for t in turns) / len(turns)
    (amount, seats), *_ = paid.most_common(1)
    alike = seats / paid.total()
    plays_for_it = any(is_game(reward) and reward.weight for reward in work.parts.rewards.values())
    if outgrown >= HOPELESS:
        wrong = f"{outgrown:.0%} of the learner's replies find no room in its context"
        way_out = f"give it more, by model.context (now {cfg.model.context})"
    elif refused >= HOPELESS or (alike >= ALIKE and plays_for_it):
        wrong = f"the game refuses {refused:.0%} of the learner's replies and pays {alike:.0%} of its seats {amount:g}"
        way_out = {
            "none": "train the model on scripted games first, by base=scripted",
            "scripted": f"train a better base, by more games (base.games={base.games})",
            "human": f"train a better base, by more passes (base.epochs={base.epochs})",
        }[base.data]
    else:
        return
    say(f"warning: next to nothing can be learned so far: {wrong}. Stop this run and {way_out}.")


def evaluation_games(
    cfg: DictConfig,
    parts: Parts,
    base: Policy,
    learners: Mapping[str, tuple[str, Policy]],
    make_env: Any,
    games: int,
    bar: Bar,
    ranks: Ranks = ONE,
) -> list[Episode]:
    """The evaluation games, always the same ones, with these in the learners' seats and the others as in the cast."""
    seating = make(EvalConfig, plain(cfg.eval), "eval").seating(parts.cast)
    limits = replace(parts.algo, games=games)
    agents = seat_players(seating, make_env(), parts.env, base, limits, cfg.eval.temperature, learners, parts.chat)
    drawn = ranks.share(draw_games(cfg.eval.seed, EVALUATION, count=games))
    episodes = rollout(drawn, by_role(seating, agents), make_env, parts.algo.concurrency, bar.advance)
    return paid_as_in_training(learners, ranks.collect(episodes), parts.rewards)


def paid_as_in_training(
    learners: Mapping[str, tuple[str, Policy]], episodes: Sequence[Episode], rewards: Mapping[str, Reward]
) -> list[Episode]:
    """Rewards as in training, also those that name the learner, whatever who sits in its seat is called here."""
    learner = {stand_in: name for name, (stand_in, _) in learners.items()}
    renamed = [replace(e, players={a: learner.get(p, p) for a, p in e.players.items()}) for e in episodes]
    return [replace(p, players=e.players) for e, p in zip(episodes, add_rewards(renamed, rewards), strict=True)]


def final_evaluation(
    work: Work, base_folder: Path | None, base: Policy, policies: Mapping[str, Policy], bar: Bar
) -> tuple[dict[str, Metrics], dict[str, Transcript]]:
    """Plays the same games with the base and with the trained policies in the learners' seats; returns metrics and an
    example of each.

    The base's games are kept beside it: of a sweep's runs one plays them, and those that come to it meanwhile wait.
    What is kept is what this run would have played itself, to the last digit.
    """
    cfg, parts, folder, make_env = work.cfg, work.parts, work.folder, work.make_test_env
    evaluation = make(EvalConfig, plain(cfg.eval), "eval")
    settings = {
        "format": FORMAT_OF_GAMES,
        "made_with": {"git_commit": git_commit(), **computed_with(cfg, parts, work.device)},
        "eval": plain(cfg.eval),
        "env": dict(parts.env),
        "cast": plain(cfg.cast),
        # As measured, whatever it weighs in training: arms of an ablation share their base's games.
        "reward": {
            name: {k: v for k, v in term.items() if k != "weight"} for name, term in identity(cfg)["reward"].items()
        },
        "max_new_tokens": parts.algo.max_new_tokens,
        "decode_steps": parts.algo.decode_steps,
        "context": parts.algo.context,
        **({"play_bf16": True} if parts.algo.play_bf16 else {}),
        **({"chat": identity(cfg)["chat"]} if parts.chat else {}),
        **file_digests({**parts.env, **evaluation.env}),
        **played_as(evaluation.seating(parts.cast), parts.algo),
    }
    beside = games_of_base(base_folder, digest(settings)) or folder / "base"
    # The base standing in for the learner has a name of its own, so that both conditions measure the same seats.
    as_base = {n: ("untrained" if i == 0 else n, base) for i, n in enumerate(policies)}
    as_trained = {n: ("trained" if i == 0 else n, policy) for i, (n, policy) in enumerate(policies.items())}
    make_once(
        beside / "evaluation.json",
        lambda: measure(cfg, parts, beside, "base", base, as_base, make_env, bar),
        report=say,
    )
    measure(cfg, parts, folder, "trained", base, as_trained, make_env, bar)
    try:
        of_base, of_both = (read_evaluation(part / "evaluation.json") for part in (beside, folder))
    except UserError as error:
        raise UserError(f"{error}: remove this file, and the same command plays its games again") from error
    games = {"base": beside, "trained": folder}
    try:
        examples = {name: read_episodes(part / "episodes" / f"{name}.jsonl")[0] for name, part in games.items()}
        texts = read_text(beside / "episodes" / "base.jsonl")
    except (UserError, IndexError) as error:
        raise UserError(
            f"{beside / 'episodes'}: its games cannot be read ({error}); remove {beside}, and the same command plays "
            "them again"
        ) from error
    for part in ("conditions", "belief_by_message", "by_game"):
        of_both[part] = {**of_base.get(part, {}), **of_both[part]}
    of_both["conditions"]["trained"] |= last_losses(folder / METRICS_FILE)
    write_json(folder / "evaluation.json", of_both)
    write_text(folder / "episodes" / "base.jsonl", texts)
    return conditions_from_json(of_both), examples


def last_losses(path: Path) -> dict[str, dict[str, float | int | None]]:
    """The learner's losses in its last iteration of training, which evaluation games do not compute: no intervals."""
    rows = [row for row in read_metrics(path) if row["phase"] == "train"]
    last = rows[-1] if rows else {}
    games = int(last.get("rollout/games", 0))
    return {
        name: Interval(value, math.nan, math.nan, games).to_json()
        for name, value in last.items()
        if name.startswith("loss/")
    }


def games_of_base(base_folder: Path | None, name: str) -> Path | None:
    """Where the base's games are, or can be, kept for all its runs; None where it is in no folder, or in one that
    cannot be written, as a cache that others share."""
    if base_folder is None:
        return None
    folder = base_folder / "evaluations" / name
    if not (folder / "evaluation.json").exists():
        try:
            check_writable(folder, "cache")
        except UserError:
            say(f"the base's games are kept in the run's folder, since {folder} cannot be written")
            return None
    return folder


def measure(
    cfg: DictConfig,
    parts: Parts,
    folder: Path,
    name: str,
    base: Policy,
    learners: Mapping[str, tuple[str, Policy]],
    make_env: Any,
    bar: Bar,
) -> None:
    """Plays the final evaluation games and writes `evaluation.json` and `episodes/NAME.jsonl` into the folder."""
    bar.stage(f"evaluation of {name}", cfg.eval.final_games)
    episodes = evaluation_games(cfg, parts, base, learners, make_env, cfg.eval.final_games, bar)
    write_episodes(folder / "episodes" / f"{name}.jsonl", episodes[:SHOWN])
    objective = float({**parts.env, **plain(cfg.eval.env)}.get("objective", 0.0))
    about = {"game": parts.env["game"], "objective": objective, "games": cfg.eval.final_games, "seed": cfg.eval.seed}
    measured = {next(iter(learners.values()))[0]}
    found = {name: metrics(episodes, parts.env["game"], objective, measured)}
    by_message = {name: belief_by_message(episodes, players=measured)}
    games = {name: by_game(episodes, parts.env["game"], objective)}
    write_json(folder / "evaluation.json", evaluation_to_json(found, by_message, games, **about))
