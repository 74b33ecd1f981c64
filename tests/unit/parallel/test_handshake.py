"""Who is let in at a port of a job: attacks on the handshake, and on messages behind it."""

import contextlib
import resource
import socket
import threading
import time

import pytest

from hybridflow.parallel import handshake
from hybridflow.parallel.handshake import MOST_STRANGERS, Gate, SealedChannel, StrangerError, connect, key_for, listen
from tests.support.waiting import wait_until

KEY, OTHER_KEY = key_for(b"secret", "a test"), key_for(b"secret", "another")


class Door:
    """A gate for one caller on a thread that admits, and what it has let in."""

    def __init__(self, key=KEY):
        self.listener = listen("127.0.0.1")
        self.port = self.listener.getsockname()[1]
        self.gate = Gate(self.listener, key, 1)
        self.admitted, self._is_over = [], False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._is_over:
            self.admitted += self.gate.admit(time.monotonic())
            time.sleep(0.002)

    def close(self):
        self._is_over = True
        self._thread.join()
        self.listener.close()
        for connection, _ in self.admitted:
            connection.close()


@pytest.fixture
def door():
    made = Door()
    yield made
    made.close()


def test_who_knows_the_key_is_let_in_and_both_ends_understand_each_other(door):
    connection, channel = connect("127.0.0.1", door.port, KEY, limit_s=20)
    wait_until(lambda: door.admitted)
    inside, inner = door.admitted[0]
    inside.setblocking(True)
    with connection:
        connection.sendall(channel.seal(b"one") + channel.seal(b""))
        assert inner.open(inside.recv(1000)) == [b"one", b""]
        inside.sendall(inner.seal(b"two" * 1000))
        received = []
        while not received:
            received = channel.open(connection.recv(100))
        assert received == [b"two" * 1000]


def test_a_caller_that_does_not_know_the_key_learns_that_and_is_not_let_in(door, monkeypatch):
    monkeypatch.setattr(handshake, "_WRONG_S", 0.1)
    with pytest.raises(StrangerError):
        connect("127.0.0.1", door.port, OTHER_KEY, limit_s=20)
    assert not door.admitted


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\nHost: rank0\r\n\r\n" + bytes(40),
        handshake._GREETING + bytes(64),  # a proof that is a guess
        handshake._GREETING[:3],
        b"\x80\x04cos\nsystem\n" * 100_000,
    ],
)
def test_who_speaks_without_the_key_is_sent_away(door, monkeypatch, words):
    monkeypatch.setattr(handshake, "_STRANGER_S", 0.2)
    stranger = socket.create_connection(("127.0.0.1", door.port), timeout=10)
    with stranger, contextlib.suppress(ConnectionError):
        stranger.sendall(words)
        while stranger.recv(1000):
            pass
    assert not door.admitted and not door.gate._strangers


def relay(port, change=lambda data: data):
    """A program between a caller and a port. Returns its own port, and what the caller has said to it."""
    between, said = socket.create_server(("127.0.0.1", 0)), []

    def pass_on(source, target, note):
        with contextlib.suppress(OSError):
            while data := source.recv(1000):
                note(data)
                target.sendall(change(data))
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def run():
        with between, between.accept()[0] as caller, socket.create_connection(("127.0.0.1", port)) as onward:
            back = threading.Thread(target=pass_on, args=(onward, caller, lambda data: None))
            back.start()
            pass_on(caller, onward, said.append)
            back.join()

    threading.Thread(target=run, daemon=True).start()
    return between.getsockname()[1], said


def test_what_was_recorded_of_a_caller_opens_nothing(door):
    port, said = relay(door.port)
    connection, channel = connect("127.0.0.1", port, KEY, limit_s=20)
    connection.sendall(channel.seal(b"add one"))
    wait_until(lambda: sum(map(len, said)) > 72 + 36)
    connection.close()
    wait_until(lambda: door.admitted)
    with socket.create_connection(("127.0.0.1", door.port), timeout=10) as thief:
        thief.sendall(b"".join(said))
        with contextlib.suppress(ConnectionResetError):
            while thief.recv(1000):
                pass
    assert len(door.admitted) == 1


def test_a_program_between_the_ends_neither_reads_nor_changes_a_message(door):
    port, said = relay(door.port)
    connection, channel = connect("127.0.0.1", port, KEY, limit_s=20)
    with connection:
        wait_until(lambda: door.admitted)
        connection.sendall(channel.seal(b"the id of NCCL"))
        wait_until(lambda: sum(map(len, said)) > 72 + 36)
    assert b"NCCL" not in b"".join(said)
    sealed = SealedChannel(KEY, OTHER_KEY).seal(b"the id of NCCL")
    for place in range(len(sealed)):
        changed = sealed[:place] + bytes([sealed[place] ^ 1]) + sealed[place + 1 :]
        with contextlib.suppress(ValueError):
            assert SealedChannel(OTHER_KEY, KEY).open(changed + bytes(300)) == []


def test_a_message_counts_once_in_its_place_and_its_direction():
    sender = SealedChannel(KEY, OTHER_KEY)
    one, two = sender.seal(b"one"), sender.seal(b"two")
    assert SealedChannel(OTHER_KEY, KEY).open(one + two) == [b"one", b"two"]
    for wrong in (two, one + one):
        with pytest.raises(ValueError, match="did not send"):
            SealedChannel(OTHER_KEY, KEY).open(wrong)
    with pytest.raises(ValueError, match="did not send"):
        sender.open(one)
    with pytest.raises(ValueError, match="without an end"):
        sender.open(b"\xff" * 8)


def test_a_flood_of_idle_connections_neither_keeps_a_rank_out_nor_grows(door):
    with contextlib.ExitStack() as crowd:
        for _ in range(300):
            crowd.enter_context(socket.create_connection(("127.0.0.1", door.port), timeout=10))
        connection, _ = connect("127.0.0.1", door.port, KEY, limit_s=20)
        connection.close()
        assert len(door.gate._strangers) <= 1 + MOST_STRANGERS
    wait_until(lambda: door.admitted and not door.gate._strangers)


def test_a_flood_that_takes_all_files_gives_way_to_a_rank():
    listener = listen("127.0.0.1")
    gate = Gate(listener, KEY, 100)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    crowd = [socket.create_connection(listener.getsockname()) for _ in range(40)]
    connected = []
    caller = threading.Thread(target=lambda: connected.append(connect(*listener.getsockname(), KEY, limit_s=20)))
    try:
        with socket.socket() as last:
            resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno() + 10, before[1]))
        caller.start()
        admitted = []
        wait_until(lambda: admitted.extend(gate.admit(time.monotonic())) or admitted)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        caller.join(20)
        for each in (*crowd, listener, *(end for end, _ in (*connected, *admitted))):
            each.close()


def test_a_caller_waits_for_a_listener_but_not_for_ever():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        connect("127.0.0.1", port, KEY, limit_s=0.2)
    looked = []
    with pytest.raises(InterruptedError):
        connect("127.0.0.1", port, KEY, limit_s=60, look=lambda: looked.append(1) if len(looked) < 3 else stop())


def stop():
    raise InterruptedError


@pytest.mark.parametrize(
    ("name", "resolved", "own"),
    [
        ("127.0.0.1", ["127.0.0.1"], "127.0.0.1"),
        ("n1", ["127.0.1.1"], None),  # Debian's line in /etc/hosts: others find n1 elsewhere
        ("n1", ["192.0.2.7"], None),  # no address of this machine: NAT
        ("n1", ["127.0.0.1", "::1"], None),
        ("n1", [], None),
    ],
)
def test_the_address_that_is_listened_at(monkeypatch, name, resolved, own):
    def getaddrinfo(*_, **__):
        if not resolved:
            raise socket.gaierror("no such name")
        return [(0, 0, 0, "", (address, 0)) for address in resolved]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert handshake.own_address(name) == own


def test_a_job_of_one_machine_is_reached_from_that_machine_alone():
    with listen("127.0.0.1") as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
