"""The ranks of a running job as processes of this machine, on which all nodes of the cluster are."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from tests.slurm_cluster import SlurmCluster


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """A rank, which tells itself from a later process of the same id.

    Attributes:
        pid: As seen from outside the nodes.
        begin: When it started, in the kernel's count.
    """

    pid: int
    begin: str

    def kill(self) -> None:
        """End it as the kernel does that is out of memory; nothing happens to one that has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self.is_alive():
                os.kill(self.pid, signal.SIGKILL)

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return _begin_of(Path(f"/proc/{self.pid}")) == self.begin


def rank_processes(cluster: SlurmCluster, job: str) -> dict[int, RankProcess]:
    """The job's ranks that run now: rank -> process."""
    wanted = {f"SLURM_CONF={cluster.env['SLURM_CONF']}", f"SLURM_JOB_ID={job}"}
    found = {}
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            # srun has the same arguments behind another program.
            argv = (path / "cmdline").read_bytes().decode(errors="replace").split("\0") if path.name.isdigit() else []
            if "train" not in argv or not Path(argv[0]).name.startswith("python"):
                continue
            environ = (path / "environ").read_bytes().decode(errors="replace").split("\0")
            begin = _begin_of(path)
            if begin is not None and wanted <= set(environ):
                rank = next(int(each.partition("=")[2]) for each in environ if each.startswith("SLURM_PROCID="))
                found[rank] = RankProcess(pid=int(path.name), begin=begin)
    return found


def _begin_of(path: Path) -> str | None:
    """Field 22 of ``stat``, counted behind the name, which may hold anything; None: there is none, or it has ended."""
    try:
        fields = (path / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
