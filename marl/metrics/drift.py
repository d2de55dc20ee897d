"""Distance of agents' language from people's in Deal or No Deal: likelihoods both ways, and whether words are kept."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from envs.core import END, TurnKind
from envs.dond.environment import AGENTS
from envs.dond.replies import MESSAGE
from marl.common.errors import UserError
from marl.learning.batch import Row, collate
from marl.learning.forward import forward
from marl.learning.micro_batches import passes
from marl.metrics.negotiation import Claimed, Reading
from marl.metrics.stats import ByGame, Interval, Metrics, bootstrap_ratio, mean_metrics
from marl.metrics.talk import distinct_ngrams
from marl.model.policy import Policy
from marl.model.tokens import StreamWriter, Tokens
from marl.types import Episode, Kind, Turn

TOKENS_AT_ONCE = 16384


@torch.no_grad()
def speech_likelihood(policy: Policy, rows: Sequence[Row], bf16: bool = False) -> np.ndarray:
    """Returns the sum of log p in nats, and the words, of each row's own messages: shape (rows, 2).

    p is the policy's at temperature 1, given everything before. Only what others heard counts. Words are split at white
    space, so figures per word compare across tokenizers. bf16: passes compute in bfloat16.
    """
    found = np.zeros((len(rows), 2))
    for part, numbers in passes(policy, collate(rows, {}), TOKENS_AT_ONCE):
        with torch.autocast(policy.device.type, torch.bfloat16, enabled=bf16):
            logprobs = forward(policy, part, 1.0, {"reply": False}).logprobs
        found[numbers.numpy(), 0] = torch.where(part.body & part.reply, logprobs, 0.0).double().sum(1).cpu().numpy()
    for i, (episode, agent) in enumerate(rows):
        own = [t for t in episode.turns if t.agent == agent and t.body[0] < t.body[1]]
        found[i, 1] = sum(len(heard_words(t)) for t in own)
    return found


def heard_words(turn: Turn) -> list[str]:
    """The words of an accepted message. A replayed human's turn has no `message`; its text counts."""
    return (turn.message or turn.text.removeprefix(MESSAGE).partition(END)[0]).split()


def likelihood(
    policy: Policy, games: Sequence[Sequence[Row]], rng: np.random.Generator, bf16: bool = False
) -> Interval | None:
    """Mean log-likelihood of the messages in nats a word, with an interval over games; None without a message."""
    owner = [number for number, rows in enumerate(games) for _ in rows]
    found = speech_likelihood(policy, [row for rows in games for row in rows], bf16)
    sums = np.zeros((len(games), 2))
    np.add.at(sums, owner, found)
    return bootstrap_ratio(sums[:, 0], sums[:, 1], rng=rng) if sums[:, 1].sum() else None


def replayed_rows(episode: Episode, env: Any, tokens: Tokens, players: Sequence[str]) -> list[Row]:
    """Replays a game of Deal or No Deal as a model with these tokens reads it: a row for each seat of `players`.

    `env` must have the settings of the game, in the model's style.
    """
    if getattr(env, "structured", False):
        raise UserError("env.format=structured: drift is measured of replies with tags. Set it to free.")
    facts = episode.facts
    observations, infos = env.reset(
        options={"counts": facts["counts"], "values": facts["values"], "first": facts["first"]}
    )
    writers = {agent: StreamWriter(tokens) for agent in AGENTS}
    turns: list[Turn] = []
    for step, old in enumerate(episode.turns):
        for agent in AGENTS:
            writers[agent].observe(observations[agent]["text"], infos[agent]["questions"], step)
        assert observations[old.agent]["turn"] == TurnKind.SPEAK, (old.agent, step)
        writers[old.agent].cue()
        ids = tuple(tokens.encode(old.text))
        start = writers[old.agent].reply(ids, Kind.SPEECH)
        observations, _, _, _, infos = env.step({old.agent: old.text})
        info = infos[old.agent]
        body = tokens.within(ids, info["span"]) if ids else (0, 0)
        turns.append(
            replace(
                old, step=step, reply_ids=ids, start=start, logprobs=(0.0,) * len(ids), body=body,
                message=info["message"], error=info["error"], planned=None,
            )
        )  # fmt: skip
    streams = {agent: writer.stream for agent, writer in writers.items()}
    again = replace(episode, streams=streams, turns=tuple(turns), beliefs=(), payments=(), outcome={}, privileged={})
    return [(again, agent) for agent in AGENTS if episode.players[agent] in players]


def talk_drift(readings: Sequence[Reading], rng: np.random.Generator) -> Metrics:
    """Shares of proposals and messages of the measured players, read by `read_talk`.

    `talk/split_kept`: proposals that claim what the proposer's own last split gave it. `talk/table_kept`: the same for
    the last split of either player. `talk/inverted`: proposals that claim the partner's side of that split.
    `*_coverage`: the share of proposals of which that can be said. wording.csv explains the others.
    """
    claims = [(game, c) for game, reading in enumerate(readings) for c in reading.claims]
    values = [(game, v) for game, reading in enumerate(readings) for v in reading.values]

    def share(of: Callable[[Claimed], bool], among: Callable[[Claimed], bool] = lambda c: True) -> ByGame:
        return [(game, of(c)) for game, c in claims if among(c)]

    found = mean_metrics(
        {
            "talk/split_kept": share(lambda c: c.claim == c.stated, lambda c: c.stated is not None),
            "talk/split_coverage": share(lambda c: c.stated is not None),
            "talk/split_kept_explicit": share(lambda c: c.claim == c.stated, lambda c: c.stated_explicit),
            "talk/split_coverage_explicit": share(lambda c: c.stated_explicit),
            "talk/table_kept": share(lambda c: c.claim == c.table, lambda c: c.telling),
            "talk/inverted": share(lambda c: c.inverted, lambda c: c.telling),
            "talk/inverted_coverage": share(lambda c: c.telling),
            "talk/inverted_explicit": share(lambda c: c.inverted, lambda c: c.telling and c.table_explicit),
            "talk/worse_share": share(lambda c: c.worse),
            "talk/inverted_chance": [(game, c.chance) for game, c in claims if c.telling],
        },
        rng,
    )
    messages = [len(r.messages) for r in readings]
    if sum(messages):
        found["talk/understood"] = bootstrap_ratio([r.understood for r in readings], messages, rng=rng)
        found["talk/value_claims"] = bootstrap_ratio([len(r.values) for r in readings], messages, rng=rng)
    found |= mean_metrics(
        {"talk/value_true": [(game, v.true) for game, v in values],
         "talk/value_chance": [(game, v.chance) for game, v in values]},
        rng,
    )  # fmt: skip
    for size in (1, 2, 3):
        distinct = distinct_ngrams([r.messages for r in readings], size)
        if distinct is not None:
            found[f"talk/distinct_{size}"] = distinct
    return found
