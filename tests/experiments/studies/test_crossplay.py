"""Cross-play: players whose outcome is known from the contexts alone, and small models against the plain evaluation."""

import copy
import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from envs.core import END, Style
from envs.dond.replies import MESSAGE, proposal_text
from envs.dond.texts import parse_events, parse_prompt, prompt
from experiments import evaluate
from experiments.setup import entrants
from experiments.setup.config import plain
from experiments.setup.spec import play_spec
from experiments.studies import crossplay
from marl.agents.text import TextAgent
from marl.common.errors import UserError
from marl.common.files import csv_rows, unpacked
from marl.model.policy import Policy
from marl.rollout.games import env_maker, file_digests
from marl.rollout.seeds import EVALUATION, draw_games
from marl.storage.checkpoint import load_policy, save_policy
from marl.types import Episode
from tests.composing import composed_once, configure
from tests.marl.models import CHATML, hf_policy
from tests.marl.planners import negotiator
from tests.runs import typed

QUIET = ["progress=false", "threads=1", "concurrency=6", "model.max_new_tokens=10"]


settings, trained_with = composed_once("crossplay"), composed_once("train", "env.max_entries=8")


class Taker:
    """Says one thing if nobody did, then claims all books, or all but the books."""

    def __init__(self, books: bool) -> None:
        self.books, self.counts, self.talked = books, (0, 0, 0), False

    def observe(self, text: str) -> None:
        if not any(self.counts):
            self.counts = parse_prompt(text)[0]
        self.talked = self.talked or bool(parse_events(text))

    def reply(self, text: str, options: Sequence[str] = ()) -> str:
        self.observe(text)
        if not self.talked:
            self.talked = True
            return f"{MESSAGE} hello {END}"
        books, *others = self.counts
        return f"{proposal_text((books, 0, 0) if self.books else (0, *others))} {END}"


def takers(name: str, *others: object) -> TextAgent:
    return TextAgent(name, lambda seed, role: Taker(name == "stubborn"))


def table_of(path: Path) -> dict[tuple[str, str, str], float]:
    return {(row["row"], row["column"], row["metric"]): float(row["mean"]) for row in csv_rows(path)}


def test_the_table_of_players_whose_games_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One player always claims the books, the other all the rest. They agree with each other and never with themselves,
    so all scores follow from the contexts."""
    monkeypatch.setattr(crossplay, "find_player", takers)
    cfg = settings(*QUIET, "players=[stubborn,generous]", "games=10", "env.objective=0.5", f"runs={tmp_path}")
    crossplay.main(cfg)
    books, rest = [], []
    for game in draw_games(7, EVALUATION, count=5):
        env = env_maker(plain(cfg.env))()
        env.reset(seed=game.seed)
        counts, values = env.facts["counts"], env.facts["values"]
        for own, other in (values, values[::-1]):  # both seatings
            books.append(counts[0] * own[0])
            rest.append(sum(counts[i] * other[i] for i in (1, 2)))
    of_books, of_rest = np.mean(books) + 0.5 * np.mean(rest), np.mean(rest) + 0.5 * np.mean(books)
    found = table_of(tmp_path / "crossplay" / "crossplay.csv.gz")
    pair = ("stubborn", "generous")
    assert found[*pair, "game/score/row"] == pytest.approx(of_books, rel=1e-5)
    assert found[*pair, "game/score/column"] == pytest.approx(of_rest, rel=1e-5)
    assert found[*pair, "game/joint"] == pytest.approx(np.mean(books) + np.mean(rest), rel=1e-5)
    assert (found[*pair, "game/agreement"], found[*pair, "talk/turns"]) == (1, 3)
    assert found[*pair[::-1], "game/score/row"] == pytest.approx(of_rest, rel=1e-5)
    for name in pair:
        assert found[name, name, "game/score/row"] == found[name, name, "game/agreement"] == 0
    rows = csv_rows(tmp_path / "crossplay" / "crossplay.csv.gz")
    assert {r["games"] for r in rows if r["row"] != r["column"]} == {"10"}
    assert {r["games"] for r in rows if r["row"] == r["column"]} == {"5"}
    assert all(value for row in rows for value in row.values())
    gaps = {
        (r["row"], r["column"], r["metric"]): r
        for r in csv_rows(tmp_path / "crossplay" / "crossplay_differences.csv.gz")
    }
    assert float(gaps["stubborn", "others", "game/score/row"]["difference"]) == pytest.approx(-of_books, rel=1e-5)
    both = gaps["all", "others", "game/score/row"]
    assert float(both["difference"]) == pytest.approx(-(of_books + of_rest) / 2, rel=1e-5)
    assert float(both["low"]) <= float(both["difference"]) <= float(both["high"]) < 0
    assert float(gaps["all", "others", "game/agreement"]["difference"]) == -1 and both["game_seeds"] == "5"
    assert (tmp_path / "crossplay" / "crossplay.svg").read_text().count("<svg") == 1
    whole = unpacked(tmp_path / "crossplay" / "crossplay.csv.gz")
    (tmp_path / "cut.csv").write_text(re.sub(".*generous,stubborn.*\n", "", whole))
    with pytest.raises(UserError, match=r"cut\.csv: has no game/\w+(/row)? of generous with stubborn"):
        crossplay.main(settings(f"data.table={tmp_path / 'cut.csv'}"))
    assert found[*pair, "game/points/row"] == found[*pair[::-1], "game/points/column"] == pytest.approx(np.mean(books))
    assert found[*pair, "game/points/column"] == pytest.approx(np.mean(rest)) and rows[0]["objective"] == "0.5"


def test_points_are_shown_where_scores_add_up_to_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(crossplay, "find_player", takers)
    played = [*QUIET, "players=[stubborn,generous]", "games=10", "env.objective=-1", f"runs={tmp_path}"]
    crossplay.main(settings(*played))
    said = capsys.readouterr().out
    assert "Points of the row player" in said and "Score of the row player" in said and "Joint points" not in said
    out, again = tmp_path / "crossplay", tmp_path / "again"
    found = table_of(out / "crossplay.csv.gz")
    pair = ("stubborn", "generous")
    assert found[*pair, "game/score/row"] == pytest.approx(
        found[*pair, "game/points/row"] - found[*pair, "game/points/column"], abs=1e-4
    )
    monkeypatch.setattr(crossplay, "find_player", lambda *args: pytest.fail("a player was looked for"))
    crossplay.main(settings(f"data.table={out / 'crossplay.csv.gz'}", f"publish={again}"))
    assert (again / "crossplay.svg").read_bytes() == (out / "crossplay.svg").read_bytes()
    (tmp_path / "x.csv").write_text("row,column\na,b\n")
    for overrides, message in (
        ([f"data.table={tmp_path / 'x.csv'}"], r"data.table=.*x.csv: expected the columns objective, row"),
        (["data.table=x.csv", "players=[a,b]"], "players and data.table: give one of them"),
    ):
        with pytest.raises(UserError, match=message):
            crossplay.main(settings(*overrides))


def run_of(runs: Path, name: str, policy: Policy, base: Path | None = None, *overrides: str) -> Path:
    """A finished run's folder, as far as others read of it."""
    folder = runs / name
    cfg = trained_with(*overrides)
    save_policy(folder / "policy", policy, {"game": cfg.env.game, "base": str(base)})
    OmegaConf.save(OmegaConf.create(plain(cfg)), folder / "config.yaml")
    (folder / "run.json").write_text(json.dumps({"arm": "full", "seeds": [0]}))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs from one base, one of a model with other tokens, and runs that cannot meet them."""
    folder = tmp_path_factory.mktemp("runs")
    base = folder / "bases" / "dond-human-1"
    save_policy(base, negotiator(), {"game": "dond"})
    for number, name in enumerate(("a-full-s0-11", "b-full-s0-22")):
        policy = copy.deepcopy(negotiator())
        noise = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for weights in policy.lm.parameters():
                weights += 0.01 * torch.randn(weights.shape, generator=noise)
        run_of(folder, name, policy, base, "env.objective=0.5")
    foreign = hf_policy(folder / "model", "llama", chat_template=CHATML)
    run_of(folder, "other_tokens", foreign, None, "env.objective=0.5")
    run_of(folder, "other_objective", negotiator(), base, "env.objective=0")
    run_of(folder, "other_base", negotiator(), folder / "bases" / "dond-human-2", "env.objective=0.5")
    save_policy(folder / "bases" / "dond-human-2", policy, {"game": "dond"})
    save_policy(folder / "other_game" / "policy", negotiator(), {"game": "among_us", "base": None})
    return folder


def test_no_two_players_are_called_the_same(runs: Path, tmp_path: Path) -> None:
    for name, objective in (("x/r-s0-11", 1), ("x/r-s0-22", -1), ("x/r-s0-33", -1), ("y/r-s0-11", 1), ("y/q-s1-1", 1)):
        (tmp_path / name / "policy").mkdir(parents=True)
        cfg = trained_with(f"env.objective={objective}")
        OmegaConf.save(OmegaConf.create(plain(cfg)), tmp_path / name / "config.yaml")

    def labels(*names: str) -> list[str]:
        return crossplay.labels_of([f"{tmp_path}/{name}" if "/" in name else name for name in names])

    assert labels("x/r-s0-11", "y/q-s1-1+plan", "base", "careful") == ["r-s0", "q-s1+plan", "base", "careful"]
    assert labels("x/r-s0-11", "x/r-s0-22") == ["r-s0 λ=1", "r-s0 λ=-1"]
    assert labels("x/r-s0-11", "x/r-s0-22", "x/r-s0-33") == ["r-s0 λ=1", "r-s0-22", "r-s0-33"]
    assert labels("x/r-s0-11", "y/r-s0-11") == ["x/r-s0-11", "y/r-s0-11"]
    assert labels("x/r-s0-11/policy", "y/q-s1-1/policy") == ["r-s0-11/policy", "q-s1-1/policy"]
    whole = labels("x/r-s0-11/policy", "y/r-s0-11/policy")
    assert whole == [f"{tmp_path}/{name}/r-s0-11/policy" for name in "xy"]


def test_runs_of_different_limits_need_an_explicit_one(runs: Path, tmp_path: Path) -> None:
    """Runs of different `algo.max_new_tokens` are refused until the user sets it. Otherwise the order of the players
    would decide where messages are cut."""
    longer = tmp_path / "longer-full-s0-11"
    shutil.copytree(runs / "a-full-s0-11", longer)
    config = OmegaConf.load(longer / "config.yaml")
    config.algo.max_new_tokens += 8
    OmegaConf.save(config, longer / "config.yaml")
    for names in ([f"{runs}/a-full-s0-11", str(longer)], [str(longer), f"{runs}/a-full-s0-11"]):
        with pytest.raises(UserError, match=r"differ in algo.max_new_tokens: choose for all, as in algo.max_new_tok"):
            entrants.as_in_runs(settings(*QUIET), names)


@pytest.mark.parametrize("algo", ["filtered_bc", "pikl"])
def test_runs_of_every_learner_can_be_played(algo: str, runs: Path, tmp_path: Path) -> None:
    """Losses from which nothing would be learned are refused in training, but do not matter in evaluation."""
    run = tmp_path / "other-full-s0-11"
    shutil.copytree(runs / "a-full-s0-11", run)
    learned = configure("train", f"algo={algo}")
    config = OmegaConf.load(run / "config.yaml")
    config.algo, config.loss = OmegaConf.create(plain(learned)["algo"]), OmegaConf.create(plain(learned)["loss"])
    OmegaConf.save(config, run / "config.yaml")
    parts = play_spec(entrants.as_in_runs(configure("evaluate", *QUIET), [str(run)]))
    assert parts.algo.temperature == 1.0


def test_a_pair_that_plays_in_bfloat16_has_a_cell_of_its_own(runs: Path, tmp_path: Path) -> None:
    cfg = settings(*QUIET, f"runs={runs}", "players=[careful,fair]")
    parts = play_spec(cfg)
    pair = [crossplay.Player(name, name, name) for name in ("careful", "fair")]
    half = replace(parts, algo=replace(parts.algo, play_bf16=True))
    assert crossplay.cell_of(*pair, cfg, parts).file != crossplay.cell_of(*pair, cfg, half).file


@pytest.mark.slow
def test_runs_of_two_objectives_play_the_one_that_is_given(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{runs}/a-full-s0-11", f"{runs}/other_objective", f"{runs}/b-full-s0-22"]
    quiet = [each for each in QUIET if not each.startswith("model.")]  # which the runs decide
    command = ["crossplay", f"players=[{','.join(names)}]", f"runs={runs}", f"cells={tmp_path}", *quiet, "games=2"]
    with pytest.raises(UserError, match=r"differ in env.objective: choose for all, as in env.objective=0.5"):
        crossplay.main(configure(*command))
    for given, differs in ((["env.objective=-1"], False), (["env.max_entries=6"], True)):
        typed(monkeypatch, *command, *given)
        if differs:
            with pytest.raises(UserError, match=r"differ in env.objective: choose for all"):
                entrants.as_in_runs(configure(*command, *given), names)
        else:
            assert entrants.as_in_runs(configure(*command, *given), names).env.objective == -1
            crossplay.main(configure(*command, *given))
    assert {row["objective"] for row in csv_rows(tmp_path / "crossplay.csv.gz")} == {"-1"}


def test_self_play_is_the_plain_evaluation_and_nothing_is_played_twice(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [*QUIET, f"runs={runs}", f"cells={tmp_path}", f"publish={tmp_path / 'out'}", "games=4"]
    crossplay.main(settings(*common, f"players=[{runs}/a-full-s0-11,base]"))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*-v-*.json")}
    assert len(before) == 3 and "3 of 3 pairs are still to play" in capsys.readouterr().out
    rollout, played = crossplay.rollout, []
    monkeypatch.setattr(crossplay, "rollout", lambda *args: played.append(1) or rollout(*args))
    crossplay.main(settings(*common, "players=[base,careful,'a-*']"))  # another order, one more player
    assert len(played) == 1 + 2 + 2  # one seating of careful with itself, two with each of the others
    assert "3 of 6 pairs are still to play" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in before} == before
    found = csv_rows(tmp_path / "out" / "crossplay.csv.gz")
    of = {(row["row"], row["column"], row["metric"]): row for row in found}
    assert list(dict.fromkeys(row["row"] for row in found)) == ["base", "careful", "a-full-s0"]
    for a in ("base", "careful", "a-full-s0"):
        for b in ("base", "careful", "a-full-s0"):
            assert of[a, b, "game/score/row"]["mean"] == of[b, a, "game/score/column"]["mean"]
            for metric in ("game/joint", "game/agreement", "game/pareto", "talk/turns"):
                assert of[a, b, metric]["mean"] == of[b, a, metric]["mean"]
    evaluate.main(
        configure("evaluate", *QUIET, f"players=[{runs}/a-full-s0-11]", "games=2", f"out={tmp_path / 'alone'}")
    )
    (alone,) = json.loads((tmp_path / "alone" / "evaluation.json").read_text())["conditions"].values()
    for ours, theirs in (("game/score/row", "game/score"), *((n, n) for n in ("game/joint", "game/agreement",
                         "game/pareto", "talk/turns"))):  # fmt: skip
        row = of["a-full-s0", "a-full-s0", ours]
        assert float(row["mean"]) == pytest.approx(alone[theirs]["mean"], rel=1e-5)
        if ours in ("game/score/row", "game/agreement"):  # the same interval too
            assert float(row["low"]) == pytest.approx(alone[theirs]["low"], rel=1e-5)
    card = json.loads((tmp_path / "out" / "cards.jsonl").read_text())
    assert set(card["players"]) == {"base", "careful", "a-full-s0"} and str(runs) not in json.dumps(card["players"])


def test_models_with_different_tokenizers_meet(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads the game and the other's words in its own tokens."""
    rollout, played = crossplay.rollout, list[Episode]()

    def noted(*args: Any) -> list[Episode]:
        found = rollout(*args)
        played.extend(found)
        return found

    monkeypatch.setattr(crossplay, "rollout", noted)
    folders = [runs / name for name in ("a-full-s0-11", "other_tokens")]
    tokens = {folder.name: load_policy(folder / "policy").tokens for folder in folders}
    assert len({each.size for each in tokens.values()}) == 2
    names = ",".join(map(str, folders))
    crossplay.main(settings(*QUIET, f"players=[{names}]", f"runs={runs}", f"cells={tmp_path}", "games=8"))
    heard = Counter[str]()
    for game in played:
        for seat, (agent, name) in enumerate(game.players.items()):
            read = tokens[name].decode(game.streams[agent].tokens)
            opening = prompt(game.facts["counts"], game.facts["values"][seat], 0.5, Style.COMPACT)
            said = [f"them: {turn.message}" for turn in game.turns if turn.message and turn.agent != agent]
            assert opening.strip() in read and all(line in read for line in said)
            heard[name] += len(said) * (len({*game.players.values()}) == 2)
    assert heard["other_tokens"], "nothing was said to it"
    assert {row["row"] for row in csv_rows(tmp_path / "crossplay.csv.gz")} == {"a-full-s0", "other_tokens"}


def test_a_damaged_cell_is_named(tmp_path: Path) -> None:
    cfg = settings(*QUIET, f"runs={tmp_path}", "players=[careful,random]", "games=2")
    crossplay.main(cfg)
    damaged = next((tmp_path / "crossplay").glob("*-v-*.json"))
    damaged.write_text("{}")
    with pytest.raises(UserError, match=rf"{damaged.name} does not hold a pair's games: remove it"):
        crossplay.main(cfg)


def test_names_are_looked_up_before_a_base_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrants, "configured_base", lambda *given: pytest.fail("a base was made"))
    for given, said in (
        (["players=[base,scritped]"], "players: scritped is neither a run's folder nor base, scripted, random or chat"),
        (
            ["players=[base]", "voices=[nobdy]"],
            r"voices\[0\]=nobdy: is no language model. Name a run's folder, base or",
        ),
        (["players=[careful,base]", "voices=[silence]"], r"voices\[0\]=silence: careful is no language model; only"),
    ):
        with pytest.raises(UserError, match=said):
            evaluate.main(configure("evaluate", *QUIET, *given))


def test_settings_that_the_run_decides_are_refused() -> None:
    """Settings that repeat the run's own choice are accepted, and limits of the games stay free."""
    run = configure("train")
    for given, said in (
        ("env=among_us", "env=among_us: runs/a decides that, by env.game=dond. Leave it out\\."),
        ("model=hf", "model=hf: runs/a decides that, by model.kind=tiny. Leave it out\\."),
        (
            "model.max_new_tokens=5",
            ".* by model.max_new_tokens=32. Leave it out; algo.max_new_tokens limits it here\\.",
        ),
    ):
        more = ["model.name=/models/mine"] if given == "model=hf" else []
        with pytest.raises(UserError, match=f"^{said}$"):
            entrants.check_decided([given], configure("evaluate", given, *more), run, "runs/a")
    same = ["env=dond", "model=tiny", "base=scripted", "model.layers=4", "env.objective=-1", "algo.max_new_tokens=5"]
    entrants.check_decided(same, configure("evaluate", *same), run, "runs/a")
    entrants.check_decided(["base=human"], configure("evaluate", "data.dond=somewhere", "base=human"), run, "runs/a")


def test_a_file_of_contexts_that_is_gone_is_named() -> None:
    with pytest.raises(UserError, match=r"env.contexts=gone\.txt: the file cannot be read"):
        file_digests({"game": "among_us"}, {"game": "dond", "contexts": "gone.txt"})


@pytest.mark.parametrize(
    ("players", "overrides", "said"),
    [
        (["careful"], [], r"players=\['careful'\]: must be a list of two to 8"),
        ([f"p{i}" for i in range(9)], [], "must be a list of two to 8"),
        (["careful", "fair"], ["games=7"], "games=7: must be an even number, at least 2"),
        (["careful", "nobody"], [], "nobody is neither a run's folder nor base, scripted, random or chat"),
        (["careful", "careful"], [], "careful and careful are one and the same"),
        (["careful", "*-full-s0-*"], [], r"players=\*-full-s0-\*: must be one run's name; in .* 2 finished runs match"),
        (["{runs}/a-full-s0-11", "{runs}/other_game"], [], "other_game was trained on among_us. Name players of Deal"),
        (["{runs}/a-full-s0-11", "{runs}/other_objective"], [], "differ in env.objective"),
        (["{runs}/other_base", "{runs}/a-full-s0-11", "base"], [], "started from different bases. Name a base by its"),
        (["{runs}/a-full-s0-11", "careful+plan"], [], "careful has no policy to plan from"),
        (["careful", "fair"], ["env.game=among_us"], "env.game=among_us: only players of Deal or No Deal change seats"),
    ],
)  # fmt: skip
def test_mistakes_are_refused_before_any_game(
    players: list[str], overrides: list[str], said: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crossplay, "rollout", lambda *args: pytest.fail("a game was played"))
    names = ",".join(f"'{name.format(runs=runs)}'" for name in players)
    cfg = settings(*QUIET, f"players=[{names}]", f"runs={runs}", f"cells={tmp_path}", *overrides)
    with pytest.raises(UserError, match=said) as error:
        crossplay.main(cfg)
    assert "\n" not in str(error.value) and not list(tmp_path.glob("*.json"))
