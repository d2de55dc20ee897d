"""What a base learns from the human dialogues: which of them, under which names, and which tokens count more."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from envs.dond_v0 import Context, in_test
from marl.batch import collate
from marl.losses import Outputs
from marl.losses.claim import ClaimLoss
from marl.pretrain import BaseConfig, Recorded, dropout, recorded, variants
from marl.tokens import PAD, Tokens, train_tokenizer
from tests.marl.models import COMPACT_TEXTS, tiny_policy
from tests.marl.test_human_dond import write

GAMES = variants({"game": "dond", "style": "compact", "objective": 0.0}, {})


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Two views of a deal and one of a failed deal to train on."""
    return str(write(tmp_path))


def openings(found: Recorded) -> list[str]:
    return [steps[0][1].split("\n")[0] for steps in found.steps]


def test_only_deals_are_left_where_so_set(folder: str) -> None:
    deal, partner = "books 1 0 hats 4 2 balls 1 2 objective 0", "books 1 4 hats 4 1 balls 1 2 objective 0"
    found = recorded(folder, "train", GAMES, deals_only=True)
    assert openings(found) == [deal, partner]
    assert (found.left_out["no deal"], found.left_out["test context"]) == (1, 1)
    assert openings(recorded(folder, "train", GAMES))[:2] == [deal, partner]


def test_items_swap_names_together_and_never_into_a_test_context(folder: str) -> None:
    """A view is one of its renamings in each pass: prompt, talk and claim move together."""
    known = {
        "books 1 0 hats 4 2 balls 1 2 objective 0": ("4 hats", "(0 books, 4 hats, 0 balls)"),
        "books 1 0 hats 1 2 balls 4 2 objective 0": ("4 balls", "(0 books, 0 hats, 4 balls)"),
        "books 4 2 hats 1 2 balls 1 0 objective 0": ("4 books", "(4 books, 0 hats, 0 balls)"),
        "books 1 2 hats 1 0 balls 4 2 objective 0": ("4 balls", "(0 books, 0 hats, 4 balls)"),
    }
    left = ((4, 1, 1), (2, 0, 2), (1, 4, 2)), ((1, 4, 1), (2, 2, 0), (2, 1, 4))  # the other two are test contexts
    assert all(in_test(Context(counts, (own, other))) for counts, own, other in left)
    seen = set()
    for epoch in range(40):
        found = recorded(folder, "train", GAMES, permute=np.random.default_rng(epoch))
        steps = found.steps[0]
        opening = openings(found)[0]
        wanted, claim = known[opening]
        replies = [step[1] for step in steps if step[0] == "reply"]
        assert replies == [f"[message] i would like {wanted} [END]", f"[propose] {claim} [END]"]
        seen.add(opening)
    assert seen == set(known)


def test_without_holding_out_every_context_and_renaming_is_learned_from(folder: str) -> None:
    seen = set()
    for epoch in range(40):
        found = recorded(folder, "train", GAMES, hold_out=False, permute=np.random.default_rng(epoch))
        assert found.left_out["test context"] == 0 and len(found.steps) == 4
        seen.add(openings(found)[0])
    assert len(seen) == 6


def test_dropout_acts_while_a_base_learns_and_not_after() -> None:
    policy = tiny_policy()
    tokens = torch.arange(1, 9)[None]
    plain = policy.hidden(tokens)
    with dropout(policy, 0.5, torch.Generator().manual_seed(0)):
        first, second = policy.hidden(tokens), policy.hidden(tokens)
    with dropout(policy, 0.5, torch.Generator().manual_seed(0)):
        again = policy.hidden(tokens)
    with dropout(policy, 0.0, torch.Generator()):
        assert torch.equal(policy.hidden(tokens), plain)
    assert torch.equal(again, first)
    assert not torch.allclose(first, plain) and not torch.allclose(first, second)
    assert torch.equal(policy.hidden(tokens), plain)


def test_the_claim_loss_reads_tags_ends_and_claims_but_no_words() -> None:
    tokens = Tokens(train_tokenizer(COMPACT_TEXTS, ("[message]", "[propose]", "[END]", "books", "hats", "balls"), 400))
    says, claims = "[message] i want 2 hats [END]", "[propose] (0 books, 2 hats, 0 balls) [END]"
    heard = ("observe", "them: ok\n", ())
    found = Recorded([[heard, ("reply", says), heard, ("reply", claims)]], Counter())
    batch = collate(found.seats(tokens), {})
    zeros = torch.zeros(batch.shape)
    _, mask = ClaimLoss()(batch, Outputs(zeros, zeros, zeros, torch.zeros(0, 1), zeros))
    read = tokens.decode(batch.tokens[0][mask[0]].tolist())
    assert read == f"[message] [END]{claims}"
    assert PAD not in read


def test_settings_of_human_data_make_no_other_scripted_base() -> None:
    scripted = BaseConfig(permute_items=True, deals_only=True, claim=1.0, hold_out=False).made_of()
    assert scripted == BaseConfig().made_of()
    assert "claim" not in scripted
    assert BaseConfig(data="human", claim=1.0).made_of() != BaseConfig(data="human").made_of()
