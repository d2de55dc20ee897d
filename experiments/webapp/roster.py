"""The people of a study in the server's database: consent, part, games, pay, withdrawal.

A person is known by its session to the server, and by a random code to everybody else.
"""

import secrets
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.webapp.store import Record, Store, new_record
from experiments.webapp.study import Study, from_json, pick, shares, to_json
from marl.common.errors import UserError


@dataclass(frozen=True)
class Person:
    """Somebody who consented. State: `screening`, `refused`, `playing` or `finished`."""

    session: str
    code: str
    number: int
    version: int  # of the study that was consented to
    consented: float
    state: str
    part: str  # empty before it is assigned


@dataclass(frozen=True)
class Played:
    """A game of a person: its number among the person's, what was assigned, and how it ended ({}: it has not)."""

    game: str
    number: int
    version: int
    part: str
    condition: str
    state: str
    result: dict[str, Any]


class Roster:
    """UserError where the study's file has changed under the same version, or programs would mix with people."""

    def __init__(self, store: Store, study: Study, simulated: bool = False) -> None:
        self.store, self.study, self.simulated = store, study, simulated
        self._lock = threading.RLock()
        check_study(store, study.name)
        kind = "programs" if simulated else "people"
        store.do("INSERT OR IGNORE INTO meta VALUES ('played by', ?)", kind)
        if store.do("SELECT value FROM meta WHERE name = 'played by'")[0][0] != kind:
            raise UserError(
                "The games there are of people, or of programs, and this study's are not. Give another out."
            )
        seen = store.do(
            "SELECT 1 FROM people WHERE version = ? UNION SELECT 1 FROM assigned WHERE version = ?",
            *(study.version, study.version),
        )
        kept = store.do("SELECT spec FROM studies WHERE name = ? AND version = ?", study.name, study.version)
        if seen and kept and kept[0][0] != to_json(study):
            raise UserError(
                f"study {study.name}: its file is not what people saw as version {study.version}. Raise its version."
            )
        store.do("INSERT OR REPLACE INTO studies VALUES (?, ?, ?)", study.name, study.version, to_json(study))

    def person(self, session: str) -> Person | None:
        rows = self.store.do("SELECT * FROM people WHERE person = ?", session)
        return Person(*rows[0]) if rows else None

    def consent(self, session: str) -> None:
        """Keeps that this person consented to this version now. Whoever consented to an earlier one stays in it."""
        with self._lock:
            person, now = self.person(session), time.time()
            if person is None:
                ((last,),) = self.store.do("SELECT COALESCE(MAX(number), 0) FROM people")
                fields = (session, f"p{secrets.token_hex(4)}", last + 1, self.study.version, now)
                self.store.do("INSERT INTO people VALUES (?, ?, ?, ?, ?, 'screening', '')", *fields)
                if self.study.screening is None:
                    self.passed(session, True)
            elif person.version != self.study.version:
                changed = "UPDATE people SET version = ?, consented = ? WHERE person = ?"
                self.store.do(changed, self.study.version, now, session)
                if person.part and person.part not in self.study.parts:
                    self.store.do("UPDATE people SET part = ? WHERE person = ?", self._part(person), session)

    def passed(self, session: str, right: bool) -> None:
        """Keeps how the screening ended. Whoever passes is assigned a part."""
        with self._lock:
            person = self.person(session)
            if person is None or person.state != "screening":
                return
            state, part = ("playing", self._part(person)) if right else ("refused", "")
            self.store.do("UPDATE people SET state = ?, part = ? WHERE person = ?", state, part, session)

    def _part(self, person: Person) -> str:
        every = Counter(row[0] for row in self.store.do("SELECT part FROM people WHERE part != ''"))
        rng = np.random.default_rng([self.study.seed, person.number])
        return pick(shares(self.study.parts, "parts"), {}, every, self.study.assignment, rng)

    def games(self, session: str) -> list[Played]:
        """All games of a person, in order."""
        rows = self.store.do(
            "SELECT a.game, a.number, a.version, a.part, a.condition, g.state FROM assigned a "
            "JOIN games g ON g.id = a.game WHERE a.person = ? ORDER BY a.number",
            session,
        )
        return [
            Played(game, number, version, part, condition, state, self.store.result(game))
            for game, number, version, part, condition, state in rows
        ]

    def assign(self, person: Person, opponents: Mapping[tuple[str, str], tuple[str, Mapping[str, Any]]]) -> Record:
        """Draws the condition of a person's next game. `opponents`: name and settings, by part and condition."""
        conditions = self.study.parts[person.part].conditions
        counted = (
            "SELECT a.condition FROM assigned a JOIN games g ON g.id = a.game WHERE a.part = ? AND g.state != 'stopped'"
        )
        with self._lock:
            every = Counter(row[0] for row in self.store.do(counted, person.part))
            mine = self.games(person.session)
            own = Counter(game.condition for game in mine if game.state != "stopped")
            rng = np.random.default_rng([self.study.seed, person.number, len(mine)])
            name = pick(shares(conditions, "conditions"), own, every, self.study.assignment, rng)
            opponent, env = opponents[person.part, name]
            seed = int(rng.integers(2**58)) if self.simulated else None  # a simulation can be repeated
            record = new_record(person.session, opponent, env, conditions[name].seat, seed)
            fields = (record.id, person.session, len(mine) + 1, self.study.version, person.part, name)
            self.store.do("INSERT INTO assigned VALUES (?, ?, ?, ?, ?, ?)", *fields)
        return record

    def take_back(self, game: str) -> None:
        """Forgets a game that could not be begun."""
        self.store.do("DELETE FROM assigned WHERE game = ?", game)

    def finish(self, session: str) -> None:
        self.store.do("UPDATE people SET state = 'finished' WHERE person = ? AND state = 'playing'", session)

    def session_of(self, code: str) -> str:
        """The session of the person with this code. UserError if there is none."""
        rows = self.store.do("SELECT person FROM people WHERE code = ?", code)
        if not rows:
            raise UserError(f"withdraw={code}: nobody in this study has this code. Look it up in people.csv.")
        return str(rows[0][0])

    def withdraw(self, session: str) -> list[str]:
        """Deletes everything of a person but the fact that somebody withdrew. Returns its games."""
        games = [game for (game,) in self.store.do("SELECT id FROM games WHERE person = ?", session)]
        named = "SELECT id FROM games WHERE person = ?"
        counted = (
            "INSERT INTO meta VALUES ('withdrawn', '1') "
            "ON CONFLICT (name) DO UPDATE SET value = CAST(value AS INTEGER) + 1"
        )
        self.store.do_all(
            (f"DELETE FROM replies WHERE game IN ({named})", (session,)),
            (f"DELETE FROM results WHERE game IN ({named})", (session,)),
            ("DELETE FROM assigned WHERE person = ?", (session,)),
            ("DELETE FROM games WHERE person = ?", (session,)),
            ("DELETE FROM people WHERE person = ?", (session,)),
            (counted, ()),
        )
        self.store.do("PRAGMA wal_checkpoint(TRUNCATE)")  # nothing of it stays in the log of changes
        return games

    def pay(self, person: Person) -> float:
        """All that a person has earned so far; taking part is paid with the first game."""
        games = self.games(person.session)
        paid = [self.as_of(game.version).pay_in(game.part).of(game.result) for game in games]
        took_part = any(game.result and game.result["how"] != "stopped" for game in games)
        return sum(paid) + (self.as_of(person.version).pay.taking_part if took_part else 0.0)

    def as_of(self, version: int) -> Study:
        """The study as it was in a version."""
        if version == self.study.version:
            return self.study
        rows = self.store.do("SELECT spec FROM studies WHERE name = ? AND version = ?", self.study.name, version)
        return from_json(rows[0][0])


def check_study(store: Store, name: str | None) -> None:
    """Raises UserError if the games there are of another study than this one; None: of any."""
    names = [row[0] for row in store.do("SELECT DISTINCT name FROM studies ORDER BY name")]
    if names and name not in names:
        raise UserError(
            f"The games there are of study {names[0]}. Serve it with its file as study, or give another out."
        )
    if name is not None and not names and store.do("SELECT 1 FROM games LIMIT 1"):
        raise UserError(f"The games there are of no study, so study {name} cannot go on with them. Give another out.")
