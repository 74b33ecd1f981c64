#!/usr/bin/env python3
"""Measure context parallelism beside data parallelism: peak of the activations, and wall time at equal tokens.

A random Llama, in fp32 on CPUs, computes loss and gradients of long sequences on two ranks of one thread each. Cases:
cp1, one sequence on each rank alone, for its peak; cp2, each sequence on both ranks; dp2, a sequence on each rank. The
two of a round have two sequences of --tokens each. The best of the rounds counts, since others may work beside.

The peak is of all storages that are alive at one time during forward and backward passes, as PyTorch's operators make
them, without weights and gradients.

Examples:
  python tools/bench/bench_context.py --check
  python tools/bench/bench_context.py --tokens 1024 --repeats 1 --json context.json

Exit status: 0 done, 1 with --check a bound was missed, 2 an error that was explained.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

from rollout_bench.report import Bound, bound_lines, name_missed

from hybridflow.launch.local import run_local
from hybridflow.observe.files import replace_file
from hybridflow.parallel.start import Start, find_start

_PEAK, _WALL = 0.55, 1.15


def main() -> int:
    """Start the ranks, or be one of them; report."""
    options = _parse()
    if options.part is not None:
        found = _be_a_rank(options, find_start())
        if found is not None:
            options.part.write_text(json.dumps(found), encoding="utf-8")
        return 0
    with tempfile.TemporaryDirectory(prefix="bench_context") as folder:
        part = Path(folder, "part.json")
        status = run_local([*sys.argv[1:], "--part", str(part)], num_ranks=2, program=(sys.executable, __file__))
        if status:
            return status
        results = json.loads(part.read_text(encoding="utf-8"))
    if options.json is not None:
        replace_file(options.json, (json.dumps(results, indent=1) + "\n").encode())
    bounds = [
        Bound(
            "peak of the activations, cp2 / cp1",
            results["peak_bytes"]["cp2"] / results["peak_bytes"]["cp1"],
            _PEAK,
            False,
        ),
        Bound(
            "wall time at equal tokens, cp2 / dp2", results["wall_s"]["cp2"] / results["wall_s"]["dp2"], _WALL, False
        ),
    ]
    for name, peak_bytes in results["peak_bytes"].items():
        print(f"{name}: peak {peak_bytes / 2**20:.1f} MiB")
    for name, wall_s in results["wall_s"].items():
        print(f"{name}: {wall_s:.2f} s for 2 × {options.tokens} tokens")
    print("\n".join(bound_lines(bounds)))
    return name_missed(bounds) if options.check else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = (("tokens", 8192), ("layers", 2), ("hidden", 512), ("ffn", 1408), ("heads", 8), ("groups", 2))
    for name, size in sizes:
        what = "of a sequence" if name == "tokens" else "of the model"
        parser.add_argument(f"--{name}", type=int, default=size, help=f"{what} (default: {size})")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, of which the best counts (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound is missed, and name it")
    # What the ranks that this script brings up give back to it.
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _be_a_rank(options: argparse.Namespace, start: Start) -> dict[str, Any] | None:
    """Join the other rank and measure; the results on rank 0, None elsewhere."""
    # Host memory is what is measured here, also where there are GPUs.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    # What megatron-core and torch say about themselves.
    warnings.filterwarnings("ignore", module=r"megatron\b|torch\b")
    import torch
    import torch.distributed as dist

    from hybridflow.parallel.rendezvous import open_store
    from hybridflow.parallel.world import join_world

    torch.set_num_threads(1)
    world = join_world(start, open_store(start, start_deadline_s=300.0), deadline_s=600.0, start_deadline_s=300.0)
    passes = {name: _passes(options, world, name) for name in ("cp1", "cp2", "dp2")}
    peaks: dict[str, float] = {}
    for name in ("cp1", "cp2"):
        peak = torch.tensor(_peak_bytes(lambda name=name: passes[name](1)), dtype=torch.float64)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        peaks[name] = float(peak)
    walls: dict[str, list[float]] = {"dp2": [], "cp2": []}
    for _ in range(options.repeats):
        for name, count in (("dp2", 1), ("cp2", 2)):
            dist.barrier()
            began_s = time.perf_counter()
            passes[name](count)
            taken = torch.tensor(time.perf_counter() - began_s, dtype=torch.float64)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            walls[name].append(float(taken))
    world.close()
    found = {"peak_bytes": peaks, "wall_s": {name: min(each) for name, each in walls.items()}, "walls_s": walls}
    return found if start.rank == 0 else None


def _passes(options: argparse.Namespace, world: Any, name: str) -> Any:
    """Return what computes loss and gradients of a number of sequences, one to a micro-batch. Collective: all ranks."""
    import torch

    from hybridflow.config.roles import OptimizerConfig
    from hybridflow.families.model import ModelConfig
    from hybridflow.layout.mesh import DeviceMesh
    from hybridflow.layout.parallel_layout import ParallelLayout
    from hybridflow.models.gpt import build_transformer
    from hybridflow.models.log_probs import vocab_parallel_log_probs
    from hybridflow.models.microbatch import pack
    from hybridflow.models.shapes import model_spec
    from hybridflow.models.training import Trainable
    from hybridflow.models.weights import initialize
    from hybridflow.parallel.megatron import collection, rank_sets

    vocab = 512
    model = ModelConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        ffn_hidden_size=options.ffn,
        num_attention_heads=options.heads,
        num_query_groups=options.groups,
        max_context=options.tokens,
        vocab_size=vocab,
    )
    layout = ParallelLayout(cp=2) if name == "cp2" else ParallelLayout(dp=2)
    mesh = DeviceMesh(name=name, layout=layout, ranks=(0, 1), ranks_per_node=2)
    world.make_groups(rank_sets([mesh], world.size))
    groups = collection(world, mesh)
    built = build_transformer(model, layout, groups, world.device, vocab_size=vocab)
    spec = model_spec(model)
    initialize(built, spec, mesh, world.rank, seed=1, std=0.02)
    trainable = Trainable(built, groups, OptimizerConfig(lr=1e-3))
    generator = torch.Generator().manual_seed(1)

    def loss(output: Any, batch: Any) -> tuple[Any, None]:
        local = vocab_parallel_log_probs(output, batch.targets, group=groups.tp, vocab_size=vocab)[0]
        return -batch.gathered(local).mean(), None

    def run(count: int) -> None:
        sequences = [torch.randint(0, vocab, (options.tokens,), generator=generator) for _ in range(count)]
        parts = [pack([each], sequences, [1] * count, world.device, groups.cp) for each in range(count)]
        trainable.accumulate(parts, loss)

    return run


def _peak_bytes(run: Any) -> int:
    """Return the most bytes that storages made by operators have at one time."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Watch(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.live: dict[int, int] = {}
            self.total = self.peak = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            known = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if _is_tensor(each)}
            output = func(*args, **(kwargs or {}))
            for each in filter(_is_tensor, tree_leaves(output)):
                storage = each.untyped_storage()
                key = storage._cdata
                if key not in known and key not in self.live:
                    self.live[key] = storage.nbytes()
                    self.total += storage.nbytes()
                    self.peak = max(self.peak, self.total)
                    weakref.finalize(storage, self.forget, key)
            return output

        def forget(self, key: int) -> None:
            self.total -= self.live.pop(key)

    def _is_tensor(value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    with Watch() as watch:
        run()
    return watch.peak


if __name__ == "__main__":
    sys.exit(main())
