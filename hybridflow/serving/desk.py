"""Between the thread that speaks with clients and the one that generates: what goes in, and what comes of it. No torch.

One lock, held for moments.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from hybridflow.serving.api import ApiError, Ask, Sample
from hybridflow.serving.scores import Scored

_MOST_IMAGE_BYTES = 1 << 28
"""Of all open requests, as addresses have them."""


class Event(NamedTuple):
    """Something has come of a request.

    Attributes:
        place: Which of its samples.
        new: What was generated of it since the last event; empty when it has ended.
        sample: It, when it has ended.
    """

    place: int
    new: Scored
    sample: Sample | None


class Ticket(NamedTuple):
    """A request that has been taken up.

    Attributes:
        ids: Of its samples, prompt by prompt.
        tell: Is told what comes of them, or why nothing more comes, by the thread that generates.
        image_bytes: What its images take.
    """

    ids: list[int]
    tell: Callable[[Event | ApiError], None]
    image_bytes: int


class Desk:
    """Where requests are handed in and samples handed out.

    Args:
        num_replicas: Among which the work is dealt: each prompt goes to the one with the fewest samples.
        max_waiting: Most samples taken up at a time.
    """

    def __init__(self, num_replicas: int, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._condition = threading.Condition()
        self._commands: list[dict[str, Any]] = []
        self._waiting: dict[int, tuple[Ticket, int, int]] = {}
        self._loads = [0] * num_replicas
        self._ids, self._prompt_indices = itertools.count(), itertools.count()
        self._num_open = 0
        self._image_bytes = 0
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Return whether requests are refused, since the server is about to end."""
        return self._is_closed

    @property
    def num_running(self) -> int:
        """Return the number of samples that are taken up and have not ended."""
        with self._condition:
            return len(self._waiting)

    def submit(self, ask: Ask, tell: Callable[[Event | ApiError], None]) -> Ticket:
        """Take up a request, and tell what comes of it; each must be followed by ``leave``.

        Raises:
            ApiError: There are too many, or the server ends.
        """
        number = len(ask.prompts) * ask.count
        if number > self._max_waiting:
            raise ApiError(400, f"{number} samples; this server takes at most {self._max_waiting} at a time")
        with self._condition:
            if self._is_closed:
                raise ApiError(503, "the server is about to end")
            if len(self._waiting) + number > self._max_waiting:
                raise ApiError(429, f"{len(self._waiting)} samples are being generated already; try again later")
            image_bytes = sum(len(each.source) for each in ask.images)
            if image_bytes and self._image_bytes + image_bytes > _MOST_IMAGE_BYTES:
                raise ApiError(429, f"open requests have {self._image_bytes} bytes of images already; try again later")
            self._image_bytes += image_bytes
            ticket = Ticket([next(self._ids) for _ in range(number)], tell, image_bytes)
            for place, prompt in enumerate(ask.prompts):
                replica = min(range(len(self._loads)), key=lambda each: self._loads[each])
                ids = ticket.ids[place * ask.count : (place + 1) * ask.count]
                self._commands.append(
                    {
                        "do": "add",
                        "ids": ids,
                        "replica": replica,
                        "prompt": prompt,
                        "images": [list(each) for each in ask.images],
                        "image_row": ask.image_row if ask.images else None,
                        "params": ask.params,
                        # With a seed of its own the same request gives the same answer.
                        "prompt_index": place if "seed" in ask.params else next(self._prompt_indices),
                        "is_streamed": ask.is_streamed,
                    }
                )
                self._loads[replica] += len(ids)
                self._waiting |= {each: (ticket, place * ask.count + index, replica) for index, each in enumerate(ids)}
            self._num_open += 1
            self._condition.notify_all()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Drop a ticket whose client has its answer or is gone; cancel what still runs for it."""
        with self._condition:
            running = [each for each in ticket.ids if each in self._waiting]
            if running:
                self._commands.append({"do": "cancel", "ids": running})
                for each in running:
                    self._forget(each)
            self._num_open -= 1
            self._image_bytes -= ticket.image_bytes
            self._condition.notify_all()

    def take(self, wait_s: float) -> list[dict[str, Any]]:
        """Return new messages for the thread that generates; wait up to ``wait_s`` if nothing runs."""
        with self._condition:
            if not self._commands and not self._waiting:
                self._condition.wait(wait_s)
            commands, self._commands = self._commands, []
            return commands

    def deliver(self, sample_id: int, new: Scored, sample: Sample | None) -> None:
        """Pass on the output of a sample; ignore it if nobody waits for it any more."""
        with self._condition:
            if sample_id not in self._waiting:
                return
            ticket, index, _ = self._waiting[sample_id]
            if sample is not None:
                self._forget(sample_id)
            ticket.tell(Event(index, new, sample))

    def close(self) -> None:
        """Refuse requests from now on."""
        with self._condition:
            self._is_closed = True

    def give_up(self, within_s: float) -> None:
        """Fail all open requests, and wait up to ``within_s`` for the clients to be told."""
        with self._condition:
            self._is_closed = True
            for ticket in {id(entry[0]): entry[0] for entry in self._waiting.values()}.values():
                ticket.tell(ApiError(503, "the server ends"))
            end_s = time.monotonic() + within_s
            while self._num_open and time.monotonic() < end_s:
                self._condition.wait(max(0.0, end_s - time.monotonic()))

    def _forget(self, sample_id: int) -> None:
        _, _, replica = self._waiting.pop(sample_id)
        self._loads[replica] -= 1
