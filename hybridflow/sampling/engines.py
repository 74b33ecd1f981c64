"""What samples the actor's responses, as the recipe chooses: our engine, vLLM in this process, or servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from hybridflow.config.rollout import SamplingEngineConfig
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.families.assets import CONFIG, parse_json
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.adapters import base_spec
from hybridflow.models.hf_model import TransformersActor, names_as_saved
from hybridflow.models.lora import adapted, merged_weight
from hybridflow.models.shapes import cached_token_bytes
from hybridflow.models.weights import Region
from hybridflow.placement.job import Job
from hybridflow.placement.peft import described
from hybridflow.placement.placed_model import PlacedModel
from hybridflow.placement.pretrained import given_assets
from hybridflow.placement.user_model import UserModel
from hybridflow.placement.user_objects import runs_in_transformers
from hybridflow.reshard.spec import DTYPE_WORDS
from hybridflow.rollout.budget import cache_bytes
from hybridflow.rollout.engine import MegatronEngine
from hybridflow.rollout.engines.hf_engine import HFEngine
from hybridflow.rollout.engines.hf_weights import hf_weights
from hybridflow.rollout.engines.http_engine import HttpEngine
from hybridflow.rollout.engines.openai import OpenAi, find_model
from hybridflow.rollout.engines.tgi import Tgi
from hybridflow.rollout.engines.user_engine import UserEngine
from hybridflow.rollout.engines.wire import Lines, token_of


class PushedEngine:
    """vLLM in this process, and the way that the actor's weights take there.

    Collective: with several ranks, all of the job make it together.

    Attributes:
        engine: vLLM.
    """

    def __init__(self, job: Job) -> None:
        # Where it is not asked for it need not be there.
        from hybridflow.rollout.engines.vllm_engine import VllmEngine, config_of

        recipe = job.recipe
        self._described = None if runs_in_transformers(job, "actor") else described(job)
        model, rollout = job.model_of("actor"), recipe.rollout
        self.engine = VllmEngine(
            model,
            _config(job) if self._described is None else config_of(self._described),
            # Exact are the raw ones at temperature 1, the others where nothing is cut; the recipe has one of both.
            log_probs="raw" if rollout.temperature == 1 else "processed",
            seed=recipe.seed,
            vocab_size=job.vocab_size,
            max_concurrent=rollout.max_concurrent,
            memory_share=rollout.engine.memory_share,
            device=job.world.device,
            cache_bytes=_cache_bytes(job) if job.world.device.type == "cpu" else None,
            can_sleep=True,
        )
        # Weights that outlive an update are nowhere else.
        self._keeps_weights = recipe.actor.reshard_every > 1
        self.sleep()

    def sleep(self) -> None:
        """Make room on a GPU while the actor learns."""
        self.engine.sleep(keeps_weights=self._keeps_weights)

    def wake(self, model: PlacedModel, *, is_current: bool) -> None:
        """Make the engine ready to generate.

        Args:
            model: The rollout layout's, which this rank holds whole. Adapters are merged.
            is_current: The engine has had its weights already.
        """
        weights = None
        if not is_current or self.engine.lacks_weights:
            weights = self._weights(model)
        self.engine.wake(weights)

    def _weights(self, model: PlacedModel) -> Iterable[tuple[str, Tensor]]:
        """Return the weights under the names that vLLM knows."""
        if self._described is not None:
            return hf_weights(self._described, whole_tensors(model))
        assert isinstance(model, UserModel) and isinstance(model.module, TransformersActor), "it runs in transformers"
        return names_as_saved(model.module.inner, dict(model.module.merged())).items()


def _config(job: Job) -> dict[str, Any]:
    """Return the ``config.json`` of an actor that runs in ``transformers``, with the number format of the recipe."""
    values = parse_json(given_assets(job, "actor")[1][CONFIG], CONFIG)
    config = {key: value for key, value in values.items() if key not in ("torch_dtype", "auto_map")}
    return {**config, "dtype": DTYPE_WORDS[job.model_of("actor").dtype]}


def whole_tensors(model: PlacedModel) -> Callable[[str], Tensor]:
    """Return what reads the logical tensors of a model that this rank holds whole; it merges those with an adapter."""
    shards = model.shards(base_spec(model.spec))
    linears = dict(adapted(model.transformer))

    def read(name: str) -> Tensor:
        local, part = shards[name]
        if name in linears:
            local = merged_weight(linears[name]).view(local.shape)
        return Region(local, part).inside

    return read


def make_own_engine(job: Job, model: PlacedModel) -> MegatronEngine | UserEngine:
    """Make an engine that generates with the weights being trained, or with a whole module that is."""
    rollout, seed = job.recipe.rollout, job.recipe.seed
    if not isinstance(model, UserModel):
        memory = rollout.cache_memory
        return model.make_engine(
            seed=seed,
            max_concurrent=rollout.max_concurrent,
            cache_memory=memory,
            tokenizer=job.tokenizer,
            keeps_choices=job.recipe.actor.moe.router_replay != "none",
        )
    kind: type[UserEngine] = HFEngine if isinstance(model.module, TransformersActor) else UserEngine
    return kind(
        model.module,
        model.groups.tp,
        vocab_size=job.vocab_size,
        max_context=job.recipe.model.max_context,
        seed=seed,
        max_concurrent=rollout.max_concurrent,
        pad_id=0 if job.tokenizer is None else job.tokenizer.pad_id,
    )


def make_server_engine(
    settings: SamplingEngineConfig, *, tokenizer: Tokenizer, seed: int, vocab_size: int | None
) -> HttpEngine:
    """Make an engine that generates with the servers that a recipe names.

    Args:
        settings: ``rollout.engine`` of the recipe.
        tokenizer: The model's own.
        seed: Seed of the noise.
        vocab_size: Ids that the trainer knows; None: any will do.

    Raises:
        ConfigError: The token's environment variable is not set.
        EngineError: The servers do not answer, or have no such model.
    """
    lines = Lines(settings.urls, token_of(settings.auth_env))
    api: OpenAi | Tgi
    if settings.kind == "tgi":
        api = Tgi(tokenizer)
    else:
        model, is_vllm = find_model(lines, settings)
        api = OpenAi(model=model, is_vllm=is_vllm, log_probs=settings.log_probs, tokenizer=tokenizer)
    return HttpEngine(lines=lines, api=api, settings=settings, seed=seed, vocab_size=vocab_size)


def _cache_bytes(job: Job) -> int:
    """Return the bytes of a CPU's key-value cache for the samples decoded together, within ``rollout.cache_memory``."""
    rollout, model = job.recipe.rollout, job.model_of("actor")
    # vLLM deals the cache out in blocks of up to 128 tokens, and keeps one for itself.
    blocks = rollout.max_concurrent * (-(-model.max_context // 128)) + 1
    most = cache_bytes(rollout.cache_memory, job.world.device, min(job.world.ranks_per_node, job.world.size))
    return min(blocks * 128 * cached_token_bytes(model, ParallelLayout()), most)
