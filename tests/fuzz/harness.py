"""Runs a reader on changed files in forked children, and records crashes, hangs and lack of memory."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hybridflow.errors import HybridflowError
from tests.fuzz.mutate import changed
from tests.support.complaints import status_bytes

CPU_S = 5.0
# A reader that waits takes no CPU time. A machine that is busy for so long is none for tests.
_WAIT_S = 120.0
_FREE_BYTES, _BYTES_PER_BYTE = 200 << 20, 10
# More than any reader may have: a reader that wants more fails here, not in the machine's memory.
_ROOM_BYTES = 4 << 30


class Target(NamedTuple):
    """A reader of files.

    Attributes:
        write: Writes valid files into a folder. Names what is to be changed, relative to the folder.
        read: Reads a file, given the folder and the name. It may raise ``HybridflowError`` and nothing else.
        words: What means something in the format.
        mend: Makes changed bytes agree with their checksum again, so that the reader looks beyond it.
    """

    write: Callable[[Path], Sequence[str]]
    read: Callable[[Path, str], object]
    words: tuple[bytes, ...] = ()
    mend: Callable[[bytes], bytes] = bytes


class Case(NamedTuple):
    """Content to put in the place of a file."""

    name: str
    content: bytes


@dataclass
class Report:
    """Figures of a run.

    Attributes:
        outcomes: How many cases were ``read``, were ``refused``, or failed.
        failures: What went wrong, by the number of the case.
        cpu_s: The longest time that a case took.
        peak_bytes: The most memory that a case took.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)
    cpu_s: float = 0.0
    peak_bytes: int = 0

    def add(self, number: int, outcome: str, detail: str) -> None:
        """Add a case."""
        self.outcomes[outcome] += 1
        if outcome == "failed":
            self.failures[number] = detail


def fuzz(target: Target, count: int, *, seed: int = 0, extra: Sequence[Case] = ()) -> tuple[Report, Sequence[Case]]:
    """Read changed files; return figures, and the cases that failed in the order of ``failures``.

    Args:
        target: The reader.
        count: Number of cases.
        seed: Of all choices. A case is a function of it, the number of the case, and the valid files.
        extra: Files that failed once. They are read before the others, as they are.
    """
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top) / "files"
        folder.mkdir()
        originals = _originals(target, folder)

        def case(number: int) -> Case:
            if number < len(extra):
                return extra[number]
            rng = random.Random(f"{seed}:{number}")
            name, content = rng.choice(originals)
            content = changed(rng, content, [each.content for each in originals], target.words)
            return Case(name, target.mend(content) if rng.randrange(8) else content)

        report, number = Report(), 0
        while number < len(extra) + count:
            numbers = range(number, len(extra) + count)
            number = _run_child(target, folder, originals, case, numbers, report)
        return report, [case(number) for number in report.failures]


def _originals(target: Target, folder: Path) -> list[Case]:
    """Write the valid files in a child, so that no library starts threads here; check that they can be read."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def make() -> None:
        names = target.write(folder)
        for name in names:
            target.read(folder, name)
        sender.send(list(names))

    child = multiprocessing.get_context("fork").Process(target=make)
    child.start()
    sender.close()
    try:
        names = receiver.recv()
    except EOFError:
        raise AssertionError("the valid files cannot be written and read, see above") from None
    finally:
        child.join()
    return [Case(name, (folder / name).read_bytes()) for name in names]


def _run_child(
    target: Target,
    folder: Path,
    originals: Sequence[Case],
    case: Callable[[int], Case],
    numbers: range,
    report: Report,
) -> int:
    """Have a child run cases until it dies of one; return the number of the next one."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(
        target=_child, args=(target, folder, originals, case, numbers, sender)
    )
    child.start()
    sender.close()
    begun, ended = numbers.start - 1, numbers.start - 1
    try:
        while ended + 1 < numbers.stop:
            if not receiver.poll(_WAIT_S):
                break
            what, number, *rest = receiver.recv()
            if what == "begin":
                begun = number
                continue
            outcome, detail, cpu_s, peak_bytes = rest
            report.add(number, outcome, detail)
            report.cpu_s, report.peak_bytes = max(report.cpu_s, cpu_s), max(report.peak_bytes, peak_bytes)
            ended = number
    except EOFError:
        child.join()
    is_over = child.exitcode is not None
    child.kill()
    child.join()
    receiver.close()
    if ended + 1 < numbers.stop:
        assert begun > ended, f"a child ended between two cases with {child.exitcode}"
        report.add(begun, "failed", _ending(child.exitcode) if is_over else f"waited for more than {_WAIT_S:g} s")
    return max(begun, ended) + 1


def _ending(status: int | None) -> str:
    if status == -signal.SIGPROF:
        return f"took more than {CPU_S:g} s"
    return f"ended by {signal.Signals(-status).name}" if status is not None and status < 0 else f"exited with {status}"


def _child(
    target: Target, folder: Path, originals: Sequence[Case], case: Callable[[int], Case], numbers: range, sender: Any
) -> None:
    # What libraries of C and Rust say of a damaged file.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    size = status_bytes("VmSize") + _ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    whole = {original.name: original.content for original in originals}
    place = Path(tempfile.mkdtemp(dir=folder.parent)) / "files"
    shutil.copytree(folder, place)
    # What the first reading of all loads and keeps is not the case's.
    for original in originals:
        target.read(place, original.name)
    for number in numbers:
        name, content = case(number)
        # Another file: the one before may still be open, and a library may know it by its inode.
        (place / name).unlink(missing_ok=True)
        (place / name).write_bytes(content)
        sender.send(("begin", number))
        sender.send(("end", number, *_measured(target, place, name, len(content))))
        (place / name).unlink()
        if name in whole:
            (place / name).write_bytes(whole[name])


def _measured(target: Target, place: Path, name: str, size: int) -> tuple[str, str, float, int]:
    """Read a file; return the outcome, what went wrong, the CPU time and the memory."""
    # The highest memory begins anew at what is in use now.
    Path("/proc/self/clear_refs").write_text("5")
    before, begin = status_bytes("VmRSS"), _cpu_s()
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    outcome, detail = "read", ""
    try:
        target.read(place, name)
    except HybridflowError:
        outcome = "refused"
    except BaseException:
        outcome, detail = "failed", traceback.format_exc()
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    peak = max(0, status_bytes("VmHWM") - before)
    most = _FREE_BYTES + _BYTES_PER_BYTE * size
    if outcome != "failed" and peak > most:
        outcome, detail = "failed", f"took {peak} bytes of memory for {size} bytes, more than {most}"
    return outcome, detail, _cpu_s() - begin, peak


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def say(name: str, report: Report) -> None:
    """Print the figures of a run."""
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(report.outcomes.items()))
    print(f"{name}: {counts}; at most {report.cpu_s:.2f} s and {report.peak_bytes / 2**20:.0f} MiB", file=sys.stdout)
