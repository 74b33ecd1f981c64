"""What rank 0's watch makes of what it hears: who lives, what the first cause is, when all end. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from hybridflow.parallel.cause import Cause, Place, lost_rank, tell_cause, tell_places
from hybridflow.parallel.links import Message
from hybridflow.parallel.process import Process

SETTLE_S = 0.5
"""From a closed connection to a lost rank, be it rank 0 or another: a launcher that ends all ranks has ended this one
too by then."""

_GRACE_S = 2.0
"""So long the cause is waited for once a rank has waited in vain for others: one of them may know why."""

_GATHER_S = 2.0
"""So long the hub waits for where the ranks are before it tells the cause."""

_SLOW_S = 10.0
"""So much longer it waits for ranks that were heard not long ago. One in a long call of a library ends by itself after
it; killed, it would give the job the status of a kill instead of the cause's."""


@dataclass(kw_only=True)
class _Rank:
    host: str = "a node that is not known yet"
    activity: str = "start"
    is_here: bool = False
    has_left: bool = False
    process: Process = (0, 0)
    heard_s: float = 0.0
    looked_s: float = 0.0
    closed_s: float | None = None


@dataclass(kw_only=True, eq=False)
class Hub:
    """The watch's judgement. Times are of a clock that counts while this process is awake.

    Attributes:
        host: Host of rank 0.
        process: Process of rank 0.
        size: Ranks of the job.
        dead_after_s: A rank that is silent for so long is lost, in seconds.
        to: Sends a message to a rank, which may be this one.
        to_all: Sends a message to every rank, this one included.
        tell: Shows a person what ended the job.
    """

    host: str
    process: Process
    size: int
    dead_after_s: float
    to: Callable[[int, Message], None]
    to_all: Callable[[Message], None]
    tell: Callable[[str], None]

    def __post_init__(self) -> None:
        self._ranks = [_Rank() for _ in range(self.size)]
        self._ranks[0] = _Rank(host=self.host, process=self.process, is_here=True)
        self._stop: str | None = None
        self._suspects: list[tuple[float, Cause]] = []
        self._cause: Cause | None = None
        self._places: dict[int, Place] = {}
        self._tell_by_s = 0.0
        self._is_told = False

    def welcome(self, rank: int, host: str, process: Process, now_s: float) -> None:
        """Note that a rank has come; tell it what all others were told before."""
        first = self._ranks[0]
        self._ranks[rank] = _Rank(host=host, process=process, is_here=True, heard_s=now_s)
        if self._stop is not None:
            self.to(rank, {"stop": self._stop})
        if self._cause is not None:
            self.to(rank, {"end": asdict(self._cause)})
        if all(each.is_here for each in self._ranks):
            others = [number for number, each in enumerate(self._ranks) if each.host != first.host]
            self.to_all({"deputy": others[0] if others else 1, "host": first.host, "process": first.process})

    def heard(self, rank: int, now_s: float) -> None:
        """Note that a rank lives."""
        self._ranks[rank].heard_s = now_s

    def closed(self, rank: int, now_s: float) -> None:
        """Note that a rank's connection has closed."""
        if self._ranks[rank].closed_s is None:
            self._ranks[rank].closed_s = now_s

    def take(self, rank: int, message: Message, now_s: float) -> None:
        """Act on a rank's message."""
        found = self._ranks[rank]
        if "activity" in message:
            found.activity = str(message["activity"])
        elif "stop" in message and self._stop is None:
            self._stop = f"rank {rank} on {found.host} {message['stop']}"
            self.to_all({"stop": self._stop})
        elif "failure" in message:
            cause = Cause(**message["failure"])
            self._suspects.append((now_s + (_GRACE_S if cause.kind == "waited" else 0.0), cause))
        elif "place" in message:
            self._places[rank] = Place(**message["place"])
        elif "seen" in message:
            self.heard(int(message["seen"]), now_s)
        elif "bye" in message:
            found.has_left = True

    def have_all_left(self) -> bool:
        """Return whether no other rank is left."""
        return all(each.has_left for each in self._ranks[1:])

    def turn(self, now_s: float) -> None:
        """Act on the passing of time: a lost rank, the first cause, the end of all."""
        if self._cause is None:
            self._look_at_silent(now_s)
            self._find_cause(now_s)
            return
        silent = [each for number, each in enumerate(self._ranks) if self._is_awaited(number, each)]
        if not self._is_told and (not silent or now_s >= self._tell_by_s):
            self._is_told = True
            self._explain(self._cause)
        are_slow = any(each.is_here and now_s < each.heard_s + self.dead_after_s / 2 for each in silent)
        if self._is_told and not (are_slow and now_s < self._tell_by_s + _SLOW_S):
            self._end_silent(now_s)
            self.to_all({"exit": self._cause.status})

    def _is_awaited(self, number: int, each: _Rank) -> bool:
        """Return whether a rank may still say where it is."""
        return number not in self._places and not each.has_left and each.closed_s is None

    def _find_cause(self, now_s: float) -> None:
        lost = [(number, each) for number, each in enumerate(self._ranks) if self._is_lost(number, each, now_s)]
        due = [cause for due_s, cause in self._suspects if due_s <= now_s]
        known = [cause for cause in due if cause.kind != "waited"]
        if known:
            self._cause = known[0]
        elif lost:
            # One that is gone before one that is only silent: it may be the one that the other waits for.
            number, each = min(lost, key=lambda item: (item[1].closed_s is None, item[1].closed_s or 0.0))
            self._cause = lost_rank(
                number,
                each.host,
                each.activity,
                is_closed=each.closed_s is not None,
                dead_after_s=self.dead_after_s,
            )
        elif due:
            self._cause = due[0]
        if self._cause is not None:
            self._tell_by_s = now_s + _GATHER_S
            self.to_all({"end": asdict(self._cause)})

    def _look_at_silent(self, now_s: float) -> None:
        """Ask another rank of its node whether the process of a silent one runs: a long call may hold its Python."""
        for number, each in enumerate(self._ranks):
            quiet_s, every_s = now_s - each.heard_s, self.dead_after_s / 8
            if number == 0 or each.has_left or quiet_s < self.dead_after_s / 2 or now_s < each.looked_s + every_s:
                continue
            each.looked_s = now_s
            mate = self._mate(number, now_s)
            if mate is not None:
                self.to(mate, {"look": number, "process": each.process})

    def _end_silent(self, now_s: float) -> None:
        """Have those killed that do not end by themselves: a launcher may wait for each of its ranks."""
        for number, each in enumerate(self._ranks):
            if self._is_awaited(number, each):
                mate = self._mate(number, now_s)
                if mate is not None:
                    self.to(mate, {"kill": each.process})

    def _mate(self, number: int, now_s: float) -> int | None:
        """Return another rank of the same node that answers."""
        each = self._ranks[number]
        for mate, other in enumerate(self._ranks):
            is_there = other.is_here and not other.has_left and other.closed_s is None
            answers = mate == 0 or now_s - other.heard_s < self.dead_after_s / 2
            if mate != number and is_there and answers and each.is_here and other.host == each.host:
                return mate
        return None

    def _is_lost(self, number: int, each: _Rank, now_s: float) -> bool:
        if number == 0 or each.has_left:
            return False
        if each.closed_s is not None:
            return now_s >= each.closed_s + SETTLE_S
        return now_s >= each.heard_s + self.dead_after_s

    def _explain(self, cause: Cause) -> None:
        text = tell_cause(cause)
        if cause.kind in ("lost", "waited"):
            silent = {
                number: Place(host=each.host, activity=each.activity, line="")
                for number, each in enumerate(self._ranks)
            }
            others = {number: place for number, place in {**silent, **self._places}.items() if number != cause.rank}
            text = "\n".join([text, *tell_places(others)])
        self.tell(text)
