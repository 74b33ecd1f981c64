"""A whole PPO and GRPO step at TP2·PP2·DP2 equals one written here in plain torch, in fp64 and one process.

Nothing below the line "plain torch" uses hybridflow: a transformer, log-probabilities, advantages, losses, clipping and
Adam, straight from the formulas.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridflow.config.losses import AdvantageConfig, CorrectionConfig, KLConfig, LossConfig
from hybridflow.config.recipe import Recipe
from hybridflow.config.roles import OptimizerConfig
from hybridflow.dataflow import schedule
from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.dataflow.compiler import compile_flow
from hybridflow.dataflow.graph import Node
from hybridflow.dataflow.move import Mover
from hybridflow.dataflow.run import Executor
from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.weights import local_shards
from hybridflow.observe.timeline import Timeline
from hybridflow.parallel.world import World
from hybridflow.roles.actor import Actor
from hybridflow.roles.advantage import Advantage, KLCoefficient
from hybridflow.roles.critic import Critic
from hybridflow.roles.reference import Reference
from hybridflow.trainer.plan import training_step
from tests.multi.jobs import add_noise, inner_of, make_job, outer_of, tiny_recipe, watch
from tests.multi.models import samples
from tests.support.ranks import run_ranks
from tests.support.roles import MethodRole

LAYOUT = ParallelLayout(tp=2, pp=2, dp=2)
CRITIC_LAYOUT = ParallelLayout(tp=1, pp=2, dp=4)
NUM_SAMPLES, GROUP_SIZE, MINI_BATCH = 12, 3, 6
SEEDS = {"actor": 3, "reference": 4, "critic": 5}
"""Of the noise on each role's weights: three different models."""

# The second mini-batch meets weights that the first has moved a little: the clips are narrow enough to act on that.
MODELS = {
    "ppo": ModelConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        num_query_groups=2,
        max_context=32,
        qkv_bias=True,
    ),
    "grpo": ModelConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        max_context=32,
        tied_embeddings=True,
        qk_norm=True,
    ),
}
SETTINGS = {
    "ppo": dict(
        advantage=AdvantageConfig(gamma=0.97, gae_lambda=0.9),
        loss=LossConfig(clip_low=0.002, clip_high=0.003, entropy_coef=0.01),
        kl=KLConfig(coef=0.1),
    ),
    "grpo": dict(
        loss=LossConfig(
            clip_low=0.002, clip_high=0.003, dual_clip=1.001, entropy_coef=0.01, aggregation="seq-mean-token-mean"
        ),
        kl=KLConfig(coef=0.1, estimator="k3", place="loss"),
    ),
}
VALUE_CLIP = 0.002
CORRECTIONS = {
    "ppo": CorrectionConfig(kind="truncate", high=1.2),
    "grpo": CorrectionConfig(kind="icepop", level="sequence", low=0.3, high=3.0),
}
OPTIMIZERS = {
    "ppo": OptimizerConfig(lr=1e-4, clip_grad=0.5, distributed=False),
    "grpo": OptimizerConfig(lr=1e-4, clip_grad=0.0, distributed=False),
}
COMPUTED = {
    "ppo": ("old_log_probs", "ref_log_probs", "values", "advantages", "returns"),
    "grpo": ("old_log_probs", "ref_log_probs", "advantages"),
}


def recipe_of(algorithm: str, layout: ParallelLayout, critic: ParallelLayout) -> Recipe:
    recipe = tiny_recipe(
        layout,
        algorithm,
        model=MODELS[algorithm],
        critic=critic,
        settings=SETTINGS[algorithm],
        micro_batch_tokens=30,
        num_samples=NUM_SAMPLES,
        mini_batch_size=MINI_BATCH,
        group_size=GROUP_SIZE,
        optimizer=OPTIMIZERS[algorithm],
        value_clip=VALUE_CLIP,
    )
    return replace(recipe, correction=CORRECTIONS[algorithm])


def given_columns() -> dict[str, list[Any]]:
    """What rollout and reward would have given, one entry a sample: masks have holes, one group's scores are equal."""
    sequences, prompts = samples(NUM_SAMPLES, seed=21)
    generator = torch.Generator().manual_seed(22)
    lengths = [len(sequence) - prompt for sequence, prompt in zip(sequences, prompts, strict=True)]
    masks = [(torch.rand(length, generator=generator) < 0.85).float() for length in lengths]
    masks[4] = torch.zeros(lengths[4])
    scores = torch.randn(NUM_SAMPLES, generator=generator)
    scores[3:6] = 0.7
    return {
        "tokens": sequences,
        "prompt_lengths": prompts,
        "prompt_indices": [sample // GROUP_SIZE for sample in range(NUM_SAMPLES)],
        "response_mask": masks,
        "rollout_log_probs": [0.5 * torch.randn(length, generator=generator) - 4.0 for length in lengths],
        "scores": scores.tolist(),
    }


class Given(MethodRole):
    """The test as a role: gives the samples, and sees what was made of them before the updates."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.seen: dict[str, dict[int, np.ndarray]] = {}

    def samples(self, batch: Batch, decided: Any) -> Batch:
        mine = torch.arange(self.world.rank, NUM_SAMPLES, self.world.size)
        columns: dict[str, Any] = {}
        for name, rows in given_columns().items():
            chosen = [rows[sample] for sample in mine]
            if isinstance(rows[0], Tensor):
                columns[name] = Ragged.from_list(chosen, rows[0].dtype)
            else:
                columns[name] = torch.tensor(chosen)
        return Batch(mine, columns)

    def see(self, batch: Batch, decided: Any) -> None:
        for name, column in batch.columns.items():
            rows = (row.numpy() for row in column.to_list())
            self.seen[name] = dict(zip(batch.ids.tolist(), rows, strict=True))


def whole_weights(world: World, algorithm: str) -> dict[str, dict[str, np.ndarray]]:
    """The weights that every role begins with, uncut."""
    job, _ = make_job(world, recipe_of(algorithm, ParallelLayout(), ParallelLayout()))
    return {
        name: {
            tensor: local[inner_of(part)].numpy()
            for tensor, (local, part) in local_shards(role.model.transformer, role.spec, role.model.mesh, 0).items()
        }
        for name, role in make_roles(job).items()
        if name in SEEDS
    }


def make_roles(job) -> dict[str, Any]:
    kl_coef = KLCoefficient(job.recipe)
    roles: dict[str, Any] = {"actor": Actor(job, kl_coef), "reference": Reference(job)}
    if job.recipe.critic is not None:
        roles["critic"] = Critic(job)
    for name, role in roles.items():
        add_noise(role.model, role.spec, job.world.rank, seed=SEEDS[name])
    return {**roles, "advantage": Advantage(job, kl_coef)}


def step(world: World, algorithm: str) -> dict[str, Any]:
    """One training step through the compiled dataflow, as the trainer runs it, with what this rank saw of it."""
    job, plan = make_job(world, recipe_of(algorithm, LAYOUT, CRITIC_LAYOUT))
    given = Given(world)
    roles = make_roles(job)
    start = Node(
        name="given.samples", role="given", call="samples", mesh="reward", source=True, writes=tuple(given_columns())
    )
    see = Node(name="given.see", role="given", call="see", mesh="actor.update", reads=COMPUTED[algorithm])
    # The algorithm's own step, but for who samples and scores.
    stages = training_step(job.recipe)
    program = compile_flow(start >> stages.experience >> see >> stages.update, plan.meshes)
    world.make_groups(schedule.rank_sets(program, plan.meshes))
    mini_batches = [{"epoch": 0, "index": index} for index in range(NUM_SAMPLES // MINI_BATCH)]
    found: dict[str, Any] = {"gradients": {}, "metrics": {}}
    for name in {"actor", "critic"} & roles.keys():
        found["gradients"][name], found["metrics"][name] = watch(roles[name], world.rank)
    Executor(
        schedule=schedule.project(program, world.rank, plan.meshes),
        roles={**roles, "given": given},
        decisions={
            "actor_mini_batch": iter([*mini_batches, None]).__next__,
            "critic_mini_batch": iter([*mini_batches, None]).__next__,
        },
        mover=Mover(world, plan.meshes, chunk=MINI_BATCH),
        world=world,
        meshes=plan.meshes,
        timeline=Timeline(),
    ).run()
    return {**found, "seen": given.seen}


# --- plain torch -----------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864) of ``[tokens, heads, head]``; a pair is (i, i + head/2)."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] / 10000.0 ** (torch.arange(half, dtype=x.dtype) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def transformer(weights: dict[str, Tensor], tokens: Tensor, heads: int, groups: int, num_layers: int) -> Tensor:
    """Final hidden states ``[tokens, hidden]`` of one sequence."""
    x = weights["embedding.word_embeddings.weight"][tokens]
    causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    for layer in range(num_layers):
        w = {name.removeprefix(f"decoder.layers.{layer}."): weight for name, weight in weights.items()}
        normed = rms_norm(x, w["input_layernorm.weight"])
        qkv = normed @ w["self_attention.linear_qkv.weight"].T
        if "self_attention.linear_qkv.bias" in w:
            qkv = qkv + w["self_attention.linear_qkv.bias"]
        # Rows of the fused weight go by group: its queries, its key, its value.
        per_group = heads // groups
        qkv = qkv.view(len(tokens), groups, per_group + 2, -1)
        query, key, value = qkv[:, :, :per_group].flatten(1, 2), qkv[:, :, per_group], qkv[:, :, per_group + 1]
        if "self_attention.q_layernorm.weight" in w:
            query = rms_norm(query, w["self_attention.q_layernorm.weight"])
            key = rms_norm(key, w["self_attention.k_layernorm.weight"])
        query = rotate(query)
        key, value = (each.repeat_interleave(per_group, dim=1) for each in (rotate(key), value))
        scores = torch.einsum("thd,shd->hts", query, key) / math.sqrt(query.shape[-1])
        attention = scores.masked_fill(~causal, -torch.inf).softmax(-1)
        x = x + torch.einsum("hts,shd->thd", attention, value).flatten(1) @ w["self_attention.linear_proj.weight"].T
        normed = rms_norm(x, w["pre_mlp_layernorm.weight"])
        gate, up = (normed @ half.T for half in w["mlp.linear_fc1.weight"])
        x = x + (torch.nn.functional.silu(gate) * up) @ w["mlp.linear_fc2.weight"].T
    return rms_norm(x, weights["decoder.final_layernorm.weight"])


class Plain:
    """The same step by one process: ``old`` columns, then an update for each mini-batch."""

    def __init__(self, algorithm: str, weights: dict[str, dict[str, np.ndarray]]) -> None:
        self.algorithm, self.model = algorithm, MODELS[algorithm]
        self.settings, self.optimizer = SETTINGS[algorithm], OPTIMIZERS[algorithm]
        self.kl_coef = SETTINGS[algorithm]["kl"].coef
        self.weights = {
            role: {
                name: torch.tensor(array, dtype=torch.float64, requires_grad=True) for name, array in tensors.items()
            }
            for role, tensors in weights.items()
        }
        given = given_columns()
        self.tokens, self.prompts, self.prompt_indices = (
            given["tokens"],
            given["prompt_lengths"],
            given["prompt_indices"],
        )
        self.masks = [mask.double() for mask in given["response_mask"]]
        self.scores = torch.tensor(given["scores"], dtype=torch.float32).double()
        self.sampled = [row.double() for row in given["rollout_log_probs"]]
        self.num_bounded = self.num_whole = 0

    def hidden(self, role: str, sample: int) -> Tensor:
        """States that predict the sample's response tokens, ``[response, hidden]``."""
        tokens, model = self.tokens[sample], self.model
        groups = model.num_query_groups or model.num_attention_heads
        states = transformer(self.weights[role], tokens, model.num_attention_heads, groups, model.num_layers)
        return states[self.prompts[sample] - 1 : -1]

    def log_probs(self, role: str, sample: int) -> tuple[Tensor, Tensor]:
        weights = self.weights[role]
        output = weights.get("output_layer.weight", weights["embedding.word_embeddings.weight"])
        log_p = (self.hidden(role, sample) @ output.T / 0.8).log_softmax(-1)
        targets = self.tokens[sample][self.prompts[sample] :]
        return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    def values(self, sample: int) -> Tensor:
        return self.hidden("critic", sample) @ self.weights["critic"]["value_head.weight"][0]

    @torch.no_grad()
    def columns(self) -> dict[str, list[Tensor]]:
        """Everything that is computed before the updates."""
        every = range(NUM_SAMPLES)
        found = {
            "old_log_probs": [self.log_probs("actor", sample)[0] for sample in every],
            "ref_log_probs": [self.log_probs("reference", sample)[0] for sample in every],
        }
        if self.algorithm == "grpo":
            found["advantages"] = [self.grpo_advantage(sample) * self.masks[sample] for sample in every]
            return found
        found["values"] = [self.values(sample) for sample in every]
        pairs = [self.gae(sample, found) for sample in every]
        found["returns"] = [returns for _, returns in pairs]
        chosen = torch.cat([advantages[mask > 0] for (advantages, _), mask in zip(pairs, self.masks, strict=True)])
        mean, scale = chosen.mean(), torch.rsqrt(chosen.var(unbiased=True) + 1e-8)
        found["advantages"] = [
            (advantages - mean) * scale * mask for (advantages, _), mask in zip(pairs, self.masks, strict=True)
        ]
        return found

    def grpo_advantage(self, sample: int) -> Tensor:
        group = self.scores[
            [other for other in range(NUM_SAMPLES) if self.prompt_indices[other] == self.prompt_indices[sample]]
        ]
        return (self.scores[sample] - group.mean()) / (group.std(unbiased=True) + 1e-6)

    def gae(self, sample: int, found: dict[str, list[Tensor]]) -> tuple[Tensor, Tensor]:
        settings = self.settings["advantage"]
        kl = found["old_log_probs"][sample] - found["ref_log_probs"][sample]
        values = found["values"][sample]
        advantages, returns = torch.zeros_like(kl), torch.zeros_like(kl)
        own = self.masks[sample].nonzero()[:, 0].tolist()
        next_value = next_advantage = 0.0
        for t in reversed(own):
            reward = (self.scores[sample] if t == own[-1] else 0.0) - self.kl_coef * kl[t]
            delta = reward + settings.gamma * next_value - values[t]
            next_advantage = delta + settings.gamma * settings.gae_lambda * next_advantage
            next_value = values[t]
            advantages[t], returns[t] = next_advantage, next_advantage + values[t]
        return advantages, returns

    def aggregate(self, rows: list[Tensor], chosen: range) -> Tensor:
        masks = [self.masks[sample] for sample in chosen]
        if self.algorithm == "ppo":
            total = sum((row * mask).sum() for row, mask in zip(rows, masks, strict=True))
            return total / sum(mask.sum() for mask in masks)
        means = [(row * mask).sum() / mask.sum() for row, mask in zip(rows, masks, strict=True) if mask.any()]
        return torch.stack(means).mean()

    def actor_loss(self, chosen: range, columns: dict[str, list[Tensor]]) -> Tensor:
        settings, losses = self.settings["loss"], []
        for sample in chosen:
            log_probs, entropy = self.log_probs("actor", sample)
            advantage = columns["advantages"][sample]
            ratio = (log_probs - columns["old_log_probs"][sample]).exp()
            clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
            loss = torch.maximum(-advantage * ratio, -advantage * clipped)
            if settings.dual_clip is not None:
                loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * settings.dual_clip), loss)
            loss = loss * self.correction(columns["old_log_probs"][sample], sample)
            if self.algorithm == "grpo":
                d = log_probs - columns["ref_log_probs"][sample]
                loss = loss + self.kl_coef * ((-d).exp() + d - 1).clamp(-10, 10)
            losses.append(loss - settings.entropy_coef * entropy)
        return self.aggregate(losses, chosen)

    def correction(self, old: Tensor, sample: int) -> Tensor:
        settings, d = CORRECTIONS[self.algorithm], old - self.sampled[sample]
        if self.algorithm == "ppo":
            weight = d.exp()
            bounded = weight.clamp(max=settings.high)
        else:
            weight = (d * self.masks[sample]).sum().exp()
            bounded = weight * (settings.low <= weight <= settings.high)
        self.num_bounded += int((bounded != weight).sum())
        self.num_whole += int((bounded == weight).sum())
        return bounded

    def critic_loss(self, chosen: range, columns: dict[str, list[Tensor]]) -> Tensor:
        losses = []
        for sample in chosen:
            values, old, returns = self.values(sample), columns["values"][sample], columns["returns"][sample]
            near = torch.minimum(torch.maximum(values, old - VALUE_CLIP), old + VALUE_CLIP)
            losses.append(0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2))
        return self.aggregate(losses, chosen)

    def update(self, role: str, loss_of: Any, columns: dict[str, list[Tensor]]) -> list[dict[str, Any]]:
        """Loss, gradients and their norm for each mini-batch, with a step of Adam after each."""
        weights, settings = self.weights[role], self.optimizer
        betas = (settings.beta1, settings.beta2)
        adam = torch.optim.Adam(weights.values(), lr=settings.lr, betas=betas, eps=settings.eps)
        found = []
        for start in range(0, NUM_SAMPLES, MINI_BATCH):
            loss = loss_of(range(start, start + MINI_BATCH), columns)
            adam.zero_grad()
            loss.backward()
            gradients = {name: weight.grad.clone() for name, weight in weights.items()}
            norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
            if settings.clip_grad and norm > settings.clip_grad:
                for weight in weights.values():
                    weight.grad *= settings.clip_grad / norm
            adam.step()
            found.append({"loss": float(loss.detach()), "gradients": gradients, "norm": norm})
        return found


# --- the comparison --------------------------------------------------------------------------------------------------


def differences(world: World, algorithm: str, weights: Any, ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Largest difference of each quantity: of a column absolute, of a tensor by its norm. Runs in a child."""
    plain = Plain(algorithm, weights)
    columns = plain.columns()
    worst: dict[str, float] = {}

    def note(quantity: str, difference: float) -> None:
        worst[quantity] = max(worst.get(quantity, 0.0), difference)

    for name in COMPUTED[algorithm]:
        seen = {sample: row for found in ranks for sample, row in found["seen"].get(name, {}).items()}
        assert seen.keys() == set(range(NUM_SAMPLES)), f"{name}: samples {sorted(seen)}"
        for sample, row in seen.items():
            note(name, float((torch.tensor(row) - columns[name][sample]).abs().max()))
    updates = {"actor": plain.update("actor", plain.actor_loss, columns)}
    assert plain.num_bounded > 0 and plain.num_whole > 0, "the correction is to act on some"
    if algorithm == "ppo":
        updates["critic"] = plain.update("critic", plain.critic_loss, columns)
    for role, (first, second) in updates.items():
        for index, update in enumerate((first, second)):
            metrics = [found["metrics"][role][index] for found in ranks if found["metrics"][role][index]]
            assert len(metrics) == 4, "the last stage of each replica reports"
            # The second tells the mean of both.
            loss, norm = (fmean(each[what] for each in (first, second)[: index + 1]) for what in ("loss", "norm"))
            for each in metrics:
                note(f"loss {index}", abs(each[f"{role}/loss"] - loss) / max(1.0, abs(loss)))
                note(f"grad_norm {index}", abs(each[f"{role}/grad_norm"] / norm - 1))
            for name, gradient in update["gradients"].items():
                pieces = [found["gradients"][role][index].get(name) for found in ranks]
                pairs = [(torch.tensor(piece), gradient[outer_of(part)]) for piece, part in filter(None, pieces)]
                difference = sum(float((mine - whole).square().sum()) for mine, whole in pairs)
                norm = sum(float(whole.square().sum()) for _, whole in pairs)
                assert norm > 0, f"{role}: {name} has no gradient"
                note(f"gradients {index}", math.sqrt(difference / norm))
    return worst


@pytest.mark.parametrize("algorithm", ["ppo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_a_step_in_every_dimension_is_the_plain_step(algorithm):
    (weights,) = run_ranks(whole_weights, 1, algorithm)
    ranks = run_ranks(step, LAYOUT.world_size, algorithm)
    shares = [found["metrics"]["actor"][1]["actor/clip_share"] for found in ranks if found["metrics"]["actor"][1]]
    assert all(0.1 < share < 0.9 for share in shares), "the second mini-batch is to be clipped in part"
    (worst,) = run_ranks(differences, 1, algorithm, weights, ranks)
    too_far = {name: found for name, found in worst.items() if found > (1e-6 if name.startswith("loss") else 1e-5)}
    assert not too_far
