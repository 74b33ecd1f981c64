"""``hybridflow doctor --nodes`` in jobs of a real Slurm: it starts itself on all nodes, and compares them."""

import json
import sys

import pytest

pytestmark = pytest.mark.slurm

DOCTOR = f"{sys.executable} -m hybridflow doctor"


def test_a_batch_job_reports_on_all_its_nodes(cluster, tmp_path):
    (tmp_path / "run").mkdir()
    # Two tasks a node for the job; the doctor takes one.
    script = f"{DOCTOR} --nodes --json run > found.json; echo $? > status"
    job = cluster.sbatch("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=2", f"--wrap={script}", cwd=tmp_path)
    ended = cluster.wait_for_end(job, within_s=300)
    log = next(tmp_path.glob("slurm-*.out")).read_text()
    assert ended["JobState"] == "COMPLETED" and (tmp_path / "found.json").stat().st_size, log
    found = json.loads((tmp_path / "found.json").read_text())
    # Virtual nodes share the cores of one machine, so one may well look slow; which status follows is still told.
    assert int((tmp_path / "status").read_text()) == (2 if found["verdict"] == "problem" else 0)
    assert len(found["nodes"]) == 2 and len(found["pairs"]) == 1
    assert all(set(each["speeds"]) == {"matmul", "memory", "network", "disk"} for each in found["nodes"])
    names = {each["name"]: each for each in found["findings"]}
    assert names["run directory"]["value"] == "the same on all 2 nodes"
    assert names["version"]["value"].count(".") == 2 and f"this job {job}" in names
    assert not list((tmp_path / "run").iterdir())
