"""The benchmark of a step beside its real rival: it runs, and its figures hang together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IS_THERE = (ROOT / ".venv-vllm/.installed").is_file()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(not IS_THERE, reason="needs TRL in .venv-vllm: ./tests/support/vllm.sh, or run.sh --all")
def test_both_trainers_are_measured_on_the_same_samples(tmp_path):
    command = [sys.executable, ROOT / "tools/bench/bench_step.py", "--cases", "equal", "--repeats", "1"]
    command += ["--json", tmp_path / "found.json", "--work", tmp_path / "work"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert {"trl", "transformers", "torch", "megatron-core"} <= found["versions"].keys()
    case = found["cases"]["equal"]
    for name in ("ours", "trl"):
        (run,) = case["runs"][name]
        assert run["num_tokens"] == 64 * 64 and run["step_s"] > 0, name
        assert f"| equal | {name}" in done.stdout
    (run,) = case["runs"]["ours"]
    assert {"time/rollout_s", "time/log_probs_s", "time/update_s", "time/control_s"} <= run["times"].keys()
    # Of each phase the rank that took longest counts, so that there may be more than the step, but never both ranks'.
    assert 0.9 * run["step_s"] < sum(run["times"].values()) < 2 * run["step_s"]
