"""The queue of people who wait for a place in a game."""

import time

from marl.common.errors import UserError

GONE = 15.0  # seconds after which somebody counts as gone who has not asked again


class Full(UserError):
    """No place yet. `place`: in the queue, from 1."""

    def __init__(self, games: int, place: int) -> None:
        super().__init__(f"All {games} places are taken. You are number {place} in the queue.")
        self.place = place


class Queue:
    """First come, first served, as long as they keep asking."""

    def __init__(self) -> None:
        self._asked: dict[str, float] = {}  # when each last asked, in the order in which they came

    def admit(self, person: str, games: int, open_games: int) -> None:
        """Lets a person take one of the free places. Full where all are taken, or others wait for them."""
        now = time.monotonic()
        self._asked = {who: at for who, at in self._asked.items() if now - at < GONE}
        waiting, free = list(self._asked), games - open_games
        place = waiting.index(person) if person in waiting else len(waiting)
        if place < free:
            self._asked.pop(person, None)
            return
        self._asked[person] = now
        raise Full(games, place - max(free, 0) + 1)
