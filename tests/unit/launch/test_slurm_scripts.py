"""The scripts of ``slurm/``, with programs that note what they are called with in the place of Slurm's."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.programs import put_program

SCRIPTS = Path(__file__).parents[3] / "slurm"

# Each call is a line, its words between bars. An id counts up; the job that is asked for runs; steps of srun end as a
# list tells. Where they hang, they ask the script to stop, and end when it has made a call: no time would do for all
# machines.
NOTE = r"""
name=${0##*/}
[ $name != sleep ] || exec /bin/sleep 0.1
[ $name != srun ] || echo "$SLURM_EXPORT_ENV $SLURM_KILL_BAD_EXIT" > settings
[ $name != srun ] || echo "${!SLURM_CPU_BIND@}" "${!SLURM_DISTRIBUTION@}" | tr -d ' ' > places
# One write, since programs that a script runs at once share the log.
words=$(printf '|%s' "$@")
printf '%s\n' "$name${words//$'\n'/ }" >> "$LOG"
case $name in
    sbatch) echo $((100 + $(grep -c ^sbatch "$LOG"))) ;;
    scontrol)
        /bin/sleep "${SLOW_S:-0}"
        echo "JobId=7 JobState=${STATE:-RUNNING} Reason=None Requeue=${REQUEUE:-1} Restarts=0" ;;
    squeue) case $* in *%L) echo "${LEFT:-10:00}" ;; *) echo n1 ;; esac ;;
    srun)
        if [[ $* = *hybridflow* && $HANGS ]]; then
            trap '' USR1
            before=$(grep -c "$UNTIL" "$LOG")
            kill -$HANGS $PPID
            for _ in {1..600}; do [ "$(grep -c "$UNTIL" "$LOG")" = "$before" ] || break; /bin/sleep 0.1; done
        fi
        statuses=(${STATUS:-0}) number=$(grep -c ^srun "$LOG")
        exit "${statuses[number - 1]:-${statuses[-1]}}" ;;
esac
"""


@pytest.fixture
def call(tmp_path):
    """Runs a script in a folder of its own; returns its status, the calls it made, and what it complained of."""
    for name in ("sbatch", "scontrol", "srun", "squeue", "sleep"):
        put_program(tmp_path / "bin" / name, NOTE)

    def run(script, *argv, took_s=0, **environ):
        log, path = tmp_path / "log", SCRIPTS / script
        log.write_text("")
        if took_s:
            # By the script's clock, each start of ranks takes so long.
            path = tmp_path / script
            path.write_text((SCRIPTS / script).read_text().replace("began=$SECONDS", f"began=$((SECONDS - {took_s}))"))
        environ = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "LOG": str(log), **environ}
        command = ["bash", str(path), *argv]
        # Not a pipe: what a script leaves running would hold that open.
        with open(tmp_path / "said", "w") as said:
            status = subprocess.run(
                command, cwd=tmp_path, env=environ, stdout=said, stderr=said, check=False
            ).returncode
        calls = [line.split("|") for line in log.read_text().splitlines()]
        return status, calls, (tmp_path / "said").read_text()

    return run


def block(script):
    """What a user edits for a site, between the two borders."""
    before, *inside, _ = (SCRIPTS / script).read_text().split("\n# ----")
    assert len(inside) == 1 and inside[0].startswith(" edit for your site --"), script
    return before, inside[0].split("\n", 1)[1]


def test_every_batch_script_has_the_same_block_to_edit():
    scripts = sorted(path.name for path in SCRIPTS.glob("*.sbatch"))
    blocks = {script: block(script)[1] for script in scripts}
    hetjob = blocks.pop("hetjob.sbatch")
    assert len(set(blocks.values())) == 1, blocks
    (common,) = set(blocks.values())
    # A heterogeneous job has two components to choose a place for; modules and containers are the same.
    assert hetjob.endswith(common[common.index("# module load") :])
    for script in scripts:
        # sbatch stops reading its options at the first command.
        assert all(line.startswith("#") for line in block(script)[0].splitlines()), script


def test_every_script_that_trains_goes_back_into_the_queue_in_the_same_way():
    """A script is one file, which a user copies: none can read what the others have."""
    names = ("train.sbatch", "sweep.sbatch", "hetjob.sbatch")
    texts = [(SCRIPTS / name).read_text().partition("\nrequeue() {\n")[2].partition("\n}\n")[0] for name in names]
    assert len(set(texts)) == 1 and "scontrol requeue" in texts[0]


ARRAY = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "2"}


def test_line_of_a_sweep_is_words_and_nothing_else(call, tmp_path):
    line = """name=a "actor.update={tp: 2, dp: 2}" 'x=$(touch bad)' y=`touch bad` z=; w=\\"* v=&&|bad\n"""
    (tmp_path / "lr.txt").write_text("first=1\n" + line)
    status, calls, _ = call("sweep.sbatch", "tiny.yaml", "lr.txt", "seed=3", **ARRAY)
    words = [
        "name=a",
        "actor.update={tp: 2, dp: 2}",
        "x=$(touch bad)",
        "y=`touch",
        "bad`",
        "z=;",
        'w="*',
        "v=&&",
        "bad",
    ]
    train = [
        "srun",
        "--wait=150",
        "hybridflow",
        "train",
        "tiny.yaml",
        "seed=3",
        *words,
        "run_dir=runs/lr/2",
        "--resume",
    ]
    assert (status, calls) == (0, [train]) and not (tmp_path / "bad").exists()


def test_comments_and_blank_lines_of_a_sweep_are_no_runs(call, tmp_path):
    (tmp_path / "lr.txt").write_text("# rates\n\na=1\n  # of two ranks\n \t\nb=# c=2\n\nd=3")
    for run, words in ((1, ["a=1"]), (2, ["b=#", "c=2"]), (3, ["d=3"])):
        status, (train,), _ = call("sweep.sbatch", "tiny.yaml", "lr.txt", **ARRAY | {"SLURM_ARRAY_TASK_ID": str(run)})
        assert status == 0 and train[5:-1] == [*words, f"run_dir=runs/lr/{run}"]


@pytest.mark.parametrize(
    ("text", "num_runs"), [("first=1\n", 1), ("first=1\n\n", 1), ("# none\n", 0), ("first=1\n'open=\n", 2)]
)
def test_sweep_without_such_a_line_says_so(call, tmp_path, text, num_runs):
    (tmp_path / "lr.txt").write_text(text)
    status, calls, said = call("sweep.sbatch", "tiny.yaml", "lr.txt", **ARRAY)
    assert (status, calls) == (2, [])
    assert f"lr.txt has no run 2 whose settings can be read; it has {num_runs} runs" in said


@pytest.mark.parametrize("words", [["tiny.yaml", "lr.txt"], ["tiny.yaml"], ["tiny.yaml", "no such.txt"]])
def test_sweep_without_array_or_file_says_how_to_submit_it(call, tmp_path, words):
    (tmp_path / "lr.txt").write_text("a=1\n")
    environ = {} if "lr.txt" in words else ARRAY
    status, calls, said = call("sweep.sbatch", *words, **environ)
    assert (status, calls) == (2, []) and said.count("\n") == 1 and "--array=1-N slurm/sweep.sbatch RECIPE FILE" in said


@pytest.mark.parametrize("script", ["sweep.sbatch", "hetjob.sbatch"])
@pytest.mark.parametrize("status", [0, 2, 3, 4, 75])
def test_begins_again_where_that_helps(call, tmp_path, script, status):
    (tmp_path / "lr.txt").write_text("a=1\nb=1\n")
    argv = ["tiny.yaml", "lr.txt"] if script == "sweep.sbatch" else ["tiny.yaml"]
    job = "12_2" if script == "sweep.sbatch" else "7"
    again = [] if status in (0, 2, 3, 4) else [["scontrol", "show", "job", "-o", job], ["scontrol", "requeue", job]]
    found, (_, *calls), _ = call(script, *argv, STATUS=str(status), SLURM_JOB_ID="7", **ARRAY)
    assert (found, calls) == (75 if again else status, again)
    # After scancel it would be there again.
    found, (_, *calls), _ = call(script, *argv, STATUS=str(status), STATE="CANCELLED", SLURM_JOB_ID="7", **ARRAY)
    assert (found, calls) == (75 if again else status, again[:1])


@pytest.mark.parametrize("signal", ["USR1", "USR2"])
@pytest.mark.parametrize("script", ["train.sbatch", "sweep.sbatch", "hetjob.sbatch"])
def test_what_does_not_stop_in_time_is_requeued_before_the_time_is_up(call, tmp_path, script, signal):
    (tmp_path / "lr.txt").write_text("a=1\nb=1\n")
    argv = ["tiny.yaml", "lr.txt"] if script == "sweep.sbatch" else ["tiny.yaml"]
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS_PER_NODE": "1", **ARRAY}
    found, calls, _ = call(script, *argv, HANGS=signal, UNTIL="^scontrol|requeue", LEFT="0:15", **job)
    assert found == 75 and ["scontrol", "requeue", "12_2" if script == "sweep.sbatch" else "7"] in calls
    found, calls, _ = call(script, *argv, HANGS=signal, UNTIL="^squeue.*%L", LEFT="10:15", STATUS="0", **job)
    assert found == 0 and not any(words[:2] == ["scontrol", "requeue"] for words in calls)


@pytest.mark.parametrize("script", ["train.sbatch", "sweep.sbatch", "hetjob.sbatch"])
def test_a_time_limit_that_leaves_no_time_to_begin_ends_the_job_at_its_third_start(call, tmp_path, script):
    (tmp_path / "lr.txt").write_text("a=1\nb=1\n")
    argv = ["tiny.yaml", "lr.txt"] if script == "sweep.sbatch" else ["tiny.yaml"]
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS_PER_NODE": "1", **ARRAY}
    # Preemption may come as often as it likes.
    for signal, restarts, end in (("USR1", "1", 75), ("USR1", "2", 2), ("USR2", "2", 2), ("TERM", "2", 75)):
        asked = {"HANGS": signal, "UNTIL": "^squeue.*%L", "STATUS": "75", "SLURM_RESTART_COUNT": restarts}
        found, calls, said = call(script, *argv, **asked, **job)
        assert found == end and ("submit with a longer --time" in said) == (end == 2), said
        assert any(words[:2] == ["scontrol", "requeue"] for words in calls) == (end == 75)


@pytest.mark.parametrize("script", ["train.sbatch", "sweep.sbatch", "hetjob.sbatch"])
def test_a_job_that_may_not_be_requeued_says_so_and_ends_at_once(call, tmp_path, script):
    (tmp_path / "lr.txt").write_text("a=1\nb=1\n")
    argv = ["tiny.yaml", "lr.txt"] if script == "sweep.sbatch" else ["tiny.yaml"]
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS_PER_NODE": "1", **ARRAY}
    status, calls, said = call(script, *argv, STATUS="75", REQUEUE="0", **job)
    assert status == 75 and "--no-requeue" in said and "submit it again" in said
    assert not any(words[:2] == ["scontrol", "requeue"] for words in calls)
    # Ranks that save until the time is up are not ended for a place in the queue that the job cannot have.
    # How they end counts, also if they do so while Slurm is asked.
    asked = {"HANGS": "USR1", "UNTIL": "^scontrol|show|job", "LEFT": "0:15", "STATUS": "0", "REQUEUE": "0"}
    for slow_s in ("0", "0.5"):
        assert call(script, *argv, SLOW_S=slow_s, **asked, **job)[0] == 0


@pytest.mark.parametrize("script", [path.name for path in sorted(SCRIPTS.glob("*.sbatch"))])
def test_places_of_a_step_that_submitted_the_job_are_not_those_of_its_ranks(call, tmp_path, script):
    (tmp_path / "lr.txt").write_text("a=1\na=2\n")
    of_step = {"SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_CPU_BIND_LIST": "0x1", "SLURM_DISTRIBUTION": "cyclic"}
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS_PER_NODE": "1", **ARRAY}
    call(script, "tiny.yaml", "lr.txt", SLURM_STEP_ID="0", **of_step, **job)
    assert (tmp_path / "places").read_text() == "\n"
    # What a user sets for the ranks is theirs.
    call(script, "tiny.yaml", "lr.txt", SLURM_CPU_BIND="cores", **job)
    assert (tmp_path / "places").read_text() == "SLURM_CPU_BIND\n"


@pytest.mark.parametrize("script", [path.name for path in sorted(SCRIPTS.glob("*.sbatch"))])
def test_ranks_have_the_environment_of_the_script_and_end_by_themselves(call, tmp_path, script):
    (tmp_path / "lr.txt").write_text("a=1\na=2\n")
    # As sbatch --export=NONE sets the one, and a site the other.
    given = {"SLURM_EXPORT_ENV": "NONE", "SLURM_KILL_BAD_EXIT": "1", "SLURM_NTASKS_PER_NODE": "1"}
    call(script, "tiny.yaml", "lr.txt", SLURM_JOB_ID="7", **given, **ARRAY)
    # A conversion ends with the first rank that fails, by an option that rules over the variable.
    expected = "ALL 1\n" if script == "convert.sbatch" else "ALL 0\n"
    assert (tmp_path / "settings").read_text() == expected


@pytest.mark.parametrize("script", ["sweep.sbatch", "hetjob.sbatch"])
def test_what_fails_early_each_time_is_not_begun_again_for_ever(call, tmp_path, script):
    (tmp_path / "lr.txt").write_text("a=1\nb=1\n")
    argv = ["tiny.yaml", "lr.txt"] if script == "sweep.sbatch" else ["tiny.yaml"]
    for statuses, end, num_calls in (("1", 1, 4), ("137", 137, 4), ("1 1 1 0", 0, 4), ("1 0", 0, 2)):
        # How often Slurm began it again, at time limits, does not count.
        environ = {"STATUS": statuses, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "5", **ARRAY}
        found, calls, _ = call(script, *argv, **environ)
        assert (found, [words[0] for words in calls]) == (end, ["srun"] * num_calls)
    # Ranks wait for each other for up to 1800 s in shipped recipes, and srun for 150 s. Who trains for longer may fail.
    for took_s, end in ((1950, 1), (2100, 0)):
        assert call(script, *argv, STATUS="1 1 1 1 0", took_s=took_s, SLURM_JOB_ID="7", **ARRAY)[0] == end


@pytest.mark.parametrize("script", ["convert.sbatch", "hetjob.sbatch", "sweep.sbatch", "train.sbatch"])
@pytest.mark.parametrize("image", ["my image.sif", "nvcr.io#a/b:1"])
def test_container_of_the_environment_sees_what_the_job_needs(call, tmp_path, script, image):
    (tmp_path / "lr.txt").write_text("a=1\na=2\n")
    argv = ["/recipes/a b/tiny.yaml", *(["lr.txt"] if script == "sweep.sbatch" else [])]
    argv += ["run_dir=/scratch/me/run", "x=/top", "data.train=in/a"]
    environ = {"CONTAINER": image, "CONTAINER_MOUNTS": "/data,/more", "PYTHONPATH": "/code:relative"}
    environ |= {"HOME": str(tmp_path / "home"), "SLURM_JOB_ID": "7", "SLURM_NTASKS_PER_NODE": "1", **ARRAY}
    _, calls, said = call(script, *argv, **environ)
    (srun,) = [words for words in calls if words[0] == "srun" and "hybridflow" in words][:1]
    cache = tmp_path / "home/.cache/huggingface"
    assert cache.is_dir(), said
    mounts = sorted(["/code", "/data", "/more", "/recipes/a b", "/scratch/me", str(tmp_path), str(cache)])
    before = srun[: srun.index("hybridflow")]
    if image.endswith(".sif"):
        words = before[before.index("apptainer") :]
        assert words == [
            "apptainer",
            "exec",
            "--nv",
            *(f"--bind={each}" for each in mounts),
            "--pwd",
            str(tmp_path),
            image,
        ]
    else:
        pairs = ",".join(f"{each}:{each}" for each in mounts)
        options = [f"--container-image={image}", f"--container-mounts={pairs}", f"--container-workdir={tmp_path}"]
        assert [word for word in before if word.startswith("--container")] == options


def test_pipeline_submits_five_jobs_that_wait_for_each_other(call, tmp_path):
    status, calls, _ = call("pipeline.sh", "my.yaml", "models/a b", "out", "seed=$(touch bad)")
    assert status == 0 and (tmp_path / "out").is_dir() and not (tmp_path / "bad").exists()
    names = ["convert", "sft", "rl", "export", "evaluate"]
    assert [words[:3] for words in calls] == [["sbatch", "--parsable", f"--job-name={name}"] for name in names]
    for number, words in enumerate(calls):
        wait = [f"--dependency=afterok:{100 + number}", "--kill-on-invalid-dep=yes"]
        assert [word for word in words if word.startswith(("--dep", "--kill"))] == (wait if number else [])
    convert, sft, rl, export, evaluate = (words[words.index(script_of(words)) :] for words in calls)
    assert convert[1:] == ["models/a b", "out/start", "--to", "megatron"]
    assert sft[1:] == ["my.yaml", "seed=$(touch bad)", "run_dir=out/sft", "model.path=out/start", "trainer.steps=0"]
    assert rl[4:] == ["model.path=out/sft/checkpoints/step_000000/actor", "warm_start=null", "trainer.steps=40"]
    assert export[1:] == ["out/rl", "out/model", "--to", "hf"]
    assert evaluate[4:] == ["model.path=out/model", "warm_start=null", "trainer.steps=0"]
    assert [Path(script_of(words)).name for words in calls] == [
        *("convert.sbatch", "train.sbatch", "train.sbatch", "convert.sbatch", "train.sbatch")
    ]


def script_of(words):
    return next(word for word in words if word.endswith(".sbatch"))


def test_pipeline_that_is_run_again_leaves_out_what_is_there(call, tmp_path):
    names = ["convert", "sft", "rl", "export", "evaluate"]
    for made, left in (("o t/start", names[1:]), ("o t/sft", names[1:]), ("o t/model", names[4:])):
        (tmp_path / made).mkdir(parents=True)
        status, calls, _ = call("pipeline.sh", "my.yaml", "models/a", "o t")
        assert status == 0 and [words[2] for words in calls] == [f"--job-name={name}" for name in left]
        assert not any(word.startswith("--dependency") for word in calls[0])
    # A run resumes from its checkpoint, which has the weights of the model before.
    (tmp_path / "o t/model").rename(tmp_path / "o t/evaluation")
    status, calls, said = call("pipeline.sh", "my.yaml", "models/a", "o t")
    assert (status, calls) == (2, [])
    assert "o t/evaluation has the weights of a model that was in o t/model before" in said


def test_pipeline_without_its_arguments_submits_nothing(call):
    status, calls, said = call("pipeline.sh", "my.yaml", "models/a")
    assert (status, calls) == (2, []) and said.startswith("usage: slurm/pipeline.sh RECIPE MODEL OUT")
