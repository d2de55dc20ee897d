"""Figures of each game: scores, deals, wins, votes, who names whom."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from envs.among_us.state import Ending, Role
from envs.dond import environment as dond_environment
from envs.dond import rules as dond_rules
from marl.metrics.among_us import Message, Record, read_game, template
from marl.metrics.beliefs import CHANGES, belief_changes
from marl.metrics.shares import Valued, context, counts_turn, mean_metrics, rate, spoken
from marl.metrics.stats import Floats, Metrics, bootstrap_mean, bootstrap_ratio, wilson
from marl.metrics.talk import effective_number
from marl.types import INSIDERS, Episode


# --- Games ------------------------------------------------------------------------------------------------------------
def by_game(episodes: Sequence[Episode], game: str, objective: float = 0.0) -> dict[str, list[float]]:
    """The headline figures of every game, in order: what players are compared by who met in the same games."""
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

    `game/score` is R_i + objective * R_j over all games and `game/score_agreed` over games with a deal; `game/points`
    is R_i alone and `game/joint` both players' sum. `game/pareto` counts games whose outcome no allocation weakly
    dominates, over all games (Liao et al. 2024), `game/pareto_agreed` over agreed ones (Lewis et al. 2017).
    `game/score_ceiling` is what the best deal of each of these contexts gives. `game/points/NAME`: what the
    player of that name got.
    """
    contexts = [context(episode) for episode in episodes]
    both = np.array(
        [[episode.outcome["points"][agent] for agent in dond_environment.AGENTS] for episode in episodes], float
    )
    deal = np.array([bool(episode.outcome["deal"]) for episode in episodes])
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
    """Points and score by who held the seat, where different players met."""
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


def among_us_metrics(
    episodes: Sequence[Episode], players: Collection[str] | None = None, rng: np.random.Generator | None = None
) -> Metrics:
    """Who won Among Us and how, and what `players` (names in `Episode.players`; None: all) voted and said.

    Of everybody: `game/win_rate/crewmates`, `game/win_rate/imposters` and `game/how/ENDING` are shares of all games;
    `game/meetings`, `game/reports` (choices to report; of several in one step one counts), `game/steps` of the
    clock and `game/decisions` (all players' moves, messages and votes) are per game;
    `game/ejected_imposter`, `game/ejected_crewmate`: the share of discussions that ended so; `game/tasks_done`: of the
    crewmates' tasks, the share that was done. Votes and messages: see `vote_metrics`, `naming_metrics`.
    """
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
    ejected: dict[str, Valued] = {"game/ejected_imposter": [], "game/ejected_crewmate": []}
    for game, (episode, record, count) in enumerate(zip(episodes, records, meetings, strict=True)):
        guilty = {episode.facts["names"][agent] for agent in episode.facts["imposters"]}
        for name in (*record.ejected, *[""] * (count - len(record.ejected))):  # time may run out before the vote
            ejected["game/ejected_imposter"].append((game, name in guilty))
            ejected["game/ejected_crewmate"].append((game, bool(name) and name not in guilty))
    return {
        **found,
        **mean_metrics(ejected, rng),
        **vote_metrics(episodes, records, rng, players),
        **naming_metrics(episodes, records, rng, players),
        **naming_effects(episodes, records, rng, players),
        **form_metrics(episodes, players),
        **{
            f"game/{name}": bootstrap_mean([e.outcome[name] for e in episodes], rng=rng)
            for name in ("steps", "decisions")
        },
    }


def vote_metrics(
    episodes: Sequence[Episode], records: Sequence[Record], rng: np.random.Generator, players: Collection[str] | None
) -> Metrics:
    """Crewmates' votes: `vote/imposter` and `vote/skip` are shares of all, `vote/chance` is what `vote/imposter` would
    be if everybody voted for a living player at random (for oneself, too: the game allows it). `vote/witness`: the
    share of votes whose voter noticed a killer that still lives; `vote/witness_imposter` and `vote/other_imposter` are
    what `vote/imposter` is among those and among the others."""
    votes = [
        (game, vote)
        for game, record in enumerate(records)
        for vote in record.votes
        if vote.turn.role == Role.CREWMATE and counts_turn(vote.turn, episodes[game], players)
    ]
    return mean_metrics(
        {
            "vote/imposter": [(game, vote.right) for game, vote in votes],
            "vote/skip": [(game, not vote.target) for game, vote in votes],
            "vote/chance": [(game, vote.chance) for game, vote in votes],
            "vote/witness": [(game, bool(vote.seen)) for game, vote in votes],
            "vote/witness_imposter": [(game, vote.right) for game, vote in votes if vote.seen],
            "vote/other_imposter": [(game, vote.right) for game, vote in votes if not vote.seen],
        },
        rng,
    )


def naming_metrics(
    episodes: Sequence[Episode], records: Sequence[Record], rng: np.random.Generator, players: Collection[str] | None
) -> Metrics:
    """Whom messages name. Only living others count: a victim's name does not say who did it.

    Crewmates': `talk/names` and `talk/names_imposter` are the shares that name anybody, an imposter; `talk/naming_true`
    is the share that names an imposter of those that name anybody, and `talk/naming_chance` what it would be if as many
    names as each has were drawn from the living others. `talk/accuses`, `talk/accusing_true` and `talk/accusing_chance`
    are the same of those whom a message speaks against, as far as the scripted players' grammar tells (of free text it
    tells little). `talk/knower_names_imposter`: of the messages of crewmates who noticed a killer that still lives, the
    share that names such a killer. Imposters', whoever plays them: `talk/imposter_names`, the share that names anybody.
    """
    messages = _messages(episodes, records, players)
    named = [(game, m, m.named) for game, m in messages if m.turn.role == Role.CREWMATE]
    against = [(game, m, m.accused) for game, m in messages if m.turn.role == Role.CREWMATE]
    return mean_metrics(
        {
            "talk/names": [(game, bool(names)) for game, _, names in named],
            "talk/names_imposter": [(game, m.meets(names)) for game, m, names in named],
            "talk/naming_true": [(game, m.meets(names)) for game, m, names in named if names],
            "talk/naming_chance": [(game, m.chance(len(names))) for game, m, names in named if names],
            "talk/accuses": [(game, bool(names)) for game, _, names in against],
            "talk/accusing_true": [(game, m.meets(names)) for game, m, names in against if names],
            "talk/accusing_chance": [(game, m.chance(len(names))) for game, m, names in against if names],
            "talk/knower_names_imposter": [
                (game, any(name in m.seen for name in names)) for game, m, names in named if m.seen
            ],
            "talk/imposter_names": [
                (game, bool(m.named)) for game, m in _messages(episodes, records, None) if m.turn.role == Role.IMPOSTER
            ],
        },
        rng,
    )


def naming_effects(
    episodes: Sequence[Episode], records: Sequence[Record], rng: np.random.Generator, players: Collection[str] | None
) -> Metrics:
    """What messages did to belief (see `speech_metrics`), toward the truth above 0, whoever spoke.

    `speech/belief_change/toward_truth`: all messages, imposters' too, whoever plays: nobody accuses itself, so messages
    of the crew alone help the truth even where they know nothing; 0 for speech that carries no information.
    Crewmates' alone, by whom they name: `speech/belief_change/names_imposter`, `/names_other` (living others, none of
    them an imposter) and `/names_nobody`. The same of `speech/log_belief_change`. `speech/pull`: what a message that
    speaks against one player alone, rightly or not, did to a crewmate's belief that it is that one.
    """
    values: dict[str, Valued] = {"speech/pull": []}
    for game, (episode, record) in enumerate(zip(episodes, records, strict=True)):
        for message in record.messages:
            if len(message.accused) == 1 and counts_turn(message.turn, episode, players):
                values["speech/pull"] += [(game, change) for change in pulls(episode, message)]
    for name, of in CHANGES.items():
        for game, (episode, record) in enumerate(zip(episodes, records, strict=True)):
            changes = belief_changes(episode, of)
            heard = [change for turn, change in zip(episode.turns, changes, strict=True) if turn.message]
            for message, change in zip(record.messages, heard, strict=True):
                if math.isnan(change):
                    continue
                values.setdefault(f"{name}/toward_truth", []).append((game, float(change)))
                if not counts_turn(message.turn, episode, players):
                    continue
                if message.turn.role == Role.CREWMATE:
                    kind = "imposter" if message.meets(message.named) else "other" if message.named else "nobody"
                    values.setdefault(f"{name}/names_{kind}", []).append((game, float(change)))
    return mean_metrics(values, rng)


def pulls(episode: Episode, message: Message) -> list[float]:
    """Of each crewmate asked before and after the message: the change of its belief in the one player accused."""
    name = message.accused[0].lower()
    changes = []
    for after in episode.beliefs:
        if after.role in INSIDERS or after.listener == message.turn.agent or after.step != message.turn.step + 1:
            continue
        earlier = [b for b in episode.beliefs if b.listener == after.listener and b.step < after.step]
        believed = [
            dict(zip(map(str.lower, b.question.candidates), b.probs, strict=True)) for b in (*earlier[-1:], after)
        ]
        if len(believed) == 2 and all(name in candidates for candidates in believed):
            changes.append(float(believed[1][name] - believed[0][name]))
    return changes


def form_metrics(episodes: Sequence[Episode], players: Collection[str] | None) -> Metrics:
    """`talk/forms`: the effective number of sentence forms, exp of the entropy (in nats) of the templates in use."""
    games = [Counter(template(t.message) for t in spoken(e, players) if t.message) for e in episodes]
    return {"talk/forms": effective_number(games)} if any(games) else {}


def _messages(
    episodes: Sequence[Episode], records: Sequence[Record], players: Collection[str] | None
) -> list[tuple[int, Message]]:
    """(number of the game, message) of all messages of these players."""
    return [
        (game, message)
        for game, record in enumerate(records)
        for message in record.messages
        if counts_turn(message.turn, episodes[game], players)
    ]


def ways_of_ending(episodes: Sequence[Episode], known: Collection[str] = ()) -> Metrics:
    """`game/how/ENDING`: the share of games that ended so; of `known` endings also where no game did."""
    endings = Counter(dict.fromkeys(known, 0))
    endings.update(str(episode.outcome["how"]) for episode in episodes)
    return {f"game/how/{how}": wilson(count, len(episodes)) for how, count in sorted(endings.items())}
