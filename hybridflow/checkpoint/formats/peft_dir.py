"""Directories of a LoRA adapter as PEFT writes them, read as logical tensors and written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from torch import Tensor

from hybridflow.checkpoint.formats.forms import from_logical, to_logical
from hybridflow.checkpoint.formats.lora import (
    Factor,
    LoraSettings,
    check_adapter,
    check_factors,
    linear_modules,
    read_settings,
)
from hybridflow.checkpoint.formats.source import Source, Target
from hybridflow.checkpoint.manifest import TensorEntry
from hybridflow.checkpoint.model_dir import write_bytes
from hybridflow.checkpoint.tensor_file import TensorFile, TensorFileWriter
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.families.assets import (
    ADAPTER_CONFIG,
    CODE,
    CONFIG,
    GENERATION,
    TOKENIZER_CONFIG,
    asset_names,
    identity_of,
    names_code,
    parse_json,
    read_assets,
)
from hybridflow.families.config_json import Described
from hybridflow.families.hub_cache import download_hint, find_model
from hybridflow.families.vision import NAMES_IN_MEMORY, has_vision
from hybridflow.families.weight_files import INDEX, SINGLE
from hybridflow.foreign import read_small
from hybridflow.reshard.spec import DType

WEIGHTS, _PICKLED = "adapter_model.safetensors", "adapter_model.bin"
_ENDS: dict[Literal["A", "B", "whole"], str] = {"A": "lora_A.weight", "B": "lora_B.weight", "whole": "weight"}
_OF_BASE = (CONFIG, GENERATION)
"""Small files that lie with the base alone."""


def is_peft(path: Path) -> bool:
    """Return whether an adapter lies at a path; a whole model beside it takes precedence."""
    return (path / ADAPTER_CONFIG).is_file() and not any((path / name).is_file() for name in (SINGLE, INDEX))


def base_of(path: Path) -> Path:
    """Return the directory of the base model that an adapter names, or that it lies in.

    Raises:
        CheckpointError: ``adapter_config.json`` is damaged.
        ConfigError: There is no such directory; or the settings ask for what is not computed.
    """
    named = _settings(path).base
    folder = path if named is None or (path / CONFIG).is_file() else find_model(named).expanduser()
    if not (folder / CONFIG).is_file():
        raise ConfigError(
            f"{path / ADAPTER_CONFIG}: base_model_name_or_path={json.dumps(named)} is no directory with a {CONFIG} "
            f"here; give the base model's directory: --base DIR{'' if named is None else download_hint(named)}"
        )
    return folder


class PeftSource(Source):
    """An adapter's directory as a source of logical factors; see ``source.Source``.

    Args:
        path: With ``adapter_config.json`` and ``adapter_model.safetensors``.
        base: Its base model.

    Raises:
        CheckpointError: A file is missing or damaged, or the factors are not those of the base and the settings.
        ConfigError: The settings ask for what is not computed.
    """

    format = "peft"

    def __init__(self, path: Path, base: Described) -> None:
        self.path = path
        self.family = base.family.name
        self.model, self.has_value_head = base.model, base.has_value_head
        settings = _settings(path)
        if not (path / WEIGHTS).is_file():
            remedy = "restore it from a copy"
            if (path / _PICKLED).exists():
                remedy = f"{_PICKLED}, which is a pickle, is not read: save the adapter with safe_serialization=True"
            raise CheckpointError(f"{path}: has no {WEIGHTS}; {remedy}")
        self._file = TensorFile(path / WEIGHTS)
        modules = linear_modules(base)
        self._where: dict[str, tuple[str, Factor]] = {}
        by_side = [Factor(module, side) for module in modules for side in _ENDS]
        by_key = {_key(factor): factor for factor in by_side}
        # As PEFT names them where the base is a vision-language model.
        by_key |= {_key(factor, of_vision=True): factor for factor in by_side}
        for key in self._file.entries:
            if key not in by_key:
                raise CheckpointError(
                    f"{path / WEIGHTS}: {key} goes with no linear module of the base, a {base.family.name} of "
                    f"{base.model.num_layers} layers; expected keys like {next(iter(by_key))}: give the base that the "
                    "adapter was trained on, save the adapter with save_embedding_layers=False, or, where the base has "
                    "such a layer, merge the adapter with PEFT first"
                )
            self._where[by_key[key].name] = key, by_key[key]
        entries = {name: self._entry(key, factor) for name, (key, factor) in self._where.items()}
        factors = check_factors(str(path / WEIGHTS), entries, modules, settings)
        self.tensors: Mapping[str, TensorEntry] = {name: entries[name] for name in factors}

    def read(self, tensor: str) -> Tensor:
        """See ``Source``."""
        key, factor = self._where[tensor]
        return to_logical(factor.form, [self._file.read(key)], self.model)

    def release(self) -> None:
        """See ``Source``."""
        self._file.release()

    def assets(self) -> dict[str, bytes]:
        """See ``Source``."""
        return read_assets(self.path, self._asset_names())

    def identity(self) -> str:
        """See ``Source``."""
        return identity_of([self.path / name for name in (*self._asset_names(), WEIGHTS)])

    def _asset_names(self) -> tuple[str, ...]:
        return (ADAPTER_CONFIG, *(name for name in asset_names(self.path) if name not in _OF_BASE))

    def _entry(self, key: str, factor: Factor) -> TensorEntry:
        """Return a tensor's entry in the logical view; one that does not fit keeps its shape, for a check to report."""
        dtype, shape = self._file.entries[key]
        fits = len(shape) == 2 and shape == factor.shape(shape[0] if factor.side == "A" else shape[1])
        return TensorEntry(dtype, factor.logical_shape(shape[1]) if fits and factor.side == "B" else shape)


def small_files(assets: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return those that lie with an adapter: settings stay with the base, and code that no tokenizer names."""
    has_code = names_code(assets.get(TOKENIZER_CONFIG))
    return {
        name: data for name, data in assets.items() if name not in _OF_BASE and (has_code or not CODE.fullmatch(name))
    }


class PeftTarget(Target):
    """An adapter's directory to be written; see ``source.Target``.

    Args:
        source: An adapter, in whatever format.
        dtype: Dtype of the factors; None: each as it is.

    Raises:
        CheckpointError: The source is no adapter, or one of another model.
        ConfigError: Its settings ask for what is not computed, or it does not say the family of its base.
    """

    def __init__(self, source: Source, dtype: DType | None = None) -> None:
        assets = source.assets()
        self._assets = small_files(assets)
        self._model = source.model
        # One that ran in transformers has the names there already.
        self._has_vision = has_vision(assets) and source.model.implementation == "megatron"
        self._where = check_adapter(source)
        entries: dict[str, TensorEntry] = {}
        for name, factor in self._where.items():
            found = source.tensors[name]
            rank = found.shape[0] if factor.side == "A" else found.shape[-1]
            entries[_key(factor, of_vision=self._has_vision)] = TensorEntry(
                found.dtype if dtype is None else dtype, factor.shape(rank)
            )
        self.files: Mapping[str, Mapping[str, TensorEntry]] = {WEIGHTS: entries}

    def places(self, tensor: str) -> list[tuple[str, str]]:
        """See ``Target``."""
        return [(WEIGHTS, _key(self._where[tensor], of_vision=self._has_vision))]

    def parts(self, tensor: str, values: Tensor) -> list[Tensor]:
        """See ``Target``."""
        return from_logical(self._where[tensor].form, values, self._model)

    def open(self, path: Path, file: str) -> TensorFileWriter:
        """See ``Target``."""
        return TensorFileWriter(path, self.files[file], {"format": "pt"})

    def finish(self, folder: Path, hashes: Mapping[str, Mapping[str, str]]) -> None:
        """See ``Target``: the settings are those that came with the adapter."""
        for name, data in self._assets.items():
            write_bytes(folder / name, data)


def _key(factor: Factor, *, of_vision: bool = False) -> str:
    """Return PEFT's name of a tensor; ``of_vision``: where the base is a vision-language model."""
    name = f"{factor.module.hf}.weight"
    module = (NAMES_IN_MEMORY.of(name) if of_vision else name).removesuffix(".weight")
    return f"base_model.model.{module}.{_ENDS[factor.side]}"


def _settings(path: Path) -> LoraSettings:
    file = path / ADAPTER_CONFIG
    try:
        content = read_small(file)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}; expected a LoRA adapter") from error
    return read_settings(parse_json(content, str(file)), where=str(file))
