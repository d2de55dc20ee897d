"""Progress of a loop, as it is shown."""


class Progress:
    """Receives a loop's progress; does nothing by default."""

    def stage(self, name: str, total: int) -> None: ...

    def advance(self, done: int = 1) -> None: ...
