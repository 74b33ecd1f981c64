"""The sandbox of programs, tried for real: each bomb is stopped within its limit, and nothing of it is left running."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from hybridflow.config.rewards import RewardConfig, SandboxConfig
from hybridflow.errors import ConfigError
from hybridflow.rewards import confine, kinds, sandbox
from hybridflow.rewards.code import CodeTests, program_of
from hybridflow.rewards.kinds import make_kind
from hybridflow.rewards.sample import Sample, Unscored
from hybridflow.rewards.sandbox import Bubblewrap, check_sandbox, find_bubblewrap, run_confined, sandbox_problem
from hybridflow.rewards.scorer import Scorer
from tests.support.waiting import wait_until, with_more_time

NOBODY = 65534
# Of time there is enough for a busy machine: what is to be stopped by the clock has less of it.
SMALL = SandboxConfig(wall_s=60.0, cpu_s=20, memory_mib=256, processes=8, files_mib=8, output_kib=16)
SYSTEM_PYTHON = "/usr/bin/python3"
needs_namespaces = pytest.mark.skipif(sandbox_problem() is not None, reason=f"needs namespaces: {sandbox_problem()}")


class Ours:
    """Programs as the reward runs them, by whoever runs the tests."""

    def __call__(self, code, *, is_protected=True, stdin="", limits=SMALL, files=None):
        marker = secrets.token_hex(8)
        # The marker is in the name of each process that comes of it.
        ended = run_confined(
            ["-I", "-B", "main.py", marker],
            limits,
            files={"main.py": code, **(files or {})},
            stdin=stdin,
            is_protected=is_protected,
        )
        assert_none_is_left(marker)
        return ended


class Theirs:
    """The same by a user without any right, with the system's Python, since others may be where nobody may look."""

    def __call__(self, code, **asked):
        def run_by_nobody(command, *, input, **options):
            spec = json.loads(input)
            spec["argv"][0], spec["environ"] = SYSTEM_PYTHON, {"PATH": "/usr/bin:/bin"}
            spec["readable"] = [path for path in sandbox._SYSTEM if os.path.exists(path)]
            with tempfile.TemporaryDirectory() as folder:
                os.chmod(folder, 0o755)
                script = shutil.copy(sandbox._CONFINE, folder)
                os.chmod(script, 0o644)
                options |= {"env": {}, "user": NOBODY, "group": NOBODY, "extra_groups": []}
                return run([SYSTEM_PYTHON, "-I", "-S", script], input=json.dumps(spec).encode(), **options)

        run = subprocess.run
        with mock.patch.object(subprocess, "run", run_by_nobody):
            return Ours()(code, **asked)


def assert_none_is_left(marker):
    # Of one that has ended, and that nobody has waited for, there are no words.
    left = [pid for pid, words in command_lines() if marker.encode() in words]
    assert not left, left


def command_lines():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            yield pid, Path(f"/proc/{pid}/cmdline").read_bytes()


WHO = [pytest.param(Ours(), id="ours")]
if os.geteuid() == 0 and os.path.exists(SYSTEM_PYTHON):
    WHO.append(pytest.param(Theirs(), id="nobody", marks=pytest.mark.slow))


def run_by_all(test):
    """By each user, in each confinement."""
    return pytest.mark.usefixtures("confinement")(pytest.mark.parametrize("run", WHO)(test))


@functools.cache
def own_problem():
    return sandbox._problem(None)


@functools.cache
def is_plain_bubblewrap_allowed():
    """Where it is, and ours does not work, our arguments are at fault."""
    asked = ["--unshare-user", "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/", "true"]
    return subprocess.run([find_bubblewrap().path, *asked], capture_output=True, check=False).returncode == 0


@pytest.fixture(params=["bubblewrap", "own"])
def confinement(request, monkeypatch):
    """What keeps programs apart, whichever of them this machine would take; "none": limits alone."""
    if request.param == "bubblewrap":
        found = find_bubblewrap()
        if found.path is None:
            pytest.skip("bubblewrap (bwrap) is not installed")
        if found.problem is not None:
            assert not is_plain_bubblewrap_allowed(), found.problem
            pytest.skip(found.problem)
    else:
        if request.param == "own" and own_problem() is not None:
            pytest.skip(f"needs namespaces: {own_problem()}")
        found = Bubblewrap(path=None)
    monkeypatch.setattr(sandbox, "find_bubblewrap", lambda: found)
    return request.param


with_and_without = pytest.mark.parametrize("confinement", ["bubblewrap", "own", "none"], indirect=True)


def test_the_confinement_is_the_one_that_was_chosen(confinement):
    """Bubblewrap alone needs to show its process 1 a script."""
    ended = Ours()("import os; print(sorted(os.listdir('/')))")
    assert ("'confine.py'" in ended.stdout) == (confinement == "bubblewrap"), ended


pytestmark = needs_namespaces


@pytest.mark.usefixtures("confinement")
def test_each_namespace_is_another():
    """Other tests do not see what one of them alone withholds, since calls are filtered besides."""
    marker = secrets.token_hex(8).encode()
    program = ["-I", "-c", "import time; time.sleep(100)", marker.decode()]
    with ThreadPoolExecutor() as pool:
        ended = pool.submit(run_confined, program, SMALL, files={})
        while not (pids := [pid for pid, words in command_lines() if marker in words]):
            assert not ended.done(), ended.result()
            time.sleep(0.01)
        kinds = ("user", "pid", "net", "ipc", "uts", "mnt")
        theirs, ours = ([os.readlink(f"/proc/{pid}/ns/{kind}") for kind in kinds] for pid in (pids[0], "self"))
        os.kill(int(pids[0]), signal.SIGKILL)
        assert ended.result().status == -signal.SIGKILL and not set(theirs) & set(ours)


@run_by_all
def test_a_program_runs_with_its_input_and_files(run):
    code = "import sys; print(open('data.txt').read(), input(), file=sys.stderr); print('out'); sys.exit(3)"
    ended = run(code, stdin="given\n", files={"data.txt": "file"})
    assert (ended.status, ended.stopped, ended.stdout, ended.stderr) == (3, None, "out\n", "file given\n")


@run_by_all
def test_an_endless_loop_is_stopped_by_its_time_on_a_core(run):
    ended = run("while True: pass", limits=replace(SMALL, cpu_s=1))
    assert ended.status is not None and ended.status < 0, ended


@run_by_all
def test_one_that_sleeps_and_ignores_signals_is_stopped_by_the_clock(run):
    code = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
print("here", flush=True)
while True:
    time.sleep(100)
"""

    def check(wall_s):
        begin_s = time.monotonic()
        ended = run(code, limits=replace(SMALL, wall_s=wall_s))
        assert (ended.status, ended.stopped) == (None, "wall_s") and ended.stdout == "here\nhere\n"
        assert time.monotonic() - begin_s < 60

    with_more_time(check, 1.0, 10.0)


@run_by_all
def test_what_a_program_leaves_behind_is_ended_with_it(run):
    begin_s = time.monotonic()
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(100)\nprint('parent')"
    ended = run(code)
    assert ended.status == 0 and ended.stdout == "parent\n" and time.monotonic() - begin_s < 50


@run_by_all
def test_a_memory_bomb_gets_no_more(run):
    ended = run("data = []\nwhile True: data.append(bytearray(1 << 20))")
    assert ended.status == 1 and "MemoryError" in ended.stderr


@run_by_all
def test_memory_of_several_processes_counts_together(run):
    code = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        break
data = bytearray(os.urandom(1 << 20)) * 120
time.sleep(100)
"""
    ended = run(code)
    assert (ended.status, ended.stopped) == (None, "memory_mib"), ended


SOCKETS = """
import os, socket, time
for _ in range(14):
    if os.fork() == 0:
        break
held = []
try:
    while True:
        for end in socket.socketpair():
            held.append(end)
            try:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
            except PermissionError:
                pass
            end.setblocking(False)
            try:
                while True:
                    os.write(1, b"%d\\n" % end.send(bytes(1 << 18)))
            except BlockingIOError:
                pass
except OSError:
    time.sleep(100)
"""


@run_by_all
def test_memory_behind_sockets_counts(run):
    limits = replace(SMALL, memory_mib=512, processes=16, output_kib=1024)
    ended = run(SOCKETS, limits=limits)
    filled = sum(map(int, ended.stdout.splitlines()))
    # Of 15 processes, each with 256 open files, before anyone looks.
    assert ended.stopped == "memory_mib" and filled < 15 * 256 * sandbox._socket_bytes(), (filled, ended.stopped)


TABLES = """
import ctypes, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
for number in range(1, 45000):
    page = libc.mmap(ctypes.c_void_p(number << 30), ctypes.c_size_t(4096), 1, 0x22, -1, ctypes.c_long(0))
    ctypes.string_at(page, 1)
time.sleep(100)
"""
FIRST_THREAD_ENDS = """
import ctypes, os, threading, time
for _ in range(5):
    if os.fork() == 0:
        break
def hold():
    data = bytearray(os.urandom(1 << 20)) * 60
    time.sleep(100)
threading.Thread(target=hold).start()
ctypes.CDLL(None).syscall(60, 0)
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="counts in the pages, and has the call, of x86_64")
@pytest.mark.parametrize("code", [TABLES, FIRST_THREAD_ENDS], ids=["tables of pages", "first thread ends"])
@pytest.mark.usefixtures("confinement")
def test_memory_that_is_hard_to_see_counts(code):
    ended = Ours()(code, limits=replace(SMALL, processes=16))
    assert ended.stopped == "memory_mib", ended


@run_by_all
def test_a_fork_bomb_has_few_children(run):
    code = """
import os
failed = 0
children = 0
while failed < 1000:
    try:
        if os.fork() == 0:
            while True:
                try:
                    os.fork()
                except OSError:
                    pass
        children += 1
    except OSError:
        failed += 1
print(children, flush=True)
"""
    ended = run(code, limits=replace(SMALL, wall_s=3.0))
    if ended.stopped is None:
        assert int(ended.stdout) < SMALL.processes
    else:
        assert ended.stopped in ("wall_s", "processes")


@run_by_all
def test_threads_are_processes_too(run):
    code = """
import threading, time
count = 0
try:
    while True:
        threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
        count += 1
except RuntimeError:
    print(count, flush=True)
"""
    ended = run(code)
    assert int(ended.stdout) < SMALL.processes and ended.stopped is None


@run_by_all
def test_a_program_may_have_all_of_its_processes(run):
    code = """
import os, time
count = 1
try:
    while True:
        if os.fork() == 0:
            time.sleep(100)
        count += 1
except OSError:
    print(count, flush=True)
"""
    ended = run(code)
    if confine._counts_processes():
        assert ended.stdout == f"{SMALL.processes}\n", ended
    else:
        assert ended.stopped == "processes", ended


ODD_NAMES = """
import ctypes, os
def take(name):
    ctypes.CDLL(None).prctl(15, name, 0, 0, 0)
take(b"\\xff\\xfe) R 1")
if os.fork() == 0:
    take(b"\\nVmRSS: \\xff")
    time.sleep(100)
"""


@run_by_all
def test_a_program_does_not_break_what_tells_its_end(run):
    """A program that could would have its score of 0 taken for a failure of the sandbox."""
    code = f"""
import os, resource, signal, time
{ODD_NAMES}
for number in set(signal.Signals):
    try:
        os.kill(1, number)
    except OSError:
        pass
for name in ("CPU", "AS", "NOFILE", "FSIZE"):
    for limits in ((), ((0, 0),)):
        try:
            print(resource.prlimit(1, getattr(resource, f"RLIMIT_{{name}}"), *limits))
        except PermissionError:
            pass
time.sleep(0.2)
print(os.getpid() != 1)
raise SystemExit(3)
"""
    ended = run(code)
    assert (ended.status, ended.stdout) == (3, "True\n"), ended


@pytest.mark.usefixtures("confinement")
def test_a_storm_of_processes_that_stop_ends_with_its_time():
    code = f"""
import os, signal, time
os.closerange(0, 64)
{ODD_NAMES}
while True:
    try:
        if os.fork() == 0:
            os.kill(os.getpid(), signal.SIGSTOP) if os.fork() else os.abort()
    except OSError:
        pass
"""
    ended = Ours()(code, limits=replace(SMALL, wall_s=0.5))
    assert ended.status is None and ended.stopped in ("wall_s", "processes"), ended


DYING = """
import os, signal, sys
sys.path.append(FOLDER)
import confine
confine.WHERE = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
confine.main()
"""


def test_a_sandbox_that_dies_with_its_program_gives_no_excuse(tmp_path, monkeypatch):
    """Whatever ended it, the program was running. Before it runs, it is not to blame."""
    script = tmp_path / "dying.py"
    monkeypatch.setattr(sandbox, "_CONFINE", script)
    made = CodeTests(SMALL, is_protected=True)
    right = Sample(prompt="", response=ADD, answer=ASSERTS, place="")
    dying = DYING.replace("FOLDER", repr(str(Path(confine.__file__).parent)))
    script.write_text(dying.replace("WHERE", "_excess"))
    assert made([right]) == [0]
    script.write_text(dying.replace("WHERE", "_keep"))
    with pytest.raises(Unscored, match="ended without a word"):
        made([right])


@pytest.mark.parametrize(("said", "is_begun"), [(b'{"begun": true}\n', True), (b"", False), (None, False)])
def test_a_sandbox_that_does_not_end_in_time_gives_no_excuse(said, is_begun, monkeypatch):
    def late(command, **_):
        raise subprocess.TimeoutExpired(command, 1.0, output=said)

    monkeypatch.setattr(subprocess, "run", late)
    if is_begun:
        ended = run_confined([], SMALL, files={}, bubblewrap=Bubblewrap(path=None))
        assert ended.status is None and "did not end within 20 s" in ended.stderr
    else:
        with pytest.raises(Unscored, match="did not end within 20 s"):
            run_confined([], SMALL, files={}, bubblewrap=Bubblewrap(path=None))


PLACES = ["/", "/usr", "/tmp", "/root", "/home", "/dev", "/etc", "/box/.."]


@run_by_all
def test_it_writes_to_its_folder_alone(run):
    outside = tempfile.mkdtemp()
    os.chmod(outside, 0o777)
    places = [*PLACES, outside, os.path.realpath(sys.base_prefix), os.path.dirname(os.__file__)]
    mine = f"hybridflow-{secrets.token_hex(8)}"
    code = f"""
import os, sys
for place in {places!r}:
    try:
        open(place + "/{mine}", "w").close()
        print("wrote", place)
    except OSError:
        pass
for old in ("/usr/bin/env", "/etc/passwd", "/etc/ld.so.cache"):
    try:
        open(old, "a").close()
        print("appended", old)
    except OSError:
        pass
os.mkdir("deep"); open("deep/mine", "w").write("x"); open(os.environ["HOME"] + "/own", "w").close()
print(sorted(os.listdir(".")), os.getcwd())
"""
    try:
        ended = run(code)
        assert ended.stdout == "['deep', 'main.py', 'own'] /box\n" and ended.status == 0, ended
        written = [place for place in places if os.path.exists(f"{place}/{mine}")]
        assert written == []
    finally:
        for place in places:
            # Where the sandbox does not hold, nothing is left behind.
            Path(f"{place}/{mine}").unlink(missing_ok=True)
        os.rmdir(outside)


@run_by_all
def test_it_fills_no_disk(run):
    code = """
import os
count = 0
try:
    for number in range(1000):
        with open(f"file{number}", "wb") as file:
            file.write(bytes(1 << 20))
        count += 1
except OSError:
    pass
print(count)
"""
    ended = run(code)
    assert int(ended.stdout) <= SMALL.files_mib


@run_by_all
def test_empty_files_are_limited_too(run):
    """Each is memory of the kernel's, which no limit of a process counts."""
    code = """
for number in range(1000000):
    open(str(number), "w").close()
"""
    ended = run(code)
    assert ended.stopped == "files_mib" or "No space left" in ended.stderr, ended


@run_by_all
def test_it_sees_no_home_no_secrets_and_no_processes(run, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "s3cr3t")
    code = f"""
import os
print(sorted(os.environ), [os.path.exists(each) for each in ("/proc/1", "/proc/self/environ", "/etc/passwd", "/sys")])
print([os.path.exists(each) for each in {[__file__, os.path.expanduser("~/.bashrc"), os.getcwd()]!r}])
print(os.getpid() < 10, os.getuid(), os.getgroups() in ([], [os.getgid()]), os.listdir("/dev"))
for number in range(3, 64):
    try:
        os.fstat(number)
        print("open", number)
    except OSError:
        pass
"""
    ended = run(code)
    first, second, third, *rest = ended.stdout.splitlines()
    assert "API_TOKEN" not in first and first.endswith("[False, False, False, False]") and "True" not in second
    assert third.startswith(f"True {NOBODY} ") and "sd" not in third and rest == [], ended
    assert "s3cr3t" not in str(ended)


@run_by_all
def test_it_reaches_no_network_and_no_other_process(run):
    server = socket.create_server(("127.0.0.1", 0))
    abstract = f"\0hybridflow-{secrets.token_hex(4)}"
    local = socket.socket(socket.AF_UNIX)
    local.bind(abstract)
    local.listen()
    # Of the program's own user, who might end it.
    other = subprocess.Popen(["sleep", "100"], user=NOBODY if os.geteuid() == 0 else None)
    code = f"""
import os, signal, socket
for family, where in ((socket.AF_INET, ("127.0.0.1", {server.getsockname()[1]})), (socket.AF_INET, ("8.8.8.8", 53)),
                      (socket.AF_UNIX, {abstract!r})):
    try:
        socket.socket(family).connect(where)
        print("connected", where)
    except OSError:
        pass
try:
    socket.getaddrinfo("example.com", 80)
    print("resolved")
except OSError:
    pass
try:
    os.kill({other.pid}, signal.SIGKILL)
    print("killed")
except OSError:
    pass
"""
    with server, local, other:
        try:
            ended = run(code)
            assert (ended.status, ended.stdout) == (0, ""), ended
            assert other.poll() is None
        finally:
            other.kill()


@run_by_all
def test_it_has_no_rights_and_gets_none(run):
    # What a sandbox that does not hold would let through changes nothing either.
    name = socket.gethostname()
    code = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print([libc.mount(b"none", b"/usr", None, 32 | 4096, None), libc.mount(b"tmpfs", b"/box", b"tmpfs", 0, None),
       libc.umount2(b"/usr", 2), libc.chroot(b"/box"), libc.setuid(0),
       libc.sethostname({name.encode()!r}, {len(name)})])
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
libc.capget(header, data)
print(list(data))
"""
    ended = run(code)
    lines = ended.stdout.splitlines()
    assert lines[0] == "[-1, -1, -1, -1, -1, -1]" and lines[1] == "[0, 0, 0, 0, 0, 0]", ended


@run_by_all
def test_what_gives_memory_rights_or_keys_is_refused(run):
    """Each call does something by itself: outside it is made with success, or fails for another reason."""
    code = """
import ctypes, errno, mmap, os
libc = ctypes.CDLL(None, use_errno=True)
def tried(name, *arguments):
    if getattr(libc, name)(*arguments) >= 0:
        return "done"
    return errno.errorcode[ctypes.get_errno()]
print(tried("memfd_create", b"x", 0), tried("shmget", 0, 4096, 0o1600), tried("msgget", 0, 0o1600),
      tried("semget", 0, 1, 0o1600))
print(*(tried("unshare", flag) for flag in (0x10000000, 0x20000, 0x2000000)), tried("ptrace", 0, 0, 0, 0))
print(tried("syscall", 425, 8, None), tried("syscall", 435, None, 0), tried("mount", None, None, None, 0, None))
for flag in (0x10000000, 0x40000000, 0x20000):
    print(tried("syscall", CLONE, flag | 17, 0, 0, 0, 0))
print(tried("syscall", KEYCTL, 0, -3, 0), tried("syscall", ADD_KEY, b"user", b"x", b"x", 1, -3))
try:
    mmap.mmap(-1, 4096)
    print("shared memory")
except OSError as error:
    print(errno.errorcode[error.errno])
mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
if os.fork() == 0:
    os._exit(0)
print(os.wait()[1], flush=True)
"""
    x86 = os.uname().machine == "x86_64"
    numbers = {"CLONE": (56, 220), "KEYCTL": (250, 219), "ADD_KEY": (248, 217)}
    for name, (older, newer) in numbers.items():
        code = code.replace(name, str(older if x86 else newer))
    ended = run(code)
    assert ended.stdout.splitlines() == [
        "EPERM EPERM EPERM EPERM",
        "EPERM EPERM EPERM EPERM",
        "EPERM ENOSYS EPERM",
        *["EPERM"] * 3,
        "EPERM EPERM",
        "EPERM",
        "0",
    ], ended


@run_by_all
def test_of_sockets_there_are_pairs_alone(run):
    """Other families reach the host of a virtual machine, or much of the kernel."""
    code = """
import asyncio, socket
made = []
for family in range(64):
    for kind in (1, 2, 3, 5):
        for make in (socket.socket, socket.socketpair):
            try:
                make(family, kind)
                made.append((make.__name__, family, kind))
            except OSError:
                pass
one, other = socket.socketpair()
for tried in (lambda: one.setsockopt(1, 7, 1 << 20), lambda: one.sendmsg([b"x"])):
    try:
        tried()
        made.append("done")
    except PermissionError:
        pass
print(made, asyncio.run(asyncio.sleep(0, "awaited")))
"""
    assert run(code).stdout == "[('socketpair', 1, 1)] awaited\n"


@run_by_all
def test_locks_of_files_are_none(run):
    """Each is memory that no limit counts, and one of a file outside holds up others. Databases do without."""
    code = """
import fcntl, os, sqlite3
file = open("file", "w+b")
fcntl.lockf(file, fcntl.LOCK_EX)
fcntl.flock(file, fcntl.LOCK_EX)
if os.fork() == 0:
    again = open("file", "r+b")
    fcntl.lockf(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os._exit(0)
print(os.wait()[1])
for number, value in ((1031, 1 << 20), (1024, 0)):
    try:
        fcntl.fcntl(os.pipe()[1] if value else file, number, value)
        print("done", number)
    except PermissionError:
        pass
with sqlite3.connect("data.db") as connection:
    connection.execute("create table numbers (value)")
    connection.execute("insert into numbers values (3)")
print(sqlite3.connect("data.db").execute("select * from numbers").fetchall())
"""
    ended = run(code)
    assert ended.stdout == "0\n[(3,)]\n", ended


def test_every_call_is_refused_by_its_number():
    """The list is written by hand; system headers, where they are installed, have the numbers."""
    headers = (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm-generic/unistd.h"))
    calls = confine._NUMBERS | {name: numbers for name, (numbers, _) in confine._DEPENDS.items()}
    for column, header in enumerate(headers):
        if not header.exists():
            pytest.skip(f"needs {header}")
        known = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text()))
        found = {name: numbers[column] for name, numbers in calls.items()}
        # The newer list has no inotify_init.
        assert {name: number for name, number in found.items() if int(known.get(name, number)) != number} == {}
        assert len(known.keys() & found.keys()) > 0.9 * len(found)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="another machine has no other one within it")
@run_by_all
def test_calls_of_the_older_machine_end_it(run):
    """The numbers of 32 bits are others, so a program that makes such calls would pass by the filter."""
    code = """
import ctypes, mmap
memory = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
memory.write(bytes.fromhex("b814000000cd80c3"))
print("before", flush=True)
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))())
"""
    ended = run(code)
    assert ended.stdout == "before\n" and ended.status in (-signal.SIGSYS, -signal.SIGSEGV), ended


@with_and_without
def test_no_key_of_the_job_is_there(confinement):
    """The user's session keyring is left behind, whether or not the calls are filtered."""
    x86 = os.uname().machine == "x86_64"
    add, ask, control = (248, 249, 250) if x86 else (217, 218, 219)
    begin = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
if libc.syscall({control}, 1, None) < 0 or libc.syscall({add}, b"user", b"hybridflow-key", b"secret", 6, -3) < 0:
    raise SystemExit(3)
{chosen(confinement)}
code = "import ctypes; print(ctypes.CDLL(None).syscall({ask}, b'user', b'hybridflow-key', None, 0) > 0)"
print(libc.syscall({ask}, b"user", b"hybridflow-key", None, 0) > 0)
print(run_confined(["-I", "-c", code], SandboxConfig(), files={{}}, is_protected=is_protected).stdout, end="")
"""
    done = subprocess.run([sys.executable, "-c", begin], capture_output=True, text=True, check=False)
    if done.returncode == 3:
        pytest.skip("no keys here")
    assert done.stdout == "True\nFalse\n", done


@run_by_all
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_huge_output_is_stopped(run, stream):
    ended = run(f"import sys\nwhile True: sys.{stream}.write('x' * 65536)")
    assert (ended.status, ended.stopped) == (None, "output_kib"), ended
    assert len(getattr(ended, stream)) == SMALL.output_kib << 10


@run_by_all
def test_output_that_is_no_text(run):
    ended = run("import os; os.write(1, bytes(range(256)))")
    assert ended.status == 0 and "\ufffd" in ended.stdout


def test_without_protection_limits_hold_all_the_same():
    run = Ours()
    assert run("print(input())", stdin="x", is_protected=False).stdout == "x\n"
    ended = run(
        "import os, time\nif os.fork(): time.sleep(100)\nos.setsid()\ntime.sleep(100)",
        is_protected=False,
        limits=replace(SMALL, wall_s=1.0),
    )
    assert ended.stopped == "wall_s"
    assert "MemoryError" in run("data = []\nwhile True: data.append(bytearray(1 << 20))", is_protected=False).stderr
    assert run("import os; print('API_TOKEN' in os.environ)", is_protected=False).stdout == "False\n"


ORPHANS = """
import os, time
for _ in range(COUNT):
    if os.fork() == 0:
        if os.fork() == 0:
            data = b"x" * (SIZE << 20)
            time.sleep(100)
        os._exit(0)
    if os.wait()[1] != 0:
        raise SystemExit("no more of them")
time.sleep(100)
"""


@pytest.mark.parametrize(("count", "size", "limit"), [(20, 0, "processes"), (6, 100, "memory_mib")])
@with_and_without
def test_processes_that_lose_their_parents_count(count, size, limit, confinement):
    code = ORPHANS.replace("COUNT", str(count)).replace("SIZE", str(size))
    ended = Ours()(code, is_protected=confinement != "none")
    # A system that counts processes itself begins no more.
    assert ended.stopped == limit or (limit == "processes" and "BlockingIOError" in ended.stderr), ended


def chosen(confinement):
    """Lines of another Python that take what the fixture took."""
    return f"""
from hybridflow.config.rewards import SandboxConfig
from hybridflow.rewards import sandbox
from hybridflow.rewards.sandbox import run_confined
sandbox.find_bubblewrap = lambda: sandbox.{sandbox.find_bubblewrap()!r}
is_protected = {confinement != "none"}
"""


@with_and_without
def test_who_dies_takes_its_program_along(confinement):
    marker = secrets.token_hex(8)
    program = "import os, time; os.fork(); os.fork(); time.sleep(100)"
    code = f"""
{chosen(confinement)}
arguments = ["-I", "-c", {program!r}, {marker!r}]
run_confined(arguments, SandboxConfig(wall_s=100.0), files={{}}, is_protected=is_protected)
"""
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        # The child has all of them in one word.
        last = f"sleep(100)\0{marker}\0".encode()
        wait_until(lambda: sum(words.endswith(last) for _, words in command_lines()) == 4, what="four processes")
    finally:
        child.kill()
        child.wait()
    wait_until(lambda: not any(marker.encode() in words for _, words in command_lines()), what="that none is left")


@pytest.mark.usefixtures("confinement")
def test_what_a_link_leads_to_may_be_read(tmp_path):
    for folder in ("real", "deep", "elsewhere"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "data.txt").write_text(folder)
        # So that it is the sandbox which does not let it write.
        (tmp_path / folder).chmod(0o777)
    (tmp_path / "link").symlink_to("second")
    (tmp_path / "second").symlink_to(tmp_path / "real")
    (tmp_path / "deep" / "out").symlink_to("../elsewhere")
    asked = (str(tmp_path / "link"), str(tmp_path / "deep"), str(tmp_path / "deep" / "out"))
    code = f"print(*(open(path + '/data.txt').read() for path in {asked!r}))"
    code += f"\nimport os; print(os.access({asked[0]!r}, os.W_OK), os.path.exists({str(tmp_path / 'second')!r}))"
    ended = Ours()(code, limits=replace(SMALL, readable=asked))
    assert ended.stdout == "real deep elsewhere\nFalse False\n", ended


def test_a_home_in_which_python_is_installed_is_not_seen(tmp_path, confinement):
    """Python is put together there of links, as ``configure --prefix=$HOME`` does of files."""
    home, library = tmp_path / "home", os.path.dirname(os.__file__)
    hidden = [home / each for each in (".ssh/id_rsa", ".local/share/keys", "bin/own", "notes")]
    for path in hidden:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("secret")
    python = shutil.copy(os.path.realpath(sys.executable), home / "bin")
    (home / "lib").mkdir()
    (home / "lib" / os.path.basename(library)).symlink_to(library)
    code = f"""
{chosen(confinement)}
code = "import os, sys; print(sys.prefix, [os.path.exists(path) for path in sys.argv[1:]])"
settings = SandboxConfig(readable=({os.path.dirname(library)!r},))
print(run_confined(["-I", "-c", code, *{list(map(str, hidden))!r}], settings, files={{}}))
"""
    environ = {"HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([python, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert f"stdout='{home} [False, False, False, False]" in done.stdout, done


def write_program(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


SLOW = """
import sys, time
sys.path.append(FOLDER)
import confine
make_root = confine._make_root
def slow(spec):
    time.sleep(TAKES)
    make_root(spec)
confine._make_root = slow
confine._BEGIN_S = MOST
confine.main()
"""


@pytest.mark.parametrize(("begin_s", "outcome"), [(60.0, "done"), (0.3, "not begun")])
def test_the_time_of_a_program_is_its_own(begin_s, outcome, tmp_path, monkeypatch, confinement):
    """A root directory that takes longer to build than the program may takes nothing from it."""
    bwrap, folder, script = find_bubblewrap().path, str(sandbox._CONFINE.parent), tmp_path / "slow.py"
    monkeypatch.setattr(sandbox, "_CONFINE", script)

    def run(root_s):
        if confinement == "bubblewrap":
            slow = write_program(tmp_path / "bwrap", f'sleep {root_s}\nexec {bwrap} "$@"')
            monkeypatch.setattr(sandbox, "find_bubblewrap", lambda: Bubblewrap(path=slow))
        lines = SLOW.replace("FOLDER", repr(folder)).replace("TAKES", str(root_s)).replace("MOST", str(begin_s))
        script.write_text(lines)
        return Ours()("print('done')", limits=replace(SMALL, wall_s=0.8 * root_s))

    def check(root_s):
        assert run(root_s).stdout == "done\n"

    if outcome == "done":
        with_more_time(check, 1.0, 10.0)
    else:
        with pytest.raises(Unscored, match="not begun within 0.3 s"):
            run(1.0)


LATE = """
import sys, time
sys.path.append(FOLDER)
import confine
class Late(confine._Watched):
    def read(self, wait_s):
        was_begun = b"begun" in self.texts["report"]
        is_read = super().read(wait_s)
        if was_begun:
            while "report" in self.open:
                super().read(wait_s)
            time.sleep(0.4)
        return is_read
confine._Watched = Late
confine.main()
"""


def test_what_ends_in_time_is_not_stopped_where_its_keeper_comes_late(tmp_path, monkeypatch, confinement):
    """On a busy machine the keeper may look again only when the time is over."""
    script = tmp_path / "late.py"
    script.write_text(LATE.replace("FOLDER", repr(str(sandbox._CONFINE.parent))))
    monkeypatch.setattr(sandbox, "_CONFINE", script)
    ended = Ours()("print('done', flush=True)", limits=replace(SMALL, wall_s=0.3))
    assert (ended.status, ended.stopped, ended.stdout) == (0, None, "done\n"), ended


def test_what_was_written_is_read_where_the_keeper_comes_late(monkeypatch):
    reader, writer = os.pipe()
    monkeypatch.setattr(confine, "_READ_BYTES", 4)
    os.write(writer, b"five!")
    os.close(writer)
    watched = confine._Watched({"stdout": reader}, 1 << 20)
    # It is asked for the time when it begins, and again much later.
    monkeypatch.setattr(confine.time, "monotonic", iter(range(0, 1000, 100)).__next__)
    watched.read_rest()
    monkeypatch.undo()
    os.close(reader)
    assert watched.texts["stdout"] == b"five!" and not watched.open


@pytest.mark.parametrize("name", ["code", "maths"])
def test_ranks_of_a_node_share_its_cores(name, monkeypatch):
    if name == "maths":
        pytest.importorskip("math_verify")
    for cores, sharing, together in ((8, 1, 8), (8, 4, 2), (8, 3, 2), (2, 8, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        made = make_kind(RewardConfig(function=name), "reward", sharing=sharing)
        assert made.runner._most_together == together
        made.close()
    assert make_kind(RewardConfig(function=name, max_in_flight=5), "reward", sharing=4).runner._most_together == 5


def test_what_is_to_be_read_must_be_there(tmp_path):
    (tmp_path / "link").symlink_to("nothing")
    for path in (tmp_path / "none", tmp_path / "link"):
        settings = RewardConfig(function="code", sandbox=SandboxConfig(readable=(str(path),)))
        with pytest.raises(ConfigError, match=rf"reward\.sandbox\.readable: {path} is not there"):
            make_kind(settings, "reward")


ADD = "def add(a, b):\n    return a + b\n"
ASSERTS = "assert add(1, 2) == 3\nassert add('a', 'b') == 'ab'"
CASES = json.dumps([{"input": "1 2\n", "output": "3\n"}, {"input": "2 2\n", "output": "4"}])
LONG = json.dumps([{"input": "", "output": "y\n" * 40000}])
SUM = "print(sum(map(int, input().split())))"


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (ADD, ASSERTS, 1),
        (f"Well:\n```python\n{ADD}```\nThat is it.", ASSERTS, 1),
        (f"```python\nwrong(\n```\nNo:\n```py\n{ADD}```", ASSERTS, 1),
        (f"```python\n{ADD}```\nOutput:\n```text\n3\n```", ASSERTS, 1),
        (ADD.replace("+", "-"), ASSERTS, 0),
        ("def add(a, b:", ASSERTS, 0),
        ("", ASSERTS, 0),
        (f"{ADD}\nimport sys\nsys.exit(0)", ASSERTS, 0),
        (f"{ADD}\nimport os\nos._exit(0)", ASSERTS, 0),
        (f"{ADD}\nprint('all tests passed')\nraise SystemExit", ASSERTS, 0),
        ("def add(a, b):\n    while True:\n        pass", ASSERTS, 0),
        ("def add(a, b):\n    return 'x' * 10 ** 10", ASSERTS, 0),
        (SUM, CASES, 1),
        (f"{SUM}\nprint()", CASES, 1),
        ("input()\nprint(3)", CASES, 0),
        (f"{SUM}\nraise SystemExit(1)", CASES, 0),
        # An expected output above output_kib raises that limit.
        ("print('y \\n' * 40000)", LONG, 1),
        ("print('y \\n' * 40001)", LONG, 0),
        ("print('y' * (1 << 20))", CASES, 0),
        ("import time\ntime.sleep(100)", CASES, 0),
        ("\ud800", ASSERTS, 0),
    ],
)
def test_programs_and_their_tests(response, answer, score):
    # What is right is not stopped, however busy the machine is.
    limits = SMALL if score else replace(SMALL, wall_s=2.0, cpu_s=1)
    made = CodeTests(limits, is_protected=True)
    assert made([Sample(prompt="", response=response, answer=answer, place="")]) == [score]


def test_a_program_that_does_not_fit_into_its_folder_fails():
    made = CodeTests(replace(SMALL, files_mib=1), is_protected=True)
    assert made([Sample(prompt="", response="#" * ((1 << 20) + 1), answer=ASSERTS, place="")]) == [0]


LOOKS_FOR_TESTS = """
import gc, os, sys
found = [open(name).read() for name in os.listdir(".")]
try:
    found.append(os.pread(0, 10000, 0).decode())
except OSError:
    found.append(sys.stdin.read())
frame = sys._getframe()
while frame is not None:
    found += map(repr, frame.f_locals.values())
    frame = frame.f_back
found += [repr(each) for each in gc.get_objects() if type(each) in (dict, list, tuple) and len(each) < 100]
found += sys.argv + list(os.environ.values())
print(any(" ".join(("of", "their", "own", "accord")) in each for each in found), flush=True)
os._exit(0)
"""


def test_a_program_does_not_find_its_tests_where_it_looks(monkeypatch):
    seen = []

    def told(*arguments, **keywords):
        seen.append(run_confined(*arguments, **keywords))
        return seen[-1]

    monkeypatch.setattr("hybridflow.rewards.code.run_confined", told)
    made = CodeTests(SMALL, is_protected=True)
    answer = "text = 'of their own accord'\nassert add(1, 2) == 3"
    assert made([Sample(prompt="", response=LOOKS_FOR_TESTS, answer=answer, place="")]) == [0]
    assert seen[0].stdout == "False\n", seen
    # The program that looks sees them once they are where it can: nothing else hid them.
    assert made([Sample(prompt="", response=f"text = 'of their own accord'{LOOKS_FOR_TESTS}", answer=answer, place="")])
    assert seen[1].stdout == "True\n", seen


def test_tests_see_the_program_as_their_own_module():
    program = """
from __future__ import annotations
import dataclasses, pickle, sys, threading
@dataclasses.dataclass
class Point:
    x: int
if __name__ == "__main__":
    ready = sys.stdin.read() == "" and len(sys.argv) == 1
threading.Thread(target=threading.Event().wait).start()
"""
    tests = "assert ready and pickle.loads(pickle.dumps(Point(1))) == Point(1)\n" + f"# {'x' * 200000}"
    made = CodeTests(SMALL, is_protected=True)
    assert made([Sample(prompt="", response=program, answer=tests, place="")]) == [1]
    assert made([Sample(prompt="", response=program, answer=f"{tests}\nassert not ready", place="")]) == [0]
    alone = CodeTests(replace(SMALL, processes=1), is_protected=True)
    assert alone([Sample(prompt="", response=ADD, answer=ASSERTS, place="")]) == [1]


@pytest.mark.slow
def test_programs_that_are_stopped_idle_are_counted():
    sleeps = "import time\ntime.sleep(100)"

    def check(wall_s):
        settings = RewardConfig(function="code", sandbox=replace(SMALL, wall_s=wall_s), max_in_flight=1)
        made = Scorer(make_kind(settings, "reward"), settings, "reward")

        def idle_stops(*responses):
            asked = [Sample(prompt="", response=each, answer=CASES, place="") for each in responses]
            assert made.scores(asked) == [float(each == SUM) for each in responses]
            return made.counts.idle_stops

        assert idle_stops(sleeps, SUM, sleeps) == 2
        assert idle_stops(SUM) == 0

    with_more_time(check, 1.0, 10.0)


@pytest.mark.slow
def test_work_on_cores_is_measured():
    code = "import time\nwhile time.process_time() < 0.7: pass\ntime.sleep(100)"

    def check(wall_s):
        ended = Ours()(code, limits=replace(SMALL, wall_s=wall_s))
        assert ended.stopped == "wall_s" and 0.6 < ended.cpu_s < 3.0, ended

    with_more_time(check, 2.0, 30.0)


def test_what_stands_between_fences():
    assert program_of("no fence") == "no fence" and program_of("```\nx\n```") == "x\n"
    assert program_of("```python\nx\n```\n```bash\nls\n```") == "x\n"
    assert program_of("```python\nx\n```\nThis prints:\n```\n3\n```") == "x\n"
    assert program_of("```\nx\n```\n```\ny\n```") == "y\n"
    assert program_of("1. So:\n   ```python\n   if x:\n       y\n   ```") == "if x:\n    y\n"


@pytest.mark.parametrize(
    "answer",
    ["", " ", "[]", "3", '{"input": "1"}', '[{"input": "1"}]', '[{"input": 1, "output": "2"}]']
    + ["[{'input': '1', 'output': '2'}]", "['assert add(1, 2) == 3']", '[{"input": "1", "output": "2"},]']
    + ["def check(add):\n    assert add(1, 2) == 3", "from answer import add", "assert add(1, 2) = 3", "\0"],
)
def test_tests_that_are_none_are_a_failure_of_their_sample(answer):
    settings = RewardConfig(function="code", on_failure="drop", retries=3)
    made = Scorer(make_kind(settings, "reward"), settings, "reward")
    right = Sample(prompt="", response=ADD, answer=ASSERTS, place="d:1")
    found = made.scores([right, Sample(prompt="", response=ADD, answer=answer, place="d:2")])
    assert found[0] == 1 and found[1] != found[1] and made.counts.retries == 0
    assert "d:2" in made.counts.first_failure and "the answer is" in made.counts.first_failure


@pytest.mark.parametrize(
    "answer",
    ["class T:\n    assert add(1, 2) == 3", "@print\ndef t(): pass", "\ufeffassert add(1, 2) == 3"]
    + ["for a in (1, 2):\n    assert add(a, 2) == a + 2", "if add(1, 2) != 3: raise ValueError"],
)
def test_tests_of_any_form_are_run(answer):
    made = CodeTests(SMALL, is_protected=True)
    assert made([Sample(prompt="", response=ADD, answer=answer, place="d:1")]) == [1.0]


def test_one_failure_that_passes_leaves_no_program_unprotected(monkeypatch):
    failures = [Unscored("the sandbox ended without a word")] * 2

    def late(*arguments, **keywords):
        if failures:
            raise failures.pop()
        return run_confined(*arguments, **keywords)

    monkeypatch.setattr(sandbox, "run_confined", late)
    monkeypatch.setattr(sandbox, "_BETWEEN_TRIES_S", 0.0)
    # Not the one that is cached for all tests.
    monkeypatch.setattr(sandbox, "find_bubblewrap", lambda: Bubblewrap(path=None))
    assert sandbox_problem.__wrapped__() is None and failures == []
    failures += [Unscored("not allowed")] * 4
    assert sandbox_problem.__wrapped__() == "not allowed"


def test_where_the_means_are_lacking_it_is_refused(monkeypatch, capfd):
    sandbox._warn.cache_clear()
    monkeypatch.setattr(sandbox, "sandbox_problem", lambda: "no namespaces")
    with pytest.raises(ConfigError, match=r"reward\.sandbox: .*no namespaces.*reward\.sandbox\.allow_unprotected=true"):
        kinds.make_kind(RewardConfig(function="code"), "reward")
    assert check_sandbox(SandboxConfig(allow_unprotected=True), "reward.sandbox") is False
    settings = RewardConfig(function="code", sandbox=SandboxConfig(allow_unprotected=True))
    made = Scorer(kinds.make_kind(settings, "reward"), settings, "reward")
    assert made.scores([Sample(prompt="", response=ADD, answer=ASSERTS, place="")]) == [1]
    said = capfd.readouterr().err
    assert said.count("run with the rights of the job") == 1 and os.uname().nodename in said, said
    assert said.startswith("hybridflow: reward.sandbox.allow_unprotected=true: ") and "no namespaces" in said, said


def test_a_bubblewrap_that_does_not_work_is_left_aside(tmp_path, monkeypatch, capfd):
    """It is there, and the system refuses it what it asks for: one line says so, and our own confinement is used."""
    if own_problem() is not None:
        pytest.skip(f"needs namespaces: {own_problem()}")
    sandbox._warn.cache_clear()
    monkeypatch.setattr(sandbox, "_BETWEEN_TRIES_S", 0.0)
    refused = write_program(tmp_path / "bwrap", "echo 'bwrap: No permissions to create new namespace' >&2\nexit 1")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = find_bubblewrap.__wrapped__()
    assert found.path == refused and found.usable is None and "No permissions to create new" in found.problem
    monkeypatch.setattr(sandbox, "find_bubblewrap", lambda: found)
    monkeypatch.setattr(sandbox, "sandbox_problem", own_problem)
    for _ in range(2):
        assert check_sandbox(SMALL, "reward.sandbox") is True
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and said.startswith("hybridflow: reward.sandbox: on ") and refused in said, said
    assert Ours()("print('done')").stdout == "done\n"
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert find_bubblewrap.__wrapped__() == Bubblewrap(path=None)


def test_where_namespaces_are_forbidden_neither_is_taken():
    """In a namespace of users in which none may be made, as some clusters and containers have it."""
    code = """
from hybridflow.rewards import sandbox
sandbox._BETWEEN_TRIES_S = 0.0
print(sandbox.find_bubblewrap().usable, sandbox.sandbox_problem())
"""
    forbid = "echo 0 > /proc/sys/user/max_user_namespaces || exit 3"
    whole = ["unshare", "--map-root-user", "sh", "-c", f'{forbid}; exec "$@"', "sh", sys.executable, "-c", code]
    done = subprocess.run(whole, capture_output=True, text=True, check=False)
    if done.returncode == 3:
        pytest.skip(f"cannot be forbidden here: {done.stderr}")
    assert done.stdout.startswith("None the sandbox cannot run a program: namespaces are not allowed here ("), done
