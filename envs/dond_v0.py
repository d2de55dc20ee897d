"""Deal or No Deal: two players talk about how to share books, hats and balls, then each makes a private proposal.

The game is that of Lewis et al. 2017 ("Deal or No Deal? End-to-End Learning for Negotiation Dialogues"); reply syntax
and family of objectives are those of Liao, Tomlin & Klein 2024 ("Efficacy of Language Model Self-Play in Non-Zero-Sum
Games"). No data file is needed: all contexts that the rules allow are enumerated.
"""

from envs.core import Style, aec
from envs.dond.environment import AGENTS, DealOrNoDeal
from envs.dond.rules import FILES
from envs.dond.texts import COMPACT_TOKENS

__all__ = ["AGENTS", "COMPACT_TOKENS", "FILES", "LATER", "DealOrNoDeal", "Style", "env", "parallel_env"]

LATER = {"format": "free", "questions": "values"}
parallel_env = DealOrNoDeal  # the game as a native parallel environment
env = aec(parallel_env)  # the game in PettingZoo's AEC form
