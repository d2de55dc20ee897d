"""The texts that players read, in each style."""

from __future__ import annotations

import re
from collections.abc import Sequence

from envs.among_us import events
from envs.among_us.state import GO, KILL, NAMES, REPORT, SKIP, TASK, VOTE, WAIT, Act, Ending, Role, Room, Rules
from envs.core import END, Style


def in_compact(message: str) -> str:
    """A message as compact style tells it; one that is told so already stays as it is."""
    return re.sub(r"\bsays\b", "say", message.lower().replace("_", "-"))


# --- Words ------------------------------------------------------------------------------------------------------------
QUESTION = {
    Style.NATURAL: "Which player is the imposter?",
    Style.BRIEF: "Who is the imposter?",
    Style.COMPACT: "<imposter?>",
}
ROOMS = (  # compact names of the rooms: ROOMS[y][x]
    ("bridge", "galley", "lounge", "office", "armory"),
    ("lab", "garden", "clinic", "gym", "archive"),
    ("reactor", "engine", "shaft", "boiler", "dock"),
    ("hangar", "vault", "workshop", "shower", "laundry"),
    ("chapel", "studio", "kennel", "silo", "cellar"),
)
ROOM_OF = {name: (x, y) for y, row in enumerate(ROOMS) for x, name in enumerate(row)}
LOWER = {name: name.lower() for name in NAMES}
ALL_ACTIONS = (*GO.values(), WAIT, TASK, *REPORT.values(), *KILL.values(), *VOTE.values(), SKIP)
_FORM = {Act.REPORT: "report body of {}", Act.KILL: "kill {}", Act.VOTE: "{}", Act.GO: "go {}"}
_BRIEF_FORM = {**_FORM, Act.REPORT: "report {}", Act.GO: "{}", Act.TASK: "task"}
_COMPACT_FORM = {Act.REPORT: "report_{}", Act.KILL: "kill_{}", Act.VOTE: "{}", Act.GO: "go_{}", Act.TASK: "do_task"}
OPTION = {  # how an action reads among the options
    Style.NATURAL: {a: _FORM.get(a.act, a.act.value).format(a.target) for a in ALL_ACTIONS},
    Style.BRIEF: {a: _BRIEF_FORM.get(a.act, a.act.value).format(a.target) for a in ALL_ACTIONS},
    Style.COMPACT: {a: _COMPACT_FORM.get(a.act, a.act.value).format(a.target.lower()) for a in ALL_ACTIONS},
}

# Strings of compact style that a tokenizer made for this game should keep whole; numbers are its own business.
COMPACT_TOKENS = (
    *LOWER.values(),
    *ROOM_OF,
    *(text for action, text in OPTION[Style.COMPACT].items() if action.act is not Act.VOTE),
    *("grid", "imposters", "players", "you", "crewmate", "imposter", "with", "tasks"),
    *("at", "in", "out", "body", "task", "cooldown", "ready", "done", "killer", "victim"),
    *("meeting", "found", "living", "recall", "speak", "says", "cut", "vote", "votes", "ejected", "nobody"),
    *("refused", "crewmates", "win", "time", "ejection", "parity"),
    QUESTION[Style.COMPACT],
    END,
)

# Words that mean nothing but who is who: a game with others of them, in the same order, might have been played as well.
EXCHANGEABLE = {Style.NATURAL: NAMES, Style.BRIEF: NAMES, Style.COMPACT: tuple(LOWER.values())}


def write(event: events.Event, style: Style) -> str:
    """The event in words, as they stand in an observation."""
    return {Style.NATURAL: _write_natural, Style.BRIEF: _write_brief, Style.COMPACT: _write_compact}[style](event)


def _write_compact(event: events.Event) -> str:
    match event:
        case events.Look(room, present, entering, leaving, bodies, tasks, cooldown):
            text = " at " + ROOMS[room[1]][room[0]]
            for name in present:
                text += " " + LOWER[name]
            for name, (x, y) in entering:
                text += f" in {LOWER[name]} {ROOMS[y][x]}"
            for name, (x, y) in leaving:
                text += f" out {LOWER[name]} {ROOMS[y][x]}"
            for name in bodies:
                text += " body " + LOWER[name]
            text += " task" * tasks
            return text + ("" if cooldown < 0 else f" cooldown {cooldown}" if cooldown else " ready")
        case events.Intro(name, role, width, height, names, imposters, fellows, tasks):
            text = f" grid {width} {height} imposters {imposters} players{_spaced(names)} you {LOWER[name]} {role}"
            text += f" with{_spaced(fellows)}" if fellows else ""
            return text + (" tasks " + " ".join(ROOMS[y][x] for x, y in tasks) if tasks else "")
        case events.Done():
            return " done"
        case events.Killed(killer, victim):
            # Names come after what they are: small models find a killer thrice as soon so as in "red killed blue".
            return f" killer {LOWER[killer]} victim {LOWER.get(victim, 'you')}"
        case events.Meeting(finder, victim, (x, y), living):
            return f" meeting {LOWER[finder]} found {LOWER[victim]} at {ROOMS[y][x]} living{_spaced(living)}"
        case events.Recall(killings, sightings):
            seen = "".join(f" killer {LOWER[killer]} victim {LOWER[victim]}" for killer, victim in killings)
            return " recall" + seen + "".join(f" {LOWER[name]} {ROOMS[y][x]}" for name, (x, y) in sightings)
        case events.SpeakNow():
            return " speak"
        case events.Said(speaker, message):
            return f" {LOWER[speaker]} says {in_compact(message)}{' ' if message else ''}{END}"
        case events.Cut():
            return " cut"
        case events.VoteNow():
            return " vote"
        case events.Tally(counts, ejected):
            votes = "".join(f" {choice.lower()} {n}" for choice, n in counts)
            return f" votes{votes} ejected {LOWER.get(ejected, 'nobody')}"
        case events.Refused(instead):
            return f" refused {instead}"
        case events.Over(winner, ending):
            return f" {winner}s win {ending}" if winner else " nobody win time"


def _spaced(names: Sequence[str]) -> str:
    return "".join(" " + LOWER[name] for name in names)


def _write_natural(event: events.Event) -> str:
    match event:
        case events.Look(room, present, entering, leaving, bodies, tasks, cooldown):
            text = f"You are in room {cell_of(room)}."
            if present:
                text += f" Here with you: {', '.join(present)}."
            for name, origin in entering:
                text += f" {name} is entering from room {cell_of(origin)}."
            for name, target in leaving:
                text += f" {name} is leaving to room {cell_of(target)}."
            if not (present or entering or leaving):
                text += " Nobody else is here."
            for name in bodies:
                text += f" The body of {name} lies here!"
            if tasks:
                text += f" Tasks of yours to do here: {tasks}."
            if cooldown >= 0:
                text += f" Steps until you may kill: {cooldown}." if cooldown else " You may kill now."
            return text + "\n"
        case events.Intro(name, role, width, height, names, imposters, fellows, tasks):
            text = f"You play Among Us on a grid of rooms, {width} wide and {height} high.\n"
            text += f"Players: {', '.join(names)}. Imposters among them: {imposters}.\n"
            text += f"You are {name}, {'an imposter' if role is Role.IMPOSTER else 'a crewmate'}.\n"
            text += f"Your fellow imposters: {', '.join(fellows)}.\n" if fellows else ""
            places = ", ".join(f"room {cell_of(room)}" for room in tasks)
            return text + (f"Your tasks are in: {places}.\n" if tasks else "")
        case events.Done():
            return "You have done the task.\n"
        case events.Killed(killer, victim):
            return f"You notice {killer} killing {victim}!\n" if victim else f"{killer} has killed you. You are dead.\n"
        case events.Meeting(finder, victim, room, living):
            found = f"{finder} has found the body of {victim} in room {cell_of(room)}."
            return f"{found} A discussion begins. Alive: {', '.join(living)}.\n"
        case events.Recall(killings, sightings):
            seen = [f"{killer} killed {victim}" for killer, victim in killings]
            seen += [f"{name} was last in room {cell_of(room)}" for name, room in sightings]
            return f"What you have seen: {', '.join(seen)}.\n"
        case events.SpeakNow():
            return "It is your turn to speak.\n"
        case events.Said(speaker, message):
            return f'{speaker} says: "{message}"\n'
        case events.Cut():
            return "Your message was too long and was cut: the others heard only its beginning.\n"
        case events.VoteNow():
            return "Now everybody votes: which player do you want to eject?\n"
        case events.Tally(counts, ejected):
            votes = ", ".join(f"{choice} {n}" for choice, n in counts)
            return f"Votes: {votes}. {ejected or 'Nobody'} is ejected.\n"
        case events.Refused(instead):
            return f"Your reply was not one of your options. It counts as: {instead}.\n"
        case events.Over(winner, ending):
            won = f"The {winner}s win" if winner else "Nobody wins"
            return f"The game is over. {won}: {REASON[ending]}.\n"


def _write_brief(event: events.Event) -> str:
    match event:
        case events.Look(room, present, entering, leaving, bodies, tasks, cooldown):
            text = f"Room {cell_of(room)}."
            text += f" Here: {', '.join(present)}." if present else ""
            for name, origin in entering:
                text += f" {name} comes from {cell_of(origin)}."
            for name, target in leaving:
                text += f" {name} goes to {cell_of(target)}."
            for name in bodies:
                text += f" Body of {name}!"
            text += f" Tasks: {tasks}." if tasks else ""
            if cooldown >= 0:
                text += f" Kill in {cooldown}." if cooldown else " Kill now."
            return text + "\n"
        case events.Intro(name, role, width, height, names, imposters, fellows, tasks):
            text = f"Among Us, {width} by {height} rooms.\nPlayers: {', '.join(names)}. Imposters: {imposters}.\n"
            text += f"You are {name}, {'an imposter' if role is Role.IMPOSTER else 'a crewmate'}.\n"
            text += f"With you: {', '.join(fellows)}.\n" if fellows else ""
            return text + (f"Your tasks: {', '.join(map(cell_of, tasks))}.\n" if tasks else "")
        case events.Done():
            return "Task done.\n"
        case events.Killed(killer, victim):
            return f"{killer} kills {victim}!\n" if victim else f"{killer} kills you. You are dead.\n"
        case events.Meeting(finder, victim, room, living):
            return f"{finder} found the body of {victim} in {cell_of(room)}. Alive: {', '.join(living)}.\n"
        case events.Recall(killings, sightings):
            seen = [f"{killer} killed {victim}" for killer, victim in killings]
            seen += [f"{name} was last in {cell_of(room)}" for name, room in sightings]
            return f"Seen: {', '.join(seen)}.\n"
        case events.SpeakNow():
            return "Speak.\n"
        case events.Said(speaker, message):
            return f"{speaker}: {message}\n"
        case events.Cut():
            return "Your message was cut.\n"
        case events.VoteNow():
            return "Vote: who is ejected?\n"
        case events.Tally(counts, ejected):
            votes = ", ".join(f"{choice} {n}" for choice, n in counts)
            return f"Votes: {votes}. {ejected or 'Nobody'} is out.\n"
        case events.Refused(instead):
            return f"No option. It counts as {instead}.\n"
        case events.Over(winner, ending):
            return f"{winner.capitalize()}s win: {REASON[ending]}.\n" if winner else f"Nobody wins: {REASON[ending]}.\n"


REASON = {
    Ending.EJECTION: "no imposter is left",
    Ending.TASKS: "all tasks are done",
    Ending.PARITY: "imposters are as many as crewmates",
    Ending.TIME: "time has run out",
}


def cell_of(room: Room) -> str:
    return f"({room[0]},{room[1]})"


def explain(rules: Rules, start_room: Room, style: Style) -> str:
    """The rules in sentences, which natural and brief style put after the intro."""
    return explain_briefly(rules, start_room) if style is Style.BRIEF else explain_at_length(rules, start_room)


def explain_briefly(rules: Rules, start_room: Room) -> str:
    """The rules of brief style."""
    talk = ""
    if rules.messages_each:
        talk = (
            f"each speaks {rules.messages_each} times, at most {rules.message_words} words that end with {END}; then "
        )
    return (
        f"Room (x,y) is x east and y south of the north-west corner. All start in {cell_of(start_room)}. "
        f"To go north, south, east or west takes {rules.walk_steps} steps, a task {rules.task_steps}, blind.\n"
        "Crewmates win without living imposters, or with all living crewmates' tasks done; imposters when they are as "
        f"many as living crewmates. Kills are {rules.cooldown} steps apart; those there see them, unless at a task.\n"
        f"{'Anybody' if rules.imposters_report else 'A crewmate'} who sees a body can report it: {talk}all vote for a "
        "player or skip, and who has most votes is out, nobody in a tie. Then all start again.\n"
        "Answer with one option, word for word.\n"
    )


def explain_at_length(rules: Rules, start_room: Room) -> str:
    """Writes out the rules, in natural style."""
    steps = f"Walking to a neighbouring room takes {rules.walk_steps} steps, a task {rules.task_steps} steps"
    reporting = "Everybody" if rules.imposters_report else "Crewmates"
    talk = "everybody alive votes"
    if rules.messages_each:
        talk = (
            f"everybody alive speaks, {rules.messages_each} messages each of at most {rules.message_words} words, "
            f"finished with {END}; then all vote"
        )
    return (
        "Room (x,y) lies x rooms east and y rooms south of the north-west corner. "
        f"All start in room {cell_of(start_room)}.\n"
        f"Time runs in steps. {steps}; whoever does a task does not see the room.\n"
        "Crewmates win when no imposter is alive, or when all tasks of the living crewmates are done. "
        "Imposters win when they are as many as the living crewmates.\n"
        "Imposters can kill a crewmate in their room; after the start, a kill or a discussion they must wait "
        f"{rules.cooldown} steps. Who is there and not busy with a task notices.\n"
        f"{reporting} can report a body that they see. Then {talk}: for a player to be ejected, or skip. "
        "The player with most votes is ejected; when the vote is tied or most skip, nobody is. "
        "Then all start again together.\n"
        "When you are asked to act, answer with one of the options given, word for word.\n"
    )
