"""What of a response people see. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.data.tokenizer import Tokenizer

_BROKEN = "\N{REPLACEMENT CHARACTER}"


def visible_text(tokenizer: Tokenizer, tokens: Sequence[int], stop: Sequence[str]) -> str:
    """The text of a response up to the stop text that is complete first, which is left out."""
    return _cut(tokenizer.decode(tokens), stop)


def settled_text(tokenizer: Tokenizer, tokens: Sequence[int], stop: Sequence[str]) -> str:
    """Of a response that goes on, the text that stays whatever comes.

    Kept back are letters that lack bytes, and an end that may be the beginning of a stop text.
    """
    text = tokenizer.decode(tokens)
    whole = _cut(text, stop)
    if whole != text:
        return whole
    text = text.rstrip(_BROKEN)
    for length in range(min(len(text), max(map(len, stop), default=0)), 0, -1):
        if any(each.startswith(text[-length:]) for each in stop):
            return text[:-length]
    return text


def _cut(text: str, stop: Sequence[str]) -> str:
    """Up to the stop text that is complete first; of two that end together, the longer."""
    places = [(text.find(each), len(each)) for each in stop]
    found = [(place + length, place) for place, length in places if place >= 0]
    return text[: min(found)[1]] if found else text
