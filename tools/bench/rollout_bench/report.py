"""Results as Markdown: every engine beside ours and beside the limit, and the bounds that hybridflow sets itself."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import Any, NamedTuple

CASES = ("equal", "tailed", "prefix", "flops", "first", "memory", "agree")
COMPARED = ("equal", "tailed")

_RATIOS: dict[tuple[str, str], dict[str, float]] = {
    ("vllm", "equal"): {"5m": 3.0, "40m": 1.2, "150m": 0.9},
    ("vllm", "tailed"): {"5m": 3.0, "40m": 1.2, "150m": 0.9},
    ("transformers", "equal"): {"5m": 3.0, "40m": 1.5, "150m": 1.2},
    ("transformers", "tailed"): {"5m": 5.0, "40m": 3.0, "150m": 2.5},
}
_GPU_SIZES = ("0.5b", "1b", "1.5b")
_GPU_RATIO, _GPU_SHARE = 5.0, 0.6
_PREFIX, _FLOPS, _FIRST_S, _AGREE = 0.2, 0.8, 0.050, 1e-5


class Bound(NamedTuple):
    """One line of the table of bounds.

    Attributes:
        what: What is compared.
        found: What was measured.
        bound: What it must be.
        is_least: It must be at least that; else at most.
    """

    what: str
    found: float
    bound: float
    is_least: bool

    @property
    def holds(self) -> bool:
        """False also for what is no number."""
        return self.found >= self.bound if self.is_least else self.found <= self.bound


def tokens_per_s(entry: Mapping[str, Any], case: Mapping[str, Any]) -> float:
    """Median over the runs."""
    return float(case["num_tokens"] / median(run["wall_s"] for run in entry["runs"]))


def limit_share(entry: Mapping[str, Any], case: Mapping[str, Any]) -> float:
    """The part of the limit that was reached."""
    return float(case["limit_s"] / median(run["wall_s"] for run in entry["runs"]))


def ratio(case: Mapping[str, Any], rival: str) -> float:
    """Our tokens per second over a rival's."""
    engines = case["engines"]
    return tokens_per_s(engines["ours"], case) / tokens_per_s(engines[rival], case)


def bounds(results: Mapping[str, Any]) -> list[Bound]:
    """What was measured beside what it must be; what was not measured is left out."""
    is_gpu = results["settings"]["device"] == "cuda"
    found = [
        bound
        for size, model in results["models"].items()
        for name, case in model["cases"].items()
        for bound in (_gpu_bounds if is_gpu else _cpu_bounds)(size, name, case)
    ]
    return [*found, *_alone_bounds(results["alone"])]


def _cpu_bounds(size: str, name: str, case: Mapping[str, Any]) -> Iterator[Bound]:
    for rival in case["engines"]:
        least = _RATIOS.get((rival, name), {}).get(size)
        if least is not None:
            yield Bound(f"{size}, {name} lengths: tokens/s, ours over {rival}", ratio(case, rival), least, True)


def _gpu_bounds(size: str, name: str, case: Mapping[str, Any]) -> Iterator[Bound]:
    if size not in _GPU_SIZES or name != "equal":
        return
    if "transformers" in case["engines"]:
        found = ratio(case, "transformers")
        yield Bound(f"{size}, equal lengths: tokens/s, ours over transformers", found, _GPU_RATIO, True)
    if case["binds"] == "bandwidth":
        found = limit_share(case["engines"]["ours"], case)
        yield Bound(f"{size}, equal lengths: share of the bandwidth limit", found, _GPU_SHARE, True)


def _alone_bounds(alone: Mapping[str, Any]) -> Iterator[Bound]:
    if "prefix" in alone:
        each = alone["prefix"]
        share = each["computed_tokens"] / each["unshared_tokens"]
        yield Bound(
            "8 samples of 512-token prompts: prompt tokens computed, over sharing nothing", share, _PREFIX, False
        )
    if "flops" in alone:
        each = alone["flops"]
        share = each["flop_per_s"] / each["products_flop_per_s"]
        yield Bound(
            f"{each['size']}, decoding a batch of 64: FLOP/s over the best matrix products of its shapes",
            share,
            _FLOPS,
            True,
        )
    for layout, each in alone.get("first", {}).get("layouts", {}).items():
        more_s = each["generate_s"] - each["forward_s"]
        yield Bound(f"{layout}: s to the first token, over one forward", more_s, _FIRST_S, False)
    if "memory" in alone:
        each = alone["memory"]
        share = each["allocated_bytes"] / each["budget_bytes"]
        yield Bound("bytes of the cache over its budget", share, 1.0, False)
        lost = each["num_requests"] - each["num_finished"]
        yield Bound("10 times more requests than fit: not finished", lost, 0, False)
        yield Bound("10 times more requests than fit: other tokens than with room", len(each["wrong_draws"]), 0, False)
    for layout, each in alone.get("agree", {}).get("layouts", {}).items():
        # Nothing compared is nothing shown.
        worst = each["worst"] if each["num_tokens"] else float("nan")
        yield Bound(f"{layout}: largest difference of log-probabilities, rollout and training", worst, _AGREE, False)


def markdown(results: Mapping[str, Any]) -> str:
    """The whole report."""
    settings, lines = results["settings"], []
    versions = ", ".join(f"{name} {version}" for name, version in sorted(results["versions"].items()))
    lines += [
        f"{settings['dtype']}, {settings['threads']} threads, {results['cpus']} CPUs, load {results['load']:.1f} at "
        f"the end; medians of {settings['repeats']} interleaved rounds; {versions}",
        "",
    ]
    for size, model in results["models"].items():
        lines += [*_model_lines(size, model), ""]
    if results["alone"]:
        lines += [*_alone_lines(results["alone"]), ""]
    return "\n".join([*lines, *bound_lines(bounds(results))])


def bound_lines(found: list[Bound]) -> Iterator[str]:
    """The table of bounds, line by line."""
    yield "| bound | found | must be | holds |"
    yield "|---|---|---|---|"
    for bound in found:
        sign = "≥" if bound.is_least else "≤"
        holds = "yes" if bound.holds else "**NO**"
        yield f"| {bound.what} | {bound.found:.3g} | {sign} {bound.bound:g} | {holds} |"


def name_missed(found: Iterable[Bound]) -> int:
    """Name the bounds that do not hold; the exit status that tells of them."""
    missed = [bound.what for bound in found if not bound.holds]
    for what in missed:
        print(f"missed: {what}", file=sys.stderr)
    return int(bool(missed))


def _model_lines(size: str, model: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"**{size}**: {model['parameters'] / 1e6:.2f} M parameters; this machine reads "
        f"{model['machine']['bytes_per_s'] / 1e9:.1f} GB/s and multiplies at "
        f"{model['machine']['flop_per_s'] / 1e9:.0f} GFLOP/s"
    )
    yield ""
    yield "| lengths | engine | tokens/s | ours over it | all first tokens, ms | peak memory, MB | share of the limit |"
    yield "|---|---|---|---|---|---|---|"
    for name, case in model["cases"].items():
        for engine, entry in case["engines"].items():
            over = "" if engine == "ours" else f"{ratio(case, engine):.2f}"
            first_ms, peak_mb = (
                median(run[key] for run in entry["runs"]) * scale
                for key, scale in (("first_s", 1e3), ("peak_bytes", 1e-6))
            )
            yield (
                f"| {name} | {engine}{_how(entry)} | {tokens_per_s(entry, case):,.0f} | {over} | {first_ms:,.0f} | "
                f"{peak_mb:,.0f} | {limit_share(entry, case):.3f} |"
            )
    for name, case in model["cases"].items():
        yield ""
        yield (
            f"{name}: {case['num_requests']} requests, {case['num_tokens']:,} tokens, the longest {case['longest']}; "
            f"limit {case['num_tokens'] / case['limit_s']:,.0f} tokens/s, by {case['binds']}."
        )
        tried = case["engines"].get("transformers", {}).get("tried", [])
        told = [f"{_batch(each)} {_seconds(each)}" for each in tried]
        if told:
            yield f"transformers tried, each once: {'; '.join(told)}."


def _how(entry: Mapping[str, Any]) -> str:
    return f", {_batch(entry['chosen'])}" if "chosen" in entry else ""


def _batch(each: Mapping[str, Any]) -> str:
    return f"batches of {each['batch']}" + (", told the lengths and sorted by them" if each["is_sorted"] else "")


def _seconds(each: Mapping[str, Any]) -> str:
    return f"{each['wall_s']:.1f} s" if each["is_done"] else f"given up after {each['wall_s']:.1f} s"


def _alone_lines(alone: Mapping[str, Any]) -> Iterator[str]:
    yield "| ours alone | size | found |"
    yield "|---|---|---|"
    for name, each in alone.items():
        yield f"| {name} | {each['size']} | {_TOLD[name](each)} |"


def _first(each: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{layout} {found['generate_s'] * 1e3:.1f} ms, a forward {found['forward_s'] * 1e3:.1f}, "
        f"after a change of weights {found['after_weights_s'] * 1e3:.1f}"
        for layout, found in each["layouts"].items()
    )


_TOLD = {
    "prefix": lambda each: (
        f"{each['computed_tokens']:,} of {each['unshared_tokens']:,} prompt tokens computed, "
        f"{each['num_preempted']} preempted"
    ),
    "flops": lambda each: (
        f"{each['flop_per_s'] / 1e9:.1f} GFLOP/s in whole steps, {each['products_flop_per_s'] / 1e9:.1f} in their "
        f"products, {each['best_product_flop_per_s'] / 1e9:.1f} in the best kind of them"
    ),
    "first": _first,
    "memory": lambda each: (
        f"{each['num_finished']} of {each['num_requests']} finished, {each['asked_tokens']:,} tokens with room for "
        f"{each['cache_tokens']:,}, {each['num_preempted']} preemptions, "
        f"{each['allocated_bytes']:,} bytes of {each['budget_bytes']:,}"
    ),
    "agree": lambda each: "; ".join(
        f"{layout} {found['worst']:.1e} of {found['num_tokens']} tokens" for layout, found in each["layouts"].items()
    ),
}
