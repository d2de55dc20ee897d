"""How fast games are played and learned from, beside what people write first and beside this machine's limit.

    make bench                                        # or: python -m experiments.benchmark
    python -m experiments.benchmark bench=quick       # seconds: that it runs
    python -m experiments.benchmark bench=gpu         # 1 to 500 million parameters, several tokens of speech at a time
    python -m experiments.benchmark bench=gpu deterministic=true out=runs/same_bits  # what the same bits cost there
    python -m experiments.benchmark env=dond minutes=30 axes.context=[] axes.width=[]

On the same games token for token (workload.py; random weights, nothing is trained):

- this engine: a rollout of all games at once and one PPO pass with listening loss, at a centre in float32 and in
  bfloat16 (log-probabilities in float32), then around it in float32, one thing changed at a time: width of the model,
  games, context, players; on a CPU each point in a process of its own (`apart`);
- in one process, on `baseline_games` games, beside this engine on the same: `generate` for every turn over the whole
  history; the same with each seat's cache kept; TRL's GRPOTrainer around the first (baselines.py);
- the limit: counted products and bytes at the rates of this machine, measured on the spot (measure.py);
- alone: decode steps of `step_rows` full slots at the axis's contexts; and what needs no model: the game with random
  players, as `env` sets it, and the planners' solver (pieces.py).

All of it is measured once, then again: a slow quarter of an hour is no single point's. Printed, and written to `out`:
benchmark.json after every repeat (each repeat; medians with lowest and highest), and the chart cost.svg after every
point. Started again with the same settings, on the same machine and commit, it goes on from there (`minutes` is of each
start). What a figure is:

- games: each ends where its longest stream has just filled the context; games that end long before by themselves are
  left out. `mean_stream` is over all seats, also of those that were killed early.
- calls: `generate` over whole histories, and TRL's rollout, compute every `baseline_every`-th call, others in each
  repeat; the time of each phase that needs the model is scaled to all calls by its tokens (`GenerateAgent.scale`).
  This engine, and `generate` with its cache, compute all.
- phases: exclusive, so that shares sum to 1 over collecting and learning. `game` is the rules and the writing of what
  players read, which cannot be told apart; `text` the decoding of replies; `prefill` reads what is new, `decode` a
  reply's tokens after its first, `mixed` does both in one pass, all through the layers; `sampling` the output layer and
  the draw, which are decode's where several tokens are written at a time (`decode_steps`); `beliefs` the output layer
  at questions (reading them is prefill); in `generate` the output layer belongs to prefill and decode, and `sampling`
  is whatever else the call does; where it keeps no cache, what it reads for belief answers alone is `questions`. A loop
  that answers them in one pass over each finished game would read them once: between the two ratios that are printed.
  On a GPU each phase is waited for, which costs a little.
- rows: in one game one player at a time speaks, so that a pass that decodes has at most a row for each game. Its limit
  is that of products with as many rows as passes had on average.
- update: policy, value and listening in one pass (no reference, and no rows with other names, which take passes of
  their own where they are trained); measured over at most `update_rows` rows, in passes of at most `update_tokens`
  tokens, and scaled to all by their tokens; TRL's too, with whole games, one at least in all and in a pass.
- on_processor: processor seconds that the process got in a second. Where it is below 1 on a CPU, the machine is busy
  and the times mean little; the line says so.
- memory: how far the process's resident set (a GPU: torch's memory) rose in all that an engine did; and this engine's
  cache in bytes a slot, and the rise that was predicted before it played (decoding/memory.py). A process that has done
  other things takes more: what it gave back lies between what lives. Hence `apart`.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from experiments.bench.bench import Bench
from experiments.bench.figures import table
from experiments.bench.settings import FIGURES, Settings, baseline_points, points_of
from experiments.launch.command import command
from experiments.launch.terminal import say
from experiments.setup.config import make, plain
from experiments.setup.devices import pick_device, set_deterministic, set_threads
from marl.common.errors import check_writable
from marl.model.tokens import Tokens, train_tokenizer
from marl.pretraining.corpus import scripted_texts
from marl.rollout.games import env_maker, game_module, seats


@command("benchmark")
def main(cfg: DictConfig) -> None:
    """Measures, prints and writes; see the top of this file."""
    set_threads(cfg.threads)
    given = plain(cfg)
    known = Settings.__dataclass_fields__
    settings = make(Settings, {name: value for name, value in given.items() if name in known}, "benchmark")
    set_deterministic(settings.deterministic)
    game = given["env"]["game"]
    env = {**given["env"], **given["games"].get(game, {})}
    device, out = pick_device(cfg.device), Path(given["out"])
    players = None if "players" in env else seats(env)
    points, beside = points_of(settings, players), baseline_points(settings, players)
    check_writable(out, "out")
    texts = scripted_texts(game, [env_maker(given["env"])], settings.seed, games=100)
    tokens = Tokens(train_tokenizer(texts, game_module(game).COMPACT_TOKENS, settings.vocab_size))
    bench = Bench(env, settings, device, tokens, out, points, beside)
    limit = f"at most about {settings.minutes:g} minutes" if settings.minutes is not None else "no limit of time"
    say(
        f"{len(points)} points of this engine, {len(beside)} beside baselines; {settings.repeats} repeats each; {limit}"
    )
    bench.go_on()
    bench.check()
    bench.measure_alone(env_maker(given["env"]))
    bench.warm_up(points[0])
    bench.measure()
    bench.write()
    say(table([row.data() for row in bench.around], [row.data() for row in bench.baselines], bench.alone))
    say(f"written: {out / FIGURES}, {out / 'cost.svg'}")


if __name__ == "__main__":
    main()
