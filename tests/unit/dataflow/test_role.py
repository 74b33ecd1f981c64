"""Metrics of a step's updates, by hand."""

from hybridflow.dataflow.role import Metrics


def test_metrics_of_updates_are_means_over_the_mini_batches_of_a_step():
    metrics = Metrics()
    metrics.add_update("actor", 2.0, {"actor/loss": 1.0, "margin": 4.0})
    metrics.add_update("actor", 7.0, {"actor/loss": 2.0})
    metrics.add_update("actor", 3.0, {"actor/loss": 6.0})
    metrics |= {"reward/mean": 0.5}
    # (1 + 2 + 6) / 3 and (2 + 7 + 3) / 3; one mini-batch alone had a margin.
    updates = {"actor/loss": 3.0, "margin": 4.0, "actor/grad_norm": 4.0, "actor/grad_norm_max": 7.0}
    assert metrics == {**updates, "reward/mean": 0.5}
    metrics.clear()
    assert metrics == {}
    metrics.add_update("actor", 5.0, {"actor/loss": 8.0})
    assert metrics == {"actor/loss": 8.0, "actor/grad_norm": 5.0, "actor/grad_norm_max": 5.0}


def test_shares_and_counts_of_several_rollouts_are_those_of_the_step():
    metrics = Metrics()
    for num_claimed, num_samples, num_failed in ((1, 4, 2), (0, 12, 0)):
        metrics.add_share("rollout/claimed", num_claimed, num_samples)
        metrics.add_count("environment/failed", num_failed)
    assert metrics == {"rollout/claimed": 1 / 16, "environment/failed": 2.0}
    metrics.clear()
    metrics.add_share("rollout/claimed", 0, 0)
    assert metrics == {"rollout/claimed": 0.0}
