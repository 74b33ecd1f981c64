"""PEFT's files of the actor's adapters: those to begin with, and the settings that travel with a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hybridflow.checkpoint.formats import lora as adapters
from hybridflow.checkpoint.formats.peft_dir import PeftSource, is_peft
from hybridflow.checkpoint.formats.registry import open_source
from hybridflow.checkpoint.model_info import read_model_info
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.families.assets import to_json
from hybridflow.families.config_json import Described, describe
from hybridflow.families.hub_cache import hub_name
from hybridflow.families.vision import has_vision
from hybridflow.models.adapters import MODULES, factor_spec
from hybridflow.placement.job import Job
from hybridflow.placement.placed_model import PlacedModel
from hybridflow.placement.user_objects import has_weights, in_memory_assets, runs_in_transformers


def described(job: Job) -> Described:
    """Return the actor's model and its family: the family of its weights, else the first that has such models.

    Raises:
        ConfigError: No family has.
    """
    model = job.model_of("actor")
    given = in_memory_assets(job, "actor")
    family = None if given is None else given[0]
    if model.path is not None:
        family = read_model_info(Path(model.path)).family
    # Where it came from is no setting that a family has.
    return describe(replace(model, path=None), family=family, has_value_head=False)


def check_targets(job: Job) -> None:
    """Hold ``actor.lora.targets`` against what the family of a named model calls its layers.

    A model that runs in ``transformers`` has been held against them when it was made.

    Raises:
        ConfigError: A target is none of them.
    """
    lora = job.recipe.actor.lora
    if lora is None or not has_weights(job, "actor") or runs_in_transformers(job, "actor"):
        return
    found = described(job)
    names = dict.fromkeys(module.hf.rpartition(".")[2] for module in adapters.linear_modules(found))
    known = [name for name in names if name in MODULES]
    strangers = [target for target in lora.targets if target not in known]
    if strangers:
        raise ConfigError(
            f"actor.lora.targets: {', '.join(strangers)}: no layers of {found.family.name} that have adapters here, "
            f"which are {', '.join(known)}; name some of these, or set model.implementation to transformers, where any "
            "linear layer has one"
        )


def load_adapters(job: Job, model: PlacedModel) -> None:
    """Fill the actor's adapters from the directory that the recipe names, if it does.

    Raises:
        CheckpointError: The directory is damaged, or its factors are not those of the recipe.
        ConfigError: There is no adapter, or it has another scale.
    """
    lora = job.recipe.actor.lora
    if lora is None or lora.path is None:
        return
    path = Path(lora.path)
    source = PeftSource(path, described(job)) if is_peft(path) else open_source(path)
    if not adapters.is_adapter(source):
        raise ConfigError(
            f"actor.lora.path={lora.path!r}: expected a LoRA adapter, found a model; set model.path to it"
        )
    settings = adapters.settings_of(source)
    for factor in adapters.check_adapter(source).values():
        scale = settings.scale_of(factor.module.hf)
        if not math.isclose(scale, lora.scale):
            raise ConfigError(
                f"actor.lora.path={lora.path!r}: {factor.module.hf} has scale {scale:g}, the recipe alpha / rank = "
                f"{lora.effective_alpha:g} / {lora.rank}; set actor.lora.alpha to {scale * lora.rank:g}"
            )
    try:
        model.load(source, factor_spec(model.spec))
    except CheckpointError as error:
        raise CheckpointError(f"{error} (actor.lora.rank={lora.rank}, targets={', '.join(lora.targets)})") from error


def adapter_config(job: Job, assets: Mapping[str, bytes]) -> bytes:
    """Return PEFT's ``adapter_config.json`` of the actor's adapters; ``assets`` are the actor's small files."""
    lora = job.recipe.actor.lora
    assert lora is not None, "called without adapters"
    targets: list[str] | str = sorted(lora.targets)
    if has_vision(assets) and not runs_in_transformers(job, "actor"):
        # A tower may have layers of the same names. A text is an expression to PEFT.
        targets = rf".*\.language_model\..*\.({'|'.join(targets)})"
    # What a warm start or a merge has changed is in no directory but the run's own.
    is_base_known = job.recipe.warm_start is None and lora.merge_every == 0
    alpha, path = lora.effective_alpha, job.recipe.model.path
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if path is None or not is_base_known else hub_name(Path(path)) or path,
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": lora.dropout,
        "target_modules": targets,
        "bias": "none",
        "inference_mode": True,
    }
    return to_json(values)
