"""The GPU path on a machine without a GPU: tests/cuda, in an environment with torch's CUDA build."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INTERPRETED = {"TRITON_INTERPRET": "1"}
IS_THERE = (ROOT / ".venv-cuda/.installed").is_file()

pytestmark = [
    pytest.mark.cuda_build,
    pytest.mark.skipif(not IS_THERE, reason="needs torch's CUDA build: ./tests/support/cuda.sh, or run.sh --all"),
]


@pytest.mark.parametrize(
    ("folders", "marks", "environment"),
    [
        pytest.param(["interpreted"], "not long", INTERPRETED, id="kernels in Triton's interpreter"),
        pytest.param(["interpreted"], "long", INTERPRETED, marks=pytest.mark.long, id="more kernels in it"),
        pytest.param(["compiled", "fake"], "not long", {}, id="compiled kernels, fake tensors"),
    ],
)
def test_the_gpu_path_without_a_gpu(folders, marks, environment):
    python = ROOT / ".venv-cuda/bin/python"
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks]
    command += [f"tests/cuda/{each}" for each in folders]
    # Hidden, so that a machine with a GPU shows the same.
    env = {**os.environ, **environment, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
