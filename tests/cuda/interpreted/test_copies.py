"""The kernel that carries out many copies at once, beside torch's copies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridflow.reshard import copy_kernel
from hybridflow.reshard.views import _WideGroup

WIDE = torch.complex128


def box(tensor: Tensor, *slices: tuple[int, int]) -> Tensor:
    return tensor[tuple(slice(*each) for each in slices)]


def numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-(2**62), 2**62, (*shape, 2), generator=generator).view(WIDE).squeeze(-1)


VIEWS = {
    "a run": (box(numbers(3, 400), (1, 3)), box(numbers(5, 400), (2, 4))),
    "a short run": (box(numbers(9), (4, 7)), box(numbers(5), (0, 3))),
    "one element": (box(numbers(9), (4, 5)), box(numbers(5), (1, 2))),
    "columns": (box(numbers(70, 40), (1, 69), (3, 16)), box(numbers(68, 13))),
    "wide columns": (box(numbers(40, 700), (1, 40), (100, 650)), box(numbers(39, 1100), (0, 39), (550, 1100))),
    "rows of one element": (box(numbers(50, 3), (0, 50), (1, 2)), box(numbers(50, 2), (0, 50), (0, 1))),
    "parts of heads": (box(numbers(4, 6, 10), (0, 4), (1, 4), (2, 9)), box(numbers(4, 3, 7))),
    "parts of experts": (box(numbers(4, 5, 6, 10), (0, 2), (1, 3), (0, 6)), box(numbers(3, 2, 6, 10), (1, 3))),
    "a dim of one": (box(numbers(5, 1, 8), (0, 5), (0, 1), (2, 6)), box(numbers(5, 3, 4), (0, 5), (1, 2))),
}


@pytest.mark.parametrize("names", [[name] for name in VIEWS] + [list(VIEWS)], ids=lambda names: ", ".join(names)[:30])
def test_all_is_copied_and_nothing_else_is_written(names):
    to, out_of = ([_in_own_memory(VIEWS[name][side]) for name in names] for side in (0, 1))
    wanted = [_in_own_memory(each) for each in to]
    for mine, theirs in zip(wanted, out_of, strict=True):
        mine.copy_(theirs)
    for columns, table in copy_kernel.tables(to, out_of).items():
        copy_kernel.carry(table, columns)
    for found, expected in zip(to, wanted, strict=True):
        assert torch.equal(_whole(found), _whole(expected))


def test_a_large_run_is_for_few_programs():
    """Which take 64 KiB each."""
    ((_, table),) = copy_kernel.tables([torch.empty(2**20, dtype=WIDE)], [torch.empty(2**20, dtype=WIDE)]).items()
    assert len(table) == 256


def test_what_was_released_and_restored_is_found_where_it_is():
    to, out_of = torch.zeros(3, 40, dtype=WIDE), numbers(3, 40)
    group = _WideGroup([to], [out_of])
    group.carry_out()
    assert torch.equal(_whole(to), _whole(out_of))
    size, old = to.untyped_storage().nbytes(), to.data_ptr()
    # What comes first is given the memory that was released.
    to.untyped_storage().resize_(0)
    others = [torch.zeros(3, 40, dtype=WIDE) for _ in range(4)]
    to.untyped_storage().resize_(size)
    assert to.data_ptr() != old
    to.zero_()
    group.carry_out()
    assert torch.equal(_whole(to), _whole(out_of)) and not any(other.real.any() for other in others)


def _in_own_memory(view: Tensor) -> Tensor:
    """Return the same view of a copy of all that it is a part of."""
    memory = torch.empty(0, dtype=WIDE).set_(view.untyped_storage().clone())
    return memory.as_strided(view.shape, view.stride(), view.storage_offset())


def _whole(view: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.int64).set_(view.untyped_storage())
