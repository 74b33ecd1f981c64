"""The benchmark of rollout beside its real rivals, on the smallest model: it runs, and its figures hang together."""

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
@pytest.mark.skipif(not IS_THERE, reason="needs vLLM in .venv-vllm: ./tests/support/vllm.sh, or run.sh --all")
def test_all_engines_are_measured_on_the_same_weights(tmp_path):
    command = [sys.executable, ROOT / "tools/bench/bench_rollout.py", "--models", "2m", "--cases", "equal", "prefix"]
    command += ["--alone", "2m", "--repeats", "1", "--batches", "64"]
    command += ["--json", tmp_path / "found.json", "--work", tmp_path / "work"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
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
        assert f"| equal | {name}" in done.stdout
    # Half of 64 prompts' 512 tokens at least is shared, or samples share nothing.
    assert 8 * 512 * 0.9 < found["alone"]["prefix"]["computed_tokens"] < 64 * 512 / 2
