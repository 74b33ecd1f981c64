"""hybridflow: RL post-training of language models on HPC clusters.

Importing the package is light: no torch, no MPI, no GPU library. What needs them imports them itself, and the names
of the Python API (docs/api.md) bring them in when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_API = {
    "api.algorithms": ("BaseAlgorithm", "GRPO", "PPO", "RLOO"),
    "api.device_mesh": ("DeviceMesh",),
    "api.flow": ("RoleFlow", "node"),
    "api.hybrid_actor": ("HybridActor", "HybridOutput", "SwitchCost", "TrainingStep"),
    "api.other_frameworks": (
        *("DataLoader", "DataParallelTrainer", "LoraConfig", "ReplayBuffer", "RolloutManager"),
        *("SwitchOverhead", "measure_switch_overhead", "vLLMActor"),
    ),
    "api.offline": ("DPOTrainer", "KTOTrainer", "OfflineTrainer", "RewardTrainer", "SFTTrainer"),
    "api.pipeline": ("DataPipeline", "RLTrainer"),
    "api.roles": ("Actor", "Critic", "Reward", "RewardModel"),
    "api.rollout_worker": ("RolloutWorker",),
    "api.session": ("Rollout",),
    "api.trainers": ("GRPOTrainer", "OnlineTrainer", "PPOTrainer"),
    "api.world": ("find_world", "use_world"),
    "data.provider": ("DataProvider",),
    "dataflow.batch": ("Batch", "Ragged"),
    "models.user_model": ("ActorModel", "CriticModel"),
    "observe.exporters": ("MetricsExporter",),
    "rollout.buffer": ("AsyncRolloutBuffer",),
}
"""Module -> the public names that it defines."""

_MODULES = {name: module for module, names in _API.items() for name in names}

_FOREIGN = tuple(f"{each}Config" for each in ("DPO", "GRPO", "KTO", "PPO", "Reward", "RLOO", "SFT"))
"""TRL's classes of settings, which a program that moves here imports first."""

_PATHS = ("config", "data", "metrics", "trainer")
"""Modules that a program reaches after ``import hybridflow`` alone, as ``hybridflow.config.auto_cache_clear``."""

__all__ = ["__version__", *sorted(_MODULES)]


def __getattr__(name: str) -> Any:
    if name in _PATHS:
        return importlib.import_module(f"hybridflow.{name}")
    if name in _FOREIGN:
        # Of an AttributeError ``from hybridflow import`` shows no word.
        raise ImportError(
            f"hybridflow has no {name}: a trainer takes a dict of settings: GRPOTrainer(dict(learning_rate=1e-6), …). "
            "See docs/from-trl.md"
        )
    if name not in _MODULES:
        from hybridflow.errors import did_you_mean

        hint = did_you_mean(name, _MODULES)
        names = ", ".join(sorted(_MODULES))
        raise AttributeError(f"module 'hybridflow' has no attribute {name!r}; {hint}its names: {names}")
    from hybridflow.parallel.imports import import_for_program
    from hybridflow.parallel.rank import silence_libraries

    silence_libraries()
    module = f"hybridflow.{_MODULES[name]}"
    bring = import_for_program if module.startswith("hybridflow.api") else importlib.import_module
    return getattr(bring(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
