"""The store where the ranks meet, in torch's form: a connection to rank 0's keeper (``parallel.keeper``).

torch's own ``TCPStore`` asks nobody who he is: whoever reaches its port reads and writes what ranks tell each other.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybridflow.parallel.handshake import StrangerError, connect
from hybridflow.parallel.keeper import DONE, LATE, pack, unpack
from hybridflow.parallel.process import own_process
from hybridflow.parallel.signals import STOP_SIGNALS

_ANSWER_S = 30.0
"""So much longer than a request's own time its answer may take before the keeper's node counts as gone."""

_START = "import sys; sys.path.append(sys.argv[1]); from hybridflow.parallel.keeper import main; main()"


def begin_keeper(listener: socket.socket, key: bytes, size: int) -> subprocess.Popen[bytes]:
    """Start the keeper of rank 0, which is this process, and give it the listener; it ends when this process does.

    Args:
        listener: Where the ranks come.
        key: Key of their connections.
        size: Ranks of the job.
    """
    source = str(Path(__file__).parents[2])
    place = [str(number) for number in (listener.fileno(), *own_process(), size)]
    # What ends or stops a rank must not end its keeper: it inherits that these signals are blocked.
    blocked = {*STOP_SIGNALS, signal.SIGINT, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _START, source, *place],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    listener.close()
    assert keeper.stdin is not None, "it was asked for"
    os.write(keeper.stdin.fileno(), key)
    return keeper


class KeeperStore(dist.Store):
    """A connection to the keeper. Threads may share it; a wait of one then holds up the others, see ``clone``.

    torch knows this object by what is of C++ in it alone: a Python reference must be held for as long as torch uses it.

    Args:
        address: Host of rank 0.
        port: Port of the keeper.
        key: Key of the connections.
        timeout_s: Longest wait of ``get`` and, without one of its own, of ``wait``, in seconds.
        connect_s: Longest wait for the keeper, in seconds.
        look: Called about every second of it; what it raises ends the wait.
        keeper: On rank 0, the process, which ends when nobody holds it.

    Raises:
        StrangerError: Another program listens there.
        OSError: None does.
    """

    def __init__(
        self,
        address: str,
        port: int,
        key: bytes,
        *,
        timeout_s: float,
        connect_s: float = 30.0,
        look: Callable[[], None] = lambda: None,
        keeper: subprocess.Popen[bytes] | None = None,
    ) -> None:
        super().__init__()
        self._place, self._timeout_s = (address, port, key), timeout_s
        self._keeper = keeper
        self._lock = threading.Lock()
        self._connection, self._session = connect(address, port, key, limit_s=connect_s, look=look)

    def clone(self) -> KeeperStore:
        """Open a connection of its own to the same keeper."""
        try:
            return KeeperStore(*self._place, timeout_s=self._timeout_s)
        except (StrangerError, OSError) as error:
            raise dist.DistNetworkError(f"the keeper of the store is gone: {error}") from error

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the longest wait, also of connections made by ``clone`` from now on."""
        self._timeout_s = timeout.total_seconds()

    def set(self, key: str, value: str | bytes) -> None:
        """Put a value under a name."""
        self._ask(b"set", key, value)

    def get(self, key: str) -> bytes:
        """Return the value under a name, once it is there."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values under names, once all are there."""
        return self._ask(b"get", *keys, wait_s=self._timeout_s)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Put values under names."""
        self._ask(b"set", *(part for pair in zip(keys, values, strict=True) for part in pair))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all names have values."""
        self._ask(b"wait", *keys, wait_s=self._timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all names have values."""
        return self._ask(b"check", *keys) == [b"1"]

    def add(self, key: str, amount: int) -> int:
        """Add to the number under a name, 0 at first, and return the sum."""
        return int(self._ask(b"add", key, str(amount))[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Put a value in the place of the expected one, and return what is there then."""
        return self._ask(b"compare", key, expected, desired)[0]

    def append(self, key: str, value: str | bytes) -> None:
        """Add to the end of the value under a name."""
        self._ask(b"append", key, value)

    def deleteKey(self, key: str) -> bool:  # noqa: N802 - torch asks for ``delete_key`` under this name
        """Remove a name, and return whether it was there."""
        return self._ask(b"delete", key) == [b"1"]

    def has_extended_api(self) -> bool:
        """Return that ``append``, ``multi_get`` and ``multi_set`` are there."""
        return True

    def rank_0_runs(self) -> bool:
        """Return whether rank 0's process runs; its Python may be held by a long call."""
        return self._ask(b"runs") == [b"1"]

    def _ask(self, act: bytes, *parts: str | bytes, wait_s: float | None = None) -> list[bytes]:
        """Return the keeper's answer to a request.

        Raises:
            DistStoreError: Not all names had values in time.
            DistNetworkError: The keeper is gone.
        """
        limit = [] if wait_s is None else [b"%d" % max(1, wait_s * 1000)]
        words = [part.encode() if isinstance(part, str) else bytes(part) for part in parts]
        with self._lock:
            try:
                status, *values = self._exchange(pack([act, *limit, *words]), (wait_s or 0.0) + _ANSWER_S)
            except (OSError, ValueError) as error:
                self._connection.close()
                raise dist.DistNetworkError(f"the keeper of the store on rank 0 is gone: {error}") from error
            except BaseException:  # the answer to come would be taken for that of the next request
                self._connection.close()
                raise
        if status == LATE:
            raise dist.DistStoreError(f"wait timeout after {wait_s:g} s, names: {', '.join(map(str, parts[:8]))}")
        assert status == DONE, status
        return values

    def _exchange(self, request: bytes, limit_s: float) -> list[bytes]:
        self._connection.settimeout(limit_s)
        self._connection.sendall(self._session.seal(request))
        while True:
            data = self._connection.recv(1 << 16)
            if not data:
                raise ConnectionResetError("it closed the connection")
            for message in self._session.open(data):
                return unpack(message)


class NamedStore(dist.PrefixStore):
    """A store's names that begin with a word; it holds the store, which torch's own class does not.

    Args:
        name: The word.
        store: Whose names they are.
    """

    def __init__(self, name: str, store: dist.Store) -> None:
        super().__init__(name, store)
        self._store: Any = store

    def rank_0_runs(self) -> bool:
        """Return whether rank 0's process runs, see ``KeeperStore``."""
        return bool(self._store.rank_0_runs())
