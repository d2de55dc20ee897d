"""Tables and examples in the terminal."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.launch.terminal import say
from marl.agents.chat import ChatAgent
from marl.metrics.stats import Metrics
from marl.metrics.tables import format_table
from marl.metrics.wording import of_ones_own, shown_in
from marl.report.views import Transcript, render_text
from marl.rollout.seeds import Game


def rows_of(conditions: Mapping[str, Metrics]) -> list[str]:
    """The metrics of the table: the headline's, then what terms and games of one's own bring."""
    known = [name for name in shown_in("screen") if any(name in found for found in conditions.values())]
    return [*known, *of_ones_own(name for found in conditions.values() for name in found)]


def show(conditions: Mapping[str, Metrics], transcripts: Mapping[str, Transcript], report: Path | None = None) -> None:
    """The last screen: the table, a transcript of each condition, where the report is."""
    names = rows_of(conditions)
    for label, transcript in transcripts.items():
        say(f"\n── {label}, game {transcript['seed']} " + "─" * 40)
        say(render_text(transcript))
    say("")
    say(format_table({label: dict(found) for label, found in conditions.items()}, names))
    for label, found in conditions.items():
        if "errors/outgrown" in found and (share := found["errors/outgrown"].mean):
            say(
                f"warning: {label}: in {share:.1%} of the games a model's context was full, and its later replies were "
                "empty. Raise model.context (with a run as a player algo.context), or shorten the game."
            )
    if report is not None:
        say(f"\nreport: {report}")


def by_message_table(entries: Sequence[Metrics]) -> str:
    """Belief by the number of messages heard, beside the exact prior's, as a text table."""
    names = ("log_loss", "prior_log_loss", "brier", "prior_brier", "accuracy", "prior_accuracy")
    rows = {str(k): {n: entry[n] for n in names if n in entry} for k, entry in enumerate(entries[:7])}
    return format_table(rows, [name for name in names if any(name in row for row in rows.values())])


def chat_figures(chat: ChatAgent, games: Sequence[Game]) -> dict[str, Any]:
    """Tells what the endpoint was asked for, and which seats it lost."""
    lost = [
        {"game": number, "seed": games[number].seed, "agent": agent, "reason": reason.value}
        for (number, agent), reason in sorted(chat.lost)
    ]
    return {**chat.figures(), "lost_seats": lost}
