#!/usr/bin/env python3
"""Measure how fast rows are prepared and drawn, and what memory that takes, beside what a step of the quickstart needs.

Rows of each format are written by its own library: sums of random numbers, as the quickstart has. They are prepared
and drawn twice, a tenth of them and all, each in a process of its own: where memory is flat, ten times the rows take no
more. Drawing is in the shuffled order, with the prompt's tokens. What is needed is measured by training the quickstart
for a few steps, unless --needed tells it.

Examples:
  python tools/bench/bench_data.py
  python tools/bench/bench_data.py --rows 1000000 --workers 2 --json data.json --check
  python tools/bench/bench_data.py --rows 10000 --formats jsonl parquet --needed 500

Exit status: 0 done, 1 with --check a bound was missed, 2 an error that was explained.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hybridflow.config.data import DataConfig, DataSourceConfig
from hybridflow.data.pieces import PieceTokenizer, train_tokenizer
from hybridflow.data.problems import open_problems
from hybridflow.data.shaping import Shape
from hybridflow.errors import HybridflowError
from hybridflow.recipe.load import load_recipe

ENDINGS = {"jsonl": ".jsonl", "parquet": ".parquet", "hdf5": ".h5"}
BOUND = 5.0
"""Rows per second that are prepared and drawn, over those that a step of the quickstart uses."""

BOUND_MIB = 64.0
"""What ten times the rows may take more in any process."""

_WRITTEN_AT_ONCE = 50_000
_MOST_DRAWS = 50_000
_STEPS = 4


def main() -> int:
    """Measure, print a table, and compare with the bounds if asked to."""
    options = _parse()
    if options.one is not None:
        print(json.dumps(_measure(Path(options.one), options.workers)))
        return 0
    try:
        with tempfile.TemporaryDirectory(dir=options.work) as made:
            needed = _needed(Path(made)) if options.needed is None else options.needed
            rows = [_case(Path(made), each, options.rows, options.workers) for each in options.formats]
    except HybridflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(rows, needed))
    if options.json is not None:
        options.json.write_text(json.dumps({"needed_per_s": needed, "cases": rows}, indent=1) + "\n", encoding="utf-8")
    missed = [line for row in rows for line in misses(row, needed)]
    for line in missed:
        print(f"missed: {line}")
    return int(options.check and bool(missed))


def table(rows: list[dict[str, Any]], needed: float) -> str:
    """What was measured, in Markdown."""
    lines = [
        "| format | rows | file, MiB | prepared, rows/s | over the need | drawn, rows/s | over the need | peak memory "
        "of a tenth and of all, MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['format']} | {row['num_rows']:,} | {row['file_mib']:.0f} | {row['prepared_per_s']:,.0f} | "
            f"{row['prepared_per_s'] / needed:.0f} x | {row['drawn_per_s']:,.0f} | {row['drawn_per_s'] / needed:.0f} x "
            f"| {row['tenth_mib']:.0f}, {row['peak_mib']:.0f} |"
        )
    return "\n".join([*lines, "", f"a step of the quickstart needs {needed:,.0f} rows/s"])


def misses(row: dict[str, Any], needed: float) -> list[str]:
    """Which bounds a case has missed, in words."""
    found = [
        f"{row['format']}: {name} {row[f'{name}_per_s']:,.0f} rows/s, bound {BOUND * needed:,.0f}"
        for name in ("prepared", "drawn")
        if row[f"{name}_per_s"] < BOUND * needed
    ]
    more = row["peak_mib"] - row["tenth_mib"]
    return found + ([f"{row['format']}: {more:.0f} MiB more, bound {BOUND_MIB:g}"] if more > BOUND_MIB else [])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of each file (default: 1000000)")
    parser.add_argument("--formats", nargs="+", choices=ENDINGS, default=list(ENDINGS), help="which (default: all)")
    parser.add_argument("--workers", type=int, default=2, help="processes that prepare (default: 2)")
    parser.add_argument("--needed", type=float, metavar="PER_S", help="rows per second that a step needs")
    parser.add_argument("--work", type=Path, metavar="DIR", help="where files are made, and removed (default: /tmp)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound is missed")
    parser.add_argument("--one", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is None and options.rows < 10:
        parser.error(f"--rows {options.rows}: a tenth of it is measured too; give 10 or more")
    return options


def _case(folder: Path, file_format: str, num_rows: int, num_workers: int) -> dict[str, Any]:
    """A format, measured with a tenth of the rows and with all."""
    tenth, whole = (_measured(folder, file_format, count, num_workers) for count in (num_rows // 10, num_rows))
    return {"format": file_format, "num_rows": num_rows, "tenth_mib": tenth["peak_mib"], **whole}


def _measured(folder: Path, file_format: str, num_rows: int, num_workers: int) -> dict[str, Any]:
    path = folder / f"{num_rows}{ENDINGS[file_format]}"
    write(path, num_rows)
    command = [sys.executable, __file__, "--one", str(path), "--workers", str(num_workers)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    # Before its last line it tells how far it is.
    found: dict[str, Any] = {"file_mib": path.stat().st_size / 2**20, **json.loads(done.stdout.splitlines()[-1])}
    path.unlink()
    return found


def _measure(path: Path, num_workers: int) -> dict[str, float]:
    """Prepare a file's rows and draw them; the rates, and the largest memory of any process."""
    with tempfile.TemporaryDirectory(dir=path.parent) as made:
        tokenizer = _tokenizer(Path(made))
        data = DataConfig(train=str(path), held_out="none", num_workers=num_workers)
        shape = Shape(data=data, kind="problems", tokenizer=str(tokenizer.path), max_new_tokens=8, max_context=64)
        begin_s = time.perf_counter()
        problems = open_problems([DataSourceConfig(path=str(path))], shape, tokenizer, Path(made), seed=1)
        prepared_s = time.perf_counter() - begin_s
        num_prompts = min(_MOST_DRAWS, problems.num_rows)
        begin_s = time.perf_counter()
        for prompt_index in range(num_prompts):
            problems.prompt(prompt_index)
        drawn_s = time.perf_counter() - begin_s
    # What getrusage says of this process itself begins with the memory of the one that has started it.
    (own,) = (
        line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    peaks = [int(own), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss]
    return {
        "prepared_per_s": problems.num_rows / prepared_s,
        "drawn_per_s": num_prompts / drawn_s,
        "peak_mib": max(peaks) / 2**10,
    }


def _tokenizer(folder: Path) -> PieceTokenizer:
    return train_tokenizer(["0123456789+="], path=folder / "tokenizer.model", vocab_size=64)


def write(path: Path, num_rows: int) -> None:
    """So many sums, by the library of the format that the name tells."""
    prompt_index = random.Random(1)
    pairs = ((prompt_index.randrange(10**6), prompt_index.randrange(10**6)) for _ in range(num_rows))
    rows = ({"prompt": f"{one}+{other}=", "answer": str(one + other)} for one, other in pairs)
    if path.suffix == ".jsonl":
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    elif path.suffix == ".parquet":
        _write_parquet(path, list(rows))
    else:
        _write_hdf5(path, list(rows))


def _write_parquet(path: Path, rows: list[dict[str, str]]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=_WRITTEN_AT_ONCE)


def _write_hdf5(path: Path, rows: list[dict[str, str]]) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for name in rows[0]:
            chunks = (min(len(rows), 4096),)
            file.create_dataset(name, data=[row[name] for row in rows], dtype=h5py.string_dtype(), chunks=chunks)


def _needed(folder: Path) -> float:
    """Prompts per second that a step of the quickstart uses, from training it."""
    settings = [f"run_dir={folder}/run", f"trainer.steps={_STEPS}", "warm_start.steps=2", "trainer.validate_every=0"]
    settings += [f"data.train={folder}/train.jsonl", f"data.held_out={folder}/held_out.jsonl"]
    command = [sys.executable, "-m", "hybridflow", "train", "quickstart", *settings]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    recipe = load_recipe("quickstart")
    step_s = json.loads((folder / "run/summary.json").read_text(encoding="utf-8"))["step_s"]
    return float(recipe.trainer.global_batch_size / recipe.samples_per_prompt / step_s)


if __name__ == "__main__":
    sys.exit(main())
