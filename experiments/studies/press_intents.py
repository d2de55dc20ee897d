"""Cicero's method in `pure` Diplomacy with private messages: intents, words under them, and planning pair by pair.

    python -m experiments.studies.press_intents

From a base that imitates scripted players, each seed trains an action model on what truthful players ordered after
talk, annotates their messages with intents, and trains a dialogue model that is told them. Both make a player,
`runs/press-sSEED+cicero`. Measured: annotation against messages whose words leave no doubt, beside the orders that were
played; whether generated messages state the intended order; and the score of one player among six of the base and among
six scripted ones, against the base in its seat and against the same planner mute, on the same games. Everything is kept
in `cells`, so that the same command goes on.

Writes `table.csv`, `figure.svg`, `cards.jsonl` (a line a seed), `filters.csv` (messages drawn and refused),
`correspondence.csv.gz` (tested messages of the first seed) and `messages.csv.gz` (generated ones, with their intents).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from envs.core import TurnKind
from envs.diplomacy.pure import N
from experiments.launch.command import command
from experiments.launch.terminal import say
from experiments.setup.entrants import configured_base
from experiments.setup.refusals import say_refusals
from experiments.setup.spec import PlaySpec, play_spec
from experiments.studies.cells import Workspace, begin, check_play
from experiments.studies.talkers import (
    Figures,
    SeedModels,
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
from marl.agents.model import model_agent, model_agent_settings
from marl.common.errors import UserError, check_count, check_counts, check_temperature
from marl.common.files import digest, read_json, reading_kept, write_json
from marl.intents.agent import ACTION, DIALOGUE, Parts
from marl.intents.draws import messages_behind, plain_words
from marl.intents.filters import CORRESPONDENCE, REPETITION
from marl.intents.orders import OrderReader
from marl.intents.press import Intent, Phase, Utterance, stated
from marl.intents.press_agent import PressAgent
from marl.intents.press_training import (
    GAMES,
    TESTED,
    Played,
    action_model,
    annotate,
    dialogue_model,
    draw_scripted,
    with_intents,
)
from marl.intents.training import kept_policy
from marl.metrics.press import press_metrics
from marl.metrics.stats import Interval, Metrics, bootstrap_mean, rate
from marl.metrics.tables import TableRow, write_csv
from marl.model.policy import Policy
from marl.report.transcripts import write_episodes
from marl.rollout.games import env_maker, scripted
from marl.rollout.rollout import Cast, rollout
from marl.rollout.seeds import EVALUATION, draw_games
from marl.storage.checkpoint import folder_digest
from marl.types import Episode

CAREFUL, MIXTURE = "careful", "mixture"  # scripted players: who do what they say, and who often don't
ANNOTATION, NAIVE = "annotation", "order that was played"
BASE, TALKS, MUTE = "base", "planner", "planner, mute"
OTHERS = {"score/1v6": BASE, "score/1v6/scripted": CAREFUL}  # by metric: who holds the other six seats
AT_ONCE = 32  # streams that are continued side by side


@dataclass(frozen=True)
class Made(SeedModels):
    """The models of one seed."""

    base: Policy
    action: Policy
    dialogue: Policy

    @property
    def parts(self) -> Parts:
        return Parts("intent", self.action, self.dialogue, None)


@command("press_intents")
def main(cfg: DictConfig) -> None:
    """Makes what is not made yet, measures, and tabulates."""
    check(cfg)
    spec, place = play_spec(cfg), begin(cfg)
    base, folder = configured_base(spec, place.device)
    tables, refusals = SeedTables(place.out, draw), list[list[object]]()
    for seed in cfg.seeds:
        made = make_models(seed, base, folder_digest(Path(str(folder))), cfg, spec, place)
        figures, counts = of_seed(made, cfg, spec, place)
        refusals += counts
        write_csv(place.out / "filters.csv", ("seed", "among", "what", "count"), refusals)
        line = card(
            f"press-s{seed}", seed, made.models, figures, arm="press intents", command="press_intents.py",
            games=cfg.games,
        )  # fmt: skip
        tables.add(line, figures)
    tables.say()


def check(cfg: DictConfig) -> None:
    """Refuses bad settings of this command."""
    check_play(cfg)
    check_temperature(cfg.temperature, "temperature")
    if (cfg.env.game, cfg.env.map_name, cfg.env.style, cfg.env.press) != ("diplomacy", "pure", "compact", "private"):
        raise UserError("env: intents of press need env.map_name=pure env.style=compact env.press=private")
    if cfg.model.kind != "tiny":
        raise UserError(
            f"model.kind={cfg.model.kind}: intents of press need the small model, whose orders are one token"
        )
    for seed in cfg.seeds:
        check_count(seed, "seeds", 0)
    check_counts(cfg, ("years", "scripted_games", "views", "tested_games", "control"))


# --- Models -----------------------------------------------------------------------------------------------------------
def make_models(seed: int, base: Policy, start: str, cfg: DictConfig, spec: PlaySpec, place: Workspace) -> Made:
    """Loads or trains the models of a seed, and writes its player."""
    env = {**spec.env, "years": cfg.years}
    how = replace(spec.base, seed=seed, learning_rate=cfg.learning_rate)
    about = {"env": env, "start": start, "base": asdict(how), "games": cfg.scripted_games, "views": cfg.views}
    kept_in, name = Path(cfg.cache), digest(about)[:8]

    @cache
    def played() -> Played:
        say(f"seed {seed}: {cfg.scripted_games} scripted games")
        return draw_scripted(env, spec.base.players, seed, GAMES, cfg.scripted_games, base.tokens)

    action_folder = kept_in / f"press-action-s{seed}-{name}"

    def act() -> tuple[Policy, Mapping[str, float]]:
        return action_model(base, played(), cfg.views, how, partial(place.bar.count, f"seed {seed}: action model"))

    action = kept_policy(action_folder, {"kind": "press action", **about}, act, place.device, say, "diplomacy")
    dialogue_folder = kept_in / f"press-dialogue-s{seed}-{digest({**about, 'rate': cfg.dialogue_learning_rate})[:8]}"

    def talk() -> tuple[Policy, Mapping[str, float]]:
        reader, own = OrderReader(action, spec.algo.context), replace(how, learning_rate=cfg.dialogue_learning_rate)
        talking = partial(place.bar.count, f"seed {seed}: dialogue model")
        return dialogue_model(base, played(), reader, own, talking)

    about |= {"kind": "press dialogue", "action": folder_digest(action_folder), "rate": cfg.dialogue_learning_rate}
    dialogue = kept_policy(dialogue_folder, about, talk, place.device, say, "diplomacy")
    place.bar.close()
    folders = {ACTION: action_folder, DIALOGUE: dialogue_folder}
    save_player(Path(cfg.runs) / f"press-s{seed}", folders, seed)
    return Made(seed, env, folders, base, action, dialogue)


# --- Measuring --------------------------------------------------------------------------------------------------------
def of_seed(made: Made, cfg: DictConfig, spec: PlaySpec, place: Workspace) -> tuple[Figures, list[list[object]]]:
    """All figures of one seed, of which each part is measured once and kept, and the counts of its filters."""
    about = {"models": made.models, "tested": cfg.tested_games}
    path = place.cells / f"annotation-s{made.seed}-{digest(about)[:8]}.json"
    found = cached_figures(path, partial(annotation, made, cfg, spec, path.with_suffix(".csv.gz")))
    about |= {"control": cfg.control, "temperature": cfg.temperature}
    other = place.cells / f"control-s{made.seed}-{digest(about)[:8]}.json"
    found |= cached_figures(other, partial(control, made, cfg, spec, other.with_suffix(".csv.gz")))
    if made.seed == cfg.seeds[0]:
        publish(path.with_suffix(".csv.gz"), place.out / "correspondence.csv.gz")
        publish(other.with_suffix(".csv.gz"), place.out / "messages.csv.gz")
    figures, counts = play(made, cfg, spec, place)
    return found | figures, counts


@dataclass(frozen=True)
class Message:
    """A message of a held-out scripted game, with the orders that its words state and those annotated."""

    phase: Phase
    said: Utterance
    words: Intent | None
    intent: Intent | None


def tested(made: Made, players: str, cfg: DictConfig, spec: PlaySpec) -> tuple[Played, list[list[Message]]]:
    """Held-out games of scripted players, and the messages of each seat."""
    played = draw_scripted(made.env, players, made.seed, TESTED, cfg.tested_games, made.base.tokens)
    notes = [own for _, _, own in played.views]
    intents = annotate(notes, OrderReader(made.action, spec.algo.context))
    found = []
    for own, phases in zip(notes, intents, strict=True):
        messages = []
        for phase, annotated in zip(own.phases, phases, strict=True):
            mine = [said for said in phase.talk if said.speaker == own.power]
            messages += [Message(phase, s, stated(s, phase), i) for s, i in zip(mine, annotated, strict=True)]
        found.append(messages)
    return played, found


def annotation(made: Made, cfg: DictConfig, spec: PlaySpec, shown: Path) -> Figures:
    """The correspondence test: messages that say what their author will order, annotation and the order that was played
    against the words. Writes some of them into `shown`."""
    figures: Figures = {}
    lines = []
    for players, end in ((CAREFUL, ""), (MIXTURE, f"/{MIXTURE}")):
        _, seats = tested(made, players, cfg, spec)
        clear = [(m, m.words, m.intent) for own in seats for m in own if m.words and m.intent and m.phase.orders]
        naive = [m.phase.orders.get(words.own[0]) == words.own[1] for m, words, _ in clear]
        figures[ANNOTATION, f"intent/correspondence{end}"] = rate([w.own == i.own for _, w, i in clear])
        figures[NAIVE, f"intent/correspondence{end}"] = rate(naive)
        lines += [[players, m.said.text, i.text().strip(), int(w.own == i.own), int(kept_it)]
                  for (m, w, i), kept_it in zip(clear, naive, strict=True)]  # fmt: skip
    columns = ("players", "message", "annotation", "is_as_said", "was_played")
    write_csv(shown, columns, lines[:: max(len(lines) // 400, 1)])
    return figures


def control(made: Made, cfg: DictConfig, spec: PlaySpec, shown: Path) -> Figures:
    """Messages generated at places where scripted players spoke, under the annotated intent and under another: how many
    state an order (`stated`), and of those the intended one (`control`). The base, which is told none, beside it.
    Writes some messages into `shown`."""
    played, seats = tested(made, CAREFUL, cfg, spec)
    figures: Figures = {}
    lines: list[list[object]] = []
    for name, policy in ((TALKS, made.dialogue), (BASE, made.base)):
        for swap in (False, True):
            rng = np.random.default_rng([made.seed, 3])
            wanted, streams = places_of(played, seats, made.base, swap, name == TALKS, rng, cfg.control)
            drawn = messages_behind(
                policy, streams, 16, context=spec.algo.context, at_once=AT_ONCE, temperature=cfg.temperature, top_p=0.9,
                rng=np.random.default_rng([made.seed, 4]), tag="",
            )  # fmt: skip
            words = [plain_words(ids, policy.tokens) for ids, _ in drawn]
            said = [stated(m.said._replace(text=w), m.phase) for (m, _), w in zip(wanted, words, strict=True)]
            telling = [(each, intent) for each, (_, intent) in zip(said, wanted, strict=True) if each]
            end = "" if swap else "/annotated"
            figures[name, f"intent/stated{end}"] = rate([each is not None for each in said])
            if telling:
                figures[name, f"intent/control{end}"] = rate([each.own == intent.own for each, intent in telling])
            if name == TALKS:
                lines += [["another" if swap else "annotated", i.text().strip(), m.said.text, w]
                          for (m, i), w in zip(wanted[:100], words, strict=False)]  # fmt: skip
    write_csv(shown, ("intent_is", "intent", "scripted", "generated"), lines)
    return figures


def places_of(
    played: Played, seats: Sequence[Sequence[Message]], base: Policy, swap: bool, tells: bool,
    rng: np.random.Generator, most: int,
) -> tuple[list[tuple[Message, Intent]], list[list[int]]]:  # fmt: skip
    """Draws places where somebody spoke: the message there with the intent, and the stream up to the cue."""
    known = [(s, m) for s, own in enumerate(seats) for m, each in enumerate(own) if each.intent]
    found, streams = [], []
    for number in rng.permutation(len(known))[:most]:
        seat, place = known[number]
        episode, agent, _ = played.views[seat]
        intents = [each.intent for each in seats[seat]]
        message = seats[seat][place]
        assert message.intent is not None
        intent = another(message.intent, rng) if swap else message.intent
        intents[place] = intent
        shown, _ = with_intents(episode, agent, intents if tells else [None] * len(intents), base.tokens)
        turns = [t for t in shown.turns if t.agent == agent and t.kind == TurnKind.SPEAK and t.message]
        found.append((message, intent))
        streams.append(shown.streams[agent].tokens[: turns[place].start])
    return found, streams


def another(intent: Intent, rng: np.random.Generator) -> Intent:
    """A random intent of the two units that fit together: one moves, and the other supports it."""
    (own, _), (reader, _) = intent
    mover = own if rng.random() < 0.5 else reader
    goals = [p for p in range(N) if p not in (own, reader)]
    code = mover * N + goals[rng.integers(len(goals))]
    return Intent((own, code), (reader, code))


# --- Play -------------------------------------------------------------------------------------------------------------
def play(made: Made, cfg: DictConfig, spec: PlaySpec, place: Workspace) -> tuple[Figures, list[list[object]]]:
    """Scores of one player among six, on the same games and seats for all; and the filters' counts."""
    games, make_env = draw_games(cfg.seed, EVALUATION, made.seed, count=cfg.games), env_maker(made.env)
    figures: Figures = {}
    counts: list[list[object]] = []
    for metric, six in OTHERS.items():
        scores: dict[str, np.ndarray] = {}
        for arm in (TALKS, MUTE, BASE, *([CAREFUL] if six == CAREFUL else [])):
            path = place.cells / f"games-s{made.seed}-{digest(played_by(made, arm, six, cfg, spec))[:10]}.json"
            if not path.exists():
                one, others = player(made, arm, "one", cfg, spec), player(made, six, "six", cfg, spec)
                place.bar.stage(f"seed {made.seed}: {arm} among {six}", cfg.games)
                episodes = rollout(games, among(one, others), make_env, cfg.concurrency, place.bar.advance)
                place.bar.close()
                say_refusals(one, others)
                write_json(path, {"arm": arm, "six": six, **measured(episodes, one)})
                write_episodes(path.with_suffix(".jsonl"), episodes[:20])
            about = read_json(path)
            with reading_kept(path, "an arm's games"):
                scores[arm], drawn = np.array(about["scores"]), about["counts"]
                figures[arm, metric] = bootstrap_mean(scores[arm], rng=np.random.default_rng(0))
                end = metric.removeprefix("score/1v6")
                figures |= {(arm, f"{key}{end}"): Interval.from_json(each) for key, each in about["press"].items()}
                if arm == TALKS:
                    counts += [[made.seed, six, key, count] for key, count in sorted(drawn.items())]
                    shares = refused(drawn, [REPETITION, CORRESPONDENCE]) if drawn.get("drawn") else {}
                    figures |= {(arm, f"filter/refused/{name}{end}"): each for name, each in shares.items()}
        for arm, other in ((TALKS, MUTE), (TALKS, BASE), (MUTE, BASE)):
            gain = bootstrap_mean(scores[arm] - scores[other], rng=np.random.default_rng(0))
            figures[f"{arm} - {other}", metric] = gain
    return figures, counts


def played_by(made: Made, arm: str, six: str, cfg: DictConfig, spec: PlaySpec) -> dict[str, Any]:
    """Returns all that decides the games of one among six."""
    about = {"models": made.models, "arm": arm, "six": six, "cicero": asdict(spec.cicero), "env": made.env}
    settings = ("games", "seed", "temperature", "years", "concurrency")
    return about | {name: cfg[name] for name in settings} | limits_of(spec.algo)


def player(made: Made, name: str, called: str, cfg: DictConfig, spec: PlaySpec) -> Agent:
    """A player of the table, by its name in it."""
    limits = replace(spec.algo, games=cfg.games, concurrency=min(cfg.concurrency, cfg.games))
    if name == CAREFUL:
        agent = scripted("diplomacy", CAREFUL)
        agent.name = called
        return agent
    if name == BASE:
        return model_agent(called, made.base, limits, N, cfg.temperature)
    cicero = replace(spec.cicero, press=replace(spec.cicero.press, mute=name == MUTE))
    return PressAgent(called, made.parts, cicero, "diplomacy", **model_agent_settings(limits, 1, cfg.temperature))


def among(one: Agent, others: Agent) -> Cast:
    """Seats one player among others, in a seat that follows from the game's seed."""

    def assign(game: Any, env: Any) -> Mapping[str, Agent]:
        names = list(env.possible_agents)
        return {name: one if i == game.seed % len(names) else others for i, name in enumerate(names)}

    return assign


def measured(episodes: Sequence[Episode], one: Agent) -> dict[str, Any]:
    """The one's scores, what its messages were worth, and what its filters refused."""
    seats = [next(agent for agent, held in episode.players.items() if held == one.name) for episode in episodes]
    talk: Metrics = press_metrics(episodes, np.random.default_rng(0), {one.name})
    return {
        "scores": [e.outcome["points"][agent] for e, agent in zip(episodes, seats, strict=True)],
        "press": {name: each.to_json() for name, each in talk.items()},
        "counts": dict(one.counts) if isinstance(one, PressAgent) else {},
    }


def draw(rows: Sequence[TableRow], path: Path) -> None:
    """Correspondence, control, and scores among each six."""
    arms = (TALKS, MUTE, BASE, CAREFUL)
    draw_panels(
        {
            "annotation is what is said": [r for r in rows if r.metric.startswith("intent/correspondence")],
            "stated as intended": [r for r in rows if r.metric == "intent/control"],
            "score among six of the base": [r for r in rows if r.metric == "score/1v6" and r.arm in arms],
            "score among six careful": [r for r in rows if r.metric == "score/1v6/scripted" and r.arm in arms],
        },
        path,
    )


if __name__ == "__main__":
    main()
