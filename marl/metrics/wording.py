"""What metrics, arms and endings are called where people read of them, and in which order they are shown."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


def number(value: float) -> str:
    """Three decimals below 10, then fewer: `0.879`, `12.13`, `498.0`, `2745`; a dash for nan."""
    if not math.isfinite(value):
        return "–"
    decimals = 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0
    text = f"{value:.{decimals}f}"
    return text.lstrip("-") if float(text) == 0 else text


@dataclass(frozen=True)
class Wording:
    """How a metric is shown."""

    label: str
    note: str
    percent: bool = False
    decimals: int | None = None  # None: as many as `number` gives

    def show(self, value: float) -> str:
        if self.percent:
            return f"{100 * value:.1f} %"
        return number(value) if self.decimals is None else f"{value:.{self.decimals}f}"


WORDING = {
    "game/win_rate/crewmates": Wording("Crewmates win", "share of all games", percent=True),
    "game/win_rate/imposters": Wording("Imposters win", "share of all games", percent=True),
    "game/meetings": Wording("Discussions a game", ""),
    "game/steps": Wording("Steps a game", "of the clock: a move, a message or a vote of all"),
    "game/decisions": Wording("Decisions a game", "moves, messages and votes of all players"),
    "game/reports": Wording("Reports a game", "choices to report a body"),
    "game/tasks_done": Wording("Tasks done", "share of the crewmates' tasks", percent=True),
    "game/ejected_imposter": Wording("Imposter voted out", "share of discussions", percent=True),
    "game/ejected_crewmate": Wording("Crewmate voted out", "share of discussions", percent=True),
    "game/how/ejection": Wording("Ends by vote", "no imposter is left", percent=True),
    "game/how/tasks": Wording("Ends by tasks", "the living crewmates have done all of theirs", percent=True),
    "game/how/parity": Wording("Ends by kills", "imposters are as many as the crewmates", percent=True),
    "game/how/time": Wording("Time runs out", "nobody wins", percent=True),
    "vote/imposter": Wording("Votes for the imposter", "share of crewmates' votes", percent=True),
    "vote/chance": Wording("The same by chance", "votes for a living player drawn at random", percent=True),
    "vote/skip": Wording("Votes to skip", "share of crewmates' votes", percent=True),
    "vote/witness": Wording(
        "Votes of witnesses", "share of crewmates' votes: the voter noticed the killer", percent=True
    ),
    "vote/witness_imposter": Wording("Witnesses' votes for the imposter", "share of theirs", percent=True),
    "vote/other_imposter": Wording(
        "Others' votes for the imposter", "share of those who noticed no killer", percent=True
    ),
    "game/score": Wording(
        "Score", "what a player was paid (Deal or No Deal: R_i + λ R_j), mean over players and all games"
    ),
    "game/score_ceiling": Wording("Best possible score", "what the best deal of each of these games would give"),
    "game/score_agreed": Wording("Score, agreed games", "the same over games with a deal"),
    "game/points": Wording("Points", "R_i alone, mean over players and all games"),
    "game/points_agreed": Wording("Points, agreed games", "the same over games with a deal"),
    "game/joint": Wording("Joint points", "both players together"),
    "game/agreement": Wording("Agreement", "games that end in a valid deal", percent=True),
    "game/pareto": Wording(
        "Pareto, all games", "no allocation is better for one and as good for the other", percent=True
    ),
    "game/pareto_agreed": Wording("Pareto, agreed games", "the same over games with a deal", percent=True),
    "belief/gain_over_prior": Wording(
        "Learned from talk", "nats a question by which the last answer beats the exact prior"
    ),
    "belief/gain_over_start": Wording(
        "Gain over the start", "nats a question, last answer against the one before any message"
    ),
    "belief/log_loss": Wording("Belief, log-loss", "nats a question, all answers"),
    "belief/first_log_loss": Wording("Belief, first log-loss", "nats a question, before any message"),
    "belief/last_log_loss": Wording("Belief, last log-loss", "nats a question, after the last message"),
    "belief/prior_log_loss": Wording("Exact prior's log-loss", "what the rules alone tell, on the same questions"),
    "belief/accuracy": Wording("Belief, accuracy", "the truth is the most probable answer, all answers", percent=True),
    "belief/first_accuracy": Wording("Belief, first accuracy", "before any message", percent=True),
    "belief/last_accuracy": Wording("Belief, last accuracy", "the truth is the most probable answer", percent=True),
    "belief/prior_accuracy": Wording("Exact prior's accuracy", "on the same questions", percent=True),
    "belief/brier": Wording("Belief, Brier score", "0 is perfect, 2 is certain and wrong; all answers"),
    "belief/first_brier": Wording("Belief, first Brier score", "before any message"),
    "belief/last_brier": Wording("Belief, last Brier score", "after the last message"),
    "belief/prior_brier": Wording("Exact prior's Brier score", "on the same questions"),
    "belief/chance_accuracy": Wording("Accuracy by chance", "equal odds for all candidates", percent=True),
    "belief/chance_log_loss": Wording("Log-loss by chance", "equal odds for all candidates"),
    "belief/chance_brier": Wording("Brier score by chance", "equal odds for all candidates"),
    "speech/belief_change": Wording("What a message does", "probability of the truth it adds, summed over those asked"),
    "speech/belief_change/names_imposter": Wording("… that names the imposter", "crewmates' messages"),
    "speech/belief_change/names_other": Wording("… that names others only", "crewmates' messages"),
    "speech/belief_change/names_nobody": Wording("… that names nobody", "crewmates' messages"),
    "speech/belief_change/toward_truth": Wording("… of anybody", "imposters' too; 0 for speech without information"),
    "speech/pull": Wording(
        "What an accusation does", "probability that a listener adds to whom it accuses, rightly or not"
    ),
    "speech/log_belief_change": Wording("The same in nats", "log-probability of the truth that a message adds"),
    "speech/log_belief_change/names_imposter": Wording("… that names the imposter, nats", "crewmates' messages"),
    "speech/log_belief_change/names_other": Wording("… that names others only, nats", "crewmates' messages"),
    "speech/log_belief_change/names_nobody": Wording("… that names nobody, nats", "crewmates' messages"),
    "speech/log_belief_change/toward_truth": Wording("… of anybody, nats", "imposters' too"),
    "talk/names": Wording("Messages that name a player", "of crewmates; a living other", percent=True),
    "talk/names_imposter": Wording("Messages that name the imposter", "share of crewmates' messages", percent=True),
    "talk/naming_true": Wording("Naming is true", "of those that name, the share naming an imposter", percent=True),
    "talk/naming_chance": Wording("True by chance", "as many names, drawn from the living others", percent=True),
    "talk/accuses": Wording("Messages that accuse", "in the words of the base's grammar", percent=True),
    "talk/accusing_true": Wording("Accusing is true", "of those that accuse, an imposter", percent=True),
    "talk/accusing_chance": Wording("True by chance", "as many accused, drawn from the living others", percent=True),
    "talk/knower_names_imposter": Wording(
        "Witnesses name the killer", "messages of crewmates who noticed a living one", percent=True
    ),
    "talk/imposter_names": Wording("Imposters' messages that name", "share of imposters' messages", percent=True),
    "talk/forms": Wording("Sentence forms", "effective number in use", decimals=1),
    "talk/turns": Wording("Turns a game", "messages and proposals"),
    "talk/messages": Wording("Messages a game", ""),
    "talk/tokens_per_turn": Wording("Tokens a turn", "sampled by the model, end marker included"),
    "talk/cut": Wording("Turns cut", "at the limit of tokens, or of what the game passes on", percent=True),
    "talk/words_per_message": Wording("Words a message", "white-space words"),
    "talk/vocabulary": Wording("Vocabulary", "different white-space words in up to 500 games", decimals=0),
    "talk/understood": Wording("Messages understood", "in which the grammar finds anything", percent=True),
    "talk/distinct_1": Wording("Distinct words", "of the first 5,000", percent=True),
    "talk/distinct_2": Wording("Distinct pairs of words", "in the first 5,000 words", percent=True),
    "talk/distinct_3": Wording("Distinct runs of three words", "in the first 5,000 words", percent=True),
    "talk/split_kept": Wording("Own split kept", "of proposals after a split of one's own", percent=True),
    "talk/split_coverage": Wording("Proposals after one's own split", "of all proposals", percent=True),
    "talk/split_kept_explicit": Wording("The same, all items told", "", percent=True),
    "talk/split_coverage_explicit": Wording("Proposals after all items told", "of all proposals", percent=True),
    "talk/table_kept": Wording("Last split kept", "of proposals, whoever stated it", percent=True),
    "talk/inverted": Wording("Inverted proposals", "of those that could claim the partner's side", percent=True),
    "talk/inverted_coverage": Wording("Proposals that could be inverted", "of all proposals", percent=True),
    "talk/inverted_explicit": Wording("Inverted proposals, all items told", "", percent=True),
    "talk/inverted_chance": Wording("Inverted by chance", "claims drawn uniformly", percent=True),
    "talk/worse_share": Wording("Claims of the worse side", "of all proposals", percent=True),
    "talk/value_true": Wording("True claims about values", "of all such claims", percent=True),
    "talk/value_chance": Wording("True by chance", "of values drawn uniformly", percent=True),
    "drift/human_dialogues": Wording("Human dialogues under the policy", "nats a word"),
    "drift/own_speech": Wording("Its messages under the human model", "nats a word"),
    "plan/floored": Wording("Anchor at its floor", "share of a plan's actions that it all but ruled out", percent=True),
    **{
        f"game/how/{how}": Wording(label, "share of all games", percent=True)
        for how, label in (
            ("deal", "Ends with a deal"),
            ("mismatch", "Ends with claims that don't fit"),
            ("abort", "Ends by refused replies"),
            ("limit", "Ends for too many turns"),
        )
    },
    "reward/game": Wording("Game's reward", "a turn, as it is scaled for training"),
    "reward/speaking": Wording("Speaking reward", "a message, unweighted"),
    **{
        f"loss/{name}": Wording(label, "unweighted, in the last training iteration")
        for name, label in (
            ("policy", "Policy loss"),
            ("value", "Value loss"),
            ("entropy", "Entropy loss"),
            ("kl", "KL to the base"),
            ("listening", "Listening loss"),
            ("world_model", "World-model loss"),
            ("imitation", "Imitation loss"),
            ("plan", "Loss toward the plan"),
        )
    },
    "errors/per_turn": Wording("Refused replies", "per turn"),
    "errors/aborted": Wording("Aborted games", "too many refused replies in a row", percent=True),
    "errors/outgrown": Wording("Outgrown games", "a player's stream outgrew the model's context", percent=True),
}


COUNTED = (
    "errors/", "talk/", "trained", "passes", "game/meetings", "game/reports", "game/tasks_done", "game/steps",
    "game/decisions", "game/points", "game/joint",
)  # fmt: skip


def wording(metric: str) -> Wording:
    """How a metric is shown; of what a term or a game of one's own brings, by the name that it has there."""
    group, _, name = metric.rpartition("/")
    by_group = {
        "game/how": Wording(f"Ends: {name}", "share of all games", percent=True),
        "game/win_rate": Wording(f"Won by {name}", "share of all games", percent=True),
        "reward": Wording(f"Reward: {name}", "a turn, unweighted"),
        "loss": Wording(f"Loss: {name}", "unweighted, in the last training iteration"),
    }
    return WORDING.get(metric) or by_group.get(group) or Wording(metric, "")


def of_ones_own(metrics: Iterable[str]) -> list[str]:
    """Those of these metrics that no wording is known for: what terms and games of one's own bring."""
    groups = ("game/how/", "game/win_rate/", "reward/", "loss/")
    return [name for name in dict.fromkeys(metrics) if name.startswith(groups) and name not in WORDING]


def headline(game: str, metrics: Iterable[str]) -> list[str]:
    """Those of these metrics that a game's first table shows, terms of one's own last."""
    found = list(dict.fromkeys(metrics))
    known = [name for name in HEADLINE.get(game, HEADLINE_OF_OTHERS) if name in found]
    return [*known, *of_ones_own(found)]


def bounds(metric: str) -> tuple[float, float]:
    """The least and the most that a mean of this metric can be: 0 and 1 of a share, 0 and 2 of a Brier score, 0 and no
    end of log-losses, of points and of what is counted."""
    if wording(metric).percent:
        return 0.0, 1.0
    if metric.endswith("brier"):
        return 0.0, 2.0
    counted = metric.startswith(COUNTED)
    return (0.0 if counted or metric.endswith("log_loss") else -math.inf), math.inf


# The first table's rows by game, in this order; the others follow in the full one.
HEADLINE = {
    "dond": (
        "game/score", "game/score_ceiling", "game/agreement", "game/pareto", "game/pareto_agreed",
        "belief/gain_over_prior", "belief/last_log_loss", "belief/prior_log_loss", "belief/last_accuracy",
        "speech/belief_change", "talk/turns", "talk/vocabulary", "errors/per_turn",
    ),
    "among_us": (
        "game/win_rate/crewmates", "vote/imposter", "vote/chance", "vote/witness", "vote/other_imposter", "vote/skip",
        "belief/accuracy", "belief/last_accuracy", "belief/chance_accuracy", "belief/last_log_loss",
        "belief/gain_over_start", "speech/pull", "speech/belief_change",
        "speech/belief_change/names_imposter", "speech/belief_change/names_other",
        "talk/names", "talk/names_imposter", "talk/naming_true", "talk/naming_chance", "talk/forms", "game/meetings",
    ),
}  # fmt: skip

HEADLINE_OF_OTHERS = (
    "game/score", "belief/accuracy", "belief/chance_accuracy", "belief/last_log_loss", "speech/belief_change",
    "talk/turns", "errors/per_turn", "errors/aborted",
)  # fmt: skip

# Names that Among Us' arms are published under (Sarkar et al. 2025: RL, Listening, Speaking), by preset of `ablation`.
ARMS = {
    "listening_only": "L", "speaking_only": "S", "listening_speaking": "L+S", "game_only": "RL", "no_listening": "RL+S",
    "no_speaking": "RL+L", "full": "RL+L+S",
}  # fmt: skip


def arm_name(arm: str, game: str) -> str:
    """What tables of this game call an arm."""
    return ARMS.get(arm, arm) if game == "among_us" else arm


ARM_ORDER = ("base", *ARMS.values())  # arms of other names follow
# What is asked of them: what each term adds, alone and to the others. Pairs (arm, reference).
COMPARISONS = (
    ("RL+L+S", "RL"), ("RL+L+S", "RL+L"), ("RL+L+S", "RL+S"), ("RL+L", "RL"), ("RL+S", "RL"), ("RL+L+S", "L"),
    ("RL+L+S", "base"), ("RL+L", "base"), ("RL+S", "base"), ("RL", "base"), ("L", "base"),
    # the speaking reward alone makes the difference, with and without the game's advantage in messages
    ("game_beside", "RL+L"), ("RL+L+S", "listening_unsaid"),
    # what the game's advantage does to messages, without the speaking reward
    ("RL+L", "listening_unsaid"),
    # normalising the speaking reward, and where it goes
    ("game_beside", "raw_credit"), ("raw_credit", "common_raw_credit"),
)  # fmt: skip
REFERENCES = ("game_only", "ppo", "filtered_bc")  # what Deal or No Deal's arms are compared with, where they are there


def pairs_of(trained: Iterable[str], game: str) -> list[tuple[str, str]]:
    """Which of these arms, by their names in tables, are compared: arm and reference. Those that have no reference of
    their game beside them are compared with the first arm."""
    names = list(dict.fromkeys(trained))
    if game == "among_us":
        usual: tuple[str, ...] = (ARMS["full"], ARMS["game_only"])
        others = [name for name in names if name not in ARM_ORDER]
        more = [(name, reference) for reference in usual for name in others]
        known = [*COMPARISONS, *more]
    else:
        usual = REFERENCES
        known = [(name, reference) for reference in usual for name in names if name != reference]
    if not any(reference in names for reference in usual):
        known += [(name, names[0]) for name in names[1:]]
    return list(dict.fromkeys(known))


# How a game of Among Us may end, the crewmates' ways first; what such games are called in a picture of all.
ENDS = {
    "ejection": "crewmates win by vote",
    "tasks": "crewmates win by tasks",
    "time": "time runs out",
    "parity": "imposters win",
}


@dataclass(frozen=True)
class Panel:
    """One small plot over training. `sign` turns a loss that is minus a quantity back into it."""

    metric: str
    title: str
    unit: str
    sign: float = 1.0
    ceiling: str = ""  # metric of the evaluation that is the most there is
    chance: str = ""  # metric of the evaluation that chance would give


PANELS = (
    Panel("game/win_rate/crewmates", "Crewmates' wins", "share of games"),
    Panel("vote/imposter", "Votes for the imposter", "share of crewmates' votes", chance="vote/chance"),
    Panel("talk/names_imposter", "Messages naming the imposter", "share of crewmates' messages"),
    Panel("game/score", "Score", "points per player", ceiling="game/score_ceiling"),
    Panel("game/agreement", "Agreement", "share of games"),
    Panel("game/pareto", "Pareto-optimal", "share of all games"),
    Panel("loss/listening", "Listening loss", "nats a question"),
    Panel("loss/plan", "Loss toward the plan", "nats a token"),
    Panel("belief/accuracy", "Belief accuracy", "share of answers", chance="belief/chance_accuracy"),
    Panel("reward/speaking", "Speaking reward", "change of belief a message"),
    Panel("loss/entropy", "Entropy", "nats a token", sign=-1.0),
    Panel("loss/kl", "KL to the base", "nats a token"),
    Panel("talk/turns", "Turns", "a game"),
    Panel("errors/per_turn", "Refused replies", "per turn"),
)
