"""What holds for every test: no network, one thread, and no deadline that a busy machine could miss."""

import os

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", WANDB_MODE="offline", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: two test processes share two cores

from hypothesis import settings

settings.register_profile("project", deadline=None)
settings.load_profile("project")
