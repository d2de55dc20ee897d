"""One page on all measures of talk: sentences, a figure and a table."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from marl.metrics.influence import KINDS, Effect, of_messages
from marl.metrics.stats import Metrics
from marl.metrics.wording import number, wording
from marl.report.figures import PAPER, to_svg
from marl.report.html import templates
from marl.report.transcripts import episode_to_json
from marl.report.views import Transcript
from marl.types import Episode

NATS = {"talk/prior": "to be said", "talk/said": "said", "talk/heard": "heard"}
CLAIMS = {
    "talk/claim/prior": "best without talk", "talk/claim/made": "claim made",
    "talk/claim/believed": "best by own belief", "talk/claim/exact": "best by what was said",
}  # fmt: skip
INFLUENCE = {f"talk/influence/{kind}": kind.replace("_", " ") for kind in KINDS}
TRUTH = {
    "talk/true_claims": "claims that are true", "talk/true_chance": "by chance",
    "talk/lie_auroc": "lies seen in the state", "talk/password": "roles told by form",
}  # fmt: skip


def with_effects(episodes: Sequence[Episode], effects: Sequence[Effect]) -> list[Transcript]:
    """Writes games as transcripts, with the effect of each message that has one."""
    transcripts = [episode_to_json(episode) for episode in episodes]
    for (game, turn), effect in of_messages(effects).items():
        transcripts[game]["turns"][turn]["effect"] = {name: round(value, 4) for name, value in effect.items()}
    return transcripts


def talk_sentences(found: Mapping[str, Metrics]) -> list[str]:
    """The measures in words, one paragraph a player."""

    def mean(metric: str, decimals: int = 2) -> str:
        return f"{round(own[metric].mean, decimals) + 0.0:.{decimals}f}"  # never -0.00

    paragraphs = []
    for player, own in found.items():
        parts = []
        if "talk/said" in own:
            witness, said = "talk/meant_right" in own, mean("talk/said")
            whose = "about whom it saw kill, a witness's message" if witness else "to be said, messages"
            gave = f"nothing ({said})" if said.startswith("-") else said
            heard = mean("talk/heard") if "talk/heard" in own else ""
            took = f", and listeners took {heard}" if heard else ""
            if heard.startswith("-"):
                took = f", and listeners took nothing: their beliefs were {heard[1:]} worse than a guess"
            parts.append(f"Of {mean('talk/prior')} nats {whose} gave away {gave}{took}.")
        if "talk/claim/exact" in own:
            made, best = mean("talk/claim/made", 1), mean("talk/claim/exact", 1)
            parts.append(f"Claims were worth {made} points, of {best} at best.")
        if "talk/influence/silence" in own:
            parts.append(
                f"A message moved beliefs by {mean('talk/influence/silence', 3)} beside silence, and by "
                f"{mean('talk/influence/resampled', 3)} beside what its author might have said."
            )
        if "talk/vote_credit/silence" in own:
            percent = round(100 * own["talk/vote_credit/silence"].mean, 1)
            won = "won" if percent >= 0 else "lost"
            parts.append(f"It {won} {abs(percent):.1f} points of a listener's vote for the imposter, beside silence.")
        if "talk/true_claims" in own:
            parts.append(f"{own['talk/true_claims'].mean:.0%} of the claims that can be checked were true.")
        paragraphs.append(" ".join([f"{player}:", *parts]))
    return paragraphs


def talk_figure(found: Mapping[str, Metrics], game: str) -> Figure:
    """Panels of bars, one bar a measure and player: nats and points, or nats, influence and truth."""
    panels = (
        [(NATS, "nats about the speaker's values", 0.0), (CLAIMS, "points of the listener's score", None)]
        if game == "dond"
        else [
            (NATS, "nats about the killer, of witnesses", 0.0),
            (INFLUENCE, "change of belief, in place of the message", 0.0),
            (TRUTH, "share", 0.0),
        ]
    )
    figure = Figure(figsize=(4.2 * len(panels), 1.2 + 0.62 * len(found) + 1.0), layout="constrained")
    for axes, (measures, unit, least) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        _bars(axes, found, measures, unit, least)
    return figure


def _bars(
    axes: Axes, found: Mapping[str, Metrics], measures: Mapping[str, str], unit: str, least: float | None
) -> None:
    shown = {metric: label for metric, label in measures.items() if any(metric in own for own in found.values())}
    height = 0.8 / len(found)
    means: list[float] = []
    for i, (player, own) in enumerate(found.items()):
        for row, metric in enumerate(shown):
            if metric not in own:
                continue
            at, value = row + (i - (len(found) - 1) / 2) * height, own[metric]
            means.append(value.mean)
            axes.barh(at, value.mean, height * 0.9, color=PAPER[i % len(PAPER)], label=player if row == 0 else None)
            axes.plot([value.low, value.high], [at, at], color="#333333", linewidth=1.2)
            axes.text(max(value.mean, value.high, 0.0), at, f" {number(value.mean)}", va="center", fontsize=8)
    axes.set_yticks(range(len(shown)), list(shown.values()))
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    if least is None and means:  # scores that differ little: from near the least on
        axes.set_xlim(left=min(means) - 0.5 * (max(means) - min(means)) - 0.1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.15)
    if len(shown):
        axes.legend(fontsize=8, frameon=False, loc="best")


def talk_page(found: Mapping[str, Metrics], game: str, games: Mapping[str, str] | None = None) -> str:
    """A page with the sentences, the figure, all measures, and a game of each player as text. All text is escaped."""
    figure = talk_figure(found, game)
    names = list(dict.fromkeys(metric for own in found.values() for metric in own))
    rows = [
        (wording(name).label, wording(name).note, name, [own.get(name) for own in found.values()]) for name in names
    ]
    return templates().get_template("talk.html").render(
        players=list(found), sentences=talk_sentences(found), rows=rows, games=games or {},
        figure=to_svg(figure, "talk", "What was said, heard and done"),
    )  # fmt: skip
