"""Metrics of each game: scores, deals, wins, votes, naming."""

import math
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from envs.among_us.state import Ending, Role
from envs.dond import environment as dond_environment
from envs.dond import rules as dond_rules
from marl.metrics.among_us import Message, Vote, read_game, template
from marl.metrics.beliefs import CHANGES, belief_changes, belief_moves
from marl.metrics.negotiation import context
from marl.metrics.stats import ByGame, Floats, Metrics, bootstrap_mean, bootstrap_ratio, mean_metrics, rate, wilson
from marl.metrics.talk import effective_number, played_by, speak_turns
from marl.types import Episode


def by_game(episodes: Sequence[Episode], game: str, objective: float = 0.0) -> dict[str, list[float]]:
    """The headline figures of each game, in order, for comparing players in the same games."""
    if game == "dond":
        points = [[e.outcome["points"][agent] for agent in dond_environment.AGENTS] for e in episodes]
        return {
            "game/score": [float(np.mean(dond_rules.scores((a, b), objective))) for a, b in points],
            "game/agreement": [float(bool(e.outcome["deal"])) for e in episodes],
        }
    if game == "among_us":
        return {"game/win_rate/crewmates": [float(e.outcome["winner"] == "crewmates") for e in episodes]}
    return {}


def dond_metrics(episodes: Sequence[Episode], objective: float, rng: np.random.Generator) -> Metrics:
    """Score, points, agreement and Pareto rate of Deal or No Deal, per game (the mean of its two players).

    `game/pareto`: no allocation weakly dominates the outcome (Liao et al. 2024). `*_agreed`: over games with a deal
    (Lewis et al. 2017). `game/points/NAME`, `game/score/NAME`: those of one player, if several met.
    """
    contexts = [context(episode) for episode in episodes]
    both = np.array([[e.outcome["points"][agent] for agent in dond_environment.AGENTS] for e in episodes], float)
    deal = np.array([bool(e.outcome["deal"]) for e in episodes])
    points = both.mean(1)  # (games,)
    score = np.array([np.mean(dond_rules.scores((a, b), objective)) for a, b in both])
    pareto = np.array(
        [dond_rules.pareto_optimal(c, e.outcome["claims"], objective) for c, e in zip(contexts, episodes, strict=True)]
    )
    found = {
        "game/score": bootstrap_mean(score, rng=rng),
        "game/score_ceiling": bootstrap_mean([dond_rules.best_score(c, objective) for c in contexts], rng=rng),
        "game/points": bootstrap_mean(points, rng=rng),
        "game/joint": bootstrap_mean(both.sum(1), rng=rng),
        "game/agreement": rate(deal),
        "game/pareto": rate(pareto),
    }
    if deal.any():
        found["game/score_agreed"] = bootstrap_mean(score[deal], rng=rng)
        found["game/points_agreed"] = bootstrap_mean(points[deal], rng=rng)
        found["game/pareto_agreed"] = rate(pareto[deal])
    return {**found, **ways_of_ending(episodes), **_by_player(episodes, both, objective, rng)}


def _by_player(episodes: Sequence[Episode], both: Floats, objective: float, rng: np.random.Generator) -> Metrics:
    """Points and score by player, if different players met."""
    seats = [
        (g, s, e.players[agent]) for g, e in enumerate(episodes) for s, agent in enumerate(dond_environment.AGENTS)
    ]
    names = sorted({name for _, _, name in seats})
    found: Metrics = {}
    for name in names if len(names) > 1 else []:
        games = [game for game, _, held_by in seats if held_by == name]
        points = [both[game, seat] for game, seat, held_by in seats if held_by == name]
        theirs = [both[game, 1 - seat] for game, seat, held_by in seats if held_by == name]
        found[f"game/points/{name}"] = bootstrap_mean(points, games, rng=rng)
        found[f"game/score/{name}"] = bootstrap_mean(np.add(points, objective * np.array(theirs)), games, rng=rng)
    return found


def ways_of_ending(episodes: Sequence[Episode], known: Collection[str] = ()) -> Metrics:
    """`game/how/ENDING`: the share of games that ended so. `known` endings are present also if no game ended so."""
    endings = Counter(dict.fromkeys(known, 0))
    endings.update(str(episode.outcome["how"]) for episode in episodes)
    return {f"game/how/{how}": wilson(count, len(episodes)) for how, count in sorted(endings.items())}


# --- Among Us ---------------------------------------------------------------------------------------------------------
def among_us_metrics(
    episodes: Sequence[Episode], players: Collection[str] | None = None, rng: np.random.Generator | None = None
) -> Metrics:
    """Wins and endings of Among Us, and votes and messages of `players` (names in `Episode.players`; None: all)."""
    rng = rng or np.random.default_rng(0)
    winners = [episode.outcome["winner"] for episode in episodes]
    records = [read_game(episode) for episode in episodes]
    meetings = [episode.outcome["discussions"] for episode in episodes]
    tasks = [sum(len(e.facts["tasks"][a]) for a, role in e.roles.items() if role == Role.CREWMATE) for e in episodes]
    found = {
        "game/win_rate/crewmates": rate([winner == "crewmates" for winner in winners]),
        "game/win_rate/imposters": rate([winner == "imposters" for winner in winners]),
        **ways_of_ending(episodes, [ending.value for ending in Ending]),
        "game/meetings": bootstrap_mean(meetings, rng=rng),
        "game/reports": bootstrap_mean([record.reports for record in records], rng=rng),
        "game/tasks_done": bootstrap_ratio([e.outcome["tasks"] for e in episodes], tasks, rng=rng),
    }
    ejected: dict[str, ByGame] = {"game/ejected_imposter": [], "game/ejected_crewmate": []}
    for game, (episode, record, count) in enumerate(zip(episodes, records, meetings, strict=True)):
        guilty = {episode.facts["names"][agent] for agent in episode.facts["imposters"]}
        for name in (*record.ejected, *[""] * (count - len(record.ejected))):  # time may run out before the vote
            ejected["game/ejected_imposter"].append((game, name in guilty))
            ejected["game/ejected_crewmate"].append((game, bool(name) and name not in guilty))
    votes = [
        (game, vote)
        for game, record in enumerate(records)
        for vote in record.votes
        if vote.turn.role == Role.CREWMATE and played_by(players, vote.turn, episodes[game])
    ]
    everybodys = [(game, message) for game, record in enumerate(records) for message in record.messages]
    messages = [(game, message) for game, message in everybodys if played_by(players, message.turn, episodes[game])]
    of_imposters = [(game, m) for game, m in everybodys if m.turn.role == Role.IMPOSTER]
    forms = [Counter(template(t.message) for t in speak_turns(e, players) if t.message) for e in episodes]
    return {
        **found,
        **mean_metrics(ejected, rng),
        **mean_metrics(vote_values(votes), rng),
        **mean_metrics(naming_values([(g, m) for g, m in messages if m.turn.role == Role.CREWMATE], of_imposters), rng),
        **mean_metrics(naming_effects(episodes, everybodys, players), rng),
        **({"talk/forms": effective_number(forms)} if any(forms) else {}),
        "game/steps": bootstrap_mean([e.outcome["steps"] for e in episodes], rng=rng),
        "game/decisions": bootstrap_mean([e.outcome["decisions"] for e in episodes], rng=rng),
    }


def vote_values(votes: Sequence[tuple[int, Vote]]) -> dict[str, ByGame]:
    """Crewmates' votes, by metric."""
    return {
        "vote/imposter": [(game, vote.right) for game, vote in votes],
        "vote/skip": [(game, not vote.target) for game, vote in votes],
        "vote/chance": [(game, vote.chance) for game, vote in votes],
        "vote/witness": [(game, bool(vote.seen)) for game, vote in votes],
        "vote/witness_imposter": [(game, vote.right) for game, vote in votes if vote.seen],
        "vote/other_imposter": [(game, vote.right) for game, vote in votes if not vote.seen],
    }


def naming_values(
    crews: Sequence[tuple[int, Message]], of_imposters: Sequence[tuple[int, Message]]
) -> dict[str, ByGame]:
    """Whom messages name, among living others: a victim's name does not say who did it.

    `talk/accus*` are by the scripted players' grammar, which tells little of free text. `talk/imposter_names` counts
    imposters' messages, whoever plays them.
    """
    named = [(game, m, m.named) for game, m in crews]
    against = [(game, m, m.accused) for game, m in crews]
    return {
        "talk/names": [(game, bool(names)) for game, _, names in named],
        "talk/names_imposter": [(game, m.meets(names)) for game, m, names in named],
        "talk/naming_true": [(game, m.meets(names)) for game, m, names in named if names],
        "talk/naming_chance": [(game, m.chance(len(names))) for game, m, names in named if names],
        "talk/accuses": [(game, bool(names)) for game, _, names in against],
        "talk/accusing_true": [(game, m.meets(names)) for game, m, names in against if names],
        "talk/accusing_chance": [(game, m.chance(len(names))) for game, m, names in against if names],
        "talk/knower_names_imposter": [(game, any(n in m.seen for n in names)) for game, m, names in named if m.seen],
        "talk/imposter_names": [(game, bool(m.named)) for game, m in of_imposters],
    }


def naming_effects(
    episodes: Sequence[Episode], messages: Sequence[tuple[int, Message]], players: Collection[str] | None
) -> dict[str, ByGame]:
    """Change of belief across messages, above 0 toward the truth, whoever spoke.

    `/toward_truth` has imposters' messages too: nobody accuses itself, so the crew's messages alone help the truth even
    if they know nothing. `speech/pull`: a crewmate's belief that it is the one player whom a message speaks against.
    """
    values: dict[str, ByGame] = {"speech/pull": []}
    for game, message in messages:
        if len(message.accused) == 1 and played_by(players, message.turn, episodes[game]):
            moves = belief_moves(episodes[game], message.turn, message.accused[0])
            values["speech/pull"] += [(game, float(after - before)) for before, after, _ in moves]
    for name, of in CHANGES.items():
        changes = [belief_changes(episode, of) for episode in episodes]
        heard = [
            float(change)
            for episode, each in zip(episodes, changes, strict=True)
            for turn, change in zip(episode.turns, each, strict=True)
            if turn.message
        ]
        for (game, message), change in zip(messages, heard, strict=True):
            if math.isnan(change):
                continue
            values.setdefault(f"{name}/toward_truth", []).append((game, change))
            if message.turn.role == Role.CREWMATE and played_by(players, message.turn, episodes[game]):
                kind = "imposter" if message.meets(message.named) else "other" if message.named else "nobody"
                values.setdefault(f"{name}/names_{kind}", []).append((game, change))
    return values
