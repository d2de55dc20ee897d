"""Grid Among Us: crewmates do tasks, imposters kill; a body that is found is talked over, and then there is a vote.

The game is that of Sarkar, Xia, Liu & Sadigh 2025 ("Training Language Models for Social Deduction with Multi-Agent
Reinforcement Learning"). Where the published rules leave a choice, this is what holds here:
- One call of `step` is one step of the clock: of moving, one message, or the vote. `max_steps` counts them all.
- A walker belongs to the room that it walks to, from the start: seen there as entering, in the old room as leaving.
  It can be killed from both, and notices kills in the new one. Where it is killed on its way, the room at the other end
  goes on seeing it on its way until it should have arrived.
- Within a step: everybody acts, walks and tasks end, kills take effect, then the game may be won, then a report opens
  the discussion. So a victim's last action counts, also if it is a report, and its body lies in its killer's room.
- Who wins is asked in this order: no imposter lives (crewmates), imposters are at least as many as living crewmates
  (imposters), living crewmates have no tasks left (crewmates). Nobody wins where `max_steps` steps are over then.
- Imposters know each other and can't kill each other. Several reports in one step: one is drawn, the others are void.
- Speakers take turns in one drawn order. A discussion ends all walks and tasks; other bodies stay where they are.
- The belief question goes to living crewmates, with all living others as candidates; or (`candidates="all_names"`, as
  published) to every living player, with all seven names. Its answer is an imposter, of several the first drawn that
  lives; the others alive are as true (`Question.also`).
- With `belief="vote"` the belief question is the vote itself, in its words and among all legal votes: between messages
  it is asked and not counted, and after the last message the vote is the question.
- A crewmate's vote answers the same question: where it is due `infos[agent]["truths"]` has the votes for an
  imposter.
"""

from __future__ import annotations

from envs.among_us.environment import AmongUs
from envs.among_us.state import PAYMENT
from envs.among_us.texts import COMPACT_TOKENS, EXCHANGEABLE
from envs.core import Style, aec

__all__ = ["COMPACT_TOKENS", "EXCHANGEABLE", "LATER", "PAYMENT", "TRUTHS", "AmongUs", "Style", "env", "parallel_env"]

LATER = {"belief": "question"}  # settings that came later: so set, the game is the one that it was without them
TRUTHS = True  # infos say which votes are true: those for an imposter
parallel_env = AmongUs  # the game as a native parallel environment
env = aec(parallel_env)  # the game in PettingZoo's AEC form
