"""How a run stands, from its files alone, while it writes them and after any end. Torch-free.

What a kill has cut short, or nobody understands, counts as absent: a status says what is known.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from hybridflow.errors import DataError
from hybridflow.foreign import read_small
from hybridflow.observe.files import json_objects
from hybridflow.observe.metrics import METRICS_FILE, RESULTS, phase_seconds
from hybridflow.observe.starts import STARTS_FILE, StartRecord, read_starts
from hybridflow.observe.status_file import SILENT_AFTER_S, STATUS_FILE, has_ended
from hybridflow.observe.summary import SUMMARY_FILE

_RECENT_STEPS = 20
_TAIL_BYTES, _SEARCHED_BYTES = 2**18, 2**23
"""Of a long file so much is read for the recent steps, and at most so much for the last validation."""

_FILES = (METRICS_FILE, STATUS_FILE, STARTS_FILE, SUMMARY_FILE)

State = Literal["starting", "running", "silent", "finished", "requeue", "failed"]


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """How a run stands; what is not known is None. Times are in seconds, ages count from now.

    Attributes:
        run: Its directory.
        state: ``silent``: it should run, and has given no sign of life for long, or its process is gone; ``requeue``:
            it has saved and stopped, to be begun again. ``failed`` is what the job itself could still note;
            ``finished`` is done.
        activity: What the lowest rank does, or did last.
        activity_age_s: For how long it had done so when it gave the last sign of life.
        sign_age_s: Age of the last sign of life.
        step: Training steps done.
        steps: How many it is to make.
        reward: Mean reward of the last step.
        score: Mean score of the last validation; of preferences, the share of pairs in the right order.
        result: What it is called: a key of ``observe.metrics.RESULTS``.
        tokens_per_s: Prompts and responses of the last 20 steps, over their time.
        step_s: Mean length of the last 20 steps.
        phases_s: Mean of the same steps' ``time/<phase>_s``.
        left_s: Time to the last step at this pace.
        job_left_s: Until the job's time is up.
        starts: How often it was begun.
        restarts: How often after the first time.
        slurm_restarts: How often Slurm has begun its job anew.
        start_age_s: Time since the last start.
        end_age_s: Time since that start ended, if it noted it.
        start_step: The checkpoint that this one went on from.
        last_end: How the start before ended.
        ranks: Number of ranks of the last start.
        hosts: Hosts of the last start.
        job_id: Slurm's job id of the last start.
        saved_step: Step of the last checkpoint.
        saved_age_s: Time since it was complete.
        best_step: Step of the checkpoint that is kept as the best.
        cause: Why the last start ended.
        logs: Directory of the last start's logs.
    """

    run: str
    state: State
    activity: str | None = None
    activity_age_s: float | None = None
    sign_age_s: float | None = None
    step: int | None = None
    steps: int | None = None
    reward: float | None = None
    score: float | None = None
    result: str = "score"
    tokens_per_s: float | None = None
    step_s: float | None = None
    phases_s: Mapping[str, float]
    left_s: float | None = None
    job_left_s: float | None = None
    starts: int = 0
    restarts: int = 0
    slurm_restarts: int | None = None
    start_age_s: float | None = None
    end_age_s: float | None = None
    start_step: int | None = None
    last_end: str | None = None
    ranks: int | None = None
    hosts: tuple[str, ...] = ()
    job_id: str | None = None
    saved_step: int | None = None
    saved_age_s: float | None = None
    best_step: int | None = None
    cause: str | None = None
    logs: str | None = None


def runs_in(folder: Path) -> list[Path]:
    """Return the run that a directory is, or else the runs that it holds: of a namespace, or of a Python program.

    Raises:
        DataError: There is none.
    """
    if _is_run(folder):
        return [folder]
    found = sorted(inner for inner in folder.iterdir() if _is_run(inner)) if folder.is_dir() else []
    if not found:
        raise _no_run(folder)
    return found


def _no_run(folder: Path) -> DataError:
    """Return the error of a directory that is no run; the job of one may wait in the queue."""
    job_ids = [each.read_text(encoding="ascii", errors="replace").strip() for each in folder.glob("launch/*/job_id")]
    waiting = max((int(job_id) for job_id in job_ids if job_id.isdecimal() and len(job_id) < 20), default=None)
    if waiting is not None:
        return DataError(
            f"{folder}: job {waiting} was submitted and has not started; see `squeue -j {waiting}`, and "
            f"{folder}/slurm-{waiting}.out once it has"
        )
    return DataError(f"{folder}: holds no run (none of {', '.join(_FILES)}); give the run_dir of a recipe")


def check_run(folder: Path) -> None:
    """Refuse a directory that is no run's. Raises DataError."""
    if not _is_run(folder):
        raise _no_run(folder)


def holds_data_alone(folder: Path) -> bool:
    """Return whether a directory has the data of a run that went elsewhere, and nothing else."""
    return folder.is_dir() and [inner.name for inner in folder.iterdir()] == ["data"]


def _is_run(folder: Path) -> bool:
    latest = folder / "checkpoints" / "latest"
    return any(path.is_file() for path in (*(folder / name for name in _FILES), latest))


def read_status(run_dir: Path, now_s: float | None = None) -> RunStatus:
    """Find out how a run stands.

    Args:
        run_dir: Directory of the run.
        now_s: Unix time, in seconds; None: the clock's.

    Raises:
        DataError: There is no run.
        OSError: A file cannot be read.
    """
    now_s = time.time() if now_s is None else now_s
    latest = run_dir / "checkpoints" / "latest"
    check_run(run_dir)
    starts = read_starts(run_dir)
    start = starts[-1] if starts else None
    content = _object(_read(run_dir / STATUS_FILE))
    told = kept = _Values(content)
    if start is not None and (told.number("time_s") or 0.0) < start.began_s:
        # What an earlier start left there says nothing of this one.
        kept = _Values({})
    sign_s = kept.number("time_s")
    has_told = sign_s is not None
    if sign_s is None and start is not None:
        sign_s = start.began_s
    is_gone = has_told and has_ended(content)
    state = _state(start, None if sign_s is None else now_s - sign_s, has_told=has_told, is_gone=is_gone)
    summary = _Values(_object(_read(run_dir / SUMMARY_FILE)))
    if start is None and summary.integer("steps") is not None:
        state = "finished"
    # Else a summary may be that of an earlier start, which was asked for fewer steps.
    progress = _progress(run_dir, told, summary if state == "finished" else _Values({}))
    saved, best = _named_step(latest), _named_step(latest.with_name("best"))
    left_s = None
    if progress.get("step_s") is not None and progress["steps"] is not None and state != "finished":
        left_s = max(0, progress["steps"] - progress["step"]) * progress["step_s"]
    job_end_s = kept.number("job_end_s")
    return RunStatus(
        run=str(run_dir),
        state=state,
        activity=kept.text("activity") if state in ("running", "silent") else None,
        activity_age_s=_age(kept.number("activity_since_s"), now_s if sign_s is None else sign_s),
        sign_age_s=_age(sign_s, now_s),
        left_s=left_s,
        job_left_s=None if job_end_s is None or state != "running" else max(0.0, job_end_s - now_s),
        saved_step=saved,
        saved_age_s=None if saved is None else _age(latest.stat().st_mtime, now_s),
        best_step=best,
        **progress,
        **_of_starts(run_dir, starts, now_s),
    )


def _named_step(note: Path) -> int | None:
    """Return the step of the checkpoint that a file names."""
    match = re.fullmatch(r"step_([0-9]{6,18})", _read(note).strip())
    return None if match is None else int(match[1])


def _state(start: StartRecord | None, silent_s: float | None, *, has_told: bool, is_gone: bool) -> State:
    """Return the state of the last start, from its own report (if any), how long it is silent, and its process."""
    if start is not None and start.outcome in ("finished", "requeue", "failed"):
        return start.outcome  # type: ignore[return-value]  # mypy does not narrow text to its literals
    if silent_s is None or silent_s > SILENT_AFTER_S or is_gone:
        return "silent"
    return "running" if has_told else "starting"


def _progress(run_dir: Path, told: _Values, summary: _Values) -> dict[str, Any]:
    """Return what was learned, how far the run is, and how fast."""
    rows = [_Values(row) for row in _last_rows(run_dir / METRICS_FILE)]
    recent = [row for row in rows[-_RECENT_STEPS:] if row.number("time/step_s") is not None]
    phases = [phase_seconds(row.numbers()) for row in recent]
    names = dict.fromkeys(name for each in phases for name in each)
    last = rows[-1] if rows else told
    step, steps = last.integer("step"), told.integer("steps")
    score, result = _last_score([*rows, summary])
    if score is None:
        score, result = _last_score([_Values(_last_validated(run_dir / METRICS_FILE))])
    return {
        # A job that has just begun has not told of any.
        "step": 0 if steps is not None and step is None else step,
        "steps": summary.integer("steps") if steps is None else steps,
        "reward": last.number("reward/mean"),
        "score": score,
        "result": result,
        "tokens_per_s": _rate(recent),
        "step_s": _mean([row.number("time/step_s") for row in recent]),
        "phases_s": {name: fmean(each.get(name, 0.0) for each in phases) for name in names},
    }


def _last_score(told: Sequence[_Values]) -> tuple[float | None, str]:
    """Return the result of the last validation, and what it is called."""
    for each in reversed(told):
        for name in RESULTS:
            for key in (f"{name}_after_rl", f"validation/{name}"):
                if (value := each.number(key)) is not None:
                    return value, name
    return None, "score"


def _of_starts(run_dir: Path, starts: list[StartRecord], now_s: float) -> dict[str, Any]:
    if not starts:
        return {}
    start, before = starts[-1], starts[-2] if len(starts) > 1 else None
    logs = run_dir / "logs" / f"{start.number:04d}"
    last_end = None
    if before is not None:
        last_end = ": ".join(each for each in (before.outcome or "killed", before.detail) if each)
    return {
        "starts": len(starts),
        "restarts": max(0, start.number - 1),
        "slurm_restarts": start.restart_count,
        "start_age_s": _age(start.began_s, now_s),
        "end_age_s": _age(start.ended_s, now_s),
        "start_step": start.step,
        "last_end": last_end,
        "ranks": start.ranks,
        "hosts": start.hosts,
        "job_id": start.job_id,
        # As it stands on top of a log, without the name of the program.
        "cause": None if not start.detail else start.detail.removeprefix("hybridflow: "),
        "logs": str(logs) if logs.is_dir() else None,
    }


def _age(then_s: float | None, now_s: float) -> float | None:
    """Return how long ago a time was; another node's clock may be ahead of this one's."""
    return None if then_s is None else max(0.0, now_s - then_s)


def _rate(rows: Sequence[_Values]) -> float | None:
    """Return the tokens of steps over their seconds; a mean of the steps' rates would count short steps too much."""
    steps = [(row.number("batch/num_tokens"), row.number("time/step_s")) for row in rows]
    known = [(tokens, step_s) for tokens, step_s in steps if tokens is not None and step_s is not None]
    seconds = sum(step_s for _, step_s in known)
    return sum(tokens for tokens, _ in known) / seconds if seconds > 0 else None


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


class _Values:
    """Values that a file may hold or not, by key and type; numbers are finite and of a sane size."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def number(self, key: str) -> float | None:
        value = self._values.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        # Neither true of what is not a number, nor of an integer that no float can hold.
        return float(value) if -(2**63) < value < 2**63 else None

    def integer(self, key: str) -> int | None:
        value = self.number(key)
        return None if value is None or value < 0 else int(value)

    def text(self, key: str) -> str | None:
        value = self._values.get(key)
        return value if isinstance(value, str) else None

    def numbers(self) -> dict[str, float]:
        return {key: value for key in self._values if (value := self.number(key)) is not None}


def _read(path: Path) -> str:
    try:
        return read_small(path).decode(errors="replace")
    except OSError as error:
        # The last two: a pipe, or too large.
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.EOVERFLOW):
            raise
        return ""


def _object(text: str) -> dict[str, Any]:
    return next(json_objects([text]), {})


def _last_rows(path: Path) -> list[dict[str, Any]]:
    """Read the last steps that are recorded whole; of a long file only its end is read."""
    lines = _tail(path, _TAIL_BYTES).decode(errors="replace").split("\n")[:-1]
    return [row for row in json_objects(lines) if _Values(row).integer("step") is not None]


def _last_validated(path: Path) -> dict[str, Any]:
    """Read the last step with a validation, as far back as the file is searched; empty: there is none."""
    text = _tail(path, _SEARCHED_BYTES)
    place = max(text.rfind(f'"validation/{name}"'.encode()) for name in RESULTS)
    line = text[text.rfind(b"\n", 0, max(0, place)) + 1 :].partition(b"\n")[0]
    return _object(line.decode(errors="replace")) if place >= 0 else {}


def _tail(path: Path, num_bytes: int) -> bytes:
    """Read the end of a file; empty where there is none."""
    if not path.is_file():
        return b""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - num_bytes))
            return file.read()
    except (FileNotFoundError, IsADirectoryError):
        return b""
