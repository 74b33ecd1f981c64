"""A process beside this one that does what a file of others could make hang, crash or fill the memory."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import threading
import time
from pathlib import Path

_BLOCK_BYTES = 1 << 16


def own_module(module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Return the command, and the environment, in which a process runs a module of ours."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return [sys.executable, "-B", "-m", module, *arguments], {**os.environ, "PYTHONPATH": path}


class LimitedProcess:
    """A module of ours in a process of its own, which answers each line with a line.

    It is begun when it is first asked, and ended with this object. It limits itself.

    Args:
        module: The module.
        arguments: Of its command line.
        max_answer_bytes: Longest answer.
    """

    def __init__(self, module: str, arguments: tuple[str, ...], *, max_answer_bytes: int) -> None:
        self._command, self._environment = own_module(module, *arguments)
        self._max_answer_bytes = max_answer_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._lock = threading.RLock()

    @property
    def is_running(self) -> bool:
        """Return whether it was begun and not ended."""
        return self._process is not None

    def close(self) -> None:
        """End the process; what is asked next begins another."""
        process, self._process = self._process, None
        # A fork of this process has the object too, and not the child.
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()

    def __del__(self) -> None:
        self.close()

    def exchange(self, payload: bytes, within_s: float) -> bytes:
        """Send one line, and have one back. Raises OSError, EOFError or TimeoutError; then it is to be closed."""
        with self._lock:
            if self._process is None:
                self._process = self._start()
            return self._exchange(self._process, payload, within_s)

    def _exchange(self, process: subprocess.Popen[bytes], payload: bytes, within_s: float) -> bytes:
        end_s = time.monotonic() + within_s
        assert process.stdin is not None and process.stdout is not None
        left, got = memoryview(payload + b"\n"), bytearray()
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdin, selectors.EVENT_WRITE)
            ready.register(process.stdout, selectors.EVENT_READ)
            while not got.endswith(b"\n"):
                events = ready.select(max(0.0, end_s - time.monotonic()))
                if not events:
                    raise TimeoutError(f"no answer within {within_s:g} s")
                for key, _ in events:
                    if key.fileobj is process.stdin:
                        left = left[os.write(key.fd, left[:_BLOCK_BYTES]) :]
                        if not left:
                            ready.unregister(process.stdin)
                        continue
                    block = os.read(key.fd, _BLOCK_BYTES)
                    if not block:
                        raise EOFError("its process ended")
                    got += block
                    if len(got) > self._max_answer_bytes:
                        raise OSError(f"its process wrote more than {self._max_answer_bytes} bytes")
        return bytes(got)

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self._environment,
        )
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        return process
