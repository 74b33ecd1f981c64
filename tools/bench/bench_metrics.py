#!/usr/bin/env python3
"""Measure what telling others the metrics of each step costs, of a step of the quickstart or another recipe.

Steps of one run in turn with and without: five that write metrics.jsonl and TensorBoard, and send to the dashboards,
then five that do neither. Of each five the first does not count, since what was sent before may still be on its way.

Cases, each with a textfile: alive (a Pushgateway of this machine, where prometheus-pushgateway is installed, and
Weights & Biases offline), refused (a gateway's port at which nobody listens), hangs (one that takes connections and
never answers). Held up: how much longer training waits at the end of a step. Processor: what the threads and processes
that send take of it beside. Their sum over the step without is the cost, as if no core were free for sending. Longer:
how much longer the median step takes, which a machine's own unrest may hide.

Examples:
  python tools/bench/bench_metrics.py
  python tools/bench/bench_metrics.py --cases alive --steps 120 --check
  python tools/bench/bench_metrics.py --recipe my.yaml --override trainer.global_batch_size=64 --json metrics.json

Exit status: 0 done, 1 with --check the bound was missed, 2 a run failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hybridflow.errors import HybridflowError
from hybridflow.launch.local import run_local
from hybridflow.observe.table import format_table
from hybridflow.recipe.load import load_recipe

BOUND = 0.01
"""Most that telling may cost, of a step."""

BLOCK = 5
"""Steps one after the other that do alike."""

SKIPPED = 2 * BLOCK
"""Steps in which memory is first touched, and dashboards are opened."""

CASES = ("alive", "refused", "hangs")

ALONE = ("warm_start=null", "trainer.validate_every=0", "trainer.save_every=0", "trainer.num_validation=1")
"""Nothing but training steps."""

GATEWAY = "prometheus-pushgateway"


class Row(NamedTuple):
    """A step, as the lowest rank saw it.

    Attributes:
        step: Its number.
        is_telling: Whether its metrics are told.
        at_s: When its end began, by a monotonic clock.
        held_s: How long its end took.
        cpu_s: Processor time of the threads and processes that send, up to then.
    """

    step: int
    is_telling: bool
    at_s: float
    held_s: float
    cpu_s: float


class Cost(NamedTuple):
    """Of a step, in seconds; medians, but for the processor time.

    Attributes:
        without_s: A step that tells nothing.
        with_s: One that does.
        held_s: How much longer its end takes.
        cpu_s: Processor time of what sends, mean.
    """

    without_s: float
    with_s: float
    held_s: float
    cpu_s: float

    @property
    def share(self) -> float:
        """Waits and processor time over the step without."""
        return (self.held_s + self.cpu_s) / self.without_s


def is_telling(step: int) -> bool:
    """Whether a step, counted from 1, tells its metrics."""
    return (step - 1) // BLOCK % 2 == 0


def cost_of(rows: Sequence[Row]) -> Cost:
    """What telling costs, from all steps of a run."""
    pairs = [(row, following) for row, following in zip(rows, rows[1:], strict=False) if row.step > SKIPPED]
    counted = [pair for pair in pairs if (pair[0].step - 1) % BLOCK]
    steps_s, held_s = (
        {
            told: statistics.median(measure(*pair) for pair in counted if pair[0].is_telling == told)
            for told in (True, False)
        }
        for measure in (lambda row, following: following.at_s - row.at_s, lambda row, following: row.held_s)
    )
    cpu_s = pairs[-1][1].cpu_s - pairs[0][0].cpu_s
    num_telling = sum(row.is_telling for row, _ in pairs)
    return Cost(steps_s[False], steps_s[True], held_s[True] - held_s[False], cpu_s / num_telling)


def table(found: dict[str, Cost]) -> str:
    """A row for each case."""
    lines: list[tuple[str, ...]] = [("case", "step without ms", "longer ms", "held up ms", "processor ms", "cost")]
    for case, cost in found.items():
        seconds = cost.without_s, cost.with_s - cost.without_s, cost.held_s, cost.cpu_s
        lines.append((case, *(f"{1000 * each:.2f}" for each in seconds), f"{cost.share:.2%}"))
    return "\n".join(format_table(lines, num_left=1))


@contextlib.contextmanager
def dashboards(case: str, folder: Path) -> Iterator[list[str]]:
    """Overrides of a recipe that name what a case has, which is there meanwhile."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        prometheus = {"textfile": str(folder / "run.prom"), "pushgateway_url": f"http://127.0.0.1:{port}"}
        asked: dict[str, Any] = {"prometheus": prometheus}
        if case == "hangs":
            # The kernel takes connections; nobody reads what comes.
            listener.listen(64)
        else:
            listener.close()
        if case == "alive":
            asked["wandb"] = {"project": "bench", "offline": True}
            if shutil.which(GATEWAY) is None:
                del prometheus["pushgateway_url"]
                print(f"bench_metrics: {GATEWAY} is not installed: without it", file=sys.stderr, flush=True)
            else:
                stack.enter_context(_gateway(port))
        yield [f"metrics={json.dumps(asked)}"]


@contextlib.contextmanager
def _gateway(port: int) -> Iterator[None]:
    address = f"127.0.0.1:{port}"
    process = subprocess.Popen([GATEWAY, f"--web.listen-address={address}"], stderr=subprocess.DEVNULL)
    try:
        end_s = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://{address}/-/ready", timeout=5).close()
                break
            if time.monotonic() > end_s:
                raise HybridflowError(f"{GATEWAY} did not answer at {address} within 20 s")
            time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait()


def measure(recipe: str, overrides: Sequence[str], folder: Path) -> list[Row]:
    """Run a recipe, and return its steps.

    Raises:
        HybridflowError: The run failed.
    """
    cluster = load_recipe(recipe, overrides).cluster
    report = folder / "steps.json"
    words = ["--rank", str(report), "train", recipe, *overrides, f"run_dir={folder / 'run'}"]
    program = (sys.executable, str(Path(__file__).resolve()))
    status = run_local(words, num_ranks=cluster.ranks, threads_per_rank=cluster.threads_per_rank, program=program)
    if status != 0:
        raise HybridflowError(f"the run ended with {status}; see above")
    return [Row(*row) for row in json.loads(report.read_text(encoding="utf-8"))]


def run_rank(report: Path, words: list[str]) -> int:
    """Be one rank of a run that tells its metrics in some steps, and write down when they were.

    Args:
        report: For the lowest rank's rows.
        words: Of the ``hybridflow`` command.
    """
    import threading

    import psutil

    from hybridflow.cli import main as run_command
    from hybridflow.trainer import trainer as trainer_module

    process, rows = psutil.Process(), list[Row]()

    def cpu_s() -> float:
        """Of the threads that send, by their ids, and of processes that they have begun."""
        senders = {each.native_id for each in threading.enumerate() if each.name.startswith("metrics to ")}
        own = sum(each.user_time + each.system_time for each in process.threads() if each.id in senders)
        others = 0.0
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                others += sum(child.cpu_times()[:2])
        return own + others

    class Record(trainer_module.Record):
        """Tells nothing in the steps of every other block."""

        def end_step(self, step: int, shares: Any) -> dict[str, float]:
            log, began_s = self._log, time.perf_counter()
            if not is_telling(step):
                self._log = None
            found = super().end_step(step, shares)
            self._log = log
            if log is not None:
                held_s = time.perf_counter() - began_s
                rows.append(Row(step, is_telling(step), began_s, held_s, cpu_s()))
            return found

        def finish(self, step: int, *, is_done: bool, saved_step: int | None = None) -> None:
            super().finish(step, is_done=is_done, saved_step=saved_step)
            if rows:
                report.write_text(json.dumps(rows), encoding="utf-8")

    trainer_module.Record = Record  # type: ignore[misc]
    return run_command(words)


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line, measure, print; or be a rank."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--rank"]:
        return run_rank(Path(words[1]), words[2:])
    options = _parse(words)
    try:
        found = {}
        with tempfile.TemporaryDirectory() as name:
            data = (f"data.train={name}/train.jsonl", f"data.held_out={name}/held_out.jsonl")
            data = data if options.recipe == "quickstart" else ()
            overrides = [*ALONE, *data, *options.override, f"trainer.steps={options.steps}"]
            for case in options.cases:
                folder = Path(name) / case
                folder.mkdir()
                with dashboards(case, folder) as named:
                    found[case] = cost_of(measure(options.recipe, [*overrides, *named], folder))
    except HybridflowError as error:
        print(f"bench_metrics: {error}", file=sys.stderr)
        return 2
    print(table(found))
    if options.json is not None:
        figures = {case: {**cost._asdict(), "share": cost.share} for case, cost in found.items()}
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    is_missed = any(cost.share > BOUND for cost in found.values())
    print(f"bound: {BOUND:.0%} of a step: {'missed' if is_missed else 'kept'}")
    return int(options.check and is_missed)


def _parse(words: Sequence[str]) -> argparse.Namespace:
    summary, _, rest = str(__doc__).partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="quickstart", help="to run (default: %(default)s)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="dashboards (default: all)")
    parser.add_argument("--steps", type=int, default=60, help="training steps of each run (default: %(default)s)")
    parser.add_argument("--override", nargs="*", default=[], metavar="KEY=VALUE", help="of the recipe")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--check", action="store_true", help=f"fail where the cost is above {BOUND} of a step")
    options = parser.parse_args(words)
    if options.steps < SKIPPED + 2 * BLOCK:
        parser.error(f"--steps {options.steps}: expected at least {SKIPPED + 2 * BLOCK}")
    return options


if __name__ == "__main__":
    sys.exit(main())
