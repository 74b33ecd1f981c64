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
from hybridflow.mapping.memory import job_memory
from hybridflow.recipe.load import load_recipe
from hybridflow.recipe.meshes import role_meshes
from hybridflow.rewards.maths import Maths
from hybridflow.rewards.sample import Sample
from tests.support.known_models import GSM8K, write_models

ROOT = Path(__file__).parents[3]

FILES = {path.stem: path for path in sorted((ROOT / "launch/recipes").glob("*.yaml"))}
COPIED = (
    *("grpo-qwen2.5-0.5b", "ppo-llama-3.1-8b", "dpo-qwen3-4b", "sft-llama-3.1-8b", "ppo-70b"),
    "grpo-qwen3-235b-a22b",
)
"""Recipes of real models, that users copy."""
NOT_IN_TABLE = {"split", "calculator", *COPIED}
"""Placements, tools and models, with algorithms that have another row."""


@pytest.fixture(scope="module")
def folder_of_a_user(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    write_models(folder)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_it_is_valid_compiled_and_placed_in_memory(name, folder_of_a_user, monkeypatch, capsys):
    monkeypatch.chdir(folder_of_a_user)
    if name in READS or re.search(r"path: runs/", FILES[name].read_text()):
        pytest.skip("reads what another recipe's run leaves")
    assert cli.main(["plan", "job", name]) == 0, capsys.readouterr().err
    assert "memory of each rank, estimated" in capsys.readouterr().out
    assert load_recipe(name).name == name.replace("++", "-plus-plus")


@pytest.mark.parametrize("name", COPIED)
def test_a_real_model_fits_gpus_of_80_gb_and_says_how_to_fetch_it(name, folder_of_a_user, monkeypatch, capsys):
    monkeypatch.chdir(folder_of_a_user)
    text = FILES[name].read_text()
    # What the comments say to fetch is what the recipe reads, or may be given.
    fetched = re.findall(r"^#   hf download \S+ .*--local-dir (\S+)$", text, flags=re.MULTILINE)
    model = next(folder for folder in fetched if folder.startswith("models/"))
    settings = [] if f"path: {model}\n" in text.partition("\ndata:")[0] else [f"model.path={model}"]
    assert settings or all(f"{folder}/" in text or f"path: {folder}\n" in text for folder in fetched)
    command = re.search(rf"^#   hybridflow (train|launch slurm) {re.escape(name)}", text, flags=re.MULTILINE)
    assert command and len(fetched) == 2
    (row,) = (line for line in (ROOT / "docs/recipes.md").read_text().splitlines() if line.startswith(f"| [{name}]"))
    for ranks in (8, 1) if name == "grpo-qwen2.5-0.5b" else (None,):
        recipe = load_recipe(name, settings, num_ranks=ranks)
        needed = max(rank.peak for rank in job_memory(recipe, role_meshes(recipe)))
        assert 8e9 < needed < 0.9 * 80e9, f"{needed / 1e9:.1f} GB"
        script = ["--script", "--time", "24:00:00"] if ranks is None else []
        assert cli.main(["plan", "job", name, *settings, *script]) == 0, capsys.readouterr().err
        assert not script or "#SBATCH --nodes=" in capsys.readouterr().out
    assert f"| {needed / 1e9:.1f} GB" in row
    data = recipe.data
    if "gsm8k" in (data.train or ""):
        assert {data.prompt_field, data.answer_field} <= set(GSM8K)


def test_the_last_number_of_an_answer_of_gsm8k_is_what_counts():
    pytest.importorskip("math_verify")
    maths = Maths(20.0, "reward.function")
    try:
        for response, score in (("It is \\boxed{72}.", 1.0), ("So there are 72.", 1.0), ("It is 48.", 0.0)):
            sample = Sample(prompt=GSM8K["question"], response=response, answer=GSM8K["answer"], place="row 1")
            assert maths([sample]) == [score], response
    finally:
        maths.close()


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
