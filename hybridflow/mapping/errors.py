"""How far estimates are from published measurements."""

from __future__ import annotations

from typing import Any

ERRORS = {
    ("train", "h100-sxm"): (3.5, "three steps of Megatron-LM on 48 to 192 H100, to which the shares were fitted"),
    ("train", "a100-80g"): (3.5, "eight steps of arXiv 2205.05198, table 5, to which the shares were fitted"),
    ("generate", "h100-sxm"): (2.0, "three measurements of Llama 8B in TensorRT-LLM, to which the shares were fitted"),
    ("step", "h100-sxm"): (47.0, "one GRPO step of NeMo-RL, which took longer; what the formulas leave out is in it"),
}
"""Largest difference from published measurements in percent, and from which."""


def published_error(what: str, machine: str, *, is_known: bool) -> dict[str, Any]:
    """Return how far estimates are from what was published.

    Args:
        what: Phase, or ``step``.
        machine: Name of the hardware.
        is_known: Whether what was estimated is of a kind that was compared.
    """
    error = ERRORS.get((what, machine)) if is_known else None
    percent, compared_with = error or (None, "nothing: no measurement was compared")
    return {"percent": percent, "compared_with": compared_with}


def error_text(error: dict[str, Any]) -> str:
    """Return it in words."""
    within = "" if error["percent"] is None else f"within {error['percent']} % of "
    return f"time: {within}{error['compared_with']}"
