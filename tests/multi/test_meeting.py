"""Ranks that meet, or do not: who is told what, within the deadline. Real processes and a real rendezvous."""

import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybridflow.api.world import own_place
from hybridflow.errors import LayoutError
from hybridflow.parallel import shared_gpu
from hybridflow.parallel.rendezvous import Signature, check_gpus, check_nodes, find_device, open_store
from hybridflow.parallel.signals import CaughtSignals
from hybridflow.parallel.start import Start
from hybridflow.parallel.world import World, join_world
from tests.e2e.commands import free_port

# Of those who wait in vain. Where all come they may be as late as on a busy machine.
SHORT_S, LONG_S = 3.0, 60.0
JOINED = "joined"
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def make_starts(hosts, *, per_node, port=None, **changes):
    """What each of some ranks on one machine would know as tasks of a step on these nodes."""
    size = len(hosts)
    start = Start(
        launcher="slurm",
        size=size,
        ranks_per_node=per_node,
        hosts=tuple(hosts),
        address="127.0.0.1",
        name="job 1",
        secret=b"of a test",
    )
    port = free_port() if port is None else port
    return [replace(start, rank=rank, port=port, **changes) for rank in range(size)]


def begin(starts, nodes=None, delays=None, asked=None, deadline_s=LONG_S):
    """Fork a process for each start; its node's name is the launcher's word unless ``nodes`` has another."""
    context = multiprocessing.get_context("fork")
    ranks = []
    for place, start in enumerate(starts):
        node = nodes[place] if nodes else start.hosts[start.rank]
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(
            target=be_a_rank, args=(start, node, (delays or {}).get(start.rank, 0.0), asked, deadline_s, sender)
        )
        child.start()
        ranks.append((child, receiver))
    return ranks


def be_a_rank(start, node, delay_s, asked, deadline_s, sender):
    signals = CaughtSignals()
    os.environ["SLURMD_NODENAME"] = node
    time.sleep(delay_s)
    try:
        store = open_store(start, start_deadline_s=deadline_s, signals=signals)
        if start.rank == asked:
            os.kill(os.getpid(), signal.SIGTERM)
        world = join_world(start, store, deadline_s=60, start_deadline_s=deadline_s, signals=signals)
        sender.send(JOINED)
        world.coordinator(tuple(range(start.size))).barrier("end")
    except Exception as error:
        sender.send(f"{type(error).__name__}: {error}")
        # The store's keeper stays until the others have heard; the command waits for them in its own way.
        time.sleep(1.0)
    os._exit(0)


def end(ranks):
    """What each rank said, in their order."""
    said = []
    for child, receiver in ranks:
        said.append(receiver.recv() if receiver.poll(60) else "nothing")
        child.join(30)
        if child.is_alive():
            child.kill()
    return said


def run(starts, **options):
    return end(begin(starts, **options))


def test_ranks_of_unequal_nodes_meet():
    assert run(make_starts("aab", per_node=1)) == [JOINED] * 3


@pytest.mark.slow
def test_the_first_ranks_meet_without_the_others():
    assert run([start.first(3) for start in make_starts("aabb", per_node=2)[:3]]) == [JOINED] * 3


@pytest.mark.slow
def test_who_did_not_come_is_told_alike_by_all_that_came():
    starts = make_starts("aabbcc", per_node=2)
    said = run([starts[rank] for rank in (0, 1, 4)], deadline_s=SHORT_S)
    assert len(set(said)) == 1, said
    assert said[0].startswith(
        "DeadlineError: 3 of 6 ranks did not come within 3 s: ranks 2-3 on b, rank 5 on c; look for what kept them"
    )


@pytest.mark.slow
def test_a_stop_signal_to_one_rank_ends_all_that_wait():
    said = run(make_starts("aab", per_node=1)[:2], asked=1)
    assert said == ["StopError: rank 1 on a received SIGTERM before all ranks had met; nothing was begun"] * 2


@pytest.mark.slow
def test_a_rank_with_another_secret_is_told_so():
    ours, theirs = make_starts("ab", per_node=1)
    said = run([ours, replace(theirs, secret=b"of another home")], deadline_s=SHORT_S)
    assert "rank 0 has another secret; if so, export HYBRIDFLOW_SECRET with the same random value" in said[1], said


@pytest.mark.slow
def test_a_rank_that_is_slow_is_waited_for():
    assert run(make_starts("ab", per_node=1), delays={0: 1.5}) == [JOINED] * 2
    assert run(make_starts("ab", per_node=1), delays={1: 1.5}) == [JOINED] * 2


@pytest.mark.slow
def test_rank_0_that_did_not_come_is_told_with_its_node_and_port():
    starts = make_starts("ab", per_node=1)
    (said,) = run(starts[1:], deadline_s=SHORT_S)
    place = f"no rendezvous at 127.0.0.1:{starts[0].port} within 3 s, as seen from b"
    assert said.startswith(f"DeadlineError: {place}") and "rank 0 on a must run there" in said
    assert all(word in said for word in ("start_deadline_s", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"))


@pytest.mark.slow
def test_rank_0_that_did_not_come_to_the_launchers_own_rendezvous():
    keeper = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    starts = make_starts("aabb", per_node=2, port=keeper.port, agent_store=True)
    said = run([starts[1], starts[3]], deadline_s=SHORT_S)
    assert all("rank 0 has not come; rank 0 on a must run there" in each for each in said), said


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_port_that_is_in_use_is_named(address):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        starts = make_starts("ab", per_node=1, port=other.getsockname()[1], address=address)
        (said,) = run(starts[:1])
    assert f"port {starts[0].port}, where the ranks are to meet, is in use by another program on a" in said
    assert "export MASTER_PORT" in said


@pytest.mark.slow
def test_ranks_of_another_job_at_the_same_port_are_not_taken_for_ones_own():
    ours = make_starts("ab", per_node=1)
    theirs = [replace(start, name="job 2") for start in ours]
    said = run([ours[0], theirs[1]], deadline_s=SHORT_S)
    assert "1 of 2 ranks did not come within 3 s: rank 1 on b" in said[0], said
    assert JOINED not in said


def test_ranks_that_do_not_fill_one_node_after_the_other_are_refused_on_all():
    said = run(make_starts("aabb", per_node=2), nodes="abab")
    assert len(set(said)) == 1 and said[0].startswith("LayoutError: ranks must fill one node after the other"), said


@pytest.mark.parametrize(
    ("hosts", "per_node", "launcher", "says"),
    [
        ("abab", 2, "slurm", "they are spread: 0 on a, 1 on b, 2 on a, 3 on b; start with `srun --distribution=block`"),
        ("aba", 1, "mpi", "they are spread: 0 on a, 1 on b, 2 on a; .* with `mpirun --map-by slot`"),
        ("aabb", 4, "env", "4 consecutive ranks share a node, but 2 run on a; .*LOCAL_WORLD_SIZE is the number of"),
        ("aaabb", 3, "slurm", "3 consecutive ranks share a node, but 2 run on b"),
    ],
)
def test_ranks_that_do_not_fill_one_node_after_the_other(hosts, per_node, launcher, says):
    with pytest.raises(LayoutError, match=says):
        check_nodes(Start(launcher=launcher, size=len(hosts), ranks_per_node=per_node), hosts)


@pytest.mark.parametrize(("hosts", "per_node"), [("a", 1), ("aabb", 2), ("aaaabb", 2), ("aaab", 1), ("aaaa", 2)])
def test_ranks_that_do(hosts, per_node):
    check_nodes(Start(launcher="slurm", size=len(hosts), ranks_per_node=per_node), hosts)


@pytest.mark.parametrize(("num_visible", "local_rank", "index"), [(1, 0, 0), (1, 3, 0), (4, 3, 3), (8, 2, 2)])
def test_a_rank_takes_the_gpu_that_it_alone_sees_or_that_of_its_place(monkeypatch, num_visible, local_rank, index):
    chosen = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_visible)
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    assert str(find_device(local_rank)) == f"cuda:{index}" and [str(each) for each in chosen] == [f"cuda:{index}"]


def test_ranks_of_a_program_take_the_launchers_place_or_the_gpu_that_they_chose(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert own_place() == 0
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    assert own_place() == 3
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert own_place() == 1


def test_two_ranks_on_one_gpu_are_refused_unless_they_are_to_share_it(monkeypatch):
    own = [Signature("a", "GPU-1", 2), Signature("a", "GPU-2", 2), Signature("b", "GPU-3", 2), Signature("b")]
    check_gpus(own)
    shared = [*own[:2], Signature("a", "GPU-1", 2)]
    says = (
        "ranks 0 and 2 on a have the same GPU: 3 ranks run there, and rank 2 sees 2 GPUs; .* --gpus-per-task=1.* "
        "HYBRIDFLOW_SHARE_GPU=1"
    )
    with pytest.raises(LayoutError, match=says):
        check_gpus(shared)
    monkeypatch.setenv("HYBRIDFLOW_SHARE_GPU", "1")
    check_gpus(shared)


@pytest.mark.parametrize(("switch", "backend"), [("0", "cpu:gloo,cuda:nccl"), ("1", shared_gpu.register())])
def test_gloo_carries_the_tensors_of_ranks_that_share_a_gpu(monkeypatch, switch, backend):
    begun = []
    monkeypatch.setenv("HYBRIDFLOW_SHARE_GPU", switch)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: begun.append(backend))
    device = torch.device("cuda", 0)
    World(rank=0, size=2, ranks_per_node=2, device=device, deadline_s=1.0, store=dist.HashStore())
    assert begun == [backend]


IN_VAIN = """
import os, time
from hybridflow.parallel import mpi
mpi._START_DEADLINE_S = 2.0
if os.environ["PMI_RANK"] == "1":
    time.sleep(600)
mpi.find_place()
"""


@pytest.mark.slow
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun beside python or in PATH")
def test_a_rank_that_never_comes_to_mpis_own_start_is_not_waited_for():
    begun = time.monotonic()
    done = subprocess.run(
        [MPIRUN, "-n", "2", sys.executable, "-c", IN_VAIN], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode != 0 and "Timeout (0:00:02" in done.stderr and "in find_place" in done.stderr, done.stderr
    assert time.monotonic() - begun < 250


FOR_A_MESSENGER = """
import os, time
from mpi4py import MPI
from hybridflow.errors import DeadlineError
from hybridflow.parallel.mpi import MpiLink, MpiMessenger
rank = MPI.COMM_WORLD.rank
made = [kind((2, 0, 1), 20.0) for kind in (MpiMessenger, MpiLink)] if rank < 3 else []
if made:
    assert made[0].gather(b"%d" % rank, "numbers") == [b"2", b"0", b"1"]
if rank in (0, 1):
    for kind in (MpiMessenger, MpiLink):
        try:
            kind((0, 1, 2, 3), 1.0)
        except DeadlineError as error:
            os.write(1, f"rank {rank}: {error}\\n".encode())
# mpirun ends the others once one has left.
MPI.COMM_WORLD.Barrier()
time.sleep(1.0)
os._exit(0)
"""


@pytest.mark.skipif(MPIRUN is None, reason="no mpirun beside python or in PATH")
def test_a_rank_that_never_comes_to_a_first_message_over_mpi_is_not_waited_for_and_is_named():
    program = [MPIRUN, "-n", "4", sys.executable, "-c", FOR_A_MESSENGER]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    told = r"rank (\d): ranks 2-3 of 0-3 did not come to their meeting over MPI within 1 s; look for a rank that failed"
    assert sorted(re.findall(told, done.stdout)) == ["0", "0", "1", "1"], done.stdout + done.stderr


def test_the_device_of_a_job_is_named(monkeypatch):
    def named(kind, size, per_node):
        place = {"rank": 0, "size": size, "ranks_per_node": per_node, "device": torch.device(kind)}
        return World(**place, deadline_s=1.0, store=dist.HashStore()).device_text()

    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.delenv("HYBRIDFLOW_SHARE_GPU", raising=False)
    assert (named("cpu", 4, 4), named("cpu", 4, 2)) == ("CPU, 2 cores", "CPU, 2 cores of each node")
    assert named("cuda", 16, 8) == "16 x NVIDIA H100 80GB HBM3"
    monkeypatch.setenv("HYBRIDFLOW_SHARE_GPU", "1")
    assert named("cuda", 2, 2) == "NVIDIA H100 80GB HBM3, shared by 2 ranks"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert named("cpu", 1, 1) == "CPU, 1 core"
