"""Sequence parallelism: between the tensor-parallel matrices each tensor-parallel rank has some of the tokens.

Paper: arXiv 2205.05198. It can be switched for each forward pass, since one model may be trained and decode.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor, nn

from hybridflow.models.experts import ExpertLayer

_NORMS = ("layernorm.weight", "layer_norm_weight")
_ADDED_LAST = ("linear_proj.bias", "linear_fc2.bias")
_SHARED_GATE = ".shared_experts.gate_weight"
_HEAD_NORMS = ("q_layernorm", "k_layernorm")


class _GatheredTokens:
    """Memory for the gathered input of a product, which ends with it."""

    def get_tensor(self, shape: Sequence[int], dtype: torch.dtype, name: str) -> Tensor:
        """Return memory of undefined values, as megatron-core's buffer does."""
        return torch.empty(tuple(shape), dtype=dtype, device=torch.cuda.current_device())


# megatron-core 0.16.1 has the buffer among its globals, which are never set.
layers.get_global_memory_buffer = _GatheredTokens


class SequenceSwitch:
    """Switches a stage's layers between all tokens on every tensor-parallel rank and a slice of the tokens on each.

    Args:
        transformer: The stage, without sequence parallelism, which is how it begins.
    """

    def __init__(self, transformer: GPTModel) -> None:
        self._is_on = False
        self._embedding = getattr(transformer, "embedding", None)
        mixtures = [name for name, module in transformer.named_modules() if isinstance(module, ExpertLayer)]
        # Experts have tokens of other ranks, whole ones.
        experts = tuple(f"{name}.experts." for name in mixtures)
        self._modules = [
            module
            for name, module in transformer.decoder.named_modules(prefix="decoder")
            if hasattr(module, "sequence_parallel") and not name.startswith(experts)
        ]
        for name, parameter in transformer.decoder.named_parameters(prefix="decoder"):
            # A bias behind the sum over the ranks is added to each rank's own tokens; those of experts come before it.
            if name.endswith(_ADDED_LAST) and not name.startswith(tuple(experts)):
                parameter.sequence_parallel = True
            if name.endswith(_NORMS) and not any(norm in name for norm in _HEAD_NORMS):
                # Of norms of heads megatron-core sums the gradients anyway.
                parameter.sequence_parallel = True
            if ".mlp.router." in name or name.endswith(_SHARED_GATE):
                parameter.sequence_parallel = True

    def turn(self, is_on: bool) -> None:
        """Make the next forward pass one of all tokens, or of slices."""
        if is_on == self._is_on:
            return
        self._is_on = is_on
        for module in self._modules:
            _turn(module, is_on)
        if self._embedding is not None:
            self._embedding.reduce_scatter_embeddings = is_on
            self._embedding.word_embeddings.reduce_scatter_embeddings = is_on


def _turn(module: nn.Module, is_on: bool) -> None:
    module.sequence_parallel = is_on  # type: ignore[assignment]
    if isinstance(module, ColumnParallelLinear):
        # With slices the gradient of the input is scattered as it is summed.
        module.allreduce_dgrad = not is_on
