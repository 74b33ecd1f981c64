"""What a call complains of."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from pathlib import Path

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


def complains_apart(
    call: Callable[[], object], words: Iterable[str], *, max_bytes: int = 256 << 20, kind: Kind = HybridflowError
) -> None:
    """Check the same in a forked process, which is killed if it waits, and whose memory may grow by so much."""

    def check() -> None:
        Path("/proc/self/clear_refs").write_text("5")
        before = status_bytes("VmRSS")
        complains(call, words, kind)
        peak = status_bytes("VmHWM") - before
        assert peak <= max_bytes, f"took {peak} bytes of memory, more than {max_bytes}"

    process = multiprocessing.get_context("fork").Process(target=check)
    process.start()
    process.join(60)
    is_waiting = process.is_alive()
    process.kill()
    process.join()
    assert not is_waiting, "did not end within 60 s"
    assert process.exitcode == 0, "see above"


def status_bytes(key: str) -> int:
    """Return a size that the kernel tells of this process, such as ``VmRSS``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))
