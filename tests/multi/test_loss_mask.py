"""What is learned where samples are left out is what is learned of a batch that never had them, in every layout."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hybridflow.config.losses import ShapingConfig
from hybridflow.config.rewards import RewardConfig
from hybridflow.config.roles import OptimizerConfig
from hybridflow.dataflow.batch import Ragged
from hybridflow.errors import RewardError
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.placement.loss_mask import is_last_mini_batch
from hybridflow.roles.actor import Actor
from hybridflow.roles.advantage import Advantage, KLCoefficient
from hybridflow.roles.critic import Critic
from tests.multi.jobs import add_noise, make_batch, make_job, tiny_recipe
from tests.support.ranks import run_ranks

GONE = (2, 7, 8)
"""Of twelve samples in groups of three, those that have no score."""
CALLS = (
    *("ppo", "safe", "grpo", "dr_grpo", "rloo", "opo", "remax"),
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline"),
)
COLUMN = {"safe": "costs", "remax": "baselines"}
"""Call -> the column that lacks numbers; of the others it is the scores."""


def dropping_job(world, layout, algorithm="ppo"):
    recipe = tiny_recipe(layout, algorithm, group_size=3, optimizer=OptimizerConfig(lr=1e-4))
    recipe = replace(
        recipe,
        reward=RewardConfig(function="mine:score", on_failure="drop"),
        shaping=ShapingConfig(overlong_buffer=4),
        kl=replace(recipe.kl, place="reward"),
    )
    return make_job(world, recipe)[0]


def scored(column):
    """Samples with all columns, of which some lack a number."""
    batch = make_batch()
    numbers = {name: torch.arange(12).float().sin() for name in ("scores", "costs", "baselines")}
    numbers[column][list(GONE)] = math.nan
    more = {"prompt_indices": batch.ids // 3, "cost_values": batch.columns["values"]}
    return batch.with_columns({**more, **numbers})


def shares(world, job, batch):
    """This rank's samples: a replica that is not the first has nothing but samples that are left out."""
    mesh = job.meshes["actor.update"]
    dp = mesh.coordinate(world.rank).dp
    owners = torch.zeros(12, dtype=torch.int64)
    owners[[7, 8]] = mesh.layout.dp - 1
    batch = batch.with_columns({"owners": owners})
    return batch.select((batch.columns["owners"] == dp).nonzero()[:, 0])


def never_there(batch):
    return batch.select((~torch.isin(batch.ids, torch.tensor(GONE))).nonzero()[:, 0])


def rows(batch):
    columns = {name: column.to_list() for name, column in batch.columns.items() if isinstance(column, Ragged)}
    return {
        (name, number): row.tolist()
        for name, column in columns.items()
        for number, row in zip(batch.ids.tolist(), column, strict=True)
    }


def judge(world, layout):
    job = dropping_job(world, layout)
    found = {}
    for call in CALLS:
        with_gone = shares(world, job, scored(COLUMN.get(call, "scores")))
        results = []
        for batch in (with_gone, never_there(with_gone)):
            advantage = Advantage(job, KLCoefficient(job.recipe))
            result = advantage.calls[call](batch, {})
            metrics = {name: value for name, value in advantage.metrics.items() if name != "batch/dropped"}
            results.append((rows(result), metrics, advantage.metrics["batch/dropped"]))
        found[call] = results
    return found


@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(dp=2)], ids=str)
def test_advantages_are_those_of_the_others(layout):
    by_rank = run_ranks(judge, layout.world_size, layout)
    for call in CALLS:
        for found in by_rank:
            (whole, metrics, num_dropped), (part, part_metrics, none) = found[call]
            assert num_dropped == 3 and none == 0 and metrics == part_metrics
            assert math.isfinite(sum(metrics.values())) and "reward/mean" in metrics
            for key, row in whole.items():
                assert row == (part[key] if key in part else [0.0] * len(row)), (call, key)
        names = {number for found in by_rank for _, number in found[call][0][0]}
        assert names == set(range(12)) and any(any(row) for found in by_rank for row in found[call][1][0].values()), (
            "nothing would be learned"
        )
    if layout.dp == 2:
        alone = run_ranks(judge, 1, ParallelLayout())[0]
        for call in CALLS:
            together = {key: row for found in by_rank for key, row in found[call][0][0].items()}
            for key, row in alone[call][0][0].items():
                assert together[key] == pytest.approx(row, abs=1e-6), (call, key)


def nothing_left(world):
    job = dropping_job(world, ParallelLayout(dp=2))
    batch = shares(world, job, make_batch().with_columns({"scores": torch.full((12,), math.nan)}))
    with pytest.raises(RewardError, match="none of the 12 samples of this step has all its scores"):
        Advantage(job, KLCoefficient(job.recipe)).calls["grpo"](batch, {})
    return True


def test_a_step_without_any_score_is_an_error_on_all_ranks():
    assert run_ranks(nothing_left, 2) == [True, True]


def update(world, layout, algorithm, is_truncated=False):
    """Two optimizer steps with the samples that are left out, and two without them, from the same weights."""
    job = dropping_job(world, layout, algorithm)
    dp = job.meshes["actor.update"].coordinate(world.rank).dp
    batch = scored("scores")
    if is_truncated:
        batch = batch.with_columns({"is_truncated": batch.dense("scores").isnan(), "scores": torch.zeros(12)})
    batch = batch.select((batch.ids % layout.dp == dp).nonzero()[:, 0])
    found = []
    for part in (batch, never_there(batch)):
        roles = {"actor": Actor(job, KLCoefficient(job.recipe))}
        if job.recipe.critic is not None:
            roles["critic"] = Critic(job)
        before, after, numbers = [], [], {}
        for name, role in roles.items():
            add_noise(role.model, role.spec, world.rank, seed=3)
            role.trainable.reload_weights()
            before += [tensor.clone() for tensor in role.model.tensors().values()]
            for index in range(2):
                role.update(part, {f"{name}_mini_batch": {"epoch": 0, "index": index}})
                numbers |= {f"{metric} {index}": value for metric, value in role.metrics.items()}
            after += [tensor.clone() for tensor in role.model.tensors().values()]
        step = torch.cat([(now - then).flatten() for now, then in zip(after, before, strict=True)])
        found.append((numbers, step.tolist()))
    return found


LAYOUTS = [ParallelLayout(), ParallelLayout(dp=2), ParallelLayout(tp=2), ParallelLayout(pp=2)]


@pytest.mark.parametrize("algorithm", [pytest.param("ppo", marks=pytest.mark.slow), "grpo", "dr-grpo", "gspo"])
def test_updates_are_those_of_the_others(algorithm):
    reported = []
    for layout in LAYOUTS[: 4 if algorithm == "ppo" else 2]:
        for (numbers, step), (expected, right) in run_ranks(update, layout.world_size, layout, algorithm):
            # On ranks that hold no loss there is none to tell.
            assert numbers == pytest.approx(expected, rel=1e-4, abs=1e-6)
            step, right = torch.tensor(step), torch.tensor(right)
            # Where a gradient is about 0, rounding decides over Adam's first step.
            assert float((step - right).norm()) < 0.02 * float(right.norm()) and float(right.norm()) > 0
            if "actor/loss 0" in numbers:
                reported.append(
                    {name: value for name, value in numbers.items() if not name.endswith(("_max 0", "_max 1"))}
                )
    assert len(reported) >= 2
    for numbers in reported[1:]:
        assert numbers == pytest.approx(reported[0], rel=1e-4, abs=1e-6)


def test_updates_without_truncated_responses_are_those_of_the_others():
    for (numbers, step), (expected, right) in run_ranks(update, 2, ParallelLayout(dp=2), "grpo", True):
        assert numbers == pytest.approx(expected, rel=1e-4, abs=1e-6)
        step, right = torch.tensor(step), torch.tensor(right)
        assert float((step - right).norm()) < 0.02 * float(right.norm()) and float(right.norm()) > 0


def test_a_step_ends_with_the_last_mini_batch_of_the_last_epoch():
    recipe = tiny_recipe(ParallelLayout(), "grpo")
    recipe = replace(recipe, loss=replace(recipe.loss, epochs=2))
    turns = [{"epoch": epoch, "index": index} for epoch in range(2) for index in range(12 // 6)]
    found = [is_last_mini_batch(SimpleNamespace(recipe=recipe), turn) for turn in turns]
    assert found == [False, False, False, True]


def test_a_mini_batch_of_none_but_dropped_samples_makes_no_update():
    (skipped,) = run_ranks(all_gone, 1)
    assert skipped == 1.0


def all_gone(world):
    job = dropping_job(world, ParallelLayout(), "grpo")
    actor = Actor(job, KLCoefficient(job.recipe))
    scores = torch.cat([torch.full((6,), math.nan), torch.zeros(6)])
    batch = make_batch().with_columns({"scores": scores})
    actor.update(batch, {"actor_mini_batch": {"epoch": 0, "index": 0}})
    return actor.metrics["actor/skipped"]
