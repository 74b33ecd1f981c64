"""Megatron's ``torch_dist`` checkpoints: ``torch.distributed.checkpoint`` in the form that megatron-core gives it.

    DIR/latest_checkpointed_iteration.txt     10, or release
    DIR/iter_0000010/.metadata                a pickle: tensors, their chunks, and where each chunk lies
    DIR/iter_0000010/__0_0.distcp …           chunks, each an archive of torch.save, one behind the other
    DIR/iter_0000010/common.pt                arguments of Megatron-LM
    DIR/iter_0000010/metadata.json            which format this is

Layers are one tensor with the layers as its first dim, experts another dim behind that; or each layer has its own key.
Reading goes through the restricted unpickler. Writing makes the same files, tensor by tensor.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridflow.checkpoint.formats.huggingface import MAX_SHARD_BYTES, deal
from hybridflow.checkpoint.formats.megatron_args import layout_of, padded_vocab_size, read_args, to_args, to_model
from hybridflow.checkpoint.formats.source import Source, Target, num_blocks, written_dtype
from hybridflow.checkpoint.formats.torch_archive import ArchivesWriter, object_archive, places
from hybridflow.checkpoint.formats.unpickle import Inert, MappedFile, TorchArchive, dump, read_pickle
from hybridflow.checkpoint.job_file import read_note
from hybridflow.checkpoint.manifest import TensorEntry
from hybridflow.checkpoint.model_dir import within, write_bytes
from hybridflow.errors import CheckpointError, ConfigError, HybridflowError
from hybridflow.families.assets import asset_names, identity_of, read_assets, read_json
from hybridflow.families.family import EMBEDDING, OUTPUT
from hybridflow.families.model import ModelConfig
from hybridflow.models.shapes import model_spec
from hybridflow.reshard.spec import Box, DType, TensorSpec, intersect, num_elements
from hybridflow.reshard.views import DTYPE_NAMES, TORCH_DTYPES

LATEST = "latest_checkpointed_iteration.txt"
METADATA, COMMON, KIND = ".metadata", "common.pt", "metadata.json"
_RELEASE, _STATES = "release", "__states_0.distcp"
_ASSETS = "assets"
_OTHERS = re.compile(r"^chained_\d+\.|\._extra_state")
"""Beside the tensors of a model lie the states of several optimizers, and those of scaling in Transformer Engine."""

_CHUNK_BYTES = 1 << 30
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.*)")
_EXPERTS = "mlp.experts.experts"
_INPUT_NORM, _FFN_NORM = "input_layernorm.weight", "pre_mlp_layernorm.weight"
_QUERY_NORM = "self_attention.q_layernorm.weight"
FUSED_NORMS = {
    _INPUT_NORM: "self_attention.linear_qkv.layer_norm_weight",
    _FFN_NORM: "mlp.linear_fc1.layer_norm_weight",
    _QUERY_NORM: "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
"""Norm in front of a linear layer -> its name where it is a part of that layer, as in Transformer Engine."""
# Modules that keep a state of their own, which is empty here, but is asked for when a checkpoint is loaded.
_FFN_WITH_STATE = ("linear_fc1", "linear_fc2")
_WITH_STATE = ("linear_proj", "linear_qkv", "core_attention")
_LATENT_WITH_STATE = (
    *("linear_proj", "core_attention", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj"),
    *("linear_kv_down_proj", "linear_kv_up_proj"),
)


def find_iteration(path: Path) -> Path:
    """Find the directory of a Megatron checkpoint: that of the latest iteration's file, or the path itself.

    Raises:
        CheckpointError: The file names what is not there.
    """
    latest = path / LATEST
    text = read_note(latest)
    if text is None:
        return path
    name = f"iter_{int(text):07d}" if re.fullmatch(r"[0-9]{1,12}", text) else text
    if not re.fullmatch(rf"{_RELEASE}|iter_\w+", name) or not (path / name).is_dir():
        raise CheckpointError(
            f"{latest}: found {text[:80]!r}, expected {_RELEASE!r} or the number of an iteration beside it; give the "
            "path of an iteration"
        )
    return path / name


def is_torch_dist(path: Path) -> bool:
    """Return whether a directory, or its latest iteration, is such a checkpoint."""
    return path.is_dir() and (find_iteration(path) / METADATA).is_file()


class _Chunk(NamedTuple):
    """Values of a box of a tensor.

    Attributes:
        box: In the coordinates of the stored tensor.
        file: Its file.
        start: Where it begins there.
        stop: Where it ends there.
    """

    box: Box
    file: str
    start: int
    stop: int


class _Stored(NamedTuple):
    """A tensor as the metadata describes it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[_Chunk, ...]


class _Part(NamedTuple):
    """Where a part of a logical tensor, flat, lies in a stored one.

    Attributes:
        key: The stored tensor.
        lead: Place along the leading dims: layer, expert.
        counts: Sizes of the leading dims.
        shape: Shape of the part, the dims behind the leading ones.
    """

    key: str
    lead: tuple[int, ...]
    counts: tuple[int, ...]
    shape: tuple[int, ...]


class MegatronDistSource(Source):
    """A ``torch_dist`` checkpoint, see ``source.Source``.

    The checksum of every chunk is compared when it is first read. Optimizer states are not read.

    Raises:
        CheckpointError: A file is missing, damaged or hostile, or a tensor is not that of the arguments.
        ConfigError: The arguments ask for what is not computed.
    """

    format = "megatron-dist"

    def __init__(self, path: Path) -> None:
        self.path, self._folder = path, find_iteration(path)
        backend = read_json(self._folder / KIND)
        if backend.get("sharded_backend") != "torch_dist":
            raise CheckpointError(
                f"{self._folder / KIND}: sharded_backend={backend.get('sharded_backend')!r}, expected 'torch_dist'; "
                "load and save it with a newer Megatron-LM"
            )
        self._stored = _read_metadata(self._folder / METADATA)
        self._files: dict[str, MappedFile] = {}
        common = self._folder / COMMON
        args = read_args(TorchArchive(MappedFile(common)).load(), common)
        self.model = to_model(args, where=f"{common}: args")
        try:
            self.layout: str | None = str(layout_of(args))
        except (HybridflowError, TypeError):
            self.layout = None
        self._padded = args.get("padded_vocab_size")
        self._parts = self._find_parts()
        self._chunks: dict[str, dict[tuple[int, ...], list[_Chunk]]] = {}
        self.tensors: Mapping[str, TensorEntry] = {name: self._entry(name) for name in self._parts}
        self._check_files()

    def read(self, tensor: str) -> Tensor:
        """See ``Source``."""
        entry, parts = self.tensors[tensor], self._parts[tensor]
        if len(parts) == 1:
            return self._read(tensor, parts[0]).view(entry.shape)
        return torch.cat([self._read(tensor, part) for part in parts]).view(entry.shape)

    def release(self) -> None:
        """See ``Source``."""
        for file in self._files.values():
            file.release()

    def assets(self) -> dict[str, bytes]:
        """See ``Source``."""
        folder = self.path / _ASSETS
        return read_assets(folder, asset_names(folder)) if folder.is_dir() else {}

    def identity(self) -> str:
        """See ``Source``."""
        files = sorted({chunk.file for stored in self._stored.values() for chunk in stored.chunks})
        own = [self.path / LATEST, *(self.path / _ASSETS / name for name in asset_names(self.path / _ASSETS))]
        return identity_of([*own, *(self._folder / name for name in (METADATA, COMMON, KIND, *files))])

    def _find_parts(self) -> dict[str, list[_Part]]:
        """Return every logical tensor's place, in whichever of its forms it is there."""
        model = self.model
        least = num_blocks(model)
        num_chunks = sum(len(stored.chunks) for stored in self._stored.values())
        if model.vocab_size is None or least > num_chunks:
            raise CheckpointError(
                f"{self._folder / COMMON}: args have no vocabulary, or ask for {least} layers and experts where "
                f"{METADATA} has {num_chunks} chunks; restore both from one copy"
            )
        found, explained = {}, set()
        for spec in model_spec(model).tensors:
            forms = _forms(spec, model)
            explained |= {part.key for parts in forms for part in parts}
            there = [parts for parts in forms if all(part.key in self._stored for part in parts)]
            if not there:
                raise CheckpointError(
                    f"{self._folder / METADATA}: has no {spec.name}; expected {forms[0][0].key}: restore it from a copy"
                )
            found[spec.name] = there[0]
        if model.tied_embeddings and OUTPUT in self._stored:
            raise CheckpointError(
                f"{self._folder / METADATA}: holds {OUTPUT}, though args have "
                "untie_embeddings_and_output_weights=False; give the args that belong to it"
            )
        for key in self._stored:
            if key not in explained and not _OTHERS.search(key):
                raise CheckpointError(
                    f"{self._folder / METADATA}: holds {key}, expected only tensors of the model that args describe; "
                    "give the args that belong to it, or save it without that tensor"
                )
        return found

    def _entry(self, name: str) -> TensorEntry:
        parts = self._parts[name]
        for part in parts:
            stored = self._stored[part.key]
            expected = (*part.counts, *part.shape)
            rows = stored.shape[0] if stored.shape else 0
            if name in (EMBEDDING, OUTPUT) and rows >= part.shape[0]:
                # Behind the vocabulary there is padding.
                expected = (self._padded if isinstance(self._padded, int) else rows, *part.shape[1:])
            if stored.shape != expected or stored.dtype not in DTYPE_NAMES:
                raise CheckpointError(
                    f"{self._folder / METADATA}: {part.key}: found {stored.dtype} {list(stored.shape)}, expected one "
                    f"of {', '.join(DTYPE_NAMES.values())} {list(expected)} by args; give the args that belong to it"
                )
            if part.key not in self._chunks:
                self._chunks[part.key] = self._chunks_of(part)
        shape = parts[0].shape if len(parts) == 1 else (2, *parts[0].shape)
        if name.endswith("linear_fc1.weight") and len(parts) == 1:
            shape = (2, shape[0] // 2, *shape[1:])
        return TensorEntry(DTYPE_NAMES[self._stored[parts[0].key].dtype], shape)

    def _chunks_of(self, part: _Part) -> dict[tuple[int, ...], list[_Chunk]]:
        """Return the chunks of a stored tensor by their place along its leading dims: a mixture has very many.

        Raises:
            CheckpointError: They do not have as many elements as the tensor.
        """
        stored = self._stored[part.key]
        if sum(num_elements(chunk.box) for chunk in stored.chunks) != math.prod(stored.shape):
            raise self._not_covered(part.key)
        found: dict[tuple[int, ...], list[_Chunk]] = defaultdict(list)
        for chunk in stored.chunks:
            for lead in itertools.product(*(range(*span) for span in chunk.box[: len(part.lead)])):
                found[lead].append(chunk)
        return found

    def _not_covered(self, key: str) -> CheckpointError:
        return CheckpointError(
            f"{self._folder / METADATA}: the chunks of {key} do not cover it once; restore it from a copy"
        )

    def _check_files(self) -> None:
        """Check that every file of the tensors that are read is there in full."""
        needed: dict[str, int] = {}
        for key in self._chunks:
            for chunk in self._stored[key].chunks:
                needed[chunk.file] = max(needed.get(chunk.file, 0), chunk.stop)
        for name, stop in sorted(needed.items()):
            path = self._folder / name
            found = f"{path.stat().st_size} bytes" if path.is_file() else "no such file"
            if not path.is_file() or path.stat().st_size < stop:
                raise CheckpointError(f"{path}: found {found}, expected at least {stop} bytes; restore it from a copy")

    def _read(self, tensor: str, part: _Part) -> Tensor:
        """Read a part, without padding."""
        stored = self._stored[part.key]
        whole = (*((at, at + 1) for at in part.lead), *((0, size) for size in part.shape))
        left, result = num_elements(whole), None
        for chunk in self._chunks[part.key].get(part.lead, ()):
            common = intersect(chunk.box, whole)
            if num_elements(common) == 0:
                continue
            values = self._values(tensor, part.key, chunk, stored.dtype)[within(common, chunk.box)]
            left -= num_elements(common)
            if common == whole and result is None:
                result = values
                continue
            if result is None:
                result = torch.empty([stop - start for start, stop in whole], dtype=stored.dtype)
            result[within(common, whole)] = values
        if left or result is None:
            raise self._not_covered(part.key)
        return result.reshape(part.shape)

    def _values(self, tensor: str, key: str, chunk: _Chunk, dtype: torch.dtype) -> Tensor:
        path = self._folder / chunk.file
        if chunk.file not in self._files:
            self._files[chunk.file] = MappedFile(path)
        try:
            archive = TorchArchive(self._files[chunk.file], chunk.start, chunk.stop)
            found = archive.tensor()
            shape = tuple(stop - start for start, stop in chunk.box)
            if found.shape != shape or found.dtype != dtype:
                raise CheckpointError(
                    f"{path}: found {found.dtype} {list(found.shape)}, expected {dtype} {list(shape)} by {METADATA}; "
                    "restore it from a copy"
                )
            return found.read()
        except CheckpointError as error:
            raise CheckpointError(f"{tensor} ({key} of {chunk.file}): {error}") from error


class MegatronDistTarget(Target):
    """A directory that Megatron-LM loads in any layout by ``--load``, see ``source.Target``.

    Args:
        source: What is to be written.
        dtype: Number format to write; None: each tensor's own.
        max_shard_bytes: No file has more bytes of tensors, unless it has one chunk alone.

    Raises:
        ConfigError: Megatron-LM has no such model.
    """

    def __init__(self, source: Source, *, dtype: DType | None = None, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        if source.has_value_head:
            raise ConfigError("Megatron-LM's GPT has no value head; write another format, or convert the actor")
        if max_shard_bytes < 1:
            raise ConfigError(f"max_shard_bytes={max_shard_bytes}: expected at least 1")
        self._source, self._model = source, source.model
        dtypes = {name: written_dtype(name, entry, dtype) for name, entry in source.tensors.items()}
        self._args = to_args(self._model, dtypes[EMBEDDING])
        specs = model_spec(self._model).tensors
        self._items = {spec.name: _items(spec, self._model, dtypes[spec.name]) for spec in specs}
        _check_dtypes(self._items)
        entries = {item.name: item.entry for items in self._items.values() for item in items}
        self.files: Mapping[str, Mapping[str, TensorEntry]] = {
            f"{_RELEASE}/__{index}_0.distcp": shard for index, shard in enumerate(deal(entries, max_shard_bytes))
        }
        self._where = {key: file for file, entries in self.files.items() for key in entries}

    def places(self, tensor: str) -> list[tuple[str, str]]:
        """See ``Target``."""
        return [(self._where[item.name], item.name) for item in self._items[tensor]]

    def parts(self, tensor: str, values: Tensor) -> Iterator[Tensor]:
        """See ``Target``."""
        rows = values.flatten(0, 1) if values.dim() == 3 else values
        for item in self._items[tensor]:
            part = rows[item.start : item.start + item.entry.shape[len(item.lead)]]
            missing = item.entry.shape[len(item.lead)] - len(part)
            if missing:
                part = torch.cat([part, part.new_zeros(missing, *part.shape[1:])])
            yield part.view(item.entry.shape)

    def open(self, path: Path, file: str) -> ArchivesWriter:
        """See ``Target``."""
        path.parent.mkdir(exist_ok=True)
        return ArchivesWriter(path, self.files[file])

    def finish(self, folder: Path, hashes: Mapping[str, Mapping[str, str]]) -> None:
        """See ``Target``."""
        release = folder / _RELEASE
        common = {"args": argparse.Namespace(**self._args), "checkpoint_version": 3.0, "iteration": 0}
        write_bytes(release / COMMON, object_archive(dump(common)))
        state = object_archive(dump([None]))
        write_bytes(release / _STATES, state)
        write_bytes(release / METADATA, dump(self._metadata(len(state))))
        kind = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        kind |= {"common_backend": "torch", "common_backend_version": 1}
        write_bytes(release / KIND, json.dumps(kind).encode())
        assets = self._source.assets()
        if assets:
            (folder / _ASSETS).mkdir(exist_ok=True)
        for name, content in assets.items():
            write_bytes(folder / _ASSETS / name, content)
        write_bytes(folder / LATEST, f"{_RELEASE}\n".encode())

    def _metadata(self, state_bytes: int) -> Any:
        """Return tensors with their chunks, and where each chunk lies."""
        # Only here: its import takes long.
        from torch.distributed.checkpoint import metadata
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        tensors: dict[str, Any] = {}
        storage: dict[Any, Any] = {}
        starts = {file: places(entries)[0] for file, entries in self.files.items()}
        for item in (item for items in self._items.values() for item in items):
            file, entry = self._where[item.name], item.entry
            offsets = torch.Size((*item.lead, item.start, *(0 for _ in item.shape[len(item.lead) + 1 :])))
            if item.key not in tensors:
                properties = metadata.TensorProperties(dtype=TORCH_DTYPES[entry.dtype])
                tensors[item.key] = metadata.TensorStorageMetadata(properties, torch.Size(item.shape), [])
            tensors[item.key].chunks.append(metadata.ChunkStorageMetadata(offsets, torch.Size(entry.shape)))
            start, archive = starts[file][item.name]
            index = metadata.MetadataIndex(item.key, offsets)
            storage[index] = _StorageInfo(Path(file).name, start, archive.num_bytes)
        for key in _state_keys(self._model):
            tensors[key] = metadata.BytesStorageMetadata()
            storage[metadata.MetadataIndex(key)] = _StorageInfo(_STATES, 0, state_bytes)
        return metadata.Metadata(state_dict_metadata=tensors, storage_data=storage)


class _Item(NamedTuple):
    """A chunk that is written.

    Attributes:
        name: hybridflow's name of the chunk.
        key: Key of the stored tensor.
        shape: Shape of the stored tensor.
        lead: Place along its leading dims: layer, expert.
        start: First row.
        entry: Dtype and sizes, those of the leading dims 1.
    """

    name: str
    key: str
    shape: tuple[int, ...]
    lead: tuple[int, ...]
    start: int
    entry: TensorEntry


def _forms(spec: TensorSpec, model: ModelConfig) -> list[list[_Part]]:
    """Return the ways in which a logical tensor may be stored, the default of megatron-core first."""
    rows = (spec.shape[0] * spec.shape[1], *spec.shape[2:]) if len(spec.shape) == 3 else spec.shape
    match = _LAYER.fullmatch(spec.name)
    if match is None:
        return [[_Part(spec.name, (), (), rows)]]
    layer, rest, num_layers = int(match[1]), match[2], model.num_layers
    names = _names(rest, layer, model)
    if spec.expert is not None:
        index, count = spec.expert
        own = f"decoder.layers.{layer}.{names[0].replace(_EXPERTS, f'{_EXPERTS}.{index}')}"
        forms = [
            [_Part(f"decoder.layers.{names[0]}", (layer, index), (num_layers, count), rows)],
            [_Part(f"decoder.layers.{layer}.{names[0]}", (index,), (count,), rows)],
            [_Part(own, (), (), rows)],
        ]
    else:
        own = f"decoder.layers.{layer}.{rest}"
        names = list(dict.fromkeys([*names, rest, FUSED_NORMS.get(rest, rest)]))
        forms = [[_Part(f"decoder.layers.{name}", (layer,), (num_layers,), rows)] for name in names]
        forms += [[_Part(f"decoder.layers.{layer}.{name}", (), (), rows)] for name in names]
    if len(spec.shape) == 3:
        forms.append([_Part(f"{own}_{half}", (), (), spec.shape[1:]) for half in "wv"])
    return forms


def _names(rest: str, layer: int, model: ModelConfig) -> list[str]:
    """Return the name of a layer's tensor in megatron-core's own layers, and in Transformer Engine's if it is another.

    There a norm is a part of the linear layer behind it, unless experts or the narrow projections of latent attention
    are behind it. megatron-core's own layers name it as if it were, but not those of latent attention.
    """
    expert, fused, is_latent = _EXPERT.fullmatch(rest), FUSED_NORMS.get(rest), model.kv_lora_rank is not None
    if expert is not None:
        return [f"{_EXPERTS}.{expert[2]}"]
    if fused is None or (rest == _QUERY_NORM and not is_latent):
        return [rest]
    is_apart = model.ffn_size(layer) is None if rest == _FFN_NORM else is_latent and rest == _INPUT_NORM
    return list(dict.fromkeys([rest if is_latent else fused, rest if is_apart else fused]))


def _items(spec: TensorSpec, model: ModelConfig, dtype: DType) -> list[_Item]:
    """Return the chunks of a tensor, so small that a few of them fit in memory at once."""
    forms = [form[0] for form in _forms(spec, model)]
    match = _LAYER.fullmatch(spec.name)
    if match is not None:
        # Where layers differ, megatron-core gives each its own keys.
        layers = f"decoder.layers.{match[1]}." if model.num_dense_layers else "decoder.layers."
        wanted = [layers + name for name in _names(match[2], int(match[1]), model)]
        forms = [part for part in forms if part.key in wanted]
    items = []
    for part in forms:
        num_rows, rest = part.shape[0], part.shape[1:]
        if spec.padded_to is not None:
            num_rows = padded_vocab_size(model)
        step = max(1, _CHUNK_BYTES // TensorEntry(dtype, (1, *rest)).num_bytes)
        for start in range(0, num_rows, step):
            sizes = (*(1 for _ in part.lead), min(step, num_rows - start), *rest)
            name = f"{part.key}@{'.'.join(map(str, (*part.lead, start)))}"
            shape = (*part.counts, num_rows, *rest)
            items.append(_Item(name, part.key, shape, part.lead, start, TensorEntry(dtype, sizes)))
    return items


def _check_dtypes(items: Mapping[str, list[_Item]]) -> None:
    """Check that a stored tensor has one dtype in all of its layers."""
    first: dict[str, tuple[str, DType]] = {}
    for name, parts in items.items():
        for item in parts:
            other, dtype = first.setdefault(item.key, (name, item.entry.dtype))
            if dtype != item.entry.dtype:
                raise ConfigError(
                    f"{name} is {item.entry.dtype}, {other} is {dtype}; expected one dtype, since Megatron stores them "
                    "as one tensor: choose a dtype to write"
                )


def _state_keys(model: ModelConfig) -> Iterator[str]:
    """Yield the objects that megatron-core's layers ask for."""
    is_apart, experts = model.num_dense_layers > 0, model.num_experts or 0
    attention = _WITH_STATE if model.kv_lora_rank is None else _LATENT_WITH_STATE
    for layer in range(model.num_layers):
        layers = f"decoder.layers.{layer}." if is_apart else "decoder.layers."
        place, count = ("0", "1") if is_apart else (f"{layer}", f"{model.num_layers}")
        modules = [f"self_attention.{name}" for name in attention]
        if model.ffn_size(layer) or model.shared_ffn_hidden_size:
            block = "mlp" if model.ffn_size(layer) else "mlp.shared_experts"
            modules += [f"{block}.{name}" for name in _FFN_WITH_STATE]
        for module in modules:
            yield f"{layers}{module}._extra_state/shard_{place}_{count}"
        for expert in range(0 if model.ffn_size(layer) else experts):
            for module in _FFN_WITH_STATE:
                at, of = (f"{expert}", f"{experts}") if is_apart else (f"{place}.{expert}", f"{count}.{experts}")
                yield f"{layers}{_EXPERTS}.{module}._extra_state/shard_{at}_{of}"


def _read_metadata(path: Path) -> dict[str, _Stored]:
    """Read the tensors of a model, complete and consistent; those of an optimizer are left out."""
    file = MappedFile(path)
    found = read_pickle(memoryview(file.bytes), str(path))
    try:
        if not isinstance(found, Inert) or found.global_name != "torch.distributed.checkpoint.metadata.Metadata":
            raise ValueError("holds no Metadata")
        # Of texts, since the file could choose tuples that all have one hash.
        where = {
            (index.attributes["fqn"], str(index.attributes.get("offset"))): info.attributes
            for index, info in found.attributes["storage_data"].items()
        }
        return {
            key: _stored(key, entry, where)
            for key, entry in found.attributes["state_dict_metadata"].items()
            if entry.global_name.endswith(".TensorStorageMetadata") and not key.startswith("optimizer.")
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{path}: is malformed: {type(error).__name__}: {error}; restore it from a copy"
        ) from error


def _stored(key: str, entry: Inert, where: Mapping[tuple[str, str], Mapping[str, Any]]) -> _Stored:
    shape = _sizes(entry.attributes["size"])
    properties = entry.attributes["properties"].state
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    chunks = []
    for chunk in entry.attributes["chunks"]:
        offsets, sizes = _sizes(chunk.attributes["offsets"]), _sizes(chunk.attributes["sizes"])
        box = tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True))
        if len(box) != len(shape) or any(stop > size for (_, stop), size in zip(box, shape, strict=True)):
            raise ValueError(f"{key}: chunk {box} is not a box of {list(shape)}")
        info = where[key, str(offsets)]
        name, (start, length) = info["relative_path"], _sizes((info["offset"], info["length"]))
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{key}: lies in {name!r}, expected a file beside it")
        if isinstance(dtype, torch.dtype) and num_elements(box) * dtype.itemsize > length:
            raise ValueError(f"{key}: chunk {box} lies in {length} bytes")
        if info.get("transform_descriptors"):
            raise ValueError(f"{key}: was changed by {info['transform_descriptors']} when it was written")
        chunks.append(_Chunk(box, name, start, start + length))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{key}: has no dtype")
    return _Stored(dtype, shape, tuple(chunks))


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{values!r:.80} are no sizes")
    return values
