"""The benchmark of context parallelism: a run of it on short sequences."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[3] / "tools/bench/bench_context.py"


@pytest.mark.slow
def test_half_of_the_tokens_take_half_of_the_memory(tmp_path):
    report = tmp_path / "found.json"
    words = ["--tokens", "256", "--hidden", "64", "--ffn", "96", "--repeats", "1", "--json", str(report)]
    ended = subprocess.run([sys.executable, str(TOOL), *words], capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(report.read_text())
    assert 0.4 < found["peak_bytes"]["cp2"] / found["peak_bytes"]["cp1"] < 0.65
    assert all(wall_s > 0 for wall_s in found["wall_s"].values()) and "cp2 / dp2" in ended.stdout
