"""Fills pages of the site from the project itself: settings from the YAML's comments, metrics, published results."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "experiments" / "results"
SETTINGS, METRICS = "<!-- settings -->", "<!-- metrics -->"
# Groups in this order; others follow.
GROUPS = "env model base algo loss reward planner cicero chat tracker tuned pretrained ablation experiment sweep"


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages and figures of published results."""
    for path in sorted(RESULTS.rglob("*")):
        if path.suffix in (".md", ".svg", ".png"):
            place = Path("results") / path.relative_to(RESULTS)
            files.append(File.generated(config, str(place), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fills in the settings, and makes links of the site, where results lie beside the pages."""
    if page.file.src_uri.startswith("results/"):
        markdown = re.sub(r"\]\((?:\.\./){3}docs/", "](../../", markdown)
        return re.sub(
            r"\]\((?:\.\./){2,}(?:README|experiments|marl|envs|tests|conf)\b[^)]*\)", "](../../index.md)", markdown
        )
    markdown = re.sub(r"\]\(\.\./((?:\.\./)*)experiments/results/", r"](\1results/", markdown)
    for place, fill in ((SETTINGS, settings), (METRICS, metrics)):
        markdown = markdown.replace(place, fill()) if place in markdown else markdown
    return markdown


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuses what would be fetched from another host: the built site works without a network."""
    if found := re.search(
        r'<(?:script|img|iframe)[^>]* src="?(https?://[^" >]+)|<link[^>]*stylesheet[^>]* href="?(https?://[^" >]+)',
        output,
    ):
        raise PluginError(
            f"{page.file.src_uri} fetches {found[1] or found[2]} from another host. Put a copy into docs/."
        )
    return output


def settings() -> str:
    """Every configuration file, with its comments: they are the reference. Commands first, then groups of files."""
    conf = ROOT / "conf"
    first, *others = sorted(conf.glob("*.yaml"), key=lambda path: (path.stem != "train", path.stem))
    parts = [section("train", first), "## Other commands\n", *(section(path.stem, path) for path in others)]
    order = GROUPS.split()
    groups = sorted(
        {path.parent.name for path in conf.glob("*/*.yaml")},
        key=lambda name: (order.index(name) if name in order else len(order), name),
    )
    for group in groups:
        parts.append(f"## {group}\n")
        parts += [section(f"{group}={path.stem}", path) for path in sorted((conf / group).glob("*.yaml"))]
    return "\n".join(parts)


def metrics() -> str:
    """The metrics as tables and reports name them."""
    with (ROOT / "marl" / "metrics" / "wording.csv").open(encoding="utf-8", newline="") as file:
        rows = [f"| `{row['metric']}` | {row['label']} | {row['note']} |" for row in csv.DictReader(file)]
    return "\n".join(["| metric | called | which is |", "|---|---|---|", *rows])


def section(title: str, path: Path) -> str:
    """One file, under the override that chooses it."""
    return f"### `{title}`\n\n```yaml\n{path.read_text(encoding='utf-8').strip()}\n```\n"
