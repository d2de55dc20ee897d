"""Agents on requests made by hand: what they read, what they answer, what they keep."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from envs.core import END, Question, TurnKind
from marl.agents.base import Player, Reply, Request
from marl.agents.model import ModelAgent, ModelAgentState
from marl.agents.text import TextAgent
from marl.common.errors import UserError
from marl.decoding.probes import size_of
from marl.model.policy import Policy
from marl.types import Kind, Stream
from tests.marl.models import CHATML, hf_policy, precise, tiny_policy

QUESTION = Question("<books?>", tuple(str(n) for n in range(11)), "3")
SPEAK, CHOOSE, WAIT = TurnKind.SPEAK, TurnKind.CHOOSE, TurnKind.WAIT


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Policy]:
    return {
        "tiny": tiny_policy(privileged_size=2),
        "gpt2": hf_policy(tmp_path_factory.mktemp("gpt2"), "gpt2", privileged_size=2),
        "chat": hf_policy(
            tmp_path_factory.mktemp("chat"), "qwen3", chat_template=CHATML, single_digits=True, privileged_size=2
        ),
    }


NAMES = ("tiny", "gpt2", "chat")


def model(policy: Policy, **settings: Any) -> ModelAgent:
    return ModelAgent("learner", policy, **{"slots": 12, "context": 512, "max_new_tokens": 6, **settings})


def request(game: int, turn: TurnKind, text: str, step: int = 0, **fields: Any) -> Request:
    return Request(
        (game, "player_0"), 100 + game, "negotiator", step, turn, text, **{"privileged": (0.5, -1.0), **fields}
    )


def serve(agent: ModelAgent, requests: Sequence[Request]) -> dict[int, Reply]:
    """Asks until nothing is owed."""
    owed = sum(r.turn != WAIT for r in requests)
    replies = agent.act(requests)
    while len(replies) < owed:
        more = agent.act(())
        assert more, "an agent that owes replies gave none"
        replies += more
    assert agent.act(()) == []
    assert len({r.key for r in replies}) == len(replies) == owed
    return {r.key[0]: r for r in replies}


def play(agent: ModelAgent, games: Sequence[int]) -> tuple[list[dict[int, Reply]], dict[int, tuple[Stream, list]]]:
    """Plays five rounds of each game: texts of different lengths, questions, a choice, and an end that is not read."""
    rounds = [
        serve(agent, [request(g, SPEAK, "books 1 2 " * (1 + g), questions=(QUESTION,)) for g in games]),
        serve(agent, [request(g, WAIT, "them: 5\n", 1, questions=(QUESTION, QUESTION)) for g in games]),
        serve(agent, [request(g, CHOOSE, "cut", 2, options=("go on", "1", str(g % 7 + 2))) for g in games]),
        serve(agent, [request(g, SPEAK, "", 3) for g in games]),
        serve(agent, [request(g, WAIT, "no deal\n" * g, 4, questions=(QUESTION,) * (g % 2)) for g in games]),
    ]
    kept = agent.finish([(g, "player_0") for g in games])
    return rounds, {key[0]: views for key, views in kept.items()}


def same_replies(a: Reply, b: Reply) -> None:
    assert (a.key, a.text, a.ids, a.start, a.legal) == (b.key, b.text, b.ids, b.start, b.legal)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5, rtol=0)
    assert a.value == pytest.approx(b.value, abs=1e-5)


# --- Language models ---


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("tiny", {"read_budget": 1}),
        ("tiny", {"patience": 1.0, "read_budget": 50}),
        ("gpt2", {"patience": 0.0, "read_budget": 50}),
        ("chat", {}),
        ("chat", {"decode_steps": 3}),
    ],
    ids=str,
)
def test_a_seat_plays_the_same_alone_and_in_company(name: str, settings: dict, policies: dict[str, Policy]) -> None:
    games, policy = list(range(5)), precise(policies[name])
    rounds, kept = play(model(policy, **settings), games)
    for game in games:
        own_rounds, own_kept = play(model(policy), [game])
        for together, alone in zip(rounds, own_rounds, strict=True):
            assert (game in together) == (game in alone)
            if game in alone:
                same_replies(together[game], alone[game])
        assert kept[game][0] == own_kept[game][0]
        for a, b in zip(kept[game][1], own_kept[game][1], strict=True):
            same = ("step", "position", "question", "candidate_ids")
            assert [getattr(a, name) for name in same] == [getattr(b, name) for name in same]
            np.testing.assert_allclose(a.probs, b.probs, atol=1e-5, rtol=0)


class Endless(ModelAgent):
    """Messages are as long as they may be. Keeps how many seats read how much in each pass."""

    def _complete(self, state: ModelAgentState) -> bool:
        return bool(state.ids) and (state.kind == Kind.CHOICE or len(state.ids) == state.limit)

    def _advance(self, keys: Sequence[tuple[int, str]]) -> None:
        self.passes.append((len(keys), max(len(self._unread(self._states[key])) for key in keys) > 1))
        super()._advance(keys)

    passes: list[tuple[int, bool]]


@pytest.mark.parametrize(("patience", "readers", "waited"), [(0.5, 1, 4), (0.5, 5, 0), (0.0, 1, 0), (0.95, 1, 9)])
def test_readers_wait_while_others_write(
    patience: float, readers: int, waited: int, policies: dict[str, Policy]
) -> None:
    agent = Endless("learner", policies["tiny"], slots=10, context=512, max_new_tokens=30, patience=patience)
    agent.passes = []
    choosing = [request(g, CHOOSE, "cut", options=("1", "2")) for g in range(readers)]
    assert len(agent.act([*choosing, *(request(g, SPEAK, "cut") for g in range(readers, 10))])) == readers
    for wave in range(2):  # what was waited before does not count again
        agent.passes.clear()
        again = [request(g, CHOOSE, "cut", 1 + wave, options=("1", "2")) for g in range(readers)]
        assert len(agent.act(again)) == readers
        assert agent.passes == [(10 - readers, False)] * waited + [(readers, True)]


@pytest.mark.parametrize(("name", "temperature"), [("tiny", 1.0), ("gpt2", 0.6), ("chat", 1.0)])
def test_what_is_on_record_is_what_one_full_pass_says(
    name: str, temperature: float, policies: dict[str, Policy]
) -> None:
    policy = policies[name]
    rounds, kept = play(model(policy, temperature=temperature), range(4))
    for game in range(4):
        stream, beliefs = kept[game]
        with torch.no_grad():
            hidden = policy.hidden(torch.tensor([stream.tokens]))[0]  # (T, D)
            logits = policy.lm(input_ids=torch.tensor([stream.tokens])).logits[0]  # (T, V)
        replies = [r[game] for r in rounds if game in r]
        assert [bool(r.legal) for r in replies] == [False, True, False]
        for reply in replies:
            assert tuple(stream.tokens[reply.start : reply.start + len(reply.ids)]) == reply.ids
            for i, (token, logprob) in enumerate(zip(reply.ids, reply.logprobs, strict=True)):
                shaped = (logits[reply.start + i - 1] / temperature).double()
                allowed = torch.zeros(len(shaped), dtype=torch.bool)
                if reply.legal:
                    allowed[list(reply.legal)] = True
                else:
                    allowed[[t for t in range(policy.tokens.size) if t not in policy.tokens.unspeakable]] = True
                shaped[~allowed] = -torch.inf
                assert logprob == pytest.approx(float(shaped.log_softmax(0)[token]), abs=1e-4)
            facts = torch.tensor([0.5, -1.0])
            assert reply.value == pytest.approx(float(policy.value(hidden[reply.start - 1], facts).detach()), abs=1e-4)
        assert [b.step for b in beliefs] == [0, 1, 1, *[4] * (game % 2)]
        for belief in beliefs:
            assert stream.kinds[belief.position] == Kind.QUESTION
            probs = logits[belief.position, list(belief.candidate_ids)].double().softmax(0)
            np.testing.assert_allclose(belief.probs, probs, atol=1e-4)
            assert belief.probs.shape == (11,) and belief.probs.sum() == pytest.approx(1)
            assert (belief.listener, belief.role, belief.truth) == ("player_0", "negotiator", belief.probs[3])


@pytest.mark.parametrize("name", ["tiny"])
def test_a_copy_in_bfloat16_plays_for_the_policy(name: str, policies: dict[str, Policy]) -> None:
    """Recorded log-probabilities are those of the copy in one pass, normalised in float32, and near the policy's own.
    New games are played with the policy's latest weights."""
    policy = copy.deepcopy(policies[name])
    whole, agent = model(policy), model(policy, bf16=True)
    play(whole, [0])
    rounds, kept = play(agent, range(3))
    assert agent.policy.tokens is policy.tokens
    assert agent.policy.lm.dtype == torch.bfloat16 and policy.lm.dtype == torch.float32
    assert 2 * agent.engine.cache.nbytes == whole.engine.cache.nbytes
    assert 2 * size_of(policy.lm.config, 512, torch.bfloat16).slot == size_of(policy.lm.config, 512).slot
    for game in range(3):
        ids = torch.tensor([kept[game][0].tokens])
        for by, within in ((agent.policy, 0.05), (policy, 0.2)):  # processors round sums of bfloat16 otherwise
            with torch.no_grad():
                logits = by.logits(by.hidden(ids)[0])
            for reply in (r[game] for r in rounds if game in r and not r[game].legal):
                shaped = by.speech_logits(logits[reply.start - 1 : reply.start - 1 + len(reply.ids)], 1.0)
                own = shaped.double().log_softmax(-1).gather(1, torch.tensor([reply.ids]).T)[:, 0]
                np.testing.assert_allclose(reply.logprobs, own, atol=within)
    with torch.no_grad():
        policy.value_head[-1].bias += 1.0
    later, _ = play(agent, range(3))  # new games are played with what was learned meanwhile
    assert [later[0][game].value for game in range(3)] == pytest.approx([rounds[0][g].value + 1.0 for g in range(3)])
    with torch.no_grad():
        next(policy.lm.parameters()).mul_(0.5)
    play(agent, [0])
    assert torch.equal(next(agent.policy.lm.parameters()), next(policy.lm.parameters()).bfloat16())


@pytest.mark.parametrize("name", NAMES)
def test_a_choice_is_one_of_its_options_word_for_word(name: str, policies: dict[str, Policy]) -> None:
    agent = model(policies[name])
    options = [("go on", "1"), ("0", "10", "3"), ("wait",), tuple(f"room {i}" for i in range(20))]
    replies = serve(agent, [request(i, CHOOSE, "cut", options=o) for i, o in enumerate(options)])
    for i, o in enumerate(options):
        assert replies[i].text in o and len(replies[i].ids) == 1 and len(replies[i].legal) == len(o)
        assert replies[i].ids[0] == replies[i].legal[o.index(replies[i].text)]
    assert replies[2].text == "wait" and replies[2].logprobs == (0.0,)
    hot = serve(
        model(policies[name], slots=30, temperature=8.0),
        [request(i, CHOOSE, "cut", options=("1", "2", "3")) for i in range(30)],
    )
    assert {r.text for r in hot.values()} == {"1", "2", "3"}


def test_a_message_ends_at_its_limit_at_the_end_marker_or_at_the_models_own_end(policies: dict[str, Policy]) -> None:
    seen = set()
    for policy in policies.values():
        tokens = policy.tokens
        agent = model(policy, slots=150, context=60, max_new_tokens=30)
        for reply in serve(agent, [request(i, SPEAK, "books") for i in range(150)]).values():
            ended = [tokens.ends(reply.ids[: i + 1]) for i in range(len(reply.ids))]
            assert not any(ended[:-1]) and (ended[-1] or len(reply.ids) == 30)
            own = reply.ids[-1] in tokens.eos_ids
            assert reply.text == tokens.decode(reply.ids[:-1] if own else reply.ids)
            seen.add("eos" if own else "end" if END in reply.text else "limit")
            assert len(reply.logprobs) == len(reply.ids)
    assert seen == {"eos", "end", "limit"}


def test_waiting_costs_no_forward_pass_until_a_reply_is_due(policies: dict[str, Policy]) -> None:
    agent = model(policies["tiny"])
    for step in range(5):
        assert agent.act([request(0, WAIT, "them: 1\n", step)]) == []
    assert agent.engine.tokens_read == 0
    stream, beliefs = agent.finish([(0, "player_0")])[(0, "player_0")]
    assert agent.engine.tokens_read == 0 and beliefs == [] and len(stream) == 1 + 5 * 3
    _, kept = play(agent, [1])  # its last observation asks a question: all is read once
    assert agent.engine.tokens_read == len(kept[1][0])
    with pytest.raises(RuntimeError, match="12 slots"):
        agent.act([request(g, WAIT, "x") for g in range(13)])


@pytest.mark.parametrize(("name", "decode_steps"), [("tiny", 1), ("tiny", 3), ("chat", 1)])
def test_a_seat_that_outgrows_its_slot_falls_silent_and_the_others_go_on(
    name: str, decode_steps: int, policies: dict[str, Policy]
) -> None:
    """Two seats have room for 150 tokens each, and one of them reads more and more."""
    policy = policies[name]
    agent = model(policy, context=150, max_new_tokens=60, decode_steps=decode_steps)
    seen, lengths = 0, []
    for step in range(12):
        texts = ("books 1 2 " * 6, "")
        asked = [request(g, SPEAK, text, step, questions=(QUESTION,)) for g, text in enumerate(texts)]
        if step > 1:
            asked = asked[:1]  # the other waits
        replies = serve(agent, asked)
        (stream, lost) = (agent._states[0, "player_0"].view.stream, agent._states[0, "player_0"].lost)
        reply = replies[0]
        if lost:
            assert (reply.text, reply.ids, reply.start, reply.logprobs) == ("", (), len(stream), ())
            lengths.append(len(stream))
        else:
            assert reply.ids and len(stream) <= 150  # cut short, perhaps, by the slot's end
            seen = len(agent._states[0, "player_0"].view.asked)
    assert len(lengths) > 2 and len(set(lengths)) == 1  # it reads nothing more
    kept = agent.finish([(0, "player_0"), (1, "player_0")])
    assert len(kept[0, "player_0"][1]) == seen > 0 and len(kept[0, "player_0"][0]) == lengths[0]
    alone = model(policy, context=150, max_new_tokens=60)
    for step in range(2):
        serve(alone, [request(1, SPEAK, "", step, questions=(QUESTION,))])
    assert alone.finish([(1, "player_0")])[1, "player_0"][0] == kept[1, "player_0"][0]


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_leaves_room_for_a_token_and_what_stands_after_it(name: str, policies: dict[str, Policy]) -> None:
    policy = policies[name]
    prompt = serve(model(policy), [request(0, SPEAK, "books 1 2")])[0].start
    least = prompt + 1 + len(policy.tokens.format.after_reply)
    agent = model(policy, context=least)
    assert len(serve(agent, [request(0, SPEAK, "books 1 2")])[0].ids) == 1
    assert len(agent._states[0, "player_0"].view.stream) == least
    with pytest.raises(UserError, match=rf"a prompt is too long: a stream of {least} tokens does not fit"):
        model(policy, context=least - 1).act([request(0, SPEAK, "books 1 2")])


def test_a_chosen_option_is_written_out_and_has_room(policies: dict[str, Policy]) -> None:
    """A chat model answers with the first token; the option's others follow, as tokens of which no loss learns."""
    tokens = policies["chat"].tokens
    asked = request(0, CHOOSE, "cut", options=("report Blue", "wait"))
    agent = model(policies["chat"])
    reply = serve(agent, [asked])[0]
    assert len(reply.ids) == 1 and reply.legal == tuple(tokens.encode(text)[0] for text in asked.options)
    stream, end = agent._states[0, "player_0"].view.stream, tokens.format.after_reply
    assert tokens.decode(stream.tokens[reply.start :]) == reply.text + tokens.decode(end)
    assert agent._states[0, "player_0"].view.tail == len(end)  # the choice is made, and nothing more follows it
    rest = len(tokens.encode(reply.text)) - 1
    assert stream.kinds[reply.start :] == [Kind.CHOICE, *[Kind.QUESTION] * rest, *[Kind.OBSERVATION] * len(end)]
    least = reply.start + max(len(tokens.encode(text)) for text in asked.options) + len(end)
    roomy = model(policies["chat"], context=least)
    assert serve(roomy, [asked])[0].text in asked.options and not roomy._states[0, "player_0"].lost
    with pytest.raises(UserError, match=rf"a stream of {least} tokens does not fit"):
        model(policies["chat"], context=least - 1).act([asked])


# --- Players without a model ---


class Parrot:
    """Says what it read, and how often; chooses the last option."""

    def __init__(self, seed: int, role: str) -> None:
        self.made_from, self.read = (seed, role), []

    def observe(self, text: str) -> None:
        self.read.append(text)

    def reply(self, text: str, options: Sequence[str] = ()) -> str:
        self.read.append(text)
        return options[-1] if options else f"[message] {len(self.read)} {END}"


def parrots(**settings: Any) -> tuple[TextAgent, list[Parrot]]:
    made: list[Parrot] = []

    def make(seed: int, role: str) -> Player:
        made.append(Parrot(seed, role))
        return made[-1]

    return TextAgent("parrot", make, **settings), made


def test_one_player_a_seat_reads_everything_in_order() -> None:
    agent, made = parrots()
    assert agent.act([request(0, WAIT, "a"), request(1, SPEAK, "b")]) == [Reply((1, "player_0"), f"[message] 1 {END}")]
    replies = agent.act([request(0, SPEAK, "c", 1), request(1, CHOOSE, "d", 1, options=("x", "y"))])
    assert [(r.key[0], r.text) for r in replies] == [(0, f"[message] 2 {END}"), (1, "y")]
    assert [(p.made_from, p.read) for p in made] == [
        ((100, "negotiator"), ["a", "c"]),
        ((101, "negotiator"), ["b", "d"]),
    ]
    assert agent.finish([(0, "player_0")]) == {}
    agent.act([request(0, WAIT, "a new game"), request(1, WAIT, "e")])
    assert [p.read for p in made] == [["a", "c"], ["b", "d", "e"], ["a new game"]]


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_player_leaves_the_stream_a_model_would_have_read(name: str, policies: dict[str, Policy]) -> None:
    """The same requests and replies: the model is made to say, token by token, what the player said."""
    policy = policies[name]
    recorder, _ = parrots(tokens=policy.tokens)
    exchanges = [
        request(3, SPEAK, "books 1 2", questions=(QUESTION,)),
        request(3, WAIT, "them: 5\n", 1, questions=(QUESTION,)),
        request(3, CHOOSE, "cut", 2, options=("go on", "1", "2")),
        request(3, CHOOSE, "", 3, options=("1", "2")),
        request(3, SPEAK, "", 4),
        request(3, WAIT, "no deal\n", 5, questions=(QUESTION,)),
    ]
    recorded = [recorder.act([r]) for r in exchanges]
    script = [token for replies in recorded for reply in replies for token in reply.ids]
    agent = model(policy, max_new_tokens=40)

    def say(hidden: torch.Tensor, *rest: object) -> tuple[np.ndarray, np.ndarray]:
        assert len(hidden) == 1
        return np.array([script.pop(0)]), np.zeros(1)

    agent.engine.sample = say  # type: ignore[method-assign,assignment]
    for r, replies in zip(exchanges, recorded, strict=True):
        for ours, theirs in zip(agent.act([r]), replies, strict=True):
            for name in ("text", "ids", "start", "legal"):
                assert getattr(ours, name) == getattr(theirs, name)
            assert theirs.logprobs == (0.0,) * len(theirs.ids)
    key = (3, "player_0")
    (stream, beliefs), (other, answered) = recorder.finish([key])[key], agent.finish([key])[key]
    assert stream == other and not script
    for a, b in zip(beliefs, answered, strict=True):
        assert (a.listener, a.role, a.step, a.position, a.question, a.candidate_ids) == (
            b.listener, b.role, b.step, b.position, b.question, b.candidate_ids,
        )  # fmt: skip
        np.testing.assert_allclose(a.probs, np.full(11, 1 / 11))
    assert recorder.finish([key]) == {}
