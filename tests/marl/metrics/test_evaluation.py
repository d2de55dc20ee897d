"""Metrics of games written out by hand, against figures worked out by hand."""

import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from envs.core import Style, TurnKind
from envs.dond import environment as dond_environment
from envs.dond import rules as dond_rules
from marl.metrics.beliefs import belief_by_message, belief_metrics, belief_table, exact_prior, grade
from marl.metrics.evaluation import conditions_from_json, error_metrics, evaluation_to_json, metrics, turn_metrics
from marl.metrics.games import among_us_metrics, dond_metrics
from marl.metrics.stats import Interval, wilson
from marl.metrics.talk import effective_number, talk_metrics, vocabulary
from marl.metrics.training import episode_metrics
from marl.report.views import topic
from marl.rollout.games import env_maker, scripted
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from marl.types import Payment, Turn
from tests.marl.episodes import (
    CONTEXT,
    aborted_game,
    beliefs,
    deal_game,
    ejection_game,
    episode,
    failed_game,
    imposter_game,
    meeting_game,
    message,
    refused,
)
from tests.marl.models import small_tokens

GAMES = [deal_game(), failed_game(), aborted_game()]


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def means(found: dict[str, Interval]) -> dict[str, float]:
    return {name: interval.mean for name, interval in found.items()}


def test_cooperative_figures() -> None:
    found = dond_metrics(GAMES, 1.0, rng())
    assert means(found) == pytest.approx(
        {
            "game/score": 13 / 3,
            "game/score_ceiling": 13,  # 1 book to player_1 (1), 1 hat to player_1 (3), 3 balls to player_0 (9)
            "game/points": 13 / 6,
            "game/joint": 13 / 3,
            "game/agreement": 1 / 3,
            "game/pareto": 1 / 3,
            "game/score_agreed": 13,
            "game/points_agreed": 6.5,
            "game/pareto_agreed": 1,
            "game/how/abort": 1 / 3,
            "game/how/deal": 1 / 3,
            "game/how/mismatch": 1 / 3,
        }
    )
    assert found["game/score"].n == 3 and found["game/score_agreed"].n == 1
    assert found["game/score"].low == 0 and found["game/score"].high == 13


def test_other_objectives() -> None:
    semi = means(dond_metrics(GAMES, 0.0, rng()))
    assert (semi["game/score"], semi["game/score_ceiling"]) == pytest.approx((13 / 6, 6.5))
    # Strictly competitive: scores of a game sum to zero and every outcome is Pareto-optimal, no deal too.
    competitive = means(dond_metrics(GAMES, -1.0, rng()))
    assert (competitive["game/score"], competitive["game/score_ceiling"], competitive["game/pareto"]) == (0, 0, 1)
    without = dond_metrics([failed_game(), aborted_game()], 1.0, rng())
    assert not [name for name in without if name.endswith("_agreed")] and without["game/agreement"].high > 0.5
    # player_0 takes the book, worth 0 to it and 1 to player_1.
    wasteful = means(dond_metrics([episode([], claims=((1, 0, 3), (0, 1, 0)))], 1.0, rng()))
    assert (wasteful["game/score"], wasteful["game/pareto"], wasteful["game/pareto_agreed"]) == (12, 0, 0)


def test_points_by_player() -> None:
    games = [
        deal_game(0, ("learner", "scripted")),
        deal_game(1, ("scripted", "learner")),
        failed_game(2, ("learner", "scripted")),
    ]
    found = dond_metrics(games, 0.5, rng())
    assert found["game/points/learner"].mean == pytest.approx((9 + 4 + 0) / 3)
    assert found["game/points/scripted"].mean == pytest.approx((4 + 9 + 0) / 3)
    assert found["game/score/learner"].mean == pytest.approx((9 + 2 + 4 + 4.5 + 0) / 3)
    assert found["game/points/learner"].n == 3
    assert not [name for name in dond_metrics(GAMES, 0.5, rng()) if name.endswith("learner")]  # self-play: one name


def test_talk() -> None:
    found = talk_metrics(GAMES, rng())
    assert means(found) == pytest.approx(
        {
            "talk/turns": (4 + 3 + 0) / 3,
            "talk/messages": (2 + 1 + 0) / 3,
            "talk/tokens_per_turn": (6 + 4 + 2 + 2 + 2 + 2 + 2) / 7,  # the refused reply is left out
            "talk/words_per_message": (4 + 6 + 4) / 3,
            "talk/vocabulary": 9,  # i want the balls ok take book & hat
        }
    )
    quiet = talk_metrics([aborted_game()], rng())
    assert set(quiet) == {"talk/turns", "talk/messages"}


def test_vocabulary_interval_is_the_jackknife() -> None:
    # Words of one game only: 2 (c d), 0, 1 (e). Mean 1, sum of squares 2, variance 2/3 * 2 = 4/3.
    found = vocabulary([["a b c d"], ["a", "b"], ["b e", "a"]])
    half = 1.959964 * math.sqrt(4 / 3)
    assert found == Interval(5, pytest.approx(5 - half, abs=1e-5), pytest.approx(5 + half, abs=1e-5), 3)


def test_a_refused_choice_is_a_turn() -> None:
    replies = [Turn("player_0", "crewmate", i, TurnKind.CHOOSE, "x", error="no" * (i < 3)) for i in range(4)]
    found = error_metrics([episode(replies)], rng())
    assert found["errors/per_turn"].mean == pytest.approx(3 / 4)  # nobody is asked again


def test_errors() -> None:
    found = error_metrics(GAMES, rng())
    # Six refused replies in 4 + 3 accepted turns and 1 that never was accepted.
    assert found["errors/per_turn"].mean == pytest.approx(6 / 8)
    assert found["errors/aborted"] == Interval(
        pytest.approx(1 / 3), pytest.approx(0.0615, abs=1e-3), pytest.approx(0.7923, abs=1e-3), 3
    )
    assert found["errors/outgrown"].mean == 0 and found["errors/outgrown"].n == 3  # there where nothing was


def test_grade_by_hand() -> None:
    graded = grade(np.array([0.5, 0.3, 0.2]), 1)
    assert graded.accuracy == 0
    assert graded.log_loss == pytest.approx(-math.log(0.3))
    assert graded.brier == pytest.approx(0.25 + 0.49 + 0.04)
    assert grade(np.array([0.4, 0.4, 0.2]), 0).accuracy == 0.5
    assert grade(np.array([1.0, 0.0]), 1).log_loss == pytest.approx(27.631, abs=1e-3)
    assert grade(np.array([1.0, 0.0]), 1).brier == 2


def test_grade_of_several_true_answers_by_hand() -> None:
    """Answers 0 and 2 are true: .2 + .5 = .7 of the belief is right, .3 is wrong."""
    graded = grade(np.array([0.2, 0.3, 0.5]), 2, (0,))
    assert graded.accuracy == 1
    assert graded.log_loss == pytest.approx(-math.log(0.7)) and graded.brier == pytest.approx(0.09 + 0.09)
    assert grade(np.array([0.1, 0.6, 0.3]), 2, (0,)).accuracy == 0
    chance = grade(np.full(5, 0.2), 1, (4,))
    assert (chance.accuracy, chance.log_loss, chance.brier) == pytest.approx((0.4, math.log(2.5), 0.36 + 0.12))


@pytest.mark.parametrize("style", [style.value for style in Style])
def test_questions_of_every_style_are_known_by_their_item(style: str) -> None:
    env = dond_environment.DealOrNoDeal(style=style)
    _, infos = env.reset(options={"counts": CONTEXT.counts, "values": CONTEXT.values})
    for number, question in enumerate(infos["player_0"]["questions"]):
        assert topic({"text": question.text}) == dond_rules.ITEMS[number]
        prior = exact_prior(deal_game(), "player_0", question)
        np.testing.assert_allclose(prior, dond_rules.prior(CONTEXT.counts, CONTEXT.values[0])[number])


def test_exact_prior_is_of_the_right_item_and_seat() -> None:
    game = deal_game()
    for seat, agent in enumerate(dond_environment.AGENTS):
        for item, belief in enumerate(beliefs(agent, 0, [0.1] * 3)):
            prior = exact_prior(game, agent, belief.question)
            assert prior is not None
            assert np.array_equal(prior, dond_rules.prior(CONTEXT.counts, CONTEXT.values[seat])[item])
    with pytest.raises(AssertionError):  # the other player's question: the answer does not fit
        exact_prior(game, "player_0", beliefs("player_1", 0, [0.1] * 3)[0].question)
    assert exact_prior(imposter_game(), "Lime", imposter_game().beliefs[0].question) is None


def prior_log_loss() -> float:
    """Mean over both players and three items, straight from the game's prior."""
    losses = [
        -math.log(dond_rules.prior(CONTEXT.counts, CONTEXT.values[seat])[item, CONTEXT.values[1 - seat][item]])
        for seat in (0, 1)
        for item in range(3)
    ]
    return sum(losses) / 6


def test_belief_metrics_by_hand() -> None:
    found = belief_metrics([deal_game(), failed_game()], rng())
    first = (9 * -math.log(0.2) + 3 * -math.log(0.1)) / 12
    last = (3 * -math.log(0.5) + 2 * -math.log(0.3) - math.log(0.9) + 6 * -math.log(0.2)) / 12
    assert found["belief/first_log_loss"].mean == pytest.approx(first)
    assert found["belief/last_log_loss"].mean == pytest.approx(last)
    assert found["belief/prior_log_loss"].mean == pytest.approx(prior_log_loss())
    assert found["belief/gain_over_prior"].mean == pytest.approx(prior_log_loss() - last)
    assert found["belief/gain_over_start"].mean == pytest.approx(first - last)
    assert {interval.n for interval in found.values()} == {2}
    # .2 and more leads when the others share the rest; .1 loses to nobody only at (1-.1)/10 = .09 each: it leads too.
    assert found["belief/accuracy"].mean == 1
    brier = [(1 - p) ** 2 + (1 - p) ** 2 / 10 for p in [0.5] * 3 + [0.3, 0.3, 0.9] + [0.2] * 6]
    assert found["belief/last_brier"].mean == pytest.approx(np.mean(brier))


def test_belief_by_message() -> None:
    entries = belief_by_message([deal_game(), failed_game()])
    assert len(entries) == 3
    losses = [entry["log_loss"].mean for entry in entries]
    assert losses[0] == pytest.approx((9 * -math.log(0.2) + 3 * -math.log(0.1)) / 12)
    # After one message: player_0 .2, player_1 .3 .3 .9 in the deal; .2 throughout in the failed game.
    assert losses[1] == pytest.approx((9 * -math.log(0.2) + 2 * -math.log(0.3) - math.log(0.9)) / 12)
    assert losses[2] == pytest.approx((3 * -math.log(0.5) + 2 * -math.log(0.3) - math.log(0.9)) / 6)
    assert entries[2]["log_loss"].n == 1 and entries[1]["log_loss"].n == 2
    assert entries[2]["prior_log_loss"].mean == pytest.approx(prior_log_loss())
    # Across the second message only player_0's belief moved, from .2 to .5.
    assert entries[2]["gain"].mean == pytest.approx(3 * math.log(0.5 / 0.2) / 6)
    assert "gain" not in entries[0]
    assert belief_by_message([aborted_game()]) == []


def test_discussions_count_their_own_messages() -> None:
    table = belief_table([imposter_game()])
    # Lime: before and after the first message. Blue: after the second; before and after the first of the next.
    assert table.number.tolist() == [0, 1, 2, 0, 1]
    assert table.last.tolist() == [False, True, True, False, True]
    found = belief_metrics([imposter_game()], rng())
    assert found["belief/last_log_loss"].mean == pytest.approx(-np.log([0.6, 0.5, 0.4]).mean())
    # Blue's answer in discussion one has no start to compare with.
    assert found["belief/gain_over_start"].mean == pytest.approx(np.log([0.6 / 0.2, 0.4 / 0.5]).mean())
    assert found["belief/accuracy"].mean == pytest.approx((0 + 1 + 1 + 1 + 0.5) / 5)
    assert "belief/prior_log_loss" not in found and "belief/gain_over_prior" not in found


def test_structured_deal_or_no_deal_is_one_discussion_too() -> None:
    """Replies of format=structured are made of choices, which do not end the talk."""
    agent = scripted("dond", tokens=small_tokens())
    make = env_maker({"game": "dond", "format": "structured"})
    games = rollout(draw_games(0, 1, count=3), everyone(agent), make, concurrency=3)
    said = [sum(bool(turn.message) for turn in game.turns) for game in games]
    assert max(said) > 2
    table = belief_table(games)
    for game, messages in enumerate(said):
        here = table[table.game == game]
        assert sorted(set(here.number)) == list(range(messages + 1))
        assert here.last.sum() == 6 and set(here.number[here.last]) == {messages}  # two players' three questions


def test_figures_are_of_the_players_that_are_named() -> None:
    game = deal_game(0, ("learner", "scripted"))
    found = means(metrics([game], "dond", players={"scripted"}))
    assert (found["talk/turns"], found["talk/words_per_message"], found["talk/tokens_per_turn"]) == (2, 6, 3)
    learner = belief_metrics([game], rng(), players={"learner"})
    assert learner["belief/last_log_loss"].mean == pytest.approx(-math.log(0.5))
    assert belief_metrics([game], rng(), players={"base"}) == {}
    broken = [message("player_0", 0, "hi"), refused("player_1", 1, "x"), refused("player_1", 2, "x")]
    aborted = episode(broken, how="abort", players=("learner", "scripted"))
    assert error_metrics([aborted], rng(), players={"learner"})["errors/per_turn"].mean == 0
    assert error_metrics([aborted], rng(), players={"scripted"})["errors/per_turn"].mean == 2
    found = means(among_us_metrics([meeting_game()], {"learner"}))
    assert (found["vote/imposter"], found["vote/skip"]) == pytest.approx((1 / 3, 1 / 3))
    assert (found["talk/names"], found["talk/names_imposter"], found["talk/naming_true"]) == (2 / 4, 1 / 4, 1 / 2)
    # Changes of belief are over everybody's messages, Red's too.
    assert found["speech/belief_change/toward_truth"] == pytest.approx((0.4 - 0.1 - 0.2 + 0.05) / 4)
    assert found["talk/imposter_names"] == 1 and found["game/win_rate/imposters"] == 1


def test_speech_by_hand() -> None:
    found = turn_metrics([deal_game(), failed_game()], rng())
    # Message 1 moves player_1 from .1 .1 .1 to .3 .3 .9; message 2 moves player_0 from .2 to .5 thrice.
    # That of the failed game was heard and moves nothing.
    assert found["speech/belief_change"].mean == pytest.approx((1.2 + 0.9 + 0) / 3)
    log_changes = [2 * math.log(3) + math.log(9), 3 * math.log(2.5), 0]
    assert found["speech/log_belief_change"].mean == pytest.approx(np.mean(log_changes))
    assert found["speech/belief_change"].n == 2
    # Red's lie takes Blue from .5 to .4, which is +.1 for Red. Blue's accusation gave Lime +.4; Blue was not asked
    # before Lime's message, nor Lime after Blue's second.
    for player, change in (("base", 0.1), ("learner", 0.4)):
        own = turn_metrics([imposter_game()], rng(), {player})
        assert own["speech/belief_change"].mean == pytest.approx(change)


def test_among_us() -> None:
    winners = ("crewmates", "imposters", None, "crewmates")
    found = means(among_us_metrics([ejection_game(winner) for winner in winners]))
    assert (found["game/win_rate/crewmates"], found["game/win_rate/imposters"]) == (0.5, 0.25)
    assert found["game/how/ejected"] == 1
    # Two discussions: the first ejects nobody, the second Red by one vote.
    assert (found["game/meetings"], found["game/ejected_imposter"], found["game/ejected_crewmate"]) == (2, 0.5, 0)
    cut = replace(ejection_game(), outcome={**ejection_game().outcome, "discussions": 4})  # two without a vote
    assert means(among_us_metrics([cut]))["game/ejected_imposter"] == 0.25


def test_a_discussion_by_hand() -> None:
    found = among_us_metrics([meeting_game()])
    shown = {name: value for name, value in means(found).items() if not name.startswith("speech/log")}
    assert shown == pytest.approx(
        {
            "game/win_rate/crewmates": 0, "game/win_rate/imposters": 1, "game/how/time": 1,
            "game/how/ejection": 0, "game/how/tasks": 0, "game/how/parity": 0,  # possible ends that did not happen
            "game/meetings": 1, "game/reports": 1, "game/tasks_done": 0.3, "game/steps": 13, "game/decisions": 30,
            "game/ejected_imposter": 0, "game/ejected_crewmate": 0,
            # Of Blue, Green, Yellow and Pink. Red is one of five alive.
            "vote/imposter": 2 / 4, "vote/skip": 1 / 4, "vote/chance": 1 / 5,
            "vote/witness": 1 / 4, "vote/witness_imposter": 1, "vote/other_imposter": 1 / 3,  # Green saw it
            # Green names Red (and the victim, who does not count), Blue names Green, Pink names both.
            "talk/names": 3 / 5, "talk/names_imposter": 2 / 5, "talk/naming_true": 2 / 3,
            "talk/naming_chance": (1 / 4 + 1 / 4 + 1 / 2) / 3,
            # Pink's message is not in the grammar.
            "talk/accuses": 2 / 5, "talk/accusing_true": 1 / 2, "talk/accusing_chance": 1 / 4,
            "talk/knower_names_imposter": 1 / 2,  # Green's two
            "talk/imposter_names": 1,
            "talk/forms": 6,
            # Green +.3 on Blue and +.1 on Pink; Red -.1 on Blue; Blue -.2 and Yellow +.05 on Pink.
            "speech/belief_change/toward_truth": (0.4 - 0.1 - 0.2 + 0.05) / 4,
            "speech/belief_change/names_imposter": 0.4,
            "speech/belief_change/names_other": -0.2,
            "speech/belief_change/names_nobody": 0.05,
            # Toward Red, whom Green accuses, +.3 of Blue and +.1 of Pink; toward Green, whom Blue accuses, of Pink.
            "speech/pull": (0.3 + 0.1 + (0.85 - 0.65) / 3) / 3,
        }
    )  # fmt: skip
    assert found["speech/log_belief_change/names_imposter"].mean == pytest.approx(math.log(0.55 / 0.25 * 0.35 / 0.25))


def test_among_us_intervals_are_over_games() -> None:
    found = among_us_metrics([meeting_game(seed) for seed in range(50)])
    assert {value.n for value in found.values()} == {50}
    assert found["vote/imposter"].low == found["vote/imposter"].high  # every game has the same votes
    # Shares of 0 and 1 do not vary in resampling; their intervals then count games, not messages.
    ejections = among_us_metrics([ejection_game()] * 50)
    assert (ejections["talk/naming_true"], ejections["talk/accuses"]) == (wilson(50, 50), wilson(0, 50))


def test_imposters_are_no_listeners() -> None:
    found = metrics([meeting_game()], "among_us")
    answers = [0.9, 0.25, 0.55, 0.45, 0.25, 0.35, 0.15, 0.2]
    assert found["belief/log_loss"].mean == pytest.approx(-np.log(answers).mean())
    assert found["belief/chance_log_loss"].mean == pytest.approx(math.log(4))
    assert (found["belief/chance_accuracy"].mean, found["belief/chance_brier"].mean) == pytest.approx((0.25, 0.75))
    # Blue .25 -> .45, Pink .25 -> .2, Green's only answer stays.
    assert found["belief/gain_over_start"].mean == pytest.approx(math.log(0.45 / 0.25 * 0.2 / 0.25) / 3)
    entries = belief_by_message([meeting_game()])
    assert entries[0]["log_loss"].mean == pytest.approx(-np.log([0.9, 0.25, 0.25]).mean())
    assert entries[0]["chance_log_loss"].mean == pytest.approx(math.log(4))


def test_discussions_without_messages_are_told_apart() -> None:
    """Nobody may speak: one question before each vote."""
    game = imposter_game()
    asked = [belief for belief in game.beliefs if belief.step in (1, 5)]  # of Lime, then of Blue
    again = [replace(belief, listener="Lime") for belief in asked]
    silent = replace(game, turns=[turn for turn in game.turns if not turn.message], beliefs=(*asked[:1], *again[1:]))
    table = belief_table([silent])
    assert table.number.tolist() == [0, 0] and table.last.tolist() == [True, True]
    assert np.isnan(table.before_log_loss).all()
    assert belief_metrics([silent], rng())["belief/gain_over_start"].mean == 0


def test_effective_number() -> None:
    assert effective_number([Counter(a=3, b=3), Counter(c=3, d=3), Counter()]).mean == pytest.approx(4)
    assert effective_number([Counter(a=7)]).mean == 1
    uneven = effective_number([Counter(a=2), Counter(a=1, b=1)])
    assert uneven.mean == pytest.approx(4 / 3**0.75) and uneven.n == 2  # p = 3/4, 1/4: H = log 4 - .75 log 3
    # Without the first game H = log 2, without the second 0; (n - 1) times their variance is (log 2 / 2)².
    half = 1.959964 * math.log(2) / 2
    assert uneven.high == pytest.approx(uneven.mean * math.exp(half), rel=1e-5)
    assert uneven.low == 1  # no fewer than one
    assert effective_number([Counter(a=1, b=1)]) == Interval(pytest.approx(2), pytest.approx(math.nan, nan_ok=True),
                                                             pytest.approx(math.nan, nan_ok=True), 1)  # fmt: skip


def test_evaluation_file() -> None:
    with pytest.raises(ValueError, match="no episodes"):
        metrics([], "dond")
    found = metrics(GAMES, "dond", objective=1.0)
    assert found == metrics(GAMES, "dond", objective=1.0)  # intervals too
    assert {name.split("/")[0] for name in found} == {"game", "talk", "errors", "belief", "speech", "reward"}
    written = json.loads(
        json.dumps(evaluation_to_json({"base": found}, {"base": belief_by_message(GAMES)}, games=3), allow_nan=False)
    )
    assert written["about"] == {"games": 3}
    assert written["conditions"]["base"]["game/score"]["mean"] == pytest.approx(13 / 3)
    assert [entry["log_loss"]["n"] for entry in written["belief_by_message"]["base"]] == [2, 2, 1]
    assert {k: str(v) for k, v in conditions_from_json(written)["base"].items()} == {
        k: str(v) for k, v in found.items()
    }


def test_metrics_of_another_game_name_its_own_endings_and_winners() -> None:
    """The game is chess; its outcome uses keys of the library's games, such as `winner`."""
    ends = [("checkmate", "white"), ("checkmate", "black"), ("time", "white"), ("stalemate", None)]
    paid = (Payment("player_1", 1, 0.5), Payment("player_1", 3, 1.5))
    games = [
        replace(deal_game(i), facts={}, outcome={"how": h, "winner": w}, payments=paid if i == 1 else ())
        for i, (h, w) in enumerate(ends)
    ]
    assert metrics(games, "chess")["game/score"].mean == 2 / 8  # what a player was paid
    found = means(metrics(games, "chess"))
    shares = {name: mean for name, mean in found.items() if name.startswith(("game/how/", "game/win_rate/"))}
    assert shares == {
        "game/how/checkmate": 0.5, "game/how/time": 0.25, "game/how/stalemate": 0.25,
        "game/win_rate/white": 0.5, "game/win_rate/black": 0.25,
    }  # fmt: skip
    logged = episode_metrics([replace(g, turns=()) for g in games], {"learner"})
    assert {name: logged[name] for name in logged if "win_rate" in name} == {
        "game/win_rate/white": 0.5, "game/win_rate/black": 0.25
    }  # fmt: skip


def test_rewards_are_means_over_the_turns_of_those_who_are_measured() -> None:
    """A reward that is credited to messages is averaged over the turns that have one."""
    game = deal_game(0, ("learner", "other"))
    paid = replace(
        game,
        turns=tuple(
            replace(turn, rewards={"mine": float(i), **({"speaking": 1.0} if turn.message else {})})
            for i, turn in enumerate(game.turns)
        ),
    )
    found = means(metrics([paid, paid], "dond"))
    assert found["reward/mine"] == pytest.approx((len(game.turns) - 1) / 2) and found["reward/speaking"] == 1.0
    own = np.mean([i for i, turn in enumerate(game.turns) if turn.agent == "player_0"])
    assert means(metrics([paid], "dond", players={"learner"}))["reward/mine"] == pytest.approx(own)
    assert episode_metrics([paid], {"learner"})["reward/mine"] == pytest.approx(own)
