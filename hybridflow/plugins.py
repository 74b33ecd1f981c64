"""What a recipe names by ``package.module:name``: functions and classes that a user wrote. No torch."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sysconfig
import traceback
from collections.abc import Mapping
from typing import Any

from hybridflow.errors import ConfigError, did_you_mean

PACKAGE = os.path.dirname(os.path.abspath(__file__))


def split_name(name: str) -> tuple[str, str]:
    """Return the module and the attribute of ``package.module:name`` or ``folder/file.py:name``."""
    module, _, attribute = name.partition(":")
    if module.endswith(".py"):
        module = module.removesuffix(".py").removeprefix("./").replace("/", ".")
    return module, attribute


def find_plugin(name: str, built_in: Mapping[str, Any], *, key: str, kind: str) -> Any:
    """Return the object that a name stands for: a built-in one, or ``package.module:name`` by import.

    Args:
        name: What the recipe says. ``folder/file.py:name`` means ``folder.file:name``.
        built_in: Ours, by name.
        key: Where the recipe says it, for the message.
        kind: What is wanted, for the message: ``function`` or ``Class``.

    Raises:
        ConfigError: There is nothing of that name.
    """
    if name in built_in:
        return built_in[name]
    expected = f"give one of {', '.join(built_in)} or 'package.module:{kind}'"
    if not built_in:
        expected = f"give 'package.module:{kind}'"
    module, attribute = split_name(name)
    if module.startswith(("/", ".")):
        begin = "/" if name.startswith("/") else ".."
        raise ConfigError(
            f"{key}={name!r}: found a path from {begin} on; start in its directory, or put that on PYTHONPATH, and "
            f"give '{os.path.basename(name.partition(':')[0]).removesuffix('.py')}:{attribute or kind}'"
        )
    if not attribute:
        before, _, last = name.rpartition(".")
        hint = f"did you mean {before}:{last}? " if before and last != "py" else did_you_mean(name, built_in)
        raise ConfigError(f"{key}={name!r}: names no {kind} of a module; {hint}{expected}")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        is_module = error.name == module.partition(".")[0]
        where = f", in {os.getcwd()} or on PYTHONPATH" if is_module else place_of(error)
        remedy = expected if is_module else f"install {error.name}, or mend the import"
        raise ConfigError(f"{key}={name!r}: {type(error).__name__}: {error}{where}; {remedy}") from error
    # A user's module may raise anything while it is imported, or call sys.exit.
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}={name!r}: {type(error).__name__}: {error}{place_of(error)}; mend it") from error
    if not hasattr(found, attribute):
        hint = did_you_mean(attribute, [each for each in vars(found) if not each.startswith("_")])
        where = getattr(found, "__file__", None) or "a package"
        raise ConfigError(f"{key}={name!r}: {shown(where)} has no attribute {attribute!r}; {hint}{expected}")
    return getattr(found, attribute)


def place_of(error: BaseException) -> str:
    """Return file and line of the user's code that raised an error: `` at rewards.py:5``; empty where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if not (is_library(each.filename) or is_ours(each.filename))]
    return f" at {shown(own[-1].filename)}:{own[-1].lineno}" if own else ""


def shown(path: str) -> str:
    """Return a path for a message: from the working directory on, if it is in there."""
    near = os.path.relpath(path)
    return path if near.startswith(os.pardir) else near


def is_ours(path: str) -> bool:
    """Return whether a file is hybridflow's."""
    return path.startswith(PACKAGE + os.sep)


def is_library(path: str) -> bool:
    """Return whether a file of code is Python's, or that of an installed package."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return path.startswith(("<", *(folder + os.sep for folder in folders)))


def source_of(function: Any) -> str:
    """Return file and line of a function's code; empty: it has none."""
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__code__") and not hasattr(function, "__func__"):
        function = type(function).__call__
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    return f"{shown(code.co_filename)}:{code.co_firstlineno}"
