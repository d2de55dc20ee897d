"""The templates of pages, and one game as a page of its own for notebooks. All text is escaped."""

from base64 import b64encode
from hashlib import sha256
from html import escape
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from marl.report.diplomacy import shown_view
from marl.report.transcripts import Transcript

TEMPLATES = Path(__file__).parent / "templates"


def templates(*folders: Path) -> Environment:
    """Makes the template engine. It searches these folders, then the report's own."""
    loader = FileSystemLoader([*folders, TEMPLATES])
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def report_script() -> tuple[str, str]:
    """Returns the script of reports, and its SHA-256 in base64, by which a content security policy allows it."""
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    return script, b64encode(sha256(script.encode()).digest()).decode()


def episode_html(transcript: Transcript) -> str:
    """Renders a game as in a report, in a frame, so that its style stays its own."""
    page = templates().get_template("game.html").render(game=shown_view(transcript))
    return f'<iframe title="one game" srcdoc="{escape(page)}" style="width:100%;height:30rem;border:0"></iframe>'
