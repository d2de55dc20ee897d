"""The table of a game: what the page shows and offers, worked out from the player's own observations."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from envs.among_us import events
from envs.among_us.state import Role
from envs.among_us.texts import write
from envs.core import Style
from experiments.webapp import engine
from experiments.webapp.engine import Sight
from experiments.webapp.table import table_view
from marl.rollout.games import env_maker
from tests.experiments.webapp.test_web import Page, recorded, serving

START = {"counts": (3, 1, 3), "values": ((1, 4, 1), (0, 1, 3)), "first": 0}


def sight(*entries: tuple[str, str], game: str = "dond", state: str = "yours", **given: Any) -> Sight:
    return Sight("g", "p", game, "scripted", state, entries, **given)


def rules(**settings: Any) -> str:
    env = env_maker({"game": "dond", "style": "natural", **settings})()
    return str(env.reset(seed=1, options=START)[0]["player_0"]["text"])


def test_claims_are_offered_once_somebody_has_spoken() -> None:
    first = ("seen", rules(objective=0.0))
    table = table_view(sight(first))
    assert table["proposes"] and not table["talked"] and "as many points for yourself" in table["board"]["goal"]
    refused = (first, ("said", "[message] [propose] x [END]"), ("seen", "Error: Send one message.\n"))
    table = table_view(sight(*refused))
    assert not table["talked"] and table["lines"][0]["refused"] and table["lines"][1]["kind"] == "error"
    assert table_view(sight(*refused, ("said", "[message] hats? [END]")))["talked"]
    assert table_view(sight(first, ("seen", "Partner: Error: you may propose\n")))["talked"]
    assert not table_view(sight(("seen", rules(format="structured"))))["proposes"]


@pytest.mark.parametrize(("objective", "score"), [(0.0, None), (1.0, "12"), (-1.0, "-2")])
def test_the_end_tells_points_and_score(objective: float, score: str | None) -> None:
    entries = (
        ("seen", rules(objective=objective)),
        ("said", "[propose] (1 books, 1 hats, 0 balls) [END]"),
        ("seen", "The game is over: a deal. You get 5 points, your partner gets 7.\n"),
    )
    table = table_view(sight(*entries, state="over"))
    assert table["lines"][0]["text"] == "1 book, 1 hat, worth 5 to you"
    assert table["board"]["result"] == "A deal"
    sums = {"Your points": "5", "Your partner's points": "7", **({"Your score": score} if score else {})}
    assert table["board"]["sums"] == sums


def test_no_message_passes_for_a_word_of_the_game() -> None:
    """A partner that quotes the game neither ends the talk nor makes a deal of a game without one."""
    said = "Your partner has made a proposal. The game is over: a deal. You get 9 points, your partner gets 8."
    talk = (("seen", rules()), ("said", "[message] hats? [END]"), ("seen", f"Partner: {said}\n"))
    assert not table_view(sight(*talk))["closed"]
    assert table_view(sight(*talk, ("seen", "Notice: Your partner has made a proposal. Answer it.\n")))["closed"]
    end = f"Partner: {said}\nThe game is over: no deal. Both of you get 0 points.\n"
    board = table_view(sight(*talk[:2], ("seen", end), state="over"))["board"]
    assert board["result"] == "No deal" and set(board["sums"].values()) == {"0"}


def test_claims_in_parts_are_choices(tmp_path: Path) -> None:
    """The page offers the choices of format=structured, and no form for proposals beside them."""
    with serving(tmp_path, "games.dond.env.format=structured", "games.dond.env.max_entries=6") as browser:
        page = Page(browser(), "dond", "scripted", "player_0")
        page.finish()
        assert page.state == "over"
        sent = "".join(page.sent)
        assert 'value="propose"' not in sent and 'value="proposal"' in sent and 'name="text"' in sent
        (transcript,) = recorded(tmp_path)
        assert not [(turn["agent"], turn["text"], turn["error"]) for turn in transcript["turns"] if turn["error"]]


def test_the_map_shows_whom_the_player_sees() -> None:
    """Room, people, bodies and tasks left are the last that the game told; nothing that a player says changes them."""
    events_seen = [
        events.Intro("Red", Role.CREWMATE, 2, 2, ("Red", "Blue", "Green"), 1, (), ((0, 0), (1, 0), (1, 0))),
        events.Look((0, 0), ("Blue",), (), (), (), 1),
        events.Look((1, 0), (), (("Blue", (0, 0)),), (), ("Green",), 2),
        events.Done(),
        events.Said("Blue", "You are in room (1,1). Here with you: Pink."),
    ]
    first, *later = [
        "".join(write(event, Style.NATURAL) for event in part)
        for part in (events_seen[:2], events_seen[2:3], events_seen[3:])
    ]
    options = ("go west", "go south", "wait", "report body of Green")
    entries = (("seen", first), ("said", "go east"), *(("seen", text) for text in later))
    table = table_view(sight(*entries, game="among_us", options=options))
    board = table["board"]
    assert (board["name"], board["role"]) == ("Red", "crewmate")
    assert board["choices"] == ["report body of Green", "wait"]
    (nw, ne), (_, se) = board["rooms"]
    assert ne["here"] and ne["people"] == [("Blue", "from 0,0")] and ne["bodies"] == ("Green",) and ne["tasks"] == 1
    assert nw["move"] == "go west" and nw["tasks"] == 1 and se["move"] == "go south" and not se["people"]
    assert [line["kind"] for line in table["lines"]][1] == "act"
    over = (*entries, ("seen", write(events.Over(Role.CREWMATE, "tasks"), Style.NATURAL)))  # type: ignore[arg-type]
    assert table_view(sight(*over, game="among_us", state="over"))["board"]["result"] == "You won"


# --- The queue --------------------------------------------------------------------------------------------------------
def test_places_go_to_those_who_wait_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two places are shared: the first to ask gets the next free one. People who have stopped asking are passed
    over."""
    now = [0.0]
    monkeypatch.setattr(engine.time, "monotonic", lambda: now[0])
    queue = engine.Queue()

    def asks(person: str, open_games: int) -> int:
        try:
            queue.admit(person, 2, open_games)
        except engine.Full as full:
            return full.place
        return 0

    assert [asks(who, 2) for who in "abca"] == [1, 2, 3, 1]
    assert asks("b", 1) == 1 and asks("d", 1) == 3  # the free place is a's
    assert asks("a", 1) == 0
    assert [asks(who, 2) for who in "bcd"] == [1, 2, 3]
    now[0] = 10.0
    assert [asks(who, 2) for who in "cd"] == [2, 3]
    now[0] = 20.0  # b has not asked for 20 seconds
    assert asks("d", 1) == 1 and asks("c", 1) == 0 and asks("d", 1) == 0
