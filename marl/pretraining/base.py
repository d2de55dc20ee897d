"""The base model, trained once on dialogues of scripted players or people and cached by a hash of all that made it."""

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from envs.human_dond import Split
from marl.common.errors import UserError, check_writable
from marl.common.files import canonical, file_digest
from marl.learning.batch import Row
from marl.losses import Loss
from marl.losses.kl import KLLoss
from marl.losses.listening import ListeningLoss
from marl.model.branches import read_questions
from marl.model.loading import check_context
from marl.model.lora import AdapterConfig, adapted, dropping, merged
from marl.model.optim import OPTIMIZERS, MuonAndAdamW
from marl.model.policy import Policy, dropout, pretrained, tiny_lm
from marl.model.tokens import Tokens, train_tokenizer
from marl.pretraining import corpus
from marl.pretraining.config import BaseConfig, ModelConfig
from marl.pretraining.corpus import CORPUS, LISTENING, Recorded, recorded, variants
from marl.pretraining.fit import fit, held_out_figures
from marl.rollout.games import file_digests, game_module, scripts_module, without_later
from marl.storage.checkpoint import copy_folder, load_policy, make_once, model_folder, read_card, save_policy

FORMAT = 2  # raise it when the same settings make another base
HF_STREAMS = 4  # raise it when models of `transformers` read other streams

Progress = Callable[[str, int, int], None]  # what is done, steps taken, all steps
Report = Callable[[str], None]


def base_policy(
    model: ModelConfig,
    base: BaseConfig,
    env: Mapping[str, Any],
    *,
    cache: Path,
    human_data: str | None = None,
    privileged_size: int = 0,
    device: torch.device | str = "cpu",
    kept: Path | None = None,
    progress: Progress = lambda what, done, total: None,
    report: Report = print,
) -> tuple[Policy, Path | None]:
    """Returns the base and its folder: from the cache, or trained now and cached.

    An untouched `transformers` model has no folder, a policy that was trained here its own. `kept`: a folder that may
    hold a copy, which goes back into the cache instead of training again.
    """
    if model.kind == "hf" and base.data == "none":
        return _untrained(model, privileged_size, device, base.seed)
    if base.data == "human" and not human_data:
        raise UserError(
            "base.data=human needs the human dialogues. Give their folder as data.dond=DIR (files data.txt, val.txt, "
            "test.txt of facebookresearch/end-to-end-negotiator, src/data/negotiate)"
        )
    human_data = human_data if base.data == "human" else None
    made_of = base_settings(model, base, env, human_data)
    folder = base_folder(cache, made_of)

    def is_it(there: Path) -> bool:
        return canonical(read_card(there).get("made_of")) == canonical(made_of)

    def make() -> None:
        if kept is not None and kept.is_dir() and is_it(kept):
            report(f"the base model is no longer in the cache; copying {kept} there")
            copy_folder(kept, folder)
            return
        if base.lessons:
            policy, _ = base_policy(
                model, replace(base, lessons=()), env, cache=cache, human_data=human_data, device=device,
                progress=progress, report=report,
            )  # fmt: skip
            report(f"teaching the base model to listen (once; kept in {folder})")
            policy, figures = _teach(policy, base, env, model.base_lora, progress, report)
        else:
            report(f"training the base model on {base.data} games (once; kept in {folder})")
            policy, figures = _train(model, base, env, human_data, device, progress, report)
        save_policy(folder, policy, {"made_of": made_of, "figures": figures, "game": env["game"]})

    if not folder.exists():
        check_context(model.lm_config(), model.context)
        check_writable(cache, "cache")
        make_once(folder, make, report)
    policy = load_policy(folder, device, privileged_size, dtype=model.dtype)  # checks all that is in the folder
    if not is_it(folder):
        raise UserError(f"{folder} holds a base made of other settings (see its policy.json). Remove it")
    figures = read_card(folder).get("figures", {})
    report("base model: " + ", ".join(f"{name} {value:.3g}" for name, value in figures.items()))
    return policy, folder


def _untrained(
    model: ModelConfig, privileged_size: int, device: torch.device | str, seed: int
) -> tuple[Policy, Path | None]:
    """Loads a model that needs no training: a policy of this project and its folder, or one of `transformers`."""
    saved = Path(model.name)
    if (saved / "policy.json").is_file():  # with its critic
        return load_policy(saved, device, privileged_size, dtype=model.dtype), saved
    policy = pretrained(model.name, privileged_size, seed=seed, dtype=model.dtype).to(device).eval()
    read_questions(policy.tokens, policy.lm, model.questions)
    return policy, None


def base_settings(
    model: ModelConfig, base: BaseConfig, env: Mapping[str, Any], human_data: str | None = None
) -> dict[str, Any]:
    """Returns all that makes a trained base: settings, and digests of the texts and files that it learns from."""
    human = corpus.data_files(human_data) if base.data == "human" and human_data else None
    unused = {*base.vary, *getattr(game_module(env["game"]), "PAYMENT", ())}
    varied = [{**env, name: value} for name, values in base.vary.items() for value in values]
    if human_data and human:
        unused |= {"contexts", "split"}  # people played contexts of their own
        texts = _digest("".join(recorded(human_data, "val", variants(env, base.vary)).texts))
    else:
        files = file_digests(env, *varied)
        texts = _scripted_digest(*map(json.dumps, (dict(env), dict(base.vary), files)), base.seed, base.players)
    made_of = {
        "format": FORMAT,
        "texts": texts,
        "model": model.made_of(),
        "base": base.made_of(),
        "env": {k: v for k, v in without_later(env).items() if k not in unused},
        "human_data": human,
    }
    if not human:
        fewer = base.games_of_tokenizer < base.tokenizer_games
        made_of |= {"tokenizer_games": base.games_of_tokenizer} if fewer else {}
        made_of |= getattr(scripts_module(env["game"]), "VERSION", {})
        made_of |= file_digests(env, *varied, *({**env, **lesson.env} for lesson in base.lessons))
    if model.kind == "hf":
        made_of["streams"] = HF_STREAMS
    if model.base_lora:
        made_of["lora"] = asdict(model.base_lora)
    if model.kind == "hf" and (folder := Path(model.name)).is_dir():
        made_of["model_files"] = {p.name: file_digest(p)[:16] for p in sorted(folder.iterdir()) if p.is_file()}
    return made_of


@cache
def _scripted_digest(env: str, vary: str, files: str, seed: int, players: str) -> str:
    """Digest of the text of fifty scripted games of these settings (JSON), cached per process. `files`: digests of the
    files that these settings name, so that edited ones are read again."""
    settings = json.loads(env)
    games = variants(settings, json.loads(vary))
    return _digest("".join(corpus.scripted_texts(settings["game"], games, seed, 50, players)))


def base_folder(cache: Path, made_of: Mapping[str, Any]) -> Path:
    """The folder in the cache for a base of these `base_settings`."""
    return cache / f"{made_of['env']['game']}-{made_of['base']['data']}-{_digest(canonical(made_of))}"


def untouched_folder(cache: Path, model: ModelConfig, game: str) -> Path:
    """The folder in the cache for games of an untouched model, named by its files and by what it reads."""
    files = {p.name: file_digest(p) for p in model_folder(model.name).iterdir() if p.is_file()}
    read = {"files": files, "questions": model.questions, "streams": HF_STREAMS}
    return cache / f"{game}-none-{_digest(canonical(read))}"


def from_scratch(game: str, texts: Iterable[str], model: ModelConfig, seed: int) -> Policy:
    """A small model that has learned nothing yet, but a tokenizer of these texts."""
    tokens = Tokens(train_tokenizer(texts, game_module(game).COMPACT_TOKENS, model.vocab_size))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Policy(tiny_lm(tokens.size, **model.shape(), generator_seed=seed), tokens)


def _train(
    model: ModelConfig,
    base: BaseConfig,
    env: Mapping[str, Any],
    human_data: str | None,
    device: torch.device | str,
    progress: Progress,
    report: Report,
) -> tuple[Policy, dict[str, float]]:
    """Trains a base on games of scripted players or of people. Returns it and its held-out figures."""
    game, games = env["game"], variants(env, base.vary)
    human = _read_people(human_data, games, base, report) if human_data else {}
    if model.kind == "hf":
        policy = pretrained(model.name, seed=base.seed, dtype=model.dtype).to(device)
    else:
        if human_data:  # of all dialogues, so that bases of few and of many share their tokens
            whole = replace(base, keep="all", human_games=0)
            texts = (human["train"] if whole == base else recorded(human_data, "train", games, whole)).texts
        else:
            texts = corpus.scripted_texts(game, games, base.seed, base.games_of_tokenizer)
        policy = from_scratch(game, texts, model, base.seed).to(device)
    tokens = policy.tokens
    read_questions(tokens, policy.lm, model.questions)
    if model.base_lora:
        policy = adapted(policy, model.base_lora, base.seed)
    if human_data:
        held_out = human["val"].first(base.held_out_games).rows(tokens)
        steps = base.epochs * math.ceil(len(human["train"].steps) / base.rows)
        draw = corpus.human_epochs(human_data, games, tokens, base)
    else:
        held_out = corpus.held_out_rows(env, tokens, base)
        _check_lengths(held_out, model.context, report)
        steps = math.ceil(len(games[0]().possible_agents) * base.games / base.rows)
        chunks = corpus.scripted_chunks(game, games, tokens, base, base.players, (CORPUS,), steps * base.rows)
        draw = corpus.chunk_batches(chunks, base, (CORPUS,))
    generator = torch.Generator().manual_seed(base.seed)
    with dropout(policy, base.dropout, generator), dropping(policy, generator):
        # On scripted dialogues a small model started faster with Muon than with AdamW alone (single trials). An
        # adapter's factors are no such matrices: AdamW, as published.
        kind = OPTIMIZERS["adamw"] if policy.adapter else MuonAndAdamW
        learn = kind(policy, base.learning_rate, base.weight_decay)
        fit(policy, draw, steps, base, base.losses(), learn, lambda done: progress("base", done, steps))
    policy = merged(policy) if policy.adapter else policy

    def measured(rows: Sequence[Row]) -> dict[str, float]:
        return held_out_figures(policy, rows, base.bf16, lambda done: progress("held-out views", done, len(rows)))

    figures = measured(held_out)
    if human:
        found_test = measured(human["test"].first(base.held_out_games).rows(tokens))
        figures |= {f"test_{name}": value for name, value in found_test.items()}
    return policy, figures


def _read_people(
    folder: str, games: Sequence[Callable[[], Any]], base: BaseConfig, report: Report
) -> dict[str, Recorded]:
    """Reads the human dialogues of each split, and reports what is left out."""
    splits: tuple[Split, ...] = ("train", "val", "test")
    human: dict[str, Recorded] = {split: recorded(folder, split, games, base) for split in splits}
    for split, found in human.items():
        left_out = ", ".join(f"{count} {why}" for why, count in found.left_out.items())
        counts = f"{len(found.steps)} views of {len(set(found.dialogues))} dialogues"
        report(f"human dialogues, {split}: {counts}; left out: {left_out or 'none'}")
    return human


def _check_lengths(rows: Sequence[Row], context: int, report: Report) -> None:
    """Raises UserError if most views of scripted games are longer than `context`; reports it if some are."""
    lengths = sorted(len(episode.streams[agent]) for episode, agent in rows)
    longer = sum(length > context for length in lengths) / len(lengths)
    if longer > 0.5:
        raise UserError(
            f"model.context={context} is too short: views of scripted games have a median of "
            f"{lengths[len(lengths) // 2]} tokens, up to {lengths[-1]}. Raise it, or lower the game's limits"
        )
    if longer:
        report(
            f"model.context={context} is shorter than {longer:.1%} of the views of scripted games (up to "
            f"{lengths[-1]} tokens): players whose view outgrows it fall silent"
        )


def _teach(
    policy: Policy,
    base: BaseConfig,
    env: Mapping[str, Any],
    lora: AdapterConfig | None,
    progress: Progress,
    report: Report,
) -> tuple[Policy, dict[str, float]]:
    """Gives the lessons, by an adapter that is merged where there is `lora`. Returns policy and held-out figures."""
    game, tokens = env["game"], policy.tokens
    # Beside imitation, listening is hardly learned: Adam scales a step by the whole gradient, which random play fills
    # with noise. The gradient of KL to the model before the lessons has no noise, and is 0 at first.
    first = policy if lora else copy.deepcopy(policy)
    policy = adapted(policy, lora, base.seed) if lora else policy
    for place, lesson in enumerate(base.lessons):
        terms: dict[str, Loss] = {"listening": ListeningLoss(weight=1.0)}
        if lesson.anchor:
            terms["kl"] = KLLoss(lesson.anchor, over="both")
        taught = variants({**env, **lesson.env}, {k: v for k, v in base.vary.items() if k not in lesson.env})
        path = (LISTENING, place)
        chunks = corpus.scripted_chunks(game, taught, tokens, base, lesson.players, path, lesson.steps * base.rows)
        draw = corpus.chunk_batches(corpus.rows_with_beliefs(chunks), base, path)
        optimizer = OPTIMIZERS[lesson.optimizer](policy, lesson.learning_rate, 0.0)

        def at(done: int, what: str = f"base, lesson {place + 1}", steps: int = lesson.steps) -> None:
            progress(what, done, steps)

        taken, loss = fit(policy, draw, lesson.steps, base, terms, optimizer, at, first, lesson.until)
        missed = f", not below until={lesson.until:g}: it listens less well than intended"
        report(
            f"lesson {place + 1} of the base: listening loss {loss:.2f} after {taken} steps"
            + (missed if loss >= lesson.until > 0 else "")
        )
    policy = merged(policy) if lora else policy
    return policy, held_out_figures(policy, corpus.held_out_rows(env, tokens, base))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
