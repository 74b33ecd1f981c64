"""What a format must offer to be converted from and to, whatever it looks like on disk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from hybridflow.checkpoint.manifest import TensorEntry
from hybridflow.checkpoint.tensor_file import cast
from hybridflow.errors import CheckpointError
from hybridflow.families.family import ROUTER_BIASES
from hybridflow.families.model import ModelConfig
from hybridflow.models.shapes import model_spec
from hybridflow.reshard.spec import Box, DType, slices


class Source(ABC):
    """The settings of a model and its weights, as logical tensors, one at a time: of a checkpoint, or in memory.

    Attributes:
        path: Where it is.
        format: What it is called on the command line, such as ``hf``.
        family: Hugging Face family; None where that is not known.
        model: Settings, the vocabulary included.
        has_value_head: Whether it gives values instead of logits.
        layout: In which it was written, as text; None where it is not cut.
        tensors: Logical name -> the whole tensor without padding, in the model's order.
        adapter_path: Adapter whose updates are in the weights; None: there is none.
    """

    path: Path
    format: str
    family: str | None = None
    model: ModelConfig
    has_value_head: bool = False
    layout: str | None = None
    tensors: Mapping[str, TensorEntry]
    adapter_path: Path | None = None

    def names(self, tensor: str) -> list[str]:
        """Return what the parts of a logical tensor are called where it is read from."""
        return [tensor]

    @abstractmethod
    def read(self, tensor: str) -> Tensor:
        """Read a whole logical tensor in host memory, possibly a view of a file, not to be written.

        Raises:
            CheckpointError: Its bytes are damaged, or it has another shape or dtype than it should.
        """

    def read_box(self, tensor: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Read a box of a logical tensor; here, the box of what ``read`` gives.

        Args:
            tensor: Logical name.
            box: What of it is needed.
            dtype: What the result will be converted to. A tensor that lies in codes is decoded to it at once; others
                are given as they lie.

        Raises:
            CheckpointError: See ``read``.
        """
        return self.read(tensor)[slices(box)]

    def read_as(self, tensor: str, dtype: torch.dtype) -> Tensor:
        """Read a whole logical tensor, converted to a dtype.

        Raises:
            CheckpointError: See ``read``.
            ConfigError: See ``cast``.
        """
        whole = tuple((0, size) for size in self.tensors[tensor].shape)
        # Codes hold numbers beyond those of fp16, which ``cast`` has to see.
        decoded = torch.float32 if dtype == torch.float16 else dtype
        return cast(tensor, self.read_box(tensor, whole, decoded), dtype)

    def release(self) -> None:
        """Give back the memory of what was read; here, where that is memory of its own, nothing."""
        return None

    def assets(self) -> dict[str, bytes]:
        """Return small files that travel along, by name: ``config.json``, ``generation_config.json``, the tokenizer.

        Here: there are none.
        """
        return {}

    @abstractmethod
    def identity(self) -> str:
        """Return a sha256 of the files' names, sizes and times, which differs when the source was changed meanwhile."""


class Writer(Protocol):
    """A file of tensors that is being written, see ``TensorFileWriter``.

    One thread at a time writes to it; where its target can go on with files, another may sync it meanwhile.
    """

    def write(self, key: str, tensor: Tensor) -> str:
        """Put a tensor at its place and return the sha256 of its bytes."""
        ...

    def sync(self) -> None:
        """Flush what was written to the disk."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class Target(Protocol):
    """Files to be written out of logical tensors.

    Attributes:
        files: Every file of tensors by name, with its tensors by key in the order of the file.
        is_single_file: Whether the result is the one file itself, instead of a directory of files.
        can_go_on: Whether a file whose writer was killed can be gone on with, tensor by tensor.
    """

    files: Mapping[str, Mapping[str, TensorEntry]]
    is_single_file: bool = False
    can_go_on: bool = True

    def places(self, tensor: str) -> list[tuple[str, str]]:
        """Return file and key of every part of a logical tensor."""
        ...

    def parts(self, tensor: str, values: Tensor) -> Iterable[Tensor]:
        """Return the values of the parts of a logical tensor, in the order of ``places``.

        Args:
            tensor: Logical name.
            values: The whole of it, of the dtype to be written.
        """
        ...

    def open(self, path: Path, file: str) -> Writer:
        """Begin a file, or go on with it.

        Args:
            path: Where it is written.
            file: Which of ``files`` it is.
        """
        ...

    def finish(self, folder: Path, hashes: Mapping[str, Mapping[str, str]]) -> None:
        """Write and sync what goes beside the files of tensors: manifest or index, settings, assets.

        Args:
            folder: Where the files are, all synced.
            hashes: File -> key -> sha256.
        """
        ...


def written_dtype(name: str, entry: TensorEntry, dtype: DType | None) -> DType:
    """Return the number format in which a tensor is written.

    A bias of the router keeps its own, as transformers and megatron-core have it: its steps of the last update are
    smaller than bf16 tells apart, and rounded, it would choose other experts.

    Args:
        name: Name of the tensor, the logical one or that of Hugging Face.
        entry: As the source has it.
        dtype: What was asked for; None: each tensor's own.
    """
    return entry.dtype if dtype is None or name.rpartition(".")[2] in ROUTER_BIASES else dtype


def num_blocks(model: ModelConfig) -> int:
    """Count the layers, or their experts, each of which has tensors, to refuse sizes before anything is listed."""
    return model.num_layers * (1 if model.num_experts is None else model.num_experts)


def check_shapes(
    found: Mapping[str, tuple[int, ...]],
    model: ModelConfig,
    *,
    has_value_head: bool,
    where: str,
    place: Callable[[str], str] = str,
    kind: str = "tensor",
    hint: str = "",
) -> dict[str, tuple[int, ...]]:
    """Check that tensors are those of the settings, so that a converter may use either; return their shapes in order.

    Args:
        found: Logical name -> shape.
        model: The settings.
        has_value_head: Whether they give values instead of logits.
        where: What messages call the checkpoint.
        place: Gives the name of a tensor in messages.
        kind: What messages call a tensor.
        hint: Why one that is missing may be so.

    Raises:
        CheckpointError: There are too few for the settings; or names the first tensor that differs.
    """
    if model.vocab_size is None or num_blocks(model) > len(found):
        raise CheckpointError(
            f"{where}: found {len(found)} {kind}s, too few for its settings, or these have no vocabulary; restore it "
            "from a copy"
        )
    expected = {spec.name: spec.shape for spec in model_spec(model, has_value_head=has_value_head).tensors}
    for name in [*expected, *found]:
        here, wanted = found.get(name, f"no such {kind}{hint}"), expected.get(name, f"no such {kind}")
        if here != wanted:
            raise CheckpointError(
                f"{where}: {place(name)}: found {here}, expected {wanted} by its settings; restore it from a copy"
            )
    return expected
