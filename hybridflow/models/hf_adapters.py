"""Adapters of PEFT on models that run in ``transformers``. The one door to PEFT."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hybridflow.config.roles import LoRAConfig
from hybridflow.errors import ConfigError
from hybridflow.models.adapters import is_factor
from hybridflow.models.hf_model import TransformersActor
from hybridflow.models.initial import initial_factor


def add_adapters(actor: TransformersActor, lora: LoRAConfig, *, seed: int) -> None:
    """Freeze the weights of an actor and give its linear layers adapters of PEFT, whose update is zero.

    Raises:
        ConfigError: PEFT cannot be imported, or the model has no such layers.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"actor.lora: a model in transformers needs peft: {error}; pip install peft") from error
    head = actor.inner.get_output_embeddings()
    linears = [name for name, each in actor.inner.named_modules() if isinstance(each, nn.Linear) and each is not head]
    known = dict.fromkeys(name.rpartition(".")[2] for name in linears)
    strangers = [target for target in lora.targets if target not in known]
    if strangers:
        raise ConfigError(
            f"actor.lora.targets: {', '.join(strangers)}: no linear layers of {type(actor.inner).__name__}, which has "
            f"{', '.join(known)}; name some of these"
        )
    # PEFT calls it an integer, and divides by it as by any number.
    settings: dict[str, Any] = {"r": lora.rank, "lora_alpha": lora.effective_alpha, "bias": "none"}
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=list(lora.targets), **settings), actor.inner)
    for name, parameter in actor.named_parameters():
        parameter.requires_grad_(is_factor(name))
    restart_adapters(actor, seed=seed)
    actor.train(False)


@torch.no_grad()
def restart_adapters(actor: TransformersActor, *, seed: int, variant: int = 0) -> None:
    """Set the factors of an actor: B to 0, A to a function of (seed, name, variant), as ``models.weights`` does."""
    for name, parameter in actor.named_parameters():
        if is_factor(name) and parameter.device.type != "meta":
            parameter.copy_(initial_factor(name, parameter.shape, seed=seed, variant=variant))
