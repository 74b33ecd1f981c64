"""Each start of a run is noted; refused is one beside another, and one too many of those that get nowhere."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from hybridflow.checkpoint.job_file import step_of
from hybridflow.checkpoint.store import latest_step
from hybridflow.config.recipe import MODEL_SECTIONS, Recipe
from hybridflow.errors import ConfigError, WriteError
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.observe.files import check_own
from hybridflow.observe.rank_log import say
from hybridflow.observe.starts import StartRecord, add_end, add_start, claim_start, idle_starts, read_starts
from hybridflow.parallel.coordinator import Coordinator
from hybridflow.recipe.run_dir import check_alone
from hybridflow.trainer.ahead import WORKING_AHEAD

_NO_MODELS = ("job", "reward", WORKING_AHEAD)
"""Meshes whose layouts are not told."""


class JobStart(NamedTuple):
    """This start of the run.

    Attributes:
        number: 1 for the first; the same on all ranks.
        earlier: Those before it; known to the lowest rank, on others empty.
    """

    number: int
    earlier: tuple[StartRecord, ...] = ()


def check_checkpoints(recipe: Recipe, everyone: Coordinator) -> None:
    """Refuse models of a run that has saved again while the ranks looked for its latest checkpoint.

    Collective: all ranks.

    Raises:
        ConfigError: A rank has found another checkpoint than the lowest one. On that rank.
    """
    paths = {f"{key}.path": recipe.model_of(role).path for role, key in MODEL_SECTIONS.items()}
    own = {key: Path(path).parent.name for key, path in paths.items() if path is not None}
    found = {key: step for key, step in own.items() if step_of(step) is not None}
    told = everyone.decide("checkpoints of the models", found)
    first, rank = everyone.ranks[0], everyone.rank
    for key, step in found.items():
        if step != told.get(key):
            raise ConfigError(
                f"{key}={paths[key]}: rank {first} has found {told.get(key)} there, and rank {rank} {step}: the run "
                f"saves while this one begins; name the step, as in {Path(str(paths[key])).parent}"
            )


def note_start(recipe: Recipe, meshes: Mapping[str, DeviceMesh], everyone: Coordinator) -> JobStart:
    """Add this start to the run's. Collective: all ranks.

    Raises:
        ConfigError: Another job writes this run; or Slurm has begun this one again and again from the same checkpoint.
            On all ranks.
        StopError: A process that an earlier start of this job has left still writes this run. On all ranks.
        CheckpointError: ``latest`` does not hold the name of a checkpoint. On all ranks.
        WriteError: The file system refuses, or another user has made the run's directory. On all ranks.
    """
    hosts = tuple(dict.fromkeys(everyone.gather(socket.gethostname(), "hosts of the ranks")))
    earlier: list[StartRecord] = []

    def note() -> int:
        run_dir = Path(recipe.run_dir)
        check_own(run_dir)
        earlier.extend(read_starts(run_dir))
        check_alone(run_dir, earlier)
        count, job_id = os.environ.get("SLURM_RESTART_COUNT", "0"), os.environ.get("SLURM_JOB_ID")
        record = StartRecord(
            number=max((record.number for record in earlier), default=0) + 1,
            began_s=time.time(),
            step=latest_step(run_dir),
            ranks=recipe.cluster.ranks,
            hosts=hosts,
            layouts={name: str(mesh.layout) for name, mesh in meshes.items() if name not in _NO_MODELS},
            job_id=job_id,
            # Slurm leaves it out on the first run.
            restart_count=int(count) if job_id is not None and count.isdigit() else None,
        )
        _check_progress(recipe, record, earlier)
        claim_start(run_dir, record.number)
        add_start(run_dir, record)
        if earlier or record.restart_count:
            say(_describe(record))
        return record.number

    return JobStart(everyone.on_lead("the number of this start", note), tuple(earlier))


def note_failure(run_dir: Path, number: int, rank: int, cause: str, save_s: float | None) -> None:
    """Write down how this start ended, on the lowest rank; on the next in its place, if it was the one that was lost.

    Nothing is written where the file system refuses, which may be what ends the job, or where the end is noted already:
    a program may fail after its training.
    """
    with contextlib.suppress(OSError, WriteError):
        if rank in (0, 1) and all(each.outcome is None for each in read_starts(run_dir)[-1:]):
            add_end(run_dir, number, "failed", cause, save_s)


def _check_progress(recipe: Recipe, record: StartRecord, earlier: list[StartRecord]) -> None:
    """Refuse to go on with what fails each time; nobody is watching a job that begins itself again."""
    if record.job_id is None:
        return
    idle = idle_starts(earlier, job_id=record.job_id, step=record.step, restart_count=record.restart_count)
    if len(idle) < recipe.trainer.max_idle_starts:
        return
    place = "without a checkpoint" if record.step is None else f"from the checkpoint of step {record.step}"
    ends = "; ".join(f"start {each.number}: {each.outcome or 'killed'} {each.detail or ''}".strip() for each in idle)
    raise ConfigError(
        f"{recipe.run_dir}: the last {len(idle)} starts of job {record.job_id} all began {place} and wrote no other "
        f"({ends}); look into {recipe.run_dir}/logs for what stops them, save more often (trainer.save_every) or ask "
        "for more time, then submit a new job; trainer.max_idle_starts says how many are allowed"
    )


def _describe(record: StartRecord) -> str:
    moment = datetime.fromtimestamp(record.began_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    restarts = f", Slurm's restart {record.restart_count}" if record.restart_count else ""
    place = "from the beginning" if record.step is None else f"from step {record.step}"
    hosts = ", ".join(record.hosts[:8]) + (", …" if len(record.hosts) > 8 else "")
    ranks = f"{record.ranks} rank{'s' if record.ranks > 1 else ''}"
    return f"start {record.number}{restarts}, {moment}: {ranks} on {hosts}, {place}"
