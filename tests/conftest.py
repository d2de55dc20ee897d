"""What holds for every test: no network, one thread, and no deadline that a busy machine could miss."""

import os

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", WANDB_MODE="offline", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: two test processes share two cores

import pytest
from hypothesis import settings

from marl.kernels import cpu as kernels

settings.register_profile("project", deadline=None)
settings.load_profile("project")


@pytest.fixture
def torchs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no attention was compiled."""
    monkeypatch.setattr(kernels, "best", lambda: "")


@pytest.fixture(params=["compiled", "torch's"])
def either_attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways in which slots are read on a CPU."""
    if request.param == "torch's":
        monkeypatch.setattr(kernels, "best", lambda: "")
    elif not kernels.best():
        pytest.skip("nothing was compiled for this processor (is there a compiler?)")
    return str(request.param)
