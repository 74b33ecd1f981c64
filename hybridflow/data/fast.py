"""Fast tokenizers of Hugging Face, from a ``tokenizer.json``: the only door to ``tokenizers``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow.errors import DataError


class FastTokenizer:
    """A ``tokenizer.json`` with the ``tokenizer_config.json`` beside it; see ``tokenizer.Tokenizer``.

    Attributes:
        path: The ``tokenizer.json``.
        vocab_size: The largest id and one.
        eos_id: Id of the ``eos_token``, or the first of ``more_stops`` where none is named.
        stop_ids: That one, and ``more_stops``.
        pad_id: Id of the ``pad_token``; where there is none, the end of sequence.
        bos_id: What the tokenizer's own template puts before a text.

    Args:
        path: The ``tokenizer.json``.
        settings: The parsed ``tokenizer_config.json``; may be empty.
        more_stops: Other ids at which a response ends, from what lies beside the file.

    Raises:
        DataError: The package is not installed, the file is missing or damaged, or knows no end of sequence.
    """

    def __init__(self, path: Path, *, settings: Mapping[str, Any], more_stops: Sequence[int] = ()) -> None:
        self.path = path
        self._tokenizer = _load(path)
        # Neither is for us: a file may carry what it was once called with.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._pieces: dict[int, str] = {index: piece for piece, index in self._tokenizer.get_vocab().items()}
        self.vocab_size = max(self._pieces, default=-1) + 1
        eos_id = self._named(settings, "eos_token")
        stops = (*(() if eos_id is None else (eos_id,)), *more_stops)
        if not stops:
            raise DataError(
                f"tokenizer {path}: knows no end of sequence; name its eos_token in tokenizer_config.json, or its "
                "eos_token_id in generation_config.json, beside it"
            )
        self.eos_id = stops[0]
        self.stop_ids = tuple(dict.fromkeys(stops))
        pad_id = self._named(settings, "pad_token")
        self.pad_id = self.eos_id if pad_id is None else pad_id
        self.bos_id = self._first_of_template()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without any at its beginning or end."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; special tokens are left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def pieces(self) -> dict[int, str]:
        """Return every token id with its text, as the file has it."""
        return dict(self._pieces)

    def _named(self, settings: Mapping[str, Any], key: str) -> int | None:
        """Return the id of a token that the settings name, as text or as an object with its ``content``."""
        token = settings.get(key)
        token = token.get("content") if isinstance(token, Mapping) else token
        if not isinstance(token, str):
            return None
        found: int | None = self._tokenizer.token_to_id(token)
        if found is None:
            raise DataError(
                f"tokenizer {self.path}: has no token {token!r}, the {key} of tokenizer_config.json; mend it"
            )
        return found

    def _first_of_template(self) -> int | None:
        encoded = self._tokenizer.encode("a", add_special_tokens=True)
        mask = encoded.special_tokens_mask
        before = encoded.ids[: mask.index(0) if 0 in mask else len(mask)]
        if len(before) > 1:
            raise DataError(
                f"tokenizer {self.path}: puts {len(before)} tokens before a text; at most one is supported, choose "
                "another model"
            )
        return before[0] if before else None


def _load(path: Path) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            f"tokenizer {path}: reading it takes the package tokenizers, which is not installed; pip install "
            "'hybridflow[hf]'"
        ) from error
    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    # The package raises plain exceptions for whatever it cannot parse.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"tokenizer {path}: cannot be read: {type(error).__name__}: {reason:.200}; copy it anew, or update the "
            "package tokenizers"
        ) from error
