"""Logs of ranks, and the console that they share."""

import os
import re
import subprocess
import sys

import pytest

CODE = """
import os, subprocess, sys
from pathlib import Path
from hybridflow.observe.rank_log import note, open_rank_log, say, tell
rank = int(sys.argv[1])
note("began")
print("early")
open_rank_log(Path("run"), 3, rank)
print("by Python")
print("error by Python", file=sys.stderr)
os.write(1, b"by C\\n")
subprocess.run(["echo", "by a child"], check=True)
say("progress")
tell("cause")
note("two\\nlines")
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("rank", [0, 7])
def test_ranks_but_the_lowest_write_to_their_logs_and_speak_on_the_console(tmp_path, rank):
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(rank)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    log = (tmp_path / f"run/logs/0003/rank-{rank:05d}.log").read_text().splitlines()
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}Z "
    assert re.fullmatch(stamp + "began", log[0]) and re.fullmatch(stamp + "two", log[-2]) and log[-1] == "lines"
    output = ["by Python", "error by Python", "by C", "by a child"]
    assert log[1:-2] == ([] if rank == 0 else output)
    if rank == 0:
        assert "progress" in done.stdout.splitlines()
        assert done.stderr.splitlines() == ["error by Python", "cause"]
    else:
        assert done.stdout.splitlines() == ["early", "progress"] and done.stderr.splitlines() == ["cause"]


LETTERS = """
import sys
from pathlib import Path
from hybridflow.observe.rank_log import open_rank_log, say
open_rank_log(Path("run"), 1, 0)
print("2 × 3")
say("4 × 5")
sys.stdout = open(1, "w", encoding="ascii", closefd=False)
say("6 × 7")
sys.stdout.close()
say("8 × 9")
"""


def test_letters_that_the_console_lacks_end_no_job(tmp_path):
    environ = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run([sys.executable, "-c", LETTERS], cwd=tmp_path, env=environ, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode().splitlines() == ["2 \\xd7 3", "4 \\xd7 5", "6 × 7", "8 × 9"]
