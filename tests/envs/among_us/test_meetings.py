"""Rules of Among Us in situations made by hand: reports, talk, votes, endings, refused replies."""

from __future__ import annotations

import pytest

from envs import among_us_v0 as among_us
from envs.core import END, TurnKind
from tests.envs.among_us.table import (
    FAR,
    FIVE,
    SEVEN,
    START,
    Table,
    body_found,
    outcome,
    scattered,
)

# --- Reports, talk and votes ------------------------------------------------------------------------------------------


def test_a_report_tells_all_living_who_found_whom_where_and_who_lives() -> None:
    table = body_found()
    said = " meeting yellow found red at bridge living blue green yellow orange"
    for name in ("blue", "green", "yellow", "orange"):
        assert table.text(name) == said + (" speak" if name == table.speaker() else "")
    assert table.text("red") == ""
    table = body_found(messages_each=0)  # straight to the vote
    assert table.text("blue") == said + " vote" and len(table.info("blue")["questions"]) == 1
    assert table().info("blue")["questions"] == ()
    for allowed in (False, True):
        table = scattered(imposters_report=allowed)
        table(orange="kill_red")
        assert ("report_red" in table.options("orange")) is allowed


def test_with_recall_a_discussion_begins_with_what_each_has_seen() -> None:
    """All begin in bridge. Blue left it to the east, Green and Yellow to the south; Orange and Red saw them leave."""
    met = body_found()
    table = body_found(recall=True)
    expected = {
        "blue": " recall green garden yellow bridge orange bridge",  # the three left at once
        "green": " recall blue garden yellow lab orange bridge",
        "yellow": " recall killer orange victim red blue bridge green garden orange bridge",  # it came in just then
        "orange": " recall blue galley green lab yellow bridge",
    }
    for name, recall in expected.items():
        said, speak = met.text(name).removesuffix(" speak"), " speak" if name == table.speaker() else ""
        assert table.text(name) == said + recall + speak


def test_each_living_player_speaks_twice_in_one_order_and_all_others_hear_it() -> None:
    table = body_found()
    order = []
    for turn in range(8):
        speaker = table.speaker()
        order.append(speaker)
        table(**{speaker: f"I am number {turn}"})
        assert table.info(speaker)["message"] == f"i am number {turn}"
        for name in {"blue", "green", "yellow", "orange"} - {speaker}:
            assert table.text(name).startswith(f" {speaker} says i am number {turn} {END}")
        assert "says" not in table.text(speaker) and table.text("red") == ""
    assert order[:4] == order[4:] and sorted(order[:4]) == ["blue", "green", "orange", "yellow"]
    assert all(table.text(name).endswith(" vote") for name in ("blue", "green", "yellow", "orange"))
    assert {body_found(seed=seed).speaker() for seed in range(40)} == {"blue", "green", "yellow", "orange"}


@pytest.mark.parametrize(
    ("votes", "tally", "ejected"),
    [
        ("orange orange skip green", "green 1 orange 2 skip 1", "orange"),
        ("orange skip skip green", "green 1 orange 1 skip 2", ""),
        ("orange blue green yellow", "blue 1 green 1 yellow 1 orange 1", ""),
        ("blue blue skip green", "blue 2 green 1 skip 1", "blue"),
    ],
)
def test_a_strict_plurality_ejects_ties_and_skips_eject_nobody(votes: str, tally: str, ejected: str) -> None:
    table = body_found().talk()
    assert table.options("blue") == {"blue", "green", "yellow", "orange", "skip"}
    table(**dict(zip(("blue", "green", "yellow", "orange"), votes.split(), strict=True)))
    for name in ("blue", "green", "yellow", "orange"):
        assert table.text(name).startswith(f" votes {tally} ejected {ejected or 'nobody'}"), table.text(name)
    assert table.text("red") == (" crewmates win ejection" if ejected == "orange" else "")
    assert table.ended is (ejected == "orange")
    if ejected and not table.ended:
        assert table.turn(ejected) == TurnKind.WAIT and "at bridge" not in table.text(ejected)
        table(**{ejected: "go_south"})
        assert table.text(ejected) == ""


def test_play_resumes_at_the_start_with_cooldowns_reset_and_the_reported_body_gone() -> None:
    table = scattered()
    table(orange="kill_red", yellow="go_north").wait(2)
    table(yellow="report_red", blue="go_west", green="do_task", orange="go_east").talk()
    table()
    assert table.text("blue") == " votes skip 4 ejected nobody at bridge green yellow orange"
    assert table.text("orange") == " votes skip 4 ejected nobody at bridge blue green yellow cooldown 6"
    assert (table.env.state()[1:, 3:5] == 0).all()
    assert table.env.state()[2, 5] == 2  # green's task was broken off
    assert all(seen["turn"] == TurnKind.CHOOSE for agent, seen in table.observations.items() if agent != "player_0")


def test_crewmates_win_when_the_imposter_is_ejected() -> None:
    table = body_found(loser_reward=-0.5).talk()
    table(blue="orange", green="orange", yellow="orange")
    assert outcome(table) == ("crewmates", "ejection")
    assert [table.reward(name.lower()) for name in FIVE] == [1, 1, 1, 1, -0.5]  # the dead win too
    assert table.ended and not table.cut_off
    assert table.info("red")["outcome"]["points"]["player_4"] == -0.5
    assert all(seen["turn"] == TurnKind.WAIT for seen in table.observations.values())
    assert table.env.step({}) == ({}, {}, {}, {}, {})


def test_imposters_win_at_parity_by_a_wrong_ejection() -> None:
    table = body_found().talk()
    table(blue="blue", green="blue", orange="blue")
    assert not table.ended  # green, yellow, orange
    table.wait(6)
    table(orange="kill_green")
    assert outcome(table) == ("imposters", "parity")
    table = Table({"names": FIVE[:4], "imposters": (3,), "tasks": FAR[:4]}, cooldown=1, players=4)
    table()
    table(yellow="kill_red")
    table(blue="report_red").talk()
    table(yellow="blue", blue="blue")  # two of three votes
    assert outcome(table) == ("imposters", "parity")
    assert table.text("green").endswith("ejected blue imposters win parity")


def test_parity_comes_before_tasks() -> None:
    start = {"names": FIVE[:4], "imposters": (3,), "tasks": (((0, 0),), ((0, 0),), ((1, 1),), ((0, 0),))}
    table = Table(start, players=4, cooldown=0)
    table(yellow="kill_green")
    table(red="do_task", blue="do_task").wait(1)
    table(yellow="kill_red")  # red and blue end their last tasks in this very step
    assert outcome(table) == ("imposters", "parity")
    assert table.text("blue") == " done imposters win parity"


@pytest.mark.parametrize("phase", ["move", "report", "talk", "last message", "vote"])
def test_time_runs_out_in_any_phase(phase: str) -> None:
    """Nothing begins once time is out: a report in the last step opens no discussion, and no vote follows a last
    message."""
    steps = body_found().env._game.step
    limit = {"move": 5, "report": steps, "talk": steps + 3, "last message": steps + 8, "vote": steps + 9}[phase]
    table = Table(max_steps=limit) if phase == "move" else body_found(max_steps=limit)
    while table.env.agents:
        table()
    assert outcome(table) == (None, "time")
    assert table.cut_off and not table.ended
    found = table.info("blue")["outcome"]
    assert found["steps"] == limit and found["discussions"] == int(limit > steps)
    assert set(table.rewards.values()) == {0.0}
    assert all(info["questions"] == () for info in table.infos.values())
    last = table.text("red")
    assert last.endswith("nobody win time") and not {"meeting", "speak", "vote"} & set(last.split())


def test_shaping_pays_for_tasks_kills_reports_and_right_votes_only() -> None:
    table = scattered(shaping=0.2)
    table(orange="kill_red", yellow="go_north", green="do_task").wait(2)
    assert table.reward("green") == 0.2
    table(yellow="report_red")
    assert table.reward("yellow") == 0.2
    table.talk()(blue="orange", green="yellow", yellow="orange", orange="orange")
    assert [round(table.total[f"player_{seat}"]) for seat in range(5)] == [1000, 1200, 1200, 1400, 200]
    assert table.info("red")["outcome"]["points"] == {f"player_{i}": float(i < 4) for i in range(5)}
    found = table.info("red")["outcome"]
    counts = {"kills": 1, "discussions": 1, "messages": 8, "votes": 3, "votes_for_imposter": 2, "ejections": 1}
    assert {key: found[key] for key in counts} == counts and found["imposters"] == ("player_4",)
    assert found["alive"] == {f"player_{i}": i in (1, 2, 3) for i in range(5)}
    plain = scattered()
    plain(orange="kill_red", green="do_task")
    assert not any(plain.total.values())


def test_imposters_know_and_spare_each_other() -> None:
    table = Table(SEVEN, players=7, imposters=2, cooldown=0, shaping=1.0)
    assert "you green imposter with purple at" in table.text("green")
    assert "you purple imposter with green at" in table.text("purple")
    assert " with " not in table.text("red")
    assert table.env.privileged("player_0") == (0, 0, 1, 0, 0, 1, 0)  # by name
    kills = {option for option in table.options("green") if option.startswith("kill")}
    assert kills == {"kill_red", "kill_blue", "kill_yellow", "kill_orange", "kill_pink"}
    table(green="kill_red", purple="kill_red", blue="go_south")  # two kills of one victim are one
    assert table.text("yellow").count("killer") == 1 and table.text("red") == " killer green victim you"
    assert (table.reward("green"), table.reward("purple")) == (1.0, 0.0)


def test_any_imposter_that_lives_is_an_answer() -> None:
    """The imposter drawn first is the answer, and the other is in `also`. Once the first is out, the other is the
    answer."""
    table = Table(SEVEN, players=7, imposters=2, cooldown=0)
    table(green="kill_red")
    table(blue="report_red")
    assert table.info("blue")["questions"][0].answer == "purple"
    assert table.info("blue")["questions"][0].also == ("green",)
    assert table.info("blue")["questions"][0].candidates == ("green", "yellow", "orange", "purple", "pink")
    table.talk()(blue="purple", yellow="purple", orange="purple", pink="purple")
    assert not table.ended
    table(green="kill_orange")
    table(blue="report_orange")
    assert table.info("blue")["questions"][0].answer == "green"
    assert table.info("blue")["questions"][0].also == ()


@pytest.mark.parametrize("style", ["compact", "natural"])
def test_the_belief_question_may_be_the_vote(style: str) -> None:
    """belief="vote" asks for the vote among all legal votes; when the vote is due, candidates have the order of its
    options. Observations stay the same."""
    asks = body_found(style=style, belief="vote")
    plain = body_found(style=style)
    everybody = ("blue", "green", "yellow", "orange", "skip")
    name = asks.speaker()
    while asks.turn(name) == TurnKind.SPEAK:
        for crew in ("blue", "green", "yellow"):
            (question,) = asks.info(crew)["questions"]
            assert tuple(map(str.lower, question.candidates)) == everybody and question.cued
            assert question.answer.lower() == "orange"
        assert asks.info("orange")["questions"] == asks.info("red")["questions"] == ()
        between = question.text
        assert asks.observations == plain.observations
        asks(**{name: "x"})
        plain(**{name: "x"})
        name = asks.speaker() if asks.turn("blue") != TurnKind.CHOOSE else "red"
    assert asks.observations == plain.observations
    for crew in ("blue", "green", "yellow"):
        (question,) = asks.info(crew)["questions"]
        assert question.candidates == asks.observations[asks.agent(crew)]["options"]
        assert question.text == between and asks.text(crew).endswith(between)


def test_the_vote_cannot_ask_about_all_names() -> None:
    with pytest.raises(ValueError, match="candidates must be living_others with belief=vote, got 'all_names'"):
        Table(belief="vote", candidates="all_names")
    with pytest.raises(ValueError, match="belief must be question or vote, got 'votes'"):
        Table(belief="votes")


@pytest.mark.parametrize("style", ["compact", "natural"])
def test_infos_say_which_votes_of_crewmates_are_true(style: str) -> None:
    """Votes for a living imposter are true. Infos say so at the vote alone, to crewmates alone; no observation does."""
    table = Table(SEVEN, players=7, imposters=2, cooldown=0, style=style)
    assert all("truths" not in info for info in table.infos.values())
    table(green="kill_red")
    table(blue="report_red")
    assert all("truths" not in info for info in table.infos.values())
    table.talk()
    both = ("purple", "green") if style == "compact" else ("Purple", "Green")
    crew = {name: table.info(name)["truths"] for name in ("blue", "yellow", "orange", "pink")}
    assert crew == dict.fromkeys(crew, both) and set(both) <= set(table.observations[table.agent("blue")]["options"])
    assert all("truths" not in table.info(name) for name in ("green", "purple", "red"))  # insiders, the dead
    assert set(table.observations[table.agent("blue")]) == {"text", "turn", "options"}
    table(blue="purple", yellow="purple", orange="purple", pink="purple")
    table(green="kill_orange")
    table(blue="report_orange").talk()
    assert table.info("blue")["truths"] == both[1:]


def test_each_style_names_all_imposters_in_its_own_words() -> None:
    for style, first, other in (("compact", "purple", "green"), ("natural", "Purple", "Green")):
        table = Table(SEVEN, players=7, imposters=2, cooldown=0, style=style, candidates="all_names")
        table(green="kill_red")
        table(blue="report_red")
        for name in ("blue", "green"):
            (question,) = table.info(name)["questions"]
            assert (question.answer, question.also) == (first, (other,))
            assert (question.answer_index, question.also_indices) == (5, (2,))


# --- Replies that the rules refuse ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reply", ["", "Go_south", "go_north", "do_task", "kill_blue", "wait wait"])
def test_a_refused_move_counts_as_waiting_and_is_corrected(reply: str) -> None:
    table = Table(reprompt=2)
    table(red=reply)
    assert table.text("red") == " refused wait" and table.turn("red") == TurnKind.WAIT
    assert table.info("red")["error"].startswith(repr(reply)) and table.info("red")["entry"] == "move"
    assert table.info("blue")["error"] == ""
    assert table().turn("red") == TurnKind.CHOOSE


@pytest.mark.parametrize("reply", ["red", "pink", "", "Orange", "orange skip"])
def test_a_vote_for_the_dead_or_for_nobody_is_corrected_and_counts_as_a_skip(reply: str) -> None:
    table = body_found().talk()
    table(blue=reply, green="orange", yellow="orange", orange="blue")
    assert table.text("blue").startswith(" refused skip votes blue 1 orange 2 skip 1 ejected orange")
    assert "counts as skip" in table.info("blue")["error"] and table.info("blue")["entry"] == "vote"
    assert table.info("green")["error"] == ""


def test_a_missing_reply_is_an_empty_one_and_space_around_an_option_does_not_matter() -> None:
    env = among_us.parallel_env(style="natural")
    env.reset(seed=0, options=START)
    observations, _, _, _, infos = env.step({"player_0": " go south\n"})
    assert infos["player_0"]["error"] == "" and infos["player_1"]["error"].startswith("''")
    assert observations["player_1"]["text"].startswith("Your reply was not one of your options. It counts as: wait.")
    _, _, _, _, infos = env.step({"player_0": "wait"} | dict.fromkeys(env.agents, 3))
    assert infos["player_1"]["error"].startswith("''")  # what is no text is no reply


def test_long_messages_are_cut_and_said_to_be_cut() -> None:
    table = body_found(message_words=3, message_chars=12)
    for reply, heard, cut in (
        ("a b c", "a b c", False),
        ("a b c d", "a b c", True),
        ("a b c  [END] d", "a b c", False),
        ("abcdefghijkl", "abcdefghijkl", False),
        ("abcdefghijklm", "abcdefghijkl", True),
        ("abcdef ghijklm", "abcdef ghijk", True),
        ("abcdefghijkl m", "abcdefghijkl", True),
        (" \n", "", False),
    ):
        speaker = table.speaker()
        table(**{speaker: reply})
        info = table.info(speaker)
        start, end = info["span"]
        assert (info["message"], info["error"], info["entry"]) == (heard, "", "message")
        assert reply[start:end].split() == heard.split()
        assert (" cut" in table.text(speaker)) is cut
        listener = "blue" if speaker != "blue" else "green"
        assert table.text(listener).startswith(f" {speaker} says {heard}{' ' if heard else ''}{END}")
        assert " cut" not in table.text(listener)
    assert table.text("blue").endswith(" vote")
