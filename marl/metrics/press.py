"""Measures of talk in Diplomacy: promises kept, promises believed, and requests granted.

A message is understood as scripted players understand it (`agents/scripted/diplomacy.py`): a request says what its
author will move ("please support PAR to BER"), an offer what it will support. Other messages count as such alone.
"""

from collections.abc import Collection, Sequence
from itertools import groupby

import numpy as np

from envs.core import TurnKind
from envs.diplomacy.reading import Order
from envs.diplomacy.texts import NOBODY, POWERS
from marl.agents.scripted.diplomacy import ASK, OFFER, Meaning, as_order, understand
from marl.metrics.stats import ByGame, Metrics, mean_metrics
from marl.types import Episode, Turn


def press_metrics(
    episodes: Sequence[Episode], rng: np.random.Generator, players: Collection[str] | None = None
) -> Metrics:
    """Means over the messages of `players` (None: of everybody), with intervals over games:

    press/said: the message announces an order of its author.
    press/kept: of those, it then orders it.
    press/heard: probability of what was said that the message adds to its reader's belief.
    press/granted, press/unasked: requests for support of a move that their reader, and any other power, then supports.
    """
    names = ("said", "kept", "heard", "granted", "unasked")
    values: dict[str, ByGame] = {f"press/{name}": [] for name in names}
    for game, episode in enumerate(episodes):
        powers = episode.facts["powers"]
        agents = {power: agent for agent, power in powers.items()}
        for number, turn in enumerate(episode.turns):
            if not turn.message or not (players is None or episode.players[turn.agent] in players):
                continue
            said = understand(turn.message)
            proposes = said.act in (ASK, OFFER)
            values["press/said"].append((game, proposes))
            if not proposes:
                continue
            reader = agents[_addressee(episode.turns[:number], turn)]
            orders = _orders(episode.turns[number + 1 :])
            ordered = {agent: _ordered(orders, agent) for agent in powers}
            own = "-" if said.act == ASK else "+"
            kept = any(_is(order, own, said) for order in ordered[turn.agent])
            values["press/kept"].append((game, kept))
            if (added := _heard(episode, turn, reader, said)) is not None:
                values["press/heard"].append((game, added))
            if said.act == ASK:
                helped = {a: any(_is(o, "+", said) for o in own) for a, own in ordered.items() if a != turn.agent}
                values["press/granted"].append((game, helped.pop(reader)))
                values["press/unasked"].append((game, float(np.mean([*helped.values()]))))
    return mean_metrics(values, rng)


def _addressee(before: Sequence[Turn], turn: Turn) -> str:
    """The power that a message went to: the last choice of its author."""
    return next(t.text.strip() for t in reversed(before) if t.agent == turn.agent and t.kind == TurnKind.CHOOSE)


def _orders(after: Sequence[Turn]) -> list[Turn]:
    """Finds what all seats choose for their units in the rest of a phase.

    A phase ends at the next talk, and where a seat is on turn again that was not: in a phase seats only drop out.
    """
    found: list[Turn] = []
    due: set[str] | None = None
    for _, turns in groupby(after, lambda turn: turn.step):
        now = list(turns)
        if all(turn.error for turn in now):  # neither orders nor an address
            continue
        if any(turn.kind == TurnKind.SPEAK or turn.text.strip() in (*POWERS, NOBODY) for turn in now):
            if due is not None:
                break
            continue
        agents = {turn.agent for turn in now}
        if due is not None and not agents <= due:
            break
        due = agents
        found += [turn for turn in now if not turn.error]
    return found


def _ordered(orders: Sequence[Turn], agent: str) -> list[Order]:
    """Lists a seat's orders, with both choices of a support in one."""
    found: list[Order] = []
    for turn in orders:
        if turn.agent != agent:
            continue
        order = as_order(turn.text.strip())
        if found and found[-1].verb == "+" and not found[-1].dest and order.verb in "-H+":
            last = found.pop()
            order = Order("", "", "+", last.target, order.target if order.verb == "-" else order.dest or "H")
        found.append(order)
    return found


def _is(order: Order, verb: str, said: Meaning) -> bool:
    if verb == "-":
        return order.verb == "-" and order.target == said.dest
    return order.verb == "+" and (order.target, order.dest) == (said.place, said.dest)


def _heard(episode: Episode, turn: Turn, reader: str, said: Meaning) -> float | None:
    """Probability that the message adds to its reader's belief in what it says; None if nobody asked about it."""
    named = said.place if said.act == ASK else ""  # an offer does not name the unit that will help
    asked = [b for b in episode.beliefs if b.listener == reader and named in b.question.text]
    after = next((b for b in asked if b.step == turn.step + 1), None)
    if after is None:
        return None
    before = next((b for b in reversed(asked) if b.step <= turn.step and b.question.text == after.question.text), None)
    wanted = [i for i, option in enumerate(after.question.candidates) if _begins(as_order(option), said)]
    if before is None or len(wanted) != 1 or len(before.probs) != len(after.probs):
        return None
    return float(after.probs[wanted[0]] - before.probs[wanted[0]])


def _begins(order: Order, said: Meaning) -> bool:
    """Tells whether an order begins as what was said does."""
    return (order.verb, order.target) == (("-", said.dest) if said.act == ASK else ("+", said.place))
