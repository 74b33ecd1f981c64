"""A job that needs more memory than its ranks have is refused, with what helps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybridflow.config.recipe import Recipe
from hybridflow.errors import ConfigError
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.mapping.memory import USABLE, RankMemory, job_memory, planned_gpu_bytes
from hybridflow.observe.console import format_bytes

_REMEDIES = {
    "update": "raise tp or pp, offload (actor.offload, reference.offload), or lower trainer.micro_batch_tokens or "
    "model.max_context",
    "rollout": "lower rollout.max_concurrent or rollout.cache_memory, set actor.offload, or raise the tp of "
    "actor.rollout",
}


def check_budget(recipe: Recipe, meshes: Mapping[str, DeviceMesh]) -> None:
    """Refuse a job that needs more memory than ``cluster.memory_budget_gb``, with the smallest cache.

    Raises:
        ConfigError: It does; names the rank and the phase.
    """
    if recipe.cluster.memory_budget_gb is not None:
        # The file of measured hardware need not be on a node of the job where nothing depends on it.
        gpu_bytes = planned_gpu_bytes(recipe, None) if recipe.rollout.engine.kind == "vllm" else None
        check_memory(recipe, job_memory(recipe, meshes, gpu_bytes=gpu_bytes))


def check_memory(recipe: Recipe, memory: Sequence[RankMemory], gpu_bytes: float | None = None) -> list[str]:
    """Refuse a job that needs more memory than the recipe's budget or its GPUs have, with the smallest cache.

    Args:
        recipe: The recipe.
        memory: What each rank needs.
        gpu_bytes: Memory of a GPU; None: not known.

    Returns:
        Warnings where a rank comes near the memory of its GPU.

    Raises:
        ConfigError: A rank needs more; names it and the phase.
    """
    rank = max(range(len(memory)), key=lambda rank: (memory[rank].least, -rank))
    needed, budget_gb = memory[rank], recipe.cluster.memory_budget_gb
    phase = "update" if needed.update >= needed.rollout - needed.spare else "rollout"
    found = f"rank {rank} needs about {format_bytes(needed.least)} in its {phase} phase"
    remedy = f"{_REMEDIES[phase]}; `hybridflow plan job` shows what needs it"
    if budget_gb is not None and needed.least > budget_gb * 1e9:
        raise ConfigError(f"cluster.memory_budget_gb={budget_gb:g}: {found}; {remedy}; or raise the budget")
    if gpu_bytes is None or needed.least <= USABLE * gpu_bytes:
        return []
    named = recipe.cluster.hardware
    source = "gpu_memory_gb in the site settings" if named is None else f"cluster.hardware={named}"
    found += f", a GPU has {format_bytes(int(gpu_bytes))} ({source})"
    if needed.least > gpu_bytes:
        raise ConfigError(f"{found}; {remedy}, `hybridflow plan auto` finds layouts that fit")
    return [f"{found}, and the estimate does not have all; to be safe, {_REMEDIES[phase]}"]
