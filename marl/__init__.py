"""Training language models on language games with listening losses and speaking rewards.

The Python interface is marl/api.py: `marl.load`, `marl.play`, `marl.train` and what looks at an episode. It is imported
when one of these names is first used, so that `import marl` stays cheap.
"""

import importlib
from typing import Any

__all__ = [
    "ModelPlayer",
    "PlayedEpisode",
    "Players",
    "beliefs",
    "credit",
    "influence",
    "load",
    "merge",
    "play",
    "train",
    "word_policy",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module marl has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module("marl.model.words" if name == "word_policy" else "marl.api"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
