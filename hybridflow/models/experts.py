"""A mixture of experts in place of the feed-forward block, in every TP×EP×ETP layout, with gradients.

megatron-core's experts, with an exchange of tokens of our own. Its dispatchers need CUDA streams or a global buffer,
and they want the ranks of a tensor-parallel group to hold different tokens (sequence parallelism).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from hybridflow.families.model import ModelConfig
from hybridflow.models.grouped import grouped_experts, is_grouped
from hybridflow.models.router import ExpertRouter

if not hasattr(moe_utils, "te_general_gemm"):
    # Without Transformer Engine megatron-core 0.16.1 leaves this name undefined, and asks whether it is None.
    moe_utils.te_general_gemm = None


class ExpertLayer(BaseMoELayer):
    """Each token goes to its experts, whichever expert-parallel rank has them, and none is dropped.

    Args:
        config: megatron-core's.
        submodules: Submodules of megatron-core's own layer: the experts.
        layer_number: Number of the layer, counted from 1.
        groups: This rank's process groups.
        model: Settings of the model.
        device: Where the weights live.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules,
        layer_number: int,
        groups: ProcessGroupCollection,
        model: ModelConfig,
        device: torch.device,
    ) -> None:
        super().__init__(config, layer_number, groups)
        self.router = ExpertRouter(config, groups, model, device)
        self.experts = build_module(submodules.experts, self.num_local_experts, config, pg_collection=groups)
        if self.use_shared_expert:
            dense = submodules.experts.submodules
            self.shared_experts = SharedExpertMLP(config, dense, gate=False, pg_collection=groups)

    def forward(self, hidden: Tensor, padding_mask: None = None) -> tuple[Tensor, None]:
        """Map ``[tokens, 1, hidden]`` to the same shape. Collective: tp, ep; ranks of ep may differ in tokens."""
        weights, chosen = self.router(hidden)
        # Each tensor-parallel rank computes a slice of every expert, hence a part of these gradients and of the output.
        flat = copy_to_tensor_model_parallel_region(hidden[:, 0], group=self.attn_tp_group)
        weights = copy_to_tensor_model_parallel_region(weights, group=self.attn_tp_group)
        expert, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(expert, torch.arange(self.router.num_experts, device=chosen.device), right=True)
        counts = ends.diff(prepend=ends.new_zeros(1))
        output = self._through_experts(flat[order // self.router.topk], weights.flatten()[order], counts)
        # By token again; all have equally many experts, so that the sum has one order on every device.
        combined = torch.empty_like(output).index_copy(0, order, output).view(len(flat), self.router.topk, -1).sum(1)
        output = reduce_from_tensor_model_parallel_region(combined, group=self.attn_tp_group)[:, None]
        return output if self.shared_experts is None else output + self.shared_experts(hidden), None

    def _through_experts(self, hidden: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """Compute outputs for ``[pairs, hidden]`` of tokens and experts, ordered by expert, ``counts`` per expert."""
        sent = counts.view(-1, self.num_local_experts)
        if len(sent) == 1:
            return self._compute(hidden, counts, weights)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.ep_group)
        # The one question to the device: how much is sent and received.
        rows_out, rows_in = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        hidden = all_to_all(self.ep_group, hidden, rows_in, rows_out)
        weights = all_to_all(self.ep_group, weights, rows_in, rows_out)
        # They come ordered by rank, then expert; the experts want them by expert.
        expert = torch.arange(self.num_local_experts, device=hidden.device).repeat(len(received))
        order = expert.repeat_interleave(received.flatten(), output_size=sum(rows_in)).argsort(stable=True)
        output = self._compute(hidden[order], received.sum(0), weights[order])
        output = torch.empty_like(output).index_copy(0, order, output)
        returned: Tensor = all_to_all(self.ep_group, output, rows_out, rows_in)
        return returned

    def _compute(self, hidden: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        """Compute outputs for ``[pairs, hidden]`` ordered by this rank's experts, ``counts`` per expert."""
        if is_grouped(hidden, self.config):
            first = [expert.linear_fc1.weight for expert in self.experts.local_experts]
            second = [expert.linear_fc2.weight for expert in self.experts.local_experts]
            return grouped_experts(hidden, counts, weights, first, second, self.config.activation_func)
        output: Tensor = self.experts(hidden, counts, weights)[0]
        return output
