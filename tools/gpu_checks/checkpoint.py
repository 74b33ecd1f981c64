"""How long a save of a 0.27B model in bf16 holds training up: bench_checkpoint.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_checks.common import CheckError, result, run

_BENCH = Path(__file__).parents[1] / "bench/bench_checkpoint.py"
_SIZES = {"layers": 8, "hidden": 1024, "ffn": 4096, "vocab": 65536}
"""4 GB a checkpoint, since many disks of temporary files write no more than 1 GB a second."""

_TOY = {"layers": 2, "hidden": 64, "ffn": 96, "vocab": 512}


def main(argument: str, is_dry: bool) -> dict[str, Any]:
    """Run it, on the disk of temporary files."""
    sizes = _TOY if is_dry else _SIZES
    command = [sys.executable, _BENCH, "--dtype", "bf16", "--repeats", "1" if is_dry else "2", "--json", "found.json"]
    command += [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        raise CheckError(f"bench_checkpoint.py ended with status {done.returncode}; the log says why")
    found = json.loads(Path("found.json").read_text(encoding="utf-8"))
    shares = {name: value for name, (value, _) in found["bounds"].items()}
    bounds = {} if is_dry else {name: (value, "<=", most) for name, (value, most) in found["bounds"].items()}
    text = ", ".join(f"{name} {value:.3f}" for name, value in shares.items())
    return result(f"{found['first']['num_bytes'] / 1e9:.2f} GB: {text}", bounds, found)


if __name__ == "__main__":
    run(main)
