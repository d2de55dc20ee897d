"""Computes how many games and seeds tell two arms apart.

`python -m experiments.studies.plan a=0.55 b=0.59 between=0.02`.

For arms that are compared by a rate, such as the crew's win rate, seed by seed, as published tables do. What it leaves
out: what the two runs of a seed share (a base, the evaluation's games), which lets fewer do, and figures that are no
rates.
"""

from omegaconf import DictConfig, ListConfig

from experiments.launch.command import command
from experiments.launch.terminal import say
from marl.common.errors import UserError, check_count
from marl.metrics.stats import games_needed


@command("plan")
def main(cfg: DictConfig) -> None:
    """A line for each number of seeds."""
    found = {name: cfg[name] for name in ("a", "b", "between", "power", "level")}
    for name, value in found.items():
        if type(value) not in (int, float) or not (0 < value < 1 or (name, value) == ("between", 0)):
            raise UserError(f"{name}={value}: must be a number between 0 and 1")
    a, b, between, power, level = found.values()
    if a == b:
        raise UserError(f"a={a} b={b}: equal rates cannot be told apart")
    seeds = cfg.seeds if isinstance(cfg.seeds, ListConfig) else [cfg.seeds]
    for count in seeds:
        check_count(count, "seeds")
    say(f"rates of {a:g} and {b:g}, standard deviation over seeds {between:g}: found in {power:.0%} of")
    say(f"experiments at the {level:.0%} level with")
    say(f"{'seeds':>7}  {'games a seed':>13}  {'games an arm':>13}")
    for count in seeds:
        games = games_needed(a, b, count, between if count > 1 else 0.0, power, level)
        each, whole = ("too few seeds", "") if games is None else (f"{games:,}", f"{games * count:,}")
        note = "  (of one run only: says nothing of other seeds)" if count == 1 else ""
        say(f"{count:>7}  {each:>13}  {whole:>13}{note}")


if __name__ == "__main__":
    main()
