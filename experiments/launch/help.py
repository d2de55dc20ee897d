"""A command's short help: what it does, its choices and settings, with the comments of their configuration files."""

from __future__ import annotations

import re
from pathlib import Path

LINES, WIDTH = 40, 120  # at most, of the whole
LISTED = 6  # choices of a group that are named
CHOICE = re.compile(r"  - ([\w/]+): (\w+|\?\?\?)(?:  # (.*))?$")  # of the defaults list
SETTING = re.compile(r"( *)(\w+): ?(.*?)(?:  # (.*))?$")


def short_help(module: str, about: str, config: Path) -> str:
    """The help of `python -m MODULE`, configured by the file `config`. `about`: what the command does."""
    lines = config.read_text(encoding="utf-8").splitlines()
    rows = choices_of(lines, config.parent), settings_of(lines)
    top = [about, *(f"  {line}" for line in comment_at(lines))]
    more = [
        f"All settings: python -m {module} --cfg job; of one choice: --cfg job --package env",
        f"What each does: {config.parent.name}/{config.name} and the files that it lists; experiments/README.md",
        "-m sweeps over KEY=A,B,C. Flags: --hydra-help",
    ]
    left = LINES - len(top) - len(more) - 2 - len(rows[0])
    shown = [*rows[0], *rows[1][:left]]
    column = min(max((len(name) for name, _ in shown), default=0), 36)
    table = [f"  {name:{column}}  {comment}" for name, comment in shown]
    return "\n".join(cut(line) for line in (*top, "", *table, "", *more))


def choices_of(lines: list[str], folder: Path) -> list[tuple[str, str]]:
    """Each group of the defaults list: its default, and what it is about, by its comment or that of its file."""
    found = []
    for line in lines:
        if match := CHOICE.match(line):
            group, default, comment = match.groups()
            names = sorted(path.stem for path in (folder / group).glob("*.yaml"))
            others = [name for name in names if name != default]
            if not comment and default in names:
                comment = " ".join(comment_at((folder / group / f"{default}.yaml").read_text("utf-8").splitlines())[:1])
            listed = ", ".join(others[:LISTED]) + (", ..." if len(others) > LISTED else "")
            found.append((f"{group}={default}", "; ".join(filter(None, (comment, listed and f"or {listed}")))))
    return found


def settings_of(lines: list[str]) -> list[tuple[str, str]]:
    """The settings of a file that have a comment, beside them or in the lines above."""
    found, group, above = [], "", ""
    for line in lines[next((i for i, line in enumerate(lines) if not line), 0) :]:
        if line.startswith("# "):
            above = f"{above} {line[2:]}".strip()
            continue
        match = SETTING.match(line)
        if match and len(match[1]) in (0, 2):
            indent, name, value, comment = match.groups()
            group = group if indent else name
            if value and (comment := comment or above):
                found.append((f"{group}.{name}={value}" if indent else f"{name}={value}", comment))
        above = ""
    return found


def comment_at(lines: list[str]) -> list[str]:
    """The comment that a file begins with, after what Hydra reads of it."""
    found = []
    for line in lines:
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            found.append(line[2:])
    return found


def cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3].rstrip() + "..."
