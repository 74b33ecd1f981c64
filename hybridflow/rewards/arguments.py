"""What a reward function asks for, read from its signature: texts of one sample, or lists of many; fields of the row.

A parameter gets what its name says. No torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.plugins import source_of
from hybridflow.rewards.sample import Sample, Unscored

SIGNATURES = (
    "(prompt, response, answer) -> number, (prompts, responses, answers) -> list of numbers, "
    "(completions, **kwargs) -> list of numbers; other parameters get the fields of their names"
)

_ROLES = ("prompt", "response", "answer")
_NAMES = {
    **{"prompt": "prompt", "response": "response", "answer": "answer"},
    **{"prompts": "prompt", "responses": "response", "answers": "answer"},
    # TRL's words, and verl's.
    **{"completion": "response", "completions": "response", "solution_str": "response", "ground_truth": "answer"},
}
_OF_MANY = frozenset({"prompts", "responses", "completions", "answers"})
_FIELD_FIRST = frozenset({"ground_truth"})
"""Names of which a field of the row comes before the meaning here."""
_NOT_HERE = frozenset({"completion_ids", "trainer_state", "log_extra", "log_metric", "environments"})
"""What TRL passes beside fields, and nothing here has: no parameter of these names is the answer by its place."""
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What a function is called with.

    Attributes:
        name: The function, and where it is, for messages.
        is_batched: Whether it takes lists, of many samples.
        parameters: Those that have a name of their own.
        takes_rest: Whether it takes any other field.
        roles: What the parameters are that have other names than ours, by their position.
    """

    name: str
    is_batched: bool
    parameters: tuple[inspect.Parameter, ...]
    takes_rest: bool
    roles: Mapping[str, str]

    def call(self, function: Callable[..., Any], samples: Sequence[Sample]) -> Any:
        """Call the function on some samples, one unless it is batched.

        Raises:
            Unscored: It asks for a field that the row has not.
        """
        places: list[Any] = []
        named: dict[str, Any] = {}
        for each in self.parameters:
            if not self._is_known(each.name, samples):
                if each.default is inspect.Parameter.empty:
                    raise Unscored(self._missing(each.name, samples[0]), is_final=True, is_form=True)
                continue
            value = self._value(each.name, samples)
            # One that follows a parameter with a default which was left out is given by its name.
            if each.kind in _BY_POSITION and not named and len(places) == self.parameters.index(each):
                places.append(value)
            else:
                named[each.name] = value
        if self.takes_rest:
            named |= self._rest(samples)
        return function(*places, **named)

    def _is_known(self, name: str, samples: Sequence[Sample]) -> bool:
        return name in _NAMES or name in self.roles or any(name in sample.fields for sample in samples)

    def _value(self, name: str, samples: Sequence[Sample]) -> Any:
        values = [self._of(name, sample) for sample in samples]
        return values if self.is_batched else values[0]

    def _of(self, name: str, sample: Sample) -> Any:
        if name in sample.fields and (name not in _NAMES or name in _FIELD_FIRST):
            return sample.fields[name]
        role = _NAMES.get(name, self.roles.get(name))
        return None if role is None else getattr(sample, role)

    def _rest(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Return what no parameter has a name for: fields, and prompts, responses and answers."""
        own = {each.name for each in self.parameters}
        told = {_NAMES.get(name, self.roles.get(name)) for name in own}
        ours = {f"{role}s" if self.is_batched else role for role in _ROLES if role not in told}
        fields = {name: None for sample in samples for name in sample.fields}
        return {name: self._value(name, samples) for name in (*fields, *sorted(ours)) if name not in own}

    def _missing(self, name: str, sample: Sample) -> str:
        return (
            f"{self.name} asks for {name!r}, and the row has the fields {sorted(sample.fields)}; add the field, give "
            "the parameter a default, or rename it"
        )


def arguments_of(function: Callable[..., Any], key: str, *, is_batched: bool) -> Arguments:
    """Return what a function is called with.

    The first three parameters by position are prompt, response and answer where no name of theirs says otherwise, and
    no field has it.

    Args:
        function: The user's function, or method.
        key: Where it was given, for messages.
        is_batched: It is known to take many samples; else the names tell.

    Raises:
        ConfigError: It does not ask for the response.
    """
    name = function_name(function)
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):  # of a function in C, which tells none
        found = inspect.signature(_any)
    parameters = tuple(found.parameters.values())
    kinds = {each.kind for each in parameters}
    own = tuple(each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD))
    takes_rest = inspect.Parameter.VAR_KEYWORD in kinds
    if inspect.Parameter.VAR_POSITIONAL in kinds and not own:
        own, takes_rest = tuple(inspect.signature(_any_three).parameters.values()), False
    roles = _roles(own)
    told = {_NAMES.get(each.name, roles.get(each.name)) for each in own}
    if "response" not in told and not takes_rest:
        raise ConfigError(
            f"{key}: {name}{found} does not ask for the response; expected one of {SIGNATURES}; change its parameters"
        )
    is_of_many = is_batched or any(each.name in _OF_MANY for each in own)
    return Arguments(name=name, is_batched=is_of_many, parameters=own, takes_rest=takes_rest, roles=roles)


def _any(*texts: Any) -> None: ...


def _any_three(prompt: Any, response: Any, answer: Any, /) -> None: ...


def _roles(parameters: Sequence[inspect.Parameter]) -> dict[str, str]:
    """Return what the first three are by their position; nothing where a name says that they have another order."""
    first = [each for each in parameters if each.kind in _BY_POSITION and each.default is each.empty][:3]
    is_our_order = all(_NAMES.get(each.name, role) == role for each, role in zip(first, _ROLES, strict=False))
    if len(first) < len(_ROLES) or not is_our_order:
        return {}
    known = {*_NAMES, *_NOT_HERE}
    return {each.name: role for each, role in zip(first, _ROLES, strict=True) if each.name not in known}


def function_name(function: Any) -> str:
    """Return what messages call a function: with the place of its code, where it has one."""
    name = getattr(function, "__name__", type(function).__name__)
    place = source_of(function)
    return f"{place} {name}" if place else name
