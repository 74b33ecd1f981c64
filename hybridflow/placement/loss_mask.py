"""Samples that are left out of learning, since what scores them failed: one of their scores is NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.dataflow.graph import SCORED


def loss_mask(batch: Batch) -> Tensor:
    """Return whether each sample counts in the loss, ``[samples]``."""
    found = torch.ones(len(batch), dtype=torch.bool)
    for name in SCORED:
        column = batch.columns.get(name)
        if column is not None:
            assert isinstance(column, Tensor), f"{name} is a dense column"
            found &= ~column.isnan()
    return found


def without_dropped(batch: Batch) -> Batch:
    """Zero the response mask of samples that are left out; losses and their denominators follow the mask."""
    found, mask = loss_mask(batch), batch.columns.get("response_mask")
    if mask is None or bool(found.all()):
        return batch
    assert isinstance(mask, Ragged), "response_mask is ragged"
    return batch.with_columns(
        {"response_mask": Ragged(mask.values * found.repeat_interleave(mask.lengths), mask.lengths)}
    )


def spread(part: Batch, batch: Batch, found: Tensor) -> Batch:
    """Spread columns of the samples that count over all samples, with zeros for the others.

    Args:
        part: Those samples, in their order, with columns like ``response_mask``.
        batch: All samples.
        found: Which are which, ``[samples]``.
    """
    mask = batch.columns["response_mask"]
    assert isinstance(mask, Ragged), "response_mask is ragged"
    lengths = mask.lengths
    inside = found.repeat_interleave(lengths)
    columns = {}
    for name, column in part.columns.items():
        assert isinstance(column, Ragged), f"column {name} is dense"
        values = column.values.new_zeros(len(inside))
        values[inside] = column.values
        columns[name] = Ragged(values, lengths)
    return Batch(batch.ids, columns)
