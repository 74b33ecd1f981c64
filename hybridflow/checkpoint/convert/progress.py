"""How far a conversion is, watched by a thread of its own: progress with ETA, peak memory, the other ranks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from hybridflow.checkpoint.convert.ranks import Ranks

_SAMPLE_S = 0.05
_LOOK_S = 1.0


class Progress(NamedTuple):
    """How far a conversion is, all ranks together.

    Attributes:
        parts: Tensors of files that are written.
        num_parts: Number of all files.
        done_bytes: Written, those that a restart found included.
        total_bytes: Bytes of all files.
        found_bytes: What a restart found.
        seconds: Seconds since the beginning.
    """

    parts: int
    num_parts: int
    done_bytes: int
    total_bytes: int
    found_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """Return how fast this attempt writes."""
        return (self.done_bytes - self.found_bytes) / max(self.seconds, 1e-9)

    @property
    def left_s(self) -> float | None:
        """Return the remaining time at this speed; None before anything is written."""
        return (self.total_bytes - self.done_bytes) / self.bytes_per_s if self.bytes_per_s > 0 else None


class Monitor:
    """Counts what this rank has written, and watches from beginning to end.

    Attributes:
        peak_rss_anon_bytes: Most anonymous memory that the process was seen to have.

    Args:
        ranks: The other ranks.
        start: Before anything was written.
        show: Called about once a second, from another thread.
    """

    def __init__(self, ranks: Ranks, start: Progress, show: Callable[[Progress], None]) -> None:
        self.peak_rss_anon_bytes = rss_anon_bytes()
        self._ranks, self._start, self._show = ranks, start, show
        self._parts = self._bytes = 0
        self._began_s = time.monotonic()
        self._failure: Exception | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def count(self, num_bytes: int) -> None:
        """Count a written part."""
        self._parts += 1
        self._bytes += num_bytes

    def check(self) -> None:
        """Raise what was seen to end this rank.

        Raises:
            PeerError: Another rank failed.
            DeadlineError: One is silent.
        """
        if self._failure is not None:
            raise self._failure

    def own(self) -> dict[str, int]:
        """Return what this rank has done, for the others."""
        return {"parts": self._parts, "bytes": self._bytes, "peak": self.peak_rss_anon_bytes}

    def progress(self, others: dict[int, dict[str, int]]) -> Progress:
        """Return how far all ranks are, as far as is known."""
        every = [*others.values(), self.own()]
        return self._start._replace(
            parts=self._start.parts + sum(each["parts"] for each in every),
            done_bytes=self._start.done_bytes + sum(each["bytes"] for each in every),
            seconds=time.monotonic() - self._began_s,
        )

    def stop(self) -> None:
        """End the thread."""
        self._ending.set()
        self._thread.join()

    def _watch(self) -> None:
        looked_s = time.monotonic()
        while not self._ending.wait(_SAMPLE_S):
            self.peak_rss_anon_bytes = max(self.peak_rss_anon_bytes, rss_anon_bytes())
            if time.monotonic() - looked_s >= _LOOK_S and self._failure is None:
                looked_s = time.monotonic()
                try:
                    self._look()
                except Exception as error:
                    # The main thread raises it.
                    self._failure = error

    def _look(self) -> None:
        others = self._ranks.look_after()
        progress = self.progress(others)
        own = self.own()
        if self._ranks.rank == 0:
            # Rank 0 waits for the others in the end; it stands still only where they all do.
            own = {"parts": progress.parts, "bytes": progress.done_bytes, "peak": own["peak"]}
        # A full disk is for what writes tensors to report.
        with contextlib.suppress(OSError):
            self._ranks.tell(f"progress-{self._ranks.rank}", own)
        self._show(progress)


def rss_anon_bytes() -> int:
    """Return the anonymous memory of this process, without mapped files."""
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0
