"""Takes up games as the web page does: a new player reads the replies so far, and gives the next one."""

from collections.abc import Callable

from envs.core import TurnKind
from marl.agents.base import Key, Reply, Request
from marl.agents.model import ModelAgent


def assert_goes_on(make: Callable[[], ModelAgent], play: Callable[[ModelAgent], object], most: int = 12) -> None:
    """Plays with a player, and compares each of its first replies with that of a new one that takes up the game."""
    player, asked, given = make(), dict[Key, list[Request]](), dict[Key, list[Reply]]()
    act = player.act

    def recorded(requests: list[Request]) -> list[Reply]:
        replies = act(requests)
        for request in requests:
            asked.setdefault(request.key, []).append(request)
        for reply in replies:
            given.setdefault(reply.key, []).append(reply)
        return replies

    player.act = recorded  # type: ignore[assignment, method-assign]
    play(player)
    key = max(given, key=lambda each: len(given[each]))
    for done in range(min(len(given[key]), most)):
        again, left = make(), iter(given[key][:done])
        for request in asked[key]:
            if request.turn == TurnKind.WAIT:
                again.act([request])
            elif (reply := next(left, None)) is not None:
                assert again.repeat(request, reply.ids) == reply.start
            else:
                (new,) = again.act([request])
                old = given[key][done]
                assert (new.ids, new.start, new.thoughts) == (old.ids, old.start, old.thoughts), done
                break
