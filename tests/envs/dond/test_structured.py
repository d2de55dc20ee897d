"""Deal or No Deal in format=structured: kinds and counts are choices, words are free."""

from typing import Any

import pytest
from pettingzoo.test import api_test, parallel_api_test

from envs import dond_v0 as dond
from envs.core import TurnKind
from envs.dond.replies import KINDS, Message, Refused, parse_words
from envs.dond.texts import parse_events, parse_prompt
from marl.agents.scripted.dond import TEMPERAMENTS, make_player
from marl.agents.text import TextAgent
from marl.metrics.negotiation import Line, talk_of
from marl.report.transcripts import episode_to_json
from marl.rollout.games import env_maker, without_later
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games

START: dict[str, Any] = {"counts": (1, 1, 3), "values": ((0, 1, 3), (1, 3, 2)), "first": 0}
SPEAK, CHOOSE, WAIT = TurnKind.SPEAK, TurnKind.CHOOSE, TurnKind.WAIT


def test_a_whole_game() -> None:
    env = dond.parallel_env(style="natural", format="structured")
    seen, infos = env.reset(seed=0, options=START)
    assert parse_prompt(seen["player_0"]["text"]) == ((1, 1, 3), (0, 1, 3), 1.0)
    assert seen["player_0"]["text"].endswith("\nWhat do you say to your partner?\n")
    assert "[" not in seen["player_0"]["text"] and "What do you say" not in seen["player_1"]["text"]
    ask, count = "Do you send a message or make a proposal?\n", "How many {} do you claim?\n"
    closes = "Notice: Your partner has made a proposal. Answer with one of your own.\n"
    # who moves, what it reads, what it may choose from, its reply, what the reply counts as, how many are asked then
    script = [
        (0, None, (), " I want the hat [END] x", "message", 3),
        (1, f"Partner: I want the hat\n{ask}", KINDS, "message", "choice", 0),
        (1, "What do you say to your partner?\n", (), "ok", "message", 3),
        (0, f"Partner: ok\n{ask}", KINDS, "talk", "error", 0),
        (0, f"Error: Reply with one of these words: message, proposal.\n{ask}", KINDS, "proposal", "choice", 0),
        (0, count.format("books"), ("0", "1"), "0", "choice", 0),
        (0, count.format("hats"), ("0", "1"), "1", "choice", 0),
        (0, count.format("balls"), ("0", "1", "2", "3"), "2", "propose", 0),
        (1, closes + count.format("books"), ("0", "1"), "1", "choice", 0),
        (1, count.format("hats"), ("0", "1"), "0", "choice", 0),
        (1, count.format("balls"), ("0", "1", "2", "3"), "1", "propose", 0),
    ]
    for seat, text, options, reply, entry, asked in script:
        agent, partner = f"player_{seat}", f"player_{1 - seat}"
        assert seen[agent]["turn"] == (CHOOSE if options else SPEAK) and seen[partner]["turn"] == WAIT
        assert seen[agent]["options"] == options
        assert text is None or seen[agent]["text"] == text
        seen, rewards, _, _, infos = env.step({agent: reply})
        assert infos[agent]["entry"] == entry and len(infos[partner]["questions"]) == asked
        if entry == "message":
            begin, end = infos[agent]["span"]
            assert infos[agent]["message"] == reply[begin:end] == reply.partition("[END]")[0].strip()
        if entry == "choice":
            assert not infos[agent]["error"] and not seen[partner]["text"] and not any(rewards.values())
    assert not env.agents and infos["player_0"]["outcome"]["how"] == "deal"
    assert infos["player_0"]["outcome"]["points"] == {"player_0": 7, "player_1": 3} and rewards["player_0"] == 10
    assert [kind for _, kind, _ in env.transcript] == ["message", "message", "error", "propose", "propose"]


def test_silence_is_a_message_that_nobody_is_asked_after() -> None:
    env = dond.parallel_env(style="natural", format="structured", max_entries=3)
    seen, _ = env.reset(seed=0, options=START)
    seen, _, _, _, infos = env.step({"player_0": " [END]"})
    assert infos["player_0"]["message"] == "" and not infos["player_0"]["error"] and not infos["player_1"]["questions"]
    assert parse_events(seen["player_1"]["text"]) == [("message", "...")]
    for agent in ("player_1", "player_0"):
        env.step({agent: "message"})
        *_, infos = env.step({agent: ""})
    assert infos["player_0"]["outcome"]["how"] == "limit"


def test_words() -> None:
    for reply, text in (("  hi there [END] more", "hi there"), ("[message] hi", "hi"), ("", ""), ("[END]", "")):
        parsed = parse_words(reply)
        assert isinstance(parsed, Message) and parsed.text == text == reply[slice(*parsed.span)]
    for bad in (None, 3, "[propose]", "so [propose] (1 books)", "[message] [message] hi"):
        assert isinstance(parse_words(bad), Refused)


def test_refusals_in_a_row_end_the_game_and_bad_settings_are_named() -> None:
    env = dond.parallel_env(format="structured", max_errors=2)
    env.reset(seed=0, options=START)
    env.step({"player_0": "[propose]"})
    *_, infos = env.step({"player_0": 3})
    assert infos["player_0"]["outcome"]["how"] == "abort"
    with pytest.raises(ValueError, match="format must be free or structured, got 'json'"):
        dond.parallel_env(format="json")
    settings = {"game": "dond", "style": "compact", "format": "free"}
    assert without_later(settings) == {"game": "dond", "style": "compact"}  # older runs and bases keep their names


@pytest.mark.parametrize("style", ["natural", "brief", "compact"])
def test_pettingzoos_contract(style: str) -> None:
    parallel_api_test(dond.parallel_env(style=style, format="structured"), num_cycles=200)
    api_test(dond.env(style=style, format="structured"), num_cycles=50)


@pytest.mark.parametrize("style", ["natural", "brief", "compact"])
def test_scripts_say_and_claim_in_parts_what_they_say_and_claim_at_once(style: str) -> None:
    """Careful scripts make no slips, so that the free form refuses none of their replies either."""

    def play(form: str) -> list[Any]:
        make = env_maker({"game": "dond", "style": style, "format": form})
        agent = TextAgent("scripted", lambda seed, role: make_player("careful", seed, role))
        return rollout(draw_games(5, 1, count=30), everyone(agent), make, 30)

    assert TEMPERAMENTS["careful"].slips == 0
    for whole, parts in zip(play("free"), play("structured"), strict=True):
        assert parts.outcome == whole.outcome
        assert talk_of(parts) == talk_of(whole) == talk_of(episode_to_json(parts))
        assert any(isinstance(line, Line) and line.claim for line in talk_of(parts).lines)


def test_any_script_plays_to_the_end() -> None:
    for name in ("mixture", "random"):
        agent = TextAgent(name, lambda seed, role, name=name: make_player(name, seed, role))  # type: ignore[misc]
        make = env_maker({"game": "dond", "style": "compact", "format": "structured"})
        episodes = rollout(draw_games(6, 1, count=60), everyone(agent), make, 60)
        assert not any(turn.error for episode in episodes for turn in episode.turns)
        assert {episode.outcome["how"] for episode in episodes} <= {"deal", "mismatch"}
