"""``hybridflow doctor --measure``: the figures of this machine with which ``hybridflow plan`` estimates times."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import yaml

from hybridflow.config.recipe import Recipe
from hybridflow.dataflow.graph import Flow
from hybridflow.errors import ConfigError, HybridflowError
from hybridflow.exit_status import DONE
from hybridflow.mapping.fit import Observed, estimated_phases, fitted, observed_run, recipe_of
from hybridflow.mapping.hardware import MEASURED, MEASURED_FILE, Hardware
from hybridflow.observe.console import print_out
from hybridflow.observe.files import replace_file
from hybridflow.observe.table import format_table
from hybridflow.sections import changed_keys, to_dict

_PROBE_S = 600.0
_STEPS = {"cuda": 4, "cpu": 6}
"""Of which the first does not count."""

_NARROW = {"cuda": 1024, "cpu": 128}
_GUESSED = {
    "cuda": {
        **{"launch": 3e-5, "pass_host": 1e-3, "update_launch": 1e-4, "node_latency": 2e-5, "engine_launch": 5e-4},
        **{"cache_share": 0.8, "node_share": 0.7},
    },
    "cpu": {
        **{"launch": 5e-4, "pass_launch": 5e-4, "update_launch": 5e-4, "node_latency": 5e-4},
        **{"cache_share": 0.5, "node_share": 0.1},
    },
}
"""From which the fit begins; seconds are for a rank alone."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A short training whose steps are timed.

    Attributes:
        name: For a person.
        overrides: Of the recipe ``quickstart``.
    """

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """What the short trainings of a kind of device override.

    Attributes:
        common: Of all of them.
        small_batches: Of one with many short passes and few texts at a time.
        wider: Of one whose products take most of the time.
        longer: Of one that reads many keys and values when it generates; none where other parts hide that.
    """

    common: tuple[str, ...]
    small_batches: tuple[str, ...]
    wider: tuple[str, ...]
    longer: tuple[str, ...] = ()


_CPU_SIZES = _Sizes(
    common=("model.dtype=fp32",),
    small_batches=("trainer.micro_batch_tokens=128", "rollout.max_concurrent=8"),
    wider=("model.hidden_size=384", "model.ffn_hidden_size=1536"),
)
_GPU_SIZES = _Sizes(
    # With so many tokens to choose from, a model that has learned nothing ends hardly a text.
    common=(
        *("model.dtype=bf16", "model.vocab_size=32768", "model.tied_embeddings=true", "model.num_layers=8"),
        *("model.hidden_size=512", "model.ffn_hidden_size=2048", "model.max_context=288"),
        *("rollout.max_new_tokens=256", "trainer.micro_batch_tokens=8192", "loss.epochs=1"),
    ),
    small_batches=("trainer.micro_batch_tokens=2048", "rollout.max_concurrent=16"),
    # Its layers take longer than the host takes to start their kernels.
    wider=(
        *("model.num_layers=2", "model.hidden_size=2048", "model.ffn_hidden_size=16384"),
        *("model.num_attention_heads=16", "trainer.micro_batch_tokens=16384"),
    ),
    longer=("model.max_context=2080", "rollout.max_new_tokens=2048"),
)


def measure(arguments: argparse.Namespace, flow_of: Callable[[Recipe], Flow]) -> int:
    """Measure, write the file and print how near the estimates are; return the exit status.

    Raises:
        ConfigError: The file cannot be written.
        HybridflowError: A short training failed.
    """
    path = (arguments.out or MEASURED_FILE).expanduser()
    check_writable(path)
    num_ranks = arguments.ranks or _default_ranks()
    hardware = raw_figures(num_ranks)
    print_out(f"measuring {num_ranks} ranks: {hardware.flops * hardware.crowding:.3g} operations/s of a rank alone")
    chosen, observed = probes(num_ranks, "cpu" if hardware.is_cpu else "cuda"), []
    with tempfile.TemporaryDirectory(prefix="hybridflow-measure-") as folder:
        for number, probe in enumerate(chosen, 1):
            observed.append(run_probe(probe, Path(folder) / str(number)))
            seconds = sum(observed[-1].seconds.values())
            print_out(f"  {number}/{len(chosen)} {probe.name}: {seconds:.3g} s a step")
    found = fitted(hardware, observed, flow_of)
    rows, worst = [("phase", "measured", "estimated")], 0.0
    for probe, one in zip(chosen, observed, strict=True):
        for name, seconds in estimated_phases(one, flow_of(one.recipe), found).items():
            rows.append((f"{probe.name}, {name}", f"{one.seconds[name]:.3f} s", f"{seconds:.3f} s"))
            worst = max(worst, abs(seconds / one.seconds[name] - 1))
    found = replace(found, error_percent=round(100 * worst, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, file_text(found).encode())
    name = MEASURED if arguments.out is None else str(path)
    print_out(
        "\n".join([*format_table(rows, num_left=1), f"wrote {path}: hybridflow plan auto RECIPE --hardware {name}"])
    )
    return DONE


def check_writable(path: Path) -> None:
    """Refuse a file that could not be written after minutes of measuring. Raises ConfigError."""
    folder = next(parent for parent in path.parents if parent.exists())
    if path.suffix not in (".yaml", ".yml") or path.is_dir():
        raise ConfigError(f"--out {path}: expected a file NAME.yaml")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"--out {path}: {folder} cannot be written to; name another file")


def _default_ranks() -> int:
    import torch

    return torch.cuda.device_count() or len(os.sched_getaffinity(0))


def raw_figures(num_ranks: int) -> Hardware:
    """Return what products and copies tell, for a rank while all ``num_ranks`` of this machine work."""
    import torch

    from hybridflow.doctor import measure as rates

    device = rates.devices()[0]
    is_gpu = device.type == "cuda"
    torch.set_num_threads(1)
    crowding = 1.0 if is_gpu else max(1.0, num_ranks / len(os.sched_getaffinity(0)))
    narrow = _NARROW[device.type]
    flops, narrow_flops = rates.matmul_flops_per_s(device), rates.matmul_flops_per_s(device, narrow)
    # A core's products of small matrices may be the faster ones.
    flops = max(flops, narrow_flops)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / num_ranks
    bandwidth = rates.memory_bytes_per_s(device) / crowding
    guessed = {
        name: value if name.endswith("_share") else crowding * value for name, value in _GUESSED[device.type].items()
    }
    return Hardware(
        dtype="bf16" if is_gpu else "fp32",
        ranks_per_node=num_ranks,
        crowding=crowding,
        flops=flops / crowding,
        memory_bytes=float(torch.cuda.get_device_properties(device).total_memory) if is_gpu else memory,
        memory_bandwidth=bandwidth,
        # What is reached of it is fitted.
        node_bandwidth=bandwidth,
        network_bandwidth=0.0,
        host_bandwidth=rates.host_bytes_per_s(device) if is_gpu else bandwidth,
        product_share=1.0,
        half_size=narrow * (math.sqrt(flops / narrow_flops) - 1),
        attention_share=min(1.0, rates.attention_flops_per_s(device) / flops) if is_gpu else 0.1,
        host_share=1.0,
        **guessed,
    )


def probes(num_ranks: int, device_type: str) -> list[Probe]:
    """Return the short trainings: what differs between them tells the figures apart."""
    sizes = _GPU_SIZES if device_type == "cuda" else _CPU_SIZES
    samples = 128 * num_ranks
    common = (
        *("warm_start=null", "trainer.validate_every=0", f"cluster.ranks={num_ranks}", *sizes.common),
        *(
            f"trainer.steps={_STEPS[device_type]}",
            f"trainer.global_batch_size={samples}",
            f"trainer.mini_batch_size={samples // 2}",
        ),
    )

    def of(name: str, layout: str, *overrides: str) -> Probe:
        meshes = ("actor.update", "actor.rollout", "critic.layout", "reference.layout")
        # A rollout is not cut into stages.
        layouts = [
            layout if "pp" not in layout or mesh != "actor.rollout" else f"{{dp: {num_ranks}}}" for mesh in meshes
        ]
        cut = tuple(f"{mesh}={each}" for mesh, each in zip(meshes, layouts, strict=True))
        return Probe(name=name, overrides=(*common, *cut, *overrides))

    data, tensor = f"{{dp: {num_ranks}}}", f"{{tp: {min(num_ranks, 4)}, dp: {num_ranks // min(num_ranks, 4)}}}"
    found = [
        of("data parallel", data),
        of("small micro-batches", data, *sizes.small_batches),
        of("wider", data, *sizes.wider),
    ]
    if sizes.longer:
        fewer = (f"trainer.global_batch_size={samples // 2}", f"trainer.mini_batch_size={samples // 4}")
        found.append(of("longer", data, *sizes.longer, *fewer))
    if num_ranks in (2, 4) or num_ranks % 4 == 0:
        found.append(of("tensor parallel", tensor))
        found.append(of("wider, tensor parallel", tensor, *sizes.wider))
    if num_ranks % 2 == 0:
        found.append(of("pipeline parallel", f"{{pp: 2, dp: {num_ranks // 2}}}"))
    return found


def run_probe(probe: Probe, folder: Path) -> Observed:
    """Train, and return what its steps took.

    Raises:
        HybridflowError: The training failed, or took too long.
    """
    data = (f"data.train={folder}/train.jsonl", f"data.held_out={folder}/held_out.jsonl", f"run_dir={folder}/run")
    command = [sys.executable, "-m", "hybridflow", "train", "quickstart", *probe.overrides, *data]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        raise HybridflowError(f"doctor --measure: {probe.name}: not done within {_PROBE_S:g} s") from None
    if done.returncode != 0:
        last = "\n".join(done.stderr.splitlines()[-5:])
        raise HybridflowError(
            f"doctor --measure: {probe.name}: {' '.join(command)}: exit status {done.returncode}\n{last}"
        )
    return observed_run(folder / "run", recipe_of(folder / "run"))


def file_text(hardware: Hardware) -> str:
    """Return what ``mapping.hardware`` reads, with the keys that differ from their defaults."""
    values = to_dict(hardware)
    required = [item.name for item in dataclasses.fields(Hardware) if item.default is dataclasses.MISSING]
    kept = {name: values[name] for name in values if name in (*required, *changed_keys(hardware))}
    kept = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in kept.items()}
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    head = f"# {socket.gethostname()}, {now}: measured by `hybridflow doctor --measure`. Bytes, seconds, operations.\n"
    return head + yaml.safe_dump(kept, sort_keys=False)
