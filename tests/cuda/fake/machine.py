"""A CUDA machine of fake tensors: they have device, dtype and shape, and no memory."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from types import SimpleNamespace

import megatron.core.tensor_parallel.random as megatron_random
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.parallel import cpu
from hybridflow.parallel.megatron import collection, rank_sets
from hybridflow.parallel.world import World

DEVICE = torch.device("cuda", 0)
PROCESSORS = 132

_VIEWS = frozenset(
    {
        "view",
        "_unsafe_view",
        "t",
        "transpose",
        "unsqueeze",
        "squeeze",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "permute",
        "detach",
        "expand",
        "as_strided",
        "alias",
        "unbind",
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "lift_fresh",
        "flatten",
        "reshape",
        "_reshape_alias",
        "unflatten",
        "chunk",
        "device",
        "size",
        "stride",
        "is_contiguous",
    }
)
"""Operators that start no kernel."""


class Launches(TorchDispatchMode):
    """Counts operators that start a kernel, and the bytes of the tensors that they read and write.

    Attributes:
        names: How often each was started.
        num_bytes: Bytes of all their tensors.
        made_bytes: Bytes of all tensors that were made, views apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.num_bytes = self.made_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        name = function._schema.name.split("::")[1]
        read = {id(each.untyped_storage()) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        made = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
        self.made_bytes += sum(each.nbytes for each in made if id(each.untyped_storage()) not in read)
        if name not in _VIEWS:
            self.names[name] += 1
            # What is written is an argument and, often, the result too.
            tensors = {id(each): each for each in tree_leaves((args, kwargs, found)) if isinstance(each, Tensor)}
            self.num_bytes += sum(each.numel() * each.element_size() for each in tensors.values())
        return found


class Peak(TorchDispatchMode):
    """Follows the bytes of the tensors that are made and not yet freed.

    Attributes:
        most_bytes: The most that there were at one time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most_bytes = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        # What was there before does not count, nor do views of it.
        self._follow((args, kwargs), is_new=False)
        found = function(*args, **(kwargs or {}))
        self._follow(found, is_new=True)
        self.most_bytes = max(self.most_bytes, self.held_bytes)
        return found

    @property
    def held_bytes(self) -> int:
        """Return the bytes that there are now."""
        return sum(self._alive.values())

    def _follow(self, tree, *, is_new: bool) -> None:
        for storage in (each.untyped_storage() for each in tree_leaves(tree) if isinstance(each, Tensor)):
            if storage._cdata not in self._alive:
                self._alive[storage._cdata] = storage.nbytes() if is_new else 0
                weakref.finalize(storage, self._alive.pop, storage._cdata)


def _cast(model: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """Do as ``Module.to``, which swaps tensors that have weak references; these are on their device already."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dtype != dtype:
                cast = torch.nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
                marks = parameter.__dict__.items()
                cast.__dict__.update({mark: value for mark, value in marks if mark not in cast.__dict__})
                setattr(module, name, cast)
    return model


@contextlib.contextmanager
def fake_cuda(monkeypatch, rank: int = 0, size: int = 1):
    """Let CUDA tensors be made that have no memory; yields the world of one rank of so many.

    Anything that asks for the content of a tensor raises ``DataDependentOutputException``, and an operator whose
    tensors are on different devices raises too.
    """
    monkeypatch.setattr(cpu, "use_cpu_for_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=PROCESSORS)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    tracker = megatron_random.CudaRNGStatesTracker
    monkeypatch.setattr(tracker, "fork", lambda self, name=None: contextlib.nullcontext())
    monkeypatch.setattr(tracker, "add", lambda self, name, seed: None)
    monkeypatch.setattr(torch.nn.Module, "to", _cast)
    # Fake tensors know no pinned memory.
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    world = World.__new__(World)
    world.rank, world.size, world.ranks_per_node, world.device = rank, size, 8, DEVICE
    world._groups, world.deadline_s = {}, 60.0
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield world
    finally:
        dist.destroy_process_group()


def place(world: World, layout: ParallelLayout):
    """Return a mesh of all ranks, and this rank's groups in it."""
    mesh = DeviceMesh(name="fake", layout=layout, ranks=tuple(range(layout.world_size)), ranks_per_node=8)
    world.make_groups(rank_sets([mesh], world.size))
    return mesh, collection(world, mesh)
