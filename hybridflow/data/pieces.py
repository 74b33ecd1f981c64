"""Tokenizers of sentencepiece, the only door to it: read from a ``.model``, or trained."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import sentencepiece

from hybridflow.errors import DataError
from hybridflow.foreign import read_small
from hybridflow.observe.files import replace_file, writing


class PieceTokenizer:
    """A sentencepiece model; see ``tokenizer.Tokenizer``.

    Attributes:
        path: Its ``.model`` file.
        vocab_size: Number of token ids.
        eos_id: Ends a response.
        stop_ids: That one, and what ``more_stops`` adds.
        pad_id: Fills up; where the model has no such token, the end of sequence.
        bos_id: Begins a sequence; None where the model has no such token.
        control_pieces: Names of the tokens that no text becomes.

    Args:
        path: The ``.model`` file.
        more_stops: Other ids at which a response ends, from what lies beside the file.

    Raises:
        DataError: The file is missing, is not a sentencepiece model, or knows no end of sequence.
    """

    def __init__(self, path: str | Path, *, more_stops: Sequence[int] = ()) -> None:
        self.path = Path(path)
        try:
            model = read_small(self.path)
        except OSError as error:
            raise DataError(
                f"tokenizer {path}: cannot be read: {error.strerror}; set tokenizer.path to a tokenizer, or to null to "
                "train one"
            ) from error
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            # An empty model would pass for one with no pieces.
            is_loaded = bool(model) and self._processor.LoadFromSerializedProto(model)
        except RuntimeError:
            is_loaded = False
        if not is_loaded:
            raise DataError(
                f"tokenizer {path}: is not a sentencepiece model ({len(model)} bytes); make or copy it anew"
            )
        try:
            self._pieces = {index: self._processor.id_to_piece(index) for index in range(len(self._processor))}
        except UnicodeDecodeError as error:
            raise DataError(f"tokenizer {path}: has a token that is not UTF-8: {error.reason}; copy it anew") from error
        self.vocab_size = len(self._pieces)
        self.eos_id: int = self._processor.eos_id()
        if self.eos_id < 0:
            raise DataError(f"tokenizer {path}: has no end-of-sequence token; train it with an eos_id")
        self.stop_ids = tuple(dict.fromkeys((self.eos_id, *more_stops)))
        pad_id, bos_id = self._processor.pad_id(), self._processor.bos_id()
        self.pad_id: int = self.eos_id if pad_id < 0 else pad_id
        self.bos_id: int | None = None if bos_id < 0 else bos_id
        self.control_pieces = {piece for index, piece in self._pieces.items() if self._processor.is_control(index)}

    def parses(self, piece: str) -> bool:
        """Return whether the name of a token, in a text, becomes that token."""
        index = self._processor.piece_to_id(piece)
        return self._pieces[index] == piece and index in self.encode(piece)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without any at its beginning or end."""
        ids: list[int] = self._processor.encode(text)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; padding, beginning, end of sequence and unknown ids are left out."""
        text: str = self._processor.decode([index for index in ids if index < self.vocab_size])
        return text

    def pieces(self) -> dict[int, str]:
        """Return every token id with its text, as the model has it."""
        return dict(self._pieces)

    def special_id(self, name: str) -> int | None:
        """Return the id of the special token of this name, which ``decode`` leaves out; None where there is none."""
        return self._processor.piece_to_id(name) if name in self.control_pieces else None


def train_tokenizer(lines: Iterable[str], *, path: str | Path, vocab_size: int) -> PieceTokenizer:
    """Train a byte-pair tokenizer, a function of the lines alone, and keep it in a file.

    Every character of the lines becomes a token, digits stay single, spaces stay as they are; nothing is put before
    the text, so that decoding what was encoded gives the same text. One process calls this for all.

    Args:
        lines: The text, for instance an open file.
        path: Where the ``.model`` goes.
        vocab_size: Upper limit of the number of tokens; text of few characters needs fewer.

    Raises:
        DataError: There is no text, or it has more different characters than ``vocab_size`` leaves room for.
        WriteError: The file system refuses.
    """
    model = io.BytesIO()
    texts = [text for line in lines if (text := line.rstrip("\r\n"))]
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            character_coverage=1.0,
            split_digits=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            shuffle_input_sentence=False,
            num_threads=1,
            pad_id=0,
            bos_id=1,
            eos_id=2,
            unk_id=3,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        num_characters = len(set("".join(texts)))
        raise DataError(
            f"tokenizer {path}: cannot be trained on {len(texts)} lines of {num_characters} different characters with "
            f"tokenizer.vocab_size={vocab_size}; it must be above the characters plus 4 special tokens ({error})"
        ) from error
    target = Path(path)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, model.getvalue())
    return PieceTokenizer(target)
