"""Advantages of every online algorithm on two ranks, and mini-batches that nothing is learned from.

The truth is plain loops over Python numbers, in which a sample is a list of the policy's own tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from hybridflow.config.losses import AdvantageConfig, CorrectionConfig, KLConfig, LagrangeConfig, ShapingConfig
from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.parallel.world import World
from hybridflow.roles.actor import Actor
from hybridflow.roles.advantage import Advantage, KLCoefficient
from hybridflow.roles.critic import Critic
from tests.multi.jobs import make_batch, make_job, tiny_recipe
from tests.support.ranks import run_ranks

GROUP_SIZE, KL_COEF, GAMMA, GAE_LAMBDA = 3, 0.2, 0.9, 0.7
SHAPING = ShapingConfig(overlong_buffer=8, overlong_factor=3.0)
CALLS = {
    "grpo": "grpo",
    "dr-grpo": "dr_grpo",
    "rloo": "rloo",
    "opo": "opo",
    "reinforce++": "reinforce_plus_plus",
    "reinforce++-baseline": "reinforce_plus_plus_baseline",
    "remax": "remax",
}


@dataclass(frozen=True)
class Sample:
    """What is known of a sample, at its own tokens alone."""

    prompt_index: int
    kl: tuple[float, ...]
    score: float
    baseline: float

    @property
    def summed(self) -> float:
        return self.score - KL_COEF * math.fsum(self.kl)

    def rewards(self) -> list[float]:
        rewards = [-KL_COEF * kl for kl in self.kl]
        return [*rewards[:-1], rewards[-1] + self.score] if rewards else []


def full_batch() -> Batch:
    batch = make_batch(12)
    scores = torch.randn(12, generator=torch.Generator().manual_seed(5))
    return batch.with_columns(
        {
            "prompt_indices": torch.arange(12) // GROUP_SIZE,
            "scores": scores,
            "baselines": (torch.arange(12) // GROUP_SIZE) / 4.0,
        }
    )


def share_of(batch: Batch, rank: int) -> Batch:
    """Of a group on both ranks, one of the other's, and so on."""
    return batch.select(torch.tensor([0, 1, 4, 9] if rank == 0 else [2, 3, 5, 6, 7, 8, 10, 11]))


LAYOUTS = [ParallelLayout(dp=2), ParallelLayout(cp=2), ParallelLayout(tp=2)]


def advantages_of(world: World) -> list[dict[tuple[str, bool], Any]]:
    return [advantages_in(world, layout) for layout in LAYOUTS]


def advantages_in(world: World, layout: ParallelLayout) -> dict[tuple[str, bool], Any]:
    """Rows of advantages by sample, and what was measured; of each algorithm, without and with shaped scores."""
    found: dict[tuple[str, bool], Any] = {}
    for algorithm, call in CALLS.items():
        settings: dict[str, Any] = {"kl": KLConfig(coef=KL_COEF), "advantage": AdvantageConfig()}
        if algorithm == "reinforce++":
            settings["advantage"] = AdvantageConfig(gamma=GAMMA)
        recipe = tiny_recipe(layout, algorithm, settings=settings, group_size=GROUP_SIZE)
        for shaping in (ShapingConfig(), SHAPING):
            job, _ = make_job(world, replace(recipe, shaping=shaping))
            role = Advantage(job, KLCoefficient(recipe))
            batch = share_of(full_batch(), world.rank) if layout.dp > 1 else full_batch()
            column = role.calls[call](batch, {}).columns["advantages"]
            rows = dict(zip(batch.ids.tolist(), [row.tolist() for row in column.to_list()], strict=True))
            found[algorithm, shaping is SHAPING] = rows, dict(role.metrics), role.sample_stats.get("reward", [])
    return found


def plain_samples(*, is_shaped: bool) -> list[Sample]:
    batch = full_batch()
    columns = {name: batch.columns[name] for name in ("response_mask", "old_log_probs", "ref_log_probs")}
    rows = {name: column.to_list() for name, column in columns.items()}
    samples = []
    for index in range(12):
        own = rows["response_mask"][index] > 0
        kl = (rows["old_log_probs"][index] - rows["ref_log_probs"][index])[own].tolist()
        # At most 12 tokens, of which the last 8 are paid for.
        penalty = min(-(len(own) - 4) / 8 * 3.0, 0.0) if is_shaped else 0.0
        score = float(batch.columns["scores"][index]) + penalty
        samples.append(Sample(index // GROUP_SIZE, tuple(kl), score, float(batch.columns["baselines"][index])))
    return samples


def whitened(rows: list[list[float]]) -> list[list[float]]:
    every = [value for row in rows for value in row]
    mean = math.fsum(every) / len(every)
    variance = math.fsum((value - mean) ** 2 for value in every) / (len(every) - 1)
    return [[(value - mean) / math.sqrt(variance + 1e-8) for value in row] for row in rows]


def to_go(rewards: list[float], gamma: float) -> list[float]:
    return [math.fsum(gamma**k * each for k, each in enumerate(rewards[t:])) for t in range(len(rewards))]


def plain(algorithm: str, samples: list[Sample]) -> list[list[float]]:
    """Advantages of each sample's own tokens."""
    if algorithm == "reinforce++":
        return whitened([to_go(sample.rewards(), GAMMA) for sample in samples])
    if algorithm == "remax":
        return [[each - sample.baseline for each in to_go(sample.rewards(), 1.0)] for sample in samples]
    rows = []
    for sample in samples:
        mates = [each for each in samples if each.prompt_index == sample.prompt_index]
        others = [each.summed for each in mates if each is not sample]
        mean = math.fsum(each.summed for each in mates) / len(mates)
        std = math.sqrt(math.fsum((each.summed - mean) ** 2 for each in mates) / (len(mates) - 1))
        num_tokens = sum(len(each.kl) for each in mates)
        judged = {
            "grpo": (sample.summed - mean) / (std + 1e-6),
            "rloo": sample.summed - math.fsum(others) / len(others),
            "opo": sample.summed - math.fsum(each.summed * len(each.kl) for each in mates) / num_tokens,
        }
        rows.append([judged.get(algorithm, sample.summed - mean)] * len(sample.kl))
    return whitened(rows) if algorithm == "reinforce++-baseline" else rows


def test_advantages_are_the_plain_loops_whatever_a_rank_has():
    whole = full_batch()
    masks, scores = whole.columns["response_mask"].to_list(), whole.columns["scores"].double()
    num_tokens = int(whole.columns["tokens"].lengths.sum())
    cases = [(algorithm, is_shaped) for algorithm in CALLS for is_shaped in (False, True)]
    for layout, *ranks in zip(LAYOUTS, *run_ranks(advantages_of, 2), strict=True):
        for algorithm, is_shaped in cases:
            shares = [rank[algorithm, is_shaped] for rank in ranks]
            samples = plain_samples(is_shaped=is_shaped)
            expected = plain(algorithm, samples)
            # Each rank of a replica has all samples of the replica.
            found = [rows for rows, *_ in shares] if layout.dp == 1 else [shares[0][0] | shares[1][0]]
            for rows in found:
                assert sorted(rows) == list(range(12))
                for index, mask in enumerate(masks):
                    row = torch.tensor(rows[index], dtype=torch.float64)
                    assert not row[mask == 0].any(), (layout, algorithm, index)
                    wanted = torch.tensor(expected[index], dtype=torch.float64)
                    torch.testing.assert_close(row[mask > 0], wanted, rtol=1e-5, atol=1e-5)
            for _, metrics, _ in shares:
                # The mean of what the reward gave is not that of what is learned from.
                assert metrics["reward/mean"] == pytest.approx(float(scores.mean()))
                assert metrics["batch/num_tokens"] == num_tokens
                num_own = sum(float(mask.sum()) for mask in masks)
                assert metrics["response/length_mean"] == pytest.approx(num_own / 12)
                assert ("reward/shaped_mean" in metrics) == is_shaped
                if is_shaped:
                    assert metrics["reward/shaped_mean"] == pytest.approx(sum(each.score for each in samples) / 12)
                baseline = metrics.get("reward/baseline_mean")
                assert baseline == (pytest.approx(0.375) if algorithm == "remax" else None)
            # Each sample is told of once.
            assert sorted(each for *_, told in shares for each in told) == pytest.approx(sorted(scores.tolist()))


def twins_of(world: World) -> dict[int, float]:
    """Advantages where the first group is one response three times, of which a layout has rounded one otherwise."""
    batch = full_batch()
    rows = {name: batch.columns[name].to_list() for name in ("tokens", "response_mask", "old_log_probs")}
    rows["ref_log_probs"] = batch.columns["ref_log_probs"].to_list()
    for each in rows.values():
        each[1] = each[2] = each[0]
    rows["old_log_probs"][2] = rows["old_log_probs"][0] + 1e-3
    columns = {name: Ragged.from_list(each, each[0].dtype) for name, each in rows.items()}
    scores = batch.columns["scores"].clone()
    scores[1:3] = scores[0]
    recipe = tiny_recipe(ParallelLayout(dp=2), "grpo", settings={"kl": KLConfig(coef=KL_COEF)}, group_size=GROUP_SIZE)
    role = Advantage(make_job(world, recipe)[0], KLCoefficient(recipe))
    mine = share_of(batch.with_columns({**columns, "scores": scores}), world.rank)
    column = role.calls["grpo"](mine, {}).columns["advantages"]
    return dict(zip(mine.ids.tolist(), [float(row.abs().sum()) for row in column.to_list()], strict=True))


def test_rounding_tells_no_equal_responses_apart():
    found = {number: size for rank in run_ranks(twins_of, 2) for number, size in rank.items()}
    assert [found[number] for number in range(3)] == [0.0] * 3
    assert found[3] > 0.1


def judged_batch() -> Batch:
    """Samples with rewards and costs, and values of a critic of either."""
    batch = full_batch()
    values = batch.columns["values"]
    costs = torch.randn(12, generator=torch.Generator().manual_seed(6))
    return batch.with_columns({"costs": costs, "cost_values": Ragged(1.0 - 0.5 * values.values, values.lengths)})


def safe_columns_of(world: World) -> dict[str, Any]:
    recipe = tiny_recipe(
        ParallelLayout(dp=2),
        settings={
            "kl": KLConfig(coef=KL_COEF),
            "advantage": AdvantageConfig(gamma=GAMMA, gae_lambda=GAE_LAMBDA),
        },
    )
    recipe = replace(recipe, lagrange=LagrangeConfig(init=0.5))
    role = Advantage(make_job(world, recipe)[0], KLCoefficient(recipe))
    batch = share_of(judged_batch(), world.rank)
    columns = role.calls["safe"](batch, {}).columns
    rows = {
        name: dict(zip(batch.ids.tolist(), [row.tolist() for row in column.to_list()], strict=True))
        for name, column in columns.items()
    }
    return {**rows, "metrics": dict(role.metrics)}


def estimated(rewards: list[float], values: list[float]) -> tuple[list[float], list[float]]:
    """Advantages and returns by the sum of the definition: A of t is the sum of (gamma lambda)^k delta of t + k."""
    later = [*values, 0.0][1:]
    deltas = [reward + GAMMA * after - value for reward, value, after in zip(rewards, values, later, strict=True)]
    advantages = to_go(deltas, GAMMA * GAE_LAMBDA)
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


def test_costs_have_a_critic_of_their_own_and_no_penalty():
    batch, samples = judged_batch(), plain_samples(is_shaped=False)
    masks = [row > 0 for row in batch.columns["response_mask"].to_list()]
    values, cost_values = (
        [row[own].tolist() for row, own in zip(batch.columns[name].to_list(), masks, strict=True)]
        for name in ("values", "cost_values")
    )
    expected: dict[str, list[list[float]]] = {"advantages": [], "returns": [], "cost_returns": []}
    for index, sample in enumerate(samples):
        costs = [0.0] * len(sample.kl)
        costs[-1:] = [float(batch.columns["costs"][index])] * bool(costs)
        advantages, returns = estimated(sample.rewards(), values[index])
        cost_advantages, cost_returns = estimated(costs, cost_values[index])
        # A unit of cost is worth half of one of reward.
        combined = [(one - 0.5 * other) / 1.5 for one, other in zip(advantages, cost_advantages, strict=True)]
        for name, row in (("advantages", combined), ("returns", returns), ("cost_returns", cost_returns)):
            expected[name].append(row)
    expected["advantages"] = whitened(expected["advantages"])
    ranks = run_ranks(safe_columns_of, 2)
    for name, rows in expected.items():
        found = ranks[0][name] | ranks[1][name]
        for index, own in enumerate(masks):
            row = torch.tensor(found[index])
            assert row[own].tolist() == pytest.approx(rows[index], abs=1e-5), (name, index)
            assert not row[~own].any(), (name, index)
    for found in ranks:
        assert found["metrics"]["cost/mean"] == pytest.approx(float(batch.columns["costs"].mean()))
        assert found["metrics"]["cost/multiplier"] == 0.5


def weights_of(role: Any) -> list[torch.Tensor]:
    return [tensor.clone() for _, tensor in sorted(role.model.tensors().items())]


def are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def updates(world: World) -> dict[str, Any]:
    """Which updates of two mini-batches moved the weights, where the second has nothing to learn from."""
    found: dict[str, Any] = {}
    whole = full_batch()
    masks = whole.columns["response_mask"]
    nothing = Ragged.from_list([row * (at < 6) for at, row in enumerate(masks.to_list())], torch.float32)
    sampled = whole.columns["rollout_log_probs"]
    # Of the first mini-batch the sampler was the trainer.
    near = [old if at < 6 else old + 1.0 for at, old in enumerate(whole.columns["old_log_probs"].to_list())]
    batches = {
        "masked": whole.with_columns({"response_mask": nothing}),
        "short": whole.select(torch.arange(6)),
        "rejected": whole.with_columns({"rollout_log_probs": Ragged.from_list(near, sampled.values.dtype)}),
    }
    batches["kept"] = batches["rejected"]
    recipe = tiny_recipe(ParallelLayout(dp=world.size), "ppo")
    for name, batch in batches.items():
        correction = CorrectionConfig(reject="k2", reject_high=0.1) if name == "rejected" else CorrectionConfig()
        job, _ = make_job(world, replace(recipe, correction=correction))
        mine = batch.select((batch.ids % world.size == world.rank).nonzero()[:, 0])
        for role, kind in ((Actor(job, KLCoefficient(recipe)), "actor"), (Critic(job), "critic")):
            moved = []
            for index in range(2):
                before = weights_of(role)
                role.update(mine, {f"{kind}_mini_batch": {"epoch": 0, "index": index}})
                moved.append(not are_equal(before, weights_of(role)))
            found[f"{name} {kind}"] = moved, dict(role.metrics)
    return found


def test_a_mini_batch_in_which_no_token_counts_is_left_out_on_all_ranks():
    for found in run_ranks(updates, 2):
        for name in ("masked", "short", "rejected"):
            moved, metrics = found[f"{name} actor"]
            assert moved == [True, False], name
            assert metrics["actor/skipped"] == 1 and math.isfinite(metrics["actor/loss"])
        assert found["masked critic"][0] == found["short critic"][0] == [True, False]
        # What the sampler did is the policy's concern alone.
        assert found["rejected critic"][0] == [True, True]
        masks = full_batch().columns["response_mask"].to_list()
        late, every = sum(float(row.sum()) for row in masks[6:]), sum(float(row.sum()) for row in masks)
        assert found["rejected actor"][1]["correction/rejected_share"] == pytest.approx(late / every)
        # What is left out is the farthest, and is told of as where it is kept.
        for name in ("rollout/kl", "rollout/logprob_abs_diff", "rollout/logprob_abs_diff_max", "kl/ref"):
            assert found["rejected actor"][1][name] == pytest.approx(found["kept actor"][1][name]), name
        # The sampler's log-probabilities are 1 above: k3 is exp(-1) + 1 - 1.
        assert found["kept actor"][1]["rollout/kl"] == pytest.approx(math.exp(-1) * late / every)
