"""Whether a response is a program that passes the tests which its answer has. No torch."""

from __future__ import annotations

import ast
import json
import re
import textwrap
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridflow.config.rewards import SandboxConfig
from hybridflow.rewards.sample import Sample, Unscored
from hybridflow.rewards.sandbox import Ended, run_confined

_FENCED = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "python3", "py")
_NAME = "answer.py"
_ASSERTS = Path(__file__).with_name("asserts.py")


class CodeTests:
    """1 if the program passes all tests, else 0.

    An answer is either Python that is run behind the program, with asserts, or a JSON list of ``{"input", "output"}``:
    what the program is given on standard input, and what it must print then, but for spaces at the ends of lines. Only
    the latter are judged where the program cannot reach.

    Args:
        settings: What a program may do.
        is_protected: Whether it is kept apart.

    Attributes:
        idle_stops: Programs that ``wall_s`` stopped and that had used less than half of it on cores: they slept, or
            the machine had no core for them.
    """

    def __init__(self, settings: SandboxConfig, *, is_protected: bool) -> None:
        self._settings = settings
        self._is_protected = is_protected
        self.idle_stops = 0
        self._lock = threading.Lock()

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Return the score of one sample. Raises Unscored: there are no tests, or the sandbox fails."""
        (sample,) = samples
        program, cases = program_of(sample.response), _cases(sample.answer_text)
        if cases is None:
            return [float(self._passes_asserts(program, sample.answer_text))]
        return [float(all(self._prints(program, *case) for case in cases))]

    def _passes_asserts(self, program: str, tests: str) -> bool:
        # A process more, which holds the tests while the program runs.
        limits = replace(self._settings, processes=self._settings.processes + 1)
        return self._run(["-c", _ASSERTS.read_text(encoding="utf-8")], program, tests, limits).status == 0

    def _prints(self, program: str, given: str, expected: str) -> bool:
        expected_kib = len(expected.encode("utf-8", "surrogatepass")) >> 10
        # Twice as much leaves room for spaces at the ends of lines.
        limits = replace(self._settings, output_kib=max(self._settings.output_kib, 2 * (expected_kib + 1)))
        ended = self._run([_NAME], program, given, limits)
        return ended.status == 0 and _stripped(ended.stdout) == _stripped(expected)

    def _run(self, arguments: list[str], program: str, given: str, limits: SandboxConfig) -> Ended:
        files = {_NAME: program}
        whole = ["-I", "-B", *arguments]
        ended = run_confined(whole, limits, files=files, stdin=given, is_protected=self._is_protected)
        if ended.stopped == "wall_s" and ended.cpu_s < limits.wall_s / 2:
            with self._lock:
                self.idle_stops += 1
        return ended


def program_of(response: str) -> str:
    """Return the last block of Python between fences in a response; without fences, all of it.

    A block that names no language counts only if no block says that it is Python: it may be what the program prints.
    """
    found = [(language.lower(), code) for language, code in _FENCED.findall(response)]
    blocks = [code for language, code in found if language in _PYTHON] or [code for name, code in found if not name]
    if not blocks:
        return response
    # A block in a list is indented as the list is.
    return textwrap.dedent(blocks[-1]) if blocks[-1][:1].isspace() else blocks[-1]


def _cases(answer: str) -> list[tuple[str, str]] | None:
    """Return inputs and outputs, or None if the answer is Python.

    Raises:
        Unscored: It is JSON of another form, or empty.
    """
    if not answer.strip():
        raise Unscored("the answer is empty; expected tests: Python with asserts, or cases in JSON", is_final=True)
    try:
        found: Any = json.loads(answer)
    except (ValueError, RecursionError):
        _check_tests(answer)
        return None
    is_right = isinstance(found, list) and all(
        isinstance(case, dict) and all(isinstance(case.get(key), str) for key in ("input", "output")) for case in found
    )
    if not is_right or not found:
        raise Unscored(
            f'the answer is {answer[:100]!r}; expected Python with asserts, or [{{"input": text, "output": text}}, …]',
            is_final=True,
        )
    return [(case["input"], case["output"]) for case in found]


def _check_tests(answer: str) -> None:
    """Refuse Python that tests nothing, since every program would pass: definitions alone, or cases as Python has them.

    Raises:
        Unscored: It tests nothing, or is not Python.
    """
    expected = "expected Python with asserts, or cases in JSON"
    try:
        left: list[ast.AST] = [ast.parse(answer.encode())]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unscored(f"the answer is {answer[:100]!r}, not Python: {error}; {expected}", is_final=True) from error
    while left:
        node = left.pop()
        if isinstance(node, (ast.Assert, ast.Call, ast.Raise)):
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            # A decorator may call the function.
            if node.decorator_list:
                return
        elif not isinstance(node, ast.Lambda):
            left += ast.iter_child_nodes(node)
    raise Unscored(
        f"the answer is {answer[:100]!r}, which asserts and calls nothing, so every program would pass; {expected}",
        is_final=True,
    )


def _stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
