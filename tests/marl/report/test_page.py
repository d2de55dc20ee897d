"""The report: one file that needs nothing else, in which model text stays text and figures are those of the runs."""

import json
import math
import re
from base64 import b64encode
from dataclasses import replace
from functools import cache
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import fromstring

import pytest
import yaml
from matplotlib.figure import Figure

from marl.common.errors import UserError
from marl.metrics.beliefs import belief_by_message
from marl.metrics.evaluation import evaluation_to_json, metrics
from marl.metrics.stats import Interval
from marl.metrics.tables import ablation_table
from marl.report.figures import ablation_figure, arm_colours, mean_entries, save_figure, training_panels
from marl.report.games import speakers
from marl.report.html import TEMPLATES
from marl.report.page import build_report, read_run
from marl.report.prose import among_us_sentences, findings, mixed, what_was_run, what_was_seen, who_plays
from marl.report.runs import arm_runs, base_names, mean_curve, measured_in
from marl.report.tables import columns_of
from marl.report.transcripts import write_episodes
from marl.types import Episode
from tests.marl.episodes import deal_game, failed_game, imposter_game, meeting_game

BASE = [deal_game(0), *(failed_game(seed) for seed in range(1, 12))]
TRAINED = [deal_game(seed) for seed in range(12)]


def make_run(
    folder: Path,
    arm: str = "full",
    seed: int = 0,
    trained: list[Episode] = TRAINED,
    base: list[Episode] = BASE,
    **card: Any,
) -> Path:
    """A run's folder as training leaves it."""
    folder.mkdir(parents=True)
    config = {
        "env": {"game": "dond", "objective": 1.0},
        "algo": {"kind": "ppo", "iterations": 3, "games": 8},
        "model": {"kind": "tiny"},
        "loss": {"listening": {"weight": 0.3}},
        "reward": {"speaking": {"weight": 0.5}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [
        {"iteration": i, "phase": phase, "game/score": 4.0 + i, "loss/listening": 2.0 - i / 10, "loss/entropy": -1.0}
        for i in range(1, 4)
        for phase in ("train", "eval")
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "run.json").write_text(json.dumps({"arm": arm, "seed": seed, "hardware": {"cores": 2}, **card}))
    write_games(folder, {"base": base, "trained": trained}, "dond", 1.0)
    return folder


def change(run: Path, **settings: Any) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | settings))


MEASURED: dict[int, tuple[list[Episode], Any, Any]] = {}  # by the list's id, which the list in it keeps taken


def write_games(folder: Path, conditions: dict[str, list[Episode]], game: str, objective: float = 0.0) -> None:
    """Writes transcripts and evaluation.json. A list of games that is written again is not measured again."""
    for name, games in conditions.items():
        if id(games) not in MEASURED:
            MEASURED[id(games)] = (games, metrics(games, game, objective), belief_by_message(games))
        write_episodes(folder / "episodes" / f"{name}.jsonl", games)
    found = {name: MEASURED[id(games)] for name, games in conditions.items()}
    evaluation = evaluation_to_json(
        {name: each[1] for name, each in found.items()}, {name: each[2] for name, each in found.items()},
        game=game, objective=objective, games=12,
    )  # fmt: skip
    (folder / "evaluation.json").write_text(json.dumps(evaluation))


class Page(HTMLParser):
    """Collects tags with their attributes, checks that they nest, and the text outside style."""

    VOID = frozenset({"meta", "br", "path", "use", "circle", "line", "rect", "image"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def page_of(folders: list[Path], out: Path) -> Page:
    build_report(folders, out, "A <title> & more")
    page = Page(out.read_text(encoding="utf-8"))
    assert page.open == []
    return page


def test_one_run(tmp_path: Path) -> None:
    """Model text stays text. The page needs nothing else, and ids are defined once, or would cut other plots."""
    nasty = "</div></details><script>alert(1)</script><img src=x onerror=y> {{ 7 * 7 }} \x1b[2J"
    spoken = replace(TRAINED[1], turns=(replace(TRAINED[1].turns[0], message=nasty), *TRAINED[1].turns[1:]))
    games = [TRAINED[0], spoken, *TRAINED[2:]]
    run = make_run(tmp_path / "run", trained=games, git_commit="abc123", command="train name=<b>x</b>")
    page = page_of([run], tmp_path / "out" / "report.html")
    text = page.text
    assert "A <title> & more" in text  # escaped in the source, as given on the page
    assert "Deal or No Deal, cooperative (λ = 1)" in text
    assert "3 iterations of 8 games" in text and "listening loss 0.3, speaking reward 0.5" in text
    # 1 of 12 games with 13 points; then all of them.
    assert "Score: base 1.083" in text and "trained 13.00 (13.00 – 13.00); 13.00 is the best" in text
    assert "The intervals are apart: it rose." in text
    assert "100.0 %" in text and "Learned from talk" in text
    assert "i want the balls" in text and "0.10 → 0.90" in text and "+1.20" in text
    assert "Deal: player_0 9, player_1 4; together 13 of at most 13" in text
    assert "<script>alert(1)</script>" in text and "{{ 7 * 7 }}" in text and "\x1b" not in text
    assert "train name=<b>x</b>" in text
    assert "abc123" in text and "cores 2" in text and "Interquartile" not in text
    titles = [
        title for title in ("Score over training", "Entropy over training", "Log-loss by message") if title in text
    ]
    assert len(titles) == 3
    assert sum(tag == "figure" for tag, _ in page.tags) == 5  # score, listening loss, entropy; two of beliefs
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["report.html"]

    source = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert not {tag for tag, _ in page.tags} & {"link", "img", "iframe", "object"}
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    assert [tag for tag, _ in page.tags].count("script") == 1 and f"<script>{script}</script>" in source
    allowed = next(a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a)
    digest = b64encode(sha256(script.encode()).digest()).decode()
    assert allowed == f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert {a["href"] for tag, a in page.tags if tag == "a"} <= {f"#{name}" for name in ids}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    for _, attributes in page.tags:
        for name, value in attributes.items():
            if name in ("href", "xlink:href", "src"):
                assert value is not None and value.startswith("#"), (name, value)
    assert "@import" not in source and not re.search(r"url\((?!#)", source)
    clips = re.findall(r'<clipPath id="([^"]+)"', source)
    assert len(clips) >= 5 and len(set(clips)) == len(clips)
    assert set(re.findall(r"url\(#([^)]+)\)", source)) <= set(clips)
    page_of([run], tmp_path / "again.html")
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "out" / "report.html").read_bytes()


def test_a_base_counts_once_for_the_games_that_it_was_measured_in(tmp_path: Path) -> None:
    """Copies of one base would otherwise look like seeds. A base in other games, or another base of the same seed, is
    named after its arm."""
    runs = []
    for arm, split, seed in (("seen", "train", 0), ("seen_too", "train", 0), ("unseen", "test", 1)):
        folder = make_run(tmp_path / arm, arm=arm, seed=seed, base_digest="b")
        change(folder, eval={"env": {"split": split}})
        found = json.loads((folder / "evaluation.json").read_text())
        found["by_game"] = {name: {"game/score": [1.0] * 12} for name in found["conditions"]}
        (folder / "evaluation.json").write_text(json.dumps(found))
        runs.append(read_run(folder))
    arms = arm_runs(runs)
    assert [arm.arm for arm in arms if arm.arm.startswith("base")] == ["base", "base of unseen"]
    assert not any(arm.by_game for arm in arms)
    assert all(arm.by_game for arm in arm_runs(runs[:2]))
    assert list(base_names(runs).values()) == ["base", "", "base of unseen"]
    assert [speaker.arm for speaker in speakers(runs)] == ["base", "base of unseen", "seen", "seen_too", "unseen"]
    assert set(mean_entries(runs)) == {"base", "base of unseen", "seen", "seen_too", "unseen"}
    base = columns_of(arms)["base"]["game/score"]
    assert base.low < base.mean < base.high
    other = read_run(make_run(tmp_path / "other", seed=0, arm="big", base_digest="c"))
    clash = [replace(runs[0], config=other.config), other]
    assert "base of big" in [arm.arm for arm in arm_runs(clash)]
    own = [replace(runs[0], config=other.config), replace(other, seed=3)]
    assert [arm.arm for arm in arm_runs(own)].count("base") == 2
    with pytest.raises(UserError, match=r"seen repeats arm 'trained', seed 0: give each run its own seed or arm"):
        arm_runs([runs[0], runs[0]])
    semi = replace(runs[2], arm="big", seed=0, config={**other.config, "env": {"game": "dond", "objective": 0.0}})
    assert {arm.arm for arm in arm_runs([semi, other])} == {
        "base (dond, λ=0)", "big (dond, λ=0)", "base (dond, λ=1)", "big (dond, λ=1)",
    }  # fmt: skip


def test_runs_are_measured_in_the_same_games_whatever_their_seed(tmp_path: Path) -> None:
    """A partner that sits in no evaluation game does not count, nor does the seed of a run that is an opponent. Other
    seats make other games."""
    shared = {"crewmate": {"player": "learner", "partner": "base", "partners": 0}}

    def measured(cast: dict[str, Any], eval_cast: dict[str, Any] | None) -> str:
        return measured_in(replace(run, config={**run.config, "cast": cast, "eval": {"cast": eval_cast}}))

    run = read_run(make_run(tmp_path / "run"))
    first = measured(shared, None)
    nobody = {"crewmate": {"player": "learner", "partner": "random", "partners": 0}}
    assert first == measured(shared, {}) == measured(nobody, {})
    seated = {"crewmate": {"player": "learner", "partner": "base", "partners": 1}}
    assert first == measured(seated, {"crewmate": {"partners": 0}}) != measured(seated, {})
    pooled = {"crewmate": {"player": "learner", "partner": "base", "partners": 0.5, "pool": 8, "pick": "wins"}}
    assert measured(pooled, {}) == first  # past selves play in training only
    rivals = [
        measured(shared, {"imposter": {"player": f"runs/x-full-s{seed}-{seed}c40e5a8"}})
        for seed in (2, 3)
    ]  # fmt: skip
    assert rivals[0] == rivals[1] != first
    damaged: Any = ["crewmate"]
    assert measured(shared, damaged) == measured(shared, {"crewmate": damaged}) == first


def test_runs_from_different_bases_or_commits_say_so(tmp_path: Path) -> None:
    cards = {"full": ("b1", "c1"), "game_only": ("b2", "c1"), "listening_only": ("b1", "c1")}
    folders = [
        make_run(tmp_path / arm, arm=arm, base_digest=base, git_commit=commit)
        for arm, (base, commit) in cards.items()
    ]  # fmt: skip
    runs = [read_run(folder) for folder in folders]
    assert mixed(runs) == [
        "Runs of seed 0 start from different bases (full, listening_only from b1; game_only from b2), so that they "
        "differ in these as well."
    ]
    assert "start from different bases" in page_of(folders, tmp_path / "page.html").text
    assert mixed([runs[0], runs[2]]) == []
    unlike = make_run(tmp_path / "unlike", seed=1, base_digest="b3", git_commit="c1")
    change(unlike, seed=1, loss={"listening": {"weight": 0.0}})
    assert mixed([runs[0], read_run(unlike)]) == ["Seeds of full differ in loss.listening.weight as well (0.3, 0.0)."]
    later = make_run(tmp_path / "later", seed=1, base_digest="b3", git_commit="c2")
    assert mixed([runs[0], read_run(later)]) == ["The runs are of 2 commits: c1, c2."]


def test_findings_claim_no_more_than_the_intervals() -> None:
    def column(score: float, gain: float) -> dict[str, Interval]:
        return {
            "game/score": Interval(score, score - 1, score + 1, 9),
            "belief/gain_over_prior": Interval(gain, gain - 0.1, gain + 0.1, 9),
        }

    overlap = findings({"base": column(5, -0.5), "trained": column(6, 0.05)})
    assert overlap[0] == "Score: base 5.000 (4.000 – 6.000), trained 6.000 (5.000 – 7.000). The intervals overlap."
    assert "base: after the last message the belief is worse than the exact prior" in overlap[1]
    assert "trained: after the last message the belief cannot be told from the exact prior" in overlap[2]
    fell = findings({"base": column(9, 0.5), "trained": column(6, 0.5)})
    assert "it fell" in fell[0] and "beats what the rules alone tell" in fell[1]
    one = {"game/score": Interval(5, math.nan, math.nan, 1)}  # game, which has no interval
    assert findings({"base": one, "trained": one}) == ["Score: base 5.000, trained 5.000."]


def test_a_run_that_only_began(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("seed: 4\n")
    (run / "metrics.jsonl").write_text('{"iteration": 1, "phase": "train", "game/score": 3.0}\n{"iteration": 2, "ph')
    text = page_of([run], tmp_path / "report.html").text
    assert "Score over training" in text and "One run, seed 4." in text and "What the games say" not in text


def test_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no runs"):
        build_report([], tmp_path / "report.html", "t")
    with pytest.raises(UserError, match=r"nowhere is not a run's folder: it has no config\.yaml"):
        build_report([tmp_path / "nowhere"], tmp_path / "report.html", "t")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/report\.html cannot be written \(File exists\)"):
        build_report([make_run(tmp_path / "whole")], tmp_path / "file" / "report.html", "t")


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("config.yaml", b"env: dond", "expected the settings of a run"),
        ("config.yaml", b"a: \xff", "expected YAML"),
        ("config.yaml", b"loss: {listening: [1]}", "run is damaged"),
        ("config.yaml", b"algo: {update: {epochs: many}}", "run is damaged"),
        ("timing.jsonl", b'{"iteration": 1, "phase": "train", "time/update": Infinity}\n\n', "line 1 is not a line"),
        ("run.json", b"[]", "expected one JSON object"),
        ("run.json", b'{"seed": "one"}', "expected a whole number for its seed"),
        ("metrics.jsonl", b'[]\n{"iteration": 1, "phase": "train"}\n', "line 1 is not a line of metrics"),
        ("metrics.jsonl", b'{"iteration": 1, "phase": "train", "x": null}\n\n', "line 1 is not a line of metrics"),
        ("evaluation.json", b"{", "expected one JSON object"),
        ("evaluation.json", b'{"conditions": {"base": {"game/score": {"mean": 1}}}}', "expected figures with mean"),
        ("evaluation.json", b'{"conditions": {}, "belief_by_message": {"base": [[1]]}}', "expected figures with mean"),
        ("episodes/base.jsonl", b"\xff", "line 1: expected a transcript"),
    ],
)
def test_damaged_files_of_a_run_are_named(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    run = make_run(tmp_path / "run")
    timing = {"phase": "train", "speed/update_tokens_per_second": 40.0, "time/update": 2.5}
    lines = [json.dumps({"iteration": i, **timing}) for i in (1, 2, 3)]
    (run / "timing.jsonl").write_text("\n".join(lines) + "\n")
    read_run(run)
    (run / name).write_bytes(data)
    with pytest.raises(UserError, match=said):
        read_run(run)


# --- Among Us ---------------------------------------------------------------------------------------------------------
def make_among_us_run(folder: Path, arm: str, seed: int, wins: int, base_wins: int = 2) -> Path:
    """A run of 12 evaluation games, `wins` of which the crewmates won; its base, one for each seed, won `base_wins`."""
    folder.mkdir(parents=True)
    env = {"game": "among_us", "width": 2, "height": 2, "players": 6, "imposters": 1, "tasks": 2, "shaping": 0.0}
    cast = {
        "crewmate": {"player": "learner", "partner": "base", "partners": 1},
        "imposter": {"player": "base", "partner": "base", "partners": 0},
    }
    config = {"env": env, "cast": cast, "algo": {"kind": "ppo", "iterations": 2, "games": 50}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [
        {"iteration": i, "phase": phase, "game/win_rate/crewmates": wins / 12 * i / 2, "vote/imposter": 0.2 * i,
         "talk/names_imposter": 0.1 * i, "game/score": 0.5, "errors/per_turn": 0.0}
        for i, phase in ((0, "eval"), (1, "train"), (2, "train"), (2, "eval"))
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    card = {"arm": arm, "seed": seed, "base": f"bases/seed-{seed}", "command": "train.py runs=/tmp/x seed=0"}
    (folder / "run.json").write_text(json.dumps(card))
    write_games(folder, {"base": games_won(base_wins), "trained": games_won(wins)}, "among_us")
    return folder


@cache
def games_won(won: int) -> list[Episode]:
    return [meeting_game(game, "crewmates" if game < won else "imposters") for game in range(12)]


@pytest.fixture(scope="module")
def among_us_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three arms, two seeds each."""
    root = tmp_path_factory.mktemp("among_us")
    return [
        make_among_us_run(root / f"{arm}-{seed}", arm, seed, wins + seed)
        for arm, wins in (("full", 9), ("game_only", 5), ("listening_only", 3))
        for seed in (0, 1)
    ]


def test_past_selves_do_not_play_in_what_is_reported() -> None:
    config = {
        "env": {"imposters": 1, "width": 2, "height": 2, "players": 5, "tasks": 4},
        "cast": {"imposter": {"player": "rival", "partner": "base", "partners": 0.5, "pool": 8}},
    }
    assert who_plays(config)[-1] == "Who plays: imposters are rival."


@pytest.mark.parametrize(
    ("drawn", "said"),
    [
        ({}, "2 by 2 rooms, 5 players of whom one is an imposter. .* all of their 4 tasks each"),
        ({"layouts": [], "tasks_range": None}, "2 by 2 rooms, .* all of their 4 tasks each"),
        ({"layouts": [[2, 1]]}, "Grid Among Us, 2 by 1 rooms, "),
        (
            {"layouts": [[2, 1], [3, 2]], "tasks_range": [1, 3]},
            "Us, 2 by 1 or 3 by 2 rooms, .* their 1 to 3 tasks each",
        ),
    ],
)
def test_rooms_and_tasks_that_are_drawn_are_those_that_are_told(drawn: dict[str, Any], said: str) -> None:
    env = {"imposters": 1, "width": 2, "height": 2, "players": 5, "tasks": 4, **drawn}
    (sentence,) = among_us_sentences({"env": env})
    assert re.search(said, sentence), sentence


def test_the_page_of_among_us(tmp_path: Path) -> None:
    page = page_of([make_among_us_run(tmp_path / "run", "full", 0, 9)], tmp_path / "report.html")
    text = page.text
    assert "Grid Among Us, 2 by 2 rooms, 6 players of whom one is an imposter." in text
    assert "Who plays: crewmates are learner, 1 of them base; imposters are base." in text
    assert "Crewmates win: base 16.7 %" in text and "trained 75.0 %" in text
    assert "How games ended" in text and "training games" in text
    for title in ("Crewmates' wins", "Votes for the imposter", "Messages naming the imposter", "Gain by message"):
        assert title in text
    # Never happened, or says the same as the wins.
    assert "Refused replies over training" not in text and "Score over training" not in text
    # The game: who is who, what happened, messages with what they did to each listener, votes, the end.
    assert re.search(r"Red imposter base alive .* Orange crewmate learner 2 killed in step 2 by Red", text)
    assert "step 2 Red kills Orange in bridge (0,0)" in text and "steps 0 to 4: 11 moves" in text
    assert "Belief in Red before any message: Green 0.90, Blue 0.25, Pink 0.25" in text
    assert "Green · learner red killed orange i saw it Blue 0.25 → 0.55 Pink 0.25 → 0.35 +0.40" in text
    assert "Red imposter · base i was with green in lab" in text
    assert "Green Red ✓ 0.90" in text and "Green 2, Red 2, skip 1: nobody is voted out" in text
    marked = [page.words[i] for i, word in enumerate(page.words) if word.lower() == "red"]
    assert "RED" in marked  # a piece of its own, in bold
    assert text.count("Nobody wins: time ran out") == 48  # twelve of each condition, at the head and at the end
    plays = [attributes for tag, attributes in page.tags if tag == "article"]
    assert [play["data-arm"] for play in plays] == ["base", "trained"] * 12
    # Green names Red, and moves Blue by .3 and Pink by .1; then nothing is learned.
    assert {(play["data-named"], play["data-ending"]) for play in plays} == {("yes", "Nobody wins")}


def test_what_is_said_most_stands_beside_what_the_base_says(tmp_path: Path) -> None:
    """Two seeds start from one base, and one has learned a password. Games name their players as training does."""
    folders = [make_among_us_run(tmp_path / str(seed), "full", seed, 9) for seed in (0, 1)]
    for folder in folders:
        for condition, player in (("base", "untrained"), ("trained", "trained")):
            path = folder / "episodes" / f"{condition}.jsonl"
            text = path.read_text().replace('"learner"', f'"{player}"')
            if (folder.name, condition) == ("1", "trained"):
                text = text.replace("vote for green", "i came from lab").replace("i saw nothing", "i came from bridge")
            path.write_text(text)
    found = speakers([read_run(folder) for folder in folders])
    assert [(s.arm, s.seed, s.games, s.messages) for s in found] == [
        ("base", 0, 12, 48), ("base", 1, 12, 48), ("trained", 0, 12, 48), ("trained", 1, 12, 48),
    ]  # fmt: skip
    assert (found[3].forms[0].text, found[3].forms[0].uses, found[3].forms[0].naming) == ("i came from {room}", 24, 0)
    text = page_of(folders, tmp_path / "report.html").text
    assert "What is said most" in text and "trained 1 48 0.50 i came from {room} 0.00 0.00" in text
    assert "0.25 {name} killed {name} i saw it 1.00 1.00" in text


def test_among_us_arms_have_their_published_names_and_order(among_us_runs: list[Path], tmp_path: Path) -> None:
    folders = among_us_runs
    arms = arm_runs([read_run(folder) for folder in folders])
    assert [(arm.arm, arm.seed) for arm in arms] == [
        ("base", 0), ("base", 1), ("L", 0), ("L", 1), ("RL", 0), ("RL", 1), ("RL+L+S", 0), ("RL+L+S", 1),
    ]  # fmt: skip
    wins = columns_of(arms)["RL"]["game/win_rate/crewmates"]
    assert wins.mean == pytest.approx(5.5 / 12) and wins.high == pytest.approx(5.5 / 12 + 12.7062 / 24, abs=1e-4)
    page = page_of(folders, tmp_path / "report.html")
    assert "6 runs of 3 arms (RL+L+S, RL, L), seeds 0, 1." in page.text and "over training seeds" in page.text
    assert "RL is the game's reward, L is listening, S is speaking." in page.text
    # 9 - 5 of 12 games with either seed, so the interval has no width.
    assert "RL+L+S - RL: +33.3 (+33.3 to +33.3)" in page.text and "RL+L+S - L: +50.0" in page.text
    runs = [read_run(folder) for folder in folders]
    assert what_was_seen(arms, runs) == [
        "What was seen: no difference between RL+L+S and RL in votes for the imposter (over 2 seeds).",
        "What was seen: RL+L+S wins 33.3 points more than RL, more than chance explains (95 % interval +33.3 to +33.3, "
        "over 2 seeds).",
    ]
    assert "Interquartile means" in page.text and "share of seeds that reach at least this" in page.text
    headers = [words for words in page.words if words in ("base", "RL+L+S", "RL", "L", "trained")]
    assert headers[:4] == ["base", "L", "RL", "RL+L+S"] and "trained" not in headers


def test_arms_have_the_same_colours_in_every_figure() -> None:
    """Arms of both games share colours. Unknown arms get the remaining ones, each its own."""
    first = arm_colours(["base", "L", "RL", "RL+L", "RL+S", "RL+L+S"])
    assert len(set(first.values())) == 6
    other = arm_colours(["game_only", "mine", "full", "yours"])
    assert (other["game_only"], other["full"]) == (first["RL"], first["RL+L+S"])
    assert len(set(other.values())) == 4
    assert len(set(arm_colours([f"arm {i}" for i in range(8)]).values())) == 8


def test_curves_are_means_over_seeds_by_games_played(tmp_path: Path) -> None:
    runs = [read_run(make_among_us_run(tmp_path / str(seed), "full", seed, 6 + 2 * seed)) for seed in (0, 1)]
    panels = training_panels(runs, columns_of(arm_runs(runs)), {"base": 0, "trained": 1})
    assert [panel["metric"] for panel in panels] == ["game/win_rate/crewmates", "vote/imposter", "talk/names_imposter"]
    assert "by chance" in panels[1]["svg"] and "by chance" not in panels[0]["svg"]
    x, intervals = mean_curve([{0: 0.0, 100: 0.5}, {0: 0.0, 100: 2 / 3, 200: 1.0}])
    assert x == [0, 100]
    half = 12.7062 * (1 / 6) / 2
    assert (intervals[1].mean, intervals[1].high) == (pytest.approx(7 / 12), pytest.approx(7 / 12 + half, abs=1e-4))


def test_belief_by_message_is_of_all_seeds(among_us_runs: list[Path]) -> None:
    runs = [read_run(folder) for folder in among_us_runs]
    found = mean_entries(runs)
    assert set(found) == {"base", "RL+L+S", "RL", "L"} and len(found["base"]) == 6
    # Before any message: Green .9 right, Blue and Pink .25 each of four, which ties.
    assert found["RL"][0]["accuracy"].mean == pytest.approx((1 + 1 / 4 + 1 / 4) / 3)
    assert found["RL"][0]["accuracy"].seeds == 2 and found["RL"][0]["chance_accuracy"].mean == pytest.approx(1 / 4)
    few = read_run(among_us_runs[0])
    few.evaluation["belief_by_message"]["trained"][0]["accuracy"]["n"] = 9
    assert {"accuracy"} == mean_entries(runs[1:2])["trained"][0].keys() - mean_entries([few])["trained"][0].keys()


def test_published_figures_and_curves_stand_beside(among_us_runs: list[Path], tmp_path: Path) -> None:
    runs = [read_run(folder) for folder in among_us_runs]
    rows, metric = ablation_table(arm_runs(runs)), "game/win_rate/crewmates"
    published = {"RL": Interval(0.32, 0.29, 0.33, 0), "absent": Interval(0.5, 0.4, 0.6, 0)}
    ablation_figure(rows, [metric], tmp_path / "bare.svg")
    ablation_figure(rows, [metric], tmp_path / "full.svg", published=published, runs=runs, curve=metric)
    ablation_figure(rows, [metric], tmp_path / "bare.png")
    assert (tmp_path / "bare.png").stat().st_size > 5_000
    first = (tmp_path / "bare.svg").read_bytes()
    ablation_figure(rows, [metric], tmp_path / "bare.svg")
    assert (tmp_path / "bare.svg").read_bytes() == first
    bare, full = ((tmp_path / name).read_text() for name in ("bare.svg", "full.svg"))
    assert "fill: #ffffff; stroke: #777777" in full and "fill: #ffffff; stroke: #777777" not in bare
    assert "training games" in full and full.count("fill-opacity: 0.14") == 3  # a band for each arm


def test_figures_in_files_say_each_style_once_and_no_line_of_one_point(tmp_path: Path) -> None:
    figure = Figure()
    axes = figure.add_axes((0, 0, 1, 1))
    for heights in ([0.0, 1.0], [2.0, 3.0]):
        axes.plot(heights, color="#0072b2", linewidth=3)
    axes.plot([0.5], color="#d55e00", marker="o")
    save_figure(figure, tmp_path / "lines.svg")
    text = (tmp_path / "lines.svg").read_text()
    fromstring(text)  # each group still ends
    styles = dict(re.findall(r"^\.(s\d+)\{(.*)\}$", text, re.M))
    assert len(set(styles.values())) == len(styles) and " style=" not in text and "<g id=" not in text
    (wide,) = (name for name, style in styles.items() if "stroke: #0072b2; stroke-width: 3" in style)
    assert len(re.findall(rf'<path d="M \S+ \S+\nL \S+ \S+\n" clip-path="url\(#\w+\)" class="{wide}"/>', text)) == 2
    assert sum("#d55e00" in style for style in styles.values()) == 2  # the point's edge and its inside; it has no line


OWN_TERMS = {
    "loss": {"listening": {"weight": 0.3}, "doubt": {"_target_": "mine.Doubt", "weight": 0.1}},
    "reward": {"speaking": {"weight": 0.5}, "short": {"_target_": "mine.Short"}},
}


def with_terms(run: Path, **config: Any) -> Path:
    """Changes the settings of a run and logs terms of the user's own for it."""
    change(run, **config)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    own = {"loss/doubt": 0.7, "reward/short": -0.1}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row | own) + "\n" for row in rows))
    return run


def test_terms_of_ones_own_are_in_the_sentences_of_weights_and_the_figures(tmp_path: Path) -> None:
    """One arm has terms of the user's own, the other does not."""
    off = {"loss": {"listening": {"weight": 0.0}}, "reward": {"speaking": {"weight": 0.5}}}
    runs = [
        with_terms(make_run(tmp_path / "a", arm="full"), **OWN_TERMS),
        with_terms(make_run(tmp_path / "b", arm="game_only"), **off),
    ]
    weights = "doubt loss 0.1, listening loss 0.3, short reward its default, speaking reward 0.5."
    assert f"Weights: {weights}" in what_was_run([read_run(runs[0])])
    text = page_of(runs, tmp_path / "report.html").text
    assert "Loss: doubt over training" in text and "Reward: short over training" in text
    assert (
        "Weights in which arms differ: full: doubt loss 0.1, listening loss 0.3, short reward its default; "
        "game_only: doubt loss absent, listening loss 0, short reward absent."
    ) in text


def test_a_game_of_ones_own_shows_its_endings(tmp_path: Path) -> None:
    ends = ["the right colour is named", "the wrong colour is named", "time runs out"]
    games = [
        replace(imposter_game(), seed=i, facts={}, outcome={"how": how, "winner": "red team" if i else None})
        for i, how in enumerate(ends)
    ]
    run = make_run(tmp_path / "run")
    change(run, env={"game": "hint"})
    evaluation = evaluation_to_json({"trained": metrics(games, "hint")}, game="hint", games=3)
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    write_episodes(run / "episodes" / "trained.jsonl", games)
    text = page_of([run], tmp_path / "report.html").text
    assert "How games ended" in text and "Won by red team" in text and "unknown" not in text
    assert all(f"Ends: {how}" in text for how in ends)
    assert "the right colour is named" in text and "red team won (time runs out)" in text
