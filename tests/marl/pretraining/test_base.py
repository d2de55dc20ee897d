"""The base of scripted games: what it is cached by, its lessons, and the pace of its learning."""

import multiprocessing
import shutil
import threading
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from envs.among_us.texts import COMPACT_TOKENS
from envs.core import TurnKind
from marl.common.errors import UserError
from marl.learning.batch import Row, collate, rows_of
from marl.model.policy import Policy, tiny_lm
from marl.model.tokens import Tokens, train_tokenizer
from marl.pretraining import base as pretrain
from marl.pretraining import corpus
from marl.pretraining import fit as fitting
from marl.pretraining.base import base_policy
from marl.pretraining.config import BaseConfig, Lesson, ModelConfig
from marl.pretraining.corpus import scripted_texts
from marl.pretraining.fit import fit, held_out_figures
from marl.rollout.games import env_maker, scripted
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import Game, draw_games
from marl.storage.checkpoint import make_once, verify_folder
from marl.types import TokenBatch
from tests.human_dialogues import CLASH, CLASH_AS_PARTNER, LOST, games_of, write

ENV = {"game": "among_us", "style": "compact", "tasks": 6, "task_steps": 3, "max_steps": 60}
MODEL = ModelConfig(vocab_size=700, hidden_size=16, layers=1, heads=2, intermediate_size=16, context=1024)
CROWD = {"players": 7, "width": 2, "height": 1, "cooldown": 1}
VARY = {"players": [4, 5]}  # in turn: a chunk of games with four, a chunk with five
LESSONS = (
    Lesson("gullible", 1, CROWD, optimizer="muon", learning_rate=1e-3, anchor=0.0),
    Lesson("informed", 1, anchor=0.1, until=1e-3),
    Lesson("random", 2, anchor=0.2),
)


def small(**changes: Any) -> BaseConfig:
    return BaseConfig(**{"games": 4, "rows": 4, "world_model": 1.0, "listening": 2.0, **changes})


@cache
def tokenizer_of(texts: tuple[str, ...], keep: tuple[str, ...], size: int) -> PreTrainedTokenizerFast:
    return train_tokenizer(texts, keep, size)


@pytest.fixture(autouse=True)
def tokenizers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most bases of these tests have one tokenizer, whose training takes longer than theirs."""
    monkeypatch.setattr(pretrain, "train_tokenizer", lambda texts, *how: deepcopy(tokenizer_of(tuple(texts), *how)))


def few_games(monkeypatch: pytest.MonkeyPatch, most: int = 12) -> None:
    """Limits chunks to this many games."""
    monkeypatch.setattr(corpus, "CHUNK", most)
    monkeypatch.setattr(corpus, "draw_games", lambda *path, count: draw_games(*path, count=min(count, most)))


def test_lessons_train_listening_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lessons use games in which somebody was asked, teach no reply, and a KL term holds them to the model before
    them."""
    steps: list[tuple[dict[str, float], list[Row]]] = []
    real = fitting.update

    def spy(policy: Any, reference: Any, batch: TokenBatch, losses: Any, *rest: Any) -> dict[str, float]:
        steps.append(({name: loss.weight for name, loss in losses.items()}, seats[-1]))
        return real(policy, reference, batch, losses, *rest)

    seats: list[list[Row]] = []

    def note(batch: list[Row], rewards: dict[str, float], silent_roles: tuple[str, ...]) -> TokenBatch:
        assert silent_roles == ("imposter",)  # they know the answer
        seats.append(batch)
        return collate(batch, rewards, silent_roles=silent_roles)

    monkeypatch.setattr(fitting, "collate", note)
    monkeypatch.setattr(fitting, "update", spy)
    few_games(monkeypatch)
    said: list[str] = []
    plain, first = base_policy(MODEL, small(vary=VARY), ENV, cache=tmp_path, report=said.append)
    count = len(steps)
    both, second = base_policy(MODEL, small(lessons=LESSONS, vary=VARY), ENV, cache=tmp_path, report=said.append)
    assert count == 4 and first != second
    assert [text.split(" (once")[0] for text in said if "(once" in text] == [
        "training the base model on scripted games",
        "teaching the base model to listen",  # the first stage came from the cache
    ]
    stage, lessons = steps[:count], steps[count:]
    assert [weights for weights, _ in stage] == [{"imitation": 1.0, "world_model": 1.0, "listening": 2.0}] * count
    assert [weights for weights, _ in lessons] == [
        {"listening": 1.0},
        {"listening": 1.0, "kl": 0.1},
        *[{"listening": 1.0, "kl": 0.2}] * 2,
    ]
    assert all(episode.beliefs for _, batch in lessons for episode, _ in batch), "without a question"
    assert not all(episode.beliefs for _, batch in stage for episode, _ in batch)
    roles = {episode.roles[agent] for _, batch in lessons for episode, agent in batch}
    assert [len(batch[0][0].roles) for _, batch in lessons] == [7, 4, 4, 5], (
        "the first lesson's own game, then the varied ones"
    )
    true = [
        all(
            b.question.answer in {e.facts["names"][a].lower() for a in e.facts["imposters"]}
            for e, _ in batch
            for b in e.beliefs
            if b.role == "crewmate"
        )
        for _, batch in lessons
    ]
    assert true == [False, True, False, False]
    assert roles == {"crewmate", "imposter"}, "what imposters do would drift"
    assert any(not torch.equal(a, b) for a, b in zip(plain.parameters(), both.parameters(), strict=True))
    lesson_lines = [line for line in said if line.startswith("lesson")]
    missed = [
        line for line in lesson_lines if "1 steps, not below until=0.001: it listens less well than intended" in line
    ]
    assert len(missed) == 1 and all(line.endswith(" steps") for line in lesson_lines if line not in missed)
    count = len(steps)
    paid = {**ENV, "shaping": 0.2, "loser_reward": -1.0}  # nobody reads of it
    again, folder = base_policy(MODEL, small(lessons=LESSONS, vary=VARY), paid, cache=tmp_path, report=said.append)
    assert len(steps) == count and folder == second
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), both.parameters(), strict=True))
    assert first is not None and second is not None
    shutil.rmtree(second)
    shutil.copytree(first, second)
    with pytest.raises(UserError, match=f"{second.name} holds a base made of other settings"):
        base_policy(MODEL, small(lessons=LESSONS, vary=VARY), ENV, cache=tmp_path, report=said.append)


def test_the_pace_warms_up_and_falls_to_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[tuple[float, ...]] = []

    def note(policy: Any, reference: Any, batch: Any, losses: Any, optimizer: Any, *rest: Any) -> dict[str, float]:
        rates.append(tuple(group["lr"] for group in optimizer.param_groups))
        return {}

    monkeypatch.setattr(fitting, "update", note)
    monkeypatch.setattr(fitting, "collate", lambda seats, weights, **_: None)

    def nothing() -> Iterator[list[Row]]:
        while True:
            yield []

    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": weights[:1], "lr": 1.0}, {"params": weights[1:], "lr": 0.5}])
    done: list[int] = []
    fit(None, nothing(), 100, BaseConfig(warmup=0.1), {}, optimizer, done.append)  # type: ignore[arg-type]
    first, second = ([pair[i] for pair in rates] for i in (0, 1))
    assert first[0] == pytest.approx(0.1) and max(first) == max(first[9:12]) and done == [*range(1, 101)]
    assert all(a > b for a, b in pairwise(first[10:])) and first[-1] == pytest.approx(0.1, abs=1e-3)
    assert second == pytest.approx([rate / 2 for rate in first])


def test_a_lesson_ends_once_it_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean loss of the last ten steps is 1.5 - 0.1 (n - 5.5) after n steps: below 0.95 from n = 12."""
    rates: list[float] = []

    def note(policy: Any, reference: Any, batch: Any, losses: Any, optimizer: Any, *rest: Any) -> dict[str, float]:
        rates.append(optimizer.param_groups[0]["lr"])
        return {"loss/listening": 1.5 - 0.1 * (len(rates) - 1)}

    monkeypatch.setattr(fitting, "update", note)
    monkeypatch.setattr(fitting, "collate", lambda seats, weights, **_: None)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    fitted = fit(None, iter([[]] * 50), 40, BaseConfig(warmup=0.1), {}, optimizer, lambda done: None, until=0.95)  # type: ignore[arg-type]
    assert fitted == (12, pytest.approx(0.85))
    assert rates == [0.25, 0.5, 0.75] + [1.0] * (len(rates) - 3) and len(rates) == 12


def test_how_many_games_a_tokenizer_is_made_of() -> None:
    games = [BaseConfig(games=games).games_of_tokenizer for games in (5, 300, 10_000)]
    assert games == [20, 300, 800] and BaseConfig(tokenizer_games=200).games_of_tokenizer == 200
    assert "tokenizer_games" not in BaseConfig().made_of()  # bases made before there was the setting are found
    assert BaseConfig(tokenizer_games=200).made_of()["tokenizer_games"] == 200
    assert "tokenizer_games" not in BaseConfig(data="human", tokenizer_games=200).made_of()
    with pytest.raises(UserError, match=r"base\.tokenizer_games=0: must be at least 1"):
        BaseConfig(tokenizer_games=0)


def test_a_context_that_holds_no_scripted_game_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_games(monkeypatch)
    monkeypatch.setattr(pretrain, "fit", lambda *_: pytest.fail("it began to train"))
    short = replace(MODEL, context=64)
    with pytest.raises(UserError, match=r"^model.context=64 is too short: .* median of \d{3,} tokens, up to \d{3,}\."):
        base_policy(short, small(), ENV, cache=tmp_path, report=lambda _: None)
    assert not list(tmp_path.glob("*/policy.json"))


def test_a_context_that_some_views_outgrow_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_games(monkeypatch)
    views, lengths, said = corpus.held_out_rows, [], []

    def noted(*given: Any) -> list[Row]:
        seats = views(*given)
        lengths.extend(len(episode.streams[agent]) for episode, agent in seats)
        return seats

    monkeypatch.setattr(pretrain, "fit", lambda *_: None)
    monkeypatch.setattr(corpus, "held_out_rows", noted)
    base_policy(replace(MODEL, context=260), small(), ENV, cache=tmp_path, report=said.append)
    share = sum(length > 260 for length in lengths) / len(lengths)
    assert 0 < share <= 0.5
    warnings = [line for line in said if "is shorter than" in line]
    expected = (
        f"model.context=260 is shorter than {share:.1%} of the views of scripted games (up to {max(lengths)} tokens)"
    )
    assert [line.partition(":")[0] for line in warnings] == [expected]


def test_a_human_base_is_measured_on_so_many_held_out_dialogues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, said, measured = tmp_path / "data", list[str](), list[int]()
    data.mkdir()
    write(data, (*games_of(3), CLASH, CLASH_AS_PARTNER, LOST))
    read = pretrain.recorded
    monkeypatch.setattr(pretrain, "recorded", lambda folder, split, *rest: read(folder, "train", *rest))
    monkeypatch.setattr(pretrain, "fit", lambda *_: None)
    monkeypatch.setattr(pretrain, "held_out_figures", lambda policy, rows, *_: measured.append(len(rows)) or {})
    env, human = {"game": "dond", "style": "compact"}, BaseConfig(data="human", hold_out=False, rows=4)
    folders = set()
    for games in (0, 1, 2):
        base = replace(human, held_out_games=games)
        _, folder = base_policy(MODEL, base, env, cache=tmp_path, human_data=str(data), report=said.append)
        folders.add(folder)
    assert measured == [7, 7, 2, 2, 4, 4] and len(folders) == 3  # val and test; both views of each
    assert any("7 views of 4 dialogues" in line for line in said)  # what there is


def test_an_edited_file_of_contexts_makes_another_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base is named after texts of a few games, here of none; an edit counts even if it changes none of these."""
    file, named = tmp_path / "contexts.txt", []

    def stop(folder: Path, *_: Any) -> None:
        named.append(folder.name)
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrain, "make_once", stop)
    monkeypatch.setattr(corpus, "scripted_texts", lambda *_: [])
    for text in ("1 4 4 1 1 2\n1 0 4 2 1 2\n", "3 1 1 5 2 1\n3 2 1 2 2 1\n") * 2:
        file.write_text(text)
        with pytest.raises(KeyboardInterrupt):
            base_policy(MODEL, small(), {"game": "dond", "contexts": str(file)}, cache=tmp_path)
    first, second, *again = named
    assert first != second and [first, second] == again


def test_words_are_of_speech_alone() -> None:
    """Moves and votes, most of the replies in Among Us, do not count as words."""
    env = env_maker({"game": "among_us", "style": "compact", "players": 5, "max_steps": 80})
    tokens = Tokens(train_tokenizer(scripted_texts("among_us", [env], 0, games=4), COMPACT_TOKENS, 1024))
    blank = Policy(tiny_lm(tokens.size, hidden_size=16, layers=1, heads=2, intermediate_size=32), tokens)
    with torch.no_grad():
        for parameter in blank.lm.parameters():
            parameter.zero_()
    episodes = rollout(draw_games(0, 1, count=4), everyone(scripted("among_us", "random", tokens)), env, 8)
    seats = rows_of(episodes, {"random"})
    turns = [t for episode, agent in seats for t in episode.turns if t.agent == agent and t.kind == TurnKind.SPEAK]
    spoken, words = sum(len(t.reply_ids) for t in turns), sum(len(t.text.split()) for t in turns)
    assert spoken and len(turns) < sum(t.agent == agent for episode, agent in seats for t in episode.turns) / 2
    figures = held_out_figures(blank, seats)
    may_be_said = tokens.size - len(tokens.unspeakable)
    assert figures["perplexity_per_word"] == pytest.approx(may_be_said ** (spoken / words), rel=1e-3)


BASE = BaseConfig(games=2, rows=4)


def few(*path: int, count: int) -> list[Game]:
    return draw_games(*path, count=min(count, 8))


def begin(cache: Path, pipe: Connection) -> None:
    """Begins to make the base, says so, and never goes on."""

    def report(line: str) -> None:
        pipe.send(line)
        time.sleep(600)

    base_policy(MODEL, BASE, ENV, cache=cache, report=report)


@pytest.mark.filterwarnings("ignore:.*fork")
def test_another_process_goes_on_if_the_one_that_trains_the_base_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "CHUNK", 20)
    monkeypatch.setattr(corpus, "draw_games", few)
    cache, (here, there) = tmp_path / "cache", multiprocessing.Pipe()
    other = multiprocessing.get_context("fork").Process(target=begin, args=(cache, there), daemon=True)
    other.start()
    message = here.recv()
    said: list[str] = []
    seen: list[list[Path]] = []  # of the cache, while the other process is at work

    def report(line: str) -> None:
        said.append(line)
        if line.startswith("waiting"):
            seen.append([path for path in cache.iterdir() if not path.name.startswith(".")])
            other.kill()

    policy, folder = base_policy(MODEL, BASE, ENV, cache=cache, report=report)
    assert folder is not None and message == f"training the base model on scripted games (once; kept in {folder})"
    assert said[0] == f"waiting for another process, which is making {folder}" and seen == [[]]
    assert [line.startswith("training the base") for line in said[1:-1]] == [True]
    other.join(120)
    assert verify_folder(folder) == "" and [p for p in cache.iterdir() if not p.name.startswith(".")] == [folder]
    again, _ = base_policy(MODEL, BASE, ENV, cache=cache, report=said.append)
    assert said[-1].startswith("base model: ") and said[-2] == said[-1]
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), policy.parameters(), strict=True))


def test_only_one_of_many_threads_makes_it(tmp_path: Path) -> None:
    path, made, said = tmp_path / "new" / "thing", [], []
    begun, waiting = threading.Event(), threading.Event()

    def make(name: str) -> None:
        made.append(name)
        begun.set()
        assert waiting.wait(60)
        path.touch()

    def report(line: str) -> None:
        said.append(line)
        waiting.set()

    def take(name: str) -> threading.Thread:
        thread = threading.Thread(target=make_once, args=(path, lambda: make(name), report))
        thread.start()
        return thread

    first = take("first")
    assert begun.wait(60)
    others = [take("second"), take("third")]
    for thread in (first, *others):
        thread.join(60)
    assert made == ["first"] and set(said) == {f"waiting for another process, which is making {path}"}


def test_make_once_tries_again_after_a_failure_and_refuses_in_one_line(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make_once(tmp_path / "made", fail)
    make_once(tmp_path / "made", (tmp_path / "made").touch, report=pytest.fail)
    make_once(tmp_path / "made", fail)  # it is there
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/new/thing cannot be written \(Not a directory\)"):
        make_once(tmp_path / "file" / "new" / "thing", pytest.fail)
    (tmp_path / ".thing.lock").mkdir()
    with pytest.raises(UserError, match=r"thing cannot be written \(Is a directory\)"):
        make_once(tmp_path / "thing", pytest.fail)
