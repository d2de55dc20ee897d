"""Planning against brute force on contexts made by hand, and planners in whole games between small models."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from envs import among_us_v0, dond_v0
from envs.among_us import texts as among_us_texts
from envs.core import END, Question, TurnKind
from envs.dond import environment as dond_environment
from envs.dond import replies as dond_replies
from envs.dond import rules as dond_rules
from envs.dond import texts as dond_texts
from marl.agents.base import Agent, Request
from marl.agents.model import ModelAgent, PlayConfig
from marl.agents.text import TextAgent
from marl.common.errors import UserError
from marl.learning.batch import collate, rows_of
from marl.model.policy import Policy, tiny_lm
from marl.planning.planner import (
    PlannerConfig,
    PlanningAgent,
    claim_values,
    ejected,
    floored,
    next_tokens,
    partner_belief,
    partner_streams,
    planning_agent,
    respond,
    vote,
    vote_values,
)
from marl.report.transcripts import episode_to_json
from marl.report.views import plan_text, render_text, story_of
from marl.rollout.games import env_maker, scripted
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from marl.types import Episode, Planned
from tests.marl.models import CHATML, RECURRENT, hf_policy, small_tokens, teach, tiny_policy, with_critic
from tests.marl.planners import COMPACT, COUNTS, MEETINGS, OWN, PARTNER, config, negotiator, proposing

CLAIMS = dond_rules.allocations(COUNTS)
POSSIBLE = dond_rules.partner_values(COUNTS, OWN)
BALLS = CLAIMS.index((0, 0, 3))


def some_anchor(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.ones(size))


# --- Limits of the response ---


def test_a_large_lambda_plays_the_anchor_and_0_the_best_action() -> None:
    anchor, values = some_anchor(16), np.arange(16.0)
    np.testing.assert_allclose(respond(values, anchor, config(1e6)), anchor, atol=1e-4)
    np.testing.assert_allclose(respond(values, anchor, config(math.inf)), anchor, atol=1e-12)
    np.testing.assert_allclose(respond(values, anchor, config(0.0)), np.arange(16) == 15)
    np.testing.assert_allclose(respond(np.zeros(16), anchor, config(0.0)), anchor)  # the anchor decides between equals
    expected = np.array([0.2 * math.exp(1), 0.8]) / (0.2 * math.exp(1) + 0.8)  # the smallest counts
    for lambdas in ((1.0,), (5.0, 1.0)):
        np.testing.assert_allclose(respond(np.array([1.0, 0.0]), np.array([0.2, 0.8]), config(*lambdas)), expected)


# --- Deal or No Deal ---


def test_partner_belief_is_the_product_of_the_answers_among_possible_values() -> None:
    answers = np.random.default_rng(1).dirichlet(np.ones(11), size=3)
    weights = [answers[0, b] * answers[1, h] * answers[2, c] for b, h, c in POSSIBLE]
    np.testing.assert_allclose(partner_belief(answers, COUNTS, OWN), np.array(weights) / sum(weights))
    sure = np.eye(11)[list(PARTNER)]
    np.testing.assert_allclose(partner_belief(sure, COUNTS, OWN), [v == PARTNER for v in POSSIBLE], atol=1e-9)
    impossible = np.eye(11)[[10, 10, 10]]  # no such partner: then all that are possible are equally so
    np.testing.assert_allclose(partner_belief(impossible, COUNTS, OWN), 1 / len(POSSIBLE))


@pytest.mark.parametrize("objective", [1.0, -0.5])
def test_claims_are_worth_what_brute_force_says(objective: float) -> None:
    anchor, belief = some_anchor(len(CLAIMS)), some_anchor(len(POSSIBLE), 1)
    expected = []
    for mine in CLAIMS:
        total = 0.0
        for weight, values in zip(belief, POSSIBLE, strict=True):
            context = dond_rules.Context(COUNTS, (OWN, values))
            for theirs, share_left in product(CLAIMS, CLAIMS):
                if theirs == dond_rules.rest(share_left, COUNTS):  # expected as `share_left` is of the planner
                    both = dond_rules.claim_points(context, (mine, theirs))
                    total += weight * anchor[CLAIMS.index(share_left)] * dond_rules.scores(both, objective)[0]
        expected.append(total)
    found = claim_values(COUNTS, OWN, objective, belief, anchor, config(0.0, others="anchor"))
    np.testing.assert_allclose(found, expected, atol=1e-9)
    plan = respond(found, anchor, config(0.0))  # a best response
    assert plan[int(np.argmax(expected))] == pytest.approx(1)
    # partners of an infinite lambda play their anchor
    np.testing.assert_allclose(claim_values(COUNTS, OWN, objective, belief, anchor, config(math.inf)), found)


def test_a_partner_with_an_anchor_of_its_own_is_planned_for_as_brute_force_says() -> None:
    """The anchor differs for each value vector, and is over what the partner itself claims, not mirrored."""
    anchor, belief = some_anchor(len(CLAIMS)), some_anchor(len(POSSIBLE), 1)
    theirs = np.stack([some_anchor(len(CLAIMS), 2 + k) for k in range(len(POSSIBLE))])  # (K, A), by their claims
    left = [CLAIMS.index(dond_rules.rest(claim, COUNTS)) for claim in CLAIMS]
    expected = [
        sum(
            weight * theirs[k, b] * dond_rules.claim_points(dond_rules.Context(COUNTS, (OWN, values)), (mine, claim))[0]
            for k, (weight, values) in enumerate(zip(belief, POSSIBLE, strict=True))
            for b, claim in enumerate(CLAIMS)
        )
        for mine in CLAIMS
    ]
    found = claim_values(COUNTS, OWN, 0.0, belief, anchor, config(0.0, others="anchor"), theirs[:, left])
    np.testing.assert_allclose(found, expected, atol=1e-9)
    # partners who plan near an infinite lambda play it too, and the mirrored anchor is the default
    np.testing.assert_allclose(
        claim_values(COUNTS, OWN, 0.0, belief, anchor, config(math.inf), theirs[:, left]), expected, atol=1e-9
    )
    mirrored = np.repeat(anchor[None], len(POSSIBLE), 0)
    np.testing.assert_allclose(
        claim_values(COUNTS, OWN, 0.5, belief, anchor, config(0.4), mirrored),
        claim_values(COUNTS, OWN, 0.5, belief, anchor, config(0.4)),
    )


@pytest.mark.parametrize("style", ["compact", "natural"])
def test_the_partners_side_is_what_the_partner_reads(style: str) -> None:
    """Games of scripted players: with its true values the partner's stream is the one that it really had."""
    tokens = small_tokens()
    agent = scripted("dond", tokens=tokens)
    make_env = env_maker({"game": "dond", "style": style, "objective": 0.5, "max_entries": 12})
    first = second = 0
    for episode in rollout(draw_games(4, 4, count=12), everyone(agent), make_env, 12):
        claims = [turn for turn in episode.turns if turn.text.startswith(dond_replies.PROPOSE)]
        if any(turn.error for turn in episode.turns) or len(claims) < 2:
            continue
        for mine, theirs in (claims, claims[::-1]):
            seat = dond_environment.AGENTS.index(mine.agent)
            counts, values = episode.facts["counts"], episode.facts["values"]
            opening = dond_texts.prompt(counts, values[seat], 0.5, dond_v0.Style(style), 12)
            talk = [(t.agent == mine.agent, t.message or None) for t in episode.turns if t.step < mine.step]
            questions = [b.question for b in episode.beliefs if b.listener == mine.agent][:3]
            streams = partner_streams(opening, talk, questions, tokens)
            possible = dond_rules.partner_values(counts, values[seat])
            assert len(streams) == len(possible) and len({tuple(stream) for stream in streams}) == len(possible)
            found = streams[possible.index(values[1 - seat])]
            assert tokens.decode(found) == tokens.decode(episode.streams[theirs.agent].tokens[: theirs.start])
            first, second = first + (mine is claims[0]), second + (mine is claims[1])
    assert first >= 3 and second >= 3


class Proposer:
    """Claims everything, whatever it hears."""

    def observe(self, text: str) -> None:
        pass

    def reply(self, text: str, options: Sequence[str] = ()) -> str:
        return f"{dond_replies.proposal_text(COUNTS)} {END}"


def test_the_partners_side_has_the_planners_message_as_the_partner_heard_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message with a line break, longer than the game lets through."""
    chars = 9
    said, policy = f"{dond_replies.MESSAGE} i want\n2 books {END}", tiny_policy()
    drawn = [replace(draw_games(4, 4, count=1)[0], options={"counts": COUNTS, "values": (OWN, PARTNER), "first": 0})]
    agents = {
        "player_0": PlanningAgent(
            "p+plan", policy, config(partner="view", others="anchor"), "dond", slots=4, context=512, max_new_tokens=20,
            temperature=0.05,
        ),
        "player_1": TextAgent("other", lambda seed, role: Proposer(), policy.tokens),
    }  # fmt: skip
    make_env = env_maker({"game": "dond", "style": "compact", "objective": 1.0, "max_message_chars": chars})
    (untaught,) = rollout(drawn, lambda game, env: agents, make_env, 1)
    prompt, reply = untaught.streams["player_0"].tokens[: untaught.turns[0].start], policy.tokens.encode(said)
    row = torch.tensor([[*prompt, *reply]])
    teach(policy, row, torch.arange(row.shape[1])[None] >= len(prompt), 30)
    expected: list[list[list[int]]] = []

    def seen(*about: Any) -> list[list[int]]:
        expected.append(partner_streams(*about))
        return expected[-1]

    monkeypatch.setattr("marl.planning.planner.partner_streams", seen)
    (episode,) = rollout(drawn, lambda game, env: agents, make_env, 1)
    first, proposal, *_ = episode.turns
    assert first.text == said and first.message == "i want 2 books"[:chars] and proposal.agent == "player_1"
    (streams,) = expected
    found = policy.tokens.decode(streams[POSSIBLE.index(PARTNER)])
    assert found == policy.tokens.decode(episode.streams["player_1"].tokens[: proposal.start])


def test_what_may_stand_at_each_token_by_hand() -> None:
    def planned(chosen: int, *plan: float) -> Planned:
        return Planned(("a", "b", "c"), ((1, 2, 3), (1, 2, 4), (1, 5)), (1 / 3,) * 3, (0.0,) * 3, plan, chosen)

    first, second = {1: 1.0}, {2: pytest.approx(0.4), 5: pytest.approx(0.6)}
    assert next_tokens(planned(1, 0.1, 0.3, 0.6)) == [first, second, {3: pytest.approx(0.25), 4: pytest.approx(0.75)}]
    assert next_tokens(planned(2, 0.1, 0.3, 0.6)) == [first, second]
    assert next_tokens(planned(0, 0.0, 0.0, 1.0)) == [
        first,
        {2: 0.0, 5: 1.0},
    ]  # nothing where the plan never gets


# --- Among Us ---


def tally(votes: tuple[int, ...], players: int) -> int:
    counts = Counter(votes)
    most = max(counts.values())
    leaders = [choice for choice, n in counts.items() if n == most]
    return leaders[0] if len(leaders) == 1 else players


def test_who_is_ejected_equals_counting() -> None:
    for players in (3, 4):
        for votes in product(range(players + 1), repeat=players):
            assert ejected(players)[votes] == tally(votes, players), votes


@pytest.mark.parametrize("mistake", [0.0, 0.8])
def test_votes_are_worth_what_brute_force_says(mistake: float) -> None:
    me, belief, anchor = 1, np.array([0.5, 0.0, 0.3, 0.2]), some_anchor(5, 3)
    worth = [*(b - mistake * (1 - b) for b in belief), 0.0]
    policies = []
    for voter in (0, 2, 3):
        kept = np.where(np.arange(5) == voter, 0, anchor)
        policies.append(kept / kept.sum())
    expected = [
        sum(
            policies[0][a] * policies[1][b] * policies[2][c] * worth[tally((a, mine, b, c), 4)]
            for a, b, c in product(range(5), repeat=3)
        )
        for mine in range(5)
    ]
    how = config(0.0, others="anchor", mistake=mistake)
    found = vote_values(me, belief, anchor, how)
    np.testing.assert_allclose(found, expected, atol=1e-9)
    assert respond(found, anchor, how).argmax() == int(np.argmax(expected))
    np.testing.assert_allclose(vote_values(me, belief, anchor, config(math.inf, mistake=mistake)), found, atol=1e-9)


def test_votes_are_told_from_moves_and_oneself_from_the_others_in_both_styles() -> None:
    for style, shown in (("natural", str), ("compact", str.lower)):
        env = among_us_v0.parallel_env(style=style, players=4)
        seen, _ = env.reset(seed=3, options={"names": ("Pink", "Red", "Blue", "Green"), "imposters": (1,)})
        options = [shown(name) for name in ("Blue", "skip", "Pink", "Red", "Green")]
        believed = {shown("Red"): 0.7, shown("Blue"): 0.2, shown("Green"): 0.1}
        how = config(0.1, others="anchor")
        decision = vote(seen["player_0"]["text"], options, (11, 12, 13, 14, 15), believed, how)
        assert decision is not None and decision.actions == tuple(map(shown, ("Blue", "Pink", "Red", "Green", "skip")))
        assert decision.ids == ((11,), (13,), (14,), (15,), (12,))
        belief, anchor = np.array([0.2, 0.0, 0.7, 0.1]), some_anchor(5)
        np.testing.assert_allclose(decision.values(anchor, None), vote_values(1, belief, anchor, how))
        assert vote(seen["player_0"]["text"], ("go east", "wait"), (1, 2), believed, how) is None


def test_plans_are_not_drawn_where_all_else_is_greedy() -> None:
    for temperature, choose, refused in ((0.0, "sample", True), (0.0, "best", False), (0.5, "sample", False)):
        given = (tiny_policy(), PlayConfig(concurrency=1, context=512), 1, temperature, config(choose=choose), "dond")
        if refused:
            with pytest.raises(UserError, match="temperature=0: p draws claims or votes from plans"):
                planning_agent("p", *given)
        else:
            planning_agent("p", *given)


def test_anchors_that_rule_actions_out_are_floored_and_it_is_told() -> None:
    assert floored(np.array([0.5, 0.5, 0.0, 1e-60]), None) == 0.5
    assert floored(np.array([0.5, 0.5]), np.array([[1.0, 0.0], [0.5, 0.5]])) == pytest.approx(1 / 6)
    policy = tiny_policy()
    for strength, some in ((1.0, False), (500.0, True)):  # a model that is sure of every token
        with torch.no_grad():
            policy.lm.get_output_embeddings().weight.mul_(strength)
        agent, request = proposing(policy, config(0.5, iterations=5))
        (reply,) = agent.act([request])
        assert reply.planned is not None
        assert reply.planned.floored == np.mean(np.array(reply.planned.anchor) < 1e-50)
        assert (reply.planned.floored > 0) == some and sum(reply.planned.plan) == pytest.approx(1)


@pytest.mark.parametrize(
    ("model", "lambdas"),
    [("tiny", (0.5,)), ("chat", (5.0,)), (RECURRENT[0], (5.0,))],
)
def test_what_is_on_record_is_the_plan_that_was_sampled_from(
    model: str, lambdas: tuple[float, ...], tmp_path: Path
) -> None:
    if model == "tiny":
        policy = tiny_policy()
    elif model == "chat":
        policy = hf_policy(tmp_path, "qwen3", chat_template=CHATML, single_digits=True)
    else:
        policy = hf_policy(tmp_path, model)
    agent, request = proposing(policy, config(*lambdas))
    (reply,) = agent.act([request])
    assert reply.planned is not None
    assert isinstance(dond_replies.parse_reply(reply.text, COUNTS, True, 1), dond_replies.Proposal)
    assert reply.text == f"[propose] {reply.planned.actions[reply.planned.chosen]} [END]"
    assert sum(reply.logprobs) == pytest.approx(math.log(reply.planned.plan[reply.planned.chosen]), abs=1e-9)
    assert len(reply.logprobs) == len(reply.ids) and len(reply.planned.actions) == len(CLAIMS)
    question = Question("<books?>", tuple(map(str, range(11))), "0")
    late = Request(request.key, 7, "negotiator", 4, TurnKind.WAIT, "no deal\n", questions=(question,))
    agent.act([late])
    stream, beliefs = agent.finish([request.key])[request.key]
    assert tuple(stream.tokens[reply.start : reply.start + len(reply.ids)]) == reply.ids
    # the anchor is the softmax of the texts' log-probabilities, each in one full pass
    scores = []
    for action in reply.planned.actions:
        ids = policy.tokens.encode(f"[propose] {action} [END]")
        tokens = torch.tensor([[*stream.tokens[: reply.start], *ids]])
        with torch.no_grad():
            logits = policy.logits(policy.hidden(tokens))[0, reply.start - 1 : -1]
        shaped = policy.speech_logits(logits, 1.0).log_softmax(-1)
        scores.append(float(shaped.gather(1, torch.tensor(ids)[:, None]).sum()))
    expected = torch.tensor(scores).double().softmax(0).numpy()
    np.testing.assert_allclose(reply.planned.anchor, expected, atol=1e-4)
    # values and plan follow from them and from the answers to the three questions
    answers = np.stack([b.probs for b in beliefs[:3]])
    belief = partner_belief(answers, COUNTS, OWN)
    anchor = np.array(reply.planned.anchor)
    values = claim_values(COUNTS, OWN, 1.0, belief, anchor, config(*lambdas))
    np.testing.assert_allclose(reply.planned.values, values, atol=1e-9)
    np.testing.assert_allclose(reply.planned.plan, respond(values, anchor, config(*lambdas)), atol=1e-9)
    # what comes after is read on the planned reply, not on what the model had sampled
    with torch.no_grad():
        logits = policy.logits(policy.hidden(torch.tensor([stream.tokens])))[0, beliefs[-1].position]
    probs = logits[list(beliefs[-1].candidate_ids)].softmax(0)
    np.testing.assert_allclose(beliefs[-1].probs, probs, atol=1e-4)


def test_samples_follow_the_plan() -> None:
    """Seats that read the same and differ in their seed alone: with lambda infinite they play the anchor."""
    agent, request = proposing(tiny_policy(), config(0.0, choose="best", belief="prior", others="anchor"))
    (reply,) = agent.act([request])
    assert reply.planned is not None and reply.planned.chosen == int(np.argmax(reply.planned.values))
    assert set(reply.logprobs) == {0.0}
    belief = np.full(len(POSSIBLE), 1 / len(POSSIBLE))
    values = claim_values(COUNTS, OWN, 1.0, belief, np.array(reply.planned.anchor), config(0.0, others="anchor"))
    np.testing.assert_allclose(reply.planned.values, values)
    agent, request = proposing(tiny_policy(), config(math.inf, belief="prior", others="anchor"))
    counts: Counter[int] = Counter()
    for seed in range(40):
        (reply,) = agent.act([Request((seed, "a"), seed, "negotiator", 3, request.turn, request.text, (), ())])
        assert reply.planned is not None
        counts[reply.planned.chosen] += 1
        agent.finish([(seed, "a")])
    for action, p in enumerate(reply.planned.anchor):
        assert abs(counts[action] / 40 - p) < 4 * math.sqrt(p * (1 - p) / 40) + 1 / 40


@cache
def negotiate(how: PlannerConfig) -> list[Episode]:
    planner = PlanningAgent("p+plan", negotiator(), how, "dond", slots=8, context=1024, max_new_tokens=24)
    learner = ModelAgent("learner", negotiator(), slots=8, context=1024, max_new_tokens=24)
    seats = dict(zip(dond_environment.AGENTS, (planner, learner), strict=True))
    return rollout(draw_games(3, 1, count=8), lambda game, env: seats, COMPACT, 8)


def test_negotiators_plan_every_proposal_and_nothing_else() -> None:
    episodes = negotiate(config(0.3, iterations=5))
    planned = 0
    for episode in episodes:
        counts = episode.facts["counts"]
        for turn in episode.turns:
            proposes = turn.text.startswith(dond_replies.PROPOSE) and not turn.error
            assert (turn.planned is not None) == (proposes and turn.agent == "player_0")
            if turn.planned is not None:
                planned += 1
                assert len(turn.planned.actions) == len(dond_rules.allocations(counts)) and turn.legal == ()
                assert sum(turn.logprobs) == pytest.approx(math.log(turn.planned.plan[turn.planned.chosen]), abs=1e-6)
                assert sum(turn.planned.anchor) == pytest.approx(1) and sum(turn.planned.plan) == pytest.approx(1)
    assert planned >= 2, [t.text for e in episodes for t in e.turns]
    # until it first plans it plays as its policy does alone
    alone = ModelAgent("p+plan", negotiator(), slots=8, context=1024, max_new_tokens=24)
    other = ModelAgent("learner", negotiator(), slots=8, context=1024, max_new_tokens=24)
    seated = dict(zip(dond_environment.AGENTS, (alone, other), strict=True))
    for ours, theirs in zip(episodes, rollout(draw_games(3, 1, count=8), lambda g, e: seated, COMPACT, 8), strict=True):
        first = next((t.step for t in ours.turns if t.planned), ours.steps)
        assert [t.text for t in ours.turns if t.step < first] == [t.text for t in theirs.turns if t.step < first]
    # transcripts hold it
    shown = [t for e in episodes for t in episode_to_json(e)["turns"] if "planned" in t]
    assert len(shown) == planned
    assert shown[0]["text"] == f"[propose] {shown[0]['planned']['chosen']} [END]"
    assert shown[0]["planned"].keys() == {"actions", "anchor", "values", "plan", "chosen"}
    assert any("planned (anchor -> plan): (" in render_text(episode_to_json(e)) for e in episodes)
    # and no loss does
    seats = rows_of(episodes, {"learner"})
    assert {agent for _, agent in seats} == {"player_1"}
    collate(seats, {})
    with pytest.raises(AssertionError, match="planner's, no sample of its policy"):
        collate(rows_of(episodes, {"p+plan"}), {})


def test_plans_are_noted_beside_the_policys_own_legal_claims() -> None:
    """One model was taught to claim the balls, as the game writes it; the other says anything."""
    agent, request = proposing(tiny_policy(), config(0.5))
    (first,) = agent.act([request])
    stream, _ = agent.finish([request.key])[request.key]
    claim = agent.tokens.encode(f"{dond_replies.proposal_text(CLAIMS[BALLS])} {END}")
    row = torch.tensor([[*stream.tokens[: first.start], *claim]])
    taught = teach(tiny_policy(), row, torch.arange(row.shape[1])[None] >= first.start, 20)
    for policy, noted in ((taught, True), (tiny_policy(), False)):
        agent, request = proposing(policy, config(0.5, choose="own"), temperature=0.05 if noted else 1.0)
        agent.max_new_tokens = 20
        (reply,) = agent.act([request])
        assert (reply.planned is not None) == noted == (reply.ids == tuple(claim))
        if reply.planned is not None:
            assert not reply.planned.played and reply.planned.chosen == BALLS
            assert reply.planned.ids[BALLS] == reply.ids and sum(reply.planned.plan) == pytest.approx(1)


def test_crewmates_plan_every_vote_and_nothing_else() -> None:
    tokens = small_tokens(among_us_texts.COMPACT_TOKENS)
    lm = tiny_lm(tokens.size, hidden_size=32, layers=1, intermediate_size=64, context=1024, generator_seed=1)
    policy = with_critic(Policy(lm, tokens))
    how = config(0.05, iterations=5)
    planner: Agent = PlanningAgent("p+plan", policy, how, "among_us", slots=20, context=1024, max_new_tokens=4)
    episodes = rollout(draw_games(5, 2, count=3), everyone(planner), MEETINGS, 3)
    planned = []
    for episode in episodes:
        names = episode.facts["names"]
        for turn in episode.turns:
            votes = turn.kind == TurnKind.CHOOSE and "skip" in tokens.decode(turn.legal)
            assert (turn.planned is not None) == (votes and turn.role == "crewmate")
            if turn.planned is None:
                continue
            planned.append(turn)
            assert turn.text == turn.planned.actions[turn.planned.chosen] and len(turn.reply_ids) == 1
            assert turn.reply_ids[0] in turn.legal and turn.planned.actions[-1] == "skip"
            assert turn.logprobs[0] == pytest.approx(math.log(turn.planned.plan[turn.planned.chosen]))
            # the anchor is the policy's own distribution over the options, and the values are those of its belief
            asked = [b for b in episode.beliefs if b.listener == turn.agent and b.step <= turn.step][-1]
            stream = torch.tensor([episode.streams[turn.agent].tokens[: turn.start]])
            with torch.no_grad():
                logits = policy.logits(policy.hidden(stream))[0, -1]
            own = dict(zip(turn.legal, logits[list(turn.legal)].double().softmax(0).tolist(), strict=True))
            anchor = [own[tokens.label((*turn.planned.actions,))[0][i]] for i in range(len(turn.planned.actions))]
            np.testing.assert_allclose(turn.planned.anchor, anchor, atol=1e-4)
            believed = dict(zip(asked.question.candidates, asked.probs, strict=True))
            living, me = turn.planned.actions[:-1], names[turn.agent].lower()
            belief = np.array([believed.get(name, 0.0) for name in living])
            assert believed.keys() == set(living) - {me} and belief.sum() == pytest.approx(1)
            values = vote_values(living.index(me), belief, np.array(turn.planned.anchor), how)
            np.testing.assert_allclose(turn.planned.values, values, atol=1e-6)
    assert len(planned) >= 3
    chapters = [chapter for e in episodes for chapter in story_of(episode_to_json(e))]
    plans = [plan_text(turn) for c in chapters if hasattr(c, "voters") for turn in c.voters.values()]
    assert sum(map(bool, plans)) == len(planned)
