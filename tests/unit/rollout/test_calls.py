"""Calls in threads: what they give, what they raise, and that one which never returns holds nothing up."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from hybridflow.rollout import calls
from hybridflow.rollout.calls import CallFailed, Calls
from tests.support.waiting import with_more_time

WAIT_S = 60.0


def collected(running: Calls, count: int) -> dict[int, object]:
    """The results of so many calls, each once."""
    found: dict[int, object] = {}
    end = time.monotonic() + WAIT_S
    while len(found) < count:
        assert time.monotonic() < end, f"{len(found)} of {count} calls have ended"
        for number, result in running.ended(0.05):
            assert number not in found
            found[number] = result
    return found


def fail(error: BaseException):
    raise error


def test_results_and_errors_come_back_under_their_numbers():
    running = Calls(WAIT_S)
    for number in range(3 * calls.MAX_THREADS):
        running.submit(number, lambda number=number: number**2)
    running.submit(1000, lambda: fail(ValueError("wrong")))
    running.submit(1001, lambda: fail(SystemExit(3)))
    found = collected(running, 3 * calls.MAX_THREADS + 2)
    assert {number: result for number, result in found.items() if number < 1000} == {
        number: number**2 for number in range(3 * calls.MAX_THREADS)
    }
    assert isinstance(found[1000], CallFailed) and str(found[1000]) == "ValueError: wrong"
    assert str(found[1001]) == "SystemExit: 3"


def test_calls_run_together():
    together = threading.Barrier(8)
    running = Calls(WAIT_S)
    for number in range(8):
        running.submit(number, lambda: together.wait(WAIT_S) >= 0)
    # They begin as they are submitted, before anybody asks what has ended.
    begun = threading.Event()
    running.submit(8, lambda: begun.set() is None)
    assert begun.wait(WAIT_S)
    assert all(result is True for result in collected(running, 9).values())


def test_one_that_does_not_return_in_time_fails_and_is_not_heard_of_again():
    def check(limit_s):
        running, held = Calls(limit_s), threading.Event()
        for number in range(calls.MAX_THREADS):
            running.submit(number, held.wait)
        # There is no thread for it before the deadline of the others.
        running.submit(1000, lambda: "after them")
        found = collected(running, calls.MAX_THREADS + 1)
        assert found.pop(1000) == "after them"
        assert {str(result) for result in found.values()} == {f"no answer within {limit_s:g} s"}
        held.set()
        # Threads that were left behind serve again.
        before = threading.active_count()
        for number in range(calls.MAX_THREADS):
            running.submit(2000 + number, lambda: "again")
        assert set(collected(running, calls.MAX_THREADS).values()) == {"again"}
        assert threading.active_count() <= before + calls.MAX_THREADS

    with_more_time(check, 0.5, 5.0)


def test_what_is_dropped_is_not_heard_of_again():
    running, held = Calls(WAIT_S), threading.Event()
    running.submit(0, held.wait)
    running.drop()
    held.set()
    running.submit(1, lambda: "new")
    assert collected(running, 1) == {1: "new"}
    assert running.ended(0.1) == []


def test_with_too_many_that_never_return_no_more_are_begun(monkeypatch):
    monkeypatch.setattr(calls, "MAX_LEFT_BEHIND", 2)
    running, held = Calls(0.1), threading.Event()
    for number in range(3):
        running.submit(number, held.wait)
    collected(running, 3)
    running.submit(3, lambda: "never begun")
    assert str(collected(running, 1)[3]) == "not called: 3 calls before have never returned"
    assert running.ended(0.0) == []
    held.set()


def test_what_is_dropped_counts_as_never_returned_until_it_does(monkeypatch):
    monkeypatch.setattr(calls, "MAX_LEFT_BEHIND", 2)
    running, held = Calls(WAIT_S), threading.Event()
    for number in range(3):
        running.submit(number, held.wait)
    running.drop()
    running.submit(3, lambda: "never begun")
    assert str(collected(running, 1)[3]) == "not called: 3 calls before have never returned"
    held.set()


def test_a_process_ends_while_a_call_runs():
    code = "import threading\nfrom hybridflow.rollout.calls import Calls\nrunning = Calls(0.1)\n"
    code += "running.submit(0, threading.Event().wait)\nfound = []\nwhile not found:\n    found = running.ended(0.1)\n"
    code += "print(found[0][1])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout) == (0, "no answer within 0.1 s\n"), done.stderr
