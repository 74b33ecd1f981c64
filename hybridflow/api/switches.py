"""Switches of other frameworks in a program's settings: each sets what it says, or tells what does it here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.errors import ConfigError

LORA_RANK = 8
"""Of ``use_lora`` without a rank."""

_PROFILED_STEPS = (1, 2, 3)

REPLACED: Mapping[str, str] = {
    "fsdp_sharding": (
        "weights are cut by tp_size and pp_size, and the optimizer's state over the replicas by Megatron's distributed "
        "optimizer, which is on (actor.optimizer.distributed); remove the key, and where memory is short raise tp_size "
        "or pp_size"
    ),
    "enable_debug_mode": (
        "there is no such mode: errors always name the key, file, tensor or rank; to look closer set profile.steps, or "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment; remove the key"
    ),
    "allow_unsafe_operations": (
        "nothing here needs it: pickled files are read by restricted unpickling alone, and nothing is evaluated; "
        "remove the key, and give code of your own as objects"
    ),
}
"""Key of a configuration -> what does it here."""

_OFF_IS_ALWAYS_SO = ("enable_debug_mode", "allow_unsafe_operations")


def in_our_words(given: dict[str, Any]) -> dict[str, Any]:
    """Return settings in which switches of other frameworks have become keys of a recipe.

    ``use_lora`` is ``actor.lora.rank``, ``enable_profiling`` is ``profile.steps``, ``device`` is ``actor.devices``;
    ``enable_debug_mode`` and ``allow_unsafe_operations`` may be false.

    Args:
        given: Short names and sections.

    Raises:
        ConfigError: A key has another name here, or two of them contradict each other.
    """
    found = dict(given)
    for key in ("use_lora", "enable_profiling", *_OFF_IS_ALWAYS_SO):
        if type(found.get(key, False)) is not bool:
            raise ConfigError(f"{key}={found[key]!r}: give true or false")
    for key in _OFF_IS_ALWAYS_SO:
        if found.get(key) is False:
            del found[key]
    for key, instead in REPLACED.items():
        if key in found:
            raise ConfigError(f"{key}: {instead}")
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


def _put_into(found: dict[str, Any], section: str, values: Mapping[str, Any], key: str) -> None:
    """Put values beside those that a section has."""
    there = found.get(section, {})
    if not isinstance(there, Mapping):
        raise ConfigError(f"{section}: found {there!r:.60}, expected a section; remove it, or {key}")
    for name, value in values.items():
        if name in there and there[name] != value:
            raise ConfigError(f"{key}: {section}.{name} is given too, as {there[name]!r:.60}; remove one of the two")
    found[section] = {**there, **values}
