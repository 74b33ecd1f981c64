"""The text of a response while it grows: which token completes a stop string, and which would complete a bad one.

The text of a response is what the tokenizer makes of its tokens, without the prompt's. A token *completes* a string
when the text that ends with it has an occurrence that reaches beyond what it has in common with the text before. That
is decided exactly, also where a character's bytes are several tokens, or a leading space is there or not depending on
what stands before, and in a time that does not grow with the response.

Torch-free, and a function of the tokens alone: every rank of a replica finds the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from hybridflow.data.tokenizer import Tokenizer, first_new, split_stop
from hybridflow.rollout.request import SamplingParams

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_UNKNOWN = "\ufffd"


class Texts:
    """A tokenizer, and which of its tokens nothing before or behind them can change."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.decode = tokenizer.decode
        self._bytes = {index for index, piece in tokenizer.pieces().items() if _BYTE.fullmatch(piece)}
        self._alone: dict[int, str] = {}

    def alone(self, token: int) -> str | None:
        """Return the text of a token that is text in itself.

        None means that it is part of a character, or no text, such as an end.
        """
        if token in self._bytes:
            return None
        if token not in self._alone:
            self._alone[token] = self.decode([token])
        text = self._alone[token]
        return None if not text or _UNKNOWN in text else text


class GrowingText:
    """The text of one response while it grows: as the tokenizer's of all its tokens, in a time that does not grow.

    All before the last token that is text in itself (the anchor) is settled. The anchor is decoded again with each
    token behind it, since the first token of a text may lose its leading space.

    Args:
        texts: Texts of the tokenizer.
        reach: How many characters of what is settled are kept; None: all.

    Attributes:
        text: The text so far, as far as it is kept.
    """

    def __init__(self, texts: Texts, reach: int | None = None) -> None:
        self._texts, self._reach = texts, reach
        self._settled = self.text = ""
        self._open: list[int] = []
        self._num_anchor = 0

    def text_with(self, token: int) -> str:
        """Return the text with one more token."""
        return self._settled + self._texts.decode([*self._open, token])[self._num_anchor :]

    def add(self, tokens: Iterable[int]) -> str:
        """Add the response's next tokens; return the text before less of it is kept."""
        whole = self.text
        for token in tokens:
            self.text = whole = self.text_with(token)
            self._open.append(token)
            anchor = self._texts.alone(token)
            if anchor is not None:
                kept = len(whole) if self._reach is None else self._reach
                self.text = self._settled = whole[max(len(whole) - kept, 0) :]
                self._open, self._num_anchor = [token], len(anchor)
        return whole


class Watch:
    """Looks for strings in one response, of whose text only as much is kept as a string may reach back.

    Args:
        texts: Texts of the tokenizer.
        stop: Strings that end the response.
        bad: Strings that it is not to have.
        tokens: Tokens of the response so far.
    """

    def __init__(self, texts: Texts, stop: Sequence[str], bad: Sequence[str], tokens: Iterable[int] = ()) -> None:
        self._stop, self._bad = tuple(stop), tuple(bad)
        self._growing = GrowingText(texts, max(map(len, (*stop, *bad)), default=1) - 1)
        self._growing.add(tokens)

    def would_complete_bad(self, token: int) -> bool:
        """Return whether this token, as the next one, would complete a bad string."""
        return first_new(self._growing.text, self._growing.text_with(token), self._bad) is not None

    def add(self, token: int) -> bool:
        """Add the response's next token; return whether it completes a stop string."""
        before = self._growing.text
        return first_new(before, self._growing.add([token]), self._stop) is not None


def with_stop_tokens(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """Return parameters whose stop strings are text alone: the names of special tokens become ``stop_ids``."""
    texts, ids = split_stop(params.stop, tokenizer)
    return replace(params, stop=texts, stop_ids=tuple(dict.fromkeys((*params.stop_ids, *ids)))) if ids else params


def text_before_stop(tokens: Sequence[int], stop: Sequence[str], tokenizer: Tokenizer) -> str:
    """Return the text of an ended response, without its stop string and what the token has behind it."""
    before, text = tokenizer.decode(list(tokens[:-1])), tokenizer.decode(list(tokens))
    return text[: first_new(before, text, stop)]


def settled_text(text: str, stop: Sequence[str]) -> str:
    """Return what no further token can change of the text of an unfinished response.

    It holds back letters that lack bytes, and an end that may begin a stop string.
    """
    text = text.rstrip(_UNKNOWN)
    for length in range(min(len(text), max(map(len, stop), default=0)), 0, -1):
        if any(each.startswith(text[-length:]) for each in stop):
            return text[:-length]
    return text
