"""Players that speak with another's mouth, in whole games of Among Us between small random models."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from envs.among_us import environment as among_us_environment
from envs.among_us import texts as among_us_texts
from envs.core import END, TurnKind
from marl.agents.base import Agent
from marl.agents.dubbed import SILENCE, Dubbed
from marl.agents.model import ModelAgent
from marl.common.errors import UserError
from marl.model.policy import Policy, tiny_lm
from marl.rollout.games import env_maker
from marl.rollout.rollout import rollout
from marl.rollout.seeds import draw_games
from marl.types import Episode, Kind
from tests.marl.models import hf_policy, precise, small_tokens, with_critic

COMPACT = env_maker({"game": "among_us", "style": "compact", "players": 5, "height": 1, "max_steps": 36})
NATURAL = env_maker({"game": "among_us", "style": "natural", "players": 4, "max_steps": 12, "cooldown": 1})
GAMES = draw_games(5, 2, count=4)
STYLES = ("compact", "natural")


@cache
def policy(seed: int) -> Policy:
    """Words of the game, weights from the seed, logits several nats apart; in float64, so that games are comparable."""
    tokens = small_tokens(among_us_texts.COMPACT_TOKENS)
    lm = tiny_lm(tokens.size, hidden_size=32, layers=2, intermediate_size=64, context=1024, generator_seed=seed)
    with torch.no_grad():
        for weight in lm.parameters():
            if weight.dim() > 1:
                weight.mul_(4)
    return precise(with_critic(Policy(lm, tokens)))


def model(policy: Policy, name: str = "learner") -> ModelAgent:
    return ModelAgent(name, policy, slots=32, context=1024, max_new_tokens=6)


def play(crew: Agent, imposter: Agent, make_env: object = COMPACT, games: int = 4) -> list[Episode]:
    def cast(game: object, env: among_us_environment.AmongUs) -> dict[str, Agent]:
        return {a: imposter if a in env.facts["imposters"] else crew for a in env.possible_agents}

    return rollout(GAMES[:games], cast, make_env, 4)  # type: ignore[arg-type]


def same_games(ours: list[Episode], theirs: list[Episode]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.streams == b.streams and a.outcome == b.outcome and a.players == b.players
        for x, y in zip(a.turns, b.turns, strict=True):
            assert (x.agent, x.step, x.kind, x.text, x.reply_ids, x.start, x.legal, x.body, x.message) == (
                y.agent, y.step, y.kind, y.text, y.reply_ids, y.start, y.legal, y.body, y.message,
            )  # fmt: skip
            np.testing.assert_allclose(x.logprobs, y.logprobs, atol=1e-5)
            assert x.value == pytest.approx(y.value, abs=1e-5)
        for p, q in zip(a.beliefs, b.beliefs, strict=True):
            assert (p.listener, p.step, p.position, p.question) == (q.listener, q.step, q.position, q.question)
            np.testing.assert_allclose(p.probs, q.probs, atol=1e-5)


def messages(episodes: list[Episode], player: str) -> list[str]:
    return [t.message for e in episodes for t in e.turns if t.kind == TurnKind.SPEAK and e.players[t.agent] == player]


def test_dubbed_by_itself_it_plays_as_it_does_alone() -> None:
    alone = play(model(policy(1)), model(policy(2), "base"))
    crew = Dubbed(model(policy(1), "moves"), model(policy(1), "speaks"), "learner")
    same_games(play(crew, model(policy(2), "base")), alone)
    assert sum(map(bool, messages(alone, "learner"))) > 10 and any(e.beliefs for e in alone)
    assert isinstance(crew.speaker, ModelAgent)
    assert len(crew.mover.engine._free) == len(crew.speaker.engine._free) == 32  # slots went back


def test_dubbed_by_itself_with_a_pretrained_models_letters_and_marks(tmp_path: Path) -> None:
    gpt2 = precise(hf_policy(tmp_path, "gpt2", context=2048))

    def make(name: str) -> ModelAgent:
        return ModelAgent(name, gpt2, slots=16, context=2048, max_new_tokens=6)

    alone = play(make("learner"), make("base"), NATURAL, games=1)
    dubbed = play(Dubbed(make("moves"), make("speaks"), "learner"), make("base"), NATURAL, games=1)
    same_games(dubbed, alone)
    assert any(t.reply_ids for e in alone for t in e.turns if t.kind == TurnKind.CHOOSE)


def test_choices_and_beliefs_are_the_movers_and_speech_is_the_speakers() -> None:
    """Every reply is likely, and every value and belief exact, under the policy whose it is said to be, in one pass."""
    episodes = play(Dubbed(model(policy(1)), model(policy(2)), "dubbed"), model(policy(2), "base"))
    checked = dict.fromkeys(TurnKind, 0)
    for episode in episodes:
        for agent, stream in episode.streams.items():
            if episode.players[agent] != "dubbed":
                continue
            ids = torch.tensor([stream.tokens])
            with torch.no_grad():
                hidden = {n: policy(n).hidden(ids)[0] for n in (1, 2)}  # (T, D)
                logits = {n: policy(n).logits(h).double() for n, h in hidden.items()}  # (T, V)
            for turn in (t for t in episode.turns if t.agent == agent):
                whose = 1 if turn.kind == TurnKind.CHOOSE else 2
                assert tuple(stream.tokens[turn.start : turn.start + len(turn.reply_ids)]) == turn.reply_ids
                assert set(stream.kinds[turn.start : turn.start + len(turn.reply_ids)]) == {
                    Kind.CHOICE if whose == 1 else Kind.SPEECH
                }
                value = policy(whose).value(hidden[whose][turn.start - 1], torch.zeros(0))
                assert turn.value == pytest.approx(float(value.detach()), abs=1e-4)
                for i, (token, logprob) in enumerate(zip(turn.reply_ids, turn.logprobs, strict=True)):
                    shaped = policy(whose).speech_logits(logits[whose][turn.start + i - 1], 1.0)
                    if turn.legal:
                        shaped = logits[whose][turn.start + i - 1][list(turn.legal)]
                        token = turn.legal.index(token)
                    assert logprob == pytest.approx(float(shaped.log_softmax(0)[token]), abs=1e-4)
                    checked[turn.kind] += 1
            for belief in (b for b in episode.beliefs if b.listener == agent):
                probs = logits[1][belief.position, list(belief.candidate_ids)].softmax(0)
                np.testing.assert_allclose(belief.probs, probs, atol=1e-4)
                checked[TurnKind.WAIT] += 1
    assert min(checked.values()) > 10, checked


def test_silence_is_the_end_marker_alone() -> None:
    base = model(policy(2), "base")
    episodes = play(Dubbed(model(policy(1)), SILENCE, "mute"), base, games=2)
    tokens = policy(1).tokens
    said = [t for e in episodes for t in e.turns if t.kind == TurnKind.SPEAK and e.players[t.agent] == "mute"]
    assert len(said) > 4
    for turn in said:
        assert (turn.message, turn.body, turn.error) == ("", (0, 0), "")
        assert len(turn.reply_ids) == 1 and tokens.decode(turn.reply_ids) == f" {END}" and tokens.ends(turn.reply_ids)
    for episode in episodes:
        for agent, stream in episode.streams.items():
            if episode.players[agent] == "mute":
                speech = [t for t, kind in zip(stream.tokens, stream.kinds, strict=True) if kind == Kind.SPEECH]
                assert len(speech) == sum(t.agent == agent and t.kind == TurnKind.SPEAK for t in episode.turns)
    assert any(messages(episodes, "base"))  # the others may speak


def test_two_tokenizers_are_refused(tmp_path: Path) -> None:
    other = model(hf_policy(tmp_path, "gpt2"), "gpt2")
    with pytest.raises(UserError, match=r"gpt2 cannot speak for learner.*tokens\)"):
        Dubbed(model(policy(1)), other, "x")
    mover = model(policy(1))
    with pytest.raises(AssertionError, match="slots of its own"):
        Dubbed(mover, mover, "x")


def test_voices_of_another_style_are_refused() -> None:
    compact, natural = (ModelAgent(style, policy(0), slots=8, context=1024, style=style) for style in STYLES)
    with pytest.raises(UserError, match="natural cannot speak for compact: one reads natural words and the other"):
        Dubbed(compact, natural, "dubbed")
    assert Dubbed(compact, model(policy(0)), "dubbed").style == "compact"
