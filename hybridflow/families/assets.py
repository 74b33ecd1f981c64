"""The small files beside tensors: settings and tokenizer, which travel along from format to format."""

from __future__ import annotations

import hashlib
import json
import re
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

VOCABULARIES = (
    *TOKENIZERS,
    *("vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tiktoken.model", "tekken.json"),
)
"""Files of which each is a tokenizer, or with others makes one."""

TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""How pictures and sound become input of a model that takes them. Others do not load such a model without."""

OF_MODEL = (CONFIG, GENERATION, *PROCESSORS)
"""Settings of the model itself, not of its tokenizer."""

ASSETS = (
    *OF_MODEL,
    *VOCABULARIES,
    "merges.txt",
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    *CHAT_TEMPLATES,
)
"""The small files that travel along; a tokenizer's code may too, see ``asset_names``."""

CODE = re.compile(r"\w+\.py", re.ASCII)
"""Names of files of code that travel along. Nothing here runs them."""

_FURTHER = "additional_chat_templates"
"""Folder of the templates that a tokenizer has beside its first one, each named by its file."""


def is_of_model(name: str) -> bool:
    """Return whether a small file belongs to the model itself, not to its tokenizer: settings or code."""
    return name in OF_MODEL or name.endswith(".py")


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
        # Of a vision-language model.
        text = values.get("text_config")
        values = {**text, **values} if isinstance(text, dict) else values
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


def names_code(tokenizer_config: bytes | None) -> bool:
    """Return whether a tokenizer is made by code beside it, without which nobody could load it again."""
    try:
        values = json.loads(tokenizer_config or b"{}")
    except (ValueError, RecursionError):
        return False
    return isinstance(values, dict) and bool(values.get("auto_map"))


def asset_names(folder: Path) -> tuple[str, ...]:
    """Return the names of the small files of a directory: ``ASSETS``, and what its tokenizer needs besides.

    Raises:
        CheckpointError: ``tokenizer_config.json`` cannot be read.
    """
    config = read_assets(folder, (TOKENIZER_CONFIG,), follows_links=True).get(TOKENIZER_CONFIG)
    code = [path.name for path in folder.glob("*.py") if CODE.fullmatch(path.name)] if names_code(config) else []
    templates = [f"{_FURTHER}/{path.name}" for path in (folder / _FURTHER).glob("*.jinja")]
    return (*ASSETS, *sorted(code), *sorted(templates))


def read_assets(folder: Path, names: Iterable[str] = ASSETS, *, follows_links: bool = False) -> dict[str, bytes]:
    """Read the small files of a directory that travel along, by name.

    Several chat templates become the list in ``tokenizer_config.json`` that transformers has them in otherwise.

    Args:
        folder: The directory.
        names: The files to read, where they are there, as ``asset_names`` gives them.
        follows_links: Whether a file may be a link to any other, as in a directory that the user's own recipe names.

    Raises:
        CheckpointError: One cannot be read, is too large, or is a link to a file that may not be its own.
    """
    # A link that leads nowhere is a file that was lost.
    paths = {name: folder / name for name in names if (folder / name).is_file() or (folder / name).is_symlink()}
    try:
        if not follows_links:
            for path in paths.values():
                # Its content is written again, where others may read it.
                check_link(path)
        found = {name: read_small(path) for name, path in paths.items()}
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error}; restore it from a copy") from error
    further = {Path(name).stem: found.pop(name) for name in [*found] if name.startswith(f"{_FURTHER}/")}
    return _with_templates(found, further, folder) if further else found


def _with_templates(assets: Mapping[str, bytes], further: Mapping[str, bytes], folder: Path) -> dict[str, bytes]:
    """Return the small files with all chat templates in ``tokenizer_config.json``, where any program finds them."""
    kept = {name: content for name, content in assets.items() if name != CHAT_TEMPLATES[0]}
    values = parse_json(assets.get(TOKENIZER_CONFIG, b"{}"), str(folder / TOKENIZER_CONFIG))
    first, own = assets.get(CHAT_TEMPLATES[0]), values.get("chat_template")
    try:
        named = {name: content.decode() for name, content in further.items()}
        if first is not None:
            named = {"default": first.decode(), **named}
        elif isinstance(own, str):
            named = {"default": own, **named}
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{folder / _FURTHER}: found {error}, expected UTF-8; restore it from a copy") from error
    values["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    return {**kept, TOKENIZER_CONFIG: to_json(values)}


def identity_of(paths: Iterable[Path]) -> str:
    """Return the sha256 of the files' names, sizes and times; it differs when one of the files was changed."""
    rows = []
    for path in paths:
        if path.is_file():
            found = path.stat()
            rows.append([path.name, found.st_size, found.st_mtime_ns])
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
