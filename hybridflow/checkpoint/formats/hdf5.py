"""Checkpoints and arrays in HDF5 files that plain h5py reads.

    OUT.h5                        everything in one file; or
    OUT/model.h5                  virtual datasets over the files beside it, by relative names
    OUT/tp00-pp00.h5 …            what each place of a layout holds

A tensor ``decoder.final_layernorm.weight`` is the dataset ``/weights/decoder/final_layernorm/weight``, chunked, every
chunk with HDF5's own checksum (fletcher32), with its sha256 as an attribute. Small files that travel along are datasets
of bytes in ``/assets``. bf16 is a number format of 16 bits that HDF5 describes itself, so h5py gives float32.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridflow.checkpoint.formats.sharded import ShardedTarget
from hybridflow.checkpoint.formats.source import Source, Target, check_shapes
from hybridflow.checkpoint.manifest import TensorEntry, overlap, versions
from hybridflow.checkpoint.tensor_file import TORCH_DTYPES, bytes_of, entry_of
from hybridflow.data.hdf5 import h5py, is_own, item_in, open_hdf5, rows_at_once, try_files
from hybridflow.errors import CheckpointError, ConfigError, HybridflowError
from hybridflow.families.assets import ASSETS, identity_of
from hybridflow.families.model import ModelConfig
from hybridflow.foreign import MAX_SMALL_BYTES
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.observe.files import sync_path
from hybridflow.reshard.spec import Box, DType, num_elements
from hybridflow.sections import read_section, to_dict

MASTER = "model.h5"
MAGIC = b"\x89HDF\r\n\x1a\n"
FORMAT = "hybridflow-hdf5-1"
_PART_FORMAT = "hybridflow-hdf5-part-1"
_WEIGHTS, _ASSETS = "weights", "assets"
_CHUNK_BYTES, _MAX_CHUNK_BYTES = 2 << 20, 16 << 20
# Texts of another program may be compressed.
_MAX_GROWTH = 50
# Whole chunks are written: the cache need not hold more than one or two.
_CACHE_BYTES = 8 << 20
_SYNC_BYTES = 256 << 20
"""So much is written before the disk is given it, while more is written."""


def _bfloat16() -> Any:
    """Return the HDF5 type of sign, 8 bits of exponent, 7 of mantissa: the upper half of float32."""
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_size(2)
    kind.set_ebias(127)
    return kind


_TYPES: dict[DType, Any] = {"fp32": h5py.h5t.IEEE_F32LE, "bf16": _bfloat16(), "fp16": h5py.h5t.IEEE_F16LE}


class _Shard(NamedTuple):
    """A dataset that holds a box of a tensor."""

    file: str
    dataset: str
    box: Box
    sha256: str


class HDF5Source(Source):
    """An HDF5 file of ours, or a directory of them, see ``source.Source``.

    Checksums of HDF5 and the sha256 of every dataset are compared when it is read.

    Raises:
        CheckpointError: A file is missing, damaged, foreign, or holds other tensors than its settings say.
    """

    format = "hdf5"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder, self._master = (path, path / MASTER) if path.is_dir() else (path.parent, path)
        self._files: dict[str, h5py.File] = {}
        with _reading(self._master):
            file = self._open(self._master.name, FORMAT)
            self.family = _text(file, "family") or None
            self.layout = _text(file, "layout") or None
            self.has_value_head = bool(file.attrs["has_value_head"])
            self.model = read_section(ModelConfig, json.loads(_text(file, "model")), source=f"{self._master}: model")
            datasets = self._datasets(file)
        self.tensors: Mapping[str, TensorEntry] = self._check(datasets)
        self._shards = {name: self._shards_of(name, datasets[name]) for name in self.tensors}

    def read(self, tensor: str) -> Tensor:
        """See ``Source``."""
        entry, shards = self.tensors[tensor], self._shards[tensor]
        if len(shards) == 1:
            return self._values(shards[0], entry.dtype)
        files = {self._folder / shard.file for shard in shards}
        with _reading(self._master, _dataset(tensor)):
            if entry.num_bytes > sum(file.stat().st_size for file in files if file.is_file()):
                raise ValueError(f"its {entry.num_bytes} bytes are more than the files have that it lies in")
        found = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
        for shard in shards:
            found[tuple(slice(*span) for span in shard.box)] = self._values(shard, entry.dtype)
        return found

    def assets(self) -> dict[str, bytes]:
        """See ``Source``."""
        found = {}
        with _reading(self._master, _ASSETS):
            file = self._open(self._master.name, FORMAT)
            held = _group(file, _ASSETS)
            for name in sorted(set(held) & set(ASSETS)):
                dataset = item_in(held, name)
                if not is_own(dataset) or dataset.nbytes > MAX_SMALL_BYTES:
                    raise ValueError(f"{name} is no small dataset of this file")
                if dataset.nbytes:
                    _check_storage(dataset, dataset.nbytes, self._master.stat().st_size)
                content = dataset[()].tobytes()
                if hashlib.sha256(content).hexdigest() != _text(dataset, "sha256"):
                    raise ValueError(f"{name} has another sha256 than was written")
                found[name] = content
        return found

    def identity(self) -> str:
        """See ``Source``."""
        files = {shard.file for shards in self._shards.values() for shard in shards}
        return identity_of([self._master, *(self._folder / name for name in sorted(files - {self._master.name}))])

    def _open(self, name: str, format: str) -> h5py.File:
        if name not in self._files:
            path = self._folder / name
            if not path.is_file():
                raise CheckpointError(
                    f"{path}: missing; restore it from a copy: h5py would read what it holds as zeros"
                )
            try_files([path])
            # Nothing writes here, and not every file system can lock.
            file = open_hdf5(path, locking=False, rdcc_nbytes=_CACHE_BYTES)
            found = _text(file, "format") if "format" in file.attrs else "none"
            if found != format:
                file.close()
                raise ValueError(f"found format {found!r}, expected {format!r}; give a file that hybridflow wrote")
            self._files[name] = file
        return self._files[name]

    def _datasets(self, file: h5py.File) -> dict[str, h5py.Dataset]:
        """Return the datasets by logical name. Links are not followed, so what they stand for is missing."""
        found: dict[str, h5py.Dataset] = {}

        def visit(name: str, item: object) -> None:
            if isinstance(item, h5py.Dataset):
                # First of all: to ask for its shape may open these files.
                with _reading(self._master, f"/{_WEIGHTS}/{name}"):
                    self._check_sources(item)
                found[name.replace("/", ".")] = item

        _group(file, _WEIGHTS).visititems(visit)
        return found

    def _check_sources(self, dataset: h5py.Dataset) -> None:
        """Refuse a virtual dataset over anything but files beside this one."""
        for source in dataset.virtual_sources() if dataset.is_virtual else ():
            name = source.file_name
            # With a percent sign the library counts files up.
            if Path(name).name != name or name == self._master.name or "%" in name:
                raise ValueError(f"it lies in {name!r}, expected a file beside it")
            if (self._folder / name).exists() and not (self._folder / name).is_file():
                raise ValueError(f"it lies in {name!r}, which is not a regular file")

    def _check(self, datasets: Mapping[str, h5py.Dataset]) -> dict[str, TensorEntry]:
        """Check that the tensors are those of the settings."""
        shapes = check_shapes(
            {name: dataset.shape for name, dataset in datasets.items()},
            self.model,
            has_value_head=self.has_value_head,
            where=str(self._master),
            place=_dataset,
            kind="dataset",
            hint=" (links are not followed)",
        )
        entries = {}
        for name, shape in shapes.items():
            with _reading(self._master, _dataset(name)):
                entries[name] = TensorEntry(_dtype_of(datasets[name]), shape)
        return entries

    def _shards_of(self, name: str, dataset: h5py.Dataset) -> list[_Shard]:
        """Return where a tensor lies: its dataset, or those that a virtual one names."""
        with _reading(self._master, _dataset(name)):
            whole = tuple((0, size) for size in dataset.shape)
            if not dataset.is_virtual:
                return [_Shard(self._master.name, dataset.name, whole, _text(dataset, "sha256"))]
            sources, hashes = dataset.virtual_sources(), json.loads(_text(dataset, "sha256"))
            shards = []
            for source, sha256 in zip(sources, hashes, strict=True):
                low, high = source.vspace.get_select_bounds()
                box = tuple((int(start), int(stop) + 1) for start, stop in zip(low, high, strict=True))
                if num_elements(box) != source.vspace.get_select_npoints() or source.dset_name != _dataset(name):
                    raise ValueError(f"it is made of {source.dset_name!r} by another selection than a box")
                shards.append(_Shard(source.file_name, source.dset_name, box, sha256))
            boxes = sorted(shard.box for shard in shards)
            if sum(map(num_elements, boxes)) != math.prod(dataset.shape) or overlap(boxes) is not None:
                raise ValueError(f"its parts {boxes} do not make {list(dataset.shape)}")
            return shards

    def _values(self, shard: _Shard, dtype: DType) -> Tensor:
        """Return a dataset as memory, checked."""
        path = self._folder / shard.file
        with _reading(path, shard.dataset):
            file = self._open(shard.file, FORMAT if shard.file == self._master.name else _PART_FORMAT)
            dataset = item_in(file, shard.dataset)
            shape = tuple(stop - start for start, stop in shard.box)
            if not isinstance(dataset, h5py.Dataset) or dataset.is_virtual:
                raise ValueError("is not a dataset of this file itself")
            if dataset.shape != shape or _dtype_of(dataset) != dtype:
                raise ValueError(f"expected a dataset of {dtype} {list(shape)}")
            _check_storage(dataset, TensorEntry(dtype, shape).num_bytes, path.stat().st_size)
            values = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
            try:
                dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, _as_integers(values), mtype=_TYPES[dtype])
            except OSError as error:
                raise ValueError(f"a chunk cannot be read or fails its checksum ({error})") from error
            found = hashlib.sha256(bytes_of(values)).hexdigest()
            if found != shard.sha256:
                raise ValueError(f"found sha256 {found}, expected {shard.sha256}")
        return values


class HDF5Target(Target):
    """An HDF5 file, or one for each place of a layout and one that joins them, see ``source.Target``.

    Args:
        source: What is to be written.
        layout: How it is cut; None: one file holds everything.
        dtype: Number format to write; None: each tensor's own.

    Raises:
        LayoutError: The layout does not cut the model.
        ReshardError: The same, found at one tensor.
    """

    can_go_on = False

    def __init__(self, source: Source, *, layout: ParallelLayout | None = None, dtype: DType | None = None) -> None:
        self._source, self._layout = source, layout
        self.is_single_file = layout is None
        # A file holds what a model directory of ours would hold in that layout.
        self._cut = ShardedTarget(source, ParallelLayout() if layout is None else layout, dtype=dtype)
        files: dict[str, dict[str, TensorEntry]] = defaultdict(dict)
        for name in source.tensors:
            for file, key, _ in self._cut.boxes(name):
                files[self._file(file)][key] = self._cut.files[file][key]
        self.files: Mapping[str, Mapping[str, TensorEntry]] = dict(sorted(files.items()))

    def places(self, tensor: str) -> list[tuple[str, str]]:
        """See ``Target``."""
        return [(self._file(file), key) for file, key in self._cut.places(tensor)]

    def parts(self, tensor: str, values: Tensor) -> list[Tensor]:
        """See ``Target``."""
        return self._cut.parts(tensor, values)

    def open(self, path: Path, file: str) -> HDF5Writer:
        """See ``Target``."""
        writer = HDF5Writer(path, self.files[file])
        with _writing(path):
            if self._layout is None:
                self._describe(writer.file)
            else:
                writer.file.attrs["format"] = _PART_FORMAT
        return writer

    def finish(self, folder: Path, hashes: Mapping[str, Mapping[str, str]]) -> None:
        """See ``Target``."""
        if self._layout is None:
            return
        path = folder / MASTER
        with _writing(path):
            # The newest form of the format is the one that keeps many virtual datasets small.
            with h5py.File(path, "w", libver="v110") as file:
                self._describe(file)
                for name, entry in self._cut.tensors.items():
                    self._join(file, name, entry, hashes)
            sync_path(path)

    def _join(self, file: h5py.File, name: str, entry: TensorEntry, hashes: Mapping[str, Mapping[str, str]]) -> None:
        """Make a virtual dataset over the parts of a tensor."""
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        space = h5py.h5s.create_simple(entry.shape)
        found = []
        for part_file, key, box in self._cut.boxes(name):
            sizes = tuple(stop - start for start, stop in box)
            space.select_hyperslab(tuple(start for start, _ in box), (1,) * len(box), block=sizes)
            name_bytes = self._file(part_file).encode(), _dataset(key).encode()
            creation.set_virtual(space, *name_bytes, h5py.h5s.create_simple(sizes))
            found.append(hashes[self._file(part_file)][key])
        space.select_all()
        dataset = h5py.h5d.create(
            file.id, _dataset(name).encode(), _TYPES[entry.dtype], space, creation, _making_groups()
        )
        attributes = h5py.Dataset(dataset).attrs
        attributes["dtype"], attributes["sha256"] = entry.dtype, json.dumps(found)

    def _file(self, file: str) -> str:
        """Return the name of the file for one of a model directory."""
        return MASTER if self._layout is None else f"{Path(file).stem}.h5"

    def _describe(self, file: h5py.File) -> None:
        """Write settings as attributes, and the files that travel along."""
        file.attrs["format"] = FORMAT
        file.attrs["model"] = json.dumps(to_dict(self._cut.model))
        file.attrs["family"] = self._source.family or ""
        file.attrs["has_value_head"] = self._source.has_value_head
        file.attrs["layout"] = "" if self._layout is None else str(self._layout)
        file.attrs["versions"] = json.dumps(versions())
        held = file.create_group(_ASSETS)
        for name, content in self._source.assets().items():
            data = np.frombuffer(content, dtype=np.uint8)
            chunks = (min(len(data), _CHUNK_BYTES),) if len(data) else None
            dataset = held.create_dataset(name, data=data, chunks=chunks, fletcher32=chunks is not None)
            dataset.attrs["sha256"] = hashlib.sha256(content).hexdigest()


class HDF5Writer:
    """A file whose datasets are written one by one, see ``source.Writer``.

    Attributes:
        path: The file.
        file: Its handle.
    """

    def __init__(self, path: Path, entries: Mapping[str, TensorEntry]) -> None:
        self.path, self._entries = path, entries
        # Threads that hash and that wait for the disk while HDF5 writes.
        self._meanwhile = ThreadPoolExecutor(2)
        self._syncing: Future[None] | None = None
        self._unsynced_bytes = 0
        with _writing(path):
            self.file = h5py.File(path, "w", libver="v110", rdcc_nbytes=_CACHE_BYTES)
            self.file.create_group(_WEIGHTS)

    def write(self, key: str, tensor: Tensor) -> str:
        """See ``Writer``."""
        entry = self._entries[key]
        assert entry_of(tensor) == entry, f"{key}: {entry_of(tensor)} is not {entry}"
        tensor = tensor.contiguous()
        hashing = _hash(tensor, self._meanwhile)
        kind = _TYPES[entry.dtype]
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_chunk(_chunk(entry))
        creation.set_fletcher32()
        creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        with _writing(self.path):
            space = h5py.h5s.create_simple(entry.shape)
            name = _dataset(key).encode()
            dataset = h5py.h5d.create(self.file.id, name, kind, space, creation, _making_groups())
            dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, _as_integers(tensor), mtype=kind)
            attributes = h5py.Dataset(dataset).attrs
            attributes["dtype"], attributes["sha256"] = entry.dtype, hashing.result()
        self._unsynced_bytes += entry.num_bytes
        if self._unsynced_bytes >= _SYNC_BYTES and (self._syncing is None or self._syncing.done()):
            self._wait_for_sync()
            self._syncing, self._unsynced_bytes = self._meanwhile.submit(sync_path, self.path), 0
        return hashing.result()

    def sync(self) -> None:
        """See ``Writer``."""
        self._wait_for_sync()
        with _writing(self.path):
            self.file.flush()
        sync_path(self.path)

    def close(self) -> None:
        """See ``Writer``."""
        self._meanwhile.shutdown()
        with _writing(self.path):
            self.file.close()

    def _wait_for_sync(self) -> None:
        if self._syncing is not None:
            self._syncing.result()


def _hash(tensor: Tensor, meanwhile: ThreadPoolExecutor) -> Future[str]:
    """Return the sha256 of a tensor's bytes, taken while it is written."""
    data, has_begun = bytes_of(tensor), threading.Event()

    def digest() -> str:
        has_begun.set()
        return hashlib.sha256(data).hexdigest()

    hashing = meanwhile.submit(digest)
    # HDF5 holds the interpreter while it writes: the other thread could not begin then.
    has_begun.wait()
    return hashing


def write_arrays(path: Path, arrays: Mapping[str, Any], form: str) -> None:
    """Write arrays of one dim, checksummed, as a file that is there whole or not at all.

    Args:
        path: Path of the file; what is there is replaced.
        arrays: Name -> array of numpy, at least one element.
        form: What kind of file it is, for ``lengths_of_arrays``.

    Raises:
        OSError: The file system refuses; ``path`` is as it was.
    """

    def fill(file: h5py.File) -> None:
        for name, array in arrays.items():
            chunks = (min(len(array), _CHUNK_BYTES // array.dtype.itemsize),)
            file.create_dataset(name, data=array, chunks=chunks, fletcher32=True)

    _replace(path, form, fill)


def write_rows(path: Path, texts: Mapping[str, Sequence[str]], arrays: Mapping[str, Any], form: str) -> None:
    """Write texts and arrays of one dim, of any length, as a file that is there whole or not at all.

    Args:
        path: Path of the file; what is there is replaced.
        texts: Name -> texts, kept as strings of variable length in UTF-8.
        arrays: Name -> array of numpy.
        form: What kind of file it is.

    Raises:
        OSError: The file system refuses; ``path`` is as it was.
    """

    def fill(file: h5py.File) -> None:
        for name, values in texts.items():
            # HDF5's strings of variable length end at a zero.
            clean = [value.replace("\0", "\ufffd").encode("utf-8", "replace") for value in values]
            file.create_dataset(name, data=clean, shape=(len(clean),), dtype=h5py.string_dtype())
        for name, array in arrays.items():
            file.create_dataset(name, data=array)

    _replace(path, form, fill)


def read_texts(path: Path, name: str) -> list[str]:
    """Read the texts of a dataset of strings.

    Raises:
        CheckpointError: There is no such dataset, or it cannot be read.
    """
    with _reading(path, name):
        try_files([path])
    with _reading(path, name), open_hdf5(path) as file:
        dataset = item_in(file, name)
        if not is_own(dataset) or dataset.ndim != 1 or h5py.check_string_dtype(dataset.dtype) is None:
            raise ValueError(f"has no dataset {name!r} of strings in this file")
        return list(_texts(dataset, path.stat().st_size))


def _texts(dataset: h5py.Dataset, file_bytes: int) -> Iterator[str]:
    """Yield texts. Refuse more than a file of that size can hold, since many of them may be one and the same."""
    left = file_bytes * _MAX_GROWTH
    at_once = rows_at_once({"texts": dataset}, file_bytes, file_bytes)
    for first in range(0, len(dataset), at_once):
        for text in dataset.asstr()[first : first + at_once]:
            left -= len(text)
            if left < 0:
                raise ValueError(f"its texts have more than {_MAX_GROWTH} times the {file_bytes} bytes of the file")
            yield str(text)


def join_arrays(path: Path, parts: Mapping[str, Mapping[str, int]], dtypes: Mapping[str, Any], form: str) -> None:
    """Write a file whose arrays are those of other files one behind the other, by reference.

    What is missing when it is read is NaN, or -1.

    Args:
        path: Path of the file; what is there is replaced.
        parts: File, relative to ``path``'s directory -> what ``lengths_of_arrays`` gave for it, in order.
        dtypes: Name -> type of numpy, of every array.
        form: What kind of file it is.

    Raises:
        OSError: The file system refuses; ``path`` is as it was.
    """

    def fill(file: h5py.File) -> None:
        file.attrs["parts"] = json.dumps(list(parts))
        for name, dtype in dtypes.items():
            layout = h5py.VirtualLayout((sum(lengths[name] for lengths in parts.values()),), dtype)
            end = 0
            for part, lengths in parts.items():
                start, end = end, end + lengths[name]
                if end > start:
                    layout[start:end] = h5py.VirtualSource(part, name, (lengths[name],), dtype)
            missing = np.nan if np.dtype(dtype).kind == "f" else -1
            file.create_virtual_dataset(name, layout, fillvalue=missing)

    _replace(path, form, fill)


def lengths_of_arrays(path: Path, dtypes: Mapping[str, Any], form: str) -> dict[str, int]:
    """Return the length of each array of a file of ``write_arrays``.

    Raises:
        CheckpointError: It is no such file, or is damaged where that can be told without reading the numbers.
    """
    with _reading(path), open_hdf5(path) as file:
        if _text(file, "format") != form:
            raise ValueError(f"is of the format {_text(file, 'format')}, expected {form}")
        for name, dtype in dtypes.items():
            array = item_in(file, name)
            if not is_own(array) or array.ndim != 1 or array.dtype != dtype:
                raise ValueError(f"has no {name} of one dim and type {np.dtype(dtype)} in this file")
            _check_storage(array, array.nbytes, path.stat().st_size)
        return {name: len(file[name]) for name in dtypes}


def read_arrays(path: Path, dtypes: Mapping[str, Any], form: str) -> dict[str, Any]:
    """Name -> array of numpy, of a file of ``write_arrays``.

    Raises:
        CheckpointError: It is no such file, or is damaged.
    """
    lengths_of_arrays(path, dtypes, form)
    with _reading(path), open_hdf5(path) as file:
        return {name: file[name][:] for name in dtypes}


def _replace(path: Path, form: str, fill: Callable[[h5py.File], None]) -> None:
    aside = path.with_name(f".{path.name}.tmp")
    aside.unlink(missing_ok=True)
    try:
        with _writing(path):
            with h5py.File(aside, "x", libver="v110") as file:
                file.attrs["format"] = form
                fill(file)
            sync_path(aside)
            aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def is_hdf5(path: Path) -> bool:
    """Return whether a file, or the one that joins a directory's files, is HDF5."""
    path = path / MASTER if path.is_dir() else path
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _dataset(name: str) -> str:
    return f"/{_WEIGHTS}/{name.replace('.', '/')}"


def _making_groups() -> Any:
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    return links


def _chunk(entry: TensorEntry) -> tuple[int, ...]:
    """Return a chunk shape: whole rows of about 2 MiB, or a part of one longer row."""
    left, sizes = _CHUNK_BYTES // TORCH_DTYPES[entry.dtype].itemsize, []
    for size in reversed(entry.shape):
        sizes.append(max(1, min(size, left)))
        left //= sizes[-1]
    return tuple(reversed(sizes))


def _as_integers(tensor: Tensor) -> Any:
    """Return the same memory as an integer array, since numpy has no bfloat16; HDF5 gets the true type."""
    return tensor.view(torch.int32 if tensor.dtype.itemsize == 4 else torch.int16).numpy()


def _group(file: h5py.File, name: str) -> h5py.Group:
    group = item_in(file, name)
    if not isinstance(group, h5py.Group):
        raise ValueError(f"has no group /{name}")
    return group


def _text(item: Any, name: str) -> str:
    value = item.attrs[name]
    if not isinstance(value, str):
        raise ValueError(f"attribute {name} is no text")
    return value


def _dtype_of(dataset: h5py.Dataset) -> DType:
    kind = dataset.id.get_type()
    for name, known in _TYPES.items():
        if kind.equal(known):
            return name
    raise ValueError(f"is of type {dataset.dtype}, expected one of {', '.join(_TYPES)}")


def _check_storage(dataset: h5py.Dataset, num_bytes: int, file_bytes: int) -> None:
    """Refuse storage that we do not write: data in other files, filters but the checksum, holes, and shared chunks."""
    creation = dataset.id.get_create_plist()
    filters = [creation.get_filter(index)[0] for index in range(creation.get_nfilters())]
    if not is_own(dataset) or dataset.chunks is None:
        raise ValueError("does not lie in chunks of this file")
    if filters != [h5py.h5z.FILTER_FLETCHER32]:
        raise ValueError(f"has the filters {filters}, expected the checksum fletcher32 alone")
    stored = dataset.id.get_storage_size()
    if not num_bytes <= stored <= file_bytes:
        raise ValueError(f"has {stored} bytes, expected {num_bytes} of the {file_bytes} of the file")
    if math.prod(dataset.chunks) * dataset.dtype.itemsize > _MAX_CHUNK_BYTES:
        raise ValueError(f"has chunks of {dataset.chunks}, expected at most {_MAX_CHUNK_BYTES} bytes")


@contextmanager
def _reading(path: Path, dataset: str = "") -> Iterator[None]:
    """Turn any error of the library or a check into an error that names the place."""
    try:
        yield
    except (HybridflowError, OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = (
            str(error) if isinstance(error, (ConfigError, ValueError, OSError)) else f"{type(error).__name__}: {error}"
        )
        where = f"{path}: {dataset}" if dataset else str(path)
        raise CheckpointError(
            f"{where}: cannot be read as HDF5 of hybridflow: {reason}; restore it from a copy"
        ) from error


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn a full disk, which the library reports in several ways, into the file system's error."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise OSError(f"{path}: {error}") from error
