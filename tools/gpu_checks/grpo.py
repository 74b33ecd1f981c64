"""GRPO steps of a shape: tokens per second, share of the measured peak, and memory beside the plan's."""

from __future__ import annotations

import gc
from pathlib import Path
from statistics import median
from typing import Any

from gpu_checks.common import GIB, RECIPE, find_device, make_world, product_rate, result, run, settings, train

_PHASES = ("rollout", "log_probs", "update", "reshard", "control")


def main(argument: str, is_dry: bool) -> dict[str, Any]:
    """Take 3 steps of 256 samples of a size, a key of ``SHAPES``; the first does not count."""
    import torch

    from hybridflow.mapping.memory import job_memory, with_micro_batches
    from hybridflow.recipe.load import load_recipe
    from hybridflow.trainer.meter import peak_flops
    from hybridflow.trainer.plan import plan_job

    samples, response = (16, 8) if is_dry else (256, 512)
    recipe = {
        **RECIPE,
        "model": settings(argument, is_dry, context=response + 32),
        "actor": {"update": {"tp": 1}, "optimizer": {"lr": 1e-6}},
        "rollout": {"max_new_tokens": response, "group_size": 8},
        "trainer": {
            "steps": 1000,
            "global_batch_size": samples,
            "mini_batch_size": samples // 2,
            "num_validation": 1,
        },
    }
    peak = product_rate(is_dry)
    # The job gets the whole GPU.
    gc.collect()
    torch.cuda.empty_cache()
    rows = train("job", recipe=recipe, stop_after=3)[1:3]
    checked = load_recipe(Path("job/recipe.yaml"))
    meshes = plan_job(checked).meshes
    # As the job does.
    checked = with_micro_batches(checked, meshes, make_world().gpu_bytes())
    planned = max(rank.peak for rank in job_memory(checked, meshes))
    middle = {key: median(row[key] for row in rows if key in row) for key in rows[-1]}
    used = max(value for key, value in rows[-1].items() if key.startswith("memory/"))
    share = middle["mfu/update"] * peak_flops(find_device(), torch.float32 if is_dry else torch.bfloat16) / peak
    phases = ", ".join(f"{phase} {middle[f'time/{phase}_s']:.2f}" for phase in _PHASES)
    text = (
        f"{middle['throughput/tokens_per_s']:,.0f} tokens/s; update {share:.1%} of the measured bf16 peak; "
        f"{middle['time/step_s']:.2f} s a step ({phases}); micro-batches of "
        f"{checked.trainer.micro_batch_tokens:,} tokens; peak memory {used / GIB:.1f} GiB, planned {planned / GIB:.1f}"
    )
    bounds = {"share of peak": (share, ">=", 0.4)} if argument == "1.5b" and not is_dry else {}
    return result(text, bounds, {**middle, "update_share": share, "peak_bytes": used, "planned_bytes": planned})


if __name__ == "__main__":
    run(main)
