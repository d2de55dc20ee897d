"""A player that says what it is told to."""

from collections.abc import Sequence


class Says:
    """Says these replies in turn, the last one ever after; reports a body where it can, else takes the last option."""

    def __init__(self, *replies: str) -> None:
        self.replies = list(replies)

    def observe(self, text: str) -> None: ...

    def reply(self, text: str, options: Sequence[str] = ()) -> str:
        if options:
            return ([option for option in options if option.startswith("report")] or options)[-1]
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
