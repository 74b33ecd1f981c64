"""Readers of files of others: changed files are read or refused, without a crash, a hang, or much memory."""

import os
import time

import pytest

from hybridflow.errors import DataError
from tests.fuzz import harness
from tests.fuzz.harness import Case, Target, fuzz
from tests.fuzz.targets import TARGETS, seeds


@pytest.mark.parametrize("name", TARGETS)
def test_changed_files_are_read_or_refused(name):
    report, _ = fuzz(TARGETS[name], 20, seed=1, extra=seeds(name))
    assert not report.failures
    assert report.outcomes["refused"] and report.outcomes.total() == 20 + len(seeds(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_many_changed_files_are_read_or_refused(name):
    report, _ = fuzz(TARGETS[name], 300, seed=2)
    assert not report.failures


def write(folder):
    (folder / "file").write_bytes(b"good")
    return ["file"]


def wait(_):
    while True:
        pass


BEHAVIOR = {
    b"good": lambda _: None,
    b"refuse": lambda content: (_ for _ in ()).throw(DataError("no")),
    b"raise": lambda content: {}[content],
    b"die": lambda _: os._exit(3),
    b"abort": lambda _: os.abort(),
    b"hang": wait,
    b"fill": lambda _: bytearray(b"x") * (24 << 20),
    b"wait": lambda _: time.sleep(60),
}


def read(folder, name):
    BEHAVIOR[(folder / name).read_bytes()]((folder / name).read_bytes())


def test_the_harness_finds_what_it_looks_for(monkeypatch):
    monkeypatch.setattr(harness, "CPU_S", 0.6)
    # Much longer than the time above, and little memory: a busy machine takes its time for both.
    monkeypatch.setattr(harness, "_WAIT_S", 8.0)
    monkeypatch.setattr(harness, "_FREE_BYTES", 16 << 20)
    report, failed = fuzz(Target(write, read), 0, extra=[Case("file", content) for content in BEHAVIOR])
    assert (report.outcomes["read"], report.outcomes["refused"]) == (1, 1)
    assert [case.content for case in failed] == [b"raise", b"die", b"abort", b"hang", b"fill", b"wait"]
    says = (
        "KeyError",
        "exited with 3",
        "ended by SIGABRT",
        "took more than 0.6 s",
        "bytes of memory",
        "waited for more",
    )
    for detail, expected in zip(report.failures.values(), says, strict=True):
        assert expected in detail
