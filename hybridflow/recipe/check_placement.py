"""Checks of where roles are placed, and of what works ahead. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hybridflow.config.recipe import CRITICS, MODEL_SECTIONS, ROLES, Recipe
from hybridflow.errors import ConfigError, LayoutError
from hybridflow.families.cut import check_cut
from hybridflow.families.model_info import ModelInfo
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.models.adapters import MODULES, OF_LINEAR_ATTENTION
from hybridflow.recipe.check_transformers import transformers_meshes
from hybridflow.recipe.meshes import SAMPLING_MESHES, meshes_in_recipe_order, reference_is_base
from hybridflow.sections import changed_keys


def check_uncut(recipe: Recipe, in_memory: Mapping[str, ModelInfo]) -> None:
    """Refuse to cut a user-defined class: it is whole on each of its ranks."""
    foreign = _foreign_roles(in_memory)
    whole = {*foreign, "reference"} if "actor" in foreign else foreign
    for mesh in meshes_in_recipe_order(recipe).values() if whole else ():
        if mesh.role in whole:
            _check_whole(mesh, "a class of your own is not cut", replicas="dp")


def _foreign_roles(in_memory: Mapping[str, ModelInfo]) -> set[str]:
    """Return the roles that a program has given a class of its own."""
    return {role for role, key in MODEL_SECTIONS.items() if key in in_memory and not in_memory[key].is_cut}


def _check_whole(mesh: DeviceMesh, reason: str, *, replicas: str) -> None:
    """Refuse to cut a model that is whole on each rank."""
    for axis in ("tp", "pp", "cp", "ep"):
        size = getattr(mesh.layout, axis)
        if size > 1:
            raise LayoutError(
                f"{mesh.layout_key}.{axis}={size}: {reason}; set {axis}=1, and {replicas} to its {len(mesh.ranks)} "
                "ranks"
            )


def check_recompute(recipe: Recipe, in_memory: Mapping[str, ModelInfo]) -> None:
    """Refuse to recompute what a role's model has not, and numbers of layers that would not be read.

    Raises:
        ConfigError: A key asks for it.
    """
    foreign = _foreign_roles(in_memory)
    for role in ("actor", *CRITICS):
        section = getattr(recipe, role)
        if section is None:
            continue
        if section.recompute_layers is not None and section.recompute != "full":
            raise ConfigError(
                f"{role}.recompute_layers={section.recompute_layers}: counts the layers of {role}.recompute=full, and "
                f"it is {section.recompute}; remove the key, or set recompute to full"
            )
        is_ours = role not in foreign and recipe.model_of(role).implementation == "megatron"
        if section.recompute == "selective" and not is_ours:
            raise ConfigError(
                f"{role}.recompute=selective: computes the core attention of hybridflow's own layers again, and this "
                "model has layers of its own; set it to full or none"
            )


def check_placement(recipe: Recipe) -> None:
    """Refuse ranks that do not exist, and layouts that do not fit their model. Raises LayoutError."""
    given = {f"{role}.ranks": getattr(recipe, role) for role in ROLES}
    named = {key: () if section is None else section.ranks or () for key, section in given.items()}
    named["actor.rollout_ranks"] = recipe.actor.rollout_ranks or ()
    for key, ranks in named.items():
        strangers = [rank for rank in ranks if not 0 <= rank < recipe.cluster.ranks]
        if strangers:
            raise LayoutError(
                f"{key}={list(ranks)}: {strangers} not among ranks 0 to {recipe.cluster.ranks - 1}; "
                f"set cluster.ranks to at least {max(ranks) + 1}, or name ranks that exist"
            )
    if recipe.actor.rollout is not None:
        recipe.actor.rollout.check_generates("actor.rollout")
    _check_fsdp_adapters(recipe)
    _check_offload(recipe)
    whole = transformers_meshes(recipe)
    for name, mesh in meshes_in_recipe_order(recipe).items():
        if name in whole:
            reason = "the model runs in transformers (docs/families.md), whole on each rank"
            _check_whole(mesh, reason, replicas="dp or fsdp")
        mesh.layout.check_trainable(name)
        check_cut(recipe.model_of(name), mesh.layout, name)


def _check_fsdp_adapters(recipe: Recipe) -> None:
    """Refuse to merge adapters into weights of which no rank has all."""
    lora = recipe.actor.lora
    if lora is None or not recipe.actor.update.is_sharded:
        return
    merging = {"warm_start": recipe.warm_start is not None, "actor.lora.merge_every": lora.merge_every > 0}
    for key, is_there in merging.items():
        if is_there:
            raise ConfigError(
                f"{key}: merges adapters into the weights, which actor.update={recipe.actor.update} shards; remove it, "
                "or use dp in the place of fsdp"
            )


def _check_offload(recipe: Recipe) -> None:
    """Refuse to keep in host memory what FSDP does not bring to the accelerator layer by layer."""
    for name, mesh in meshes_in_recipe_order(recipe).items():
        if name != "actor.rollout" and getattr(recipe, mesh.role).offload == "always" and mesh.layout.fsdp == 1:
            raise LayoutError(
                f"{mesh.role}.offload=always: needs fsdp, which brings one layer at a time to the accelerator, and "
                f"{mesh.layout_key} is {mesh.layout}; set fsdp to 2 or more there, or offload to true"
            )
    if recipe.actor.offload == "always" and recipe.actor.reshard == "shared":
        raise ConfigError(
            "actor.reshard=shared: lets ranks read each other's accelerator, and actor.offload=always keeps the "
            "weights in host memory; set reshard to auto, torch or mpi"
        )


def check_split(recipe: Recipe) -> None:
    """Check generating on ranks of its own, and while others learn."""
    actor, staleness = recipe.actor, recipe.trainer.max_staleness
    if actor.rollout_ranks is None:
        if staleness > 0:
            raise ConfigError(
                f"trainer.max_staleness={staleness}: the next batch is generated while one is learned from, on other "
                "ranks; name them in actor.rollout_ranks, or set max_staleness to 0"
            )
        return
    if not recipe.generates:
        raise ConfigError(f"actor.rollout_ranks: algorithm={recipe.algorithm} generates nothing; remove the key")
    if recipe.rollout.engine.kind == "vllm":
        raise ConfigError(
            "actor.rollout_ranks: with rollout.engine.kind=vllm all ranks of the job generate, since vLLM starts on "
            "all of them together; remove the key, or set kind to megatron"
        )
    if actor.offload is True:
        raise ConfigError(
            "actor.offload=true: makes no room for a rollout on other ranks; set it to false, or remove "
            "actor.rollout_ranks"
        )
    meshes = meshes_in_recipe_order(recipe)
    common = sorted({*meshes["actor.update"].ranks} & {*actor.rollout_ranks})
    if common:
        raise LayoutError(
            f"actor.rollout_ranks={list(actor.rollout_ranks)}: {common} are among actor.ranks too; give the rollout "
            "ranks of its own, or remove the key to generate where the actor learns"
        )
    if staleness > 0:
        _check_async(recipe, meshes)


def check_partial_rollouts(recipe: Recipe) -> None:
    """Refuse partial rollouts where responses cannot continue after an update. Raises ConfigError."""
    rollout = recipe.rollout
    if not rollout.partial_rollouts:
        return
    _check_ahead(recipe, "rollout.partial_rollouts=true", off="false")
    if rollout.engine.kind != "megatron" or rollout.environment is not None:
        other = "rollout.environment" if rollout.engine.kind == "megatron" else "rollout.engine.kind"
        raise ConfigError(
            f"rollout.partial_rollouts=true: only responses of the engine of kind megatron, without an environment, go "
            f"on after an update; set it to false, or change {other}"
        )


def check_reshard_every(recipe: Recipe) -> None:
    """Refuse settings that need fresh rollout weights at every step. Raises ConfigError."""
    every = recipe.actor.reshard_every
    if every == 1:
        return
    others = {
        "trainer.max_staleness": recipe.trainer.max_staleness > 0,
        "actor.lora": recipe.actor.lora is not None,
        "rollout.engine.kind": recipe.rollout.engine.kind != "megatron",
        "rollout.partial_rollouts": recipe.rollout.partial_rollouts,
    }
    for key, is_there in others.items():
        if is_there:
            raise ConfigError(
                f"actor.reshard_every={every}: the weights that generate stay behind on purpose, which does not go "
                f"together with {key}; set it to 1, or remove {key}"
            )
    if not recipe.generates:
        raise ConfigError(f"actor.reshard_every: algorithm={recipe.algorithm} generates nothing; remove the key")


def check_replay(recipe: Recipe) -> None:
    """Refuse settings of sampling where nothing is sampled. Raises ConfigError."""
    rollout = recipe.rollout
    if rollout.replay is None:
        return
    others = {
        "rollout.environment": (rollout.environment, None),
        "rollout.engine.kind": (rollout.engine.kind, "megatron"),
        "rollout.partial_rollouts": (rollout.partial_rollouts, False),
        "trainer.max_staleness": (recipe.trainer.max_staleness, 0),
        "actor.reshard_every": (recipe.actor.reshard_every, 1),
    }
    for key, (found, expected) in others.items():
        if found != expected:
            raise ConfigError(
                f"rollout.replay={rollout.replay}: nothing is sampled to learn from, and {key} says how; remove one of "
                "the two"
            )
    if Path(rollout.replay).absolute() == Path(recipe.run_dir).absolute():
        raise ConfigError(
            f"rollout.replay={rollout.replay}: is this run's own run_dir, whose archive a new start removes; set "
            "run_dir to another directory"
        )


def _check_async(recipe: Recipe, meshes: Mapping[str, DeviceMesh]) -> None:
    staleness = f"trainer.max_staleness={recipe.trainer.max_staleness}"
    _check_ahead(recipe, staleness, off="0")
    if recipe.rollout.engine.is_server:
        raise ConfigError(
            f"{staleness}: the weights of rollout.engine.kind={recipe.rollout.engine.kind} do not follow, so nobody "
            "knows how old they are; set it to 0, or kind to megatron"
        )
    sampling = {name: mesh.ranks for name, mesh in meshes.items() if name in SAMPLING_MESHES}
    for name, mesh in meshes.items():
        for other, ranks in sampling.items():
            common = sorted({*mesh.ranks} & {*ranks})
            if name not in sampling and common:
                section = "actor.rollout_ranks" if other == "actor.rollout" else f"{other}.ranks"
                raise LayoutError(
                    f"{staleness}: ranks {common} are in {name}, which learns, and in {other}, which works on the next "
                    f"batch at the same time; take them out of one, with {mesh.role}.ranks or {section}"
                )


def _check_ahead(recipe: Recipe, asked: str, *, off: str) -> None:
    """Refuse a setting that begins samples before their step, where nobody knows yet which these are."""
    reason = recipe.traits.not_ahead
    if reason is not None:
        raise ConfigError(
            f"{asked}: algorithm={recipe.algorithm} {reason}; set it to {off}, or choose another algorithm"
        )


def may_sample_ahead(recipe: Recipe) -> bool:
    """Return whether ``trainer.max_staleness`` may be above 0 with the right placement."""
    is_own = recipe.rollout.engine.kind == "megatron" and recipe.rollout.replay is None
    is_fresh = recipe.actor.reshard_every == 1
    return is_own and is_fresh and recipe.traits.not_ahead is None


def check_moe(recipe: Recipe) -> None:
    """Refuse settings of experts that the actor's model has not. Raises ConfigError."""
    moe, model = recipe.actor.moe, recipe.model_of("actor")
    given = changed_keys(moe)
    if given and model.num_experts is None:
        raise ConfigError(
            f"actor.moe.{given[0]}={getattr(moe, given[0])!r}: the actor's model has no experts; remove the key"
        )
    if given and model.implementation == "transformers":
        raise ConfigError(
            f"actor.moe.{given[0]}={getattr(moe, given[0])!r}: the actor's model runs in transformers, which routes by "
            "itself; remove the key, or set model.implementation to megatron where its family is one of ours"
        )
    _check_router_replay(recipe)
    if moe.bias_update_rate and not model.router_bias:
        raise ConfigError(
            f"actor.moe.bias_update_rate={moe.bias_update_rate}: the model's routers have no bias; set it to 0, or "
            "train a model with model.router_bias"
        )
    if moe.bias_update_rate and recipe.actor.lora is not None:
        raise ConfigError(
            f"actor.moe.bias_update_rate={moe.bias_update_rate} with actor.lora: adapters leave the model's own "
            "tensors as they are; set it to 0, or remove actor.lora"
        )


def _check_router_replay(recipe: Recipe) -> None:
    """Refuse sources of samples that do not tell which experts were chosen. Raises ConfigError."""
    chosen = recipe.actor.moe.router_replay
    others = {
        f"rollout.engine.kind={recipe.rollout.engine.kind}": recipe.rollout.engine.kind != "megatron",
        "rollout.environment": recipe.rollout.environment is not None,
        "rollout.replay": recipe.rollout.replay is not None,
        f"algorithm={recipe.algorithm}": not recipe.generates,
    }
    for what, is_there in others.items():
        if is_there and chosen != "none":
            raise ConfigError(
                f"actor.moe.router_replay={chosen}: with {what} nobody tells the experts that the rollout chose; set "
                "router_replay to none"
            )


def check_lora(recipe: Recipe) -> None:
    """Refuse settings that do not go with adapters. Raises ConfigError or LayoutError."""
    lora, key = recipe.actor.lora, "actor.lora.targets"
    if lora is None:
        return
    if recipe.traits.is_scorer:
        raise ConfigError(
            f"actor.lora: algorithm={recipe.algorithm} trains a scorer, whose head would be frozen; remove the section"
        )
    found = list(lora.targets)
    counts = {"num_query_groups": recipe.model.query_groups, "global_query_groups": recipe.model.global_query_groups}
    groups, setting = min((count, name) for name, count in counts.items() if count is not None)
    is_ours = recipe.model.implementation == "megatron"
    if not found or len(set(found)) < len(found):
        raise ConfigError(f"{key}={found}: expected at least one layer, and each once")
    if is_ours and (strangers := [each for each in found if each not in MODULES]):
        raise ConfigError(f"{key}: {', '.join(strangers)}: expected some of {', '.join(MODULES)}; name these")
    queries = [each for each in ("q_proj", "k_proj", "v_proj", "qkv_proj") if each in found]
    if recipe.model.kv_lora_rank is not None and queries:
        raise ConfigError(
            f"{key}={found}: latent attention has no {', '.join(queries)}, and its projections to and from compressed "
            "vectors have no adapters here; set it to [o_proj]"
        )
    linear = [each for each in OF_LINEAR_ATTENTION if each in found]
    if is_ours and linear and not recipe.model.linear_layers:
        raise ConfigError(
            f"{key}={found}: {', '.join(linear)} belong to linear attention, which no layer of the model has; remove "
            "them"
        )
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for whole, pieces in parts.items():
        if whole in found and set(pieces) & set(found):
            raise ConfigError(f"{key}={found}: {whole} is {', '.join(pieces)} in one; name the one or the others")
    has_experts = is_ours and recipe.model.num_experts is not None
    if has_experts and {"gate_proj", "up_proj", "gate_up_proj", "down_proj"} & set(found):
        raise ConfigError(
            f"{key}={found}: the experts of a mixture have no adapters here; set it to [q_proj, k_proj, v_proj, o_proj]"
        )
    for name, layout in (("update", recipe.actor.update), ("rollout", recipe.actor.rollout)):
        if layout is not None and layout.tp > groups and {"q_proj", "k_proj", "v_proj"} & set(found):
            raise LayoutError(
                f"actor.{name}: tp={layout.tp} is above model.{setting}={groups}, and q_proj, k_proj, v_proj have no "
                f"adapters where ranks share a group; lower tp, or take them out of {key}"
            )
    if recipe.has_reference and recipe.reference.offload and reference_is_base(recipe, meshes_in_recipe_order(recipe)):
        raise ConfigError(
            "reference.offload=true: the actor without its adapters is the reference, and stays where it is; remove it"
        )
    if lora.path is not None and recipe.warm_start is not None:
        raise ConfigError(
            f"actor.lora.path={lora.path!r}: a warm start ends with its adapters put into the weights, and these with "
            "them; remove warm_start, or the path"
        )
