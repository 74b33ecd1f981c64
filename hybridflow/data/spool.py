"""A directory as a live queue of prompts: other programs put files into it while the job runs.

    SPOOL/2026-05-01.jsonl        a file to be taken: written under another name, then renamed
    SPOOL/taken/…                 files that were taken
    SPOOL/.taken-by               the directory of the run that takes from it

The lowest rank takes files in the order of their names into the run's own store, see ``live``. A run that was killed
goes on where it was: a file is either in the journal, or still in the spool.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hybridflow.data.live import Journal, Taken, Taker, text_of
from hybridflow.data.readers import Piece
from hybridflow.data.shaping import Shape
from hybridflow.errors import DataError

_OWNER, _TAKEN = ".taken-by", "taken"


def spooled(folder: Path, spool: Path, deadline_s: float) -> Taken:
    """Return the rows that were taken from a spool.

    Args:
        folder: Folder of the journal and its parts.
        spool: The directory, for messages.
        deadline_s: Longest wait for a row.
    """
    return Taken(
        folder,
        title=str(spool),
        key="data.spool",
        more="rename more files into it",
        place=lambda entry, at: f"{entry['path']}:{at + 1}",
        deadline_s=deadline_s,
    )


class SpoolTaker(Taker):
    """Takes files from a spool into a run's store.

    Args:
        spool: The directory.
        folder: Folder of the journal and its parts.
        shape: What rows have to be.
        poll_s: How often it looks for new files.
        say: Told of what is left out.

    Raises:
        DataError: There is no such directory, or another run takes from it.
    """

    def __init__(self, spool: Path, folder: Path, shape: Shape, poll_s: float, say: Callable[[str], None]) -> None:
        self._spool = spool
        try:
            _own(spool, folder)
            super().__init__(Journal(folder, shape, say), poll_s)
            (spool / _TAKEN).mkdir(exist_ok=True)
        except OSError as error:
            raise DataError(
                f"data.spool.path={str(spool)!r}: cannot be used: {error}; name a directory that the lowest rank may "
                "write to"
            ) from error

    def take(self) -> int:
        """Take the files that are there now, in the order of their names; how many.

        Raises:
            DataError: A row cannot be used, and ``on_bad_row`` is ``error``; the file stays where it is.
            OSError: The file system refuses.
        """
        count = 0
        # A hidden file is one that another program still writes.
        for path in sorted(self._spool.glob("[!.]*.jsonl")):
            if self._is_over.is_set():
                break
            found = path.stat()
            known = [path.name, found.st_size, found.st_mtime_ns]
            # Of a run that was killed between the journal and the move.
            if known not in [entry["file"] for entry in self._journal.entries]:
                piece = Piece(str(path), "jsonl", 0, found.st_size)
                try:
                    self._journal.add([piece], str(path), {"file": known, "path": str(path)})
                except DataError as error:
                    raise DataError(f"{error}; mend the file, and resume") from error
                count += 1
            path.rename(self._spool / _TAKEN / path.name)
        return count


def _own(spool: Path, folder: Path) -> None:
    """Take a spool for one run; two would share its rows by chance, and could not go on."""
    mine, path = str(folder.resolve()), spool / _OWNER
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(mine)
    except FileExistsError:
        other = text_of(path)
        if other != mine:
            raise DataError(
                f"data.spool.path={str(spool)!r}: {other!r} takes from it; give each run a directory of its own, or "
                f"remove {path} if that run is over"
            ) from None
