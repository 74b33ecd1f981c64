"""Host memory of a snapshot: few slabs, hardly larger than what they hold."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hybridflow.checkpoint.training_state import _host_like

# A layer of Qwen2 7B on one of two tensor-parallel ranks, its biases and norms, and half of an embedding.
LAYER = [(2304, 3584), (2304,), (3584, 1792), (18944, 3584), (3584, 9472), (3584,), (3584,)]
OUTER = [(76032, 3584), (76032, 3584), (3584,)]
STAGE = [torch.bfloat16, torch.float32, torch.float32, torch.float32]
"""Weights, two moments and masters."""


@pytest.mark.parametrize("num_layers", [1, 7, 28])
def test_a_snapshot_is_a_few_slabs_of_powers_of_two(num_layers):
    with FakeTensorMode():
        tensors = [torch.empty(shape, dtype=dtype) for dtype in STAGE for shape in [*OUTER, *LAYER * num_layers]]
        copies = _host_like(tensors)
        slabs = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in copies}
        assert [(each.shape, each.dtype) for each in copies] == [(each.shape, each.dtype) for each in tensors]
    num_bytes = sum(each.nbytes for each in tensors)
    assert len(slabs) <= 12 and all(size.bit_count() == 1 for size in slabs.values())
    # Each by itself, rounded up to a power of two, would take 1.4 times as much.
    assert sum(slabs.values()) <= 1.1 * num_bytes


def test_copies_lie_apart():
    tensors = [torch.full(shape, float(index)) for index, shape in enumerate([(3,), (300_000,), (1,), (7, 5), (130,)])]
    copies = [host.copy_(each) for host, each in zip(_host_like(tensors), tensors, strict=True)]
    assert all(torch.equal(*pair) for pair in zip(copies, tensors, strict=True))
    assert len({each.untyped_storage().data_ptr() for each in copies}) == 1
