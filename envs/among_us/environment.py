"""The PettingZoo environment."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from envs.among_us.pictures import describe, picture
from envs.among_us.rules import count_votes, hear, new_game, play_moves, say
from envs.among_us.state import MAX_PLAYERS, NAMES, SKIP, WAIT, Action, Ending, Game, Phase, Refused, Role, Room, Rules
from envs.among_us.texts import EXCHANGEABLE, OPTION, QUESTION, explain, write
from envs.core import END, Question, Style, TurnKind, action_space, clean, observation_space, read_seed, read_styles

# --- The environment --------------------------------------------------------------------------------------------------
_MAX_TEXT = 4_000  # characters of an observation besides a message; the natural intro is the longest
_MAX_OPTIONS = MAX_PLAYERS + 10


class AmongUs(ParallelEnv[str, dict[str, Any], str]):
    """The game as a PettingZoo parallel environment.

    Settings: all fields of `Rules`, `style` ("natural" or "compact"; the reset option `styles` gives agents others) and
    `render_mode` (None, "ansi" or "rgb_array"). Raises ValueError, naming the setting, for values that make no game.

    Moves and votes are turns CHOOSE, messages SPEAK. The dead stay in `agents` with WAIT. A reply that is none of the
    options counts as `wait` or `skip`, and the player is told. `reset(options=...)` knows `imposters` (seats), `names`
    (in seat order), `tasks` (rooms of each seat), `layout` (width, height) and `styles` (by agent).

    `infos[agent]` holds `role`, `questions`, and of the agent's own last action `entry` ("move", "vote", "message" or
    ""), `error`, `message` (what the others heard) and `span` (the characters of the action that this was); at the end
    also `outcome`, the same dict for all: `winner` ("crewmates", "imposters" or None), `how` (an `Ending`), `steps`,
    `points` of each seat without shaping, `imposters` (agents), `alive`, and counts of `decisions`, `messages`,
    `discussions`, `kills`, `tasks`, `ejections`, `votes` (by crewmates) and `votes_for_imposter` (by crewmates).
    """

    metadata = {"name": "among_us_v0", "render_modes": ["ansi", "rgb_array"], "is_parallelizable": True}  # noqa: RUF012

    def __init__(
        self,
        style: str = "compact",
        width: int = 2,
        height: int = 2,
        layouts: tuple[Room, ...] = (),
        players: int = 5,
        imposters: int = 1,
        tasks: int = 4,
        tasks_range: tuple[int, int] | None = None,
        walk_steps: int = 3,
        task_steps: int = 8,
        cooldown: int = 6,
        reprompt: int = 2,
        messages_each: int = 2,
        message_words: int = 20,
        message_chars: int = 200,
        imposters_report: bool = False,
        recall: bool = False,
        candidates: str = "living_others",
        max_steps: int = 300,
        shaping: float = 0.0,
        loser_reward: float = 0.0,
        render_mode: str | None = None,
    ) -> None:
        if style not in tuple(Style):
            raise ValueError(f"style must be {' or '.join(Style)}, got {style!r}.")
        if render_mode not in (None, "ansi", "rgb_array"):
            raise ValueError(f"render_mode must be None, ansi or rgb_array, got {render_mode!r}.")
        self.rules = Rules(
            width, height, layouts, players, imposters, tasks, tasks_range, walk_steps, task_steps, cooldown, reprompt,
            messages_each, message_words, message_chars, imposters_report, recall, candidates, max_steps, shaping,
            loser_reward,
        )  # fmt: skip
        self.style = Style(style)
        self.render_mode = render_mode
        self.possible_agents = [f"player_{seat}" for seat in range(self.rules.players)]
        self.agents: list[str] = []
        seen = observation_space(_MAX_TEXT + self.rules.message_chars, _MAX_OPTIONS)
        said = action_space(self.rules.message_chars + len(END))
        self.observation_spaces = {agent: seen for agent in self.possible_agents}
        self.action_spaces = {agent: said for agent in self.possible_agents}
        self.state_space = spaces.Box(-1, 1_000, (self.rules.players, 9), np.float32)
        self._seeds: Random | None = None
        self._game: Game | None = None

    def observation_space(self, agent: str) -> spaces.Dict:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Text:
        return self.action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
        """Starts a game, drawn on from where the generator stands if no seed is given. ValueError for bad options."""
        styles = read_styles(options or {}, self.possible_agents, self.style)
        if seed is not None or self._seeds is None:
            self._seeds = Random(None if seed is None else read_seed(seed))
        game = self._game = new_game(self.rules, self._seeds.getrandbits(63), options)
        self.agents = list(self.possible_agents)
        self._styles = tuple(styles.values())  # by seat
        self._facts = {
            "width": game.width,
            "height": game.height,
            "names": self._by_agent([p.name for p in game.players]),
            "roles": self._by_agent([p.role.value for p in game.players]),
            "tasks": self._by_agent([tuple(p.tasks) for p in game.players]),
            "imposters": tuple(self.possible_agents[seat] for seat in game.imposters),
        }
        return self._observations(first=True), self._infos()

    def step(
        self, actions: dict[str, Any]
    ) -> tuple[
        dict[str, dict[str, Any]],
        dict[str, float],
        dict[str, bool],
        dict[str, bool],
        dict[str, dict[str, Any]],
    ]:
        """Plays the replies of those who must act; others' are ignored, a missing one counts as an empty reply.

        After the end there is nothing to play, and all five dicts come back empty.
        """
        game = self._started()
        if not self.agents:
            return {}, {}, {}, {}, {}
        game.clear()
        game.asks = False
        game.step += 1
        game.counts["decisions"] += len(game.due)
        own: dict[int, dict[str, Any]] = {}  # what infos say of each action
        if game.phase is Phase.TALK:
            seat = game.speakers[0]
            reply = _text(actions.get(self.possible_agents[seat]))
            heard = hear(reply, self.rules.message_words, self.rules.message_chars, self._styles[seat] is Style.COMPACT)
            own[seat] = {"entry": "message", "message": heard.text, "span": (heard.start, heard.end)}
            say(game, heard.text, heard.cut)
        else:
            voting = game.phase is Phase.VOTE
            chosen = {}
            for seat, legal in game.due.items():
                reply = _text(actions.get(self.possible_agents[seat]))
                chosen[seat], error = self._choose(seat, reply, legal, SKIP if voting else WAIT)
                own[seat] = {"entry": "vote" if voting else "move", "error": error}
                if error:
                    game.told[seat].append(Refused(chosen[seat].act))
            (count_votes if voting else play_moves)(game, chosen)
        over = game.phase is Phase.OVER
        rewards = [self.rules.shaping * n for n in game.earned]
        if over:
            points = [1.0 if p.role is game.winner else float(self.rules.loser_reward) for p in game.players]
            rewards = [reward + n for reward, n in zip(rewards, points, strict=True)]
        observations, infos = self._observations(), self._infos()
        for seat, entry in own.items():
            infos[self.possible_agents[seat]].update(entry)
        if over:
            outcome = {
                "winner": f"{game.winner}s" if game.winner else None,
                "how": game.ending.value if game.ending else "",
                "steps": game.step,
                "points": self._by_agent(points),
                "imposters": self._facts["imposters"],
                "alive": self._by_agent([p.alive for p in game.players]),
                **game.counts,
            }
            for info in infos.values():
                info["outcome"] = outcome
            self.agents = []
        truncated = game.ending is Ending.TIME
        return (
            observations,
            self._by_agent(rewards),
            dict.fromkeys(self.possible_agents, over and not truncated),
            dict.fromkeys(self.possible_agents, truncated),
            infos,
        )

    @property
    def facts(self) -> dict[str, Any]:
        """What is hidden from the players at the start, for analysts: layout, and by agent names, roles and tasks."""
        self._started()
        return self._facts

    @property
    def living(self) -> list[str]:
        """The agents who are alive now, for analysts: the dead stay in `agents`."""
        return [a for a, p in zip(self.possible_agents, self._started().players, strict=True) if p.alive]

    def privileged(self, agent: str) -> tuple[float, ...]:
        """What a privileged critic may know: for each of the seven names in order, 1 if it is an imposter's, else 0."""
        game = self._started()
        imposters = {game.players[seat].name for seat in game.imposters}
        return tuple(float(name in imposters) for name in NAMES)

    def state(self) -> np.ndarray:
        """The hidden state by seat, shape (players, 9): index of the name, imposter, alive, x, y, tasks left, cooldown,
        activity (0 ready, 1 walking, 2 at a task, 3 waiting), steps until that ends."""
        return np.array(
            [
                [NAMES.index(p.name), p.role is Role.IMPOSTER, p.alive, *p.room, len(p.tasks), p.cooldown,
                 p.activity.value * p.alive, p.timer * p.alive]
                for p in self._started().players
            ],
            np.float32,
        )  # fmt: skip

    def render(self) -> str | np.ndarray | None:
        """The whole state, hidden parts included, as text or picture; None (with a warning) without a render mode."""
        if self.render_mode is None:
            gymnasium.logger.warn("render() does nothing unless the environment is made with a render_mode.")
            return None
        return describe(self._started()) if self.render_mode == "ansi" else picture(self._started())

    def close(self) -> None:
        """Nothing to release."""

    def _started(self) -> Game:
        if self._game is None:
            raise RuntimeError("No game has been started: call reset() first.")
        return self._game

    def _by_agent(self, values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.possible_agents, values, strict=True))

    def _choose(self, seat: int, reply: str, legal: list[Action], otherwise: Action) -> tuple[Action, str]:
        """The option that a reply names, word for word; else what it counts as, and why."""
        words = OPTION[self._styles[seat]]
        reply = reply.strip()
        for action in legal:
            if words[action] == reply:
                return action, ""
        options = ", ".join(words[action] for action in legal)
        return otherwise, f"{clean(reply, 40)!r} is none of the options ({options}). It counts as {words[otherwise]}."

    def _observations(self, first: bool = False) -> dict[str, dict[str, Any]]:
        game = self._started()
        turn = int(TurnKind.SPEAK if game.phase is Phase.TALK else TurnKind.CHOOSE)  # a plain int: a member of Discrete
        observations = {}
        for seat, (agent, style) in enumerate(zip(self.possible_agents, self._styles, strict=True)):
            told = [write(event, style) for event in game.told[seat]]
            if first and style is Style.NATURAL:
                told.insert(1, explain(self.rules, game.start_room))
            due = seat in game.due
            observations[agent] = {
                "text": "".join(told),
                "turn": turn if due else int(TurnKind.WAIT),
                "options": tuple(OPTION[style][action] for action in game.due[seat]) if due else (),
            }
        return observations

    def _infos(self) -> dict[str, dict[str, Any]]:
        game = self._started()
        questions = self._questions() if game.asks else {}
        return {
            agent: {
                "role": player.role.value,
                "questions": questions.get(player.name, ()),
                "error": "",
                "message": "",
                "span": (0, 0),
                "entry": "",
            }
            for agent, player in zip(self.possible_agents, game.players, strict=True)
        }

    def _questions(self) -> dict[str, tuple[Question]]:
        """The belief question that is due now, by the name of who is asked."""
        game = self._started()
        living = game.living()
        guilty = [game.players[seat].name for seat in game.imposters if game.players[seat].alive]
        asked = {}
        for name in living:
            candidates: tuple[str, ...] = NAMES
            if self.rules.candidates == "living_others":
                if game.players[game.seat[name]].role is Role.IMPOSTER:
                    continue
                candidates = tuple(other for other in living if other != name)
            style = self._styles[game.seat[name]]
            written = dict(zip(NAMES, EXCHANGEABLE[style], strict=True))
            answer, *also = (written[other] for other in guilty)
            asked[name] = (Question(QUESTION[style], tuple(written[c] for c in candidates), answer, tuple(also)),)
        return asked


def _text(action: Any) -> str:
    """What is no text, nothing at all too, is an empty reply, which the rules refuse where one was asked for."""
    return action if isinstance(action, str) else ""
