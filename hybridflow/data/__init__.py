"""What comes in: tokenizers, prompts and their order, made-up problems."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Return ``DataLoader`` or ``DataProvider`` of the Python API, so that programs may import them from here too."""
    import hybridflow

    if name not in ("DataLoader", "DataProvider"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(hybridflow, name)
