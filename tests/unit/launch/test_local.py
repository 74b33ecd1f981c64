"""The local launcher, with small programs in the place of ranks."""

import os
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest

import hybridflow
from hybridflow.cli import main
from hybridflow.errors import ConfigError
from hybridflow.launch import local
from hybridflow.launch.command import choose_log
from hybridflow.launch.local import run_local
from hybridflow.parallel.process import find_process, is_running
from tests.support.machines import write_machine
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]

# A rank that writes its pid, so that a test can see it gone.
PRELUDE = (
    "import os, signal, sys, time; rank = int(os.environ['RANK']); open(f'pid{rank}', 'w').write(str(os.getpid()))\n"
)


def run(code, *, num_ranks=3, end_s=30.0, argv=()):
    return run_local(argv, num_ranks=num_ranks, end_s=end_s, program=[sys.executable, "-c", PRELUDE + code])


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def none_left(tmp_path):
    yield
    for path in tmp_path.glob("pid*"):
        wait_until(partial(is_gone, int(path.read_text())), what=f"end of {path.name}")


def is_gone(pid):
    found = find_process(pid)
    return found is None or not is_running(found)  # orphans of a container without an init stay as zombies


def test_ranks_know_their_place(tmp_path):
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS"
    code = f"print(*[os.environ[n] for n in {names.split()}], *sys.argv[1:], file=open(f'seen{{rank}}', 'w'))"
    code += "\nassert int(os.environ['MASTER_PORT']) > 1023 and sys.stdin.read() == ''"
    assert run(code, argv=["train", "a b"]) == 0
    seen = [(tmp_path / f"seen{rank}").read_text().split(" ", 6) for rank in range(3)]
    assert seen == [[str(r), "3", str(r), "3", "127.0.0.1", "1", "train a b\n"] for r in range(3)]


def test_output_of_the_ranks_is_ours(capfd):
    assert run("print('out of', rank); print('err of', rank, file=sys.stderr)") == 0
    shown = capfd.readouterr()
    assert sorted(shown.out.splitlines()) == [f"out of {rank}" for rank in range(3)]
    assert sorted(shown.err.splitlines()) == [f"err of {rank}" for rank in range(3)]


@pytest.mark.parametrize(
    ("death", "status", "says"),
    [
        ("sys.exit(9)", 9, "error: rank 1 exited with status 9; if it said why, that is above; the other ranks are"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "error: rank 1 was killed by SIGSEGV; the other ranks"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "error: rank 1 was killed by SIGKILL; if nobody did so, memory"),
        *((f"sys.exit({status})", status, "") for status in (1, 2, 3, 4, 75)),
    ],
)
def test_one_rank_that_fails_ends_all_with_one_line(none_left, capfd, death, status, says):
    start = time.monotonic()
    assert run(f"if rank == 1: {death}\ntime.sleep(60)", end_s=0.3) == status
    assert time.monotonic() - start < 30
    errors = capfd.readouterr().err
    assert errors.startswith(says) and errors.count("\n") == (says != "")


def test_others_have_time_to_end_by_themselves(none_left, capfd, monkeypatch):
    monkeypatch.setattr("hybridflow.launch.local._BEFORE_MEETING_S", 30.0)
    code = "if rank == 1: sys.exit(3)\ntime.sleep(0.5); os.write(1, b'said by %d\\n' % rank); sys.exit(3)"
    assert run(code, end_s=30.0) == 3
    assert sorted(capfd.readouterr().out.splitlines()) == ["said by 0", "said by 2"]


def test_ranks_that_have_not_met_are_ended_soon(none_left, capfd):
    start = time.monotonic()
    code = "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    assert run(code, end_s=50.0) == 137
    assert time.monotonic() - start < 30 and "rank 1 was killed by SIGKILL" in capfd.readouterr().err


def test_ranks_that_have_met_have_longer_to_end(none_left, capfd):
    code = "os.close(int(os.environ['HYBRIDFLOW_MEETING']))\nopen(f'met{rank}', 'w')\n"
    code += "while not all(os.path.exists(f'met{each}') for each in range(3)): time.sleep(0.01)\n"
    code += "if rank == 1: sys.exit(3)\ntime.sleep(2.5); os.write(1, b'said by %d\\n' % rank)"
    assert run(code, end_s=50.0) == 3
    assert sorted(capfd.readouterr().out.splitlines()) == ["said by 0", "said by 2"]


def test_each_start_has_a_secret_of_its_own(tmp_path):
    code = "open(f'{sys.argv[1]}-{rank}', 'w').write(os.environ['HYBRIDFLOW_SECRET'])"
    for name in ("first", "second"):
        assert run(code, num_ranks=2, argv=[name]) == 0
    first, again, second = ((tmp_path / name).read_text() for name in ("first-0", "first-1", "second-0"))
    assert first == again != second and len(first) == 64


def test_rank_that_does_not_end_is_killed(none_left):
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen(f'deaf{rank}', 'w')\n"
    code += "while rank == 0 and not os.path.exists('deaf1'): time.sleep(0.01)\n"
    start = time.monotonic()
    assert run(code + "if rank == 0: sys.exit(4)\ntime.sleep(60)", num_ranks=2, end_s=0.5) == 4
    assert 0.5 < time.monotonic() - start < 30


def test_failure_of_the_last_rank_left_is_seen(capfd):
    assert run("time.sleep(0.3 * rank); sys.exit(5 if rank == 2 else 0)") == 5
    assert "rank 2 exited with status 5" in capfd.readouterr().err


def test_what_a_rank_started_ends_with_it(none_left):
    code = (
        "import subprocess\nchild = subprocess.Popen(['sleep', '60'])\nopen('pid-child', 'w').write(str(child.pid))\n"
    )
    assert run(code + "sys.exit(6)", num_ranks=1) == 6


PARENT = """
import sys
from hybridflow.launch.local import run_local
sys.exit(run_local([], num_ranks=2, save_s=float(sys.argv[1]), program=[sys.executable, "-c", sys.argv[2]]))
"""


def start_parent(tmp_path, code, save_s="60"):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, save_s, PRELUDE + code + "\nopen(f'up{rank}', 'w')\ntime.sleep(60)"]
    )
    wait_for_files(tmp_path, "up")
    return parent


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
@pytest.mark.parametrize("status", [0, 75])
def test_ranks_are_asked_to_save_and_say_how_it_went(none_left, tmp_path, signum, status):
    code = f"def seen(*_):\n    open(f'seen{{rank}}', 'w')\n    sys.exit({status})\n"
    parent = start_parent(tmp_path, code + f"signal.signal({int(signum)}, seen)")
    parent.send_signal(signum)
    assert parent.wait(50) == status
    assert all((tmp_path / f"seen{rank}").exists() for rank in range(2))


DEAF = "for number in (2, 15): signal.signal(number, lambda *_: open(f'asked{rank}', 'w'))"


def wait_for_files(tmp_path, name):
    wait_until(lambda: all((tmp_path / f"{name}{rank}").exists() for rank in range(2)), what=f"{name} of both ranks")


def test_ranks_that_do_not_save_in_time_are_killed(none_left, tmp_path):
    parent = start_parent(tmp_path, DEAF, save_s="0.3")
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(30) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("job", "takes_s", "status"), [({"SLURM_JOB_ID": "7"}, 1.5, 75), ({}, 60.0, 128 + signal.SIGUSR1)]
)
def test_in_a_job_of_slurm_ranks_save_as_long_as_they_need(none_left, tmp_path, monkeypatch, job, takes_s, status):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("hybridflow.launch.local._SAVE_S", 0.5)
    code = f"def save(*_):\n    time.sleep({takes_s})\n    sys.exit(75)\nsignal.signal(signal.SIGUSR1, save)\n"
    code += "open(f'up{rank}', 'w')\n"
    # The rank asks the process that started it.
    code += "if rank == 0:\n    while not os.path.exists('up1'): time.sleep(0.01)\n    os.kill(os.getppid(), 10)\n"
    assert run(code + "time.sleep(60)", num_ranks=2) == status


def test_ctrl_c_asks_the_ranks_to_save_and_says_so(none_left, tmp_path, capfd):
    code = "def seen(*_):\n    open(f'seen{rank}', 'w')\n    sys.exit(75)\n"
    # As it came: a run is to know who stopped it.
    parent = start_parent(tmp_path, code + "signal.signal(signal.SIGINT, seen)")
    parent.send_signal(signal.SIGINT)
    assert parent.wait(50) == 75
    assert all((tmp_path / f"seen{rank}").exists() for rank in range(2))
    assert "Ctrl-C: the job saves and stops; press Ctrl-C again to end it at once" in capfd.readouterr().err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_before_the_ranks_are_started_ends_at_once_and_says_so(monkeypatch, capfd, signum):
    def asked(*_):
        os.kill(os.getpid(), signum)
        raise AssertionError("the import goes on")

    monkeypatch.setattr("hybridflow.launch.local._import", asked)
    handler = signal.getsignal(signum)
    assert run_local([], num_ranks=2, ahead="json") == 75
    assert signal.getsignal(signum) == handler
    said = f"hybridflow: received {signum.name} before the ranks were started; nothing was begun\n"
    assert capfd.readouterr().err == said


EARLY = """
import os, signal, sys
from hybridflow.parallel.signals import CaughtSignals
os.kill(os.getpid(), int(sys.argv[1]))
sys.exit(75 if CaughtSignals(asks_at_interrupt=True, speaks=False).wait(5.0) == (int(sys.argv[1]),) else 3)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_to_a_rank_early_is_kept_until_it_catches_signals(monkeypatch, signum):
    program = (sys.executable, "-c", EARLY)
    monkeypatch.setattr(local, "_HYBRIDFLOW", program)
    assert run_local([str(int(signum))], num_ranks=1, program=program) == 75
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_second_ctrl_c_ends_deaf_ranks_at_once(none_left, tmp_path):
    parent = start_parent(tmp_path, DEAF, save_s="0.1")
    parent.send_signal(signal.SIGINT)
    # The system may make one signal of two that come before the process looks.
    wait_for_files(tmp_path, "asked")
    time.sleep(0.3)
    assert parent.poll() is None
    parent.send_signal(signal.SIGINT)
    assert parent.wait(50) == 128 + signal.SIGINT


def test_second_signal_ends_deaf_ranks_at_once(none_left, tmp_path):
    parent = start_parent(tmp_path, DEAF)
    parent.send_signal(signal.SIGTERM)
    wait_for_files(tmp_path, "asked")
    assert parent.poll() is None
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(50) == 128 + signal.SIGTERM


@pytest.mark.parametrize("first", [signal.SIGUSR1, signal.SIGTERM])
def test_ranks_that_are_asked_again_go_on_saving(none_left, tmp_path, first):
    code = "def seen(*_):\n    open(f'seen{rank}', 'w')\n    while not os.path.exists('saved'): time.sleep(0.01)\n"
    parent = start_parent(tmp_path, code + f"    sys.exit(75)\nsignal.signal({int(first)}, seen)")
    parent.send_signal(first)
    wait_for_files(tmp_path, "seen")
    # As train.sbatch does every few seconds, which cannot know whether the first has come.
    for _ in range(3):
        parent.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
        assert parent.poll() is None
    (tmp_path / "saved").touch()
    assert parent.wait(50) == 75


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends children with their parent")
def test_ranks_die_with_a_killed_parent(none_left, tmp_path):
    parent = start_parent(tmp_path, "")
    parent.kill()
    parent.wait(30)


def test_program_that_does_not_exist():
    with pytest.raises(FileNotFoundError):
        run_local([], num_ranks=2, program=["/nonexistent/program"])


# Stands in for an interpreter: notes its calls, makes "virtual environments" of itself, and says that it is new enough.
FAKE_PYTHON = """#!/usr/bin/env bash
echo "python $*" >> "$LOG"
if [ "$1 $2" = "-m venv" ]; then
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    printf '#!/bin/sh\\necho "hybridflow $*" >> "$LOG"; exit 7\\n' > "$3/bin/hybridflow"
    chmod +x "$3/bin/hybridflow"
elif [ "$1" = -c ]; then
    exit "${TOO_OLD:-0}"
fi
"""


@pytest.fixture
def clone(tmp_path):
    """A clone in a folder with a space in its name; called, runs a script of it: exit status, calls, errors."""
    root = tmp_path / "my clone"
    for name in (
        "launch/venv.sh",
        "launch/quickstart.sh",
        "tests/run.sh",
        "setup.py",
        "hybridflow/rollout/cpu/kernels.c",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    python = tmp_path / "fake-python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    log = tmp_path / "log"

    def run_script(name, *argv, **environ):
        log.write_text("")
        environ = {**os.environ, "PYTHON": str(python), "LOG": str(log), **environ}
        done = subprocess.run([root / name, *argv], env=environ, capture_output=True, text=True, check=False)
        calls = [line for line in log.read_text().splitlines() if not line.startswith("python -c")]
        run_script.said = done.stdout
        return done.returncode, [call.replace(f"{root}/", "") for call in calls], done.stderr

    run_script.root = root
    return run_script


PIP = "python -m pip install --disable-pip-version-check"


def test_quickstart_installs_once_and_passes_arguments_and_status_on(clone):
    status, calls, _ = clone("launch/quickstart.sh", "trainer.steps=1", "name=a b")
    train = "hybridflow train quickstart --resume trainer.steps=1 name=a b"
    editable = f"{PIP} --editable {clone.root}"
    assert calls == ["python -m venv .venv", f"{PIP} torch==2.13.0", editable, train]
    assert status == 7
    # What it says last is a line for the shell, also of a clone whose path has a space.
    activate = clone.said.splitlines()[-1]
    assert activate == f"    source {str(clone.root).replace(' ', chr(92) + ' ')}/.venv/bin/activate"
    assert clone("launch/quickstart.sh")[1] == ["hybridflow train quickstart --resume"]
    with open(clone.root / "setup.py", "a") as setup:
        setup.write("# changed\n")
    assert clone("launch/quickstart.sh")[1] == [
        f"{PIP} torch==2.13.0",
        editable,
        "hybridflow train quickstart --resume",
    ]


def test_tests_install_their_tools_and_leave_the_long_ones_out(clone):
    clone("launch/quickstart.sh")
    end = "--dist loadfile --no-loadscope-reorder -m"
    editable = f"{PIP} --editable {clone.root}[dev]"
    assert clone("tests/run.sh", "-k", "layout")[1] == [
        f"{PIP} torch==2.13.0",
        editable,
        f"python -m pytest -n 3 {end} not slow and not slurm and not vllm and not cuda_build and not long -k layout",
    ]
    assert clone("tests/run.sh", "--all", "-x")[1] == [f"python -m pytest -n 3 {end} not long -x"]
    assert clone("tests/run.sh", "--long", "-x")[1] == [f"python -m pytest -n 3 {end}  -x"]
    assert clone("launch/quickstart.sh")[1] == ["hybridflow train quickstart --resume"]


def test_unsuitable_python_is_refused(clone):
    status, calls, errors = clone("launch/quickstart.sh", TOO_OLD="1")
    assert (status, calls) == (2, [])
    assert "is not Python 3.10 to 3.13; install one and set PYTHON" in errors


FORKING = """
import sys
from hybridflow.launch import local
local._import = lambda *_: True
sys.exit(local.run_local(sys.argv[1:], num_ranks=2, ahead="json"))
"""


@pytest.mark.parametrize(("argv", "status"), [(["--version"], 0), (["train", "absent.yaml"], 2)])
def test_forked_ranks_run_hybridflow_and_their_status_is_that_of_all(argv, status):
    done = subprocess.run([sys.executable, "-c", FORKING, *argv], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert done.stdout.splitlines() == [f"hybridflow {hybridflow.__version__}"] * (2 if status == 0 else 0)
    assert ("recipe absent.yaml: no such file" in done.stderr) == (status == 2)


@pytest.mark.parametrize("settings", [[], ["layout=auto", "cluster.hardware={folder}/cpu.yaml"]])
def test_the_launcher_begins_no_thread_before_it_forks_the_ranks(tmp_path, settings):
    """numpy begins one for each core where OMP_NUM_THREADS is not set; ranks would then start anew, for seconds."""
    program = (
        "import os, sys, hybridflow.launch.command as launch\n"
        "from hybridflow import cli\n"
        "launch.run_local = lambda *_, **__: print(*os.listdir('/proc/self/task'), 'numpy' in sys.modules) or 0\n"
        "cli.main(sys.argv[1:])\n"
    )
    write_machine(tmp_path / "cpu.yaml")
    argv = ["train", "quickstart", f"run_dir={tmp_path}", *(each.format(folder=tmp_path) for each in settings)]
    done = subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, text=True, check=False)
    thread, has_numpy = done.stdout.splitlines()[-1].split()
    assert has_numpy == "False", done.stderr


@pytest.mark.slow
def test_ranks_are_forked_from_a_process_that_has_imported_torch(tmp_path):
    program = (
        "import sys, hybridflow.launch.local as local\n"
        "import os; assert not local.has_accelerator()\n"
        "assert local._import('hybridflow.trainer.trainer', 1)\n"
        "assert 'torch._inductor.lowering' not in sys.modules and 'wandb' not in sys.modules\n"
        "import torch; assert torch.compile.__module__ == 'torch'\n"
        "from megatron.core.jit import jit_fuser; assert jit_fuser(len) is len\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("option", "variable", "kind"), [(None, "", "text"), (None, "json", "json"), ("text", "json", "text")]
)
def test_the_form_of_the_console(monkeypatch, option, variable, kind):
    monkeypatch.setenv("HYBRIDFLOW_LOG", variable)
    arguments = Namespace(log=option)
    choose_log(arguments)
    assert arguments.log == os.environ["HYBRIDFLOW_LOG"] == kind


@pytest.mark.parametrize("launcher", ["local", "mpi"])
@pytest.mark.parametrize(("variable", "words"), [("", []), ("json", ["--log", "json"])])
def test_ranks_are_told_the_form_of_the_console(monkeypatch, capsys, launcher, variable, words):
    monkeypatch.setenv("HYBRIDFLOW_LOG", variable)
    assert main(["launch", launcher, "quickstart", "--print"]) == 0
    for line in capsys.readouterr().out.splitlines():
        assert line.split()[-len(words) - 1 :] == ["quickstart", *words]


def test_a_form_of_the_console_that_is_not_known_is_refused(monkeypatch):
    monkeypatch.setenv("HYBRIDFLOW_LOG", "yaml")
    with pytest.raises(ConfigError, match=r"HYBRIDFLOW_LOG is 'yaml'; set it to text or json, or use --log"):
        choose_log(Namespace(log=None))
