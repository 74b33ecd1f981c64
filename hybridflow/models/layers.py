"""The transformer layers of a model, whoever wrote it, and their activations computed anew in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import nn
from torch.utils.checkpoint import checkpoint

from hybridflow.errors import ConfigError


def transformer_layers(model: nn.Module, owner: str) -> Sequence[nn.Module]:
    """Return a model's layers: the longest ``nn.ModuleList`` of modules of one class that is in no other list.

    Args:
        model: The model.
        owner: Whose it is, in the error.

    Raises:
        ConfigError: It has no such list.
    """
    named = {f"{name}.": each for name, each in model.named_modules() if isinstance(each, nn.ModuleList)}
    # Experts, which may be more than the layers, are lists within one.
    outer = [each for name, each in named.items() if not any(name != one and name.startswith(one) for one in named)]
    lists = [[*each] for each in outer if len({*map(type, each)}) == 1]
    if not lists:
        raise ConfigError(
            f"{owner}: has no nn.ModuleList of layers of one class, which would be gathered or "
            "computed again one by one; keep its layers in one, or use neither fsdp nor gradient_checkpointing"
        )
    return max(lists, key=len)


def recompute(layers: Sequence[nn.Module]) -> None:
    """Have layers keep their inputs alone for the backward pass, which computes the rest anew.

    Dropout of adapters is a function of the tokens, so no random state is kept.

    Paper: arXiv 1604.06174.
    """
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
