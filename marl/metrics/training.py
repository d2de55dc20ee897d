"""Figures logged in every training iteration: plain means over its episodes, and speed. And the progress interface."""

from collections.abc import Collection, Sequence

import numpy as np

from envs.core import TurnKind
from marl.metrics.among_us import of_among_us, read_game
from marl.metrics.negotiation import inverted_figures
from marl.types import INSIDERS, Episode

VOCABULARY_GAMES = 500  # vocabulary grows with the games counted, so their number is fixed
RESAMPLED = "rollout/resampled_tokens"  # that drawing and hearing other messages took, in token passes


def episode_metrics(episodes: Sequence[Episode], players: Collection[str]) -> dict[str, float]:
    """Means of rewards, game, talk and belief over these players' seats, named as in the evaluation."""
    own = [(e, a) for e in episodes for a, player in e.players.items() if player in players]
    turns = [t for e in episodes for t in e.turns if e.players[t.agent] in players]
    metrics: dict[str, float] = {}
    for name in sorted({name for t in turns for name in t.rewards}):
        metrics[f"reward/{name}"] = _mean([t.rewards[name] for t in turns if name in t.rewards])
    scores = [e.paid(a) for e, a in own]
    if own:  # a rare partner may have no seat in these games
        metrics["game/score"] = _mean(scores)
    first = episodes[0].outcome
    if {"deal", "points", "pareto"} <= first.keys():
        if own:
            metrics["game/score_sd"] = float(np.std(scores))  # of a player's score, over games and players
            metrics["game/points"] = _mean([e.outcome["points"][a] for e, a in own])
        metrics["game/agreement"] = _mean([e.outcome["deal"] for e in episodes])
        metrics["game/pareto"] = _mean([e.outcome["pareto"] for e in episodes])
        metrics["errors/aborted"] = _mean([e.outcome.get("how") == "abort" for e in episodes])
        agreed = [e for e in episodes if e.outcome["deal"]]
        if agreed:
            of_agreed = [score for score, (e, _) in zip(scores, own, strict=True) if e.outcome["deal"]]
            if of_agreed:
                metrics["game/score_agreed"] = _mean(of_agreed)
                metrics["game/score_agreed_sd"] = float(np.std(of_agreed))
            metrics["game/pareto_agreed"] = _mean([e.outcome["pareto"] for e in agreed])
        if "counts" in episodes[0].facts:
            metrics |= inverted_figures(episodes, players)
    if of_among_us(episodes[0].facts):
        metrics["game/win_rate/crewmates"] = _mean([e.outcome["winner"] == "crewmates" for e in episodes])
        metrics |= _crew_metrics(episodes, players)
    else:
        for winner in winners(episodes):
            metrics[f"game/win_rate/{winner}"] = _mean([e.outcome.get("winner") == winner for e in episodes])
    taken = [t for t in turns if not t.error]
    spoken = [t for t in taken if t.kind == TurnKind.SPEAK]
    metrics["talk/turns"] = len(spoken) / len(episodes)
    metrics["talk/tokens_per_turn"] = _mean([len(t.reply_ids) for t in spoken if t.reply_ids])
    metrics["talk/cut"] = _mean([t.cut for t in spoken])
    early = [t for e in episodes[:VOCABULARY_GAMES] for t in e.turns if e.players[t.agent] in players and not t.error]
    metrics["talk/vocabulary"] = len({word for t in early for word in t.message.split()})
    refused, over = np.array([tries(e, players) for e in episodes]).sum(0)
    metrics["errors/per_turn"] = float(refused / max(over, 1))
    if any(outgrown := [e.outgrown for e in episodes]):
        metrics["errors/outgrown"] = _mean(outgrown)
    metrics["rollout/games"] = len(episodes)
    metrics["rollout/tokens"] = sum(len(s) for e in episodes for s in e.streams.values())
    plans = [t.planned for t in turns if t.planned]
    if plans:
        metrics["plan/floored"] = _mean([planned.floored for planned in plans])
    chosen = [t.logprobs[0] for t in taken if t.kind == TurnKind.CHOOSE and t.logprobs]
    if chosen:
        metrics["choices/entropy"] = -_mean(chosen)  # nats; of what was sampled, so its mean is the entropy
    beliefs = [b for e in episodes for b in e.beliefs if e.players[b.listener] in players and b.role not in INSIDERS]
    if beliefs:
        metrics["belief/accuracy"] = _mean(
            [int(b.probs.argmax()) in (b.question.answer_index, *b.question.also_indices) for b in beliefs]
        )
        metrics["belief/log_loss"] = _mean([-np.log(max(b.truth, 1e-12)) for b in beliefs])
        metrics["belief/brier"] = _mean(
            [float(((b.pooled - np.eye(len(b.probs))[b.question.answer_index]) ** 2).sum()) for b in beliefs]
        )
    return metrics


def winners(episodes: Sequence[Episode]) -> list[str]:
    """The winners of any of these games, by the game's own names."""
    return sorted({str(e.outcome["winner"]) for e in episodes if e.outcome.get("winner") is not None})


def _crew_metrics(episodes: Sequence[Episode], players: Collection[str]) -> dict[str, float]:
    """Crewmates among these players: votes for an imposter, votes of witnesses, messages naming an imposter."""
    found: dict[str, list[bool]] = {"vote/imposter": [], "vote/witness": [], "talk/names_imposter": []}
    for episode in episodes:
        record = read_game(episode)
        crew = {a for a, role in episode.roles.items() if role not in INSIDERS and episode.players[a] in players}
        votes = [vote for vote in record.votes if vote.turn.agent in crew]
        found["vote/imposter"] += [vote.right for vote in votes]
        found["vote/witness"] += [bool(vote.seen) for vote in votes]
        found["talk/names_imposter"] += [m.meets(m.named) for m in record.messages if m.turn.agent in crew]
    return {name: _mean(flags) for name, flags in found.items() if flags}


def tries(episode: Episode, players: Collection[str] | None = None) -> tuple[int, int]:
    """Counts refused replies and turns of these players (None: all).

    A spoken turn ends with an accepted reply or with the game. A refused choice is not tried again: it is a turn.
    """
    mine = [turn for turn in episode.turns if players is None or episode.players[turn.agent] in players]
    # An aborted game ends with a turn that was never accepted.
    last = mine[-1] if mine and mine[-1] is episode.turns[-1] else None
    unfinished = last is not None and last.kind == TurnKind.SPEAK and bool(last.error)
    ended = sum(not turn.error or turn.kind == TurnKind.CHOOSE for turn in mine)
    return sum(bool(turn.error) for turn in mine), ended + unfinished


def speed_metrics(episodes: Sequence[Episode], learned: int, rollout_s: float, update_s: float) -> dict[str, float]:
    """Figures that depend on the clock. `learned`: tokens of the rows learned from."""
    made = sum(len(s) for e in episodes for s in e.streams.values())
    return {
        "speed/tokens_per_second": made / rollout_s,
        "speed/games_per_second": len(episodes) / (rollout_s + update_s),
        "speed/rollout_games_per_second": len(episodes) / rollout_s,
        "speed/update_tokens_per_second": learned / update_s,
        "time/rollout": rollout_s,
        "time/update": update_s,
    }


def _mean(values: Sequence[float] | Sequence[bool] | Sequence[int]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
