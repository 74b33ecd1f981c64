"""A topic of Kafka as a live queue of prompts: other programs write to it while the job runs.

The lowest rank takes messages into the run's own store, see ``live``; an entry of the journal names what is in its part
as ``[partition, first offset, number of messages]``. It says where to go on, not the brokers: they keep nothing of a
run, so several may read one topic, and each has all of it.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hybridflow.config.data import KafkaConfig
from hybridflow.data.live import Journal, Taken, Taker
from hybridflow.data.part import ReadRows
from hybridflow.data.rows import HERE, Row, object_of
from hybridflow.data.shaping import Shape
from hybridflow.data.topic import Message, Topic
from hybridflow.errors import DataError

START_S = 60.0
"""Longest wait for the brokers when a run begins: what does not answer then has mostly another address."""

_ASK_S = 2.0
_LOOK_S = 30.0
_RENEW_S = 30.0

Run = list[int]


def topic_rows(folder: Path, kafka: KafkaConfig) -> Taken:
    """Return the rows that were taken from a topic.

    Args:
        folder: Folder of the journal and its parts.
        kafka: The topic, for messages, and the longest wait.
    """
    return Taken(
        folder,
        title=_title(kafka),
        key="data.kafka",
        more="write more messages to it",
        place=lambda entry, at: _place(kafka.topic, entry["taken"], at),
        deadline_s=kafka.deadline_s,
    )


class KafkaTaker(Taker):
    """Takes messages of a topic into a run's store.

    Args:
        kafka: The topic and where it is.
        folder: Folder of the journal and its parts.
        shape: What rows have to be.
        say: Told of what is left out, and of brokers that are away.

    Raises:
        DataError: The topic cannot be reached, or cannot be gone on with.
        OSError: The file system refuses.
    """

    def __init__(self, kafka: KafkaConfig, folder: Path, shape: Shape, say: Callable[[str], None]) -> None:
        super().__init__(Journal(folder, shape, say, source=kafka.topic), pause_s=0.0)
        self._kafka, self._say, self._most = kafka, say, shape.data.max_row_bytes
        # The last entry that has a partition has its last offset.
        runs = (run for entry in self._journal.entries for run in entry["taken"])
        self._next = {partition: offset + count for partition, offset, count in runs}
        self._topic = Topic(kafka)
        self._is_away = False
        self._pid = os.getpid()
        self._read: set[int] = set()
        self._reach(min(kafka.deadline_s, START_S))
        self._looked_s = self._reached_s = time.monotonic()

    def start(self) -> None:
        """Begin to take, until ``stop``, or until this process ends."""
        super().start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """End, after what is in hand."""
        # A fork has neither the thread nor those of the client, which closing would wait for.
        if os.getpid() == self._pid:
            super().stop()
            self._topic.close()

    def take(self) -> int:
        """Take the messages that come within ``poll_s``; how many.

        Raises:
            DataError: One cannot be used, and ``on_bad_row`` is ``error``; or some are gone.
            OSError: The file system refuses.
        """
        if self._topic.heard or self._topic.is_cut or time.monotonic() - self._looked_s > _LOOK_S:
            self._look()
        batch = self._topic.messages(self._kafka.poll_s)
        if batch:
            self._add(batch)
        return len(batch)

    def _reach(self, within_s: float) -> None:
        end_s = time.monotonic() + within_s
        while not (offsets := self._topic.offsets(min(_ASK_S, within_s))):
            if time.monotonic() > end_s:
                raise DataError(
                    f"{_title(self._kafka)}: not reached within {within_s:g} s: {self._topic.heard}; check "
                    "data.kafka.servers, the topic's name and data.kafka.options, and that the brokers run"
                )
        self._go_on(offsets)

    def _look(self) -> None:
        """Look whether the brokers are there, and what they have."""
        self._looked_s = time.monotonic()
        offsets = self._topic.offsets(_ASK_S)
        if offsets:
            self._reached_s = self._looked_s
        elif self._looked_s - self._reached_s > _RENEW_S:
            self._renew()
        if self._is_away != (not offsets):
            self._is_away = not offsets
            text = f"{_title(self._kafka)}: {self._topic.heard}" if self._is_away else ""
            self._journal.note(text)
            self._say(f"data: {text}; waiting for it" if text else f"data: {_title(self._kafka)}: is there again")
        if offsets and (self._topic.is_cut or offsets.keys() != self._read):
            self._go_on(offsets)

    def _renew(self) -> None:
        """Replace a client that may be stuck itself."""
        heard = self._topic.heard
        self._topic.close()
        self._topic = Topic(self._kafka)
        self._topic.heard = heard
        self._topic.begin(self._next)
        self._reached_s = time.monotonic()

    def _go_on(self, offsets: Mapping[int, tuple[int, int]]) -> None:
        """Read each partition from what comes next of it, a new one from its oldest message."""
        for partition in sorted(self._next.keys() | offsets.keys()):
            oldest, end = offsets.get(partition, (0, 0))
            at = self._next.setdefault(partition, oldest)
            if at > end:
                raise DataError(
                    f"{_title(self._kafka)}: ends at offset {end} of partition {partition}, of which the run has taken "
                    f"messages up to {at - 1}: it is another topic of that name, or was made anew; name the one that "
                    "the run began with, or begin a run in another run_dir"
                )
            if at < oldest:
                lost = f"{oldest - at} messages of partition {partition} were dropped before they were taken"
                if self._kafka.on_lost == "error":
                    raise DataError(
                        f"{_title(self._kafka)}: {lost}, offsets {at} to {oldest - 1}; set data.kafka.on_lost=skip and "
                        "resume to go on without them, and have the topic keep messages for longer (retention.ms)"
                    )
                self._say(f"data: {_title(self._kafka)}: {lost}; going on without them")
                self._next[partition] = oldest
        self._topic.begin(self._next)
        self._read = set(offsets)

    def _add(self, batch: Sequence[Message]) -> None:
        runs = _runs(batch)
        place = functools.partial(_place, self._kafka.topic, runs)
        rows = ReadRows([_row(each, self._most) for each in batch], place)
        try:
            self._journal.add([rows], _title(self._kafka), {"taken": runs})
        except DataError as error:
            if len(batch) == 1:
                raise DataError(f"{error}; set data.on_bad_row=skip and resume to go on without it") from error
            # What comes before the bad one can be used.
            half = len(batch) // 2
            self._add(batch[:half])
            self._add(batch[half:])
        else:
            self._next.update({partition: offset + count for partition, offset, count in runs})


def _title(kafka: KafkaConfig) -> str:
    return f"topic {kafka.topic} of {', '.join(kafka.servers)}"


def _row(message: Message, most: int) -> Row | DataError:
    """Return the row of a message, or what is wrong with it."""
    value = message.value
    if value is None or not value.strip():
        what = "has no value (a tombstone)" if value is None else "is empty"
        found: Row | DataError = DataError(f"{HERE}: {what}; ")
    elif len(value) > most:
        return DataError(f"{HERE}: longer than data.max_row_bytes={most}; shorten it, or raise the key")
    else:
        found = object_of(value)
    if isinstance(found, DataError):
        return DataError(f"{str(found).partition(';')[0]}; write one JSON object in UTF-8 as a message's value")
    return found


def _runs(batch: Sequence[Message]) -> list[Run]:
    """Return partition, first offset and number of messages of each stretch without a gap."""
    stretches = itertools.groupby(enumerate(batch), lambda each: (each[1].partition, each[1].offset - each[0]))
    runs = [[message for _, message in stretch] for _, stretch in stretches]
    return [[run[0].partition, run[0].offset, len(run)] for run in runs]


def _place(topic: str, runs: Sequence[Run], number: int) -> str:
    """Return the place of a message of a batch."""
    for partition, offset, count in runs:
        if number < count:
            return f"{topic}[{partition}]@{offset + number}"
        number -= count
    raise AssertionError(f"{number} more than there are")
