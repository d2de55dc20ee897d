"""Measures how fast games are played and learned from, beside what people write first.

    make bench                                        # or: python -m experiments.benchmark
    python -m experiments.benchmark bench=quick       # seconds: that it runs
    python -m experiments.benchmark bench=gpu         # 1 to 500 million parameters, several tokens of speech at a time
    python -m experiments.benchmark bench=web         # how long people wait for a reply of the web page, and no more
    python -m experiments.benchmark bench=gpu deterministic=true out=runs/same_bits  # what the same bits cost there

Models have random weights, so that they speak at length, and play with themselves. It measures this engine at each of
`points`: a rollout of all games at once, then one PPO pass with the listening loss over `update_rows` rows. On
`baseline_games` games of the first point's model it also measures `generate` of transformers for every turn, and TRL's
trainer around that (baselines.py). All engines sample from the same distribution in the same games; what is sampled
differs, and so do games' lengths a little: compare tokens a second. All of it is measured once, then again.

Decoding alone and updates are compared with what the device can do, which is measured first (limits.py).

It prints a table, and writes to `out`: benchmark.json (every repeat, with settings, versions and hardware) and
speed.svg, both after each measurement. What is there already, with the same settings, versions, hardware and commit, is
kept, and only the rest is measured. Memory is how far the process's resident set rose (a GPU: torch's memory).
"""

from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from experiments.bench.baselines import has_trl
from experiments.bench.figures import draw, table
from experiments.bench.limits import Limits, measure_limits
from experiments.bench.measure import TRL, Bench, game_alone
from experiments.bench.settings import DTYPES, Settings
from experiments.launch.command import command
from experiments.launch.terminal import say
from experiments.setup.config import make, plain
from experiments.setup.devices import pick_device, set_deterministic, set_threads, without_bf16
from marl.common.errors import UserError, check_writable
from marl.common.files import canonical, fits, read_json, write_json
from marl.model.tokens import Tokens, train_tokenizer
from marl.pretraining.corpus import scripted_texts
from marl.rollout.games import env_maker, game_module
from marl.storage.folder import git_commit, hardware

PAGE = {"people": "people at once", "replies": "replies", "median": "median, s", "p95": "95 % within, s",
        "page": "the page itself, s"}  # fmt: skip
ANY = ("points", "repeats", "baseline_games")  # settings that change which rows there are, and not what is in them


@command("benchmark")
def main(cfg: DictConfig) -> None:
    """Measures, prints and writes; see the top of this file."""
    if "pages" in cfg:
        return measure_page(cfg)

    # Configure.
    given = plain(cfg)
    known = Settings.__dataclass_fields__
    settings = make(Settings, {name: value for name, value in given.items() if name in known}, "benchmark")
    set_threads(cfg.threads)
    set_deterministic(cfg.deterministic)
    game = given["env"]["game"]
    env = {**given["env"], **given["long_games"].get(game, {})}
    device, out, make_env = pick_device(cfg.device), Path(given["out"]), env_maker(env)

    # Check.
    check_writable(out, "out")
    texts = scripted_texts(game, [make_env], settings.seed, games=30)
    tokens = Tokens(train_tokenizer(texts, game_module(game).COMPACT_TOKENS, settings.vocab_size))

    # Measure, and write after each row.
    versions = {name: version(name) for name in ("torch", "transformers", *(["trl"] if has_trl() else []))}
    about = {"env": env, "device": str(device), "deterministic": cfg.deterministic, "settings": asdict(settings),
             "hardware": hardware(), "versions": versions, "git_commit": git_commit()}  # fmt: skip
    if before := measured_before(out / "benchmark.json", about):
        say(f"measured before: {out / 'benchmark.json'}. Remove it to measure all of it again.")
    dtypes = [dtype for dtype in DTYPES if dtype == "float32" or not without_bf16(device)]
    limits = before.get("limits") or asdict(measure_limits(device, dtypes))
    alone = before.get("game_alone") or game_alone(make_env, settings.random_games, settings.seed)
    about |= {"limits": limits, "game_alone": alone}
    bench = Bench(env, settings, device, tokens, Limits(**limits))
    bench.take_over(before.get("rows", []))

    def written() -> None:
        write_json(out / "benchmark.json", {**about, "rows": bench.data()})
        draw(bench.data(), out / "speed.svg")

    bench.measure(written)
    say(table(bench.data()))
    say(f"the game alone, random players: {alone['agent_steps_per_second']:,.0f} agent-steps/s of one core")
    speeds = ", ".join(f"{flops / 1e12:.3g} TFLOP/s in {dtype}" for dtype, flops in limits["flops"].items())
    say(f"the device's limits: {limits['bytes_per_second'] / 1e9:,.0f} GB/s copied, {speeds}")
    written()
    say(f"written: {out / 'benchmark.json'}, {out / 'speed.svg'}")


def measured_before(path: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what an earlier call with the same settings, versions, hardware and commit wrote; empty if none did."""
    if not path.exists():
        return {}
    found = read_json(path)
    form = {"settings": dict, "versions": dict, "rows": [dict], "limits": dict, "game_alone": dict}
    if not fits(found, form) or made_with(found) != made_with(about):
        return {}
    same_trl = found["versions"].get("trl") == about["versions"].get("trl")
    return {**found, "rows": [row for row in found["rows"] if same_trl or row["engine"] != TRL]}


def made_with(about: Mapping[str, Any]) -> str:
    """Everything that a figure of `about` depends on, as text. TRL's version concerns its own row alone."""
    settings = {name: value for name, value in about["settings"].items() if name not in ANY}
    versions = {name: value for name, value in about["versions"].items() if name != "trl"}
    names = ("env", "device", "deterministic", "hardware", "git_commit")
    return canonical([settings, versions, [about.get(name) for name in names]])


def measure_page(cfg: DictConfig) -> None:
    """Lets each of `crowds` play through the web page, writes `out`/benchmark.json after each, and prints a table."""
    try:
        from experiments import web_simulate
    except ImportError as error:
        raise UserError("bench=web needs the web page. Install it: pip install -e '.[dev,web]'") from error
    out, rows = Path(cfg.out), []
    check_writable(out, "out")
    about: dict[str, Any] = {"settings": plain(cfg), "hardware": hardware(), "git_commit": git_commit()}
    for crowd in cfg.crowds:
        games = {**crowd, "out": str(out / f"people-{crowd.people}")}
        rows.append(web_simulate.main(OmegaConf.create({**about["settings"]["pages"], **games})))
        write_json(out / "benchmark.json", {**about, "rows": rows})
    say("".join(heading.rjust(20) for heading in PAGE.values()))
    for row in rows:
        say("".join((f"{row[name]:.3g}" if name in row else "–").rjust(20) for name in PAGE))
    say(f"written: {out / 'benchmark.json'}")


if __name__ == "__main__":
    main()
