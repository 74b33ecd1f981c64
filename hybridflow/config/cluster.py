"""``cluster`` and ``fallbacks``: the ranks of a job."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.sections import (
    Count,
    Positive,
)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The ranks of the job.

    Attributes:
        ranks: Number of ranks; started plainly, ``hybridflow train`` brings up so many on this machine.
        ranks_per_node: Ranks on each node; None: all on one node.
        deadline_s: Longest wait for another rank, in seconds; longer than any phase that some ranks take while others
            wait for them. A rank that dies or falls silent is seen much earlier.
        start_deadline_s: Longest wait for all ranks to join, in seconds.
        dead_after_s: A rank that has shown no sign of life for so long is taken for dead, in seconds.
        threads_per_rank: CPU threads of each rank.
        memory_budget_gb: Accelerator memory of each rank, in 1e9 bytes; a job that by our estimate
            (``hybridflow plan job``) needs more is refused before it begins. None: nothing is refused.
    """

    ranks: Count = 1
    ranks_per_node: Count | None = None
    deadline_s: Positive = 1800.0
    start_deadline_s: Positive = 120.0
    dead_after_s: Positive = 20.0
    threads_per_rank: Count = 1
    memory_budget_gb: Positive | None = None


@dataclass(frozen=True, kw_only=True)
class FallbackConfig:
    """What to run with where other numbers of ranks come than ``cluster.ranks``: after a node was lost, for instance.

    Attributes:
        ranks: So many ranks are enough for it; of several fallbacks that one is taken that uses the most.
        overrides: ``key=value`` each, as on the command line: layouts that fill these ranks.
    """

    ranks: Count
    overrides: tuple[str, ...] = ()
