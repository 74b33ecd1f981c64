"""Models that run in ``transformers``: their tensors have the names that they have there, also in our checkpoints.

In the files of Hugging Face some have others: ``transformers`` 5 keeps the experts of a layer in one tensor in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.checkpoint.formats.huggingface import (
    HuggingFaceSource,
    HuggingFaceTarget,
    Parts,
    open_files,
)
from hybridflow.checkpoint.formats.source import Source
from hybridflow.checkpoint.manifest import TensorEntry
from hybridflow.errors import ConfigError
from hybridflow.families.assets import CONFIG, asset_names, parse_json, read_json
from hybridflow.families.family import VALUE_HEAD
from hybridflow.families.other_config import has_no_table, read_other_config
from hybridflow.models.hf_model import renaming, scorer_of
from hybridflow.reshard.spec import DTYPE_WORDS

_HEAD = "score.weight"
"""The value head of the ``*ForSequenceClassification`` of ``transformers``."""


def is_named(path: Path) -> bool:
    """Return whether a directory of Hugging Face lies at a path whose family has no table.

    Raises:
        CheckpointError: ``config.json`` is damaged.
    """
    return (path / CONFIG).is_file() and has_no_table(read_json(path / CONFIG))


class NamedSource(HuggingFaceSource):
    """A directory of Hugging Face of a family without a table: each tensor is one of its own, see ``source.Source``.

    Raises:
        CheckpointError: A file is missing or damaged.
        ConfigError: ``config.json`` does not tell the sizes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        described = read_other_config(read_json(path / CONFIG), where=str(path / CONFIG))
        self.family, self.model, self.has_value_head = described.family, described.model, described.has_value_head
        self._files = open_files(path, has_masks=True)
        self._where = {name: file for file in self._files.values() for name in file.entries}
        self.tensors: Mapping[str, TensorEntry] = {name: file.entries[name] for name, file in self._where.items()}

    def read(self, tensor: str) -> Tensor:
        """See ``Source``."""
        return self._where[tensor].read(tensor)

    # Nothing lies in codes here, and each tensor is one of its own.
    read_box = Source.read_box
    names = Source.names

    def _asset_names(self) -> tuple[str, ...]:
        # Without its code nobody could load it again.
        return (*dict.fromkeys((*asset_names(self.path), *sorted(each.name for each in self.path.glob("*.py")))),)


class NamedTarget(HuggingFaceTarget):
    """A directory that ``transformers`` loads, of a model that ran there; see ``HuggingFaceTarget``.

    A tensor that would be joined with others in a file has its name in memory, by which ``transformers`` 5 finds it.

    Raises:
        ConfigError: It has a value head, and ``transformers`` no model with one; or no ``config.json`` travels along.
    """

    def _name(self) -> dict[str, Parts]:
        source = self._source
        if CONFIG not in source.assets():
            raise ConfigError(f"{source.path}: has no {CONFIG} beside it, which says what the model is; restore it")
        config = parse_json(source.assets()[CONFIG], f"{source.path}: {CONFIG}")
        # Of the whole: its part for text alone may have another, whose tensors are called otherwise.
        kind = str(config.get("model_type"))
        self._scorer = scorer_of(kind) if source.has_value_head else None
        if source.has_value_head and self._scorer is None:
            raise ConfigError(
                f"{source.path}: transformers has no *ForSequenceClassification of {kind!r} to hold the value head; "
                "keep the checkpoint as it is"
            )
        # In a directory they have the names already.
        self._rename = dict if isinstance(source, NamedSource) else renaming(config)
        metas = {_key(name): torch.empty(entry.shape, device="meta") for name, entry in source.tensors.items()}
        whole, found = self._rename(metas), {}
        self._as_in_memory = set()
        for name in source.tensors:
            held = self._rename({_key(name): metas[_key(name)]})
            if any(key not in whole or whole[key].shape != each.shape for key, each in held.items()):
                self._as_in_memory.add(name)
                held = {_key(name): metas[_key(name)]}
            shapes = tuple(tuple(each.shape) for each in held.values())
            found[name] = Parts("same", tuple(held), shapes, source.tensors[name].shape)
        return found

    def parts(self, tensor: str, values: Tensor) -> list[Tensor]:
        """See ``Target``."""
        return [values] if tensor in self._as_in_memory else [*self._rename({_key(tensor): values}).values()]

    def _largest(self) -> str:
        return max(self._source.tensors, key=lambda name: self._source.tensors[name].num_bytes)

    def _config(self, original: Mapping[str, Any] | None) -> dict[str, Any]:
        assert original is not None, "checked by _name"
        config = {**original, "dtype": DTYPE_WORDS[self._dtype]}
        if "torch_dtype" in original:
            # Older readers know this spelling alone.
            config["torch_dtype"] = config["dtype"]
        name = str((original.get("architectures") or [""])[0])
        if self._source.has_value_head and not name.endswith("ForSequenceClassification"):
            config |= {"architectures": [self._scorer], "num_labels": 1}
            config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        return config


def _key(name: str) -> str:
    return _HEAD if name == VALUE_HEAD else name
