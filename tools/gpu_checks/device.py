"""What the device is, and how fast it copies and multiplies."""

from __future__ import annotations

from typing import Any

from gpu_checks.common import GIB, copy_rate, facts, product_rate, result, run


def main(argument: str, is_dry: bool) -> dict[str, Any]:
    """Measure the yardsticks of the other checks."""
    import torch

    found: dict[str, Any] = {**facts(), "copy_bytes_per_s": copy_rate(is_dry), "bf16_flop_per_s": product_rate(is_dry)}
    text = (
        f"copy {found['copy_bytes_per_s'] / 1e12:.2f} TB/s, bf16 products {found['bf16_flop_per_s'] / 1e12:.0f} TFLOP/s"
    )
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["memory_bytes"], found["processors"] = properties.total_memory, properties.multi_processor_count
        text = f"{found['memory_bytes'] / GIB:.0f} GiB, {found['processors']} multiprocessors, {text}"
    return result(text, {}, found)


if __name__ == "__main__":
    run(main)
