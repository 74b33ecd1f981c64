"""A checkpoint of any format into any other, tensor by tensor, gone on with after a kill.

Files are dealt to ranks. A rank reads each logical tensor of which parts are missing in its files, casts it once, and
writes the parts aside, in ``OUT.part/files``; what is synced is noted in a journal. Rank 0 waits for all, lets the
target write what goes beside, and renames.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridflow import __version__
from hybridflow.checkpoint.convert.journal import (
    FILES,
    ConversionJournal,
    Part,
    Plan,
    discard,
    part_folder,
    read_journals,
    read_plan,
    write_plan,
)
from hybridflow.checkpoint.convert.progress import Monitor, Progress
from hybridflow.checkpoint.convert.ranks import PeerError, Ranks, refusing
from hybridflow.checkpoint.convert.write import Output, as_write_errors
from hybridflow.checkpoint.formats.source import Source, Target
from hybridflow.errors import CheckpointError, WriteError
from hybridflow.exit_status import exit_status
from hybridflow.observe.files import make_own_folder, sync_path
from hybridflow.reshard.views import TORCH_DTYPES

_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which rank of a conversion this is.

    Attributes:
        rank: This one.
        size: How many there are.
        deadline_s: How long a rank that makes no progress is waited for.
    """

    rank: int = 0
    size: int = 1
    deadline_s: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a conversion did, all ranks together.

    Attributes:
        num_tensors: Logical tensors.
        num_cast: Number of tensors whose dtype changed.
        total_bytes: Bytes of the tensors in the files.
        found_parts: Tensors of files that a restart found complete.
        found_bytes: Theirs.
        seconds: Seconds of this attempt.
        peak_rss_anon_bytes: Most anonymous memory of any rank.
        hashes: File -> key -> sha256.
    """

    num_tensors: int
    num_cast: int
    total_bytes: int
    found_parts: int
    found_bytes: int
    seconds: float
    peak_rss_anon_bytes: int
    hashes: Mapping[str, Mapping[str, str]]

    @property
    def mb_per_s(self) -> float:
        """Return this attempt's written bytes over its time."""
        return (self.total_bytes - self.found_bytes) / 1e6 / max(self.seconds, 1e-9)


def convert(
    source: Source,
    target: Target,
    out: Path,
    *,
    what: Mapping[str, object],
    place: Place | None = None,
    restart: bool = False,
    show: Callable[[Progress], None] = lambda progress: None,
) -> Summary | None:
    """Write a source as a target, which is there in full or not at all.

    Args:
        source: The checkpoint to read.
        target: The checkpoint to write.
        out: Where it is to be; nothing is there yet.
        what: The request, JSON: with the same source, requests that are equal in it give the same files.
        place: Which rank this is; None: the only one.
        restart: Discard what another attempt left, instead of going on with it.
        show: Called with the progress about once a second, from another thread.

    Returns:
        On rank 0 what was done; None on the others, which return when their own files are written.

    Raises:
        CheckpointError: The source is damaged, or was changed meanwhile.
        WriteError: The target cannot be written, is there already, or another request left its parts there.
        ConfigError: A number is beyond the range of the dtype asked for.
        DeadlineError: A rank is gone.
        PeerError: Another rank failed, and has told why.
    """
    place = Place() if place is None else place
    sizes = {name: sum(entry.num_bytes for entry in entries.values()) for name, entries in target.files.items()}
    dealt = deal(sizes, place.size)
    if place.rank and not dealt[place.rank]:
        return None
    with refusing(out, place.rank):
        identity = source.identity()
        job = _Job(
            source=source,
            target=target,
            out=out,
            folder=part_folder(out),
            identity=identity,
            plan=_plan(source, identity, target, what),
            files=dealt[place.rank],
            total_bytes=sum(sizes.values()),
            place=place,
            show=show,
        )
        if os.path.lexists(out):
            return _already_there(job)
        with as_write_errors(job.folder, is_begun=os.path.exists(job.folder)):
            _check_left(job, restart)
    workers = [rank for rank, files in enumerate(dealt) if files or rank == 0]
    with contextlib.ExitStack() as stack:
        with as_write_errors(job.folder):
            if place.rank == 0:
                stack.enter_context(_claimed(job, restart))
            ranks = Ranks(job.folder, place.rank, workers, place.deadline_s)
        try:
            return _run(job, ranks)
        except PeerError:
            raise
        except BaseException as error:
            with contextlib.suppress(OSError):
                ranks.tell("failure", {"rank": ranks.rank, "message": str(error), "status": exit_status(error)})
            raise


def deal(sizes: Mapping[str, int], num_ranks: int) -> list[list[str]]:
    """Deal files of these sizes to each rank, balanced by bytes; a rank that has none is not needed."""
    dealt: list[list[str]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = loads.index(min(loads))
        dealt[rank].append(name)
        # An empty file costs something too: it goes to a rank that has nothing.
        loads[rank] += sizes[name] + 1
    order = list(sizes)
    return [sorted(files, key=order.index) for files in dealt]


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A rank's view of a conversion. What has no line here is as for ``convert``.

    Attributes:
        folder: Where it is written aside.
        identity: The source's, before it was read.
        plan: Tells it from others.
        files: The files of this rank.
    """

    source: Source
    target: Target
    out: Path
    folder: Path
    identity: str
    plan: Plan
    files: Sequence[str]
    total_bytes: int
    place: Place
    show: Callable[[Progress], None]


def _run(job: _Job, ranks: Ranks) -> Summary | None:
    """Write this rank's files, and on rank 0 complete the target."""
    found = _found(job)
    found_bytes = sum(job.target.files[part.file][part.key].num_bytes for part in found)
    if job.place.rank == 0:
        _check_room(job)
    start = Progress(
        parts=len(found),
        num_parts=sum(map(len, job.target.files.values())),
        done_bytes=found_bytes,
        total_bytes=job.total_bytes,
        found_bytes=found_bytes,
        seconds=0.0,
    )
    monitor = Monitor(ranks, start, job.show)
    try:
        _write(job, found, monitor)
        if job.place.rank:
            # Rank 0 removes the folder once it is told: nothing more is written there.
            monitor.stop()
        with as_write_errors(job.folder):
            ranks.tell(f"done-{ranks.rank}", monitor.own())
        if job.place.rank:
            return None
        while (done := ranks.done()) is None:
            monitor.check()
            time.sleep(_POLL_S)
        peak = max(each["peak"] for each in [*done, monitor.own()])
        job.show(monitor.progress(ranks.look_after()))
        _complete(job)
    finally:
        monitor.stop()
    summary = _summary(job, found, monitor.progress({}).seconds, peak)
    shutil.rmtree(job.folder, ignore_errors=True)
    return summary


def _write(job: _Job, found: Iterable[Part], monitor: Monitor) -> None:
    """Write what is missing of this rank's files."""
    there = {(part.file, part.key) for part in found}
    left = {file: {key for key in job.target.files[file] if (file, key) not in there} for file in job.files}
    # An empty file leaves no note.
    files = [file for file in job.files if left[file] or not job.target.files[file]]
    for file in () if job.target.can_go_on else files:
        with as_write_errors(job.folder / FILES / file):
            (job.folder / FILES / file).unlink(missing_ok=True)
    with as_write_errors(job.folder):
        journal = ConversionJournal(job.folder, job.place.rank)
        sync_path(job.folder)
    output = Output(job.target, job.folder / FILES, journal, left, monitor.count)
    try:
        # Files that cannot be gone on with are completed one after the other: a kill loses one of them.
        for together in [files] if job.target.can_go_on else [[file] for file in files]:
            _write_together(job, together, output, monitor)
        output.close(wait=True)
        journal.close()
    except BaseException as error:
        # A signal waits for no disk, and takes nothing from the threads that do.
        is_waited_for = isinstance(error, Exception)
        output.close(wait=is_waited_for)
        if is_waited_for:
            journal.close()
        raise


def _write_together(job: _Job, files: Sequence[str], output: Output, monitor: Monitor) -> None:
    """Write files at the same time, each logical tensor read once."""
    wanted = set(files)
    for tensor in job.source.tensors:
        monitor.check()
        places = job.target.places(tensor)
        missing = [(file, key) for file, key in places if file in wanted and key in output.left[file]]
        if not missing:
            continue
        dtype = TORCH_DTYPES[job.target.files[missing[0][0]][missing[0][1]].dtype]
        num_bytes = sum(job.target.files[file][key].num_bytes for file, key in missing)
        output.make_room(max(num_bytes, math.prod(job.source.tensors[tensor].shape) * dtype.itemsize))
        values = job.source.read_as(tensor, dtype)
        for (file, key), part in zip(places, job.target.parts(tensor, values), strict=True):
            if (file, key) in missing:
                output.put(file, key, part)
            # Not held while the next one is made.
            del part
        del values
        job.source.release()
    output.finish(files)


def _complete(job: _Job) -> None:
    """Let the target write what goes beside the tensors, and rename."""
    if job.source.identity() != job.identity:
        raise CheckpointError(
            f"{job.source.path}: its files were changed while it was converted; let nothing write there, and convert "
            "it anew with --restart"
        )
    files = job.folder / FILES
    with as_write_errors(files):
        # An attempt that was killed here may have left some of it half written, under names that are never reused.
        for path in [path for path in files.rglob("*") if not path.is_dir()]:
            if path.relative_to(files).as_posix() not in job.target.files:
                path.unlink()
        job.target.finish(files, _hashes(job))
        sync_path(files)
    if os.path.lexists(job.out):
        raise WriteError(f"{job.out}: has come into being meanwhile; remove it, and the same command ends the work")
    with as_write_errors(job.out):
        made = files / next(iter(job.target.files)) if job.target.is_single_file else files
        made.rename(job.out)
        sync_path(job.out.parent)


def _hashes(job: _Job) -> dict[str, dict[str, str]]:
    """Return file -> key -> sha256, complete, in the order of the files."""
    noted = {(part.file, part.key): part.sha256 for part in read_journals(job.folder)}
    return {file: {key: noted[file, key] for key in entries} for file, entries in job.target.files.items()}


def _summary(job: _Job, found: Sequence[Part], seconds: float, peak: int) -> Summary:
    places = {tensor: job.target.places(tensor) for tensor in job.source.tensors}
    wanted = {tensor: found[0] for tensor, found in places.items() if found}
    return Summary(
        num_tensors=len(job.source.tensors),
        num_cast=sum(
            job.target.files[file][key].dtype != job.source.tensors[tensor].dtype
            for tensor, (file, key) in wanted.items()
        ),
        total_bytes=job.total_bytes,
        found_parts=len(found),
        found_bytes=sum(job.target.files[part.file][part.key].num_bytes for part in found),
        seconds=seconds,
        peak_rss_anon_bytes=peak,
        hashes=_hashes(job),
    )


def _plan(source: Source, identity: str, target: Target, what: Mapping[str, object]) -> Plan:
    asked = ", ".join(f"{name} {value}" for name, value in what.items() if value is not None)
    text = f"{source.format} {source.path.resolve()} ({identity[:8]}): {asked}; hybridflow {__version__}"
    files = {
        name: {key: [entry.dtype, *entry.shape] for key, entry in entries.items()}
        for name, entries in target.files.items()
    }
    # Not sorted: the order of the tensors is the files' own.
    return Plan(digest=hashlib.sha256(json.dumps([text, identity, files]).encode()).hexdigest(), text=text)


def _already_there(job: _Job) -> Summary | None:
    """Return the result that an attempt left when it was killed right after renaming; refuse to overwrite others.

    Raises:
        WriteError: It is something else.
    """
    if job.folder.is_dir() and read_plan(job.folder) == job.plan:
        noted = read_journals(job.folder)
        is_whole = len({(part.file, part.key) for part in noted}) == sum(map(len, job.target.files.values()))
        is_moved = not any((job.folder / FILES / name).exists() for name in job.target.files)
        if is_whole and is_moved:
            summary = _summary(job, noted, 0.0, 0)
            if job.place.rank == 0:
                shutil.rmtree(job.folder, ignore_errors=True)
            return summary if job.place.rank == 0 else None
    raise WriteError(f"{job.out}: is there already, and nothing is overwritten; remove it, or choose another OUT")


def _check_left(job: _Job, restart: bool) -> None:
    """Refuse a folder that another conversion, or another user, has left; make it if it is not there."""
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    make_own_folder(job.folder)
    left = read_plan(job.folder)
    if not restart and left is not None and left != job.plan:
        raise WriteError(
            f"{job.folder}: was left by another conversion: found [{left.text}], expected [{job.plan.text}]; discard "
            "it with --restart, or choose another OUT"
        )


@contextlib.contextmanager
def _claimed(job: _Job, restart: bool) -> Iterator[None]:
    """Make the folder ready, and keep other conversions from writing there. For rank 0."""
    descriptor = os.open(job.folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WriteError(
                f"{job.folder}: another conversion is writing there; wait for it, or choose another OUT"
            ) from None
        except OSError:
            pass  # A file system that does not lock folders.
        if restart:
            discard(job.folder)
        write_plan(job.folder, job.plan)
        (job.folder / FILES).mkdir(exist_ok=True)
        sync_path(job.folder)
        sync_path(job.folder.parent)
        yield
    finally:
        os.close(descriptor)


def _found(job: _Job) -> list[Part]:
    """Return the parts that are complete, each once.

    Raises:
        WriteError: Another rank was started with another request.
    """
    left = read_plan(job.folder)
    if left != job.plan:
        raise WriteError(
            f"{job.folder}: rank 0 follows [{left and left.text}], this rank [{job.plan.text}]; start all ranks alike"
        )
    there = {name for name in job.target.files if (job.folder / FILES / name).exists()}
    noted = {(part.file, part.key): part for part in read_journals(job.folder) if part.file in there}
    return list(noted.values())


def _check_room(job: _Job) -> None:
    """Check that the missing parts fit on the disk."""
    files = job.folder / FILES
    with as_write_errors(files):
        # Files have their full length from the beginning; blocks, of 512 bytes, are what was written.
        there = sum((files / name).stat().st_blocks * 512 for name in job.target.files if (files / name).exists())
        free = shutil.disk_usage(files).free
    missing = job.total_bytes - there
    if missing > free:
        raise WriteError(
            f"{files}: {missing / 1e9:.2f} GB are to be written, and {free / 1e9:.2f} GB are free; make room, or "
            "choose an OUT elsewhere"
        )
