"""The files of a conversion being written: parts by a few threads, what is written synced and noted beside that."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from hybridflow.checkpoint.convert.journal import ConversionJournal, Part
from hybridflow.checkpoint.formats.source import Target, Writer
from hybridflow.errors import WriteError
from hybridflow.observe.files import sync_path, write_remedy

_FLYING_BYTES = 300 << 20
"""Of tensors that are being written at a time, besides the one that is read meanwhile; a larger one goes alone."""

_COMMIT_BYTES = 512 << 20
"""So much at most is written anew after a kill."""

_MAX_THREADS = 4


class Output:
    """Files that are written in parts.

    A file is written by one thread at a time. Where its target can go on with files, it is synced while more is
    written to it, and its parts are noted in the journal; else they are noted together when it is complete.

    Args:
        target: Opens the files.
        folder: Where they are written.
        journal: Where parts are noted that have been synced.
        left: File -> keys that are to be written.
        count: Called with the bytes of each part that was written.
    """

    def __init__(
        self,
        target: Target,
        folder: Path,
        journal: ConversionJournal,
        left: Mapping[str, Collection[str]],
        count: Callable[[int], None],
    ) -> None:
        self.left = {file: set(keys) for file, keys in left.items()}
        self._target, self._folder, self._journal, self._count = target, folder, journal, count
        self._writers: dict[str, tuple[Writer, threading.Lock]] = {}
        self._pool = ThreadPoolExecutor(min(_MAX_THREADS, 2 * len(os.sched_getaffinity(0))))
        self._syncing = ThreadPoolExecutor(1)
        self._sync: Future[None] | None = None
        self._flying: deque[tuple[Future[Part], int]] = deque()
        self._flying_bytes = 0
        self._written: list[Part] = []
        self._written_bytes = 0

    def put(self, file: str, key: str, values: Tensor) -> None:
        """Write a part, soon.

        Raises:
            WriteError: It, or one before it, cannot be written.
        """
        num_bytes = values.nbytes
        self._open(file)
        self._flying.append((self._pool.submit(self._write, file, key, values), num_bytes))
        self._flying_bytes += num_bytes

    def make_room(self, num_bytes: int) -> None:
        """Wait until so few parts are being written that a tensor of this size may come into memory too.

        Raises:
            WriteError: A part cannot be written.
        """
        while self._flying and (self._flying[0][0].done() or self._flying_bytes + num_bytes > _FLYING_BYTES):
            self._land()
        if self._target.can_go_on and self._written_bytes >= _COMMIT_BYTES:
            self._commit()

    def finish(self, files: Collection[str]) -> None:
        """Wait until files are complete, synced, noted and closed.

        Raises:
            WriteError: The file system refuses.
        """
        while self._flying:
            self._land()
        for file in files:
            assert not self.left[file], f"{file}: the target gave no values for {sorted(self.left[file])}"
            if not self._target.files[file]:
                self._open(file)
        self._commit()
        self._wait_for_sync()

    def close(self, *, wait: bool) -> None:
        """Let go of everything, written or not.

        Args:
            wait: Whether for threads that are writing.
        """
        self._pool.shutdown(wait=wait, cancel_futures=True)
        # What was handed over to be synced need not be written anew.
        self._syncing.shutdown(wait=wait, cancel_futures=not wait)
        if wait:
            for writer, _ in self._writers.values():
                # What matters was raised before.
                with contextlib.suppress(OSError):
                    writer.close()
        self._writers.clear()

    def _open(self, file: str) -> None:
        if file not in self._writers:
            with as_write_errors(self._folder / file):
                self._writers[file] = self._target.open(self._folder / file, file), threading.Lock()

    def _write(self, file: str, key: str, values: Tensor) -> Part:
        writer, lock = self._writers[file]
        with as_write_errors(self._folder / file, key), lock:
            return Part(file, key, writer.write(key, values))

    def _land(self) -> None:
        future, num_bytes = self._flying[0]
        part = future.result()
        self._flying.popleft()
        self._flying_bytes -= num_bytes
        self.left[part.file].remove(part.key)
        self._written.append(part)
        self._written_bytes += num_bytes
        self._count(num_bytes)

    def _commit(self) -> None:
        """Have what was written synced, noted, and complete files closed, while more is written."""
        self._wait_for_sync()
        complete = {file: self._writers.pop(file)[0] for file in list(self._writers) if not self.left[file]}
        begun = {part.file: self._writers[part.file][0] for part in self._written if part.file not in complete}
        self._sync = self._syncing.submit(self._settle, self._written, begun, complete)
        self._written, self._written_bytes = [], 0

    def _wait_for_sync(self) -> None:
        if self._sync is not None:
            self._sync.result()

    def _settle(self, parts: list[Part], begun: Mapping[str, Writer], complete: Mapping[str, Writer]) -> None:
        with contextlib.ExitStack() as closing:
            for file, writer in complete.items():
                closing.callback(self._close, file, writer)
            for file, writer in {**begun, **complete}.items():
                with as_write_errors(self._folder / file):
                    writer.sync()
        with as_write_errors(self._folder):
            # A format may keep its files further down.
            for folder in {self._folder, *((self._folder / file).parent for file in (*begun, *complete))}:
                sync_path(folder)
            self._journal.append(parts)

    def _close(self, file: str, writer: Writer) -> None:
        with as_write_errors(self._folder / file):
            writer.close()


@contextlib.contextmanager
def as_write_errors(path: Path, key: str | None = None, *, is_begun: bool = True) -> Iterator[None]:
    """Turn what the file system raises into a WriteError.

    Args:
        path: What is written.
        key: Key of the tensor, if it is one.
        is_begun: Whether there is anything to go on with.
    """
    try:
        yield
    except OSError as error:
        where = str(path) if key is None else f"{path}: {key}"
        # A folder above may be what is in the way.
        at = "" if error.filename in (None, str(path)) else f"{error.filename}: "
        kept = "; what is complete is kept, and the same command goes on from there" * is_begun
        remedy = write_remedy(error, "choose another OUT")
        raise WriteError(f"{where}: cannot be written: {at}{error.strerror or error}; {remedy}{kept}") from error
