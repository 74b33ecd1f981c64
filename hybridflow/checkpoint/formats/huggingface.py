"""Directories of Hugging Face: ``config.json``, safetensors in one file or in shards with an index, the tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridflow.checkpoint.formats.forms import from_logical, part_box, part_shapes, to_logical
from hybridflow.checkpoint.formats.quantized import CodedTensor, coded_tensors
from hybridflow.checkpoint.formats.source import Source, Target, num_blocks, written_dtype
from hybridflow.checkpoint.manifest import TensorEntry
from hybridflow.checkpoint.model_dir import write_bytes
from hybridflow.checkpoint.tensor_file import HeldTensors, TensorFile, TensorFileWriter
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.families.assets import CONFIG, asset_names, identity_of, parse_json, read_assets, read_json, to_json
from hybridflow.families.config_json import Described, describe, read_config, update_config
from hybridflow.families.family import EMBEDDING, OUTPUT, Form, Rule
from hybridflow.families.model import ModelConfig
from hybridflow.families.quantization import plain_assets, read_quantization
from hybridflow.families.vision import TextNames, VisionModel, text_alone, text_names, vision_model, with_origin
from hybridflow.families.weight_files import INDEX, SINGLE, find_weight_files
from hybridflow.models.shapes import model_spec
from hybridflow.reshard.spec import DTYPE_WORDS, Box, DType, slices
from hybridflow.reshard.views import TORCH_DTYPES

MAX_SHARD_BYTES = 5_000_000_000


class Parts(NamedTuple):
    """The Hugging Face tensors that make a logical one.

    Attributes:
        form: How they make it.
        names: Their names, in the order of the rule.
        shapes: Their shapes.
        shape: Shape of the logical tensor.
        expert: Its index in the first dim of those; None: they are its alone.
        layer: Its layer; None: it is in none.
    """

    form: Form
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    expert: int | None = None
    layer: int | None = None

    def to_logical(self, tensors: list[Tensor], model: ModelConfig) -> Tensor:
        """Return the logical tensor out of those of Hugging Face, a view where the form allows."""
        own = tensors if self.expert is None else [tensor[self.expert] for tensor in tensors]
        return to_logical(self.form, own, self._model(model))

    def from_logical(self, read: Callable[[str], Tensor], name: str, model: ModelConfig) -> list[Tensor]:
        """Return the tensors of Hugging Face; of experts that share tensors the first has them, the others have none.

        Args:
            read: Gives the value of a logical tensor.
            name: The tensor's name; with the first of experts that share tensors all of them are read.
            model: The settings.
        """
        if self.expert is None:
            return from_logical(self.form, read(name), self._model(model))
        if self.expert > 0:
            return []
        assert model.num_experts is not None, "its experts share tensors"
        siblings = (name.replace(".experts.0.", f".experts.{expert}.") for expert in range(model.num_experts))
        parts = [from_logical(self.form, read(sibling), model) for sibling in siblings]
        return [torch.stack(tensors) for tensors in zip(*parts, strict=True)]

    def _model(self, model: ModelConfig) -> ModelConfig:
        """Return the settings of its layer."""
        return model if self.layer is None else model.of_layer(self.layer)


def _rules(described: Described, text: TextNames | None) -> dict[str, Rule]:
    """Return logical name -> the rule of it; arguments as for ``parts_of``."""
    rules = (*described.family.rules, *(() if text is None else text.rules))
    return {rule.logical: rule for rule in rules}


def parts_of(described: Described, text: TextNames | None = None) -> dict[str, Parts]:
    """Return logical name -> the Hugging Face tensors of it, in the model's order.

    Args:
        described: The model.
        text: What they are called in a vision-language model; None: as in one of text alone.

    Raises:
        ConfigError: The family has no place for a tensor of the model.
    """
    model, rules = described.model, _rules(described, text)
    found: dict[str, Parts] = {}
    for spec in model_spec(model, has_value_head=described.has_value_head).tensors:
        rule = rules.get(re.sub(r"\b(layer|expert)s\.\d+", r"\1s.{\1}", spec.name))
        if rule is None:
            raise ConfigError(
                f"{described.family.name} has no tensor for {spec.name}, which the model's settings ask for; give the "
                "model's own family or settings"
            )
        numbers = dict(re.findall(r"\b(layer|expert)s\.(\d+)", spec.name))
        names = tuple(name.format(**numbers) for name in rule.hf)
        names = names if text is None else tuple(map(text.of, names))
        layer = int(numbers["layer"]) if "layer" in numbers else None
        shapes = part_shapes(rule.form, spec.shape, model if layer is None else model.of_layer(layer))
        # Where keys are the values, the last of a rule's names is not there.
        names = names[: len(shapes)]
        expert = None
        if rule.has_all_experts:
            assert spec.expert is not None, "the rule is that of an expert"
            expert, num_experts = spec.expert
            shapes = tuple((num_experts, *shape) for shape in shapes)
        found[spec.name] = Parts(rule.form, names, shapes, spec.shape, expert, layer)
    return found


class HuggingFaceSource(Source):
    """A directory of Hugging Face, see ``source.Source``.

    Of a vision-language model the language model is read, and the other tensors are passed over. A stored output layer
    of a model whose embeddings are tied passes where it is the embedding bit for bit. Tensors that lie in codes of
    ``quantization_config`` are decoded while they are read.

    Raises:
        CheckpointError: A file is missing or damaged, or the tensors are not those of ``config.json``.
        ConfigError: ``config.json`` is of an unknown family, or asks for what is not computed.
    """

    format = "hf"

    def __init__(self, path: Path) -> None:
        values = read_json(path / CONFIG)
        described = read_config(values, where=str(path / CONFIG))
        how = read_quantization(values, described.family, where=str(path / CONFIG))
        files = open_files(path, has_codes=how is not None)
        coded = {} if how is None else coded_tensors(files, how, described.model.dtype)
        self._take(path, described, files, coded, kind=vision_model(values))

    def _take(
        self,
        path: Path,
        described: Described,
        files: Mapping[str, TensorFile | HeldTensors],
        coded: Mapping[str, CodedTensor] | None = None,
        *,
        kind: VisionModel | None = None,
    ) -> None:
        """Hold tensors, wherever they are, against the settings that go with them.

        Args:
            path: Where they are.
            described: The settings.
            files: The files by name.
            coded: Tensors that lie in codes.
            kind: The vision-language model that they are of, of which the language model's are held; None: all are.
        """
        self.path = path
        self._files = files
        self._where: dict[str, TensorFile | HeldTensors | CodedTensor] = {}
        self._where |= {name: file for file in files.values() for name in file.entries}
        shapes = {name: file.entries[name].shape for name, file in self._where.items()}
        self._names = text_alone(shapes) if kind is None else text_names(shapes, kind, str(path))
        if self._names is not None and kind is not None:
            self._where = {name: file for name, file in self._where.items() if self._names.has(name)}
        for name, tensor in ({} if coded is None else coded).items():
            self._where[name] = tensor
            self._where.pop(tensor.scales, None)
        _check_counts(described, self._names, len(self._where), path)
        self.model, self.has_value_head = described.model, described.has_value_head
        self.family = described.family.name
        self._parts = parts_of(described, self._names)
        self._output_copy = self._check_names(described)
        self.tensors: Mapping[str, TensorEntry] = {
            name: self._entry(name, parts) for name, parts in self._parts.items()
        }

    def read(self, tensor: str) -> Tensor:
        """See ``Source``."""
        parts, entry = self._parts[tensor], self.tensors[tensor]
        if self._is_coded(parts):
            whole = tuple((0, size) for size in entry.shape)
            return self._decoded(parts, whole, TORCH_DTYPES[entry.dtype])
        first = self._where[parts.names[0]]
        if parts.form == "stack" and isinstance(first, TensorFile):
            stacked = first.read_stacked(parts.names)
            if stacked is not None:
                return stacked
        values = [self._where[name].read(name) for name in parts.names]
        if tensor == EMBEDDING and self._output_copy is not None:
            self._check_copy(parts.names[0], self._output_copy)
        return parts.to_logical(values, self.model)

    def read_box(self, tensor: str, box: Box, dtype: torch.dtype) -> Tensor:
        """See ``Source``; of a tensor that lies in codes, only the box is decoded where its form allows."""
        parts = self._parts[tensor]
        return self._decoded(parts, box, dtype) if self._is_coded(parts) else super().read_box(tensor, box, dtype)

    def _is_coded(self, parts: Parts) -> bool:
        return any(isinstance(self._where[name], CodedTensor) for name in parts.names)

    def _decoded(self, parts: Parts, box: Box, dtype: torch.dtype) -> Tensor:
        """Return a box of a logical tensor of which at least a part lies in codes."""
        inner, values = part_box(parts.form, box), []
        for name, shape in zip(parts.names, parts.shapes, strict=True):
            own = shape if parts.expert is None else shape[1:]
            wanted = tuple((0, size) for size in own) if inner is None else inner
            if parts.expert is not None:
                wanted = ((parts.expert, parts.expert + 1), *wanted)
            file = self._where[name]
            if isinstance(file, CodedTensor):
                value = file.read_box(wanted, dtype)
            else:
                value = file.read(name)[slices(wanted)].to(dtype)
            values.append(value if parts.expert is None else value[0])
        made = parts._replace(expert=None).to_logical(values, self.model)
        if inner is None:
            return made[slices(box)]
        return made if parts.form in ("same", "transposed") else made[slice(*box[0])]

    def names(self, tensor: str) -> list[str]:
        """See ``Source``."""
        return list(self._parts[tensor].names)

    def release(self) -> None:
        """See ``Source``."""
        for file in self._files.values():
            file.release()

    def assets(self) -> dict[str, bytes]:
        """See ``Source``."""
        return with_origin(plain_assets(read_assets(self.path, self._asset_names())), self.path)

    def identity(self) -> str:
        """See ``Source``."""
        small = (self.path / name for name in (*self._asset_names(), INDEX))
        return identity_of([*small, *(file.path for file in self._files.values())])

    def _asset_names(self) -> tuple[str, ...]:
        return asset_names(self.path)

    def _check_names(self, described: Described) -> str | None:
        """Check that all expected tensors are there and no others; return the name of the embedding's second copy."""
        expected = {name for parts in self._parts.values() for name in parts.names}
        ignored = re.compile("|".join(described.family.ignored))
        skipped = self._further_layer(described)
        extra = [name for name in self._where if name not in expected and not ignored.fullmatch(name)]
        extra = [name for name in extra if skipped is None or not name.startswith(skipped)]
        missing = [name for name in expected if name not in self._where]
        copies = [name for rule in described.family.rules if rule.logical == OUTPUT for name in rule.hf]
        output = copies[0] if self._names is None else self._names.of(copies[0])
        copy = None
        if described.model.tied_embeddings and not described.has_value_head and output in extra:
            copy = output
            extra.remove(copy)
        if missing or extra:
            raise CheckpointError(
                f"{self.path}: is not the {described.family.name} model of its {CONFIG}: "
                f"{_differences(missing, [f'{name} of {self._where[name].path.name}' for name in extra])}; "
                + self._remedy(missing)
            )
        return copy

    def _further_layer(self, described: Described) -> str | None:
        """Return the beginning of the names in the layer that predicts further tokens; None: there is none."""
        if described.family.further_layers is None:
            return None
        layer = f"model.layers.{described.model.num_layers}."
        return layer if layer + described.family.further_layers[0] in self._where else None

    def _remedy(self, missing: list[str]) -> str:
        if any(name.removeprefix("model.") in self._where for name in missing):
            return "these names are those of a model without a head: load and save it as a causal language model"
        return f"restore what is missing, or give the {CONFIG} that belongs to these tensors"

    def _entry(self, name: str, parts: Parts) -> TensorEntry:
        dtypes: dict[DType, str] = {}
        for part, shape in zip(parts.names, parts.shapes, strict=True):
            file = self._where[part]
            found = file.entries[part]
            if found.shape != shape:
                raise CheckpointError(
                    f"{file.path}: {part}: found shape {list(found.shape)}, expected {list(shape)} by {CONFIG}; "
                    f"restore the file, or give the {CONFIG} that belongs to it"
                )
            dtypes.setdefault(found.dtype, part)
        if len(dtypes) > 1:
            held = ", ".join(f"{part} is {dtype}" for dtype, part in dtypes.items())
            raise CheckpointError(
                f"{self._where[parts.names[0]].path}: {held}; expected one dtype, since they are parts of {name}: save "
                "them alike"
            )
        return TensorEntry(next(iter(dtypes)), parts.shape)

    def _check_copy(self, name: str, copy: str) -> None:
        ours, other = self._where[name], self._where[copy]
        if ours.entries[name] != other.entries[copy] or ours.sha256(name) != other.sha256(copy):
            raise CheckpointError(
                f"{other.path}: {copy} is not equal to {name}, though {CONFIG} says tie_word_embeddings=true; set it "
                "to false to keep both, or remove the tensor"
            )


class HuggingFaceTarget(Target):
    """A directory that ``transformers`` and vLLM load, see ``source.Target``.

    The ``config.json`` is the one that traveled along, brought up to date, where it describes the model; else it is
    written from the model's settings.

    Args:
        source: What is to be written.
        dtype: Number format to write; None: each tensor's own.
        max_shard_bytes: No file has more bytes of tensors, unless it has one tensor alone.

    Raises:
        ConfigError: No family has such a model.
    """

    def __init__(self, source: Source, *, dtype: DType | None = None, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        if max_shard_bytes < 1:
            raise ConfigError(f"max_shard_bytes={max_shard_bytes}: expected at least 1")
        self._source = source
        self._parts = self._name()
        self._dtype = dtype if dtype is not None else source.tensors[self._largest()].dtype
        entries = {
            part: TensorEntry(self._written(name, dtype), shape)
            for name, parts in self._parts.items()
            for part, shape in zip(parts.names, parts.shapes, strict=True)
        }
        shards = deal(entries, max_shard_bytes)
        names = [f"model-{index + 1:05}-of-{len(shards):05}.safetensors" for index in range(len(shards))]
        self.files: Mapping[str, Mapping[str, TensorEntry]] = (
            dict(zip(names, shards, strict=True)) if len(shards) > 1 else {SINGLE: shards[0]}
        )
        self._where = {part: file for file, held in self.files.items() for part in held}

    def _name(self) -> dict[str, Parts]:
        """Return logical name -> the Hugging Face tensors of it."""
        source = self._source
        self._described = describe(source.model, family=source.family, has_value_head=source.has_value_head)
        return parts_of(self._described)

    def _written(self, tensor: str, dtype: DType | None) -> DType:
        """Return the number format in which a tensor is written."""
        return written_dtype(tensor, self._source.tensors[tensor], dtype)

    def _largest(self) -> str:
        """Return the tensor whose number format the settings tell."""
        return EMBEDDING

    def _config(self, original: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the ``config.json`` to write; ``original`` traveled along."""
        return update_config(original, self._described, dtype=DTYPE_WORDS[self._dtype])

    def places(self, tensor: str) -> list[tuple[str, str]]:
        """See ``Target``."""
        parts = self._parts[tensor]
        # See ``Parts.from_logical``.
        return [] if parts.expert else [(self._where[name], name) for name in parts.names]

    def parts(self, tensor: str, values: Tensor) -> list[Tensor]:
        """See ``Target``."""

        def read(name: str) -> Tensor:
            return values if name == tensor else self._source.read_as(name, values.dtype)

        return self._parts[tensor].from_logical(read, tensor, self._source.model)

    def open(self, path: Path, file: str) -> TensorFileWriter:
        """See ``Target``."""
        return TensorFileWriter(path, self.files[file], {"format": "pt"})

    def finish(self, folder: Path, hashes: Mapping[str, Mapping[str, str]]) -> None:
        """See ``Target``."""
        assets = self._source.assets()
        original = parse_json(assets[CONFIG], f"{self._source.path}: {CONFIG}") if CONFIG in assets else None
        config = self._config(original)
        for name, content in {**assets, CONFIG: to_json(config)}.items():
            write_bytes(folder / name, content)
        if len(self.files) > 1:
            entries = [entry for held in self.files.values() for entry in held.values()]
            index = {
                "metadata": {"total_size": sum(entry.num_bytes for entry in entries)},
                "weight_map": dict(sorted(self._where.items())),
            }
            write_bytes(folder / INDEX, to_json(index))


def deal(entries: Mapping[str, TensorEntry], max_shard_bytes: int) -> list[dict[str, TensorEntry]]:
    """Deal tensors in their order to files within the size limit."""
    shards: list[dict[str, TensorEntry]] = [{}]
    room = max_shard_bytes
    for name, entry in entries.items():
        if entry.num_bytes > room and shards[-1]:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = entry
        room -= entry.num_bytes
    return shards


def open_files(path: Path, *, has_codes: bool = False, has_masks: bool = False) -> dict[str, TensorFile]:
    """Open the files of tensors by name: the single one, or those of the index, which must agree with it.

    Args:
        path: The directory.
        has_codes: Whether weights may lie in codes.
        has_masks: Whether masks are left out, see ``TensorFile``.

    Raises:
        CheckpointError: A file is missing or damaged, or they are pickles.
    """
    files = {}
    for name, indexed in find_weight_files(path).items():
        files[name] = TensorFile(path / name, has_codes=has_codes, has_masks=has_masks)
        held = files[name].entries.keys() | files[name].codes.keys() | files[name].masks
        if indexed is not None and held != indexed:
            raise CheckpointError(
                f"{path / name}: does not hold what {INDEX} says: "
                f"{_differences(indexed - held, held - indexed)}; restore both from one copy"
            )
    return files


def _check_counts(described: Described, text: TextNames | None, num_tensors: int, path: Path) -> None:
    """Refuse sizes that the files cannot have, before anything is listed by them."""
    model = described.model
    has_own_tensors = not any(rule.has_all_experts for rule in _rules(described, text).values())
    if (num_blocks(model) if has_own_tensors else model.num_layers) > num_tensors:
        raise CheckpointError(
            f"{path / CONFIG}: found {model.num_layers} layers"
            + ("" if model.num_experts is None else f" of {model.num_experts} experts")
            + f", but the files hold {num_tensors} tensors; give the {CONFIG} that belongs to them"
        )


def _differences(missing: Iterable[str], extra: Iterable[str]) -> str:
    """Return the first names that are missing, and the first that are not expected."""
    told = []
    for what, names in (("missing", sorted(missing)), ("not expected", sorted(extra))):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            told.append(f"{what}: {', '.join(names[:3])}{more}")
    return "; ".join(told)
