"""RMSNorm where megatron-core's local one does not do: around 1, behind a block, and over heads of several ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from hybridflow.models.shapes import LAYER_SCALAR


class RmsNorm(nn.Module):
    """RMSNorm in fp32, times the weight, or times 1 + weight where the model's norms are zero-centered.

    Args:
        config: Says which of the two the model's norms use.
        hidden_size: Width of what is normalized.
        eps: Added to the mean square.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self._is_around_one, self.eps = config.layernorm_zero_centered_gamma, eps
        self.weight = nn.Parameter(torch.empty(hidden_size))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[…, hidden]`` to the same shape and dtype."""
        if not self._is_around_one:
            return rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        # The sum would lose digits in bf16, and torch's kernel wants one format.
        weight = 1 + self.weight.float()
        return rms_norm(hidden.float(), weight.shape, weight, self.eps).to(hidden.dtype)


class ProjectionNorm(nn.Module):
    """RMSNorm of queries or keys over all heads of a token together, of which a rank may have a part.

    The weight is whole on every rank; megatron-core sums the gradients of ``q_layernorm`` and ``k_layernorm`` over tp.

    Args:
        config: Says whether the model's norms are zero-centered.
        num_heads: Heads of all ranks.
        head: Width of a head.
        group: Tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, num_heads: int, head: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._centre = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self._eps, self._num_heads, self._group = config.layernorm_epsilon, num_heads, group
        self.weight = nn.Parameter(torch.empty(num_heads * head))

    def forward(self, projected: Tensor) -> Tensor:
        """Map ``[tokens, 1, heads, head]``, all heads or this rank's, to the same shape and dtype.

        Collective: tp, where the heads are this rank's alone.
        """
        wide, weight = projected.float(), self.weight.float().view(self._num_heads, -1)
        squares, heads = wide.square().sum((-2, -1), keepdim=True), projected.shape[-2]
        if heads < self._num_heads:
            # Every rank's output depends on the squares of all, so the sum goes over the ranks in both directions.
            squares = reduce_from_tensor_model_parallel_region(squares, group=self._group)
            squares = copy_to_tensor_model_parallel_region(squares, group=self._group)
            first = self._group.rank() * heads
            weight = weight[first : first + heads]
        wide = wide * torch.rsqrt(squares / self.weight.numel() + self._eps)
        return (wide * (self._centre + weight)).to(projected.dtype)


def normalize_output(module: nn.Module, config: TransformerConfig) -> None:
    """Give a module that returns ``(hidden, bias)``, the bias None, a ``post_layernorm`` on what it returns."""
    module.post_layernorm = RmsNorm(config, config.hidden_size, config.layernorm_epsilon)
    module.register_forward_hook(_normalize)


def scale_output(layer: nn.Module, dtype: torch.dtype) -> None:
    """Give a layer that returns ``(hidden, context)`` a ``layer_scalar``, by which its hidden states are multiplied."""
    layer.register_buffer(LAYER_SCALAR, torch.ones(1, dtype=dtype))
    layer.register_forward_hook(_scale)


def _scale(layer: nn.Module, _: tuple[object, ...], output: tuple[Tensor, None]) -> tuple[Tensor, None]:
    hidden, context = output
    return hidden * layer.get_buffer(LAYER_SCALAR), context


def _normalize(module: nn.Module, _: tuple[object, ...], output: tuple[Tensor, None]) -> tuple[Tensor, None]:
    hidden, bias = output
    assert bias is None, "a bias would have to be added before the norm"
    norm = module.post_layernorm
    assert isinstance(norm, RmsNorm), "normalize_output gave the module its norm"
    return norm(hidden), None
