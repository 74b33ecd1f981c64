"""Whether two expressions are the same, by math-verify, in processes that are killed when it takes too long. No torch.

What a response says may keep an algebra system busy for ever, in code that cannot be interrupted; so each comparison
is made by a worker, which is this module as a program: a line of JSON in, a line out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from hybridflow.data.limited import own_module
from hybridflow.errors import ConfigError
from hybridflow.rewards.notation import formula_of, is_formula, is_marked, to_latex, with_marks
from hybridflow.rewards.sample import Sample, Unscored

_START_S = 60.0
"""Longest time in which a worker, which imports an algebra system, must have begun."""
_LAST_S = 0.2
"""So long a worker that ends by itself may take to be gone."""
_MEMORY_BYTES = 4 << 30
_UNREADABLE = "unreadable"
_LETTERS = re.compile(r"[\d\s}][A-Za-z]+$")
"""Letters at the end of a formula, where the library may take them for a unit."""
_NUMBER_AND_LETTER = re.compile(r"-?[\d.,]+ ?[A-Za-z]")
_PARTED = re.compile(r"[\\^]|\d[A-Za-z]|,\s*\S")
"""What is in formulas of which the library takes one number if they have no marks."""


class Maths:
    """1 if the last expression of the response equals that of the answer, else 0, also where nobody finds out in time.

    Args:
        timeout_s: Longest time of a comparison.
        key: Where the recipe asks for it, for messages.

    Raises:
        ConfigError: The library is not installed.
    """

    def __init__(self, timeout_s: float, key: str) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                f"{key}=maths: the package math-verify is not installed; pip install 'hybridflow[math]' into the "
                "environment that the job uses"
            )
        self._timeout_s = timeout_s
        self._idle: deque[_Worker] = deque()

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Return the score of one sample. Raises Unscored: the answer has no expression, or no worker can be begun."""
        (sample,) = samples
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = _Worker()
        found = worker.ask([sample.answer_text, sample.response, self._timeout_s], self._timeout_s)
        if found is None:
            if worker.end() == -signal.SIGKILL:
                raise Unscored("the process that compares was killed; is the node out of memory?")
            return [0.0]
        self._idle.append(worker)
        if found == _UNREADABLE:
            raise Unscored(
                f"the answer {sample.answer_text[:100]!r} is not one expression; give LaTeX or a number",
                is_final=True,
            )
        return [float(found == "equal")]

    def close(self) -> None:
        """End the workers."""
        while self._idle:
            self._idle.pop().end(0.0)


class _Worker:
    """A process that compares."""

    def __init__(self) -> None:
        command, environ = own_module("hybridflow.rewards.maths")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environ,
            start_new_session=True,
        )
        if self._line(_START_S) is None:
            self.end()
            raise Unscored(
                "math-verify cannot be begun, or is older than 0.9: pip install -U math-verify, and try "
                f"{sys.executable} -c 'import math_verify'"
            )

    def ask(self, request: Sequence[object], timeout_s: float) -> str | None:
        """Return what the worker finds, or None after a timeout, which makes the worker unusable."""
        assert self._process.stdin is not None, "made with a pipe"
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return None
        return self._line(timeout_s + 1.0)

    def end(self, wait_s: float = _LAST_S) -> int | None:
        """End the worker.

        Return how it had ended by itself: a status, or a negative signal number; None if it had not.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        code = self._process.poll()
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                # What could not be written any more is of no use.
                with contextlib.suppress(OSError):
                    pipe.close()
        return code

    def _line(self, wait_s: float) -> str | None:
        assert self._process.stdout is not None, "made with a pipe"
        # It writes whole lines, and one at a time.
        # Not select, which takes no file number from 1024 on.
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        if not poll.poll(wait_s * 1000):
            return None
        line = self._process.stdout.readline()
        return line.decode().strip() if line.endswith(b"\n") else None


def main() -> None:
    """Compare what standard input asks, line by line, until it ends."""
    # The library's own words go nowhere.
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # The first comparison loads much, which is not to count as its time. Older releases read no expression without an
    # alarm of their own, and would call every answer unreadable.
    if compare(r"$\frac{1}{2}$", "$0.5$") != "equal":
        sys.exit(1)
    print("ready", file=told, flush=True)
    for line in sys.stdin:
        answer, response, limit_s = json.loads(line)
        # Ends this process, whatever it does then.
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        found = compare(answer, response)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(found, file=told, flush=True)


def compare(answer: str, response: str) -> str:
    """Return ``equal``, ``different``, or ``unreadable`` if the answer has no expression, or is not read as a whole."""
    from math_verify import verify

    right, has_units = _right(to_latex(answer))
    if not right:
        return _UNREADABLE
    try:
        said = _said(to_latex(response), has_units)
        is_equal = any(verify(right, each, timeout_seconds=None) for each in said)
        return "equal" if is_equal else "different"
    # What a response says may make an algebra system fail in any way.
    except Exception:
        return "different"


def _right(answer: str) -> tuple[list[object], bool]:
    """Return the expression of an answer, and whether letters at the end of expressions are units."""
    if is_marked(answer):
        return _read(answer) or _read(f"${answer}$"), True
    formula = formula_of(answer)
    if not formula:
        return [] if formula is None else _read(f"${answer}$"), True
    is_product = is_formula(answer) and _LETTERS.search(formula) and not _NUMBER_AND_LETTER.fullmatch(formula)
    return _read(_boxed(formula), has_units=not is_product), not is_product


def _said(response: str, has_units: bool) -> list[list[object]]:
    """Return the expressions that a response may mean."""
    formula = formula_of(response) if is_formula(response) else None
    said = [_read(_boxed(formula), has_units=has_units)] if formula else []
    if not formula or not _PARTED.search(formula):
        said.append(_read(with_marks(response), has_units=has_units))
    return said


def _read(text: str, *, has_units: bool = True) -> list[object]:
    """Return the last expression of a text and its LaTeX, or nothing."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    latex = LatexExtractionConfig()
    if not has_units:
        latex = replace(latex, normalization_config=replace(latex.normalization_config, units=False))
    found: list[object] = parse(text, [latex, ExprExtractionConfig()], parsing_timeout=None)
    return found


def _boxed(formula: str) -> str:
    """Return a formula with marks. Without them the library may take one number of it, such as the 3 of 3 pi."""
    return rf"\boxed{{{formula}}}"


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    main()
