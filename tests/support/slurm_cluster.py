"""A real Slurm of several virtual nodes on this machine, for as long as a test or a tool needs it.

    with SlurmCluster(num_nodes=4) as cluster:
        job = cluster.sbatch("--nodes=2", "job.sbatch", cwd=folder)
        cluster.wait_for_end(job, within_s=60)

    python -m tests.support.slurm_cluster --nodes 4 -- bash        run a command beside a cluster, which ends with it

Isolation ``net`` (root with CAP_SYS_ADMIN and CAP_NET_ADMIN): every node has its own network (address 198.18.X.N, a
bridge as the switch), host name, processes and /dev/shm, so that killing one is like pulling its plug. Elsewhere
``plain``: the nodes share all of that; their names do not resolve, and ``MASTER_ADDR`` tells jobs where rank 0 is.

Every daemon dies with the process (its thread, to be exact) that started it, however that ends; what else a crash
leaves (a bridge, a directory, in ``plain`` the steps of jobs) is removed when the next cluster starts.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from hybridflow.parallel.process import find_process, own_process
from hybridflow.parallel.scontrol import parse_records

Found = TypeVar("Found")

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "setpriv")
"""Must be there; ``tests/support/slurm.sh`` installs them."""

CRED_EXPIRE_S = 5
"""A requeued job begins again this much and a second later; Slurm takes no less."""

ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")

_FOLDERS = Path("/tmp")
"""Sockets are made below, whose paths are at most 107 bytes long: pytest's own folders are too deep."""

_PREFIX = "hf-slurm-"
_MARK = "HYBRIDFLOW_TEST_CLUSTER"
_NODE_MARK = "HYBRIDFLOW_TEST_NODE"
_NODE_PORT = 6818
_CPUS_PER_NODE = 8
"""What a node claims, whatever the machine has; jobs share a node unless ``--exclusive``."""

_OWN_SPACES = ("--uts", "--mount", "--ipc", "--net", "--pid", "--fork", "--mount-proc")
"""What a node has of its own, in ``unshare``'s words."""

_ARP_MS = 100
"""A node that is gone is "no route to host" after three times this, instead of after 3 s."""


def missing_programs() -> list[str]:
    """What a cluster needs and this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=_search_path()) is None]


class SlurmCluster:
    """A controller and its nodes; a context manager. Partitions ``low`` (the default) and ``high``, which preempts it.

    Attributes:
        folder: Everything that the daemons write.
        nodes: Names of the nodes.
        isolation: ``"net"`` or ``"plain"``.
        env: Environment for clients such as sbatch, and so of jobs.
    """

    def __init__(self, *, num_nodes: int = 4, isolation: str | None = None) -> None:
        """Choose a size; ``start`` starts it.

        Args:
            num_nodes: At most 64.
            isolation: None: ``"net"`` where that works.
        """
        self.nodes = tuple(f"node{index}" for index in range(1, num_nodes + 1))
        self.isolation = find_isolation() if isolation is None else isolation
        self.folder = Path()
        self.env: dict[str, str] = {}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._bridge = ""
        self._subnet = ""
        self._ports: list[int] = []

    def __enter__(self) -> SlurmCluster:
        """Start it."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.stop()

    # Life ------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Return when every node is idle.

        Raises:
            RuntimeError: A daemon ended or is not ready in time; with the ends of the logs.
        """
        _remove_stale()
        atexit.register(self.stop)
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_FOLDERS))
        self.folder.chmod(0o755)
        (self.folder / "owner").write_text(json.dumps(own_process()))
        self.env = self._environment()
        try:
            self._ports = _free_ports(1 + len(self.nodes))
            if self.isolation == "net":
                self._make_bridge()
            self._write_settings()
            self._start_munge()
            self._spawn("slurmctld", ["slurmctld", "-D"])
            self._await_daemon("slurmctld", lambda: self._answers("scontrol", "ping"))
            for node in self.nodes:
                self._spawn_node(node)
            self._await_idle(self.nodes)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill everything and remove every trace; may be called twice."""
        atexit.unregister(self.stop)
        for daemon in self._daemons.values():
            daemon.kill()
        for daemon in self._daemons.values():
            daemon.wait(timeout=30)
        self._daemons = {}
        if self.folder != Path():
            _remove(self.folder)
            self.folder = Path()

    def kill_node(self, node: str) -> None:
        """End a node as a power failure does: its daemon, its steps and their tasks at once.

        The controller is told; left to itself, it takes up to a minute to find out.
        """
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait(timeout=30)
        if self.isolation == "plain":
            _kill_marked(self.folder, node)
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=killed by a test")

    def start_node(self, node: str) -> None:
        """Boot a node that was killed; returns when jobs may use it."""
        self._spawn_node(node)
        self._await_idle([node])

    def restore(self) -> None:
        """Cancel all jobs and boot all dead nodes, so that the next test finds the cluster as the first one did."""
        if self.run("squeue", "--noheader"):
            self.run("scancel", "--user", str(os.getuid()))
            try:
                self._await_no_job(within_s=5)
            except TimeoutError:
                # Tasks that do not end by themselves are not waited for.
                for node in self.nodes:
                    if node in self._daemons:
                        self.kill_node(node)
                self._await_no_job(within_s=60)
        self.run("scontrol", "update", "partitionname=low", "gracetime=0")
        for node in self.nodes:
            if node not in self._daemons or self._daemons[node].poll() is not None:
                self._spawn_node(node)
        self._await_idle(self.nodes)

    # Use -------------------------------------------------------------------------------------------------------------

    def run(
        self,
        *argv: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        within_s: float = 60.0,
    ) -> str:
        """Run a client of Slurm, or any command, and return its stdout without the last newline.

        Args:
            argv: The command.
            cwd: Working directory.
            env: Variables beside the cluster's own.
            within_s: Longest wait.

        Raises:
            RuntimeError: Its status is not 0; with what it wrote.
        """
        done = subprocess.run(
            argv,
            cwd=cwd,
            env={**self.env, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout.rstrip("\n")

    def sbatch(self, *argv: str, cwd: Path, env: Mapping[str, str] | None = None) -> str:
        """Submit a batch script from a folder and return the job's id."""
        return self.run("sbatch", "--parsable", *argv, cwd=cwd, env=env)

    def jobs(self, job: str) -> list[dict[str, str]]:
        """What ``scontrol show job`` tells: one for each task of an array and each component of a heterogeneous job."""
        return parse_records(self.run("scontrol", "show", "job", "--oneliner", job))

    def job(self, job: str) -> dict[str, str]:
        """What ``scontrol show job`` tells of a job, or of the first of several."""
        return self.jobs(job)[0]

    def wait_for(self, predicate: Callable[[], Found | None], *, within_s: float, what: str) -> Found:
        """Return what the predicate gives as soon as that is true.

        Args:
            predicate: Asked several times a second.
            within_s: Longest wait.
            what: Named in the error.

        Raises:
            TimeoutError: It is not; with the jobs and nodes as they are.
        """
        end = time.monotonic() + within_s
        while not (found := predicate()):
            if time.monotonic() > end:
                raise TimeoutError(f"not within {within_s:g} s: {what}\n{self._states()}")
            time.sleep(0.1)
        return found

    def wait_for_state(self, job: str, *states: str, within_s: float) -> dict[str, str]:
        """Return the job as soon as its state is one of these."""

        def found() -> dict[str, str] | None:
            fields = self.job(job)
            return fields if fields["JobState"] in states else None

        return self.wait_for(found, within_s=within_s, what=f"job {job} is {' or '.join(states)}")

    def wait_for_end(self, job: str, *, within_s: float) -> dict[str, str]:
        """Return the job as soon as it has ended, however it has; one of several: as soon as all have."""
        self.wait_for(
            lambda: all(found["JobState"] in ENDED for found in self.jobs(job)),
            within_s=within_s,
            what=f"job {job} has ended",
        )
        return self.job(job)

    # Parts -----------------------------------------------------------------------------------------------------------

    def _environment(self) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "PMI"))}
        env.update(SLURM_CONF=str(self.folder / "slurm.conf"), PATH=_search_path())
        if self.isolation == "plain":
            env["MASTER_ADDR"] = "127.0.0.1"
        return env

    def _spawn(self, name: str, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        mark = {_MARK: str(self.folder), _NODE_MARK: name}
        with open(self.folder / f"{name}.out", "ab") as log:
            daemon = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *argv],
                env={**self.env, **mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self.folder,
            )
        self._daemons[name] = daemon
        return daemon

    def _await_daemon(self, name: str, is_ready: Callable[[], bool], within_s: float = 60.0) -> None:
        end = time.monotonic() + within_s
        while not is_ready():
            ended = self._daemons[name].poll() is not None
            if ended or time.monotonic() > end:
                what = "ended" if ended else f"is not ready within {within_s:g} s"
                raise RuntimeError(f"{name} {what}\n{self._states()}\n{self._tail(name)}")
            time.sleep(0.03)

    def _await_idle(self, nodes: Sequence[str]) -> None:
        resumed: set[str] = set()

        def is_idle(node: str) -> bool:
            state = self.run("sinfo", "--noheader", "--Node", "--partition=low", f"--nodes={node}", "--format=%T")
            # A node that is down, or drained because a task could not be killed, stays so until it is resumed.
            if state.startswith(("down", "drain")) and node not in resumed:
                resumed.add(node)
                self.run("scontrol", "update", f"nodename={node}", "state=resume")
            return state == "idle"

        for node in nodes:
            self._await_daemon(node, lambda node=node: is_idle(node))  # type: ignore[misc]

    def _answers(self, *argv: str) -> bool:
        with contextlib.suppress(RuntimeError):
            self.run(*argv)
            return True
        return False

    def _states(self) -> str:
        """All jobs and nodes, for errors; why not, where the controller does not answer."""
        try:
            queue = self.run("squeue", "--states=all", "--format=%i %j %T %r %N")
            return f"{queue}\n{self.run('sinfo', '--Node', '--format=%N %P %T %E')}"
        except (RuntimeError, subprocess.TimeoutExpired) as problem:
            return str(problem)

    def _tail(self, name: str) -> str:
        logs = [path for path in (self.folder / f"{name}.out", self.folder / f"{name}.log") if path.exists()]
        return "\n".join(f"--- {path.name}\n" + "\n".join(path.read_text().splitlines()[-8:]) for path in logs)

    def _await_no_job(self, within_s: float) -> None:
        self.wait_for(lambda: not self.run("squeue", "--noheader"), within_s=within_s, what="there is no job")

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        socket_path = self.folder / "munge.socket"
        files = [f"--key-file={key}", f"--socket={socket_path}", f"--pid-file={self.folder}/munged.pid"]
        self._spawn("munged", ["munged", "--foreground", "--force", *files, f"--seed-file={self.folder}/munged.seed"])
        self._await_daemon("munged", lambda: self._answers("munge", "-S", str(socket_path), "-n"))

    def _address(self, node: str) -> str:
        return f"{self._subnet}.{1 + self.nodes.index(node)}" if self.isolation == "net" else "127.0.0.1"

    def _make_bridge(self) -> None:
        """The switch, and the controller's address on it; another cluster may take a subnet at the same time."""
        self._bridge = _bridge_name(self.folder)
        _ip("link", "add", self._bridge, "type", "bridge")
        used = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=True).stdout
        free = [f"198.18.{number}" for number in range(256) if f" 198.18.{number}." not in used]
        self._subnet = random.SystemRandom().choice(free)
        _ip("addr", "add", f"{self._subnet}.254/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        with contextlib.suppress(OSError):
            Path(f"/proc/sys/net/ipv4/neigh/{self._bridge}/retrans_time_ms").write_text(str(_ARP_MS))

    def _write_settings(self) -> None:
        host = socket.gethostname().split(".")[0]
        controller = f"{self._subnet}.254" if self.isolation == "net" else "127.0.0.1"
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(self._slurm_conf(host, controller))
        names = [f"{self._address(node)} {node}" for node in self.nodes]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"{controller} {host}", *names, ""]))

    def _slurm_conf(self, host: str, controller: str) -> str:
        folder, user = self.folder, pwd.getpwuid(os.getuid()).pw_name
        nodes = [
            f"NodeName={node} NodeHostname={node if self.isolation == 'net' else host} "
            f"NodeAddr={self._address(node)} Port={_NODE_PORT if self.isolation == 'net' else port} "
            f"CPUs={_CPUS_PER_NODE} RealMemory=64000 State=UNKNOWN"
            for node, port in zip(self.nodes, self._ports[1:], strict=True)
        ]
        return "\n".join(
            [
                "ClusterName=virtual",
                f"SlurmctldHost={host}({controller})",
                f"SlurmctldPort={self._ports[0]}",
                f"SlurmUser={user}",
                f"SlurmdUser={user}",
                "AuthType=auth/munge",
                f"AuthInfo=socket={folder}/munge.socket,cred_expire={CRED_EXPIRE_S}",
                f"StateSaveLocation={folder}/state",
                f"SlurmdSpoolDir={folder}/spool-%n",
                f"SlurmctldPidFile={folder}/slurmctld.pid",
                f"SlurmdPidFile={folder}/%n.pid",
                f"SlurmctldLogFile={folder}/slurmctld.log",
                f"SlurmdLogFile={folder}/%n.log",
                "SlurmctldDebug=verbose",
                "SlurmdDebug=verbose",
                "MailProg=/bin/true",
                "ProctrackType=proctrack/linuxproc",
                "TaskPlugin=task/none",
                "SwitchType=switch/none",
                # Others need CAP_SYS_RESOURCE.
                "PropagateResourceLimits=NONE",
                "SelectType=select/cons_tres",
                "SelectTypeParameters=CR_CPU",
                # The nodes have the CPUs and the memory that are written below.
                "SlurmdParameters=config_overrides",
                # With 2, a node that a test declares down is up again before its first answer is due.
                "ReturnToService=1",
                "PreemptType=preempt/partition_prio",
                "PreemptMode=REQUEUE",
                # Heterogeneous jobs are started by the backfill scheduler alone, by default every 30 s.
                "SchedulerType=sched/backfill",
                "SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,"
                "bf_interval=1,bf_min_age_reserve=0,bf_continue",
                # Without accounting, the controller's memory alone tells how a job ended.
                "MinJobAge=7200",
                "KillWait=15",
                "SlurmdTimeout=10",
                "MessageTimeout=10",
                "TCPTimeout=2",
                *nodes,
                "PartitionName=low Nodes=ALL Default=YES DefaultTime=30 PriorityTier=1 PreemptMode=REQUEUE GraceTime=0",
                "PartitionName=high Nodes=ALL DefaultTime=30 PriorityTier=100 PreemptMode=OFF",
                "",
            ]
        )

    def _spawn_node(self, node: str) -> None:
        (self.folder / f"spool-{node}").mkdir(exist_ok=True)
        if self.isolation == "plain":
            self._spawn(node, ["slurmd", "-D", "-N", node])
            return
        script = self.folder / f"{node}.sh"
        script.write_text(
            _BOOT.format(
                folder=self.folder, node=node, address=self._address(node), controller=self._subnet, arp_ms=_ARP_MS
            )
        )
        daemon = self._spawn(node, ["unshare", *_OWN_SPACES, "--kill-child", "bash", str(script)])
        own, its = Path("/proc/self/ns/net"), Path(f"/proc/{daemon.pid}/ns/net")
        # Until it has a network of its own, its process may still be setpriv.
        self._await_daemon(node, lambda: os.readlink(its) != os.readlink(own))
        port = f"{self._bridge}n{1 + self.nodes.index(node)}"
        # Of its former life: the kernel takes a while to remove it.
        subprocess.run(["ip", "link", "del", port], stderr=subprocess.DEVNULL, check=False)
        # As a machine that boots again has the same card: others still know its address.
        card = f"02:00:00:00:00:{1 + self.nodes.index(node):02x}"
        _ip(*f"link add {port} type veth peer name eth0 address {card} netns {daemon.pid}".split())
        _ip("link", "set", port, "master", self._bridge, "up")


_BOOT = """set -e
# Process 1 of a node; the shell also reaps what slurmd leaves behind.
hostname {node}
mount --bind {folder}/hosts /etc/hosts
mount -t tmpfs -o mode=1777 shm /dev/shm
# A sysfs of its own, else /sys/class/net shows the interfaces of the machine.
kept=$(mktemp -d {folder}/spool-{node}/sys.XXXXXX)
mount --rbind /sys/fs/cgroup $kept
mount -t sysfs sysfs /sys
mount --move $kept /sys/fs/cgroup || umount -l $kept
rmdir $kept
for _ in $(seq 500); do ip link show eth0 > /dev/null 2>&1 && break; sleep 0.02; done
ip link set lo up
ip addr add {address}/24 dev eth0
ip link set eth0 up
echo {arp_ms} > /proc/sys/net/ipv4/neigh/eth0/retrans_time_ms || true
slurmd -D -N {node}
"""


# Helpers -------------------------------------------------------------------------------------------------------------


def _search_path() -> str:
    """Where programs are looked for: this Python's own first, so that jobs run the hybridflow that is tested."""
    return f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin"


def find_isolation() -> str:
    """``"net"`` if a node of that kind can be made here."""
    attempt = "hostname x && mount -t tmpfs shm /dev/shm && mount --bind /dev/null /etc/hosts"
    attempt += " && ip link add br0 type bridge && ip link add veth0 type veth peer name veth1"
    attempt += " && ip link set veth0 master br0"
    with contextlib.suppress(FileNotFoundError):
        done = subprocess.run(
            ["unshare", *_OWN_SPACES, "sh", "-c", attempt],
            env={"PATH": _search_path()},
            capture_output=True,
            check=False,
        )
        return "plain" if done.returncode or os.getuid() else "net"
    return "plain"


def _ip(*argv: str) -> None:
    done = subprocess.run(["ip", *argv], env={"PATH": _search_path()}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(argv)}: {done.stderr.strip()}")


def _free_ports(number: int) -> list[int]:
    """Ports below those that the kernel hands out and those that hybridflow derives from a job's id."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(10240, 20000), 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            ports.append(port)
        if len(ports) == number:
            return ports
    raise RuntimeError(f"fewer than {number} free TCP ports among 1000 from 10240 to 19999")


def _bridge_name(folder: Path) -> str:
    return "hf" + folder.name.removeprefix(_PREFIX)


def _remove_stale() -> None:
    """Remove what clusters have left whose processes were killed."""
    for folder in _FOLDERS.glob(f"{_PREFIX}*"):
        # Of another user, or made and removed by somebody else at this moment.
        with contextlib.suppress(OSError, ValueError):
            pid, began = json.loads((folder / "owner").read_text())
            if folder.stat().st_uid == os.getuid() and find_process(pid) != (pid, began):
                _remove(folder)


def _remove(folder: Path) -> None:
    _kill_marked(folder)
    bridge = _bridge_name(folder)
    for port in Path("/sys/class/net").glob(f"{bridge}*"):
        subprocess.run(["ip", "link", "del", port.name], stderr=subprocess.DEVNULL, check=False)
    shutil.rmtree(folder, ignore_errors=True)


def _kill_marked(folder: Path, node: str | None = None) -> None:
    """Kill the daemons of a cluster, or of a node, and what they have started; those of namespaces are gone already."""
    wanted = {f"{_MARK}={folder}".encode()} | ({f"{_NODE_MARK}={node}".encode()} if node else set())
    for _ in range(5):
        found = list(_family(wanted))
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.05)


def _family(wanted: set[bytes]) -> Iterator[int]:
    """Processes in whose environment these lie, and all below them, which may have another environment."""
    children: dict[int, list[int]] = {}
    pending = []
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(path.name))
                if wanted <= set((path / "environ").read_bytes().split(b"\0")):
                    pending.append(int(path.name))
    seen = {os.getpid()}
    while pending:
        pid = pending.pop()
        if pid not in seen:
            seen.add(pid)
            pending += children.get(pid, [])
            yield pid


def main() -> int:
    """Run a command beside a cluster."""
    parser = argparse.ArgumentParser(description="Run a command beside a Slurm cluster of virtual nodes.")
    parser.add_argument("--nodes", type=int, default=4, metavar="N", help="default: 4")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="for instance: -- bash")
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if missing := missing_programs():
        parser.error(f"not found: {', '.join(missing)}; tests/support/slurm.sh installs them")
    with SlurmCluster(num_nodes=arguments.nodes) as cluster:
        return subprocess.run(command or ["bash"], env=cluster.env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
