"""Routers of a placed model in training: losses, loads, and the biases that follow from these."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from hybridflow.config.roles import MoEConfig
from hybridflow.dataflow.batch import Batch
from hybridflow.models.experts import mixtures
from hybridflow.models.gpt import Transformer
from hybridflow.models.layers import Chunks, chunks_of
from hybridflow.models.microbatch import MicroBatch
from hybridflow.models.routing import NUM_SUMS, PackedRouting, pack_choices
from hybridflow.models.training import sum_over
from hybridflow.observe.expert_loads import Loads

ROUTER_CHOICES = "router_choices"
"""Column of the rollout's choices, ragged ``[tokens, layers, experts_per_token]``."""


def attach_choices(
    parts: list[MicroBatch],
    batch: Batch,
    groups: ProcessGroupCollection,
    model: Transformer | Chunks,
    *,
    is_replayed: bool,
) -> None:
    """Tell routers the rollout's choices.

    Args:
        parts: Micro-batches of the batch.
        batch: With ``router_choices``.
        groups: This rank's process groups.
        model: The model.
        is_replayed: Whether these are taken; else they are compared.
    """
    rows = batch.ragged(ROUTER_CHOICES).to_list()
    for part in parts:
        choices = pack_choices(part, (rows[sample] for sample in part.samples))
        part.attention.routing = PackedRouting(
            part, choices=choices, is_replayed=is_replayed, group=_sharers(model, groups)
        )


class RouterWatch:
    """What the routers of one optimizer step are told, and what comes of it.

    Args:
        model: The model; with experts.
        groups: This rank's process groups.
        settings: Weights of the losses, and the rate of the bias.
        parts: This rank's micro-batches.

    Collective: dp.
    """

    def __init__(
        self, model: Transformer | Chunks, groups: ProcessGroupCollection, settings: MoEConfig, parts: list[MicroBatch]
    ) -> None:
        self._model, self._groups, self._settings = model, groups, settings
        lengths = [length for part in parts for length in part.lengths]
        # In host memory: a GPU would be asked for the sums.
        totals = sum_over(groups.dp)(torch.tensor([len(lengths), sum(lengths)], dtype=torch.float64))
        self._num_samples, self._num_tokens = totals.clamp(min=1).tolist()
        self._routings: list[PackedRouting] = []
        for part in parts:
            routing = part.attention.routing
            if routing is None:
                routing = part.attention.routing = PackedRouting(part, group=_sharers(model, groups))
            routing.weights = settings.aux_loss / self._num_samples, settings.z_loss / self._num_tokens
            self._routings.append(routing)

    def finish(self) -> tuple[dict[str, float], Loads]:
        """Let the biases follow the loads, after the optimizer's step. Collective: dp, pp.

        Returns:
            Metrics, and the load of every expert. Both are empty where no token came to an expert.
        """
        config, groups = chunks_of(self._model)[0].config, self._groups
        num_experts = config.num_moe_experts
        device = next(self._model.parameters()).device
        sums = torch.zeros(config.num_layers, num_experts + NUM_SUMS, dtype=torch.float64, device=device)
        for routing in self._routings:
            sums += routing.told(config.num_layers, num_experts)
        dist.all_reduce(sums, group=groups.dp_cp)
        if _splits_tokens(self._model):
            dist.all_reduce(sums, group=groups.tp)
        self._follow_loads(sums[:, :num_experts])
        # Each stage has its own layers.
        dist.all_reduce(sums, group=groups.pp)
        # Layers without experts tell nothing.
        loads = {layer: row / row.mean() for layer, row in enumerate(sums[:, :num_experts].cpu()) if row.sum() > 0}
        if not loads:
            return {}, {}
        metrics = self._metrics(torch.stack([*loads.values()]), sums[:, num_experts:].sum(0).tolist())
        return metrics, {layer: shares.tolist() for layer, shares in loads.items()}

    def _follow_loads(self, loads: Tensor) -> None:
        """Raise the biases of experts with less than the mean load, and lower those of the others."""
        rate = self._settings.bias_update_rate
        for router in (layer.router for layer in mixtures(self._model)):
            if rate and router.expert_bias is not None:
                own = loads[router.layer]
                router.expert_bias += rate * (own.mean() - own).sign().float()

    def _metrics(self, shares: Tensor, totals: list[float]) -> dict[str, float]:
        aux, z, agreed, compared = totals
        found = {
            "actor/expert_load_max": float(shares.max()),
            "actor/expert_load_max_mean": float(shares.amax(1).mean()),
            "actor/expert_load_min": float(shares.min()),
            "actor/router_aux_loss": aux / (self._num_samples * len(shares)),
            "actor/router_z_loss": z / (self._num_tokens * len(shares)),
        }
        return found | ({"rollout/router_agreement": agreed / compared} if compared else {})


def set_dispatcher(model: Transformer | Chunks, dispatcher: str) -> None:
    """Choose how tokens reach experts on other ranks, see ``actor.moe.dispatcher``."""
    for layer in mixtures(model):
        if dispatcher != "auto":
            layer.gathers = dispatcher == "allgather"


def _splits_tokens(model: Transformer | Chunks) -> bool:
    """Return whether each tensor-parallel rank routes a slice of the tokens."""
    return chunks_of(model)[0].sequence_switch is not None


def _sharers(model: Transformer | Chunks, groups: ProcessGroupCollection) -> dist.ProcessGroup | None:
    """Return the ranks that have parts of each sample; None: this rank has all of its samples."""
    group = groups.tp_cp if _splits_tokens(model) else groups.cp
    return group if group.size() > 1 else None
