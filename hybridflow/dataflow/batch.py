"""A rank's share of the samples: dense and ragged columns in host memory. Padding exists only inside a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.errors import DataError


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of unequal length, one after the other.

    Attributes:
        values: ``[total, ...]``, the rows joined, on the CPU.
        lengths: ``[samples]`` int64, the number of values in each row; they sum to ``total``.

    Raises:
        DataError: The lengths do not describe the values, or one of the two is not in host memory.
    """

    values: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        if self.lengths.dtype != torch.int64 or self.lengths.dim() != 1:
            raise DataError(
                f"ragged lengths are {self.lengths.dtype} of shape {list(self.lengths.shape)}; "
                "give int64 of shape [samples]"
            )
        if self.values.device.type != "cpu" or self.lengths.device.type != "cpu":
            raise DataError(
                f"ragged values are on {self.values.device}; columns live in host memory, call .cpu() first"
            )
        total = int(self.lengths.sum())
        if self.values.dim() < 1 or self.values.shape[0] != total or bool((self.lengths < 0).any()):
            raise DataError(
                f"ragged values have shape {list(self.values.shape)} and lengths summing to {total}; "
                "give values [total, ...] and non-negative lengths that sum to total"
            )

    def __len__(self) -> int:
        return self.lengths.shape[0]

    @classmethod
    def from_list(cls, rows: Sequence[Tensor | Sequence[float]], dtype: torch.dtype) -> Ragged:
        """Join rows; ``dtype`` is asked for so that no rows at all still have the right one."""
        tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
        lengths = torch.tensor([len(row) for row in tensors], dtype=torch.int64)
        return cls(torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype), lengths)

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Tensor) -> Ragged:
        """Keep the first ``lengths[i]`` entries of row ``i`` of ``padded`` ``[samples, max, ...]``."""
        return cls(padded[_is_inside(lengths, padded.shape[1])], lengths)

    def to_list(self) -> list[Tensor]:
        """Return the rows, as views."""
        return list(torch.split(self.values, self.lengths.tolist()))

    def pad(self, fill: float) -> Tensor:
        """Pad the rows to ``[samples, max, ...]``, with ``fill`` after the end of each."""
        width = int(self.lengths.max()) if len(self) else 0
        padded = self.values.new_full((len(self), width, *self.values.shape[1:]), fill)
        padded[_is_inside(self.lengths, width)] = self.values
        return padded

    def select(self, index: Tensor) -> Ragged:
        """Return the rows at ``index`` ``[chosen]`` int64, in that order."""
        lengths = self.lengths[index]
        starts = (self.lengths.cumsum(0) - self.lengths)[index]
        ends = lengths.cumsum(0)
        # Position j of the result lies j - (start in the result) behind the start of its row in the values.
        shift = torch.repeat_interleave(starts - (ends - lengths), lengths)
        return Ragged(self.values[torch.arange(shift.shape[0]) + shift], lengths)


Column = Tensor | Ragged
"""Dense ``[samples, ...]`` or ragged."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples and what is known of them.

    Attributes:
        ids: ``[samples]`` int64, distinct: ``prompt_index * group_size + sample index``.
        columns: Name -> dense or ragged column with one row for each id, on the CPU.

    Raises:
        DataError: A column has not one row for each id or is not in host memory, or an id is there twice.
    """

    ids: Tensor
    columns: Mapping[str, Column]

    def __post_init__(self) -> None:
        if self.ids.dtype != torch.int64 or self.ids.dim() != 1:
            raise DataError(
                f"batch ids are {self.ids.dtype} of shape {list(self.ids.shape)}; give int64 of shape [samples]"
            )
        in_order = bool((self.ids[1:] > self.ids[:-1]).all())
        if not in_order and len(self.ids.unique()) != len(self.ids):
            raise DataError(
                f"batch of {len(self.ids)} samples has only {len(self.ids.unique())} distinct ids; "
                "each sample needs its own"
            )
        for name, column in self.columns.items():
            if not isinstance(column, Ragged | Tensor):
                raise DataError(
                    f"column {name!r} is {type(column).__name__}; give a tensor with a row for each of the "
                    f"{len(self.ids)} samples, or Ragged rows"
                )
            rows = len(column) if isinstance(column, Ragged) else column.shape[0] if column.dim() else None
            if rows != len(self.ids):
                raise DataError(
                    f"column {name!r} has {rows} rows for {len(self.ids)} samples; give one row for each id"
                )
            if isinstance(column, Tensor) and column.device.type != "cpu":
                raise DataError(
                    f"column {name!r} is on {column.device}; columns live in host memory, call .cpu() first"
                )

    def __len__(self) -> int:
        return self.ids.shape[0]

    @classmethod
    def empty(cls) -> Batch:
        """Return a batch without samples and columns, for a call that reads nothing."""
        return cls(torch.empty(0, dtype=torch.int64), {})

    @classmethod
    def concat(cls, batches: Sequence[Batch]) -> Batch:
        """Join several batches with the same columns into one, in the given order.

        Args:
            batches: At least one.

        Raises:
            DataError: The columns differ in name or kind, an id is in two of them, or there is no batch at all.
        """
        if not batches:
            raise DataError("concat of no batches; give at least one, an empty share keeps its columns")
        names = list(batches[0].columns)
        for batch in batches:
            if set(batch.columns) != set(names):
                raise DataError(
                    f"concat of batches with columns {sorted(names)} and {sorted(batch.columns)}; give equal columns"
                )
        columns = {name: _join(name, [batch.columns[name] for batch in batches]) for name in names}
        return cls(torch.cat([batch.ids for batch in batches]), columns)

    def dense(self, name: str) -> Tensor:
        """Return the dense column ``name``, ``[samples, ...]``."""
        column = self.columns[name]
        assert isinstance(column, Tensor), f"column {name} is ragged"
        return column

    def ragged(self, name: str) -> Ragged:
        """Return the ragged column ``name``."""
        column = self.columns[name]
        assert isinstance(column, Ragged), f"column {name} is dense"
        return column

    def select(self, index: Tensor) -> Batch:
        """Return the samples at the positions ``index`` ``[chosen]`` int64, in that order, with all columns."""
        columns = {
            name: column.select(index) if isinstance(column, Ragged) else column[index]
            for name, column in self.columns.items()
        }
        return Batch(self.ids[index], columns)

    def with_columns(self, columns: Mapping[str, Column]) -> Batch:
        """Return the same samples with these columns added; one of the same name is replaced."""
        return Batch(self.ids, {**self.columns, **columns})

    def only(self, names: Sequence[str]) -> Batch:
        """Return the same samples with only the columns ``names``."""
        return Batch(self.ids, {name: self.columns[name] for name in names})


def _is_inside(lengths: Tensor, width: int) -> Tensor:
    """Return whether each position is before the end of its row, ``[samples, width]`` bool."""
    return torch.arange(width) < lengths[:, None]


def _join(name: str, columns: Sequence[Column]) -> Column:
    dense = [column for column in columns if isinstance(column, Tensor)]
    ragged = [column for column in columns if isinstance(column, Ragged)]
    if dense and ragged:
        raise DataError(f"concat: column {name!r} is dense in one batch and ragged in another; make it one of the two")
    if dense:
        return torch.cat(dense)
    return Ragged(torch.cat([column.values for column in ragged]), torch.cat([column.lengths for column in ragged]))
