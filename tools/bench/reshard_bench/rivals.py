"""The rivals: each prepares a case once, and can then run it again and again.

A rival fills the given target tensors from the given source tensors; what it can know beforehand it prepares, untimed.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.resharding import build_centralized_reshard_plan, execute_reshard_plan
from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor, Placement, Replicate, Shard

from hybridflow.reshard.execute import Resharder
from hybridflow.reshard.holdings import WeightHoldings
from hybridflow.reshard.plan import Copy, Flows, bucket_bytes, plan
from hybridflow.reshard.spec import ITEM_BYTES, Box, ModelSpec, TensorSpec, num_elements
from reshard_bench.cases import Case


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A rival ready to run.

    Attributes:
        run: Fills the target once. Collective.
        plan_s: Time to find out what to do; None where there is no such step.
        received_bytes: Payload by its own plan; None: only the kernel can tell.
        messages: That this rank sends in a run, or collectives that it calls.
        file_bytes: This rank's share of the files that a run leaves.
        close: Gives back what the rival holds outside this process's memory.
    """

    run: Callable[[], object]
    plan_s: float | None = None
    received_bytes: int | None = None
    messages: int | None = None
    file_bytes: Callable[[], int] = lambda: 0
    close: Callable[[], None] = lambda: None


LARGE_PIECE_BYTES = 256 << 10
"""A contiguous piece of this size may be a message of its own."""


def ours(case: Case, transport: Literal["torch", "shared", "mpi"]) -> Rival:
    """hybridflow's, through one transport."""
    # Planned once more for its time, with a description that nothing is cached for.
    model = ModelSpec(tensors=case.model.tensors, num_layers=case.model.num_layers)
    source, target = WeightHoldings(model, case.source.mesh), WeightHoldings(model, case.target.mesh)
    start_s = time.perf_counter()
    part = plan(model, source, target, case.world.rank)
    plan_s = time.perf_counter() - start_s
    resharder = Resharder(
        case.world,
        case.model,
        case.source,
        case.target,
        source_tensors=case.source_tensors,
        target_tensors=case.target_tensors,
        transport=transport,
    )
    received = sum(_copy_bytes(model, copy) for wave in part.waves for copy in wave.receives)
    return Rival(run=resharder.run, plan_s=plan_s, received_bytes=received)


def message_bound(case: Case) -> int:
    """The most messages that this rank may send: one for each peer, bucket and large contiguous piece at either end."""
    rank, bucket = case.world.rank, bucket_bytes(case.model, case.target)
    bound = 0
    for wave in plan(case.model, case.source, case.target, rank).waves:
        bound += len({copy.destination for copy in wave.sends})
        bound += sum(_copy_bytes(case.model, copy) for copy in wave.sends) // bucket
        for copy in wave.sends:
            spec = case.model.tensors[copy.tensor]
            ends = case.source.regions(spec, rank), case.target.regions(spec, copy.destination)
            bound += max(_large_pieces(copy.box, region.local_shape, spec) for (region,) in ends)
    return bound


def _large_pieces(box: Box, local_shape: tuple[int, ...], spec: TensorSpec) -> int:
    """The contiguous pieces of memory that a box is, if they are large; else 0."""
    sizes = [stop - start for start, stop in box]
    # All dims after the last that is not whole, and that one, are one piece.
    last = max((dim for dim, size in enumerate(sizes) if size != local_shape[dim]), default=0)
    piece_bytes = math.prod(sizes[last:]) * ITEM_BYTES[spec.dtype]
    return math.prod(sizes[:last]) if piece_bytes >= LARGE_PIECE_BYTES else 0


def _copy_bytes(model: ModelSpec, copy: Copy) -> int:
    return num_elements(copy.box) * ITEM_BYTES[model.tensors[copy.tensor].dtype]


def bare_exchange(case: Case) -> Rival:
    """The bytes of our plan and nothing else: one message for each pair of ranks. What the network can do."""
    rank = case.world.rank
    sizes: Counter[tuple[int, int]] = Counter()
    for flow in Flows(case.model, case.source, case.target).all():
        sizes[flow.source, flow.destination] += flow.stop - flow.start
    # Not zeros: those are one page of the machine's memory, read again and again. What a rank sends to several is one
    # memory, as its shards are.
    memory = torch.ones(
        max((size for (source, _), size in sizes.items() if source == rank), default=0), dtype=torch.uint8
    )
    sends = {peer: memory[:size] for (source, peer), size in sizes.items() if source == rank}
    receives = {peer: torch.ones(size, dtype=torch.uint8) for (peer, target), size in sizes.items() if target == rank}

    def run() -> None:
        # Ring-shift order: no rank is everybody's first.
        works = [dist.irecv(receives[peer], peer) for peer in sorted(receives, key=lambda peer: (rank - peer) % 4096)]
        works += [dist.isend(sends[peer], peer) for peer in sorted(sends, key=lambda peer: (peer - rank) % 4096)]
        for work in works:
            work.wait()

    received = sum(map(Tensor.numel, receives.values()))
    return Rival(run=run, received_bytes=received, messages=len(sends))


def gather_and_slice(case: Case) -> Rival:
    """Every tensor whole on every rank, one at a time, and each keeps its part."""
    world, mesh = case.world, case.source.mesh
    tp_group, pp_ranks = world.group(mesh.group_of(world.rank, "tp")), mesh.group_of(world.rank, "pp")
    stage, pp_group = mesh.coordinate(world.rank).pp, world.group(pp_ranks)
    received = messages = 0
    steps: list[tuple[Tensor | None, tuple[int, ...], bool, int | None, list[tuple[int, Tensor, tuple[Any, ...]]]]] = []
    for spec in case.model.tensors:
        (holder,) = case.source.stages(spec)
        parts = mesh.layout.tp if spec.tp_dim is not None else 1
        dim = spec.tp_dim or 0
        width = spec.shape[dim] // parts
        shape = (parts, *spec.shape[:dim], width, *spec.shape[dim + 1 :])
        copies = []
        for region in case.target.regions(spec, world.rank):
            low, high = region.box[dim]
            for part in range(low // width, -(-high // width)):
                start, stop = max(low, part * width), min(high, (part + 1) * width)
                into = case.target_tensors[spec.name].narrow(dim, start - low, stop - start)
                copies.append((part, into, (dim, start - part * width, stop - start)))
        source = case.source_tensors[spec.name] if holder == stage else None
        root = pp_ranks[holder] if len(pp_ranks) > 1 else None
        steps.append((source, shape, parts > 1, root, copies))
        received += spec.num_bytes if source is None else spec.num_bytes // parts * (parts - 1)
        messages += (source is not None and parts > 1) + (root is not None)

    def run() -> None:
        for source, shape, is_cut, root, copies in steps:
            if source is not None and not is_cut:
                gathered = source[None]
            else:
                gathered = torch.empty(shape)
                if source is not None:
                    dist.all_gather_into_tensor(gathered.view(-1), source.view(-1), group=tp_group)
            if root is not None:
                dist.broadcast(gathered, src=root, group=pp_group)
            for part, into, where in copies:
                into.copy_(gathered[part].narrow(*where))

    return Rival(run=run, received_bytes=received, messages=messages)


def megatron(case: Case) -> Rival:
    """megatron-core's own, over gloo."""
    rank = case.world.rank
    # Its constructor makes a CUDA stream, which nothing needs where there is no GPU.
    service = GlooCopyService.__new__(GlooCopyService)
    service.rank, service.world_size, service.gloo_pg = rank, case.world.size, dist.group.WORLD
    service.send_ops, service.recv_ops, service._copy_stream = [], [], None
    start_s = time.perf_counter()
    plan = build_centralized_reshard_plan(case.source_model, case.target_model)
    plan_s = time.perf_counter() - start_s
    parameters = dict(case.target_model.named_parameters())
    received = [op for op in plan.recv_ops if op.peer_rank != rank]
    return Rival(
        run=lambda: execute_reshard_plan(plan, case.source_model, case.target_model, service),
        plan_s=plan_s,
        received_bytes=sum(4 * parameters[op.param_name].data[op.my_slice].numel() for op in received),
        messages=sum(op.peer_rank != rank for op in plan.send_ops),
    )


def checkpoint(case: Case) -> Rival:
    """torch.distributed.checkpoint: save in one layout, load in the other, in a file system in memory."""
    coordinator = case.world.coordinator(tuple(range(case.world.size)))
    folder = Path(coordinator.decide("folder", tempfile.mkdtemp(dir="/dev/shm") if coordinator.is_lead else None))
    states = []
    for holdings, tensors in ((case.source, case.source_tensors), (case.target, case.target_tensors)):
        layout = holdings.mesh.layout
        grid = torch.tensor(holdings.mesh.ranks).view(layout.pp, layout.dp, layout.tp)
        stage = DeviceMesh("cpu", grid, mesh_dim_names=("pp", "dp", "tp"))["dp", "tp"]
        dims = {spec.name: spec.tp_dim for spec in case.model.tensors}
        states.append(
            {
                name: DTensor.from_local(tensor, stage, (Replicate(), _cut(dims[name])), run_check=False)
                for name, tensor in tensors.items()
            }
        )

    def run() -> None:
        dcp.save(states[0], storage_writer=dcp.FileSystemWriter(folder, sync_files=False))
        dcp.load(states[1], storage_reader=dcp.FileSystemReader(folder))

    return Rival(
        run=run,
        file_bytes=lambda: sum(path.stat().st_size for path in folder.iterdir()) // case.world.size,
        close=lambda: shutil.rmtree(folder) if coordinator.is_lead else None,
    )


def dtensor(case: Case) -> Rival | None:
    """DTensor's redistribution, where a grid of ranks can say both layouts."""
    if case.pair.grid is None:
        return None
    shape, source, target = case.pair.grid
    names = tuple("abc"[: len(shape)])
    mesh = DeviceMesh("cpu", torch.arange(case.world.size).view(shape), mesh_dim_names=names)
    cut = tuple(name for name, letter in zip(names, source, strict=True) if letter == "S")
    if len(cut) > 1:
        # Then it gathers over several axes at once, as it asks for itself.
        mesh[cut]._flatten("cut")

    def placements(letters: str, dim: int | None) -> list[Placement]:
        return [_cut(dim) if letter == "S" else Replicate() for letter in letters]

    moves = [
        (
            DTensor.from_local(case.source_tensors[spec.name], mesh, placements(source, spec.tp_dim), run_check=False),
            placements(target, spec.tp_dim),
            case.target_tensors[spec.name],
        )
        for spec in case.model.tensors
    ]

    @torch.no_grad()
    def run() -> None:
        for held, wanted, into in moves:
            into.copy_(held.redistribute(placements=wanted).to_local())

    return Rival(run=run)


def _cut(dim: int | None) -> Placement:
    return Replicate() if dim is None else Shard(dim)


RIVALS: dict[str, Callable[[Case], Rival | None]] = {
    "megatron": megatron,
    "gather": gather_and_slice,
    "dcp": checkpoint,
    "dtensor": dtensor,
}
