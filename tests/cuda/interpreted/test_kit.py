"""The GPU kit's comparisons with plain torch, in Triton's interpreter: a fault of the kit's own would cost a GPU."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from gpu_checks import kernels, sampler


# Tests of the sampler go through what its check asks for, too.
@pytest.mark.parametrize(("check", "num_figures"), [(kernels, 25), pytest.param(sampler, 3, marks=pytest.mark.long)])
def test_the_kernels_are_as_close_as_the_kit_asks(check, num_figures):
    try:
        found = check.main("", is_dry=True)
    finally:
        dist.destroy_process_group()
    assert found["passed"], found["result"]
    assert len(found["figures"]) >= num_figures and "not run" not in found["result"]
