"""A model in training, to a model directory and back: weights, moments, fp32 masters, whatever the two layouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hybridflow.checkpoint.manifest import NAME, WEIGHT, OptimizerProgress
from hybridflow.checkpoint.model_dir import ModelDir, Share, within
from hybridflow.checkpoint.owners import Owned, owned_weights, writes_state
from hybridflow.errors import CheckpointError
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.models.gpt import Transformer
from hybridflow.models.layers import Chunks
from hybridflow.models.specs import logical_parameters
from hybridflow.models.training import Trainable
from hybridflow.models.weights import Region, local_regions, local_shards, regions_of
from hybridflow.reshard.memory import blocks
from hybridflow.reshard.optimizer import flat_regions
from hybridflow.reshard.spec import ModelSpec, Shard

STATE = ("exp_avg", "exp_avg_sq", "master")
"""Kinds of what an optimizer keeps; ``master`` where the weights are not fp32 themselves."""

_ALIGNED_BYTES = 512


class Shares:
    """What a rank writes of a model: which boxes is decided once, what is in them at each save.

    Args:
        model: This rank's part.
        spec: The whole model's tensors.
        mesh: Where the model is.
        rank: This one.
        trainable: Its optimizer; None of a frozen model.
    """

    def __init__(
        self, model: Transformer | Chunks, spec: ModelSpec, mesh: DeviceMesh, rank: int, trainable: Trainable | None
    ) -> None:
        self._model, self._spec, self._mesh, self._rank, self._trainable = model, spec, mesh, rank, trainable
        self._is_sharded = mesh.layout.fsdp > 1
        self._weights = () if self._is_sharded else owned_weights(spec, mesh)[rank]
        self._states = writes_state(spec, mesh, rank)
        self._host: list[Tensor] = []

    def trained(self) -> tuple[str, ...]:
        """Return the tensors held here that have state, on this rank or another."""
        if self._trainable is None:
            return ()
        parameters = logical_parameters(self._model)
        return tuple(name for name, parameter in parameters.items() if parameter.requires_grad)

    def progress(self) -> OptimizerProgress | None:
        """Return the optimizer's steps and rate; None without one, or where this rank keeps no state with them."""
        if self._trainable is None:
            return None
        num_steps, rate = self._trainable.num_steps(), self._trainable.learning_rate()
        return None if num_steps is None or rate is None else OptimizerProgress(num_steps, rate)

    def now(self) -> Iterator[Share]:
        """Yield the shares as views of live storage: their values change with the model."""
        if self._is_sharded:
            yield from self._ranges()
            return
        shards = local_shards(self._model, self._spec, self._mesh, self._rank)
        weights = {name: local for name, (local, _) in shards.items()}
        yield from self._boxes(WEIGHT, self._weights, weights, shards)
        if self._trainable is None:
            return
        state, ranges = self._trainable.state(), self._trainable.state_ranges()
        for kind in STATE:
            if self._trainable.is_distributed:
                for name, flat in state[kind].items():
                    # A range of a parameter as boxes, without padding.
                    if name in self._states:
                        yield from _shares_of(
                            kind, name, regions_of(flat, flat_regions(shards[name][1], *ranges[name]))
                        )
            else:
                local = {name: flat.view(shards[name][1].local_shape) for name, flat in state[kind].items()}
                yield from self._boxes(kind, self._weights, local, shards)

    def _ranges(self) -> Iterator[Share]:
        """Yield the shares of a model that FSDP shards: state lies as the weights do."""
        regions = local_regions(self._model, self._spec, self._mesh, self._rank)
        state = {} if self._trainable is None else self._trainable.state()
        for name, held in regions.items():
            if name not in self._states:
                continue
            yield from _shares_of(WEIGHT, name, held)
            for kind in STATE:
                if name in state.get(kind, {}):
                    yield from _shares_of(kind, name, regions_of(state[kind][name], [each.part for each in held]))

    def copied(self) -> list[Share]:
        """Return the shares as they are now, in host memory, pinned where the model is on a GPU.

        The memory is kept, since taking it anew costs several times what filling it does: the next call overwrites
        what this one gave.
        """
        shares = list(self.now())
        if len(self._host) != len(shares):
            self._host = _host_like([share.values for share in shares])
        found = []
        for share, host in zip(shares, self._host, strict=True):
            found.append(share._replace(values=host.copy_(share.values, non_blocking=True)))
        if shares and shares[0].values.is_cuda:
            torch.cuda.current_stream(shares[0].values.device).synchronize()
        return found

    def _boxes(
        self, kind: str, boxes: Iterable[Owned], local: Mapping[str, Tensor], shards: Mapping[str, tuple[Tensor, Shard]]
    ) -> Iterator[Share]:
        for name, box in boxes:
            if name in local:
                yield Share(kind, name, box, local[name][within(box, shards[name][1].box)].detach())


def _host_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return host memory of the tensors' sizes, in few slabs, pinned where the tensors are on a GPU.

    A slab is a power of two, to which torch rounds pinned memory up. The largest tensors come first. Each takes the
    first slab that has room for it.
    """
    sizes = [-(-tensor.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for tensor in tensors]
    found: dict[int, Tensor] = {}
    slabs: list[Tensor] = []
    for index in sorted(range(len(tensors)), key=lambda each: -sizes[each]):
        tensor, size = tensors[index], sizes[index]
        if not any(len(room) >= size for room in slabs):
            rest = sum(sizes) - sum(sizes[each] for each in found)
            num_bytes = max(blocks(rest)[0], 1 << (size - 1).bit_length())
            slabs.append(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=tensor.is_cuda))
        place = next(place for place, room in enumerate(slabs) if len(room) >= size)
        found[index] = slabs[place][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        slabs[place] = slabs[place][size:]
    return [found[index] for index in range(len(tensors))]


def _shares_of(kind: str, name: str, regions: Iterable[Region]) -> Iterator[Share]:
    """Yield regions without padding, and none that are padding alone."""
    for region in regions:
        if region.inside.numel() > 0:
            yield Share(kind, name, region.part.box, region.inside.detach())


def load_model(source: ModelDir, model: Transformer | Chunks, spec: ModelSpec, mesh: DeviceMesh, rank: int) -> None:
    """Fill a model's weights from a directory, whatever layout wrote it; padding becomes zero.

    Raises:
        CheckpointError: The directory is of another model, or damaged.
    """
    _check_tensors(source, spec)
    with torch.no_grad():
        for name, regions in local_regions(model, spec, mesh, rank).items():
            for region in regions:
                _fill(source, WEIGHT, name, region)


def load_training(source: ModelDir, trainable: Trainable, spec: ModelSpec, mesh: DeviceMesh, rank: int) -> None:
    """Make a model in training go on where the one that was written stood: weights, state, step count, learning rate.

    Raises:
        CheckpointError: The directory is of another model, holds no optimizer, or is damaged.
    """
    progress = source.manifest.progress
    if progress is None:
        raise CheckpointError(
            f"{source.path / NAME}: holds no optimizer's state; give a directory that a training run has written"
        )
    load_model(source, trainable.model, spec, mesh, rank)
    held = local_regions(trainable.model, spec, mesh, rank)
    state, ranges = trainable.state(), trainable.state_ranges()
    with torch.no_grad():
        for kind in STATE:
            for name, flat in state[kind].items():
                parts = [each.part for each in held.get(name, ())]
                if mesh.layout.fsdp == 1:
                    parts = [*flat_regions(parts[0], *ranges[name])]
                for region in regions_of(flat, parts):
                    _fill(source, kind, name, region)
    trainable.set_num_steps(progress.num_steps)
    trainable.set_learning_rate(progress.learning_rate)


def _fill(source: ModelDir, kind: str, name: str, region: Region) -> None:
    """Read a part into live storage, and give back what reading it took."""
    inside = region.cleared()
    if inside.numel() > 0:
        source.read_into(kind, name, region.part.box, inside)
        source.release()


def _check_tensors(source: ModelDir, spec: ModelSpec) -> None:
    path = source.path / NAME
    found, expected = source.manifest.tensors.get(WEIGHT, {}), {tensor.name: tensor.shape for tensor in spec.tensors}
    for name in [*expected, *found]:
        here = list(found[name].shape) if name in found else "no such tensor"
        wanted = list(expected[name]) if name in expected else "no such tensor"
        if here != wanted:
            raise CheckpointError(f"{path}: {name}: found {here}, expected {wanted}; is it of another model?")
