"""Questions beside the stream, in whole games: free of consequences, answered as by a fresh read, learned from."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from envs.core import TurnKind
from marl.agents.model import ModelAgent
from marl.algorithms.filtered_bc import without_errors
from marl.learning.advantages import Credit, add_advantages
from marl.learning.batch import collate, rows_of
from marl.learning.config import UpdateConfig
from marl.learning.forward import forward
from marl.learning.renaming import Renaming
from marl.learning.update import update
from marl.losses.listening import ListeningLoss, log_truth
from marl.losses.world_model import WorldModelLoss
from marl.model.policy import Policy, tiny_lm
from marl.model.tokens import Tokens, train_tokenizer
from marl.pretraining.corpus import scripted_texts
from marl.rewards import add_rewards
from marl.rollout.games import env_maker, game_module
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from marl.types import Episode, Kind
from tests.marl.models import CHATML, hf_policy
from tests.marl.updates import READS, REWARDS, TERMS, identical, noisy, weights_of

GAMES = 4
SETTINGS = {
    "dond": {"game": "dond", "style": "natural", "max_entries": 6},
    "in_parts": {"game": "dond", "style": "brief", "format": "structured", "max_entries": 6},
    "among_us": {"game": "among_us", "style": "compact", "max_steps": 60, "cooldown": 1},
    "by_vote": {"game": "among_us", "style": "compact", "max_steps": 60, "cooldown": 1, "belief": "vote"},
    "by_first_token": {"game": "among_us", "style": "brief", "max_steps": 16, "cooldown": 1, "layouts": [[2, 1]]},
}


class Unasked:
    """A game in which nobody is asked anything."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def _silenced(self, found: Any) -> Any:
        for info in found[-1].values():
            info["questions"] = ()
        return found

    def reset(self, **settings: Any) -> Any:
        return self._silenced(self.env.reset(**settings))

    def step(self, actions: dict[str, str]) -> Any:
        return self._silenced(self.env.step(actions))


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    policy = hf_policy(tmp_path_factory.mktemp("chat"), "qwen3", chat_template=CHATML, single_digits=True, context=4096)
    policy.tokens.beside = True
    return policy


@pytest.fixture(scope="module")
def tiny() -> Policy:
    texts = scripted_texts("among_us", [env_maker(SETTINGS["among_us"])], 0, games=20)
    tokens = Tokens(train_tokenizer(texts, game_module("among_us").COMPACT_TOKENS, 1024))
    tokens.beside = True
    lm = tiny_lm(tokens.size, hidden_size=16, layers=2, heads=2, intermediate_size=32, context=2048)
    return noisy(Policy(lm, tokens), 3)


@pytest.fixture(params=SETTINGS)
def case(request: pytest.FixtureRequest, chat: Policy, tiny: Policy) -> Iterator[tuple[dict[str, Any], Policy]]:
    yield SETTINGS[request.param], tiny if SETTINGS[request.param]["style"] == "compact" else chat


def agent_of(policy: Policy, **settings: Any) -> ModelAgent:
    return ModelAgent("learner", policy, slots=7 * GAMES, context=2048, max_new_tokens=6, **settings)


PLAYED: dict[str, list[Episode]] = {}


def play(env: dict[str, Any], policy: Policy, asked: bool = True, **settings: Any) -> list[Episode]:
    """Plays the game's few games. They are played once for all tests, since nobody changes them or their policies."""
    if (key := f"{env} {asked} {settings}") not in PLAYED:
        make = env_maker(env)
        agent = agent_of(policy, **settings)
        games = draw_games(0, 1, count=GAMES)
        PLAYED[key] = rollout(games, everyone(agent), make if asked else lambda: Unasked(make()), GAMES)
    return PLAYED[key]


def assert_without_questions(episode: Episode, tokens: Tokens) -> None:
    """Only what follows the first token of a chosen option is of their kind."""
    for agent, stream in episode.streams.items():
        chosen = [turn for turn in episode.turns if turn.agent == agent and turn.kind == TurnKind.CHOOSE]
        whole = [(turn.reply_ids, tuple(tokens.encode(turn.text))) for turn in chosen]
        rests = [len(ids) - 1 for reply_ids, ids in whole if reply_ids and reply_ids == ids[:1]]
        assert stream.kinds.count(Kind.QUESTION) == sum(rests)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {}) for name in SETTINGS),
        ("dond", {"decode_steps": 3, "patience": 1.0}),
        ("by_vote", {"decode_steps": 3, "patience": 1.0}),
        ("in_parts", {"read_budget": 64}),
        ("among_us", {"read_budget": 64}),
    ],
    ids=str,
)
def test_asking_is_free_of_consequences(name: str, settings: dict[str, Any], chat: Policy, tiny: Policy) -> None:
    """Tokens, values and log-probabilities, to the last bit."""
    env = SETTINGS[name]
    policy = tiny if env["style"] == "compact" else chat
    with_questions, without = (play(env, policy, asked, **settings) for asked in (True, False))
    assert sum(len(episode.beliefs) for episode in with_questions) > 20
    for a, b in zip(with_questions, without, strict=True):
        assert a.streams == b.streams and a.turns == b.turns and a.outcome == b.outcome
        assert not b.beliefs
        assert_without_questions(a, policy.tokens)


def test_answers_are_those_of_a_fresh_read(case: tuple[dict[str, Any], Policy]) -> None:
    env, policy = case
    asked = set()
    for episode in play(env, policy):
        for belief in episode.beliefs:
            assert belief.question.letters == (env == SETTINGS["in_parts"])
            if policy.tokens.format.ask_in_turn and belief.question.letters:  # its own turn, begun with the question
                turn = policy.tokens.decode(belief.branch)
                assert turn == f"<|im_start|>assistant\n{belief.question.text}"
            ids = [*episode.streams[belief.listener].tokens[: belief.position + 1], *belief.branch]
            with torch.no_grad():
                logits = policy.logits(policy.hidden(torch.tensor([ids]))[0, -1])
            expected = logits[list(belief.candidate_ids)].double().log_softmax(-1).numpy()
            np.testing.assert_allclose(np.log(belief.probs), expected, atol=1e-4, rtol=0)
            asked.add(bool(belief.branch))
    assert asked == ({True, False} if env.get("belief") == "vote" else {True})  # a vote that is due asks by itself


def test_sampler_and_trainer_agree(case: tuple[dict[str, Any], Policy]) -> None:
    env, policy = case
    episodes = play(env, policy)
    batch = collate(rows_of(episodes, ["learner"]), {}, silent_roles=())
    assert int(batch.decision.sum()) == sum(len(e.turns) for e in episodes)  # a choice is one, of a game in parts too
    with torch.no_grad():
        found = forward(policy, batch, 1.0, dict.fromkeys(READS, False))
    torch.testing.assert_close(found.logprobs[batch.reply], batch.logprobs[batch.reply], atol=1e-4, rtol=0)
    torch.testing.assert_close(found.values[batch.decision], batch.values[batch.decision], atol=1e-4, rtol=0)
    beliefs = [b for e, agent in rows_of(episodes, ["learner"]) for b in e.beliefs if b.listener == agent]
    assert len(beliefs) == len(found.beliefs)
    for row, belief in zip(found.beliefs, beliefs, strict=True):
        np.testing.assert_allclose(row[: len(belief.probs)].numpy(), np.log(belief.probs), atol=1e-4, rtol=0)
    # what is read is predicted as if nothing had been asked
    streams = batch.select(torch.arange(len(batch.tokens)), int((batch.branch == 0).sum(1).max()))
    plain = replace(streams, branch=torch.zeros_like(streams.branch))
    with torch.no_grad():
        alone = forward(policy, plain, 1.0, {"observed": False}).observed
    mask = WorldModelLoss()(plain, found)[1] & (streams.branch == 0)
    torch.testing.assert_close(found.observed[:, : mask.shape[1]][mask], alone[mask], atol=1e-4, rtol=0)


def test_a_model_that_knows_nothing_plays_whole_games_in_parts(chat: Policy) -> None:
    episodes = play(SETTINGS["in_parts"], chat)
    assert {e.outcome["how"] for e in episodes} <= {"deal", "mismatch", "limit"}
    choices = [turn for e in episodes for turn in e.turns if turn.kind == TurnKind.CHOOSE]
    assert choices and all(len(turn.reply_ids) == 1 and turn.reply_ids[0] in turn.legal for turn in choices)
    batch = collate(rows_of(episodes, ["learner"]), {})
    assert int((batch.kind == Kind.CHOICE).sum()) == len(choices)


def test_the_listening_loss_is_that_of_fresh_reads_in_any_passes(tiny: Policy) -> None:
    batch = collate(rows_of(play(SETTINGS["by_vote"], tiny), ["learner"]), {}, votes=True)
    truths = []
    for n in range(len(batch.row)):
        row, end = int(batch.row[n]), int(batch.position[n])
        number = int(batch.branch[row, end])
        own = (batch.branch[row] == number) & (torch.arange(batch.shape[1]) <= end)
        first = int(batch.position_ids[row, own][0]) if number else 0
        ids = [*batch.tokens[row, :first].tolist(), *batch.tokens[row, own].tolist()]
        with torch.no_grad():
            logits = tiny.logits(tiny.hidden(torch.tensor([ids]))[0, -1])
        candidates = batch.candidates[n][batch.candidates[n] >= 0]
        right = [int(batch.answer[n]), *batch.also[n][batch.also[n] >= 0].tolist()]
        truths.append(logits[candidates].log_softmax(-1)[right].logsumexp(0))
    for budget in (1, 500, 100_000):
        policy = copy.deepcopy(tiny)
        found = update(
            policy, None, batch, {"listening": ListeningLoss(0.3)}, torch.optim.SGD(policy.parameters(), 0.0),
            UpdateConfig(minibatches=1, token_budget=budget), torch.Generator().manual_seed(0),
        )  # fmt: skip
        asked = torch.stack(truths)[~batch.vote]
        assert found["loss/listening"] == pytest.approx(-float(asked.mean()), abs=1e-4)


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}, {"bf16": True}], ids=str)
def test_every_term_learns_and_one_row_of_eight_is_eight_rows_of_one(settings: dict[str, bool], tiny: Policy) -> None:
    reference = noisy(copy.deepcopy(tiny), 5)
    episodes = add_rewards(play(SETTINGS["among_us"], tiny), REWARDS)
    batch = add_advantages(collate(rows_of(episodes, ["learner"]), REWARDS), REWARDS, Credit())
    ends = []
    for budget in (1, 100_000):
        policy = copy.deepcopy(tiny)
        config = UpdateConfig(minibatches=1, token_budget=budget, **settings)  # type: ignore[arg-type]
        optimizer, order = torch.optim.SGD(policy.parameters(), lr=0.1), torch.Generator().manual_seed(0)
        update(policy, reference, batch, TERMS, optimizer, config, order)
        ends.append(weights_of(policy))
    assert not identical(ends[0], weights_of(tiny))
    near = 2e-2 if settings.get("bf16") else 1e-5
    assert all(torch.allclose(a, b, atol=near) for a, b in zip(ends[0].values(), ends[1].values(), strict=True))


def test_a_listening_loss_of_weight_0_is_one_that_is_absent(tiny: Policy) -> None:
    episodes = add_rewards(play(SETTINGS["among_us"], tiny), REWARDS)
    batch = add_advantages(collate(rows_of(episodes, ["learner"]), REWARDS), REWARDS, Credit())
    ends = []
    for terms in ({**TERMS, "listening": ListeningLoss(0.0)}, {n: t for n, t in TERMS.items() if n != "listening"}):
        policy = copy.deepcopy(tiny)
        update(policy, tiny, batch, terms, torch.optim.SGD(policy.parameters(), lr=0.1), UpdateConfig(minibatches=2),
               torch.Generator().manual_seed(0))  # fmt: skip
        ends.append(weights_of(policy))
    assert identical(*ends)


def test_branches_are_renamed_with_their_row(tiny: Policy) -> None:
    batch = collate(rows_of(play(SETTINGS["among_us"], tiny), ["learner"]), {})
    families = torch.tensor([[tiny.tokens.encode(" Red")[0], tiny.tokens.encode(" Blue")[0]]])
    renamed = Renaming(families, tiny.tokens.size, torch.Generator().manual_seed(2))(batch)
    assert torch.equal(renamed.branch, batch.branch) and torch.equal(renamed.position_ids, batch.position_ids)
    swaps = {tuple(pair) for pair in torch.stack([batch.tokens, renamed.tokens], -1)[batch.branch > 0].tolist()}
    assert swaps


def test_a_seat_without_its_errors_is_asked_behind_what_is_left(chat: Policy) -> None:
    episodes = play(SETTINGS["dond"], chat)
    shortened = 0
    for seat in rows_of(episodes, ["learner"]):
        episode, agent = without_errors(seat)
        before, after = seat[0].streams[agent], episode.streams[agent]
        shortened += len(after) < len(before)
        for belief in episode.beliefs:
            if belief.listener == agent:
                assert belief.branch and 0 <= belief.position < len(after)
                assert after.kinds[belief.position] != Kind.PAD
        collate([(episode, agent)], {})
    assert shortened


def test_truths_of_branches_are_in_the_loss(tiny: Policy) -> None:
    batch = collate(rows_of(play(SETTINGS["among_us"], tiny), ["learner"]), {})
    with torch.no_grad():
        beliefs = forward(tiny, batch, 1.0, {"beliefs": False}).beliefs
    assert log_truth(batch, beliefs).isfinite().all() and len(beliefs) > 0
