"""``status.json`` is written by a thread, whole, and never stops a run."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from hybridflow.observe import status_file
from hybridflow.observe.status_file import StatusFile
from hybridflow.observe.timeline import Doing


def content(run_dir: Path) -> dict:
    return json.loads((run_dir / "status.json").read_text())


def test_it_tells_at_once_and_goes_on_while_the_work_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(status_file, "WRITE_EVERY_S", 0.01)
    asked = [threading.Event() for _ in range(3)]
    work: list[Doing | None] = [None]

    def doing() -> Doing | None:
        next((event for event in asked if not event.is_set()), asked[-1]).set()
        return work[0]

    file = StatusFile(tmp_path / "runs" / "x", facts={"name": "x", "steps": 9}, doing=doing)
    first = content(tmp_path / "runs" / "x")
    assert first["name"] == "x" and first["steps"] == 9 and first["pid"] == os.getpid()
    assert "step" not in first and "doing" not in first and abs(first["time_s"] - time.time()) < 60
    work[0] = Doing("actor.sample", 12.5)
    file.note(step=3, job_end_s=99.0)
    assert all(event.wait(60) for event in asked)
    file.close()
    last = content(tmp_path / "runs" / "x")
    assert (last["step"], last["job_end_s"], last["doing"], last["doing_since_s"]) == (3, 99.0, "actor.sample", 12.5)
    assert last["time_s"] > first["time_s"]
    assert [path.name for path in (tmp_path / "runs" / "x").iterdir()] == ["status.json"]
    assert "status" not in [thread.name for thread in threading.enumerate()]


def test_what_cannot_be_written_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = StatusFile(tmp_path, facts={}, doing=lambda: None)
    before = content(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        file.note(step=5, job_end_s=None)
        file.close()
    assert content(tmp_path) == before
