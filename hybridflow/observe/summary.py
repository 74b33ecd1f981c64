"""``summary.json``: what a run that is done leaves of itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.observe.files import replace_file, writing

SUMMARY_FILE, REPORT_FILE = "summary.json", "report.html"


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Write ``summary.json`` atomically: an interrupted write leaves the one before.

    Raises:
        ValueError: A value is not finite, which JSON cannot hold.
        TypeError: A value is not of JSON's types.
        WriteError: The file system refuses.
    """
    path = run_dir / SUMMARY_FILE
    with writing(path):
        replace_file(path, (json.dumps(summary, indent=2, allow_nan=False) + "\n").encode())


def drop_summary(run_dir: Path) -> None:
    """Remove the summary that an earlier run has left. Raises WriteError when the file system refuses."""
    path = run_dir / SUMMARY_FILE
    with writing(path):
        path.unlink(missing_ok=True)
