"""Samples that are left out of learning, since what scores them failed: one of their scores is NaN."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.dataflow.graph import SCORED
from hybridflow.placement.job import Job

TRUNCATED = "is_truncated"
"""The column that is true of responses that were cut, ``[samples]``."""


def loss_mask(batch: Batch) -> Tensor:
    """Return whether each sample counts in the loss, ``[samples]``."""
    found = torch.ones(len(batch), dtype=torch.bool)
    for name in SCORED:
        if name in batch.columns:
            found &= ~batch.dense(name).isnan()
    return found


def mini_batch(job: Job, batch: Batch, turn: Mapping[str, int]) -> Batch:
    """Return this rank's samples of the mini-batch of a turn: an epoch and the index of a mini-batch.

    The mini-batch has places ``[index * size, (index + 1) * size)`` of the global batch. The response mask of samples
    that are left out is 0: losses and their denominators follow the mask. Where the node reads which responses were
    cut, these are left out too.
    """
    number = batch.dense("order") // job.recipe.trainer.samples_per_update
    part = batch.select((number == turn["index"]).nonzero()[:, 0])
    found = loss_mask(part)
    if TRUNCATED in part.columns:
        found &= ~part.dense(TRUNCATED)
    if "response_mask" not in part.columns or bool(found.all()):
        return part
    mask = part.ragged("response_mask")
    return part.with_columns(
        {"response_mask": Ragged(mask.values * found.repeat_interleave(mask.lengths), mask.lengths)}
    )


def is_last_mini_batch(job: Job, turn: Mapping[str, int]) -> bool:
    """Return whether a turn of the loop over mini-batches, its epoch and index, is the last of a step."""
    recipe = job.recipe
    num_mini_batches = recipe.trainer.global_batch_size // recipe.trainer.samples_per_update
    return (turn["epoch"], turn["index"]) == (recipe.loss.epochs - 1, num_mini_batches - 1)


def spread(part: Batch, batch: Batch, found: Tensor) -> Batch:
    """Spread columns of the samples that count over all samples, with zeros for the others.

    Args:
        part: Those samples, in their order, with columns like ``response_mask``.
        batch: All samples.
        found: Which are which, ``[samples]``.
    """
    lengths = batch.ragged("response_mask").lengths
    inside = found.repeat_interleave(lengths)
    columns = {}
    for name in part.columns:
        column = part.ragged(name)
        values = column.values.new_zeros(len(inside))
        values[inside] = column.values
        columns[name] = Ragged(values, lengths)
    return Batch(batch.ids, columns)
