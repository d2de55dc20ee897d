"""The PettingZoo environment of grid Among Us."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from inspect import Parameter, Signature
from random import Random
from typing import Any

import numpy as np
from gymnasium import spaces

from envs.among_us import events
from envs.among_us.pictures import describe, picture
from envs.among_us.rules import count_votes, new_game, parse_message, play_moves, say
from envs.among_us.state import NAMES, SKIP, VOTE, WAIT, Action, Ending, Phase, Role, Rules
from envs.among_us.texts import EXCHANGEABLE, OPTION, QUESTION, explain, write
from envs.core import END, Question, Step, Style, TextGame, TurnKind, View, clean

MAX_TEXT = 4_000  # characters of an observation besides a message; the natural intro is the longest


class AmongUs(TextGame):
    """The game as a PettingZoo parallel environment.

    Settings: all fields of `Rules`, `style` ("natural", "brief", "compact"), `render_mode` (None, "ansi", "rgb_array").
    Raises ValueError, naming the setting, for values that make no game. `reset(options=...)` knows `imposters` (seats),
    `names` (in seat order), `tasks` (rooms of each seat), `layout` (width, height) and `styles` (by agent). A reply
    that is none of the options counts as `wait` or `skip`. The `entry` of an action is move, vote or message.

    The outcome, the same dict for all, has `winner` ("crewmates", "imposters" or None), `how` (an `Ending`), `steps`,
    `points` of each seat without shaping, `imposters` (agents), `alive`, and counts of `decisions`, `messages`,
    `discussions`, `kills`, `tasks`, `ejections`, `votes` (by crewmates) and `votes_for_imposter` (by crewmates).
    """

    metadata = {"name": "among_us_v0", "render_modes": ["ansi", "rgb_array"], "is_parallelizable": True}  # noqa: RUF012
    generator = Random
    __signature__ = Signature(  # shows all settings
        [Parameter("style", Parameter.KEYWORD_ONLY, default="compact")]
        + [Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default) for f in fields(Rules)]
        + [Parameter("render_mode", Parameter.KEYWORD_ONLY, default=None)]
    )

    def __init__(self, style: str = "compact", render_mode: str | None = None, **settings: Any) -> None:
        self.rules = Rules(**settings)
        agents = [f"player_{seat}" for seat in range(self.rules.players)]
        most = self.rules.message_chars
        super().__init__(agents, style, render_mode, max_text=MAX_TEXT + most, max_reply=most + len(END))
        self.state_space = spaces.Box(-1, 1_000, (self.rules.players, 9), np.float32)

    def begin(self, rng: Random, options: Mapping[str, Any]) -> dict[str, View]:
        game = self._game = new_game(self.rules, rng.getrandbits(63), options)
        self._facts = {
            "width": game.width,
            "height": game.height,
            "names": self._by_agent([p.name for p in game.players]),
            "roles": self._by_agent([p.role.value for p in game.players]),
            "tasks": self._by_agent([tuple(p.tasks) for p in game.players]),
            "imposters": tuple(self.possible_agents[seat] for seat in game.imposters),
        }
        return self._views(first=True)

    def play(self, actions: Mapping[str, Any]) -> Step:
        """Plays the replies of those who must act. Others' are ignored; a missing one counts as an empty reply."""
        game = self._game
        game.clear()
        game.asks = False
        game.step += 1
        game.counts["decisions"] += len(game.due)
        came_to: dict[int, dict[str, Any]] = {}  # fields of the view of whoever acted, by seat
        given = {seat: actions.get(self.possible_agents[seat]) for seat in game.due}
        replies = {seat: reply if isinstance(reply, str) else "" for seat, reply in given.items()}
        if game.phase is Phase.TALK:
            seat = game.speakers[0]
            compact = self.styles[self.possible_agents[seat]] is Style.COMPACT
            heard = parse_message(replies[seat], self.rules.message_words, self.rules.message_chars, compact)
            came_to[seat] = {"entry": "message", "message": heard.text, "span": (heard.start, heard.end)}
            say(game, heard.text, heard.cut)
        else:
            voting = game.phase is Phase.VOTE
            chosen = {}
            for seat, legal in game.due.items():
                chosen[seat], error = self._choose(seat, replies[seat], legal, SKIP if voting else WAIT)
                came_to[seat] = {"entry": "vote" if voting else "move", "error": error}
                if error:
                    game.observed[seat].append(events.Refused(chosen[seat].act))
            (count_votes if voting else play_moves)(game, chosen)
        rewards = [self.rules.shaping * n for n in game.earned]
        outcome = None
        if game.ending is not None:
            points = [1.0 if p.role is game.winner else float(self.rules.loser_reward) for p in game.players]
            rewards = [reward + n for reward, n in zip(rewards, points, strict=True)]
            outcome = {
                "winner": f"{game.winner}s" if game.winner else None,
                "how": game.ending.value,
                "steps": game.step,
                "points": self._by_agent(points),
                "imposters": self._facts["imposters"],
                "alive": self._by_agent([p.alive for p in game.players]),
                **game.counts,
            }
        return Step(self._views(came_to), self._by_agent(rewards), outcome, truncated=game.ending is Ending.TIME)

    @property
    def facts(self) -> dict[str, Any]:
        """Hidden facts of the start, for analysts: layout, and by agent names, roles and tasks."""
        self.check_started()
        return self._facts

    @property
    def living(self) -> list[str]:
        """The agents who are alive now, for analysts: the dead stay in `agents`."""
        return [a for a, p in zip(self.possible_agents, self._game.players, strict=True) if p.alive]

    def privileged(self, agent: str) -> tuple[float, ...]:
        """Numbers for a privileged critic: for each of the seven names in order, 1 if it is an imposter's, else 0."""
        imposters = {self._game.players[seat].name for seat in self._game.imposters}
        return tuple(float(name in imposters) for name in NAMES)

    def state(self) -> np.ndarray:
        """The hidden state by seat, shape (players, 9): index of the name, imposter, alive, x, y, tasks left, cooldown,
        activity (0 ready, 1 walking, 2 at a task, 3 waiting), steps until that ends."""
        self.check_started()
        return np.array(
            [
                [NAMES.index(p.name), p.role is Role.IMPOSTER, p.alive, *p.room, len(p.tasks), p.cooldown,
                 p.activity.value * p.alive, p.timer * p.alive]
                for p in self._game.players
            ],
            np.float32,
        )  # fmt: skip

    def draw(self) -> str | np.ndarray:
        return describe(self._game) if self.render_mode == "ansi" else picture(self._game)

    def _by_agent(self, values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.possible_agents, values, strict=True))

    def _choose(self, seat: int, reply: str, legal: list[Action], otherwise: Action) -> tuple[Action, str]:
        """The option that a reply names, word for word; else what it counts as, and why."""
        words = OPTION[self.styles[self.possible_agents[seat]]]
        reply = reply.strip()
        for action in legal:
            if words[action] == reply:
                return action, ""
        options = ", ".join(words[action] for action in legal)
        return otherwise, f"{clean(reply, 40)!r} is none of the options ({options}). It counts as {words[otherwise]}."

    def _views(self, came_to: Mapping[int, dict[str, Any]] = {}, first: bool = False) -> dict[str, View]:
        game = self._game
        questions = self._questions() if game.asks else {}
        acting = TurnKind.SPEAK if game.phase is Phase.TALK else TurnKind.CHOOSE
        guilty = self._guilty() if game.phase is Phase.VOTE else ()
        views = {}
        for seat, (agent, player) in enumerate(zip(self.possible_agents, game.players, strict=True)):
            style = self.styles[agent]
            texts = [write(event, style) for event in game.observed[seat]]
            if first and style is not Style.COMPACT:
                texts.insert(1, explain(self.rules, game.start_room, style))
            due = seat in game.due
            views[agent] = View(
                player.role.value,
                "".join(texts),
                acting if due else TurnKind.WAIT,
                tuple(OPTION[style][action] for action in game.due[seat]) if due else (),
                questions.get(player.name, ()),
                tuple(OPTION[style][VOTE[name]] for name in guilty) if due and player.role is Role.CREWMATE else (),
                **came_to.get(seat, {}),
            )
        return views

    def _guilty(self) -> list[str]:
        """Names of the living imposters, the first drawn first."""
        return [self._game.players[seat].name for seat in self._game.imposters if self._game.players[seat].alive]

    def _questions(self) -> dict[str, tuple[Question]]:
        """The belief question that is due now, by the name of who is asked."""
        game = self._game
        living = game.living()
        guilty = self._guilty()
        asked = {}
        by_vote = self.rules.belief == "vote"
        for name in living:
            seat = game.seat[name]
            style = self.styles[self.possible_agents[seat]]
            written = dict(zip(NAMES, EXCHANGEABLE[style], strict=True))
            candidates: tuple[str, ...] = EXCHANGEABLE[style]
            if self.rules.candidates == "living_others":
                if game.players[seat].role is Role.IMPOSTER:
                    continue
                candidates = tuple(written[other] for other in living if by_vote or other != name)
            text = QUESTION[style]
            if by_vote:
                voting = game.due[seat] if game.phase is Phase.VOTE else ()
                candidates = tuple(OPTION[style][vote] for vote in voting) or (*candidates, OPTION[style][SKIP])
                text = write(events.VoteNow(), style)
            answer, *also = (written[other] for other in guilty)
            asked[name] = (Question(text, candidates, answer, tuple(also), by_vote),)
        return asked
