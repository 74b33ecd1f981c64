"""RMSNorm where megatron-core's local one does not do: around 1, and behind attention and feed-forward block."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class RmsNorm(nn.Module):
    """RMSNorm in fp32, times the weight, or times 1 + weight where the model's norms are zero-centered.

    Args:
        config: Says which of the two the model's norms use.
        hidden_size: Width of what is normalized.
        eps: Added to the mean square.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self._centre = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self._eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[…, hidden]`` to the same shape and dtype."""
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return (wide * (self._centre + self.weight.float())).to(hidden.dtype)


def normalize_output(module: nn.Module, config: TransformerConfig) -> None:
    """Give a module that returns ``(hidden, bias)``, the bias None, a ``post_layernorm`` on what it returns."""
    module.post_layernorm = RmsNorm(config, config.hidden_size, config.layernorm_epsilon)
    module.register_forward_hook(_normalize)


def _normalize(module: nn.Module, _: tuple[object, ...], output: tuple[Tensor, None]) -> tuple[Tensor, None]:
    hidden, bias = output
    assert bias is None, "a bias would have to be added before the norm"
    norm = module.post_layernorm
    assert isinstance(norm, RmsNorm), "normalize_output gave the module its norm"
    return norm(hidden), None
