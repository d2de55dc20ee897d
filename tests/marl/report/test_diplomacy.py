"""A recorded game of Diplomacy is played again: what was said, ordered and held is what the game itself says."""

import pytest

from envs.diplomacy import board
from marl.report.diplomacy import phases_of
from marl.report.games import game_of
from marl.report.html import episode_html
from marl.report.transcripts import episode_to_json
from marl.rollout.games import env_maker, scripted
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games


@pytest.mark.parametrize(("rounds", "kept"), [(5, True), (3, False), (0, True)])
def test_a_game_says_how_many_rounds_of_messages_it_has(rounds: int, kept: bool) -> None:
    """Games recorded before it did are tried with one, two and three."""
    pytest.importorskip("diplomacy", reason="needs pip install -e '.[diplomacy]'")
    talk = {"press": "private", "rounds": rounds} if rounds else {}
    make = env_maker({"game": "diplomacy", "map_name": "pure", "years": 1, **talk})
    (episode,) = rollout(draw_games(0, 1, count=1), everyone(scripted("diplomacy", "mixture")), make, 1)
    transcript = episode_to_json(episode)
    assert transcript["facts"]["rounds"] == rounds
    facts = {name: value for name, value in transcript["facts"].items() if kept or name != "rounds"}
    phases = phases_of({**transcript, "facts": facts})
    assert sorted(n for phase in phases for n in phase.turns) == list(range(len(transcript["turns"])))
    said = sum(turn["kind"] == "SPEAK" for turn in transcript["turns"])
    assert sum(len(phase.addressees) for phase in phases) == said and bool(said) == bool(rounds)
    assert phases_of({**transcript, "facts": {**facts, "rounds": rounds + 1}}) == [] or not rounds
    assert game_of(transcript) == game_of({**transcript, "facts": {**facts, "rounds": 9}})


@pytest.mark.parametrize("style", ["compact", "natural"])
def test_phases_are_those_of_the_game(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diplomacy", reason="needs pip install -e '.[diplomacy]'")
    make = env_maker({"game": "diplomacy", "map_name": "pure", "press": "private", "years": 2, "style": style})
    env = make()
    (episode,) = rollout(draw_games(0, 1, count=1), everyone(scripted("diplomacy", "mixture")), lambda: env, 1)
    transcript = episode_to_json(episode)
    powers = transcript["facts"]["powers"]
    phases = phases_of(transcript)
    entries = []
    for phase in phases:
        for number, to in phase.addressees.items():
            turn = transcript["turns"][number]
            entries.append(f"{powers[turn['agent']]} to {to}: {turn['message']}")
        for power, orders in phase.orders.items():
            entries.append(f"{phase.name} {power}: {', '.join(order for order, _ in orders)}")
    assert entries == env.transcript and any(" to " in line for line in entries)
    assert sorted(n for phase in phases for n in phase.turns) == list(range(len(transcript["turns"])))
    assert {a: phases[-1].centres[power] for a, power in powers.items()} == episode.outcome["centres"]
    assert phases[0].title == "Spring 1901, moves" and not phases[-1].turns

    page = episode_html(transcript)
    assert "data:image/svg+xml;base64," in page and "Spring 1901, moves" in page and "→" in page
    other = {**transcript, "outcome": {**transcript["outcome"], "centres": dict.fromkeys(powers, 9)}}
    assert phases_of(other) == []  # it is no game of this program
    assert phases_of({**transcript, "turns": [{**t, "text": "?"} for t in transcript["turns"]]}) == []

    def missing() -> None:
        raise ImportError

    monkeypatch.setattr(board, "load_package", missing)
    assert phases_of(transcript) == [] and "Spring 1901" not in episode_html(transcript)
