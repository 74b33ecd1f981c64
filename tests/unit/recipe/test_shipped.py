"""The recipes that come with the package are valid and can be placed; and the tool that runs them for the table."""

import json
import re
import sys
from pathlib import Path

import pytest
import table_algorithms
from table_algorithms import PAPERS, READS, Row, command, in_order, measured, shipped, table

from hybridflow import cli
from hybridflow.errors import ConfigError
from hybridflow.flows.registry import ALGORITHMS
from hybridflow.recipe.load import load_recipe

ROOT = Path(__file__).parents[3]

FILES = {path.stem: path for path in sorted((ROOT / "launch/recipes").glob("*.yaml"))}
NOT_IN_TABLE = {"split", "calculator", "ppo-70b"}
"""Placements and tools, with algorithms that have another row."""


@pytest.mark.parametrize("name", FILES)
def test_it_is_valid_compiled_and_placed_in_memory(name, capsys):
    if name in READS or re.search(r"path: runs/", FILES[name].read_text()):
        pytest.skip("reads what another recipe's run leaves")
    assert cli.main(["plan", "job", name]) == 0, capsys.readouterr().err
    assert "memory of each rank, estimated" in capsys.readouterr().out
    assert load_recipe(name).name == name.replace("++", "-plus-plus")


def test_every_algorithm_has_a_recipe_and_every_recipe_a_row():
    algorithms = {found["algorithm"] for found in map(_values, FILES.values())}
    assert algorithms == set(ALGORITHMS)
    assert set(FILES) - NOT_IN_TABLE == set(shipped()) <= set(PAPERS)


def _values(path):
    return table_algorithms.parse_yaml(path.read_text(), str(path))


def _rows(**needs):
    return {name: Row(name, "grpo", f"runs/{name}", tuple(read), "as now") for name, read in needs.items()}


def test_a_run_comes_behind_those_that_it_reads():
    rows = _rows(distill=["sft"], grpo=[], rlhf=["reward", "sft"], reward=[], sft=[])
    assert [row.name for row in in_order(rows, list(rows))] == ["sft", "distill", "grpo", "reward", "rlhf"]
    assert [row.name for row in in_order(rows, ["rlhf"])] == ["reward", "sft", "rlhf"]
    with pytest.raises(ConfigError, match="--only ppo: no such recipe; expected some of distill, grpo"):
        in_order(rows, ["ppo"])


def test_a_run_reads_the_last_actor_of_another(tmp_path):
    row = shipped()["distill"]
    assert row.needs == ("sft",)
    assert command(row, tmp_path)[3:] == ["teacher.model.path=runs/sft/checkpoints/STEP/actor"]
    (tmp_path / "runs/sft/checkpoints").mkdir(parents=True)
    (tmp_path / "runs/sft/checkpoints/latest").write_text("step_000600\n")
    assert command(row, tmp_path)[3:] == ["teacher.model.path=runs/sft/checkpoints/step_000600/actor"]


def test_the_table_has_what_was_measured_with_the_recipe_as_it_is(tmp_path):
    rows = _rows(grpo=[], dapo=[], opo=[])
    for name, sha256 in (("grpo", "as now"), ("dapo", "before")):
        folder = tmp_path / rows[name].run_dir
        folder.mkdir(parents=True)
        summary = {"accuracy_before_rl": 0.125, "accuracy_after_rl": 0.75, "steps": 9}
        kept = {"sha256": sha256, "seconds": 61.4, "machine": "2 cores of it", "summary": summary}
        (folder / "table.json").write_text(json.dumps(kept))
    assert measured(rows["dapo"], tmp_path) is None
    written = table(rows, tmp_path).splitlines()
    assert written[0] == "Measured on 2 cores of it."
    assert written[4].endswith("| `hybridflow train grpo` | 12.5% | 75.0% | 9 | 61 |")
    assert written[5].endswith("| `hybridflow train dapo` | not measured |  |  |  |")


def test_a_run_that_fails_is_no_row_and_what_reads_it_is_left_out(tmp_path, monkeypatch, capsys):
    page = tmp_path / "algorithms.md"
    page.write_text("<!-- table -->\n<!-- end of table -->")
    rows = _rows(sft=[], distill=["sft"])
    monkeypatch.setattr(table_algorithms, "shipped", lambda: rows)
    monkeypatch.setattr(table_algorithms, "PAGE", page)
    monkeypatch.setattr(table_algorithms, "run", lambda row, folder: row.name != "sft")
    monkeypatch.setattr(sys, "argv", ["table_algorithms.py", "--folder", str(tmp_path)])
    assert table_algorithms.main() == 1
    assert "[2/2] distill: left out, since sft failed" in capsys.readouterr().out
    assert page.read_text().count("not measured") == 2
