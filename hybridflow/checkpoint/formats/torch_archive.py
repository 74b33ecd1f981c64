"""Archives of ``torch.save`` with one tensor, whose sizes are known before its values, and files of many of them."""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from hybridflow.checkpoint.formats.unpickle import dump_tensor
from hybridflow.checkpoint.manifest import TensorEntry
from hybridflow.checkpoint.tensor_file import bytes_of, entry_of, write_all
from hybridflow.observe.files import sync_path
from hybridflow.reshard.views import TORCH_DTYPES

ALIGNMENT = 64
"""Values begin at multiples of it, as torch has them."""

_LOCAL, _CENTRAL, _END = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I"), struct.Struct("<4s4H2IH")
_PADDING_ID = b"FB"
# The first day of the calendar of zip: the same values give the same bytes.
_DATE = 1 << 5 | 1


class Archive:
    """Where everything lies in an archive.

    Args:
        pickle: What it holds, as ``torch.save`` pickles it.
        num_data_bytes: Bytes of the one storage that the pickle refers to; None: it refers to none.

    Attributes:
        num_bytes: Its size.
    """

    def __init__(self, pickle: bytes, num_data_bytes: int | None) -> None:
        assert num_data_bytes is None or num_data_bytes < 1 << 32, "larger members need another form of zip"
        self._members = {"archive/data.pkl": pickle, "archive/byteorder": b"little", "archive/version": b"3\n"}
        self._num_data_bytes = num_data_bytes
        head, tail = self.around(0)
        self.num_bytes = len(head) + (num_data_bytes or 0) + len(tail)

    def around(self, data_crc: int) -> tuple[bytes, bytes]:
        """Return the bytes before and behind the values, whose CRC-32 is given."""
        head, directory, count = b"", b"", 0
        for name, content in self._members.items():
            local, central = _headers(name, len(head), zlib.crc32(content), len(content), b"")
            head, directory, count = head + local + content, directory + central, count + 1
        if self._num_data_bytes is not None:
            name = "archive/data/0"
            room = -(len(head) + _LOCAL.size + len(name) + 4) % ALIGNMENT
            extra = _PADDING_ID + struct.pack("<H", room) + b"Z" * room
            local, central = _headers(name, len(head), data_crc, self._num_data_bytes, extra)
            head, directory, count = head + local, directory + central, count + 1
        start = len(head) + (self._num_data_bytes or 0)
        end = _END.pack(b"PK\x05\x06", 0, 0, count, count, len(directory), start, 0)
        return head, directory + end


def tensor_archive(entry: TensorEntry) -> Archive:
    """Return the archive of a tensor."""
    return Archive(dump_tensor(TORCH_DTYPES[entry.dtype], entry.shape), entry.num_bytes)


def object_archive(pickle: bytes) -> bytes:
    """Return a whole archive without tensors."""
    return b"".join(Archive(pickle, None).around(0))


def places(entries: Mapping[str, TensorEntry]) -> tuple[dict[str, tuple[int, Archive]], int]:
    """Return where each archive begins in a file of them, and the size of the file."""
    found, at = {}, 0
    for key, entry in entries.items():
        archive = tensor_archive(entry)
        found[key] = at, archive
        at += -(-archive.num_bytes // ALIGNMENT) * ALIGNMENT
    return found, at


class ArchivesWriter:
    """A file of archives of one tensor each, in any order, see ``source.Writer``.

    Args:
        path: Path of the file. A file that a killed writer left is continued.
        entries: Every tensor by key, in the order of the file.

    Raises:
        OSError: The file system refuses.
    """

    def __init__(self, path: Path, entries: Mapping[str, TensorEntry]) -> None:
        self.path, self._entries = path, entries
        self._places, self.num_bytes = places(entries)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        os.ftruncate(self._file, self.num_bytes)

    def write(self, key: str, tensor: Tensor) -> str:
        """See ``Writer``."""
        entry = self._entries[key]
        assert entry_of(tensor) == entry, f"{key}: {entry_of(tensor)} is not {entry}"
        start, archive = self._places[key]
        data = bytes_of(tensor)
        head, tail = archive.around(zlib.crc32(data))
        for part in (memoryview(head), data, memoryview(tail)):
            write_all(self._file, part, start)
            start += len(part)
        return hashlib.sha256(data).hexdigest()

    def sync(self) -> None:
        """See ``Writer``; of the directory too, which may be one below that of the other files."""
        os.fsync(self._file)
        sync_path(self.path.parent)

    def close(self) -> None:
        """See ``Writer``."""
        os.close(self._file)


def _headers(name: str, start: int, crc: int, size: int, extra: bytes) -> tuple[bytes, bytes]:
    """Return a member's header before its content, and its header in the directory."""
    text = name.encode()
    local = _LOCAL.pack(b"PK\x03\x04", 20, 0, 0, 0, _DATE, crc, size, size, len(text), len(extra)) + text + extra
    sizes = crc, size, size, len(text), 0, 0, 0, 0, 0, start
    return local, _CENTRAL.pack(b"PK\x01\x02", 20, 20, 0, 0, 0, _DATE, *sizes) + text
