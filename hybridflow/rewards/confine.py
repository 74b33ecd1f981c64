"""Runs one program apart from everything else, within limits. A script, of Python's own library alone.

Read as JSON on standard input: ``argv``, ``files`` (name → text, in its folder), ``stdin``, ``environ``, ``readable``
(directories and files that it sees, for reading, and in a link's place what it leads to), ``is_protected``,
``bubblewrap`` (the path of its program; None: without it), the limits ``wall_s``, ``cpu_s``, ``memory_bytes``,
``processes``, ``files_bytes``, ``output_bytes``, and ``socket_bytes``, the memory behind a socket.

Written as lines of JSON: ``begun``, as soon as the program is; at the end ``error``, why it could not be begun; or
``status`` (negative: a signal's number; None: it was stopped), ``stopped`` (by which limit), ``cpu_s`` (what all its
processes used of cores), ``stdout`` and ``stderr``. From ``begun`` on nothing is an ``error``: a program that could
break its sandbox, and be excused for that, would do so.

Three processes. This one, the keeper, goes into namespaces of its own (users, processes, network, IPC, host name),
looks after time, memory and output, and kills. The first is process 1 of them: it builds a root directory in which
only what is readable stands, without a home, ``/proc`` or devices that matter, and collects orphans; with it the system
kills all others. The program has no capabilities, no way to new ones, and a user that owns none of what it sees.
Of a keeper that dies the first process dies too.

With bubblewrap a fourth process, ``bwrap``, stands between the keeper and the first process. It makes the namespaces
and the root directory, and begins this script again as process 1. The same code does all else. A keeper that is root
first makes a user namespace that has root and nobody: one that bwrap makes has one user, so the program would be root
outside.

Where programs are not kept apart the keeper alone knows what is left of one, so that it is asked to end, and takes all
along.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import resource
import selectors
import signal
import struct
import sys
import time
from typing import Any, NoReturn

FOLDER = "/box"
"""Where the program is, the one place where it may write."""
_ROOT = "/tmp"
"""Where the program's root directory is built, over what is there."""
NOBODY = 65534
_SELF = "/confine.py"
"""Where bubblewrap shows this script to process 1."""
_MOST_FILES = 10000
"""Files are memory of the kernel's, even empty ones."""
_MOST_OPEN = 256
_LOOK_S = 0.05
_READ_BYTES = 1 << 16
_BEGIN_S = 10.0
"""So long after its keeper a program is begun, or the machine is at fault and not the program."""

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_DETACH = 2
# What a mount has, as statvfs tells it, and as mount(2) is to be told: it may not be taken away.
_KEPT = {1: 1, 2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
_SET_DEATH_SIGNAL, _DROP_BOUND, _NO_NEW_PRIVILEGES, _BE_SUBREAPER = 1, 24, 38, 36
_CAPABILITY_VERSION = 0x20080522
_SET_SECCOMP, _SECCOMP_FILTER, _JOIN_SESSION_KEYRING = 22, 2, 1
# Memory of a process in its status: pages, swapped ones, huge ones, and tables of pages. A page of zeros that is only
# read counts for nobody, but its tables may take twice as much.
_HELD = re.compile(rb"^(?:VmRSS|VmSwap|HugetlbPages|VmPTE):\s*(\d+) kB$", re.MULTILINE)
# Not "zero": a shared mapping of it is memory that is of no process.
_DEVICES = ("null", "full", "random", "urandom")

# Numbers of system calls: on x86_64, and on all that came after it took one list.
_NUMBERS = {
    # Memory that is of no process, so that no limit of one counts it.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    # More such memory: queues of events and calls, rules, policies, buffers of sockets, large pages of which a pipe
    # holds one byte.
    "inotify_init": (253, 26),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "landlock_create_ruleset": (444, 444),
    "io_setup": (206, 0),
    "mbind": (237, 235),
    "setsockopt": (54, 208),
    "splice": (275, 76),
    "tee": (276, 77),
    "vmsplice": (278, 75),
    # Sockets of any family but for pairs, see below; open files that are on their way, where nobody counts them.
    "socket": (41, 198),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    # Keys of the user who runs the job.
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # Namespaces and mounts, with which one has rights again.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    # Other processes, such as the one that holds the tests.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    # Much of the kernel, for what no program needs.
    "syslog": (103, 116),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}
_CLONE3 = (435, 435)
_TOO_NEW = 457
"""Calls from this number on came with Linux 6.8 or later, and no program needs them. Those of x32 are among them."""
_NEW_ANY = _NEWNS | _NEWUTS | _NEWIPC | _NEWUSER | _NEWPID | _NEWNET | 0x2000000
_SHARED_ANONYMOUS = 0x21
_THREAD, _THREAD_AND_FILES = 0x10000, 0x10400
_UNIX, _STREAM, _OF_TYPE = 1, 1, 0xF
_RECORD_LOCKS = (6, 7, 37, 38)
_SET_LEASE, _SET_PIPE_SIZE = 1024, 1031
_ALL_BITS = 0xFFFFFFFF
# Of each machine: its column above, and what the kernel calls it where it tells of a call.
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7), "riscv64": (1, 0xC00000F3)}
# Of the small programs that look at a call: its number, its machine, the lower half of its first argument.
_AT_NUMBER, _AT_MACHINE, _AT_FIRST = 0, 4, 16
_LOAD, _AND, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_KILL, _FAIL, _ALLOW = 0x80000000, 0x50000, 0x7FFF0000
_REFUSED, _NO_SUCH, _DONE = _FAIL | errno.EPERM, _FAIL | errno.ENOSYS, _FAIL
"""``_DONE`` tells the program that a call was made, which was not."""
# Calls that depend on an argument: its place, its bits that count, a value, whether it must equal that, what then.
_DEPENDS = {
    "clone": (
        (56, 220),
        [
            (0, _NEW_ANY, 0, False, _REFUSED),
            # A thread with open files of its own has them where they are not counted.
            (0, _THREAD_AND_FILES, _THREAD, True, _REFUSED),
        ],
    ),
    # Of what is shared and of no file, pages that a process lets go stay, and count for nobody.
    "mmap": ((9, 222), [(3, _SHARED_ANONYMOUS, _SHARED_ANONYMOUS, True, _REFUSED)]),
    # What asyncio needs; other types can send to those that have a name.
    "socketpair": (
        (53, 199),
        [(0, _ALL_BITS, _UNIX, False, _REFUSED), (1, _OF_TYPE, _STREAM, False, _REFUSED)],
    ),
    "prlimit64": ((302, 261), [(0, _ALL_BITS, 0, False, _REFUSED)]),
    # Locks of records are memory without a limit, and locks of files outside hold up others. A database works without.
    "flock": ((73, 32), [(0, 0, 0, True, _DONE)]),
    "fcntl": (
        (72, 25),
        [
            *((1, _ALL_BITS, each, True, _DONE) for each in _RECORD_LOCKS),
            *((1, _ALL_BITS, each, True, _REFUSED) for each in (_SET_LEASE, _SET_PIPE_SIZE)),
        ],
    ),
}

_libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """The system does not let us keep the program apart."""


def main() -> int:
    """Run what standard input says, and tell on standard output what came of it."""
    spec = json.loads(sys.stdin.buffer.read())
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if "report" in spec:
        # Begun by bubblewrap.
        os.set_inheritable(spec["report"], False)
        _be_first(spec, FOLDER, {"report": spec["report"], "stdout": 1, "stderr": 2}, [])
    _leave_keys()
    # A node that runs out of memory ends a program, and its keeper, before a rank of the job.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    try:
        if spec["bubblewrap"] is not None:
            if os.geteuid() == 0:
                _enter_namespaces(_NEWUSER)
                _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
            _prctl(_BE_SUBREAPER, 1)
            outcome = _keep(spec, FOLDER)
        elif spec["is_protected"]:
            _enter_namespaces(_NEWUSER | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS)
            # Forgotten where rights change.
            _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
            outcome = _keep(spec, None)
        else:
            # It takes as long to import as all else.
            import tempfile

            signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
            _prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
            _prctl(_BE_SUBREAPER, 1)
            with tempfile.TemporaryDirectory(prefix="hybridflow-", ignore_cleanup_errors=True) as folder:
                outcome = _keep(spec, folder)
    except (Refused, OSError) as error:
        outcome = {"error": str(error)}
    print(json.dumps(outcome), flush=True)
    return 0


def _leave_keys() -> None:
    """Take a session keyring that has no key of the user's. Where there is no such thing, nothing need be done."""
    if os.uname().machine in _MACHINES:
        _libc.syscall(ctypes.c_long(_number("keyctl")), ctypes.c_long(_JOIN_SESSION_KEYRING), None)


def _enter_namespaces(flags: int) -> None:
    """Leave the users of the system, and what else is asked for; in a new namespace of processes a child is process 1.

    Root is there beside nobody, who owns nothing; another user is there as nobody.
    """
    uid, gid, keeper = os.geteuid(), os.getegid(), os.getpid()
    reader, writer = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(writer)
        code = 0
        # From outside, since only who has rights there may name two users.
        if os.read(reader, 1):
            try:
                _map_users(keeper, uid, gid)
            except OSError as error:
                code = error.errno or 1
        os._exit(code)
    os.close(reader)
    try:
        _call("unshare", ctypes.c_int(flags), what="namespaces are not allowed here")
        os.write(writer, b".")
    finally:
        os.close(writer)
        _, status = os.waitpid(helper, 0)
    code = os.waitstatus_to_exitcode(status)
    if code:
        raise Refused(f"users of a namespace cannot be mapped: {os.strerror(code)}")


def _map_users(pid: int, uid: int, gid: int) -> None:
    def write(name: str, text: str) -> None:
        with open(f"/proc/{pid}/{name}", "w") as file:
            file.write(text)

    if uid != 0:
        # Without this an ordinary user may map no group.
        write("setgroups", "deny")
    write("gid_map", _mapping(gid))
    write("uid_map", _mapping(uid))


def _mapping(number: int) -> str:
    return f"{NOBODY} {number} 1" if number else f"0 0 1\n{NOBODY} {NOBODY} 1"


def _keep(spec: dict[str, Any], folder: str | None) -> dict[str, Any]:
    """Begin the program, look after it, and end whatever is left of it."""
    pipes = {name: os.pipe() for name in ("report", "stdout", "stderr")}
    first = os.fork()
    if first == 0:
        writers = {name: ends[1] for name, ends in pipes.items()}
        if spec["bubblewrap"] is not None:
            _be_bubblewrap(spec, writers)
        _be_first(spec, folder, writers, [ends[0] for ends in pipes.values()])
    for _, writer in pipes.values():
        os.close(writer)
    watched = _Watched({name: ends[0] for name, ends in pipes.items()}, spec["output_bytes"])
    stopped, cpu_s, problem = None, 0.0, "the sandbox ended before its program was begun"
    try:
        stopped = _look_after(first, watched, spec)
        cpu_s = _cpu_s()
    except OSError as error:
        # A program that cannot be looked after is ended, like one that passes a limit.
        problem = str(error)
    finally:
        _kill_all(first, is_alone=folder is None)
    watched.read_rest()
    report: dict[str, Any] = {}
    # What came first counts: who cannot become the program says so, and then ends like one.
    for line in reversed(watched.texts["report"].splitlines()):
        report |= json.loads(line)
    if "error" in report:
        return {"error": report["error"]}
    texts = {name: watched.texts[name].decode("utf-8", "replace") for name in ("stdout", "stderr")}
    if "begun" not in report:
        # Nobody but bubblewrap, and the Python that it starts, has written there yet.
        return {"error": texts["stderr"].strip()[-300:] or problem}
    status = report.get("status") if stopped is None else None
    return {"error": None, "status": status, "stopped": stopped, "cpu_s": cpu_s, **texts}


def _look_after(first: int, watched: _Watched, spec: dict[str, Any]) -> str | None:
    """Wait for the end of the program, or until it passes a limit: which one. Its time is from when it is begun.

    Raises:
        Refused: It is not begun in time.
    """
    is_begun, end_s = False, time.monotonic() + _BEGIN_S
    stopped = None
    while "report" in watched.open and stopped is None:
        watched.read(min(_LOOK_S, max(end_s - time.monotonic(), 0.0)))
        if not is_begun and b"begun" in watched.texts["report"]:
            is_begun, end_s = True, time.monotonic() + spec["wall_s"]
            print(json.dumps({"begun": True}), flush=True)
        if time.monotonic() > end_s and not is_begun:
            raise Refused(f"the program was not begun within {_BEGIN_S:g} s; is the machine overloaded?")
        # What has told its end was in time, however late this process is that reads it.
        is_late = time.monotonic() > end_s and "report" in watched.open
        stopped = watched.excess or ("wall_s" if is_late else None)
        if is_begun and stopped is None:
            stopped = _excess(first, spec)
    return stopped


class _Watched:
    """Pipes that are read as far as their limit.

    Attributes:
        open: Names of those that are not at their end.
        texts: What came.
        excess: The limit that was passed; None: none was.
    """

    def __init__(self, readers: dict[str, int], most_bytes: int) -> None:
        self.open = set(readers)
        self.texts = dict.fromkeys(readers, b"")
        self.excess: str | None = None
        self._most_bytes = most_bytes
        # Of epoll a user has so much, which programs may use up.
        self._selector = selectors.PollSelector()
        for name, reader in readers.items():
            os.set_blocking(reader, False)
            self._selector.register(reader, selectors.EVENT_READ, name)

    def read(self, wait_s: float) -> bool:
        """Take what is there, and wait so long for something at most. Return whether anything was there."""
        ready = self._selector.select(wait_s)
        for key, _ in ready:
            data = os.read(key.fd, _READ_BYTES)
            self.texts[key.data] += data[: self._most_bytes - len(self.texts[key.data])]
            if not data:
                self._selector.unregister(key.fd)
                self.open.discard(key.data)
            elif len(self.texts[key.data]) >= self._most_bytes:
                self.excess = "output_kib"
        return bool(ready)

    def read_rest(self) -> None:
        """Take what was written before all who could write ended, as much as there is."""
        end_s = time.monotonic() + 1.0
        while self.open and self.excess is None and (self.read(0.1) or time.monotonic() < end_s):
            pass


def _excess(first: int, spec: dict[str, Any]) -> str | None:
    """Return which limit the processes exceed together, including those that have lost their parents."""
    if spec["bubblewrap"] is None:
        pids = [pid for pid in _descendants(os.getpid()) if pid != first]
    else:
        # The one child of bwrap is process 1, from which all others come. It may be gone.
        inside = _descendants(first)
        pids = inside[1:]
        if inside and _files(inside[0]) > _MOST_FILES:
            return "files_mib"
    if len(pids) > spec["processes"]:
        return "processes"
    used = sum(_held_bytes(pid, spec["socket_bytes"]) for pid in pids)
    return "memory_mib" if used > spec["memory_bytes"] else None


def _held_bytes(pid: int, socket_bytes: int) -> int:
    """Return the memory of a process, with what the sockets that it has open may hold."""
    for thread in _listed(f"/proc/{pid}/task"):
        folder = f"/proc/{pid}/task/{thread}"
        # Before the memory, which is what a process that ends lets go first.
        sockets = _sockets(folder)
        # A process may have any name, also one that is no text.
        with contextlib.suppress(OSError), open(f"{folder}/status", "rb") as file:
            held = [int(kib) << 10 for kib in _HELD.findall(file.read())]
            # A thread that has ended, such as the first, holds nothing.
            if held:
                return sum(held) + sockets * socket_bytes
    return 0


def _sockets(folder: str) -> int:
    """Count the open sockets of a process. One that hides them has as many as it may."""
    try:
        names = os.listdir(f"{folder}/fd")
    except PermissionError:
        return _MOST_OPEN
    except OSError:
        return 0
    count = 0
    for name in names:
        with contextlib.suppress(OSError):
            count += os.readlink(f"{folder}/fd/{name}").startswith("socket:")
    return count


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _files(pid: int) -> int:
    """Count the files in a process's folder. Nothing limits them where bubblewrap has made it."""
    try:
        found = os.statvfs(f"/proc/{pid}/root{FOLDER}")
    except OSError:
        return 0
    return found.f_files - found.f_ffree


def _cpu_s() -> float:
    """Return the CPU seconds of all processes, including those that ended and were waited for."""
    ticks = 0
    for pid in _descendants(os.getpid()):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            # Behind the name, which may have any bytes in it: from the state on, so that field 14 is number 11.
            ticks += sum(map(int, file.read().rpartition(b")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _descendants(pid: int) -> list[int]:
    """Return the descendants of a process, without itself, as far as the system tells."""
    found: list[int] = []
    pending = [pid]
    while pending:
        parent = pending.pop()
        try:
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children") as file:
                    children = [int(child) for child in file.read().split()]
                found += children
                pending += children
        except OSError:
            continue
    return found


def _kill_all(first: int, *, is_alone: bool) -> None:
    """End all that was begun."""
    os.kill(first, signal.SIGKILL)
    # The system kills all others of its namespace before it is gone.
    os.waitpid(first, 0)
    end_s = time.monotonic() + 5.0
    while not is_alone and time.monotonic() < end_s:
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def _be_bubblewrap(spec: dict[str, Any], writers: dict[str, int]) -> NoReturn:
    """Become bwrap, which makes the program's surroundings and begins this script there as process 1."""
    report = writers["report"]
    try:
        _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.geteuid() == 0:
            _forbid_namespaces()
        source = _in_memory(json.dumps({**spec, "report": report}).encode())
        for number, target in ((source, 0), (writers["stdout"], 1), (writers["stderr"], 2)):
            os.dup2(number, target)
        os.set_inheritable(report, True)
        os.execv(spec["bubblewrap"], [spec["bubblewrap"], *_bubblewrap_arguments(spec)])
    except BaseException as error:
        os.write(report, json.dumps({"error": f"{spec['bubblewrap']}: {error}"}).encode() + b"\n")
    finally:
        os._exit(127)


def _bubblewrap_arguments(spec: dict[str, Any]) -> list[str]:
    """Return the arguments by which bwrap makes what ``_enter_namespaces`` and ``_make_root`` make."""
    asked = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--die-with-parent", "--as-pid-1"]
    if os.geteuid() == 0:
        # What process 1 needs to make the program nobody.
        asked += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
    else:
        asked += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    devices = [path for path in map("/dev/{}".format, _DEVICES) if os.path.exists(path)]
    # Directories above them that bwrap makes unasked are closed to nobody.
    above = {path[:end] for path in spec["readable"] for end, each in enumerate(path) if each == "/" and end > 0}
    asked += [word for path in sorted(above) for word in ("--dir", path)]
    asked += [word for path in spec["readable"] for word in ("--ro-bind", path, path)]
    asked += ["--dir", "/dev", *(word for path in devices for word in ("--dev-bind", path, path))]
    asked += ["--ro-bind", os.path.abspath(__file__), _SELF]
    asked += ["--perms", "0777", "--size", str(spec["files_bytes"]), "--tmpfs", FOLDER, "--remount-ro", "/"]
    return [*asked, "--", sys.executable, "-I", "-S", _SELF]


def _in_memory(data: bytes) -> int:
    """Return a descriptor from which one reads this."""
    source = os.memfd_create("stdin")
    with open(source, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(source, 0, os.SEEK_SET)
    return source


def _be_first(spec: dict[str, Any], folder: str | None, writers: dict[str, int], readers: list[int]) -> NoReturn:
    """Be the first process: make the program's surroundings, begin it, wait for it, tell how it ended."""
    report = writers["report"]
    program = None
    try:
        # The program may send process 1 any signal; those without a handler do not reach it.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        for reader in readers:
            os.close(reader)
        if folder is None:
            _forbid_namespaces()
            _make_root(spec)
            folder = FOLDER
        for name, text in spec["files"].items():
            path = os.path.join(folder, name)
            with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
                file.write(text)
        os.chdir(folder)
        program = os.fork()
        if program == 0:
            _be_program(spec, writers)
        os.close(writers["stdout"])
        os.close(writers["stderr"])
        while True:
            pid, status = os.wait()
            if pid == program:
                break
        os.write(report, json.dumps({"status": os.waitstatus_to_exitcode(status)}).encode() + b"\n")
    except BaseException as error:
        # Once the program runs, it is to blame.
        if program is None:
            os.write(report, json.dumps({"error": str(error)}).encode() + b"\n")
    finally:
        os._exit(0)


def _forbid_namespaces() -> None:
    """Let nobody here make namespaces of users. Where that may not be set, the filter of calls holds alone."""
    with contextlib.suppress(OSError), open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")


def _make_root(spec: dict[str, Any]) -> None:
    """Make a root directory with the readable paths and one writable folder."""
    _call("unshare", ctypes.c_int(_NEWNS), what="mounts of its own are not allowed here")
    _mount("none", "/", "", _REC | _PRIVATE)
    # Before the new root covers some of them.
    sources = [(path, os.open(path, os.O_PATH)) for path in spec["readable"]]
    devices = [(path, os.open(path, os.O_PATH)) for path in map("/dev/{}".format, _DEVICES) if os.path.exists(path)]
    root = _ROOT
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    for path, source in sources:
        _bind(source, root + path)
        _make_read_only(root + path)
    for path, source in devices:
        _bind(source, root + path)
    box = root + FOLDER
    os.mkdir(box)
    _mount("tmpfs", box, "tmpfs", _NOSUID | _NODEV, f"size={spec['files_bytes']},nr_inodes={_MOST_FILES},mode=777")
    os.chdir(root)
    # C libraries do not have it.
    _call("syscall", ctypes.c_long(_number("pivot_root")), b".", b".", what="the root directory cannot be changed")
    _call("umount2", b".", ctypes.c_int(_DETACH), what="the system's files cannot be let go")
    os.chdir("/")
    _mount("none", "/", "", _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)


def _bind(source: int, target: str) -> None:
    """Mount what a descriptor stands for at a path."""
    is_directory = os.path.isdir(f"/proc/self/fd/{source}")
    os.makedirs(target if is_directory else os.path.dirname(target), exist_ok=True)
    if not is_directory:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(f"/proc/self/fd/{source}", target, "", _BIND | _REC)


def _make_read_only(target: str) -> None:
    """Make a mount, and those within it, read-only."""
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        points = [re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), line.split()[4]) for line in file]
    for point in points:
        if f"{point}/".startswith(f"{target}/"):
            flags = sum(flag for present, flag in _KEPT.items() if os.statvfs(point).f_flag & present)
            _mount("none", point, "", flags | _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)


def _be_program(spec: dict[str, Any], writers: dict[str, int]) -> NoReturn:
    """Become the program, without any right."""
    try:
        _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        os.setsid()
        source = _in_memory(spec["stdin"].encode("utf-8", "surrogatepass"))
        for number, target in ((source, 0), (writers["stdout"], 1), (writers["stderr"], 2)):
            os.dup2(number, target)
        os.closerange(3, writers["report"])
        os.closerange(writers["report"] + 1, 1024)
        os.umask(0o077)
        for name in ("SIGPIPE", "SIGXFSZ"):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        # Of an ordinary user, the first process counts too, and the keeper where it is in the same namespace.
        beside = 2 if spec["bubblewrap"] is None else 1
        others = 0 if os.geteuid() == 0 else beside
        if spec["is_protected"]:
            _drop_rights()
        _limit(spec, spec["processes"] + others)
        folder = os.getcwd()
        os.write(writers["report"], b'{"begun": true}\n')
        os.execve(spec["argv"][0], spec["argv"], {**spec["environ"], "HOME": folder, "TMPDIR": folder})
    except BaseException as error:
        os.write(writers["report"], json.dumps({"error": f"{spec['argv'][0]}: {error}"}).encode() + b"\n")
    finally:
        os._exit(127)


def _drop_rights() -> None:
    for capability in range(64):
        if _libc.prctl(_DROP_BOUND, capability, 0, 0, 0) != 0:
            break
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)(), what="rights cannot be given up")
    _prctl(_NO_NEW_PRIVILEGES, 1)
    _filter_calls()


def _filter_calls() -> None:
    """Have the system refuse calls that no program needs, to this process and its descendants."""
    column, machine = _machine()
    steps = [
        *((_LOAD, 0, 0, _AT_MACHINE), (_IF_EQUAL, 1, 0, machine), (_RETURN, 0, 0, _KILL)),
        *((_LOAD, 0, 0, _AT_NUMBER), (_IF_AT_LEAST, 0, 1, _TOO_NEW), (_RETURN, 0, 0, _NO_SUCH)),
        # Its arguments lie where no filter sees them; C libraries then take the older call.
        *((_IF_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _NO_SUCH)),
    ]
    for numbers in _NUMBERS.values():
        steps += [(_IF_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _REFUSED)]
    for numbers, checks in _DEPENDS.values():
        body: list[tuple[int, int, int, int]] = []
        for place, bits, value, is_equal, then in checks:
            body += [(_LOAD, 0, 0, _AT_FIRST + 8 * place), (_AND, 0, 0, bits)]
            body += [(_IF_EQUAL, int(not is_equal), int(is_equal), value), (_RETURN, 0, 0, then)]
        steps += [(_IF_EQUAL, 0, len(body) + 1, numbers[column]), *body, (_RETURN, 0, 0, _ALLOW)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    held = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HP", len(steps), ctypes.addressof(held))
    _call("prctl", _SET_SECCOMP, ctypes.c_ulong(_SECCOMP_FILTER), program, what="system calls cannot be filtered here")


def _number(name: str) -> int:
    return _NUMBERS[name][_machine()[0]]


def _machine() -> tuple[int, int]:
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise Refused(f"the system calls of {machine} are not known; expected one of {', '.join(_MACHINES)}")
    return _MACHINES[machine]


def _limit(spec: dict[str, Any], most_processes: int) -> None:
    limits = {
        resource.RLIMIT_AS: spec["memory_bytes"],
        resource.RLIMIT_CPU: spec["cpu_s"],
        resource.RLIMIT_FSIZE: spec["files_bytes"],
        resource.RLIMIT_NOFILE: _MOST_OPEN,
        resource.RLIMIT_CORE: 0,
        # Of these is a timer, and each is memory.
        resource.RLIMIT_SIGPENDING: 256,
        resource.RLIMIT_MSGQUEUE: 0,
        # A process that goes before all others would hold up its keeper.
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_NICE: 0,
    }
    if spec["is_protected"] and _counts_processes():
        limits[resource.RLIMIT_NPROC] = most_processes
    for name, most in limits.items():
        hard = resource.getrlimit(name)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(name, (most, most))


def _counts_processes() -> bool:
    """Return whether the system counts a user's processes within the namespace alone: since Linux 5.14."""
    version = os.uname().release.split(".")
    return (int(version[0]), int(version[1].split("-")[0])) >= (5, 14)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    texts = [text.encode() or None for text in (source, target, kind, options)]
    what = f"{target} cannot be mounted"
    _call("mount", texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3], what=what)


def _prctl(option: int, value: int) -> None:
    _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def _call(name: str, *arguments: Any, what: str) -> None:
    """Call the system. Raises Refused: the system refuses."""
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise Refused(f"{what} ({name}: {os.strerror(number)})")


if __name__ == "__main__":
    sys.exit(main())
