"""Rewards that are Python: built in, or a user's function or object, which may be asynchronous or take many samples.

A function asks by its parameters for the texts of a sample, or for lists of many; see ``arguments``. No torch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hybridflow.errors import ConfigError
from hybridflow.plugins import find_plugin, source_of
from hybridflow.rewards.arguments import SIGNATURES, Arguments, arguments_of
from hybridflow.rewards.sample import Sample

RewardFunction = Callable[[str, str, str], float]
"""``(prompt, response, answer) -> score``."""

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MARK = "hybridflow_is_batched"


def batched(function: _Function) -> _Function:
    """Mark a reward function that takes all samples of a rank at once: lists of prompts, responses and answers.

    It gives one score for each, in their order. It may be ``async def``. A function with a parameter ``prompts``,
    ``responses``, ``completions`` or ``answers`` needs no mark.
    """
    setattr(function, _MARK, True)
    return function


def exact_match(prompt: str, response: str, answer: str) -> float:
    """Return 1 if the response equals the answer, ignoring outer spaces; else 0."""
    return float(response.strip() == answer.strip())


def length(prompt: str, response: str, answer: str) -> float:
    """Return the number of characters of the response."""
    return float(len(response))


BUILT_IN: dict[str, RewardFunction] = {"exact_match": exact_match, "length": length}


def regex(pattern: str) -> RewardFunction:
    """Return a reward for a pattern, 1 or 0.

    If the pattern has a group, the last match of the group must equal the answer.

    Args:
        pattern: Of Python's ``re``, without a group it need only match somewhere in the response.
    """
    compiled = re.compile(pattern)

    def matches(prompt: str, response: str, answer: str) -> float:
        if compiled.groups == 0:
            return float(compiled.search(response) is not None)
        found = list(compiled.finditer(response))
        return float(bool(found) and found[-1][1] is not None and found[-1][1].strip() == answer.strip())

    return matches


@dataclass(frozen=True, kw_only=True)
class Function:
    """Reward of a user, as it is called.

    Attributes:
        name: What messages call it.
        source: File and line of its code; empty: it has none.
        call: Scores some samples: gives a list, or an awaitable of one.
        is_async: Whether it gives an awaitable.
        is_batched: Whether it takes any number of samples; else one.
    """

    name: str
    source: str = ""
    call: Callable[[Sequence[Sample]], Any]
    is_async: bool
    is_batched: bool


def name_of(given: Any) -> str:
    """Return what messages call a name, a function or an object."""
    if isinstance(given, Function):
        return given.name
    return given if isinstance(given, str) else getattr(given, "__qualname__", type(given).__qualname__)


def find_function(name: str, key: str) -> Any:
    """Return a built-in reward by name, or ``package.module:function`` by import.

    Raises:
        ConfigError: There is none of that name.
    """
    others = dict.fromkeys(("regex", "maths", "code"))
    return find_plugin(name, {**BUILT_IN, **others}, key=key, kind="function")


def as_function(found: Any, key: str) -> Function:
    """Return a function, or an object or class with ``scores``, in the form in which it is called.

    Args:
        found: What the user gave; of a class one is made, without arguments.
        key: Where it was given, for messages.

    Raises:
        ConfigError: It is neither, it does not ask for the response, or the class cannot be made.
    """
    if isinstance(found, Function):
        return found
    name = name_of(found)
    if isinstance(found, type) and callable(getattr(found, "scores", None)):
        try:
            found = found()
        # A user's class may raise anything, or call sys.exit.
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{key}: {type(error).__name__}: {error}; its class is made without arguments") from error
    has_scores = callable(getattr(found, "scores", None))
    function = found.scores if has_scores else found
    if not callable(function) or isinstance(function, type):
        raise ConfigError(
            f"{key}: found {type(found).__name__}, expected a function {SIGNATURES}, or an object with "
            "scores(prompts, responses, answers)"
        )
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    arguments = arguments_of(function, key, is_batched=has_scores or getattr(function, _MARK, False))
    return Function(
        name=name,
        source=source_of(function),
        call=_caller(function, arguments, is_async),
        is_async=is_async,
        is_batched=arguments.is_batched,
    )


def _caller(function: Callable[..., Any], arguments: Arguments, is_async: bool) -> Callable[[Sequence[Sample]], Any]:
    """Wrap a function so that it takes samples and returns a list."""

    def many(samples: Sequence[Sample]) -> Any:
        return arguments.call(function, samples)

    def one(samples: Sequence[Sample]) -> Any:
        return [arguments.call(function, samples)]

    async def one_awaited(samples: Sequence[Sample]) -> Any:
        return [await arguments.call(function, samples)]

    if arguments.is_batched:
        return many
    return one_awaited if is_async else one
