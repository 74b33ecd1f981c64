"""Every start of a run, in ``starts.jsonl``: where it ran, what it went on from, how it ended. No torch.

A line for each start, and one more for its end if the job itself could tell of it. One rank writes, and syncs each.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from hybridflow.errors import ConfigError
from hybridflow.observe.files import json_objects, replace_file, sync_path, writing
from hybridflow.observe.rank_log import LOGS_DIR

STARTS_FILE = "starts.jsonl"
RECIPE_FILE = "recipe.yaml"

_CLAIM_S = 30.0
"""So long the directory of a start's logs stands for a job that is about to add the start."""

_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("number", "step", "ranks", "restart_count"), (int,)),
    **dict.fromkeys(("began_s", "ended_s", "save_s"), (int, float)),
    **dict.fromkeys(("job_id", "outcome", "detail"), (str,)),
    "layouts": (dict,),
    "hosts": (list,),
}


@dataclass(frozen=True, kw_only=True)
class StartRecord:
    """One start of a run.

    Attributes:
        number: 1 for the first.
        began_s: Unix time, in seconds.
        step: Step of the checkpoint that was there; None: there was none.
        ranks: How many run.
        hosts: The nodes, in the order of their ranks.
        layouts: Mesh -> layout.
        job_id: Slurm's job id; None elsewhere.
        restart_count: How often Slurm has begun the job anew; None outside Slurm.
        outcome: How it ended: ``finished``, ``requeue`` or ``failed``; None: it runs, or was killed.
        ended_s: Unix time, in seconds.
        save_s: How long its slowest save took, as far as was measured, in seconds.
        detail: Why it ended so, in a line.
    """

    number: int
    began_s: float
    step: int | None
    ranks: int
    hosts: tuple[str, ...] = ()
    layouts: Mapping[str, str] | None = None
    job_id: str | None = None
    restart_count: int | None = None
    outcome: str | None = None
    ended_s: float | None = None
    save_s: float | None = None
    detail: str | None = None


def read_starts(run_dir: Path) -> list[StartRecord]:
    """Read the starts of a run, in order; skip lines that a kill cut short or that have an unknown form."""
    path = run_dir / STARTS_FILE
    found: dict[int, dict[str, Any]] = {}
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    for row in filter(_is_understood, json_objects(text.split("\n"))):
        known = {key: row[key] for key in StartRecord.__dataclass_fields__ if key in row}
        found[row["number"]] = found.get(row["number"], {}) | known
    whole = (row for row in found.values() if None not in (row.get("began_s"), row.get("ranks")) and "step" in row)
    return [StartRecord(**{**row, "hosts": tuple(row.get("hosts") or ())}) for row in whole]


def _is_understood(row: Mapping[str, Any]) -> bool:
    """Return whether a line describes a start and each value has its key's type."""
    is_right = all(_is_one(row[key], kinds) for key, kinds in _KINDS.items() if row.get(key) is not None)
    return is_right and row.get("number") is not None and all(isinstance(host, str) for host in row.get("hosts") or ())


def _is_one(value: object, kinds: tuple[type, ...]) -> bool:
    """Return whether a value has one of these types; a number must also lie in [0, 2**63)."""
    if not isinstance(value, kinds) or isinstance(value, bool):
        return False
    return not isinstance(value, (int, float)) or 0 <= value < 2**63


def claim_start(run_dir: Path, number: int) -> None:
    """Make the directory of a start's logs. Of two jobs that begin a run in the same moment only one can.

    Where it is there, another job is about to add this start, or a kill came before that: this waits for the start.
    What the file system refuses ``add_start`` tells.

    Raises:
        ConfigError: Another job added the start.
    """
    folder = run_dir / LOGS_DIR / f"{number:04d}"
    with contextlib.suppress(OSError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir()
        except FileExistsError:
            age_s = time.time() - folder.stat().st_mtime
            until_s = time.monotonic() + min(_CLAIM_S, _CLAIM_S - age_s)
            while time.monotonic() < until_s:
                time.sleep(0.5)
                if any(record.number == number for record in read_starts(run_dir)):
                    raise ConfigError(
                        f"{run_dir}: another job began start {number} of this run just now; end one of them (scancel), "
                        "or give this one another run_dir"
                    ) from None


def add_start(run_dir: Path, record: StartRecord) -> None:
    """Add a start. Raises WriteError when the file system refuses."""
    _append(run_dir, {key: value for key, value in asdict(record).items() if value is not None or key == "step"})


def add_end(run_dir: Path, number: int, outcome: str, detail: str = "", save_s: float | None = None) -> None:
    """Note how a start ended. Raises WriteError when the file system refuses."""
    row = {"number": number, "outcome": outcome, "ended_s": time.time(), "save_s": save_s, "detail": detail}
    _append(run_dir, row)


def keep_recipe(run_dir: Path, number: int, recipe: Mapping[str, Any]) -> None:
    """Write the recipe of a start, every key of it, to ``logs/NUMBER/recipe.yaml`` of the run.

    Raises:
        WriteError: The file system refuses.
    """
    path = run_dir / LOGS_DIR / f"{number:04d}" / RECIPE_FILE
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, recipe_text(recipe).encode())


def recipe_text(recipe: Mapping[str, Any]) -> str:
    """Return a recipe as YAML, its keys in their order."""
    text: str = yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True)
    return text


def kept_recipe(run_dir: Path) -> Path | None:
    """Return the recipe of the last start that kept one, or None."""
    return max(run_dir.glob(f"{LOGS_DIR}/*/{RECIPE_FILE}"), default=None)


def idle_starts(
    records: Sequence[StartRecord], *, job_id: str, step: int | None, restart_count: int | None
) -> list[StartRecord]:
    """Return the latest consecutive starts that resumed from this step's checkpoint, as one more start now would.

    A start that Slurm ended silently to requeue the job does not count, as when it takes nodes for other jobs.

    Args:
        records: Start records of the run, in order.
        job_id: Id of the job.
        step: Step of the checkpoint; None: there is none.
        restart_count: How often Slurm has begun the job again before the start that comes now.
    """
    found: list[StartRecord] = []
    for record in reversed(records):
        if record.job_id != job_id or record.step != step or record.outcome == "finished":
            break
        if record.outcome is not None or record.restart_count == restart_count:
            found.append(record)
        restart_count = record.restart_count
    return found[::-1]


def _append(run_dir: Path, row: Mapping[str, Any]) -> None:
    path = run_dir / STARTS_FILE
    with writing(path):
        run_dir.mkdir(parents=True, exist_ok=True)
        is_cut = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
        # After a line that was cut short a new one begins all the same.
        line = ("\n" if is_cut else "") + json.dumps(row) + "\n"
        with path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        sync_path(run_dir)
