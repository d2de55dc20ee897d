"""The rules: how a game starts, moves, talks and votes."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from random import Random
from typing import Any, NamedTuple, SupportsIndex

from envs.among_us import events
from envs.among_us.state import (
    DIRECTIONS,
    GO,
    KILL,
    NAMES,
    REPORT,
    SKIP,
    TASK,
    VOTE,
    WAIT,
    Act,
    Action,
    Activity,
    Body,
    Dice,
    Ending,
    Game,
    Phase,
    Player,
    Role,
    Rules,
    check_layouts,
    check_pairs,
)
from envs.among_us.texts import in_compact
from envs.core import END, clean


# --- The start --------------------------------------------------------------------------------------------------------
def new_game(rules: Rules, seed: int, options: Mapping[str, Any] | None = None) -> Game:
    """Draws names, roles and tasks; `options` may fix some (see `AmongUs`). Raises ValueError where they fit no game.

    Every hidden fact is drawn from a generator of its own, so that fixing one leaves all others as they were.
    """
    start = _read_start(options or {}, rules)
    rng = Random(f"{seed} layout")
    layout = rng.choice(rules.layouts or ((rules.width, rules.height),))
    tasks_each = rng.randint(*(rules.tasks_range or (rules.tasks, rules.tasks)))
    width, height = start.get("layout", layout)
    names = start.get("names") or Random(f"{seed} names").sample(NAMES, rules.players)
    imposters = start.get("imposters") or Random(f"{seed} roles").sample(range(rules.players), rules.imposters)
    players = []
    for seat, name in enumerate(names):
        own = Dice(f"{seed} seat {seat}")
        tasks = [(own.randrange(width), own.randrange(height)) for _ in range(tasks_each)]  # imposters draw too
        if "tasks" in start:
            tasks = list(start["tasks"][seat])
        room = ((width - 1) // 2, 0)
        imposter = seat in imposters
        role = Role.IMPOSTER if imposter else Role.CREWMATE
        players.append(Player(name, role, room, [] if imposter else tasks, rules.cooldown if imposter else 0, own))
    game = Game(rules, width, height, players, tuple(imposters), Dice(f"{seed} talk"))
    if any(not 0 <= x < width or not 0 <= y < height for p in players for x, y in p.tasks):
        raise ValueError(f"The reset option 'tasks' names rooms outside the grid of {width} x {height}.")
    everyone = tuple(p.name for p in game.by_name)
    guilty = tuple(p.name for p in game.by_name if p.role is Role.IMPOSTER)
    for seat, p in enumerate(players):
        fellows = tuple(name for name in guilty if name != p.name) if p.role is Role.IMPOSTER else ()
        to_do = tuple(sorted(p.tasks, key=lambda room: (room[1], room[0])))
        game.observed[seat].append(
            events.Intro(p.name, p.role, width, height, everyone, len(imposters), fellows, to_do)
        )
    _ask_movers(game)
    return game


def _read_start(options: Mapping[str, Any], rules: Rules) -> dict[str, Any]:
    """The known reset options, checked."""
    start = {key: options[key] for key in ("imposters", "names", "layout", "tasks") if key in options}
    for key, value in start.items():
        if not isinstance(value, list | tuple):
            raise ValueError(f"The reset option {key!r} must be a list or tuple, got {value!r}.")
    if "imposters" in start:
        seats, last = start["imposters"], rules.players - 1
        known = all(isinstance(seat, SupportsIndex) and seat in range(rules.players) for seat in seats)
        if not known or not len(seats) == len(set(seats)) == rules.imposters:
            raise ValueError(
                f"The reset option 'imposters' must be {rules.imposters} of seats 0 to {last}, got {seats}."
            )
        start["imposters"] = tuple(map(operator.index, seats))
    if "names" in start:
        names = start["names"] = tuple(str(name).capitalize() for name in start["names"])
        if len(names) != rules.players or len(set(names)) != len(names) or not set(names) <= set(NAMES):
            raise ValueError(
                f"The reset option 'names' must be {rules.players} different names of {', '.join(NAMES)}, got {names}."
            )
    if "layout" in start:
        start["layout"] = check_layouts((start["layout"],))[0]
    if "tasks" in start:
        tasks = start["tasks"] = [check_pairs("tasks", own) for own in start["tasks"]]
        if len(tasks) != rules.players or not all(tasks):
            raise ValueError("The reset option 'tasks' must give at least one room (x, y) for each seat.")
    return start


# --- What a player sees and may do ------------------------------------------------------------------------------------
def look(game: Game, player: Player) -> events.Look:
    """The sight of a player in its room, without its cooldown.

    A player who was killed on its way is still seen from the other end of it until it would have arrived.
    """
    room = player.room
    present, entering, leaving = [], [], []
    for other in game.by_name:
        goal = other.room
        if other is player:
            continue
        if not other.alive:
            if other.bound is None or goal == room:
                continue
            goal = other.bound
        if goal == room:
            if other.origin is None:
                present.append(other.name)
            else:
                entering.append((other.name, other.origin))
        elif other.origin == room:
            leaving.append((other.name, goal))
    bodies = tuple(body.name for body in game.bodies if body.room == room) if game.bodies else ()
    tasks = player.tasks.count(room)
    return events.Look(room, tuple(present), tuple(entering), tuple(leaving), bodies, tasks)


def legal_moves(game: Game, player: Player, sight: events.Look) -> list[Action]:
    """Lists all that the player may do, in a fixed order. It may kill whom it sees, those entering or leaving too."""
    x, y = player.room
    moves = [
        GO[direction]
        for direction, (dx, dy) in DIRECTIONS.items()
        if 0 <= x + dx < game.width and 0 <= y + dy < game.height
    ]
    moves.append(WAIT)
    if sight.tasks:
        moves.append(TASK)
    if player.role is Role.CREWMATE or game.rules.imposters_report:
        moves.extend(REPORT[name] for name in sight.bodies)
    if player.role is Role.IMPOSTER and player.cooldown == 0:
        near = (*sight.present, *(name for name, _ in (*sight.entering, *sight.leaving)))
        moves.extend(KILL[name] for name in near if game.players[game.seat[name]].role is Role.CREWMATE)
    return moves


def _ask_movers(game: Game) -> None:
    """Asks everybody who is ready, and those whose wait is over or whose sight has changed."""
    game.due = {}
    for seat, player in enumerate(game.players):
        if not player.alive or player.activity is Activity.WALK or player.activity is Activity.TASK:
            continue
        sight = look(game, player)
        if player.activity is Activity.WAIT and player.timer > 0 and sight == player.seen:
            continue
        player.activity, player.seen = Activity.READY, sight
        player.sightings |= dict.fromkeys((*sight.present, *(name for name, _ in sight.entering)), sight.room)
        player.sightings |= dict(sight.leaving)
        options = legal_moves(game, player, sight)
        player.rng.shuffle(options)
        game.due[seat] = options
        game.observed[seat].append(sight._replace(cooldown=player.cooldown) if player.role is Role.IMPOSTER else sight)


# --- Moving -----------------------------------------------------------------------------------------------------------
def play_moves(game: Game, actions: dict[int, Action]) -> None:
    """Plays one step of moving. `actions` holds a legal action for each seat in `game.due`."""
    rules = game.rules
    kills: list[tuple[int, Action]] = []
    reports: list[tuple[int, Action]] = []
    for seat, action in actions.items():
        player = game.players[seat]
        match action.act:
            case Act.GO:
                dx, dy = DIRECTIONS[action.target]
                player.origin, player.room = player.room, (player.room[0] + dx, player.room[1] + dy)
                player.activity, player.timer = Activity.WALK, rules.walk_steps
            case Act.TASK:
                player.activity, player.timer = Activity.TASK, rules.task_steps
            case Act.WAIT:
                player.activity, player.timer = Activity.WAIT, rules.reprompt
            case Act.KILL:
                kills.append((seat, action))
            case Act.REPORT:
                reports.append((seat, action))

    doing_a_task = {seat for seat, p in enumerate(game.players) if p.activity is Activity.TASK}
    for seat, player in enumerate(game.players):
        _pass_time(game, seat, player)
    for seat, action in kills:
        _kill(game, seat, game.seat[action.target], doing_a_task)

    if _ended(game):
        return
    if reports:
        seat, action = reports[int(game.rng.random() * len(reports))]
        _open_discussion(game, seat, action.target)
    else:
        _ask_movers(game)


def _pass_time(game: Game, seat: int, player: Player) -> None:
    """Advances walks, tasks and waits by one step; those that end leave the player ready."""
    if player.cooldown:
        player.cooldown -= 1
    if not player.timer:
        return
    player.timer -= 1
    if player.timer or player.activity is Activity.WAIT:
        return
    if player.activity is Activity.TASK:
        player.tasks.remove(player.room)
        game.observed[seat].append(events.Done())
        _earn(game, seat, "tasks")
    player.activity, player.origin, player.bound = Activity.READY, None, None


def _kill(game: Game, killer_seat: int, victim_seat: int, doing_a_task: set[int]) -> None:
    """Kills the victim at the end of a step. Everybody in the room notices, except who did a task during the step."""
    killer, victim = game.players[killer_seat], game.players[victim_seat]
    killer.cooldown = game.rules.cooldown
    if not victim.alive:
        return  # another imposter was faster
    victim.alive = False
    if victim.activity is Activity.WALK:
        victim.bound = victim.room
    else:
        victim.activity, victim.timer = Activity.READY, 0
    victim.room = killer.room
    game.bodies.append(Body(victim.name, killer.room))
    game.bodies.sort(key=lambda body: NAMES.index(body.name))
    game.observed[victim_seat].append(events.Killed(killer.name, ""))
    for seat, player in enumerate(game.players):
        if player.alive and player is not killer and player.room == killer.room and seat not in doing_a_task:
            game.observed[seat].append(events.Killed(killer.name, victim.name))
            player.killings[killer.name] = victim.name
    _earn(game, killer_seat, "kills")


def _earn(game: Game, seat: int, deed: str) -> None:
    game.earned[seat] += 1
    game.counts[deed] += 1


def _ended(game: Game) -> bool:
    """Ends the game if somebody has won, or if time has run out; before anything new begins."""
    living = [p for p in game.players if p.alive]
    imposters = sum(p.role is Role.IMPOSTER for p in living)
    if not imposters:
        game.winner, game.ending = Role.CREWMATE, Ending.EJECTION
    elif imposters >= len(living) - imposters:
        game.winner, game.ending = Role.IMPOSTER, Ending.PARITY
    elif not any(p.tasks for p in living):
        game.winner, game.ending = Role.CREWMATE, Ending.TASKS
    elif game.step >= game.rules.max_steps:
        game.ending = Ending.TIME
    else:
        return False
    game.phase, game.due, game.asks = Phase.OVER, {}, False
    for each in game.observed:
        each.append(events.Over(game.winner, game.ending))
    return True


# --- Talking and voting -----------------------------------------------------------------------------------------------
def _open_discussion(game: Game, finder: int, victim: str) -> None:
    player = game.players[finder]
    body = next(body for body in game.bodies if body.name == victim)
    game.bodies.remove(body)
    _earn(game, finder, "discussions")
    game.tell_living(events.Meeting(player.name, victim, body.room, game.living()))
    order = [seat for seat, p in enumerate(game.players) if p.alive]
    for seat in order if game.rules.recall else ():
        if (recall := _recall(game, game.players[seat])) != events.Recall((), ()):
            game.observed[seat].append(recall)
    game.rng.shuffle(order)
    game.speakers = order * game.rules.messages_each
    game.asks = True
    _next_speaker(game)


def _recall(game: Game, player: Player) -> events.Recall:
    living = [name for name in game.living() if name != player.name]
    return events.Recall(
        tuple((name, player.killings[name]) for name in living if name in player.killings),
        tuple((name, player.sightings[name]) for name in living if name in player.sightings),
    )


def _next_speaker(game: Game) -> None:
    """Asks the next speaker for a message, or, after the last one, everybody for a vote."""
    if game.speakers:
        game.phase, game.due = Phase.TALK, {game.speakers[0]: []}
        game.observed[game.speakers[0]].append(events.SpeakNow())
        return
    game.phase, game.due = Phase.VOTE, {}
    for seat, player in enumerate(game.players):
        if player.alive:
            options = [*(VOTE[name] for name in game.living()), SKIP]
            player.rng.shuffle(options)
            game.due[seat] = options
    game.tell_living(events.VoteNow())


def say(game: Game, message: str, cut: bool) -> None:
    """Passes the next speaker's message on to all others alive. `cut`: it was longer."""
    seat = game.speakers.pop(0)
    game.counts["messages"] += 1
    if cut:
        game.observed[seat].append(events.Cut())
    game.tell_living(events.Said(game.players[seat].name, message), but=seat)
    game.asks = True
    if not _ended(game):
        _next_speaker(game)


def count_votes(game: Game, votes: dict[int, Action]) -> None:
    """Counts the `votes` of all living seats (VOTE or SKIP). Then the game goes on in the start room, or is over."""
    counts: dict[str, int] = {}
    for seat, vote in votes.items():
        choice = vote.target or vote.act.value
        counts[choice] = counts.get(choice, 0) + 1
        if game.players[seat].role is Role.CREWMATE:
            game.counts["votes"] += 1
            if vote.act is Act.VOTE and game.players[game.seat[vote.target]].role is Role.IMPOSTER:
                _earn(game, seat, "votes_for_imposter")
    most = max(counts.values())
    leaders = [choice for choice, n in counts.items() if n == most]
    ejected = leaders[0] if len(leaders) == 1 and leaders[0] != Act.SKIP else ""
    game.tell_living(events.Tally(tuple((c, counts[c]) for c in (*NAMES, Act.SKIP.value) if c in counts), ejected))
    if ejected:
        game.players[game.seat[ejected]].alive = False
        game.counts["ejections"] += 1
    if _ended(game):
        return
    for player in game.players:
        player.activity, player.origin, player.bound, player.timer = Activity.READY, None, None, 0
        if player.alive:
            player.room, player.seen = game.start_room, None
            player.sightings = {}
            player.cooldown = game.rules.cooldown if player.role is Role.IMPOSTER else 0
    game.phase = Phase.MOVE
    _ask_movers(game)


class ParsedMessage(NamedTuple):
    """A message; `start:end` are the characters of the reply that it was made of."""

    text: str
    start: int
    end: int
    cut: bool


def parse_message(reply: str, max_words: int, max_chars: int, compact: bool = False) -> ParsedMessage:
    """The message that others hear: the words of a reply up to `[END]`, on one line, within both limits; perhaps none.

    No message can pass for the game's own words: < > and " become ( ) and '. In compact style, which writes without
    these, it is in lower case, "says" becomes "say" and _ becomes -, so that it can pass neither for somebody else's
    message nor for an option.
    """
    words = list(re.finditer(r"\S+", reply.partition(END)[0]))
    heard: list[str] = []
    end = length = 0
    for word in words[:max_words]:
        room = max_chars - length - bool(heard)
        if room < 1:
            break
        heard.append(word[0][:room])
        end = word.start() + len(heard[-1])
        length += len(heard[-1]) + (len(heard) > 1)
        if len(heard[-1]) < len(word[0]):
            break
    text = clean(" ".join(heard), max_chars).translate(_NO_FORGERY)
    if compact:
        text = in_compact(text)
    start = words[0].start() if heard else 0
    return ParsedMessage(text, start, end, bool(words) and end < words[-1].end())


_NO_FORGERY = str.maketrans({"<": "(", ">": ")", '"': "'"})
