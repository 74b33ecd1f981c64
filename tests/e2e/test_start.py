"""The same job however its ranks are started."""

import json
import os
import shutil
import sys
import textwrap
from pathlib import Path

import pytest

from tests.e2e.commands import lasting_metrics, run_command, write_recipe

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TORCHRUN += ["-m", "hybridflow"]
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")

# Counts the coordinator's messages by transport, then runs the command.
COUNTED = """
import collections, json, os, sys
from hybridflow.cli import main
from hybridflow.parallel import coordinator, mpi

counts = collections.Counter()

def count(kind, name):
    whole = getattr(kind, name)
    def counted(self, *args):
        counts[f"{kind.__name__}.{name}"] += 1
        return whole(self, *args)
    setattr(kind, name, counted)

for kind in (coordinator.GlooMessenger, mpi.MpiMessenger):
    for name in ("broadcast", "gather", "exchange"):
        count(kind, name)
status = main(sys.argv[1:])
with open(f"counts-{os.environ['PMI_RANK']}", "w") as file:
    json.dump(counts, file)
sys.exit(status)
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A whole run, started plainly."""
    folder = tmp_path_factory.mktemp("plain")
    write_recipe(folder)
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return run_command(["train", "tiny.yaml"], folder, environ=environ), folder


def test_started_plainly(plain):
    done, folder = plain
    assert done.codes == (0,) and done.err == ""
    assert [row["actor/grad_norm"] > 0 for row in lasting_metrics(folder / "run")] == [True, True]
    assert "step 2/2 | reward" in done.out and "\ndone: 2 steps in " in done.out
    assert (folder / "run/report.html").exists()
    summary = json.loads((folder / "run/summary.json").read_text())
    assert summary["steps"] == 2 and summary["tokens_per_s"] > 0
    assert list((folder / "run/tensorboard").iterdir())


@pytest.mark.slow
def test_under_torchrun(plain, tmp_path):
    write_recipe(tmp_path)
    done = run_command(["train", "tiny.yaml"], tmp_path, program=TORCHRUN)
    assert done.codes == (0,), done.err
    assert lasting_metrics(tmp_path / "run") == lasting_metrics(plain[1] / "run")


@pytest.mark.slow
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun beside python or in PATH")
def test_under_mpirun_messages_go_over_mpi(plain, tmp_path):
    write_recipe(tmp_path)
    program = [MPIRUN, "-n", "2", sys.executable, "-c", textwrap.dedent(COUNTED)]
    done = run_command(["train", "tiny.yaml"], tmp_path, program=program)
    assert done.codes == (0,), done.err
    assert lasting_metrics(tmp_path / "run") == lasting_metrics(plain[1] / "run")
    for rank in (0, 1):
        counts = json.loads((tmp_path / f"counts-{rank}").read_text())
        assert counts["MpiMessenger.gather"] > 4 and counts["MpiMessenger.exchange"] > 0
        # Once for each optimizer: megatron-core compares its parameter groups in a process group.
        assert counts.pop("GlooMessenger.gather") <= 2 and not any(name.startswith("Gloo") for name in counts)
