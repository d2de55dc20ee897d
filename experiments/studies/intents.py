"""Intents, control, filters and an ablation in games: Cicero's method in Deal or No Deal, from human dialogues.

    python -m experiments.studies.intents data.dond=DIR

For each seed it trains an action model on truthful dialogues, from one that all seeds share, annotates human messages
with intents, trains a dialogue model for each arm (no grounding, own values, intents, both) and the nonsense ensemble,
and plays the same games with the planner and each of its filters switched on. Everything is kept in `cells`, so that
the same command goes on. The models of the arm `both` make a player, `runs/intents-both-sSEED+cicero`.

Writes `table.csv`, `figure.svg`, `cards.jsonl` (a line a seed), `control.csv.gz` (generated messages that name items),
`situations.csv` (messages at the same places under three intents), `filters-sSEED.csv` (refusals in play) and
`correspondence.csv.gz` (the tested messages, to be read by hand).
"""

import functools
import shutil
from collections.abc import Mapping, Sequence, Sized
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from experiments.launch.command import command
from experiments.launch.terminal import say
from experiments.setup.players import text_agent
from experiments.setup.refusals import say_refusals
from experiments.setup.spec import PlaySpec, play_spec
from experiments.studies.cells import Workspace, begin, check_play
from experiments.studies.intents_models import Made, make_models, read_views, stand_in
from experiments.studies.talkers import (
    HEADS,
    REFUSED,
    Figures,
    SeedTables,
    cached_figures,
    card,
    draw_panels,
    limits_of,
    publish,
    refused,
    save_player,
)
from marl.agents.base import Agent
from marl.agents.model import PlayConfig, model_agent, model_agent_settings
from marl.common.errors import UserError, check_count, check_counts, check_temperature
from marl.common.files import digest, read_json, reading_kept, write_json
from marl.intents.agent import ACTION, DIALOGUE, NONSENSE, CiceroAgent, CiceroConfig, Parts
from marl.intents.annotate import correspondence, named_items
from marl.intents.borrowed import Lessons
from marl.intents.corruptions import KINDS, Bigrams, Place
from marl.intents.filters import ORDER
from marl.intents.measure import (
    control,
    controlled,
    followed,
    human_messages,
    human_perplexity,
    perplexity,
    read_messages,
    spoiled,
)
from marl.intents.nonsense import Ensemble, train
from marl.intents.streams import ARMS, FORM
from marl.intents.training import read_in
from marl.metrics.drift import likelihood, replayed_rows
from marl.metrics.stats import Interval, Metrics, bootstrap_mean, bootstrap_ratio, rate
from marl.metrics.tables import TableRow, write_csv
from marl.report.transcripts import write_episodes
from marl.rollout.cast import alternating
from marl.rollout.games import env_maker
from marl.rollout.rollout import rollout
from marl.rollout.seeds import EVALUATION, draw_games

ABLATIONS: Mapping[str, Mapping[str, Any]] = {  # what is switched on beside the plan; `filters` off unless named
    "no intents": {},
    "intents": {},
    "all": {"repetition": True, "nonsense": True, "correspondence": True, "value": True},
    "+ repetition": {"repetition": True},
    "+ nonsense": {"nonsense": True},
    "+ correspondence": {"correspondence": True},
    "+ value": {"value": True},
    "sampled": {"plan": {"opponents": "sampled"}},  # intents, planned against a partner who is drawn
    "coshar": {"plan": {"opponents": "coshar", "lambdas": (0.3,)}},  # ... or whose claim is correlated with one's own
}
ITSELF = "itself"  # a partner: the player of the arm
PEOPLE = "people"  # the model of people: the dialogue model that knows its own values and no intent
SITUATIONS = 8  # places whose messages are shown under several intents
BY_PEOPLE = "human messages"
SCRIPTED = {"human": "scripted", PEOPLE: "model of scripts"}  # in names, where scripted dialogues stand in
NAIVE = "naive annotation"  # the same for all seeds
UNSEEN = "ensemble, kind unseen"
OFF = {"repetition": False, "nonsense": 0.0, "correspondence": None, "value": 1.0}


@command("intents", implies={"data.dond": "base=human"})
def main(cfg: DictConfig) -> None:
    """Makes what is not made yet, measures, and tabulates."""
    check(cfg)
    spec, place = play_spec(cfg), begin(cfg)
    data = str(cfg.data.dond) if cfg.data.dond else stand_in(cfg, spec, place)
    if cfg.games:
        check_messages(data)
    tables = SeedTables(place.out, draw)
    for seed in cfg.seeds:
        made = make_models(seed, data, cfg, spec, place)
        figures = {(called(a, cfg), called(m, cfg)): each for (a, m), each in of_seed(made, cfg, spec, place).items()}
        line = card(
            f"intents-s{seed}", seed, made.models, figures, arm="intents", command="intents.py", games=cfg.games,
        )  # fmt: skip
        line |= {} if cfg.data.dond else {"data": "scripted dialogues"}
        tables.add(line, {key: each for key, each in figures.items() if key[0] != NAIVE or seed == cfg.seeds[0]})
    tables.say()


def of_seed(made: Made, cfg: DictConfig, spec: PlaySpec, place: Workspace) -> Figures:
    """All figures of one seed, of which each part is measured once and kept."""
    about = {"models": made.models, "split": cfg.split, **read_in(made.env, spec.base)}
    ensemble, figures = None, {}
    if cfg.games:
        spoil = {"nonsense": dict(cfg.nonsense), "rate": cfg.filter_rate, **about}
        folder = place.cells / f"nonsense-s{made.seed}-{digest(spoil)[:8]}"
        figures = cached_figures(folder.with_suffix(".json"), lambda: nonsense(made, cfg, folder))
        ensemble = Ensemble.load(folder)
    save_players(made, ensemble, Path(cfg.runs))
    found = {(arm, "intent/correspondence"): each for arm, each in annotation(made, place).items()}
    said = {"temperature": cfg.temperature, **about}
    control = digest({"control": cfg.control, **said})[:8]
    for arm in cfg.arms:
        path = place.cells / f"dialogue-{arm}-s{made.seed}-{control}.json"
        found |= cached_figures(path, functools.partial(dialogue, made, arm, cfg, path.with_suffix(".csv.gz")))
    if not made.seed and "both" in cfg.arms:
        publish(place.cells / f"dialogue-both-s0-{control}.csv.gz", place.out / "control.csv.gz")
        path = place.cells / f"situations-{digest({'most': SITUATIONS, **said})[:8]}.json"
        if not path.exists():
            write_json(path, {"rows": situations(made, cfg.temperature)})
        columns = ("place", "intent_is", "counts", "intent", "heard", called("human", cfg), "message")
        found_there = read_json(path)
        with reading_kept(path, "situations"):
            rows = [list(row) for row in found_there["rows"]]
        write_csv(place.out / "situations.csv", columns, rows)
    return {**found, **figures, **(play(made, ensemble, cfg, spec, place) if ensemble else {})}


def check(cfg: DictConfig) -> None:
    """Refuses bad settings of this command."""
    check_play(cfg, least=0)
    if cfg.split not in ("val", "test"):
        raise UserError(f"split={cfg.split}: must be val or test; models learn from the others")
    for arm in cfg.arms:
        if arm not in ARMS:
            raise UserError(f"arms: {arm} must be one of {', '.join(ARMS)}")
    if cfg.games and not {"state", "both"} <= {*cfg.arms}:
        raise UserError(f"arms={list(cfg.arms)}: games need the arms state and both. Add them")
    if not 0 < cfg.filter_rate < 1:
        raise UserError(f"filter_rate={cfg.filter_rate}: must be a share between 0 and 1, such as 0.05")
    for name, count in cfg.nonsense.items():
        check_count(count, f"nonsense.{name}")
    for partner in {*cfg.partners} - {PEOPLE, ITSELF}:
        try:
            text_agent(partner, {"game": "dond"})
        except UserError as error:
            raise UserError(f"partners: {partner} is neither {PEOPLE} nor {ITSELF}. {error}") from error
    check_temperature(cfg.temperature, "temperature")
    for seed in cfg.seeds:
        check_count(seed, "seeds", 0)
    check_counts(cfg, ("action_epochs", "epochs"), 0)
    check_counts(cfg, ("rounds", "own_epochs", "control", "scripted_games"))
    Lessons(**dict(cfg.lessons))


# --- Models -----------------------------------------------------------------------------------------------------------
def check_messages(data: str) -> None:
    """Refuses dialogues of which no kind of corruption changes a message, before anything learns from them."""
    own = {
        split: [
            (text, view.counts) for view in read_views(data, split) for who, text in view.turns if who == "YOU" and text
        ]
        for split in ("train", "test")
    }
    strangers, rng = [text for text, _ in own["train"]], np.random.default_rng(0)
    weak = Bigrams.of(strangers)
    for split, said in own.items():
        places = ((text, Place(counts, (), strangers, weak)) for text, counts in said)
        if not any(corrupt(*each, rng) for each in places for corrupt in KINDS.values()):
            raise no_nonsense(split)


def called(name: str, cfg: DictConfig) -> str:
    """Returns the name that a figure, column or player is written under: people's are scripts' without human data."""
    for word, instead in () if cfg.data.dond else SCRIPTED.items():
        name = name.replace(word, instead)
    return name


def nonsense(made: Made, cfg: DictConfig, folder: Path) -> Figures:
    """Trains the ensemble of a seed into `folder`. Returns by arm `filter/recall/KIND` at `filter_rate`: with all
    heads, and without the one that knows the kind."""
    rng, tokens = np.random.default_rng([made.seed, 1]), made.action.tokens
    env = env_maker({**made.env, "split": "train"})()
    own = {
        name: human_messages(read_views(made.data, name), tokens, env, cfg.nonsense[name], rng)
        for name in ("train", "val", "test")
    }
    strangers = [each.message for each in own["train"]]
    weak = Bigrams.of(strangers)
    worse = {
        name: {kind: spoiled(own[name], kind, strangers, weak, rng) for kind in KINDS} for name in ("train", "test")
    }
    say(f"nonsense: {', '.join(f'{len(found)} {kind}' for kind, found in worse['train'].items())}")
    learned = changing([*KINDS], worse, "train", "is left out, and in no figure")
    shown = changing(learned, worse, "test", "is in no figure")
    human = {name: read_messages(made.action, [(s, s.message) for s in found]) for name, found in own.items()}
    read = {
        name: {kind: read_messages(made.action, worse[name][kind]) for kind in kinds}
        for name, kinds in (("train", learned), ("test", shown))
    }
    ensemble = train(human["train"], read["train"], human["val"], made.seed)
    thresholds = ensemble.thresholds(cfg.filter_rate)
    figures = {(HEADS, "filter/false"): rate(ensemble.rejected(human["test"], thresholds).tolist())}
    for kind, found in read["test"].items():
        figures[HEADS, f"filter/recall/{kind}"] = rate(ensemble.rejected(found, thresholds).tolist())
        if len(learned) > 1:
            rest = ensemble.without(kind)
            unseen = rest.rejected(found, rest.thresholds(cfg.filter_rate))
            figures[UNSEEN, f"filter/recall/{kind}"] = rate(unseen.tolist())
    ensemble.save(folder)
    return figures


def changing(kinds: Sequence[str], worse: Mapping[str, Mapping[str, Sized]], split: str, so: str) -> list[str]:
    """The kinds of corruption that change a message of a split. Says so of the others; UserError if none does."""
    left = [kind for kind in kinds if worse[split][kind]]
    if not left:
        raise no_nonsense(split)
    for kind in kinds:
        if kind not in left:
            say(f"nonsense: {kind} changes none of the {split} messages, so that it {so}")
    return left


def no_nonsense(split: str) -> UserError:
    return UserError(
        f"No kind of corruption changes any of the {split} messages, so that there is no nonsense to tell apart. Give "
        f"more dialogues (data.dond) or messages (nonsense.{split}), or leave out the games (games=0)"
    )


def save_players(made: Made, ensemble: Ensemble | None, runs: Path) -> None:
    """Writes a folder for each arm, to be played as `RUNS/intents-ARM-sSEED+cicero`; without an ensemble, with
    `cicero.nonsense=0`."""
    for arm in made.dialogue:
        folder = runs / f"intents-{arm}-s{made.seed}"
        save_player(folder, {DIALOGUE: made.folders[arm], ACTION: made.folders[ACTION]}, made.seed, arm, told=FORM)
        shutil.rmtree(folder / NONSENSE, ignore_errors=True)  # another study's reads another action model
        if ensemble:
            ensemble.save(folder / NONSENSE)


# --- Measuring --------------------------------------------------------------------------------------------------------
def annotation(made: Made, place: Workspace) -> Metrics:
    """The correspondence test: messages that state a whole split, annotation and naive annotation against the words."""
    tested = correspondence(made.views, made.intents)
    if not tested:
        raise UserError("No message of these dialogues states a whole split. Give all of the published dialogues")
    if not made.seed:
        lines = [[t.message, *(" ".join(map(str, c)) for c in (t.stated, t.annotated, t.naive))] for t in tested]
        write_csv(place.out / "correspondence.csv.gz", ("message", "stated", "annotated", "naive"), lines)
    return {
        "annotation": rate([t.annotated == t.stated for t in tested]),
        NAIVE: rate([t.naive == t.stated for t in tested]),
    }


def dialogue(made: Made, arm: str, cfg: DictConfig, generated: Path) -> Figures:
    """Perplexity of held-out human messages, and control: how many of the messages that state a split state the
    intent's, under the annotated intent and under another. Writes those of `both` that name items into `generated`."""
    policy, make_env = made.dialogue[arm], env_maker({**made.env, "split": "train"})
    rng = np.random.default_rng([made.seed, 2])
    figures: Metrics = {
        "drift/human_perplexity": human_perplexity(policy, arm, made.intents, made.data, cfg.split, make_env, rng)
    }
    found_by_people: dict[tuple[str, str], Interval] = {}
    lines = []
    for swap in (False, True):
        found = controlled(
            policy, arm, made.views, made.intents, make_env(), swap=swap, most=cfg.control, context=512,
            rng=np.random.default_rng([made.seed, 3]), temperature=cfg.temperature,
        )  # fmt: skip
        name, end = ("another", "") if swap else ("annotated", "/annotated")
        for metric, each_ in control(found, np.random.default_rng(0)).items():
            figures[metric + end] = each_
        if arm == "both":  # the same for all arms: messages of people, at the same places
            people_ = control([each.by_person for each in found], np.random.default_rng(0))
            found_by_people |= {(BY_PEOPLE, metric + end): each_ for metric, each_ in people_.items()}
        for each in found:
            if not named_items(each.message, each.counts):
                continue
            claims = [" ".join(map(str, claim)) for claim in (each.intent.own, each.stated or ())]
            lines.append([arm, name, each.human, each.message, *claims])
    if arm == "both" and not made.seed:
        columns = ("arm", "intent_is", called("human", cfg), "message", "intent", "stated")
        write_csv(generated, columns, lines)
    return {**{(arm, name): each for name, each in figures.items()}, **found_by_people}


def situations(made: Made, temperature: float) -> list[list[Any]]:
    """Generates messages at the same places under three intents: the annotated one, and two others."""
    make_env = env_maker({**made.env, "split": "train"})
    lines: list[list[Any]] = []
    for further, name in enumerate(("annotated", "another", "a third")):
        found = controlled(
            made.dialogue["both"], "both", made.views, made.intents, make_env(), swap=bool(further), most=SITUATIONS,
            context=512, rng=np.random.default_rng([made.seed, 4]), temperature=temperature, further=further,
        )  # fmt: skip
        for place, each in enumerate(found):
            numbers = (" ".join(map(str, triple)) for triple in (each.counts, each.intent.own))
            lines.append([place, name, *numbers, each.heard, each.human, each.message])
    return sorted(lines, key=lambda line: line[0])


def switched(cicero: CiceroConfig, on: Mapping[str, Any]) -> CiceroConfig:
    """The settings with only these filters, each as `cicero.*` sets it."""
    chosen: dict[str, Any] = {name: getattr(cicero, name) if on.get(name) else off for name, off in OFF.items()}
    return replace(cicero, **chosen, plan=replace(cicero.plan, **on.get("plan", {})))


def play(made: Made, ensemble: Ensemble, cfg: DictConfig, spec: PlaySpec, place: Workspace) -> Figures:
    """The ablation, on the same games for all arms, against each partner: score, agreement, perplexity under the frozen
    model of people, and how far what was said and claimed is as planned. `people`: that model itself in the arm's
    seat."""
    found: Figures = {}
    refusals: list[list[object]] = []
    for partner in cfg.partners:
        end = "" if partner == PEOPLE else f" v {partner}"
        scores: dict[str, np.ndarray] = {}
        for arm in (PEOPLE, *ABLATIONS):
            path, about = games_of(made, arm, partner, ensemble, cfg, spec, place)
            with reading_kept(path, "an arm's games"):
                games, counts = about["games"], about["counts"]
                plan = {metric: Interval.from_json(each) for metric, each in about["followed"].items()}
                found |= {(arm + end, metric): each for metric, each in {**figures_of(games), **plan}.items()}
                refusals += [[made.seed, arm + end, key, count] for key, count in sorted(counts.items())]
                if counts.get("drawn"):
                    on = [name for name in ORDER if ABLATIONS[arm].get(name)]
                    found |= {(arm + end, f"{REFUSED}{key}"): each for key, each in refused(counts, on).items()}
                scores[arm] = np.array([game["score"] for game in games])
        for arm in (*ABLATIONS,):
            if arm != "intents":
                gain = bootstrap_mean(scores[arm] - scores["intents"], rng=np.random.default_rng(0))
                found[f"{arm} - intents{end}", "game/score"] = gain
    write_csv(place.out / f"filters-s{made.seed}.csv", ("seed", "arm", "what", "count"), refusals)
    return found


def games_of(
    made: Made, arm: str, partner: str, ensemble: Ensemble, cfg: DictConfig, spec: PlaySpec, place: Workspace
) -> tuple[Path, dict[str, Any]]:
    """Figures of an arm's games with a partner, and the file where they are kept. Games that an earlier version kept
    without how far plans were followed are played again."""
    limits = replace(spec.algo, games=cfg.games, concurrency=min(cfg.concurrency, cfg.games))
    about = played_by(made, arm, partner, spec.cicero, cfg, limits)
    path = place.cells / f"games-s{made.seed}-{digest(about)[:10]}.json"
    kept_games: dict[str, Any] = read_json(path) if path.exists() else {}
    if "followed" in kept_games:
        return path, kept_games
    agent = make_player(made, arm, ensemble, spec.cicero, limits, cfg.temperature)
    agent.name = called(agent.name, cfg)
    other = agent if partner == ITSELF else people(made, "partner", limits, cfg.temperature)
    if partner not in (PEOPLE, ITSELF):
        other = text_agent(partner, {"game": "dond"})
    place.bar.stage(f"seed {made.seed}: {arm} v {partner}", cfg.games)
    games = draw_games(cfg.seed, EVALUATION, count=cfg.games)
    cast = alternating(agent, other)
    episodes = rollout(games, cast, env_maker(made.env), limits.concurrency, place.bar.advance)
    place.bar.close()
    say_refusals(agent, other)
    plan = {metric: each.to_json() for metric, each in followed(episodes, np.random.default_rng(0)).items()}
    own = {"games": measured(episodes, agent.name, made), "counts": counts_of(agent), "followed": plan}
    write_json(path, {"arm": arm, "partner": partner, **own})
    write_episodes(path.with_suffix(".jsonl"), episodes[:40])
    return path, own


def played_by(
    made: Made, arm: str, partner: str, cicero: CiceroConfig, cfg: DictConfig, limits: PlayConfig
) -> dict[str, Any]:
    """All that decides these games."""
    on = asdict(switched(cicero, ABLATIONS[arm])) if arm in ABLATIONS else {}
    play_ = {name: cfg[name] for name in ("games", "seed", "temperature", "concurrency")}
    play_ |= limits_of(limits)
    if on.get("nonsense"):
        play_["nonsense"] = dict(cfg.nonsense)  # what the ensemble learned from, beside the action model
    return {"models": made.models, "arm": arm, "partner": partner, "cicero": on, "env": dict(made.env), **play_}


def people(made: Made, name: str, limits: PlayConfig, temperature: float) -> Agent:
    """Makes a plain player of the model of people."""
    return model_agent(name, made.dialogue["state"], limits, 2, temperature)


def make_player(
    made: Made, arm: str, ensemble: Ensemble, cicero: CiceroConfig, limits: PlayConfig, temperature: float
) -> Agent:
    """The player of an arm."""
    if arm == PEOPLE:
        return people(made, arm, limits, temperature)
    grounding = "state" if arm == "no intents" else "both"
    parts = Parts(grounding, made.action, made.dialogue[grounding], ensemble)
    return CiceroAgent(
        arm, parts, switched(cicero, ABLATIONS[arm]), "dond", **model_agent_settings(limits, 2, temperature)
    )


def counts_of(agent: Agent) -> dict[str, int]:
    return dict(agent.counts) if isinstance(agent, CiceroAgent) else {}


def measured(episodes: Sequence[Any], name: str, made: Made) -> list[dict[str, Any]]:
    """Score, deal, and the likelihood of the player's messages under the model of people, game by game; the mean of
    its seats."""
    judge, env, found = made.dialogue["state"], env_maker(made.env)(), []
    objective = float(made.env["objective"])
    for episode in episodes:
        own = [agent for agent, player in episode.players.items() if player == name]  # both, against itself
        points = episode.outcome["points"]
        mine, total = float(np.mean([points[agent] for agent in own])), sum(points.values())
        theirs = float(np.mean([total - points[agent] for agent in own]))
        likely = likelihood(judge, [replayed_rows(episode, env, judge.tokens, (name,))], np.random.default_rng(0))
        words = sum(len(t.message.split()) for t in episode.turns if t.agent in own)
        found.append(
            {
                "score": mine + objective * theirs,
                "points": mine,
                "deal": bool(episode.outcome["deal"]),
                "nats": 0.0 if likely is None else likely.mean * words,
                "words": words,
            }
        )
    return found


def figures_of(games: Sequence[Mapping[str, Any]]) -> Metrics:
    """Means over games, with bootstrap intervals."""
    rng = np.random.default_rng(0)
    found = {
        "game/score": bootstrap_mean([g["score"] for g in games], rng=rng),
        "game/agreement": rate([bool(g["deal"]) for g in games]),
    }
    nats, words = np.array([g["nats"] for g in games]), np.array([g["words"] for g in games], float)
    if words.sum():
        found["drift/human_perplexity"] = perplexity(bootstrap_ratio(nats, words, rng=rng))
    return found


# --- Tables and figure ------------------------------------------------------------------------------------------------
def draw(rows: Sequence[TableRow], path: Path) -> None:
    """Perplexity by arm, control by arm, recall by kind, and the ablation's scores."""
    played = {r.arm for r in rows if r.metric == "game/score"}
    panels = {
        **{
            f"perplexity of {whose} messages": [
                r for r in rows if r.metric == f"drift/{whose}_perplexity" and r.arm in ARMS
            ]
            for whose in ("human", "scripted")
        },
        "stated split is the intent's": [
            r for r in rows if r.metric in ("intent/control", "intent/items") and r.arm not in played
        ],
        "nonsense caught": [r for r in rows if r.metric.startswith("filter/recall/") and r.arm == HEADS],
        "score": [r for r in rows if r.metric == "game/score" and not {"v", "-"} & {*r.arm.split()}],
    }
    draw_panels({title: own for title, own in panels.items() if own}, path)


if __name__ == "__main__":
    main()
