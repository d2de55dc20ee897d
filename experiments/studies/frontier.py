"""Score against closeness to people: planning near the human-data model, lambda after lambda (Deal or No Deal).

    python -m experiments.studies.frontier data.dond=DIR

The model of human dialogues talks, and decides when to propose; only
its claims are planned, at each lambda (planner.py). Two things are measured of each: what the claims are worth in games
against others, and how well they predict what people claimed in dialogues that nobody learned from. Finished runs that
started from the same model stand beside them.

Nobody reads what a claim was: it never changes how a game goes on, only what it pays. So every game is played once, and
each lambda's score in it is exact, the mean over the claims that it may draw. Each part is written as soon as it is
there, and a stopped command goes on where it was. Intervals: 95 %, over games or dialogues (both players' proposals in
one are no two draws) by the bootstrap; of several training seeds, Student's t over seeds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from omegaconf import DictConfig, ListConfig

from envs import dond_v0
from envs.core import Question
from envs.dond import environment as dond_environment
from envs.dond import rules as dond_rules
from envs.dond import texts as dond_texts
from envs.human_dond import HumanView, NotReplayable, Step, read_split, replay
from experiments.launch.command import command
from experiments.launch.terminal import Bar, say
from experiments.setup.config import make, plain
from experiments.setup.devices import pick_device, set_threads
from experiments.setup.players import policy_folder, run_policy
from experiments.setup.select import add_cards, card_line, selected, write_cards
from experiments.setup.spec import PlaySpec, identity, play_spec
from experiments.studies.cells import with_room
from marl.agents.base import Agent
from marl.agents.model import model_agent
from marl.common.errors import UserError, check_count, check_writable
from marl.common.files import FAULTS, digest, read_json, reading, write_json
from marl.decoding.memory import Slots
from marl.learning.batch import collate
from marl.learning.config import UpdateConfig
from marl.learning.forward import forward
from marl.learning.micro_batches import micro_batches
from marl.losses import Outputs
from marl.metrics.stats import bootstrap_mean
from marl.metrics.tables import ArmRun, TableRow, ablation_table, format_table, write_table
from marl.model.policy import Policy
from marl.planning.pikl import Floats
from marl.planning.planner import SLOTS, Decision, PlannerConfig, Reader, planning_agent, proposal, respond, weigh
from marl.pretraining.base import base_policy
from marl.pretraining.corpus import human_seat
from marl.report.figures import PAPER, save_figure
from marl.rollout.cast import turn_about
from marl.rollout.games import env_maker, file_digests, scripted
from marl.rollout.rollout import rollout
from marl.rollout.seeds import EVALUATION, draw_games
from marl.storage.checkpoint import folder_digest
from marl.storage.folder import CARD, run_card
from marl.types import Episode, TokenBatch

WHO = {"base": "the model of people", "scripted": "the scripted player"}  # opponents, in the figure
ANCHOR = "anchor"  # the arm of the human-data model: lambda infinite
PLAYER = "player"  # who is measured, in episodes
FORMAT = 1  # of what is kept; raised where plans, or how they are measured, change
FLOOR = 1e-6  # of a claim's probability in the log-loss, as Cicero floors its anchor (FAIR 2022)

Arms = dict[str, dict[str, list[float]]]  # by arm and figure, one number for each game or proposal


@dataclass(frozen=True)
class Situation:
    """A proposal to be made, as `planner.proposal` takes it, and the stream in which it is made, up to its cue."""

    opening: str
    talk: tuple[tuple[bool, str | None], ...]
    answers: tuple[Floats, ...]
    questions: tuple[Question, ...]
    stream: tuple[int, ...]

    def decision(self, policy: Policy, config: PlannerConfig) -> Decision:
        return proposal(self.opening, self.talk, self.answers, self.questions, policy.tokens, config)


@dataclass(frozen=True)
class Entrant:
    """Whose claims are measured: the human-data model as it is and with all its planners, or a run's policy."""

    arm: str
    seed: int
    policy: Policy
    folder: Path  # of the saved policy, or of the run
    made_of: str  # stands for its weights
    planners: Mapping[str, PlannerConfig]  # by arm

    @property
    def arms(self) -> tuple[str, ...]:
        return self.arm, *self.planners


@command("frontier", implies={"data.dond": "base=human"})
def main(cfg: DictConfig) -> None:
    """Plays, plans and tabulates what is not there yet."""
    check(cfg)
    parts, planners = play_spec(cfg), planners_of(cfg)
    device = pick_device(cfg.device)
    set_threads(cfg.threads)
    cells, out = Path(cfg.cells), Path(cfg.publish)
    check_writable(cells, "cells")
    check_writable(out, "publish")
    base, folder = base_policy(
        parts.model, parts.base, parts.env, cache=Path(cfg.cache), human_data=cfg.data.dond, device=device, report=say
    )
    assert folder is not None
    slots = Slots.of(base.lm.config, parts.algo.context, 2, SLOTS)  # one who plans against another of its size
    limits = replace(parts.algo, games=cfg.games, concurrency=cfg.concurrency)
    parts = replace(parts, algo=with_room(limits, [slots], device))
    entrants = [Entrant(ANCHOR, 0, base, folder, folder_digest(folder), planners)]
    entrants += compared(cfg, base, folder, device)
    single = {arm: count == 1 for arm, count in Counter(entrant.arm for entrant in entrants).items()}
    bar = Bar(enabled=cfg.progress)
    for number, objective in enumerate(cfg.objectives):
        env = {**parts.env, "objective": objective, "split": "test"}
        rng = np.random.default_rng(cfg.seed)  # of the bootstrap
        dialogues = [view.dialogue for view, _ in human_proposals(cfg.data.dond, env, cfg.proposals)]
        runs: list[ArmRun] = []
        pairs: list[TableRow] = []
        for entrant in entrants:
            found: dict[str, Arms] = {}
            for opponent in cfg.opponents:
                found[f"v_{opponent}"] = kept(
                    cfg, cells,
                    {"env": env, **file_digests(env), "opponent": opponent, "games": cfg.games, "seed": cfg.seed,
                     "base": entrants[0].made_of, "max_new_tokens": parts.algo.max_new_tokens,
                     "context": parts.algo.context, **({"play_bf16": True} if parts.algo.play_bf16 else {})},
                    entrant, bar,
                    partial(against, cfg, parts, env, entrant, opponent, base, bar),
                )  # fmt: skip
            found["human"] = kept(
                cfg, cells, {"env": env, "human": cfg.proposals}, entrant, bar,
                partial(on_people, cfg, parts, env, entrant, bar),
            )  # fmt: skip
            figures = {
                arm: {f"{name}/{where}" if where != "human" else name: values
                      for where, arms in found.items() for name, values in arms[arm].items()}
                for arm in entrant.arms
            }  # fmt: skip
            runs += [
                ArmRun(
                    arm, entrant.seed,
                    {name: bootstrap_mean(values, drawn(name, dialogues), rng=rng) for name, values in own.items()},
                )
                for arm, own in figures.items()
            ]  # fmt: skip
            if entrant.arm == ANCHOR:
                of_anchor = figures.pop(ANCHOR)
            pairs += [
                TableRow(f"{arm} - {ANCHOR}", name, d.mean, d.low, d.high, 1, d.n)
                for arm, own in figures.items()
                if single[entrant.arm]  # of several seeds an interval over games would say too much
                for name, values in own.items()
                for d in [bootstrap_mean(np.subtract(values, of_anchor[name]), drawn(name, dialogues), rng=rng)]
            ]
        rows = ablation_table(runs)
        suffix = f"_objective_{objective:g}" if number else ""
        write_table(out / f"table{suffix}.csv", rows)
        write_table(out / f"differences{suffix}.csv", pairs)
        draw(rows, cfg, objective, out / f"figure{suffix}.svg")
        say(f"\nobjective {objective:g}")
        say(format_table({arm: {r.metric: r.interval for r in rows if r.arm == arm} for arm in arms_of(rows)}))
    run_card(cells, digest(identity(plain(cfg))), cfg.seed, arm="frontier", base=folder.name,
             base_digest=entrants[0].made_of, compared=[e.folder.name for e in entrants[1:]])  # fmt: skip
    add_cards([{**card_line(read_json(cells / CARD)), "run": cfg.name}], out)
    write_cards((e.folder for e in entrants[1:]), out)
    say(f"\ntables and figures: {out}")


def check(cfg: DictConfig) -> None:
    """Refuses bad settings before any model is loaded or trained."""
    for name in ("games", "concurrency"):
        check_count(cfg[name], name, 2)
    check_count(cfg.seed, "seed", 0)
    if cfg.proposals is not None:
        check_count(cfg.proposals, "proposals", 2)
    for name in ("lambdas", "objectives", "opponents"):
        if not isinstance(cfg[name], ListConfig) or not cfg[name]:
            raise UserError(f"{name}={cfg[name]}: must be a list of at least one, as {name}=[...]")
    if not isinstance(cfg.variants, DictConfig) or not cfg.variants:
        raise UserError("variants: must name at least one, as +variants.NAME={partner: view}")
    for variant, changes in plain(cfg.variants).items():
        if not isinstance(changes, dict):
            raise UserError(f"variants.{variant}={changes}: must be what differs in the planner, as {{partner: view}}")
        if "lambdas" in changes:
            raise UserError(
                f"variants.{variant}.lambdas={changes['lambdas']}: every variant has those of lambdas=[...]"
            )
    if cfg.env.style != "compact":
        raise UserError(f"env.style={cfg.env.style}: claims are read in compact style here; must be compact")
    if cfg.algo.temperature != 1:
        raise UserError(f"algo.temperature={cfg.algo.temperature}: all play as they speak, at 1; must be 1")
    for x in cfg.lambdas:
        if isinstance(x, bool) or not isinstance(x, int | float) or not 0 <= x < math.inf:
            raise UserError(f"lambdas={list(cfg.lambdas)}: each must be a number, 0 (no anchor) or above")
    if len({f"{x:g}" for x in cfg.lambdas}) < len(cfg.lambdas):
        raise UserError(f"lambdas={list(cfg.lambdas)}: some are the same in six digits, by which arms are named")
    for objective in cfg.objectives:
        env_maker({**plain(cfg.env), "objective": objective})
    for opponent in cfg.opponents:
        if opponent != "base":
            scripted("dond", "" if opponent == "scripted" else opponent)


def planners_of(cfg: DictConfig) -> dict[str, PlannerConfig]:
    """The planners by arm: every variant with every lambda."""
    found: dict[str, PlannerConfig] = {}
    for name, changes in plain(cfg.variants).items():
        planner = make(PlannerConfig, {**plain(cfg.planner), **changes}, "planner")
        if planner.choose != "sample":
            raise UserError(f"planner.choose={planner.choose}: claims are weighed by the plan here; must be sample")
        found |= {f"{name}_{x:g}": replace(planner, lambdas=(float(x),)) for x in cfg.lambdas}
    return found


def drawn(figure: str, dialogues: Sequence[str]) -> Sequence[str] | None:
    """Returns what a figure's bootstrap draws: dialogues of people, or None for games."""
    return dialogues if figure.startswith("human/") else None


def compared(cfg: DictConfig, base: Policy, anchor: Path, device: torch.device) -> list[Entrant]:
    """The finished runs to stand beside the planners. UserError for one that did not start from the base in the folder
    `anchor`, whose distance from people is another."""
    if not cfg.compare:
        return []
    try:
        folders = selected(Path(cfg.runs), cfg.compare)
    except UserError as error:
        say(f"nothing to compare with: {error}")
        return []
    cards = {folder: read_json(folder / CARD) for folder in folders}
    for folder, card in cards.items():
        started = Path(str(card.get("base") or "an untouched model")).name
        if started != anchor.name:
            other = f"{started}, and the anchor is {anchor.name}"
        elif card.get("base_digest") not in (None, folder_digest(anchor)):
            other = f"an earlier {started} than the anchor, which was made again"
        else:
            continue
        raise UserError(
            f"compare={cfg.compare}: {folder.name} started from {other}; name runs that started from it, "
            "or compare=null"
        )
    found = []
    for folder, card in cards.items():
        with reading(folder):
            arm, seed = f"run_{card['arm']}", int(card["seeds"][0])
        policy, made_of = run_policy(str(folder), "dond", device, base), folder_digest(policy_folder(str(folder)))
        found.append(Entrant(arm, seed, policy, folder, made_of, {}))
    return found


def kept(
    cfg: DictConfig, cells: Path, about: Mapping[str, Any], entrant: Entrant, bar: Bar, find: Callable[[], Arms]
) -> Arms:
    """Returns what `find` finds, from its file if it was found before."""
    settings = {
        **about, "format": FORMAT, "entrant": entrant.made_of,
        "arms": {arm: asdict(found) for arm, found in entrant.planners.items()},
    }  # fmt: skip
    path = cells / f"{entrant.arm}-s{entrant.seed}-{digest(settings)}.json"
    if not path.exists():
        found: Arms = find()
        bar.close()
        write_json(path, {"about": settings, "arms": found})
        say(f"{path.name}: {', '.join(f'{k}={v}' for k, v in about.items() if k != 'env')}")
    arms: Any = read_json(path).get("arms")
    try:
        for of_arm in arms.values():
            for values in of_arm.values():
                assert np.asarray(values, float).ndim == 1
    except FAULTS:
        arms = None
    if arms is None:
        raise UserError(f"{path} does not hold each arm's figures: remove it, and the same command finds them again")
    return dict(arms)


# --- Planning at every lambda -----------------------------------------------------------------------------------------


def plans(situation: Situation, entrant: Entrant, anchor: Reader) -> dict[str, Floats]:
    """Returns, by arm, the probabilities of all claims, (A,): the policy's own, and planned near them."""
    views = any(planner.partner == "view" for planner in entrant.planners.values())
    decision = situation.decision(entrant.policy, PlannerConfig(partner="view" if views else "mirror"))
    tau, others = weigh(decision, situation.stream, anchor, anchor)
    found = {entrant.arm: tau}
    for arm, planner in entrant.planners.items():
        expected = others if planner.partner == "view" else None
        found[arm] = respond(situation.decision(entrant.policy, planner).values(tau, expected), tau, planner)
    return found


# --- Games ------------------------------------------------------------------------------------------------------------


def against(
    cfg: DictConfig, parts: PlaySpec, env: Mapping[str, Any], entrant: Entrant, opponent: str, base: Policy, bar: Bar
) -> Arms:
    """Score and agreement of every arm in each game against the opponent; seats change from game to game."""
    limits = parts.algo
    as_it_is = PlannerConfig(lambdas=(math.inf,), others="anchor", belief="prior")  # legal claims, of its own choice
    player = planning_agent(PLAYER, entrant.policy, limits, 1, 1.0, as_it_is, "dond")
    other: Agent
    if opponent == "base":
        other = model_agent("base", base, limits, 1, 1.0)
    else:
        other = scripted("dond", "" if opponent == "scripted" else opponent)
    bar.stage(f"{entrant.arm} v {opponent}", cfg.games)
    drawn = draw_games(cfg.seed, EVALUATION, count=cfg.games)
    episodes = rollout(drawn, turn_about(player, other), env_maker(env), limits.concurrency, bar.advance)
    bar.stage(f"{entrant.arm} v {opponent}: plans", len(episodes))
    anchor = Reader(entrant.policy, parts.algo.context, 1.0)
    arms: Arms = {arm: {"game/score": [], "game/agreement": []} for arm in entrant.arms}
    for episode in episodes:
        for arm, (score, agreed) in outcomes(episode, entrant, anchor).items():
            arms[arm]["game/score"].append(score)
            arms[arm]["game/agreement"].append(agreed)
        bar.advance(1)
    return arms


def outcomes(episode: Episode, entrant: Entrant, anchor: Reader) -> dict[str, tuple[float, float]]:
    """Returns, by arm, the player's expected score R_i + objective R_j and the probability of a deal, over the claims
    it may make; what the partner claimed is given."""
    agent = next(name for name, player in episode.players.items() if player == PLAYER)
    seat = dond_environment.AGENTS.index(agent)
    theirs = episode.outcome["claims"][1 - seat]
    made = next((turn for turn in episode.turns if turn.agent == agent and turn.planned), None)
    if theirs is None or made is None:  # the game ended before both had claimed
        return dict.fromkeys(entrant.arms, (0.0, 0.0))
    facts = episode.facts
    mine = dond_rules.rest(theirs, facts["counts"])  # the claim that makes a deal
    own, other = facts["values"][seat], facts["values"][1 - seat]
    worth = dond_rules.points(mine, own) + facts["objective"] * dond_rules.points(theirs, other)
    right = dond_rules.allocations(facts["counts"]).index(mine)
    beliefs = [b for b in episode.beliefs if b.listener == agent and b.step <= made.step]
    talk = tuple(
        (turn.agent == agent, turn.message or None)
        for turn in episode.turns
        if not turn.error and turn.step < made.step
    )
    situation = Situation(
        dond_texts.prompt(facts["counts"], own, facts["objective"], dond_v0.Style.COMPACT),
        talk,
        tuple(b.probs for b in beliefs[-3:]),
        tuple(b.question for b in beliefs[:3]),
        tuple(episode.streams[agent].tokens[: made.start]),
    )
    found = plans(situation, entrant, anchor)
    return {arm: (float(plan[right]) * worth, float(plan[right])) for arm, plan in found.items()}


# --- People -----------------------------------------------------------------------------------------------------------


def on_people(cfg: DictConfig, parts: PlaySpec, env: Mapping[str, Any], entrant: Entrant, bar: Bar) -> Arms:
    """Accuracy (is the most probable claim the one that was made?) and log-loss of every arm, on the test split."""
    views, situations = human_situations(cfg.data.dond, env, entrant.policy, cfg.proposals)
    bar.stage(f"{entrant.arm}: human proposals", len(views))
    anchor = Reader(entrant.policy, parts.algo.context, 1.0)
    arms: Arms = {arm: {"human/accuracy": [], "human/log_loss": []} for arm in entrant.arms}
    for view, situation in zip(views, situations, strict=True):
        assert view.claim is not None
        made = dond_rules.allocations(view.counts).index(view.claim)
        for arm, plan in plans(situation, entrant, anchor).items():
            arms[arm]["human/accuracy"].append(float(plan.argmax() == made))
            arms[arm]["human/log_loss"].append(-math.log(max(float(plan[made]), FLOOR)))
        bar.advance(1)
    return arms


def human_proposals(folder: str, env: Mapping[str, Any], most: int | None) -> list[tuple[HumanView, list[Step]]]:
    """The test split's proposals, each with its dialogue played again, as `replay` returns it."""
    game, found = env_maker(env)(), []
    for view in read_split(folder, "test").usable:
        with suppress(NotReplayable):
            found.append((view, replay(view, game)))
    if not found:
        raise UserError(f"data.dond={folder}: its test split holds no proposal that can be played again")
    return found[:most]


def human_situations(
    folder: str, env: Mapping[str, Any], policy: Policy, most: int | None
) -> tuple[list[HumanView], list[Situation]]:
    """The test split's proposals, each as YOU were to make it, with the policy's beliefs."""
    views, replayed = zip(*human_proposals(folder, env, most), strict=True)
    seats = [human_seat(steps, policy.tokens, number) for number, steps in enumerate(replayed)]
    answered = believed(policy, collate(seats, {}))
    situations = []
    for view, (episode, you), answers in zip(views, seats, answered, strict=True):
        talk = [(who == "YOU", text) for who, text in view.turns]
        situations.append(
            Situation(
                dond_texts.prompt(view.counts, view.values, env["objective"], dond_v0.Style.COMPACT),
                tuple(talk[:-1] if talk[-1][0] else talk),  # whoever ended the talk proposed first
                tuple(answers[-3:]),
                tuple(b.question for b in episode.beliefs[:3]),
                tuple(episode.streams[you].tokens[: episode.turns[-1].start]),
            )
        )
    return list(views), situations


@torch.no_grad()
def believed(policy: Policy, batch: TokenBatch) -> list[list[Floats]]:
    """The policy's answers to each row's belief questions, in order."""
    found: list[list[Floats]] = [[] for _ in range(batch.shape[0])]
    for rows in micro_batches(batch, torch.arange(batch.shape[0]), UpdateConfig().token_budget):
        part = batch.select(rows).to(policy.device)
        outputs: Outputs = forward(policy, part, 1.0, {"beliefs": False})
        for row, answer in zip(part.row.tolist(), outputs.beliefs.double().exp().cpu().numpy(), strict=True):
            found[int(rows[row])].append(answer)
    return found


# --- Figure -----------------------------------------------------------------------------------------------------------


def arms_of(rows: Sequence[TableRow]) -> list[str]:
    return list(dict.fromkeys(row.arm for row in rows))


def line_of(arm: str) -> tuple[str, float | None]:
    """The line that an arm is a point of, and how strong its anchor is there: `plan_0.1`, `run_ppo_0.1`. None where the
    name says no strength, and the arm is a point of its own."""
    name, _, strength = arm.removeprefix("run_").rpartition("_")
    try:
        return name, float(strength)
    except ValueError:
        return arm.removeprefix("run_"), None


def draw(rows: Sequence[TableRow], cfg: DictConfig, objective: float, path: Path) -> None:
    """Score and agreement by opponent, and accuracy on human proposals, each over the log-loss of these proposals: a
    line for each planner from the least lambda to the anchor, and one for each kind of run."""
    of = {(row.arm, row.metric): row for row in rows}
    lines: dict[tuple[str, bool], list[tuple[float, str]]] = {}  # by name and whether it is of runs
    for arm in arms_of(rows):
        name, strength = line_of(arm)
        lines.setdefault((name, arm.startswith("run_")), []).append((strength or 0.0, arm))
    anchor = lines.pop((ANCHOR, False))[0][1]
    columns = len(cfg.opponents) + 1
    figure = Figure(figsize=(4.2 * columns, 7.2), layout="constrained")
    grid = figure.subplots(2, columns)
    panels = [(grid[row, column], f"{metric}/v_{opponent}", f"{label} against {WHO.get(opponent, opponent)}")
              for row, (metric, label) in enumerate((("game/score", "Score"), ("game/agreement", "Agreement")))
              for column, opponent in enumerate(cfg.opponents)]  # fmt: skip
    panels.append((grid[0, -1], "human/accuracy", "Accuracy on human proposals"))
    for axes, metric, title in panels:
        for number, ((name, trained), points) in enumerate(lines.items()):
            points = sorted(points)
            arms = [arm for _, arm in points] + ([] if trained else [anchor])
            xs, ys = ([of[arm, which].mean for arm in arms] for which in ("human/log_loss", metric))
            colour = PAPER[number % len(PAPER)]
            label = f"{name}, trained" if trained else f"planned: {name}"
            axes.plot(xs, ys, color=colour, linewidth=1, linestyle="--" if trained else "-",
                      marker="^" if trained else "o", markersize=6 if trained else 3.5, label=label)  # fmt: skip
            told = points if trained else [point for point in points if point[0] in (points[0][0], 1.0)]
            for strength, arm in told:
                axes.annotate(f"{strength:g}", (of[arm, "human/log_loss"].mean, of[arm, metric].mean), (4, 4),
                              fontsize=7, color=colour, textcoords="offset points")  # fmt: skip
        x, y = of[anchor, "human/log_loss"].mean, of[anchor, metric]
        axes.errorbar([x], [y.mean], [[y.mean - y.low], [y.high - y.mean]], color="#333333", marker="D", markersize=6,
                      capsize=3, zorder=3, label="the model of people, 95 %")  # fmt: skip
        axes.set_xlabel("log-loss on human proposals, nats", fontsize=9)
        axes.set_title(title, fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    grid[1, -1].axis("off")
    note = f"Objective {objective:g}.\nNumbers: lambda (planned) or the\nstrength of the pull (trained)"
    grid[1, -1].legend(*grid[0, 0].get_legend_handles_labels(), frameon=False, fontsize=9, loc="center left",
                       title=note, title_fontsize=9, alignment="left")  # fmt: skip
    save_figure(figure, path)


if __name__ == "__main__":
    main()
