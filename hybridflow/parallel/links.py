"""Connections between the watches of ranks: lines of JSON that nobody waits for. No torch."""

from __future__ import annotations

import json
import socket
from typing import Any

Message = dict[str, Any]

_LARGEST_BACKLOG_BYTES = 1 << 22
"""A peer that takes nothing for so long is as good as gone."""


class Link:
    """One end of a connection; no method of it blocks.

    Attributes:
        is_open: The other end is there, as far as is known.
        heard_s: When something last came, by the owner's clock.
    """

    def __init__(self, connection: socket.socket, now_s: float = 0.0) -> None:
        connection.setblocking(False)
        self.is_open = True
        self.heard_s = now_s
        self._connection = connection
        self._incoming = b""
        self._outgoing = b""

    def fileno(self) -> int:
        """Return the file number, for a selector."""
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Send a message, now or with a later ``flush``; an empty one says only that this rank lives."""
        self._outgoing += (json.dumps(message) if message else "").encode() + b"\n"
        self.flush()

    def flush(self) -> bool:
        """Send what the connection takes. Returns whether nothing is left."""
        while self._outgoing:
            try:
                sent = self._connection.send(self._outgoing)
            except (BlockingIOError, InterruptedError):
                if len(self._outgoing) <= _LARGEST_BACKLOG_BYTES:
                    break
                self._outgoing = b""
            except OSError:
                # What the other end said before it went can still be read; that tells of its end, too.
                self._outgoing = b""
            else:
                self._outgoing = self._outgoing[sent:]
        return not self._outgoing

    def receive(self, now_s: float) -> list[Message]:
        """Return what has arrived; afterwards ``is_open`` says whether more can arrive.

        Raises:
            ValueError: The other end speaks something else.
        """
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
            self._incoming += part
            if len(self._incoming) > _LARGEST_BACKLOG_BYTES:
                raise ValueError("a line without an end")
        *lines, self._incoming = self._incoming.split(b"\n")
        messages = [json.loads(line) for line in lines if line]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("not an object of JSON")
        return messages

    def close(self) -> None:
        """Close the connection; what was sent still arrives."""
        self.is_open = False
        self._connection.close()


def listen(address: str, num_links: int) -> socket.socket:
    """Listen at a free port: on this machine alone where ``address`` is local, else on every interface.

    Raises:
        OSError: There is none.
    """
    if address == "127.0.0.1":
        listener = socket.create_server((address, 0), backlog=num_links)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=num_links)
    else:
        listener = socket.create_server(("", 0), backlog=num_links)
    listener.setblocking(False)
    return listener
