"""The one test on a real Slurm that is quick enough for every run of the tests: a rank a node, by the fallback."""

from tests.slurm.jobs import SCRIPTS, output, steps


def test_two_nodes_go_on_training(cluster, folder):
    script = str(SCRIPTS / "train.sbatch")
    job = cluster.sbatch("--nodes=2", "--ntasks-per-node=1", script, "tiny.yaml", "--resume", cwd=folder)
    ended = cluster.wait_for_end(job, within_s=300)
    assert ended["JobState"] == "COMPLETED", output(cluster, job)
    assert ended["NumNodes"] == "2" and steps(folder) == [1, 2, 3]
