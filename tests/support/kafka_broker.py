"""A real Kafka broker on this machine, with its ZooKeeper, for as long as a context lasts."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.e2e.commands import free_port

KAFKA = Path(__file__).parents[2] / ".kafka/kafka"
START_S = 60.0

# The broker is older than the request by which clients ask for its version.
OPTIONS = {"api.version.request": "false", "broker.version.fallback": "0.9.0.1"}


def is_there() -> bool:
    """Whether ``tests/support/kafka.sh`` has installed it."""
    return (KAFKA / "libs").is_dir() and shutil.which("java") is not None


class Broker:
    """One broker. Topics come to be by writing to them, with two partitions; those of ``create`` have settings.

    Args:
        folder: Of its logs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._zookeeper_port, self.port = free_port(), free_port()
        self._zookeeper: subprocess.Popen[bytes] | None = None
        self._broker: subprocess.Popen[bytes] | None = None
        (folder / "zookeeper.properties").write_text(
            f"dataDir={folder}/zookeeper\nclientPort={self._zookeeper_port}\nclientPortAddress=127.0.0.1\n"
            "tickTime=500\n"
        )
        (folder / "kafka.properties").write_text(
            f"broker.id=0\nlisteners=PLAINTEXT://127.0.0.1:{self.port}\nlog.dirs={folder}/logs\n"
            f"zookeeper.connect=127.0.0.1:{self._zookeeper_port}\nzookeeper.session.timeout.ms=2000\n"
            "num.partitions=2\noffsets.topic.num.partitions=1\noffsets.topic.replication.factor=1\n"
            "message.max.bytes=4000000\nreplica.fetch.max.bytes=4000000\n"
        )

    @property
    def server(self) -> str:
        """Its address."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Begin, or begin again with what it had; returns when it answers."""
        if self._zookeeper is None:
            main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
            self._zookeeper = self._java("zookeeper", main, "zookeeper.properties")
            self._wait(lambda: self._registered() is not None, "ZooKeeper does not answer")
        # One that was killed stays registered until ZooKeeper misses it, and no other of its number may begin.
        self._wait(lambda: self._registered() is False, "the broker before this one is still registered")
        self._broker = self._java("kafka", "kafka.Kafka", "kafka.properties")
        self._wait(lambda: self._registered() is True, "the broker has not begun")

    def kill(self) -> None:
        """End the broker as a power cut does."""
        self._end(self._broker)
        self._broker = None

    def stop(self) -> None:
        """End all."""
        for process in (self._broker, self._zookeeper):
            self._end(process)
        self._broker = self._zookeeper = None

    def drop(self, topic: str, partition: int) -> int:
        """Have it lose all but the newest segment of a partition, as retention does; the offset of what is left.

        Retention itself begins half a minute after the broker.
        """
        self.kill()
        # Named by the offset of its first message.
        *old, last = sorted((self._folder / f"logs/{topic}-{partition}").glob("*.log"))
        for path in old:
            path.unlink()
            path.with_suffix(".index").unlink()
        self.start()
        return int(last.stem)

    def create(self, topic: str, partitions: int, **settings: int) -> None:
        """Make a topic; settings such as ``segment_bytes``."""
        configs = [f"--config={name.replace('_', '.')}={value}" for name, value in settings.items()]
        self._topics(["--create", "--replication-factor=1", f"--partitions={partitions}", *configs], topic)

    def widen(self, topic: str, partitions: int) -> None:
        """Give a topic more partitions."""
        self._topics(["--alter", f"--partitions={partitions}"], topic)

    def _topics(self, arguments: Sequence[str], topic: str) -> None:
        zookeeper = f"--zookeeper=127.0.0.1:{self._zookeeper_port}"
        command = self._command("kafka.admin.TopicCommand", zookeeper, f"--topic={topic}", *arguments)
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def _java(self, name: str, main: str, settings: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                self._command(main, str(self._folder / settings)),
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @staticmethod
    def _command(main: str, *arguments: str) -> list[str]:
        return [
            # Started many times for seconds on few cores: the first of Java's compilers is enough.
            *("java", "-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto"),
            f"-Dlog4j.configuration=file:{KAFKA}/config/tools-log4j.properties",
            *("-cp", f"{KAFKA}/libs/*", main, *arguments),
        ]

    def _registered(self) -> bool | None:
        """Whether ZooKeeper knows the broker; None: it does not answer."""
        try:
            with socket.create_connection(("127.0.0.1", self._zookeeper_port), timeout=5) as link:
                link.sendall(b"dump")
                with link.makefile("rb") as answer:
                    return b"/brokers/ids/0" in answer.read()
        except OSError:
            return None

    def _wait(self, is_so: Callable[[], bool], problem: str) -> None:
        end_s = time.monotonic() + START_S
        while not is_so():
            logs = "".join(path.read_text(errors="replace")[-2000:] for path in self._folder.glob("*.log"))
            has_ended = any(each is not None and each.poll() is not None for each in (self._zookeeper, self._broker))
            assert not has_ended and time.monotonic() < end_s, f"{problem}: {logs}"
            time.sleep(0.05)

    @staticmethod
    def _end(process: subprocess.Popen[bytes] | None) -> None:
        if process is not None:
            process.kill()
            process.wait(START_S)


@contextlib.contextmanager
def running_broker(folder: Path) -> Iterator[Broker]:
    """A broker that answers."""
    folder.mkdir(parents=True, exist_ok=True)
    broker = Broker(folder)
    try:
        broker.start()
        yield broker
    finally:
        broker.stop()


def write(server: str, topic: str, messages: Sequence[tuple[int, bytes | None]]) -> None:
    """Write values to partitions of a topic, in this order, and see that they are there."""
    # Here, so that what starts a broker needs no client.
    import confluent_kafka

    problems: list[object] = []
    settings = {"bootstrap.servers": server, **OPTIONS, "message.max.bytes": 4000000, "log_level": 2}
    producer = confluent_kafka.Producer({**settings, "linger.ms": 5, "message.timeout.ms": 30000})
    needed, end_s = {partition for partition, _ in messages}, time.monotonic() + START_S
    there: set[int] = set()
    # Asking makes the topic; a broker that has just begun knows of none, and hears of new partitions a little later.
    while not needed <= there:
        assert time.monotonic() < end_s, f"{topic} has no partitions {needed}"
        with contextlib.suppress(confluent_kafka.KafkaException):
            there = set(producer.list_topics(topic, 10).topics[topic].partitions)
    for partition, value in messages:
        producer.produce(
            topic, value, partition=partition, on_delivery=lambda error, _: problems.append(error) if error else None
        )
    assert producer.flush(30) == 0 and not problems, problems


def write_apart(server: str, topic: str, messages: Sequence[tuple[int, bytes | None]]) -> None:
    """As ``write``, in a process of its own: the client's library does not survive a fork of who has used it."""
    text = json.dumps([(partition, value and value.decode()) for partition, value in messages])
    command = [sys.executable, "-m", "tests.support.kafka_broker", server, topic]
    subprocess.run(command, input=text, text=True, cwd=Path(__file__).parents[2], timeout=START_S, check=True)


if __name__ == "__main__":
    given = json.load(sys.stdin)
    write(sys.argv[1], sys.argv[2], [(partition, value and value.encode()) for partition, value in given])
