"""Model directories of ours as a source and a target of conversion, in any layout. Of a run's checkpoint, a role's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hybridflow.checkpoint.formats import lora
from hybridflow.checkpoint.formats.source import Source, Target, check_shapes, written_dtype
from hybridflow.checkpoint.job_file import JOB, read_note, read_roles, step_of
from hybridflow.checkpoint.manifest import NAME, WEIGHT, Manifest, Piece, TensorEntry, piece_key
from hybridflow.checkpoint.model_dir import ASSET_NAMES, ModelDir, write_assets, write_manifest
from hybridflow.checkpoint.store import BASE
from hybridflow.checkpoint.tensor_file import TensorFileWriter
from hybridflow.errors import CheckpointError, ConfigError, LayoutError
from hybridflow.families.assets import CONFIG, FOLDER, identity_of, read_json
from hybridflow.families.cut import check_heads
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.reshard.spec import Box, DType, TensorSpec, cut, expert_block, num_elements, slices, stage_of

_WHOLE = ParallelLayout()


def find_model(path: Path) -> Path | None:
    """Find the model directory of a path: itself, or the actor or only role of a step, of the latest step of a run.

    Returns:
        None where there is no model directory.

    Raises:
        ConfigError: There are several roles, which the message names, and none is the actor.
        CheckpointError: The note of the latest step is damaged.
    """
    if (path / NAME).is_file():
        return path
    if (path / CONFIG).is_file():
        # A model of Hugging Face; other programs leave files with our names beside one.
        return None
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    step = read_note(folder / "latest") if folder.is_dir() else None
    if step is None:
        # Lost; a run goes on from the newest then, too.
        names = {number: each.name for each in folder.glob("step_*") if (number := step_of(each.name)) is not None}
        step = names[max(names)] if names else None
    if step is not None:
        if step_of(step) is None or not (folder / step).is_dir():
            raise CheckpointError(
                f"{folder / 'latest'}: found {step[:80]!r}, expected the name of a step beside it; give the step's path"
            )
        folder = folder / step
    if not (folder / JOB).is_file():
        # Beside the steps of a run lies its reference, which is not what was trained.
        return None
    roles = sorted(file.parent for file in folder.glob(f"*/{NAME}"))
    if folder / "actor" in roles:
        return folder / "actor"
    if len(roles) > 1:
        raise ConfigError(f"{path}: holds several models; give one of {', '.join(map(str, roles))}")
    return roles[0] if roles else None


def find_base(adapter: Path) -> Path | None:
    """Find the weights that go with the adapter of a run's checkpoint; None where it is in no checkpoint.

    Raises:
        CheckpointError: The checkpoint's state is damaged.
    """
    state = adapter.parent / JOB
    if not state.is_file():
        return None
    roles = read_roles({"roles": {}, **read_json(state)}, state.parent, "restore it from a copy")
    return adapter.parent.parent / roles[BASE].directory if BASE in roles else None


class ShardedSource(Source):
    """The weights of a model directory, see ``source.Source``; every piece's hash is checked when it is read.

    Args:
        path: The directory; or a step of a run, or the run, where one role is saved.

    Raises:
        CheckpointError: There is no such directory, or it is damaged.
    """

    format = "megatron"

    def __init__(self, path: Path) -> None:
        found = find_model(path)
        if found is None:
            raise CheckpointError(f"{path}: has no {NAME}; give the directory of a model, or of a run's checkpoint")
        self.path = found
        self._dir = ModelDir(found)
        manifest = self._dir.manifest
        if WEIGHT not in manifest.tensors:
            raise CheckpointError(f"{found / NAME}: has no weights; give a directory that has")
        self.family, self.model, self.layout = manifest.family, manifest.model, manifest.layout
        self.has_value_head = manifest.has_value_head
        self.tensors = manifest.tensors[WEIGHT]
        if lora.is_adapter(self):
            lora.check_adapter(self)
        elif self.model.implementation == "megatron":
            shapes = {name: entry.shape for name, entry in self.tensors.items()}
            check_shapes(shapes, self.model, has_value_head=self.has_value_head, where=str(found / NAME))

    def read(self, tensor: str) -> Tensor:
        """See ``Source``."""
        return self._dir.read(WEIGHT, tensor)

    def read_box(self, tensor: str, box: Box, dtype: torch.dtype) -> Tensor:
        """See ``Source``; only the pieces that the box lies in are read, and their hashes checked."""
        return self._dir.read(WEIGHT, tensor, box)

    def release(self) -> None:
        """See ``Source``."""
        self._dir.release()

    def assets(self) -> dict[str, bytes]:
        """See ``Source``."""
        return self._dir.assets()

    def identity(self) -> str:
        """See ``Source``."""
        files = [self.path / name for name in (NAME, *self._dir.manifest.file_bytes)]
        return identity_of([*files, *(self.path / FOLDER / name for name in ASSET_NAMES)])


class _Part(NamedTuple):
    """A piece to be written."""

    file: str
    key: str
    box: Box


class ShardedTarget(Target):
    """A model directory with a file for each place of a layout that holds weights of its own, see ``source.Target``.

    Places are a tensor parallel index and a pipeline stage; in a mixture each block of experts has files beside. What
    several ranks would hold alike is written once, on the first.

    Args:
        source: What is to be written.
        layout: How it is cut; data and context parallel ranks add no files.
        dtype: Number format to write; None: each tensor's own.

    Attributes:
        model: Settings of what is written.
        tensors: Logical name -> the whole tensor, as it is written.

    Raises:
        LayoutError: The layout does not cut the model.
        ReshardError: The same, found at one tensor.
    """

    def __init__(self, source: Source, layout: ParallelLayout = _WHOLE, *, dtype: DType | None = None) -> None:
        # All else is cut into boxes, whose sizes may differ.
        check_heads(source.model, layout.tp, f"layout {layout}")
        if source.model.num_experts is None and (layout.ep > 1 or layout.etp is not None):
            raise LayoutError(f"layout {layout}: the model has no experts; leave ep and etp out")
        self._source, self._layout = source, layout
        self.tensors = {
            name: TensorEntry(written_dtype(name, entry, dtype), entry.shape) for name, entry in source.tensors.items()
        }
        self.model = source.model if dtype not in ("fp32", "bf16") else replace(source.model, dtype=dtype)
        spec = lora.spec_of(source)
        self._parts = {tensor.name: _cut(tensor, layout, spec.num_layers) for tensor in spec.tensors}
        files: dict[str, dict[str, TensorEntry]] = defaultdict(dict)
        for name, parts in self._parts.items():
            for part in parts:
                sizes = tuple(stop - start for start, stop in part.box)
                files[part.file][part.key] = TensorEntry(self.tensors[name].dtype, sizes)
        self.files: Mapping[str, Mapping[str, TensorEntry]] = dict(sorted(files.items()))

    def places(self, tensor: str) -> list[tuple[str, str]]:
        """See ``Target``."""
        return [(part.file, part.key) for part in self._parts[tensor]]

    def boxes(self, tensor: str) -> list[tuple[str, str, Box]]:
        """Return file, key and box of every part of a logical tensor."""
        return [(part.file, part.key, part.box) for part in self._parts[tensor]]

    def parts(self, tensor: str, values: Tensor) -> list[Tensor]:
        """See ``Target``."""
        return [values[slices(part.box)] for part in self._parts[tensor]]

    def open(self, path: Path, file: str) -> TensorFileWriter:
        """See ``Target``."""
        return TensorFileWriter(path, self.files[file])

    def finish(self, folder: Path, hashes: Mapping[str, Mapping[str, str]]) -> None:
        """See ``Target``."""
        notes = write_assets(folder, self._source.assets())
        manifest = Manifest(
            model=self.model,
            family=self._source.family,
            has_value_head=self._source.has_value_head,
            layout=str(self._layout),
            tensors={WEIGHT: self.tensors},
            pieces=tuple(
                Piece(WEIGHT, name, part.box, part.file, part.key, hashes[part.file][part.key])
                for name, parts in self._parts.items()
                for part in parts
            ),
            file_bytes={file: (folder / file).stat().st_size for file in self.files},
            notes=notes,
        )
        write_manifest(folder, manifest)


def _cut(spec: TensorSpec, layout: ParallelLayout, num_layers: int) -> list[_Part]:
    """Return the pieces of a tensor that hold any of the box."""
    stage = stage_of(spec.place, layout, num_layers, spec.name)
    count = layout.tp if spec.expert is None else layout.expert_tp
    key, parts = piece_key(WEIGHT, spec.name, 0), []
    for index in range(count if spec.tp_dim is not None else 1):
        box = cut(spec, count, index).box
        if num_elements(box) == 0:  # a rank that holds padding alone
            continue
        place = f"tp{index:02}-pp{stage:02}"
        if spec.expert is not None:
            place = f"ep{expert_block(spec, layout):02}-etp{index:02}-pp{stage:02}"
        parts.append(_Part(f"{place}.safetensors", key, box))
    return parts
