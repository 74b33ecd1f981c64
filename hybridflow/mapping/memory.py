"""How much memory of its accelerator each rank of a job needs, before a job is there. No torch.

Weights, gradients and optimizer state are counted tensor by tensor and are exact, but for the padding of the buffers
that gradients are reduced in. Those of a model that runs in ``transformers`` are read off the files of its weights;
where these are not there, rough sizes count. Caches and activations are upper bounds from the formulas below. A cache
whose budget is a share of what is free is counted as large as it would ever be, and what of it can be done without is
told beside. What is not counted: the CUDA context and the buffers of NCCL, what the allocator loses between blocks, and
that some experts get more tokens than others.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from hybridflow.config.recipe import CRITICS, FROZEN, MODEL_MESHES, REWARDS, Recipe
from hybridflow.config.roles import LoRAConfig, OptimizerConfig
from hybridflow.families.family import OUTPUT, ROUTER_BIASES
from hybridflow.families.fp8 import LAYERS
from hybridflow.families.images import image_elements, image_settings
from hybridflow.families.model import ModelConfig
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.mapping.activations import activation_bytes, decoding_bytes
from hybridflow.mapping.hardware import Hardware, hardware
from hybridflow.mapping.named import adapters_of, spec_of_files
from hybridflow.models.adapters import adapter_spec, parts_of
from hybridflow.models.shapes import LAYER_SCALAR, cached_token_bytes, model_spec, state_bytes
from hybridflow.recipe.meshes import reference_is_base
from hybridflow.reshard.fsdp import weight_holdings
from hybridflow.reshard.holdings import Holdings, WeightHoldings, tensors_alike
from hybridflow.reshard.optimizer import OptimizerHoldings, bucket_elements
from hybridflow.reshard.plan import aliases, held_bytes, shares_storage
from hybridflow.reshard.spec import ITEM_BYTES, ModelSpec, TensorSpec
from hybridflow.rollout.blocks import BLOCK_TOKENS, PANEL, kept_states

USABLE = 0.9
"""Share of a GPU's memory that a job may need by our estimate, which leaves out contexts, buffers and fragmentation."""

_MICRO_BATCHES = (16384, 8192, 4096, 2048, 1024)
_STAGED_MICRO_BATCH = 4096
"""Most tokens where there are pipeline stages: fewer micro-batches leave stages idle."""

_FP32_BYTES = ITEM_BYTES["fp32"]


@dataclass(frozen=True, kw_only=True)
class MeshMemory:
    """Memory that a rank has for one model, in bytes.

    Attributes:
        mesh: Name of the mesh, as in ``plan job``.
        weights: Parameters; of ``actor.rollout`` only those that it does not share with ``actor.update``, and in fp32
            the copy, in another layout, with which a CPU generates; of ``actor.update`` the copies in FP8, too.
        gradients: Summed in fp32.
        optimizer: Two moments, and fp32 weights where the model's own are not.
        cache: Keys and values of the sequences being decoded; of vLLM all that it takes of a GPU.
        activations: Most that forward and backward passes keep at one time, logits included.
        lasting: Of the weights of ``actor.rollout`` those that stay while the actor learns: what lies below adapters.
        room: What must be free for the cache to be as large, of which it takes ``rollout.cache_memory``.
    """

    mesh: str
    weights: int
    gradients: int = 0
    optimizer: int = 0
    cache: int = 0
    activations: int = 0
    lasting: int = 0
    room: int = 0

    @property
    def kept(self) -> int:
        """Return what stays from call to call."""
        return self.weights + self.gradients + self.optimizer

    @property
    def passing(self) -> int:
        """Return what it needs for a while."""
        return max(self.cache + self.activations, self.room)


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory that a rank needs for all models that it hosts, in bytes.

    Attributes:
        meshes: In the order of the job's meshes.
        rollout: While responses are generated and scored.
        update: While models learn.
        spare: What of ``rollout`` is cache beyond one sequence's, of which no more is taken than is free.
        resident: What of ``rollout`` is there when generating begins.
    """

    meshes: tuple[MeshMemory, ...]
    rollout: int
    update: int
    spare: int = 0
    resident: int = 0

    @property
    def peak(self) -> int:
        """Return the larger of the two phases."""
        return max(self.rollout, self.update)

    @property
    def least(self) -> int:
        """Return ``peak`` with the smallest cache."""
        return max(self.rollout - self.spare, self.update)


def job_memory(
    recipe: Recipe,
    meshes: Mapping[str, DeviceMesh],
    *,
    cached: int | None = None,
    gpu_bytes: float | None = None,
) -> tuple[RankMemory, ...]:
    """Return what each rank of a job needs, by rank.

    Args:
        recipe: The recipe.
        meshes: Of its models, as ``recipe.meshes.role_meshes`` gives them; others are passed over.
        cached: Tokens that the cache of the rollout has room for on a rank; None: as the recipe says. It says so in any
            case where ``rollout.cache_memory`` gives bytes.
        gpu_bytes: Memory of a GPU, of which vLLM takes a share; None: not known.
    """
    functions = [name for name in REWARDS if name in meshes and getattr(recipe, name).model is None]
    # What a server generates takes nothing here.
    silent = [] if recipe.generates and not recipe.rollout.engine.is_server else ["actor.rollout"]
    names = [name for name in MODEL_MESHES if name in meshes and name not in (*functions, *silent)]
    found: dict[int, list[MeshMemory]] = {rank: [] for rank in range(recipe.cluster.ranks)}
    for name in names:
        placed = _place(recipe, meshes, name)
        states = _states(recipe, placed, meshes[name])
        needed: dict[object, MeshMemory] = {}
        for rank in placed.mesh.ranks:
            # Of thousands of data-parallel peers nearly all step equally many elements.
            key = placed.kind(rank), None if states is None else states.num_elements(rank)
            if key not in needed:
                needed[key] = _mesh_memory(recipe, placed, meshes[name], states, rank, cached, gpu_bytes)
            found[rank].append(needed[key])
    if recipe.data.images_field is not None:
        for rank, part in _image_memory(recipe, meshes, names).items():
            found[rank].append(part)
    is_open = cached is None and recipe.rollout.engine.kind == "megatron"
    spare = _spare_bytes(recipe, meshes["actor.rollout"]) if is_open else 0
    away = frozenset(name for name in (*FROZEN, *CRITICS) if name in meshes and getattr(recipe, name).offload)
    is_offloaded = bool(recipe.actor.offload)
    added = functools.cache(functools.partial(rank_memory, away=away, spare=spare, is_offloaded=is_offloaded))
    return tuple(added(tuple(parts)) for parts in found.values())


def _image_memory(recipe: Recipe, meshes: Mapping[str, DeviceMesh], names: Collection[str]) -> dict[int, MeshMemory]:
    """Return what images take on ranks of first stages: vision towers, and what these made of the last images."""
    found: dict[int, dict[str, int]] = {}
    for name in names:
        tower, num_bytes = _image_bytes(recipe, name)
        for rank in meshes[name].ranks:
            if meshes[name].coordinate(rank).pp == 0:
                # Models of one directory share them.
                found.setdefault(rank, {})[tower] = num_bytes
    return {rank: MeshMemory(mesh="images", weights=sum(towers.values())) for rank, towers in found.items()}


def least_image_bytes(recipe: Recipe, names: Iterable[str]) -> int:
    """Return what images take at least on the first rank of any of these meshes, whatever its layout."""
    if recipe.data.images_field is None:
        return 0
    return min(_image_bytes(recipe, name)[1] for name in names)


def _image_bytes(recipe: Recipe, name: str) -> tuple[str, int]:
    """Return what images take on a first stage of a mesh's model, and what is equal for models that share it."""
    model = recipe.model_of(name)
    assert model.path is not None, "checked with the recipe"
    tower, num_elements = _image_elements(model.path, model.hidden_size)
    return f"{tower} {model.dtype}", ITEM_BYTES[model.dtype] * num_elements


@functools.lru_cache(maxsize=16)
def _image_elements(path: str, hidden_size: int) -> tuple[str, int]:
    """Return where the vision tower of a model is, and its numbers with those that are kept. Cached as ``_placed``."""
    settings = image_settings(Path(path))
    return settings.path, image_elements(settings, hidden_size)


@dataclass(frozen=True, kw_only=True)
class _Placed:
    """A model in its mesh, and in that of the update where the mesh is the rollout's; with adapters, if it has any."""

    model: ModelConfig
    spec: ModelSpec
    mesh: DeviceMesh
    update: DeviceMesh
    has_value_head: bool
    adapters: ModelSpec | None
    _own: dict[object, int] = field(default_factory=dict, compare=False)

    def kind(self, rank: int) -> object:
        """Return a key that is equal for ranks with equal needs but for the state of a distributed optimizer."""
        place = self.mesh.coordinate(rank)
        if self.mesh.name != "actor.rollout":
            # Tensor-parallel peers hold equally much, and so do data-parallel ones.
            return place.pp
        shared = self.update.coordinate(rank) if rank in self.update else None
        return place.pp, place.tp, None if shared is None else (shared.pp, shared.tp)

    @functools.cached_property
    def states(self) -> OptimizerHoldings:
        """Return where megatron-core's distributed optimizer keeps its state, with buckets as on a GPU."""
        return OptimizerHoldings(self.trained, self.mesh, bucket_elements(self.mesh.layout))

    @functools.cached_property
    def trained(self) -> ModelSpec:
        """Return the tensors that have gradients, if any has."""
        if self.adapters is not None:
            return self.adapters
        # The bias of a router is no parameter, nor is what a layer's output is scaled by.
        buffers = (*ROUTER_BIASES, f".{LAYER_SCALAR}")
        tensors = tuple(tensor for tensor in self.spec.tensors if not tensor.name.endswith(buffers))
        return replace(self.spec, tensors=tensors)

    @functools.cached_property
    def whole(self) -> ModelSpec:
        """Return all tensors."""
        if self.adapters is None:
            return self.spec
        return replace(self.spec, tensors=(*self.spec.tensors, *self.adapters.tensors))

    @functools.cached_property
    def stage_bytes(self) -> dict[int, int]:
        """Return the weights of a rank of each stage, in bytes."""
        return self._bytes_of(self.whole)

    @functools.cached_property
    def trained_bytes(self) -> dict[int, int]:
        """Return the weights of a rank of each stage that have gradients, in bytes, if any has."""
        return self._bytes_of(self.trained)

    def gathered_bytes(self, copies: int) -> int:
        """Return the bytes of what FSDP gathers: two layers and what is in none, or all; 0 where nothing is sharded."""
        if self.mesh.layout.fsdp == 1:
            return 0
        sizes = Counter[object]()
        for tensor in self.whole.tensors:
            sizes[tensor.place if isinstance(tensor.place, int) else "rest"] += tensor.num_bytes
        rest = sizes.pop("rest", 0)
        layers = sorted(sizes.values(), reverse=True)
        return copies * (rest + sum(layers if self.mesh.layout.keeps_gathered else layers[:2]))

    def _bytes_of(self, spec: ModelSpec) -> dict[int, int]:
        held = weight_holdings(spec, self.mesh)
        alike = tensors_alike(spec, held)
        ranks = {stage: self.mesh.first_of_stage(stage) for stage in range(self.mesh.layout.pp)}
        return {
            stage: sum(count * held_bytes(one, held, rank) for one, count in alike) for stage, rank in ranks.items()
        }

    def own_bytes(self, rank: int, *, is_apart: bool, is_base: bool = False) -> int:
        """Return the bytes of the rollout's weights that are no views of the update's.

        Args:
            rank: The rank.
            is_apart: Whether no weights are views, as of ``ActorConfig.keeps_rollout_apart``.
            is_base: Whether to leave out adapters.
        """
        if shares_storage(self.update, self.mesh) and not is_apart:
            return 0
        key = self.kind(rank), is_apart, is_base
        if key not in self._own:
            self._own[key] = self._own_bytes(rank, is_apart=is_apart, is_base=is_base)
        return self._own[key]

    def _own_bytes(self, rank: int, *, is_apart: bool, is_base: bool) -> int:
        source, target = self._ends
        return sum(
            count * held_bytes(one, target, rank)
            for one, count in (self._base_alike if is_base else self._whole_alike)
            if is_apart or not aliases(one, source, target, rank)
        )

    @functools.cached_property
    def _ends(self) -> tuple[Holdings, Holdings]:
        return weight_holdings(self.spec, self.update), WeightHoldings(self.spec, self.mesh)

    @functools.cached_property
    def _base_alike(self) -> list[tuple[ModelSpec, int]]:
        return tensors_alike(self.spec, *self._ends)

    @functools.cached_property
    def _whole_alike(self) -> list[tuple[ModelSpec, int]]:
        return tensors_alike(self.whole, *self._ends)


def _place(recipe: Recipe, meshes: Mapping[str, DeviceMesh], name: str) -> _Placed:
    model, has_value_head = recipe.sized_model_of(name), recipe.has_value_head(name)
    lora = recipe.actor.lora if name.startswith("actor.") else None
    return _placed(model, model.path, lora, meshes[name], meshes["actor.update"], has_value_head)


@functools.lru_cache(maxsize=256)
def _placed(
    model: ModelConfig,
    path: str | None,
    lora: LoRAConfig | None,
    mesh: DeviceMesh,
    update: DeviceMesh,
    has_value_head: bool,
) -> _Placed:
    """Return a model in its mesh, or in one that cuts weights equally.

    Cached: a search asks often. Models that differ in their ``path`` alone are equal, so it is asked for beside.
    """
    spec, adapters = _specs(model, path, has_value_head), None
    if lora is not None:
        # Tensors that settings tell have our names, and others are part of what a directory has.
        adapters = adapters_of(spec, model, lora) if spec.is_part else adapter_spec(model, lora)
    return _Placed(
        model=model,
        spec=spec,
        adapters=adapters,
        mesh=mesh,
        update=update,
        has_value_head=has_value_head,
    )


@functools.lru_cache(maxsize=16)
def _specs(model: ModelConfig, path: str | None, has_value_head: bool) -> ModelSpec:
    named = None
    if model.implementation == "transformers" and path is not None:
        named = spec_of_files(Path(path), model, has_value_head=has_value_head)
    return model_spec(model, has_value_head=has_value_head) if named is None else named


def _states(recipe: Recipe, placed: _Placed, mesh: DeviceMesh) -> OptimizerHoldings | None:
    """Return where the state of a distributed optimizer is; None: there is none, or each rank steps all it holds."""
    if mesh.name == "actor.rollout" or mesh.name in FROZEN:
        return None
    settings: OptimizerConfig = getattr(recipe, mesh.role).optimizer
    # Replicas of a model in transformers each hold all of it.
    is_distributed = settings.distributed and placed.model.implementation == "megatron" and mesh.layout.fsdp == 1
    return placed.states if is_distributed else None


def _mesh_memory(
    recipe: Recipe,
    placed: _Placed,
    mesh: DeviceMesh,
    states: OptimizerHoldings | None,
    rank: int,
    cached: int | None,
    gpu_bytes: float | None,
) -> MeshMemory:
    model, name = placed.model, mesh.name
    if name == "actor.rollout":
        return _rollout_memory(recipe, placed, rank, cached, gpu_bytes)
    stage, section = mesh.coordinate(rank).pp, getattr(recipe, mesh.role)
    # What is always in host memory takes none of the accelerator but for what is gathered.
    share = 0 if section.offload == "always" else 1
    weights = share * placed.stage_bytes[stage]
    if name == "actor.update" and recipe.actor.fp8 != "none":
        weights += fp8_bytes(placed.spec, mesh, rank)
    activations = activation_bytes(recipe, model, mesh, rank, has_value_head=placed.has_value_head)
    if name in FROZEN:
        is_base = reference_is_base(recipe, {name: mesh, "actor.update": placed.update})
        return MeshMemory(
            mesh=name,
            weights=0 if is_base else weights,
            activations=activations + placed.gathered_bytes(copies=1),
        )
    trained = placed.trained_bytes[stage]
    return MeshMemory(
        mesh=name,
        weights=weights,
        gradients=share * gradient_bytes(trained, model),
        optimizer=share * optimizer_bytes(states, rank, model, trained),
        # With its gradients, which are summed in fp32.
        activations=activations + placed.gathered_bytes(copies=1 + 4 // ITEM_BYTES[model.dtype]),
    )


def _rollout_memory(
    recipe: Recipe, placed: _Placed, rank: int, cached: int | None, gpu_bytes: float | None
) -> MeshMemory:
    """Return what generating needs. vLLM's share of a GPU holds its own weights too, which are loaded from ours."""
    model, mesh = placed.model, placed.mesh
    is_apart = recipe.actor.keeps_rollout_apart
    copied = placed.own_bytes(rank, is_apart=is_apart)
    base = 0 if placed.adapters is None else placed.own_bytes(rank, is_apart=is_apart, is_base=True)
    lasting = copied if recipe.actor.reshard_every > 1 else base
    is_vllm = recipe.rollout.engine.kind == "vllm"
    if is_vllm and gpu_bytes is not None:
        return MeshMemory(mesh=mesh.name, weights=copied, lasting=lasting, cache=vllm_bytes(recipe, gpu_bytes))
    # A cache whose bytes are given has them, whatever goes into it.
    is_given = cached is None or recipe.rollout.cache_memory >= 1
    cache = cache_bytes(recipe, model, mesh)
    if not is_given:
        cache = (cached or 0) * cached_token_bytes(model, mesh.layout) + _states_bytes(recipe, model, mesh)
    beside = placed.stage_bytes[0] if is_vllm else packed_bytes(placed.spec, model, mesh, rank)
    # A CPU in fp32 merges adapters into its packed matrices.
    lora = None if beside else recipe.actor.lora
    joined = 0 if lora is None else joined_bytes(placed.spec, lora, mesh, rank)
    return MeshMemory(
        mesh=mesh.name,
        weights=copied + beside + joined,
        lasting=lasting + joined,
        cache=cache,
        room=0 if cached is None else cache_room(recipe, cache),
        activations=decoding_bytes(recipe, model, mesh, rank, recipe.rollout.max_concurrent),
    )


def rank_memory(parts: tuple[MeshMemory, ...], away: Collection[str], spare: int, *, is_offloaded: bool) -> RankMemory:
    """Add up models on one rank, which compute one after the other.

    Memory that they keep adds up. Of memory that they use for a while the largest counts.

    Weights of a frozen model in host memory are used for a while, too, and so are gradients and optimizer of a critic.
    """
    used = {part.mesh: _passing_kept(part) for part in parts if part.mesh in away}
    permanent = sum(part.kept - used.get(part.mesh, 0) for part in parts if part.mesh != "actor.rollout")
    idle = sum(part.gradients + part.optimizer for part in parts if part.mesh == "actor.update" and is_offloaded)
    rollout_weights = sum(part.weights for part in parts if part.mesh == "actor.rollout")
    passing = {part.mesh: part.passing + used.get(part.mesh, 0) for part in parts}
    sampling, *scoring = [passing.pop(mesh, 0) for mesh in ("actor.rollout", *REWARDS)]
    # What generates on ranks of its own stays there, and what adapters are added to.
    hosts_update = any(part.mesh == "actor.update" for part in parts)
    staying = sum(part.lasting for part in parts) if hosts_update else rollout_weights
    resident = permanent - idle + rollout_weights
    return RankMemory(
        meshes=parts,
        rollout=resident + max(sampling, *scoring),
        update=permanent + staying + max(passing.values(), default=0),
        spare=min(spare, max(0, sampling - max(scoring))),
        resident=resident,
    )


def _passing_kept(part: MeshMemory) -> int:
    """Return the bytes of a model that are in host memory while it is not in use."""
    return part.gradients + part.optimizer if part.mesh in CRITICS else part.kept


def fp8_bytes(spec: ModelSpec, mesh: DeviceMesh, rank: int) -> int:
    """Return the 8-bit copies of the weights of linear layers: one for forward passes, its transpose for gradients.

    Scales are not counted: at most one byte for 32 numbers.
    """
    held = WeightHoldings(spec, mesh)
    return 2 * sum(
        math.prod(region.local_shape)
        for tensor in spec.tensors
        if tensor.name.endswith(LAYERS)
        for region in held.regions(tensor, rank)
    )


def gradient_bytes(weight_bytes: int, model: ModelConfig) -> int:
    """Return the bytes of a gradient in fp32 for each weight."""
    return weight_bytes // ITEM_BYTES[model.dtype] * _FP32_BYTES


def optimizer_bytes(states: OptimizerHoldings | None, rank: int, model: ModelConfig, weight_bytes: int) -> int:
    """Return the bytes of Adam's state on a rank.

    It has two fp32 numbers for each element that the rank steps, three where weights are not fp32.

    With ``states`` the optimizer is distributed, and a rank steps its range of the gradient buffer; else it steps all
    that it holds.
    """
    elements = weight_bytes // ITEM_BYTES[model.dtype] if states is None else states.num_elements(rank)
    return (2 if model.dtype == "fp32" else 3) * _FP32_BYTES * elements


def packed_bytes(spec: ModelSpec, model: ModelConfig, mesh: DeviceMesh, rank: int) -> int:
    """Return the bytes of packed matrices of a dense fp32 model.

    ``rollout.cpu.transformer`` copies them to generate on a CPU.
    """
    fits = model.implementation == "megatron" and model.num_experts is None and model.kv_lora_rank is None
    fits = fits and not (model.linear_layers or model.attention_output_gate or model.has_global_heads)
    fits = fits and not (model.value_norm or model.layer_scalars)
    fits = fits and model.head_size % 16 == 0 and model.query_groups >= mesh.layout.tp
    if model.dtype != "fp32" or not fits:
        return 0
    held = WeightHoldings(spec, mesh)
    is_last = mesh.coordinate(rank).pp == mesh.layout.pp - 1
    return sum(
        -(-math.prod(region.local_shape[:-1]) // PANEL) * PANEL * region.local_shape[-1] * ITEM_BYTES[tensor.dtype]
        for tensor in spec.tensors
        if _is_packed(tensor, is_last)
        for region in held.regions(tensor, rank)
    )


def joined_bytes(spec: ModelSpec, lora: LoRAConfig, mesh: DeviceMesh, rank: int) -> int:
    """Return the bytes of adapters' factors as ``rollout.gpu.transformer`` copies them.

    A layer has one A and one B for all of its parts.
    """
    held = WeightHoldings(spec, mesh)
    ranks = {f".{linear}.weight": len(parts) * lora.rank for linear, parts in parts_of(lora.targets).items()}
    return sum(
        number * (math.prod(region.local_shape[:-1]) + region.local_shape[-1]) * ITEM_BYTES[tensor.dtype]
        for tensor in spec.tensors
        for end, number in ranks.items()
        if tensor.name.endswith(end)
        for region in held.regions(tensor, rank)
    )


def _is_packed(tensor: TensorSpec, is_last: bool) -> bool:
    """Return whether a stage multiplies with it; of tied embeddings the last does."""
    if tensor.place == "embedding":
        return is_last and tensor.also_held_by == "output"
    is_output = tensor.name == OUTPUT
    return is_output or "linear_" in tensor.name and tensor.name.endswith("weight")


def cache_bytes(recipe: Recipe, model: ModelConfig, mesh: DeviceMesh) -> int:
    """Return keys and values, and states, of ``rollout.max_concurrent`` sequences, each as long as the context.

    They are no more than the cache's budget.
    """
    need = recipe.rollout.max_concurrent * _keys_bytes(model, mesh) + _states_bytes(recipe, model, mesh)
    budget = recipe.rollout.cache_memory
    return need if budget < 1 else min(need, int(budget))


def cache_room(recipe: Recipe, cache: int) -> int:
    """Return what must be free for a cache of so many bytes; 0 where the recipe gives no share of what is free."""
    share = recipe.rollout.cache_memory
    return math.ceil(cache / share) if share < 1 else 0


def held_texts(recipe: Recipe, meshes: Mapping[str, DeviceMesh], machine: Hardware, tokens: int) -> int:
    """Return how many texts of so many tokens a job has room for in the cache of each rank that generates."""
    mesh, room = meshes["actor.rollout"], recipe.rollout.cache_memory
    if recipe.rollout.engine.kind == "vllm" and not machine.is_cpu:
        return vllm_texts(recipe, mesh, machine.memory_bytes, tokens)
    if room < 1:
        memory = job_memory(recipe, meshes, cached=0)
        room *= machine.memory_bytes - max(memory[rank].resident for rank in mesh.ranks)
    model = recipe.sized_model_of(mesh.name)
    keys, state = tokens * cached_token_bytes(model, mesh.layout), state_bytes(model, mesh.layout)
    # States get no more than half of the cache.
    return max(0, int(room)) // (state + max(keys, state))


def vllm_bytes(recipe: Recipe, gpu_bytes: float) -> int:
    """Return vLLM's share of a GPU, for its weights and its cache."""
    return int(recipe.rollout.engine.memory_share * gpu_bytes)


def vllm_texts(recipe: Recipe, mesh: DeviceMesh, gpu_bytes: float, tokens: int) -> int:
    """Return how many texts of so many tokens vLLM has room for in its share of a GPU, beside the whole model."""
    model = recipe.sized_model_of(mesh.name)
    weights = sum(tensor.num_bytes for tensor in _specs(model, model.path, False).tensors)
    each = tokens * cached_token_bytes(model, mesh.layout) + state_bytes(model, mesh.layout)
    return max(0, vllm_bytes(recipe, gpu_bytes) - weights) // each


def _spare_bytes(recipe: Recipe, mesh: DeviceMesh) -> int:
    """Return the bytes of the cache that are not taken where they are not free."""
    model = recipe.model_of("actor.rollout")
    is_share = recipe.rollout.cache_memory < 1
    one = _keys_bytes(model, mesh) + state_bytes(model, mesh.layout)
    return cache_bytes(recipe, model, mesh) - one if is_share else 0


def _keys_bytes(model: ModelConfig, mesh: DeviceMesh) -> int:
    """Return keys and values of a sequence as long as the context, in whole blocks."""
    return -(-model.max_context // BLOCK_TOKENS) * BLOCK_TOKENS * cached_token_bytes(model, mesh.layout)


def _states_bytes(recipe: Recipe, model: ModelConfig, mesh: DeviceMesh) -> int:
    """Return the states of ``rollout.max_concurrent`` sequences, and those kept, which do not grow with tokens."""
    lanes = mesh.layout.pp
    each = -(-recipe.rollout.max_concurrent // lanes)
    return lanes * (each + kept_states(each)) * state_bytes(model, mesh.layout)


def usable_bytes(recipe: Recipe, gpu_bytes: float | None) -> float | None:
    """Return the memory that a rank may need by the estimate: the recipe's budget, or a share of its GPU's.

    ``gpu_bytes`` is None where that is not known.

    Returns:
        Bytes. None: neither is known.
    """
    budget_gb = recipe.cluster.memory_budget_gb
    if budget_gb is None:
        return None if gpu_bytes is None else USABLE * gpu_bytes
    return budget_gb * 1e9 if gpu_bytes is None else min(budget_gb * 1e9, gpu_bytes)


def planned_gpu_bytes(recipe: Recipe, site_gb: float | None) -> float | None:
    """Return the memory of the GPUs that a recipe is planned for; None: nobody says, or it is planned for CPUs.

    Args:
        recipe: The recipe; its ``cluster.hardware`` comes first.
        site_gb: Memory of a GPU by the site settings, in 1e9 bytes.

    Raises:
        ConfigError: ``cluster.hardware`` is not known.
    """
    if recipe.cluster.hardware is not None:
        machine = hardware(recipe.cluster.hardware)
        return None if machine.is_cpu else machine.memory_bytes
    return None if site_gb is None else site_gb * 1e9


def with_micro_batches(recipe: Recipe, meshes: Mapping[str, DeviceMesh], gpu_bytes: float | None = None) -> Recipe:
    """Return the recipe with the largest micro-batches that fit, if it leaves their size open.

    They change no result. If none fits, they are the smallest. ``gpu_bytes`` is of the smallest GPU; None: not known.
    """
    room = usable_bytes(recipe, gpu_bytes)
    if room is None or "trainer.micro_batch_tokens" not in recipe.defaults:
        return recipe
    has_stages = any(mesh.layout.pp > 1 for name, mesh in meshes.items() if name != "actor.rollout")
    most = _STAGED_MICRO_BATCH if has_stages else _MICRO_BATCHES[0]
    for tokens in (tokens for tokens in _MICRO_BATCHES if tokens <= most):
        chosen = replace(recipe, trainer=replace(recipe.trainer, micro_batch_tokens=tokens))
        if max(needed.least for needed in job_memory(chosen, meshes, gpu_bytes=gpu_bytes)) <= room:
            break
    return replace(chosen, defaults={**recipe.defaults, "trainer.micro_batch_tokens": tokens})
