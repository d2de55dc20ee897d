"""Settings for all tests: no network, one thread, no waiting for the disk, and no hypothesis deadline, which a busy
machine would miss."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", WANDB_MODE="offline", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: two test processes share two cores

import pytest
from filelock import FileLock
from hypothesis import settings

settings.register_profile("project", deadline=None)
settings.load_profile("project")


def pytest_collection_finish() -> None:
    """Keeps what was imported out of every later search for garbage (it is most objects, and stays), and searches less
    often."""
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture(scope="session", autouse=True)
def no_flushing() -> Iterator[None]:
    """Files are not flushed to the disk: no test cuts the power, and each would wait. What is no open file is refused
    as before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: os.fstat(file) and None)
        yield


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder that the test processes of this session share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium for each file of tests that opens pages; skips where there is none."""
    from tests.chromium import chromium

    with chromium() as found:
        yield found


@pytest.fixture(scope="session")
def bases(session_folder: Path) -> Path:
    """Returns the folder of base models. Each is trained once for all tests."""
    return session_folder / "bases"


@pytest.fixture(scope="session")
def finished(bases: Path, session_folder: Path) -> Path:
    """Returns the folder of a finished run of `DOND`, which many tests read and none may change."""
    import marl
    from tests.composing import DOND

    with FileLock(session_folder / "finished.lock"):  # the first process makes it
        return marl.train(*DOND, f"runs={session_folder / 'finished'}", f"cache={bases}")


@pytest.fixture
def no_pages() -> Iterator[None]:
    """See `without_pages`."""
    from tests.runs import without_pages

    with without_pages():
        yield
