"""Log-probabilities of tokens in the two forms of OpenAI's interface. No torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from hybridflow.data.tokenizer import Tokenizer

Top = Sequence[tuple[int, float]]
"""The likeliest tokens at a place, the likeliest first."""

Tops = Sequence[Top | None]


class Scored(NamedTuple):
    """Tokens, with what is told of them.

    Attributes:
        tokens: Token ids.
        log_probs: Of each of them; None: unknown.
        tops: Of each of them; None: not asked for.
    """

    tokens: Sequence[int] = ()
    log_probs: Sequence[float | None] = ()
    tops: Tops | None = None

    def after(self, place: int) -> Scored:
        """Return those from a place on."""
        return Scored(self.tokens[place:], self.log_probs[place:], None if self.tops is None else self.tops[place:])

    def __add__(self, later: Scored) -> Scored:  # type: ignore[override]
        """Return both together."""
        tops = None if later.tops is None else [*(self.tops or ()), *later.tops]
        return Scored([*self.tokens, *later.tokens], [*self.log_probs, *later.log_probs], tops)


def text_scores(
    tokenizer: Tokenizer | None, tokens: Sequence[int], log_probs: Sequence[float | None], tops: Tops | None
) -> dict[str, Any]:
    """Return the ``logprobs`` of a completion; where tokens have the same text, ``top_logprobs`` has the likeliest.

    Args:
        tokenizer: None: texts are token ids.
        tokens: Of prompt and response, as far as they are told.
        log_probs: Of each of them; None: unknown.
        tops: Of each of them; None: not asked for.
    """
    texts = [_text(token, tokenizer) for token in tokens]
    told = None
    if tops is not None:
        told = [
            None if top is None else _by_text(top, text, log_prob, tokenizer)
            for text, log_prob, top in zip(texts, log_probs, tops, strict=True)
        ]
    return {"tokens": texts, "token_logprobs": list(log_probs), "top_logprobs": told, "text_offset": None}


def chat_scores(
    tokenizer: Tokenizer | None, tokens: Sequence[int], log_probs: Sequence[float | None], tops: Tops | None
) -> dict[str, Any]:
    """Return the ``logprobs`` of a chat's choice; arguments as of ``text_scores``."""
    content = []
    for token, log_prob, top in zip(tokens, log_probs, [()] * len(tokens) if tops is None else tops, strict=True):
        likeliest = [_entry(each, value, tokenizer) for each, value in top or ()]
        content.append({**_entry(token, log_prob, tokenizer), "top_logprobs": likeliest})
    return {"content": content}


def _by_text(top: Top, text: str, log_prob: float | None, tokenizer: Tokenizer | None) -> dict[str, float | None]:
    # The token itself too, where it is not among the likeliest, as OpenAI has it.
    pairs = [(_text(token, tokenizer), value) for token, value in top] + [(text, log_prob)]
    found: dict[str, float | None] = {}
    for each, value in pairs:
        found.setdefault(each, value)
    return found


def _entry(token: int, log_prob: float | None, tokenizer: Tokenizer | None) -> dict[str, Any]:
    text = _text(token, tokenizer)
    # Of a part of a character the bytes are not known.
    is_whole = "\ufffd" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)
    return {"token": text, "logprob": log_prob, "bytes": list(text.encode()) if is_whole else None}


def _text(token: int, tokenizer: Tokenizer | None) -> str:
    """Return a token's text, or its name where it has none, as the end of a sequence; without a tokenizer its id."""
    if tokenizer is None:
        return str(token)
    return tokenizer.decode([token]) or _names(tokenizer).get(token, "")  # type: ignore[arg-type]  # hashed as itself


@functools.lru_cache(maxsize=1)
def _names(tokenizer: Tokenizer) -> dict[int, str]:
    return tokenizer.pieces()
