"""Switches of other frameworks in a program's settings: each sets what it says, or tells what does it here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hybridflow.errors import ConfigError
from hybridflow.layout.sharding import SHARDINGS

LORA_RANK = 8
"""Of ``use_lora`` without a rank."""


_PROFILED_STEPS = (1, 2, 3)
_SWITCHES = ("use_lora", "enable_profiling", "enable_debug_mode", "allow_unsafe_operations")


def in_our_words(given: dict[str, Any]) -> dict[str, Any]:
    """Return settings in which switches of other frameworks have become keys of a recipe.

    ``use_lora`` is ``actor.lora.rank``, ``enable_profiling`` is ``profile.steps``, ``device`` is ``actor.devices``.
    ``enable_debug_mode`` turns on torch's anomaly detection in this process: a backward pass that makes a NaN names the
    operation. ``allow_unsafe_operations`` may be false.

    Args:
        given: Short names and sections.

    Raises:
        ConfigError: A switch is neither true nor false, asks for what is not done here, or contradicts another key.
    """
    found = dict(given)
    for key in _SWITCHES:
        if type(found.get(key, False)) is not bool:
            raise ConfigError(f"{key}={found[key]!r}: give true or false")
    if found.pop("allow_unsafe_operations", False):
        raise ConfigError(
            "allow_unsafe_operations: nothing here needs it: pickled files are read by restricted unpickling alone, "
            "and nothing is evaluated; remove the key, and give code of your own as objects"
        )
    if found.pop("enable_debug_mode", False):
        torch.autograd.set_detect_anomaly(True)
    if found.pop("enable_profiling", False):
        _put_into(found, "profile", {"steps": list(_PROFILED_STEPS)}, "enable_profiling")
    if "device" in found:
        _put_into(found, "actor", {"devices": found.pop("device")}, "device")
    uses_lora = found.pop("use_lora", None)
    if uses_lora is False and found.keys() & {"lora_rank", "lora_alpha"}:
        raise ConfigError("use_lora=false, but lora_rank or lora_alpha is given; remove one of the two")
    actor = found.get("actor")
    if uses_lora and "lora_rank" not in found and not (isinstance(actor, Mapping) and actor.get("lora")):
        found["lora_rank"] = LORA_RANK
    return found


def shard_by_fsdp(actor: Mapping[str, Any], sharding: Any, num_ranks: int) -> dict[str, Any]:
    """Return the section ``actor`` of a recipe with the update layout that ``fsdp_sharding`` asks for.

    Args:
        actor: The section, as a recipe has it.
        sharding: One of ``layout.sharding.SHARDINGS``.
        num_ranks: Ranks of the job.

    Raises:
        ConfigError: The sharding is unknown, or the section cuts the model otherwise too.
    """
    if sharding not in SHARDINGS:
        raise ConfigError(f"fsdp_sharding={sharding!r}: unknown; give one of {', '.join(SHARDINGS)}")
    sizes = actor.get("update", {})
    if isinstance(sizes, Mapping):
        sizes = {axis: size for axis, size in sizes.items() if axis != "dp" and size != 1}
    if sizes:
        raise ConfigError(
            f"fsdp_sharding={sharding}: actor.update has {sizes} too, and FSDP alone cuts the weights that learn; "
            "remove these sizes, or give them to the rollout: hybrid_engine={'rollout_tensor_parallel_size': …}"
        )
    # How many ranks share a parameter the layout tells by itself, also within nodes.
    update = {"dp": len(actor.get("ranks", ())) or num_ranks, "fsdp_sharding": sharding}
    return {**actor, "update": update}


def _put_into(found: dict[str, Any], section: str, values: Mapping[str, Any], key: str) -> None:
    """Put values beside those that a section has."""
    there = found.get(section, {})
    if not isinstance(there, Mapping):
        raise ConfigError(f"{section}: found {there!r:.60}, expected a section; remove it, or {key}")
    for name, value in values.items():
        if name in there and there[name] != value:
            raise ConfigError(f"{key}: {section}.{name} is given too, as {there[name]!r:.60}; remove one of the two")
    found[section] = {**there, **values}
