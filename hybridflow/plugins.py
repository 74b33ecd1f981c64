"""What a recipe names by ``package.module:name``: functions and classes that a user wrote. No torch."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from hybridflow.errors import ConfigError


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
        raise ConfigError(f"{key}={name!r}: names no {kind} of the module; {expected}")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        where = f", in {os.getcwd()} or on PYTHONPATH" if error.name == module.partition(".")[0] else ""
        raise ConfigError(f"{key}={name!r}: {type(error).__name__}: {error}{where}; {expected}") from error
    # A user's module may raise anything while it is imported.
    except Exception as error:
        raise ConfigError(f"{key}={name!r}: {type(error).__name__}: {error}; {expected}") from error
