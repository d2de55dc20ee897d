"""Messages in the place of others: drawn as their author draws, heard as the game says, and what credit they give."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from envs.core import END, Question, TurnKind
from experiments.setup.spec import run_spec
from marl.agents.model import ModelAgent, tokens_read_by
from marl.decoding import engine
from marl.model.policy import Policy, tiny_lm
from marl.model.tokens import Tokens, train_tokenizer
from marl.pretraining.corpus import scripted_texts
from marl.rewards import add_rewards
from marl.rewards.speaking import SpeakingReward
from marl.rollout.games import env_maker, game_module
from marl.rollout.resampling import VOTE, resample
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from marl.types import Belief, Episode, Turn
from tests.composing import config_hash, configure
from tests.marl.hint import FACTS, Hint, hint_policy
from tests.marl.models import CHATML, hf_policy
from tests.marl.updates import noisy

RESAMPLED = SpeakingReward(baseline="resampled")
GAMES = {
    "among_us": {"game": "among_us", "style": "compact", "max_steps": 60, "cooldown": 1},
    "by_vote": {"game": "among_us", "style": "compact", "max_steps": 60, "cooldown": 1, "belief": "vote"},
    "dond": {"game": "dond", "style": "compact", "objective": 0.0},
}
BY_FIRST_TOKEN = {"game": "among_us", "style": "brief", "max_steps": 24, "cooldown": 1, "layouts": [[2, 1]]}


def by_hand(policy: Policy, ids: list[int], candidates: tuple[int, ...]) -> list[float]:
    with torch.no_grad():
        return policy.logits(policy.hidden(torch.tensor([ids]))[:, -1])[0, list(candidates)].softmax(-1).tolist()


@cache
def vocabulary(*env: tuple[str, Any]) -> PreTrainedTokenizerFast:
    game = dict(env)["game"]
    texts = scripted_texts(game, [env_maker(dict(env))], 0, games=20)
    return train_tokenizer(texts, game_module(game).COMPACT_TOKENS, 1024)


def played(
    env: dict[str, Any], temperature: float, games: int = 4, beside: bool = False
) -> tuple[ModelAgent, list[Episode]]:
    """Games of a model that babbles; its weights are large enough that every word matters."""
    tokens = Tokens(vocabulary(*env.items()))
    tokens.beside = beside
    lm = tiny_lm(tokens.size, hidden_size=16, layers=1, heads=2, intermediate_size=32, context=1024)
    return played_by(noisy(Policy(lm, tokens), 3), env, temperature, games)


def played_by(
    policy: Policy, env: dict[str, Any], temperature: float, games: int = 4, context: int = 1024
) -> tuple[ModelAgent, list[Episode]]:
    agent = ModelAgent("learner", policy, slots=7 * games, context=context, max_new_tokens=6, temperature=temperature)
    return agent, rollout(draw_games(0, 1, count=games), everyone(agent), env_maker(env), games)


@pytest.mark.parametrize(("name", "beside"), [*((name, False) for name in GAMES), ("among_us", True)])
def test_the_same_message_again_is_believed_as_it_was(name: str, beside: bool) -> None:
    """A message drawn again at temperature 0 is the same, and so are the beliefs after it; its reward is 0."""
    agent, episodes = played(GAMES[name], temperature=0.0, beside=beside)
    assert hears_the_same_again(GAMES[name], agent, episodes, beside) or name == "dond"  # a babbler seldom talks there


def test_a_chat_model_hears_the_same_again_behind_choices_that_are_written_out(tmp_path: Path) -> None:
    chat = noisy(hf_policy(tmp_path, "qwen3", chat_template=CHATML, single_digits=True, context=4096), 3)
    chat.tokens.beside = True
    agent, episodes = played_by(chat, BY_FIRST_TOKEN, temperature=0.0, context=2048)
    assert any(
        u.kind == TurnKind.CHOOSE and u.text != chat.tokens.decode(u.reply_ids) for e in episodes for u in e.turns
    )
    assert hears_the_same_again(BY_FIRST_TOKEN, agent, episodes, beside=True)


def hears_the_same_again(env: dict[str, Any], agent: ModelAgent, episodes: list[Episode], beside: bool) -> int:
    """Checks each message that is drawn again. Returns how many beliefs there were."""
    found = resample(episodes, env_maker(env), {"learner": agent}, {"learner"}, 2)
    said = 0
    for before, episode in zip(episodes, found, strict=True):
        assert replace(episode, turns=tuple(replace(t, instead=(), otherwise=()) for t in episode.turns)) == before
        for turn in episode.turns:
            assert len(turn.instead) == (2 if turn.message else 0)
            after = {(b.listener, b.question.text): b for b in episode.beliefs if b.step == turn.step + 1}
            for heard in turn.instead:
                again = {(b.listener, b.question.text): b for b in heard}
                assert again.keys() == after.keys()
                for key, belief in again.items():
                    same = after[key]
                    assert (belief.position, belief.branch, belief.step) == (same.position, same.branch, same.step)
                    assert bool(belief.branch) == beside
                    np.testing.assert_allclose(belief.probs, same.probs, atol=1e-5)
                    said += 1
        np.testing.assert_allclose(RESAMPLED(episode), 0.0, atol=1e-5)
    return said


def test_draws_differ_from_the_message_and_are_the_same_each_time() -> None:
    agent, episodes = played(GAMES["among_us"], temperature=1.0)
    make = env_maker(GAMES["among_us"])
    found, again = (resample(episodes, make, {"learner": agent}, {"learner"}, 3) for _ in range(2))
    different = 0
    for episode, same in zip(found, again, strict=True):
        for turn, twin in zip(episode.turns, same.turns, strict=True):
            for heard, repeated in zip(turn.instead, twin.instead, strict=True):
                for belief, other in zip(heard, repeated, strict=True):
                    assert belief.probs.tolist() == other.probs.tolist()
                    real = [b.probs for b in episode.beliefs if (b.listener, b.step) == (belief.listener, belief.step)]
                    different += not np.allclose(belief.probs, real[0], atol=1e-6)
    assert different > 10


@pytest.mark.parametrize("beside", [False, True])
def test_all_that_is_read_for_draws_is_counted(beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, episodes = played(GAMES["among_us"], temperature=1.0, games=2, beside=beside)
    before, passed = tokens_read_by([agent]), {"one_pass": 0, "pass_beside": 0}

    def counting(name: str, run: Callable[..., Any]) -> None:
        def counted(*args: Any) -> Any:
            chunks = args[-1] if name == "one_pass" else [ids for own in args[-1] for _, ids in own]
            passed[name] += sum(map(len, chunks))
            return run(*args)

        monkeypatch.setattr(engine, name, counted)

    counting("one_pass", engine.one_pass)
    counting("pass_beside", engine.pass_beside)
    resample(episodes, env_maker(GAMES["among_us"]), {"learner": agent}, {"learner"}, 2)
    assert tokens_read_by([agent]) - before == sum(passed.values())
    assert passed["one_pass"] and bool(passed["pass_beside"]) == beside


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_after_the_message_itself_the_votes_are_those_that_were_drawn_from(temperature: float) -> None:
    """Votes after the message itself are read anew, and have the probabilities of the votes that were drawn. So do
    votes after the same words again, but not after silence."""
    agent, episodes = played(GAMES["among_us"], temperature)
    turns = [episode.turns for episode in episodes]
    found = resample(
        episodes, env_maker(GAMES["among_us"]), {"learner": agent}, {"learner"}, 0,
        lambda game, number: (turns[game][number].text, END), votes=True,
    )  # fmt: skip
    voted, repeated, moved = 0, 0, 0.0
    for episode in found:
        for turn in (turn for turn in episode.turns if turn.instead):
            same, silent, itself = ({b.listener: b for b in each if b.question.text == VOTE} for each in turn.instead)
            for listener, vote in itself.items():
                drawn = next(t for t in episode.turns if (t.agent, t.step) == (listener, vote.step))
                assert drawn.kind == TurnKind.CHOOSE and [vote.question.answer] == [
                    vote.question.candidates[i] for i in drawn.truths
                ]
                chosen = vote.question.candidates.index(drawn.text)
                np.testing.assert_allclose(np.log(vote.probs[chosen]), drawn.logprobs[0], atol=1e-4)
                if agent.tokens.encode(turn.text) == list(turn.reply_ids):
                    np.testing.assert_allclose(same[listener].probs, vote.probs, atol=1e-5)
                    repeated += 1
                moved += np.abs(silent[listener].probs - vote.probs).sum() if listener in silent else 0.0
                voted += 1
    assert voted > 10 and repeated > 0 and moved > 1e-3


def hints(policy: Policy, games: int, count: int) -> tuple[list[Episode], ModelAgent]:
    agent = ModelAgent("learner", policy, slots=2 * games, context=32, max_new_tokens=1)
    episodes = rollout(draw_games(0, 1, count=games), everyone(agent), Hint, games)
    return resample(episodes, Hint, {"learner": agent}, {"learner"}, count), agent


def test_credit_is_what_a_word_moved_beyond_its_authors_other_words() -> None:
    """The mean over 400 draws is near the exact mean over all words, each with its probability under the model."""
    policy = noisy(hint_policy(0), 1)
    episodes, _ = hints(policy, games=6, count=400)
    tokens = policy.tokens
    for episode in episodes:
        turn = episode.turns[0]
        listener = next(a for a in episode.players if a != turn.agent)
        fact = FACTS.index(episode.facts["fact"])
        after = next(b for b in episode.beliefs if b.step == 1)
        with torch.no_grad():
            states = policy.hidden(torch.tensor([episode.streams[turn.agent].tokens[: turn.start]]))[:, -1]
            says = policy.speech_logits(policy.logits(states), 1.0)[0].softmax(-1)
        start = next(b.position for b in episode.beliefs if b.step == 0) + 1
        prefix = episode.streams[listener].tokens[:start]
        expected = 0.0
        for word, p in enumerate(says.tolist()):
            if p > 1e-9:
                heard = tokens.encode(f"heard {'' if tokens.ends([word]) else tokens.decode([word])}".rstrip())
                ask = tokens.encode("which?")
                expected += p * by_hand(policy, [*prefix, *heard, *ask], after.candidate_ids)[fact]
        credit = float(RESAMPLED(episode)[0])
        assert credit == pytest.approx(after.truth - expected, abs=0.03)
        assert float(SpeakingReward()(episode)[0]) == pytest.approx(
            after.truth - next(b for b in episode.beliefs if b.step == 0).truth
        )


def test_a_listener_who_ignores_words_gives_no_credit() -> None:
    episodes, _ = hints(hint_policy(0), games=6, count=4)  # its attention is zero: nothing that is heard matters
    for episode in episodes:
        assert RESAMPLED(episode)[0] == pytest.approx(0, abs=1e-6)


def test_the_reward_by_hand() -> None:
    """A replacement after which nobody is asked leaves the belief at .2."""
    asked = Question("who?", ("red", "blue"), "blue")

    def believed(truth: float, step: int) -> Belief:
        return Belief("b", "crewmate", step, 0, asked, np.array([1 - truth, truth]))

    turn = Turn("a", "crewmate", 0, TurnKind.SPEAK, "x", message="x", instead=((believed(0.4, 1),), ()))
    episode = Episode(0, {}, {}, {}, (turn,), (believed(0.2, 0), believed(0.7, 1)), (), {}, 1)
    assert RESAMPLED(episode).tolist() == pytest.approx([0.7 - (0.4 + 0.2) / 2])
    assert SpeakingReward()(episode).tolist() == pytest.approx([0.5])
    alone = replace(episode, turns=(replace(turn, instead=()),))
    assert RESAMPLED(alone).tolist() == pytest.approx([0.5])  # evaluation games are not resampled
    against = replace(episode, turns=(replace(turn, role="imposter"),))
    assert RESAMPLED(against).tolist() == pytest.approx([-0.4])
    assert add_rewards([episode], {"s": RESAMPLED})[0].turns[0].rewards == {"s": pytest.approx(0.4)}


def test_an_endpoint_may_play_the_imposter() -> None:
    given = [
        "env=among_us",
        "reward.speaking.baseline=resampled",
        "cast.imposter.player=chat",
        "chat.model=x",
        "chat.url=http://localhost:9/v1",
    ]
    assert run_spec(configure("train", *given)).rewards["speaking"].resamples == 4  # type: ignore[attr-defined]
    assert config_hash(configure("train", "reward.speaking.samples=4")) == config_hash(configure("train"))
