"""Draws messages side by side, from the likeliest tokens alone (nucleus sampling)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from envs.core import END
from envs.dond import replies, texts
from marl.agents.model import ModelAgentState
from marl.decoding.engine import Engine
from marl.model.policy import Policy
from marl.model.tokens import Tokens

Drawn = tuple[list[int], list[float]]  # a reply's ids and their log-probabilities, without the cut to the likeliest
DRAW = 2  # place of a seat's seed


@dataclass
class Draw:
    """A message that was drawn, and what refused it; empty if nothing did."""

    ids: list[int]
    logprobs: list[float]
    text: str  # of the message, as the partner would read it; empty if it is unfinished or none
    refused: str = ""
    value: float | None = None


@torch.no_grad()
def draw_messages(
    engine: Engine, slots: Sequence[int], last: Sequence[int], limits: Sequence[int], *, temperature: float,
    top_p: float, rng: np.random.Generator, tag: str = replies.MESSAGE,
) -> list[Drawn]:  # fmt: skip
    """Continues the streams in these slots, whose `last` tokens are unread, by one message each, `tag` included.

    A message ends as a reply does, or after `limits` tokens. Log-probabilities are the model's at this temperature; 0
    takes the likeliest tokens.
    """
    temperature = temperature or 0.01
    policy, tokens, count = engine.policy, engine.policy.tokens, len(slots)
    begun = tokens.encode(tag) if tag else []
    hidden = engine.read(slots, [[token, *begun] for token in last]).view(count, len(begun) + 1, -1)
    first = policy.speech_logits(policy.logits(hidden[:, :-1]), temperature).log_softmax(-1)
    ids: list[list[int]] = [[*begun] for _ in slots]
    logs = [[float(first[i, t, token]) for t, token in enumerate(begun)] for i in range(count)]
    going, states = [i for i in range(count) if len(begun) < limits[i]], hidden[:, -1]
    states = states[going]
    while going:
        scores = policy.speech_logits(policy.logits(states), temperature).double().log_softmax(-1).cpu().numpy()
        for row, i in enumerate(going):
            token = nucleus(np.exp(scores[row]), top_p, rng.random())
            ids[i].append(token)
            logs[i].append(float(scores[row, token]))
        going = [i for i in going if len(ids[i]) < limits[i] and not tokens.ends(ids[i])]
        if going:
            states = engine.read([slots[i] for i in going], [ids[i][-1:] for i in going])
    return list(zip(ids, logs, strict=True))


def messages_behind(
    policy: Policy, streams: Sequence[Sequence[int]], limit: int, *, context: int, at_once: int, temperature: float,
    top_p: float, rng: np.random.Generator, tag: str = replies.MESSAGE,
) -> list[Drawn]:  # fmt: skip
    """Continues each stream, up to a cue, by one message of at most `limit` tokens; `at_once` of them side by side."""
    engine, found = Engine(policy, at_once, context), list[Drawn]()
    for start in range(0, len(streams), at_once):
        group = streams[start : start + at_once]
        slots = [engine.allocate() for _ in group]
        engine.read(slots, [stream[:-1] for stream in group])
        last, limits = [stream[-1] for stream in group], [limit] * len(group)
        found += draw_messages(engine, slots, last, limits, temperature=temperature, top_p=top_p, rng=rng, tag=tag)
        for slot in slots:
            engine.free(slot)
    return found


def draws_for(
    engine: Engine, state: ModelAgentState, count: int, done: int, limit: int, *, temperature: float, top_p: float,
    tag: str = replies.MESSAGE,
) -> list[Drawn]:  # fmt: skip
    """Draws messages after a seat's stream, whose slot stays as it is; `done`: how many there are already."""
    stream = state.view.stream.tokens
    forks = engine.fork(state.slot, count)
    for fork in forks:
        engine.rewind(fork, stream[:-1])
    found = draw_messages(
        engine, forks, [stream[-1]] * count, [limit] * count, temperature=temperature, top_p=top_p,
        rng=np.random.default_rng([state.seed, len(stream), DRAW, done]), tag=tag,
    )  # fmt: skip
    for fork in forks:
        engine.free(fork)
    return found


def nucleus(probs: np.ndarray, top_p: float, height: float) -> int:
    """Draws a token (by `height` in [0, 1)) from the fewest likeliest ones that together have the probability
    `top_p`."""
    order = np.argsort(-probs, kind="stable")
    ladder = probs[order].cumsum()
    kept = int(np.searchsorted(ladder, min(top_p, ladder[-1]) - 1e-12)) + 1
    place = int(np.searchsorted(ladder[:kept], height * ladder[kept - 1], side="right"))
    return int(order[min(place, kept - 1)])


def plain_words(ids: Sequence[int], tokens: Tokens) -> str:
    """Returns the words of a reply without tags; empty if it is unfinished."""
    return tokens.reply_text(ids).partition(END)[0].strip() if tokens.ends(ids) else ""


def words_of(ids: Sequence[int], tokens: Tokens) -> str:
    """Returns what a partner would read of a reply in Deal or No Deal; empty if it is unfinished or no message."""
    parsed = replies.parse_reply(tokens.reply_text(ids), (0, 0, 0), False, 1)
    if not tokens.ends(ids) or not isinstance(parsed, replies.Message):
        return ""
    return texts.passed_on(parsed.text, len(parsed.text))


def shown(intent: str, drawn: Sequence[Draw]) -> str:
    """Returns what a transcript shows of a reply: the intent, and each draw with what refused it."""
    lines = [f"intent: {intent}"]
    for draw in drawn:
        worth = "" if draw.value is None else f" (worth {draw.value:.2f})"
        lines.append(f"{f'refused, {draw.refused}' if draw.refused else 'passed'}: {draw.text or '...'}{worth}")
    return "\n".join(lines)
