"""The kit for a GPU, tried on a CPU: checks run, at toy size, and pass."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gpu_kit
import pytest

from hybridflow.families.tables import FAMILIES

ROOT = Path(__file__).parents[2]
# Of other sizes and models, or training as "layouts" and "quickstart-fp32" do.
ALIKE = ["reshard", "resume", "quickstart-bf16", "decode-0.5b", "decode-1.5b", "grpo-0.5b", "grpo-moe", "decode-moe"]
ALIKE += ["grpo-linear", "decode-sinks"]
CHECKS = [each.name for group in gpu_kit.CHECKS.values() for each in group if each.name not in ALIKE]


@pytest.mark.slow
@pytest.mark.parametrize("checks", [CHECKS, pytest.param(ALIKE, marks=pytest.mark.long)], ids=["most", "alike"])
def test_checks_pass_on_a_cpu(checks, tmp_path):
    command = [sys.executable, ROOT / "tools/gpu_kit.py", "all", "--dry-run", "--out", tmp_path, "--deadline", "900"]
    command += ["--only", *checks]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert sorted(found) == sorted(checks)
    assert {row["status"] for row in found.values()} == {"passed"}
    assert {row["machine"].split(";")[0] for row in found.values()} == {"CPU (dry run)"}
    if checks is ALIKE:
        return
    # What the checks compare is there: nothing passes for want of figures.
    assert found["families"]["result"].startswith(
        f"largest differences over {len(FAMILIES)} models: log-probabilities 0"
    )
    assert found["layouts"]["result"].count("alone") == 1 and "tp2" in found["layouts"]["result"]
    assert "planned" in found["grpo-1.5b"]["result"] and "times transformers" in found["decode-7b"]["result"]
