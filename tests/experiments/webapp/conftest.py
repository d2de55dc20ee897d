"""A page that notes what must not happen."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.webapp.browsing import DESK, visiting


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def opened(browser: Any, address: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page of a new person, by default at a desk."""
    with visiting(browser, address, getattr(request, "param", DESK)) as page:
        yield page
