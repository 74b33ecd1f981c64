"""The run directory: which file system it is on, how much room, how fast, and whether it does what runs need of it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.doctor.finding import NOTE, OK, PROBLEM, Finding, format_gib, problem
from hybridflow.doctor.host import mounts

AREA = "run directory"

NETWORK = frozenset(
    {
        *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "beegfs_nodev", "ceph", "wekafs", "panfs", "pvfs2", "orangefs"),
        *("afs", "cifs", "smb3", "9p", "virtiofs", "fuse.glusterfs", "fuse.ceph", "fuse.ceph-fuse", "fuse.dfuse"),
        *("fuse.sshfs", "fuse.juicefs", "fuse.quobyte", "fuse.beegfs"),
    }
)
"""Kinds that several nodes can share."""

VOLATILE = frozenset({"tmpfs", "ramfs", "devtmpfs"})
"""Kinds that are gone with the node."""

_LITTLE_ROOM_BYTES = 10 * 2**30
_PROBE_BYTES = 64 * 2**20
_SLOW_BYTES_PER_S = 50 * 2**20
_SLOW_SYNC_S = 0.5
_FEW_FILES = 10_000


def mount_of(path: str, mounts: Sequence[Any]) -> Any:
    """Return the mount of an absolute path without links, if any: the longest mount point; of equal ones the last."""
    best = None
    for mount in mounts:
        inside = path == mount.mountpoint or path.startswith(mount.mountpoint.rstrip("/") + "/")
        if inside and (best is None or len(mount.mountpoint) >= len(best.mountpoint)):
            best = mount
    return best


@dataclass(frozen=True, kw_only=True)
class Written:
    """Measurements of a probe of writing.

    Attributes:
        bytes_per_s: Of one large file, synced.
        sync_s: Seconds to make one small file last.
        has_locks: Files can be locked.
    """

    bytes_per_s: float
    sync_s: float
    has_locks: bool


def nearest(directory: Path) -> Path:
    """Return the directory, or its nearest parent that is there."""
    real = directory.resolve()
    return next(path for path in (real, *real.parents) if path.is_dir())


def _obstacle(directory: Path) -> str | None:
    """Return why there can be no directory; None: it is there, or may be made."""
    try:
        return None if stat.S_ISDIR(os.stat(directory).st_mode) else "is no directory"
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror


def check_directory(directory: Path) -> list[Finding]:
    """Check kind, room and speed of the file system of the run directory, or of its nearest parent."""
    obstacle = _obstacle(directory)
    if obstacle is not None:
        remedy = "name a directory, or a place where one can be made"
        return [problem(AREA, "writing", f"{directory}: {obstacle}", remedy)]
    real, there = directory.resolve(), nearest(directory)
    mount = mount_of(str(there), mounts())
    findings = [mount_finding(str(real), mount)]
    room = os.statvfs(there)
    findings.append(room_finding(room.f_bavail * room.f_frsize, room.f_favail if room.f_files else None))
    try:
        findings += written_findings(write_probe(there))
    except OSError as error:
        findings.append(
            problem(
                AREA,
                "writing",
                f"{there}: cannot be written: {error.strerror}",
                "choose a directory that is yours, and look at your quota",
            )
        )
    return findings


def mount_finding(path: str, mount: Any) -> Finding:
    """Judge the kind of file system that the directory is on."""
    value, verdict, remedy = f"{path}, unknown", NOTE, ""
    if mount is not None:
        value, verdict = f"{path}, {mount.fstype} at {mount.mountpoint}", OK
        if "ro" in mount.opts.split(","):
            value, verdict, remedy = f"{value}, read-only", PROBLEM, "choose a directory that can be written"
        elif mount.fstype in VOLATILE:
            value, verdict = f"{value}: in memory, gone with the node", NOTE
            remedy = "put the run directory (run_dir) on a disk, or its checkpoints are lost with the node"
        elif mount.fstype in NETWORK:
            value += ": of the network"
        else:
            value += ": of this machine, or a kind not known here"
            remedy = "a job of several nodes needs a directory that all of them see; --nodes tests it"
    return Finding(area=AREA, name="file system", value=value, verdict=verdict, remedy=remedy)


def room_finding(free_bytes: int, free_files: int | None) -> Finding:
    """Judge whether there is room."""
    value, verdict, remedy = f"{format_gib(free_bytes)} free", OK, ""
    if free_bytes < _LITTLE_ROOM_BYTES:
        verdict, remedy = (
            NOTE,
            "make room: a checkpoint takes 12 to 14 bytes a parameter, and trainer.keep_last of them stay",
        )
    if free_files is not None and free_files < _FEW_FILES:
        value, verdict = f"{value}, {free_files} more files", NOTE
        remedy = "few inodes are left: delete small files, or ask for more"
    return Finding(area=AREA, name="room", value=value, verdict=verdict, remedy=remedy)


def write_probe(directory: Path, num_bytes: int = _PROBE_BYTES) -> Written:
    """Write a large file and a small one, sync both, try a lock, and remove them.

    Raises:
        OSError: The file system refuses, and says why.
    """
    path = directory / f".hybridflow-doctor-{uuid.uuid4().hex}"
    piece = os.urandom(4 * 2**20)  # what compresses well would measure the compression
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        start = time.monotonic()
        left = num_bytes
        while left > 0:
            left -= os.write(descriptor, piece[:left])
        os.fsync(descriptor)
        large_s = time.monotonic() - start
        start = time.monotonic()
        os.pwrite(descriptor, b"hybridflow", 0)
        os.fsync(descriptor)
        sync_s = time.monotonic() - start
        has_locks = False
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            has_locks = True
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)
    return Written(bytes_per_s=num_bytes / max(large_s, 1e-9), sync_s=sync_s, has_locks=has_locks)


def written_findings(written: Written) -> list[Finding]:
    """Judge the measured writing."""
    return [
        Finding(
            area=AREA, name="writing, synced", value=f"{written.bytes_per_s / 1e6:.0f} MB/s from one process"
        ).unless(
            written.bytes_per_s >= _SLOW_BYTES_PER_S,
            NOTE,
            "saves take long on it: look for a scratch file system for run_dir",
        ),
        Finding(area=AREA, name="sync of a small write", value=f"{written.sync_s * 1e3:.1f} ms").unless(
            written.sync_s <= _SLOW_SYNC_S, NOTE, "each finished rollout and each checkpoint waits for it"
        ),
        Finding(area=AREA, name="locks", value="work" if written.has_locks else "are refused").unless(
            written.has_locks, PROBLEM, "HDF5 files need HDF5_USE_FILE_LOCKING=FALSE there: set it in the job"
        ),
    ]
