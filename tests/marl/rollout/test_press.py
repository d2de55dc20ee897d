"""Talk in Diplomacy, measured and paid: influence read by hand, and a planted word that is kept or broken."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("diplomacy", reason="needs the extra `diplomacy`: pip install 'diplomacy==1.1.2'")

from envs import diplomacy_v0
from envs.core import END, TurnKind, clean
from envs.diplomacy.texts import NOBODY, POWERS
from marl.agents.model import ModelAgent
from marl.metrics.influence import compared
from marl.model.tokens import StreamWriter
from marl.rewards.speaking import SpeakingReward
from marl.rollout.games import env_maker
from marl.types import Belief, Episode, Stream, Turn
from tests.marl.rollout.test_resampling import played

PRESS = {"game": "diplomacy", "map_name": "pure", "press": "private", "years": 1, "questions": 1, "style": "compact"}


def answered(env: diplomacy_v0.Diplomacy, episode: Episode) -> dict[int, dict[str, str]]:
    """Plays a game again: the order of each unit that somebody was asked about, by step, and by reader and question."""
    env.reset(seed=episode.seed)
    found: dict[int, dict[str, str]] = {}
    for step in range(episode.steps):
        now = {t.agent: t.text for t in episode.turns if t.step == step}
        infos = env.step({a: now.get(a, "") for a in env.agents})[-1]
        for agent, info in infos.items():
            for key, order in info.get("answers", {}).items():
                found.setdefault(step, {})[f"{agent} {key}"] = order
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_influence_is_what_the_reader_believes_of_the_other_words(temperature: float) -> None:
    """Messages are compared with silence and with what the author says again. Only their readers are measured."""
    agent, episodes = played(PRESS, temperature, games=1)
    heard, found = compared(episodes, env_maker(PRESS), {"learner": agent}, {"learner"}, draws=2)
    env, measured = diplomacy_v0.parallel_env(**{k: v for k, v in PRESS.items() if k != "game"}), 0
    for game, episode in enumerate(heard):
        powers = episode.facts["powers"]
        answers = answered(env, episode)
        for number, turn in enumerate(episode.turns):
            own = [e for e in found if (e.game, e.turn) == (game, number)]
            if turn.kind != TurnKind.SPEAK or not turn.message:
                assert not own
                continue
            to = next(t.text.strip() for t in reversed(episode.turns[:number]) if t.agent == turn.agent)
            (reader,) = (a for a, power in powers.items() if power == to)
            assert {e.listener for e in own} == {reader}
            (after,) = (b for b in episode.beliefs if b.step == turn.step + 1)
            # The truth is what is then ordered.
            first = next(step for step in sorted(answers) if step > turn.step)
            assert answers[first][f"{reader} {after.question.later}"] == after.question.answer
            truth = after.question.candidates.index(after.question.answer)
            words = [
                "".join(" " if c.isspace() else c for c in text.partition(END)[0].strip()) for text in turn.otherwise
            ]
            again = [believed(agent, episode, after, powers[turn.agent], each) for each in words]
            if turn.message in turn.text:  # else the game joined its lines
                silence = believed(agent, episode, after, powers[turn.agent], "")
                (effect,) = (e for e in own if e.kind == "silence")
                assert effect.influence == pytest.approx(np.abs(after.probs - silence).sum() / 2, abs=1e-5)
                assert effect.credit == pytest.approx(after.probs[truth] - silence[truth], abs=1e-5)
                measured += 1
            (effect,) = (e for e in own if e.kind == "resampled")
            assert effect.influence == pytest.approx(
                np.mean([np.abs(after.probs - probs).sum() / 2 for probs in again]), abs=1e-5
            )
            if temperature == 0:  # it would say the same
                assert {*turn.otherwise} == {turn.text} and effect.influence < 1e-5
    assert measured > 2


def believed(agent: ModelAgent, episode: Episode, after: Belief, speaker: str, words: str) -> np.ndarray:
    """The reader's answer had it read these words, from the model itself."""
    before = [b for b in episode.beliefs if b.listener == after.listener and b.step == after.step - 1]
    recorded, end = episode.streams[after.listener], before[-1].position + 1
    writer = StreamWriter(agent.tokens, Stream(recorded.tokens[:end], recorded.kinds[:end]))
    writer.observe(f"{speaker}: {clean(words, 200) or '...'}\n", [replace(after.question, answer="")], after.step)
    (asked,) = writer.asked
    with torch.no_grad():
        state = agent.policy.hidden(torch.tensor([writer.stream.tokens[: asked.position + 1]]))[:, -1]
        return agent.policy.logits(state)[0, list(asked.candidate_ids)].double().softmax(-1).numpy()


# --- The speaking reward ----------------------------------------------------------------------------------------------
def planted(order: str, trust: float = 0.7, rounds: int = 1) -> tuple[Episode, dict[int, Turn]]:
    """Plays a game in which FRANCE tells GERMANY before each move that it will move to ROM, and orders `order`. The
    reader believes the message with probability `trust`, and is undecided before it."""
    env = diplomacy_v0.parallel_env(years=1, press="private", questions=1, rounds=rounds)
    observations, infos = env.reset(seed=0, options={"powers": POWERS})
    turns: list[Turn] = []
    beliefs: list[Belief] = []
    answers: dict[str, dict[str, str]] = {}
    step, agents, spoken = 0, {power: agent for agent, power in env.facts["powers"].items()}, False
    while True:
        for agent, info in infos.items():
            for question in info["questions"]:
                k = len(question.candidates)
                probs = np.full(k, 1 / k)
                if spoken:
                    probs = np.full(k, (1 - trust) / (k - 1))
                    probs[question.candidates.index("-ROM")] = trust
                beliefs.append(Belief(agent, "power", step, 0, question, probs))
            answers.setdefault(agent, {}).update(info.get("answers", {}))
        if not env.agents:
            break
        replies = {}
        spoken = False
        for agent, seen in observations.items():
            options: Sequence[str] = seen["options"]
            mine = agent == agents["FRANCE"]
            if seen["turn"] == TurnKind.SPEAK:
                replies[agent], spoken = f"i will move to ROM {END}", True
            elif NOBODY in options:
                replies[agent] = "GERMANY" if mine else NOBODY
            elif options:
                replies[agent] = order if mine and order in options else options[0]
        observations, _, _, _, infos = env.step(replies)
        for agent, reply in replies.items():
            kind = TurnKind.SPEAK if spoken else TurnKind.CHOOSE
            turns.append(Turn(agent, "power", step, kind, reply, message=infos[agent]["message"]))
        step += 1
    known = [(b, b.question.answered(answers[b.listener])) for b in beliefs]
    beliefs = [replace(b, question=question) for b, question in known if question is not None]
    players = dict.fromkeys(env.possible_agents, "learner")
    episode = Episode(0, players, dict.fromkeys(players, "power"), {}, tuple(turns), tuple(beliefs), (), {}, step)
    return episode, {turn.step: turn for turn in turns if turn.message}


@pytest.mark.parametrize(("order", "truth"), [("-ROM", 0.7), ("H", 0.3 / 12), ("-BER", 0.3 / 12)])
def test_a_kept_word_is_paid_and_a_broken_one_costs(order: str, truth: float) -> None:
    episode, said = planted(order)
    rewards = SpeakingReward()(episode)
    spoken = [rewards[n] for n, turn in enumerate(episode.turns) if turn.message]
    assert len(said) == 2 and spoken == pytest.approx([truth - 1 / 13] * 2)
    assert (min(spoken) > 0) == (order == "-ROM")
    assert all(rewards[n] == 0 for n, turn in enumerate(episode.turns) if not turn.message)
    assert {b.question.answer for b in episode.beliefs} == {order}
    assert {b.listener for b in episode.beliefs} == {
        next(a for a, p in zip(episode.players, POWERS, strict=True) if p == "GERMANY")
    }


def test_each_round_has_a_message_and_is_asked_about() -> None:
    episode, said = planted("-ROM", rounds=3)
    assert len(said) == 6 and len(episode.beliefs) == 12
    assert [sum(b.step == step + 1 for b in episode.beliefs) for step in said] == [1] * 6
