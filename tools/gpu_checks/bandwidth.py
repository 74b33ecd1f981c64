"""How fast two ranks on one GPU turn weights of tp2 into whole copies, beside plain copies of as many bytes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from gpu_checks.common import CheckError, build, fill, result, run, seconds_of, shape

_PART = "part.json"


def main(argument: str, is_dry: bool) -> dict[str, Any]:
    """Start two ranks of this program; with an argument, be one."""
    from hybridflow.launch.local import run_local

    if argument:
        _be_a_rank(is_dry)
        return {}
    os.environ["HYBRIDFLOW_SHARE_GPU"] = "1"
    program = (sys.executable, "-m", "gpu_checks.bandwidth")
    status = run_local(["rank", *["--dry-run"] * is_dry], num_ranks=2, program=program)
    if status:
        raise CheckError(f"a rank ended with status {status}; the log says why")
    found = json.loads(Path(_PART).read_text(encoding="utf-8"))
    rates = {name: found["bytes"] / found[f"{name}_s"] for name in ("copy", "shared", "torch")}
    share = rates["shared"] / rates["copy"]
    text = f"{found['bytes'] / 1e9:.2f} GB: " + ", ".join(
        f"{name} {rate / 1e9:.1f} GB/s" for name, rate in rates.items()
    )
    bounds = {} if is_dry else {"shared over copy": (share, ">=", 0.7)}
    return result(f"{text}; shared over copy {share:.2f}", bounds, {**found, "share": share})


def _be_a_rank(is_dry: bool) -> None:
    """Measure on all ranks at once; the first writes the seconds of the slowest, and the bytes of all."""
    import torch

    from hybridflow.models.shapes import model_spec
    from hybridflow.models.weights import local_shards
    from hybridflow.parallel.rendezvous import open_store
    from hybridflow.parallel.start import find_start
    from hybridflow.parallel.world import join_world
    from hybridflow.reshard.execute import Resharder
    from hybridflow.reshard.holdings import WeightHoldings

    start = find_start()
    world = join_world(start, open_store(start, start_deadline_s=120.0), deadline_s=120.0, start_deadline_s=120.0)
    model = shape("1.5b", is_dry, context=512)
    sides, tensors = [], []
    for layout in ("tp2", "dp2"):
        built, mesh, _ = build(world, model, layout)
        fill(built)
        spec = model_spec(model)
        sides.append(WeightHoldings(spec, mesh))
        tensors.append({name: held for name, (held, _) in local_shards(built, spec, mesh, world.rank).items()})
    gather = world.coordinator((0, 1)).gather
    found: dict[str, float] = {}
    for transport in ("shared", "torch"):
        resharder = Resharder(
            world, spec, *sides, source_tensors=tensors[0], target_tensors=tensors[1], transport=transport
        )
        seconds = [max(gather(resharder.run().time_s)) for _ in range(4)]
        found[f"{transport}_s"] = min(seconds[1:])
        stats = resharder.run()
        found["bytes"] = sum(gather(stats.received_bytes + stats.local_bytes))
    one, other = (torch.empty(int(found["bytes"]) // 2, dtype=torch.uint8, device=world.device) for _ in range(2))
    gather(None)
    found["copy_s"] = max(gather(seconds_of(lambda: one.copy_(other))))
    if world.rank == 0:
        Path(_PART).write_text(json.dumps(found), encoding="utf-8")
    world.close()


if __name__ == "__main__":
    run(main)
