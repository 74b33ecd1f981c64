#!/usr/bin/env python3
"""Check hybridflow on a machine with one GPU, in four commands of at most nine minutes each.

correctness: the GPU computes what a CPU does. learning: the quickstart learns. speed: GRPO steps, decoding, resharding
and checkpoints beside what the device can do. other-models: likewise of four layers of Qwen3-30B-A3B, Qwen3.5-9B,
GPT-OSS 20B and GLM-4.7-Flash. Each check is a process with a deadline. One that fails stops no other. After each check
DIR has its result: in results.json, as a row for the table of docs/gpu.md in results.md, and what it printed in
log.txt. A command that is given a DIR with results keeps those of other checks.

Where the machine has no network, pack first and carry the folder along with the clone. The checks make their models and
their data themselves.

Examples:
  python tools/gpu_kit.py --pack carried
  python tools/gpu_kit.py correctness --out results --carried carried --jobs 5
  python tools/gpu_kit.py speed --out results --only decode-7b grpo-1.5b
  python tools/gpu_kit.py all --dry-run

Exit status: 0 all checks passed, 1 some did not, 2 a wrong command, or no GPU.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
MOST_PACKED_BYTES = 60 << 20
LEAST_S = 20.0
"""No check is started with less time left."""

_POLL_S = 0.1


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        name: What results call it.
        module: What is run.
        argument: Its argument.
        deadline_s: Longest run, in seconds.
    """

    name: str
    module: str
    argument: str = ""
    deadline_s: float = 120.0


CHECKS: dict[str, tuple[Check, ...]] = {
    "correctness": (
        Check("device", "gpu_checks.device", deadline_s=60),
        Check("attention", "gpu_checks.attention", deadline_s=90),
        Check("kernels", "gpu_checks.kernels"),
        Check("families", "gpu_checks.families", deadline_s=300),
        Check("images", "gpu_checks.images"),
        Check("graphs", "gpu_checks.graphs"),
        Check("lora", "gpu_checks.lora"),
        Check("reshard", "gpu_checks.reshard"),
        Check("layouts", "gpu_checks.layouts"),
        Check("resume", "gpu_checks.resume"),
        Check("sampler", "gpu_checks.sampler"),
    ),
    "learning": (
        Check("quickstart-fp32", "gpu_checks.quickstart", "fp32", 260),
        Check("quickstart-bf16", "gpu_checks.quickstart", "bf16", 260),
    ),
    "speed": (
        Check("decode-7b", "gpu_checks.decode", "7b", 150),
        Check("grpo-1.5b", "gpu_checks.grpo", "1.5b", 180),
        Check("bandwidth", "gpu_checks.bandwidth"),
        Check("decode-0.5b", "gpu_checks.decode", "0.5b"),
        Check("grpo-0.5b", "gpu_checks.grpo", "0.5b"),
        Check("decode-1.5b", "gpu_checks.decode", "1.5b"),
        Check("checkpoint", "gpu_checks.checkpoint", deadline_s=180),
    ),
    "other-models": (
        Check("decode-moe", "gpu_checks.decode", "moe"),
        Check("grpo-moe", "gpu_checks.grpo", "moe", 180),
        Check("decode-linear", "gpu_checks.decode", "linear"),
        Check("grpo-linear", "gpu_checks.grpo", "linear", 180),
        Check("decode-sinks", "gpu_checks.decode", "sinks"),
        Check("decode-latent", "gpu_checks.decode", "latent"),
    ),
}
"""The most informative first."""


STATUSES = ("passed", "failed", "out of time", "not run")


class KitError(Exception):
    """The kit cannot do what it was asked for, and says why."""


def main(words: Sequence[str] | None = None) -> int:
    """Read the command line; pack, list, or run checks."""
    options = _parse(words)
    try:
        if options.pack is not None:
            pack(options.pack, options.python_version)
            return 0
        checks = chosen(options.command, options.only)
        if options.list:
            for check in checks:
                print(f"{check.name:16} at most {check.deadline_s:g} s")
            return 0
        with tempfile.TemporaryDirectory(prefix="gpu_kit_") as work:
            return run_checks(checks, options, Path(work))
    except KitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=(*CHECKS, "all"), help="which checks")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results go (default: nowhere with --dry-run)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these checks, in this order")
    parser.add_argument("--list", action="store_true", help="print the checks and run none")
    parser.add_argument("--dry-run", action="store_true", help="run every check on a CPU, at toy size")
    parser.add_argument("--carried", type=Path, metavar="FOLDER", help="what --pack has made, for what is missing here")
    parser.add_argument(
        "--deadline", type=float, default=540.0, metavar="S", help="seconds for all checks (default: 540)"
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="checks at a time; 1 for true speeds (default: 1, 2 with --dry-run)"
    )
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="collect what has to be carried, and run nothing")
    parser.add_argument(
        "--python-version", default="3.12", metavar="X.Y", help="of the machine that is packed for (default: 3.12)"
    )
    options = parser.parse_args(words)
    if options.pack is None and options.command is None:
        parser.error(f"name the checks to run: {', '.join(CHECKS)} or all; or --pack FOLDER")
    if options.jobs is None:
        options.jobs = 2 if options.dry_run else 1
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: expected 1 or more")
    if options.command and options.out is None and not (options.dry_run or options.list):
        parser.error("--out DIR: missing; name a folder for the results")
    return options


def chosen(command: str, only: Sequence[str] | None) -> list[Check]:
    """Return the checks of a command, or those of them that are named.

    Raises:
        KitError: There is no such check.
    """
    known = {check.name: check for name, checks in CHECKS.items() if command in (name, "all") for check in checks}
    strangers = [name for name in only or () if name not in known]
    if strangers:
        raise KitError(f"--only {' '.join(strangers)}: no such check in {command}; there are {', '.join(known)}")
    return [known[name] for name in only] if only else list(known.values())


def run_checks(checks: Sequence[Check], options: argparse.Namespace, work: Path) -> int:
    """Run checks, ``options.jobs`` at a time; return the exit status.

    Raises:
        KitError: There is no GPU, or no megatron-core.
    """
    end_s = time.monotonic() + options.deadline
    environment = _environment(options, work)
    facts = _import_once(environment) if options.dry_run else _ask(environment)
    if facts["gpu"] is None and not options.dry_run:
        raise KitError(
            f"torch finds no GPU ({facts['versions']}); run this where there is one, or add --dry-run for a CPU"
        )
    facts["gpu"] = facts["gpu"] or "CPU (dry run)"
    results = Results(options.out, checks, facts, find_commit(options.carried))
    print(f"{facts['gpu']}, {facts['versions']}, commit {results.commit}", flush=True)

    waiting, running = list(checks), []
    try:
        while waiting or running:
            while waiting and len(running) < options.jobs:
                check, left_s = waiting.pop(0), end_s - time.monotonic()
                if left_s >= LEAST_S:
                    running.append(Running(check, options.dry_run, work, environment, left_s))
                else:
                    results.add(check, "not run", f"no time was left of {options.deadline:g} s")
            for each in list(running):
                if each.is_over():
                    running.remove(each)
                    results.add(each.check, *each.outcome())
            time.sleep(_POLL_S)
    finally:
        for each in running:
            each.end()
    mine = results.mine()
    print(", ".join(f"{sum(row['status'] == status for row in mine)} {status}" for status in STATUSES), flush=True)
    return int(any(row["status"] != "passed" for row in mine))


class Forked(ForkProcess):
    """A process forked from this one, which is asked as one of ``subprocess`` is."""

    def poll(self) -> int | None:
        """Return its exit status; None while it runs."""
        return self.exitcode

    def wait(self) -> None:
        """Wait until it has ended."""
        self.join()


def _be_check(module: str, words: Sequence[str], folder: Path) -> None:
    """Do in this process, which was just forked, as ``python -m module words`` does in a folder."""
    os.setsid()
    os.chdir(folder)
    for name, descriptor in (("out", 1), ("log", 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
    sys.argv = [module, *words]
    importlib.import_module("gpu_checks.common").run(importlib.import_module(module).main)


class Running:
    """A check that runs, in a folder of its own and a session of its own, so that all that it starts ends with it.

    Attributes:
        check: Which.
    """

    def __init__(self, check: Check, is_dry: bool, work: Path, environment: dict[str, str], left_s: float) -> None:
        self.check = check
        # On a CPU it shares the cores with another check, and perhaps with other programs.
        self._deadline_s = min(check.deadline_s * (3 if is_dry else 1), left_s)
        self._began_s = time.monotonic()
        self._folder = work / check.name
        self._folder.mkdir()
        words = [check.argument] if check.argument else []
        self._process: subprocess.Popen[bytes] | Forked
        if is_dry:
            self._process = Forked(target=_be_check, args=(check.module, [*words, "--dry-run"], self._folder))
            self._process.start()
            return
        with (self._folder / "out").open("wb") as out, (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", check.module, *words],
                cwd=self._folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                start_new_session=True,
            )

    def is_over(self) -> bool:
        """Return whether it has ended, or its time has."""
        return self._process.poll() is not None or time.monotonic() > self._began_s + self._deadline_s

    def outcome(self) -> tuple[str, str, float, dict[str, Any], str]:
        """End it; return one of ``STATUSES``, its result in a line, its seconds, its figures, and what it printed."""
        status = self._process.poll()
        seconds = time.monotonic() - self._began_s
        self.end()
        out, log = ((self._folder / name).read_text(encoding="utf-8", errors="replace") for name in ("out", "log"))
        shutil.rmtree(self._folder, ignore_errors=True)
        told = [line for line in log.splitlines() if line.strip()] or ["nothing was printed"]
        try:
            found = json.loads(out.splitlines()[-1])
            text, figures, missing = found["result"], found["figures"], None
        except (ValueError, IndexError, KeyError) as error:
            text, figures, missing = told[-1], {}, error
        if status is None:
            return "out of time", f"after {self._deadline_s:.0f} s: {text}", seconds, figures, log
        if status:
            return "failed", f"exit status {status}: {told[-1]}", seconds, figures, log
        if missing is not None:
            return "failed", f"printed no result as its last line: {missing}", seconds, {}, log
        return "passed" if found["passed"] else "failed", text, seconds, figures, log

    def end(self) -> None:
        """End it, and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # If it had not yet begun its session.
        self._process.kill()
        self._process.wait()


class Results:
    """The results so far, in files after each check.

    Attributes:
        commit: Of the clone.
    """

    def __init__(self, folder: Path | None, checks: Sequence[Check], facts: dict[str, Any], commit: str) -> None:
        self.commit = commit
        self._folder = folder
        self._names = [check.name for check in checks]
        self._machine = f"{facts['gpu']}; {facts['versions']}"
        self._rows: dict[str, dict[str, Any]] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / "results.json").is_file():
                self._rows = json.loads((folder / "results.json").read_text(encoding="utf-8"))

    def mine(self) -> list[dict[str, Any]]:
        """Return the results of the checks of this command that are there."""
        return [self._rows[name] for name in self._names if name in self._rows]

    def add(
        self,
        check: Check,
        status: str,
        result: str,
        seconds: float = 0.0,
        figures: dict[str, Any] | None = None,
        log: str = "",
    ) -> None:
        """Take up a result, print it, and write the files."""
        row = {"machine": self._machine, "commit": self.commit, "status": status, "result": result}
        self._rows[check.name] = {**row, "seconds": round(seconds, 1), "figures": figures or {}}
        print(f"{check.name}: {status} in {seconds:.0f} s: {result}", flush=True)
        if status in ("failed", "out of time"):
            print(*(f"  | {line}\n" for line in log.splitlines()[-15:]), sep="", end="", flush=True)
        if self._folder is not None:
            _replace(self._folder / "results.json", json.dumps(self._rows, indent=1) + "\n")
            _replace(self._folder / "results.md", "\n".join(self.table()) + "\n")
            with (self._folder / "log.txt").open("a", encoding="utf-8") as file:
                file.write(f"==== {check.name}: {status}\n{log}\n")

    def table(self) -> Iterator[str]:
        """Yield the lines of a Markdown table, as docs/gpu.md has it."""
        yield "| check | GPU and versions | commit | result |"
        yield "|---|---|---|---|"
        for name, row in self._rows.items():
            text = f"{row['status']} in {row['seconds']:.0f} s: {row['result']}".replace("|", "\\|")
            yield f"| {name} | {row['machine']} | {row['commit']} | {text} |"


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def _environment(options: argparse.Namespace, work: Path) -> dict[str, str]:
    """Return the variables of the checks; installs what was carried.

    Raises:
        KitError: megatron-core is missing, and was not carried.
    """
    paths = [str(TOOLS), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1" if options.dry_run else "8"}
    if options.dry_run:
        # Kernels run in Triton's interpreter, where there is Triton.
        variables |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    if not _has_megatron():
        wheels = sorted(options.carried.glob("*.whl")) if options.carried else []
        if not wheels:
            raise KitError(
                "megatron-core is not installed; run `python tools/gpu_kit.py --pack FOLDER` where there is a network, "
                "and add --carried FOLDER here"
            )
        target = work / "site"
        command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--no-compile", "--quiet"]
        done = subprocess.run([*command, "--target", target, *wheels], check=False)
        if done.returncode:
            raise KitError(f"pip could not install {', '.join(each.name for each in wheels)}; it says why above")
        paths.append(str(target))
    return {**variables, "PYTHONPATH": os.pathsep.join(paths)}


def _has_megatron() -> bool:
    try:
        return bool(importlib.metadata.version("megatron-core"))
    except importlib.metadata.PackageNotFoundError:
        return False


def _ask(environment: dict[str, str]) -> dict[str, Any]:
    """Return the GPU's name and the versions, found by a process, so that this one holds no GPU memory."""
    command = [sys.executable, "-m", "gpu_checks.common"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise KitError("torch cannot be used; see above")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _import_once(environment: dict[str, str]) -> dict[str, Any]:
    """Import what the checks of a dry run need, so that each is forked from here; return as ``_ask``.

    Importing takes longer than most of these checks. Nothing here may start a thread.

    Raises:
        KitError: torch cannot be used.
    """
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    common = importlib.import_module("gpu_checks.common")
    common.silence_dependencies()
    try:
        for name in ("hybridflow.trainer.trainer", "hybridflow.rollout.engine"):
            importlib.import_module(name)
    except ImportError as error:
        raise KitError(f"torch cannot be used: {error}") from error
    with suppress(ImportError):
        importlib.import_module("transformers.models.qwen2.modeling_qwen2")
    # The collector would look at, and so copy, all that this process has.
    gc.freeze()
    found: dict[str, Any] = common.facts()
    return found


def find_commit(carried: Path | None) -> str:
    """Return the commit of the clone; where git does not know it, that which was packed."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        packed = carried / "commit.txt" if carried else None
        return packed.read_text(encoding="utf-8").strip() if packed and packed.is_file() else "unknown"


def pack(folder: Path, python_version: str) -> None:
    """Download the wheel of the megatron-core that setup.py asks for, and note the commit.

    Raises:
        KitError: pip could not, or the folder is too large.
    """
    pinned = re.search(r'"(megatron-core==[^"]+)"', (ROOT / "setup.py").read_text(encoding="utf-8"))
    assert pinned is not None, "setup.py pins megatron-core"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", folder]
    command += ["--python-version", python_version, "--implementation", "cp"]
    command += [f"--platform={name}_x86_64" for name in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")]
    if subprocess.run([*command, pinned[1]], check=False).returncode:
        raise KitError(f"pip could not download {pinned[1]} for Python {python_version}; it says why above")
    (folder / "commit.txt").write_text(find_commit(None) + "\n", encoding="utf-8")
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if num_bytes > MOST_PACKED_BYTES:
        raise KitError(
            f"{folder} has {num_bytes >> 20} MiB, expected at most {MOST_PACKED_BYTES >> 20}; empty it first"
        )
    print(f"{folder}: {num_bytes / (1 << 20):.1f} MiB; carry it with the clone, and add --carried {folder} there")


if __name__ == "__main__":
    sys.exit(main())
