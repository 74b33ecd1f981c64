"""Which rank a process is, from the environment that a launcher leaves."""

import itertools
from dataclasses import replace

import pytest

from hybridflow.errors import LayoutError
from hybridflow.parallel import mpi
from hybridflow.parallel.start import (
    Start,
    expand_counts,
    expand_node_list,
    find_start,
    local_rank_hint,
    rank_hint,
    shared_by,
)

# As a real Slurm 22.05 gave them: a step of 8 tasks on 2 nodes, in a job of 4 nodes with 4 tasks each.
SLURM = {
    "SLURM_JOB_ID": "123",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_TASKS_PER_NODE": "4(x4)",
    "SLURMD_NODENAME": "n2",
}

# Heterogeneous: 2 tasks on node4, then 3 on each of node1 and node2. The step's list is sorted by name, the ranks not.
HET = {
    "SLURM_JOB_ID": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "node[1-2,4]",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2),2",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "node4",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "node[1-2]",
    "SLURMD_NODENAME": "node4",
}


def test_alone():
    assert find_start({"PATH": "/bin"}) == Start(launcher="alone")


def test_torchrun():
    env = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n1"}
    env |= {"MASTER_PORT": "1234", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    start = find_start(env)
    assert start == Start(
        launcher="env",
        rank=3,
        size=8,
        local_rank=1,
        ranks_per_node=2,
        address="n1",
        port=1234,
        agent_store=True,
        name="attempt 2",
    )
    # Inside a step of Slurm, MPI's or not, torchrun's own variables count.
    assert find_start({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8", **env}) == start


def test_srun_counts_the_tasks_and_nodes_of_the_step_and_not_of_the_job():
    start = find_start(SLURM)
    assert start == Start(
        launcher="slurm",
        rank=5,
        size=8,
        local_rank=1,
        ranks_per_node=4,
        hosts=("n1",) * 4 + ("n2",) * 4,
        address="n1",
        port=20000 + 123 * 16,
        name="job 123, step 0, restart 0",
    )
    by_hand = find_start({**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "99"})
    assert (by_hand.address, by_hand.port) == ("10.0.0.1", 99)


def test_ports_differ_between_jobs_steps_and_requeues_and_agree_between_ranks():
    def port(**changes):
        return find_start({**SLURM, **{f"SLURM_{name}": str(value) for name, value in changes.items()}}).port

    assert port(PROCID=1) == port(PROCID=7)
    jobs = [port(JOB_ID=1000 + job, STEP_ID=step) for job, step in itertools.product(range(750), range(16))]
    assert len(set(jobs)) == len(jobs) and min(jobs) >= 20000 and max(jobs) < 32768
    starts = [port(STEP_ID=step, RESTART_COUNT=restart) for step, restart in itertools.product(range(5), range(3))]
    assert len(set(starts)) == len(starts)
    # The shell that salloc gives is in a step with a number of its own.
    assert 20000 <= port(STEP_ID=4294967290) < 32000


def test_one_node_needs_no_name_for_it():
    env = {**SLURM, "SLURM_STEP_NODELIST": "n2", "SLURM_STEP_TASKS_PER_NODE": "8"}
    assert find_start(env).address == "127.0.0.1" and find_start(env).ranks_per_node == 8


@pytest.mark.parametrize(
    ("counts", "nodes", "size", "per_node"),
    [
        ("4(x2),2", "n[1-3]", 10, 2),
        ("4,3(x2)", "n[1-3]", 10, 1),
        ("6,9,3(x4)", "a,b,c[1-4]", 27, 3),
        ("8(x64)", "n[001-064]", 512, 8),
    ],
)
def test_nodes_with_different_numbers_of_tasks(counts, nodes, size, per_node):
    env = {
        **SLURM,
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURM_STEP_NUM_TASKS": str(size),
    }
    start = find_start(env)
    assert start.size == len(start.hosts) == size and start.ranks_per_node == per_node
    # What the number promises: ranks of each such block share a node.
    for first in range(0, size, per_node):
        assert len(set(start.hosts[first : first + per_node])) == 1


def test_components_of_a_heterogeneous_job_are_one_world_in_their_order():
    start = find_start(HET)
    assert start.hosts == ("node4",) * 2 + ("node1",) * 3 + ("node2",) * 3
    assert (start.size, start.address, start.ranks_per_node, start.rank) == (8, "node4", 1, 0)
    last = find_start({**HET, "SLURM_PROCID": "7", "SLURM_LOCALID": "2", "SLURMD_NODENAME": "node2"})
    assert (last.address, last.port, last.name) == (start.address, start.port, start.name)
    # A step on the second component alone.
    second = {"SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_TASKS_PER_NODE": "3(x2)", "SLURM_STEP_NUM_TASKS": "6"}
    alone = find_start({**HET, **second, "SLURMD_NODENAME": "node1"})
    assert alone.hosts == ("node1",) * 3 + ("node2",) * 3 and alone.address == "node1"


def test_rank_0_that_is_not_on_the_first_node_says_so():
    env = {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    with pytest.raises(LayoutError, match=r"put rank 0 on n2, but it belongs on n1.*srun --distribution=block"):
        find_start(env)
    # Who says where to meet need not care.
    assert find_start({**env, "MASTER_ADDR": "n2"}).address == "n2"


def test_a_step_of_one_task_and_the_batch_script_are_alone():
    one = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "n2"}
    assert find_start({**SLURM, **one, "SLURM_PROCID": "0"}).launcher == "alone"
    assert find_start({**SLURM, **one, "SLURM_PROCID": "0", "PMIX_RANK": "0"}).launcher == "alone"
    batch_script = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert find_start({**batch_script, "SLURM_PROCID": "0"}).launcher == "alone"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("n[1-3,5],login", "n1 n2 n3 n5 login"),
        ("gpu-[008-011].site", "gpu-008.site gpu-009.site gpu-010.site gpu-011.site"),
        ("rack[1-2]n[01,10],x3", "rack1n01 rack1n10 rack2n01 rack2n10 x3"),
        ("n[9-10]", "n9 n10"),
    ],
)
def test_node_lists(text, names):
    assert expand_node_list(text) == tuple(names.split())


@pytest.mark.parametrize("text", ["", "n[1-2", "n[1-]", "n[a-b]", "n]1["])
def test_node_list_that_cannot_be_read(text):
    with pytest.raises(LayoutError, match=r"cannot read Slurm's node list .*set MASTER_ADDR, MASTER_PORT, RANK"):
        find_start({**SLURM, "SLURM_STEP_NODELIST": text})


def test_counts():
    assert expand_counts("4(x2),2,1(x3)") == (4, 4, 2, 1, 1, 1)
    with pytest.raises(LayoutError, match="number of tasks on each node '4(.)x2'"):
        expand_counts("4(x2")


def test_variables_that_contradict_each_other():
    with pytest.raises(LayoutError, match=r"do not agree: SLURM_STEP_NODELIST=n\[1-2\], SLURM_STEP_TASKS_PER_NODE=4,3"):
        find_start({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4,3"})
    with pytest.raises(LayoutError, match="MASTER_PORT=http, expected a number"):
        find_start({**SLURM, "MASTER_PORT": "http"})


MPI_PLACE = mpi.Place(rank=1, size=2, local_rank=1, nodes=(0, 0), hosts=("n7", "n7"), address="127.0.0.1", port=5)
FOUND = Start(
    launcher="mpi",
    rank=1,
    size=2,
    local_rank=1,
    ranks_per_node=2,
    hosts=("n7", "n7"),
    address="127.0.0.1",
    port=5,
    name="mpi",
)
TWO_TASKS = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "n1"}
PMIX_STEP = {**SLURM, **TWO_TASKS, "SLURM_PROCID": "1", "PMIX_RANK": "1", "SLURMD_NODENAME": "n1"}
PMI_STEP = {**SLURM, **TWO_TASKS, "SLURM_PROCID": "0", "PMI_RANK": "0", "PMI_SIZE": "2", "SLURMD_NODENAME": "n1"}


@pytest.mark.parametrize(
    "env",
    [
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        # mpirun in a Slurm job, whose daemons are a step of as many tasks as nodes, here with as many ranks as nodes.
        {**SLURM, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        {**PMIX_STEP, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        {**PMIX_STEP, "PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"},
    ],
)
def test_mpirun(monkeypatch, env):
    monkeypatch.setattr(mpi, "find_place", lambda: MPI_PLACE)
    assert find_start(env) == FOUND
    assert find_start({**env, "MASTER_ADDR": "n9", "MASTER_PORT": "7"}).address == "n9"


@pytest.mark.parametrize("env", [PMIX_STEP, PMI_STEP])
def test_a_step_in_which_mpi_works_meets_where_slurm_says(monkeypatch, capsys, env):
    monkeypatch.setattr(mpi, "find_place", lambda: MPI_PLACE._replace(rank=int(env["SLURM_PROCID"])))
    without = find_start({name: value for name, value in env.items() if "PMI" not in name})
    assert without.launcher == "slurm" and find_start(env) == replace(without, launcher="mpi")
    assert capsys.readouterr().err == ""


def test_mpi_on_nodes_with_different_numbers_of_ranks(monkeypatch):
    place = MPI_PLACE._replace(size=6, nodes=(0, 0, 0, 0, 4, 4), hosts=("a",) * 4 + ("b",) * 2)
    monkeypatch.setattr(mpi, "find_place", lambda: place)
    assert find_start({"PMI_RANK": "1", "PMI_SIZE": "6"}).ranks_per_node == 2


def no_mpi():
    raise mpi.NoMpiError("no library")


@pytest.mark.parametrize("place", [lambda: MPI_PLACE._replace(rank=0, size=1), no_mpi])
def test_a_step_in_which_mpi_does_not_work_is_started_by_slurm_and_rank_0_says_so(monkeypatch, capsys, place):
    monkeypatch.setattr(mpi, "find_place", place)
    assert find_start(PMIX_STEP).launcher == "slurm"
    assert capsys.readouterr().err == ""
    start = find_start(PMI_STEP)
    assert (start.launcher, start.rank, start.size) == ("slurm", 0, 2)
    said = capsys.readouterr().err
    assert said.startswith("hybridflow: started from Slurm's variables, without MPI: ") and said.count("\n") == 1


def test_mpi_can_be_left_alone(monkeypatch, capsys):
    monkeypatch.setattr(mpi, "find_place", lambda: pytest.fail("MPI was asked"))
    assert find_start({**PMI_STEP, "HYBRIDFLOW_MPI": "0"}).launcher == "slurm"
    assert capsys.readouterr().err == ""
    with pytest.raises(LayoutError, match="HYBRIDFLOW_MPI=0, but these ranks were started by mpirun"):
        find_start({"PMI_RANK": "1", "PMI_SIZE": "2", "HYBRIDFLOW_MPI": "0"})


def test_ranks_of_mpirun_that_do_not_see_each_other(monkeypatch):
    monkeypatch.setattr(mpi, "find_place", lambda: MPI_PLACE._replace(rank=0, size=1))
    with pytest.raises(LayoutError, match=r"MPI sees 1 process\(es\) where the launcher started 4.*srun --mpi=pmi2"):
        find_start({"PMI_RANK": "3", "PMI_SIZE": "4"})


def test_the_first_ranks_of_those_that_came():
    start = find_start({**SLURM, "SLURM_PROCID": "2"})
    narrow = start.first(6)
    # Four on n1 and two on n2: blocks of two lie on one node each.
    assert (narrow.size, narrow.ranks_per_node, narrow.hosts) == (6, 2, ("n1",) * 4 + ("n2",) * 2)
    assert start.first(3).ranks_per_node == 3 and start.first(8) == start
    assert (narrow.rank, narrow.address, narrow.port) == (2, start.address, start.port)
    torchrun = Start(launcher="env", size=8, ranks_per_node=4)
    assert [torchrun.first(number).ranks_per_node for number in (1, 3, 4, 6, 7, 8)] == [1, 3, 4, 2, 1, 4]
    with pytest.raises(AssertionError):
        start.first(2)


def test_ranks_in_words():
    assert find_start(HET).where([0, 2, 3, 4, 6]) == "rank 0 on node4, ranks 2-4 on node1, rank 6 on node2"
    assert Start(launcher="env", size=8).where([5, 1, 2]) == "ranks 1-2,5"


def test_shared_by():
    assert [shared_by(nodes) for nodes in ("aaaa", "aaaabb", "aabb", "abab", "aaabb")] == [4, 2, 2, 1, 1]


def test_hint_of_the_rank(monkeypatch):
    def hints(hint, *environments):
        for env in environments:
            monkeypatch.setattr("os.environ", env)
            yield hint()

    assert list(hints(rank_hint, {}, {"RANK": "2"}, {"PMI_RANK": "3"}, {"SLURM_PROCID": "4"})) == [0, 2, 3, 4]
    assert list(hints(local_rank_hint, {}, {"LOCAL_RANK": "2"}, {"SLURM_LOCALID": "4"})) == [0, 2, 4]


def test_torch_variables_for_the_tasks_of_a_step_leave_its_nodes():
    """As Enroot's hook for PyTorch sets them: without LOCAL_WORLD_SIZE."""
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
    step |= {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_ID": "5"}
    hook = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    start = find_start({**step, **hook})
    assert (start.launcher, start.rank, start.ranks_per_node, start.hosts) == ("env", 3, 2, ("n1", "n1", "n2", "n2"))
    # One task that starts several ranks is no such step.
    assert find_start({**step, **hook, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}).ranks_per_node == 4
