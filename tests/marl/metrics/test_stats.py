"""Intervals against closed forms, brute force and simulated coverage."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, norm, ttest_rel

from marl.common.errors import UserError
from marl.metrics.stats import (
    Interval,
    bootstrap_mean,
    bootstrap_ratio,
    games_needed,
    independent_difference,
    interquartile_mean,
    paired_difference,
    power,
    seed_mean,
    seeds_and_games,
    wilson,
)
from marl.metrics.tables import (
    ArmRun,
    TableRow,
    ablation_table,
    arm_differences,
    arm_ratios,
    bootstrap_table,
    format_table,
    iqm_table,
    profiles,
    read_figures,
    read_table,
    write_table,
)
from marl.metrics.wording import number


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_wilson_known_values() -> None:
    # 8 of 10: (0.8 + z²/20 ± z sqrt(0.016 + z²/400)) / (1 + z²/10) with z = 1.959964, worked out by hand.
    interval = wilson(8, 10)
    assert (interval.mean, interval.n) == (0.8, 10)
    assert interval.low == pytest.approx(0.490163, abs=1e-5)
    assert interval.high == pytest.approx(0.943317, abs=1e-5)
    assert wilson(0, 10).low == 0.0
    assert wilson(0, 10).high == pytest.approx(1.959964**2 / (10 + 1.959964**2), abs=1e-6)
    assert wilson(10, 10).high == 1.0


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_equals_scipy(case: tuple[int, int]) -> None:
    successes, n = case
    expected = binomtest(successes, n).proportion_ci(0.95, method="wilson")
    interval = wilson(successes, n)
    assert interval.low == pytest.approx(expected.low, abs=1e-9)
    assert interval.high == pytest.approx(expected.high, abs=1e-9)


def test_bootstrap_of_three_values_equals_the_27_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [0.0, 3.0, 9.0]
    means = sorted(sum(sample) / 3 for sample in itertools.product(values, repeat=3))
    # At the 40 % level both quantiles (30 %, 70 %) fall inside steps of the distribution, so draws cannot matter.
    monkeypatch.setattr("marl.metrics.stats.LEVEL", 0.4)
    monkeypatch.setattr("marl.metrics.stats.DRAWS", 20_000)
    interval = bootstrap_mean(values, rng=generator())
    assert interval == Interval(4.0, pytest.approx(means[8]), pytest.approx(means[18]), 3)


def test_clusters_are_resampled_whole() -> None:
    # Two games, one all zeros and one all ones: a resample holds 0, half or all ones, never anything between.
    values, games = [0, 0, 0, 1, 1, 1], [7, 7, 7, 2, 2, 2]
    interval = bootstrap_mean(values, games, rng=generator())
    assert interval == Interval(0.5, 0.0, 1.0, 2)
    unequal = bootstrap_mean([1, 1, 1, 5], ["a", "a", "a", "b"], rng=generator())  # clusters weigh by their values
    assert unequal == Interval(2.0, 1.0, 5.0, 2)
    assert bootstrap_ratio([1, 1], [1, 9], rng=generator()) == Interval(0.2, pytest.approx(1 / 9), 1.0, 2)
    single = bootstrap_mean(values, rng=generator())
    assert single.n == 6 and single.low > 0.0 and single.high < 1.0


def test_a_single_unit_has_no_interval() -> None:
    for interval in (
        bootstrap_mean([3.0], rng=generator()),
        bootstrap_mean([1, 5], [0, 0], rng=generator()),
        seed_mean([3.0]),
    ):
        assert interval.mean == 3.0 and interval.n == 1
        assert math.isnan(interval.low) and math.isnan(interval.high)


def test_nothing_to_average_is_an_error() -> None:
    with pytest.raises(ValueError, match="no observation"):
        bootstrap_mean([], rng=generator())
    with pytest.raises(ValueError, match="no observation"):
        bootstrap_ratio([1, 2], [0, 0], rng=generator())
    for nothing in ([], [[]], [1.0, 2.0]):
        with pytest.raises(ValueError, match="at least one"):
            seeds_and_games(nothing, rng=generator())


def test_resampling_in_parts_covers_all_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    values = generator(5).normal(size=50)
    whole = bootstrap_mean(values, rng=generator(1))
    assert bootstrap_mean(values, rng=generator(2)) != whole
    monkeypatch.setattr("marl.metrics.stats.DRAWS_AT_ONCE", 120)  # two draws at a time
    assert bootstrap_mean(values, rng=generator(1)) == whole


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marl.metrics.stats.DRAWS", 200)


@pytest.mark.usefixtures("few_draws")
def test_bootstrap_coverage() -> None:
    """40 correlated games of 5 turns: the interval over games covers 95 %, the one over turns does not."""
    rng, by_game, by_turn = generator(3), 0, 0
    games = np.repeat(np.arange(40), 5)
    for _ in range(400):
        values = rng.normal(size=40)[games] + 0.5 * rng.normal(size=200)
        clustered = bootstrap_mean(values, games, rng=rng)
        naive = bootstrap_mean(values, rng=rng)
        by_game += clustered.low <= 0 <= clustered.high
        by_turn += naive.low <= 0 <= naive.high
    assert 0.91 <= by_game / 400 <= 0.98
    assert by_turn / 400 <= 0.75


def test_seeds_and_games_by_hand() -> None:
    # Constant over games: only the seeds vary. One seed, or all alike: only the games do.
    assert seeds_and_games([[1, 1], [3, 3]], rng=generator()) == Interval(2.0, 1.0, 3.0, 2)
    assert seeds_and_games([[0, 1]], rng=generator()) == Interval(0.5, 0.0, 1.0, 1)
    assert seeds_and_games([[0, 1], [0, 1], [0, 1]], rng=generator()) == Interval(0.5, 0.0, 1.0, 3)


def test_seed_mean_by_hand() -> None:
    # Means 1, 2, 3: standard error 1/sqrt(3), t quantile 4.302653.
    assert seed_mean([1, 2, 3]) == Interval(
        2.0, pytest.approx(2 - 4.302653 / 3**0.5), pytest.approx(2 + 4.302653 / 3**0.5), 3
    )


def test_interquartile_mean_leaves_out_a_quarter_at_either_end() -> None:
    # Of eight seeds the two lowest and the two highest go: (3 + 4 + 5 + 6) / 4, however bad the worst seed is.
    found = interquartile_mean([-1000, 2, 3, 4, 5, 6, 7, 99], rng=generator())
    assert (found.mean, found.n) == (4.5, 8)
    assert interquartile_mean([1, 2, 9], rng=generator()).mean == 4.0  # of three none can go
    # A quarter of seven, rounded down, is one: (2 + 3 + 4 + 5 + 9) / 5, in whatever order they come.
    assert interquartile_mean([9, 3, 100, 1, 5, 2, 4], rng=generator()).mean == pytest.approx(4.6)
    single = interquartile_mean([7.0], rng=generator())
    assert single.mean == 7.0 and math.isnan(single.low)


def test_statistics_over_seeds_are_of_arms_that_have_several() -> None:
    def run(arm: str, seed: int, mean: float, **more: Interval) -> ArmRun:
        return ArmRun(arm, seed, {"score": Interval(mean, mean, mean, 100), **more})

    runs = [run("base", 0, 1.0), *(run("a", s, m, only=Interval(1, 1, 1, 9)) for s, m in enumerate((1, 2, 3, 40)))]
    runs += [run("b", 0, 2.0), run("b", 1, 4.0, only=Interval(1, 1, 1, 9))]
    rows = {(row.arm, row.metric): row for row in iqm_table(runs, ["score", "only"])}
    assert set(rows) == {("a", "score"), ("a", "only"), ("b", "score")}  # not every run of b has the other
    assert (rows["a", "score"].mean, rows["a", "score"].seeds, rows["a", "score"].games) == (2.5, 4, 400)
    assert iqm_table(runs, ["score"]) == iqm_table(runs, ["score"])
    found = profiles(runs, "score")
    assert [threshold for threshold, _ in found["a"]] == [1, 2, 3, 4, 40]
    assert (2, 0.75) in found["a"] and (2, 1.0) in found["b"] and (40, 0.0) in found["b"]
    assert iqm_table(runs[:2], ["score"]) == [] and profiles(runs[:2], "score") == {}


def test_bootstrap_of_a_difference_pairs_games_of_one_seed() -> None:
    """Luck that a game brings to both arms cancels out. Luck of a seed, and of a game in the difference, does not."""
    rng = generator(9)
    luck, lead = rng.normal(size=(3, 50)), np.array([[0.5], [1.0], [1.5]]) + 0.1 * rng.normal(size=50)
    mine = [ArmRun("a", seed, {}, {"score": list(x)}) for seed, x in enumerate(luck + lead)]
    theirs = [ArmRun("b", seed, {}, {"score": list(x)}) for seed, x in enumerate(luck)]
    others = [ArmRun("c", seed, {}, {"score": [1.0] * 40}) for seed in range(2)]  # played another number of games
    alone = [ArmRun("d", 0, {}, {"score": [1.0] * 50}), ArmRun("d", 7, {}, {"score": [1.0] * 50})]
    runs = [*mine, *theirs, *others, *alone]
    rows = bootstrap_table(runs, [("a", "b"), ("a", "c"), ("a", "d"), ("a", "nobody")])[4:]
    expected = seeds_and_games(lead, rng=generator())
    (row,) = rows  # behind the rows of the four arms
    assert (row.arm, row.metric, row.seeds, row.games) == ("a - b", "score", 3, 300)
    assert (row.mean, row.low, row.high) == pytest.approx((expected.mean, expected.low, expected.high))
    assert row.low < 0.8 and row.high > 1.2  # seeds are resampled, not games alone


def test_pairing_removes_the_shared_luck() -> None:
    luck = generator(1).normal(size=200)
    interval = paired_difference(luck + 0.1, luck, rng=generator())
    assert interval.low == pytest.approx(0.1) and interval.high == pytest.approx(0.1)
    with pytest.raises(ValueError, match="could not be broadcast"):
        paired_difference([1, 2], [1, 2, 3], rng=generator())


def test_number() -> None:
    values = (0.8792, 12.126, 498.0, 2745.0, -0.0001, -1.5, math.nan)
    assert [*map(number, values)] == ["0.879", "12.13", "498.0", "2745", "0.000", "-1.500", "–"]


def test_interval_survives_json() -> None:
    for interval in (Interval(0.5, 0.25, 0.75, 3), Interval(2.0, math.nan, math.nan, 1), Interval(0.0, 0.0, 0.0, 4)):
        assert str(Interval.from_json(interval.to_json())) == str(interval)
    assert Interval(2.0, math.nan, math.nan, 1).to_json() == {"mean": 2.0, "low": None, "high": None, "n": 1}


def test_format_table() -> None:
    table = format_table(
        {
            "base": {"game/score": Interval(4.25, 4.0, 4.5, 9), "game/agreement": Interval(0.5, 0.25, 0.75, 9)},
            "trained": {"game/score": Interval(12.0, 11.5, 12.5, 9)},
        }
    )
    assert table.splitlines() == [
        "                                base               trained",
        "──────────────  ────────────────────  ────────────────────",
        "game/score      4.250 [4.000, 4.500]  12.00 [11.50, 12.50]",
        "game/agreement  0.500 [0.250, 0.750]                     –",
    ]
    assert format_table({"base": {"a": Interval(1, 1, 1, 2), "b": Interval(2, 2, 2, 2)}}, ["b"]).count("\n") == 2


def runs() -> list[ArmRun]:
    def run(arm: str, seed: int, mean: float) -> ArmRun:
        return ArmRun(arm, seed, {"game/score": Interval(mean, mean - 1, mean + 1, 100)})

    return [
        run("full", 0, 11),
        run("full", 1, 12),
        run("full", 2, 13),
        run("none", 1, 9),
        run("none", 0, 9),
        run("none", 2, 9),
    ]


def test_ablation_table() -> None:
    full, none = ablation_table(runs())
    half = 4.302653 / 3**0.5
    assert full == TableRow("full", "game/score", 12.0, pytest.approx(12 - half), pytest.approx(12 + half), 3, 300)
    assert none == TableRow("none", "game/score", 9.0, 9.0, 9.0, 3, 300)
    # A single seed keeps the interval over its games.
    assert ablation_table(runs()[:1]) == [TableRow("full", "game/score", 11.0, 10.0, 12.0, 1, 100)]


@pytest.mark.parametrize(
    ("metric", "least", "most"),
    [
        ("talk/vocabulary", 0, math.inf), ("belief/last_brier", 0, 2), ("vote/skip", 0, 1),
        ("speech/belief_change", -math.inf, math.inf),
    ],
)  # fmt: skip
def test_intervals_stay_within_the_possible_means(metric: str, least: float, most: float) -> None:
    """Bounds are cut for several seeds, and for a single one whose evaluation was written without bounds."""
    several = [ArmRun("full", seed, {metric: Interval(seed % 2, 0.0, 1.0, 10)}) for seed in range(3)]
    (row,) = ablation_table(several)
    half = 4.302653 * (1 / 3) ** 0.5 / 3**0.5
    assert (row.low, row.high) == pytest.approx((max(1 / 3 - half, least), min(1 / 3 + half, most)))
    (row,) = ablation_table([ArmRun("full", 0, {metric: Interval(0.5, -3.0, 4.0, 10)})])
    assert (row.low, row.high) == (max(-3.0, least), min(4.0, most))


def test_a_share_that_all_seeds_agree_on_is_not_certain() -> None:
    """Never seen in 3,000 games: Wilson's interval, up to z^2 / (n + z^2). A mean that is no share stays as it is, and
    so does a share that no game can change: with four players a vote at random is right once in three times."""
    figures = {"errors/aborted": Interval(0, 0, 0.004, 1000), "talk/turns": Interval(3, 3, 3, 1000)}
    figures["vote/chance"] = Interval(1 / 3, 1 / 3, 1 / 3, 1000)
    figures["game/agreement"] = Interval(1, math.nan, math.nan, 1000)  # the spread is unknown at equal compute
    aborted, turns, chance, agreed = ablation_table([ArmRun("full", seed, figures) for seed in range(3)])
    z = float(norm.ppf(0.975))
    assert (agreed.low, agreed.high) == (pytest.approx(3000 / (3000 + z**2)), 1)
    assert (aborted.mean, aborted.low) == (0.0, 0.0) and aborted.high == pytest.approx(z**2 / (3000 + z**2))
    assert (turns.low, turns.high) == (3.0, 3.0) and (chance.low, chance.high) == (1 / 3, 1 / 3)


def test_rounding_does_not_make_seeds_that_agree_certain() -> None:
    """One case is 1 of 300 games in each of three seeds, published with six digits, so that their mean differs from
    each. The other is a chance of 1/3 by rule, whose resampled means differ in the last digit."""
    figures = {"errors/aborted": Interval(0.00333333, 0.000588709, 0.0186287, 300)}
    figures["vote/chance"] = Interval(1 / 3, 1 / 3 - 1e-16, 1 / 3 + 1e-16, 300)
    figures["talk/inverted_chance"] = Interval(0.0491671, 0.0481, 0.0502, 300)  # a mean, not a share of games
    aborted, chance, inverted = ablation_table([ArmRun("full", seed, figures) for seed in range(3)])
    expected = binomtest(3, 900).proportion_ci(0.95, method="wilson")
    assert (aborted.low, aborted.high) == pytest.approx((expected.low, expected.high))
    assert (chance.low, chance.high) == pytest.approx((1 / 3, 1 / 3))
    assert (inverted.low, inverted.high) == pytest.approx((0.0491671, 0.0491671))


def test_ablation_table_has_no_gaps() -> None:
    with pytest.raises(ValueError, match=r"'game/pareto' is missing from arm 'full', seeds \[0, 1, 2\]"):
        ablation_table(runs(), ["game/pareto"])
    with pytest.raises(ValueError, match="a seed more than once"):
        ablation_table([*runs(), runs()[0]])


def test_arm_differences_pair_by_seed() -> None:
    (row,) = arm_differences(runs(), [("full", "none"), ("full", "base")], ["game/score", "game/pareto"])
    half = 4.302653 / 3**0.5
    assert row == TableRow("full - none", "game/score", 3.0, pytest.approx(3 - half), pytest.approx(3 + half), 3, 600)
    # Seeds that only one of the arms has are left out: 11 - 9 and 12 - 9, in whatever order the runs come.
    (row,) = arm_differences([r for r in runs() if (r.arm, r.seed) != ("none", 2)], [("full", "none")], ["game/score"])
    assert (row.mean, row.seeds, row.games) == (2.5, 2, 400)
    assert row.high == pytest.approx(2.5 + 12.7062 * 0.5, abs=1e-3)
    assert arm_differences(runs()[:4], [("full", "none")], ["game/score"]) == []  # one seed in common


def test_arms_of_one_seed_are_paired_by_game() -> None:
    """Scores differ by 10 between games, but the arms differ by 1 or 2 in each game."""
    luck = 10.0 * np.arange(50)
    scores = {"full": luck + np.tile([1.0, 2.0], 25), "none": luck}
    arms = [
        ArmRun(arm, 4, {"game/score": bootstrap_mean(x, rng=np.random.default_rng(0))}, {"game/score": x.tolist()})
        for arm, x in scores.items()
    ]
    (row,) = arm_differences(arms, [("full", "none")], ["game/score", "game/pareto"])
    assert (row.arm, row.mean, row.seeds, row.games) == ("full - none", 1.5, 1, 100)
    assert 1.3 < row.low < 1.5 < row.high < 1.7
    (ratio,) = arm_ratios(arms, [("full", "none")], ["game/score"])
    expected = bootstrap_ratio(scores["full"], scores["none"], rng=generator())
    assert (ratio.arm, ratio.seeds, ratio.games) == ("full / none", 1, 100)
    assert (ratio.mean, ratio.low, ratio.high) == (expected.mean, expected.low, expected.high)
    for others in ([replace(arms[0], seed=5), arms[1]], [*arms, replace(arms[0], seed=5)]):  # other seeds
        assert arm_differences(others, [("full", "none")], ["game/score"]) == []
        assert arm_ratios(others, [("full", "none")], ["game/score"]) == []


def test_arm_ratios_pair_by_seed() -> None:
    """Twice and four times: the geometric mean is 2 ** 1.5. In logarithms the seeds' standard error is ln 2 / 2."""

    def wins(arm: str, *rates: float) -> list[ArmRun]:
        return [ArmRun(arm, seed, {"wins": Interval(rate, 0, 1, 100)}) for seed, rate in enumerate(rates)]

    arms = [*wins("RL", 0.6, 0.8), *wins("base", 0.3, 0.2, 0.9), *wins("never", 0.0, 0.5)]
    (row,) = arm_ratios(arms, [("RL", "base"), ("RL", "never"), ("never", "RL"), ("RL", "absent")], ["wins", "points"])
    middle, half = 1.5 * math.log(2), 12.706205 * math.log(2) / 2
    ends = pytest.approx(math.exp(middle - half)), pytest.approx(math.exp(middle + half))
    assert row == TableRow("RL / base", "wins", pytest.approx(2**1.5), *ends, 2, 400)
    (back,) = arm_ratios(arms, [("base", "RL")], ["wins"])
    assert (back.mean, back.low, back.high) == (
        pytest.approx(1 / row.mean), pytest.approx(1 / row.high), pytest.approx(1 / row.low)
    )  # fmt: skip


def test_table_file(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    write_table(path, ablation_table(runs())[1:])
    assert path.read_text() == "arm,metric,mean,low,high,seeds,games\nnone,game/score,9,9,9,3,300\n"
    assert read_table(path) == [TableRow("none", "game/score", 9.0, 9.0, 9.0, 3, 300)]
    assert list(tmp_path.iterdir()) == [path]


def test_games_needed_are_the_published_ones() -> None:
    """Rates of Sarkar et al., .55 and .59, need about 2,400 games an arm."""
    assert games_needed(0.55, 0.59, 1) == games_needed(0.59, 0.55, 1) == pytest.approx(2401, abs=2)
    assert games_needed(0.55, 0.59, 3, between=0.05) is None  # seeds that differ so much need more than three


@pytest.mark.filterwarnings("ignore:Precision loss")  # if all seeds of an arm agree
def test_power_is_how_often_the_test_finds_it() -> None:
    rng = np.random.default_rng(0)
    a, b, seeds, games, between = 0.4, 0.5, 4, 300, 0.04
    arms = [np.clip(rng.normal(rate, between, (20_000, seeds)), 0, 1) for rate in (a, b)]
    won = [rng.binomial(games, rates) / games for rates in arms]
    found = (ttest_rel(*won, axis=1).pvalue < 0.05).mean()
    assert power(a, b, seeds, games, between) == pytest.approx(found, abs=0.02)
    assert power(a, b, 1, 200) == pytest.approx(
        (np.abs(rng.binomial(200, a, 50_000) - rng.binomial(200, b, 50_000)) / 200
         > norm.ppf(0.975) * np.sqrt((a * (1 - a) + b * (1 - b)) / 200)).mean(), abs=0.02,
    )  # fmt: skip


@given(st.floats(0.05, 0.9), st.floats(0.02, 0.09), st.integers(2, 12), st.floats(0.0, 0.01))
def test_games_needed_is_the_first_number_that_is_enough(a: float, apart: float, seeds: int, between: float) -> None:
    games = games_needed(a, a + apart, seeds, between)
    if games is not None:
        assert power(a, a + apart, seeds, games, between) >= 0.8
        assert games == 1 or power(a, a + apart, seeds, games - 1, between) < 0.8


@pytest.mark.parametrize("text", ["{}", '{"metrics": {"a": {}}}', '{"metrics": []}', "[" * 100_000], ids=len)
def test_damaged_figures_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "cell.json").write_text(text)
    with pytest.raises(UserError, match=r"cell\.json"):
        read_figures(tmp_path / "cell.json")


def test_a_difference_of_independent_rates_is_newcombes() -> None:
    """56 of 70 against 48 of 80: .0524 to .3339 (Newcombe 1998, table II, method 10)."""
    found = independent_difference(wilson(56, 70), wilson(48, 80))
    assert (found.mean, found.low, found.high, found.n) == (
        pytest.approx(0.2), pytest.approx(0.0524, abs=5e-5), pytest.approx(0.3339, abs=5e-5), 150,
    )  # fmt: skip
