"""Programs that take a rank's place in a process group, or have ranks unpickle what they send."""

import ctypes
import multiprocessing
import os
import shutil
import socket
import struct
import subprocess
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from hybridflow.errors import ContractError, DeadlineError
from hybridflow.parallel import world as world_module
from hybridflow.parallel.rendezvous import open_store
from hybridflow.parallel.start import Start
from hybridflow.parallel.trust import check_connections, refuse_objects
from hybridflow.parallel.world import join_world
from tests.e2e.commands import free_port
from tests.support.ranks import run_ranks
from tests.support.waiting import wait_until

FORK = multiprocessing.get_context("fork")
# Of what earlier tests have left in this process, such as owners of closed files, nothing comes along.
SPAWN = multiprocessing.get_context("spawn")


def check(world, secrets):
    try:
        check_connections(dist.group.WORLD, range(world.size), world.rank, secrets[world.rank], 20.0)
    except DeadlineError as error:
        return str(error)
    return "all is well"


def test_a_connection_whose_other_end_does_not_know_the_secret_is_found():
    assert run_ranks(check, 3, [b"ours"] * 3) == ["all is well"] * 3
    said = run_ranks(check, 3, [b"ours", b"ours", b"a guess"])
    assert ["between ranks 0 and 2" in said[0], "between ranks 1 and 2" in said[1]] == [True, True], said
    assert all("another program took the connection" in each for each in said)


def send_objects(world):
    """Each way in which torch has a rank unpickle what another sent."""
    refuse_objects()
    mine, got, size = {"rank": world.rank}, [None] * world.size, world.size
    calls = {
        "all_gather_object": lambda: dist.all_gather_object(got, mine),
        "gather_object": lambda: dist.gather_object(mine, got if world.rank == 0 else None),
        "broadcast_object_list": lambda: dist.broadcast_object_list([mine], src=0),
        "scatter_object_list": lambda: dist.scatter_object_list([None], [mine] * size if world.rank == 0 else None),
    }
    refused = set()
    for name, call in calls.items():
        try:
            call()
        except ContractError as error:
            assert "test_strangers.py:" in str(error), error
            refused.add(name)
    return refused


def test_what_would_unpickle_is_refused_and_names_its_caller():
    # Of a broadcast and a scatter the others read, of a gather rank 0 does.
    first, second = run_ranks(send_objects, 2)
    assert first == {"all_gather_object", "gather_object", "scatter_object_list"}
    assert second == {"all_gather_object", "broadcast_object_list", "scatter_object_list"}


def join(start, sender):
    """A rank that comes late to gloo where it is the second, so that there is time to be quicker."""
    begin = dist.init_process_group

    def begin_late(*args, **kwargs):
        if start.rank == 1:
            time.sleep(1.5)
        begin(*args, **kwargs)

    dist.init_process_group = begin_late
    world_module._CHECK_S = 5.0
    os.environ["SLURMD_NODENAME"] = start.hosts[start.rank]
    try:
        store = open_store(start, start_deadline_s=20)
        world = join_world(start, store, deadline_s=5, start_deadline_s=20)
        sender.send(str(world.everyone().gather(start.rank)))
    except Exception as error:
        sender.send(f"{type(error).__name__}: {error}")
        time.sleep(1.0)
    os._exit(0)


def listening(pid):
    """The ports at which a process and its children listen."""
    pids = [pid, *Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    links = [os.readlink(path) for each in pids for path in Path(f"/proc/{each}/fd").iterdir()]
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links}


def take_connections(pids, held, until_s):
    """Connect to whatever listens, as gloo's peer would, before the true peer does."""
    seen = set()
    while time.monotonic() < until_s:
        for pid in pids:
            try:
                ports = listening(pid) - seen
            except OSError:
                return
            for port in ports:
                seen.add(port)
                for number in range(8):
                    held.append(socket.create_connection(("127.0.0.1", port)))
                    held[-1].sendall(struct.pack("<q", number))
        time.sleep(0.01)


@pytest.mark.slow
def test_a_program_that_is_quicker_than_the_true_peer_gets_nothing():
    # By their addresses one of two ranks waits for the other. It can be robbed if it is the first that is there: in one
    # of two starts.
    for _ in range(10):
        start = Start(launcher="slurm", size=2, ranks_per_node=1, hosts=("a", "b"), address="127.0.0.1", name="job 1")
        start = replace(start, port=free_port(), secret=b"of a test")
        receivers, ranks, held = [], [], []
        for rank in range(2):
            receiver, sender = FORK.Pipe(duplex=False)
            ranks.append(FORK.Process(target=join, args=(replace(start, rank=rank), sender), daemon=True))
            ranks[-1].start()
            receivers.append(receiver)
        take_connections([rank.pid for rank in ranks], held, time.monotonic() + 6.0)
        said = [receiver.recv() if receiver.poll(30) else "nothing" for receiver in receivers]
        for each in (*held, *ranks):
            each.close() if isinstance(each, socket.socket) else each.join(30)
        if said != ["[0, 1]"] * 2:
            break
    assert all(each.startswith("DeadlineError") for each in said), said
    assert any("another program took" in each for each in said), said


@pytest.fixture
def two_networks():
    """Two machines with one cable, as far as the network goes: processes that hold them."""
    if os.geteuid() != 0 or not all(shutil.which(name) for name in ("ip", "nsenter", "unshare")):
        pytest.skip("needs root, and ip, nsenter and unshare of Linux")
    holders = [subprocess.Popen(["unshare", "--net", "sleep", "900"]) for _ in range(2)]
    try:
        pids = [str(holder.pid) for holder in holders]
        own = os.readlink("/proc/self/ns/net")
        wait_until(lambda: all(os.readlink(f"/proc/{pid}/ns/net") != own for pid in pids), what="networks")
        commands = [
            ["ip", "link", "add", "cable0", "netns", pids[0], "type", "veth", "peer", "cable1", "netns", pids[1]]
        ]
        for place, pid in enumerate(pids):
            inside = ["nsenter", "-t", pid, "-n", "ip"]
            commands.append([*inside, "addr", "add", f"10.213.0.{place + 1}/24", "dev", f"cable{place}"])
            commands += [[*inside, "link", "set", device, "up"] for device in ("lo", f"cable{place}")]
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"this system does not let root make networks: {done.stderr.strip()}")
        yield [holder.pid for holder in holders]
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def in_network(pid, run, *args):
    with open(f"/proc/{pid}/ns/net") as network:
        if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
    run(*args)


def join_and_wait(start, come, sender):
    os.environ |= {"SLURMD_NODENAME": start.hosts[start.rank], "GLOO_SOCKET_IFNAME": f"cable{start.rank}"}
    store = open_store(start, start_deadline_s=100)
    sender.send(sorted(addresses()) if start.rank == 0 else "here")
    if start.rank == 1:
        assert come.wait(150)
    world = join_world(start, store, deadline_s=100, start_deadline_s=200)
    sender.send([world.everyone().gather(start.rank)])
    os._exit(0)


def addresses():
    """Where programs of this network listen, as ``/proc`` has it."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A"}


def attack(start, sender):
    """As another user of the second machine: join, poison, delete, flood."""
    # Loaded while Python's own files can be read.
    "a".encode("idna")
    os.setuid(65534)
    said, held = [], []
    for _ in range(300):
        held.append(socket.create_connection((start.address, start.port), timeout=10))
    try:
        open_store(replace(start, rank=1, secret=b"a guess of mine"), start_deadline_s=5)
    except DeadlineError as error:
        said.append(str(error))
    try:
        thief = dist.TCPStore(start.address, start.port, timeout=timedelta(seconds=2), wait_for_workers=False)
        thief.delete_key("hybridflow/here/0")
        thief.set("hybridflow/found", "poison")
    except dist.DistError as error:
        said.append(str(error))
    sender.send(said)
    os._exit(0)


@pytest.mark.slow
def test_another_user_of_the_network_changes_nothing(two_networks):
    start = Start(launcher="slurm", size=2, ranks_per_node=1, hosts=("a", "b"), address="10.213.0.1", port=23456)
    start = replace(start, name="job 1", secret=b"of a test")
    come, pipes, children = SPAWN.Event(), [SPAWN.Pipe(duplex=False) for _ in range(3)], []
    for rank, (_, sender) in enumerate(pipes[:2]):
        args = (two_networks[rank], join_and_wait, replace(start, rank=rank), come, sender)
        children.append(SPAWN.Process(target=in_network, args=args, daemon=True))
        children[-1].start()
    listens, here = (receiver.recv() if receiver.poll(100) else None for receiver, _ in pipes[:2])
    assert listens == ["0100D50A"] and here == "here"  # 10.213.0.1 alone
    children.append(SPAWN.Process(target=in_network, args=(two_networks[1], attack, start, pipes[2][1]), daemon=True))
    children[-1].start()
    said = pipes[2][0].recv() if pipes[2][0].poll(100) else None
    assert said is not None and len(said) == 2 and "is not rank 0 of this job" in said[0], said
    come.set()
    ends = [receiver.recv() if receiver.poll(150) else None for receiver, _ in pipes[:2]]
    for child in children:
        child.join(20)
    assert [end[0] for end in ends] == [[0, 1]] * 2, ends
