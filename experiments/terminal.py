"""What a person at the terminal sees while things run: a progress bar, and lines that stay."""

from __future__ import annotations

import sys

from tqdm import tqdm

from marl.monitor import Progress


def say(line: str) -> None:
    """A line that stays, above any progress bar."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()


class Bar(Progress):
    """One bar for the stage at hand; without a terminal there is none, and the lines tell how far things are."""

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled and sys.stderr.isatty()
        self._bar: tqdm | None = None

    def stage(self, name: str, total: int) -> None:
        self.close()
        self._bar = tqdm(total=total, desc=name, leave=False, disable=not self._enabled, dynamic_ncols=True)

    def advance(self, done: int = 1) -> None:
        if self._bar is not None:
            self._bar.update(done)

    def count(self, name: str, done: int, total: int) -> None:
        """The same for callers that count: `done` of `total` in the stage `name`."""
        if self._bar is None or done <= 1 or self._bar.total != total:
            self.stage(name, total)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
