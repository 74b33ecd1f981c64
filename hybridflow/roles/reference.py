"""The reference: a frozen copy of the actor, which the actor's drift is measured against."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from hybridflow.dataflow.batch import Batch
from hybridflow.dataflow.role import Role
from hybridflow.models.lora import adapters_off
from hybridflow.placement.job import Job
from hybridflow.placement.place import place_model
from hybridflow.placement.placed_model import PlacedModel, role_spec
from hybridflow.recipe.meshes import reference_is_base
from hybridflow.roles.actor import Actor
from hybridflow.roles.offline_samples import mismatched


class Reference(Role):
    """The policy before reinforcement learning: a model of its own, or the actor's without its adapters.

    Attributes:
        model: Its weights; None on a rank outside its mesh.
        is_base: Whether these are the actor's.
        metrics: Always empty; every role has it.
    """

    call_names = ("log_probs", "mismatched_log_probs")

    def __init__(self, job: Job, actor: Actor | None = None) -> None:
        super().__init__()
        self.spec = role_spec(job, "reference")
        self.is_base = reference_is_base(job.recipe, job.meshes)
        self.model: PlacedModel | None = None if actor is None else actor.model
        if self.is_base:
            return
        self.model = place_model(job, job.meshes["reference"], self.spec)
        if self.model is not None and job.recipe.actor.lora is not None:
            # megatron-core multiplies with frozen weights by another function, which rounds otherwise.
            self.model.transformer.requires_grad_(False)
        if self.model is not None and job.recipe.reference.offload is True:
            self.model.keep_in_host_memory()

    def log_probs(self, batch: Batch, decided: Mapping[str, Any]) -> Batch | None:
        """Compute ``ref_log_probs``."""
        model = self.model
        assert model is not None, "called outside the reference's mesh"
        with adapters_off(model.transformer) if self.is_base else contextlib.nullcontext():
            column = model.per_token(batch, lambda output, part: model.log_probs(output, part)[0])
        return None if column is None else Batch(batch.ids, {"ref_log_probs": column})

    def mismatched_log_probs(self, batch: Batch, decided: Mapping[str, Any]) -> Batch | None:
        """Compute ``ref_mismatched_log_probs``: of each prompt with another's completion."""
        column = self.log_probs(mismatched(batch), decided)
        return (
            None if column is None else Batch(batch.ids, {"ref_mismatched_log_probs": column.columns["ref_log_probs"]})
        )
