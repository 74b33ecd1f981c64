"""Settings as programs give them, in words of other frameworks too, turned into a recipe."""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hybridflow.api.switches import in_our_words, shard_by_fsdp
from hybridflow.checkpoint.model_info import latest_actor, read_model_info
from hybridflow.config.recipe import Recipe
from hybridflow.config.trainer import OPEN_END
from hybridflow.errors import ConfigError, HybridflowError, did_you_mean
from hybridflow.families.model_info import ModelInfo
from hybridflow.flows.registry import ALGORITHMS, CHOSEN
from hybridflow.recipe.checks import VALIDATION_KEYS
from hybridflow.recipe.load import recipe_from_dict
from hybridflow.recipe.other_names import find_other_name
from hybridflow.sections import changed_keys, read_yaml

SHORT: Mapping[str, tuple[str, ...]] = {
    "batch_size": ("trainer.mini_batch_size",),
    "mini_batch_size": ("trainer.mini_batch_size",),
    "rollout_batch_size": ("trainer.global_batch_size",),
    "global_batch_size": ("trainer.global_batch_size",),
    "micro_batch_tokens": ("trainer.micro_batch_tokens",),
    "steps": ("trainer.steps",),
    "save_every": ("trainer.save_every",),
    "lr": ("actor.optimizer.lr", "critic.optimizer.lr"),
    "learning_rate": ("actor.optimizer.lr", "critic.optimizer.lr"),
    "actor_lr": ("actor.optimizer.lr",),
    "critic_lr": ("critic.optimizer.lr",),
    "weight_decay": ("actor.optimizer.weight_decay", "critic.optimizer.weight_decay"),
    "max_grad_norm": ("actor.optimizer.clip_grad", "critic.optimizer.clip_grad"),
    "kl_coef": ("kl.coef",),
    "kl_estimator": ("kl.estimator",),
    "clip_range": ("loss.clip_low", "loss.clip_high"),
    "clip_low": ("loss.clip_low",),
    "clip_high": ("loss.clip_high",),
    "value_clip": ("critic.value_clip",),
    "entropy_coef": ("loss.entropy_coef",),
    "ppo_epochs": ("loss.epochs",),
    "gamma": ("advantage.gamma",),
    "gae_lambda": ("advantage.gae_lambda",),
    "lam": ("advantage.gae_lambda",),
    "group_size": ("rollout.group_size",),
    "num_generations": ("rollout.group_size",),
    "max_new_tokens": ("rollout.max_new_tokens",),
    "max_length": ("rollout.max_new_tokens",),
    "temperature": ("rollout.temperature",),
    "top_k": ("rollout.top_k",),
    "top_p": ("rollout.top_p",),
    "max_context": ("model.max_context",),
    "dtype": ("model.dtype",),
    "output_dir": ("run_dir",),
    "deadline_s": ("cluster.deadline_s",),
    "threads_per_rank": ("cluster.threads_per_rank",),
    "lora_rank": ("actor.lora.rank",),
    "lora_alpha": ("actor.lora.alpha",),
    "offload_to_cpu": ("actor.offload", "reference.offload"),
    "recompute": ("actor.recompute", "critic.recompute"),
}
"""Short name -> keys of the recipe that it sets, of those that the algorithm reads.

A name that ``recipe.other_names.NAMES`` has too means the same there.
"""

_SIZES = {
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "data_parallel_size": "dp",
    "tp_size": "tp",
    "pp_size": "pp",
    "dp_size": "dp",
    "context_parallel_size": "cp",
    "expert_parallel_size": "ep",
    "cp_size": "cp",
    "ep_size": "ep",
    "etp_size": "etp",
    "vpp_size": "vpp",
    "sequence_parallel": "sequence_parallel",
}
"""What a program may say of a layout -> key of a layout."""

_ENGINE = {"resharding_interval": "actor.reshard_every", "memory_budget_gb": "cluster.memory_budget_gb"}
_PLACES = {"actor": "update", "critic": "layout", "reference": "layout", "reward": "layout"}
_NEW_TOKENS = 128


def read_config(config: Any) -> dict[str, Any]:
    """Return settings as a mapping, from a mapping, a YAML file, or nothing.

    Raises:
        ConfigError: It is something else, or the file cannot be read.
    """
    if config is None:
        return {}
    if isinstance(config, str | Path):
        if Path(config).is_dir():
            raise ConfigError(
                f"config: {str(config)!r} is a directory; settings are a mapping or a YAML file, and the directory of "
                f"a model is actor_model={str(config)!r}"
            )
        config = read_yaml(Path(config))
    if not isinstance(config, Mapping):
        raise ConfigError(f"config: found {type(config).__name__}; give a mapping, or a YAML file of one")
    for key in config:
        if not isinstance(key, str):
            raise ConfigError(f"config: found the key {key!r}, expected the name of a setting")
    return copy.deepcopy(dict(config))


def recipe_values(config: Any, *, algorithm: str, num_ranks: int) -> dict[str, Any]:
    """Return a recipe's nested mapping from short names, sections of roles, and a recipe's own keys.

    Args:
        config: As ``read_config`` takes it.
        algorithm: Of ``flows.registry.ALGORITHMS``.
        num_ranks: That are there.

    Raises:
        ConfigError: A key is none of these, or says what another one says.
    """
    if algorithm not in ALGORITHMS:
        hint = did_you_mean(algorithm, ALGORITHMS)
        raise ConfigError(f"algorithm={algorithm!r}: unknown; {hint}there are {', '.join(ALGORITHMS)}")
    given = in_our_words(read_config(config))
    values: dict[str, Any] = {"algorithm": algorithm, "cluster": {"ranks": num_ranks}}
    values["data"] = {"train": "given by the program", "held_out": "given by the program"}
    engine, sharding = given.pop("hybrid_engine", {}), given.pop("fsdp_sharding", None)
    for role in _PLACES:
        if isinstance(given.get(role), Mapping):
            given[role] = _role(values, role, dict(given[role]), num_ranks)
    actor = given.get("actor", {})
    if sharding is not None and isinstance(actor, Mapping):
        given["actor"] = shard_by_fsdp(actor, sharding, num_ranks)
    top = {field.name for field in fields(Recipe)}
    for key, value in given.items():
        if key in top:
            put(values, key, value)
            continue
        targets = [target for target in SHORT.get(key, ()) if _is_read(target, algorithm)]
        if not targets:
            raise ConfigError(_unknown(key, algorithm, top))
        for target in targets:
            put(values, target, value)
    _hybrid_engine(values, engine, num_ranks)
    return values


def finish_recipe(
    values: dict[str, Any], *, num_prompts: int | None = None, in_memory: Mapping[str, ModelInfo] | None = None
) -> Recipe:
    """Return the recipe with its open settings filled in.

    Args:
        values: From ``recipe_values``.
        num_prompts: Prompts of a step, where the program has given no size of its batch. One prompt is sampled for the
            whole batch, unless the program says how often.
        in_memory: As for ``recipe.load.recipe_from_dict``.

    Raises:
        ConfigError: As for ``recipe.load.recipe_from_dict``.
    """
    algorithm = str(values["algorithm"])
    values.setdefault("name", "program")
    # A program ends when it likes, so steps are as good as unlimited.
    put_under(values, "trainer.steps", OPEN_END)
    context = context_of(values, {} if in_memory is None else in_memory)
    # What the program has not asked for is not to fill a small model's context.
    put_under(values, "rollout.max_new_tokens", _NEW_TOKENS if context is None else min(_NEW_TOKENS, context // 2))
    num_ranks = values["cluster"]["ranks"]
    put_under(values, "actor.update", {"dp": num_ranks})
    if "critic" in ALGORITHMS[algorithm].traits.reads:
        put_under(values, "critic.layout", values["actor"]["update"])
    trainer, rollout = values["trainer"], values["rollout"]
    if num_prompts == 1 and "group_size" not in rollout and "global_batch_size" in trainer:
        rollout["group_size"] = trainer["global_batch_size"]
    if "global_batch_size" not in trainer:
        traits = ALGORITHMS[algorithm].traits
        per_prompt = 2 if traits.is_paired else rollout.get("group_size", traits.group_size)
        size = trainer.get("mini_batch_size") if num_prompts is None else num_prompts * per_prompt
        if size is None:
            raise ConfigError("rollout_batch_size: missing; give the samples of a step, or batch_size")
        trainer["global_batch_size"] = size
    recipe = recipe_from_dict(values, source="config", in_memory=in_memory)
    _check_program(recipe)
    return recipe


def _check_program(recipe: Recipe) -> None:
    """Refuse settings of what only a recipe's own training loop does, or of which a program says too little."""
    for name in changed_keys(recipe.trainer, VALIDATION_KEYS):
        raise ConfigError(
            f"{name}: a program has no held-out data, so nothing is validated; generate from such prompts between two "
            "steps, or train with a recipe"
        )
    if recipe.trainer.max_staleness > 0:
        raise ConfigError(
            f"trainer.max_staleness={recipe.trainer.max_staleness}: a program takes rollouts and updates one by one; "
            "remove it, and take a rollout before the update on the one before it, or train with a recipe"
        )
    if recipe.warm_start is not None:
        raise ConfigError("warm_start: a program gives no solutions to imitate; run SFTTrainer before, or use a recipe")
    learners = {"actor": recipe.actor, "critic": recipe.critic, "cost_critic": recipe.cost_critic}
    for role, section in learners.items() if recipe.trainer.known_steps is None else ():
        if section is not None and section.optimizer.schedule != "constant":
            raise ConfigError(
                f"{role}.optimizer.schedule={section.optimizer.schedule}: falls until the last step, and a program has "
                "none; set steps to their number in the config, or schedule to constant"
            )


def context_of(values: Mapping[str, Any], in_memory: Mapping[str, ModelInfo]) -> int | None:
    """Return the longest sequence of the actor, or None if it cannot be told."""
    model = values.get("model")
    if not isinstance(model, Mapping):
        model = {}
    if "max_context" in model:
        said = model["max_context"]
        return said if isinstance(said, int) else None
    if "model" in in_memory:
        return in_memory["model"].model.max_context
    path = model.get("path")
    if path is None:
        return None
    try:
        return read_model_info(latest_actor(Path(path))).model.max_context
    except HybridflowError:
        # The recipe is refused for it, by the key.
        return None


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key, and merge sections into each other.

    Raises:
        ConfigError: It is there already, with another value.
    """
    place, last = _place(values, key)
    if isinstance(value, Mapping) and isinstance(place.get(last, {}), dict):
        place.setdefault(last, {})
        for name, inner in value.items():
            put(values, f"{key}.{name}", inner)
    elif value is None and isinstance(place.get(last), dict):
        raise ConfigError(f"{key}: found nothing, expected a section; leave it out, or give keys and values")
    elif last in place and place[last] != value:
        raise ConfigError(f"{key}: given twice, as {place[last]!r} and as {value!r}; remove one of the two")
    else:
        place[last] = value


def merge(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge several mappings into one. Raises ConfigError: two of them differ on a key."""
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            put(merged, key, copy.deepcopy(value))
    return merged


def put_under(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key unless it is set already."""
    place, last = _place(values, key)
    place.setdefault(last, copy.deepcopy(value))


def _place(values: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """Return the section of a dotted key, made if it is missing, and the key's name there."""
    *sections, last = key.split(".")
    place = values
    for section in sections:
        place = place.setdefault(section, {})
        if not isinstance(place, dict):
            raise ConfigError(f"{key}: {section} is {place!r:.60}, not a section; remove {section}, or {key}")
    return place, last


def _layout(given: dict[str, Any], num_ranks: int, prefix: str = "") -> dict[str, Any]:
    """Take the sizes of a layout out of a section, with replicas that fill the ranks; empty: it has none."""
    sizes = {}
    for key, axis in _SIZES.items():
        if f"{prefix}{key}" in given:
            sizes[axis] = given.pop(f"{prefix}{key}")
            if axis in ("tp", "pp", "cp"):
                check_count(sizes[axis], f"{prefix}{key}")
    others = math.prod(sizes.get(axis, 1) for axis in ("tp", "pp", "cp"))
    return {"dp": max(1, num_ranks // others), **sizes} if sizes else {}


def _role(values: dict[str, Any], role: str, section: dict[str, Any], num_ranks: int) -> dict[str, Any]:
    """Return a role's section as a recipe has it, and move its model's name to the model's section."""
    name = section.pop("model_name", None)
    if name is not None and role == "reference":
        actor = values.get("model", {}).get("path")
        if str(name) != actor:
            raise ConfigError(
                f"reference.model_name={str(name)!r}: the reference is the actor as it begins, {actor!r}; remove it "
                "(to learn from another model, see the algorithm distill)"
            )
    elif name is not None:
        put(values, "model.path" if role == "actor" else f"{role}.model.path", str(name))
    device = section.pop("device", None)
    devices = section.pop("devices", device)
    if device is not None and devices != device:
        raise ConfigError(f"{role}.device={device!r}, and devices={devices!r} too; remove one of the two")
    ranks = None if devices is None else ranks_of(devices, num_ranks, key=f"{role}.devices")
    if ranks is not None:
        section["ranks"] = ranks
    count, place = num_ranks if ranks is None else len(ranks), _PLACES[role]
    sizes, is_model = _layout(section, count), role != "reward" or name is not None or "model" in section
    if sizes:
        section[place] = {**sizes, **section.get(place, {})}
    elif ranks is not None and is_model:
        section.setdefault(place, {"dp": max(1, count)})
    return section


def check_count(value: Any, what: str, *, least: int = 1, more: str = "") -> None:
    """Refuse what is no number of things. Raises ConfigError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{what}={value!r}, expected an integer of at least {least}{more}")


def check_eval_steps(eval_steps: Any, eval_dataset: Any, here: str) -> None:
    """Refuse steps between validations that are no number, or have nothing to validate on. Raises ConfigError."""
    if eval_steps is None:
        return
    check_count(eval_steps, f"{here}: eval_steps")
    if eval_dataset is None:
        raise ConfigError(
            f"{here}: eval_steps={eval_steps}: nothing to validate on; give the class an eval_dataset, too"
        )


def sizes_of(config: dict[str, Any]) -> dict[str, Any]:
    """Take the sizes of one model out of settings in which they stand without its section.

    Raises:
        ConfigError: A key is all but one of them.
    """
    for key in config:
        near = difflib.get_close_matches(str(key), _SIZES, n=1, cutoff=0.8)
        if near and key not in _SIZES:
            raise ConfigError(f"config: {key}: unknown key; did you mean {near[0]}?")
    return {key: config.pop(key) for key in _SIZES if key in config}


def ranks_of(devices: Any, num_ranks: int | None, *, key: str) -> list[int]:
    """Return ranks from their numbers or from names such as ``cuda:1``.

    Args:
        devices: One, or several.
        num_ranks: Ranks that are there; None: this is not asked.
        key: Their name in messages.

    Raises:
        ConfigError: One is none of these, or is not there.
    """
    listed = [devices] if isinstance(devices, str | int) else devices
    if not isinstance(listed, Collection) or len(listed) == 0:
        raise ConfigError(f"{key}: found {devices!r:.60}, expected ranks, such as [0, 1], or devices, such as 'cuda:0'")
    ranks = []
    for device in listed:
        text = str(device)
        number = text.partition(":")[2] if text.startswith(("cuda:", "cpu:")) else text
        if not number.isdigit():
            raise ConfigError(f"{key}: {device!r}; give ranks, such as 0, or devices, such as 'cuda:0'")
        if num_ranks is not None and int(number) >= num_ranks:
            raise ConfigError(
                f"{key}: {device!r} is not there: this job has {num_ranks} rank(s), one for each device, "
                f"0 to {num_ranks - 1}; start more ranks, or name one of these"
            )
        ranks.append(int(number))
    return ranks


def _hybrid_engine(values: dict[str, Any], engine: Any, num_ranks: int) -> None:
    known = {"enable_resharding", *_ENGINE, *(f"rollout_{size}" for size in _SIZES)}
    if not isinstance(engine, Mapping):
        raise ConfigError(f"hybrid_engine: found {engine!r:.60}; expected a section with {', '.join(sorted(known))}")
    for key in engine:
        if key not in known:
            hint = did_you_mean(str(key), sorted(known))
            raise ConfigError(f"hybrid_engine.{key}: unknown key; {hint}keys: {', '.join(sorted(known))}")
    count = len(values.get("actor", {}).get("ranks", ())) or num_ranks
    sizes = _layout(dict(engine), count, "rollout_")
    if engine.get("enable_resharding", True) is False:
        if sizes:
            given = {axis: engine[f"rollout_{key}"] for key, axis in _SIZES.items() if f"rollout_{key}" in engine}
            raise ConfigError(
                f"hybrid_engine: enable_resharding=false, but the rollout has sizes of its own ({given}); remove them"
            )
    elif sizes:
        put(values, "actor.rollout", sizes)
    for key, target in _ENGINE.items():
        if key in engine:
            put(values, target, engine[key])


def _is_read(key: str, algorithm: str) -> bool:
    """Return whether an algorithm reads a key of a section that not all algorithms have."""
    section = key.split(".")[0]
    return section not in CHOSEN or section in ALGORITHMS[algorithm].traits.reads


def _unknown(key: str, algorithm: str, top: set[str]) -> str:
    if key in SHORT:
        return f"config: {key}: algorithm={algorithm} has no {' or '.join(SHORT[key])}; remove it"
    other = find_other_name(key)
    if other is not None:
        return f"config: {key}: unknown key; {other}, in its section of config"
    hint = did_you_mean(key, [*SHORT, *top])
    return f"config: {key}: unknown key; {hint}short names: {', '.join(SHORT)}; sections: {', '.join(sorted(top))}"
