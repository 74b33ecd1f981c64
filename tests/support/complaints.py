"""What a call complains of, for ranks that tell the test."""

from __future__ import annotations

from collections.abc import Callable

from hybridflow.errors import HybridflowError


def complaint(call: Callable[[], object], kind: type[Exception] | tuple[type[Exception], ...] = HybridflowError) -> str:
    """The message of the error that a call raises; nothing where it raises none."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""
