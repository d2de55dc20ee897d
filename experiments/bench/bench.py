"""Measures one engine on one workload."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedTokenizerBase

from experiments.bench.baselines import ALL_CALLS, INSTALL_TRL, GenerateAgent, trl_iteration, trl_version
from experiments.bench.figures import draw, line, ratios, summary
from experiments.bench.measure import (
    PeakMemory,
    Shape,
    Stopwatch,
    UpdateCounts,
    limits,
    measure_rates,
    on_processor,
    step_alone,
)
from experiments.bench.pieces import game_alone, solver_alone
from experiments.bench.settings import DTYPES, ENGINES, FIGURES, INNER, NO_ROOM, TRIED, Measure, Point, Settings
from experiments.bench.workload import ReplayAgent, Script, record
from experiments.launch.terminal import say
from experiments.setup.devices import set_deterministic, set_threads, without_bf16
from marl.agents.base import Agent
from marl.common.errors import UserError
from marl.common.files import read_json, reading, write_json
from marl.common.processes import end_with
from marl.decoding.memory import free_memory, learning_bytes, playing_bytes, readable
from marl.decoding.probes import size_of
from marl.learning.advantages import Credit, add_advantages
from marl.learning.batch import collate, seats_of
from marl.learning.config import UpdateConfig
from marl.learning.update import update
from marl.losses import Loss
from marl.losses.listening import ListeningLoss
from marl.losses.policy import PolicyLoss
from marl.losses.value import ValueLoss
from marl.model.policy import Policy, half, tiny_config, tiny_lm
from marl.model.tokens import Tokens
from marl.rewards import add_rewards
from marl.rewards.game import GameReward
from marl.rollout.rollout import everyone, rollout
from marl.storage.folder import git_commit, hardware
from marl.types import BY_TOKEN, Episode, Kind, TokenBatch


@dataclass
class Row:
    """One engine on one point: each repeat's figures. `skipped` says why there are none."""

    engine: str
    point: Point
    parameters: int
    played: dict[str, int] = field(default_factory=dict)  # Script.facts
    repeats: list[dict[str, Any]] = field(default_factory=list)
    skipped: str = ""
    tried: dict[str, float] = field(default_factory=dict)  # `generate`: seconds by rows of a call, tried on a few calls

    def data(self) -> dict[str, Any]:
        return asdict(self) | {"summary": summary(self.repeats)}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Row:
        """The row that `data` was made of."""
        return cls(**{name: data[name] for name in cls.__dataclass_fields__} | {"point": Point(**data["point"])})


class Bench:
    """State that measurements share, and what they found so far."""

    def __init__(
        self,
        env: Mapping[str, Any],
        settings: Settings,
        device: torch.device,
        tokens: Tokens,
        out: Path,
        points: Sequence[Point],
        beside: Sequence[Point] = (),
    ) -> None:
        """`points`: all that will be measured, the centre first, in both precisions; `beside`: those of the
        baselines."""
        self.env, self.settings, self.device, self.tokens, self.out = env, settings, device, tokens, out
        sizes = {p.width: size_of(self.config(p), p.context).weights // 4 for p in (*points, *beside)}  # in float32
        self.around = [Row("ours", point, sizes[point.width]) for point in points]
        self.baselines = [Row(engine, point, sizes[point.width]) for point in beside for engine in ENGINES]
        self.alone: dict[str, Any] = {}
        self.cell = 0.0  # bytes of a token in a batch; known from the first
        self._passes: dict[Point, tuple[int, int]] = {}  # what its passes take: playing, learning
        self._script: tuple[tuple[int, ...], Script] | None = None
        self._began = time.monotonic()
        self._made_by = made_by(env, settings, device)

    def go_on(self) -> None:
        """Takes over what an earlier start with the same settings measured. UserError for other figures in `out`."""
        path = self.out / FIGURES
        if not path.exists():
            return
        found = read_json(path)
        other = [name for name, value in self._made_by.items() if found.get(name) != value]
        if other:
            raise UserError(
                f"out={self.out}: its {FIGURES} has other {', '.join(other)}. Name another folder, or remove the file"
            )
        with reading(path):
            for rows, part in ((self.around, "around"), (self.baselines, "baselines")):
                known = {(row.engine, row.point): row for row in map(Row.of, found[part])}
                rows[:] = [known.get((row.engine, row.point), row) for row in rows]
            self.alone = found["alone"]
        say(f"going on: {sum(len(row.repeats) for row in self.around + self.baselines)} repeats were measured before")

    # -- What is played, and by which model ----------------------------------------------------------------------------

    def script(self, point: Point) -> Script:
        """The games of a point. The last one's are kept: points share them."""
        key = (point.games, point.players, point.context)
        if self._script is None or self._script[0] != key:
            say(f"recording {point.games} games of {point.players} that fill {point.context} tokens")
            self._script = (key, self.record(point))
        return self._script[1]

    def record(self, point: Point) -> Script:
        """The same anew. UserError where the game cannot be played so."""
        env = {**self.env, "players": point.players} if "players" in self.env else self.env
        return record(env, point.context, point.games, self.tokens, self.settings.reply_tokens, self.settings.seed)

    def shape(self, point: Point) -> dict[str, int]:
        """Returns the size of the point's model, as `tiny_config` takes it."""
        shape = self.settings.shape(point.width)
        return {
            "hidden_size": shape.width, "intermediate_size": INNER * shape.width, "layers": shape.layers,
            "heads": shape.heads, "kv_heads": shape.kv_heads, "context": point.context,
        }  # fmt: skip

    def config(self, point: Point) -> LlamaConfig:
        return tiny_config(self.tokens.size, **self.shape(point))

    def policy(self, point: Point, dtype: torch.dtype = torch.float32) -> Policy:
        """Random weights, the same every time; the value head stays in float32."""
        policy = Policy(tiny_lm(self.tokens.size, **self.shape(point)), self.tokens).to(self.device).eval()
        return half(policy) if dtype == torch.bfloat16 else policy

    # -- Measurements --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises UserError if a point cannot be played, or the centre does not fit into memory."""
        centre, kinds = self.around[0].point, ("players", "context") if "players" in self.env else ("context",)
        for point in {(row.point.players, row.point.context): row.point for row in self.around}.values():
            changed = [
                f"axes.{name}={getattr(point, name)}" for name in kinds if getattr(point, name) != getattr(centre, name)
            ]
            try:
                self.record(replace(point, games=1))
            except UserError as error:
                where = changed or [f"centre.{name}={getattr(point, name)}" for name in kinds]
                raise UserError(f"{', '.join(where)}: {error}") from error
        if not self.has_room(self.around[0]):
            slots = self.settings.centre.slots
            raise UserError(f"centre.slots={slots}, centre.context={centre.context}: {self.around[0].skipped}")

    def cache_bytes(self, point: Point) -> int:
        """Bytes of all slots."""
        slot = size_of(self.config(point), point.context).slot * DTYPES[point.dtype].itemsize // torch.float32.itemsize
        return point.games * point.players * slot

    def predicted_bytes(self, point: Point) -> int:
        """How far memory will rise in this engine, known before it plays: the cache, then either the widest pass or the
        batch and what the update keeps."""
        config, dtype = self.config(point), DTYPES[point.dtype]
        slots, update = point.games * point.players, self.update_config(DTYPES[point.dtype])
        size = size_of(config, point.context)
        if point not in self._passes:
            self._passes[point] = (
                playing_bytes(config, slots=slots, context=point.context, dtype=dtype),
                learning_bytes(
                    config, rows=max(update.token_budget // point.context, 1), length=point.context,
                    replies=point.context // 2, bf16=update.bf16,
                ),
            )  # fmt: skip
        playing, learning = self._passes[point]
        cell = self.cell if self.device.type == "cpu" else 0.0  # the batch stays in main memory
        batch = round(cell * point.context * (slots + min(slots, self.settings.update_rows)))  # and its copy
        return self.cache_bytes(point) + max(playing, batch + learning + 3 * size.weights)  # gradients and two moments

    def warm_up(self, point: Point) -> None:
        """Every engine once on a single game: what is imported and chosen at first use is no engine's cost."""
        single = replace(point, games=1)
        script = self.script(single)
        for dtype in DTYPES:
            self.ours(script, replace(single, dtype=dtype))
        rows, calls = self.settings.baseline_rows[0], self.calls(0)
        for keep_cache in (False, True):
            self.generate(script, single, keep_cache, rows, calls)
        if trl_version() is not None:
            self.trl(script, single, rows, calls)

    def measure_alone(self, make_env: Callable[[], Any]) -> None:
        """Measures what needs no model."""
        if self.alone:
            return
        s = self.settings
        games = [game_alone(make_env, s.random_games, s.seed) for _ in range(s.repeats)]
        self.alone = {"game": games, "solver": solver_alone(s.solver_iterations, s.seed), "steps": []}

    def measure(self) -> None:
        """Everything once, then again, as often as it is to be repeated."""
        for repeat in range(self.settings.repeats):
            self.measure_steps(repeat)
            self.measure_around(self.around[:2], repeat)
            self.measure_baselines(repeat)
            self.measure_around(self.around[2:], repeat)

    def measure_steps(self, repeat: int) -> None:
        """A repeat of decode steps alone, over the contexts, by the centre's model."""
        if len(self.alone["steps"]) > repeat or self.over():
            return
        s, centre, made = self.settings, self.around[0].point, []
        for context in sorted({centre.context, *s.axes.context}):
            point = replace(centre, context=context)
            needed = 2 * (s.step_rows + 1) * size_of(self.config(point), context).slot  # slots, and what a pass gathers
            if needed < free_memory(self.device):
                made.append(step_alone(self.policy(point), s.step_rows, context, s.decode_steps, self.device))
            else:
                say(
                    f"a decode step of {s.step_rows} rows of {context}: needs {needed / 1e9:.0f} GB of memory, left out"
                )
        self.alone["steps"].append(made)
        told = ", ".join(f"{step['context']}: {1000 * step['seconds']:.1f} ms" for step in made)
        say(f"a decode step of {s.step_rows} rows, by context: {told}")

    def measure_around(self, rows: Sequence[Row], repeat: int) -> None:
        """A repeat of this engine on each of these."""
        for row in rows:
            if self.is_due(row, repeat):
                alone = self.settings.apart and self.device.type == "cpu"
                measure = self.ours_apart if alone else self.ours
                self.take(row, self.script(row.point), repeat, partial(measure, point=row.point))
                draw([row.data() for row in self.around], self.out / "cost.svg")

    def measure_baselines(self, repeat: int) -> None:
        """A repeat of all engines on the same games."""
        for row in self.baselines:
            if row.engine == "TRL" and trl_version() is None:
                row.skipped = f"not installed: {INSTALL_TRL}"
            elif self.is_due(row, repeat):
                if row.engine == "ours":
                    measure: Measure = partial(self.ours, point=row.point)
                elif row.engine == "TRL":
                    measure = partial(self.trl, point=row.point, rows=self.best_rows(row), calls=self.calls(repeat))
                else:
                    kept = row.engine != "generate"
                    calls = ALL_CALLS if kept else self.calls(repeat)
                    measure = partial(
                        self.generate, point=row.point, keep_cache=kept, rows=self.best_rows(row), calls=calls
                    )
                self.take(row, self.script(row.point), repeat, measure)

    def calls(self, repeat: int) -> range:
        """Selects the calls that are computed of those that read whole histories: other ones in each repeat."""
        every = self.settings.baseline_every
        return range(repeat * every // self.settings.repeats, sys.maxsize, every)

    def is_due(self, row: Row, repeat: int) -> bool:
        """Returns True if this repeat is to be measured now; otherwise a row without repeats says why."""
        if row.point.dtype != "float32" and (lacking := without_bf16(self.device)):
            row.skipped = lacking
            return False
        return len(row.repeats) <= repeat and self.has_room(row) and not self.spent(row)

    def take(self, row: Row, script: Script, repeat: int, measure: Measure) -> None:
        """Measures a repeat of the row; where a GPU's memory runs out, what needed it is left out."""
        row.played, row.skipped = script.facts(), ""
        try:
            row.repeats.append(watched(measure, script))
        except (torch.OutOfMemoryError, BrokenProcessPool) as error:
            row.skipped = f"ran out of memory ({str(error).splitlines()[0]})"
            say(f"{row.engine}, {row.point}: {row.skipped}")
        else:
            self.tell(row, repeat)

    def best_rows(self, row: Row) -> int:
        """How many rows in one call of `generate` were fastest, tried on a few calls: spread over the games, or, where
        caches are kept, the first ones. TRL plays with the first baseline's."""
        if row.engine == "TRL":
            row = next(each for each in self.baselines if (each.engine, each.point) == ("generate", row.point))
        rows = self.settings.baseline_rows
        if len(rows) == 1:
            return rows[0]
        if not row.tried:
            script, kept, every = self.script(row.point), row.engine != "generate", self.settings.baseline_every
            few = range(max(script.steps // TRIED, 1)) if kept else range(every // 2, sys.maxsize, TRIED * every)
            for n in rows:
                tried = self.generate(script, row.point, kept, n, few)
                row.tried[str(n)] = sum(tried["seconds"].values())
            told = ", ".join(f"{n}: {seconds:.1f} s" for n, seconds in row.tried.items())
            say(f"{row.engine}, rows of a call, tried on a few calls: {told}")
        return int(min(row.tried, key=row.tried.__getitem__))

    def has_room(self, row: Row) -> bool:
        """Returns True if this engine's memory at the point is free. Baselines take more, and are skipped too if it is
        not."""
        models = 2 * size_of(self.config(row.point), row.point.context).weights  # who plays, and who learns
        free = free_memory(self.device)

        needed = self.cache_bytes(row.point) + models
        if needed <= free:
            needed = self.predicted_bytes(row.point) + models
        if needed > free and not row.repeats and not row.skipped.startswith(NO_ROOM):
            row.skipped = f"{NO_ROOM} {readable(needed)} of memory, and {readable(free)} are free"
            say(f"{row.engine}, {row.point}: {row.skipped}")
        return needed <= free

    def ours(self, script: Script, point: Point) -> dict[str, Any]:
        """This engine once: a rollout and an update, and the limit of both."""
        dtype = DTYPES[point.dtype]
        player, learner = self.policy(point, dtype), self.policy(point)
        shape, predicted = Shape.of(learner), self.predicted_bytes(point)
        watch, memory = Stopwatch(self.device), PeakMemory(self.device)
        agent = ReplayAgent(player, script, point.context, watch, self.settings.decode_steps)
        episodes = self.play(agent, script, watch)
        with watch.phase("collation"):
            rewards = {"game": GameReward()}
            filled = add_rewards(episodes, rewards)
            batch = add_advantages(collate(seats_of(filled, {"ours"}), rewards), rewards, Credit())
        self.cell = self.cell or sum(getattr(batch, name).nbytes for name in BY_TOKEN) / batch.tokens.numel()
        work = self.learn(learner, batch, dtype, watch)
        peak, cache, counts = memory.rise(), agent.engine.cache.nbytes, agent.engine.counts
        rates = measure_rates(
            shape, counts["decode"].rows, counts["mixed"].rows, script.seats,
            self.settings.update_tokens, cache, dtype, self.device,
        )  # fmt: skip
        limit = limits(shape, rates, dtype.itemsize, counts, script.sampled, script.answers, work)
        return {
            "seconds": watch.seconds, "read": {phase: c.tokens for phase, c in counts.items()},
            "counts": {phase: asdict(c) for phase, c in counts.items()}, "rates": asdict(rates), "limit": limit,
            "peak_bytes": peak, "cache_bytes": cache, "predicted_bytes": predicted,
        }  # fmt: skip

    def ours_apart(self, script: Script, point: Point) -> dict[str, Any]:
        """`ours` in a process of its own, which records the same games again."""
        given = (self.env, self.settings, self.device, self.tokens.tokenizer, self.out, point, torch.get_num_threads())
        with ProcessPoolExecutor(1, get_context("spawn"), end_with, (os.getpid(),)) as process:
            repeat, played = process.submit(alone, *given).result()
        assert played == script.facts(), (played, script.facts())
        return repeat

    def update_config(self, dtype: torch.dtype) -> UpdateConfig:
        """Settings of the measured update."""
        return UpdateConfig(bf16=dtype == torch.bfloat16, token_budget=self.settings.update_tokens)

    def learn(self, policy: Policy, batch: TokenBatch, dtype: torch.dtype, watch: Stopwatch) -> UpdateCounts:
        """One PPO pass over the batch: measured on `update_rows` rows, and scaled to all."""
        some = batch.select(torch.arange(min(self.settings.update_rows, batch.shape[0])))
        losses: dict[str, Loss] = {"policy": PolicyLoss(), "value": ValueLoss(), "listening": ListeningLoss()}
        config = self.update_config(dtype)
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

    def generate(self, script: Script, point: Point, keep_cache: bool, rows: int, calls: range) -> dict[str, Any]:
        """`generate` of transformers once, `rows` at a time: a rollout."""
        watch, memory = Stopwatch(self.device), PeakMemory(self.device)
        agent = GenerateAgent(self.policy(point), script, watch, rows, keep_cache, calls)
        self.play(agent, script, watch)
        if not keep_cache:
            agent.scale(watch.seconds)
        return {"seconds": watch.seconds, "read": {}, "peak_bytes": memory.rise(), "calls": calls_of(agent)}

    def trl(self, script: Script, point: Point, rows: int, calls: range) -> dict[str, Any]:
        """TRL once: a rollout and an update."""
        watch, memory, s = Stopwatch(self.device), PeakMemory(self.device), self.settings
        policy = self.policy(point)
        episodes, agent = trl_iteration(policy, script, watch, rows, s.update_tokens, s.update_rows, calls)
        script.check(episodes)
        return {"seconds": watch.seconds, "read": {}, "peak_bytes": memory.rise(), "calls": calls_of(agent)}

    def play(self, agent: Agent, script: Script, watch: Stopwatch) -> list[Episode]:
        """The recorded games in self-play, all at once."""
        with watch.on_tokens(self.tokens), watch.phase("bookkeeping"):
            episodes = rollout(script.games, everyone(agent), watch.env(script.make_env), len(script.games))
        script.check(episodes)
        return episodes

    # -- What is told --------------------------------------------------------------------------------------------------

    def spent(self, row: Row) -> bool:
        """Returns True if no time is left for another repeat of the row; a row without repeats says so."""
        if self.over() and not row.repeats:
            row.skipped = "the time set as `minutes` was spent"
        return self.over()

    def over(self) -> bool:
        minutes = self.settings.minutes
        return minutes is not None and time.monotonic() - self._began > 60 * minutes

    def tell(self, row: Row, repeat: int) -> None:
        """Completes the repeat that was just measured, says a line and writes all that is known."""
        row.repeats[-1]["figures"] = figures(row.repeats[-1], row.played)
        clock = (time.monotonic() - self._began) / 60
        said = f"{row.engine}, {row.point}, repeat {repeat + 1} of {self.settings.repeats}: {line(row.repeats[-1])}"
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
        }
        write_json(self.out / FIGURES, found)


def made_by(env: Mapping[str, Any], settings: Settings, device: torch.device) -> dict[str, Any]:
    """Settings and versions that figures must share to stand in one file."""
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


def calls_of(agent: GenerateAgent) -> dict[str, int]:
    """The number of its calls that were computed."""
    return {"all": agent.work["calls"], "computed": agent.computed["calls"]}


def watched(measure: Measure, script: Script) -> dict[str, Any]:
    """Measures one repeat, and what it got of the processors, unless it says so itself."""
    with on_processor() as share:
        repeat = measure(script)
    return {"on_processor": share[0], **repeat}


def alone(
    env: Mapping[str, Any],
    settings: Settings,
    device: torch.device,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    point: Point,
    threads: int,
) -> tuple[dict[str, Any], dict[str, int]]:
    """A repeat of this engine at a point, and what was played: all that a new process does, but for a single game that
    warms it up."""
    set_threads(threads)
    set_deterministic(settings.deterministic)
    bench = Bench(env, settings, device, Tokens(tokenizer), out, [point])
    single = replace(point, games=1)
    bench.ours(bench.script(single), single)
    script = bench.script(point)
    return watched(partial(bench.ours, point=point), script), script.facts()


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
        "seconds_per_game": collected / played["games"],
        "seconds_per_1000_tokens": 1000 * collected / played["tokens"],
        "on_processor": repeat["on_processor"],
    }
    for name, phase, n in (
        ("prefill_tokens", "prefill", read.get("prefill", 0)),
        ("decode_tokens", "decode", read.get("decode", 0)),
        ("mixed_tokens", "mixed", read.get("mixed", 0)),
    ):
        if n and s[phase]:  # short games may say nothing
            made[f"{name}_per_second"] = n / s[phase]
    if (asked := s["beliefs"] + s["questions"]) and played["answers"]:  # short games may ask nothing
        made["answers_per_second"] = played["answers"] / asked
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
        decode = repeat["counts"]["decode"]
        if decode["passes"]:
            made["decode_rows"] = decode["tokens"] / decode["passes"]
    return made
