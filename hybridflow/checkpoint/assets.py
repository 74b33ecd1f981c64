"""The small files beside tensors: settings and tokenizer, which travel along from format to format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hybridflow.errors import CheckpointError

CONFIG = "config.json"
ASSETS = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""The small files that travel along."""

_MAX_JSON_BYTES = 1 << 28


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        CheckpointError: It is missing, too large, or no such JSON.
    """
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes, more than {_MAX_JSON_BYTES}")
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}; restore it from a copy") from error
    return parse_json(content, str(path))


def parse_json(content: bytes, where: str) -> dict[str, Any]:
    """The object that some JSON stands for.

    Raises:
        CheckpointError: It is no JSON, or no object.
    """
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: found {error}, expected JSON; restore it from a copy") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{where}: found {type(values).__name__}, expected a JSON object; restore it from a copy")
    return values


def read_assets(folder: Path) -> dict[str, bytes]:
    """The small files of a directory that travel along, by name."""
    try:
        return {name: (folder / name).read_bytes() for name in ASSETS if (folder / name).is_file()}
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error}; restore it from a copy") from error


def identity_of(paths: Iterable[Path]) -> str:
    """What differs when one of the files was changed: the sha256 of their names, sizes and times."""
    rows = []
    for path in paths:
        if path.is_file():
            found = path.stat()
            rows.append([path.name, found.st_size, found.st_mtime_ns])
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
