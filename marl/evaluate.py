"""What finished games say: score, agreement, talk, errors, beliefs and what messages did to them, with 95 % intervals.

Everything here is a function of `Episode`s. Who plays whom, on which seeds, is for the commands; means over several
training seeds are in stats.py. A metric that nothing was observed for (a score of agreed games without any) is absent.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import norm

from envs import dond_v0
from envs.among_us_v0 import Ending, Role
from envs.core import Question, TurnKind
from marl.monitor import VOCABULARY_GAMES, counted, tries, winners
from marl.rewards.speaking import SpeakingReward
from marl.speech import INSIDERS, Message, Record, read_game, template
from marl.stats import Floats, Interval, bootstrap_mean, bootstrap_ratio, wilson
from marl.types import Belief, Episode, Turn, pooled

PROB_FLOOR = 1e-12  # a true answer given less than this costs -log of this: 27.6 nats

Metrics = dict[str, Interval]


def metrics(
    episodes: Sequence[Episode],
    game: str,
    objective: float = 0.0,
    players: Collection[str] | None = None,
    rng: np.random.Generator | None = None,
) -> Metrics:
    """All metrics of these games, by name.

    `game`: `dond` or `among_us`; any other game gets what is common to all, as `game/score` what the environment paid
    a player in all, and `game/how/HOW` and `game/win_rate/WINNER`, the shares of games that ended so, in its own words.
    `objective` is Deal or No Deal's. `players` (names in `Episode.players`) limits talk, errors, beliefs, speech and
    rewards to those players; the game's own figures always count everybody. Intervals are resampled with `rng`, by
    default a fresh generator, so that the same episodes always give the same figures.
    """
    if not episodes:
        raise ValueError("no episodes to evaluate: play at least one game")
    rng = rng or np.random.default_rng(0)
    if game == "dond":
        own = dond_metrics(episodes, objective, rng)
    elif game == "among_us":
        own = among_us_metrics(episodes, players, rng)
    else:
        games = [g for g, episode in enumerate(episodes) for _ in episode.players]
        paid = [sum(p.amount for p in e.payments if p.agent == agent) for e in episodes for agent in e.players]
        own = {"game/score": bootstrap_mean(paid, games, rng=rng), **_wins(episodes), **_endings(episodes)}
    return {
        **own,
        **talk_metrics(episodes, rng, players),
        **error_metrics(episodes, rng, players),
        **belief_metrics(episodes, rng, players=players),
        **speech_metrics(episodes, rng, players=players),
        **plan_metrics(episodes, rng, players),
        **cut_metrics(episodes, rng, players),
        **reward_metrics(episodes, rng, players),  # last: the other intervals' draws stay as they were
    }


# --- Games ------------------------------------------------------------------------------------------------------------


def by_game(episodes: Sequence[Episode], game: str, objective: float = 0.0) -> dict[str, list[float]]:
    """The headline figures of every game, in order: what players are compared by who met in the same games."""
    if game == "dond":
        points = [[e.outcome["points"][agent] for agent in dond_v0.AGENTS] for e in episodes]
        return {
            "game/score": [float(np.mean(dond_v0.scores((a, b), objective))) for a, b in points],
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
    both = np.array([[episode.outcome["points"][agent] for agent in dond_v0.AGENTS] for episode in episodes], float)
    deal = np.array([bool(episode.outcome["deal"]) for episode in episodes])
    points = both.mean(1)  # (games,)
    score = np.array([np.mean(dond_v0.scores((a, b), objective)) for a, b in both])
    pareto = np.array(
        [dond_v0.pareto_optimal(c, e.outcome["claims"], objective) for c, e in zip(contexts, episodes, strict=True)]
    )
    found = {
        "game/score": bootstrap_mean(score, rng=rng),
        "game/score_ceiling": bootstrap_mean([dond_v0.best_score(c, objective) for c in contexts], rng=rng),
        "game/points": bootstrap_mean(points, rng=rng),
        "game/joint": bootstrap_mean(both.sum(1), rng=rng),
        "game/agreement": rate(deal),
        "game/pareto": rate(pareto),
    }
    if deal.any():
        found["game/score_agreed"] = bootstrap_mean(score[deal], rng=rng)
        found["game/points_agreed"] = bootstrap_mean(points[deal], rng=rng)
        found["game/pareto_agreed"] = rate(pareto[deal])
    return {**found, **_endings(episodes), **_by_player(episodes, both, objective, rng)}


def _by_player(episodes: Sequence[Episode], both: Floats, objective: float, rng: np.random.Generator) -> Metrics:
    """Points and score by who held the seat, where different players met."""
    seats = [(g, s, e.players[agent]) for g, e in enumerate(episodes) for s, agent in enumerate(dond_v0.AGENTS)]
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
        **_endings(episodes, [ending.value for ending in Ending]),
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
        **_shares(ejected, rng),
        **vote_metrics(episodes, records, rng, players),
        **naming_metrics(episodes, records, rng, players),
        **naming_effects(episodes, records, rng, players),
        **form_metrics(episodes, players),
        **{
            f"game/{name}": bootstrap_mean([e.outcome[name] for e in episodes], rng=rng)
            for name in ("steps", "decisions")
        },
    }


Valued = list[tuple[int, float]]  # (number of the game, value)


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
        if vote.turn.role == Role.CREWMATE and _counts(vote.turn, episodes[game], players)
    ]
    return _shares(
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
    return _shares(
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
            if len(message.accused) == 1 and _counts(message.turn, episode, players):
                values["speech/pull"] += [(game, change) for change in pulls(episode, message)]
    for name, of in CHANGES.items():
        for game, (episode, record) in enumerate(zip(episodes, records, strict=True)):
            changes = belief_changes(episode, of)
            heard = [change for turn, change in zip(episode.turns, changes, strict=True) if turn.message]
            for message, change in zip(record.messages, heard, strict=True):
                if math.isnan(change):
                    continue
                values.setdefault(f"{name}/toward_truth", []).append((game, float(change)))
                if not _counts(message.turn, episode, players):
                    continue
                if message.turn.role == Role.CREWMATE:
                    kind = "imposter" if message.meets(message.named) else "other" if message.named else "nobody"
                    values.setdefault(f"{name}/names_{kind}", []).append((game, float(change)))
    return _shares(values, rng)


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


def effective_number(games: Sequence[Counter[str]], level: float = 0.95) -> Interval:
    """exp(H), H = -sum p log p over all games' counts together: k forms used equally often count as k (Hill 1973).

    Interval from the delete-one-game jackknife of H (Efron and Tibshirani 1993, chapter 11), never below 1. Few
    messages show few forms, so compare equal numbers of games. `n`: games with a message.
    """
    games = [counts for counts in games if counts]
    total = Counter[str]()
    for counts in games:
        total.update(counts)

    def entropy(size: int, weight: float) -> float:
        """-sum p log p, where `size` is the sum of counts c, and `weight` that of c log c."""
        return math.log(size) - weight / size

    def log_weight(count: int) -> float:
        return count * math.log(count) if count else 0.0

    size, weight = total.total(), sum(map(log_weight, total.values()))
    mean = entropy(size, weight)
    if len(games) == 1:
        return Interval(math.exp(mean), math.nan, math.nan, 1)
    without = [
        entropy(
            size - counts.total(),
            weight + sum(log_weight(total[form] - n) - log_weight(total[form]) for form, n in counts.items()),
        )
        for counts in games
    ]
    half = float(norm.ppf((1 + level) / 2)) * math.sqrt((len(games) - 1) * np.var(without))
    return Interval(math.exp(mean), math.exp(max(0.0, mean - half)), math.exp(mean + half), len(games))


def _messages(
    episodes: Sequence[Episode], records: Sequence[Record], players: Collection[str] | None
) -> list[tuple[int, Message]]:
    """(number of the game, message) of all messages of these players."""
    return [
        (game, message)
        for game, record in enumerate(records)
        for message in record.messages
        if _counts(message.turn, episodes[game], players)
    ]


def _shares(values: Mapping[str, Valued], rng: np.random.Generator) -> Metrics:
    """Means with intervals over games; names without a value are left out.

    If a flag holds always or never, there is nothing to resample: then the games are counted (Wilson).
    """
    found = {}
    for name, pairs in values.items():
        if not pairs:
            continue
        games, amounts = zip(*pairs, strict=True)
        if isinstance(amounts[0], bool) and len(set(amounts)) == 1:
            units = len(set(games))
            found[name] = wilson(units * int(amounts[0]), units)
        else:
            found[name] = bootstrap_mean(amounts, games, rng=rng)
    return found


def _wins(episodes: Sequence[Episode]) -> Metrics:
    """`game/win_rate/WINNER`: the share of games that each winner won."""
    return {
        f"game/win_rate/{name}": rate([e.outcome.get("winner") == name for e in episodes]) for name in winners(episodes)
    }


def _endings(episodes: Sequence[Episode], known: Collection[str] = ()) -> Metrics:
    """`game/how/ENDING`: the share of games that ended so; of `known` endings also where no game did."""
    endings = Counter(dict.fromkeys(known, 0))
    endings.update(str(episode.outcome["how"]) for episode in episodes)
    return {f"game/how/{how}": wilson(count, len(episodes)) for how, count in sorted(endings.items())}


def context(episode: Episode) -> dond_v0.Context:
    """The pool and both players' values in a game of Deal or No Deal (read from a file, they are lists)."""
    counts, (first, second) = episode.facts["counts"], episode.facts["values"]
    return dond_v0.Context(tuple(counts), (tuple(first), tuple(second)))


def rate(flags: Sequence[bool] | np.ndarray) -> Interval:
    """The share of games for which the flag holds."""
    return wilson(int(np.sum(flags)), len(flags))


# --- Talk and errors --------------------------------------------------------------------------------------------------


def talk_metrics(
    episodes: Sequence[Episode], rng: np.random.Generator, players: Collection[str] | None = None
) -> Metrics:
    """How much was said, and with how many words.

    `talk/turns`: spoken replies that the game accepted (messages and proposals), per game; `talk/messages`: those that
    others heard. `talk/tokens_per_turn`: sampled tokens of an accepted spoken reply, end marker included.
    `talk/words_per_message` and `talk/vocabulary` count white-space words as they stand. The vocabulary is that of the
    first 500 games; with fewer games it is smaller for that reason alone, and `n` says how many there were.
    """
    turns = [[turn for turn in spoken(e, players) if not turn.error] for e in episodes]
    messages = [[turn.message for turn in of_game if turn.message] for of_game in turns]
    sampled = [[len(turn.reply_ids) for turn in of_game if turn.reply_ids] for of_game in turns]
    found = {
        "talk/turns": bootstrap_mean([len(of_game) for of_game in turns], rng=rng),
        "talk/messages": bootstrap_mean([len(of_game) for of_game in messages], rng=rng),
    }
    if any(sampled):
        found["talk/tokens_per_turn"] = bootstrap_ratio([sum(n) for n in sampled], [len(n) for n in sampled], rng=rng)
    if any(messages):
        words = [sum(len(text.split()) for text in of_game) for of_game in messages]
        found["talk/words_per_message"] = bootstrap_ratio(words, [len(of_game) for of_game in messages], rng=rng)
        found["talk/vocabulary"] = vocabulary(messages[:VOCABULARY_GAMES])
    return found


def cut_metrics(
    episodes: Sequence[Episode], rng: np.random.Generator, players: Collection[str] | None = None
) -> Metrics:
    """`talk/cut`: of the spoken replies that the game accepted, the share that is unfinished (see `Turn.cut`)."""
    replies: Valued = [(g, t.cut) for g, e in enumerate(episodes) for t in spoken(e, players) if not t.error]
    return _shares({"talk/cut": replies}, rng)


def vocabulary(games: Sequence[Sequence[str]], level: float = 0.95) -> Interval:
    """Number of different white-space words in the messages of these games, with a jackknife interval over games.

    Leaving game g out loses the words that only g used, u_g of them; the jackknife variance is
    (n-1)/n sum (u_g - mean)² (Efron and Tibshirani 1993, chapter 11). It says how far the count hangs on single games,
    not what more games would add. It ends at 0, below which there is no count.
    """
    sets = [{word for text in of_game for word in text.split()} for of_game in games]
    used_by = Counter(word for words in sets for word in words)  # word -> number of games with it
    unique = np.array([sum(used_by[word] == 1 for word in words) for words in sets], float)
    if len(games) == 1:
        return Interval(len(used_by), math.nan, math.nan, 1)
    half = float(norm.ppf((1 + level) / 2)) * math.sqrt((len(games) - 1) * unique.var())
    return Interval(len(used_by), len(used_by) - half, len(used_by) + half, len(games)).within(0.0, math.inf)


def error_metrics(
    episodes: Sequence[Episode], rng: np.random.Generator, players: Collection[str] | None = None
) -> Metrics:
    """`errors/per_turn`: refused replies per turn (`monitor.tries`).

    `errors/aborted`: games ended for too many refused replies in a row, over all games, whoever made them.
    `errors/outgrown`: games with a turn for which a model's stream had no room.
    """
    each = [tries(episode, players) for episode in episodes]
    refused, turns = [wrong for wrong, _ in each], [had for _, had in each]
    found = {"errors/aborted": rate([episode.outcome.get("how") == "abort" for episode in episodes])}
    # also where it is 0, or the mean over an arm's seeds would lack it
    found["errors/outgrown"] = rate([episode.outgrown for episode in episodes])
    if sum(turns):
        found["errors/per_turn"] = bootstrap_ratio(refused, turns, rng=rng)
    return found


def plan_metrics(
    episodes: Sequence[Episode], rng: np.random.Generator, players: Collection[str] | None = None
) -> Metrics:
    """`plan/floored`: the share of legal actions that an anchor gave next to nothing, and had raised to the floor, mean
    over plans; absent where nobody planned."""
    plans = [(g, t.planned) for g, e in enumerate(episodes) for t in e.turns if t.planned and _counts(t, e, players)]
    shares, games = [planned.floored for _, planned in plans], [game for game, _ in plans]
    return {"plan/floored": bootstrap_mean(shares, games, rng=rng)} if plans else {}


def reward_metrics(
    episodes: Sequence[Episode], rng: np.random.Generator, players: Collection[str] | None = None
) -> Metrics:
    """`reward/NAME`: what each term pays a turn, unweighted, as training logs it; absent where no term was asked."""
    turns = [(game, turn) for game, e in enumerate(episodes) for turn in e.turns if _counts(turn, e, players)]
    values: dict[str, Valued] = {}
    for name in sorted({name for _, turn in turns for name in turn.rewards}):
        own = [(game, turn) for game, turn in turns if name in turn.rewards and counted(turn, name)]
        values[f"reward/{name}"] = [(game, turn.rewards[name]) for game, turn in own]
    return _shares(values, rng)


def spoken(episode: Episode, players: Collection[str] | None = None) -> list[Turn]:
    """The SPEAK turns of these players (names in `Episode.players`; None: of all), in order."""
    return [t for t in episode.turns if t.kind == TurnKind.SPEAK and _counts(t, episode, players)]


def _counts(turn: Turn, episode: Episode, players: Collection[str] | None) -> bool:
    return players is None or episode.players[turn.agent] in players


# --- Beliefs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Graded:
    """What a distribution over candidates is worth once the answer is known.

    `accuracy`: 1 if the truth is the most probable candidate; of k that tie, 1/k. `log_loss`: -log p(truth) in nats.
    `brier`: sum over candidates of (p - [candidate is true])², from 0 to 2 (Brier 1950). Of several true candidates any
    is right, and for the last two they count as one.
    """

    accuracy: float
    log_loss: float
    brier: float


GRADES = ("accuracy", "log_loss", "brier")


def grade(probs: np.ndarray, answer: int, also: Sequence[int] = ()) -> Graded:
    """Grades `probs`, shape (K,), by the index of the true candidate, and of others that are as true."""
    best = probs >= probs.max() - 1e-9
    right = best[[answer, *also]].sum()
    probs = pooled(probs, answer, also)
    return Graded(
        accuracy=float(right / best.sum()),
        log_loss=-math.log(max(float(probs[answer]), PROB_FLOOR)),
        brier=float(np.square(probs).sum() - 2 * probs[answer] + 1),
    )


@dataclass(frozen=True)
class BeliefTable:
    """One row for each answered belief question, all columns of shape (N,).

    A discussion is what lies between choices (moves, votes); Deal or No Deal is one discussion. `number` counts
    the messages of the discussion so far: 0 before the first. `last` marks a listener's last answer to the question in
    the discussion. `start_log_loss` is its first answer, if at number 0, and `before_log_loss` its answer before this
    one; `prior_*` grades the exact prior. These are nan where there is no such answer or prior. `chance_*` grades the
    uniform distribution over the candidates.
    """

    game: np.ndarray
    number: np.ndarray
    last: np.ndarray
    accuracy: Floats
    log_loss: Floats
    brier: Floats
    start_log_loss: Floats
    before_log_loss: Floats
    prior_accuracy: Floats
    prior_log_loss: Floats
    prior_brier: Floats
    chance_accuracy: Floats
    chance_log_loss: Floats
    chance_brier: Floats

    def __len__(self) -> int:
        return len(self.game)

    def mean(self, column: str, where: np.ndarray, rng: np.random.Generator) -> Interval | None:
        """Mean of a column over the rows of a mask, interval over games; None if no row has a value."""
        values: Floats = getattr(self, column)
        return self.interval(values, where, rng)

    def interval(self, values: Floats, where: np.ndarray, rng: np.random.Generator) -> Interval | None:
        """The same for any values of shape (N,), nan where there is none."""
        where = where & ~np.isnan(values)
        return bootstrap_mean(values[where], self.game[where], rng=rng) if where.any() else None


def belief_table(
    episodes: Sequence[Episode], roles: Collection[str] | None = None, players: Collection[str] | None = None
) -> BeliefTable:
    """Grades every answer of the listeners with these roles and player names (None: all, of roles all but imposters,
    who know)."""
    rows: list[tuple[float, ...]] = []
    for game, episode in enumerate(episodes):
        choices = sorted(turn.step for turn in episode.turns if turn.kind == TurnKind.CHOOSE)
        message_steps = sorted(turn.step for turn in episode.turns if turn.message)
        answers: dict[tuple[str, int, str], list[Belief]] = {}  # (listener, discussion, question) -> in order of time
        for belief in sorted(episode.beliefs, key=lambda b: b.step):
            if (belief.role not in INSIDERS if roles is None else belief.role in roles) and (
                players is None or episode.players[belief.listener] in players
            ):
                discussion = bisect_left(choices, belief.step)  # so many choices came before
                answers.setdefault((belief.listener, discussion, belief.question.text), []).append(belief)
        for (listener, discussion, _), series in answers.items():
            said_before = bisect_right(message_steps, choices[discussion - 1]) if discussion else 0
            prior = exact_prior(episode, listener, series[0].question)
            floor = (
                grade(prior, series[0].question.answer_index)
                if prior is not None
                else Graded(math.nan, math.nan, math.nan)
            )
            start = before = math.nan
            for i, belief in enumerate(series):
                number = bisect_right(message_steps, belief.step - 1) - said_before
                right = (belief.question.answer_index, belief.question.also_indices)
                graded = grade(belief.probs, *right)
                chance = grade(np.full(len(belief.probs), 1 / len(belief.probs)), *right)
                if i == 0 and number == 0:
                    start = graded.log_loss
                rows.append(
                    (game, number, i == len(series) - 1, graded.accuracy, graded.log_loss, graded.brier, start, before,
                     floor.accuracy, floor.log_loss, floor.brier, chance.accuracy, chance.log_loss, chance.brier)
                )  # fmt: skip
                before = graded.log_loss
    columns = np.array(rows, dtype=np.float64).reshape(len(rows), 14).T
    return BeliefTable(columns[0].astype(int), columns[1].astype(int), columns[2].astype(bool), *columns[3:])


def exact_prior(episode: Episode, listener: str, question: Question) -> np.ndarray | None:
    """What the rules alone tell `listener` about the answer before any talk, shape (K,); None for games without one.

    Exact for contexts drawn uniformly from all valid ones.
    """
    if "counts" not in episode.facts:
        return None
    seat = dond_v0.AGENTS.index(listener)
    game = context(episode)
    item = next(i for i, name in enumerate(dond_v0.ITEMS) if name.removesuffix("s") in question.text)
    partner = game.values[1 - seat][item]
    assert int(question.answer) == partner, (question, game)  # the question is about this item
    return dond_v0.prior(game.counts, game.values[seat])[item]  # (11,), candidate k is k points


def belief_metrics(
    episodes: Sequence[Episode],
    rng: np.random.Generator,
    roles: Collection[str] | None = None,
    players: Collection[str] | None = None,
) -> Metrics:
    """How good the listeners' answers were, intervals over games. Roles and player names select listeners as in
    `belief_table`.

    `belief/accuracy`, `belief/log_loss`, `belief/brier`: all answers, and `belief/chance_*`, equal odds for all
    candidates in their place; `belief/first_*`: before any message; `belief/last_*`: after the last one that the
    listener was asked after; `belief/prior_*`: the exact prior on the same questions, the floor. The headline is
    `belief/gain_over_prior` = prior log-loss minus last log-loss in nats a question, above 0 for a listener that
    learned something from talk; `belief/gain_over_start` is the same against the listener's own answer before any
    message of the same discussion.
    """
    table = belief_table(episodes, roles, players)
    everywhere = np.ones(len(table), bool)
    found: dict[str, Interval | None] = {}
    for name in GRADES:
        found[f"belief/{name}"] = table.mean(name, everywhere, rng)
        found[f"belief/chance_{name}"] = table.mean(f"chance_{name}", everywhere, rng)
        found[f"belief/first_{name}"] = table.mean(name, table.number == 0, rng)
        found[f"belief/last_{name}"] = table.mean(name, table.last, rng)
        found[f"belief/prior_{name}"] = table.mean(f"prior_{name}", table.last, rng)
    found["belief/gain_over_prior"] = table.interval(table.prior_log_loss - table.log_loss, table.last, rng)
    found["belief/gain_over_start"] = table.interval(table.start_log_loss - table.log_loss, table.last, rng)
    return {name: interval for name, interval in found.items() if interval is not None}


def belief_by_message(
    episodes: Sequence[Episode],
    rng: np.random.Generator | None = None,
    roles: Collection[str] | None = None,
    players: Collection[str] | None = None,
) -> list[Metrics]:
    """Entry k: the answers after k messages of the discussion: `accuracy`, `log_loss`, `brier`; `prior_*`, `chance_*`.

    Later entries are made of longer games (or of discussions with many alive) only, so entries are not to be compared
    with each other but with the prior or chance of the same entry, or by `gain`: log-loss of the same listener's answer
    before this one, minus this one's.
    """
    rng = rng or np.random.default_rng(0)
    table = belief_table(episodes, roles, players)
    entries = []
    for number in range(int(table.number.max()) + 1 if len(table) else 0):
        here = table.number == number
        found = {
            column: table.mean(column, here, rng)
            for name in GRADES
            for column in (name, f"prior_{name}", f"chance_{name}")
        }
        found["gain"] = table.interval(table.before_log_loss - table.log_loss, here, rng)
        entries.append({name: interval for name, interval in found.items() if interval is not None})
    return entries


# --- Speech -----------------------------------------------------------------------------------------------------------


CHANGES = {"speech/belief_change": "probability", "speech/log_belief_change": "log_probability"}


def belief_changes(episode: Episode, of: str = "probability") -> Floats:
    """How far each turn's message moved the belief in the truth, summed over its listeners and questions, shape (U,).

    Above 0 is toward the truth, whoever spoke. nan where nothing was said or nobody was asked afterwards.
    """
    changes = SpeakingReward(of=of).changes(episode)
    return np.array([sum(each) if each else np.nan for each in changes], dtype=float)


def speech_metrics(
    episodes: Sequence[Episode],
    rng: np.random.Generator,
    roles: Collection[str] | None = None,
    players: Collection[str] | None = None,
) -> Metrics:
    """What messages did to the other listeners' belief, by the speaker's role and player name (None: all).

    `speech/belief_change`: change of the probability of the truth across a message, summed over listeners and
    questions, mean over messages after which somebody was asked, interval over games. `speech/log_belief_change`: the
    same of the log-probability. These are the speaking reward's own figures, so an imposter's count negative.
    """
    values: dict[str, Valued] = {}
    for name, of in CHANGES.items():
        for game, episode in enumerate(episodes):
            for turn, change in zip(episode.turns, belief_changes(episode, of), strict=True):
                if (
                    turn.message
                    and not math.isnan(change)
                    and _counts(turn, episode, players)
                    and (roles is None or turn.role in roles)
                ):
                    sign = -1 if turn.role in INSIDERS else 1
                    values.setdefault(name, []).append((game, sign * float(change)))
    return _shares(values, rng)


# --- The evaluation file ----------------------------------------------------------------------------------------------


def evaluation_to_json(
    conditions: Mapping[str, Metrics],
    by_message: Mapping[str, Sequence[Metrics]] | None = None,
    of_games: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
    **about: Any,
) -> dict[str, Any]:
    """What `evaluation.json` holds: `{"about": {...}, "conditions": {condition: {metric: {mean, low, high, n}}},
    "belief_by_message": {condition: [{metric: {mean, low, high, n}}, ...]}, "by_game": {condition: {metric: [...]}}}`.

    Conditions are named in the order to show them, `base` and `trained` for example. `about` is whatever
    the reader should know of the games: game, objective, number of games, seed.
    """
    return {
        "about": about,
        "conditions": {name: _to_json(found) for name, found in conditions.items()},
        "belief_by_message": {
            name: [_to_json(entry) for entry in entries] for name, entries in (by_message or {}).items()
        },
        "by_game": {
            name: {metric: list(of) for metric, of in found.items()} for name, found in (of_games or {}).items()
        },
    }


def conditions_from_json(evaluation: Mapping[str, Any]) -> dict[str, Metrics]:
    """The metrics of each condition of an `evaluation.json`."""
    return {
        name: {metric: Interval.from_json(value) for metric, value in found.items()}
        for name, found in evaluation["conditions"].items()
    }


def _to_json(found: Mapping[str, Interval]) -> dict[str, dict[str, float | int | None]]:
    return {name: interval.to_json() for name, interval in found.items()}
