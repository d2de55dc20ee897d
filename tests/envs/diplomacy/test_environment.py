"""The environment of Diplomacy: PettingZoo's contract, golden games, hostile actions, who reads what, later answers.

`python -m tests.envs.diplomacy.test_environment` writes the golden games anew; read them before you commit.
"""

from __future__ import annotations

import copy
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import diplomacy_v0 as diplomacy
from envs.core import END, Style, TurnKind
from envs.diplomacy.board import MAPS, Board
from envs.diplomacy.orders import MORE, MOST, branches
from envs.diplomacy.texts import COASTS, COMPACT_TOKENS, NOBODY, PLACES
from tests.envs.contract import FIELDS, play_oddly

pytest.importorskip("diplomacy", reason="needs the extra `diplomacy`: pip install 'diplomacy==1.1.2'")

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).resolve().parents[3]
STYLES = tuple(Style)


def random_reply(seen: dict[str, Any], rng: Random) -> str:
    if seen["options"]:
        return rng.choice(seen["options"])
    return rng.choice(("hello", "i will support you", "")) + f" {END}" if seen["turn"] else ""


# --- The environment's contract ---------------------------------------------------------------------------------------
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_any_settings_and_any_replies_keep_the_contract(data: st.DataObject) -> None:
    env = diplomacy.parallel_env(
        map_name=data.draw(st.sampled_from(MAPS)), years=data.draw(st.integers(1, 2)),
        style=data.draw(st.sampled_from(STYLES)), press=data.draw(st.sampled_from(("none", "private"))),
        rounds=data.draw(st.integers(1, 2)), questions=data.draw(st.integers(0, 2)),
        message_chars=data.draw(st.integers(1, 30)),
    )  # fmt: skip
    rng = data.draw(st.randoms(use_true_random=False))
    odd: list[Any] = data.draw(st.lists(st.text(max_size=80) | st.sampled_from(("PAR", "A PAR H", END, None, 7))))
    rewards, infos = play_oddly(env, data.draw(st.integers(0, 1000)), rng, [*odd, ""])
    assert sum(rewards.values()) == pytest.approx(1)
    assert rewards == infos["player_0"]["outcome"]["points"]


# --- Golden games -----------------------------------------------------------------------------------------------------
def playthrough(seed: int, rules: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A game of random players: everything that anybody observes and does, and the outcome."""
    env, rng = diplomacy.parallel_env(**rules), Random(seed)
    observations, infos = env.reset(seed=seed)
    lines = [f"seed {seed}, {rules}", f"facts {env.facts}"]
    step = 0
    while True:
        lines.append(f"\n== {step}")
        replies = {agent: random_reply(observations[agent], rng) for agent in env.agents}
        shared = {seen["text"] for seen in observations.values()}
        if len(shared) == 1 and (text := shared.pop()):
            lines.extend(f"| {line}" for line in text.split("\n") if line)
        for agent, seen in observations.items():
            info = infos[agent]
            notes = {k: v for k, v in info.items() if v and k in ("entry", "error", "message", "answers")}
            if notes or seen["turn"]:
                lines.append(f"{agent} {TurnKind(seen['turn']).name} {notes or ''}".rstrip())
            if len({s["text"] for s in observations.values()}) > 1:
                lines.extend(f"    | {line}" for line in seen["text"].split("\n") if line)
            lines.extend(f"    ? {q.text} {' '.join(q.candidates)} [{q.later}]" for q in info["questions"])
            if seen["turn"]:
                lines.append(f"    > {replies[agent]!r} of {', '.join(seen['options']) or 'anything'}")
        if not env.agents:
            break
        observations, rewards, _, _, infos = env.step(replies)
        step += 1
    found = infos["player_0"]["outcome"]
    lines += [f"+ {agent} {reward:.3f}" for agent, reward in rewards.items()]
    return "\n".join([*lines, f"outcome {found}"]) + "\n", found


GAMES: dict[str, tuple[int, dict[str, Any]]] = {
    "pure": (1, {"years": 2, "press": "private"}),
    "pure_natural": (2, {"years": 1, "press": "private", "style": "natural"}),
    "standard_france_austria": (3, {"map_name": "standard_france_austria", "years": 2, "style": "brief"}),
    "standard_germany_italy": (4, {"map_name": "standard_germany_italy", "years": 2}),
    "standard": (5, {"map_name": "standard", "years": 2}),
}


@pytest.mark.parametrize("name", GAMES)
def test_golden_games(name: str) -> None:
    assert playthrough(*GAMES[name])[0] == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_a_seed_and_the_actions_determine_the_whole_episode() -> None:
    rules = {"press": "private", "years": 2}
    assert playthrough(7, rules) == playthrough(7, rules)
    assert playthrough(7, rules) != playthrough(8, rules)


def test_a_copy_goes_on_alike() -> None:
    env, rng = diplomacy.parallel_env(press="private", years=1), Random(0)
    observations, _ = env.reset(seed=3)
    for _ in range(30):
        observations, *_ = env.step({a: random_reply(seen, rng) for a, seen in observations.items()})
    other, rng_there = copy.deepcopy(env), copy.deepcopy(rng)
    there = observations
    while env.agents:
        observations, rewards, _, _, infos = env.step({a: random_reply(s, rng) for a, s in observations.items()})
    while other.agents:
        there, others, _, _, infos_there = other.step({a: random_reply(s, rng_there) for a, s in there.items()})
    assert (there, others, infos_there) == (observations, rewards, infos)


# --- Choices ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("map_name", MAPS)
def test_every_order_can_be_chosen_in_every_style(map_name: str) -> None:
    """Walking through all choices reaches each legal order once, on every board of a random game. Compact options are
    tokens that tokenizers keep whole."""
    board, rng = Board(map_name, years=4), Random(2)
    while not board.over:
        orders = {}
        for power, units in board.options().items():
            orders[power] = [rng.choice(options) for options in units.values()]
            for options in units.values():
                for style in STYLES:
                    found: list[str] = []
                    waiting = [options]
                    while waiting:
                        left = waiting.pop()
                        if len(left) == 1:
                            found += left
                            continue
                        own = branches(left, style)
                        assert 1 < len(own) <= MOST and sorted(o for own_ in own.values() for o in own_) == sorted(left)
                        assert style is not Style.COMPACT or set(own) <= {*COMPACT_TOKENS, "-", "+", "~"}, own
                        assert all(len(each) < len(left) for each in own.values())
                        waiting += own.values()
                    assert sorted(found) == sorted(options)
        board.process(orders)


def test_many_options_are_chosen_by_verb_or_by_pages() -> None:
    moves = tuple(f"A PAR - {place}" for place in PLACES[:40])
    pages = branches(moves, Style.COMPACT)
    assert len(pages) == MOST and list(pages)[-1] == MORE and len(pages[MORE]) == 15
    assert list(branches(pages[MORE], Style.COMPACT)) == [f"-{place}" for place in PLACES[25:40]]
    assert list(branches(("A PAR H", *moves), Style.NATURAL)) == ["A PAR H", "A PAR -"]


def test_names_of_places_are_the_maps() -> None:
    assert set(Board("standard").provinces) == set(PLACES) and set(Board("pure").provinces) < set(PLACES)
    assert {coast[:3] for coast in COASTS} == {"BUL", "SPA", "STP"}


# --- Hostile and mistaken replies -------------------------------------------------------------------------------------
POWERS = ("FRANCE", "GERMANY", "ENGLAND", "AUSTRIA", "ITALY", "RUSSIA", "TURKEY")


def start(**rules: Any) -> tuple[diplomacy.Diplomacy, dict[str, Any], dict[str, Any]]:
    env = diplomacy.parallel_env(**rules)
    return env, *env.reset(seed=0, options={"powers": POWERS})


def test_refused_orders_count_as_hold() -> None:
    env, *_ = start(years=1)
    replies: dict[str, Any] = {"player_0": "-PAR", "player_1": "A BER - PAR", "player_2": None, "player_3": "+BER"}
    _, _, _, _, infos = env.step(replies)
    assert infos["player_0"]["error"].startswith("'-PAR' is none of the options (H, -BER, ")
    assert infos["player_0"]["error"].endswith("It counts as A PAR H.")
    assert infos["player_3"] | {"questions": ()} == infos["player_3"] and not infos["player_3"]["error"]
    observations, _, _, _, infos = env.step({"player_3": "-VIE"})  # into its own place: no such support
    assert infos["player_3"]["error"].endswith("It counts as A VIE H.")
    assert env.board.orders == {power: (order,) for power, order in zip(
        env.board.powers, ("A VIE H", "A LON H", "A PAR H", "A BER H", "A ROM H", "A MOS H", "A CON H"), strict=True)
    }  # fmt: skip
    assert "error" in observations["player_3"]["text"] and env.board.corrections == {}


@pytest.mark.parametrize("reply", ["FRANCE", "MARS", "", None, "nobody ", NOBODY])
def test_nobody_writes_to_oneself_or_to_nobody_known(reply: Any) -> None:
    env, observations, _ = start(years=1, press="private")
    speaker = next(a for a, seen in observations.items() if seen["turn"])
    own = env.facts["powers"][speaker]
    assert own not in observations[speaker]["options"]
    observations, _, _, _, infos = env.step({speaker: own if reply == "FRANCE" else reply})
    assert bool(infos[speaker]["error"]) == (str(reply).strip() != NOBODY)
    assert observations[speaker]["turn"] == TurnKind.WAIT  # the next one's turn
    assert [a for a, seen in observations.items() if seen["turn"] == TurnKind.CHOOSE] != [speaker]


def test_the_dead_are_not_written_to_and_wait() -> None:
    env, observations, infos = start(years=2, press="private")
    script = {"FRANCE": ["-BER"], "ENGLAND": ["+PAR", "-BER"]}
    replies = {power: list(said) for power, said in script.items()}
    while env.agents and env.board.year == 0:
        acts = {}
        for agent, seen in observations.items():
            power = env.facts["powers"][agent]
            if NOBODY in seen["options"]:
                acts[agent] = NOBODY
            elif seen["options"]:
                said = replies.get(power, [])
                acts[agent] = said.pop(0) if said and env.board.phase == "S1901M" else seen["options"][0]
        observations, _, _, _, infos = env.step(acts)
    assert not env.board.alive("GERMANY")
    while env.agents:
        assert observations["player_1"]["turn"] == TurnKind.WAIT
        assert all("GERMANY" not in seen["options"] for seen in observations.values())
        acts = {a: seen["options"][0] if seen["options"] else "" for a, seen in observations.items()}
        to_the_dead = [a for a, seen in observations.items() if NOBODY in seen["options"]]
        acts |= dict.fromkeys(to_the_dead, "GERMANY")
        observations, rewards, _, _, infos = env.step(acts)
        for agent in to_the_dead:
            assert infos[agent]["error"].startswith("'GERMANY' is none of the options (")
            assert infos[agent]["error"].endswith("Nobody is written to.") and "error" in observations[agent]["text"]
    assert rewards["player_1"] == 0 and "over centres 0" in observations["player_1"]["text"]
    assert infos["player_1"]["outcome"]["centres"]["player_0"] == 2


def test_long_messages_are_cut_and_lines_are_joined() -> None:
    env, observations, _ = start(years=1, press="private", message_chars=10)
    speaker = next(a for a, seen in observations.items() if seen["turn"])
    to = observations[speaker]["options"][0]
    listener = next(agent for agent, power in env.facts["powers"].items() if power == to)
    env.step({speaker: to})
    text = f"  hello\nspring 2 and more {END} rest"
    observations, _, _, _, infos = env.step({speaker: text})
    said, (first, last) = infos[speaker]["message"], infos[speaker]["span"]
    assert said == "hello spri" and text[first:last].replace("\n", " ") == said
    assert observations[listener]["text"] == f"{env.facts['powers'][speaker]}: hello spri\n"
    assert observations[speaker]["text"] == "cut 10\n"


def test_in_each_round_everybody_writes_once_and_is_read_before_the_next() -> None:
    env, observations, _ = start(years=1, press="private", rounds=3)
    powers, heard, spoke = env.facts["powers"], [], []
    while env.board.phase == "S1901M" and not any(s["turn"] == TurnKind.CHOOSE and NOBODY not in s["options"]
                                                  for s in observations.values()):  # fmt: skip
        acts = {}
        for agent, seen in observations.items():
            heard += [(agent, line) for line in seen["text"].splitlines() if "says" in line]
            if NOBODY in seen["options"]:
                acts[agent] = seen["options"][len(spoke) // 7]  # another one in each round
                spoke.append((powers[agent], acts[agent]))
            elif seen["turn"]:
                assert len(heard) == len(spoke) - 1  # what was said before was read
                acts[agent] = f"{powers[agent]} says {len(spoke)} {END}"
        observations, *_ = env.step(acts)
    agents = {power: agent for agent, power in powers.items()}
    for first in (0, 7, 14):
        assert sorted(power for power, _ in spoke[first : first + 7]) == sorted(POWERS)
    assert len(spoke) == 21 and spoke[:7] != spoke[7:14]
    assert heard == [(agents[to], f"{power}: {power} says {n}") for n, (power, to) in enumerate(spoke, 1)]


# --- Leaks: only the addressee reads a message ------------------------------------------------------------------------
@pytest.mark.parametrize("style", STYLES)
def test_nobody_else_reads_a_message(style: str) -> None:
    """Two games that differ in one pair's messages (and in nothing that others do) look the same to all others."""

    def views(secret: str) -> list[Any]:
        env, observations, infos = start(years=1, press="private", style=style, questions=2)
        pair = {agent for agent, power in env.facts["powers"].items() if power in ("FRANCE", "ENGLAND")}
        seen_by_others, rng = [], Random(4)
        while True:
            others = [a for a in env.possible_agents if a not in pair]
            seen_by_others.append([(observations[a], {k: infos[a].get(k) for k in FIELDS}) for a in others])
            if not env.agents:
                return seen_by_others
            acts = {}
            for agent, seen in observations.items():
                power = env.facts["powers"][agent]
                partner = {"FRANCE": "ENGLAND", "ENGLAND": "FRANCE"}.get(power)
                if partner and partner in seen["options"]:
                    acts[agent] = partner
                elif partner and seen["turn"] == TurnKind.SPEAK:
                    acts[agent] = f"{secret} {END}"
                else:
                    acts[agent] = random_reply(seen, rng)
            observations, _, _, _, infos = env.step(acts)

    assert views("attack GERMANY") == views("peace with everybody")


# --- Questions that are answered later --------------------------------------------------------------------------------
def test_the_addressee_is_asked_before_and_after_and_answered_with_the_orders() -> None:
    env, observations, infos = start(years=1, press="private")
    asked: list[tuple[int, str, str]] = []
    answers: dict[str, dict[str, str]] = {}
    clock, spoken = 0, []
    while env.board.phase == "S1901M":
        for agent, info in infos.items():
            asked += [(clock, agent, q.later) for q in info["questions"]]
            for question in info["questions"]:
                assert question.answer == "" and question.answered({}) is None
                assert question.candidates[0] == "H" and len(question.candidates) == 13
        acts = {}
        for agent, seen in observations.items():
            if NOBODY in seen["options"]:
                acts[agent] = seen["options"][0]
                spoken.append((clock, agent, seen["options"][0]))
            elif seen["turn"]:
                acts[agent] = seen["options"][-1] if seen["options"] else f"hi {END}"
        observations, _, _, _, infos = env.step(acts)
        clock += 1
        for agent, info in infos.items():
            answers.setdefault(agent, {}).update(info.get("answers", {}))
    power_of = env.facts["powers"]
    agent_of = {power: agent for agent, power in power_of.items()}
    units = {"FRANCE": "A PAR", "GERMANY": "A BER", "ENGLAND": "A LON", "AUSTRIA": "A VIE", "ITALY": "A ROM",
             "RUSSIA": "A MOS", "TURKEY": "A CON"}  # fmt: skip
    expected = []
    for at, speaker, to in spoken:  # asked once it is known who is written to, and once the message was read
        key = f"S1901M {units[power_of[speaker]]}"
        expected += [(at + 1, agent_of[to], key), (at + 2, agent_of[to], key)]
    assert asked == expected and len(spoken) == 7
    for _, listener, key in asked:
        (order,) = (o for own in env.board.orders.values() for o in own if o.startswith(key.removeprefix("S1901M ")))
        assert answers[listener][key] == f"+{order.split()[4]}"


def test_draw_and_bad_settings() -> None:
    env, *_ = start(years=1, render_mode="ansi")
    assert env.render().startswith("S1901M, orders\nplayer_0 FRANCE: A PAR; 1 centres\n")
    svg = start(years=1, render_mode="svg")[0].render()
    assert svg.startswith("<?xml") and "</svg>" in svg
    for rules, words in (({"press": "public"}, "press must be none or private"), ({"rounds": 0}, "rounds must be")):
        with pytest.raises(ValueError, match=words):
            diplomacy.parallel_env(**rules)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'powers' must be an order of AUSTRIA"):
        env.reset(options={"powers": ("FRANCE",)})
    assert len({env.reset(seed=seed)[0]["player_0"]["text"] for seed in range(9)}) > 2  # powers are dealt
    np.testing.assert_array_equal(env.privileged("player_0"), np.eye(7)[env.board.powers.index(
        env.facts["powers"]["player_0"])])  # fmt: skip


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, game in GAMES.items():
        (GOLDEN / f"{name}.txt").write_text(playthrough(*game)[0], encoding="utf-8")
