"""The kit for a GPU, tried on a CPU: every check runs, at toy size, and passes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_check_passes_on_a_cpu(tmp_path):
    command = [sys.executable, ROOT / "tools/gpu_kit.py", "all", "--dry-run", "--out", tmp_path, "--deadline", "900"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    listed = subprocess.run([*command[:2], "all", "--list"], capture_output=True, text=True, check=True).stdout
    assert sorted(found) == sorted(line.split()[0] for line in listed.splitlines())
    assert {row["status"] for row in found.values()} == {"passed"}
    assert {row["machine"].split(";")[0] for row in found.values()} == {"CPU (dry run)"}
    # What the checks compare is there: nothing passes for want of figures.
    assert found["families"]["result"].startswith("largest differences over 15 families: log-probabilities 0")
    assert found["layouts"]["result"].count("alone") == 1 and "tp2" in found["layouts"]["result"]
    assert "planned" in found["grpo-1.5b"]["result"] and "times transformers" in found["decode-7b"]["result"]
