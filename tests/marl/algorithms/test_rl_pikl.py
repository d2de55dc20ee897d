"""Learning from plans: where the plan is known, and whole iterations of both loops that learn from one."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from envs.among_us import texts as among_us_texts
from envs.core import TurnKind
from marl.agents.base import Request
from marl.algorithms import training as training_module
from marl.algorithms.ppo import PPOConfig, train_ppo
from marl.algorithms.rl_pikl import VALUES, RLPiklConfig, as_expected, expected_votes, train_rl_pikl
from marl.algorithms.training import Training
from marl.learning.advantages import Credit, add_advantages
from marl.learning.batch import collate, rows_of
from marl.learning.config import UpdateConfig
from marl.learning.forward import forward
from marl.learning.update import Learner, make_optimizer, update
from marl.losses import Loss
from marl.losses.listening import ListeningLoss
from marl.losses.plan import PlanLoss
from marl.losses.policy import PolicyLoss
from marl.losses.value import ValueLoss
from marl.model.policy import Policy, tiny_lm
from marl.planning.planner import PlannerConfig
from marl.rewards import add_rewards
from marl.rewards.game import GameReward
from marl.rollout.cast import RoleConfig
from marl.rollout.games import env_maker
from marl.rollout.seeds import Seeds
from marl.types import Episode, Payment, TokenBatch, Turn
from tests.marl.batches import PLANNED, paying, proposed, said, talk
from tests.marl.models import small_tokens, tiny_policy, with_critic
from tests.marl.planners import MEETINGS, config, negotiator, proposing

LIMITS: dict[str, Any] = {"games": 4, "concurrency": 4, "max_new_tokens": 24, "context": 1024}
SHORT = env_maker({"game": "dond", "style": "compact", "objective": 1.0, "max_entries": 6})


def answers(policy: Policy, how: PlannerConfig, seeds: Sequence[int]) -> list[Episode]:
    """The same proposal by seats that differ in their seed alone, as games of one turn."""
    agent, request = proposing(policy, how)
    episodes = []
    for seed in seeds:
        key = (seed, "you")
        (reply,) = agent.act([Request(key, seed, "negotiator", 3, TurnKind.SPEAK, request.text, (), request.questions)])
        stream, _ = agent.finish([key])[key]
        turn = Turn("you", "negotiator", 3, TurnKind.SPEAK, reply.text, reply.ids, reply.start, reply.logprobs,
                    planned=reply.planned)  # fmt: skip
        episodes.append(
            Episode(seed, {"you": "p"}, {"you": "negotiator"}, {"you": stream}, (turn,), (), (), {}, 1)
        )  # fmt: skip
    return episodes


def off(policy: Policy, episodes: Sequence[Episode]) -> float:
    """Mean KL(plan || policy), in nats, over the tokens of these claims where there is a choice."""
    batch = collate([(episode, "you") for episode in episodes], {}, drawn_from_plans=True)
    with torch.no_grad():
        found = forward(policy, batch, 1.0, {"planned": False}).planned
    at = batch.planned
    kl: Tensor = torch.special.entr(batch.plan[at]).neg().sum(-1) - (
        batch.plan[at] * found[at].masked_fill(batch.plan_ids[at] < 0, 0.0)
    ).sum(-1)
    return float(kl.mean())


@pytest.mark.parametrize("form", ["cross_entropy", pytest.param("kl", marks=pytest.mark.slow)])  # gradients are equal
def test_the_policy_comes_to_play_the_plan(form: str) -> None:
    """An untrained model's claims, toward a plan that the rules, the exact prior and its own anchor make."""
    policy = tiny_policy()
    episodes = answers(policy, config(0.1, belief="prior", others="anchor"), range(3))
    assert len({e.turns[0].planned.plan for e in episodes if e.turns[0].planned}) == 1  # they all read the same
    before = off(policy, episodes)
    batch = collate([(episode, "you") for episode in episodes], {}, drawn_from_plans=True)
    settings = UpdateConfig(learning_rate=3e-3, epochs=120, minibatches=1, max_grad_norm=10.0, token_budget=8192)
    update(policy, None, batch, {"plan": PlanLoss(form=form)}, make_optimizer(policy, settings), settings,
           torch.Generator().manual_seed(0))  # fmt: skip
    assert before > 3 and off(policy, episodes) < 0.03, (before, off(policy, episodes))


# --- What the critic learns ---


def test_a_claim_is_worth_what_its_plan_expected() -> None:
    """Plan (1/4, 3/4, 0) of values (0, 1, 1/2): 3/4 points, at a tenth of a point a reward and weight 2."""
    game = talk([said(0), proposed(2)], [said(1), proposed(3)])
    turns = tuple(replace(t, planned=replace(PLANNED, played=True)) if t.step == 2 else t for t in game.turns)
    game = replace(game, turns=turns, payments=(Payment("a", 3, 4.0), Payment("b", 3, 6.0)))
    noted = replace(game, turns=tuple(replace(t, planned=t.planned and PLANNED) for t in turns))  # not what was played

    def returns(episode: Episode) -> list[list[float]]:
        (valued,) = add_rewards([as_expected(episode)], {"game": GameReward(scale=0.1)})
        batch = collate([(valued, "a"), (valued, "b")], paying(game=2.0), drawn_from_plans=True)
        batch = add_advantages(batch, paying(game=2.0), Credit(gamma=0.5, gae_lambda=1.0))
        return [batch.returns[b, batch.decision[b]].tolist() for b in range(2)]

    assert returns(game) == [pytest.approx([0.075, 0.15]), pytest.approx([0.6, 1.2])]
    assert returns(noted) == [pytest.approx([0.4, 0.8]), pytest.approx([0.6, 1.2])]


def test_a_vote_is_worth_what_its_plan_expected() -> None:
    """Plans expect the two votes to eject the imposter with 3/4 and 1/4. The first vote did, for a reward of 1; after
    the other the game went on and paid 1/2, or nothing."""

    def game(plan: tuple[float, ...], ending: str, paid: float) -> Episode:
        planned = replace(PLANNED, plan=plan, values=(1.0, 0.0, 0.0), played=True)
        one = talk([said(0), proposed(2)], [said(1), proposed(3)])
        turns = tuple(replace(t, planned=planned) if t.step == 3 else t for t in one.turns)
        return replace(one, turns=turns, payments=(Payment("b", 3, paid),), outcome={"how": ending})

    games = [game((0.75, 0.25, 0.0), "ejection", 1.0), game((0.25, 0.75, 0.0), "tasks", 0.5)]
    games += [game((0.25, 0.75, 0.0), "parity", 0.0), game((0.25, 0.75, 0.0), "time", 0.0)]

    def returns(games: Sequence[Episode]) -> list[list[float]]:
        seats = [(episode, "b") for episode in add_rewards(games, {"game": GameReward(scale=1.0)})]
        batch = collate(seats, paying(game=1.0), drawn_from_plans=True)
        batch = add_advantages(batch, paying(game=1.0), Credit(gae_lambda=1.0))
        found = expected_votes(batch, seats)
        return [found.returns[b, found.decision[b]].tolist() for b in range(len(seats))]

    # Votes that decided nothing paid 1/6 on average. What came before a vote learns from what was paid.
    assert returns(games) == [
        pytest.approx([1.0, 0.75 + 0.25 / 6]), pytest.approx([0.5, 0.25 + 0.75 * 0.5]),
        pytest.approx([0.0, 0.25]), pytest.approx([0.0, 0.25]),
    ]  # fmt: skip
    assert returns(games[1:]) == [pytest.approx([0.5, 0.5]), pytest.approx([0, 0]), pytest.approx([0, 0])]
    assert returns(games[:1]) == [pytest.approx([1.0, 1.0])]


@pytest.mark.parametrize("value", VALUES)
def test_an_iteration_regresses_the_critic_to_the_chosen_value(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[TokenBatch] = []

    def spy(policy: Policy, reference: Policy, batch: TokenBatch, *rest: Any) -> dict[str, float]:
        batches.append(batch)
        return {}

    monkeypatch.setattr(training_module, "update", spy)
    ((_, episodes),) = rl_pikl(learner(), 1, gamma=0.5, value=value)
    (batch,) = batches
    rows, different = rows_of(episodes, {"learner"}), 0
    assert len(rows) == batch.shape[0]
    for b, (episode, agent) in enumerate(rows):
        turns = [t for t in episode.turns if t.agent == agent]
        worth = sum(p.amount for p in episode.payments if p.agent == agent)
        if turns and turns[-1].planned and value == "plan":
            expected = sum(p * v for p, v in zip(turns[-1].planned.plan, turns[-1].planned.values, strict=True))
            different, worth = different + (abs(expected - worth) > 0.01), expected
        discounted = [2 * worth * 0.5**k for k in range(len(turns))][::-1]
        assert batch.returns[b, batch.decision[b]].tolist() == pytest.approx(discounted, abs=1e-4)
    assert (different > 0) == (value == "plan")


# --- Whole iterations ---


def identical(a: Policy, b: Policy) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def learner() -> Learner:
    policy, anchor = copy.deepcopy(negotiator()), copy.deepcopy(negotiator())
    return Learner("learner", policy, anchor, make_optimizer(policy, UpdateConfig(learning_rate=1e-3)))


SEEDS = Seeds.of(0)


def common(
    seen: list[tuple[dict[str, float], Sequence[Episode]]], start: int = 0, seeds: Seeds = SEEDS
) -> dict[str, Any]:
    return {
        "game": "dond", "make_env": SHORT, "cast": {"negotiator": RoleConfig()}, "frozen": {}, "seeds": seeds,
        "start": start, "after": lambda iteration, metrics, episodes: seen.append((metrics, episodes)),
    }  # fmt: skip


def rl_pikl(
    one: Learner, iterations: int, start: int = 0, seeds: Seeds = SEEDS, **settings: Any
) -> list[tuple[dict[str, float], Sequence[Episode]]]:
    seen: list[tuple[dict[str, float], Sequence[Episode]]] = []
    losses: dict[str, Loss] = {
        "plan": PlanLoss(form="cross_entropy"), "value": ValueLoss(), "listening": ListeningLoss(weight=0.3)
    }  # fmt: skip
    how = RLPiklConfig(iterations=iterations, planner=config(0.1, iterations=10), anneal_lr=False,
                       **settings, **LIMITS)  # fmt: skip
    train_rl_pikl(Training([one], rewards=paying(game=2.0), losses=losses, **common(seen, start, seeds)), how)
    return seen


@pytest.fixture(scope="module")
def trained() -> tuple[Learner, list[tuple[dict[str, float], Sequence[Episode]]]]:
    """Two iterations."""
    one = learner()
    return one, rl_pikl(one, 2)


def test_iterations_play_the_plan_and_learn_it_while_the_anchor_stays(trained: Any) -> None:
    one, ((found, episodes), (_, again)) = trained
    planned = [t.planned for e in episodes for t in e.turns if t.planned]
    assert planned and all(p.played for p in planned)
    assert {"loss/plan", "loss/value", "loss/listening", "game/score"} <= found.keys() and "loss/policy" not in found
    assert not identical(one.policy, one.reference) and identical(negotiator(), one.reference)
    # a plan of the second iteration is near the frozen anchor, not near the policy as it is by then
    turn, episode = next((t, e) for e in again for t in e.turns if t.planned)
    assert turn.planned is not None
    stream = episode.streams[turn.agent].tokens[: turn.start]
    scores = []
    for ids in turn.planned.ids:
        with torch.no_grad():
            logits = one.reference.logits(one.reference.hidden(torch.tensor([[*stream, *ids]])))[0, turn.start - 1 : -1]
        shaped = one.reference.speech_logits(logits, 1.0).log_softmax(-1)
        scores.append(float(shaped.gather(1, torch.tensor(ids)[:, None]).sum()))
    np.testing.assert_allclose(turn.planned.anchor, torch.tensor(scores).double().softmax(0), atol=1e-4)


def test_a_stopped_run_goes_on_as_if_never_stopped_and_rows_have_their_own_seed(trained: Any) -> None:
    whole, ((_, episodes), _) = trained
    halves, other = learner(), learner()
    ((_, first),) = rl_pikl(halves, 1)
    ((_, again),) = rl_pikl(other, 1, seeds=Seeds(0, None, 1))
    for games in (first, again):
        assert [[t.text for t in e.turns] for e in games] == [[t.text for t in e.turns] for e in episodes]
    assert not identical(halves.policy, other.policy)
    rl_pikl(halves, 2, start=1)
    assert identical(whole.policy, halves.policy)


def ppo(plan: PlanLoss | None) -> tuple[Policy, dict[str, float], Sequence[Episode]]:
    """An iteration of Among Us, where all seats learn, and crewmates' votes can be planned."""
    tokens = small_tokens(among_us_texts.COMPACT_TOKENS)
    lm = tiny_lm(tokens.size, hidden_size=32, layers=1, intermediate_size=64, context=1024, generator_seed=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # of the value head
        policy = with_critic(Policy(lm, tokens))
    one = Learner("learner", policy, copy.deepcopy(policy), make_optimizer(policy, UpdateConfig(learning_rate=1e-3)))
    losses: dict[str, Loss] = {"policy": PolicyLoss(), "value": ValueLoss(), **({"plan": plan} if plan else {})}
    how = PPOConfig(iterations=1, games=3, concurrency=3, max_new_tokens=4, context=1024,
                    planner=config(0.1, iterations=3, choose="own"))  # fmt: skip
    seen: list[tuple[dict[str, float], Sequence[Episode]]] = []
    cast = {"crewmate": RoleConfig(), "imposter": RoleConfig()}
    settings = {**common(seen), "game": "among_us", "cast": cast, "make_env": MEETINGS}
    train_ppo(Training([one], rewards={"game": GameReward(scale=1.0)}, losses=losses, **settings), how)
    return (one.policy, *seen[0])


def test_in_ppo_a_plan_term_of_weight_zero_is_measured_and_changes_no_bit() -> None:
    without, other, same = ppo(None)
    measured, found, episodes = ppo(PlanLoss(weight=0.0))
    assert identical(without, measured)
    noted = [t.planned for e in episodes for t in e.turns if t.planned]
    assert noted and not any(planned.played for planned in noted)
    assert found["loss/plan"] > 0 and "loss/plan" not in other
    assert [[replace(t, planned=None) for t in e.turns] for e in episodes] == [list(e.turns) for e in same]
