"""The log of finished responses: whatever is torn off or spoiled, what stands before it is read, and nothing wrong."""

import contextlib
import os
import signal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridflow.errors import WriteError
from hybridflow.rollout.log_file import LoggedSample, LogHeader, LogName, LogWriter, list_logs, read_log

HEADER = LogHeader(step=3, fingerprint="ab12", seed=7, vocab_size=100)


def response(prompt_index, index, length):
    values = np.random.default_rng([prompt_index, index])
    return LoggedSample(
        prompt_index=prompt_index,
        index=index,
        tokens=values.integers(0, 100, length).astype(np.int32),
        log_probs=-values.random(length).astype(np.float32),
        sampled_log_probs=-values.random(length).astype(np.float32),
        versions=values.integers(0, 9, length).astype(np.int32),
        choices=values.bytes(2 * length) if index == 1 else b"",
        finish=("stop", "length", "paused")[index % 3],
    )


RESPONSES = [
    response(prompt_index, index, length)
    for prompt_index, index, length in [(9, 0, 4), (9, 1, 1), (8, 2, 0), (10, 1, 30)]
]


def plain(responses):
    return [
        (each.prompt_index, each.index, each.finish, each.choices, *(values.tolist() for values in columns(each)))
        for each in responses
    ]


def columns(each):
    return each.tokens, each.log_probs, each.sampled_log_probs, each.versions


def write(path, responses=RESPONSES):
    """A log, and its size after the header and after each response."""
    path.unlink(missing_ok=True)
    with LogWriter(path, HEADER) as writer:
        sizes = [path.stat().st_size]
        for each in responses:
            writer.add([each])
            sizes.append(path.stat().st_size)
    return sizes


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "whole.log"
    return write(path), path.read_bytes()


def test_what_was_added_is_read_as_it_was(tmp_path):
    path = tmp_path / "new" / "some.log"
    with LogWriter(path, HEADER) as writer:
        writer.add(RESPONSES[:3])
        writer.add([])
        writer.add(RESPONSES[3:])
    header, found = read_log(path)
    assert header == HEADER
    assert plain(found) == plain(RESPONSES)
    kinds = [np.int32, np.float32, np.float32, np.int32]
    assert all([values.dtype for values in columns(each)] == kinds for each in found)
    assert [each.is_whole for each in found] == [True, True, False, True]


def test_layout_of_the_file_is_the_documented_one(tmp_path):
    path = tmp_path / "a.log"
    sizes = write(path)
    # A block's 4 bytes of length and 16 of checksum; four numbers of 8 bytes; 16 bytes for each token; choices.
    assert [after - before for before, after in zip(sizes, sizes[1:], strict=False)] == [
        4 + 16 + 32 + 16 * count + choices for count, choices in ((4, 0), (1, 2), (0, 0), (30, 60))
    ]
    last = path.read_bytes()[sizes[3] :]
    head = [int.from_bytes(last[start : start + 8], "little") for start in range(20, 52, 8)]
    assert last[:4] == (32 + 16 * 30 + 60).to_bytes(4, "little") and head == [10, 1, 30, 1]
    assert last[52:-60] == b"".join(values.tobytes() for values in columns(RESPONSES[3]))
    assert last[-60:] == RESPONSES[3].choices


def test_cut_anywhere_what_stands_before_is_read(whole, tmp_path):
    sizes, data = whole
    path = tmp_path / "cut.log"
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        found = read_log(path)
        if length < sizes[0]:
            assert found is None
        else:
            assert plain(found.responses) == plain(RESPONSES[: sum(size <= length for size in sizes[1:])])


def test_a_bit_flipped_anywhere_takes_what_follows_alone(whole, tmp_path):
    sizes, data = whole
    path = tmp_path / "flipped.log"
    for place in range(len(data)):
        spoiled = bytearray(data)
        spoiled[place] ^= 1 << place % 8
        path.write_bytes(spoiled)
        found = read_log(path)
        if place < sizes[0]:
            assert found is None
        else:
            assert plain(found.responses) == plain(RESPONSES[: sum(size <= place for size in sizes[1:])])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, len(RESPONSES) - 1), max_size=6))
def test_blocks_lost_repeated_or_in_another_order_are_not_read(whole, tmp_path, chosen):
    sizes, data = whole
    blocks = [data[start:stop] for start, stop in zip(sizes, sizes[1:], strict=False)]
    path = tmp_path / "mixed.log"
    path.write_bytes(data[: sizes[0]] + b"".join(blocks[block] for block in chosen))
    length = next((at for at, block in enumerate(chosen) if block != at), len(chosen))
    assert plain(read_log(path).responses) == plain(RESPONSES[:length])


def test_what_was_added_survives_a_kill(tmp_path):
    path, (reading, writing) = tmp_path / "killed.log", os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            writer, number = LogWriter(path, HEADER), 0
            while True:
                writer.add([response(number, 0, 20)])
                os.write(writing, b".")
                number += 1
        os._exit(1)
    os.close(writing)
    told = 0
    while told < 200:
        told += len(os.read(reading, 64))
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    while more := os.read(reading, 65536):
        told += len(more)
    os.close(reading)
    found = read_log(path).responses
    assert told <= len(found) <= told + 1
    assert plain(found) == plain(response(number, 0, 20) for number in range(len(found)))


def test_two_processes_never_write_one_file(tmp_path):
    path = tmp_path / "some.log"
    write(path)
    before = path.read_bytes()
    with pytest.raises(WriteError, match=r"some\.log: cannot be written: .*File exists.*set another run_dir"):
        LogWriter(path, HEADER)
    assert path.read_bytes() == before


def test_a_refusal_of_the_disk_is_told_by_the_next_call(tmp_path, monkeypatch):
    def refuse(file):
        raise OSError(28, "No space left on device")

    writer = LogWriter(tmp_path / "full.log", HEADER)
    monkeypatch.setattr("hybridflow.rollout.log_file.os.fsync", refuse)
    writer.add(RESPONSES[:1])
    with pytest.raises(WriteError, match=r"full\.log: cannot be written: .*No space left"):
        writer.close()


def test_what_the_disk_tells_once_is_not_forgotten(tmp_path, monkeypatch):
    errors = [OSError(5, "Input/output error")]

    def refuse_once(_):
        if errors:
            raise errors.pop()

    writer = LogWriter(tmp_path / "a.log", HEADER)
    monkeypatch.setattr("hybridflow.rollout.log_file.os.fsync", refuse_once)
    writer.add(RESPONSES)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WriteError, match="a.log: cannot be written: .*Input/output"):
        writer.close()
    assert len(os.listdir("/proc/self/fd")) == num_open - 1


def test_names_tell_what_is_inside(tmp_path):
    names = [LogName(12, "3fab", 3), LogName(2, "00ff", 100000), LogName(1234567, "0", 0)]
    assert str(names[0]) == "step-000012-start-3fab-rank-00003.log"
    assert list_logs(tmp_path / "absent") == []
    for name in [*map(str, names), "step-12.log", "step-000012-start-3fab-rank-00003.log.tmp", "other"]:
        (tmp_path / name).touch()
    assert list_logs(tmp_path) == sorted(names)
