"""A mixture of experts in place of the feed-forward block, in every TP×EP×ETP layout, with gradients.

megatron-core's experts, with an exchange of tokens of our own: its dispatchers need CUDA streams or a global buffer.

The ranks that share a set of experts (``etp · ep`` of them) bring different tokens, each exchanges with all others.
Where the ranks of a tensor-parallel group have the same tokens, each takes its slice of them. If the group also shares
each expert (``etp = tp``), there is nothing to slice: each rank computes its part for all tokens, and the parts are
summed over the group.
"""

from __future__ import annotations

from functools import partial
from typing import Any

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
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.nn.functional import pad

from hybridflow.families.model import ModelConfig
from hybridflow.models.gated import gated
from hybridflow.models.grouped import grouped_experts, is_grouped
from hybridflow.models.norm import RmsNorm
from hybridflow.models.pairs import collect, in_order, spread
from hybridflow.models.router import ExpertRouter
from hybridflow.models.shapes import EXPERT_NORMS
from hybridflow.parallel.accelerators import adds_weight_gradients

if not hasattr(moe_utils, "te_general_gemm"):
    # Without Transformer Engine megatron-core 0.16.1 leaves this name undefined, and asks whether it is None.
    moe_utils.te_general_gemm = None


class RoutedLayer(TransformerLayer):
    """megatron-core's layer, whose router is told what travels with the attention plan."""

    def forward(self, *args: Any, **known: Any) -> Any:
        """Run the layer. Here, since this is what is called again where activations are computed anew."""
        if not isinstance(self.mlp, ExpertLayer):
            return super().forward(*args, **known)
        self.mlp.router.routing = getattr(known["attention_bias"], "routing", None)
        try:
            return super().forward(*args, **known)
        finally:
            # A rollout on a GPU calls the experts alone, and is told nothing. Recomputation for the backward pass
            # leaves by an exception as soon as it has what it needs.
            self.mlp.router.routing = None


class ExpertLayer(BaseMoELayer):
    """Each token goes to its experts, whichever expert-parallel rank has them, and none is dropped.

    Args:
        config: megatron-core's.
        submodules: Submodules of megatron-core's own layer: the experts.
        layer_number: Number of the layer, counted from 1.
        groups: This rank's process groups.
        model: Settings of the model.
        device: Where the weights live.

    Attributes:
        expert_tp_group: Ranks that have parts of the same experts.
        tp_ep_group: Ranks that share out the experts.
        gathers: Whether each rank gathers all tokens of the group, instead of sending each to the ranks of its experts.
        sequence_parallel: Whether each tensor-parallel rank has a slice of the tokens.
    """

    sequence_parallel = False

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
        self.router = ExpertRouter(config, groups, model, layer_number - 1, device)
        self.experts = build_module(submodules.experts, self.num_local_experts, config, pg_collection=groups)
        if self.use_shared_expert:
            dense = submodules.experts.submodules
            self.shared_experts = SharedExpertMLP(config, dense, gate=model.shared_expert_gate, pg_collection=groups)
        if config.add_bias_linear:
            for expert in self.experts.local_experts:
                share_bias(expert.linear_fc2, config.expert_tensor_parallel_size)
        self.expert_tp_group, self.tp_ep_group = groups.expt_tp, groups.tp_ep
        self._expert_tp = groups.expt_tp.size()
        # A token's experts are on at most so many ranks: sent to all of them, it would travel as far as gathered.
        self.gathers = model.experts_per_token > self.ep_group.size() > 1
        for parameter in self.experts.parameters():
            # megatron-core says so of ep alone: such gradients are summed over replicas of the experts.
            parameter.allreduce = self.ep_group.size() == 1 and self._expert_tp == groups.tp.size()

    @property
    def stacks(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the weights of the experts here: of gate and input, ``[2 * ffn, hidden]``, and of output."""
        return self._of_experts("weight")

    @property
    def biases(self) -> tuple[list[Tensor], list[Tensor]] | None:
        """Return the biases of the experts here, of which the second are whole on each rank; None: there are none."""
        return self._of_experts("bias") if self.config.add_bias_linear else None

    def _of_experts(self, name: str) -> tuple[list[Tensor], list[Tensor]]:
        first = [getattr(each.linear_fc1, name) for each in self.experts.local_experts]
        return first, [getattr(each.linear_fc2, name) for each in self.experts.local_experts]

    @property
    def _shares_tokens(self) -> bool:
        """Return whether the ranks that share each expert have the same tokens."""
        return (
            self.attn_tp_group.size() > 1
            and self._expert_tp == self.attn_tp_group.size()
            and not self.sequence_parallel
        )

    @property
    def _is_sliced(self) -> bool:
        """Return whether each rank takes its slice of tokens that all ranks of its tensor-parallel group have."""
        return self.attn_tp_group.size() > 1 and not self.sequence_parallel and not self._shares_tokens

    @property
    def _group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self.ep_group if self._shares_tokens else self.tp_ep_group
        return group

    @property
    def _num_sharers(self) -> int:
        """Return how many ranks of the group each have a part of the same experts."""
        return 1 if self._shares_tokens else self._expert_tp

    def forward(self, hidden: Tensor, padding_mask: None = None) -> tuple[Tensor, None]:
        """Map ``[tokens, 1, hidden]`` to the same shape. Collective: tp, ep; ranks of ep may differ in tokens."""
        output = self._routed(hidden, *self._route(hidden))
        return output if self.shared_experts is None else output + self.shared_experts(hidden), None

    def _route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and numbers of each token's experts, ``[tokens, experts_per_token]`` each."""
        first = self.attn_tp_group.rank() * len(hidden) if self.sequence_parallel else 0
        found: tuple[Tensor, Tensor] = self.router(hidden, first)
        return found

    def _routed(self, hidden: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the outputs of each token's experts, weighted and summed, ``[tokens, 1, hidden]``."""
        flat, tp = hidden[:, 0], self.attn_tp_group
        if self._shares_tokens:
            # Each tensor-parallel rank has a part of these gradients and of the output.
            flat = copy_to_tensor_model_parallel_region(flat, group=tp)
            weights = copy_to_tensor_model_parallel_region(weights, group=tp)
            output = reduce_from_tensor_model_parallel_region(self._mix(flat, weights, chosen), group=tp)
        elif self._is_sliced:
            output = self._mix(_Slice.apply(flat, tp), _Slice.apply(weights, tp), _own_rows(chosen, tp))
            output = _Join.apply(output, len(flat), tp)
        else:
            output = self._mix(flat, weights, chosen)
        mixed: Tensor = output[:, None]
        return mixed

    def _mix(self, hidden: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the weighted sum of the experts' outputs, ``[tokens, hidden]``; with ``etp = tp`` this rank's part.

        Args:
            hidden: ``[tokens, hidden]``.
            weights: Of each token's experts, ``[tokens, experts_per_token]``.
            chosen: Their numbers, likewise.
        """
        if self.gathers and self._group.size() > 1:
            return self._mix_gathered(hidden, weights, chosen)
        expert, order = chosen.flatten().sort(stable=True)
        counts = _counts(expert, self.router.num_experts)
        if self._group.size() == 1:
            return self._compute(hidden, order, counts, weights)
        pairs = in_order(order, weights.shape)
        return collect(self._through_experts(spread(hidden, pairs), weights.flatten()[order], counts), pairs)

    def _mix_gathered(self, hidden: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Do what ``_mix`` does, where every rank of the group computes its experts' outputs for all tokens."""
        most = torch.tensor(len(hidden), device=hidden.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        room = 0, 0, 0, int(most) - len(hidden)
        rows = gather_from_sequence_parallel_region(pad(hidden, room), group=self._group)
        shares = gather_from_sequence_parallel_region(pad(weights, room), group=self._group)
        experts = gather_from_sequence_parallel_region(pad(chosen, room, value=-1), group=self._group)
        expert, order = (experts - self.local_expert_indices[0]).flatten().sort(stable=True)
        edges = torch.tensor([0, self.num_local_experts], device=expert.device)
        begin, end = torch.searchsorted(expert, edges).tolist()
        expert, order = expert[begin:end], order[begin:end]
        token = order // chosen.shape[1]
        own = torch.arange(len(order), device=order.device)
        counts = _counts(expert, self.num_local_experts)
        output = self._compute(rows[token], own, counts, shares.flatten()[order, None])
        mixed = torch.zeros_like(rows).index_add(0, token, output)
        summed: Tensor = reduce_scatter_to_sequence_parallel_region(mixed, group=self._group)
        return summed[: len(hidden)]

    def _through_experts(self, hidden: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """Compute outputs for ``[pairs, hidden]`` of tokens and experts, ordered by expert, ``counts`` per expert."""
        # To each rank of the group; one after the other come the sharers of the first experts, then of the next.
        sent = counts.view(-1, self.num_local_experts)
        sent = sent.repeat_interleave(self._num_sharers, dim=0, output_size=self._group.size())
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        # The one question to the device: how much is sent and received.
        rows_out, rows_in = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        blocks = rows_out[:: self._num_sharers]
        hidden = all_to_all(self._group, self._for_sharers(hidden, blocks), rows_in, rows_out)
        weights = all_to_all(self._group, self._for_sharers(weights, blocks), rows_in, rows_out)
        # They come ordered by rank, then expert; the experts want them by expert.
        expert = torch.arange(self.num_local_experts, device=hidden.device).repeat(len(received))
        order = expert.repeat_interleave(received.flatten(), output_size=sum(rows_in)).argsort(stable=True)
        output = self._compute(hidden, order, received.sum(0), weights[:, None])
        returned: Tensor = all_to_all(self._group, output, rows_out, rows_in)
        if self._num_sharers == 1:
            return returned
        parts = returned.split([block * self._num_sharers for block in blocks])
        return torch.cat([part.unflatten(0, (self._num_sharers, -1)).sum(0) if len(part) else part for part in parts])

    def _for_sharers(self, rows: Tensor, blocks: list[int]) -> Tensor:
        """Repeat each block of rows for every rank that has a part of its experts."""
        if self._num_sharers == 1:
            return rows
        return torch.cat([block.repeat(self._num_sharers, *[1] * (rows.dim() - 1)) for block in rows.split(blocks)])

    def _compute(self, hidden: Tensor, order: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of this rank's experts for each row, ``[rows, hidden]``.

        Args:
            hidden: ``[rows, hidden]``.
            order: Pairs of a row and one of its experts, by expert, ``[pairs]``.
            counts: Pairs of each expert.
            weights: Of each row's pairs, ``[rows, pairs of a row]``.
        """
        config = self.config
        if is_grouped(hidden, config):
            bounds = {"clamp": config.activation_func_clamp_value, "offset": config.glu_linear_offset}
            gate = partial(gated, activation=config.activation_func, **bounds)
            return grouped_experts(
                *(hidden, order, counts, weights, *self.stacks, gate),
                biases=self.biases,
                num_sharers=self._expert_tp,
                adds_gradients=adds_weight_gradients(self.experts.local_experts[0].linear_fc1),
            )
        pairs = in_order(order, weights.shape)
        return collect(self.experts(spread(hidden, pairs), counts, weights.flatten()[order])[0], pairs)


class NormedExpertLayer(ExpertLayer):
    """Experts and a shared expert with norms of their own, on an input that is not normalized; arguments as above."""

    def __init__(self, config: TransformerConfig, *args: Any) -> None:
        super().__init__(config, *args)
        for name in EXPERT_NORMS:
            self.add_module(name, RmsNorm(config, config.hidden_size, config.layernorm_epsilon))

    def forward(self, hidden: Tensor, padding_mask: None = None) -> tuple[Tensor, None]:
        """Map as ``ExpertLayer.forward`` does."""
        # The router sees what is not normalized yet.
        routed = self._routed(self.routed_input_layernorm(hidden), *self._route(hidden))
        shared = self.shared_experts(self.shared_input_layernorm(hidden))
        return self.shared_output_layernorm(shared) + self.routed_output_layernorm(routed), None


def mixtures(transformer: nn.Module) -> list[ExpertLayer]:
    """Return the layers of experts of a model, or of a chunk of it."""
    return [module for module in transformer.modules() if isinstance(module, ExpertLayer)]


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


def _counts(expert: Tensor, num_experts: int) -> Tensor:
    """Return how often each expert comes in ``[pairs]``, which are in order: ``[experts]``."""
    ends = torch.searchsorted(expert, torch.arange(num_experts, device=expert.device), right=True)
    return ends.diff(prepend=ends.new_zeros(1))


def _own_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's slice of rows that all ranks of a group have; the last slices may be shorter, or empty."""
    width = -(-len(rows) // group.size())
    return rows[group.rank() * width : (group.rank() + 1) * width]


def _joined(rows: Tensor, num_rows: int, group: dist.ProcessGroup) -> Tensor:
    """Return the rows that ``_own_rows`` has sliced."""
    width = -(-num_rows // group.size())
    whole: Tensor = gather_from_sequence_parallel_region(pad(rows, (0, 0, 0, width - len(rows))), group=group)
    return whole[:num_rows]


class _Slice(torch.autograd.Function):
    """This rank's rows of ``[tokens, columns]``; gradients of all are gathered."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.num_rows, ctx.group = len(rows), group
        return _own_rows(rows, group).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _joined(gradients[0], ctx.num_rows, ctx.group), None


class _Join(torch.autograd.Function):
    """The rows of all ranks of a group, ``[tokens, columns]``; all have the same gradient of them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, num_rows: int, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _joined(rows, num_rows, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _own_rows(gradients[0], ctx.group).clone(), None, None
