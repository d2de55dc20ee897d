"""Measures rollouts and updates, this engine at every point, the baselines on fewer games; and a game's rules alone."""

import ctypes
import gc
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from envs.core import END, TurnKind
from experiments.bench.baselines import INSTALL_TRL, GenerateAgent, has_trl, trl_iteration
from experiments.bench.limits import Limits, clocked
from experiments.bench.settings import Point, Settings
from experiments.launch.terminal import say
from experiments.setup.devices import without_bf16
from marl.agents.base import Agent
from marl.agents.model import ModelAgent
from marl.common.errors import UserError
from marl.decoding.memory import Slots, check_memory, learning_bytes
from marl.learning.advantages import Credit, add_advantages
from marl.learning.batch import collate, rows_of
from marl.learning.config import UpdateConfig
from marl.learning.update import update
from marl.losses import Loss
from marl.losses.listening import ListeningLoss
from marl.losses.policy import PolicyLoss
from marl.losses.value import ValueLoss
from marl.model.policy import Policy, tiny_config, tiny_lm
from marl.model.tokens import Tokens
from marl.rewards import add_rewards
from marl.rewards.game import GameReward
from marl.rollout.games import env_maker, player_count
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from marl.types import Episode, Kind

OURS, GENERATE, TRL = "ours", "generate", "TRL"
INNER = 3  # a layer's inside is so many times as wide as the hidden states, unless a point says otherwise
DECODED = 32  # passes that decoding is measured over


@dataclass
class Row:
    """One engine at one point: each repeat's figures. `skipped` says why there are none."""

    engine: str
    point: Point
    parameters: int
    repeats: list[dict[str, float | None]] = field(default_factory=list)
    skipped: str = ""


class PeakMemory:
    """Bytes by which memory rose above where it stood at the start: the process's resident set (Linux only), or what
    torch allocated on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        gc.collect()  # caches and their layers know each other
        with suppress(OSError, AttributeError):  # another C library keeps what was freed
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # forgets the old peak
        self.before = torch.cuda.memory_allocated() if self.on_gpu else resident("VmRSS")

    def rise(self) -> int | None:
        """The rise of memory, in bytes; None where the system cannot tell."""
        now = torch.cuda.max_memory_allocated() if self.on_gpu else resident("VmHWM")
        return None if now is None or self.before is None else max(now - self.before, 0)


def resident(field: str) -> int | None:
    """A figure in bytes that Linux keeps of this process; None on other systems."""
    status = Path("/proc/self/status")
    found = re.search(rf"^{field}:\s+(\d+) kB", status.read_text() if status.exists() else "", re.MULTILINE)
    return int(found[1]) * 1024 if found else None


class Bench:
    """The game, the device, its limits and the tokens that all measurements share."""

    def __init__(
        self, env: Mapping[str, Any], settings: Settings, device: torch.device, tokens: Tokens, limits: Limits
    ) -> None:
        self.settings, self.device, self.tokens, self.limits = settings, device, tokens, limits
        self.make_env, self.players = env_maker(env), player_count(env)
        engines = [(OURS, point) for point in settings.points]
        if settings.baseline_games:
            beside = replace(settings.points[0], games=settings.baseline_games, dtype="float32")
            engines = list(dict.fromkeys([*engines, (OURS, beside), (GENERATE, beside), (TRL, beside)]))
        self.rows = [Row(engine, point, self.parameters(point)) for engine, point in engines]
        self.others: list[dict[str, Any]] = []  # rows of other points that were measured before

    def take_over(self, earlier: Sequence[Mapping[str, Any]]) -> None:
        """Takes what was measured before, as `data` has it."""
        own = {(row.engine, row.point): row for row in self.rows}
        for each in earlier:
            if row := own.get((each["engine"], Point(**each["point"]))):
                row.repeats = list(each["repeats"])
            else:
                self.others.append(dict(each))

    def measure(self, written: Callable[[], None]) -> None:
        """Measures everything that is missing once, and again as often as it is to be repeated; `written` is called
        after each. An engine plays a single game first, so that what is chosen at first use is not counted."""
        for row in self.rows:
            row.skipped = "" if len(row.repeats) >= self.settings.repeats else self.lacking(row)
        begun = set()
        for repeat in range(self.settings.repeats):
            for row in self.rows:
                if row.skipped or len(row.repeats) > repeat:
                    continue
                try:
                    if (row.engine, row.point.dtype) not in begun:
                        self.take(row.engine, replace(row.point, games=1))
                        begun.add((row.engine, row.point.dtype))
                    row.repeats.append(self.take(row.engine, row.point))
                except torch.OutOfMemoryError as error:
                    row.skipped = f"ran out of memory ({str(error).splitlines()[0]})"
                say(f"{row.engine}, {row.point}, repeat {repeat + 1}: {row.skipped or repeat_line(row.repeats[-1])}")
                written()

    def lacking(self, row: Row) -> str:
        """Returns why an engine cannot be measured; empty if it can."""
        if row.engine == TRL and not has_trl():
            return f"not installed: {INSTALL_TRL}"
        if row.point.dtype == "bfloat16" and (lacking := without_bf16(self.device)):
            return lacking
        config, point, bf16 = tiny_config(**self.shape(row.point)), row.point, row.point.dtype != "float32"
        rows = max(self.settings.update_tokens // point.context, 1)
        learning = learning_bytes(config, rows=rows, length=point.context, replies=point.context // 2, bf16=bf16)
        try:
            fit = check_memory(
                [Slots.of(config, point.context, self.players, bf16=bf16)], 4 * 4 * row.parameters,
                concurrency=point.games, setting="games", context=point.context, device=self.device, learning=learning,
            )  # fmt: skip
        except UserError as error:
            return str(error)
        return "" if fit.concurrency == point.games else f"not enough memory: {fit.line}"

    def parameters(self, point: Point) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in tiny_lm(**self.shape(point)).parameters())

    def shape(self, point: Point) -> dict[str, int]:
        """Returns the size of the point's model, as `tiny_config` takes it."""
        return {
            "vocab_size": point.vocab or self.tokens.size, "hidden_size": point.width, "context": point.context,
            "intermediate_size": point.inner or INNER * point.width, "layers": point.layers, "heads": point.heads,
            "kv_heads": point.kv_heads,
        }  # fmt: skip

    def take(self, engine: str, point: Point) -> dict[str, float | None]:
        """One repeat: speeds in tokens a second, and memory in bytes."""
        torch.manual_seed(self.settings.seed)  # of `generate`
        policy = Policy(tiny_lm(**self.shape(point)), self.tokens).to(self.device).eval()
        memory = PeakMemory(self.device)
        speeds = {OURS: self.ours, GENERATE: self.generate, TRL: self.trl}[engine](policy, point)
        return {**speeds, "peak_bytes": memory.rise()}

    def ours(self, policy: Policy, point: Point) -> dict[str, float | None]:
        """A rollout of all games at once, decoding alone, and one PPO pass with the listening loss over `update_rows`
        rows."""
        bf16 = point.dtype == "bfloat16"
        agent = ModelAgent(
            OURS, policy, slots=point.games * self.players, context=point.context, bf16=bf16,
            max_new_tokens=self.settings.reply_tokens, decode_steps=self.settings.decode_steps,
        )  # fmt: skip
        episodes, played = self.play(agent, point)
        played |= self.decode(agent, point)
        rewards = {"game": GameReward()}
        batch = collate(rows_of(add_rewards(episodes, rewards), {OURS}), rewards)
        batch = add_advantages(batch, rewards, Credit())
        batch = batch.select(torch.arange(min(self.settings.update_rows, batch.shape[0])))
        losses: dict[str, Loss] = {"policy": PolicyLoss(), "value": ValueLoss(), "listening": ListeningLoss()}
        config = UpdateConfig(bf16=bf16, token_budget=self.settings.update_tokens)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0)
        order = torch.Generator().manual_seed(0)
        seconds = clocked(lambda: update(policy, None, batch, losses, optimizer, config, order), self.device)
        speed = int((batch.kind != Kind.PAD).sum()) / seconds
        words = sum(p.numel() for p in policy.lm.get_input_embeddings().parameters())
        inside = sum(p.numel() for p in policy.lm.parameters()) - words
        share = self.limits.update_share(inside, speed, point.dtype)
        return {**played, "update_tokens_per_second": speed, "update_share": share}

    def decode(self, agent: ModelAgent, point: Point) -> dict[str, float | None]:
        """Decoding alone: one seat of each game speaks, behind half a context."""
        engine, steps = agent.engine, self.settings.decode_steps
        slots = [engine.allocate() for _ in range(point.games)]
        ids, start = [0] * len(slots), point.context // 2
        uniform = np.full((len(slots), steps), 0.5)

        def write(calls: int) -> None:
            """Makes `steps` passes a call, behind whatever the slots hold: it does not matter to speed."""
            for _ in range(calls):
                engine.lengths[slots] = start
                if steps > 1:
                    engine.write(slots, ids, [steps] * len(slots), uniform, 1.0)
                else:
                    engine.sample(engine.read(slots, [[0]] * len(slots)), [()] * len(slots), 1.0, uniform[:, 0])

        write(1)
        calls = -(-DECODED // steps)
        seconds = clocked(lambda: write(calls), self.device)
        passes = calls * steps / seconds
        weights = sum(p.nbytes for p in engine.policy.lm.parameters())
        cache = len(slots) * start * engine.cache.nbytes // (engine.slots * (point.context + 1))
        share = self.limits.decode_share(weights, cache, passes)
        return {"decode_passes_per_second": passes, "decode_share": share}

    def generate(self, policy: Policy, point: Point) -> dict[str, float | None]:
        """A rollout by `generate` of transformers."""
        agent = GenerateAgent(policy, self.settings.baseline_rows, point.context, self.settings.reply_tokens)
        return self.play(agent, point)[1]

    def trl(self, policy: Policy, point: Point) -> dict[str, float | None]:
        """A rollout and an update by TRL."""
        played: dict[str, float | None] = {}

        def collect(actor: Policy) -> list[Episode]:
            agent = GenerateAgent(actor, self.settings.baseline_rows, point.context, self.settings.reply_tokens)
            episodes, found = self.play(agent, point)
            played.update(found)
            return episodes

        learned = min(max(self.settings.update_rows // self.players, 1), point.games)
        sizes = {"learned": learned, "players": self.players}
        seconds, tokens = trl_iteration(policy, collect, sizes, point.context, self.settings.update_tokens)
        rollout_seconds = played["rollout_seconds"]
        assert rollout_seconds is not None
        return {**played, "update_tokens_per_second": tokens / (seconds - rollout_seconds)}

    def play(self, agent: Agent, point: Point) -> tuple[list[Episode], dict[str, float | None]]:
        """Self-play of the same games for every engine, all at once."""
        games, episodes = draw_games(self.settings.seed, count=point.games), []
        run = partial(rollout, games, everyone(agent), self.make_env, point.games)
        seconds = clocked(lambda: episodes.extend(run()), self.device)
        tokens = sum(len(stream) for episode in episodes for stream in episode.streams.values())
        return episodes, {
            "rollout_seconds": seconds,
            "rollout_tokens_per_second": tokens / seconds,
            "games_per_second": point.games / seconds,
            "mean_stream": tokens / (point.games * self.players),
        }

    def data(self) -> list[dict[str, Any]]:
        """All rows as they are written."""
        return [*map(asdict, self.rows), *self.others]


def repeat_line(repeat: Mapping[str, float | None]) -> str:
    """One repeat in a line."""
    update = repeat.get("update_tokens_per_second")
    learned = f", update {update:,.0f} tokens/s" if update else ""
    shares = [f"{part} {share:.3f}" for part in ("decode", "update") if (share := repeat.get(f"{part}_share"))]
    near = f"; shares of the device's limits: {', '.join(shares)}" if shares else ""
    return f"rollout {repeat['rollout_tokens_per_second']:,.0f} tokens/s{learned}{near}"


# --- The game alone ---------------------------------------------------------------------------------------------------
SAID = f"i did not do it {END}"


def game_alone(make_env: Callable[[], Any], games: int, seed: int) -> dict[str, float]:
    """Games of players who take any option and always say the same, one after another, in processor seconds.

    An agent-step is one living player in one call of `step`.
    """
    env, rng, agent_steps = make_env(), Random(seed), 0
    drawn = draw_games(seed, count=games)
    began = time.process_time()
    for game in drawn:
        observations, _ = env.reset(seed=game.seed)
        while env.agents:
            agent_steps += len(getattr(env, "living", env.agents))  # where players die, they stay in `agents`
            observations, *_ = env.step({agent: _any(seen, rng) for agent, seen in observations.items()})
    seconds = time.process_time() - began
    return {
        "games": games,
        "agent_steps": agent_steps,
        "games_per_second": games / seconds,
        "agent_steps_per_second": agent_steps / seconds,
    }


def _any(seen: dict[str, Any], rng: Random) -> str:
    if seen["turn"] == TurnKind.CHOOSE:
        return rng.choice(seen["options"])
    return SAID if seen["turn"] == TurnKind.SPEAK else ""
