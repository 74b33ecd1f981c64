"""The watch over all ranks: what its hub makes of what it hears, and what a person reads."""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from hybridflow.errors import DataError, DeadlineError
from hybridflow.observe.activity import current_activity, now
from hybridflow.observe.timeline import Timeline
from hybridflow.parallel.cause import (
    Cause,
    Place,
    all_stacks,
    cause_of,
    in_a_line,
    own_place,
    place_of,
    tell_cause,
    tell_places,
)
from hybridflow.parallel.handshake import SealedChannel
from hybridflow.parallel.hub import Hub
from hybridflow.parallel.links import Link
from hybridflow.parallel.process import is_running, kill, own_process
from hybridflow.parallel.watch import Watch
from hybridflow.plugins import PACKAGE
from tests.support.waiting import wait_until


class Job:
    """A hub of four ranks, 0 and 1 on node a, 2 and 3 on node b, and what it did."""

    def __init__(self):
        self.sent, self.printed, self.asked = [], [], []
        self.hub = Hub(
            host="a",
            process=(1, 1),
            size=4,
            dead_after_s=20.0,
            to=lambda rank, message: self.asked.append((rank, message)),
            to_all=self.sent.append,
            tell=self.printed.append,
        )
        for rank in (1, 2, 3):
            self.hub.welcome(rank, "aabb"[rank], (10 + rank, 1), 0.0)

    def pass_time(self, to_s, alive=(1, 2, 3), from_s=0.0):
        """Turns of half a second, in which some ranks are heard."""
        at_s = from_s
        while at_s <= to_s:
            for rank in alive:
                self.hub.heard(rank, at_s)
            self.hub.turn(at_s)
            at_s += 0.5

    def ends(self):
        return [message["end"] for message in self.sent if "end" in message]

    def exits(self):
        return [message["exit"] for message in self.sent if "exit" in message]


@pytest.fixture
def job():
    return Job()


def failure(rank, kind="explained", status=2):
    cause = Cause(kind=kind, rank=rank, host="x", activity="actor.update", text=f"text of {rank}", status=status)
    return {"failure": {name: getattr(cause, name) for name in cause.__dataclass_fields__}}


def place(line="f.py:1 f", step="actor.update"):
    return {"place": {"host": "x", "activity": step, "line": line}}


def test_who_speaks_when_rank_0_is_gone_is_of_another_node(job):
    assert job.sent == [{"deputy": 2, "host": "a", "process": (1, 1)}]


def test_first_failure_counts_and_all_leave_with_its_status_once_all_have_answered(job):
    job.hub.take(2, failure(2, status=3), 1.0)
    job.hub.take(1, failure(1, status=2), 1.0)
    job.hub.turn(1.0)
    assert [end["rank"] for end in job.ends()] == [2] and job.exits() == []
    for rank in range(4):
        job.hub.take(rank, place(), 1.1)
    job.hub.turn(1.1)
    assert job.exits() == [3]
    # An error that the user is to act on is one line.
    assert job.printed == ["hybridflow: rank 2 on x, in actor.update: text of 2"]


def test_rank_that_comes_late_is_told_to_stop_and_to_end(job):
    # Rank 0 may fail at once, for instance because the run directory holds a run, before it has heard of the others.
    job.hub.take(0, {"stop": "received SIGTERM"}, 1.0)
    job.hub.take(0, failure(0), 1.0)
    job.hub.turn(1.0)
    job.asked.clear()
    job.hub.welcome(1, "a", (11, 1), 1.1)
    (one, stop), (two, end) = job.asked
    assert (one, stop, two, end["end"]["text"]) == (1, {"stop": "rank 0 on a received SIGTERM"}, 1, "text of 0")
    for rank in range(4):
        job.hub.take(rank, place(), 1.2)
    job.hub.turn(1.2)
    assert job.exits() == [2]


def test_rank_that_waited_in_vain_is_no_cause_where_another_knows_one(job):
    job.hub.take(0, failure(0, "waited", 1), 1.0)
    job.pass_time(2.0, from_s=1.0)
    assert job.ends() == []
    job.hub.take(3, failure(3, "ours", 1), 2.5)
    job.hub.turn(2.5)
    assert [end["rank"] for end in job.ends()] == [3]


def test_rank_that_waited_in_vain_is_the_cause_after_a_grace(job):
    job.hub.take(0, failure(0, "waited", 1), 1.0)
    job.pass_time(3.0, from_s=1.0)
    assert [end["rank"] for end in job.ends()] == [0]
    job.hub.take(0, place("c.py:1 wait"), 3.0)
    job.hub.take(1, place("c.py:1 wait"), 3.0)
    job.hub.take(2, place("c.py:1 wait"), 3.0)
    job.pass_time(4.5, from_s=3.0)
    assert job.exits() == []  # rank 3 may still answer
    job.pass_time(5.0, from_s=5.0)
    assert job.printed[0].splitlines() == [
        "hybridflow: rank 0 on x, in actor.update: text of 0",
        "  rank 3 on b: no answer, last seen in start",
        "  ranks 1-2 on x: in actor.update, at c.py:1 wait",
    ]


@pytest.mark.parametrize(
    ("beats_until_s", "answers_s", "ends_s", "killed"),
    [(1.0, 9.0, 9.0, []), (1.0, None, 11.0, [(2, {"kill": (13, 1)})]), (99.0, None, 13.0, [(2, {"kill": (13, 1)})])],
    ids=["in a long call", "stopped", "beats alone"],
)
def test_rank_that_is_slow_to_answer_is_not_killed_at_once(job, beats_until_s, answers_s, ends_s, killed):
    # 20 s without a sign of life is a death, and so half of that is silence.
    job.pass_time(1.0)
    job.hub.take(0, failure(0), 1.0)
    job.hub.turn(1.0)
    for rank in (0, 1, 2):
        job.hub.take(rank, place(), 1.0)
    at_s = 1.0
    while not job.exits():
        at_s += 0.5
        if at_s == answers_s:
            job.hub.take(3, place(), at_s)
        job.pass_time(at_s, alive=(1, 2, 3) if at_s <= beats_until_s else (1, 2), from_s=at_s)
        assert bool(job.printed) == (at_s >= 3.0)
    assert (at_s, job.exits(), len(job.printed)) == (ends_s, [2], 1)
    assert [asked for asked in job.asked if "kill" in asked[1]] == killed


def test_closed_connection_is_a_lost_rank_unless_it_left_or_all_are_being_ended(job):
    job.hub.take(1, {"bye": True}, 1.0)
    job.hub.closed(1, 1.0)
    job.hub.take(3, {"activity": "reward.judge"}, 1.0)
    job.hub.closed(3, 1.0)
    job.pass_time(1.0, from_s=1.0, alive=(2,))
    assert job.ends() == []  # who ends all ranks ends this one too
    job.pass_time(1.5, from_s=1.5, alive=(2,))
    (end,) = job.ends()
    assert (end["kind"], end["rank"], end["host"], end["activity"], end["status"]) == (
        "lost",
        3,
        "b",
        "reward.judge",
        1,
    )


def test_silent_rank_is_lost_when_its_time_is_up_and_nobody_sees_it_run(job):
    job.pass_time(19.5, alive=(1, 3))
    assert job.ends() == []
    # Another rank of its node is asked to look, from half of the time on.
    assert {(rank, message["look"]) for rank, message in job.asked} == {(3, 2)}
    assert job.asked[0][1]["process"] == (12, 1)
    job.pass_time(20.0, from_s=20.0, alive=(1, 3))
    assert [(end["rank"], end["kind"]) for end in job.ends()] == [(2, "lost")]
    assert "no sign of life for 20 s" in job.ends()[0]["text"]


def test_silent_rank_whose_process_runs_is_waited_for(job):
    job.pass_time(15.0, alive=(1, 3))
    job.hub.take(3, {"seen": 2}, 15.0)
    job.pass_time(34.5, from_s=15.5, alive=(1, 3))
    assert job.ends() == []


def test_silent_rank_is_killed_in_the_end_by_one_of_its_node(job):
    job.pass_time(20.0, alive=(1, 3))
    job.asked.clear()
    for rank in (0, 1, 3):
        job.hub.take(rank, place(), 20.0)
    job.pass_time(22.0, from_s=20.5, alive=(1, 3))
    assert job.asked == [(3, {"kill": (12, 1)})] and job.exits() == [1]


def test_rank_that_never_came_to_the_watch_is_lost():
    sent = []
    hub = Hub(
        host="a", process=(1, 1), size=2, dead_after_s=5, to=lambda *_: None, to_all=sent.append, tell=lambda _: None
    )
    hub.turn(5.0)
    assert sent[0]["end"]["rank"] == 1 and sent[0]["end"]["host"] == "a node that is not known yet"


def test_stop_is_passed_on_once_with_who_asked(job):
    job.hub.take(3, {"stop": "received SIGUSR1"}, 1.0)
    job.hub.take(1, {"stop": "received SIGTERM"}, 1.0)
    assert [message for message in job.sent if "stop" in message] == [{"stop": "rank 3 on b received SIGUSR1"}]


def test_places_are_grouped_by_what_is_done_and_the_fewest_come_first():
    waits = {
        rank: Place(host=f"n{rank // 8}", activity="actor.update (train step 3)", line="a.py:7 f") for rank in range(64)
    }
    there = Place(host="n4", activity="reward.judge (train step 3)", line="rewards.py:12 endless")
    silent = Place(host="n0", activity="actor.sample", line="")
    assert tell_places({**waits, 33: there, 5: silent}) == [
        "  rank 5 on n0: no answer, last seen in actor.sample",
        "  rank 33 on n4: in reward.judge (train step 3), at rewards.py:12 endless",
        "  ranks 0-4,6-32,34-63 on n0, n1, n2, n3 and 4 more nodes: in actor.update (train step 3), at a.py:7 f",
    ]


def test_many_places_are_cut():
    places = {rank: Place(host="n", activity="d", line=f"f.py:{rank} f") for rank in range(40)}
    assert len(tell_places(places)) == 33 and tell_places(places)[-1].startswith("  and 8 more places")


def test_causes_by_kind():
    def raised(error, file=__file__):
        try:
            with current_activity("train step 3"), Timeline().span("call", "actor.update"):
                exec(compile("raise error", file, "exec"), {"error": error})
        except Exception as caught:
            return cause_of(caught, 1, "n1")

    explained = raised(DataError("mend line 3"))
    assert tell_cause(explained) == "hybridflow: rank 1 on n1, in actor.update (train step 3): mend line 3"
    assert explained.status == 2
    assert raised(DeadlineError("waited")).status == raised(OSError(5, "Input/output error", "f")).status == 1
    ours = raised(KeyError("a bug"), f"{PACKAGE}/roles/actor.py")
    lines = tell_cause(ours).splitlines()
    assert ours.status == 1 and lines[0] == "hybridflow: rank 1 on n1 failed in actor.update (train step 3):"
    assert lines[1].startswith("Traceback") and lines[-2] == "KeyError: 'a bug'"
    assert lines[-1] == "hybridflow: this is an error of hybridflow's own"
    assert in_a_line(ours) == f"{lines[0]} KeyError: 'a bug'" and in_a_line(explained) == tell_cause(explained)
    program = raised(KeyError("in a script"))
    assert tell_cause(program).endswith("KeyError: 'in a script'\nhybridflow: this is an error of the program's own")
    assert in_a_line(program).endswith(": KeyError: 'in a script'") and program.status == 1


def test_what_is_being_done_ends_with_it():
    with current_activity("train step 1"):
        with current_activity("actor.sample"):
            assert now() == "actor.sample (train step 1)"
        assert now() == "train step 1"
    assert now() == "the work between calls"


def test_place_names_the_line_of_ours_and_the_innermost():
    found = {}

    def ask():
        while " > " not in found.get("line", ""):
            found["line"] = own_place("n").line

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(20)
    assert "test_watch.py:" in found["line"] and "threading.py:" in found["line"].split(" > ")[1]


def test_stacks_are_of_all_threads_but_the_one_that_asks():
    found, asked = [], threading.Event()

    def ask():
        found.append(all_stacks())
        asked.set()

    threading.Thread(target=ask, name="asker").start()
    assert asked.wait(20)
    assert found[0].startswith("thread MainThread:\n") and "test_stacks_are_of_all" in found[0]
    assert "thread asker" not in found[0]


def test_place_of_an_exception_is_where_the_first_was_raised():
    def wait():
        raise RuntimeError("gloo: gone")

    try:
        try:
            wait()
        except RuntimeError as error:
            raise DeadlineError("lost contact") from error
    except DeadlineError as error:
        assert re.fullmatch(r"test_watch.py:\d+ wait", place_of(error, "n").line)


def test_process_that_runs_is_told_from_stopped_gone_and_another():
    child = subprocess.Popen([sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"], stdout=-1)
    child.stdout.readline()
    try:
        code = f"from hybridflow.parallel.process import find_process; print(*find_process({child.pid}))"
        began = int(subprocess.check_output([sys.executable, "-c", code], text=True).split()[1])
        assert is_running((child.pid, began)) and is_running(own_process())
        assert not is_running((child.pid, began + 1))
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert not is_running((child.pid, began))
        kill((child.pid, began + 1))
        assert os.waitpid(child.pid, os.WUNTRACED | os.WNOHANG) == (0, 0)
        kill((child.pid, began))
        assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) == -signal.SIGKILL
    finally:
        child.kill()
        child.wait()
    assert not is_running((child.pid, began))


def test_a_rank_may_open_all_the_files_that_the_system_lets_it(tmp_path):
    # Imported here, since programs of other tests import this file, and need no torch.
    from hybridflow.parallel import rendezvous
    from tests.e2e.commands import fork_ranks

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)

    def hook(rank):
        def open_store(*_, **__):
            print(resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most), flush=True)
            raise OSError("enough was seen")

        # Beside those that the process of the tests has left open.
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 200, most))
        rendezvous.open_store = open_store

    done = fork_ranks(["train", "quickstart"], tmp_path, num_ranks=4, start_only=[0], hook=hook)
    assert (done.codes, done.out.splitlines()[-1]) == ((1,), "True"), done.err


def pair():
    """A link, and the other end of its connection with its channel."""
    one, other = socket.socketpair()
    return Link(one, SealedChannel(b"a", b"b")), other, SealedChannel(b"b", b"a")


def test_link_carries_messages_in_parts_and_tells_of_the_end():
    link, other, channel = pair()
    last = channel.seal(b'{"a": 1}') + channel.seal(b""), channel.seal(b'{"b": 2}')
    other.sendall(last[0] + last[1][:9])
    assert link.receive(3.0) == [{"a": 1}] and link.heard_s == 3.0
    assert link.receive(4.0) == [] and link.heard_s == 3.0 and link.is_open
    other.sendall(last[1][9:])
    other.close()
    assert link.receive(5.0) == [{"b": 2}] and not link.is_open


def test_a_process_that_a_rank_has_forked_does_not_keep_its_link_open_when_the_rank_is_dead():
    link, other, _ = pair()
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        link.close()
        other.settimeout(10)
        assert other.recv(1) == b""
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_link_never_waits_for_a_peer_that_takes_nothing():
    link, other, channel = pair()
    message = {"text": "x" * 1000}
    while link.flush():
        link.send(message)
    link.send(message)
    received = []
    while not received or not link.flush():
        received += channel.open(other.recv(1 << 20))
    assert json.loads(received[0]) == message


def test_what_a_peer_said_before_it_went_is_read_although_nothing_can_be_sent():
    link, other, channel = pair()
    other.sendall(channel.seal(b'{"bye": true}'))
    other.close()
    assert link.flush()
    link.send({"beat": 1})
    assert link.receive(1.0) == [{"bye": True}] and not link.is_open


KEY = bytes(32)


class Memory:
    """A meeting place within a process."""

    def __init__(self):
        self._values, self._is_there = {}, threading.Event()

    def set(self, key, value):
        self._values[key] = value.encode()
        self._is_there.set()

    def get(self, key):
        assert self._is_there.wait(20)
        return self._values[key]


def test_ranks_share_a_stop_and_leave_in_order():
    store = Memory()
    limits = {"dead_after_s": 20, "deadline_s": 20}
    watches = [Watch(store, rank=rank, size=3, address="127.0.0.1", key=KEY, **limits) for rank in range(3)]
    watches[2].ask_stop("was asked nicely")
    wait_until(lambda: all(watch.stop_reason is not None for watch in watches))
    assert {watch.stop_reason for watch in watches} == {f"rank 2 on {socket.gethostname()} was asked nicely"}
    leaving = threading.Thread(target=watches[0].close)
    leaving.start()
    watches[1].close()
    assert leaving.is_alive()
    watches[2].close()
    leaving.join(20)
    assert not leaving.is_alive()


def test_one_rank_alone_has_no_port():
    watch = Watch(Memory(), rank=0, size=1, address="", key=KEY, dead_after_s=20, deadline_s=20)
    watch.ask_stop("time is up")
    wait_until(lambda: watch.stop_reason is not None)
    assert watch.stop_reason == f"rank 0 on {socket.gethostname()} time is up"
    watch.close()


WAITS = """
import time
from hybridflow.observe.activity import waiting_for
from hybridflow.parallel.watch import Watch

Watch(None, rank=0, size=1, address="", key=b"", dead_after_s=20, deadline_s=1.5)
for _ in range(10):
    with waiting_for("answers", time.monotonic()):
        time.sleep(0.3)
since_s = time.monotonic()
for _ in range(2):
    with waiting_for("a call that is asked for twice", since_s):
        time.sleep(1.2)
    time.sleep(1.2)
print("all ended", flush=True)
while True:
    with waiting_for("reward 'mine' (rewards.py:3)", since_s):
        time.sleep(0.1)
"""


def test_only_a_wait_for_one_answer_of_user_code_ends_a_job_that_has_no_other_rank():
    done = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "all ended\n"), done.stderr
    assert (
        ": reward 'mine' (rewards.py:3): no answer within cluster.deadline_s=1.5 s (main thread at <string>:1"
        in done.stderr
    )


STUCK = """
import os, threading
from hybridflow.errors import DataError
from hybridflow.observe import rank_log
from hybridflow.parallel.watch import Watch

def fill(descriptor):
    os.set_blocking(descriptor, False)
    try:
        while True:
            os.write(descriptor, bytes(1 << 12))
    except BlockingIOError:
        os.set_blocking(descriptor, True)

watch = Watch(None, rank=0, size=1, address="", key=b"", dead_after_s=20, deadline_s=20)
rank_log._log_fd = os.pipe()[1]
watch.before_exit = lambda line: threading.Event().wait()
fill(rank_log._log_fd)
fill(2)
watch.fail(DataError("mend line 3"))
"""


@pytest.mark.slow
def test_neither_console_nor_log_that_hang_hold_up_the_end():
    began = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", STUCK], stderr=subprocess.PIPE) as child:
        assert child.wait(60) == 2
        assert time.monotonic() - began < 30
