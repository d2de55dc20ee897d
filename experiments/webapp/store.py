"""Games of the web page in SQLite: who plays what, and every reply, so that a restart goes on where it stopped."""

import json
import secrets
import sqlite3
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from marl.agents.base import Reply
from marl.common.errors import UserError
from marl.types import Planned

VERSION = 2  # of the tables
TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE games (
    id TEXT PRIMARY KEY, person TEXT NOT NULL, opponent TEXT NOT NULL, env TEXT NOT NULL, seat TEXT NOT NULL,
    seed INTEGER NOT NULL, opened REAL NOT NULL, state TEXT NOT NULL, entries TEXT NOT NULL);
CREATE TABLE replies (
    game TEXT NOT NULL, clock INTEGER NOT NULL, seat TEXT NOT NULL, reply TEXT NOT NULL, seconds REAL,
    PRIMARY KEY (game, clock, seat));
CREATE INDEX games_by_person ON games (person, opened);
CREATE TABLE results (game TEXT PRIMARY KEY, result TEXT NOT NULL);
CREATE TABLE studies (name TEXT NOT NULL, version INTEGER NOT NULL, spec TEXT NOT NULL, PRIMARY KEY (name, version));
CREATE TABLE people (
    person TEXT PRIMARY KEY, code TEXT NOT NULL UNIQUE, number INTEGER NOT NULL, version INTEGER NOT NULL,
    consented REAL NOT NULL, state TEXT NOT NULL, part TEXT NOT NULL);
CREATE TABLE assigned (
    game TEXT PRIMARY KEY, person TEXT NOT NULL, number INTEGER NOT NULL, version INTEGER NOT NULL,
    part TEXT NOT NULL, condition TEXT NOT NULL);
"""
KEPT = ("text", "ids", "logprobs", "value", "legal", "cut", "thoughts")  # fields of a reply, beside `planned`


@dataclass(frozen=True)
class Record:
    """A game as it was asked for: all that determines it, given the replies."""

    id: str
    person: str  # a session
    opponent: str
    env: Mapping[str, Any]
    seat: str  # a seat's name, a role, or `any`
    seed: int
    opened: float
    state: str = "open"  # open, over or stopped
    entries: tuple[tuple[str, str], ...] = ()  # what the person saw and said, once the game is over


class Store:
    """One writer: a second server on the same file is refused. Its methods may be called from any thread."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file_lock = FileLock(f"{path}.lock")
        try:
            self._file_lock.acquire(timeout=0)
        except Timeout as error:
            raise UserError(
                f"{path}: another server uses these games. Stop it, or give this one another out."
            ) from error
        self._lock = threading.Lock()
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            found = self._db.execute("PRAGMA user_version").fetchone()[0]
            if found == 0:
                self._db.executescript(f"BEGIN; {TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
            check_version(found or VERSION, path)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA secure_delete = ON")  # what is deleted is overwritten
        except sqlite3.DatabaseError as error:
            self._file_lock.release()
            raise UserError(f"{path} is no database of games ({error}). Remove it, or give another out.") from error
        except UserError:
            self._file_lock.release()
            raise
        path.chmod(0o600)  # it holds the key that signs sessions
        self.do("INSERT OR IGNORE INTO meta VALUES ('secret', ?)", secrets.token_hex(32))
        self.secret: str = self.do("SELECT value FROM meta WHERE name = 'secret'")[0][0]

    def do(self, statement: str, *values: Any) -> list[Any]:
        """Runs one statement and returns its rows."""
        with self._lock:
            return self._db.execute(statement, values).fetchall()

    def do_all(self, *statements: tuple[str, tuple[Any, ...]]) -> None:
        """Runs all statements or none."""
        with self._lock, self._db:
            self._db.execute("BEGIN")
            for statement, values in statements:
                self._db.execute(statement, values)

    def close(self) -> None:
        with self._lock:
            self._db.close()
        self._file_lock.release()

    def add(self, record: Record) -> None:
        env = json.dumps(dict(record.env))
        fields = (record.id, record.person, record.opponent, env, record.seat, record.seed, record.opened)
        self.do("INSERT INTO games VALUES (?, ?, ?, ?, ?, ?, ?, 'open', '[]')", *fields)

    def end(
        self, game: str, state: str, entries: list[tuple[str, str]], result: Mapping[str, Any] | None = None
    ) -> None:
        """Closes a game: `over` or `stopped`. Its replies are no longer needed; `result` is what a study asks for."""
        self.do_all(
            ("UPDATE games SET state = ?, entries = ? WHERE id = ?", (state, json.dumps(entries), game)),
            ("DELETE FROM replies WHERE game = ?", (game,)),
            # A game that was deleted in the meantime leaves nothing behind.
            (
                "INSERT OR REPLACE INTO results SELECT id, ? FROM games WHERE id = ?",
                (json.dumps(dict(result or {})), game),
            ),
        )

    def result(self, game: str) -> dict[str, Any]:
        """Returns how a game ended, as the engine told `end`; {} if it is open."""
        rows = self.do("SELECT result FROM results WHERE game = ?", game)
        return dict(json.loads(rows[0][0])) if rows else {}

    def find(self, game: str) -> Record | None:
        rows = self.do("SELECT * FROM games WHERE id = ?", game)
        return _record(rows[0]) if rows else None

    def open_games(self) -> list[Record]:
        """Games to go on with, oldest first."""
        return [_record(row) for row in self.do("SELECT * FROM games WHERE state = 'open' ORDER BY opened")]

    def games_of(self, person: str, most: int = 20) -> list[Record]:
        """A person's last games, newest first."""
        rows = self.do("SELECT * FROM games WHERE person = ? ORDER BY opened DESC LIMIT ?", person, most)
        return [_record(row) for row in rows]

    def reply(self, game: str, clock: int, seat: str, reply: Reply, seconds: float | None = None) -> None:
        """Keeps a reply. `seconds`: how long a person took."""
        planned = None if reply.planned is None else asdict(reply.planned)
        kept = json.dumps({**{name: getattr(reply, name) for name in KEPT}, "planned": planned})
        self.do("INSERT INTO replies VALUES (?, ?, ?, ?, ?)", game, clock, seat, kept, seconds)

    def replies(self, game: str, index: int) -> tuple[dict[int, dict[str, Reply]], list[float]]:
        """The kept replies by step and seat, for the game's number in this process, and the person's seconds."""
        found: dict[int, dict[str, Reply]] = {}
        seconds = []
        rows = self.do("SELECT clock, seat, reply, seconds FROM replies WHERE game = ? ORDER BY clock", game)
        for clock, seat, kept, took in rows:
            fields: dict[str, Any] = {name: _tuples(value) for name, value in json.loads(kept).items()}
            if fields.get("planned"):
                fields["planned"] = Planned(**{n: _tuples(value) for n, value in fields["planned"].items()})
            found.setdefault(clock, {})[seat] = Reply((index, seat), **fields)
            if took is not None:
                seconds.append(took)
        return found, seconds


def check_version(found: int, path: Path) -> None:
    """Raises UserError for tables of another version."""
    if found != VERSION:
        raise UserError(
            f"{path}: its tables have version {found}, expected {VERSION}. Use the code that wrote them, or name "
            "another folder."
        )


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _record(row: Any) -> Record:
    game, person, opponent, env, seat, seed, opened, state, kept = row
    entries = tuple((kind, text) for kind, text in json.loads(kept))
    return Record(game, person, opponent, json.loads(env), seat, seed, opened, state, entries)


def new_record(person: str, opponent: str, env: Mapping[str, Any], seat: str, seed: int | None = None) -> Record:
    """A game with an address that nobody guesses and, unless it is given, a seed that nobody knows."""
    drawn = secrets.randbits(58) if seed is None else seed
    return Record(secrets.token_urlsafe(12), person, opponent, dict(env), seat, drawn, time.time())
