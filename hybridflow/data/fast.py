"""Fast tokenizers of Hugging Face, from a ``tokenizer.json``: the only door to ``tokenizers``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow.data.files import needing
from hybridflow.data.trial import try_tokenizer
from hybridflow.errors import DataError
from hybridflow.foreign import limit_process, read_small

# Ids of real vocabularies have few gaps.
_MAX_GAPS = 1 << 16

_LONG_TEXT = 1 << 15
"""Characters from which other threads may go on while a text is encoded, which takes the start of a thread."""
_CHARACTERS = "".join(map(chr, range(1, 0x250))) + "☃漢字\U0001f642\U0001f1e9\u200b\ufeff"
_SAMPLES = (_CHARACTERS * 16, *(each * 4096 for each in ("a", " ", "\n", "1", "☃", "ab", " a", "<|x|>")))


class FastTokenizer:
    """A ``tokenizer.json`` with the ``tokenizer_config.json`` beside it; see ``tokenizer.Tokenizer``.

    Attributes:
        path: The ``tokenizer.json``.
        vocab_size: The largest id and one, of the tokens that the model has rows for.
        eos_id: Id of the ``eos_token``, or the first of ``more_stops`` where none is named.
        stop_ids: That one, and ``more_stops``.
        pad_id: Id of the ``pad_token``; where there is none, or no row for it, the end of sequence.
        bos_id: What the tokenizer's own template puts before a text.

    Args:
        path: The ``tokenizer.json``.
        settings: The parsed ``tokenizer_config.json``; may be empty.
        more_stops: Other ids at which a response ends, from what lies beside the file.
        num_rows: Of the model's embedding, which may lack the last special tokens: Gemma 3's of 1B parameters has none
            for images. A text with such a token is refused then. None: as many as there are tokens.

    Raises:
        DataError: The package is not installed, the file is missing or damaged, or knows no end of sequence.
    """

    def __init__(
        self,
        path: Path,
        *,
        settings: Mapping[str, Any],
        more_stops: Sequence[int] = (),
        num_rows: int | None = None,
    ) -> None:
        self.path = path
        self._lacking = dict[int, str]()
        self._tokenizer = _load(path)
        # Neither is for us: a file may carry what it was once called with.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._pieces: dict[int, str] = {index: piece for piece, index in self._tokenizer.get_vocab().items()}
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids: dict[str, int] = {each.content: index for index, each in added.items() if each.special}
        self.vocab_size = max(self._pieces, default=-1) + 1
        if self.vocab_size > 2 * len(self._pieces) + _MAX_GAPS:
            raise DataError(
                f"tokenizer {path}: has {len(self._pieces)} tokens with ids up to {self.vocab_size - 1}; copy it anew"
            )
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
        if num_rows is not None:
            self._leave_out(num_rows)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without any at its beginning or end."""
        with _failures_told(self.path, "cannot encode a text"):
            if len(text) < _LONG_TEXT:
                ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
            else:
                ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if self._lacking and (found := self._lacking.keys() & ids):
            raise DataError(
                f"a text has the token {self._lacking[min(found)]!r}, and the model has no row for it; take it out of "
                "the text"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; special tokens are left out."""
        with _failures_told(self.path, "cannot decode token ids"):
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def pieces(self) -> dict[int, str]:
        """Return every token id with its text, as the file has it."""
        return dict(self._pieces)

    def special_id(self, name: str) -> int | None:
        """Return the id of the special token of this name, which ``decode`` leaves out; None where there is none."""
        return self._special_ids.get(name)

    def _leave_out(self, num_rows: int) -> None:
        """Do without the tokens that the model has no rows for, unless a text may need one of them."""
        lacking = {index: piece for index, piece in self._pieces.items() if index >= num_rows}
        if lacking.keys() & {self.eos_id, self.bos_id} or not lacking.keys() <= set(self._special_ids.values()):
            return
        self._lacking = lacking
        self._pieces = {index: piece for index, piece in self._pieces.items() if index < num_rows}
        self._special_ids = {name: index for name, index in self._special_ids.items() if index < num_rows}
        self.vocab_size = max(self._pieces) + 1
        self.stop_ids = tuple(index for index in self.stop_ids if index < num_rows)
        self.pad_id = self.eos_id if self.pad_id in lacking else self.pad_id

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
        with _failures_told(self.path, "cannot encode a text"):
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
    with needing(f"tokenizer {path}: reading it", "tokenizers", "hf"):
        import tokenizers
    with _failures_told(path, "cannot be read"):
        content = read_small(path)
        try_tokenizer(content, str(path), tokenizers.__version__)
        return tokenizers.Tokenizer.from_str(content.decode("utf-8"))


@contextlib.contextmanager
def _failures_told(path: Path, what: str) -> Iterator[None]:
    """Turn whatever the package raises into an error that names the file."""
    try:
        yield
    except DataError:
        raise
    except BaseException as error:
        if not _is_failure(error):
            raise
        reason = " ".join(str(error).split())
        raise DataError(
            f"tokenizer {path}: {what}: {type(error).__name__}: {reason:.200}; copy it anew, or update the package "
            "tokenizers"
        ) from error


def _is_failure(error: BaseException) -> bool:
    # A panic of Rust is no Exception, and its class cannot be imported.
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def complaint(content: bytes) -> str:
    """Load a tokenizer and encode texts; return what is wrong with it, empty if nothing is."""
    try:
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.get_vocab()
        for sample in _SAMPLES:
            # It may have no token for what it does not know.
            with contextlib.suppress(Exception):
                tokenizer.decode(tokenizer.encode(sample, add_special_tokens=True).ids, skip_special_tokens=True)
    except BaseException as error:
        if not _is_failure(error):
            raise
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> int:
    """Print what is wrong with the tokenizer on the standard input; see ``trial``."""
    memory_bytes, cpu_s = map(int, sys.argv[1:])
    content = sys.stdin.buffer.read()
    limit_process(memory_bytes, cpu_s=cpu_s)
    said = complaint(content)
    print(said)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
