"""The batch file that trains: what survival rests on, and what it does with a status.

Programs that note what they are called with stand in the place of Slurm's.
"""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.programs import put_program

SCRIPT = Path(__file__).parents[3] / "slurm/train.sbatch"
RECIPES = Path(__file__).parents[3] / "launch/recipes"


def test_what_survival_rests_on():
    head, mark, rest = SCRIPT.read_text().partition("# ---- edit for your site")
    assert mark
    given = {line.removeprefix("#SBATCH ") for line in head.splitlines() if line.startswith("#SBATCH ")}
    assert {"--requeue", "--no-kill", "--open-mode=append", "--signal=B:USR1@120"} <= given
    commands = [line for line in rest.splitlines()[1:] if line and not line.startswith("#")]
    # Between the two is only the choice of a container.
    assert commands[0].startswith("container=()") and commands[1].startswith('if [ -n "${CONTAINER:-}" ]')
    assert commands[commands.index("fi") + 1 :][:3] == [
        "asked= soon=",
        "trap 'asked=yes' TERM",
        "trap 'asked=yes; [ $SECONDS -ge 60 ] || soon=yes' USR1 USR2",
    ]
    assert subprocess.run(["bash", "-n", SCRIPT], check=False).returncode == 0


# Three nodes; a step of ranks ends with the next status of a list, a task beside them answers on the nodes that are up,
# the second time on those that are up late.
# Ranks of a step that hangs are gone when they are looked for again.
FAKES = {
    "srun": r"""
case "$*" in
    *" hybridflow train "*)
        printf '%s|' "$@" >> trains; echo >> trains
        read -r status left < statuses; sed -i 1d statuses
        [ ! "$left" ] || tr ' ' '\n' <<<"$left" > up
        [ "$status" != hang ] || { touch hanging; exec /bin/sleep 600; }
        exit "$status" ;;
    *SLURMD_NODENAME*) cat up; [ ! -e late ] || mv late up ;;
esac""",
    "scontrol": r"""
[ "$1" = listpids ] || [ "$1 $2" = "show hostnames" ] || {
    read -r away < away
    [ "$away" = 0 ] || { echo $((away - 1)) > away; exit 1; }
}
case "$*" in
    "show hostnames "*) tr , '\n' <<<"$3" ;;
    "show job -o 7" | "show job -o 7_1") echo "JobId=7 ${ARRAY:+ArrayJobId=$ARRAY }JobState=$STATE Reason=None" ;;
    "requeue 7" | "requeue 7_1") echo "$2" > requeued ;;
    "listpids 7 n1") [ -e hanging -a -e listed ] || echo "4711     7        0        0        0"; touch listed ;;
    *) exit 1 ;;
esac""",
    "squeue": "echo n1,n2,n3",
    "sleep": "exit 0",
}
JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n1,n2,n3",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURMD_NODENAME": "n1",
}


@pytest.fixture
def run(tmp_path):
    """Runs train.sbatch while the ranks end with these statuses; returns its status, the steps, whether it requeued."""
    for name, text in FAKES.items():
        put_program(tmp_path / "bin" / name, text)

    def run(*statuses, argv=("tiny.yaml",), up="n1 n2 n3", late=None, state="RUNNING", away="0", took_s=0, **environ):
        script = tmp_path / "train.sbatch"
        # By the script's clock, each start of ranks takes so long.
        script.write_text(SCRIPT.read_text().replace("began=$SECONDS", f"began=$((SECONDS - {took_s}))"))
        (tmp_path / "away").write_text(away + "\n")
        (tmp_path / "statuses").write_text("".join(f"{status}\n" for status in statuses))
        (tmp_path / "up").write_text(up.replace(" ", "\n") + "\n")
        if late is not None:
            (tmp_path / "late").write_text(late.replace(" ", "\n") + "\n")
        (tmp_path / "trains").write_text("")
        (tmp_path / "requeued").unlink(missing_ok=True)
        environ = {**JOB, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "STATE": state, **environ}
        command = ["bash", str(script), *argv]
        with open(tmp_path / "said", "w") as said:
            done = subprocess.run(
                command, cwd=tmp_path, env=environ, stdout=said, stderr=said, timeout=300, check=False
            )
        steps = [line.split("|")[:-1] for line in (tmp_path / "trains").read_text().splitlines()]
        return done.returncode, steps, (tmp_path / "requeued").exists()

    return run


def test_ranks_are_the_tasks_of_the_job_and_words_stay_words(run, tmp_path):
    nasty = ("my recipe.yaml", "run_dir=it's; $(touch bad)", 'data.train="`touch bad`"')
    status, (step,), is_requeued = run(0, argv=nasty, SLURM_CPUS_PER_TASK="4")
    assert (status, is_requeued) == (0, False) and not (tmp_path / "bad").exists()
    ranks = ["--nodes=3", "--nodelist=n1,n2,n3", "--ntasks=6", "--ntasks-per-node=2", "--overlap", "--wait=150"]
    assert step == [*ranks, "hybridflow", "train", *nasty, "--resume"]


def test_a_job_whose_nodes_have_no_number_of_ranks_is_told_so(run, tmp_path):
    assert run(0, SLURM_NTASKS_PER_NODE="", SLURM_NTASKS="6") == (2, [], False)
    assert "submit with --ntasks-per-node" in (tmp_path / "said").read_text()


@pytest.mark.parametrize("given", [2, 3, 4])
def test_what_does_not_get_better_ends_the_job(run, given):
    status, steps, is_requeued = run(given)
    assert (status, len(steps), is_requeued) == (given, 1, False)


def test_a_saved_job_goes_back_into_the_queue_unless_slurm_has_ended_it(run):
    assert [run(75)[::2], run(75, state="CANCELLED")[::2]] == [(75, True), (75, False)]


def test_a_lost_node_is_left_out(run):
    status, steps, is_requeued = run(1, 137, 0, up="n1 n3")
    assert (status, len(steps), is_requeued) == (0, 3, False)
    assert steps[1][:4] == steps[2][:4] == ["--nodes=2", "--nodelist=n1,n3", "--ntasks=4", "--ntasks-per-node=2"]


def test_what_fails_early_each_time_on_the_same_nodes_ends_the_job(run):
    assert run(127, 127, 127, 127, 0)[::2] == (127, False)
    # A rank that was killed, or a node that is gone, says nothing of the next time.
    assert run(1, 1, 1, 137, 1, 1, 1, 0)[0] == 0
    # Unless it is killed again and again, as by a node that lacks what the ranks need.
    assert run(*[137] * 7, 0)[0] == 0
    assert run(*[137] * 8, 0)[::2] == (137, False)
    status, steps, is_requeued = run(1, 1, "1 n1 n2", 1, 1, 1, 0)
    assert (status, len(steps), is_requeued) == (0, 7, False)


def test_what_ranks_wait_for_in_vain_is_not_begun_again_for_ever(run):
    clusters = [yaml.safe_load(path.read_text()).get("cluster", {}) for path in RECIPES.glob("*.yaml")]
    # srun's --wait comes on top.
    took_s = max(cluster.get("start_deadline_s", 120) for cluster in clusters) + 150
    assert run(1, 1, 1, 1, 0, took_s=took_s)[::2] == (1, False)
    assert run(*[137] * 8, 0, took_s=took_s)[::2] == (137, False)
    # Ranks that train for longer count their starts themselves.
    assert run(1, 1, 1, 1, 0, took_s=2100)[0] == 0
    # A node that is lost after minutes leaves one rank: that is no failure to start.
    job = {"SLURM_NTASKS_PER_NODE": "1", "SLURM_RESTART_COUNT": "3"}
    assert run(1, up="n1", took_s=400, **job)[::2] == (75, True)


def test_where_no_node_answers_it_is_not_requeued_for_ever(run):
    status, steps, is_requeued = run(1, up="", SLURM_RESTART_COUNT="3")
    assert (status, len(steps), is_requeued) == (1, 1, False)
    assert run(137, up="", SLURM_RESTART_COUNT="3")[::2] == (75, True)


def test_a_controller_that_is_away_for_a_moment_is_asked_again(run):
    assert run(75, away="3")[::2] == (75, True)


def test_srun_does_not_wait_for_a_silent_node_when_the_ranks_here_have_ended(run):
    status, steps, is_requeued = run("hang", 0, up="n1 n2")
    assert (status, len(steps), is_requeued) == (0, 2, False)
    assert steps[1][:2] == ["--nodes=2", "--nodelist=n1,n2"]


def test_nodes_that_are_too_few_are_given_back_for_all(run):
    status, steps, is_requeued = run(1, 2, up="n1")
    assert (status, len(steps), is_requeued) == (75, 2, True)
    status, steps, is_requeued = run(1, up="")
    assert (status, len(steps), is_requeued) == (75, 1, True)
    # A single rank would start the others itself, all on its node, where the recipe has no fallbacks.
    status, steps, is_requeued = run(1, 0, up="n1", SLURM_NTASKS_PER_NODE="1")
    assert (status, len(steps), is_requeued) == (75, 1, True)


def test_a_node_that_answers_late_is_kept(run):
    status, steps, is_requeued = run(1, 0, up="n1 n3", late="n1 n2 n3")
    assert (status, len(steps), is_requeued) == (0, 2, False)
    assert steps[1][:2] == ["--nodes=3", "--nodelist=n1,n2,n3"]


def test_a_job_of_one_rank_begins_again(run):
    job = {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS_PER_NODE": "1"}
    status, steps, is_requeued = run(1, 0, up="n1", **job)
    assert (status, len(steps), is_requeued) == (0, 2, False)


@pytest.mark.parametrize(("array", "of_job", "asked"), [("7", "7", "7_1"), ("5", "", "7")])
def test_a_task_of_an_array_is_asked_for_by_its_own_name(run, tmp_path, array, of_job, asked):
    """The job's id would mean all tasks. A job submitted from a task of array 5 has that task's variables."""
    given = {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": "1", "ARRAY": of_job}
    assert run(75, **given)[::2] == (75, True)
    assert (tmp_path / "requeued").read_text() == f"{asked}\n"
