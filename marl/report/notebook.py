"""One game as a piece of HTML, for notebooks: messages, what they did to beliefs, actions folded away.

All text is escaped. Nothing is fetched and no script runs.
"""

from __future__ import annotations

from html import escape

from marl.report.transcripts import Transcript
from marl.report.views import Shift, is_among_us, outcome_text, printable, said, shifts

STYLE = (
    "<style>.lg{font:14px/1.5 system-ui,sans-serif;max-width:46rem}.lg .turn{margin:.5rem 0}.lg small{opacity:.7}"
    ".lg .bar{display:inline-block;position:relative;width:6rem;height:.6rem;margin:0 .4rem;background:#8884;"
    "border-radius:3px;vertical-align:middle}.lg .bar i{position:absolute;left:0;top:0;bottom:0;border-radius:3px}"
    ".lg .bar u{position:absolute;top:-2px;bottom:-2px;width:2px;background:currentColor}"
    ".lg .up{background:#2a9d5c}.lg .down{background:#d1495b}.lg .flat{background:#888}</style>"
)


def episode_html(transcript: Transcript) -> str:
    """Renders a game: each message with one bar a listener and question (filled: belief in the truth after it, line:
    before it), and between messages how many other actions there were."""
    names = transcript["facts"]["names"] if is_among_us(transcript) else {}
    parts, quiet = [], 0
    for turn in transcript["turns"]:
        if not turn["message"] and is_among_us(transcript):
            quiet += 1
            continue
        if quiet:
            parts.append(f"<small>{quiet} moves and votes</small>")
            quiet = 0
        bars = "".join(
            _bar(names.get(shift.listener) or f"{shift.listener}: {shift.question}", shift)
            for shift in shifts(transcript, turn)
        )
        who = names.get(turn["agent"], turn["agent"])
        role = f" ({turn['role']})" if names else ""
        refused = f" <small>refused: {escape(printable(turn['error']))}</small>" if turn["error"] else ""
        text = escape(printable(said(turn)))
        parts.append(f'<div class="turn"><b>{escape(who)}</b>{escape(role)}: {text}{refused}{bars}</div>')
    parts.append(f"<p><b>{escape(outcome_text(transcript))}</b></p>")
    return f'{STYLE}<div class="lg">{"".join(parts)}</div>'


def _bar(label: str, shift: Shift) -> str:
    tone = "flat" if abs(shift.after - shift.before) < 0.005 else "up" if shift.after > shift.before else "down"
    return (
        f'<div><small>{escape(label)}</small><span class="bar" role="img" aria-label="belief in the truth '
        f'{shift.before:.2f} to {shift.after:.2f}"><i class="{tone}" style="width:{100 * shift.after:.0f}%"></i>'
        f'<u style="left:{100 * shift.before:.0f}%"></u></span>'
        f"<small>{shift.before:.2f} → {shift.after:.2f}</small></div>"
    )
