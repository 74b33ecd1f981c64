"""What routers of a mixture are told of a micro-batch, and what they tell of it: losses, loads, choices.

A routing travels with the attention plan, so that activations that are computed anew find their own micro-batch's. All
sums are over the samples of a micro-batch, each with all of its tokens, so that they depend neither on the layout nor
on which samples share a micro-batch, or a prompt in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.models.microbatch import MicroBatch
from hybridflow.parallel.copies import to_device

NUM_SUMS = 4
"""Numbers of each layer beside its loads, see ``PackedRouting.told``."""


def choice_dtype(num_experts: int) -> torch.dtype:
    """Return the number format of experts' numbers in a column; its largest number stands for an unknown choice."""
    return torch.uint8 if num_experts < torch.iinfo(torch.uint8).max else torch.int16


def unknown_choice(dtype: torch.dtype) -> int:
    """Return what stands for a choice that nobody knows."""
    return torch.iinfo(dtype).max


class Routing(Protocol):
    """What the routers of a stage are told of a micro-batch."""

    def settle(self, layer: int, chosen: Tensor, first: int) -> Tensor:
        """Return the experts to take instead of those that the router has chosen.

        Args:
            layer: Index of the layer in the whole model.
            chosen: Numbers of experts in ascending order, ``[tokens, experts_per_token]`` int64.
            first: Which token of the micro-batch is the first.
        """

    def observe(
        self, layer: int, logits: Tensor, scores: Tensor, chosen: Tensor, weights: Tensor, first: int
    ) -> Tensor:
        """Take note of a layer's routing; return the weights, through which losses of the router get their gradient.

        Args:
            layer: As for ``settle``.
            logits: ``[tokens, experts]``.
            scores: Shares of the experts, which add up to 1, likewise.
            chosen: As for ``settle``.
            weights: Weights of the chosen ones, ``[tokens, experts_per_token]``.
            first: As for ``settle``.
        """


class PackedRouting:
    """Routing of a micro-batch in training.

    The auxiliary loss of a sample is ``E / k * sum(f * p)``: of E experts the share ``f`` of the sample's choices, of
    which each token has k, and the mean score ``p``. It is 1 where all experts are chosen alike. The z-loss of a token
    is ``logsumexp(logits) ** 2``.

    Args:
        micro_batch: The micro-batch.
        choices: Experts that the rollout chose, ``[tokens, layers, experts_per_token]``; None: it told none.
        is_replayed: Whether these are taken; else they are compared.
        group: Ranks that have parts of each sample, and sum over them; None: this rank has all.

    Attributes:
        weights: Weights in the loss of the sum of the samples' auxiliary losses, and of the tokens' z-losses.

    Paper: sequence-wise balance loss of DeepSeek-V3, arXiv 2412.19437, after Switch Transformers, arXiv 2101.03961;
    z-loss of ST-MoE, arXiv 2202.08906; router replay, arXiv 2510.11370.
    """

    def __init__(
        self,
        micro_batch: MicroBatch,
        *,
        choices: Tensor | None = None,
        is_replayed: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        device = micro_batch.tokens.device
        lengths = torch.tensor(micro_batch.lengths, dtype=torch.int64)
        none = torch.empty(0, dtype=torch.int64)
        self._places = to_device(micro_batch.places_here(torch.cat([none, *micro_batch.places])), device)
        self._samples = to_device(torch.repeat_interleave(torch.arange(len(lengths)), lengths), device)
        self._lengths = to_device(lengths, device)
        self.weights = 0.0, 0.0
        self._choices, self._is_replayed = choices, is_replayed
        self._group = group
        self._loads: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}
        self._agreed: dict[int, Tensor] = {}

    def settle(self, layer: int, chosen: Tensor, first: int) -> Tensor:
        """See ``Routing``."""
        if self._choices is None:
            return chosen
        given = self._choices[first : first + len(chosen), layer]
        # Rows that only fill up a slice come last.
        is_known = (given != unknown_choice(given.dtype)).all(1)
        given = torch.where(is_known[:, None], given, 0).long()
        if self._is_replayed:
            taken = torch.where(is_known[:, None], given, chosen[: len(given)])
            return torch.cat([taken, chosen[len(given) :]])
        is_equal = (given[:, :, None] == chosen[: len(given), None]).any(2)
        counts = (is_equal & is_known[:, None]).sum(), is_known.sum() * chosen.shape[1]
        self._agreed[layer] = torch.stack(counts).double()
        return chosen

    def observe(
        self, layer: int, logits: Tensor, scores: Tensor, chosen: Tensor, weights: Tensor, first: int
    ) -> Tensor:
        """See ``Routing``."""
        # A rank may have no row of it.
        places, samples = (each if len(chosen) else each[:0] for each in (self._places, self._samples))
        # Nothing is picked by a condition: how many there are would be asked of the GPU.
        is_here = (places >= first) & (places < first + len(chosen))
        # Any row does where it does not count; if all took one, its gradients would be added one by one.
        others = torch.arange(len(places), device=places.device) % max(1, len(chosen))
        rows = torch.where(is_here, places - first, others)
        num_samples, num_experts = len(self._lengths), scores.shape[1]
        counts = torch.zeros(num_samples * num_experts, device=scores.device)
        flat = samples[:, None] * num_experts + chosen[rows]
        counts.index_add_(0, flat.flatten(), is_here.to(counts.dtype)[:, None].expand(-1, chosen.shape[1]).flatten())
        own = counts.view(num_samples, num_experts)
        whole = own
        if self._group is not None:
            whole = own.clone()
            dist.all_reduce(whole, group=self._group)
        own_scores = torch.where(is_here[:, None], scores[rows].float(), 0)
        shares = torch.zeros(num_samples, num_experts, device=scores.device).index_add(0, samples, own_scores)
        factors = num_experts / (chosen.shape[1] * self._lengths.square())
        aux = ((whole * shares).sum(1) * factors).sum()
        z = torch.where(is_here, logits.float().logsumexp(-1).square()[rows], 0).sum()
        # Set, not added: where activations are computed anew this is called twice.
        self._loads[layer] = own.sum(0).double()
        self._sums[layer] = torch.stack([aux, z]).detach().double()
        aux_weight, z_weight = self.weights
        if not (aux_weight or z_weight) or not weights.requires_grad:
            return weights
        attached: Tensor = _Attached.apply(weights, aux_weight * aux + z_weight * z)
        return attached

    def told(self, num_layers: int, num_experts: int) -> Tensor:
        """Return what this rank's layers told, ``[layers, experts + NUM_SUMS]`` fp64.

        Loads of the experts, then the sums of auxiliary losses and z-losses, and of choices how many agree and were
        compared.
        """
        found = torch.zeros(num_layers, num_experts + NUM_SUMS, dtype=torch.float64, device=self._places.device)
        for layer, loads in self._loads.items():
            found[layer, :num_experts] = loads
            found[layer, num_experts : num_experts + 2] = self._sums[layer]
        for layer, agreed in self._agreed.items():
            found[layer, num_experts + 2 :] = agreed
        return found


class _Attached(torch.autograd.Function):
    """Weights as they are, and a share of the loss that gets its gradient of 1 with theirs."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones_like(ctx.saved_tensors[0])


def pack_choices(micro_batch: MicroBatch, rows: Iterable[Tensor]) -> Tensor:
    """Lay choices, ``[tokens, layers, experts_per_token]`` of each sample, as the tokens are in a micro-batch."""
    values = torch.cat(list(rows))
    places = torch.cat(micro_batch.places)
    packed = values.new_full((len(micro_batch.all_tokens), *values.shape[1:]), unknown_choice(values.dtype))
    packed = to_device(packed.index_copy_(0, places, values), micro_batch.tokens.device)
    return packed if micro_batch.share is None else packed[micro_batch.share.tokens.mine]
