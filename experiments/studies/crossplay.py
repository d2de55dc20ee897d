"""Cross-play: each player against each other and itself, on the same games of Deal or No Deal.

    python -m experiments.studies.crossplay players=[runs/A,'dond_human-full-s0-*',base,careful]

Two to eight players, named as for experiments.evaluate; a finished run also by a pattern that it alone matches. Every
pair plays the same game seeds, each in both seatings; alone, a player meets itself once a seed, since both seatings are
then one game. An endpoint that fails loses a game; a pair that met a refused key or a spent budget is not kept, so that
the next command plays it again. Runs of several objectives meet in one game, which `env.objective` has to name.

Written: `NAME.csv.gz` (a line for each row player, column player and metric; `lost_seats` to an endpoint),
`NAME_differences.csv.gz` (self-play minus cross-play, paired by game seed), `NAME.svg`, a line in `cards.jsonl`.
Intervals: 95 %, over game seeds; they say nothing of other training seeds. `data.table=FOLDER/NAME.csv.gz` draws the
figure again, without any game.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations_with_replacement, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from omegaconf import DictConfig, ListConfig

from envs.dond import environment as dond_environment
from experiments.launch.command import command
from experiments.launch.terminal import Bar, say
from experiments.setup.entrants import as_in_runs, configured_base, find_player, text_player
from experiments.setup.memory import fit_to_memory
from experiments.setup.players import (
    bare,
    check_plans,
    in_runs,
    intents_digest,
    is_run,
    one_run,
    player_config,
    player_digest,
    policy_folder,
    style_of,
)
from experiments.setup.refusals import say_refusals
from experiments.setup.select import add_cards, card_line
from experiments.setup.spec import PlaySpec, behind_endpoint, play_spec
from experiments.setup.stages import base_folder
from experiments.studies.cells import Workspace, begin, check_play, compute
from experiments.studies.lines import ENDS, check_complete, read_intervals
from experiments.studies.talkers import limits_of
from marl.agents.base import Agent
from marl.agents.chat import CHANGED, CHAT
from marl.common.errors import UserError, check_temperature, check_writable
from marl.common.files import digest, joined_name, read_json, reading, reading_kept, stem
from marl.decoding.probes import size_of
from marl.intents.agent import CICERO
from marl.metrics.stats import Floats, Interval, Metrics, bootstrap_mean, paired_difference, wilson
from marl.metrics.tables import format_table, write_csv
from marl.planning.planner import SUFFIX
from marl.report.figures import heat_map, save_figure
from marl.rollout.games import env_maker, file_digests
from marl.rollout.rollout import Cast, rollout
from marl.rollout.seeds import EVALUATION, draw_games
from marl.storage.checkpoint import folder_digest, read_card, started_from
from marl.storage.folder import CONFIG, run_card, run_settings
from marl.types import Episode

MOST = 8
SHOWN = {  # compared in self-play and cross-play
    "game/score/row": "Score of the row player",
    "game/points/row": "Points of the row player",
    "game/joint": "Joint points",
    "game/agreement": "Agreement",
}
RATES = ("game/agreement", "game/pareto")
# Of these, by objective: where both score alike the score is the joint one, where scores add up to nothing points tell.
OF = {1.0: ("game/score/row", "game/agreement"), -1.0: ("game/points/row", "game/score/row", "game/agreement")}
OF_OTHERS = ("game/score/row", "game/joint", "game/agreement")
RECORDED = {"seed", "turned", "points", "deal", "pareto", "how", "turns"}  # what a pair's file has of each game
KEYS = {"objective": float, "row": str, "column": str, "metric": str}  # of NAME.csv.gz
OTHERS, ALL = "others", "all"  # stand for all other players; for everybody

Pair = tuple[str, str]  # labels of the row player and the column player
Games = list[dict[str, Any]]  # of one pair, as `recorded` keeps them
Figures = dict[str, Floats]  # by metric, one number a game seed


@dataclass(frozen=True)
class Player:
    """`name`: as `find_player` takes it. `label`: in tables. `made_of`: stands for all that it plays by."""

    name: str
    label: str
    made_of: str

    @property
    def called(self) -> str:
        return Path(self.name).name


@dataclass(frozen=True)
class Cell:
    """A pair, in an order of its own that the command line does not change."""

    first: Player
    second: Player
    settings: Mapping[str, Any] = field(hash=False)  # all that determines its games, but for last digits

    @property
    def file(self) -> str:
        return f"{joined_name((self.first.called, self.second.called), '-v-')}-{digest(self.settings)}.json"


@command("crossplay", implies={"data.dond": "base=human"})
def main(cfg: DictConfig) -> None:
    """Plays what is not played yet, then tabulates."""
    # Draw again what was played before, without any game.
    if cfg.data.table:
        if cfg.players is not None:
            raise UserError("players and data.table: give one of them, who plays or a file written of such games")
        data = Path(cfg.data.table)
        folder = Path(cfg.publish or data.parent)
        check_writable(folder, "publish")
        show(data, folder / f"{stem(data)}.svg")
        return say(f"\nfigure: {folder}")

    # Check, and configure: a cell is one pair.
    check(cfg)
    names = [resolved(str(name), cfg) for name in cfg.players]
    cfg = as_in_runs(cfg, names)
    if cfg.env.game != "dond":
        raise UserError(f"env.game={cfg.env.game}: only players of Deal or No Deal change seats; must be dond")
    parts, workspace = play_spec(cfg, names), begin(cfg)
    players = entrants(names, parts, workspace.device)
    cells = {workspace.cells / cell.file: cell for cell in (
        cell_of(*pair, cfg, parts) for pair in combinations_with_replacement(players, 2)
    )}  # fmt: skip
    models = [player.name for player in players if is_run(player.name)]
    heaviest = sorted(models, key=lambda name: size_of(player_config(name), parts.algo.context).weights)[-2:]
    parts = fit_to_memory(parts, cfg.games // 2, [(name, name) for name in heaviest], workspace.device)
    left = sum(not path.exists() for path in cells)
    say(f"{len(players)} players, {cfg.games} games a pair: {left} of {len(cells)} pairs are still to play")

    # Play.
    seated: dict[str, Agent] = {}  # the two of the last pair, since each holds a model and its caches

    def played(cell: Cell, number: str) -> dict[str, Any] | None:
        label, pair = f"{number}  {cell.first.label} v {cell.second.label}", (cell.first.name, cell.second.name)
        for name in seated.keys() - set(pair):
            say_refusals(seated.pop(name))
        for name in set(pair) - seated.keys():
            seated[name] = find_player(name, parts, workspace.device, name)
        workspace.bar.stage(label, cfg.games)
        found, spoiled = play(cell, cfg, parts, [seated[name] for name in pair], workspace.bar)
        workspace.bar.close()
        lost = f", {found['lost_seats']} seats lost to the endpoint" if found["lost_seats"] else ""
        say(label + lost + (f", not kept: {spoiled}" if spoiled else ""))
        return None if spoiled else {"about": cell.settings, **found}

    complete = compute(cells, played)
    say_refusals(*seated.values())
    if parts.chat:
        say(parts.chat.summary())

    # Write.
    if complete:
        return tabulate(players, cells, parts, cfg, workspace)
    if parts.chat and (reasons := parts.chat.lost_for_good()):
        left = sum(not path.exists() for path in cells)
        raise UserError(
            f"chat: {', '.join(dict.fromkeys(reasons))}, so that {left} pairs are not kept and there is no table; "
            f"start the same command again with {CHANGED}, and it plays those"
        )


def check(cfg: DictConfig) -> None:
    """Refuses bad settings before any player is looked for."""
    if not isinstance(cfg.players, ListConfig) or not 2 <= len(cfg.players) <= MOST:
        raise UserError(f"players={cfg.players}: must be a list of two to {MOST}")
    check_play(cfg)
    if cfg.games % 2:
        raise UserError(f"games={cfg.games}: must be an even number, at least 2: each seed is played in both seatings")
    check_temperature(cfg.temperature, "temperature")


# --- Who plays --------------------------------------------------------------------------------------------------------
def resolved(name: str, cfg: DictConfig) -> str:
    """The name, with a run's folder in the place of a pattern. UserError for somebody who cannot play here."""
    if "*" in name:
        found = one_run(cfg.runs, bare(name), "players")
        name = str(found) + name.removeprefix(bare(name))
    name = in_runs(name, cfg.runs)
    check_plans(name, cfg.env)
    if is_run(name):
        game = read_card(policy_folder(name)).get("game")
        if game != "dond":
            raise UserError(f"players: {name} was trained on {game}. Name players of Deal or No Deal.")
    elif bare(name) not in ("base", CHAT):
        text_player(name, "dond")
    return name


def entrants(names: Sequence[str], parts: PlaySpec, device: torch.device) -> list[Player]:
    """The players, `base` as the folder where it is kept. UserError where two are one."""
    labels = labels_of(names)
    base = the_base(names, parts, device) if any(bare(name) == "base" for name in names) else None
    found: dict[str, Player] = {}
    for given, label in zip(names, labels, strict=True):
        name = f"{base}{given.removeprefix('base')}" if bare(given) == "base" else given
        player = Player(name, label, made_of(name, parts))
        other = found.setdefault(player.made_of, player)
        if other is not player:
            raise UserError(f"players: {other.label} and {label} are one and the same. Leave one of them out.")
    return list(found.values())


def labels_of(names: Sequence[str]) -> list[str]:
    """Labels each player by the shortest name that no other has: a run's folder without its hash, the same with its
    objective, its whole name, that with its folder's, its path."""
    forms = [forms_of(name) for name in names]
    labels = [shortest for shortest, *_ in forms]
    for longer in zip(*forms, strict=True):
        labels = [new if labels.count(label) > 1 else label for label, new in zip(labels, longer, strict=True)]
    return labels


def forms_of(name: str) -> tuple[str, ...]:
    """A player's names, from the shortest to the path."""
    path, plans = Path(bare(name)), name.removeprefix(bare(name))
    whole = (f"{path.name}{plans}", f"{'/'.join(path.parts[-2:])}{plans}", name)
    short = path.name.rpartition("-")[0]
    if not (short and (path / CONFIG).is_file()):
        return (whole[0], whole[0], *whole)
    with reading(path):
        objective = float(run_settings(path)["env"]["objective"])
    return (f"{short}{plans}", f"{short} λ={objective:g}{plans}", *whole)


def the_base(names: Sequence[str], parts: PlaySpec, device: torch.device) -> Path:
    """The folder of the one base from which the runs among these started; without any, of the configuration's."""
    runs = [Path(bare(name)) for name in names if (Path(bare(name)) / CONFIG).is_file()]
    if untouched := next((run for run in runs if started_from(policy_folder(str(run))) is None), None):
        raise UserError(
            f"players: base: {untouched} started from an untouched model, and a base needs a folder here. Use "
            f"experiments.evaluate players=[{untouched},base]."
        )
    bases = {folder_digest(folder): (run, folder) for run in runs for folder in [base_folder(run)]}
    if len(bases) > 1:
        (first, _), (other, _), *_ = bases.values()
        raise UserError(
            f"players: {first.name} and {other.name} started from different bases. Name a base by its folder."
        )
    if bases:
        return next(folder for _, folder in bases.values())
    _, made = configured_base(parts, device)
    if made is None:
        raise UserError("players: base is an untouched model, which has no folder of a base; train a run from it")
    return made


def made_of(name: str, parts: PlaySpec) -> str:
    """The digest of a policy's files, and of what else a player goes by; of scripted players the name."""
    if name == CHAT:
        assert parts.chat is not None
        return f"{CHAT} {digest(behind_endpoint(vars(parts.chat.config)))}"
    if not is_run(name):
        return name
    plans = f"{SUFFIX} {digest(asdict(parts.planner))}" if name.endswith(SUFFIX) else ""
    if name.endswith(CICERO):
        plans = f"{CICERO} {intents_digest(name)} {digest(asdict(parts.cicero))}"
    return player_digest(name) + plans


def cell_of(one: Player, other: Player, cfg: DictConfig, parts: PlaySpec) -> Cell:
    first, second = sorted((one, other), key=lambda player: player.made_of)
    read = [style_of(policy_folder(each.name), parts.env) if is_run(each.name) else None for each in (first, second)]
    settings = {
        "players": [first.made_of, second.made_of],
        **({"styles": read} if {*read} - {None, parts.env.get("style")} else {}),
        "env": parts.env,
        **file_digests(parts.env),
        "temperature": cfg.temperature,
        **limits_of(parts.algo),
        "games": cfg.games,
        "seed": cfg.seed,
    }
    return Cell(first, second, settings)


# --- Playing ----------------------------------------------------------------------------------------------------------
def play(cell: Cell, cfg: DictConfig, parts: PlaySpec, pair: Sequence[Agent], bar: Bar) -> tuple[dict[str, Any], str]:
    """The pair's games, in both seatings; one player's own in one, since they are the same. And what spoiled them,
    where a refused key or a spent budget did, so that they are to be played again; else nothing."""
    drawn, make_env = draw_games(cfg.seed, EVALUATION, count=cfg.games // 2), env_maker(parts.env)
    before = len(parts.chat.lost) if parts.chat else 0
    games: Games = []
    for turned in (0,) if cell.first == cell.second else (0, 1):
        seated = in_order(pair[turned], pair[1 - turned])
        episodes = rollout(drawn, seated, make_env, parts.algo.concurrency, bar.advance)
        games += [recorded(episode, turned) for episode in episodes]
    lost = len(parts.chat.lost) - before if parts.chat else 0
    spoiled = parts.chat.lost_for_good(before) if parts.chat else []
    return {"games": games, "lost_seats": lost}, ", ".join(dict.fromkeys(spoiled))


def games_of(path: Path) -> tuple[Games, int]:
    """The games of a cell's file, and the seats lost to an endpoint. UserError where it does not hold them."""
    found = read_json(path)
    with reading_kept(path, "a pair's games"):
        games, lost = found["games"], found.get("lost_seats", 0)
        assert games and all(game.keys() >= RECORDED for game in games) and isinstance(lost, int)
        assert all(np.isfinite(values).all() for values in figures(games, 1.0, swapped=False).values())
    return games, lost


def in_order(first: Agent, second: Agent) -> Cast:
    """The first player on the first seat in every game."""
    return lambda game, env: dict(zip(env.possible_agents, (first, second), strict=True))


def recorded(episode: Episode, turned: int) -> dict[str, Any]:
    """Keeps what is needed of a game. `points`: of the pair's first player, who has seat `turned`, and of its
    second."""
    points = [float(episode.outcome["points"][agent]) for agent in dond_environment.AGENTS]
    return {
        "seed": episode.seed,
        "turned": turned,
        "points": points[::-1] if turned else points,
        "deal": bool(episode.outcome["deal"]),
        "pareto": bool(episode.outcome["pareto"]),
        "how": str(episode.outcome["how"]),
        "turns": sum(not turn.error for turn in episode.turns),
    }


# --- Tables and figure ------------------------------------------------------------------------------------------------
def figures(games: Games, objective: float, swapped: bool) -> Figures:
    """Returns, by metric, one number for each game seed, in order: the mean of the games played on it.

    The row player is the pair's first one, or with `swapped` its second. In self-play both seats are the row's and the
    column's.
    """
    seats = np.array([game["points"] for game in games])  # (games, 2)
    both = {"score": seats + objective * seats[:, ::-1], "points": seats}
    if not any(game["turned"] for game in games):
        both = {name: np.repeat(of_seats.mean(1, keepdims=True), 2, axis=1) for name, of_seats in both.items()}
    values = {
        f"game/{name}/{player}": of_player
        for name, of_seats in both.items()
        for player, of_player in zip(("row", "column"), of_seats.T[:: -1 if swapped else 1], strict=True)
    }
    values |= {
        "game/joint": seats.sum(1),
        "game/agreement": np.array([game["deal"] for game in games], float),
        "game/pareto": np.array([game["pareto"] for game in games], float),
        "talk/turns": np.array([game["turns"] for game in games], float),
    }
    seeds, index = np.unique([game["seed"] for game in games], return_inverse=True)
    count = np.bincount(index, minlength=len(seeds))
    return {name: np.bincount(index, weights=of_games) / count for name, of_games in values.items()}


def interval(name: str, values: Floats) -> Interval:
    """The mean over game seeds; Wilson's interval for a rate that is all or nothing at each of them."""
    if name in RATES and set(values) <= {0.0, 1.0}:
        return wilson(int(values.sum()), len(values))
    return bootstrap_mean(values, rng=np.random.default_rng(0))


def tabulate(
    players: Sequence[Player], cells: Mapping[Path, Cell], parts: PlaySpec, cfg: DictConfig, workspace: Workspace
) -> None:
    """Writes NAME.csv.gz, NAME_differences.csv.gz, NAME.svg and the card, and prints the figures."""
    objective, out = float(parts.env["objective"]), workspace.out
    of: dict[Pair, Figures] = {}
    count: dict[Pair, tuple[int, int]] = {}  # games, and seats lost to an endpoint
    lost_seats = {}
    for path, cell in cells.items():
        (games, lost), pair = games_of(path), (cell.first.label, cell.second.label)
        if lost:
            lost_seats[" v ".join(pair)] = lost
        for key, swapped in ((pair, False), (pair[::-1], True)):
            of[key], count[key] = figures(games, objective, swapped), (len(games), lost)
    labels = [player.label for player in players]
    lines = [
        (objective, *key, name, i.mean, i.low, i.high, *count[key])
        for key in [(row, column) for row in labels for column in labels]
        for name, values in of[key].items()
        for i in [interval(name, values)]
    ]
    write_csv(out / f"{cfg.name}.csv.gz", (*KEYS, *ENDS, "games", "lost_seats"), lines)
    differences = self_minus_cross(labels, of)
    header = ("row", "column", "metric", "self", "cross", "difference", "low", "high", "game_seeds")
    compared = [(*key, *means, by.mean, by.low, by.high, by.n) for key, (*means, by) in differences.items()]
    write_csv(out / f"{cfg.name}_differences.csv.gz", header, compared)
    shown = show(out / f"{cfg.name}.csv.gz", out / f"{cfg.name}.svg")
    say("\nself-play minus cross-play with all others")
    names = (*labels, ALL)
    say(format_table({row: {name: differences[row, OTHERS, name][-1] for name in shown} for row in names}, shown))
    about = {player.label: {"player": player.called, "made_of": player.made_of} for player in players}
    card = run_card(workspace.cells, digest({"pairs": [path.name for path in cells]}), cfg.seed, arm=cfg.name,
                    players=about, env=parts.env, games=cfg.games, temperature=cfg.temperature,
                    lost_seats=lost_seats)  # fmt: skip
    add_cards([{**card_line(card), "run": cfg.name}], out)
    say(f"\ntables and figure: {out}")


def show(table: Path, figure: Path) -> Sequence[str]:
    """Draws and prints what `NAME.csv.gz` holds. Returns the metrics shown. UserError where it is no such file."""
    lines = read_intervals(table, "data.table", KEYS)
    labels = list(dict.fromkeys(row for _, row, *_ in lines))
    found: dict[Pair, Metrics] = {pair: {} for pair in product(labels, repeat=2)}
    for _, row, column, metric, own in lines:
        found.setdefault((row, column), {})[metric] = own
    shown = OF.get(lines[0][0], OF_OTHERS)
    check_complete(table, "data.table", {" with ".join(pair): own for pair, own in found.items()}, shown)
    draw(labels, found, shown, figure)
    for name in shown:
        say(f"\n{SHOWN[name]}; a line for each row player")
        say(format_table({column: {row: found[row, column][name] for row in labels} for column in labels}, labels))
    return shown


def self_minus_cross(
    labels: Sequence[str], of: Mapping[Pair, Figures]
) -> dict[tuple[str, str, str], tuple[float, float, Interval]]:
    """Compares each player's self-play with its games against others, paired by game seed.

    Returns by row, column and metric: the row player's mean in self-play, that against the column, and the difference.
    The column OTHERS is the mean over all other players, the row ALL that over all players.
    """
    found = {}
    for name in SHOWN:
        own = {row: of[row, row][name] for row in labels}
        cross = {row: {column: of[row, column][name] for column in labels if column != row} for row in labels}
        others = {row: np.mean(list(cross[row].values()), axis=0) for row in labels}
        pairs = [(row, column, own[row], values) for row in labels for column, values in cross[row].items()]
        pairs += [(row, OTHERS, own[row], others[row]) for row in labels]
        pairs += [(ALL, OTHERS, np.mean(list(own.values()), axis=0), np.mean(list(others.values()), axis=0))]
        for row, column, alone, met in pairs:
            by = paired_difference(alone, met, rng=np.random.default_rng(0))
            found[row, column, name] = (float(alone.mean()), float(met.mean()), by)
    return found


def draw(labels: Sequence[str], found: Mapping[Pair, Metrics], shown: Sequence[str], path: Path) -> None:
    """A heat map for each metric: a line for each row player, a column for whom it met."""
    side = 1.1 + 0.62 * len(labels)
    figure = Figure(figsize=((side + 1.2) * len(shown), side + 1.0), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        means = np.array([[found[row, column][name].mean for column in labels] for row in labels])
        low, high = (0.0, 1.0) if name in RATES else (float(means.min()), float(means.max()))
        lines = labels if name == shown[0] else [""] * len(labels)
        text = (lambda share: f"{100 * share:.0f} %") if name in RATES else "{:.1f}".format
        heat_map(axes, means, lines, labels, low, high, text, diagonal=True)
        axes.tick_params(axis="x", rotation=90)
        axes.set_xlabel("against", fontsize=8)
        axes.set_title(SHOWN[name], fontsize=10, loc="left")
    save_figure(figure, path)


if __name__ == "__main__":
    main()
