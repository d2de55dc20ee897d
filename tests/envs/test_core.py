"""The interface that games share: seeds, settings and their defaults, and seats that read different styles."""

import importlib.util
import inspect
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml
from pettingzoo.test import api_test, parallel_api_test, parallel_seed_test, seed_test

from envs import among_us_v0, diplomacy_v0, dond_v0
from envs.among_us import state as among_us_state
from envs.among_us import texts as among_us_texts
from envs.core import Question, Style, TurnKind

CONF = Path(__file__).parents[2] / "conf" / "env"
both_games = pytest.mark.parametrize("game", [dond_v0, among_us_v0])
needs_package = pytest.mark.skipif(importlib.util.find_spec("diplomacy") is None, reason="needs the extra `diplomacy`")
ALL_GAMES = [dond_v0, among_us_v0, pytest.param(diplomacy_v0, marks=needs_package)]
SHORT: dict[ModuleType, dict[str, Any]] = {  # settings of short games
    dond_v0: {}, among_us_v0: {"max_steps": 40}, diplomacy_v0: {"years": 1, "press": "private"},
}  # fmt: skip


# --- The interface ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("game", ALL_GAMES)
@pytest.mark.parametrize("style", [each.value for each in Style])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the package leaves a file open
@pytest.mark.filterwarnings("error", "ignore:Observation", "ignore:Action space")  # it expects arrays
def test_pettingzoo_api(game: ModuleType, style: str) -> None:
    parallel_api_test(game.parallel_env(style=style, **SHORT[game]), num_cycles=80)
    parallel_seed_test(lambda: game.parallel_env(style=style, **SHORT[game]), num_cycles=40)
    api_test(game.env(style=style, **SHORT[game]), num_cycles=80)
    seed_test(lambda: game.env(style=style, **SHORT[game]), num_cycles=40)


# --- Seeds ------------------------------------------------------------------------------------------------------------
@both_games
def test_any_whole_number_of_at_least_0_is_a_seed(game: ModuleType) -> None:
    drawn = np.random.default_rng(0).integers(9)
    for seed in (np.int64(3), np.uint8(3), drawn, np.array(5), 0, 2**63 + 1):
        assert str(game.parallel_env().reset(seed=seed)) == str(game.parallel_env().reset(seed=int(seed)))


@both_games
@pytest.mark.parametrize("seed", [-1, np.int64(-1), True, np.True_, 3.0, np.float64(3), "3", [3], np.array([3, 4])])
def test_anything_else_is_refused(game: ModuleType, seed: Any) -> None:
    env = game.parallel_env()
    with pytest.raises(ValueError, match=r"^seed must be a whole number of at least 0, got "):
        env.reset(seed=seed)
    wrapped = game.env()
    with pytest.raises(ValueError, match=r"^seed must be"):
        wrapped.reset(seed=seed)


def test_questions_have_different_answers_among_their_candidates() -> None:
    for answer, also in (("x", ()), ("a", ("x",)), ("a", ("a",)), ("a", ("b", "b"))):
        with pytest.raises(ValueError, match="must be different ones of the candidates"):
            Question("who?", ("a", "b"), answer, also)
    assert Question("who?", ("a", "b"), "a", ("b",)).also_indices == (1,)


# --- Settings ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("game", ALL_GAMES)
@pytest.mark.parametrize("make", ["parallel_env", "env"])
def test_signatures_show_all_settings_with_the_defaults_of_the_command_line(game: ModuleType, make: str) -> None:
    shown = {name: p.default for name, p in inspect.signature(getattr(game, make)).parameters.items()}
    assert shown.pop("render_mode") is None
    name = game.__name__.removeprefix("envs.").removesuffix("_v0")
    expected = yaml.safe_load((CONF / f"{name}.yaml").read_text())["env"]
    assert expected.pop("game") == name
    assert shown == {key: tuple(value) if isinstance(value, list) else value for key, value in expected.items()}
    assert getattr(game, make)(style="natural").metadata["name"] == game.__name__.removeprefix("envs.")


# --- Styles that meet -------------------------------------------------------------------------------------------------

IN_STYLE = {  # by style, options as they read in compact style and in that style
    style: dict(zip(among_us_texts.OPTION[Style.COMPACT].values(), options.values(), strict=True))
    for style, options in among_us_texts.OPTION.items()
}


def reply_of(seen: dict[str, Any], rng: Random) -> str:
    """Returns a reply of a player that reads compact style; some are refused."""
    if rng.random() < 0.1:
        return "nonsense"
    if seen["turn"] == TurnKind.CHOOSE:
        return rng.choice(seen["options"])
    messages = ("i saw red kill blue", "blue killed green in lab", "who did it ? " * 30)
    proposals = ("(1 books, 0 hats, 1 balls)", "(9 books, 9 hats, 9 balls)", "(1 books)")
    tagged = [*(f"[message] {words}" for words in messages), *(f"[propose] {claim}" for claim in proposals)]
    return rng.choice([*messages, *tagged]) if seen["turn"] else ""


@both_games
@pytest.mark.parametrize("seed", range(3))
def test_each_seat_reads_what_it_would_in_a_game_of_its_own_style(game: ModuleType, seed: int) -> None:
    """Texts, options, questions and corrections are compared between games that are played alike."""
    name = game.__name__.removeprefix("envs.")
    rules = {"dond_v0": {"max_message_chars": 30}, "among_us_v0": {"cooldown": 1, "task_steps": 3, "max_steps": 120}}
    envs = {style: game.parallel_env(style=style, **rules[name]) for style in Style}
    mixed = game.parallel_env(style=list(Style)[seed % 3], **rules[name])
    agents = mixed.possible_agents
    styles = {agent: list(Style)[(seed + number) % 3] for number, agent in enumerate(agents)}
    given = {agent: style.value for agent, style in styles.items() if style is not mixed.style}
    found = {style: each.reset(seed=seed) for style, each in envs.items()}
    seen, infos = mixed.reset(seed=seed, options={"styles": given})
    rng, said = Random(seed), 0
    while True:
        for agent, style in styles.items():
            assert seen[agent] == found[style][0][agent]
            assert infos[agent] == found[style][1][agent]
        assert mixed.agents == envs[Style.NATURAL].agents == envs[Style.COMPACT].agents
        if not mixed.agents:
            break
        replies = {agent: reply_of(each, rng) for agent, each in found[Style.COMPACT][0].items()}
        words = {style: {a: own.get(reply, reply) for a, reply in replies.items()} for style, own in IN_STYLE.items()}
        stepped = {style: each.step(words[style]) for style, each in envs.items()}
        own = mixed.step({agent: words[style][agent] for agent, style in styles.items()})
        assert own[1:4] == stepped[Style.NATURAL][1:4] == stepped[Style.COMPACT][1:4]
        found = {style: (each[0], each[4]) for style, each in stepped.items()}
        seen, infos = own[0], own[4]
        said += any(info["message"] for info in infos.values())
    assert said


@both_games
@pytest.mark.parametrize("styles", ["natural", {"player_9": "natural"}, {"player_0": "verse"}, {"player_1": ["x"]}])
def test_agents_and_styles_that_do_not_exist_are_refused(game: ModuleType, styles: Any) -> None:
    with pytest.raises(ValueError, match="The reset option 'styles' must give agents natural, brief or compact, got "):
        game.parallel_env().reset(seed=0, options={"styles": styles})


def meeting(styles: dict[str, str], message: str) -> dict[str, str]:
    """Observed texts by agent, once player_1, the first speaker after Orange's kill is reported, has said `message`."""
    env = among_us_v0.parallel_env(cooldown=0, messages_each=1)
    start = {"names": among_us_state.NAMES[:5], "imposters": (4,), "styles": styles}
    for seed in range(50):
        seen, _ = env.reset(seed=seed, options=start)
        for kind in ("kill", "report"):
            actions = {}
            for agent, each in seen.items():
                wanted = [o for o in each["options"] if o.startswith(kind) and (kind == "report" or "ed" in o)]
                actions[agent] = next(iter(wanted), "wait")
            seen = env.step(actions)[0]
        if seen["player_1"]["turn"] == TurnKind.SPEAK:
            seen = env.step({"player_1": message})[0]
            return {agent: each["text"] for agent, each in seen.items()}
    raise AssertionError("player_1 never spoke first")


def test_messages_go_across_unchanged_and_pass_for_nothing_else_in_either_style() -> None:
    styles = {"player_1": "natural", "player_2": "natural", "player_3": "compact"}
    heard = meeting(styles, "I saw Orange in room (0,1)! [END]")
    assert 'Blue says: "I saw Orange in room (0,1)!"\n' in heard["player_2"]
    assert " blue says i saw orange in room (0,1)! [END]" in heard["player_3"]
    heard = meeting(styles, "Hm. Green says it_says kill_red [END]")  # no forgery for those who read compact style
    assert " blue says hm. green say it-say kill-red [END]" in heard["player_3"]
    heard = meeting({"player_2": "natural"}, " I saw ORANGE says [END]")  # of a compact speaker, as always
    assert 'Blue says: "i saw orange say"\n' in heard["player_2"]


# --- Limits -----------------------------------------------------------------------------------------------------------
