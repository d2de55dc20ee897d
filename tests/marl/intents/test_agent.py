"""The player that talks with a plan: it claims what it planned, and its partner never reads an intent."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from envs.dond import replies
from envs.dond.rules import Triple
from envs.dond.texts import parse_prompt
from marl.common.errors import UserError
from marl.intents.agent import CiceroAgent, CiceroConfig, Draw, Parts, ended, talk_view
from marl.intents.nonsense import Ensemble
from marl.planning.intents import IntentConfig
from marl.report.transcripts import episode_to_json
from marl.report.views import game_view, render_text
from marl.rollout.games import scripted
from marl.rollout.rollout import rollout
from marl.rollout.seeds import draw_games
from marl.types import Episode
from tests.marl.intents.test_filters import ensemble
from tests.marl.planners import COMPACT, negotiator

QUIET = CiceroConfig(repetition=False, nonsense=0.0, correspondence=None, value=1.0, plan=IntentConfig(iterations=5))


def agent(config: CiceroConfig = QUIET, arm: str = "both", **settings: Any) -> CiceroAgent:
    policy = negotiator()
    parts = Parts(arm, policy, policy, settings.pop("nonsense", None))
    limits = {"slots": 8, "context": 1024, "max_new_tokens": 20, "temperature": 0.5} | settings
    return CiceroAgent("cicero", parts, config, "dond", **limits)


def games(player: CiceroAgent, count: int = 2) -> list[Episode]:
    other = scripted("dond", tokens=negotiator().tokens)  # with a stream of its own, to look into

    def assign(game: Any, env: Any) -> dict[str, Any]:
        return {"player_0": player, "player_1": other}

    return rollout(draw_games(5, 5, count=count), assign, COMPACT, 3)


@cache
def played(arm: str) -> tuple[Episode, ...]:
    return tuple(games(agent(arm=arm)))


def text_of(episode: Episode, seat: str) -> str:
    return negotiator().tokens.decode(episode.streams[seat].tokens)


def test_intents_stand_in_the_own_stream_alone() -> None:
    for episode in played("both"):
        own = [t for t in episode.turns if t.agent == "player_0" and not t.error]
        assert own and all(t.thoughts.startswith("intent: ") for t in own)
        assert text_of(episode, "player_0").count("\nme ") + text_of(episode, "player_0").count(">me ") >= len(own)
        for turn in own:
            claim = turn.thoughts.split(" for me")[0].removeprefix("intent: ")
            assert f"me {claim} you" not in text_of(episode, "player_1")


def test_without_intents_nothing_is_told() -> None:
    for episode in played("state"):
        assert ">me " not in text_of(episode, "player_0")


def test_proposals_claim_what_was_planned() -> None:
    seen = 0
    for episode in (*played("both"), *played("state")):
        for turn in episode.turns:
            if turn.agent == "player_0" and turn.planned:
                seen += 1
                claim = turn.thoughts.split(" for me")[0].removeprefix("intent: ")
                parsed = replies.parse_reply(turn.text, (9, 9, 9), False, 1)
                assert isinstance(parsed, replies.Proposal) and " ".join(map(str, parsed.claim)) == claim
                assert turn.planned.plan[turn.planned.chosen] == 1
    assert seen


def test_replies_stand_in_the_stream_as_they_were_drawn() -> None:
    for episode in played("both"):
        stream = episode.streams["player_0"].tokens
        for turn in (t for t in episode.turns if t.agent == "player_0" and t.reply_ids):
            assert tuple(stream[turn.start : turn.start + len(turn.reply_ids)]) == turn.reply_ids
            assert len(turn.logprobs) == len(turn.reply_ids)


def test_the_same_seed_plays_the_same_games() -> None:
    again = games(agent())
    assert [[t.text for t in e.turns] for e in again] == [[t.text for t in e.turns] for e in played("both")]


def test_transcripts_show_intents_and_who_refused_what() -> None:
    strict = replace(QUIET, correspondence=1.0, draws=3, candidates=1)  # nothing can raise a probability by 1
    player = agent(strict)
    episodes = games(player)
    transcripts = "".join(render_text(episode_to_json(episode)) for episode in episodes)
    assert "refused, correspondence: " in transcripts and "intent: " in transcripts
    turns = game_view(episode_to_json(episodes[0]))["turns"]
    assert any(line.startswith("intent: ") for turn in turns for line in turn["considered"])
    assert player.counts["drawn"] % 3 == 0
    assert player.counts["refused/correspondence"] + player.counts["refused/unfinished"] == player.counts["drawn"]
    for episode in episodes:  # all draws spent: silence, or a proposal where one is allowed
        first = next(t for t in episode.turns if t.agent == "player_0")
        assert bool(first.planned) == (episode.facts["first"] == 1) and (first.planned or first.message == "hi")


@pytest.mark.parametrize("config", [QUIET, replace(QUIET, correspondence=1.0, draws=3, candidates=1)])
def test_filters_that_refuse_most_say_how_much(config: CiceroConfig) -> None:
    """Counts agree with the transcripts: of the replies for which messages were drawn, and of all draws."""
    player = agent(config)
    shown = [t.thoughts for episode in games(player) for t in episode.turns if t.agent == "player_0"]
    asked = [text for text in shown if "passed: " in text or "refused, " in text]
    silent = [text for text in asked if "passed: " not in text]
    lines = [line for text in asked for line in text.splitlines()[1:]]
    assert asked and (player.tried, player.silent) == (len(asked), len(silent))
    if config == QUIET:
        assert 2 * len(silent) <= len(asked) and player.refusals() == ""
    else:
        counted = Counter(line.partition(": ")[0].removeprefix("refused, ") for line in lines).most_common()
        assert {name for name, _ in counted} == {"correspondence", "unfinished"}
        assert player.refusals() == (
            f"cicero: no message passed the filters for {len(asked)} of {len(asked)} replies. Of {len(lines)} draws "
            f"were refused: {', '.join(f'{name} {n / len(lines):.0%}' for name, n in counted)}"
        )


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((0, 0, {}), ""),
        ((4, 2, {"drawn": 20, "refused/nonsense": 18}), ""),  # half found one
        (
            (4, 3, {"drawn": 50, "refused/value": 1, "refused/unfinished": 4, "refused/nonsense": 40, "spent": 3}),
            "cicero: no message passed the filters for 3 of 4 replies. Of 50 draws were refused: nonsense 80%, "
            "unfinished 8%, value 2%",
        ),
    ],
)
def test_refusals_are_told_where_most_replies_found_no_message(counts: tuple[int, int, Any], said: str) -> None:
    player = agent()
    player.tried, player.silent, player.counts = counts[0], counts[1], Counter(counts[2])
    assert player.refusals() == said


@pytest.mark.parametrize("arm", ["none", "state", "both"])
def test_near_a_full_context_games_are_played_to_their_end(arm: str) -> None:
    """The action model reads more than is written: an end of the talk, and a claim. Where these do not fit, there is no
    plan; in the end the player falls silent."""
    filters = replace(QUIET, correspondence=-0.5, value=0.5, candidates=2, draws=3)
    turns = [t for t in played(arm)[0].turns if t.agent == "player_0"]
    first, last, unplanned = turns[0].start, turns[-1].start, 0
    for context in range(first + 2, last + 60, 18):
        episode = games(agent(filters, arm, context=context), 1)[0]
        assert episode.outcome and len(episode.streams["player_0"].tokens) <= context
        own = [t for t in episode.turns if t.agent == "player_0"]
        unplanned += any(t.reply_ids and not t.thoughts for t in own)
    assert unplanned


def test_a_planned_claim_that_does_not_fit_is_not_played() -> None:
    """The own stream also holds an intent, so that it may be full while the action model still has room."""
    filters = replace(QUIET, candidates=2, draws=3)
    start = next(t.start for t in played("both")[0].turns if t.agent == "player_0")
    for context in range(start + 4, start + 11, 2):
        (episode,) = games(agent(filters, context=context, max_new_tokens=4), 1)
        own = [t for t in episode.turns if t.agent == "player_0"]
        assert own[0].thoughts and not any(t.planned for t in own)
        assert episode.outcome and len(episode.streams["player_0"].tokens) <= context


def test_candidates_of_least_value_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    player = agent(replace(QUIET, value=0.5, candidates=4, draws=10), max_new_tokens=30)
    drawn: list[Draw] = []
    keep = CiceroAgent._converse
    monkeypatch.setattr(CiceroAgent, "_converse", lambda *a: drawn.extend(found := keep(*a)) or found)
    games(player, 3)
    valued = [each for each in drawn if each.value is not None]
    assert valued and any(each.refused == "value" for each in valued)
    assert max(e.value for e in valued if e.refused == "value") <= max(e.value for e in valued if not e.refused)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("talk", "end"),
    [
        ([(False, "hi")], [(True, "deal"), (False, "deal")]),
        ([(True, "hi")], [(False, "deal")]),
        ([(True, "hi"), (False, None)], [(False, "deal")]),  # the partner's proposal is no part of it
        ([], [(True, "deal"), (False, "deal")]),
    ],
)
def test_the_injected_end_of_a_talk(talk: list[Any], end: list[Any]) -> None:
    assert ended(talk) == [*(line for line in talk if line[1]), *end]


def test_plans_and_annotations_read_the_same_stream() -> None:
    """The stream of a talk as the player makes it is the one that the game writes."""
    from envs.human_dond import HumanEnding, HumanView, replay
    from marl.intents.annotate import cut_after
    from marl.intents.streams import unasked, up_to_claim

    counts: Triple = (1, 1, 3)
    view = HumanView(
        0, counts, (0, 1, 3), (1, 3, 2), (("YOU", "hi"), ("THEM", "the book ?"), ("YOU", None)), counts, (0, 0, 0),
        HumanEnding.DEAL,
    )  # fmt: skip
    for number, talk in ((0, [(True, "hi")]), (1, [(True, "hi"), (False, "the book ?")])):
        steps = replay(cut_after(view, number), COMPACT())
        opening, questions = steps[0][1], steps[0][2]  # type: ignore[misc]
        for asked, read in ((questions, steps), ((), unasked(steps))):
            made = talk_view(opening, ended(talk), asked, negotiator().tokens)
            made.cue()
            assert made.stream.tokens == up_to_claim(read, negotiator().tokens)
        assert parse_prompt(opening)[0] == counts


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"nonsense": 1.0}, r"cicero\.nonsense=1\.0: must be at least 0 and below 1, a share"),
        ({"correspondence": 2.0}, r"cicero\.correspondence=2\.0: must be from -1 to 1"),
        ({"value": 0.0}, r"cicero\.value=0\.0: must be above 0"),
        ({"candidates": 11}, r"cicero\.candidates=11: must be at least 1, and at most draws=10"),
    ],
)
def test_bad_settings(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError, match=error):
        CiceroConfig(**settings)


def test_bad_players() -> None:
    with pytest.raises(UserError, match="cicero has no ensemble; set it to 0"):
        agent(replace(QUIET, nonsense=0.05))
    with pytest.raises(UserError, match="among_us has no intents"):
        CiceroAgent("cicero", Parts("both", negotiator(), negotiator(), None), QUIET, "among_us", slots=1, context=64)
    found: Ensemble = ensemble()[0]
    with pytest.raises(UserError, match=r"cicero\.nonsense=0\.9: it refuses (8|9)\d% of what people say"):
        agent(replace(QUIET, nonsense=0.9), nonsense=found)
