"""env.belief=vote: the belief question and the vote are one prompt and one position."""

import math

import pytest
import torch

from envs.among_us.texts import COMPACT_TOKENS
from envs.core import Question
from marl.agents.model import ModelAgent
from marl.model.policy import Policy, tiny_lm
from marl.model.tokens import CUE, StreamWriter, Tokens, train_tokenizer
from marl.pretraining.corpus import scripted_texts
from marl.rewards.speaking import SpeakingReward
from marl.rollout.games import env_maker, scripted
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from marl.types import Episode, Kind

GAME = {"game": "among_us", "style": "compact", "belief": "vote", "max_steps": 120, "messages_each": 1, "cooldown": 1}
VOTES = Question(" vote", ("red", "blue", "skip"), "blue", cued=True)


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    return Tokens(train_tokenizer(scripted_texts("among_us", [env_maker(GAME)], 0, games=20), COMPACT_TOKENS, 1024))


@pytest.fixture(scope="module")
def episodes(tokens: Tokens) -> list[Episode]:
    lm = tiny_lm(tokens.size, hidden_size=16, layers=1, heads=2, intermediate_size=32, context=1024)
    agent = ModelAgent("learner", Policy(lm, tokens), slots=60, context=1024, max_new_tokens=8)
    return rollout(draw_games(0, 1, count=12), everyone(agent), env_maker(GAME), 12)


def test_a_stream_by_hand(tokens: Tokens) -> None:
    (vote,), (red,), (blue,), (skip,) = (tokens.encode(text) for text in (" vote", " red", " blue", " skip"))
    cue = tokens.tokenizer.get_vocab()[CUE]
    view = StreamWriter(tokens)
    view.observe(" red", (VOTES,), 0)
    view.observe(" blue vote", (VOTES,), 1)
    assert view.cue(("skip", "red", "blue")) == (skip, red, blue)
    view.reply([blue], Kind.CHOICE)
    assert view.stream.tokens[-7:] == [red, vote, cue, blue, vote, cue, blue]
    obs, asked = Kind.OBSERVATION, Kind.QUESTION
    assert view.stream.kinds[-7:] == [obs, asked, asked, obs, obs, obs, Kind.CHOICE]
    start = len(view.stream) - 7
    assert [(a.position - start, a.step, a.candidate_ids) for a in view.asked] == [
        (2, 0, (red, blue, skip)),
        (5, 1, (red, blue, skip)),
    ]


def test_what_is_believed_after_the_last_message_is_what_is_voted(episodes: list[Episode]) -> None:
    """The belief and the vote are read from one position, so that their probabilities agree to 1e-5."""
    votes = 0
    for episode in episodes:
        asked = {(b.listener, b.position): b for b in episode.beliefs}
        for turn in episode.turns:
            if turn.truths:
                belief = asked[turn.agent, turn.start - 1]
                assert belief.step == turn.step and belief.candidate_ids == turn.legal
                assert (belief.question.answer_index, *belief.question.also_indices) == turn.truths
                chosen = turn.legal.index(turn.reply_ids[0])
                assert math.log(belief.probs[chosen]) == pytest.approx(turn.logprobs[0], abs=1e-5)
                votes += 1
        for belief in episode.beliefs:  # all others have the very same prompt
            stream = episode.streams[belief.listener].tokens
            assert stream[belief.position - 1 : belief.position + 1] == prompt_of(episodes)
    assert votes > 5


def prompt_of(episodes: list[Episode]) -> list[int]:
    turn, episode = next((t, e) for e in episodes for t in e.turns if t.truths)
    return episode.streams[turn.agent].tokens[turn.start - 2 : turn.start]


def test_every_message_has_a_belief_before_and_after(episodes: list[Episode]) -> None:
    """The last message before the vote has both, and so earns a speaking reward too."""
    for episode in episodes:
        heard = SpeakingReward().changes(episode)
        crew = [role for role in episode.roles.values() if role == "crewmate"]
        for turn, changes in zip(episode.turns, heard, strict=True):
            assert bool(changes) == bool(turn.message) and len(changes) <= len(crew)


def test_a_base_learns_the_vote_as_the_question(tokens: Tokens) -> None:
    """Gullible players answer it as they do the other: with others alone, never with themselves or a skip."""
    episodes = rollout(
        draw_games(0, 2, count=6), everyone(scripted("among_us", "gullible", tokens)), env_maker(GAME), 6
    )
    beliefs = [(e, b) for e in episodes for b in e.beliefs]
    assert beliefs
    for episode, belief in beliefs:
        own = episode.facts["names"][belief.listener].lower()
        assert belief.question.answer not in ("skip", own) and {"skip", own} <= set(belief.question.candidates)
        assert len(belief.probs) == len(belief.candidate_ids) == len(set(belief.candidate_ids))


def test_reading_the_stream_again_gives_the_same_beliefs(tokens: Tokens, episodes: list[Episode]) -> None:
    lm = tiny_lm(tokens.size, hidden_size=16, layers=1, heads=2, intermediate_size=32, context=1024)
    policy, episode = Policy(lm, tokens).eval(), episodes[0]
    for belief in episode.beliefs:
        with torch.no_grad():
            hidden = policy.hidden(torch.tensor([episode.streams[belief.listener].tokens[: belief.position + 1]]))
            probs = policy.logits(hidden[:, -1])[0, list(belief.candidate_ids)].softmax(-1)
        assert probs.tolist() == pytest.approx(belief.probs.tolist(), abs=1e-5)
