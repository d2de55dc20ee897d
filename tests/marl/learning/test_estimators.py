"""Estimators without a critic: numbers by hand, a bandit whose gradient is known, Kuhn poker, and the loop's part."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from experiments.setup.spec import run_spec
from marl.agents.model import ModelAgent
from marl.common.errors import UserError
from marl.learning.advantages import Credit, add_advantages
from marl.learning.batch import collate, rows_of
from marl.learning.estimators import DECAY, ESTIMATORS, Baselines, rae
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import Seeds
from marl.types import TokenBatch, Turn
from tests.composing import config_hash, configure
from tests.marl.batches import chose, paying, said, talk
from tests.marl.hint import Hint, hint_policy
from tests.marl.kuhn import DEALS, ENDS, HISTORIES, exploitability, payoff

PLAIN = Credit(normalize=False)


def credited(
    name: str, plays: list[list[Turn]], credit: Credit = PLAIN, scale: bool = True, **weights: float
) -> tuple[TokenBatch, Baselines]:
    """Plays of one seat from one start."""
    seats = rows_of([talk(turns) for turns in plays], {"learner"})
    pays = paying(**(weights or {"game": 1.0}))
    baselines = Baselines(name, seats, {}, scale)
    return add_advantages(collate(seats, pays), pays, credit, baselines), baselines


def at_decisions(batch: TokenBatch) -> list[list[float]]:
    return [batch.advantages[b, batch.decision[b]].tolist() for b in range(batch.shape[0])]


# Three plays: returns 1, 2 and 6; the second pays 2 at its first turn, so that 0 is left at its second.
PLAYS = [[chose(0, game=0.0), chose(1, game=1.0)], [chose(0, game=2.0), chose(1, game=0.0)], [chose(0, game=6.0)]]


def test_advantages_by_hand() -> None:
    """Advantages are what is paid from a turn on, less the play's baseline, however many turns the play has. The
    baseline is the mean of the other plays (RLOO) or of all plays (GRPO)."""
    batch, found = credited("rloo", PLAYS)
    assert at_decisions(batch) == [[1 - 4, 1 - 4], [2 - 3.5, 0 - 3.5], [6 - 1.5]]
    assert not batch.returns.any() and found.metrics == {"groups/flat": 0.0}
    batch, _ = credited("grpo", PLAYS, scale=False)
    assert at_decisions(batch) == [[1 - 3, 1 - 3], [2 - 3, 0 - 3], [6 - 3]]
    batch, _ = credited("grpo", PLAYS)
    spread = math.sqrt((4 + 1 + 9) / 2)
    assert [a for own in at_decisions(batch) for a in own] == pytest.approx([a / spread for a in (-2, -2, -1, -3, 3)])
    batch, _ = credited("rloo", [[chose(0, game=0.0), chose(1, game=1.0)], [chose(0)]], Credit(0.5, normalize=False))
    assert at_decisions(batch) == [[0.5, 1.0], [-0.5]]  # discounted from turn to turn


def test_the_running_mean_of_a_role_by_hand() -> None:
    """A game's plays are no part of their own baselines; the mean goes on where it stood."""
    running: dict[str, float] = {}
    games = [("x", "crew"), ("x", "crew"), ("x", "imposter"), ("y", "crew"), ("y", "imposter")]
    found = rae([1.0, 0.0, 2.0, 1.0, 0.0], games, running)
    crew, imposter = 0.05 * 0.5, 0.05 * 2.0
    assert found == pytest.approx([0, 0, 0, crew, imposter])
    assert running == pytest.approx({"crew": 0.95 * crew + 0.05, "imposter": 0.95 * imposter})
    assert rae([5.0], [("z", "crew")], running) == pytest.approx([0.95 * crew + 0.05]) and DECAY == 0.95


@pytest.mark.parametrize("name", ["rloo", "grpo"])
@pytest.mark.parametrize("plays", [[[chose(0, game=0.3)]] * 4, [[chose(0, game=2.0)]]], ids=["no spread", "one play"])
def test_a_group_without_anything_to_compare_is_counted_and_teaches_nothing(name: str, plays: list[list[Turn]]) -> None:
    batch, found = credited(name, plays)
    assert not batch.advantages.any() and found.metrics == {"groups/flat": 1.0}


@pytest.mark.parametrize("name", ["rloo", "grpo"])
def test_normalising_leaves_a_group_without_spread_at_0(name: str) -> None:
    """The batch's mean is not its own: plays of another group that differ in length move it."""
    plays = [(1, [chose(0), chose(1, game=1.0)]), (1, [chose(0)]), (2, [chose(0, game=0.5)]), (2, [chose(0, game=0.5)])]
    seats = rows_of([replace(talk(turns), seed=seed) for seed, turns in plays], {"learner"})
    found = Baselines(name, seats, {})
    batch = add_advantages(collate(seats, paying(game=1.0)), paying(game=1.0), Credit(), found)
    size = math.sqrt(3) / 3  # of 1, 1 and -1: their mean is 1/3, their deviation the root of 4/3
    (first, second), (third,), *flat = at_decisions(batch)
    assert (first, second, third) == pytest.approx((size, size, -2 * size)) and flat == [[0.0], [0.0]]
    assert found.metrics == {"groups/flat": 0.5}


def test_groups_are_plays_of_one_seat_from_one_start() -> None:
    """The two seats of a game are in different groups; rows without a turn are in none."""
    games = [
        replace(talk([chose(0, game=r)], [chose(1, game=-r)], []), seed=seed)
        for seed, r in ((1, 1.0), (1, 3.0), (2, 5.0), (2, 9.0))
    ]
    seats = rows_of(games, {"learner"})
    found = Baselines("rloo", seats, {})
    batch = add_advantages(collate(seats, paying(game=1.0)), paying(game=1.0), PLAIN, found)
    assert at_decisions(batch) == [[-2], [2], [], [2], [-2], [], [-4], [4], [], [4], [-4], []]
    assert found.metrics == {"groups/flat": 0.0}


@pytest.mark.parametrize("name", ["rloo", "grpo", "rae"])
def test_speech_is_credited_as_with_a_critic(name: str) -> None:
    plays = [[said(0, game=1.0, speaking=0.25)], [said(0, game=3.0, speaking=-0.25)]]
    weights = {"game": 1.0, "speaking": 2.0}
    game, _ = credited(name, plays, game=1.0)
    batch, _ = credited(name, plays, **weights)
    size = 2 * math.sqrt(0.5)
    added = (batch.advantages - game.advantages) * batch.message
    assert added[0, 2:].tolist() == pytest.approx([size] * 3, rel=1e-5) and added[1, 2].item() == pytest.approx(-size)
    alone, _ = credited(name, plays, Credit(normalize=False, speech="separate_only"), **weights)
    assert alone.advantages[0, 2].item() == pytest.approx(size)


# -- a bandit: two arms, the second of which pays 1 with probability .8, the first with .5 -----------------------------

P, PAYS, K = 0.3, (0.5, 0.8), 4  # the policy's probability of the second arm; plays of a group
EXACT = P * (1 - P) * (PAYS[1] - PAYS[0])  # of the expected reward, with respect to the second arm's logit


def bandit(name: str, scale: bool = True) -> float:
    """The estimate over all groups of K plays, each as often as the policy plays it and is paid so."""
    chances, games, scores = [], [], []
    for number, plays in enumerate(product(product((0, 1), (0.0, 1.0)), repeat=K)):  # (arm, pay)
        chance = 1.0
        for arm, pay in plays:
            chance *= (P if arm else 1 - P) * (PAYS[arm] if pay else 1 - PAYS[arm])
        chances += [chance] * K
        games += [replace(talk([chose(0, game=pay)]), seed=number) for _, pay in plays]
        scores += [1 - P if arm else -P for arm, _ in plays]
    seats, rewards = rows_of(games, {"learner"}), paying(game=1.0)
    estimate = None if name == "gae" else Baselines(name, seats, {}, scale)
    batch = add_advantages(collate(seats, rewards), rewards, PLAIN, estimate)
    advantages = batch.advantages[batch.decision].double()
    return float((advantages * torch.tensor(scores) * torch.tensor(chances)).sum() / K)


def test_the_gradient_of_a_bandit_is_exact() -> None:
    """GRPO is the exception: its mean holds the play itself, and dividing by the group's standard deviation is a known
    bias."""
    assert bandit("gae") == pytest.approx(EXACT, abs=1e-6)
    assert bandit("rloo") == pytest.approx(EXACT, abs=1e-6)
    assert bandit("grpo", scale=False) == pytest.approx(EXACT * (K - 1) / K, abs=1e-6)
    assert bandit("grpo") == pytest.approx(0.088375, abs=1e-6)  # by a plain loop over all groups


def gradients(name: str, scale: bool = True, batches: int = 40, size: int = 400) -> np.ndarray:
    """The estimate of each of some batches."""
    rng, running, found = np.random.default_rng(0), {}, []
    for _ in range(batches):
        arms = rng.random(size) < P
        pays = rng.random(size) < np.where(arms, PAYS[1], PAYS[0])
        games = [replace(talk([chose(0, game=float(r))]), seed=i // K) for i, r in enumerate(pays)]
        seats, rewards = rows_of(games, {"learner"}), paying(game=1.0)
        estimate = Baselines(name, seats, running, scale)
        batch = add_advantages(collate(seats, rewards), rewards, PLAIN, estimate)
        advantages = batch.advantages[batch.decision].numpy()
        found.append(float((advantages * np.where(arms, 1 - P, -P)).mean()))
    return np.array(found)


@pytest.mark.slow
def test_the_gradient_of_a_bandit_by_a_running_mean_is_exact() -> None:
    """RAE's baseline remembers earlier plays, so its plays are drawn."""
    found = gradients("rae")
    error = found.std(ddof=1) / math.sqrt(len(found))
    assert abs(found.mean() - EXACT) < 3 * error and error < 0.1 * EXACT


# -- Kuhn poker --------------------------------------------------------------------------------------------------------
def logistic(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_self_play_of_kuhn_poker_by_rae_ends_near_an_equilibrium(seed: int) -> None:
    """A table of logits, trained by its own games with an entropy bonus that falls to 0: the mean policy of the second
    half is exploitable by less than .05 of the ante, from .46."""
    rng, running, rounds, games = np.random.default_rng(seed), dict[str, float](), 800, 512
    logits = {(card, done): 0.0 for card in range(3) for done in HISTORIES}
    mean = dict.fromkeys(logits, 0.0)
    for number in range(rounds):
        left, bets = 1 - number / rounds, {at: logistic(logit) for at, logit in logits.items()}
        plays: list[list[tuple[tuple[int, str], bool]]] = []
        totals: list[float] = []
        for deal in rng.integers(len(DEALS), size=games):
            done, own = "", ([], [])
            while done not in ENDS:
                at = (DEALS[deal][len(done) % 2], done)
                bet = bool(rng.random() < bets[at])
                own[len(done) % 2].append((at, bet))
                done += "b" if bet else "p"
            plays += own
            won = payoff(DEALS[deal], done)
            totals += [won, -won]
        baselines = rae(totals, [(i // 2, ("first", "second")[i % 2]) for i in range(2 * games)], running)
        gradient = dict.fromkeys(logits, 0.0)
        for play, total, baseline in zip(plays, totals, baselines, strict=True):
            for at, bet in play:
                gradient[at] += (total - baseline) * (bet - bets[at])
                gradient[at] -= 0.1 * left * logits[at] * bets[at] * (1 - bets[at])
        for at in logits:
            logits[at] = float(np.clip(logits[at] + 4 * left * gradient[at] / games, -6, 6))
            mean[at] += bets[at] / (rounds // 2) * (number >= rounds // 2)
    left_over = exploitability(lambda card, done: mean[card, done])
    assert left_over < 0.05
    assert running["first"] == pytest.approx(-1 / 18, abs=0.5)  # the value of the game, as twenty games tell it


def test_an_equilibrium_of_kuhn_poker_cannot_be_exploited() -> None:
    a = 0.2
    bets = {
        (0, ""): a, (1, ""): 0, (2, ""): 3 * a, (0, "pb"): 0, (1, "pb"): a + 1 / 3, (2, "pb"): 1,
        (0, "p"): 1 / 3, (1, "p"): 0, (2, "p"): 1, (0, "b"): 0, (1, "b"): 1 / 3, (2, "b"): 1,
    }  # fmt: skip
    assert exploitability(lambda card, done: bets[card, done]) == pytest.approx(0, abs=1e-9)
    assert exploitability(lambda card, done: 0.5) == pytest.approx(11 / 24)


# -- the loop's part ---------------------------------------------------------------------------------------------------
def test_plays_of_a_group_begin_alike_and_go_different_ways() -> None:
    agent = ModelAgent("learner", hint_policy(0), slots=32, context=32, max_new_tokens=1)
    games = Seeds.of(3).draw(0, 16, group=8)
    assert [g.seed for g in games] == [g.seed for g in Seeds.of(3).draw(0, 2) for _ in range(8)]
    episodes = rollout(games, everyone(agent), Hint, 16)
    for group in (episodes[:8], episodes[8:]):
        assert len({str(e.facts) for e in group}) == 1 and len({e.turns[0].text for e in group}) > 1
    assert Seeds.of(3).draw(0, 4) == Seeds.of(3).draw(0, 4, group=1)


def test_without_a_critic_nothing_of_it_is_trained_or_taken() -> None:
    spec = run_spec(configure("train", "algo.advantage=rloo", "algo.group=4"))
    assert run_spec(configure("train")).losses.keys() - spec.losses.keys() == {"value"}  # entropy is still measured
    with pytest.raises(UserError, match=r"model\.critic=privileged: algo.advantage=rae has no critic; must be private"):
        run_spec(configure("train", "algo.advantage=rae", "model.critic=privileged"))
    with pytest.raises(UserError, match=r"algo.group=5: algo.games=192 cannot be split into such groups; must"):
        run_spec(configure("train", "algo.advantage=grpo", "algo.group=5"))
    assert config_hash(configure("train", "algo.advantage=gae", "algo.group=1")) == config_hash(configure("train"))
    assert len({config_hash(configure("train", f"algo.advantage={n}", "algo.group=2")) for n in ESTIMATORS}) == 4
