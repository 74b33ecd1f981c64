"""The teacher: a frozen language model whose distribution on-policy distillation learns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.dataflow.role import Role
from hybridflow.errors import ConfigError
from hybridflow.models.distillation import top_log_probs
from hybridflow.models.microbatch import MicroBatch
from hybridflow.placement.job import Job
from hybridflow.placement.place import place_frozen
from hybridflow.placement.placed_model import role_spec


class Teacher(Role):
    """What the actor learns from, token by token, on the actor's own responses.

    Attributes:
        model: Its weights; None on a rank outside its mesh.
        metrics: Always empty; every role has it.

    Raises:
        ConfigError: ``teacher.top_k`` leaves no token beside the likeliest.
    """

    call_names = ("top",)

    def __init__(self, job: Job) -> None:
        settings = job.recipe.teacher
        assert settings is not None, "no teacher in the recipe"
        if settings.top_k >= job.vocab_size:
            raise ConfigError(
                f"teacher.top_k={settings.top_k}: the vocabulary has {job.vocab_size} tokens; choose less, or 0 for "
                "the whole"
            )
        super().__init__()
        self.spec = role_spec(job, "teacher")
        self._top_k = settings.top_k
        self.model = place_frozen(job, "teacher", self.spec)

    def top(self, batch: Batch, decided: Mapping[str, Any]) -> Batch | None:
        """Compute ``teacher_log_probs``, and ``teacher_ids`` unless the whole vocabulary is asked for."""
        assert self.model is not None, "called outside the teacher's mesh"
        model = self.model
        how = {"group": model.groups.tp, "vocab_size": model.vocab_size, "temperature": model.temperature}

        def top(output: Tensor, part: MicroBatch) -> tuple[Tensor, ...]:
            local = top_log_probs(output, self._top_k, **how)
            if part.dealt is None:
                return local
            return tuple(part.gathered(each.to(output.device)) for each in local)

        found = model.rows_per_token(batch, top)
        if found is None:
            return None
        columns = {"teacher_log_probs": Ragged.from_list([row[0] for row in found], torch.float32)}
        if self._top_k:
            columns["teacher_ids"] = Ragged.from_list([row[1] for row in found], torch.int64)
        return Batch(batch.ids, columns)
