"""Measures how fast games are played and learned from, beside what people write first.

    make bench                                        # or: python -m experiments.benchmark
    python -m experiments.benchmark bench=quick       # seconds: that it runs
    python -m experiments.benchmark bench=gpu         # 1 to 500 million parameters, several tokens of speech at a time
    python -m experiments.benchmark bench=gpu deterministic=true out=runs/same_bits  # what the same bits cost there

Models have random weights, so that they speak at length, and play with themselves. It measures this engine at each of
`points`: a rollout of all games at once, then one PPO pass with the listening loss over `update_rows` rows. On
`baseline_games` games of the first point's model it also measures `generate` of transformers for every turn, and TRL's
trainer around that (baselines.py). All engines sample from the same distribution in the same games; what is sampled
differs, and so do games' lengths a little: compare tokens a second. All of it is measured once, then again.

It prints a table, and writes to `out`: benchmark.json (every repeat, with settings, versions and hardware) and
speed.svg, both after each measurement. Memory is how far the process's resident set rose (a GPU: torch's memory).
"""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from omegaconf import DictConfig

from experiments.bench.baselines import has_trl
from experiments.bench.figures import draw, table
from experiments.bench.measure import Bench
from experiments.bench.pieces import game_alone
from experiments.bench.settings import Settings
from experiments.launch.command import command
from experiments.launch.terminal import say
from experiments.setup.config import make, plain
from experiments.setup.devices import pick_device, set_deterministic, set_threads
from marl.common.errors import check_writable
from marl.common.files import write_json
from marl.model.tokens import Tokens, train_tokenizer
from marl.pretraining.corpus import scripted_texts
from marl.rollout.games import env_maker, game_module
from marl.storage.folder import git_commit, hardware


@command("benchmark")
def main(cfg: DictConfig) -> None:
    """Measures, prints and writes; see the top of this file."""
    given = plain(cfg)
    known = Settings.__dataclass_fields__
    settings = make(Settings, {name: value for name, value in given.items() if name in known}, "benchmark")
    set_threads(cfg.threads)
    set_deterministic(cfg.deterministic)
    game = given["env"]["game"]
    env = {**given["env"], **given["long_games"].get(game, {})}
    device, out, make_env = pick_device(cfg.device), Path(given["out"]), env_maker(env)
    check_writable(out, "out")
    texts = scripted_texts(game, [make_env], settings.seed, games=30)
    tokens = Tokens(train_tokenizer(texts, game_module(game).COMPACT_TOKENS, settings.vocab_size))
    bench, alone = Bench(env, settings, device, tokens), game_alone(make_env, settings.random_games, settings.seed)
    versions = {name: version(name) for name in ("torch", "transformers", *(["trl"] if has_trl() else []))}
    about = {"env": env, "device": str(device), "settings": asdict(settings), "hardware": hardware(),
             "versions": versions, "git_commit": git_commit(), "game_alone": alone}  # fmt: skip

    def written() -> None:
        write_json(out / "benchmark.json", {**about, "rows": bench.data()})
        draw(bench.data(), out / "speed.svg")

    bench.measure(written)
    say(table(bench.data()))
    say(f"the game alone, random players: {alone['agent_steps_per_second']:,.0f} agent-steps/s of one core")
    say(f"written: {out / 'benchmark.json'}, {out / 'speed.svg'}")


if __name__ == "__main__":
    main()
