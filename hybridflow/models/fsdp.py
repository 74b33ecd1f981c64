"""Models that torch's FSDP2 shards: each layer's weights are gathered before it computes, and freed after it.

``reshard/fsdp.py`` says which rank holds what. Every forward and backward pass is a collective of all ranks of the
mesh, so a rank with fewer micro-batches than another computes one that counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hybridflow.config.roles import OptimizerConfig
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.models.adam import Adam
from hybridflow.models.gpt import Transformer
from hybridflow.models.lora import Dropout
from hybridflow.models.microbatch import MicroBatch, pack
from hybridflow.models.training import LossFunction, count_work, sum_over
from hybridflow.models.user_model import Uncut
from hybridflow.parallel.world import World

Output = Callable[[MicroBatch], Tensor]
"""What a model gives for the rows of a micro-batch."""


def freeze_buffers(model: Uncut) -> None:
    """Make the buffers that a module saves parameters that are not trained, in place: FSDP shards parameters alone.

    A number of no dims, which FSDP does not shard, becomes a list of one.
    """
    held = {id(tensor) for _, tensor in model.tensors()}
    for module in [*model.modules()]:
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            is_trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
            if id(tensor) in held and not (isinstance(tensor, nn.Parameter) and tensor.dim()):
                delattr(module, name)
                shape = tuple(tensor.shape) or (1,)
                module.register_parameter(name, nn.Parameter(tensor.detach().view(shape), requires_grad=is_trained))


def shard_model(
    model: nn.Module, layers: Iterable[nn.Module], world: World, mesh: DeviceMesh, *, in_host_memory: bool = False
) -> None:
    """Shard a model's parameters over the ranks of its mesh, in place. Those on ``meta`` get undefined values.

    One layer is whole in memory at a time, and what is in no layer.

    Args:
        model: The model; all of its parameters take part.
        layers: Its transformer layers, each of which is gathered as one.
        world: This rank and the others.
        mesh: Where the model is.
        in_host_memory: Shards, and the gradients of them, are in host memory, pinned where the device is a GPU. A layer
            comes to the device to compute.
    """
    settings: dict[str, Any] = dict(
        mesh=_torch_mesh(world, mesh),
        reshard_after_forward=not mesh.layout.keeps_gathered,
        # Else gradients in bf16 are summed over the ranks in bf16.
        mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),
    )
    if in_host_memory:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    for layer in layers:
        _materialize(layer, world.device)
        fully_shard(layer, **settings)
    _materialize(model, world.device)
    fully_shard(model, **settings)
    for module in _sharded(model):
        # The sum over replicas is wanted, not the mean: a loss is divided by the global batch's counts.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _torch_mesh(world: World, mesh: DeviceMesh) -> TorchMesh:
    """Return a mesh over process groups that exist: of one dim, or replicas of shards."""
    device, shards = world.device.type, world.group(mesh.shard_ranks(world.rank))
    if mesh.layout.fsdp == mesh.layout.dp:
        return TorchMesh.from_group(shards, device, mesh_dim_names=("shard",))
    return TorchMesh.from_group(
        [world.group(mesh.twin_ranks(world.rank)), shards],
        device,
        mesh=torch.tensor(mesh.ranks).view(-1, mesh.layout.fsdp),
        mesh_dim_names=("replicate", "shard"),
    )


def _materialize(module: nn.Module, device: torch.device) -> None:
    """Give what is on ``meta`` memory, but for what is sharded already."""
    for each in module.modules():
        own = [*each._parameters.values(), *each._buffers.values()]
        if any(tensor is not None and tensor.is_meta for tensor in own):
            each.to_empty(device=device, recurse=False)


def _sharded(model: nn.Module) -> Iterator[FSDPModule]:
    yield from (module for module in model.modules() if isinstance(module, FSDPModule))


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a parameter, live; a tensor that is not sharded is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def in_step(micro_batches: list[MicroBatch], group: dist.ProcessGroup, device: torch.device) -> Iterator[MicroBatch]:
    """Yield a rank's micro-batches, then as many without samples as make all ranks have equally many.

    Collective: the group.
    """
    most = torch.tensor(len(micro_batches), device=device)
    if group.size() > 1:
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    yield from micro_batches
    for _ in range(int(most) - len(micro_batches)):
        yield pack([0], [torch.zeros(2, dtype=torch.int64)], [1], device)


@torch.no_grad()
def forward_in_step(
    model: nn.Module,
    output: Output,
    group: dist.ProcessGroup,
    micro_batches: list[MicroBatch],
    device: torch.device,
    compute: Callable[..., Any],
) -> list[Any]:
    """Run forward passes without gradients; return ``compute(output, micro-batch)`` of each micro-batch.

    Collective: the group, all ranks of the mesh.
    """
    if isinstance(model, Transformer):
        count_work(model, micro_batches, 1)
    kept = []
    for number, micro_batch in enumerate(in_step(micro_batches, group, device)):
        found = output(micro_batch)
        if number < len(micro_batches):
            kept.append(compute(found, micro_batch))
    for module in _sharded(model):
        # No backward pass follows, which would free what is still gathered.
        module.reshard()
    return kept


class FsdpTrainable(Adam):
    """A sharded model in training, with what ``training.Trainable`` has. Each rank steps its part.

    Args:
        model: From ``shard_model``.
        parameters: Its parameters by logical name.
        output: What it gives for a micro-batch.
        group: All ranks of the mesh.
        shard_group: Those that hold the other parts.
        device: Where the model computes. Its parts may be in host memory: the optimizer then steps them there.
        settings: How it learns.

    Attributes:
        model: The model.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: dict[str, nn.Parameter],
        output: Output,
        group: dist.ProcessGroup,
        shard_group: dist.ProcessGroup,
        device: torch.device,
        settings: OptimizerConfig,
    ) -> None:
        self.model = model
        self._output, self._group, self._device, self._updates = output, group, device, 0
        self._is_frozen = not all(each.requires_grad for each in parameters.values())
        self._shard_group = shard_group
        super().__init__(parameters, settings, lambda each: local_part(each.detach()))

    @torch.enable_grad()
    def accumulate(self, micro_batches: list[MicroBatch], loss: LossFunction) -> list[Any]:
        """Run forward and backward over this rank's micro-batches; each adds its gradients' sum over the ranks.

        Collective: all ranks of the mesh. A rank without samples passes no micro-batch and still takes part.

        Returns:
            What ``loss`` gave beside the loss for each micro-batch.
        """
        self._gradients.zero_()
        dropout = getattr(self.model, "dropout", None)
        if isinstance(dropout, Dropout):
            dropout.update = self._updates
        if isinstance(self.model, Uncut):
            self.model.train()
        if isinstance(self.model, Transformer):
            count_work(self.model, micro_batches, 1, is_training=True, is_frozen=self._is_frozen)
        kept = []
        for number, micro_batch in enumerate(in_step(micro_batches, self._group, self._device)):
            output = self._output(micro_batch)
            if number < len(micro_batches):
                share, found = loss(output, micro_batch)
                share.backward()
                kept.append(found)
            else:
                output.backward(torch.zeros_like(output))
            self.take_gradients()
        if isinstance(self.model, Uncut):
            self.model.eval()
        return kept

    def step(self, *, is_followed: bool = False) -> float:
        """See ``Adam.step``. Collective: the shard group."""
        self._updates += 1
        return super().step(is_followed=is_followed)

    def _norm(self) -> float:
        """Return the norm of the gradients of all parts. Collective: the shard group."""
        square = torch.tensor(super()._norm(), dtype=torch.float64, device=self._device).square()
        return float(sum_over(self._shard_group)(square).sqrt())

    def set_num_steps(self, steps: int) -> None:
        """Go on as after so many optimizer steps."""
        self._updates = steps
        super().set_num_steps(steps)
