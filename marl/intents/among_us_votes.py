"""Votes as an action model reads them: behind any message, had the discussion stopped there.

A vote is a question beside a stream (`model/branches.py`): it goes on from a message with the words that open the vote,
which is the injected end, and nothing later. Two kinds of streams have such questions: a player's own view of a game,
and what a table heard in one discussion, as a crewmate reads it that has seen nothing else. The second stands for the
hearers, whose own eyes a speaker cannot know.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from envs.among_us import events
from envs.among_us.state import NAMES, Role
from envs.among_us.texts import LOWER, ROOM_OF, write
from envs.core import Question, Style
from marl.intents.among_us import SKIP, Floats, Grid, Intent, table_texts, untruthful, votes_of
from marl.learning.batch import Row, collate
from marl.learning.forward import forward
from marl.learning.micro_batches import passes
from marl.metrics.among_us import Meeting, story_of
from marl.model.policy import Policy
from marl.model.tokens import StreamWriter, Tokens
from marl.types import Belief, Episode, Turn

VOTER = "voter"  # the role of who is asked for a vote: imposters are asked, too, and no loss leaves them out
TOKENS_AT_ONCE = 16384
OPENING = re.compile(r" meeting (\w+) found (\w+) at (\w+) living")


def ending(tokens: Tokens, style: Style = Style.COMPACT) -> tuple[int, ...]:
    """The injected end of a discussion: the words that open the vote, and the cue to reply."""
    return (*tokens.framed(write(events.VoteNow(), style), tokens.format.heard), *tokens.format.cue)


def meetings_of(episode: Episode) -> list[Meeting]:
    """The discussions that came to a vote."""
    return [c for c in story_of(episode) if isinstance(c, Meeting) and c.reports and c.votes]


def cast_by(meeting: Meeting, name: str) -> str:
    """A player's vote, as options have it."""
    return LOWER.get(meeting.votes[name], SKIP)


def vote_asked(agent: str, step: int, position: int, meeting: Meeting, name: str, tokens: Tokens) -> Belief:
    """A vote as a question that goes on from `position` of a stream; its answer is the vote really cast."""
    votes = votes_of(meeting.living)
    ids, listing, _ = tokens.label(votes)
    assert not listing, f"letters stand for votes: {votes}"
    question = Question("vote", votes, cast_by(meeting, name))
    return Belief(
        agent, VOTER, step, position, question, np.full(len(votes), 1 / len(votes)), tuple(ids), ending(tokens)
    )


@dataclass(frozen=True)
class VotedMessage:
    """A message, and the votes to read in its speaker's own view: before it (`cued` by nothing yet), and after."""

    turn: Turn
    name: str
    meeting: Meeting
    truthful: bool
    before: Belief
    after: Belief


def voted_messages(episode: Episode, tokens: Tokens, meetings: Sequence[Meeting]) -> list[VotedMessage]:
    """The messages of these discussions whose speakers have a stream."""
    names: dict[str, str] = episode.facts["names"]
    lies, cue, found = untruthful(episode), len(tokens.format.cue), []
    for meeting in meetings:
        for turn in (t for t in meeting.messages if t.reply_ids and names[t.agent] in meeting.votes):
            name, places = names[turn.agent], (turn.start - cue - 1, turn.start + len(turn.reply_ids) - 1)
            both = [vote_asked(turn.agent, turn.step, place, meeting, name, tokens) for place in places]
            found.append(VotedMessage(turn, name, meeting, (turn.agent, turn.step) not in lies, *both))
    return found


def opening_of(episode: Episode, meeting: Meeting, agent: str, tokens: Tokens) -> events.Meeting:
    """The opening of a discussion from a seat's stream: of several reports in one step, replies don't tell which
    counted. It stands between the seat's last turn before the discussion and its first one in it."""
    own = [turn for turn in episode.turns if turn.agent == agent]
    begin = max((turn.start + len(turn.reply_ids) for turn in own if turn.step < meeting.step), default=0)
    end = next(turn.start for turn in own if turn.step >= meeting.step)
    found = OPENING.search(tokens.decode(episode.streams[agent].tokens[begin:end]))
    assert found is not None, (agent, meeting.step)
    finder, victim, room = found.groups()
    return events.Meeting(finder.capitalize(), victim.capitalize(), ROOM_OF[room], ())


def table_row(episode: Episode, meeting: Meeting, name: str, tokens: Tokens) -> Row:
    """Returns what a player heard in a discussion, as a row (`table_texts`), with its vote asked behind the opening and
    behind every message."""
    facts, names = episode.facts, episode.facts["names"]
    agent = next(agent for agent, own in names.items() if own == name)
    everyone, living = (tuple(sorted(who, key=NAMES.index)) for who in (names.values(), meeting.living))
    grid = Grid(facts["width"], facts["height"], everyone, len(facts["imposters"]))
    opening = opening_of(episode, meeting, agent, tokens)._replace(living=living)
    words = [(names[turn.agent], turn.message) for turn in meeting.messages]
    writer, asked = StreamWriter(tokens), []
    for step, text in enumerate(table_texts(name, grid, opening, words, Style.COMPACT)):
        writer.observe(text, (), step)
        asked.append(vote_asked(agent, step, len(writer.stream) - 1, meeting, name, tokens))
    alone = replace(
        episode, streams={agent: writer.stream}, turns=(), beliefs=tuple(asked), payments=()
    )  # fmt: skip
    return alone, agent


def crew_of(episode: Episode, meeting: Meeting) -> list[str]:
    """The crewmates who voted, by name."""
    names: dict[str, str] = episode.facts["names"]
    return [names[a] for a in names if episode.roles[a] == Role.CREWMATE and names[a] in meeting.votes]


def table_rows(episode: Episode, tokens: Tokens) -> list[Row]:
    """The `table_row` of each crewmate in each discussion."""
    return [table_row(episode, m, name, tokens) for m in meetings_of(episode) for name in crew_of(episode, m)]


def with_votes(episode: Episode, tokens: Tokens) -> Episode:
    """The episode with votes to learn beside its own questions: before each message, and after each that the log does
    not refute."""
    asked: list[Belief] = []
    for said in voted_messages(episode, tokens, meetings_of(episode)):
        asked += [said.before, said.after] if said.truthful else [said.before]
    return replace(episode, beliefs=(*episode.beliefs, *asked))


@torch.no_grad()
def read_votes(policy: Policy, rows: Sequence[Row]) -> list[Floats]:
    """Reads the questions beside these rows' streams, (A,) each: row by row, in the order of the row's beliefs."""
    if not rows:
        return []
    batch = collate(rows, {}, silent_roles=())
    sizes = (batch.candidates >= 0).sum(1).tolist()
    owners = batch.row.numpy()  # (N,) in order
    found: list[Floats] = [np.zeros(0)] * len(owners)
    for part, numbers in passes(policy, batch, TOKENS_AT_ONCE):
        probs = forward(policy, part, 1.0, {"beliefs": False}).beliefs.double().exp().cpu().numpy()  # (n, K)
        # `select` keeps the questions in the batch's order.
        for place, each in zip(np.flatnonzero(np.isin(owners, numbers.numpy())), probs, strict=True):
            found[place] = each[: sizes[place]]
    return found


# --- Annotation -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Annotated:
    """A message, and what it is said for: both votes, had the discussion stopped after it."""

    seed: int  # of its game
    role: str
    turn: Turn
    intent: Intent
    cast: str  # the vote that the speaker really cast later: the naive annotation
    votes: tuple[str, ...]  # the legal ones
    truthful: bool  # the log refutes no claim of fact in it


def annotate(policy: Policy, episodes: Sequence[Episode]) -> list[Annotated]:
    """Annotates the messages of games with streams: with the speaker's likeliest vote in its own view, and with the
    likeliest vote of the crewmates among its hearers, in the mean over what each heard."""
    tokens, said, views, tables = policy.tokens, [], [], []
    heard: dict[tuple[int, int], list[tuple[str, int]]] = {}  # of a discussion: its crew, and where their votes begin
    count = 0
    for episode in episodes:
        meetings = meetings_of(episode)
        own = voted_messages(episode, tokens, meetings)
        for agent in episode.streams:
            asked = [each for each in own if each.turn.agent == agent]
            if asked:
                views.append((replace(episode, beliefs=tuple(each.after for each in asked)), agent))
                said += [(episode, each) for each in asked]
        for meeting in meetings:
            for name in crew_of(episode, meeting):
                tables.append(table_row(episode, meeting, name, tokens))
                heard.setdefault((id(episode), meeting.step), []).append((name, count))
                count += 1 + len(meeting.messages)
    mine, theirs = read_votes(policy, views), read_votes(policy, tables)
    found = []
    for (episode, each), probs in zip(said, mine, strict=True):
        votes = votes_of(each.meeting.living)
        number = 1 + each.meeting.messages.index(each.turn)
        crew = heard.get((id(episode), each.meeting.step), [])
        hearers = [theirs[first + number] for name, first in crew if name != each.name]
        own_vote = votes[int(probs.argmax())]
        others = votes[int(np.mean(hearers, axis=0).argmax())] if hearers else own_vote
        cast = cast_by(each.meeting, each.name)
        intent = Intent(own_vote, others)
        found.append(Annotated(episode.seed, each.turn.role, each.turn, intent, cast, votes, each.truthful))
    return found
