"""Estimates beside the measured times of a run: in its status and on its page."""

import json
import re
from pathlib import Path

import pytest

from hybridflow import cli
from hybridflow.mapping.planned import planned_run
from tests.support.machines import write_machine, write_run


@pytest.fixture
def run_dir(tmp_path):
    run_dir = write_run(tmp_path / "run")
    recipe = run_dir / "logs/0001/recipe.yaml"
    machine = write_machine(tmp_path / "machine.yaml")
    text = recipe.read_text(encoding="utf-8")
    recipe.write_text(text.replace("  ranks: 4\n", f"  ranks: 4\n  hardware: {machine}\n", 1), encoding="utf-8")
    (run_dir / "starts.jsonl").write_text('{"number": 1, "began_s": 1.0, "step": null, "ranks": 4, "hosts": ["n"]}\n')
    return run_dir


def planned_of(run_dir, capsys):
    assert cli.main(["status", str(run_dir), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["planned"]


def test_the_estimate_is_that_of_plan_estimate(run_dir, capsys):
    planned = planned_of(run_dir, capsys)
    words = ["plan", "estimate", "quickstart", "--hardware", planned["hardware"], "--prompt", "8"]
    assert cli.main([*words, "--response", "4", "--json"]) == 0
    estimated = json.loads(capsys.readouterr().out)
    # Lengths are 3.5 on average, and the option takes whole numbers.
    assert planned["step_s"] == pytest.approx(estimated["seconds"], rel=0.1)
    updates = sum(call["seconds"] for call in estimated["calls"] if call["name"].endswith(".update"))
    assert planned["phases_s"]["update"] == pytest.approx(updates, rel=0.1)
    assert cli.main(["status", str(run_dir)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  planned")]
    assert f"{planned['step_s']:.2f} s a step: update {planned['phases_s']['update']:.2f}, rollout" in line


def test_the_page_has_it_too(run_dir, capsys):
    assert cli.main(["report", str(run_dir)]) == 0
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    capsys.readouterr()
    (told,) = re.findall(r'"planned":(\{[^}]*\}[^}]*\})', page)
    assert json.loads(told) == planned_of(run_dir, capsys)


def test_a_run_without_named_hardware_or_with_unknown_hardware_has_none(run_dir, tmp_path, capsys):
    (tmp_path / "machine.yaml").unlink()
    assert planned_of(run_dir, capsys) is None
    assert planned_of(write_run(tmp_path / "other"), capsys) is None
    assert cli.main(["status", str(tmp_path / "other")]) == 0
    assert "planned" not in capsys.readouterr().out


def test_of_a_long_run_without_named_hardware_no_metrics_are_read(tmp_path):
    run_dir = write_run(tmp_path / "run")
    with (run_dir / "metrics.jsonl").open("a", encoding="utf-8") as file:
        for step in range(5, 20_000):
            file.write(json.dumps({"step": step, **{f"time/{number:08d}_s": 0.125 for number in range(20)}}) + "\n")
    assert planned_run(run_dir, flow_of=None) is None
    read_before = bytes_read()
    assert planned_run(run_dir, flow_of=None) is None
    assert bytes_read() - read_before < (run_dir / "metrics.jsonl").stat().st_size // 10


def bytes_read():
    """Return how many bytes this process has read, from disk or cache."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])
