"""Checks of ``actor.fp8``: what would ignore it, or compute something else, is refused by name. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from hybridflow.config.recipe import Recipe
from hybridflow.errors import ConfigError, LayoutError
from hybridflow.families.fp8 import BLOCK, linear_widths
from hybridflow.families.model_info import ModelInfo


def check_fp8(recipe: Recipe, in_memory: Mapping[str, ModelInfo]) -> None:
    """Refuse FP8 where a layer, a layout or the rollout would not follow.

    Raises:
        ConfigError: The model, or another key, does not go together with it.
        LayoutError: The update layout shards parameters, or cuts a block.
    """
    fp8, model, actor = recipe.actor.fp8, recipe.model_of("actor"), recipe.actor
    if fp8 == "none":
        return
    is_foreign = model.implementation == "transformers" or ("model" in in_memory and not in_memory["model"].is_cut)
    others = {
        "model.implementation=transformers": (is_foreign, "its layers are not Transformer Engine's"),
        f"model.dtype={model.dtype}": (model.dtype != "bf16", "it needs weights in bf16"),
        f"model.num_experts={model.num_experts}": (model.num_experts is not None, "experts would compute in bf16"),
        f"model.kv_lora_rank={model.kv_lora_rank}": (
            model.kv_lora_rank is not None,
            "latent attention would compute in bf16",
        ),
        "model.linear_layers": (bool(model.linear_layers), "linear attention would compute in bf16"),
        "model.pre_norms=false": (not model.pre_norms, "such layers are not Transformer Engine's"),
        "actor.lora": (actor.lora is not None, "layers with adapters are not Transformer Engine's"),
        "actor.recompute=full": (
            actor.recompute == "full",
            "layers that are computed again would compute in bf16",
        ),
        f"actor.reshard={actor.reshard}": (
            actor.reshard in ("shared", "mpi"),
            "other ranks cannot read the rounded weights in place, so reshard must be auto or torch",
        ),
        f"rollout.engine.kind={recipe.rollout.engine.kind}": (
            recipe.rollout.engine.kind != "megatron",
            "only the engine of kind megatron samples with rounded weights",
        ),
    }
    for key, (is_there, reason) in others.items():
        if is_there:
            raise ConfigError(
                f"actor.fp8={fp8}: does not go together with {key}: {reason}; change {key.partition('=')[0]}, or set "
                "actor.fp8 to none"
            )
    if actor.update.is_sharded:
        raise LayoutError(
            f"actor.fp8={fp8}: does not go together with actor.update={actor.update}, which shards parameters that "
            "Transformer Engine would round whole; use dp in the place of fsdp, or set actor.fp8 to none"
        )
    for name, width in linear_widths(model, actor.update.tp).items():
        if width % BLOCK:
            raise LayoutError(
                f"actor.fp8={fp8}: with actor.update.tp={actor.update.tp} a rank has {width} columns of {name}, "
                f"expected a multiple of {BLOCK}; change tp, or set actor.fp8 to none"
            )
