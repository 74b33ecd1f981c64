#!/usr/bin/env python3
"""Measure resharding against its rivals and its limits, in one run, all taking turns.

Started plainly it brings up 8 and then 4 ranks on this machine. Under mpirun, torchrun or srun it joins the ranks that
are there, and measures the pairs of so many ranks. Everything is in host memory, of which 8 ranks take up to 14 GB with
the default model of 258 MB, and goes over gloo, or over MPI.

Rivals: megatron (megatron.core.resharding), gather (all-gather everything, then slice), dcp (a checkpoint of
torch.distributed through /dev/shm), dtensor (where it applies), and bare: the bytes of the plan and nothing else, in
one message for each pair of ranks, which gives the bandwidth that the limit of the wall time is computed with.

Examples:
  python tools/bench/bench_reshard.py --json reshard.json
  python tools/bench/bench_reshard.py --ranks 4 --pairs tp4-tp2.dp2 tp2.pp2-dp4 --layers 4 --hidden 64 --ffn 128
  mpirun -n 8 python tools/bench/bench_reshard.py --transports torch shared mpi

Exit status: 0 done, 1 some rival gave wrong values, or with --check a bound was missed, 2 an error that was explained.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from reshard_bench.pairs import choose
from reshard_bench.report import bounds, is_exact, markdown

from hybridflow.errors import HybridflowError
from hybridflow.launch.local import run_local
from hybridflow.parallel.start import Start, find_start, rank_hint


def main() -> int:
    """Read the command line; start the ranks, or be one."""
    options = _parse()
    try:
        start = find_start()
        results = _start_ranks(options) if start.launcher == "alone" else _be_a_rank(options, start)
    except HybridflowError as error:
        if rank_hint() == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    if results is None:
        return 0
    if options.part is not None:
        options.part.write_text(json.dumps(results), encoding="utf-8")
        return 0
    print(markdown(results))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    missed = options.check and any(bound.passes is False for bound in bounds(results))
    return int(missed or not is_exact(results))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", help="only pairs of so many ranks (default: 8, and then 4)")
    parser.add_argument("--pairs", nargs="+", metavar="PAIR", help="only these, by their names in the report")
    parser.add_argument(
        "--transports",
        nargs="*",
        choices=("torch", "shared", "mpi"),
        default=["torch", "shared"],
        help="hybridflow's own (default: torch shared); mpi where mpirun started the ranks",
    )
    parser.add_argument("--repeats", type=int, default=5, help="rounds, of which the median counts (default: 5)")
    for name, size in (("layers", 8), ("hidden", 768), ("ffn", 2048), ("vocab", 8192)):
        parser.add_argument(f"--{name}", type=int, default=size, help=f"of the model (default: {size})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    parser.add_argument("--check", action="store_true", help="exit 1 also where a bound is missed")
    # What the ranks that this script brings up give back to it.
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _start_ranks(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Bring up ranks on this machine, once for each number of them.

    Raises:
        SystemExit: They failed; with their exit status.
    """
    results: list[dict[str, Any]] = []
    counts = dict.fromkeys(pair.num_ranks for pair in choose(options.pairs, options.ranks))
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            part = Path(folder, f"{count}.json")
            command = [*sys.argv[1:], "--part", str(part)]
            status = run_local(command, num_ranks=count, program=(sys.executable, __file__))
            if status:
                raise SystemExit(status)
            results += [
                {**result, "launcher": "this script"} for result in json.loads(part.read_text(encoding="utf-8"))
            ]
    return results


def _be_a_rank(options: argparse.Namespace, start: Start) -> list[dict[str, Any]] | None:
    """Join the other ranks and measure; the results on rank 0, None elsewhere."""
    # Host memory is what is measured here, also where there are GPUs.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    # What megatron-core and torch say about themselves.
    warnings.filterwarnings("ignore", module=r"megatron\b|torch\b")
    import torch
    from reshard_bench.bench import bench

    from hybridflow.families.model import ModelConfig
    from hybridflow.parallel.rendezvous import open_store
    from hybridflow.parallel.world import join_world

    model = ModelConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        ffn_hidden_size=options.ffn,
        # Head counts that every tp of the pairs divides.
        num_attention_heads=16,
        num_query_groups=8,
        max_context=64,
        vocab_size=options.vocab,
        vocab_divisible_by=1,
    )
    torch.set_num_threads(1)
    store = open_store(start, start_deadline_s=300.0)
    world = join_world(start, store, deadline_s=300.0, start_deadline_s=300.0)
    result = bench(world, model, names=options.pairs, transports=options.transports, repeats=options.repeats)
    world.close()
    return [{**result, "launcher": start.launcher}] if start.rank == 0 else None


if __name__ == "__main__":
    sys.exit(main())
