"""A model directory: reading any box of any tensor whatever the layout that wrote it, and writing a rank's share."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridflow.checkpoint.manifest import (
    NAME,
    Manifest,
    Piece,
    TensorEntry,
    check_files,
    piece_key,
    read_manifest,
    to_json,
)
from hybridflow.checkpoint.tensor_file import TensorFile, TensorFileWriter, entry_of
from hybridflow.errors import CheckpointError, WriteError
from hybridflow.families.assets import ADAPTER_CONFIG, ASSETS, FOLDER, read_assets
from hybridflow.observe.files import replace_file, writing
from hybridflow.reshard.spec import Box, intersect, num_elements
from hybridflow.reshard.views import TORCH_DTYPES

ASSET_NAMES = (*ASSETS, ADAPTER_CONFIG)
"""The small files of a model or an adapter."""

_SYNCED_BYTES = 1 << 28


class Share(NamedTuple):
    """A piece that a rank is to write.

    Attributes:
        kind: What of the tensor: see ``manifest.WEIGHT``.
        tensor: Logical name.
        box: In logical coordinates, not empty.
        values: Tensor of the box's sizes, in host memory.
    """

    kind: str
    tensor: str
    box: Box
    values: Tensor


class ModelDir:
    """A model directory that is there in full.

    Each piece's hash is checked when it is first read.

    Attributes:
        path: The directory.
        manifest: What it holds.

    Raises:
        CheckpointError: A file is missing, has another size, or other tensors than the manifest says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        self._pieces: dict[tuple[str, str], list[Piece]] = defaultdict(list)
        self._by_file: dict[str, list[Piece]] = defaultdict(list)
        for piece in self.manifest.pieces:
            self._pieces[piece.kind, piece.tensor].append(piece)
            self._by_file[piece.file].append(piece)
        self._files: dict[str, TensorFile] = {}
        self._used: set[str] = set()
        self._checked: set[tuple[str, str]] = set()
        check_files(path, self.manifest)

    def read(self, kind: str, tensor: str, box: Box | None = None) -> Tensor:
        """Read a box of a tensor; the whole of it where none is given.

        Returns:
            A view of a file where one piece holds the whole box, else new memory. Not to be written.

        Raises:
            CheckpointError: There is no such tensor, or a piece's bytes are not those that were written.
        """
        entry = self._entry(kind, tensor)
        box = tuple((0, size) for size in entry.shape) if box is None else box
        for piece in self._pieces[kind, tensor]:
            if intersect(piece.box, box) == box and num_elements(box) > 0:
                return self._values(piece)[within(box, piece.box)]
        found = torch.empty([stop - start for start, stop in box], dtype=TORCH_DTYPES[entry.dtype])
        self.read_into(kind, tensor, box, found)
        return found

    def read_into(self, kind: str, tensor: str, box: Box, target: Tensor) -> None:
        """Copy a box of a tensor, which its pieces cover once, into memory of its sizes, on any device, of any dtype.

        Raises:
            CheckpointError: As ``read``.
        """
        self._entry(kind, tensor)
        for piece in self._pieces[kind, tensor]:
            common = intersect(piece.box, box)
            if num_elements(common) > 0:
                target[within(common, box)].copy_(self._values(piece)[within(common, piece.box)])

    def assets(self) -> dict[str, bytes]:
        """Return the small files that travel along, by name, their hashes checked.

        Raises:
            CheckpointError: One is missing, or its bytes are not those that were written.
        """
        folder, expected = self.path / FOLDER, self.manifest.notes.get(FOLDER, {})
        found = read_assets(folder, dict.fromkeys((*ASSET_NAMES, *expected)))
        for name, sha256 in expected.items():
            if name not in found or hashlib.sha256(found[name]).hexdigest() != sha256:
                what = "other bytes than were written" if name in found else "no such file"
                raise CheckpointError(
                    f"{folder / name}: found {what}, expected sha256 {sha256}; restore it from a copy"
                )
        return found

    def verify(self) -> Iterable[Piece]:
        """Check the small files, then every piece, one after the other; gives each piece once it holds.

        Raises:
            CheckpointError: The first that does not.
        """
        self.assets()
        for piece in self.manifest.pieces:
            self._values(piece)
            self.release()
            yield piece

    def release(self) -> None:
        """Give back the memory of what was read so far. Views that ``read`` gave stay valid."""
        for name in self._used:
            self._files[name].release()
        self._used.clear()

    def _entry(self, kind: str, tensor: str) -> TensorEntry:
        entries = self.manifest.tensors.get(kind, {})
        if tensor not in entries:
            raise CheckpointError(
                f"{self.path / NAME}: has no {kind} {tensor}, which was expected; is it of another model?"
            )
        return entries[tensor]

    def _values(self, piece: Piece) -> Tensor:
        """Return a piece, its hash checked once."""
        file = self._file(piece.file)
        self._used.add(piece.file)
        if (piece.file, piece.key) not in self._checked:
            found = file.sha256(piece.key)
            if found != piece.sha256:
                raise CheckpointError(
                    f"{file.path}: {piece.key} has sha256 {found}, expected {piece.sha256}: its bytes are not those "
                    "that were written; restore the file from a copy"
                )
            self._checked.add((piece.file, piece.key))
        return file.read(piece.key)

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            if not (self.path / NAME).exists():
                raise CheckpointError(
                    f"{self.path}: was removed while it was read; if the run did so, start again with its newest "
                    "checkpoint, or let it keep more with trainer.keep_last or trainer.keep_every"
                )
            file = TensorFile(self.path / name)
            expected = {
                piece.key: TensorEntry(
                    self._entry(piece.kind, piece.tensor).dtype, tuple(stop - start for start, stop in piece.box)
                )
                for piece in self._by_file[name]
            }
            for key in sorted(expected.keys() | file.entries.keys()):
                if expected.get(key) != file.entries.get(key):
                    raise CheckpointError(
                        f"{file.path}: {key}: found {_text(file.entries.get(key))}, expected "
                        f"{_text(expected.get(key))}; restore the file from a copy"
                    )
            self._files[name] = file
        return self._files[name]


def write_shares(
    folder: Path, file: str, shares: Iterable[Share], *, advance: Callable[[int], None] | None = None
) -> tuple[list[Piece], int]:
    """Write and sync a file of pieces.

    Args:
        folder: The model directory, which is there.
        file: Name of the file.
        shares: What goes into it.
        advance: Called with the bytes of each piece once it is written, so that others see that something happens.

    Returns:
        The pieces for the manifest, and the file's bytes.

    Raises:
        WriteError: The file system refuses.
    """
    path, counts = folder / file, Counter[tuple[str, str]]()
    keyed: dict[str, Share] = {}
    for share in shares:
        keyed[piece_key(share.kind, share.tensor, counts[share.kind, share.tensor])] = share
        counts[share.kind, share.tensor] += 1
    entries = {key: entry_of(share.values) for key, share in keyed.items()}
    pieces: list[Piece] = []
    try:
        with contextlib.closing(TensorFileWriter(path, entries)) as writer:
            unsynced = 0
            for key, share in keyed.items():
                sha256 = writer.write(key, share.values)
                pieces.append(Piece(share.kind, share.tensor, share.box, file, key, sha256))
                unsynced += share.values.nbytes
                # Not all at the end: that could take longer than others wait for a sign of life.
                if unsynced > _SYNCED_BYTES:
                    writer.sync()
                    unsynced = 0
                if advance is not None:
                    advance(share.values.nbytes)
            writer.sync()
    except OSError as error:
        raise WriteError(
            f"{path}: cannot be written: {error}; make room, and use a file system that all ranks share"
        ) from error
    return pieces, writer.num_bytes


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write and sync the manifest, the last file of a directory that is then renamed."""
    write_bytes(folder / NAME, to_json(manifest).encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a small file aside, sync it, rename it, and sync the directory, whose other names that brings along.

    Raises:
        WriteError: The file system refuses.
    """
    with writing(path, "choose another place"):
        replace_file(path, content)


def write_assets(folder: Path, assets: Mapping[str, bytes]) -> dict[str, Any]:
    """Write the small files that travel along; returns what the manifest's notes are to say of them.

    Raises:
        WriteError: The file system refuses.
    """
    with writing(folder / FOLDER, "choose another place"):
        (folder / FOLDER).mkdir(exist_ok=True)
    for name, content in assets.items():
        write_bytes(folder / FOLDER / name, content)
    return {FOLDER: {name: hashlib.sha256(content).hexdigest() for name, content in assets.items()}}


def within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Return where a box lies within one around it."""
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(inner, outer, strict=True))


def _text(entry: TensorEntry | None) -> str:
    return "no such tensor" if entry is None else f"{entry.dtype} {list(entry.shape)}"
