"""Measures of talk in Diplomacy against a phase written out by hand, which needs no package."""

import numpy as np
import pytest

from envs.core import Question, TurnKind
from marl.metrics.press import press_metrics
from marl.types import Belief, Episode, Turn

POWERS = {"player_0": "FRANCE", "player_1": "GERMANY", "player_2": "ITALY"}


def chosen(agent: int, step: int, text: str) -> Turn:
    return Turn(f"player_{agent}", "power", step, TurnKind.CHOOSE, text)


def said(agent: int, step: int, message: str) -> Turn:
    return Turn(f"player_{agent}", "power", step, TurnKind.SPEAK, f"{message} [END]", message=message)


def belief(step: int, unit: str, hold: float, move: float, help_: float) -> Belief:
    question = Question(f"{unit} will?", ("H", "-ROM", "+BER"), "H")
    return Belief("player_1", "power", step, 0, question, np.array([hold, move, help_]))


def test_promises_kept_believed_and_requests_granted() -> None:
    """France asks Germany for help to ROM, and gets it. Italy promises Germany help to PAR, and helps another power."""
    turns = (
        chosen(0, 0, "GERMANY"), said(0, 1, "please support PAR to ROM ."),
        chosen(2, 3, "GERMANY"), said(2, 4, "i will support BER to PAR ."),
        chosen(1, 6, "ITALY"), said(1, 7, "peace ? i do not attack you ."),
        chosen(0, 9, "-ROM"), chosen(1, 9, "+PAR"), chosen(2, 9, "+PAR"), chosen(1, 10, "-ROM"), chosen(2, 10, "H"),
        chosen(0, 11, "GERMANY"), said(0, 12, "hello"), chosen(2, 14, "+PAR"), chosen(2, 15, "-ROM"),
    )  # fmt: skip
    beliefs = (
        belief(1, "PAR", 0.5, 0.25, 0.25), belief(2, "PAR", 0.25, 0.75, 0.0),
        belief(4, "ROM", 0.5, 0.5, 0.0), belief(5, "ROM", 0.25, 0.5, 0.25),
    )  # fmt: skip
    players = {"player_0": "alice", "player_1": "bob", "player_2": "bob"}
    roles = dict.fromkeys(POWERS, "power")
    game = Episode(0, players, roles, {}, turns, beliefs, (), {}, 16, facts={"powers": POWERS})
    found = {name: interval.mean for name, interval in press_metrics([game], np.random.default_rng(0)).items()}
    assert found == pytest.approx(
        {"press/said": 0.5, "press/kept": 0.5, "press/heard": 0.375, "press/granted": 1.0, "press/unasked": 0.0}
    )
    bob = {name: interval.mean for name, interval in press_metrics([game], np.random.default_rng(0), {"bob"}).items()}
    assert bob == pytest.approx({"press/said": 0.5, "press/kept": 0.0, "press/heard": 0.25})


@pytest.mark.parametrize("later", ["talk", "adjustments"])
def test_a_later_phase_counts_for_nothing(later: str) -> None:
    """France acts only in the next phase, and does there what it said."""
    turns = (
        chosen(0, 0, "GERMANY"), said(0, 1, "please support PAR to ROM ."), chosen(2, 3, "nobody"),
        Turn("player_1", "power", 4, TurnKind.CHOOSE, "MARS", error="no such power"),
        chosen(1, 5, "H"), chosen(2, 5, "H"), chosen(2, 6, "H"),
        *((chosen(0, 7, "GERMANY"), said(0, 8, "hello")) if later == "talk" else ()),
        chosen(0, 9, "-ROM"), chosen(1, 9, "+PAR"), chosen(1, 10, "-ROM"),
    )  # fmt: skip
    players, roles = dict.fromkeys(POWERS, "alice"), dict.fromkeys(POWERS, "power")
    game = Episode(0, players, roles, {}, turns, (), (), {}, 11, facts={"powers": POWERS})
    found = press_metrics([game], np.random.default_rng(0))
    assert found["press/kept"].mean == found["press/granted"].mean == 0.0
