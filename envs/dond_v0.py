"""Deal or No Deal: two players talk about how to share books, hats and balls, then each makes a private proposal.

The rules come first and are pure: contexts, allocations, who wins what, what a listener can know before any talk, and
how a reply is read. The PettingZoo environment stands at the end. The game is that of Lewis et al. 2017 ("Deal or No
Deal? End-to-End Learning for Negotiation Dialogues"); reply syntax and family of objectives are those of Liao, Tomlin &
Klein 2024 ("Efficacy of Language Model Self-Play in Non-Zero-Sum Games"). No data file is needed: all contexts that
the rules allow are enumerated here. Left out: players, models, the human dialogues.
"""

from __future__ import annotations

from envs.core import aec
from envs.dond.environment import DealOrNoDeal

parallel_env = DealOrNoDeal  # the game as a native parallel environment
env = aec(parallel_env)  # the game in PettingZoo's AEC form
