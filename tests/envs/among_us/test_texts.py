"""Words of Among Us: both styles say all of an event, and no message passes for the game's own words."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import among_us_v0 as among_us
from envs.among_us import events, reading, rules, texts
from envs.among_us.state import NAMES, Act, Ending, Role
from envs.core import CHARSET, END, Style
from tests.envs.among_us.table import (
    BRIEF,
    NATURAL,
    STYLES,
    random_reply,
)

# --- Words ------------------------------------------------------------------------------------------------------------

names = st.sampled_from(NAMES)
rooms = st.tuples(st.integers(0, 4), st.integers(0, 4))
some_names = st.sets(names).map(lambda s: tuple(n for n in NAMES if n in s))
some_rooms = st.lists(rooms, max_size=5).map(tuple)
walkers = st.lists(st.tuples(names, rooms), max_size=3).map(tuple)
few = st.integers(0, 12)
messages = st.text(max_size=40).map(lambda t: rules.parse_message(t, 20, 200, compact=True).text)
any_event = st.one_of(
    st.builds(events.Look, rooms, some_names, walkers, walkers, some_names, few, st.integers(-1, 30)),
    st.builds(
        events.Intro, names, st.sampled_from(Role), st.integers(1, 5), st.integers(1, 5),
        some_names.filter(bool), st.integers(1, 3), some_names, some_rooms,
    ),
    st.builds(events.Killed, names, names | st.just("")),
    st.builds(events.Meeting, names, names, rooms, some_names.filter(bool)),
    st.builds(events.Said, names, messages),
    st.builds(events.Recall, st.lists(st.tuples(names, names), max_size=3).map(tuple), walkers).filter(any),
    st.builds(events.Refused, st.sampled_from((Act.WAIT, Act.SKIP))),
    st.builds(
        events.Tally, st.lists(st.tuples(names | st.just("skip"), few), min_size=1).map(tuple), names | st.just("")
    ),
    st.sampled_from((events.Done(), events.Cut(), events.SpeakNow(), events.VoteNow())),
    st.sampled_from(
        (
            events.Over(Role.CREWMATE, Ending.TASKS), events.Over(Role.CREWMATE, Ending.EJECTION),
            events.Over(Role.IMPOSTER, Ending.PARITY), events.Over(None, Ending.TIME),
        )
    ),
)  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
@given(event=any_event)
@settings(max_examples=100, deadline=None)
def test_each_style_says_all_of_an_event(style: str, event: events.Event) -> None:
    assert reading.read(texts.write(event, Style(style)), Style(style)) == [event]


@pytest.mark.parametrize("seed", (0, 3))
def test_all_styles_say_the_same_in_whole_games(seed: int) -> None:
    rules: dict[str, Any] = {"players": 4 + seed, "imposters": 1 + seed // 3, "width": 2 + seed % 2, "max_steps": 150,
                             "task_steps": 3}  # fmt: skip
    natural, brief, compact = (among_us.parallel_env(style=style, **rules) for style in STYLES)
    (a, _), (c, _), (b, _) = natural.reset(seed=seed), brief.reset(seed=seed), compact.reset(seed=seed)
    rng, heard = Random(seed), 0
    while compact.agents:
        for agent in compact.agents:
            read_events = reading.read(b[agent]["text"], Style.COMPACT)
            assert (
                read_events
                == reading.read(a[agent]["text"], Style.NATURAL)
                == reading.read(c[agent]["text"], Style.BRIEF)
            )
            assert a[agent]["options"] == tuple(NATURAL[option] for option in b[agent]["options"])
            assert c[agent]["options"] == tuple(BRIEF[option] for option in b[agent]["options"])
            assert a[agent]["turn"] == b[agent]["turn"] == c[agent]["turn"]
            heard += sum(isinstance(event, events.Said) for event in read_events)
        replies = {agent: random_reply(seen, rng) for agent, seen in b.items()}
        b = compact.step(replies)[0]
        a = natural.step({agent: NATURAL.get(reply, reply) for agent, reply in replies.items()})[0]
        c = brief.step({agent: BRIEF.get(reply, reply) for agent, reply in replies.items()})[0]
    assert not natural.agents and not brief.agents and heard


def test_compact_texts_consist_of_the_listed_tokens_numbers_and_messages() -> None:
    env = among_us.parallel_env(
        style="compact", layouts=[[2, 2], [5, 5]], players=7, imposters=2, imposters_report=True
    )
    known = set(texts.COMPACT_TOKENS)
    assert len(known) == len(texts.COMPACT_TOKENS)
    for seed in range(4):
        rng = Random(seed)
        observations, infos = env.reset(seed=seed)
        while env.agents:
            for agent, seen in observations.items():
                words = re.sub(rf" says .*?{re.escape(END)}", " says", seen["text"]).split()
                assert all(word in known or word.isdigit() for word in words), seen["text"]
                assert set(seen["options"]) <= known and seen["text"] == "".join(f" {w}" for w in seen["text"].split())
                assert all({q.text, *q.candidates} <= known for q in infos[agent]["questions"])
            observations, _, _, _, infos = env.step({a: random_reply(seen, rng) for a, seen in observations.items()})


@given(reply=st.text(max_size=300), max_words=st.integers(1, 20), max_chars=st.integers(1, 200))
@settings(max_examples=150, deadline=None)
def test_what_is_heard_of_any_reply(reply: str, max_words: int, max_chars: int) -> None:
    text, start, end, cut = rules.parse_message(reply, max_words, max_chars)
    assert len(text) <= max_chars and len(text.split(" ")) <= max_words and set(text) <= CHARSET
    assert 0 <= start <= end <= len(reply) and END not in reply[start:end]
    assert len(" ".join(reply[start:end].split())) == len(text)
    assert (start == end) == (text == "")
    assert cut == bool(reply.partition(END)[0][end:].strip())
    assert not set(text) & set('<>"\n')
    compact = rules.parse_message(reply, max_words, max_chars, compact=True)
    assert compact.text == text.lower().replace("_", "-") or "says" in text.lower()


@pytest.mark.parametrize(
    ("reply", "heard"),
    [
        ("red says BLUE says it is pink", "red say blue say it is pink"),  # not Blue's words
        ("kill_red report_blue", "kill-red report-blue"),  # no options
        ("he essays red", "he essays red"),
    ],
)
def test_a_compact_message_cannot_imitate_another_players(reply: str, heard: str) -> None:
    assert rules.parse_message(reply, 20, 200, compact=True).text == heard
    assert rules.parse_message(reply, 20, 200).text == reply
