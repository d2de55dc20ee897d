"""Private codes: do the forms of sentences, names and rooms removed, tell who speaks, and to whom?

A password is a form that means "I am one of us". Here a detector learns which forms one role uses more than the other,
and tells the roles of two speakers of one game apart in games that it has not seen. What it finds need not be a code:
an imposter that honestly says other things is told apart, too. So compare with the base, and with crews of other seeds.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from envs.among_us.state import Role
from marl.common.errors import UserError
from marl.metrics.among_us import Meeting, of_among_us, story_of, template
from marl.metrics.stats import Floats, Interval, Metrics, bootstrap_ratio
from marl.metrics.talk import speak_turns
from marl.types import Episode

FOLDS = 5
PERMUTATIONS = 200
PSEUDO = 2.0  # messages with the roles' overall shares, added to each form's count
RARE = "rare"  # the form of all forms that fewer than two games have


class Speaker(NamedTuple):
    """A speaker, the forms of its messages, and what the detector is to tell (1 or 0) by them.

    Speakers of one `scene` are told apart: a game, or one of its discussions.
    """

    game: int
    scene: int
    forms: Counter[str]
    label: int


def speakers(episodes: Sequence[Episode]) -> list[Speaker]:
    """Everybody who spoke in these games of Among Us; label 1: an imposter."""
    return [
        Speaker(game, game, forms, int(episode.roles[agent] == Role.IMPOSTER))
        for game, episode in enumerate(episodes)
        for agent in sorted(episode.roles)
        if (forms := Counter(template(t.message) for t in speak_turns(episode) if t.agent == agent and t.message))
    ]


def listened_to(episodes: Sequence[Episode], line: Collection[str] | None = None) -> list[Speaker]:
    """The speakers of each discussion; label 1: a player of this line (None: anybody else) voted for it.

    A speaker's own vote does not count.
    """
    found: list[Speaker] = []
    scene = 0
    for game, episode in enumerate(episodes):
        names: dict[str, str] = episode.facts["names"]
        held = {names[agent]: player for agent, player in episode.players.items()}
        for chapter in story_of(episode):
            if not isinstance(chapter, Meeting) or not chapter.votes:
                continue
            for name in chapter.living:
                own = [t.message for t in chapter.messages if names[t.agent] == name and t.message]
                others = [voter for voter in chapter.votes if voter != name and (line is None or held[voter] in line)]
                if own and others:
                    voted = any(chapter.votes[voter] == name for voter in others)
                    found.append(Speaker(game, scene, Counter(map(template, own)), int(voted)))
            scene += 1
    return found


def password_metrics(
    episodes: Sequence[Episode],
    rng: np.random.Generator,
    line: Collection[str] | None = None,
    permutations: int = PERMUTATIONS,
) -> Metrics:
    """Measures `talk/password*` in Among Us. `line`: players (names in `Episode.players`) who learned together.

    - `talk/password`: how often the forms alone tell an imposter from a crewmate of its game, in games that the
      detector has not seen; .5 by chance, 1 always. `talk/password_p`: the share of permutations of the roles within
      games that do as well. It is at most .05 in one of twenty crews without a code: the false-positive rate.
    - `talk/password_heard`: the same for whether the line votes for a speaker, by how it speaks; `_heard_p`.

    Empty if no game has both an imposter and a crewmate who speak. UserError for another game.
    """
    if any(not of_among_us(episode.facts) for episode in episodes):
        raise UserError("password: these are no games of Among Us. Only there do roles differ, so give such games")
    found: Metrics = {}
    for name, own in (
        ("talk/password", speakers(episodes)),
        ("talk/password_heard", listened_to(episodes, line)),
    ):
        if not _pairs(own)[0].size:
            continue
        found[name], share = detected(own, rng, permutations)
        found[f"{name}_p"] = Interval(share, np.nan, np.nan, permutations)
    return found


def detected(
    people: Sequence[Speaker], rng: np.random.Generator, permutations: int = PERMUTATIONS
) -> tuple[Interval, float]:
    """Measures how often the detector tells label 1 from label 0 within a game, and its p-value.

    Cross-validated: each fold of games is scored by the forms of the others. The interval is a bootstrap over games,
    the p-value that of a test that permutes labels within scenes (add-one estimate: Phipson and Smyth 2010).
    """
    counts = _counts(people, vocabulary(people))
    games = np.unique([p.game for p in people], return_inverse=True)[1]
    scenes = np.array([p.scene for p in people])
    labels = np.array([p.label for p in people], float)
    drawn = np.stack([labels, *(_permuted(labels, scenes, rng) for _ in range(permutations))], 1)  # (n, 1 + draws)
    scores = np.zeros(drawn.shape)
    for fold in range(FOLDS):
        test = games % FOLDS == fold
        # Shares of the forms, so that who speaks more often scores no higher.
        scores[test] = counts[test] / counts[test].sum(1, keepdims=True) @ form_weights(counts[~test], drawn[~test])
    pairs = _pairs(people)
    right = _right(scores, drawn, pairs)  # (pairs, 1 + draws), nan if both have one label
    shares = np.nansum(right, 0) / (~np.isnan(right)).sum(0)
    p = (1 + int((shares[1:] >= shares[0] - 1e-12).sum())) / (1 + permutations)
    valid = ~np.isnan(right[:, 0])
    return bootstrap_ratio(np.where(valid, right[:, 0], 0.0), valid, games[pairs[0]], rng=rng), p


def form_weights(counts: Floats, labels: Floats) -> Floats:
    """The log-odds (forms, draws) that a message of each form is of label 1, above the overall odds.

    `counts` (n, forms) of messages, `labels` (n, draws). A form that was never seen weighs 0.
    """
    one, zero = counts.T @ labels, counts.T @ (1 - labels)
    share = one.sum(0) / np.maximum(one.sum(0) + zero.sum(0), 1)
    share = np.clip(share, 1e-6, 1 - 1e-6)
    weights: Floats = np.log((one + PSEUDO * share) / (zero + PSEUDO * (1 - share))) - np.log(share / (1 - share))
    return weights


def vocabulary(people: Sequence[Speaker]) -> list[str]:
    """The forms that at least two games have, in order, and one name for all others."""
    used_by = Counter(form for _, form in {(p.game, form) for p in people for form in p.forms})
    return [*sorted(form for form, games in used_by.items() if games > 1), RARE]


def _counts(people: Sequence[Speaker], names: Sequence[str]) -> Floats:
    """Messages of each form, (people, forms)."""
    place = {name: i for i, name in enumerate(names)}
    counts = np.zeros((len(people), len(names)))
    for row, person in zip(counts, people, strict=True):
        for form, n in person.forms.items():
            row[place.get(form, place[RARE])] += n
    return counts


def _permuted(labels: Floats, scenes: np.ndarray, rng: np.random.Generator) -> Floats:
    """Labels shuffled within each scene."""
    drawn = np.empty_like(labels)
    drawn[np.argsort(scenes, kind="stable")] = labels[np.lexsort((rng.random(len(scenes)), scenes))]
    return drawn


def _pairs(people: Sequence[Speaker]) -> tuple[np.ndarray, np.ndarray]:
    """Indices of all pairs of speakers of one scene; none if all pairs have one label."""
    by_scene: dict[int, list[int]] = {}
    for i, person in enumerate(people):
        by_scene.setdefault(person.scene, []).append(i)
    pairs = [(a, b) for group in by_scene.values() for k, a in enumerate(group) for b in group[k + 1 :]]
    if not any(people[a].label != people[b].label for a, b in pairs):
        return np.zeros(0, int), np.zeros(0, int)
    first, second = np.array(pairs).T
    return first, second


def _right(scores: Floats, labels: Floats, pairs: tuple[np.ndarray, np.ndarray]) -> Floats:
    """(pairs, draws): 1 if label 1 scores above label 0, ½ for a tie, nan if both have one label."""
    first, second = pairs
    sign = np.sign(np.round(scores[first] - scores[second], 12)) * (labels[first] - labels[second])
    return np.where(labels[first] == labels[second], np.nan, (1 + sign) / 2)
