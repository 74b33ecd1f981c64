"""The reward, or cost, of a model: a scorer's number at the last token of prompt and response, on a mesh of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybridflow.dataflow.batch import Batch
from hybridflow.dataflow.role import Role
from hybridflow.families.assets import CONFIG, parse_json
from hybridflow.families.tables import FAMILIES
from hybridflow.models.microbatch import MicroBatch
from hybridflow.placement.job import Job
from hybridflow.placement.place import place_frozen
from hybridflow.placement.placed_model import role_spec
from hybridflow.placement.pretrained import given_assets
from hybridflow.roles.reward import SCORES
from hybridflow.sampling.equal_samples import keys_of
from hybridflow.sampling.validation import measure, shown_samples, shown_training_samples


class RewardModel(Role):
    """A frozen model that scores responses.

    Its role, ``reward`` or ``cost``, says which section of the recipe it is, and which mesh.

    Attributes:
        model: Its weights; None on a rank outside its mesh.
    """

    call_names = ("score", "score_validation")

    def __init__(self, job: Job, role: str = "reward") -> None:
        super().__init__()
        self.spec = role_spec(job, role, has_value_head=True)
        self._job = job
        self._role = role
        self._most_samples: int | None = getattr(job.recipe, role).batch_size
        self.model = place_frozen(job, role, self.spec, has_value_head=True)
        self._pad_id = None if self.model is None else padding_of(job, role)

    def score(self, batch: Batch, decided: Mapping[str, Any]) -> Batch | None:
        """Compute ``scores``, or ``costs``, of responses to training problems."""
        scores = self._scores(batch)
        # The ranks of a stage all have the replica's scores: one of them speaks for it.
        speaks = self._role == "reward" and self._job.meshes[self._role].speaks(self._job.world.rank)
        if scores is not None and speaks and not self.shown:
            self.shown = shown_training_samples(self._job, batch, scores, decided)
        return None if scores is None else Batch(batch.ids, {SCORES[self._role]: scores})

    def score_validation(self, batch: Batch, decided: Mapping[str, Any]) -> None:
        """Measure ``validation/score``: the mean score of greedy responses to held-out problems; and pass@k.

        Collective: the reward's mesh.
        """
        mesh, scores = self._job.meshes[self._role], self._scores(batch)
        # The ranks of a stage all have the replica's scores: one of them speaks for it.
        ids = batch.ids
        if scores is None or not mesh.speaks(self._job.world.rank):
            ids, scores = ids[:0], torch.zeros(0)
        else:
            self.shown = shown_samples(self._job, batch, scores)
        self.metrics |= measure(self._job, self._job.world.coordinator(mesh.ranks), ids, scores)

    def _scores(self, batch: Batch) -> Tensor | None:
        """Return the score of each sample, ``[samples]`` fp32, or None except on output ranks. Collective: its mesh."""
        assert self.model is not None, "called outside its mesh"
        model = self.model

        def compute(output: Tensor, part: MicroBatch) -> list[tuple[int, float]]:
            return list(zip(part.samples, model.values(output, part).tolist(), strict=True))

        parts = [last_tokens(part, self._pad_id) for part in self._micro_batches(batch)]
        shares = self.model.forward(parts, compute)
        found = dict(pair for share in shares for pair in share) if self.model.is_output_rank else None
        return self._equal_for_equals(batch, None if found is None else [found[index] for index in range(len(batch))])

    def _equal_for_equals(self, batch: Batch, scores: list[float] | None) -> Tensor | None:
        """Return the scores, one for all samples with equal tokens; see ``equal_samples``. Collective: its mesh.

        Else a group of equal responses would have advantages of rounding errors over their own spread, and dynamic
        sampling would keep it.
        """
        mesh, keys = self._job.meshes[self._role], [] if scores is None else keys_of(batch, "tokens")
        own = list(zip(keys, scores, strict=True)) if scores and mesh.speaks(self._job.world.rank) else []
        shares = self._job.world.coordinator(mesh.ranks).gather(own, f"{self._role} of equal samples")
        if scores is None:
            return None
        first: dict[str, float] = {}
        for share in shares:
            for key, score in share:
                first.setdefault(key, score)
        return torch.tensor([first[key] for key in keys], dtype=torch.float32)

    def _micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """Split the batch by the token budget, with at most ``batch_size`` samples in each part."""
        assert self.model is not None, "called outside its mesh"
        most = len(batch) if self._most_samples is None else self._most_samples
        found = []
        for start in range(0, len(batch), max(most, 1)):
            share = batch.select(torch.arange(start, min(start + most, len(batch))))
            for part in self.model.micro_batches(share):
                found.append(replace(part, samples=[start + sample for sample in part.samples]))
        return found


def padding_of(job: Job, role: str) -> int | None:
    """Return the padding token that the settings of a role's model name, or None if they name none."""
    family, assets = given_assets(job, role)
    values = {}
    if CONFIG in assets:
        defaults = FAMILIES[family].defaults if family in FAMILIES else {}
        values = {**defaults, **parse_json(assets[CONFIG], CONFIG)}
    found = values.get("pad_token_id")
    return found if type(found) is int else None


def last_tokens(part: MicroBatch, pad_id: int | None) -> MicroBatch:
    """Return the micro-batch with one row per sample: its last token that is no padding, as in ``transformers``.

    Args:
        part: Some samples.
        pad_id: The model's padding token, which may be the very token that ends a response; None: it has none.
    """
    rows = []
    is_text = None if pad_id is None else (part.all_tokens != pad_id).cpu()
    for places in part.places:
        last = len(places) - 1
        if is_text is not None:
            others = is_text[places].nonzero()
            last = int(others[-1]) if len(others) else 0
        rows.append(int(places[last]))
    return part.with_rows(torch.tensor(rows, dtype=torch.int64))
