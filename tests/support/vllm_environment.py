"""The environment in which vLLM and TRL are installed: who needs it, and what runs in it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm/bin/python"
IS_THERE = (ROOT / ".venv-vllm/.installed").is_file()
NEEDED = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not IS_THERE, reason="needs .venv-vllm: ./tests/support/vllm.sh, or run.sh --all"),
]
"""Marks of tests that need it."""


def environ(*packages: Path) -> dict[str, str]:
    """Variables of a program that finds packages in some folders, and nothing in the net."""
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(map(str, packages))}


def printed_by(command: Sequence[Any], *packages: Path, folder: Path, within_s: float = 500.0) -> str:
    """Run a program in a folder; what it prints."""
    how: dict[str, Any] = {"env": environ(*packages), "cwd": folder, "timeout": within_s, "check": False}
    done = subprocess.run(command, capture_output=True, text=True, **how)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
