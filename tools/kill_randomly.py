#!/usr/bin/env python3
"""Kill random ranks of one job again and again, and see that it ends as if nothing had happened.

Starts a Slurm cluster of virtual nodes on this machine (tests/support/slurm_cluster.py), submits a tiny job through
slurm/train.sbatch, and ends a random rank by SIGKILL, at random moments of the run: within steps, and while the job is
starting again. The random choices follow from --seed; what they hit does not, since it depends on the clock.

At the end it checks that the job has finished in the one allocation that it had, that each start went on from the last
checkpoint that was complete before the kill, and that metrics.jsonl equals, bit for bit, that of an uninterrupted run.

Examples:
  python tools/kill_randomly.py
  python tools/kill_randomly.py --steps 12 --kills 3 --seed 7
  python tools/kill_randomly.py --folder /tmp/killed --json killed.json

Exit status: 0 all held, 1 something did not, 2 there is no Slurm here.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from hybridflow.checkpoint.store import latest_step
from hybridflow.observe.starts import StartRecord, read_starts
from hybridflow.parallel.process import is_running
from hybridflow.parallel.process import kill as kill_process
from tests.e2e.commands import lasting_metrics, run_command
from tests.slurm.jobs import SCRIPTS, output, rank_processes, steps, write_job
from tests.support.slurm_cluster import ENDED, SlurmCluster, missing_programs

NUM_RANKS = 4

_WITHIN_START_S = 20.0
"""A kill whose step is over when the job begins again comes within so many seconds of that."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill, and what was there just before it.

    Attributes:
        at_s: Seconds since the job was submitted.
        unix_s: Unix time, in seconds.
        rank: Who was killed.
        start: Number of the run's start that was going on; 0: none had been noted yet.
        step: Last step whose metrics were there.
        saved: Step of the last complete checkpoint; None: there was none.
    """

    at_s: float
    unix_s: float
    rank: int
    start: int
    step: int
    saved: int | None


def main() -> int:
    """Run the job, print the table, and say what did not hold."""
    options = _parse()
    if missing := missing_programs():
        print(
            f"no Slurm here: {', '.join(missing)} not found; tests/support/slurm.sh installs it on Debian",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory() as made:
        folder = Path(options.folder or made).resolve()
        arguments = ["tiny.yaml", f"trainer.steps={options.steps}", f"trainer.max_idle_starts={options.kills + 1}"]
        for name in ("uninterrupted", "killed"):
            (folder / name).mkdir(parents=True)
            write_job(folder / name)
        done = run_command(["train", *arguments], folder / "uninterrupted", within_s=options.within_s)
        if done.codes != (0,):
            print(f"the uninterrupted run failed:\n{done.err}", file=sys.stderr)
            return 1
        kills, problems = _run(folder / "killed", arguments, options)
        starts = read_starts(folder / "killed/run")
        problems += _lost_too_much(kills, starts)
        if lasting_metrics(folder / "killed/run") != lasting_metrics(folder / "uninterrupted/run"):
            problems.append("metrics.jsonl differs from that of the uninterrupted run")
    print(_table(kills, starts))
    if options.json is not None:
        found = {"kills": [asdict(kill) for kill in kills], "starts": [asdict(start) for start in starts]}
        options.json.write_text(json.dumps({**found, "problems": problems}, indent=1) + "\n", encoding="utf-8")
    print("\n".join(problems) or f"finished after {len(kills)} kills, with the curve of the uninterrupted run")
    return int(bool(problems))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="training steps of the job (default: 60)")
    parser.add_argument("--kills", type=int, default=20, help="how often a rank is killed (default: 20)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments and ranks (default: 1)")
    parser.add_argument("--reward-s", type=float, default=0.1, help="what scoring a sample takes (default: 0.1)")
    parser.add_argument(
        "--within-s", type=float, default=7200, help="longest wait for either run, in seconds (default: 7200)"
    )
    parser.add_argument("--folder", metavar="DIR", help="new or empty; both runs stay there (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write kills and starts there, too")
    return parser.parse_args()


def _run(folder: Path, arguments: list[str], options: argparse.Namespace) -> tuple[list[Kill], list[str]]:
    """Submit the job and kill its ranks until all kills are done; what was killed, and what went wrong."""
    choice = random.Random(options.seed)
    # In steps; none after the last, where there may be no rank left to kill.
    moments = sorted(choice.uniform(0, options.steps - 1) for _ in range(options.kills))
    with SlurmCluster(num_nodes=2) as cluster:
        began_s, end_s = time.time(), time.monotonic() + options.within_s
        job = cluster.sbatch(
            "--nodes=2",
            f"--ntasks-per-node={NUM_RANKS // 2}",
            "--time=UNLIMITED",
            str(SCRIPTS / "train.sbatch"),
            *arguments,
            cwd=folder,
            env={"REWARD_S": str(options.reward_s)},
        )
        kills: list[Kill] = []
        while (state := cluster.job(job)["JobState"]) not in ENDED and time.monotonic() < end_s:
            if len(kills) < len(moments):
                kill = _kill_one(cluster, job, folder, moments[len(kills)], choice, began_s)
                kills += [kill] if kill is not None else []
            time.sleep(0.1)
        problems = [] if state == "COMPLETED" else [f"the job is {state}:\n{output(cluster, job)}"]
        if cluster.job(job)["Restarts"] != "0":
            problems.append("Slurm has requeued the job, which should have kept its allocation")
    if len(kills) < len(moments):
        problems.append(f"only {len(kills)} of {len(moments)} kills were done")
    return kills, problems


def _kill_one(
    cluster: SlurmCluster, job: str, folder: Path, moment: float, choice: random.Random, began_s: float
) -> Kill | None:
    """Kill a rank of the present start, at its moment; None: the start or the job ended before."""
    ranks = rank_processes(cluster, job)
    if len(ranks) < NUM_RANKS or not all(map(is_running, ranks.values())):
        return None
    victim = choice.randrange(NUM_RANKS)
    if max(steps(folder), default=0) >= moment:
        time.sleep(choice.uniform(0, _WITHIN_START_S))
    while max(steps(folder), default=0) < int(moment) and is_running(ranks[victim]):
        time.sleep(0.02)
    # Somewhere within the step, and not where its metrics are written.
    time.sleep(choice.uniform(0, 1))
    step, starts = max(steps(folder), default=0), read_starts(folder / "run")
    saved = latest_step(folder / "run")
    if not is_running(ranks[victim]):
        return None
    kill_process(ranks[victim])
    number = max((start.number for start in starts), default=0)
    now_s = time.time()
    return Kill(at_s=now_s - began_s, unix_s=now_s, rank=victim, start=number, step=step, saved=saved)


def _next_start(kill: Kill, starts: list[StartRecord]) -> StartRecord | None:
    """The first start after a kill."""
    return next((start for start in starts if start.began_s > kill.unix_s), None)


def _lost_too_much(kills: list[Kill], starts: list[StartRecord]) -> list[str]:
    """The kills that cost more than the steps since the last save."""
    problems = []
    for number, kill in enumerate(kills, start=1):
        start = _next_start(kill, starts)
        if start is None:
            problems.append(f"kill {number}: no start after it")
        elif kill.saved is not None and (start.step is None or start.step < kill.saved):
            problems.append(f"kill {number}: step {kill.saved} was saved, the next start went on from {start.step}")
    return problems


def _table(kills: list[Kill], starts: list[StartRecord]) -> str:
    """A line for each kill."""
    rows = ["| kill | at, s | rank | step | saved | went on from | steps lost | began again after, s |"]
    rows.append("|---|---|---|---|---|---|---|---|")
    for number, kill in enumerate(kills, start=1):
        start = _next_start(kill, starts)
        cells = [number, f"{kill.at_s:.0f}", kill.rank, kill.step, "-" if kill.saved is None else kill.saved]
        if start is None:
            cells += ["-", "-", "-"]
        else:
            step = start.step or 0
            cells += [step, max(0, kill.step - step), f"{start.began_s - kill.unix_s:.0f}"]
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
