"""The last line of a terminal shows what goes on; elsewhere, and where the user wants none, there is none."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading
from hybridflow.observe import live_line
from hybridflow.observe.activity import current_activity
from hybridflow.observe.rank_log import say, say_event
live_line._EVERY_S = 0.05
line = live_line.LiveLine()
with current_activity("actor.sample"):
    # Until a thread has shown it, which comes late on a busy machine.
    shown = threading.Event()
    show = live_line.show_live
    live_line.show_live = lambda text: (show(text), shown.set())
    shown.wait(float(sys.argv[1]))
    say("step 1/2")
line.close()
say_event("end", "done: 2 steps")
"""


def seen_on_a_terminal(wait_s: float, **environ: str) -> str:
    reader, terminal = pty.openpty()
    try:
        child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(wait_s)],
            stdout=terminal,
            stderr=terminal,
            env={**os.environ, "TERM": "xterm", "NO_COLOR": "", "HYBRIDFLOW_LOG": "", **environ},
        )
        assert child.wait(120) == 0
        return os.read(reader, 1 << 16).decode()
    finally:
        os.close(reader)
        os.close(terminal)


def test_a_terminal_has_a_live_line_that_leaves_nothing_behind():
    seen = seen_on_a_terminal(60.0)
    assert re.search(r"\r\x1b\[2K\x1b\[2mactor.sample, \d+ s\x1b\[0m", seen)
    # Each line is written in the place of what was shown there.
    assert "\r\x1b[2Kstep 1/2\r\n" in seen
    assert seen.endswith("\x1b[1mdone: 2 steps\x1b[0m\r\n")
    assert "actor.sample" not in seen.rpartition("\x1b[2K")[2]


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_who_wants_no_colors_gets_plain_lines(environ: dict[str, str]):
    assert seen_on_a_terminal(0.5, **environ) == "step 1/2\r\ndone: 2 steps\r\n"
