"""The meshes of a recipe: which ranks each role has, in which layout. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from hybridflow.config.recipe import CRITICS, REWARDS, Recipe
from hybridflow.config.rewards import RewardConfig
from hybridflow.config.roles import CriticConfig, ReferenceConfig, TeacherConfig
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.reshard.overlap import max_overlap


def role_meshes(recipe: Recipe) -> dict[str, DeviceMesh]:
    """Return the meshes of all models: ``actor.update``, ``actor.rollout``, and those of the recipe's roles.

    The rollout takes the actor's ranks in the order in which they hold most of what it needs.

    Raises:
        LayoutError: A layout does not fill its ranks, or a rank is named twice.
        ReshardError: The layers cannot be dealt to the stages of the actor's layouts.
    """
    meshes = meshes_in_recipe_order(recipe)
    update, rollout = meshes["actor.update"], meshes["actor.rollout"]
    if recipe.actor.rollout_ranks is None:
        meshes["actor.rollout"] = max_overlap(
            update, rollout.layout, rollout.ranks, num_layers=recipe.model.num_layers, name=rollout.name
        )
    return meshes


def meshes_in_recipe_order(recipe: Recipe) -> dict[str, DeviceMesh]:
    """Return the meshes of all roles with their ranks in the recipe's order."""
    actor = recipe.actor
    everyone = tuple(range(recipe.cluster.ranks))
    per_node = recipe.cluster.ranks_per_node
    generating = set(actor.rollout_ranks or ())
    others = tuple(rank for rank in everyone if rank not in generating)
    actor_ranks = others if actor.ranks is None else actor.ranks
    rollout_ranks = actor_ranks if actor.rollout_ranks is None else actor.rollout_ranks
    placed: dict[str, tuple[ParallelLayout, tuple[int, ...]]] = {
        "actor.update": (actor.update, actor_ranks),
        "actor.rollout": (actor.update.for_rollout() if actor.rollout is None else actor.rollout, rollout_ranks),
    }
    for name in CRITICS:
        critic: CriticConfig | None = getattr(recipe, name)
        if critic is not None:
            placed[name] = (critic.layout, others if critic.ranks is None else critic.ranks)
    frozen: dict[str, ReferenceConfig | RewardConfig | TeacherConfig | None] = {
        "reference": recipe.reference if recipe.has_reference else None,
        "reward": recipe.reward if "reward" in recipe.traits.reads else None,
        "cost": recipe.cost,
        "teacher": recipe.teacher,
    }
    for name, section in frozen.items():
        if section is None:
            continue
        if isinstance(section, RewardConfig) and section.model is None:
            # A function: each of its ranks scores on its own.
            ranks = rollout_ranks if section.ranks is None else section.ranks
            placed[name] = (ParallelLayout(dp=max(1, len(ranks))), ranks)
            continue
        layout = actor.update if section.layout is None else section.layout
        placed[name] = (layout, actor_ranks if section.ranks is None else section.ranks)
    node = len(everyone) if per_node is None else per_node
    return {
        name: DeviceMesh(name=name, layout=layout.on_nodes(node), ranks=ranks, ranks_per_node=node)
        for name, (layout, ranks) in placed.items()
    }


def reference_is_base(recipe: Recipe, meshes: Mapping[str, DeviceMesh]) -> bool:
    """Return whether the actor without its adapters serves as the reference.

    It does if they have the same layout, and the reference's weights never change.
    """
    lora = recipe.actor.lora
    is_fixed = lora is not None and lora.merge_every == 0
    return is_fixed and "reference" in meshes and meshes["reference"].key == meshes["actor.update"].key


SAMPLING_MESHES = ("actor.rollout", *REWARDS)
"""Those that work on the next batches, where ``trainer.max_staleness`` is above 0; all others learn."""
