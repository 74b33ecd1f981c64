"""How this process was started, and which rank it is: one object whichever launcher it was. No torch.

Known launchers: hybridflow's own and torchrun (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``), MPI (``mpirun``, or ``srun
--mpi`` with an MPI that answers), Slurm's ``srun`` (``SLURM_STEP_ID``, ``SLURM_PROCID``), or none: one process, one
rank.
"""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hybridflow.errors import LayoutError

MPI_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MPI_LOCALRANKID")


@dataclass(frozen=True, kw_only=True)
class Start:
    """Which rank this process is and where it meets the others.

    Attributes:
        launcher: ``"alone"``, ``"env"`` (torchrun and hybridflow's own), ``"mpi"`` or ``"slurm"``.
        rank: Global rank.
        size: Ranks of the job.
        local_rank: Index among the ranks of this node.
        ranks_per_node: So many consecutive ranks share a node, from rank 0 on; where nodes have different numbers of
            ranks, the largest number for which that is true.
        hosts: Name of each rank's node, in rank order; empty where the launcher does not tell.
        address: Host of the rendezvous; empty when alone.
        port: TCP port of the rendezvous.
        agent_store: The launcher itself hosts the rendezvous (torchrun).
    """

    launcher: str
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    ranks_per_node: int = 1
    hosts: tuple[str, ...] = ()
    address: str = ""
    port: int = 0
    agent_store: bool = False

    def first(self, num_ranks: int) -> Start:
        """This rank in a job of the first ``num_ranks`` ranks alone; the others are not to join it."""
        assert self.rank < num_ranks <= self.size, (self.rank, num_ranks, self.size)
        if num_ranks <= self.ranks_per_node:
            return replace(self, size=num_ranks, ranks_per_node=num_ranks, hosts=self.hosts[:num_ranks])
        # The last of them may fill a part of a node.
        per_node = math.gcd(self.ranks_per_node, num_ranks)
        return replace(self, size=num_ranks, ranks_per_node=per_node, hosts=self.hosts[:num_ranks])


def find_start(environ: Mapping[str, str] | None = None) -> Start:
    """Read the environment that a launcher left.

    Raises:
        LayoutError: MPI started several processes that do not see each other, or Slurm's node list cannot be read.
    """
    env = os.environ if environ is None else environ
    if "RANK" in env and "WORLD_SIZE" in env and "MASTER_ADDR" in env:
        size = int(env["WORLD_SIZE"])
        return Start(
            launcher="env",
            rank=int(env["RANK"]),
            size=size,
            local_rank=int(env.get("LOCAL_RANK", "0")),
            ranks_per_node=int(env.get("LOCAL_WORLD_SIZE", str(size))),
            address=env["MASTER_ADDR"],
            port=int(env.get("MASTER_PORT", "29500")),
            agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
    if any(name in env for name in MPI_RANK_VARIABLES):
        return _from_mpi(env)
    # A batch script has SLURM_PROCID too; only what srun started is a step.
    if int(env.get("SLURM_NTASKS", "1")) > 1 and "SLURM_STEP_ID" in env:
        return _from_slurm(env)
    return Start(launcher="alone")


def rank_hint(environ: Mapping[str, str] | None = None) -> int:
    """This process's rank as far as variables tell, without asking MPI; 0 when alone."""
    env = os.environ if environ is None else environ
    return int(next((env[name] for name in ("RANK", *MPI_RANK_VARIABLES, "SLURM_PROCID") if name in env), "0"))


def _from_mpi(env: Mapping[str, str]) -> Start:
    from hybridflow.parallel import mpi

    place = mpi.find_place()
    expected = int(env.get("SLURM_NTASKS", env.get("OMPI_COMM_WORLD_SIZE", env.get("PMI_SIZE", str(place.size)))))
    if place.size != expected:
        raise LayoutError(
            f"MPI sees {place.size} process(es) where the launcher started {expected}: the MPI library and the "
            "launcher do not speak to each other; start with `srun --mpi=pmi2` (MPICH) or `srun --mpi=pmix` (Open "
            "MPI), or with mpirun of the same MPI"
        )
    return Start(
        launcher="mpi",
        rank=place.rank,
        size=place.size,
        local_rank=place.local_rank,
        ranks_per_node=place.ranks_per_node,
        address=place.address,
        port=place.port,
    )


def _from_slurm(env: Mapping[str, str]) -> Start:
    hosts = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))
    try:
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", hosts], capture_output=True, text=True, check=True, timeout=30
        ).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        raise LayoutError(
            f"cannot expand Slurm's node list {hosts!r} with scontrol: {error}; "
            "set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE by hand"
        ) from error
    size = int(env["SLURM_NTASKS"])
    return Start(
        launcher="slurm",
        rank=int(env["SLURM_PROCID"]),
        size=size,
        local_rank=int(env.get("SLURM_LOCALID", "0")),
        ranks_per_node=max(1, size // max(1, len(listed))),
        address=env.get("MASTER_ADDR", listed[0] if listed else "127.0.0.1"),
        port=int(env.get("MASTER_PORT", str(20000 + int(env.get("SLURM_JOB_ID", "0")) % 20000))),
    )
