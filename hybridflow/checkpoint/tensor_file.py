"""Safetensors files, read through a memory map and written tensor by tensor, so that none is ever whole in memory."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import mmap
import os
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridflow.checkpoint.manifest import TensorEntry
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.foreign import open_regular
from hybridflow.reshard.spec import DType
from hybridflow.reshard.views import DTYPE_NAMES, TORCH_DTYPES

_FORMAT_DTYPES: dict[DType, str] = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_CAST_ELEMENTS = 1 << 22
_HASHED_BYTES = 1 << 24
"""So much of a tensor is in memory while it is hashed."""

_OWN_DTYPES = {name: dtype for dtype, name in _FORMAT_DTYPES.items()}
_CODE_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "U8": torch.uint8}
"""Dtypes of one byte, as the format calls them, in which weights may be coded."""

_MASK_DTYPES = ("BOOL", "U8")
"""Dtypes of one byte in which older files keep masks of attention."""

_PIECE_BYTES = 1 << 20
_BUFFER_BYTES = 4 << 20
_ALIGNMENT = 4096
_OF_THREAD = threading.local()


def entry_of(tensor: Tensor) -> TensorEntry:
    """Return what a tensor is in a file."""
    return TensorEntry(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))


def cast(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor to another dtype, rounded to nearest, ties to even.

    Args:
        name: Name of the tensor.
        values: Finite or not.
        dtype: Asked for.

    Raises:
        ConfigError: A finite number would become infinite.
    """
    if values.dtype == dtype:
        return values
    result = torch.empty(values.shape, dtype=dtype)
    is_narrower = torch.finfo(dtype).max < torch.finfo(values.dtype).max
    # In pieces, so that what finds infinities stays small.
    flat = values.is_contiguous()
    before = values.view(-1).split(_CAST_ELEMENTS) if flat else [values]
    after = result.view(-1).split(_CAST_ELEMENTS) if flat else [result]
    for old, new in zip(before, after, strict=True):
        new.copy_(old)
        if is_narrower and bool((new.isinf() & old.isfinite()).any()):
            largest = float(old.abs()[old.isfinite()].max())
            raise ConfigError(
                f"{name}: holds {largest:g}, beyond {torch.finfo(dtype).max:g}, the largest number of "
                f"{DTYPE_NAMES[dtype]}; choose another --dtype"
            )
    return result


class CodeEntry(NamedTuple):
    """Codes of a tensor in a file.

    Attributes:
        dtype: As the format calls it, of one byte.
        shape: Sizes.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Return its size in a file."""
        return math.prod(self.shape)


class TensorFile:
    """A safetensors file whose tensors are views of mapped memory: nothing is read before it is used.

    Args:
        path: The file.
        has_codes: Whether codes may lie in it beside tensors.
        has_masks: Whether masks may lie in it, of booleans or bytes, which are no weights and are left out.

    Attributes:
        path: The file.
        entries: Its tensors by key, in the order of the file.
        codes: Its codes by key.
        masks: Keys of its masks.

    Raises:
        CheckpointError: The file is missing, truncated or not safetensors, or has a tensor of a dtype unknown here.
    """

    def __init__(self, path: Path, *, has_codes: bool = False, has_masks: bool = False) -> None:
        self.path = path
        self.entries: dict[str, TensorEntry] = {}
        self.codes: dict[str, CodeEntry] = {}
        self.masks: set[str] = set()
        held: dict[str, TensorEntry | CodeEntry] = {}
        try:
            with open_regular(path) as handle:
                # The library checks the header: sizes, offsets without holes, the file's length.
                with safe_open(path, "pt") as file:
                    for key in file.offset_keys():
                        part = file.get_slice(key)
                        dtype, shape = part.get_dtype(), tuple(part.get_shape())
                        if has_codes and dtype in _CODE_DTYPES:
                            held[key] = self.codes[key] = CodeEntry(dtype, shape)
                        elif has_masks and dtype in _MASK_DTYPES:
                            held[key] = CodeEntry(dtype, shape)
                            self.masks.add(key)
                        else:
                            held[key] = self.entries[key] = TensorEntry(self._dtype(key, dtype), shape)
                (header_bytes,) = struct.unpack("<Q", handle.read(8))
                # A private map, since torch wants memory that could be written.
                self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            # Libraries tell no number.
            remedy = "raise ulimit -n" if os.strerror(errno.EMFILE) in str(error) else "restore it from a copy"
            raise CheckpointError(f"{path}: cannot be read as safetensors: {error}; {remedy}") from error
        self._starts: dict[str, int] = {}
        place = 8 + header_bytes
        for key, entry in held.items():
            self._starts[key] = place
            place += entry.num_bytes

    def read(self, key: str) -> Tensor:
        """Read a tensor as a view of the file, not to be written; it keeps the mapping alive.

        Raises:
            CheckpointError: The file has no such tensor.
        """
        if key not in self.entries:
            raise CheckpointError(f"{self.path}: has no tensor {key}; restore the file from a copy")
        return self._view(self.entries[key], self._starts[key])

    def read_codes(self, key: str) -> Tensor:
        """Read codes as a view of the file, not to be written."""
        dtype, shape = self.codes[key]
        return self._mapped(_CODE_DTYPES[dtype], shape, self._starts[key])

    def read_stacked(self, keys: Sequence[str]) -> Tensor | None:
        """Read tensors of one shape that are adjacent in the file, as one view ``[keys, …]``.

        Returns:
            None where they do not lie so.
        """
        if len({self.entries.get(key) for key in keys}) != 1 or keys[0] not in self.entries:
            return None
        entry, first = self.entries[keys[0]], self._starts[keys[0]]
        if [self._starts[key] for key in keys] != [first + index * entry.num_bytes for index in range(len(keys))]:
            return None
        return self._view(TensorEntry(entry.dtype, (len(keys), *entry.shape)), first)

    def sha256(self, key: str) -> str:
        """Return the sha256 of a tensor's bytes. The memory that was read for it is released as it goes."""
        start = self._starts[key]
        stop, digest = start + self.entries[key].num_bytes, hashlib.sha256()
        with memoryview(self._map) as whole:
            while start < stop:
                end = min(start + _HASHED_BYTES, stop)
                with whole[start:end] as part:
                    digest.update(part)
                first = start // mmap.PAGESIZE * mmap.PAGESIZE
                self._map.madvise(mmap.MADV_DONTNEED, first, end - first)
                start = end
        return digest.hexdigest()

    def release(self) -> None:
        """Give back the memory of what has been read so far; what is read again comes from the file again."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def _view(self, entry: TensorEntry, start: int) -> Tensor:
        return self._mapped(TORCH_DTYPES[entry.dtype], entry.shape, start)

    def _mapped(self, dtype: torch.dtype, shape: tuple[int, ...], start: int) -> Tensor:
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=math.prod(shape), offset=start).view(shape)

    def _dtype(self, key: str, name: str) -> DType:
        if name not in _OWN_DTYPES:
            raise CheckpointError(
                f"{self.path}: {key} is of dtype {name}; expected one of {', '.join(_OWN_DTYPES)}: convert it first"
            )
        return _OWN_DTYPES[name]


class HeldTensors:
    """Tensors that a program has in memory, as ``TensorFile`` has those of a file.

    Raises:
        ConfigError: One of them is not there, cut over ranks, or of a dtype unknown here.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self.path = path
        self._tensors = tensors
        for name, tensor in tensors.items():
            if tensor.device.type == "meta":
                raise ConfigError(f"{path}: {name} is on the meta device, without values; load the weights first")
            if hasattr(tensor, "full_tensor"):
                raise ConfigError(
                    f"{path}: {name} is cut over ranks by torch.distributed; give the model before it is sharded, or "
                    "save_pretrained it and name the directory"
                )
            if tensor.dtype not in DTYPE_NAMES:
                expected = ", ".join(map(str, DTYPE_NAMES))
                raise ConfigError(f"{path}: {name} is {tensor.dtype}; expected one of {expected}: convert the model")
        self.entries = {name: entry_of(each) for name, each in tensors.items()}

    def read(self, key: str) -> Tensor:
        """Read a tensor in host memory, not to be written."""
        return self._tensors[key].detach().cpu()

    def sha256(self, key: str) -> str:
        """Return the sha256 of a tensor's bytes."""
        return hashlib.sha256(bytes_of(self.read(key))).hexdigest()

    def release(self) -> None:
        """Do nothing: the program keeps the tensors."""


class TensorFileWriter:
    """A safetensors file whose tensors come in any order, each written at its place.

    The file is there with all its bytes from the start, and whole once every tensor was written; ``sync`` brings it to
    the disk. Who writes it gives it a name aside and renames it.

    Args:
        path: Path of the file. A file with the same header, left by a killed writer, is continued.
        entries: Every tensor by key, in the order of the file.
        metadata: Text that travels in the header.

    Raises:
        OSError: The file system refuses.
    """

    def __init__(
        self, path: Path, entries: Mapping[str, TensorEntry], metadata: Mapping[str, str] | None = None
    ) -> None:
        self.path = path
        self._entries = dict(entries)
        header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
        place = 0
        self._starts: dict[str, int] = {}
        for key, entry in self._entries.items():
            self._starts[key] = place
            header[key] = {
                "dtype": _FORMAT_DTYPES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [place, place + entry.num_bytes],
            }
            place += entry.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        # Data begins at a multiple of 8, as the format recommends.
        text += b" " * (-len(text) % 8)
        self._first = 8 + len(text)
        self.num_bytes = self._first + place
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        os.ftruncate(self._file, self.num_bytes)
        self._direct = _open_direct(path)
        # A thread that waits for the disk, if a tensor is larger than the buffer.
        self._writing = ThreadPoolExecutor(1)
        write_all(self._file, memoryview(struct.pack("<Q", len(text)) + text), 0)

    def write(self, key: str, tensor: Tensor) -> str:
        """Put a tensor at its place and return the sha256 of its bytes.

        Args:
            key: Key of the tensor.
            tensor: Tensor of the entry's shape and dtype, in host memory.
        """
        entry = self._entries[key]
        assert entry_of(tensor) == entry, f"{key}: {entry_of(tensor)} is not {entry}"
        digest, place = hashlib.sha256(), self._first + self._starts[key]
        # A buffer stands for the file from a multiple of the alignment on, so that most of it goes as it is. While one
        # is written the other is filled.
        buffer, other = _buffers()
        filled = begin = place % _ALIGNMENT
        writing: Future[None] | None = None
        for piece in _pieces_of(tensor) if entry.num_bytes else ():
            if filled + piece.nbytes > len(buffer):
                _wait(writing)
                writing = self._writing.submit(self._put, memoryview(buffer)[begin:filled], place)
                place += filled - begin
                buffer, other = other, buffer
                filled = begin = place % _ALIGNMENT
            into = torch.frombuffer(buffer, dtype=piece.dtype, count=piece.numel(), offset=filled)
            into.view(piece.shape).copy_(piece)
            digest.update(memoryview(buffer)[filled : filled + piece.nbytes])
            filled += piece.nbytes
        _wait(writing)
        self._put(memoryview(buffer)[begin:filled], place)
        return digest.hexdigest()

    def sync(self) -> None:
        """Flush what was written to the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file; what was not synced may come to the disk later."""
        self._writing.shutdown()
        os.close(self._file)
        if self._direct is not None:
            os.close(self._direct)

    def _put(self, data: memoryview, place: int) -> None:
        """Write bytes whose place in memory is as far from the alignment as their place in the file."""
        head = min(-place % _ALIGNMENT, len(data))
        body = (len(data) - head) // _ALIGNMENT * _ALIGNMENT if self._direct is not None else 0
        write_all(self._file, data[:head], place)
        if body:
            try:
                assert self._direct is not None
                write_all(self._direct, data[head : head + body], place + head)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # The file system wants another alignment.
                body = 0
        write_all(self._file, data[head + body :], place + head + body)


def _pieces_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor in row-major pieces; each stays in the processor's cache while it is copied and hashed."""
    if tensor.nbytes <= _PIECE_BYTES:
        yield tensor
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(_PIECE_BYTES // tensor.itemsize)
    elif tensor[0].nbytes > _PIECE_BYTES:
        for row in tensor:
            yield from _pieces_of(row)
    else:
        yield from tensor.split(_PIECE_BYTES // tensor[0].nbytes)


def _open_direct(path: Path) -> int | None:
    """Open the file for writing past the page cache, which costs as much CPU as hashing; None where it cannot."""
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW) if hasattr(os, "O_DIRECT") else None
    except OSError:
        return None


def write_all(file: int, data: memoryview, place: int) -> None:
    """Write bytes at a place of a file."""
    while data:
        written = os.pwrite(file, data[: 1 << 30], place)
        data, place = data[written:], place + written


def _buffers() -> tuple[mmap.mmap, mmap.mmap]:
    """Return this thread's write buffers; they begin at a page, as writing past the page cache needs."""
    if not hasattr(_OF_THREAD, "buffers"):
        # Private, since memory of a map is otherwise shared with processes that are forked.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        _OF_THREAD.buffers = mmap.mmap(-1, _BUFFER_BYTES, flags), mmap.mmap(-1, _BUFFER_BYTES, flags)
    buffers: tuple[mmap.mmap, mmap.mmap] = _OF_THREAD.buffers
    return buffers


def _wait(writing: Future[None] | None) -> None:
    if writing is not None:
        writing.result()


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a host tensor in row-major order, without a copy where it is contiguous."""
    flat = tensor.contiguous()
    # A single element may keep the stride that it had among others.
    flat = flat.as_strided((flat.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy().data if len(flat) else b"")
