"""Connections between the watches of ranks: messages of JSON that nobody waits for. No torch."""

from __future__ import annotations

import json
import os
import socket
import weakref
from typing import Any

from hybridflow.parallel.handshake import SealedChannel

Message = dict[str, Any]

_LARGEST_BACKLOG_BYTES = 1 << 22
"""A peer that takes nothing for so long is as good as gone."""


class Link:
    """One end of a connection; no method of it blocks.

    Args:
        connection: From ``handshake.connect``, or let in by a gate.
        channel: This end of it.
        now_s: Time by the owner's clock.

    Attributes:
        is_open: The other end is there, as far as is known.
        heard_s: When something last came, by the owner's clock.
    """

    def __init__(self, connection: socket.socket, channel: SealedChannel, now_s: float = 0.0) -> None:
        connection.setblocking(False)
        self.is_open = True
        self.heard_s = now_s
        self._connection, self._channel = connection, channel
        self._outgoing = b""
        _links.add(self)

    def fileno(self) -> int:
        """Return the file number, for a selector."""
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Send a message, now or with a later ``flush``; an empty one says only that this rank lives."""
        self._outgoing += self._channel.seal(json.dumps(message).encode() if message else b"")
        self.flush()

    def flush(self) -> bool:
        """Send what the connection takes. Returns whether nothing is left."""
        while self._outgoing:
            try:
                sent = self._connection.send(self._outgoing)
            except (BlockingIOError, InterruptedError):
                if len(self._outgoing) <= _LARGEST_BACKLOG_BYTES:
                    break
                self.close()  # what is left of a message would be taken for the next one
                self._outgoing = b""
            except OSError:
                # What the other end said before it went can still be read; that tells of its end, too.
                self._outgoing = b""
            else:
                self._outgoing = self._outgoing[sent:]
        return not self._outgoing

    def receive(self, now_s: float) -> list[Message]:
        """Return what has arrived; afterwards ``is_open`` says whether more can arrive."""
        messages: list[bytes] = []
        while self.is_open:
            try:
                part = self._connection.recv(1 << 16)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                part = b""
            if not part:
                self.is_open = False
                break
            self.heard_s = now_s
            try:
                messages += self._channel.open(part)
            except ValueError:  # not what the other end sent: nothing more of it counts
                self.is_open = False
        return [json.loads(message) for message in messages if message]

    def close(self) -> None:
        """Close the connection; what was sent still arrives."""
        self.is_open = False
        self._connection.close()


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _close_forked() -> None:
    """Close the connections in a forked process: where it outlives its rank, the rank's end is still seen at once."""
    for link in _links:
        link.close()


os.register_at_fork(after_in_child=_close_forked)
