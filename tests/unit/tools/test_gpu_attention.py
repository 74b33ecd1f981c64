"""The kit's check of attention: it passes here, and fails where queries and keys are aligned at the wrong end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from gpu_checks import attention  # noqa: E402


@pytest.mark.slow
def test_samples_with_a_shared_prompt_show_which_end_is_aligned(monkeypatch):
    assert attention.main("", True)["passed"]
    # The first query sees the first key alone, as in kernels that align queries and keys at their first ones.
    monkeypatch.setattr(
        attention, "_behind", lambda keys, alone: torch.arange(keys - alone)[:, None] - torch.arange(keys)
    )
    found = attention.main("", True)
    missed = [name for name in attention._CASES if f"{name}: difference of outputs is" in found["result"]]
    assert not found["passed"] and missed == list(attention._CASES)
