"""Programs that nobody has read, run apart from everything else and within limits. No torch.

What does it is ``confine.py``, a process of its own for each program; this module says what it is to do. Where
bubblewrap is installed and works, it has bubblewrap make the program's surroundings; elsewhere it makes them itself.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridflow.config.rewards import SandboxConfig
from hybridflow.errors import ConfigError
from hybridflow.rewards.sample import Unscored

_CONFINE = Path(__file__).with_name("confine.py")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache")
"""Paths that any program needs to be begun."""
_GRACE_S = 20.0
"""So long after its time a program must have been ended, with all around it."""
_TRIES = 3
_BETWEEN_TRIES_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Outcome of a program.

    Attributes:
        status: Its exit status, negative: the number of the signal that ended it; None: it was stopped, or took the
            sandbox along.
        stopped: The key of the limit that it passed; None: none, but for those that end it by a signal or an error.
        cpu_s: Seconds of cores that it used, and the sandbox for it; 0 where nobody is left to tell.
        stdout: What it printed, as far as ``output_kib``.
        stderr: What it complained of, as far as that.
    """

    status: int | None
    stopped: str | None
    cpu_s: float
    stdout: str
    stderr: str


def run_confined(
    arguments: Sequence[str],
    settings: SandboxConfig,
    *,
    files: Mapping[str, str],
    stdin: str = "",
    is_protected: bool = True,
    bubblewrap: Bubblewrap | None = None,
) -> Ended:
    """Run the Python that runs us on some arguments, in a folder with some files.

    Args:
        arguments: Of Python.
        settings: Limits.
        files: Name -> text.
        stdin: What it may read.
        is_protected: Keep it apart; else it has limits alone.
        bubblewrap: What keeps it apart; None: what this machine has.

    Raises:
        Unscored: It could not be begun. What goes wrong later is an outcome, since the program may have done it.
    """
    if sum(len(text.encode("utf-8", "surrogatepass")) for text in files.values()) > settings.files_mib << 20:
        return Ended(status=None, stopped="files_mib", cpu_s=0.0, stdout="", stderr="")
    if bubblewrap is None and is_protected:
        bubblewrap = find_bubblewrap()
    program = os.path.realpath(sys.executable)
    asked = {
        "argv": [program, *arguments],
        "files": dict(files),
        "stdin": stdin,
        "environ": _environ(),
        "readable": _readable(settings),
        "is_protected": is_protected,
        "bubblewrap": None if bubblewrap is None else bubblewrap.usable,
        "wall_s": settings.wall_s,
        "cpu_s": settings.cpu_s,
        "memory_bytes": settings.memory_mib << 20,
        "socket_bytes": _socket_bytes(),
        "processes": settings.processes,
        "files_bytes": settings.files_mib << 20,
        "output_bytes": settings.output_kib << 10,
    }
    silence = "the sandbox ended without a word; is the node out of memory?"
    try:
        said = subprocess.run(
            [program, "-I", "-S", str(_CONFINE)],
            input=json.dumps(asked).encode(),
            env=_environ(),
            cwd="/",
            capture_output=True,
            # Ctrl-C on the job's terminal is for the job.
            start_new_session=True,
            timeout=settings.wall_s + _GRACE_S,
            check=False,
        ).stdout
    except subprocess.TimeoutExpired as late:
        said, silence = late.stdout or b"", f"the sandbox did not end within {_GRACE_S:g} s of its time"
    except OSError as error:
        raise Unscored(f"the sandbox cannot be started: {error}") from None
    return _outcome(said, silence)


def _outcome(said: bytes, silence: str) -> Ended:
    """Read what the sandbox said: a line when the program begins, and one at the end.

    Raises:
        Unscored: The program was not begun.
    """
    # What follows the last end of a line is no whole line.
    *lines, _ = said.split(b"\n")
    if not lines:
        raise Unscored(silence)
    told = json.loads(lines[-1])
    if "begun" in told:
        # Whoever ends the sandbox must not get away without a score.
        return Ended(status=None, stopped=None, cpu_s=0.0, stdout="", stderr=silence)
    if told["error"] is not None:
        raise Unscored(f"the sandbox cannot run a program: {told['error']}")
    del told["error"]
    return Ended(**told)


@dataclass(frozen=True, kw_only=True)
class Bubblewrap:
    """Bubblewrap on this machine.

    Attributes:
        path: Of its program; None: it is not installed.
        problem: Why it cannot keep a program apart here; None: it can, or is not installed.
    """

    path: str | None
    problem: str | None = None

    @property
    def usable(self) -> str | None:
        """Return the path of bubblewrap's program, or None if programs are kept apart without it."""
        return self.path if self.problem is None else None


@functools.cache
def find_bubblewrap() -> Bubblewrap:
    """Look for bubblewrap, and try it once."""
    path = shutil.which("bwrap")
    return Bubblewrap(path=path, problem=None if path is None else _problem(path))


@functools.cache
def sandbox_problem() -> str | None:
    """Return why this machine cannot keep a program apart; None: it can, with bubblewrap or without."""
    return _problem(None) if find_bubblewrap().usable is None else None


def _problem(bubblewrap: str | None) -> str | None:
    """Try it, several times: a machine that is short of memory or late for a moment can keep programs apart."""
    problem = _tried(bubblewrap)
    for _ in range(_TRIES - 1):
        if problem is None:
            break
        time.sleep(_BETWEEN_TRIES_S)
        problem = _tried(bubblewrap)
    return problem


def _tried(bubblewrap: str | None) -> str | None:
    code = ["-I", "-S", "-c", "print('here')"]
    try:
        ended = run_confined(code, SandboxConfig(), files={}, bubblewrap=Bubblewrap(path=bubblewrap))
    except Unscored as problem:
        return str(problem)
    if ended.stdout == "here\n":
        return None
    return f"in the sandbox Python cannot be begun: {(ended.stderr or str(ended)).strip()[-300:]}"


def check_sandbox(settings: SandboxConfig, key: str) -> bool:
    """Return whether programs are kept apart; otherwise warn on standard error.

    Raises:
        ConfigError: The machine cannot, and the recipe does not allow to go without; or what programs are to read is
            not there.
    """
    for path in settings.readable:
        if not os.path.exists(path):
            raise ConfigError(f"{key}.readable: {path} is not there; expected a directory or file of this machine")
    problem = sandbox_problem()
    if problem is not None and not settings.allow_unprotected:
        raise ConfigError(
            f"{key}: programs cannot be kept apart here: {problem}; have user namespaces allowed on this machine or in "
            f"this container (user.max_user_namespaces), or set {key}.allow_unprotected=true to run them all the same, "
            "with the rights of the job"
        )
    node, bubblewrap = os.uname().nodename, find_bubblewrap()
    if problem is not None:
        what = "programs run with the rights of the job, and read and write what it may"
        _warn(f"{key}.allow_unprotected=true: on {node} {what}: {problem}")
    elif bubblewrap.problem is not None:
        what = f"hybridflow keeps programs apart itself, since {bubblewrap.path} does not work"
        _warn(f"{key}: on {node} {what}: {bubblewrap.problem}")
    return problem is None


@functools.cache
def _warn(text: str) -> None:
    """Warn once in a process."""
    print(f"hybridflow: {text}", file=sys.stderr, flush=True)


def _environ() -> dict[str, str]:
    """Return an environment with the library paths alone: no name, no token, no path of the job."""
    environ = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    # An arena for each thread would use up the room for addresses.
    environ |= {"OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    libraries = os.environ.get("LD_LIBRARY_PATH")
    return environ if libraries is None else {**environ, "LD_LIBRARY_PATH": libraries}


@functools.cache
def _socket_bytes() -> int:
    """Return the most memory that what waits behind a socket takes."""
    ends = socket.socketpair()
    with ends[0], ends[1]:
        # The last part is taken as long as there is any room, and is half of all at most.
        return ends[0].getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) * 3 // 2


def _readable(settings: SandboxConfig) -> list[str]:
    """Return directories and files that programs see, none of which is within another."""
    # Where a link within another directory leads to, too.
    given = [named(path) for path in (*_python(), *settings.readable) for named in (os.path.abspath, os.path.realpath)]
    found = dict.fromkeys(path for path in (*_SYSTEM, *given) if os.path.exists(path))
    return [path for path in found if not any(path.startswith(f"{other}/") for other in found)]


def _python() -> list[str]:
    """Return what Python needs to be begun. The directory that it is installed in is not: that may be a home."""
    parts = ("lib", sys.platlibdir, "share/zoneinfo")
    folders = [os.path.join(prefix, part) for prefix in (sys.base_prefix, sys.base_exec_prefix) for part in parts]
    return [os.path.realpath(sys.executable), *folders]
