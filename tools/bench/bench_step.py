#!/usr/bin/env python3
"""Measure a GRPO step beside TRL's and beside what the machine can do, in one run, taking turns.

One random Llama of 4.7 M parameters is made in the format of Hugging Face; both trainers load it. A step is 64 samples,
8 to each prompt of 32 tokens, with a KL to the reference in the loss, on policy, in fp32. Prompts, lengths of responses
and threads are the same for both. Each is a process of its own, which sleeps while the other works. TRL keeps all
activations, other than its default, since this makes it faster; --rival-checkpointing has it as it comes.

Cases: equal (64 tokens in each response), tailed (log-normal lengths), fsdp (as equal, with ours updated under PyTorch
FSDP over its ranks).

The limit of a step is its operations, of all products with weights where no sample shares anything with another, over
the rate of the same products, measured after each round: the best counts. Ours computes a prompt once for all samples
of a micro-batch, so it does less than that.

Examples:
  python tools/bench/bench_step.py --json step.json --check
  python tools/bench/bench_step.py --cases equal --repeats 5 --rival-python ~/trl/bin/python
  python tools/bench/bench_step.py --alone

Exit status: 0 done, 1 with --check a bound was missed, 2 an error that was explained.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from rollout_bench.cases import SIZES
from rollout_bench.engines import TOOLS, Engine, default_python, make_checkpoint
from rollout_bench.report import Bound, bound_lines, name_missed
from step_bench.cases import NUM_PROMPTS, PROMPT_TOKENS, SIZE, lengths_of, step_flops

from hybridflow.errors import ConfigError, HybridflowError
from hybridflow.observe.files import replace_file

CASES = ("equal", "tailed", "fsdp")
_OVER_TRL = {"equal": 2.0, "tailed": 3.0, "fsdp": 1.5}
_OVER_LIMIT, _OTHER_SHARE = 1.6, 0.05
_MODEL_PHASES = ("rollout", "log_probs", "update")
_SETTLE_S = 0.5


def main() -> int:
    """Read the command line; measure and report."""
    options = _parse()
    try:
        if options.json is not None and not options.json.absolute().parent.is_dir():
            raise ConfigError(f"--json {options.json}: no such folder; make it, or name another file")
        with contextlib.ExitStack() as stack:
            work = options.work
            if work is None:
                work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench_step")))
            work.mkdir(parents=True, exist_ok=True)
            results = _measure(options, work)
    except HybridflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        replace_file(options.json, (json.dumps(results, indent=1) + "\n").encode())
    print("\n".join(markdown(results)))
    return name_missed(bounds(results)) if options.check else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    parser.add_argument(
        "--rival-python",
        default=str(TOOLS.parents[1] / ".venv-vllm/bin/python"),
        metavar="PATH",
        help="interpreter of TRL's environment (default: .venv-vllm/bin/python, which tests/support/vllm.sh makes)",
    )
    parser.add_argument("--alone", action="store_true", help="without TRL; our environment needs transformers for it")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, of which the median counts (default: 3)")
    parser.add_argument("--threads", type=int, default=2, help="of each trainer (default: 2)")
    parser.add_argument(
        "--ranks", type=int, default=2, help="of ours, which share the threads, data-parallel (default: 2)"
    )
    parser.add_argument(
        "--micro-batch-tokens", type=int, default=4096, metavar="N", help="of ours, as in a recipe (default: 4096)"
    )
    parser.add_argument(
        "--rival-batch", type=int, default=64, metavar="N", help="samples that TRL learns from at once (default: 64)"
    )
    parser.add_argument(
        "--rival-checkpointing", action="store_true", help="TRL computes activations anew backward, as by default"
    )
    parser.add_argument("--work", type=Path, metavar="DIR", help="model and logs are kept there (default: nowhere)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound is missed, and name it")
    options = parser.parse_args()
    for name in ("repeats", "threads", "ranks", "micro_batch_tokens", "rival_batch"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: expected at least 1")
    if 64 % options.rival_batch:
        parser.error(f"--rival-batch {options.rival_batch}: expected a divisor of 64")
    if options.threads % options.ranks or NUM_PROMPTS % options.ranks:
        parser.error(f"--ranks {options.ranks}: expected a divisor of --threads {options.threads} and of {NUM_PROMPTS}")
    return options


def _measure(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    shape = SIZES[SIZE]
    results: dict[str, Any] = {
        "threads": options.threads,
        "ranks": options.ranks,
        "repeats": options.repeats,
        "cpus": os.cpu_count(),
    }
    results |= {"versions": {}, "rates": [], "cases": {}}
    with contextlib.ExitStack() as stack:
        layouts = dict.fromkeys("fsdp" if case == "fsdp" else "dp" for case in options.cases)
        ours = {layout: stack.enter_context(_started(options, work, "ours", layout)) for layout in layouts}
        rivals = [] if options.alone else [stack.enter_context(_started(options, work, "trl"))]
        for trainer in (*ours.values(), *rivals):
            results["versions"] |= trainer.versions
        for case in options.cases:
            lengths = lengths_of(case)
            trainers = [ours["fsdp" if case == "fsdp" else "dp"], *rivals]
            found: dict[str, Any] = {trainer.name: [] for trainer in trainers}
            for turn in range(1 + options.repeats):
                for trainer in trainers if turn % 2 else trainers[::-1]:
                    time.sleep(_SETTLE_S)
                    run = trainer.ask("step", lengths=list(lengths.responses))
                    if run["num_tokens"] != lengths.num_tokens:
                        raise ConfigError(
                            f"{trainer.name} made {run['num_tokens']} tokens, expected {lengths.num_tokens}; no "
                            "comparison is possible: see its log with --work"
                        )
                    if turn:
                        found[trainer.name].append(run)
                    when = f"round {turn}" if turn else "to warm up"
                    _say(f"{case}, {when}: {trainer.name} {run['step_s']:.2f} s")
                results["rates"].append(trainers[0].ask("rates", shape=vars(shape)))
            results["cases"][case] = {
                "num_samples": len(lengths.responses),
                "num_tokens": lengths.num_tokens,
                "longest": max(lengths.responses),
                "flops": step_flops(shape, lengths),
                "runs": found,
            }
    results["load"] = os.getloadavg()[0]
    return results


@contextlib.contextmanager
def _started(options: argparse.Namespace, work: Path, name: str, layout: str = "dp") -> Iterator[Engine]:
    python = sys.executable if options.alone else options.rival_python
    folder = make_checkpoint(python, SIZE, "float32", work, module=("step_bench.trl", "make"))
    # A word for each id; the first three are no words of a prompt.
    numbers = random.Random(1)
    vocab = SIZES[SIZE].vocab
    prompts = [" ".join(f"w{numbers.randrange(3, vocab)}" for _ in range(PROMPT_TOKENS)) for _ in range(NUM_PROMPTS)]
    settings = {
        "threads": options.threads,
        "ranks": options.ranks,
        "prompts": prompts,
        "micro_batch_tokens": options.micro_batch_tokens,
        "batch": options.rival_batch,
        "checkpointing": options.rival_checkpointing,
        "layout": layout,
    }
    module = ["step_bench.ours"] if name == "ours" else ["step_bench.trl", "train"]
    trainer = Engine(name, default_python(name, python), folder, settings, work / f"{name}-{layout}.log", module)
    try:
        yield trainer
    finally:
        trainer.close()


def bounds(results: dict[str, Any]) -> list[Bound]:
    """What was measured beside what it must be; what was not measured is left out."""
    found = []
    for name, case in results["cases"].items():
        ours_s = _step_s(case, "ours")
        if "trl" in case["runs"]:
            ratio = _step_s(case, "trl") / ours_s
            found.append(Bound(f"{name}: samples/s, ours over TRL", ratio, _OVER_TRL[name], True))
        if name == "equal":
            over = ours_s / _limit_s(results, case)
            found.append(Bound(f"{name}: s of a step, over its operations at the rate", over, _OVER_LIMIT, False))
            worst = max(seconds for phase, seconds in _phases(case).items() if phase not in _MODEL_PHASES) / ours_s
            found.append(Bound(f"{name}: largest share of what is no model", worst, _OTHER_SHARE, False))
    return found


def _step_s(case: dict[str, Any], name: str) -> float:
    return median(run["step_s"] for run in case["runs"][name])


def _limit_s(results: dict[str, Any], case: dict[str, Any]) -> float:
    return float(sum(case["flops"].values()) / max(rate["flop_per_s"] for rate in results["rates"]))


def _phases(case: dict[str, Any]) -> dict[str, float]:
    """Median seconds of ours, by phase."""
    runs = [run["times"] for run in case["runs"]["ours"]]
    return {name[len("time/") : -len("_s")]: median(run[name] for run in runs) for name in runs[0]}


def markdown(results: dict[str, Any]) -> Iterator[str]:
    """The whole report, line by line."""
    versions = ", ".join(f"{name} {version}" for name, version in sorted(results["versions"].items()))
    rates = [max(rate[key] for rate in results["rates"]) / 1e9 for key in ("flop_per_s", "square_flop_per_s")]
    yield (
        f"float32, {results['threads']} threads (ours: {results['ranks']} ranks), {results['cpus']} CPUs, "
        f"load {results['load']:.1f} at the end; "
        f"medians of {results['repeats']} interleaved rounds; {versions}; matrix products of the model "
        f"{rates[0]:.0f} GFLOP/s, square ones {rates[1]:.0f}"
    )
    yield ""
    yield "| lengths | trainer | s a step | samples/s | CPU s | ours over it | times the limit |"
    yield "|---|---|---|---|---|---|---|"
    for name, case in results["cases"].items():
        for trainer, runs in case["runs"].items():
            step_s, cpu_s = _step_s(case, trainer), median(run["cpu_s"] for run in runs)
            over = "" if trainer == "ours" else f"{step_s / _step_s(case, 'ours'):.2f}"
            yield (
                f"| {name} | {trainer} | {step_s:.2f} | {case['num_samples'] / step_s:.1f} | {cpu_s:.2f} | {over} | "
                f"{step_s / _limit_s(results, case):.2f} |"
            )
    yield ""
    yield "| lengths | phase of ours | s | share | GFLOP |"
    yield "|---|---|---|---|---|"
    for name, case in results["cases"].items():
        for phase, seconds in sorted(_phases(case).items(), key=lambda each: -each[1]):
            flops = f"{case['flops'][phase] / 1e9:.0f}" if phase in case["flops"] else ""
            yield f"| {name} | {phase} | {seconds:.3f} | {seconds / _step_s(case, 'ours'):.1%} | {flops} |"
    yield ""
    yield from bound_lines(bounds(results))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
