"""The optimizer of models that megatron-core does not train, against one step by hand."""

from __future__ import annotations

import torch

from hybridflow.config.roles import OptimizerConfig
from hybridflow.models.adam import Adam


def test_a_step_after_others_is_that_of_the_formula():
    weight = torch.tensor([[1.0, -2.0]], requires_grad=True)
    adam = Adam({"weight": weight}, OptimizerConfig(lr=0.1, weight_decay=0.5, clip_grad=0.0))
    assert adam._optimizer.defaults["fused"] is True, "else all state is gone over once for each operation"
    adam.set_num_steps(10**6)
    weight.grad = torch.tensor([[3.0, 4.0]])
    adam.take_gradients()
    assert adam.step() == 5.0 and adam.num_steps() == 10**6 + 1
    # The moments are 0.1 g and 0.05 g^2, and after so many steps none is raised: g / 10 over the root of g^2 / 20.
    moved = 0.1 * 0.1 / 0.05**0.5
    expected = torch.tensor([[1.0, -2.0]]) * (1 - 0.1 * 0.5) - moved
    torch.testing.assert_close(weight.detach(), expected)
