"""Every way to cut a model over eight ranks: each axis alone, and all pairs of values of two axes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from tests.multi.test_layout_invariance import LARGE, OTHERS, SMALL, Case, Findings, check, compute_all
from tests.support.ranks import run_ranks

# Sixteen layers for two chunks on each of eight stages, and as many heads, groups and experts as ranks.
DENSE = ModelConfig(
    num_layers=16,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=8,
    max_context=48,
    vocab_divisible_by=4,
    qkv_bias=True,
)
# Eight layers: half the time, and the dense model has two chunks on each of eight stages.
EXPERTS = replace(
    DENSE,
    num_layers=8,
    qkv_bias=False,
    ffn_hidden_size=16,
    qk_norm=True,
    num_experts=8,
    experts_per_token=2,
    num_query_groups=4,
)
OTHERS |= {"dense of 16 layers": DENSE, "experts of 8 layers": EXPERTS}

SIZES = (1, 2, 4, 8)
AXES: dict[str, tuple[Any, ...]] = {
    "tp": SIZES,
    "pp": SIZES,
    "cp": SIZES,
    "ep": SIZES,
    "etp": SIZES,
    "vpp": (1, 2),
    "sequence_parallel": (True, False),
    "recompute": ("none", "selective", "full"),
    "distributed": (True, False),
    "micro_batch_tokens": (SMALL, LARGE),
}
Choice = dict[str, Any]


def choices(has_experts: bool) -> Iterator[Choice]:
    """Every combination that can be trained."""
    for values in itertools.product(*AXES.values()):
        choice = dict(zip(AXES, values, strict=True))
        tp, pp, cp = choice["tp"], choice["pp"], choice["cp"]
        if 8 % (tp * pp * cp) or (8 // pp) % (choice["ep"] * choice["etp"]):
            continue
        if has_experts and pp * choice["vpp"] > EXPERTS.num_layers:
            continue
        plain = choice["ep"] == 1 and choice["etp"] == tp
        if (has_experts or plain) and (pp > 1 or choice["vpp"] == 1) and (tp > 1 or choice["sequence_parallel"]):
            yield choice


def pairs_of(choice: Choice) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(sorted(choice.items(), key=str), 2))


def covering(has_experts: bool) -> list[Choice]:
    """Few combinations in which every pair of values is that can be: each time the one with the most new pairs."""
    every = [(choice, pairs_of(choice)) for choice in choices(has_experts)]
    missing = set().union(*(pairs for _, pairs in every))
    found = []
    while missing:
        choice, pairs = max(every, key=lambda each: len(each[1] & missing))
        found.append(choice)
        missing -= pairs
    return found


def alone(has_experts: bool) -> list[Choice]:
    """Each axis over all ranks and no other, beside replicas for those that add no ranks."""
    usual = dict(vpp=1, sequence_parallel=True, recompute="none", distributed=True, micro_batch_tokens=SMALL)
    plain = dict(tp=1, pp=1, cp=1, ep=1, etp=1)
    found = [{**plain, **usual}, {**plain, **usual, "tp": 8, "etp": 8}, {**plain, **usual, "pp": 8}]
    found += [{**plain, **usual, "cp": 8}, {**plain, **usual, "tp": 8, "etp": 8, "sequence_parallel": False}]
    found += [{**plain, **usual, "pp": pp, "vpp": 2} for pp in ((2, 4) if has_experts else (2, 4, 8))]
    found += [{**plain, **usual, "recompute": way} for way in ("selective", "full")]
    if has_experts:
        found += [{**plain, **usual, axis: size} for axis in ("ep", "etp") for size in (2, 4, 8)]
    return found


def case_of(choice: Choice, model: str) -> Case:
    known = {axis: choice[axis] for axis in ("tp", "pp", "cp", "vpp", "sequence_parallel")}
    dp = 8 // (choice["tp"] * choice["pp"] * choice["cp"])
    if "experts" in model:
        known |= {"ep": choice["ep"], "etp": None if choice["etp"] == choice["tp"] else choice["etp"]}
    return Case(
        layout=ParallelLayout(dp=dp, **known),
        # The critic goes through the same code.
        algorithm="ppo" if choice["recompute"] == "selective" else "grpo",
        model=model,
        micro_batch_tokens=choice["micro_batch_tokens"],
        distributed=choice["distributed"],
        recompute=choice["recompute"],
    )


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, str], Findings]:
    """What one rank computes."""
    keys = list(itertools.product(("ppo", "grpo"), OTHERS))
    cases = [Case(layout=ParallelLayout(), algorithm=algorithm, model=model) for algorithm, model in keys]
    (found,) = run_ranks(compute_all, 1, cases)
    return dict(zip(keys, found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        "dense of 16 layers",
        "experts of 8 layers",
    ],
)
def test_each_axis_alone_and_all_pairs_compute_what_one_rank_computes(model, expected):
    has_experts = "experts" in model
    chosen = [*alone(has_experts), *covering(has_experts)]
    together = set().union(*map(pairs_of, chosen))
    assert together >= set().union(*map(pairs_of, choices(has_experts)))
    check(8, [case_of(choice, model) for choice in chosen], expected, deadline_s=1200.0)
