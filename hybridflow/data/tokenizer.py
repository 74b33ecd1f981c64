"""Text to token ids and back, whatever the tokenizer is made of, and which one a directory holds."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hybridflow.data.pieces import PieceTokenizer
from hybridflow.errors import DataError
from hybridflow.families.assets import FOLDER
from hybridflow.foreign import read_small

JSON = "tokenizer.json"
PIECES = "tokenizer.model"
SPECIAL = "special_tokens_map.json"
_MAX_IDS = 1 << 31
_RESERVED = re.compile(r"[<\[].*(reserved|unused|place.?holder|dummy|extra|control).*\d.*[>\]]", re.IGNORECASE)
"""Names of tokens that a model was never taught, such as ``<|reserved_special_token_7|>`` and ``<unused7>``."""


class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
        path: Its file.
        vocab_size: Number of token ids.
        eos_id: Ends what a model is to imitate.
        stop_ids: Each of them ends a response; ``eos_id`` is the first.
        pad_id: Fills up.
        bos_id: What the tokenizer puts before the text that begins a sequence; None where it puts nothing.
    """

    path: Path
    vocab_size: int
    eos_id: int
    stop_ids: tuple[int, ...]
    pad_id: int
    bos_id: int | None

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without any at its beginning or end."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; padding, beginning, end of sequence and unknown ids are left out."""
        ...

    def pieces(self) -> dict[int, str]:
        """Return every token id with its text, as the tokenizer's file has it."""
        ...

    def special_id(self, name: str) -> int | None:
        """Return the id of the special token of this name, which ``decode`` leaves out; None where there is none."""
        ...


def start_of(tokenizer: Tokenizer) -> list[int]:
    """Return the token ids that the tokenizer puts before the text that begins a sequence: one or none."""
    return [] if tokenizer.bos_id is None else [tokenizer.bos_id]


def split_stop(stop: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the stop strings to look for in a text, and the ids of the special tokens that the others name."""
    if tokenizer is None:
        return tuple(stop), ()
    ids = {each: tokenizer.special_id(each) for each in stop}
    texts = tuple(each for each, index in ids.items() if index is None)
    return texts, tuple(index for index in ids.values() if index is not None)


def first_new(before: str, after: str, strings: Sequence[str]) -> int | None:
    """Return the start of the first match in ``after`` that reaches beyond its common prefix with ``before``."""
    num_same = len(os.path.commonprefix([before, after]))
    places = [after.find(string, max(num_same - len(string) + 1, 0)) for string in strings]
    return min((place for place in places if place >= 0), default=None)


def special_names(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the special tokens, which ``decode`` leaves out, with their names."""
    return {token: name for token, name in tokenizer.pieces().items() if tokenizer.special_id(name) == token}


def marked_text(tokens: Sequence[int], tokenizer: Tokenizer, names: Mapping[int, str]) -> str:
    """Return a text in which special tokens stand by their names.

    Args:
        tokens: Token ids.
        tokenizer: Gives their text.
        names: From ``special_names``.
    """
    text, before = "", list[int]()
    for name, group in itertools.groupby(tokens, names.get):
        part = list(group)
        if name is None:
            # The first token of a text may lose its leading space.
            text += tokenizer.decode([*before, *part])[len(tokenizer.decode(before)) :]
            before = part
        else:
            text += name * len(part)
    return text


def has_marks(text: str, names: Mapping[int, str]) -> bool:
    """Return whether special tokens, from ``special_names``, stand in a text by their names, as in a chat's."""
    return any(name in text for name in names.values())


def tokenizer_in(folder: str | Path) -> Path | None:
    """Return the tokenizer's file of a Hugging Face or hybridflow directory; None where there is none."""
    for place in (Path(folder), Path(folder) / FOLDER):
        for name in (JSON, PIECES):
            if (place / name).is_file():
                return place / name
    return None


def open_tokenizer(path: str | Path, num_rows: int | None = None) -> Tokenizer:
    """Open a sentencepiece ``.model``, a ``tokenizer.json``, or the one that a directory holds.

    What ``generation_config.json`` or ``config.json`` beside the file calls ends of sequence end a response too.

    Args:
        path: The file or directory.
        num_rows: Tokens that the model knows; of a ``tokenizer.json``, special tokens beyond them are left out.

    Raises:
        DataError: There is none, it cannot be read, or it knows no end of sequence.
    """
    file = Path(path)
    if file.is_dir():
        found = tokenizer_in(file)
        if found is None:
            raise DataError(
                f"tokenizer {path}: found neither {JSON} nor {PIECES} there; set tokenizer.path to one (of a tokenizer "
                "with other files make it by save_pretrained of a fast tokenizer of transformers)"
            )
        file = found
    stops = _stop_ids(file.parent)
    if file.suffix == ".json":
        from hybridflow.data.fast import FastTokenizer

        return FastTokenizer(file, settings=tokenizer_settings(file.parent), more_stops=stops, num_rows=num_rows)
    return PieceTokenizer(file, more_stops=stops)


def check_same_pieces(one: Tokenizer, other: Tokenizer, *, whose: str) -> None:
    """Refuse a model that would read the tokens of another tokenizer.

    Args:
        one: What the job's tokens come from.
        other: What the model was trained with; either may have more tokens at its end.
        whose: Name of the owner of ``other``, for the message.

    Raises:
        DataError: An id that both have stands for different texts; one that either keeps in reserve may have any name.
    """
    mine, theirs = one.pieces(), other.pieces()
    for index in sorted(mine.keys() & theirs.keys()):
        is_reserved = _RESERVED.fullmatch(mine[index]) or _RESERVED.fullmatch(theirs[index])
        if mine[index] != theirs[index] and not is_reserved:
            raise DataError(
                f"{whose}: token {index} is {theirs[index]!r} in {other.path}, and {mine[index]!r} in {one.path}, "
                "which writes the tokens; choose models of one tokenizer"
            )


def _stop_ids(folder: Path) -> tuple[int, ...]:
    """Return the ids that end a text by a model's own settings: of generation if there are any, else of the model."""
    for name in ("generation_config.json", "config.json"):
        found = read_object(folder / name).get("eos_token_id")
        ids = found if isinstance(found, list) else [found]
        if all(type(index) is int and 0 <= index < _MAX_IDS for index in ids):
            return tuple(ids)
    return ()


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Return ``tokenizer_config.json``, with the special tokens that older directories have in a file of their own.

    Raises:
        DataError: One of the files is no JSON object.
    """
    settings = read_object(folder / "tokenizer_config.json")
    # As transformers reads them.
    return settings if "added_tokens_decoder" in settings else {**settings, **read_object(folder / SPECIAL)}


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object beside a tokenizer; empty where there is no such file.

    Raises:
        DataError: The file is something else.
    """
    try:
        values = json.loads(read_small(path).decode("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: found {type(error).__name__}: {error}, expected JSON; copy it anew") from error
    if not isinstance(values, dict):
        raise DataError(f"{path}: found {type(values).__name__}, expected a JSON object; copy it anew")
    return values
