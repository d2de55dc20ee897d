"""Says which players' filters left them without words."""

from experiments.launch.terminal import say
from marl.agents.base import Agent
from marl.agents.dubbed import Alias
from marl.intents.talker import Talker


def say_refusals(*players: Agent) -> None:
    """Says once of each player whose filters left it without a message for most of its replies."""
    own = [player.agent if isinstance(player, Alias) else player for player in players]
    for line in dict.fromkeys(player.refusals() for player in own if isinstance(player, Talker)):
        if line:
            say(line)
