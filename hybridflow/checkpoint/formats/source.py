"""What a format must offer to be converted from and to, whatever it looks like on disk."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from hybridflow.checkpoint.manifest import TensorEntry
from hybridflow.checkpoint.tensor_file import Entry
from hybridflow.families.model import ModelConfig


class Source(Protocol):
    """The weights of a checkpoint as logical tensors, one at a time.

    Attributes:
        path: Where it is.
        format: What it is called on the command line, such as ``hf``.
        family: Hugging Face family; None where that is not known.
        model: Settings, the vocabulary included.
        has_value_head: Whether it gives values instead of logits.
        layout: In which it was written, as text; None where it is not cut.
        tensors: Logical name -> the whole tensor without padding, in the model's order.
    """

    path: Path
    format: str
    family: str | None
    model: ModelConfig
    has_value_head: bool
    layout: str | None
    tensors: Mapping[str, TensorEntry]

    def read(self, tensor: str) -> Tensor:
        """Read a whole logical tensor in host memory, possibly a view of a file, not to be written.

        Raises:
            CheckpointError: Its bytes are damaged, or it has another shape or dtype than it should.
        """
        ...

    def release(self) -> None:
        """Give back the memory of what was read."""
        ...

    def assets(self) -> dict[str, bytes]:
        """Return small files that travel along, by name: ``config.json``, ``generation_config.json``, the tokenizer."""
        ...

    def identity(self) -> str:
        """Return a sha256 of the files' names, sizes and times, which differs when the source was changed meanwhile."""
        ...


@runtime_checkable
class NamesParts(Protocol):
    """A source whose own names for tensors differ from the logical ones."""

    def names(self, tensor: str) -> list[str]:
        """Return the source's names of the parts of a logical tensor."""
        ...


class Writer(Protocol):
    """A file of tensors that is being written, see ``TensorFileWriter``.

    One thread at a time writes to it; where its target can go on with files, another may sync it meanwhile.

    Attributes:
        num_bytes: Its size when whole.
    """

    num_bytes: int

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

    files: Mapping[str, Mapping[str, Entry]]
    is_single_file: bool
    can_go_on: bool

    def places(self, tensor: str) -> list[tuple[str, str]]:
        """Return file and key of every part of a logical tensor."""
        ...

    def parts(self, tensor: str, values: Tensor, files: Collection[str]) -> Iterator[tuple[str, str, Tensor]]:
        """Return file, key and values of the parts of a logical tensor that belong into some of the files.

        Args:
            tensor: Logical name.
            values: The whole of it, of the dtype to be written.
            files: Names of files.
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
