"""A role's model on a mesh: which of the kinds it is."""

from __future__ import annotations

from hybridflow.layout.mesh import DeviceMesh
from hybridflow.placement.fsdp_model import FsdpModel, FsdpUserModel
from hybridflow.placement.job import Job
from hybridflow.placement.placed_model import PlacedModel
from hybridflow.placement.user_model import UserModel
from hybridflow.placement.user_objects import user_class_of
from hybridflow.reshard.spec import ModelSpec


def place_model(
    job: Job, mesh: DeviceMesh, spec: ModelSpec, *, has_value_head: bool = False, is_filled_later: bool = False
) -> PlacedModel | None:
    """Place this rank's part of a role's model, see ``PlacedModel``: a user's own module where one was given.

    None: this rank is not in the mesh.

    Args:
        job: The job.
        mesh: One of the role's meshes.
        spec: From ``placed_model.role_spec``.
        has_value_head: Values instead of logits.
        is_filled_later: Its weights are written before it is used.
    """
    if job.world.rank not in mesh:
        return None
    is_module, is_sharded = user_class_of(job, mesh.role) is not None, mesh.layout.fsdp > 1
    kind: type[PlacedModel] = FsdpModel if is_sharded else PlacedModel
    if is_module:
        kind = FsdpUserModel if is_sharded else UserModel
    return kind(job, mesh, spec, has_value_head=has_value_head, is_filled_later=is_filled_later)


def place_frozen(job: Job, role: str, spec: ModelSpec, *, has_value_head: bool = False) -> PlacedModel | None:
    """Place this rank's part of a frozen model, which no checkpoint holds; None: this rank has no part.

    It is loaded, and kept in host memory where the recipe says so.

    Args:
        job: The job.
        role: Which section of the recipe it is, and which mesh.
        spec: From ``placed_model.role_spec``.
        has_value_head: Values instead of logits.

    Raises:
        ConfigError: What was given is not what the recipe asks for.
    """
    model = place_model(job, job.meshes[role], spec, has_value_head=has_value_head)
    if model is not None:
        model.load_given()
        if getattr(job.recipe, role).offload is True:
            model.keep_in_host_memory()
    return model
