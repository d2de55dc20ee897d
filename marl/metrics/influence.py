"""Measures what a message did to those who heard it, beside other messages in its place.

At a message, with the talk before it as it was, every listener hears another message and is asked again
(`rollout/resampling.py`). The other message is one of

    silence      none
    other_game   what the same player said at a like place of another game
    other_name   the same words about another player (Among Us)
    resampled    what its author draws again: `draws` of them, whose results are averaged

Influence is the distance of listeners' beliefs after the message and after the other, in total variation (0 to 1).
Credit is belief in the truth after the message minus after the other: against `resampled` it is what this message did
beyond what its author would have done otherwise. In Among Us the same of listeners' votes, which are expected and not
drawn: after the other message all say what they said then, up to the vote. Left out: votes beside `resampled`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from marl.agents.base import Agent
from marl.common.errors import UserError
from marl.metrics.among_us import NAME
from marl.metrics.stats import Metrics, bootstrap_mean
from marl.rollout.resampling import VOTE, resample
from marl.types import INSIDERS, Belief, Episode, Turn

SILENCE, OTHER_GAME, OTHER_NAME, RESAMPLED = KINDS = ("silence", "other_game", "other_name", "resampled")
DRAWS = 4


@dataclass(frozen=True)
class Effect:
    """The effect of one message on one listener, beside another message."""

    game: int  # index of the episode
    turn: int  # index of the message's turn
    listener: str
    kind: str  # one of KINDS
    influence: float  # total variation between the listener's beliefs
    credit: float  # difference of its belief in the truth
    vote: bool = False  # whether both are of its vote


def compared(
    episodes: Sequence[Episode],
    make_env: Callable[[], Any],
    agents: Mapping[str, Agent],
    speakers: Collection[str],
    draws: int = DRAWS,
) -> tuple[list[Episode], list[Effect]]:
    """Measures every message of these players (names in `Episode.players`). Needs the episodes' streams.

    Returns the episodes with `Turn.otherwise`, what the speakers might have said, and the effects. Who is not asked
    after the other message believes what it did before. Votes are left out where the other message would have changed
    who is on turn before the vote.
    """
    if not any(episode.streams for episode in episodes):
        raise UserError("These games were recorded without their streams. Play them again to measure influence.")
    others = _others(episodes, speakers)
    texts = {at: tuple(by_kind.values()) for at, by_kind in others.items()}
    votes = any(turn.truths for episode in episodes for turn in episode.turns)
    heard = resample(
        episodes, make_env, agents, speakers, draws, lambda game, turn: texts.get((game, turn), ()), True, votes
    )
    found = []
    for game, episode in enumerate(heard):
        for number, turn in enumerate(episode.turns):
            if not turn.instead:
                continue
            kinds = [*[RESAMPLED] * draws, *others.get((game, number), ())]
            for after in episode.beliefs:
                hears = after.step == turn.step + 1 and after.listener != turn.agent
                if hears and after.role not in INSIDERS:
                    found += _beside(game, number, episode, turn, after, kinds)
            if votes:
                found += _of_votes(game, number, turn, kinds)
    return heard, found


def of_messages(found: Sequence[Effect]) -> dict[tuple[int, int], dict[str, float]]:
    """Means over listeners of `influence/KIND`, `credit/KIND` and `vote_credit/KIND`, by game and turn."""
    values: dict[tuple[int, int], dict[str, list[float]]] = {}
    for each in found:
        own = values.setdefault((each.game, each.turn), {})
        own.setdefault(f"vote_credit/{each.kind}" if each.vote else f"credit/{each.kind}", []).append(each.credit)
        if not each.vote:
            own.setdefault(f"influence/{each.kind}", []).append(each.influence)
    return {at: {name: float(np.mean(each)) for name, each in own.items()} for at, own in values.items()}


def _beside(game: int, number: int, episode: Episode, turn: Turn, after: Belief, kinds: Sequence[str]) -> list[Effect]:
    """The effects on one listener's answer; those of the draws are averaged."""
    earlier = [b for b in episode.beliefs if b.asked == after.asked and b.step <= turn.step]
    before = earlier[-1] if earlier else None
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for kind, answers in zip(kinds, turn.instead, strict=False):  # the message itself may stand behind
        instead = next((b for b in answers if b.asked == after.asked), before)
        if instead is not None and instead.question.candidates == after.question.candidates:
            distance = float(np.abs(after.probs - instead.probs).sum() / 2)
            by_kind.setdefault(kind, []).append((distance, after.truth - instead.truth))
    means = {kind: np.mean(values, axis=0) for kind, values in by_kind.items()}
    return [Effect(game, number, after.listener, kind, float(d), float(c)) for kind, (d, c) in means.items()]


def _of_votes(game: int, number: int, turn: Turn, kinds: Sequence[str]) -> list[Effect]:
    """The effects on the listeners' votes, beside those after the message itself, the last of `turn.instead`."""
    found = []
    *others, said = [{b.listener: b for b in each if b.question.text == VOTE} for each in turn.instead]
    for kind, votes in zip(kinds, others, strict=True):
        for listener, after in said.items():
            instead = votes.get(listener)
            if listener != turn.agent and instead and instead.question.candidates == after.question.candidates:
                distance = float(np.abs(after.probs - instead.probs).sum() / 2)
                found.append(Effect(game, number, listener, kind, distance, after.truth - instead.truth, vote=True))
    return found


def _others(episodes: Sequence[Episode], speakers: Collection[str]) -> dict[tuple[int, int], dict[str, str]]:
    """Other replies for each message, as text, by kind."""
    said = [
        (game, number, turn)
        for game, episode in enumerate(episodes)
        for number, turn in enumerate(episode.turns)
        if turn.message and turn.message in turn.text and episode.players[turn.agent] in speakers
    ]
    found: dict[tuple[int, int], dict[str, str]] = {}
    for i, (game, number, turn) in enumerate(said):
        replies = {SILENCE: turn.text.replace(turn.message, "", 1)}
        later = (*said[i + 1 :], *said[:i])
        elsewhere = next((t for g, _, t in later if g != game and t.role == turn.role), None)
        if elsewhere:
            replies[OTHER_GAME] = elsewhere.text
        if renamed := _renamed(episodes[game], turn):
            replies[OTHER_NAME] = turn.text.replace(turn.message, renamed, 1)
        found[game, number] = replies
    return found


def _renamed(episode: Episode, turn: Turn) -> str:
    """The message about another player than the first whom it names; empty if it names nobody or nobody is left."""
    names = episode.facts.get("names", {})
    match = NAME.search(turn.message)
    asked = next((b for b in episode.beliefs if b.step == turn.step + 1 and b.listener != turn.agent), None)
    if match is None or asked is None or turn.agent not in names:
        return ""
    taken = {match[0].lower(), names[turn.agent].lower()}
    left = [name for name in asked.question.candidates if name.lower() not in taken and NAME.fullmatch(name)]
    if not left:
        return ""
    other = left[(episode.seed + turn.step) % len(left)]
    other = other if match[0][:1].isupper() else other.lower()
    return turn.message.replace(match[0], other)


def influence_metrics(found: Sequence[Effect], rng: np.random.Generator) -> Metrics:
    """`talk/influence/KIND` and `talk/credit/KIND`, in means over messages and listeners, intervals over games.

    `talk/vote/KIND` and `talk/vote_credit/KIND`: the same of votes. `talk/influence`: beside silence.
    """
    metrics = {}
    for vote, kind in product((False, True), KINDS):
        those = [effect for effect in found if (effect.vote, effect.kind) == (vote, kind)]
        games = [effect.game for effect in those]
        influence, credit = ("talk/vote", "talk/vote_credit") if vote else ("talk/influence", "talk/credit")
        if those:
            metrics[f"{influence}/{kind}"] = bootstrap_mean([e.influence for e in those], games, rng=rng)
            metrics[f"{credit}/{kind}"] = bootstrap_mean([e.credit for e in those], games, rng=rng)
    if f"talk/influence/{SILENCE}" in metrics:
        metrics["talk/influence"] = metrics[f"talk/influence/{SILENCE}"]
    return metrics
