"""Vision-language models, whole again for an export: the trained language model, and the rest of the original."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.checkpoint.formats.huggingface import HuggingFaceTarget, Parts, open_files, parts_of
from hybridflow.checkpoint.formats.source import Source
from hybridflow.checkpoint.manifest import TensorEntry
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.families.assets import CONFIG, identity_of, parse_json, read_json
from hybridflow.families.config_json import describe, describes, update_vision_config
from hybridflow.families.vision import ORIGIN, has_vision, text_names, vision_model
from hybridflow.reshard.spec import DTYPE_WORDS, Box, DType

_FREE = ("dtype", "torch_dtype")
"""Keys of ``vision_config`` that two copies of a model may have different."""


def is_part(source: Source) -> bool:
    """Return whether a source is of a vision-language model, which is exported whole; a scorer is not."""
    is_text = not source.has_value_head and source.model.implementation == "megatron"
    return is_text and has_vision(source.assets())


class WholeSource(Source):
    """A language model, and the other tensors of the vision-language model as they lie in its original directory.

    Args:
        text: The language model, for which ``is_part`` holds.
        original: The directory; None: the one that its ``config.json`` names.

    Attributes:
        others: Names of the other tensors.
        text_names: What the original calls the tensors of the language model.

    Raises:
        CheckpointError: The original is damaged.
        ConfigError: It is not there, or of another model.
    """

    def __init__(self, text: Source, original: Path | None = None) -> None:
        self.path, self.format, self.layout, self.adapter_path = text.path, text.format, text.layout, text.adapter_path
        self.family, self.model = text.family, text.model
        self._text = text
        self._original = _find_original(text, original)
        self._files = open_files(self._original)
        names = {name: file for file in self._files.values() for name in file.entries}
        kind = vision_model(read_json(self._original / CONFIG))
        assert kind is not None, "checked by _find_original"
        shapes = {name: file.entries[name].shape for name, file in names.items()}
        self.text_names = text_names(shapes, kind, str(self._original))
        self.others = {name: file for name, file in names.items() if not self.text_names.has(name)}
        entries = {name: file.entries[name] for name, file in self.others.items()}
        self.tensors: Mapping[str, TensorEntry] = {**text.tensors, **entries}

    def names(self, tensor: str) -> list[str]:
        """See ``Source``."""
        return [tensor] if tensor in self.others else self._text.names(tensor)

    def read(self, tensor: str) -> Tensor:
        """See ``Source``."""
        return self.others[tensor].read(tensor) if tensor in self.others else self._text.read(tensor)

    def read_box(self, tensor: str, box: Box, dtype: torch.dtype) -> Tensor:
        """See ``Source``."""
        return (
            super().read_box(tensor, box, dtype) if tensor in self.others else self._text.read_box(tensor, box, dtype)
        )

    def release(self) -> None:
        """See ``Source``."""
        self._text.release()
        for file in self._files.values():
            file.release()

    def assets(self) -> dict[str, bytes]:
        """See ``Source``."""
        return self._text.assets()

    def identity(self) -> str:
        """See ``Source``; of both."""
        others = identity_of([self._original / CONFIG, *(file.path for file in self._files.values())])
        return hashlib.sha256(f"{self._text.identity()} {others}".encode()).hexdigest()


class WholeTarget(HuggingFaceTarget):
    """A vision-language model as ``transformers`` loads it; see ``HuggingFaceTarget``. Its other tensors are copied."""

    _source: WholeSource

    def _name(self) -> dict[str, Parts]:
        source = self._source
        self._described = describe(source.model, family=source.family, has_value_head=False)
        others = {name: source.tensors[name].shape for name in source.others}
        copied = {name: Parts("same", (name,), (shape,), shape) for name, shape in others.items()}
        return {**parts_of(self._described, source.text_names), **copied}

    def _written(self, tensor: str, dtype: DType | None) -> DType:
        return super()._written(tensor, None if tensor in self._source.others else dtype)

    def _config(self, original: Mapping[str, Any] | None) -> dict[str, Any]:
        assert original is not None, "checked by is_part"
        return update_vision_config(original, self._described, dtype=DTYPE_WORDS[self._dtype])


def _find_original(text: Source, given: Path | None) -> Path:
    """Return the directory of the vision-language model, and check that it is of the same model."""
    values = parse_json(text.assets()[CONFIG], f"{text.path}: {CONFIG}")
    named = values.get(ORIGIN)
    path = given if given is not None else Path(named) if isinstance(named, str) and named else None
    if path is None or not (path / CONFIG).is_file():
        raise ConfigError(
            f"{text.path}: is the language model of a {values['model_type']}; its other tensors, such as those of the "
            f"vision tower, were to be copied from {'its original' if path is None else path}, which is not there; "
            "restore that directory, or name another copy: hybridflow convert … --to hf --base DIR"
        )
    found = read_json(path / CONFIG)
    described = describe(text.model, family=text.family, has_value_head=False)
    parts = [each.get("vision_config") for each in (values, found)]
    if vision_model(found) is not vision_model(values) or not describes(found, described) or not _is_same(*parts):
        raise CheckpointError(
            f"{path / CONFIG}: describes another model than {text.path} was read from; expected the directory of the "
            f"{values['model_type']} that training began with: restore it, or name another copy: hybridflow convert … "
            "--to hf --base DIR"
        )
    return path


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two parts of ``config.json`` agree in the keys that both have: a copy may say more."""
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return bool(one == other)
    return all(one[key] == other[key] for key in one.keys() & other.keys() if key not in _FREE)
