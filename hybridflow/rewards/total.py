"""Several reward functions as one, which gives the sum of their scores. No torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.rewards.functions import Function, as_function, find_function, name_of
from hybridflow.rewards.sample import Sample, Unscored, as_scores


def total_of(rewards: Sequence[Any], key: str) -> Function:
    """Return the sum of several rewards as a reward.

    It takes many samples at once, or is asynchronous, if one of them is.

    Args:
        rewards: Functions, objects with ``scores``, names of functions that are built in, ``module:function``.
        key: Where they were given, for messages.

    Returns:
        The reward. A call of it fails as a whole where one of the functions does.

    Raises:
        ConfigError: One is none of these, or runs in processes of its own.
    """
    functions = [as_function(_named(each, f"{key}[{index}]"), f"{key}[{index}]") for index, each in enumerate(rewards)]
    is_async = any(function.is_async for function in functions)
    return Function(
        name=" + ".join(name_of(each) for each in rewards),
        source=", ".join(function.source for function in functions if function.source),
        call=(_awaited if is_async else _at_once)(functions),
        is_async=is_async,
        is_batched=any(function.is_batched for function in functions),
    )


def _named(given: Any, key: str) -> Any:
    if not isinstance(given, str):
        return given
    found = find_function(given, key)
    if found is None:
        raise ConfigError(
            f"{key}={given!r}: has settings and processes of its own, and cannot be added to others; give it alone, or "
            "call what it does in a function of your own"
        )
    return found


def _at_once(functions: Sequence[Function]) -> Callable[[Sequence[Sample]], Any]:
    def total(samples: Sequence[Sample]) -> list[float]:
        return _sums([[_checked(each.call(part), part) for part in _calls(each, samples)] for each in functions])

    return total


def _awaited(functions: Sequence[Function]) -> Callable[[Sequence[Sample]], Any]:
    async def scores(function: Function, samples: Sequence[Sample]) -> list[list[float]]:
        found = []
        for part in _calls(function, samples):
            given = function.call(part)
            found.append(_checked(await given if function.is_async else given, part))
        return found

    async def total(samples: Sequence[Sample]) -> list[float]:
        return _sums(await asyncio.gather(*(scores(function, samples) for function in functions)))

    return total


def _calls(function: Function, samples: Sequence[Sample]) -> list[list[Sample]]:
    return [list(samples)] if function.is_batched else [[sample] for sample in samples]


def _checked(value: Any, samples: Sequence[Sample]) -> list[float]:
    """Return the scores of a call. Raises Unscored: one is none, so that their sum would be none either."""
    scores = []
    for outcome in as_scores(value, len(samples)):
        if isinstance(outcome, Unscored):
            raise outcome
        scores.append(outcome)
    return scores


def _sums(of_functions: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Return the sum for each sample, of each function's scores in calls."""
    rows = [[score for call in calls for score in call] for calls in of_functions]
    return [sum(column) for column in zip(*rows, strict=True)]
