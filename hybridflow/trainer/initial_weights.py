"""Weights that models begin with: of a directory, of a program's memory, or of the actor."""

from __future__ import annotations

from hybridflow.placement.job import Job
from hybridflow.placement.model_on_mesh import copy_weights
from hybridflow.placement.peft import load_adapters
from hybridflow.placement.placed_model import part_of
from hybridflow.trainer.roles import Roles


def read_weights(job: Job, roles: Roles) -> None:
    """Fill actor and critics with the weights that the recipe names, or that a program has in memory, if any."""
    actor = roles.actor
    if actor.model is not None and actor.trainable is not None:
        actor.model.load_given()
        load_adapters(job, actor.model)
        actor.trainable.reload_weights()
    for name, critic in roles.critics.items():
        if _has_own_model(job, name) and critic.model is not None and critic.trainable is not None:
            critic.model.load_given()
            critic.trainable.reload_weights()
    reference = roles.reference
    if reference is not None and "reference" in job.objects and reference.model is not None:
        with reference.model.at_hand(is_written=True):
            reference.model.load_given()


def spread_weights(job: Job, roles: Roles) -> None:
    """Copy the actor's weights to the reference, and to critics without a model of their own. Collective: all ranks.

    A reference that a program gave does not begin as the actor.
    """
    actor, reference = roles.actor, roles.reference
    actor.mark_changed()
    source = part_of(job, "actor.update", actor.spec, actor.model)
    if reference is not None and not reference.is_base and "reference" not in job.objects:
        copy_weights(job.world, source, part_of(job, "reference", reference.spec, reference.model))
    for name, critic in roles.critics.items():
        if not _has_own_model(job, name):
            copy_weights(job.world, source, part_of(job, name, critic.spec, critic.model))
            if critic.trainable is not None:
                critic.trainable.reload_weights()


def _has_own_model(job: Job, critic: str) -> bool:
    """Return whether a critic does not begin as the actor."""
    return getattr(job.recipe, critic).model is not None or critic in job.objects
