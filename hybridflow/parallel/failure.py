"""When ranks fail: which error is the cause, which rank tells it, and no wait without an end."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from hybridflow.errors import DeadlineError

_GRACE_S = 2.0
"""So long a rank that lost contact with another keeps silent: that one, or the launcher, knows why."""

_STORE_ANSWERS_S = 5.0

_TELLER, _TOLD = "hybridflow/teller", "hybridflow/told"


@contextlib.contextmanager
def lost_contact(name: str, ranks: tuple[int, ...], deadline_s: float) -> Iterator[None]:
    """Turn what torch raises when a peer is gone or silent into a DeadlineError that says what was being done.

    Args:
        name: What was being done.
        ranks: The ranks that were doing it.
        deadline_s: How long a silent peer is waited for, in seconds.
    """
    try:
        yield
    except RuntimeError as error:
        # Gloo has no error class of its own; its name stands in each of its messages.
        if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
            raise
        reason = re.sub(r"^\[[^]]*\] *", "", str(error).splitlines()[0]).split(". ")[0]
        raise DeadlineError(
            f"{name}: lost contact with some of ranks {list(ranks)} (deadline {deadline_s:g} s); look for a rank that "
            f"failed earlier, or raise cluster.deadline_s if one is only slow: {reason}"
        ) from error


def tell_once(error: Exception, tell: Callable[[], None], store: dist.Store | None, rank: int) -> None:
    """Print the error of a failed job on one rank: the first that knows a cause.

    Uses no collective, which could wait for ever after a failure. A rank whose error is only that others do not answer
    lets them, or the launcher that sees them die, speak first. All ranks return once the error has been told, so that a
    launcher which ends every rank when one exits does not end the one that speaks.

    Args:
        error: What this rank failed with.
        tell: Prints it.
        store: Where the ranks meet, kept by rank 0 or by the launcher; None: this rank never got there.
        rank: This rank.
    """
    if store is None:
        tell()
        return
    if isinstance(error, DeadlineError):
        time.sleep(_GRACE_S)
    try:
        teller = _answer(lambda: store.compare_set(_TELLER, "", str(rank)).decode())
    except TimeoutError:
        # The store's keeper hangs, so it cannot choose; the rank after it speaks.
        if rank == 1:
            tell()
        return
    except RuntimeError:
        # The keeper is gone: it has told its error, or the launcher has told its death.
        return
    if teller == str(rank):
        tell()
    with contextlib.suppress(TimeoutError, RuntimeError):
        _answer((lambda: store.set(_TOLD, "1")) if teller == str(rank) else (lambda: store.get(_TOLD)))


def _answer(ask: Callable[[], Any]) -> Any:
    """Return the store's answer, or raise TimeoutError: some of its calls wait for ever when its keeper hangs.

    Raises:
        TimeoutError: Nothing in time.
        RuntimeError: The connection is closed.
    """
    answer: list[Any] = []

    def run() -> None:
        try:
            answer.append(ask())
        except (RuntimeError, ValueError) as error:
            answer.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_STORE_ANSWERS_S)
    if not answer:
        raise TimeoutError
    if isinstance(answer[0], Exception):
        raise RuntimeError(str(answer[0]))
    return answer[0]
