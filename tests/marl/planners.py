"""Planners, and small models for them that know some of the games' language."""

from functools import cache

from envs import dond_v0
from envs.core import Question, TurnKind
from envs.dond import rules as dond_rules
from envs.dond import texts as dond_texts
from marl.agents.base import Request
from marl.learning.batch import collate, rows_of
from marl.model.policy import Policy
from marl.planning.planner import PlannerConfig, PlanningAgent
from marl.rollout.games import env_maker, scripted
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from tests.marl.models import teach, tiny_policy

COUNTS, OWN, PARTNER = (1, 1, 3), (0, 1, 3), (1, 3, 2)
COMPACT = env_maker({"game": "dond", "style": "compact", "objective": 1.0, "max_entries": 12})
MEETINGS = env_maker({"game": "among_us", "style": "compact", "players": 5, "height": 1, "max_steps": 60})


def config(*lambdas: float, **settings: object) -> PlannerConfig:
    return PlannerConfig(lambdas=lambdas or (0.1,), **settings)  # type: ignore[arg-type]


# --- The player ---


def proposing(policy: Policy, how: PlannerConfig, **settings: object) -> tuple[PlanningAgent, Request]:
    """A planner, and a request in which its partner has proposed."""
    agent = PlanningAgent("p+plan", policy, how, "dond", slots=4, context=512, max_new_tokens=8, **settings)  # type: ignore[arg-type]
    text = dond_texts.prompt(COUNTS, OWN, 1.0, dond_v0.Style.COMPACT) + "them: i want 2 books\nthem: [propose]\n"
    numbers = tuple(map(str, range(11)))
    questions = tuple(Question(f"<{item}?>", numbers, "0") for item in dond_rules.ITEMS)
    return agent, Request((0, "player_0"), 7, "negotiator", 3, TurnKind.SPEAK, text, questions=questions)


# --- Whole games ---


@cache
def negotiator() -> Policy:
    """Knows enough of the grammar for messages that are heard, for proposals and for errors."""
    policy = tiny_policy(context=1024)
    agent = scripted("dond", tokens=policy.tokens)
    games = rollout(draw_games(9, 9, count=6), everyone(agent), COMPACT, 6)
    batch = collate(rows_of(games, {"scripted"}), {})
    return teach(policy, batch.tokens, batch.reply, 60)
