"""Labels of metrics, and the pairs of arms that tables compare."""

import math

from marl.metrics.wording import bounds, headline, of_ones_own, pairs_of, wording


def test_every_arm_is_compared_with_something() -> None:
    assert set(pairs_of(["RL+L+S", "mine"], "among_us")) >= {("mine", "RL+L+S"), ("mine", "RL"), ("RL+L+S", "RL")}
    assert ("mine", "baseline") in pairs_of(["baseline", "mine"], "among_us")  # neither of the usual two is there
    assert pairs_of(["full", "game_only", "base_line"], "dond") == [
        ("full", "game_only"), ("base_line", "game_only"),
        ("full", "ppo"), ("game_only", "ppo"), ("base_line", "ppo"),
        ("full", "filtered_bc"), ("game_only", "filtered_bc"), ("base_line", "filtered_bc"),
    ]  # fmt: skip
    assert pairs_of(["base_line", "mine", "other"], "dond")[-2:] == [("mine", "base_line"), ("other", "base_line")]


def test_the_words_of_a_metric() -> None:
    assert wording("game/score/runs-of-mine/rival").label == "Score of runs-of-mine/rival"
    assert wording("game/solo/trained").show(0.5) == "50.0 %"
    assert wording("game/how/checkmate").label == "Ends: checkmate" and wording("game/how/checkmate").percent
    assert wording("game/win_rate/crewmates").label == "Crewmates win"
    assert wording("loss/doubt").label == "Loss: doubt" and wording("reward/short").label == "Reward: short"
    assert bounds("talk/share_heard") == bounds("talk/credit/silence") == (-math.inf, math.inf)
    assert wording("what/ever").label == "what/ever" and bounds("game/win_rate/white") == (0.0, 1.0)
    assert bounds("press/unasked/scripted") == bounds("talk/password_heard_p") == (0.0, 1.0)
    assert bounds("game/score/v_base") == (-math.inf, math.inf)
    own = ["loss/doubt", "game/how/checkmate", "game/win_rate/white", "reward/short"]
    losses = ("policy", "value", "entropy", "kl", "listening", "world_model", "imitation", "plan")
    ours = ["reward/game", "reward/speaking", *(f"loss/{name}" for name in losses), "game/how/deal", "talk/turns"]
    assert of_ones_own([*ours, *own, *own]) == own
    assert headline("dond", ["talk/turns", "loss/doubt", "game/score"]) == ["game/score", "talk/turns", "loss/doubt"]
    assert headline("chess", ["game/how/mate", "game/score"]) == ["game/score", "game/how/mate"]
