"""The store where the ranks meet: what it answers, to whom, and when it ends."""

import multiprocessing
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from hybridflow.parallel.handshake import StrangerError, key_for, listen
from hybridflow.parallel.store import KeeperStore, NamedStore, begin_keeper
from tests.support.waiting import wait_until

KEY = key_for(b"secret", "a test")
FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def place():
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    keeper = begin_keeper(listener, KEY, 2)
    yield port
    keeper.stdin.close()
    assert keeper.wait(20) == 0


@pytest.fixture
def store(place):
    return KeeperStore("127.0.0.1", place, KEY, timeout_s=0.2, connect_s=20)


def ask(store, name):
    """What a store answers to the calls that torch makes, in order."""
    names = [f"{name}/{letter}" for letter in "abc"]
    answers = [store.check(names[:1]), store.add(names[0], 3), store.add(names[0], -1), store.get(names[0])]
    store.set(names[1], "\x00text")
    answers += [store.check(names[:2]), store.check(names), store.multi_get(names[:2])]
    answers += [store.compare_set(names[2], "", "first"), store.compare_set(names[2], "", "second")]
    answers += [store.compare_set(names[2], "first", "third"), store.get(names[2])]
    store.append(names[2], "!")
    store.multi_set(names[:2], ["x", "y"])
    store.wait(names, timedelta(seconds=1))
    answers += [store.multi_get(names), store.delete_key(names[0]), store.delete_key(names[0]), store.check(names)]
    return answers


def test_it_answers_as_torchs_own(store):
    expected = ask(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), "torch")
    assert ask(store, "plain") == expected
    # By way of C++, as process groups ask.
    assert ask(dist.PrefixStore("one", NamedStore("two", store)), "prefixed") == expected


def test_a_wait_ends_when_all_is_there_or_time_is_up(store):
    other = store.clone()
    threading.Timer(0.1, lambda: (other.set("late/1", "1"), other.set("late/2", "2"))).start()
    store.wait(["late/1", "late/2"], timedelta(seconds=20))
    for late in (lambda: store.get("never"), lambda: store.wait(["never"], timedelta(seconds=0.01))):
        with pytest.raises(dist.DistStoreError, match="wait timeout"):
            late()
    assert store.get("late/1") == b"1"


def test_what_waits_0_2_s_waits_longer_when_told_to(store):
    other = store.clone()
    store.set_timeout(timedelta(seconds=20))
    # What was left of the limit of an earlier request is none of this one's.
    store._connection.settimeout(0.1)
    threading.Timer(0.5, other.set, ("torch/slow", "1")).start()
    # As NCCL's groups ask, through torch's own prefix.
    assert dist.PrefixStore("torch", store).get("slow") == b"1"


def test_many_ask_at_once(store):
    stores = [store.clone() for _ in range(8)]

    def count(mine):
        for _ in range(50):
            mine.add("sum", 1)

    threads = [threading.Thread(target=count, args=(mine,)) for mine in stores for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.add("sum", 0) == 800


def test_a_large_value_comes_whole(store):
    value = os.urandom(1 << 20)
    store.set("large", value)
    assert store.get("large") == value
    with pytest.raises(dist.DistNetworkError, match="at most"):
        store.set("larger", bytes((1 << 26) + 1))


def test_without_the_key_nobody_joins_nor_writes_nor_deletes(store, place, monkeypatch):
    monkeypatch.setattr("hybridflow.parallel.handshake._WRONG_S", 0.0)
    store.set("weights", "ours")
    with pytest.raises(StrangerError):
        KeeperStore("127.0.0.1", place, key_for(b"a guess", "a test"), timeout_s=1, connect_s=5)
    with pytest.raises(dist.DistError):
        thief = dist.TCPStore("127.0.0.1", place, timeout=timedelta(seconds=1), wait_for_workers=False)
        thief.set("weights", "theirs")
        thief.delete_key("weights")
    assert store.get("weights") == b"ours"


def own_a_keeper(sender):
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    keeper = begin_keeper(listener, KEY, 1)
    sender.send((port, keeper.pid))
    time.sleep(60)


def test_the_keeper_tells_whether_rank_0_runs_and_ends_with_it():
    receiver, sender = FORK.Pipe(duplex=False)
    owner = FORK.Process(target=own_a_keeper, args=(sender,), daemon=True)
    owner.start()
    port, pid = receiver.recv()
    store = KeeperStore("127.0.0.1", port, KEY, timeout_s=20, connect_s=20)
    for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):  # Slurm sends them to all processes of a step
        os.kill(pid, each)
    assert NamedStore("watch", store).rank_0_runs()
    os.kill(owner.pid, signal.SIGSTOP)
    wait_until(lambda: not store.rank_0_runs())
    owner.kill()
    owner.join()
    wait_until(lambda: not is_served(store))
    with pytest.raises(dist.DistNetworkError, match="the keeper of the store on rank 0 is gone"):
        store.get("anything")


def is_served(store):
    try:
        store.check(["anything"])
    except dist.DistNetworkError:
        return False
    return True
