"""The transformer layers of a model, whoever wrote it, and their activations computed anew in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from hybridflow.errors import ConfigError


class Chunks(nn.ModuleList):
    """The virtual pipeline chunks of a rank, each a ``Transformer``, in the order in which tokens go through them."""


def chunks_of(model: nn.Module) -> list[Any]:
    """Return the ``Transformer``s of a rank: its chunks, or the one that it is."""
    return [*model] if isinstance(model, Chunks) else [model]


def transformer_layers(model: nn.Module, owner: str) -> Sequence[nn.Module]:
    """Return a model's layers: the longest ``nn.ModuleList`` of modules of one class that is in no other list.

    Where there is no such list, the longest of modules that each have parameters: hybrids have a class for each kind.

    Of virtual pipeline chunks those of all, one chunk after the other. The error names the ``owner``.

    Raises:
        ConfigError: It has no such list.
    """
    if isinstance(model, Chunks):
        return [layer for chunk in model for layer in transformer_layers(chunk, owner)]
    named = {f"{name}.": each for name, each in model.named_modules() if isinstance(each, nn.ModuleList)}
    # Experts, which may be more than the layers, are lists within one.
    outer = [each for name, each in named.items() if not any(name != one and name.startswith(one) for one in named)]
    lists = [[*each] for each in outer if len({*map(type, each)}) == 1]
    lists = lists or [[*each] for each in outer if all(any(True for _ in layer.parameters()) for layer in each)]
    if not lists:
        raise ConfigError(
            f"{owner}: has no nn.ModuleList of layers, which would be gathered or computed again one "
            "by one; keep its layers in one, or use neither fsdp nor recompute"
        )
    return max(lists, key=len)


def recompute_activations(model: nn.Module, owner: str, mode: str, num_layers: int | None = None) -> None:
    """Have a model compute activations anew in the backward pass, as ``recompute`` in a recipe says.

    Args:
        model: This rank's part of it.
        owner: Whose it is, in errors.
        mode: ``none``, ``selective`` or ``full``.
        num_layers: With ``full``, so many of the rank's layers from the first; None: all.

    Raises:
        ConfigError: Its layers are not found.
    """
    if mode == "none":
        return
    if mode == "selective":
        layers: Sequence[Any] = transformer_layers(model, owner)
        # Linear attention computes its part anew in any case.
        attention = [layer.self_attention for layer in layers]
        recompute([each.core_attention for each in attention if hasattr(each, "core_attention")])
        return
    done = 0
    for chunk in chunks_of(model):
        layers = transformer_layers(chunk, owner)[: None if num_layers is None else max(0, num_layers - done)]
        done += len(layers)
        dropout = getattr(chunk, "dropout", None)
        recompute(layers, _as_they_are if dropout is None else dropout.contexts)


def _as_they_are() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), nullcontext()


def recompute(
    layers: Sequence[nn.Module],
    contexts: Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]] = _as_they_are,
) -> None:
    """Have layers keep their inputs alone for the backward pass, which computes the rest anew.

    Dropout of adapters is a function of the tokens, so no random state is kept.

    Args:
        layers: The layers, or parts of layers.
        contexts: Called in each forward pass: what surrounds it, and what surrounds the same computation done anew.

    Paper: arXiv 1604.06174; of the attention alone arXiv 2205.05198.
    """
    for layer in layers:
        layer.forward = functools.partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )


def recomputed(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that ``recompute`` was given, and what is in them."""
    outer = [each for each in model.modules() if getattr(vars(each).get("forward"), "func", None) is checkpoint]
    return [inner for each in outer for inner in each.modules()]
