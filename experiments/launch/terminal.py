"""The terminal while things run: a progress bar, and lines that stay."""

import io
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO

from tqdm import tqdm

from marl.common.progress import Progress

STDOUT, STDERR = 1, 2  # file descriptors


@contextmanager
def ignoring_broken_pipe(stream: int) -> Iterator[None]:
    """Keeps a run going after its reader has left, as in `... | head -1`. What is written goes nowhere then."""
    try:
        yield
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream)  # for what is in the buffer too, which Python writes at its end
        os.close(nowhere)


def say(line: str) -> None:
    """Writes a line that stays, above any progress bar. Escapes halves of surrogate pairs: no terminal shows them."""
    with ignoring_broken_pipe(STDOUT):
        tqdm.write(line.encode(errors="backslashreplace").decode(), file=sys.stdout)
        sys.stdout.flush()


@contextmanager
def quiet() -> Iterator[None]:
    """Silences what is said, but for errors."""
    with redirect_stdout(io.StringIO()):
        yield


@contextmanager
def labelled(label: str) -> Iterator[None]:
    """Begins each line on the terminal with the label, and shows no bar: for jobs that share a terminal."""
    if not label:
        yield
        return
    out, err = Labelled(label, sys.stdout), Labelled(label, sys.stderr)
    with out, err, redirect_stdout(out), redirect_stderr(err):
        yield


class Labelled(io.TextIOBase):
    """Stream that passes whole lines on, each behind the label. What is written at once stays together."""

    def __init__(self, label: str, stream: TextIO) -> None:
        self._label, self._stream, self._line = label, stream, ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        if lines:
            self._stream.write("".join(f"{self._label} | {line}".rstrip() + "\n" for line in lines))
            self._stream.flush()
        return len(text)

    def close(self) -> None:
        """Ends a line that was begun. More may be written: a log keeps the stream that it was given."""
        if self._line:
            self.write("\n")


class Bar(Progress):
    """Progress bar of the current stage. Without a terminal it is a line now and then in a long stage."""

    EVERY = 20.0  # seconds between such lines
    STILL = 60.0  # the same while nothing is done: a game between larger models takes minutes

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled
        self._bar: tqdm | None = None
        self._name, self._done, self._total = "", 0, 0
        self._reported_at, self._reported = time.monotonic(), 0

    def stage(self, name: str, total: int) -> None:
        self.close()
        self._name, self._done, self._total = name, 0, total
        self._reported_at, self._reported = time.monotonic(), 0
        if self._enabled and sys.stderr.isatty():
            with ignoring_broken_pipe(STDERR):
                # Its clock goes on while nothing is done, and its speed is the average since the start.
                self._bar = tqdm(total=total, desc=name, leave=False, dynamic_ncols=True, miniters=0, smoothing=0)

    def advance(self, done: int = 1) -> None:
        self._done += done
        if self._bar is not None:
            with ignoring_broken_pipe(STDERR):
                self._bar.update(done)
            return
        now = time.monotonic()
        if self._enabled and now - self._reported_at >= (self.EVERY if self._done > self._reported else self.STILL):
            self._reported_at, self._reported = now, self._done
            say(f"{self._name}: {self._done} of {self._total}")

    def count(self, name: str, done: int, total: int) -> None:
        """Shows `done` of `total` in the stage `name`, for callers that count."""
        if done <= 1 or (self._name, self._total) != (name, total):
            self.stage(name, total)
        self.advance(done - self._done)

    def close(self) -> None:
        if self._bar is not None:
            with ignoring_broken_pipe(STDERR):
                self._bar.close()
            self._bar = None


def say_error(sentence: str) -> None:
    with ignoring_broken_pipe(STDERR):
        print(sentence, file=sys.stderr, flush=True)
