"""Responses in files that a kill cannot spoil: appended to, checksummed, synced. No torch.

    16 bytes            MAGIC
    block               JSON: what the file is, ``LogHeader``
    block …             a response each: prompt index, index, number of tokens, how it ended (its place in
                        ``FINISHES``); of each token: id (int32), log-probability, that of the distribution sampled
                        from (fp32), weights' version (int32); then the experts' numbers, if the run keeps them

A response that was paused is there with what was sampled of it by then; it may be there again, longer or finished.

All numbers are little-endian. A block is its length (4 bytes), a checksum (16 bytes), and its content. The checksum
covers that of the block before it too, so that a block is read only where all before it are whole and in their order:
what a kill tore off, or a disk spoiled, takes with it nothing but what follows.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridflow.observe.files import sync_path, write_all, writing

if TYPE_CHECKING:
    from hybridflow.rollout.request import FinishReason, SampleKey

MAGIC = b"hybridflow-log-3"
FINISHES: tuple[FinishReason, ...] = ("stop", "length", "paused")
"""How a response that is kept has ended, as ``rollout.request.FinishReason`` says it."""
_TOKEN_TYPES = ("<i4", "<f4", "<f4", "<i4")
_LENGTH = struct.Struct("<I")
_CHECKSUM_BYTES = 16
_RECORD = struct.Struct("<qqqq")
_NAME = re.compile(r"step-(\d{6,})-start-([0-9a-z]+)-rank-(\d{5,})(?:-part-(\d{5,}))?\.log")


class LogName(NamedTuple):
    """A log's name: one for each rollout of a step, start of the run, and rank, so that no two writers ever share one.

    Attributes:
        step: Training step whose responses it holds.
        start: Tells the start of the run from others.
        rank: Which wrote it.
        part: Which rollout of the step, from 1 on.
    """

    step: int
    start: str
    rank: int
    part: int = 1

    def __str__(self) -> str:
        part = "" if self.part == 1 else f"-part-{self.part:05d}"
        return f"step-{self.step:06d}-start-{self.start}-rank-{self.rank:05d}{part}.log"

    @staticmethod
    def parse(name: str) -> LogName | None:
        """Parse a file's name; None: it is no log."""
        found = _NAME.fullmatch(name)
        return None if found is None else LogName(int(found[1]), found[2], int(found[3]), int(found[4] or 1))


@dataclass(frozen=True, kw_only=True)
class LogHeader:
    """What a log says of all its responses.

    Attributes:
        step: Training step that they are for.
        fingerprint: Fingerprint of the weights that sampled them.
        seed: Seed of the noise.
        vocab_size: Tokens are below it.
    """

    step: int
    fingerprint: str
    seed: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class LoggedSample:
    """A response.

    Attributes:
        prompt_index: Serial number of its prompt in the data order.
        index: Its number among those of its prompt.
        tokens: ``[response]``.
        log_probs: The sampler's own, before penalties and cuts, ``[response]``.
        sampled_log_probs: Log-probabilities of the distribution that was sampled from, ``[response]``.
        versions: Which weights sampled each token, ``[response]``; ``request.OBSERVED``: none.
        choices: ``request.Response.choices`` as they lie in memory; empty: they were not kept.
        finish: One of ``FINISHES``.
    """

    prompt_index: int
    index: int
    tokens: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    sampled_log_probs: NDArray[np.float32]
    versions: NDArray[np.int32]
    choices: bytes = b""
    finish: FinishReason = "stop"

    @property
    def key(self) -> SampleKey:
        """Return what tells it from others."""
        return self.prompt_index, self.index

    @property
    def is_whole(self) -> bool:
        """Return whether it has ended."""
        return self.finish != "paused"


class Log(NamedTuple):
    """What is whole of a log."""

    header: LogHeader
    responses: list[LoggedSample]


class LogWriter:
    """Writes a log that is not there yet. A context manager; what was added is on disk when it ends.

    What ``add`` has taken survives the process at once. A thread brings it to the disk, so that decoding does not wait.

    Args:
        path: Its directory is made if absent.
        header: Header of the log.

    Raises:
        WriteError: It cannot be made.
    """

    def __init__(self, path: Path, header: LogHeader) -> None:
        self._path = path
        self._num_bytes, self._num_synced = 0, 0
        self._syncing: list[Future[None]] = []
        self._meanwhile = ThreadPoolExecutor(1, thread_name_prefix="rollout log")
        self._checksum = MAGIC
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
            self._write(MAGIC + self._block(json.dumps(asdict(header)).encode()))

    def add(self, responses: Iterable[LoggedSample]) -> None:
        """Append responses.

        Raises:
            WriteError: The file system refuses, these or what was added before.
        """
        with writing(self._path):
            self._write(b"".join(self._block(pack_response(each)) for each in responses))
            while self._syncing and self._syncing[0].done():
                self._syncing.pop(0).result()
        self._syncing.append(self._meanwhile.submit(self._sync))

    def close(self) -> None:
        """Return when all is on disk.

        Raises:
            WriteError: The file system refuses.
        """
        self._meanwhile.shutdown()
        try:
            with writing(self._path):
                # A disk tells of what it has lost once, maybe to the thread.
                for each in self._syncing:
                    each.result()
                self._sync()
        finally:
            os.close(self._file)

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _block(self, content: bytes) -> bytes:
        length = _LENGTH.pack(len(content))
        self._checksum = _checksum(self._checksum, length, content)
        return length + self._checksum + content

    def _write(self, data: bytes) -> None:
        write_all(self._file, data)
        self._num_bytes += len(data)

    def _sync(self) -> None:
        num_bytes = self._num_bytes
        if num_bytes == self._num_synced:
            return
        os.fsync(self._file)
        if not self._num_synced:
            sync_path(self._path.parent)
        self._num_synced = num_bytes


def read_log(path: Path) -> Log | None:
    """Read all that is whole in a log; None: not even its header is.

    Raises:
        OSError: The file system refuses.
    """
    blocks = _blocks(path.read_bytes())
    first = next(blocks, None)
    if first is None:
        return None
    try:
        header = LogHeader(**json.loads(first))
    except (ValueError, TypeError):
        return None
    return Log(header, [unpack_response(block) for block in blocks])


def pack_response(response: LoggedSample) -> bytes:
    """Pack a response as a block of a log."""
    columns = (response.tokens, response.log_probs, response.sampled_log_probs, response.versions)
    assert all(each.shape == response.tokens.shape for each in columns), "a number of each kind for each token"
    head = _RECORD.pack(response.prompt_index, response.index, len(response.tokens), FINISHES.index(response.finish))
    numbers = (each.astype(kind).tobytes() for each, kind in zip(columns, _TOKEN_TYPES, strict=True))
    return b"".join((head, *numbers, response.choices))


def unpack_response(content: bytes) -> LoggedSample:
    """Unpack a response of ``pack_response``."""
    prompt_index, index, count, finish = _RECORD.unpack_from(content)
    tokens, log_probs, sampled, versions = (
        np.frombuffer(content, kind, count, _RECORD.size + 4 * count * place).astype(kind[1:])
        for place, kind in enumerate(_TOKEN_TYPES)
    )
    return LoggedSample(
        prompt_index=prompt_index,
        index=index,
        tokens=tokens,
        log_probs=log_probs,
        sampled_log_probs=sampled,
        versions=versions,
        choices=content[_RECORD.size + 4 * count * len(_TOKEN_TYPES) :],
        finish=FINISHES[finish],
    )


def list_logs(folder: Path) -> list[LogName]:
    """List the logs in a directory, in order; none where there is no directory."""
    if not folder.is_dir():
        return []
    names = (LogName.parse(path.name) for path in folder.iterdir())
    return sorted(name for name in names if name is not None)


def _blocks(data: bytes) -> Iterator[bytes]:
    """Yield the contents of the blocks up to the first that is not as it was written."""
    if data[: len(MAGIC)] != MAGIC:
        return
    at, before = len(MAGIC), MAGIC
    while at + _LENGTH.size + _CHECKSUM_BYTES <= len(data):
        length = data[at : at + _LENGTH.size]
        start = at + _LENGTH.size + _CHECKSUM_BYTES
        at = start + _LENGTH.unpack(length)[0]
        content = data[start:at]
        checksum = _checksum(before, length, content)
        if checksum != data[start - _CHECKSUM_BYTES : start]:
            return
        before = checksum
        yield content


def _checksum(before: bytes, length: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(before + length + content, digest_size=_CHECKSUM_BYTES).digest()
