"""Sampling parameters as people give them, in files, requests and arguments: checked one by one. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from hybridflow.errors import DataError

MOST_SAMPLES = 4096
_MOST_TEXTS = 64
_MOST_BITS = 63

Options = dict[str, Any]
"""Fields of ``SamplingParams``, and ``n``, those that were given alone."""


def read_options(given: Mapping[str, Any], where: str) -> Options:
    """Sampling parameters in the form that ``SamplingParams`` has, from values of JSON.

    A temperature of 0 is greedy, as elsewhere.

    Args:
        given: Name -> value.
        where: Names the place in errors.

    Raises:
        DataError: A name is unknown, or a value is not allowed.
    """
    options: Options = {}
    for name, value in given.items():
        if name not in _READERS:
            raise DataError(f"{where}: no sampling parameter {name!r}; known are {', '.join(sorted(_READERS))}")
        expected, read = _READERS[name]
        try:
            options[name] = read(value)
        except (ValueError, TypeError, OverflowError):
            raise DataError(f"{where}: {name}: found {value!r:.60}, expected {expected}") from None
    if options.get("temperature") == 0:
        options |= {"temperature": 1.0, "greedy": True}
    return options


def check_together(options: Options, vocab_size: int, where: str) -> None:
    """Refuse parameters that are right one by one and wrong together, or for the model.

    Raises:
        DataError: They contradict each other, or name tokens that the model does not have.
    """
    least, most = options.get("min_new_tokens", 0), options.get("max_new_tokens", math.inf)
    if least > most:
        raise DataError(f"{where}: min_new_tokens={least} is more than max_new_tokens={most}; lower the first")
    ids = [*options.get("stop_ids", ()), *(pair[0] for pair in options.get("logit_bias", ()))]
    ids += [token for sequence in options.get("bad_ids", ()) for token in sequence]
    check_ids(ids, vocab_size, where)


def check_ids(ids: list[int], vocab_size: int, where: str) -> None:
    """Refuse tokens that a model does not have.

    Raises:
        DataError: Names the first.
    """
    stranger = next((token for token in ids if not 0 <= token < vocab_size), None)
    if stranger is not None:
        raise DataError(f"{where}: token {stranger} is not among the model's, which are 0 to {vocab_size - 1}")


def is_int(value: Any) -> bool:
    """Whether a value of JSON is an integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(least: int, most: int = 2**31 - 1) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if not is_int(value) or not least <= value <= most:
            raise ValueError
        return int(value)

    return read


def _number(holds: Callable[[float], bool]) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError
        number = float(value)
        if not math.isfinite(number) or not holds(number):
            raise ValueError
        return number

    return read


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _texts(value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value)
    if len(texts) > _MOST_TEXTS or not all(isinstance(text, str) and text for text in texts):
        raise ValueError
    return texts


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not all(is_int(token) for token in value):
        raise ValueError
    return tuple(value)


def _sequences(value: Any) -> tuple[tuple[int, ...], ...]:
    sequences = tuple(_ids(each) for each in value)
    if not all(sequences):
        raise ValueError
    return sequences


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    add = _number(lambda number: True)
    return tuple(sorted((int(token), add(number)) for token, number in dict(value).items()))


_POSITIVE: tuple[str, Callable[[Any], Any]] = ("a number above 0", _number(lambda number: number > 0))
_ANY: tuple[str, Callable[[Any], Any]] = ("a finite number", _number(lambda number: True))

# Name -> what is allowed, in words, and what reads it.
_READERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "n": (f"an integer from 1 to {MOST_SAMPLES}", _whole(1, MOST_SAMPLES)),
    "max_new_tokens": ("an integer of at least 1", _whole(1)),
    "min_new_tokens": ("an integer of at least 0", _whole(0)),
    "temperature": ("a number of at least 0", _number(lambda number: number >= 0)),
    "top_k": ("an integer of at least 0, 0 for all", _whole(0)),
    "top_p": ("a number above 0, at most 1", _number(lambda number: 0 < number <= 1)),
    "min_p": ("a number from 0 to 1", _number(lambda number: 0 <= number <= 1)),
    "repetition_penalty": _POSITIVE,
    "presence_penalty": _ANY,
    "frequency_penalty": _ANY,
    "logit_bias": ("an object of token id and number", _bias),
    "bad_ids": ("a list of lists of token ids, none empty", _sequences),
    "stop_ids": ("a list of token ids", _ids),
    "stop": (f"a text, or up to {_MOST_TEXTS} of them, none empty", _texts),
    "bad": (f"a text, or up to {_MOST_TEXTS} of them, none empty", _texts),
    "greedy": ("true or false", _flag),
    "seed": (f"an integer from 0 to 2^{_MOST_BITS} - 1", _whole(0, 2**_MOST_BITS - 1)),
}
