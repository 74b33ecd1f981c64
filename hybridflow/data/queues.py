"""Live queues of prompts, a spool or a topic of Kafka: one rank takes what comes, and all wait for what it takes."""

from __future__ import annotations

from pathlib import Path

from hybridflow.config.data import KafkaConfig, SpoolConfig
from hybridflow.data.kafka import KafkaTaker, topic_rows
from hybridflow.data.prepare import Alone, Everyone
from hybridflow.data.problems import StoredProblems
from hybridflow.data.shaping import Shape
from hybridflow.data.spool import SpoolTaker, spooled
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.observe.console import print_out


def open_queue(
    queue: SpoolConfig | KafkaConfig,
    shape: Shape,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    everyone: Everyone | None = None,
) -> StoredProblems:
    """Begin to take from a queue, on the lowest rank, and to wait for what it takes. Collective: ``everyone``.

    Args:
        queue: The directory or the topic, and its deadlines.
        shape: What rows have to be.
        tokenizer: Gives the tokens.
        folder: Where the run keeps its rows.
        everyone: The ranks; None: this process alone.

    Raises:
        DataError: The directory cannot be used, or another run takes from it; or the topic cannot be reached, or cannot
            be gone on with.
    """
    everyone = Alone() if everyone is None else everyone
    if isinstance(queue, SpoolConfig):
        inner, path, poll_s = folder / "spool", Path(queue.path), queue.poll_s
        everyone.on_lead("the spool", lambda: SpoolTaker(path, inner, shape, poll_s, print_out).start())
        return StoredProblems(spooled(inner, path, queue.deadline_s), shape, tokenizer)
    inner = folder / "kafka"
    everyone.on_lead("the topic", lambda: KafkaTaker(queue, inner, shape, print_out).start())
    return StoredProblems(topic_rows(inner, queue), shape, tokenizer)
