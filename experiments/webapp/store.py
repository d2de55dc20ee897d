"""Games of the web page in SQLite: who plays what, and every reply, so that a restart goes on where it stopped."""

from __future__ import annotations

import json
import secrets
import sqlite3
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from marl.agents.base import Reply
from marl.common.errors import UserError

VERSION = 1  # of the tables
TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE games (
    id TEXT PRIMARY KEY, person TEXT NOT NULL, opponent TEXT NOT NULL, env TEXT NOT NULL, seat TEXT NOT NULL,
    seed INTEGER NOT NULL, opened REAL NOT NULL, state TEXT NOT NULL, entries TEXT NOT NULL);
CREATE TABLE replies (
    game TEXT NOT NULL, clock INTEGER NOT NULL, seat TEXT NOT NULL, reply TEXT NOT NULL, seconds REAL,
    PRIMARY KEY (game, clock, seat));
CREATE INDEX games_by_person ON games (person, opened);
"""
KEPT = ("text", "ids", "logprobs", "value", "legal", "cut")  # fields of a reply


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
                self._db.executescript(f"{TABLES} PRAGMA user_version = {VERSION};")
            elif found != VERSION:
                raise UserError(f"{path}: its tables have version {found}, expected {VERSION}. Give another out.")
            self._db.execute("PRAGMA journal_mode = WAL")
        except sqlite3.DatabaseError as error:
            self._file_lock.release()
            raise UserError(f"{path} is no database of games ({error}). Remove it, or give another out.") from error
        except UserError:
            self._file_lock.release()
            raise
        path.chmod(0o600)  # it holds the key that signs sessions
        self._do("INSERT OR IGNORE INTO meta VALUES ('secret', ?)", secrets.token_hex(32))
        self.secret: str = self._do("SELECT value FROM meta WHERE name = 'secret'")[0][0]

    def _do(self, statement: str, *values: Any) -> list[Any]:
        with self._lock:
            return self._db.execute(statement, values).fetchall()

    def close(self) -> None:
        with self._lock:
            self._db.close()
        self._file_lock.release()

    def add(self, record: Record) -> None:
        env = json.dumps(dict(record.env))
        fields = (record.id, record.person, record.opponent, env, record.seat, record.seed, record.opened)
        self._do("INSERT INTO games VALUES (?, ?, ?, ?, ?, ?, ?, 'open', '[]')", *fields)

    def end(self, game: str, state: str, entries: list[tuple[str, str]]) -> None:
        """Closes a game: `over` or `stopped`. Its replies are no longer needed."""
        with self._lock, self._db:
            self._db.execute("BEGIN")
            self._db.execute("UPDATE games SET state = ?, entries = ? WHERE id = ?", (state, json.dumps(entries), game))
            self._db.execute("DELETE FROM replies WHERE game = ?", (game,))

    def find(self, game: str) -> Record | None:
        rows = self._do("SELECT * FROM games WHERE id = ?", game)
        return _record(rows[0]) if rows else None

    def open_games(self) -> list[Record]:
        """Games to go on with, oldest first."""
        return [_record(row) for row in self._do("SELECT * FROM games WHERE state = 'open' ORDER BY opened")]

    def games_of(self, person: str, most: int = 20) -> list[Record]:
        """A person's last games, newest first."""
        rows = self._do("SELECT * FROM games WHERE person = ? ORDER BY opened DESC LIMIT ?", person, most)
        return [_record(row) for row in rows]

    def reply(self, game: str, clock: int, seat: str, reply: Reply, seconds: float | None = None) -> None:
        """Keeps a reply. `seconds`: how long a person took."""
        kept = json.dumps({name: getattr(reply, name) for name in KEPT})
        self._do("INSERT INTO replies VALUES (?, ?, ?, ?, ?)", game, clock, seat, kept, seconds)

    def replies(self, game: str, index: int) -> tuple[dict[int, dict[str, Reply]], list[float]]:
        """The kept replies by step and seat, for the game's number in this process, and the person's seconds."""
        found: dict[int, dict[str, Reply]] = {}
        seconds = []
        rows = self._do("SELECT clock, seat, reply, seconds FROM replies WHERE game = ? ORDER BY clock", game)
        for clock, seat, kept, took in rows:
            fields: dict[str, Any] = {
                n: tuple(value) if isinstance(value, list) else value for n, value in json.loads(kept).items()
            }
            found.setdefault(clock, {})[seat] = Reply((index, seat), **fields)
            if took is not None:
                seconds.append(took)
        return found, seconds


def _record(row: Any) -> Record:
    game, person, opponent, env, seat, seed, opened, state, kept = row
    entries = tuple((kind, text) for kind, text in json.loads(kept))
    return Record(game, person, opponent, json.loads(env), seat, seed, opened, state, entries)


def new_record(person: str, opponent: str, env: Mapping[str, Any], seat: str) -> Record:
    """A game with an address that nobody guesses and a seed that nobody knows."""
    return Record(secrets.token_urlsafe(12), person, opponent, dict(env), seat, secrets.randbits(58), time.time())
