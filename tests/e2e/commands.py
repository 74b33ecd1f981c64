"""Running the command for a test: as real processes, or as ranks forked from this one, which saves the imports."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.launch.local import free_port as free_port

RECIPE = """
name: tiny
algorithm: grpo
cluster: {ranks: 2, deadline_s: 60, start_deadline_s: 300}
model: {num_layers: 2, hidden_size: 16, ffn_hidden_size: 32, num_attention_heads: 2, max_context: 24}
data:
  train: data/train.jsonl
  held_out: data/held_out.jsonl
  arithmetic: {num_train: 200, num_held_out: 8, max_operand: 99, mistake_share: 0.5}
run_dir: run
warm_start: {steps: 2, batch_size: 8, lr: 1.0e-2}
actor:
  update: {tp: 2}
  rollout: {dp: 2}
  optimizer: {lr: 1.0e-2}
reward: {function: "rewards:score"}
rollout: {max_new_tokens: 4, group_size: 2}
trainer: {steps: 2, global_batch_size: 8, mini_batch_size: 4}
"""
"""GRPO on two ranks, in the smallest model that has two layers and two heads."""

REWARDS = """
def score(prompt, response, answer):
    return float(sum(map(ord, prompt + response)) % 3)
"""
"""A module for the working directory; its scores differ within every group, so that there is something to learn."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a command left: exit status of each process, and what all of them wrote."""

    codes: tuple[int, ...]
    out: str
    err: str
    seconds: float

    def complains_once(self, *words: str) -> None:
        """One message in words, no traceback, nothing else on stderr, and a status that says so."""
        lines = self.err.splitlines()
        assert len(lines) == 1 and "Traceback" not in self.err, self.err
        assert all(word in lines[0] for word in words), (words, lines[0])
        assert all(code != 0 for code in self.codes), self.codes


def write_recipe(folder: Path, text: str = RECIPE) -> None:
    """Put a recipe and its rewards into a folder."""
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "tiny.yaml").write_text(text)


def run_command(
    argv: Sequence[str],
    folder: Path,
    *,
    program: Sequence[str] = (sys.executable, "-m", "hybridflow"),
    environ: Mapping[str, str] = os.environ,
    within_s: float = 600.0,
) -> Done:
    """Run the command as a user would, from ``folder``; what is left of it when time is up is killed."""
    start = time.monotonic()
    child = subprocess.Popen(
        [*program, *argv],
        cwd=folder,
        env=dict(environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=within_s)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGTERM)
    return Done(codes=(child.returncode,), out=out, err=err, seconds=time.monotonic() - start)


def fork_ranks(
    argv: Sequence[str],
    folder: Path,
    *,
    num_ranks: int = 2,
    start_only: Sequence[int] | None = None,
    hook: Callable[[int], None] = lambda rank: None,
    within_s: float = 600.0,
) -> Done:
    """Run the command as ranks that a launcher which ends none of them has started: no deadline but the ranks' own.

    Args:
        argv: Arguments of the command.
        folder: Working directory.
        num_ranks: What the ranks are told their number is.
        start_only: Those that are started; None: all.
        hook: Called with the rank before the command, in its process.
        within_s: For the whole; a rank that is still there is killed, and counts as -9. So is one that was stopped, as
            soon as the others have ended.
    """
    # Imports what ranks need in this process. Programs that import this file to run commands need none of it.
    import tests.support.forked  # noqa: F401

    start = time.monotonic()
    port = free_port()
    ranks = tuple(range(num_ranks)) if start_only is None else tuple(start_only)
    children = [_fork_rank(list(argv), folder, rank, num_ranks, port, hook) for rank in ranks]
    codes = _wait(children, start + within_s)
    logs = {name: "".join((folder / f"{name}-{rank}.log").read_text() for rank in ranks) for name in ("out", "err")}
    return Done(codes=codes, **logs, seconds=time.monotonic() - start)


def run_well(argv: Sequence[str], folder: Path, **how: Any) -> Done:
    """Run the command as ``fork_ranks`` does; every rank is to end with 0, and none to complain."""
    done = fork_ranks(argv, folder, **how)
    assert set(done.codes) == {0} and done.err == "", (done.codes, done.err)
    return done


def kill_in_step(step: int) -> None:
    """The rank that calls this dies at the end of a step, before it is noted."""
    from hybridflow.trainer.trainer import Trainer

    finish_step = Trainer.finish_step

    def finish(self: Trainer, batch: Any, decided: Any) -> None:
        if decided["train_step"]["step"] == step:
            os.kill(os.getpid(), signal.SIGKILL)
        finish_step(self, batch, decided)

    Trainer.finish_step = finish  # type: ignore[method-assign]


def kill_when_logged(part: str) -> None:
    """The rank that calls this dies when responses are in a log of this part of a name."""
    from hybridflow.rollout.log_file import LogWriter

    add = LogWriter.add

    def add_or_die(self: LogWriter, responses: Any) -> None:
        add(self, responses)
        if part in str(self._path):
            os.kill(os.getpid(), signal.SIGKILL)

    LogWriter.add = add_or_die  # type: ignore[method-assign]


_METRICS_PAGE = Path(__file__).parents[2] / "docs/metrics.md"
_OF_A_ROLLOUT = [f"rollout/{name}" for name in ("reused", "continued", "claimed", "prefill_share", "preempted")]
"""What depends on which replica was quicker, and on what was there before."""


def lasting_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl without what depends on the clock, on when a checkpoint was written, or on a kill.

    Every number of a run has a row in docs/metrics.md.
    """
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    told = re.findall(r"^\| `([a-z_]+/[a-z_0-9]+)` \|", _METRICS_PAGE.read_text(encoding="utf-8"), flags=re.M)
    assert {name for row in rows for name in row} <= {"step", *told}
    return [
        {
            name: value
            for name, value in row.items()
            if not name.endswith("_s")
            and not name.startswith(("control/", "checkpoint/", "run/", "memory/", "mfu/"))
            and name not in _OF_A_ROLLOUT
        }
        for row in rows
    ]


def without_validations(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """The same without validations, and the weights moved for them: a run of fewer steps has one at its end."""
    left_out = ("validation/", "reshard/")
    return [{name: value for name, value in row.items() if not name.startswith(left_out)} for row in rows]


def _fork_rank(argv: list[str], folder: Path, rank: int, num_ranks: int, port: int, hook: Callable[[int], None]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.chdir(folder)
        for name, descriptor in (("out", 1), ("err", 2)):
            os.dup2(os.open(f"{name}-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
        # pytest has put its own in their place.
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        size = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.update({**size, **place, "HYBRIDFLOW_SECRET": "known to the ranks of a test"})
        from hybridflow.cli import main
        from tests.support.forked import begin_rank

        begin_rank()
        hook(rank)
        code = main(argv)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(children: list[int], deadline: float) -> tuple[int, ...]:
    codes: dict[int, int] = {}
    stopped: set[int] = set()
    while len(codes) < len(children):
        for child in children:
            found, status = (0, 0) if child in codes else os.waitpid(child, os.WNOHANG | os.WUNTRACED)
            if found and os.WIFSTOPPED(status):
                stopped.add(child)
            elif found:
                codes[child] = os.waitstatus_to_exitcode(status)
        left = set(children) - codes.keys()
        if left <= stopped or time.monotonic() > deadline:
            for child in left:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    return tuple(codes[child] for child in children)
