"""Trading names: the same game in other words, and a listening loss that reads it."""

import copy
import re

import pytest
import torch

from envs.among_us.texts import COMPACT_TOKENS, EXCHANGEABLE
from envs.core import Style
from marl.learning.batch import collate, rows_of
from marl.learning.config import UpdateConfig
from marl.learning.renaming import Renaming, renaming
from marl.learning.update import update
from marl.losses.entropy import EntropyLoss
from marl.losses.listening import ListeningLoss
from marl.model.policy import Policy, tiny_lm
from marl.model.tokens import Tokens, train_tokenizer
from marl.pretraining.corpus import scripted_texts
from marl.rollout.games import env_maker, exchangeable, scripted
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from marl.types import TokenBatch

WORDS = EXCHANGEABLE[Style.COMPACT]
COMPACT = env_maker({"game": "among_us", "style": "compact", "players": 5, "max_steps": 80})


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    return Tokens(train_tokenizer(scripted_texts("among_us", [COMPACT], 0, games=8), COMPACT_TOKENS, 1024))


@pytest.fixture(scope="module")
def batch(tokens: Tokens) -> TokenBatch:
    episodes = rollout(draw_games(0, 1, count=6), everyone(scripted("among_us", "informed", tokens)), COMPACT, 6)
    return collate(rows_of(episodes, {"informed"}), {}, silent_roles=("imposter",))


def words(tokens: Tokens, row: torch.Tensor) -> list[str]:
    return re.findall(r"[a-z]+|[^a-z]+", tokens.decode(row.tolist()))


def seeded(tokens: Tokens, seed: int = 0) -> Renaming:
    rename = renaming(tokens, WORDS)
    assert rename is not None
    rename.generator.manual_seed(seed)
    return rename


def test_each_row_is_the_same_game_in_other_names(tokens: Tokens, batch: TokenBatch) -> None:
    other = seeded(tokens)(batch)
    orders = set()
    for b in range(batch.shape[0]):
        before, after = words(tokens, batch.tokens[b]), words(tokens, other.tokens[b])
        assert len(before) == len(after)
        became = {old: new for old, new in zip(before, after, strict=True) if old in WORDS}
        assert len(became) == 5  # everybody is named in the first observation
        old = sorted(became, key=WORDS.index)
        assert [became[word] for word in old] == sorted(set(became.values()), key=WORDS.index)  # in the same order
        assert after == [became.get(word, word) for word in before]
        orders.add(tuple(sorted(became.items())))
        for n in (batch.row == b).nonzero()[:, 0].tolist():
            asked = [tokens.decode([i]).strip() for i in batch.candidates[n].tolist() if i >= 0]
            answers = [tokens.decode([i]).strip() for i in other.candidates[n].tolist() if i >= 0]
            assert answers == [became[name] for name in asked]
    assert len(orders) > batch.shape[0] / 3  # each row has its own
    for name in ("kind", "row", "position", "answer", "legal", "logprobs"):
        assert torch.equal(getattr(other, name), getattr(batch, name))
    assert torch.equal(seeded(tokens)(batch).tokens, other.tokens)  # a function of the generator


def test_all_names_stay_candidates_once_each(tokens: Tokens) -> None:
    """Questions may also ask for names that nobody in the game has."""
    env = env_maker({"game": "among_us", "style": "compact", "candidates": "all_names", "max_steps": 80})
    episodes = rollout(draw_games(0, 1, count=3), everyone(scripted("among_us", "informed", tokens)), env, 3)
    batch = collate(rows_of(episodes, {"informed"}), {}, silent_roles=("imposter",))
    other = seeded(tokens)(batch).candidates
    assert len(other) and not torch.equal(other, batch.candidates)
    assert all(len(set(row)) == 7 for row in other.tolist())
    assert torch.equal(other.sort().values, batch.candidates.sort().values)


def test_the_listening_loss_learns_from_the_renamed_row(tokens: Tokens, batch: TokenBatch) -> None:
    """A step on a row with `renamed` is a plain step on the row that was renamed by hand, up to rounding: what comes
    behind its last question is not read."""
    row = batch.select(batch.row[:1])
    lm = tiny_lm(tokens.size, hidden_size=16, layers=1, heads=2, intermediate_size=32, context=512)
    start = Policy(lm, tokens)

    def step(row: TokenBatch, loss: ListeningLoss) -> tuple[float, torch.Tensor]:
        policy = copy.deepcopy(start)
        found = update(
            policy, None, row, {"listening": loss}, torch.optim.SGD(policy.parameters(), lr=1.0),
            UpdateConfig(minibatches=1), torch.Generator(), rename=seeded(tokens),
        )  # fmt: skip
        return found["loss/listening"], policy.lm.get_input_embeddings().weight.detach()

    renamed = step(row, ListeningLoss(renamed=True))
    by_hand = step(seeded(tokens)(row), ListeningLoss())
    as_it_is = step(row, ListeningLoss())
    assert renamed[0] == pytest.approx(by_hand[0], abs=1e-6) and abs(renamed[0] - as_it_is[0]) > 1e-4
    torch.testing.assert_close(renamed[1], by_hand[1], atol=1e-6, rtol=1e-5)
    assert not torch.allclose(renamed[1], as_it_is[1], atol=1e-4)
    assert ListeningLoss(0.0, renamed=True).reads == "beliefs"


def test_rows_that_are_not_renamed_are_read_once(
    tokens: Tokens, batch: TokenBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where names cannot be swapped, listening shares the pass of the other losses, and learns the same."""
    start = Policy(tiny_lm(tokens.size, hidden_size=16, layers=1, heads=2, intermediate_size=32, context=512), tokens)
    row, whole, read = batch.select(batch.row[:1]), Policy.hidden, []

    def hidden(self: Policy, *args: torch.Tensor) -> torch.Tensor:
        read.append(args[0].shape)
        return whole(self, *args)

    monkeypatch.setattr(Policy, "hidden", hidden)

    def step(renamed: bool) -> tuple[dict[str, float], torch.Tensor]:
        losses = {"entropy": EntropyLoss(0.1), "listening": ListeningLoss(renamed=renamed)}
        policy = copy.deepcopy(start)
        sgd = torch.optim.SGD(policy.parameters(), lr=1.0)
        found = update(policy, None, row, losses, sgd, UpdateConfig(minibatches=1), torch.Generator())
        return found, policy.lm.get_input_embeddings().weight.detach()

    (found, weights), (same, as_plain) = step(True), step(False)
    assert found == same and found["loss/listening"] > 0 and torch.equal(weights, as_plain)
    assert not torch.equal(weights, start.lm.get_input_embeddings().weight) and len(read) == 2


def test_words_must_be_single_tokens(tokens: Tokens) -> None:
    assert renaming(tokens, EXCHANGEABLE[Style.NATURAL]) is None
    assert renaming(tokens, ("red", "zzz")) is None and renaming(tokens, ()) is None
    assert exchangeable({"game": "among_us", "style": "compact"}) == WORDS
    assert exchangeable({"game": "dond", "style": "compact"}) == ()


def test_names_in_small_and_capital_letters_are_the_same_names() -> None:
    said = "Red says: it is blue! BLUE, I saw blue and not Red. "
    forms = [[w, w.lower(), w.upper()] for w in EXCHANGEABLE[Style.NATURAL]]
    text = [said, " ".join(form for case in forms for form in case)] * 20
    other = Tokens(train_tokenizer(text, [p + form for case in forms for form in case for p in ("", " ")], 1024))
    rename = renaming(other, EXCHANGEABLE[Style.NATURAL])
    assert rename is not None
    ids = other.encode(said)
    order = list(range(7))
    table = torch.arange(other.size)
    table[rename.families[:, order]] = rename.families[:, [order[(i + 1) % 7] for i in order]]  # each the next one
    names = EXCHANGEABLE[Style.NATURAL]
    red, blue = (names[(names.index(w) + 1) % 7] for w in ("Red", "Blue"))
    assert other.decode(table[torch.tensor(ids)].tolist()) == (
        said.replace("Red", red).replace("blue", blue.lower()).replace("BLUE", blue.upper())
    )
    plain = Tokens(train_tokenizer([said] * 20, [p + w for w in names for p in ("", " ")], 512))
    assert len(plain.encode(" pink")) > 1  # so that who is accused in small letters would keep the old name
    assert renaming(plain, names) is None
