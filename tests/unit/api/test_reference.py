"""Every public name says what it does, takes and raises. tests/unit/docs/test_site.py builds the reference of them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

import hybridflow

PUBLIC = {name: getattr(hybridflow, name) for name in hybridflow.__all__ if not name.startswith("_")}


def parts_of(name: str, found: Any) -> Iterator[tuple[str, Any, str]]:
    """A public name and, of a class, its public methods and properties: name, object, and the docs of its classes."""
    if not inspect.isclass(found):
        yield name, found, ""
        return
    own = [base for base in found.__mro__ if base.__module__.startswith("hybridflow")]
    around = " ".join(inspect.getdoc(base) or "" for base in own)
    yield name, found, around
    for base in own:
        for key, value in vars(base).items():
            value = getattr(value, "__func__", value)
            if not key.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                yield f"{base.__name__}.{key}", value, around


PARTS = {key: (value, around) for name, found in PUBLIC.items() for key, value, around in parts_of(name, found)}


def arguments_of(found: Any) -> list[str]:
    if isinstance(found, property):
        return []
    if dataclasses.is_dataclass(found):
        return [field.name for field in dataclasses.fields(found) if field.init]
    names = inspect.signature(found).parameters
    return [name for name in names if name not in ("self", "cls", "args", "kwargs") and not name.startswith("_")]


def raises_itself(found: Any) -> bool:
    """Whether its own body raises an error of ours."""
    target = found.fget if isinstance(found, property) else found.__init__ if inspect.isclass(found) else found
    if not getattr(target, "__module__", "").startswith("hybridflow"):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(target)))
    except (OSError, TypeError):
        return False
    raised = (node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call))
    names = {ast.unparse(each.func) for each in raised} - {"NotImplementedError"}
    return any(name.endswith("Error") for name in names)


@pytest.mark.parametrize("name", PARTS)
def test_a_public_name_says_what_it_does_and_takes(name: str):
    found, around = PARTS[name]
    docs = inspect.getdoc(found) or ""
    assert docs, f"{name} has no docstring"
    missing = [each for each in arguments_of(found) if not re.search(rf"\b{each}\b", docs + around)]
    assert not missing, f"{name}: its docstring does not say what {missing} are"
    assert not raises_itself(found) or "Raises" in docs + around, f"{name}: its docstring does not say what it raises"
