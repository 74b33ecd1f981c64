"""The cluster of the other tests: what it promises, in both isolations."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.jobs import SCRIPTS, output, steps
from tests.support.slurm_cluster import SlurmCluster, find_isolation, missing_programs

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(bool(missing_programs()), reason="no Slurm here: tests/support/slurm.sh installs it"),
]

# A process that dies in the midst of a job.
CRASH = """
import os, signal, sys
from pathlib import Path
from tests.support.slurm_cluster import SlurmCluster
cluster = SlurmCluster(num_nodes=2, isolation=sys.argv[1])
cluster.start()
job = cluster.sbatch("--nodes=2", "--wrap", "srun bash -c 'echo $$ > $SLURM_PROCID; sleep 600'", cwd=Path.cwd())
cluster.wait_for(lambda: all(Path(rank).exists() and Path(rank).read_text() for rank in "01"), within_s=300, what="up")
print(cluster.folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(params=["net", "plain"])
def isolation(request):
    if request.param == "net" and find_isolation() != "net":
        pytest.skip("namespaces and network devices cannot be made here: needs root with CAP_SYS_ADMIN, CAP_NET_ADMIN")
    return request.param


def sleepers(folder):
    """Processes that have this working directory."""
    return [path.parent.name for path in Path("/proc").glob("[0-9]*/cwd") if links_to(path, folder)]


def links_to(path, folder):
    try:
        return os.readlink(path) == str(folder)
    except OSError:
        return False


def test_crash_leaves_nothing_for_long(isolation, tmp_path):
    environ = {**os.environ, "PYTHONPATH": str(SCRIPTS.parent)}
    command = [sys.executable, "-c", CRASH, isolation]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    folder = Path(done.stdout.strip())
    assert folder.exists()
    with SlurmCluster(num_nodes=1, isolation=isolation) as cluster:
        later = cluster.folder
        assert later.exists() and not folder.exists()
    assert not later.exists() and sleepers(tmp_path) == []
    for each in (folder, later):
        assert not list(Path("/sys/class/net").glob(f"hf{each.name.removeprefix('hf-slurm-')}*"))


def test_node_dies_and_boots(isolation, tmp_path):
    with SlurmCluster(num_nodes=2, isolation=isolation) as cluster:
        job = cluster.sbatch("--no-requeue", "--nodes=2", "--wrap", "srun sleep 600", cwd=tmp_path)
        cluster.wait_for(lambda: len(sleepers(tmp_path)) >= 4, within_s=300, what="all tasks run")
        cluster.kill_node("node2")
        assert cluster.wait_for_end(job, within_s=300)["JobState"] == "NODE_FAIL"
        cluster.start_node("node2")
        again = cluster.sbatch("--nodes=2", "--output=again.out", "--wrap", "srun --label true", cwd=tmp_path)
        state = cluster.wait_for_end(again, within_s=300)["JobState"]
        assert state == "COMPLETED", (tmp_path / "again.out").read_text()
        cluster.sbatch("--wrap", "trap '' TERM; while :; do sleep 1; done", cwd=tmp_path)
        # As the controller does with a node whose tasks do not end in time.
        cluster.run("scontrol", "update", "nodename=node1", "state=drain", "reason=Kill task failed")
        cluster.restore()
        assert cluster.run("squeue", "--noheader") == ""
        assert cluster.run("sinfo", "--noheader", "--partition=low", "--format=%T") == "idle"


def test_higher_partition_sends_a_job_back_into_the_queue(cluster, tmp_path):
    low = cluster.sbatch("--nodes=4", "--exclusive", "--wrap", "sleep 600", cwd=tmp_path)
    cluster.wait_for_state(low, "RUNNING", within_s=300)
    high = cluster.sbatch("--partition=high", "--nodes=4", "--exclusive", "--wrap", "sleep 1", cwd=tmp_path)
    assert cluster.wait_for_end(high, within_s=300)["JobState"] == "COMPLETED"
    assert cluster.wait_for_state(low, "RUNNING", within_s=300)["Restarts"] == "1"


def test_training_where_nodes_share_everything(folder):
    """As in a container without privileges."""
    with SlurmCluster(num_nodes=2, isolation="plain") as cluster:
        options = ["--nodes=2", "--ntasks-per-node=1", str(SCRIPTS / "train.sbatch")]
        job = cluster.sbatch(*options, "tiny.yaml", cwd=folder)
        assert cluster.wait_for_end(job, within_s=300)["JobState"] == "COMPLETED", output(cluster, job)
        assert steps(folder) == [1, 2, 3]
