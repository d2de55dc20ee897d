"""The evaluation games of a training run: while it learns, and at its end."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from experiments.launch.terminal import Bar, say
from experiments.setup.players import played_as, seat_players
from experiments.setup.work import Work, computed_with
from marl.common.distributed import ONE, Ranks
from marl.common.errors import UserError, check_writable
from marl.common.files import digest, read_text, write_json, write_text
from marl.metrics.beliefs import belief_by_message
from marl.metrics.evaluation import conditions_from_json, evaluation_to_json, metrics
from marl.metrics.games import by_game
from marl.metrics.stats import Interval, Metrics
from marl.metrics.training import episode_metrics
from marl.model.policy import Policy
from marl.pretraining.base import untouched_folder
from marl.report.games import MESSAGE_COLUMNS, message_rows
from marl.report.runs import read_evaluation
from marl.report.transcripts import episode_to_json, read_episodes, write_episodes
from marl.report.views import Transcript
from marl.rewards import Reward, add_rewards, is_game
from marl.rollout.cast import by_role
from marl.rollout.games import file_digests
from marl.rollout.rollout import rollout
from marl.rollout.seeds import EVALUATION, draw_games
from marl.storage.checkpoint import make_once
from marl.storage.folder import git_commit
from marl.storage.tracking import METRICS_FILE, Tracker, read_metrics
from marl.types import Episode

StandIns = Mapping[str, tuple[str, Policy]]  # by learner: what its stand-in is called in episodes, and its policy

FORMAT_OF_GAMES = 4  # raised when the base's kept games would be played, or measured, otherwise: where no commit tells
SHOWN = 40  # episodes kept of an iteration or an evaluation
HOPELESS = 0.5  # share of replies that come to nothing from which on a run is warned of
ALIKE = 0.98  # share of seats that are paid the same; the quickstart learns from bases that win .03 of 32 games


def watch(
    work: Work, tracker: Tracker, iteration: int, base: Policy, policies: Mapping[str, Policy], bar: Bar, ranks: Ranks
) -> float | None:
    """Plays evaluation games while training, and logs them with some transcripts.

    Returns the mean score; None where no games are to be played, or the learner sits in none of them.
    """
    games = work.spec.eval.games
    if not games:
        return None
    bar.stage(f"evaluation after iteration {iteration}", games)
    stand_ins = {name: (name, policy) for name, policy in policies.items()}
    episodes = evaluation_games(work, base, stand_ins, games, bar, ranks)
    found = episode_metrics(episodes, {next(iter(policies))})
    if not ranks.first:
        return found.get("game/score")
    if iteration == 0:
        warn_if_hopeless(work, episodes)
    tracker.log(iteration, found, phase="eval")
    write_episodes(work.spec.folder / "episodes" / f"iteration-{iteration:06d}.jsonl", episodes[:SHOWN])
    rows = [row for episode in episodes[:8] for row in message_rows(episode_to_json(episode))]
    tracker.transcripts(iteration, MESSAGE_COLUMNS, rows)
    return found.get("game/score")


def warn_if_hopeless(work: Work, episodes: Sequence[Episode]) -> None:
    """Warns where next to nothing can be learned from the learner's first games, and says the way out.

    Its replies find no room or are refused, or the game pays nearly every seat the same.
    """
    spec, base = work.spec, work.spec.base
    learner = spec.learners[0]
    turns = [t for e in episodes for t in e.turns if e.players[t.agent] == learner]
    paid = Counter(e.paid(agent) for e in episodes for agent, name in e.players.items() if name == learner)
    if not turns:
        return
    outgrown = sum(t.outgrown for t in turns) / len(turns)
    refused = sum(bool(t.error) for t in turns) / len(turns)
    (amount, seats), *_ = paid.most_common(1)
    alike = seats / paid.total()
    plays_for_it = any(is_game(reward) and reward.weight for reward in spec.rewards.values())
    if outgrown >= HOPELESS:
        wrong = f"{outgrown:.0%} of the learner's replies find no room in its context"
        way_out = f"give it more, by model.context (now {spec.model.context})"
    elif refused >= HOPELESS or (alike >= ALIKE and plays_for_it):
        wrong = f"the game refuses {refused:.0%} of the learner's replies and pays {alike:.0%} of its seats {amount:g}"
        way_out = {
            "none": "train the model on scripted games first, by base=scripted",
            "scripted": f"train a better base, by more games (now base.games={base.games})",
            "human": f"train a better base, by more passes (now base.epochs={base.epochs})",
        }[base.data]
    else:
        return
    say(f"warning: next to nothing can be learned so far: {wrong}. Stop this run and {way_out}.")


def evaluation_games(
    work: Work, base: Policy, learners: StandIns, games: int, bar: Bar, ranks: Ranks = ONE
) -> list[Episode]:
    """Plays the evaluation games, always the same ones, with these in the learners' seats. They are paid as in
    training, also by rewards that name the learner."""
    spec, cast = work.spec, work.spec.test_cast
    limits, temperature = replace(spec.algo, games=games), spec.eval.temperature
    table = work.make_test_env()
    agents = seat_players(cast, table, spec.env, base, limits, temperature, learners, work.chat)
    drawn = ranks.share(draw_games(spec.eval.seed, EVALUATION, count=games))
    played = rollout(drawn, by_role(cast, agents), work.make_test_env, spec.algo.concurrency, bar.advance)
    return paid_as_in_training(learners, ranks.collect(played), spec.rewards)


def paid_as_in_training(
    learners: StandIns, episodes: Sequence[Episode], rewards: Mapping[str, Reward]
) -> list[Episode]:
    """Fills the rewards as if each stand-in were called as the learner whose seat it has."""
    learner = {stand_in: name for name, (stand_in, _) in learners.items()}
    renamed = [replace(e, players={a: learner.get(p, p) for a, p in e.players.items()}) for e in episodes]
    return [replace(p, players=e.players) for e, p in zip(episodes, add_rewards(renamed, rewards), strict=True)]


def final_evaluation(
    work: Work, base_folder: Path | None, base: Policy, policies: Mapping[str, Policy], bar: Bar
) -> tuple[dict[str, Metrics], dict[str, Transcript]]:
    """Plays the same games with the base and with the trained policies; returns metrics and an example of each.

    The base's games are kept beside it, or where it has no folder, among the bases: one run of a sweep plays them, and
    the others wait. What is kept is what this run would have played itself, to the last digit.
    """
    folder = work.spec.folder
    kept_in = base_folder or untouched_folder(work.spec.cache, work.spec.model, work.spec.env["game"])
    beside = games_of_base(kept_in, digest(settings_of_base_games(work))) or folder / "base"
    # The base standing in for the learner has a name of its own, so that both conditions measure the same seats.
    as_base = {n: ("untrained" if i == 0 else n, base) for i, n in enumerate(policies)}
    as_trained = {n: ("trained" if i == 0 else n, policy) for i, (n, policy) in enumerate(policies.items())}
    make_once(beside / "evaluation.json", lambda: measure(work, beside, "base", base, as_base, bar), report=say)
    measure(work, folder, "trained", base, as_trained, bar)
    games = {"base": beside, "trained": folder}
    try:
        of_base, of_both = (read_evaluation(part / "evaluation.json") for part in games.values())
        examples = {name: read_episodes(part / "episodes" / f"{name}.jsonl")[0] for name, part in games.items()}
        texts = read_text(beside / "episodes" / "base.jsonl")
    except (UserError, IndexError) as error:
        raise UserError(
            f"evaluation games cannot be read ({error}). Remove {beside}, and the same command plays them again"
        ) from error
    for part in ("conditions", "belief_by_message", "by_game"):
        of_both[part] = {**of_base.get(part, {}), **of_both[part]}
    of_both["conditions"]["trained"] |= last_losses(folder / METRICS_FILE)
    write_json(folder / "evaluation.json", of_both)
    write_text(folder / "episodes" / "base.jsonl", texts)
    return conditions_from_json(of_both), examples


def settings_of_base_games(work: Work) -> dict[str, Any]:
    """Lists everything that the base's games and what is measured of them depend on."""
    spec, algo = work.spec, work.spec.algo
    # Measured whatever it weighs in training: arms of an ablation share their base's games.
    rewards = {name: {k: v for k, v in term.items() if k != "weight"} for name, term in spec.identity["reward"].items()}
    return {
        "format": FORMAT_OF_GAMES,
        "made_with": {"git_commit": git_commit(), **computed_with(spec, work.device)},
        "eval": spec.identity["eval"],
        "env": dict(spec.env),
        "cast": spec.identity["cast"],
        "reward": rewards,
        "max_new_tokens": algo.max_new_tokens,
        "decode_steps": algo.decode_steps,
        "context": algo.context,
        **({"play_bf16": True} if algo.play_bf16 else {}),
        **({"bf16": True} if spec.model.dtype == torch.bfloat16 else {}),
        **({"chat": spec.identity["chat"]} if spec.chat else {}),
        **file_digests(spec.test_env),
        **played_as(spec.test_cast, algo),
    }


def last_losses(path: Path) -> dict[str, dict[str, float | int | None]]:
    """Returns the learner's losses in its last iteration, which evaluation games do not compute: no intervals."""
    rows = [row for row in read_metrics(path) if row["phase"] == "train"]
    last = rows[-1] if rows else {}
    games = int(last.get("rollout/games", 0))
    return {
        name: Interval(value, math.nan, math.nan, games).to_json()
        for name, value in last.items()
        if name.startswith("loss/")
    }


def games_of_base(base_folder: Path, name: str) -> Path | None:
    """Returns where the base's games are kept for all its runs; None where its folder cannot be written (a cache that
    others share)."""
    folder = base_folder / "evaluations" / name
    if not (folder / "evaluation.json").exists():
        try:
            check_writable(folder, "cache")
        except UserError:
            say(f"the base's games are kept in the run's folder, since {folder} cannot be written")
            return None
    return folder


def measure(work: Work, folder: Path, name: str, base: Policy, learners: StandIns, bar: Bar) -> None:
    """Plays the final evaluation games and writes `evaluation.json` and `episodes/NAME.jsonl` into the folder."""
    spec = work.spec
    games, game = spec.eval.final_games, spec.env["game"]
    bar.stage(f"evaluation of {name}", games)
    episodes = evaluation_games(work, base, learners, games, bar)
    write_episodes(folder / "episodes" / f"{name}.jsonl", episodes[:SHOWN])
    objective = float(spec.test_env.get("objective", 0.0))
    measured = {next(iter(learners.values()))[0]}
    found = evaluation_to_json(
        {name: metrics(episodes, game, objective, measured)},
        {name: belief_by_message(episodes, players=measured)},
        {name: by_game(episodes, game, objective)},
        game=game,
        objective=objective,
        games=games,
        seed=spec.eval.seed,
    )
    write_json(folder / "evaluation.json", found)
