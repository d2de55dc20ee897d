"""The vote as a belief question: from the game's infos to the gradient, and nothing of it where it is off."""

import math
from dataclasses import replace

import pytest
import torch

from envs.among_us.texts import COMPACT_TOKENS
from marl.agents.model import ModelAgent
from marl.learning.batch import collate, rows_of
from marl.learning.config import UpdateConfig
from marl.learning.forward import forward
from marl.learning.renaming import renaming
from marl.learning.update import update
from marl.losses import Outputs, with_parts
from marl.losses.listening import ListeningLoss, VoteLoss
from marl.model.policy import Policy, tiny_lm
from marl.model.tokens import Tokens, train_tokenizer
from marl.pretraining.corpus import scripted_texts
from marl.rollout.games import env_maker, exchangeable
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from marl.types import Episode, Kind, TokenBatch
from tests.marl.batches import three_turns
from tests.marl.updates import identical

GAME = {"game": "among_us", "style": "compact", "players": 5, "max_steps": 120, "messages_each": 1, "cooldown": 1}


def voted(truths: tuple[int, ...]) -> Episode:
    """The three-turn game, in which `b`'s choice says what it believes."""
    episode = three_turns()
    turns = tuple(replace(t, truths=truths) if t.legal else t for t in episode.turns)
    return replace(episode, turns=turns)


def test_a_vote_is_asked_where_it_is_sampled_among_what_is_legal() -> None:
    episode = voted((2, 0))
    batch = collate([(episode, "a"), (episode, "b")], {}, votes=True)
    assert batch.vote.tolist() == [False] * 4 + [True]
    assert (int(batch.row[4]), int(batch.position[4])) == (1, 10)  # its token is the row's twelfth
    assert batch.candidates[4].tolist() == [50, 51, 52]
    assert int(batch.answer[4]) == 2 and batch.also[4].tolist() == [0]
    off = collate([(episode, "a"), (episode, "b")], {})
    today = collate([(three_turns(), "a"), (three_turns(), "b")], {})
    for name, value in vars(today).items():
        assert getattr(off, name).equal(value), name
    insiders = collate([(episode, "a"), (episode, "b")], {}, votes=True, silent_roles=("listener",))
    assert not insiders.vote.any()
    assert batch.select(torch.tensor([1])).vote.tolist() == [False] * 3 + [True]


def test_the_loss_is_the_cross_entropy_of_the_truth_over_all_votes() -> None:
    """Values are worked out by hand. Questions and votes have means of their own, and a vote for either imposter is
    right."""
    episode = voted((2, 0))
    batch = collate([(episode, "b")], {}, votes=True)
    probs = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5], [0.25, 0.75, 0.0], [0.1, 0.6, 0.3]])
    outputs = replace(Outputs.zeros(batch), beliefs=probs.log())
    losses = with_parts({"listening": ListeningLoss(weight=0.5, votes=3.0)})
    assert losses.keys() == {"listening", "listening_votes"} and losses["listening_votes"].weight == 1.5
    values, mask = losses["listening"](batch, outputs)
    asked = [0.5, 0.2, 0.75]  # the truths are blue, one, blue
    assert values[mask].tolist() == pytest.approx([-math.log(p) for p in asked])
    values, mask = losses["listening_votes"](batch, outputs)
    assert values[mask].tolist() == pytest.approx([-math.log(0.4)])


def test_votes_are_read_as_the_listening_loss_reads() -> None:
    assert with_parts({"l": ListeningLoss(votes=0.0)}).keys() == {"l"}
    assert with_parts({"l": ListeningLoss(0.5, renamed=True, votes=2.0)})["l_votes"] == VoteLoss(1.0, "renamed")
    assert with_parts({"l": ListeningLoss(0.0, renamed=True, votes=2.0)})["l_votes"] == VoteLoss(0.0, "beliefs")


# -- whole games -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tokens() -> Tokens:
    return Tokens(train_tokenizer(scripted_texts("among_us", [env_maker(GAME)], 0, games=20), COMPACT_TOKENS, 1024))


def policy_of(tokens: Tokens) -> Policy:
    lm = tiny_lm(tokens.size, hidden_size=16, layers=1, heads=2, intermediate_size=32, context=1024)
    with torch.random.fork_rng(devices=[]):  # for the value head, which draws from the global generator
        torch.manual_seed(0)
        return Policy(lm, tokens).eval()


@pytest.fixture(scope="module")
def episodes(tokens: Tokens) -> list[Episode]:
    agent = ModelAgent("learner", policy_of(tokens), slots=60, context=1024, max_new_tokens=8, temperature=0.5)
    return rollout(draw_games(0, 1, count=12), everyone(agent), env_maker(GAME), 12)


def batch_of(episodes: list[Episode]) -> TokenBatch:
    return collate(rows_of(episodes, {"learner"}), {}, votes=True)


def test_every_vote_of_a_living_crewmate_counts_and_is_read_as_it_was_sampled(
    tokens: Tokens, episodes: list[Episode]
) -> None:
    """Votes are sampled and read at temperature 0.5, with the voter itself and `skip` among the options."""
    batch, skip = batch_of(episodes), tokens.label(("skip", "red"))[0][0]
    votes = [t for e in episodes for t in e.turns if t.truths]
    crew = [t for e in episodes for t in e.turns if skip in t.legal and t.role == "crewmate"]
    assert len(votes) == len(crew) == int(batch.vote.sum()) > 5
    for e in episodes:
        names = {agent: name.lower() for agent, name in e.facts["names"].items()}
        for t in e.turns:
            if t.truths:
                options = [tokens.decode([i]).strip() for i in t.legal]
                assert [options[i] for i in t.truths] == [names[a] for a in e.facts["imposters"]]
                assert {"skip", names[t.agent]} <= set(options)
    with torch.no_grad():
        found = forward(policy_of(tokens), batch, 0.5, {"beliefs": False}).beliefs
    for n in batch.vote.nonzero()[:, 0].tolist():
        at = (int(batch.row[n]), int(batch.position[n]) + 1)
        assert batch.kind[at] == Kind.CHOICE
        place = batch.candidates[n].tolist().index(int(batch.tokens[at]))
        assert float(found[n, place]) == pytest.approx(float(batch.logprobs[at]), abs=1e-4)


def learned(tokens: Tokens, batch: TokenBatch, loss: ListeningLoss) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    policy, rename = policy_of(tokens), renaming(tokens, exchangeable(GAME))
    assert rename is not None
    rename.generator.manual_seed(0)
    found = update(
        policy, None, batch, with_parts({"listening": loss}), torch.optim.SGD(policy.parameters(), lr=1.0),
        UpdateConfig(minibatches=2, temperature=0.5), torch.Generator().manual_seed(0), rename=rename,
    )  # fmt: skip
    return found, {name: p.detach() for name, p in policy.named_parameters()}


@pytest.mark.parametrize("renamed", [False, True])
def test_votes_train_what_is_voted(tokens: Tokens, episodes: list[Episode], renamed: bool) -> None:
    batch = batch_of(episodes)
    with_votes, weights = learned(tokens, batch, ListeningLoss(0.5, renamed, votes=2.0))
    without, plain = learned(tokens, collate(rows_of(episodes, {"learner"}), {}), ListeningLoss(0.5, renamed))
    assert with_votes["loss/listening_votes"] > 0 and "loss/listening_votes" not in without
    assert not identical(weights, plain)
    measured, start = learned(tokens, batch, ListeningLoss(0.0, renamed, votes=2.0))
    assert measured["loss/listening_votes"] > 0
    assert identical(start, dict(policy_of(tokens).named_parameters()))
