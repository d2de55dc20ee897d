"""Data with one value of another kind."""

import json
from collections.abc import Iterator
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, -1, 1.5, 10**12, 1e25, "x", "", [], {}, ["a"], [[1]], {"a": 1}, {"a": {"b": []}}, "../../x", "$\\frac$"
)  # fmt: skip


def spots(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in data; of a list those in its first, second and last item."""
    yield at
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        if not isinstance(data, list) or key in (0, 1, len(data) - 1):
            yield from spots(value, (*at, key))


def altered(data: Any, at: tuple[Any, ...], value: Any) -> Any:
    """The data with another value at this place; `...` takes the place away."""
    if not at:
        return {} if value is ... else value
    data = json.loads(json.dumps(data))
    part = data
    for key in at[:-1]:
        part = part[key]
    if value is ...:
        del part[at[-1]]
    else:
        part[at[-1]] = value
    return data
