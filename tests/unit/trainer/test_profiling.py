"""A trace that cannot be written ends no training, and is not half there."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybridflow.observe.timeline import Timeline
from hybridflow.recipe.load import load_recipe
from hybridflow.trainer.profiling import Profiler
from tests.support.hf_models import write_tokenizer

NAME = "step-000002-rank-00000.json.gz"


def trace_steps(run_dir: Path, *overrides: str, rank: int = 0) -> list[str]:
    """Steps 1 to 3; the files that they left."""
    recipe = load_recipe("quickstart", [f"run_dir={run_dir}", "trainer.steps=3", *overrides])
    timeline = Timeline()
    profiler = Profiler(recipe, rank, timeline)
    for step in (1, 2, 3):
        profiler.begin(step)
        with timeline.span("call", f"call {step}"):
            torch.ones(3) + 1
        profiler.end()
    folder = run_dir / "trace"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_chosen_step_alone_is_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("HYBRIDFLOW_LOG", "json")
    assert trace_steps(tmp_path, "profile.steps=[2, 4]") == [NAME]
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["message"] == f"rank 0: wrote {tmp_path / 'trace' / NAME}"
    events = json.loads(gzip.decompress((tmp_path / "trace" / NAME).read_bytes()))["traceEvents"]
    names = {event["name"] for event in events}
    assert {"call 2", "aten::add"} <= names and not {"call 1", "call 3"} & names


@pytest.mark.parametrize("overrides", [(), ("profile.steps=[2]", "profile.ranks=[1]"), ("profile.steps=[4]",)])
def test_others_are_not(tmp_path: Path, overrides: tuple[str, ...]):
    assert trace_steps(tmp_path, *overrides) == []


@pytest.mark.parametrize("broken", ["os.replace", "gzip.open"])
def test_a_disk_that_refuses_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: str
):
    def fail(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(broken, fail)
        assert trace_steps(tmp_path, "profile.steps=[2]") == []
    assert f"{NAME}: not written: disk full" in capsys.readouterr().err
    assert trace_steps(tmp_path, "profile.steps=[2]") == [NAME]


BROKEN_OFF = """
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from hybridflow.recipe.load import load_recipe
from hybridflow.parallel.rank import silence_libraries

silence_libraries()
from hybridflow.trainer.record import Record

recipe = load_recipe("quickstart", [f"run_dir={sys.argv[1]}", "profile.steps=[3]", "profile.ranks=[1]"])
record = Record(recipe, SimpleNamespace(rank=1, size=2, device=torch.device("cpu")), 1)
record.begin_step(2, None)
record.finish(2, is_done=False)
"""


@pytest.mark.slow
def test_a_job_that_stops_in_a_step_that_is_traced_ends_in_order_and_without_a_trace(tmp_path: Path):
    run = tmp_path / "run"
    done = subprocess.run([sys.executable, "-c", BROKEN_OFF, str(run)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not run.exists()


LEFT_OPEN = """
import sys
from hybridflow import GRPOTrainer

sizes = {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 16, "num_attention_heads": 2, "max_context": 32}
config = {"model": sizes, "enable_profiling": True, "group_size": 2, "max_new_tokens": 4, "run_dir": sys.argv[1]}
trainer = GRPOTrainer(config, tokenizer=sys.argv[2], reward="length")
for _ in range(2):
    trainer.step(["1+1=", "2+3="])
"""


@pytest.mark.slow
def test_a_program_that_does_not_close_its_trainer_ends_in_order(tmp_path: Path):
    write_tokenizer(tmp_path / "tokenizer")
    command = [sys.executable, "-c", LEFT_OPEN, str(tmp_path / "run"), str(tmp_path / "tokenizer")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    names = {path.name for path in (tmp_path / "run" / "trace").glob("step-*")}
    assert names == {f"step-00000{step}-rank-00000.json.gz" for step in (1, 2)}
