"""A mixture of experts on the device alone: how many tokens each expert gets is not asked for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from hybridflow.models.experts import ExpertLayer
from hybridflow.models.gated import kernel_gate
from hybridflow.models.shapes import EXPERT_NORMS
from hybridflow.rollout.gpu import ops


class GpuExperts:
    """Computes the routed part of an ``ExpertLayer`` by the experts that this rank has, before the sum over tp.

    The kernels read the experts' weights where they are, by addresses in a table on the device.

    Args:
        layer: The layer.

    Attributes:
        shared: Module of the shared expert, which is the caller's to compute; None: there is none.
        norms: Weights of ``EXPERT_NORMS``, which are the caller's likewise; empty: there are none.
    """

    @staticmethod
    def can_compute(layer: ExpertLayer) -> bool:
        """Return whether the ranks that share out the experts are those of tp, which have the same tokens."""
        same, others = layer.attn_tp_group, layer.tp_ep_group
        return dist.get_process_group_ranks(same) == dist.get_process_group_ranks(others)

    def __init__(self, layer: ExpertLayer) -> None:
        self._router: Tensor = layer.router.weight
        self._router_bias: Tensor | None = layer.router.bias
        self._bias: Tensor | None = layer.router.expert_bias
        self._expert_scale: Tensor | None = getattr(layer.router, "expert_scale", None)
        self._scaled: Callable[[Tensor], Tensor] = layer.router.scaled
        self._num_chosen: int = layer.router.topk
        model = layer.router.model
        self._scale, self._is_normalized = model.routed_scaling, model.normalized_experts
        self._is_softmax: bool = layer.router.is_softmax
        self._groups = model.router_groups or 1, model.router_groups_per_token or 1
        self.shared: Any = layer.shared_experts
        names = EXPERT_NORMS if model.expert_norms else ()
        self.norms: list[Tensor] = [layer.get_parameter(f"{name}.weight") for name in names]
        self._gate = kernel_gate(layer.config)
        self._weights = layer.stacks
        assert all(weight.is_contiguous() for weights in self._weights for weight in weights), "kernels read rows"
        self._biases = layer.biases or ()
        self._first, self._has_all = layer.local_expert_indices[0], layer.ep_group.size() == 1
        # The ranks that cut an expert sum their outputs, so that one of them adds the last bias.
        self._adds_last_bias = layer.expert_tp_group.rank() == 0
        device = self._router.device
        self._found: list[list[int]] = []
        count = len(self._weights) + len(self._biases)
        self._addresses = torch.zeros(count, layer.num_local_experts, dtype=torch.int64, device=device)

    def locate(self) -> None:
        """Write down where the weights are."""
        found = [[each.data_ptr() for each in tensors] for tensors in (*self._weights, *self._biases)]
        if found != self._found:
            places = itertools.chain(*found[: len(self._weights)])
            assert not any(place % 16 for place in places), "kernels read 16 bytes at a time"
            self._found = found
            self._addresses.copy_(torch.tensor(found))

    def __call__(self, normed: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Map ``[tokens, hidden]`` to the same shape; ``hidden`` is what the router sees, if it is something else."""
        num_chosen, (first, second, *biases) = self._num_chosen, self._addresses
        first_bias, last_bias = biases or (None, None)
        chosen = normed.new_empty(len(normed), num_chosen, dtype=torch.int32)
        shares = normed.new_empty(len(normed), num_chosen, dtype=torch.float32)
        how = self._scale, self._is_softmax, self._is_normalized, *self._groups
        ops.route(chosen, shares, self._logits(normed if hidden is None else hidden), self._bias, *how)
        if self._expert_scale is not None:
            shares *= self._expert_scale[chosen]
        order, bounds = (normed.new_empty(each, dtype=torch.int64) for each in (chosen.numel(), len(first) + 1))
        ops.sort_pairs(order, bounds, chosen, self._first)
        pairs = order, bounds, shares
        inner = normed.new_empty(len(order), len(self._weights[0][0]) // 2)
        ops.expert_product(inner, normed, first, *pairs, first_bias, num_chosen, True, *self._gate)
        make = normed.new_empty if self._has_all else normed.new_zeros
        output = make(len(order), normed.shape[1])
        last_bias = last_bias if self._adds_last_bias else None
        ops.expert_product(output, inner, second, *pairs, last_bias, num_chosen, False, *self._gate)
        # All have equally many experts, so that the sum has one order.
        return output.view(len(normed), num_chosen, normed.shape[1]).sum(1)

    def _logits(self, hidden: Tensor) -> Tensor:
        normed = self._scaled(hidden)
        router, bias = self._router, self._router_bias
        if self._is_softmax or normed.dtype == torch.float32:
            return linear(normed, router, bias)
        # As in training, sigmoids are of products in fp32.
        logits = torch.mm(normed, router.t(), out_dtype=torch.float32)
        return logits if bias is None else logits + bias
