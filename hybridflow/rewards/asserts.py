"""Runs a program, and behind it in the same process its tests. A script for the sandbox, of Python's own library alone.

The program is ``answer.py`` in the folder; the tests are on standard input, which the program does not see. Two
processes: this one reads the tests; its child runs the program, and asks for the tests when that has come to its end.
With the tests goes a word made by chance, and the child has passed when it says it. 0: it has.
"""

from __future__ import annotations

import os
import signal
import sys
from types import ModuleType
from typing import NoReturn

_PROGRAM = "answer.py"
_WORD_BYTES = 16


def main() -> int:
    """Fork the program, pass its process the tests at its end, and exit with their result."""
    asked, asks = os.pipe()
    given, gives = os.pipe()
    # A child that ends before it said the word has failed.
    signal.signal(signal.SIGCHLD, lambda *_: os._exit(1))
    if os.fork() == 0:
        os.close(asked)
        os.close(gives)
        _be_tested(asks, given)
    os.close(asks)
    os.close(given)
    tests, word = sys.stdin.buffer.read(), os.urandom(_WORD_BYTES)
    if os.read(asked, 1):
        with open(gives, "wb") as file:
            file.write(word + tests)
    # Nothing that the program began is waited for: with this process the sandbox ends.
    os._exit(0 if os.read(asked, _WORD_BYTES) == word else 1)


def _be_tested(asks: int, given: int) -> NoReturn:
    """Run the program, ask for the tests, run them, say the word, and wait to be ended."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # What is there holds the tests.
        nothing, end = os.pipe()
        os.close(end)
        os.dup2(nothing, 0)
        os.close(nothing)
        sys.argv = [_PROGRAM]
        module = sys.modules["__main__"] = ModuleType("__main__")
        module.__file__ = _PROGRAM
        with open(_PROGRAM, "rb") as file:
            program = file.read()
        exec(compile(program, _PROGRAM, "exec", dont_inherit=True), vars(module))
        os.write(asks, b".")
        with open(given, "rb") as file:
            word, tests = file.read(_WORD_BYTES), file.read()
        exec(compile(tests, "tests.py", "exec", dont_inherit=True), vars(module))
        os.write(asks, word)
        signal.pause()
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
