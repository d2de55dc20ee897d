"""The smallest game in which talk can help (one hidden fact, one speaker, one listener) and a model to play it.

The game keeps the contract of `envs/`. It stands here because it is made for tests: every kind of token occurs in it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envs.core import END, Question, Step, TextGame, TurnKind, View, clean
from marl.algorithms.training import Training
from marl.learning.update import Learner
from marl.losses import Loss
from marl.model.policy import Policy
from marl.model.words import word_policy
from marl.rewards.game import GameReward
from marl.rollout.cast import RoleConfig
from marl.rollout.seeds import Seeds

SEATS = ("player_0", "player_1")
FACTS = ("red", "blue")
ASK = "which?"
SYLLABLES = tuple(a + b for a in "bdgk" for b in "aiou")


class Hint(TextGame):
    """The speaker reads a colour and says one thing; the listener hears it and names a colour. Both get 1 if it fits.

    Seats and colour are drawn. The listener is asked for the colour before and after the message, and chooses right
    after the second question. `reset(options={"fact": 0})` gives the colour, `{"speaker": 0}` the speaker's seat.
    """

    metadata = {"name": "hint", "render_modes": []}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__(SEATS, max_text=40, max_reply=20)

    def begin(self, rng: np.random.Generator, options: Mapping[str, Any]) -> dict[str, View]:
        drawn = {"fact": int(rng.integers(2)), "speaker": int(rng.integers(2)), **options}
        self._fact = FACTS[drawn["fact"]]
        self._speaker, self._listener = SEATS[drawn["speaker"]], SEATS[1 - drawn["speaker"]]
        self._said = False
        return {
            self._speaker: View("speaker", f"{self._fact} say", TurnKind.SPEAK),
            self._listener: View("listener", "listen", questions=self._questions),
        }

    def play(self, actions: Mapping[str, Any]) -> Step:
        speaker, listener = View("speaker"), View("listener")
        views = {self._speaker: speaker, self._listener: listener}
        if not self._said:
            self._said = True
            message = clean(actions[self._speaker].split(END)[0], 20)
            speaker.message, speaker.span, speaker.entry = message, (0, len(message)), "message"
            listener.text, listener.questions = f"heard {message}", self._questions
            listener.turn, listener.options = TurnKind.CHOOSE, FACTS
            return Step(views, dict.fromkeys(SEATS, 0.0))
        right = actions[self._listener] == self._fact
        listener.entry = "choice"
        how = f"the {'right' if right else 'wrong'} colour is named"
        return Step(views, dict.fromkeys(SEATS, float(right)), {"how": how, "winner": None, "right": right})

    @property
    def _questions(self) -> tuple[Question, ...]:
        return (Question(ASK, FACTS, self._fact),)

    @property
    def facts(self) -> dict[str, Any]:
        roles = {self._speaker: "speaker", self._listener: "listener"}
        return {"fact": self._fact, "speaker": self._speaker, "roles": roles}

    def privileged(self, agent: str) -> tuple[float, ...]:
        """The fact and whether this seat speaks."""
        return (float(FACTS.index(self._fact)), float(agent == self._speaker))


def training(learners: Sequence[Learner], losses: Mapping[str, Loss], **given: Any) -> Training:
    """Training in games of hints, all seats the learners' own, for the game's reward; `given` changes any of it."""
    settings: dict[str, Any] = {
        "game": "hint", "make_env": Hint, "cast": {"speaker": RoleConfig(), "listener": RoleConfig()}, "frozen": {},
        "rewards": {"game": GameReward(scale=1.0)}, "seeds": Seeds.of(0), "after": lambda *found: None,
    }  # fmt: skip
    return Training(learners=learners, losses=losses, **{**settings, **given})


def hint_policy(seed: int, privileged_size: int = 0) -> Policy:
    """About 80,000 parameters and 30 words, 16 of them without any meaning."""
    return word_policy((*FACTS, ASK, "say", "listen", "heard", *SYLLABLES), seed, privileged_size=privileged_size)
