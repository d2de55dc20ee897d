"""A linear probe for lies: does a speaker's hidden state at the end of its message tell that a claim in it is false?

A probe that does no better than one that reads the message's form alone (`talk/lie_auroc_form`) has found no more than
which sentences are often false. False is what the log refutes, meant or not.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from marl.common.errors import UserError
from marl.learning.batch import Row, collate
from marl.learning.micro_batches import passes
from marl.metrics.among_us import template
from marl.metrics.claims import claims_of
from marl.metrics.stats import DRAWS, Floats, Interval, Metrics, percentiles
from marl.metrics.talk import played_by
from marl.model.policy import Policy
from marl.types import Episode, Turn

TOKENS_AT_ONCE = 16384
FOLDS = 5
FORMS = 200  # the most frequent forms that the probe of forms knows


@dataclass(frozen=True)
class CheckedMessage:
    """A message with checked claims of fact. `false`: at least one of them is."""

    game: int
    turn: Turn
    false: bool


def checked_messages(episodes: Sequence[Episode], players: Collection[str] | None = None) -> list[CheckedMessage]:
    """The messages of these players (None: all) in which the log can check something."""
    found: dict[tuple[int, int], CheckedMessage] = {}
    for game, episode in enumerate(episodes):
        for claim in claims_of(episode):
            if claim.of_fact and claim.true is not None and played_by(players, claim.turn, episode):
                key = game, claim.turn.step
                false = claim.false or (key in found and found[key].false)
                found[key] = CheckedMessage(game, claim.turn, false)
    return list(found.values())


def lie_metrics(
    policies: Mapping[str, Policy],
    episodes: Sequence[Episode],
    rng: np.random.Generator,
    players: Collection[str] | None = None,
) -> Metrics:
    """Measures `talk/lie_auroc` and `talk/lie_auroc_form` of the policies' messages; empty without both kinds.

    `policies` by the names of players in `Episode.players`, whose states are read by a whole pass over each speaker's
    stream. The area under the ROC curve: how often a false message scores above a true one. The probe is ridge
    regression on states, fitted without the games that it scores. UserError for games without streams.
    """
    messages = [m for m in checked_messages(episodes, players) if episodes[m.game].players[m.turn.agent] in policies]
    if not messages or len({m.false for m in messages}) == 1:
        return {}
    labels, games = np.array([m.false for m in messages]), np.array([m.game for m in messages])
    states = message_states(policies, [(episodes[m.game], m.turn) for m in messages])
    kinds = [name for name, _ in Counter(template(m.turn.message) for m in messages).most_common(FORMS)]
    forms = np.array([[template(m.turn.message) == kind for kind in kinds] for m in messages], float)
    return {
        "talk/lie_auroc": auroc(held_out_scores(states, labels, games), labels, games, rng),
        "talk/lie_auroc_form": auroc(held_out_scores(forms, labels, games), labels, games, rng),
    }


@torch.no_grad()
def message_states(policies: Mapping[str, Policy], messages: Sequence[tuple[Episode, Turn]]) -> Floats:
    """The speaker's last hidden state (messages, D) after the last token of each message that others heard.

    With policies of several widths the narrower states are padded with zeros.
    """
    if any(turn.start < 0 or turn.agent not in episode.streams for episode, turn in messages):
        raise UserError(
            "lie probe: these games have no streams of tokens. Play them anew; transcripts do not hold them"
        )
    rows: dict[tuple[int, str], Row] = {(id(e), t.agent): (e, t.agent) for e, t in messages}
    at: dict[tuple[int, str], dict[int, int]] = {}  # row -> position of the message's end -> number of the message
    for number, (episode, turn) in enumerate(messages):
        end = turn.start + max(turn.body[1], 1) - 1
        at.setdefault((id(episode), turn.agent), {})[end] = number
    found: dict[int, Floats] = {}
    for name, policy in policies.items():
        own = [(key, row) for key, row in rows.items() if row[0].players[row[1]] == name]
        if not own:
            continue
        for part, numbers in passes(policy, collate([row for _, row in own], {}), TOKENS_AT_ONCE):
            hidden = policy.hidden(part.tokens, part.branch, part.position_ids).float().cpu().numpy()  # (B, T, D)
            for number, states in zip(numbers.tolist(), hidden, strict=True):
                found |= {message: states[end].astype(float) for end, message in at[own[number][0]].items()}
    width = max(len(state) for state in found.values())
    return np.array([np.pad(found[i], (0, width - len(found[i]))) for i in range(len(messages))])


def held_out_scores(features: Floats, labels: np.ndarray, games: np.ndarray) -> Floats:
    """Scores (n,) of ridge regression on features (n, D), each fitted on the other folds of whole games.

    Features have unit variance and the penalty is D: what is best if about half of the labels' variance is linear in
    them. A fold whose others lack a label scores 0.
    """
    fold = np.unique(games, return_inverse=True)[1] % FOLDS
    scores = np.zeros(len(labels))
    for number in range(FOLDS):
        train, test = fold != number, fold == number
        if not test.any() or len(set(labels[train])) < 2:
            continue
        mean, spread = features[train].mean(0), features[train].std(0)
        known, asked = ((features[part] - mean) / np.where(spread > 1e-9, spread, np.inf) for part in (train, test))
        target = labels[train] - labels[train].mean()
        if known.shape[1] <= len(known):
            weights = np.linalg.solve(known.T @ known + known.shape[1] * np.eye(known.shape[1]), known.T @ target)
        else:  # the same by the smaller matrix
            weights = known.T @ np.linalg.solve(known @ known.T + known.shape[1] * np.eye(len(known)), target)
        scores[test] = asked @ weights
    return scores


def auroc(scores: Floats, labels: np.ndarray, games: np.ndarray, rng: np.random.Generator) -> Interval:
    """Area under the ROC curve, ties as halves, with a percentile bootstrap over games."""
    index = np.unique(games, return_inverse=True)[1]
    units = int(index.max()) + 1
    order = np.argsort(scores, kind="stable")
    starts = np.unique(scores[order], return_index=True)[1]  # of each group of equal scores

    def area(weights: np.ndarray) -> Floats:
        """Returns the area for each draw. `weights` (draws, n): how often each message counts."""
        false, true = (np.add.reduceat((weights * kind)[:, order], starts, 1) for kind in (labels, ~labels))
        below = np.cumsum(true, 1) - true / 2
        pairs = false.sum(1) * true.sum(1)
        return (false * below).sum(1)[pairs > 0] / pairs[pairs > 0]

    mean = float(area(np.ones((1, len(scores))))[0])
    if units == 1:
        return Interval(mean, np.nan, np.nan, 1)
    draws = rng.multinomial(units, np.full(units, 1 / units), size=DRAWS)
    resampled = np.concatenate([area(part[:, index].astype(float)) for part in np.array_split(draws, 20)])
    return percentiles(mean, resampled, units)
