"""Carrying out a plan: pack, exchange, unpack."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hybridflow.errors import ReshardError
from hybridflow.parallel.mesh import DeviceMesh
from hybridflow.parallel.world import World
from hybridflow.reshard.plan import Copy, copy_bytes, digest, participants, plan
from hybridflow.reshard.spec import ITEM_BYTES, Box, DType, ModelSpec, Shard, num_elements, shard
from hybridflow.reshard.transport import TorchTransport

TORCH_DTYPES: dict[DType, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Index = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True)
class ReshardStats:
    """What one run cost this rank.

    Attributes:
        time_s: From the first copy to the last, waits for other ranks included.
        received_bytes: From other ranks.
        sent_bytes: To other ranks.
        local_bytes: Copied within this rank's memory.
    """

    time_s: float
    received_bytes: int
    sent_bytes: int
    local_bytes: int


class _Piece(NamedTuple):
    """A box of a local tensor and its place in a packed buffer."""

    name: str
    where: Index
    packed: Tensor


class _LocalCopy(NamedTuple):
    """A box of a source tensor and its place in the target tensor of the same rank."""

    name: str
    from_where: Index
    to_where: Index
    dtype: torch.dtype


class Resharder:
    """Turns a model's shards in one mesh into its shards in another, again and again over the same buffers.

    Where both meshes cut the model alike (``plan.shares_storage``) the caller uses one storage, and needs none of this.

    Collective: all ranks of either mesh make it together, with equal arguments; ``world.make_groups`` has been called
    with ``plan.participants`` of the meshes.

    Args:
        world: The job, of which this rank is in at least one of the meshes.
        model: The logical tensors; they travel in their described dtypes.
        source_mesh: Where the shards are.
        target_mesh: Where they are to be.

    Raises:
        ReshardError: A mesh cannot cut some tensor, or the ranks do not agree about the plan.
        DeadlineError: A rank did not come.
    """

    def __init__(self, world: World, model: ModelSpec, source_mesh: DeviceMesh, target_mesh: DeviceMesh) -> None:
        self._name = f"reshard {source_mesh.name} to {target_mesh.name}"
        self._device = world.device
        self._source_shards = _shards(model, source_mesh, world.rank)
        self._target_shards = _shards(model, target_mesh, world.rank)
        part = plan(model, source_mesh, target_mesh, world.rank)
        ranks = participants(source_mesh, target_mesh)
        _check_agreement(world, ranks, digest(model, source_mesh, target_mesh), self._name)

        self._transport = TorchTransport(world, ranks, self._name) if len(ranks) > 1 else None
        self._send_buffers: dict[int, Tensor] = {}
        self._receive_buffers: dict[int, Tensor] = {}
        self._packs: list[_Piece] = []
        self._unpacks: list[_Piece] = []
        for peer in ranks:
            sends = [copy for copy in part.sends if copy.destination == peer]
            if sends:
                self._send_buffers[peer], pieces = _lay_out(model, sends, self._source_shards, self._device)
                self._packs += pieces
            receives = [copy for copy in part.receives if copy.source == peer]
            if receives:
                self._receive_buffers[peer], pieces = _lay_out(model, receives, self._target_shards, self._device)
                self._unpacks += pieces
        self._local_copies = [_local_copy(model, copy, self._source_shards, self._target_shards) for copy in part.local]
        self._local_bytes = sum(copy_bytes(model, copy) for copy in part.local)
        self._padding = {name: where for name, held in self._target_shards.items() for where in _padding(held)}

    @torch.no_grad()
    def run(self, source: Mapping[str, Tensor] | None, target: Mapping[str, Tensor] | None) -> ReshardStats:
        """Fill the target tensors with what the source tensors hold; their padding becomes 0.

        Collective: all ranks of either mesh.

        Args:
            source: Logical name -> this rank's parameter in the source mesh, contiguous, of any dtype, and of any shape
                with the elements of its shard; None where the rank holds nothing there. Left as it is.
            target: Likewise in the target mesh; overwritten. Must not share memory with ``source``.

        Raises:
            ReshardError: A tensor is missing, unknown, of another size or not contiguous; nothing was sent or written.
            DeadlineError: A rank did not come; the target is undefined, the source intact.
        """
        sources = self._views(source, self._source_shards, "source")
        targets = self._views(target, self._target_shards, "target")
        start_s = time.perf_counter()
        for name, where, packed in self._packs:
            packed.copy_(sources[name][where])
        if self._transport is not None:
            self._transport.exchange(self._send_buffers, self._receive_buffers)
        for name, from_where, to_where, dtype in self._local_copies:
            # By way of the travelling dtype, so that replicas are equal wherever their elements came from.
            targets[name][to_where].copy_(sources[name][from_where].to(dtype))
        for name, where, packed in self._unpacks:
            targets[name][where].copy_(packed)
        for name, where in self._padding.items():
            targets[name][where].zero_()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return ReshardStats(
            time_s=time.perf_counter() - start_s,
            received_bytes=sum(buffer.numel() for buffer in self._receive_buffers.values()),
            sent_bytes=sum(buffer.numel() for buffer in self._send_buffers.values()),
            local_bytes=self._local_bytes,
        )

    def _views(self, given: Mapping[str, Tensor] | None, shards: dict[str, Shard], role: str) -> dict[str, Tensor]:
        """The given tensors in their logical views."""
        tensors: Mapping[str, Tensor] = {} if given is None else given
        for what, names in (("lacks", shards.keys() - tensors.keys()), ("has unknown", tensors.keys() - shards.keys())):
            if names:
                raise ReshardError(
                    f"{self._name}: {role} {what} {', '.join(sorted(names))}; "
                    "give exactly the tensors that the model's description puts on this rank"
                )
        views = {}
        for name, held in shards.items():
            tensor = tensors[name]
            shape = list(held.local_shape)
            if tensor.numel() != num_elements(tuple((0, size) for size in shape)) or not tensor.is_contiguous():
                raise ReshardError(
                    f"{self._name}: {role} {name} is {'' if tensor.is_contiguous() else 'a strided '}"
                    f"{list(tensor.shape)}; expected a contiguous tensor that can be viewed as {shape}"
                )
            views[name] = tensor.view(held.local_shape)
        return views


def _check_agreement(world: World, ranks: tuple[int, ...], mine: str, name: str) -> None:
    digests = world.coordinator(ranks).gather(mine, name)
    usual, count = Counter(digests).most_common(1)[0]
    if count < len(ranks):
        others = [rank for rank, each in zip(ranks, digests, strict=True) if each != usual]
        raise ReshardError(
            f"{name}: ranks {others} have another plan than the rest of {list(ranks)}; "
            "start all ranks with the same recipe and the same version of hybridflow"
        )


def _shards(model: ModelSpec, mesh: DeviceMesh, rank: int) -> dict[str, Shard]:
    """What a rank holds in a mesh, by name; nothing where it is not in the mesh."""
    if rank not in mesh:
        return {}
    coordinate = mesh.coordinate(rank)
    found = ((spec.name, shard(spec, mesh.layout, coordinate, model.num_layers)) for spec in model.tensors)
    return {name: held for name, held in found if held is not None}


def _lay_out(
    model: ModelSpec, copies: Sequence[Copy], shards: dict[str, Shard], device: torch.device
) -> tuple[Tensor, list[_Piece]]:
    """One peer's packed buffer and the place of each copy in it, the same at both ends."""
    # The widest dtypes first: then every piece starts at a multiple of its item size, and no byte is lost to alignment.
    copies = sorted(copies, key=lambda copy: -ITEM_BYTES[model.tensors[copy.tensor].dtype])
    buffer = torch.empty(sum(copy_bytes(model, copy) for copy in copies), dtype=torch.uint8, device=device)
    pieces, offset = [], 0
    for copy in copies:
        spec = model.tensors[copy.tensor]
        size = copy_bytes(model, copy)
        shape = [stop - start for start, stop in copy.box]
        packed = buffer[offset : offset + size].view(TORCH_DTYPES[spec.dtype]).view(shape)
        pieces.append(_Piece(spec.name, _index(copy.box, shards[spec.name]), packed))
        offset += size
    return buffer, pieces


def _local_copy(model: ModelSpec, copy: Copy, sources: dict[str, Shard], targets: dict[str, Shard]) -> _LocalCopy:
    spec = model.tensors[copy.tensor]
    from_where, to_where = (_index(copy.box, shards[spec.name]) for shards in (sources, targets))
    return _LocalCopy(spec.name, from_where, to_where, TORCH_DTYPES[spec.dtype])


def _index(box: Box, held: Shard) -> Index:
    """Where a box of the logical tensor lies in a rank's parameter."""
    return tuple(slice(start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, held.box, strict=True))


def _padding(held: Shard) -> list[Index]:
    """The rows of a rank's parameter that belong to no logical element: one index, or none."""
    return [
        (*(slice(None),) * dim, slice(stop - start, size))
        for dim, ((start, stop), size) in enumerate(zip(held.box, held.local_shape, strict=True))
        if stop - start < size
    ]
