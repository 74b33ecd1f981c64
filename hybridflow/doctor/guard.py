"""Checks that neither end the report by an error nor hold it up: each is guarded and has a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from hybridflow.doctor.finding import NOTE, Finding, problem

Check = Callable[[], Sequence[Finding]]


def run_checks(checks: Mapping[str, Check], deadline_s: float) -> list[Finding]:
    """Run all checks at once and return what each found, in their order.

    A check that raises, or hangs as one on a dead file server does, becomes a finding that says so.

    Args:
        checks: By the area that they report on.
        deadline_s: For all of them together, in seconds.
    """
    results: dict[str, Sequence[Finding]] = {}
    threads = [
        threading.Thread(target=_run, args=(area, check, results), daemon=True) for area, check in checks.items()
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + deadline_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    found = dict(results)  # what comes later than the deadline is not looked at
    silent = f"no answer within {deadline_s:g} s"
    remedy = "something hangs: a file server, a driver or a daemon; try by hand what this area looks at"
    return [each for area in checks for each in found.get(area, [problem(area, "check", silent, remedy)])]


def _run(area: str, check: Check, results: dict[str, Sequence[Finding]]) -> None:
    try:
        results[area] = check()
    except Exception as error:  # the report goes on without what this check would have found
        what = f"could not be looked at: {type(error).__name__}: {error}"
        results[area] = [Finding(area=area, name="check", value=what, verdict=NOTE)]
