"""The process of rank 0 that keeps the store where the ranks meet: values under names, for who knows the job's secret.

It is a process of its own, so that it answers while a long call holds rank 0's Python. It ends with rank 0.
``parallel.store`` is the other end. Python's own library alone: it starts in a moment.

A request and its answer are lists of byte strings. A request begins with its name:

    set name value …            answer: nothing
    get milliseconds name …     the values, once all are there; ``late`` if they are not in time
    wait milliseconds name …    likewise, without the values
    check name …                1 if all are there, else 0
    add name number             the sum of what was there and the number
    compare name old new        the value afterwards: new where old was there, or where nothing was and old is empty
    append name value           answer: nothing
    delete name                 1 if it was there, else 0
    runs                        1 if rank 0's process runs, 0 if it is stopped
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hybridflow.parallel.handshake import Gate, SealedChannel
from hybridflow.parallel.process import Process, allow_many_files, is_running

DONE, LATE = b"done", b"late"

_LOOK_S = 1.0
"""So often it looks whether rank 0 is still there, beside the pipe that says so at once."""

_NUM_BYTES = 4

Answer = list[bytes]


def pack(parts: Sequence[bytes]) -> bytes:
    """Return byte strings as one message."""
    return b"".join(len(part).to_bytes(_NUM_BYTES, "big") + part for part in parts)


def unpack(message: bytes) -> list[bytes]:
    """Return the byte strings of a message."""
    parts, at = [], 0
    while at < len(message):
        start = at + _NUM_BYTES
        at = start + int.from_bytes(message[at:start], "big")
        parts.append(message[start:at])
    return parts


@dataclass(kw_only=True, eq=False)
class _Client:
    connection: socket.socket
    channel: SealedChannel
    outgoing: bytes = b""
    awaited: list[bytes] = field(default_factory=list)
    with_values: bool = False
    until_s: float = float("inf")


class Keeper:
    """The store and its connections.

    Args:
        listener: Where the ranks come.
        key: Key of their connections.
        owner: Process of rank 0.
        size: Ranks of the job.
    """

    def __init__(self, listener: socket.socket, key: bytes, owner: Process, size: int) -> None:
        self._owner = owner
        self._values: dict[bytes, bytes] = {}
        self._waiting: dict[bytes, set[_Client]] = {}
        self._late: set[_Client] = set()
        self._gate = Gate(listener, key, size)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._gate, selectors.EVENT_READ)
        self._acts: dict[bytes, Callable[..., Answer]] = {
            b"set": self._set,
            b"check": lambda *names: [_bool(all(name in self._values for name in names))],
            b"add": self._add,
            b"compare": self._compare,
            b"append": lambda name, value: self._set(name, self._values.get(name, b"") + value),
            b"delete": lambda name: [_bool(self._values.pop(name, None) is not None)],
            b"runs": lambda: [_bool(is_running(self._owner))],
        }

    def run(self, life_line: int) -> None:
        """Serve until rank 0 is gone.

        Args:
            life_line: A pipe whose other end rank 0 holds.
        """
        self._selector.register(life_line, selectors.EVENT_READ)
        while os.getppid() == self._owner[0]:
            soonest_s = min((client.until_s for client in self._late), default=float("inf"))
            wait_s = min(_LOOK_S, max(0.0, soonest_s - time.monotonic()))
            for key, events in self._selector.select(wait_s):
                if key.fileobj == life_line:
                    return
                if isinstance(key.data, _Client):
                    self._serve(key.data, events)
            for connection, channel in self._gate.admit(time.monotonic()):
                client = _Client(connection=connection, channel=channel)
                self._selector.register(connection, selectors.EVENT_READ, client)
            now_s = time.monotonic()
            for client in [each for each in self._late if each.until_s <= now_s]:
                self._forget_wait(client)
                self._answer(client, [LATE])

    def _serve(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(client)
            if events & selectors.EVENT_READ:
                data = client.connection.recv(1 << 16)
                if not data:
                    raise ConnectionResetError
                for message in client.channel.open(data):
                    self._take(client, unpack(message))
        except BlockingIOError:
            pass
        except (OSError, ValueError, KeyError, TypeError):  # gone, or of another version of hybridflow
            self._close(client)

    def _take(self, client: _Client, request: list[bytes]) -> None:
        act, *rest = request
        if act not in (b"get", b"wait"):
            self._answer(client, [DONE, *self._acts[act](*rest)])
            return
        client.awaited, client.with_values = rest[1:], act == b"get"
        client.until_s = time.monotonic() + int(rest[0]) / 1000
        self._late.add(client)
        for name in client.awaited:
            self._waiting.setdefault(name, set()).add(client)
        self._wake(client)

    def _wake(self, client: _Client) -> None:
        """Answer a client that waits, if all is there."""
        if client in self._late and all(name in self._values for name in client.awaited):
            values = [self._values[name] for name in client.awaited] if client.with_values else []
            self._forget_wait(client)
            self._answer(client, [DONE, *values])

    def _forget_wait(self, client: _Client) -> None:
        self._late.discard(client)
        for name in client.awaited:
            if name in self._waiting:
                self._waiting[name].discard(client)
                if not self._waiting[name]:
                    del self._waiting[name]
        client.awaited, client.until_s = [], float("inf")

    def _set(self, *pairs: bytes) -> Answer:
        for name, value in zip(pairs[::2], pairs[1::2], strict=True):
            self._values[name] = value
            for client in list(self._waiting.get(name, ())):
                self._wake(client)
        return []

    def _add(self, name: bytes, number: bytes) -> Answer:
        total = b"%d" % (int(self._values.get(name, b"0")) + int(number))
        self._set(name, total)
        return [total]

    def _compare(self, name: bytes, old: bytes, new: bytes) -> Answer:
        found = self._values.get(name)
        if found == old or found is None and not old:
            self._set(name, new)
            return [new]
        return [old if found is None else found]

    def _answer(self, client: _Client, parts: Answer) -> None:
        client.outgoing += client.channel.seal(pack(parts))
        try:
            self._flush(client)
        except OSError:
            self._close(client)

    def _flush(self, client: _Client) -> None:
        if client.connection.fileno() < 0:  # closed by an earlier event of this turn
            return
        with contextlib.suppress(BlockingIOError):
            while client.outgoing:
                client.outgoing = client.outgoing[client.connection.send(client.outgoing) :]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.outgoing else 0)
        self._selector.modify(client.connection, events, client)

    def _close(self, client: _Client) -> None:
        if client.connection.fileno() >= 0:
            self._forget_wait(client)
            self._selector.unregister(client.connection)
            client.connection.close()


def _bool(value: bool) -> bytes:
    return b"1" if value else b"0"


def main() -> None:
    """Keep the store. Arguments: file number of the listener, rank 0's process, ranks. The key comes by the pipe."""
    descriptor, pid, began, size = map(int, sys.argv[-4:])
    allow_many_files()
    key = sys.stdin.buffer.read(32)
    if len(key) < 32:
        return
    with socket.socket(fileno=descriptor) as listener:
        Keeper(listener, key, (pid, began), size).run(0)
