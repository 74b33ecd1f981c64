"""How conversations with an environment went: their turns, and which failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridflow.dataflow.role import Metrics
from hybridflow.errors import RewardError
from hybridflow.observe.rank_log import say
from hybridflow.placement.job import Job
from hybridflow.rollout.environment import Conversation


def tell_failures(found: Sequence[Conversation]) -> None:
    """Print how many conversations failed, and why one did. For one rank of a replica."""
    errors = [each.error for each in found if each.error is not None]
    if errors:
        say(f"environment: failed in {len(errors)} of {len(found)} samples; one: {errors[0]}")


def measure_conversations(job: Job, found: Sequence[Conversation], num_learned: int, metrics: Metrics) -> None:
    """Measure how long conversations were, and how many failed. Collective: the rollout mesh.

    Args:
        job: The job.
        found: Those of this replica.
        num_learned: How many of them are to be learned from.
        metrics: Take ``environment/turns_mean`` and ``environment/failed``.

    Raises:
        RewardError: All failed of those that were to be learned from.
    """
    mesh, errors = job.meshes["actor.rollout"], [each.error for each in found if each.error is not None]
    share = [num_learned, len(found), sum(each.num_turns for each in found), len(errors), errors[:1]]
    # Each replica has its own samples, and its first rank tells of them.
    shares = job.world.coordinator(mesh.ranks).gather(share, "conversations")
    sample_stats: list[list[Any]] = [shares[mesh.ranks.index(mesh.replica(dp)[0])] for dp in range(mesh.layout.dp)]
    *counts, failures = zip(*sample_stats, strict=True)
    num_learned, num_samples, num_turns, num_failed = (sum(each) for each in counts)
    if num_failed and num_failed == num_learned:
        first = next(error for each in failures for error in each)
        raise RewardError(
            f"the environment failed in all {num_failed} samples: {first}; mend it, there is nothing to learn from"
        )
    metrics.add_share("environment/turns_mean", num_turns, num_samples)
    metrics.add_count("environment/failed", num_failed)
