"""Trains players of Diplomacy who plan one step ahead, and rates them: `python -m experiments.lookahead`.

An imitation of scripted players is the anchor. From it, or from nothing, arms learn by self-play in which all plan:
DORA, DNVI-NPU and RL-DiL-piKL, which differ in settings alone. Then all play: one among six, six against one, and in a
population of everybody. Everything is kept as soon as it is there, and the same command goes on; several share the
work. Written: `table.csv`, `figure.svg`, `training.csv.gz`, `games.csv.gz`, and with `plane.games` above 0 `plane.csv`
and `plane.svg` (`studies/plane.py`), on a map for two (`board=france_austria`) `pairs.csv`: everybody against
everybody. Left out: press, the map for seven, convoys, and choices in retreats.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from experiments.launch.command import command
from experiments.launch.terminal import Bar, say
from experiments.setup.config import make
from experiments.setup.devices import set_threads
from experiments.setup.lookahead import ANCHOR, SCRIPTED, SETTINGS, Plane, Study, scripted_of
from experiments.setup.select import add_cards
from experiments.studies import plane
from experiments.studies.cells import compute
from marl.algorithms.lookahead import Data, Learner, load, regress, save, train_lookahead
from marl.common.errors import check_writable
from marl.common.files import digest, read_json, write_json, writing
from marl.metrics.ratings import RATED, RATED_TWO, elo, table_ratings
from marl.metrics.stats import Metrics, bootstrap_mean
from marl.metrics.tables import (
    ArmRun,
    TableRow,
    ablation_table,
    figures_by_arm,
    format_table,
    read_table,
    write_csv,
    write_table,
)
from marl.report.figures import ablation_figure
from marl.rollout.positions import play
from marl.storage.folder import git_commit

PLAY = 1 << 20  # keeps the random numbers of rated games apart from those of training
AT_ONCE = 100  # games of a file


@command("lookahead")
def main(cfg: DictConfig) -> None:
    """Imitates, trains, plays and tabulates, from where it stopped."""
    # Configure.
    study = study_of(cfg)
    grid = make(Plane, OmegaConf.to_container(cfg.plane), "plane")
    plane.check(study, grid)
    out = Path(cfg.publish or study.folder)

    # Check.
    check_writable(study.folder, "out")
    check_writable(out, "publish")
    write_json(study.folder / SETTINGS, study.settings)
    set_threads(cfg.threads)
    git_commit()  # is cached: the code may change while this runs

    # Train.
    bar, folder = Bar(enabled=cfg.progress), study.folder
    anchors = {folder / f"{ANCHOR}-s{seed}.json": seed for seed in study.seeds}
    arms = {folder / f"{name}-s{seed}.json": (name, seed) for seed in study.seeds for name in study.arms}
    whole = compute(anchors, lambda seed, number: imitate(study, seed, bar, number))
    whole = whole and compute(arms, lambda arm, number: train(study, *arm, bar, number))

    # Play.
    tables = {folder / f"{table.name}.json": table for table in tables_of(study)}
    whole = whole and compute(tables, lambda table, number: rate(study, table, bar, number))
    points = plane.cells(study, grid)
    whole = whole and compute(points, lambda point, number: plane.measure(study, grid, point, bar, number))
    bar.close()
    if not whole:
        return

    # Report.
    played = [(table, read_json(path)) for path, table in tables.items()]
    runs = [ArmRun(name, seed, own) for seed in study.seeds for name, own in measure(study, seed, played).items()]
    write_table(out / "table.csv", rows_of(runs))
    rows = read_table(out / "table.csv")  # what the figure is drawn from again
    ablation_figure(rows, RATED if study.game.players > 2 else RATED_TWO, out / "figure.svg")
    if study.game.players == 2:
        write_table(out / "pairs.csv", pairs_of(study, played))
    curves = [
        (name, seed, i + 1, *line)
        for path, (name, seed) in arms.items()
        for i, line in enumerate(read_json(path)["lines"])
    ]
    write_csv(out / "training.csv.gz", ("arm", "seed", "iteration", "loss_value", "loss_proposal"), curves)
    games = [
        (table.seed, table.kind, *seats, *scores)
        for table, found in played for seats, scores in zip(found["seats"], found["scores"], strict=True)
    ]  # fmt: skip
    n = study.game.players
    columns = [*(f"seat_{i}" for i in range(n)), *(f"score_{i}" for i in range(n))]
    write_csv(out / "games.csv.gz", ("seed", "kind", *columns), games)
    add_cards(
        [card(study, run, read_json(folder / f"{run.arm}-s{run.seed}.json")) for run in runs if run.arm in study.arms],
        out,
    )
    say(format_table(figures_by_arm(rows), list(dict.fromkeys(row.metric for row in rows))))
    if points:
        say("\n" + plane.tabulate(points, out))
    say(f"\ntables and figure: {out}")


def study_of(cfg: DictConfig) -> Study:
    """Reads the settings. UserError for values that make no study, before anything is computed."""
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    return Study.of(plain, plain["seeds"], out=Path(cfg.out))


def imitate(study: Study, seed: int, bar: Bar, number: str) -> dict[str, Any]:
    """Trains the scripted anchor on games of the population, and keeps its networks."""
    rng = np.random.default_rng([seed, 0])
    config, game = study.anchor, study.game
    seats = np.zeros((study.anchor_games, game.players), np.int64)
    played = play(game, [scripted_of(game)], seats, rng)
    data = Data(played.states, played.orders, played.scores[played.game])
    learner, lines = Learner(game, study.net(seed), config), []
    bar.stage(f"anchor {number}", config.updates)
    for done in range(0, config.updates, study.every):
        count = min(study.every, config.updates - done)
        found = regress(game, learner, data, config, count, rng)
        lines.append([found["loss/value"], found["loss/proposal"]])
        bar.advance(count)
    save(learner, study.folder / f"{ANCHOR}-s{seed}")
    return {"lines": lines}


def train(study: Study, name: str, seed: int, bar: Bar, number: str) -> dict[str, Any]:
    """Trains an arm, from its last checkpoint on."""
    arm, folder = study.arms[name], study.folder / f"{name}-s{seed}"
    config, began = replace(study.train, search=study.how(name, rated=False)), time.perf_counter()
    anchor = study.trained(ANCHOR, seed)
    learner = Learner(study.game, study.net(seed), config)
    if arm.start == "anchor":
        learner.net.load_state_dict(anchor.state_dict())
    lines: list[list[float]] = []
    if folder.exists():
        load(learner, folder)
        lines = read_json(folder / "state.json")["lines"]
    bar.stage(f"{name} {number}", config.iterations)
    bar.advance(learner.iteration)

    def after(learner: Learner, found: Mapping[str, float]) -> None:
        lines.append([found["loss/value"], found["loss/proposal"]])
        if learner.iteration % study.every == 0 or learner.iteration == config.iterations:
            save(learner, folder, lines=lines)
            took = {"arm": name, "seed": seed, "iteration": learner.iteration, "seconds": time.perf_counter() - began}
            timing = study.folder / "timing.jsonl"
            with writing(timing), timing.open("a", encoding="utf-8") as file:
                file.write(json.dumps(took) + "\n")  # since this process began with the arm
        bar.advance(1)

    train_lookahead(study.game, learner, anchor if arm.anchored else None, config, seed, after)
    return {"lines": lines, "git_commit": git_commit()}


@dataclass(frozen=True)
class Table:
    """Games of one kind, that are played together: `one` among six `others`, or with both None a population."""

    seed: int
    games: int
    one: str | None = None
    others: str | None = None
    part: int = 0

    @property
    def kind(self) -> str:
        return "population" if self.one is None else f"{self.one}_among_{self.others}"

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.part}-s{self.seed}"


def tables_of(study: Study) -> list[Table]:
    """All games to play: everybody as one among six, and as six, with the anchor; the same of those who learned with
    the scripted; and a population. On a map for two everybody plays everybody."""
    pairs = [(name, ANCHOR) for name in study.names if name != ANCHOR]
    pairs += [(name, SCRIPTED) for name in (ANCHOR, *study.arms)]
    pairs = list(dict.fromkeys([*pairs, *((other, name) for name, other in pairs)]))
    if study.game.players == 2:
        pairs = list(combinations(study.names, 2))
    wanted = [(None, None, study.games["population"]), *((one, six, study.games["one"]) for one, six in pairs)]
    return [
        Table(seed, min(AT_ONCE, count - start), one, six, start // AT_ONCE)
        for seed in study.seeds for one, six, count in wanted for start in range(0, count, AT_ONCE)
    ]  # fmt: skip


def rate(study: Study, table: Table, bar: Bar, number: str) -> dict[str, Any]:
    """Plays the games of a table: who sat where, and the scores."""
    bar.stage(f"{table.name} {number}", 1)
    rng = np.random.default_rng([table.seed, PLAY, int(digest({"name": table.name}), 16)])
    n = study.game.players
    if table.one is None or table.others is None:
        names = study.names
        seats = rng.integers(len(names), size=(table.games, n))
    else:
        names = [table.others, table.one]
        seats = plane.one_among_six(table.games, n, rng)
    players = [study.player(name, table.seed) for name in names]
    scores = play(study.game, players, seats, rng).scores
    bar.advance(1)
    return {"seats": [[names[i] for i in row] for row in seats], "scores": scores.round(6).tolist()}


def measure(study: Study, seed: int, played: Sequence[tuple[Table, Mapping[str, Any]]]) -> dict[str, Metrics]:
    """Each player's figures: Elo in the population, scores there, and as one among six and (the one's) against six."""
    rng, found = np.random.default_rng(seed), {name: Metrics() for name in study.names}
    own = [(table, each) for table, each in played if table.seed == seed]
    mixed = [each for table, each in own if table.one is None]
    seats, scores = ([row for each in mixed for row in each[key]] for key in ("seats", "scores"))
    for name, rating in table_ratings(seats, np.array(scores), rng).items():
        found[name]["rating"] = elo(rating)
    kinds = [(f"score/1v{len(seats[0]) - 1}", False), (f"score/{len(seats[0]) - 1}v1", True)]
    for name, figures in found.items():
        here = [(g, s) for g, row in enumerate(seats) for seat, s in zip(row, scores[g], strict=True) if seat == name]
        games, values = zip(*here, strict=True)
        figures["score/population"] = bootstrap_mean(values, games, rng=rng)
        for other, suffix in ((ANCHOR, ""), (SCRIPTED, "/scripted")):
            for metric, six in kinds[: study.game.players - 1]:
                one = other if six else name
                if of_one := scores_of(own, one, name if six else other):
                    figures[metric + suffix] = bootstrap_mean(of_one, rng=rng)
    return found


def scores_of(played: Sequence[tuple[Table, Mapping[str, Any]]], one: str, others: str) -> list[float]:
    """Scores of one player among others of one name; of two players whoever is called the one."""
    return [
        s for table, each in played
        if (table.one, table.others) == (one, others)
        or (len(each["seats"][0]) == 2 and (table.others, table.one) == (one, others))
        for row, line in zip(each["seats"], each["scores"], strict=True)
        for seat, s in zip(row, line, strict=True) if seat == one
    ]  # fmt: skip


def pairs_of(study: Study, played: Sequence[tuple[Table, Mapping[str, Any]]]) -> list[TableRow]:
    """Everybody's score against everybody, seed by seed resampled by game; of one seed the interval is over games."""
    runs = []
    for seed in study.seeds:
        rng, own = np.random.default_rng(seed), [each for each in played if each[0].seed == seed]
        for name in study.names:
            found = {other: scores_of(own, name, other) for other in study.names if other != name}
            against = {f"score/against/{other}": bootstrap_mean(s, rng=rng) for other, s in found.items()}
            runs.append(ArmRun(name, seed, against))
    return rows_of(runs)


def rows_of(runs: Sequence[ArmRun]) -> list[TableRow]:
    """Tabulates each metric over the runs that have it."""
    metrics = dict.fromkeys(metric for run in runs for metric in run.metrics)
    return [row for m in metrics for row in ablation_table([run for run in runs if m in run.metrics], [m])]


def card(study: Study, run: ArmRun, kept: Mapping[str, Any]) -> dict[str, Any]:
    """A line of `cards.jsonl`: what made a player, and its figures."""
    figures = {name: [round(end, 4) for end in (i.mean, i.low, i.high)] for name, i in run.metrics.items()}
    made = {"arm": run.arm, "seeds": [run.seed], "git_commit": kept["git_commit"], "config_hash": study.folder.name}
    games = study.train.games * study.train.iterations
    return {"run": f"{run.arm}-s{run.seed}", **made, "command": "lookahead.py", "positions": games, "figures": figures}


if __name__ == "__main__":
    main()
