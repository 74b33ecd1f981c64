"""A rank that has done its work ends, whatever the user's code has left behind."""

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
import atexit, concurrent.futures, sys, time
from hybridflow.parallel import rank

rank._LEAVE_S = 0.3
if sys.argv[1] == "thread":
    concurrent.futures.ThreadPoolExecutor(thread_name_prefix="judge").submit(time.sleep, 60)
else:
    atexit.register(time.sleep, 60)
rank._end_later(int(sys.argv[2]), 0)
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("what", "status", "told"), [("thread", 75, "threads judge_0 kept"), ("atexit", 0, "a function of atexit, at ")]
)
def test_what_never_ends_by_itself_does_not_keep_the_process(what, status, told):
    argv = [sys.executable, "-c", textwrap.dedent(PROGRAM), what, str(status)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert done.returncode == status and done.stdout == ""
    assert told in done.stderr and f"exit status {status}" in done.stderr and len(done.stderr.splitlines()) == 1
