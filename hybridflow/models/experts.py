"""A mixture of experts in place of the feed-forward block, in every TP×EP layout, with gradients.

megatron-core's router and experts, with an exchange of tokens of our own. megatron-core 0.16.1 wants the ranks of a
tensor-parallel group to hold different tokens (sequence parallelism); here they hold the same, so that it would count
each token ``tp`` times in the experts' gradients. Its dispatchers need CUDA streams or a global buffer besides.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from hybridflow.models.grouped import grouped_experts, is_grouped

if not hasattr(moe_utils, "te_general_gemm"):
    # Without Transformer Engine megatron-core 0.16.1 leaves this name undefined, and asks whether it is None.
    moe_utils.te_general_gemm = None


class ExpertLayer(BaseMoELayer):
    """Each token goes to its experts, whichever expert-parallel rank has them, and none is dropped.

    Args:
        config: megatron-core's.
        submodules: Submodules of megatron-core's own layer: the router and the experts.
        layer_number: Number of the layer, counted from 1.
        groups: This rank's process groups.

    Attributes:
        sequence_parallel: Whether each tensor-parallel rank has a slice of the tokens.
    """

    sequence_parallel = False

    def __init__(
        self, config: TransformerConfig, submodules: MoESubmodules, layer_number: int, groups: ProcessGroupCollection
    ) -> None:
        super().__init__(config, layer_number, groups)
        self.router = submodules.router(config=config, pg_collection=groups)
        self.experts = build_module(submodules.experts, self.num_local_experts, config, pg_collection=groups)
        if config.add_bias_linear:
            for expert in self.experts.local_experts:
                share_bias(expert.linear_fc2, config.expert_tensor_parallel_size)

    def forward(self, hidden: Tensor, padding_mask: None = None) -> tuple[Tensor, None]:
        """Map ``[tokens, 1, hidden]`` to the same shape. Collective: tp, ep; ranks of ep may differ in tokens."""
        group = self.attn_tp_group
        if self.sequence_parallel:
            # All of them then compute the same with it, so that each has the whole gradient.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=group)
        weights, is_chosen = self.router(hidden)
        # Each tensor-parallel rank computes a slice of every expert, hence a part of these gradients and of the output.
        flat = copy_to_tensor_model_parallel_region(hidden[:, 0], group=group)
        weights = copy_to_tensor_model_parallel_region(weights, group=group)
        expert, token = pairs(is_chosen, self.router.topk)
        output = self._through_experts(flat[token], weights[token, expert], is_chosen.sum(0))
        # By token again; all have equally many experts, so that the sum has one order on every device.
        combined = output[token.argsort(stable=True)].view(len(flat), self.router.topk, -1).sum(1)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(combined, group=group)[:, None], None
        return reduce_from_tensor_model_parallel_region(combined, group=group)[:, None], None

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


def share_bias(linear: nn.Module, num_ranks: int) -> None:
    """Have each of the ranks that cut an expert add its part of the last bias, since their outputs are summed.

    The bias is whole on each, and so is its gradient.
    """
    # megatron-core would sum the gradient over ranks that may hold other experts.
    linear.get_parameter("bias").sequence_parallel = False  # type: ignore[attr-defined]

    def divide(_: nn.Module, __: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        result, bias = output
        # megatron-core adds the bias in place, which autograd refuses for what its group of one gave back as it was.
        return result.clone(), bias / num_ranks + (bias - bias.detach()) * (1 - 1 / num_ranks)

    linear.register_forward_hook(divide)


def pairs(is_chosen: Tensor, num_chosen: int) -> tuple[Tensor, Tensor]:
    """Return expert and token of each pair, by expert, then token, ``[pairs]`` each.

    Args:
        is_chosen: Which token goes to which expert, ``[tokens, experts]``.
        num_chosen: Experts of each token.
    """
    if is_chosen.device.type == "cpu":
        expert, token = is_chosen.T.nonzero(as_tuple=True)
        return expert, token
    # A GPU need not be asked how many there are.
    expert = is_chosen.int().topk(num_chosen, dim=1).indices.flatten()
    order = expert.argsort(stable=True)
    return expert[order], order // num_chosen
