"""Importing torch and megatron-core soon: most of a short job's start. Light until it is used."""

from __future__ import annotations

import atexit
import gc
import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

_DEVICES = ("nvidia[0-9]*", "kfd", "dxg")
"""Files in ``/dev`` of NVIDIA's GPUs, of AMD's, and of either under Windows."""

_alone = threading.Lock()
"""Held by the thread that imports megatron-core: another would take its stand-in for ``torch.compile``."""


def has_accelerator() -> bool:
    """Return whether this machine has a GPU, without a library that would begin to use it."""
    return any(any(Path("/dev").glob(name)) for name in _DEVICES)


@contextmanager
def importing() -> Iterator[None]:
    """Keep the garbage collector from what is imported within, then and later.

    It would look at these many objects, none of which is garbage, again and again as they come, and once more at the
    process's end: a third of the start and end of a short job.
    """
    with _without_collector():
        try:
            yield
        finally:
            gc.freeze()


@contextmanager
def _without_collector() -> Iterator[None]:
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


def import_for_program(module: str) -> ModuleType:
    """Import what a program of the Python API asks for, and megatron-core before it.

    The collector is kept from these objects as they come and at the process's end, and not between: garbage of the
    program's own may be among what it would keep.
    """
    with _without_collector():
        with _alone:
            if "megatron.core" not in sys.modules:
                import_megatron()
                atexit.register(gc.freeze)
        return importlib.import_module(module)


def import_megatron() -> None:
    """Import megatron-core without what no job here uses: wandb, and torch's compiler where there is no GPU.

    megatron-core has torch compile some functions when they are first called, and torch's optimizers import the
    compiler to stay out of it. On a CPU the plain form of both is called instead, since importing the compiler would
    take a third of the start.
    """
    import torch

    compiler: Any = torch.compile
    has_wandb = "wandb" in sys.modules
    if not has_wandb:
        # For ``import wandb`` it is then not installed.
        sys.modules["wandb"] = None  # type: ignore[assignment]
    if not has_accelerator():
        torch.compile = _as_it_is  # type: ignore[assignment]
        _keep_compiler_away(torch.optim.Optimizer)
    try:
        importlib.import_module("megatron.core")
    finally:
        torch.compile = compiler
        if not has_wandb:
            del sys.modules["wandb"]


def _keep_compiler_away(optimizer: type) -> None:
    """Give torch's optimizers what they else make on first use, of the compiler: their methods, not compiled."""
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        plain = getattr(getattr(optimizer, name), "__wrapped__", None)
        if plain is not None:
            vars(plain).setdefault("__dynamo_disable", plain)


def _as_it_is(function: Any = None, **_: Any) -> Any:
    """Stand for ``torch.compile``, with and without arguments."""
    return _as_it_is if function is None else function
