"""How this process was started, and which rank it is: one object whichever launcher it was. No torch.

Where several launchers left their variables, the first of these is believed:

1. ``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR``: torchrun, hybridflow's own launcher, or variables set by hand.
2. MPI, in a step of ``srun --mpi=…`` or under ``mpirun``, where mpi4py sees all ranks that were started.
3. A step of Slurm's ``srun``. Many sites let it set MPI's variables in every step, so a step in which MPI does not work
   is started from Slurm's own, and rank 0 says so.
4. None: one process, one rank. So are a batch script and a step of one task.

``HYBRIDFLOW_MPI=0`` leaves MPI alone, where its library is broken; nothing else switches it off, and nothing on.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING

from hybridflow.errors import LayoutError
from hybridflow.layout.mesh import format_ranks

if TYPE_CHECKING:
    from hybridflow.parallel.mpi import Place

MPI_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MPI_LOCALRANKID")

_MPIRUN_VARIABLES = ("OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")
"""Variables that mpirun sets, and srun does not: of Open MPI, and of MPICH and its kin."""

_LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")

_FIRST_PORT = 20000
_PORTS_PER_JOB = 16
_NUM_JOBS = 750  # ports end at 31999: from 32768 on, Linux hands them out to whoever asks


@dataclass(frozen=True, kw_only=True)
class Start:
    """Which rank this process is and where it meets the others.

    Attributes:
        launcher: ``"alone"``, ``"env"`` (torchrun and hybridflow's own), ``"mpi"`` or ``"slurm"``.
        rank: Global rank.
        size: Ranks of the job.
        local_rank: Index among the ranks of this node.
        ranks_per_node: So many consecutive ranks share a node, from rank 0 on. Where nodes have different numbers of
            ranks, their greatest common divisor: 4 and 2 make 2, and a node of 4 counts as two that lie together.
        hosts: Name of each rank's node, in rank order; empty where the launcher does not tell.
        address: Host of the rendezvous; empty when alone.
        port: TCP port of the rendezvous.
        agent_store: The launcher itself hosts the rendezvous (torchrun).
        name: What this start is called at the rendezvous; ranks of another job that come to the same port by mistake
            do not meet these.
        secret: What MPI brought of the job's secret; empty: it is found elsewhere.
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
    name: str = ""
    secret: bytes = field(default=b"", repr=False)

    @property
    def meets_at(self) -> str:
        """Return where rank 0 listens: the loopback where all ranks are known to be on its machine."""
        is_local = self.agent_store and self.ranks_per_node == self.size
        return "127.0.0.1" if is_local or self.address == "localhost" else self.address

    @property
    def is_local(self) -> bool:
        """Return whether all ranks reach rank 0 by the loopback, so that all are on its machine."""
        return self.meets_at == "127.0.0.1"

    def first(self, num_ranks: int) -> Start:
        """Return this rank in a job of only the first ``num_ranks`` ranks; the others must not join it."""
        assert self.rank < num_ranks <= self.size, (self.rank, num_ranks, self.size)
        hosts = self.hosts[:num_ranks]
        if hosts:
            per_node = shared_by(hosts)
        elif num_ranks <= self.ranks_per_node:
            per_node = num_ranks
        else:
            per_node = math.gcd(self.ranks_per_node, num_ranks)  # the last of them may fill a part of a node
        return replace(self, size=num_ranks, ranks_per_node=per_node, hosts=hosts)

    def where(self, ranks: Iterable[int]) -> str:
        """Return some ranks in words, with their nodes if known: ``ranks 2-3 on n1, rank 7 on n2``."""
        parts = []
        for host, each in groupby(sorted(ranks), key=lambda rank: self.hosts[rank] if self.hosts else ""):
            listed = list(each)
            on = f" on {host}" if host else ""
            parts.append(f"rank{'s' if len(listed) > 1 else ''} {format_ranks(listed)}{on}")
        return ", ".join(parts)


def node_name() -> str:
    """Return Slurm's name of this node, or else its own name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def shared_by(nodes: Sequence[Hashable]) -> int:
    """Return ``ranks_per_node`` of ranks on these nodes, in rank order: the divisor of all runs of equal nodes."""
    return math.gcd(*(len(list(run)) for _, run in groupby(nodes)))


def find_start(environ: Mapping[str, str] | None = None) -> Start:
    """Read the environment that a launcher left.

    Collective where MPI started the ranks: all of them.

    Raises:
        LayoutError: A variable cannot be read; MPI started several processes that do not see each other; or Slurm did
            not put rank 0 where its variables have it.
    """
    env = os.environ if environ is None else environ
    if "RANK" in env and "WORLD_SIZE" in env and "MASTER_ADDR" in env:
        return _from_env(env)
    step = _from_slurm(env) if "SLURM_STEP_ID" in env and "SLURM_STEP_NUM_TASKS" in env else None
    if any(name in env for name in MPI_RANK_VARIABLES):
        return _from_mpi(env, step)
    return _checked(step, env) if step is not None and step.size > 1 else Start(launcher="alone")


def is_launched() -> bool:
    """Return whether a launcher started this process as a rank, according to variables."""
    return any(name in os.environ for name in ("RANK", *MPI_RANK_VARIABLES, "SLURM_STEP_ID"))


def passes_interrupts() -> bool:
    """Return whether torchrun or mpirun started this process, according to variables: they pass Ctrl-C on to ranks.

    Slurm's srun keeps it for itself; hybridflow's own launcher asks its ranks by SIGTERM.
    """
    return any(name in os.environ for name in ("TORCHELASTIC_RUN_ID", *_MPIRUN_VARIABLES))


def rank_hint() -> int:
    """Return this process's rank according to variables, without asking MPI; 0 when alone."""
    return _first_number("RANK", *MPI_RANK_VARIABLES, "SLURM_PROCID")


def local_rank_hint() -> int:
    """Return this process's number on its node according to variables, without asking MPI; 0 if none says it."""
    return _first_number(*_LOCAL_RANK_VARIABLES)


def _first_number(*names: str) -> int:
    values = (os.environ.get(name, "") for name in names)
    return int(next((value for value in values if value.isdecimal()), "0"))


def expand_node_list(text: str) -> tuple[str, ...]:
    """Expand a node list as Slurm writes it: ``n[08-10],login`` is n08, n09, n10, login.

    Raises:
        LayoutError: It cannot be read.
    """
    entry_pattern = r"(?:[^,\[\]]|\[[^\[\]]*\])+"
    if not re.fullmatch(f"{entry_pattern}(?:,{entry_pattern})*", text):
        raise LayoutError(_unreadable("node list", text))
    names: list[str] = []
    for entry in re.findall(entry_pattern, text):
        found = [""]
        for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", entry):
            tails = [literal] if literal else [number for part in ranges.split(",") for number in _numbers(part, text)]
            found = [head + tail for head in found for tail in tails]
        names += found
    return tuple(names)


def expand_counts(text: str) -> tuple[int, ...]:
    """Expand the number of tasks on each node as Slurm writes it: ``4(x2),2`` is 4, 4, 2.

    Raises:
        LayoutError: It cannot be read.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise LayoutError(_unreadable("number of tasks on each node", text))
        counts += [int(match[1])] * int(match[2] or "1")
    return tuple(counts)


def _numbers(part: str, text: str) -> list[str]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
    if match is None:
        raise LayoutError(_unreadable("node list", text))
    first, last = match[1], match[2] or match[1]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _unreadable(what: str, text: str) -> str:
    return f"cannot read Slurm's {what} {text!r}; set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE by hand"


def _from_env(env: Mapping[str, str]) -> Start:
    size = _number(env, "WORLD_SIZE")
    hosts: tuple[str, ...] = ()
    if "LOCAL_WORLD_SIZE" not in env and (env.get("SLURM_PROCID"), env.get("SLURM_STEP_NUM_TASKS")) == (
        env["RANK"],
        env["WORLD_SIZE"],
    ):
        # Tasks of srun, whose variables Enroot's hook for PyTorch, or a script, has put into torch's words.
        with contextlib.suppress(LayoutError):
            hosts = _hosts_of_step(env, size)
    return Start(
        launcher="env",
        rank=_number(env, "RANK"),
        size=size,
        local_rank=_number(env, "LOCAL_RANK", 0),
        ranks_per_node=_number(env, "LOCAL_WORLD_SIZE", shared_by(hosts) if hosts else size),
        hosts=hosts,
        address=env["MASTER_ADDR"],
        port=_number(env, "MASTER_PORT", 29500),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        # torchrun keeps one rendezvous for all its attempts.
        name=f"attempt {_number(env, 'TORCHELASTIC_RESTART_COUNT', 0)}",
    )


def _from_mpi(env: Mapping[str, str], step: Start | None) -> Start:
    from hybridflow.parallel import mpi

    ranks, sizes = ("PMI_RANK", "PMIX_RANK"), ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    expected = next((_number(env, name) for name in sizes if name in env), step.size if step is not None else None)
    # mpirun inside a Slurm job runs in steps of its own, whose tasks are not its ranks.
    is_srun = (
        step is not None
        and not any(name in env for name in _MPIRUN_VARIABLES)
        and expected == step.size
        and any(_number(env, name, -1) == step.rank for name in ranks)
    )
    if step is None or not is_srun:
        if env.get("HYBRIDFLOW_MPI") == "0":
            raise LayoutError(
                "HYBRIDFLOW_MPI=0, but these ranks were started by mpirun, and only MPI knows where the others are; "
                "unset it, or start with srun or torchrun"
            )
        place = mpi.find_place()
        return _from_place(place, place.size if expected is None else expected, env)
    if step.size == 1:
        return Start(launcher="alone")
    if env.get("HYBRIDFLOW_MPI") == "0":
        return _checked(step, env)
    try:
        # What Slurm says stays true, and MPI is there besides.
        found = _from_place(mpi.find_place(), step.size, env)
        return _checked(replace(step, launcher="mpi", secret=found.secret), env)
    except mpi.NoMpiError as error:
        if step.rank == 0:
            print(f"hybridflow: started from Slurm's variables, without MPI: {error}", file=sys.stderr, flush=True)
        return _checked(step, env)


def _from_place(place: Place, expected: int, env: Mapping[str, str]) -> Start:
    from hybridflow.parallel import mpi

    if place.size != expected:
        raise mpi.NoMpiError(
            f"MPI sees {place.size} process(es) where the launcher started {expected}: the MPI library and the "
            "launcher do not speak to each other; start with `srun --mpi=pmi2` (MPICH) or `srun --mpi=pmix` (Open "
            "MPI), or with mpirun of the same MPI"
        )
    return Start(
        launcher="mpi",
        rank=place.rank,
        size=place.size,
        local_rank=place.local_rank,
        ranks_per_node=shared_by(place.nodes),
        hosts=place.hosts,
        address=env.get("MASTER_ADDR", place.address),
        port=_number(env, "MASTER_PORT", place.port),
        name="mpi",
        secret=place.secret,
    )


def _from_slurm(env: Mapping[str, str]) -> Start:
    """Return this task of a step. Slurm's variables of the job are not read: a step may have fewer nodes and tasks."""
    size, rank = _number(env, "SLURM_STEP_NUM_TASKS"), _number(env, "SLURM_PROCID")
    hosts = _hosts_of_step(env, size)
    job, step = _number(env, "SLURM_JOB_ID", 0), _number(env, "SLURM_STEP_ID")
    restart = _number(env, "SLURM_RESTART_COUNT", 0)
    # Neighbouring jobs, the steps of a job, and its next start after a requeue each have a port of their own.
    port = _FIRST_PORT + job % _NUM_JOBS * _PORTS_PER_JOB + (step + 5 * restart) % _PORTS_PER_JOB
    # One node's ranks need no name of it.
    first_host = hosts[0] if len(set(hosts)) > 1 else "127.0.0.1"
    return Start(
        launcher="slurm",
        rank=rank,
        size=size,
        local_rank=_number(env, "SLURM_LOCALID", 0),
        ranks_per_node=shared_by(hosts),
        hosts=hosts,
        address=env.get("MASTER_ADDR", first_host),
        port=_number(env, "MASTER_PORT", port),
        name=f"job {job}, step {step}, restart {restart}",
    )


def _hosts_of_step(env: Mapping[str, str], size: int) -> tuple[str, ...]:
    """Return the node of each rank, in block order: ranks fill one node after the other."""
    text, per_node = env.get("SLURM_STEP_NODELIST", ""), env.get("SLURM_STEP_TASKS_PER_NODE", "")
    nodes, counts = expand_node_list(text), expand_counts(per_node)
    if len(nodes) != len(counts) or sum(counts) != size:
        raise LayoutError(
            f"Slurm's variables do not agree: SLURM_STEP_NODELIST={text}, SLURM_STEP_TASKS_PER_NODE={per_node}, "
            f"SLURM_STEP_NUM_TASKS={size}; set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE by hand"
        )
    tasks = dict(zip(nodes, counts, strict=True))
    # The components of a heterogeneous job come one after the other, but the step's list is sorted by name.
    groups = range(_number(env, "SLURM_HET_SIZE", 0))
    names = [env.get(f"SLURM_JOB_NODELIST_HET_GROUP_{group}", "") for group in groups]
    in_order = [node for name in names if name for node in expand_node_list(name) if node in tasks]
    return tuple(node for node in dict.fromkeys([*in_order, *nodes]) for _ in range(tasks[node]))


def _checked(step: Start, env: Mapping[str, str]) -> Start:
    """Return the step after checking that its rank 0 is where the others look for it.

    Raises:
        LayoutError: It is not.
    """
    here = env.get("SLURMD_NODENAME", step.hosts[step.rank])
    if step.rank == 0 and "MASTER_ADDR" not in env and here != step.hosts[0]:
        raise LayoutError(
            f"Slurm put rank 0 on {here}, but it belongs on {step.hosts[0]}, the first node of the step, where the "
            "other ranks look for it; ranks must fill the nodes in their order: start with `srun --distribution=block`"
            " and, where ':' joins several commands, give the first of them the first node"
        )
    return step


def _number(env: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    text = env.get(name)
    if text is None and otherwise is not None:
        return otherwise
    if text is None or not re.fullmatch(r"\d+", text):
        raise LayoutError(f"the environment has {name}={text}, expected a number; it comes from what started this rank")
    return int(text)
