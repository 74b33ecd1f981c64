#!/usr/bin/env python3
"""Measure generating beside other engines and beside what the machine can do, in one run, all taking turns.

One random Llama of each size is made in the format of Hugging Face; all engines load it: hybridflow's on one rank,
transformers (generate, at the static batch that is best for it) and vLLM. The rivals live in another environment; each
engine is a process of its own, which sleeps while another works. Prompts, lengths, number format and threads are the
same for all; no token ends a response early.

Cases beside rivals: equal (64 requests of 32 + 128 tokens) and tailed (256 requests, log-normal responses). Cases of
ours alone: prefix (samples share their prompt), flops (decoding beside its matrix products), first (time to a first
token on 4 ranks), memory (10 times more requests than the cache holds), agree (log-probabilities of rollout and
training in every layout of 1, 2 and 4 ranks). First and agree run on CPUs also where there are GPUs.

Static batches are tried once, as requests come and sorted by lengths that transformers is told beforehand; the fastest
is its rival run. Time to a first token is that of all requests of the case, each asked for one token. Peak memory is
VmHWM over what the process had before it loaded the model. The limit is the larger of FLOPs over the best measured
matrix product, and bytes of weights, keys and values over the measured bandwidth.

Where torch finds a GPU: bf16, sizes from 0.5b to 8b, peak memory as torch counts it, and vLLM with its CUDA graphs.
This part has not been run yet.

Examples:
  python tools/bench/bench_rollout.py --json rollout.json --check
  python tools/bench/bench_rollout.py --dry-run
  python tools/bench/bench_rollout.py --models 5m --cases equal --rivals vllm --rivals-python ~/vllm/bin/python
  python tools/bench/bench_rollout.py --cases prefix memory agree --alone 5m

Exit status: 0 done, 1 with --check a bound was missed, 2 an error that was explained.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout_bench.cases import (
    CONTEXT,
    CPU_SIZES,
    GPU_SIZES,
    SIZES,
    Lengths,
    Shape,
    equal_lengths,
    prompt_index_prompts,
    tailed_lengths,
    work_of,
)
from rollout_bench.engines import TOOLS, Engine, EngineError, default_python, make_checkpoint
from rollout_bench.ranks import layouts_of, measure_on_ranks
from rollout_bench.report import CASES, COMPARED, bounds, markdown, name_missed

from hybridflow.errors import ConfigError, HybridflowError
from hybridflow.launch.local import run_local
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.observe.files import replace_file
from hybridflow.parallel.start import find_start

RIVALS = ("transformers", "vllm")
_RANKS = {"first": (4,), "agree": (1, 2, 4)}
_ALONE = {
    # Bounds name 150m for flops; eight layers can be cut into four stages.
    "cpu": {"prefix": "5m", "flops": "150m", "first": "40m", "memory": "5m", "agree": "40m"},
    "cuda": {"prefix": "0.5b", "flops": "1.5b", "first": "40m", "memory": "0.5b", "agree": "40m"},
}
_SAME_LOG_PROB = {"float32": 1e-3, "bfloat16": 0.1}
"""Engines have the same weights if the log-probabilities of a likeliest token differ by no more."""

_SETTLE_S = 0.5
"""So long threads that wait for work may go on spinning (Intel's OpenMP: 0.2 s), which would disturb who is next."""


def main() -> int:
    """Read the command line; measure, or be one of the ranks that are measured."""
    options = _parse()
    try:
        if options.part is not None:
            return _be_a_rank(options)
        device = _find_device()
        settings = _settings(options, device)
        _complete(options, device)
        if options.dry_run:
            print("\n".join(_plan(options, settings)))
            return 0
        with contextlib.ExitStack() as stack:
            work = options.work
            if work is None:
                work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench_rollout")))
            work.mkdir(parents=True, exist_ok=True)
            results = _measure(options, settings, work)
    except HybridflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(markdown(results))
    return name_missed(bounds(results)) if options.check else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=SIZES,
        metavar="SIZE",
        help=f"for the rivals' cases: {' '.join(SIZES)} (default: 5m 40m 150m; on a GPU 0.5b 1.5b)",
    )
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=f"of {' '.join(CASES)}"
    )
    parser.add_argument("--rivals", nargs="*", choices=RIVALS, default=list(RIVALS), help="default: both")
    parser.add_argument(
        "--rivals-python",
        default=str(TOOLS.parents[1] / ".venv-vllm/bin/python"),
        metavar="PATH",
        help="interpreter of their environment (default: .venv-vllm/bin/python, which tests/support/vllm.sh makes)",
    )
    parser.add_argument("--alone", choices=SIZES, metavar="SIZE", help="for ours alone (default: each case its own)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, of which the median counts (default: 3)")
    parser.add_argument("--threads", type=int, default=2, help="of each engine (default: 2)")
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=[256, 128, 64],
        metavar="N",
        help="static batches that transformers tries (default: 256 128 64)",
    )
    parser.add_argument("--work", type=Path, metavar="DIR", help="models and logs are kept there (default: nowhere)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound is missed, and name it")
    parser.add_argument("--dry-run", action="store_true", help="say what would be measured, and end")
    # What the ranks that this script brings up are told.
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--layouts", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in ("repeats", "threads", *(["batches"] if min(options.batches) < 1 else [])):
        found = min(options.batches) if name == "batches" else getattr(options, name)
        if found < 1:
            parser.error(f"--{name} {found}: expected at least 1")
    return options


def _find_device() -> str:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _settings(options: argparse.Namespace, device: str) -> dict[str, Any]:
    """What all engines are told alike."""
    return {
        "device": device,
        "dtype": "bfloat16" if device == "cuda" else "float32",
        "threads": options.threads,
        "context": CONTEXT,
        "max_concurrent": 256,
        "repeats": options.repeats,
    }


def _complete(options: argparse.Namespace, device: str) -> None:
    """Choose the sizes that were left out, and see that the rest can be done.

    Raises:
        ConfigError: It cannot.
    """
    if options.models is None:
        options.models = ["0.5b", "1.5b"] if device == "cuda" else ["5m", "40m", "150m"]
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise ConfigError(f"--json {options.json}: no such folder; make it, or name another file")
    if device == "cpu" and (large := [size for size in options.models if size in GPU_SIZES]):
        raise ConfigError(f"--models {' '.join(large)}: for a GPU, which torch does not find; of {' '.join(CPU_SIZES)}")


def _plan(options: argparse.Namespace, settings: dict[str, Any]) -> Iterator[str]:
    """What would be measured, line by line."""
    yield f"{settings['device']}, {settings['dtype']}, {settings['threads']} threads, {settings['repeats']} rounds"
    compared = [case for case in COMPARED if case in options.cases]
    for size in options.models if compared else []:
        shape = SIZES[size]
        yield f"{size}, {shape.num_parameters / 1e6:.2f} M parameters: {', '.join(['ours', *options.rivals])}"
        for case in compared:
            lengths = _lengths(case, settings["device"])
            work = work_of(shape, lengths, _element_bytes(settings))
            yield (
                f"  {case}: {len(lengths.prompts)} requests, {lengths.num_tokens} tokens, the longest "
                f"{max(lengths.responses)}; {work.flops / 1e9:.1f} GFLOP, "
                f"{(work.weight_bytes + work.cache_bytes) / 1e9:.2f} GB"
            )
    for case in options.cases:
        if case not in COMPARED:
            size = _alone_size(options, settings, case)
            on = f" in {' '.join(map(str, _layouts(case, SIZES[size])))}" if case in _RANKS else ""
            yield f"{case}: ours, {size}{on}"


def _measure(options: argparse.Namespace, settings: dict[str, Any], work: Path) -> dict[str, Any]:
    """All cases; the results as they are written to a file."""
    results: dict[str, Any] = {"settings": settings, "versions": {}, "models": {}, "alone": {}}
    results |= {"cpus": os.cpu_count(), "load": os.getloadavg()[0]}
    compared = [case for case in COMPARED if case in options.cases]
    for size in options.models if compared else []:
        results["models"][size] = _compare(options, settings, work, size, compared, results["versions"])
        _keep(options, results)
    for case in (case for case in options.cases if case not in COMPARED):
        size = _alone_size(options, settings, case)
        _say(f"{case}: ours alone, {size}")
        if case in _RANKS:
            found = {"layouts": _on_ranks(options, work, case, size)}
        else:
            with _started(options, settings, work, size, "ours") as ours:
                results["versions"] |= ours.versions
                found = ours.ask("decode", repeats=options.repeats) if case == "flops" else ours.ask(case)
        results["alone"][case] = {"size": size, **found}
        _keep(options, results)
    return results


def _keep(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Write what there is by now: the whole takes hours, and its end may not come."""
    results["load"] = os.getloadavg()[0]
    if options.json is not None:
        replace_file(options.json, (json.dumps(results, indent=1) + "\n").encode())


def _compare(
    options: argparse.Namespace,
    settings: dict[str, Any],
    work: Path,
    size: str,
    cases: list[str],
    versions: dict[str, str],
) -> dict[str, Any]:
    """All engines on one model."""
    shape, found = SIZES[size], {}
    with _started(options, settings, work, size, "ours") as ours:
        _say(f"{size}: what this machine can do")
        machine = ours.ask("machine")
    with contextlib.ExitStack() as stack:
        engines: list[Engine] = []
        for name in ("ours", *options.rivals):
            engines.append(stack.enter_context(_started(options, settings, work, size, name)))
            versions |= engines[-1].versions
        _check_same_weights(engines, shape, settings)
        for case in cases:
            lengths = _lengths(case, settings["device"])
            least = work_of(shape, lengths, _element_bytes(settings))
            rates = machine["flop_per_s"], machine["bytes_per_s"]
            found[case] = {
                "num_requests": len(lengths.prompts),
                "num_tokens": lengths.num_tokens,
                "longest": max(lengths.responses),
                "limit_s": least.limit_s(*rates),
                "binds": least.binds(*rates),
                "engines": _take_turns(options, engines, shape, lengths, f"{size}, {case}"),
            }
    return {"parameters": shape.num_parameters, "machine": machine, "cases": found}


def _take_turns(
    options: argparse.Namespace, engines: list[Engine], shape: Shape, lengths: Lengths, where: str
) -> dict[str, Any]:
    """Rounds of all engines, each with prompts of its own, so that no engine finds those of a round before."""
    found: dict[str, Any] = {engine.name: {"runs": []} for engine in engines}
    how: dict[str, dict[str, Any]] = {engine.name: {} for engine in engines}
    for engine in engines:
        if engine.name == "transformers":
            how["transformers"], tried = _choose_batch(options, engine, shape, lengths, where)
            found["transformers"] |= {"tried": tried, "chosen": how["transformers"]}
    for turn in range(options.repeats):
        prompts, first_prompts = (
            prompt_index_prompts(lengths.prompts, shape.vocab, 2 * turn + each) for each in (1, 2)
        )
        # Whoever is first is not so in the next round.
        start = turn % len(engines)
        for engine in engines[start:] + engines[:start]:
            time.sleep(_SETTLE_S)
            ones = [1] * len(first_prompts)
            first = engine.ask("generate", prompts=first_prompts, lengths=ones, **how[engine.name])
            run = engine.ask("generate", prompts=prompts, lengths=lengths.responses, **how[engine.name])
            found[engine.name]["runs"].append(
                {"wall_s": run["wall_s"], "first_s": first["wall_s"], "peak_bytes": run["peak_bytes"]}
            )
            _say(f"{where}, round {turn + 1}: {engine.name} {lengths.num_tokens / run['wall_s']:,.0f} tokens/s")
    return found


def _choose_batch(
    options: argparse.Namespace, engine: Engine, shape: Shape, lengths: Lengths, where: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The fastest static batch, and all that were tried, each once.

    One is given up when it is slower than another that takes the requests in the same way.
    """
    num = len(lengths.prompts)
    batches = sorted({min(batch, num) for batch in options.batches}, reverse=True)
    kinds = [{"batch": batch, "is_sorted": False} for batch in batches]
    if len(set(lengths.responses)) > 1:
        # One batch of all has no order.
        kinds += [{"batch": batch, "is_sorted": True} for batch in batches if batch < num]
    if len(kinds) == 1:
        return kinds[0], []
    prompts = prompt_index_prompts(lengths.prompts, shape.vocab, 0)
    best_s: dict[bool, float] = {}
    tried = []
    for how in kinds:
        most_s = best_s.get(how["is_sorted"])
        run = engine.ask("generate", prompts=prompts, lengths=lengths.responses, **how, most_s=most_s)
        if run["is_done"]:
            best_s[how["is_sorted"]] = run["wall_s"]
        tried.append({**how, "is_done": run["is_done"], "wall_s": run["wall_s"]})
        _say(f"{where}: transformers, batches of {how['batch']}{', sorted' * how['is_sorted']}: {run['wall_s']:.1f} s")
    best = min((each for each in tried if each["is_done"]), key=lambda each: each["wall_s"])
    return {"batch": best["batch"], "is_sorted": best["is_sorted"]}, tried


def _check_same_weights(engines: list[Engine], shape: Shape, settings: dict[str, Any]) -> None:
    """All engines think alike of what comes after a prompt; also the first run of each, which prepares much.

    Raises:
        EngineError: They do not.
    """
    (prompt,) = prompt_index_prompts([32], shape.vocab, 0)
    found = {}
    for engine in engines:
        found[engine.name] = engine.ask("probe", prompt=prompt)["log_prob"]
        warm = prompt_index_prompts([32] * 8, shape.vocab, 0)
        batch = {"batch": 8, "is_sorted": False} if engine.name == "transformers" else {}
        engine.ask("generate", prompts=warm, lengths=[8] * 8, **batch)
    if max(found.values()) - min(found.values()) > _SAME_LOG_PROB[settings["dtype"]]:
        told = ", ".join(f"{name} {value:.6f}" for name, value in found.items())
        raise EngineError(
            f"log-probabilities of the likeliest next token: {told}; expected the same of the same weights"
        )


@contextlib.contextmanager
def _started(
    options: argparse.Namespace, settings: dict[str, Any], work: Path, size: str, name: str
) -> Iterator[Engine]:
    """An engine's process with a model, ended afterwards."""
    checkpoint = make_checkpoint(options.rivals_python, size, settings["dtype"], work)
    _say(f"{size}: starting {name}")
    told = {**settings, "cache_gib": _cache_gib(SIZES[size], settings)}
    engine = Engine(name, default_python(name, options.rivals_python), checkpoint, told, work / f"{name}.log")
    try:
        yield engine
    finally:
        engine.close()


def _cache_gib(shape: Shape, settings: dict[str, Any]) -> int:
    """Room for keys and values of all that is asked for at once."""
    per_token = 2 * shape.layers * shape.kv_heads * shape.head * _element_bytes(settings)
    most = max(
        sum(lengths.prompts) + sum(lengths.responses)
        for lengths in (_lengths(case, settings["device"]) for case in COMPARED)
    )
    # A block of each sequence may be almost empty; vLLM's have up to 128 tokens.
    return -(-(most + 128 * settings["max_concurrent"]) * per_token // (1 << 30))


def _on_ranks(options: argparse.Namespace, work: Path, case: str, size: str) -> dict[str, Any]:
    """Bring up ranks on this machine, once for each number of them.

    Raises:
        EngineError: They failed.
    """
    checkpoint = make_checkpoint(options.rivals_python, size, "float32", work)
    found: dict[str, Any] = {}
    for count in _RANKS[case]:
        layouts = [str(each) for each in _layouts(case, SIZES[size]) if each.world_size == count]
        part = work / f"{case}-{count}.json"
        command = ["--part", str(part), "--checkpoint", str(checkpoint), "--layouts", *layouts, "--cases", case]
        status = run_local(
            [*command, "--repeats", str(options.repeats)], num_ranks=count, program=(sys.executable, __file__)
        )
        if status:
            raise EngineError(f"{case}: {count} ranks ended with exit status {status}; what they said is above")
        found |= {layout: each[case] for layout, each in json.loads(part.read_text(encoding="utf-8")).items()}
    return found


def _be_a_rank(options: argparse.Namespace) -> int:
    start = find_start()
    layouts = [ParallelLayout.parse(text) for text in options.layouts]
    found = measure_on_ranks(start, str(options.checkpoint), layouts, options.cases, options.repeats)
    if start.rank == 0:
        options.part.write_text(json.dumps(found), encoding="utf-8")
    return 0


def _layouts(case: str, shape: Shape) -> list[ParallelLayout]:
    return [
        layout for count in _RANKS[case] for layout in layouts_of(count, layers=shape.layers, kv_heads=shape.kv_heads)
    ]


def _alone_size(options: argparse.Namespace, settings: dict[str, Any], case: str) -> str:
    chosen: str | None = options.alone
    return _ALONE[settings["device"]][case] if chosen is None else chosen


def _lengths(case: str, device: str) -> Lengths:
    return equal_lengths(device) if case == "equal" else tailed_lengths()


def _element_bytes(settings: dict[str, Any]) -> int:
    return 2 if settings["dtype"] == "bfloat16" else 4


def _say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
