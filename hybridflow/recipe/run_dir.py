"""Whether a run can have its directory: it can be made and written, and no other run or job has it. No torch."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from hybridflow.checkpoint.job_file import latest_step
from hybridflow.config.recipe import Recipe
from hybridflow.errors import ConfigError, StopError
from hybridflow.exit_status import REQUEUE
from hybridflow.observe.files import check_own, writing
from hybridflow.observe.starts import STARTS_FILE, StartRecord, read_starts
from hybridflow.observe.status_file import living_writer
from hybridflow.recipe.resume import check_resume


def try_run_dir(recipe: Recipe, *, resume: bool) -> None:
    """Find what a start of a run would meet in its directory, and write nothing.

    Raises:
        ConfigError: Another run or job has the directory.
        CheckpointError: The latest checkpoint is damaged, or of a recipe that differs in a key that must match.
        WriteError: The directory cannot be made or written, or is another user's.
    """
    run_dir = Path(recipe.run_dir)
    if resume:
        try_resume(recipe)
    with writing(run_dir):
        if not resume:
            check_new(run_dir)
        _check_writable(run_dir)
        check_own(run_dir)
    check_alone(run_dir, read_starts(run_dir))


def try_resume(recipe: Recipe) -> None:
    """Refuse to go on from a checkpoint that is damaged, or that was written with another recipe.

    Raises:
        CheckpointError: Names what differs.
        ModuleNotFoundError: There is a checkpoint, and this machine has no torch.
    """
    if latest_step(Path(recipe.run_dir)) is None:
        return
    # Torch is imported only where there is a checkpoint.
    from hybridflow.checkpoint.store import load_latest, reading_state

    found = load_latest(Path(recipe.run_dir))
    if found is not None:
        with reading_state(found):
            check_resume(recipe, found.state["recipe"], found.path)


def _check_writable(run_dir: Path) -> None:
    """Raise the OSError that making the directory, or the first file in it, would raise."""
    missing, there = None, run_dir
    while not os.path.lexists(there) and there != there.parent:
        missing, there = there, there.parent
    if not there.is_dir():
        raise _os_error(errno.EEXIST if missing is None else errno.ENOTDIR, run_dir)
    refused = run_dir / STARTS_FILE if missing is None else missing
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        raise _os_error(errno.EROFS, refused)
    if not os.access(there, os.W_OK | os.X_OK):
        raise _os_error(errno.EACCES, refused)


def _os_error(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))


def check_new(run_dir: Path) -> None:
    """Refuse to begin a run anew where an earlier one has checkpoints, or within another run's directory or around it.

    Its own first save would be refused too, when the training is done. Two runs of which one is within the other are
    mostly one without a namespace, and one of a namespace of that name.

    Raises:
        ConfigError: There is a checkpoint, or another run.
        StopError: As ``check_alone``, where there is a checkpoint.
    """
    step = latest_step(run_dir)
    if step is not None:
        # Nobody is to remove the checkpoints of a run that lives.
        check_alone(run_dir, read_starts(run_dir))
        raise ConfigError(
            f"{run_dir}: holds a run with a checkpoint of step {step}; add --resume (resume=True in Python) to go on "
            f"from it, set run_dir to another directory, or remove {run_dir / 'checkpoints'} to begin anew"
        )
    places = (run_dir.parent / STARTS_FILE, *run_dir.glob(f"*/{STARTS_FILE}"))
    others = [path.parent for path in places if path.is_file()]
    if others:
        raise ConfigError(
            f"{run_dir}: {others[0]} is another run's directory, and one would be within the other; set name, "
            "namespace or run_dir to another"
        )


def check_alone(run_dir: Path, earlier: Sequence[StartRecord]) -> None:
    """Refuse a second job on a run: each would write over the other's checkpoints.

    Raises:
        ConfigError: Another job is at work on it.
        StopError: A process of this job is, which an earlier start has left on a node that Slurm has lost.
    """
    if not earlier or earlier[-1].outcome is not None:
        return
    other = living_writer(run_dir, earlier[-1].began_s)
    if other is None:
        return
    what = f"{run_dir}: start {earlier[-1].number} of this run is still at work, {other.name}"
    if other.job_id is not None and other.job_id == os.environ.get("SLURM_JOB_ID"):
        # The end of that process or of its node is near, or waits for an operator.
        raise StopError(
            f"{what}, which is this job; this start ends with status {REQUEUE}, to begin again later: if the process "
            "stays, end it, or have its node drained and restarted"
        )
    raise ConfigError(f"{what}; wait for its end or end it (scancel), or give this job another run_dir")
