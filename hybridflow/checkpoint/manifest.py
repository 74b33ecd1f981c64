"""What a model directory holds, as JSON: tensors, where each of their pieces lies, hashes, layout, settings, versions.

    DIR/manifest.json
    DIR/rank-00000.safetensors …   pieces of tensors: the keys and boxes are the manifest's

A piece is a box of a logical tensor (``reshard.spec``), whatever the layout: pieces of a tensor cover it, none twice.
Padding is the layout's and is not kept. A directory is complete or absent: it is renamed when its manifest is synced.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from hybridflow import __version__
from hybridflow.errors import CheckpointError, ConfigError, HybridflowError
from hybridflow.families.assets import FOLDER
from hybridflow.families.model import ModelConfig
from hybridflow.foreign import MAX_SMALL_BYTES, read_small
from hybridflow.observe.files import plain_name
from hybridflow.reshard.spec import ITEM_BYTES, Box, DType, intersect, num_elements
from hybridflow.sections import read_section, to_dict

NAME = "manifest.json"
_MOST_COMPARED = 2_000_000
"""Pairs of boxes in seconds of work. Layouts that hybridflow writes need far fewer."""

_MAX_BYTES = 1 << 32
"""Largest manifest. One of a mixture of experts with a million pieces has 250 MB."""

_LARGEST = 1 << 53
"""Every reader of JSON holds it exactly."""

FORMAT = "hybridflow-model-1"
WEIGHT = "weight"
"""The kind of what the model computes with; others are ``exp_avg``, ``exp_avg_sq`` and ``master``."""


class TensorEntry(NamedTuple):
    """A tensor of a file; or a logical tensor of one kind, whole.

    Attributes:
        dtype: Number format.
        shape: Sizes; of a logical tensor in the view of ``reshard.spec``, without padding.
    """

    dtype: DType
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Return its size in a file."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Piece(NamedTuple):
    """A box of a logical tensor in a file.

    Attributes:
        kind: What of the tensor: see ``WEIGHT``.
        tensor: Logical name.
        box: In logical coordinates; the tensor in the file has its sizes.
        file: Name of the file within the directory.
        key: Name of the tensor within the file.
        sha256: Of its bytes.
    """

    kind: str
    tensor: str
    box: Box
    file: str
    key: str
    sha256: str


class OptimizerProgress(NamedTuple):
    """Where an optimizer stands.

    Attributes:
        num_steps: Steps that it took.
        learning_rate: Learning rate of its next step.
    """

    num_steps: int
    learning_rate: float


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a model directory holds.

    Attributes:
        model: Settings; the vocabulary is always given.
        family: Hugging Face family; None where the model was made from a recipe.
        has_value_head: Whether it gives values instead of logits.
        layout: In which it was written, as text; None where it was not cut.
        tensors: Kind -> logical name -> the whole tensor, in the model's order.
        pieces: Where they lie.
        file_bytes: Size of each file.
        progress: The optimizer's; None without one.
        notes: Whatever else belongs to the model; JSON.
        written_by: Versions.
    """

    model: ModelConfig
    family: str | None = None
    has_value_head: bool = False
    layout: str | None = None
    tensors: Mapping[str, Mapping[str, TensorEntry]]
    pieces: tuple[Piece, ...]
    file_bytes: Mapping[str, int]
    progress: OptimizerProgress | None = None
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    written_by: Mapping[str, str] = dataclasses.field(default_factory=lambda: versions())


def versions() -> dict[str, str]:
    """Return the versions of what decides a checkpoint's bytes."""
    found = {"hybridflow": __version__, "python": platform.python_version()}
    for package in ("torch", "megatron-core", "safetensors"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def piece_key(kind: str, tensor: str, index: int) -> str:
    """Return a piece's name within its file: plain names for weights, so that other tools find them.

    Args:
        kind: See ``Piece``.
        tensor: See ``Piece``.
        index: Which of the file's pieces of that tensor.
    """
    name = tensor if kind == WEIGHT else f"{kind}:{tensor}"
    return name if index == 0 else f"{name}#{index}"


def to_json(manifest: Manifest) -> str:
    """Return the manifest as text, with a hash of itself."""
    listed: dict[str, list[list[Any]]] = {file: [] for file in manifest.file_bytes}
    for piece in manifest.pieces:
        listed[piece.file].append([piece.key, piece.kind, piece.tensor, piece.box, piece.sha256])
    body: dict[str, Any] = {
        "format": FORMAT,
        "written_by": dict(manifest.written_by),
        # The weights are here; where those came from that training began with says nothing of them.
        "model": {key: value for key, value in to_dict(manifest.model).items() if key != "path"},
        "family": manifest.family,
        "has_value_head": manifest.has_value_head,
        "layout": manifest.layout,
        "progress": None if manifest.progress is None else manifest.progress._asdict(),
        "notes": dict(manifest.notes),
        "tensors": {
            kind: {name: [entry.dtype, *entry.shape] for name, entry in tensors.items()}
            for kind, tensors in manifest.tensors.items()
        },
        "files": {file: {"bytes": size, "pieces": listed[file]} for file, size in manifest.file_bytes.items()},
    }
    # A line for each key: an indent for each piece would double the bytes, and the time of a mixture of many pieces.
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in {"sha256": digest(body), **body}.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def digest(body: Mapping[str, Any]) -> str:
    """Return the sha256 of JSON values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_digested(path: Path, remedy: str, max_bytes: int = MAX_SMALL_BYTES) -> dict[str, Any]:
    """Read a JSON file that carries the hash of itself.

    Raises:
        CheckpointError: It is missing, larger than ``max_bytes``, no JSON, or not what was written.
    """
    try:
        body: dict[str, Any] = json.loads(read_small(path, max_bytes))
        expected, found = body.pop("sha256"), digest(body)
    except (OSError, ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path}: found {reason}, expected JSON with its sha256; {remedy}") from error
    if found != expected:
        raise CheckpointError(f"{path}: found sha256 {found}, expected {str(expected)[:64]}; {remedy}")
    return body


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a model directory, complete and consistent.

    Raises:
        CheckpointError: It is missing, damaged or of another format, or its pieces do not cover its tensors.
    """
    path = folder / NAME
    body = read_digested(path, "restore it from a copy", _MAX_BYTES)
    if body.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: found format {body.get('format')!r}, expected {FORMAT!r}; "
            "read it with the version of hybridflow that wrote it"
        )
    try:
        manifest = _from_body(body, path)
        check_cover(manifest, path)
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
        reason = str(error) if isinstance(error, HybridflowError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path}: is malformed: {reason}; restore it from a copy") from error
    return manifest


def _from_body(body: Mapping[str, Any], path: Path) -> Manifest:
    for key, kinds in _KINDS.items():
        if not isinstance(body[key], kinds):
            raise ValueError(f"{key} is {type(body[key]).__name__}, expected {kinds[0].__name__}")
    for name, sha256 in dict(body["notes"].get(FOLDER, {})).items():
        plain_name(name)
        _text(sha256)
    return Manifest(
        model=read_section(ModelConfig, body["model"], source=str(path)),
        family=body["family"] if body["family"] is None else _text(body["family"]),
        has_value_head=body["has_value_head"],
        layout=body["layout"] if body["layout"] is None else _text(body["layout"]),
        tensors={
            _text(kind): {_text(name): _entry(name, *entry) for name, entry in tensors.items()}
            for kind, tensors in body["tensors"].items()
        },
        pieces=tuple(
            Piece(kind, tensor, tuple((_whole(start), _whole(stop)) for start, stop in box), file, _text(key), sha256)
            for file, held in body["files"].items()
            for key, kind, tensor, box, sha256 in held["pieces"]
        ),
        file_bytes={plain_name(file): _whole(held["bytes"]) for file, held in body["files"].items()},
        progress=None if body["progress"] is None else _progress(**body["progress"]),
        notes=body["notes"],
        written_by={_text(name): _text(version) for name, version in body["written_by"].items()},
    )


_KINDS: Mapping[str, tuple[type, ...]] = {
    "family": (str, type(None)),
    "has_value_head": (bool,),
    "layout": (str, type(None)),
    "progress": (dict, type(None)),
    **dict.fromkeys(("model", "tensors", "files", "notes", "written_by"), (dict,)),
}
"""Types of a manifest's values."""


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(f"found {str(value)[:80]!r}, expected text of printable letters")
    return value


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise ValueError(f"found {str(value)[:80]}, expected an integer of at least 0 and at most {_LARGEST}")
    return value


def _entry(name: str, dtype: str, *shape: object) -> TensorEntry:
    if dtype not in ITEM_BYTES:
        raise ValueError(f"{name} is of dtype {str(dtype)[:80]!r}, expected one of {', '.join(ITEM_BYTES)}")
    return TensorEntry(dtype, tuple(map(_whole, shape)))


def _progress(num_steps: object, learning_rate: object) -> OptimizerProgress:
    if isinstance(learning_rate, bool) or not isinstance(learning_rate, int | float):
        raise ValueError(f"learning_rate is {type(learning_rate).__name__}, expected a number")
    return OptimizerProgress(_whole(num_steps), learning_rate)


def check_cover(manifest: Manifest, path: Path) -> None:
    """Hold the pieces against the tensors: each in full, by boxes within it, no element twice.

    Args:
        manifest: What is, or is to be, written.
        path: Its file, for messages.

    Raises:
        CheckpointError: Names the first piece or tensor of which that is not so.
    """
    boxes: dict[tuple[str, str], list[Box]] = {
        (kind, name): [] for kind, tensors in manifest.tensors.items() for name in tensors
    }
    for piece in manifest.pieces:
        key = piece.kind, piece.tensor
        if key not in boxes:
            raise CheckpointError(f"{path}: {piece.file} holds {piece.key}, which is no tensor of the manifest")
        shape = manifest.tensors[piece.kind][piece.tensor].shape
        inside = len(piece.box) == len(shape) and all(
            0 <= start <= stop <= size for (start, stop), size in zip(piece.box, shape, strict=True)
        )
        if not inside:
            raise CheckpointError(f"{path}: {piece.key} of {piece.file} is {piece.box}, not a box of {list(shape)}")
        if num_elements(piece.box) > 0:
            boxes[key].append(piece.box)
    for (kind, name), held in boxes.items():
        missing = math.prod(manifest.tensors[kind][name].shape) - sum(map(num_elements, held))
        twice = overlap(held)
        if missing or twice is not None:
            what = f"lack {missing} elements" if missing > 0 else f"repeat {abs(missing)} elements"
            if twice is not None:
                what = f"repeat {twice}"
            raise CheckpointError(f"{path}: the pieces of {kind} {name} {what}; restore the directory from a copy")


def overlap(boxes: list[Box]) -> Box | None:
    """Return what two of some boxes, none empty, have in common; None if no two have anything.

    Raises:
        ValueError: Comparing them would take very long.
    """
    if len(boxes) < 2 or not boxes[0]:
        return boxes[0] if len(boxes) > 1 else None
    # Swept along the dim that tells most of them apart, so that few are compared with each other.
    dim = max(range(len(boxes[0])), key=lambda dim: len({box[dim][0] for box in boxes}))
    near: list[Box] = []
    num_compared = 0
    for box in sorted(boxes, key=lambda box: box[dim]):
        near = [other for other in near if other[dim][1] > box[dim][0]]
        num_compared += len(near)
        if num_compared > _MOST_COMPARED:
            raise ValueError(f"{len(boxes)} pieces of a tensor lie as no layout cuts it")
        for other in near:
            common = intersect(box, other)
            if num_elements(common) > 0:
                return common
        near.append(box)
    return None


def check_files(folder: Path, manifest: Manifest) -> None:
    """Check that every file is there with its size.

    Raises:
        CheckpointError: Names the first that is not.
    """
    for name, size in manifest.file_bytes.items():
        file = folder / name
        found = f"{file.stat().st_size} bytes" if file.is_file() else "no such file"
        if found != f"{size} bytes":
            raise CheckpointError(f"{file}: found {found}, expected {size} bytes; restore it from a copy")
