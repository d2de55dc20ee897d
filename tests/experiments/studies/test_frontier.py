"""The frontier's shortcut against games that were really played, and its reading of human dialogues by hand."""

import copy
import csv
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from envs import dond_v0
from envs.dond import environment as dond_environment
from envs.dond import rules as dond_rules
from envs.dond import texts as dond_texts
from experiments.setup.spec import play_spec
from experiments.studies import frontier
from experiments.studies.frontier import (
    Entrant,
    cell_of,
    compared,
    human_proposals,
    human_situations,
    mean_of,
    outcomes,
)
from marl.common.errors import UserError
from marl.metrics.stats import bootstrap_mean
from marl.model.policy import Policy
from marl.planning.planner import PlannerConfig, PlanningAgent, Reader
from marl.rollout.cast import alternating
from marl.rollout.games import env_maker, scripted
from marl.rollout.rollout import rollout
from marl.rollout.seeds import draw_games
from marl.storage.checkpoint import folder_digest, save_policy
from tests.composing import cases, composed_once
from tests.human_dialogues import write
from tests.marl.planners import negotiator

# Both views of the deal, as the published file holds out a dialogue.
TEST = "\n".join(
    f"<input> {own} </input> <dialogue> {talk} </dialogue> "
    f"<output> item0=0 </output> <partner_input> {other} </partner_input>"
    for own, talk, other in (
        ("1 0 4 2 1 2", "YOU: i would like 4 hats <eos> THEM: deal <eos> YOU: <selection>", "1 4 4 1 1 2"),
        ("1 4 4 1 1 2", "THEM: i would like 4 hats <eos> YOU: deal <eos> THEM: <selection>", "1 0 4 2 1 2"),
    )
)
ENV = {"game": "dond", "style": "compact", "objective": 0.5, "max_entries": 12}
settings = composed_once("frontier", "progress=false", "threads=1", "data.dond=DIR")


def planner(strength: float, others: str = "plan") -> PlanningAgent:
    how = PlannerConfig(lambdas=(strength,), others=others, iterations=10)
    return PlanningAgent("player", negotiator(), how, "dond", slots=12, context=1024, max_new_tokens=24)


def test_games_played_once_say_what_every_lambda_would_have_played() -> None:
    """Outcomes read from games of the anchor equal those of games in which a planner with that lambda really played.
    The two kinds of game differ in the planner's claims alone."""
    policy, drawn = negotiator(), draw_games(3, 1, count=6)

    def games(player: PlanningAgent) -> list:
        return rollout(drawn, alternating(player, scripted("dond")), env_maker(ENV), 12)

    arms = {"plan_0.3": PlannerConfig(lambdas=(0.3,), iterations=10)}
    entrant = Entrant("anchor", 0, policy, Path(), "", arms)
    anchor, compared = Reader(policy, 1024, 1.0), 0
    for as_it_is, planned in zip(games(planner(np.inf, "anchor")), games(planner(0.3)), strict=True):
        found = outcomes(as_it_is, entrant, anchor)
        made = next((t.planned for t in planned.turns if t.planned), None)
        if made is None or None in planned.outcome["claims"]:
            assert found["plan_0.3"] == (0.0, 0.0)
            continue
        compared += 1
        agent = next(name for name, player in planned.players.items() if player == "player")
        seat, facts = dond_environment.AGENTS.index(agent), planned.facts
        theirs = planned.outcome["claims"][1 - seat]
        mine = dond_rules.rest(theirs, facts["counts"])
        worth = dond_rules.points(mine, facts["values"][seat]) + 0.5 * dond_rules.points(
            theirs, facts["values"][1 - seat]
        )
        agreed = made.plan[dond_rules.allocations(facts["counts"]).index(mine)]
        assert found["plan_0.3"] == pytest.approx((agreed * worth, agreed), abs=1e-4)
        own = made.anchor[dond_rules.allocations(facts["counts"]).index(mine)]
        assert found["anchor"] == pytest.approx((own * worth, own), abs=1e-4)
    assert compared >= 1


def test_human_proposals_are_read_as_they_stood(tmp_path: Path) -> None:
    policy = negotiator()
    views, situations = human_situations(str(write(tmp_path, test=TEST)), ENV, policy, None)
    assert [view.index for view in views] == [0, 1] and len(situations) == 2
    for view, situation in zip(views, situations, strict=True):
        assert situation.opening == dond_texts.prompt(view.counts, view.values, 0.5, dond_v0.Style.COMPACT)
        assert situation.stream[-1:] == tuple(policy.tokens.format.cue)
        assert [words for _, words in situation.talk if words] == list(view.messages)
        they_proposed = view.turns[-1][0] == "THEM"
        assert ((False, None) in situation.talk) == they_proposed and (True, None) not in situation.talk
        assert policy.tokens.decode(situation.stream).count("them: [propose]") == they_proposed
        assert [len(a) for a in situation.answers] == [11] * 3
        np.testing.assert_allclose([a.sum() for a in situation.answers], 1.0, atol=1e-5)


@cases(r"""
lambdas=[] | lambdas=\[\]: must be a list of at least one
lambdas=0.1 | lambdas=0.1: must be a list of at least one
variants.plan=3 | variants.plan=3: must be what differs
env.style=natural | env.style=natural: .*must be compact
lambdas=[-1] | planner.lambdas=.*-1.*each 0
games=1 | games=1: must be a whole number, at least 2
proposals=0 | proposals=0: must be a whole number, at least 2
opponents=[nobody] | no scripted negotiator 'nobody'
objectives=[2] | env.objective
variants.two={lambdas:[0.1,1]} | variants.two.lambdas=\[0.1, 1\]: every variant has those of lambdas
lambdas=[0.12345678,0.12345679] | lambdas=.*: some are the same in six digits
algo.temperature=0.3 | algo.temperature=0.3: all play as they speak
planner.choose=best | planner.choose=best: claims are weighed by the plan; must be sample
""")
def test_mistakes_are_refused_before_any_model(
    overrides: list[str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(frontier, "base_policy", lambda *args, **settings: pytest.fail("a model was trained"))
    with pytest.raises(UserError, match=said):
        frontier.main(settings(f"data.dond={tmp_path}", *overrides))


def test_runs_of_another_base_are_no_comparison(tmp_path: Path) -> None:
    policy, cfg = negotiator(), settings("compare=x-*", f"runs={tmp_path}")
    here = tmp_path / "bases" / "here"
    save_policy(here, policy, {"game": "dond"})
    for name, arm, base in (("x-full-s1", "full", "here"), ("x-ppo-s2", "ppo", "there")):
        save_policy(tmp_path / name / "policy", policy, {"game": "dond"})
        (tmp_path / name / "run.json").write_text(json.dumps({"arm": arm, "seeds": [int(name[-1])], "base": base}))
        (tmp_path / name / "config.yaml").touch()
    said = r"compare=x-\*: x-ppo-s2 started from there, and the anchor is here. Name runs that started from it"
    with pytest.raises(UserError, match=said):
        compared(cfg, policy, here, torch.device("cpu"))
    shutil.rmtree(tmp_path / "x-ppo-s2")
    for digest in (None, folder_digest(here)):
        card = {"arm": "full", "seeds": [1], "base": "here", "base_digest": digest}
        (tmp_path / "x-full-s1" / "run.json").write_text(json.dumps(card))
        (found,) = compared(cfg, policy, here, torch.device("cpu"))
        assert (found.arm, found.seed, found.folder.name, found.planners) == ("run_full", 1, "x-full-s1", {})
    shutil.copytree(tmp_path / "x-full-s1", tmp_path / "x-more-s1")
    with pytest.raises(UserError, match=r"compare=x-\*: x-full-s1 and x-more-s1 are both full, seed 1\. Name one"):
        compared(cfg, policy, here, torch.device("cpu"))
    shutil.rmtree(tmp_path / "x-more-s1")
    save_policy(here, other_weights(policy), {"game": "dond"})  # made again, under the same name
    with pytest.raises(UserError, match="x-full-s1 started from an earlier here than the anchor"):
        compared(cfg, policy, here, torch.device("cpu"))


def other_weights(policy: Policy) -> Policy:
    """Returns a copy of the policy with one matrix halved."""
    other = copy.deepcopy(policy)
    with torch.no_grad():
        next(weights for weights in other.lm.parameters() if weights.dim() == 2).mul_(0.5)
    return other


def test_a_run_made_again_under_its_name_has_a_cell_of_its_own(tmp_path: Path) -> None:
    cfg, files = settings(f"runs={tmp_path}", "compare=x-*"), []
    run, base = tmp_path / "x-full-s1", tmp_path / "bases" / "here"
    run.mkdir()
    (run / "config.yaml").write_text("env: {game: dond, style: compact}\nalgo: {}\n")
    (run / "run.json").write_text(json.dumps({"arm": "full", "seeds": [1], "base": "here"}))
    save_policy(base, negotiator(), {"game": "dond"})
    for policy in (negotiator(), negotiator(), other_weights(negotiator())):
        shutil.rmtree(run / "policy", ignore_errors=True)
        save_policy(run / "policy", policy, {"game": "dond"})
        (entrant,) = compared(cfg, negotiator(), base, torch.device("cpu"))
        files.append(cell_of(entrant, ENV, None, entrant, cfg, play_spec(cfg)).file)
    assert files[0] == files[1] != files[2] and files[0].startswith("run_full-s1-")
    (tmp_path / "cell.json").write_text('{"arms": {"run_full": 3}}')
    with pytest.raises(UserError, match=r"cell.json does not hold each arm's figures: remove it"):
        frontier.read_arms(tmp_path / "cell.json")


def test_both_views_of_a_dialogue_are_one_draw(tmp_path: Path) -> None:
    """Figures that are the same in both views have the interval of so many dialogues, not of twice as many."""
    views = [view for view, _ in human_proposals(str(write(tmp_path, test=TEST)), ENV, None)]
    assert len(views) == 2 and len({view.dialogue for view in views}) == 1
    rng = np.random.default_rng(0)
    values = rng.random(200)
    single = bootstrap_mean(values, rng=np.random.default_rng(1))
    names = [f"dialogue {n}" for n in range(200) for _ in "12"]
    for name, expected in (("human/log_loss", single.high - single.low), ("game/score/v_base", None)):
        both = mean_of(name, np.repeat(values, 2), names, np.random.default_rng(1))
        width = expected or (single.high - single.low) / math.sqrt(2)
        assert both.high - both.low == pytest.approx(width, rel=0.1)


@pytest.mark.slow
def test_a_whole_frontier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["model.hidden_size=32", "model.layers=1", "model.intermediate_size=64", "base.epochs=1", "games=4"]
    (tmp_path / "data").mkdir()
    cfg = settings(
        f"data.dond={write(tmp_path / 'data', test=TEST)}",
        f"runs={tmp_path / 'runs'}",
        "lambdas=[0.1,1]",
        "objectives=[0]",
        *small,
    )
    frontier.main(cfg)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs/cells/frontier").glob("anchor-*.json")}
    assert len(kept) == 3 and "nothing to compare with" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "runs/cells/frontier/table.csv").read_text().splitlines()))
    assert list(rows[0]) == ["arm", "metric", "mean", "low", "high", "seeds", "games"]
    assert "Score against" in (tmp_path / "runs/cells/frontier/figure.svg").read_text()
    planned = {f"{variant}_{x}" for variant in ("plan", "reply", "mirror") for x in ("0.1", "1")}
    assert {row["arm"] for row in rows} == {"anchor", *planned}
    assert all(v for r in rows for v in r.values())
    (base,) = (tmp_path / "runs/bases").glob("dond-human-*")
    run = tmp_path / "runs" / "dond_human-ppo_0.1-s1"
    shutil.copytree(base, run / "policy")
    card = {"arm": "ppo_0.1", "seeds": [1], "base": base.name, "command": "train.py"}
    (run / "run.json").write_text(json.dumps(card))
    (run / "config.yaml").write_text("env: {game: dond, style: compact}\nalgo: {}\n")
    frontier.main(cfg)  # nothing is played again
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    table, differences = (
        {(row["arm"], row["metric"]): row for row in csv.DictReader(path.read_text().splitlines())}
        for path in (tmp_path / f"runs/cells/frontier/{name}.csv" for name in ("table", "differences"))
    )
    lines = (tmp_path / "runs/cells/frontier/cards.jsonl").read_text().splitlines()
    assert [json.loads(line)["run"].partition("@")[0] for line in lines] == [run.name, "frontier"]
    same = [name for arm, name in table if arm == "run_ppo_0.1"]  # the base itself, under another name
    assert len(same) == 6 and all(float(differences["run_ppo_0.1 - anchor", name]["mean"]) == 0 for name in same)


def test_arms_are_points_of_lines() -> None:
    assert frontier.line_of("mirror_0.001") == ("mirror", 0.001)
    assert frontier.line_of("run_filtered_bc_1") == ("filtered_bc", 1.0)
    assert frontier.line_of("run_full") == ("full", None) and frontier.line_of("anchor") == ("anchor", None)
