"""Branches: who sees whom, written out by hand, and states equal to those of a fresh read."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from envs.core import Question, TurnKind
from marl.common.errors import UserError
from marl.decoding.cache import SlotCache
from marl.decoding.engine import Engine
from marl.learning.batch import collate
from marl.model.branches import read_questions, sees, takes_masks, tokens_read
from marl.model.policy import Policy
from marl.model.tokens import YOUR_TURN, StreamWriter, Tokens
from marl.storage.checkpoint import load_policy, save_policy
from marl.types import Belief, Episode, Kind, Stream, Turn
from tests.marl.models import CHATML, RECURRENT, hf_policy, hf_tokenizer, random_lm, small_tokens, tiny_policy
from tests.marl.templates import UNCUED

ATTENTION = ("gpt2", "llama", "qwen3", "mistral")  # mistral sees 16 tokens
FRESH = (*RECURRENT, "gpt_neo", "mpt")  # each branch is a row of its own
NUMBERS = tuple(str(n) for n in range(11))


def three_turns() -> Episode:
    """Reads 4 tokens, is asked two questions, replies 2 tokens, reads 1, is asked one question, replies 1."""
    observe, speech = Kind.OBSERVATION, Kind.SPEECH
    stream = Stream(list(range(10, 18)), [observe] * 4 + [speech] * 2 + [observe, speech])
    turns = tuple(
        Turn("a", "negotiator", step, TurnKind.SPEAK, "", reply_ids=ids, start=start, logprobs=(-0.5,) * len(ids))
        for step, start, ids in ((0, 4, (14, 15)), (1, 7, (17,)))
    )
    asked = ((0, 3, (20, 21)), (0, 3, (22,)), (1, 6, (23, 24)))
    beliefs = tuple(
        Belief("a", "negotiator", step, at, Question("?", ("0", "1"), "1"), np.array([0.5, 0.5]), (3, 4), ids)
        for step, at, ids in asked
    )
    return Episode(0, {"a": "learner"}, {"a": "negotiator"}, {"a": stream}, turns, beliefs, (), {}, 2)


def test_a_game_of_three_turns_with_its_branches_behind_it() -> None:
    batch = collate([(three_turns(), "a")], {})
    assert batch.tokens.tolist() == [[*range(10, 18), 20, 21, 22, 23, 24]]
    assert batch.branch.tolist() == [[0] * 8 + [1, 1, 2, 3, 3]]
    assert batch.position_ids.tolist() == [[*range(8), 4, 5, 4, 7, 8]]
    assert batch.kind[0, 8:].tolist() == [Kind.QUESTION] * 5 and batch.lengths.tolist() == [13]
    assert batch.position.tolist() == [9, 10, 12] and batch.row.tolist() == [0, 0, 0]
    assert batch.reply.nonzero()[:, 1].tolist() == [4, 5, 7]
    seen = sees(batch.branch, batch.position_ids)[0]
    assert ["".join("x" if each else "." for each in row) for row in seen.tolist()] == [
        "x............",
        "xx...........",
        "xxx..........",
        "xxxx.........",
        "xxxxx........",
        "xxxxxx.......",
        "xxxxxxx......",
        "xxxxxxxx.....",
        "xxxx....x....",  # the first question, after four tokens
        "xxxx....xx...",
        "xxxx......x..",  # the second, from the same place
        "xxxxxxx....x.",  # the third, after seven
        "xxxxxxx....xx",
    ]
    short = batch.select(torch.tensor([0]), 8)  # what is cut off asks nothing
    assert not len(short.row) and not short.branch.any()


def test_a_question_that_was_recorded_twice_is_read_once() -> None:
    episode = three_turns()
    twice = collate([(episode.__class__(**{**vars(episode), "beliefs": episode.beliefs * 2}), "a")], {})
    assert twice.shape == (1, 13) and twice.position.tolist() == [9, 10, 12] * 2


# -- what a chat model reads -------------------------------------------------------------------------------------------
def test_a_conversation_without_a_trace_of_questions() -> None:
    """The stream holds the conversation alone: the rules as a system turn, a request to reply, and replies. Each
    question branches off from the conversation as it stood."""
    tokens = Tokens(hf_tokenizer(CHATML, single_digits=True))
    asked = Question("What is it worth?", NUMBERS, "3")
    views = []
    for questions in ((), (asked,)):
        tokens.beside = True
        view = StreamWriter(tokens)
        view.observe("Take turns.", questions, 0)
        view.cue()
        ids = tokens.encode("[message] Hi [END]")
        view.reply(ids, Kind.SPEECH)
        view.observe("Partner: No\n", questions, 1)
        view.cue()
        views.append(view)
    chat = [
        ("system", "Take turns."),
        ("user", YOUR_TURN),
        ("assistant", "[message] Hi [END]"),
        ("user", "Partner: No\n"),
    ]
    messages = [{"role": role, "content": text} for role, text in chat]

    def written(more: str = "", upto: int = 4) -> str:
        turns = messages[:upto] + ([{"role": "user", "content": more}] if more else [])
        return str(tokens.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    assert views[0].stream == views[1].stream and tokens.decode(views[0].stream.tokens) == written()
    listed = asked.text + "".join(f"\n{letter}) {n}" for letter, n in zip("ABCDEFGHIJK", NUMBERS, strict=True))
    first, second = views[1].asked
    for each, upto in ((first, 1), (second, 4)):  # the whole conversation as it stood, and the question
        ids = [*views[1].stream.tokens[: each.position + 1], *each.branch]
        assert tokens.decode(ids) == written(listed, upto)
        assert tokens.decode(each.candidate_ids) == "ABCDEFGHIJK"


LETTERED = Question("Points?", NUMBERS, "3", letters=True)


def written_beside(question: Question, chat_template: str | None) -> tuple[Tokens, StreamWriter, str]:
    """The tokenizer, a view that is asked twice (before a reply and after it), and the first branch in text."""
    tokens = Tokens(hf_tokenizer(chat_template, single_digits=True))
    tokens.beside = True
    view = StreamWriter(tokens)
    view.observe("A is 0.", (question,), 0)
    view.cue()
    view.reply(tokens.encode("Hi [END]"), Kind.SPEECH)
    view.observe("Partner: No\n", (question,), 1)
    return tokens, view, tokens.decode(view.asked[0].branch)


def test_a_chat_model_asks_itself_where_the_game_has_said_which_letters_answer() -> None:
    """Each branch is the cue of the model's own turn and the question, token by token. It has no listing and no user's
    turn."""
    tokens, view, text = written_beside(LETTERED, CHATML)
    opens = tokens.tokenizer.convert_tokens_to_ids("<|im_start|>")
    by_hand = (opens, *tokens.encode("assistant\n"), *tokens.encode("Points?"))
    first, second = view.asked
    assert first.branch == second.branch == by_hand and text == "<|im_start|>assistant\nPoints?"
    assert tokens.decode(first.candidate_ids) == "ABCDEFGHIJK" and len(set(first.candidate_ids)) == 11
    opening = tokens.decode(view.stream.tokens[: first.position + 1])
    assert opening == "<|im_start|>system\nA is 0.<|im_end|>\n" and first.position < second.position
    assert Kind.QUESTION not in view.stream.kinds


def test_in_the_stream_letters_are_asked_for_in_a_users_turn() -> None:
    tokens = Tokens(hf_tokenizer(CHATML, single_digits=True))
    view = StreamWriter(tokens)
    view.observe("A is 0.", (LETTERED,), 0)
    (asked,) = view.asked
    text = tokens.decode(view.stream.tokens[: asked.position + 1])
    assert text.endswith("<|im_start|>user\nPoints?<|im_end|>\n<|im_start|>assistant\n") and not asked.branch
    assert tokens.decode(asked.candidate_ids) == "ABCDEFGHIJK"


@pytest.mark.parametrize(
    ("question", "chat_template", "said"),
    [
        (LETTERED, UNCUED, "[INST] Points? [/INST]"),  # no cue begins the model's turn
        (LETTERED, None, "\nPoints?"),  # a model without turns
        (
            replace(LETTERED, letters=False), CHATML, "<|im_start|>user\nPoints?"
            + "".join(f"\n{letter}) {number}" for letter, number in zip("ABCDEFGHIJK", NUMBERS, strict=True))
            + "<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
    ids=["no cue", "no template", "no legend"],
)  # fmt: skip
def test_others_are_asked_as_in_the_stream(question: Question, chat_template: str | None, said: str) -> None:
    tokens, view, text = written_beside(question, chat_template)
    assert text == said
    aside = StreamWriter(tokens)
    aside.observe("A is 0.", (), 0)
    tokens.beside = False
    aside.observe("", (question,), 0)
    assert [*view.stream.tokens[: view.asked[0].position + 1], *view.asked[0].branch] == aside.stream.tokens[
        : aside.asked[0].position + 1
    ]


# -- states ------------------------------------------------------------------------------------------------------------
STREAM = [(7 * i + 3) % 300 + 5 for i in range(40)]
BRANCHES = ((9, [11, 12, 13]), (9, [14]), (33, [15, 16, 17, 18]), (40, [19, 20]), (1, [21]))


def fresh(policy: Policy, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return policy.hidden(torch.tensor([ids]))[0]


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Policy]:
    chat = {"chat_template": CHATML, "single_digits": True}
    names = (*ATTENTION, *FRESH)
    return {name: hf_policy(tmp_path_factory.mktemp(name), name, **chat) for name in names}  # type: ignore[arg-type]


def with_branches() -> tuple[Tensor, Tensor, Tensor]:
    """Two rows: the stream with its branches behind it, and another stream. Tokens, branches and positions, (2, 54)."""
    branch, place, row = [0] * 40, list(range(40)), [*STREAM]
    for number, (shared, ids) in enumerate(BRANCHES, start=1):
        row, branch = row + ids, branch + [number] * len(ids)
        place = place + list(range(shared, shared + len(ids)))
    tokens, numbers, places = (torch.tensor([[*each, 0, 0, 0], [*range(54)]]) for each in (row, branch, place))
    numbers[1] = 0
    return tokens, numbers, places


@pytest.mark.parametrize("name", [*ATTENTION, *FRESH])
def test_states_of_a_row_are_those_of_fresh_reads(name: str, policies: dict[str, Policy]) -> None:
    policy = policies[name]
    with torch.no_grad():
        found = policy.hidden(*with_branches())
    torch.testing.assert_close(found[0, :40], fresh(policy, STREAM), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1], fresh(policy, [*range(54)]), atol=1e-4, rtol=1e-4)
    at = 40
    for shared, ids in BRANCHES:
        torch.testing.assert_close(
            found[0, at : at + len(ids)], fresh(policy, [*STREAM[:shared], *ids])[shared:], atol=1e-4, rtol=1e-4
        )
        at += len(ids)


@pytest.mark.parametrize("name", ["llama", "rwkv", "falcon_h1", "gpt_neo"])
def test_gradients_of_branches_are_those_of_fresh_reads(name: str, policies: dict[str, Policy]) -> None:
    lm = policies[name].lm
    tokens, numbers, places = with_branches()
    weight = torch.randn(54, lm.config.hidden_size, generator=torch.Generator().manual_seed(0))

    def gradients(loss: Tensor) -> list[Tensor]:
        lm.zero_grad()
        loss.backward()
        return [p.grad.clone() for p in lm.parameters() if p.grad is not None]

    found = gradients((policies[name].hidden(tokens, numbers, places)[0, :51] * weight[:51]).sum())
    at, expected = 40, (policies[name].hidden(torch.tensor([STREAM]))[0] * weight[:40]).sum()
    for shared, ids in BRANCHES:
        own = policies[name].hidden(torch.tensor([[*STREAM[:shared], *ids]]))[0, shared:]
        expected = expected + (own * weight[at : at + len(ids)]).sum()
        at += len(ids)
    for ours, theirs in zip(found, gradients(expected), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.abs().max() + 1), rtol=1e-3)


@pytest.mark.parametrize("name", [*RECURRENT, "mpt"])
def test_the_engine_reads_branches_in_their_slots_and_puts_states_back(name: str, policies: dict[str, Policy]) -> None:
    policy = policies[name]
    engine = Engine(policy, 4, 64)
    slots = [engine.allocate() for _ in range(3)]
    engine.read([slots[2], slots[0]], [STREAM, STREAM[:20]])
    assert isinstance(engine.cache, SlotCache) and not engine.can_branch_back
    held = [states.clone() for layer in engine.cache.states for states in layer.stored()]
    asked = [[(40, [19, 20]), (40, [21])], [(20, [5, 6, 7])]]
    found = engine.read_beside([slots[2], slots[0]], asked)
    after = [states for layer in engine.cache.states for states in layer.stored()]
    assert all(torch.equal(a, b) for a, b in zip(after, held, strict=True))
    assert engine.lengths[[slots[2], slots[0]]].tolist() == [40, 20]
    atol = 1e-3 if name == "qwen3_5" else 1e-4  # pieces under the delta rule, which solves equations
    for state, (shared, ids) in zip(found, [branch for own in asked for branch in own], strict=True):
        torch.testing.assert_close(state, fresh(policy, [*STREAM[:shared], *ids])[-1], atol=atol, rtol=1e-4)
    with pytest.raises(AssertionError, match="there is no way back"):
        engine.read_beside([slots[2]], [[(39, [5])]])


@pytest.mark.parametrize("name", ATTENTION)
def test_the_engine_reads_branches_and_keeps_nothing_of_them(name: str, policies: dict[str, Policy]) -> None:
    policy = policies[name]
    engine = Engine(policy, 4, 64)
    slots = [engine.allocate() for _ in range(3)]
    engine.read([slots[2], slots[0]], [STREAM, STREAM[:20]])
    assert isinstance(engine.cache, SlotCache)
    held = [(layer.keys.clone(), layer.values.clone()) for layer in engine.cache.layers]  # type: ignore[union-attr]
    asked = [list(BRANCHES), [BRANCHES[0], (20, [5, 6])]]
    found = engine.read_beside([slots[2], slots[0]], asked)
    for layer, before in zip(engine.cache.layers, held, strict=True):
        assert torch.equal(layer.keys, before[0]) and torch.equal(layer.values, before[1])  # type: ignore[union-attr, arg-type]
    assert engine.lengths[[slots[2], slots[0]]].tolist() == [40, 20]
    for state, (shared, ids) in zip(found, [branch for own in asked for branch in own], strict=True):
        torch.testing.assert_close(state, fresh(policy, [*STREAM[:shared], *ids])[-1], atol=1e-4, rtol=1e-4)


def test_a_question_beyond_what_the_model_reads_is_refused() -> None:
    policy = tiny_policy(context=64)
    engine = Engine(policy, 1, 64)
    engine.read([engine.allocate()], [[5] * 60])
    with pytest.raises(UserError, match=r"a stream has 66 tokens.*Lower model.context by 2"):
        engine.read_beside([0], [[(60, [5] * 6)]])


# -- how they are read ------------------------------------------------------------------------------------------------
def test_recurrent_models_and_windows_of_their_own_make_take_no_masks() -> None:
    for name in FRESH:
        assert not takes_masks(random_lm(name, 300)), name
    for name in ATTENTION:
        assert takes_masks(random_lm(name, 300)), name


def test_branches_in_rows_of_their_own_count_as_read(policies: dict[str, Policy]) -> None:
    _, numbers, _ = with_branches()
    lengths = torch.tensor([54, 51])
    assert tokens_read(policies["llama"].lm, numbers, lengths).tolist() == [54, 51]
    assert tokens_read(policies["rwkv"].lm, numbers, lengths).tolist() == [54 * 6, 51]


def test_masks_are_probed_with_ordinary_tokens_as_bfloat16_needs() -> None:
    """The first tokens of a vocabulary are control tokens, whose states are noise in bfloat16."""
    lm, tried = random_lm("llama", 2000).to(torch.bfloat16), list[Tensor]()
    lm.get_input_embeddings().register_forward_pre_hook(lambda _, given: tried.append(given[0].flatten()))
    assert takes_masks(lm)
    ids = torch.cat(tried)
    assert int(ids.min()) >= 500 and int(ids.max()) >= 1500 and len(ids.unique()) > 10


@pytest.mark.parametrize("name", ["qwen3", "mamba", "rwkv"])
def test_where_questions_are_read(name: str, policies: dict[str, Policy]) -> None:
    """`auto`: beside the stream by chat models."""
    chat, tiny = policies[name], tiny_policy()
    for questions, expected in (("auto", True), ("beside", True), ("stream", False)):
        read_questions(chat.tokens, chat.lm, questions)
        assert chat.tokens.beside is expected
    for policy, questions, expected in ((tiny, "auto", False), (tiny, "beside", True)):
        read_questions(policy.tokens, policy.lm, questions)
        assert policy.tokens.beside is expected
    small_tokens().beside = False  # it is shared


def test_a_saved_policy_reads_as_it_did(tmp_path: Path, policies: dict[str, Policy]) -> None:
    policy = policies["llama"]
    for beside in (True, False):
        policy.tokens.beside = beside
        save_policy(tmp_path / str(beside), policy, {})
        assert load_policy(tmp_path / str(beside)).tokens.beside is beside
