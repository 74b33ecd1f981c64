"""``cluster`` and ``fallbacks``: the ranks of a job."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.sections import ListedCount, Positive, Seconds


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Set the ranks of the job and their deadlines.

    Attributes:
        ranks: Number of ranks. Without a launcher, ``hybridflow train`` starts this many processes on this machine. A
            recipe that leaves out ``actor.update`` too has as many as the launcher started, or one for each GPU.
        ranks_per_node: Ranks on each node. None means all ranks on one node.
        deadline_s: Longest wait for another rank, or for a call of a reward function, in seconds. Set it above the
            longest phase in which some ranks wait for others. A dead or silent rank is found much earlier.
        start_deadline_s: Longest wait for all ranks to join, in seconds.
        dead_after_s: Time without a sign of life after which a rank counts as dead, in seconds.
        threads_per_rank: CPU threads of each rank.
        memory_budget_gb: Accelerator memory of each rank, in 1e9 bytes. A job that needs more by our estimate
            (``hybridflow plan job``) is refused before it starts. None means no limit.
        hardware: Hardware for which ``layout: auto`` searches and ``hybridflow plan job`` counts memory: a name or file
            of ``hybridflow plan auto --hardware``. None means what ``hybridflow doctor --measure`` has measured for the
            search, and the site settings for the memory.
    """

    ranks: ListedCount = 1
    ranks_per_node: ListedCount | None = None
    deadline_s: Seconds = 1800.0
    start_deadline_s: Seconds = 120.0
    dead_after_s: Seconds = 20.0
    threads_per_rank: ListedCount = 1
    memory_budget_gb: Positive | None = None
    hardware: str | None = None


@dataclass(frozen=True, kw_only=True)
class FallbackConfig:
    """Set overrides for another number of ranks, for instance after a node is lost.

    Attributes:
        ranks: Ranks that the fallback needs. Of several fallbacks that fit, the job takes the one with the most ranks.
        overrides: Overrides ``key=value``, as on the command line. They set layouts that fill these ranks.
    """

    ranks: ListedCount
    overrides: tuple[str, ...] = ()
