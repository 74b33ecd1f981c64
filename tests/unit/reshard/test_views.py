"""Which views of a rank's memory travel as they lie, without being packed."""

import numpy as np
import torch

from hybridflow.reshard.views import as_one_run


def test_views_that_lie_one_behind_the_other_are_one_run():
    flat = torch.arange(24, dtype=torch.float32)
    views = [flat[4:8].view(2, 2), flat[8:10], flat[10:11]]
    run = as_one_run(views, [torch.float32] * 3)
    assert run is not None and run.dtype == torch.uint8
    assert run.view(torch.float32).tolist() == [4, 5, 6, 7, 8, 9, 10]
    assert as_one_run([flat[20:22], flat[22:24]], [torch.float32] * 2) is not None, "the end of the storage"
    # It is their memory.
    run.view(torch.float32).zero_()
    assert flat.nonzero()[:, 0].tolist() == [1, 2, 3, *range(11, 24)]


def test_views_with_gaps_or_of_other_dtypes_or_storages_are_none():
    flat = torch.arange(24, dtype=torch.float32)
    fp32, bf16 = torch.float32, torch.bfloat16
    for views, dtypes in (
        ([flat[4:8], flat[9:10]], [fp32, fp32]),
        ([flat[8:10], flat[4:8]], [fp32, fp32]),
        ([flat[4:8], flat[4:8]], [fp32, fp32]),
        ([flat[4:8], flat[8:10]], [fp32, bf16]),
        ([flat.view(4, 6)[:, :3]], [fp32]),
    ):
        assert as_one_run(views, dtypes) is None
    # Neighbors in memory, of which neither storage has the other.
    memory = np.arange(8, dtype=np.float32)
    one, other = torch.from_numpy(memory[:4]), torch.from_numpy(memory[4:])
    assert one.untyped_storage().nbytes() == 16 and other.data_ptr() - one.data_ptr() == 16
    assert as_one_run([one, other], [fp32, fp32]) is None
