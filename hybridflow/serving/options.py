"""Sampling parameters as people give them, in files, requests and arguments, in the engine's form. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hybridflow.errors import DataError
from hybridflow.rollout.request import SamplingParams

MOST_SAMPLES = 4096
_MOST_TOKENS = 2**31 - 1

Options = dict[str, Any]
"""Fields of ``SamplingParams``, and ``n``, those that were given alone."""

_NAMES = {field.name for field in fields(SamplingParams)} - {"with_prompt_log_probs", "num_top_log_probs"} | {"n"}


def read_options(given: Mapping[str, Any], where: str) -> Options:
    """Return the sampling parameters in the form of ``SamplingParams``, from values of JSON.

    A temperature of 0 is greedy, as elsewhere.

    Args:
        given: Name -> value.
        where: Names the place in errors.

    Raises:
        DataError: A name is unknown, or a value is not allowed.
    """
    if stranger := next((name for name in given if name not in _NAMES), None):
        raise DataError(f"{where}: no sampling parameter {stranger!r:.60}; known are {', '.join(sorted(_NAMES))}")
    options = {name: as_tuples(value) for name, value in given.items()}
    for name in ("stop", "bad"):
        if isinstance(options.get(name), str):
            options[name] = (options[name],)
    if "logit_bias" in given:
        options["logit_bias"] = _bias(given["logit_bias"], where)
    count = options.get("n", 1)
    if not is_int(count) or not 1 <= count <= MOST_SAMPLES:
        raise DataError(f"{where}: n: found {count!r:.60}, expected an integer from 1 to {MOST_SAMPLES}")
    temperature = options.get("temperature")
    if temperature == 0 and not isinstance(temperature, bool):
        options |= {"temperature": 1.0, "greedy": True}
    elif temperature is not None:
        # In the place of another that was greedy.
        options.setdefault("greedy", False)
    _check(options, where)
    return options


def check_together(options: Options, vocab_size: int, where: str) -> None:
    """Refuse parameters that are right one by one and wrong together, or for the model.

    Raises:
        DataError: They contradict each other, or name tokens that the model does not have.
    """
    _check(options, where)
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
    """Return whether a value of JSON is an integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def as_tuples(value: Any, depth: int = 2) -> Any:
    """Convert lists of JSON, and those in them, to the tuples of ``SamplingParams``."""
    if depth == 0 or not isinstance(value, (list, tuple)):
        return value
    return tuple(as_tuples(each, depth - 1) for each in value)


def _check(options: Options, where: str) -> None:
    params = {name: value for name, value in options.items() if name != "n"}
    try:
        SamplingParams(**{"max_new_tokens": _MOST_TOKENS, **params})
    except DataError as error:
        # Here 0 has been read already.
        said = (
            str(error).removeprefix("SamplingParams.").replace("; for 0 set greedy instead", ", or 0 for the likeliest")
        )
        raise DataError(f"{where}: {said}") from None


def _bias(value: Any, where: str) -> tuple[tuple[int, Any], ...]:
    try:
        return tuple(sorted((int(token), number) for token, number in value.items()))
    except (AttributeError, TypeError, ValueError):
        raise DataError(
            f"{where}: logit_bias: found {value!r:.60}, expected an object of token ids and numbers"
        ) from None
