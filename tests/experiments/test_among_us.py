"""Runs of Among Us with every kind of cast, small enough for a test; and how they are evaluated."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from experiments import evaluate, learning, play, train
from experiments.setup import entrants, record
from experiments.setup.config import plain
from experiments.setup.players import style_of
from experiments.setup.spec import run_spec
from experiments.setup.work import Work
from marl.common.distributed import Ranks
from marl.common.errors import UserError
from marl.model.policy import Policy, tiny_lm
from marl.report.page import build_report
from marl.report.transcripts import read_episodes
from marl.storage.checkpoint import load_policy, read_card, save_policy
from tests.composing import AMONG_US, cases, configure, run_folder
from tests.marl.models import tiny_policy
from tests.runs import identical, lines, logged, stop, texts, typed

pytestmark = pytest.mark.usefixtures("no_pages")
IMPOSTER = ["cast.imposter.player=learner", "cast.crewmate.player=base"]
TWO = ["cast.imposter.player=rival", "algo.alternate=1"]

Train = Callable[..., Path]


@pytest.fixture(scope="module")
def run(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Trains with these overrides and returns the run's folder; the same overrides are trained once."""

    folder = tmp_path_factory.mktemp("runs")

    def made(*overrides: str) -> Path:
        cfg = configure("train", *AMONG_US, f"runs={folder}", f"cache={bases}", *overrides)
        if not (run_folder(cfg) / "run.json").exists():
            train.main(cfg)
        return run_folder(cfg)

    return made


def seating(path: Path) -> list[tuple[list[str], list[str]]]:
    """Names of the players in the seats of crewmates and of imposters, for each recorded game."""
    return [
        tuple(sorted(game["players"][a] for a, own in game["roles"].items() if own == role)
              for role in ("crewmate", "imposter"))
        for game in lines(path)
    ]  # fmt: skip


# -- training ----------------------------------------------------------------------------------------------------------
def test_crewmates_learn_beside_one_that_is_frozen(run: Train) -> None:
    made = run()
    for who, own in (("trained", "trained"), ("base", "untrained"), ("iteration-000001", "learner")):
        assert seating(made / "episodes" / f"{who}.jsonl")[0] == (sorted(["base", own, own, own]), ["base"])
    trained = logged(made, "train")[2]
    assert {"loss/listening", "reward/speaking", "belief/accuracy", "game/win_rate/crewmates"} <= trained.keys()
    assert not any(name.startswith("rival/") for name in trained)
    card = read_card(made / "policy")
    assert (card["game"], card["learner"]) == ("among_us", "learner") and not (made / "rival").exists()
    assert not identical(made / "policy", Path(card["base"]))


def test_scripts_hold_roles_evaluation_has_its_own_and_a_reward_may_name_the_learner(run: Train) -> None:
    made = run("ablation=learning_listeners", "cast.imposter.player=careful", "cast.crewmate.partner=random",
               "+eval.cast.imposter.player=random", "algo.iterations=1")  # fmt: skip
    for who, own in (("trained", "trained"), ("base", "untrained"), ("iteration-000001", "learner")):
        games = made / "episodes" / f"{who}.jsonl"
        assert seating(games)[0] == (sorted(["random", own, own, own]), ["random"])
        assert any(turn["rewards"].get("speaking") for game in lines(games) for turn in game["turns"]), who


def test_names_are_not_swapped_if_all_of_them_play(run: Train, capsys: pytest.CaptureFixture[str]) -> None:
    base = load_policy(Path(read_card(run() / "policy")["base"]))
    for players, all_play in ((7, True), (5, False)):
        work = Work.of(run_spec(configure("train", *AMONG_US, f"env.players={players}")))
        capsys.readouterr()
        assert (learning.names_to_swap(work, base) is None) == all_play
        assert ("all names play in each game" in capsys.readouterr().out) == all_play


def test_an_imposter_learns_against_frozen_crewmates(run: Train) -> None:
    made = run(*IMPOSTER)
    for games, own in (("trained", "trained"), ("iteration-000002", "learner")):
        assert all(who == (["base"] * 4, [own]) for who in seating(made / "episodes" / f"{games}.jsonl"))
    trained = logged(made, "train")[1]
    assert "loss/listening" not in trained  # imposters know the answer and are asked nothing
    assert trained["update/grad_norm"] > 0 and not any(name.startswith("belief/") for name in trained)
    assert not identical(made / "policy", Path(read_card(made / "policy")["base"]))


def test_two_learn_in_turn_and_end_as_if_they_had_not_been_stopped(
    run: Train, bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run(*TWO)
    rows = logged(made, "train")
    assert "loss/policy" in rows[1] and "rival/loss/policy" not in rows[1]
    assert "rival/loss/policy" in rows[2] and "loss/policy" not in rows[2]
    assert all({"game/win_rate/crewmates", "rival/game/score"} <= row.keys() for row in rows.values())
    for who in ("trained", "untrained"):
        games = made / "episodes" / f"{'base' if who == 'untrained' else who}.jsonl"
        assert seating(games)[0] == (["base", who, who, who], ["rival"])
    cards = {name: read_card(made / name) for name in ("policy", "rival")}
    assert [card["learner"] for card in cards.values()] == ["learner", "rival"]
    base = Path(cards["policy"]["base"])
    assert not identical(made / "policy", base) and not identical(made / "rival", base)
    assert not identical(made / "policy", made / "rival")

    cfg = configure("train", *AMONG_US, *TWO, f"runs={tmp_path}", f"cache={bases}")
    stop(cfg, 2, saved=False)
    monkeypatch.setattr(record, "git_commit", lambda: "new code")
    again = train.main(cfg)
    assert json.loads((again / "run.json").read_text())["git_commit"].endswith(", new code")  # behind the earlier
    assert (again / "metrics.jsonl").read_text() == (made / "metrics.jsonl").read_text()
    assert identical(again / "policy", made / "policy") and identical(again / "rival", made / "rival")
    for name in ("learner-optimizer", "rival-optimizer"):
        ours, theirs = (load_file(f / "checkpoints/iteration-000002" / f"{name}.safetensors") for f in (again, made))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_warm_start_begins_where_the_other_run_ended(run: Train) -> None:
    finished, still = run(), ("algo.iterations=1", "algo.update.learning_rate=0")
    warm = run(f"init.learner={finished.name}", *still)
    first, last = (warm / "episodes" / "iteration-000000.jsonl"), (finished / "episodes" / "iteration-000002.jsonl")
    assert texts(first) == texts(last)  # of the same evaluation games
    assert logged(warm, "eval")[0]["belief/brier"] == pytest.approx(logged(finished, "eval")[2]["belief/brier"])
    assert logged(warm, "train")[1]["loss/kl"] > 1e-4  # to the base; to its own start it would be 0
    assert read_card(warm / "policy")["base"] == read_card(finished / "policy")["base"]
    assert run(f"init.learner={finished.name[:-3]}*", *still) == warm  # a pattern may say where to start
    with pytest.raises(UserError, match=r"must be one run's name; in .* finished runs match: .*, "):
        run("init.learner=*", "algo.iterations=1")


def test_a_start_of_another_shape_is_told_of(run: Train, capsys: pytest.CaptureFixture[str]) -> None:
    finished = run()
    cfg = configure("train", *AMONG_US, f"runs={finished.parent}", f"init.learner={finished.name}")
    base = load_policy(Path(read_card(finished / "policy")["base"]))
    narrow = Policy(tiny_lm(base.tokens.size, hidden_size=16, layers=1, heads=2, intermediate_size=32), base.tokens)
    for other in (base, narrow):
        capsys.readouterr()
        start = learning.starting_policies(Work.of(run_spec(cfg)), other, Ranks())["learner"]
        assert sum(p.numel() for p in start.lm.parameters()) == sum(p.numel() for p in base.lm.parameters())
        assert ("a model of another shape than the base's" in capsys.readouterr().out) == (other is narrow)


def test_a_finished_run_may_be_the_opponent(run: Train) -> None:
    opponent = run(*IMPOSTER)
    made = run(f"cast.imposter.player={opponent}", "algo.iterations=1", "eval.games=0")
    assert seating(made / "episodes" / "trained.jsonl")[0] == (["base", *["trained"] * 3], [opponent.name])
    # Before any learning these are the games of the base's crewmates against that imposter.
    assert texts(made / "episodes" / "base.jsonl") == texts(opponent / "episodes" / "trained.jsonl")


def test_a_second_learners_policy_may_start_another_pair_and_play_beside_it(run: Train) -> None:
    """The frozen copy of the old rival is recorded as `RUN/rival`. Under the name `rival`, the new learner would train
    on its tokens."""
    old = run(*TWO)
    made = run("cast.imposter.player=rival", f"cast.imposter.partner={old / 'rival'}", "cast.imposter.partners=0.5",
               f"init.rival={old / 'rival'}", "algo.iterations=1", "algo.update.learning_rate=0")  # fmt: skip
    held = [name for _, imposters in seating(made / "episodes" / "iteration-000001.jsonl") for name in imposters]
    assert set(held) == {"rival", f"{old.name}/rival"}
    assert identical(made / "rival", old / "rival") and not identical(made / "policy", old / "policy")


# -- refusals ----------------------------------------------------------------------------------------------------------
def test_the_world_model_arm_predicts_what_its_base_predicted() -> None:
    for game, foretold in (("among_us", False), ("dond", True)):
        arm = configure("train", f"env={game}", "ablation=world_model")
        assert arm.loss.world_model.after_questions is foretold and arm.loss.world_model.weight == 0.1


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of runs: `other_game`, and `other_tokenizer` and `rival` of this game."""
    made = tmp_path_factory.mktemp("strangers")
    for name, game in (("other_game", "dond"), ("other_tokenizer", "among_us"), ("rival", "among_us")):
        save_policy(made / name / "policy", tiny_policy(context=2048), {"game": game, "base": None, "run": name})
    return made


@cases("""
cast.imposter.player=RUNS/other_game | other_game was trained on dond, and env.game=among_us
init.learner=RUNS/other_game | other_game was trained on dond, and env.game=among_us
+eval.cast.imposter.player=RUNS/other_game | other_game was trained on dond, and env.game=among_us
cast.imposter.player=RUNS/nowhere | nowhere: there is no such folder
init.learner=RUNS/nowhere | nowhere: there is no such folder
init.learner=nothing-* | init.learner=nothing-\\*: must be one run's name; in .* no finished run matches
init.learner=base | init.learner=base: must be the folder of a finished run, or null
init.rival=RUNS/other_game | init.rival=.*: rival does not play here; the cast has learner
cast.imposter.player=nobody | There is no scripted player 'nobody' of Among Us
cast.imposter.player=rival algo=filtered_bc | algo=filtered_bc trains one learner, and the cast has learner, rival
cast.crewmate.partners=5 | cast.crewmate.partners=5.0: this role has 4 seats; must be at most 4
cast.crewmate.player=base | nobody learns; let one of them be learner or rival
base=human data.dond=/nonexistent | base=human: people played Deal or No Deal, not env.game=among_us
+cast.negotiator.player=learner | the game's are crewmate, imposter
cast.imposter.player=RUNS/rival | rival: in games it would pass for another player of that name
reward.speaking.players=[me] | reward.speaking.players: me is none of those who listen, learner, base
reward.speaking.players=[careful] cast.crewmate.partner=careful | careful is none of those who listen, learner
""")
def test_casts_are_refused_before_any_model_is_trained(
    overrides: list[str], said: str, strangers: Path, tmp_path: Path
) -> None:
    given = [override.replace("RUNS", str(strangers)) for override in overrides]
    with pytest.raises(UserError, match=said) as error:
        train.main(configure("train", *AMONG_US, f"runs={tmp_path}", *given))
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("override", ["cast.imposter.player={}", "init.learner={}"])
def test_another_tokenizer_is_refused(override: str, run: Train, strangers: Path) -> None:
    base = read_card(run() / "policy")["base"]
    other = strangers / "other_tokenizer"
    with pytest.raises(UserError) as error:
        run(override.format(other))
    said = str(error.value)
    assert f"{other}, which started from an untouched model, has another tokenizer" in said
    assert f"than the base of this run, {base} (" in said
    assert f"({tiny_policy().tokens.size} tokens)" in said and "\n" not in said


# -- evaluation --------------------------------------------------------------------------------------------------------
def evaluated(out: Path, *overrides: str) -> tuple[dict[str, Any], Path]:
    """The first condition's metrics and the file of the games."""
    common = ["games=4", "concurrency=4", "progress=false", f"out={out}"]
    evaluate.main(configure("evaluate", *common, *overrides))
    conditions = json.loads((out / "evaluation.json").read_text())["conditions"]
    return next(iter(conditions.values())), out / "episodes.jsonl"


def close(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Compares metrics up to the noise of other batch shapes. Values of losses and rewards are left out, since only
    training has them."""
    measured = {name for name in theirs if not name.startswith(("loss/", "reward/"))}
    assert ours.keys() == measured, ours.keys() ^ measured
    return all(ours[name][key] == pytest.approx(theirs[name][key], abs=1e-5) for name in ours for key in ours[name])


def test_evaluating_a_run_against_its_base_is_its_own_evaluation(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run knows its game and cast; it and its base read their own style, whatever is asked for."""
    made = run()
    own = json.loads((made / "evaluation.json").read_text())["conditions"]["trained"]
    found, games = evaluated(tmp_path / "from_run", f"players=[{made},base]")
    assert texts(games) == texts(made / "episodes" / "trained.jsonl")
    assert found["game/win_rate/crewmates"] == own["game/win_rate/crewmates"] and close(found, own)
    assert seating(games)[0] == (sorted(["base", *[made.name] * 3]), ["base"])
    asked = ["env=among_us", f"players=[{made},base]", "env.style=natural"]
    typed(monkeypatch, "evaluate", *asked)
    again, games = evaluated(tmp_path / "asked", *asked)
    assert texts(games) == texts(made / "episodes" / "trained.jsonl") and again == found


def test_a_run_meets_scripts_that_speak_natural_words(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run()
    asked = ["env=among_us", f"players=[{made},careful]", "env.style=natural", "cast.crewmate.partner=careful"]
    typed(monkeypatch, "evaluate", *asked)
    _, games = evaluated(tmp_path, *asked)
    turns = [(game["players"][turn["agent"]], turn) for game in lines(games) for turn in game["turns"]]
    for who, sign in ((made.name, "go_"), ("careful", "go ")):
        moves = [turn["text"] for player, turn in turns if player == who and turn["text"].startswith("go")]
        assert moves and all(move.startswith(sign) for move in moves)
    assert not any(turn["error"] for player, turn in turns if player == "careful")


def test_a_person_reads_natural_words_beside_a_run_that_reads_its_own(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = run()
    monkeypatch.setattr("builtins.input", lambda prompt: "1")
    play.main(configure("play", f"opponent={made}", f"out={tmp_path}"))
    assert "You play Among Us on a grid of rooms" in capsys.readouterr().out
    (game,) = lines(tmp_path / "episodes-001.jsonl")
    moves = {"human": set[str](), made.name: set[str]()}
    for turn in game["turns"]:
        moves[game["players"][turn["agent"]]] |= {turn["text"]} if turn["text"].startswith("go") else set()
    assert all("_" not in move for move in moves["human"]) and all("_" in move for move in moves[made.name])
    assert moves["human"] and moves[made.name]


def test_runs_of_two_styles_may_meet(run: Train, tmp_path: Path) -> None:
    made, other = run(), tmp_path / "other-s0"
    shutil.copytree(made, other)
    config = OmegaConf.load(other / "config.yaml")
    config.env.style = "natural"
    OmegaConf.save(config, other / "config.yaml")
    cfg = entrants.as_in_runs(configure("evaluate"), [str(made), str(other)])
    env = plain(cfg)["env"]
    assert env["style"] == "compact"
    assert (style_of(made / "policy", env), style_of(other / "policy", env)) == ("compact", "natural")
    assert style_of(Path(read_card(made / "policy")["base"]), env) == "compact"  # by its card, as it is in no run
    assert style_of(made / "reference", env) == "compact"
    assert style_of(other / "policy", {"game": "hint"}) is None
    config.env.style = "verse"
    OmegaConf.save(config, other / "config.yaml")
    with pytest.raises(UserError, match=r"other-s0/policy: it was trained in another version .*env.style must be"):
        style_of(other / "policy", env)


def test_evaluation_in_another_style_leaves_models_theirs(run: Train) -> None:
    """Scripts alone read the style of `eval.env` in training's own evaluation; models read theirs."""
    made, other = run(), run("+eval.env.style=natural", "algo.iterations=1")
    for games in ("base", "iteration-000000"):
        assert texts(other / "episodes" / f"{games}.jsonl") == texts(made / "episodes" / f"{games}.jsonl")


def test_evaluating_an_imposter_is_its_own_evaluation(run: Train, tmp_path: Path) -> None:
    """RUN/rival brings its run's base and settings along, as RUN does."""
    made, two = run(*IMPOSTER), run(*TWO)
    _, games = evaluated(tmp_path / "alone", f"players=[base,{made}]")
    assert texts(games) == texts(made / "episodes" / "trained.jsonl")
    assert seating(games)[0] == (["base", *["measured"] * 3], [made.name])
    found, games = evaluated(tmp_path / "both", f"players=[{two},{two / 'rival'}]")
    own = json.loads((two / "evaluation.json").read_text())["conditions"]["trained"]
    assert texts(games) == texts(two / "episodes" / "trained.jsonl") and close(found, own)
    assert seating(games)[0][1] == [f"{two.name}/rival"]


def test_the_base_against_itself_is_the_runs_base(run: Train, tmp_path: Path) -> None:
    made = run()
    same_base = [o for o in AMONG_US if o.startswith(("env", "model.", "base.", "algo.max_new_tokens"))]
    common = [*same_base, f"cache={Path(read_card(made / 'policy')['base']).parent}"]
    found, games = evaluated(tmp_path, *common, "players=[base,base]")
    assert texts(games) == texts(made / "episodes" / "base.jsonl")
    own = json.loads((made / "evaluation.json").read_text())["conditions"]["base"]
    assert close(found, own)  # metrics of the learner's seats alone
    assert seating(games)[0] == (sorted(["base", *["measured"] * 3]), ["base"])


def test_a_scripted_crew_gets_the_scripted_partner_of_the_cast(tmp_path: Path) -> None:
    """Scripts can then be compared with learners whose crew has one frozen player."""
    game = [o for o in AMONG_US if o.startswith("env")]
    for more, crew in (((), ["confidant"] * 4), (("cast.crewmate.partner=random",), ["confidant"] * 3 + ["random"])):
        _, games = evaluated(tmp_path / str(len(more)), *game, "players=[confidant,random]", *more)
        assert seating(games) == [(crew, ["random"])] * 4


def test_a_player_speaks_with_anothers_voice(run: Train, tmp_path: Path) -> None:
    made = run()
    plain = lines(made / "episodes" / "trained.jsonl")
    silent = lines(evaluated(tmp_path / "silence", f"players=[{made},base]", "voices=[silence]")[1])
    dubbed = lines(evaluated(tmp_path / "base", f"players=[{made},base]", "voices=[base]")[1])
    said = [(t, g["players"][t["agent"]]) for g in silent for t in g["turns"] if t["kind"] == "SPEAK"]
    assert {player for _, player in said} == {made.name, "base"}
    assert all(turn["message"] == "" for turn, player in said if player == made.name)
    assert any(turn["message"] for turn, player in said if player == "base")
    # Until somebody has spoken, nothing is different.
    for games in (silent, dubbed):
        assert [game["seed"] for game in games] == [game["seed"] for game in plain]
        for ours, theirs in zip(games, plain, strict=True):
            first = next((i for i, t in enumerate(theirs["turns"]) if t["kind"] == "SPEAK"), len(theirs["turns"]))
            assert [t["text"] for t in ours["turns"][:first]] == [t["text"] for t in theirs["turns"][:first]]
    assert [game["turns"] for game in dubbed] != [game["turns"] for game in plain]
    with pytest.raises(UserError, match=r"voices\[0\]=base: random is no language model"):
        evaluated(tmp_path, f"players=[random,{made}]", "voices=[base]")
    with pytest.raises(UserError, match="at most one for each"):
        evaluated(tmp_path, f"players=[{made}]", "voices=[base,base]")


def test_learning_from_planned_votes(run: Train) -> None:
    """algo=pikl has the base and model of PPO, trains on the plan loss alone, and records in training games what the
    planner weighed."""
    ppo, pikl = (configure("train", "env=among_us", f"algo={algo}") for algo in ("ppo", "pikl"))
    assert plain(pikl)["base"] == plain(ppo)["base"] and plain(pikl)["model"] == plain(ppo)["model"]
    algo = run_spec(pikl).algo
    assert (algo.update.optimizer, algo.games, algo.iterations) == ("muon", ppo.algo.games, ppo.algo.iterations)
    made = run("algo=pikl", "algo.planner.iterations=3", "algo.iterations=1", "eval.games=0")
    found = logged(made, "train")
    assert all(row["loss/plan"] > 0 and "loss/policy" not in row for row in found.values())
    # Evaluation is played without the planner; games of training show what it weighed.
    games = read_episodes(made / "episodes" / "planned-000001.jsonl")
    assert games and all(any("planned" in turn for turn in game["turns"]) for game in games)
    build_report([made], made / "report.html", "A run")
    assert "in training, planned" in (made / "report.html").read_text()
