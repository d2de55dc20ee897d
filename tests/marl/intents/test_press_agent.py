"""The player of Diplomacy that talks with a plan: it orders what it planned, and nobody else reads an intent."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from envs.core import TurnKind
from envs.diplomacy.pure import HOMES, N
from marl.common.errors import UserError
from marl.intents import filters
from marl.intents.agent import CiceroConfig, Parts
from marl.intents.press import Notes, Utterance
from marl.intents.press_agent import Planner, PressAgent
from marl.planning.press import PressConfig
from marl.report.transcripts import episode_to_json
from marl.rollout.games import env_maker, scripted
from marl.rollout.rollout import rollout
from marl.rollout.seeds import draw_games
from marl.types import Episode
from tests.marl.intents.press_models import ENV, Obedient, speaker
from tests.marl.intents.resumed import assert_goes_on

PLAN = PressConfig(candidates=4, others=2, draws=5, iterations=3)
PAR, CON = HOMES.index("PAR"), HOMES.index("CON")


def agent(**settings: Any) -> PressAgent:
    press = settings.pop("press", PLAN)
    config = CiceroConfig(press=press, draws=3, candidates=1, **settings)
    parts = Parts("intent", speaker(), speaker(), None)
    made = PressAgent("one", parts, config, "diplomacy", slots=4, context=768, max_new_tokens=14)
    made.planner.reader = Obedient(speaker().tokens)  # type: ignore[assignment]
    return made


def games(one: PressAgent, count: int = 2) -> list[Episode]:
    others = scripted("diplomacy", "careful", speaker().tokens)

    def assign(game: Any, env: Any) -> dict[str, Any]:
        return {name: one if name == "player_2" else others for name in env.possible_agents}

    return rollout(draw_games(5, 5, count=count), assign, env_maker(ENV), 2)


@cache
def played() -> tuple[Episode, ...]:
    return tuple(games(agent(correspondence=None)))


def text_of(episode: Episode, seat: str) -> str:
    return speaker().tokens.decode(episode.streams[seat].tokens)


def test_intents_stand_in_the_own_stream_alone() -> None:
    for episode in played():
        own = [turn for turn in episode.turns if turn.agent == "player_2" and turn.kind == TurnKind.SPEAK]
        assert all(turn.thoughts.startswith("intent: I order A ") for turn in own)
        assert text_of(episode, "player_2").count("\nme ") == len(own)
        for seat in episode.players:
            assert seat == "player_2" or "\nme " not in text_of(episode, seat)
    assert any(turn.thoughts for episode in played() for turn in episode.turns if turn.kind == TurnKind.SPEAK)


def test_it_orders_what_it_planned_and_transcripts_say_so() -> None:
    planned = 0
    for episode in played():
        turns = [turn for turn in episode.turns if turn.agent == "player_2"]
        for number, turn in enumerate(turns):
            assert not turn.error
            if turn.thoughts.startswith("plan: "):
                words = turn.thoughts.removeprefix("plan: ").partition(" (")[0].split()
                first = (
                    "H" if words[2] == "H" else f"{'+' if words[2] == 'S' else '-'}{words[4 if words[2] == 'S' else 3]}"
                )
                assert turn.text == first
                if words[2] == "S":
                    assert turns[number + 1].text == (f"-{words[6]}" if len(words) > 6 else "H")
                planned += 1
        assert any(turn.get("thoughts", "").startswith("plan: ") for turn in episode_to_json(episode)["turns"])
    assert planned >= len(played())  # an untrained player may disband its unit early


def test_the_same_game_is_played_again() -> None:
    again = games(agent(correspondence=None))
    assert [episode.turns for episode in again] == [episode.turns for episode in played()]


def test_a_game_is_taken_up_where_it_stopped() -> None:
    assert_goes_on(lambda: agent(correspondence=None), lambda one: games(one, 1))


def test_a_mute_player_plans_and_writes_to_nobody() -> None:
    mute = PressConfig(candidates=4, others=2, draws=5, iterations=3, mute=True)
    for episode in games(agent(press=mute), 1):
        own = [turn for turn in episode.turns if turn.agent == "player_2"]
        assert not [turn for turn in own if turn.kind == TurnKind.SPEAK]
        assert [turn for turn in own if turn.text == "nobody"]
        assert [turn for turn in own if turn.thoughts.startswith("plan: ")]


def test_where_all_draws_are_refused_nothing_is_sent() -> None:
    one = agent(correspondence=1.0)  # which no message can meet
    for episode in games(one, 1):
        spoken = [turn for turn in episode.turns if turn.agent == "player_2" and turn.kind == TurnKind.SPEAK]
        assert spoken and not any(turn.message for turn in spoken)
    assert one.counts["spent"] == len(spoken) and one.counts["drawn"] == 3 * len(spoken)


def test_words_that_make_the_planned_order_less_likely_betray_it() -> None:
    notes = Notes()
    notes.read("you FRANCE years 1 solo 4\nspring 1\nAUSTRIA VIE FRANCE PAR GERMANY BER TURKEY CON\n")
    notes.phases[-1].talk.append(Utterance("FRANCE", "GERMANY", "please support PAR to CON ."))
    planner = Planner(speaker(), 512, PLAN)
    planner.reader = Obedient(speaker().tokens)  # type: ignore[assignment]
    before, same, other = planner.agree(
        notes, "GERMANY", ["", "support PAR to CON please .", "please support PAR to VIE ."], (PAR, PAR * N + CON)
    )
    assert not filters.betrays(before, same, -0.005) and filters.betrays(before, other, -0.005)


def test_a_unit_of_ones_own_is_planned_with_all_that_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """France has units in PAR and BER, and Turkey asked it for support: plans of both units know that."""
    notes = Notes()
    notes.read("you FRANCE years 1 solo 4\nspring 1\nAUSTRIA VIE FRANCE PAR BER TURKEY CON\n")
    notes.phases[-1].talk.append(Utterance("TURKEY", "FRANCE", "please support CON to VIE ."))
    planner, seen = Planner(speaker(), 512, PLAN), []
    planner.reader = Obedient(speaker().tokens)  # type: ignore[assignment]
    monkeypatch.setattr("marl.intents.press_agent.plan_order", lambda *given: seen.append(given))
    planner.plan(notes, PAR, (0,))
    (_, place, anchor, pairs, *_) = seen[0]
    asked, alone = CON * N + HOMES.index("VIE"), PAR * N + PAR
    assert place == PAR and anchor.argmax() == asked
    assert pairs[HOMES.index("BER"), 0].argmax() == pairs[HOMES.index("BER"), 1].argmax() == asked
    assert pairs[CON, 0].argmax() == asked and pairs[HOMES.index("VIE"), 0].argmax() == alone


def test_another_style_is_refused() -> None:
    parts = Parts("intent", speaker(), speaker(), None)
    with pytest.raises(UserError, match=r"env\.style=natural"):
        PressAgent("one", parts, CiceroConfig(), "diplomacy", slots=1, context=512, style="natural")
