"""What a ``RolloutWorker`` generates with, and how it gets weights: our engine, vLLM, transformers, a user's class."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from hybridflow.api.hybrid_actor import HybridActor
from hybridflow.api.trainers import OnlineTrainer, check_same_shape
from hybridflow.checkpoint.formats.in_memory import in_memory_model, is_model
from hybridflow.checkpoint.formats.registry import open_model
from hybridflow.checkpoint.formats.source import Source
from hybridflow.checkpoint.model_info import read_model_info
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import ConfigError
from hybridflow.families.config_json import describe
from hybridflow.families.cut import check_cut
from hybridflow.families.other_config import longest_sequence
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.models.hf_model import TransformersActor, make_actor
from hybridflow.models.user_model import user_model_info
from hybridflow.parallel.megatron import collection
from hybridflow.parallel.world import World
from hybridflow.placement.pretrained import check_table, from_pretrained
from hybridflow.reshard.views import TORCH_DTYPES
from hybridflow.rollout.engine import MegatronEngine
from hybridflow.rollout.engines.hf_engine import HFEngine
from hybridflow.rollout.engines.hf_weights import hf_weights
from hybridflow.rollout.engines.user_engine import UserEngine

_VLLM_CACHE_BYTES = 1 << 29
"""Of vLLM's key-value cache on a CPU."""


class Options(NamedTuple):
    """How a worker generates.

    Attributes:
        max_context: Longest sequence; None: the model's own.
        dtype: Number format; None: the model's own.
        max_concurrent: Sequences decoded together.
        seed: Seed of the noise.
        tokenizer: For texts that end a response; None: there is none.
    """

    max_context: int | None
    dtype: Any
    max_concurrent: int
    seed: int
    tokenizer: Tokenizer | None


def source_of(model: Any) -> Source:
    """Return the weights of a directory, or of a model in memory.

    Raises:
        ConfigError: It is neither.
    """
    if isinstance(model, str | Path):
        source = open_model(Path(model))
        check_table(source)
        return source
    if is_model(model):
        return in_memory_model(model)
    raise ConfigError(
        f"RolloutWorker: found {type(model).__name__}; give a directory, a PreTrainedModel of transformers, a GPTModel "
        "of megatron-core, or an actor class of your own (docs/extend.md)"
    )


class MegatronWorker:
    """Our engine and its model. Collective: all ranks, also those outside the mesh.

    Args:
        model: As ``source_of`` takes it.
        world: This rank and the others.
        mesh: Where the model is.
        options: How it generates.

    Attributes:
        engine: As ``rollout.request.Engine``; None on a rank outside the mesh.
        max_context: Longest sequence, in tokens.
    """

    def __init__(self, model: Any, world: World, mesh: DeviceMesh, options: Options) -> None:
        # Once: of a GPTModel that is cut it is brought together from all ranks.
        source = source_of(model)
        check_cut(source.model, mesh.layout, mesh.name)
        self._placed = from_pretrained(
            source, world, mesh, max_context=options.max_context, dtype=options.dtype, seed=options.seed
        )
        self.max_context = self._placed.model.max_context
        self.engine: MegatronEngine | None = None
        if world.rank in mesh:
            self.engine = self._placed.make_engine(
                seed=options.seed, max_concurrent=options.max_concurrent, tokenizer=options.tokenizer
            )

    def load(self, model: Any) -> None:
        """Take other weights of the same shape. Collective: all ranks. Raises ConfigError: it has another shape.

        A trainer's actor moves from its layout into this one without a file in between.
        """
        if isinstance(model, OnlineTrainer):
            model.copy_actor(self._placed)
            return
        source = source_of(model)
        check_same_shape(source.model, self._placed.model)
        if self.engine is not None:
            self._placed.load(source)


class VllmWorker:
    """vLLM with the whole model on each rank, see ``MegatronWorker``. Collective: all ranks.

    Args:
        model: As ``source_of`` takes it.
        world: This rank and the others.
        options: How it generates.

    Raises:
        EngineError: vLLM is not installed, or cannot run the model.
    """

    def __init__(self, model: Any, world: World, options: Options) -> None:
        # Where it is not asked for it need not be there.
        from hybridflow.rollout.engines.vllm_engine import VllmEngine, config_of

        source = source_of(model)
        chosen = {"max_context": options.max_context, "dtype": options.dtype}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        self._model = replace(source.model, path=None, **chosen)
        self.max_context = self._model.max_context
        self._described = describe(self._model, family=source.family, has_value_head=False)
        self.engine = VllmEngine(
            self._model,
            config_of(self._described),
            log_probs="processed",
            seed=options.seed,
            vocab_size=self._model.known_vocab_size,
            max_concurrent=options.max_concurrent,
            memory_share=0.4,
            device=world.device,
            cache_bytes=_VLLM_CACHE_BYTES if world.device.type == "cpu" else None,
        )
        self._fill(source)

    def load(self, model: Any) -> None:
        """See ``MegatronWorker``."""
        self._fill(source_of(model))

    def _fill(self, source: Source) -> None:
        check_same_shape(source.model, self._model)
        self.engine.load(hf_weights(self._described, source.read))


class UserWorker:
    """A class of the user's own, whole on each rank, see ``MegatronWorker``.

    Args:
        module: The user's.
        world: This rank and the others.
        mesh: Where it is.
        options: How it generates.
    """

    _engine: type[UserEngine] = UserEngine

    def __init__(self, module: nn.Module, world: World, mesh: DeviceMesh, options: Options) -> None:
        if mesh.layout.tp * mesh.layout.pp > 1:
            raise ConfigError(f"RolloutWorker: layout {mesh.layout}: a class of your own is not cut; leave sizes out")
        settings = user_model_info(module)
        if settings is None or settings.model.vocab_size is None:
            raise ConfigError(f"RolloutWorker: {type(module).__name__} is no actor; give one with forward(input_ids)")
        self._module = module.to(world.device)
        self.max_context = settings.model.max_context
        self.engine: UserEngine | None = None
        if world.rank in mesh:
            self.engine = self._engine(
                module,
                collection(world, mesh).tp,
                vocab_size=settings.model.vocab_size,
                max_context=self.max_context,
                seed=options.seed,
                max_concurrent=options.max_concurrent,
                pad_id=0 if options.tokenizer is None else options.tokenizer.pad_id,
            )

    def load(self, model: Any) -> None:
        """See ``MegatronWorker``."""
        if not isinstance(model, type(self._module)):
            wanted = type(self._module).__name__
            raise ConfigError(f"update_weights: found {type(model).__name__}, expected a {wanted}; give one")
        self._module.load_state_dict(model.state_dict())


class HFWorker(UserWorker):
    """A model of ``transformers`` as it is, whole on each rank, with its key-value cache, see ``MegatronWorker``.

    Args:
        model: Directory or model; of a model a copy is taken.
        world: This rank and the others.
        mesh: Where it is.
        options: How it generates.
    """

    _engine = HFEngine

    def __init__(self, model: Any, world: World, mesh: DeviceMesh, options: Options) -> None:
        found = _opened(model, options)
        if not isinstance(model, str | Path):
            found = copy.deepcopy(found)
            if hasattr(found.inner, "generation_config"):
                # What a model says of sampling, such as where a response ends, is not what the caller says.
                found.inner.generation_config = type(found.inner.generation_config)()
        if options.dtype is not None:
            found = found.to(TORCH_DTYPES[options.dtype])
        super().__init__(found, world, mesh, options)
        self._options = options

    def load(self, model: Any) -> None:
        """See ``MegatronWorker``."""
        state, own = _opened(model, self._options).state_dict(), self._module.state_dict()
        if {name: each.shape for name, each in own.items()} != {name: each.shape for name, each in state.items()}:
            raise ConfigError("update_weights: the model has other tensors than the worker's; give one of its shape")
        self._module.load_state_dict(state)


def _opened(model: Any, options: Options) -> TransformersActor:
    """Return a model of ``transformers``, read from its directory if it is one.

    Raises:
        ConfigError: It is none, or cannot be read.
    """
    longest = options.max_context
    if isinstance(model, str | Path):
        settings = read_model_info(Path(model)).model
        return make_actor(Path(model), replace(settings, max_context=longest or settings.max_context), filling="read")
    if not hasattr(model, "config") or not isinstance(model, nn.Module):
        raise ConfigError(
            f"RolloutWorker: engine='hf' with {type(model).__name__}; give a directory, or a causal language model of "
            "transformers"
        )
    config: Any = model.config
    longest = longest_sequence(config.to_dict()) if longest is None else longest
    if longest is None:
        raise ConfigError(f"RolloutWorker: {type(model).__name__} says no longest sequence; give max_context=…")
    return TransformersActor(model, vocab_size=config.vocab_size, max_context=longest)


class HybridWorker:
    """A ``HybridActor`` that generates with the weights that it has, see ``MegatronWorker``.

    Args:
        actor: The actor.

    Attributes:
        mesh: Where its replicas generate.
        max_context: Longest sequence, in tokens.
        tokenizer: The actor's; None: it has none.
    """

    def __init__(self, actor: HybridActor) -> None:
        self._actor = actor
        self.max_context = actor.recipe.model.max_context
        self.tokenizer: Tokenizer | None = actor.tokenizer
        _, self.mesh = actor.sampler()

    @property
    def engine(self) -> Any:
        """Switch the actor to generating, and return its engine. Collective: all ranks."""
        return self._actor.sampler()[0]

    def load(self, model: Any) -> None:
        """Refuse: the actor learns by itself. Raises ConfigError."""
        raise ConfigError("update_weights: the worker generates with a HybridActor, whose own training changes them")
