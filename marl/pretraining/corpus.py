"""The base's training data: scripted and human games as rows of tokens."""

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from envs.core import END, TurnKind
from envs.dond.replies import MESSAGE
from envs.dond.rules import Context, Triple, in_test
from envs.human_dond import HumanSplit, HumanView, Split, Step, permuted, read_split, replay_all
from marl.agents.base import Player, uniform_beliefs
from marl.agents.text import TextAgent
from marl.common.errors import UserError, prefixed
from marl.learning.batch import Row, rows_of
from marl.model.tokens import StreamWriter, Tokens
from marl.pretraining.config import BaseConfig
from marl.rollout.games import env_maker, scripted, scripts_module
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import Game, draw_games
from marl.types import INSIDERS, Episode, Kind, Turn, answered

CORPUS, TOKENIZER, HELD_OUT, LISTENING, CHOICE = 101, 102, 103, 104, 105  # parts of the seed
ORDERS = tuple(itertools.permutations(range(3), 3))
# Steps that no game has: a text that the player alone reads (`StreamWriter.tell`), a reply that no loss learns.
ExtraStep = tuple[Literal["tell", "given"], str]
Steps = list[Step | ExtraStep]
CHUNK = 512  # rows that are sorted into batches of similar length


@dataclass
class _Sink:
    """A player that keeps every text it reads or says."""

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


def held_out_rows(env: Mapping[str, Any], tokens: Tokens, base: BaseConfig) -> list[Row]:
    games = draw_games(base.seed, HELD_OUT, count=min(base.games, max(base.games // 15, 64), 256))
    return scripted_rows(env["game"], variants(env, base.vary)[0], tokens, games, base.players)


def variants(env: Mapping[str, Any], vary: Mapping[str, Sequence[Any]]) -> list[Callable[[], Any]]:
    """Makers of the environment under every combination of the varied settings."""
    combinations = itertools.product(*([(name, value) for value in values] for name, values in vary.items()))
    return [env_maker({**env, **dict(settings)}) for settings in combinations]


@dataclass(frozen=True)
class Recorded:
    """Human dialogues replayed in the game, view by view."""

    steps: list[Steps]  # what each view reads and replies
    left_out: Counter[str]  # number of views by reason
    dialogues: list[str] = field(default_factory=list)  # of each view; twice where both views are here

    @property
    def texts(self) -> list[str]:
        return [step[1] for steps in self.steps for step in steps]

    def rows(self, tokens: Tokens) -> list[Row]:
        """Lists one row a view, as an episode with one known seat."""
        return [human_row(steps, tokens, index) for index, steps in enumerate(self.steps)]

    def first(self, games: int) -> "Recorded":
        """The views of the first so many dialogues; of all of them for 0."""
        kept = {*list(dict.fromkeys(self.dialogues))[: games or None]}
        views = [i for i, dialogue in enumerate(self.dialogues) if dialogue in kept]
        return Recorded([self.steps[i] for i in views], self.left_out, [self.dialogues[i] for i in views])


def recorded(
    folder: str,
    split: Split,
    games: Sequence[Callable[[], Any]],
    base: BaseConfig = BaseConfig(),
    permute: np.random.Generator | None = None,
    refuse: Callable[[HumanView], str] = lambda view: "",
    add: Callable[[HumanView, Triple, list[Step]], Steps] = lambda view, order, steps: [*steps],
    cut: Callable[[HumanView], HumanView] = lambda view: view,
) -> Recorded:
    """The views of a split, replayed in the game's variants in turn.

    The training split is filtered by the settings of `base`. `permute` renames the items of each view at random, with
    `hold_out` never into a test context. `refuse`: why a view is left out, in any split; empty to keep it. `add`: what
    a player reads beside the game, from the view, the order of its renamed items (`permuted`) and its steps. `cut`:
    what of a dialogue is shown. Raises UserError if there are fewer than `human_games` dialogues.
    """
    environments = [make() for make in games]
    found = _read(folder, split)
    reasons = [_unwanted(view, split, base) or refuse(view) for view in found.usable]
    wanted = [view for view, reason in zip(found.usable, reasons, strict=True) if not reason]
    left_out = found.skipped + Counter(filter(None, reasons))
    if split == "train" and base.human_games:
        chosen = _drawn({view.dialogue: None for view in wanted}, base, folder)
        left_out["not drawn"] = sum(view.dialogue not in chosen for view in wanted)
        wanted = [view for view in wanted if view.dialogue in chosen]
    place = {view.index: i for i, view in enumerate(found.usable)}
    steps: list[Steps] = []
    dialogues: list[str] = []
    for view in wanted:
        shown = renamed = cut(view)
        order = ORDERS[0]
        if permute is not None:
            ways = [(permuted(shown, order), order) for order in ORDERS]
            ways = [way for way in ways if not _held_out(way[0], split, base)]
            renamed, order = ways[permute.integers(len(ways))]
            if renamed is shown:  # its items cannot be renamed
                order = ORDERS[0]
        replayed, refused = replay_all([renamed], environments[place[view.index] % len(environments)])
        steps += [add(shown, order, each) for each in replayed]
        dialogues += [view.dialogue] * len(replayed)
        left_out += refused
    return Recorded(steps, left_out, dialogues)


def _held_out(view: HumanView, split: Split, base: BaseConfig) -> bool:
    """Tells whether training must leave out a view, since it is of a test context."""
    return base.hold_out and split == "train" and in_test(Context(view.counts, (view.values, view.partner_values)))


def _unwanted(view: HumanView, split: Split, base: BaseConfig) -> str:
    """Says why the settings of `base` leave out a view of a split; empty if they keep it."""
    if _held_out(view, split, base):
        return "test context"
    if split == "train" and base.deals_only and not view.agree:
        return "no deal"
    if split == "train" and base.keep == "nonzero" and not view.reward:
        return "scored 0"
    return ""


def _drawn(dialogues: Iterable[str], base: BaseConfig, folder: str) -> set[str]:
    """Draws the `human_games` dialogues to learn from. Raises UserError if there are fewer."""
    every = list(dialogues)
    if base.human_games > len(every):
        raise UserError(
            f"base.human_games={base.human_games}: data.dond={folder} has {len(every)} dialogues to learn from "
            "under these settings. Choose fewer, or 0 for all"
        )
    rng = np.random.default_rng([base.seed, CHOICE])
    return {every[i] for i in rng.permutation(len(every))[: base.human_games]}


def _read(folder: str, split: Split) -> HumanSplit:
    with prefixed(f"data.dond={folder}: ", OSError, ValueError):
        return read_split(folder, split)


def data_files(folder: str | Path) -> dict[str, str]:
    """Digests of the human data's files. Raises UserError for malformed files."""
    folder = Path(folder)
    _read(str(folder), "all")
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest()[:16] for p in sorted(folder.glob("*.txt"))}


def human_row(steps: Sequence[Step | ExtraStep], tokens: Tokens, index: int) -> Row:
    """Writes a person's view of a dialogue as a model's row: an episode with one known seat, `you`."""
    message = f"{MESSAGE} "
    writer, turns = StreamWriter(tokens), []
    for number, step in enumerate(steps):
        if step[0] == "observe":
            writer.observe(step[1], step[2], number)
        elif step[0] == "tell":
            writer.tell(step[1])
        elif step[0] == "given":
            writer.cue()
            writer.reply(tokens.encode(step[1]), Kind.SPEECH)
        else:
            writer.cue()
            ids = tuple(tokens.encode(step[1]))
            start = writer.reply(ids, Kind.SPEECH)
            span = (len(message), len(step[1]) - len(f" {END}")) if step[1].startswith(message) else (0, 0)
            body, zeros = tokens.within(ids, span), (0.0,) * len(ids)
            turns.append(Turn("you", "negotiator", number, TurnKind.SPEAK, step[1], ids, start, zeros, body=body))
    beliefs = answered(uniform_beliefs("you", "negotiator", writer.asked), {})  # without the partner's claims
    episode = Episode(
        seed=index, players={"you": "human"}, roles={"you": "negotiator"}, streams={"you": writer.stream},
        turns=tuple(turns), beliefs=tuple(beliefs), payments=(), outcome={}, steps=len(steps),
    )  # fmt: skip
    return episode, "you"


def scripted_texts(
    game: str, variants: Sequence[Callable[[], Any]], seed: int, games: int, players: str = ""
) -> list[str]:
    """Every text read or said in scripted games, for a tokenizer."""
    module, sinks = scripts_module(game), []

    def make(player_seed: int, role: str) -> Player:
        sinks.append(_Sink(module.make_player(players or module.DEFAULT, player_seed, role)))
        return sinks[-1]

    agent = TextAgent("scripted", make)
    for number, make_env in enumerate(variants):
        drawn = draw_games(seed, TOKENIZER, number, count=games // len(variants))
        rollout(drawn, everyone(agent), make_env, 64)
    return [text for sink in sinks for text in sink.texts]


def scripted_rows(
    game: str, make_env: Callable[[], Any], tokens: Tokens, games: Sequence[Game], players: str = ""
) -> list[Row]:
    """Plays scripted games and returns them as a language model would have met them, one row a seat."""
    agent = scripted(game, players, tokens)
    episodes = rollout(games, everyone(agent), make_env, 64)
    return rows_of(episodes, {agent.name})


def scripted_chunks(
    game: str,
    variants: Sequence[Callable[[], Any]],
    tokens: Tokens,
    base: BaseConfig,
    players: str,
    path: tuple[int, ...],
    wanted: int,
) -> Iterator[list[Row]]:
    """Yields rows of scripted games, played as they are needed: about CHUNK at a time, or as few as are `wanted`.

    `path`: numbers that, with the base's seed, decide which games are drawn.
    """
    size = len(variants[0]().possible_agents)
    for chunk in itertools.count():
        games = draw_games(base.seed, *path, chunk, count=max(min(CHUNK, wanted) // size, 1))
        yield scripted_rows(game, variants[chunk % len(variants)], tokens, games, players)


def rows_with_beliefs(chunks: Iterable[Sequence[Row]]) -> Iterator[list[Row]]:
    """Keeps the rows with beliefs, and those of imposters beside them, whose play must not drift either."""
    for rows in chunks:
        asked = [({b.listener for b in episode.beliefs}, episode, agent) for episode, agent in rows]
        yield [(e, a) for listeners, e, a in asked if a in listeners or (listeners and e.roles[a] in INSIDERS)]


def chunk_batches(chunks: Iterable[Sequence[Row]], base: BaseConfig, path: tuple[int, ...]) -> Iterator[list[Row]]:
    """Yields batches of the rows of each chunk."""
    for chunk, rows in enumerate(chunks):
        yield from batches(rows, base.rows, np.random.default_rng([base.seed, *path, chunk]))


def human_epochs(
    folder: str, games: Sequence[Callable[[], Any]], tokens: Tokens, base: BaseConfig, **ways: Any
) -> Iterator[list[Row]]:
    """Batches of the human dialogues, in another order in each pass, and with items renamed if so set. `ways`: see
    `recorded`; they may draw anew in each pass."""
    rows: list[Row] = []
    for epoch in itertools.count():
        rng = np.random.default_rng([base.seed, CORPUS, epoch])
        if not rows or base.permute_items or ways:
            permute = rng if base.permute_items else None
            rows = recorded(folder, "train", games, base, permute, **ways).rows(tokens)
        yield from batches(rows, base.rows, rng)


def batches(rows: Sequence[Row], size: int, rng: np.random.Generator) -> Iterator[list[Row]]:
    """Yields batches of `size` rows of similar length (less padding) from shuffled chunks, in random order."""
    order = rng.permutation(len(rows))
    groups = []
    for start in range(0, len(order), CHUNK):
        chunk = sorted(order[start : start + CHUNK].tolist(), key=lambda i: len(rows[i][0].streams[rows[i][1]]))
        groups += [chunk[i : i + size] for i in range(0, len(chunk), size)]
    for group in rng.permutation(len(groups)).tolist():
        yield [rows[i] for i in groups[group]]
