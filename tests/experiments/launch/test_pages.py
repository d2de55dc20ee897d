"""Pages of the documentation: their commands and settings exist, links lead somewhere, published intervals are
possible."""

import re
import shlex
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from experiments.launch import command as cli
from experiments.launch.overrides import Plan
from marl.metrics.tables import TableRow, read_table
from marl.metrics.wording import bounds

ROOT = Path(__file__).parents[3]
FIRST = [ROOT / "README.md", ROOT / "docs/howto/commands.md"]
OTHERS = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "experiments").rglob("*.md"), ROOT / "CONTRIBUTING.md"]
PAGES = [*FIRST, *sorted({*OTHERS} - {*FIRST})]


def code(text: str) -> list[str]:
    """The code spans of a page, and the lines of its code blocks."""
    spans = re.findall(r"(`+)(.+?)\1", text.replace("\\\n", " "), re.S)
    lines = [line for tick, body in spans for line in ([body] if tick == "`" else body.splitlines())]
    return [re.sub(r"\s+#.*", "", " ".join(line.split())) for line in lines]


def commands(text: str) -> list[str]:
    found = [line[line.index("-m experiments.") + 3 :] for line in code(text) if "-m experiments." in line]
    # The last two choose files that their pages add.
    made_up = ("experiments.NAME", "experiments.train env=colour", "experiments.train sweep=mine")
    return [command for command in dict.fromkeys(found) if not command.startswith(made_up)]


def settings(text: str) -> list[str]:
    """Overrides that tables list in their first column; `KEY=ONE`, `TWO` stands for KEY=ONE and KEY=TWO."""
    found: list[str] = []
    for row in (line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")):
        key = ""
        for span in code(row):
            if "=" in span or span.startswith("~"):
                found.append(span)
                key = span.partition("=")[0]
            elif key:
                found.append(f"{key}={span}")
    return [setting for setting in found if "-m experiments." not in setting]


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], bool]:
    """Says whether a command line would have been run."""
    ran: list[Plan] = []

    def launch(task: object, plan: Plan) -> list[object]:
        ran.append(plan)
        return []

    monkeypatch.setattr(cli, "launch", launch)

    def typed(command: str) -> bool:
        ran.clear()
        module, *arguments = shlex.split(command)
        monkeypatch.setattr(sys, "argv", [module, *(a for a in arguments if a != "...")])
        import_module(module).main()
        return len(ran) == 1

    return typed


@pytest.mark.parametrize(
    "page",
    [page if page == FIRST[0] else pytest.param(page, marks=pytest.mark.slow) for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_command_of_a_page_is_one(
    page: Path, accepted: Callable[[str], bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = page.read_text()
    for name, module in re.findall(r'```python title="(\w+\.py)"\n(.*?)```', text, re.S):  # which commands may name
        (tmp_path / name).write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    for command in commands(text):
        assert accepted(command), command


@pytest.mark.slow
def test_every_listed_setting_is_one(accepted: Callable[[str], bool]) -> None:
    listed = [setting for page in FIRST for setting in settings(page.read_text())]
    assert len(listed) > 40
    together: list[dict[str, str]] = []  # settings of different parts, to be tried at once
    for setting in dict.fromkeys(listed):
        setting = f"env=among_us {setting}" if "imposter" in setting and "env=" not in setting else setting
        setting = f"env=dond {setting}" if "negotiator" in setting and "env=" not in setting else setting
        parts = set(re.findall(r"(?:^|\s)~?(\w+)", setting))
        parts |= {"env"} if parts & {"experiment", "sweep"} else set()  # which choose a game
        parts |= {"algo"} if "loss" in parts else set()  # which says what losses there are
        room = next((line for line in together if not parts & line.keys()), None)
        if room is None:
            together.append(room := {})
        room |= dict.fromkeys(parts, setting)
    for line in together:
        flag = "-m" if "hydra" in line else ""
        own = "" if "arm" in line else "arm=mine"  # settings that nobody would give with that ablation
        typed = f"experiments.train {flag} {' '.join(dict.fromkeys(line.values()))} {own}"
        assert accepted(typed), typed


def test_the_front_page_is_short() -> None:
    assert len(FIRST[0].read_text().splitlines()) <= 120


def test_every_figure_has_an_alternative_text() -> None:
    for page in PAGES:
        text = page.read_text()
        for alt in [*re.findall(r"!\[([^\]]*)\]\(", text), *re.findall(r"<img(?![^>]*alt=\"([^\"]+))", text)]:
            assert len(alt.split()) > 5, f"{page.relative_to(ROOT)}: {alt}"


def test_links_lead_to_files_and_headings() -> None:
    for page in PAGES:
        for link, heading in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
            there = page.parent / link if link else page
            assert there.exists(), f"{page.relative_to(ROOT)}: {link}"
            if heading and "reference" not in there.parts:  # those headings are made when the site is built
                assert heading in headings(there), f"{page.relative_to(ROOT)}: {link}#{heading}"


def headings(page: Path) -> set[str]:
    """Headings of a page as links name them: lower case, words joined by hyphens, no punctuation."""
    page = page / "README.md" if page.is_dir() else page
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_published_intervals_hold_what_the_metric_can_be() -> None:
    """No share below 0 or above 1, no log-loss or count below 0; each mean within its interval.

    A row of the arm `A - B` is a difference: of shares it lies between -1 and 1.
    """
    tables = sorted((ROOT / "experiments").rglob("table*.csv"))
    rows = [(path, row) for path in tables for row in read_table(path)]
    assert len(rows) > 1000
    wrong = [
        (path.parent.name, path.name, row.arm, row.metric)
        for path, row in rows
        if not possible(row)[0] <= row.low <= row.mean <= row.high <= possible(row)[1]
    ]
    assert wrong == []


def possible(row: TableRow) -> tuple[float, float]:
    """The least and the greatest mean that the row can have."""
    low, high = bounds(row.metric)
    return (low - high, high - low) if " - " in row.arm else (low, high)
