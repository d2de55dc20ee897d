"""Human dialogues for a base: which are learned, under which names, and which tokens count more."""

import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM

from envs.dond.rules import Context, in_test
from marl.common.errors import UserError
from marl.learning.batch import collate
from marl.losses import Outputs
from marl.losses.claim import ClaimLoss
from marl.model.policy import Policy, dropout
from marl.model.tokens import PAD, Tokens, train_tokenizer
from marl.pretraining.config import BaseConfig
from marl.pretraining.corpus import Recorded, recorded, variants
from marl.pretraining.fit import held_out_figures
from tests.human_dialogues import CLASH, CLASH_AS_PARTNER, LOST, games_of, write
from tests.marl.models import COMPACT_TEXTS, hf_policy, small_tokens, tiny_policy

GAMES = variants({"game": "dond", "style": "compact", "objective": 0.0}, {})


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Two views of a deal and one of a failed deal to train on."""
    return str(write(tmp_path))


def openings(found: Recorded) -> list[str]:
    return [steps[0][1].split("\n")[0] for steps in found.steps]


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
    deals = recorded(folder, "train", GAMES, BaseConfig(deals_only=True))
    assert openings(deals) == [next(iter(known)), "books 1 4 hats 4 1 balls 1 2 objective 0"]
    assert (deals.left_out["no deal"], deals.left_out["test context"]) == (1, 1)
    kept = BaseConfig(hold_out=False)
    every = [recorded(folder, "train", GAMES, kept, np.random.default_rng(epoch)) for epoch in range(40)]
    assert len({openings(found)[0] for found in every}) == 6 and {len(found.steps) for found in every} == {4}
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


@pytest.mark.parametrize(("model", "name"), [("gpt2", "GPT2LMHeadModel"), ("qwen3_5", "Qwen3_5ForCausalLM")])
def test_dropout_of_a_model_whose_layers_have_other_names_is_refused(model: str, name: str, tmp_path: Path) -> None:
    """Models in which only some layers lack `o_proj`, such as those with linear attention, are refused too."""
    policy = hf_policy(tmp_path, model)
    error = rf"base\.dropout=0\.1: {name} has layers without o_proj, whose outputs it drops\. Set it to 0"
    with pytest.raises(UserError, match=error), dropout(policy, 0.1, torch.Generator()):
        pass
    with dropout(policy, 0.0, torch.Generator()):
        assert policy.hidden(torch.tensor([[1, 2]])).isfinite().all()


def test_dropout_acts_on_experts_who_answer_with_their_scores() -> None:
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
             "head_dim": 8, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}  # fmt: skip
    tokens = small_tokens()
    policy = Policy(GptOssForCausalLM(GptOssConfig(**shape, vocab_size=tokens.size)).eval(), tokens)
    ids = torch.tensor([[3, 4, 5]])
    plain = policy.hidden(ids)
    with dropout(policy, 0.5, torch.Generator().manual_seed(0)):
        assert not torch.allclose(policy.hidden(ids), plain)
    assert torch.equal(policy.hidden(ids), plain)


def test_the_claim_loss_reads_tags_ends_and_claims_but_no_words() -> None:
    tokens = Tokens(train_tokenizer(COMPACT_TEXTS, ("[message]", "[propose]", "[END]", "books", "hats", "balls"), 400))
    says, claims = "[message] i want 2 hats [END]", "[propose] (0 books, 2 hats, 0 balls) [END]"
    heard = ("observe", "them: ok\n", ())
    found = Recorded([[heard, ("reply", says), heard, ("reply", claims)]], Counter())
    batch = collate(found.rows(tokens), {})
    _, mask = ClaimLoss()(batch, Outputs.zeros(batch))
    read = tokens.decode(batch.tokens[0][mask[0]].tolist())
    assert read == f"[message] [END]{claims}"
    assert PAD not in read


def test_settings_of_human_data_make_no_other_scripted_base() -> None:
    scripted = BaseConfig(permute_items=True, deals_only=True, claim=1.0, hold_out=False).made_of()
    assert scripted == BaseConfig().made_of()
    assert "claim" not in scripted
    assert BaseConfig(data="human", claim=1.0).made_of() != BaseConfig(data="human").made_of()


def said_in(found: Recorded) -> list[int]:
    """Numbers of the dialogues that the views come from."""
    return [int(re.search(r"like 4 hats (\d+)", "".join(step[1] for step in steps))[1]) for steps in found.steps]


def test_so_many_dialogues_are_drawn_with_both_views_that_scored(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    many = str(write(tmp_path / "d", (*games_of(12), CLASH, CLASH_AS_PARTNER, LOST)))
    every = recorded(many, "train", GAMES, BaseConfig(hold_out=False, keep="nonzero"))
    assert Counter(said_in(every)) == {i: 1 if i % 4 == 0 else 2 for i in range(12)}  # no view that scored 0
    assert (len(set(every.dialogues)), every.left_out) == (12, {"scored 0": 4})  # one of them of the failed deal
    few = BaseConfig(hold_out=False, keep="nonzero", human_games=5)
    found = recorded(many, "train", GAMES, few)
    drawn = Counter(said_in(found))
    assert len(drawn) == len(set(found.dialogues)) == 5 and drawn.items() <= Counter(said_in(every)).items()
    assert found.left_out["not drawn"] == 21 - len(found.steps)
    assert said_in(recorded(many, "train", GAMES, few)) == said_in(found)  # the seed's own choice, in each pass
    others = [said_in(recorded(many, "train", GAMES, replace(few, seed=seed))) for seed in (1, 2)]
    assert len({tuple(own) for own in (said_in(found), *others)}) == 3
    assert len(set(recorded(many, "val", GAMES, few).dialogues)) == 1  # only what is learned from is drawn
    with pytest.raises(UserError, match=r"base.human_games=13: data.dond=.* has 12 dialogues to learn from"):
        recorded(many, "train", GAMES, replace(few, human_games=13))


def test_held_out_figures_are_of_the_first_dialogues_with_both_views(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    data = str(write(tmp_path / "d", (*games_of(5), CLASH, CLASH_AS_PARTNER, LOST)))
    every = recorded(data, "train", GAMES, BaseConfig(hold_out=False, deals_only=True))
    assert said_in(every) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    few = every.first(2)
    assert said_in(few) == [0, 0, 1, 1] and few.dialogues == every.dialogues[:4] and few.left_out == every.left_out
    assert few.steps == every.steps[:4] and every.first(9).steps == every.first(0).steps == every.steps
    shuffled = Recorded([every.steps[i] for i in (3, 0, 2, 1)], Counter(), [every.dialogues[i] for i in (3, 0, 2, 1)])
    assert said_in(shuffled.first(1)) == [1, 1]  # a dialogue's views need not stand side by side


def test_a_base_of_few_dialogues_is_another_one() -> None:
    human = BaseConfig(data="human")
    kept = {"keep", "human_games", "held_out_games"} & human.made_of().keys()
    assert not kept  # bases of all dialogues keep their names
    assert replace(human, held_out_games=50).made_of()["held_out_games"] == 50  # its figures are others
    assert "held_out_games" not in BaseConfig(held_out_games=50).made_of()
    assert replace(human, human_games=300).made_of()["human_games"] == 300
    assert replace(human, keep="nonzero").made_of()["keep"] == "nonzero"
    for settings, said in (
        ({"keep": "some"}, "base.keep=some: must be one of all, nonzero"),
        ({"human_games": -1}, "base.human_games=-1: must be at least 0; 0 for all"),
        ({"held_out_games": -2}, "base.held_out_games=-2: must be at least 0; 0 for all"),
    ):
        with pytest.raises(UserError, match=said):
            BaseConfig(**settings)


def test_figures_of_a_model_that_knows_nothing(tmp_path: Path) -> None:
    """Tokens that may be said are all equally likely, and so are the answers."""
    blank = tiny_policy()
    with torch.no_grad():
        for parameter in blank.lm.parameters():
            parameter.zero_()
    found = recorded(str(write(tmp_path)), "train", GAMES)
    replies = [step[1] for steps in found.steps for step in steps if step[0] == "reply"]
    figures = held_out_figures(blank, found.rows(blank.tokens))
    may_be_said = blank.tokens.size - len(blank.tokens.unspeakable)
    tokens = sum(len(blank.tokens.encode(reply)) for reply in replies)
    words = sum(len(reply.split()) for reply in replies)
    assert words < tokens
    assert figures["perplexity_per_token"] == pytest.approx(may_be_said, rel=1e-4)
    assert figures["perplexity_per_word"] == pytest.approx(may_be_said ** (tokens / words), rel=1e-3)
    assert figures["belief_log_loss_first"] == figures["belief_log_loss_last"] == pytest.approx(math.log(11))
