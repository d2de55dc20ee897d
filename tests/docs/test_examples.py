"""Python code of the pages runs, and the terms that they show can be trained with."""

import re
import sys
from pathlib import Path

import pytest
import torch

from marl.losses import returned
from marl.rewards import add_rewards
from tests.marl.batches import made
from tests.marl.episodes import discussion

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r'^```python(?: title="(?P<title>[^"]+)")?\n(?P<code>.*?)^```', re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str | None, str]]:
    """Python code blocks of a page, each with the file name that it is shown under."""
    return [(found["title"], found["code"]) for found in BLOCK.finditer(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for title, code in blocks(page):
        if title:
            (tmp_path / title).write_text(code)
            exec(f"import {Path(title).stem}", {})
            sys.modules.pop(Path(title).stem)
        else:
            exec(code, {"__name__": "__page__"})
