#!/usr/bin/env python3
"""Run the shipped recipe of each algorithm, and write what each has learned into docs/algorithms.md.

Every recipe runs as a user would start it, in a folder of its own, what it needs of another recipe's run before it. One
that has finished there, with the recipe as it is now, is not run again. The table has what these runs measured, and
nothing else.

Examples:
  python tools/table_algorithms.py
  python tools/table_algorithms.py --only grpo dapo --folder /tmp/table
  python tools/table_algorithms.py --dry-run

Exit status: 0 done, 1 a run failed, 2 what was asked for is not there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from write_docs import with_part

from hybridflow.errors import ConfigError, HybridflowError
from hybridflow.observe.files import replace_file
from hybridflow.recipe.load import find_recipe
from hybridflow.sections import parse_yaml

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "algorithms.md"
PAPERS = {
    "quickstart": "1707.06347",
    "grpo": "2402.03300",
    "dr-grpo": "2503.20783",
    "dapo": "2503.14476",
    "gspo": "2507.18071",
    "cispo": "2506.13585",
    "rloo": "2402.14740",
    "reinforce++": "2501.03262",
    "reinforce++-baseline": "2501.03262",
    "remax": "2310.10505",
    "opo": "2505.23585",
    "safe-rlhf": "2310.12773",
    "sft": None,
    "reward-model": "1706.03741",
    "dpo": "2305.18290",
    "ipo": "2310.12036",
    "kto": "2402.01306",
    "distill": "2306.13649",
    "lora": "2106.09685",
    "async": None,
}
"""Recipe -> where its algorithm is from, arXiv number; in the order of the table, without those that do not ship."""

READS = {"distill": {"teacher.model.path": "sft"}}
"""Recipe -> key that it leaves open -> recipe whose last actor belongs there."""

_MEASURED = "table.json"


@dataclass(frozen=True)
class Row:
    """A recipe that ships.

    Attributes:
        name: Of the recipe.
        algorithm: What it trains with.
        run_dir: Where its run keeps its files, below the folder.
        needs: Recipes whose runs it reads.
        sha256: Of its file.
    """

    name: str
    algorithm: str
    run_dir: str
    needs: tuple[str, ...]
    sha256: str


def main() -> int:
    """Read the command line, run what has not been run, and write the table."""
    options = _parse()
    try:
        rows = shipped()
        chosen = in_order(rows, options.only or list(rows))
    except HybridflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    folder = options.folder.resolve()
    failed: set[str] = set()
    for number, row in enumerate(chosen, start=1):
        found = measured(row, folder)
        told = f"[{number}/{len(chosen)}] {row.name}"
        if found is not None:
            print(f"{told}: {_outcome(found)}, in {found['seconds']:.0f} s (has been run)")
        elif options.dry_run:
            print(
                f"{told}: {' '.join(command(row, folder))}" + (f", after {', '.join(row.needs)}" if row.needs else "")
            )
        elif missing := failed & set(row.needs):
            failed.add(row.name)
            print(f"{told}: left out, since {', '.join(sorted(missing))} failed")
        else:
            print(f"{told}: {' '.join(command(row, folder))} …", flush=True)
            if not run(row, folder):
                failed.add(row.name)
    if not options.dry_run:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_part(page, "table", table(rows, folder), str(PAGE)), encoding="utf-8")
        print(f"wrote {PAGE}")
    return int(bool(failed))


def shipped() -> dict[str, Row]:
    """The recipes of the table, by name."""
    found = {}
    for name in PAPERS:
        try:
            path = find_recipe(name)
        except ConfigError:
            continue
        text = path.read_text(encoding="utf-8")
        values = parse_yaml(text, str(path))
        run_dir = values.get("run_dir", f"runs/{values['name']}")
        found[name] = Row(name, values["algorithm"], run_dir, (), hashlib.sha256(text.encode()).hexdigest())
    owners = {row.run_dir: name for name, row in found.items()}
    for name, row in found.items():
        read = dict.fromkeys(re.findall(r"\bruns/[\w.-]+", find_recipe(name).read_text(encoding="utf-8")))
        needs = [owners[each] for each in read if each in owners and owners[each] != name]
        needs += READS.get(name, {}).values()
        found[name] = Row(name, row.algorithm, row.run_dir, tuple(dict.fromkeys(needs)), row.sha256)
    return found


def in_order(rows: dict[str, Row], names: Sequence[str]) -> list[Row]:
    """Some recipes and all that they need, each behind what it needs.

    Raises:
        ConfigError: A name is none of a recipe here.
    """
    found: dict[str, Row] = {}

    def add(name: str) -> None:
        if name not in rows:
            raise ConfigError(f"--only {name}: no such recipe; expected some of {', '.join(rows)}")
        if name not in found:
            for other in rows[name].needs:
                add(other)
            found[name] = rows[name]

    for name in names:
        add(name)
    return list(found.values())


def command(row: Row, folder: Path) -> list[str]:
    """What a user would type in the folder; a step that is not there yet is called STEP."""
    words = ["hybridflow", "train", row.name]
    for key, other in READS.get(row.name, {}).items():
        latest = folder / "runs" / other / "checkpoints" / "latest"
        step = latest.read_text(encoding="utf-8").strip() if latest.is_file() else "STEP"
        words.append(f"{key}=runs/{other}/checkpoints/{step}/actor")
    return words


def run(row: Row, folder: Path) -> bool:
    """Run a recipe from its beginning, and keep what it measured beside it; whether it finished."""
    run_dir, log = folder / row.run_dir, folder / f"{row.name}.log"
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    begin_s = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        words = [sys.executable, "-m", *command(row, folder)]
        code = subprocess.run(words, cwd=folder, env=environ, stdout=file, stderr=file, check=False).returncode
    seconds = time.monotonic() - begin_s
    summary = run_dir / "summary.json"
    if code or not summary.is_file():
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        print(f"  failed with exit status {code}: {lines[-1] if lines else ''} (see {log})", flush=True)
        return False
    kept = {
        "sha256": row.sha256,
        "seconds": seconds,
        "machine": machine(),
        "summary": json.loads(summary.read_text(encoding="utf-8")),
    }
    replace_file(run_dir / _MEASURED, json.dumps(kept, indent=1).encode())
    print(f"  {_outcome(kept)}, in {seconds:.0f} s", flush=True)
    return True


def measured(row: Row, folder: Path) -> dict[str, Any] | None:
    """What a finished run of the recipe as it is now has measured; None: there is none."""
    path = folder / row.run_dir / _MEASURED
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found if found["sha256"] == row.sha256 else None


def machine() -> str:
    """Processor, and how many of its cores there are for this."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        named = re.search(r"^model name\s*: (.*)$", info.read_text(encoding="utf-8"), flags=re.MULTILINE)
        processor = named[1] if named is not None else processor
    return f"{len(os.sched_getaffinity(0))} cores of {processor}"


def table(rows: dict[str, Row], folder: Path) -> str:
    """The table in Markdown, of the runs that are there."""
    lines = ["| algorithm | from | command | before | after | steps | seconds |", "|---|---|---|---|---|---|---|"]
    machines = []
    for row in rows.values():
        paper = PAPERS[row.name]
        source = "–" if paper is None else f"[{paper}](https://arxiv.org/abs/{paper})"
        found = measured(row, folder)
        figures = ["not measured", "", "", ""]
        if found is not None:
            summary = found["summary"]
            figures = [f"{summary[f'accuracy_{when}_rl']:.1%}" for when in ("before", "after")]
            figures += [str(summary["steps"]), f"{found['seconds']:.0f}"]
            machines.append(found["machine"])
        name = row.name if row.name in ("lora", "async") else row.algorithm
        typed = " ".join(command(row, folder))
        lines.append(f"| {' | '.join([name, source, f'`{typed}`', *figures])} |")
    told = f"Measured on {'; '.join(dict.fromkeys(machines))}." if machines else "Nothing has been measured yet."
    return "\n".join([told, "", *lines])


def _outcome(found: dict[str, Any]) -> str:
    summary = found["summary"]
    return (
        f"{summary['accuracy_before_rl']:.1%} before, {summary['accuracy_after_rl']:.1%} after {summary['steps']} steps"
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="recipes to run, with what they need; default: all")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/table"), help="where the runs are; default: runs/table"
    )
    parser.add_argument("--dry-run", action="store_true", help="tell what would be run, in order, and write nothing")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
