"""How far agents' language is from people's, in Deal or No Deal: likelihoods both ways, variety, whether words hold.

Everything that is said about a policy here is a function of games and a policy. Which policies, of which runs and
checkpoints, is for the command (experiments/studies/drift.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy.stats import norm

from envs.core import END, TurnKind
from envs.dond.environment import AGENTS
from envs.dond.replies import MESSAGE
from marl.agents.base import beliefs_of
from marl.learning.batch import Seat, collate
from marl.learning.forward import forward
from marl.learning.micro_batches import micro_batches
from marl.metrics.negotiation import Claimed, Reading
from marl.metrics.stats import Interval, Metrics, bootstrap_mean, bootstrap_ratio, wilson
from marl.model.policy import Policy
from marl.model.tokens import Tokens, View
from marl.types import Episode, Kind, Turn

TOKENS_AT_ONCE = 16384
NGRAM_WORDS = 5000  # the share of distinct n-grams falls with the words counted, so their number is fixed


# --- Likelihood -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def speech_likelihood(policy: Policy, seats: Sequence[Seat]) -> np.ndarray:
    """Of each seat's own messages: (sum of log p of their tokens, words), shape (seats, 2), in nats.

    p is the policy's at temperature 1, as it would have spoken in that seat, given everything that stands before. Tags,
    end marker, proposals and refused replies are left out: only what others heard counts. Words are those between
    white space, which no tokenizer changes, so that figures per word compare across models.
    """
    found = np.zeros((len(seats), 2))
    batch = collate(seats, {})
    for rows in micro_batches(batch, torch.arange(batch.shape[0]), TOKENS_AT_ONCE):
        part = batch.select(rows).to(policy.device)
        logprobs = forward(policy, part, 1.0, {"reply": False}).logprobs
        found[rows.numpy(), 0] = torch.where(part.body & part.reply, logprobs, 0.0).double().sum(1).cpu().numpy()
    for i, (episode, agent) in enumerate(seats):
        own = [t for t in episode.turns if t.agent == agent and t.body[0] < t.body[1]]
        found[i, 1] = sum(len(heard_words(t)) for t in own)
    return found


def heard_words(turn: Turn) -> list[str]:
    """Of an accepted message; a replayed human's turn has no `message`, and was heard as it stands."""
    return (turn.message or turn.text.removeprefix(MESSAGE).partition(END)[0]).split()


def likelihood(policy: Policy, games: Sequence[Sequence[Seat]], rng: np.random.Generator) -> Interval | None:
    """Mean log-likelihood in nats a word of what was said in these games, with an interval over games.

    None where nothing was said.
    """
    owner = [number for number, seats in enumerate(games) for _ in seats]
    found = speech_likelihood(policy, [seat for seats in games for seat in seats])
    sums = np.zeros((len(games), 2))
    np.add.at(sums, owner, found)
    return bootstrap_ratio(sums[:, 0], sums[:, 1], rng=rng) if sums[:, 1].sum() else None


def retold(game: Mapping[str, Any] | Episode, env: Any, tokens: Tokens, players: Sequence[str]) -> list[Seat]:
    """A game of Deal or No Deal played again from its replies, as a model with these tokens meets it at each seat.

    One row for each seat that one of `players` held. `env` must have the settings of the game, in the style that the
    model reads. Replies are tokenised anew, the same way for all models, whoever made them.
    """
    facts: Mapping[str, Any]
    held: Mapping[str, str]
    if isinstance(game, Episode):
        facts, held = game.facts, game.players
        told = [(turn.agent, turn.text) for turn in game.turns]
    else:
        facts, held = game["facts"], game["players"]
        told = [(turn["agent"], turn["text"]) for turn in game["turns"]]
    observations, infos = env.reset(
        options={"counts": facts["counts"], "values": facts["values"], "first": facts["first"]}
    )
    views = {agent: View(tokens) for agent in AGENTS}
    turns: list[Turn] = []
    for step, (mover, text) in enumerate(told):
        for agent in AGENTS:
            views[agent].observe(observations[agent]["text"], infos[agent]["questions"], step)
        assert observations[mover]["turn"] == TurnKind.SPEAK, (mover, step)
        views[mover].cue()
        ids = tuple(tokens.encode(text))
        start = views[mover].reply(ids, Kind.SPEECH)
        observations, _, _, _, infos = env.step({mover: text})
        info = infos[mover]
        body = tokens.within(ids, info["span"]) if ids else (0, 0)
        turns.append(
            Turn(
                mover, "negotiator", step, TurnKind.SPEAK, text, ids, start, (0.0,) * len(ids),
                body=body, message=info["message"], error=info["error"],
            )
        )  # fmt: skip
    beliefs = [
        belief
        for agent in AGENTS
        for belief in beliefs_of(
            agent, "negotiator", views[agent].asked,
            [np.full(len(a.candidate_ids), 1 / len(a.candidate_ids)) for a in views[agent].asked],
        )
    ]  # fmt: skip
    episode = Episode(
        seed=0, players=dict(held), roles=dict.fromkeys(AGENTS, "negotiator"),
        streams={agent: view.stream for agent, view in views.items()}, turns=tuple(turns), beliefs=tuple(beliefs),
        payments=(), outcome={}, steps=len(turns), facts=dict(facts),
    )  # fmt: skip
    return [(episode, agent) for agent in AGENTS if held[agent] in players]


# --- Variety ----------------------------------------------------------------------------------------------------------


def distinct_ngrams(games: Sequence[Sequence[str]], size: int, words: int = NGRAM_WORDS) -> Interval | None:
    """Different n-grams over all n-grams of messages (Li et al. 2016), in the first games that hold `words` words.

    N-grams lie within a message; words are those between white space. Interval: delete-one-game jackknife of the ratio
    (Efron and Tibshirani 1993, chapter 11). None where fewer words were said: a share over fewer would be larger for
    that reason alone. `n`: games counted.
    """
    grams: list[list[tuple[str, ...]]] = []
    said = 0
    for messages in games:
        found = []
        for message in messages:
            each = message.split()[: words - said]
            said += len(each)
            found += [tuple(each[i : i + size]) for i in range(len(each) - size + 1)]
        grams.append(found)
        if said >= words:
            break
    if said < words:
        return None
    used_by: dict[tuple[str, ...], int] = {}
    for found in grams:
        for gram in set(found):
            used_by[gram] = used_by.get(gram, 0) + 1
    unique, total, n = len(used_by), sum(map(len, grams)), len(grams)
    if not total:
        return None
    mean = unique / total
    if n == 1:
        return Interval(mean, math.nan, math.nan, 1)
    without = [
        (unique - sum(used_by[gram] == 1 for gram in set(found))) / max(total - len(found), 1) for found in grams
    ]
    half = float(norm.ppf(0.975)) * math.sqrt((n - 1) * float(np.var(without)))
    return Interval(mean, max(0.0, mean - half), min(1.0, mean + half), n)


# --- Whether words hold -----------------------------------------------------------------------------------------------


def talk_drift(readings: Sequence[Reading], rng: np.random.Generator) -> Metrics:
    """What these games' measured players said, by `read_talk`; a figure that nothing was observed for is absent.

    Of proposals: `talk/split_kept`, the share that claims what the proposer's own last split gave it, over those
    with such a split, which are `talk/split_coverage` of all; `talk/split_kept_explicit` and
    `talk/split_coverage_explicit`, where that message said of all items who gets them; who agreed to the partner's
    later split doesn't keep its own. `talk/table_kept`: the share that claims its side of the last split of either
    player, so that an agreement counts, over those of which `talk/inverted` is a share. `talk/inverted`: the share that
    claims the partner's side of the last split of either player, over those where the sides differ, which are
    `talk/inverted_coverage` of all; `talk/inverted_explicit` likewise; `talk/inverted_chance`, what uniform claims
    would give. `talk/worse_share`: claims of the side that is worth less to the proposer, over all proposals.

    Of messages: `talk/understood`, in which the grammar found anything; `talk/value_claims`, statements about own
    values per message; of these `talk/value_true`, and `talk/value_chance`, what they would be of values drawn
    uniformly. `talk/distinct_1`, `_2`, `_3`: see `distinct_ngrams`.
    """
    found: Metrics = {}

    def share(name: str, of: Callable[[Claimed], bool], among: Callable[[Claimed], bool] = lambda c: True) -> None:
        pairs = [(game, of(c)) for game, r in enumerate(readings) for c in r.claims if among(c)]
        if pairs:
            found[name] = _share(pairs, rng)

    share("talk/split_kept", lambda c: c.claim == c.stated, lambda c: c.stated is not None)
    share("talk/split_coverage", lambda c: c.stated is not None)
    share("talk/split_kept_explicit", lambda c: c.claim == c.stated, lambda c: c.stated_explicit)
    share("talk/split_coverage_explicit", lambda c: c.stated_explicit)
    share("talk/table_kept", lambda c: c.claim == c.table, lambda c: c.telling)
    share("talk/inverted", lambda c: c.inverted, lambda c: c.telling)
    share("talk/inverted_coverage", lambda c: c.telling)
    share("talk/inverted_explicit", lambda c: c.inverted, lambda c: c.telling and c.table_explicit)
    share("talk/worse_share", lambda c: c.worse)
    chances = [(game, c.chance) for game, r in enumerate(readings) for c in r.claims if c.telling]
    if chances:
        found["talk/inverted_chance"] = bootstrap_mean([p for _, p in chances], [g for g, _ in chances], rng=rng)
    messages = [len(r.messages) for r in readings]
    if sum(messages):
        found["talk/understood"] = bootstrap_ratio([r.understood for r in readings], messages, rng=rng)
        found["talk/value_claims"] = bootstrap_ratio([len(r.values) for r in readings], messages, rng=rng)
    values = [(game, v) for game, r in enumerate(readings) for v in r.values]
    if values:
        found["talk/value_true"] = _share([(game, v.true) for game, v in values], rng)
        found["talk/value_chance"] = bootstrap_mean([v.chance for _, v in values], [g for g, _ in values], rng=rng)
    for size in (1, 2, 3):
        distinct = distinct_ngrams([r.messages for r in readings], size)
        if distinct is not None:
            found[f"talk/distinct_{size}"] = distinct
    return found


def _share(pairs: Sequence[tuple[int, bool]], rng: np.random.Generator) -> Interval:
    """A share with an interval over games; where it holds always or never, games are counted (Wilson 1927)."""
    games, flags = zip(*pairs, strict=True)
    if len(set(flags)) == 1:
        units = len(set(games))
        return wilson(units * flags[0], units)
    return bootstrap_mean(flags, games, rng=rng)
