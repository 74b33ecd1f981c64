"""Which files of a Hugging Face directory hold its weights, and the shapes in them. No torch, and no weight is read."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from pathlib import Path

from hybridflow.errors import CheckpointError
from hybridflow.families.assets import read_json
from hybridflow.foreign import MAX_SMALL_BYTES, names_in, open_regular

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def find_weight_files(path: Path) -> dict[str, set[str] | None]:
    """Return the names of the files -> the tensors that the index has in each; None: there is no index.

    Args:
        path: The directory.

    Raises:
        CheckpointError: A file is missing, the index is damaged, or the weights are pickles.
    """
    if (path / INDEX).is_file():
        return _indexed(path)
    if (path / SINGLE).is_file():
        return {SINGLE: None}
    pickled = sorted(file.name for file in path.glob("*.bin")) + sorted(file.name for file in path.glob("*.pt*"))
    if pickled:
        raise CheckpointError(
            f"{path}: found {', '.join(pickled[:4])}, expected {SINGLE} or {INDEX}: pickled weights can run code and "
            "are not read; load the model with transformers where you trust it, and save_pretrained it"
        )
    found = ", ".join(names_in(path)[:10])
    raise CheckpointError(f"{path}: found {found}, expected {SINGLE} or {INDEX}; restore the weights from a copy")


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in the weights of a directory, from the headers of its files.

    Raises:
        CheckpointError: As ``find_weight_files``; or a header is damaged.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name in find_weight_files(path):
        try:
            with open_regular(path / name) as file:
                (size,) = struct.unpack("<Q", file.read(8))
                if size > MAX_SMALL_BYTES:
                    raise ValueError(f"a header of {size} bytes")
                header = json.loads(file.read(size))
            header.pop("__metadata__", None)
            found |= {tensor: tuple(map(int, entry["shape"])) for tensor, entry in header.items()}
        except (AttributeError, KeyError, OSError, TypeError, ValueError, RecursionError, struct.error) as error:
            raise CheckpointError(
                f"{path / name}: cannot be read as safetensors: {type(error).__name__}: {error}; restore it from a copy"
            ) from error
    return found


def _indexed(path: Path) -> dict[str, set[str] | None]:
    index = path / INDEX
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) and name for name in places.values()):
        raise CheckpointError(f"{index}: weight_map: expected an object of file names; restore it from a copy")
    by_file: dict[str, set[str]] = defaultdict(set)
    for tensor, name in places.items():
        by_file[name].add(tensor)
    if (path / SINGLE).is_file() and SINGLE not in by_file:
        raise CheckpointError(
            f"{path}: holds both {SINGLE} and {INDEX}, which names {', '.join(sorted(by_file)[:3]) or 'no file'}; "
            "expected one: remove the one that is stale"
        )
    for name in sorted(by_file):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index}: names {name!r}, expected a safetensors file beside it; restore the index")
        if not (path / name).is_file():
            raise CheckpointError(
                f"{path / name}: missing; {INDEX} has {len(by_file[name])} tensors in it: restore it from a copy"
            )
    return {name: by_file[name] for name in sorted(by_file)}
