"""Results as Markdown: each pair and rival, and the bounds that hybridflow sets itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

ONE_SIDED = "ours/shared"
SMALL_GATHER = 0.6
"""Where the limit is under this share of what gather-and-slice receives, moving less is the point."""


class Bound(NamedTuple):
    """One line of the table of bounds.

    Attributes:
        what: What is compared.
        bound: The largest that passes.
        values: One for each pair, or pair and transport; empty where it was not measured.
        is_median: The median must pass, not each.
    """

    what: str
    bound: float
    values: list[float]
    is_median: bool = False

    @property
    def passes(self) -> bool | None:
        """None where nothing was measured."""
        if not self.values:
            return None
        return (median(self.values) if self.is_median else max(self.values)) <= self.bound


def is_exact(results: Sequence[dict[str, Any]]) -> bool:
    """Whether every run of every rival gave the right bits."""
    return all(rival["is_exact"] for result in results for pair in result["pairs"] for rival in pair["rivals"].values())


def bounds(results: Sequence[dict[str, Any]]) -> list[Bound]:
    """What was measured beside what it must be."""
    pairs = [pair for result in results for pair in result["pairs"]]
    ours = [(pair, name, run) for pair in pairs for name, run in pair["rivals"].items() if name.startswith("ours/")]
    found = [
        Bound(
            "received bytes in the plan / limit",
            1.001,
            [_received(pair, run["received_bytes"]) for pair, _, run in ours],
        ),
        Bound(
            "received bytes counted by the kernel / limit (torch)",
            1.001,
            [_received(pair, run["kernel_received_bytes"]) for pair, name, run in ours if name == "ours/torch"],
        ),
        Bound(
            "received bytes as copied / limit (shared, mpi)",
            1.001,
            [_received(pair, run["own_received_bytes"]) for pair, name, run in ours if name != "ours/torch"],
        ),
        Bound(
            "busiest sender / LP limit",
            1.02,
            [
                pair["busiest_sender_bytes"] / pair["busiest_sender_limit_bytes"]
                for pair in pairs
                if pair["busiest_sender_limit_bytes"]
            ],
        ),
        Bound(
            "extra memory / (4 buckets + 4 MB)",
            1.0,
            [max(run["extra_bytes"]) / (4 * pair["bucket_bytes"] + 4e6) for pair, _, run in ours],
        ),
        Bound(
            "extra memory / destination",
            0.10,
            [max(run["extra_bytes"]) / max(pair["destination_bytes"]) for pair, _, run in ours],
        ),
        Bound(
            "messages / (peers + bytes/bucket + pieces of at least 256 KB)",
            1.0,
            [
                max(
                    count / bound for count, bound in zip(run["messages"], pair["message_bounds"], strict=True) if bound
                )
                for pair, name, run in ours
                if name != ONE_SIDED
            ],
        ),
    ]
    for name in dict.fromkeys(name for _, name, _ in ours):
        found += _cpu_bounds(pairs, name)
    found += [
        Bound(
            f"wall, {name} / the run's own bandwidth limit",
            1.6,
            [run["wall_s"] / pair["limit_wall_s"] for pair, each, run in ours if each == name],
        )
        for name in dict.fromkeys(name for _, name, _ in ours)
    ]
    return found


def _cpu_bounds(pairs: Sequence[dict[str, Any]], name: str) -> Iterator[Bound]:
    def ratios(rival: str) -> list[tuple[dict[str, Any], float]]:
        return [
            (pair, pair["rivals"][name]["cpu_s"] / pair["rivals"][rival]["cpu_s"])
            for pair in pairs
            if rival in pair["rivals"] and name in pair["rivals"]
        ]

    each = [ratio for _, ratio in ratios("megatron")]
    if name == ONE_SIDED:
        yield Bound(f"CPU, {name} / megatron", 0.30, each)
    else:
        yield Bound(f"CPU, {name} / megatron: median", 0.75, each, is_median=True)
        yield Bound(f"CPU, {name} / megatron: each", 0.85, each)
    small = [
        ratio
        for pair, ratio in ratios("gather")
        if sum(pair["received_limit_bytes"]) < SMALL_GATHER * sum(pair["rivals"]["gather"]["received_bytes"])
    ]
    yield Bound(f"CPU, {name} / gather where the limit is under {SMALL_GATHER} of its bytes", 0.35, small)
    yield Bound(f"CPU, {name} / dcp", 0.5, [ratio for _, ratio in ratios("dcp")])
    yield Bound(f"CPU, {name} / dtensor", 0.85, [ratio for _, ratio in ratios("dtensor")])


def _received(pair: dict[str, Any], received: Sequence[int]) -> float:
    """The worst rank's ratio to its limit; a rank that needs nothing should get next to nothing."""
    return max(
        (bytes_ / limit for bytes_, limit in zip(received, pair["received_limit_bytes"], strict=True) if limit),
        default=1.0,
    )


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """The whole report."""
    lines = []
    for result in results:
        model = result["model"]
        lines += [
            f"**{result['ranks']} ranks** ({result['ranks_per_node']} a node, started by {result['launcher']}), "
            f"{result['model_bytes'] / 1e6:.0f} MB fp32: {model['num_layers']} layers, hidden {model['hidden_size']}, "
            f"ffn {model['ffn_hidden_size']}, vocabulary {model['vocab_size']}; medians of {result['repeats']} "
            f"interleaved rounds; torch {result['torch']}, megatron-core {result['megatron_core']}, "
            f"{result['cpus']} CPUs, load {result['load']:.1f} at the end",
            "",
        ]
        for pair in result["pairs"]:
            lines += [*_pair_table(pair), ""]
    return "\n".join([*lines, *_bounds_table(results)])


def _pair_table(pair: dict[str, Any]) -> Iterator[str]:
    mb = 1e6
    busiest = pair["busiest_sender_limit_bytes"]
    yield (
        f"{pair['name']}: limit {max(pair['received_limit_bytes']) / mb:.1f} MB received by a rank, "
        + (f"{busiest / mb:.1f} MB sent by the busiest, " if busiest is not None else "")
        + f"{pair['limit_wall_s']:.3f} s at {pair['bandwidth'] / mb:.0f} MB/s a rank; destination "
        f"{max(pair['destination_bytes']) / mb:.1f} MB, bucket {pair['bucket_bytes'] / mb:.2f} MB"
    )
    yield ""
    yield (
        "| rival | wall s | / limit | CPU s | / megatron | received MB | / limit | kernel MB | / limit | "
        "busiest sender MB | extra MB | own count MB | messages | plan ms | exact |"
    )
    yield "|---" * 15 + "|"
    reference = pair["rivals"].get("megatron", {}).get("cpu_s")
    for name, run in pair["rivals"].items():
        planned, kernel = run["received_bytes"], run["kernel_received_bytes"]
        over_tcp = sum(kernel) > sum(pair["received_limit_bytes"]) / 100
        yield (
            "| "
            + " | ".join(
                [
                    name,
                    f"{run['wall_s']:.3f}",
                    f"{run['wall_s'] / pair['limit_wall_s']:.2f}",
                    f"{run['cpu_s']:.3f}",
                    "–" if reference is None else f"{run['cpu_s'] / reference:.2f}",
                    "–" if planned is None else f"{max(planned) / mb:.1f}",
                    "–" if planned is None else f"{_received(pair, planned):.4f}",
                    f"{max(kernel) / mb:.1f}" if over_tcp else "–",
                    f"{_received(pair, kernel):.4f}" if over_tcp else "–",
                    f"{max(run['kernel_sent_bytes']) / mb:.1f}" if over_tcp else "–",
                    f"{max(run['extra_bytes']) / mb:.1f}",
                    "–" if run["own_extra_bytes"] is None else f"{max(run['own_extra_bytes']) / mb:.1f}",
                    "–" if run["messages"] is None else f"{max(run['messages'])}",
                    "–" if run["plan_s"] is None else f"{run['plan_s'] * 1e3:.1f}",
                    "yes" if run["is_exact"] else "**NO**",
                ]
            )
            + " |"
        )


def _bounds_table(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| what | must | median | worst | pass |"
    yield "|---|---|---|---|---|"
    yield f"| values | bit-exact | | | {'yes' if is_exact(results) else '**NO**'} |"
    for bound in bounds(results):
        if bound.values:
            verdict = "yes" if bound.passes else "**NO**"
            middle, worst = median(bound.values), max(bound.values)
            yield f"| {bound.what} | ≤ {bound.bound:g} | {middle:.4g} | {worst:.4g} | {verdict} |"
