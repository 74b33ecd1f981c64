"""The small files beside tensors: settings and tokenizer, which travel along from format to format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hybridflow.errors import CheckpointError
from hybridflow.foreign import check_link, read_small

CONFIG = "config.json"
GENERATION = "generation_config.json"
"""How transformers generates with the model by default."""

ADAPTER_CONFIG = "adapter_config.json"
FOLDER = "assets"
"""Where a model directory of ours keeps them."""

TOKENIZERS = ("tokenizer.json", "tokenizer.model")
"""Files of which each is a tokenizer."""

CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")
ASSETS = (
    CONFIG,
    GENERATION,
    *TOKENIZERS,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
    *CHAT_TEMPLATES,
)
"""The small files that travel along."""


def is_of_model(name: str) -> bool:
    """Return whether a small file belongs to the model itself, not to its tokenizer: settings or code."""
    return name in (CONFIG, GENERATION) or name.endswith(".py")


class Ends(NamedTuple):
    """What a model's settings say of tokens that are no text.

    Attributes:
        eos_ids: Each of them ends a response.
        pad_id: Fills up; None: they do not say.
    """

    eos_ids: tuple[int, ...]
    pad_id: int | None


def ends_in(assets: Mapping[str, bytes]) -> Ends:
    """Return the ids that end a response: from ``generation_config.json``, else ``config.json``, as transformers does.

    Args:
        assets: A model's small files by name.

    Raises:
        CheckpointError: One of the two is no JSON.
    """
    told: dict[str, Any] = {}
    for name in (CONFIG, GENERATION):
        values = parse_json(assets[name], name) if name in assets else {}
        told |= {key: values[key] for key in ("eos_token_id", "pad_token_id") if values.get(key) is not None}
    found, pad_id = told.get("eos_token_id", []), told.get("pad_token_id")
    eos_ids = found if isinstance(found, list) else [found]
    return Ends(tuple(index for index in eos_ids if type(index) is int), pad_id if type(pad_id) is int else None)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        CheckpointError: It is missing, too large, or no such JSON.
    """
    try:
        content = read_small(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}; restore it from a copy") from error
    return parse_json(content, str(path))


def to_json(values: Mapping[str, Any]) -> bytes:
    """Return the text of such a file, as transformers writes it."""
    return (json.dumps(values, indent=2) + "\n").encode()


def parse_json(content: bytes, where: str) -> dict[str, Any]:
    """Parse JSON text that holds an object.

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


def read_assets(folder: Path, names: Iterable[str] = ASSETS, *, follows_links: bool = False) -> dict[str, bytes]:
    """Read the small files of a directory that travel along, by name.

    Args:
        folder: The directory.
        names: The files to read, where they are there.
        follows_links: Whether a file may be a link to any other, as in a directory that the user's own recipe names.

    Raises:
        CheckpointError: One cannot be read, is too large, or is a link to a file that may not be its own.
    """
    paths = {name: folder / name for name in names if (folder / name).is_file()}
    try:
        if not follows_links:
            for path in paths.values():
                # Its content is written again, where others may read it.
                check_link(path)
        return {name: read_small(path) for name, path in paths.items()}
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error}; restore it from a copy") from error


def identity_of(paths: Iterable[Path]) -> str:
    """Return the sha256 of the files' names, sizes and times; it differs when one of the files was changed."""
    rows = []
    for path in paths:
        if path.is_file():
            found = path.stat()
            rows.append([path.name, found.st_size, found.st_mtime_ns])
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
