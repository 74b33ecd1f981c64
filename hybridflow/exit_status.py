"""With which status a command ends, so that a batch script or a pipeline can tell what to do."""

from __future__ import annotations

import errno
import os

from hybridflow import errors
from hybridflow.errors import CheckpointError, DeadlineError, HybridflowError, StopError, WriteError

DONE = 0
FAILURE = 1
"""A bug, with a traceback; a rank that was lost; a wait that passed its deadline; a file server that is away.

Beginning again may help.
"""

REQUEST = 2
"""Arguments that contradict each other, a family or a feature that is not known here."""

SOURCE = 3
"""Damaged, incomplete or hostile; or it cannot be read."""

TARGET = 4
"""Cannot be written, or is there already."""

DIFFERENT = 5
"""Two checkpoints that were compared are not equal."""

REQUEUE = 75
"""All is saved, or nothing was begun, and there is more to do: begin the job again. ``EX_TEMPFAIL``, sysexits.h."""

_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""What only writing meets: no room, a quota, a limit of a file's size (``ulimit -f``), a read-only file system."""

_PASSING = (
    errno.EIO,
    errno.ESTALE,
    errno.ENOTCONN,
    errno.ESHUTDOWN,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ECONNRESET,
    errno.EREMOTEIO,
)
"""A file server was started again, or has cut off this node; or a server did not answer. No file is at fault."""

_MOST_CAUSES = 32
"""Errors may name each other as causes, in a circle."""


class Ended(BaseException):
    """A signal asks the process to end.

    Attributes:
        signal: Its number.
    """

    def __init__(self, signal: int) -> None:
        super().__init__(f"ended by signal {signal}")
        self.signal = signal


def exit_status(error: BaseException) -> int:
    """Return the exit status that stands for an error."""
    if isinstance(error, Ended):
        return 128 + error.signal
    if isinstance(error, StopError):
        return REQUEUE
    if passing_number(error) is not None:
        return FAILURE
    if isinstance(error, DeadlineError):
        # Who waited in vain may have been told what the other met.
        cause = error.__cause__
        if cause is not None and (isinstance(cause, HybridflowError) or refuses_writes(cause)):
            return exit_status(cause)
        return FAILURE
    if isinstance(error, WriteError) or refuses_writes(error):
        return TARGET
    # What is written is a WriteError when the file system refuses; any other refusal is of what is read.
    if isinstance(error, (CheckpointError, OSError)):
        return SOURCE
    return REQUEST if isinstance(error, HybridflowError) else FAILURE


def system_status(error: OSError) -> int:
    """Return the status for what a file system says while a job runs: the job may do better on another node.

    It will not where the user has no right to a file.
    """
    if isinstance(error, PermissionError):
        return REQUEST
    return TARGET if refuses_writes(error) else FAILURE


def refuses_writes(error: BaseException) -> bool:
    """Return whether this is what a file system says that takes nothing more."""
    return isinstance(error, OSError) and error.errno in _REFUSALS


def passing_number(error: BaseException) -> int | None:
    """Return the errno of a failure that may pass, where that is the error or one of its causes; else None."""
    cause: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if isinstance(cause, OSError) and cause.errno in _PASSING:
            return cause.errno
        cause = cause and (cause.__cause__ or cause.__context__)
    return None


def pack_error(error: HybridflowError | OSError) -> list[str | int | None]:
    """Return JSON values of which ``unpack_error`` makes, on another rank, an error with the same exit status."""
    kind = next((each.__name__ for each in type(error).__mro__ if each.__module__ == errors.__name__), "")
    return [kind, str(error), error.errno if isinstance(error, OSError) else passing_number(error)]


def unpack_error(kind: str, text: str, number: int | None) -> HybridflowError | OSError:
    """Return the error that ``pack_error`` has packed.

    Args:
        kind: Of the three packed values the first.
        text: The second.
        number: The third.
    """
    if kind:
        told: HybridflowError = getattr(errors, kind)(text)
        if number is not None:
            told.__cause__ = OSError(number, os.strerror(number))
        return told
    if number is None:
        return OSError(text)
    return OSError(number, text.removeprefix(f"[Errno {number}] "))
