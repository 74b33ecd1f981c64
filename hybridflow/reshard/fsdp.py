"""How torch's FSDP2 deals weights, gradients and optimizer state to ranks. Pure arithmetic: no torch.

``fully_shard`` cuts dim 0 of each parameter into parts of equal length, of which the last may be shorter or empty. So a
rank's part of a tensor is a flat range of it, also where the logical view has other dims.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from hybridflow.layout.mesh import DeviceMesh
from hybridflow.reshard.holdings import Holdings, Part, WeightHoldings
from hybridflow.reshard.optimizer import OptimizerHoldings, flat_regions
from hybridflow.reshard.spec import ModelSpec, Shard, TensorSpec, cut, num_elements


class FsdpHoldings:
    """Weights, moments, master weights and gradients as FSDP2 deals them; equal on all replicas of a hybrid sharding.

    Args:
        mesh: Where they are; its layout has ``fsdp`` above 1.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def stages(self, tensor: TensorSpec) -> tuple[int, ...]:
        """See ``Holdings.stages``."""
        return (0,)

    def key(self, tensor: TensorSpec) -> Hashable:
        """See ``Holdings.key``."""
        return tensor.shape, tensor.tp_dim, tensor.padded_to, tensor.dtype, tensor.name.endswith(".bias")

    def parts(self, tensor: TensorSpec) -> tuple[Part, ...]:
        """See ``Holdings.parts``."""
        layout = self.mesh.layout
        return tuple(
            Part(region.box, self.mesh.ranks[index :: layout.fsdp])
            for index in range(layout.fsdp)
            for region in self._regions(tensor, index)
            if num_elements(region.box) > 0
        )

    def regions(self, tensor: TensorSpec, rank: int) -> tuple[Shard, ...]:
        """See ``Holdings.regions``; those of padding alone have an empty box."""
        return self._regions(tensor, self.mesh.coordinate(rank).dp % self.mesh.layout.fsdp)

    def num_shares(self, tensor: TensorSpec) -> int:
        """See ``Holdings.num_shares``."""
        return self.mesh.layout.fsdp

    def identity(self) -> list[object]:
        """See ``Holdings.identity``."""
        return ["fsdp", str(self.mesh.layout), list(self.mesh.ranks), self.mesh.ranks_per_node]

    def writes(self, number: int, rank: int) -> bool:
        """Return whether a rank, and not a replica of its part, writes tensor ``number`` of a model to a checkpoint."""
        layout = self.mesh.layout
        return self.mesh.coordinate(rank).dp // layout.fsdp == number % (layout.dp // layout.fsdp)

    def _regions(self, tensor: TensorSpec, index: int) -> tuple[Shard, ...]:
        whole = cut(tensor, 1, 0)
        return tuple(flat_regions(whole, *_range(tensor, self.mesh.layout.fsdp, index)))


def _range(tensor: TensorSpec, fsdp: int, index: int) -> tuple[int, int]:
    """Return first element and end of part ``index`` of a tensor that FSDP2 cuts into ``fsdp`` parts, row-major.

    Source: ``torch.chunk``, which ``FSDPParam`` of torch 2.13 follows.
    """
    sizes = cut(tensor, 1, 0).local_shape
    # Gate and up are rows of one parameter, a weight or a bias, and a dim of their own in the logical view.
    is_stacked = tensor.tp_dim == 1 and (len(sizes) == 3 or tensor.name.endswith(".bias"))
    rows = sizes[0] * sizes[1] if is_stacked else sizes[0]
    width = math.prod(sizes) // rows
    step = -(-rows // fsdp)
    return min(index * step, rows) * width, min((index + 1) * step, rows) * width


def weight_holdings(model: ModelSpec, mesh: DeviceMesh) -> Holdings:
    """Return how the weights of a model lie on a mesh."""
    return FsdpHoldings(mesh) if mesh.layout.fsdp > 1 else WeightHoldings(model, mesh)


def state_holdings(
    model: ModelSpec, mesh: DeviceMesh, *, is_distributed: bool, bucket_size: int | None = None
) -> Holdings:
    """Return where an optimizer keeps its state.

    Args:
        model: The trained tensors in the order of the model's parameters.
        mesh: Where they are.
        is_distributed: Whether megatron-core's optimizer deals it to the data-parallel ranks.
        bucket_size: See ``OptimizerHoldings``.
    """
    if mesh.layout.fsdp > 1 or not is_distributed:
        return weight_holdings(model, mesh)
    return OptimizerHoldings(model, mesh, bucket_size)
