"""The optimizer of models that megatron-core does not train: a fused kernel for each group of parameters."""

from __future__ import annotations

import pytest
import torch

from hybridflow.config.roles import OptimizerConfig
from hybridflow.models.adam import Adam
from tests.cuda.fake.machine import DEVICE, Launches, fake_cuda


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_a_kernel_for_each_group(monkeypatch, dtype):
    with fake_cuda(monkeypatch):
        # Weight decay does not pull biases, which are a group of their own.
        names = [f"{index}.weight" for index in (0, 3, 5)] + [f"{index}.bias" for index in range(6)]
        parameters = {
            name: torch.empty(300, 20 + index, dtype=dtype, device=DEVICE, requires_grad=True)
            for index, name in enumerate(names)
        }
        adam = Adam(parameters, OptimizerConfig(lr=1e-3, weight_decay=0.1))
        with Launches() as launches:
            adam._optimizer.step()
    kernels = {name: count for name, count in launches.names.items() if not name.startswith("_record_function")}
    # The counts of steps are numbers on the device, and are raised together.
    assert kernels == {"_fused_adamw_": 2, "_foreach_add_": 2}
