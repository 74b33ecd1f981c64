"""Jobs and samples for tests of roles: a recipe on the ranks of a test, without files."""

from __future__ import annotations

import zlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hybridflow.config.cluster import ClusterConfig
from hybridflow.config.data import DataConfig
from hybridflow.config.losses import AdvantageConfig, CorrectionConfig, KLConfig, LossConfig
from hybridflow.config.recipe import Recipe
from hybridflow.config.roles import ActorConfig, CriticConfig, MoEConfig, OptimizerConfig
from hybridflow.config.rollout import RolloutConfig
from hybridflow.config.trainer import TrainerConfig
from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.families.model import ModelConfig
from hybridflow.flows.registry import ALGORITHMS
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.weights import local_regions, regions_of
from hybridflow.parallel.megatron import rank_sets
from hybridflow.parallel.world import World
from hybridflow.placement.job import Job
from hybridflow.placement.placed_model import PlacedModel
from hybridflow.recipe.checks import check_recipe
from hybridflow.recipe.load import recipe_from_dict
from hybridflow.trainer.open import open_job
from hybridflow.trainer.plan import JobPlan, plan_job
from tests.multi.models import TINY, VOCAB, samples

EOS = 2
MOE = MoEConfig(aux_loss=0.05, z_loss=0.01)
SETTINGS = {
    "ppo": dict(
        advantage=AdvantageConfig(gamma=0.95, gae_lambda=0.9),
        loss=LossConfig(dual_clip=2.0, entropy_coef=0.05),
        kl=KLConfig(coef=0.1, estimator="k2", place="loss"),
    ),
    "grpo": dict(
        loss=LossConfig(clip_high=0.28, dual_clip=3.0, entropy_coef=0.05, aggregation="seq-mean-token-mean"),
        kl=KLConfig(coef=0.1, estimator="k3", place="loss"),
    ),
    "dr-grpo": dict(
        loss=LossConfig(aggregation="seq-mean-token-sum-norm", norm_tokens=9),
        correction=CorrectionConfig(reject="k3", reject_high=0.05),
    ),
    "gspo": dict(
        loss=LossConfig(kind="gspo", clip_low=0.2, clip_high=0.3, aggregation="seq-mean-token-mean"),
        kl=KLConfig(coef=0.1, estimator="k3+", place="loss"),
        correction=CorrectionConfig(reject="k1", reject_level="mean", reject_low=0.9, reject_high=1.2),
    ),
    "cispo": dict(
        loss=LossConfig(kind="cispo", clip_low=1.0, clip_high=0.2, entropy_coef=0.05),
        correction=CorrectionConfig(kind="icepop", reject="k2", reject_level="max", reject_high=0.1),
    ),
}
"""Every term of the actor's loss is on, and every kind of it."""


def tiny_recipe(
    layout: ParallelLayout,
    algorithm: str = "ppo",
    *,
    model: ModelConfig = TINY,
    critic: ParallelLayout | None = None,
    settings: dict | None = None,
    micro_batch_tokens: int = 4096,
    num_samples: int = 12,
    mini_batch_size: int = 6,
    group_size: int | None = None,
    optimizer: OptimizerConfig | None = None,
    value_clip: float = 0.5,
) -> Recipe:
    """A recipe of a tiny model, all roles on the ranks of ``layout``, which is the critic's too unless one is given.

    Groups are as small as the algorithm allows, unless their size is given.
    """
    group_size = min(ALGORITHMS[algorithm].traits.group_size, 2) if group_size is None else group_size
    optimizer = OptimizerConfig(lr=1e-3) if optimizer is None else optimizer
    is_ppo = algorithm == "ppo"
    recipe = Recipe(
        name="tiny",
        algorithm=algorithm,
        traits=ALGORITHMS[algorithm].traits,
        cluster=ClusterConfig(ranks=layout.world_size),
        model=ModelConfig(**{**vars(model), "vocab_size": VOCAB, "init_std": 0.1}),
        data=DataConfig(train="none", held_out="none"),
        actor=ActorConfig(
            update=layout,
            rollout=layout.for_rollout(),
            optimizer=optimizer,
            moe=MoEConfig() if model.num_experts is None else replace(MOE, bias_update_rate=0.01 * model.router_bias),
        ),
        critic=CriticConfig(layout=layout if critic is None else critic, optimizer=optimizer, value_clip=value_clip)
        if is_ppo
        else None,
        rollout=RolloutConfig(max_new_tokens=12, temperature=0.8, group_size=group_size),
        trainer=TrainerConfig(
            steps=1,
            global_batch_size=num_samples,
            mini_batch_size=mini_batch_size,
            micro_batch_tokens=micro_batch_tokens,
        ),
        **(SETTINGS[algorithm] if settings is None else settings),
    )
    check_recipe(recipe)
    return recipe


def make_job(world: World, recipe: Recipe) -> tuple[Job, JobPlan]:
    """The job of a recipe on the ranks that are there, without data: roles are called with batches made by hand."""
    plan = _plan(world, recipe)
    job = Job(
        world=world,
        recipe=recipe,
        meshes=plan.meshes,
        tokenizer=SimpleNamespace(eos_id=EOS, stop_ids=(EOS,), vocab_size=VOCAB, decode=str, pieces=dict),
        train=None,
        held_out=(),
    )
    return job, plan


def open_with_data(world: World, values: dict[str, Any]) -> tuple[Job, JobPlan]:
    """The job of a recipe's values on the ranks that are there, with its data and tokenizer."""
    recipe = recipe_from_dict(values)
    plan = _plan(world, recipe)
    return open_job(recipe, world, plan), plan


def _plan(world: World, recipe: Recipe) -> JobPlan:
    plan = plan_job(recipe)
    world.make_groups([*rank_sets(plan.meshes.values(), world.size), *plan.rank_sets()])
    return plan


def draw(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers that depend on seed, name and shape alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    return torch.randn(shape, generator=generator)


def add_noise(placed: PlacedModel, spec, rank: int, *, seed: int, std: float = 0.05) -> None:
    """Move every weight, norms and biases too, off its initial value, the same in every layout."""
    shapes = {tensor.name: tensor.shape for tensor in spec.tensors}
    for name, regions in local_regions(placed.transformer, spec, placed.mesh, rank).items():
        for local, part in regions:
            local[inner_of(part)] += std * draw(seed, name, shapes[name])[outer_of(part)]


def watch(role: Any, rank: int) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    """Keep gradients and parts before each of a role's optimizer steps, and its metrics after each update.

    Under FSDP a rank may have several boxes of a tensor: the second is ``NAME:1``.
    """
    make_step, make_update = role.trainable.step, role.update
    gradients: list[dict[str, Any]] = []
    metrics: list[dict[str, float]] = []

    def kept_step(**settings: bool) -> float:
        flat = role.trainable.state()["gradient"]
        held = local_regions(role.model.transformer, role.spec, role.model.mesh, rank)
        gradients.append(
            {
                f"{name}:{number}" if number else name: (values[inner_of(part)].clone().numpy(), part)
                for name, regions in held.items()
                for number, (values, part) in enumerate(regions_of(flat[name], [part for _, part in regions]))
            }
        )
        return make_step(**settings)

    def kept_update(batch: Batch, decided: Any) -> None:
        make_update(batch, decided)
        metrics.append(dict(role.metrics))

    role.trainable.step, role.update = kept_step, kept_update
    return gradients, metrics


def inner_of(part) -> tuple[slice, ...]:
    """Where a shard's elements are in the rank's tensor."""
    return tuple(slice(0, stop - start) for start, stop in part.box)


def outer_of(part) -> tuple[slice, ...]:
    """Where a shard's elements are in the logical tensor."""
    return tuple(slice(start, stop) for start, stop in part.box)


def make_batch(count: int = 12, seed: int = 7) -> Batch:
    """Samples with all columns of an update: some tokens and one whole sample masked, ratios far from 1."""
    sequences, prompts = samples(count, seed)
    lengths = [len(sequence) - prompt for sequence, prompt in zip(sequences, prompts, strict=True)]
    generator = torch.Generator().manual_seed(seed)

    def ragged(mean: float, std: float) -> Ragged:
        rows = [mean + std * torch.randn(length, generator=generator) for length in lengths]
        return Ragged.from_list(rows, torch.float32)

    masks = [(torch.rand(length, generator=generator) < 0.9).float() for length in lengths]
    masks[1] = torch.zeros(lengths[1])
    return Batch(
        torch.arange(count),
        {
            "tokens": Ragged.from_list(sequences, torch.int64),
            "prompt_lengths": torch.tensor(prompts),
            "prompt_indices": torch.arange(count),
            "order": torch.arange(count),
            "response_mask": Ragged.from_list(masks, torch.float32),
            "old_log_probs": (old := ragged(-3.4, 0.7)),
            "ref_log_probs": ragged(-3.4, 0.7),
            "advantages": ragged(0.0, 1.0),
            "values": ragged(0.0, 0.7),
            "returns": ragged(0.0, 1.0),
            "rollout_log_probs": Ragged(old.values + ragged(0.0, 0.3).values, old.lengths),
        },
    )
