"""Whatever goes wrong ends the job in time, non-zero, with one message over all ranks and no traceback."""

import json
import os
import re
import signal
import socket
import sys
import textwrap
import time
from dataclasses import replace

import pytest

from hybridflow import cli
from hybridflow.dataflow.graph import step
from hybridflow.flows import nodes
from hybridflow.flows.registry import ALGORITHMS
from hybridflow.observe.status import read_status
from hybridflow.parallel import rank
from hybridflow.roles.actor import Actor
from tests.e2e.commands import fork_ranks, run_command, run_well, write_recipe
from tests.support.waiting import with_more_time

HOST = socket.gethostname()


@pytest.fixture
def folder(tmp_path):
    write_recipe(tmp_path)
    return tmp_path


def test_bad_recipe_is_refused_before_any_rank_is_started(folder):
    # The launcher itself may not have imported torch, let alone built a model or started ranks.
    program = """
    import subprocess, sys
    from hybridflow.cli import main
    subprocess.Popen = None
    status = main(sys.argv[1:])
    assert not {"torch", "megatron", "mpi4py"} & sys.modules.keys()
    sys.exit(status)
    """
    argv = ["train", "tiny.yaml", "cluster.ranks=8", "actor.update={tp: 2, pp: 4, dp: 4}"]
    done = run_command(argv, folder, program=[sys.executable, "-c", textwrap.dedent(program)])
    done.complains_once("hybridflow: ", "tp 2 × pp 4 × dp 4", "= 32 ≠ 8 ranks", "set dp=1")
    assert done.codes == (2,) and not (folder / "run").exists()


def test_bad_recipe_under_a_launcher_is_said_once(folder):
    done = fork_ranks(["train", "tiny.yaml", "trainer.step=3"], folder, num_ranks=3)
    done.complains_once("trainer.step: unknown key")
    assert done.codes == (2, 2, 2)


def test_missing_column_is_refused_before_any_rank_is_started(folder, monkeypatch, capfd):
    from hybridflow.cli import main

    monkeypatch.chdir(folder)
    broken = step(sample=nodes.SAMPLE, experience=nodes.ACTOR_LOG_PROBS >> nodes.advantages("grpo"))
    monkeypatch.setitem(ALGORITHMS, "grpo", replace(ALGORITHMS["grpo"], step=broken))
    assert main(["train", "tiny.yaml"]) == 2
    errors = capfd.readouterr().err
    assert errors.startswith("hybridflow: node 'advantage.grpo' reads column 'scores', which no earlier node writes")
    assert errors.count("\n") == 1 and not (folder / "run").exists()


def test_other_number_of_ranks_than_the_recipe_has(folder):
    done = fork_ranks(["train", "tiny.yaml"], folder, num_ranks=3)
    done.complains_once("3 ranks, but", "layouts need 2; ", "add a fallback")
    assert set(done.codes) == {2}


def test_prompt_longer_than_the_context_is_named_by_line(folder):
    rows = [{"prompt": prompt, "answer": "1"} for prompt in ("1+0=", "1+" + "0" * 40 + "=", "0+1=")]
    (folder / "data").mkdir()
    for name in ("train", "held_out"):
        (folder / f"data/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = fork_ranks(["train", "tiny.yaml", "data.arithmetic=null"], folder)
    done.complains_once("data/train.jsonl:2: prompt of", "exceeds model.max_context=24", "shorten the prompt to 20")
    assert set(done.codes) == {2}


def test_data_that_cannot_be_made_is_told_by_the_rank_that_makes_it(folder):
    done = fork_ranks(["train", "tiny.yaml", "data.arithmetic.max_operand=3"], folder)
    done.complains_once(
        "hybridflow: rank 0 on ", ", in reading data and making models", "arithmetic: num_train=200", "make only 10"
    )


REWARDS = """
import ctypes, json, os, sys, time

def raises(prompt, response, answer):
    if prompt == open("one_prompt").read():
        raise ValueError(f"no unit in {prompt}")
    return 1.0

def nan(prompt, response, answer):
    return float("nan")

def slow_to_die(prompt, response, answer):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), int(os.environ["DIE_BY"]))
    return 1.0

def endless(prompt, response, answer):
    while True:
        time.sleep(0.01)

def fails_while_others_wait(prompt, response, answer):
    if os.environ["RANK"] == "1":
        raise ValueError("no unit")
    time.sleep(600)

held = []

def holds_python(prompt, response, answer):
    if os.environ["RANK"] == "1" and not held:
        held.append(ctypes.PyDLL(None).sleep(3))
    return 1.0
"""


@pytest.fixture
def rewards(folder):
    """A module of rewards in the working directory; one training prompt that a step of all of them meets."""
    (folder / "rewards.py").write_text(REWARDS)
    from hybridflow.config.data import ArithmeticConfig
    from hybridflow.data.arithmetic import make_problems

    train, _ = make_problems(ArithmeticConfig(num_train=200, num_held_out=8, max_operand=99, mistake_share=0.5))
    (folder / "one_prompt").write_text(train[17]["prompt"])
    return folder


# Every problem is drawn in the first step.
ALL_IN_ONE_STEP = ["trainer.global_batch_size=400", "trainer.mini_batch_size=null", "rollout.max_new_tokens=1"]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (
            "rewards:raises",
            ["'rewards:raises' (rewards.py:", ") on data/train.jsonl:18 with response", "ValueError: no unit in"],
        ),
        (
            "rewards:nan",
            ["'rewards:nan' (rewards.py:", ") on data/held_out.jsonl:", "returned nan; expected a finite number"],
        ),
        (
            "rewards:no",
            ["reward.function='rewards:no'", "has no attribute 'no'", "give one of exact_match, length, regex"],
        ),
    ],
)
def test_bad_reward_names_the_sample(rewards, function, says):
    done = fork_ranks(["train", "tiny.yaml", f"reward.function={function}", *ALL_IN_ONE_STEP], rewards)
    done.complains_once(*says)
    assert set(done.codes) == {2}


def test_weights_that_an_update_has_made_useless_are_not_called_damaged(folder):
    done = fork_ranks(["train", "tiny.yaml", "actor.optimizer.lr=1e30", "trainer.mini_batch_size=null"], folder)
    done.complains_once("in actor.sample (train step 2)", "logits are not finite", "lower actor.optimizer.lr=1e+30 or ")


@pytest.mark.slow
def test_rank_that_never_comes_is_named_once(folder):
    argv = ["train", "tiny.yaml", "cluster.ranks=4", "actor.update={dp: 4}", "actor.rollout={dp: 4}"]

    def check(limit_s):
        limit = f"cluster.start_deadline_s={limit_s:g}"
        done = fork_ranks([*argv, limit], folder, num_ranks=4, start_only=[0, 2])
        done.complains_once(
            f"2 of 4 ranks did not come within {limit_s:g} s: ranks 1,3", "raise cluster.start_deadline_s"
        )
        assert set(done.codes) == {1} and done.seconds < 200

    # Those that come are to do so within it.
    with_more_time(check, 2.0, 20.0)


def test_rank_0_that_never_comes(folder):
    done = fork_ranks(["train", "tiny.yaml", "cluster.start_deadline_s=2"], folder, start_only=[1])
    done.complains_once("no rendezvous at 127.0.0.1:", "within 2 s", "rank 0 must run there")
    assert done.codes == (1,) and done.seconds < 200


def in_the_middle_of_an_update(end):
    """A hook: on the rank named in VICTIM, ``end`` happens between the collectives of the first optimizer step."""

    def hook(rank):
        update, victim = Actor.update, int(os.environ["VICTIM"])

        def ended(self, batch, decided):
            if rank == victim:
                end()
            return update(self, batch, decided)

        Actor.update = ended

    return hook


def where_it_stands(done, rank):
    """The line of the report that says where a rank is."""
    (line,) = (line for line in done.err.splitlines() if line.startswith(f"  rank {rank} on "))
    return line


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_rank_that_is_killed_ends_the_others(folder, monkeypatch, victim):
    monkeypatch.setenv("VICTIM", str(victim))
    die = in_the_middle_of_an_update(lambda: os.kill(os.getpid(), signal.SIGKILL))
    done = fork_ranks(["train", "tiny.yaml"], folder, hook=die)
    assert done.codes[1 - victim] == 1 and done.codes[victim] == -signal.SIGKILL
    assert done.err.startswith(f"hybridflow: rank {victim} on {HOST} was lost, last seen in ")
    assert "its connection closed" in done.err.splitlines()[0]
    assert "in actor.update (train step 1), at " in where_it_stands(done, 1 - victim)
    assert done.err.count("\n") == 2, done.err
    status = read_status(folder / "run")
    assert (status.state, status.step, status.logs) == ("failed", 0, str(folder / "run/logs/0001"))
    assert status.cause is not None and status.cause.startswith(f"rank {victim} on "), status.cause


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_rank_that_is_stopped_ends_the_others(folder, monkeypatch, victim):
    monkeypatch.setenv("VICTIM", str(victim))
    stop = in_the_middle_of_an_update(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    done = fork_ranks(["train", "tiny.yaml", "cluster.dead_after_s=2"], folder, hook=stop)
    assert done.codes[1 - victim] == 1
    assert done.err.startswith(f"hybridflow: rank {victim} on {HOST} was lost, last seen in ")
    assert "no sign of life for 2 s" in done.err.splitlines()[0] and done.err.count("\n") == 2, done.err


def test_rank_that_hangs_is_found_by_where_it_stands(folder, monkeypatch):
    monkeypatch.setenv("VICTIM", "1")
    hang = in_the_middle_of_an_update(lambda: time.sleep(600))
    done = fork_ranks(["train", "tiny.yaml", "cluster.deadline_s=3"], folder, hook=hang)
    assert done.codes == (1, 1)
    assert done.err.startswith(f"hybridflow: rank 0 on {HOST}, in actor.update (train step 1): ")
    assert "lost contact with some" in done.err and "(deadline 3 s)" in done.err, done.err
    assert "in actor.update (train step 1), at test_failures.py:" in where_it_stands(done, 1)
    assert done.err.count("\n") == 2, done.err


@pytest.mark.parametrize("how", [[], ["reward.max_in_flight=2"]], ids=["in place", "in threads"])
def test_reward_that_hangs_on_all_ranks_ends_the_job(rewards, how):
    done = fork_ranks(["train", "tiny.yaml", "reward.function=rewards:endless", "cluster.deadline_s=3", *how], rewards)
    assert done.codes == (1, 1)
    what = r"in reward\.score_validation: reward 'rewards:endless' \(rewards\.py:\d+\): no answer within "
    where = r"calls\.py:\d+ \w+" if how else r"rewards\.py:\d+ endless"
    remedy = r"mend it, set its timeout_s, or raise cluster\.deadline_s"
    line = rf"hybridflow: rank \d on {HOST}, {what}cluster\.deadline_s=3 s \(main thread at {where}; .*\); {remedy}\n"
    assert re.fullmatch(line, done.err), done.err
    assert ", in endless\n" in (rewards / f"run/logs/0001/rank-0000{done.err.split()[2]}.log").read_text()


def test_failure_does_not_wait_for_a_busy_rank(rewards):
    done = fork_ranks(["train", "tiny.yaml", "reward.function=rewards:fails_while_others_wait"], rewards)
    done.complains_once(f"hybridflow: rank 1 on {HOST}, in reward.score_validation: ", "ValueError: no unit")
    assert done.codes == (2, 2) and done.seconds < 400


@pytest.mark.slow
def test_long_call_that_holds_python_is_not_death(rewards):
    argv = ["train", "tiny.yaml", "reward.function=rewards:holds_python", "cluster.dead_after_s=2", "trainer.steps=1"]
    run_well(argv, rewards)


@pytest.mark.slow
def test_launcher_says_how_a_rank_died_and_the_others_where_it_was(rewards):
    environ = {**os.environ, "DIE_BY": str(int(signal.SIGKILL))}
    done = run_command(["train", "tiny.yaml", "reward.function=rewards:slow_to_die"], rewards, environ=environ)
    lines = done.err.splitlines()
    assert lines[0].startswith("error: rank 1 was killed by SIGKILL; if nobody did so, memory ran out"), done.err
    assert lines[1].startswith(f"hybridflow: rank 1 on {HOST} was lost, last seen in "), done.err
    assert len(lines) == 3 and where_it_stands(done, 0)
    assert done.codes == (137,)


@pytest.mark.slow
def test_stopped_rank_is_ended_with_the_others(rewards):
    environ = {**os.environ, "DIE_BY": str(int(signal.SIGSTOP))}
    argv = ["train", "tiny.yaml", "reward.function=rewards:slow_to_die", "cluster.dead_after_s=2"]
    done = run_command(argv, rewards, environ=environ)
    assert done.err.startswith(f"hybridflow: rank 1 on {HOST} was lost, last seen in ")
    # The others end with 1; the rank itself is killed, before or after the launcher has seen them end.
    assert done.codes in ((1,), (128 + signal.SIGKILL,))


def test_failure_of_ours_shows_its_traceback_once(folder):
    def broken(rank):
        def update(self, batch, decided):
            raise KeyError("a bug")

        Actor.update = update

    done = fork_ranks(["train", "tiny.yaml"], folder, hook=broken)
    assert done.codes == (1, 1)
    assert done.err.count("Traceback (most recent call last)") == done.err.count("KeyError: 'a bug'") == 1
    first, *_, last = done.err.splitlines()
    assert re.fullmatch(rf"hybridflow: rank [01] on {HOST} failed in actor\.update \(train step 1\):", first)
    assert "this is an error of hybridflow's own" in last


def test_term_before_the_ranks_have_met_is_kept_for_later(folder, monkeypatch):
    """It ends no rank; what it asks for is the trainer's matter."""
    monkeypatch.setenv("VICTIM", "1")

    def terminate(rank):
        if rank == 1:
            make = cli.CaughtSignals.__init__

            def made(self, **named):
                make(self, **named)
                os.kill(os.getpid(), signal.SIGTERM)

            cli.CaughtSignals.__init__ = made

    done = fork_ranks(["train", "tiny.yaml"], folder, hook=terminate)
    assert set(done.codes) <= {0, 75}, done


def test_ranks_end_though_what_the_user_left_behind_does_not(folder):
    """All that Python does at its end is here a sleep; test_rank.py has a thread and a function of atexit."""

    def hook(number):
        def stuck(start, signals, load, cluster):
            rank.run_rank(start, signals, lambda: lambda world: 75, cluster)
            time.sleep(60)

        rank._LEAVE_S, cli.run_rank = 0.3, stuck

    done = fork_ranks(["train", "tiny.yaml"], folder, hook=hook)
    done.complains_once(f"hybridflow: rank 0 on {HOST}: its work is done", "exit status 75")
    assert done.codes == (75, 75)
