"""What the ranks of a job tell each other beside their collectives: that it is to stop, that one failed, that all live.

A collective cannot carry it, since a rank may be waiting in one, or be busy for minutes outside any. So each rank has a
thread with a connection to that of rank 0, the hub, and ends its process whatever the main thread waits for:

    failure of a rank       it tells the hub ``failure``     the first that is a cause counts
    its death               its connection closes
    its node's, SIGSTOP     silence for ``dead_after_s``
    then                    hub to all ``end``               all note their stacks, and answer ``place``
                            the hub prints the cause, then where the others are
                            hub to all ``exit``              all end with the cause's status
    death of rank 0         its connection closes, or it is silent: the deputy, a rank of another node, prints it

Nothing here waits for a rank, a disk or a lock for longer than it says. No torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, Protocol

from hybridflow.errors import DeadlineError
from hybridflow.exit_status import FAILURE
from hybridflow.observe.activity import now, waited_for
from hybridflow.observe.rank_log import note, tell
from hybridflow.parallel.cause import (
    Cause,
    Place,
    all_stacks,
    cause_of,
    in_a_line,
    lost_rank,
    own_place,
    place_of,
    tell_cause,
    tell_places,
)
from hybridflow.parallel.handshake import Gate, StrangerError, connect, listen
from hybridflow.parallel.hub import SETTLE_S, Hub
from hybridflow.parallel.links import Link, Message
from hybridflow.parallel.process import Process, is_running, kill, own_process
from hybridflow.parallel.signals import CaughtSignals

_POLL_S = 0.5
_BEATS_PER_S = 256
"""Of all ranks together, so that rank 0 is not kept busy."""

_GATHER_S = 0.05

_CONNECT_S = 60.0

_LEAVE_S = 1.0
"""Where the hub is gone, so long the ranks that say nothing leave later than the one that tells of it."""

_LAST_WORDS_S = 2.0
"""So long flushing output, and what else is to be done before a failed process ends, may take."""

_NOTE_S = 1.0
"""So long lines for the console or the log may take: a file system that hangs may be what this thread has to end."""


class MeetingPlace(Protocol):
    """Methods that are needed of ``store.NamedStore``."""

    def set(self, key: str, value: str) -> None:
        """Let all ranks know a value."""

    def get(self, key: str) -> bytes:
        """Return a value, once it is there."""

    def rank_0_runs(self) -> bool:
        """Return whether rank 0's process runs."""


class Watch:
    """This rank's part in the watch over all.

    Collective: all ranks make it, and ``close`` it when the job ends in order.

    Args:
        store: Where the ranks meet; with names of its own.
        rank: This rank.
        size: Ranks of the job.
        address: Address of rank 0's machine.
        key: Key of the connections.
        dead_after_s: A rank that is silent for so long is lost, in seconds.
        deadline_s: Longest wait of the main thread for one answer of a user's code, in seconds.
        signals: The signals that this process catches; None: it catches none.

    Attributes:
        stop_reason: Why the job is to save and stop, in words; None: it is to go on. Once it has been set, it stays.
        before_exit: Called with the cause, in a line, before this process is ended for a failure; in a thread, for a
            few seconds at most. None: nothing.

    Raises:
        DeadlineError: Rank 0's watch cannot be reached.
    """

    def __init__(
        self,
        store: MeetingPlace,
        *,
        rank: int,
        size: int,
        address: str,
        key: bytes,
        dead_after_s: float,
        deadline_s: float,
        signals: CaughtSignals | None = None,
    ) -> None:
        self.stop_reason: str | None = None
        self.before_exit: Callable[[str], None] | None = None
        self._rank, self._size, self._signals = rank, size, signals
        self._dead_after_s, self._deadline_s = dead_after_s, deadline_s
        self._host = socket.gethostname()
        self._beat_s = min(max(_POLL_S, size / _BEATS_PER_S), dead_after_s / 4)
        self._requests: SimpleQueue[Message] = SimpleQueue()
        self._ear, self._mouth = socket.socketpair()
        self._ear.setblocking(False)
        # Counts while this process is awake: after a suspension of the whole job nobody is late.
        self._clock_s = self._beat_at_s = 0.0
        self._activity = ""
        # The main thread's wait for a user's code, and when it was first seen.
        self._wait_for_user, self._wait_seen_s = waited_for(), 0.0
        self._links: dict[int, Link] = {}
        self._guests: list[Link] = []
        self._ready: set[int] = set()
        self._gate: Gate | None = None
        self._process = own_process()
        self._hub: Hub | None = None
        if rank == 0:
            self._hub = Hub(
                host=self._host,
                process=self._process,
                size=size,
                dead_after_s=dead_after_s,
                to=self._to,
                to_all=self._to_all,
                tell=_show,
            )
        # Which rank speaks when rank 0 is gone, and what is then known of rank 0.
        self._deputy, self._hub_host, self._hub_activity = 1, address, "start"
        self._hub_process: Process = (0, 0)
        self._looked_s = 0.0
        self._store = store
        self._question: threading.Thread | None = None
        self._cause: Cause | None = None
        self._failed_at: Place | None = None
        self._leave_at_s = self._goodbye_s = float("inf")
        self._is_over = False
        self._meet(store, address, key)
        note(f"rank {rank} of {size} on {self._host}, process {os.getpid()}: the watch begins")
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def ask_stop(self, reason: str) -> None:
        """Let all ranks know, within a second or so, that the job is to save and stop."""
        self._request({"stop": reason})

    def fail(self, error: Exception) -> NoReturn:
        """End all ranks' processes, this one too, with the status of the first cause, which is told once."""
        cause = cause_of(error, self._rank, self._host)
        trace = "".join(traceback.format_exception(error)).rstrip()
        _within(_NOTE_S, note, f"failed in {cause.activity}\n{trace}")
        self._failed_at = place_of(error, self._host)
        self._request({"failure": asdict(cause)})
        # It ends this process, unless the job has ended in order before.
        self._thread.join()
        _within(_NOTE_S, tell, tell_cause(cause))
        self._leave(cause)

    def close(self) -> None:
        """Leave in order; rank 0 once all others have, or have had time to."""
        self._request({"bye": True})
        self._thread.join()

    def _request(self, message: Message) -> None:
        """Have the thread act at once."""
        self._requests.put(message)
        with contextlib.suppress(OSError):
            self._mouth.send(b"!")

    def _meet(self, store: MeetingPlace, address: str, key: bytes) -> None:
        if self._size == 1:
            return
        if self._hub is not None:
            listener = listen(address)
            self._gate = Gate(listener, key, self._size)
            store.set("hub", str(listener.getsockname()[1]))
            return
        port = int(store.get("hub"))
        try:
            connection, channel = connect(address, port, key, limit_s=_CONNECT_S)
        except (OSError, StrangerError) as error:
            why = "another program listens there" if isinstance(error, StrangerError) else error
            raise DeadlineError(
                f"rank {self._rank} on {self._host} cannot reach the watch of rank 0 at {address}:{port}: {why}; the "
                "nodes of a job must be able to connect to any port of each other"
            ) from error
        self._links[0] = Link(connection, channel)
        self._links[0].send({"hello": self._rank, "host": self._host, "process": self._process})

    def _run(self) -> None:
        """Run the thread."""
        try:
            while not self._is_over:
                self._wait()
                self._take_requests()
                self._listen()
                self._beat()
                self._limit_user_code()
                if self._hub is not None:
                    self._hub.turn(self._clock_s)
                    self._is_over |= self._goodbye_s < float("inf") and self._hub.have_all_left()
                    self._is_over |= self._clock_s >= self._goodbye_s
                else:
                    self._judge_hub(self._links[0])
        except Exception as error:
            cause = cause_of(error, self._rank, self._host)
            _within(_NOTE_S, tell, tell_cause(cause))
            self._leave(cause)
        if self._hub is not None:
            for link in self._links.values():
                link.send({"bye": True})

    def _wait(self) -> None:
        """Wait until something comes, or for a moment; then take the signals that have come."""
        began_s = time.monotonic()
        poll = select.poll()
        links = [link for link in (*self._links.values(), *self._guests) if link.is_open]
        for reader in (self._ear, self._gate, self._signals, *links):
            if reader is not None:
                poll.register(reader, select.POLLIN)
        poll.poll(min(_POLL_S, self._beat_s) * 1000)
        # What many ranks say is read at one go.
        time.sleep(_GATHER_S)
        self._ready = {descriptor for descriptor, _ in poll.poll(0)}
        self._clock_s += min(time.monotonic() - began_s, 2 * _POLL_S)
        with contextlib.suppress(BlockingIOError):
            self._ear.recv(4096)
        for signal in self._signals.wait(0) if self._signals is not None else ():
            _within(_NOTE_S, note, f"received {signal.name}")
            self._requests.put({"stop": f"received {signal.name}"})

    def _take_requests(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                message = self._requests.get_nowait()
                self._to_hub(message)
                if "bye" in message:
                    self._goodbye_s = self._clock_s + self._dead_after_s

    def _to_hub(self, message: Message) -> None:
        if self._hub is not None:
            self._hub.take(0, message, self._clock_s)
        else:
            self._links[0].send(message)

    def _to(self, rank: int, message: Message) -> None:
        if rank == self._rank:
            self._take_order(message)
        else:
            self._links[rank].send(message)

    def _to_all(self, message: Message) -> None:
        for link in self._links.values():
            link.send(message)
        self._take_order(message)

    def _listen(self) -> None:
        """Take what has come from others."""
        for rank, link in list(self._links.items()):
            if link.fileno() not in self._ready:
                continue
            heard_s = link.heard_s
            for message in link.receive(self._clock_s):
                if self._hub is not None:
                    self._hub.take(rank, message, self._clock_s)
                else:
                    self._take_order(message)
            if self._hub is not None:
                if link.heard_s > heard_s:
                    self._hub.heard(rank, self._clock_s)
                if not link.is_open:
                    self._hub.closed(rank, self._clock_s)
        if self._gate is not None:
            self._guests += [Link(*admitted, self._clock_s) for admitted in self._gate.admit(self._clock_s)]
            self._welcome_guests()

    def _welcome_guests(self) -> None:
        """Take those who know the key for the ranks that they say they are."""
        assert self._hub is not None
        for link in self._guests[:]:
            messages = link.receive(self._clock_s)
            if not messages and link.is_open and self._clock_s < link.heard_s + _CONNECT_S:
                continue
            self._guests.remove(link)
            hello = messages[0] if messages else {}
            rank = hello.get("hello", 0)
            if not 0 < rank < self._size or rank in self._links:
                link.close()
                continue
            self._links[rank] = link
            self._hub.welcome(rank, str(hello["host"]), _process(hello["process"]), self._clock_s)
            for message in messages[1:]:
                self._hub.take(rank, message, self._clock_s)

    def _take_order(self, message: Message) -> None:
        """Act on the hub's message to all."""
        if "stop" in message:
            self.stop_reason = str(message["stop"])
            _within(_NOTE_S, note, f"asked to stop: {self.stop_reason}")
        elif "deputy" in message:
            self._deputy, self._hub_host = int(message["deputy"]), str(message["host"])
            self._hub_process = _process(message["process"])
        elif "look" in message:
            if is_running(_process(message["process"])):
                self._to_hub({"seen": message["look"]})
        elif "kill" in message:
            kill(_process(message["kill"]))
        elif "activity" in message:
            self._hub_activity = str(message["activity"])
        elif "end" in message:
            self._cause = Cause(**message["end"])
            place = self._place()
            self._to_hub({"place": asdict(place)})
            _within(_NOTE_S, _note_end, self._cause, place)
        elif "exit" in message and self._cause is not None:
            self._leave(self._cause)
        elif "bye" in message:
            self._is_over = True

    def _beat(self) -> None:
        """Show that this rank lives, and what it does."""
        is_due = self._clock_s >= self._beat_at_s
        if is_due:
            self._beat_at_s = self._clock_s + self._beat_s
            message: Message = {} if (activity := now()) == self._activity else {"activity": activity}
            self._activity = activity
        for link in self._links.values():
            if is_due:
                link.send(message)
            else:
                link.flush()

    def _limit_user_code(self) -> None:
        """End the job if the main thread has waited too long for a user's code: other ranks may wait likewise."""
        wait = waited_for()
        if wait is None or wait != self._wait_for_user:
            self._wait_for_user, self._wait_seen_s = wait, self._clock_s
        elif self._clock_s >= self._wait_seen_s + self._deadline_s:
            self._wait_seen_s = float("inf")
            text = (
                f"{wait[0]}: no answer within cluster.deadline_s={self._deadline_s:g} s (main thread at "
                f"{own_place(self._host).line}; all threads: log of this rank); mend it, set its timeout_s, or raise "
                "cluster.deadline_s"
            )
            cause = Cause(kind="explained", rank=self._rank, host=self._host, activity=now(), text=text, status=FAILURE)
            self._to_hub({"failure": asdict(cause)})

    def _judge_hub(self, link: Link) -> None:
        """Check whether rank 0 still lives; leave if it does not."""
        if self._goodbye_s < float("inf") and (link.flush() or self._clock_s >= self._goodbye_s):
            self._is_over = True
            return
        if self._leave_at_s == float("inf"):
            if not link.is_open:
                self._leave_at_s = self._clock_s + SETTLE_S
            elif self._clock_s >= link.heard_s + self._dead_after_s:
                self._leave_at_s = self._clock_s
            else:
                self._look_at_hub(link)
                return
            self._leave_at_s += 0.0 if self._rank == self._deputy else _LEAVE_S
        if self._clock_s < self._leave_at_s:
            return
        cause = self._cause
        if cause is None:
            cause = lost_rank(
                0,
                self._hub_host,
                self._hub_activity,
                is_closed=not link.is_open,
                dead_after_s=self._dead_after_s,
            )
            if self._rank == self._deputy:
                _within(_LAST_WORDS_S, tell, "\n".join([tell_cause(cause), *tell_places({self._rank: self._place()})]))
            _within(_NOTE_S, _note_end, cause, self._place())
            if link.is_open and self._host == self._hub_host:
                # A launcher may wait for each of its ranks, also for one that is stopped.
                kill(self._hub_process)
        self._leave(cause)

    def _look_at_hub(self, link: Link) -> None:
        """Check a silent rank 0 by its process, on its node or through the store: a long call may hold its Python."""
        is_quiet = self._clock_s >= link.heard_s + self._dead_after_s / 2
        if not is_quiet or self._clock_s < self._looked_s + self._dead_after_s / 8:
            return
        self._looked_s = self._clock_s
        if self._host == self._hub_host:
            if is_running(self._hub_process):
                link.heard_s = self._clock_s
        elif self._question is None or not self._question.is_alive():
            self._question = threading.Thread(target=self._ask_store, args=(link,), daemon=True)
            self._question.start()

    def _ask_store(self, link: Link) -> None:
        with contextlib.suppress(RuntimeError):
            if self._store.rank_0_runs():
                link.heard_s = self._clock_s

    def _place(self) -> Place:
        return self._failed_at or own_place(self._host)

    def _leave(self, cause: Cause) -> NoReturn:
        """End this process, whatever its other threads wait for."""
        _within(_LAST_WORDS_S, self._last_words, in_a_line(cause))
        os._exit(cause.status)

    def _last_words(self, line: str) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        if self.before_exit is not None:
            self.before_exit(line)


def _within(limit_s: float, act: Callable[..., None], *args: Any) -> None:
    """Do something that may hang, and go on when it does."""
    thread = threading.Thread(target=act, args=args, daemon=True)
    thread.start()
    thread.join(limit_s)


def _show(text: str) -> None:
    _within(_NOTE_S, tell, text)
    _within(_NOTE_S, note, text)


def _note_end(cause: Cause, place: Place) -> None:
    note(f"the job ends: {in_a_line(cause)}\nthis rank is in {place.activity}, at {place.line}\n{all_stacks()}")


def _process(numbers: Sequence[int]) -> Process:
    pid, began = numbers
    return int(pid), int(began)
