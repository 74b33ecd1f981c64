#!/usr/bin/env python3
"""Measure how long a job takes from ``sbatch`` to its first training step, beside a plain start on the same machine.

Starts a Slurm cluster of two virtual nodes on this machine (tests/support/slurm_cluster.py). The same tiny job of
four ranks goes on from the same checkpoint, in turn: by ``hybridflow train``, and by ``sbatch --nodes=2
slurm/train.sbatch``. The clock stops when the metrics of its first step are in metrics.jsonl.

Examples:
  python tools/bench/bench_start.py
  python tools/bench/bench_start.py --repeats 3 --json start.json --check

Exit status: 0 done, 1 with --check the bound was missed, or a job failed, 2 there is no Slurm here.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.slurm.jobs import SCRIPTS, output, steps, train_first_step
from tests.support.slurm_cluster import SlurmCluster, missing_programs

BOUND_S = 15.0
"""What a start through Slurm may take more."""

_ARGUMENTS = ("tiny.yaml", "trainer.steps=2")
_WITHIN_S = 300.0


def main() -> int:
    """Measure, print a table, and compare with the bound if asked to."""
    options = _parse()
    if missing := missing_programs():
        print(
            f"no Slurm here: {', '.join(missing)} not found; tests/support/slurm.sh installs it on Debian",
            file=sys.stderr,
        )
        return 2
    # What megatron-core and torch say about themselves.
    warnings.filterwarnings("ignore", module=r"megatron\b|torch\b")
    plain_s, slurm_s = [], []
    with tempfile.TemporaryDirectory() as made, SlurmCluster(num_nodes=2) as cluster:
        first = Path(made, "first")
        first.mkdir()
        train_first_step(first)
        for each in range(options.repeats):
            plain_s.append(_plain(Path(shutil.copytree(first, Path(made, f"plain-{each}")))))
            slurm_s.append(_through_slurm(cluster, Path(shutil.copytree(first, Path(made, f"slurm-{each}")))))
    more_s = median(slurm_s) - median(plain_s)
    print("| start | median, s | least, s | most, s |\n|---|---|---|---|")
    for name, found_s in (("hybridflow train", plain_s), ("sbatch train.sbatch", slurm_s)):
        print(f"| {name} | {median(found_s):.1f} | {min(found_s):.1f} | {max(found_s):.1f} |")
    print(f"\nthrough Slurm {more_s:+.1f} s, bound {BOUND_S:g} s, {options.repeats} starts of each")
    if options.json is not None:
        options.json.write_text(json.dumps({"plain_s": plain_s, "slurm_s": slurm_s}, indent=1) + "\n", encoding="utf-8")
    return int(options.check and more_s > BOUND_S)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="starts of each kind (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    parser.add_argument("--check", action="store_true", help="exit 1 where the bound is missed")
    return parser.parse_args()


def _plain(folder: Path) -> float:
    """Seconds to the first step of a plain start."""
    began_s = time.monotonic()
    command = [sys.executable, "-m", "hybridflow", "train", *_ARGUMENTS, "--resume"]
    with Path(folder, "out").open("wb") as log:
        child = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=dict(os.environ))
        taken_s = _to_first_step(folder, began_s, lambda: child.poll() not in (None, 0))
        if child.wait(_WITHIN_S):
            raise SystemExit(f"hybridflow train failed:\n{Path(folder, 'out').read_text()}")
    return taken_s


def _through_slurm(cluster: SlurmCluster, folder: Path) -> float:
    """Seconds from sbatch to the first step."""
    began_s = time.monotonic()
    job = cluster.sbatch("--nodes=2", "--ntasks-per-node=2", str(SCRIPTS / "train.sbatch"), *_ARGUMENTS, cwd=folder)
    taken_s = _to_first_step(folder, began_s, lambda: cluster.job(job)["JobState"] == "FAILED")
    if cluster.wait_for_end(job, within_s=_WITHIN_S)["JobState"] != "COMPLETED":
        raise SystemExit(f"the job failed:\n{output(cluster, job)}")
    return taken_s


def _to_first_step(folder: Path, began_s: float, has_failed: Callable[[], bool]) -> float:
    while 2 not in steps(folder):
        if has_failed() or time.monotonic() > began_s + _WITHIN_S:
            raise SystemExit(f"no step within {time.monotonic() - began_s:.0f} s, see {folder}")
        time.sleep(0.05)
    return time.monotonic() - began_s


if __name__ == "__main__":
    sys.exit(main())
