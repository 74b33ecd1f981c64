"""What a call complains of."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hybridflow.errors import HybridflowError

Kind = type[Exception] | tuple[type[Exception], ...]


def complains(call: Callable[[], object], words: Iterable[str], kind: Kind = HybridflowError) -> None:
    """Check that a call raises an error whose message has all the words."""
    message = complaint(call, kind)
    assert message and all(each in message for each in words), (message, words)


def complaint(call: Callable[[], object], kind: Kind = HybridflowError) -> str:
    """The message of the error that a call raises; nothing where it raises none."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""
