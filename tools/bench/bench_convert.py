#!/usr/bin/env python3
"""Measure conversions beside `cp` of the same bytes, in one run on one disk, all taking turns.

The source is a synthetic Llama in bf16, as Hugging Face's safetensors. Before each measurement what was written is
removed, the disk is let come to rest, and the source is read once, so that for all it lies in the page cache as far as
that holds it. `cp` copies the directory, after which each file is synced; it makes no hashes. Conversions are
whole commands, from the start of Python to its end: hashes of every tensor, everything synced, then renamed. What the
start of Python and torch takes of it is shown beside. cp needs little of the processor and a conversion much (hashes),
so on a machine that computes something else besides, the ratio says little; the load is shown too.

Examples:
  python tools/bench/bench_convert.py --check
  python tools/bench/bench_convert.py --gb 4 --repeats 5 --dir /scratch/me --json convert.json

Exit status: 0 done, 1 a conversion failed, or with --check a bound was missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from hybridflow.checkpoint.convert.engine import convert
from hybridflow.checkpoint.formats.registry import make_target
from hybridflow.checkpoint.manifest import TensorEntry
from hybridflow.families.model import ModelConfig
from hybridflow.models.shapes import model_spec

SHARD_BYTES = 2_000_000_000
FIXED_BYTES = 500_000_000
LAYER = ModelConfig(
    num_layers=1,
    hidden_size=4096,
    ffn_hidden_size=11008,
    num_attention_heads=32,
    num_query_groups=8,
    max_context=4096,
    vocab_size=32000,
    dtype="bf16",
)
"""Llama's sizes, whose number of layers is chosen for the number of bytes."""


class Case(NamedTuple):
    """A conversion and how fast it is to be.

    Attributes:
        name: For the report.
        out: Name of the result.
        options: Of the command.
        least_ratio: Of its speed to that of cp.
    """

    name: str
    out: str
    options: tuple[str, ...]
    least_ratio: float


CASES = (
    Case("hf -> megatron tp2.pp2", "sharded", ("--to", "megatron", "--layout", "tp2.pp2"), 0.5),
    Case("hf -> hdf5", "model.h5", ("--to", "hdf5"), 0.25),
)


class RandomSource:
    """A Llama of random bits, those of finite numbers, see ``hybridflow.checkpoint.source.Source``."""

    path, format, family, layout, has_value_head = Path("random"), "random", "llama", None, False

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        specs = model_spec(model).tensors
        self.tensors = {spec.name: TensorEntry(spec.dtype, spec.shape) for spec in specs}
        self._generator = torch.Generator().manual_seed(0)

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(2 * math.prod(entry.shape) for entry in self.tensors.values())

    def read(self, tensor: str) -> torch.Tensor:
        """See ``Source``."""
        shape = self.tensors[tensor].shape
        words = torch.randint(-(2**63), 2**63 - 1, (-(-math.prod(shape) // 4),), generator=self._generator)
        # Without the highest bit of the exponent a number is below 2.
        bits = words.view(torch.int16).bitwise_and_(~0x4000)
        return bits[: math.prod(shape)].view(torch.bfloat16).view(shape)

    def release(self) -> None:
        """See ``Source``."""

    def assets(self) -> dict[str, bytes]:
        """See ``Source``."""
        return {}

    def identity(self) -> str:
        """See ``Source``."""
        return hashlib.sha256(repr(self.model).encode()).hexdigest()


def main() -> int:
    """Make the source, let all take turns, and report."""
    options = _parse()
    with tempfile.TemporaryDirectory(prefix="bench-convert-", dir=options.dir) as name:
        folder = Path(name)
        source = _make(folder / "source", options.gb)
        seconds: dict[str, list[float]] = {name: [] for name in ("cp", *(case.name for case in CASES))}
        peaks: dict[str, int] = {}
        starts: dict[str, list[float]] = {case.name: [] for case in CASES}
        for _ in range(options.repeats):
            seconds["cp"].append(_timed(lambda: _copy(folder / "source", folder / "copy"), folder))
            for case in CASES:
                done: list[dict[str, Any]] = []
                seconds[case.name].append(_timed(lambda case=case, done=done: done.append(_run(case, folder)), folder))
                starts[case.name].append(seconds[case.name][-1] - done[0]["seconds"])
                peaks[case.name] = max(peaks.get(case.name, 0), done[0]["peak_rss_anon_bytes"])
    largest = max(2 * math.prod(entry.shape) for entry in source.tensors.values())
    result = _result(source.num_bytes, 2 * largest + FIXED_BYTES, seconds, starts, peaks)
    print(_report(result, largest))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    missed = [case["name"] for case in result["conversions"] if not case["passes"]]
    return int(options.check and bool(missed))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0, help="size of the model, in powers of 1000 (default: 4)")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each, whose median counts (default: 3)")
    parser.add_argument("--dir", type=Path, help="where to write, with room for twice the size (default: TMPDIR)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bound is missed")
    return parser.parse_args()


def _make(path: Path, gb: float) -> RandomSource:
    """Write the synthetic model."""
    one, two = (RandomSource(dataclasses.replace(LAYER, num_layers=layers)).num_bytes for layers in (1, 2))
    # Two equal pipeline stages.
    layers = max(2, 2 * round((gb * 1e9 - 2 * one + two) / (two - one) / 2))
    source = RandomSource(dataclasses.replace(LAYER, num_layers=layers))
    convert(source, make_target("hf", source, max_shard_bytes=SHARD_BYTES), path, what={"to": "hf"})
    return source


def _timed(work: Callable[[], None], folder: Path) -> float:
    """Seconds of some work, after which what it wrote is removed."""
    os.sync()
    for path in sorted((folder / "source").iterdir()):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass
    start = time.monotonic()
    work()
    seconds = time.monotonic() - start
    for path in folder.iterdir():
        if path.name != "source":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return seconds


def _copy(source: Path, target: Path) -> None:
    """cp, and everything synced."""
    subprocess.run(["cp", "-r", "--reflink=never", source, target], check=True)
    for path in (*target.iterdir(), target, target.parent):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _run(case: Case, folder: Path) -> dict[str, Any]:
    """A conversion as a command."""
    command = [sys.executable, "-m", "hybridflow", "convert", folder / "source", folder / case.out, *case.options]
    done = subprocess.run([*command, "--json", "--quiet"], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(1)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _result(
    num_bytes: int,
    bound: int,
    seconds: dict[str, list[float]],
    starts: dict[str, list[float]],
    peaks: dict[str, int],
) -> dict[str, Any]:
    conversions = []
    for case in CASES:
        ratio = median(seconds["cp"]) / median(seconds[case.name])
        conversions.append(
            {
                "name": case.name,
                "seconds": seconds[case.name],
                "start_seconds": starts[case.name],
                "ratio": ratio,
                "least_ratio": case.least_ratio,
                "peak_rss_anon_bytes": peaks[case.name],
                "passes": ratio >= case.least_ratio and peaks[case.name] <= bound,
            }
        )
    return {
        "bytes": num_bytes,
        "memory_bound": bound,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[1],
        "cp_seconds": seconds["cp"],
        "conversions": conversions,
    }


def _report(result: dict[str, Any], largest: int) -> str:
    def row(name: str, seconds: list[float], *rest: str) -> str:
        spread = f"{min(seconds):.1f} to {max(seconds):.1f}"
        speed = f"{result['bytes'] / median(seconds) / 1e6:.0f} MB/s"
        return "| " + " | ".join((name, f"{median(seconds):.1f} s ({spread})", speed, *rest)) + " |"

    lines = [
        f"{result['bytes'] / 1e9:.2f} GB, largest tensor {largest / 1e6:.0f} MB, "
        f"RssAnon at most {result['memory_bound'] / 1e6:.0f} MB; load {result['load']:.1f} on "
        f"{result['cores']} core(s)\n",
        "| | median (spread) | speed | start of it | beside cp | at least | peak RssAnon | holds |",
        "|---|---|---|---|---|---|---|---|",
        row("cp, synced", result["cp_seconds"], "", "1", "", "", ""),
    ]
    for case in result["conversions"]:
        start, peak = f"{median(case['start_seconds']):.1f} s", f"{case['peak_rss_anon_bytes'] / 1e6:.0f} MB"
        rest = start, f"{case['ratio']:.2f}", f"{case['least_ratio']}", peak
        lines.append(row(case["name"], case["seconds"], *rest, "yes" if case["passes"] else "NO"))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
