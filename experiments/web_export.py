"""Writes what a study found: `python -m experiments.web_export study=NAME`, also while it is being played.

Written into `out`: `games.jsonl`, transcripts of finished games; `games.csv`, a row for each game that was begun;
`people.csv`, a row for each person, with the pay; `table.csv`, means by condition with 95 % intervals, and differences
to the first condition of each part, both by a bootstrap over people, since games of one person depend on each other;
`study.json`, the study's text by version and how many people consented, were refused, finished and withdrew.

`withdraw=CODE` first deletes all of the person with this code, while no server runs.

Games that programs played are exported with `simulated=true`: their files are called simulated_*, and so are their
players.
"""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from omegaconf import DictConfig

from experiments.launch.command import command
from experiments.launch.terminal import say
from experiments.webapp.roster import Roster
from experiments.webapp.store import Store, check_version
from experiments.webapp.study import Study, from_json, read_study, study_folder
from marl.common.errors import UserError, check_count, check_writable
from marl.common.files import write_json
from marl.metrics.stats import DRAWS, Interval, mean_metrics, percentiles
from marl.metrics.tables import format_table, write_csv, write_records
from marl.report.transcripts import read_episodes, write_transcripts
from marl.storage.folder import git_commit

METRICS = ("points", "partner_points", "score", "deal", "pareto", "won", "turns", "errors", "seconds")
FLAGS = ("deal", "pareto", "won")


@dataclass(frozen=True)
class GameRow:
    """A game that was begun. What it has no value for is empty."""

    person: str
    number: int  # among the person's games
    version: int
    part: str
    condition: str
    opponent: str
    played_by: str  # human or simulated
    state: str  # open, over or stopped
    how: str
    points: float | str
    partner_points: float | str
    score: float | str
    deal: bool | str
    pareto: bool | str
    won: bool | str
    turns: int | str
    errors: int | str  # refused replies of the person
    seconds: float | str  # that the person's replies took, in all
    pay: float


@dataclass(frozen=True)
class PersonRow:
    """A person by its number, and what it is to be paid."""

    person: str
    version: int
    consented: str
    state: str
    part: str
    games: int
    played_by: str
    pay: float


@command("web_export")
def main(cfg: DictConfig) -> Path:
    """Reads the study's database and writes its files."""
    # Configure.
    check_count(cfg.seed, "seed", 0)
    study = read_study(cfg.study)
    folder = Path(cfg.study_out) if cfg.study_out else study_folder(cfg.runs, study.name, cfg.simulated)
    out = Path(cfg.out) if cfg.out else folder / "export"
    if cfg.withdraw is not None:
        withdraw(folder, study, str(cfg.withdraw), cfg.simulated)

    # Read.
    kind, prefix = ("simulated", "simulated_") if cfg.simulated else ("human", "")
    path = folder / "games.sqlite"
    with closing(opened(path, cfg.simulated)) as db, reading_games(path):
        studies = {
            v: from_json(text)
            for v, text in db.execute("SELECT version, spec FROM studies WHERE name = ?", (study.name,))
        }
        games, ids = game_rows(db, studies, kind)
        people = person_rows(db, studies, games, kind)
        withdrawn = db.execute("SELECT value FROM meta WHERE name = 'withdrawn'").fetchone()
    check_writable(out, "out")
    transcripts = []
    for row, game in zip(games, ids, strict=True):
        written = folder / "episodes" / f"{game}.jsonl"
        if written.is_file():
            (found,) = read_episodes(written)
            about = {"person": row.person, "number": row.number, "part": row.part, "condition": row.condition}
            transcripts.append(
                {**found, "about": {**found.get("about", {}), **about, "simulated": bool(cfg.simulated)}}
            )

    # Write.
    write_transcripts(out / f"{prefix}games.jsonl", transcripts)
    write_records(out / f"{prefix}games.csv", GameRow, games)
    write_records(out / f"{prefix}people.csv", PersonRow, people)
    order = [(name, condition) for name, part in study.parts.items() for condition in part.conditions]
    table, counts = tabulated(games, cfg.seed, order)
    lines = [
        (arm, metric, value.mean, value.low, value.high, *counts[arm])
        for arm, row in table.items()
        for metric, value in row.items()
    ]
    write_csv(out / f"{prefix}table.csv", ["arm", "metric", "mean", "low", "high", "people", "games"], lines)
    states = Counter(person.state for person in people)
    write_json(
        out / f"{prefix}study.json",
        {
            "study": study.name,
            "simulated": bool(cfg.simulated),
            "commit": git_commit(),
            "people": {"consented": len(people), **states, "withdrawn": int(withdrawn[0]) if withdrawn else 0},
            "games": dict(Counter(row.state for row in games)),
            "endings": dict(Counter(row.how for row in games if row.how)),
            "pay": sum(person.pay for person in people),
            "assignment": {str(version): f"{each.assignment}, seed {each.seed}" for version, each in studies.items()},
            "bootstrap_seed": int(cfg.seed),
            "versions": {str(version): asdict(each) for version, each in studies.items()},
        },
    )
    if cfg.simulated:
        say("SIMULATED: programs played these games, no people.")
    say(format_table(table))
    say(f"{len(games)} games of {len(people)} {'programs' if cfg.simulated else 'people'}: {out}")
    return out


def withdraw(folder: Path, study: Study, code: str, simulated: bool) -> None:
    """Deletes all of a person, as the page does. UserError while a server uses the games."""
    opened(folder / "games.sqlite", simulated).close()
    store = Store(folder / "games.sqlite")
    try:
        roster = Roster(store, study, simulated)
        for game in roster.withdraw(roster.session_of(code)):
            (folder / "episodes" / f"{game}.jsonl").unlink(missing_ok=True)
    finally:
        store.close()
    say(f"All of {code} is deleted, also from this export. Delete older copies of exports too.")


def opened(path: Path, simulated: bool) -> sqlite3.Connection:
    """The study's database, to read only. UserError if it is none, or its games were played by others."""
    if not path.is_file():
        raise UserError(f"{path}: there is no such study yet. Serve it first: python -m experiments.web study=NAME")
    db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        with reading_games(path):
            found = db.execute("PRAGMA user_version").fetchone()[0]
            if found:  # else it is another program's, and has no meta
                check_version(found, path)
            kind = db.execute("SELECT value FROM meta WHERE name = 'played by'").fetchone()
        if kind is None or kind[0] != ("programs" if simulated else "people"):
            raise UserError(
                f"{path}: its games are of {kind[0] if kind else 'no study'}. "
                + (f"Give simulated={str(not simulated).lower()}." if kind else "Name another study_out.")
            )
    except UserError:
        db.close()
        raise
    return db


@contextmanager
def reading_games(path: Path) -> Iterator[None]:
    """Turns what SQLite says of a file that is no database, or a damaged one, into a UserError."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise UserError(f"{path} is no database of games ({error}). Name the study's folder in study_out.") from error


def game_rows(db: sqlite3.Connection, studies: Mapping[int, Study], kind: str) -> tuple[list[GameRow], list[str]]:
    """A row for each game, and the games' names in the same order."""
    asked = (
        "SELECT a.game, p.code, a.number, a.version, a.part, a.condition, g.opponent, g.state, r.result "
        "FROM assigned a JOIN people p ON p.person = a.person "
        "JOIN games g ON g.id = a.game LEFT JOIN results r ON r.game = a.game "
        "ORDER BY p.number, a.number"
    )
    rows, ids = [], []
    for game, code, number, version, part, condition, opponent, state, kept in db.execute(asked):
        result = json.loads(kept) if kept else {}
        values = {name: result.get(name, "") for name in ("how", *METRICS)}
        if "winner" in result:
            values["won"] = result["winner"] is not None and bool(result["score"])
        values["seconds"] = round(sum(result["seconds"]), 1) if "seconds" in result else ""
        pay = studies[version].pay_in(part).of(result)
        rows.append(GameRow(code, number, version, part, condition, opponent, kind, state, pay=pay, **values))
        ids.append(game)
    return rows, ids


def person_rows(
    db: sqlite3.Connection, studies: Mapping[int, Study], games: Sequence[GameRow], kind: str
) -> list[PersonRow]:
    rows = []
    asked = "SELECT code, version, consented, state, part FROM people ORDER BY number"
    for code, version, consented, state, part in db.execute(asked):
        own = [row for row in games if row.person == code]
        took_part = any(row.how not in ("", "stopped") for row in own)
        pay = sum(row.pay for row in own) + (studies[version].pay.taking_part if took_part else 0.0)
        when = datetime.fromtimestamp(consented, UTC).isoformat(timespec="minutes")
        rows.append(PersonRow(code, version, when, state, part, len(own), kind, round(pay, 2)))
    return rows


def tabulated(
    games: Sequence[GameRow], seed: int, order: Sequence[tuple[str, str]] = ()
) -> tuple[dict[str, dict[str, Interval]], dict[str, tuple[int, int]]]:
    """Means by part and condition, then differences to each part's first condition; and people and games of each.

    `order`: parts and conditions as the study's file has them. Others follow by name.
    """
    place = {both: number for number, both in enumerate(order)}

    def in_order(row: GameRow) -> tuple[int, str, str]:
        return place.get((row.part, row.condition), len(place)), row.part, row.condition

    numbers = {code: n for n, code in enumerate(dict.fromkeys(row.person for row in games))}
    over = [row for row in games if row.state == "over"]
    arms: dict[str, dict[str, list[tuple[int, float]]]] = {}
    first: dict[str, str] = {}
    for row in sorted(over, key=in_order):
        arm = f"{row.part}/{row.condition}"
        first.setdefault(row.part, arm)
        values = arms.setdefault(arm, {name: [] for name in METRICS})
        for name in METRICS:
            value = getattr(row, name)
            if value != "":
                values[name].append((numbers[row.person], bool(value) if name in FLAGS else float(value)))
    rng = np.random.default_rng(seed)
    table = {arm: mean_metrics(values, rng) for arm, values in arms.items()}
    counts = {arm: _counts(values) for arm, values in arms.items()}
    for arm, values in arms.items():
        base = first[arm.partition("/")[0]]
        if arm != base:
            both = f"{arm} - {base.partition('/')[2]}"
            table[both] = {
                name: difference(values[name], arms[base][name], rng)
                for name in METRICS
                if values[name] and arms[base][name]
            }
            people = {person for each in (values, arms[base]) for pairs in each.values() for person, _ in pairs}
            counts[both] = len(people), counts[arm][1] + counts[base][1]
    return table, counts


def _counts(values: Mapping[str, Sequence[tuple[int, float]]]) -> tuple[int, int]:
    longest = max(values.values(), key=len)
    return len({person for person, _ in longest}), len(longest)


def difference(a: Sequence[tuple[int, float]], b: Sequence[tuple[int, float]], rng: np.random.Generator) -> Interval:
    """Mean of `a` less mean of `b`, both (person, value), with a percentile bootstrap that resamples whole people."""
    people = sorted({person for person, _ in (*a, *b)})
    place = {person: n for n, person in enumerate(people)}
    sums, counts = np.zeros((2, len(people))), np.zeros((2, len(people)))
    for side, pairs in enumerate((a, b)):
        for person, value in pairs:
            sums[side, place[person]] += value
            counts[side, place[person]] += 1
    mean = float(np.subtract(*(sums.sum(1) / counts.sum(1))))
    if len(people) < 2:
        return Interval(mean, np.nan, np.nan, len(people))
    times = rng.multinomial(len(people), np.full(len(people), 1 / len(people)), size=DRAWS)  # (draws, people)
    top, bottom = times @ sums.T, times @ counts.T  # (draws, 2)
    whole = (bottom > 0).all(1)  # a draw without anybody of one condition has no difference
    means = top[whole] / bottom[whole]
    return percentiles(mean, means[:, 0] - means[:, 1], len(people))


if __name__ == "__main__":
    main()
