"""Casts: who sits where and how often, and which learners learn in an iteration."""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from experiments.setup.config import EvalConfig, cast_of
from marl.agents.base import Agent, Key, Reply, Request
from marl.agents.model import ModelAgent
from marl.agents.text import TextAgent
from marl.algorithms.ppo import PPOConfig, train_ppo
from marl.common.errors import UserError
from marl.learning.config import UpdateConfig
from marl.learning.update import Learner, make_optimizer
from marl.losses import Loss
from marl.losses.kl import KLLoss
from marl.losses.listening import ListeningLoss
from marl.losses.policy import PolicyLoss
from marl.losses.value import ValueLoss
from marl.model.policy import Policy
from marl.rewards import Reward
from marl.rewards.game import GameReward
from marl.rewards.speaking import SpeakingReward
from marl.rollout.cast import OFF, RoleConfig, by_role, cast_settings, learners_of, players_of, seats_per_player
from marl.rollout.games import env_maker, scripted
from marl.rollout.seeds import GAMES, Game, draw_games
from marl.storage.checkpoint import optimizer_tensors
from marl.types import Belief, Episode, Stream
from tests.marl.hint import hint_policy, training
from tests.marl.updates import identical

DOND = env_maker({"game": "dond", "style": "compact"})
AMONG_US = env_maker({"game": "among_us", "style": "compact", "players": 5, "imposters": 1})


def named(*names: str) -> dict[str, Agent]:
    """Players of these names, who are only looked at."""
    agents: dict[str, Agent] = {name: TextAgent(name, scripted("dond").make) for name in names}
    return agents


def casts(cast: Mapping[str, RoleConfig], env: Any, games: Sequence[Game]) -> list[dict[str, str]]:
    """Names of the players by seat, for each of the games."""
    seated = by_role(cast, named(*players_of(cast)))
    found = []
    for game in games:
        if len(cast) > 1:
            env.reset(seed=game.seed)
        found.append({seat: agent.name for seat, agent in seated(game, env).items()})
    return found


# -- seats -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("partners", "counts"),
    [(0.0, {0: 1.0}), (0.25, {0: 0.75, 1: 0.25}), (1.0, {1: 1.0}), (1.25, {1: 0.75, 2: 0.25}), (2.0, {2: 1.0})],
)
def test_partners_have_their_share_of_the_games_and_every_seat_its_turn(
    partners: float, counts: dict[int, float]
) -> None:
    games = draw_games(0, GAMES, count=1000)
    held = casts({"negotiator": RoleConfig(partners=partners)}, DOND(), games)
    assert all(set(seats) == {"player_0", "player_1"} for seats in held)
    found = Counter(list(seats.values()).count("base") for seats in held)
    assert set(found) == set(counts)
    for count, share in counts.items():
        assert abs(found[count] / 1000 - share) <= 4 * (share * (1 - share) / 1000) ** 0.5
    alone = [seats for seats in held if list(seats.values()).count("base") == 1]
    first = sum(seats["player_0"] == "base" for seats in alone)
    assert abs(first - len(alone) / 2) <= 2 * len(alone) ** 0.5  # four standard deviations


def test_the_same_game_has_the_same_cast() -> None:
    cast = {"crewmate": RoleConfig(partners=1.5), "imposter": RoleConfig("base", "random", 0.5)}
    games = draw_games(2, GAMES, count=200)
    once = casts(cast, AMONG_US(), games)
    assert once == casts(cast, AMONG_US(), games)
    assert once[::-1] == casts(cast, AMONG_US(), games[::-1])
    assert len({tuple(sorted(seats.items())) for seats in once}) > 40  # of 70
    assert {name for seats in once for name in seats.values()} == {"learner", "base", "random"}
    env = AMONG_US()
    for game, seats in zip(games, once, strict=True):
        _, infos = env.reset(seed=game.seed)
        assert all((seats[a] == "learner") <= (info["role"] == "crewmate") for a, info in infos.items())


@pytest.mark.parametrize(
    ("cast", "most"),
    [
        ({"crewmate": RoleConfig(partners=1), "imposter": RoleConfig("base")}, {"learner": 3, "base": 2}),
        ({"crewmate": RoleConfig(partners=1.25), "imposter": RoleConfig("rival")},
         {"learner": 3, "base": 2, "rival": 1}),
        ({"crewmate": RoleConfig(partners=4), "imposter": RoleConfig("rival", "base", 0.5)},
         {"learner": 0, "base": 5, "rival": 1}),
    ],
)  # fmt: skip
def test_seats_per_player_are_the_most_that_it_holds_in_a_game(
    cast: dict[str, RoleConfig], most: dict[str, int]
) -> None:
    assert seats_per_player(cast, AMONG_US()) == most
    held = [Counter(seats.values()) for seats in casts(cast, AMONG_US(), draw_games(3, GAMES, count=100))]
    assert {name: max(seats[name] for seats in held) for name in most} == most


def test_who_plays_and_who_learns() -> None:
    cast = {"crewmate": RoleConfig("rival", "random", 0.5), "imposter": RoleConfig("learner", "base", 0)}
    assert players_of(cast) == ["rival", "random", "learner"]  # a partner of no game is nobody
    assert learners_of(cast) == ["learner", "rival"]
    assert learners_of({"negotiator": RoleConfig("scripted", "rival", 0.5)}) == ["rival"]


def test_every_role_of_the_game_has_its_seats() -> None:
    with pytest.raises(UserError, match=r"roles crewmate; the game's are crewmate, imposter"):
        seats_per_player({"crewmate": RoleConfig()}, AMONG_US())


def test_evaluation_may_have_a_cast_of_its_own() -> None:
    cast = cast_of({"negotiator": {"player": "learner", "partner": "base", "partners": 0.5}})
    assert cast == {"negotiator": RoleConfig("learner", "base", 0.5)}
    assert EvalConfig().evaluation_cast(cast) == cast
    assert EvalConfig(cast={"negotiator": {"partners": 0}}).evaluation_cast(cast) == {"negotiator": RoleConfig()}
    with pytest.raises(UserError, match=r"eval\.cast\.negotiator\.friend is no setting of RoleConfig"):
        EvalConfig(cast={"negotiator": {"friend": "base"}}).evaluation_cast(cast)
    with pytest.raises(UserError, match=r"cast\.negotiator\.partners=some: must be a number"):
        cast_of({"negotiator": {"partners": "some"}})


# -- learners ----------------------------------------------------------------------------------------------------------

LOSSES: dict[str, Loss] = {
    "policy": PolicyLoss(), "value": ValueLoss(), "kl": KLLoss(), "listening": ListeningLoss(),
}  # fmt: skip
REWARDS: dict[str, Reward] = {"game": GameReward(scale=1.0), "speaking": SpeakingReward(weight=0.5)}
CONFIG = PPOConfig(
    iterations=1, games=16, concurrency=16, max_new_tokens=2, context=32,
    update=UpdateConfig(learning_rate=3e-3, minibatches=2),
)  # fmt: skip
APART = {"speaker": RoleConfig("learner"), "listener": RoleConfig("rival")}
Snapshot = dict[str, dict[str, Tensor]]


def learner(name: str, seed: int) -> Learner:
    policy = hint_policy(seed)
    return Learner(name, policy, copy.deepcopy(policy), make_optimizer(policy, CONFIG.update))


def state(of: Learner) -> dict[str, Tensor]:
    """Every number of its policy and its optimiser."""
    found = {f"policy.{name}": value for name, value in of.policy.state_dict().items()}
    found |= {f"optimizer.{name}": value for name, value in optimizer_tensors(of.optimizer).items()}
    return {name: value.clone() for name, value in found.items()}


def frozen(policy: Policy, name: str = "base") -> ModelAgent:
    return ModelAgent(name, policy, slots=CONFIG.games, context=CONFIG.context, max_new_tokens=CONFIG.max_new_tokens)


def train(
    learners: Sequence[Learner],
    cast: Mapping[str, RoleConfig],
    config: PPOConfig = CONFIG,
    opponents: Mapping[str, Agent] | None = None,
) -> tuple[list[Snapshot], list[dict[str, float]], list[Episode]]:
    """Trains; returns all states and the metrics after each iteration, and all episodes."""
    states, metrics, played = [], [], []

    def after(iteration: int, found: dict[str, float], episodes: Sequence[Episode]) -> None:
        states.append({each.name: state(each) for each in learners})
        metrics.append(found)
        played.extend(episodes)

    train_ppo(training(learners, LOSSES, rewards=REWARDS, cast=cast, frozen=opponents or {}, after=after), config)
    return states, metrics, played


def test_two_learn_at_once_as_each_would_beside_the_other_frozen() -> None:
    one, two = learner("learner", 0), learner("rival", 1)
    (both,), (metrics,), episodes = train([one, two], APART)
    second = {name.removeprefix("rival/") for name in metrics if name.startswith("rival/")}
    of_listeners = {"belief/accuracy", "belief/brier", "belief/log_loss", "choices/entropy", "loss/listening"}
    assert second - metrics.keys() == of_listeners and "update/grad_norm" in second
    assert all(
        e.players[a] == {"speaker": "learner", "listener": "rival"}[e.roles[a]] for e in episodes for a in e.roles
    )

    speaker, listener = learner("learner", 0), learner("rival", 1)
    cast = {"speaker": RoleConfig("learner"), "listener": RoleConfig("base")}
    (alone,), (own,), _ = train([speaker], cast, opponents={"base": frozen(hint_policy(1))})
    assert identical(both["learner"], alone["learner"])
    assert not identical(both["learner"], state(learner("learner", 0)))
    for name, value in own.items():
        assert name.startswith(("speed/", "time/", "rollout/")) or metrics[name] == value, name

    cast = {"speaker": RoleConfig("base"), "listener": RoleConfig("rival")}
    (alone,), (own,), _ = train([listener], cast, opponents={"base": frozen(hint_policy(0))})
    assert identical(both["rival"], alone["rival"])
    assert not identical(both["rival"], state(learner("rival", 1)))
    for name, value in own.items():
        assert name.startswith(("speed/", "time/", "rollout/")) or metrics[f"rival/{name}"] == value, name


def test_alternating_learners_stand_still_while_the_other_learns() -> None:
    one, two = learner("learner", 0), learner("rival", 1)
    before: Snapshot = {"learner": state(one), "rival": state(two)}
    states, metrics, _ = train([one, two], APART, replace(CONFIG, iterations=4, alternate=2))
    turns = ["learner", "learner", "rival", "rival"]
    for whose, now, found in zip(turns, states, metrics, strict=True):
        other = "rival" if whose == "learner" else "learner"
        assert not identical(now[whose], before[whose]) and identical(now[other], before[other])
        assert ("loss/policy" in found) == (whose == "learner")
        assert ("rival/loss/policy" in found) == (whose == "rival")
        assert "reward/speaking" in found and "rival/reward/game" in found  # both are measured all the time
        before = now


class Spoiled:
    """A frozen player whose own records are spoiled: what it sampled, log-probabilities, values, and what it read. Its
    words and beliefs, which others depend on, stay."""

    def __init__(self, player: ModelAgent) -> None:
        self.player, self.name, self.tokens = player, player.name, player.tokens

    def act(self, requests: Sequence[Request]) -> list[Reply]:
        replies = self.player.act(requests)
        return [replace(r, logprobs=(-99.0,) * len(r.ids), value=1e6, start=0, legal=()) for r in replies]

    def finish(self, keys: Sequence[Key]) -> dict[Key, tuple[Stream, list[Belief]]]:
        return {
            key: (Stream([0] * len(stream), stream.kinds), [replace(b, position=0) for b in beliefs])
            for key, (stream, beliefs) in self.player.finish(keys).items()
        }


def test_nothing_that_a_frozen_player_records_is_learned_from() -> None:
    cast = {"speaker": RoleConfig("learner", "base", 0.5), "listener": RoleConfig("learner", "base", 0.5)}
    config = replace(CONFIG, iterations=2)
    plain, _, episodes = train([learner("learner", 0)], cast, config, {"base": frozen(hint_policy(1))})
    spoiled, _, _ = train([learner("learner", 0)], cast, config, {"base": Spoiled(frozen(hint_policy(1)))})
    other, _, _ = train([learner("learner", 0)], cast, config, {"base": frozen(hint_policy(2))})
    assert identical(plain[-1]["learner"], spoiled[-1]["learner"])
    assert not identical(plain[-1]["learner"], other[-1]["learner"])  # but who it is matters
    assert any("base" in e.players.values() for e in episodes)


def test_past_selves_hold_the_partners_seats() -> None:
    cast = {"crewmate": RoleConfig(partners=1), "imposter": RoleConfig("rival", "random", 0.5, pool=4)}
    assert players_of(cast) == ["learner", "base", "rival", "past_rival"]
    assert seats_per_player(cast, AMONG_US()) == {"learner": 3, "base": 1, "rival": 1, "past_rival": 1}
    held = casts(cast, AMONG_US(), draw_games(1, 1, count=400))
    share = sum("past_rival" in of_game.values() for of_game in held) / len(held)
    assert share == pytest.approx(0.5, abs=0.08)
    same = casts({**cast, "imposter": RoleConfig("rival", "random", 0.5)}, AMONG_US(), draw_games(1, 1, count=400))
    turned = [{agent: {"past_rival": "random"}.get(name, name) for agent, name in of_game.items()} for of_game in held]
    assert turned == same  # nobody else changes seats


def test_evaluation_is_without_past_selves_and_nothing_is_written_of_what_is_off() -> None:
    pooled = RoleConfig("rival", "random", 0.5, pool=4, pick="wins")
    assert pooled.without_pool() == RoleConfig("rival", "random", 0.0)
    assert RoleConfig("rival", "random", 0.5).without_pool() == RoleConfig("rival", "random", 0.5)
    assert EvalConfig().evaluation_cast({"imposter": pooled}) == {"imposter": RoleConfig("rival", "random", 0.0)}
    assert cast_settings(RoleConfig()) == {"player": "learner", "partner": "base", "partners": 0.0}
    assert OFF.items() <= vars(RoleConfig()).items() and cast_settings(pooled)["pool"] == 4
