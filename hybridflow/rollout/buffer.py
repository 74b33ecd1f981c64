"""Batches that were generated before their turn to be learned from has come. Light at import."""

from __future__ import annotations

from collections import deque
from typing import Any

from hybridflow.errors import DataError


class AsyncRolloutBuffer:
    """Whole batches in the order in which they are generated: one is learned from, the others wait.

    With two buffers, double buffering: one batch is generated while the one before it is learned from.

    Args:
        max_buffers: Most batches that there are at one time, the one that is learned from included; at least 2.

    Raises:
        DataError: ``max_buffers`` is below 2.
    """

    def __init__(self, max_buffers: int = 2) -> None:
        if max_buffers < 2:
            raise DataError(
                f"max_buffers={max_buffers}: one batch is learned from while another is made; give 2 or more"
            )
        self.max_buffers = max_buffers
        self._current: Any = None
        self._waiting: deque[Any] = deque()
        self._handed_out: list[Any] | None = None

    def __len__(self) -> int:
        """Return the number of batches that wait."""
        return len(self._waiting)

    def current(self) -> Any:
        """Return the batch that is learned from, or None before the first ``flip``."""
        return self._current

    def next(self) -> Any:
        """Return the batch that the next ``flip`` makes current; if none waits, a new list for the caller to fill."""
        if not self._waiting:
            self._handed_out = []
            self._waiting.append(self._handed_out)
        return self._waiting[0]

    def put(self, batch: Any) -> None:
        """Add a batch behind those that wait. It replaces a list of ``next`` that is still empty.

        Raises:
            DataError: All buffers are full.
        """
        if self._waiting and self._waiting[0] is self._handed_out and not self._handed_out:
            self._waiting.popleft()
        if len(self._waiting) + 1 >= self.max_buffers:
            raise DataError(
                f"{len(self._waiting)} batches wait beside the one that is learned from, and there are "
                f"{self.max_buffers} buffers; flip before another is put"
            )
        self._waiting.append(batch)

    def flip(self) -> Any:
        """Drop the current batch, and make the next one current.

        Returns:
            It.

        Raises:
            DataError: None waits.
        """
        if not self._waiting:
            raise DataError("no batch waits to be learned from; put one before the flip")
        self._current = self._waiting.popleft()
        return self._current
