"""A run whose layouts are searched when it starts."""

import subprocess
import sys

import pytest
import yaml

from hybridflow.observe.starts import read_starts
from tests.support.machines import write_machine


@pytest.mark.slow
def test_a_run_trains_in_the_layouts_that_were_found_and_keeps_them(tmp_path):
    machine = write_machine(tmp_path / "machine.yaml")
    settings = ["layout=auto", f"cluster.hardware={machine}", "warm_start=null", "trainer.validate_every=0"]
    settings += [f"data.train={tmp_path}/train.jsonl", f"data.held_out={tmp_path}/held_out.jsonl"]
    for steps, more in ((1, []), (2, ["--resume"])):
        command = [
            sys.executable,
            "-m",
            "hybridflow",
            "train",
            "quickstart",
            *settings,
            f"trainer.steps={steps}",
            *more,
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("layout: auto: ") == 1 and f"step {steps}/{steps}" in done.stdout
    run_dir = tmp_path / "runs/quickstart"
    first, again = (yaml.safe_load((run_dir / f"logs/000{number}/recipe.yaml").read_text()) for number in (1, 2))
    assert first["layout"] is None and first["actor"] == again["actor"] and first["critic"] == again["critic"]
    # Not those of the shipped recipe, which four ranks share.
    assert read_starts(run_dir)[0].layouts["actor.update"] != "tp2.pp1.dp2"
