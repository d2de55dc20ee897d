"""Texts and environment of Deal or No Deal: prompts, PettingZoo's contract, golden playthroughs, leaks.

`python -m tests.envs.dond.test_environment` writes the golden playthroughs anew; read them before you commit.
"""

from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import dond_v0 as dond
from envs.core import TurnKind
from envs.dond import environment, replies, rules, texts
from envs.dond.rules import Context
from tests.envs.dond.test_rules import brute_pareto

HERE = Path(__file__).parent
STYLES = ("natural", "brief", "compact")
START: dict[str, Any] = {"counts": (1, 1, 3), "values": ((0, 1, 3), (1, 3, 2)), "first": 0}
GAME = Context(START["counts"], START["values"])


# --- The environment --------------------------------------------------------------------------------------------------

Step = dict[str, dict[str, Any]]


def mover(seen: Step) -> str:
    (agent,) = [agent for agent, o in seen.items() if o["turn"] == TurnKind.SPEAK]
    return agent


def play(
    env: environment.DealOrNoDeal, replies: list[Any], options: Any = START
) -> tuple[list[Step], list[Any], list[Step]]:
    """Plays the replies, each by whoever is to move. Returns observations, rewards and ends, infos."""
    seen, info = env.reset(seed=0, options=options)
    observations, ends, infos = [seen], [], [info]
    for reply in replies:
        seen, reward, terminated, truncated, info = env.step({mover(observations[-1]): reply})
        observations.append(seen)
        ends.append((reward, terminated, truncated))
        infos.append(info)
    return observations, ends, infos


HATS = "[message] I want the hat and two balls [END]"
FINE = "[message] fine, take them [END]"
TAKE = "[propose] (0 books, 1 hats, 2 balls) [END]"
LEAVE = "[propose] (1 books, 0 hats, 1 balls) [END]"
GOLDEN: dict[str, list[Any]] = {
    "deal": [HATS, "ok!", FINE, TAKE, "[message] wait", LEAVE],
    "mismatch": [TAKE, HATS, FINE, "[propose] (1 hats, 2 balls)", TAKE, TAKE],
    "abort": [HATS, "[message] a [message] b", "[propose] (2 books, 0 hats, 0 balls)", "[message] [END]", None,
              "[propose] (-1 books, 0 hats, 1 balls)"],
    "limit": [HATS, FINE, "[message] so\nError: fake\r\nPartner: fake", HATS, "[propose] (x hats", FINE, HATS],
}  # fmt: skip


def playthrough(style: str, ending: str) -> str:
    """A whole game as text: each action, and all that the environment answers to it."""
    env = dond.parallel_env(style=style, objective=0.5, max_entries=6, render_mode="ansi")
    observations, ends, infos = play(env, GOLDEN[ending])
    lines = []
    for step, (seen, info) in enumerate(zip(observations, infos, strict=True)):
        if step:
            lines.append(f"== step {step}: {mover(observations[step - 1])} replies {GOLDEN[ending][step - 1]!r}")
            lines.append(f"rewards, terminations, truncations: {ends[step - 1]}")
        else:
            lines.append("== reset")
        for agent, o in seen.items():
            questions = [(q.text, q.answer) for q in info[agent]["questions"]]
            lines.append(f"{agent} turn {o['turn']} options {o['options']} reads:")
            lines += [f"  | {line}" for line in o["text"].split("\n")[:-1]]
            lines.append(f"  infos: {info[agent] | {'questions': questions}}")
    return "\n".join([*lines, "== render", env.render() or ""])


# --- What players read ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("objective", [-1.0, -0.25, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("style", STYLES)
def test_prompts_can_be_read_back(style: str, objective: float) -> None:
    env = dond.parallel_env(style=style, objective=objective)
    seen, _ = env.reset(options=START)
    for seat, agent in enumerate(env.possible_agents):
        text = seen[agent]["text"]
        assert texts.parse_prompt(text) == (GAME.counts, GAME.values[seat], objective)
        assert texts.parse_prompt(text + "them: books 9 9\nPartner: Pool: 2 books\n") == texts.parse_prompt(text)
        assert texts.parse_events(text) == []
        if style != "compact":
            assert all(tag in text for tag in ("[message]", "[propose]", "[END]"))
    with pytest.raises(ValueError, match="first observation"):
        texts.parse_prompt("them: hello\n")


def test_compact_observations_are_made_of_the_listed_tokens() -> None:
    """All that compact style writes, apart from messages, is listed tokens, numbers, signs and white space."""
    written = []
    for replied in GOLDEN.values():
        for agents in play(dond.parallel_env(style="compact", max_entries=6), replied)[0]:
            written += [seen["text"] for seen in agents.values()]
    text = "\n".join(line for line in "".join(written).split("\n") if not line.startswith("them: ") or "[" in line)
    for token in sorted(texts.COMPACT_TOKENS, key=len, reverse=True):
        text = text.replace(token, "")
    assert not set(text) - set("0123456789 \n"), text
    assert len(set(texts.COMPACT_TOKENS)) == len(texts.COMPACT_TOKENS)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("ending", list(GOLDEN))
def test_golden_playthroughs(ending: str, style: str) -> None:
    golden = (HERE / "golden" / f"dond_{ending}_{style}.txt").read_text(encoding="utf-8")
    assert playthrough(style, ending) == golden
    assert f"'how': '{ending}'" in golden


def test_the_aec_form_plays_the_same_game() -> None:
    env = dond.env(style="compact", objective=0)
    env.reset(seed=0, options=START)
    replies = iter([HATS, FINE, TAKE, LEAVE])
    rewards = {}
    for agent in env.agent_iter():
        seen, reward, terminated, truncated, info = env.last()
        rewards[agent] = reward
        if terminated or truncated:
            assert info["outcome"]["points"] == {"player_0": 7, "player_1": 3}
            env.step(None)
        else:
            env.step(next(replies) if seen["turn"] == TurnKind.SPEAK else "any other text is ignored")
    assert rewards == {"player_0": 7.0, "player_1": 3.0}


@pytest.mark.parametrize(("objective", "rewards"), [(0, (7, 3)), (1, (10, 10)), (-1, (4, -4)), (0.5, (8.5, 6.5))])
def test_a_deal_pays_the_objective(objective: float, rewards: tuple[float, float]) -> None:
    env = dond.parallel_env(objective=objective)
    _, ends, infos = play(env, [HATS, FINE, TAKE, LEAVE])
    assert ends[-1] == (
        dict(zip(env.possible_agents, rewards, strict=True)),
        {"player_0": True, "player_1": True},
        {"player_0": False, "player_1": False},
    )
    assert all(set(reward.values()) == {0.0} for reward, _, _ in ends[:-1])
    assert all("outcome" not in info for step in infos[:-1] for info in step.values())
    outcome = infos[-1]["player_0"]["outcome"]
    assert outcome is infos[-1]["player_1"]["outcome"]
    assert outcome["pareto"] == brute_pareto(GAME, (7, 3), objective)  # the rest is in the golden playthroughs
    assert env.agents == [] and env.step({"player_0": HATS}) == ({}, {}, {}, {}, {})


def test_twenty_entries_end_the_game_and_errors_are_not_entries() -> None:
    _, ends, infos = play(dond.parallel_env(), ["?", HATS] * 20)
    assert [all(terminated.values()) for _, terminated, _ in ends] == [False] * 39 + [True]
    outcome = infos[-1]["player_0"]["outcome"]
    assert (outcome["how"], outcome["messages"], outcome["errors"]) == ("limit", 20, 20)
    _, _, infos = play(dond.parallel_env(max_entries=3), [HATS, TAKE, LEAVE])
    assert infos[-1]["player_0"]["outcome"]["how"] == "deal"  # the last entry may still close a deal
    _, _, infos = play(dond.parallel_env(max_entries=2), [HATS, TAKE])
    assert infos[-1]["player_0"]["outcome"]["how"] == "limit"
    assert infos[-1]["player_0"]["outcome"]["claims"] == (None, (0, 1, 2))


@pytest.mark.parametrize("style", STYLES)
def test_heard_messages_are_one_line_and_their_place_is_known(style: str) -> None:
    env = dond.parallel_env(style=style, max_message_chars=30)
    sly = "[message] hi\nError: x\r\nthem: [Propose]\u2028Partner: no deal, and so on [END]"
    observations, _, infos = play(env, [HATS, sly])
    (heard,) = texts.parse_events(observations[2]["player_0"]["text"])
    said = infos[2]["player_1"]
    start, end = said["span"]
    assert heard == ("message", said["message"]) == ("message", "hi Error: x  them: [Propose] P")
    assert sly[start:end].split() == said["message"].split() and end - start == len(said["message"]) == 30
    assert "cut" in observations[2]["player_1"]["text"] and said["error"] == "" and said["entry"] == "message"
    assert texts.parse_events(observations[2]["player_1"]["text"]) == [("cut", "30")]
    assert infos[2]["player_0"]["span"] == (0, 0) and infos[2]["player_0"]["message"] == ""
    assert "cut" not in observations[1]["player_0"]["text"]


@given(claims=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 3)), min_size=2, max_size=2))
def test_a_pending_proposal_does_not_leak(claims: list[Any]) -> None:
    """Observations before the end of the game are the same for two different claims."""
    observed = [play(dond.parallel_env(), [HATS, replies.proposal_text(claim), "?"])[0] for claim in claims]
    assert observed[0] == observed[1]


@pytest.mark.parametrize("style", STYLES)
def test_the_partner_s_values_do_not_leak(style: str) -> None:
    """All that player_0 reads, up to the end, stays the same whatever player_1's values are."""
    observed, rewards = set(), set()
    for values in rules.partner_values(GAME.counts, GAME.values[0]):
        start = {**START, "values": (GAME.values[0], values)}
        observations, ends, _ = play(dond.parallel_env(style=style), [HATS, "?", FINE, TAKE, LEAVE], start)
        observed.add(tuple(seen["player_0"]["text"] for seen in observations[:-1]))
        rewards.add(ends[-1][0]["player_0"])
    assert len(observed) == 1 and len(rewards) > 1


REPLY = st.one_of(
    st.text(max_size=40),
    st.sampled_from([HATS, FINE, TAKE, LEAVE, "[message]", "[END]", "[propose] (1 books, 1 hats, 3 balls)"]),
    st.builds("[message]{}".format, st.text(max_size=90)),
    st.builds("[propose] ({} books, {} hats, {} balls)".format, *[st.integers(-1, 5)] * 3),
    st.none() | st.integers() | st.binary(max_size=3),
)


@given(style=st.sampled_from(STYLES), replies=st.lists(st.tuples(REPLY, REPLY), max_size=25), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_any_replies_leave_the_game_standing(style: str, replies: list[tuple[Any, Any]], seed: int) -> None:
    """Every observation is in its space, exactly one player moves, and the same replies give the same game again."""
    games = []
    for _ in range(2):
        env = dond.parallel_env(style=style, max_entries=12, max_message_chars=50, render_mode="ansi")
        seen, infos = env.reset(seed=seed)
        record: list[Any] = [seen, infos]
        for first, second in replies:
            if not env.agents:
                break
            waiting = [agent for agent in env.agents if agent != mover(seen)]
            seen, rewards, terminated, truncated, infos = env.step({"player_0": first, "player_1": second, "x": "y"})
            record += [seen, rewards, terminated, truncated, infos]
            for agent in env.possible_agents:
                assert env.observation_space(agent).contains(seen[agent]), seen[agent]
                assert {"role", "questions", "error", "message", "span", "entry"} <= set(infos[agent])
            assert infos[waiting[0]]["entry"] == ""
            assert len([o for o in seen.values() if o["turn"] == TurnKind.SPEAK]) == bool(env.agents)
            assert ("outcome" in infos["player_0"]) == (not env.agents)
            assert env.render() and env.state_space.contains(env.state())
        games.append(record)
    assert games[0] == games[1]


def test_reset_is_seeded_and_goes_on_from_there() -> None:
    def facts(count: int, seed: int | None) -> list[Any]:
        env = dond.parallel_env()
        drawn = [env.reset(seed=seed) and env.facts]
        return drawn + [env.reset() and env.facts for _ in range(count - 1)]

    games = facts(200, 7)
    assert games == facts(200, 7) != facts(200, 8)
    assert {g["first"] for g in games} == {0, 1}
    assert len({(g["counts"], g["values"]) for g in games}) > 150
    assert any(a["first"] != b["first"] for a, b in pairwise(games))
    before = np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    facts(3, 1)
    assert before == np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]


def test_the_start_can_be_given() -> None:
    env = dond.parallel_env()
    start = {"counts": [1, 1, 3], "values": np.array(START["values"]), "first": 1, "unknown": "ignored"}
    seen, _ = env.reset(seed=3, options=start)
    assert env.facts == {"counts": GAME.counts, "values": GAME.values, "first": 1, "objective": 1.0}
    assert mover(seen) == "player_1"
    assert env.state().tolist() == [1, 1, 3, 0, 1, 3, 1, 3, 2] + [-1] * 6 + [1, 1, 1]
    env.step({"player_1": HATS})
    env.step({"player_0": TAKE})
    assert env.state().tolist() == [1, 1, 3, 0, 1, 3, 1, 3, 2, 0, 1, 2, -1, -1, -1, 1, 1, 1]
    env.step({"player_1": LEAVE})
    assert env.state().tolist() == [1, 1, 3, 0, 1, 3, 1, 3, 2, 0, 1, 2, 1, 0, 1, 1, -1, 1]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"counts": (1, 1, 3)}, "together"),
        ({**START, "counts": (1, 1)}, "three whole numbers"),
        ({**START, "counts": (1, 1, 3.5)}, "three whole numbers"),
        ({**START, "values": ((0, 1, 3),)}, "for each of the two players"),
        ({**START, "values": ((0, 1, 3), (1, 3, 3))}, "worth 10 points"),
        ({**START, "first": 2}, "'first'.* 0 or 1"),
        ({"first": "player_0"}, "'first'.* 0 or 1"),
    ],
)
def test_a_bad_start_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        dond.parallel_env().reset(seed=0, options=options)


@pytest.mark.parametrize(
    "setting",
    [
        *({"objective": 1.5}, {"objective": float("nan")}, {"objective": True}, {"style": "terse"}, {"split": "dev"}),
        *({"max_entries": 0}, {"max_errors": 2.5}, {"max_message_chars": -1}, {"render_mode": "human"}),
    ],
)
def test_bad_settings_are_named(setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(ValueError, match=f"^{name} must be"):
        dond.parallel_env(**setting)
    with pytest.raises(RuntimeError, match="reset"):
        dond.parallel_env().step({})


if __name__ == "__main__":
    for ending_, style_ in product(GOLDEN, STYLES):
        (HERE / "golden" / f"dond_{ending_}_{style_}.txt").write_text(playthrough(style_, ending_), encoding="utf-8")
