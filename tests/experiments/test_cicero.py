"""Players with `+cicero` from the command line, and the study that makes them, on scripted dialogues."""

import gzip
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import marl
from experiments import evaluate, play, train
from experiments.setup import entrants
from experiments.setup.players import (
    check_intents,
    check_plans,
    check_players,
    model_player,
    played_as,
    player_slots,
    seat_players,
)
from experiments.setup.spec import run_spec
from experiments.setup.work import Work
from experiments.studies import conditions, crossplay, drift, intents
from experiments.studies.talkers import table_row
from marl.agents.model import PlayConfig
from marl.algorithms.ppo import PPOConfig
from marl.common.errors import UserError
from marl.common.files import csv_rows, write_json
from marl.decoding.engine import Engine
from marl.decoding.probes import size_of
from marl.intents.agent import (
    ACTION,
    CICERO,
    DIALOGUE,
    NONSENSE,
    PARTS,
    CiceroAgent,
    CiceroConfig,
    IntentConditionedAgent,
    Parts,
)
from marl.intents.among_us_agent import TableAgent
from marl.intents.corruptions import KINDS
from marl.intents.filters import ORDER
from marl.intents.nonsense import Ensemble
from marl.intents.press_agent import PressAgent
from marl.intents.standin import write_scripted
from marl.intents.streams import FORM
from marl.metrics.stats import rate
from marl.metrics.wording import wording
from marl.planning.planner import PlannerConfig
from marl.rollout.cast import RoleConfig
from marl.rollout.games import env_maker
from marl.rollout.rollout import rollout
from marl.storage.checkpoint import folder_digest, save_policy
from marl.types import Episode
from tests.composing import configure
from tests.experiments.studies.test_frontier import TEST
from tests.human_dialogues import CLASH, DEAL, LOST, write
from tests.marl.intents.test_filters import ensemble
from tests.marl.planners import negotiator

ENV = {"game": "dond", "style": "compact", "objective": 0.0}
WEAK = ("cicero.nonsense=0", "cicero.candidates=2", "cicero.draws=3", "cicero.plan.iterations=3")
STUDY = (  # a small one, on few scripted dialogues
    "progress=false", "threads=1", "device=cpu", "env.max_entries=6", "scripted_games=120", "base.epochs=1",
    "action_epochs=1", "epochs=1", "own_epochs=1", "model.hidden_size=32", "model.layers=1",
    "model.intermediate_size=64", "control=20", "nonsense={train: 60, val: 40, test: 40}", "games=2", "concurrency=2",
    "cicero.draws=3", "cicero.candidates=2", "cicero.nonsense=0.3", "cicero.plan.iterations=3",
)  # fmt: skip


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder as the study writes it, of a small model without an ensemble."""
    folder = tmp_path_factory.mktemp("runs") / "intents-both-s0"
    for name in (ACTION, DIALOGUE):
        save_policy(folder / name, negotiator(), {"game": "dond", "made_of": {"env": {"style": "compact"}}})
    write_json(folder / PARTS, {"arm": "both", "told": FORM})
    return f"{folder}+cicero"


def test_evaluation_and_transcripts(player: str, tmp_path: Path) -> None:
    small = ("games=4", "concurrency=4", "progress=false", "threads=1", "model.context=1024", "env.max_entries=6")
    evaluate.main(configure("evaluate", f"players=[{player},scripted]", f"out={tmp_path}", *small, *WEAK))
    episodes = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    own = [t for e in episodes for t in e["turns"] if e["players"][t["agent"]] == "intents-both-s0+cicero"]
    assert own and all(t["thoughts"].startswith("intent: ") for t in own)


def test_commands_say_once_which_filter_refuses_everything(
    player: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The filter wants a message to raise a probability by 1, which none can do."""
    filters = ("device=cpu", "env.max_entries=4", *WEAK, "games=2", "cicero.correspondence=1")
    small, crossed = (*filters, f"out={tmp_path}"), (*filters, "progress=false", "threads=1", f"runs={tmp_path}")
    monkeypatch.setattr("builtins.input", lambda prompt: "[message] hi")
    for main, how in (
        (evaluate.main, configure("evaluate", f"players=[{player}]", "progress=false", "threads=1", *small)),
        (play.main, configure("play", f"opponent={player}", *small)),
        (crossplay.main, configure("crossplay", f"players=[{player},scripted]", *crossed)),
    ):
        main(how)
        said = [line for line in capsys.readouterr().out.splitlines() if "no message passed the filters" in line]
        assert len(said) == 1 and re.search(r"draws were refused: .*correspondence \d+%", said[0]), said


@pytest.mark.usefixtures("no_pages")
def test_conditions_seat_talkers_as_their_run_does(
    player: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Talkers in a condition's cast use the filters of the run. Other filters give another file of kept games."""
    filters = ("nonsense=0", "correspondence=1", "candidates=2", "draws=3", "plan.iterations=3")
    how = ("+cicero@algo.cicero=default", *(f"algo.cicero.{each}" for each in filters))
    small = ("algo.iterations=1", "algo.games=2", "env.max_entries=4", "eval.games=0", "eval.final_games=2")
    model = ("model.kind=hf", f"model.name={player.removesuffix(CICERO)}/{DIALOGUE}", "base.data=none")
    quiet = ("threads=1", "progress=false", "device=cpu", f"runs={tmp_path}")
    train.main(configure("train", *how, *small, *model, *quiet))
    cfg = configure("conditions", "comparison=dond_talk", "select=dond-*", "games=2", "talk=0", *quiet)
    cfg.conditions = {"talker": {"cast": {"negotiator": {"partner": player, "partners": 1.0}}}}
    capsys.readouterr()
    conditions.main(cfg)
    said = re.findall(r"no message passed the filters for .*correspondence", capsys.readouterr().out)
    assert len(said) == 2  # one for the run and one for its base
    cells = [json.loads(path.read_text()) for path in Path(cfg.cells).glob("*.json")]
    assert [cell["about"]["told"]["settings"]["draws"] for cell in cells] == [3, 3]
    entrant = conditions.entrants(tmp_path, "dond-*", ())[0]
    changed = {**entrant.config["algo"], "cicero": {**entrant.config["algo"]["cicero"], "draws": 4}}
    condition, other = conditions.Condition(cast=cfg.conditions.talker.cast), {**entrant.config, "algo": changed}
    first, second = (
        conditions.cell_of(each, "talker", condition, cfg) for each in (entrant, replace(entrant, config=other))
    )
    assert first.file != second.file


def test_a_seat_of_a_cast(player: str) -> None:
    cast = {"negotiator": RoleConfig("learner", partner=player, partners=1.0)}
    check_players(cast, ENV, env_maker(ENV)())
    about = played_as(cast, PlayConfig())
    assert about["cicero"]["settings"]["draws"] == 10 and player in about["cicero"]["models"]


def test_memory_of_talkers_follows_their_draws_and_counts_their_action_model(player: str) -> None:
    """Learners that are told intents have an action model, too."""
    cast, table = {"negotiator": RoleConfig("learner", partner=player, partners=1.0)}, env_maker(ENV)()
    limits, folder = PPOConfig(max_new_tokens=24, cicero=CiceroConfig(draws=200)), Path(player.removesuffix(CICERO))
    learner, weights = {"learner": negotiator().lm.config}, size_of(negotiator().lm.config, limits.context).weights
    slots, models = player_slots(cast, table, limits, learner)
    assert [(each.per_game, each.more) for each in slots] == [(1, 0), (1, 237), (0, 160)] and models == 2 * weights
    slots, models = player_slots(
        {"negotiator": RoleConfig("learner")}, table, replace(limits, intents=str(folder)), learner
    )
    assert [(each.per_game, each.more) for each in slots] == [(2, 38), (0, 160)] and models == weights


@pytest.mark.parametrize(("kind", "game", "slots"), [
    (CiceroAgent, "dond", (237, 160)), (TableAgent, "among_us", (200, 6 * 201)), (PressAgent, "diplomacy", (1, 16)),
])  # fmt: skip
def test_talkers_say_how_many_slots_they_make(
    kind: Any, game: str, slots: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, make = list[int](), Engine.__init__

    def noted(self: Engine, policy: Any, slots: int, *how: Any) -> None:
        made.append(slots)
        make(self, policy, slots, *how)

    monkeypatch.setattr(Engine, "__init__", noted)
    many, parts = CiceroConfig(draws=200, nonsense=0.0), Parts("both", negotiator(), negotiator(), None)
    kind("talker", parts, many, **({} if game == "among_us" else {"game": game}), slots=2, context=64)
    assert kind.more_slots(many) == slots and (made[-1], sum(made)) == (slots[1], 2 + sum(slots))


def test_settings_of_a_training_run_reach_its_cast(player: str, tmp_path: Path) -> None:
    more = ("+cicero@algo.cicero=default", "algo.cicero.nonsense=0", "algo.cicero.draws=9")
    seat = (f"cast.negotiator.partner={player}", "cast.negotiator.partners=1")
    spec = run_spec(configure("train", f"runs={tmp_path}", *seat, *more))
    assert played_as(spec.cast, spec.algo)["cicero"]["settings"]["draws"] == 9
    assert spec.hash != run_spec(configure("train", f"runs={tmp_path}", *seat)).hash
    with pytest.raises(UserError, match=r"algo\.cicero\.candidates=8: must be at least 1, and at most draws=3"):
        run_spec(configure("train", f"runs={tmp_path}", *more, "algo.cicero.draws=3"))


@pytest.mark.usefixtures("no_pages")
def test_a_learner_is_told_intents_from_the_command_line(
    player: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learner and base are told intents in training, evaluation and studies. Whatever would play the run without them
    is refused."""
    folder, small = player.removesuffix(CICERO), ("algo.iterations=1", "algo.games=2", "env.max_entries=4", "threads=1")
    how = (*small, "eval.games=0", "eval.final_games=2", "progress=false", "device=cpu", f"runs={tmp_path}")
    how = (*how, "model.kind=hf", f"model.name={folder}/{DIALOGUE}", "base.data=none", "+cicero@algo.cicero=default")
    run = train.main(configure("train", *how, f"algo.intents={folder}", "algo.cicero.plan.iterations=2"))
    for name in ("base", "trained"):
        games = [json.loads(line) for line in (run / "episodes" / f"{name}.jsonl").read_text().splitlines()]
        assert all(turn["thoughts"].startswith("intent: ") for game in games for turn in game["turns"])
    inputs = json.loads((run / "run.json").read_text())["inputs"]
    assert inputs[f"algo.intents={folder}"] == folder_digest(Path(folder) / ACTION)
    play, seen = (f"runs={tmp_path}", "games=2", "threads=1", "device=cpu", "progress=false"), list[Episode]()
    people = (f"human={folder}/{DIALOGUE}", f"data.dond={write(tmp_path, test=TEST)}", f"publish={tmp_path / 'drift'}")
    people = (*people, "games=12")  # enough games that some replies of an untrained model are accepted
    for study, more in ((conditions, ("comparison=dond_talk", "talk=2")), (drift, people)):
        noting = lambda *how: seen.extend(found := rollout(*how)) or found  # noqa: E731
        monkeypatch.setattr(study, "rollout", noting)
        study.main(configure(study.__name__.rpartition(".")[2], *play, "select=dond-*", *more))
        assert seen and all(turn.thoughts.startswith("intent: ") for game in seen for turn in game.turns)
        seen.clear()
    measured = {row["metric"] for row in csv_rows(tmp_path / "drift" / "drift.csv.gz")}
    assert "drift/own_speech" in measured and "drift/human_dialogues" not in measured  # human dialogues have no intents
    planned = ("comparison=dond_talk", "+conditions.planned={planner: {belief: prior}}", f"publish={tmp_path / 'p'}")
    with pytest.raises(UserError, match=r"conditions\.planned: .* its learners are told intents"):
        conditions.main(configure("conditions", *play, "select=dond-*", *planned))
    evaluate.main(configure("evaluate", f"players=[{run}]", f"out={tmp_path / 'again'}", *play[1:]))
    again = [json.loads(line) for line in (tmp_path / "again/episodes.jsonl").read_text().splitlines()]
    assert all(turn["thoughts"].startswith("intent: ") for game in again for turn in game["turns"])
    monkeypatch.setattr(entrants, "longest_stream", lambda config: 512)
    assert entrants.as_in_runs(configure("evaluate"), [str(run), player]).algo.context == 512
    with pytest.raises(UserError, match="learned under intents, and would play without them"):
        marl.load(run)
    with pytest.raises(UserError, match=r"voices\[0\]=base: .* reads intents"):
        entrants.check_names([str(run)], ["base"], "dond")
    with pytest.raises(UserError, match=r"it learned under intents \(algo\.intents\), which plans leave out"):
        check_plans(f"{run}+plan", {"game": "dond"})
    plain = run_spec(configure("train", *how))
    assert "intents" not in plain.identity["algo"] and plain.folder != run
    with pytest.raises(UserError, match="no intents were trained here"):
        Work.of(run_spec(configure("train", *how, f"algo.intents={tmp_path}")))
    with pytest.raises(UserError, match=r"learners of env\.game=among_us are told none"):
        check_intents(PPOConfig(intents=folder), {"game": "among_us"})
    with pytest.raises(UserError, match=r"env\.style=natural: the action model of .* reads compact"):
        check_intents(PPOConfig(intents=folder), {**ENV, "style": "natural"})


def test_who_is_told_other_intents_is_another_player(tmp_path: Path) -> None:
    """A later study may replace the model that plans the intents, so kept games are named after that model, too."""
    run, talker = tmp_path / "run", tmp_path / "talker"
    save_policy(run / "policy", negotiator(), {"game": "dond"})
    algo = {"intents": str(talker), "iterations": 1, "max_new_tokens": 8, "context": 64}
    settings = {"env": ENV, "algo": algo, "eval": {"temperature": 1.0, "env": {}, "cast": {}}}
    settings |= {name: {} for name in ("cast", "loss", "model", "base")}
    (run / "config.yaml").write_text(json.dumps(settings))
    cast, found = {"negotiator": RoleConfig("learner", partner=str(run), partners=1.0)}, []
    entrant: Any = SimpleNamespace(learners={}, base=None)
    for number in (0, 1):
        shutil.rmtree(talker, ignore_errors=True)
        save_policy(talker / ACTION, negotiator(), {"game": "dond", "study": number})
        digests = (played_as(cast, PlayConfig())["policies"][str(run)], conditions.identity_of(str(run), entrant))
        found.append((*digests, crossplay.made_of(str(run), SimpleNamespace(chat=None))))  # type: ignore[arg-type]
    assert all(before != after for before, after in zip(*found, strict=True))


def test_a_learner_under_intents_reads_the_style_that_it_learned_in(player: str) -> None:
    """Agents read the style of their training if the game is played in another one (`eval.env.style`), with intents
    too."""
    limits = PPOConfig(games=2, concurrency=2, intents=player.removesuffix(CICERO))
    table, cast = env_maker({**ENV, "style": "natural"})(), {"negotiator": RoleConfig("learner")}
    agents = seat_players(cast, table, ENV, negotiator(), limits, 1.0, {"learner": ("trained", negotiator())})
    assert isinstance(agents["learner"], IntentConditionedAgent) and agents["learner"].style == "compact"


def test_players_of_another_study_replace_those_that_are_there(tmp_path: Path) -> None:
    for number in (0, 1):
        folders = {name: tmp_path / f"{name}-{number}" for name in (ACTION, "both")}
        for folder in folders.values():
            save_policy(folder, negotiator(), {"game": "dond", "study": number})
        made = intents.Made(0, ENV, folders, "", negotiator(), [], {}, {"both": negotiator()})
        intents.save_players(made, ensemble()[0], tmp_path / "runs")
    for name, source in ((DIALOGUE, folders["both"]), (ACTION, folders[ACTION])):
        assert folder_digest(tmp_path / "runs" / "intents-both-s0" / name) == folder_digest(source)


def test_a_command_makes_the_player_with_cicero(player: str) -> None:
    limits, how = PlayConfig(games=2, concurrency=2), CiceroConfig(nonsense=0.0)
    made = model_player(player, "c", negotiator(), limits, 2, 1.0, PlannerConfig(), how, "dond", "compact")
    assert isinstance(made, CiceroAgent) and made.style == "compact"


def test_players_that_read_intents_neither_have_nor_lend_a_voice(player: str) -> None:
    """A voice reads the stream of the player it speaks for, which does not hold the voice's own intents."""
    with pytest.raises(UserError, match=r"voices\[0\]=.*\+cicero: .*\+cicero reads intents"):
        entrants.check_names(["base"], [player], "dond")
    with pytest.raises(UserError, match=r"voices\[0\]=base: .*\+cicero reads intents"):
        entrants.check_names([player], ["base"], "among_us")
    entrants.check_names([player], ["silence"], "among_us")
    entrant: Any = SimpleNamespace(learners={}, base=None, limits=conditions.Limits())  # for plain models
    for seated in (player, f"{player.removesuffix(CICERO)}+plan"):
        with pytest.raises(UserError, match=r"voices\.imposter=silence: .*\+(cicero|plan) plans"):
            conditions.check_voices({"imposter": "silence"}, {"imposter": RoleConfig(seated)}, entrant)
    with pytest.raises(UserError, match=r"voices\.imposter=.*\+cicero: reads intents"):
        conditions.check_voices({"imposter": player}, {"imposter": RoleConfig("learner")}, entrant)


def test_a_player_that_talks_with_a_plan_is_not_planned_once_more(player: str) -> None:
    with pytest.raises(UserError, match=r"\+cicero\+plan: it plans as it is"):
        check_plans(f"{player}+plan", ENV)


@pytest.mark.parametrize(
    ("name", "game", "error"),
    [
        ("base+cicero", "dond", r"base has no intents; name a folder that experiments\.studies\.intents wrote"),
        ("nowhere+cicero", "dond", "nowhere has no intents"),
        ("base+cicero", "among_us", r"base has no intents; name a folder that experiments\.studies\.among_us_intents"),
    ],
)
def test_bad_players(name: str, game: str, error: str) -> None:
    role, env = ("negotiator", ENV) if game == "dond" else ("crewmate", {"game": "among_us"})
    cast = {role: RoleConfig(name)} | ({"imposter": RoleConfig("careful")} if game == "among_us" else {})
    with pytest.raises(UserError, match=error):
        check_players(cast, env, env_maker(env)())


def test_a_folder_without_an_arm(player: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no intents were trained here"):
        Parts.load(tmp_path, "cpu")
    write_json(tmp_path / PARTS, {"arm": "some"})
    with pytest.raises(UserError, match="arm=some must be one of none, state, intent, both"):
        Parts.load(tmp_path, "cpu")
    write_json(tmp_path / PARTS, {"arm": "both"})
    with pytest.raises(UserError, match="told intents in another form than players are now"):
        Parts.load(tmp_path, "cpu")


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("split=train", "split=train: must be val or test"),
        ("arms=[none]", r"arms=\['none'\]: games need the arms state and both"),
        ("arms=[some,state,both]", "arms: some must be one of none, state, intent, both"),
        ("games=-1", "games=-1"),
        ("data.dond=nowhere", r"data\.dond=nowhere: nowhere/data\.txt is missing"),
        ("filter_rate=0", r"filter_rate=0: must be a share between 0 and 1"),
        ("nonsense.val=0", r"nonsense\.val=0: must be a whole number, at least 1"),
        ("partners=[base]", "partners: base is neither people nor itself. There is no scripted negotiator 'base'"),
        ("temperature=-1", "temperature=-1: must be a number from"),
        ("lessons.epochs=-1", r"lessons\.epochs=-1: must be a whole number, at least 0"),
        ("lessons.share=1", r"lessons\.share=1: must be at least 0 and below 1"),
        ("cicero.plan.opponents=all", r"cicero\.plan\.opponents=all: must be one of exact, sampled, coshar"),
        ("cicero.candidates=20", r"cicero\.candidates=20: must be at least 1, and at most"),
    ],
)
def test_bad_settings_of_the_study(setting: str, error: str, tmp_path: Path) -> None:
    with pytest.raises((UserError, SystemExit), match=error):
        intents.main(configure("intents", setting, f"runs={tmp_path}", "progress=false"))


def test_games_are_played_again_with_other_limits_or_another_ensemble() -> None:
    """Kept games of the study are named after everything that decides them."""
    made = intents.Made(0, ENV, {}, "", negotiator(), [], {}, {})

    def key(arm: str, *changed: str, **limits: int) -> dict:
        cfg = configure("intents", *changed)
        return intents.played_by(made, arm, "people", CiceroConfig(), cfg, PlayConfig(**limits))

    assert key("all") == key("all", "control=1") and key("all") != key("all", max_new_tokens=9)
    assert key("all") != key("all", "nonsense.train=9") and key("intents") == key("intents", "nonsense.train=9")


ONE_WORD = DEAL.replace("i would like 4 hats", "deal")


@pytest.mark.parametrize(
    ("split", "rows"),
    [("train", (ONE_WORD, CLASH, LOST)), ("test", (ONE_WORD, DEAL, CLASH, LOST))],
)
def test_dialogues_that_no_corruption_changes_are_refused_before_training(
    split: str, rows: tuple[str, ...], tmp_path: Path
) -> None:
    """One case has equal messages throughout; the other has test dialogues without messages of the player."""
    data = write(tmp_path, rows)
    with pytest.raises(UserError, match=rf"changes any of the {split} messages.* \(nonsense\.{split}\), or .*games=0"):
        intents.main(configure("intents", f"data.dond={data}", f"runs={tmp_path}", "progress=false"))
    assert not (tmp_path / "bases").exists()


@pytest.fixture(scope="module")
def scripted_people(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_scripted(tmp_path_factory.mktemp("people") / "data", ENV, 120))


@pytest.mark.parametrize(
    ("learned", "shown", "error"),
    [
        ([kind for kind in KINDS if kind != "total"], [kind for kind in KINDS if kind not in ("total", "weak")], ""),
        (["items"], ["items", "weak"], ""),
        ([], ["items"], r"No kind of corruption changes any of the train messages.* \(nonsense\.train\)"),
        (["items"], ["weak"], r"No kind of corruption changes any of the test messages.* \(nonsense\.test\)"),
    ],
)
def test_kinds_of_nonsense_that_change_no_message_are_left_out_in_words(
    learned: list[str], shown: list[str], error: str, scripted_people: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    spoil = intents.spoiled
    monkeypatch.setattr(
        intents, "spoiled", lambda own, kind, *how: spoil(own, kind, *how) * (kind in (learned, shown)[len(own) < 60])
    )
    made = intents.Made(0, ENV, {}, scripted_people, negotiator(), [], {}, {})
    cfg = configure("intents", "nonsense={train: 60, val: 40, test: 40}")
    if error:
        with pytest.raises(UserError, match=error):
            intents.nonsense(made, cfg, tmp_path / "ensemble")
        return
    figures = intents.nonsense(made, cfg, tmp_path / "ensemble")
    assert list(Ensemble.load(tmp_path / "ensemble").kinds) == learned
    both = [kind for kind in KINDS if kind in learned and kind in shown]
    assert [m.rpartition("/")[2] for arm, m in figures if arm == intents.HEADS] == ["false", *both]
    assert [m.rpartition("/")[2] for arm, m in figures if arm == intents.UNSEEN] == both * (len(learned) > 1)
    lines = [line for line in capsys.readouterr().out.splitlines() if " changes none of " in line]
    assert lines == [
        *(f"nonsense: {kind} changes none of the train messages, so that it is left out, and in no figure"
          for kind in KINDS if kind not in learned),
        *(f"nonsense: {kind} changes none of the test messages, so that it is in no figure"
          for kind in learned if kind not in shown),
    ]  # fmt: skip


def test_a_filter_that_refused_nothing_counts_as_0() -> None:
    """Means over seeds would otherwise leave out the seeds in which a filter refused nothing."""
    found = intents.refused({"drawn": 4, "refused/value": 2, "spent": 1}, ["repetition", "value"])
    assert {name: (each.mean, each.n) for name, each in found.items()} == {
        "unfinished": (0.0, 4), "repetition": (0.0, 4), "value": (0.5, 4),
    }  # fmt: skip


def test_games_say_how_far_plans_were_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Players that have plans are measured, the model of people is not. A damaged file is named."""
    path, game = tmp_path / "games.json", {"score": 5.0, "points": 5.0, "deal": True, "nats": -2.0, "words": 2}
    plan = {"intent/claimed": rate([True, False]).to_json()}
    monkeypatch.setattr(
        intents, "games_of",
        lambda made, arm, *how: (
            path, {"games": [game, game], "counts": {}, "followed": {} if arm == "people" else plan}
        ),
    )  # fmt: skip
    made = intents.Made(0, ENV, {}, "", negotiator(), [], {}, {})
    found = intents.play(made, None, configure("intents"), None, SimpleNamespace(out=tmp_path))
    claimed = {arm: (each.mean, each.n) for (arm, metric), each in found.items() if metric == "intent/claimed"}
    assert claimed == dict.fromkeys(intents.ABLATIONS, (0.5, 2))
    del game["score"]
    with pytest.raises(UserError, match=r"games\.json does not hold an arm's games: remove it"):
        intents.play(made, None, configure("intents"), None, SimpleNamespace(out=tmp_path))


def test_labels_tell_people_from_scripts() -> None:
    """Labels say `scripted` if scripted dialogues stand in for people's."""
    human, scripted = (configure("intents", f"data.dond={folder}") for folder in ("DIR", "null"))
    for name, instead in (
        ("people v scripted", "model of scripts v scripted"),
        ("human messages", "scripted messages"),
        ("drift/human_perplexity", "drift/scripted_perplexity"),
    ):
        assert intents.called(name, human) == name and intents.called(name, scripted) == instead
        assert intents.called("all - intents", scripted) == "all - intents"


@pytest.mark.parametrize("whose", ["human", "scripted"])
def test_a_figure_says_whose_messages_it_is_about(whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, list] = {}
    monkeypatch.setattr(intents, "draw_panels", lambda panels, path: drawn.update(panels))
    metrics = [
        ("none", f"drift/{whose}_perplexity"),
        ("intent", "intent/items"),
        ("all", "game/score"),
        ("all", "intent/items"),
    ]
    rows = [table_row(arm, metric, [rate([True])]) for arm, metric in metrics]
    intents.draw(rows, tmp_path / "figure.svg")
    panels = (f"perplexity of {whose} messages", "stated split is the intent's", "score")  # generated ones alone
    assert drawn == {panel: [row] for panel, row in zip(panels, rows, strict=False)}


def test_intervals_of_shares_end_at_0_and_1() -> None:
    """Student's t over two seeds would reach beyond 0 and 1."""
    names = [f"filter/recall/{kind}" for kind in KINDS]
    names += [f"{intents.REFUSED}{name}" for name in ("unfinished", *ORDER)]
    for metric in ("intent/items", "intent/items/annotated", *names):
        assert wording(metric).label != metric
        row = table_row("arm", metric, [rate([True] * 9 + [False]), rate([True] + [False] * 9)])
        assert (row.mean, row.low, row.high) == (0.5, 0.0, 1.0)


@pytest.mark.slow
def test_the_study_goes_from_dialogues_to_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripted dialogues stand in, and are called so. The second call only tabulates."""
    small = (*STUDY, f"runs={tmp_path}", f"publish={tmp_path}/out")
    intents.main(configure("intents", *small))
    assert "scripted dialogues stand in for people's" in capsys.readouterr().out
    first = (tmp_path / "out" / "table.csv").read_text()
    rows = csv_rows(tmp_path / "out" / "table.csv")
    metrics = {row["metric"] for row in rows}
    assert {"intent/correspondence", "intent/stated", "filter/false", "game/score", "game/agreement"} <= metrics
    assert {r["arm"] for r in rows if r["metric"] == "drift/scripted_perplexity"} >= {"none", "state", "intent", "both"}
    assert {"no intents", "intents", "all", "model of scripts", "sampled", "coshar", "all - intents"} <= {
        r["arm"] for r in rows if r["metric"] == "game/score"
    }
    assert "scripted messages" in {row["arm"] for row in rows}
    assert (tmp_path / "out" / "figure.svg").is_file() and (tmp_path / "intents-both-s0" / PARTS).is_file()
    situations = csv_rows(tmp_path / "out" / "situations.csv")
    assert {row["intent_is"] for row in situations if row["place"] == "0"} == {"annotated", "another", "a third"}
    assert len({row["scripted"] for row in situations if row["place"] == "0"}) == 1
    for path in (tmp_path / "out").iterdir():
        text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
        assert not re.search("human|people", text), path
    seated = [set(json.loads(line)["players"].values()) for path in (tmp_path / "intents").glob("games-*.jsonl")
              for line in path.read_text().splitlines()]  # fmt: skip
    assert {"model of scripts", "partner"} in seated and not any("people" in names for names in seated)
    (card,) = map(json.loads, (tmp_path / "out" / "cards.jsonl").read_text().splitlines())
    assert card["run"].startswith("intents-s0@") and card["figures"]["all: game/score"]
    assert card["data"] == "scripted dialogues"
    monkeypatch.setattr(intents, "controlled", None)  # nothing is generated again
    path = next((tmp_path / "intents").glob("games-*.json"))  # games are, if some metric was missing
    write_json(path, {name: each for name, each in json.loads(path.read_text()).items() if name != "followed"})
    intents.main(configure("intents", *small, f"publish={tmp_path}/again"))
    assert (tmp_path / "again" / "table.csv").read_text() == first
    assert csv_rows(tmp_path / "again" / "situations.csv") == situations
    assert csv_rows(tmp_path / "again" / "control.csv.gz") == csv_rows(tmp_path / "out" / "control.csv.gz")
    monkeypatch.undo()
    shorter = ("games=0", "action_epochs=0", "epochs=0", "arms=[both]", "lessons.epochs=1")
    shorter = (*shorter, f"publish={tmp_path / 'words'}")
    intents.main(configure("intents", *small, *shorter))
    words = {row["metric"] for row in csv_rows(tmp_path / "words" / "table.csv")}
    assert "intent/stated" in words and not any(name.startswith(("game/", "filter/")) for name in words)
    assert not (tmp_path / "intents-both-s0" / NONSENSE).exists()
