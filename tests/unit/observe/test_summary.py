"""The summary is whole or the one before."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.errors import WriteError
from hybridflow.observe.summary import write_summary


def test_summary_round_trip(tmp_path: Path):
    summary = {"accuracy_before_rl": 0.4, "steps": 60, "phases": {"rollout_s": 1.5}, "note": None}
    write_summary(tmp_path, summary)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize("broken", ["os.fsync", "os.replace"])
def test_a_failed_write_leaves_the_old_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str):
    write_summary(tmp_path, {"steps": 1})

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(broken, fail)
    with pytest.raises(WriteError, match="disk full"):
        write_summary(tmp_path, {"steps": 2})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_killed_write_leaves_the_old_summary_and_the_next_one_succeeds(tmp_path: Path):
    write_summary(tmp_path, {"steps": 1})
    script = (
        "import os, pathlib\nfrom hybridflow.observe.summary import write_summary\n"
        f"os.replace = lambda *_: os._exit(9)\nwrite_summary(pathlib.Path({str(tmp_path)!r}), {{'steps': 2}})"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 1}
    write_summary(tmp_path, {"steps": 3})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 3}
    left, summary = sorted(path.name for path in tmp_path.iterdir())
    assert left.startswith(".summary.json.") and summary == "summary.json"


def test_content_is_synced_before_the_rename_and_the_directory_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        calls.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        real_fsync(descriptor)

    def replace(source: Path, target: Path) -> None:
        calls.append(("rename", target.name))
        real_replace(source, target)

    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr("os.replace", replace)
    write_summary(tmp_path, {"steps": 1})
    (_, aside), *others = calls
    assert re.fullmatch(r"\.summary\.json\.[0-9a-f]{8}\.tmp", aside)
    assert others == [("rename", "summary.json"), ("sync", tmp_path.name)]


def test_what_json_cannot_hold_is_refused_before_the_disk_is_touched(tmp_path: Path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_summary(tmp_path, {"accuracy_after_rl": float("nan")})
    assert list(tmp_path.iterdir()) == []
