"""The gate between the two products of a feed-forward block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import gelu, silu


def gelu_tanh(gate: Tensor) -> Tensor:
    """Return GELU by its approximation with tanh."""
    return gelu(gate, approximate="tanh")


def quick_gelu(gate: Tensor) -> Tensor:
    """Return GELU by its approximation with a sigmoid."""
    return gate * torch.sigmoid(1.702 * gate)


_KINDS: dict[object, int] = {silu: 0, gelu_tanh: 1, quick_gelu: 2}
"""The activations that the GPU's kernel knows."""


def kernel_gate(config: TransformerConfig) -> tuple[int, float, float]:
    """Return activation, clamp and offset of a model's gates, as the GPU's kernels take them."""
    kind = _KINDS[config.activation_func]
    return kind, config.activation_func_clamp_value or 0.0, config.glu_linear_offset


def gated(
    mixed: Tensor, activation: Callable[[Tensor], Tensor], clamp: float | None = None, offset: float = 0.0
) -> Tensor:
    """Multiply the activated gate with the other half, on a GPU in one launch.

    Args:
        mixed: Gate, and other half behind it, ``[..., 2 * inner]``.
        activation: Of the gate.
        clamp: Bound of the gate from above, and of the other half both ways; None: none.
        offset: Added to the other half.

    Returns:
        ``[..., inner]``.
    """
    if mixed.is_cuda and activation in _KINDS:
        from hybridflow.models import layer_kernels

        found: Tensor = layer_kernels.gated(mixed, _KINDS[activation], clamp or 0.0, offset)
        return found
    product: Tensor = _Gated.apply(mixed, activation, clamp, offset)
    return product


class _Gated(torch.autograd.Function):
    """The product by operators of torch. It keeps its input alone: the backward pass activates the gate again."""

    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, activation: Callable[[Tensor], Tensor], clamp: float | None, offset: float
    ) -> Tensor:
        ctx.save_for_backward(mixed)
        ctx.activation, ctx.clamp, ctx.offset = activation, clamp, offset
        gate, other = mixed.chunk(2, dim=-1)
        return activation(_bounded(gate, None, clamp)) * _shifted(other, clamp, offset)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        mixed = ctx.saved_tensors[0].detach()
        gate, other = mixed.chunk(2, dim=-1)
        result = torch.empty_like(mixed)
        of_gate, of_other = result.chunk(2, dim=-1)
        with torch.enable_grad():
            gate = gate.requires_grad_()
            active = ctx.activation(_bounded(gate, None, ctx.clamp))
        torch.mul(grads[0], active.detach(), out=of_other)
        if ctx.clamp is not None:
            of_other.masked_fill_(other.abs() > ctx.clamp, 0)
        of_gate.copy_(torch.autograd.grad(active, gate, grads[0] * _shifted(other, ctx.clamp, ctx.offset))[0])
        return result, None, None, None


def _bounded(values: Tensor, least: float | None, most: float | None) -> Tensor:
    return values if most is None else values.clamp(least, most)


def _shifted(other: Tensor, clamp: float | None, offset: float) -> Tensor:
    bounded = _bounded(other, None if clamp is None else -clamp, clamp)
    return bounded + offset if offset else bounded


class GatedMLP(MLP):
    """megatron-core's feed-forward block, whose gate takes one launch on a GPU, and nothing needless on a CPU."""

    def forward(self, hidden_states: Tensor, per_token_scale: None = None, **kwargs: Any) -> Any:
        """Map ``[tokens, 1, hidden]`` to the same shape, and a bias."""
        config = self.config
        is_other = config.add_bias_linear or config.activation_func_clamp_value is not None or config.glu_linear_offset
        if is_other or per_token_scale is not None:
            return super().forward(hidden_states, per_token_scale, **kwargs)
        mixed, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(gated(mixed, config.activation_func))
