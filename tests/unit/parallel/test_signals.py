"""Stop signals that come when the job is over."""

import os
import signal
import subprocess
import sys

import pytest

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
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, b"late"), done.stderr


ALONE = """
import os, signal
from hybridflow.parallel.signals import leave, listen
mine = lambda number, frame: print("my own", flush=True)
signal.signal(signal.SIGUSR2, mine)
tell = lambda reason: print(reason, flush=True)
at_interrupt = signal.getsignal(signal.SIGINT)
listen(tell)
assert signal.getsignal(signal.SIGINT) is at_interrupt
for number in (signal.SIGUSR2, signal.SIGUSR1):
    os.kill(os.getpid(), number)
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
leave(tell)
listen(tell)
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.write(writing, b"here")
    signal.pause()
os.read(reading, 4)
os.kill(child, signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
leave(tell)
assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_program_alone_is_asked_once_and_keeps_its_own_handlers():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGTERM, done.stderr
    # The forked process ends without a word.
    assert done.stdout.splitlines() == ["my own", "received SIGUSR1", "received SIGTERM"]


FORKING = """
import os, signal, threading, time
from hybridflow.parallel.signals import CaughtSignals
signals = CaughtSignals(asks_at_interrupt=True)
reading, writing = os.pipe()
children = []
def begin():
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGINT)
        os.write(writing, b"here")
        time.sleep(30)
        os._exit(1)
    children.append(child)
for start in (begin, lambda: threading.Thread(target=begin).start()):
    start()
    assert os.read(reading, 4) == b"here"
    os.kill(children[-1], signal.SIGTERM)
    assert os.WTERMSIG(os.waitpid(children[-1], 0)[1]) == signal.SIGTERM
assert signals.wait(0.0) == ()
os.kill(os.getpid(), signal.SIGTERM)
assert signals.wait(5.0) == (signal.SIGTERM,)
"""


def test_a_forked_process_ends_by_sigterm_and_what_it_gets_does_not_stop_the_rank():
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=300, check=False)
    # At Ctrl-C the rank speaks; a worker of its goes on while it saves.
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


MANY_FILES = """
import os, resource, signal
from hybridflow.parallel.signals import CaughtSignals
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
while os.dup(0) < 1024:
    pass
signals = CaughtSignals()
os.kill(os.getpid(), signal.SIGTERM)
assert signals.wait(5.0) == (signal.SIGTERM,) and signals.wait(0.01) == ()
"""


def test_a_program_with_more_than_a_thousand_open_files_is_told_of_signals():
    done = subprocess.run([sys.executable, "-c", MANY_FILES], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


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
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "saved\n"), done.stderr
    assert done.stderr == "hybridflow: Ctrl-C: the job saves and stops; press Ctrl-C again to end it at once\n"


UNDER_A_LAUNCHER = """
import os, signal, sys, threading, time
from hybridflow.parallel.signals import CaughtSignals
signals = CaughtSignals(asks_at_interrupt=True, speaks=SPEAKS, copies_s=0.3)
kill = lambda: os.kill(os.getpid(), signal.SIGINT)
kill()
kill()
assert signals.wait(5.0) == (signal.SIGINT, signal.SIGINT)
signals.put_back([signal.SIGINT])
assert signals.wait(5.0) == (signal.SIGINT,)
print("saved", flush=True)
time.sleep(0.5)
SECOND
"""
BY_THE_HANDLER = "os.kill(os.getpid(), signal.SECOND_SIGNAL); time.sleep(60)"
# As in a collective: no handler runs meanwhile.
BY_THE_PIPE = """
signal.signal(signal.SECOND_SIGNAL, lambda number, frame: None)
os.kill(os.getpid(), signal.SECOND_SIGNAL)
signals.wait(5.0)
"""


@pytest.mark.parametrize(
    ("second", "number", "status"),
    [
        (BY_THE_HANDLER, "SIGINT", -signal.SIGINT),
        (BY_THE_HANDLER, "SIGTERM", -signal.SIGINT),
        (BY_THE_PIPE, "SIGINT", 130),
        (BY_THE_PIPE, "SIGTERM", 130),
    ],
)
def test_a_launchers_copy_of_ctrl_c_is_the_first_one_and_a_later_one_ends_the_process(second, number, status):
    program = UNDER_A_LAUNCHER.replace("SPEAKS", "True").replace("SECOND\n", second).replace("SECOND_SIGNAL", number)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (status, "saved\n"), done.stderr
    assert done.stderr.count("Ctrl-C: the job saves and stops") == 1


def test_one_rank_speaks_at_ctrl_c():
    program = UNDER_A_LAUNCHER.replace("SPEAKS", "False").replace("SECOND\n", "")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "saved\n", "")


@pytest.mark.parametrize(
    ("environ", "asks"),
    [
        ({"SLURM_STEP_NUM_TASKS": "1"}, "True"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "False"),
        ({"SLURM_STEP_NUM_TASKS": "1", "RANK": "0"}, "False"),
        ({"SLURM_STEP_NUM_TASKS": "1", "HYBRIDFLOW_MEETING": "3"}, "True"),
    ],
    ids=["a shell that srun started", "tasks of srun", "variables", "ranks of our launcher"],
)
def test_who_has_the_terminal_saves_at_ctrl_c(environ, asks):
    program = "from hybridflow import cli\nprint(cli._signals_of_rank().asks_at_interrupt)"
    given = {"PATH": os.environ["PATH"], "SLURM_STEP_ID": "0", **environ}
    done = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True, check=True)
    assert done.stdout == f"{asks}\n"
