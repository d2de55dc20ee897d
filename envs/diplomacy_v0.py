"""Diplomacy: powers order their units at the same time, support one another or don't, and may talk in private before.

The rules are those of the board game, adjudicated by the PyPI package `diplomacy` (an extra, AGPL-3.0), on its maps:
`pure` (seven provinces, all next to one another, one army each), two powers of the standard map, and the whole of it.
What holds here besides: a game ends after `years` years, and scores are squared centres over their sum (or 1 for a
solo). Orders are chosen unit by unit; one that can't be is a hold. See `envs/diplomacy/environment.py`.
"""

from __future__ import annotations

from envs.core import Style, aec
from envs.diplomacy.environment import Diplomacy
from envs.diplomacy.texts import COMPACT_TOKENS

__all__ = ["COMPACT_TOKENS", "Diplomacy", "Style", "env", "parallel_env"]

parallel_env = Diplomacy  # the game as a native parallel environment
env = aec(parallel_env)  # the game in PettingZoo's AEC form
