"""A rank that has done its work ends, whatever the user's code has left behind."""

import gc
import subprocess
import sys
import textwrap
import threading
import time
from types import ModuleType

import pytest

from hybridflow.parallel import imports

PROGRAM = """
import atexit, concurrent.futures, sys, time
from hybridflow.parallel import rank

rank._LEAVE_S = 0.3
if sys.argv[1] == "thread":
    concurrent.futures.ThreadPoolExecutor(thread_name_prefix="judge").submit(time.sleep, 600)
else:
    atexit.register(time.sleep, 600)
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


EXITING = """
import sys
from hybridflow.config.cluster import ClusterConfig
from hybridflow.parallel.rank import run_rank
from hybridflow.parallel.signals import CaughtSignals
from hybridflow.parallel.start import Start

def work(world):
    sys.exit(*(["no key"] if len(sys.argv) > 1 else []))

sys.exit(run_rank(Start(launcher="alone"), CaughtSignals(), lambda: work, ClusterConfig()))
"""


@pytest.mark.parametrize(("words", "called"), [([], "sys.exit()"), (["text"], "sys.exit('no key')")])
def test_work_that_calls_sys_exit_has_failed(words, called):
    argv = [sys.executable, "-c", EXITING, *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f": code that the job calls called {called}; have it raise an exception instead\n")


def test_one_thread_alone_imports_megatron(monkeypatch):
    begun: list[object] = []

    def slow() -> None:
        begun.append(threading.current_thread())
        time.sleep(0.1)
        monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))

    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)
    monkeypatch.setattr(imports, "import_megatron", slow)
    monkeypatch.setattr(imports.atexit, "register", begun.append)
    threads = [threading.Thread(target=imports.import_for_program, args=("json",)) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert begun[1:] == [gc.freeze]
