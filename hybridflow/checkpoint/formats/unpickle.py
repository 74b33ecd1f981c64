"""Read pickles of other programs without running anything: the one door to ``pickle``, for checkpoints of Megatron.

A pickle names the callables that it wants called. Here a name never imports anything: it stands for one of a few
harmless functions of ours, for an inert object that only keeps what it was given, or for an error.

Three kinds of files come here, and ``torch.load(..., weights_only=True)`` replaces the reader of none:

- ``.metadata`` of ``torch_dist`` is a plain pickle of protocol 4. ``torch.load`` reads archives of protocol 2 only.
- ``*.distcp`` holds many archives in one file. ``torch.load`` maps whole files only, so it would copy each chunk.
- ``common.pt`` and ``model_optim_rng.pt`` are archives that ``torch.load`` can read and map. It compares no checksums,
  follows a storage beyond its member, and hangs on the small pickles that ``pickle_costs`` refuses. It calls functions
  of its own list, such as ``_codecs.encode``, where this reader keeps an inert object.
"""

from __future__ import annotations

import collections
import io
import math
import mmap
import pickle
import reprlib
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from hybridflow.checkpoint.formats.pickle_costs import check_opcodes
from hybridflow.errors import CheckpointError
from hybridflow.foreign import open_regular

_MAX_DIMS = 64
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_STORAGES = {
    "FloatStorage": torch.float32,
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _STORAGES.values()}
# What Megatron's own checkpoints hold beside weights: arguments, and the state of random number generators.
_INERT = {
    *(("argparse", "Namespace"), ("types", "SimpleNamespace"), ("signal", "Signals"), ("_codecs", "encode")),
    *(("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"), ("_io", "BytesIO")),
    *(("numpy", "ndarray"), ("numpy", "dtype"), ("numpy.dtypes", "UInt32DType")),
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    *(("torch.serialization", "_get_layout"), ("torch", "device")),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        )
    ),
    *(
        ("torch.distributed.checkpoint.planner", name)
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}


class _Sealed(type):
    """The class of classes that a pickle cannot change."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError(f"{cls.__name__}.{name} cannot be set")


class Inert(metaclass=_Sealed):
    """An object of a foreign class: its name, and what the pickle gave it. Does nothing.

    Attributes:
        global_name: Name of its class.
        args: What it was made of.
        state: What it was filled with: mostly its attributes by name.
    """

    __slots__ = ("args", "state")
    global_name = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **_: Any) -> Inert:
        """Keep what a pickle calls the class with."""
        self = object.__new__(cls)
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "state", None)
        return self

    def __init__(self, *args: Any, **_: Any) -> None:
        pass

    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError(f"{name} cannot be set")

    def __setstate__(self, state: Any) -> None:
        # The second of two would be a pickle that no program writes.
        if self.state is not None:
            raise ValueError(f"{self.global_name} is filled twice")
        object.__setattr__(self, "state", state)

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Return its attributes by name; none where its state is something else."""
        return self.state if isinstance(self.state, dict) else {}


class StoredTensor:
    """A tensor of a file, which is read when it is asked for.

    Attributes:
        dtype: Number format.
        shape: Sizes.
    """

    __slots__ = ("_archive", "_member", "_offset", "_stride", "dtype", "shape")

    def __init__(
        self, archive: TorchArchive, member: str, dtype: torch.dtype, offset: int, shape: Any, stride: Any
    ) -> None:
        self._archive, self._member, self._offset = archive, member, offset
        self.dtype, self.shape, self._stride = dtype, tuple(shape), tuple(stride)

    def read(self) -> Tensor:
        """Read its values: a view of the file that is not to be written, whose checksum was compared.

        Raises:
            CheckpointError: The bytes are not those that were written.
        """
        flat = self._archive.storage(self._member, self.dtype)
        return torch.as_strided(flat, self.shape, self._stride, self._offset)


class _Storage:
    """A storage that a pickle refers to."""

    __slots__ = ("dtype", "member", "num_elements")

    def __init__(self, member: str, dtype: torch.dtype, num_elements: int) -> None:
        self.member, self.dtype, self.num_elements = member, dtype, num_elements


class _Function:
    """A function that a pickle may call, and not change."""

    __slots__ = ("_call",)
    _call: Callable[..., Any]

    def __init__(self, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_call", call)

    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError(f"{name} cannot be set")

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)


def read_pickle(data: bytes | memoryview, where: str) -> Any:
    """Read a pickle without tensors.

    Args:
        data: The pickle.
        where: What messages call it.

    Raises:
        CheckpointError: It is damaged, too large, or names what is not known here.
    """
    return _load(data, where, None)


def dump(value: Any) -> bytes:
    """Pickle plain values, for programs that read nothing else."""
    return pickle.dumps(value, protocol=2)


def dump_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Pickle a row-major tensor whose values are storage ``0`` of an archive of ``torch.save``."""
    buffer = io.BytesIO()
    pickler = _TensorPickler(buffer, protocol=2)
    pickler.dump(_Described(dtype, shape))
    return buffer.getvalue()


class TorchArchive:
    """What ``torch.save`` wrote, at some place of a file.

    Args:
        file: The file that holds the bytes.
        start: Where it begins.
        stop: Where it ends; None: with the file.

    Raises:
        CheckpointError: It is damaged or of the format of torch before 1.6.
    """

    def __init__(self, file: MappedFile, start: int = 0, stop: int | None = None) -> None:
        self._file, self._start = file, start
        stop = file.num_bytes if stop is None else stop
        if not 0 <= start < stop <= file.num_bytes:
            raise CheckpointError(
                f"{file.path}: has {file.num_bytes} bytes, expected a tensor in bytes {start} to {stop}: the file is "
                "truncated; restore it from a copy"
            )
        self._data = memoryview(file.bytes)[start:stop]
        self._members = self._read_directory()
        self._checked: dict[str, Tensor] = {}

    def load(self) -> Any:
        """Load the object that was saved, its tensors as ``StoredTensor``.

        Raises:
            CheckpointError: It is damaged, or names what is not known here.
        """
        pickles = [name for name in self._members if name.split("/")[1:] == ["data.pkl"]]
        if len(pickles) != 1:
            self._refuse(f"found {len(pickles)} members named data.pkl, expected one")
        order = self._members.get(f"{pickles[0].split('/')[0]}/byteorder")
        if order is not None and bytes(self._slice(order)) != b"little":
            self._refuse("its numbers are not little-endian")
        info = self._members[pickles[0]]
        data = self._slice(info)
        if zlib.crc32(data) != info.CRC:
            self._refuse(f"{pickles[0]} has another checksum than was written")
        return _load(data, str(self._file.path), self._storage_of(pickles[0].split("/")[0]))

    def tensor(self) -> StoredTensor:
        """Return the one tensor that was saved.

        Raises:
            CheckpointError: It is something else.
        """
        found = self.load()
        if not isinstance(found, StoredTensor):
            self._refuse(f"holds a {type(found).__name__}, expected a tensor")
        return found

    def storage(self, member: str, dtype: torch.dtype) -> Tensor:
        """Return a storage as a flat view of the file, its checksum compared once.

        Raises:
            CheckpointError: Its bytes are not those that were written.
        """
        if member not in self._checked:
            info = self._members[member]
            data = self._slice(info)
            if zlib.crc32(data) != info.CRC:
                self._refuse(f"{member} has another checksum than was written")
            self._checked[member] = (
                torch.frombuffer(self._data, dtype=torch.uint8, count=info.file_size, offset=self._place(info))
                if info.file_size
                else torch.empty(0, dtype=torch.uint8)
            )
        flat = self._checked[member]
        if flat.data_ptr() % dtype.itemsize:
            # Files of torch.distributed.checkpoint put one archive behind the other wherever it ends.
            flat = flat.clone()
        return flat.view(dtype)

    def _storage_of(self, root: str) -> Callable[[Any], _Storage]:
        def load(key: Any) -> _Storage:
            kind, storage, name, _, count = key
            dtype = storage() if isinstance(storage, _Function) else None
            member = f"{root}/data/{name}" if isinstance(name, str) else ""
            if kind != "storage" or not isinstance(dtype, torch.dtype) or member not in self._members:
                raise ValueError(f"storage {reprlib.repr(key)} is not one of the file")
            if type(count) is not int or self._members[member].file_size != count * dtype.itemsize:
                raise ValueError(f"{member} has {self._members[member].file_size} bytes, expected {count} x {dtype}")
            return _Storage(member, dtype, count)

        def tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> StoredTensor:
            if not isinstance(storage, _Storage):
                raise ValueError("a tensor without a storage")
            numbers = [offset, *shape, *stride]
            are_sizes = all(type(number) is int and 0 <= number < 1 << 63 for number in numbers)
            if not are_sizes or len(shape) != len(stride) or len(shape) > _MAX_DIMS:
                raise ValueError(f"a tensor of shape {shape!r:.24} with strides {stride!r:.24}")
            last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
            # No more elements than are stored, else a small file could ask for any amount of memory.
            if 0 not in shape and max(last + 1, math.prod(shape)) > storage.num_elements:
                raise ValueError(f"a tensor of shape {tuple(shape)} reaches beyond its storage {storage.member}")
            return StoredTensor(self, storage.member, storage.dtype, offset, shape, stride)

        load.tensor = tensor  # type: ignore[attr-defined]
        return load

    def _read_directory(self) -> dict[str, zipfile.ZipInfo]:
        if bytes(self._data[:2]) != b"PK":
            self._refuse("is not a zip archive; files of torch before 1.6 are not read: load and save it with a newer")
        try:
            with zipfile.ZipFile(_Reader(self._data)) as archive:
                infos = archive.infolist()
        except (zipfile.BadZipFile, OSError, ValueError, RuntimeError, struct.error, NotImplementedError) as error:
            self._refuse(f"its directory cannot be read ({error})")
        for info in infos:
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & 1:
                self._refuse(f"{info.filename} is compressed or encrypted")
            place = self._place(info)
            if place + info.file_size > len(self._data):
                self._refuse(f"{info.filename} reaches beyond the file")
        if sum(info.file_size for info in infos) > len(self._data):
            self._refuse("two members share bytes")
        members = {info.filename: info for info in infos}
        if len(members) != len(infos):
            self._refuse("two members have one name")
        return members

    def _place(self, info: zipfile.ZipInfo) -> int:
        head = self._data[info.header_offset : info.header_offset + _LOCAL_HEADER.size]
        if info.header_offset < 0 or len(head) < _LOCAL_HEADER.size or bytes(head[:4]) != b"PK\x03\x04":
            self._refuse(f"{info.filename} is not where the directory says")
        _, name, extra = _LOCAL_HEADER.unpack(head)
        return int(info.header_offset + _LOCAL_HEADER.size + name + extra)

    def _slice(self, info: zipfile.ZipInfo) -> memoryview:
        place = self._place(info)
        return self._data[place : place + info.file_size]

    def _refuse(self, complaint: str) -> NoReturn:
        raise CheckpointError(f"{self._file.path}: as an archive of torch.save: {complaint}; restore it from a copy")


class MappedFile:
    """A file whose bytes are read where they are used.

    Attributes:
        path: The file.
        num_bytes: Its size.
        bytes: A private map of it.

    Raises:
        CheckpointError: It is missing or empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_regular(path) as handle:
                # Private, since torch wants memory that could be written.
                self.bytes = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}; restore it from a copy") from error
        self.num_bytes = len(self.bytes)

    def release(self) -> None:
        """Give back the memory of what was read so far; what is read again comes from the file again."""
        self.bytes.madvise(mmap.MADV_DONTNEED)


class _Reader(io.RawIOBase):
    """Bytes in memory as a file, without a copy of all of them."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        if at < 0:
            raise OSError("before the beginning")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        # The base class makes room for whatever a damaged directory says.
        stop = len(self._data) if size < 0 else min(self._at + size, len(self._data))
        part = bytes(self._data[self._at : stop])
        self._at = max(self._at, stop)
        return part

    def readinto(self, buffer: Any) -> int:
        part = self._data[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


class _Described:
    """A tensor without values, which is pickled as torch does."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape

    def __reduce__(self) -> tuple[Any, ...]:
        strides = tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))
        storage = _Storage("0", self.dtype, math.prod(self.shape))
        return torch._utils._rebuild_tensor_v2, (storage, 0, self.shape, strides, False, collections.OrderedDict())


class _TensorPickler(pickle.Pickler):
    """Refers to storages instead of holding them."""

    def persistent_id(self, item: Any) -> Any:
        if not isinstance(item, _Storage):
            return None
        name = next(name for name, dtype in _STORAGES.items() if dtype == item.dtype)
        return "storage", getattr(torch, name), item.member, "cpu", item.num_elements


class _Unpickler(pickle.Unpickler):
    """Gives harmless things for names, afresh for each pickle."""

    def __init__(self, data: bytes | memoryview, storage: Callable[[Any], _Storage] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._storage = storage
        self._inert: dict[tuple[str, str], type[Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return _Function(lambda: collections.OrderedDict())
        if module == "torch" and name in _STORAGES:
            return _Function(lambda: _STORAGES[name])
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) == ("torch", "Size"):
            return _Function(_size)
        if self._storage is not None and module == "torch._utils":
            if name == "_rebuild_tensor_v2":
                return _Function(self._storage.tensor)  # type: ignore[attr-defined]
            if name == "_rebuild_parameter":
                return _Function(_parameter)
        if (module, name) in _INERT or module.split(".")[0] == "megatron":
            if (module, name) not in self._inert:
                content = {"__slots__": (), "global_name": f"{module}.{name}"}
                self._inert[module, name] = _Sealed(name, (Inert,), content)  # type: ignore[assignment]
            return self._inert[module, name]
        if module in ("__builtin__", "builtins") and name == "getattr":
            return _Function(_member)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not allowed")

    def persistent_load(self, key: Any) -> _Storage:
        if self._storage is None:
            raise pickle.UnpicklingError("it refers to a storage, where none is")
        return self._storage(key)


def _size(values: Any) -> tuple[Any, ...]:
    """Return the sizes of a ``torch.Size``, which are a tuple in every pickle of torch."""
    if not isinstance(values, tuple):
        raise pickle.UnpicklingError(f"a torch.Size of a {type(values).__name__}, expected a tuple")
    return values


def _parameter(data: Any, *_: Any) -> StoredTensor:
    """Return the tensor that a parameter has."""
    if not isinstance(data, StoredTensor):
        raise pickle.UnpicklingError(f"a parameter of a {type(data).__name__}, expected a tensor")
    return data


def _member(owner: Any, name: Any) -> Inert:
    """Return a member of an enumeration, which Python 3.11 before 3.11.4 pickles as its attribute."""
    if not isinstance(owner, _Sealed) or not isinstance(name, str):
        raise pickle.UnpicklingError("it names builtins.getattr, which is not allowed but for members of enumerations")
    member: Inert = owner(name)
    return member


def _load(data: bytes | memoryview, where: str, storage: Callable[[Any], _Storage] | None) -> Any:
    try:
        check_opcodes(data)
        return _Unpickler(data, storage).load()
    except Exception as error:  # whatever a hostile pickle makes the library raise
        raise CheckpointError(
            f"{where}: its pickle is refused: {error!s:.300}; only weights and arguments as Megatron saves them are "
            "read: take a file whose origin is known"
        ) from error
