"""The machine: cores, memory limits, shared memory, its own name, its network interfaces."""

from __future__ import annotations

import ipaddress
import os
import resource
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridflow.doctor.finding import NOTE, OK, PROBLEM, Finding, format_gib
from hybridflow.errors import LayoutError
from hybridflow.parallel.handshake import own_address
from hybridflow.parallel.secret import secret_source
from hybridflow.rewards.sandbox import Bubblewrap, find_bubblewrap, sandbox_problem

AREA, NETWORK = "machine", "network"

_SMALL_SHARED_BYTES = 2**30
_FEW_OPEN_FILES = 4096


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface.

    Attributes:
        name: Its name.
        address: Its IPv4 address; empty without one.
        is_up: It carries.
    """

    name: str
    address: str
    is_up: bool


def check_host() -> list[Finding]:
    """Check cores, limits and shared memory."""
    room = os.statvfs("/dev/shm")
    has_fabric = any(Path("/sys/class/infiniband").glob("*"))
    return [
        cores_finding(os.cpu_count() or 1, sorted(os.sched_getaffinity(0)), os.environ),
        shared_memory_finding(room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize),
        memlock_finding(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], has_fabric=has_fabric),
        open_files_finding(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        sandbox_finding(sandbox_problem(), find_bubblewrap()),
    ]


def cores_finding(num_cores: int, usable: Sequence[int], environ: Mapping[str, str]) -> Finding:
    """Judge how many cores this process may use."""
    value, verdict, remedy = f"{len(usable)} of {num_cores} usable", OK, ""
    tasks = environ.get("SLURM_NTASKS_PER_NODE", "1")
    if "SLURM_STEP_ID" in environ and len(usable) == 1 < num_cores and tasks == "1":
        verdict, remedy = NOTE, "the task is bound to one core: give --cpus-per-task, to sbatch and to srun"
    threads = environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > len(usable):
        value, verdict = f"{value}, and OMP_NUM_THREADS={threads}", NOTE
        remedy = "threads would take turns on the same cores: lower it, or give --cpus-per-task"
    return Finding(area=AREA, name="cores", value=value, verdict=verdict, remedy=remedy)


def shared_memory_finding(total_bytes: int, free_bytes: int) -> Finding:
    """Judge the size of /dev/shm.

    The ranks of a node share weights there, and NCCL and MPI speak through it.
    """
    value = f"{format_gib(free_bytes)} free of {format_gib(total_bytes)}"
    return Finding(area=AREA, name="/dev/shm", value=value).unless(
        free_bytes >= _SMALL_SHARED_BYTES,
        PROBLEM,
        "give the container more (docker --shm-size=16g; apptainer and enroot take the node's), or remove what dead "
        "jobs left there",
    )


def sandbox_finding(problem: str | None, bubblewrap: Bubblewrap) -> Finding:
    """Judge whether programs in responses can run apart from everything else, and by what."""
    if problem is not None:
        value = f"{problem}; reward.function=code is refused"
    elif bubblewrap.usable is not None:
        value = f"programs are kept apart by bubblewrap ({bubblewrap.path})"
    else:
        why = "bwrap is not installed" if bubblewrap.path is None else f"{bubblewrap.path}: {bubblewrap.problem}"
        value = f"programs are kept apart by hybridflow itself ({why})"
    return Finding(area=AREA, name="sandbox of answers", value=value).unless(
        problem is None,
        NOTE,
        "have user namespaces allowed on this machine or in this container (user.max_user_namespaces)",
    )


def memlock_finding(limit: int, *, has_fabric: bool) -> Finding:
    """Judge whether memory can be locked, which InfiniBand needs."""
    is_free = limit == resource.RLIM_INFINITY
    value = "unlimited" if is_free else format_gib(limit)
    return Finding(area=AREA, name="ulimit -l (locked memory)", value=value).unless(
        is_free or not has_fabric,
        PROBLEM,
        "InfiniBand's transfers lock memory: have LimitMEMLOCK=infinity set for slurmd, and "
        "PropagateResourceLimitsExcept=MEMLOCK in slurm.conf",
    )


def open_files_finding(soft: int, hard: int) -> Finding:
    """Judge whether enough files and connections can be open."""
    is_free = soft == resource.RLIM_INFINITY
    remedy = f"ulimit -n {'1048576' if hard < 0 else hard}"
    if 0 <= hard < _FEW_OPEN_FILES:
        remedy = f"have the hard limit of {hard} raised, in /etc/security/limits.conf or for slurmd"
    return Finding(area=AREA, name="ulimit -n (open files)", value="unlimited" if is_free else str(soft)).unless(
        is_free or soft >= _FEW_OPEN_FILES,
        NOTE,
        f"many ranks need many connections: {remedy}",
    )


def check_network(*, of_many: bool) -> list[Finding]:
    """Check how this machine's name resolves, and which interfaces there are and will be used.

    Args:
        of_many: It is one of several nodes, which must reach it by its name.
    """
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        addresses = tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
    except OSError:
        addresses = ()
    listed = interfaces()
    findings = [name_finding(name, addresses, listed, of_many=of_many), interfaces_finding(listed)]
    findings += [rendezvous_finding(name), secret_finding()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if os.environ.get(variable):
            findings.append(chosen_finding(variable, os.environ[variable], listed))
    return findings + fabric_findings(Path("/sys/class/infiniband"))


def rendezvous_finding(name: str) -> Finding:
    """Say where rank 0 would listen on this machine for ranks of other nodes."""
    own = own_address(name)
    where = "every interface" if own is None else f"{own} alone"
    return Finding(
        area=NETWORK, name="rendezvous", value=f"on {where}; for ranks of one machine, on the loopback alone"
    )


def secret_finding() -> Finding:
    """Say by which secret ranks that are started here know each other."""
    found = Finding(area=NETWORK, name="secret of a job", value="")
    try:
        return replace(found, value=f"{secret_source()}; MPI and hybridflow's launchers bring their own")
    except LayoutError as error:
        return replace(found, value="none can be read or made", verdict=NOTE, remedy=str(error))


def interfaces() -> list[Interface]:
    """Return the network interfaces of this machine."""
    import psutil

    states = psutil.net_if_stats()
    return [
        Interface(
            name=name,
            address=next((each.address for each in addresses if each.family == socket.AF_INET), ""),
            is_up=name in states and states[name].isup,
        )
        for name, addresses in psutil.net_if_addrs().items()
    ]


def mounts() -> list[Any]:
    """Return the file systems that are mounted, as psutil tells of them."""
    import psutil

    return list(psutil.disk_partitions(all=True))


def name_finding(name: str, addresses: Sequence[str], listed: Sequence[Interface], *, of_many: bool) -> Finding:
    """Judge whether this machine's own name resolves to an address that others reach: gloo listens there."""
    outward = _outward(listed)
    real = outward[0].name if outward else "eth0"
    shown = ", ".join(addresses)
    value, verdict, remedy = f"{name} is {shown}", OK, ""
    if not addresses:
        value, verdict = f"{name} does not resolve", PROBLEM
        remedy = f"add it to /etc/hosts or DNS, or set GLOO_SOCKET_IFNAME={real}"
    elif all(_is_loopback(address) for address in addresses):
        value, verdict = f"{name} is {shown}, the loopback: other nodes cannot reach it", PROBLEM if of_many else NOTE
        remedy = (
            f"for jobs of several nodes take the line of {name} with {addresses[0]} out of /etc/hosts, or set "
            f"GLOO_SOCKET_IFNAME={real}"
        )
    elif outward and not {each.address for each in listed} & set(addresses) and "." in addresses[0]:
        value, verdict = f"{value}, which is no address of this machine", PROBLEM if of_many else NOTE
        remedy = f"correct /etc/hosts or DNS, or set GLOO_SOCKET_IFNAME={real}"
    return Finding(area=NETWORK, name="own name", value=value, verdict=verdict, remedy=remedy)


def _outward(listed: Sequence[Interface]) -> list[Interface]:
    """Return the interfaces to other machines."""
    return [each for each in listed if each.is_up and each.address and not _is_loopback(each.address)]


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.split("%")[0]).is_loopback
    except ValueError:
        return False


def interfaces_finding(listed: Sequence[Interface]) -> Finding:
    """Judge which interfaces carry."""
    carrying = [f"{each.name} {each.address}" for each in listed if each.is_up and each.address]
    return Finding(
        area=NETWORK,
        name="interfaces",
        value=", ".join(carrying) or "none carries",
        verdict=OK if carrying else NOTE,
        remedy="NCCL chooses by itself among them; NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name another"
        if len(_outward(listed)) > 1
        else "",
    )


def chosen_finding(variable: str, value: str, listed: Sequence[Interface]) -> Finding:
    """Judge whether a variable that chooses an interface names an existing one.

    NCCL takes prefixes, ``=`` and ``^``.
    """
    names = [name for name in value.lstrip("^=").split(",") if name]
    exact = variable.startswith("GLOO") or value.startswith("=")
    matching = [each for each in listed if any(each.name == n if exact else each.name.startswith(n) for n in names)]
    excludes = value.startswith("^") and not variable.startswith("GLOO")
    usable = excludes or any(each.is_up for each in matching)
    shown = value if usable else f"{value}, and no such interface carries"
    return Finding(area=NETWORK, name=variable, value=shown).unless(
        usable, PROBLEM, f"unset it, or name one of {', '.join(each.name for each in listed if each.is_up)}"
    )


def fabric_findings(root: Path) -> list[Finding]:
    """Judge the ports of InfiniBand or RoCE, which NCCL uses where they are active."""
    findings = []
    for port in sorted(root.glob("*/ports/*")):
        state = (port / "state").read_text(encoding="ascii").strip()
        rate = (port / "rate").read_text(encoding="ascii").strip()
        found = Finding(area=NETWORK, name=f"{port.parts[-3]} port {port.name}", value=f"{state}, {rate}")
        findings.append(
            found.unless("ACTIVE" in state, NOTE, "if other nodes have it active, leave this one out (--exclude)")
        )
    return findings
