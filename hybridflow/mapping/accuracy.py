"""How far estimates are from published measurements."""

from __future__ import annotations

from typing import Any

from hybridflow.mapping.hardware import Hardware

_NEMO = "published steps of Megatron-LM and NeMo, to some of which the shares were fitted"
_KERNELS = "sums of measured kernels of TensorRT-LLM"

ERRORS = {
    ("train", "h100-sxm"): (8.0, f"24 {_NEMO}"),
    ("train fp8", "h100-sxm"): (12.6, f"33 {_NEMO}"),
    ("train", "a100-80g"): (8.2, "19 steps of arXiv 2205.05198 and 2104.04473, to 9 of which the shares were fitted"),
    ("train", "a100-80g-fused"): (13.2, "7 steps of MPT in PyTorch FSDP, to some of which the shares were fitted"),
    ("train", "b200"): (8.7, "16 steps of Megatron-LM on one node, to some of which the shares were fitted"),
    ("train fp8", "b200"): (18.2, "2 published steps of NeMo"),
    ("train mixture", "b200"): (12.2, "4 steps of DeepSeek-V3's layers on one node, to which a figure was fitted"),
    ("train fp8 mixture", "b200"): (11.6, "3 published steps of Megatron Bridge"),
    ("train fp8 mixture", "h100-sxm"): (44.4, "1 published step of Megatron Bridge, which took longer"),
    ("generate fp8 mixture", "h100-sxm"): (19.4, f"4 {_KERNELS} for Mixtral 8x7B"),
    ("generate fp8 mixture", "h200"): (23.2, f"4 {_KERNELS} for Mixtral 8x7B"),
    ("generate mixture", "a100-80g-fused"): (40.9, f"4 {_KERNELS} for Mixtral 8x7B"),
    ("generate", "h100-sxm"): (11.7, f"19 {_KERNELS}, to some of which the shares were fitted"),
    ("generate mixture", "h100-sxm"): (10.3, f"5 {_KERNELS}"),
    ("generate fp8", "h100-sxm"): (19.6, f"19 {_KERNELS}, to 7 of which a figure was fitted"),
    ("generate", "h200"): (9.2, f"8 {_KERNELS}"),
    ("generate fp8", "h200"): (32.7, f"14 {_KERNELS}"),
    ("generate", "b200"): (14.6, f"8 {_KERNELS}"),
    ("generate", "a100-80g-fused"): (17.9, f"17 {_KERNELS}"),
    ("step", "h100-sxm"): (18.3, "seven GRPO steps of NeMo-RL with dense models, to some of which figures were fitted"),
    ("step of a mixture", "h100-sxm"): (56.5, "eight GRPO steps of NeMo-RL with mixtures; DeepSeek-V3 took longer"),
}
"""Largest difference from published measurements in percent, and from which."""


def known_error(what: str, name: str, machine: Hardware, *, is_known: bool) -> dict[str, Any]:
    """Return how far estimates are from what was published; for measured hardware, from what was measured.

    Args:
        what: Phase, ``step`` or ``step of a mixture``.
        name: Of the hardware.
        machine: Its figures.
        is_known: Whether what was estimated is of a kind that was compared.
    """
    error = ERRORS.get((what, name)) if is_known else None
    if machine.error_percent is not None:
        error = machine.error_percent, "the phases of measured steps, to which figures were fitted"
    percent, compared_with = error or (None, "nothing: no measurement was compared")
    return {"percent": percent, "compared_with": compared_with}


def error_text(error: dict[str, Any]) -> str:
    """Return it in words."""
    within = "" if error["percent"] is None else f"within {error['percent']} % of "
    return f"time: {within}{error['compared_with']}"
