"""Which rank holds which boxes of which tensor. Pure arithmetic: no torch.

A plan turns one ``Holdings`` into another, and does not care what they are: the weights of a mesh, replicated over data
parallel ranks (``WeightHoldings``), or the state of a distributed optimizer, dealt to them (``OptimizerHoldings``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import NamedTuple, Protocol

from hybridflow.layout.mesh import DeviceMesh
from hybridflow.reshard.spec import (
    Box,
    ModelSpec,
    Shard,
    TensorSpec,
    cut,
    expert_block,
    num_elements,
    shard,
    stage_of,
)


class Part(NamedTuple):
    """A box of a tensor and the ranks that hold all of it.

    Attributes:
        box: In logical coordinates, never empty.
        ranks: Global ranks, in mesh order.
    """

    box: Box
    ranks: tuple[int, ...]


class Holdings(Protocol):
    """How a model's tensors lie on the ranks of a mesh."""

    mesh: DeviceMesh

    def stages(self, tensor: TensorSpec) -> tuple[int, ...]:
        """Return the pipeline stages that hold a tensor, ascending."""
        ...

    def key(self, tensor: TensorSpec) -> Hashable:
        """Return a key that is equal for tensors with equal ``parts``."""
        ...

    def parts(self, tensor: TensorSpec) -> tuple[Part, ...]:
        """Return disjoint boxes that cover the tensor. Raises ReshardError: the mesh cannot cut it."""
        ...

    def regions(self, tensor: TensorSpec, rank: int) -> tuple[Shard, ...]:
        """Return a rank's regions of a tensor, in the order of its storage; each is one of the ``parts``."""
        ...

    def num_shares(self, tensor: TensorSpec) -> int:
        """Return how many shares of a tensor a stage's ranks hold between them, replicas of a share counted once."""
        ...

    def identity(self) -> list[object]:
        """Return all that the holdings depend on besides the model, as JSON values."""
        ...


def tensors_alike(model: ModelSpec, *holdings: Holdings) -> list[tuple[ModelSpec, int]]:
    """Return one tensor, as its own model, of each kind that all holdings cut alike, and how many there are."""
    first: dict[object, TensorSpec] = {}
    counts: Counter[object] = Counter()
    for tensor in model.tensors:
        key = tuple(held.key(tensor) for held in holdings)
        first.setdefault(key, tensor)
        counts[key] += 1
    return [(ModelSpec(tensors=(first[key],), num_layers=model.num_layers), count) for key, count in counts.items()]


class WeightHoldings:
    """Weights as megatron-core lays them out: one shard a rank, the same on every data and context parallel rank."""

    def __init__(self, model: ModelSpec, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._num_layers = model.num_layers
        self._stages: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._ranks: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._regions: dict[tuple[int, Hashable], tuple[Shard, ...]] = {}

    def stages(self, tensor: TensorSpec) -> tuple[int, ...]:
        """See ``Holdings.stages``."""
        places = (tensor.place, tensor.also_held_by)
        found = self._stages.get(places)
        if found is None:
            layout = self.mesh.layout
            stages = {stage_of(place, layout, self._num_layers, tensor.name) for place in tensor.places}
            found = self._stages[places] = tuple(sorted(stages))
        return found

    def key(self, tensor: TensorSpec) -> Hashable:
        """See ``Holdings.key``."""
        block = None if tensor.expert is None else expert_block(tensor, self.mesh.layout)
        return self.stages(tensor), block, tensor.shape, tensor.tp_dim, tensor.padded_to, tensor.dtype

    def parts(self, tensor: TensorSpec) -> tuple[Part, ...]:
        """See ``Holdings.parts``."""
        layout, stages = self.mesh.layout, self.stages(tensor)
        block = None if tensor.expert is None else expert_block(tensor, layout)
        if tensor.tp_dim is None:
            whole = tuple((0, size) for size in tensor.shape)
            return (Part(whole, self._output_ranks(stages, block, None)),)
        number = layout.tp if block is None else layout.expert_tp
        boxes = ((index, cut(tensor, number, index).box) for index in range(number))
        return tuple(
            Part(box, self._output_ranks(stages, block, index)) for index, box in boxes if num_elements(box) > 0
        )

    def regions(self, tensor: TensorSpec, rank: int) -> tuple[Shard, ...]:
        """See ``Holdings.regions``."""
        key = rank, self.key(tensor)
        if key not in self._regions:
            held = shard(tensor, self.mesh.layout, self.mesh.coordinate(rank), self._num_layers)
            self._regions[key] = () if held is None else (held,)
        return self._regions[key]

    def num_shares(self, tensor: TensorSpec) -> int:
        """See ``Holdings.num_shares``."""
        layout = self.mesh.layout
        parts, blocks = (layout.tp, 1) if tensor.expert is None else (layout.expert_tp, layout.ep)
        return blocks * (1 if tensor.tp_dim is None else parts)

    def identity(self) -> list[object]:
        """See ``Holdings.identity``."""
        return ["weights", str(self.mesh.layout), list(self.mesh.ranks), self.mesh.ranks_per_node]

    def _output_ranks(self, stages: tuple[int, ...], block: int | None, index: int | None) -> tuple[int, ...]:
        """Return the ranks of some stages with a tensor parallel index, of one block of experts or of dense tensors."""
        key = (stages, block, index)
        found = self._ranks.get(key)
        if found is None:
            layout = self.mesh.layout
            size = layout.tp * layout.cp * layout.dp
            # Ranks of a stage follow each other, and holders come at a stride: see ``spec.expert_place``.
            first, stride, width = (index or 0), layout.tp, 1 if index is not None else layout.tp
            if block is not None:
                first, stride = first + block * layout.expert_tp, layout.expert_tp * layout.ep
                width = 1 if index is not None else layout.expert_tp
            ranks = [
                rank
                for stage in stages
                for start in range(stage * size + first, (stage + 1) * size, stride)
                for rank in self.mesh.ranks[start : start + width]
            ]
            found = self._ranks[key] = tuple(ranks)
        return found
