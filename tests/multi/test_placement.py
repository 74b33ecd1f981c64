"""Where the roles are changes nothing: whole runs on other ranks and in other layouts log the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.cluster import ClusterConfig
from hybridflow.config.data import ArithmeticConfig, DataConfig, TokenizerConfig
from hybridflow.config.losses import KLConfig, LossConfig
from hybridflow.config.recipe import Recipe
from hybridflow.config.rewards import RewardConfig
from hybridflow.config.roles import ActorConfig, CriticConfig, OptimizerConfig, ReferenceConfig, WarmStartConfig
from hybridflow.config.rollout import RolloutConfig
from hybridflow.config.trainer import TrainerConfig
from hybridflow.families.model import ModelConfig
from hybridflow.flows.registry import ALGORITHMS
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.parallel.world import World
from hybridflow.recipe.checks import check_recipe
from hybridflow.trainer.trainer import train
from tests.support.ranks import run_ranks

OF_THE_MACHINE = (
    *("time", "throughput/", "control/", "reshard/", "checkpoint/", "memory/", "mfu/"),
    *("rollout/prefill_share", "rollout/preempted", "rollout/latency", "rollout/first_token"),
)
"""Beginnings of metrics that differ from run to run, or say how the work was shared out."""


def share_of_ones(prompt: str, response: str, answer: str) -> float:
    """A reward that a random model gets in every amount."""
    return 4.0 * response.count("1") - len(response) + 4


def layout(tp: int = 1, pp: int = 1, dp: int = 1) -> ParallelLayout:
    return ParallelLayout(tp=tp, pp=pp, dp=dp)


def recipe(folder: Path, name: str, algorithm: str, ranks: int, **placement: Any) -> Recipe:
    """Two steps of two mini-batches with a tiny model, after a warm start of two steps."""
    optimizer = OptimizerConfig(lr=1e-4)
    update = placement.get("update", layout(dp=ranks))
    critic = None
    if algorithm == "ppo":
        critic = CriticConfig(
            ranks=placement.get("critic_ranks"),
            layout=placement.get("critic", update),
            optimizer=optimizer,
            offload=placement.get("offload", False),
        )
    made = Recipe(
        name=name,
        algorithm=algorithm,
        traits=ALGORITHMS[algorithm].traits,
        seed=5,
        run_dir=str(folder / name),
        cluster=ClusterConfig(ranks=ranks),
        model=ModelConfig(
            num_layers=2,
            hidden_size=32,
            ffn_hidden_size=48,
            num_attention_heads=4,
            max_context=16,
            init_std=0.1,
            **placement.get("model", {}),
        ),
        data=DataConfig(
            train=str(folder / "train.jsonl"),
            held_out=str(folder / "held_out.jsonl"),
            arithmetic=ArithmeticConfig(num_train=60, num_held_out=8, max_operand=20),
        ),
        tokenizer=TokenizerConfig(vocab_size=20),
        warm_start=WarmStartConfig(steps=2, batch_size=10, lr=1e-3),
        actor=ActorConfig(
            ranks=placement.get("actor_ranks"),
            update=update,
            rollout=placement.get("rollout", update),
            rollout_ranks=placement.get("rollout_ranks"),
            optimizer=optimizer,
            reshard=placement.get("reshard", "auto"),
            offload=placement.get("offload", False),
        ),
        critic=critic,
        reference=ReferenceConfig(ranks=placement.get("reference_ranks"), layout=placement.get("reference")),
        reward=RewardConfig(function=f"{__name__}:share_of_ones", ranks=placement.get("reward_ranks")),
        rollout=RolloutConfig(max_new_tokens=6, group_size=4 if algorithm == "grpo" else 1),
        trainer=TrainerConfig(
            # A validation within the last step, where the best is kept.
            **{"steps": 2, "validate_every": 9, "keep_best": True, **placement.get("trainer", {})},
            global_batch_size=16,
            mini_batch_size=8,
            micro_batch_tokens=48,
            validation_samples=3,
            pass_k=2,
        ),
        loss=LossConfig(entropy_coef=0.01) if algorithm == "ppo" else LossConfig(aggregation="seq-mean-token-mean"),
        kl=KLConfig(coef=0.1, target=0.5, horizon=100)
        if algorithm == "ppo"
        else KLConfig(coef=0.1, estimator="k3", place="loss"),
    )
    check_recipe(made)
    return made


def run(world: World, made: Recipe) -> None:
    train(made, world)


def record(made: Recipe) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """The run's metrics, a row for each step, and its summary."""
    run_ranks(run, made.cluster.ranks, made)
    folder = Path(made.run_dir)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines], json.loads((folder / "summary.json").read_text(encoding="utf-8"))


PPO_PLACEMENTS = {
    "two": dict(ranks=2, update=layout(tp=2), rollout=layout(dp=2), critic=layout(pp=2)),
    "colocated": dict(
        ranks=4, update=layout(tp=2, dp=2), rollout=layout(dp=4), critic=layout(pp=2, dp=2), offload=True
    ),
    "split": dict(
        ranks=6,
        actor_ranks=(0, 1, 2, 3),
        update=layout(tp=2, dp=2),
        rollout=layout(dp=4),
        critic_ranks=(4, 5),
        critic=layout(pp=2),
        reshard="torch",
    ),
    "overlapping": dict(
        ranks=6,
        actor_ranks=(3, 2, 1, 0),
        update=layout(tp=2, pp=2),
        rollout=layout(tp=2, dp=2),
        critic_ranks=(2, 3, 4, 5),
        critic=layout(tp=2, dp=2),
        reference_ranks=(4, 1),
        reference=layout(dp=2),
    ),
}
GRPO_PLACEMENTS = {
    "four": dict(ranks=4, update=layout(pp=2, dp=2), rollout=layout(tp=2, dp=2), reshard="torch", offload=True),
    "strided": dict(ranks=4, update=layout(tp=4), rollout=layout(tp=2, dp=2)),  # on ranks 0, 2, 1, 3
    "reference apart": dict(ranks=3, actor_ranks=(0, 2), update=layout(dp=2), reference_ranks=(1,), reference=layout()),
}


MODELS = {
    "plain": {},
    "capped": dict(
        tied_embeddings=True,
        zero_centered_norms=True,
        post_norms=True,
        activation="gelu_tanh",
        scaled_embeddings=True,
        attention_softcap=2.0,
        logit_softcap=5.0,
        window=3,
        window_layers=(1,),
    ),
    "mixture": dict(num_experts=4, experts_per_token=2, num_query_groups=2),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm, names, model",
    [
        ("ppo", ("overlapping",), "plain"),
        ("grpo", ("strided",), "plain"),
        ("ppo", ("two", "colocated", "split"), "plain"),
        ("grpo", ("four", "reference apart"), "plain"),
        ("ppo", ("overlapping",), "capped"),
        ("ppo", ("overlapping",), "mixture"),
    ],
)
def test_every_placement_logs_the_same_numbers(algorithm, names, model, tmp_path):
    placements = {name: (PPO_PLACEMENTS | GRPO_PLACEMENTS)[name] | {"model": MODELS[model]} for name in names}
    alone, summary = record(recipe(tmp_path, "alone", algorithm, 1, model=MODELS[model]))
    assert len(alone) == 2
    # Of so few tokens the estimate may be below 0.
    assert abs(alone[1]["kl/ref"]) > 1e-4 and alone[0]["actor/grad_norm"] > 0.1, "there is something to compare"
    assert 0 < alone[1]["validation/pass_at_1"] < alone[1]["validation/pass_at_k"] < 1
    for name, placement in placements.items():
        found, other_summary = record(recipe(tmp_path, name, algorithm, **placement))
        for step, (expected, other) in enumerate(zip(alone, found, strict=True), start=1):
            for metric, value in expected.items():
                if not metric.startswith(OF_THE_MACHINE):
                    # The floor is what rounding leaves of means that cancel, such as the KL to weights just left.
                    assert abs(other[metric] - value) <= 1e-5 * abs(value) + 1e-6, (name, step, metric)
            # The first step goes on with the weights of the validation before it.
            if "rollout" in placement and step == 2:
                assert other["reshard/bytes"] == other["reshard/limit_bytes"] > 0, (name, step)
                assert other["reshard/extra_bytes"] > 0 and other["reshard/time_s"] > 0, (name, step)
        for score in ("score_before_rl", "score_after_rl"):
            assert abs(other_summary[score] - summary[score]) <= 1e-6, (name, score)
