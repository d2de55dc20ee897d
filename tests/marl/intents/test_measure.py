"""Messages that control is measured on."""

import numpy as np

from marl.intents.measure import controlled
from marl.intents.streams import Intent
from tests.marl.intents.test_annotation import ENV, view
from tests.marl.planners import negotiator


def test_messages_of_control_are_drawn_at_the_temperature_given() -> None:
    """Cold draws are the likeliest words, whatever the seed; warm ones are not."""
    spoken = view("i want the balls , you get the rest", "no", "i need the hat", "deal")
    intents = {spoken.index: [Intent((0, 1, 2), (1, 0, 1))] * 3}

    def messages(temperature: float, seed: int) -> list[str]:
        rng = np.random.default_rng(seed)
        how = {"swap": False, "most": 2, "context": 512, "rng": rng, "temperature": temperature, "top_p": 1.0}
        found = controlled(negotiator(), "both", [spoken], intents, ENV, **how)  # type: ignore[arg-type]
        return sorted(each.message for each in found)

    cold = [messages(0.0, seed) for seed in range(3)]
    assert len(cold[0]) == 2 and cold[0] == cold[1] == cold[2]
    assert cold[0] != messages(1.0, 0) != messages(1.0, 1)
