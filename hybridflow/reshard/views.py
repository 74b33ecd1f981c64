"""A rank's tensors as the boxes that a plan names: checked, and looked at where they are in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybridflow.errors import ReshardError
from hybridflow.reshard.holdings import Holdings
from hybridflow.reshard.messages import region_of
from hybridflow.reshard.spec import Box, DType, ModelSpec, Shard, TensorSpec

TORCH_DTYPES: dict[DType, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

_WIDE = torch.complex128
"""The widest element that torch copies."""


def local_sizes(model: ModelSpec, holdings: Holdings, rank: int) -> dict[str, int]:
    """Return the elements of each tensor that a rank has, by name; none outside the mesh."""
    if rank not in holdings.mesh:
        return {}
    found = {spec.name: holdings.regions(spec, rank) for spec in model.tensors}
    return {
        name: max(region.offset + math.prod(region.local_shape) for region in regions)
        for name, regions in found.items()
        if regions
    }


def check_tensors(owner: str, sizes: Mapping[str, int], tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors other than those of these sizes.

    Raises:
        ReshardError: One is missing, unknown, of another size, not contiguous, or released.
    """
    for what, names in (("lacks", sizes.keys() - tensors.keys()), ("has unknown", tensors.keys() - sizes.keys())):
        if names:
            raise ReshardError(
                f"{owner} {what} {', '.join(sorted(names))}; "
                "give exactly the tensors that the model's description puts on this rank"
            )
    for name, size in sizes.items():
        tensor = tensors[name]
        if tensor.numel() != size or not tensor.is_contiguous():
            raise ReshardError(
                f"{owner} {name} is {'' if tensor.is_contiguous() else 'a strided '}{list(tensor.shape)}; "
                f"expected a contiguous tensor of {size} elements"
            )
        if not tensor.is_floating_point():
            raise ReshardError(f"{owner} {name} is {tensor.dtype}; expected a floating point dtype")
    check_storages(owner, tensors)


def check_storages(owner: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that were released. Raises ReshardError."""
    for name, tensor in tensors.items():
        if tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0:
            raise ReshardError(f"{owner} {name} has no storage; restore what was released first")


class Shards:
    """The boxes of tensors that a rank holds, as views of its memory.

    Args:
        model: The logical tensors.
        holdings: How the rank holds them.
        rank: Global rank.
        tensors: By name; each as long as ``local_sizes`` says, in this process's memory or mapped into it.
    """

    def __init__(self, model: ModelSpec, holdings: Holdings, rank: int, tensors: Mapping[str, Tensor]) -> None:
        self._model = model
        self._holdings = holdings
        self._rank = rank
        # Without the parameter: a view of it must not be differentiated through.
        self._flat = {name: tensor.detach().view(-1) for name, tensor in tensors.items()}

    def view(self, tensor: int, box: Box) -> Tensor:
        """Return a box within one region of a tensor, in the box's shape; the tensor by its index in the model."""
        spec = self._model.tensors[tensor]
        region = region_of(self._holdings, spec, self._rank, box)
        pairs = zip(box, region.box, strict=True)
        return self._region(spec, region)[
            tuple(slice(start - origin, stop - origin) for (start, stop), (origin, _) in pairs)
        ]

    def padding(self, spec: TensorSpec) -> Iterator[Tensor]:
        """Yield the padding, which belongs to no logical element: the end of a dim."""
        for region in self._holdings.regions(spec, self._rank):
            for dim, ((start, stop), size) in enumerate(zip(region.box, region.local_shape, strict=True)):
                if stop - start < size:
                    yield self._region(spec, region).narrow(dim, stop - start, size - (stop - start))

    def _region(self, spec: TensorSpec, region: Shard) -> Tensor:
        flat = self._flat[spec.name]
        return flat[region.offset : region.offset + math.prod(region.local_shape)].view(region.local_shape)


@dataclass
class Moves:
    """Copies between views, ready to be carried out.

    Attributes:
        to: Written.
        out_of: Read, one for each of ``to``.
        converted: Written, a scratch of the traveling dtype, and read: where neither end has that dtype.
    """

    to: list[Tensor] = field(default_factory=list)
    out_of: list[Tensor] = field(default_factory=list)
    converted: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    _groups: list[_Group] | None = None

    def carry_out(self) -> None:
        """Copy everything."""
        if self._groups is None:
            self._groups = _groups(self.to, self.out_of)
        for group in self._groups:
            group.carry_out()
        for to, scratch, out_of in self.converted:
            scratch.copy_(out_of)
            to.copy_(scratch)


class _Group:
    """Copies of one kind.

    Args:
        to: Written.
        out_of: Read, one for each of ``to``.
    """

    def __init__(self, to: list[Tensor], out_of: list[Tensor]) -> None:
        self._ends = to, out_of

    def carry_out(self) -> None:
        torch._foreach_copy_(*self._ends, non_blocking=True)


class _WideGroup(_Group):
    """Copies within a GPU's memory, or over its links, in one launch; elements are of 16 bytes."""

    _addresses: list[int] | None = None
    _tables: dict[int, Tensor]

    def carry_out(self) -> None:
        from hybridflow.reshard import copy_kernel

        # What was released and restored is elsewhere.
        addresses = [each.data_ptr() for end in self._ends for each in end]
        if addresses != self._addresses:
            self._addresses, device = addresses, self._ends[0][0].device
            self._tables = {columns: table.to(device) for columns, table in copy_kernel.tables(*self._ends).items()}
        for columns, table in self._tables.items():
            copy_kernel.carry(table, columns)


def _groups(to: list[Tensor], out_of: list[Tensor]) -> list[_Group]:
    """Return copies in groups of one kind, as wide elements where memory allows it."""
    found: dict[Any, tuple[type[_Group], list[Tensor], list[Tensor]]] = {}
    for pair in zip(to, out_of, strict=True):
        is_wide = pair[0].dtype == pair[1].dtype and all(_is_in_wide_places(each) for each in pair)
        if is_wide:
            pair = pair[0].view(_WIDE), pair[1].view(_WIDE)
        kind = _WideGroup if is_wide and all(each.device.type == "cuda" for each in pair) else _Group
        # torch copies many at once if all are dense.
        is_dense = kind is _Group and all(each.is_contiguous() for each in pair)
        _, *ends = found.setdefault((kind, is_dense, pair[0].dtype, pair[1].dtype), (kind, [], []))
        for end, each in zip(ends, pair, strict=True):
            end.append(each)
    return [kind(*ends) for kind, *ends in found.values()]


def _is_in_wide_places(tensor: Tensor) -> bool:
    """Return whether memory can be taken as elements of 16 bytes: whole rows of them, at multiples of their size."""
    if not tensor.dim() or not tensor.numel() or tensor.stride(-1) != 1:
        return False
    per_element = _WIDE.itemsize // tensor.element_size()
    places = tensor.storage_offset(), tensor.shape[-1], *tensor.stride()[:-1]
    return tensor.data_ptr() % _WIDE.itemsize == 0 and not any(place % per_element for place in places)


def as_one_run(views: list[Tensor], dtypes: list[torch.dtype]) -> Tensor | None:
    """Return the joint memory of views that are adjacent in their traveling dtypes, ``[bytes]`` uint8; else None."""
    end = views[0].data_ptr()
    for view, dtype in zip(views, dtypes, strict=True):
        if view.dtype != dtype or view.data_ptr() != end or not view.is_contiguous():
            return None
        end += view.nbytes
    storage = views[0].untyped_storage()
    start = views[0].storage_offset() * views[0].element_size()
    size = end - views[0].data_ptr()
    if start + size > storage.nbytes():
        return None
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (size,), (1,))
