"""The last line of a terminal: what the lowest rank does now, and for how long. Torch-free."""

from __future__ import annotations

import threading
import time

from hybridflow.observe import activity
from hybridflow.observe.console import duration
from hybridflow.observe.rank_log import can_show_live, show_live

_EVERY_S = 0.5


class LiveLine:
    """Keeps it, on a terminal; does nothing elsewhere."""

    def __init__(self) -> None:
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        if can_show_live():
            self._thread = threading.Thread(target=self._run, name="live line", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Remove the line. Closing twice is harmless."""
        if self._thread is not None:
            self._is_closed.set()
            self._thread.join()
            show_live("")
            self._thread = None

    def _run(self) -> None:
        while not self._is_closed.wait(_EVERY_S):
            began_s = activity.since_s()
            if began_s is not None:
                show_live(f"{activity.now()}, {duration(time.time() - began_s)}")
