"""The loop: recipes as dataflow graphs, where everything is placed, and the trainer that runs them."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Return a trainer of the Python API, so that programs may import ``RLTrainer`` from here too."""
    import hybridflow

    if not name.endswith("Trainer") or name not in hybridflow.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(hybridflow, name)
