"""The learning of a training run: who learns from what, and what follows each iteration."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.final_games import warn_if_hopeless, watch
from experiments.launch.terminal import Bar, say
from experiments.setup.players import run_policy, seat_players
from experiments.setup.work import Work, for_another_base, seeds_of, start_of
from marl.algorithms.filtered_bc import FilteredBCConfig, train_filtered_bc
from marl.algorithms.pool import Pool
from marl.algorithms.ppo import train_ppo
from marl.algorithms.rl_pikl import RLPiklConfig, train_rl_pikl
from marl.algorithms.training import Training
from marl.common.distributed import Ranks
from marl.learning.renaming import Renaming, renaming
from marl.learning.update import Learner, make_optimizer
from marl.losses import any_reads
from marl.metrics.wording import of_ones_own
from marl.model.lora import adapted, copied
from marl.model.policy import Policy
from marl.model.sharding import Shards
from marl.report.transcripts import write_episodes
from marl.rollout.games import exchangeable
from marl.storage.checkpoint import Trained, check_alike, load_training, prune, save_training
from marl.storage.folder import check_there
from marl.storage.tracking import Tracker
from marl.types import Episode

PLANNED = 8  # of an iteration's games with a planner, which note every action that it weighed


def learn(
    work: Work,
    base: Policy,
    newest: Path | None,
    tracker: Tracker,
    note: Callable[[], dict[str, Any]],
    bar: Bar,
    ranks: Ranks,
) -> dict[str, Policy]:
    """Trains copies of the base, or of where `init` says to start, from the newest checkpoint if there is one.

    `note`: what checkpoints note of the run. Of several ranks the first one knows the newest checkpoint.
    """
    spec, algo = work.spec, work.spec.algo
    policies = starting_policies(work, base, ranks)
    learners = []
    for name, policy in policies.items():
        shards = Shards(policy, ranks) if spec.shard and ranks.size > 1 else None
        optimizer = make_optimizer(shards.split if shards else policy, algo.update)  # at algo.update.learning_rate
        learners.append(Learner(name, policy, base, optimizer, shards))
    trained = {each.name: (each.policy, each.optimizer) for each in learners}
    past = {config.partner_player: copied(policies[config.player]) for config in spec.cast.values() if config.pool}
    frozen = seat_players(
        spec.cast, work.make_env(), spec.env, base, algo, algo.temperature, chat=work.chat, past=past
    )  # fmt: skip
    state = load_training(newest, trained, ranks) or {}
    for each in learners:
        if each.shards:
            each.shards.take()
    start = state.get("iteration", 0)
    after = AfterIteration(
        work, base, policies, trained, tracker, note, bar, ranks, state.get("best"), state.get("memory", {})
    )
    if start:
        say(f"continuing after iteration {start}")
    else:
        watch(work, tracker, 0, base, policies, bar, ranks)
    pools = [
        Pool(
            config, policies[config.player], past[config.partner_player], spec.folder / "pool", seeds_of(spec).games,
            after.memory.setdefault(config.partner_player, {}),
            {"game": spec.env["game"], "run": spec.folder.name, "learner": config.player},
        )
        for config in spec.cast.values()
        if config.pool
    ]  # fmt: skip
    training = Training(
        learners, spec.env["game"], work.make_env, spec.cast, frozen, spec.rewards, spec.losses, seeds_of(spec), after,
        start=start, progress=bar, rename=names_to_swap(work, base), ranks=ranks, memory=after.memory,
        pools=pools,
    )  # fmt: skip
    if isinstance(algo, FilteredBCConfig):
        train_filtered_bc(training, algo)
    elif isinstance(algo, RLPiklConfig):
        train_rl_pikl(training, algo)
    else:
        train_ppo(training, algo)
    if ranks.first:  # a run that was stopped while it removed the last ones saves no more
        prune(after.checkpoints, algo.iterations, spec.checkpoint.keep, after.best_iteration, spec.checkpoint.every)
    return policies


def starting_policies(work: Work, base: Policy, ranks: Ranks) -> dict[str, Policy]:
    """Returns what each learner starts from: the run that `init` names, an adapter over the base, or its copy."""
    spec = work.spec
    policies = {}
    for name in spec.learners:
        if run := start_of(spec, name):
            policies[name] = policy = run_policy(run, spec.env["game"], base.device, base)
            if policy.adapter and policy.adapter.base is not base:
                raise for_another_base(name, spec.init[name])
        else:
            policies[name] = adapted(base, spec.model.lora, spec.seed) if spec.model.lora else copy.deepcopy(base)
    for name, policy in policies.items():
        if ranks.first and sizes(policy) != sizes(base):
            own, others = (sum(p.numel() for p in each.lm.parameters()) for each in (policy, base))
            say(
                f"init.{name}={spec.init[name]}: a model of another shape than the base's, of {own:,} parameters for "
                f"{others:,}; it learns as it is, whatever model.* says"
            )
    check_alike({"base": base, **policies}, ranks)
    return policies


def sizes(policy: Policy) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the language model's parameters, by name; an adapter's are its base's."""
    lm = policy.adapter.base.lm if policy.adapter else policy.lm
    return {name: tuple(parameter.shape) for name, parameter in lm.named_parameters()}


def names_to_swap(work: Work, base: Policy) -> Renaming | None:
    """Returns the game's names as tokens, for losses that read renamed rows; None where rows are read as they are."""
    spec = work.spec
    if not any_reads(spec.losses, "renamed"):
        return None
    rename = renaming(base.tokens, exchangeable(spec.env))
    if rename is None:
        say("names are no single tokens of this model, so listening learns from rows as they are, not renamed")
    elif len(work.make_env().possible_agents) >= rename.families.shape[1]:  # their order is kept: one way to name them
        say("all names play in each game, so listening learns from rows as they are: there are no others")
        return None
    return rename


@dataclass
class AfterIteration:
    """Follows each iteration: a line, evaluation games and a checkpoint, if they are due.

    `best`: iteration and score of the best checkpoint that was evaluated.
    """

    work: Work
    base: Policy
    policies: dict[str, Policy]
    trained: Trained
    tracker: Tracker
    note: Callable[[], dict[str, Any]]
    bar: Bar
    ranks: Ranks
    best: dict[str, Any] | None
    memory: dict[str, dict[str, float]]  # `Training.memory`
    reported: int = 0  # seats lost to an endpoint that were told of

    @property
    def checkpoints(self) -> Path:
        return self.work.spec.folder / "checkpoints"

    @property
    def best_iteration(self) -> int | None:
        return self.best["iteration"] if self.best else None

    def __call__(self, iteration: int, found: dict[str, float], episodes: Sequence[Episode]) -> None:
        work, spec = self.work, self.work.spec
        if work.lock is not None:
            check_there(spec.folder, work.lock)
        self.tracker.log(iteration, found)
        say(f"{iteration:4d}/{spec.algo.iterations}  " + headline(found))
        self.tell_lost()
        if iteration == 1 and not spec.eval.games:  # else the base's evaluation has told
            warn_if_hopeless(work, episodes)
        if work.expected and (warning := work.expected.warning(iteration, found)):
            say(warning)
        last = iteration == spec.algo.iterations
        better = False
        if last or (spec.eval.every and iteration % spec.eval.every == 0):
            better = self.evaluate(iteration, episodes)
        if better or last or iteration % spec.checkpoint.every == 0:
            self.save(iteration)

    def tell_lost(self) -> None:
        """Says how many more seats an endpoint has lost: their partners learn beside silence."""
        lost = (
            Counter(reason.value for _, reason in self.work.chat.lost[self.reported :]) if self.work.chat else Counter()
        )
        if lost:
            self.reported += lost.total()
            say(f"chat: seats lost to the endpoint: {', '.join(f'{n} {reason}' for reason, n in lost.items())}")

    def evaluate(self, iteration: int, episodes: Sequence[Episode]) -> bool:
        """Plays evaluation games. Returns whether the score is the best so far."""
        score = watch(self.work, self.tracker, iteration, self.base, self.policies, self.bar, self.ranks)
        planned = [episode for episode in episodes if any(turn.planned for turn in episode.turns)]
        if planned and self.ranks.first:  # games of training: evaluation is played without the planner
            path = self.work.spec.folder / "episodes" / f"planned-{iteration:06d}.jsonl"
            write_episodes(path, planned[:PLANNED])
        better = score is not None and (self.best is None or score > self.best["score"])
        if better:
            self.best = {"iteration": iteration, "score": score}
        return better

    def save(self, iteration: int) -> None:
        """Writes a checkpoint."""
        kept = self.work.spec.checkpoint
        check_alike(self.policies, self.ranks)
        self.tracker.sync()
        noted = {**self.note(), "best": self.best, **({"memory": self.memory} if self.memory else {})}
        save_training(
            self.checkpoints, iteration, self.trained, noted, kept.keep, self.ranks, self.best_iteration, kept.every
        )


HEADLINE = {  # what a person watches, and how it reads
    "game/score": "score {:.2f}",
    "game/agreement": "agreement {:.0%}",
    "game/win_rate/crewmates": "crewmates win {:.0%}",
    "filter/kept": "kept {:.0%}",
    "belief/accuracy": "belief {:.0%}",
    "loss/listening": "listening {:.2f}",
    "loss/listening_votes": "votes {:.2f}",
    "loss/plan": "plan {:.3f}",
    "reward/speaking": "speaking {:+.3f}",
    "loss/kl": "kl {:.2f}",
    "talk/turns": "turns {:.1f}",
    "errors/per_turn": "refused {:.3f}",
    "errors/outgrown": "outgrew model.context {:.1%}",
    "speed/rollout_games_per_second": "{:.2f} games/s",
    "speed/tokens_per_second": "{:,.0f} tokens/s",
    "speed/update_tokens_per_second": "update {:,.0f} tokens/s",
}


def headline(found: dict[str, float]) -> str:
    """Says an iteration in one line, terms of one's own last."""
    known = [form.format(found[name]) for name, form in HEADLINE.items() if name in found]
    return "  ".join([*known, *(f"{name.rpartition('/')[2]} {found[name]:.3f}" for name in of_ones_own(found))])
