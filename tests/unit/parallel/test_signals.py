"""Stop signals that come when the job is over."""

import signal
import subprocess
import sys

PROGRAM = """
import os, signal, threading, time
from hybridflow.parallel.signals import CaughtSignals
signals = CaughtSignals()
os.kill(os.getpid(), signal.SIGUSR1)
assert signals.wait(5.0) == (signal.SIGUSR1,)
signals.ignore()

class Late:
    # What a module holds goes after Python has given signals back their meaning.
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGUSR1, write=os.write):
        kill(pid, number)
        write(1, b"late")

os.late = Late()
"""


def test_a_signal_while_python_ends_does_not_change_the_status():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, b"late"), done.stderr


INTERRUPTED = """
import os, signal, time
from hybridflow.parallel.signals import CaughtSignals
signals = CaughtSignals(asks_at_interrupt=True)
os.kill(os.getpid(), signal.SIGINT)
assert signals.wait(5.0) == (signal.SIGINT,)
print("saved", flush=True)
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
"""


def test_the_first_ctrl_c_asks_to_stop_and_says_so_and_the_second_ends_the_process():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "saved\n"), done.stderr
    assert done.stderr == "hybridflow: Ctrl-C: the job saves and stops; press Ctrl-C again to end it at once\n"
