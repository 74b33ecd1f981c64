"""A model on a mesh: each rank has its stage and shard of the weights, which come from a source tensor by tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from hybridflow.checkpoint.formats.source import Source
from hybridflow.config.roles import LoRAConfig
from hybridflow.config.types import Fp8
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import CheckpointError
from hybridflow.families.family import OUTPUT, VALUE_HEAD
from hybridflow.families.model import ModelConfig
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.models.fsdp import local_part, shard_model
from hybridflow.models.gpt import Transformer, build_stage, set_rotary
from hybridflow.models.images import ImageReader
from hybridflow.models.layers import Chunks, chunks_of
from hybridflow.models.training import Trainable
from hybridflow.models.user_model import Uncut
from hybridflow.models.weights import initialize, local_regions, local_shards, local_tensors
from hybridflow.parallel.megatron import collection
from hybridflow.parallel.world import World
from hybridflow.reshard.execute import Resharder
from hybridflow.reshard.fsdp import weight_holdings
from hybridflow.reshard.memory import HostOffload
from hybridflow.reshard.spec import ModelSpec, Shard
from hybridflow.rollout.engine import MegatronEngine


class ModelOnMesh:
    """This rank's part of a model on a mesh; without weights until ``build``, and on a rank outside the mesh.

    Args:
        world: This rank and the others.
        mesh: Where the model is.
        model: Its settings, the vocabulary included.
        spec: How its tensors are cut.
        seed: Seed of what no source has: initial values, dropout of adapters.

    Attributes:
        model: Its settings, the vocabulary included.
        mesh: Where it is.
        spec: How its tensors are cut.
        vocab_size: Token ids that are chosen among.
        groups: This rank's process groups; None outside the mesh.
        transformer: This rank's stage and shard, or its virtual pipeline chunks; None outside the mesh.
    """

    groups: ProcessGroupCollection | None
    transformer: Transformer | Chunks | Uncut | None

    def __init__(self, world: World, mesh: DeviceMesh, model: ModelConfig, spec: ModelSpec, *, seed: int = 1) -> None:
        self.model, self.mesh, self.spec, self.vocab_size = model, mesh, spec, model.known_vocab_size
        self.groups = collection(world, mesh) if world.rank in mesh else None
        self.transformer = None
        self._world, self._seed = world, seed
        self._is_in_host_memory = False
        self._fp8: Fp8 = "none"
        self._offload: HostOffload | None = None
        self._trainable: Trainable | None = None

    def build(self, *, has_value_head: bool = False, lora: LoRAConfig | None = None) -> None:
        """Make this rank's stage and shard, of undefined values.

        Args:
            has_value_head: Values instead of logits.
            lora: Adapters.
        """
        assert self.groups is not None, "built on a rank of its mesh"
        layout = self.mesh.layout
        self.transformer = build_stage(
            self.model,
            layout,
            self.groups,
            self._world.device,
            vocab_size=self.model.known_vocab_size,
            has_value_head=has_value_head,
            lora=lora,
            seed=self._seed,
            is_empty=layout.fsdp > 1,
            fp8=self._fp8,
        )
        if layout.fsdp > 1:
            assert isinstance(self.transformer, Transformer), "FSDP goes with no other axis"
            layers = self.transformer.decoder.layers
            shard_model(self.transformer, layers, self._world, self.mesh, in_host_memory=self._is_in_host_memory)
            set_rotary(self.transformer, self.model, self._world.device)

    @property
    def megatron_model(self) -> Transformer | Chunks:
        """Return ``transformer`` where it is megatron-core's, not a user's own."""
        assert isinstance(self.transformer, Transformer | Chunks), "UserModel has methods of its own where this is read"
        return self.transformer

    def read_images(self, images: ImageReader) -> None:
        """Have the model read images."""
        for chunk in chunks_of(self.megatron_model):
            chunk.read_images(images)

    def make_engine(
        self,
        *,
        seed: int,
        max_concurrent: int,
        cache_memory: float = 0.5,
        tokenizer: Tokenizer | None = None,
        keeps_choices: bool = False,
    ) -> MegatronEngine:
        """Make an engine that generates with these weights; arguments as ``MegatronEngine`` takes them."""
        assert isinstance(self.transformer, Transformer), "a model that generates is in one piece: check_placement"
        return MegatronEngine(
            self.transformer,
            self.groups,
            vocab_size=self.vocab_size,
            seed=seed,
            max_concurrent=max_concurrent,
            cache_memory=cache_memory,
            ranks_per_node=min(self._world.ranks_per_node, self._world.size),
            tokenizer=tokenizer,
            keeps_choices=keeps_choices,
        )

    def shards(self, spec: ModelSpec | None = None) -> dict[str, tuple[Tensor, Shard]]:
        """Return the live weights of a model that FSDP does not shard, each with its part, see ``local_shards``.

        Args:
            spec: Some of its tensors; None: all.
        """
        self.settle()
        return local_shards(self.transformer, self.spec if spec is None else spec, self.mesh, self._world.rank)

    def tensors(self, spec: ModelSpec | None = None) -> dict[str, Tensor]:
        """Return the live weights by logical name, as a ``Resharder`` takes them; ``spec`` as for ``shards``."""
        self.settle()
        return local_tensors(self.transformer, self.spec if spec is None else spec, self.mesh, self._world.rank)

    def initialize(self, names: Collection[str] | None = None, variant: int = 0) -> None:
        """Set initial weights, of all tensors or of those named: a function of (seed, logical name, variant)."""
        where = self.mesh, self._world.rank
        std = self.model.init_std
        initialize(self.megatron_model, self.spec, *where, seed=self._seed, std=std, names=names, variant=variant)

    def keep_in_host_memory(self) -> None:
        """Move the weights away: from now on they are on the device within ``at_hand`` alone.

        Raises:
            ReshardError: The host has no room.
        """
        assert self.transformer is not None, "called within its mesh"
        owner = f"rank {self._world.rank}: weights of {self.mesh.name}"
        self._offload = HostOffload(map(local_part, self.transformer.parameters()), owner=owner)
        self._offload.offload()

    def settle(self) -> None:
        """Wait for weights that an optimizer step has left to be gathered, see ``Trainable.step``.

        Collective: dp, between two mini-batches of a step; else nothing is done.
        """
        if self._trainable is not None:
            self._trainable.gather()

    def at_hand(self, *, is_written: bool = False) -> contextlib.AbstractContextManager[None]:
        """Bring the weights to the device for the duration, also for a model that is kept in host memory.

        Args:
            is_written: They are changed within.

        Raises:
            ReshardError: The device has no room.
        """
        self.settle()
        return contextlib.nullcontext() if self._offload is None else self._offload.at_hand(is_written=is_written)

    @torch.no_grad()
    def load(self, source: Source, spec: ModelSpec | None = None) -> None:
        """Fill this rank's weights, in the model's own number format; padding rows of the vocabulary are 0.

        One logical tensor is in memory at a time, at most. A value head that the source lacks is initialized.

        Collective: of a ``GPTModel`` that is cut, the ranks that hold it.

        Args:
            source: Where the weights are.
            spec: Those of its tensors that are there; None: all.

        Raises:
            CheckpointError: The source's tensors are damaged, or not the model's; names the first.
        """
        spec = self.spec if spec is None else spec
        _check_tensors(source, spec)
        self.settle()
        held = local_regions(self.transformer, spec, self.mesh, self._world.rank)
        for name, regions in held.items():
            for region in regions if name in source.tensors else ():
                inside = region.cleared()
                if inside.numel() > 0:
                    inside.copy_(source.read_box(name, region.part.box, inside.dtype))
                source.release()
        if missing := held.keys() - source.tensors.keys():
            self.initialize(missing)


def copy_weights(world: World, source: ModelOnMesh, target: ModelOnMesh) -> None:
    """Copy the tensors that two models share; heads that only one has stay as they are.

    Collective: all ranks of both meshes; other ranks return at once.

    Args:
        world: This rank and the others.
        source: What is read; without weights on a rank outside its mesh.
        target: What is written, likewise.
    """
    if world.rank not in source.mesh and world.rank not in target.mesh:
        return
    names = {tensor.name for tensor in source.spec.tensors}
    # As the target has them: the second copy of an embedding that is tied in the source alone is not needed.
    shared = ModelSpec(
        tensors=tuple(tensor for tensor in target.spec.tensors if tensor.name in names),
        num_layers=target.spec.num_layers,
        is_part=True,
    )

    def held(model: ModelOnMesh) -> dict[str, Tensor] | None:
        return model.tensors(shared) if world.rank in model.mesh else None

    with target.at_hand(is_written=True):
        Resharder(
            world,
            shared,
            weight_holdings(shared, source.mesh),
            weight_holdings(shared, target.mesh),
            source_tensors=held(source),
            target_tensors=held(target),
            # For a single copy it does not pay to open the source's memory to the node.
            transport="torch",
        ).run()


def _check_tensors(source: Source, spec: ModelSpec) -> None:
    """Refuse a source whose tensors are not the model's. Heads may differ: a critic may start from a language model."""
    expected = {tensor.name: tensor.shape for tensor in spec.tensors}
    for name in [*expected, *source.tensors]:
        found = tuple(source.tensors[name].shape) if name in source.tensors else None
        is_new_head = name == VALUE_HEAD and not source.has_value_head
        is_old_head = name == OUTPUT and VALUE_HEAD in expected
        if found != expected.get(name) and not is_new_head and not is_old_head:
            raise CheckpointError(
                f"{source.path}: {name}: found {'no such tensor' if found is None else list(found)}, expected "
                f"{list(expected[name]) if name in expected else 'no such tensor'}; give the directory of a model of "
                "these settings"
            )
