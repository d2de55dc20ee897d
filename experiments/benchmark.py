"""How fast games are played and learned from, beside what people write first and beside this machine's limit.

    make bench                                        # or: python -m experiments.benchmark
    python -m experiments.benchmark bench=quick       # seconds: that it runs
    python -m experiments.benchmark env=dond minutes=30 'axes={games: [16, 64]}'

In one process, on the same games token for token (workload.py; random weights, nothing is trained):

- this engine: a rollout of all games at once and one PPO pass with listening loss, at a centre in float32 and in
  bfloat16 (log-probabilities in float32), then around it in float32, one thing changed at a time: games, context,
  players, width of the model;
- at the centre, on games cut after `baseline_cut` steps, beside this engine on the same: `generate` for every turn over
  the whole history; the same with each seat's cache kept; TRL's GRPOTrainer around the first (baselines.py);
- the limit: counted products and bytes at the rates of this machine, measured on the spot (measure.py);
- what needs no model, alone: the game with random players, as `env` sets it, and the planners' solver (pieces.py).

Printed, and written to `out`: benchmark.json after every repeat (each repeat; medians with lowest and highest), and the
chart cost.svg after every point. Started again with the same settings, on the same machine and commit, it goes on from
there (`minutes` is of each start); else what `out` holds is put aside as benchmark-1.json. What a figure is:

- phases: exclusive, so that shares sum to 1 over collecting and learning. `game` is the rules and the writing of what
  players read, which cannot be told apart; `text` the decoding of replies; `prefill` reads what is new, `decode` a
  reply's tokens after its first, both through the layers; `sampling` the output layer and the draw; `beliefs` the
  output layer at questions (reading them is prefill); in `generate` the output layer belongs to prefill and decode, and
  `sampling` is whatever else the call does. On a GPU each phase is waited for, which costs a little.
- update: measured over at most `update_rows` rows and scaled to all by their tokens.
- on_processor: processor seconds that the process got in a second. Below 1 on a CPU somebody else had the machine, and
  the times mean little; the line says so.
- memory: how far the process's resident set (a GPU: torch's memory) rose in all that an engine did; and this engine's
  cache in bytes a slot, and the rise that was predicted before it played (marl/memory.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from experiments.baselines import INSTALL_TRL, GenerateAgent, trl_iteration, trl_version
from experiments.benchmark_figures import draw, line, ratios, summary, table, targets
from experiments.cli import command
from experiments.evaluate import pick_device, set_threads
from experiments.measure import PeakMemory, Shape, Stopwatch, UpdateCounts, limits, measure_rates
from experiments.pieces import game_alone, solver_alone
from experiments.terminal import say
from experiments.workload import ReplayAgent, Script, record
from marl.advantages import Credit, add_advantages
from marl.agents import Agent
from marl.batch import collate, seats_of
from marl.config import make, plain
from marl.engine import size_of
from marl.errors import UserError, check_writable
from marl.files import read_json, write_json
from marl.games import env_maker, game_module, seats
from marl.losses import Loss
from marl.losses.listening import ListeningLoss
from marl.losses.policy import PolicyLoss
from marl.losses.value import ValueLoss
from marl.memory import free_memory, learning_bytes, playing_bytes
from marl.policy import Policy, half, tiny_lm
from marl.pretrain import scripted_texts
from marl.rewards import add_rewards
from marl.rewards.game import GameReward
from marl.rollout import everyone, rollout
from marl.runs import git_commit, hardware
from marl.tokens import Tokens, train_tokenizer
from marl.types import BY_TOKEN, Episode, Kind, TokenBatch
from marl.update import UpdateConfig, update

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FIGURES = "benchmark.json"
INNER = 3  # a layer's inside is so many times as wide as the hidden states


@dataclass(frozen=True)
class Centre:
    """Of the axes; `width` is that of the model's hidden states."""

    slots: int
    context: int
    players: int
    width: int


@dataclass(frozen=True)
class Axes:
    """Values of what is changed, one thing at a time."""

    games: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    players: tuple[int, ...] = ()
    width: tuple[int, ...] = ()


@dataclass(frozen=True)
class Settings:
    """What `conf/benchmark.yaml` and `conf/bench/` set beside the game."""

    centre: Centre
    axes: Axes
    layers: int
    vocab_size: int
    reply_tokens: int
    repeats: int
    update_rows: int
    baseline_rows: int
    random_games: int
    solver_iterations: int
    baseline_cut: int | None = None
    minutes: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        numbers = {f"axes.{name}": n for name, values in asdict(self.axes).items() for n in values}
        numbers |= {f"centre.{name}": n for name, n in asdict(self.centre).items()}
        for name in (
            "layers",
            "reply_tokens",
            "repeats",
            "update_rows",
            "baseline_rows",
            "baseline_cut",
            "random_games",
            "solver_iterations",
        ):
            numbers[name] = getattr(self, name)
        for name, n in numbers.items():
            if n is not None and n < 1:
                raise UserError(f"{name}={n}: must be at least 1")


@dataclass(frozen=True)
class Point:
    """What is played and by whom: games at once, players of each, tokens of a slot, the model's width, its numbers."""

    games: int
    players: int
    context: int
    width: int
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.games} games of {self.players}, context {self.context}, width {self.width}, {self.dtype}"


def points_of(settings: Settings, players: int | None) -> list[Point]:
    """The centre, then what lies around it. `players`: how many play where the game allows no other number."""
    c = settings.centre
    seated = players or c.players
    centre = Point(max(c.slots // seated, 1), seated, c.context, c.width)
    points = [centre, replace(centre, dtype="bfloat16")]
    points += [replace(centre, games=n) for n in settings.axes.games]
    points += [replace(centre, context=n) for n in settings.axes.context]
    if players is None:
        points += [replace(centre, players=n, games=max(c.slots // n, 1)) for n in settings.axes.players]
    points += [replace(centre, width=n) for n in settings.axes.width]
    return list(dict.fromkeys(points))


@dataclass
class Row:
    """One engine on one point: each repeat's figures. `skipped` says why there are none."""

    engine: str
    point: Point
    parameters: int
    played: dict[str, int] = field(default_factory=dict)  # Script.facts
    repeats: list[dict[str, Any]] = field(default_factory=list)
    skipped: str = ""

    def data(self) -> dict[str, Any]:
        return asdict(self) | {"summary": summary(self.repeats)}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Row:
        """The row that `data` was made of."""
        return cls(**{name: data[name] for name in cls.__dataclass_fields__} | {"point": Point(**data["point"])})


class Bench:
    """What measurements share, and what they found so far."""

    def __init__(
        self,
        env: Mapping[str, Any],
        cut: str,
        settings: Settings,
        device: torch.device,
        tokens: Tokens,
        out: Path,
        points: Sequence[Point],
    ) -> None:
        """`cut`: the game's setting that ends it early; `points`: all that will be measured."""
        self.env, self.cut, self.settings, self.device, self.tokens, self.out = env, cut, settings, device, tokens, out
        self.around: list[Row] = []
        self.baselines: list[Row] = []
        self.alone: dict[str, Any] = {}
        self.cell = 0.0  # bytes of a token in a batch; known from the first
        self._most: dict[tuple[int, int], int] = {}  # by players and context: the most games of any point
        for point in points:
            shape = (point.players, point.context)
            self._most[shape] = max(point.games, self._most.get(shape, 0))
        self._cuts: dict[tuple[int, int], int] = {}
        self._script: tuple[tuple[int, ...], Script] | None = None
        self._began = time.monotonic()
        self._made_by = made_by(env, settings, device)

    def go_on(self) -> None:
        """Takes what an earlier start with the same settings measured, or puts another's figures aside."""
        path = self.out / FIGURES
        if not path.exists():
            return
        found = read_json(path)
        if any(found.get(name) != value for name, value in self._made_by.items()):
            aside = next(p for n in count(1) if not (p := self.out / f"{path.stem}-{n}.json").exists())
            path.rename(aside)
            say(f"{path} was of other settings, another machine or another commit: it is now {aside}")
            return
        self.around, self.baselines = (
            [Row.of(row) for row in found[part] if row["repeats"]] for part in ("around", "baselines")
        )
        self.alone = found["alone"]
        say(f"going on: {sum(len(row.repeats) for row in self.around + self.baselines)} repeats were measured before")

    # -- What is played, and by which model ----------------------------------------------------------------------------

    def script(self, point: Point, cut: int | None = None) -> Script:
        """The games of a point, ended after `cut` at the latest. The last one's are kept: points share them.

        Points with other numbers of games end theirs at the same step: where the longest of the most games fits.
        """
        shape = (point.players, point.context)
        if shape not in self._cuts and self._most.get(shape, 0) > point.games:
            self._cuts[shape] = self._record(replace(point, games=self._most[shape]), self.env[self.cut]).cut
        limit = min(self._cuts.get(shape, self.env[self.cut]), cut or self.env[self.cut])
        key = (point.games, point.players, point.context, limit)
        if self._script is None or self._script[0] != key:
            self._script = (key, self._record(point, limit))
        return self._script[1]

    def _record(self, point: Point, limit: int) -> Script:
        env, s = {**self.env, self.cut: limit}, self.settings
        if "players" in env:
            env["players"] = point.players
        say(f"recording {point.games} games of {point.players} that fit {point.context} tokens")
        return record(env, self.cut, point.context, point.games, self.tokens, s.reply_tokens, s.seed)

    def policy(self, point: Point, dtype: torch.dtype = torch.float32) -> Policy:
        """Random weights, the same every time; the value head stays in float32."""
        lm = tiny_lm(
            self.tokens.size,
            hidden_size=point.width,
            intermediate_size=INNER * point.width,
            layers=self.settings.layers,
            context=point.context,
        )
        policy = Policy(lm, self.tokens).to(self.device).eval()
        return half(policy) if dtype == torch.bfloat16 else policy

    # -- Measurements --------------------------------------------------------------------------------------------------

    def predicted_bytes(self, point: Point) -> int:
        """How far memory will rise in this engine, known before it plays: the cache, then either the widest pass or the
        batch and what the update keeps."""
        config, dtype = self.policy(point).lm.config, DTYPES[point.dtype]
        slots, update = point.games * point.players, UpdateConfig(bf16=point.dtype == "bfloat16")
        size = size_of(config, point.context)
        cache = slots * size.slot * dtype.itemsize // torch.float32.itemsize
        playing = playing_bytes(config, self.device, slots=slots, context=point.context, dtype=dtype)
        learning = learning_bytes(
            config, self.device, rows=max(update.token_budget // point.context, 1), length=point.context,
            replies=point.context // 2, bf16=update.bf16,
        )  # fmt: skip
        batch = round(self.cell * point.context * (slots + min(slots, self.settings.update_rows)))  # and its copy
        return cache + max(playing, batch + learning + 3 * size.weights)  # gradients and two moments

    def warm_up(self, point: Point) -> None:
        """Every engine once on a single game: what is imported and chosen at first use is no engine's cost."""
        single = replace(point, games=1)
        script = self.script(single)
        for dtype in DTYPES:
            self.ours(script, replace(single, dtype=dtype))
        for keep_cache in (False, True):
            self.generate(script, single, keep_cache)
        if trl_version() is not None:
            self.trl(script, single)

    def measure_alone(self, make_env: Callable[[], Any]) -> None:
        """What needs no model."""
        if self.alone:
            return
        s = self.settings
        games = [game_alone(make_env, s.random_games, s.seed) for _ in range(s.repeats)]
        self.alone = {"game": games, "solver": solver_alone(s.solver_iterations, s.seed)}

    def measure_around(self, points: Sequence[Point]) -> None:
        """This engine on every point."""
        for point in points:
            row = self.row(self.around, "ours", point)
            if not self.has_room(row):
                continue
            for repeat in range(len(row.repeats), self.settings.repeats):
                if self.spent(row):
                    break
                script = self.script(point)
                row.played = script.facts()
                row.repeats.append(watched(self.ours, script, point))
                self.tell(str(point), row, repeat)
            draw([row.data() for row in self.around], self.out / "cost.svg")

    def measure_baselines(self, point: Point) -> None:
        """All engines on the centre's games, cut; they take turns, so that a slow minute strikes them all."""
        engines: dict[str, Callable[[Script], dict[str, Any]]] = {
            "ours": lambda script: self.ours(script, point),
            "generate": lambda script: self.generate(script, point, keep_cache=False),
            "generate, cache kept": lambda script: self.generate(script, point, keep_cache=True),
        }
        trl = trl_version()
        if trl is not None:
            engines["TRL"] = lambda script: self.trl(script, point)
        rows = [row for name in engines if self.has_room(row := self.row(self.baselines, name, point))]
        for repeat in range(self.settings.repeats):
            for row in rows:
                if len(row.repeats) > repeat or self.spent(row):
                    continue
                script = self.script(point, self.settings.baseline_cut)
                row.played = script.facts()
                row.repeats.append(watched(engines[row.engine], script))
                self.tell("baselines' games", row, repeat)
        if trl is None:
            self.row(self.baselines, "TRL", point).skipped = f"not installed: {INSTALL_TRL}"

    def row(self, rows: list[Row], engine: str, point: Point) -> Row:
        """The engine's among these, which gets one where it has none."""
        known = [row for row in rows if (row.engine, row.point) == (engine, point)]
        if not known:
            known = [Row(engine, point, Shape.of(self.policy(point)).parameters)]
            rows += known
        return known[0]

    def has_room(self, row: Row) -> bool:
        """Whether this engine's memory at the point is free: others take more, and are not asked where it is not."""
        needed, free = self.predicted_bytes(row.point), free_memory(self.device)
        if needed > free:
            row.skipped = f"needs about {needed / 1e9:.0f} GB of memory, and {free / 1e9:.0f} GB are free"
            say(f"{row.engine}, {row.point}: {row.skipped}")
        return needed <= free

    def ours(self, script: Script, point: Point) -> dict[str, Any]:
        """This engine once: a rollout and an update, and the limit of both."""
        dtype, shape = DTYPES[point.dtype], Shape.of(self.policy(point))
        player, learner = self.policy(point, dtype), self.policy(point)
        predicted = self.predicted_bytes(point)
        watch, memory = Stopwatch(self.device), PeakMemory(self.device)
        agent = ReplayAgent(player, script, point.context, watch)
        episodes = self.play(agent, script, watch)
        with watch.phase("collation"):
            filled = add_rewards(episodes, {"game": GameReward()})
            batch = add_advantages(collate(seats_of(filled, {"ours"}), {"game": 1.0}), Credit(), 0.0)
        self.cell = self.cell or sum(getattr(batch, name).nbytes for name in BY_TOKEN) / batch.tokens.numel()
        work = self.learn(learner, batch, dtype, watch)
        peak, cache = memory.rise(), agent.engine.cache.nbytes
        rates = measure_rates(shape, script.seats, UpdateConfig().token_budget, cache, dtype, self.device)
        limit = limits(shape, rates, dtype.itemsize, agent.engine.counts, script.sampled, script.answers, work)
        read = {phase: c.tokens for phase, c in agent.engine.counts.items()}
        extra = {
            "rates": asdict(rates), "limit": limit, "peak_bytes": peak, "cache_bytes": cache,
            "predicted_bytes": predicted,
        }  # fmt: skip
        return {"seconds": watch.seconds, "read": read, **extra}

    def learn(self, policy: Policy, batch: TokenBatch, dtype: torch.dtype, watch: Stopwatch) -> UpdateCounts:
        """One PPO pass over the batch: measured on `update_rows` rows, and scaled to all."""
        some = batch.select(torch.arange(min(self.settings.update_rows, batch.shape[0])))
        losses: dict[str, Loss] = {"policy": PolicyLoss(), "value": ValueLoss(), "listening": ListeningLoss()}
        config = UpdateConfig(bf16=dtype == torch.bfloat16)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0)
        passes: list[int] = []
        with watch.phase("update"):
            update(policy, None, some, losses, optimizer, config, torch.Generator().manual_seed(0), passes.append)
        lengths = (batch.kind != Kind.PAD).sum(1)
        scale = int(lengths.sum()) / int((some.kind != Kind.PAD).sum())
        watch.seconds["update"] *= scale
        return UpdateCounts(
            tokens=int(lengths.sum()),
            attended=int((lengths * (lengths + 1) // 2).sum()),
            outputs=int(batch.reply.sum()) + len(batch.row),
            passes=round(len(passes) * scale),
            steps=config.minibatches,
        )

    def generate(self, script: Script, point: Point, keep_cache: bool) -> dict[str, Any]:
        """`generate` of transformers once: a rollout."""
        watch, memory = Stopwatch(self.device), PeakMemory(self.device)
        agent = GenerateAgent(self.policy(point), script, watch, self.settings.baseline_rows, keep_cache)
        self.play(agent, script, watch)
        return {"seconds": watch.seconds, "read": {}, "peak_bytes": memory.rise()}

    def trl(self, script: Script, point: Point) -> dict[str, Any]:
        """TRL once: a rollout and an update."""
        watch, memory = Stopwatch(self.device), PeakMemory(self.device)
        script.check(trl_iteration(self.policy(point), script, watch, self.settings.baseline_rows))
        return {"seconds": watch.seconds, "read": {}, "peak_bytes": memory.rise()}

    def play(self, agent: Agent, script: Script, watch: Stopwatch) -> list[Episode]:
        """The recorded games in self-play, all at once."""
        with watch.on_tokens(self.tokens), watch.phase("bookkeeping"):
            episodes = rollout(script.games, everyone(agent), watch.env(script.make_env), len(script.games))
        script.check(episodes)
        return episodes

    # -- What is told --------------------------------------------------------------------------------------------------

    def spent(self, row: Row) -> bool:
        """Whether no time is left for another repeat of the row, which then says so if it has none."""
        minutes = self.settings.minutes
        over = minutes is not None and time.monotonic() - self._began > 60 * minutes
        if over and not row.repeats:
            row.skipped = "the time set as `minutes` was spent"
        return over

    def tell(self, label: str, row: Row, repeat: int) -> None:
        """Completes the repeat that was just measured, says a line and writes all that is known."""
        row.repeats[-1]["figures"] = figures(row.repeats[-1], row.played)
        clock = (time.monotonic() - self._began) / 60
        said = f"{row.engine}, {label}, repeat {repeat + 1} of {self.settings.repeats}: {line(row.repeats[-1])}"
        say(f"[{clock:5.1f} min] {said}")
        self.write()

    def write(self) -> None:
        around, baselines = [row.data() for row in self.around], [row.data() for row in self.baselines]
        found = {
            **self._made_by,
            "minutes": self.settings.minutes,
            "around": around,
            "baselines": baselines,
            "alone": self.alone,
            "ratios": ratios(around, baselines),
            "targets": targets(around, baselines, self.alone),
        }
        write_json(self.out / FIGURES, found)


def made_by(env: Mapping[str, Any], settings: Settings, device: torch.device) -> dict[str, Any]:
    """What figures must have in common to stand in one file."""
    versions = {name: version(name) for name in ("torch", "transformers")} | {"trl": trl_version()}
    known: dict[str, Any] = {
        "game": env["game"],
        "env": dict(env),
        "device": str(device),
        "settings": {name: value for name, value in asdict(settings).items() if name != "minutes"},
        "hardware": hardware(),
        "versions": versions,
        "git_commit": git_commit(),
    }
    return json.loads(json.dumps(known))  # as a file has them


def watched(measure: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """One repeat, with the processor seconds that the process got in a second of it."""
    wall, processor = time.perf_counter(), time.process_time()
    repeat = measure(*args)
    return {**repeat, "on_processor": (time.process_time() - processor) / (time.perf_counter() - wall)}


def figures(repeat: Mapping[str, Any], played: Mapping[str, int]) -> dict[str, float]:
    """Speeds of one repeat, its whole time, its memory, and how many times its limit it took (where there is one)."""
    s, read = repeat["seconds"], repeat["read"]
    total = sum(s.values())
    collected = total - s["collation"] - s["update"]
    made = {
        "seconds": total,
        "rollout_seconds": collected,
        "games_per_second": played["games"] / collected,
        "tokens_per_second": played["tokens"] / collected,
        "on_processor": repeat["on_processor"],
    }
    for name, phase, n in (
        ("prefill_tokens", "prefill", read.get("prefill", 0)),
        ("decode_tokens", "decode", read.get("decode", 0)),
        ("answers", "beliefs", played["answers"]),
    ):
        if n:  # short games may ask nothing, and say nothing
            made[f"{name}_per_second"] = n / s[phase]
    if s["update"]:
        made["update_tokens_per_second"] = played["tokens"] / s["update"]
        made["games_per_second_with_update"] = played["games"] / total
    if repeat["peak_bytes"] is not None:
        made["peak_bytes"] = repeat["peak_bytes"]
        made["peak_bytes_per_slot"] = repeat["peak_bytes"] / played["slots"]
    if "cache_bytes" in repeat:
        made["predicted_bytes"] = repeat["predicted_bytes"]
        made["cache_bytes_per_slot"] = repeat["cache_bytes"] / played["slots"]
    if "limit" in repeat:
        made["limit_seconds"] = sum(phase["limit"] for phase in repeat["limit"].values())
        made["times_limit"] = total / made["limit_seconds"]
        for phase, found in repeat["limit"].items():
            if s[phase]:
                made[f"{phase}_of_limit"] = found["limit"] / s[phase]
    return made


@command("benchmark")
def main(cfg: DictConfig) -> None:
    """Measures, prints and writes; see the top of this file."""
    set_threads(cfg.threads)
    given = plain(cfg)
    known = Settings.__dataclass_fields__
    settings = make(Settings, {name: value for name, value in given.items() if name in known}, "benchmark")
    game = given["env"]["game"]
    if game not in given["games"]:
        raise UserError(f"env.game={game}: games has no entry that says how its games are ended early")
    env = {**given["env"], **given["games"][game]["env"]}
    device, out = pick_device(cfg.device), Path(given["out"])
    points = points_of(settings, None if "players" in env else seats(env))
    check_writable(out, "out")
    texts = scripted_texts(game, [env_maker(given["env"])], settings.seed, games=100)
    tokens = Tokens(train_tokenizer(texts, game_module(game).COMPACT_TOKENS, settings.vocab_size))
    bench = Bench(env, given["games"][game]["cut"], settings, device, tokens, out, points)
    limit = f"at most about {settings.minutes:g} minutes" if settings.minutes is not None else "no limit of time"
    say(f"{len(points)} points of this engine, baselines at the first; {settings.repeats} repeats each; {limit}")
    bench.go_on()
    bench.measure_alone(env_maker(given["env"]))
    bench.warm_up(points[0])
    bench.measure_around(points[:2])  # the centre in both precisions
    bench.measure_baselines(points[0])
    bench.measure_around(points[2:])
    bench.write()
    say(table([row.data() for row in bench.around], [row.data() for row in bench.baselines], bench.alone))
    say(f"written: {out / FIGURES}, {out / 'cost.svg'}")


if __name__ == "__main__":
    main()
