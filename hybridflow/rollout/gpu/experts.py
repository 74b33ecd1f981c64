"""A mixture of experts on the device alone: how many tokens each expert gets is not asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from hybridflow.models.experts import ExpertLayer
from hybridflow.rollout.gpu import ops


class GpuExperts:
    """Computes the routed part of an ``ExpertLayer`` whose experts are all here, before the sum over tp.

    The kernels read the experts' weights where they are, by addresses in a table on the device.

    Args:
        layer: The layer.
        is_gelu: Whether the gate is activated by GELU, approximated with tanh; else by SiLU.

    Attributes:
        shared: Module of the shared expert, which is the caller's to compute; None: there is none.
    """

    @staticmethod
    def can_compute(layer: ExpertLayer) -> bool:
        """Return whether the kernels know the layer: all experts are here, cut as all else, and have no groups."""
        config = layer.config
        is_cut_alike = config.expert_tensor_parallel_size == config.tensor_model_parallel_size
        is_here = config.expert_model_parallel_size == 1 and is_cut_alike
        return is_here and not layer.router.has_groups

    def __init__(self, layer: ExpertLayer, *, is_gelu: bool) -> None:
        self._router: Tensor = layer.router.weight
        self._bias: Tensor | None = layer.router.expert_bias
        self._num_chosen: int = layer.router.topk
        model = layer.router.model
        self._scale, self._is_normalized = model.routed_scaling, model.normalized_experts
        self._is_softmax: bool = layer.router.is_softmax
        self.shared: Any = layer.shared_experts
        self._is_gelu = is_gelu
        self._weights = layer.stacks
        assert all(weight.is_contiguous() for weights in self._weights for weight in weights), "kernels read rows"
        device = self._router.device
        self._found: list[list[int]] = []
        self._addresses = torch.zeros(2, layer.num_local_experts, dtype=torch.int64, device=device)

    def locate(self) -> None:
        """Write down where the weights are."""
        found = [[weight.data_ptr() for weight in weights] for weights in self._weights]
        if found != self._found:
            assert not any(place % 16 for places in found for place in places), "kernels read 16 bytes at a time"
            self._found = found
            self._addresses.copy_(torch.tensor(found))

    def __call__(self, normed: Tensor) -> Tensor:
        """Map ``[tokens, hidden]`` to the same shape."""
        num_chosen, (first, second) = self._num_chosen, self._addresses
        chosen = normed.new_empty(len(normed), num_chosen, dtype=torch.int32)
        shares = normed.new_empty(len(normed), num_chosen, dtype=torch.float32)
        # As in training, sigmoids are of products in fp32.
        logits = linear(normed, self._router) if self._is_softmax else linear(normed.float(), self._router.float())
        ops.route(chosen, shares, logits, self._bias, self._scale, self._is_softmax, self._is_normalized)
        order, bounds = (normed.new_empty(each, dtype=torch.int64) for each in (chosen.numel(), len(first) + 1))
        ops.sort_pairs(order, bounds, chosen)
        inner = normed.new_empty(len(order), len(self._weights[0][0]) // 2)
        ops.expert_product(inner, normed, first, order, bounds, shares, num_chosen, self._is_gelu)
        output = normed.new_empty(len(order), normed.shape[1])
        ops.expert_product(output, inner, second, order, bounds, None, num_chosen, False)
        # All have equally many experts, so that the sum has one order.
        return output.view(len(normed), num_chosen, normed.shape[1]).sum(1)
