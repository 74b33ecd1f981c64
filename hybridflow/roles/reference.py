"""The reference: a frozen copy of the actor, which the actor's drift is measured against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.dataflow.batch import Batch
from hybridflow.roles.job import Job
from hybridflow.roles.placed import PlacedModel, mismatched, role_spec


class Reference:
    """The policy before reinforcement learning.

    Attributes:
        model: Its weights; None on a rank outside its mesh.
        metrics: Always empty; every role has it.
    """

    def __init__(self, job: Job) -> None:
        self.metrics: dict[str, float] = {}
        self.spec = role_spec(job)
        mesh = job.meshes["reference"]
        self.model = PlacedModel(job, mesh, self.spec) if job.world.rank in mesh else None
        if self.model is not None and job.recipe.reference.offload:
            self.model.keep_in_host_memory()

    def log_probs(self, batch: Batch, decided: Mapping[str, Any]) -> Batch | None:
        """``ref_log_probs``."""
        assert self.model is not None, "called outside the reference's mesh"
        column = self.model.per_token(batch, lambda output, part: self.model.log_probs(output, part)[0])
        return None if column is None else Batch(batch.ids, {"ref_log_probs": column})

    def mismatched_log_probs(self, batch: Batch, decided: Mapping[str, Any]) -> Batch | None:
        """``ref_mismatched_log_probs``, of each prompt with another's completion."""
        column = self.log_probs(mismatched(batch), decided)
        return (
            None if column is None else Batch(batch.ids, {"ref_mismatched_log_probs": column.columns["ref_log_probs"]})
        )
