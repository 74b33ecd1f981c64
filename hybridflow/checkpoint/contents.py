"""What is in a checkpoint, from its headers alone, so that a huge one is looked into at once."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.checkpoint import manifest
from hybridflow.checkpoint.job_file import JOB, read_note, read_roles, step_of
from hybridflow.checkpoint.manifest import WEIGHT, Manifest, TensorEntry, check_files, read_manifest
from hybridflow.errors import CheckpointError
from hybridflow.families.assets import ADAPTER_CONFIG, CONFIG, FOLDER, read_json
from hybridflow.sections import to_dict

_CHECKED = {
    **dict.fromkeys(("megatron", "hdf5"), "every byte agrees with its hash"),
    **dict.fromkeys(("megatron-dist", "megatron-legacy"), "every tensor agrees with its checksum, a CRC-32"),
}
"""What is known once all was read, of formats whose reading compares something."""
_INCOMPLETE = (".tmp", ".part")


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What one model's checkpoint holds.

    Attributes:
        path: Where it is.
        format: What it is called on the command line.
        held: What it holds; of another format than ours without pieces, progress and versions.
        files: Size of each, by its name below ``path``.
        adapter: What ``adapter_config.json`` says, of a LoRA adapter; None for a model.
        verified: What was checked of its bytes, in words; None: nothing.
    """

    path: Path
    format: str
    held: Manifest
    files: Mapping[str, int]
    adapter: Mapping[str, Any] | None = None
    verified: str | None = None

    @property
    def weights(self) -> Mapping[str, TensorEntry]:
        """Return the weights with which the model computes."""
        return self.held.tensors.get(WEIGHT, {})

    @property
    def num_parameters(self) -> int:
        """Count the elements of the weights."""
        return sum(math.prod(entry.shape) for entry in self.weights.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the values, ready for JSON."""
        return {
            "path": str(self.path),
            "format": self.format,
            "family": self.held.family,
            "has_value_head": self.held.has_value_head,
            "layout": self.held.layout,
            "model": to_dict(self.held.model),
            "num_parameters": self.num_parameters,
            "weight_bytes": sum(entry.num_bytes for entry in self.weights.values()),
            "dtypes": dtypes(self.weights.values()),
            "progress": None if self.held.progress is None else self.held.progress._asdict(),
            "written_by": dict(self.held.written_by),
            "adapter": None if self.adapter is None else dict(self.adapter),
            "verified": self.verified,
            "files": dict(self.files),
            "tensors": {
                kind: {name: {"dtype": entry.dtype, "shape": list(entry.shape)} for name, entry in tensors.items()}
                for kind, tensors in self.held.tensors.items()
            },
        }


@dataclass(frozen=True, kw_only=True)
class Damaged:
    """A checkpoint that cannot be read.

    Attributes:
        path: Where it is.
        error: What is wrong.
    """

    path: Path
    error: str

    def to_dict(self) -> dict[str, Any]:
        """Return the values, ready for JSON."""
        return {"path": str(self.path), "error": self.error}


@dataclass(frozen=True, kw_only=True)
class Collection:
    """Checkpoints in one directory: the roles of a step, the steps of a run.

    Attributes:
        path: The directory.
        latest: Which step would be resumed from; None where that is not said.
        members: Name -> what is there.
        incomplete: Names that are being written, or whose writer was killed.
    """

    path: Path
    latest: str | None
    members: Mapping[str, Contents | Damaged | Collection]
    incomplete: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the values, ready for JSON."""
        return {
            "path": str(self.path),
            "latest": self.latest,
            "incomplete": list(self.incomplete),
            "members": {name: member.to_dict() for name, member in self.members.items()},
        }


Looked = Contents | Damaged | Collection


def look(path: Path, *, base: Path | None, verify: Callable[[Contents], Contents]) -> Contents | Collection:
    """Look at a path: one model's checkpoint in any format, a step of a run, its checkpoints, or the run.

    Args:
        path: Where.
        base: Base of an adapter that does not name a directory of its own.
        verify: Told the contents of each model; gives them back, or reads everything, see ``verified``.

    Raises:
        CheckpointError: It is nothing that is known here; or it is one model's, and damaged.
        ConfigError: It is of a family or has a feature that is not known here.
    """
    found = None if (path / manifest.NAME).is_file() else _collection(path, verify)
    return verify(_contents(path, base)) if found is None else found


def _collection(path: Path, verify: Callable[[Contents], Contents]) -> Collection | None:
    """Return the checkpoints in a directory of a run; None where it is none."""
    if (path / CONFIG).is_file() or (path / ADAPTER_CONFIG).is_file():
        # Other programs leave files with our names beside a model or an adapter.
        return None
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if (folder / JOB).is_file():
        return _step(folder, verify)
    if not folder.is_dir():
        return None
    names = sorted(each.name for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    members: dict[str, Looked] = {}
    for name in names:
        if step_of(name) is not None:
            members[name] = _tried(folder / name, lambda path: _step(path, verify))
        elif (folder / name / manifest.NAME).is_file() and not name.endswith(_INCOMPLETE):
            members[name] = _tried(folder / name, lambda path: verify(model_directory(path)))
    latest = read_note(folder / "latest")
    if not members and latest is None:
        return None
    return Collection(
        path=folder,
        latest=latest if latest is None else latest[:80],
        members=members,
        incomplete=tuple(name for name in names if name.endswith(_INCOMPLETE)),
    )


def _step(path: Path, verify: Callable[[Contents], Contents]) -> Collection:
    """Return the roles that a step has of its own; those that it shares with other steps must be there.

    Raises:
        CheckpointError: What says which roles there are is missing or damaged.
    """
    remedy = "restore it from a copy"
    body = manifest.read_digested(path / JOB, remedy)
    roles = {
        role: (path.parent / record.directory, record.sha256) for role, record in read_roles(body, path, remedy).items()
    }

    def role_of(expected: str, folder: Path) -> Contents:
        file = folder / manifest.NAME
        found = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "no such file"
        if found != expected:
            raise CheckpointError(f"{file}: found {found}, expected sha256 {expected}; restore it from a copy")
        return verify(model_directory(folder)) if folder.parent == path else model_directory(folder)

    found = {role: _tried(folder, functools.partial(role_of, sha256)) for role, (folder, sha256) in roles.items()}
    own = {role: each for role, each in found.items() if each.path.parent == path or isinstance(each, Damaged)}
    return Collection(path=path, latest=None, members=own)


def _tried(path: Path, read: Callable[[Path], Contents | Collection]) -> Looked:
    """Return what is there, or what is wrong with it, so that the rest is looked at too."""
    try:
        return read(path)
    except CheckpointError as error:
        return Damaged(path=path, error=str(error))


def _contents(path: Path, base: Path | None) -> Contents:
    if (path / manifest.NAME).is_file():
        return model_directory(path)
    from hybridflow.checkpoint.formats.megatron_dist import find_iteration
    from hybridflow.checkpoint.formats.registry import open_source

    source = open_source(path, base=base)
    held = Manifest(
        family=source.family,
        model=source.model,
        has_value_head=source.has_value_head,
        layout=source.layout,
        tensors={WEIGHT: source.tensors},
        pieces=(),
        file_bytes={},
        written_by={},
    )
    adapter = read_json(source.path / ADAPTER_CONFIG) if source.format == "peft" else None
    files = _files(source.path)
    if source.format in ("megatron-dist", "megatron-legacy"):
        # Beside the iteration that was read lie others.
        read = find_iteration(source.path)
        others = {each for each in source.path.glob("iter_*") if each != read}
        files = {name: size for name, size in files.items() if others.isdisjoint((source.path / name).parents)}
    return Contents(path=source.path, format=source.format, held=held, files=files, adapter=adapter)


def model_directory(path: Path) -> Contents:
    """Return the contents of a hybridflow model directory, by its manifest and the sizes of its files.

    Raises:
        CheckpointError: The manifest is damaged, or a file is missing or has another size.
    """
    found = read_manifest(path)
    check_files(path, found)
    file = path / FOLDER / ADAPTER_CONFIG
    adapter = read_json(file) if file.is_file() else None
    return Contents(path=path, format="megatron", held=found, files=_files(path), adapter=adapter)


def _files(path: Path) -> dict[str, int]:
    if path.is_file():
        return {path.name: path.stat().st_size}
    files = (each for each in sorted(path.rglob("*")) if each.is_file())
    return {str(each.relative_to(path)): each.stat().st_size for each in files}


def verified(found: Contents, *, base: Path | None, progress: Callable[[int, int], None]) -> Contents:
    """Return the same contents after reading every byte and comparing it with the format's hashes or checksums.

    The small files that travel along are compared too where the format has their hashes.

    Args:
        found: What the headers say.
        base: As ``look``.
        progress: Told how many bytes of tensors were checked, and how many there are.

    Raises:
        CheckpointError: The first tensor or small file that is damaged.
    """
    from hybridflow.checkpoint.formats.registry import open_source
    from hybridflow.checkpoint.model_dir import ModelDir
    from hybridflow.checkpoint.tensor_file import bytes_of
    from hybridflow.reshard.spec import ITEM_BYTES, num_elements

    total = sum(entry.num_bytes for tensors in found.held.tensors.values() for entry in tensors.values())
    done = 0
    if (found.path / manifest.NAME).is_file():
        for piece in ModelDir(found.path).verify():
            done += num_elements(piece.box) * ITEM_BYTES[found.held.tensors[piece.kind][piece.tensor].dtype]
            progress(done, total)
    else:
        source = open_source(found.path, base=base)
        if found.format == "hdf5":
            source.assets()
        for name, entry in source.tensors.items():
            values = source.read(name)
            if found.format not in _CHECKED:
                # It may be a view of a file of which nothing has been read yet.
                zlib.crc32(bytes_of(values))
            source.release()
            done += entry.num_bytes
            progress(done, total)
    nothing = f"every tensor was read; {found.format} has no hashes, so that only the structure is known to be right"
    return dataclasses.replace(found, verified=_CHECKED.get(found.format, nothing))


def dtypes(entries: Iterable[TensorEntry]) -> dict[str, int]:
    """Return number format -> bytes, the most first."""
    found = Counter[str]()
    for entry in entries:
        found[entry.dtype] += entry.num_bytes
    return dict(found.most_common())


def is_damaged(found: Looked) -> bool:
    """Return whether any of it is damaged, or the latest is not there."""
    if isinstance(found, Collection):
        is_lost = found.latest is not None and found.latest not in found.members
        return is_lost or any(is_damaged(member) for member in found.members.values())
    return isinstance(found, Damaged)
