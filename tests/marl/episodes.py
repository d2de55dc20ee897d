"""Small games of Deal or No Deal (and one of another kind) written out by hand, with beliefs that are easy to sum."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from envs.core import Question, TurnKind
from envs.dond import environment as dond_environment
from envs.dond import replies as dond_replies
from envs.dond import rules as dond_rules
from marl.types import Belief, Episode, Turn

CONTEXT = dond_rules.Context((1, 1, 3), ((0, 1, 3), (1, 3, 2)))
CANDIDATES = tuple(str(points) for points in range(11))


def spread(value: int, truth: float) -> np.ndarray:
    """Eleven probabilities: `truth` at the value, the rest shared out equally."""
    probs = np.full(11, (1 - truth) / 10)
    probs[value] = truth
    return probs


def beliefs(listener: str, step: int, truths: Sequence[float], context: dond_rules.Context = CONTEXT) -> list[Belief]:
    """The listener's three answers, with these probabilities of the truth."""
    partner = context.values[1 - dond_environment.AGENTS.index(listener)]
    return [
        Belief(
            listener, "negotiator", step, 0,
            Question(f"How many points is one {item} worth to your partner?", CANDIDATES, str(partner[i])),
            spread(partner[i], truths[i]),
        )
        for i, item in enumerate(("book", "hat", "ball"))
    ]  # fmt: skip


def message(agent: str, step: int, text: str, **fields: Any) -> Turn:
    return Turn(agent, "negotiator", step, TurnKind.SPEAK, f"[message] {text} [END]", message=text, **fields)


def propose(agent: str, step: int, claim: dond_rules.Triple, **fields: Any) -> Turn:
    return Turn(agent, "negotiator", step, TurnKind.SPEAK, dond_replies.proposal_text(claim), **fields)


def refused(agent: str, step: int, text: str, error: str = "no tag", **fields: Any) -> Turn:
    return Turn(agent, "negotiator", step, TurnKind.SPEAK, text, error=error, **fields)


def episode(
    turns: Sequence[Turn],
    answers: Sequence[Belief] = (),
    claims: tuple[dond_rules.Triple | None, dond_rules.Triple | None] = (None, None),
    context: dond_rules.Context = CONTEXT,
    players: tuple[str, str] = ("learner", "learner"),
    how: str = "mismatch",
    seed: int = 0,
    objective: float = 1.0,
) -> Episode:
    points = dond_rules.claim_points(context, claims)
    deal = dond_rules.complementary(claims, context.counts)
    return Episode(
        seed=seed,
        players=dict(zip(dond_environment.AGENTS, players, strict=True)),
        roles=dict.fromkeys(dond_environment.AGENTS, "negotiator"),
        streams={},
        turns=tuple(turns),
        beliefs=tuple(answers),
        payments=(),
        outcome={
            "deal": deal,
            "points": dict(zip(dond_environment.AGENTS, points, strict=True)),
            "how": "deal" if deal else how,
            "claims": claims,
        },
        steps=len(turns),
        facts={"counts": context.counts, "values": context.values, "first": 0, "objective": objective},
    )


def deal_game(seed: int = 0, players: tuple[str, str] = ("learner", "learner")) -> Episode:
    """Two messages, then a deal: player_0 takes the balls (9 points), player_1 book and hat (4): 13, the most there is.

    player_1's belief in player_0's values: .1 each at the start, .3 .3 .9 after the first message, the same after its
    own. player_0's: .2 each at the start and after its own message, .5 .5 .5 after the second.
    """
    low, heard = [0.1, 0.1, 0.1], [0.3, 0.3, 0.9]
    return episode(
        turns=[
            message(
                "player_0", 0, "i want the balls",
                reply_ids=(1, 2, 3, 4, 5, 6), logprobs=(-0.5,) * 6, rewards={"speaking": 1.2},
            ),
            message("player_1", 1, "ok i take book & hat", reply_ids=(1, 2, 3, 4), logprobs=(-0.25,) * 4),
            propose("player_0", 2, (0, 0, 3), reply_ids=(7, 8)),
            propose("player_1", 3, (1, 1, 0), reply_ids=(7, 8), rewards={"game": 13.0}),
        ],
        answers=[
            *beliefs("player_0", 0, [0.2] * 3), *beliefs("player_1", 0, low),
            *beliefs("player_0", 1, [0.2] * 3), *beliefs("player_1", 1, heard),
            *beliefs("player_0", 2, [0.5] * 3), *beliefs("player_1", 2, heard),
        ],
        claims=((0, 0, 3), (1, 1, 0)),
        players=players,
        seed=seed,
    )  # fmt: skip


def failed_game(seed: int = 1, players: tuple[str, str] = ("learner", "learner")) -> Episode:
    """One refused reply, one message, then both claim the balls: no deal. Beliefs do not move."""
    return episode(
        turns=[
            refused("player_1", 0, "give me all", reply_ids=(9, 9, 9)),
            message("player_1", 1, "i want the balls", reply_ids=(1, 2)),
            propose("player_0", 2, (0, 0, 3), reply_ids=(7, 8)),
            propose("player_1", 3, (0, 0, 3), reply_ids=(7, 8)),
        ],
        answers=[
            *beliefs("player_0", 0, [0.2] * 3), *beliefs("player_1", 0, [0.2] * 3),
            *beliefs("player_0", 2, [0.2] * 3), *beliefs("player_1", 2, [0.2] * 3),
        ],
        claims=((0, 0, 3), (0, 0, 3)),
        players=players,
        seed=seed,
    )  # fmt: skip


def aborted_game(seed: int = 2, players: tuple[str, str] = ("learner", "learner")) -> Episode:
    """Five refused replies of player_0 and nothing else."""
    return episode([refused("player_0", s, "hm") for s in range(5)], how="abort", players=players, seed=seed)


def imposter_game(winner: str | None = "crewmates") -> Episode:
    """Three players, two discussions of two messages, a vote after each; Red is the imposter and lies in the second."""
    names = ("Red", "Blue", "Lime")
    question = Question("Who is the imposter?", names, "Red")

    def turn(agent: str, step: int, text: str, kind: TurnKind = TurnKind.SPEAK) -> Turn:
        role = "imposter" if agent == "Red" else "crewmate"
        return Turn(agent, role, step, kind, text, message=text if kind == TurnKind.SPEAK else "")

    def answer(listener: str, step: int, probs: tuple[float, float, float]) -> Belief:
        return Belief(listener, "crewmate", step, 0, question, np.array(probs))

    return Episode(
        seed=0,
        players={"Red": "base", "Blue": "learner", "Lime": "learner"},
        roles={"Red": "imposter", "Blue": "crewmate", "Lime": "crewmate"},
        streams={},
        turns=(
            turn("Blue", 0, "wait", TurnKind.CHOOSE),
            turn("Blue", 1, "Red killed"),
            turn("Lime", 2, "yes Red"),
            turn("Blue", 3, "skip", TurnKind.CHOOSE),
            turn("Lime", 4, "wait", TurnKind.CHOOSE),
            turn("Red", 5, "it was Lime"),
            turn("Blue", 6, "no"),
            turn("Blue", 7, "Red", TurnKind.CHOOSE),
        ),
        beliefs=(
            answer("Lime", 1, (0.2, 0.4, 0.4)),
            answer("Lime", 2, (0.6, 0.2, 0.2)),
            answer("Blue", 3, (0.5, 0.25, 0.25)),
            answer("Blue", 5, (0.5, 0.25, 0.25)),
            answer("Blue", 6, (0.4, 0.2, 0.4)),
        ),
        payments=(),
        outcome={"winner": winner, "how": "ejected"},
        steps=8,
        facts={"imposters": (0,)},
    )


def ejection_game(winner: str | None = "crewmates") -> Episode:
    """The same as a game of Among Us in which only Blue votes: first for nobody, then for Red."""
    game = imposter_game(winner)
    facts = {
        "width": 1,
        "names": {name: name for name in game.roles},
        "imposters": ("Red",),
        "tasks": {"Red": (), "Blue": ((0, 0), (0, 0)), "Lime": ((0, 0), (0, 0))},
    }
    return replace(
        game, facts=facts, outcome={**game.outcome, "discussions": 2, "tasks": 1, "steps": 9, "decisions": 21}
    )


CREW = ("Red", "Blue", "Green", "Yellow", "Orange", "Pink")


def meeting_game(seed: int = 0, winner: str | None = "imposters") -> Episode:
    """One discussion of six players of Among Us. Red is the imposter and Pink a crewmate, both frozen; four learn.

    Red kills Orange where all have started. Green sees it; Blue has just left and Yellow is busy with a task; Pink came
    back a step too late. Then Green reports. Beliefs are asked of Green, Blue and Pink alone, and of Red, who knows.
    Green and Pink vote for Red, Blue and Red for Green, Yellow for nobody: a tie. 3 of 10 tasks get done.
    """
    agents = {name: f"player_{seat}" for seat, name in enumerate(CREW)}
    question = Question("<imposter?>", ("red", "blue", "green", "yellow"), "red")

    def turn(name: str, step: int, text: str, kind: TurnKind = TurnKind.CHOOSE, **fields: Any) -> Turn:
        message = text if kind == TurnKind.SPEAK else ""
        role = "imposter" if name == "Red" else "crewmate"
        return Turn(agents[name], role, step, kind, text, message=message, **fields)

    def answers(name: str, truths: dict[int, float]) -> list[Belief]:
        """Beliefs of a player from the probability of the truth by step. The other three candidates share the rest
        equally."""
        role = "imposter" if name == "Red" else "crewmate"
        return [
            Belief(agents[name], role, step, 0, question, np.array([truth, *[(1 - truth) / 3] * 3]))
            for step, truth in truths.items()
        ]

    said = (
        ("Green", "red killed orange i saw it"),
        ("Red", "i was with green in lab"),
        ("Blue", "vote for green"),
        ("Pink", "RED, or green?"),
        ("Yellow", "i saw nothing"),
        ("Green", "who was in bridge"),
    )
    return Episode(
        seed=seed,
        players={agents[name]: "base" if name in ("Red", "Pink") else "learner" for name in CREW},
        roles={agents[name]: "imposter" if name == "Red" else "crewmate" for name in CREW},
        streams={},
        turns=(
            turn("Red", 0, "wait"), turn("Blue", 0, "wait"), turn("Green", 0, "wait"), turn("Yellow", 0, "do_task"),
            turn("Orange", 0, "wait"), turn("Pink", 0, "go_east"),
            turn("Red", 2, "kill_orange"), turn("Blue", 2, "go_east"), turn("Green", 2, "kill_blue", error="no option"),
            turn("Pink", 3, "go_west"), turn("Green", 4, "report_orange"),
            *(turn(name, 6 + i, text, TurnKind.SPEAK) for i, (name, text) in enumerate(said)),
            turn("Red", 12, "green"), turn("Blue", 12, "green"), turn("Green", 12, "red"),
            turn("Yellow", 12, "blue!", error="It is none of the options. It counts as skip."),
            turn("Pink", 12, "red"),
        ),
        beliefs=(
            *answers("Green", {6: 0.9}), *answers("Blue", {6: 0.25, 7: 0.55, 8: 0.45}),
            *answers("Pink", {6: 0.25, 7: 0.35, 9: 0.15, 11: 0.2}), *answers("Red", {6: 1.0, 7: 1.0, 11: 1.0}),
        ),
        payments=(),
        outcome={"winner": winner, "how": "time", "discussions": 1, "tasks": 3, "steps": 13, "decisions": 30},
        steps=13,
        facts={
            "width": 2,
            "names": {agent: name for name, agent in agents.items()},
            "imposters": (agents["Red"],),
            "tasks": {agents[name]: () if name == "Red" else ((0, 0), (1, 0)) for name in CREW},
        },
    )  # fmt: skip
