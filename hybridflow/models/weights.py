"""A model's weights on this rank, each with the part of the whole that it is, and their initial values."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridflow.errors import ReshardError
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.models.adapters import is_factor
from hybridflow.models.initial import initial_factor, initial_matrix, initial_rates
from hybridflow.models.layers import Chunks, chunks_of
from hybridflow.models.specs import logical_tensors
from hybridflow.reshard.fsdp import weight_holdings
from hybridflow.reshard.spec import ModelSpec, Shard, TensorSpec, num_elements, shard, slices


def local_shards(
    model: GPTModel | Chunks | Sequence[GPTModel], spec: ModelSpec, mesh: DeviceMesh, rank: int
) -> dict[str, tuple[Tensor, Shard]]:
    """Return this rank's tensors in their logical view, each with its part of the whole.

    The tensors are views of the parameters' storage.

    Raises:
        ReshardError: The model's tensors are not those of the description, or have other sizes.
    """
    tensors = logical_tensors(model)
    shards: dict[str, tuple[Tensor, Shard]] = {}
    for tensor in spec.tensors:
        part = shard(tensor, mesh.layout, mesh.coordinate(rank), spec.num_layers)
        if part is None:
            continue
        held = tensors.pop(tensor.name, None)
        if held is None or held.numel() != math.prod(part.local_shape):
            raise ReshardError(
                f"{tensor.name}: rank {rank} of {mesh.name} ({mesh.layout}) should hold {list(part.local_shape)}, the "
                f"model has {'no such tensor' if held is None else list(held.shape)}; build it in this layout"
            )
        shards[tensor.name] = (held.data.view(part.local_shape), part)
    if tensors and not spec.is_part:
        raise ReshardError(
            f"{sorted(tensors)[0]}: rank {rank} of {mesh.name} ({mesh.layout}) should not hold it; "
            "describe the model as it is, and build it in this layout"
        )
    return shards


class Region(NamedTuple):
    """A part of a tensor as a rank holds it.

    Attributes:
        values: View of live storage, padding included.
        part: Which part of the whole it is.
    """

    values: Tensor
    part: Shard

    @property
    def inside(self) -> Tensor:
        """Return the values without padding, a view of the shape of ``part.box``."""
        return self.values[tuple(slice(0, stop - start) for start, stop in self.part.box)]

    def cleared(self) -> Tensor:
        """Set the padding to 0, and return ``inside``, of undefined values, to be filled."""
        inside = self.inside
        if inside.numel() < self.values.numel():
            self.values.zero_()
        return inside


def local_regions(
    model: GPTModel | Chunks | Sequence[GPTModel], spec: ModelSpec, mesh: DeviceMesh, rank: int
) -> dict[str, tuple[Region, ...]]:
    """Return this rank's parts of the tensors: one of each, or of a sharded model as many boxes as its range has.

    Raises:
        ReshardError: As ``local_shards``.
    """
    if mesh.layout.fsdp == 1:
        return {name: (Region(*found),) for name, found in local_shards(model, spec, mesh, rank).items()}
    return {name: regions_of(flat, parts) for name, (flat, parts) in _sharded_parts(model, spec, mesh, rank).items()}


def regions_of(flat: Tensor, parts: Iterable[Shard]) -> tuple[Region, ...]:
    """Return views of a rank's flat storage of a tensor."""
    found = []
    for part in parts:
        count = num_elements(tuple((0, size) for size in part.local_shape))
        found.append(Region(flat[part.offset : part.offset + count].view(part.local_shape), part))
    return tuple(found)


def local_tensors(
    model: GPTModel | Chunks | Sequence[GPTModel], spec: ModelSpec, mesh: DeviceMesh, rank: int
) -> dict[str, Tensor]:
    """Return this rank's storage of the tensors, as a ``Resharder`` takes it: whole shards, or flat ranges.

    Raises:
        ReshardError: As ``local_shards``.
    """
    if mesh.layout.fsdp == 1:
        return {name: tensor for name, (tensor, _) in local_shards(model, spec, mesh, rank).items()}
    return {name: flat for name, (flat, _) in _sharded_parts(model, spec, mesh, rank).items()}


def _sharded_parts(
    model: GPTModel | Chunks | Sequence[GPTModel], spec: ModelSpec, mesh: DeviceMesh, rank: int
) -> dict[str, tuple[Tensor, tuple[Shard, ...]]]:
    tensors, holdings = logical_tensors(model), weight_holdings(spec, mesh)
    found: dict[str, tuple[Tensor, tuple[Shard, ...]]] = {}
    for tensor in spec.tensors:
        held, parts = tensors.pop(tensor.name, None), holdings.regions(tensor, rank)
        size = sum(math.prod(part.local_shape) for part in parts)
        local = held.to_local().detach().view(-1) if isinstance(held, DTensor) else None
        if local is None or local.numel() != size:
            raise ReshardError(
                f"{tensor.name}: rank {rank} of {mesh.name} ({mesh.layout}) should hold {size} elements of it, FSDP "
                f"holds {'no such parameter' if local is None else local.numel()}; install torch 2.13"
            )
        if size:
            found[tensor.name] = (local, parts)
    if tensors and not spec.is_part:
        raise ReshardError(
            f"{sorted(tensors)[0]}: the description of {mesh.name} lacks it; describe the model as it is"
        )
    return found


def initialize(
    model: GPTModel | Chunks | Sequence[GPTModel],
    spec: ModelSpec,
    mesh: DeviceMesh,
    rank: int,
    *,
    seed: int,
    std: float,
    names: Collection[str] | None = None,
    variant: int = 0,
) -> None:
    """Set initial weights, of all tensors or of those named: a function of (seed, logical name) whatever the layout.

    Norms multiply by 1: their weights are 1, or 0 where they are zero-centered. Biases are 0. The decays of linear
    attention begin with a bias of 1 and rates that are uniform up to 16. Matrices are normal with
    ``std``, those that end a residual branch with ``std / sqrt(2 * layers)`` (GPT-2's rule). Padding rows of the
    vocabulary are 0. An adapter's A is uniform within ``1 / sqrt(in)``, as in PEFT, and its B is 0.

    Args:
        model: This rank's part, of all its virtual pipeline chunks.
        spec: The tensors.
        mesh: Where the model is.
        rank: This one.
        seed: Seed of the numbers.
        std: Standard deviation of matrices.
        names: The tensors to set; None: all.
        variant: Another number gives other matrices.
    """
    shapes = {tensor.name: tensor for tensor in spec.tensors}
    chunk = chunks_of(model)[0] if isinstance(model, nn.Module) else model[0]
    norm = 0.0 if chunk.config.layernorm_zero_centered_gamma else 1.0
    for name, regions in local_regions(model, spec, mesh, rank).items():
        if names is not None and name not in names:
            continue
        whole = _initial_value(shapes[name], std, spec.num_layers, norm, seed=seed, variant=variant)
        for region in regions:
            region.cleared().copy_(whole[slices(region.part.box)])


def _initial_value(tensor: TensorSpec, std: float, num_layers: int, norm: float, *, seed: int, variant: int) -> Tensor:
    """Return the whole logical tensor, fp32 in host memory."""
    if is_factor(tensor.name):
        return initial_factor(tensor.name, tensor.shape, seed=seed, variant=variant)
    if tensor.name.endswith(".A_log"):
        return initial_rates(tensor.name, tensor.shape, seed=seed, variant=variant).log()
    if tensor.name.endswith((".dt_bias", ".out_norm.weight")):
        return torch.ones(tensor.shape)
    if tensor.name.endswith(("bias", "softmax_offset")):
        return torch.zeros(tensor.shape)
    if len(tensor.shape) == 1:
        return torch.full(tensor.shape, norm)
    if tensor.name.endswith(("linear_proj.weight", "linear_fc2.weight", "out_proj.weight")):
        std = std / math.sqrt(2 * num_layers)
    return initial_matrix(tensor.name, tensor.shape, seed=seed, std=std, variant=variant)
