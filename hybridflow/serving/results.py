"""Answers as they come, kept beside the output until it is whole: what a kill leaves is gone on from. No torch.

    OUT.parts/run.json                    what is generated, from what and how
    OUT.parts/START-rank-00000.log        a line for each sample: crc32 of the rest, space, JSON

A line counts when its checksum is right; a sample that two lines have is taken from the first. When all samples are
there, the output is written aside, renamed, and the directory removed.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hybridflow.errors import ConfigError, WriteError
from hybridflow.observe.files import (
    make_own_folder,
    named_file,
    replace_by_pieces,
    replace_file,
    sync_path,
    write_all,
    writing,
)
from hybridflow.serving.prompts import HDF5_SUFFIXES, Prompt

Row = dict[str, Any]
Key = tuple[int, int]
"""Number of the prompt, and of the sample among those of its prompt."""

FORMAT = "hybridflow-generated-1"
_RUN = "run.json"
_REMEDY = "choose another --out"
_LOGS = "*-rank-*.log"


class _Where(NamedTuple):
    """Where a sample's line is."""

    path: Path
    offset: int
    length: int


class Results:
    """The parts of one output."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out.with_name(f"{out.name}.parts")

    def check(self, run: Mapping[str, Any], *, is_forced: bool) -> None:
        """See whether the output can be made, and whether what is there belongs to it. Writes nothing.

        Args:
            run: What is generated, from what and how, as JSON.
            is_forced: What is there and does not fit is to be removed.

        Raises:
            WriteError: The output is there already, or its directory cannot be read.
            ConfigError: The parts are of something else; or a directory, device or pipe is there.
        """
        check_free(self.out, is_forced=is_forced)
        if is_forced or not self.folder.is_dir():
            return
        with writing(self.folder, _REMEDY):
            before = self._run_before()
            if before is None and any(self.folder.iterdir()):
                raise WriteError(
                    f"{self.folder}: has files and no {_RUN} that can be read, so they are not known to be parts of "
                    f"{self.out.name}; move them away, or give --force to remove them"
                )
        known = run if before is None else before
        changed = [name for name in {**known, **run} if known.get(name) != run.get(name)]
        if changed:
            raise ConfigError(
                f"{self.folder}: was begun with another {', '.join(sorted(changed))}; give what it was begun with "
                "to go on, --force to begin anew, or another --out"
            )

    def prepare(self, run: Mapping[str, Any], *, is_forced: bool) -> None:
        """Begin, or go on with what is there. For one rank. See ``check``.

        Raises:
            WriteError: The output is there already, or its directory cannot be written.
            ConfigError: The parts are of something else.
        """
        self.check(run, is_forced=is_forced)
        with writing(self.folder, _REMEDY):
            make_own_folder(self.folder)
            if self._run_before() != run:
                shutil.rmtree(self.folder)
                make_own_folder(self.folder)
                replace_file(self.folder / _RUN, json.dumps(dict(run), indent=1).encode())

    def find(self) -> dict[Key, _Where]:
        """Find the results of earlier starts.

        Raises:
            WriteError: The file system refuses.
        """
        found: dict[Key, _Where] = {}
        with writing(self.folder, _REMEDY):
            for path in sorted(self.folder.glob(_LOGS)):
                for where, row in _lines(path):
                    found.setdefault((row["prompt_index"], row["index"]), where)
        return found

    def read(self, found: Mapping[Key, _Where]) -> Iterator[Row]:
        """Yield their rows, in the order of the prompts."""
        for key in sorted(found):
            path, offset, length = found[key]
            with path.open("rb") as file:
                file.seek(offset)
                row: Row = json.loads(file.read(length).partition(b" ")[2])
                yield row

    def finish(self, prompts: Mapping[int, Prompt], found: Mapping[Key, _Where]) -> None:
        """Write the output and remove the parts. For one rank.

        Raises:
            WriteError: The file system refuses; the parts are still there.
        """
        rows = (merge_row(prompts[row["prompt_index"]], row) for row in self.read(found))
        with writing(self.folder, _REMEDY):
            # Of a link, the file that it leads to.
            out = named_file(self.out, "--out")
            if self.out.suffix in HDF5_SUFFIXES:
                _write_hdf5(out, list(rows))
            else:
                # ASCII: a model may make halves of surrogate pairs, which are no UTF-8.
                lines = (json.dumps(row, allow_nan=False).encode("ascii") + b"\n" for row in rows)
                replace_by_pieces(out, lines)
            shutil.rmtree(self.folder)

    def _run_before(self) -> dict[str, Any] | None:
        try:
            found = json.loads((self.folder / _RUN).read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return found if isinstance(found, dict) else None


class ResultLog:
    """Appends rows to a log that is not there yet; what was added survives this process at once.

    Raises:
        WriteError: It cannot be made.
    """

    def __init__(self, results: Results, start: str, rank: int) -> None:
        self._path = results.folder / f"{start}-rank-{rank:05d}.log"
        with writing(self._path, _REMEDY):
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)

    def add(self, rows: Iterable[Row]) -> None:
        """Append rows.

        Raises:
            WriteError: The file system refuses.
        """
        with writing(self._path, _REMEDY):
            write_all(self._file, b"".join(map(_line, rows)))

    def close(self) -> None:
        """Return when all is on disk.

        Raises:
            WriteError: The file system refuses.
        """
        with writing(self._path, _REMEDY):
            os.fsync(self._file)
            os.close(self._file)
            sync_path(self._path.parent)


def check_free(out: Path, *, is_forced: bool) -> None:
    """Refuse an output that is there already, or can never be.

    Raises:
        WriteError: It is.
        ConfigError: A directory, device or pipe is there.
    """
    folder = named_file(out, "--out").parent
    if out.exists() and not is_forced:
        raise WriteError(f"--out {out}: is there already; give --force to replace it, or choose another name")
    if not folder.is_dir():
        raise WriteError(f"--out {out}: there is no directory {folder}; make it")


_OURS = ("sample", "text", "token_ids", "log_probs", "prompt_log_probs", "finish", "error")
"""Names of results. What a prompt's line has under one of them may be of an earlier response, and is not copied."""


def merge_row(prompt: Prompt, row: Row) -> Row:
    """Return a line of the output: the fields of the prompt's line, but for names of results, then the results."""
    made = {name: value for name, value in row.items() if name not in ("prompt_index", "index")}
    if prompt.error is not None and not prompt.fields:
        made["place"] = prompt.place
    given = {name: value for name, value in prompt.fields.items() if name not in _OURS}
    return {**given, "sample": row["index"], **made}


def _line(row: Row) -> bytes:
    content = json.dumps(row, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode()
    return b"%08x %b\n" % (zlib.crc32(content), content)


def _lines(path: Path) -> Iterator[tuple[_Where, Row]]:
    offset = 0
    with path.open("rb") as file:
        for line in file:
            checksum, _, content = line.rstrip(b"\n").partition(b" ")
            if line.endswith(b"\n") and checksum == b"%08x" % zlib.crc32(content):
                yield _Where(path, offset, len(line)), json.loads(content)
            offset += len(line)


def _write_hdf5(path: Path, rows: list[Row]) -> None:
    """Write texts as strings, and tokens and log-probabilities of all samples one behind the other.

    Their numbers are written beside them.
    """
    import numpy as np

    from hybridflow.data.arrays import write_rows

    texts = {name: [row.get(name) or "" for row in rows] for name in ("text", "finish", "error")}
    texts["prompt"] = [_as_text(row) for row in rows]
    fields = [{name: value for name, value in row.items() if name not in (*_OURS, "prompt")} for row in rows]
    texts["fields"] = [json.dumps(each) for each in fields]
    arrays = {
        "sample": np.array([row["sample"] for row in rows], np.int64),
        "response_length": np.array([len(row["token_ids"]) for row in rows], np.int64),
        "response_tokens": np.array([token for row in rows for token in row["token_ids"]], np.int32),
    }
    for name in ("log_probs", "prompt_log_probs"):
        if any(name in row for row in rows):
            arrays[name] = np.array([number for row in rows for number in row.get(name) or ()], np.float32)
            arrays[f"{name}_length"] = np.array([len(row.get(name) or ()) for row in rows], np.int64)
    write_rows(path, texts, arrays, FORMAT)


def _as_text(row: Row) -> str:
    prompt = row.get("prompt", "")
    return prompt if isinstance(prompt, str) else json.dumps(prompt)
