"""A topic of Kafka, read from given offsets on: the one door to ``confluent_kafka``."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from hybridflow.config.data import KafkaConfig
from hybridflow.data.files import needing
from hybridflow.errors import DataError

_AT_ONCE, _MOST, _MOST_BYTES = 100, 10_000, 16 << 20


class Message(NamedTuple):
    """What stands at an offset of a partition.

    Attributes:
        partition: Its number.
        offset: Offset of the message in it.
        value: None: there is none, it is a tombstone.
    """

    partition: int
    offset: int
    value: bytes | None


class Topic:
    """A client for one topic. The brokers keep nothing of it: it joins no group and commits nothing.

    Attributes:
        heard: What the client last said of the brokers; empty: nothing since they last answered.
        is_cut: Whether the brokers no longer have what comes next.

    Raises:
        DataError: The package is not installed, an option is none, or the variable of a secret is not set.
    """

    def __init__(self, kafka: KafkaConfig) -> None:
        with needing("data.kafka: reading a topic", "confluent-kafka", "kafka"):
            import confluent_kafka
        self._library: Any = confluent_kafka
        self._topic = kafka.topic
        self._secrets = _secrets(kafka)
        self.heard, self.is_cut = "", False
        settings = {
            "client.id": "hybridflow",
            # What is in the way is told by us, where somebody waits.
            "log_level": "2",
            **kafka.options,
            **self._secrets,
            "bootstrap.servers": ",".join(kafka.servers),
            # Asked for by the library, and never joined.
            "group.id": "hybridflow",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "error_cb": self._hear,
        }
        try:
            self._client: Any = confluent_kafka.Consumer(settings)
        except confluent_kafka.KafkaException as error:
            raise DataError(
                f"data.kafka.options: {self._text(error.args[0].str())}; give settings of librdkafka "
                f"{confluent_kafka.libversion()[0]} by its names"
            ) from error

    def offsets(self, within_s: float) -> dict[int, tuple[int, int]]:
        """Return for each partition the offset of the oldest message, and of the one that will come next.

        Args:
            within_s: Longest wait for each answer.

        Returns:
            Nothing where the brokers do not tell; then ``heard`` says why.
        """
        try:
            found = self._client.list_topics(self._topic, within_s).topics[self._topic]
            if found.error is not None:
                raise self._library.KafkaException(found.error)
            offsets = {
                each: self._client.get_watermark_offsets(self._library.TopicPartition(self._topic, each), within_s)
                for each in sorted(found.partitions)
            }
        except self._library.KafkaException as error:
            # What it heard meanwhile says more than that it has waited; it is told in the next call.
            self._client.poll(0)
            self.heard = self.heard or self._text(error.args[0].str())
            return {}
        self.heard = ""
        return offsets

    def begin(self, offsets: Mapping[int, int]) -> None:
        """Read on from these offsets of partitions, and from no others."""
        self.is_cut = False
        self._client.assign(
            [self._library.TopicPartition(self._topic, each, offset) for each, offset in offsets.items()]
        )

    def messages(self, within_s: float) -> list[Message]:
        """Return what comes within this time, or as much of it as is handy; of each partition in order."""
        found: list[Message] = []
        num_bytes, end_s = 0, time.monotonic() + within_s
        while len(found) < _MOST and num_bytes < _MOST_BYTES and (left_s := end_s - time.monotonic()) > 0:
            for each in self._client.consume(_AT_ONCE, left_s):
                error = each.error()
                if error is None:
                    found.append(Message(each.partition(), each.offset(), each.value()))
                    num_bytes += len(each.value() or b"")
                elif error.code() in (self._library.KafkaError._AUTO_OFFSET_RESET, 1):
                    self.is_cut = True
                    return found
                else:
                    self._hear(error)
        return found

    def close(self) -> None:
        """End the client."""
        self._client.close()

    def _hear(self, error: Any) -> None:
        # That all are down is no news beside what each of them said.
        if error.code() != self._library.KafkaError._ALL_BROKERS_DOWN:
            self.heard = self._text(error.str())

    def _text(self, text: str) -> str:
        for name, secret in self._secrets.items():
            text = text.replace(secret, f"<{name}>")
        return text


def _secrets(kafka: KafkaConfig) -> dict[str, str]:
    for name, variable in kafka.options_env.items():
        if not os.environ.get(variable):
            raise DataError(
                f"data.kafka.options_env: {name} is in the environment variable {variable}, which is not set; export "
                "it where the job is started"
            )
    return {name: os.environ[variable] for name, variable in kafka.options_env.items()}
