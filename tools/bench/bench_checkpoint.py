#!/usr/bin/env python3
"""Measure how long saving a checkpoint holds training up, and what memory going on from one takes.

One process, no other ranks. Two ways of saving the same model in training, in turn: synchronous (every byte hashed,
written and brought to the disk before training goes on, straight out of live memory) and hybridflow's own, which copies
and writes in the background; of that the time until training goes on, and until the checkpoint is complete.

Memory is the peak of a process of its own, up to the end of its second training step: a first start, which makes
initial weights, beside one that goes on from the checkpoint. It is RssAnon, sampled, and VmHWM, which counts mapped
files too.

Examples:
  python tools/bench/bench_checkpoint.py
  python tools/bench/bench_checkpoint.py --layers 2 --hidden 256 --ffn 512 --vocab 1024 --repeats 2
  python tools/bench/bench_checkpoint.py --folder /scratch/me --json checkpoint.json --check

Exit status: 0 done, 1 with --check a bound was missed, 2 an error that was explained.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from hybridflow.errors import HybridflowError

BLOCKED_BOUNDS = {"cpu": 0.30, "cuda": 0.05}
"""On a CPU what is saved is copied from memory to the same memory."""

MEMORY_BOUND = 1.05


def main() -> int:
    """Read the command line; measure in processes of this program, or be one."""
    options = _parse()
    try:
        if options.part is not None:
            print(json.dumps(_measure(options)))
            return 0
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            first = _run("first", folder)
            resumed = _run("resumed", folder)
    except HybridflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results = {"first": first, "resumed": resumed, "bounds": _bounds(first, resumed)}
    print(_markdown(results))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(options.check and not all(found <= bound for found, bound in results["bounds"].values()))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in (("layers", 6), ("hidden", 1024), ("ffn", 2816), ("vocab", 16384)):
        parser.add_argument(f"--{name}", type=int, default=size, help=f"of the model (default: {size})")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights (default: fp32)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds, of which the median counts (default: 5)")
    parser.add_argument(
        "--folder", metavar="DIR", help="where checkpoints are written (default: the system's for such)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound is missed")
    # What the processes that this program starts are told.
    parser.add_argument("--part", choices=("first", "resumed"), help=argparse.SUPPRESS)
    parser.add_argument("--run-dir", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(part: str, folder: str) -> dict[str, Any]:
    """What a process of its own measured.

    Raises:
        SystemExit: It failed; with its exit status.
    """
    command = [sys.executable, __file__, *sys.argv[1:], "--part", part, "--run-dir", folder]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    """One part: build, fill, take two steps; then, of a first start, save again and again."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    # What megatron-core and torch say about themselves.
    warnings.filterwarnings("ignore", module=r"megatron\b|torch\b")
    import torch
    import torch.distributed as dist

    from hybridflow.checkpoint.store import load_latest, open_role
    from hybridflow.checkpoint.training_state import load_training
    from hybridflow.config.roles import OptimizerConfig
    from hybridflow.families.model import ModelConfig
    from hybridflow.layout.mesh import DeviceMesh
    from hybridflow.layout.parallel_layout import ParallelLayout
    from hybridflow.models.gpt import build_transformer
    from hybridflow.models.shapes import model_spec
    from hybridflow.models.training import Trainable
    from hybridflow.models.weights import initialize
    from hybridflow.parallel.megatron import collection, rank_sets
    from hybridflow.parallel.rendezvous import find_device
    from hybridflow.parallel.world import World

    torch.set_num_threads(1)
    store = dist.HashStore()
    world = World(rank=0, size=1, ranks_per_node=1, device=find_device(0), deadline_s=600.0, store=store)
    model = ModelConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        ffn_hidden_size=options.ffn,
        num_attention_heads=8,
        max_context=64,
        vocab_size=options.vocab,
        dtype=options.dtype,
    )
    mesh = DeviceMesh(name="mesh", layout=ParallelLayout(), ranks=(0,), ranks_per_node=1)
    world.make_groups(rank_sets([mesh], 1))
    groups = collection(world, mesh)
    spec = model_spec(model)
    with _peak_memory() as peak:
        built = build_transformer(model, mesh.layout, groups, world.device, vocab_size=options.vocab)
        if options.part == "first":
            initialize(built, spec, mesh, 0, seed=1, std=0.02)
        trainable = Trainable(built, groups, OptimizerConfig(lr=1e-4))
        if options.part == "resumed":
            checkpoint = load_latest(options.run_dir)
            assert checkpoint is not None, "the first part has left no checkpoint"
            load_training(open_role(checkpoint, "actor"), trainable, spec, mesh, 0)
        # Only the second step of a first start has moments beside its activations, as all have that go on.
        for _ in range(2):
            _take_step(trainable, groups, options.vocab, world.device)
    found: dict[str, Any] = {"peak_bytes": peak, "device": world.device.type}
    if options.part == "first":
        found |= _save_in_turn(options, world, trainable, model, spec, mesh)
    world.close()
    return found


def _take_step(trainable: Any, groups: Any, vocab_size: int, device: Any) -> None:
    import torch

    from hybridflow.models.log_probs import vocab_parallel_log_probs
    from hybridflow.models.microbatch import pack

    def loss(output: Any, batch: Any) -> tuple[Any, None]:
        return -vocab_parallel_log_probs(output, batch.targets, group=groups.tp, vocab_size=vocab_size)[0].sum(), None

    trainable.accumulate([pack([0], [torch.arange(16) % vocab_size], [4], device)], loss)
    trainable.step()


def _save_in_turn(
    options: argparse.Namespace, world: Any, trainable: Any, model: Any, spec: Any, mesh: Any
) -> dict[str, Any]:
    """Seconds of both ways, in turn; the last checkpoint is left for the resumed part."""
    from hybridflow.checkpoint.saver import RolePart, Saver, Step
    from hybridflow.checkpoint.training_state import Shares

    shares, seconds = Shares(trainable.model, spec, mesh, 0, trainable), {"synchronous": [], "blocked": [], "whole": []}
    num_bytes = sum(share.values.nbytes for share in shares.now())

    def part(values: list[Any]) -> RolePart:
        return RolePart(
            ranks=(0,),
            model=model,
            has_value_head=False,
            layout=str(mesh.layout),
            spec=spec,
            shares=tuple(values),
            trained=shares.trained(),
            progress=shares.progress(),
            is_frozen=False,
        )

    def save(saver: Saver, number: int, *, copies: bool) -> None:
        values = shares.copied() if copies else list(shares.now())
        parts = {"actor": part(values)}
        saver.save(Step(number=number, state={}, leads={"actor": 0}, parts=parts))

    for turn in range(options.repeats):
        for name in ("synchronous", "asynchronous"):
            # Each in an empty place, so that neither pays for removing what the other wrote.
            shutil.rmtree(options.run_dir / "checkpoints", ignore_errors=True)
            os.sync()
            board = world.new_store(f"{name} {turn}")
            saver = Saver(options.run_dir, 0, board, deadline_s=600.0, keep_last=1, keep_every=0, frozen={})
            begin_s = time.perf_counter()
            save(saver, 1, copies=name == "asynchronous" or world.device.type == "cuda")
            blocked_s = time.perf_counter() - begin_s
            saver.finish(lambda line: None)
            whole_s = time.perf_counter() - begin_s
            if name == "synchronous":
                seconds[name].append(whole_s)
            else:
                seconds["blocked"].append(blocked_s)
                seconds["whole"].append(whole_s)
    return {"num_bytes": num_bytes, "seconds": seconds}


@contextmanager
def _peak_memory() -> Iterator[dict[str, int]]:
    """Fills in what this process needed at most meanwhile, in bytes: ``RssAnon``, sampled, and ``VmHWM``."""
    peak, ended = {"RssAnon": 0, "VmHWM": 0}, threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            peak["RssAnon"] = max(peak["RssAnon"], _status()["RssAnon"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        ended.set()
        watcher.join()
        peak["VmHWM"] = _status()["VmHWM"]


def _status() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    pairs = [line.split(":") for line in lines if line.startswith(("RssAnon", "VmHWM"))]
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def _bounds(first: dict[str, Any], resumed: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Name -> what was found, and its bound."""
    seconds = first["seconds"]
    blocked = median(seconds["blocked"]) / median(seconds["synchronous"])
    found = {"blocked / synchronous": (blocked, BLOCKED_BOUNDS[first["device"]])}
    for name, peak in first["peak_bytes"].items():
        found[f"{name} resumed / first start"] = resumed["peak_bytes"][name] / peak, MEMORY_BOUND
    return found


def _markdown(results: dict[str, Any]) -> str:
    first, resumed = results["first"], results["resumed"]
    size = first["num_bytes"]
    lines = [f"{size / 1e9:.2f} GB a checkpoint, of a model on one {first['device']}", ""]
    lines += ["| saving | median s | GB/s | of each round |", "|---|---|---|---|"]
    for name, seconds in first["seconds"].items():
        middle = median(seconds)
        each = ", ".join(f"{value:.2f}" for value in seconds)
        lines.append(f"| {name} | {middle:.2f} | {size / middle / 1e9:.2f} | {each} |")
    lines += ["", "| peak | first start | resumed |", "|---|---|---|"]
    for name, peak in first["peak_bytes"].items():
        lines.append(f"| {name} | {peak / 1e6:.0f} MB | {resumed['peak_bytes'][name] / 1e6:.0f} MB |")
    lines += ["", "| ratio | found | bound |", "|---|---|---|"]
    lines += [f"| {name} | {found:.3f} | {bound:.2f} |" for name, (found, bound) in results["bounds"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
