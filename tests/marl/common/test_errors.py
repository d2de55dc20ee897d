"""Tests of checks of settings that dataclasses share."""

from types import SimpleNamespace

import pytest

from marl.common.errors import UserError, check_choices, check_counts, check_range, prefixed


@pytest.mark.parametrize(
    ("interval", "good", "bad", "said"),
    [
        ("[0, 1]", (0, 0.5, 1), (-1e-9, 1.1, float("nan")), "must be from 0 to 1$"),
        ("(0, 1)", (1e-9, 0.5), (0, 1, float("nan")), "must be between 0 and 1$"),
        ("[0, 1)", (0, 0.99), (-1, 1), "must be at least 0 and below 1$"),
        ("(0, 1]", (0.01, 1), (0, 2), "must be above 0 and at most 1$"),
        ("[0, inf)", (0, 1e9), (-1, float("nan")), "must be at least 0$"),
        ("(0, inf)", (1e-9,), (0, -1), "must be above 0$"),
        ("(0, inf)", (1,), (float("inf"),), "must be finite$"),
        ("(0, inf]", (1, float("inf")), (0, None), "must be above 0$"),
        ("[0, 1]", (0,), (float("inf"), None), "must be from 0 to 1$"),
        ("[0, inf); 0 for none", (0,), (-1,), "must be at least 0; 0 for none$"),
        ("[0, 1], or null", (0, None), (2,), "must be from 0 to 1, or null$"),
    ],
)
def test_ranges(interval: str, good: tuple[float, ...], bad: tuple[float, ...], said: str) -> None:
    for value in good:
        check_range(SimpleNamespace(share=value), "base", interval, "share")
    for value in bad:
        with pytest.raises(UserError, match=rf"^base\.share={value}: {said}"):
            check_range(SimpleNamespace(share=value), "base", interval, "share")


def test_choices_counts_and_prefixes() -> None:
    given = SimpleNamespace(kind="b", few=1, none=0, half=0.5)
    check_choices(given, "base", kind=("a", "b"))
    check_counts(given, ["few"])
    with pytest.raises(UserError, match=r"^base\.kind=b: must be one of a, c$"):
        check_choices(given, "base", kind=("a", "c"))
    with pytest.raises(UserError, match=r"^none=0: must be a whole number, at least 1$"):
        check_counts(given, ["few", "none"])
    with pytest.raises(UserError, match=r"^base\.half=0.5: must be a whole number, at least 0$"):
        check_counts(given, ["none", "half"], least=0, where="base")
    with pytest.raises(UserError, match=r"^here: no$"), prefixed("here: "):
        raise UserError("no")
    with pytest.raises(UserError, match=r"^here: 3$"), prefixed("here: ", ValueError):
        raise ValueError("3")
    with pytest.raises(KeyError), prefixed("here: "):
        raise KeyError("a bug stays one")
