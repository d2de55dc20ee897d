"""The base model: a small language model that knows the game's language, before any reinforcement.

Trained once on dialogues of scripted players (or of people) and cached by a hash of everything that made it. A model of
`transformers` is its own base. What this leaves out: rewards. The base imitates, models the world and listens.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from envs.core import END, TurnKind
from envs.dond_v0 import MESSAGE, Context, in_test
from marl.agents import Player, TextAgent, beliefs_of
from marl.batch import Seat, collate, seats_of
from marl.checkpoint import copy_folder, load_policy, make_once, read_card, save_policy
from marl.errors import UserError, check_writable
from marl.files import canonical
from marl.games import env_maker, file_digests, game_module, scripted, scripts_module
from marl.human_dond import HumanSplit, HumanView, Split, Step, permuted, read_split, replay_all
from marl.losses import Loss
from marl.losses.claim import ClaimLoss
from marl.losses.imitation import ImitationLoss
from marl.losses.kl import KLLoss
from marl.losses.listening import ListeningLoss, log_truth
from marl.losses.world_model import WorldModelLoss
from marl.optim import OPTIMIZERS, MuonAndAdamW, Optimizer
from marl.policy import MOST, Policy, check_context, load_config, pretrained, tiny_config, tiny_lm
from marl.rollout import Game, draw_games, rollout
from marl.speech import INSIDERS
from marl.tokens import Tokens, View, train_tokenizer
from marl.types import Episode, Kind, Turn
from marl.update import NotFinite, UpdateConfig, forward, micro_batches, update

FORMAT = 2  # raised when the same settings would make another base
HF_STREAMS = 2  # raised when models of `transformers` would read other streams
CORPUS, TOKENIZER, HELD_OUT, LISTENING, CHOICE = 101, 102, 103, 104, 105  # named places of the seed
DATA, KINDS, KEEPS = ("scripted", "human", "none"), ("tiny", "hf"), ("all", "nonzero")
ORDERS = tuple(itertools.permutations(range(3), 3))
MOST_SEEDS = 2**63 - 1  # as torch takes them
FEWEST_TOKENS = 400  # 256 bytes, and the words that Deal or No Deal keeps whole; Among Us has more
SIZES = {  # of a tiny model's settings, what `transformers` calls them
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
    "context": "max_position_embeddings",
}
CHUNK = 512  # seats among which batches of equal length are sought


@dataclass(frozen=True)
class ModelConfig:
    """`kind` tiny (trained here from scratch) or hf (`name`: a local folder or hub name)."""

    kind: str = "tiny"
    name: str = ""
    vocab_size: int = 1024
    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 1
    intermediate_size: int = 384
    context: int = 1024

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"model.kind={self.kind}: must be one of {', '.join(KINDS)}")
        for name, key in SIZES.items():
            if getattr(self, name) < 1:
                raise UserError(f"model.{name}={getattr(self, name)}: must be at least 1")
            if getattr(self, name) > MOST[key]:
                raise UserError(f"model.{name}={getattr(self, name)}: must be at most {MOST[key]}")
        if self.kind != "tiny":  # has a shape of its own
            return
        if self.vocab_size < FEWEST_TOKENS:
            raise UserError(
                f"model.vocab_size={self.vocab_size}: must be at least {FEWEST_TOKENS}: 256 bytes, and a game's words"
            )
        if self.name:
            raise UserError(f"model.name={self.name}: the small model, which is trained here, has none; add model=hf")
        if self.heads % self.kv_heads:
            raise UserError(f"model.kv_heads={self.kv_heads}: must divide model.heads={self.heads}, which share them")
        if self.hidden_size % (2 * self.heads):
            raise UserError(
                f"model.hidden_size={self.hidden_size}: must be a multiple of {2 * self.heads}, so that each of "
                f"model.heads={self.heads} has an even part, which positions rotate"
            )

    def shape(self) -> dict[str, int]:
        """Of a tiny model, as `tiny_config` takes it."""
        names = ("hidden_size", "layers", "heads", "kv_heads", "intermediate_size", "context")
        return {name: getattr(self, name) for name in names}

    def lm_config(self) -> PreTrainedConfig:
        """The language model's own configuration; a tiny one's vocabulary may turn out smaller."""
        return tiny_config(self.vocab_size, **self.shape()) if self.kind == "tiny" else load_config(self.name)


@dataclass(frozen=True)
class Lesson:
    """A stage of a scripted base that trains listening alone: `steps` on games of the scripted `players`.

    With `until` above 0 it ends early, once the log-loss of the last ten steps is below, and its learning rate stays.
    `env`: settings of the game that differ in the lesson, and don't vary in it. KL of all replies to the model before
    the first lesson, with weight `anchor`, keeps what it does.
    """

    players: str
    steps: int
    env: Mapping[str, Any] = field(default_factory=dict)
    until: float = 0.0
    optimizer: str = "adamw"
    learning_rate: float = 3e-4
    anchor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("steps", "until", "anchor", "learning_rate"):
            if getattr(self, name) < 0:
                raise UserError(f"base.lessons: {name}={getattr(self, name)} must not be negative")
        if self.optimizer not in OPTIMIZERS:
            raise UserError(f"base.lessons: optimizer={self.optimizer} must be one of {', '.join(OPTIMIZERS)}")
        if "game" in self.env or "style" in self.env:
            raise UserError(f"base.lessons: env={dict(self.env)} must leave game and style to env")


@dataclass(frozen=True)
class BaseConfig:
    """What the base is trained on, and how.

    `data`: `scripted`, `human` (needs data.dond), or `none`. `games`: scripted games. `tokenizer_games`: those whose
    words the tokenizer is trained on, no more than `games` but 20 at least. `players`: whose, by the name of scripted
    players; empty for the game's default ones. Human data only: `epochs`, passes over them; `permute_items`,
    books, hats and balls swap names at random in each pass; `deals_only`, dialogues without a deal are not learned
    from; `claim`, the weight of a further loss on claims and tags (losses/claim.py); `hold_out`, dialogues over the
    game's test contexts are not learned from (without it, a base is only fit for contexts of another origin); `keep`
    nonzero, views whose player scored 0 are not learned from; `human_games`, how many dialogues are learned from, drawn
    by `seed` from those that are left (0: all of them).
    `dropout`: of the embeddings and of what each block adds to them, while the base learns (Llama-family models).
    `after_questions`: whether world modelling foretells what follows a belief question, from where its answer is read.
    `vary`: game settings that change from game to game, so that one base serves them all (the objective, which neither
    scripts nor the human data know). `lessons`: further stages, one after another.
    """

    data: str = "scripted"
    games: int = 10000
    tokenizer_games: int = 800
    players: str = ""
    epochs: int = 4
    permute_items: bool = False
    deals_only: bool = False
    claim: float = 0.0
    hold_out: bool = True
    keep: str = "all"
    human_games: int = 0
    dropout: float = 0.0
    rows: int = 16  # in one step
    learning_rate: float = 4e-3
    warmup: float = 0.05
    weight_decay: float = 0.01
    bf16: bool = False
    seed: int = 0
    vary: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    imitation: float = 1.0
    world_model: float = 0.1
    after_questions: bool = True
    listening: float = 0.5
    lessons: tuple[Lesson, ...] = ()

    def __post_init__(self) -> None:
        if self.data not in DATA:
            raise UserError(f"base.data={self.data}: must be one of {', '.join(DATA)}")
        for name in ("games", "tokenizer_games", "epochs", "rows"):
            if getattr(self, name) < 1:
                raise UserError(f"base.{name}={getattr(self, name)}: must be at least 1")
        if self.keep not in KEEPS:
            raise UserError(f"base.keep={self.keep}: must be one of {', '.join(KEEPS)}")
        if self.human_games < 0:
            raise UserError(f"base.human_games={self.human_games}: must be at least 1, or 0 for all of them")
        for name in ("learning_rate", "weight_decay", "warmup"):
            if getattr(self, name) < 0:
                raise UserError(f"base.{name}={getattr(self, name)}: must not be negative")
        if not 0 <= self.seed <= MOST_SEEDS:
            raise UserError(f"base.seed={self.seed}: must be from 0 to {MOST_SEEDS}")
        if not 0 <= self.dropout < 1:
            raise UserError(f"base.dropout={self.dropout}: must lie in [0, 1)")
        for name, values in self.vary.items():
            if not values:
                raise UserError(
                    f"base.vary.{name}=[]: must name at least one value; or leave it out (~base.vary.{name})"
                )

    def losses(self) -> dict[str, Loss]:
        terms: dict[str, Loss] = {
            "imitation": ImitationLoss(self.imitation),
            "world_model": WorldModelLoss(self.world_model, self.after_questions),
            "listening": ListeningLoss(self.listening),
        }
        if self.claim:
            terms["claim"] = ClaimLoss(self.claim)
        return terms

    def made_of(self) -> dict[str, Any]:
        """The settings that the trained base depends on: what concerns human data only where they are used."""
        default = BaseConfig()
        later = ("players", "hold_out", "dropout", "keep", "human_games", "tokenizer_games", "after_questions")
        unused = {name for name in later if getattr(self, name) == getattr(default, name)}
        of_people = {"permute_items", "deals_only", "claim", "hold_out", "keep", "human_games"}
        unused |= {"tokenizer_games"} if self.data == "human" else of_people
        unused |= set() if self.lessons else {"lessons"}
        return {name: value for name, value in asdict(self).items() if name not in unused}


@dataclass
class _Sink:
    """A player that notes every text it reads or says."""

    player: Player
    texts: list[str] = field(default_factory=list)

    def know(self, privileged: Sequence[float]) -> None:
        if hasattr(self.player, "know"):
            self.player.know(privileged)

    def observe(self, text: str) -> None:
        self.texts.append(text)
        self.player.observe(text)

    def reply(self, text: str, options: Sequence[str] = ()) -> str:
        said = self.player.reply(text, options)
        self.texts.extend((text, said, *options))
        return said


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
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    report: Callable[[str], None] = print,
) -> tuple[Policy, Path | None]:
    """The base, from the cache where it is there, and its folder (None for an untouched `transformers` model). `kept`:
    where a copy of it may be, to be put into the cache before another one is made."""
    if model.kind == "hf" and base.data == "none":
        return pretrained(model.name, privileged_size, seed=base.seed).to(device).eval(), None
    if base.data == "human" and not human_data:
        raise UserError(
            "base.data=human needs the human dialogues: give their folder as data.dond=DIR (files data.txt, val.txt, "
            "test.txt of facebookresearch/end-to-end-negotiator, src/data/negotiate)"
        )
    made_of = base_settings(model, base, env, human_data)
    folder = base_folder(cache, made_of)

    def make() -> None:
        report(f"training the base model on {base.data} dialogues (once; kept in {folder})")
        games = variants(env, base.vary)
        policy, figures = _train(model, base, env, games, human_data, device, progress, report)
        save_policy(folder, policy, {"made_of": made_of, "figures": figures, "game": env["game"]})

    def teach() -> None:
        untaught = replace(base, lessons=())
        policy, _ = base_policy(
            model, untaught, env, cache=cache, human_data=human_data, device=device, progress=progress, report=report
        )
        report(f"teaching the base model to listen (once; kept in {folder})")
        figures = _teach(policy, base, env, progress, report)
        save_policy(folder, policy, {"made_of": made_of, "figures": figures, "game": env["game"]})

    def put_back() -> None:
        assert kept is not None
        report(f"the base model is not in the cache any more: {kept} is put there")
        copy_folder(kept, folder)

    def is_it(there: Path) -> bool:
        return canonical(read_card(there).get("made_of")) == canonical(made_of)

    if not folder.exists():
        check_context(model.lm_config(), model.context)
        check_writable(cache, "cache")
        there = kept is not None and kept.is_dir() and is_it(kept)
        make_once(folder, put_back if there else teach if base.lessons else make, report)
    policy = load_policy(folder, device, privileged_size)  # checks all that is in the folder
    if not is_it(folder):
        raise UserError(f"{folder} holds a base made of other settings (policy.json says of which): remove it")
    figures = read_card(folder).get("figures", {})
    report("base model: " + ", ".join(f"{name} {value:.3g}" for name, value in figures.items()))
    return policy, folder


def base_settings(
    model: ModelConfig, base: BaseConfig, env: Mapping[str, Any], human_data: str | None = None
) -> dict[str, Any]:
    """All that a trained base is made of: settings, and digests of the texts and files that it learns from."""
    human = data_files(Path(human_data)) if base.data == "human" and human_data else None
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
        "model": asdict(model),
        "base": base.made_of(),
        "env": {k: v for k, v in env.items() if k not in unused},
        "human_data": human,
    }
    if not human and tokenizer_games(base) < base.tokenizer_games:
        made_of["tokenizer_games"] = tokenizer_games(base)
    if not human:
        made_of |= getattr(scripts_module(env["game"]), "VERSION", {})
        made_of |= file_digests(env, *varied, *({**env, **lesson.env} for lesson in base.lessons))
    if model.kind == "hf":
        made_of["streams"] = HF_STREAMS
    if model.kind == "hf" and (folder := Path(model.name)).is_dir():
        made_of["model_files"] = {p.name: _file_digest(p, *_stamp(p)) for p in sorted(folder.iterdir()) if p.is_file()}
    return made_of


@cache
def _scripted_digest(env: str, vary: str, files: str, seed: int, players: str) -> str:
    """Of what is said in fifty scripted games of these settings (JSON): the runs of a process play them once. `files`:
    of what these settings name, so that edited ones are read again."""
    settings = json.loads(env)
    games = variants(settings, json.loads(vary))
    return _digest("".join(scripted_texts(settings["game"], games, seed, 50, players)))


def _stamp(path: Path) -> tuple[int, int]:
    return path.stat().st_size, path.stat().st_mtime_ns


@cache
def _file_digest(path: Path, size: int, modified: int) -> str:
    """Of a file as it is since then: weights are gigabytes, which are read once in a process."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def base_folder(cache: Path, made_of: Mapping[str, Any]) -> Path:
    """Where in the cache the base of these `base_settings` is, or will be."""
    return cache / f"{made_of['env']['game']}-{made_of['base']['data']}-{_digest(canonical(made_of))}"


def tokenizer_games(base: BaseConfig) -> int:
    """A small base needs no tokenizer of more scripted games than it learns from."""
    return min(max(base.games, 20), base.tokenizer_games)


def _train(
    model: ModelConfig,
    base: BaseConfig,
    env: Mapping[str, Any],
    games: Sequence[Callable[[], Any]],
    human_data: str | None,
    device: torch.device | str,
    progress: Callable[[str, int, int], None],
    report: Callable[[str], None],
) -> tuple[Policy, dict[str, float]]:
    game = env["game"]
    human: dict[str, Recorded] = {}
    if base.data == "human":
        assert human_data is not None
        splits: tuple[Split, ...] = ("train", "val", "test")
        human = {split: recorded(human_data, split, games, base) for split in splits}
        for split, found in human.items():
            left_out = ", ".join(f"{count} {why}" for why, count in found.left_out.items())
            counts = f"{len(found.steps)} views of {len(set(found.dialogues))} dialogues"
            report(f"human dialogues, {split}: {counts}; left out: {left_out or 'none'}; {found.note}")
    if model.kind == "tiny":
        if human_data and human:  # of all dialogues, so that bases of few and of many share their tokens
            whole = replace(base, keep="all", human_games=0)
            texts = (human["train"] if whole == base else recorded(human_data, "train", games, whole)).texts
        else:
            texts = scripted_texts(game, games, base.seed, tokenizer_games(base))
        tokens = Tokens(train_tokenizer(texts, game_module(game).COMPACT_TOKENS, model.vocab_size))
        lm = tiny_lm(tokens.size, **model.shape(), generator_seed=base.seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(base.seed)
            policy = Policy(lm, tokens).to(device)
    else:
        policy = pretrained(model.name, seed=base.seed).to(device)
        tokens = policy.tokens
    if human:
        held_out = human["val"].seats(tokens)
        test = human["test"].seats(tokens)
        assert human_data is not None
        steps = base.epochs * math.ceil(len(human["train"].steps) / base.rows)
        draw = _epochs(human_data, games, tokens, base)
    else:
        held_out = _held_out(env, tokens, base)
        lengths = sorted(len(episode.streams[agent]) for episode, agent in held_out)
        longer = sum(length > model.context for length in lengths) / len(lengths)
        if longer > 0.5:
            raise UserError(
                f"model.context={model.context}: one seat's view of a scripted game has {lengths[len(lengths) // 2]} "
                f"tokens in the middle, up to {lengths[-1]}; raise model.context or lower the game's limits"
            )
        if longer:
            report(
                f"model.context={model.context} is shorter than {longer:.1%} of the views of scripted games (up to "
                f"{lengths[-1]} tokens): players whose view outgrows it hear and say nothing more"
            )
        steps = math.ceil(len(games[0]().possible_agents) * base.games / base.rows)
        draw = _batches(_chunks(game, games, tokens, base, base.players, (CORPUS,), steps * base.rows), base, (CORPUS,))
    with dropout(policy, base.dropout, torch.Generator().manual_seed(base.seed)):
        # On scripted dialogues a small model started faster with Muon than with AdamW alone (single trials).
        learn = MuonAndAdamW(policy, base.learning_rate, base.weight_decay)
        fit(policy, draw, steps, base, base.losses(), learn, lambda done: progress("base", done, steps))
    figures = held_out_figures(policy, held_out)
    if human:
        figures |= {f"test_{name}": value for name, value in held_out_figures(policy, test).items()}
    return policy, figures


def _teach(
    policy: Policy,
    base: BaseConfig,
    env: Mapping[str, Any],
    progress: Callable[[str, int, int], None],
    report: Callable[[str], None],
) -> dict[str, float]:
    """Gives the lessons, says how those ended that end by what was learned, and returns the figures of the outcome."""
    game, tokens = env["game"], policy.tokens
    # Beside imitation listening is hardly learned: Adam scales a step by the size of the whole gradient, which random
    # play fills with noise. The gradient of KL to what was learned has none, and is 0 at first.
    first = copy.deepcopy(policy)
    for place, lesson in enumerate(base.lessons):
        terms: dict[str, Loss] = {"listening": ListeningLoss()}
        if lesson.anchor:
            terms["kl"] = KLLoss(lesson.anchor, over="both")
        taught = variants({**env, **lesson.env}, {k: v for k, v in base.vary.items() if k not in lesson.env})
        path = (LISTENING, place)
        chunks = _chunks(game, taught, tokens, base, lesson.players, path, lesson.steps * base.rows)
        draw = _batches(_asked(chunks), base, path)
        optimizer = OPTIMIZERS[lesson.optimizer](policy, lesson.learning_rate, 0.0)

        def at(done: int, what: str = f"base, lesson {place + 1}", steps: int = lesson.steps) -> None:
            progress(what, done, steps)

        taken, loss = fit(policy, draw, lesson.steps, base, terms, optimizer, at, first, lesson.until)
        if lesson.until:
            learned = loss < lesson.until
            report(
                f"lesson {place + 1} of the base: listening loss {loss:.2f} after {taken} steps"
                + ("" if learned else f", not below its until={lesson.until:g}: it listens less well than was meant")
            )
    return held_out_figures(policy, _held_out(env, tokens, base))


def _held_out(env: Mapping[str, Any], tokens: Tokens, base: BaseConfig) -> list[Seat]:
    games = draw_games(base.seed, HELD_OUT, count=min(base.games, max(base.games // 15, 64), 256))
    return scripted_seats(env["game"], variants(env, base.vary)[0], tokens, games, base.players)


def variants(env: Mapping[str, Any], vary: Mapping[str, Sequence[Any]]) -> list[Callable[[], Any]]:
    """Makers of the environment under every combination of the varied settings."""
    combinations = itertools.product(*([(name, value) for value in values] for name, values in vary.items()))
    return [env_maker({**env, **dict(settings)}) for settings in combinations]


@dataclass(frozen=True)
class Recorded:
    """Human dialogues replayed in the game: what each view reads and replies, and which of the `dialogues` it is of;
    how many views were left out, and why; and a `note` on those of the split."""

    steps: list[list[Step]]
    left_out: Counter[str]
    dialogues: list[str] = field(default_factory=list)  # one for each view, twice where both its views are here
    note: str = ""

    @property
    def texts(self) -> list[str]:
        return [step[1] for steps in self.steps for step in steps]

    def seats(self, tokens: Tokens) -> list[Seat]:
        """One row a view. A view is an episode of which only one seat is known."""
        return [human_seat(steps, tokens, index) for index, steps in enumerate(self.steps)]


def recorded(
    folder: str,
    split: Split,
    games: Sequence[Callable[[], Any]],
    base: BaseConfig = BaseConfig(),
    permute: np.random.Generator | None = None,
) -> Recorded:
    """The views of a split, played again in the game's variants in turn.

    What is learned from, the training split, is what `base` wants: without dialogues over the game's test contexts
    (`hold_out`), without a deal (`deals_only`), without views that scored 0 (`keep`), and of the rest as many dialogues
    as `human_games`. `permute` renames the items of each view at random, with `hold_out` never so that its context
    comes to be a test context. UserError where there are fewer dialogues than wanted.
    """

    def held_out(view: HumanView) -> bool:
        return base.hold_out and split == "train" and in_test(Context(view.counts, (view.values, view.partner_values)))

    def unwanted(view: HumanView) -> str:
        if held_out(view):
            return "test context"
        if split == "train" and base.deals_only and not view.agree:
            return "no deal"
        return "scored 0" if split == "train" and base.keep == "nonzero" and not view.reward else ""

    environments = [make() for make in games]
    found = _read(folder, split)
    left_out = Counter(found.skipped)
    reasons = {view.index: unwanted(view) for view in found.usable}
    wanted = [view for view in found.usable if not reasons[view.index]]
    left_out += Counter(filter(None, reasons.values()))
    if split == "train" and base.human_games:
        dialogues = list(dict.fromkeys(view.dialogue for view in wanted))
        if base.human_games > len(dialogues):
            raise UserError(
                f"base.human_games={base.human_games}: data.dond={folder} has {len(dialogues)} dialogues to learn from "
                "under these settings; 0 takes them all"
            )
        rng = np.random.default_rng([base.seed, CHOICE])
        chosen = {dialogues[i] for i in rng.permutation(len(dialogues))[: base.human_games]}
        before = len(wanted)
        wanted = [view for view in wanted if view.dialogue in chosen]
        left_out["not drawn"] = before - len(wanted)
    place = {view.index: i for i, view in enumerate(found.usable)}
    steps, known = [], []
    for view in wanted:
        dialogue, variant = view.dialogue, place[view.index] % len(environments)
        if permute is not None:
            renamed = [new for new in (permuted(view, order) for order in ORDERS) if not held_out(new)]
            view = renamed[permute.integers(len(renamed))]
        replayed, refused = replay_all([view], environments[variant])
        steps += replayed
        known += [dialogue] * len(replayed)
        left_out += refused
    return Recorded(steps, left_out, known, found.note)


def _read(folder: str, split: Split) -> HumanSplit:
    try:
        return read_split(folder, split)
    except (OSError, ValueError) as error:
        raise UserError(f"data.dond={folder}: {error}") from error


def data_files(folder: str | Path) -> dict[str, str]:
    """Digests of the human data's files. Reads a split, so that a malformed file is refused at once."""
    folder = Path(folder)
    _read(str(folder), "all")
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest()[:16] for p in sorted(folder.glob("*.txt"))}


def human_seat(steps: Sequence[Step], tokens: Tokens, index: int) -> Seat:
    message = f"{MESSAGE} "
    view, turns = View(tokens), []
    for number, step in enumerate(steps):
        if step[0] == "observe":
            view.observe(step[1], step[2], number)
        else:
            view.cue()
            ids = tuple(tokens.encode(step[1]))
            start = view.reply(ids, Kind.SPEECH)
            span = (len(message), len(step[1]) - len(f" {END}")) if step[1].startswith(message) else (0, 0)
            turns.append(
                Turn(
                    "you", "negotiator", number, TurnKind.SPEAK, step[1], ids, start, (0.0,) * len(ids),
                    body=tokens.within(ids, span),
                )
            )  # fmt: skip
    uniform = [np.full(len(a.candidate_ids), 1 / len(a.candidate_ids)) for a in view.asked]
    beliefs = beliefs_of("you", "negotiator", view.asked, uniform)
    episode = Episode(
        seed=index, players={"you": "human"}, roles={"you": "negotiator"}, streams={"you": view.stream},
        turns=tuple(turns), beliefs=tuple(beliefs), payments=(), outcome={}, steps=len(steps),
    )  # fmt: skip
    return episode, "you"


def fit(
    policy: Policy,
    draw: Iterator[list[Seat]],
    steps: int,
    base: BaseConfig,
    losses: Mapping[str, Loss],
    optimizer: Optimizer,
    progress: Callable[[int], None],
    reference: Policy | None = None,
    until: float = 0.0,
) -> tuple[int, float]:
    """Supervised steps with a warm-up and a cosine to a tenth of the optimiser's learning rate. Returns how many were
    taken, and the mean listening loss of the last ten.

    With `until` above 0 the rate stays, and the steps end early, once the listening loss of the last ten is below it.
    """
    config = UpdateConfig(minibatches=1, max_grad_norm=1.0, bf16=base.bf16)
    rates = [group["lr"] for group in optimizer.param_groups]
    recent: deque[float] = deque(maxlen=10)
    taken = 0
    for step in range(steps):
        part = step / max(steps, 1)
        scale = min(1.0, (step + 1) / max(base.warmup * steps, 1))
        scale *= 1.0 if until else 0.55 + 0.45 * math.cos(math.pi * part)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * scale
        shuffle = torch.Generator().manual_seed(step)
        try:
            found = update(
                policy, reference, collate(next(draw), {}, silent_roles=INSIDERS), losses, optimizer, config, shuffle
            )
        except NotFinite as error:
            raise UserError(
                f"base: the gradient is not finite in step {step + 1}; lower base.learning_rate={base.learning_rate}, "
                "or that of the lesson"
            ) from error
        taken = step + 1
        progress(taken)
        recent.append(found.get("loss/listening", math.inf))
        if len(recent) == recent.maxlen and sum(recent) / len(recent) < until:
            break
    return taken, sum(recent) / max(len(recent), 1)


@contextmanager
def dropout(policy: Policy, rate: float, generator: torch.Generator) -> Iterator[None]:
    """Drops features of the embeddings and of what attention and MLP add, at this rate; updates themselves use none."""

    def drop(module: torch.nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(out.shape, generator=generator) >= rate
        return out * (kept / (1 - rate)).to(out.device)

    added = [module for name, module in policy.lm.named_modules() if name.endswith((".o_proj", ".mlp"))]
    places = [policy.lm.get_input_embeddings(), *added] if rate else []
    hooks = [module.register_forward_hook(drop) for module in places]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def scripted_texts(
    game: str, variants: Sequence[Callable[[], Any]], seed: int, games: int, players: str = ""
) -> list[str]:
    """Everything that is read and said in scripted games, for a tokenizer."""
    module, sinks = scripts_module(game), []

    def make(player_seed: int, role: str) -> Player:
        sinks.append(_Sink(module.make_player(players or module.DEFAULT, player_seed, role)))
        return sinks[-1]

    agent = TextAgent("scripted", make)
    for number, make_env in enumerate(variants):
        drawn = draw_games(seed, TOKENIZER, number, count=games // len(variants))
        rollout(drawn, lambda g, e: dict.fromkeys(e.possible_agents, agent), make_env, 64)
    return [text for sink in sinks for text in sink.texts]


def scripted_seats(
    game: str, make_env: Callable[[], Any], tokens: Tokens, games: Sequence[Game], players: str = ""
) -> list[Seat]:
    """Scripted games as a language model would have met them, one row a seat."""
    agent = scripted(game, players, tokens)
    episodes = rollout(games, lambda g, e: dict.fromkeys(e.possible_agents, agent), make_env, 64)
    return seats_of(episodes, {agent.name})


def _chunks(
    game: str,
    variants: Sequence[Callable[[], Any]],
    tokens: Tokens,
    base: BaseConfig,
    players: str,
    path: tuple[int, ...],
    wanted: int,
) -> Iterator[list[Seat]]:
    """Games of scripted players, played as they are needed, about CHUNK seats at a time or as few as are `wanted`.
    `path`: place of the seed."""
    size = len(variants[0]().possible_agents)
    for chunk in itertools.count():
        games = draw_games(base.seed, *path, chunk, count=max(min(CHUNK, wanted) // size, 1))
        yield scripted_seats(game, variants[chunk % len(variants)], tokens, games, players)


def _asked(chunks: Iterable[Sequence[Seat]]) -> Iterator[list[Seat]]:
    """The seats with beliefs, and imposters beside them: what they do must not drift either."""
    for seats in chunks:
        yield [
            (episode, agent)
            for episode, agent in seats
            if any(b.listener == agent for b in episode.beliefs)
            or (episode.beliefs and episode.roles[agent] in INSIDERS)
        ]


def _batches(chunks: Iterable[Sequence[Seat]], base: BaseConfig, path: tuple[int, ...]) -> Iterator[list[Seat]]:
    """Batches of the seats of each chunk."""
    for chunk, seats in enumerate(chunks):
        yield from batches(seats, base.rows, np.random.default_rng([base.seed, *path, chunk]))


def _epochs(folder: str, games: Sequence[Callable[[], Any]], tokens: Tokens, base: BaseConfig) -> Iterator[list[Seat]]:
    """Batches of the human dialogues, in another order in each pass, and with items renamed if so set."""
    seats: list[Seat] = []
    for epoch in itertools.count():
        rng = np.random.default_rng([base.seed, CORPUS, epoch])
        if not seats or base.permute_items:
            permute = rng if base.permute_items else None
            seats = recorded(folder, "train", games, base, permute).seats(tokens)
        yield from batches(seats, base.rows, rng)


def batches(seats: Sequence[Seat], rows: int, rng: np.random.Generator) -> Iterator[list[Seat]]:
    """Seats in batches of about equal length (padding is lost work), drawn from shuffled chunks, in random order."""
    order = rng.permutation(len(seats))
    groups = []
    for start in range(0, len(order), CHUNK):
        chunk = sorted(order[start : start + CHUNK].tolist(), key=lambda i: len(seats[i][0].streams[seats[i][1]]))
        groups += [chunk[i : i + rows] for i in range(0, len(chunk), rows)]
    for group in rng.permutation(len(groups)).tolist():
        yield [seats[i] for i in groups[group]]


@torch.no_grad()
def held_out_figures(policy: Policy, seats: Sequence[Seat]) -> dict[str, float]:
    """Perplexity per token of replies and per word of what is said, and the belief's log-loss before and after all
    messages."""
    nats = spoken = tokens = words = 0.0
    first: list[float] = []
    last: list[float] = []
    batch = collate(seats, {}, silent_roles=INSIDERS)
    for rows in micro_batches(batch, torch.arange(batch.shape[0]), 16384):
        part = batch.select(rows).to(policy.device)
        out = forward(policy, part, 1.0, {"reply": False, "beliefs": False})
        mask = part.reply & part.imitate
        nats -= float(out.logprobs[mask].sum())
        tokens += int(mask.sum())
        spoken -= float(out.logprobs[mask & (part.kind == Kind.SPEECH)].sum())
        truth = -log_truth(part, out.beliefs)
        for row in range(len(rows)):
            asked = truth[part.row == row]
            if len(asked):
                episode, agent = seats[int(rows[row])]
                step = torch.tensor([b.step for b in episode.beliefs if b.listener == agent], device=asked.device)
                first.append(float(asked[step == step.min()].mean()))
                last.append(float(asked[step == step.max()].mean()))
    for episode, agent in seats:
        own = [t for t in episode.turns if t.agent == agent and not t.error and t.kind == TurnKind.SPEAK]
        words += sum(len(t.text.split()) for t in own)
    return {
        "perplexity_per_token": math.exp(nats / max(tokens, 1)),
        "perplexity_per_word": math.exp(spoken / max(words, 1)),
        "belief_log_loss_first": float(np.mean(first)) if first else 0.0,
        "belief_log_loss_last": float(np.mean(last)) if last else 0.0,
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
