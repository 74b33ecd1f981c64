"""Checkpoints and arrays in HDF5 files that plain h5py reads.

    OUT.h5                        everything in one file; or
    OUT/model.h5                  virtual datasets over the files beside it, by relative names
    OUT/tp00-pp00.h5 …            what each place of a layout holds

A tensor ``decoder.final_layernorm.weight`` is the dataset ``/weights/decoder/final_layernorm/weight``, chunked, every
chunk with HDF5's own checksum (fletcher32), with its sha256 as an attribute. Small files that travel along are datasets
of bytes in ``/assets``. bf16 is a number format of 16 bits that HDF5 describes itself, so h5py gives float32.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridflow.checkpoint.formats.sharded import ShardedTarget
from hybridflow.checkpoint.formats.source import Source, Target, check_shapes
from hybridflow.checkpoint.manifest import TensorEntry, overlap, versions
from hybridflow.checkpoint.tensor_file import bytes_of, entry_of
from hybridflow.data.arrays import attribute, check_storage, reading_hdf5, writing_hdf5
from hybridflow.data.hdf5 import h5py, is_own, item_in, open_hdf5, try_file
from hybridflow.errors import CheckpointError
from hybridflow.families.assets import ASSETS, CODE, identity_of
from hybridflow.families.model import ModelConfig
from hybridflow.foreign import MAX_SMALL_BYTES
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.observe.files import sync_path
from hybridflow.reshard.spec import Box, DType, num_elements, slices
from hybridflow.reshard.views import TORCH_DTYPES
from hybridflow.sections import read_section, to_dict

MASTER = "model.h5"
MAGIC = b"\x89HDF\r\n\x1a\n"
FORMAT = "hybridflow-hdf5-1"
_PART_FORMAT = "hybridflow-hdf5-part-1"
_WEIGHTS, _ASSETS = "weights", "assets"
_CHUNK_BYTES = 2 << 20
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
        with reading_hdf5(self._master):
            file = self._open(self._master.name, FORMAT)
            self.family = attribute(file, "family") or None
            self.layout = attribute(file, "layout") or None
            self.has_value_head = bool(file.attrs["has_value_head"])
            self.model = read_section(
                ModelConfig, json.loads(attribute(file, "model")), source=f"{self._master}: model"
            )
            datasets = self._datasets(file)
        self.tensors: Mapping[str, TensorEntry] = self._check(datasets)
        self._shards = {name: self._shards_of(name, datasets[name]) for name in self.tensors}

    def read(self, tensor: str) -> Tensor:
        """See ``Source``."""
        entry, shards = self.tensors[tensor], self._shards[tensor]
        if len(shards) == 1:
            return self._values(shards[0], entry.dtype)
        files = {self._folder / shard.file for shard in shards}
        with reading_hdf5(self._master, _dataset(tensor)):
            if entry.num_bytes > sum(file.stat().st_size for file in files if file.is_file()):
                raise ValueError(f"its {entry.num_bytes} bytes are more than the files have that it lies in")
        found = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
        for shard in shards:
            found[slices(shard.box)] = self._values(shard, entry.dtype)
        return found

    def assets(self) -> dict[str, bytes]:
        """See ``Source``."""
        found = {}
        with reading_hdf5(self._master, _ASSETS):
            file = self._open(self._master.name, FORMAT)
            held = _group(file, _ASSETS)
            for name in sorted(name for name in held if name in ASSETS or CODE.fullmatch(name)):
                dataset = item_in(held, name)
                if not is_own(dataset) or dataset.nbytes > MAX_SMALL_BYTES:
                    raise ValueError(f"{name} is no small dataset of this file")
                if dataset.nbytes:
                    check_storage(dataset, dataset.nbytes, self._master.stat().st_size)
                content = dataset[()].tobytes()
                if hashlib.sha256(content).hexdigest() != attribute(dataset, "sha256"):
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
            try_file(path)
            # Nothing writes here, and not every file system can lock.
            file = open_hdf5(path, locking=False, rdcc_nbytes=_CACHE_BYTES)
            found = attribute(file, "format") if "format" in file.attrs else "none"
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
                with reading_hdf5(self._master, f"/{_WEIGHTS}/{name}"):
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
            with reading_hdf5(self._master, _dataset(name)):
                entries[name] = TensorEntry(_dtype_of(datasets[name]), shape)
        return entries

    def _shards_of(self, name: str, dataset: h5py.Dataset) -> list[_Shard]:
        """Return where a tensor lies: its dataset, or those that a virtual one names."""
        with reading_hdf5(self._master, _dataset(name)):
            whole = tuple((0, size) for size in dataset.shape)
            if not dataset.is_virtual:
                return [_Shard(self._master.name, dataset.name, whole, attribute(dataset, "sha256"))]
            sources, hashes = dataset.virtual_sources(), json.loads(attribute(dataset, "sha256"))
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
        with reading_hdf5(path, shard.dataset):
            file = self._open(shard.file, FORMAT if shard.file == self._master.name else _PART_FORMAT)
            dataset = item_in(file, shard.dataset)
            shape = tuple(stop - start for start, stop in shard.box)
            if not isinstance(dataset, h5py.Dataset) or dataset.is_virtual:
                raise ValueError("is not a dataset of this file itself")
            if dataset.shape != shape or _dtype_of(dataset) != dtype:
                raise ValueError(f"expected a dataset of {dtype} {list(shape)}")
            check_storage(dataset, TensorEntry(dtype, shape).num_bytes, path.stat().st_size)
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
        with _writing(writer.file, path):
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
        with writing_hdf5(path):
            # The newest form of the format is the one that keeps many virtual datasets small.
            with h5py.File(path, "w", libver="v110") as file, _writing(file, path):
                self._describe(file)
                for name, entry in self._cut.tensors.items():
                    self._join(file, name, entry, hashes)
                file.flush()
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
            dataset.flush()


@contextlib.contextmanager
def _writing(file: h5py.File, path: Path) -> Iterator[None]:
    """Turn a full disk into the file system's error, and give the library a device that takes what it still has.

    It tries again whenever a handle goes away, which prints an error each time, and crashes when the process ends.
    """
    with writing_hdf5(path):
        try:
            yield
        except (RuntimeError, ValueError):
            if file.id.valid:
                with open(os.devnull, "r+b") as nowhere:
                    os.dup2(nowhere.fileno(), file.id.get_vfd_handle())
            raise


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
        with writing_hdf5(path):
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
        with _writing(self.file, self.path):
            space = h5py.h5s.create_simple(entry.shape)
            name = _dataset(key).encode()
            dataset = h5py.h5d.create(self.file.id, name, kind, space, creation, _making_groups())
            dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, _as_integers(tensor), mtype=kind)
            attributes = h5py.Dataset(dataset).attrs
            attributes["dtype"], attributes["sha256"] = entry.dtype, hashing.result()
            # Else its chunks are written when the handle goes away, which prints an error and goes on.
            dataset.flush()
        self._unsynced_bytes += entry.num_bytes
        if self._unsynced_bytes >= _SYNC_BYTES and (self._syncing is None or self._syncing.done()):
            self._wait_for_sync()
            self._syncing, self._unsynced_bytes = self._meanwhile.submit(sync_path, self.path), 0
        return hashing.result()

    def sync(self) -> None:
        """See ``Writer``."""
        self._wait_for_sync()
        with _writing(self.file, self.path):
            self.file.flush()
        sync_path(self.path)

    def close(self) -> None:
        """See ``Writer``."""
        self._meanwhile.shutdown()
        with _writing(self.file, self.path):
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


def _dtype_of(dataset: h5py.Dataset) -> DType:
    kind = dataset.id.get_type()
    for name, known in _TYPES.items():
        if kind.equal(known):
            return name
    raise ValueError(f"is of type {dataset.dtype}, expected one of {', '.join(_TYPES)}")
