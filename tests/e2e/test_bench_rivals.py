"""The benchmarks of rollout and of a step beside their real rivals: they run, and their figures hang together."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.vllm_environment import NEEDED, ROOT, printed_by

pytestmark = [*NEEDED, pytest.mark.long]


def measured(folder: Path, script: str, *arguments: str) -> tuple[dict[str, Any], str]:
    """What a benchmark has found, and what it printed."""
    command = [sys.executable, ROOT / "tools/bench" / script, *arguments]
    command += ["--repeats", "1", "--json", folder / "found.json", "--work", folder / "work"]
    printed = printed_by(command, ROOT, folder=ROOT, within_s=1500)
    return json.loads((folder / "found.json").read_text(encoding="utf-8")), printed


def test_all_engines_are_measured_on_the_same_weights(tmp_path):
    arguments = ["--models", "2m", "--cases", "equal", "prefix", "--alone", "2m", "--batches", "64", "--threads", "1"]
    found, printed = measured(tmp_path, "bench_rollout.py", *arguments)
    assert {"vllm", "transformers", "torch", "megatron-core"} <= found["versions"].keys()
    model = found["models"]["2m"]
    case = model["cases"]["equal"]
    assert case["engines"].keys() == {"ours", "transformers", "vllm"}
    for name, entry in case["engines"].items():
        (run,) = entry["runs"]
        # A first token comes before the last; nobody beats the limit; the weights alone are 4 bytes each.
        assert 0 < run["first_s"] < run["wall_s"], name
        assert 0 < case["limit_s"] < run["wall_s"], name
        assert run["peak_bytes"] > 4 * model["parameters"], name
        assert f"| equal | {name}" in printed
    # Half of 64 prompts' 512 tokens at least is shared, or samples share nothing.
    assert 8 * 512 * 0.9 < found["alone"]["prefix"]["computed_tokens"] < 64 * 512 / 2


def test_both_trainers_are_measured_on_the_same_samples(tmp_path):
    # One thread each: two that wait for one another take many times as long where other programs run.
    found, printed = measured(tmp_path, "bench_step.py", "--cases", "equal", "--threads", "1", "--ranks", "1")
    assert {"trl", "transformers", "torch", "megatron-core"} <= found["versions"].keys()
    case = found["cases"]["equal"]
    for name in ("ours", "trl"):
        (run,) = case["runs"][name]
        assert run["num_tokens"] == 64 * 64 and run["step_s"] > 0, name
        assert f"| equal | {name}" in printed
    (run,) = case["runs"]["ours"]
    assert {"time/rollout_s", "time/log_probs_s", "time/update_s", "time/control_s"} <= run["times"].keys()
    # Of each phase the rank that took longest counts, so that there may be more than the step, but never both ranks'.
    assert 0.9 * run["step_s"] < sum(run["times"].values()) < 2 * run["step_s"]
