"""Score against closeness to people: planning near the human-data model, lambda after lambda (Deal or No Deal).

    python -m experiments.studies.frontier data.dond=DIR

The model of human dialogues talks, and decides when to propose; only its claims are planned, at each lambda
(planner.py). Two things are measured of each: what the claims are worth in games against others, and how well they
predict what people claimed in dialogues that nobody learned from. Finished runs that started from the same model stand
beside them.

Nobody reads what a claim was: it never changes how a game goes on, only what it pays. So every game is played once, and
each lambda's score in it is exact, the mean over the claims that it may draw. Intervals: 95 %, over games or dialogues
(both players' proposals in one are no two draws) by the bootstrap; of several training seeds, Student's t over seeds.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from omegaconf import DictConfig, ListConfig, OmegaConf

from envs import dond_v0
from envs.core import Question
from envs.dond import environment as dond_environment
from envs.dond import rules as dond_rules
from envs.dond import texts as dond_texts
from envs.human_dond import HumanView, NotReplayable, Step, read_split, replay
from experiments.launch.command import command
from experiments.launch.terminal import Bar, say
from experiments.setup.config import make
from experiments.setup.players import policy_folder, run_policy
from experiments.setup.select import add_cards, card_line, selected, write_cards
from experiments.setup.spec import PlaySpec, play_spec
from experiments.studies.cells import begin, check_play, compute, lower_concurrency
from experiments.studies.talkers import limits_of
from marl.agents.base import Agent
from marl.agents.model import model_agent
from marl.common.errors import UserError, check_count, check_writable
from marl.common.files import digest, read_json, reading, reading_kept
from marl.decoding.memory import Slots
from marl.learning.batch import collate
from marl.learning.config import UpdateConfig
from marl.learning.forward import forward
from marl.learning.micro_batches import passes
from marl.losses import Outputs
from marl.metrics.stats import Interval, bootstrap_mean
from marl.metrics.tables import ArmRun, TableRow, ablation_table, figures_by_arm, format_table, read_table, write_table
from marl.model.policy import Policy
from marl.planning.pikl import Floats
from marl.planning.planner import SLOTS, Decision, PlannerConfig, Reader, planning_agent, proposal, respond, weigh
from marl.pretraining.base import base_policy
from marl.pretraining.corpus import human_row
from marl.report.figures import HALF, paper_colours, save_figure, style_axes
from marl.rollout.cast import alternating
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


@dataclass(frozen=True, eq=False)
class Entrant:
    """A player whose claims are measured: the human-data model, alone and with all its planners, or a run's policy."""

    arm: str
    seed: int
    policy: Policy
    folder: Path  # of the saved policy, or of the run
    made_of: str  # stands for its weights
    planners: Mapping[str, PlannerConfig]  # by arm

    @property
    def arms(self) -> tuple[str, ...]:
        return self.arm, *self.planners


@dataclass(frozen=True)
class Cell:
    """One entrant's games against an opponent, or its reading of human proposals (`opponent` None)."""

    entrant: Entrant
    env: Mapping[str, Any]
    opponent: str | None
    settings: Mapping[str, Any]  # all that determines its figures

    @property
    def file(self) -> str:
        return f"{self.entrant.arm}-s{self.entrant.seed}-{digest(self.settings)}.json"


@command("frontier", implies={"data.dond": "base=human"})
def main(cfg: DictConfig) -> None:
    """Plays, plans and tabulates what is not there yet, or draws a figure again."""
    # Draw again what was played before, without any run.
    if cfg.data.table:
        made, out = Path(cfg.data.table), Path(cfg.publish or Path(cfg.data.table).parent)
        check_writable(out, "publish")
        with reading(made):
            name = made.name.partition(".")[0].replace("table", "figure")
            return draw(read_table(made), cfg.opponents, out / f"{name}.svg")

    # Check.
    if not cfg.data.dond:
        raise UserError("data.dond has to be set: add data.dond=DIR, the folder of the human dialogues.")
    parts = play_spec(cfg)
    check(cfg, parts)

    # Configure: a cell is one player against one opponent, or on people's proposals.
    planners, workspace = planners_of(cfg, parts), begin(cfg)
    base, folder = base_policy(
        parts.model, parts.base, parts.env, cache=Path(cfg.cache), human_data=cfg.data.dond, device=workspace.device,
        report=say,
    )  # fmt: skip
    assert folder is not None
    slots = Slots.of(base.lm.config, parts.algo.context, 2, SLOTS)  # one who plans against another of its size
    limits = replace(parts.algo, games=cfg.games, concurrency=cfg.concurrency)
    parts = replace(parts, algo=lower_concurrency(limits, [slots], workspace.device))
    anchor = Entrant(ANCHOR, 0, base, folder, folder_digest(folder), planners)
    entrants = [anchor, *compared(cfg, base, folder, workspace.device)]
    games = {objective: {**parts.env, "objective": objective, "split": "test"} for objective in cfg.objectives}
    table = [
        cell_of(entrant, env, opponent, anchor, cfg, parts)
        for env in games.values() for entrant in entrants for opponent in (*cfg.opponents, None)
    ]  # fmt: skip

    # Play and plan.
    def found(cell: Cell, number: str) -> dict[str, Any]:
        label = f"{number}  {cell.entrant.arm}, objective {cell.env['objective']:g}, {cell.opponent or 'people'}"
        if cell.opponent:
            arms = against(cfg, parts, cell.env, cell.entrant, cell.opponent, base, workspace.bar)
        else:
            arms = on_people(cfg, parts, cell.env, cell.entrant, workspace.bar)
        workspace.bar.close()
        say(label)
        return {"about": cell.settings, "arms": arms}

    if not compute({workspace.cells / cell.file: cell for cell in table}, found):
        return

    # Write.
    for number, (objective, env) in enumerate(games.items()):
        runs, pairs = tabulated([cell for cell in table if cell.env is env], cfg, workspace.cells)
        rows, suffix = ablation_table(runs), f"_objective_{objective:g}" if number else ""
        write_table(workspace.out / f"table{suffix}.csv", rows)
        write_table(workspace.out / f"differences{suffix}.csv", pairs)
        draw(rows, cfg.opponents, workspace.out / f"figure{suffix}.svg")
        say(f"\nobjective {objective:g}")
        say(format_table(figures_by_arm(rows)))
    card = run_card(workspace.cells, digest({"cells": [cell.file for cell in table]}), cfg.seed, arm="frontier",
                    base=folder.name, base_digest=anchor.made_of,
                    compared=[e.folder.name for e in entrants[1:]])  # fmt: skip
    add_cards([{**card_line(card), "run": cfg.name}], workspace.out)
    write_cards((e.folder for e in entrants[1:]), workspace.out)
    say(f"\ntables and figures: {workspace.out}")


def check(cfg: DictConfig, parts: PlaySpec) -> None:
    """Refuses bad settings before any model is loaded or trained."""
    check_play(cfg, least=2)
    if cfg.proposals is not None:
        check_count(cfg.proposals, "proposals", 2)
    for name in ("lambdas", "objectives", "opponents"):
        if not isinstance(cfg[name], ListConfig) or not cfg[name]:
            raise UserError(f"{name}={cfg[name]}: must be a list of at least one, as {name}=[...]")
    if cfg.env.style != "compact":
        raise UserError(f"env.style={cfg.env.style}: claims are read in compact style here; must be compact")
    if cfg.algo.temperature != 1:
        raise UserError(f"algo.temperature={cfg.algo.temperature}: all play as they speak, at 1; must be 1")
    for objective in cfg.objectives:
        env_maker({**parts.env, "objective": objective})
    for opponent in cfg.opponents:
        if opponent != "base":
            scripted("dond", "" if opponent == "scripted" else opponent)


def planners_of(cfg: DictConfig, parts: PlaySpec) -> dict[str, PlannerConfig]:
    """The planners by arm: every variant with every lambda."""
    found: dict[str, PlannerConfig] = {}
    variants: Any = OmegaConf.to_container(cfg.variants) if isinstance(cfg.variants, DictConfig) else None
    if not variants:
        raise UserError("variants: must name at least one, as +variants.NAME={partner: view}")
    for name, changes in variants.items():
        if not isinstance(changes, dict):
            raise UserError(f"variants.{name}={changes}: must be what differs in the planner, as {{partner: view}}")
        if "lambdas" in changes:
            raise UserError(f"variants.{name}.lambdas={changes['lambdas']}: every variant has those of lambdas=[...]")
        for x in cfg.lambdas:
            planner = make(PlannerConfig, {**asdict(parts.planner), **changes, "lambdas": [x]}, "planner")
            found[f"{name}_{x:g}"] = planner
            if planner.choose != "sample":
                raise UserError(f"planner.choose={planner.choose}: claims are weighed by the plan; must be sample")
    if len(found) < len(variants) * len(cfg.lambdas):
        raise UserError(f"lambdas={list(cfg.lambdas)}: some are the same in six digits, by which arms are named")
    return found


def cell_of(
    entrant: Entrant, env: Mapping[str, Any], opponent: str | None, anchor: Entrant, cfg: DictConfig, parts: PlaySpec
) -> Cell:
    if opponent is None:
        settings: dict[str, Any] = {"env": env, "human": cfg.proposals}
    else:
        settings = {
            "env": env, **file_digests(env), "opponent": opponent, "games": cfg.games, "seed": cfg.seed,
            "base": anchor.made_of, **limits_of(parts.algo),
        }  # fmt: skip
    planners = {arm: asdict(planner) for arm, planner in entrant.planners.items()}
    settings |= {"format": FORMAT, "entrant": entrant.made_of, "arms": planners}
    return Cell(entrant, env, opponent, settings)


def compared(cfg: DictConfig, base: Policy, anchor: Path, device: torch.device) -> list[Entrant]:
    """Loads the finished runs to stand beside the planners.

    UserError for one that did not start from the base in the folder `anchor`: distances from people would not compare.
    """
    if not cfg.compare:
        return []
    try:
        folders = selected(Path(cfg.runs), cfg.compare)
    except UserError as error:
        say(f"nothing to compare with: {error}")
        return []
    found: list[Entrant] = []
    for folder in folders:
        card = read_json(folder / CARD)
        started = Path(str(card.get("base") or "an untouched model")).name
        if started != anchor.name:
            other = f"{started}, and the anchor is {anchor.name}"
        elif card.get("base_digest") not in (None, folder_digest(anchor)):
            other = f"an earlier {started} than the anchor, which was made again"
        else:
            with reading(folder):
                arm, seed = f"run_{card['arm']}", int(card["seeds"][0])
            alike = next((each.folder.name for each in found if (each.arm, each.seed) == (arm, seed)), None)
            if alike is not None:
                raise UserError(
                    f"compare={cfg.compare}: {alike} and {folder.name} are both {card['arm']}, seed {seed}. Name one."
                )
            policy, made_of = run_policy(str(folder), "dond", device, base), folder_digest(policy_folder(str(folder)))
            found.append(Entrant(arm, seed, policy, folder, made_of, {}))
            continue
        raise UserError(
            f"compare={cfg.compare}: {folder.name} started from {other}. Name runs that started from it, "
            "or compare=null."
        )
    return found


def read_arms(path: Path) -> Arms:
    """The figures of a cell's file. UserError where it does not hold them."""
    found = read_json(path)
    with reading_kept(path, "each arm's figures"):
        arms: Arms = dict(found["arms"])
        assert all(np.asarray(values, float).ndim == 1 for of_arm in arms.values() for values in of_arm.values())
    return arms


def tabulated(table: Sequence[Cell], cfg: DictConfig, cells: Path) -> tuple[list[ArmRun], list[TableRow]]:
    """Each arm's figures in one game, and their differences from the anchor's, by the cells of one objective."""
    rng = np.random.default_rng(cfg.seed)  # of the bootstrap
    dialogues = [view.dialogue for view, _ in human_proposals(cfg.data.dond, table[0].env, cfg.proposals)]
    runs: list[ArmRun] = []
    pairs: list[TableRow] = []
    of_anchor: dict[str, list[float]] = {}
    entrants = list(dict.fromkeys(cell.entrant for cell in table))
    for entrant in entrants:
        figures: dict[str, dict[str, list[float]]] = {arm: {} for arm in entrant.arms}
        for cell in table:
            for arm, own in read_arms(cells / cell.file).items() if cell.entrant is entrant else ():
                suffix = f"/v_{cell.opponent}" if cell.opponent else ""
                figures[arm] |= {f"{name}{suffix}": values for name, values in own.items()}
        runs += [
            ArmRun(arm, entrant.seed, {name: mean_of(name, values, dialogues, rng) for name, values in own.items()})
            for arm, own in figures.items()
        ]
        if entrant.arm == ANCHOR:
            of_anchor = figures.pop(ANCHOR)
        alone = sum(other.arm == entrant.arm for other in entrants) == 1
        pairs += [
            TableRow.of(f"{arm} - {ANCHOR}", name, mean_of(name, np.subtract(values, of_anchor[name]), dialogues, rng))
            for arm, own in figures.items()
            if alone  # of several seeds an interval over games would say too much
            for name, values in own.items()
        ]
    return runs, pairs


def mean_of(
    figure: str, values: Sequence[float] | Floats, dialogues: Sequence[str], rng: np.random.Generator
) -> Interval:
    """The mean with a bootstrap over games, or over dialogues of people."""
    return bootstrap_mean(values, dialogues if figure.startswith("human/") else None, rng=rng)


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
    episodes = rollout(drawn, alternating(player, other), env_maker(env), limits.concurrency, bar.advance)
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
        raise UserError(f"data.dond={folder}: no proposal of its test.txt can be played again. Name another folder.")
    return found[:most]


def human_situations(
    folder: str, env: Mapping[str, Any], policy: Policy, most: int | None
) -> tuple[list[HumanView], list[Situation]]:
    """The test split's proposals, each as YOU were to make it, with the policy's beliefs."""
    views, replayed = zip(*human_proposals(folder, env, most), strict=True)
    rows = [human_row(steps, policy.tokens, number) for number, steps in enumerate(replayed)]
    answered = believed(policy, collate(rows, {}))
    situations = []
    for view, (episode, you), answers in zip(views, rows, answered, strict=True):
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
    for part, rows in passes(policy, batch, UpdateConfig().token_budget):
        outputs: Outputs = forward(policy, part, 1.0, {"beliefs": False})
        for row, answer in zip(part.row.tolist(), outputs.beliefs.double().exp().cpu().numpy(), strict=True):
            found[int(rows[row])].append(answer)
    return found


# --- Figure -----------------------------------------------------------------------------------------------------------
def line_of(arm: str) -> tuple[str, float | None]:
    """The line that an arm is a point of, and how strong its anchor is there: `plan_0.1`, `run_ppo_0.1`. None where the
    name says no strength, and the arm is a point of its own."""
    name, _, strength = arm.removeprefix("run_").rpartition("_")
    try:
        return name, float(strength)
    except ValueError:
        return arm.removeprefix("run_"), None


def draw(rows: Sequence[TableRow], opponents: Sequence[str], path: Path) -> None:
    """Score against each opponent over the log-loss of human proposals: a line for each planner, from the least lambda
    to the anchor, and one for each kind of run."""
    of = {(row.arm, row.metric): row for row in rows}
    lines: dict[tuple[str, bool], list[tuple[float, str]]] = {}  # by name and whether it is of runs
    for arm in dict.fromkeys(row.arm for row in rows if row.arm != ANCHOR):
        name, strength = line_of(arm)
        lines.setdefault((name, arm.startswith("run_")), []).append((strength or 0.0, arm))
    colours = paper_colours(list(dict.fromkeys(name for name, _ in lines)))
    figure = Figure(figsize=(HALF, 3.3), layout="constrained")
    for axes, opponent in zip(figure.subplots(1, len(opponents), squeeze=False)[0], opponents, strict=True):
        style_axes(axes)
        metric = f"game/score/v_{opponent}"
        for (name, trained), points in lines.items():
            arms = [arm for _, arm in sorted(points)] + ([] if trained else [ANCHOR])
            places = [(of[arm, "human/log_loss"].mean, of[arm, metric].mean) for arm in arms]
            colour, style = colours[name], "^:" if trained else "o-"
            axes.plot(*zip(*places, strict=True), style, color=colour, linewidth=1, markersize=4)
            axes.annotate(name, max(places, key=lambda place: place[1]), (3, 5), fontsize=9, color=colour,
                          textcoords="offset points")  # fmt: skip
        x, y = of[ANCHOR, "human/log_loss"].mean, of[ANCHOR, metric]
        axes.errorbar([x], [y.mean], [[y.mean - y.low], [y.high - y.mean]], color="#333333", marker="D", markersize=6,
                      zorder=3)  # fmt: skip
        axes.annotate("model of people", (x, y.low), (2, -8), fontsize=9, color="#333333", textcoords="offset points")
        axes.margins(x=0.1, y=0.12)
        axes.set_xlabel("log-loss on human proposals, nats", fontsize=9)
        axes.set_title(f"Score against {WHO.get(opponent, opponent)}", fontsize=10, loc="left")
    figure.supxlabel("Solid: planned. Dotted: trained.", fontsize=9, color="#555555")
    save_figure(figure, path)


if __name__ == "__main__":
    main()
