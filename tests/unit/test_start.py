"""Which rank a process is, from the environment that a launcher leaves."""

import pytest

from hybridflow.errors import LayoutError
from hybridflow.parallel import mpi
from hybridflow.parallel.start import Start, find_start, rank_hint

SLURM = {
    "SLURM_JOB_ID": "123",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_JOB_NODELIST": "n[1-4]",
}


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """Stands in for Slurm's: two nodes for the step's list, four for the job's."""
    script = tmp_path / "scontrol"
    script.write_text('#!/bin/sh\n[ "$3" = "n[1-2]" ] && printf "n1\\nn2\\n" || printf "n1\\nn2\\nn3\\nn4\\n"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + ":/bin:/usr/bin")
    return script


def test_alone():
    assert find_start({"PATH": "/bin"}) == Start(launcher="alone")


def test_torchrun():
    env = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n1"}
    env |= {"MASTER_PORT": "1234", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    expected = Start(
        launcher="env", rank=3, size=8, local_rank=1, ranks_per_node=2, address="n1", port=1234, agent_store=True
    )
    assert find_start(env) == expected
    # Inside a Slurm job, torchrun's own variables count.
    assert find_start({**SLURM, **env}) == expected


def test_srun(scontrol):
    start = find_start(SLURM)
    assert start == Start(launcher="slurm", rank=5, size=8, local_rank=1, ranks_per_node=4, address="n1", port=20123)
    assert find_start({**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "99"}).address == "10.0.0.1"
    # All ranks of a job agree on the port, and two jobs on one node hardly meet.
    assert (
        find_start({**SLURM, "SLURM_PROCID": "0"}).port
        == start.port
        != find_start({**SLURM, "SLURM_JOB_ID": "124"}).port
    )


def test_srun_of_one_task_and_the_batch_script_are_alone():
    assert find_start({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}).launcher == "alone"
    batch_script = {**SLURM, "SLURM_PROCID": "0"}
    del batch_script["SLURM_STEP_ID"], batch_script["SLURM_STEP_NODELIST"]
    assert find_start(batch_script).launcher == "alone"


def test_node_list_that_cannot_be_read(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LayoutError, match=r"node list 'n\[1-2\]' with scontrol.*set MASTER_ADDR, MASTER_PORT, RANK"):
        find_start(SLURM)


MPI_PLACE = mpi.Place(rank=1, size=2, local_rank=1, ranks_per_node=2, address="127.0.0.1", port=5)


@pytest.mark.parametrize(
    "env",
    [
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        {**SLURM, "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "PMIX_RANK": "1"},
    ],
)
def test_mpi(monkeypatch, env):
    monkeypatch.setattr(mpi, "find_place", lambda: MPI_PLACE)
    assert find_start(env) == Start(
        launcher="mpi", rank=1, size=2, local_rank=1, ranks_per_node=2, address="127.0.0.1", port=5
    )


def test_mpi_that_sees_itself_alone(monkeypatch):
    monkeypatch.setattr(mpi, "find_place", lambda: MPI_PLACE._replace(rank=0, size=1))
    with pytest.raises(LayoutError, match=r"MPI sees 1 process\(es\) where the launcher started 4.*srun --mpi=pmi2"):
        find_start({"PMI_RANK": "3", "PMI_SIZE": "4"})


def test_hint_of_the_rank():
    assert [rank_hint(env) for env in ({}, {"RANK": "2"}, {"PMI_RANK": "3"}, {"SLURM_PROCID": "4"})] == [0, 2, 3, 4]
