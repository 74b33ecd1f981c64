"""The benchmark of the data: a small run of it, its bounds and its table."""

import json
import sys
from pathlib import Path

import bench_data
import pytest

from tests.e2e.commands import run_command

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_a_small_run_measures_every_format(tmp_path):
    pytest.importorskip("pyarrow")
    argv = ["--rows", "300", "--needed", "0.1", "--check", "--json", "data.json", "--work", "."]
    environ = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = run_command(argv, tmp_path, program=[sys.executable, ROOT / "tools/bench/bench_data.py"], environ=environ)
    assert done.codes == (0,), done.err
    assert [line.split(" | ")[0] for line in done.out.splitlines()[2:5]] == ["| jsonl", "| parquet", "| hdf5"]
    found = json.loads((tmp_path / "data.json").read_text())
    assert found["needed_per_s"] == 0.1 and all(case["num_rows"] == 300 for case in found["cases"])
    assert [path.name for path in tmp_path.iterdir()] == ["data.json"], "what was made is removed"


def test_bounds():
    row = {"format": "jsonl", "prepared_per_s": 5000.0, "drawn_per_s": 4999.0, "tenth_mib": 90.0, "peak_mib": 155.0}
    assert bench_data.misses(row, 1000.0) == [
        "jsonl: drawn 4,999 rows/s, bound 5,000",
        "jsonl: 65 MiB more, bound 64",
    ]
    assert bench_data.misses({**row, "drawn_per_s": 5000.0, "peak_mib": 154.0}, 1000.0) == []
