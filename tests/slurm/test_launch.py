"""``hybridflow launch slurm`` on a real Slurm: submitted, followed, refused."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.slurm.jobs import steps

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).parents[2]

# Notes which hybridflow the ranks run.
NOTING = """
import sys
def score(prompt, response, answer):
    with open("ran", "w") as file:
        file.write(sys.modules["hybridflow.trainer.trainer"].__file__ + chr(10) + sys.modules["hybridflow"].__file__)
    return float(sum(map(ord, prompt + response)) % 3)
"""


def launch(cluster, folder, *argv, site=None, within_s=600):
    """Run the command in a folder, as on a login node of the cluster."""
    (folder / "site.yaml").write_text(yaml.safe_dump(site or {}))
    command = [sys.executable, "-m", "hybridflow", "launch", "slurm", "tiny.yaml", "--site", "site.yaml", *argv]
    env = {**cluster.env, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=within_s, check=False)


def test_a_launch_is_followed_to_its_end_and_runs_the_copy_of_the_code(cluster, folder):
    # The place itself has what shells and sbatch could take for something else.
    folder = folder.rename(folder.with_name('it\'s $(touch hacked); "100%" #1'))
    (folder / "rewards.py").write_text(NOTING)
    site = {
        "time": "30",
        "ranks_per_node": 2,
        "setup": ["echo 'two words' \"$PWD\""],
        "options": ["--comment=a b;$(c)#"],
    }
    done = launch(cluster, folder, "trainer.steps=2", "--follow", site=site)
    assert done.returncode == 0, done.stdout + done.stderr
    told, *log = done.stdout.splitlines()
    job = told.split()[1].rstrip(",")
    assert told == f"job {job}, log {folder}/run/slurm-{job}.out, launched as {folder}/run/launch/0001"
    assert log[0] == f"two words {folder}" and "\n".join(log) + "\n" == (folder / f"run/slurm-{job}.out").read_text()
    assert steps(folder) == [1, 2]
    copy = folder / "run/launch/0001/code/hybridflow"
    assert (folder / "ran").read_text().splitlines() == [str(copy / "trainer/trainer.py"), str(copy / "__init__.py")]
    found = cluster.job(job)
    assert (found["NumNodes"], found["JobState"]) == ("2", "COMPLETED")
    assert "Comment=a b;$(c)# " in cluster.run("scontrol", "show", "job", "--oneliner", job) + " "
    assert f"job {job}: COMPLETED" in done.stderr and not list(folder.rglob("hacked"))


def test_follow_ends_as_the_job_does(cluster, folder):
    done = launch(cluster, folder, "--follow", "--parsable", "--time", "30", site={"setup": ["echo gone", "(exit 3)"]})
    job, *log = done.stdout.splitlines()
    assert (done.returncode, log) == (3, ["gone"]), done.stderr
    assert f"job {job}: FAILED" in done.stderr


def test_what_slurm_refuses_is_passed_on(cluster, folder):
    done = launch(cluster, folder, "--time", "30", "--partition", "no where")
    assert done.returncode == 2 and "Slurm refuses the job: error: invalid partition specified: no where" in done.stderr
    assert list((folder / "run/launch").iterdir()) == []
    done = launch(cluster, folder, "--time", "30", site={"memory": "999999G"})
    assert done.returncode == 2 and "Slurm refuses the job" in done.stderr and "--time" not in done.stderr
