"""The reward of a model: a scorer's number at the last token of prompt and response, on a mesh of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.checkpoint.assets import parse_json
from hybridflow.checkpoint.formats.registry import open_source
from hybridflow.dataflow.batch import Batch
from hybridflow.families.tables import FAMILIES
from hybridflow.models.microbatch import MicroBatch
from hybridflow.models.training import forward_only
from hybridflow.roles.job import Job
from hybridflow.roles.placed import PlacedModel, role_spec


class RewardModel:
    """A frozen model that scores responses.

    Attributes:
        model: Its weights; None on a rank outside its mesh.
        metrics: What the last calls measured, over the global batch; emptied by the trainer each step.
    """

    def __init__(self, job: Job) -> None:
        self.metrics: dict[str, float] = {}
        self.spec = role_spec(job, "reward", has_value_head=True)
        self._job = job
        mesh = job.meshes["reward"]
        self.model = PlacedModel(job, mesh, self.spec, has_value_head=True) if job.world.rank in mesh else None
        self._pad_id: int | None = None
        if self.model is not None:
            # It never changes, so no checkpoint has it.
            self.model.load()
            self._pad_id = _pad_id(Path(job.model_of("reward").path))

    def score(self, batch: Batch, decided: Mapping[str, Any]) -> Batch | None:
        """``scores`` of responses to training problems."""
        scores = self._scores(batch)
        return None if scores is None else Batch(batch.ids, {"scores": scores})

    def judge(self, batch: Batch, decided: Mapping[str, Any]) -> None:
        """Measure ``validation/accuracy``: the mean score of responses to held-out problems.

        Collective: the reward's mesh.
        """
        mesh, scores = self._job.meshes["reward"], self._scores(batch)
        # The ranks of a stage all have the replica's scores: one of them speaks for it.
        share = [0.0, 0]
        if scores is not None and mesh.coordinate(self._job.world.rank).tp == 0:
            share = [float(scores.double().sum()), len(scores)]
        shares = self._job.world.coordinator(mesh.ranks).gather(share, "validation")
        self.metrics["validation/accuracy"] = sum(total for total, _ in shares) / sum(count for _, count in shares)

    def _scores(self, batch: Batch) -> Tensor | None:
        """The score of each sample, ``[samples]`` fp32; None but on holders. Collective: tp, pp."""
        assert self.model is not None, "called outside the reward's mesh"

        def compute(output: Tensor, part: MicroBatch) -> list[tuple[int, float]]:
            return list(zip(part.samples, output[:, 0].float().tolist(), strict=True))

        parts = [last_tokens(part, self._pad_id) for part in self.model.micro_batches(batch)]
        shares = forward_only(self.model.transformer, self.model.groups, parts, compute)
        if not self.model.is_holder:
            return None
        found = dict(pair for share in shares for pair in share)
        return torch.tensor([found[index] for index in range(len(batch))], dtype=torch.float32)


def _pad_id(path: Path) -> int | None:
    """The padding token that the model's own settings name."""
    source = open_source(path)
    config, values = source.assets().get("config.json"), {}
    if config is not None:
        defaults = {} if source.family is None else FAMILIES[source.family].defaults
        values = {**defaults, **parse_json(config, str(path / "config.json"))}
    found = values.get("pad_token_id")
    return found if type(found) is int else None


def last_tokens(part: MicroBatch, pad_id: int | None) -> MicroBatch:
    """The micro-batch with one row for each sample, its last token that is no padding, as ``transformers`` has it.

    Args:
        part: Some samples.
        pad_id: The model's padding token, which may be the very token that ends a response; None: it has none.
    """
    rows = []
    for places in part.places:
        last = len(places) - 1
        if pad_id is not None:
            others = (part.tokens[places] != pad_id).nonzero()
            last = int(others[-1]) if len(others) else 0
        rows.append(int(places[last]))
    return replace(part, rows=torch.tensor(rows, dtype=torch.int64, device=part.tokens.device))
