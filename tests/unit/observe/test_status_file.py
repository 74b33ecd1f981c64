"""``status.json`` is written by a thread, whole, and never stops a run."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from hybridflow.observe import activity, status_file
from hybridflow.observe.status_file import StatusFile
from tests.support.waiting import wait_until


def content(run_dir: Path) -> dict:
    return json.loads((run_dir / "status.json").read_text())


def test_it_tells_at_once_and_goes_on_while_the_work_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(status_file, "WRITE_EVERY_S", 0.01)
    run_dir = tmp_path / "runs" / "x"
    file = StatusFile(run_dir, facts={"name": "x", "steps": 9})
    first = content(run_dir)
    assert first["name"] == "x" and first["steps"] == 9 and first["pid"] == os.getpid()
    assert "step" not in first and "activity" not in first and abs(first["time_s"] - time.time()) < 60
    with activity.current_activity("train step 3"), activity.current_activity("actor.sample"):
        file.note(step=2, job_end_s=99.0)
        wait_until(lambda: "activity" in content(run_dir), within_s=60)
        file.close()
    last = content(run_dir)
    assert (last["step"], last["job_end_s"], last["activity"]) == (2, 99.0, "actor.sample (train step 3)")
    assert first["time_s"] <= last["activity_since_s"] <= last["time_s"]
    assert [path.name for path in run_dir.iterdir()] == ["status.json"]
    assert "status" not in [thread.name for thread in threading.enumerate()]


def test_what_cannot_be_written_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise OSError("disk full")

    file = StatusFile(tmp_path, facts={})
    before = content(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        file.note(step=5, job_end_s=None)
        file.close()
    assert content(tmp_path) == before
